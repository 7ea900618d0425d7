"""The spread of one draw of the weights, by token: for causal masks, texts and any token kernel.

Let y be the gradient variance at one point of the stream over its mean. It is linear in the realised
gradient kernels above, with sensitivities Lambda, and to first order it depends on all realised
signal kernels, with sensitivities Gamma (`part_response`). A random matrix adds to a kernel what
Wishart matrices have: at a residual addition of carried T and added B, independent in direction,

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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import SelfAttention
from .block_noise import parts_of, ratio
from .composition import Chain, Component, Layer, Residual
from .attention_response import SINGLE, diagonal, transposed
from .part_response import Ascent, Descent, Response, in_units, paired, response
from .parts import Dropout
from .propagate import Point, Trace
from .state import Array, Signal

TARGETS = 9
"""Points of the stream that are followed; the deviation is linear in between."""

CHUNK_ENTRIES = 2**23
"""Numbers kept at once: sensitivities of several points at all parts."""


@dataclass(frozen=True)
class Part:
    """What follows one another in a layer, around its means; kernels (..., L, L).

    Attributes:
        response: of the branch, or of the whole where there is no skip connection.
        residual: whether there is an addition.
        skip, scale: squared factors of skip connection and branch; 0 and 1 where there is none.
        entering, leaving: kernels of the signal.
        sent, received: kernels of the gradient, at the input and at the output, in units of the
            former's trace.
        kappa: (...,) d_model times the relative variance of |branch|^2.
        back_kappa: the same of the gradient, beyond what `response` calls noise.
        width: d_model.
        inner: number of features of all heads, where the branch attends; else None.
    """

    response: Response
    residual: bool
    skip: float
    scale: float
    entering: Array
    leaving: Array
    sent: Array
    received: Array
    kappa: Array
    back_kappa: Array
    width: float
    inner: float | None

    def ascend(self, sensitivity: Array) -> Ascent:
        """What a sensitivity to the gradient sent says; see `part_response.Ascent`."""
        found = self.response.ascend(sensitivity)
        onward = self.scale * found.sensitivity + self.skip * sensitivity
        return found._replace(sensitivity=onward)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        """What a sensitivity to the signal that leaves says; see `part_response.Descent`."""
        found = self.response.descend(self.scale * sensitivity, exposure)
        return found._replace(sensitivity=found.sensitivity + self.skip * sensitivity)

    def gradient_noise(self, sensitivity: Array) -> Array:
        """Variance that the addition of the gradients adds."""
        carried = self.skip * self.received
        return self._noise(sensitivity, carried, self.sent - carried, self.back_kappa)

    def signal_noise(self, sensitivity: Array) -> Array:
        """Variance that the addition of the signals adds."""
        carried = self.skip * self.entering
        return self._noise(sensitivity, carried, self.leaving - carried, self.kappa)

    def floor(self, carried: Array, added: Array, coherent: Array, overlap: Array) -> Array:
        """Covariance of what the addition does to different directions of random overlap.

        Args:
            carried, added: parts of y through the skip connection and through the branch.
            coherent: of `added`, what the mean of the tokens carries on.
            overlap: q, second moment of the directions' correlation.
        """
        cross = 4 * carried * coherent * overlap
        if self.inner is None:
            return (cross + self.kappa * coherent**2 * overlap) / self.width
        # two matrices one after the other: behind the first, overlaps have grown by 1/inner
        twice = 2 * overlap * self.width / self.inner + 2 * (overlap + 1 / self.inner)
        return (cross + twice * added**2) / self.width

    def _noise(self, sensitivity: Array, carried: Array, added: Array, kappa: Array) -> Array:
        if not self.residual:
            return np.zeros(sensitivity.shape[:-2])
        skipped, branch = sensitivity @ carried, sensitivity @ added
        weight = np.asarray(kappa)[..., None, None].astype(SINGLE)
        return ((4 * skipped + weight * branch) * transposed(branch)).sum((-2, -1)) / self.width


def log_variance_by_token(
    layers: Sequence[Layer], trace: Trace, batch: int, overlaps: Sequence[Array]
) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    Args:
        layers: the stack of layers.
        trace: what both passes saw, by token.
        batch: sequences of independent input and gradient that share the weights.
        overlaps: (parts + 1) covariance of tokens of different sequences before every part.
    """
    parts, starts = _parts(layers, trace)
    stream = trace.stream()
    # The last points are their own: above the topmost layer there is no randomness but the loss's.
    below = np.linspace(0, len(layers) - 1, min(TARGETS - 1, len(layers))).round()
    targets = np.append(below, len(layers)).astype(int)
    size = max(1, CHUNK_ENTRIES // (parts[0].sent.size * len(parts)))
    network = _Network(parts, stream[0].signal, batch, overlaps)
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


class _Network:
    """All parts, and the random overlap that directions have before each."""

    def __init__(
        self, parts: Sequence[Part], first: Signal, batch: int, overlaps: Sequence[Array]
    ) -> None:
        self.parts, self.first, self.batch, self.overlaps = parts, first, batch, overlaps
        self.width = float(first.width)

    def variance(self, starts: Sequence[int]) -> Array:
        """(starts, ...): of y at the inputs of these parts (or the network's output), in order."""
        parts = self.parts
        shape = parts[0].sent.shape
        identity = np.broadcast_to(np.eye(shape[-1], dtype=SINGLE), (1, *shape))
        sensitivity = np.zeros((0, *shape), SINGLE)
        ascents, shares = [], []
        noise = np.zeros((len(starts), *shape[:-2]))
        for k in range(len(parts) + 1):
            fresh = [identity] * sum(start == k for start in starts)
            sensitivity = np.concatenate([sensitivity, *fresh])
            sent = parts[k].sent if k < len(parts) else parts[-1].received
            # A linear map's paths together hand on the whole: what traced moments lost to
            # corrections of order 1/d, and the maps to their approximations, is put back.
            whole = (sensitivity * sent).sum((-2, -1))
            sensitivity = ratio(sensitivity, whole[..., None, None])
            if k < len(parts):
                step = parts[k].ascend(sensitivity)
                added = parts[k].gradient_noise(sensitivity) + step.noise
                noise[: len(sensitivity)] += added / self.batch
                ascents.append(step.exposure)
                shares.append(self._shares(parts[k], sensitivity, step.coherence))
                sensitivity = step.sensitivity
        top = parts[-1].received
        noise += 2 / self.width * paired(sensitivity, top, top) / self.batch
        coherence = [entry[4][:1] for entry in shares]
        noise += self._gradient_floor(shares, noise)
        return noise + self._signal(ascents, sensitivity, coherence)

    # --- gradient ------------------------------------------------------------------------------

    def _shares(self, part: Part, sensitivity: Array, coherence: Array) -> tuple[Array, ...]:
        """Shares of skip connection and branch in y, the latter's for different directions, and
        the share of all directions but one."""
        carried = part.skip * (sensitivity * part.received).sum((-2, -1))
        alone = paired(sensitivity, part.sent, part.sent) / self.batch
        others = np.clip(1 - alone, 0.0, 1.0)
        return carried, 1 - carried, coherence * (1 - carried), others, coherence

    def _gradient_floor(self, shares: Sequence[tuple[Array, ...]], like: Array) -> Array:
        overlap, total = np.full_like(like, 1 / self.width), np.zeros_like(like)
        for part, (carried, added, coherent, others, _) in zip(
            self.parts[::-1], shares[::-1], strict=True
        ):
            if part.residual:
                here = slice(len(carried))
                total[here] += part.floor(carried, added, coherent, overlap[here]) * others
                fresh = (2 * carried + part.kappa / 2 * added) * added / self.width
                overlap[here] = (carried + coherent) ** 2 * overlap[here] + fresh
        return total

    # --- signal --------------------------------------------------------------------------------

    def _signal(self, ascents: Sequence[Any], like: Array, coherence: Sequence[Array]) -> Array:
        sensitivity = np.zeros_like(like)
        total = np.zeros(like.shape[:-2])
        overlaps = self._signal_overlaps(coherence)
        for k in range(len(self.parts) - 1, -1, -1):
            part = self.parts[k]
            total += part.signal_noise(sensitivity) / self.batch
            if part.residual:
                carried = part.skip * (sensitivity * part.entering).sum((-2, -1))
                added = (sensitivity * part.leaving).sum((-2, -1)) - carried
                floor = part.floor(carried, added, coherence[k] * added, overlaps[k])
                total += (1 - 1 / self.batch) * floor + self._across(sensitivity, k)
            step = part.descend(sensitivity, ascents[k])
            sensitivity = step.sensitivity
            total += step.noise / self.batch + self._agreement(k) * step.common
        kernel = self.first.kernel.pairs.astype(SINGLE)
        if self.first.spread is not None and not np.any(self.first.spread.diagonal):
            # a norm has fixed every token's size
            lost = (sensitivity * kernel).sum(-1) / np.diagonal(kernel, axis1=-2, axis2=-1)
            sensitivity = sensitivity - diagonal(lost)
        total += 2 / self.width * paired(sensitivity, kernel, kernel) / self.batch
        across = (sensitivity.sum((-2, -1)) * self.overlaps[0]) ** 2
        return total + 2 / self.width * (1 - 1 / self.batch) * across

    def _signal_overlaps(self, coherence: Sequence[Array]) -> list[Array]:
        """q of the signals of two sequences before every part."""
        overlap = 1 / self.width + 0 * coherence[0]
        found = []
        for part, share in zip(self.parts, coherence, strict=True):
            found.append(overlap)
            if part.residual:
                carried = part.skip * _trace(part.entering) / _trace(part.leaving)
                added = 1 - carried
                fresh = (2 * carried + part.kappa / 2 * added) * added / self.width
                overlap = (carried + share * added) ** 2 * overlap + fresh
        return found

    def _agreement(self, k: int) -> Array:
        """Square of the correlation of tokens of other sequences before a part."""
        if self.batch == 1:
            return 0.0
        variance = np.diagonal(self.parts[k].entering, axis1=-2, axis2=-1).mean(-1)
        square = (self.overlaps[k] / variance) ** 2 + 1 / self.width
        return (1 - 1 / self.batch) * square

    def _across(self, sensitivity: Array, k: int) -> Array:
        """What tokens of other sequences share: the means of the activations."""
        if self.batch == 1:
            return 0.0
        kept = self.parts[k].skip * self.overlaps[k]
        added = self.overlaps[k + 1] - kept
        noise = (4 * kept + self.parts[k].kappa * added) * added / self.width
        return (1 - 1 / self.batch) * noise * sensitivity.sum((-2, -1)) ** 2


# --- the trace, part by part ---------------------------------------------------------------------


def _parts(layers: Sequence[Layer], trace: Trace) -> tuple[list[Part], list[int]]:
    """All parts of all layers, and the number of parts before each layer and in all."""
    stream = trace.stream()
    kernels = [point.signal.kernel for point in stream]
    kernels += [point.gradient.kernel for point in stream if point.gradient is not None]
    axes = np.broadcast_shapes(*(kernel.diagonal.shape[:-1] for kernel in kernels))
    points = iter(trace.points)
    before = next(point for point in points if point.site == "stream")
    found: list[Part] = []
    starts = [0]
    for layer in layers:
        for component in parts_of(layer):
            part, before = _part(component, before, points, axes)
            found.append(part)
        starts.append(len(found))
        before = next(points)
    return found, starts


def _part(
    component: Component, before: Point, points: Iterator[Point], axes: tuple[int, ...]
) -> tuple[Part, Point]:
    residual = isinstance(component, Residual)
    branch = component.branch if isinstance(component, Residual) else component
    passed: list[Point] = []
    assert before.gradient is not None
    unit = np.broadcast_to(_trace(before.gradient.kernel.pairs), axes)
    answer, _ = response(branch, before.signal, _kept(points, passed), unit)
    after = next(points) if residual else passed[-1]
    skip, scale = 0.0, 1.0
    if isinstance(component, Residual):
        skip, scale = component.skip_scale**2, component.branch_scale**2
    assert after.gradient is not None
    kappa = _own_fluctuation(branch, before.signal, passed) if residual else 0.0
    heads = [leaf for leaf in _leaves(branch) if isinstance(leaf, SelfAttention)]
    part = Part(
        answer,
        residual,
        skip,
        scale,
        before.signal.second_moment().pairs.astype(SINGLE),
        after.signal.second_moment().pairs.astype(SINGLE),
        in_units(before.gradient.kernel.pairs, unit),
        in_units(after.gradient.kernel.pairs, unit),
        kappa,
        2.0 if heads else kappa,
        float(after.signal.width),
        float(heads[0].heads * heads[0].d_head) if heads else None,
    )
    return part, after


def _kept(points: Iterator[Point], passed: list[Point]) -> Iterator[Point]:
    for point in points:
        passed.append(point)
        yield point


def _own_fluctuation(branch: Component, entering: Signal, passed: Sequence[Point]) -> Array:
    """d_model times the relative variance of |branch|^2 that its own matrices add."""
    last = max(i for i, leaf in enumerate(_leaves(branch)) if not isinstance(leaf, Dropout))
    reached = passed[last].signal
    norms = any(getattr(leaf, "normalises", False) for leaf in _leaves(branch))
    inherited = 0.0 if norms else _relative_spread(entering)
    if any(isinstance(leaf, SelfAttention) for leaf in _leaves(branch)):
        inherited = 0.0  # what attention averages is tracked anew
    return reached.width * np.maximum(_relative_spread(reached) - inherited, 0.0)


def _relative_spread(signal: Signal) -> Array:
    """Var |x|^2/E^2 |x|^2, averaged over tokens."""
    assert signal.spread is not None
    return (signal.spread.diagonal / signal.second_moment().diagonal ** 2).mean(-1)


def _leaves(component: Component) -> tuple[Component, ...]:
    return component.parts if isinstance(component, Chain) else (component,)


def _trace(kernel: Array) -> Array:
    return np.trace(kernel, axis1=-2, axis2=-1)
