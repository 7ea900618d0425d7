"""What one draw of a decoder makes of the gradient that its encoder receives.

Every layer's cross-attention sends the memory a gradient M_k R_k: R_k of the decoder's modes, M_k
a map that depends on the modes of the memory and of the tokens that ask. The sum over layers is one
more pair of modes z that the decoder's gradient is added to on its way down,

    z_k = z_{k+1} + M_k y_{k+1} + (dM_k/dx) R_k x_k + noise,

so that its covariance follows from the same recursion (`band`), in which it shares the fluctuations
of the decoder's gradient with every layer. Noise is that of the matrices in between: W_o, 2 over
the heads' features for each mode received; W_v, 2/d for each mode sent, and 4/d of what other
layers have sent, independent in direction; and what the decoder's mean sends into the memory's
differences, in every head one vector over tokens.

The memory's own fluctuations enter through dM_k/d(memory) and its last normalisation: they are the
response of the encoder's last gradient to its last signal. That a decoder's tokens move with the
memory they have read is left out, and so is the overlap between sequences.

Resolved by token the decoder is followed with moments averaged over tokens, as if all attended to
all.

See docs/theory/band.md, Where gradients come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..engine.classes import ClassMatrix
from ..engine.composition import Chain, Component, Layer, forward
from ..engine.modes import Modes
from ..engine.response import in_units
from ..engine.sensitivity import (
    SINGLE,
    GradientAdjoint,
    Response,
    SignalAdjoint,
    count_of,
    diagonal,
    matrix_of,
    ones,
    ratio,
    stacked,
    total,
    transposed,
)
from ..engine.state import Array, Gradient, Kernel, Signal
from ..engine.trace import Trace
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.logits import logit_law
from ..transfer.attention.softmax import SquareTable
from ..transfer.attention.softmax.chebyshev import THETA_MAX
from .alike import Alike, part_starts, parts_of
from .band import BothWays, both_ways, down
from .linearisation import STEP


@dataclass(frozen=True, eq=False)
class DecoderTop:
    """The decoder that reads an encoder.

    Attributes:
        read: what turns the encoder's last layer into the memory.
        declaration: of the decoder.
        trace: of the decoder, both passes.
        top: where its own last gradient comes from; None: it is a fresh Gaussian tensor.
    """

    read: Chain
    declaration: Chain
    trace: Trace
    top: Any = None

    def alike(self, trace: Trace, modes: Modes, batch: int) -> tuple[Array, Array]:
        """Response of the encoder's last gradient to its signal, and covariance of its modes.

        As `HeadTop.alike`; `trace` is the encoder's.
        """
        decoder, top = Alike.of(self.trace), self.top
        if top is not None and self.trace.entering.resolved:
            top = AsAlike(top, self.trace)
        layers = [part.unplaced() for part in self.declaration.parts]
        ending = None
        if top is not None:
            ending = top.alike(self.trace, Modes(decoder.entering.seq_len), batch)
        own = both_ways(layers, decoder, batch, ending)
        of_memory = _Reading(self.read, trace, modes, batch, own.steps.pull.shape[1:-2])
        sent = _sent(layers, decoder, own.modes, of_memory)
        whole = np.add.reduce([one.added for one in sent.values()])
        last = _times(of_memory.back, whole[:3])
        gradient, size = last[0] @ modes.average, whole[0] @ modes.average
        covariance = down(_beside(own, sent, size, of_memory))[0][..., 2:, 2:]
        through = of_memory.back[0] * (size / gradient)[..., None, None]
        response = (last[1:] - last[0]) / (STEP * gradient[..., None])
        return np.moveaxis(response, 0, -1), through @ covariance @ transposed(through)

    def by_token(self, trace: Trace, batch: int) -> tuple[Array, Response]:
        """The encoder's last gradient (..., L, L), and how it answers to the decoder.

        As `HeadTop.by_token`.
        """
        last = trace.stream()[-1]
        assert last.gradient is not None
        kernel, received = last.signal.second_moment().pairs, last.gradient.kernel.pairs
        unit = np.trace(received, axis1=-2, axis2=-1)
        modes = Modes(last.signal.seq_len)
        sequences = received.shape[-1] // modes.seq_len
        response, covariance = self.alike(trace, modes, batch * sequences)
        relative = in_units(received, unit)
        return relative, OfModes(response, batch * covariance, relative, kernel, modes)


class _Sent(NamedTuple):
    """What a part's cross-attention sends to the memory.

    Attributes:
        returned: (..., 2, 2) map from the modes of the gradient that the part receives.
        variance: (...,) of the gradient that the part receives.
        added: (5, ..., 2) modes sent: at the means, at either mode of the encoder's last signal a
            little larger, and of the signal that enters the part.
        noise: (..., 2, 2) covariance that the part's matrices add, in units of the modes sent.
    """

    returned: Array
    variance: Array
    added: Array
    noise: Array


class _Reading:
    """The memory at the encoder's last signal, and at slightly larger modes of it."""

    def __init__(
        self, read: Chain, trace: Trace, modes: Modes, batch: int, shape: tuple[int, ...]
    ) -> None:
        signal = trace.stream()[-1].signal
        if signal.resolved:
            kernel = Alike.of(trace).sites[-1][-1][0]
            signal = Signal(kernel, signal.seq_len, width=signal.width)
        base = np.broadcast_to(modes.of(signal.kernel), (*shape, 2))
        axes = (1,) * (base.ndim - 1)
        steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
        self.modes, self.batch, self.width, self.shape = modes, batch, signal.width, shape
        kernel = modes.kernel(base * (1 + steps.reshape(5, *axes, 2)))
        self.memory, record = forward(read, self.signal(kernel))
        basis = modes.kernel(np.eye(2).reshape(2, 1, *axes, 2))
        pulled = modes.of(record.backward(Gradient(basis, modes.seq_len)).gradient_sent.kernel)
        shape = np.broadcast_shapes(pulled.shape, (2, 5, *base.shape))
        self.back = np.moveaxis(np.broadcast_to(pulled, shape), 0, -1)[:3]

    def signal(self, kernel: Kernel) -> Signal:
        return Signal(kernel, self.modes.seq_len, width=self.width, spread=kernel.scaled(0.0))


