"""Measured moments in the form in which `predict` takes them."""

from __future__ import annotations

import numpy as np

from .measurement import Measurement


def last_gradient(measurement: Measurement) -> np.ndarray:
    """The measured gradient at the last layer as an (L, L) kernel, for `predict(grad_kernel)`.

    Variances by token, and the mean covariance shared in proportion to the tokens' deviations.
    """
    variance = measurement.token_grad_variance[-1]
    deviation = np.sqrt(variance)
    kernel = np.outer(deviation, deviation)
    pairs = kernel.sum() - np.trace(kernel)
    length = variance.size
    mean = measurement.grad_correlation[-1] * variance.mean() * length * (length - 1)
    # Tokens without a target have no gradient; no kernel of the rest falls below -1/(active - 1).
    active = max(int((variance > 0).sum()), 2)
    share = float(np.clip(mean / pairs, -1 / (active - 1), 1.0)) if pairs > 0 else 0.0
    return np.where(np.eye(length, dtype=bool), kernel, share * kernel)
