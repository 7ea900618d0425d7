"""Latent attention: attention of one set of latent tokens to another, both made of the same.

Queries ask from N(W x) of r_q features, keys and values stand in N(W' x) of r features, and every
head's keys have a part in common that is linear in x. Kernels of all three are those of the tokens,
to 1/rank. The shared part is taken on the kernel of the latents, and the two parts of the keys'
gradient in proportion to their shares in the logits: positions turn one of them alone. See
docs/theory/latent_attention.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.composition import Leaf, Pullback, Pulled, weights_of
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap
from ...engine.response import Around, Response
from ...engine.state import Array, Gradient, Kernel, Signal, Values
from ...engine.trace import Record
from ...formulas.linear import LINEAR
from ...formulas.normalization import RMSNORM
from ...model.mixers import LatentAttention
from ...model.positions import Rotary
from ..elementary import Linear
from ..normalization import FiniteNormalization
from .response import AttentionSublayer, through_attention
from .self_attention import AttentionPullback, SelfAttention, attended, mean_size

QUERY_LATENT, KV_LATENT = "attention.query_latent", "attention.kv_latent"


@dataclass(frozen=True)
class _PartTurned:
    """Rotary positions that turn the part of a key that all heads share.

    Attributes:
        rotary: on the features of that part.
        width: how many these are.
        share: of that part in the logits' variance.
    """

    rotary: Rotary
    width: int
    share: float
    grid: None = None

    def frequencies(self, d_head: int) -> tuple[Array, Array]:
        """As of `Rotary`: the rest of the features does not turn."""
        speeds, shares = self.rotary.frequencies(self.width)
        return np.append(0.0, speeds), np.append(1.0 - self.share, self.share * shares)


@dataclass(frozen=True)
class _Core(SelfAttention):
    """Attention of latents to latents.

    Attributes:
        attended_width: features of those attended to.
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
class LatentHeads(Leaf):
    """The concatenated heads of latent attention.

    Attributes:
        attention: heads, mask, positions and temperature; `query`, `key` and `value` are variances
            of the matrices behind the latents, and `d_model` the tokens' width.
        block: ranks, widths of a head's parts, and the other matrices' variances.
        affine: whether the latents' norms have gains that receive gradients.
    """

    attention: SelfAttention
    block: LatentAttention
    affine: bool = False

    mixes_tokens = True

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.attention.label

    @property
    def padding(self) -> Any:
        return self.attention.padding

    @property
    def matrices(self) -> tuple[str, ...]:
        return ("value",)

    def with_variances(self, names: tuple[str, ...], factor: float) -> LatentHeads:
        return replace(self, attention=self.attention.with_variances(names, factor))

    def unplaced(self) -> LatentHeads:
        return replace(self, attention=self.attention.unplaced())

    # --- what is made of the tokens --------------------------------------------------------------

    def _latent(self, weight: str, label: str, rank: Any, factor: float) -> tuple[Any, Any]:
        block, width = self.block, self.attention.d_model
        variance = block.down_variances[weight]
        parameters = {"fan_in": width, "fan_out": rank, "weight_variance": variance}
        down = Linear(LINEAR, "refined", weight, parameters, rank, weight)
        epsilon = block.norm_epsilon
        norm = FiniteNormalization(
            RMSNORM, label, epsilon, centres=False, gain=factor, affine=self.affine
        )
        return down, norm

    def _shares(self, size: float) -> tuple[float, float]:
        """Variance of a key's entry, averaged over both parts, and the shared one's part of it, of
        tokens of that size."""
        block, leaf = self.block, self.attention
        diagonal = block.nope_dim * block.kv_rank * float(leaf.key) * block.kv_factor**2
        shared = block.rope_dim * float(leaf.d_model) * block.kv_down * size
        total = diagonal + shared
        return total / float(leaf.d_head), shared / total if total > 0.0 else 0.0

    def core(self, size: float) -> _Core:
        """Attention of latents to latents, behind tokens of that size."""
        block, leaf = self.block, self.attention
        entry, share = self._shares(size)
        rotary: Any = leaf.rotary
        if rotary is not None:
            rotary = _PartTurned(rotary, block.rope_dim, share)
        given = {name: getattr(leaf, name) for name in _AS_THEY_ARE}
        unit = block.kv_factor**2
        return _Core(
            leaf.label,
            block.query_rank or leaf.d_model,
            query=leaf.query,
            key=entry / (block.kv_rank * unit),
            rotary=rotary,
            attended_width=block.kv_rank,
            value_dim=block.value_dim,
            **given,
        )

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        block = self.block
        queries, asks = signal, []
        if block.query_rank is not None:
            for part in self._latent(
                "query_down", QUERY_LATENT, block.query_rank, block.query_factor
            ):
                queries, back = part.forward(queries)
                asks.append(back)
        latent, stands = signal, []
        for part in self._latent("kv_down", KV_LATENT, block.kv_rank, block.kv_factor):
            latent, back = part.forward(latent)
            stands.append(back)
        core = self.core(mean_size(signal))
        if block.query_rank is None and block.query_factor != 1.0:
            core = replace(core, query=core.query * block.query_factor**2)
        if not signal.resolved:
            core._check_alike(signal.seq_len)
        way = attended(core, queries, latent)
        return way.output, functools.partial(self._back, signal, way, tuple(asks), tuple(stands))

    def _back(
        self,
        signal: Signal,
        way: AttentionPullback,
        asks: tuple[Pullback, ...],
        stands: tuple[Pullback, ...],
        gradient: Gradient,
    ) -> Pulled:
        """The way back, around `signal`: through attention, and through what made the latents."""
        block, length, parts = self.block, gradient.seq_len, list[Pulled]()
        query, key, sides = way._sent(gradient.kernel)
        _, share = self._shares(mean_size(signal))
        total = _down(asks, query, length, parts)
        rest = sides.value + sides.cross + key.scaled(1.0 - share)
        total = total + _down(stands, rest, length, parts)
        # of the parts that all heads share, per feature of theirs: gradient's kernel at tokens that
        # these would be made of with matrices of unit gain
        shared = key.scaled(share * block.kv_rank * block.kv_factor**2)
        total = total + shared.scaled(1.0 / (float(self.attention.d_model) * mean_size(signal)))
        return Pulled(
            Gradient(total, length),
            functools.partial(self._weights, signal, way, (gradient.kernel, sides), shared, parts),
            response=functools.partial(_response, way, asks),
        )

    def _weights(
        self,
        signal: Signal,
        way: AttentionPullback,
        given: tuple[Kernel, Any],
        shared: Kernel,
        parts: list[Pulled],
    ) -> Values:
        """Of the gradient's kernel at the heads and attention's paths, and of norms and matrices
        before the latents."""
        block = self.block
        result = dict(way.weights(*given))
        # The matrix of the keys' own part has nope_dim of d_head features, and its own variance.
        result["key"] = result["key"] * (block.nope_dim / (block.nope_dim + block.rope_dim))
        result |= weights_of(*parts)
        for name, factor in ((QUERY_LATENT, block.query_factor), (KV_LATENT, block.kv_factor)):
            if f"{name}.gain" in result:
                result[f"{name}.gain"] = result[f"{name}.gain"] * factor**2
        if block.rope_dim:
            tokens = signal.second_moment()
            if self.attention.rotary is None:
                tokens = tokens.without_common()
            total = (tokens * shared).total(signal.seq_len)
            result["kv_down"] += total / max(block.kv_down * mean_size(signal), 1e-300)
        return result

    # --- one draw of it --------------------------------------------------------------------------

    def _alone(self, signal: Signal) -> SelfAttention:
        """Attention to the tokens with the same logits and values: latents of many features."""
        size, block, leaf = mean_size(signal), self.block, self.attention
        core, width = self.core(size), float(leaf.d_model)
        asked = core.d_model * core.query * block.query_factor**2
        if block.query_rank is not None:
            asked = asked / size
        unit = block.kv_rank * block.kv_factor**2 / size
        return replace(
            leaf,
            d_head=block.value_dim,
            query=asked / width,
            key=core.key * unit / width,
            value=float(leaf.value) * unit / width,
            rotary=None,
        )

    def response(self, record: Record, around: Around) -> Response:
        signal = record.input
        return AttentionSublayer.of(self._alone(signal), signal, around.grad_out(record))

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return through_attention(self._alone(record.input), record, at, walk)


_AS_THEY_ARE = (
    *("heads", "d_head", "value", "drop_prob", "temperature", "causal", "padding"),
    *("window", "sequences"),
)


def _down(ways: tuple[Pullback, ...], kernel: Kernel, length: int, parts: list[Pulled]) -> Kernel:
    """What returns to the tokens of a gradient at a latent."""
    gradient = Gradient(kernel, length)
    for way in reversed(ways):
        parts.append(way(gradient))
        gradient = parts[-1].gradient
    return gradient.kernel


def _response(way: AttentionPullback, asks: tuple[Pullback, ...]) -> Kernel:
    return _down(asks, way.response(), way.signal.seq_len, [])
