"""Sensitivities of one number carried through the parts of a network, by token.

A number y is linear in the gradient's kernel, dy = sum(Lambda o dG), and smooth in the signal's,
dy = sum(Gamma o dC), at every point. Through a part with signals C -> C' and gradients G' -> G,

    Lambda' = (dG/dG')^T Lambda,    Gamma = (dC'/dC)^T Gamma' + d<Lambda, G>/dC.

Leaves that act on every token alone have elementwise derivatives: taken here as differences of what
the leaves themselves return at slightly changed kernels, so that no law is stated a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .attention import SelfAttention
from .attention_response import SINGLE, AttentionResponse, diagonal, transposed
from .block_noise import ratio
from .composition import Chain, Component, Leaf, Residual
from .errors import MomentsError
from .parts import Dropout, Linear, Scale
from .propagate import Point
from .state import Array, Gradient, Kernel, Signal

STEP = 1e-4
"""Relative step of the one-sided differences, whose error is of this order."""


class Ascent(NamedTuple):
    """What a sensitivity at a part's input says about the part.

    Attributes:
        sensitivity: (..., L, L) Lambda', to the gradient at the output.
        exposure: what `Response.descend` needs of it.
        noise: (...,) variance that randomness inside the part adds to y.
        coherence: (...,) share of the part's gain that overlaps of different directions have.
    """

    sensitivity: Array
    exposure: Any
    noise: Array
    coherence: Array


class Descent(NamedTuple):
    """What a sensitivity to the signal at a part's output says about the part.

    Attributes:
        sensitivity: (..., L, L) Gamma, to the signal at the input.
        noise: (...,) variance that randomness inside the part adds to y.
        common: (...,) the same for sequences that share the weights, over the square of their
            tokens' correlation; and that of tokens which agree on average in nothing.
    """

    sensitivity: Array
    noise: Array
    common: Array


class Response(Protocol):
    """What a part does to sensitivities; kernels (targets, ..., L, L)."""

    def ascend(self, sensitivity: Array) -> Ascent:
        """From the gradient at the input to that at the output."""

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        """Sensitivity to the signal at the input, of one to that at the output.

        `exposure` is that of an ascent, possibly of fewer targets: the first ones.
        """


@dataclass(frozen=True)
class Elementwise:
    """A leaf that acts on every token alone.

    Attributes:
        onward, back: (..., L, L) derivative of an output pair by its input pair, and the factor on
            a gradient pair.
        own, back_own: (..., L, L) change of an output pair, and of that factor, where both tokens
            grow, over the tokens' relative growth; correlated as they were.
        back_change: (..., L, L) derivative of that factor by the pair.
        kernel, gradient: second moments at the input, gradient at the output.
    """

    onward: Array
    own: Array
    back: Array
    back_change: Array
    back_own: Array
    kernel: Array
    gradient: Array

    @classmethod
    def of(cls, leaf: Leaf, signal: Signal, gradient: Gradient, received: Array) -> Elementwise:
        """Differences of a leaf around the signal that entered it."""
        kernel = signal.second_moment()
        if isinstance(leaf, Linear | Dropout | Scale):
            return cls._linear(leaf, signal, gradient, received)
        spread = signal.spread
        base = signal.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = np.sqrt(first * second)
        nearer = Kernel.joined(kernel.diagonal, kernel.pairs - STEP * scale, True)
        grown = base.replace(
            kernel=kernel.scaled(1 + STEP),
            spread=None if spread is None else spread.scaled((1 + STEP) ** 2),
        )
        ones = _ones(gradient, kernel)
        values = []
        for entering in (base, base.replace(kernel=nearer), grown):
            output, pullback = leaf.forward(entering)
            values.append((output.second_moment().pairs, pullback(ones).gradient.kernel.pairs))
        (out, back), (out_near, back_near), (out_grown, back_grown) = values
        diag = np.arange(kernel.pairs.shape[-1])
        onward, change = (out - out_near) / (STEP * scale), (back - back_near) / (STEP * scale)
        onward[..., diag, diag] = change[..., diag, diag] = 0.0
        own = (out_grown - out) / STEP - onward * kernel.pairs
        back_own = (back_grown - back) / STEP - change * kernel.pairs
        fields = (onward, own, back, change, back_own, kernel.pairs, received)
        return cls(*(field.astype(SINGLE) for field in fields))

    @classmethod
    def _linear(
        cls, leaf: Leaf, signal: Signal, gradient: Gradient, received: Array
    ) -> Elementwise:
        """What scales every pair by a factor, the same at any kernel: no differences needed."""
        kernel, ones = signal.second_moment(), _ones(gradient, kernel)
        unit = Signal(ones.kernel, signal.seq_len, mean=0.0 * kernel.diagonal, width=signal.width)
        output, pullback = leaf.forward(unit)
        factor, back = output.kernel.pairs, pullback(ones).gradient.kernel.pairs
        own = diagonal(np.diagonal(factor, axis1=-2, axis2=-1) * kernel.diagonal)
        onward = factor - diagonal(np.diagonal(factor, axis1=-2, axis2=-1))
        fields = (onward, own, back, 0 * back, 0 * back, kernel.pairs, received)
        return cls(*(field.astype(SINGLE) for field in fields))

    def ascend(self, sensitivity: Array) -> Ascent:
        paired = sensitivity * self.gradient
        none = np.zeros(sensitivity.shape[:-2])
        by_pair = self.back_change * paired if np.any(self.back_change) else None
        exposure = by_pair, self._by_size(self.back_own * paired)
        return Ascent(self.back * sensitivity, exposure, none, none + self._coherence)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        by_pair, by_size = exposure
        size = self._by_size(self.own * sensitivity)
        size[: len(by_size)] += by_size
        total = self.onward * sensitivity
        if by_pair is not None:
            total[: len(by_pair)] += by_pair
        index = np.arange(total.shape[-1])
        total[..., index, index] += size
        none = np.zeros(sensitivity.shape[:-2])
        return Descent(total, none, none)

    @functools.cached_property
    def _coherence(self) -> Array:
        factor = Kernel.of_matrix(self.back)
        return factor.mean_pairs() / factor.mean_diagonal()

    def _by_size(self, pairs: Array) -> Array:
        """Each of two tokens has half a share in their pair."""
        return pairs.sum(-1) / np.diagonal(self.kernel, axis1=-2, axis2=-1)


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

    gradients: Array
    queries: Array
    crowding: Array
    alone: Array

    @classmethod
    def of(cls, maps: AttentionResponse, gradient: Array) -> Together:
        own = np.diagonal(gradient, axis1=-2, axis2=-1)
        single = ratio(own, own.sum(-1)[..., None])  # a row that is alone is common with itself
        agreement = maps.agreement(gradient)
        common = gradient - diagonal(own * (1 - single))
        queries = diagonal(own * (1 - single) * agreement)
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
    gain: float
    back_gain: float
    received: Array
    together: Together
    heads: float
    d_head: float
    d_model: float

    @classmethod
    def of(cls, attention: SelfAttention, signal: Signal, received: Array) -> Attending:
        """Around the signal that enters and the gradient kernel received."""
        kernel = signal.second_moment().pairs
        allowed = attention._allowed(kernel.shape[-1], int(np.prod(kernel.shape[:-2])))
        tau = float(attention._logit_scale())
        maps = AttentionResponse.of(attention, kernel, allowed, tau)
        back_gain = attention.heads * attention.d_head * attention.value
        return cls(
            maps,
            attention.d_model * attention.value,
            back_gain,
            received,
            Together.of(maps, SINGLE(back_gain) * received),
            attention.heads,
            attention.d_head,
            attention.d_model,
        )

    def ascend(self, sensitivity: Array) -> Ascent:
        """The noise is that of what the output projection sends, 2 over the heads' features, and of
        what a head's realised weights and keys send: few vectors over tokens in each head."""
        rise = self.maps.rise(sensitivity)
        onward = self.back_gain * rise.onward
        noise = 2 / (self.heads * self.d_head) * paired(onward, self.received, self.received)
        together = self.together
        rows = np.abs(self.maps.by_head * self.received * rise.gathered).sum(-1)
        crowding = ratio((rows * together.crowding).sum(-1), rows.sum(-1))
        for sent in (together.gradients, together.queries):
            by_key = (3 * crowding - 1) * paired(sensitivity, sent, sent)
            size = 2 * (sensitivity * sent).sum((-2, -1)) ** 2 / self.d_model
            noise = noise + (by_key + size) / self.heads
        own = self.maps.by_head * rise.gathered + self.maps.query * sensitivity
        own = self.back_gain * np.diagonal(own * self.received, axis1=-2, axis2=-1)
        noise = noise + (own**2 * together.alone).sum(-1) / self.heads
        met = (sensitivity * (self.received @ self.maps.weights)).sum((-2, -1))
        whole = (sensitivity * self.received).sum((-2, -1)) * (onward * self.received).sum((-2, -1))
        return Ascent(onward, rise, noise, ratio(self.back_gain * met**2, whole))

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        """The noise is that of |W_k^T W_q x|^2 in every head, which scales a query's logits."""
        gain, received = SINGLE(self.gain), SINGLE(self.back_gain) * self.received
        count = len(exposure.given)
        total, queries = self.maps.fall(gain * sensitivity[:count], exposure, received)
        if count < len(sensitivity):
            rest = self.maps.fall(gain * sensitivity[count:], None, received)
            total, queries = (np.concatenate(pair) for pair in zip((total, queries), rest))
        relative = 2 * (1 / self.d_head + 1 / self.d_model) / self.heads
        kernel = self.maps.kernel
        noise = relative * paired(queries, kernel, kernel)
        size = np.diagonal(kernel, axis1=-2, axis2=-1).mean(-1)
        return Descent(total, noise, relative * (queries.sum((-2, -1)) * size) ** 2)


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple[Response, ...]

    def ascend(self, sensitivity: Array) -> Ascent:
        steps = []
        for part in self.parts:
            steps.append(part.ascend(sensitivity))
            sensitivity = steps[-1].sensitivity
        noise, coherence = steps[0].noise, steps[0].coherence
        for step in steps[1:]:
            noise, coherence = noise + step.noise, coherence * step.coherence
        return Ascent(sensitivity, [step.exposure for step in steps], noise, coherence)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        noise = common = 0.0
        for part, exposed in zip(self.parts[::-1], exposure[::-1], strict=True):
            step = part.descend(sensitivity, exposed)
            sensitivity, noise, common = step.sensitivity, noise + step.noise, common + step.common
        return Descent(sensitivity, noise, common)


