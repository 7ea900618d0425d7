"""Moments of a standard normal cut at +-c, exactly."""

from __future__ import annotations

import math

TRUNCATION = 2.0
"""Deviations of the parent normal at which "truncated" cuts."""


def truncated_variance(cut: float) -> float:
    """Variance of a standard normal cut at +-cut: 1 - 2 cut phi(cut) / (2 Phi(cut) - 1)."""
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return 1 - 2 * cut * density / math.erf(cut / math.sqrt(2))


def truncated_kurtosis(cut: float) -> float:
    """Kurtosis of a standard normal cut at +-cut: E x^4 = 3 E x^2 - 2 cut^3 phi / (2 Phi - 1)."""
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    second = truncated_variance(cut)
    return (3 * second - 2 * cut**3 * density / math.erf(cut / math.sqrt(2))) / second**2
