"""A network about its mean: how small fluctuations of the moments travel through every part.

Tokens alike have two kinds of modes: the token mean, with eigenvalue v + (L - 1) c, and L - 1
differences with eigenvalue v - c. No law is stated here a second time: responses come from the
components themselves, evaluated for all layers at once at slightly changed moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .attention import SelfAttention
from .composition import Chain, Component, Layer, Leaf, Residual
from .errors import MomentsError
from .parts import Dropout
from .propagate import Point, Trace, forward
from .softmax import SquareTable
from .softmax.chebyshev import THETA_MAX
from .state import Array, Gradient, Kernel, Signal

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
        diagonal, pairs = np.broadcast_arrays(kernel.diagonal, kernel.pairs)
        return np.stack([diagonal + (self.seq_len - 1) * pairs, diagonal - pairs], axis=-1)

    def kernel(self, modes: Array) -> Kernel:
        """The kernel with eigenvalues (..., 2)."""
        mean, difference = modes[..., 0], modes[..., 1]
        pairs = (mean - difference) / self.seq_len
        return Kernel(difference + pairs, pairs)


class Addition(NamedTuple):
    """What one residual addition adds at random; nothing is added where a part is no residual.

    Attributes:
        carried, added: (..., 2) modes of the skip connection and of the branch.
        alone: (..., 2) own variance of each mode.
        coherent: (..., 2, 2) covariance that modes of a kind share, and so does their average.
        kept: (...,) factor of the skip connection on a kernel.
        gain: (..., 2, 2) factor of the branch on the overlap of two different modes: of the means of
            two sequences, of a mean and a difference, of two differences.
        kappa: (...,) d_model times the relative variance of |branch|^2.
    """

    carried: Array
    added: Array
    alone: Array
    coherent: Array
    kept: Array
    gain: Array
    kappa: Array


class Logits(NamedTuple):
    """The realised scale of the attention logits, averaged over heads and tokens.

    Attributes:
        variance: (...,) of its logarithm over draws, one sequence.
        signal: (..., 2) response of the relative modes that leave.
        gradient: (..., 2) response of the gradient's modes that are sent back.
    """

    variance: Array
    signal: Array
    gradient: Array


class Linearised(NamedTuple):
    """Parts of a network about their means, entries (parts, ...).

    Relative fluctuations x of the signal's modes, and y of the gradient's modes over the gradient's
    variance, follow x' = response x up and y = pull y' + exposure x down.
    """

    response: Array
    pull: Array
    exposure: Array
    signal: Addition
    gradient: Addition
    logits: Logits


def linearise(
    layers: Sequence[Layer], trace: Trace, modes: Modes, overlaps: Sequence[Array]
) -> Linearised:
    """Every part of every layer, in order, entries (parts, ..., 2[, 2]).

    Args:
        layers: the stack of layers.
        trace: what both passes through them saw, tokens alike.
        modes: of the tokens.
        overlaps: covariance of tokens of different sequences before every part, `sequence_overlaps`.
    """
    points = sites(layers, trace)
    width = trace.stream()[0].signal.width
    starts = part_starts(layers)
    groups: dict[Any, list[tuple[int, int]]] = {}
    for index, layer in enumerate(layers):
        for position, part in enumerate(parts_of(layer)):
            groups.setdefault(_structure(part), []).append((index, position))
    found: list[Linearised] = []
    order: list[int] = []
    for places in groups.values():
        here = [starts[index] + position for index, position in places]
        found.append(
            _linearise(
                stacked([parts_of(layers[index])[position] for index, position in places]),
                modes,
                width,
                _stack([points[index][position].signal for index, position in places]),
                _stack([points[index][position + 1].gradient for index, position in places]),
                np.stack([overlaps[k] for k in here], axis=-1),
            )
        )
        order += here
    return _interleaved(found, np.argsort(order))


def parts_of(layer: Layer) -> tuple[Component, ...]:
    """What follows one another in a layer."""
    return layer.body.parts if isinstance(layer.body, Chain) else (layer.body,)


def part_starts(layers: Sequence[Layer]) -> list[int]:
    """Number of parts before each layer, and in all: where the points of the stream lie."""
    return [0, *np.cumsum([len(parts_of(layer)) for layer in layers]).tolist()]


class Site(NamedTuple):
    """Moments of signal and gradient at one place, tokens alike or taken so."""

    signal: Kernel
    gradient: Kernel

    @classmethod
    def at(cls, point: Point) -> Site:
        """Averages over tokens where a point is resolved by token."""
        assert point.gradient is not None
        return cls(averaged(point.signal.kernel), averaged(point.gradient.kernel))


def averaged(kernel: Kernel) -> Kernel:
    """The kernel of tokens alike with the same average moments, entries float arrays."""
    pairs = kernel.mean_pairs() if kernel.resolved else kernel.pairs
    return Kernel(np.asarray(kernel.mean_diagonal(), float), np.asarray(pairs, float))


def sites(layers: Sequence[Layer], trace: Trace) -> list[list[Site]]:
    """What is before the first part, between the parts and after the last, of every layer."""
    by_place = {(point.layer, point.site): point for point in trace.points}
    stream = trace.stream()
    return [
        [
            Site.at(stream[index]),
            *(Site.at(by_place[layer.number, part.label]) for part in parts_of(layer)),
        ]
        for index, layer in enumerate(layers)
    ]


def sequence_overlaps(layers: Sequence[Layer], trace: Trace) -> list[Array]:
    """Covariance of two tokens of different sequences before every part and after the last.

    Independent inputs start at 0, texts read by one embedding as two tokens of one sequence. What
    grows from there is the mean of the activations, which all tokens share.
    """
    entering = trace.stream()[0].signal
    start = averaged(entering.kernel).pairs
    read = any(point.layer == 0 and point.site != "stream" for point in trace.points)
    overlap = start if read else 0.0 * start
    found = [overlap]
    for layer, points in zip(layers, sites(layers, trace), strict=True):
        for part, site in zip(parts_of(layer), points, strict=False):
            pair = Signal(Kernel(site.signal.diagonal, overlap), 2, width=entering.width)
            if isinstance(part, Residual):
                added, _ = _pair(part.branch, pair)
                overlap = part.skip_scale**2 * overlap + part.branch_scale**2 * added
            else:
                overlap, _ = _pair(part, pair)
            found.append(overlap)
    return found


# --- all layers at once --------------------------------------------------------------------------


def stacked(components: Sequence[Any]) -> Any:
    """One component whose numbers are arrays over `components`, which must be alike in structure.

    Numbers that agree stay as they are.
    """
    first = components[0]
    if isinstance(first, Component):
        changes = {
            f.name: stacked([getattr(c, f.name) for c in components])
            for f in dataclasses.fields(first)  # type: ignore[arg-type]
        }
        return dataclasses.replace(first, **changes)  # type: ignore[type-var]
    if isinstance(first, tuple):
        return tuple(stacked(entries) for entries in zip(*components, strict=True))
    if isinstance(first, Mapping):
        return {name: stacked([c[name] for c in components]) for name in first}
    if isinstance(first, int | float) and any(c != first for c in components):
        return np.array(components, dtype=float)
    return first


def _structure(component: Component) -> Any:
    """What components must share to be stacked."""
    if isinstance(component, Chain):
        return tuple(_structure(part) for part in component.parts)
    if isinstance(component, Residual):
        return (component.label, _structure(component.branch))
    return (type(component), component.label)


def _stack(kernels: Sequence[Kernel]) -> Kernel:
    """Kernels along a new last axis, where the numbers of a stacked component meet them."""
    diagonal = np.array([kernel.diagonal for kernel in kernels], dtype=float)
    pairs = np.array([kernel.pairs for kernel in kernels], dtype=float)
    return Kernel(np.moveaxis(diagonal, 0, -1), np.moveaxis(pairs, 0, -1))


def _interleaved(groups: Sequence[Linearised], order: Array) -> Linearised:
    """Groups of parts, one after the other along the first axis, in the order of the network."""

    def joined(entries: Sequence[Any]) -> Any:
        if isinstance(entries[0], tuple):
            return type(entries[0])(*(joined(field) for field in zip(*entries, strict=True)))
        return np.concatenate(entries)[order]

    return joined(groups)  # type: ignore[no-any-return]


def _linearise(
    part: Component,
    modes: Modes,
    width: Array,
    kernel: Kernel,
    gradient: Kernel,
    overlap: Array,
) -> Linearised:
    """One stacked part, whose signal enters with `kernel` and whose output receives `gradient`."""
    base = modes.of(kernel)
    received = modes.of(gradient) / gradient.diagonal[..., None]
    axes = (1,) * (base.ndim - 1)
    residual = isinstance(part, Residual)
    node = part.branch if isinstance(part, Residual) else part
    skip = np.asarray(part.skip_scale**2 if isinstance(part, Residual) else 0.0)
    scale = np.asarray(part.branch_scale**2 if isinstance(part, Residual) else 1.0)
    attention = _attention_of(node)

    # Rows: unchanged; either mode of the signal a little larger; the logits a little larger.
    steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0]])[: 3 if attention is None else 4]
    nudged = base * (1 + steps.reshape(-1, *axes, 2))
    if attention is not None:
        node = _with_logits(node, 1 + STEP * np.array([0, 0, 0, 1]).reshape(-1, *axes))
    entering = modes.kernel(nudged)
    inner = Trace()
    signal = Signal(entering, modes.seq_len, width=width, spread=entering.scaled(0.0))
    output, back = forward(node, signal, inner)
    carried, added = skip[..., None] * nudged, scale[..., None] * modes.of(output.kernel)
    leaving = carried + added
    response = ratio(leaving[1:] - leaving[0], STEP * leaving[0])

    basis = modes.kernel(np.eye(2).reshape(2, 1, *axes, 2))
    pulled = modes.of(back(Gradient(basis, modes.seq_len)).kernel)
    returned = scale[..., None, None] * np.moveaxis(
        np.broadcast_to(pulled, (2, *leaving.shape)), 0, -1
    )
    sent = np.einsum("...ij,...j->...i", returned, received) + skip[..., None] * received
    # The pass itself took 1/d off for directions a gradient had lost before: only shapes count here.
    size = sent[0] @ modes.average
    one, two = size[..., None], size[..., None, None]
    pull = (returned[0] + skip[..., None, None] * np.eye(2)) / two
    exposure = (sent[1:] - sent[0]) / (STEP * one)

    like = np.ones_like(size)
    gain = scale[..., None, None] * _coherent_gain(node, kernel, overlap, width)
    kappa = (_own_fluctuation(node, inner) * width if residual else 0.0) * like
    up = _addition(carried[0], residual * added[0], skip * like, gain, kappa, width)
    down = _addition(
        skip[..., None] * received / one,
        residual * (returned[0] @ received[..., None])[..., 0] / one,
        skip / size,
        gain / two,
        kappa,
        width,
    )
    variance, moved = 0.0 * like, (np.zeros_like(base), np.zeros_like(base))
    if attention is not None:
        down = _attention_addition(attention, down, returned[0] / two, received, kernel, modes)
        variance = _logit_variance(attention, base, received, modes)
        moved = (response[2], exposure[2])
    response, exposure = (np.moveaxis(entry[:2], 0, -1) for entry in (response, exposure))
    logits = Logits(variance, *moved)
    return _layers_first(Linearised(response, pull, exposure, up, down, logits), base.ndim - 2)


def _addition(
    carried: Array, added: Array, kept: Array, gain: Array, kappa: Array, width: Array
) -> Addition:
    alone = (4 * carried + kappa[..., None] * added) * added / width
    return Addition(carried, added, alone, 0.0 * gain, kept, gain, kappa)


def _attention_addition(
    attention: SelfAttention,
    addition: Addition,
    returned: Array,
    received: Array,
    kernel: Kernel,
    modes: Modes,
) -> Addition:
    """Noise of the gradient that attention sends back, where modes do not fluctuate one by one.

    The output projection's noise, 2 over its fan-in for each mode received, is passed on by every
    path. The token mean that comes back is Gaussian through the value projection, 2/d. What the mean
    sends into the differences (keys, and how often a token is attended to) is in each head one
    vector over tokens, J X W_v u: its squared norm has as many degrees of freedom as the keys and
    features that a^2 sees, and heads average.
    """
    inner, width = attention.heads * attention.d_head, attention.d_model
    stage = returned * (2 / inner * received**2 / modes.count)[..., None, :]
    direct = np.stack([addition.added[..., 0], returned[..., 1, 1] * received[..., 1]], axis=-1)
    alone = (4 * addition.carried * addition.added + 2 * direct**2) / width
    # a_j^2 over its sum is the softmax of the doubled logits (no further than the table goes)
    theta = (kernel.diagonal - kernel.pairs) * kernel.diagonal * width**2
    theta = np.minimum(4 * theta * attention.query * attention.key, THETA_MAX)
    squares = SquareTable.load().at_length(modes.seq_len).single(np.maximum(theta, 0.0)).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    coherent = stage @ np.swapaxes(returned, -1, -2)
    coherent[..., 1, 1] += share * (returned[..., 1, 0] * received[..., 0]) ** 2
    return addition._replace(alone=alone, coherent=coherent)


def _logit_variance(
    attention: SelfAttention, base: Array, received: Array, modes: Modes
) -> Array:
    """Relative variance of |W_k^T W_q x|^2, averaged over heads, and over tokens as gradients do.

    The paths through the logits hold G_ik x_i^T W_q W_k W_k^T W_q^T x_k summed over i, k, a quadratic
    form with one eigenvalue per mode, the product of the signal's and the gradient's.
    """
    weight = base * received
    alike = (weight**2 * modes.count).sum(-1) / (weight * modes.count).sum(-1) ** 2
    return alike * 2 * (1 / attention.d_head + 1 / attention.d_model) / attention.heads


def _attention_of(component: Component) -> SelfAttention | None:
    parts = component.parts if isinstance(component, Chain) else (component,)
    return next((part for part in parts if isinstance(part, SelfAttention)), None)


def _with_logits(component: Component, factor: Array) -> Component:
    """The component with its attention logits' variance changed."""
    if isinstance(component, Chain):
        return Chain(tuple(_with_logits(part, factor) for part in component.parts))
    if isinstance(component, SelfAttention):
        return dataclasses.replace(component, query=component.query * factor)
    return component