def _sent(
    layers: Sequence[Layer], alike: Alike, modes: Modes, of_memory: _Reading
) -> dict[int, _Sent]:
    """By the number of the part, from the first one on."""
    found: dict[int, _Sent] = {}
    starts = part_starts(layers)
    width = alike.entering.width
    for index, (layer, points) in enumerate(zip(layers, alike.sites, strict=True)):
        for position, part in enumerate(parts_of(layer)):
            if part.reads is not None:
                kernel, gradient = points[position][0], points[position + 1][1]
                one = _of_part(part, kernel, gradient, width, modes, of_memory)
                found[starts[index] + position] = one
    return found


def _of_part(
    part: Component,
    kernel: Kernel,
    gradient: Kernel,
    width: Array,
    modes: Modes,
    of_memory: _Reading,
) -> _Sent:
    base, received = (
        np.broadcast_to(modes.of(one), (*of_memory.shape, 2)) for one in (kernel, gradient)
    )
    axes = (1,) * (base.ndim - 1)
    steps = STEP * np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1]])
    nudged = modes.kernel(base * (1 + steps.reshape(5, *axes, 2)))
    basis = Gradient(modes.kernel(np.eye(2).reshape(2, 1, *axes, 2)), modes.seq_len)
    scale, node = part.branch_of()
    for path in node.paths():
        attention = path.reads
        if attention is None:
            continue
        signal = Signal(nudged, modes.seq_len, width=width, spread=nudged.scaled(0.0))
        record = forward(path, signal, of_memory.memory)[1].backward(basis)
        (reading,) = (one for one in record.children if one.sent_to_memory is not None)
        assert reading.sent_to_memory is not None
        sent = of_memory.modes.of(reading.sent_to_memory.kernel)
        sent = np.broadcast_to(sent, np.broadcast_shapes(sent.shape, (2, 5, *base.shape)))
        returned = scale * np.moveaxis(sent, 0, -1)
        query_tokens = _first(reading.input.kernel)
        noise = _noise(attention, returned[0], received, query_tokens, of_memory, modes)
        return _Sent(returned[0], received @ modes.average, _times(returned, received), noise)
    raise AssertionError("the part has no cross-attention")


