"""Many layers on the page of schemes: DeepScaleLM at 192 and 1000, LayerNorm Scaling up to 1000."""

from __future__ import annotations

from typing import Any

import numpy as np
from schemes_page import base, measured, predicted, short

import moments
from studies.analysis import variance_recursion

DEEP = (192, 1000)
GRAD_CORRELATIONS = (0.0, 0.2, 0.4, 0.8)
DEEP_CASES = (
    ("dslm", "pre", GRAD_CORRELATIONS),
    ("dslm", "post", GRAD_CORRELATIONS),
    ("xavier", "pre", (0.0, 0.8)),
)
"""Scheme, norm and correlations of the output's gradient."""

DEPTH = """## 192 and 1000 layers

Kedia et al. section 3.5 and E.3 to E.5: under DeepScaleLM forward variance stays near 1 and the
gradient ratio does not depend on the depth, whatever the gradients' correlation. With Xavier
weights it does. d_model 64, 4 heads, 32 tokens, dropout 0.1, input correlation 0.25, 2 sequences
per draw. Four draws resolve the gradient ratio to 10 to 40 percent; at width 256 see
`moments figures kedia-4`."""

SCALING = """## LayerNorm Scaling at initialisation

Variance of the stream along 1000 layers of the model of the tables above. LayerNorm Scaling divides
what layer l adds by l. At initialisation a block's output is independent of the stream, so that
variances add: the sum 1 + 1/2 + ... + 1/l grows by the same amount whenever the depth doubles, as
the logarithm does.

Lemma 4.1 of Sun et al. says at least linear instead. Its recursion adds deviations, not variances:
it multiplies the variance by 1 + 1/(sqrt(l) sigma), as a block's output does that correlates with
the stream. Training makes such blocks, and `moments.analysis.variance_recursion(prediction,
branch_correlation=0.5)` follows them from the same prediction: the last two columns, linear. The
lemma speaks of trained networks, then; its lower bound fails at initialisation (errata)."""


def deep(layers: int, norm: str, scheme: str) -> moments.Transformer:
    """A model of many layers, narrow so that a processor simulates it."""
    model = moments.Transformer(layers, 64, 4, 32, norm=norm, dropout=0.1)
    given = 0.25 / (1 - model.dropout)
    return model.with_scheme(scheme, **({"input_correlation": given} if scheme == "dslm" else {}))


def depth(data: dict[str, Any]) -> str:
    """DeepScaleLM at 192 and 1000 layers, beside Xavier weights."""
    runs = data.get("depth", {})
    lines = [
        "| scheme | norm | layers | gradient correlation | last variance | simulated "
        "| farthest from 1 | gradient ratio, mean | typical draw | simulated | draws |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for scheme, norm, correlations in DEEP_CASES:
        found = {
            layers: predicted(deep(layers, norm, scheme), grad_correlation=np.array(correlations))
            for layers in DEEP
        }
        for index, r in enumerate(correlations):
            for layers, p in found.items():
                run = runs.get(f"{scheme}/{norm}/{layers}/{r:g}")
                mean, of_draw = (
                    values[index, 0] / values[index, -1]
                    for values in (p.grad_variance, p.grad_variance_typical)
                )
                variance = p.variance[index]
                cells = [f"`{scheme}`", norm, str(layers), f"{r:g}", short(variance[-1])]
                cells += [measured(run["last_variance"]) if run else "-"]
                cells += [short(float(np.abs(variance - 1).max()))]
                cells += [f"{mean:.4g}", f"{of_draw:.4g}"]
                cells += [measured(run["typical_ratio"]) if run else "-"]
                cells += [str(run["seeds"]) if run else "-"]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scaling() -> str:
    """LayerNorm Scaling along 1000 layers, at initialisation and with correlated blocks."""
    p = predicted(base(1000).with_scheme("lns"))
    trained = variance_recursion(p, 0.5).variance
    plain = predicted(base(1000)).variance
    lines = [
        "| layer l | Pre-LN | LayerNorm Scaling | added since layer l/2 "
        "| with branch correlation .5 | over l |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for n in (2, 8, 32, 64, 250, 500, 1000):
        added = p.variance[n] - p.variance[n // 2]
        cells = [str(n), *map(short, (plain[n], p.variance[n], added, trained[n], trained[n] / n))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
