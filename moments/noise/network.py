"""All parts of a network about their means: what one number owes to the randomness of each.

Let y be the gradient variance at one point of the stream over its mean. It is linear in the
realised gradient kernels above, with sensitivities Lambda, and to first order it depends on all
realised signal kernels, with sensitivities Gamma (`response`). All parts above a point add what
their matrices make of the first, all parts of the network of the second; and where directions share
nothing on average, their random overlap q is the floor under what tokens and sequences that share
the weights can average out. Tokens alike are one class of all (`classes.ClassMatrix`), whose parts
of one structure are evaluated at once (`alike`).

See docs/theory/band.md, What fluctuates. See docs/theory/band.md, The floor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.classes import ClassMatrix, PositionClasses, diagonal_of
from ..engine.fluctuation import followed, has_fixed_norms, signed_root
from ..engine.response import (
    SINGLE,
    Matrix,
    Response,
    Sublayer,
    diagonal_matrix,
    matrix_of,
    paired,
    per_unit,
    ratio,
    row_sums,
    stacked,
    total,
    trace_of,
)
from ..engine.state import Array, Signal


class Group(NamedTuple):
    """Parts of one structure, whose numbers have them on a last axis; or one alone, without it.

    Attributes:
        sublayer: what it does, or they do.
        places: where in the network they are.
        several: whether there is that axis.
    """

    sublayer: Sublayer
    places: Sequence[int]
    several: bool

    def gathered(self, by_place: Mapping[int, Array] | Sequence[Array]) -> Array:
        """What every place of the network has, at those of the group."""
        if not self.several:
            return by_place[self.places[0]]
        return np.stack(np.broadcast_arrays(*(by_place[k] for k in self.places)), axis=-1)

    def by_place(self, values: Array) -> Iterator[tuple[int, Array]]:
        """Values (..., parts) of the group, place by place."""
        if not self.several:
            return iter(((self.places[0], values),))
        return zip(self.places, np.moveaxis(values, -1, 0), strict=True)

    def summed(self, values: Array) -> Array:
        """Over the parts of the group."""
        return values.sum(-1) if self.several else values


class Passed(NamedTuple):
    """A group with the sensitivities to the gradients at its inputs or, on the way down, to the
    signals at its outputs, and what they say (a `GradientAdjoint` or a `SignalAdjoint`)."""

    group: Group
    sensitivity: Matrix
    adjoint: Any


def normalised(sensitivity: Matrix, grad_in: Matrix) -> Matrix:
    """In units of y: a linear map's paths together hand on the whole, and what traced moments lost
    to corrections of order 1/d, and the maps to their approximations, is put back."""
    return per_unit(sensitivity, total(sensitivity * grad_in))


class OneByOne:
    """The walk by token, part after part."""

    def __init__(self, sublayers: Sequence[Sublayer]) -> None:
        self.groups = [Group(sublayer, (k,), False) for k, sublayer in enumerate(sublayers)]

    def up(self, starts: Sequence[int], top: Matrix) -> tuple[list[Passed], Matrix]:
        """From the inputs of these parts to the last gradient `top`, to which the second answer is
        the sensitivity. Of a group, only the first sensitivities may be there, if others are 0."""
        sublayers = [one.sublayer for one in self.groups]
        identity = diagonal_matrix(
            np.ones((1, *sublayers[0].grad_in.shape[:-1]), SINGLE), sublayers[0].grad_in
        )
        sensitivity, result = identity[:0], []
        for k in range(len(sublayers) + 1):
            fresh = [identity] * sum(start == k for start in starts)
            sensitivity = stacked([sensitivity, *fresh])
            sensitivity = normalised(
                sensitivity, sublayers[k].grad_in if k < len(sublayers) else top
            )
            if k < len(sublayers):
                adjoint = sublayers[k].gradient_adjoint(sensitivity)
                result.append(Passed(self.groups[k], sensitivity, adjoint))
                sensitivity = adjoint.sensitivity
        return result, sensitivity

    def down(self, ups: Sequence[Passed], last: Matrix) -> tuple[list[Passed], Matrix]:
        """And back, from the last signal to the first, to which the second answer is the
        sensitivity."""
        result, sensitivity = [], last
        for group, _, up in reversed(ups):
            adjoint = group.sublayer.signal_adjoint(sensitivity, up.exposure)
            result.append(Passed(group, sensitivity, adjoint))
            sensitivity = adjoint.sensitivity
        return result, sensitivity

    def fall(
        self, starts: Sequence[int], diagonal: Sequence[Matrix]
    ) -> tuple[list[Passed], Matrix]:
        """The same of numbers that are made of signals alone: each of that which enters a part (or
        leaves the last), with the sensitivity `diagonal` to it; from the last part to the first."""
        assert list(starts) == sorted(starts, reverse=True)
        sensitivity, result = diagonal[0][:0], []
        for k in range(len(self.groups), -1, -1):
            fresh = [one for start, one in zip(starts, diagonal, strict=True) if start == k]
            sensitivity = stacked([sensitivity, *fresh])
            if k and len(sensitivity):
                group = self.groups[k - 1]
                adjoint = signal_alone(group.sublayer, sensitivity)
                result.append(Passed(group, sensitivity, adjoint))
                sensitivity = adjoint.sensitivity
        return result, sensitivity


def signal_alone(sublayer: Sublayer, sensitivity: Matrix) -> Any:
    """The adjoint of a signal alone, which no gradient answers to."""
    return sublayer.signal_adjoint(sensitivity, sublayer.gradient_adjoint(sensitivity[:0]).exposure)


class Inflow(NamedTuple):
    """What a part sends elsewhere, of which y is made too, tokens alike; all (targets, ..., 2) or
    (targets, ...).

    Attributes:
        sensitivity: to the gradient at the part's output, in any unit: of a token with itself, and
            with another.
        share: of y that comes from there.
        exposure: to the signal at the part's input.
    """

    sensitivity: Array
    share: Array
    exposure: Array


class AllAtOnce:
    """The walk of tokens alike: maps of two by two, and each group of parts once."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._inflow: Mapping[int, Inflow] | None = None
        count = sum(len(group.places) for group in groups)
        gradient, signal, grad_in = ([np.zeros(0)] * count for _ in range(3))
        for group in groups:
            sublayer = group.sublayer
            kind = sublayer.grad_in.classes
            axes = sublayer.grad_in.shape[:-2]
            units = np.eye(2).reshape(2, *(1,) * len(axes), 2)
            basis = _matrix(np.broadcast_to(units, (2, *axes, 2)), kind)
            onward = sublayer.gradient_adjoint(basis).sensitivity
            nothing = sublayer.gradient_adjoint(basis[:0]).exposure
            back = sublayer.signal_adjoint(basis, nothing).sensitivity
            sizes = _in_total(sublayer.grad_in)
            maps = [np.moveaxis(_numbers(one), 0, -1) for one in (onward, back)]
            for j, place in enumerate(group.places):
                gradient[place], signal[place] = (one[..., j, :, :] for one in maps)
                grad_in[place] = sizes[..., j, :]
        self._gradient, self._signal, self._sent = gradient, signal, grad_in

    def of(self, inflow: Mapping[int, Inflow]) -> AllAtOnce:
        """The walk of a number made of what parts send elsewhere, by the place behind each, in
        place of the gradient's variance at the starts given."""
        result = copy.copy(self)
        result._inflow = inflow
        return result

    def up(self, starts: Sequence[int], top: Matrix) -> tuple[list[Passed], Matrix]:
        begins = np.asarray(starts).reshape(-1, *(1,) * self._sent[0].ndim)
        at: Array = np.zeros((len(starts), *self._sent[0].shape))
        share, identity, before = at[..., 0], np.array([1.0, 0.0]), []
        for k, grad_in in enumerate([*self._sent, _in_total(top)]):
            at = _sharing(at, grad_in, share)
            if self._inflow is None:
                here = begins == k
                at, share = (
                    np.where(here, _sharing(identity, grad_in, 1.0), at),
                    share + here[..., 0],
                )
            elif k in self._inflow:
                begun = self._inflow[k]
                at = at + _sharing(begun.sensitivity, grad_in, begun.share)
                share = share + begun.share
            before.append(at)
            if k < len(self._sent):
                at = matrix_times(self._gradient[k], at)
        result = []
        for group in self.groups:
            sensitivity = _matrix(_gathered(group, before), top.classes)
            result.append(Passed(group, sensitivity, group.sublayer.gradient_adjoint(sensitivity)))
        return result, _matrix(before[-1], top.classes)

    def down(self, ups: Sequence[Passed], last: Matrix) -> tuple[list[Passed], Matrix]:
        exposed: list[Array] = [0.0] * len(self._sent)
        for group, sensitivity, up in ups:
            source = group.sublayer.signal_adjoint(0.0 * sensitivity, up.exposure).sensitivity
            numbers = _numbers(source)
            for j, place in enumerate(group.places):
                exposed[place] = numbers[..., j, :]
        at, behind = _numbers(last), [np.zeros(0)] * len(self._sent)
        for k in range(len(self._sent) - 1, -1, -1):
            behind[k] = at
            at = matrix_times(self._signal[k], at) + exposed[k]
            if self._inflow is not None and k + 1 in self._inflow:
                at = at + self._inflow[k + 1].exposure
        result = []
        for group, _, up in ups:
            sensitivity = _matrix(_gathered(group, behind), last.classes)
            adjoint = group.sublayer.signal_adjoint(sensitivity, up.exposure)
            result.append(Passed(group, sensitivity, adjoint))
        return result, _matrix(at, last.classes)

    def fall(
        self, starts: Sequence[int], diagonal: Sequence[Matrix]
    ) -> tuple[list[Passed], Matrix]:
        """As `OneByOne.fall`, whatever the order."""
        kind, given = diagonal[0].classes, np.concatenate([_numbers(one) for one in diagonal])
        begins = np.asarray(starts).reshape(-1, *(1,) * (given.ndim - 1))
        at, behind = np.zeros_like(given), [given] * len(self._sent)
        for k in range(len(self._sent), -1, -1):
            at = np.where(begins == k, given, at)
            if k:
                behind[k - 1] = at
                at = matrix_times(self._signal[k - 1], at)
        result = []
        for group in self.groups:
            sensitivity = _matrix(_gathered(group, behind), kind)
            adjoint = signal_alone(group.sublayer, sensitivity)
            result.append(Passed(group, sensitivity, adjoint))
        return result, _matrix(at, kind)


