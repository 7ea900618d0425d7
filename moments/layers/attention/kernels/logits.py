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

from ....model.positions import Rotary

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
    speed = np.array(frequencies)
    phases = np.multiply.outer(np.arange(-reach, reach + 1.0), speed)
    return _split_phases(phases, np.array(shares), speed * reach <= 2.0 * np.pi * TURNS)


def _split_phases(phases: Array, share: Array, slow: NDArray[np.bool_]) -> _Split:
    """The same of offsets that turn frequencies by `phases` (g, m), each with its opposite."""
    whole = np.cos(phases) @ share
    # rest = slow cos cos + slow sin sin - whole whole^T, of few vectors: eigenvalues of each parity
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
    """The split for patches of a picture, and the offset of every pair of them, by the angles that
    frequencies turn them by: half are those of a place down, half of one across."""
    half = len(shares) // 2
    pairs = [a[None, :, [0, half]] - a[:, None, [0, half]] for a in angles]
    flat = np.concatenate([p.reshape(-1, 2) for p in pairs])
    offsets, index = np.unique(np.round(flat, 9), axis=0, return_inverse=True)
    phases = np.repeat(offsets, half, axis=1) * (speeds / speeds[0])
    split = _split_phases(phases, shares, np.ones(len(shares), bool))
    parts = np.split(index.ravel(), np.cumsum([p.shape[0] * p.shape[1] for p in pairs])[:-1])
    return split, [one.reshape(p.shape[:2]) for one, p in zip(parts, pairs, strict=True)]


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of the queries and the keys of one layer.

    Attributes:
        queries: (Lq, Lq) rho(D), the factor on the queries' correlation.
        keys: (Lk, Lk) rho(delta), the factor on the keys' kernel.
        query_terms, key_terms: (t, Lq, Lq) and (t, Lk, Lk), U_t and V_t.
        parity: (t,) 1 where both are even functions, -1 where both are odd.
        shares: s_m.
        query_angles, key_angles: (Lq, m) and (Lk, m) by which frequencies turn the tokens.
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
        where = query_positions, key_positions
        offsets = [np.subtract.outer(p, p).T for p in where]
        reach = max(1.0, *(float(np.abs(offset).max()) for offset in offsets))
        split = _split(tuple(frequencies), tuple(shares), round(reach))
        index = [np.rint(offset + reach).astype(np.intp) for offset in offsets]
        return cls._of(split, index, shares, [np.multiply.outer(p, frequencies) for p in where])

    @classmethod
    def of_rotary(cls, rotary: Rotary, d_head: int, *where: Array) -> Rotation:
        """The same of a declaration, for queries' and keys' positions in their sequences."""
        speeds, shares = rotary.frequencies(d_head)
        if rotary.grid is None:
            return cls.of(speeds, shares, *where)
        angles = [rotary.angles(p, d_head) for p in where]
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
    weights: NDArray[Any]
    leader_weights: NDArray[Any]
    response: NDArray[Any]

    def in_single(self) -> RowClass:
        """The same in single precision."""
        arrays = (self.weights, self.leader_weights, self.response)
        return RowClass(self.patterns, self.keys, self.row, *(x.astype(np.float32) for x in arrays))


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
