"""The engine: one pass forward through a declaration, and the tree of records that it leaves."""

from __future__ import annotations

from .composition import Component
from .state import Signal
from .trace import Point, Record, Run, Trace

__all__ = ["Point", "Record", "Run", "Trace", "forward"]


def forward(
    component: Component, signal: Signal, memory: Signal | None = None
) -> tuple[Signal, Record]:
    """Carry a signal through a declaration.

    Args:
        component: any.
        signal: what enters.
        memory: what cross-attention reads.

    Returns:
        The output, and the record of the pass, whose `backward` carries a gradient at the output
        back to the input.
    """
    record = component.propagate(signal, Run(memory))
    return record.output, record
