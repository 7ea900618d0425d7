"""Fluctuations of the gradient that a decoder sends to its encoder.

The cross-attention of layer k sends the memory a gradient with modes M_k R_k: R_k are the modes of
the gradient at the layer's output, and M_k depends on the modes of the memory and of the query
tokens. The sum over layers is a scalar y like any other (`network.SideOutput`), plus the noise of
the matrices in M_k (`_noise`). Fluctuations of the memory enter through the response of the sum to
the memory. Where tokens are resolved, the decoder's moments are averaged over tokens.

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
    GradientAdjoint,
    GradientUnits,
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
from ..layers.attention.projections import logit_law
from ..layers.attention.softmax import AlikeRows
from .alike import ExchangeableStack, averaged_tokens, stacked
from .band import GaussianSource, GradientSource, mean_covariances
from .network import ExchangeableWalk, Group, Network, SideOutput, matvec

STEP = 1e-5
"""Relative step of the one-sided differences, whose error is of this order."""


@dataclass(frozen=True)
class Modes:
    """Eigenvalues of kernels of exchangeable tokens, on a last axis: that of the mean over tokens,
    and that of differences from the mean."""

    seq_len: int

    @property
    def count(self) -> Array:
        """Multiplicity of each eigenvalue."""
        return np.array([1.0, self.seq_len - 1.0])

    @property
    def average(self) -> Array:
        """Weights of the eigenvalues in the variance of a token."""
        return self.count / self.seq_len

    def eigenvalues(self, kernel: Kernel) -> Array:
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
        """(..., 2) sensitivities to a diagonal and an off-diagonal entry, from the derivatives by
        both eigenvalues."""
        kernel = self.kernel(ratio(derivative, self.count))
        return np.stack([kernel.diagonal, kernel.off_diagonal], axis=-1)


@dataclass(frozen=True, eq=False)
class DecoderTop:
    """The decoder as the source of its encoder's gradient (a `band.GradientSource`); `top` is the
    source of its own last gradient, None: an independent Gaussian tensor."""

    declaration: Chain
    trace: Trace
    top: GradientSource | None = None

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The encoder's last gradient and the decoder's response; `trace` is the encoder's."""
        last, reading = trace.stream()[-1], trace.ending
        assert last.gradient is not None
        assert reading is not None
        grad_out = matrix_of(last.gradient.kernel, last.signal.seq_len)
        around = GradientUnits(np.asarray(trace_of(grad_out)))
        parts = [record.component.response(record, around) for record in reading.children]
        memory, modes = reading.output, Modes(reading.output.seq_len)
        kernel = matrix_of(memory.second_moment(), memory.seq_len)
        sequences = int(count_of(grad_out)) // memory.seq_len
        response, covariance = self._of_modes(memory, modes, batch * sequences)
        decoder = OfModes(response, batch * covariance, around.grad_out(reading), kernel, modes)
        return in_units(grad_out, around.unit), Sequence((*parts, decoder))

    def _of_modes(self, memory: Signal, modes: Modes, batch: float) -> tuple[Array, Array]:
        """(..., 2, 2) derivative of the memory gradient's modes by relative changes of the memory's
        modes, and covariance of the gradient's modes; both over the gradient's variance."""
        layers = [part for part in self.declaration.children if isinstance(part, Layer)]
        decoder = ExchangeableStack.from_trace(self.trace)
        parts = decoder.sublayers(layers)
        groups = [group for group, _ in parts]
        shape = groups[0].sublayer.grad_in.shape[:-3]
        perturbed = _Memory.perturbed(memory, modes, batch, shape)
        contributions: list[tuple[Group, _Contribution]] = []
        for group, record in parts:
            reader = next((one for one in record.leaves() if one.memory is not None), None)
            if reader is not None:
                contributions.append((group, _contribution(record, reader, perturbed)))
        whole = np.add.reduce([one.modes[:3].sum(-2) for _, one in contributions])
        size = whole[0] @ modes.average
        walk = ExchangeableWalk(groups)
        overlaps = mean_covariances(layers, self.trace, walk, batch)
        network = Network(walk, decoder.entering, batch, overlaps, self._end(batch))
        covariance = _covariance(network, walk, contributions, size, perturbed)
        response = (whole[1:] - whole[0]) / (STEP * size[..., None])
        return np.moveaxis(response, 0, -1), covariance

    def _end(self, batch: float) -> tuple[Matrix, Response]:
        """The decoder's own last gradient and its source, for exchangeable tokens."""
        first, sequences = self.trace.entering, 1
        if self.top is None:
            end: tuple[Matrix, Response] = GaussianSource.from_trace(self.trace)
        else:
            if first.resolved is True:
                sequences = first.kernel.off_diagonal.shape[-1] // first.seq_len
            end = self.top.gradient_response(self.trace, max(1, batch // sequences))
        if not first.resolved:
            return end
        grad_out, response = end
        kind = one_class(first.seq_len)
        return _alike(grad_out, kind), OfAverages(response, grad_out, kind, sequences)


class _Contribution(NamedTuple):
    """Gradients that the parts of a group send to the memory.

    The five evaluations of `modes` are at the means; with one mode of the memory increased by STEP,
    two; with one mode of the signal at the part's input increased by STEP, two.

    Attributes:
        mode_map: (..., parts, 2, 2) from the modes of a part's output gradient to those sent.
        modes: (5, ..., parts, 2) modes sent.
        entering: (..., parts, 2) modes of the signal at the part's input.
        noise: (..., parts, 2, 2) covariance of the modes sent, due to the part's own matrices.
    """

    mode_map: Array
    modes: Array
    entering: Array
    noise: Array


class _Memory(NamedTuple):
    """The memory at the five evaluations of `_Contribution`.

    Attributes:
        memory: signal with kernels (5, ..., 1).
        modes: of its tokens.
        batch: number of sequences that share the weights.
        shape: of configurations.
    """

    memory: Signal
    modes: Modes
    batch: float
    shape: tuple[int, ...]

    @classmethod
    def perturbed(
        cls, memory: Signal, modes: Modes, batch: float, shape: tuple[int, ...]
    ) -> _Memory:
        tokens = averaged_tokens(memory.second_moment(), modes.seq_len)
        base = np.broadcast_to(modes.eigenvalues(tokens), (*shape, 2))
        steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
        kernel = modes.kernel(base * (1 + steps.reshape(5, *(1,) * (base.ndim - 1), 2)))
        fixed = Fluctuation.fixed(kernel)
        signal = Signal(kernel, modes.seq_len, width=memory.width, fluctuation=fixed)
        return cls(stacked([signal]), modes, batch, shape)


def _contribution(record: Record, reader: Record, memory: _Memory) -> _Contribution:
    """The contribution of a group of parts whose cross-attention is `reader`."""
    modes, attention = Modes(record.input.seq_len), reader.component
    kernel, gradient = record.input.kernel, record.grad_out.kernel
    shape = (*memory.shape, np.shape(kernel.diagonal)[-1], 2)
    base, grad_out = (np.broadcast_to(modes.eigenvalues(one), shape) for one in (kernel, gradient))
    axes = (1,) * (base.ndim - 1)
    steps = STEP * np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1]])
    perturbed = modes.kernel(base * (1 + steps.reshape(5, *axes, 2)))
    fixed = Fluctuation.fixed(perturbed)
    signal = Signal(perturbed, modes.seq_len, width=record.input.width, fluctuation=fixed)
    basis = Gradient(modes.kernel(np.eye(2).reshape(2, 1, *axes, 2)), modes.seq_len)
    addition, scale, branch = record.component.addition(record), 1.0, record
    if addition is not None:
        scale, branch = addition.added_scale, addition.added
    path = next(one for one in branch.paths() if reader in one)
    chain = Chain(tuple(one.component for one in path))
    passed = forward(chain, signal, memory.memory)[1].backward(basis)
    (read,) = (one for one in passed.leaves() if one.grad_memory is not None)
    assert read.grad_memory is not None
    sent = memory.modes.eigenvalues(read.grad_memory.kernel)
    sent = np.broadcast_to(sent, np.broadcast_shapes(sent.shape, (2, 5, *base.shape)))
    maps = np.asarray(scale)[..., None, None] * np.moveaxis(sent, 0, -1)
    noise = _noise(attention, maps[0], grad_out, _first(read.input.kernel), memory, modes)
    return _Contribution(maps[0], matvec(maps, grad_out), base, noise)


