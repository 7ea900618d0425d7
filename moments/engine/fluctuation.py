"""Fluctuations over draws of the realised overlaps o_ij = x_i.x_j/width about their means C_ij.

Their covariances, of order 1/width, are approximated by those of a Wishart matrix,

    Cov(o_kl, o_mn) = (y_km y_ln + y_kn y_lm)/2,    Y = y o y,

with y = sqrt(2/width) C for Gaussian features. If the part of the signal that all tokens share
varies in size differently from the rest, y is not proportional to C, and Cov(o_ij, |x_i|^2/width) =
y_ii y_ij holds within 6 percent. `UnsharedOverlap` follows what this approximation loses behind
attention. See docs/theory/norms.md, Realised overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..formulas.algebra import is_number
from .classes import ClassRows, diagonal_of
from .state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Record


def has_fixed_norms(signal: Signal) -> bool:
    """Whether a normalisation fixed the norms of all tokens."""
    if signal.fluctuation is None:
        return False
    diagonal = signal.fluctuation.norms.diagonal
    return diagonal == 0.0 if is_number(diagonal) else not np.any(diagonal)


def signed_root(square: Kernel, like: Kernel) -> Kernel:
    """Entrywise square roots of one kernel with the signs of another."""
    if is_number(square.diagonal):
        off_diagonal = max(square.off_diagonal, 0.0) ** 0.5
        return Kernel(
            max(square.diagonal, 0.0) ** 0.5,
            -off_diagonal if like.off_diagonal < 0 else off_diagonal,
        )
    off_diagonal = np.copysign(np.sqrt(np.maximum(square.off_diagonal, 0.0)), like.off_diagonal)
    return Kernel(np.sqrt(np.maximum(square.diagonal, 0.0)), off_diagonal, square.resolved)


def norm_variance(signal: Signal) -> Array:
    """Var |x|^2/E^2 |x|^2 of a token, averaged over tokens; 0 if it is not tracked.

    Bounded below by 0: sums treat entries as Gaussian, which saturated activations are not.
    """
    if signal.fluctuation is None:
        return 0.0
    square = signal.second_moment().diagonal ** 2
    result = signal.kernel.average(ratio_or_zero(signal.fluctuation.norms.diagonal, square))
    return np.maximum(result, 0.0)


def overlap_covariance(signal: Signal) -> Kernel | None:
    """Y of a signal; None if it is not tracked."""
    return None if signal.fluctuation is None else signal.fluctuation.overlaps


def overlap_variance(signal: Signal) -> Array | None:
    """Var o_ij for every pair of different tokens; None if it is not tracked."""
    square = overlap_covariance(signal)
    if square is None:
        return None
    kernel = signal.second_moment()
    root = signed_root(square, kernel)
    first, second = root.over_tokens(root.diagonal)
    variance = 0.5 * (first * second + square.off_diagonal)
    if not has_fixed_norms(signal):
        return variance
    # The variance of d o_ij - (r d o_ii + r' d o_jj)/2 with r = C_ij/C_ii, r' = C_ij/C_jj.
    size_i, size_j = kernel.over_tokens(kernel.diagonal)
    one = ratio_or_zero(first * kernel.off_diagonal, size_i)
    two = ratio_or_zero(second * kernel.off_diagonal, size_j)
    fixed = variance - (one + two) * root.off_diagonal
    fixed = fixed + 0.25 * (one * one + two * two)
    cosine_square = ratio_or_zero(kernel.off_diagonal**2, size_i * size_j)
    fixed = fixed + 0.5 * cosine_square * square.off_diagonal
    return np.maximum(fixed, 0.0) if np.ndim(fixed) else max(fixed, 0.0)


def overlap_step(kernel: Kernel, variance: Array) -> Array:
    """sqrt(Var o_ij), limited such that the two tokens become at most parallel or opposite."""
    first, second = kernel.over_tokens(kernel.diagonal)
    limit = (first * second) ** 0.5 - abs(kernel.off_diagonal)
    if is_number(limit):
        return min(variance**0.5, max(limit, 0.0))
    return np.minimum(variance**0.5, np.maximum(limit, 0.0))


class ShiftedOverlaps(NamedTuple):
    """A signal with its overlaps o_ij shifted up and down by `step`, sqrt(Var o_ij): the mean of a
    function over both equals its mean over draws to third order."""

    step: Array
    above: Signal
    below: Signal


def shifted_overlaps(signal: Signal) -> ShiftedOverlaps | None:
    """Shift the overlaps of a signal; None if their fluctuations are not tracked."""
    variance, kernel = overlap_variance(signal), signal.second_moment()
    if variance is None:
        return None
    step = overlap_step(kernel, variance)
    pairs = (kernel.off_diagonal + side * step for side in (1.0, -1.0))
    moved = (Kernel.of_parts(kernel.diagonal, one, kernel.resolved) for one in pairs)
    ends = [
        Signal(one, signal.seq_len, mean=0.0 * kernel.diagonal, width=signal.width) for one in moved
    ]
    return ShiftedOverlaps(step, *ends)


# --- through components --------------------------------------------------------------------------


def shared_with(signal: Signal) -> tuple[Kernel, Kernel]:
    """`Fluctuation.shared`; if the branch begins here, that of the signal with itself."""
    assert signal.fluctuation is not None
    norms, overlaps, _, shared, _ = signal.fluctuation
    if shared is not None:
        return shared
    assert overlaps is not None
    first, _ = overlaps.over_tokens(ratio_or_zero(1.0, signal.second_moment().diagonal))
    return overlaps.at_every_pair(first), norms.at_every_pair(first)


def scaled_shared(signal: Signal, gain: Array, of_norms: Array | None = None) -> Any:
    """`shared_with` times the gains of overlaps and of squared norms (None: the same)."""
    overlaps, norms = shared_with(signal)
    return overlaps.scaled(gain), norms.scaled(gain if of_norms is None else of_norms)


def overlap_of_product(signal: Signal, output: Signal, gain: Array) -> Fluctuation:
    """Fluctuation behind a random matrix of this gain, which adds 2 B o B/width."""
    assert signal.fluctuation is not None
    moment, added = output.second_moment(), 2 / output.width
    squared, square = moment * moment, gain * gain
    norms, overlaps, _, _, drawn = signal.fluctuation
    norms = norms.mixed(square, squared, added)
    if overlaps is None:
        return Fluctuation(norms)
    overlaps = overlaps.mixed(square, squared, added)
    return Fluctuation(norms, overlaps, shared=scaled_shared(signal, gain), drawn=drawn)


def overlap_of_sum(
    signal: Signal, branch: Signal, skip: Any, scale: Any, parallel: bool = False
) -> Fluctuation | None:
    """Fluctuation of a sum, whose kernels are multiplied by `skip` and `scale`.

    |T + B|^2 = |T|^2 + |B|^2 + 2 T.B with E (T_i.B_i)(T_j.B_j) = d T_ij B_ij.

    Args:
        parallel: whether both are branches of one tensor, else `branch` is one of `signal`.
            Covariances of the two branches' overlaps are neglected.
    """
    kept, gained = signal.fluctuation, branch.fluctuation
    if kept is None or gained is None:
        return None
    both = signal.kernel * branch.kernel
    cross = both.scaled(4 * skip * scale / signal.width)
    square, branch_square = skip * skip, scale * scale
    norms = kept.norms.mixed(square, gained.norms, branch_square) + cross
    if kept.overlaps is None:
        return Fluctuation(norms)
    if gained.overlaps is None:
        added = (branch.kernel * branch.kernel).scaled(2 / signal.width)
        return Fluctuation(norms, kept.overlaps.mixed(square, added, branch_square) + cross)
    overlaps = kept.overlaps.mixed(square, gained.overlaps, branch_square) + cross
    if gained.shared is None or (parallel and kept.shared is None):
        return Fluctuation(norms, overlaps)
    if parallel:
        assert kept.shared is not None
        one, two = (
            first.mixed(skip, second, scale)
            for first, second in zip(kept.shared, gained.shared, strict=True)
        )
        return Fluctuation(norms, overlaps, shared=(one, two))
    size, _ = signal.kernel.over_tokens(signal.second_moment().diagonal)
    moved, of_norms = (_both_ways(one, size, skip * scale) for one in gained.shared)
    if not has_fixed_norms(signal):
        norms = norms + of_norms
    return Fluctuation(norms, overlaps + moved)


def _both_ways(shared: Kernel, size: Array, factor: Any) -> Kernel:
    moved = shared.at_every_pair(size).scaled(factor)
    return moved + moved.transposed()


def of_averages(signal: Signal, weights: Array | None, gain: Any) -> Fluctuation | None:
    """Fluctuation of attention's averages times a gain; None if overlaps are not tracked.

    Args:
        signal: the tokens attended to.
        weights: (..., L, L) mean attention weights, or `ClassRows`; None: uniform, exchangeable
            tokens.
        gain: of an average's overlap in the values.
    """
    overlaps = overlap_covariance(signal)
    if signal.fluctuation is None or overlaps is None:
        return None
    tokens, square = signal.second_moment(), gain * gain
    norms, fixed = signal.fluctuation.before_norms, has_fixed_norms(signal)

    def averaged(variances: Kernel, fixed: bool) -> tuple[Kernel, Kernel]:
        if weights is None:
            return _uniform_averages(tokens, variances, fixed, signal.seq_len)
        return _averages(tokens, variances, weights, fixed)

    mixed, shared = averaged(overlaps, False)
    mixed_norms, shared_norms = averaged(norms, fixed)
    result = shared.scaled(gain), shared_norms.scaled(gain)
    return Fluctuation(mixed_norms.scaled(square), mixed.scaled(square), shared=result)


def _averages(tokens: Kernel, square: Kernel, weights: Any, fixed: bool) -> tuple[Kernel, Kernel]:
    """Variances Y of averages of tokens with variances `square`, and covariances with the tokens as
    in `Fluctuation.shared`; `fixed` if the tokens' norms are."""
    root = signed_root(square, tokens)
    averaged = rows_times(weights, root)
    averaged = averaged * averaged
    mixed = between_rows(weights, root)
    mixed = mixed * mixed
    if fixed:
        lost = _times_entries(weights, rows_times(weights, tokens), tokens.diagonal)
        cross = _times_rows(averaged, lost)
        mixed = mixed - cross - cross.transposed() + between_rows(lost, square)
        averaged = averaged - rows_times(lost, square)
    inverse, _ = tokens.over_tokens(ratio_or_zero(1.0, tokens.diagonal))
    shared = np.swapaxes(averaged.off_diagonal, -1, -2) * inverse
    return mixed, Kernel(diagonal_of(shared), shared, tokens.resolved)


