"""Schemes that set one thing: Xavier weights, one deviation for all, LayerNorm Scaling."""

from __future__ import annotations

from ..checks import check_in
from ..law import Source
from ..laws.references import SUN
from ..symbols import POSITIVE
from ..transformer import Transformer
from ..weights import Weights
from .registry import Scheme


def _xavier(model: Transformer) -> Transformer:
    return model.replace(weights=Weights.xavier(model.d_model, model.heads, model.d_ff))


def _normal(model: Transformer, variance: float = 0.02**2) -> Transformer:
    check_in("variance", variance, POSITIVE)
    return model.replace(weights=Weights.normal(variance))


def _layernorm_scaling(model: Transformer) -> Transformer:
    return model.replace(norm="pre", layernorm_scaling="after-norm")


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
        Source(SUN, "equation 18"),
        _layernorm_scaling,
    ),
)
