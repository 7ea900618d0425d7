"""Moments of a tensor's entries, and recognition of their distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor

from ..show.expected import TRUNCATION

BLOCK = 1 << 16
"""Entries converted to double precision at a time."""


@dataclass(frozen=True)
class EntryMoments:
    """Moments of the entries of one matrix or vector.

    Attributes:
        count: number of entries.
        square: mean square.
        kurtosis: E w^4 / (E w^2)^2; nan if all are 0.
        peak: largest magnitude over the root mean square.
    """

    count: int
    mean: float
    square: float
    kurtosis: float
    peak: float

    @classmethod
    def of(cls, tensor: Tensor) -> EntryMoments:
        """The moments of a tensor with at least one entry, in double precision."""
        flat = tensor.detach().reshape(-1)
        total = second = fourth = peak = 0.0
        for block in flat.split(BLOCK):  # blocks that fit the cache
            w = block.double()
            squares = w.square()
            total += float(w.sum())
            second += float(squares.sum())
            fourth += float(squares @ squares)
            peak = max(peak, float(squares.max()))
        count = flat.numel()
        square = second / count
        kurtosis = fourth / count / square**2 if square > 0 else math.nan
        peak = math.sqrt(peak / square) if square > 0 else math.nan
        return cls(count, total / count, square, kurtosis, peak)

    @property
    def spread(self) -> float:
        """Relative standard error of the mean square as an estimate: sqrt((kurtosis - 1) / n)."""
        if not math.isfinite(self.kurtosis):
            return math.nan
        return math.sqrt(max(self.kurtosis - 1, 1e-3) / self.count)

    @property
    def distribution(self) -> str:
        """The distribution: "normal", "uniform", "truncated" (a normal cut at two of its standard
        deviations), "zero", "kurtosis 4.20" for any other, or "" for too few entries.

        A name is given if the other two are excluded, each with a probability `MISTAKEN` of error:
        by the kurtosis, whose standard error is known, by an entry beyond the ends of the
        distribution, or by a largest entry too far within them.
        """
        if not math.isfinite(self.kurtosis):
            return "zero"
        if self.count < FEWEST:
            return ""
        possible = [shape.name for shape in SHAPES if shape.fits(self)]
        if len(possible) > 1:
            return ""
        return possible[0] if possible else f"kurtosis {self.kurtosis:.2f}"


class Shape(NamedTuple):
    """A distribution of variance 1: E x^2, x^4, x^6 and x^8, the largest magnitude `end`, and the
    probability `within` of a smaller magnitude than its argument.
    """

    name: str
    moments: tuple[float, float, float, float]
    end: float
    within: Callable[[float], float]

    def fits(self, entries: EntryMoments) -> bool:
        """Whether entries may have this distribution.

        The kurtosis m4 / m2^2 of n entries has the variance (m8 - 4 m4 m6 + 4 m4^3 - m4^2) / n, by
        the delta method, the root mean square (m4 - 1) / (4 n).
        """
        _, m4, m6, m8 = self.moments
        error = math.sqrt((m8 - 4 * m4 * m6 + 4 * m4**3 - m4**2) / entries.count)
        size = 1 + FAR * math.sqrt((m4 - 1) / (4 * entries.count))
        smaller = self.within(entries.peak * size)
        return (
            abs(entries.kurtosis - m4) <= FAR * error + BIAS / entries.count
            and entries.peak <= self.end * size
            and (smaller <= 0 or entries.count * math.log(min(smaller, 1.0)) >= math.log(MISTAKEN))
        )


def _normal(cut: float) -> Shape:
    """A normal distribution truncated at +-cut, scaled to variance 1.

    By parts, E x^(k+2) = (k + 1) E x^k - 2 cut^(k+1) phi(cut) / (2 Phi(cut) - 1).
    """
    whole = math.erf(cut / math.sqrt(2))
    edge = 2 * math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi) / whole
    raw = [1.0]
    for k in (0, 2, 4, 6):
        tail = edge * cut ** (k + 1) if math.isfinite(cut) else 0.0
        raw.append((k + 1) * raw[-1] - tail)
    size = math.sqrt(raw[1])
    scaled = tuple(m / size**k for m, k in zip(raw[1:], (2, 4, 6, 8), strict=True))
    name = "truncated" if math.isfinite(cut) else "normal"
    return Shape(name, scaled, cut / size, lambda x: math.erf(x * size / math.sqrt(2)) / whole)  # type: ignore[arg-type]


MISTAKEN = 1e-5
"""Probability that a test excludes the true distribution."""

FEWEST = 256
"""Entries below which no distribution is named: their kurtosis is not Gaussian."""

FAR = NormalDist().inv_cdf(1 - MISTAKEN / 2)
BIAS = 12.0
"""Divided by n, a bound of the bias of the kurtosis of n entries: 6 / n if normal."""

SHAPES = (
    Shape("uniform", (1.0, 9 / 5, 27 / 7, 9.0), math.sqrt(3), lambda x: x / math.sqrt(3)),
    _normal(TRUNCATION),
    _normal(math.inf),
)
