"""What enters layer 1: tables looked up or patches projected, as torch computes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding
from ..model.transformer import Transformer
from .functions import affine_norm
from .network import Watch
from .parameters import affine, draw
from .sampling import dropout


def draw_embedding(
    model: Transformer, segments: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of the model's embedding that require gradients; tables are (rows, d_model).

    Args:
        model: the declaration.
        segments: rows of the segment table.
        generator: of the entries; also says on which device.
        dtype: of the entries.
    """
    embedding, d_model = model.embedding, model.d_model
    drawn: dict[str, Tensor] = {}
    if isinstance(embedding, PatchEmbedding):
        shape = (embedding.patch_width, d_model)
        drawn["patch"] = draw(shape, embedding.patch_variance, generator, dtype)
        if embedding.bias_variance is not None:
            drawn["patch.bias"] = draw((d_model,), embedding.bias_variance, generator, dtype)
        if embedding.class_token:
            drawn["class"] = draw((d_model,), embedding.class_variance, generator, dtype)
        tables = {"position": (model.seq_len, embedding.position_variance)}
    else:
        tables = {
            "token": (embedding.vocab_size, embedding.token_variance),
            "position": (model.seq_len, embedding.position_variance),
            "segment": (segments, embedding.segment_variance),
        }
    for name, (rows, variance) in tables.items():
        if variance > 0:
            drawn[name] = draw((rows, d_model), variance, generator, dtype)
    if isinstance(embedding, Embedding) and embedding.padding_id is not None:
        with torch.no_grad():
            drawn["token"][embedding.padding_id] = 0
    if embedding.norm:
        drawn |= affine(model, "embedding.norm", 1.0, generator.device, dtype)
    return drawn


def run_embedding(
    model: Transformer,
    read: Tensor,
    segment_ids: Tensor | None,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
    documents: Tensor | None = None,
) -> Tensor:
    """The tensor that enters layer 1, (batch, L, d_model).

    Args:
        model: the declaration.
        read: token ids (batch, L), or images (batch, channels, height, width).
        segment_ids: (batch, L); None: all of one segment.
        weights: what `draw_embedding` drew.
        generator: draws the dropout mask.
        watch: is shown every site.
        documents: (batch, L) of packed rows, with each of which positions restart.
    """
    place = None if documents is None else within(documents)
    embedding = model.embedding
    if isinstance(embedding, PatchEmbedding):
        x = _patches(embedding, read, weights)
    else:
        x = functional.embedding(read, weights["token"], padding_idx=embedding.padding_id)
        x = x * embedding.scale if embedding.scale != 1 else x
        if embedding.positions == "sinusoidal":
            table = sinusoids(model.seq_len, model.d_model).to(x.device, x.dtype)
            x = x + (table if place is None else table[place])
        if "segment" in weights:
            ids = torch.zeros_like(read) if segment_ids is None else segment_ids
            x = x + weights["segment"][ids]
    if "position" in weights:
        table = weights["position"]
        x = x + (table if place is None else table[place])
    x = watch(x, "embedding.sum")
    if embedding.norm:
        site = "embedding.norm"
        x = affine_norm(model, x, weights, site, epsilon=embedding.norm_epsilon)
        x = watch(x, site)
    return watch(dropout(x, embedding.dropout, generator), "embedding")


def within(documents: Tensor) -> Tensor:
    """(batch, L) how many tokens of its document stand before each token."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril(-1).sum(-1)


def sinusoids(seq_len: int, d_model: int) -> Tensor:
    """sin and cos of position / 10000^(2k/d_model) in features 2k and 2k + 1, (L, d_model)."""
    features = torch.arange(d_model)
    rate = 10000.0 ** (-(features - features % 2).double() / d_model)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), rate)
    return torch.where(features % 2 == 0, angle.sin(), angle.cos())


def _patches(embedding: PatchEmbedding, pixels: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    size = embedding.patch_size
    # unfold gives (batch, channels * size * size, patches), row by row.
    x = functional.unfold(pixels, size, stride=size).transpose(1, 2) @ weights["patch"]
    if "patch.bias" in weights:
        x = x + weights["patch.bias"]
    if "class" in weights:
        x = torch.cat([weights["class"].expand(len(x), 1, -1), x], 1)
    return x
