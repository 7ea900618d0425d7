"""Statistics of a tensor's entries, and whether they are those of a stated variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import optional

with optional("torch", "torch"):
    import torch
    from torch import Tensor

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


BLOCK = 1 << 16
"""Entries whose moments are taken at once."""


@dataclass(frozen=True)
class EntryMoments:
    """Moments of the entries of one matrix or vector.

    Attributes:
        count: entries.
        mean: of them.
        square: their mean square.
        kurtosis: E w^4 / (E w^2)^2, nan where all are 0.
        peak: largest magnitude over the root mean square.
        zeros: share that is exactly 0.
    """

    count: int
    mean: float
    square: float
    kurtosis: float
    peak: float
    zeros: float

    @classmethod
    def of(cls, tensor: Tensor) -> EntryMoments:
        """Of a tensor with at least one entry, in double precision."""
        flat = tensor.detach().reshape(-1)
        total = second = fourth = peak = 0.0
        nonzero = 0
        for block in flat.split(BLOCK):  # a double copy of the whole would leave the cache
            w = block.double()
            squares = w.square()
            total += float(w.sum())
            second += float(squares.sum())
            fourth += float(squares @ squares)
            peak = max(peak, float(squares.max()))
            nonzero += int(torch.count_nonzero(block))
        count = flat.numel()
        square = second / count
        return cls(
            count=count,
            mean=total / count,
            square=square,
            kurtosis=fourth / count / square**2 if square > 0 else math.nan,
            peak=math.sqrt(peak / square) if square > 0 else math.nan,
            zeros=1 - nonzero / count,
        )

    @property
    def spread(self) -> float:
        """Relative standard error of the mean square as an estimate: sqrt((kurtosis - 1) / n)."""
        if not math.isfinite(self.kurtosis):
            return math.nan
        return math.sqrt(max(self.kurtosis - 1, 1e-3) / self.count)

    @property
    def distribution(self) -> str:
        """What the entries look like, in words; the kurtosis of a sample decides.

        A kurtosis is 3 for a normal, 1.8 for a uniform, and that of a normal cut at two of its
        deviations in between; its standard error is about sqrt(24 / n).
        """
        if not math.isfinite(self.kurtosis):
            return "zero"
        error = 4 * math.sqrt(24 / self.count)
        cut = TRUNCATION / math.sqrt(truncated_variance(TRUNCATION))
        known = (
            ("uniform", 1.8, self.peak < math.sqrt(3) * 1.001),
            ("truncated", truncated_kurtosis(TRUNCATION), self.peak < cut * 1.05),
            ("normal", 3.0, True),
        )
        for name, kurtosis, fits in known:
            if fits and abs(self.kurtosis - kurtosis) < max(error, 0.05):
                return name
        return f"kurtosis {self.kurtosis:.2f}"
