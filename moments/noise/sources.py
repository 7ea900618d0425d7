"""Sources of the gradient at the last layer, and how it fluctuates: a loss, or a decoder.

Head: given the gradients d at the logits, sum_v d_i(v) E_v with Gaussian rows E_v is a Gaussian
tensor with kernel D_ij = sum_v d_i(v) d_j(v) (`readout`), so that its realised kernel is a Wishart
matrix of `width` degrees of freedom, with variance 2 tr(D D)/width. Hidden layers of the head add
noise. The final normalisation divides by the stream's realised norms and the softmax depends on its
realised overlaps: the response of the last gradient to the last signal. If there are few logits,
D_ii itself varies; only Var E(D_ii | target's logit) of this is included.

Decoder: the cross-attention of layer k sends the memory a gradient with modes M_k R_k: R_k are the
modes of the gradient at the layer's output, and M_k depends on the modes of the memory and of the
query tokens. The sum over layers is a scalar y like any other (`network.SideOutput`), plus the
noise of the matrices in M_k (`_noise`). Fluctuations of the memory enter through the response of
the sum to the memory. Where tokens are resolved, the decoder's moments are averaged over tokens.

See docs/theory/band.md, Where gradients come from, and docs/theory/loss.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..engine.classes import ClassMatrix, OneClass, diagonal_of, one_class
from ..engine.composition import Chain, Component, Layer, forward
from ..engine.fluctuation import norm_variance
from ..engine.response import (
    SINGLE,
    STEP,
    Elementwise,
    GradientAdjoint,
    GradientUnits,
    Matrix,
    Response,
    Sequence,
    SignalAdjoint,
    count_of,
    diagonal_matrix,
    entrywise,
    in_units,
    matrix_of,
    over_tokens,
    per_unit,
    ratio,
    row_sums,
    total,
    trace_of,
    trace_of_products,
    transposed,
    without_diagonal,
)
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.trace import Record, Trace
from ..layers.attention.projections import logit_law
from ..layers.attention.softmax import AlikeRows
from ..layers.head.components import Pool
from ..layers.head.cross_entropy import softmax_expectations
from ..layers.head.readout import Readout
from .network import (
    ExchangeableStack,
    ExchangeableWalk,
    Group,
    Network,
    SideOutput,
    averaged_tokens,
    matvec,
    mean_covariances,
    side_by_side,
)


class GradientSource(Protocol):
    """Source of the gradient at the last layer: a loss, or a decoder that reads the stack."""

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The gradient at the last layer, over its trace, and the response of its source, for
        `batch` sequences that share the weights."""


@dataclass(frozen=True)
class GaussianSource:
    """Source of an independent Gaussian gradient at the last layer, kernel (..., L, L)."""

    grad_out: Matrix
    width: Array

    @classmethod
    def from_trace(cls, trace: Trace) -> tuple[Matrix, GaussianSource]:
        """The gradient at the last layer, over its trace, and its source."""
        signal, gradient = trace.passing()[-1]
        grad_out = matrix_of(gradient.kernel, signal.seq_len)
        grad_out = per_unit(grad_out, trace_of(grad_out)).astype(SINGLE)
        return grad_out, cls(grad_out, signal.width)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        noise = 2 / self.width * trace_of_products(sensitivity, self.grad_out, self.grad_out)
        return GradientAdjoint(sensitivity, None, noise, 0.0)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        return SignalAdjoint(sensitivity)


# --- a head with its loss -------------------------------------------------------------------------

_NODES = 9  # Gauss nodes for the target's logit
_ROUNDING = 1e-15
_FIXED = 1e-9  # variance of a logit that is conditioned on, over that of the others


def across(readout: Readout) -> Array:
    """Sum of E (D_ij/T^2)^2 over pairs of tokens of two sequences, over (sum of D_ii/T^2)^2.

    Only pairs with the same target contribute.
    """
    targets, overlap = readout.targets, readout.overlap
    first, second = overlap.over_tokens(targets.active)
    square = first * second * targets.same_target * _of_same_target(readout) ** 2
    if overlap.resolved:
        pairs = Kernel.of_parts(0.0 * overlap.diagonal, square, overlap.resolved)
        tokens = overlap.weighted(1.0, 0.0)
        return pairs.total(readout.seq_len) / tokens.total(readout.seq_len) ** 2
    return square / overlap.diagonal**2


def mean_square(readout: Readout) -> Kernel:
    """E (D_ij/T^2)^2 over texts: the square of the mean, plus q (1 - q) times the square of the
    contribution of a common target, which two tokens have with probability q."""
    targets, overlap = readout.targets, readout.overlap
    same = targets.same_target
    off_diagonal = ratio(overlap.off_diagonal**2, targets.both_active + 0 * overlap.off_diagonal)
    variance = targets.both_active * same * (1 - same) * _of_same_target(readout) ** 2
    diagonal = ratio(overlap.diagonal**2, targets.active + 0 * overlap.diagonal)
    return Kernel.of_parts(diagonal, off_diagonal + variance, overlap.resolved)


