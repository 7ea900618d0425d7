"""Latent attention: queries, keys and values made of a few features of a token each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import NONNEGATIVE, POSITIVE, check_count, check_number
from .block import Block
from .fields import settle

if TYPE_CHECKING:
    from .transformer import Transformer


@dataclass(frozen=True)
class LatentAttention(Block):
    """Multi-head latent attention of DeepSeek V2 and V3, Kimi and MiniCPM3.

    Queries are W_query N(W_query_down x); keys are W_key N(c) and a part r that all heads share,
    and values W_value N(c), where [c | r] = W_kv_down x and N is RMSNorm. Rotary positions turn r
    and as many features of the queries, and logits are divided by
    sqrt(nope_dim + rope_dim) temperature. The model's heads, causal, window, rotary, temperature
    and attention_dropout hold for it, `Weights.query`, `.key`, `.value` and `.output` are the
    variances of the matrices from the latents to the heads and back.

    Args:
        kv_rank: features of c.
        nope_dim, rope_dim: of a head's queries and keys without positions, and with them.
        value_dim: features of a head's values.
        kv_down: variance of the entries of W_kv_down (d_model, kv_rank + rope_dim).
        query_rank: features between W_query_down and W_query; None: W_query reads the tokens.
        query_down: variance of W_query_down; None: as kv_down.
        query_factor, kv_factor: multiply queries, and N(c) (LongCat: sqrt(d_model / rank)).
        norm_epsilon: added to the variance under the norms' square root.

    Raises:
        DomainError: a value outside what is allowed.

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, section 2.1 and appendix C.
    """

    kind: ClassVar[str] = "latent attention"
    places: ClassVar[tuple[str, ...]] = ("mixer",)

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_down: float
    query_rank: int | None = None
    query_down: float | None = None
    query_factor: float = 1.0
    kv_factor: float = 1.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        settle(self, ("kv_rank", "nope_dim", "value_dim"), check_count)
        settle(self, ["rope_dim"], check_count, least=0)
        settle(self, ["kv_down"], check_number, NONNEGATIVE, "pass a variance")
        settle(self, ("query_factor", "kv_factor"), check_number, POSITIVE)
        settle(self, ["norm_epsilon"], check_number, NONNEGATIVE)
        if self.query_rank is not None:
            settle(self, ["query_rank"], check_count)
        if self.query_down is not None:
            settle(self, ["query_down"], check_number, NONNEGATIVE, "pass a variance")
            if self.query_rank is None:
                raise domain_error("query_down", self.query_down, "None without a query_rank")

    def check(self, model: Transformer) -> None:
        """Raise where the model has what latent attention knows nothing of."""
        beside = {
            "alibi": model.alibi,
            "relative_bias": model.relative_bias is not None,
            "qk_norm": model.qk_norm is not None,
            "logit_softcap": model.logit_softcap is not None,
            "attention_gate": model.attention_gate is not None,
            "attention_sink": any(one is not None for one in model.attention_sinks),
            "kv_heads": model.kv_heads not in (None, model.heads),
            "biases": model.biases is not None
            and any(getattr(model.biases, name) is not None for name in ("query", "key", "value")),
        }
        for name, there in beside.items():
            if there:
                raise DomainError(f"mixer: latent attention has no {name}; leave it out")
        for rotary in {one for one in model.rotaries if one is not None}:
            if not self.rope_dim or self.rope_dim % 2:
                raise domain_error("rope_dim", self.rope_dim, "even and above 0 with rotary")
            if rotary.fraction != 1.0:
                remedy = "positions turn rope_dim features of every head"
                raise domain_error("rotary.fraction", rotary.fraction, "1", remedy)
            if rotary.speeds is not None and len(rotary.speeds) != self.rope_dim // 2:
                allowed = f"{self.rope_dim // 2}, one per pair of rope_dim features"
                remedy = "declare d_head = rope_dim"
                raise domain_error("rotary.speeds", len(rotary.speeds), allowed, remedy)

    def shapes(self, model: Transformer) -> dict[str, tuple[int, int]]:
        """Of every matrix, the features that it sums over and those that it makes."""
        width, heads = model.d_model, model.heads
        down = {"kv_down": (width, self.kv_rank + self.rope_dim)}
        if self.query_rank is not None:
            down = {"query_down": (width, self.query_rank)} | down
        return down | {
            "query": (self.query_rank or width, heads * (self.nope_dim + self.rope_dim)),
            "key": (self.kv_rank, heads * self.nope_dim),
            "value": (self.kv_rank, heads * self.value_dim),
            "output": (heads * self.value_dim, width),
        }

    def variances(self, model: Transformer) -> dict[str, float]:
        """Of W_query_down and W_kv_down."""
        return self.down_variances

    @property
    def down_variances(self) -> dict[str, float]:
        """The same by name."""
        if self.query_rank is None:
            return {"kv_down": self.kv_down}
        query = self.kv_down if self.query_down is None else self.query_down
        return {"query_down": query, "kv_down": self.kv_down}
