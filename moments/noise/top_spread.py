"""What one draw of the weights makes of the gradient that a head's loss sends to the last layer.

Given the targets, sum_v d_i(v) E_v of Gaussian rows E_v is a Gaussian tensor of the kernel D, but
for what the softmax knows of the draw: the realised kernel is a Wishart matrix of width degrees of
freedom, 2 tr(D D)/width, as any fresh Gaussian gradient's. A hidden layer's matrix and activation
add their own. Two things depend on more than that:

* the final normalisation divides by the realised size of the stream, token by token, and the
  softmax sees its realised overlaps: the response of the last gradient to the last signal, from
  where the signal's fluctuations enter all gradients below;
* D_ii itself varies with the draw, where logits are few (`loss_spread`).

See docs/theory/band.md, Where gradients come from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component
from ..engine.modes import Modes
from ..engine.propagate import Trace, forward
from ..engine.response import STEP, Around, Elementwise, Sequence, in_units
from ..engine.sensitivity import (
    SINGLE,
    Ascent,
    Descent,
    Response,
    diagonal,
    entrywise,
    matrix_of,
    off_diagonal,
    over_tokens,
    own_entries,
    paired,
    ratio,
    row_sums,
    total,
    trace_of,
)
from ..engine.state import Array, Gradient, Kernel, Signal
from ..transfer.elementary import Activation, Linear
from ..transfer.head.components import Pool
from ..transfer.head.readout import Readout
from .loss_spread import (
    across,
    log_variance_of_mean,
    logit_agreement,
    logit_effect,
    mean_square,
    overlap_variance,
    softmax_variance,
)

_COARSE = 1e-2
"""Step of the logits' variance, across which `softmax_agreement` may jump by .1 percent."""


@dataclass(frozen=True, eq=False)
class HeadTop:
    """A head with a loss, as the band meets it.

    Attributes:
        chain: what stands between the last layer and the matrix to the logits.
        readout: the matrix and its loss.
    """

    chain: Chain
    readout: Readout

    def by_token(self, trace: Trace, batch: int) -> tuple[Array, Response]:
        """The last layer's gradient (..., L, L), and how it answers to all that is behind it."""
        before = trace.stream()[-1]
        assert before.gradient is not None
        assert trace.ending is not None
        unit = trace_of(matrix_of(before.gradient.kernel))
        last = first = in_units(matrix_of(before.gradient.kernel), unit)
        around = Around(np.asarray(unit))
        parts: list[Response] = []
        for record in trace.ending.children:
            last, leaf, output = around.received(record), record.component, record.output
            answer = leaf.response(record, around)
            if not isinstance(leaf, Pool):
                answer = _Drawn(answer, output, last, _kappa(leaf, output))
            parts.append(answer)
        parts.append(_Ending.of(self.readout, last, unit, batch))
        return first, Sequence(tuple(parts))

    def alike(self, trace: Trace, modes: Modes, batch: int) -> tuple[Array, Array]:
        """The same of tokens alike, in relative modes (..., 2, 2).

        Returns:
            The response of the gradient's modes over its variance to the signal's relative modes,
            and the covariance that one draw adds.
        """
        stream = trace.stream()
        signal, top = stream[-1].signal, stream[-1].gradient
        assert top is not None
        width, received = signal.width, modes.of(top.kernel) / _last(top.kernel.diagonal)
        base = np.broadcast_to(modes.of(signal.kernel), received.shape)
        step = STEP if self.readout.normalised else _COARSE
        steps = step * np.array([[0, 0], [1, 0], [0, 1]])
        nudged = modes.kernel(base * (1 + steps.reshape(3, *(1,) * (base.ndim - 1), 2)))
        entering = Signal(nudged, modes.seq_len, width=width, spread=nudged.scaled(0.0))
        read, record = forward(self.chain, entering)
        readout = dataclasses.replace(self.readout, kernel=_sized(self.readout, read.kernel))
        pulled = record.backward(Gradient(_sent(readout), read.seq_len)).gradient_sent
        sent = modes.of(pulled.kernel)
        response_ = (sent[1:] - sent[0]) / (step * _last(sent[0] @ modes.average))
        noise = 2.0
        for one in () if trace.ending is None else trace.ending.children:
            noise = noise + _kappa(one.component, one.output)
        own = noise / width * _outer(received) * np.diag(1 / (batch * modes.count))
        of_modes = (
            2
            / width
            * np.einsum("...i,i,...i->...", received**2, modes.average**2, 1 / modes.count)
            / batch
        )
        excess = np.maximum(overlap_variance(self.readout, batch) / width - of_modes, 0.0)
        excess = excess + softmax_variance(self.readout, batch)
        return np.moveaxis(response_, 0, -1), own + excess[..., None, None]


def _sent(readout: Readout) -> Kernel:
    """Gradient at what the matrix multiplies."""
    return readout.gradient() if readout.normalised else readout.gradient() + readout.radial()


