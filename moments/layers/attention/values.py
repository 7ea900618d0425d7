"""Attention whose values are a sum of sources: its own, the first layer's, rows of a table.

v = a W_v x + b v_1 + c g e. The matrices of the three are independent, so that the values' kernel
is the sum of theirs, and on the way back each source receives its factor's square of what arrives
at the values; nothing of v_1 or e reaches the logits. Of a gate's rows the kernel is a product,
whose derivative (`by_law`) is what reaches the gate. See docs/theory/attention.md, Values of other
sources.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine import laws
from ...engine.composition import Pulled, added
from ...engine.laws import Layout
from ...engine.response import sum_of
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from ...engine.state import Values as Norms
from ...engine.trace import Record, Run
from ...model.values import FIRST, ROWS, Values
from ..by_law import LawLeaf
from .projections import biased
from .self_attention import AttentionPullback, SelfAttention, attended
from .shared_keys import AroundHeads


class _Way(NamedTuple):
    """Of a pass, the ways back.

    Attributes:
        attention: from the heads, on values as they are.
        rows: from the table's rows; None: there is no table.
    """

    attention: AttentionPullback
    rows: Any


@dataclass(frozen=True)
class MixedValues(AroundHeads):
    """Self-attention on such values.

    Attributes:
        heads: the attention, with the variance of its own values' matrix.
        values: the sources.
        first: whether this is the first layer.
        keeps: whether later layers read its own values.
        gates: heads of values, each with a gate.
    """

    heads: SelfAttention
    values: Values
    first: bool
    keeps: bool
    gates: int

    @property
    def _own(self) -> float:
        """Square of the factor of W_v x, of which v_1 is the first layer's."""
        return (self.values.own + (self.values.first if self.first else 0.0)) ** 2

    def _unit(self, value: Any, **changes: Any) -> SelfAttention:
        return dataclasses.replace(self.heads, value=value, value_bias=0.0, **changes)

    def propagate(self, signal: Signal, run: Run) -> Record:
        if not signal.resolved:
            self.heads._check_alike(signal.seq_len)
        leaf, values, tokens = self.heads, self.values, signal.second_moment()
        gain = leaf.d_model * leaf.value
        own = tokens.scaled(gain)
        one, two = own.lift(leaf.value_bias)
        own = Kernel(own.diagonal + one, own.off_diagonal + two, own.resolved)
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
        # of values as they are, a matrix of unit gain
        way = attended(self._unit(1.0 / leaf.d_model), signal, signal, total, self._own * gain)
        unshared = [one.mean_diagonal() - one.mean_off_diagonal() for one in (own, total.kernel)]
        way.aligned = ratio_or_zero(unshared[0] * self._own, unshared[1])
        return run.passed(Record(self, run.layer, signal, way.output, (), _Way(way, rows)))

    def _rows(self, signal: Signal, alike: Kernel) -> Any:
        """What tokens look up, times its gates; and the way back."""
        values, width = self.values, int(self.heads.value_width)
        rows = Layout.of(signal.kernel, signal.seq_len).array(alike)
        matrices = [laws.LawMatrix("value_table", 1, width, values.table_variance)]
        if values.gate is not None:
            gate = values.gate, self.gates, values.gate_variance
            matrices.append(laws.LawMatrix("value_gate", *gate))
        law = functools.partial(_looked_up, rows, values.gate is not None)
        return LawLeaf("", law, tuple(matrices), width, signal.seq_len, False).forward(signal)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        leaf, values, length = self.heads, self.values, gradient.seq_len
        attention, rows = record.pullback
        query, key, sides = attention._sent(gradient.kernel)
        entries = sides.value.scaled(leaf.d_model / leaf.value_width)
        sent = run.sent.pop(FIRST, []) if self.keeps else []
        own = sum_of([entries.scaled(self._own), *sent])
        gain = leaf.value_width * leaf.value
        crossed = sides.cross.scaled(self._own * leaf.d_model * leaf.value)
        parts = [query, key, crossed, own.scaled(gain)]
        if values.first and not self.first:
            run.send(FIRST, entries.scaled(values.first**2))
        looked: Pulled | None = None
        if rows is not None:
            looked = rows(Gradient(entries.scaled(values.table**2), length))
            parts.append(looked.gradient.kernel)
        pulled = attention._pulled(sum_of(parts), gradient, sides)
        pulled.weights = functools.partial(self._weights, pulled.weights, record.input, own, looked)
        return record.completed(gradient, pulled.gradient, (), pulled)

    def _weights(
        self, heads: Callable[[], Norms], signal: Signal, own: Kernel, looked: Pulled | None
    ) -> Norms:
        """Of the heads' matrices, that of their values by the gradient's kernel at W_v x, and of
        gates and the table."""
        leaf, result = self.heads, dict(heads())
        of_values = (signal.second_moment() * own).total(signal.seq_len)
        result["value"] = leaf.d_model * leaf.value_width * of_values
        if "value" in biased(leaf.has_bias):
            result["value.bias"] = leaf.value_width * own.total(signal.seq_len)
        return result if looked is None else result | dict(looked.weights())


def _sum(signal: Signal, factor: Any, others: list[Kernel]) -> Signal:
    """Tokens, their kernel times a factor, and independent Gaussian sources."""
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
    """The law of rows with these moments at unit variance, times their gates."""
    result: Array = w.value_table(np.broadcast_to(rows, np.shape(laws.plain(x))))
    return result * laws.activation("sigmoid", w.value_gate(x)) if gated else result
