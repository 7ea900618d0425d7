"""A network about its mean: how small fluctuations of the moments travel through every part.

No law is stated here a second time: responses come from the components themselves, evaluated for
all layers at once at slightly changed moments.

See docs/theory/band.md, How it travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import Component, Layer
from ..engine.modes import Branch, Modes, Passes
from ..engine.sensitivity import ratio
from ..engine.state import Array, Kernel, Signal
from .alike import Alike, part_starts, parts_of
from .block_noise import (
    Addition,
    addition,
    attending,
    attention_addition,
    logit_variance,
    one_after_the_other,
    own_fluctuation,
)

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
    layers: Sequence[Layer], alike: Alike, modes: Modes, overlaps: Sequence[Array]
) -> Linearised:
    """Every part of every layer, in order, entries (parts, ..., 2[, 2]).

    Args:
        layers: the stack of layers.
        alike: what both passes through them saw.
        modes: of the tokens.
        overlaps: covariance of tokens of different sequences before every part.
    """
    width, starts = alike.entering.width, part_starts(layers)
    groups: dict[Any, list[tuple[int, int]]] = {}
    for index, layer in enumerate(layers):
        for position, part in enumerate(parts_of(layer)):
            groups.setdefault(part.structure(), []).append((index, position))
    found: list[Linearised] = []
    order: list[int] = []
    for places in groups.values():
        here = [starts[index] + position for index, position in places]
        found.append(
            _linearise(
                stacked([parts_of(layers[index])[position] for index, position in places]),
                modes,
                width,
                _stack([alike.sites[index][position][0] for index, position in places]),
                _stack([alike.sites[index][position + 1][1] for index, position in places]),
                np.stack([overlaps[k] for k in here], axis=-1),
                _by_layer(alike.memory),
            )
        )
        order += here
    return _interleaved(found, np.argsort(order))


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


def _by_layer(memory: Signal | None) -> Signal | None:
    """What cross-attention reads, with a last axis where stacked layers have theirs."""
    if memory is None:
        return None
    kernel, spread = memory.second_moment(), memory.spread
    one = [None if k is None else _stack([k]) for k in (kernel, spread)]
    assert one[0] is not None
    return Signal(one[0], memory.seq_len, width=memory.width, spread=one[1])


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
    memory: Signal | None,
) -> Linearised:
    """One stacked part, whose signal enters with `kernel` and whose output receives `gradient`."""
    base, received = np.broadcast_arrays(
        modes.of(kernel), ratio(modes.of(gradient), gradient.diagonal[..., None])
    )
    axes = (1,) * (base.ndim - 1)
    attention = part.self_attention

    # Rows: unchanged; either mode of the signal a little larger; the logits a little larger.
    steps = STEP * np.array([[0, 0], [1, 0], [0, 1], [0, 0]])[: 3 if attention is None else 4]
    nudged = base * (1 + steps.reshape(-1, *axes, 2))
    if attention is not None:
        part = part.with_logits(1 + STEP * np.array([0, 0, 0, 1]).reshape(-1, *axes))
    passes = Passes(modes, width, memory, len(axes))
    branches = part.alike_branches(passes, nudged, kernel, overlap)
    leaving, returned = part.about_mean(passes, nudged, branches)
    response = ratio(leaving[1:] - leaving[0], STEP * leaving[0])

    sent = np.einsum("...ij,...j->...i", returned, received)
    # The pass itself took 1/d off for directions that gradients lose: only shapes count here.
    size = sent[0] @ modes.average
    one, two = size[..., None], size[..., None, None]
    pull, exposure = ratio(returned[0], two), ratio(sent[1:] - sent[0], STEP * one)

    moments = leaving[0], ratio(sent[0], one), received, size
    up, down = _additions(part, attention, branches, moments, modes, width)
    variance, moved = 0.0 * np.ones_like(size), (np.zeros_like(base), np.zeros_like(base))
    if attention is not None:
        variance = variance + logit_variance(attention, base, received, modes)
        moved = (response[2], exposure[2])
    response, exposure = (np.moveaxis(entry[:2], 0, -1) for entry in (response, exposure))
    whole_part = Linearised(response, pull, exposure, up, down, Logits(variance, *moved))
    found: Linearised = _layers_first(whole_part, base.ndim - 2)
    return found


def _additions(
    part: Component,
    attention: Any | None,
    branches: Sequence[Branch],
    moments: tuple[Array, Array, Array, Array],
    modes: Modes,
    width: Array,
) -> tuple[Addition, Addition]:
    """What a part adds at random to the signal and to the gradient.

    Args:
        part: of a layer.
        attention: what it has of it.
        branches: of the part.
        moments: modes of the signal that leaves, of the gradient sent over its variance and of
            that received, and the former's variance per unit of the latter's.
        modes: of the tokens.
        width: d_model.
    """
    leaving, sent, received, size = moments
    like = np.ones_like(size)
    random = part.adds
    added = [random * one.added[0] for one in branches]
    back = [random * (one.returned[0] @ received[..., None])[..., 0] for one in branches]
    back = [ratio(entry, size[..., None]) for entry in back]
    carried, carried_back = leaving - sum(added), sent - sum(back)
    if not random:
        carried, carried_back = 0.0 * leaving, 0.0 * sent
    # what a kernel keeps: of a bottom-to-top connection on average over the modes
    kept = ratio(carried_back @ modes.average, received @ modes.average) * size
    above, below = carried, carried_back
    up, down = [], []
    for branch, own, own_back in zip(branches, added, back, strict=True):
        kappa = (own_fluctuation(branch.record) * width if random else 0.0) * like
        gain = branch.gain * like[..., None, None]
        up.append(addition(above, own, kept, gain, kappa, width))
        crossed = branch.record.component.reads
        if crossed is not None:
            (memory,) = (one.memory for one in branch.record.leaves() if one.memory is not None)
            kappa = crossed.back_kappa(memory.seq_len) * like
        returned_gain = ratio(gain, size[..., None, None])
        plain = addition(below, own_back, ratio(kept, size), returned_gain, kappa, width)
        if attention is not None and branch.record.component.self_attention is not None:
            tokens = attending(branch.record)
            returned = ratio(branch.returned[0], size[..., None, None])
            plain = attention_addition(attention, plain, returned, received, tokens, modes)
        down.append(plain)
        above, below = above + own, below + own_back
    return one_after_the_other(up, modes), one_after_the_other(down, modes)


def _layers_first(entries: Any, axis: int) -> Any:
    if isinstance(entries, tuple):
        return type(entries)(*(_layers_first(entry, axis) for entry in entries))
    return np.moveaxis(entries, axis, 0)
