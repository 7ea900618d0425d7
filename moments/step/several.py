"""Several steps, each on a batch of its own, as one step on all of them.

The sequences of a prediction are the batches, in order; gradients are those of the network before
the first step. SGD's steps add up to one step on weighted gradients. Adam's and Lion's are
functions of an entry's k gradients: their projection on the weighted sum is propagated, and the
rest as noise.

See docs/theory/step-travels.md, Several steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from .change import Array

_DRAWS = 4096


@dataclass(frozen=True)
class Updates:
    """An optimizer over several steps.

    Attributes:
        kind: "sgd", "adam", "lion" or "sign".
        steps: number of steps.
        betas: of Adam or Lion.
        epsilon: of Adam.
        momentum, nesterov: of SGD, or of Muon, whose other parameters have the kind "adam".
    """

    kind: str
    steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False

    def sum(self, gradients: Array) -> Array:
        """Sum of all steps' updates at learning rate 1, from (k, ...) gradients."""
        total, first, second = (np.zeros_like(gradients[0]) for _ in range(3))
        for k, g in enumerate(gradients, 1):
            if self.kind == "sign":
                total += np.sign(g)
            elif self.kind == "sgd":
                first = self.momentum * first + g
                total += g + self.momentum * first if self.nesterov else first
            elif self.kind == "lion":
                one, two = self.betas
                total += np.sign(one * first + (1 - one) * g)
                first = two * first + (1 - two) * g
            else:
                one, two = self.betas
                first, second = one * first + (1 - one) * g, two * second + (1 - two) * g * g
                size = np.sqrt(second / (1 - two**k)) + self.epsilon
                mean = first / (1 - one**k)
                total += np.divide(mean, size, out=np.zeros_like(mean), where=size > 0)
        return np.asarray(total)

    @property
    def momenta(self) -> Array:
        """(k, k) coefficients on the k gradients of the matrix that Muon orthogonalises in step i,
        row by row."""
        averages, result = np.zeros((2, self.steps, self.steps))
        for k, g in enumerate(np.eye(self.steps)):
            averages[k] = self.momentum * averages[k - 1] + (1 - self.momentum) * g
            result[k] = averages[k]
            if self.nesterov:
                result[k] = (1 - self.momentum) * g + self.momentum * averages[k]
        return result

    @functools.cached_property
    def _normal(self) -> Array:
        from scipy.stats import qmc

        points = qmc.Sobol(self.steps, rng=3).random(_DRAWS // 2)
        drawn = ndtri(points)
        return np.concatenate([drawn, -drawn])

    def _drawn(self, covariance: Array) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
        g = self._normal @ (vectors * np.sqrt(np.clip(values, 0.0, None))).T
        return g, self.sum(g.T.copy())

    def regression(self, covariance: Array) -> tuple[Array, float]:
        """(k,) coefficients of an entry's update U on its k gradients, of that (k, k) covariance,
        and E U^2; 0 without a gradient."""
        if self.kind == "sgd":
            weights = self.sum(np.eye(self.steps))
            return weights, float(weights @ covariance @ weights)
        if float(np.trace(covariance)) <= 0.0:
            return np.zeros(self.steps), 0.0
        g, update = self._drawn(covariance)
        coefficients = np.linalg.lstsq(g, update, rcond=1e-6)[0]
        return np.asarray(coefficients, float), float(np.mean(update * update))

    def projection(self, covariance: Array, weights: Array) -> tuple[float, float]:
        """E U g over the standard deviation of g = weights . g_i, and E U^2."""
        size = float(weights @ covariance @ weights)
        if size <= 0.0:
            return 0.0, 0.0
        g, update = self._drawn(covariance)
        mean = g @ weights
        deviation = np.sqrt(np.mean(mean * mean))
        return float(np.mean(update * mean) / deviation), float(np.mean(update * update))


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of several steps: sequences of one prediction.

    Attributes:
        updates: the optimizer.
        batch: (B,) step at which every sequence is read.
        weights: (k,) coefficient of each batch's gradient in the mean update.
        loss_factors: (k,) number of tokens in the joint loss over that in each batch's own loss.
    """

    updates: Updates
    batch: NDArray[np.int64]
    weights: Array
    loss_factors: Array

    def masks(self, count: int) -> Array:
        """(k, T) 1 at the tokens of each step."""
        at = np.repeat(self.batch, count // len(self.batch))
        return np.asarray(at == np.arange(self.updates.steps)[:, None], float)

    def factors(self, count: int) -> Array:
        """(T,) factors on the tokens' gradients of the joint loss."""
        return np.asarray((self.weights * self.loss_factors) @ self.masks(count))

    def momenta(self, count: int) -> Array:
        """(k, T) coefficients of the tokens' weighted gradients in each of Muon's steps."""
        return np.asarray((self.updates.momenta / self.weights) @ self.masks(count))

    def blocks(self, product: Array) -> Array:
        """(k, k) sums over pairs of batches of a (T, T) product of weighted gradients."""
        masks = self.masks(len(product))
        return np.asarray(masks @ product @ masks.T)

    def spread(self, values: Array, count: int) -> Array:
        """(..., T) values of tokens from (..., k) values of their steps."""
        return np.asarray(values[..., np.repeat(self.batch, count // len(self.batch))])

    def regressed(self, blocks: Array) -> tuple[Array, float]:
        """`Updates.regression` of a row's update on its weighted gradients, of covariance `blocks`.
        Rows that are targets in some batches only step differently from the mean."""
        covariance = blocks / np.outer(self.weights, self.weights)
        coefficients, square = self.updates.regression(covariance)
        return coefficients / self.weights, square

    def pulled(self, blocks: Array) -> tuple[float, float]:
        """As `Optimizer.pulled`, from the (k, k) covariance `blocks` of an entry's gradients."""
        covariance = blocks / np.outer(self.weights, self.weights)
        slope, square = self.updates.projection(covariance, self.weights)
        return slope / np.sqrt(2 / np.pi), square
