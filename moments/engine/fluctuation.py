"""What varies over draws: realised overlaps o_ij = x_i.x_j/width about their means C_ij.

Covariances of order 1/width are closed as those of a Wishart matrix,

    Cov(o_kl, o_mn) = (y_km y_ln + y_kn y_lm)/2,    Y = y o y,

with y = sqrt(2/width) C for Gaussian features. Where all tokens share a part whose size varies
otherwise than what each has of its own, y is no multiple of C, and Cov(o_ij, |x_i|^2/width) =
y_ii y_ij comes within 6 percent. An `UnsharedOverlap` is what a signal's `Fluctuation` does not
know. See docs/theory/norms.md, Realised overlaps.
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
    """Whether a normalisation put all tokens on one sphere."""
    if signal.fluctuation is None:
        return False
    diagonal = signal.fluctuation.norms.diagonal
    return diagonal == 0.0 if is_number(diagonal) else not np.any(diagonal)


def signed_root(square: Kernel, like: Kernel) -> Kernel:
    """Square roots with the signs of another kernel."""
    if is_number(square.diagonal):
        off_diagonal = max(square.off_diagonal, 0.0) ** 0.5
        return Kernel(
            max(square.diagonal, 0.0) ** 0.5,
            -off_diagonal if like.off_diagonal < 0 else off_diagonal,
        )
    off_diagonal = np.copysign(np.sqrt(np.maximum(square.off_diagonal, 0.0)), like.off_diagonal)
    return Kernel(np.sqrt(np.maximum(square.diagonal, 0.0)), off_diagonal, square.resolved)


def norm_variance(signal: Signal) -> Array:
    """Var |x|^2/E^2 |x|^2 of a token, averaged over tokens; 0 where it is not followed.

    And where it would be less: sums take entries for Gaussian, which those of saturated functions
    are not.
    """
    if signal.fluctuation is None:
        return 0.0
    square = signal.second_moment().diagonal ** 2
    result = signal.kernel.average(ratio_or_zero(signal.fluctuation.norms.diagonal, square))
    return np.maximum(result, 0.0)


def followed(signal: Signal) -> Kernel | None:
    """Y of a signal; None where it is not followed."""
    return None if signal.fluctuation is None else signal.fluctuation.overlaps


def overlap_variance(signal: Signal) -> Array | None:
    """Var o_ij for every pair of different tokens; None where it is not followed."""
    square = followed(signal)
    if square is None:
        return None
    kernel = signal.second_moment()
    root = signed_root(square, kernel)
    first, second = root.over_tokens(root.diagonal)
    variance = 0.5 * (first * second + square.off_diagonal)
    if not has_fixed_norms(signal):
        return variance
    size, other = kernel.over_tokens(kernel.diagonal)
    one = ratio_or_zero(first * kernel.off_diagonal, size)
    two = ratio_or_zero(second * kernel.off_diagonal, other)
    # d o - (r d q_i + r' d q_j)/2, r = C_ij/C_ii
    fixed = variance - (one + two) * root.off_diagonal
    fixed = fixed + 0.25 * (one * one + two * two)
    fixed = fixed + 0.5 * ratio_or_zero(kernel.off_diagonal**2, size * other) * square.off_diagonal
    return np.maximum(fixed, 0.0) if np.ndim(fixed) else max(fixed, 0.0)


def step_within(kernel: Kernel, variance: Array) -> Array:
    """sqrt(Var o_ij), no further than to where two tokens are parallel or opposite."""
    first, second = kernel.over_tokens(kernel.diagonal)
    room = (first * second) ** 0.5 - abs(kernel.off_diagonal)
    if is_number(room):
        return min(variance**0.5, max(room, 0.0))
    return np.minimum(variance**0.5, np.maximum(room, 0.0))


class MovedOverlaps(NamedTuple):
    """A signal at two values of its realised overlaps: a mean over them is that of both, to third
    order in the overlaps.

    Attributes:
        step: sqrt(Var o_ij), to either side.
    """

    step: Array
    above: Signal
    below: Signal


def moved_overlaps(signal: Signal) -> MovedOverlaps | None:
    """None where overlaps are not followed."""
    variance, kernel = overlap_variance(signal), signal.second_moment()
    if variance is None:
        return None
    step = step_within(kernel, variance)
    pairs = (kernel.off_diagonal + side * step for side in (1.0, -1.0))
    moved = (Kernel.joined(kernel.diagonal, one, kernel.resolved) for one in pairs)
    ends = [
        Signal(one, signal.seq_len, mean=0.0 * kernel.diagonal, width=signal.width) for one in moved
    ]
    return MovedOverlaps(step, *ends)


# --- through components --------------------------------------------------------------------------


def shared_with(signal: Signal) -> tuple[Kernel, Kernel]:
    """What overlaps and squared norms share with those where the branch begins."""
    assert signal.fluctuation is not None
    norms, overlaps, _, shared = signal.fluctuation
    if shared is not None:
        return shared
    assert overlaps is not None
    first, _ = overlaps.over_tokens(ratio_or_zero(1.0, signal.second_moment().diagonal))
    return overlaps.at_every_pair(first), norms.at_every_pair(first)


def scaled_shared(signal: Signal, gain: Array, of_norms: Array | None = None) -> Any:
    """`shared_with`, times what an overlap and a squared norm move by."""
    overlaps, norms = shared_with(signal)
    return overlaps.scaled(gain), norms.scaled(gain if of_norms is None else of_norms)


def mapped(signal: Signal, output: Signal, gain: Array) -> Fluctuation:
    """Behind a linear map whose output is of that gain: 2 B o B/width is its own."""
    assert signal.fluctuation is not None
    moment, added = output.second_moment(), 2 / output.width
    squared, square = moment * moment, gain * gain
    norms, overlaps, _, _ = signal.fluctuation
    norms = norms.mixed(square, squared, added)
    if overlaps is None:
        return Fluctuation(norms)
    overlaps = overlaps.mixed(square, squared, added)
    return Fluctuation(norms, overlaps, shared=scaled_shared(signal, gain))


def summed(
    signal: Signal, branch: Signal, skip: Any, scale: Any, parallel: bool = False
) -> Fluctuation | None:
    """Of a sum, the kernels of which count with these factors.

    |T + B|^2 = |T|^2 + |B|^2 + 2 T.B with E (T_i.B_i)(T_j.B_j) = d T_ij B_ij.

    Args:
        parallel: whether both are branches of one tensor, instead of the second of the first; what
            the overlaps of the two have in common is left out.
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
    """Of attention's averages times a gain; None where the tokens' overlaps are not followed.

    Args:
        signal: the tokens attended to.
        weights: (..., L, L) mean attention, or (..., P, P) to one token of a class; None: uniform,
            tokens alike.
        gain: from an average's overlap to that of values.
    """
    overlaps = followed(signal)
    if signal.fluctuation is None or overlaps is None:
        return None
    tokens, fixed = signal.second_moment(), has_fixed_norms(signal)
    average = _alike if weights is None else _resolved
    mixed, shared, _, _ = average(tokens, overlaps, weights, False, signal.seq_len)
    norms = signal.fluctuation.before_norms
    _, _, mixed_norms, shared_norms = average(tokens, norms, weights, fixed, signal.seq_len)
    result = shared.scaled(gain), shared_norms.scaled(gain)
    square = gain * gain
    return Fluctuation(mixed_norms.scaled(square), mixed.scaled(square), shared=result)


