"""Variance of one scalar y over draws: the noise of every part times the sensitivity of y to it.

y is the gradient variance at one point of the stream, relative to its mean. It is linear in the
realised gradient kernels above that point, with sensitivities Lambda, and to first order it depends
on all realised signal kernels, with sensitivities Gamma (`response`). Parts above the point add
noise through Lambda, all parts of the network through Gamma. Directions that are orthogonal on
average have a random overlap, of mean square q, which bounds from below how far averaging over
tokens and sequences reduces the variance. Exchangeable tokens are one class (`classes.OneClass`);
their parts of one structure are evaluated together. Memories of an encoder's texts are assumed to
covary as two tokens of one text do; memories of other inputs not at all.

See docs/theory/band.md, What fluctuates. See docs/theory/band.md, The floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.classes import ClassMatrix, PositionClasses, diagonal_of
from ..engine.composition import Layer
from ..engine.fluctuation import has_fixed_norms, overlap_covariance, signed_root
from ..engine.layout import SequenceLayout
from ..engine.response import (
    SINGLE,
    GradientUnits,
    Matrix,
    Response,
    SignalAdjoint,
    Sublayer,
    count_of,
    diagonal_matrix,
    matrix_of,
    per_unit,
    ratio,
    row_sums,
    stacked,
    total,
    trace_of,
    trace_of_products,
)
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.structure import fields_of, flattened, joined
from ..engine.trace import Record, Run, Trace


class Group(NamedTuple):
    """Parts of one structure, stacked on a last axis; or a single part without that axis.

    Attributes:
        sublayer: response of the part or of the stacked parts.
        places: index of each part in the network.
        several: whether the last axis is one of parts.
    """

    sublayer: Sublayer
    places: Sequence[int]
    several: bool

    def gathered(self, by_place: Mapping[int, Array] | Sequence[Array]) -> Array:
        """Stack the values of the group's parts, out of those of all parts of the network."""
        if not self.several:
            return by_place[self.places[0]]
        return np.stack(np.broadcast_arrays(*(by_place[k] for k in self.places)), axis=-1)

    def by_place(self, values: Array) -> Iterator[tuple[int, Array]]:
        """(place, value) for each part, of stacked values (..., parts)."""
        if not self.several:
            return iter(((self.places[0], values),))
        return zip(self.places, np.moveaxis(values, -1, 0), strict=True)

    def summed(self, values: Array) -> Array:
        """Sum over the parts of the group."""
        return values.sum(-1) if self.several else values


class GroupSensitivity(NamedTuple):
    """Sensitivities to the gradients at the inputs of a group of parts (forward pass), or to the
    signals at their outputs (backward), and their `GradientAdjoint` or `SignalAdjoint`."""

    group: Group
    sensitivity: Matrix
    adjoint: Any


def with_unit_total(sensitivity: Matrix, grad_in: Matrix) -> Matrix:
    """Rescale Lambda such that sum(Lambda o G) = 1, the mean of y: as exact linear maps would
    preserve it. Traced moments deviate by corrections of order 1/d, the maps by approximation."""
    return per_unit(sensitivity, total(sensitivity * grad_in))


