"""Random parameters of one layer: matrices, biases and gains with their declared distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..model.block import Block
from ..model.mixers import ParallelMixer
from ..model.placement import registered_norm_sites
from ..model.streams import AltUp, HyperConnections
from ..model.transformer import Transformer
from .recurrent import DRAWS as RECURRENT
from .recurrent import present

CROSS = "cross_"
ALL = "-all"
"""Suffix of the name of a norm of queries and keys over all heads together."""

BlockDraw = Callable[[Any, Transformer, int, torch.Generator, torch.dtype], dict[str, Tensor]]

BLOCK_DRAWS: dict[type[Block], BlockDraw] = {**RECURRENT}
"""Functions that draw parameters of a block, by class: those that are no matrices of
`Block.shapes`, or have another distribution. Arguments: block, model, layer, generator, dtype."""


def draw_weights(
    model: Transformer, number: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of layer `number` that require gradients; a matrix is (fan_in, fan_out).

    Biases are named after their matrix ("query.bias"), gains and biases of norms after their site
    ("attention.norm.gain").
    """
    assert model.weights is not None
    kind = model.weights.distribution
    shapes = model.shapes_of(number)
    if model.identity_attention:
        del shapes["query"], shapes["key"]
    variances = model.variances_of(number)
    special: dict[str, Tensor] = {}
    for block in (model.mixers[number - 1], model.ffns[number - 1]):
        if block is not None and type(block) in BLOCK_DRAWS:
            special |= BLOCK_DRAWS[type(block)](block, model, number, generator, dtype)
    drawn = special | {
        name: draw(shape, variances[name], generator, dtype, kind)
        for name, shape in shapes.items()
        if name not in special
    }
    if model.biases is not None:
        bias_variances = model.biases.layer(number)
        vector = "normal" if kind == "orthogonal" else kind  # a vector has no orthogonal rows
        for name, (_, width) in shapes.items():
            if name in special or name.removeprefix(CROSS) not in bias_variances:
                continue
            variance = bias_variances[name.removeprefix(CROSS)]
            drawn[f"{name}.bias"] = draw((width,), variance, generator, dtype, vector)
    hybrid = model.placements[number - 1] == "hybrid"  # its norms of heads have no gains
    mixer = model.mixers[number - 1]
    mixed = mixer is not None and not isinstance(mixer, ParallelMixer)
    if not hybrid and not mixed:
        drawn |= qk_gains(model, shapes, generator, dtype)
    for place in ("attention", "cross", "ffn") if model.layer_scale else ():
        start = float(model.by_block("branch_scale")[number - 1][1 if place == "ffn" else 0])
        if place != "cross" or model.encoder is not None:
            full = torch.full((model.d_model,), start, device=generator.device, dtype=dtype)
            drawn[f"{place}.layer_scale"] = full.requires_grad_()
    streams = model.streams
    if isinstance(streams, HyperConnections) and streams.variance:
        shape = (streams.streams * model.d_model, streams.logits)
        for place in present(model, number, ("attention", "ffn")):
            name = f"{place}.streams"
            drawn[name] = draw(shape, streams.variance, generator, dtype)
            drawn[f"{name}.bias"] = draw(shape[1:], 0.0, generator, dtype)
    values = model.value_sources[number - 1]
    if values is not None and values.table:
        shape = model.embedding.vocab_size, shapes["value"][1]
        drawn["value_table"] = draw(shape, values.table_variance, generator, dtype)
    embedding = model.per_layer_embedding
    if embedding is not None:
        shape = model.embedding.vocab_size, embedding.width
        drawn["per_layer_table"] = draw(shape, embedding.table_variance, generator, dtype)
        drawn |= affine(model, "per_layer.context", 1.0, generator.device, dtype, embedding.width)
        drawn |= affine(model, "per_layer.post_norm", 1.0, generator.device, dtype)
        if isinstance(streams, AltUp):
            drawn["per_layer.gain"] = draw((model.d_model,), 0.0, generator, dtype)
    sink = model.attention_sinks[number - 1]
    if sink is not None:
        drawn["attention_sink"] = draw((model.heads,), sink, generator, dtype)
    if model.laurel is not None:
        drawn |= affine(model, "attention.laurel_norm", 1.0, generator.device, dtype)
    for site in norm_sites(model, number):
        gain = model.norm_gains[number - 1][1 if site.startswith("ffn") else 0]
        drawn |= affine(model, site, float(gain), generator.device, dtype)
    return drawn


