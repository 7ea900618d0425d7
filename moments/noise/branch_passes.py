"""What every branch of a part does to the modes of tokens alike, on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..engine.bottom_to_top import BottomToTop
from ..engine.composition import Chain, Component, Residual
from ..engine.propagate import Record, forward
from ..engine.state import Array, Gradient, Kernel, Signal
from .block_noise import Modes
from .branches import paths
from .sequence_overlap import coherent_gain


class Branch(NamedTuple):
    """What one branch of a part adds to the input, on its own.

    Attributes:
        path: its leaves.
        record: of them.
        entering: kernel of the tokens that enter it.
        added: (rows, ..., 2) modes of the signal.
        returned: (rows, ..., 2, 2) what it does to the gradient's modes.
        gain: (..., 2, 2) factor on the overlap of different modes.
    """

    path: Chain
    record: Record
    entering: Kernel
    added: Array
    returned: Array
    gain: Array


class Passes:
    """Passes through components at slightly changed moments, all layers and changes at once."""

    def __init__(self, modes: Modes, width: Array, memory: Signal | None, axes: int) -> None:
        self.modes, self.width, self.memory = modes, width, memory
        self.basis = modes.kernel(np.eye(2).reshape(2, 1, *(1,) * axes, 2))

    def signal(self, kernel: Kernel) -> Signal:
        return Signal(kernel, self.modes.seq_len, width=self.width, spread=kernel.scaled(0.0))

    def through(self, node: Component, signal: Signal, shape: Any) -> tuple[Signal, Array, Record]:
        """Output, map of the gradient's modes (rows, ..., 2, 2), and the record."""
        output, record = forward(node, signal, self.memory)
        sent = record.backward(Gradient(self.basis, self.modes.seq_len)).gradient_sent
        pulled = np.broadcast_to(self.modes.of(sent.kernel), (2, *shape))
        return output, np.moveaxis(pulled, 0, -1), record


def branches_of(
    part: Component, passes: Passes, nudged: Array, kernel: Kernel, overlap: Array
) -> list[Branch]:
    """The branches of a part, with a residual's scale or a bottom-to-top connection's."""
    modes, shape, found = passes.modes, nudged.shape, []
    if isinstance(part, BottomToTop):
        return _bottom_to_top(part, passes, nudged, kernel, overlap)
    node = part.branch if isinstance(part, Residual) else part
    scale = np.asarray(part.branch_scale**2 if isinstance(part, Residual) else 1.0)
    signal = passes.signal(modes.kernel(nudged))
    for path in paths(node):
        output, returned, inner = passes.through(path, signal, shape)
        gain = scale[..., None, None] * coherent_gain(path, kernel, overlap, passes.width)
        added = scale[..., None] * modes.of(output.kernel)
        found.append(Branch(path, inner, kernel, added, scale[..., None, None] * returned, gain))
    return found


def _bottom_to_top(
    node: BottomToTop, passes: Passes, nudged: Array, kernel: Kernel, overlap: Array
) -> list[Branch]:
    """Attention adds to the input on its way around the norm, the feed-forward block behind it.

    What attention's realised output moves in the feed-forward block's moments is left out.
    """
    modes, shape = passes.modes, nudged.shape
    attention, ffn = node.attention, node.ffn
    signal = passes.signal(modes.kernel(nudged))
    output, back_attention, inner = passes.through(attention.branch, signal, shape)
    between, _, _ = passes.through(attention, signal, shape)
    normed, back_norm, _ = passes.through(node.norm, between, shape)
    hidden, back_ffn, inner_ffn = passes.through(ffn.branch, normed, shape)
    scale, ffn_scale = np.asarray(attention.branch_scale**2), np.asarray(ffn.branch_scale**2)
    skip, ffn_skip = np.asarray(attention.skip_scale**2), np.asarray(ffn.skip_scale**2)
    carried = scale * ffn_skip * normed.kernel.diagonal / between.kernel.diagonal
    deep = ffn_scale[..., None, None] * back_norm @ back_ffn
    around = ffn_skip[..., None, None] * back_norm + deep
    inside, behind = attention.branch, Chain((node.norm, ffn.branch))
    reached = Kernel(between.kernel.diagonal[0], between.kernel.pairs[0])
    gains = [
        coherent_gain(path, entering, overlap, passes.width)
        for path, entering in ((inside, kernel), (behind, reached))
    ]
    return [
        Branch(
            paths(inside)[0],
            inner,
            kernel,
            carried[..., None] * modes.of(output.kernel),
            scale[..., None, None] * back_attention @ around,
            carried[0][..., None, None] * gains[0],
        ),
        Branch(
            paths(ffn.branch)[0],
            inner_ffn,
            reached,
            ffn_scale[..., None] * modes.of(hidden.kernel),
            skip[..., None, None] * deep,
            (skip * ffn_scale)[..., None, None] * gains[1],
        ),
    ]