class SequentialWalk:
    """Propagation of sensitivities part by part, for tokens that are resolved."""

    def __init__(self, sublayers: Sequence[Sublayer]) -> None:
        self.groups = [Group(sublayer, (k,), False) for k, sublayer in enumerate(sublayers)]

    def forward(
        self, starts: Sequence[int], last_gradient: Matrix
    ) -> tuple[list[GroupSensitivity], Matrix]:
        """Propagate Lambda forward from the inputs of the parts `starts`, in ascending order.

        Returns:
            Lambda at every part, without trailing targets where these are 0, and Lambda with
            respect to `last_gradient`, the gradient at the network's output.
        """
        sublayers = [group.sublayer for group in self.groups]
        identity = diagonal_matrix(
            np.ones((1, *sublayers[0].grad_in.shape[:-1]), SINGLE), sublayers[0].grad_in
        )
        sensitivity, result = identity[:0], []
        for k, grad_in in enumerate([*(one.grad_in for one in sublayers), last_gradient]):
            begun = [identity] * sum(start == k for start in starts)
            sensitivity = with_unit_total(stacked([sensitivity, *begun]), grad_in)
            if k < len(sublayers):
                adjoint = sublayers[k].gradient_adjoint(sensitivity)
                result.append(GroupSensitivity(self.groups[k], sensitivity, adjoint))
                sensitivity = adjoint.sensitivity
        return result, sensitivity

    def backward(
        self,
        starts: Sequence[int],
        sensitivities: Sequence[Matrix],
        passed: list[GroupSensitivity] | None = None,
    ) -> tuple[list[GroupSensitivity], Matrix]:
        """Propagate Gamma backward.

        Args:
            starts: parts at whose inputs `sensitivities` to the signal begin, in descending order;
                the number of parts is the network's output.
            sensitivities: (targets, ..., L, L), for one or more targets each.
            passed: the result of `forward`, if the targets depend on gradients too.

        Returns:
            Gamma at every part, and Gamma with respect to the first signal.
        """
        assert list(starts) == sorted(starts, reverse=True)
        sensitivity, result = sensitivities[0][:0], []
        for k in range(len(self.groups), -1, -1):
            begun = [one for start, one in zip(starts, sensitivities, strict=True) if start == k]
            sensitivity = stacked([sensitivity, *begun]) if begun else sensitivity
            if k and len(sensitivity):
                group = self.groups[k - 1]
                forward = passed[k - 1] if passed else None
                adjoint = _signal_adjoint(group.sublayer, sensitivity, forward)
                result.append(GroupSensitivity(group, sensitivity, adjoint))
                sensitivity = adjoint.sensitivity
        return result, sensitivity


def _signal_adjoint(
    sublayer: Sublayer, sensitivity: Matrix, forward: GroupSensitivity | None
) -> SignalAdjoint:
    """Adjoint of a scalar that passed `forward`, or does not depend on gradients (None)."""
    adjoint = sublayer.gradient_adjoint(sensitivity[:0]) if forward is None else forward.adjoint
    return sublayer.signal_adjoint(sensitivity, adjoint.exposure)


class SideOutput(NamedTuple):
    """Contribution to y of the gradient that a part sends to another tensor it reads, the memory.

    Attributes:
        sensitivity: (targets, ..., 2) to the gradient at the part's output, in any unit.
        share: (targets, ...) fraction of y.
        exposure: (targets, ..., 2) to the signal at the part's input.
    """

    sensitivity: Array
    share: Array
    exposure: Array


