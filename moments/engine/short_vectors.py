"""Two Gaussian vectors of few features: their cosine and the inverses of their norms, exactly.

Where features are normalised in groups or head by head, norms fluctuate too much to expand.

See docs/theory/norms.md, Short vectors.
"""

from __future__ import annotations

import math

import numpy as np

from ..formulas.recording import is_number
from .state import Array

PARALLEL = 1 - 1e-12
"""Squared correlation that stands for 1, where hypergeometric functions have their singularity."""


def expected_cosine(freedom: float, correlation: Array) -> Array:
    """E cos(x, x') over r, of two Gaussian vectors of n entries that correlate by r.

    (2/n) (Gamma((n + 1)/2)/Gamma(n/2))^2 2F1(1/2, 1/2; n/2 + 1; r^2), the mean of a sample
    correlation about a known mean (Hotelling 1953).
    """
    from scipy.special import hyp2f1

    ratio = math.exp(2 * (math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)))
    return 2 / freedom * ratio * hyp2f1(0.5, 0.5, freedom / 2 + 1, correlation * correlation)


def expected_pull(freedom: float, correlation: Array) -> Array:
    """E tr(P P')/(|x| |x'|) over r, of two Gaussian vectors x, x' of n entries and variance 1.

    P projects on what is orthogonal to x, so that tr P P' = n - 2 + c^2 with c the cosine of x and
    x'. Derived here, from the joint density of norms and cosine as a series in r:

        E 1/(|x| |x'|) = h F(1/2, 1/2; n/2; r^2),      h = (Gamma((n - 1)/2)/Gamma(n/2))^2/2,
        E (1 - c^2)/(|x| |x'|) = h (n - 1)/n (1 - r^2) F(3/2, 3/2; n/2 + 1; r^2).

    At r = 1 it is (n - 1)/(n - 2).
    """
    n = freedom
    if is_number(correlation) and correlation * correlation == 1.0:
        return (n - 1) / (n - 2)
    from scipy.special import hyp2f1

    square = np.minimum(correlation * correlation, PARALLEL)
    half = 0.5 * math.exp(2 * (math.lgamma((n - 1) / 2) - math.lgamma(n / 2)))
    both = hyp2f1(0.5, 0.5, n / 2, square)
    apart = (1 - square) * hyp2f1(1.5, 1.5, n / 2 + 1, square)
    found = half * (n - 1) * (both - apart / n)
    return found if np.ndim(found) else float(found)


def persistent_pull(freedom: float, share: Array) -> Array:
    """E 1/(|x|^2 |x'|^2) over E 1/|x|^2 E 1/|x'|^2, less 1, of vectors as in `expected_pull`.

    F(1, 1; n/2; share) - 1, share the squared correlation of their entries; derived as there.
    """
    from scipy.special import hyp2f1

    return hyp2f1(1.0, 1.0, freedom / 2, np.minimum(share, PARALLEL)) - 1.0
