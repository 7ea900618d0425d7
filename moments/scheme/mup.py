"""muP: variances 1/fan_in, logits over d_head, output over width."""

from __future__ import annotations

import math

from ..formulas.checks import POSITIVE, check_count, check_flag, check_in
from ..formulas.law import Source
from ..model.transformer import Transformer
from ..model.weights import Weights
from .registry import Scheme


def _mup(
    model: Transformer,
    variance: float = 1.0,
    base_width: int = 256,
    base_d_head: int | None = None,
    scale_logits: bool = True,
    zero_query: bool = False,
) -> Transformer:
    """Matrices of variance `variance`/fan_in, logits q.k sqrt(base_d_head)/d_head, and output
    logits times base_width/d_model: at the base shape, the usual model.

    Args:
        model: its placement stays.
        variance: that of a matrix's output for unit input.
        base_width, base_d_head: where output and logits are not scaled; None: base_width/heads.
        scale_logits: whether the logits are scaled at all.
        zero_query: whether query weights start at zero, which the authors recommend in Appendix D.
    """
    check_in("variance", variance, POSITIVE)
    check_count("base_width", base_width)
    check_flag("scale_logits", scale_logits)
    check_flag("zero_query", zero_query)
    if base_d_head is not None:
        check_count("base_d_head", base_d_head)
    d_model, d_ff, d_head = model.d_model, model.d_ff or 0, model.d_head or 0
    base_head = base_width / model.heads if base_d_head is None else base_d_head
    weights = Weights.normal(variance / d_model).replace(
        output=variance / (model.heads * d_head), ffn_out=variance / d_ff
    )
    found = model.replace(weights=weights.replace(query=0.0) if zero_query else weights)
    if scale_logits:
        found = found.replace(temperature=math.sqrt(d_head / base_head))
    if model.head is not None:
        scale = model.head.output_scale * base_width / d_model
        found = found.replace(head=model.head.replace(output_scale=scale))
    return found


MUP = Scheme(
    "mup",
    "muP: variances 1/fan_in, logits divided by d_head, output by width",
    ("weights", "temperature", "head"),
    Source("Yang et al. 2022, Tensor Programs V", "Table 8 and Definition 4.1"),
    _mup,
)
