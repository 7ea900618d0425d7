"""Softmax attention on any kernel of tokens.

`row_statistics` describes single rows, `joint_laws` pairs of rows, `rows` output and gradient
factors with corrections for finite widths. `attention` is the layer by token, `position_attention`
on classes of positions, each of them a row; `relative_positions` has rotation and biases.

Start with `attention`, then `rows`.
"""

from .attention import KernelAttention
from .relative_positions import Rotation
from .rows import Paths

__all__ = ["KernelAttention", "Paths", "Rotation"]
