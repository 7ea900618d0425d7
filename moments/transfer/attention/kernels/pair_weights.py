"""What the joint law of two rows is read at: weights on the nodes for every pair of rows.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .calibration import Calibration, Nodes
from .finite_rows import Widths
from .logits import Logits
from .rotation import Rotation
from .row_classes import RowClass, window
from .row_statistics import RowStatistics

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Indices = NDArray[np.intp]

RHO_MIN = 1e-3
"""Where the ratio of two excesses is taken at a node nearer to 0, their common zero."""


@dataclass(frozen=True)
class PairWeights:
    """One entry per pair of rows; (Lq, Lq), behind a leading axis where stated.

    Attributes:
        value, slope: (r, ...) interpolation weights of the nodes for the excess and for its
            derivative in the correlation, in single precision.
        key, query: width factors of the key and query paths; the first includes the correlation.
        cross: that of the correlation of the key and value paths.
        growth: of the joint law in the logits' variance, over that in the correlation.
        joint_shift, query_shift: as in `calibration.Calibration`.
        correlation: at which the joint law is read.
        turn: the correlation at which the joint law is read, over that of the queries.
        bare: correlation of the queries.
        terms: (1 + t, ...) covariance per unit of `bare` along each of `Rotation.kernels` that this
            leaves out, times the growth of the response; None without rotation.
    """

    value: Single
    slope: Single
    key: Array
    query: Array
    cross: Array
    growth: Array
    joint_shift: Array
    query_shift: Array
    correlation: Array
    turn: Array | float
    bare: Array
    terms: Array | None

    @classmethod
    def of(
        cls,
        logits: Logits,
        stats: RowStatistics,
        pattern: Indices,
        group: Indices,
        scale: Array,
        nodes: Nodes,
        calibration: Calibration,
        widths: Widths,
        overlaps: Array | None,
    ) -> PairWeights:
        """Weights at the correlations of the layer's queries.

        Args:
            logits: of the layer.
            stats: of the patterns, then of the classes' own rows.
            pattern, group: (Lq,) pattern of every row and (P,) class of every pattern.
            scale: (r, Lq) amplitude of every row at the nodes over its class's.
            nodes, calibration, widths: of the closure.
            overlaps: (1 + t, Lq, Lq) what each of `Rotation.kernels` adds to the overlap of two
                rows' outputs, to first order; None without rotation.
        """
        bare, rotation, own = logits.correlation(), logits.rotation, group[pattern]
        turn: Array | float = 1.0
        if rotation is not None and overlaps is not None:
            turn = _turn(rotation, overlaps, bare, nodes.low)
        correlation = bare * turn
        value, slope = nodes.basis(correlation)
        sharpened = sharpening(stats, pattern[:, None], pattern[None, :], correlation)

        def between(values: Array) -> Array:
            factor = np.einsum("rij,ir->ij", value, values[own])
            return np.asarray(0.5 * (factor + factor.T))

        query, growth = between(calibration.query) * sharpened, between(calibration.growth)
        joint_shifts = between(calibration.joint_shift), between(calibration.query_shift)
        scales = scale[:, :, None] * scale[:, None, :]
        read, read_slope = ((scales * one).astype(np.float32) for one in (value, slope))
        shared = 2.0 / widths.d_model  # of the overlap that values and keys of one token have
        if rotation is None:
            key, cross = between(calibration.key) * sharpened, shared * growth * sharpened
            rest = growth, *joint_shifts, correlation, turn, bare, None
            return cls(read, read_slope, key, query, cross, *rest)
        # Products fluctuate together where keys are turned alike, however far apart their rows are.
        beside = calibration.key - nodes.rho * calibration.along
        key = bare * rotation.queries * between(calibration.along) + between(beside)
        key, cross = key * sharpened, shared * growth * sharpened
        classes = slice(len(group), None)
        risen = np.sqrt(_growth(stats.theta[classes], stats.keys[classes], nodes))
        risen = np.einsum("rij,ir->ij", value, risen[own])
        amplitude = np.sqrt(logits.scale * logits.temperature * stats.softening[pattern])
        size = risen * risen.T * np.outer(amplitude, amplitude)
        terms = size * np.concatenate([(rotation.queries - turn)[None], rotation.query_terms])
        rest = growth, *joint_shifts, correlation, turn, bare, terms
        return cls(read, read_slope, key, query, cross, *rest)


def _turn(rotation: Rotation, overlaps: Array, bare: Array, low: float) -> Array:
    """Factor on the queries' correlation that gives two rows, by the keys' kernel alone, the same
    overlap of outputs as the rotated kernel gives them to first order."""
    usable = np.abs(overlaps[0]) > 1e-12 * np.abs(overlaps[0]).max(initial=1e-300)
    share = np.einsum("tij,tij->ij", rotation.query_terms, overlaps[1:])
    share = share / np.where(usable, overlaps[0], 1.0)
    turn = rotation.queries + np.where(usable, share, 0.0)
    turn = 0.5 * (turn + turn.T)
    apart = np.abs(bare) > 1e-12
    inside = np.clip(turn * bare, low, 1.0) / np.where(apart, bare, 1.0)
    return np.where(apart, inside, np.clip(turn, -1.0, 1.0))


def _growth(theta: Array, keys: Array, nodes: Nodes) -> Array:
    """(classes, r): E tr J J' of exchangeable rows at the nodes over its value at correlation 0."""
    rho = np.append(0.0, nodes.rho)
    exact = exact_rows.pairs(theta[:, None], np.maximum(keys, 1.0), rho)
    overlap = np.maximum(np.asarray(exact.jacobian_overlap), 1e-300)
    ratio = overlap[:, 1:] / overlap[:, :1]
    return np.where(keys[:, None] > 1.0, ratio, 1.0)