_Averages = tuple[Kernel, Kernel, Kernel, Kernel]


def _resolved(
    tokens: Kernel, square: Kernel, weights: Any, fixed: bool, _seq_len: int
) -> _Averages:
    root = signed_root(square, tokens)
    averaged = rows_times(weights, root)
    averaged = averaged * averaged
    mixed = between_rows(weights, root)
    mixed = mixed * mixed
    inverse, _ = tokens.over_tokens(ratio_or_zero(1.0, tokens.diagonal))

    def shared(of_rows: Kernel) -> Kernel:
        off_diagonal = np.swapaxes(of_rows.off_diagonal, -1, -2) * inverse
        return Kernel(diagonal_of(off_diagonal), off_diagonal, tokens.resolved)

    free = mixed, shared(averaged)
    if not fixed:
        return (*free, *free)
    lost = _times_entries(weights, rows_times(weights, tokens), tokens.diagonal)
    cross = _times_rows(averaged, lost)
    mixed = mixed - cross - cross.transposed() + between_rows(lost, square)
    return (*free, mixed, shared(averaged - rows_times(lost, square)))


def _of_rows(function: Callable[[Array, Array], Array], kernel: Kernel) -> Kernel:
    """A function of a kernel on classes, its pairs and what a token has besides, inside documents
    and across them; what belongs to one place is that next to it: the rows are the same."""
    classes = kernel.classes
    assert classes is not None
    result = []
    for diagonal, off_diagonal in classes.blocks(kernel.diagonal, kernel.off_diagonal):
        of_pairs = function(off_diagonal, diagonal - diagonal_of(off_diagonal))
        result.append((diagonal_of(of_pairs), of_pairs))
    return Kernel(*classes.joined(*result), classes)


