"""Statistics of a tensor's entries, and whether they are those of a stated variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor

from ..show.expected import TRUNCATION

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
    """

    count: int
    mean: float
    square: float
    kurtosis: float
    peak: float

    @classmethod
    def of(cls, tensor: Tensor) -> EntryMoments:
        """Of a tensor with at least one entry, in double precision."""
        flat = tensor.detach().reshape(-1)
        total = second = fourth = peak = 0.0
        for block in flat.split(BLOCK):  # a double copy of the whole would leave the cache
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
        """What the entries look like: "normal", "uniform", "truncated" (a normal cut at two of its
        deviations), "zero", "kurtosis 4.20" where it is none of these, "" where so few entries do
        not tell.

        A name is given where the other two are ruled out, each with a probability of `MISTAKEN` to
        rule out what is right: by the kurtosis, whose standard error under each is known, by an
        entry beyond its ends, and by entries that stay too far within them.
        """
        if not math.isfinite(self.kurtosis):
            return "zero"
        if self.count < FEWEST:
            return ""
        left = [shape.name for shape in SHAPES if shape.fits(self)]
        if len(left) > 1:
            return ""
        return left[0] if left else f"kurtosis {self.kurtosis:.2f}"


class Shape(NamedTuple):
    """A distribution of variance 1: E x^2, x^4, x^6 and x^8, the largest magnitude, and the
    probability of one below its argument.
    """

    name: str
    moments: tuple[float, float, float, float]
    end: float
    within: Callable[[float], float]

    def fits(self, entries: EntryMoments) -> bool:
        """Whether entries may be of this shape.

        The kurtosis m4 / m2^2 of n entries has the variance (m8 - 4 m4 m6 + 4 m4^3 - m4^2) / n, by
        the delta method, the root mean square (m4 - 1) / (4 n).
        """
        _, m4, m6, m8 = self.moments
        error = math.sqrt((m8 - 4 * m4 * m6 + 4 * m4**3 - m4**2) / entries.count)
        size = 1 + FAR * math.sqrt((m4 - 1) / (4 * entries.count))
        short = self.within(entries.peak * size)
        return (
            abs(entries.kurtosis - m4) <= FAR * error + BIAS / entries.count
            and entries.peak <= self.end * size
            and (short <= 0 or entries.count * math.log(min(short, 1.0)) >= math.log(MISTAKEN))
        )


def _normal(cut: float) -> Shape:
    """A normal cut at +-cut, scaled to variance 1.

    By parts, E x^(k+2) = (k + 1) E x^k - 2 cut^(k+1) phi(cut) / (2 Phi(cut) - 1).
    """
    whole = math.erf(cut / math.sqrt(2))
    edge = 2 * math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi) / whole
    raw = [1.0]
    for k in (0, 2, 4, 6):
        tail = edge * cut ** (k + 1) if math.isfinite(cut) else 0.0
        raw.append((k + 1) * raw[-1] - tail)
    size = math.sqrt(raw[1])
    of = tuple(m / size**k for m, k in zip(raw[1:], (2, 4, 6, 8), strict=True))
    name = "truncated" if math.isfinite(cut) else "normal"
    return Shape(name, of, cut / size, lambda x: math.erf(x * size / math.sqrt(2)) / whole)  # type: ignore[arg-type]


MISTAKEN = 1e-5
"""Probability that a test rules out the shape that many entries are of."""

FEWEST = 256
"""Entries below which none is given: their kurtosis is far from Gaussian."""

FAR = NormalDist().inv_cdf(1 - MISTAKEN / 2)
BIAS = 12.0
"""Times 1/n, more than the bias of the kurtosis of n entries: 6 if normal, to leading order."""

SHAPES = (
    Shape("uniform", (1.0, 9 / 5, 27 / 7, 9.0), math.sqrt(3), lambda x: x / math.sqrt(3)),
    _normal(TRUNCATION),
    _normal(math.inf),
)
