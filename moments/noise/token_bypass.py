"""A layer's input added again at its end (bottom-to-top connections), by token.

With u = s x + b the sum behind attention, n = u/|u| and f the feed-forward block's output, the
layer ends in y = x + s' n + f, which holds x with amplitude 1 + a, a = s s'/|u|. Attention's cross
term x.b is in the kernel of u with the factor 2 s and in that of y with 2 s'/|u| beside, and on the
way back the feed-forward block's likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.state import Array
from .sensitivity import (
    SINGLE,
    Ascent,
    Descent,
    count_of,
    diagonal,
    over_tokens,
    own_entries,
    paired,
    ratio,
    row_sums,
    total,
    trace_of,
)
from .token_parts import Part


@dataclass(frozen=True)
class Bypass:
    """What the three parts of such a layer do to sensitivities, their noise included.

    Attributes:
        attention, norm, ffn: residual connection, normalisation, residual connection.
        carried: (..., L) a.
        leaving: kernel of the signal y.
        sent, received: kernels of the gradient at x and at y.
    """

    attention: Part
    norm: Part
    ffn: Part
    carried: Array
    leaving: Array
    sent: Array
    received: Array

    def ascend(self, sensitivity: Array) -> Ascent:
        inner = self.attention.ascend(sensitivity)
        between = self.norm.ascend(inner.sensitivity)
        top = self.ffn.ascend(between.sensitivity)
        both, skip = self._both, self.ffn.skip
        # The feed-forward block's branch, then attention's beside all the rest.
        first = skip * self.received
        deep = self.ffn.sent - first
        crossed = between.sensitivity + ratio(0.5 * (both - 1), skip) * sensitivity
        noise = self._added(crossed, between.sensitivity, first, deep, self.ffn.back_kappa)
        attended = self.sent - both * self.received - self.attention.skip * self.norm.sent
        noise += self._added(
            sensitivity, sensitivity, self.sent - attended, attended, self.attention.back_kappa
        )
        sizes = [
            total(inner_one * kernel)
            for inner_one, kernel in ((sensitivity, attended), (between.sensitivity, deep))
        ]
        met = sizes[0] * inner.coherence + sizes[1] * top.coherence
        exposure = (inner.exposure, between.exposure, top.exposure, sensitivity)
        return Ascent(
            top.sensitivity + both * sensitivity,
            exposure,
            noise + inner.noise + between.noise + top.noise,
            between.coherence * ratio(met, sizes[0] + sizes[1]),
        )

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        of_attention, of_norm, of_ffn, given = exposure
        top = self.ffn.descend(sensitivity, of_ffn)
        between = self.norm.descend(top.sensitivity, of_norm)
        kernel, around = self.attention.entering, self.attention.leaving
        # a falls as |u| grows
        moved = row_sums(sensitivity * kernel)
        moved[: len(given)] += row_sums(given * self.received)
        fall = self.carried / own_entries(around)
        middle = between.sensitivity - diagonal((fall * moved).astype(SINGLE), around)
        inner = self.attention.descend(middle, of_attention)
        both, skip = self._both, self.attention.skip
        first = skip * kernel
        crossed = middle + ratio(0.5 * (both - 1), skip) * sensitivity
        noise = self._added(crossed, middle, first, around - first, self.attention.kappa)
        deep = self.ffn.leaving - self.ffn.skip * self.ffn.entering
        noise += self._added(sensitivity, sensitivity, self.leaving - deep, deep, self.ffn.kappa)
        return Descent(
            inner.sensitivity + both * sensitivity,
            noise + inner.noise + between.noise + top.noise,
            inner.common + between.common + top.common,
        )

    @property
    def _both(self) -> Array:
        return 1 + self.carried[..., :, None] + self.carried[..., None, :]

    def _added(
        self, crossed: Array, sensitivity: Array, carried: Array, added: Array, kappa: Array
    ) -> Array:
        """Variance of an addition whose cross term has another sensitivity than its square."""
        cross = 4 * paired(crossed, carried.astype(SINGLE), added.astype(SINGLE))
        square = paired(sensitivity, added.astype(SINGLE), added.astype(SINGLE))
        return (cross + kappa * square) / self.attention.width


class _Bypassed(Part):
    """A part whose noise its response counts."""

    def ascend(self, sensitivity: Array) -> Ascent:
        return self.response.ascend(sensitivity)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        return self.response.descend(sensitivity, exposure)

    def gradient_noise(self, sensitivity: Array) -> Array:
        return np.zeros(sensitivity.shape[:-2])

    def signal_noise(self, sensitivity: Array) -> Array:
        return np.zeros(sensitivity.shape[:-2])


def bypassed(
    parts: tuple[Part, Part, Part],
    carried: Array,
    kernels: tuple[Array, Array, Array, Array],
) -> Part:
    """The whole layer but its last normalisation as one part.

    Args:
        parts: residual connection, normalisation, residual connection.
        carried: (..., L) a.
        kernels: of the signal that enters and leaves, of the gradient sent and received.
    """
    attention, norm, ffn = parts
    entering, leaving, sent, received = kernels
    carried = carried.astype(SINGLE)
    answer = Bypass(attention, norm, ffn, carried, leaving, sent, received)
    # What different directions share passes the connections on average over tokens.
    each = over_tokens((1 + carried) ** 2, entering) / count_of(entering)
    kept = np.mean(each)
    added = [part.leaving - part.skip * part.entering for part in (attention, ffn)]
    sizes = [trace_of(one) for one in added]
    mean = over_tokens(carried, entering) / count_of(entering)
    first = mean**2 / attention.skip**2 if attention.skip else 0.0
    sizes[0] = sizes[0] * first
    share = ratio(sizes[0], sizes[0] + sizes[1])
    kappa = 2 + (attention.kappa - 2) * share**2 + (ffn.kappa - 2) * (1 - share) ** 2
    return _Bypassed(
        answer,
        True,
        float(kept),
        1.0,
        entering,
        leaving,
        sent,
        received,
        kappa,
        kappa,
        attention.width,
        attention.inner,
        share,
    )
