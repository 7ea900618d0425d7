"""DeepScaleLM: scaled residuals, and blocks whose output variance is 1 in every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error
from ..formulas.block import FFN_BLOCK
from ..formulas.checks import POSITIVE, Interval, check_choice, check_flag, check_interval
from ..formulas.references import kedia
from ..layers.embedding import text_kernel
from ..model.transformer import Transformer
from ..model.weights import Weights
from ..solver.block import MATRICES, solvable
from ..solver.entering import entered, stacks
from ..solver.goals import scaled_weights
from ..solver.layerwise import solve_blocks
from .registry import Scheme

VARIANTS = ("released", "printed", "solved", None)


def _dslm(
    model: Transformer,
    k: float = 2.0,
    alpha: float = 1.0,
    input_correlation: float | None = None,
    variant: str | None = None,
    simplified: bool = False,
    inputs: Mapping[str, Any] | None = None,
) -> Transformer:
    """beta^2 = k / N^alpha, lambda^2 = 1 - beta^2, and weights that give block outputs variance 1.

    A learned beta starts at this value. Embedding tables sum to variance 1 after dropout, and a
    head's logits are divided by sqrt(d_model).

    Args:
        model: its norm, activation and shape do not change.
        k, alpha: constants of the branch scale.
        input_correlation: token correlation of the embedding, before its dropout; None: that of
            model.embedding, or of `inputs`.
        variant: "released": layer l uses the token correlation of its input, as in the authors'
            code; "printed": that of its output, as in the paper's pseudo-code; "solved": the same
            conditions solved with this model's laws, with one variance for value and output
            matrices and one for feed-forward matrices. None: "released" if the constants apply
            (ReLU, LayerNorm, Pre- or Post-LN, full attention of equal heads), else "solved".
        simplified: whether value and output matrices have the feed-forward block's variance.
        inputs: for "solved", arguments of `predict` for the input, such as token_ids.
    """
    check_interval("k", k, POSITIVE)
    check_interval("alpha", alpha, POSITIVE)
    check_choice("variant", variant, VARIANTS)
    check_flag("simplified", simplified)
    arguments, variant = dict(inputs or {}), variant or usual_variant(model)
    if model.encoder is not None:
        encoder_arguments = dict(arguments.get("encoder_inputs") or {})
        arguments["encoder_inputs"] = encoder_arguments
        # The encoder's prediction has one row per token if the decoder's has.
        inner = encoder_arguments | ({"tokens": True} if by_token(model, arguments) else {})
        encoder = _dslm(
            model.encoder, k, alpha, input_correlation, variant, simplified, inputs=inner
        )
        model = model.replace(encoder=encoder)
        if input_correlation is not None:
            correlation = keep_probability(encoder) * input_correlation
            encoder_arguments |= {"variance": 1.0, "correlation": correlation}
    scaled = _prepared(model, k, alpha)
    if variant == "solved":
        if input_correlation is not None or (model.embedding is None and not described(arguments)):
            correlation = keep_probability(model) * _input_correlation(model, input_correlation)
            arguments |= {"variance": 1.0, "correlation": correlation}
        return solved(scaled, simplified, arguments)
    if simplified:
        return scaled
    if described(arguments):
        raise domain_error("inputs", sorted(arguments), 'absent unless variant is "solved"')
    start = keep_probability(model) * _input_correlation(model, input_correlation)
    square = float(scaled.branch_scales[0]) ** 2
    rows = correlations(start, model.layers, square, model.dropout)
    used = [before if variant == "released" else after for before, after in rows]
    if min(used) <= 0:
        raise DomainError(
            f"tokens correlate by {min(used):.3g}, and must be above 0: dslm's constants for "
            "values and outputs go with one over its square root"
        )
    attention = [math.sqrt((1 - model.dropout) / r) / model.d_model for r in used]
    assert scaled.weights is not None
    return scaled.replace(weights=scaled.weights.replace(value=attention, output=attention))


def usual_variant(model: Transformer) -> str:
    """ "released" if the paper derives its constants for such a model, else "solved"."""
    variances = [] if model.biases is None else list(model.biases.to_dict().values())
    derived = (
        (model.activation, model.gated, model.normalization) == ("relu", False, "layernorm")
        and model.norm in ("pre", "post")
        and model.heads * (model.d_head or 0) == model.d_model
        and (model.kv_heads, model.norm_groups) == (model.heads, 1)
        and not (model.causal or model.rotary or model.alibi or model.relative_bias)
        and not (model.parallel or model.qk_norm or model.logit_softcap or any(model.windows))
        and model.encoder is None
        and (model.activation_dropout, model.ffn_dropout) == (0.0, model.dropout)
        and not model.identity_attention
        and not any(np.any(value) for value in variances)
    )
    return "released" if derived else "solved"


def _prepared(model: Transformer, k: float, alpha: float) -> Transformer:
    """Set scales, embedding and head; all but q and k get the feed-forward matrices' variance.

    A ReLU block's output has variance d_model d_ff s_f^2 / (2 (1 - p)).
    """
    branch = k / model.layers**alpha
    # Blocks in parallel add two outputs of variance 1 to one sum.
    added = branch * (2 if model.parallel else 1)
    if added >= 1:
        least = "layers^alpha / 2" if model.parallel else "layers^alpha"
        raise domain_error(
            "k", k, f"below {least} = {k / added:g}", "pass a smaller k, or use more layers"
        )
    d_model, d_ff = model.d_model, model.d_ff or 0
    ffn = math.sqrt(2 * (1 - (model.ffn_dropout or 0.0)) / (d_model * d_ff))
    # Attention logits have variance 1 at any temperature (T5's are not divided by sqrt(d_head)).
    divisors = set(model.temperatures.tolist())
    query = [t * t / d_model for t in model.temperatures.tolist()]
    changes: dict[str, Any] = {
        "weights": Weights(
            query[0] if len(divisors) == 1 else query, 1 / d_model, ffn, ffn, ffn, ffn
        ),
        "skip_scale": math.sqrt(1 - added),
        "branch_scale": math.sqrt(branch),
    }
    if model.embedding is not None:
        changes["embedding"] = _unit_embedding(model)
    if model.head is not None:
        changes["head"] = model.head.replace(output_scale=1 / math.sqrt(d_model))
    return model.replace(**changes)


def correlations(
    start: float, layers: int, branch: float, drop_prob: float
) -> list[tuple[float, float]]:
    """Token correlation of every layer's input and output, at unit variances.

    The attention block's output has token correlation 1 - p (Table 2), the feed-forward block's
    follows its full law; each enters the stream with weight `branch`.
    """
    rows, r = [], start
    for _ in range(layers):
        before = r
        r = (1 - branch) * r + branch * (1 - drop_prob)
        r = (1 - branch) * r + branch * _ffn_correlation(r, drop_prob)
        rows.append((before, r))
    return rows


def _ffn_correlation(r: float, drop_prob: float) -> float:
    values = dict.fromkeys(("d_model", "d_ff", "ffn_in", "ffn_out", "x_variance"), 1.0)
    values |= {"x_other_variance": 1.0, "drop_prob": drop_prob, "x_correlation": r}
    laws = FFN_BLOCK.under("published")
    return float(laws["covariance"].of(values) / laws["variance"].of(values))


def keep_probability(model: Transformer) -> float:
    """Keep probability of the embedding's dropout."""
    return 1 - (model.dropout if model.embedding is None else model.embedding.dropout)


