"""Per-layer embeddings: an additional block in every layer, gated by the stream.

y = f(W_g x) * p, p = (N(W_p x_0) + s e)/sqrt(2), e a row of the layer's token table. Matrices and
tables are independent, so the kernel of p is a sum of two and that of y a product (`Product`). See
docs/theory/streams.md, Embeddings of every layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.composition import Chain, Component, PullbackResult, Residual
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.trace import Record, Run
from ..formulas.activation import activation_laws
from ..formulas.linear import LINEAR
from ..formulas.normalization import RMSNORM
from ..model.per_layer import PerLayerEmbedding
from ..model.transformer import Transformer
from ..model.values import ROWS
from .elementary import Activation, Linear
from .normalization import FiniteNormalization
from .product import Product


@dataclass(frozen=True)
class ReadRows(Component):
    """p, independent of the stream.

    Attributes:
        context: N(W_p x_0), of the input of layer 1.
        declared: scale and variance of the rows.
    """

    context: Component
    declared: PerLayerEmbedding
    label: str = ""

    def propagate(self, signal: Signal, run: Run) -> Record:
        context = self.context.propagate(run.kept[0], run)
        declared, rows = self.declared, run.kept[ROWS]
        variance = declared.scale**2 * declared.table_variance
        kernel = context.output.kernel.mixed(0.5, rows, 0.5 * variance)
        output = Signal(kernel, signal.seq_len, 0.0 * kernel.diagonal, float(declared.width))
        if signal.fluctuation is not None:
            drawn = Fluctuation.of_gaussian(kernel, output.width)
            output = output.replace(fluctuation=drawn._replace(overlaps=drawn.norms))
        return Record(self, run.layer, signal, output, (context,), rows)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        kernel = gradient.kernel.scaled(0.5)
        context = record.children[0].backward(gradient.with_kernel(kernel), run)
        run.send(0, context.grad_in.kernel)
        zero = Gradient(kernel.scaled(0.0), gradient.seq_len)
        weights = functools.partial(self._table, kernel * record.pullback, gradient.seq_len)
        return record.completed(gradient, zero, (context,), PullbackResult(zero, weights))

    def _table(self, gradient: Kernel, length: int) -> Mapping[str, Array]:
        """Squared gradient norm of the table, from the gradient's kernel at equal rows."""
        declared = self.declared
        norm = declared.width * declared.scale**2 * gradient.total(length)
        return {"per_layer_table": norm}

    @property
    def children(self) -> tuple[Component, ...]:
        return (self.context,)


def per_layer(model: Transformer, post_norm: Component) -> Residual:
    """The block with its norm, in a residual connection."""
    laws = activation_laws(model.activation)
    gated = _linear(model, "per_layer.gate", "per_layer_gate")
    gate = Chain((gated, Activation(laws, "refined", "per_layer.activation")))
    product: Any = Product(rows(model), gate, label="per_layer.product", laws=laws)
    branch = Chain((product, _linear(model, "per_layer.out", "per_layer_output"), post_norm))
    return Residual(branch, label="per_layer.sum")


def rows(model: Transformer) -> ReadRows:
    """p, from the input of layer 1 and the layer's table."""
    declared = model.per_layer_embedding
    assert declared is not None
    norm = FiniteNormalization(
        RMSNORM,
        "per_layer.context",
        model.norm_epsilon / declared.projection_scale**2,
        centres=False,
        affine=model.norm_affine,
    )
    context = Chain((_linear(model, "per_layer.projection", "per_layer_projection"), norm))
    return ReadRows(context, declared)


def _linear(model: Transformer, site: str, name: str) -> Linear:
    declared = model.per_layer_embedding
    assert declared is not None
    fan_in, fan_out = declared.shapes(model.d_model)[name]
    variance = declared.variances[name]
    parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": variance}
    return Linear(LINEAR, "refined", site, parameters, fan_out, name)
