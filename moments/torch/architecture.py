"""The architecture that a torch module declares by itself, with its framework's initialisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import DomainError, MomentsError, optional, without_warnings
from ..model.head import Head
from ..model.huggingface import READERS
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..model.weights import Biases, Weights
from .anatomy import anatomy_of, as_drawn
from .dataflow.reading import SEQ_LEN, ModuleReading
from .departures import Departure, check_sizes, departures, refuse, shared_by
from .expectation import model_of
from .running import own_module

with optional("torch", "torch"):
    from torch import nn

_ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


class Fitted(NamedTuple):
    """A module, unwrapped, and a plan's model; `described` is its own architecture, if known."""

    module: nn.Module
    reading: ModuleReading
    model: Transformer
    described: Transformer | None
    departures: tuple[Departure, ...]


def fitted(
    module: Any,
    plan: Any,
    options: Mapping[str, Any] | None = None,
    batch: Any = None,
    *,
    strict: bool = True,
) -> Fitted:
    """A plan upon a module; the arguments are those of `initialize`.

    Args:
        strict: whether the plan must be feasible, and nothing in it other than in the module that
            weights and hooks cannot change.

    Raises:
        DomainError: no module, no plan, one that is not feasible, a scheme for a module whose
            architecture is not known, or a plan of other sizes.
    """
    module = own_module(module)
    if strict and not getattr(plan, "feasible", True):
        raise DomainError(
            f"{plan.title} is not feasible (nearest value {plan.nearest:.6g}): solve for "
            "another target, or pass plan.model to take the nearest model all the same"
        )
    reading = anatomy_of(module, batch)
    promised = promised_by(module)
    described = promised or as_drawn(reading)
    if plan is None and promised is None:
        raise DomainError(
            f"nothing in {type(module).__name__} says how it is meant to be drawn: pass a plan, a "
            "Transformer or a scheme's name; moments.check says what its weights look like"
        )
    shared = shared_by(module, reading)
    why = "; ".join((*reading.reasons, *shared))
    model = model_of(promised if plan is None else plan, described, options, why)
    check_sizes(model, reading.roles, described, shared)
    rows = departures(model, module, reading, promised)
    if strict:
        refuse(rows)
    return Fitted(module, reading, model, described, rows)


def architecture_of(module: nn.Module, seq_len: int | None = None) -> Transformer | None:
    """The module's architecture; None where neither a config nor its layers tell it.

    Variances of weights, biases and tables are those of the framework's own initialisation, not
    those that the module holds.

    Args:
        module: a Hugging Face module, or one with nn.TransformerEncoderLayers, or with these and
            nn.TransformerDecoderLayers, which are taken for causal.
        seq_len: tokens per sequence; None: what the config allows, or 128.

    Raises:
        DomainError: a config that `moments.from_huggingface` does not read.
    """
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        with without_warnings():
            model = from_huggingface(config, seq_len=seq_len)
        if model.encoder is None or any(b.stack for b in anatomy_of(module).roles.blocks):
            return model
        return model.encoder
    encoder, main = (
        [part for part in module.modules() if isinstance(part, kind)]
        for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    if not encoder or not all(map(_activation, (*encoder, *main))):
        return None  # what a decoder alone reads, nothing in it says
    if not main:
        return _of_torch(encoder, seq_len, together=False)
    both = any(isinstance(part, nn.Transformer) for part in module.modules())
    stacks = (part for part in module.modules() if isinstance(part, nn.TransformerEncoder))
    head = Head(norm=any(part.norm is not None for part in stacks), loss=None)
    read = _of_torch(encoder, seq_len, together=both).replace(head=head)
    return _of_torch(main, seq_len, together=both).replace(encoder=read, causal=True)


def promised_by(module: nn.Module, seq_len: int | None = None) -> Transformer | None:
    """What the module's config, or torch's own class, says of its initialisation."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if isinstance(kind, str) and kind in READERS and READERS[kind].slip:
        return None
    try:
        promised = architecture_of(module, seq_len)
    except MomentsError:
        return None
    # a module has one layer of these, however often it is used
    return promised if promised is not None and not promised.shared_layers else None


def _of_torch(layers: list[Any], seq_len: int | None, *, together: bool) -> Transformer:
    """A stack of torch's own encoder or decoder layers, which are alike.

    `together`: nn.Transformer drew the weights, every matrix by Xavier's rule.
    """
    layer = layers[0]
    d_model, d_ff = layer.self_attn.embed_dim, layer.linear1.out_features
    fused = 2 / (d_model + 3 * d_model)  # in_proj_weight is one (3 d, d) matrix to its initialiser
    if together:
        square, hidden = 1 / d_model, 2 / (d_model + d_ff)
        weights = Weights(fused, fused, fused, square, hidden, hidden, distribution="uniform")
    else:
        rest = Weights.torch_default(d_model, d_ff)
        weights = rest.replace(query=fused, key=fused, value=fused)
    dropouts = [part.p for name, part in layer.named_children() if name.startswith("dropout")]
    return Transformer(
        layers=len(layers),
        d_model=d_model,
        heads=layer.self_attn.num_heads,
        seq_len=SEQ_LEN if seq_len is None else seq_len,
        d_ff=d_ff,
        norm="pre" if layer.norm_first else "post",
        activation=_activation(layer) or "",
        dropout=layer.dropout1.p,
        attention_dropout=layer.self_attn.dropout,
        activation_dropout=layer.dropout.p,
        ffn_dropout=dropouts[-1],  # dropout2 of an encoder's layer, dropout3 of a decoder's
        weights=weights,
        biases=_biases(layer),
        norm_epsilon=layer.norm1.eps,
        norm_affine=layer.norm1.elementwise_affine,
        norm_bias=layer.norm1.bias is not None,
    )


def _biases(layer: Any) -> Biases | None:
    """Of one of torch's layers: zero in attention, nn.Linear's own elsewhere."""
    attention = 0.0 if layer.self_attn.in_proj_bias is not None else None
    drawn = Biases.torch_default(layer.linear1.in_features, layer.linear1.out_features)
    ffn = {
        name: getattr(drawn, name) if part.bias is not None else None
        for name, part in (("ffn_in", layer.linear1), ("ffn_out", layer.linear2))
    }
    found = Biases(attention, attention, attention, attention, **ffn, gate=None)
    return found if any(value is not None for value in found.to_dict().values()) else None


def _activation(layer: Any) -> str | None:
    """Of one of torch's layers, which holds a function or a module."""
    name = getattr(layer.activation, "__name__", type(layer.activation).__name__).lower()
    return name if name in _ACTIVATIONS else None