def _input_correlation(model: Transformer, given: float | None) -> float:
    if given is not None:
        interval = Interval(0.0, 1.0, open_lower=True)
        check_interval("input_correlation", given, interval, "tokens must correlate at all")
        return float(given)
    if not hasattr(model.embedding, "token_variance"):
        raise DomainError(
            "the model declares no embedding of tokens: pass the token correlation of its input, "
            'with_scheme("dslm", input_correlation=...) or solve(model, "dslm", correlation=...)'
        )
    tables = text_kernel(
        model.embedding, model.seq_len, d_model=model.d_model, resolved=False, theory="published"
    )
    return float(tables.off_diagonal / tables.diagonal)


def _unit_embedding(model: Transformer) -> Any:
    """Tables of equal variance whose sum has variance 1 after dropout; pixels of mean square 1."""
    embedding, keep = model.embedding, keep_probability(model)
    if not hasattr(embedding, "token_variance"):
        share = keep / (1 + (embedding.position_variance > 0))
        changes = {"patch_variance": share / embedding.patch_width}
        changes |= {"position_variance": share} if embedding.position_variance else {}
        changes |= {"class_variance": share} if embedding.class_token else {}
        return embedding.replace(**changes)
    names = ("token_variance", "position_variance", "segment_variance")
    used = [name for name in names if getattr(embedding, name) > 0]
    fixed = embedding.replace(**dict.fromkeys(used, 1.0)).variance - (
        embedding.scale**2 + len(used) - 1
    )
    if fixed >= keep:
        raise domain_error("positions", embedding.positions, f"of mean square below {keep:g}")
    share = (keep - fixed) / len(used)
    tables = dict.fromkeys(used, share) | {"token_variance": share / embedding.scale**2}
    return embedding.replace(**tables)


