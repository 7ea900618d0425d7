"""The parts of a network around their means, by token, read off a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.bottom_to_top import BottomToTop
from ..engine.composition import Chain, Component, Layer, Residual
from ..engine.propagate import Point, Trace
from ..engine.state import Array, Signal
from .branches import (
    attention_of,
    cross_attention_of,
    cross_back_kappa,
    last_matrix,
    leaves,
    parts_of,
    paths,
)
from .part_response import Sequence as Branch
from .part_response import Sum, in_units, response
from .sensitivity import (
    SINGLE,
    Ascent,
    Descent,
    Matrix,
    Response,
    matrix_of,
    ratio,
    total,
    trace_of,
    transposed,
)


@dataclass(frozen=True)
class Part:
    """What follows one another in a layer, around its means; kernels (..., L, L).

    Attributes:
        response: of the branch, or of the whole where there is no skip connection.
        residual: whether there is an addition.
        skip, scale: squared factors of skip connection and branch; 0 and 1 where there is none.
        entering, leaving: kernels of the signal.
        sent, received: kernels of the gradient, at the input and at the output, in units of the
            former's trace.
        kappa: (...,) d_model times the relative variance of |branch|^2.
        back_kappa: the same of the gradient, beyond what `response` calls noise.
        width: d_model.
        inner: number of features of all heads, where the branch attends; else None.
        attends: (...,) share of attention in what the branch adds; 1 where it is all of it.
    """

    response: Response
    residual: bool
    skip: float
    scale: float
    entering: Matrix
    leaving: Matrix
    sent: Matrix
    received: Matrix
    kappa: Array
    back_kappa: Array
    width: float
    inner: float | None
    attends: Array = 1.0

    def ascend(self, sensitivity: Array) -> Ascent:
        """What a sensitivity to the gradient sent says; see `part_response.Ascent`."""
        found = self.response.ascend(sensitivity)
        onward = self.scale * found.sensitivity + self.skip * sensitivity
        return found._replace(sensitivity=onward)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        """What a sensitivity to the signal that leaves says; see `part_response.Descent`."""
        found = self.response.descend(self.scale * sensitivity, exposure)
        return found._replace(sensitivity=found.sensitivity + self.skip * sensitivity)

    def gradient_noise(self, sensitivity: Array) -> Array:
        """Variance that the addition of the gradients adds."""
        carried = self.skip * self.received
        return self._noise(sensitivity, carried, self.sent - carried, self.back_kappa)

    def signal_noise(self, sensitivity: Array) -> Array:
        """Variance that the addition of the signals adds."""
        carried = self.skip * self.entering
        return self._noise(sensitivity, carried, self.leaving - carried, self.kappa)

    def floor(self, carried: Array, added: Array, coherent: Array, overlap: Array) -> Array:
        """Covariance of what the addition does to different directions of random overlap.

        Args:
            carried, added: parts of y through the skip connection and through the branch.
            coherent: of `added`, what the mean of the tokens carries on.
            overlap: q, second moment of the directions' correlation.
        """
        cross = 4 * carried * coherent * overlap
        if self.inner is None:
            return (cross + self.kappa * coherent**2 * overlap) / self.width
        # two matrices one after the other: behind the first, overlaps have grown by 1/inner
        twice = 2 * overlap * self.width / self.inner + 2 * (overlap + 1 / self.inner)
        beside = 0.0 if np.all(self.attends == 1) else self.kappa * coherent**2 * overlap
        return (cross + twice * (self.attends * added) ** 2 + beside) / self.width

    def _noise(self, sensitivity: Array, carried: Array, added: Array, kappa: Array) -> Array:
        if not self.residual:
            return np.zeros(sensitivity.shape[:-2])
        skipped, branch = sensitivity @ carried, sensitivity @ added
        weight = np.asarray(kappa)[..., None, None].astype(SINGLE)
        return total((4 * skipped + weight * branch) * transposed(branch)) / self.width


def network_parts(layers: Sequence[Layer], trace: Trace) -> tuple[list[Part], list[int]]:
    """All parts of all layers, and the number of parts before each layer and in all."""
    stream = trace.stream()
    kernels = [point.signal.kernel for point in stream]
    kernels += [point.gradient.kernel for point in stream if point.gradient is not None]
    axes = np.broadcast_shapes(*(kernel.diagonal.shape[:-1] for kernel in kernels))
    points = iter(trace.points)
    before = next(point for point in points if point.site == "stream")
    found: list[Part] = []
    starts = [0]
    for layer in layers:
        for component in parts_of(layer):
            assert before.gradient is not None
            unit = np.broadcast_to(trace_of(matrix_of(before.gradient.kernel)), axes)
            around = _Around(points, unit, trace.memory)
            part, before = around.part(component, before)
            found.append(part)
        starts.append(len(found))
        before = next(points)
    return found, starts


@dataclass(frozen=True)
class _Around:
    """Reads parts off a trace.

    Attributes:
        points: of the trace, from the part's first site on.
        unit: (...,) what gradients are measured in.
        memory: what cross-attention reads.
    """

    points: Iterator[Point]
    unit: Array
    memory: Signal | None

    def part(self, component: Component, before: Point) -> tuple[Part, Point]:
        """A part that follows `before`, and the point behind it."""
        if isinstance(component, BottomToTop):
            return self._bypassed(component, before)
        residual = isinstance(component, Residual)
        branch = component.branch if isinstance(component, Residual) else component
        passed: list[Point] = []
        kept = _kept(self.points, passed)
        answer, _ = response(branch, before.signal, kept, self.unit, self.memory)
        after = next(self.points) if residual else passed[-1]
        skip, scale = 0.0, 1.0
        if isinstance(component, Residual):
            skip, scale = component.skip_scale**2, component.branch_scale**2
        kappas: tuple[Array, Array, Array] = (0.0, 0.0, 1.0)
        if residual:
            kappas = _kappas(branch, before.signal, passed, answer, self.memory)
        attention = attention_of(branch)
        part = Part(
            answer,
            residual,
            skip,
            scale,
            *self._kernels(before, after),
            kappas[0],
            kappas[1],
            float(after.signal.width),
            None if attention is None else float(attention.heads * attention.d_head),
            kappas[2],
        )
        return part, after

    def _kernels(self, before: Point, after: Point) -> tuple[Array, Array, Array, Array]:
        """Of the signal that enters and leaves, and of the gradient sent and received."""
        assert before.gradient is not None
        assert after.gradient is not None
        return (
            matrix_of(before.signal.second_moment()).astype(SINGLE),
            matrix_of(after.signal.second_moment()).astype(SINGLE),
            in_units(matrix_of(before.gradient.kernel), self.unit),
            in_units(matrix_of(after.gradient.kernel), self.unit),
        )

    def _bypassed(self, node: BottomToTop, before: Point) -> tuple[Part, Point]:
        from .token_bypass import bypassed

        attention, between = self.part(node.attention, before)
        norm, entering = self.part(node.norm, between)
        ffn, _ = self.part(node.ffn, entering)
        after = next(self.points)
        carried = np.sqrt(entering.signal.kernel.diagonal / between.signal.kernel.diagonal)
        carried = carried * node.attention.skip_scale * node.ffn.skip_scale
        return bypassed((attention, norm, ffn), carried, self._kernels(before, after)), after


def _kept(points: Iterator[Point], passed: list[Point]) -> Iterator[Point]:
    for point in points:
        passed.append(point)
        yield point


def _kappas(
    branch: Component,
    entering: Signal,
    passed: Sequence[Point],
    answer: Response,
    memory: Signal | None,
) -> tuple[Array, Array, Array]:
    """kappa, back_kappa and share of attention of `Part`.

    Of parallel branches, whose sum varies by 2 (sum B)^2/d if each does by 2 B^2/d.
    """
    found = paths(branch)
    order = [id(leaf) for leaf in leaves(branch)]
    common = set.intersection(*({id(leaf) for leaf in path.parts} for path in found))
    sizes, kappas, backs, attending = [], [], [], []
    for path in found:
        own = path.parts
        if len(found) > 1:
            own = tuple(leaf for leaf in own if id(leaf) not in common)
        reached = passed[order.index(id(own[last_matrix(own)]))].signal
        kappas.append(_own_fluctuation(path, entering, reached))
        sizes.append(np.asarray(reached.second_moment().mean_diagonal()))
        crossed, attends = cross_attention_of(path), attention_of(path) is not None
        backs.append(2.0 if attends else kappas[-1])
        if crossed is not None:
            assert memory is not None
            backs[-1] = cross_back_kappa(crossed, memory.seq_len)
        attending.append(float(attends))
    if len(found) == 1:
        return kappas[0], backs[0], 1.0
    shares = _sum_of(answer).shares
    return (
        _together(kappas, [ratio(size, sum(sizes)) for size in sizes]),
        _together(backs, shares),
        sum(share * one for share, one in zip(shares, attending, strict=True)),
    )


def _together(kappas: Sequence[Array], shares: Sequence[Array]) -> Array:
    own = ((kappa - 2) * share**2 for kappa, share in zip(kappas, shares, strict=True))
    return 2 + sum(own)


def _sum_of(answer: Response) -> Sum:
    """The parallel branches in a branch."""
    if isinstance(answer, Sum):
        return answer
    assert isinstance(answer, Branch)
    inner = [part for part in answer.parts if isinstance(part, Sum | Branch)]
    return _sum_of(inner[0])


def _own_fluctuation(path: Chain, entering: Signal, reached: Signal) -> Array:
    """d_model times the relative variance of |branch|^2 that its own matrices add."""
    norms = any(getattr(leaf, "normalises", False) for leaf in path.parts)
    inherited = 0.0 if norms else _relative_spread(entering)
    if attention_of(path) is not None or cross_attention_of(path) is not None:
        inherited = 0.0  # what attention averages is tracked anew
    return reached.width * np.maximum(_relative_spread(reached) - inherited, 0.0)


def _relative_spread(signal: Signal) -> Array:
    """Var |x|^2/E^2 |x|^2, averaged over tokens."""
    assert signal.spread is not None
    relative = ratio(signal.spread.diagonal, signal.second_moment().diagonal ** 2)
    return signal.kernel.average(relative)
