"""What finite widths do to an attention layer's outputs, at order 1/d_model.

Derived for tokens alike in `laws.attention_refined`; here per pair of rows. Given the direction w_i
that row i looks in, token j has a component along it, and the values of the attended tokens share
that component: E tr(J C) for either row. Tokens of fixed norm pay for it. With delta the deficit of
their norm's fluctuation and u the fraction of a key that it does not share with the others,

    a token's overlap with itself does not fluctuate: of what rows hold in common of the same token
    remains the fraction e^{-x (1 + rho)}, x = u^2 delta theta (2 P2 - 5 P3 + 3 P4)/P2;
    the overlap of different tokens falls where both are attended to, by the fraction
    u (1 + u) delta theta (1 - 3 P2 + 2 P3) of what the rows' tokens share;
    and with the keys' own variance, which gives back 2 (1 - u)^2 delta dO/dlog theta.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .closure import OverlapClosure
from .finite_rows import Widths
from .logits import Logits

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class WidthTerms:
    """The terms of one layer.

    Attributes:
        overlap_path: (Lq, Lq) what the query path gains per unit of its gradient and of 1/d_model.
        output: (Lq, Lq) what O gains.
    """

    def __init__(
        self,
        closure: OverlapClosure,
        logits: Logits,
        widths: Widths,
        mean: Array,
        excess: Array,
        slope: Array,
    ) -> None:
        """Evaluate them.

        Args:
            closure, logits, widths: of the layer.
            mean: (Lq, Lq) overlap W C W^T of mean outputs.
            excess: (Lq, Lq) what the joint laws add to it.
            slope: (Lq, Lq) its derivative in the correlation of two queries.
        """
        weights, pairs = closure.weights, closure.pairs
        calibration, own_class = closure.calibration, closure.group[closure.pattern]
        own = np.diagonal(logits.values)
        shift = weights @ own - np.diagonal(mean + excess)
        if logits.keys is not logits.values:  # the row looks at the keys, and moves the values
            moved = _apart(weights, logits.values)
            usable = moved > 1e-9 * (weights @ own)
            ratio = _apart(weights, logits.keys) / np.where(usable, moved, 1.0)
            shift = shift * np.sqrt(np.where(usable, ratio, 0.0))
        looking = logits.scale * _looking(weights, logits, shift)
        self.overlap_path = looking * pairs.query_shift
        self.output = looking * pairs.joint_shift * logits.queries / widths.d_model
        if widths.deficit <= 0.0:
            return
        unshared = unshared_part(
            closure.effective_keys,
            weights @ own - np.diagonal(mean),
            (weights * weights).sum(1),
        )
        rooted = weights * np.sqrt(unshared)[:, None]
        every = np.arange(len(weights))
        self.output += fixed_norms(
            widths,
            (every[:, None], every[None, :]),
            pairs.correlation,
            pairs.growth,
            calibration.stiffness[own_class],
            calibration.against[own_class],
            closure.own_fraction,
            mean,
            excess,
            slope,
            rooted @ rooted.T,
        )


def unshared_part(effective_keys: Array, apart: Array, square: Array) -> Array:
    """(Lq,) own part of a row's keys, those that move together counting as one: n_e of them, of
    which a row holds 1/n_e in common with itself. Rows of one key have nothing to fluctuate.

    Args:
        effective_keys: n_e.
        apart: w.diag(C) - w^T C w.
        square: sum_j w_j^2.
    """
    keys = np.maximum(effective_keys, 1.0)
    several = keys > 1.0 + 1e-6
    unshared = np.where(several, apart / np.where(several, keys - 1.0, 1.0), 0.0)
    return np.asarray(np.maximum(unshared, 0.0) / square)


def fixed_norms(
    widths: Widths,
    rows: tuple[Indices, Indices],
    correlation: Array,
    growth: Array,
    stiffness: Array,
    against: Array,
    own_fraction: Array,
    mean: Array,
    excess: Array,
    slope: Array,
    held: Array,
) -> Array:
    """What tokens of fixed norm add to the output, for pairs of rows; see above.

    Args:
        widths: of the layer.
        rows: both indices of every pair.
        correlation, growth: as in `pair_weights.PairWeights`.
        stiffness, against, own_fraction: (Lq,) of every row.
        mean, excess, slope: as in `WidthTerms`.
        held: what two rows hold in common of the same tokens' own parts.
    """
    one, two = rows
    half = 0.5 * stiffness
    output = np.expm1(-(half[one] + half[two]) * (1.0 + correlation)) * (held + excess)
    half = 0.5 * against
    output -= (half[one] + half[two]) * (mean - held)
    shared = np.sqrt(2.0 * widths.deficit) * np.clip(1.0 - own_fraction, 0.0, 1.0)
    return np.asarray(output + shared[one] * shared[two] * growth * slope)


def _apart(weights: Array, kernel: Array) -> Array:
    """(Lq,) w.diag(C) - w^T C w, at least 0: what the attended tokens do not share."""
    apart = weights @ np.diagonal(kernel) - np.einsum("ij,ij->i", weights @ kernel, weights)
    return np.asarray(np.maximum(apart, 0.0))


def _looking(weights: Array, logits: Logits, shift: Array) -> Array:
    """(Lq, Lq) products of two rows' shifts, turned where positions are rotated: a key's part
    of the shift, w_ij (C_jj - sum_l w_il C_lj), turns with its position."""
    rotation = logits.rotation
    if rotation is None:
        return np.outer(shift, shift)
    parts = weights * (np.diagonal(logits.values) - weights @ logits.values)
    total = parts.sum(1)
    usable = np.abs(total) > 1e-300
    parts = parts * np.where(usable, shift / np.where(usable, total, 1.0), 0.0)[:, None]
    phases = np.multiply.outer(rotation.key_positions, 1j * rotation.frequencies)
    turned = parts @ np.exp(phases)
    turned *= np.exp(-np.multiply.outer(rotation.query_positions, 1j * rotation.frequencies))
    return np.asarray(np.real((turned * rotation.shares) @ turned.conj().T))
