"""A component given by one law of second moments across two replicas (`moments.laws`).

What the engine asks of it is a derivative of that law: the gradient and the weights' in what
differs across replicas, the band's sensitivities in what each replica has by itself as well. A law
is averaged over overlaps of the tokens as they vary over draws (docs/theory/norms.md, Realised
overlaps), by second differences; its output's vary as those of independent Gaussian features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Leaf, Pullback, Pulled
from ..engine.derivative import Traced, plain, pullback, tangent
from ..engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    followed,
    has_fixed_norms,
    overlap_variance,
    signed_root,
    step_within,
)
from ..engine.laws import Applied, LawMatrix, Layout, evaluating, passed
from ..engine.response import (
    SINGLE,
    Around,
    GradientAdjoint,
    Response,
    SignalAdjoint,
)
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal, Values
from ..engine.trace import Record
from ..errors import DomainError
from .elementary import entrywise_overlap

KernelLaw = Callable[[Array, Any], Array]


@dataclass(frozen=True)
class LawLeaf(Leaf):
    """A block that one law describes.

    Attributes:
        label: site name in a trace.
        law: of the moments that enter and of the weights (`engine.laws.Applied`).
        weights: its matrices.
        width: features of the output.
        seq_len: tokens of a sequence.
        mixes_tokens: whether an output token depends on other tokens than its own.
    """

    label: str
    law: KernelLaw
    weights: tuple[LawMatrix, ...]
    width: int
    seq_len: int
    mixes_tokens: bool

    def evaluated(
        self, layout: Layout, x: Array, weights: Applied | None = None, follow: bool = False
    ) -> Array:
        """The law.

        Args:
            layout: of `x`.
            x: moments across replicas, perhaps traced.
            weights: None: of one network twice.
            follow: whether what each replica has by itself is traced with what they share.

        Raises:
            DomainError: the law cannot take such moments, or leaves a weight out.
        """
        level = x.level if type(x) is Traced and not follow else math.inf
        given = self.applied() if weights is None else weights
        with evaluating(layout, level):
            try:
                result = self.law(x, given)
            except (ValueError, TypeError, IndexError) as error:
                if isinstance(error, DomainError):
                    raise
                raise DomainError(
                    f"the law of block {self.label!r} fails on moments of shape {np.shape(x)}: "
                    f"{error}; it takes an array of second moments and block weights, as w.gate(x)"
                ) from error
        if unused := sorted({one.name for one in self.weights} - passed(given).keys()):
            raise DomainError(
                f"the law of block {self.label!r} never applies its weight {unused[0]!r}: write "
                f"w.{unused[0]}(x) where the twin does, or leave it out of weights"
            )
        return result

    def applied(self, *extra: Array) -> Applied:
        """Its weights across replicas, with `extra` covariances of those in `names`."""
        return Applied(self.label, self.weights, dict(zip(self.names, extra, strict=False)))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that receives a gradient."""
        return tuple(name for one in self.weights for name in one.names)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if self.mixes_tokens and not signal.resolved:
            return self._endless(signal), _no_way_back
        moments = signal.second_moment()
        layout = Layout.of(moments, self.seq_len)
        x = layout.array(moments)
        base = self._checked(layout, x)
        moves = self._moves(layout, signal, x, base)
        kernel = layout.kernel(base if moves is None else self.averaged(layout, x, moves))
        output = Signal(kernel, signal.seq_len, mean=0.0 * kernel.diagonal, width=float(self.width))
        if signal.fluctuation is not None:
            drawn = Fluctuation.of_gaussian(kernel, output.width)
            overlaps = None if followed(signal) is None else drawn.norms
            output = output.replace(fluctuation=drawn._replace(overlaps=overlaps))
        return output, functools.partial(self._back, signal, layout, x, moves)

    def _back(
        self, signal: Signal, layout: Layout, x: Array, moves: Moves | None, gradient: Gradient
    ) -> Pulled:
        """The way back, of the moments `x` that entered; and the law's derivative in every weight's
        covariance, entry by entry."""
        grad_out = layout.array(gradient.kernel) * (self.width / signal.width)
        shape = np.broadcast_shapes(grad_out.shape, x.shape)
        none = [np.zeros(shape) for _ in self.names]

        def law(x: Array, *extra: Array) -> Array:
            weights = self.applied(*extra)
            if moves is None:
                return self.evaluated(layout, x, weights)
            return self.averaged(layout, x, moves, weights)

        _, pull = pullback(law, np.broadcast_to(x, shape), *none)
        grad_in, *weights = (layout.kernel(one) for one in pull(np.broadcast_to(grad_out, shape)))
        of_weights = functools.partial(self._weights, signal, weights)
        return Pulled(gradient.with_kernel(grad_in), of_weights)

    def _weights(self, signal: Signal, kernels: list[Kernel]) -> Values:
        pairs = zip(self.names, kernels, strict=True)
        return {name: signal.width * kernel.total(signal.seq_len) for name, kernel in pairs}

    def averaged(
        self, layout: Layout, x: Array, moves: Moves, weights: Applied | None = None
    ) -> Array:
        """The law over draws of the tokens' overlaps, by its second differences."""
        mean = self.evaluated(layout, x, weights)
        for part in moves.parts(np.size(plain(x))):
            above, below = (self.evaluated(layout, x + side * part, weights) for side in (1, -1))
            more = np.sum(above + below, axis=0) - 2.0 * len(part) * mean
            mean = mean + 0.5 * moves.weight * more
        return mean

    def _moves(self, layout: Layout, signal: Signal, x: Array, base: Array) -> Moves | None:
        """How overlaps of the tokens vary; None: they are not followed, or the law is linear."""
        kernel, variance = signal.second_moment(), overlap_variance(signal)
        if variance is None:
            return None
        if not self.mixes_tokens:
            step = Kernel.joined(
                0.0 * kernel.diagonal, step_within(kernel, variance), kernel.resolved
            )
            return Moves(layout.array(step)[None])
        result = Moves.of(signal, layout)
        mean = result.steps.mean(0)
        above, below = (self.evaluated(layout, x + side * mean) for side in (1, -1))
        linear = np.allclose(above + below, 2 * base, rtol=0, atol=1e-13 * np.max(np.abs(base)))
        return None if linear else result

    def _checked(self, layout: Layout, x: Array) -> Array:
        result = self.evaluated(layout, x)
        if np.shape(result) != x.shape:
            raise DomainError(
                f"the law of block {self.label!r} makes shape {np.shape(result)} of {x.shape}: "
                "it returns moments of as many tokens as it takes"
            )
        first, second = layout.variances(np.asarray(result))
        if not np.all(np.isfinite(result)) or np.any(first < 0):
            raise DomainError(
                f"the law of block {self.label!r} gives variances that are negative or not finite, "
                f"such as {np.min(first):.4g}: second moments of tokens that exist have none"
            )
        if np.any(np.abs(result) > (1 + 1e-6) * np.sqrt(first * second) + 1e-300):
            worst = np.max(np.abs(result) / np.maximum(np.sqrt(first * second), 1e-300))
            raise DomainError(
                f"the law of block {self.label!r} makes two tokens correlate by {worst:.4g}: one "
                "law serves own entries and pairs, so that at most 1 can come out"
            )
        return result

    def _endless(self, signal: Signal) -> Signal:
        """Of tokens alike, each of a sequence of its own."""
        diagonal, across = (
            np.asarray(one)[..., None, None, None, None] for one in _both(signal.kernel)
        )
        size, layout = self.seq_len, Layout(True, 2)
        itself = np.eye(2)[:, :, None, None] * np.eye(size)
        result = self.evaluated(layout, across + (diagonal - across) * itself)
        one = np.diagonal(result[..., 0, 0, :, :], axis1=-2, axis2=-1).mean(-1)
        return Signal(Kernel(one, result[..., 0, 1, :, :].mean((-2, -1))), 2, width=self.width)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        if not self.mixes_tokens:
            return entrywise_overlap(self, record, at, walk.real)
        return at.mapped(record.output.width)

    def response(self, record: Record, around: Around) -> Response:
        if not self.mixes_tokens:
            return super().response(record, around)
        moments = record.input.second_moment()
        layout = Layout.of(moments, self.seq_len)
        ratio = self.width / record.input.width
        return LawResponse(
            self, layout, moments.off_diagonal, ratio * around.grad_out(record), ratio
        )


