"""Attention: statistics of its rows, forward moments and gradients.

`self_attention` has the components, `projections` the law of the logits and the weights' gradients,
`layers` all resolutions, `response` the linearisation; `kernels/` is the closure for any kernel,
`softmax` exact statistics of a row of exchangeable keys.

Start with `self_attention`, then `layers`.
"""
