"""Kernel operations: moments of layers whose state is resolved by token."""

from moments.kernels.attention import AttentionGradient, KernelAttention
from moments.kernels.heads import HeadAverage, RelativeBiasNoise, few_points
from moments.kernels.rotation import Rotation

__all__ = [
    "AttentionGradient",
    "HeadAverage",
    "KernelAttention",
    "RelativeBiasNoise",
    "Rotation",
    "few_points",
]
