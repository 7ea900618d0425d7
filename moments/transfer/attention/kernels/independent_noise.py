"""Response of attention rows to noise that is independent between keys: attention dropout.

Dropping entries of a row multiplies a_j by independent factors of mean 1 and variance p/(1-p).
Besides E a_j^2, the paths through the logits need E[J D J], D = diag(C_jj). By Price's theorem that
is the derivative of the row's joint law with itself along D instead of along C, and in the closure
such a derivative replaces (1-A) C (1-A)^T by (1-A) D (1-A)^T:

    E[J D J] = P_i N P_i,    N = (F/(w w^T)) o [(dbeta/drho)/tau (1-A) D (1-A)^T + u 1^T + 1 u^T]

at rho = 1, where u keeps the marginals of F. Its shape is used; its trace is known better from
E a_j^2: that of the exchangeable row with the same number of keys and the same E sum a^2. Both are
exact for exchangeable rows; elsewhere this is an approximation, measured in
`attention.KernelAttention`.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .closure import OverlapClosure
from .row_classes import window

Array = NDArray[np.float64]

MARGINAL_SWEEPS = 12
"""Sweeps that bring the weighted means of the response to 0; each halves what is left, at least."""


def marginal_free(joint: Array, direction: Array, weights: Array) -> Array:
    """joint o (direction + u 1^T + 1 u^T) with u such that its weighted row means vanish.

    Args:
        joint: (n, n) symmetric, of weighted row means 1.
        direction: (n, n) symmetric.
        weights: (n,) positive, of sum 1.
    """
    overlap = joint * weights  # rows sum to 1; its spectrum in [0, 1] makes the iteration contract
    mean = (overlap * direction).sum(1)
    shift = -0.5 * mean
    for _ in range(MARGINAL_SWEEPS):
        shift = 0.5 * (shift - mean - overlap @ shift)
    return np.asarray(joint * (direction + shift[:, None] + shift))


class NoiseResponse(NamedTuple):
    """The rows of one class.

    Attributes:
        weights: (a, n) mean attention w_i.
        scale: (a,) what brings the trace of P_i N P_i to E tr J^2.
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
    def of(cls, weights: Array, response: Array, trace: Array) -> NoiseResponse:
        """Form the products; `trace` (a,) is E tr J^2 of every row."""
        left = weights @ response
        one = cls(weights, np.ones(len(weights)), response, left, (left * weights).sum(1))
        bare = one.gather(np.eye(len(response)))
        usable = bare > 1e-300
        return one._replace(scale=np.where(usable, trace / np.where(usable, bare, 1.0), 0.0))

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


class DroppedAttention:
    """E[J_i D J_i] of every row of a closure, D = diag(C_jj) for (Lk,) `variance` C_jj."""

    def __init__(self, closure: OverlapClosure, variance: Array) -> None:
        self._closure = closure
        self._shape = (len(variance), len(variance))
        patterns = len(closure.group)
        members = np.unique(closure.pattern, return_index=True)[1]
        trace = exact_rows.jacobian_square(
            closure.squares[members].sum(1), closure.rows.count[:patterns]
        )
        trace = trace * (closure.weights[members] @ variance)  # tr J D J, were D uniform
        joints = closure.own_joints()
        self._responses = []
        for index, group in enumerate(closure.classes):
            if len(group.own_weights) > 1:
                direction = (group.response * variance[group.keys]) @ group.response.T
                direction = closure.exponent_slopes[index] * direction
                response = marginal_free(joints[group.row], direction, group.own_weights)
                noise = NoiseResponse.of(group.weights, response, trace[group.patterns])
                self._responses.append((index, group, noise))

    def spread(self, row_weights: Array) -> Array:
        """(2, L, L): sum_i h_i E[J_i D J_i] in the key path and in its correlation with the value
        path, for (L,) weights h."""
        closure = self._closure
        total = np.zeros((2, *self._shape))
        pattern_weights = np.zeros(len(closure.group))
        np.add.at(pattern_weights, closure.pattern, row_weights)
        for index, group, noise in self._responses:
            part = noise.spread(pattern_weights[group.patterns])
            key, cross = closure.calibration.noise_key, closure.calibration.noise_cross
            total[window(group.keys, group.keys)] += np.stack(
                [key[index] * part, cross[index] * part]
            )
        return total

    def gather(self, kernel: Array) -> Array:
        """(3, L): tr(E[J_i D J_i] kernel) in the key path, in its correlation with the value path
        and in the query path."""
        closure, calibration = self._closure, self._closure.calibration
        total = np.zeros((3, len(closure.group)))
        for index, group, noise in self._responses:
            part = noise.gather(kernel[window(group.keys, group.keys)])
            total[0, group.patterns] = calibration.noise_key[index] * part
            total[1, group.patterns] = calibration.noise_cross[index] * part
            total[2, group.patterns] = calibration.noise_query[index] * part
        return total[:, closure.pattern]