def _sized(readout: Readout, kernel: Kernel) -> Kernel:
    """Slightly changed kernels, first axis, with the sizes of the first where those are fixed."""
    if not readout.normalised:
        return kernel
    size = kernel.diagonal[:1] + 0.0 * kernel.diagonal
    return Kernel(size, kernel.pairs * size / kernel.diagonal)


def _kappa(leaf: Component, output: Signal) -> Array:
    """width times the relative variance of a squared norm that a hidden layer's parts add."""
    if isinstance(leaf, Linear):
        return 2.0
    if not isinstance(leaf, Activation):
        return 0.0
    assert output.spread is not None
    relative = output.spread.diagonal / output.second_moment().diagonal ** 2
    own = output.kernel.average(relative)
    return np.maximum(own * output.width - 2.0, 0.0)


# --- by token -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """A leaf of the head with what its own draw adds, to the signal and to the gradient."""

    inner: Response
    output: Signal
    received: Array
    kappa: Array

    def ascend(self, sensitivity: Array) -> Ascent:
        step = self.inner.ascend(sensitivity)
        noise = step.noise + self._noise(step.sensitivity, self.received)
        return step._replace(noise=noise)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        step = self.inner.descend(sensitivity, exposure)
        kernel = matrix_of(self.output.second_moment()).astype(SINGLE)
        return step._replace(noise=step.noise + self._noise(sensitivity, kernel))

    def _noise(self, sensitivity: Array, kernel: Array) -> Array:
        if not np.any(self.kappa):
            return np.zeros(sensitivity.shape[:-2])
        return self.kappa / self.output.width * paired(sensitivity, kernel, kernel)


@dataclass(frozen=True)
class _Ending:
    """The matrix and its loss.

    Attributes:
        answer: of the gradient at what the matrix multiplies, to its kernel.
        received: (..., L, L) that gradient.
        width: features that the matrix multiplies.
        agreement, effect: how far tokens' D_ii vary together, and how much, over draws.
        batch: sequences that share the weights.
        unknown: (..., L, L) Var D_ij over texts, relative to their mean squares.
        shared: E of the squares of what a token's gradient shares with those of other sequences,
            summed over them, relative to that of all its own.
    """

    answer: Elementwise
    received: Array
    width: float
    agreement: Array
    effect: tuple[Array, Array]
    batch: int
    unknown: Array
    shared: Array

    @classmethod
    def of(cls, readout: Readout, received: Array, unit: Array, batch: int) -> _Ending:
        kernel = readout.kernel
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = np.sqrt(first * second)
        near = Kernel.joined(kernel.diagonal, kernel.pairs - STEP * scale, kernel.resolved)
        base = matrix_of(_sent(readout))
        change = (base - matrix_of(_sent(_moved(readout, near)))) / (STEP * scale)
        change = off_diagonal(change)
        own = 0.0 * base
        if not readout.normalised:
            grown = dataclasses.replace(
                readout,
                kernel=kernel.scaled(1 + _COARSE),
                carried=readout.carried * np.sqrt(1 + _COARSE),
            )
            own = (matrix_of(_sent(grown)) - base) / _COARSE - change * matrix_of(kernel)
        back, change, own = (in_units(entry, unit) for entry in (base, change, own))
        none = 0.0 * back
        pairs = (matrix_of(kernel) + 0.0 * base).astype(SINGLE)
        answer = Elementwise(none, none, back, change, own, pairs, none + 1)
        square = matrix_of(readout.overlap) ** 2
        excess = matrix_of(mean_square(readout)) - square
        excess = entrywise(lambda more, of: ratio(np.maximum(more, 0.0), of), excess, square)
        drawn = logit_agreement(readout), logit_effect(readout), batch
        shared = (batch - 1) * across(readout)
        return cls(answer, received, float(readout.width), *drawn, excess, shared)

    def ascend(self, sensitivity: Array) -> Ascent:
        step, weighted = self.answer.ascend(sensitivity), sensitivity * self.received
        noise = 2 / self.width * paired(sensitivity, self.received, self.received)
        own = own_entries(sensitivity)
        spread = self.unknown * self.received**2 * own[..., :, None] * own[..., None, :]
        noise += 2 / self.width * (total(spread) + self.shared)
        tokens = row_sums(weighted)
        met = (self.agreement @ tokens[..., :, None])[..., 0]
        share = over_tokens(tokens * met, self.received)
        noise += log_variance_of_mean(self.effect, share / self.batch) * self.batch
        return step._replace(noise=noise)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        # above it there is nothing, of as many tokens as the matrix sees
        by_size = exposure[1]
        none = diagonal(np.zeros(by_size.shape, SINGLE), self.received)
        return self.answer.descend(none, exposure)


def _moved(readout: Readout, kernel: Kernel) -> Readout:
    """The readout of tokens otherwise correlated, whose softmaxes are what they were."""
    moved = dataclasses.replace(readout, kernel=kernel)
    vars(moved).update(softmax=readout.softmax, _unread=readout._unread)
    return moved


def _last(entries: Array) -> Array:
    return np.asarray(entries)[..., None]


def _outer(vector: Array) -> Array:
    return vector[..., :, None] * vector[..., None, :]
