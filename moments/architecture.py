"""From a declared Transformer to the composition of components that a theory propagates through."""

from __future__ import annotations

import functools
from typing import Any

from .attention import Padding, SelfAttention
from .composition import Chain, Component, Layer, Leaf, Residual
from .embedding import Embedding
from .errors import DomainError
from .law import ComponentLaws, Theory
from .laws.activation import GELU, GELU_TANH, IDENTITY, RELU
from .laws.block import ATTENTION_BLOCK, FFN_BLOCK
from .laws.linear import DROPOUT, LINEAR, SCALE
from .laws.normalization import LAYERNORM
from .normalization import FiniteNormalization
from .parts import Activation, Dropout, Lawful, Linear, Scale
from .transformer import Transformer
from .weights import LayerWeights

ACTIVATION_LAWS: dict[str, ComponentLaws] = {
    "relu": RELU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "identity": IDENTITY,
}


class Normalization(Lawful):
    """A normalisation whose laws are the papers': width and learned parameters leave no trace."""

    normalises = True


@functools.lru_cache(maxsize=32)
def declare(model: Transformer, theory: Theory, padding: Padding | None = None) -> Chain:
    """The stack of layers as components that hold the laws of `theory`.

    Args:
        model: the declaration.
        theory: which laws.
        padding: for every sequence, which tokens are real; None: all.

    Raises:
        DomainError: the theory does not cover a feature of the model.
    """
    _check_coverage(model, theory)
    layers = range(1, model.layers + 1)
    return Chain(tuple(_layer(model, theory, n, padding) for n in layers))


def declare_embedding(embedding: Embedding, d_model: int, theory: Theory) -> Chain:
    """What follows the sum of the embedding tables."""
    parts: list[Component] = []
    if embedding.norm:
        parts.append(_norm(theory, "embedding.norm", d_model, embedding.norm_epsilon))
    parts.append(_dropout(theory, "embedding", embedding.dropout))
    return Chain(tuple(parts))


def _check_coverage(model: Transformer, theory: Theory) -> None:
    if theory == "refined":
        return
    remedy = 'use theory="refined"'
    if model.heads * (model.d_head or 0) != model.d_model:
        raise DomainError(
            f"theory {theory!r} covers only heads * d_head = d_model, and here "
            f"{model.heads} * {model.d_head} is not {model.d_model}; {remedy}"
        )
    if theory == "simplified" and model.activation != "relu":
        raise DomainError(
            f"theory 'simplified' (Table 2) covers only activation = 'relu', "
            f'not {model.activation!r}; use theory="published" or "refined"'
        )


def _layer(model: Transformer, theory: Theory, number: int, padding: Padding | None) -> Layer:
    weights = model.layer_weights(number)
    temperature = float(model.temperatures[number - 1])
    attention = _attention_block(model, theory, weights, temperature, padding)
    ffn = _ffn_block(model, theory, weights)
    skip = float(model.skip_scales[number - 1])
    branch = float(model.branch_scales[number - 1])
    scale = float(model.norm_scales[number - 1])
    parts: list[Component] = []
    for name, block in (("attention", attention), ("ffn", ffn)):
        norm = _scaled_norm(model, theory, f"{name}.norm", scale)
        if model.norm == "pre":
            block = Chain((*norm, *block.parts))
        parts.append(Residual(block, skip, branch, f"{name}.sum"))
        if model.norm == "post":
            parts.extend(norm)
    return Layer(Chain(tuple(parts)), number)


def _scaled_norm(
    model: Transformer, theory: Theory, label: str, scale: float
) -> tuple[Component, ...]:
    norm = _norm(theory, label, model.d_model, model.norm_epsilon)
    if scale == 1.0:
        return (norm,)
    return norm, Scale(SCALE, theory, f"{label}_scale", {"weight_variance": scale * scale})


def _norm(theory: Theory, label: str, d_model: int, epsilon: float) -> Leaf:
    if theory == "refined":
        return FiniteNormalization(LAYERNORM, label, epsilon)
    return Normalization(LAYERNORM, theory, label, {"d_model": d_model})


def _dropout(theory: Theory, label: str, drop_prob: float) -> Dropout:
    return Dropout(DROPOUT, theory, label, {"drop_prob": float(drop_prob)})


def _linear(
    theory: Theory, label: str, weight: str, fan_in: int, fan_out: int, variance: Any
) -> Linear:
    parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": variance}
    return Linear(LINEAR, theory, label, parameters, fan_out, weight)


def _attention_block(
    model: Transformer,
    theory: Theory,
    weights: LayerWeights,
    temperature: float,
    padding: Padding | None,
) -> Chain:
    d_model, inner = model.d_model, model.heads * (model.d_head or 0)
    if theory != "refined":
        # The papers treat the block as one unit.
        parameters = {
            "d_model": d_model,
            "seq_len": model.seq_len,
            "drop_prob": model.dropout,
            "attention_drop_prob": model.attention_dropout,
            # Queries enter through the logits alone, which the temperature divides.
            "query": weights.query / temperature**2,
            "key": weights.key,
            "value": weights.value,
            "output": weights.output,
        }
        return Chain((Lawful(ATTENTION_BLOCK, theory, "attention.dropout", parameters),))
    attention = SelfAttention(
        "attention.heads",
        d_model,
        model.heads,
        model.d_head,
        weights.query,
        weights.key,
        weights.value,
        model.attention_dropout,
        temperature,
        model.causal,
        padding,
    )
    return Chain(
        (
            attention,
            _linear(theory, "attention.projection", "output", inner, d_model, weights.output),
            _dropout(theory, "attention.dropout", model.dropout),
        )
    )


def _ffn_block(model: Transformer, theory: Theory, weights: LayerWeights) -> Chain:
    d_model, d_ff = model.d_model, model.d_ff or 0
    if theory == "simplified":
        parameters = {
            "d_model": d_model,
            "d_ff": d_ff,
            "ffn_in": weights.ffn_in,
            "ffn_out": weights.ffn_out,
            "drop_prob": model.dropout,
        }
        return Chain((Lawful(FFN_BLOCK, theory, "ffn.dropout", parameters),))
    # The papers' GeLU is the erf form; they state no other.
    name = "gelu" if (theory, model.activation) == ("published", "gelu_tanh") else model.activation
    return Chain(
        (
            _linear(theory, "ffn.in", "ffn_in", d_model, d_ff, weights.ffn_in),
            Activation(ACTIVATION_LAWS[name], theory, "ffn.activation"),
            _linear(theory, "ffn.out", "ffn_out", d_ff, d_model, weights.ffn_out),
            _dropout(theory, "ffn.dropout", model.dropout),
        )
    )
