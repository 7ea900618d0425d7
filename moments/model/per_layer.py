"""Per-layer embeddings, with a table and a projection in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import domain_error
from .embedding import Embedding
from .fields import Count, Positive, Stored, Variance
from .streams import HyperConnections

if TYPE_CHECKING:
    from .transformer import Transformer


@dataclass(frozen=True)
class PerLayerEmbedding(Stored):
    """A third block in every layer (Gemma 4 E2B): x + N(W_o [f(W_g x) * p]), f the activation and

        p = (N(projection_scale W_p x_0) + scale e) / sqrt(2),

    x_0 the input of layer 1, e the tokens' rows of the layer's table, N RMSNorm.

    Args:
        width: number of features of p.
        table_variance, projection_variance, gate_variance, output_variance: variances of the
            entries of the table, W_p, W_g and W_o.
        scale, projection_scale: factors of the rows and of the projection.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    _part: ClassVar[str] = "per_layer_embedding"

    width: Count
    table_variance: Variance
    projection_variance: Variance
    gate_variance: Variance
    output_variance: Variance
    scale: Positive = 1.0
    projection_scale: Positive = 1.0

    def check(self, model: Transformer) -> None:
        """Raise a DomainError if a model's layers cannot have this block."""
        if not isinstance(model.embedding, Embedding):
            allowed = "a moments.Embedding, of whose tokens a table has a row each"
            raise domain_error("embedding", model.embedding, allowed)
        if model.normalization != "rmsnorm":
            raise domain_error("normalization", model.normalization, "'rmsnorm' with this part")
        excluded = {
            "encoder": model.encoder is not None,
            "streams": isinstance(model.streams, HyperConnections),
        }
        for name, present in excluded.items():
            if present:
                allowed = "None with a per_layer_embedding"
                raise domain_error(name, getattr(model, name), allowed)

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of every matrix of a layer."""
        names = "per_layer_gate", "per_layer_projection"
        shapes = dict.fromkeys(names, (d_model, self.width))
        return shapes | {"per_layer_output": (self.width, d_model)}

    @property
    def variances(self) -> dict[str, float]:
        """Variances of the same matrices."""
        names = "gate", "projection", "output"
        return {f"per_layer_{name}": getattr(self, f"{name}_variance") for name in names}
