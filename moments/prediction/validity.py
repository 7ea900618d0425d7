"""Warnings for numbers computed outside the regime in which their formulas hold."""

from __future__ import annotations

import numpy as np

from ..engine.state import ratio_or_zero
from ..engine.trace import Trace
from ..formulas.law import Theory
from ..model.transformer import Transformer

SIZE_SPREAD_NOTED = 0.2
"""Relative variance of the last stream's squared norms beyond which a note says so."""


def validity_warnings(model: Transformer, theory: Theory, trace: Trace) -> tuple[str, ...]:
    """Where a formula left its regime, each with the layer and the size of the error if known."""
    if theory == "refined":
        return _collected(trace) + _unnormalised(model, trace) + _of_sizes(model, trace)
    notes = []
    if model.causal:
        notes.append(
            f"theory {theory!r} ignores the causal mask, as the papers do: forward correlations "
            "shift, and the gradient at the first tokens is off by an order of magnitude or more"
        )
    if model.activation == "gelu_tanh":
        notes.append(
            "the papers' GeLU is the erf form; the tanh form's moments differ by less than 3e-4 "
            "for variances up to 4"
        )
    if model.norm_epsilon and model.norm != "none":
        inputs = [p.signal.kernel.mean_diagonal() for p in trace.points if p.site != "embedding"]
        least = min(float(v.min()) if hasattr(v, "min") else float(v) for v in inputs)
        if model.norm_epsilon > 1e-3 * least:
            share = f"{100 * model.norm_epsilon / least:.2g} % of" if least else "beside"
            notes.append(
                f"theory {theory!r} has no norm_epsilon: here it is {share} the least variance, "
                f"{least:.2g}, in the network"
            )
    return tuple(notes)


LOOSE = 0.4
"""Logit variance times relative spread of its tokens' norms up to which errors were not seen."""


def _unnormalised(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """Where logits are formed of tokens whose norms differ much from draw to draw.

    Simulated means over predicted ones at the input (causal, d = 96, gelu, skip .9, branch .43; 50
    to 60 draws): 1.01 (.09) where the product reaches .49 after 12 layers, 1.5 (.3) at 1.2 after
    16, 2.8 (.7) at 2.7 after 20. Their log gradients varied by .31 (.06), .91 (.18) and 1.6 (.3),
    where first order says 1.9, 28 and 1700.
    """
    if model.norm != "none" or model.qk_norm is not None:
        return ()
    stream = trace.stream()
    worst = 0.0
    for point in trace.points:
        entering = stream[point.layer - 1].signal
        if not point.signal.diagnostics or entering.fluctuation is None:
            continue
        square = entering.second_moment().diagonal ** 2
        relative = np.max(ratio_or_zero(entering.fluctuation.norms.diagonal, square))
        worst = max(worst, float(np.max(point.signal.diagnostics["logit_variance"]) * relative))
    if worst <= LOOSE:
        return ()
    return (
        f"attention logits' variance changes by {worst:.2g} from draw to draw with the norms of "
        "the tokens, which nothing normalises: gradients may be several times larger than "
        "predicted (under a causal mask 1.5 times at 1.2 and 2.8 times at 2.7 were simulated), and "
        "the band of one draw too wide (2.5 times in its logarithm at .49)",
    )


def _collected(trace: Trace) -> tuple[str, ...]:
    """Notes of every site, one line for all layers that say the same."""
    layers: dict[tuple[str, str], list[int]] = {}
    for layer, site, note in trace.notes():
        layers.setdefault((site, note), []).append(layer)
    return tuple(
        f"{_layer_range(numbers)}, {site}: {note}" for (site, note), numbers in layers.items()
    )


def _of_sizes(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """What a stream without norms leaves out: query and key gradients hold products of realised
    sizes. Measured at width 64, relative variances .2 to .5: 10 to 25 % (standard errors 8, 14)."""
    last = trace.stream()[-1].signal
    if model.norm != "none" or last.fluctuation is None:
        return ()
    size = np.asarray(last.second_moment().mean_diagonal())
    with np.errstate(all="ignore"):
        largest = float(np.max(last.fluctuation.norms.mean_pairs() / size / size))
    if not SIZE_SPREAD_NOTED <= largest < np.inf:
        return ()
    return (
        "without normalisation all tokens' squared norms vary together over draws, by "
        f"{largest:.2g} of their squared mean: squared gradients of query and key weights in the "
        "upper layers are low by up to a quarter",
    )


def _layer_range(numbers: list[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"layer {first}" if first == last else f"layers {first} to {last}"
