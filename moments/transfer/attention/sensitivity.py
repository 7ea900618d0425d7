"""Sensitivities through attention, and what one draw of its heads adds at random.

See docs/theory/band.md, Saturation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.sensitivity import (
    GradientAdjoint,
    Matrix,
    SignalAdjoint,
    count_of,
    diagonal,
    entrywise,
    matrix_of,
    over_tokens,
    own_entries,
    paired,
    per_pair,
    ratio,
    row_sums,
    stacked,
    total,
    trace_of,
)
from ...engine.state import Array, Signal
from .by_token import self_masks
from .logits import logit_law
from .response import AttentionResponse


class Together(NamedTuple):
    """The gradient that attention's rows send through one head's weights and keys, by how many
    vectors over tokens it is made of.

    Row i sends (g_i . v_j) a_ij q_i to key j, v_j relative to the row's mean. Rows of one gradient
    send one vector z_j of squares over keys, and so do rows of one query; independent rows send one
    each. With f = E a^4/(E a^2)^2 the relative variance of sum_j z_j^2 over n keys is (3 f - 1)/n,
    beside 2/d of the norm that all g . v_j share.

    Attributes:
        gradients, queries: (..., L, L) what rows of common gradient, and of common query, send.
        crowding: (..., L) f of what rows have in common.
        alone: (..., L) relative variance of what one row sends, times the square of the part that
            is its own.
    """

    gradients: Matrix
    queries: Matrix
    crowding: Array
    alone: Array

    @classmethod
    def of(cls, maps: AttentionResponse, gradient: Matrix) -> Together:
        own = own_entries(gradient)
        single = ratio(
            own, trace_of(gradient)[..., None]
        )  # a row that is alone: common with itself
        agreement = maps.agreement(gradient)
        common = gradient - diagonal(own * (1 - single), gradient)
        queries = diagonal(own * (1 - single) * agreement, gradient)
        alone = ((1 - single) * (1 - agreement)) ** 2
        several = 3 * maps.participation(np.ones_like(agreement)) - 1 / maps.keys
        return cls(
            maps.sent_by_head(common),
            maps.sent_by_head(queries),
            maps.keys * maps.participation(agreement),
            alone * several,
        )


@dataclass(frozen=True)
class Attending:
    """Attention, with its value projection.

    Attributes:
        maps: of the attention weights.
        gain, back_gain: of the value projection, on a signal and on a gradient.
        received: (..., L, L) gradient at the output.
        together: what a head's rows send together.
        heads, d_head, d_model: number and width of the heads, width of the tokens.
    """

    maps: AttentionResponse
    gain: Array
    back_gain: Array
    received: Matrix
    together: Together
    heads: float
    d_head: float
    d_model: float

    @classmethod
    def of(cls, attention: Any, signal: Signal, received: Matrix) -> Attending:
        """Around the signal that enters and the gradient kernel received."""
        tokens = signal.second_moment()
        kernel = matrix_of(tokens, signal.seq_len)
        allowed = None
        if tokens.resolved is True:
            allowed = self_masks(attention, kernel.shape[-1], int(np.prod(kernel.shape[:-2])))
        law = logit_law(attention, tokens, tokens, (attention.d_model, attention.d_model))
        # Normalised or shifted queries and keys by their size alone, rotated ones as if they stood.
        size = law.queries.kernel.mean_diagonal() * law.keys.kernel.mean_diagonal()
        tau = ratio(law.scale * size, tokens.mean_diagonal() ** 2)
        maps = AttentionResponse.of(attention, kernel, allowed, tau)
        back_gain = attention.heads * attention.d_head * attention.value
        return cls(
            maps,
            attention.d_model * attention.value,
            back_gain,
            received,
            Together.of(maps, per_pair(back_gain) * received),
            attention.heads,
            attention.d_head,
            attention.d_model,
        )

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        """The noise is that of what the output projection sends, 2 over the heads' features, and of
        what a head's realised weights and keys send: few vectors over tokens in each head."""
        adjoint = self.maps.gradient_adjoint(sensitivity)
        onward = per_pair(self.back_gain) * adjoint.onward
        noise = 2 / (self.heads * self.d_head) * paired(onward, self.received, self.received)
        together = self.together
        sizes = entrywise(np.abs, self.maps.by_head * self.received * adjoint.gathered)
        rows = row_sums(sizes)
        crowding = ratio(over_tokens(rows * together.crowding, sizes), over_tokens(rows, sizes))
        for sent in (together.gradients, together.queries):
            by_key = (3 * crowding - 1) * paired(sensitivity, sent, sent)
            size = 2 * total(sensitivity * sent) ** 2 / self.d_model
            noise = noise + (by_key + size) / self.heads
        own = self.maps.by_head * adjoint.gathered + self.maps.query * sensitivity
        own = own_entries(per_pair(self.back_gain) * own * self.received)
        noise = noise + over_tokens(own**2 * together.alone, self.received) / self.heads
        met = total(sensitivity * (self.received @ self.maps.weights))
        whole = total(sensitivity * self.received) * total(onward * self.received)
        return GradientAdjoint(onward, adjoint, noise, ratio(self.back_gain * met**2, whole))

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        """The noise is that of |W_k^T W_q x|^2 in every head, which scales a query's logits."""
        gain, received = per_pair(self.gain), per_pair(self.back_gain) * self.received
        count = len(exposure.given)
        onward, queries = self.maps.signal_adjoint(gain * sensitivity[:count], exposure, received)
        if count < len(sensitivity):
            rest = self.maps.signal_adjoint(gain * sensitivity[count:], None, received)
            onward, queries = (stacked(pair) for pair in zip((onward, queries), rest, strict=True))
        relative = 2 * (1 / self.d_head + 1 / self.d_model) / self.heads
        kernel = self.maps.kernel
        noise = relative * paired(queries, kernel, kernel)
        size = trace_of(kernel) / count_of(kernel)
        return SignalAdjoint(onward, noise, relative * (total(queries) * size) ** 2)
