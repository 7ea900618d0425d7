"""Attention to the keys and values of an earlier layer.

The heads attend to the tokens of that layer by its key and value matrices. In the backward pass the
earlier layer collects the gradients of all layers that read its keys and values: these have
different output projections, so the gradients are independent and their moments add. See
docs/theory/attention.md, Keys and values of an earlier layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...engine.composition import Component
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap
from ...engine.response import sum_of
from ...engine.state import Array, Gradient, Signal
from ...engine.trace import Record, Run

SHARED_NAMES = ("key", "value")
"""Prefixes of the names of the earlier layer's parameters: matrices, biases, gains of norms."""

Named = Callable[[], Mapping[str, Array]]


@dataclass(frozen=True)
class AroundHeads(Component):
    """Base of components around self-attention heads.

    Attributes:
        heads: a `SelfAttention` or `NormalizedAttention`.
    """

    heads: Any

    mixes_tokens = True

    @property
    def label(self) -> str:  # type: ignore[override]
        label: str = self.heads.label
        return label

    @property
    def normalises(self) -> bool:
        return bool(self.heads.normalises)

    @property
    def padding(self) -> Any:
        return self.heads.padding

    def without_positions(self) -> Self:
        return dataclasses.replace(self, heads=self.heads.without_positions())

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        result: UnsharedOverlap = self.heads.unshared_overlap(record, at, walk)
        return result


@dataclass(frozen=True)
class SharedKeys(AroundHeads):
    """Self-attention that shares keys and values with other layers.

    Attributes:
        source: layer whose keys and values are read; None: this one, whose are read by others.
    """

    source: int | None = None

    def propagate(self, signal: Signal, run: Run) -> Record:
        memory = None
        if self.source is None:
            run.kept[SHARED_NAMES, run.layer] = signal
        else:
            memory = run.kept[SHARED_NAMES, self.source]
        output, pullback = self.heads.attend(signal, memory or signal)
        return run.record_forward(Record(self, run.layer, signal, output, (), pullback, memory))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        pulled, to_memory = record.pullback(gradient)
        weights, overlaps = pulled.weights, pulled.overlaps
        if self.source is not None:
            run.send((SHARED_NAMES, self.source), (to_memory.kernel, weights, overlaps))
            pulled.weights = functools.partial(_without_source, weights)
            pulled.overlaps = functools.partial(_without_source, overlaps)
        else:
            readers = run.sent.pop((SHARED_NAMES, record.layer), [])
            kernels = pulled.gradient.kernel, to_memory.kernel, *(k for k, _, _ in readers)
            pulled.gradient = pulled.gradient.with_kernel(sum_of(kernels))
            pulled.weights = functools.partial(_with_readers, weights, [w for _, w, _ in readers])
            pulled.overlaps = functools.partial(_with_readers, overlaps, [o for *_, o in readers])
        return record.completed(gradient, pulled.gradient, (), pulled, to_memory)


def _of_source(name: str) -> bool:
    return name.partition(".")[0] in SHARED_NAMES


def _without_source(named: Named) -> Mapping[str, Array]:
    """Gradient norms of the parameters that do not belong to the earlier layer."""
    return {name: norm for name, norm in named().items() if not _of_source(name)}


def _with_readers(named: Named, readers: list[Named]) -> Mapping[str, Array]:
    """Gradient norms of the earlier layer with those from the layers that read its keys."""
    total = dict(named())
    for reader in readers:
        for name, norm in reader().items():
            if _of_source(name):
                total[name] = total[name] + norm
    return total
