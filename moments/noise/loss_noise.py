"""What one draw of the weights makes of the gradient that a head's loss sends to the last layer.

Given the targets, sum_v d_i(v) E_v of Gaussian rows E_v is a Gaussian tensor of the kernel D, with
D_ij = sum_v d_i(v) d_j(v) of the gradients d at two tokens' logits (`readout`): a Wishart matrix of
width degrees of freedom, 2 tr(D D)/width. A hidden layer's matrix and activation add their own.
Besides, the final normalisation divides by the stream's realised sizes and the softmax depends on
its realised overlaps (the response of the last gradient to the last signal); and where logits are
few D_ii itself varies with the target's logit: given here is Var E(D_ii | target's logit), without
what logits do together.

See docs/theory/band.md, Where gradients come from, and docs/theory/loss.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.classes import diagonal_of
from ..engine.composition import Component
from ..engine.fluctuation import norm_variance
from ..engine.response import (
    SINGLE,
    STEP,
    Around,
    Elementwise,
    GradientAdjoint,
    Matrix,
    Response,
    Sequence,
    SignalAdjoint,
    diagonal_matrix,
    entrywise,
    in_units,
    matrix_of,
    over_tokens,
    paired,
    ratio,
    row_sums,
    total,
    trace_of,
    without_diagonal,
)
from ..engine.state import Array, Kernel, Signal
from ..engine.trace import Trace
from ..layers.head.components import Pool
from ..layers.head.cross_entropy import softmax_expectations
from ..layers.head.readout import Readout

_NODES = 9  # of the average over the target's logit
_ROUNDING = 1e-15
_FIXED = 1e-9  # variance of a logit that is given, over that of the others


def across(readout: Readout) -> Array:
    """Sum of E (D_ij/T^2)^2 over the tokens of two sequences, over (sum of D_ii/T^2)^2.

    They agree by a common target alone.
    """
    targets, overlap = readout.targets, readout.overlap
    common = _common(readout)
    first, second = overlap.over_tokens(targets.active)
    agree = first * second * targets.same_target * common**2
    if overlap.resolved:
        diagonal, kind = overlap.diagonal, overlap.resolved
        apart, alone = Kernel.joined(0.0 * diagonal, agree, kind), overlap.weighted(1.0, 0.0)
        return apart.total(readout.seq_len) / alone.total(readout.seq_len) ** 2
    return agree / overlap.diagonal**2


def mean_square(readout: Readout) -> Kernel:
    """E (D_ij/T^2)^2 over texts, of probabilities of coincidence q: the square, and q (1 - q) times
    the square of what a common target adds."""
    targets, overlap = readout.targets, readout.overlap
    common = _common(readout)
    same = targets.same_target
    off_diagonal = ratio(overlap.off_diagonal**2, targets.both + 0 * overlap.off_diagonal)
    off_diagonal = off_diagonal + targets.both * same * (1 - same) * common**2
    diagonal = ratio(overlap.diagonal**2, targets.active + 0 * overlap.diagonal)
    return Kernel.joined(diagonal, off_diagonal, overlap.resolved)


def _common(readout: Readout) -> Array:
    """What a common target adds to D_ij/T^2: its weight times E f'^2 of a logit's cap f, averaged
    over tokens."""
    slope, kernel = readout.softmax.other.slope_square, readout.kernel
    slope = kernel.average(slope)[..., None, None] if kernel.resolved else slope
    return (1 - readout.smoothing) ** 2 * slope / readout.targets.count**2


def logit_agreement(readout: Readout) -> Matrix:
    """How far log D_ii and log D_jj vary together, 1 + 1/(V - 1) where they are one.

    Of a shift of all logits D knows nothing, so that the others' mean effects add 1/(V - 1) of that
    of the target's, and two tokens' are correlated as their logits, by -1/(V - 1) of that where
    they have different targets.
    """
    same, kernel = readout.targets.same_target, readout.kernel
    other = readout.vocab_size - 1
    first, second = kernel.over_tokens(kernel.diagonal)
    agree = (same - (1 - same) / other) * kernel.off_diagonal / np.sqrt(first * second)
    agree = Kernel.joined(1.0 + 0.0 * kernel.diagonal, agree, kernel.resolved)
    return matrix_of(agree.scaled(1 + 1 / other), readout.seq_len).astype(SINGLE)


def log_variance_of_mean(effect: tuple[Array, Array], share: Array) -> Array:
    """Var log of an average, `share` of the variance of one left: exact for one and for many.

    Of one it is the variance of the logarithm, of many the relative variance over their number.
    """
    relative, logarithm = effect
    return relative * share + (logarithm - relative) * share**2


def logit_effect(readout: Readout) -> tuple[Array, Array]:
    """Relative variance of E(D_ii | the target's logit) and variance of its logarithm, (...,).

    By a Gauss rule over that logit, at the logits' variance averaged over tokens.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    each = np.asarray(readout.kernel.average(readout.variance))[..., None]
    count, hit = readout.vocab_size, 1 - readout.smoothing
    softmax = softmax_expectations(
        count, each, nodes * np.sqrt(each), _FIXED * each, readout.softcap
    )
    own, other = softmax.own, softmax.other
    square = own.square_slope_square + (count - 1) * other.square_slope_square
    value = square - 2 * hit * own.probability_slope_square + hit**2 * own.slope_square
    # Where the target has all of the probability, the rest is rounding.
    mean, logarithm = value @ weights, np.log(np.maximum(value, _ROUNDING))
    centre = logarithm @ weights
    relative = ratio((value - mean[..., None]) ** 2 @ weights, mean**2)
    return relative, (logarithm - centre[..., None]) ** 2 @ weights


# --- the head as the band meets it ----------------------------------------------------------------


_COARSE = 1e-2
"""Step of the logits' variance, across which `softmax_agreement` may jump by .1 percent."""


@dataclass(frozen=True, eq=False)
class HeadTop:
    """A head with a loss, as the band meets it.

    Attributes:
        readout: the matrix and its loss.
    """

    readout: Readout

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The last layer's gradient, and how it answers to all that is behind it."""
        before = trace.stream()[-1]
        assert before.gradient is not None
        assert trace.ending is not None
        grad_out = matrix_of(before.gradient.kernel, before.signal.seq_len)
        unit = trace_of(grad_out)
        last = first = in_units(grad_out, unit)
        around = Around(np.asarray(unit))
        parts: list[Response] = []
        for record in trace.ending.children:
            last, leaf = around.grad_out(record), record.component
            answer = leaf.response(record, around)
            if not isinstance(leaf, Pool):
                answer = around.alone(record, answer, _kappa(leaf, record.output))
            parts.append(answer)
        parts.append(_Ending.of(self.readout, last, unit, batch))
        return first, Sequence(tuple(parts))


def _sent(readout: Readout) -> Kernel:
    """Gradient at what the matrix multiplies."""
    return readout.gradient() if readout.normalised else readout.gradient() + readout.radial()


def _kappa(leaf: Component, output: Signal) -> Array:
    """width times the relative variance of a squared norm that a hidden layer's parts add."""
    if leaf.hidden is None:
        return 2.0 if leaf.matrices else 0.0
    return np.maximum(norm_variance(output) * output.width - 2.0, 0.0)


@dataclass(frozen=True)
class _Ending:
    """The matrix and its loss.

    Attributes:
        answer: of the gradient at what the matrix multiplies, to its kernel.
        grad_out: (..., L, L) that gradient.
        width: features that the matrix multiplies.
        agreement, effect: how far tokens' D_ii vary together, and how much, over draws.
        batch: sequences that share the weights.
        unknown: (..., L, L) variance of `grad_out` over texts, that of D_ij.
        shared: E of the squares of what a token's gradient shares with those of other sequences,
            summed over them, relative to that of all its own.
    """

    answer: Elementwise
    grad_out: Array
    width: float
    agreement: Array
    effect: tuple[Array, Array]
    batch: float
    unknown: Array
    shared: Array

    @classmethod
    def of(cls, readout: Readout, grad_out: Array, unit: Array, batch: float) -> _Ending:
        kernel, length = readout.kernel, readout.seq_len
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = Kernel.joined(kernel.diagonal, np.sqrt(first * second), kernel.resolved)
        near = kernel - scale.scaled(STEP).weighted(0.0, 1.0)
        base = matrix_of(_sent(readout), length)
        change = base - matrix_of(_sent(_moved(readout, near)), length)
        change = without_diagonal(change / matrix_of(scale.scaled(STEP), length))
        diagonal = 0.0 * base
        if not readout.normalised:
            grown = dataclasses.replace(
                readout,
                kernel=kernel.scaled(1 + _COARSE),
                carried=readout.carried * np.sqrt(1 + _COARSE),
            )
            diagonal = (matrix_of(_sent(grown), length) - base) / _COARSE
            diagonal = diagonal - change * matrix_of(kernel, length)
        back, change, diagonal = (in_units(entry, unit) for entry in (base, change, diagonal))
        none = 0.0 * back
        off_diagonal = (matrix_of(kernel, length) + 0.0 * base).astype(SINGLE)
        answer = Elementwise(none, none, back, change, diagonal, off_diagonal, none + 1)
        excess = matrix_of(mean_square(readout), length) - matrix_of(readout.overlap, length) ** 2
        size = readout.scale**2 * readout.weight_variance
        unknown = entrywise(lambda more: np.maximum(more, 0.0), excess) * size**2
        unknown = in_units(unknown, unit**2)
        drawn = logit_agreement(readout), logit_effect(readout), batch
        shared = (batch - 1) * across(readout)
        return cls(answer, grad_out, float(readout.width), *drawn, unknown, shared)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        step, weighted = self.answer.gradient_adjoint(sensitivity), sensitivity * self.grad_out
        noise = 2 / self.width * paired(sensitivity, self.grad_out, self.grad_out)
        diagonal = diagonal_of(sensitivity)
        spread = self.unknown * diagonal[..., :, None] * diagonal[..., None, :]
        noise += 2 / self.width * (total(spread) + self.shared)
        tokens = row_sums(weighted)
        agreeing = (self.agreement @ tokens[..., :, None])[..., 0]
        share = over_tokens(tokens * agreeing, self.grad_out)
        noise += log_variance_of_mean(self.effect, share / self.batch) * self.batch
        return step._replace(noise=noise)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        # above it there is nothing, of as many tokens as the matrix attends to
        by_size = exposure[1]
        none = diagonal_matrix(np.zeros(by_size.shape, SINGLE), self.grad_out)
        return self.answer.signal_adjoint(none, exposure)


def _moved(readout: Readout, kernel: Kernel) -> Readout:
    """The readout of tokens otherwise correlated, whose softmaxes are what they were."""
    moved = dataclasses.replace(readout, kernel=kernel)
    vars(moved).update(softmax=readout.softmax, _unread=readout._unread)
    return moved
