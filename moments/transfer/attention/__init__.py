"""Attention: its statistics, and what it does forward and back.

`self_attention` is the component, `alike` its tokens alike, `by_token` each of them or classes of
positions; `kernels/` the closure for any kernel, `softmax/` exact statistics of a row.

Start with `self_attention`, then `laws`.
"""
