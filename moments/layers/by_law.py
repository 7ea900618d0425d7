"""A component given by one law of second moments across two replicas (`moments.laws`).

All other quantities are derivatives of that law: gradients and weight gradients in the moments
across replicas, the band's sensitivities also in the moments within each replica. The law is
averaged over the fluctuation of the tokens' overlaps (docs/theory/norms.md, Realised overlaps) by
second differences; the overlaps of its output fluctuate as those of independent Gaussian features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Leaf, Pullback, PullbackResult
from ..engine.derivative import Traced, plain, pullback, tangent
from ..engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    has_fixed_norms,
    overlap_covariance,
    overlap_step,
    overlap_variance,
    signed_root,
)
from ..engine.laws import Applied, LawMatrix, Layout, evaluating, passed
from ..engine.response import (
    SINGLE,
    GradientAdjoint,
    GradientUnits,
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
    """A block given by a law.

    Attributes:
        label: site name in a trace.
        law: function of the input's moments and of the weights (`engine.laws.Applied`).
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
        """Evaluate the law.

        Args:
            layout: of `x`.
            x: moments across replicas, possibly traced.
            weights: None: two identical replicas.
            follow: whether to trace the moments within each replica too.

        Raises:
            DomainError: the law fails on these moments, or does not use a weight.
        """
        level = x.level if type(x) is Traced and not follow else math.inf
        weights = self.applied() if weights is None else weights
        with evaluating(layout, level):
            try:
                result = self.law(x, weights)
            except (ValueError, TypeError, IndexError) as error:
                if isinstance(error, DomainError):
                    raise
                raise DomainError(
                    f"the law of block {self.label!r} fails on moments of shape {np.shape(x)}: "
                    f"{error}; it takes an array of second moments and block weights, as w.gate(x)"
                ) from error
        if unused := sorted({matrix.name for matrix in self.weights} - passed(weights).keys()):
            raise DomainError(
                f"the law of block {self.label!r} never applies its weight {unused[0]!r}: write "
                f"w.{unused[0]}(x) where the twin does, or leave it out of weights"
            )
        return result

    def applied(self, *extra: Array) -> Applied:
        """The weights across replicas, with `extra` covariances for the parameters `names`."""
        return Applied(self.label, self.weights, dict(zip(self.names, extra, strict=False)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters that receive a gradient."""
        return tuple(name for matrix in self.weights for name in matrix.names)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if self.mixes_tokens and not signal.resolved:
            return self._exchangeable(signal), _no_way_back
        moments = signal.second_moment()
        layout = Layout.of(moments, self.seq_len)
        x = layout.array(moments)
        base = self._checked(layout, x)
        moves = self._moves(layout, signal, x, base)
        kernel = layout.kernel(base if moves is None else self.averaged(layout, x, moves))
        output = Signal(kernel, signal.seq_len, mean=0.0 * kernel.diagonal, width=float(self.width))
        if signal.fluctuation is not None:
            drawn = Fluctuation.of_gaussian(kernel, output.width)
            overlaps = None if overlap_covariance(signal) is None else drawn.norms
            output = output.replace(fluctuation=drawn._replace(overlaps=overlaps))
        return output, functools.partial(self._back, signal, layout, x, moves)

    def _back(
        self, signal: Signal, layout: Layout, x: Array, moves: Moves | None, gradient: Gradient
    ) -> PullbackResult:
        """Gradients at the input, of moments `x`, and in the covariance of every weight."""
        grad_out = layout.array(gradient.kernel) * (self.width / signal.width)
        shape = np.broadcast_shapes(grad_out.shape, x.shape)
        zeros = [np.zeros(shape) for _ in self.names]

        def law(x: Array, *extra: Array) -> Array:
            weights = self.applied(*extra)
            if moves is None:
                return self.evaluated(layout, x, weights)
            return self.averaged(layout, x, moves, weights)

        _, pull = pullback(law, np.broadcast_to(x, shape), *zeros)
        grad_in, *weights = map(layout.kernel, pull(np.broadcast_to(grad_out, shape)))
        return PullbackResult(
            gradient.with_kernel(grad_in), functools.partial(self._weights, signal, weights)
        )

    def _weights(self, signal: Signal, kernels: list[Kernel]) -> Values:
        pairs = zip(self.names, kernels, strict=True)
        return {name: signal.width * kernel.total(signal.seq_len) for name, kernel in pairs}

    def averaged(
        self, layout: Layout, x: Array, moves: Moves, weights: Applied | None = None
    ) -> Array:
        """Mean of the law over the fluctuating overlaps of the tokens, by second differences."""
        mean = self.evaluated(layout, x, weights)
        for part in moves.parts(np.size(plain(x))):
            above, below = (self.evaluated(layout, x + side * part, weights) for side in (1, -1))
            difference = np.sum(above + below, axis=0) - 2.0 * len(part) * mean
            mean = mean + 0.5 * moves.weight * difference
        return mean

    def _moves(self, layout: Layout, signal: Signal, x: Array, base: Array) -> Moves | None:
        """Fluctuations of the tokens' overlaps; None if these are unknown or the law is linear."""
        kernel, variance = signal.second_moment(), overlap_variance(signal)
        if variance is None:
            return None
        if not self.mixes_tokens:
            step = Kernel.of_parts(
                0.0 * kernel.diagonal, overlap_step(kernel, variance), kernel.resolved
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

    def _exchangeable(self, signal: Signal) -> Signal:
        """Output for exchangeable tokens: means over two sequences of such tokens."""
        kernel = np.broadcast_arrays(signal.kernel.diagonal, signal.kernel.off_diagonal)
        diagonal, across = (np.asarray(x)[..., None, None, None, None] for x in kernel)
        size, layout = self.seq_len, Layout(True, 2)
        itself = np.eye(2)[:, :, None, None] * np.eye(size)
        result = self.evaluated(layout, across + (diagonal - across) * itself)
        variance = np.diagonal(result[..., 0, 0, :, :], axis1=-2, axis2=-1).mean(-1)
        covariance = result[..., 0, 1, :, :].mean((-2, -1))
        return Signal(Kernel(variance, covariance), 2, width=self.width)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        if not self.mixes_tokens:
            return entrywise_overlap(self, record, at, walk.real)
        return at.mapped(record.output.width)

    def response(self, record: Record, around: GradientUnits) -> Response:
        if not self.mixes_tokens:
            return super().response(record, around)
        moments = record.input.second_moment()
        layout = Layout.of(moments, self.seq_len)
        ratio = self.width / record.input.width
        return LawResponse(
            self, layout, moments.off_diagonal, ratio * around.grad_out(record), ratio
        )


def _no_way_back(_: Gradient) -> PullbackResult:
    raise DomainError("a law that mixes tokens sends a gradient by token alone: tokens=True")


MOST_NUMBERS = 2**17
"""Most entries of displaced kernels of one law; beyond it random directions are used."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Displacements of the tokens' overlaps in some directions, for second differences.

    Attributes:
        steps: (n, ...) displacements of the law's array; the weighted sum of their squares is the
            covariance of the overlaps.
        weight: of each square.
    """

    steps: Array
    weight: float = 1.0

    @classmethod
    def of(cls, signal: Signal, layout: Layout) -> Moves:
        """Displacements for Cov(o_kl, o_mn) = (y_km y_ln + y_kn y_lm)/2: products of pairs of
        eigenvectors of y; for many tokens sums of all products with random signs, whose mean square
        is the covariance."""
        kernel, square = signal.second_moment(), overlap_covariance(signal)
        assert square is not None
        values, vectors = np.linalg.eigh(signed_root(square, kernel).off_diagonal)
        root = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
        count = root.shape[-1]
        numbers, pairs = kernel.off_diagonal.size, count * (count + 1) // 2
        if pairs * numbers <= MOST_NUMBERS:
            first, second = np.triu_indices(count)
            signs = np.zeros((pairs, count, count))
            signs[np.arange(pairs), first, second] = 0.5**0.5
            signs[first == second] *= 0.5**0.5
        else:
            random = np.random.default_rng(0)
            draws = max(MOST_NUMBERS // numbers, 1)
            signs = 0.5 * np.where(random.random((draws, count, count)) < 0.5, -1.0, 1.0)
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
        """The steps in stacks of bounded size, for kernels of this many entries."""
        size = max(MOST_NUMBERS // max(numbers, 1), 1)
        return (self.steps[k : k + size] for k in range(0, len(self.steps), size))


@dataclass(frozen=True)
class LawResponse:
    """Adjoint maps of a law that mixes tokens, by its tangents and their derivatives.

    Attributes:
        leaf, layout: the law and the layout of its array.
        moments: (..., L, L) at the input.
        grad_out: (..., L, L) the gradient at the output, times `ratio`.
        ratio: features of the output over those of the input.
    """

    leaf: LawLeaf
    layout: Layout
    moments: Array
    grad_out: Array
    ratio: float

    def _across(self, x: Array) -> Array:
        return self.leaf.evaluated(self.layout, x)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        if not sensitivity.size:  # the target quantity depends on signals alone
            return GradientAdjoint(sensitivity, sensitivity)
        _, result = tangent(self._across, *self._point_and_direction(sensitivity))
        onward = (self.ratio * self.layout.joined(result)).astype(SINGLE)
        return GradientAdjoint(onward, sensitivity)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        (point,), (above,) = self._point_and_direction(sensitivity)
        grad_out = self.layout.cut(np.broadcast_to(self.grad_out, sensitivity.shape))
        padded = np.zeros(sensitivity.shape)
        padded[: len(exposure)] = exposure
        direction = self.layout.cut(padded)

        def number(c: Array) -> Array:
            output = self.leaf.evaluated(self.layout, c, follow=True)
            if not len(exposure):
                return np.sum(output * above)
            _, grad_in = tangent(self._across, [c], [direction])
            return np.sum(output * above) + np.sum(grad_in * grad_out)

        _, pull = pullback(number, point)
        result = self.layout.joined(pull(1.0)[0]).astype(SINGLE)
        return SignalAdjoint(0.5 * (result + np.swapaxes(result, -1, -2)))

    def _point_and_direction(self, sensitivity: Array) -> tuple[list[Array], list[Array]]:
        """The law's argument and the sensitivity as a direction, of one shape."""
        point = np.broadcast_to(self.moments, sensitivity.shape)
        return [self.layout.cut(point)], [self.layout.cut(np.asarray(sensitivity, float))]
