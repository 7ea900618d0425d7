"""Self-attention with tokens alike, by the refined laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...engine.evaluation import evaluate
from ...engine.state import Array, Kernel, Signal, ratio_or_zero
from ...formulas.algebra import FLOAT
from ...formulas.attention import ATTENTION, ATTENTION_WITHOUT_VALUE
from .by_token import attention_facts, variance_notes
from .kernels.exact_rows import THETA_PEAKED
from .logits import positive
from .profile import profiled_statistics
from .statistics import AttentionStatistics, attention_statistics

AlikePullback = Callable[[Kernel], tuple[Kernel, Kernel, Kernel, Callable[[], Kernel]]]

PROFILED_SCALE = 5.0
"""Logit scale up to which statistics are read off a profile: its nodes, at every correlation, then
stay inside the softmax tables."""


def _logit_scale(leaf: Any) -> Any:
    """Covariance of the logits (i, j) and (k, l) over E[x_i x_k] E[x_j x_l]."""
    return leaf.d_model**2 * positive(leaf.query) * positive(leaf.key) / leaf.temperature**2


def _statistics(
    leaf: Any, signal: Signal, wanted: Array, correlation: Array
) -> AttentionStatistics:
    """Softmax statistics at the wanted logit scale, or at the most that is validated."""
    own = 1 - correlation
    spread = 0.0
    if signal.spread is not None:
        spread = ratio_or_zero(signal.spread.diagonal, signal.kernel.diagonal**2)
    if signal.algebra is FLOAT:
        # Tokens that are all but equal have logits without variance at any scale.
        scale = min(wanted, THETA_PEAKED / max(own, 1e-12))
        if spread == 0.0 and scale <= PROFILED_SCALE:
            return profiled_statistics(
                scale, correlation, signal.seq_len, leaf.d_model, leaf.d_head
            )
    else:
        scale = np.minimum(wanted, THETA_PEAKED / np.maximum(own, 1e-12))
    return attention_statistics(
        scale, correlation, signal.seq_len, leaf.d_model, leaf.d_head, spread
    )


def attend_by_laws(leaf: Any, signal: Signal) -> tuple[Signal, Kernel, AlikePullback]:
    """Moments of self-attention without positions, and its pullback.

    The pullback gives the gradient's kernel at the input, the query and the key path's parts of it,
    and what the query path gains per unit of the variance of two tokens' overlap (`overlap`).

    Args:
        leaf: a `SelfAttention`.
        signal: tokens alike.
    """
    kernel, algebra = signal.kernel, signal.algebra
    correlation = signal.correlation()
    wanted = kernel.diagonal**2 * _logit_scale(leaf)
    statistics = _statistics(leaf, signal, wanted, correlation)
    width = leaf.heads * leaf.d_head
    values: dict[str, Array] = {
        **statistics.values,
        "d_model": leaf.d_model,
        "d_head": leaf.d_head,
        "fan_out": width,
        "value": leaf.value,
        "seq_len": signal.seq_len,
        "drop_prob": leaf.drop_prob,
        "x_variance": kernel.diagonal,
        "x_correlation": correlation,
    }
    average = ATTENTION_WITHOUT_VALUE.under("refined")
    with_value = ATTENTION.under("refined")
    values["average_variance"] = evaluate(average["variance"], algebra, values)
    values["average_covariance"] = evaluate(average["covariance"], algebra, values)
    mixed = Kernel(
        kernel.diagonal * values["average_variance"],
        kernel.diagonal * values["average_covariance"],
    )
    heads = Kernel(
        evaluate(with_value["variance"], algebra, values),
        evaluate(with_value["covariance"], algebra, values),
    )
    output = Signal(heads, signal.seq_len, mean=0.0 * kernel.diagonal, width=width)
    output.facts = attention_facts(
        statistics.logit_variance,
        statistics.values["row_square"],
        statistics.entropy,
        float(signal.seq_len),
    )
    output.notes = variance_notes((1 - correlation) * wanted)
    if signal.spread is not None:
        # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment.
        output.spread = (heads * heads).scaled(2 / width)

    def pullback(received: Kernel) -> tuple[Kernel, Kernel, Kernel, Callable[[], Kernel]]:
        paths = values | {
            "grad_variance": received.diagonal,
            "grad_covariance": received.pairs,
        }

        def path(name: str) -> Array:
            return evaluate(average[name], algebra, paths)

        paths |= {
            "value_path": path("grad_value"),
            "value_path_covariance": path("grad_value_covariance"),
            "query_path": path("grad_query"),
            "query_path_covariance": path("grad_query_covariance"),
            "key_path": path("grad_key"),
            "cross_path": path("grad_cross"),
        }
        sent = Kernel(
            evaluate(with_value["grad_variance"], algebra, paths),
            evaluate(with_value["grad_covariance"], algebra, paths),
        )
        gain = width * leaf.value
        query = Kernel(paths["query_path"], paths["query_path_covariance"])
        key = Kernel(paths["key_path"], -paths["key_path"] / (signal.seq_len - 1))

        def tilt() -> Kernel:
            found, own = statistics.values, 1 - correlation
            apart = (1 - found["row_square"]) ** 2
            return received.weighted(found["row_vacancy"], apart).scaled(
                gain * own**2 * found["logit_scale"]
            )

        return sent, query.scaled(gain), key.scaled(gain), tilt

    return output, mixed, pullback
