"""Kernel operations: moments of layers whose state is resolved by token."""

from .attention import AttentionGradient, KernelAttention
from .heads import HeadAverage, RelativeBiasNoise, few_points
from .rotation import Rotation

__all__ = [
    "AttentionGradient",
    "HeadAverage",
    "KernelAttention",
    "RelativeBiasNoise",
    "Rotation",
    "few_points",
]
