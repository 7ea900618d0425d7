"""What attention does to two tokens' overlap; derived in `moments.noise.overlap`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine.classes import ClassRows
from ...engine.composition import Pulled
from ...engine.fluctuation import between_rows, followed, has_fixed_norms, met_by
from ...engine.own_overlap import OverlapWalk, OwnOverlap, own_variance
from ...engine.state import Kernel, Signal
from ...engine.trace import Record
from .by_token import self_masks


def through_attention(
    leaf: Any, record: Record, at: OwnOverlap, walk: OverlapWalk, fixed: bool = False
) -> OwnOverlap:
    """Behind a `SelfAttention` or `CrossAttention`.

    Args:
        leaf: the attention.
        record: of it, or of what holds it.
        at: of the tokens that ask.
        walk: what is gathered.
        fixed: whether tokens are normalised inside.
    """
    signal, output, memory = record.input, record.output, record.memory
    averaged = 0.0
    if memory is None:
        memory, attended, keys = signal, at.variance, 1.0 / signal.seq_len
        if signal.resolved:
            weights = uniform_rows(leaf, signal)
            averaged = averaging_elasticity(weights, signal)
            on_classes = isinstance(weights, ClassRows)
            seen = weights.counted * weights.weights if on_classes else weights * weights
            keys = float(signal.kernel.average(seen.sum(-1)))
    else:
        attended = 1.0 / memory.width if walk.memory is None else walk.memory
        keys = 1.0 / memory.seq_len
    walk.attended[record.place] = attended
    by_queries = query_elasticity(record.pulled, signal, output)
    grown = 1.0 + (own_spread(memory) if fixed or has_fixed_norms(memory) else 0.0)
    for name in ("query", "key", "query.bias", "query.norm.gain", "key.norm.gain"):
        walk.growth[record.layer, f"{leaf.prefix}{name}"] = grown
    groups = leaf.kv_heads
    kept = 1.0 if groups is None else groups / leaf.heads  # heads that have own values
    fresh = 1.0 / (kept * output.width)
    fresh += min(by_queries, 1.0) ** 2 * (2.0 / output.width + keys / leaf.heads)
    return OwnOverlap(attended + fresh, at.response * (averaged + by_queries))


def uniform_rows(leaf: Any, tokens: Signal) -> Any:
    """(L, L) attention that keeps to the mask alone, of tokens resolved; `ClassRows` on classes."""
    classes = tokens.kernel.classes
    if classes is not None:
        sight = classes.seen(leaf.window)
        return ClassRows(sight.seen / sight.size[:, None], sight)
    mask = self_masks(leaf, tokens.kernel.pairs.shape[-1], 1)[0]
    return np.asarray(mask / mask.sum(1, keepdims=True))


def averaging_elasticity(weights: Any, tokens: Signal) -> float:
    """What is left of two tokens' overlap in that of their rows' averages, per unit of both.

    Averages W x meet their tokens as M = C W^T, and Cov(o_ab, (W o W^T)_ab) = nu (M_aa M_bb + ...).
    Rows that see the same keys alike have nothing of a token's own; those of a causal mask have.
    """
    kernel = tokens.second_moment()
    if kernel.classes is not None:
        kernels = met_by(weights, kernel), kernel, between_rows(weights, kernel)
    else:
        met = weights @ kernel.pairs
        kernels = Kernel.of_matrix(met), kernel, Kernel.of_matrix(met @ weights.T)
    owns = [float(one.mean_diagonal() - one.mean_pairs()) for one in kernels]
    return max(owns[0], 0.0) ** 2 / (owns[1] * owns[2]) if min(owns[1:]) > 0.0 else 0.0


def query_elasticity(pulled: Pulled | None, before: Signal, after: Signal) -> float:
    """As `fluctuation.elasticity`, of rows that differ because their queries do.

    0 where nothing was pulled.
    """
    own = own_variance(after)
    response = None if pulled is None or own == 0.0 else pulled.response()
    if response is None:
        return 0.0
    sent = float(response.mean_pairs())
    return float(sent * before.width / after.width * own_variance(before) / own)


def own_spread(tokens: Signal) -> float:
    """Relative variance over draws of what tokens have of their own, their norms made equal.

    They share a part whose squared norm c varies by y_kl^2, and the norms leave u = 1 - c to each:
    of two disjoint pairs, Cov(d o - c d q, d o' - c d q') = (1 - c)^2 y_kl^2 (`fluctuation`).
    """
    overlaps = followed(tokens)
    if overlaps is None:
        return 0.0
    size = float(tokens.second_moment().mean_diagonal())
    return float(overlaps.mean_pairs()) / size**2 if size > 0.0 else 0.0
