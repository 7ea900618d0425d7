"""Build moments/data/softmax_square.npz and softmax_rectangular.npz from the exact evaluator.

    python benchmarks/build_softmax_tables.py [square] [rectangular]

Deterministic; about 20 s for the square table and 5 minutes for the rectangular one on one core.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from moments.softmax.chebyshev import (
    chebyshev_coefficients,
    gauss_nodes,
    length_at,
    ratio_at,
    theta_at,
)
from moments.softmax.encoding import encode_pair, encode_row, encode_square_pair
from moments.softmax.laplace import Array

ROW_NODES = (28, 44)
"""theta, log n."""

SQUARE_NODES = (20, 32, 18)
"""theta, log n, rho: an even number of rho, so that none is 0, where two functions are 0/0."""

RECTANGULAR_NODES = (16, 24, 14, 12)
"""theta, log n, rho, cube root of n/k."""

DATA = Path(__file__).resolve().parents[1] / "moments" / "data"


def row_values() -> Array:
    """(theta, log n, functions) at the nodes."""
    thetas, lengths = (gauss_nodes(count) for count in ROW_NODES)
    return np.array([[encode_row(theta_at(t), length_at(n)) for n in lengths] for t in thetas])


def square_values() -> Array:
    """(theta, log n, functions, rho) at the nodes."""
    thetas, lengths, rhos = (gauss_nodes(count) for count in SQUARE_NODES)
    values = np.array(
        [
            [[encode_square_pair(theta_at(t), length_at(n), r) for r in rhos] for n in lengths]
            for t in thetas
        ]
    )
    return values.transpose(0, 1, 3, 2)


def rectangular_values() -> Array:
    """(theta, log n, functions, rho, ratio) at the nodes."""
    thetas, lengths, rhos, ratios = (gauss_nodes(count) for count in RECTANGULAR_NODES)
    values = np.empty((*RECTANGULAR_NODES, 4))
    for a, theta in enumerate(map(theta_at, thetas)):
        for b, n in enumerate(map(length_at, lengths)):
            for d, k in enumerate(n / ratio_at(z) for z in ratios):
                for c, rho in enumerate(rhos):
                    values[a, b, c, d] = encode_pair(theta, n, float(rho), k)
    return values.transpose(0, 1, 4, 2, 3)


def main(names: list[str]) -> None:
    """Write the named tables. Pairs are stored in single precision: 6e-8, far below their error."""
    DATA.mkdir(exist_ok=True)
    start = time.perf_counter()
    if "square" in names:
        row = chebyshev_coefficients(row_values(), (0, 1))
        pair = chebyshev_coefficients(square_values(), (0, 1, 3)).astype(np.float32)
        np.savez(DATA / "softmax_square.npz", row=row, pair=pair)
        print(f"square: {time.perf_counter() - start:.0f} s")
    if "rectangular" in names:
        pair = chebyshev_coefficients(rectangular_values(), (0, 1, 3, 4)).astype(np.float32)
        np.savez(DATA / "softmax_rectangular.npz", pair=pair)
        print(f"rectangular: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["square", "rectangular"])