def _layers_first(entries: Any, axis: int) -> Any:
    if isinstance(entries, tuple):
        moved = (_layers_first(entry, axis) for entry in entries)
        return type(entries)(*moved) if hasattr(entries, "_fields") else tuple(moved)
    return np.moveaxis(entries, axis, 0)


def ratio(numerator: Array, denominator: Array) -> Array:
    """A ratio; 0 where there is no such mode (tokens identical, or of zero sum)."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _own_fluctuation(branch: Component, inner: Trace) -> Array:
    """Relative variance of |branch|^2 that its own matrices add, the same in both directions.

    A Gaussian matrix onto w features adds 2/w; an activation makes it (kurtosis - 1)/w. Backward the
    kurtosis is that of slope times Gaussian, equal for functions of degree 1 (at unit variance 6.3
    against 7.2 forward for GELU). Dropout's masks are fresh for every token and average out.
    """
    leaves = branch.parts if isinstance(branch, Chain) else (branch,)
    last = max(i for i, leaf in enumerate(leaves) if not isinstance(leaf, Dropout))
    reached = inner.points[last].signal
    assert reached.spread is not None
    moment = reached.second_moment().diagonal
    return (reached.spread.diagonal / moment**2)[0]


# --- pairs of tokens with nothing in common but the weights --------------------------------------


def _coherent_gain(component: Component, kernel: Kernel, overlap: Array, width: Array) -> Array:
    """Factor (..., 2, 2) on a small overlap between two modes, the same in both directions."""
    _, across = _pair(component, Signal(Kernel(kernel.diagonal, overlap), 2, width=width))
    if _attention_of(component) is not None:
        within = 0.0 * across  # differences between tokens do not survive averaging over them
    else:
        _, within = _pair(component, Signal(kernel, 2, width=width))
    within, across = np.broadcast_arrays(within, across)
    return np.stack([np.stack([across, within], -1), np.stack([within, within], -1)], -1)


def _pair(component: Component, pair: Signal) -> tuple[Array, Array]:
    """Covariance of two tokens of different sequences at the output, and its pullback's factor."""
    factor = np.ones_like(pair.kernel.pairs)
    for part in component.parts if isinstance(component, Chain) else (component,):
        if isinstance(part, SelfAttention):
            # Weights sum to 1 within each sequence, and all pairs across have one covariance.
            inner = part.heads * part.d_head
            pair = Signal(pair.kernel.scaled(part.d_model * part.value), 2, width=inner)
            factor = factor * inner * part.value
        elif isinstance(part, Leaf):
            pair, pullback = part.forward(pair)
            unit = Gradient(Kernel(np.ones_like(factor), np.ones_like(factor)), 2)
            factor = factor * pullback(unit).gradient.kernel.pairs
        else:
            raise MomentsError(f"no overlap of sequences through a {type(part).__name__}")
    return pair.kernel.pairs, factor
