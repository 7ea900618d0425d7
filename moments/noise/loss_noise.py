"""Fluctuations of the gradient that a head's loss sends to the last layer.

Given the gradients d at the logits, sum_v d_i(v) E_v with Gaussian rows E_v is a Gaussian tensor
with kernel D_ij = sum_v d_i(v) d_j(v) (`readout`), so that its realised kernel is a Wishart matrix
of `width` degrees of freedom, with variance 2 tr(D D)/width. Hidden layers of the head add noise.
The final normalisation divides by the stream's realised norms and the softmax depends on its
realised overlaps: the response of the last gradient to the last signal. If there are few logits,
D_ii itself varies; only Var E(D_ii | target's logit) of this is included.

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
    Elementwise,
    GradientAdjoint,
    GradientUnits,
    Matrix,
    Response,
    Sequence,
    SignalAdjoint,
    diagonal_matrix,
    entrywise,
    in_units,
    matrix_of,
    over_tokens,
    ratio,
    row_sums,
    total,
    trace_of,
    trace_of_products,
    without_diagonal,
)
from ..engine.state import Array, Kernel, Signal
from ..engine.trace import Trace
from ..layers.head.components import Pool
from ..layers.head.cross_entropy import softmax_expectations
from ..layers.head.readout import Readout

_NODES = 9  # Gauss nodes for the target's logit
_ROUNDING = 1e-15
_FIXED = 1e-9  # variance of a logit that is conditioned on, over that of the others


def across(readout: Readout) -> Array:
    """Sum of E (D_ij/T^2)^2 over pairs of tokens of two sequences, over (sum of D_ii/T^2)^2.

    Only pairs with the same target contribute.
    """
    targets, overlap = readout.targets, readout.overlap
    first, second = overlap.over_tokens(targets.active)
    square = first * second * targets.same_target * _of_same_target(readout) ** 2
    if overlap.resolved:
        pairs = Kernel.of_parts(0.0 * overlap.diagonal, square, overlap.resolved)
        tokens = overlap.weighted(1.0, 0.0)
        return pairs.total(readout.seq_len) / tokens.total(readout.seq_len) ** 2
    return square / overlap.diagonal**2


def mean_square(readout: Readout) -> Kernel:
    """E (D_ij/T^2)^2 over texts: the square of the mean, plus q (1 - q) times the square of the
    contribution of a common target, which two tokens have with probability q."""
    targets, overlap = readout.targets, readout.overlap
    same = targets.same_target
    off_diagonal = ratio(overlap.off_diagonal**2, targets.both_active + 0 * overlap.off_diagonal)
    variance = targets.both_active * same * (1 - same) * _of_same_target(readout) ** 2
    diagonal = ratio(overlap.diagonal**2, targets.active + 0 * overlap.diagonal)
    return Kernel.of_parts(diagonal, off_diagonal + variance, overlap.resolved)


def _of_same_target(readout: Readout) -> Array:
    """Contribution of a common target to D_ij/T^2: its squared weight times E f'^2 of the logits'
    softcap f, averaged over tokens."""
    slope, kernel = readout.softmax.other.slope_square, readout.kernel
    slope = kernel.average(slope)[..., None, None] if kernel.resolved else slope
    return (1 - readout.smoothing) ** 2 * slope / readout.targets.count**2


def logit_agreement(readout: Readout) -> Matrix:
    """Covariance of log D_ii and log D_jj over that of a token whose target alone varied.

    D does not change if all logits are shifted, so that the other logits add 1/(V - 1) to the
    effect of the target's. Two tokens with the same target are correlated as their logits, with
    different targets by -1/(V - 1) of that.
    """
    same, kernel = readout.targets.same_target, readout.kernel
    others = readout.vocab_size - 1
    first, second = kernel.over_tokens(kernel.diagonal)
    agreement = (same - (1 - same) / others) * kernel.off_diagonal / np.sqrt(first * second)
    agreement = Kernel.of_parts(1.0 + 0.0 * kernel.diagonal, agreement, kernel.resolved)
    return matrix_of(agreement.scaled(1 + 1 / others), readout.seq_len).astype(SINGLE)


def log_variance_of_mean(effect: tuple[Array, Array], share: Array) -> Array:
    """Var log of an average whose variance is `share` of that of one item, with the `effect` of
    `logit_effect`: exact for one item, and for many, where it is their relative variance."""
    relative, logarithm = effect
    return relative * share + (logarithm - relative) * share**2


def logit_effect(readout: Readout) -> tuple[Array, Array]:
    """Relative variance of E(D_ii | target's logit) and variance of its logarithm, (...,).

    By Gauss quadrature over that logit, with the logits' variance averaged over tokens.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    variance = np.asarray(readout.kernel.average(readout.variance))[..., None]
    count, hit = readout.vocab_size, 1 - readout.smoothing
    logits = nodes * np.sqrt(variance)
    softmax = softmax_expectations(count, variance, logits, _FIXED * variance, readout.softcap)
    own, other = softmax.own, softmax.other
    square = own.square_slope_square + (count - 1) * other.square_slope_square
    value = square - 2 * hit * own.probability_slope_square + hit**2 * own.slope_square
    # If the target has nearly all probability, `value` is rounding error.
    mean, logarithm = value @ weights, np.log(np.maximum(value, _ROUNDING))
    centre = logarithm @ weights
    relative = ratio((value - mean[..., None]) ** 2 @ weights, mean**2)
    return relative, (logarithm - centre[..., None]) ** 2 @ weights


# --- the head as the source of the last gradient --------------------------------------------------


_COARSE = 1e-2
"""Relative step of the logits' variance, over which `softmax_agreement` may jump by .1 percent."""


@dataclass(frozen=True, eq=False)
class HeadTop:
    """A head with a loss as the source of the last gradient (a `band.GradientSource`)."""

    readout: Readout

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The last layer's gradient, over its trace, and the response of the head."""
        before = trace.stream()[-1]
        assert before.gradient is not None
        assert trace.ending is not None
        grad_out = matrix_of(before.gradient.kernel, before.signal.seq_len)
        unit = trace_of(grad_out)
        last = first = in_units(grad_out, unit)
        around = GradientUnits(np.asarray(unit))
        parts: list[Response] = []
        for record in trace.ending.children:
            last, leaf = around.grad_out(record), record.component
            response = leaf.response(record, around)
            if not isinstance(leaf, Pool):
                response = around.alone(record, response, _kappa(leaf, record.output))
            parts.append(response)
        parts.append(_Loss.from_readout(self.readout, last, unit, batch))
        return first, Sequence(tuple(parts))


def _grad_in(readout: Readout) -> Kernel:
    """Gradient at the input of the logits' matrix."""
    return readout.gradient() if readout.normalised else readout.gradient() + readout.radial()


def _kappa(leaf: Component, output: Signal) -> Array:
    """width times the relative variance of the squared norm that a hidden layer adds."""
    if leaf.hidden is None:
        return 2.0 if leaf.matrices else 0.0
    return np.maximum(norm_variance(output) * output.width - 2.0, 0.0)


@dataclass(frozen=True)
class _Loss:
    """Response of the logits' matrix with the loss; the signal is the matrix's input.

    Attributes:
        response: of the gradient at the input to the signal.
        grad_in: (..., L, L) gradient at the input.
        width: number of features of the input.
        agreement, effect: `logit_agreement` and `logit_effect`.
        batch: number of sequences that share the weights.
        text_variance: (..., L, L) variance of `grad_in` over texts.
        shared: `across`, summed over all other sequences.
    """

    response: Elementwise
    grad_in: Array
    width: float
    agreement: Array
    effect: tuple[Array, Array]
    batch: float
    text_variance: Array
    shared: Array

    @classmethod
    def from_readout(cls, readout: Readout, grad_in: Array, unit: Array, batch: float) -> _Loss:
        kernel, length = readout.kernel, readout.seq_len
        # Derivatives of the gradient's kernel, as in `Elementwise.of`.
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = Kernel.of_parts(kernel.diagonal, np.sqrt(first * second), kernel.resolved)
        decorrelated = kernel - scale.scaled(STEP).weighted(0.0, 1.0)
        base = matrix_of(_grad_in(readout), length)
        slope = base - matrix_of(_grad_in(_with_kernel(readout, decorrelated)), length)
        slope = without_diagonal(slope / matrix_of(scale.scaled(STEP), length))
        growth = 0.0 * base
        if not readout.normalised:
            enlarged = dataclasses.replace(
                readout,
                kernel=kernel.scaled(1 + _COARSE),
                carried=readout.carried * np.sqrt(1 + _COARSE),
            )
            growth = (matrix_of(_grad_in(enlarged), length) - base) / _COARSE
            growth = growth - slope * matrix_of(kernel, length)
        factor, slope, growth = (in_units(entry, unit) for entry in (base, slope, growth))
        zero = 0.0 * factor
        signal = (matrix_of(kernel, length) + 0.0 * base).astype(SINGLE)
        response = Elementwise(zero, zero, factor, slope, growth, signal, zero + 1)
        # Variance over texts.
        excess = matrix_of(mean_square(readout), length) - matrix_of(readout.overlap, length) ** 2
        size = readout.scale**2 * readout.weight_variance
        variance = entrywise(lambda entry: np.maximum(entry, 0.0), excess) * size**2
        variance = in_units(variance, unit**2)
        logits = logit_agreement(readout), logit_effect(readout), batch
        shared = (batch - 1) * across(readout)
        return cls(response, grad_in, float(readout.width), *logits, variance, shared)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        result, weighted = self.response.gradient_adjoint(sensitivity), sensitivity * self.grad_in
        noise = 2 / self.width * trace_of_products(sensitivity, self.grad_in, self.grad_in)
        diagonal = diagonal_of(sensitivity)
        of_texts = self.text_variance * diagonal[..., :, None] * diagonal[..., None, :]
        noise += 2 / self.width * (total(of_texts) + self.shared)
        tokens = row_sums(weighted)
        covariances = (self.agreement @ tokens[..., :, None])[..., 0]
        share = over_tokens(tokens * covariances, self.grad_in)
        noise += log_variance_of_mean(self.effect, share / self.batch) * self.batch
        return result._replace(noise=noise)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        # Nothing follows the loss: the sensitivity to its output is 0.
        _, by_size = exposure
        zero = diagonal_matrix(np.zeros(by_size.shape, SINGLE), self.grad_in)
        return self.response.signal_adjoint(zero, exposure)


def _with_kernel(readout: Readout, kernel: Kernel) -> Readout:
    """The readout of a signal with other correlations, which do not change its softmax."""
    result = dataclasses.replace(readout, kernel=kernel)
    vars(result).update(softmax=readout.softmax, _unread=readout._unread)
    return result
