"""Parametrisations by width and depth: which variances, scales and learning rates follow a size.

With m = width over the base's and l = depth over the base's:

    fixed      nothing follows
    standard   variances of hidden matrices 1/m (an untied head's too)
    mup        besides, Adam: rates of hidden matrices 1/m; SGD: rates of tables and vectors m; the
               logits are multiplied by 1/m and the head's entries keep their variance (Yang et al.
               2022, Table 8)
    depth-mup  mup, branches times l^(-1/2), and Adam's hidden and vector rates l^(-1/2) (Yang et
               al. 2023)
    completep  mup, branches times 1/l, rates as mup's (Dey et al. 2025, alpha = 1; for Adam)

Heads keep their width, so that attention's logits need no factor. Muon's rates do not follow width
where its step is scaled by shape (adjust="spectral"; Jordan 2024, Bernstein 2025).
"""

from __future__ import annotations

from typing import Any

from ..errors import domain_error
from ..formulas.checks import check_count
from ..model.transformer import Transformer
from ..model.weights import MATRICES

PARAMETRISATIONS = ("fixed", "standard", "mup", "depth-mup", "completep")


def parametrised(
    model: Transformer, name: str, optimizer: str, d_model: int, layers: int
) -> tuple[Transformer, dict[str, float]]:
    """A model of another width and depth, and multipliers of the learning rate.

    Raises:
        DomainError: a width that is no multiple of a head's, a model of unequal layers, or
            completep for SGD or Muon, of which its authors say nothing.
    """
    if name == "completep" and optimizer in ("sgd", "muon"):
        raise domain_error("parametrisation", name, f"another one for {optimizer}: Adam's")
    check_count("d_model", d_model)
    check_count("layers", layers)
    d_head = int(model.d_head or model.d_model // model.heads)
    if d_model % d_head:
        raise domain_error("d_model", d_model, f"a multiple of a head's width, {d_head}")
    m, deeper = d_model / model.d_model, layers / model.layers
    heads = d_model // d_head
    changes: dict[str, Any] = {"d_model": d_model, "heads": heads, "layers": layers}
    if model.d_ff is not None:
        changes["d_ff"] = round(model.d_ff * m)
    if model.kv_heads not in (None, model.heads):
        changes["kv_heads"] = max(1, round((model.kv_heads or heads) * m))
    own = model.layer_weights(1)
    if any(model.layer_weights(n) != own for n in range(2, model.layers + 1)):
        raise domain_error("weights", "by layer", "alike in all layers, to be scaled")
    hidden = 1.0 if name == "fixed" else 1 / m
    changes["weights"] = type(model.weights)(  # type: ignore[misc]
        **{matrix: getattr(own, matrix) * hidden for matrix in MATRICES},
        distribution=model.weights.distribution,  # type: ignore[union-attr]
    )
    head = model.head
    multipliers: dict[str, float] = {}
    if name == "standard" and not head.tied and head.weight_variance is not None:
        head = head.replace(weight_variance=head.weight_variance / m)
    if name in ("mup", "depth-mup", "completep"):
        head = head.replace(output_scale=head.output_scale / m)
        if optimizer == "sgd":
            multipliers = {"embedding": m, "vectors": m, "head": m}
        elif optimizer != "muon":
            multipliers = {"matrices": 1 / m}
        power = {"mup": 0.0, "depth-mup": 0.5, "completep": 1.0}[name]
        scales = model.by_block("branch_scale")
        changes["branch_scale"] = float(scales[0, 0]) * deeper**-power
        if name == "depth-mup" and optimizer not in ("sgd", "muon"):
            multipliers["matrices"] = multipliers.get("matrices", 1.0) * deeper**-0.5
            multipliers["vectors"] = deeper**-0.5
    changes["head"] = head
    return model.replace(**changes), multipliers
