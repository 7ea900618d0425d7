"""Schemes that scale residual branches: a gain on every output, attention that starts as the
identity (Value-SkipInit), and scales from a prediction (Noci et al., ADMIN)."""

from __future__ import annotations

import math

import numpy as np

from ..errors import DomainError, without_warnings
from ..formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from ..formulas.checks import NONNEGATIVE, POSITIVE, check_choice, check_interval
from ..formulas.law import Source
from ..formulas.references import NOCI
from ..model.mixers import Absent
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..solver.solve import solve_objective
from .registry import Scheme
from .shared import blocks, placed, xavier


def _skipinit(
    model: Transformer, alpha: float | None = None, variant: str = "authors"
) -> Transformer:
    """Multiply every block's output by a learnable gain, initially alpha; the authors use no
    normalisation and also try 0, Sun et al. use Pre-LN.

    Default alpha of the variants: "authors": 1/sqrt(number of residual blocks), 2 N without
    cross-attention; "sun": 1/sqrt(N), as in Sun et al.
    """
    check_choice("variant", variant, ("authors", "sun"))
    count = blocks(model) if variant == "authors" else model.layers
    gain = 1 / math.sqrt(count) if alpha is None else alpha
    check_interval("alpha", gain, NONNEGATIVE)
    return model.replace(branch_scale=gain, skip_scale=1.0)


def _rezero(model: Transformer, alpha: float = 0.0) -> Transformer:
    """No normalisation, and a learnable gain on every block, initially zero."""
    check_interval("alpha", alpha, NONNEGATIVE)
    return placed(model, "none", layernorm_scaling=False, branch_scale=alpha, skip_scale=1.0)


def _layerscale(model: Transformer, epsilon: float | None = None) -> Transformer:
    """Pre-LN, every block's output times a learnable gain per feature, initially epsilon; None:
    the authors' .1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond."""
    by_depth = 0.1 if model.layers <= 18 else 1e-5 if model.layers <= 24 else 1e-6
    gain = by_depth if epsilon is None else epsilon
    check_interval("epsilon", gain, POSITIVE)
    return placed(model, "pre", branch_scale=gain, skip_scale=1.0)


def _depth_mup(model: Transformer, a: float = 1.0) -> Transformer:
    """Pre-LN, blocks' outputs times a / sqrt(N), N layers; the authors tune the base gain a."""
    check_interval("a", a, POSITIVE)
    return placed(model, "pre", branch_scale=a / math.sqrt(model.layers), skip_scale=1.0)


def _value_skipinit(model: Transformer) -> Transformer:
    """Attention weights alpha I + beta softmax(...), learned, initially with alpha 1 and beta 0."""
    return model.replace(identity_attention=True)


def _noci(
    model: Transformer, temperature: str | None = "solved", correlation: float | None = None
) -> Transformer:
    """Branches times 1/sqrt(N), and logits divided by a temperature.

    Args:
        model: its placement stays; the authors' is "post".
        temperature: "solved": one for all layers, with equal squared gradient norms of this model's
            query and value weights (geometric mean over layers); "per-layer": one for each layer;
            "printed": the authors' closed form for uniform attention in every layer, from the
            moments of its input; None: unchanged.
        correlation: token correlation of the input; None: that of the embedding, else 0.
    """
    check_choice("temperature", temperature, ("solved", "per-layer", "printed", None))
    scaled = model.replace(branch_scale=1 / math.sqrt(model.layers), skip_scale=1.0)
    if temperature == "printed":
        return scaled.replace(temperature=_printed(scaled, correlation))
    if temperature is None:
        return scaled
    goal = "query_value_balance" + ("_per_layer" if temperature == "per-layer" else "")
    plan = solve_objective(
        scaled, goal, free="temperature", correlation=correlation, tolerance=1e-6
    )
    return plan.model


