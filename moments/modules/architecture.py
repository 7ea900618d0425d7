"""The architecture that a torch module declares by itself, with its framework's initialisation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from moments.errors import DomainError, ValidityWarning
from moments.hook_points import layers_of, stacks_of
from moments.huggingface import from_huggingface
from moments.modules.expectation import model_of
from moments.modules.structure import ENCODER
from moments.optional import optional
from moments.transformer import Transformer
from moments.weights import Weights

with optional("torch", "torch"):
    from torch import nn

SEQ_LEN = 128
"""Tokens assumed where a module does not limit them."""

_ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


def resolve(
    module: nn.Module,
    plan: Any,
    names: Mapping[str, str] | None,
    architecture: Transformer | None,
) -> tuple[Transformer, Transformer | None]:
    """The model that a plan means for a module, and the module's own architecture where known.

    Raises:
        DomainError: no plan, or a scheme for a module whose architecture is not known.
    """
    described = architecture
    if described is None and names is None:
        try:
            described = architecture_of(module)
        except DomainError:
            if isinstance(plan, str):  # only a scheme cannot do without it
                raise
    return model_of(plan, described), described


def architecture_of(module: nn.Module, seq_len: int | None = None) -> Transformer | None:
    """The module's architecture; None where neither a config nor its layers tell it.

    Weights and embedding variances are those of the framework's own initialisation, not those
    that the module holds.

    Args:
        module: a Hugging Face module, or one with nn.TransformerEncoderLayers.
        seq_len: tokens per sequence; None: what the config allows, or 128.

    Raises:
        DomainError: a config that `moments.from_huggingface` does not read.
    """
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidityWarning)
            model = from_huggingface(config, seq_len=seq_len)
        alone = model.encoder is not None and ENCODER not in stacks_of(module)
        return model.encoder if alone else model
    layers = [module.get_submodule(path) for path, _ in layers_of(module)]
    if isinstance(layers[0], nn.TransformerEncoderLayer) and _activation(layers[0]):
        return _encoder(layers[0], len(layers), seq_len)
    return None


def _encoder(layer: Any, layers: int, seq_len: int | None) -> Transformer:
    d_model, d_ff = layer.self_attn.embed_dim, layer.linear1.out_features
    heads = layer.self_attn.num_heads
    xavier = 2 / (d_model + 3 * d_model)  # in_proj_weight is one (3 d, d) matrix to its initialiser
    rest = Weights.torch_default(d_model, d_ff)
    return Transformer(
        layers=layers,
        d_model=d_model,
        heads=heads,
        seq_len=SEQ_LEN if seq_len is None else seq_len,
        d_ff=d_ff,
        norm="pre" if layer.norm_first else "post",
        activation=_activation(layer) or "",
        dropout=layer.dropout1.p,
        attention_dropout=layer.self_attn.dropout,
        weights=rest.replace(query=xavier, key=xavier, value=xavier),
        norm_epsilon=layer.norm1.eps,
        norm_affine=layer.norm1.elementwise_affine,
    )


def _activation(layer: Any) -> str | None:
    """Of an nn.TransformerEncoderLayer, which holds a function or a module."""
    name = getattr(layer.activation, "__name__", type(layer.activation).__name__).lower()
    return name if name in _ACTIVATIONS else None
