"""Self-attention with tokens alike, by the refined laws.

Softmax statistics are averaged over the norms of queries and keys. Layers of equal weights differ
only in their tokens' correlation: one evaluation at Chebyshev nodes then serves all of them. See
docs/theory/softmax.md, Queries of finite width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.fluctuation import norm_variance
from ...engine.state import Array, Fluctuation, Kernel, Signal, evaluate
from ...formulas.attention import ATTENTION, ATTENTION_WITHOUT_VALUE
from .kernels.exact_rows import THETA_LEAST, THETA_PEAKED, AlikeRows
from .kernels.finite_rows import Widths, averages
from .projections import attention_diagnostics, positive, variance_notes
from .softmax.norms import CORRECTED_MAX
from .softmax.table import chebyshev_basis

# --- statistics of rows ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Values of the refined attention laws' symbols, and of what users ask about attention.

    Attributes:
        values: symbol name -> value, shape (...,).
        logit_variance: theta, within a row.
        entropy: E[-sum_j a_ij log a_ij] in nats.
    """

    values: dict[str, Array]
    logit_variance: Array
    entropy: Array


STATISTICS = (
    "logit_scale",
    "norm_deficit",
    "row_square",
    "row_cube",
    "row_fourth",
    "row_vacancy",
    "row_square_slope",
    "row_tilt",
    "row_logit_square",
    "row_skewness",
    "row_dropout_cross",
    "jacobian_square",
    "jacobian_square_logit",
    "jacobian_curvature",
    "jacobian_radial",
    "jacobian_radial_logit",
    "overlap",
    "overlap_slope",
    "jacobian_overlap",
    "jacobian_overlap_logit",
    "radial_overlap",
    "radial_overlap_logit",
)


def attention_statistics(
    logit_scale: Array,
    correlation: Array,
    seq_len: int,
    d_model: Array,
    d_head: Array,
    norm_spread: Array = 0.0,
) -> AttentionStatistics:
    """Statistics of rows whose logits have variance (1 - correlation) * logit_scale.

    Args:
        logit_scale: Theta = d_model^2 query key v^2, shape (...,).
        correlation: of the tokens, shape (...,).
        seq_len: keys per row.
        d_model, d_head: widths that make the queries' norms fluctuate.
        norm_spread: Var|x|^2 / E^2|x|^2 of a token; 0 after a normalisation.
    """
    arrays = np.broadcast_arrays(logit_scale, correlation, norm_spread)
    shape = arrays[0].shape
    scale, r, spread = (np.ravel(one).astype(float) for one in arrays)
    widths = Widths(float(d_model), float(d_head), spread)
    theta, keys = (1 - r) * scale, np.full(scale.size, float(seq_len))
    found = averages(theta, keys, 1 - r, r[:, None], widths, AlikeRows.of(seq_len))
    row, both = found.row, {name: value[:, 0] for name, value in found.pair.items()}
    square = row["sum_square"]
    # What is in proportion to the logits' variance goes on so below the least that is evaluated.
    faint = np.minimum(theta / THETA_LEAST, 1.0)
    values = {
        "logit_scale": scale,
        "norm_deficit": widths.deficit,
        "row_square": square,
        "row_cube": row["sum_cube"],
        "row_fourth": row["sum_fourth"],
        "row_vacancy": row["trace_square"],
        "row_square_slope": faint * row["sum_square_slope"],
        "row_tilt": row["mean_logit_square"],
        "row_logit_square": row["weighted_logit_square"],
        "row_skewness": np.minimum(theta, CORRECTED_MAX) * (1 - 3 * square + 2 * row["sum_cube"]),
        "row_dropout_cross": faint * found.dropped,
        "jacobian_square": row["jacobian_square"],
        "jacobian_square_logit": row["jacobian_square_"],
        "jacobian_curvature": found.curvature * row["jacobian_square"],
        "jacobian_radial": row["radial_square"],
        "jacobian_radial_logit": row["radial_square_"],
        "overlap": both["overlap"],
        "overlap_slope": faint * both["overlap_slope"],
        "jacobian_overlap": both["jacobian_overlap"],
        "jacobian_overlap_logit": faint * both["jacobian_overlap_"],
        "radial_overlap": both["radial_overlap"],
        "radial_overlap_logit": faint * both["radial_overlap_"],
    }

    def shaped(value: Array) -> Any:
        return value.reshape(shape) if shape else float(value[0])

    return AttentionStatistics(
        {name: shaped(value) for name, value in values.items()},
        shaped(theta),
        shaped(row["entropy"]),
    )


# --- tokens alike ---------------------------------------------------------------------------------

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
    # Tokens that are all but equal have logits without variance at any scale.
    most = THETA_PEAKED / np.maximum(1 - correlation, 1e-12)
    spread, widths = norm_variance(signal), (signal.seq_len, leaf.d_model, leaf.d_head)
    scale = np.minimum(wanted, most)
    alike = not signal.resolved and np.ndim(scale) == (0 if signal.algebra.scalar else 1)
    if alike and not np.any(spread) and np.min(correlation) >= 0:
        scales = np.unique(scale).tolist() if np.ndim(scale) else [float(scale)]
        if len(scales) <= MOST_PROFILES and scales[-1] <= PROFILED_SCALE:
            return _profiled(scale, correlation, scales, *widths)
    return attention_statistics(scale, correlation, *widths, spread)


