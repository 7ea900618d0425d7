"""Softmax attention on any kernel of tokens.

By token, from below: `logits` and `row_statistics` say what rows look like, `joint_laws` what two
rows have in common, `row_groups` sums that over many rows by token, `rows` says what a layer
makes of it and what finite widths add, and `attention` is the layer by token. `position_attention`
is the same on classes of positions, every class a row of its own, and `relative_positions` what
stands between them; `exact_rows` and `finite_rows` are exact rows of exchangeable logits, the
reference of both.

Start with `attention`, then `rows`.
"""

from .attention import KernelAttention
from .logits import Rotation
from .rows import Paths

__all__ = ["KernelAttention", "Paths", "Rotation"]
