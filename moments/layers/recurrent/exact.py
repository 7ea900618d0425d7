"""Laws in closed form of mixers in which nothing nonlinear is shared by several features.

With Q, K, V second moments of one feature of queries, keys and values over tokens, m their means,
N the width of a head's keys and D its decays, of a head's output (no norm behind)

    E y y' = scale^2 {N Q o R(K o V) + N (N - 1) m_q m_q' o R(m_k m_k' o V)},  R(H) = D H D^T,

o entry by entry, and gradients go back by R^T(H) = D^T H D. Features of queries and keys have means
where a SiLU made them. Derived here: second moments of products of independent features, exact for
any width given Gaussian pre-activations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...engine.state import Kernel, Signal, bind, evaluate
from ...formulas.activation import activation_laws
from ...model.mixers import LinearAttention, ShortConvolution
from .drawn import Back, DrawnHeads
from .mixers import DrawnLinearHeads as Heads

Array = Any


class GatedConvolution:
    """q * conv(k * v): what enters and leaves, as `drawn.DrawnHeads`.

    The product's kernel is q's times sum_a tap_variance (K o V)_{t-a,t'-a}: taps are independent,
    so that two lags have nothing in common.
    """

    def __init__(
        self,
        block: ShortConvolution,
        width: int,
        kernel: Array,
        gains: Mapping[str, float],
        sequences: int,
        varies: Array = 0.0,
    ) -> None:
        self.block, self.width = block, width
        self.query, self.key, self.value = (kernel * gains[k] for k in ("query", "key", "value"))
        length = len(kernel) // sequences
        one = [np.eye(length, k=-a) for a in range(min(block.kernel, length))]
        self.shifts = [np.kron(np.eye(sequences), shift) for shift in one]
        product = self.key * self.value + gains["key"] * gains["value"] * varies
        self.moved = [shift @ product @ shift.T for shift in self.shifts]
        self.mixed = block.tap_variance * sum(self.moved)

    def forward(self) -> Array:
        return self.query * self.mixed

    @property
    def norms(self) -> Array:
        """Covariance of squared norms over the width: of A taps of products, times a query, the
        kurtosis of an entry is 3 (3 + 24/A)."""
        kurtosis = 3 * (3 + 24 / self.block.kernel)
        return (kurtosis - 1) / self.width * self.forward() ** 2

    @property
    def overlaps(self) -> Array:
        """As `DrawnHeads.overlaps`: those of tokens that are not alike are of products of
        independent entries."""
        return 2.0 / self.width * self.forward() ** 2

    def backward(self, grad_out: Array, *_: Array) -> Back:
        block, inner = self.block, grad_out * self.query
        at_product = sum(shift.T @ inner @ shift for shift in self.shifts) * block.tap_variance
        kernels = {
            "query": grad_out * self.mixed,
            "key": self.value * at_product,
            "value": self.key * at_product,
        }
        own = {"mixer.taps": self.width * float(sum((inner * one).sum() for one in self.moved))}
        if block.bias:
            own["mixer.taps.bias"] = self.width * float(inner.sum())
        return Back(kernels, own)


UNSTEADY = 0.1
"""Variance of two tokens' overlap over its mean square beyond which a note is made."""

UNSTEADY_NOTED = (
    "overlaps of tokens vary over draws by more than a tenth of their mean square, and linear "
    "attention without a norm takes products of several: against simulation gradients of the "
    "stream were 14 % low and those of matrices up to 36 % (4 layers of 6 heads of 64)"
)


class LinearHeads:
    """Linear attention without a norm and without decays that the input sets."""

    def __init__(
        self,
        block: LinearAttention,
        kernel: Array,
        gains: Mapping[str, float],
        sequences: int,
        varies: Array = 0.0,
    ) -> None:
        self.block, self.given = block, (kernel, gains, sequences)
        assert block.scale is not None
        self.square = block.scale**2
        of = {
            name: moments_of(block.feature_map, kernel * gains[name])
            for name in ("query", "key", "value")
        }
        self.of = of
        length = len(kernel) // sequences
        lag = np.subtract.outer(np.arange(length), np.arange(length))
        decays = dict.fromkeys((1.0,), 1.0) if block.decays is None else {}
        for one in block.decays or ():
            decays[one] = decays.get(one, 0.0) + 1 / block.heads
        self.heads = [
            (share, np.kron(np.eye(sequences), one ** np.maximum(lag, 0) * (lag >= 0)))
            for one, share in decays.items()
        ]
        one, means = of["key"][0] * of["value"][0], np.outer(of["key"][2], of["key"][2])
        unsteady = np.mean(varies) > UNSTEADY * np.mean(kernel * kernel)
        self.notes = (UNSTEADY_NOTED,) if unsteady else ()
        if block.feature_map == "identity":
            one = one + gains["key"] * gains["value"] * varies
        self.mixed = self._mean(one)
        self.together = self._mean(means * of["value"][0]) if np.any(means) else 0.0 * one
        self.gate = (
            None if block.gate is None else moments_of(block.gate, kernel * gains["mixer_gate"])
        )

    def _mean(self, kernel: Array) -> Array:
        """R, over heads."""
        return sum(share * (decay @ kernel @ decay.T) for share, decay in self.heads)

    def _back(self, kernel: Array) -> Array:
        return sum(share * (decay.T @ kernel @ decay) for share, decay in self.heads)

    def _summed(self) -> Array:
        block, (query, _, mean) = self.block, self.of["query"]
        width = block.d_key
        result = query * self.mixed + (width - 1) * np.outer(mean, mean) * self.together
        return self.square * width * result

    @property
    def norms(self) -> Array:
        """As `DrawnHeads.norms`, of draws."""
        return self._drawn.norms

    @property
    def overlaps(self) -> Array:
        """As `DrawnHeads.overlaps`, of draws."""
        return self._drawn.overlaps

    @functools.cached_property
    def _drawn(self) -> DrawnHeads:
        drawn = DrawnHeads(Heads(self.block), *self.given)
        drawn.forward()
        return drawn

    def forward(self) -> Array:
        return self._summed() * (1.0 if self.gate is None else self.gate[0])

    def backward(self, grad_out: Array, *_: Array) -> Back:
        block = self.block
        (query, at_query, query_mean), (key, at_key, key_mean), (value, at_value, _) = (
            self.of[name] for name in ("query", "key", "value")
        )
        kernels = {}
        if self.gate is not None:
            kernels["mixer_gate"] = grad_out * self._summed() * self.gate[1]
            grad_out = grad_out * self.gate[0]
        square = self.square
        back = self._back(grad_out * query)
        together = self._back(grad_out * np.outer(query_mean, query_mean))
        values = key * back + (block.d_key - 1) * np.outer(key_mean, key_mean) * together
        kernels |= {
            "value": square * block.d_key * values * at_value,
            "key": square * block.d_value * value * back * at_key,
            "query": square * block.d_value * grad_out * self.mixed * at_query,
        }
        return Back(kernels, {})


def moments_of(function: str, kernel: Array) -> tuple[Array, Array, Array]:
    """Second moments of f(x), E f' f', and means, for Gaussian x of an (L, L) kernel."""
    if function == "identity":
        return kernel, np.ones_like(kernel), np.zeros(len(kernel))
    signal = Signal(Kernel.of_matrix(kernel), len(kernel), mean=np.zeros(len(kernel)))
    laws = activation_laws(function).under("refined")
    one, two = bind(signal, {"grad_variance": 1.0, "grad_covariance": 1.0})
    values = {
        name: evaluate(laws[name], signal.algebra, two if "co" in name else one)
        for name in ("mean", "variance", "covariance", "grad_variance", "grad_covariance")
    }
    moment, slope = (
        Kernel.joined(values[single], values[pair], True).off_diagonal + 0.0 * kernel
        for single, pair in (("variance", "covariance"), ("grad_variance", "grad_covariance"))
    )
    mean = values["mean"] + np.zeros(len(kernel))
    return moment + np.outer(mean, mean), slope, mean
