"""Build the softmax tables of moments/data from the exact integrals.

    python benchmarks/build_softmax_tables.py          # all
    python benchmarks/build_softmax_tables.py far      # beyond logit variances of 8
    python benchmarks/build_softmax_tables.py norms    # keys of fixed norm

Deterministic; about 20 s on one core, three minutes for what is beyond, and 4 s for the norms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from exact_softmax import (
    Array,
    chebyshev_coefficients,
    encode_row,
    encode_square_pair,
    far_rho_at,
    far_theta_at,
    fixed_norm_statistics,
    gauss_nodes,
    length_at,
    theta_at,
    whole_theta_at,
)

ROW_NODES = (28, 44)
"""theta, log n."""

SQUARE_NODES = (20, 32, 18)
"""theta, log n, rho: an even number of rho, so that none is 0, where two functions are 0/0."""

FAR_ROW_NODES, FAR_NODES = (16, 36), (14, 24, 24)
"""The same beyond THETA_MAX; no node of an even number of rho is 0 there either."""

NORM_NODES = (28, 48)
"""theta up to THETA_FAR, log n."""

DATA = Path(__file__).resolve().parents[1] / "moments" / "data"


At = Callable[[float], float]


def row_values(nodes: tuple[int, ...], theta: At) -> Array:
    """(theta, log n, functions) at the nodes."""
    thetas, lengths = (gauss_nodes(count) for count in nodes)
    return np.array([[encode_row(theta(t), length_at(n)) for n in lengths] for t in thetas])


def square_values(nodes: tuple[int, ...], theta: At, rho: At) -> Array:
    """(theta, log n, functions, rho) at the nodes."""
    thetas, lengths, rhos = (gauss_nodes(count) for count in nodes)
    values = np.array(
        [
            [[encode_square_pair(theta(t), length_at(n), rho(r)) for r in rhos] for n in lengths]
            for t in thetas
        ]
    )
    return values.transpose(0, 1, 3, 2)


def build(name: str, rows: tuple[int, ...], squares: tuple[int, ...], theta: At, rho: At) -> None:
    """Write a table. Pairs are stored in single precision: 6e-8, far below their error."""
    start = time.perf_counter()
    row = chebyshev_coefficients(row_values(rows, theta), (0, 1))
    pair = chebyshev_coefficients(square_values(squares, theta, rho), (0, 1, 3))
    DATA.mkdir(exist_ok=True)
    np.savez(DATA / f"{name}.npz", row=row, pair=pair.astype(np.float32))
    print(f"{name}: {time.perf_counter() - start:.0f} s")


def build_norms() -> None:
    """Write the table of keys of fixed norm: (theta, log n, functions)."""
    thetas, lengths = (gauss_nodes(count) for count in NORM_NODES)
    values = [
        [fixed_norm_statistics(whole_theta_at(t), length_at(n)) for n in lengths] for t in thetas
    ]
    row = chebyshev_coefficients(np.array(values), (0, 1))
    np.savez(DATA / "softmax_norms.npz", row=row.astype(np.float32))


if __name__ == "__main__":
    asked = sys.argv[1:] or ["square", "far", "norms"]
    if "square" in asked:
        build("softmax_square", ROW_NODES, SQUARE_NODES, theta_at, float)
    if "far" in asked:
        build("softmax_far", FAR_ROW_NODES, FAR_NODES, far_theta_at, far_rho_at)
    if "norms" in asked:
        build_norms()