class ExchangeableWalk:
    """Propagation of sensitivities for exchangeable tokens: a part is a 2 x 2 matrix that acts on
    (diagonal, off-diagonal), and a group of parts is evaluated once.

    Attributes:
        side_outputs: if set, y is the sum of these contributions, by the index of the part behind
            each; the `starts` of `forward` then only give the number of targets.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.side_outputs: Mapping[int, SideOutput] | None = None
        count = sum(len(group.places) for group in groups)
        self._gradient_maps, self._signal_maps, self._grad_in = (
            [np.zeros(0)] * count for _ in range(3)
        )
        for group in groups:
            sublayer = group.sublayer
            classes = sublayer.grad_in.classes
            axes = sublayer.grad_in.shape[:-2]
            units = np.eye(2).reshape(2, *(1,) * len(axes), 2)
            basis = _matrix(np.broadcast_to(units, (2, *axes, 2)), classes)
            adjoints = sublayer.gradient_adjoint(basis), _signal_adjoint(sublayer, basis, None)
            of_gradients, of_signals = (
                np.moveaxis(_entries(one.sensitivity), 0, -1) for one in adjoints
            )
            coefficients = _sum_coefficients(sublayer.grad_in)
            for j, place in enumerate(group.places):
                self._gradient_maps[place] = of_gradients[..., j, :, :]
                self._signal_maps[place] = of_signals[..., j, :, :]
                self._grad_in[place] = coefficients[..., j, :]

    def forward(
        self, starts: Sequence[int], last_gradient: Matrix
    ) -> tuple[list[GroupSensitivity], Matrix]:
        """As `SequentialWalk.forward`, with `starts` in any order."""
        begins = np.asarray(starts).reshape(-1, *(1,) * self._grad_in[0].ndim)
        current: Array = np.zeros((len(starts), *self._grad_in[0].shape))
        share, identity, at_inputs = current[..., 0], np.array([1.0, 0.0]), []
        for k, grad_in in enumerate([*self._grad_in, _sum_coefficients(last_gradient)]):
            current = _with_share(current, grad_in, share)
            if self.side_outputs is None:
                begin = begins == k
                current = np.where(begin, _with_share(identity, grad_in, 1.0), current)
                share = share + begin[..., 0]
            elif k in self.side_outputs:
                side = self.side_outputs[k]
                current = current + _with_share(side.sensitivity, grad_in, side.share)
                share = share + side.share
            at_inputs.append(current)
            if k < len(self._grad_in):
                current = matvec(self._gradient_maps[k], current)
        classes = last_gradient.classes
        result = []
        for group, sensitivity in self._at_groups(at_inputs, classes):
            adjoint = group.sublayer.gradient_adjoint(sensitivity)
            result.append(GroupSensitivity(group, sensitivity, adjoint))
        return result, _matrix(at_inputs[-1], classes)

    def backward(
        self,
        starts: Sequence[int],
        sensitivities: Sequence[Matrix],
        passed: list[GroupSensitivity] | None = None,
    ) -> tuple[list[GroupSensitivity], Matrix]:
        """As `SequentialWalk.backward`, with `starts` in any order."""
        classes, count = sensitivities[0].classes, len(self._grad_in)
        exposed: list[Array] = [0.0] * count
        for group, sensitivity, forward in passed or ():
            source = group.sublayer.signal_adjoint(0.0 * sensitivity, forward.exposure).sensitivity
            entries = _entries(source)
            for j, place in enumerate(group.places):
                exposed[place] = entries[..., j, :]
        initial = np.concatenate([_entries(one) for one in sensitivities])
        begins = np.asarray(starts).reshape(-1, *(1,) * (initial.ndim - 1))
        current, at_outputs = np.zeros_like(initial), [initial] * count
        for k in range(count, -1, -1):
            if k < count:
                at_outputs[k] = current
                current = matvec(self._signal_maps[k], current) + exposed[k]
                if self.side_outputs is not None and k + 1 in self.side_outputs:
                    current = current + self.side_outputs[k + 1].exposure
            current = np.where(begins == k, initial, current)
        result = []
        for g, (group, sensitivity) in enumerate(self._at_groups(at_outputs, classes)):
            adjoint = _signal_adjoint(group.sublayer, sensitivity, passed[g] if passed else None)
            result.append(GroupSensitivity(group, sensitivity, adjoint))
        return result, _matrix(current, classes)

    def _at_groups(
        self, by_place: Sequence[Array], classes: PositionClasses
    ) -> Iterator[tuple[Group, Matrix]]:
        """Sensitivities (..., 2) of all parts as matrices of each group."""
        for group in self.groups:
            yield group, _matrix(np.stack([by_place[k] for k in group.places], axis=-2), classes)


SensitivityWalk = SequentialWalk | ExchangeableWalk


def _matrix(entries: Array, classes: PositionClasses) -> ClassMatrix:
    """The matrix of exchangeable tokens with entries (..., 2): diagonal, off-diagonal."""
    entries = np.asarray(entries, SINGLE)
    return ClassMatrix(entries[..., :1], entries[..., 1:, None], classes)


def _entries(matrix: ClassMatrix) -> Array:
    """(..., 2) diagonal and off-diagonal entry: the inverse of `_matrix`."""
    pair = np.stack([matrix.diagonal[..., 0], matrix.off_diagonal[..., 0, 0]], axis=-1)
    return pair.astype(float)


def _sum_coefficients(matrix: ClassMatrix) -> Array:
    """(..., 2) coefficients of the two entries of Lambda in sum(Lambda o matrix)."""
    length = matrix.classes.length
    return np.array([1.0, length - 1.0]) * length * _entries(matrix)


def _with_share(sensitivity: Array, coefficients: Array, share: Array) -> Array:
    """Rescale Lambda (..., 2) such that sum(Lambda o G) = share."""
    unit = ratio(share, (sensitivity * coefficients).sum(-1))
    return np.asarray(sensitivity * unit[..., None])


def matvec(matrix: Array, vector: Array) -> Array:
    return (matrix @ vector[..., None])[..., 0]


class Network:
    """Sums over all parts the noise that reaches y, with the overlap floor of each."""

    def __init__(
        self,
        walk: SensitivityWalk,
        first: Signal,
        batch: float,
        mean_covariances: Sequence[Array],
        end: tuple[Matrix, Response],
        across: Sequence[Matrix] | None = None,
    ) -> None:
        """Arguments:
        first: the signal that enters the first part.
        batch: number of sequences that share the weights.
        mean_covariances: covariance of two tokens of different sequences, before every part and
            behind the last, averaged over tokens.
        end: the gradient at the last part's output, and the response of its source.
        across: the same covariances as matrices over tokens, for a `SequentialWalk`; None: all
            tokens have the mean.
        """
        self.last_gradient, self.end = end
        self.across, self.mean_covariances = across, mean_covariances
        self.walk, self.first, self.batch = walk, first, batch
        self.parts = sum(len(group.places) for group in walk.groups)
        self.width = first.width
        self._coherence: dict[int, Array] = {}

    def variance(self, starts: Sequence[int]) -> Array:
        """(starts, ...): Var y for y at the inputs of these parts (or the network's output), in
        ascending order.

        The first call must include the input of the first part: it stores coherences.
        """
        passed, sensitivity = self.walk.forward(starts, self.last_gradient)
        source = self.end.gradient_adjoint(sensitivity)
        noise = source.noise / self.batch
        for group, _, adjoint in passed:
            added = group.summed(adjoint.noise / self.batch)
            noise[: len(added)] += added
        self._store_coherence(passed)
        for group, floor in self._gradient_floors(passed, starts, noise):
            noise[: len(floor)] += group.summed(floor)
        last = self.end.signal_adjoint(0.0 * sensitivity, source.exposure)
        signal_noise = np.zeros(sensitivity.shape[:-2]) + last.noise / self.batch
        backward = self.walk.backward([self.parts], [last.sensitivity], passed)
        return noise + self._with_signal_noise(signal_noise, *backward)

    def signal_variance(self, starts: Sequence[int], sensitivities: Sequence[Matrix]) -> Array:
        """(starts, ...): variance of scalars that are functions of the signal at the inputs of
        these parts (or the network's output), in descending order, with these sensitivities."""
        if self.batch > 1:
            self._store_coherence(self.walk.forward([0], self.last_gradient)[0])
        backward, sensitivity = self.walk.backward(starts, sensitivities)
        return self._with_signal_noise(np.zeros(sensitivity.shape[:-2]), backward, sensitivity)

    def _store_coherence(self, passed: Sequence[GroupSensitivity]) -> None:
        if not self._coherence:
            for group, sensitivity, adjoint in passed:
                coherence = np.broadcast_to(adjoint.coherence, sensitivity.shape[:-2])
                self._coherence |= group.by_place(coherence[:1])

    # --- gradient ------------------------------------------------------------------------------

    def _gradient_floors(
        self, passed: Sequence[GroupSensitivity], starts: Sequence[int], like: Array
    ) -> list[tuple[Group, Array]]:
        """For each group with an addition, the covariance of y's contributions in orthogonal
        directions, which share no mean overlap."""
        shares, overlap_maps = [], dict[int, tuple[Array, Array]]()
        for group, sensitivity, adjoint in passed:
            sublayer = group.sublayer
            if not sublayer.residual:
                continue
            whole = total(sensitivity * sublayer.grad_in)
            carried = total(sensitivity * sublayer.kept_gradient)
            square = trace_of_products(sensitivity, sublayer.grad_in, sublayer.grad_in)
            one_direction = ratio(square, whole**2) / self.batch
            added, orthogonal = whole - carried, np.clip(1 - one_direction, 0.0, 1.0)
            coherent = adjoint.coherence * added
            shares.append((group, carried, added, coherent, orthogonal))
            carried, added, coherent = (ratio(one, whole) for one in (carried, added, coherent))
            fresh = group.by_place(self._added_overlap(carried, added, sublayer.kappa))
            kept = group.by_place((carried + coherent) ** 2)
            overlap_maps |= {
                k: (one, more) for (k, one), (_, more) in zip(kept, fresh, strict=True)
            }
        overlaps: dict[int, Array] = {}
        overlap = np.full_like(like, 1 / self.width)
        for k in sorted(overlap_maps, reverse=True):
            factor, added = overlap_maps[k]
            overlaps[k] = overlap[: len(added)]
            overlap = overlap.copy()
            overlap[: len(added)] = factor * overlaps[k] + added
        result = []
        for group, carried, added, coherent, orthogonal in shares:
            sublayer, begins = group.sublayer, np.asarray(starts[: len(carried)])
            above = np.less_equal.outer(begins, group.places).astype(float)
            axes = (1,) * (carried.ndim - 1 - group.several)
            above = above.reshape(len(begins), *axes, *((-1,) if group.several else ()))
            floor = sublayer.floor(carried, added, coherent, group.gathered(overlaps))
            result.append((group, floor * orthogonal * above))
        return result

    # --- signal --------------------------------------------------------------------------------

    def _with_signal_noise(
        self, result: Array, backward: Sequence[GroupSensitivity], sensitivity: Matrix
    ) -> Array:
        """Add to `result` the noise of every part's signal and of the first signal."""
        overlaps = self._signal_overlaps() if self.batch > 1 else {}
        for group, behind, adjoint in backward:
            sublayer = group.sublayer
            noise = adjoint.noise / self.batch
            if sublayer.residual and self.batch > 1:
                carried = total(behind * sublayer.kept)
                added = total(behind * sublayer.leaving) - carried
                coherent = group.gathered(self._coherence) * added
                floor = sublayer.floor(carried, added, coherent, group.gathered(overlaps))
                noise = noise + (1 - 1 / self.batch) * floor
                noise = noise + self._cross_sequence_noise(behind, group)
            noise = group.summed(noise)
            result[: len(noise)] += noise
        kernel = self._first_kernel()
        if has_fixed_norms(self.first):  # remove the sensitivity along each token's squared norm
            along = ratio(row_sums(sensitivity * kernel), diagonal_of(kernel))
            sensitivity = sensitivity - diagonal_matrix(along, kernel)
        result += 2 / self.width * trace_of_products(sensitivity, kernel, kernel) / self.batch
        if self.across is None:
            across = (total(sensitivity) * self.mean_covariances[0]) ** 2
        else:
            across = trace_of_products(sensitivity, self.across[0], self.across[0])
        return result + 2 / self.width * (1 - 1 / self.batch) * across

    def _first_kernel(self) -> Matrix:
        """Kernel of Gaussian features whose overlaps vary as those of the first signal: its own
        kernel, without the part that no weight is drawn for."""
        kernel, square = self.first.kernel, overlap_covariance(self.first)
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
        for k in range(self.parts):
            result[k] = overlap
            if k in shares:
                carried, kappa = shares[k]
                added = 1 - carried
                fresh = self._added_overlap(carried, added, kappa)
                overlap = (carried + self._coherence[k] * added) ** 2 * overlap + fresh
        return result

    def _added_overlap(self, carried: Array, added: Array, kappa: Any) -> Array:
        """Increase of q by an addition; `carried` and `added` are shares of its sum."""
        return np.asarray((2 * carried + kappa / 2 * added) * added / self.width)

    def _cross_sequence_noise(self, sensitivity: Matrix, group: Group) -> Array:
        """Noise through the covariance of tokens of different sequences."""
        sublayer = group.sublayer
        if self.across is not None:
            (place,) = group.places
            kept = sublayer.skip * self.across[place]
            added = self.across[place + 1] - kept
            noise = 4 * trace_of_products(sensitivity, kept, added)
            noise = noise + sublayer.kappa * trace_of_products(sensitivity, added, added)
            return (1 - 1 / self.batch) * noise / self.width
        kept = sublayer.skip.mean((-2, -1)) * group.gathered(self.mean_covariances)
        added = group.gathered(self.mean_covariances[1:]) - kept
        noise = (4 * kept + sublayer.kappa * added) * added / self.width
        return (1 - 1 / self.batch) * noise * total(sensitivity) ** 2


# --- stacks of exchangeable tokens ----------------------------------------------------------------

ENDLESS = 10**9
"""Length of a sequence in whose averages a single token has no weight."""

_KERNEL_FIELDS = ("diagonal", "off_diagonal")
_ZERO_OR_NOT = ("off_diagonal", "norm_response")


class ExchangeableStack(NamedTuple):
    """A stack of exchangeable tokens, or of averaged ones.

    Attributes:
        entering: the signal that enters layer 1.
        passing: for each layer the signal at its input and the gradient at its output.
        memory: the signal that cross-attention reads; None: there is no cross-attention.
    """

    entering: Signal
    passing: Sequence[tuple[Signal, Gradient]]
    memory: Signal | None

    @classmethod
    def from_trace(cls, trace: Trace) -> ExchangeableStack:
        """The stack of a trace, averaged over tokens where these are resolved."""
        passing, memory = trace.passing(), trace.memory
        length = trace.entering.seq_len
        if trace.entering.resolved:
            passing = [
                (_of_signal(signal), Gradient(averaged_tokens(gradient.kernel, length), length))
                for signal, gradient in passing
            ]
            memory = None if memory is None else _of_signal(memory)
        passing = [(signal.replace(notes=()), gradient) for signal, gradient in passing]
        return cls(passing[0][0], passing, memory and memory.replace(notes=()))

    def sublayers(self, layers: Sequence[Layer]) -> list[tuple[Group, Record]]:
        """The parts of all layers, grouped by structure, with the records of both passes.

        Positional components are removed, as exchangeable tokens have no positions.
        """
        starts, by_structure = sublayer_starts(layers), dict[Any, list[int]]()
        distinct = {id(layer.body): layer.body for layer in layers}  # most layers share one body
        bodies = {key: body.without_positions() for key, body in distinct.items()}
        structures = {key: structure(body) for key, body in bodies.items()}
        for n, (layer, (signal, gradient)) in enumerate(zip(layers, self.passing, strict=True)):
            key = structures[id(layer.body)], structure(signal), structure(gradient)
            by_structure.setdefault(key, []).append(n)
        memory, result = None if self.memory is None else side_by_side([self.memory]), []
        for numbers in by_structure.values():
            body = side_by_side([bodies[id(layers[n].body)] for n in numbers])
            signals, gradients = (
                side_by_side([self.passing[n][i] for n in numbers]) for i in (0, 1)
            )
            record = body.propagate(signals, Run(memory)).backward(gradients)
            for position, one in enumerate(record.in_order()):
                places = [starts[n] + position for n in numbers]
                axes = one.input.kernel.diagonal, one.grad_in.kernel.diagonal
                shape = np.broadcast_shapes(*map(np.shape, axes))
                result.append((Group(sublayer_of(one, shape), places, True), one))
        return result


def sublayer_of(record: Record, shape: tuple[int, ...]) -> Sublayer:
    """The response of a part, for configurations of this shape."""
    unit = trace_of(matrix_of(record.grad_in.kernel, record.input.seq_len))
    return GradientUnits(np.broadcast_to(unit, shape)).part(record)


def across_sequences(
    layers: Sequence[Layer], trace: Trace, variances: Sequence[Array]
) -> list[Array]:
    """Covariance of two tokens of different sequences, before every part and behind the last.

    It starts at 0 for independent inputs, at that of two tokens of one sequence for embedded texts,
    and grows by the mean of the activations, which all tokens share.

    Args:
        variances: of a token before every part.
    """
    embedded = trace.embedding is not None
    entering = averaged_tokens(trace.entering.kernel, trace.entering.seq_len)
    covariance = entering.off_diagonal if embedded else 0.0 * entering.off_diagonal
    width, memory = trace.entering.width, None
    if trace.memory is not None:
        tokens = averaged_tokens(trace.memory.second_moment(), trace.memory.seq_len)
        kernel = Kernel(tokens.diagonal, tokens.off_diagonal * float(embedded))
        memory = Signal(kernel, ENDLESS, width=trace.memory.width)
    parts = [part for layer in layers for part in layer.body.apart().in_order()]
    result = [covariance]
    for part, variance in zip(parts, variances, strict=True):
        signal = Signal(Kernel(0.0 * covariance + variance, covariance), ENDLESS, width=width)
        covariance = part.propagate(signal, Run(memory)).output.kernel.off_diagonal
        result.append(covariance)
    return result


def sublayer_starts(layers: Sequence[Layer]) -> list[int]:
    """Index of the first part of each layer, and the number of all parts."""
    return [0, *np.cumsum([len(layer.body.in_order()) for layer in layers]).tolist()]


def structure(value: Any) -> Any:
    """A hashable key: values with equal keys can be `side_by_side`.

    It holds everything but numbers, and which numbers are 0, as 0 often switches a formula; not so
    for off-diagonal entries and norm responses, of which sweeps have zeros and other values.
    """
    numbers: list[Any] = []
    result = flattened(value, numbers, axes=True)
    pairs = zip(fields_of(result), numbers, strict=True)
    return result, tuple(name in _ZERO_OR_NOT or not np.any(number) for name, number in pairs)


def side_by_side(values: Sequence[Any]) -> Any:
    """Join values of one structure on a last axis of their numbers; equal numbers outside kernels
    get no such axis."""
    first = values[0]
    same = len(values) > 1 and all(value is first for value in values)
    return joined(values[:1] if same else values, _on_last_axis)


def _on_last_axis(field: str, numbers: tuple[Any, ...]) -> Any:
    if field in _KERNEL_FIELDS or any(isinstance(number, np.ndarray) for number in numbers):
        return np.stack(np.broadcast_arrays(*numbers), axis=-1)
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers)


def averaged_tokens(kernel: Kernel, seq_len: int) -> Kernel:
    """The kernel of exchangeable tokens, averaged over the tokens of each sequence."""
    if not kernel.resolved:
        return kernel
    several = kernel.resolved is True and seq_len > 1
    sequences = kernel.off_diagonal.shape[-1] // seq_len if several else 1
    return Kernel(*SequenceLayout(sequences).token_average(kernel))


def _of_signal(signal: Signal) -> Signal:
    kernel = averaged_tokens(signal.second_moment(), signal.seq_len)
    return Signal(kernel, signal.seq_len, width=signal.width, fluctuation=Fluctuation.fixed(kernel))


def mean_covariances(
    layers: Sequence[Layer], trace: Trace, walk: SensitivityWalk, batch: float
) -> Sequence[Array]:
    """`across_sequences` with the variances of a walk."""
    if batch == 1:
        return (0.0,)
    variances: dict[int, Array] = {}
    for group in walk.groups:
        kernel = group.sublayer.entering
        variances |= group.by_place(trace_of(kernel) / count_of(kernel))
    return across_sequences(layers, trace, [variances[k] for k in sorted(variances)])