SensitivityWalk = OneByOne | AllAtOnce


def _matrix(numbers: Array, kind: PositionClasses) -> ClassMatrix:
    """Of (..., 2): a token with itself, and with another."""
    numbers = np.asarray(numbers, SINGLE)
    return ClassMatrix(numbers[..., :1], numbers[..., 1:, None], kind)


def _numbers(matrix: ClassMatrix) -> Array:
    """The same back."""
    return np.stack([matrix.diagonal[..., 0], matrix.off_diagonal[..., 0, 0]], axis=-1).astype(
        float
    )


def _in_total(matrix: ClassMatrix) -> Array:
    """(..., 2) with what the two numbers of a sensitivity count in its product's sum."""
    length = matrix.classes.length
    return np.array([1.0, length - 1.0]) * length * _numbers(matrix)


def _sharing(sensitivity: Array, grad_in: Array, share: Array) -> Array:
    """In the unit in which y has that share there."""
    unit = ratio(share, (sensitivity * grad_in).sum(-1))
    return np.asarray(sensitivity * unit[..., None])


def _gathered(group: Group, by_place: Sequence[Array]) -> Array:
    return np.stack([by_place[k] for k in group.places], axis=-2)


def matrix_times(matrix: Array, vector: Array) -> Array:
    return (matrix @ vector[..., None])[..., 0]


