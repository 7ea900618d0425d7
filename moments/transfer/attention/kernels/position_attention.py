"""Causal softmax attention on classes of positions: the closure of `closure` in their algebra.

Every node of `classes.PositionClasses` is a row and a key. A matrix over keys is (own, pairs); its
products close, so that each step of the closure keeps its form: reference rows, mean attention, the
self overlap of a row, joint laws of two rows, dropped attention. Rows of one class see one support,
and every node is a row class of its own, exact on its own reference; between nodes everything is
interpolated.

For tokens that are alike but for their position nothing else is approximated: with every position
a node, a layer meets `KernelAttention` as closely as that one's single precision allows, where it
gives every row a class of its own. `tests/test_position_classes.py` holds that; what nodes lose in
whole models is in `benchmarks/data/position_classes.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, PositionClasses, diagonal, product, transposed
from ..softmax.chebyshev import THETA_MAX
from . import exact_rows
from .balance import EXPONENT_MAX
from .calibration import calibrate
from .logits import Logits
from .nodes import nodes_for
from .pair_weights import PairWeights, geometric_mean
from .reference import annealed_moments, matched
from .row_statistics import RowStatistics, log_weights, reference_scale, statistics_of
from .width_terms import fixed_norms, unshared_part
from .widths import Widths

Array = NDArray[np.float64]

TOLERANCE = 2e-5
"""Largest change of an overlap at which its iteration ends; rows are few, so below `balance`'s."""


class Paths(NamedTuple):
    """Gradient at the attention's input by path, each (own (P,), pairs (P, P)); see
    `attention.AttentionGradient`."""

    value: Matrix
    query: Matrix
    key: Matrix
    cross: Matrix


