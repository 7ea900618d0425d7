"""Schemes that make weights smaller with depth: DS-Init, and Scaled Initialisation's variants."""

from __future__ import annotations

import math

import numpy as np

from ..formulas.checks import POSITIVE, check_choice, check_in
from ..formulas.law import Source
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Weights
from .registry import Scheme
from .shared import blocks, xavier

VARIANTS = ("gpt2", "megatron", "olmo", "sun")


def _ds_init(
    model: Transformer, alpha: float = 1.0, variant: str = "authors", per_head: bool = True
) -> Transformer:
    """Xavier, every matrix of layer l with its deviation times alpha / sqrt(l), the authors' alpha
    being 1; "sun": alpha / sqrt(2 l), which Sun et al. call depth-scaled."""
    check_in("alpha", alpha, POSITIVE)
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
    """One variance for all, that of `output` and `ffn_out` smaller with depth.

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
    check_in("variance", base, POSITIVE)
    if variant in ("gpt2", "megatron"):
        return model.replace(weights=Weights.normal(base, output_divisor=blocks(model)))
    fan_in = {"output": model.heads * (model.d_head or 0), "ffn_out": model.d_ff or 0}
    if variant == "sun":
        fan_in = dict.fromkeys(fan_in, model.d_model)
    layers = range(1, model.layers + 1)
    outward = {name: [1 / (2 * width * n) for n in layers] for name, width in fan_in.items()}
    return model.replace(weights=Weights.normal(base).replace(**outward))


def shrinks_outward(model: Transformer) -> bool:
    """Whether output projections are smaller than value projections by depth, as here set."""
    if model.layers < 2 or model.weights is None:
        return False
    ratios = np.asarray(model.weights.of("output")) / np.asarray(model.weights.of("value"))
    return math.isfinite(ratios.mean()) and bool(ratios.mean() <= 0.4)


DEPTH_SCALED = (
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
)
