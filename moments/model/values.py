"""Attention's values as sums of the layer's own, the first layer's and rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import domain_error
from .embedding import Embedding
from .fields import Count, Nonnegative, Real, Stored, Variance
from .mixers import LayerAttention

if TYPE_CHECKING:
    from .transformer import Transformer

FIRST, ROWS = "first values", "rows of tokens"
"""Names of kernels that a pass stores: the first layer's values, and tokens' rows of tables."""


@dataclass(frozen=True)
class Values(Stored):
    """Values of attention: own W_v x + first v_1 + table g e.

    v_1 are the first layer's W_v x (value residual, Zhou et al. 2024; modded-nanoGPT), e the
    tokens' rows of a table in each layer (value embeddings, modded-nanoGPT and nanochat), and g is
    1, or for every head a sigmoid of a linear map of some features of x.

    Args:
        own, first, table: factors.
        table_variance: variance of the table's entries.
        gate: number of x's first features that the gates read (nanochat: 12); None: g = 1.
        gate_variance: mean square of the gates' weights.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    _part: ClassVar[str] = "values"

    own: Real = 1.0
    first: Real = 0.0
    table: Real = 0.0
    table_variance: Variance = 0.0
    gate: Count | None = None
    gate_variance: Nonnegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own == self.first == self.table == 0.0:
            raise domain_error("own", self.own, "another than 0 where first and table are 0")
        if self.gate is not None and self.table == 0.0:
            raise domain_error("gate", self.gate, "None without a table, whose rows it multiplies")

    def check(self, model: Transformer, number: int) -> None:
        """Raise a DomainError if layer `number` of a model cannot have such values."""
        mixer = model.mixers[number - 1]
        excluded = {
            "norm": model.norm == "hybrid",
            "identity_attention": model.identity_attention,
            "streams": model.streams is not None,
            "encoder": model.encoder is not None,
        }
        for name in (name for name, present in excluded.items() if present):
            default = type(model).__dataclass_fields__[name].default
            raise domain_error(name, getattr(model, name), f"{default!r} with values")
        plain = mixer is None or (isinstance(mixer, LayerAttention) and not mixer.value_norm)
        if not plain or (self.first and any(model.mixers[n - 1] for n in (1, number))):
            allowed = "None where attention has values of other sources"
            raise domain_error(f"mixer of layer {number}", str(mixer), allowed)
        if self.table and not isinstance(model.embedding, Embedding):
            allowed = "a moments.Embedding, of whose tokens a table has a row each"
            raise domain_error("embedding", model.embedding, allowed)
        if self.gate is not None and self.gate > model.d_model:
            raise domain_error("gate", self.gate, f"at most d_model = {model.d_model}")