def rows_times(rows: Any, kernel: Kernel) -> Kernel:
    """[row, key] of rows W times a kernel; on classes for one key of a class, a row having with the
    key at its own position what it has with one next to that."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(rows @ kernel.off_diagonal)
    return _of_rows(
        lambda off_diagonal, excess: (
            rows.counted @ off_diagonal + rows.weights * excess[..., None, :]
        ),
        kernel,
    )


def _times_rows(kernel: Kernel, rows: Any) -> Kernel:
    """[row, row] of K W^T, where K has what belongs to one place next to it."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(kernel.off_diagonal @ np.swapaxes(rows, -1, -2))
    return _of_rows(lambda pairs, _: pairs @ np.swapaxes(rows.counted, -1, -2), kernel)


def _times_entries(rows: Any, kernel: Kernel, size: Array) -> Any:
    """Rows times entries [row, key] over the key's size; on classes, to the keys of a row's own
    document alone."""
    if not isinstance(rows, ClassRows):
        return rows * ratio_or_zero(kernel.off_diagonal, size[..., None, :])
    assert kernel.classes is not None
    count = len(kernel.classes.inside.nodes)
    inside = kernel.off_diagonal[..., :count, :count] / size[..., None, :count]
    return ClassRows(rows.weights * inside, rows.key_counts)


def between_rows(rows: Any, kernel: Kernel) -> Kernel:
    """W K W^T."""
    if not isinstance(rows, ClassRows):
        return Kernel.of_matrix(rows @ kernel.off_diagonal @ np.swapaxes(rows, -1, -2))
    counted, each, shared = rows.counted, rows.weights, rows.key_counts.shared

    def between(off_diagonal: Array, excess: Array) -> Array:
        alone = np.einsum("psq,...pq,...sq,...q->...ps", shared, each, each, excess)
        return np.asarray(counted @ off_diagonal @ np.swapaxes(counted, -1, -2) + alone)

    return _of_rows(between, kernel)


def _alike(tokens: Kernel, square: Kernel, _weights: Any, fixed: bool, seq_len: int) -> _Averages:
    root = signed_root(square, tokens)
    averaged = ((root.diagonal + (seq_len - 1) * root.off_diagonal) / seq_len) ** 2
    inverse = ratio_or_zero(1.0, tokens.diagonal)
    free = Kernel(averaged, averaged), Kernel(averaged * inverse, averaged * inverse)
    if not fixed:
        return (*free, *free)
    lost = (1 + (seq_len - 1) * tokens.off_diagonal * inverse) / seq_len
    mean = (square.diagonal + (seq_len - 1) * square.off_diagonal) / seq_len
    mixed = averaged - 2 * lost * averaged + lost * lost * mean
    shared = (averaged - lost * mean) * inverse
    return (*free, Kernel(mixed, mixed), Kernel(shared, shared))


def normalised(
    signal: Signal, kernel: Kernel, normal: Kernel, epsilon: Any, square: Any
) -> Fluctuation:
    """Behind a normalisation, and a gain of that square.

    Args:
        kernel, normal: of what is divided by its norm, and of what that leaves.
        epsilon: added to the variance under the root.
    """
    fixed = normal.scaled(0.0)
    overlaps = followed(signal)
    if signal.fluctuation is None or overlaps is None:
        return Fluctuation(fixed)
    one, _ = kernel.lift(epsilon)
    size = ratio_or_zero(square, kernel.diagonal + one)
    first, second = kernel.over_tokens(size)
    both = first * second
    shared = signal.fluctuation.shared
    if shared is not None:
        moved = shared[0].at_every_pair(second)
        shared = moved, moved.scaled(0.0)
    free = signal.fluctuation.before_norms.at_every_pair(both)
    return Fluctuation(fixed, overlaps.at_every_pair(both), free, shared)


INDEPENDENT = 1e-9
"""Relative deviation of squared norms' variance from that of independent entries by which nothing
of it came from before: rounding."""


def activated(signal: Signal, output: Signal, kurtosis: Array, slope: Array) -> Fluctuation:
    """Behind a function of independent entries.

    Behind a normalisation it is what tokens have of their own, u, that varies, relatively, by what
    y of two others is over the norm; there this relative y moves by dlog u'/dlog u, and not the
    covariance by the slope, which exceeds that where the function is not homogeneous.

    Args:
        kurtosis: of an entry behind it.
        slope: mean change of a covariance per change of the input's.
    """
    assert signal.fluctuation is not None
    tokens, moment = signal.second_moment(), output.second_moment()
    ratio = ratio_or_zero(moment.mean_diagonal(), signal.kernel.mean_diagonal())
    before, squared = signal.kernel * signal.kernel, moment * moment

    def inherited(kernel: Kernel, entries: Array) -> Kernel:
        # What independent entries make of it goes, which is 2/width only where they are Gaussian:
        # not where one such function follows another.
        return kernel.mixed(1.0, before, -entries / signal.width)

    norms, overlaps, _, _ = signal.fluctuation
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
    """A kernel with factors on what a token has beyond others, and on what all have."""
    if common is unshared:
        return kernel.scaled(common)
    (one, _), (more, two) = kernel.lift(unshared), kernel.lift(common)
    mean, _ = kernel.lift(kernel.mean_off_diagonal())
    diagonal = kernel.diagonal * one + mean * (more - one)
    return Kernel.joined(diagonal, kernel.off_diagonal * two, kernel.resolved)


