"""Earlier points of the stream added to the input of a layer: x <- r x + sum_k s_k p_k.

p_0 is the input of layer 1, p_n the output of layer n. The branches between two of these points
have their own random matrices, so every point and the stream are sums c_i S_i of independent parts
with declared factors; kernels are sums of c_i^2 K_i, from which those of the parts follow. In the
backward pass of K' = r^2 K + sum_k m_k K_k the gradient's kernel at p_k is m_k times that of x'.
See docs/theory/streams.md, Earlier layers added again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Component
from ..engine.fluctuation import overlap_covariance
from ..engine.response import sum_of
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.trace import Record, Run
from ..model.transformer import Transformer

LEAST = 1e-12
"""Factors below are rounding errors."""


@dataclass(frozen=True)
class InputMix(Component):
    """r x + sum_k s_k p_k.

    Attributes:
        label: site name in a trace.
        keep: r.
        points: numbers of the layers after which the p_k are.
        shares: m_k in K'.
        fourth: the same for fourth powers of the factors.
        crosses: coefficients of |p_k|^2 in x . (x' - r x).
        carries: amplitude of x_0 in x' over that in x.
    """

    label: str
    keep: float
    points: tuple[int, ...]
    shares: tuple[float, ...]
    fourth: tuple[float, ...]
    crosses: tuple[float, ...]
    carries: float

    rescales = True

    def propagate(self, signal: Signal, run: Run) -> Record:
        points = [run.kept[number] for number in self.points]
        centred = None
        if signal.centred is not None and all(point.centred is not None for point in points):
            centred = self._sum(signal.centred, [point.centred for point in points])
        kernel = self._sum(signal.kernel, [point.kernel for point in points])
        output = signal.replace(
            kernel=kernel, centred=centred, fluctuation=self._fluctuation(signal, points, kernel)
        )
        return run.record_forward(Record(self, run.layer, signal, output, (), points))

    def _sum(self, kernel: Kernel, points: list[Any], power: int = 2) -> Kernel:
        shares = self.shares if power == 2 else self.fourth
        scaled = [point.scaled(share) for point, share in zip(points, shares, strict=True)]
        summed: Kernel = sum_of([kernel.scaled(self.keep**power), *scaled])
        return summed

    def _fluctuation(
        self, signal: Signal, points: list[Signal], kernel: Kernel
    ) -> Fluctuation | None:
        """Fluctuation of the sum: U - 2 K o K/width of independent parts adds up with the fourth
        powers of the factors."""
        if signal.fluctuation is None:
            return None

        def excess(point: Signal, square: Kernel) -> Kernel:
            return square.mixed(1.0, point.kernel * point.kernel, -2.0 / point.width)

        def summed(squares: list[Kernel]) -> Kernel:
            first, *others = map(excess, [signal, *points], squares)
            gaussian = (kernel * kernel).scaled(2.0 / signal.width)
            return self._sum(first, others, 4) + gaussian

        signals = [signal, *points]
        norms = summed([s.fluctuation.norms for s in signals])  # type: ignore[union-attr]
        overlaps = [overlap_covariance(s) for s in signals]
        known = [square for square in overlaps if square is not None]
        return Fluctuation(norms, summed(known) if len(known) == len(signals) else None)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """A gradient that lacks its part along x' lacks cos^2 of that along x; the relative change
        of |x'| per that of |x| is r x.x'/|x'|^2."""
        run.record_backward(record, gradient)
        for number, share in zip(self.points, self.shares, strict=True):
            run.send(number, gradient.kernel.scaled(share))
        before, after = (s.kernel.mean_diagonal() for s in (record.input, record.output))
        sizes = [point.kernel.mean_diagonal() for point in record.pullback]
        both = self.keep * before + sum(map(np.multiply, self.crosses, sizes))
        cosine, known = both * both / (before * after), gradient.averaged()

        def at_tokens(value: Array) -> Array:
            lifted, _ = gradient.kernel.lift(value)
            return lifted if np.ndim(lifted) == 0 else lifted + 0.0 * gradient.kernel.diagonal

        grad_in = Gradient(
            gradient.kernel.scaled(self.keep**2),
            gradient.seq_len,
            radial=at_tokens(1.0 - (1.0 - known.radial) * cosine),
            norm_response=at_tokens(known.norm_response * self.keep * both / after),
        )
        return record.completed(gradient, grad_in, ())

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        return amplitude * self.carries


@functools.lru_cache(maxsize=8)
def mixes(model: Transformer) -> tuple[InputMix, ...]:
    """The mix at the input of every layer, from the factors of the parts in stream and points."""
    additions = model.additions
    kept = {number for _, added in additions for number in added}
    coefficients, rows, result = np.ones(1), {0: np.ones(1)}, []
    for number, (keep, added) in enumerate(additions, 1):
        parts = np.zeros((len(rows), coefficients.size))
        for row, known in zip(parts, rows.values(), strict=True):
            row[: known.size] = known
        places = {point: place for place, point in enumerate(rows)}
        after = keep * coefficients + sum(s * parts[places[point]] for point, s in added.items())

        def solved(sums: Array, power: int, parts: Array = parts) -> Array:
            return np.linalg.solve(parts.T**power, sums)

        crossed = sum(s * coefficients * parts[places[point]] for point, s in added.items())
        factors = np.array(
            [
                solved(after**2 - keep**2 * coefficients**2, 2),
                solved(after**4 - keep**4 * coefficients**4, 4),
                solved(crossed + 0.0 * coefficients, 2),
            ]
        )
        used = np.flatnonzero(np.any(np.abs(factors) > LEAST, axis=0))
        points = tuple(list(rows)[place] for place in used)
        shares, fourth, crosses = (tuple(row[used].tolist()) for row in factors)
        mixed = keep, points, shares, fourth, crosses, after[0] / coefficients[0]
        result.append(InputMix("input.mix", *mixed))
        coefficients = after
        if number in kept:
            coefficients = rows[number] = np.append(after, 1.0)
    return tuple(result)
