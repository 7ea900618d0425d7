"""How far one draw's gradient at the logits is from its mean.

With D_ij = sum_v d_i(v) d_j(v) of the gradients d at two tokens' logits (`readout`):

* D_ii varies with the target's logit, by the share it has in few logits: given here is
  Var E(D_ii | target's logit). Of a shift of all logits D knows nothing, so that the others' mean
  effects add 1/(V - 1) of it, and two tokens' vary together by the correlation of their logits,
  -1/(V - 1) of that where they have different targets. What logits do together is left out: of 3
  to 8 classes the deviation of log D_ii comes out 3 to 9 % low at a logit variance of .5 and below,
  13 to 17 % at 1;
* where the text is not known, kernels hold probabilities of coincidence q, and E D_ij^2 exceeds
  their square by q (1 - q) times the square of what a common target adds.

See docs/theory/loss.md.
"""

from __future__ import annotations

import numpy as np

from ..engine.sensitivity import SINGLE, Matrix, matrix_of, ratio
from ..engine.state import Array, Kernel
from ..transfer.head.cross_entropy import softmax_expectations
from ..transfer.head.readout import Readout

_NODES = 9  # of the average over the target's logit
_ROUNDING = 1e-15
_FIXED = 1e-9  # variance of a logit that is given, over that of the others


def overlap_variance(readout: Readout, batch: int) -> Array:
    """width times the relative variance of |gradient|^2 of tokens alike, over draws and texts."""
    length = readout.seq_len
    inside = mean_square(readout).total(length) / (length * readout.overlap.diagonal) ** 2
    return 2 * (inside + (batch - 1) * across(readout)) / batch


def across(readout: Readout) -> Array:
    """Sum of E (D_ij/T^2)^2 over the tokens of two sequences, over (sum of D_ii/T^2)^2.

    They agree by a common target alone.
    """
    targets, overlap = readout.targets, readout.overlap
    common = (1 - readout.smoothing) ** 2 * _slope_square(readout) / targets.count**2
    first, second = overlap.over_tokens(targets.active)
    agree = first * second * targets.same_target * common**2
    if overlap.resolved:
        own, kind = overlap.diagonal, overlap.resolved
        apart, alone = Kernel.joined(0.0 * own, agree, kind), overlap.weighted(1.0, 0.0)
        return apart.total(readout.seq_len) / alone.total(readout.seq_len) ** 2
    return agree / overlap.diagonal**2


def mean_square(readout: Readout) -> Kernel:
    """E (D_ij/T^2)^2 over texts; the square itself where the text is known."""
    targets, overlap = readout.targets, readout.overlap
    common = (1 - readout.smoothing) ** 2 * _slope_square(readout) / targets.count**2
    same = targets.same_target
    pairs = ratio(overlap.pairs**2, targets.both + 0 * overlap.pairs)
    pairs = pairs + targets.both * same * (1 - same) * common**2
    diagonal = ratio(overlap.diagonal**2, targets.active + 0 * overlap.diagonal)
    return Kernel.joined(diagonal, pairs, overlap.resolved)


def _slope_square(readout: Readout) -> Array:
    """E f'^2 of a logit's cap f, averaged over tokens."""
    slope = readout.softmax.other.slope_square
    kernel = readout.kernel
    return kernel.average(slope)[..., None, None] if kernel.resolved else slope


def softmax_variance(readout: Readout, batch: int) -> Array:
    """Var log of the mean of D_ii over tokens alike, through the softmax."""
    targets, kernel = readout.targets, readout.kernel
    other = readout.vocab_size - 1
    agree = targets.same_target - (1 - targets.same_target) / other
    agree = agree * targets.both * kernel.pairs / kernel.diagonal
    active, length = targets.active, readout.seq_len
    tokens = (active + (length - 1) * agree) / (length * active**2)
    return log_variance_of_mean(logit_effect(readout), tokens * (1 + 1 / other) / batch)


def logit_agreement(readout: Readout) -> Matrix:
    """How far log D_ii and log D_jj vary together, 1 + 1/(V - 1) where they are one."""
    same, kernel = readout.targets.same_target, readout.kernel
    other = readout.vocab_size - 1
    first, second = kernel.over_tokens(kernel.diagonal)
    agree = (same - (1 - same) / other) * kernel.pairs / np.sqrt(first * second)
    agree = Kernel.joined(1.0 + 0.0 * kernel.diagonal, agree, kernel.resolved)
    return matrix_of(agree.scaled(1 + 1 / other)).astype(SINGLE)


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
