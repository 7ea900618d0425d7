"""Schemes that set one thing: Xavier weights, one deviation for all, LayerNorm Scaling."""

from __future__ import annotations

from ..formulas.checks import POSITIVE, check_in
from ..formulas.law import Source
from ..formulas.references import SUN
from ..model.transformer import Transformer
from ..model.weights import Weights
from .registry import Scheme
from .shared import placed, xavier


def _xavier(model: Transformer, per_head: bool = True) -> Transformer:
    """Glorot variances, of each head of query, key and value by itself where `per_head`."""
    return model.replace(weights=xavier(model, per_head))


def _normal(model: Transformer, variance: float = 0.02**2) -> Transformer:
    """One variance for every matrix, whatever the width or depth."""
    check_in("variance", variance, POSITIVE)
    return model.replace(weights=Weights.normal(variance))


def _layernorm_scaling(model: Transformer, position: str = "after-norm") -> Transformer:
    """Layer l's signal times 1/sqrt(l) at one place.

    Args:
        model: becomes Pre-LN.
        position: "after-norm", the authors'; the others of their Table 8: "before-norm",
            "after-block" (which they use in a ViT), "after-residual", "attention-only", "ffn-only"
            (its "LNS only after Attn", "only after FFN", read as after the norm of that block).
    """
    return placed(model, "pre", layernorm_scaling=position)


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
        "lns",
        "LayerNorm Scaling: layer l's normalised output times 1/sqrt(l), Pre-LN",
        ("norm", "layernorm_scaling"),
        Source(SUN, "equation 18 and Table 8"),
        _layernorm_scaling,
        ("pre",),
    ),
)
