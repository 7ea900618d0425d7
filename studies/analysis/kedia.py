"""Kedia et al.: constants of a stack, DeepScaleLM's bounds, sensitivity and compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moments.errors import DomainError, domain_error
from moments.formulas.block import ATTENTION_BLOCK, FFN_BLOCK
from moments.formulas.checks import Interval, check_count, check_interval
from moments.formulas.law import Theory
from moments.model.transformer import Transformer
from moments.prediction.result import Prediction
from moments.show.scheme_table import block_sensitivity

from ..formulas.kedia_chain import DSLM_CHAIN
from .results import Result, predict_alike

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


# --- What bounds a DeepScaleLM stack, forward and backward, beside a prediction of it -------------


@dataclass(frozen=True)
class DslmBounds(Result):
    """Kedia et al.'s E.3 to E.5: bounds of many layers, and the extremes of a prediction.

    Attributes:
        prediction: what the extremes are of.
        simplified: whether the attention block's weights are those of the feed-forward block.
        branch_constant: k = N beta^2.
        gradient_ratio: smallest and largest C_6 of the layers, the correlation of the gradient that
            meets the attention over that of the signal entering the layer.
        bounds, extremes: (lower, upper) by quantity: `variance` over the input's, and
            `grad_variance` over the output's.
    """

    prediction: Prediction
    simplified: bool
    branch_constant: float
    gradient_ratio: tuple[float, float]
    bounds: Mapping[str, tuple[float, float]]
    extremes: Mapping[str, tuple[float, float]]

    @property
    def heading(self) -> str:
        kind = "simplified DeepScaleLM" if self.simplified else "DeepScaleLM"
        low, high = self.gradient_ratio
        return (
            f"{kind}, {self.prediction.model.norm} norm, k = {self.branch_constant:.3g}, "
            f"C_6 from {low:.3g} to {high:.3g}"
        )

    def _table(self) -> list[Mapping[str, Any]]:
        return [
            {
                "quantity": name,
                "lower bound": low,
                "smallest": self.extremes[name][0],
                "largest": self.extremes[name][1],
                "upper bound": high,
            }
            for name, (low, high) in self.bounds.items()
        ]


def dslm_bounds(
    model: Transformer,
    theory: Theory = "simplified",
    *,
    correlation: float = 0.227,
    grad_correlation: float = 0.0,
) -> DslmBounds:
    """Bounds of DeepScaleLM's variance and gradient that do not depend on its depth.

    As the scheme sets it, variance is 1 and the gradient's factor lies between
    e^(k (C_6 - 1)) at its smallest and largest C_6, both taken with 1, which the start has. With
    the simplified weights the variance stays between (1 + e^(-2k))/2 and 1, and the gradient's
    factor between e^(-2k) and e^(k C_6). All for many layers.

    Args:
        model: as `with_scheme("dslm")` makes it from a ReLU model.
        theory: of the prediction; Table 2's, "simplified", is what the bounds are derived from.
        correlation: of the input's tokens before the embedding's dropout.
        grad_correlation: at the output.

    Raises:
        DomainError: scales that do not square to 1, a simplified model whose norm is not "pre",
            or a model that Table 2 does not cover.
    """
    if model.norm not in ("pre", "post"):
        raise domain_error("norm", model.norm, "'pre' or 'post'")
    squares = model.by_block("skip_scale") ** 2 + model.by_block("branch_scale") ** 2
    if not np.allclose(squares, 1.0):
        raise domain_error(
            "skip_scale^2 + branch_scale^2",
            f"{squares.min():g} to {squares.max():g}",
            "1 in every block",
            'model.with_scheme("dslm") sets it',
        )
    chain_constants(model)  # refuses what Table 2 does not cover
    assert model.weights is not None
    alike = [np.asarray(model.weights.of(name)) for name in ("value", "ffn_in")]
    simplified = bool(np.allclose(alike[0], alike[1]))
    if simplified and model.norm != "pre":
        raise domain_error("norm", model.norm, "'pre' for the simplified weights")
    p = predict_alike(
        model,
        theory,
        correlation=correlation * (1 - model.dropout),
        grad_correlation=grad_correlation,
    )
    ratios = received_correlation(p) / p.correlation[:-1]
    k = float(model.layers * np.mean(model.by_block("branch_scale") ** 2))
    low, high = min(1.0, float(ratios.min())), max(1.0, float(ratios.max()))
    laws = DSLM_CHAIN.laws
    at = {"branch_constant": k}
    if simplified:
        bounds = {
            "variance": (float(laws["simplified_variance_lower"](**at)), 1.0),
            "grad_variance": (
                float(laws["simplified_grad_lower"](**at)),
                float(laws["simplified_grad_upper"](**at, gradient_ratio=float(ratios.max()))),
            ),
        }
    else:
        ends = [float(laws["grad_bound"](**at, gradient_ratio=c)) for c in (low, high)]
        bounds = {"variance": (1.0, 1.0), "grad_variance": (ends[0], ends[1])}
    v, g = p.variance / p.variance[0], p.grad_variance / p.grad_variance[-1]
    extremes = {
        "variance": (float(v.min()), float(v.max())),
        "grad_variance": (float(g.min()), float(g.max())),
    }
    found = (float(ratios.min()), float(ratios.max()))
    return DslmBounds(p, simplified, k, found, bounds, extremes)


def received_correlation(prediction: Prediction) -> np.ndarray:
    """Correlation of the gradient that meets the attention of every layer, (N,)."""
    gradients = [
        point.gradient.kernel
        for point in prediction.trace.points
        if point.site == "attention.sum" and point.gradient is not None
    ]
    return np.array([k.mean_off_diagonal() / k.mean_diagonal() for k in gradients], dtype=float)


# --- Sensitivity (Davis et al. 2021) and what it costs in stability, over k and alpha -------------


@dataclass(frozen=True)
class Sensitivity(Result):
    """Sensitivity of a model, block by block.

    Attributes:
        prediction: it was read from.
        blocks: of every layer's attention and feed-forward block, (N, 2).
        closed: N beta^2, what unit blocks on a unit stream give; of layer 1's scale.
    """

    prediction: Prediction
    blocks: np.ndarray
    closed: float

    @property
    def mean(self) -> float:
        """Davis et al.'s average."""
        return float(np.mean(self.blocks))

    @property
    def median(self) -> float:
        """The average that first blocks do not dominate."""
        return float(np.median(self.blocks))

    @property
    def heading(self) -> str:
        return (
            f"sensitivity: mean {self.mean:.4g}, median {self.median:.4g}, "
            f"N beta^2 = {self.closed:.4g}"
        )

    def _table(self) -> dict[str, np.ndarray]:
        layers = np.arange(1, len(self.blocks) + 1)
        return {"layer": layers, "attention": self.blocks[:, 0], "ffn": self.blocks[:, 1]}


