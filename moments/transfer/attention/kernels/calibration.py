"""Scalar functions of the correlation between two queries that tie the closure to exact rows.

For an exchangeable row everything the closure leaves open is one number per correlation rho of two
queries: the overlap C2(rho) = E sum_j a_j a'_j of their rows. A key holds the fraction C2 of its
own column of the joint law and (1 - C2)/(n-1) of each other, so a law proportional to exp(beta gap)
on its diagonal needs

    beta gap = log[(n-1) C2/(1-C2)],     gap = (theta/tau) strength^2.

For rows of different length or variance the geometric mean of the two log odds is used: exact to
first order in rho, and within 1 % of the exact log odds for theta <= 1, 3 % for theta <= 3 (the
worst case being a row of two or three keys against a long one).

Finite widths enter here and in `width_terms`. The gradient paths carry the width terms of an
exchangeable layer (`finite_rows`) divided by the closure's own derivative dC2/drho, as factors.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from .finite_rows import Widths, finite_rows

Array = NDArray[np.float64]


TOLERANCE = 2e-2
"""Chebyshev coefficient of the derivative, relative to the whole, from which on none is kept."""

NEAREST_END = 0.9
"""The other end of the interval lies here at least: derivatives divide by its length."""

MOST_ORDERS = 10
"""Largest degree, which peaked rows alone ask for."""


class Nodes(NamedTuple):
    """Chebyshev-Lobatto nodes in the query correlation, from 1 downwards.

    Attributes:
        low: the other end of the interval.
        rho: (nodes,) correlations.
        to_coefficients: (nodes, nodes) matrix from values at the nodes to Chebyshev coefficients.
    """

    low: float
    rho: Array
    to_coefficients: Array

    def basis(self, rho: Array) -> tuple[Array, Array]:
        """Each (nodes, *rho.shape): what multiplies values at the nodes to give the value at rho,
        and the derivative at rho."""
        unit = np.clip((2.0 * rho - 1.0 - self.low) / (1.0 - self.low), -1.0, 1.0)
        terms = np.moveaxis(chebyshev.chebvander(unit, len(self.rho) - 1), -1, 0)
        derivative = chebyshev.chebder(self.to_coefficients) * 2.0 / (1.0 - self.low)
        value = np.tensordot(self.to_coefficients.T, terms, 1)
        return value, np.tensordot(derivative.T, terms[:-1], 1)


def nodes_for(correlation: Array, theta: float) -> Nodes:
    """As many nodes as e^{theta rho} needs on the interval of correlations that occur.

    Its Chebyshev coefficients on a half width h decay like (theta h/2)^m/m!; the derivative, which
    the gradient needs, multiplies that by m. The interval ends at 1, where every row meets itself.
    The error of the paths that is left was measured: .1 % at most, a tenth of the closure's own.
    """
    low = float(min(correlation.min(), NEAREST_END))
    half = 0.25 * theta * (1.0 - low)
    order, term = 1, half
    while order < MOST_ORDERS and term * (order + 1) > TOLERANCE:
        order += 1
        term *= half / order
    unit = np.cos(np.pi * np.arange(order + 1) / order)
    inverse = np.linalg.inv(chebyshev.chebvander(unit, order))
    rho = 0.5 * (1.0 + low) + 0.5 * (1.0 - low) * unit
    return Nodes(low, rho, np.asarray(inverse, dtype=np.float64))


class Calibration(NamedTuple):
    """One row per class; a column per node where two are stated.

    Attributes:
        log_odds: (classes, r) log[(n-1) C2/(1-C2)], averaged over the widths' fluctuations in C2.
        key: (classes, r) multiplies dF/drho in the key path; rho at infinite width.
        along: (classes, r) the same per unit of the queries' covariance: `key` without what comes
            of fluctuating products; 1 at infinite width.
        query: (classes, r) multiplies dF/drho in the query path; 1 at infinite width.
        growth: (classes, r) dF/dlog theta at fixed rho, over dF/drho.
        joint_shift, query_shift: (classes, r) as in `FiniteRows`.
        common: (classes,) what is added to `query` for a row with itself.
        stiffness, against, masks: (classes,) as in `FiniteRows`.
        noise_key, noise_query, noise_cross: (classes,) what the widths do to the response to
            dropped attention in the paths and in the correlation of the key and value paths; 1, 1
            and 0 at infinite width.
    """

    log_odds: Array
    key: Array
    along: Array
    query: Array
    growth: Array
    joint_shift: Array
    query_shift: Array
    common: Array
    stiffness: Array
    against: Array
    masks: Array
    noise_key: Array
    noise_query: Array
    noise_cross: Array


def calibrate(
    theta: Array,
    keys: Array,
    unshared: Array,
    own: Array,
    nodes: Nodes,
    widths: Widths,
) -> Calibration:
    """Exact statistics of every class at every node.

    Args:
        theta, keys: (classes,) reference rows.
        unshared, own: (classes,) fraction of a key that it does not share with the others, by the
            variance of the logits and by the mean overlap of the keys.
        nodes: correlations.
        widths: of the layer.
    """
    single, column = (keys <= 1.0)[:, None], theta[:, None]
    rho = np.broadcast_to(nodes.rho, (len(theta), len(nodes.rho)))
    found = finite_rows(theta, keys, own, rho, widths)
    closure = found.overlap @ nodes.basis(nodes.rho)[1]
    still = single | (closure <= 0.0)
    closure = np.where(still, 1.0, closure)
    odds = np.clip(found.overlap, 1e-12, 1.0 - 1e-12)
    odds = np.log(np.maximum(keys - 1.0, 1e-12)[:, None] * odds / (1.0 - odds))
    # First order in what one key's logit varies: by its own part, where the keys are not alike.
    lift = np.where(unshared > 0.0, own / np.where(unshared > 0.0, unshared, 1.0), 1.0)
    alone, noise = keys <= 1.0, found.jacobian
    cross = 2.0 / widths.d_model * unshared * found.dropped_cross / (theta * noise)
    return Calibration(
        np.where(single, 0.0, odds),
        np.where(still, rho, found.key / closure),
        np.where(still, 1.0, found.along / closure),
        np.where(still, 1.0, column * found.query / closure),
        np.where(still, 0.0, found.growth / closure),
        found.joint_shift,
        found.query_shift,
        np.where(still[:, 0], 0.0, theta * found.common / closure[:, 0]),
        lift * found.stiffness,
        lift * found.against,
        found.masks,
        np.where(alone, 1.0, found.dropped_key / (theta * noise)),
        np.where(alone, 1.0, found.dropped_query / noise),
        cross,
    )
