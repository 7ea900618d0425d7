"""What one draw of a decoder makes of the gradient that its encoder receives.

Every layer's cross-attention sends the memory a gradient M_k R_k: R_k the modes of the gradient
that the layer's part receives, M_k a map that depends on the modes of the memory and of the tokens
that ask. Their sum over layers is a number y as any other (`network.SideOutput`), with noise of the
matrices in between (`_noise`). The memory's own fluctuations are the response of that gradient to
the memory. By token, the decoder is followed with moments averaged over tokens.

See docs/theory/band.md, Where gradients come from."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..engine.classes import ClassMatrix, OneClass, diagonal_of, one_class
from ..engine.composition import Chain, Layer, forward
from ..engine.response import (
    SINGLE,
    Around,
    GradientAdjoint,
    Matrix,
    Response,
    Sequence,
    SignalAdjoint,
    count_of,
    diagonal_matrix,
    in_units,
    matrix_of,
    ratio,
    total,
    trace_of,
    transposed,
    without_diagonal,
)
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.trace import Record, Trace
from ..layers.attention.kernels.exact_rows import AlikeRows
from ..layers.attention.projections import logit_law
from .alike import Alike, averaged_tokens, stacked
from .band import GaussianSource, GradientSource, mean_covariances
from .network import ExchangeableWalk, Group, Network, SideOutput, matvec

STEP = 1e-5
"""Relative step of the one-sided differences, whose error is of this order."""


@dataclass(frozen=True)
class Modes:
    """The two eigenvalues of a kernel over L tokens alike, last axis (mean, difference)."""

    seq_len: int

    @property
    def count(self) -> Array:
        """Number of modes of each kind."""
        return np.array([1.0, self.seq_len - 1.0])

    @property
    def average(self) -> Array:
        """Weights with which the modes make up the variance of a token."""
        return self.count / self.seq_len

    def of(self, kernel: Kernel) -> Array:
        """Eigenvalues (..., 2) of a kernel."""
        diagonal, off_diagonal = np.broadcast_arrays(kernel.diagonal, kernel.off_diagonal)
        return np.stack(
            [diagonal + (self.seq_len - 1) * off_diagonal, diagonal - off_diagonal], axis=-1
        )

    def kernel(self, modes: Array) -> Kernel:
        """The kernel with eigenvalues (..., 2)."""
        mean, difference = modes[..., 0], modes[..., 1]
        off_diagonal = (mean - difference) / self.seq_len
        return Kernel(difference + off_diagonal, off_diagonal)

    def sensitivity(self, derivative: Array) -> Array:
        """(..., 2) to a token's moment and to that of two, of derivatives by both eigenvalues."""
        kernel = self.kernel(ratio(derivative, self.count))
        return np.stack([kernel.diagonal, kernel.off_diagonal], axis=-1)