def sensitivity(prediction: Prediction) -> Sensitivity:
    """N sigma_block^2 / sigma_skip^2 of every block, its mean and its median.

    Raises:
        DomainError: a model whose layers are not an attention and a feed-forward addition alone.
    """
    model = prediction.model
    found = block_sensitivity(prediction)
    if len(found) != 2 * model.layers or model.norm in ("b2t", "hybrid"):
        raise DomainError(
            f"{model.norm} norm, {len(found)} residual sums in {model.layers} layers: sensitivity "
            "covers layers that are an attention block and a feed-forward block added to the "
            "stream one after the other"
        )
    closed = DSLM_CHAIN.law("sensitivity")(
        layers=model.layers, branch_square=float(np.mean(model.branch_scales**2))
    )
    return Sensitivity(prediction, found.reshape(-1, 2), float(closed))


@dataclass(frozen=True)
class TradeOff(Result):
    """Stability against expressivity of DeepScaleLM over beta^2 = k / N^alpha.

    `rows`: k, alpha, branch_square, sensitivity (N beta^2 = k N^(1-alpha)) and its predicted
    median; fall, the share of the gradient that skip connections alone keep (Appendix G), and
    grad_ratio, the smallest over the largest predicted gradient variance.
    """

    model: Transformer
    theory: Theory
    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return f"stability and expressivity at {self.model.layers} layers, theory {self.theory}"


