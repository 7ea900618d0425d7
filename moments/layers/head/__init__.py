"""From the last layer to the loss, and the gradient that comes back.

Start with `output`.
"""
