"""Streams of random numbers and Gaussian tensors with a given token correlation."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator of its own for each `key`, independent of every other key and of global state."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


def exchangeable_normal(
    shape: tuple[int, int, int],
    variance: float,
    correlation: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """Gaussian (batch, L, features): one variance, one covariance for every pair of tokens.

    The covariance (1 - r) I + r 1 1^T over tokens has the eigenvalue 1 + (L - 1) r on the token
    mean and 1 - r off it; scaling white noise by their roots serves all r from -1/(L - 1) to 1.
    """
    seq_len = shape[1]
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    shared = noise.mean(1, keepdim=True)
    along = math.sqrt(max(1 + (seq_len - 1) * correlation, 0.0))
    across = math.sqrt(1 - correlation)
    return math.sqrt(variance) * (across * (noise - shared) + along * shared)


def dropout(x: Tensor, drop_prob: float, generator: torch.Generator) -> Tensor:
    """Zero entries with probability `drop_prob` and scale the kept ones by 1/(1 - drop_prob)."""
    if drop_prob == 0:
        return x
    kept = torch.empty_like(x, requires_grad=False).bernoulli_(1 - drop_prob, generator=generator)
    return x * kept.div_(1 - drop_prob)
