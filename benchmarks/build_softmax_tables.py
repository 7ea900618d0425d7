"""Build moments/data/softmax_square.npz from the exact evaluator.

    python benchmarks/build_softmax_tables.py

Deterministic; about 20 s on one core.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from moments.transfer.attention.softmax.chebyshev import (
    chebyshev_coefficients,
    gauss_nodes,
    length_at,
    theta_at,
)
from moments.transfer.attention.softmax.encoding import encode_row, encode_square_pair
from moments.transfer.attention.softmax.laplace import Array

ROW_NODES = (28, 44)
"""theta, log n."""

SQUARE_NODES = (20, 32, 18)
"""theta, log n, rho: an even number of rho, so that none is 0, where two functions are 0/0."""

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


def main() -> None:
    """Write the table. Pairs are stored in single precision: 6e-8, far below their error."""
    DATA.mkdir(exist_ok=True)
    start = time.perf_counter()
    row = chebyshev_coefficients(row_values(), (0, 1))
    pair = chebyshev_coefficients(square_values(), (0, 1, 3)).astype(np.float32)
    np.savez(DATA / "softmax_square.npz", row=row, pair=pair)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