@dataclass(frozen=True, eq=False)
class DecoderTop:
    """The decoder that reads an encoder.

    Attributes:
        trace: of the decoder, both passes.
        top: where its own last gradient comes from; None: it is a fresh Gaussian tensor.
    """

    declaration: Chain
    trace: Trace
    top: GradientSource | None = None

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The encoder's last gradient, and how it answers to the decoder; `trace` is the
        encoder's."""
        last, reading = trace.stream()[-1], trace.ending
        assert last.gradient is not None
        assert reading is not None
        grad_out = matrix_of(last.gradient.kernel, last.signal.seq_len)
        around = Around(np.asarray(trace_of(grad_out)))
        parts = [record.component.response(record, around) for record in reading.children]
        memory, modes = reading.output, Modes(reading.output.seq_len)
        kernel = matrix_of(memory.second_moment(), memory.seq_len)
        sequences = int(count_of(grad_out)) // memory.seq_len
        response, covariance = self._of_modes(memory, modes, batch * sequences)
        decoder = OfModes(response, batch * covariance, around.grad_out(reading), kernel, modes)
        return in_units(grad_out, around.unit), Sequence((*parts, decoder))

    def _of_modes(self, memory: Signal, modes: Modes, batch: float) -> tuple[Array, Array]:
        """Response of the memory's gradient to the memory, and covariance of its modes.

        Both in relative modes (..., 2, 2), of the gradient's over its variance.
        """
        layers = [part for part in self.declaration.children if isinstance(part, Layer)]
        decoder = Alike.of(self.trace)
        parts = decoder.sublayers(layers)
        groups = [group for group, _ in parts]
        shape = groups[0].sublayer.grad_in.shape[:-3]
        of_memory = _Memory.of(memory, modes, batch, shape)
        grad_in: list[tuple[Group, _Sent]] = []
        for group, record in parts:
            reading = [one for one in record.leaves() if one.memory is not None]
            grad_in += [(group, _of_part(record, reading[0], of_memory)) for _ in reading[:1]]
        whole = np.add.reduce([one.added[:3].sum(-2) for _, one in grad_in])
        size = whole[0] @ modes.average
        walk = ExchangeableWalk(groups)
        overlaps = mean_covariances(layers, self.trace, walk, batch)
        network = Network(walk, decoder.entering, batch, overlaps, self._end(batch))
        covariance = _covariance(network, walk, grad_in, size, of_memory)
        response = (whole[1:] - whole[0]) / (STEP * size[..., None])
        return np.moveaxis(response, 0, -1), covariance

    def _end(self, batch: float) -> tuple[Matrix, Response]:
        """The decoder's own last gradient, as of tokens alike."""
        first, sequences = self.trace.entering, 1
        if self.top is None:
            end: tuple[Matrix, Response] = GaussianSource.of(self.trace)
        else:
            if first.resolved is True:
                sequences = first.kernel.off_diagonal.shape[-1] // first.seq_len
            end = self.top.gradient_response(self.trace, max(1, batch // sequences))
        if not first.resolved:
            return end
        grad_out, response = end
        kind = one_class(first.seq_len)
        return _alike(grad_out, kind), OfAverages(response, grad_out, kind, sequences)


class _Sent(NamedTuple):
    """What parts' cross-attention sends to the memory, on the axis before the last.

    Attributes:
        returned: (..., parts, 2, 2) map from the modes of the gradient that a part receives.
        added: (5, ..., parts, 2) modes sent: at the means, at either mode of the memory a little
            larger, and of the signal that enters the part.
        entering: (..., parts, 2) modes of that signal.
        noise: (..., parts, 2, 2) covariance that the part's matrices add.
    """

    returned: Array
    added: Array
    entering: Array
    noise: Array


class _Memory(NamedTuple):
    """The memory, and slightly larger modes of it.

    Attributes:
        memory: (5, ..., 1) of these, the last two as it is.
        modes: of its tokens.
        batch: sequences that share the weights.
    """

    memory: Signal
    modes: Modes
    batch: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, memory: Signal, modes: Modes, batch: float, shape: tuple[int, ...]) -> _Memory:
        tokens = averaged_tokens(memory.second_moment(), modes.seq_len)
        base = np.broadcast_to(modes.of(tokens), (*shape, 2))
        steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
        kernel = modes.kernel(base * (1 + steps.reshape(5, *(1,) * (base.ndim - 1), 2)))
        fixed = Fluctuation.fixed(kernel)
        moved = Signal(kernel, modes.seq_len, width=memory.width, fluctuation=fixed)
        return cls(stacked([moved]), modes, batch, shape)


def _of_part(record: Record, reading: Record, of_memory: _Memory) -> _Sent:
    """Of the parts of a group, and one reader in them."""
    modes, attention = Modes(record.input.seq_len), reading.component
    kernel, gradient = record.input.kernel, record.grad_out.kernel
    shape = (*of_memory.shape, np.shape(kernel.diagonal)[-1], 2)
    base, grad_out = (np.broadcast_to(modes.of(one), shape) for one in (kernel, gradient))
    axes = (1,) * (base.ndim - 1)
    steps = STEP * np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1]])
    nudged = modes.kernel(base * (1 + steps.reshape(5, *axes, 2)))
    signal = Signal(
        nudged, modes.seq_len, width=record.input.width, fluctuation=Fluctuation.fixed(nudged)
    )
    basis = Gradient(modes.kernel(np.eye(2).reshape(2, 1, *axes, 2)), modes.seq_len)
    addition, scale, node = record.component.addition(record), 1.0, record
    if addition is not None:
        scale, node = addition.adding, addition.added
    path = next(one for one in node.paths() if reading in one)
    through = Chain(tuple(one.component for one in path))
    passed = forward(through, signal, of_memory.memory)[1].backward(basis)
    (read,) = (one for one in passed.leaves() if one.grad_memory is not None)
    assert read.grad_memory is not None
    grad_in = of_memory.modes.of(read.grad_memory.kernel)
    grad_in = np.broadcast_to(grad_in, np.broadcast_shapes(grad_in.shape, (2, 5, *base.shape)))
    returned = np.asarray(scale)[..., None, None] * np.moveaxis(grad_in, 0, -1)
    query_tokens = _first(read.input.kernel)
    noise = _noise(attention, returned[0], grad_out, query_tokens, of_memory, modes)
    return _Sent(returned[0], matvec(returned, grad_out), base, noise)


