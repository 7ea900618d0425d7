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
from numpy.typing import NDArray

from .finite_rows import finite_rows
from .nodes import Nodes
from .widths import Widths

Array = NDArray[np.float64]


class Calibration(NamedTuple):
    """One row per class; a column per node where two are stated.

    Attributes:
        log_odds: (classes, r) log[(n-1) C2/(1-C2)], averaged over the widths' fluctuations in C2.
        key: (classes, r) multiplies dF/drho in the key path; rho at infinite width.
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
