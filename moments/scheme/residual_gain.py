"""Schemes that set where blocks start: one gain on every output (SkipInit, ReZero, LayerScale,
depth-muP), or attention that starts as the identity (Value-SkipInit)."""

from __future__ import annotations

import math

from ..formulas.checks import NONNEGATIVE, POSITIVE, check_choice, check_in
from ..formulas.law import Source
from ..model.transformer import Transformer
from .registry import Scheme
from .shared import blocks, placed


def _skipinit(
    model: Transformer, alpha: float | None = None, variant: str = "authors"
) -> Transformer:
    """Every block's output times a learnable gain that starts at alpha; the authors have no
    normalisation and also try 0, Sun et al. have Pre-LN.

    The variant's own alpha is "authors": 1/sqrt(number of residual blocks), 2 N without
    cross-attention; "sun": 1/sqrt(N), as Sun et al. have it.
    """
    check_choice("variant", variant, ("authors", "sun"))
    count = blocks(model) if variant == "authors" else model.layers
    gain = 1 / math.sqrt(count) if alpha is None else alpha
    check_in("alpha", gain, NONNEGATIVE)
    return model.replace(branch_scale=gain, skip_scale=1.0)


def _rezero(model: Transformer, alpha: float = 0.0) -> Transformer:
    """No normalisation, and a learnable gain on every block that starts at zero."""
    check_in("alpha", alpha, NONNEGATIVE)
    return placed(model, "none", layernorm_scaling=False, branch_scale=alpha, skip_scale=1.0)


def _layerscale(model: Transformer, epsilon: float | None = None) -> Transformer:
    """Pre-LN, every block's output times a learnable gain per feature that starts at epsilon; None:
    the authors' .1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond."""
    by_depth = 0.1 if model.layers <= 18 else 1e-5 if model.layers <= 24 else 1e-6
    gain = by_depth if epsilon is None else epsilon
    check_in("epsilon", gain, POSITIVE)
    return placed(model, "pre", branch_scale=gain, skip_scale=1.0)


def _depth_mup(model: Transformer, a: float = 1.0) -> Transformer:
    """Pre-LN, blocks' outputs times a / sqrt(N), N layers; the authors tune the base gain a."""
    check_in("a", a, POSITIVE)
    return placed(model, "pre", branch_scale=a / math.sqrt(model.layers), skip_scale=1.0)


def _value_skipinit(model: Transformer) -> Transformer:
    """Attention weights alpha I + beta softmax(...), learned, that start at alpha 1 and beta 0."""
    return model.replace(identity_attention=True)


RESIDUAL_GAIN = (
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
)
