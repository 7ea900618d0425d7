"""Attention with tokens alike whose queries correlate otherwise than its keys.

So it is in cross-attention, with biases on the queries and behind normalised queries and keys. With
query kernel (q, q rho), keys (k, k - k_own) and values (v, v - v_own), rows have logits of variance
theta = tau q k_own and of correlation rho between rows, and by symmetry between keys

    O = v - v_own + v_own C2,      V_jj = sum_ii' G_ii' C2/n,     V_jl = sum G (1 - C2)/(n (n-1)),
    Q_ii' = G_ii' tau v_own k_own T,    K_jj = sum_ii' G_ii' tau q_ii' v_own T/n = (1 - n) K_jl,

with the exact C2 = E sum a a' and T = E tr J J' at rho, or at 1 for i = i'. Orders 1/d_model and
1/d_head as in `kernels.KernelAttention`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from .softmax import SquareRows, SquareTable, chi_square_rule
from .state import Array, Kernel


@functools.lru_cache(maxsize=256)
def _table(keys: int) -> SquareRows:
    return SquareTable.load().at_length(keys)


class AlikePaths(NamedTuple):
    """Kernels of the gradient at the queries' tokens and at the keys'.

    `tilt` is what `query` gains per unit of the variance of two tokens' overlap (`overlap`).
    """

    value: Kernel
    query: Kernel
    key: Kernel
    cross: Kernel
    tilt: Kernel


class AlikeAttention:
    """Moments of one layer.

    Attributes:
        forward: second moments per feature of sum_j a_ij y_j.
        mean_output: overlap of two heads that share keys and values.
        logit_variance, sum_square, entropy: of a row.
    """

    def __init__(
        self,
        queries: Kernel,
        keys: Kernel,
        values: Kernel,
        *,
        query_count: int,
        key_count: int,
        scale: Array,
        drop_prob: Array,
        d_model: Any,
        d_head: Any,
        norm_spread: Any,
        value_bias: Any = 0.0,
    ) -> None:
        """Evaluate the statistics; arguments as those of `kernels.KernelAttention`."""
        self._counts, self._queries, self._scale = (query_count, key_count), queries, scale
        self._own = values.diagonal - values.pairs, keys.diagonal - keys.pairs
        self._noise = drop_prob / (1 - drop_prob)
        self._masked = values.diagonal + value_bias
        theta = np.asarray(scale * queries.diagonal * self._own[1], dtype=np.float64)
        correlation = np.clip(queries.pairs / queries.diagonal, -1.0, 1.0)
        fluctuation = 2.0 / d_head + 2.0 / d_model + np.mean(norm_spread)
        nodes, weights = chi_square_rule(2.0 / fluctuation)
        rows = _table(key_count)

        def pair(rho: Array) -> dict[str, Array]:
            """Averages over the norms of the sum and the difference of two queries."""
            total: dict[str, Array] = {}
            for first, share in zip(nodes, weights, strict=True):
                for second, share2 in zip(nodes, weights, strict=True):
                    plus, minus = 0.5 * (1 + rho) * first, 0.5 * (1 - rho) * second
                    size = theta * (plus + minus)
                    cosine = np.clip((plus - minus) / (plus + minus), -1.0, 1.0)
                    found = rows.pair(size, cosine * np.ones_like(size))
                    turned = size * cosine
                    entries = {
                        "overlap": found.overlap,
                        "jacobian": found.jacobian_overlap,
                        "radial": found.radial_overlap,
                        "drive": turned * found.jacobian_overlap,
                        "drive_radial": turned * found.radial_overlap,
                        "slope": found.overlap_slope,
                    }
                    for name, value in entries.items():
                        total[name] = total.get(name, 0.0) + share * share2 * np.asarray(value)
            return total

        self._same, self._apart = pair(np.ones_like(theta)), pair(correlation + 0 * theta)
        self._widths = 1.0 / d_model, 1.0 / d_head
        self.logit_variance = theta[()]
        self.sum_square = self._same["overlap"]
        self.entropy = np.asarray(rows.single(theta).entropy)[()]
        own, wide = self._own[0], self._widths[0]
        single = rows.single(theta)
        # Tokens of fixed norm: none of their overlaps with themselves fluctuate (KernelAttention).
        unshared = self._own[1] / keys.diagonal
        fixed = np.maximum(1 - 0.5 * d_model * np.mean(norm_spread), 0.0) * wide
        self._fixed = fixed * unshared**2
        self._lifted = 4 * wide * unshared * theta
        self._stretch = wide * unshared + 0.5 * self._lifted
        cube, fourth = np.asarray(single.sum_cube), np.asarray(single.sum_fourth)
        self._dropped = theta * (2 * np.asarray(single.sum_square) - 5 * cube + 3 * fourth)
        skew = theta * (1 - 3 * np.asarray(single.sum_square) + 2 * cube)
        lifted = fixed * unshared * skew * (values.pairs + own / key_count)
        squared = np.asarray(single.weighted_logit_square) - single.sum_square
        spent = lifted + fixed * unshared * own * squared
        # Attended values share the direction that their row looks in: 1/d_model of E tr^2.
        self._tilt = scale * self._own[1] * (1 - self.sum_square) ** 2
        tilt = self._tilt * wide
        mixed = own * (self.sum_square + tilt * queries.diagonal)
        dropped = self._noise * values.diagonal * self.sum_square
        self.forward = Kernel(
            values.pairs + mixed - spent + dropped,
            values.pairs + own * (self._apart["overlap"] + tilt * queries.pairs) - lifted,
        )
        self.mean_output = averaged(values, key_count)

    def backward(self, gradient: Kernel) -> AlikePaths:
        """Paths for a gradient at the averaged values, their weights' gain included."""
        queries, keys = self._counts
        own_value, own_key = self._own
        wide, narrow = self._widths
        noise = self._noise
        one = gradient.diagonal * queries
        two = gradient.pairs * queries * (queries - 1)
        same, apart = self._same, self._apart
        held = one * same["overlap"] + two * apart["overlap"]
        spread = one * (1 - same["overlap"]) + two * (1 - apart["overlap"])
        others = max(keys - 1, 1)
        masked = noise * one * same["overlap"] / keys
        value = Kernel(held / keys + masked, spread / (keys * others))

        def straight(part: dict[str, Array]) -> Array:
            bare = part["jacobian"] * np.maximum(1 - 2 * (wide + self._fixed) - narrow, 0.0)
            return bare + part["radial"] * (narrow + 3 * wide)

        scale = self._scale * own_key
        tilted = gradient.scaled(self._tilt * own_value)
        bare = same["jacobian"] * np.maximum(1 - 2 * (wide + self._fixed) - narrow, 0.0)
        masks = (bare + same["radial"] * (narrow + 2 * wide)) * (1 + 2 * self._stretch)
        moved = scale * (own_value * straight(same) + noise * self._masked * masks)
        query = Kernel(
            gradient.diagonal * moved,
            gradient.pairs * scale * own_value * straight(apart),
        ).mixed(1.0, tilted, wide)

        def driven(part: dict[str, Array]) -> Array:
            """tau q rho T, its logit covariance averaged with T."""
            full = part["drive"] * (1 - wide) + part["drive_radial"] * wide
            return full / np.maximum(own_key, 1e-300)

        undriven = same["drive"] / np.maximum(own_key, 1e-300) * (1 + self._lifted)
        pushed = one * (driven(same) * own_value + noise * self._masked * undriven)
        pushed = (pushed + two * driven(apart) * own_value) / keys
        key = Kernel(pushed, -pushed / others)
        shared = one * (same["slope"] + noise * self._dropped) + two * apart["slope"]
        shared = 2 * wide * shared / keys
        return AlikePaths(value, query, key, Kernel(shared, -shared / others), tilted)


def averaged(tokens: Kernel, length: int) -> Kernel:
    """Overlaps of two uniform averages of tokens alike."""
    mean = tokens.pairs + (tokens.diagonal - tokens.pairs) / length
    return Kernel(mean, mean)
