"""A plain torch twin of the declared model, which knows none of the theory's laws.

It is meant as an independent witness: fresh weights per draw, Gaussian or embedded input, a
gradient injected at the top or that of a loss, and moments measured on the way.
"""
