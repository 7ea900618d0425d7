"""Covariance of the logits of one attention layer, and the grouping of its rows.

Rows with the same keys and nearly the same query norm are one *pattern*; patterns with nearly the
same keys form a *class* with a representative row, which attends to every key of its members and
whose overlaps A they share. Rotary positions are split as rho(delta - D) = rho(D) rho(delta) +
sum_t U_t(D) V_t(delta), for offsets D of the rows and delta of the keys. See
docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....model.positions import Rotary

# --- rotary positions -----------------------------------------------------------------------------

Array = NDArray[np.float64]

TURNS = 2.0
"""Full turns over the whole sequence beyond which a frequency counts as fast."""

TERM_TOLERANCE = 0.01
"""Largest neglected slow term of the sum over t."""


class _Split(NamedTuple):
    """The split of rho on the offsets -reach ... reach: (g,), (t, g), (t, g) and (t,) arrays."""

    whole: Array
    query_terms: Array
    key_terms: Array
    parity: Array


@functools.lru_cache(maxsize=32)
def _split(frequencies: tuple[float, ...], shares: tuple[float, ...], reach: int) -> _Split:
    speed = np.array(frequencies)
    phases = np.multiply.outer(np.arange(-reach, reach + 1.0), speed)
    return _split_phases(phases, np.array(shares), speed * reach <= 2.0 * np.pi * TURNS)


def _split_phases(phases: Array, share: Array, slow: NDArray[np.bool_]) -> _Split:
    """The split on offsets with these phases (g, m); every offset occurs with its opposite."""
    whole = np.cos(phases) @ share
    # remainder = slow cos cos + slow sin sin - whole whole^T, of low rank: eigenvalues per parity
    even = np.column_stack([np.cos(phases[:, slow]), whole])
    queries, keys, parity = [], [], []
    for vectors, weights, sign in (
        (even, np.append(share[slow], -1.0), 1.0),
        (np.sin(phases[:, slow]), share[slow], -1.0),
    ):
        basis, inside = np.linalg.qr(vectors)
        values, axes = np.linalg.eigh((inside * weights) @ inside.T)
        keep = np.abs(values) > TERM_TOLERANCE * len(phases)
        # nothing remains at offset 0
        modes = (basis @ axes[:, keep]).T * phases.any(1)
        queries.append(values[keep, None] * modes)
        keys.append(modes)
        parity.append(np.full(len(modes), sign))
    return _Split(whole, np.vstack(queries), np.vstack(keys), np.concatenate(parity))


def _split_places(
    angles: Sequence[Array], speeds: Array, shares: Array
) -> tuple[_Split, list[Indices]]:
    """The split for patches of an image, and the offset of every pair of patches, from their rotary
    angles: one half for the vertical position, one half for the horizontal."""
    half = len(shares) // 2
    pairs = [a[None, :, [0, half]] - a[:, None, [0, half]] for a in angles]
    flat = np.concatenate([p.reshape(-1, 2) for p in pairs])
    offsets, index = np.unique(np.round(flat, 9), axis=0, return_inverse=True)
    phases = np.repeat(offsets, half, axis=1) * (speeds / speeds[0])
    split = _split_phases(phases, shares, np.ones(len(shares), bool))
    parts = np.split(index.ravel(), np.cumsum([p.shape[0] * p.shape[1] for p in pairs])[:-1])
    return split, [part.reshape(p.shape[:2]) for part, p in zip(parts, pairs, strict=True)]


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of the queries and the keys of one layer.

    Attributes:
        queries: (Lq, Lq) rho(D), the factor on the queries' correlation.
        keys: (Lk, Lk) rho(delta), the factor on the keys' kernel.
        query_terms, key_terms: (t, Lq, Lq) and (t, Lk, Lk), U_t and V_t.
        parity: (t,) 1 if both are even functions, -1 if both are odd.
        shares: (m,) s_m.
        query_angles, key_angles: (Lq, m) and (Lk, m) rotation angles of the tokens.
    """

    queries: Array
    keys: Array
    query_terms: Array
    key_terms: Array
    parity: Array
    shares: Array
    query_angles: Array
    key_angles: Array

    @classmethod
    def of(
        cls, frequencies: Array, shares: Array, query_positions: Array, key_positions: Array
    ) -> Rotation:
        """The split above for tokens at the given positions."""
        places = query_positions, key_positions
        offsets = [np.subtract.outer(p, p).T for p in places]
        reach = max(1.0, *(float(np.abs(offset).max()) for offset in offsets))
        split = _split(tuple(frequencies), tuple(shares), round(reach))
        index = [np.rint(offset + reach).astype(np.intp) for offset in offsets]
        return cls._of(split, index, shares, [np.multiply.outer(p, frequencies) for p in places])

    @classmethod
    def of_rotary(cls, rotary: Rotary, d_head: int, *places: Array) -> Rotation:
        """The split of declared rotary positions, for the positions of queries and of keys."""
        speeds, shares = rotary.frequencies(d_head)
        if rotary.grid is None:
            return cls.of(speeds, shares, *places)
        angles = [rotary.angles(p, d_head) for p in places]
        return cls._of(*_split_places(angles, speeds, shares), shares, angles)

    @classmethod
    def _of(
        cls, split: _Split, index: Sequence[Indices], shares: Array, angles: Sequence[Array]
    ) -> Rotation:
        return cls(
            split.whole[index[0]],
            split.whole[index[1]],
            split.query_terms[:, index[0]],
            split.key_terms[:, index[1]],
            split.parity,
            shares,
            *angles,
        )

    def kernels(self, keys: Array) -> Array:
        """(1 + t, Lk, Lk): Ck times rho(delta), then times every V_t(delta)."""
        return np.concatenate([(keys * self.keys)[None], keys * self.key_terms])


