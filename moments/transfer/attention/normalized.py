"""Attention whose queries, keys and values are all normalised, head by head (HybridNorm)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Leaf, Pullback, Pulled
from ...engine.packing import Padding
from ...engine.short_vectors import expected_pull
from ...engine.state import Array, Gradient, Kernel, Signal
from ...errors import domain_error
from ...formulas.normalization import RMSNORM
from ..normalization import FiniteNormalization
from .self_attention import SelfAttention


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
        own = self.attention
        if not np.all(np.add(own.value, own.value_bias) > 0):
            allowed = "above 0 where values are normalised"
            raise domain_error("value", own.value, allowed, "zeros have no direction")
        unit = FiniteNormalization(RMSNORM, own.label, own.norm_epsilon, centres=False)
        inner, back_norm = unit.forward(signal)
        gain = own.d_model * own.value
        plain = dataclasses.replace(own, value=1 / own.d_model, value_bias=own.value_bias / gain)
        output, back = plain.forward(inner)
        freedom = _freedom(float(own.d_head), own.qk_norm == "layernorm")
        factor = expected_pull(freedom, 1.0)
        both = expected_pull(freedom, inner.correlation())

        def pullback(gradient: Gradient) -> Pulled:
            pulled = back(gradient)
            kernel = pulled.gradient.kernel.weighted(factor, both)
            sent = back_norm(Gradient(kernel, gradient.seq_len))

            def weights() -> dict[str, Array]:
                found: dict[str, Any] = dict(pulled.weights()) if pulled.weights else {}
                for name in ("value", "value.bias"):
                    if name in found:
                        found[name] = found[name] * factor / gain
                return found

            def response() -> Kernel:
                assert pulled.response is not None
                return back_norm(Gradient(pulled.response(), gradient.seq_len)).gradient.kernel

            return Pulled(sent.gradient, weights, pulled.overlaps, response)

        return output, pullback


def _freedom(d_head: float, centred: bool) -> float:
    """Of a Gaussian head's squared norm. Narrow heads' 1/|v|^2 has no mean: n is held at 4."""
    return max(d_head - 1 if centred else d_head, 4.0)
