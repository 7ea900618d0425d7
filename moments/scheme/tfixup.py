"""T-Fixup: no normalisation and no warm-up, weights smaller with depth."""

from __future__ import annotations

from typing import Any

from ..formulas.checks import check_choice
from ..formulas.law import Source
from ..model.transformer import Transformer
from .registry import Scheme
from .shared import SCALED, placed, xavier


def _tfixup(model: Transformer, role: str | None = None, per_head: bool = True) -> Transformer:
    """Xavier without norms, value, output and ffn matrices times a power of the depth.

    .67 N^(-1/4) in an encoder and (9 N)^(-1/4) in a decoder, which a model of no given `role` is
    where it is causal or has an encoder; token tables have variance 1/d_model times (9 N)^(-1/2),
    and no norm.
    """
    check_choice("role", role, ("encoder", "decoder", None))
    if model.encoder is not None:
        model = model.replace(encoder=_tfixup(model.encoder, "encoder", per_head))
    masked = model.encoder is not None or model.causal
    deep = (9 * model.layers) ** -0.25
    decodes = role == "decoder" or (role is None and masked)
    gain = deep if decodes else 0.67 * model.layers**-0.25
    weights = xavier(model, per_head)
    changes: dict[str, Any] = {name: weights.of(name) * gain**2 for name in SCALED}
    found = placed(
        model,
        "none",
        layernorm_scaling=False,
        weights=weights.replace(**changes),
        skip_scale=1.0,
        branch_scale=1.0,
    )
    if hasattr(found.embedding, "token_variance"):
        table = deep**2 / model.d_model
        embedding = found.embedding.replace(token_variance=table, norm=False)
        found = found.replace(embedding=embedding)
    return found


TFIXUP = Scheme(
    "t-fixup",
    "T-Fixup: no normalisation, value, output and ffn weights scaled by N^(-1/4)",
    ("norm", "weights", "skip_scale", "branch_scale", "embedding", "layernorm_scaling"),
    Source("Huang et al. 2020, T-Fixup", "section 3.2"),
    _tfixup,
    ("none",),
    both_stacks=True,
)
