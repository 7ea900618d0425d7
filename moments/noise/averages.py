"""Moments resolved by token, averaged over tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..engine.propagate import Point, Trace
from ..engine.state import Kernel, Signal


class Averages(NamedTuple):
    """The points of a trace and what its cross-attention reads, averaged over tokens."""

    points: list[Point]
    memory: Signal | None

    def stream(self) -> list[Point]:
        """Those of the residual stream."""
        return [point for point in self.points if point.site == "stream"]


def averaged(trace: Trace) -> Averages:
    """The average moments of a trace resolved by token, at every point.

    Of tokens of one sequence where a kernel holds several.
    """
    found = []
    for point in trace.points:
        received = point.gradient
        if received is not None:
            received = received.with_kernel(_averaged(received.kernel, received.seq_len))
        kernel = _averaged(point.signal.kernel, point.signal.seq_len)
        signal = Signal(kernel, point.signal.seq_len, width=point.signal.width)
        found.append(Point(point.layer, point.site, signal, received))
    memory = trace.memory
    if memory is not None:
        kernel = _averaged(memory.second_moment(), memory.seq_len)
        memory = Signal(kernel, memory.seq_len, width=memory.width)
    return Averages(found, memory)


def _averaged(kernel: Kernel, seq_len: int) -> Kernel:
    count = kernel.pairs.shape[-1]
    if count > seq_len > 1:
        each = np.arange(count).reshape(-1, seq_len)
        blocks = [kernel.pairs[..., rows[:, None], rows] for rows in each]
        kernel = Kernel.of_matrix(np.mean(blocks, axis=0))
    return Kernel(kernel.mean_diagonal(), kernel.mean_pairs())
