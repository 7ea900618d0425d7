"""Quantisation error of a tensor cast to a low-precision format with a scale per group of entries.

A group of B entries is divided by a scale set by its largest magnitude, rounded to the nearest
number of a format (ties have measure zero) or clipped to its largest number, and multiplied by the
scale again. Let entries be independent and identically distributed, m the largest magnitude of the
group and c(m) the scale. Given m, one entry is m and the other B - 1 are independent below it, so
the mean over a group of any function h of an entry and its cast is

    E_m [ h(m)/B + (1 - 1/B) E[h(x) | |x| < m] ],      P(m < t) = F(t)^B,   F(t) = P(|x| < t).

h(x) is x^2, x Q(x), Q(x)^2 or an indicator. On the rounding cell of a number of the format they all
follow from the moments E[|x|^k; |x| < t], k = 0, 1, 2, at the cell's ends, tabulated once on a fine
grid of the density. The remaining integral over m is Gauss-Legendre in F(m)^B. Derived here; a test
compares it with bitwise casts.

E x^2, E xQ and E Q^2 give the error of a product of two cast operands. With weights independent of
their inputs, y = sum_k w_k x_k has

    E |y_Q - y|^2 / E |y|^2 = q_x q_w - 2 r_x r_w + 1,    q = E Q^2/E x^2,   r = E xQ/E x^2.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Elements:
    """A floating-point format: stored bits of its `mantissa`, exponent of its smallest normal
    number (`lowest`) and its `largest` finite number."""

    mantissa: int
    lowest: int
    largest: float

    @cached_property
    def values(self) -> np.ndarray:
        """All nonnegative numbers of the format, ascending."""
        count = 2**self.mantissa
        top = math.floor(math.log2(self.largest))
        binades = [np.arange(count) * 2.0 ** (self.lowest - self.mantissa)]
        for exponent in range(self.lowest, top + 1):
            binades.append((count + np.arange(count)) * 2.0 ** (exponent - self.mantissa))
        numbers = np.concatenate(binades)
        return numbers[numbers <= self.largest]

    @cached_property
    def ends(self) -> np.ndarray:
        """Ends of the rounding cells of `values`, from 0 to inf: (numbers + 1,)."""
        return np.concatenate([[0.0], (self.values[1:] + self.values[:-1]) / 2, [np.inf]])

    def nearest(self, magnitude: np.ndarray) -> np.ndarray:
        """The nearest number of the format to every magnitude."""
        return np.asarray(self.values[np.searchsorted(self.ends[1:-1], magnitude)])


E4M3 = Elements(3, -6, 448.0)
E5M2 = Elements(2, -14, 57344.0)
E2M1 = Elements(1, 0, 6.0)


class Entries:
    """The distribution of an entry's magnitude |x| on a fine grid.

    Args:
        values: of x, any shape.
        weights: their probabilities, of the same shape; they are normalised.
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray) -> None:
        magnitudes, weights = np.abs(np.ravel(values)), np.ravel(weights) / np.sum(weights)
        self.zeros = float(weights[magnitudes == 0].sum())
        """Probability that x is exactly 0, before any cast."""
        kept = magnitudes > 0
        order = np.argsort(magnitudes[kept])
        at, density = magnitudes[kept][order], weights[kept][order]
        parts = density * at ** np.arange(3)[:, None]
        # half of a grid point's weight lies below it
        below = np.cumsum(parts, axis=-1) - parts / 2
        above = np.cumsum(density[::-1])[::-1] - density / 2
        self._at = np.concatenate([[0.0], at])
        self._below = np.pad(below, ((0, 0), (1, 0)))
        self._tail = np.concatenate([[0.0], -np.log(np.maximum(above, 1e-300))])
        self.square = float(parts[2].sum())

    def moments(self, below: np.ndarray) -> np.ndarray:
        """E[|x|^k; 0 < |x| < t] for k = 0, 1, 2: (3, ...)."""
        return np.stack([np.interp(below, self._at, part) for part in self._below])

    def largest(self, size: int, chance: np.ndarray) -> np.ndarray:
        """Quantiles of the largest of `size` entries."""
        beyond = -np.expm1(np.log(chance) / size)
        return np.asarray(np.interp(-np.log(beyond), self._tail, self._at))


@cache
def gaussian_grid(points: int = 8000, reach: float = 9.0) -> tuple[np.ndarray, np.ndarray]:
    """Values of a standard Gaussian and their weights; an even number of points leaves out 0."""
    at = np.linspace(-reach, reach, points)
    return at, np.exp(-(at**2) / 2)


