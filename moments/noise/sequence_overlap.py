"""What several sequences share of one draw: overlaps of their tokens, and what carries them.

Cross-attention asks nothing of a sequence beyond its own memory. Memories of texts read by one
embedding are taken to share what two of their own tokens do; those of other inputs, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.bottom_to_top import BottomToTop
from ..engine.composition import Chain, Component, Layer, Leaf, Parallel, Residual
from ..engine.propagate import Trace
from ..engine.state import Array, Gradient, Kernel, Signal
from ..errors import MomentsError
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.normalized import NormalizedAttention
from ..transfer.attention.self_attention import SelfAttention
from .averages import Averages
from .branches import attention_of, cross_attention_of, parts_of, paths, values_normalised


def coherent_gain(component: Component, kernel: Kernel, overlap: Array, width: Array) -> Array:
    """Factor (..., 2, 2) on a small overlap between two modes, the same in both directions.

    Args:
        component: a branch, or a whole part of a layer.
        kernel: of the tokens that enter.
        overlap: covariance of tokens of different sequences.
        width: d_model.
    """
    if isinstance(component, BottomToTop):
        bypass = bypassed(component, Signal(kernel, 2, width=width))
        total = _gain(component, kernel, overlap, width)
        return total - ((1 + bypass) ** 2)[..., None, None]
    return sum(_gain(path, kernel, overlap, width) for path in paths(component))


def _gain(component: Component, kernel: Kernel, overlap: Array, width: Array) -> Array:
    tokens = Signal(Kernel(kernel.diagonal, overlap), 2, width=width)
    _, across = _pair(component, tokens, None)
    if attention_of(component) is None and cross_attention_of(component) is None:
        _, within = _pair(component, Signal(kernel, 2, width=width), None)
    elif isinstance(component, BottomToTop):
        bypass = bypassed(component, tokens)
        within = (1 + bypass) ** 2  # what the skip connections carry
    else:
        within = 0.0 * across  # differences between tokens do not survive averaging over them
    within, across = np.broadcast_arrays(within, across)
    return np.stack([np.stack([across, within], -1), np.stack([within, within], -1)], -1)


def bypassed(node: BottomToTop, pair: Signal) -> Array:
    """Amplitude with which a layer's input is in what it is added to; see `propagate`."""
    between, _ = _pair(node.attention, pair, None)
    entering, _ = _pair(node.norm, between, None)
    carried = np.sqrt(entering.kernel.diagonal / between.kernel.diagonal)
    return np.asarray(carried * node.attention.skip_scale * node.ffn.skip_scale)


def _pair(component: Any, pair: Signal, memory: Kernel | None) -> tuple[Signal, Array]:
    """Two tokens of different sequences at the output, and their pullback's factor.

    Args:
        component: any.
        pair: the two tokens, as a signal of two alike.
        memory: variance of what cross-attention reads, and covariance between sequences.
    """
    one = 1.0 + 0.0 * pair.kernel.pairs
    if isinstance(component, Chain):
        factor = one
        for part in component.parts:
            pair, own = _pair(part, pair, memory)
            factor = factor * own
        return pair, factor
    if isinstance(component, Parallel):
        found = [_pair(branch, pair, memory) for branch in component.branches]
        kernel, factor = found[0][0].kernel, found[0][1]
        for other, own in found[1:]:
            kernel, factor = kernel + other.kernel, factor + own
        return Signal(kernel, 2, width=found[0][0].width), factor
    if isinstance(component, Residual):
        branch, own = _pair(component.branch, pair, memory)
        skip, scale = component.skip_scale**2, component.branch_scale**2
        kernel = pair.kernel.mixed(skip, branch.kernel, scale)
        return Signal(kernel, 2, width=pair.width), skip + scale * own
    if isinstance(component, BottomToTop):
        inner = Chain((component.attention, component.norm, component.ffn))
        output, own = _pair(inner, pair, memory)
        both = 1 + 2 * bypassed(component, pair)
        return Signal(output.kernel + pair.kernel.scaled(both), 2, width=pair.width), own + both
    if isinstance(component, NormalizedAttention):
        return _pair(Chain(values_normalised(component)), pair, memory)
    if isinstance(component, SelfAttention):
        # Weights sum to 1 within each sequence, and all pairs across have one covariance.
        inner_width = component.heads * component.d_head
        kernel = pair.kernel.scaled(component.d_model * component.value)
        return Signal(kernel, 2, width=inner_width), one * inner_width * component.value
    if isinstance(component, CrossAttention):
        inner_width = component.heads * component.d_head
        read = Kernel(pair.kernel.diagonal, 0.0 * one) if memory is None else memory
        kernel = read.scaled(component.memory_width * component.value)
        return Signal(Kernel(kernel.diagonal * one, kernel.pairs * one), 2, width=inner_width), (
            0.0 * one
        )
    if isinstance(component, Leaf):
        output, pullback = component.forward(pair)
        return output, one * pullback(Gradient(Kernel(one, one), 2)).gradient.kernel.pairs
    raise MomentsError(f"no overlap of sequences through a {type(component).__name__}")


def sequence_overlaps(layers: Sequence[Layer], trace: Trace | Averages) -> list[Array]:
    """Covariance of two tokens of different sequences before every part and after the last.

    Independent inputs start at 0, texts read by one embedding as two tokens of one sequence. What
    grows from there is the mean of the activations, which all tokens share.
    """
    entering = trace.stream()[0].signal
    start = entering.kernel.pairs
    read = any(point.layer == 0 and point.site != "stream" for point in trace.points)
    overlap = start if read else 0.0 * start
    memory = None
    if trace.memory is not None:
        tokens = trace.memory.second_moment()
        memory = Kernel(tokens.mean_diagonal(), tokens.mean_pairs() * float(read))
    found = [overlap]
    for layer, points in zip(layers, sites(layers, trace), strict=True):
        for part, (kernel, _) in zip(parts_of(layer), points, strict=False):
            pair = Signal(Kernel(0.0 * overlap + kernel.diagonal, overlap), 2, width=entering.width)
            overlap = _pair(part, pair, memory)[0].kernel.pairs
            found.append(overlap)
    return found


def sites(layers: Sequence[Layer], trace: Trace | Averages) -> list[list[tuple[Kernel, Kernel]]]:
    """Kernels of signal and gradient before, between and after the parts of every layer."""
    by_place = {(point.layer, point.site): point for point in trace.points}
    stream = trace.stream()
    found = []
    for index, layer in enumerate(layers):
        inner = [by_place[layer.number, part.label] for part in parts_of(layer)]
        points = [stream[index], *inner]
        found.append([(p.signal.kernel, p.gradient.kernel) for p in points if p.gradient])
    return found
