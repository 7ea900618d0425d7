"""Softmax attention on any kernel of tokens.

Token by token, from the bottom up: `logits` and `row_statistics` describe single rows, `joint_laws`
pairs of rows, `row_groups` sums over many rows, `rows` output and gradient factors with corrections
for finite widths, `attention` the layer. `position_attention` is the layer on classes of positions,
each of them a row, with `relative_positions` for rotation and biases. `exact_rows` and
`finite_rows` are exact rows of exchangeable logits, to which both are calibrated.

Start with `attention`, then `rows`.
"""

from .attention import KernelAttention
from .logits import Rotation
from .rows import Paths

__all__ = ["KernelAttention", "Paths", "Rotation"]