def trade_off(
    model: Transformer,
    ks: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    alphas: Sequence[float] = (0.5, 1.0, 1.5, 2.0),
    *,
    correlation: float = 0.227,
    grad_correlation: float = 0.0,
    theory: Theory = "refined",
) -> TradeOff:
    """Sensitivity and gradient of DeepScaleLM for every k and alpha with beta^2 below 1.

    Args:
        model: shape, norm, depth and dropout.
        ks, alphas: of beta^2 = k / N^alpha; pairs that give 1 or more are left out.
        correlation: of the input's tokens, before the embedding's dropout.
        grad_correlation: at the output.
        theory: of the predictions.
    """
    for name, values in (("ks", ks), ("alphas", alphas)):
        check_interval(name, list(values), Interval(0.0, open_lower=True))
    rows: list[Mapping[str, Any]] = []
    base = model.replace(embedding=None)
    for k in ks:
        for alpha in alphas:
            depth = {"branch_constant": k, "branch_exponent": alpha, "layers": model.layers}
            square = float(DSLM_CHAIN.law("branch_square")(**depth))
            if square >= 1:
                continue
            scaled = base.with_scheme("dslm", k=k, alpha=alpha, input_correlation=correlation)
            p = predict_alike(
                scaled,
                theory,
                correlation=correlation * (1 - model.dropout),
                grad_correlation=grad_correlation,
            )
            found = sensitivity(p)
            rows.append(
                {
                    "k": k,
                    "alpha": alpha,
                    "branch_square": square,
                    "sensitivity": found.closed,
                    "predicted sensitivity": found.median,
                    "fall": float(DSLM_CHAIN.law("fall")(**depth)),
                    "grad_ratio": float(p.grad_variance.min() / p.grad_variance.max()),
                }
            )
    return TradeOff(model, theory, tuple(rows))


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


def parameter_count(layers: int, d_model: int, *, vocab_size: int, positions: int) -> int:
    """Weights, biases and norms of a BERT-like encoder whose head is tied to its embedding.

    Per layer, at d_ff = 4 d, 4 d^2 + 4 d of attention, 8 d^2 + 5 d of feed-forward and two norms of
    2 d; the token and position tables.
    """
    layer = 12 * d_model**2 + 13 * d_model
    return layers * layer + (vocab_size + positions) * d_model


def matmul_flops(layers: int, d_model: int, *, seq_len: int, vocab_size: int) -> int:
    """Multiplications and additions of a forward pass's matrix products, per token, d_ff being 4 d.

    2 per weight and token, 4 L d per layer for the logits and the weighted averages, the head.
    """
    layer = 24 * d_model**2 + 4 * seq_len * d_model
    return layers * layer + 2 * d_model * vocab_size


@dataclass(frozen=True)
class ComputeTable(Result):
    """Parameters and compute of several shapes; each beside the first with the same N d^2.

    `rows`: layers, d_model, parameters, flops (per token, forward), extra (percent over the first
    shape with the same N d^2), and what Table 23 prints for the shape.
    """

    seq_len: int
    vocab_size: int
    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return (
            f"constant N d^2: parameters and forward compute per token, {self.seq_len} tokens, "
            f"vocabulary {self.vocab_size}; matrix products only"
        )


def compute_table(
    shapes: Iterable[tuple[int, int]] | None = None,
    *,
    seq_len: int = 512,
    vocab_size: int = 32768,
    positions: int = 512,
) -> ComputeTable:
    """Table 23 of Kedia et al., recomputed, or the same for other shapes.

    Sequence length, vocabulary and positions are not printed beside the table; at the defaults its
    parameters are met, rounded down to the million. The elementwise operations that its compute
    also counts are left out here: the percentages then differ by less than one.

    Args:
        shapes: (layers, d_model) pairs; None: the table's, its two misprinted shapes mended.
        seq_len, vocab_size, positions: of the model.
    """
    for name, value in (("seq_len", seq_len), ("vocab_size", vocab_size)):
        check_count(name, value)
    mended = {CORRECTED.get(row[:2], row[:2]): row for row in PRINTED}
    rows: list[Mapping[str, Any]] = []
    first: dict[int, int] = {}
    for layers, d_model in list(mended) if shapes is None else shapes:
        check_count("layers", layers)
        check_count("d_model", d_model)
        flops = matmul_flops(layers, d_model, seq_len=seq_len, vocab_size=vocab_size)
        base = first.setdefault(layers * d_model**2, flops)
        printed = mended.get((layers, d_model))
        rows.append(
            {
                "layers": layers,
                "d_model": d_model,
                "parameters": parameter_count(
                    layers, d_model, vocab_size=vocab_size, positions=positions
                ),
                "flops": flops,
                "extra": 100 * (flops / base - 1),
                "printed shape": None if printed is None else f"{printed[0]} x {printed[1]}",
                "printed parameters": None if printed is None else printed[2] * 10**6,
                "printed extra": None if printed is None else printed[4],
            }
        )
    return ComputeTable(seq_len, vocab_size, tuple(rows))