def _of_rows(function: Callable[[Array, Array], Array], kernel: Kernel) -> Kernel:
    """Apply a function of (off-diagonal, excess of the diagonal) to each block of a kernel on
    classes. Its result depends on attention rows, so that its diagonal has no excess."""
    classes = kernel.classes
    assert classes is not None
    result = []
    for diagonal, off_diagonal in classes.blocks(kernel.diagonal, kernel.off_diagonal):
        of_pairs = function(off_diagonal, diagonal - diagonal_of(off_diagonal))
        result.append((diagonal_of(of_pairs), of_pairs))
    return Kernel(*classes.joined(*result), classes)


def rows_times(rows: Any, kernel: Kernel) -> Kernel:
    """W K [row, key] of attention weights W; on classes for a single key of a class, where the key
    at the row's own position has the value of its neighbours."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(rows @ kernel.off_diagonal)
    return _of_rows(
        lambda off_diagonal, excess: (
            rows.counted @ off_diagonal + rows.weights * excess[..., None, :]
        ),
        kernel,
    )


def _times_rows(kernel: Kernel, rows: Any) -> Kernel:
    """K W^T [row, row] of a kernel K [row, key] whose diagonal has no excess."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(kernel.off_diagonal @ np.swapaxes(rows, -1, -2))
    return _of_rows(lambda pairs, _: pairs @ np.swapaxes(rows.counted, -1, -2), kernel)


