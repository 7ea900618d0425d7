"""Cross-entropy of the logits of a random matrix: loss, gradients at its input and at the matrix.

D_ij = E sum_v d_i(v) d_j(v), d_i(v) = dloss_i/dz_i(v), is exact for one token and for two tokens of
independent or equal logits. In between, logits of words that neither token reads follow
`softmax_agreement`; other terms are geometric in the correlation, like E exp(z + z'). See
docs/theory/loss.md, The gradient of random logits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from .cross_entropy import Softmax, softmax_expectations
from .softmax_agreement import agreement_share
from .targets import Targets

# Squared log of E p^2/(E p)^2 over the width below which the fluctuation of overlaps is neglected:
# it changes E p p' by less than .05 percent.
_STILL = 1e-3


@dataclass(frozen=True, eq=False)
class Readout:
    """The matrix to the logits, and the mean cross-entropy over the targets.

    Attributes:
        kernel: of the matrix's input h.
        vocab_size: number of logits V.
        weight_variance: of the matrix's entries.
        softcap: of the logits; None: uncapped.
        smoothing: label smoothing, the share of a target that is spread over all logits.
        carried: amplitude k_i of the token's own row of a tied table in h, h_i = k_i E_id + ...;
            0 for an untied matrix.
        normalised: whether h is the output of a normalisation and has a fixed norm.
        centred: whether that normalisation removed the mean.
    """

    kernel: Kernel
    seq_len: int
    width: int
    targets: Targets
    vocab_size: int
    weight_variance: float
    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    carried: Array = 0.0
    normalised: bool = True
    centred: bool = False

    @functools.cached_property
    def own_share(self) -> Array:
        """Share of the token's own row in h's variance."""
        return ratio_or_zero(self.carried**2 * self.weight_variance, self.kernel.diagonal)

    @functools.cached_property
    def variance(self) -> Array:
        """Variance of a token's logits."""
        return self.scale**2 * self.width * self.weight_variance * self.kernel.diagonal

    @functools.cached_property
    def softmax(self) -> Softmax:
        """Expectations of every token's softmax.

        The logit of the token's own row, with h = x/s, x = a E + rest and share f of E in x: to
        leading order in 1/d its mean is that of a |E|^2/s, reduced by 1/(4 d) by the fluctuation of
        s, and its variance is that of other logits times 1 - f/2, as |E|^2 fluctuates in numerator
        and s alike; without a norm times 1 + f.
        """
        rows = self.width - float(self.centred)
        share = self.own_share
        mean = self.scale * self.carried * self.weight_variance * rows
        own_variance = self.variance * (1 + share)
        if self.normalised:
            mean, own_variance = mean * (1 - 1 / (4 * rows)), self.variance * (1 - share / 2)
        return softmax_expectations(
            self.vocab_size, self.variance, mean, own_variance, self.softcap
        )

    @functools.cached_property
    def _unread(self) -> Softmax:
        """`softmax` of an untied matrix."""
        if not np.any(self.carried):
            return self.softmax
        return softmax_expectations(self.vocab_size, self.variance, softcap=self.softcap)

    # --- loss ----------------------------------------------------------------------------------

    @functools.cached_property
    def loss(self) -> Array:
        """Expected cross-entropy, averaged over the targets."""
        softmax, targets, spread = self.softmax, self.targets, self.smoothing
        mean = (softmax.own.value + (self.vocab_size - 1) * softmax.other.value) / self.vocab_size
        target = targets.own_word * softmax.own.value + (1 - targets.own_word) * softmax.other.value
        loss = softmax.log_sum - (1 - spread) * target - spread * mean
        if not self.kernel.resolved:
            return loss
        average = self.kernel.average
        return average(loss * targets.active) / average(targets.active + 0.0 * loss)

    @functools.cached_property
    def logit_square(self) -> Array:
        """Mean square of a logit, over all tokens."""
        own, other = self.softmax.own, self.softmax.other
        square = (own.square + (self.vocab_size - 1) * other.square) / self.vocab_size
        return self.kernel.average(square)

    def loss_variance(self) -> Array:
        """Variance of the loss over draws of the matrix.

        Cov(l_i, l_j) = int_0^1 E sum_v d_i(v) d_j(v) z_ij dt, with t z_ij as the covariance of the
        two tokens' logits (interpolation of Gaussian covariances), by Simpson's rule.
        """
        shared = self.kernel.scaled(self.scale**2 * self.width * self.weight_variance)
        steps = ((0.0, 1.0), (0.5, 4.0), (1.0, 1.0))
        parts = [self._overlap(at, True).scaled(w / 6) for at, w in steps]
        total = (shared * (parts[0] + parts[1] + parts[2])).total(self.seq_len)
        # Sequences of exchangeable tokens are taken as independent of each other.
        batches = 1.0 if self.kernel.resolved else self._batches
        return batches * total / self.targets.count**2

    @property
    def _batches(self) -> float:
        return float(self.targets.count / (self.seq_len * self.targets.active))

    # --- gradients -----------------------------------------------------------------------------

    @functools.cached_property
    def overlap(self) -> Kernel:
        """D_ij/T^2: E sum_v of the products of two tokens' gradients at their logits."""
        return self._overlap(1.0).scaled(self.targets.count**-2.0)

    @functools.cached_property
    def _sent(self) -> Kernel:
        """`overlap` over logits whose rows of the matrix are not 0."""
        if not np.any(self.targets.blank):
            return self.overlap
        return self._overlap(1.0, True).scaled(self.targets.count**-2.0)

    def gradient(self) -> Kernel:
        """Gradient at h, without its part along h, which a normalisation before the head removes.

        With a tied matrix the token's own row is partly along h: with A_ij = E d_j(id_i) this
        reduces D_ij by f_i A_ii A_ij, and likewise for j.
        """
        size = self.scale**2 * self.weight_variance
        return (self._sent + self._projected()).scaled(size)

    def radial(self) -> Kernel:
        """The part of the gradient at h along h: variance times sum_v E dd_i(v)/dz_i(v)."""
        radial = self._with_along(self.radial_length).scaled(self.targets.count**-2.0)
        return (radial - self._projected()).scaled(self.scale**2 * self.weight_variance)

    @property
    def radial_length(self) -> Array:
        """b_i in T sum_v d_i(v) E_v = scale (variance b_i h_i + ...)."""
        own, other = self.softmax.own, self.softmax.other
        of_own = own.probability_slope_square - own.square_slope_square
        of_other = other.probability_slope_square - other.square_slope_square
        return self.scale * (of_own + (self.vocab_size - 1) * of_other) * self.targets.active

    def gain_gradient(self) -> Array:
        """Squared gradient norm of a gain before the matrix, beyond that of independent g and h.

        dgain = sum_i g_i h_i, entry by entry. If a_i h_i is the part of g_i along h_i, its square
        is d sum_ij a_i a_j E h_i^2 h_j^2, with 1 + 2 r_ij^2 for Gaussian features. After a GELU it
        is larger: the gain of a hidden layer's norm comes out about 5 % low.
        """
        kernel = self.kernel
        along = self._along_rows.diagonal + self.radial_length * kernel.diagonal
        along = self.weight_variance * along
        i, j = kernel.over_tokens(along)
        first, second = kernel.over_tokens(kernel.diagonal)
        off_diagonal = i * j * (1 + 2 * ratio_or_zero(kernel.off_diagonal**2, first * second))
        total = Kernel.of_parts(3 * along**2, off_diagonal, kernel.resolved).total(self.seq_len)
        return self.width * self.scale**2 * total / self.targets.count**2

    def matrix_gradient(self) -> Array:
        """Squared gradient norm of the matrix: d/T^2 sum_ij D_ij H_ij."""
        size = self.scale**2 * self.width
        return size * (self.overlap * self.kernel).total(self.seq_len)

    def bias_gradient(self) -> Array:
        """Squared gradient norm of a bias of the logits."""
        return self.overlap.total(self.seq_len)

    def _overlap(self, at: float, drawn: bool = False) -> Kernel:
        """D_ij with the tokens' correlations multiplied by `at`.

        `drawn`: without targets whose row of the matrix is 0. The probability that other tokens
        assign to such a row, 1/vocab_size of the sum, is not removed.
        """
        kernel, targets = self.kernel, self.targets
        first, second = kernel.over_tokens(kernel.diagonal)
        hit, swapped = targets.hits, targets.hits
        if kernel.resolved:
            swapped = hit.swapaxes(-1, -2)
        both = (targets.same_target, targets.same_token, hit, swapped)
        correlation = at * ratio_or_zero(kernel.off_diagonal, np.sqrt(first * second))
        # The overlap of two tokens of independent features has variance 1/width over draws.
        deviation = (1 - correlation**2) * at / self.width**0.5
        blank = targets.blank if drawn else 0.0
        off_diagonal = targets.both_active * self._products(
            correlation, both, kernel.over_tokens, blank, deviation
        )
        itself = (1.0, 1.0, targets.own_word, targets.own_word)
        equal = at + 0 * kernel.diagonal
        diagonal = self._products(equal, itself, lambda value: (value, value), blank)
        return Kernel.of_parts(targets.active * diagonal, off_diagonal, kernel.resolved)

    def _products(
        self,
        correlation: Array,
        same: tuple[Array, ...],
        lift: Any,
        blank: Array,
        deviation: Array = 0.0,
    ) -> Array:
        """E sum_v d_i(v) d_j(v) at a correlation of the logits with a standard `deviation` over
        draws. `same` are the probabilities `same_target`, `same_token`, `hit` and its transpose of
        `Targets`; `lift` broadcasts tokens to pairs; a `blank` target is left out of the sum."""
        same_target, same_token, hit, swapped = same
        own, other, vocab_size = self.softmax.own, self.softmax.other, self.vocab_size
        target_weight, uniform = 1 - self.smoothing, self.smoothing / self.vocab_size

        def between(ends: Array, exponent: Array = correlation) -> Array:
            """Rises from 1 to sqrt(ends_i ends_j) as the exponent goes from 0 to 1."""
            i, j = lift(0.5 * np.log(ends))
            return np.exp(exponent * (i + j))

        # probability times slope of both tokens, of the own row's logit and of any other
        other_i, other_j = lift(other.probability_slope)
        own_i, own_j = lift(own.probability_slope)
        # slope of the target, which may be the token's own row
        reads = self.targets.own_word
        mean_slope = reads * own.slope + (1 - reads) * other.slope
        slope_square = reads * own.slope_square + (1 - reads) * other.slope_square
        slope_i, slope_j = lift(mean_slope * (1 - blank))
        # How two softmaxes agree on the remaining words is taken from an untied matrix.
        free_ends = self._unread.other.ends
        agreement = sum(
            weight * between(free_ends, self._agreement_share(correlation + step * deviation))
            for step, weight in self._steps(free_ends)
        )
        same = (vocab_size - 1) * other_i * other_j * between(other.ends)
        same = same + own_i * own_j * between(own.ends)
        different = (vocab_size - 2) * other_i * other_j + own_i * other_j + other_i * own_j
        softmaxes = same_token * same + (1 - same_token) * different * agreement
        slopes = slope_i * slope_j * between(slope_square / mean_slope**2)
        other_hits, own_hits = between(other.hits), between(own.hits)
        # p_j at i's target, and p_i at j's
        at_i = hit * own_j * slope_i * own_hits + (1 - hit) * other_j * slope_i * other_hits
        at_j = swapped * own_i * slope_j * own_hits
        at_j = at_j + (1 - swapped) * other_i * slope_j * other_hits
        result = softmaxes - target_weight * (at_i + at_j)
        result = result + target_weight**2 * same_target * slopes
        if self.smoothing:
            i, j = lift((vocab_size - 1) * other.probability_slope + own.probability_slope)
            at_all = i * slope_j * other_hits + j * slope_i * other_hits
            result = result - uniform * at_all
            result = result + uniform * (2 * target_weight + self.smoothing) * slopes
        return result

    def _steps(self, ends: Array) -> tuple[tuple[float, float], ...]:
        """Gauss-Hermite points and weights; a single point if the fluctuation is negligible."""
        if np.max(np.log(ends)) ** 2 < _STILL * self.width:
            return ((0.0, 1.0),)
        points, weights = np.polynomial.hermite_e.hermegauss(5)
        return tuple(zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True))

    def _agreement_share(self, correlation: Array) -> Array:
        """`agreement_share` at the mean variance of the logits of every configuration."""
        variance = self.softmax.other.square
        variance = self.kernel.average(variance)
        if np.ndim(variance) == 0:
            return agreement_share(self.vocab_size, float(variance), correlation)
        tail = np.shape(correlation)[np.ndim(variance) :]
        correlations = np.broadcast_to(correlation, (*np.shape(variance), *tail))
        result = np.empty(correlations.shape)
        for index, value in np.ndenumerate(variance):
            result[index] = agreement_share(self.vocab_size, float(value), correlations[index])
        return result

    # --- a tied matrix, whose input contains the row of the token that is read ------------------
    #
    # h_i = k_i E_id + ..., so the logit of the token's own row has a mean and the gradient contains
    # that row: with A_ij = E d_j(id_i), token j's gradient at the logit of the word of token i,
    # T g_i = scale (f_i + variance a_i h_i), f_i . h_j/d = variance k_j A_ji; a_i is the radial
    # length, or removes the part of f_i along h_i. See docs/theory/loss.md, Tied rows.

    @functools.cached_property
    def _along_rows(self) -> Kernel:
        """f_i . h_j/d over the variance: k_j A_ji."""
        kernel, own, other = self.kernel, self.softmax.own, self.softmax.other
        targets, uniform = self.targets, self.smoothing / self.vocab_size
        target_weight = 1 - self.smoothing
        slope, _ = kernel.over_tokens(other.slope)
        of_own, _ = kernel.over_tokens(own.probability_slope)
        of_other, _ = kernel.over_tokens(other.probability_slope)
        active, _ = kernel.over_tokens(targets.active)
        _, k = kernel.over_tokens(self.carried + 0 * kernel.diagonal)
        same = targets.same_token
        off_diagonal = same * of_own + (1 - same) * of_other
        off_diagonal = off_diagonal - (targets.hits * target_weight + uniform) * slope
        itself = own.probability_slope - (targets.own_word * target_weight + uniform) * own.slope
        diagonal = self.carried * itself * targets.active
        return Kernel.of_parts(diagonal, k * off_diagonal * active, kernel.resolved)

    def _with_along(self, along: Array) -> Kernel:
        """Change of f_i . f_j/d by adding a_i h_i to f_i, over the variance."""
        kernel, rows = self.kernel, self._along_rows
        i, j = kernel.over_tokens(along + 0 * kernel.diagonal)
        off_diagonal = i * self._swapped(rows.off_diagonal)
        off_diagonal = off_diagonal + j * (rows.off_diagonal + i * kernel.off_diagonal)
        diagonal = along * (2 * rows.diagonal + along * kernel.diagonal)
        result = Kernel.of_parts(diagonal, off_diagonal, kernel.resolved)
        return result.scaled(self.weight_variance)

    def _projected(self) -> Kernel:
        """Change of D/T^2 by the projection of a norm, f the share of the own row in h.

        D_ij - f_i E A_ii A_ij - f_j E A_jj A_ji + sqrt(f_i f_j) r_ij E A_ii A_jj.
        """
        kernel, targets = self.kernel, self.targets
        if not np.any(self.carried):
            return kernel.scaled(0.0)
        own, other, kept = self.softmax.own, self.softmax.other, 1 - self.smoothing
        hit = targets.own_word * kept
        square = own.square_slope_square - 2 * hit * own.probability_slope_square
        square = (square + hit * kept * own.slope_square) * targets.active
        share_i, share_j = kernel.over_tokens(self.own_share)
        scale_i, scale_j = kernel.over_tokens(kernel.diagonal)
        correlation = ratio_or_zero(kernel.off_diagonal, np.sqrt(scale_i * scale_j))
        # The probabilities of the own row are correlated for two tokens that are the same word.
        p_i, p_j = kernel.over_tokens(own.probability_slope)
        rise_i, rise_j = kernel.over_tokens(np.log(own.ends) / 2)
        beyond = targets.same_token * targets.both_active * p_i * p_j
        beyond = beyond * np.expm1(correlation * (rise_i + rise_j))
        # In an unknown text both targets coincide at frequent words more often than by chance.
        own_i, _ = kernel.over_tokens(targets.own_word)
        slope_i, _ = kernel.over_tokens(own.slope)
        _, slope_j = kernel.over_tokens(other.slope)
        both_hit = targets.both_hit - own_i * self._swapped(targets.hits)
        both_hit = kept**2 * slope_i * slope_j * targets.both_active * both_hit
        means = self._with_along(self._removed)
        off_diagonal = means.off_diagonal + np.sqrt(share_i * share_j) * correlation * beyond
        off_diagonal = off_diagonal - share_i * (beyond + both_hit)
        off_diagonal = off_diagonal - share_j * (beyond + self._swapped(both_hit))
        result = Kernel.of_parts(-self.own_share * square, off_diagonal, kernel.resolved)
        return result.scaled(targets.count**-2.0)

    @property
    def _removed(self) -> Array:
        """a_i that removes the part of f_i along h_i."""
        return -ratio_or_zero(self._along_rows.diagonal, self.kernel.diagonal)

    def cross_gradient(self) -> Array:
        """Twice the overlap of a tied table's gradients through the logits and through the input.

        To leading order, with the input's gradient through the skip connections alone: row id_i
        receives carried_i times the gradient at h_i.
        """
        kernel, rows = self.kernel, self._along_rows
        if not np.any(self.carried):
            return 0.0 * kernel.total(self.seq_len)
        # k_i sum_j d_j(id_i) g_i . h_j
        along = self._removed if self.normalised else self.radial_length
        i, _ = kernel.over_tokens(along + 0 * kernel.diagonal)
        radial = Kernel.of_parts(along * kernel.diagonal, i * kernel.off_diagonal, kernel.resolved)
        total = (rows.transposed() * (rows + radial)).total(self.seq_len) / self.targets.count**2
        return 2 * self.scale**2 * self.width * self.weight_variance * total

    def _swapped(self, off_diagonal: Array) -> Array:
        """Values for (j, i)."""
        return off_diagonal.swapaxes(-1, -2) if self.kernel.resolved else off_diagonal
