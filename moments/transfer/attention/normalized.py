"""Attention whose queries, keys and values are all normalised, head by head (HybridNorm)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Chain, Leaf, Pullback, Pulled
from ...engine.own_overlap import OverlapWalk, OwnOverlap
from ...engine.packing import Padding
from ...engine.response import Around, Elementwise, Sequence
from ...engine.sensitivity import SINGLE, Response, kernel_of
from ...engine.short_vectors import expected_pull
from ...engine.state import Array, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...errors import domain_error
from ...formulas.normalization import RMSNORM
from ..normalization import FiniteNormalization
from .overlap import through_attention
from .self_attention import SelfAttention
from .sensitivity import Attending

LEAST_FREEDOM = 4.0
"""Degrees of freedom of a head's norm at which narrower heads are held: E 1/|v|^2 is 1/(n - 2) and
has no mean at 2, where the ratio (n - 1)/(n - 2) of the way back is without meaning."""


@dataclass(frozen=True)
class NormalizedAttention(Leaf):
    """Self-attention on q/|q|, k/|k| and v/|v|.

    What is normalised has no scale, so the tokens' own may be taken off first, where their width
    makes it exact, and the values' weights then are 1/d_model. What normalising values does to a
    gradient beside is applied to all of it, an error of order 1/d_head in the query and key paths;
    correlations of values are those of infinitely wide heads.

    Attributes:
        attention: with `qk_norm`; its `value` is the variance of the unnormalised projection.
    """

    attention: SelfAttention

    mixes_tokens: ClassVar[bool] = True
    normalises: ClassVar[bool] = True

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.attention.label

    @property
    def padding(self) -> Padding | None:
        return self.attention.padding

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        attention = self.attention
        if not np.all(np.add(attention.value, attention.value_bias) > 0):
            allowed = "above 0 where values are normalised"
            raise domain_error("value", attention.value, allowed, "zeros have no direction")
        unit, plain = self.values_normalised()
        inner, back_norm = unit.forward(signal)
        gain = attention.d_model * attention.value
        output, back = plain.forward(inner)
        freedom = _freedom(float(attention.d_head), attention.qk_norm == "layernorm")
        factor = expected_pull(freedom, 1.0)
        both = expected_pull(freedom, inner.correlation())
        return output, _Pullback(back, back_norm, factor, both, gain)

    def own_overlap(self, record: Record, at: OwnOverlap, walk: OverlapWalk) -> OwnOverlap:
        # norms are no overlaps of their own
        return through_attention(self.attention, record, at, walk, fixed=True)

    def values_normalised(self) -> tuple[FiniteNormalization, SelfAttention]:
        """Tokens of unit norm and attention with values of unit variance, which it amounts to."""
        attention = self.attention
        unit = FiniteNormalization(RMSNORM, attention.label, attention.norm_epsilon, centres=False)
        bias = attention.value_bias / (attention.d_model * attention.value)
        return unit, dataclasses.replace(attention, value=1 / attention.d_model, value_bias=bias)

    def two_sequences(self, signal: Signal, memory: Kernel | None) -> Signal:
        return Chain(self.values_normalised()).two_sequences(signal, memory)

    def unplaced(self) -> NormalizedAttention:
        return NormalizedAttention(self.attention.unplaced())

    def response(self, record: Record, around: Around) -> Response:
        # What the values' norms do is of order 1/d_head. The gradient between the two is that of
        # the fast maps.
        (unit, plain), signal = self.values_normalised(), record.input
        received = around.received(record)
        tokens, _ = unit.forward(signal)
        attending = Attending.of(plain, tokens, received)
        sent, _ = attending.maps.signal_adjoint(
            SINGLE(attending.back_gain) * received, None, received
        )
        at_tokens = Gradient(kernel_of(sent), record.gradient_received.seq_len)
        normed = Elementwise.of(unit, signal, at_tokens, sent, False)
        return Sequence((normed, attending))


@dataclass(slots=True, eq=False)
class _Pullback:
    """The way back: through attention, and through the tokens' normalisation.

    Attributes:
        attention, norm: those two ways.
        factor, both: what normalising values does to a token's gradient, and to that of two.
        gain: of the unnormalised values.
    """

    attention: Pullback
    norm: Pullback
    factor: Any
    both: Any
    gain: Any

    def __call__(self, gradient: Gradient) -> Pulled:
        inner = self.attention(gradient)
        kernel = inner.gradient.kernel.weighted(self.factor, self.both)
        sent = self.norm(Gradient(kernel, gradient.seq_len)).gradient
        return _Pulled(sent, self, inner)


@dataclass(slots=True, eq=False)
class _Pulled(Pulled):
    """What came back, and what attention alone said."""

    way: _Pullback
    inner: Pulled

    def weights(self) -> Mapping[str, Array]:
        way, found = self.way, dict(self.inner.weights())
        for name in ("value", "value.bias"):
            if name in found:
                found[name] = found[name] * way.factor / way.gain
        return found

    def overlaps(self) -> Mapping[str, Array]:
        return self.inner.overlaps()

    def response(self) -> Kernel | None:
        found = self.inner.response()
        if found is None:
            return None
        return self.way.norm(Gradient(found, self.gradient.seq_len)).gradient.kernel


def _freedom(d_head: float, centred: bool) -> float:
    """Of a Gaussian head's squared norm."""
    return max(d_head - 1 if centred else d_head, LEAST_FREEDOM)