DSLM = Scheme(
    "dslm",
    "DeepScaleLM: residuals lambda^2 + beta^2 = 1, block outputs of variance 1",
    ("weights", "skip_scale", "branch_scale", "embedding", "head"),
    kedia("Section 4, Appendix M and Figures 14, 15"),
    _dslm,
    both_stacks=True,
)


ROUNDS = 50
"""Largest number of forward passes of the fixed-point iteration for `simplified`."""


def solved(model: Transformer, simplified: bool, inputs: Mapping[str, Any]) -> Transformer:
    """Solve for block outputs of variance 1, averaged over tokens, with one variance for all
    matrices of a block but query and key.

    Args:
        model: with DeepScaleLM's scales, and matrices of one variance in every block.
        simplified: whether value and output matrices have the feed-forward block's variances.
        inputs: arguments of `predict` for the input.

    Raises:
        DomainError: a block's output does not depend on its weights, or the iteration does not
            converge.
    """
    if not simplified:
        return _solved(model, inputs, solvable(model))
    ffn = tuple(name for name in solvable(model) if name in MATRICES["ffn"])
    others = [name for name in solvable(model) if name not in ffn]
    for _ in range(ROUNDS):
        changed = _solved(model, inputs, ffn)
        assert changed.weights is not None
        assert model.weights is not None
        before, after = np.asarray(model.weights.of("value")), changed.weights.of("ffn_in")
        model = changed.replace(weights=changed.weights.replace(**dict.fromkeys(others, after)))
        if np.allclose(before, after, rtol=1e-12, atol=0):
            return model
    raise DomainError("dslm: value and output weights do not settle; use simplified=False")


def described(inputs: Mapping[str, Any]) -> bool:
    """Whether inputs determine the token correlation of layer 1's input."""
    return bool({"correlation", "token_ids", "kernel", "pixels"} & set(inputs))


def by_token(model: Transformer, inputs: Mapping[str, Any]) -> bool:
    """Whether a prediction for such inputs is resolved by token."""
    stack, _ = stacks(model, inputs)
    return stack.resolved is True


def _solved(model: Transformer, inputs: Mapping[str, Any], free: tuple[str, ...]) -> Transformer:
    stack, memory = entered(model, inputs)
    found = solve_blocks(
        model, stack.enter(), stack.layout, free, lambda number, block: 1.0, False, memory
    )
    if found.missed:
        first = found.missed[0]
        raise DomainError(
            f"dslm: no weights give the {first.block} block of layer {first.layer} variance 1, "
            f"only {found.nearest:.3g}: its activation saturates or its input vanishes"
        )
    return model.replace(weights=scaled_weights(model, found.factors))