def _times_entries(rows: Any, kernel: Kernel, size: Array) -> Any:
    """W_ij K_ij/size_j [row, key]; on classes for keys of the row's own document."""
    if not isinstance(rows, ClassRows):
        return rows * ratio_or_zero(kernel.off_diagonal, size[..., None, :])
    assert kernel.classes is not None
    count = len(kernel.classes.one_document.nodes)
    inside = kernel.off_diagonal[..., :count, :count] / size[..., None, :count]
    return ClassRows(rows.weights * inside, rows.key_counts)


def between_rows(rows: Any, kernel: Kernel) -> Kernel:
    """W K W^T."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(rows @ kernel.off_diagonal @ np.swapaxes(rows, -1, -2))
    counted, each, shared = rows.counted, rows.weights, rows.key_counts.shared

    def between(off_diagonal: Array, excess: Array) -> Array:
        common = np.einsum("psq,...pq,...sq,...q->...ps", shared, each, each, excess)
        return np.asarray(counted @ off_diagonal @ np.swapaxes(counted, -1, -2) + common)

    return _of_rows(between, kernel)


def _uniform_averages(
    tokens: Kernel, square: Kernel, fixed: bool, seq_len: int
) -> tuple[Kernel, Kernel]:
    """`_averages` of exchangeable tokens with uniform weights."""
    root = signed_root(square, tokens)
    mixed = averaged = ((root.diagonal + (seq_len - 1) * root.off_diagonal) / seq_len) ** 2
    inverse = ratio_or_zero(1.0, tokens.diagonal)
    if fixed:
        lost = (1 + (seq_len - 1) * tokens.off_diagonal * inverse) / seq_len
        mean = (square.diagonal + (seq_len - 1) * square.off_diagonal) / seq_len
        mixed = averaged - 2 * lost * averaged + lost * lost * mean
        averaged = averaged - lost * mean
    return Kernel(mixed, mixed), Kernel(averaged * inverse, averaged * inverse)


def overlap_of_normalised(
    signal: Signal, kernel: Kernel, normal: Kernel, epsilon: Any, square: Any
) -> Fluctuation:
    """Fluctuation behind a normalisation and a gain.

    Args:
        kernel, normal: of the tensor that is divided by its norm, and of the quotient.
        epsilon: added to the variance under the root.
        square: mean square of the gain.
    """
    fixed = normal.scaled(0.0)
    overlaps = overlap_covariance(signal)
    if signal.fluctuation is None or overlaps is None:
        return Fluctuation(fixed)
    lifted, _ = kernel.lift(epsilon)
    size = ratio_or_zero(square, kernel.diagonal + lifted)
    first, second = kernel.over_tokens(size)
    both = first * second
    shared = signal.fluctuation.shared
    if shared is not None:
        normed = shared[0].at_every_pair(second)
        shared = normed, normed.scaled(0.0)
    free = signal.fluctuation.before_norms.at_every_pair(both)
    return Fluctuation(fixed, overlaps.at_every_pair(both), free, shared)


INDEPENDENT = 1e-9
"""Relative difference, by rounding, of squared norms' variance from that of independent entries."""