class PositionAttention:
    """Moments of one causal softmax attention layer on classes of positions.

    Attributes:
        classes: the positions.
        weights: (P, P) mean attention [row, key] to one token of a class.
        logit_variance, entropy, sum_square: (P,) as in `attention.KernelAttention`.
        output: second moments per feature of sum_j a_ij x_j, attention dropout included.
        response: what the query path is per unit of G.
        tilt: what the query path gains per unit of G and of the relative variance of two tokens'
            overlap.
    """

    def __init__(
        self,
        own: Array,
        pairs: Array,
        classes: PositionClasses,
        *,
        logit_scale: float,
        drop_prob: float = 0.0,
        d_model: float = np.inf,
        d_head: float = np.inf,
        norm_spread: float = 0.0,
        value_bias: float = 0.0,
    ) -> None:
        """Build the layer's joint law; O(P^4).

        Args:
            own: (P,) second moment of a token per feature.
            pairs: (P, P) of two different tokens.
            classes: of positions.
            logit_scale, drop_prob, d_model, d_head, norm_spread, value_bias: as in
                `attention.KernelAttention`.
        """
        self.classes, self._own, self._pairs = classes, own, pairs
        self._scale = logit_scale
        self._widths = Widths(float(d_model), float(d_head), float(norm_spread))
        self._dropped, self._value_bias = drop_prob / (1.0 - drop_prob), value_bias
        keys = classes.keys
        index = np.arange(len(own))
        self._seen = index[None, :] <= index[:, None]
        self._both = self._seen[:, :, None] & self._seen[:, None, :]
        self._apart = own - diagonal(pairs)
        self._rows = rows = row_statistics(own, pairs, classes, logit_scale)
        self.weights = mean_attention(own, pairs, classes, logit_scale, rows)
        self._counted = keys * self.weights
        response = self._self_response()
        self._response = response
        self._short, self._long = np.triu_indices(len(own))
        self._mine = np.flatnonzero(self._short == self._long)
        self._joint_laws()
        self.logit_variance, self.entropy = rows.logit_variance, rows.entropy
        a, inside = self._joint
        square = self.weights**2 * np.maximum((a + diagonal(inside))[self._mine, 0], 0.0)
        self._squares = square
        self.sum_square = (keys * square).sum(1)
        if self._dropped > 0.0:
            self._respond_to_noise()
        self._forward()

    @property
    def beyond_tables(self) -> NDArray[np.bool_]:
        """(P,) whether the logit variance is beyond the tables."""
        return np.asarray(self.logit_variance > THETA_MAX)

    # --- rows ----------------------------------------------------------------------------------

    def _projected(self, response: Matrix, counts: Array, other: Matrix) -> Matrix:
        """(1 - A) C (1 - A')^T."""
        kernel = (
            np.broadcast_to(self._apart, response[0].shape),
            np.broadcast_to(self._pairs, response[1].shape),
        )
        return product(product(response, kernel, counts), transposed(other), counts)

    def _self_response(self) -> Matrix:
        """1 - A of every row; see `balance.self_overlap`."""
        own, pairs, rows, keys = self._own, self._pairs, self._rows, self.classes.keys
        weights, seen, both = self.weights, self._seen, self._both
        pull = rows.own_response * self._scale * own * rows.softening
        top = max(own.max(), pairs.max())
        of_pairs = np.exp(pull[:, None, None] * (pairs - top))
        of_own = np.exp(pull[:, None] * (own - top)) - diagonal(of_pairs)
        total = np.einsum("pr,pqr->pq", keys, of_pairs) + of_own
        found = np.where(seen, of_own / total, 0.0)
        inside = np.where(both, of_pairs / total[:, :, None], 0.0)
        exponent = pull / np.maximum(rows.strength, 1e-6) ** 2
        step, last = np.full(len(own), 0.5), None
        for _ in range(30):
            response = (1.0 - found, -inside)
            joint = _bounded_exp(self._projected(response, keys, response), exponent[:, None, None])
            joint = np.where(seen, joint[0], 0.0), np.where(both, joint[1], 0.0)
            joint = _balanced(joint, (weights, weights), (keys, keys), 4)
            change = joint[0] * weights - found, joint[1] * weights[:, None, :] - inside
            if last is not None:  # the step that would have cancelled the last change
                turned = last - change[0]
                size = (keys * turned**2).sum(1)
                moved = step * (keys * last * turned).sum(1) / np.maximum(size, 1e-30)
                step = np.clip(moved, 0.25, 1.0)
            last = change[0]
            found = found + step[:, None] * change[0]
            inside = inside + step[:, None, None] * change[1]
            if max(np.abs(change[0]).max(), np.abs(change[1]).max()) < TOLERANCE:
                break
        return np.where(seen, 1.0 - found, 0.0), np.where(both, -inside, 0.0)

    # --- pairs of rows -------------------------------------------------------------------------

    def _joint_laws(self) -> None:
        """F/(w w') of every pair of rows, the longer one's keys first, at every node of rho."""
        own, pairs, rows, keys = self._own, self._pairs, self._rows, self.classes.keys
        size = len(own)
        bare = np.clip(pairs / np.sqrt(np.outer(own, own)), -1.0, 1.0)
        nodes = nodes_for(bare, float(rows.theta.max()))
        self._calibration = calibration = calibrate(
            rows.theta, rows.keys, rows.unshared_fraction, rows.own_fraction, nodes, self._widths
        )
        gap = np.maximum(rows.logit_variance, exact_rows.THETA_LEAST) * rows.strength**2
        exponent = calibration.log_odds / np.maximum(gap, 1e-12)[:, None]
        self._exponent_slope = exponent @ nodes.basis(np.ones(1))[1][:, 0]
        exponent = exponent * self._scale * own[:, None]
        short, long = self._short, self._long
        of_long = self._response[0][long], self._response[1][long]
        of_short = self._response[0][short], self._response[1][short]
        kernel = np.broadcast_to(self._apart, of_long[0].shape), self._pairs[None]
        # (1 - A) C over the longer row's keys, then (1 - A')^T over the keys of the shorter one
        moved = product(of_long, kernel, keys[long])
        projected = product(moved, transposed(of_short), keys[short])
        between = geometric_mean(exponent[short], exponent[long])
        joint = _bounded_exp(
            (projected[0][:, None], projected[1][:, None]), between[..., None, None]
        )
        seen = self._seen[short][:, None]
        both = self._seen[long][:, None, :, None] & seen[..., None, :]
        joint = np.where(seen, joint[0], 0.0), np.where(both, joint[1], 0.0)
        weights = self.weights[long][:, None], self.weights[short][:, None]
        # the longer row's keys behind the shorter one's last lack what that row's own terms add
        counts = self.classes.split[short, long][:, None], keys[short][:, None]
        self._joint = _balanced(joint, weights, counts, 3)
        # a row with itself, and with its neighbour
        twin = np.block([[pairs, pairs], [pairs, pairs]])
        every = np.arange(2 * size)
        twin[every, every] = np.concatenate([own, own])
        logits = Logits(twin, twin, twin, np.zeros_like(twin), self._scale)
        twice = RowStatistics(*(np.concatenate([values, values]) for values in vars(rows).values()))
        pattern = np.concatenate([np.arange(size), np.arange(size)])
        self._weights_at = PairWeights.of(
            logits,
            twice,
            pattern,
            np.arange(size),
            np.ones((len(nodes.rho), 2 * size)),
            nodes,
            calibration,
            self._widths,
            None,
        )

    def _split(self, of_twins: Any) -> Matrix:
        """(own, pairs) over rows of what every row has with itself and with its neighbour."""
        size = len(self._own)
        found = np.asarray(of_twins, dtype=np.float64)
        return diagonal(found[..., :size, :size]), found[..., :size, size:]

    def _gather(self) -> Array:
        """(r, P, P) tr(F C) of two rows at every node."""
        (a, inside), keys = self._joint, self.classes.keys
        short, long, weights = self._short, self._long, self.weights
        left = self.classes.split[short, long] * weights[long]
        right = self._counted[short]
        value = np.einsum("cx,crxy,cy->cr", left, inside * self._pairs, right, optimize=True)
        beside = (a + diagonal(inside)) * self._own - diagonal(inside) * diagonal(self._pairs)
        value += np.einsum("crq,cq->cr", beside, keys[short] * weights[short] * weights[long])
        found = np.empty((value.shape[1], len(self._own), len(self._own)))
        found[:, short, long] = found[:, long, short] = value.T
        return found

    # --- forward -------------------------------------------------------------------------------

    def _forward(self) -> None:
        own, pairs, weights, rows = self._own, self._pairs, self.weights, self._rows
        size, at, calibration = len(own), self._weights_at, self._calibration
        width = self._widths.d_model

        def twins(one: Array) -> Array:
            """A row's numbers with its neighbours': the same."""
            return np.block([[one, one], [one, one]])

        def doubled(one: Array) -> Array:
            return np.concatenate([one, one])

        mean = self.mean_output()
        found = self._gather() - mean
        excess = np.einsum("rij,rij->ij", at.value, np.tile(found, (1, 2, 2)))
        slope = np.einsum("rij,rij->ij", at.slope, np.tile(found, (1, 2, 2)))
        self_excess = np.diagonal(excess)[:size]
        shift = self._counted @ own - (diagonal(mean) + self_excess)
        shift = shift * np.sqrt(rows.softening)
        tilt = self._scale * twins(np.outer(shift, shift))
        kernel = twins(pairs)
        every = np.arange(2 * size)
        kernel[every, every] = doubled(own)
        output = twins(mean) + excess + tilt * at.tilt * kernel / width
        if self._widths.deficit > 0.0:
            apart = self._counted @ own - diagonal(mean)
            unshared = unshared_part(rows.keys, apart, (self._counted * weights).sum(1))
            held = np.einsum("psq,pq,sq->ps", self.classes.shared, weights, weights)
            output += fixed_norms(
                self._widths,
                at,
                doubled(calibration.stiffness),
                doubled(calibration.against),
                doubled(rows.own_fraction),
                twins(mean),
                excess,
                slope,
                twins(held * np.sqrt(np.outer(unshared, unshared))),
            )
        tilted = tilt * at.query_tilt
        norm = doubled(np.sqrt(own))
        query = at.query * slope / np.outer(norm, norm) + tilted / width
        common = calibration.common * np.diagonal(slope)[:size] / own
        query[every, every] += doubled(common)
        if self._dropped > 0.0:
            masks = (1.0 + calibration.masks) * ((self.classes.keys * self._squares) @ own)
            output[every, every] += self._dropped * doubled(masks)
            noise = calibration.noise_query * self._noise_overlap(own, pairs)
            query[every, every] += self._dropped * self._scale * doubled(noise)
        self.output, self.response = self._split(output), self._split(query)
        self.tilt = self._split(tilted)

    def mean_output(self) -> Array:
        """(P, P) overlap W C W^T of mean outputs, of a row with itself too."""
        own = np.einsum(
            "psq,pq,sq,q->ps", self.classes.shared, self.weights, self.weights, self._apart
        )
        return np.asarray(self._counted @ self._pairs @ self._counted.T + own)

    # --- attention dropout (see `independent_noise`) -------------------------------------------

    def _respond_to_noise(self) -> None:
        keys, weights, own = self.classes.keys, self.weights, self._own
        beside, inside = (one[self._mine, 0] for one in self._joint)
        response = self._response
        trace = exact_rows.jacobian_square(self.sum_square, self._rows.count)
        trace = trace * np.sqrt(self._rows.softening) * (self._counted @ own)
        moved = product((response[0] * own, response[1] * own), transposed(response), keys)
        slope = self._exponent_slope
        a, direction = slope[:, None] * moved[0], slope[:, None, None] * moved[1]
        whole = beside + diagonal(inside)
        mean = np.einsum("pqr,pqr,pr->pq", inside, direction, self._counted)
        mean += (whole * (a + diagonal(direction)) - diagonal(inside * direction)) * weights
        mean = np.where(self._seen, mean, 0.0)
        shift = -0.5 * mean
        for _ in range(12):
            overlap = np.einsum("pqr,pr->pq", inside, self._counted * shift)
            overlap += beside * weights * shift
            shift = 0.5 * (shift - mean - overlap)
        moved_pairs = direction + shift[:, :, None] + shift[:, None, :]
        pairs = inside * moved_pairs
        self._noise = whole * (a + diagonal(moved_pairs)) - diagonal(pairs), pairs
        self._noise_left = np.einsum("pq,pqr->pr", self._counted, pairs) + weights * self._noise[0]
        self._noise_both = (self._counted * self._noise_left).sum(1)
        self._noise_scale = np.ones(len(own))
        bare = self._noise_overlap(np.ones(len(own)), np.zeros_like(self._pairs))
        usable = bare > 1e-300
        self._noise_scale = np.where(usable, trace / np.where(usable, bare, 1.0), 0.0)

    def _noise_overlap(self, own: Array, pairs: Array) -> Array:
        """(P,) tr(E[J D J] X) of every row."""
        counted, weights = self._counted, self.weights
        apart = own - diagonal(pairs)
        mapped = counted @ pairs + weights * apart
        a, inside = self._noise
        total = np.einsum("pq,pqr,qr,pr->p", counted, inside, pairs, counted, optimize=True)
        beside = (a + diagonal(inside)) * own - diagonal(inside) * diagonal(pairs)
        total += (counted * weights * beside).sum(1)
        total -= 2.0 * (self.classes.keys * self._noise_left * mapped * weights).sum(1)
        total += self._noise_both * (counted * mapped).sum(1)
        return np.asarray(total * self._noise_scale)

    # --- backward ------------------------------------------------------------------------------

    def backward(self, own: Array, pairs: Array) -> Paths:
        """Second moments per feature of the gradient at the attention's input, by path.

        Args:
            own, pairs: of the gradient at sum_j a_ij x_j, behind the value weights.
        """
        classes, weights, at = self.classes, self.weights, self._weights_at
        short, long, mine = self._short, self._long, self._mine
        beside, inside = self._joint
        value = self._split(at.value)
        slope = self._split(at.slope)
        key, cross = self._split(at.key), self._split(at.cross)
        driven = np.stack(
            [pairs * value[1], pairs * key[1] * slope[1], pairs * cross[1] * slope[1]]
        )
        alone = np.stack([own * value[0], own * key[0] * slope[0], own * cross[0] * slope[0]])
        # what the nodes' weights do not hold of w w', the joint law at correlation 0
        given = np.stack([pairs, np.zeros_like(pairs), np.zeros_like(pairs)])
        rest = given - driven.sum(1)
        given = np.stack([own, np.zeros_like(own), np.zeros_like(own)])
        rest_alone = given - alone.sum(1)
        along = driven[:, :, short, long]
        whole = beside + diagonal(inside)
        mixed = np.einsum("trc,crxy->tcxy", along, inside, optimize=True)
        mixed += rest[:, short, long][..., None, None]
        mixed_own = np.einsum("trc,crx->tcx", along, whole, optimize=True)
        mixed_own += rest[:, short, long][..., None]
        itself = np.einsum("trp,prxy->tpxy", alone, inside[mine], optimize=True)
        itself += rest_alone[..., None, None]
        itself_own = np.einsum("trp,prx->tpx", alone, whole[mine], optimize=True)
        itself_own += rest_alone[..., None]
        sent = classes.rows.T * weights
        left, right = sent[long], sent[short]
        apart = short != long
        total = np.einsum("tcxy,cx,cy->txy", mixed, left, right, optimize=True)
        other = np.einsum(
            "tcxy,cx,cy->txy", mixed[:, apart], left[apart], right[apart], optimize=True
        )
        total = total + np.swapaxes(other, -1, -2)
        twice = np.where(apart, 2.0, 1.0)
        total_own = np.einsum("tcx,cx,cx,c->tx", mixed_own, left, right, twice, optimize=True)
        # a row with itself instead of with its neighbour
        index = np.arange(len(own))
        later = classes.rows_square[np.maximum.outer(index, index)]  # rows that see both keys
        once = np.einsum("pq,pr,qrp->pqr", weights, weights, later)
        total += np.einsum("tpxy,pxy->txy", itself - mixed[:, mine], once, optimize=True)
        total_own += np.einsum(
            "tpx,xp,px->tx",
            itself_own - mixed_own[:, mine],
            classes.rows_square,
            weights**2,
            optimize=True,
        )
        if self._dropped > 0.0:
            total_own[0] += self._dropped * (classes.rows_square * self._squares.T) @ own
            driven_own = self._dropped * self._scale * own * self._own * self._noise_scale
            a, noise = self._noise
            left_noise = self._noise_left
            shape = noise - left_noise[:, None, :] - left_noise[:, :, None]
            shape = shape + self._noise_both[:, None, None]
            factors = self._calibration.noise_key, self._calibration.noise_cross
            for path, factor in enumerate(factors, start=1):
                total[path] += np.einsum(
                    "p,pqr,pqr->qr", factor * driven_own, shape, once, optimize=True
                )
                total_own[path] += np.einsum(
                    "p,pq,qp,pq->q",
                    factor * driven_own,
                    a + diagonal(shape),
                    classes.rows_square,
                    weights**2,
                    optimize=True,
                )
        total = 0.5 * (total + np.swapaxes(total, -1, -2))
        query = own * self.response[0], pairs * self.response[1]
        by_path = [(total_own[path], total[path]) for path in range(3)]
        return Paths(by_path[0], query, by_path[1], by_path[2])


