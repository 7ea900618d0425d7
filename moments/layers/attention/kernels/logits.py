"""What the logits of one attention layer look like, for one pattern of weights.

Rows with the same keys and nearly the same query norm are one *pattern*; patterns with nearly the
same keys form a *class*, which stands for the row that attends to every key its members attend to,
and shares that row's self-consistent overlaps. Rotary positions are split as rho(delta - D) =
rho(D) rho(delta) + sum_t U_t(D) V_t(delta), offsets D of the rows and delta of the keys. See
docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# --- rotary positions -----------------------------------------------------------------------------

Array = NDArray[np.float64]

TURNS = 2.0
"""Circles over the whole sequence beyond which a frequency counts as fast."""

TERM_TOLERANCE = 0.01
"""Largest slow remainder left out of the sum over t."""


class _Split(NamedTuple):
    """The split of rho on the offsets -reach ... reach: (g,), (t, g), (t, g) and (t,) arrays."""

    whole: Array
    query_terms: Array
    key_terms: Array
    parity: Array


@functools.lru_cache(maxsize=32)
def _split(frequencies: tuple[float, ...], shares: tuple[float, ...], reach: int) -> _Split:
    speed, share = np.array(frequencies), np.array(shares)
    grid = np.arange(-reach, reach + 1.0)
    phases = np.multiply.outer(grid, speed)
    whole = np.cos(phases) @ share
    slow = speed * reach <= 2.0 * np.pi * TURNS
    # rest = slow cos cos + slow sin sin - whole whole^T, of few vectors: eigenvalues of each parity
    even = np.column_stack([np.cos(phases[:, slow]), whole])
    queries, keys, parity = [], [], []
    for vectors, weights, sign in (
        (even, np.append(share[slow], -1.0), 1.0),
        (np.sin(phases[:, slow]), share[slow], -1.0),
    ):
        basis, inside = np.linalg.qr(vectors)
        values, axes = np.linalg.eigh((inside * weights) @ inside.T)
        keep = np.abs(values) > TERM_TOLERANCE * len(grid)
        modes = (basis @ axes[:, keep]).T * (grid != 0.0)  # nothing remains at offset 0
        queries.append(values[keep, None] * modes)
        keys.append(modes)
        parity.append(np.full(len(modes), sign))
    return _Split(whole, np.vstack(queries), np.vstack(keys), np.concatenate(parity))


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of the queries and the keys of one layer.

    Attributes:
        queries: (Lq, Lq) rho(D), the factor on the queries' correlation.
        keys: (Lk, Lk) rho(delta), the factor on the keys' kernel.
        query_terms, key_terms: (t, Lq, Lq) and (t, Lk, Lk), U_t and V_t.
        parity: (t,) 1 where both are even functions, -1 where both are odd.
        frequencies, shares: w_m and s_m.
        query_positions, key_positions: of the tokens.
    """

    queries: Array
    keys: Array
    query_terms: Array
    key_terms: Array
    parity: Array
    frequencies: Array
    shares: Array
    query_positions: Array
    key_positions: Array

    @classmethod
    def of(
        cls, frequencies: Array, shares: Array, query_positions: Array, key_positions: Array
    ) -> Rotation:
        """The split above for tokens at the given positions."""
        offsets = [np.subtract.outer(p, p).T for p in (query_positions, key_positions)]
        reach = max(1.0, *(float(np.abs(offset).max()) for offset in offsets))
        split = _split(tuple(frequencies), tuple(shares), round(reach))
        index = [np.rint(offset + reach).astype(np.intp) for offset in offsets]
        return cls(
            split.whole[index[0]],
            split.whole[index[1]],
            split.query_terms[:, index[0]],
            split.key_terms[:, index[1]],
            split.parity,
            frequencies,
            shares,
            query_positions,
            key_positions,
        )

    def kernels(self, keys: Array) -> Array:
        """(1 + t, Lk, Lk): Ck times rho(delta), then times every V_t(delta)."""
        return np.concatenate([(keys * self.keys)[None], keys * self.key_terms])


# --- covariance -----------------------------------------------------------------------------------

LEAST_WEIGHT = 1e-3
"""Keys whose bias leaves them less than this fraction of a row's largest weight are left out."""


@dataclass(frozen=True)
class Logits:
    """Covariance of the logits s_ij and s_i'j': scale Cq_ii' Ck_jj', rotated where there is one.

    Attributes:
        queries: (Lq, Lq) Cq.
        keys: (Lk, Lk) Ck.
        values: (Lk, Lk) second moments of what the weights average.
        prior: (Lq, Lk) softmax of the deterministic part of the logits: uniform over a row's keys
            unless `biased`; rows sum to 1.
        scale: tau.
        biased: whether a row prefers some of its keys.
        rotation: rotary positions; None: none.
    """

    queries: Array
    keys: Array
    values: Array
    prior: Array
    scale: float
    biased: bool = False
    rotation: Rotation | None = None

    @property
    def temperature(self) -> Array:
        """(Lq,) Cq_ii."""
        return np.diagonal(self.queries)

    @property
    def within(self) -> Array:
        """(Lk, Lk) kernel of the keys within one row."""
        return self.keys if self.rotation is None else self.keys * self.rotation.keys

    @property
    def aligned(self) -> bool:
        """Whether rows differ in their queries alone and the keys are what is averaged: then moving
        along the correlation of two queries moves along the values' kernel."""
        return self.rotation is None and self.keys is self.values

    def correlation(self) -> Array:
        """(Lq, Lq) correlation of the logits of two rows for one key, before rotation."""
        norm = np.sqrt(np.outer(self.temperature, self.temperature))
        return np.asarray(np.clip(self.queries / norm, -1.0, 1.0))