def _noise(
    attention: Any,
    mode_map: Array,
    grad_out: Array,
    query_tokens: Kernel,
    memory: _Memory,
    modes: Modes,
) -> Array:
    """(..., parts, 2, 2) covariance of the modes sent, for one sequence, due to a part's matrices.

    W_o adds 2 over the number of heads' features for each mode received, and W_v 2/d for each mode
    sent. The mean over query tokens reaches the memory's differences through one vector of
    attention weights per head, whose squared norm varies.
    """
    inner, width = attention.heads * attention.d_head, attention.memory_width
    received = mode_map * (2 / inner * grad_out**2 / modes.count)[..., None, :]
    noise = received @ transposed(mode_map)
    direct = np.stack(
        [matvec(mode_map, grad_out)[..., 0], mode_map[..., 1, 1] * grad_out[..., 1]], axis=-1
    )
    noise = noise + (2 * direct**2 / width / memory.modes.count)[..., None] * np.eye(2)
    tokens = _first(memory.memory.second_moment())
    law = logit_law(attention, query_tokens, tokens, (attention.d_model, width))
    unshared = law.keys.kernel.diagonal - law.keys.kernel.off_diagonal
    # The squared weights of a row are the softmax of doubled logits, of four times the variance.
    theta = np.maximum(4 * law.scale * law.queries.kernel.diagonal * unshared, 0.0)
    squares = AlikeRows.of(memory.modes.seq_len).rows(theta).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    noise[..., 1, 1] += share * (mode_map[..., 1, 0] * grad_out[..., 0]) ** 2
    return noise


