"""Response of attention rows to noise that is independent between keys: attention dropout.

Dropping entries of a row multiplies a_j by independent factors of mean 1 and variance
eps = p/(1-p). Besides E a_j^2, the paths through the logits need E[J D J], D = diag(C_jj). By Price's
theorem that is the derivative of the row's joint law with itself along D instead of along C, and in
the closure such a derivative replaces (1-A) C (1-A)^T by (1-A) D (1-A)^T:

    E[J D J] = P_i N P_i,    N = (dbeta/drho)/tau (F/(w w^T)) o [(1-A) D (1-A)^T]    at rho = 1.

Its trace is exact for exchangeable rows, where F reproduces C2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class NoiseResponse(NamedTuple):
    """The rows of one class.

    Attributes:
        weights: (a, n) mean attention w_i.
        scale: (a,) each row's E tr J^2 over its class's, before P_i.
        response: (n, n) N.
        left: (a, n) w_i^T N.
        both: (a,) w_i^T N w_i.
    """

    weights: Array
    scale: Array
    response: Array
    left: Array
    both: Array

    @classmethod
    def of(cls, weights: Array, scale: Array, response: Array) -> NoiseResponse:
        """Form the products."""
        left = weights @ response
        return cls(weights, scale, response, left, (left * weights).sum(1))

    def spread(self, row_weights: Array) -> Array:
        """(n, n): sum_i h_i E[J_i D J_i] for (a,) weights h."""
        weighted = self.weights * (row_weights * self.scale)[:, None]
        crossed = weighted.T @ (self.weights * self.left)
        total = (weighted.T @ self.weights) * self.response - crossed - crossed.T
        return np.asarray(total + (weighted * self.both[:, None]).T @ self.weights)

    def gather(self, kernel: Array) -> Array:
        """(a,): tr(E[J_i D J_i] kernel) for a symmetric kernel (n, n)."""
        mapped = self.weights @ kernel
        total = ((self.weights @ (self.response * kernel)) * self.weights).sum(1)
        total -= 2.0 * (self.left * mapped * self.weights).sum(1)
        total += self.both * (mapped * self.weights).sum(1)
        return np.asarray(total * self.scale)