def _noise(
    attention: Any,
    returned: Array,
    grad_out: Array,
    query_tokens: Kernel,
    of_memory: _Memory,
    modes: Modes,
) -> Array:
    """Of one sequence: of W_o, 2 over the heads' features for each mode received; of W_v, 2/d for
    each mode sent (and 4/d of what other layers have sent, independent in direction); and of what
    the decoder's mean sends into the memory's differences, in every head one vector over tokens.
    """
    inner, width = attention.heads * attention.d_head, attention.memory_width
    stage = returned * (2 / inner * grad_out**2 / modes.count)[..., None, :]
    noise = stage @ transposed(returned)
    direct = np.stack(
        [matvec(returned, grad_out)[..., 0], returned[..., 1, 1] * grad_out[..., 1]], axis=-1
    )
    noise = noise + (2 * direct**2 / width / of_memory.modes.count)[..., None] * np.eye(2)
    tokens = _first(of_memory.memory.second_moment())
    law = logit_law(attention, query_tokens, tokens, (attention.d_model, width))
    diagonal = law.keys.kernel.diagonal - law.keys.kernel.off_diagonal
    # Squared weights are those of doubled logits, of four times their variance.
    theta = np.maximum(4 * law.scale * law.queries.kernel.diagonal * diagonal, 0.0)
    squares = AlikeRows.of(of_memory.modes.seq_len).rows(theta).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    noise[..., 1, 1] += share * (returned[..., 1, 0] * grad_out[..., 0]) ** 2
    return noise


def _covariance(
    network: Network,
    walk: ExchangeableWalk,
    grad_in: Several[tuple[Group, _Sent]],
    size: Array,
    of_memory: _Memory,
) -> Array:
    """(..., 2, 2) of the modes of all that the memory receives, over its variance `size`."""
    network.variance([0])  # how far the gain of different directions agrees, of the decoder's own
    units = np.stack([np.eye(2)[0], np.eye(2)[1], np.ones(2)])  # two modes, and their sum
    units = units.reshape(3, *(1,) * size.ndim, 2)
    side_outputs: dict[int, SideOutput] = {}
    noise: Array = 0.0
    parts = []
    for group, one in grad_in:
        modes = Modes(group.sublayer.grad_in.classes.length)
        weights, over = units[..., None, :], size[..., None, None]
        to_gradient = modes.sensitivity(matvec(transposed(one.returned), weights))
        share = (weights * one.added[0] / over).sum(-1)
        change = (one.added[3:] - one.added[0]) / (STEP * over)
        by_mode = np.moveaxis((weights * change[:, None]).sum(-1), 0, -1)
        exposure = modes.sensitivity(ratio(by_mode, one.entering))
        for j, place in enumerate(group.places):
            side_outputs[place + 1] = SideOutput(
                to_gradient[..., j, :], share[..., j], exposure[..., j, :]
            )
            parts.append((place, one.added[0][..., j, :], one.noise[..., j, :, :]))
    carried: Array = 0.0
    for _, added, diagonal in sorted(parts, key=lambda part: -part[0]):
        cross = 4 * carried * added / of_memory.memory.width / of_memory.modes.count
        noise = noise + diagonal + cross[..., None] * np.eye(2)
        carried = carried + added
    noise = noise / (of_memory.batch * size[..., None, None] ** 2)
    result = network.with_walk(walk.with_side_outputs(side_outputs)).variance([0, 0, 0])
    cross = (result[2] - result[0] - result[1]) / 2
    rows = np.stack([result[0], cross], -1), np.stack([cross, result[1]], -1)
    return noise + np.stack(rows, axis=-2)


def _first(kernel: Kernel) -> Kernel:
    return Kernel(kernel.diagonal[0], kernel.off_diagonal[0])


# --- between gradients by token and those of tokens alike -----------------------------------------


