"""One layer of a declared Transformer, as torch computes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DomainError, domain_error, unknown_name
from ..model.block import Block
from ..model.law_block import LawBlock
from ..model.mixers import FeedForward, LatentAttention, LayerAttention
from ..model.per_layer import PerLayerEmbedding
from ..model.streams import AltUp, HyperConnections
from ..model.transformer import Transformer
from .attention import Shared, cross_attention, latent_attention, self_attention
from .functions import activation, affine_norm, dropout, normalise
from .parameters import BLOCK_DRAWS, qk_gains
from .recurrent import TWINS as RECURRENT
from .recurrent import present
from .streams import connection, corrected, entering, leaving, predicted

Watch = Callable[[Tensor, str], Tensor]
"""Takes a tensor and the site it is at; returns the same tensor."""


TWINS: dict[str, Callable[[LayerTwin, Tensor], Tensor]] = {}
"""Registered kinds of layers by name (`moments.model.placement`)."""


class _Matrices:
    """A block's matrices as functions for its twin: `w.gate(x)` multiplies x by "gate"."""

    def __init__(self, layer: LayerTwin) -> None:
        self._layer = layer

    def __getitem__(self, name: str) -> Callable[[Tensor], Tensor]:
        if name not in self._layer.weights:
            raise unknown_name("weight", name, self._layer.weights)
        return lambda x: self._layer.linear(x, name)

    def __getattr__(self, name: str) -> Callable[[Tensor], Tensor]:
        return self[name]


def _by_law(block: LawBlock, layer: LayerTwin, x: Tensor) -> Tensor:
    if block.twin is None:
        raise domain_error(
            "mixer or ffn", block.name, "a block with a twin", "pass moments.block(..., twin=...)"
        )
    y = block.twin(x, _Matrices(layer))
    if not isinstance(y, Tensor) or y.shape != x.shape:
        returned = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise DomainError(
            f"the twin of block {block.name!r} makes {returned} of {tuple(x.shape)}: it returns a "
            "tensor of the shape that it takes"
        )
    return layer.watch(y, block.name)


BLOCK_TWINS: dict[type[Block], Callable[[Any, LayerTwin, Tensor], Tensor]] = {
    LawBlock: _by_law,
    **RECURRENT,
}
"""Functions of blocks (`moments.model.block`) without dropout, by class; their arguments are the
block, its layer and a tensor (batch, L, d_model)."""