def prior_weights(allowed: NDArray[np.bool_], bias: Array | None) -> Array:
    """(Lq, Lk) softmax of the bias over the allowed keys; uniform where there is no bias."""
    if bias is None:
        return np.asarray(allowed / allowed.sum(1, keepdims=True))
    logits = np.where(allowed, bias, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights[weights < LEAST_WEIGHT] = 0.0
    return np.asarray(weights / weights.sum(1, keepdims=True))


# --- rows that are alike --------------------------------------------------------------------------

Indices = NDArray[np.intp]

EXACT_KEYS = 4
"""Patterns of up to this many keys never share a class."""

SUPPORT_SLACK = 0.3
"""Fraction of the keys beyond `EXACT_KEYS` by which two patterns of one class may differ."""

NORM_STEP = 0.05
"""Queries whose log C_ii round to the same multiple of this may share a pattern."""


@dataclass(frozen=True)
class RowClass:
    """One class of patterns.

    Attributes:
        patterns: the a indices of its patterns.
        keys: the n indices of the keys that any of them attends to.
        row: index of the class's own row in the row statistics.
        weights: (a, n) mean attention of its patterns.
        leader_weights: (n,) mean attention of the class's own row.
        response: (n, n) 1 - A with A_jl = E[a_j a_l]/E a_j: how logit shifts move the softmax.
    """

    patterns: slice
    keys: slice | Indices
    row: int
    weights: Array
    leader_weights: Array
    response: Array


def find_patterns(prior: Array, temperature: Array, biased: bool) -> tuple[Indices, Indices]:
    """Distinct rows.

    Args:
        prior: (L, n) weights of every row's keys at vanishing logits, of sum 1.
        temperature: (L,) second moments C_ii of the queries.
        biased: whether a row prefers some of its keys; otherwise only which it holds is compared.

    Returns:
        (P,) the first row of every pattern, and (L,) the pattern of every row.
    """
    bucket = np.round(np.log(temperature) / NORM_STEP).astype(np.int64)
    support = np.packbits(prior > 0.0, axis=1)
    if biased:
        levels = np.round(prior / prior.max(1, keepdims=True), 6).astype(np.float32)
        support = levels.view(np.uint8)
    signature = np.hstack([support, bucket[:, None].view(np.uint8)])
    _, first, inverse = np.unique(signature, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.argsort(order)
    return first[order], rank[inverse.ravel()]


def group_patterns(prior: Array, temperature: Array, biased: bool) -> list[Indices]:
    """Partition patterns into classes, those of few keys first.

    Args:
        prior: (P, n) weights of the keys at vanishing logits, of sum 1.
        temperature: (P,) second moments of the queries.
        biased: whether a row prefers some of its keys: then what two patterns do not share is not
            a number of keys but half the distance of their weights, on the same scale.
    """
    allowed = (prior > 0.0).astype(np.float64)
    shared = allowed @ allowed.T
    count = 1.0 / (prior * prior).sum(1)
    either = np.diag(shared)[:, None] + np.diag(shared) - shared
    log_temperature = np.log(temperature)
    free = np.ones(len(allowed), dtype=bool)
    groups = []
    for leader in np.argsort(-count, kind="stable"):
        if not free[leader]:
            continue
        if biased:
            distance = 0.5 * np.abs(prior - prior[leader]).sum(1)
            alike = distance <= SUPPORT_SLACK * max(1.0 - EXACT_KEYS / count[leader], 0.0)
        else:
            slack = SUPPORT_SLACK * np.maximum(either[leader] - EXACT_KEYS, 0.0)
            alike = either[leader] - shared[leader] <= slack
        alike &= np.abs(log_temperature - log_temperature[leader]) <= NORM_STEP
        members = np.flatnonzero(alike & free)
        free[members] = False
        groups.append(members)
    return groups[::-1]


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(c, ...) of parts of one shape: a view where there is but one."""
    if len(parts) == 1:
        return parts[0][None]
    whole = np.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index] = part
    return whole


def as_slice(indices: Indices) -> slice | Indices:
    """The same increasing indices, as a slice where they are consecutive: a view, not a copy."""
    low, high = int(indices[0]), int(indices[-1]) + 1
    return slice(low, high) if high - low == len(indices) else indices


def window(rows: slice | Indices, columns: slice | Indices) -> Any:
    """Index of a submatrix in the last two axes."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return (..., rows, columns)
    return (..., _indices(rows)[:, None], _indices(columns))


def _indices(index: slice | Indices) -> Indices:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index
