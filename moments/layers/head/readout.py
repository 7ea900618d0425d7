"""Logits of a random matrix and their cross-entropy: loss, gradient at the input, at the matrix.

D_ij = E sum_v d_i(v) d_j(v) of d_i(v) = dloss_i/dz_i(v) is exact for one token, and for a pair
whose logits are independent or equal. Between, logits that neither token reads follow
`softmax_agreement`, others are geometric in the correlation, as exp(c) is in E exp(z + z'). See
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

# Squared log of E p^2/(E p)^2, per feature, below which overlaps' fluctuation moves E p p' by less
# than half as much, .05 percent.
_STILL = 1e-3


@dataclass(frozen=True, eq=False)
class Readout:
    """One matrix to logits, and the mean cross-entropy over the targets.

    Attributes:
        kernel: of what the matrix multiplies, h.
        vocab_size: number of logits V.
        weight_variance: of the matrix's entries.
        softcap: of the logits; None: none.
        smoothing: share of a target's weight that is spread over all logits.
        carried: how much of the read token's own row is in h, h_i = carried_i E_id + ...; 0 where
            the matrix is not the token table.
        normalised: whether h leaves a normalisation, so that its length is fixed.
        centred: whether that removed its mean.
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
        """Share of h's variance that is the token's own row."""
        return ratio_or_zero(self.carried**2 * self.weight_variance, self.kernel.diagonal)

    @functools.cached_property
    def variance(self) -> Array:
        """Variance of a token's logits."""
        return self.scale**2 * self.width * self.weight_variance * self.kernel.diagonal

    @functools.cached_property
    def softmax(self) -> Softmax:
        """Expectations of every token's softmax.

        The own logit, with h = x/s, x = a E + rest and share f of x: to leading order in 1/d its
        mean is that of a |E|^2/s, less 1/(4 d) by the fluctuation of s, and its variance that of
        the others times 1 - f/2, as |E|^2 fluctuates in numerator and s alike; without a norm it
        is 1 + f times.
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
        """The same if no logit were the own row's."""
        if not np.any(self.carried):
            return self.softmax
        return softmax_expectations(self.vocab_size, self.variance, softcap=self.softcap)

    # --- loss ----------------------------------------------------------------------------------

    @functools.cached_property
    def loss(self) -> Array:
        """Expected cross-entropy, averaged over the targets."""
        softmax, targets, spread = self.softmax, self.targets, self.smoothing
        mean = (softmax.own.value + (self.vocab_size - 1) * softmax.other.value) / self.vocab_size
        target = targets.own * softmax.own.value + (1 - targets.own) * softmax.other.value
        each = softmax.log_sum - (1 - spread) * target - spread * mean
        if not self.kernel.resolved:
            return each
        average = self.kernel.average
        return average(each * targets.active) / average(targets.active + 0.0 * each)

    @functools.cached_property
    def logit_square(self) -> Array:
        """Mean square of a logit, over all tokens."""
        own, other = self.softmax.own, self.softmax.other
        square = (own.square + (self.vocab_size - 1) * other.square) / self.vocab_size
        return self.kernel.average(square)

    def loss_variance(self) -> Array:
        """Variance of the loss over draws of the matrix.

        Cov(l_i, l_j) = int_0^1 E sum_v d_i(v) d_j(v) z_ij dt, where the second copy's logits have t
        of their covariance z_ij with the first (interpolation of Gaussian covariances); the
        integral by Simpson's rule.
        """
        shared = self.kernel.scaled(self.scale**2 * self.width * self.weight_variance)
        steps = ((0.0, 1.0), (0.5, 4.0), (1.0, 1.0))
        parts = [self._overlap(at, True).scaled(w / 6) for at, w in steps]
        total = (shared * (parts[0] + parts[1] + parts[2])).total(self.seq_len)
        # Sequences of tokens alike are taken as independent of each other.
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
        """The same over logits whose rows of the matrix are not zero."""
        if not np.any(self.targets.blank):
            return self.overlap
        return self._overlap(1.0, True).scaled(self.targets.count**-2.0)

    def gradient(self) -> Kernel:
        """At h, without its part along h, which a normalisation before the head removes.

        Of a tied matrix's rows the token's own is partly in h; with A_ij = E d_j(id_i), what is
        along h of it takes f_i A_ii A_ij off D_ij, and the same from the other side.
        """
        size = self.scale**2 * self.weight_variance
        return (self._sent + self._projected()).scaled(size)

    def radial(self) -> Kernel:
        """What the gradient at h has besides: along h_i, variance times sum_v E dd_i(v)/dz_i(v)."""
        more = self._with_along(self.radial_length).scaled(self.targets.count**-2.0)
        return (more - self._projected()).scaled(self.scale**2 * self.weight_variance)

    @property
    def radial_length(self) -> Array:
        """b_i in T sum_v d_i(v) E_v = scale (variance b_i h_i + ...)."""
        own, other = self.softmax.own, self.softmax.other
        each = own.probability_slope_square - own.square_slope_square
        rest = other.probability_slope_square - other.square_slope_square
        return self.scale * (each + (self.vocab_size - 1) * rest) * self.targets.active

    def gain_gradient(self) -> Array:
        """What a gain before the matrix receives besides independent products of g and h.

        d gain = sum_i g_i h_i, entry by entry. With a_i h_i the part of g_i along h_i, its square
        is d sum_ij a_i a_j E h_i^2 h_j^2, and that moment 1 + 2 r_ij^2 for Gaussian features.
        After a GELU it is larger: the gain of a hidden layer's norm comes out some 5 % low.
        """
        kernel = self.kernel
        along = self._along_rows.diagonal + self.radial_length * kernel.diagonal
        along = self.weight_variance * along
        i, j = kernel.over_tokens(along)
        first, second = kernel.over_tokens(kernel.diagonal)
        off_diagonal = i * j * (1 + 2 * ratio_or_zero(kernel.off_diagonal**2, first * second))
        total = Kernel.joined(3 * along**2, off_diagonal, kernel.resolved).total(self.seq_len)
        return self.width * self.scale**2 * total / self.targets.count**2

    def matrix_gradient(self) -> Array:
        """Squared gradient norm of the matrix: d/T^2 sum_ij D_ij H_ij."""
        size = self.scale**2 * self.width
        return size * (self.overlap * self.kernel).total(self.seq_len)

    def bias_gradient(self) -> Array:
        """Squared gradient norm of a bias of the logits."""
        return self.overlap.total(self.seq_len)

    def _overlap(self, at: float, drawn: bool = False) -> Kernel:
        """D_ij with `at` times the correlations that the tokens have.

        `drawn`: without targets whose row of the matrix is zero; of what other tokens give such a
        row, 1/vocab_size of the sum, all is counted.
        """
        kernel, targets = self.kernel, self.targets
        first, second = kernel.over_tokens(kernel.diagonal)
        hit, swapped = targets.hit, targets.hit
        if kernel.resolved:
            swapped = hit.swapaxes(-1, -2)
        both = (targets.same_target, targets.same_token, hit, swapped)
        correlation = at * ratio_or_zero(kernel.off_diagonal, np.sqrt(first * second))
        # One draw's overlap of two tokens of independent features varies by 1/width.
        wander = (1 - correlation**2) * at / self.width**0.5
        blank = targets.blank if drawn else 0.0
        off_diagonal = targets.both * self._products(
            correlation, both, kernel.over_tokens, blank, wander
        )
        alone = (1.0, 1.0, targets.own, targets.own)
        alike = at + 0 * kernel.diagonal
        one = self._products(alike, alone, lambda value: (value, value), blank)
        single = targets.active * one
        return Kernel.joined(single, off_diagonal, kernel.resolved)

    def _products(
        self,
        correlation: Array,
        same: tuple[Array, ...],
        lift: Any,
        blank: Array,
        wander: Array = 0.0,
    ) -> Array:
        """E sum_v d_i(v) d_j(v) at a correlation of the logits, which varies by `wander`.

        The four coincidences are in `same`; a `blank` target is left out of the sum.
        """
        same_target, same_token, hit, swapped = same
        own, other, vocab_size = self.softmax.own, self.softmax.other, self.vocab_size
        kept, each = 1 - self.smoothing, self.smoothing / self.vocab_size

        def between(ends: Array, risen: Array = correlation) -> Array:
            """From 1 to sqrt(ends_i ends_j) as the correlation goes from 0 to 1."""
            i, j = lift(0.5 * np.log(ends))
            return np.exp(risen * (i + j))

        rest, other_rest = lift(other.probability_slope)
        mine, other_mine = lift(own.probability_slope)
        # A target's slope is the own logit's where a token predicts what it reads.
        reads = self.targets.own
        mean_slope = reads * own.slope + (1 - reads) * other.slope
        slope_square = reads * own.slope_square + (1 - reads) * other.slope_square
        slope, other_slope = lift(mean_slope * (1 - blank))
        common = between(other.ends)
        # Whether a token's own logit leaves the others anything does not concern other tokens.
        free_ends = self._unread.other.ends
        agreeing = sum(
            weight * between(free_ends, self._agreement_share(correlation + step * wander))
            for step, weight in self._steps(free_ends)
        )
        reading = between(own.ends)
        alike = (vocab_size - 1) * rest * other_rest * common + mine * other_mine * reading
        apart = (vocab_size - 2) * rest * other_rest + mine * other_rest + rest * other_mine
        softmaxes = same_token * alike + (1 - same_token) * apart * agreeing
        slopes = slope * other_slope * between(slope_square / mean_slope**2)
        other_hits = between(other.hits)
        own_hits = between(own.hits)
        # p_j at i's target, and p_i at j's.
        there = hit * other_mine * slope * own_hits + (1 - hit) * other_rest * slope * other_hits
        back = swapped * mine * other_slope * own_hits
        back = back + (1 - swapped) * rest * other_slope * other_hits
        result = softmaxes - kept * (there + back) + kept**2 * same_target * slopes
        if self.smoothing:
            total = (vocab_size - 1) * other.probability_slope + own.probability_slope
            i, j = lift(total)
            even = i * other_slope * other_hits + j * slope * other_hits
            result = result - each * even + each * (2 * kept + self.smoothing) * slopes
        return result

    def _steps(self, ends: Array) -> tuple[tuple[float, float], ...]:
        """Points and weights of an average over a normal deviate, exact to its ninth power."""
        if np.max(np.log(ends)) ** 2 < _STILL * self.width:
            return ((0.0, 1.0),)
        points, weights = np.polynomial.hermite_e.hermegauss(5)
        return tuple(zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True))

    def _agreement_share(self, correlation: Array) -> Array:
        """`agreement_share`, at every configuration's mean variance of the logits."""
        variance = self.softmax.other.square
        variance = self.kernel.average(variance)
        if np.ndim(variance) == 0:
            return agreement_share(self.vocab_size, float(variance), correlation)
        tail = np.shape(correlation)[np.ndim(variance) :]
        each = np.broadcast_to(correlation, (*np.shape(variance), *tail))
        result = np.empty(each.shape)
        for index, one in np.ndenumerate(variance):
            result[index] = agreement_share(self.vocab_size, float(one), each[index])
        return result

    # --- a tied matrix: the row of the token that is read is in what it multiplies --------------
    #
    # h_i = k_i E_id + ..., so that the logit of the token's own row has a mean, and the gradient
    # meets that row again: with A_ij = E d_j(id_i), token j's gradient at the logit of the token
    # that i reads, T g_i = scale (f_i + variance a_i h_i), f_i . h_j/d = variance k_j A_ji; a_i is
    # the radial length, or takes away what is along h_i. See docs/theory/loss.md, Tied rows.

    @functools.cached_property
    def _along_rows(self) -> Kernel:
        """f_i . h_j/d over the variance: k_j A_ji."""
        kernel, own, other, targets = (
            self.kernel,
            self.softmax.own,
            self.softmax.other,
            self.targets,
        )
        kept, each = 1 - self.smoothing, self.smoothing / self.vocab_size
        slope, _ = kernel.over_tokens(other.slope)
        mine, _ = kernel.over_tokens(own.probability_slope)
        rest, _ = kernel.over_tokens(other.probability_slope)
        active, _ = kernel.over_tokens(targets.active)
        _, k = kernel.over_tokens(self.carried + 0 * kernel.diagonal)
        same = targets.same_token
        off_diagonal = same * mine + (1 - same) * rest - (targets.hit * kept + each) * slope
        first = own.probability_slope - (targets.own * kept + each) * own.slope
        diagonal = self.carried * first * targets.active
        return Kernel.joined(diagonal, k * off_diagonal * active, kernel.resolved)

    def _with_along(self, along: Array) -> Kernel:
        """What a_i h_i adds to f_i . f_j/d, over the variance."""
        kernel, rows = self.kernel, self._along_rows
        i, j = kernel.over_tokens(along + 0 * kernel.diagonal)
        off_diagonal = i * self._turned(rows.off_diagonal)
        off_diagonal = off_diagonal + j * (rows.off_diagonal + i * kernel.off_diagonal)
        diagonal = along * (2 * rows.diagonal + along * kernel.diagonal)
        result = Kernel.joined(diagonal, off_diagonal, kernel.resolved)
        return result.scaled(self.weight_variance)

    def _projected(self) -> Kernel:
        """What a norm's projection adds to D/T^2, f the own row's share of what is read.

        D_ij - f_i E A_ii A_ij - f_j E A_jj A_ji + sqrt(f_i f_j) r_ij E A_ii A_jj.
        """
        kernel, targets = self.kernel, self.targets
        if not np.any(self.carried):
            return kernel.scaled(0.0)
        own, other, kept = self.softmax.own, self.softmax.other, 1 - self.smoothing
        hit = targets.own * kept
        square = own.square_slope_square - 2 * hit * own.probability_slope_square
        square = (square + hit * kept * own.slope_square) * targets.active
        share_i, share_j = kernel.over_tokens(self.own_share)
        scale_i, scale_j = kernel.over_tokens(kernel.diagonal)
        correlation = ratio_or_zero(kernel.off_diagonal, np.sqrt(scale_i * scale_j))
        # Two tokens that read the same one have correlated own probabilities.
        p_i, p_j = kernel.over_tokens(own.probability_slope)
        rise_i, rise_j = kernel.over_tokens(np.log(own.ends) / 2)
        beyond = targets.same_token * targets.both * p_i * p_j
        beyond = beyond * np.expm1(correlation * (rise_i + rise_j))
        # Where the text is not known, a frequent token is hit by both more often than by chance.
        own_i, _ = kernel.over_tokens(targets.own)
        slope_i, _ = kernel.over_tokens(own.slope)
        _, slope_j = kernel.over_tokens(other.slope)
        together = targets.both_hit - own_i * self._turned(targets.hit)
        together = kept**2 * slope_i * slope_j * targets.both * together
        means = self._with_along(self._removed)
        off_diagonal = means.off_diagonal + np.sqrt(share_i * share_j) * correlation * beyond
        off_diagonal = off_diagonal - share_i * (beyond + together)
        off_diagonal = off_diagonal - share_j * (beyond + self._turned(together))
        result = Kernel.joined(-self.own_share * square, off_diagonal, kernel.resolved)
        return result.scaled(targets.count**-2.0)

    @property
    def _removed(self) -> Array:
        """a_i of a gradient without its part along h_i."""
        return -ratio_or_zero(self._along_rows.diagonal, self.kernel.diagonal)

    def cross_gradient(self) -> Array:
        """Twice the overlap of a tied table's gradients as matrix and as what the input reads.

        To leading order: the input's part is taken along the skip connections, by which row id_i
        receives carried_i times the gradient at h_i.
        """
        kernel, rows = self.kernel, self._along_rows
        if not np.any(self.carried):
            return 0.0 * kernel.total(self.seq_len)
        # k_i sum_j d_j(id_i) g_i . h_j
        along = self._removed if self.normalised else self.radial_length
        i, _ = kernel.over_tokens(along + 0 * kernel.diagonal)
        moved = Kernel.joined(along * kernel.diagonal, i * kernel.off_diagonal, kernel.resolved)
        total = (rows.transposed() * (rows + moved)).total(self.seq_len) / self.targets.count**2
        return 2 * self.scale**2 * self.width * self.weight_variance * total

    def _turned(self, off_diagonal: Array) -> Array:
        """The value for (j, i)."""
        return off_diagonal.swapaxes(-1, -2) if self.kernel.resolved else off_diagonal
