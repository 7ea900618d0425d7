"""Helpers of several schemes: Xavier weights, the number of blocks, another placement."""

from __future__ import annotations

from typing import Any

from ..formulas.checks import check_flag
from ..model.transformer import Transformer
from ..model.weights import Weights

SCALED = ("value", "output", "ffn_in", "ffn_out")
"""Matrices that scale a block's output."""


def xavier(model: Transformer, per_head: bool = True) -> Weights:
    """2 / (fan_in + fan_out) for every matrix; with `per_head` each head of query, key and value is
    a matrix of its own, as in Kedia et al., else a projection is one matrix, as for
    `xavier_normal_`."""
    check_flag("per_head", per_head)
    d_model, d_head = model.d_model, model.d_head or 0
    weights = Weights.xavier(d_model, model.heads, model.d_ff, d_head)
    if per_head:
        return weights
    shared = 2 / (d_model + (model.kv_heads or model.heads) * d_head)
    return weights.replace(query=2 / (d_model + model.heads * d_head), key=shared, value=shared)


def blocks(model: Transformer) -> int:
    """Residual blocks of the stack; a decoder's cross-attention is a third one per layer."""
    return model.layers * (2 if model.encoder is None else 3)


def placed(model: Transformer, norm: str, **changes: Any) -> Transformer:
    """The model with another placement of norms; resets `post_layers` of norm="mix"."""
    return model.replace(norm=norm, post_layers=0, **changes)
