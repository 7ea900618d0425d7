"""What a tied matrix adds to a readout: the row of the token that is read is in what it multiplies.

h_i = k_i E_id + ..., so that the logit of the token's own row has a mean, and the gradient meets
that row again: with A_ij = E d_j(id_i), token j's gradient at the logit of the token that i reads,
h_i . g_j/d = variance k_i A_ij beside the part along h_j.

See docs/theory/loss.md, Tied rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero

if TYPE_CHECKING:
    from .readout import Readout


def own_gradient(readout: Readout) -> Array:
    """A_ii."""
    own, targets = readout.softmax.own, readout.targets
    hit = targets.own * (1 - readout.smoothing) + readout.smoothing / readout.vocab_size
    return (own.probability_slope - hit * own.slope) * targets.active


def gradients(readout: Readout) -> tuple[Array, Array]:
    """A_ij and A_ji."""
    own, other, targets = readout.softmax.own, readout.softmax.other, readout.targets
    over_tokens, same = readout.kernel.over_tokens, targets.same_token
    hit = targets.hit * (1 - readout.smoothing) + readout.smoothing / readout.vocab_size
    _, slope = over_tokens(other.slope)
    _, mine = over_tokens(own.probability_slope)
    _, rest = over_tokens(other.probability_slope)
    _, active = over_tokens(targets.active)
    result = (same * mine + (1 - same) * rest - _turned(readout, hit) * slope) * active
    return result, _turned(readout, result)


def projected(readout: Readout) -> Kernel:
    """What a norm's projection adds to D/T^2, f the own row's share of what is read.

    D_ij - f_i E A_ii A_ij - f_j E A_jj A_ji + sqrt(f_i f_j) r_ij E A_ii A_jj.
    """
    kernel, targets = readout.kernel, readout.targets
    if not np.any(readout.carried):
        return kernel.scaled(0.0)
    share, first = readout.own_share, own_gradient(readout)
    own, other, kept = readout.softmax.own, readout.softmax.other, 1 - readout.smoothing
    hit = targets.own * kept
    square = own.square_slope_square - 2 * hit * own.probability_slope_square
    square = (square + hit * kept * own.slope_square) * targets.active
    share_i, share_j = kernel.over_tokens(share)
    first_i, first_j = kernel.over_tokens(first)
    scale_i, scale_j = kernel.over_tokens(kernel.diagonal)
    correlation = ratio_or_zero(kernel.off_diagonal, np.sqrt(scale_i * scale_j))
    forth, back = gradients(readout)
    # Two tokens that read the same one have correlated own probabilities.
    p_i, p_j = kernel.over_tokens(own.probability_slope)
    rise_i, rise_j = kernel.over_tokens(np.log(own.ends) / 2)
    beyond = targets.same_token * targets.both * p_i * p_j
    beyond = beyond * np.expm1(correlation * (rise_i + rise_j))
    # Where the text is not known, a frequent token is hit by both more often than by chance.
    own_i, _ = kernel.over_tokens(targets.own)
    slope_i, _ = kernel.over_tokens(own.slope)
    _, slope_j = kernel.over_tokens(other.slope)
    together = targets.both_hit - own_i * _turned(readout, targets.hit)
    together = kept**2 * slope_i * slope_j * targets.both * together
    off_diagonal = np.sqrt(share_i * share_j) * correlation * (first_i * first_j + beyond)
    off_diagonal = off_diagonal - share_i * (first_i * forth + beyond + together)
    off_diagonal = off_diagonal - share_j * (first_j * back + beyond + _turned(readout, together))
    return Kernel.joined(-share * square, off_diagonal, kernel.resolved).scaled(targets.count**-2.0)


def cross_gradient(readout: Readout) -> Array:
    """Twice the overlap of a tied table's gradients as matrix and as what the input reads.

    To leading order: the input's part is taken along the skip connections, by which row id_i
    receives carried_i times the gradient at h_i.
    """
    kernel, carried, size = readout.kernel, readout.carried, readout.weight_variance
    if not np.any(carried):
        return 0.0 * kernel.total(readout.seq_len)
    # carried_i sum_j d_j(id_i) g_i . h_j, where g_i . h_j/d = s (k_j A_ji - k_i A_ii r_ij) if a
    # norm takes away what is along h_i, else s k_j A_ji + b_i H_ij.
    first = own_gradient(readout)
    forth, back = gradients(readout)
    k, other_k = kernel.over_tokens(carried + 0 * first)
    if readout.normalised:
        lost, _ = kernel.over_tokens(ratio_or_zero(size * carried * first, kernel.diagonal))
        off_diagonal = k * forth * (size * other_k * back - lost * kernel.off_diagonal)
        alone = 0.0 * first
    else:
        length, _ = kernel.over_tokens(readout.radial_length)
        off_diagonal = k * forth * (size * other_k * back + length * kernel.off_diagonal)
        along = size * carried * first + readout.radial_length * kernel.diagonal
        alone = carried * first * along
    result = Kernel.joined(alone, off_diagonal, kernel.resolved)
    total = result.total(readout.seq_len) / readout.targets.count**2
    return 2 * readout.scale**2 * readout.width * total


def _turned(readout: Readout, off_diagonal: Array) -> Array:
    """The value for (j, i)."""
    return off_diagonal.swapaxes(-1, -2) if readout.kernel.resolved else off_diagonal