def _covariance(
    network: Network,
    walk: ExchangeableWalk,
    contributions: Several[tuple[Group, _Contribution]],
    size: Array,
    memory: _Memory,
) -> Array:
    """(..., 2, 2) covariance of the modes of the memory's gradient, over its variance `size`."""
    network.variance([0])  # stores the coherence of the decoder's parts
    units = np.stack([np.eye(2)[0], np.eye(2)[1], np.ones(2)])  # y: either mode, and their sum
    units = units.reshape(3, *(1,) * size.ndim, 2)
    side_outputs: dict[int, SideOutput] = {}
    parts = []
    for group, one in contributions:
        modes = Modes(group.sublayer.grad_in.classes.length)
        weights, over = units[..., None, :], size[..., None, None]
        to_gradient = modes.sensitivity(matvec(transposed(one.mode_map), weights))
        share = (weights * one.modes[0] / over).sum(-1)
        change = (one.modes[3:] - one.modes[0]) / (STEP * over)
        by_mode = np.moveaxis((weights * change[:, None]).sum(-1), 0, -1)
        exposure = modes.sensitivity(ratio(by_mode, one.entering))
        for j, place in enumerate(group.places):
            side_outputs[place + 1] = SideOutput(
                to_gradient[..., j, :], share[..., j], exposure[..., j, :]
            )
            parts.append((place, one.modes[0][..., j, :], one.noise[..., j, :, :]))
    # Gradients of different layers are independent in direction: W_v adds 4/d of their product.
    noise: Array = 0.0
    carried: Array = 0.0
    for _, added, own in sorted(parts, key=lambda part: -part[0]):
        cross = 4 * carried * added / memory.memory.width / memory.modes.count
        noise = noise + own + cross[..., None] * np.eye(2)
        carried = carried + added
    noise = noise / (memory.batch * size[..., None, None] ** 2)
    walk.side_outputs = side_outputs
    variances = network.variance([0, 0, 0])
    cross = (variances[2] - variances[0] - variances[1]) / 2
    rows = np.stack([variances[0], cross], -1), np.stack([cross, variances[1]], -1)
    return noise + np.stack(rows, axis=-2)


def _first(kernel: Kernel) -> Kernel:
    """The first of five evaluations, that at the means."""
    return Kernel(kernel.diagonal[0], kernel.off_diagonal[0])


# --- between resolved and exchangeable tokens -----------------------------------------------------


@dataclass(frozen=True)
class OfModes:
    """Source of a gradient whose modes fluctuate and depend on the modes of the signal.

    Attributes:
        response, covariance: (..., 2, 2) as `DecoderTop._of_modes` returns them.
        grad_out: the gradient.
        kernel: of the signal.
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
        # `response` is by dm_j/m_j of the modes m, averaged over sequences.
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
        """(..., 2) modes of a kernel over its variance."""
        mean = _means(kernel, self.modes.seq_len) / trace_of(kernel)
        sizes = np.stack([mean, 1 - mean], axis=-1)
        return sizes * self.modes.seq_len / self.modes.count


def _same_sequence(like: Matrix, length: int) -> Matrix:
    """1 for pairs of tokens of the same sequence, else 0."""
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
    """The matrix of exchangeable tokens, averaged over tokens and over pairs of one sequence."""
    diagonal = trace_of(matrix) / count_of(matrix)
    mean = kind.length * _means(matrix, kind.length) / count_of(matrix)
    off_diagonal = (mean - diagonal) / max(kind.length - 1, 1)
    return ClassMatrix(diagonal[..., None], off_diagonal[..., None, None], kind)


@dataclass(frozen=True)
class OfAverages:
    """The source of a resolved gradient, as one of exchangeable tokens.

    Attributes:
        inner: the source.
        like: a matrix of resolved tokens.
        kind: the class of exchangeable tokens.
        sequences: number of sequences in `like`.
    """

    inner: Response
    like: Matrix
    kind: OneClass
    sequences: int

    def gradient_adjoint(self, sensitivity: ClassMatrix) -> GradientAdjoint:
        same_sequence = _same_sequence(self.like, self.kind.length)
        resolved = without_diagonal(0.0 * self.like + same_sequence * sensitivity.off_diagonal)
        diagonal = diagonal_of(0.0 * resolved) + sensitivity.diagonal
        resolved = resolved + diagonal_matrix(diagonal, resolved)
        result = self.inner.gradient_adjoint(resolved.astype(SINGLE))
        return result._replace(sensitivity=sensitivity, noise=result.noise * self.sequences)

    def signal_adjoint(self, sensitivity: ClassMatrix, exposure: Any) -> SignalAdjoint:
        zeros = 0.0 * self.like
        zeros = zeros + np.zeros((len(sensitivity), *(1,) * len(zeros.shape)))
        result = self.inner.signal_adjoint(zeros.astype(SINGLE), exposure)
        return result._replace(sensitivity=_alike(result.sensitivity, self.kind))
