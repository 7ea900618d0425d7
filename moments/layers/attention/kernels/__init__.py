"""Softmax attention on any kernel of tokens.

By token, from below: `logits` and `row_statistics` say what rows look like, `joint_laws` what two
rows have in common, `row_groups` sums that over many rows by token, `closure` puts it together with
what dropout and finite widths add, and `attention` is the layer. `position_attention` is the same
on classes of positions, every class a row of its own, and
`relative_positions` what stands between them; `exact_rows` and `finite_rows` are exact rows of
exchangeable logits, the reference of both.

Start with `attention`, then `closure`.
"""

from .attention import KernelAttention, Paths
from .logits import Rotation

__all__ = ["KernelAttention", "Paths", "Rotation"]
