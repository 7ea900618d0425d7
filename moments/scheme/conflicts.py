"""Conflicts of a scheme with an earlier one of the model, or with its placement of norms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ValidityWarning
from ..formulas.law import Source
from ..formulas.references import SUN, kedia
from ..model.transformer import Transformer
from .registry import Scheme
from .shared import SCALED
from .weights import shrinks_outward, t_fixup

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Conflict:
    """A conflict caused by `schemes`: a test of the models before and after and of the options, a
    note for the user, and its source."""

    schemes: tuple[str, ...]
    present: Callable[[Transformer, Transformer, Options], bool]
    note: str
    source: Source


def warn(scheme: Scheme, before: Transformer, after: Transformer, options: Options) -> None:
    """Emit a ValidityWarning for every conflict, at the caller of `with_scheme`."""
    notes = [
        f"{scheme.name}: {conflict.note} ({conflict.source})"
        for conflict in CONFLICTS
        if scheme.name in conflict.schemes and conflict.present(before, after, options)
    ]
    if not notes and scheme.placements and after.norm not in scheme.placements:
        used = " or ".join(f"norm={name!r}" for name in scheme.placements)
        notes = [
            f"{scheme.name} with norm={after.norm!r}: its authors use {used} ({scheme.source})"
        ]
    for note in notes:
        warnings.warn(note, ValidityWarning, stacklevel=4)


# --- traces of earlier schemes --------------------------------------------------------------------


def _scaled_skips(model: Transformer) -> bool:
    return not np.allclose(model.by_block("skip_scale"), 1.0)


def _scaled_branches(model: Transformer) -> bool:
    return not np.allclose(model.by_block("branch_scale"), 1.0)


def _unit_scales(model: Transformer) -> bool:
    """Whether squares of skip and branch scales sum to 1, as in DeepScaleLM."""
    squares = model.by_block("skip_scale") ** 2 + model.by_block("branch_scale") ** 2
    return bool(np.allclose(squares, 1.0))


def _starts_at_zero(model: Transformer) -> bool:
    return not np.any(model.by_block("branch_scale"))


def _fixup_weights(model: Transformer) -> bool:
    return model.weights in [
        t_fixup(model, role=role, per_head=per_head).weights
        for role in ("encoder", "decoder")
        for per_head in (True, False)
    ]


def _normed_then_dropped(model: Transformer) -> bool:
    embedding = model.embedding
    return embedding is not None and embedding.norm and embedding.dropout > 0


def _norms(model: Transformer) -> bool:
    return model.norm != "none"


_SUN_TABLE = Source(SUN, "section 6 and Table 6")
_REZERO = Source("Bachlechner et al. 2021, ReZero", "section 2")
_FIXUP = Source("Huang et al. 2020, T-Fixup", "section 3")
_DEEPNET = Source("Wang et al. 2022, DeepNet", "section 4 and Figure 2")
PLACING = ("pre-ln", "post-ln", "bamboo", "sandwich-ln", "peri-ln", "mix-ln", "group-ln", "b2t")

CONFLICTS = (
    Conflict(
        ("lns",),
        lambda before, after, _: shrinks_outward(before),
        "the output projections are already smaller with depth, as Scaled Initialisation sets "
        "them; together they do worse than LayerNorm Scaling alone",
        _SUN_TABLE,
    ),
    Conflict(
        ("scaled-init", "ds-init"),
        lambda before, after, _: bool(before.layernorm_scaling),
        "the model has LayerNorm Scaling; together they do worse than LayerNorm Scaling alone",
        _SUN_TABLE,
    ),
    Conflict(
        ("lns",),
        lambda before, after, _: "post" in before.placements,
        "the model was Post-LN, whose stream does not grow; it is now Pre-LN, for which "
        "LayerNorm Scaling is defined",
        Source(SUN, "section 4"),
    ),
    Conflict(
        ("lns",),
        lambda before, after, _: _scaled_branches(before),
        "blocks' outputs already have a scale, as LayerScale or SkipInit set it; the authors "
        "remove LayerScale before they compare",
        Source(SUN, "section 5.6"),
    ),
    Conflict(
        ("layerscale", "skipinit"),
        lambda before, after, _: bool(before.layernorm_scaling),
        "the model has LayerNorm Scaling; its authors remove LayerScale before they compare",
        Source(SUN, "section 5.6"),
    ),
    Conflict(
        ("lns",),
        lambda before, after, options: after.layernorm_scaling == "after-residual",
        "1/sqrt(l) on the sum itself diverges in training",
        Source(SUN, "Table 8, perplexity 1358"),
    ),
    Conflict(
        ("scaled-init",),
        lambda before, after, _: "post" in after.placements or after.norm == "b2t",
        "Post-LN's stream does not grow, so that output projections divided by the number of "
        "blocks only weaken every block",
        Source("Radford et al. 2019, GPT-2", "section 2.3: on a path that accumulates, in Pre-LN"),
    ),
    Conflict(
        ("deepnorm",),
        lambda before, after, options: bool(options.get("embedding", False)),
        "the gain belongs to value, output and feed-forward weights, not to the embedding",
        _DEEPNET,
    ),
    Conflict(
        ("deepnorm",),
        lambda before, after, options: not set(SCALED) <= set(options.get("matrices", SCALED)),
        "the bound on the update needs the gain on value, output and both feed-forward matrices",
        _DEEPNET,
    ),
    Conflict(
        ("dslm",),
        lambda before, after, _: bool(after.layernorm_scaling),
        "LayerNorm Scaling multiplies what the weights make of variance 1",
        kedia("section 3.5"),
    ),
    Conflict(
        ("dslm",),
        lambda before, after, _: (
            not _unit_scales(before) and (_scaled_skips(before) or _scaled_branches(before))
        ),
        "scales of an earlier scheme are replaced by lambda^2 + beta^2 = 1",
        kedia("section 3.5"),
    ),
    Conflict(
        ("dslm",),
        lambda before, after, _: not np.allclose(after.norm_gains, 1.0),
        "gains of the norms multiply what the weights make of variance 1",
        kedia("section 3.5"),
    ),
    Conflict(
        ("dslm",),
        lambda before, after, _: after.norm == "pre" and _normed_then_dropped(after),
        "the embedding is normalised and then dropped, so that layer 1 receives 1/(1 - p), not 1",
        kedia("section 3.5"),
    ),
    Conflict(
        (*PLACING, "hybridnorm"),
        lambda before, after, _: _starts_at_zero(before),
        "blocks start at zero, as ReZero has them instead of normalisation",
        _REZERO,
    ),
    Conflict(
        (*PLACING, "hybridnorm"),
        lambda before, after, _: not _norms(before) and _fixup_weights(before),
        "weights are T-Fixup's, which replace normalisation",
        _FIXUP,
    ),
    Conflict(
        ("mup",),
        lambda before, after, options: not options.get("scale_logits", True),
        "without logits over d_head, updates of query and key grow with the width",
        Source("Yang et al. 2022, Tensor Programs V", "Definition 4.1"),
    ),
)
