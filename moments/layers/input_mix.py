"""What layers before are added to what enters a layer: x <- r x + sum_k s_k p_k.

p_0 is what enters layer 1, p_n what leaves layer n. What blocks add between two of these points is
behind random matrices of its own, so that every point and the stream are sums c_i S_i of
independent parts with declared factors: kernels are sums of c_i^2 K_i, and those of the parts
follow from the points' own. On the way back each K' = r^2 K + sum_k m_k K_k sends m_k of its
gradient's kernel to p_k. See docs/theory/streams.md, Earlier layers added again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Component
from ..engine.fluctuation import followed
from ..engine.response import sum_of
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.trace import Record, Run
from ..model.transformer import Transformer

LEAST = 1e-12
"""Of a factor, what the rounding of products leaves where points are added in reverse order."""


@dataclass(frozen=True)
class InputMix(Component):
    """r x + sum_k s_k p_k.

    Attributes:
        label: site name in a trace.
        keep: r.
        points: numbers of the layers behind which p_k are.
        shares: m_k, of K'.
        fourth: likewise of the fourth powers of factors.
        crosses: of x . (x' - r x), a sum of |p_k|^2.
        carries: by how much x_0 is larger in x' than in x.
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
        if signal.centred is not None and all(one.centred is not None for one in points):
            centred = self._sum(signal.centred, [one.centred for one in points])
        kernel = self._sum(signal.kernel, [one.kernel for one in points])
        output = signal.replace(
            kernel=kernel, centred=centred, fluctuation=self._fluctuation(signal, points, kernel)
        )
        return run.passed(Record(self, run.layer, signal, output, (), points))

    def _sum(self, kernel: Kernel, points: list[Any], power: int = 2) -> Kernel:
        shares = self.shares if power == 2 else self.fourth
        scaled = [one.scaled(share) for one, share in zip(points, shares, strict=True)]
        summed: Kernel = sum_of([kernel.scaled(self.keep**power), *scaled])
        return summed

    def _fluctuation(
        self, signal: Signal, points: list[Signal], kernel: Kernel
    ) -> Fluctuation | None:
        """Of independent parts U - 2 K o K/width adds up with the fourth powers of factors."""
        if signal.fluctuation is None:
            return None

        def excess(one: Signal, square: Kernel) -> Kernel:
            return square.mixed(1.0, one.kernel * one.kernel, -2.0 / one.width)

        def summed(squares: list[Kernel]) -> Kernel:
            first, *others = map(excess, [signal, *points], squares)
            gaussian = (kernel * kernel).scaled(2.0 / signal.width)
            return self._sum(first, others, 4) + gaussian

        every = [signal, *points]
        norms = summed([one.fluctuation.norms for one in every])  # type: ignore[union-attr]
        overlaps = [followed(one) for one in every]
        known = [one for one in overlaps if one is not None]
        return Fluctuation(norms, summed(known) if len(known) == len(every) else None)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """What lacks a part along x' lacks cos^2 of it along x, whose length moves that of x' by
        r x.x'/|x'|^2."""
        run.returning(record, gradient)
        for number, share in zip(self.points, self.shares, strict=True):
            run.send(number, gradient.kernel.scaled(share))
        before, after = (one.kernel.mean_diagonal() for one in (record.input, record.output))
        sizes = [one.kernel.mean_diagonal() for one in record.pullback]
        both = self.keep * before + sum(map(np.multiply, self.crosses, sizes))
        cosine, known = both * both / (before * after), gradient.averaged()

        def at_tokens(value: Array) -> Array:
            one, _ = gradient.kernel.lift(value)
            return one if np.ndim(one) == 0 else one + 0.0 * gradient.kernel.diagonal

        grad_in = Gradient(
            gradient.kernel.scaled(self.keep**2),
            gradient.seq_len,
            radial=at_tokens(1.0 - (1.0 - known.radial) * cosine),
            norm_response=at_tokens(known.norm_response * self.keep * both / after),
        )
        return record.completed(gradient, grad_in, ())

    def carried(self, record: Record, amplitude: Array) -> Array:
        return amplitude * self.carries


@functools.lru_cache(maxsize=8)
def mixes(model: Transformer) -> tuple[InputMix, ...]:
    """Of every layer, by which factors it holds the parts that the points before are made of."""
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
        several = np.array(
            [
                solved(after**2 - keep**2 * coefficients**2, 2),
                solved(after**4 - keep**4 * coefficients**4, 4),
                solved(crossed + 0.0 * coefficients, 2),
            ]
        )
        used = np.flatnonzero(np.any(np.abs(several) > LEAST, axis=0))
        points = tuple(list(rows)[place] for place in used)
        shares, fourth, crosses = (tuple(one[used].tolist()) for one in several)
        mixed = keep, points, shares, fourth, crosses, after[0] / coefficients[0]
        result.append(InputMix("input.mix", *mixed))
        coefficients = after
        if number in kept:
            coefficients = rows[number] = np.append(after, 1.0)
    return tuple(result)
