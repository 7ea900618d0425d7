"""DeepNorm: a larger skip connection under Post-LN, and smaller value, output and ffn weights."""

from __future__ import annotations

from typing import Any

from ..formulas.checks import check_choice, check_flag
from ..formulas.law import Source
from ..model.transformer import Transformer
from .registry import Scheme
from .shared import SCALED, placed, xavier


def _deepnorm(
    model: Transformer,
    matrices: tuple[str, ...] = SCALED,
    embedding: bool = False,
    per_head: bool = True,
) -> Transformer:
    """x <- LayerNorm(alpha x + f(x)), Xavier with gain beta on `matrices`, and on the token table
    where `embedding`.

    A stack alone has alpha = (2 N)^(1/4) and beta = (8 N)^(-1/4); a decoder of M layers beside an
    encoder of N has (3 M)^(1/4) and (12 M)^(-1/4), and its encoder .81 (N^4 M)^(1/16) and .87 (N^4
    M)^(-1/16). The authors' code takes the heads together (`per_head` False).
    """
    for name in matrices:
        check_choice("matrices", name, SCALED)
    check_flag("embedding", embedding)
    encoder = model.encoder
    if encoder is None:
        alpha, gain = (2 * model.layers) ** 0.25, (8 * model.layers) ** -0.25
    else:
        alpha, gain = (3 * model.layers) ** 0.25, (12 * model.layers) ** -0.25
        depth = encoder.layers**4 * model.layers
        outer = 0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)
        model = model.replace(encoder=_scaled(encoder, *outer, matrices, per_head))
    found = _scaled(model, alpha, gain, matrices, per_head)
    if embedding and hasattr(found.embedding, "token_variance"):
        table = found.embedding.token_variance * gain**2
        found = found.replace(embedding=found.embedding.replace(token_variance=table))
    return found


def _scaled(
    model: Transformer, alpha: float, gain: float, matrices: tuple[str, ...], per_head: bool
) -> Transformer:
    plain = xavier(model, per_head)
    one: Any = plain.layer(1)
    changes = {name: getattr(one, name) * gain**2 for name in matrices}
    return placed(
        model, "post", weights=plain.replace(**changes), skip_scale=alpha, branch_scale=1.0
    )


DEEPNORM = Scheme(
    "deepnorm",
    "DeepNorm: skip connection times alpha under Post-LN, Xavier gain beta",
    ("norm", "weights", "skip_scale", "branch_scale", "embedding"),
    Source("Wang et al. 2022, DeepNet", "Figure 2 and Table 2"),
    _deepnorm,
    ("post",),
    both_stacks=True,
)