def _of_same_target(readout: Readout) -> Array:
    """Contribution of a common target to D_ij/T^2: its squared weight times E f'^2 of the logits'
    softcap f, averaged over tokens."""
    slope, kernel = readout.softmax.other.slope_square, readout.kernel
    slope = kernel.average(slope)[..., None, None] if kernel.resolved else slope
    return (1 - readout.smoothing) ** 2 * slope / readout.targets.count**2


def logit_agreement(readout: Readout) -> Matrix:
    """Covariance of log D_ii and log D_jj over that of a token whose target alone varied.

    D does not change if all logits are shifted, so that the other logits add 1/(V - 1) to the
    effect of the target's. Two tokens with the same target are correlated as their logits, with
    different targets by -1/(V - 1) of that.
    """
    same, kernel = readout.targets.same_target, readout.kernel
    others = readout.vocab_size - 1
    first, second = kernel.over_tokens(kernel.diagonal)
    agreement = (same - (1 - same) / others) * kernel.off_diagonal / np.sqrt(first * second)
    agreement = Kernel.of_parts(1.0 + 0.0 * kernel.diagonal, agreement, kernel.resolved)
    return matrix_of(agreement.scaled(1 + 1 / others), readout.seq_len).astype(SINGLE)


def log_variance_of_mean(effect: tuple[Array, Array], share: Array) -> Array:
    """Var log of an average whose variance is `share` of that of one item, with the `effect` of
    `logit_effect`: exact for one item, and for many, where it is their relative variance."""
    relative, logarithm = effect
    return relative * share + (logarithm - relative) * share**2


def logit_effect(readout: Readout) -> tuple[Array, Array]:
    """Relative variance of E(D_ii | target's logit) and variance of its logarithm, (...,).

    By Gauss quadrature over that logit, with the logits' variance averaged over tokens.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    variance = np.asarray(readout.kernel.average(readout.variance))[..., None]
    count, hit = readout.vocab_size, 1 - readout.smoothing
    logits = nodes * np.sqrt(variance)
    softmax = softmax_expectations(count, variance, logits, _FIXED * variance, readout.softcap)
    own, other = softmax.own, softmax.other
    square = own.square_slope_square + (count - 1) * other.square_slope_square
    value = square - 2 * hit * own.probability_slope_square + hit**2 * own.slope_square
    # If the target has nearly all probability, `value` is rounding error.
    mean, logarithm = value @ weights, np.log(np.maximum(value, _ROUNDING))
    centre = logarithm @ weights
    relative = ratio((value - mean[..., None]) ** 2 @ weights, mean**2)
    return relative, (logarithm - centre[..., None]) ** 2 @ weights


_COARSE = 1e-2
"""Relative step of the logits' variance, over which `softmax_agreement` may jump by .1 percent."""


@dataclass(frozen=True, eq=False)
class HeadTop:
    """A head with a loss as the source of the last gradient (a `band.GradientSource`)."""

    readout: Readout

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """The last layer's gradient, over its trace, and the response of the head."""
        before = trace.stream()[-1]
        assert before.gradient is not None
        assert trace.ending is not None
        grad_out = matrix_of(before.gradient.kernel, before.signal.seq_len)
        unit = trace_of(grad_out)
        last = first = in_units(grad_out, unit)
        around = GradientUnits(np.asarray(unit))
        parts: list[Response] = []
        for record in trace.ending.children:
            last, leaf = around.grad_out(record), record.component
            response = leaf.response(record, around)
            if not isinstance(leaf, Pool):
                response = around.alone(record, response, _kappa(leaf, record.output))
            parts.append(response)
        parts.append(_Loss.from_readout(self.readout, last, unit, batch))
        return first, Sequence(tuple(parts))


def _grad_in(readout: Readout) -> Kernel:
    """Gradient at the input of the logits' matrix."""
    return readout.gradient() if readout.normalised else readout.gradient() + readout.radial()


def _kappa(leaf: Component, output: Signal) -> Array:
    """width times the relative variance of the squared norm that a hidden layer adds."""
    if leaf.hidden is None:
        return 2.0 if leaf.matrices else 0.0
    return np.maximum(norm_variance(output) * output.width - 2.0, 0.0)