@dataclass(frozen=True)
class LayerTwin:
    """A layer with its parameters.

    Attributes:
        model: the declaration.
        number: of the layer, counted from 1.
        weights: parameters from `draw_weights` and `draw_shared`.
        generator: random numbers of the dropout masks.
        watch: called with the tensor at every site.
        memory: the encoder's output (batch, L', its d_model), if there is an encoder.
        documents: (batch, L) document numbers of packed rows; attention stays within a document.
        sources: tensors of earlier layers: a layer's output by its number (0: the stack's input),
            and its exports.
        exports: tensors of this layer, besides its output, that later layers read: "values" of the
            first layer, and ("key", n), ("value", n) and ("shortcut", n) of layer n.
        read: token ids (batch, L).
    """

    model: Transformer
    number: int
    weights: Mapping[str, Tensor]
    generator: torch.Generator
    watch: Watch
    memory: Tensor | None = None
    documents: Tensor | None = None
    sources: Mapping[Any, Tensor] = field(default_factory=dict)
    exports: dict[Any, Tensor] = field(default_factory=dict)
    read: Tensor | None = None

    def run(self, x: Tensor) -> Tensor:
        """The layer's output from its input, (batch, L, d_model).

        Several streams have shape (batch, L, N, d_model) between layers: the first layer copies its
        input to all of them, the last returns their mean.
        """
        if self.model.adds_again:
            keep, added = self.model.additions[self.number - 1]
            addends = [factor * self.sources[point] for point, factor in added.items()]
            x = self.watch(sum(addends, keep * x), "input.mix")
        if isinstance(self.model.streams, HyperConnections):
            return self.several(self.model.streams, x)
        if isinstance(self.model.streams, AltUp):
            return self.alternating(self.model.streams, x)
        twin = TWINS.get(self.model.placements[self.number - 1])
        if twin is not None:
            x = twin(self, x)
        else:
            x = self.parallel(x) if self.model.parallel else self.sequential(x)
        shortcut = self.sources.get(("shortcut", self.number - 1))
        if not getattr(self.model.ffns[self.number - 1], "delayed", True):
            shortcut = self.exports.pop(("shortcut", self.number), None)
        if shortcut is not None:
            x = self.watch(x + shortcut, "ffn.shortcut")
        if self.model.per_layer_embedding is not None:
            x = self.watch(x + self.per_layer(self.model.per_layer_embedding, x), "per_layer.sum")
        return self.watch(x, "stream")

    def rows(self, table: str) -> Tensor:
        """The tokens' rows of a table of this layer."""
        if self.read is None:
            raise DomainError(
                "tables of layers are read by tokens, and here a tensor is described: leave "
                "variance and correlation out, or pass token_ids"
            )
        return self.weights[table][self.read]

    def per_layer(self, embedding: PerLayerEmbedding, x: Tensor) -> Tensor:
        """The output of the block that reads the tokens again."""
        projected = self.linear(self.sources[0], "per_layer_projection")
        projected = self.watch(projected, "per_layer.projection")
        epsilon = self.model.norm_epsilon / embedding.projection_scale**2
        site = "per_layer.context"
        context = affine_norm(self.model, projected, self.weights, site, epsilon=epsilon)
        rows = embedding.scale * self.rows("per_layer_table")
        read = (self.watch(context, site) + rows) / math.sqrt(2)
        gate = self.watch(self.linear(x, "per_layer_gate"), "per_layer.gate")
        gate = self.watch(activation(self.model.activation)(gate), "per_layer.activation")
        z = self.watch(gate * read, "per_layer.product")
        z = self.watch(self.linear(z, "per_layer_output"), "per_layer.out")
        return self.norm(z, "per_layer.post_norm")

    def sequential(self, x: Tensor) -> Tensor:
        """Blocks in sequence, each with its own residual sum."""
        placement = self.model.placements[self.number - 1]
        layer_input = x
        blocks = ("attention", "ffn") if self.memory is None else ("attention", "cross", "ffn")
        for block in present(self.model, self.number, blocks):
            if placement == "hybrid" and block == "ffn":
                x = self.norm(x, "ffn.norm")
            z = n = self.norm(x, f"{block}.norm") if placement in ("pre", "sandwich") else x
            z = self.block(z, block)
            if placement in ("sandwich", "output"):
                z = self.norm(z, f"{block}.post_norm")
            if block == "attention" and self.model.laurel is not None:
                low_rank = self.linear(self.linear(n, "laurel_down"), "laurel_up")
                z = z + n + self.norm(low_rank, "attention.laurel_norm")
            z = self.scaled(z, "after-block", f"{block}.scale")
            skip, branch = self.scales(block)
            gains = self.weights.get(f"{block}.layer_scale")
            x = self.watch(skip * x + (branch if gains is None else gains) * z, f"{block}.sum")
            if placement == "b2t" and block == "ffn":
                x = self.watch(x + layer_input, "ffn.bottom_to_top")
            x = self.scaled(x, "after-residual", f"{block}.sum_scale")
            if placement in ("post", "b2t"):
                x = self.norm(x, f"{block}.norm")
        return x

    def several(self, streams: HyperConnections, x: Tensor) -> Tensor:
        """Blocks in sequence, each connected to all streams; sites are of the streams' mean."""
        x = x if x.ndim == 4 else x.unsqueeze(-2).expand(-1, -1, streams.streams, -1)
        for place, block in enumerate(present(self.model, self.number, ("attention", "ffn"))):
            read, write, mix = connection(streams, self, x, block, place)
            z = self.norm((read.unsqueeze(-1) * x).sum(-2), f"{block}.norm")
            z = self.block(z, block)
            if self.model.placements[self.number - 1] == "sandwich":
                z = self.norm(z, f"{block}.post_norm")
            z = self.scaled(z, "after-block", f"{block}.scale")
            gains = self.weights.get(f"{block}.layer_scale")
            z = (self.scales(block)[1] if gains is None else gains) * z
            x = mix.transpose(-1, -2) @ x + write.unsqueeze(-1) * z.unsqueeze(-2)
            x = self._watched_mean(x, f"{block}.sum")
        x = self._watched_mean(x, "stream")
        return x.mean(-2) if self.number == self.model.layers else x

    def alternating(self, streams: AltUp, x: Tensor) -> Tensor:
        """A layer of the first stream between its prediction and the correction of all."""
        if self.number == 1:
            x = entering(streams, self.weights["streams.in"], x)
        x = predicted(self, x)
        first, last = x[..., 0, :], self.number == self.model.layers
        y = self.parallel(first) if self.model.parallel else self.sequential(first)
        x = corrected(self, x, y if last else self.watch(y, "stream"))
        if self.model.per_layer_embedding is not None:
            first = self.weights["per_layer.gain"] * x[..., 0, :]
            added = self.per_layer(self.model.per_layer_embedding, first).unsqueeze(-2)
            x = torch.cat([x[..., :1, :], x[..., 1:, :] + added], -2)
        if not last:
            return x
        return self.watch(leaving(streams, self.weights["streams.out"], x), "stream")

    def _watched_mean(self, x: Tensor, site: str) -> Tensor:
        mean = self.watch(x.mean(-2), site).unsqueeze(-2)
        return mean + (x - x.mean(-2, keepdim=True))

    def parallel(self, x: Tensor) -> Tensor:
        """Attention and feed-forward blocks that read the same stream and share a residual sum."""
        inputs: dict[str, Tensor] = {}
        for block in ("attention", "ffn"):
            if self.model.placements[self.number - 1] == "none":
                inputs[block] = x
            elif block == "attention" or self.model.parallel_norms == 2:
                inputs[block] = self.norm(x, f"{block}.norm")
            else:
                inputs[block] = inputs["attention"]
        branches = [self.scales(name)[1] * self.block(z, name) for name, z in inputs.items()]
        z = self.scaled(branches[0] + branches[1], "after-block", "ffn.scale")
        x = self.watch(self.scales("ffn")[0] * x + z, "ffn.sum")
        return self.scaled(x, "after-residual", "ffn.sum_scale")

    def block(self, z: Tensor, block: str) -> Tensor:
        """A block's output behind its dropout."""
        model, place = self.model, self.number - 1
        blocks = {"attention": model.mixers, "ffn": model.ffns}
        declared = blocks[block][place] if block in blocks else None
        if declared is not None:
            z = BLOCK_TWINS[type(declared)](declared, self, z)
        else:
            z = {"attention": self.attention, "cross": self.cross, "ffn": self.ffn}[block](z)
        drop_prob = self.model.ffn_dropout if block == "ffn" else self.model.dropout
        return self.watch(dropout(z, drop_prob or 0.0, self.generator), f"{block}.dropout")

    def attention(
        self, z: Tensor, value_norm: bool = False, shared: Shared = lambda make: make()
    ) -> Tensor:
        table = self.weights.get("relative_bias")
        heads = self_attention(
            self.model,
            self.number,
            z,
            self.linear,
            table,
            self.generator,
            self.documents,
            self.weights,
            value_norm,
            self._mixed,
            shared,
        )
        heads = self.watch(heads, "attention.heads")
        if self.model.attention_gate is not None:
            gates = self.watch(self.linear(z, "attention_gate"), "attention.gate")
            gates = self.watch(torch.sigmoid(gates), "attention.gates")
            repeats = heads.shape[-1] // gates.shape[-1]
            heads = self.watch(heads * gates.repeat_interleave(repeats, -1), "attention.gated")
        return self.watch(self.linear(heads, "output"), "attention.projection")

    def _mixed(self, z: Tensor, value: Tensor) -> Tensor:
        """Values (batch, L, features), mixed with the first layer's and a table's if declared."""
        if self.number == 1 and self.model.reads_first:
            self.exports["values"] = value
        weights = self.model.value_sources[self.number - 1]
        if weights is None:
            return value
        result = weights.own * value
        if weights.first:
            result = result + weights.first * self.sources.get("values", value)
        if weights.table:
            rows = self.rows("value_table")
            if weights.gate is not None:
                gates = torch.sigmoid(self.linear(z[..., : weights.gate], "value_gate"))
                rows = rows * gates.repeat_interleave(rows.shape[-1] // gates.shape[-1], -1)
            result = result + weights.table * rows
        return result

    def cross(self, z: Tensor) -> Tensor:
        assert self.memory is not None
        heads = cross_attention(
            self.model, self.number, z, self.memory, self.linear, self.generator, self.weights
        )
        heads = self.watch(heads, "cross.heads")
        return self.watch(self.linear(heads, "cross_output"), "cross.projection")

    def ffn(self, z: Tensor, sparsity: float | None = None) -> Tensor:
        model = self.model
        hidden = self.watch(self.linear(z, "ffn_in"), "ffn.in")
        act = activation(model.activation)
        if model.gated:
            gate = self.watch(self.linear(z, "gate"), "ffn.gate")
            if sparsity:
                deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
                gate = torch.relu(gate - mean - NormalDist().inv_cdf(sparsity) * deviation)
            hidden = act(gate) * hidden
        else:
            hidden = act(hidden)
        hidden = self.watch(hidden, "ffn.activation")
        if model.activation_dropout:
            hidden = dropout(hidden, model.activation_dropout, self.generator)
            hidden = self.watch(hidden, "ffn.activation_dropout")
        return self.watch(self.linear(hidden, "ffn_out"), "ffn.out")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x times a matrix, plus its bias if there is one."""
        y = x @ self.weights[name]
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: Tensor, site: str) -> Tensor:
        """The model's norm with gain and bias, and LayerNorm Scaling before or after it."""
        model, (block, _, name) = self.model, site.partition(".")
        if name == "norm":
            x = self.scaled(x, "before-norm", f"{site}_scale")
        gain = _column(model.norm_gains[self.number - 1], block)
        z = self.watch(affine_norm(model, x, self.weights, site, gain), site)
        if name == "norm":
            only = "ffn-only" if block == "ffn" else "attention-only"
            z = self.scaled(z, "after-norm", f"{site}_scale")
            z = self.scaled(z, only, f"{site}_scale")
        return z

    def scaled(self, x: Tensor, where: str, site: str) -> Tensor:
        """x / sqrt(layer number) if LayerNorm Scaling has this position."""
        position = self.model.layernorm_scaling
        if position is True:
            position = "after-norm"
        if position != where or self.number == 1:
            return x
        return self.watch(x / math.sqrt(self.number), site)

    def scales(self, block: str) -> tuple[float, float]:
        """Scales of the skip connection and of the block's output."""
        skip = self.model.by_block("skip_scale")[self.number - 1]
        branch = self.model.by_block("branch_scale")[self.number - 1]
        return _column(skip, block), _column(branch, block)


def _latent(block: LatentAttention, layer: LayerTwin, z: Tensor) -> Tensor:
    def normed(x: Tensor, site: str) -> Tensor:
        x = normalise(x, "rmsnorm", block.norm_epsilon)
        gain = layer.weights.get(f"{site}.gain")
        return x if gain is None else x * gain

    x = z
    if block.query_rank is not None:
        x = normed(layer.linear(z, "query_down"), "attention.query_latent")
    latent, shared = layer.linear(z, "kv_down").split([block.kv_rank, block.rope_dim], -1)
    latent = block.kv_factor * normed(latent, "attention.kv_latent")
    heads = latent_attention(
        layer.model,
        layer.number,
        block.query_factor * layer.linear(x, "query"),
        layer.linear(latent, "key"),
        shared,
        layer.linear(latent, "value"),
        layer.generator,
        layer.documents,
    )
    heads = layer.watch(heads, "attention.heads")
    return layer.watch(layer.linear(heads, "output"), "attention.projection")


def _latent_gains(
    block: LatentAttention,
    model: Transformer,
    number: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    ranks = {"attention.query_latent": block.query_rank, "attention.kv_latent": block.kv_rank}
    return {
        f"{site}.gain": torch.ones(rank, device=generator.device, dtype=dtype, requires_grad=True)
        for site, rank in ranks.items()
        if rank and model.norm_affine
    }


def _layer_attention(block: LayerAttention, layer: LayerTwin, z: Tensor) -> Tensor:
    applied = dataclasses.replace(layer, model=block.applied(layer.model))

    def shared(make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if block.keys_of is not None:
            return layer.sources["key", block.keys_of], layer.sources["value", block.keys_of]
        key, value = make()
        if layer.number in layer.model.read_again:
            layer.exports["key", layer.number], layer.exports["value", layer.number] = key, value
        return key, value

    return applied.attention(z, block.value_norm, shared)


def _layer_gains(
    block: LayerAttention,
    model: Transformer,
    number: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    return qk_gains(block.applied(model), block.shapes(model), generator, dtype)


BLOCK_TWINS[FeedForward] = lambda block, layer, z: layer.ffn(z, block.sparsity)
BLOCK_TWINS[LayerAttention], BLOCK_DRAWS[LayerAttention] = _layer_attention, _layer_gains
BLOCK_TWINS[LatentAttention], BLOCK_DRAWS[LatentAttention] = _latent, _latent_gains


def _column(pair: np.ndarray, block: str) -> float:
    """A block's entry of (attention, feed-forward); cross-attention has that of attention."""
    return float(pair[1 if block == "ffn" else 0])