def _printed(model: Transformer, correlation: float | None) -> list[float]:
    """The temperature of every layer by the authors' closed form."""
    with without_warnings():
        prediction = predict(model, correlation=correlation)
    frame = prediction.to_frame()
    normed = frame[frame.site == "attention.norm"]
    if model.norm == "pre" and len(normed) == model.layers:
        moments = zip(normed.variance, normed.correlation, strict=True)
    else:
        moments = zip(prediction.variance[:-1], prediction.correlation[:-1], strict=True)
    law = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")
    shape = {"d_model": model.d_model, "seq_len": model.seq_len}
    squares = [law(**shape, x_variance=v, x_correlation=r) for v, r in moments]
    return [1 / float(np.sqrt(square)) for square in squares]


def _admin(
    model: Transformer, correlation: float | None = None, per_head: bool = True
) -> Transformer:
    """x <- LayerNorm(omega_i x + f_i(x)), omega_i^2 the summed variance of all addends before i.

    omega_1 = 1; the other sums are of the input's variance and of earlier blocks' output variances,
    as in the authors' code. A prediction replaces their profiling pass with omega = 1 and Xavier
    weights; its token correlation is `correlation`, or None: that of the embedding, else 0.
    """
    if model.encoder is not None:
        raise DomainError("admin needs a scale for every cross-attention: use a single stack")
    profiled = placed(
        model, "post", weights=xavier(model, per_head), skip_scale=1.0, branch_scale=1.0
    )
    with without_warnings():
        prediction = predict(profiled, correlation=correlation)
    frame = prediction.to_frame()
    variances = {
        (int(row["layer"]), str(row["site"])): float(row["variance"])
        for row in frame.to_dict("records")
    }
    sites = ("attention.dropout", "ffn.dropout")
    # An absent block adds no variance, and has no residual sum that uses its scale.
    outputs = [variances.get((n, site), 0.0) for n in range(1, model.layers + 1) for site in sites]
    before = float(prediction.variance[0]) + np.concatenate([[0.0], np.cumsum(outputs)[:-1]])
    before[0] = 1.0
    if isinstance(model.mixers[0], Absent):
        before[1] = 1.0
    return profiled.replace(skip_scale=np.sqrt(before).reshape(model.layers, 2).tolist())


SCHEMES = (
    Scheme(
        "skipinit",
        "SkipInit: every block's output times 1/sqrt(number of blocks)",
        ("branch_scale", "skip_scale"),
        Source("De and Smith 2020, SkipInit", "section 4"),
        _skipinit,
        ("none", "pre"),
    ),
    Scheme(
        "rezero",
        "ReZero: no normalisation, blocks start at zero",
        ("norm", "branch_scale", "skip_scale", "layernorm_scaling"),
        Source("Bachlechner et al. 2021, ReZero", "equation 2"),
        _rezero,
        ("none",),
    ),
    Scheme(
        "layerscale",
        "LayerScale: a small gain per feature on every block's output, Pre-LN",
        ("norm", "branch_scale", "skip_scale"),
        Source("Touvron et al. 2021, CaiT", "section 2"),
        _layerscale,
        ("pre",),
    ),
    Scheme(
        "depth-mup",
        "depth-muP: blocks' outputs times a/sqrt(N), Pre-LN",
        ("norm", "branch_scale", "skip_scale"),
        Source("Yang et al. 2023, Tensor Programs VI", "Table 1"),
        _depth_mup,
        ("pre",),
    ),
    Scheme(
        "value-skipinit",
        "Value-SkipInit: attention starts as the identity",
        ("identity_attention",),
        Source("He et al. 2023, Deep Transformers without Shortcuts", "section 3"),
        _value_skipinit,
    ),
    Scheme(
        "noci",
        "residual branches times 1/sqrt(N), and a temperature on the logits",
        ("branch_scale", "skip_scale", "temperature"),
        Source(NOCI, "sections 3.2 and 4, and Appendix C.2"),
        _noci,
        ("post", "none"),
        predictions=20,
    ),
    Scheme(
        "admin",
        "ADMIN: Post-LN, skip connections scaled by the blocks before them",
        ("norm", "weights", "skip_scale", "branch_scale"),
        Source(
            "Liu et al. 2020, Understanding the difficulty of training transformers", "section 4.2"
        ),
        _admin,
        ("post",),
    ),
)
