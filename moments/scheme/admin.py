"""ADMIN: skip connections as large as everything before them, profiled by prediction."""

from __future__ import annotations

import numpy as np

from ..errors import DomainError, without_warnings
from ..formulas.law import Source
from ..model.mixers import Absent
from ..model.transformer import Transformer
from ..prediction.predict import predict
from .registry import Scheme
from .shared import placed, xavier


def _admin(
    model: Transformer, correlation: float | None = None, per_head: bool = True
) -> Transformer:
    """x <- LayerNorm(omega_i x + f_i(x)), omega_i^2 the variance of all that came before block i.

    omega_1 = 1; then the input's variance and those of the blocks' outputs add up, as in the
    authors' code. Their profiling pass, with omega = 1 and Xavier weights, is our prediction, whose
    tokens correlate as the embedding's, else by 0, unless `correlation` is given.
    """
    if model.encoder is not None:
        raise DomainError("admin needs a scale for every cross-attention: use a single stack")
    profiled = placed(
        model, "post", weights=xavier(model, per_head), skip_scale=1.0, branch_scale=1.0
    )
    with without_warnings():
        found = predict(profiled, correlation=correlation)
    frame = found.to_frame()
    variances = {
        (int(row["layer"]), str(row["site"])): float(row["variance"])
        for row in frame.to_dict("records")
    }
    sites = ("attention.dropout", "ffn.dropout")
    # Absent blocks add nothing, and have no sum that a scale would reach.
    outputs = [variances.get((n, site), 0.0) for n in range(1, model.layers + 1) for site in sites]
    before = float(found.variance[0]) + np.concatenate([[0.0], np.cumsum(outputs)[:-1]])
    before[0] = 1.0
    if isinstance(model.mixers[0], Absent):
        before[1] = 1.0
    return profiled.replace(skip_scale=np.sqrt(before).reshape(model.layers, 2).tolist())


ADMIN = Scheme(
    "admin",
    "ADMIN: Post-LN, skip connections scaled by the blocks before them",
    ("norm", "weights", "skip_scale", "branch_scale"),
    Source("Liu et al. 2020, Understanding the difficulty of training transformers", "section 4.2"),
    _admin,
    ("post",),
)