def dropped(signal: Signal, drop_prob: Any) -> Fluctuation:
    """Behind dropout, whose masks are fresh for every token and entry.

    |x'|^2 = sum x^2 mask/q^2: the norm's own fluctuation over q^2, and on the diagonal the masks'
    variance, p/q^3 times the fourth moment. E o o = (C_ii C_jj/q^2 + ...)/width.
    """
    assert signal.fluctuation is not None
    kept = 1 - drop_prob
    moment = signal.second_moment().diagonal

    def masked(kernel: Kernel, factor: Array) -> Kernel:
        more, _ = kernel.lift(factor)
        return kernel.with_diagonal(kernel.diagonal + more * moment * moment)

    norms, overlaps, _, _ = signal.fluctuation
    masks = drop_prob / kept**3 * signal.kurtosis / signal.width
    norms = masked(norms.scaled(1 / kept**2), masks)
    if overlaps is None:
        return Fluctuation(norms)
    overlaps = masked(overlaps, 2 / signal.width * (1 / kept**2 - 1))
    return Fluctuation(norms, overlaps, shared=scaled_shared(signal, 1.0, 1 / kept))


# --- overlaps of what two tokens have of their own ------------------------------------------------


class UnsharedOverlap(NamedTuple):
    """How much the overlap of what two tokens have of their own varies, at one point of a network.

    Which of Y no more knows: attention takes the mean of its rows away from it, and what is left
    differs by the rows' own weights. One number for all pairs, followed through the tree of records
    when weight gradients of queries and keys ask for it; derived in `moments.noise.overlap`.

    Attributes:
        variance: nu, over the product of both tokens' own variances.
        response: relative change of the overlap per relative change of the stack's input's.
    """

    variance: float
    response: float = 1.0

    def mapped(self, width: Array) -> UnsharedOverlap:
        """Behind a linear map onto so many features."""
        return UnsharedOverlap(self.variance + 1.0 / width, self.response)

    def activated(
        self, elasticity: float, widths: tuple[float, float], units: float = 1.0
    ) -> UnsharedOverlap:
        """Of independent features' nonlinear images, (features in, features out), of which so few
        count as `units` says (`layers.elementary.concentration`)."""
        moved = elasticity**2 * (self.variance - 1.0 / widths[0])
        return UnsharedOverlap(moved + units / widths[1], self.response * elasticity)

    def added(
        self,
        other: UnsharedOverlap,
        variances: tuple[float, float],
        source: UnsharedOverlap,
        width: float,
    ) -> UnsharedOverlap:
        """Of a sum of two tensors, independent in direction, that both depend on `source`.

        Args:
            other: of what is added.
            variances: own variances of both.
            source: of what both are made from.
        """
        first, second = variances
        total = first + second
        if total == 0.0:
            return self
        # Where nothing of the input is left in the overlap, nothing of it is common to both.
        moved = self.response * other.response
        moved *= source.variance / source.response**2 if source.response else 0.0
        variance = self.variance * first**2 + other.variance * second**2
        variance += 2.0 * (moved + 1.0 / width) * first * second
        response = (self.response * first + other.response * second) / total
        return UnsharedOverlap(variance / total**2, response)


@dataclass
class OverlapWalk:
    """A walk through a tree of records, and what it gathers.

    Attributes:
        memory: nu of what cross-attention reads; None: 1/width of that.
        real: (L,) 1 for real tokens and 0 for padding, by token; None: all are real.
        attended: nu of what every attention attends to, by its place.
        growth: factors on squared gradient norms, by layer and name.
    """

    memory: float | None = None
    real: Array | None = None
    attended: dict[tuple[int, str], float] = field(default_factory=dict)
    growth: dict[tuple[int, str], float] = field(default_factory=dict)

    def through(self, record: Record, at: UnsharedOverlap) -> UnsharedOverlap:
        """That behind a component."""
        behind: UnsharedOverlap = record.component.unshared_overlap(record, at, self)
        return behind


def unshared_variance(signal: Signal, real: Array | None = None) -> float:
    """What a token's second moment has beyond what two tokens share, averaged over real ones."""
    tokens = signal.second_moment()
    return max(float(tokens.mean_diagonal(real)) - float(tokens.mean_off_diagonal(real)), 0.0)


def elasticity(leaf: Any, before: Signal, after: Signal, real: Array | None) -> float:
    """Relative change of two tokens' overlap behind an entrywise function per that before it."""
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
