"""The architecture that a torch module declares by itself, with its framework's initialisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import DomainError, MomentsError, without_warnings
from ..model.head import Head
from ..model.huggingface import READERS
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..model.weights import Biases, Weights
from ..show.findings import Row
from .anatomy import anatomy_of, as_drawn
from .dataflow.reading import ModuleReading
from .departures import check_sizes, departures, refuse, shared_by
from .expectation import model_of
from .running import own_module


class Fitted(NamedTuple):
    """A module, unwrapped, and a plan's model; `described` is its own architecture, if known."""

    module: nn.Module
    reading: ModuleReading
    model: Transformer
    described: Transformer | None
    departures: tuple[Row, ...]


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
    """The module's architecture; None where neither its config nor its layers say.

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
        if model.encoder is None:
            return model
        reading = anatomy_of(module)
        if any(block.stack for block in reading.roles.blocks):
            return model
        # One stack of two: the one whose tokens see what precedes them, or the other.
        decoder = reading.model is not None and reading.model.causal
        return model.replace(encoder=None) if decoder else model.encoder
    return _of_torch(module, seq_len)


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


def _of_torch(module: nn.Module, seq_len: int | None) -> Transformer | None:
    """What one pass shows of torch's own layers, drawn as they are by torch."""
    encoder, main = (
        [part for part in module.modules() if isinstance(part, kind)]
        for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    if not encoder:
        return None  # what a decoder alone reads, nothing in it says
    reading = anatomy_of(module)
    model = as_drawn(reading)
    if model is None or (main and model.encoder is None):
        return None
    together = any(isinstance(part, nn.Transformer) for part in module.modules())
    length: dict[str, Any] = {} if seq_len is None else {"seq_len": seq_len}
    read = model if model.encoder is None else model.encoder
    own = _drawn_by_torch(encoder[0], together=together and bool(main))
    read = read.replace(causal=False, **own, **length)  # a mask is its caller's
    if not main:
        return read
    assert reading.model is not None
    assert reading.model.encoder is not None
    final = reading.model.encoder.head
    read = read.replace(head=Head(norm=final is not None and final.norm, loss=None))
    whole = _drawn_by_torch(main[0], together=together)
    return model.replace(encoder=read, causal=True, **whole, **length)


def _drawn_by_torch(layer: Any, *, together: bool) -> dict[str, Any]:
    """Fields of a stack of torch's own encoder or decoder layers; `together`: nn.Transformer drew
    the weights, every matrix by Xavier's rule."""
    d_model, d_ff = layer.self_attn.embed_dim, layer.linear1.out_features
    fused = 2 / (d_model + 3 * d_model)  # in_proj_weight is one (3 d, d) matrix to its initialiser
    if together:
        square, hidden = 1 / d_model, 2 / (d_model + d_ff)
        weights = Weights(fused, fused, fused, square, hidden, hidden, distribution="uniform")
    else:
        rest = Weights.torch_default(d_model, d_ff)
        weights = rest.replace(query=fused, key=fused, value=fused)
    attention = 0.0 if layer.self_attn.in_proj_bias is not None else None
    drawn = Biases.torch_default(d_model, d_ff)
    ffn = {
        name: getattr(drawn, name) if part.bias is not None else None
        for name, part in (("ffn_in", layer.linear1), ("ffn_out", layer.linear2))
    }
    biases = Biases(attention, attention, attention, attention, **ffn, gate=None)
    there = any(value is not None for value in biases.to_dict().values())
    plain = dict.fromkeys(("skip_scale", "branch_scale", "temperature"), 1.0)
    fields = {"weights": weights, "biases": biases if there else None, "layernorm_scaling": False}
    return {**plain, **fields}