def overlap_of_activation(
    signal: Signal, output: Signal, kurtosis: Array, slope: Array
) -> Fluctuation:
    """Fluctuation behind an activation, of independent entries.

    If norms vary by independent entries alone, as behind a normalisation, the relative fluctuation
    of the unshared part u of tokens is that of y, relative to the norm. It is then multiplied by
    dlog u'/dlog u, and not the covariance by the slope, which exceeds that where the activation is
    not homogeneous.

    Args:
        kurtosis: of an entry of the output.
        slope: mean derivative of the output's covariance by the input's.
    """
    assert signal.fluctuation is not None
    tokens, moment = signal.second_moment(), output.second_moment()
    ratio = ratio_or_zero(moment.mean_diagonal(), signal.kernel.mean_diagonal())
    before, squared = signal.kernel * signal.kernel, moment * moment

    def inherited(kernel: Kernel, entries: Array) -> Kernel:
        # Without the part of independent entries: 2/width only if these are Gaussian, which they
        # are not if one activation follows another.
        return kernel.mixed(1.0, before, -entries / signal.width)

    norms, overlaps, *_ = signal.fluctuation
    kept = inherited(norms, signal.kurtosis - 1)
    norms = squared.mixed((kurtosis - 1) / output.width, kept, ratio * ratio)
    if overlaps is None:
        return Fluctuation(norms)
    common = slope
    if np.all(abs(kept.diagonal) <= INDEPENDENT * before.diagonal):
        unshared = (one.mean_diagonal() - one.mean_off_diagonal() for one in (tokens, moment))
        common = slope * ratio * ratio_or_zero(*unshared)
    overlaps = _by_parts(inherited(overlaps, 2), slope * slope, common * common)
    overlaps = squared.mixed(2 / output.width, overlaps, 1.0)
    shared, of_norms = shared_with(signal)
    return Fluctuation(
        norms, overlaps, shared=(_by_parts(shared, slope, common), of_norms.scaled(ratio))
    )


def _by_parts(kernel: Kernel, unshared: Array, common: Array) -> Kernel:
    """Multiply the part of a kernel that all tokens share by `common`, the rest by `unshared`."""
    if common is unshared:
        return kernel.scaled(common)
    (one, _), (shared, two) = kernel.lift(unshared), kernel.lift(common)
    mean, _ = kernel.lift(kernel.mean_off_diagonal())
    diagonal = kernel.diagonal * one + mean * (shared - one)
    return Kernel.of_parts(diagonal, kernel.off_diagonal * two, kernel.resolved)


def overlap_of_dropout(signal: Signal, drop_prob: Any) -> Fluctuation:
    """Fluctuation behind dropout, whose masks are independent for every token and entry.

    |x'|^2 = sum x^2 mask/q^2: the norm's own fluctuation over q^2, and on the diagonal the masks'
    variance, p/q^3 times the fourth moment. E o o = (C_ii C_jj/q^2 + ...)/width.
    """
    assert signal.fluctuation is not None
    kept = 1 - drop_prob
    moment = signal.second_moment().diagonal

    def masked(kernel: Kernel, factor: Array) -> Kernel:
        more, _ = kernel.lift(factor)
        return kernel.with_diagonal(kernel.diagonal + more * moment * moment)

    norms, overlaps, *_ = signal.fluctuation
    masks = drop_prob / kept**3 * signal.kurtosis / signal.width
    norms = masked(norms.scaled(1 / kept**2), masks)
    if overlaps is None:
        return Fluctuation(norms)
    overlaps = masked(overlaps, 2 / signal.width * (1 / kept**2 - 1))
    return Fluctuation(norms, overlaps, shared=scaled_shared(signal, 1.0, 1 / kept))