@dataclass(frozen=True)
class _Loss:
    """Response of the logits' matrix with the loss; the signal is the matrix's input.

    Attributes:
        response: of the gradient at the input to the signal.
        grad_in: (..., L, L) gradient at the input.
        width: number of features of the input.
        agreement, effect: `logit_agreement` and `logit_effect`.
        batch: number of sequences that share the weights.
        text_variance: (..., L, L) variance of `grad_in` over texts.
        shared: `across`, summed over all other sequences.
    """

    response: Elementwise
    grad_in: Array
    width: float
    agreement: Array
    effect: tuple[Array, Array]
    batch: float
    text_variance: Array
    shared: Array

    @classmethod
    def from_readout(cls, readout: Readout, grad_in: Array, unit: Array, batch: float) -> _Loss:
        kernel, length = readout.kernel, readout.seq_len
        # Derivatives of the gradient's kernel, as in `Elementwise.of`.
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = Kernel.of_parts(kernel.diagonal, np.sqrt(first * second), kernel.resolved)
        decorrelated = kernel - scale.scaled(STEP).weighted(0.0, 1.0)
        base = matrix_of(_grad_in(readout), length)
        slope = base - matrix_of(_grad_in(_with_kernel(readout, decorrelated)), length)
        slope = without_diagonal(slope / matrix_of(scale.scaled(STEP), length))
        growth = 0.0 * base
        if not readout.normalised:
            enlarged = dataclasses.replace(
                readout,
                kernel=kernel.scaled(1 + _COARSE),
                carried=readout.carried * np.sqrt(1 + _COARSE),
            )
            growth = (matrix_of(_grad_in(enlarged), length) - base) / _COARSE
            growth = growth - slope * matrix_of(kernel, length)
        factor, slope, growth = (in_units(entry, unit) for entry in (base, slope, growth))
        zero = 0.0 * factor
        signal = (matrix_of(kernel, length) + 0.0 * base).astype(SINGLE)
        response = Elementwise(zero, zero, factor, slope, growth, signal, zero + 1)
        # Variance over texts.
        excess = matrix_of(mean_square(readout), length) - matrix_of(readout.overlap, length) ** 2
        size = readout.scale**2 * readout.weight_variance
        variance = entrywise(lambda entry: np.maximum(entry, 0.0), excess) * size**2
        variance = in_units(variance, unit**2)
        logits = logit_agreement(readout), logit_effect(readout), batch
        shared = (batch - 1) * across(readout)
        return cls(response, grad_in, float(readout.width), *logits, variance, shared)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        result, weighted = self.response.gradient_adjoint(sensitivity), sensitivity * self.grad_in
        noise = 2 / self.width * trace_of_products(sensitivity, self.grad_in, self.grad_in)
        diagonal = diagonal_of(sensitivity)
        of_texts = self.text_variance * diagonal[..., :, None] * diagonal[..., None, :]
        noise += 2 / self.width * (total(of_texts) + self.shared)
        tokens = row_sums(weighted)
        covariances = (self.agreement @ tokens[..., :, None])[..., 0]
        share = over_tokens(tokens * covariances, self.grad_in)
        noise += log_variance_of_mean(self.effect, share / self.batch) * self.batch
        return result._replace(noise=noise)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        # Nothing follows the loss: the sensitivity to its output is 0.
        _, by_size = exposure
        zero = diagonal_matrix(np.zeros(by_size.shape, SINGLE), self.grad_in)
        return self.response.signal_adjoint(zero, exposure)


def _with_kernel(readout: Readout, kernel: Kernel) -> Readout:
    """The readout of a signal with other correlations, which do not change its softmax."""
    result = dataclasses.replace(readout, kernel=kernel)
    vars(result).update(softmax=readout.softmax, _unread=readout._unread)
    return result


# --- a decoder ------------------------------------------------------------------------------------

MODE_STEP = 1e-5
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
        response = (whole[1:] - whole[0]) / (MODE_STEP * size[..., None])
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

    The five evaluations of `modes` are at the means; with one mode of the memory increased by
    `MODE_STEP`, two; with one mode of the signal at the part's input increased by it, two.

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
        steps = MODE_STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
        kernel = modes.kernel(base * (1 + steps.reshape(5, *(1,) * (base.ndim - 1), 2)))
        fixed = Fluctuation.fixed(kernel)
        signal = Signal(kernel, modes.seq_len, width=memory.width, fluctuation=fixed)
        return cls(side_by_side([signal]), modes, batch, shape)


def _contribution(record: Record, reader: Record, memory: _Memory) -> _Contribution:
    """The contribution of a group of parts whose cross-attention is `reader`."""
    modes, attention = Modes(record.input.seq_len), reader.component
    kernel, gradient = record.input.kernel, record.grad_out.kernel
    shape = (*memory.shape, np.shape(kernel.diagonal)[-1], 2)
    base, grad_out = (np.broadcast_to(modes.eigenvalues(one), shape) for one in (kernel, gradient))
    axes = (1,) * (base.ndim - 1)
    steps = MODE_STEP * np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1]])
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
        change = (one.modes[3:] - one.modes[0]) / (MODE_STEP * over)
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
