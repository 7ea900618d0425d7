"""Rotary positions: how turning queries and keys decorrelates the logits of two rows.

With rotation at frequencies w_m of shares s_m, and rho(x) = sum_m s_m cos(w_m x),

    Cov(s_ij, s_i'j') = tau Cq_ii' Ck_jj' rho(delta - D),    D = i' - i,    delta = j' - j.

Within a row (D = 0) the keys have the kernel Ck o rho(delta). Between rows it is split:

    rho(delta - D) = rho(D) rho(delta) + sum_t U_t(D) V_t(delta),

whose first part is a smaller correlation of the two queries over the same key kernel, and whose sum
vanishes where D = 0 or delta = 0. Sums over rows or over keys meet the rest through smooth weights,
which average fast frequencies out: those that turn by more than `TURNS` full circles over the
tokens are kept at delta = 0 and at D = 0 only.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
