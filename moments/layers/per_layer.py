"""A block that every layer has besides: what it reads of a token is gated by the stream.

y = f(W_g x) * p, p = (N(W_p x_0) + s e)/sqrt(2). Matrices and tables are independent: kernels of
x_0's part and of rows add up to that of p, the product's is the gate's times it, and on the way
back either factor receives the other's second moments times the gradient's. See
docs/theory/streams.md, Embeddings of every layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.composition import Chain, Component, Pulled, Residual
from ..engine.directions import knows_directions, realigned
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal, bind
from ..engine.trace import Record, Run
from ..formulas.activation import activation_laws
from ..formulas.law import ComponentLaws
from ..formulas.linear import LINEAR
from ..formulas.normalization import RMSNORM
from ..model.per_layer import PerLayerEmbedding
from ..model.transformer import Transformer
from ..model.values import ROWS
from .attention.gates import product
from .elementary import Activation, Linear, faintly
from .normalization import FiniteNormalization


@dataclass(frozen=True)
class GatedRows(Component):
    """f(W_g x) * p.

    Attributes:
        gate: gives the former, of the stream.
        context: gives N(W_p x_0), of what entered layer 1.
        laws: of the activation f.
        declared: scale and variance of the rows.
    """

    gate: Component
    context: Component
    laws: ComponentLaws
    declared: PerLayerEmbedding
    label: str = "per_layer.product"

    def propagate(self, signal: Signal, run: Run) -> Record:
        gate = self.gate.propagate(signal, run)
        context = self.context.propagate(run.kept[0], run)
        of, rows = self.declared, run.kept[ROWS]
        read = context.output.kernel.mixed(0.5, rows, 0.5 * of.scale**2 * of.table_variance)
        looked_up = Signal(read, signal.seq_len, 0.0 * read.diagonal, float(of.width))
        if signal.fluctuation is not None:
            drawn = Fluctuation.of_gaussian(read, looked_up.width)
            looked_up = looked_up.replace(fluctuation=drawn._replace(overlaps=drawn.norms))
        output = product(looked_up, gate.output)
        passed = gate, context
        return run.passed(Record(self, run.layer, signal, output, passed, (read, rows)))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        (gate, context), (read, rows) = record.children, record.pullback
        grad_out, length = gradient.kernel, gradient.seq_len
        of_rows = (grad_out * gate.output.second_moment()).scaled(0.5)
        at_gate = grad_out * read
        if record.input.fluctuation is not None and knows_directions(gradient):
            entering = gate.children[0].output
            law, (of_one, _) = self.laws.under("refined")["alignment"], bind(entering, {})
            slopes = faintly(law, entering.algebra, of_one)
            at_gate = realigned(at_gate, record.output, gradient, 3.0 * slopes)
            of_rows = realigned(of_rows, record.output, gradient, gate.output.kurtosis)
        gate = gate.backward(Gradient(at_gate, length), run)
        context = context.backward(Gradient(of_rows, length), run)
        run.send(0, context.grad_in.kernel)
        pulled = Pulled(gate.grad_in, functools.partial(self._table, of_rows * rows, length))
        return record.completed(gradient, gate.grad_in, (gate, context), pulled)

    def _table(self, alike: Kernel, length: int) -> Mapping[str, Array]:
        of = self.declared
        return {"per_layer_table": of.width * of.scale**2 * alike.total(length)}

    @property
    def children(self) -> tuple[Component, ...]:
        return self.gate, self.context


def per_layer(model: Transformer, post_norm: Component) -> Residual:
    """The block with its norm, around the stream."""
    of = model.per_layer_embedding
    assert of is not None

    def linear(site: str, name: str) -> Linear:
        fan_in, fan_out = of.shapes(model.d_model)[name]
        variance = of.variances[name]
        parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": variance}
        return Linear(LINEAR, "refined", site, parameters, fan_out, name)

    laws = activation_laws(model.activation)
    gated = linear("per_layer.gate", "per_layer_gate")
    gate = Chain((gated, Activation(laws, "refined", "per_layer.activation")))
    norm = FiniteNormalization(
        RMSNORM,
        "per_layer.context",
        model.norm_epsilon / of.projection_scale**2,
        centres=False,
        affine=model.norm_affine,
    )
    context = Chain((linear("per_layer.projection", "per_layer_projection"), norm))
    rows: Any = GatedRows(gate, context, laws, of)
    branch = Chain((rows, linear("per_layer.out", "per_layer_output"), post_norm))
    return Residual(branch, label="per_layer.sum")
