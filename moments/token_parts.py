"""The parts of a network around their means, by token, read off a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import SelfAttention
from .branches import parts_of
from .composition import Chain, Component, Layer, Parallel, Residual
from .part_response import in_units, response
from .parts import Dropout
from .propagate import Point, Trace
from .sensitivity import SINGLE, Ascent, Descent, Response, transposed
from .state import Array, Signal


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
    """

    response: Response
    residual: bool
    skip: float
    scale: float
    entering: Array
    leaving: Array
    sent: Array
    received: Array
    kappa: Array
    back_kappa: Array
    width: float
    inner: float | None

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
        return (cross + twice * added**2) / self.width

    def _noise(self, sensitivity: Array, carried: Array, added: Array, kappa: Array) -> Array:
        if not self.residual:
            return np.zeros(sensitivity.shape[:-2])
        skipped, branch = sensitivity @ carried, sensitivity @ added
        weight = np.asarray(kappa)[..., None, None].astype(SINGLE)
        return ((4 * skipped + weight * branch) * transposed(branch)).sum((-2, -1)) / self.width


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
            part, before = _part(component, before, points, axes)
            found.append(part)
        starts.append(len(found))
        before = next(points)
    return found, starts


def _part(
    component: Component, before: Point, points: Iterator[Point], axes: tuple[int, ...]
) -> tuple[Part, Point]:
    residual = isinstance(component, Residual)
    branch = component.branch if isinstance(component, Residual) else component
    passed: list[Point] = []
    assert before.gradient is not None
    unit = np.broadcast_to(trace_of(before.gradient.kernel.pairs), axes)
    answer, _ = response(branch, before.signal, _kept(points, passed), unit)
    after = next(points) if residual else passed[-1]
    skip, scale = 0.0, 1.0
    if isinstance(component, Residual):
        skip, scale = component.skip_scale**2, component.branch_scale**2
    assert after.gradient is not None
    kappa = _own_fluctuation(branch, before.signal, passed) if residual else 0.0
    heads = [leaf for leaf in _leaves(branch) if isinstance(leaf, SelfAttention)]
    part = Part(
        answer,
        residual,
        skip,
        scale,
        before.signal.second_moment().pairs.astype(SINGLE),
        after.signal.second_moment().pairs.astype(SINGLE),
        in_units(before.gradient.kernel.pairs, unit),
        in_units(after.gradient.kernel.pairs, unit),
        kappa,
        2.0 if heads else kappa,
        float(after.signal.width),
        float(heads[0].heads * heads[0].d_head) if heads else None,
    )
    return part, after


def sequences_in(layers: Sequence[Layer]) -> int:
    """How many sequences a kernel by token holds side by side."""
    branches = [part for layer in layers for part in parts_of(layer)]
    branches = [part.branch if isinstance(part, Residual) else part for part in branches]
    counts = (getattr(leaf, "sequences", 1) for part in branches for leaf in _leaves(part))
    return max(counts, default=1)


def _kept(points: Iterator[Point], passed: list[Point]) -> Iterator[Point]:
    for point in points:
        passed.append(point)
        yield point


def _own_fluctuation(branch: Component, entering: Signal, passed: Sequence[Point]) -> Array:
    """d_model times the relative variance of |branch|^2 that its own matrices add."""
    last = max(i for i, leaf in enumerate(_leaves(branch)) if not isinstance(leaf, Dropout))
    reached = passed[last].signal
    norms = any(getattr(leaf, "normalises", False) for leaf in _leaves(branch))
    inherited = 0.0 if norms else _relative_spread(entering)
    if any(isinstance(leaf, SelfAttention) for leaf in _leaves(branch)):
        inherited = 0.0  # what attention averages is tracked anew
    return reached.width * np.maximum(_relative_spread(reached) - inherited, 0.0)


def _relative_spread(signal: Signal) -> Array:
    """Var |x|^2/E^2 |x|^2, averaged over tokens."""
    assert signal.spread is not None
    return (signal.spread.diagonal / signal.second_moment().diagonal ** 2).mean(-1)


def _leaves(component: Component) -> tuple[Component, ...]:
    if isinstance(component, Chain):
        return tuple(leaf for part in component.parts for leaf in _leaves(part))
    if isinstance(component, Parallel):
        return tuple(leaf for part in component.branches for leaf in _leaves(part))
    return (component,)


def trace_of(kernel: Array) -> Array:
    """Sum over tokens of their own entries."""
    return np.trace(kernel, axis1=-2, axis2=-1)