def _noise(
    attention: CrossAttention,
    returned: Array,
    received: Array,
    query_tokens: Kernel,
    of_memory: _Reading,
    modes: Modes,
) -> Array:
    """Of the output projection, of the value projection and of the heads' realised weights."""
    inner, width = attention.heads * attention.d_head, attention.memory_width
    stage = returned * (2 / inner * received**2 / modes.count)[..., None, :]
    noise = stage @ transposed(returned)
    direct = np.stack(
        [_times(returned, received)[..., 0], returned[..., 1, 1] * received[..., 1]], axis=-1
    )
    noise = noise + (2 * direct**2 / width / of_memory.modes.count)[..., None] * np.eye(2)
    tokens = _first(of_memory.memory.second_moment())
    law = logit_law(attention, query_tokens, tokens, (attention.d_model, width))
    own = law.keys.kernel.diagonal - law.keys.kernel.pairs
    theta = np.clip(4 * law.scale * law.queries.kernel.diagonal * own, 0.0, THETA_MAX)
    squares = SquareTable.load().at_length(of_memory.modes.seq_len).single(theta).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    noise[..., 1, 1] += share * (returned[..., 1, 0] * received[..., 0]) ** 2
    return noise / of_memory.batch


def _beside(own: BothWays, sent: dict[int, _Sent], size: Array, of_memory: _Reading) -> BothWays:
    """The decoder's passes with z behind the gradient's modes, in units of z's variance."""
    steps = own.steps
    shape = steps.pull.shape[:-2]
    pull, noise = np.zeros((*shape, 4, 4)), np.zeros((*shape, 4, 4))
    exposure, logits = np.zeros((*shape, 4, 2)), np.zeros((*shape, 4))
    pull[..., :2, :2], noise[..., :2, :2] = steps.pull, own.gradient_noise
    pull[..., 2:, 2:], exposure[..., :2, :] = np.eye(2), steps.exposure
    logits[..., :2] = steps.logits.gradient
    carried: Array = 0.0
    for k in sorted(sent, reverse=True):
        one = sent[k]
        added = one.added[0] / size[..., None]
        pull[k][..., 2:, :2] = one.returned * (one.variance / size)[..., None, None]
        change = (one.added[3:] - one.added[0]) / (STEP * size[..., None])
        exposure[k][..., 2:, :] = np.moveaxis(change, 0, -1)
        cross = 4 * carried * added / of_memory.width / (of_memory.modes.count * of_memory.batch)
        own_noise = one.noise / (size**2)[..., None, None]
        noise[k][..., 2:, 2:] = own_noise + cross[..., None] * np.eye(2)
        carried = carried + added
    grown = [np.zeros((*shape[1:], 4, 4)), np.zeros((*shape[1:], 4, 2))]
    grown[0][..., :2, :2], grown[1][..., :2, :] = own.received, own.exposed
    steps = steps._replace(
        pull=pull, exposure=exposure, logits=steps.logits._replace(gradient=logits)
    )
    return own._replace(steps=steps, gradient_noise=noise, received=grown[0], exposed=grown[1])


def _times(matrix: Array, vector: Array) -> Array:
    return (matrix @ vector[..., None])[..., 0]


def _first(kernel: Kernel) -> Kernel:
    return Kernel(kernel.diagonal[0], kernel.pairs[0])


# --- between gradients by token and those of tokens alike: two modes ------------------------------