def paired(sensitivity: Array, first: Array, second: Array) -> Array:
    """tr(Lambda A Lambda B) of symmetric matrices."""
    one = sensitivity @ first
    other = one if second is first else sensitivity @ second
    return (one * transposed(other)).sum((-2, -1))


def response(
    component: Component, signal: Signal, points: Iterator[Point], unit: Array
) -> tuple[Response, Signal]:
    """The response of a component that `signal` entered, and the signal that left it.

    Args:
        component: a leaf or a chain of them.
        signal: what entered.
        points: the trace from its first site on, of which it takes its own.
        unit: (...,) what gradients are measured in.

    Raises:
        MomentsError: a component of another kind.
    """
    if isinstance(component, Chain):
        parts = []
        for part in component.parts:
            found, signal = response(part, signal, points, unit)
            parts.append(found)
        return Sequence(tuple(parts)), signal
    if isinstance(component, Residual) or not isinstance(component, Leaf):
        raise MomentsError(f"no band of one draw through a {type(component).__name__} in a branch")
    point = next(points)
    assert point.gradient is not None
    received = in_units(point.gradient.kernel.pairs, unit)
    if isinstance(component, SelfAttention):
        return Attending.of(component, signal, received), point.signal
    return Elementwise.of(component, signal, point.gradient, received), point.signal


def in_units(kernel: Array, unit: Array) -> Array:
    """A gradient's kernel in these units; 0 where the unit is."""
    return ratio(kernel, np.asarray(unit)[..., None, None]).astype(SINGLE)


def _ones(gradient: Gradient, kernel: Kernel) -> Gradient:
    """A gradient of covariance 1 everywhere, otherwise as the one given."""
    ones = np.ones(np.broadcast_shapes(gradient.kernel.pairs.shape, kernel.pairs.shape))
    return Gradient(
        Kernel.of_matrix(ones), gradient.seq_len, gradient.orthogonal, gradient.centred_share
    )