def sharpening(
    stats: RowStatistics, first: Indices, second: Indices, correlation: Array
) -> Array | float:
    """Growth of dF/drho beyond the tables, of pairs of rows with these statistics.

    At rho = 1 a hard softmax is sensitive only where two logits nearly tie, E tr J^2 of order
    theta^{-1/2}; correlations with theta (1 - rho) >> 1 have reached their limit.
    """
    if not np.any(stats.logit_variance > stats.theta):
        return 1.0
    inside = np.sqrt(stats.theta)
    beyond = np.sqrt(np.maximum(stats.logit_variance, stats.theta))
    apart = 1.0 - correlation
    inner = 1.0 / (inside[first] * inside[second]) + apart
    return np.asarray(np.sqrt(inner / (1.0 / (beyond[first] * beyond[second]) + apart)))


def row_scale(
    stats: RowStatistics, group: Indices, classes: list[RowClass], kernel: Array, nodes: Nodes
) -> Array:
    """(r, P): square root of a pattern's exact excess over its class's at the nodes, before P_i
    (see `contractions`) removes the mean.

    Inverse numbers of keys add up over pairs of keys that move together: a row of weights w
    in a class of weights w' has

        1/n_e = 1/n_e(class) + sum_jl w_j (w_l - w'_l) (C_jl - b)^2 / (C_jj - b)^2,

    which is 1/n - 1/n' for an exchangeable kernel.
    """
    patterns = len(group)
    rho = np.where(np.abs(nodes.rho) < RHO_MIN, RHO_MIN, nodes.rho)
    leader = patterns + group
    relative = stats.temperature[:patterns] / stats.temperature[leader]
    inverse = 1.0 / stats.keys[leader]
    for one in classes:
        inside = kernel[window(one.keys, one.keys)]
        unshared = max(stats.unshared[one.row], 1e-12)
        together = 1.0 + (inside - np.diagonal(inside).mean()) / unshared
        lacking = one.weights - one.own_weights
        inverse[one.patterns] += ((one.weights @ together**2) * lacking).sum(1)

    def excess(theta: Array, inverse_keys: Array) -> Array:
        keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
        overlap = exact_rows.overlaps(exact_rows.tabulated(theta)[:, None], keys, rho)
        return np.asarray((overlap.T * keys - 1.0) / (1.0 - 1.0 / keys))

    own = excess(stats.theta[leader] * relative, inverse)
    shared = excess(stats.theta[patterns:], 1.0 / stats.keys[patterns:])[:, group]
    trivial = (stats.count[:patterns] < 1.5) | (np.abs(shared) < 1e-14)
    ratio = np.where(trivial, 1.0, own / np.where(trivial, 1.0, shared))
    return np.sqrt(np.maximum(ratio, 0.0))


def geometric_mean(first: Array, second: Array) -> Array:
    """Of two numbers of one sign, with that sign; the arithmetic mean of others."""
    product = first * second
    size = np.sign(first) * np.sqrt(np.maximum(product, 0.0))
    return np.where(product > 0.0, size, 0.5 * (first + second))
