"""What the logits of one attention layer look like, for one pattern of weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rotation import Rotation

Array = NDArray[np.float64]

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
        scale: tau.
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
