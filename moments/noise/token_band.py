"""The spread of one draw of the weights, by token: for causal masks, texts and any token kernel.

Let y be the gradient variance at one point of the stream over its mean. It is linear in the
realised gradient kernels above, with sensitivities Lambda, and to first order it depends on all
realised signal kernels, with sensitivities Gamma (`sensitivity`). A random matrix adds to a kernel
what Wishart matrices have: at a residual addition of carried T and added B, of independent
directions,

    Var sum(Lambda o dG) = (4 tr(Lambda T Lambda B) + kappa tr(Lambda B Lambda B)) / d,

and the same for the signal with Gamma. Under a causal mask the gradient gathers on few tokens:
tr(Lambda B Lambda B)/(tr Lambda B)^2 is the share of one among them. All parts above a point add
the first kind, all parts of the network the second. One pass up and one pass down give a point;
at most `TARGETS` points are followed, between which the deviation is interpolated.

Realised directions that on average share nothing still overlap at random. The second moment of
that overlap, q over the product of the two variances, starts at 1/d and grows by (2 T B + kappa
B^2/2)/d at an addition, T and B as shares of their sum. The branch carries it with a part h of its
gain on one direction, which adds

    (4 tr(Lambda T) h tr(Lambda B) + kappa (h tr(Lambda B))^2) q / d,

the floor under what tokens and sequences that share the weights can average out.

See docs/theory/band.md, What fluctuates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.response import Around, Part
from ..engine.sensitivity import (
    SINGLE,
    GradientAdjoint,
    Matrix,
    Response,
    SignalAdjoint,
    count_of,
    diagonal,
    matrix_of,
    own_entries,
    paired,
    per_unit,
    ratio,
    row_sums,
    stacked,
    total,
    trace_of,
)
from ..engine.state import Array, Signal
from ..engine.trace import Trace

TARGETS = 9
"""Points of the stream that are followed; the deviation is linear in between."""

CHUNK_ENTRIES = 2**23
"""Numbers kept at once: sensitivities of several points at all parts."""


def log_variance_by_token(
    trace: Trace, batch: int, overlaps: Sequence[Array], top: Any = None
) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    Args:
        trace: what both passes saw, by token.
        batch: sequences of independent input and gradient that share the weights.
        overlaps: (parts + 1) covariance of tokens of different sequences before every part.
        top: where the last gradient comes from; None: it is a fresh Gaussian tensor.
    """
    parts, starts = network_parts(trace)
    stream, layers = trace.stream(), trace.layers
    # The last points are their own: above the topmost layer there is no randomness but the loss's.
    below = np.linspace(0, len(layers) - 1, min(TARGETS - 1, len(layers))).round()
    targets = np.append(below, len(layers)).astype(int)
    size = max(1, CHUNK_ENTRIES // (parts[0].sent.size * len(parts)))
    received = parts[-1].received
    end: tuple[Matrix, Response] = (received, Fresh(received, parts[-1].width))
    if top is not None:
        end = top.by_token(trace, batch)
    network = _Network(parts, stream[0].signal, batch, overlaps, end)
    found = [
        network.variance([starts[n] for n in targets[first : first + size]])
        for first in range(0, len(targets), size)
    ]
    deviation = np.sqrt(np.concatenate(found))
    points = np.arange(len(layers) + 1)
    after = np.clip(np.searchsorted(targets, points), 1, len(targets) - 1)
    way = (points - targets[after - 1]) / (targets[after] - targets[after - 1])
    way = way.reshape(-1, *(1,) * (deviation.ndim - 1))
    return np.moveaxis((1 - way) * deviation[after - 1] + way * deviation[after], 0, -1) ** 2


def network_parts(trace: Trace) -> tuple[list[Part], list[int]]:
    """All parts of all layers, and the number of parts before each layer and in all."""
    stream = trace.stream()
    kernels = [point.signal.kernel for point in stream]
    kernels += [point.gradient.kernel for point in stream if point.gradient is not None]
    axes = np.broadcast_shapes(*(kernel.diagonal.shape[:-1] for kernel in kernels))
    found: list[Part] = []
    starts = [0]
    for layer in trace.layers:
        for record in layer.children[0].in_order():
            unit = trace_of(matrix_of(record.gradient_sent.kernel))
            around = Around(np.broadcast_to(unit, axes))
            found.append(record.component.part(record, around))
        starts.append(len(found))
    return found, starts


@dataclass(frozen=True)
class Fresh:
    """A Gaussian gradient of its own at the last layer, kernel (..., L, L)."""

    received: Matrix
    width: float

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        noise = 2 / self.width * paired(sensitivity, self.received, self.received)
        return GradientAdjoint(sensitivity, None, noise, 0.0 * noise)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        none = np.zeros(sensitivity.shape[:-2])
        return SignalAdjoint(sensitivity, none, none)


class _Network:
    """All parts, and the random overlap that directions have before each."""

    def __init__(
        self,
        parts: Sequence[Part],
        first: Signal,
        batch: int,
        overlaps: Sequence[Array],
        end: tuple[Array, Response],
    ) -> None:
        self.top, self.end = end
        self.parts, self.first, self.batch, self.overlaps = parts, first, batch, overlaps
        self.width = float(first.width)
        self._coherence: Sequence[Array] = ()

    def variance(self, starts: Sequence[int]) -> Array:
        """(starts, ...): of y at the inputs of these parts (or the network's output), in order.

        The first call has the input of the first part among them.
        """
        parts = self.parts
        shape = parts[0].sent.shape
        identity = diagonal(np.ones((1, *shape[:-1]), SINGLE), parts[0].sent)
        sensitivity = identity[:0]
        adjoints, shares = [], []
        noise = np.zeros((len(starts), *shape[:-2]))
        for k in range(len(parts) + 1):
            fresh = [identity] * sum(start == k for start in starts)
            sensitivity = stacked([sensitivity, *fresh])
            sent = parts[k].sent if k < len(parts) else self.top
            # A linear map's paths together hand on the whole: what traced moments lost to
            # corrections of order 1/d, and the maps to their approximations, is put back.
            sensitivity = per_unit(sensitivity, total(sensitivity * sent))
            if k < len(parts):
                step = parts[k].gradient_adjoint(sensitivity)
                added = parts[k].gradient_noise(sensitivity) + step.noise
                noise[: len(sensitivity)] += added / self.batch
                adjoints.append(step.exposure)
                shares.append(self._shares(parts[k], sensitivity, step.coherence))
                sensitivity = step.sensitivity
        last = self.end.gradient_adjoint(sensitivity)
        noise += last.noise / self.batch
        if not self._coherence:
            self._coherence = [entry[4][:1] for entry in shares]
        noise += self._gradient_floor(shares, noise)
        return noise + self._signal(adjoints, sensitivity, last.exposure, self._coherence)

    # --- gradient ------------------------------------------------------------------------------

    def _shares(self, part: Part, sensitivity: Array, coherence: Array) -> tuple[Array, ...]:
        """Shares of skip connection and branch in y, the latter's for different directions, and
        the share of all directions but one."""
        carried = part.skip * total(sensitivity * part.received)
        alone = paired(sensitivity, part.sent, part.sent) / self.batch
        others = np.clip(1 - alone, 0.0, 1.0)
        return carried, 1 - carried, coherence * (1 - carried), others, coherence

    def _gradient_floor(self, shares: Sequence[tuple[Array, ...]], like: Array) -> Array:
        overlap, found = np.full_like(like, 1 / self.width), np.zeros_like(like)
        for part, (carried, added, coherent, others, _) in zip(
            self.parts[::-1], shares[::-1], strict=True
        ):
            if part.residual:
                here = slice(len(carried))
                found[here] += part.floor(carried, added, coherent, overlap[here]) * others
                fresh = (2 * carried + part.kappa / 2 * added) * added / self.width
                overlap[here] = (carried + coherent) ** 2 * overlap[here] + fresh
        return found

    # --- signal --------------------------------------------------------------------------------

    def _signal(
        self, adjoints: Sequence[Any], like: Array, exposure: Any, coherence: Sequence[Array]
    ) -> Array:
        last = self.end.signal_adjoint(0.0 * like, exposure)
        sensitivity = last.sensitivity
        found = np.zeros(like.shape[:-2]) + last.noise / self.batch
        overlaps = self._signal_overlaps(coherence)
        for k in range(len(self.parts) - 1, -1, -1):
            part = self.parts[k]
            found += part.signal_noise(sensitivity) / self.batch
            if part.residual:
                carried = part.skip * total(sensitivity * part.entering)
                added = total(sensitivity * part.leaving) - carried
                floor = part.floor(carried, added, coherence[k] * added, overlaps[k])
                found += (1 - 1 / self.batch) * floor + self._across(sensitivity, k)
            step = part.signal_adjoint(sensitivity, adjoints[k])
            sensitivity = step.sensitivity
            found += step.noise / self.batch + self._agreement(k) * step.common
        kernel = matrix_of(self.first.kernel).astype(SINGLE)
        if self.first.spread is not None and not np.any(self.first.spread.diagonal):
            # a norm has fixed every token's size
            lost = ratio(row_sums(sensitivity * kernel), own_entries(kernel))
            sensitivity = sensitivity - diagonal(lost, kernel)
        found += 2 / self.width * paired(sensitivity, kernel, kernel) / self.batch
        across = (total(sensitivity) * self.overlaps[0]) ** 2
        return found + 2 / self.width * (1 - 1 / self.batch) * across

    def _signal_overlaps(self, coherence: Sequence[Array]) -> list[Array]:
        """q of the signals of two sequences before every part."""
        overlap = 1 / self.width + 0 * coherence[0]
        found = []
        for part, share in zip(self.parts, coherence, strict=True):
            found.append(overlap)
            if part.residual:
                carried = ratio(part.skip * trace_of(part.entering), trace_of(part.leaving))
                added = 1 - carried
                fresh = (2 * carried + part.kappa / 2 * added) * added / self.width
                overlap = (carried + share * added) ** 2 * overlap + fresh
        return found

    def _agreement(self, k: int) -> Array:
        """Square of the correlation of tokens of other sequences before a part."""
        if self.batch == 1:
            return 0.0
        variance = trace_of(self.parts[k].entering) / count_of(self.parts[k].entering)
        square = ratio(self.overlaps[k], variance) ** 2 + 1 / self.width
        return (1 - 1 / self.batch) * square

    def _across(self, sensitivity: Array, k: int) -> Array:
        """What tokens of other sequences share: the means of the activations."""
        if self.batch == 1:
            return 0.0
        kept = self.parts[k].skip * self.overlaps[k]
        added = self.overlaps[k + 1] - kept
        noise = (4 * kept + self.parts[k].kappa * added) * added / self.width
        return (1 - 1 / self.batch) * noise * total(sensitivity) ** 2