def row_statistics(
    own: Array, pairs: Array, classes: PositionClasses, logit_scale: float
) -> RowStatistics:
    """Of every node as a row; arguments as those of `PositionAttention`."""
    keys = classes.keys
    count = keys.sum(1)
    top = float(max(own.max(), pairs.max()))
    spread = top - float(pairs.min())
    below_own, below = own - top, pairs - top

    def mean(function: Callable[[Array], Array]) -> Array:
        of_own, of_pairs = function(below_own), function(below)
        total = np.einsum("pq,pq->p", keys @ of_pairs, keys)
        return np.asarray((total + keys @ (of_own - diagonal(of_pairs))) / count**2)

    relative = mean(lambda values: values)
    scale = reference_scale(logit_scale * float(classes.mean(own)), spread)
    reference = matched(*annealed_moments(mean, relative, spread, scale), count)
    mean_own = keys @ own / count
    return statistics_of(
        reference, scale, count, own, logit_scale, mean_own, relative + top, np.log(count)
    )


def mean_attention(
    own: Array, pairs: Array, classes: PositionClasses, logit_scale: float, rows: RowStatistics
) -> Array:
    """(P, P) mean attention [row, key] to one token of a class; see `row_statistics`."""
    keys = classes.keys
    pull = rows.own_response * logit_scale * own * rows.softening
    top = max(own.max(), pairs.max())
    of_pairs = np.exp(pull[:, None, None] * (pairs - top))
    of_own = np.exp(pull[:, None] * (own - top)) - diagonal(of_pairs)
    crowd = (np.einsum("pr,pqr->pq", keys, of_pairs) + of_own) / rows.count[:, None]
    crowd = np.log(np.maximum(crowd, 1e-300))
    relative = own - (keys @ own / rows.count)[:, None]
    every = np.arange(len(own))
    logs = log_weights(rows, every, logit_scale, relative, crowd, rows.own_response)
    logs = np.where(np.tril(np.ones_like(keys)) > 0.0, logs, -np.inf)
    weight = np.exp(logs - logs.max(1, keepdims=True))
    return np.asarray(weight / (keys * weight).sum(1, keepdims=True))


def _bounded_exp(exponent: Matrix, factor: Array) -> Matrix:
    """exp of a matrix times a factor per row of matrices."""
    own, pairs = exponent
    inside = np.exp(np.minimum(factor * pairs, EXPONENT_MAX))
    whole = np.exp(np.minimum(factor[..., 0] * (own + diagonal(pairs)), EXPONENT_MAX))
    return whole - diagonal(inside), inside


def _balanced(
    joint: Matrix, weights: tuple[Array, Array], counts: tuple[Array, Array], sweeps: int
) -> Matrix:
    """Scaled so that its means over either key are 1; see `balance.balanced`."""
    own, pairs = joint
    left, right = np.ones_like(pairs[..., 0]), np.ones_like(pairs[..., 0, :])
    first, second = counts[0] * weights[0], counts[1] * weights[1]
    for _ in range(sweeps):
        total = ((left * first)[..., None, :] @ pairs)[..., 0, :] + own * left * weights[0]
        right = 1.0 / np.maximum(total, 1e-300)
        total = (pairs @ (right * second)[..., None])[..., 0] + own * right * weights[1]
        left = 1.0 / np.maximum(total, 1e-300)
    return own * left * right, pairs * left[..., :, None] * right[..., None, :]
