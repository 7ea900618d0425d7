"""Heads whose logits differ: their average, and what a random bias by relative position adds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .attention import AttentionGradient, KernelAttention

Array = NDArray[np.float64]


class RelativeBiasNoise:
    """A Gaussian bias on the logits that all pairs of tokens of one bucket share, to first order.

    It adds v 1[bucket_ij = bucket_i'j'] to the logits' covariance, and so to the joint law of two
    rows v sum_b U^b_i U^b_i'^T with U^b = w o (M^b - row mean of M^b under w), M^b the bucket's
    mask. First order in v: T5's tables start at variance 1/d_model.
    """

    def __init__(self, mean_attention: Array, bucket: NDArray[np.intp], variance: float) -> None:
        member = np.equal(bucket, np.arange(int(bucket.max()) + 1)[:, None, None])
        inside = (member * mean_attention).sum(-1, keepdims=True)
        self._moved = mean_attention * (member - inside)  # (b, Lq, Lk)
        self._variance = variance

    def forward(self, kernel: Array) -> Array:
        """(Lq, Lq) what the outputs' kernel gains."""
        return np.asarray(self._variance * self._overlaps(kernel))

    def _overlaps(self, kernel: Array) -> Array:
        onward = self._moved @ kernel
        return np.asarray(np.einsum("bij,bkj->ik", onward, self._moved, optimize=True))

    def backward(self, gradient: Array) -> Array:
        """(Lk, Lk) what the value path gains."""
        onward = gradient @ self._moved
        total = np.einsum("bij,bik->jk", self._moved, onward, optimize=True)
        return np.asarray(self._variance * total)

    def table_gradient(self, kernel: Array, gradient: Array) -> float:
        """E sum_b (dLoss/dbias_b)^2 per head, per unit of d_head and of the values' gain."""
        return float((gradient * self._overlaps(kernel)).sum())


class HeadAverage:
    """Moments of one head drawn at random, with the interface of `KernelAttention`.

    Heads share their tokens and have independent weights, so that kernels and gradients are those
    of an average head.
    """

    def __init__(
        self,
        layers: Sequence[KernelAttention],
        shares: Sequence[float] | Array,
        noise: RelativeBiasNoise | None = None,
    ) -> None:
        self.layers, self.shares, self.noise = list(layers), list(shares), noise

    def _mean(self, name: str) -> Array:
        mean = np.average(
            [getattr(layer, name) for layer in self.layers], axis=0, weights=self.shares
        )
        return np.asarray(mean, dtype=np.float64)

    @property
    def kernel(self) -> Array:
        return self.layers[0].kernel

    @property
    def mean_attention(self) -> Array:
        return self._mean("mean_attention")

    @property
    def logit_variance(self) -> Array:
        return self._mean("logit_variance")

    @property
    def sum_square(self) -> Array:
        return self._mean("sum_square")

    @property
    def entropy(self) -> Array:
        return self._mean("entropy")

    @property
    def beyond_tables(self) -> NDArray[np.bool_]:
        return np.asarray(np.any([layer.beyond_tables for layer in self.layers], axis=0))

    @property
    def overlap_path(self) -> Array:
        return self._mean("overlap_path")

    @property
    def response(self) -> Array:
        return self._mean("response")

    def forward(self) -> Array:
        """(Lq, Lq) second moments per feature of sum_j a_ij x_j."""
        parts = [layer.forward() for layer in self.layers]
        total = sum(w * part for w, part in zip(self.shares, parts, strict=True))
        if self.noise is not None:
            total = total + self.noise.forward(self.kernel)
        return np.asarray(total)

    def mean_output(self) -> Array:
        """(Lq, Lq) overlap of the outputs of two heads that share keys and values: their queries
        are independent, and so are, to leading order, their rows."""
        mean = self.mean_attention
        return np.asarray(mean @ self.kernel @ mean.T)

    def backward(self, gradient: Array) -> AttentionGradient:
        """Second moments per feature of the gradient at the attention's input, by path."""
        parts = [layer.backward(gradient) for layer in self.layers]
        paths = [
            np.asarray(sum(w * path for w, path in zip(self.shares, column, strict=True)))
            for column in zip(*parts, strict=True)
        ]
        if self.noise is not None:
            gained = self.noise.backward(gradient)
            gained = 0.5 * (gained + gained.T)
            paths[0], paths[4] = paths[0] + gained, paths[4] + gained
        return AttentionGradient(*paths)


def few_points(values: Array, most: int, shares: Array | None = None) -> tuple[Array, Array]:
    """Gauss rule of at most `most` nodes for the mean of a smooth function over given points, of
    the given shares or of equal ones.

    Exact for polynomials of degree 2 most - 1: nodes are the eigenvalues of the Jacobi matrix of
    the points' orthogonal polynomials (Golub and Welsch 1969).
    """
    points = np.asarray(values, dtype=np.float64)
    weights = np.full(len(points), 1.0 / len(points)) if shares is None else shares
    if len(points) <= most:
        return points, weights
    centre, size = points.mean(), np.ptp(points) or 1.0
    x = (points - centre) / size
    basis = [np.sqrt(weights)]
    diagonal, beside = [], []
    for order in range(most):
        moved = x * basis[-1]
        diagonal.append(float(basis[-1] @ moved))
        for vector in basis:
            moved = moved - (vector @ moved) * vector
        beside.append(float(np.linalg.norm(moved)))
        if order + 1 < most:
            basis.append(moved / beside[-1])
    jacobi = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return centre + size * nodes, vectors[0] ** 2