class Network:
    """A walk, and the random overlap that directions have before each part."""

    def __init__(
        self,
        walk: SensitivityWalk,
        first: Signal,
        batch: float,
        overlaps: Sequence[Array],
        end: tuple[Matrix, Response],
        across: Sequence[Matrix] | None = None,
    ) -> None:
        """Arguments:
        first: the signal that enters.
        batch: sequences that share the weights.
        overlaps: covariance of tokens of different sequences before every part, and behind all.
        end: the gradient at the last part's output, and where it comes from.
        across: the same as `overlaps`, place by place, where parts come one by one; None: alike.
        """
        self.top, self.end = end
        self.across = across
        self.walk, self.first, self.batch, self.overlaps = walk, first, batch, overlaps
        self.width = first.width
        self._coherence: dict[int, Array] = {}

    def along(self, walk: SensitivityWalk) -> Network:
        """The same on another walk through the same parts."""
        result = copy.copy(self)
        result.walk = walk
        return result

    def variance(self, starts: Sequence[int]) -> Array:
        """(starts, ...): of y at the inputs of these parts (or the network's output), in order.

        The first call has the input of the first part among them.
        """
        ups, sensitivity = self.walk.up(starts, self.top)
        last = self.end.gradient_adjoint(sensitivity)
        noise = last.noise / self.batch
        for group, _, adjoint in ups:
            added = group.summed(adjoint.noise / self.batch)
            noise[: len(added)] += added
        self._known(ups)
        for group, floor in self._gradient_floors(ups, starts, noise):
            noise[: len(floor)] += group.summed(floor)
        return noise + self._signal(ups, sensitivity, last.exposure)

    def signal_variance(self, starts: Sequence[int], diagonal: Sequence[Matrix]) -> Array:
        """(starts, ...): of a number made of the signal at the inputs of these parts (or the
        network's output), from the last to the first, with these sensitivities to it."""
        if self.batch > 1:
            self._known(self.walk.up([0], self.top)[0])
        downs, sensitivity = self.walk.fall(starts, diagonal)
        result = np.zeros(sensitivity.shape[:-2])
        return self._below(result, downs, sensitivity)

    def _known(self, ups: Sequence[Passed]) -> None:
        """Keep the coherence of every part."""
        if not self._coherence:
            for group, given, adjoint in ups:
                coherence = np.broadcast_to(adjoint.coherence, given.shape[:-2])
                self._coherence |= group.by_place(coherence[:1])

    # --- gradient ------------------------------------------------------------------------------

    def _gradient_floors(
        self, ups: Sequence[Passed], starts: Sequence[int], like: Array
    ) -> list[tuple[Group, Array]]:
        """For each group with an addition, what different directions covary by."""
        shares, by_place = [], dict[int, tuple[Array, Array]]()
        for group, given, adjoint in ups:
            sublayer = group.sublayer
            if not sublayer.residual:
                continue
            whole = total(given * sublayer.grad_in)
            carried = total(given * sublayer.kept_gradient)
            alone = ratio(paired(given, sublayer.grad_in, sublayer.grad_in), whole**2) / self.batch
            added, others = whole - carried, np.clip(1 - alone, 0.0, 1.0)
            coherent = adjoint.coherence * added
            shares.append((group, carried, added, coherent, others))
            carried, added, coherent = (ratio(one, whole) for one in (carried, added, coherent))
            fresh = self._fresh(carried, added, sublayer.kappa)
            kept = zip(
                group.by_place((carried + coherent) ** 2), group.by_place(fresh), strict=True
            )
            by_place |= {k: (one, more) for (k, one), (_, more) in kept}
        overlaps: dict[int, Array] = {}
        overlap = np.full_like(like, 1 / self.width)
        for k in sorted(by_place, reverse=True):
            kept, fresh = by_place[k]
            overlaps[k] = overlap[: len(fresh)]
            overlap = overlap.copy()
            overlap[: len(fresh)] = kept * overlaps[k] + fresh
        result = []
        for group, carried, added, coherent, others in shares:
            sublayer, begins = group.sublayer, np.asarray(starts[: len(carried)])
            visible = np.less_equal.outer(begins, group.places).astype(float)
            axes = (1,) * (carried.ndim - 1 - group.several)
            visible = visible.reshape(len(begins), *axes, *((-1,) if group.several else ()))
            floor = sublayer.floor(carried, added, coherent, group.gathered(overlaps))
            result.append((group, floor * others * visible))
        return result

    # --- signal --------------------------------------------------------------------------------

    def _signal(self, ups: Sequence[Passed], like: Matrix, exposure: Any) -> Array:
        last = self.end.signal_adjoint(0.0 * like, exposure)
        result = np.zeros(like.shape[:-2]) + last.noise / self.batch
        return self._below(result, *self.walk.down(ups, last.sensitivity))

    def _below(self, result: Array, downs: Sequence[Passed], sensitivity: Matrix) -> Array:
        """With what every part adds on the way down, and what enters the first."""
        overlaps = self._signal_overlaps() if self.batch > 1 else {}
        for group, given, adjoint in downs:
            sublayer = group.sublayer
            noise = adjoint.noise / self.batch
            if sublayer.residual and self.batch > 1:
                carried = total(given * sublayer.kept)
                added = total(given * sublayer.leaving) - carried
                coherent = group.gathered(self._coherence) * added
                floor = sublayer.floor(carried, added, coherent, group.gathered(overlaps))
                noise = noise + (1 - 1 / self.batch) * floor + self._across(given, group)
            noise = group.summed(noise)
            result[: len(noise)] += noise
        kernel = self._entering()
        if has_fixed_norms(self.first):
            # a norm has fixed every token's size
            lost = ratio(row_sums(sensitivity * kernel), diagonal_of(kernel))
            sensitivity = sensitivity - diagonal_matrix(lost, kernel)
        result += 2 / self.width * paired(sensitivity, kernel, kernel) / self.batch
        if self.across is None:
            across = (total(sensitivity) * self.overlaps[0]) ** 2
        else:
            across = paired(sensitivity, self.across[0], self.across[0])
        return result + 2 / self.width * (1 - 1 / self.batch) * across

    def _entering(self) -> Matrix:
        """The kernel of independent features whose overlaps vary as those of what enters do: its
        own, less what no weight is drawn for."""
        kernel, square = self.first.kernel, followed(self.first)
        if square is not None:
            kernel = signed_root(square, kernel).scaled((self.width / 2) ** 0.5)
        return matrix_of(kernel, self.first.seq_len).astype(SINGLE)

    def _signal_overlaps(self) -> dict[int, Array]:
        """q of the signals of two sequences before every part."""
        shares: dict[int, tuple[Array, Array]] = {}
        for group in self.walk.groups:
            sublayer = group.sublayer
            if sublayer.residual:
                carried = ratio(trace_of(sublayer.kept), trace_of(sublayer.leaving))
                carried, kappa = np.broadcast_arrays(carried, sublayer.kappa)
                pairs = zip(group.by_place(carried), group.by_place(kappa), strict=True)
                shares |= {k: (one, more) for (k, one), (_, more) in pairs}
        overlap, result = 1 / self.width + 0 * next(iter(self._coherence.values())), {}
        for k in range(len(self._coherence)):
            result[k] = overlap
            if k in shares:
                carried, kappa = shares[k]
                added = 1 - carried
                fresh = self._fresh(carried, added, kappa)
                overlap = (carried + self._coherence[k] * added) ** 2 * overlap + fresh
        return result

    def _fresh(self, carried: Array, added: Array, kappa: Any) -> Array:
        """What an addition adds to the overlap q, of shares of their sum."""
        return np.asarray((2 * carried + kappa / 2 * added) * added / self.width)

    def _across(self, sensitivity: Matrix, group: Group) -> Array:
        """What tokens of other sequences share: the means of the activations, and positions."""
        if self.batch == 1:
            return 0.0
        sublayer = group.sublayer
        if self.across is not None:
            (place,) = group.places
            kept = sublayer.skip * self.across[place]
            added = self.across[place + 1] - kept
            both = 4 * paired(sensitivity, kept, added)
            both = both + sublayer.kappa * paired(sensitivity, added, added)
            return (1 - 1 / self.batch) * both / self.width
        kept = sublayer.skip.mean((-2, -1)) * group.gathered(self.overlaps)
        added = group.gathered(self.overlaps[1:]) - kept
        noise = (4 * kept + sublayer.kappa * added) * added / self.width
        return (1 - 1 / self.batch) * noise * total(sensitivity) ** 2
