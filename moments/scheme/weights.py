"""Schemes that set the variances of weights: by fans, by depth, by width."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..formulas.checks import POSITIVE, check_choice, check_count, check_flag, check_interval
from ..formulas.law import Source
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Weights
from .registry import Scheme
from .shared import SCALED, blocks, placed, xavier


def _xavier(model: Transformer, per_head: bool = True) -> Transformer:
    """Glorot variances; with `per_head` each head of query, key and value is its own matrix."""
    return model.replace(weights=xavier(model, per_head))


def _normal(model: Transformer, variance: float = 0.02**2) -> Transformer:
    """One variance for every matrix, whatever the width or depth."""
    check_interval("variance", variance, POSITIVE)
    return model.replace(weights=Weights.normal(variance))


def _deepnorm(
    model: Transformer,
    matrices: tuple[str, ...] = SCALED,
    embedding: bool = False,
    per_head: bool = True,
) -> Transformer:
    """x <- LayerNorm(alpha x + f(x)), Xavier with gain beta on `matrices`, and on the token table
    with `embedding`.

    A single stack has alpha = (2 N)^(1/4) and beta = (8 N)^(-1/4); a decoder of M layers with an
    encoder of N has (3 M)^(1/4) and (12 M)^(-1/4), and its encoder .81 (N^4 M)^(1/16) and .87 (N^4
    M)^(-1/16). The authors' code initialises all heads as one matrix (`per_head` False).
    """
    for name in matrices:
        check_choice("matrices", name, SCALED)
    check_flag("embedding", embedding)
    encoder = model.encoder
    if encoder is None:
        alpha, gain = (2 * model.layers) ** 0.25, (8 * model.layers) ** -0.25
    else:
        alpha, gain = (3 * model.layers) ** 0.25, (12 * model.layers) ** -0.25
        depth = encoder.layers**4 * model.layers
        scales = 0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)
        model = model.replace(encoder=_scaled(encoder, *scales, matrices, per_head))
    result = _scaled(model, alpha, gain, matrices, per_head)
    if embedding and hasattr(result.embedding, "token_variance"):
        table = result.embedding.token_variance * gain**2
        result = result.replace(embedding=result.embedding.replace(token_variance=table))
    return result


def _scaled(
    model: Transformer, alpha: float, gain: float, matrices: tuple[str, ...], per_head: bool
) -> Transformer:
    plain = xavier(model, per_head)
    layer: Any = plain.layer(1)
    changes = {name: getattr(layer, name) * gain**2 for name in matrices}
    return placed(
        model, "post", weights=plain.replace(**changes), skip_scale=alpha, branch_scale=1.0
    )


VARIANTS = ("gpt2", "megatron", "olmo", "sun")


def _ds_init(
    model: Transformer, alpha: float = 1.0, variant: str = "authors", per_head: bool = True
) -> Transformer:
    """Xavier, with standard deviations of layer l times alpha / sqrt(l), alpha = 1 in the paper;
    "sun": alpha / sqrt(2 l), which Sun et al. call depth-scaled."""
    check_interval("alpha", alpha, POSITIVE)
    check_choice("variant", variant, ("authors", "sun"))
    plain = xavier(model, per_head)
    layer = np.arange(1, model.layers + 1)
    shrink = alpha**2 / (layer if variant == "authors" else 2 * layer)
    used = [name for name in MATRICES if getattr(plain, name) is not None]
    return model.replace(
        weights=plain.replace(**{name: list(plain.of(name) * shrink) for name in used})
    )


def _scaled_init(
    model: Transformer, variance: float | None = None, variant: str = "gpt2"
) -> Transformer:
    """One variance for all matrices but `output` and `ffn_out`, whose variance falls with depth.

    Args:
        model: its placement stays; the authors' is "pre".
        variance: of the other matrices; None: .02^2, and 1 / d_model for "olmo" and "sun".
        variant: "gpt2" and "megatron": divided by the number of residual blocks, 2 N without
            cross-attention; "olmo", its code: 1 / (2 fan_in l) in layer l; "sun", as Sun et al.
            print OLMo's: 1 / (2 d_model l) for both matrices.
    """
    check_choice("variant", variant, VARIANTS)
    published = 0.02**2 if variant in ("gpt2", "megatron") else 1 / model.d_model
    base = published if variance is None else variance
    check_interval("variance", base, POSITIVE)
    if variant in ("gpt2", "megatron"):
        return model.replace(weights=Weights.normal(base, output_divisor=blocks(model)))
    fan_in = {"output": model.heads * (model.d_head or 0), "ffn_out": model.d_ff or 0}
    if variant == "sun":
        fan_in = dict.fromkeys(fan_in, model.d_model)
    layers = range(1, model.layers + 1)
    outward = {name: [1 / (2 * width * n) for n in layers] for name, width in fan_in.items()}
    return model.replace(weights=Weights.normal(base).replace(**outward))


def shrinks_outward(model: Transformer) -> bool:
    """Whether output projections have at most .4 of the value projections' variance on average, as
    after `_scaled_init`."""
    if model.layers < 2 or model.weights is None:
        return False
    ratios = np.asarray(model.weights.of("output")) / np.asarray(model.weights.of("value"))
    return math.isfinite(ratios.mean()) and bool(ratios.mean() <= 0.4)


def t_fixup(model: Transformer, role: str | None = None, per_head: bool = True) -> Transformer:
    """No norms; Xavier with value, output and ffn matrices times a power of the depth.

    The factor is .67 N^(-1/4) in an encoder and (9 N)^(-1/4) in a decoder; without a `role` a model
    is a decoder if it is causal or has an encoder. Token tables have variance (9 N)^(-1/2) /
    d_model, and no norm behind them.
    """
    check_choice("role", role, ("encoder", "decoder", None))
    if model.encoder is not None:
        model = model.replace(encoder=t_fixup(model.encoder, "encoder", per_head))
    masked = model.encoder is not None or model.causal
    deep = (9 * model.layers) ** -0.25
    decodes = role == "decoder" or (role is None and masked)
    gain = deep if decodes else 0.67 * model.layers**-0.25
    weights = xavier(model, per_head)
    changes: dict[str, Any] = {name: weights.of(name) * gain**2 for name in SCALED}
    result = placed(
        model,
        "none",
        layernorm_scaling=False,
        weights=weights.replace(**changes),
        skip_scale=1.0,
        branch_scale=1.0,
    )
    if hasattr(result.embedding, "token_variance"):
        table = deep**2 / model.d_model
        embedding = result.embedding.replace(token_variance=table, norm=False)
        result = result.replace(embedding=embedding)
    return result


def _mup(
    model: Transformer,
    variance: float = 1.0,
    base_width: int = 256,
    base_d_head: int | None = None,
    scale_logits: bool = True,
    zero_query: bool = False,
) -> Transformer:
    """Matrices of variance `variance`/fan_in, logits q.k sqrt(base_d_head)/d_head, and output
    logits times base_width/d_model: at the base shape, the usual model.

    Args:
        model: its placement stays.
        variance: that of a matrix's output for unit input.
        base_width, base_d_head: the shape at which output and attention logits are unscaled; None:
            base_width/heads.
        scale_logits: whether the attention logits are scaled.
        zero_query: whether query weights start at zero, which the authors recommend in Appendix D.
    """
    check_interval("variance", variance, POSITIVE)
    check_count("base_width", base_width)
    check_flag("scale_logits", scale_logits)
    check_flag("zero_query", zero_query)
    if base_d_head is not None:
        check_count("base_d_head", base_d_head)
    d_model, d_ff, d_head = model.d_model, model.d_ff or 0, model.d_head or 0
    base_head = base_width / model.heads if base_d_head is None else base_d_head
    weights = Weights.normal(variance / d_model).replace(
        output=variance / (model.heads * d_head), ffn_out=variance / d_ff
    )
    result = model.replace(weights=weights.replace(query=0.0) if zero_query else weights)
    if scale_logits:
        result = result.replace(temperature=math.sqrt(d_head / base_head))
    if model.head is not None:
        scale = model.head.output_scale * base_width / d_model
        result = result.replace(head=model.head.replace(output_scale=scale))
    return result


SCHEMES = (
    Scheme(
        "xavier",
        "Glorot weights, every head of query, key and value a matrix of its own",
        ("weights",),
        Source("Glorot and Bengio 2010", "equation 16"),
        _xavier,
    ),
    Scheme(
        "normal",
        "one variance for every matrix",
        ("weights",),
        Source("Devlin et al. 2019, BERT", "its released configuration, deviation 0.02"),
        _normal,
    ),
    Scheme(
        "deepnorm",
        "DeepNorm: skip connection times alpha under Post-LN, Xavier gain beta",
        ("norm", "weights", "skip_scale", "branch_scale", "embedding"),
        Source("Wang et al. 2022, DeepNet", "Figure 2 and Table 2"),
        _deepnorm,
        ("post",),
        both_stacks=True,
    ),
    Scheme(
        "ds-init",
        "DS-Init: Xavier, deviations in layer l over sqrt(l)",
        ("weights",),
        Source("Zhang et al. 2019, Depth-Scaled Initialization", "equation 6"),
        _ds_init,
        ("post",),
    ),
    Scheme(
        "scaled-init",
        "Scaled Initialisation: output projections' variance over 2 N (GPT-2, Megatron, OLMo)",
        ("weights",),
        Source("Radford et al. 2019, GPT-2", "section 2.3; Shoeybi et al. 2019; OLMo's code"),
        _scaled_init,
        ("pre",),
    ),
    Scheme(
        "t-fixup",
        "T-Fixup: no normalisation, value, output and ffn weights scaled by N^(-1/4)",
        ("norm", "weights", "skip_scale", "branch_scale", "embedding", "layernorm_scaling"),
        Source("Huang et al. 2020, T-Fixup", "section 3.2"),
        t_fixup,
        ("none",),
        both_stacks=True,
    ),
    Scheme(
        "mup",
        "muP: variances 1/fan_in, logits divided by d_head, output by width",
        ("weights", "temperature", "head"),
        Source("Yang et al. 2022, Tensor Programs V", "Table 8 and Definition 4.1"),
        _mup,
    ),
)
