"""Schemes that set the placement and kind of the normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..formulas.checks import POSITIVE, Interval, check_choice, check_count, check_interval
from ..formulas.law import Source
from ..formulas.references import SUN
from ..model.transformer import Transformer
from .registry import Scheme
from .shared import placed


def _to(placement: str) -> Callable[[Transformer], Transformer]:
    def transform(model: Transformer) -> Transformer:
        return placed(model, placement)

    return transform


def _mix(model: Transformer, fraction: float = 0.25) -> Transformer:
    """A `fraction` of the layers, rounded down, Post-LN and the rest above them Pre-LN; the authors
    use .25."""
    check_interval("fraction", fraction, Interval(0.0, 1.0))
    return model.replace(norm="mix", post_layers=math.floor(fraction * model.layers))


def _peri(model: Transformer) -> Transformer:
    """Norms before and after every block, after the embedding and before the output."""
    changes: dict[str, Any] = {}
    for name in ("embedding", "head"):
        part = getattr(model, name)
        if part is not None:
            changes[name] = part.replace(norm=True)
    return placed(model, "sandwich", **changes)


def _group(model: Transformer, groups: int = 32) -> Transformer:
    """Pre-LN with features normalised in groups; the authors use 32."""
    check_count("groups", groups)
    return placed(model, "pre", norm_groups=groups)


def _dyt(model: Transformer, alpha: float = 0.5) -> Transformer:
    """Replace every norm by tanh(alpha x).

    Args:
        model: its placement stays.
        alpha: .5 is the authors' value outside language models; in language models theirs decreases
            with width, and is larger before attention than elsewhere.
    """
    check_interval("alpha", alpha, POSITIVE)
    return model.replace(normalization="dyt", dyt_alpha=alpha)


def _qk_norm(model: Transformer, normalization: str = "layernorm") -> Transformer:
    """Normalise queries and keys of every head by "layernorm" or "rmsnorm"."""
    check_choice("normalization", normalization, ("layernorm", "rmsnorm"))
    return model.replace(qk_norm=normalization)


def _layernorm_scaling(model: Transformer, position: str = "after-norm") -> Transformer:
    """Multiply layer l's signal by 1/sqrt(l) at one position.

    Args:
        model: becomes Pre-LN.
        position: "after-norm" as proposed, or another row of the authors' Table 8: "before-norm",
            "after-block" (which they use in a ViT), "after-residual", "attention-only", "ffn-only"
            ("LNS only after Attn" and "only after FFN", read as after the norm of that block).
    """
    return placed(model, "pre", layernorm_scaling=position)


def _placement(
    name: str,
    title: str,
    transform: Callable[..., Transformer],
    paper: str,
    where: str,
    *sets: str,
    on: tuple[str, ...] = (),
) -> Scheme:
    return Scheme(name, title, sets or ("norm",), Source(paper, where), transform, on)


PLACEMENTS = (
    _placement("pre-ln", "Pre-LN", _to("pre"), "Xiong et al. 2020", "Figure 1"),
    _placement("post-ln", "Post-LN", _to("post"), "Vaswani et al. 2017", "section 3.1"),
    _placement(
        "bamboo", "Bamboo: plain Pre-LN", _to("pre"), "Xue et al. 2023, Bamboo", "section 4"
    ),
    _placement(
        "sandwich-ln",
        "Sandwich-LN: norms before and after every block",
        _to("sandwich"),
        "Ding et al. 2021, CogView",
        "section 2.4",
    ),
    _placement(
        "peri-ln",
        "Peri-LN: norms around every block and after the embedding",
        _peri,
        "Kim et al. 2025, Peri-LN",
        "section 2.2",
        "norm",
        "embedding",
        "head",
    ),
    _placement(
        "mix-ln",
        "Mix-LN: the first quarter of the layers Post-LN, the others Pre-LN",
        _mix,
        "Li et al. 2024, Mix-LN",
        "section 3",
        "norm",
        "post_layers",
    ),
    _placement(
        "group-ln",
        "Group-LN: features normalised in groups, Pre-LN",
        _group,
        "Wu and He 2018, Group Normalization",
        "equation 7, as in Ma et al. 2024",
        "norm",
        "norm_groups",
    ),
    _placement(
        "hybridnorm",
        "HybridNorm: queries, keys and values normalised, Post-LN around the ffn block",
        _to("hybrid"),
        "Zhuo et al. 2025, HybridNorm",
        "equations 6 to 8",
    ),
    _placement(
        "b2t",
        "B2T: Post-LN with a connection from a layer's input to its last norm",
        _to("b2t"),
        "Takase et al. 2022, B2T connection",
        "equation 11",
    ),
    _placement(
        "dyt",
        "DyT: tanh(alpha x) instead of normalisation",
        _dyt,
        "Zhu et al. 2025, Transformers without normalization",
        "section 4",
        "normalization",
        "dyt_alpha",
        on=("pre", "post"),
    ),
    _placement(
        "qk-norm",
        "queries and keys normalised head by head, as in stable ViTs",
        _qk_norm,
        "Dehghani et al. 2023, ViT-22B",
        "section 2",
        "qk_norm",
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
