"""One layer and one embedding of a declared Transformer, as torch computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional

from moments.embedding import Embedding
from moments.errors import domain_error
from moments.simulation.sampling import dropout
from moments.transformer import Transformer

Watch = Callable[[Tensor, str], Tensor]
"""Takes a tensor and the site it is at; returns the same tensor."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}


def _rmsnorm(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _layernorm(x: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=epsilon)


NORMALIZATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "layernorm": _layernorm,
    "rmsnorm": _rmsnorm,
}
PLACEMENTS = ("pre", "post", "none")


def check_supported(model: Transformer) -> None:
    """Raise a DomainError where the twin lacks something the declaration has."""
    for name, known in (
        ("activation", tuple(ACTIVATIONS)),
        ("normalization", tuple(NORMALIZATIONS)),
        ("norm", PLACEMENTS),
    ):
        value = getattr(model, name)
        if value not in known:
            raise domain_error(name, value, f"one of {', '.join(known)} in a simulation")


def draw_weights(
    model: Transformer, number: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gaussian matrices of layer `number`, each (fan_in, fan_out), that require gradients."""
    inner, d_ff = model.heads * _d_head(model), model.d_ff or 0
    shapes = {
        "query": (model.d_model, inner),
        "key": (model.d_model, inner),
        "value": (model.d_model, inner),
        "output": (inner, model.d_model),
        "ffn_in": (model.d_model, d_ff),
        "ffn_out": (d_ff, model.d_model),
    }
    variances = asdict(model.layer_weights(number))
    return {
        name: _normal(shape, variances[name], generator, dtype) for name, shape in shapes.items()
    }


def run_layer(
    model: Transformer,
    number: int,
    x: Tensor,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    """Carry `x` (batch, L, d_model) through layer `number`; `generator` draws the dropout masks."""
    skip = float(model.skip_scales[number - 1])
    branch = float(model.branch_scales[number - 1])

    def normalised(z: Tensor, block: str) -> Tensor:
        z = watch(NORMALIZATIONS[model.normalization](z, model.norm_epsilon), f"{block}.norm")
        scale = float(model.norm_scales[number - 1])
        return z if scale == 1 else watch(z * scale, f"{block}.norm_scale")

    for block, compute in (("attention", _attention), ("ffn", _ffn)):
        z = normalised(x, block) if model.norm == "pre" else x
        z = compute(model, number, z, weights, generator, watch)
        z = watch(dropout(z, model.dropout, generator), f"{block}.dropout")
        x = watch(skip * x + branch * z, f"{block}.sum")
        if model.norm == "post":
            x = normalised(x, block)
    return watch(x, "stream")


def _attention(
    model: Transformer,
    number: int,
    x: Tensor,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    batch, seq_len, _ = x.shape
    d_head = _d_head(model)

    def by_head(name: str) -> Tensor:
        projected = x @ weights[name]
        return projected.view(batch, seq_len, model.heads, d_head).transpose(1, 2)

    logits = by_head("query") @ by_head("key").transpose(-1, -2)
    logits = logits / (math.sqrt(d_head) * float(model.temperatures[number - 1]))
    if model.causal:
        later = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).triu(1)
        logits = logits.masked_fill(later, -math.inf)
    mixing = dropout(logits.softmax(-1), model.attention_dropout or 0.0, generator)
    heads = (mixing @ by_head("value")).transpose(1, 2).reshape(batch, seq_len, -1)
    return watch(watch(heads, "attention.heads") @ weights["output"], "attention.projection")


def _d_head(model: Transformer) -> int:
    return model.d_head or 0  # None only before the declaration resolves it


def _ffn(
    model: Transformer,
    number: int,
    x: Tensor,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    hidden = watch(x @ weights["ffn_in"], "ffn.in")
    active = watch(ACTIVATIONS[model.activation](hidden), "ffn.activation")
    return watch(active @ weights["ffn_out"], "ffn.out")


def draw_tables(
    embedding: Embedding,
    seq_len: int,
    d_model: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Gaussian embedding tables, each (rows, d_model), that require gradients."""
    rows = {
        "token": (embedding.vocab_size, embedding.token_variance),
        "position": (seq_len, embedding.position_variance),
        "segment": (1, embedding.segment_variance),
    }
    return {
        name: _normal((count, d_model), variance, generator, dtype)
        for name, (count, variance) in rows.items()
        if variance > 0
    }


def run_embedding(
    embedding: Embedding,
    token_ids: Tensor,
    tables: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    """The tensor that enters layer 1, (batch, L, d_model), for ids (batch, L) of one segment."""
    x = tables["token"][token_ids]
    if "position" in tables:
        x = x + tables["position"]
    if "segment" in tables:
        x = x + tables["segment"][0]
    x = watch(x, "embedding.sum")
    if embedding.norm:
        x = watch(_layernorm(x, embedding.norm_epsilon), "embedding.norm")
    return watch(dropout(x, embedding.dropout, generator), "embedding")


def _normal(
    shape: tuple[int, int], variance: float, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    return drawn.mul_(math.sqrt(variance)).requires_grad_()
