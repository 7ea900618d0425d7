"""Kedia et al.'s constants of a stack: what a block adds at unit input, from Table 2's laws."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import domain_error
from ...formulas.block import ATTENTION_BLOCK, FFN_BLOCK
from ...model.transformer import Transformer


class ChainConstants(NamedTuple):
    """C_1 and C_2: variance of the attention block at r = 1, and of the feed-forward block."""

    attention_gain: float
    ffn_gain: float


def chain_constants(model: Transformer, layer: int = 1) -> ChainConstants:
    """C_1 = d^2 s_o s_v / (1 - p) and C_2 = 2 d^2 s_1 s_2 / (1 - p) of one layer.

    Source: Kedia et al. 2024, E.1.1; C_2 as printed at d_ff = 4 d, here d d_ff s_1 s_2 / (2 (1-p)).

    Raises:
        DomainError: not ReLU, whose laws Table 2 holds, or heads that do not fill d_model.
    """
    if model.activation != "relu":
        raise domain_error("activation", model.activation, "'relu', the one Table 2 covers")
    if getattr(model, "gated", False):
        raise domain_error("gated", True, "False: Table 2 has no gated block")
    if model.heads * (model.d_head or 0) != model.d_model:
        raise domain_error("d_head", model.d_head, "d_model / heads, as Table 2 assumes")
    weights = model.layer_weights(layer)
    values = {
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "drop_prob": model.dropout,
        "x_variance": 1.0,
        "x_correlation": 1.0,
        **{name: getattr(weights, name) for name in ("value", "output", "ffn_in", "ffn_out")},
    }
    return ChainConstants(
        float(ATTENTION_BLOCK.law("variance", "simplified")(**values)),
        float(FFN_BLOCK.law("variance", "simplified")(**values)),
    )
