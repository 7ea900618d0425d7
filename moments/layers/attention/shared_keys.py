"""Attention to keys and values that an earlier layer has made.

Its heads ask the tokens that layer attended to, by that layer's matrices of keys and values. On the
way back the layer that made them gathers what all readers send, to its tokens and its matrices:
behind output projections of their own, their gradients are independent, and moments add. See
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

MADE = ("key", "value")
"""How names of what the earlier layer has begin: matrices, biases and norms' gains."""

Named = Callable[[], Mapping[str, Array]]


@dataclass(frozen=True)
class AroundHeads(Component):
    """What an attention says of itself however its keys and values are made.

    Attributes:
        heads: a `SelfAttention`, or one with normalised values.
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

    def unplaced(self) -> Self:
        return dataclasses.replace(self, heads=self.heads.unplaced())

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        result: UnsharedOverlap = self.heads.unshared_overlap(record, at, walk)
        return result


@dataclass(frozen=True)
class SharedKeys(AroundHeads):
    """Self-attention whose keys and values later layers read, or are read of an earlier one.

    Attributes:
        source: layer that made the keys and values; None: this one, for others to read.
    """

    source: int | None = None

    def propagate(self, signal: Signal, run: Run) -> Record:
        memory = None
        if self.source is None:
            run.kept[MADE, run.layer] = signal
        else:
            memory = run.kept[MADE, self.source]
        output, pullback = self.heads.attend(signal, memory or signal)
        return run.passed(Record(self, run.layer, signal, output, (), pullback, memory))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        pulled, to_memory = record.pullback(gradient)
        weights, overlaps = pulled.weights, pulled.overlaps
        if self.source is not None:
            run.send((MADE, self.source), (to_memory.kernel, weights, overlaps))
            pulled.weights = functools.partial(_asked, weights)
            pulled.overlaps = functools.partial(_asked, overlaps)
        else:
            sent = run.sent.pop((MADE, record.layer), [])
            kernels = pulled.gradient.kernel, to_memory.kernel, *(one for one, *_ in sent)
            pulled.gradient = pulled.gradient.with_kernel(sum_of(kernels))
            pulled.weights = functools.partial(_gathered, weights, [one for _, one, _ in sent])
            pulled.overlaps = functools.partial(_gathered, overlaps, [one for *_, one in sent])
        return record.completed(gradient, pulled.gradient, (), pulled, to_memory)


def _made(name: str) -> bool:
    return name.partition(".")[0] in MADE


def _asked(named: Named) -> Mapping[str, Array]:
    return {name: norm for name, norm in named().items() if not _made(name)}


def _gathered(named: Named, others: list[Named]) -> Mapping[str, Array]:
    total = dict(named())
    for one in others:
        for name, norm in one().items():
            if _made(name):
                total[name] = total[name] + norm
    return total