def _no_way_back(_: Gradient) -> Pulled:
    raise DomainError("a law that mixes tokens sends a gradient by token alone: tokens=True")


MOST_NUMBERS = 2**17
"""Entries of the moved kernels of one law, from which on pairs of directions are drawn together."""


@dataclass(frozen=True, eq=False)
class Moves:
    """By how much the tokens' overlaps move, either way, in each of some directions.

    Attributes:
        steps: (n, ...) of the law's array; their squares are the overlaps' covariance.
        weight: of each square.
    """

    steps: Array
    weight: float = 1.0

    @classmethod
    def of(cls, signal: Signal, layout: Layout) -> Moves:
        """Of tokens whose kernel is y with Cov(o_kl, o_mn) = (y_km y_ln + y_kn y_lm)/2: products of
        eigenvectors of y, two by two; of many tokens sums of all with drawn signs, whose squares
        have that mean."""
        kernel, square = signal.second_moment(), followed(signal)
        assert square is not None
        values, vectors = np.linalg.eigh(signed_root(square, kernel).off_diagonal)
        root = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
        count = root.shape[-1]
        numbers, pairs = kernel.off_diagonal.size, count * (count + 1) // 2
        if pairs * numbers <= MOST_NUMBERS:
            one, two = np.triu_indices(count)
            signs = np.zeros((pairs, count, count))
            signs[np.arange(pairs), one, two] = 0.5**0.5
            signs[one == two] *= 0.5**0.5
        else:
            drawn = np.random.default_rng(0)
            several = max(MOST_NUMBERS // numbers, 1)
            signs = 0.5 * np.where(drawn.random((several, count, count)) < 0.5, -1.0, 1.0)
        signs = (signs + np.swapaxes(signs, -1, -2)).reshape(
            -1, *(1,) * (root.ndim - 2), count, count
        )
        steps = root @ signs @ np.swapaxes(root, -1, -2)
        if has_fixed_norms(signal):
            lost = np.diagonal(steps, axis1=-2, axis2=-1) / kernel.diagonal
            steps = steps - 0.5 * kernel.off_diagonal * (lost[..., :, None] + lost[..., None, :])
        exact = pairs * numbers <= MOST_NUMBERS
        return cls(layout.cut(steps), 1.0 if exact else 1.0 / len(steps))

    def parts(self, numbers: int) -> Iterator[Array]:
        """As many at once as there is room for."""
        several = max(MOST_NUMBERS // max(numbers, 1), 1)
        return (self.steps[k : k + several] for k in range(0, len(self.steps), several))


def _both(kernel: Kernel) -> tuple[Array, ...]:
    return tuple(np.broadcast_arrays(kernel.diagonal, kernel.off_diagonal))


@dataclass(frozen=True)
class LawResponse:
    """What a law that mixes tokens does to sensitivities: its tangents, and their derivatives.

    Attributes:
        leaf, layout: of the law.
        moments: (..., L, L) at the input.
        grad_out: (..., L, L) the gradient at the output, times `ratio`.
        ratio: of the features that leave to those that enter.
    """

    leaf: LawLeaf
    layout: Layout
    moments: Array
    grad_out: Array
    ratio: float

    def _across(self, x: Array) -> Array:
        return self.leaf.evaluated(self.layout, x)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        if not sensitivity.size:  # of a number made of signals alone
            return GradientAdjoint(sensitivity, sensitivity)
        _, result = tangent(self._across, *self._with(sensitivity))
        onward = (self.ratio * self.layout.joined(result)).astype(SINGLE)
        return GradientAdjoint(onward, sensitivity)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        (point,), (above,) = self._with(sensitivity)
        grad_out = self.layout.cut(np.broadcast_to(self.grad_out, sensitivity.shape))
        given = np.zeros(sensitivity.shape)
        given[: len(exposure)] = exposure
        direction = self.layout.cut(given)

        def number(c: Array) -> Array:
            diagonal = self.leaf.evaluated(self.layout, c, follow=True)
            if not len(exposure):
                return np.sum(diagonal * above)
            _, grad_in = tangent(self._across, [c], [direction])
            return np.sum(diagonal * above) + np.sum(grad_in * grad_out)

        _, pull = pullback(number, point)
        result = self.layout.joined(pull(1.0)[0]).astype(SINGLE)
        return SignalAdjoint(0.5 * (result + np.swapaxes(result, -1, -2)))

    def _with(self, sensitivity: Array) -> tuple[list[Array], list[Array]]:
        """The law's argument and a direction, in one shape."""
        point = np.broadcast_to(self.moments, sensitivity.shape)
        return [self.layout.cut(point)], [self.layout.cut(np.asarray(sensitivity, float))]
