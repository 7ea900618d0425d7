"""Attention to keys and values of earlier layers, and values of other sources.

With shared keys, the heads attend to the tokens of an earlier layer by its key and value matrices.
In the backward pass that layer collects the gradients of all layers that read its keys and values:
these have different output projections, so the gradients are independent and their moments add.

Mixed values are v = a W_v x + b v_1 + c g e; v_1 are the first layer's values, e rows of a token
table with gates g. The three matrices are independent, so the values' kernel is the sum of three
kernels, and the gradient of each source is that of the values times its squared factor; v_1 and e
do not enter the logits. The kernel of gated rows is a product, whose derivative (`by_law`) gives
the gate's gradient. See docs/theory/attention.md, Keys and values of an earlier layer, and Values
of other sources.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine import laws
from ...engine.composition import PullbackResult, added
from ...engine.laws import Layout
from ...engine.response import sum_of
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from ...engine.state import Values as Norms
from ...engine.trace import Record, Run
from ...model.values import FIRST, ROWS, Values
from ..by_law import LawLeaf
from .projections import biased
from .self_attention import AroundHeads, SelfAttention, attended

SHARED_NAMES = ("key", "value")
"""Prefixes of the names of the earlier layer's parameters: matrices, biases, gains of norms."""

Named = Callable[[], Mapping[str, Array]]


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


# --- values of other sources ----------------------------------------------------------------------


@dataclass(frozen=True)
class MixedValues(AroundHeads):
    """Self-attention with values of several sources.

    Attributes:
        heads: the attention, with the variance of W_v.
        values: the factors of the sources.
        first: whether this is the first layer.
        keeps: whether later layers use this layer's values.
        gates: number of value heads, each with a gate.
    """

    heads: SelfAttention
    values: Values
    first: bool
    keeps: bool
    gates: int

    @property
    def _own(self) -> float:
        """Squared factor of W_v x, which is also v_1 in the first layer."""
        return (self.values.own + (self.values.first if self.first else 0.0)) ** 2

    def _unit(self, value: Any, **changes: Any) -> SelfAttention:
        return dataclasses.replace(self.heads, value=value, value_bias=0.0, **changes)

    def propagate(self, signal: Signal, run: Run) -> Record:
        leaf, values, tokens = self.heads, self.values, signal.second_moment()
        gain = leaf.d_model * leaf.value
        own = tokens.scaled(gain)
        bias, pair_bias = own.lift(leaf.value_bias)
        own = Kernel(own.diagonal + bias, own.off_diagonal + pair_bias, own.resolved)
        if self.keeps:
            run.kept[FIRST] = own
        others, rows = [], None
        if np.any(leaf.value_bias):
            others.append(own.mixed(self._own, tokens, -self._own * gain))
        if values.first and not self.first:
            others.append(run.kept[FIRST].scaled(values.first**2))
        if values.table:
            table, rows = self._rows(signal, run.kept[ROWS])
            others.append(table.kernel.scaled(values.table**2))
        total = _sum(signal, self._own * gain, others)
        # the summed values are the input of a matrix of unit gain
        pullback = attended(self._unit(1.0 / leaf.d_model), signal, signal, total, self._own * gain)
        unshared = [k.mean_diagonal() - k.mean_off_diagonal() for k in (own, total.kernel)]
        pullback.aligned = ratio_or_zero(unshared[0] * self._own, unshared[1])
        both = pullback, rows
        return run.record_forward(Record(self, run.layer, signal, pullback.output, (), both))

    def _rows(self, signal: Signal, same_word: Kernel) -> Any:
        """Moments of the table's rows times their gates, and the backward map."""
        values, width = self.values, int(self.heads.value_width)
        rows = Layout.of(signal.kernel, signal.seq_len).array(same_word)
        matrices = [laws.LawMatrix("value_table", 1, width, values.table_variance)]
        if values.gate is not None:
            gate = values.gate, self.gates, values.gate_variance
            matrices.append(laws.LawMatrix("value_gate", *gate))
        law = functools.partial(_looked_up, rows, values.gate is not None)
        return LawLeaf("", law, tuple(matrices), width, signal.seq_len, False).forward(signal)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        leaf, values, length = self.heads, self.values, gradient.seq_len
        attention, rows = record.pullback
        query, key, sides = attention._paths(gradient.kernel)
        at_values = sides.value.scaled(leaf.d_model / leaf.value_width)
        from_later = run.sent.pop(FIRST, []) if self.keeps else []
        own = sum_of([at_values.scaled(self._own), *from_later])
        gain = leaf.value_width * leaf.value
        cross = sides.cross.scaled(self._own * leaf.d_model * leaf.value)
        parts = [query, key, cross, own.scaled(gain)]
        if values.first and not self.first:
            run.send(FIRST, at_values.scaled(values.first**2))
        table: PullbackResult | None = None
        if rows is not None:
            table = rows(Gradient(at_values.scaled(values.table**2), length))
            parts.append(table.gradient.kernel)
        pulled = attention._pulled(sum_of(parts), gradient, sides)
        pulled.weights = functools.partial(self._weights, pulled.weights, record.input, own, table)
        return record.completed(gradient, pulled.gradient, (), pulled)

    def _weights(
        self, heads: Callable[[], Norms], signal: Signal, own: Kernel, table: PullbackResult | None
    ) -> Norms:
        """Squared gradient norms; `own` is the gradient's kernel at W_v x."""
        leaf, result = self.heads, dict(heads())
        of_values = (signal.second_moment() * own).total(signal.seq_len)
        result["value"] = leaf.d_model * leaf.value_width * of_values
        if "value" in biased(leaf.has_bias):
            result["value.bias"] = leaf.value_width * own.total(signal.seq_len)
        return result if table is None else result | dict(table.weights())


def _sum(signal: Signal, factor: Any, others: list[Kernel]) -> Signal:
    """Sum of tokens, with their kernel times a factor, and of independent Gaussian sources."""
    varies = signal.fluctuation
    if not others:
        varies = varies and varies.scaled(factor)
        return signal.replace(kernel=signal.kernel.scaled(factor), fluctuation=varies)
    rest = Signal(sum_of(others), signal.seq_len, width=signal.width)
    if varies is not None:
        drawn = Fluctuation.of_gaussian(rest.kernel, rest.width)
        rest = rest.replace(fluctuation=drawn._replace(overlaps=drawn.norms))
    return added(signal, rest, factor, 1.0)


def _looked_up(rows: Array, gated: bool, x: Array, w: Any) -> Array:
    """Law of table rows with these moments at unit variance, times their gates."""
    result: Array = w.value_table(np.broadcast_to(rows, np.shape(laws.plain(x))))
    return result * laws.activation("sigmoid", w.value_gate(x)) if gated else result
