"""Laws in closed form of mixers in which nothing nonlinear is shared by several features.

With Q, K, V second moments of one feature of queries, keys and values over tokens, m their means,
N the width of a head's keys and D its decays, of a head's output (no norm behind)

    E y y' = scale^2 {N Q o R(K o V) + N (N - 1) m_q m_q' o R(m_k m_k' o V)},  R(H) = D H D^T,

o entry by entry; gradients are its derivative. Features of queries and keys have means where a SiLU
made them. Derived here: second moments of products of independent features, exact for any width
given Gaussian pre-activations. A norm over all of many heads divides by their mean, which hardly
varies.
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
    """What enters and leaves, as `drawn.DrawnHeads`, of a law.

    Attributes:
        widths: features by name of what reads the input.
        width: of the output.
        own: names of parameters that multiply no input.
    """

    widths: Mapping[str, int]
    width: int
    own: tuple[str, ...] = ()

    def __init__(self, kernel: Array, gains: Mapping[str, float], varies: Array) -> None:
        self.entering = [kernel * gains[name] for name in self.widths]
        self.input_varies = varies
        self.varies = gains["key"] * gains["value"] * varies

    def law(self, *given: Array) -> Array:
        """(L, L) of what leaves, from the pre-activations' in the order of `widths`, and by how
        much the covariance of parameters in `own` exceeds their variance."""
        raise NotImplementedError

    def forward(self) -> Array:
        return self.law(*self.entering, *(0.0 for _ in self.own))

    def backward(self, grad_out: Array, *_: Array) -> Back:
        _, pull = pullback(self.law, *self.entering, *(0.0 for _ in self.own))
        sent = pull(grad_out * float(self.width))
        sizes = zip(self.widths.items(), sent, strict=False)
        kernels = {name: one / width for (name, width), one in sizes}
        rest = sent[len(self.widths) :]
        return Back(kernels, {n: float(one) for n, one in zip(self.own, rest, strict=True)})


class GatedConvolution(_Closed):
    """q * conv(k * v): its kernel is q's times sum_a tap_variance (K o V)_{t-a,t'-a}, as taps are
    independent, so that two lags have nothing in common."""

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
        one = [np.eye(length, k=-a) for a in range(min(block.kernel, length))]
        self.shifts = [np.kron(np.eye(sequences), shift) for shift in one]

    def law(self, *given: Array) -> Array:
        query, key, value, taps, *bias = given
        product = key * value + self.varies
        moved = sum(shift @ product @ shift.T for shift in self.shifts)
        return query * ((self.block.tap_variance + taps) * moved + sum(bias))

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


UNSTEADY = 0.1
"""Variance of two tokens' overlap over its mean square beyond which a note is made."""

UNSTEADY_NOTED = (
    "overlaps of tokens vary over draws by more than a tenth of their mean square, and linear "
    "attention without a norm takes products of several: against simulation gradients of the "
    "stream were 14 % low and those of matrices up to 36 % (4 layers of 6 heads of 64)"
)


MANY_KEYS = 4096
"""Of all heads together, from which on a norm over them divides by their mean: at 64 heads of 128
against draws, gradients of queries and keys 2 to 4 % high, all else within 1 %."""


class LinearHeads(_Closed):
    """Linear attention without decays that the input sets, and without a norm or with one over so
    many heads that their mean square does not vary."""

    @staticmethod
    def covers(block: LinearAttention) -> bool:
        """Whether its heads need not be drawn."""
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
        self.block, self.given = block, (kernel, gains, sequences)
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
        for one in block.decays or ():
            decays[one] = decays.get(one, 0.0) + 1 / block.heads
        self.heads = [
            share**0.5 * np.kron(np.eye(sequences), one ** np.maximum(lag, 0) * (lag >= 0))
            for one, share in decays.items()
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """As `DrawnHeads.notes`."""
        block = self.block
        if block.norm is None:
            products = np.mean(self.given[0] ** 2)
            return (UNSTEADY_NOTED,) if np.mean(self.input_varies) > UNSTEADY * products else ()
        sizes = np.diagonal(self.law(*self.entering, norm=False))
        forgotten = np.mean(np.array(block.decays or (1.0,)) < FORGOTTEN)
        share = float(np.mean(sizes / (sizes + block.norm_epsilon)))
        return Health(float(forgotten), float(np.mean(sizes)), block.norm_epsilon, share).notes

    def _mean(self, kernel: Array) -> Array:
        """R, over heads."""
        return _summed(kernel, self.heads)

    @property
    def norms(self) -> Array:
        """As `DrawnHeads.norms`: of draws; behind a norm over all heads as of Gaussian features."""
        if self.block.norm is None:
            return self._drawn.norms
        return 2.0 / (self.block.heads * self.width) * self.forward() ** 2

    @property
    def overlaps(self) -> Array:
        """As `DrawnHeads.overlaps`, with the same exception."""
        return self._drawn.overlaps if self.block.norm is None else self.norms

    @functools.cached_property
    def _drawn(self) -> DrawnHeads:
        drawn = DrawnHeads(Heads(self.block), *self.given)
        drawn.forward()
        return drawn

    def law(self, *given: Array, norm: bool = True) -> Array:
        block, width = self.block, self.block.d_key
        assert block.scale is not None
        gate: Array = 1.0
        with laws.evaluating(laws.Layout(True), float(getattr(given[0], "level", math.inf))):
            query, key, value = (_function(block.feature_map, x) for x in given[:3])
            varies = self.varies if block.feature_map == "identity" else 0.0
            result = query * self._mean(key * value + varies)
            if block.feature_map != "identity":
                of_query, of_key = (_means(block.feature_map, x) for x in given[:2])
                result = result + (width - 1) * of_query * self._mean(of_key * value)
            result = block.scale**2 * width * result
            if block.norm is not None and norm:
                result = laws.normalized(result, block.norm_epsilon) * (
                    1.0 + block.heads * given[-1]
                )
            if block.gate is not None:
                gate = _function(block.gate, given[3])
        return result * gate


_summed: Callable[..., Array] = primitive(
    lambda kernel, factors: sum(one @ kernel @ one.T for one in factors),
    lambda result, kernel, factors: lambda g: _summed(g, [one.T for one in factors]),
)


def _function(name: str, x: Array) -> Array:
    """E f(u) f(u') of Gaussian u of moments x."""
    return x if name == "identity" else laws.activation(name, x)


def _means(name: str, x: Array) -> Array:
    """E f(u) E f(u'), which no covariance changes."""
    mean = np.asarray(activation_laws(name).law("mean")(x_variance=np.diagonal(plain(x))))
    return np.outer(mean, mean)
