"""A network about its mean: how small fluctuations of the moments travel through every part.

No law is stated here a second time: responses come from the components themselves, evaluated for
all layers at once at slightly changed moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .block_noise import (
    Addition,
    Modes,
    addition,
    attending,
    attention_addition,
    attention_of,
    coherent_gain,
    logit_variance,
    own_fluctuation,
    parts_of,
    ratio,
    sites,
    with_logits,
)
from .composition import Chain, Component, Layer, Residual
from .propagate import Trace, forward
from .state import Array, Gradient, Kernel, Signal

STEP = 1e-5
"""Relative step of the one-sided differences, whose error is of this order."""


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
        overlaps: covariance of tokens of different sequences before every part.
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
                _stack([points[index][position][0] for index, position in places]),
                _stack([points[index][position + 1][1] for index, position in places]),
                np.stack([overlaps[k] for k in here], axis=-1),
            )
        )
        order += here
    return _interleaved(found, np.argsort(order))


def part_starts(layers: Sequence[Layer]) -> list[int]:
    """Number of parts before each layer, and in all: where the points of the stream lie."""
    return [0, *np.cumsum([len(parts_of(layer)) for layer in layers]).tolist()]


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

    def along(entries: list[Array]) -> Array:
        shapes = {np.shape(entry) for entry in entries}
        if len(shapes) > 1:
            shape = np.broadcast_shapes(*shapes)
            entries = [np.broadcast_to(entry, shape) for entry in entries]
        return np.moveaxis(np.array(entries, dtype=float), 0, -1)

    return Kernel(along([k.diagonal for k in kernels]), along([k.pairs for k in kernels]))


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
    base, received = np.broadcast_arrays(
        modes.of(kernel), modes.of(gradient) / gradient.diagonal[..., None]
    )
    axes = (1,) * (base.ndim - 1)
    residual = isinstance(part, Residual)
    node = part.branch if isinstance(part, Residual) else part
    skip = np.asarray(part.skip_scale**2 if isinstance(part, Residual) else 0.0)
    scale = np.asarray(part.branch_scale**2 if isinstance(part, Residual) else 1.0)
    attention = attention_of(node)

    # Rows: unchanged; either mode of the signal a little larger; the logits a little larger.
    steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0]])[: 3 if attention is None else 4]
    nudged = base * (1 + steps.reshape(-1, *axes, 2))
    if attention is not None:
        node = with_logits(node, 1 + STEP * np.array([0, 0, 0, 1]).reshape(-1, *axes))
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
    # The pass itself took 1/d off for directions that gradients lose: only shapes count here.
    size = sent[0] @ modes.average
    one, two = size[..., None], size[..., None, None]
    pull = (returned[0] + skip[..., None, None] * np.eye(2)) / two
    exposure = (sent[1:] - sent[0]) / (STEP * one)

    like = np.ones_like(size)
    gain = scale[..., None, None] * coherent_gain(node, kernel, overlap, width)
    kappa = (own_fluctuation(node, inner) * width if residual else 0.0) * like
    up = addition(carried[0], residual * added[0], skip * like, gain, kappa, width)
    down = addition(
        skip[..., None] * received / one,
        residual * (returned[0] @ received[..., None])[..., 0] / one,
        skip / size,
        gain / two,
        kappa,
        width,
    )
    variance, moved = 0.0 * like, (np.zeros_like(base), np.zeros_like(base))
    if attention is not None:
        tokens = attending(node, inner, kernel)
        down = attention_addition(attention, down, returned[0] / two, received, tokens, modes)
        variance = logit_variance(attention, base, received, modes)
        moved = (response[2], exposure[2])
    response, exposure = (np.moveaxis(entry[:2], 0, -1) for entry in (response, exposure))
    whole = Linearised(response, pull, exposure, up, down, Logits(variance, *moved))
    found: Linearised = _layers_first(whole, base.ndim - 2)
    return found


def _layers_first(entries: Any, axis: int) -> Any:
    if isinstance(entries, tuple):
        return type(entries)(*(_layers_first(entry, axis) for entry in entries))
    return np.moveaxis(entries, axis, 0)
