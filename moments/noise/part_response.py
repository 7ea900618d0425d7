"""Sensitivities of one number carried through the parts of a network, by token.

Leaves that act on every token alone have elementwise derivatives: taken here as differences of what
the leaves themselves return at slightly changed kernels, so that no law is stated a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component, Leaf, Parallel, Pullback, Residual
from ..engine.propagate import Point
from ..engine.state import Array, Gradient, Kernel, Signal
from ..errors import MomentsError
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.normalized import NormalizedAttention
from ..transfer.attention.self_attention import SelfAttention
from ..transfer.elementary import Dropout, Linear, Scale
from .attending import Attending
from .branches import values_normalised
from .sensitivity import (
    SINGLE,
    Ascent,
    Descent,
    Matrix,
    Response,
    diagonal,
    entrywise,
    grown,
    kernel_of,
    matrix_of,
    off_diagonal,
    ones,
    own_entries,
    per_unit,
    present,
    ratio,
    row_sums,
    sum_of,
    total,
)

STEP = 1e-4
"""Relative step of the one-sided differences, whose error is of this order."""


@dataclass(frozen=True)
class Elementwise:
    """A leaf that acts on every token alone.

    Attributes:
        onward, back: (..., L, L) derivative of an output pair by its input pair, and the factor on
            a gradient pair.
        own, back_own: (..., L, L) change of an output pair, and of that factor, where both tokens
            grow, over the tokens' relative growth; correlated as they were.
        back_change: (..., L, L) derivative of that factor by the pair.
        kernel, gradient: second moments at the input, gradient at the output.
    """

    onward: Matrix
    own: Matrix
    back: Matrix
    back_change: Matrix
    back_own: Matrix
    kernel: Matrix
    gradient: Matrix

    @classmethod
    def of(cls, leaf: Any, signal: Signal, gradient: Gradient, received: Array) -> Elementwise:
        """Differences of a leaf around the signal that entered it."""
        kernel = signal.second_moment()
        if isinstance(leaf, Linear | Dropout | Scale):
            return cls._linear(leaf, signal, gradient, received)
        spread = signal.spread
        base = signal.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = np.sqrt(first * second)
        nearer = Kernel.joined(kernel.diagonal, kernel.pairs - STEP * scale, kernel.resolved)
        risen = base.replace(
            kernel=kernel.scaled(1 + STEP),
            spread=None if spread is None else spread.scaled((1 + STEP) ** 2),
        )
        even = _ones(gradient, kernel)
        values = []
        for entering in (base, base.replace(kernel=nearer), risen):
            output, pullback = leaf.forward(entering)
            sent = pullback(even).gradient.kernel
            values.append((matrix_of(output.second_moment()), matrix_of(sent)))
        (out, back), (out_near, back_near), (out_grown, back_grown) = values
        tokens = matrix_of(kernel)
        onward, change = (
            off_diagonal(entrywise(ratio, at - near, STEP * scale))
            for at, near in ((out, out_near), (back, back_near))
        )
        own = (out_grown - out) / STEP - onward * tokens
        back_own = (back_grown - back) / STEP - change * tokens
        fields = (onward, own, back, change, back_own, tokens, received)
        return cls(*(field.astype(SINGLE) for field in fields))

    @classmethod
    def _linear(
        cls, leaf: Leaf, signal: Signal, gradient: Gradient, received: Array
    ) -> Elementwise:
        """What scales every pair by a factor, the same at any kernel: no differences needed."""
        kernel = signal.second_moment()
        even = _ones(gradient, kernel)
        unit = Signal(even.kernel, signal.seq_len, mean=0.0 * kernel.diagonal, width=signal.width)
        output, pullback = leaf.forward(unit)
        factor, back = matrix_of(output.kernel), matrix_of(pullback(even).gradient.kernel)
        own = diagonal(own_entries(factor) * kernel.diagonal, factor)
        onward = off_diagonal(factor)
        fields = (onward, own, back, 0 * back, 0 * back, matrix_of(kernel), received)
        return cls(*(field.astype(SINGLE) for field in fields))

    def ascend(self, sensitivity: Array) -> Ascent:
        paired = sensitivity * self.gradient
        none = np.zeros(sensitivity.shape[:-2])
        by_pair = self.back_change * paired if present(self.back_change) else None
        exposure = by_pair, self._by_size(self.back_own * paired)
        return Ascent(self.back * sensitivity, exposure, none, none + self._coherence)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        by_pair, by_size = exposure
        size = self._by_size(self.own * sensitivity)
        size[: len(by_size)] += by_size
        found = self.onward * sensitivity
        if by_pair is not None:
            found = grown(found, by_pair)
        none = np.zeros(sensitivity.shape[:-2])
        return Descent(found + diagonal(size, found), none, none)

    @functools.cached_property
    def _coherence(self) -> Array:
        factor = kernel_of(self.back)
        return ratio(factor.mean_pairs(), factor.mean_diagonal())

    def _by_size(self, pairs: Array) -> Array:
        """Each of two tokens has half a share in their pair."""
        return ratio(row_sums(pairs), own_entries(self.kernel))


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple[Response, ...]

    def ascend(self, sensitivity: Array) -> Ascent:
        steps = []
        for part in self.parts:
            steps.append(part.ascend(sensitivity))
            sensitivity = steps[-1].sensitivity
        noise, coherence = steps[0].noise, steps[0].coherence
        for step in steps[1:]:
            noise, coherence = noise + step.noise, coherence * step.coherence
        return Ascent(sensitivity, [step.exposure for step in steps], noise, coherence)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        noise = common = 0.0
        for part, exposed in zip(self.parts[::-1], exposure[::-1], strict=True):
            step = part.descend(sensitivity, exposed)
            sensitivity, noise, common = step.sensitivity, noise + step.noise, common + step.common
        return Descent(sensitivity, noise, common)


@dataclass(frozen=True)
class Sum:
    """Branches that read the same tensor, whose outputs add up.

    Attributes:
        parts: the branches.
        received: (..., L, L) gradient at the output.
    """

    parts: tuple[Response, ...]
    received: Array

    def ascend(self, sensitivity: Array) -> Ascent:
        steps = [part.ascend(sensitivity) for part in self.parts]
        shared = zip(self.shares, steps, strict=True)
        return Ascent(
            sum_of([step.sensitivity for step in steps]),
            [step.exposure for step in steps],
            np.sum([step.noise for step in steps], axis=0),
            sum(share * step.coherence for share, step in shared),  # type: ignore[arg-type]
        )

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        steps = [
            part.descend(sensitivity, exposed)
            for part, exposed in zip(self.parts, exposure, strict=True)
        ]
        return Descent(
            sum_of([step.sensitivity for step in steps]),
            np.sum([step.noise for step in steps], axis=0),
            np.sum([step.common for step in steps], axis=0),
        )

    @functools.cached_property
    def shares(self) -> list[Array]:
        """(...,) share of every branch in the variance of the gradient they send back."""
        identity = diagonal(np.ones((1, *self.received.shape[:-1]), SINGLE), self.received)
        sizes = [total(part.ascend(identity).sensitivity[0] * self.received) for part in self.parts]
        return [ratio(size, sum(sizes)) for size in sizes]


@dataclass(frozen=True)
class _Asking:
    """Cross-attention as it meets the tokens that ask: every token alone, of a memory as it is."""

    attention: CrossAttention
    memory: Signal

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        output, pullback = self.attention.attend(signal, self.memory)
        return output, lambda gradient: pullback(gradient)[0]


def response(
    component: Component,
    signal: Signal,
    points: Iterator[Point],
    unit: Array,
    memory: Signal | None = None,
) -> tuple[Response, Signal]:
    """The response of a component that `signal` entered, and the signal that left it.

    Behind parallel branches, which nothing but linear maps follow, the signal is that of the last.

    Args:
        component: a leaf, a chain or parallel branches of them.
        signal: what entered.
        points: the trace from its first site on, of which it takes its own.
        unit: (...,) what gradients are measured in.
        memory: what cross-attention reads.

    Raises:
        MomentsError: a component of another kind.
    """
    if isinstance(component, Chain):
        parts = []
        for part in component.parts:
            found, signal = response(part, signal, points, unit, memory)
            parts.append(found)
        return Sequence(tuple(parts)), signal
    if isinstance(component, Parallel):
        branches, received = [], None
        for branch in component.branches:
            found, output, received = _kept_gradient(branch, signal, points, unit, memory)
            branches.append(found)
        assert received is not None
        return Sum(tuple(branches), received), output
    if isinstance(component, Residual) or not isinstance(component, Leaf | CrossAttention):
        raise MomentsError(f"no band of one draw through a {type(component).__name__} in a branch")
    point = next(points)
    assert point.gradient is not None
    received = in_units(matrix_of(point.gradient.kernel), unit)
    if isinstance(component, SelfAttention):
        return Attending.of(component, signal, received), point.signal
    if isinstance(component, NormalizedAttention):
        return _normalised(component, signal, point.gradient, received), point.signal
    leaf: Any = component
    if isinstance(component, CrossAttention):
        assert memory is not None
        leaf = _Asking(component, memory)
    return Elementwise.of(leaf, signal, point.gradient, received), point.signal


def _kept_gradient(
    branch: Component, signal: Signal, points: Iterator[Point], unit: Array, memory: Signal | None
) -> tuple[Response, Signal, Array]:
    """As `response`, and the gradient received at the end."""
    passed: list[Point] = []

    def kept() -> Iterator[Point]:
        for point in points:
            passed.append(point)
            yield point

    found, output = response(branch, signal, kept(), unit, memory)
    last = passed[-1].gradient
    assert last is not None
    return found, output, in_units(matrix_of(last.kernel), unit)


def _normalised(
    leaf: NormalizedAttention, signal: Signal, gradient: Gradient, received: Array
) -> Response:
    """Tokens of unit norm, and attention to them; what the values' norms do is of order 1/d_head.

    The gradient between the two is that of the fast maps.
    """
    unit, plain = values_normalised(leaf)
    tokens, _ = unit.forward(signal)
    attending = Attending.of(plain, tokens, received)
    sent, _ = attending.maps.fall(SINGLE(attending.back_gain) * received, None, received)
    at_tokens = Gradient(kernel_of(sent), gradient.seq_len)
    return Sequence((Elementwise.of(unit, signal, at_tokens, sent), attending))


def in_units(kernel: Matrix, unit: Array) -> Matrix:
    """A gradient's kernel in these units; 0 where the unit is."""
    return per_unit(kernel, unit).astype(SINGLE)


def _ones(gradient: Gradient, kernel: Kernel) -> Gradient:
    """A gradient of covariance 1 everywhere, otherwise as the one given."""
    shape = np.broadcast_shapes(gradient.kernel.pairs.shape, kernel.pairs.shape)
    even = kernel_of(ones(shape, matrix_of(kernel)))
    return Gradient(even, gradient.seq_len, gradient.radial, gradient.centred_share)
