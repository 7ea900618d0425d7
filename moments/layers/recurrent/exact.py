"""Laws in closed form, for mixers without a nonlinearity that couples several features.

With Q, K, V second moments of one feature of queries, keys and values over tokens, m their means
(of features after a SiLU), N the width of a head's keys and D its decays, a head's output without a
norm has

    E y y' = scale^2 {N Q o R(K o V) + N (N - 1) m_q m_q' o R(m_k m_k' o V)},  R(H) = D H D^T,

o entrywise; gradients are its derivative. Derived here: second moments of products of independent
features, exact for any width given Gaussian pre-activations. A norm over all of many heads divides
by their mean square, which hardly fluctuates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...engine import laws
from ...engine.derivative import plain, primitive, pullback
from ...formulas.activation import activation_laws
from ...model.mixers import LinearAttention, ShortConvolution
from .drawn import FORGOTTEN, Back, DrawnHeads, Health
from .mixers import DrawnLinearHeads as Heads

Array = Any


class _Closed:
    """A closed law with the interface of `drawn.DrawnHeads`.

    Attributes:
        widths: features of every pre-activation, by name.
        width: of the output.
        own: names of further parameters, which are no matrices on the input.
    """

    widths: Mapping[str, int]
    width: int
    own: tuple[str, ...] = ()

    def __init__(self, kernel: Array, gains: Mapping[str, float], varies: Array) -> None:
        self.entering = [kernel * gains[name] for name in self.widths]
        self.input_varies = varies
        self.varies = gains["key"] * gains["value"] * varies

    def law(self, *moments: Array) -> Array:
        """(L, L) moments of the output, from those of the pre-activations in the order of `widths`
        and from additional covariances of the parameters in `own`."""
        raise NotImplementedError

    def forward(self) -> Array:
        return self.law(*self.entering, *(0.0 for _ in self.own))

    def backward(self, grad_out: Array, *_: Array) -> Back:
        _, pull = pullback(self.law, *self.entering, *(0.0 for _ in self.own))
        cotangents = pull(grad_out * float(self.width))
        pairs = zip(self.widths.items(), cotangents, strict=False)
        kernels = {name: cotangent / width for (name, width), cotangent in pairs}
        rest = cotangents[len(self.widths) :]
        return Back(kernels, {name: float(x) for name, x in zip(self.own, rest, strict=True)})


class GatedConvolution(_Closed):
    """q * conv(k * v), of kernel Q o sum_a tap_variance (K o V)_{t-a,t'-a}: taps are independent,
    and so are different lags."""

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
        self.widths = dict.fromkeys(("query", "key", "value"), width)
        self.own = ("mixer.taps", "mixer.taps.bias") if block.bias else ("mixer.taps",)
        super().__init__(kernel, gains, varies)
        length = len(kernel) // sequences
        shifts = [np.eye(length, k=-a) for a in range(min(block.kernel, length))]
        self.shifts = [np.kron(np.eye(sequences), shift) for shift in shifts]

    def law(self, *moments: Array) -> Array:
        query, key, value, taps, *bias = moments
        product = key * value + self.varies
        shifted = sum(shift @ product @ shift.T for shift in self.shifts)
        return query * ((self.block.tap_variance + taps) * shifted + sum(bias))

    @property
    def norms(self) -> Array:
        """Covariance of squared norms; an entry, a query times a sum over A taps of products, has
        kurtosis 3 (3 + 24/A)."""
        kurtosis = 3 * (3 + 24 / self.block.kernel)
        return (kurtosis - 1) / self.width * self.forward() ** 2

    @property
    def overlaps(self) -> Array:
        """See `DrawnHeads.overlaps`; those of uncorrelated tokens, sums of independent products."""
        return 2.0 / self.width * self.forward() ** 2


UNSTEADY = 0.1
"""Variance of two tokens' overlap over its mean square beyond which a note warns."""

UNSTEADY_NOTED = (
    "overlaps of tokens vary over draws by more than a tenth of their mean square, and linear "
    "attention without a norm takes products of several: against simulation gradients of the "
    "stream were 14 % low and those of matrices up to 36 % (4 layers of 6 heads of 64)"
)


MANY_KEYS = 4096
"""Key features of all heads from which a norm over all is taken to divide by a constant: at 64
heads of 128, against draws, gradients of queries and keys 2 to 4 % high, all else within 1 %."""


class LinearHeads(_Closed):
    """Linear attention with constant decays, without a norm or with one over so many heads that
    their mean square hardly fluctuates."""

    @staticmethod
    def covers(block: LinearAttention) -> bool:
        """Whether the closed law applies to a block."""
        many = block.norm == "all" and block.heads * block.d_key >= MANY_KEYS
        return block.decay_gate is None and (block.norm is None or many)

    def __init__(
        self,
        block: LinearAttention,
        kernel: Array,
        gains: Mapping[str, float],
        sequences: int,
        varies: Array = 0.0,
    ) -> None:
        self.block, self.arguments = block, (kernel, gains, sequences)
        self.width = block.d_value
        self.widths = {"query": block.d_key, "key": block.d_key, "value": block.d_value}
        if block.gate is not None:
            self.widths["mixer_gate"] = block.d_value
        if block.norm is not None:
            self.own = ("mixer_norm.gain",)
        super().__init__(kernel, gains, varies)
        length = len(kernel) // sequences
        lag = np.subtract.outer(np.arange(length), np.arange(length))
        decays = dict.fromkeys((1.0,), 1.0) if block.decays is None else {}
        for decay in block.decays or ():
            decays[decay] = decays.get(decay, 0.0) + 1 / block.heads
        self.heads = [
            share**0.5 * np.kron(np.eye(sequences), decay ** np.maximum(lag, 0) * (lag >= 0))
            for decay, share in decays.items()
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """See `DrawnHeads.notes`."""
        block = self.block
        if block.norm is None:
            products = np.mean(self.arguments[0] ** 2)
            return (UNSTEADY_NOTED,) if np.mean(self.input_varies) > UNSTEADY * products else ()
        sizes = np.diagonal(self.law(*self.entering, norm=False))
        forgotten = np.mean(np.array(block.decays or (1.0,)) < FORGOTTEN)
        share = float(np.mean(sizes / (sizes + block.norm_epsilon)))
        return Health(float(forgotten), float(np.mean(sizes)), block.norm_epsilon, share).notes

    def _mean(self, kernel: Array) -> Array:
        """R(H), averaged over heads."""
        return _summed(kernel, self.heads)

    @property
    def norms(self) -> Array:
        """See `DrawnHeads.norms`; after a norm over all heads those of Gaussian features."""
        if self.block.norm is None:
            return self._drawn.norms
        return 2.0 / (self.block.heads * self.width) * self.forward() ** 2

    @property
    def overlaps(self) -> Array:
        """See `DrawnHeads.overlaps`; after a norm over all heads those of Gaussian features."""
        return self._drawn.overlaps if self.block.norm is None else self.norms

    @functools.cached_property
    def _drawn(self) -> DrawnHeads:
        drawn = DrawnHeads(Heads(self.block), *self.arguments)
        drawn.forward()
        return drawn

    def law(self, *moments: Array, norm: bool = True) -> Array:
        block, width = self.block, self.block.d_key
        assert block.scale is not None
        gate: Array = 1.0
        with laws.evaluating(laws.Layout(True), float(getattr(moments[0], "level", math.inf))):
            query, key, value = (_function(block.feature_map, x) for x in moments[:3])
            varies = self.varies if block.feature_map == "identity" else 0.0
            result = query * self._mean(key * value + varies)
            if block.feature_map != "identity":
                of_query, of_key = (_means(block.feature_map, x) for x in moments[:2])
                result = result + (width - 1) * of_query * self._mean(of_key * value)
            result = block.scale**2 * width * result
            if block.norm is not None and norm:
                result = laws.normalized(result, block.norm_epsilon)
                result = result * (1.0 + block.heads * moments[-1])
            if block.gate is not None:
                gate = _function(block.gate, moments[3])
        return result * gate


_summed: Callable[..., Array] = primitive(
    lambda kernel, factors: sum(factor @ kernel @ factor.T for factor in factors),
    lambda result, kernel, factors: lambda g: _summed(g, [factor.T for factor in factors]),
)


def _function(name: str, x: Array) -> Array:
    """E f(u) f(u') for Gaussian u of moments x."""
    return x if name == "identity" else laws.activation(name, x)


def _means(name: str, x: Array) -> Array:
    """E f(u) E f(u'), constant in the covariances."""
    mean = np.asarray(activation_laws(name).law("mean")(x_variance=np.diagonal(plain(x))))
    return np.outer(mean, mean)