class Loss(NamedTuple):
    """The error of a cast operand.

    Attributes:
        square: E x^2.
        kept, power: E xQ/E x^2 and E Q^2/E x^2; 1 if x is 0.
        zero, clipped: shares of entries that become 0 and that exceed the largest number.
    """

    square: float
    kept: float
    power: float
    zero: float
    clipped: float

    @property
    def noise(self) -> float:
        """E (Q - x)^2/E x^2."""
        return max(self.power - 2 * self.kept + 1, 0.0)


def decibels(noise: float) -> float | None:
    """The signal-to-noise ratio in dB of a ratio of noise to signal; None if that is no more than
    the rounding of these sums."""
    return -10 * math.log10(noise) if noise > 16 * sys.float_info.epsilon else None


def product_noise(one: Loss, other: Loss) -> float:
    """Noise over signal of a product of two independent operands."""
    if not one.square * other.square:
        return 0.0
    return max(one.power * other.power - 2 * one.kept * other.kept + 1, 0.0)


def mean(losses: list[Loss]) -> Loss:
    """The mean over equally frequent groups."""
    return Loss(*(float(np.mean(part)) for part in zip(*losses, strict=True)))


@cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    at, weights = np.polynomial.legendre.leggauss(count)
    return (at + 1) / 2, weights / 2


NODES = 256
"""Nodes of the integral over the largest entry, a sawtooth by the rounding of scales."""


def loss(
    entries: Entries,
    elements: Elements,
    scale: str,
    size: int,
    tensor_largest: float = 0.0,
    unit: float = 1.0,
) -> Loss:
    """The error of a group of entries.

    Args:
        entries: distribution of an entry.
        elements: format that entries are cast to.
        scale: "any", the largest entry over the largest number; "power of two", that of the largest
            entry over that of the largest number (OCP Microscaling Formats 1.0, section 6.3); or
            "E4M3", as "any", itself cast to E4M3 over one scale of the whole tensor.
        size: entries of a group.
        tensor_largest: the largest magnitude of the whole tensor, for "E4M3".
        unit: scales are those of entries over `unit`, times `unit`.
    """
    if not entries.square:
        return Loss(0.0, 1.0, 1.0, 0.0, 0.0)
    chance, weights = _nodes(NODES)
    largest = entries.largest(size, chance)
    divisor = unit * scales(largest / unit, elements, scale, tensor_largest / unit)
    cells = np.minimum(divisor[:, None] * elements.ends, largest[:, None])
    moments = np.diff(entries.moments(cells), axis=-1)  # (3, nodes, numbers)
    casts = divisor[:, None] * elements.values
    below, _, _ = entries.moments(largest)
    whole, clipped = entries.zeros + below, largest > divisor * elements.largest * (1 + 1e-9)
    unclipped, _, _ = entries.moments(np.minimum(divisor * elements.largest, largest))
    own = divisor * elements.nearest(largest / divisor)
    rest = np.stack(
        [
            moments[2].sum(-1),
            np.sum(casts * moments[1], -1),
            np.sum(casts**2 * moments[0], -1),
            moments[0][:, 0],
            below - unclipped,
        ]
    )
    of_largest = np.stack([largest**2, largest * own, own**2, own == 0.0, clipped])
    means = (of_largest / size + (1 - 1 / size) * rest / whole) @ weights
    square, product, power, zero, beyond = map(float, means)
    return Loss(square, product / square, power / square, zero, beyond)


def cast(values: np.ndarray, elements: Elements, scale: str, size: int) -> tuple[np.ndarray, float]:
    """Cast values (..., n) in groups of `size` along the last axis; the last one may be smaller.

    `scale` as in `loss`, with the largest magnitude of these values for that of the whole tensor.

    Returns:
        The cast values, and the share of them that exceeds the largest number.
    """
    count = values.shape[-1]
    padded = np.pad(values.reshape(-1, count), ((0, 0), (0, -count % size)))
    groups = padded.reshape(-1, size)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    largest = np.where(largest > 0, largest, 1.0)
    unit = scales(largest, elements, scale, float(largest.max()))
    inside = np.abs(groups) / unit
    near = np.copysign(elements.nearest(inside), groups) * unit
    beyond = np.sum(inside > elements.largest * (1 + 1e-9)) / values.size
    return near.reshape(len(padded), -1)[:, :count].reshape(values.shape), float(beyond)


def scales(
    largest: np.ndarray, elements: Elements, scale: str, tensor_largest: float
) -> np.ndarray:
    """Divisors of groups, from their largest entries; arguments as in `loss`."""
    if scale == "any":
        return largest / elements.largest
    if scale == "power of two":
        top = math.floor(math.log2(elements.largest))
        return np.asarray(2.0 ** (np.floor(np.log2(largest)) - top))
    unit = tensor_largest / (elements.largest * E4M3.largest)
    result = unit * E4M3.nearest(largest / elements.largest / unit)
    return np.asarray(np.maximum(result, unit * E4M3.values[1]))
