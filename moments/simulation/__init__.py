"""A plain torch twin of the declared model, which knows none of the theory's laws.

It is meant as an independent witness: fresh Gaussian weights per draw, Gaussian or embedded
input, a gradient injected at the top, and moments measured on the way.
"""
