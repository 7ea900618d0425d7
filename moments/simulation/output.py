"""Final norm, head, logits and cross-entropy in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import DomainError
from ..layers.head.targets import NO_TARGET
from ..model.embedding import Embedding
from ..model.head import Head
from ..model.transformer import Transformer
from .functions import activation, affine_norm, dropout
from .network import Watch
from .parameters import affine, draw


class Output(NamedTuple):
    """Logits (batch, tokens or 1, vocabulary) and the mean cross-entropy, None without a loss."""

    logits: Tensor
    loss: Tensor | None


def vocabulary(model: Transformer) -> int:
    """Logits per token of a model with a head.

    Raises:
        DomainError: the head has no vocabulary size and there is no token table, or the head is
            tied without a token table.
    """
    head, embedding = model.head, model.embedding
    if head.tied and not isinstance(embedding, Embedding):
        raise DomainError("a tied head needs a token table: declare model.embedding, or tied=False")
    if head.tied:
        return int(embedding.vocab_size)
    size: int | None = head.choices(embedding)
    if size is None:
        raise DomainError("head.vocab_size is missing: there is no token table to take it from")
    return size


def draw_head(
    model: Transformer, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of the model's head that require gradients, without a tied matrix."""
    head, d_model = model.head, model.d_model
    device, drawn = generator.device, draw_final(model, generator.device, dtype)
    width = head.factor_dim or d_model
    if head.factor_variance is not None:
        drawn["head.factor"] = draw((d_model, width), head.factor_variance, generator, dtype)
    if head.transform is not None:
        shape = (d_model, width)
        drawn["head.transform"] = draw(shape, head.transform_variance, generator, dtype)
        if head.transform_bias_variance is not None:
            bias = draw((width,), head.transform_bias_variance, generator, dtype)
            drawn["head.transform.bias"] = bias
    if head.pool_norm or (head.transform is not None and head.transform_norm):
        drawn |= affine(model, "head.norm", 1.0, device, dtype, width)
    size = vocabulary(model)
    if not head.tied:
        drawn["head"] = draw((width, size), head.weight_variance, generator, dtype)
    if head.bias:
        drawn["head.bias"] = torch.zeros(size, device=device, dtype=dtype, requires_grad=True)
    return drawn


def has_final_norm(model: Transformer) -> bool:
    """Whether a norm follows the last layer: as the head declares, else if layers do not end with
    a norm."""
    if model.head is not None:
        return bool(model.head.norm)
    return model.placements[-1] not in ("post", "b2t", "none")


def final_gain(model: Transformer) -> float:
    """Gain of the norm behind the last layer."""
    return 1.0 if model.head is None else float(model.head.norm_gain)


def draw_final(model: Transformer, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Learnable gain and bias of the norm behind the last layer, if there are any."""
    if not has_final_norm(model):
        return {}
    return affine(model, "final.norm", final_gain(model), device, dtype)


def run_final(
    model: Transformer,
    x: Tensor,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
    pool: str | None = None,
) -> Tensor:
    """Final norm, a classifier's pooling, and dropout."""
    if has_final_norm(model):
        x = watch(affine_norm(model, x, weights, "final.norm", final_gain(model)), "final.norm")
    if pool is not None:
        before = getattr(model.embedding, "before", 0)
        tokens = {"first": x[:, :1], "before": x[:, :before], "patches": x[:, before:]}
        x = tokens.get(pool, x).mean(1, keepdim=True)
        if model.head.pool_norm:
            x = watch(affine_norm(model, x, weights, "head.norm"), "head.norm")
    drop_prob = 0.0 if model.head is None else model.head.dropout
    return watch(dropout(x, drop_prob, generator), "final.dropout") if drop_prob else x


def run_head(
    model: Transformer,
    x: Tensor,
    targets: Tensor | None,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
) -> Output:
    """Logits and loss from the last layer's output x, (batch, L, d_model).

    `targets` are (batch, L), or classes (batch,), with -100 for none; None: no loss. `weights` are
    those of `draw_head`, with the token table as "token" if the head is tied.
    """
    head: Head = model.head
    pool = head.pool if head.loss == "classification" else None
    x = run_final(model, x, weights, generator, watch, pool)
    if "head.factor" in weights:
        x = watch(x @ weights["head.factor"], "head.factor")
    if head.transform is not None:
        x = x @ weights["head.transform"]
        if "head.transform.bias" in weights:
            x = x + weights["head.transform.bias"]
        x = watch(activation(head.transform)(x), "head.transform")
        if head.transform_norm:
            x = watch(affine_norm(model, x, weights, "head.norm"), "head.norm")
    logits = head.output_scale * (x @ (weights["token"].T if head.tied else weights["head"]))
    if head.bias:
        logits = logits + weights["head.bias"]
    if head.logit_softcap is not None:
        logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
    logits = watch(logits, "logits")
    if targets is None:
        return Output(logits, None)
    loss = functional.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=NO_TARGET,
        label_smoothing=head.label_smoothing,
    )
    return Output(logits, loss)