# --- overlaps of the unshared parts of tokens -----------------------------------------------------


class UnsharedOverlap(NamedTuple):
    """Fluctuation of the overlap of two tokens' unshared parts, at one point of a network.

    The unshared part of a token is its vector without the mean over tokens. Y does not follow it
    through attention, whose rows differ by their weights. One number for all pairs, propagated for
    weight gradients of queries and keys; derived in `moments.noise.overlap`.

    Attributes:
        variance: nu, relative to the product of both unshared variances.
        response: relative change of the overlap per relative change of the stack's input overlap.
    """

    variance: float
    response: float = 1.0

    def mapped(self, width: Array) -> UnsharedOverlap:
        """Behind a random matrix onto `width` features."""
        return UnsharedOverlap(self.variance + 1.0 / width, self.response)

    def activated(
        self, elasticity: float, widths: tuple[float, float], units: float = 1.0
    ) -> UnsharedOverlap:
        """Behind an activation.

        Args:
            widths: number of features at the input and at the output.
            units: ratio of the output's features to their effective number
                (`layers.elementary.concentration`).
        """
        inherited = elasticity**2 * (self.variance - 1.0 / widths[0])
        return UnsharedOverlap(inherited + units / widths[1], self.response * elasticity)

    def added(
        self,
        other: UnsharedOverlap,
        variances: tuple[float, float],
        source: UnsharedOverlap,
        width: float,
    ) -> UnsharedOverlap:
        """Behind the sum with another tensor of independent direction; both are functions of a
        tensor with the overlap `source`.

        Args:
            variances: unshared variances of the two addends.
        """
        first, second = variances
        total = first + second
        if total == 0.0:
            return self
        # Both follow the source's overlap by their responses, unless it has forgotten the input's.
        common = self.response * other.response
        common *= source.variance / source.response**2 if source.response else 0.0
        variance = self.variance * first**2 + other.variance * second**2
        variance += 2.0 * (common + 1.0 / width) * first * second
        response = (self.response * first + other.response * second) / total
        return UnsharedOverlap(variance / total**2, response)


@dataclass
class OverlapWalk:
    """Propagation of an `UnsharedOverlap` through a tree of records, and its results.

    Attributes:
        memory: nu of the memory of cross-attention; None: 1/width.
        real: (L,) 1 for real tokens and 0 for padding; None: all are real.
        attended: nu of the input of every attention, by (layer, site).
        growth: factors on squared gradient norms, by (layer, name).
    """

    memory: float | None = None
    real: Array | None = None
    attended: dict[tuple[int, str], float] = field(default_factory=dict)
    growth: dict[tuple[int, str], float] = field(default_factory=dict)

    def through(self, record: Record, at: UnsharedOverlap) -> UnsharedOverlap:
        """Propagate `at` through a record's component."""
        result: UnsharedOverlap = record.component.unshared_overlap(record, at, self)
        return result


def unshared_variance(signal: Signal, real: Array | None = None) -> float:
    """Mean second moment of real tokens minus that of pairs of different real tokens."""
    tokens = signal.second_moment()
    return max(float(tokens.mean_diagonal(real)) - float(tokens.mean_off_diagonal(real)), 0.0)


def elasticity(leaf: Any, before: Signal, after: Signal, real: Array | None) -> float:
    """Relative change of the unshared overlap behind an activation per that before it."""
    kernel = before.kernel
    tokens = Kernel(float(kernel.mean_diagonal(real)), float(kernel.mean_off_diagonal(real)))
    mean = before.second_moment().mean_diagonal(real) - kernel.mean_diagonal(real)
    entering = Signal(tokens, before.seq_len, float(max(mean, 0.0)) ** 0.5, before.width)
    output, pullback = leaf.forward(entering)
    unshared = unshared_variance(output)
    if unshared == 0.0:
        return 1.0
    grad_in = pullback(Gradient(Kernel(1.0, 1.0), before.seq_len)).gradient.kernel.off_diagonal
    gain = before.width / after.width * unshared_variance(entering) / unshared
    return float(grad_in) * float(gain)
