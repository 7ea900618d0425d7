"""Kedia et al.: the constants of a stack, and what deep, narrow models cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import domain_error
from ...formulas.block import ATTENTION_BLOCK, FFN_BLOCK
from ...formulas.checks import check_count
from ...model.transformer import Transformer
from .results import Result

# --- Kedia et al.'s constants of a stack: what a block adds at unit input, from Table 2's laws ----


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


# --- Parameters and compute of deep, narrow models at constant N d^2 (Kedia et al., Table 23) -----


# (layers, width, parameters in millions, compute, extra compute in percent) as printed.
PRINTED: tuple[tuple[int, int, int, float, float | None], ...] = (
    (12, 1024, 185, 1.06e20, None),
    (48, 512, 168, 1.03e20, -2.5),
    (192, 256, 160, 1.12e20, 6.3),
    (784, 128, 156, 1.38e20, 30.6),
    (24, 1024, 336, 1.92e20, None),
    (96, 512, 319, 1.96e20, 2.3),
    (384, 128, 311, 2.19e20, 14.5),
)
# Two shapes are misprints: their own parameter counts belong to 768 layers, and to width 256.
CORRECTED = {(784, 128): (768, 128), (384, 128): (384, 256)}


# Not printed beside the table; so its parameters are met, rounded down to the million.
SEQ_LEN, VOCABULARY = 512, 32768


def parameter_count(layers: int, d_model: int, rows: int = VOCABULARY + SEQ_LEN) -> int:
    """Weights, biases and norms of a BERT-like encoder whose head is tied to its embedding.

    Per layer 4 d^2 + 4 d of attention, 8 d^2 + 5 d of feed-forward and two norms of 2 d; the `rows`
    of the token and position tables.
    """
    return layers * (12 * d_model**2 + 13 * d_model) + rows * d_model


def matmul_flops(layers: int, d_model: int) -> int:
    """Multiplications and additions of a forward pass's matrix products, per token.

    2 per weight and token, 4 L d per layer for the logits and the weighted averages, the head.
    """
    return layers * (24 * d_model**2 + 4 * SEQ_LEN * d_model) + 2 * d_model * VOCABULARY


@dataclass(frozen=True)
class ComputeTable(Result):
    """Parameters and compute of several shapes; each beside the first with the same N d^2.

    `rows`: layers, d_model, parameters, flops (per token, forward), extra (percent over the first
    shape with the same N d^2), and what Table 23 prints for the shape.
    """

    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return (
            f"constant N d^2: parameters and forward compute per token, {SEQ_LEN} tokens, "
            f"vocabulary {VOCABULARY}; matrix products only"
        )


def compute_table(shapes: Iterable[tuple[int, int]] | None = None) -> ComputeTable:
    """Table 23 of Kedia et al., recomputed, or the same for other shapes.

    The elementwise operations that its compute also counts are left out here: the percentages then
    differ by less than one.

    Args:
        shapes: (layers, d_model) pairs; None: the table's, its two misprinted shapes mended.
    """
    mended = {CORRECTED.get(row[:2], row[:2]): row for row in PRINTED}
    rows: list[Mapping[str, Any]] = []
    first: dict[int, int] = {}
    for layers, d_model in list(mended) if shapes is None else shapes:
        check_count("layers", layers)
        check_count("d_model", d_model)
        flops = matmul_flops(layers, d_model)
        base = first.setdefault(layers * d_model**2, flops)
        printed = mended.get((layers, d_model))
        rows.append(
            {
                "layers": layers,
                "d_model": d_model,
                "parameters": parameter_count(layers, d_model),
                "flops": flops,
                "extra": 100 * (flops / base - 1),
                "printed shape": None if printed is None else f"{printed[0]} x {printed[1]}",
                "printed parameters": None if printed is None else printed[2] * 10**6,
                "printed extra": None if printed is None else printed[4],
            }
        )
    return ComputeTable(tuple(rows))