# --- covariance -----------------------------------------------------------------------------------

LEAST_WEIGHT = 1e-3
"""Fraction of a row's largest weight below which keys with a bias are left out."""


@dataclass(frozen=True)
class Logits:
    """Covariance of the logits s_ij and s_i'j': scale Cq_ii' Ck_jj', after rotation if any.

    Attributes:
        queries: (Lq, Lq) Cq.
        keys: (Lk, Lk) Ck.
        values: (Lk, Lk) second moments of the tokens that attention averages.
        prior: (Lq, Lk) softmax of the deterministic part of the logits: uniform over a row's keys
            unless `biased`; rows sum to 1.
        biased: whether the deterministic part differs among a row's keys.
        rotation: None without rotary positions.
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
        """Whether there is no rotation and values have the kernel of the keys: the derivative in
        the correlation of two queries is then along the values' kernel."""
        return self.rotation is None and self.keys is self.values

    def correlation(self) -> Array:
        """(Lq, Lq) correlation of the queries, before rotation."""
        norm = np.sqrt(np.outer(self.temperature, self.temperature))
        return np.asarray(np.clip(self.queries / norm, -1.0, 1.0))


def prior_weights(allowed: NDArray[np.bool_], bias: Array | None) -> Array:
    """(Lq, Lk) softmax of the bias over the allowed keys; uniform without a bias."""
    if bias is None:
        return np.asarray(allowed / allowed.sum(1, keepdims=True))
    logits = np.where(allowed, bias, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights[weights < LEAST_WEIGHT] = 0.0
    return np.asarray(weights / weights.sum(1, keepdims=True))


# --- groups of similar rows -----------------------------------------------------------------------

Indices = NDArray[np.intp]

EXACT_KEYS = 4
"""Patterns of up to this many keys never share a class."""

SUPPORT_SLACK = 0.3
"""Fraction of the keys beyond `EXACT_KEYS` by which two patterns of one class may differ."""

NORM_STEP = 0.05
"""Queries with log C_ii in the same interval of this width may share a pattern."""


@dataclass(frozen=True)
class RowClass:
    """One class of patterns.

    Attributes:
        patterns: range of its a patterns.
        keys: indices of the n keys that any of them attends to.
        row: index of the representative row in the row statistics.
        weights: (a, n) mean attention of its patterns.
        leader_weights: (n,) mean attention of the representative row.
        response: (n, n) 1 - A, see `joint_laws.softmax_response`.
    """

    patterns: slice
    keys: slice | Indices
    row: int
    weights: NDArray[Any]
    leader_weights: NDArray[Any]
    response: NDArray[Any]

    def in_single(self) -> RowClass:
        """The class in single precision."""
        arrays = (self.weights, self.leader_weights, self.response)
        return RowClass(self.patterns, self.keys, self.row, *(x.astype(np.float32) for x in arrays))


def find_patterns(prior: Array, temperature: Array, biased: bool) -> tuple[Indices, Indices]:
    """Distinct rows.

    Args:
        prior: (L, n) weights of every row's keys at vanishing logits, of sum 1.
        temperature: (L,) second moments C_ii of the queries.
        biased: whether to compare the weights; otherwise only the sets of keys are compared.

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
        biased: whether to measure the difference of two patterns by half the distance of their
            weights, instead of the number of keys that they do not share.
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
    """(c, ...) stack of parts of one shape; a view of a single part."""
    if len(parts) == 1:
        return parts[0][None]
    whole = np.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index] = part
    return whole


def as_slice(indices: Indices) -> slice | Indices:
    """Increasing indices, as a slice if they are consecutive, to index by view."""
    low, high = int(indices[0]), int(indices[-1]) + 1
    return slice(low, high) if high - low == len(indices) else indices


def window(rows: slice | Indices, columns: slice | Indices) -> Any:
    """Index of a submatrix in the last two axes."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return (..., rows, columns)
    return (..., _indices(rows)[:, None], _indices(columns))


def _indices(index: slice | Indices) -> Indices:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index
