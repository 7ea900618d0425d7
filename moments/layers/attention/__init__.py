"""Attention: its statistics, and what it does forward and back.

`self_attention` holds the components, `projections` what stands between tokens and logits, `laws`
keys that are alike, `layers` every other resolution, `response` first-order changes; `kernels/` is
the closure for any kernel, `softmax/` tabulated statistics of a row.

Start with `self_attention`, then `laws`.
"""
