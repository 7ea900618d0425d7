"""Kernel operations: moments of layers whose state is resolved by token."""

from moments.kernels.attention import AttentionGradient, KernelAttention

__all__ = ["AttentionGradient", "KernelAttention"]
