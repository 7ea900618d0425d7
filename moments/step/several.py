"""Several steps, each on a batch of its own, as one step on all of them.

The sequences of a prediction are the batches, in order; gradients are those of the network before
the first step. SGD's steps add up to one on weighted gradients; of Adam's and Lion's, functions of
an entry's k gradients, is carried what they have along the weighted sum, and noise.

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
        steps: how many.
        betas: Adam's or Lion's.
        epsilon: Adam's.
        momentum, nesterov: SGD's, or of Muon next to "adam".
    """

    kind: str
    steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False

    def sum(self, gradients: Array) -> Array:
        """All steps' updates at learning rate 1, of (k, ...) gradients."""
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
        """(k, k) what Muon's step i makes singular values of, in terms of the k gradients."""
        past, found = np.zeros((2, self.steps, self.steps))
        for k, g in enumerate(np.eye(self.steps)):
            past[k] = self.momentum * past[k - 1] + (1 - self.momentum) * g
            found[k] = past[k]
            if self.nesterov:
                found[k] = (1 - self.momentum) * g + self.momentum * past[k]
        return found

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

    def followed(self, covariance: Array) -> tuple[Array, float]:
        """(k,) of the update on the gradients, by regression, and E U^2; 0 and 0 of nothing."""
        if self.kind == "sgd":
            weights = self.sum(np.eye(self.steps))
            return weights, float(weights @ covariance @ weights)
        if float(np.trace(covariance)) <= 0.0:
            return np.zeros(self.steps), 0.0
        g, update = self._drawn(covariance)
        found = np.linalg.lstsq(g, update, rcond=1e-6)[0]
        return np.asarray(found, float), float(np.mean(update * update))

    def along(self, covariance: Array, weights: Array) -> tuple[float, float]:
        """gamma c and nu: E U g over sd(g), g = weights . g_i, and E U^2."""
        size = float(weights @ covariance @ weights)
        if size <= 0.0:
            return 0.0, 0.0
        g, update = self._drawn(covariance)
        seen = g @ weights
        spread = np.sqrt(np.mean(seen * seen))
        return float(np.mean(update * seen) / spread), float(np.mean(update * update))


@dataclass(frozen=True, eq=False)
class Batches:
    """Which step the sequences of a prediction belong to, and what each weighs.

    Attributes:
        updates: the optimizer's.
        batch: (B,) of every sequence.
        weights: (k,) w.
        counted: (k,) tokens of all batches' losses over those of each: a loss is its own mean.
    """

    updates: Updates
    batch: NDArray[np.int64]
    weights: Array
    counted: Array

    def masks(self, count: int) -> Array:
        """(k, T) 1 at the tokens of each step."""
        at = np.repeat(self.batch, count // len(self.batch))
        return np.asarray(at == np.arange(self.updates.steps)[:, None], float)

    def factors(self, count: int) -> Array:
        """(T,) what the gradient of the joint loss is multiplied by."""
        return np.asarray((self.weights * self.counted) @ self.masks(count))

    def momenta(self, count: int) -> Array:
        """(k, T) of Muon's steps what each has of the tokens' weighted gradients."""
        return np.asarray((self.updates.momenta / self.weights) @ self.masks(count))

    def blocks(self, product: Array) -> Array:
        """(k, k) sums over pairs of batches of a (T, T) product of weighted gradients."""
        masks = self.masks(len(product))
        return np.asarray(masks @ product @ masks.T)

    def spread(self, values: Array, count: int) -> Array:
        """(..., T) of (..., k), one for every step."""
        return np.asarray(values[..., np.repeat(self.batch, count // len(self.batch))])

    def regressed(self, blocks: Array) -> tuple[Array, float]:
        """(k,) of one row's update on its weighted gradients, and E U^2, of `blocks` of its
        variance. Rows that are targets in some batches alone step otherwise than the mean."""
        own = blocks / np.outer(self.weights, self.weights)
        update, square = self.updates.followed(own)
        return update / self.weights, square

    def pulled(self, blocks: Array) -> tuple[float, float]:
        """gamma and nu, of `blocks` of one entry's variance."""
        own = blocks / np.outer(self.weights, self.weights)
        along, square = self.updates.along(own, self.weights)
        return along / np.sqrt(2 / np.pi), square
