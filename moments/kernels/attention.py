"""Softmax self-attention on an arbitrary token kernel, at initialisation."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moments.errors import domain_error
from moments.kernels import exact_rows
from moments.kernels.calibration import calibrate_pairs, nodes_for
from moments.kernels.contractions import gather, spread
from moments.kernels.row_classes import RowClass, balanced, group_rows, self_overlap
from moments.kernels.row_statistics import mean_attention, row_statistics

Array = NDArray[np.float64]


class AttentionGradient(NamedTuple):
    """Per-feature second moments of the gradient at the attention's input, by path; (L, L) each.

    Attributes:
        value: through the values.
        query: through the queries.
        key: through the keys.
        cross: correlation of the value and key paths, of order 1/d_model.
        total: their sum, symmetric.
    """

    value: Array
    query: Array
    key: Array
    cross: Array
    total: Array


class _Block(NamedTuple):
    """What two classes of rows share: excess (r, n, k) and key, cross, query factors (r,)."""

    first: RowClass
    second: RowClass
    excess: Array
    key: Array
    cross: Array
    query: Array


class _Noise(NamedTuple):
    """Response of one class to noise that is independent between keys (attention dropout)."""

    group: RowClass
    excess: Array
    square: Array
    key: float
    cross: float
    query: float


class KernelAttention:
    """Moments of softmax attention on a given token kernel."""

    def __init__(
        self,
        kernel: ArrayLike,
        *,
        logit_scale: float,
        allowed: ArrayLike | None = None,
        drop_prob: float = 0.0,
        d_model: float = math.inf,
        d_head: float = math.inf,
    ) -> None:
        self.kernel = _square("kernel", kernel)
        length = len(self.kernel)
        temperature = np.diag(self.kernel).copy()
        if np.any(temperature <= 0.0):
            raise domain_error("kernel", float(temperature.min()), "positive on its diagonal")
        if not 0.0 <= logit_scale < math.inf:
            raise domain_error("logit_scale", logit_scale, "finite and at least 0")
        if not 0.0 <= drop_prob < 1.0:
            raise domain_error("drop_prob", drop_prob, "a probability in [0, 1)")
        for name, width in (("d_model", d_model), ("d_head", d_head)):
            if not width >= 1.0:
                raise domain_error(name, width, "a width of at least 1")
        mask = np.ones((length, length), bool) if allowed is None else np.asarray(allowed, bool)
        if mask.shape != self.kernel.shape or not mask.any(1).all():
            raise domain_error("allowed", mask.shape, f"({length}, {length}) with a key per row")
        self.allowed = mask
        self.logit_scale, self.drop_prob = float(logit_scale), float(drop_prob)
        self.d_model, self.d_head = float(d_model), float(d_head)
        self._norm = np.sqrt(np.outer(temperature, temperature))
        self._correlation = np.clip(self.kernel / self._norm, -1.0, 1.0)
        self._dropped = 1.0 / (1.0 - self.drop_prob) - 1.0

        groups = group_rows(mask.astype(float), temperature)
        extended = np.vstack([mask, *[mask[rows].any(0) for rows in groups]]).astype(float)
        self._rows = row_statistics(
            self.kernel,
            extended,
            np.concatenate([temperature, [temperature[rows].mean() for rows in groups]]),
            self.logit_scale,
        )
        self.logit_variance = self._rows.logit_variance[:length]
        self.effective_keys = self._rows.keys[:length]
        self.entropy = self._rows.entropy[:length]
        self.beyond_tables = self.logit_variance > exact_rows.THETA_MAX
        self.mean_attention = np.zeros_like(self.kernel)
        self._classes = [
            self._make_class(rows, length + index, extended) for index, rows in enumerate(groups)
        ]
        self._nodes = nodes_for(self._correlation, float(self._rows.theta.max()))
        self._row_scale = self._make_row_scale(groups, extended.sum(1))

    # --- construction --------------------------------------------------------------------------

    def _make_class(self, rows: NDArray[np.intp], own: int, extended: Array) -> RowClass:
        keys = np.flatnonzero(extended[own])
        members = np.append(rows, own)
        kernel = self.kernel[np.ix_(keys, keys)]
        stats = self._rows
        weights = mean_attention(
            kernel, extended[np.ix_(members, keys)], stats, members, own, self.logit_scale
        )
        self.mean_attention[np.ix_(rows, keys)] = weights[:-1]
        if len(keys) == 1:
            return RowClass(rows, keys, own, weights[:-1], weights[-1], np.zeros((1, 1)))
        pull = stats.own_response[own]
        tau = self.logit_scale * stats.temperature[own] * stats.softening[own]
        guess = np.exp(pull * tau * (kernel - kernel.max(1, keepdims=True)))
        exponent = pull * tau / stats.strength[own] ** 2
        response = self_overlap(kernel, weights[-1], guess, exponent)
        return RowClass(rows, keys, own, weights[:-1], weights[-1], response)

    def _make_row_scale(self, groups: list[NDArray[np.intp]], count: Array) -> Array:
        """(r, L): square root of a row's exact excess over that of its class, at every node.

        Inverse numbers of keys add: a row that lacks some keys of its class has
        1/n_e = 1/n_e(class) + 1/n - 1/n(class). The excess of an exchangeable row, before P_i
        removes its mean, is n C2 - 1 over 1 - 1/n.
        """
        length = len(self.kernel)
        own = np.empty(length, dtype=int)
        for index, rows in enumerate(groups):
            own[rows] = length + index
        rho = self._nodes.rho
        rho = np.where(np.abs(rho) < 1e-3, 1e-3, rho)[:, None]
        stats = self._rows

        def excess(theta: Array, inverse_keys: Array) -> Array:
            keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
            theta = np.clip(theta, 1e-6, exact_rows.THETA_MAX)
            overlap = exact_rows.pair(theta, keys, theta, keys, rho).overlap
            return np.asarray((overlap * keys - 1.0) / (1.0 - 1.0 / keys))

        relative = stats.temperature[:length] / stats.temperature[own]
        inverse = 1.0 / stats.keys[own] + 1.0 / count[:length] - 1.0 / count[own]
        row = excess(stats.theta[own] * relative, inverse)
        group = excess(stats.theta[own], 1.0 / stats.keys[own])
        single = (count[:length] < 1.5) | (group == 0.0)
        return np.sqrt(np.maximum(np.where(single, 1.0, row / np.where(single, 1.0, group)), 0.0))

    @functools.cached_property
    def _blocks(self) -> list[_Block]:
        groups = [group for group in self._classes if len(group.keys) > 1]
        pairs = [(one, two) for i, one in enumerate(groups) for two in groups[i:]]
        if not pairs:
            return []
        stats = self._rows
        one = np.array([pair[0].row for pair in pairs])
        two = np.array([pair[1].row for pair in pairs])
        calibration = calibrate_pairs(
            stats.theta[one],
            stats.keys[one],
            stats.theta[two],
            stats.keys[two],
            self._nodes,
            self.d_model,
            self.d_head,
        )
        per_row = np.sqrt(stats.temperature * stats.softening / stats.theta) / stats.strength
        exponent = calibration.log_ratio * (self.logit_scale * per_row[one] * per_row[two])[:, None]
        blocks = []
        for index, (first, second) in enumerate(pairs):
            kernel = self.kernel[np.ix_(first.keys, second.keys)]
            projected = first.response @ kernel @ second.response.T
            joint = np.exp(np.minimum(exponent[index][:, None, None] * projected, 40.0))
            excess = balanced(joint, first.own_weights, second.own_weights, 3) - 1.0
            factors = (calibration.key, calibration.cross, calibration.query)
            blocks.append(_Block(first, second, excess, *(factor[index] for factor in factors)))
        return blocks

    # --- operations ----------------------------------------------------------------------------

    def _pairs(self, block: _Block) -> tuple[Array, Array, Array]:
        """For a block's pairs of queries (a, b): interpolation weights (r, a, b) of the excess and
        of its derivative with respect to the correlation, and the values of the key, cross and
        query factors (3, a, b)."""
        first, second = block.first.rows, block.second.rows
        rho = self._correlation[np.ix_(first, second)]
        scale = self._row_scale[:, first, None] * self._row_scale[:, None, second]
        basis = self._nodes.basis(rho)
        factors = np.tensordot(np.stack([block.key, block.cross, block.query]), basis, 1)
        return basis * scale, self._nodes.slope_basis(rho) * scale, factors

    def _gather(self, kernel: Array) -> Array:
        """(4, L, L): tr(F kernel) beyond the mean attention, and its key, cross, query derivative."""
        total = np.zeros((4, *self.kernel.shape))
        for block in self._blocks:
            basis, slope, factors = self._pairs(block)
            inner = kernel[np.ix_(block.first.keys, block.second.keys)]
            values = gather(inner, block.excess, block.first.weights, block.second.weights)
            part = np.concatenate(
                [(basis * values).sum(0)[None], (slope * values).sum(0) * factors]
            )
            total[:, block.first.rows[:, None], block.second.rows] = part
            if block.first is not block.second:
                total[:, block.second.rows[:, None], block.first.rows] = part.swapaxes(1, 2)
        return total

    @functools.cached_property
    def _forward(self) -> tuple[Array, Array]:
        """Output kernel without dropout, and Q/G."""
        mean = self.mean_attention @ self.kernel @ self.mean_attention.T
        value, _, _, query = self._gather(self.kernel)
        return mean + value, query / self._norm

    def forward(self) -> Array:
        """(L, L) second moments per feature of sum_j a_ij x_j, attention dropout included."""
        return self._forward[0]

    def backward(self, gradient: ArrayLike) -> AttentionGradient:
        """Second moments per feature of the gradient at the attention's input.

        Args:
            gradient: (L, L) second moments of the gradient at the attention-weighted values.
        """
        gradient = _square("gradient", gradient)
        paths = np.zeros((3, *self.kernel.shape))
        paths[0] = self.mean_attention.T @ gradient @ self.mean_attention
        for block in self._blocks:
            basis, slope, factors = self._pairs(block)
            inner = gradient[np.ix_(block.first.rows, block.second.rows)]
            weights = np.stack([inner * basis, inner * factors[0] * slope, inner * factors[1] * slope])
            part = spread(weights, block.excess, block.first.weights, block.second.weights)
            paths[:, block.first.keys[:, None], block.second.keys] += part
            if block.first is not block.second:
                paths[:, block.second.keys[:, None], block.first.keys] += part.swapaxes(1, 2)
        paths = 0.5 * (paths + paths.swapaxes(1, 2))
        value, key, cross = paths
        query = gradient * self._forward[1]
        return AttentionGradient(value, query, key, cross, value + query + key + cross)


def _square(name: str, kernel: ArrayLike) -> Array:
    array = np.asarray(kernel, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise domain_error(name, array.shape, "a square matrix")
    if not np.all(np.isfinite(array)):
        raise domain_error(name, "not finite", "finite everywhere")
    return np.asarray(0.5 * (array + array.T))
