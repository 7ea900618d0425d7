"""Latent attention: queries, keys and values from low-rank latents of the tokens.

Queries are made of N(W x) with r_q features, keys and values of N(W' x) with r features, and the
keys of all heads share a part that is linear in x and has the rotary positions. The kernels of all
three are those of the tokens, up to 1/rank; the shared part is given the kernel of the latents, and
the keys' gradient is split between both parts by their shares in the logits. See
docs/theory/latent_attention.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...engine.composition import Leaf, Pullback, PullbackResult, weights_of
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap
from ...engine.response import GradientUnits, Response
from ...engine.state import Array, Gradient, Kernel, Signal, Values
from ...engine.trace import Record
from ...formulas.linear import LINEAR
from ...formulas.normalization import RMSNORM
from ...model.mixers import LatentAttention
from ...model.positions import Rotary
from ..elementary import Linear
from ..normalization import FiniteNormalization
from .response import AttentionSublayer, through_attention
from .self_attention import AroundHeads, AttentionPullback, SelfAttention, attended, mean_size

QUERY_LATENT, KV_LATENT = "attention.query_latent", "attention.kv_latent"


@dataclass(frozen=True)
class _SharedRotary:
    """Rotary positions of the part of the keys that all heads share.

    Attributes:
        rotary: on the features of that part.
        width: number of these features.
        share: of that part in the logits' variance.
    """

    rotary: Rotary
    width: int
    share: float
    grid: None = None

    def frequencies(self, d_head: int) -> tuple[Array, Array]:
        """As in `Rotary`; other features have frequency 0."""
        speeds, shares = self.rotary.frequencies(self.width)
        return np.append(0.0, speeds), np.append(1.0 - self.share, self.share * shares)


@dataclass(frozen=True)
class _Core(SelfAttention):
    """Attention from the queries' latents to the keys' latents.

    Attributes:
        attended_width: features of the latter.
        value_dim: features of a head's values.
    """

    attended_width: Any = None
    value_dim: Any = None

    @property
    def memory_width(self) -> Any:
        return self.attended_width

    @property
    def value_width(self) -> Any:
        return self.heads * self.value_dim


@dataclass(frozen=True)
class LatentHeads(AroundHeads, Leaf):
    """The concatenated heads of latent attention.

    Attributes:
        heads: with mask, positions and temperature; `query`, `key` and `value` are variances of the
            matrices after the latents, `d_model` is the tokens' width.
        block: ranks, widths of a head's parts, and variances of the other matrices.
        affine: whether the norms of the latents have gains that receive gradients.
    """

    heads: SelfAttention
    block: LatentAttention
    affine: bool = False

    @property
    def matrices(self) -> tuple[str, ...]:
        return ("value",)

    def with_variances(self, names: tuple[str, ...], factor: float) -> LatentHeads:
        return replace(self, heads=self.heads.with_variances(names, factor))

    def _latent(self, weight: str, label: str, rank: Any, factor: float) -> tuple[Any, Any]:
        """The matrix to a latent, and its norm."""
        block, width = self.block, self.heads.d_model
        variance = block.down_variances[weight]
        parameters = {"fan_in": width, "fan_out": rank, "weight_variance": variance}
        down = Linear(LINEAR, "refined", weight, parameters, rank, weight)
        epsilon = block.norm_epsilon
        norm = FiniteNormalization(
            RMSNORM, label, epsilon, centres=False, gain=factor, affine=self.affine
        )
        return down, norm

    def _shares(self, size: float) -> tuple[float, float]:
        """Variance of a key's entry, averaged over both parts, and the shared part's fraction of
        it, for tokens of second moment `size`."""
        block, leaf = self.block, self.heads
        diagonal = block.nope_dim * block.kv_rank * float(leaf.key) * block.kv_factor**2
        shared = block.rope_dim * float(leaf.d_model) * block.kv_down * size
        total = diagonal + shared
        return total / float(leaf.d_head), shared / total if total > 0.0 else 0.0

    def core(self, size: float) -> _Core:
        """Attention between the latents of tokens of second moment `size`."""
        block, leaf = self.block, self.heads
        entry, share = self._shares(size)
        rotary: Any = leaf.rotary
        if rotary is not None:
            rotary = _SharedRotary(rotary, block.rope_dim, share)
        changes = {
            "d_model": block.query_rank or leaf.d_model,
            "key": entry / (block.kv_rank * block.kv_factor**2),
            "rotary": rotary,
            "attended_width": block.kv_rank,
            "value_dim": block.value_dim,
        }
        return _Core(**{f.name: getattr(leaf, f.name) for f in fields(leaf)} | changes)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        block = self.block
        queries, query_maps = signal, []
        if block.query_rank is not None:
            for part in self._latent(
                "query_down", QUERY_LATENT, block.query_rank, block.query_factor
            ):
                queries, back = part.forward(queries)
                query_maps.append(back)
        latent, key_maps = signal, []
        for part in self._latent("kv_down", KV_LATENT, block.kv_rank, block.kv_factor):
            latent, back = part.forward(latent)
            key_maps.append(back)
        core = self.core(mean_size(signal))
        if block.query_rank is None and block.query_factor != 1.0:
            core = replace(core, query=core.query * block.query_factor**2)
        pullback = attended(core, queries, latent)
        maps = tuple(query_maps), tuple(key_maps)
        return pullback.output, functools.partial(self._back, signal, pullback, *maps)

    def _back(
        self,
        signal: Signal,
        attention: AttentionPullback,
        query_maps: tuple[Pullback, ...],
        key_maps: tuple[Pullback, ...],
        gradient: Gradient,
    ) -> PullbackResult:
        """Gradient at `signal`, through attention and both latents."""
        block, length, parts = self.block, gradient.seq_len, list[PullbackResult]()
        query, key, sides = attention._paths(gradient.kernel)
        _, share = self._shares(mean_size(signal))
        total = _down(query_maps, query, length, parts)
        rest = sides.value + sides.cross + key.scaled(1.0 - share)
        total = total + _down(key_maps, rest, length, parts)
        # gradient's kernel per feature at the keys' shared part, for a matrix of unit gain
        shared = key.scaled(share * block.kv_rank * block.kv_factor**2)
        total = total + shared.scaled(1.0 / (float(self.heads.d_model) * mean_size(signal)))
        return PullbackResult(
            Gradient(total, length),
            functools.partial(
                self._weights, signal, attention, (gradient.kernel, sides), shared, parts
            ),
            response=functools.partial(_response, attention, query_maps),
        )

    def _weights(
        self,
        signal: Signal,
        attention: AttentionPullback,
        paths: tuple[Kernel, Any],
        shared: Kernel,
        parts: list[PullbackResult],
    ) -> Values:
        """Squared gradient norms, from the gradient's kernel at the heads with attention's paths,
        and from the pullbacks `parts` through the latents."""
        block = self.block
        result = dict(attention.weights(*paths))
        # The matrix of the keys without positions has nope_dim of d_head features.
        result["key"] = result["key"] * (block.nope_dim / (block.nope_dim + block.rope_dim))
        result |= weights_of(*parts)
        for name, factor in ((QUERY_LATENT, block.query_factor), (KV_LATENT, block.kv_factor)):
            if f"{name}.gain" in result:
                result[f"{name}.gain"] = result[f"{name}.gain"] * factor**2
        if block.rope_dim:
            tokens = signal.second_moment()
            if self.heads.rotary is None:
                tokens = tokens.without_common()
            total = (tokens * shared).total(signal.seq_len)
            result["kv_down"] += total / max(block.kv_down * mean_size(signal), 1e-300)
        return result

    def _without_latents(self, signal: Signal) -> SelfAttention:
        """Self-attention with the same logits and values: the limit of large ranks."""
        size, block, leaf = mean_size(signal), self.block, self.heads
        core, width = self.core(size), float(leaf.d_model)
        query_gain = core.d_model * core.query * block.query_factor**2
        if block.query_rank is not None:
            query_gain = query_gain / size
        unit = block.kv_rank * block.kv_factor**2 / size
        return replace(
            leaf,
            d_head=block.value_dim,
            query=query_gain / width,
            key=core.key * unit / width,
            value=float(leaf.value) * unit / width,
            rotary=None,
        )

    def response(self, record: Record, around: GradientUnits) -> Response:
        signal = record.input
        return AttentionSublayer.of(self._without_latents(signal), signal, around.grad_out(record))

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return through_attention(self._without_latents(record.input), record, at, walk)


def _down(
    maps: tuple[Pullback, ...], kernel: Kernel, length: int, parts: list[PullbackResult]
) -> Kernel:
    """Gradient at the tokens from that at a latent; appends every pullback's result to `parts`."""
    gradient = Gradient(kernel, length)
    for pullback in reversed(maps):
        parts.append(pullback(gradient))
        gradient = parts[-1].gradient
    return gradient.kernel


def _response(attention: AttentionPullback, query_maps: tuple[Pullback, ...]) -> Kernel:
    return _down(query_maps, attention.response(), attention.signal.seq_len, [])