def qk_gains(
    model: Transformer,
    shapes: dict[str, tuple[int, int]],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Gains of the norms of queries and keys, if there are any."""
    gains: dict[str, Tensor] = {}
    if not model.norm_affine or model.qk_norm is None:
        return gains
    for name in shapes:
        if name.removeprefix(CROSS) in ("query", "key"):
            width = shapes[name][1] if model.qk_norm.endswith(ALL) else model.d_head or 0
            ones = torch.ones(width, device=generator.device, dtype=dtype)
            gains[f"{name}.norm.gain"] = ones.requires_grad_()
    return gains


def draw_shared(
    model: Transformer, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters that all layers share: T5's table of relative biases, (buckets, heads)."""
    if model.relative_bias is None:
        return {}
    shape = (model.relative_bias.buckets, model.heads)
    return {"relative_bias": draw(shape, model.relative_bias.variance, generator, dtype)}


def affine(
    model: Transformer,
    site: str,
    gain: float,
    device: torch.device,
    dtype: torch.dtype,
    width: int | None = None,
) -> dict[str, Tensor]:
    """Learnable gain and bias of the norm at `site`, if the model's norms have them.

    RMSNorm has no bias, Dynamic Tanh always has one. `width` None: d_model.
    """
    if not model.norm_affine:
        return {}
    full = torch.full((width or model.d_model,), gain, device=device, dtype=dtype)
    drawn = {f"{site}.gain": full.requires_grad_()}
    if model.normalization == "dyt" or (model.normalization == "layernorm" and model.norm_bias):
        drawn[f"{site}.bias"] = torch.zeros_like(full, requires_grad=True)
    return drawn


def norm_sites(model: Transformer, number: int) -> tuple[str, ...]:
    """Sites of layer `number`'s norms of the stream and of its blocks' outputs."""
    placement = model.placements[number - 1]
    registered = registered_norm_sites(placement)
    if registered is not None:
        return registered
    if placement == "none":
        return ()
    if placement == "hybrid":
        return ("ffn.norm",)
    if model.parallel and model.parallel_norms == 1:
        return ("attention.norm",)
    blocks = ("attention", "ffn") if model.encoder is None else ("attention", "cross", "ffn")
    names = {"sandwich": ("norm", "post_norm"), "output": ("post_norm",)}.get(placement, ("norm",))
    declared = present(model, number, blocks)
    return tuple(f"{block}.{name}" for block in declared for name in names)


def draw(
    shape: tuple[int, ...],
    variance: float,
    generator: torch.Generator,
    dtype: torch.dtype,
    kind: str = "normal",
) -> Tensor:
    """Entries of mean 0 and the given variance that require gradients, on the generator's device.

    `kind` is one of `moments.model.weights.DISTRIBUTIONS`; "orthogonal" takes two axes.
    """
    entries = torch.empty(shape, device=generator.device, dtype=dtype)
    if kind == "uniform":
        entries.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)
    elif kind == "truncated":
        # By inversion: P(|z| < 2) = erf(sqrt 2), and then z has variance 1 - 4 phi(2) / P.
        inside = math.erf(math.sqrt(2))
        entries.uniform_(-inside, inside, generator=generator).erfinv_().mul_(math.sqrt(2))
        density = math.exp(-2) / math.sqrt(2 * math.pi)
        entries.clamp_(-2, 2).div_(math.sqrt(1 - 4 * density / inside))
    else:
        entries = torch.randn(
            shape, generator=generator, device=generator.device, dtype=dtype, out=entries
        )
    if kind == "orthogonal":
        entries = _orthogonal(entries)
    return entries.mul_(math.sqrt(variance)).requires_grad_()


def _orthogonal(gaussian: Tensor) -> Tensor:
    """A Haar-distributed matrix with entries of variance 1, orthogonal along the shorter side.

    Unit vectors of n entries have entries of variance 1/n; the signs of R's diagonal make the
    factorisation unique, without which Q would not be uniform.
    """
    rows, columns = gaussian.shape
    tall = gaussian if rows >= columns else gaussian.T
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal().sign() * math.sqrt(max(rows, columns))
    return (q if rows >= columns else q.T).contiguous()
