"""DeepScaleLM: scaled residuals, and blocks whose output variance is 1 in every layer."""

from __future__ import annotations

import math
from typing import Any

from ..checks import check_choice, check_in
from ..errors import DomainError, domain_error
from ..inputs import embedded_alike
from ..laws.block import FFN_BLOCK
from ..laws.references import kedia
from ..symbols import POSITIVE, Interval
from ..transformer import Transformer
from ..weights import Weights
from .registry import Scheme


def _dslm(
    model: Transformer,
    k: float = 2.0,
    alpha: float = 1.0,
    input_correlation: float | None = None,
    variant: str = "released",
    simplified: bool = False,
) -> Transformer:
    """beta^2 = k / N^alpha, lambda^2 = 1 - beta^2, and weights that make every block's output 1.

    Args:
        model: its norm, activation and shape stay as they are.
        k, alpha: of the branch scale.
        input_correlation: token correlation of the embedding, before its dropout; None: that of
            model.embedding.
        variant: "released", where layer l uses the correlation that enters it, as the authors'
            code does, or "printed", as the paper's pseudo-code: the one that leaves it.
        simplified: whether value and output weights are those of the feed-forward block.
    """
    check_in("k", k, POSITIVE)
    check_in("alpha", alpha, POSITIVE)
    check_choice("variant", variant, ("released", "printed"))
    branch = k / model.layers**alpha
    if branch >= 1:
        raise domain_error("k", k, f"below layers^alpha = {model.layers**alpha:g}")
    kept = 1 - model.dropout
    d_model, d_ff = model.d_model, model.d_ff or 4 * model.d_model
    ffn = math.sqrt(2 * kept / (d_model * d_ff))
    if simplified:
        attention: float | list[float] = ffn
    else:
        start = kept * _input_correlation(model, input_correlation)
        rows = correlations(start, model.layers, branch, model.dropout)
        chosen = [entering if variant == "released" else leaving for entering, leaving in rows]
        attention = [math.sqrt(kept / r) / d_model for r in chosen]
    changes: dict[str, Any] = {
        "weights": Weights(1 / d_model, 1 / d_model, attention, attention, ffn, ffn),
        "skip_scale": math.sqrt(1 - branch),
        "branch_scale": math.sqrt(branch),
    }
    if model.embedding is not None:
        changes["embedding"] = _unit_embedding(model, kept)
    return model.replace(**changes)


def correlations(
    start: float, layers: int, branch: float, drop_prob: float
) -> list[tuple[float, float]]:
    """Token correlation that enters and that leaves every layer, at unit variances.

    The attention block's output correlates by 1 - p (Table 2), the feed-forward block's by its full
    law; the stream mixes each in with weight `branch`.
    """
    rows, r = [], start
    for _ in range(layers):
        entering = r
        r = (1 - branch) * r + branch * (1 - drop_prob)
        r = (1 - branch) * r + branch * _ffn_correlation(r, drop_prob)
        rows.append((entering, r))
    return rows


def _ffn_correlation(r: float, drop_prob: float) -> float:
    values = {
        "d_model": 1.0,
        "d_ff": 1.0,
        "ffn_in": 1.0,
        "ffn_out": 1.0,
        "drop_prob": drop_prob,
        "x_variance": 1.0,
        "x_other_variance": 1.0,
        "x_correlation": r,
    }
    laws = FFN_BLOCK.under("published")
    return float(laws["covariance"].of(values) / laws["variance"].of(values))


def _input_correlation(model: Transformer, given: float | None) -> float:
    if given is not None:
        interval = Interval(0.0, 1.0, open_lower=True)
        check_in("input_correlation", given, interval, "tokens must correlate at all")
        return float(given)
    if model.embedding is None:
        raise DomainError(
            "input_correlation is needed where the model declares no embedding: pass the token "
            "correlation of its input"
        )
    tables = embedded_alike(model.embedding, model.seq_len, "published")
    return float(tables.pairs / tables.diagonal)


def _unit_embedding(model: Transformer, kept: float) -> Any:
    """Tables of equal variance whose sum, after dropout, has variance 1."""
    assert model.embedding is not None
    used = [
        name
        for name in ("token_variance", "position_variance", "segment_variance")
        if getattr(model.embedding, name) > 0
    ]
    return model.embedding.replace(**dict.fromkeys(used, kept / len(used)))


DSLM = Scheme(
    "dslm",
    "DeepScaleLM: residuals lambda^2 + beta^2 = 1, block outputs of variance 1",
    ("weights", "skip_scale", "branch_scale", "embedding"),
    kedia("Section 4, Appendix M and Figures 14, 15"),
    _dslm,
)
