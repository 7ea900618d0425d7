"""Embeddings that every layer has a table and a projection of its own for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import domain_error
from .embedding import Embedding
from .fields import Count, Positive, Stored, Variance

if TYPE_CHECKING:
    from .transformer import Transformer


@dataclass(frozen=True)
class PerLayerEmbedding(Stored):
    """A third block in every layer (Gemma 4 E2B): x + N(W_o [f(W_g x) * p]), f the activation and

        p = (N(projection_scale W_p x_0) + scale e) / sqrt(2),

    x_0 what enters layer 1, e rows that tokens look up in a table of the layer's own, N RMSNorm.

    Args:
        width: features of p.
        table_variance, projection_variance, gate_variance, output_variance: of the entries of the
            table, W_p, W_g and W_o.
        scale, projection_scale: of rows and of what is projected.

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
        """Raise a DomainError where a model's layers cannot have it."""
        if not isinstance(model.embedding, Embedding):
            allowed = "a moments.Embedding, of whose tokens a table has a row each"
            raise domain_error("embedding", model.embedding, allowed)
        if model.normalization != "rmsnorm":
            raise domain_error("normalization", model.normalization, "'rmsnorm' with this part")
        for name in ("encoder", "streams"):
            if getattr(model, name) is not None:
                allowed = "None with a per_layer_embedding"
                raise domain_error(name, getattr(model, name), allowed)

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Of its matrices in every layer."""
        inward = d_model, self.width
        names = "per_layer_gate", "per_layer_projection"
        return dict.fromkeys(names, inward) | {"per_layer_output": (self.width, d_model)}

    @property
    def variances(self) -> dict[str, float]:
        """Of the same."""
        names = "gate", "projection", "output"
        return {f"per_layer_{name}": getattr(self, f"{name}_variance") for name in names}