@dataclass(frozen=True)
class OfModes:
    """A gradient that fluctuates by its modes, and responds to those of the signal.

    Attributes:
        response, covariance: (..., 2, 2) as `DecoderTop` finds them.
        grad_out: the gradient.
        modes: of the tokens of a sequence.
    """

    response: Array
    covariance: Array
    grad_out: Matrix
    kernel: Matrix
    modes: Modes

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        mean = _means(sensitivity @ self.grad_out, self.modes.seq_len)
        split = np.stack([mean, total(sensitivity * self.grad_out) - mean], axis=-1)
        weights = ratio(split, self._relative(self.grad_out))
        noise = (weights * matvec(self.covariance, weights)).sum(-1)
        return GradientAdjoint(sensitivity, weights, noise, 0.0)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        # of x_j = dm_j/m_j, with the modes m of the tokens averaged over sequences
        per_mode = matvec(transposed(self.response), exposure)
        count = count_of(self.kernel)
        size = trace_of(self.kernel) / count
        per_mode = ratio(per_mode, self._relative(self.kernel) * size[..., None])
        per_mode = per_mode / (self.modes.count * count / self.modes.seq_len)
        mean, difference = (per_mode[..., i, None, None] for i in range(2))
        like = 0.0 * sensitivity
        result = diagonal_matrix(diagonal_of(like) + difference[..., 0], like)
        same = _same_sequence(like, self.modes.seq_len)
        result = result + (mean - difference) / self.modes.seq_len * same
        return SignalAdjoint(sensitivity + result.astype(SINGLE))

    def _relative(self, kernel: Matrix) -> Array:
        """(..., 2) modes over the variance."""
        mean = _means(kernel, self.modes.seq_len) / trace_of(kernel)
        sizes = np.stack([mean, 1 - mean], axis=-1)
        return sizes * self.modes.seq_len / self.modes.count


def _same_sequence(like: Matrix, length: int) -> Matrix:
    """Whether two tokens are of one sequence."""
    if isinstance(like, ClassMatrix):
        return like * 0.0 + 1.0
    return np.kron(np.eye(like.shape[-1] // length), np.ones((length, length)))


def _means(kernel: Matrix, seq_len: int) -> Array:
    """tr(P K), P the projection on the token mean of every sequence."""
    if isinstance(kernel, ClassMatrix):
        return total(kernel) / seq_len
    count = kernel.shape[-1] // seq_len
    blocks = kernel.reshape(*kernel.shape[:-2], count, seq_len, count, seq_len)
    return np.einsum("...aiaj->...", blocks) / seq_len


def _alike(matrix: Matrix, kind: OneClass) -> ClassMatrix:
    """Averages of tokens of one sequence, and of their pairs."""
    diagonal = trace_of(matrix) / count_of(matrix)
    mean = kind.length * _means(matrix, kind.length) / count_of(matrix)
    off_diagonal = (mean - diagonal) / max(kind.length - 1, 1)
    return ClassMatrix(diagonal[..., None], off_diagonal[..., None, None], kind)


@dataclass(frozen=True)
class OfAverages:
    """What a gradient by token comes from, as that of tokens alike.

    Attributes:
        inner: the same by token.
        like: a matrix by token.
        sequences: how many of them the matrix holds.
    """

    inner: Response
    like: Matrix
    kind: OneClass
    sequences: int

    def gradient_adjoint(self, sensitivity: ClassMatrix) -> GradientAdjoint:
        each = 0.0 * self.like
        diagonal, off_diagonal = sensitivity.diagonal, sensitivity.off_diagonal
        by_token = without_diagonal(
            each + _same_sequence(self.like, self.kind.length) * off_diagonal
        )
        by_token = by_token + diagonal_matrix(diagonal_of(0.0 * by_token) + diagonal, by_token)
        step = self.inner.gradient_adjoint(by_token.astype(SINGLE))
        return step._replace(sensitivity=sensitivity, noise=step.noise * self.sequences)

    def signal_adjoint(self, sensitivity: ClassMatrix, exposure: Any) -> SignalAdjoint:
        none = 0.0 * self.like
        given = none + np.zeros((len(sensitivity), *(1,) * len(none.shape)))
        step = self.inner.signal_adjoint(given.astype(SINGLE), exposure)
        return step._replace(sensitivity=_alike(step.sensitivity, self.kind))