@dataclass(frozen=True)
class OfModes:
    """A gradient by token that fluctuates by its modes, and responds to those of the signal.

    Attributes:
        response, covariance: (..., 2, 2), as `DecoderTop.alike` gives them.
        received: (..., L, L) the gradient, of trace 1.
        kernel: (..., L, L) of the signal.
        modes: of the tokens of a sequence.
    """

    response: Array
    covariance: Array
    received: Array
    kernel: Array
    modes: Modes

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        mean = _means(sensitivity @ self.received, self.modes.seq_len)
        split = np.stack([mean, (sensitivity * self.received).sum((-2, -1)) - mean], axis=-1)
        weights = ratio(split, self._relative(self.received))
        noise = (weights * _times(self.covariance, weights)).sum(-1)
        return GradientAdjoint(sensitivity, weights, noise, 0.0 * noise)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        # of x_j = dm_j/m_j, with the modes m of the tokens averaged over sequences
        per_mode = (transposed(self.response) @ exposure[..., None])[..., 0]
        kernel, count = self.kernel, self.kernel.shape[-1]
        size = np.trace(kernel, axis1=-2, axis2=-1) / count
        per_mode = ratio(per_mode, self._relative(kernel) * size[..., None])
        per_mode = per_mode / (self.modes.count * count / self.modes.seq_len)
        mean, difference = (per_mode[..., i, None, None] for i in range(2))
        same = np.kron(np.eye(count // self.modes.seq_len), np.ones((self.modes.seq_len,) * 2))
        found = difference * np.eye(count) + (mean - difference) * same / self.modes.seq_len
        none = np.zeros(sensitivity.shape[:-2])
        return SignalAdjoint(sensitivity + found.astype(SINGLE), none, none)

    def _relative(self, kernel: Array) -> Array:
        """(..., 2) modes over the variance."""
        whole = np.trace(kernel, axis1=-2, axis2=-1)
        mean = _means(kernel, self.modes.seq_len) / whole
        sizes = np.stack([mean, 1 - mean], axis=-1)
        return sizes * self.modes.seq_len / self.modes.count


def _means(kernel: Array, seq_len: int) -> Array:
    """tr(P K), P the projection on the token mean of every sequence."""
    count = kernel.shape[-1] // seq_len
    blocks = kernel.reshape(*kernel.shape[:-2], count, seq_len, count, seq_len)
    return np.einsum("...aiaj->...", blocks) / seq_len


@dataclass(frozen=True)
class AsAlike:
    """What the decoder's last gradient comes from, of tokens resolved, as of tokens alike."""

    top: Any
    trace: Trace

    def alike(self, trace: Trace, modes: Modes, batch: int) -> tuple[Array, Array]:
        last = matrix_of(self.trace.stream()[-1].signal.second_moment())
        size, sequences = last.shape[-1], round(count_of(last)) // modes.seq_len
        received, response = self.top.by_token(self.trace, max(1, batch // sequences))
        if isinstance(last, ClassMatrix):
            same = ones((size, size), last) * (1 / modes.seq_len)
        else:
            same = np.kron(np.eye(sequences), np.full((modes.seq_len,) * 2, 1 / modes.seq_len))
        rest = diagonal(np.ones(size), last) - same
        mean = [same * modes.seq_len, rest * (modes.seq_len / modes.count[1])]
        # the two modes over the variance, and their sum, whose noise tells their covariance
        leading = np.zeros((*received.shape[:-2], 1, 1))
        each = stacked([one + leading for one in (*mean, mean[0] + mean[1])], np.stack)
        each = each.astype(SINGLE)
        step = response.gradient_adjoint(each)
        noise = step.noise / max(1, batch // sequences)
        cross = (noise[2] - noise[0] - noise[1]) / 2
        covariance = np.stack(
            [np.stack([noise[0], cross], -1), np.stack([cross, noise[1]], -1)], axis=-2
        )
        gamma = response.signal_adjoint(each * 0.0, step.exposure).sensitivity[:2]
        common = same @ last @ same
        found = [total(gamma * part) for part in (common, last - common)]
        return np.moveaxis(np.stack(found), (0, 1), (-1, -2)), covariance