MOST_PROFILES = 16
"""Logit scales among configurations up to which each has a profile: those of so many are made of
640 evaluations, once for all layers."""


def _profiled(
    scale: Array, correlation: Array, scales: list[float], *widths: Any
) -> AttentionStatistics:
    """Statistics of one configuration or of (B,), at so many different scales."""
    numbers: Any
    if np.ndim(scale) == 0:
        scale = scales[0]
        numbers = profiled_numbers(scale, correlation, *widths)
    else:
        scale, correlation = np.broadcast_arrays(scale, correlation)
        numbers = np.empty((len(STATISTICS) + 1, scale.size))
        for one in scales:
            at: Any = scale == one if len(scales) > 1 else slice(None)
            numbers[:, at] = profiled_columns(one, correlation[at], *widths)
    *values, entropy = numbers
    named = dict(zip(STATISTICS, values, strict=True))
    return AttentionStatistics(named, (1 - correlation) * scale, entropy)


def attend_by_laws(leaf: Any, signal: Signal) -> tuple[Signal, Kernel, AlikePullback]:
    """Moments of self-attention without positions, and its pullback.

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
        kernel.diagonal * values["average_variance"], kernel.diagonal * values["average_covariance"]
    )
    heads = Kernel(
        evaluate(with_value["variance"], algebra, values),
        evaluate(with_value["covariance"], algebra, values),
    )
    diagnostics = attention_diagnostics(
        statistics.logit_variance,
        statistics.values["row_square"],
        statistics.entropy,
        float(signal.seq_len),
    )
    fluctuation = None
    if signal.fluctuation is not None:
        # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment.
        fluctuation = Fluctuation.of_gaussian(heads, width)
    output = Signal(
        heads,
        signal.seq_len,
        mean=0.0 * kernel.diagonal,
        width=width,
        fluctuation=fluctuation,
        diagnostics=diagnostics,
        notes=variance_notes((1 - correlation) * wanted),
    )
    return output, mixed, AlikePullback(values, statistics.values, width * leaf.value)


class AlikePaths(NamedTuple):
    """The gradient's kernel at the input, and the query and the key path's parts of it."""

    sent: Kernel
    query: Kernel
    key: Kernel


class AlikePullback(NamedTuple):
    """The way back by the laws.

    Attributes:
        values: of their symbols.
        statistics: of the softmax.
        gain: of the values, on a gradient.
    """

    values: dict[str, Array]
    statistics: Mapping[str, Array]
    gain: Any

    def __call__(self, received: Kernel, algebra: Any) -> AlikePaths:
        values = self.values
        average = ATTENTION_WITHOUT_VALUE.under("refined")
        with_value = ATTENTION.under("refined")
        paths = values | {"grad_variance": received.diagonal, "grad_covariance": received.pairs}

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
        query = Kernel(paths["query_path"], paths["query_path_covariance"])
        key = Kernel(paths["key_path"], -paths["key_path"] / (values["seq_len"] - 1))
        return AlikePaths(sent, query.scaled(self.gain), key.scaled(self.gain))

    def overlap_path(self, received: Kernel) -> Kernel:
        """What the query path gains per unit of the variance of an overlap (`noise.overlap`)."""
        found, unshared = self.statistics, 1 - self.values["x_correlation"]
        apart = (1 - found["row_square"]) ** 2
        return received.weighted(found["row_vacancy"], apart).scaled(
            self.gain * unshared**2 * found["logit_scale"]
        )


_NODES = 40


@functools.lru_cache(maxsize=512)
def _profile(logit_scale: float, seq_len: int, d_model: float, d_head: float) -> Array:
    """Chebyshev coefficients on correlations in [0, 1], a row for each of `STATISTICS` and for the
    entropy."""
    angles = math.pi * (np.arange(_NODES) + 0.5) / _NODES
    correlation = (1 + np.cos(angles)) / 2
    found = attention_statistics(
        np.full(_NODES, logit_scale), correlation, seq_len, d_model, d_head
    )
    columns = (*(found.values[name] for name in STATISTICS), found.entropy)
    values = np.stack([np.broadcast_to(v, correlation.shape) for v in columns], axis=-1)
    transform = np.cos(np.outer(np.arange(_NODES), angles)) * (2 / _NODES)
    transform[0] /= 2
    return np.ascontiguousarray((transform @ values).T)


_ORDERS = np.arange(float(_NODES))
_NEAR = 2048  # correlations whose polynomials fit into a near cache


def profiled_columns(
    logit_scale: float, correlation: np.ndarray, seq_len: int, d_model: float, d_head: float
) -> Array:
    """(23, B): `attention_statistics` of several correlations, none negative, by interpolation, the
    entropy last."""
    coefficients = _profile(logit_scale, seq_len, d_model, d_head)
    found = np.empty((len(coefficients), correlation.size))
    for start in range(0, correlation.size, _NEAR):
        part = slice(start, start + _NEAR)
        found[:, part] = coefficients @ chebyshev_basis(2 * correlation[part] - 1, _NODES)
    return found


def profiled_numbers(
    logit_scale: float, correlation: float, seq_len: int, d_model: float, d_head: float
) -> list[float]:
    """`profiled_columns` of one correlation."""
    coefficients = _profile(logit_scale, seq_len, d_model, d_head)
    numbers: list[float] = coefficients.dot(
        np.cos(_ORDERS * math.acos(2 * correlation - 1))
    ).tolist()
    return numbers
