"""Attention: statistics of its rows, forward moments and gradients.

`self_attention` has the components, `projections` the law of the logits and the weights' gradients,
`laws` exchangeable keys, `layers` all resolutions, `response` the linearisation; `kernels/` is
the closure for any kernel, `softmax/` tabulated statistics of a row.

Start with `self_attention`, then `laws`.
"""
