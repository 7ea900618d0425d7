"""The architecture that a module declares, and the fields in which a plan differs from it.

Fields that `initialize` writes are compared with tensors and hooks elsewhere (`_WRITTEN`); fields
that change no signal at initialisation are no fault (`_GRADIENTS`, `_OUTSIDE`); sizes must fit
(`SIZES`). All others have to be what the module computes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ..errors import DomainError, MomentsError, domain_error, without_warnings
from ..model.head import Head
from ..model.huggingface import READERS
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..model.weights import Biases, Weights
from ..show.findings import Row
from .anatomy import anatomy_of, as_drawn
from .dataflow import ModuleReading
from .expectation import OUTSIDE, model_of, model_of_stack, stacks_in
from .roles import ENCODER, ModuleRoles, gathered_names, in_layers
from .running import aliases, own_module


class Fitted(NamedTuple):
    """A module, unwrapped, its reading, a plan's model, and the module's own architecture, if known
    (`described`)."""

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
    """The model of a plan for a module; the arguments are those of `initialize`.

    Args:
        strict: whether the plan must be feasible, and equal the module in all that weights and
            hooks cannot change.

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
    """The module's architecture by its config or by torch's own layers; None without these.

    Variances of weights, biases and tables are those of the framework's own initialisation, not
    those of the module's entries.

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
        # A module that is one of the config's two stacks: the causal one is the decoder.
        decoder = reading.model is not None and reading.model.causal
        return model.replace(encoder=None) if decoder else model.encoder
    return _torch_architecture(module, seq_len)


def promised_by(module: nn.Module, seq_len: int | None = None) -> Transformer | None:
    """The model that the module's config, or torch's own class, promises at initialisation."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if isinstance(kind, str) and kind in READERS and READERS[kind].slip:
        return None
    try:
        promised = architecture_of(module, seq_len)
    except MomentsError:
        return None
    # a shared layer is one layer of the module, however often it is used
    return promised if promised is not None and not promised.shared_layers else None


def _torch_architecture(module: nn.Module, seq_len: int | None) -> Transformer | None:
    """The architecture of torch's own layers by one pass, with torch's own initialisation."""
    encoder_layers, decoder_layers = (
        [part for part in module.modules() if isinstance(part, kind)]
        for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    if not encoder_layers:
        return None  # nothing says what a decoder without encoder attends to
    reading = anatomy_of(module)
    model = as_drawn(reading)
    if model is None or (decoder_layers and model.encoder is None):
        return None
    xavier = any(isinstance(part, nn.Transformer) for part in module.modules())
    length: dict[str, Any] = {} if seq_len is None else {"seq_len": seq_len}
    encoder = model if model.encoder is None else model.encoder
    fields = _drawn_by_torch(encoder_layers[0], xavier=xavier and bool(decoder_layers))
    encoder = encoder.replace(causal=False, **fields, **length)  # its caller passes any mask
    if not decoder_layers:
        return encoder
    assert reading.model is not None
    assert reading.model.encoder is not None
    final = reading.model.encoder.head
    encoder = encoder.replace(head=Head(norm=final is not None and final.norm, loss=None))
    fields = _drawn_by_torch(decoder_layers[0], xavier=xavier)
    return model.replace(encoder=encoder, causal=True, **fields, **length)


def _drawn_by_torch(layer: Any, *, xavier: bool) -> dict[str, Any]:
    """Fields of a stack of torch's own layers; `xavier`: nn.Transformer drew every matrix by
    Xavier's rule."""
    d_model, d_ff = layer.self_attn.embed_dim, layer.linear1.out_features
    fused = 2 / (d_model + 3 * d_model)  # in_proj_weight is one (3 d, d) matrix to its initialiser
    if xavier:
        square, hidden = 1 / d_model, 2 / (d_model + d_ff)
        weights = Weights(fused, fused, fused, square, hidden, hidden, distribution="uniform")
    else:
        weights = Weights.torch_default(d_model, d_ff)
        weights = weights.replace(query=fused, key=fused, value=fused)
    attention = 0.0 if layer.self_attn.in_proj_bias is not None else None
    default = Biases.torch_default(d_model, d_ff)
    ffn = {
        name: getattr(default, name) if part.bias is not None else None
        for name, part in (("ffn_in", layer.linear1), ("ffn_out", layer.linear2))
    }
    biases = Biases(attention, attention, attention, attention, **ffn, gate=None)
    has_biases = any(value is not None for value in biases.to_dict().values())
    fields = {"weights": weights, "biases": biases if has_biases else None}
    ones = dict.fromkeys(("skip_scale", "branch_scale", "temperature"), 1.0)
    return {**ones, **fields, "layernorm_scaling": False}


# --- fields in which a plan differs ---------------------------------------------------------------


SIZES = ("layers", "d_model", "d_ff", "d_head", "heads", "kv_heads")
"""Fields that decide the shapes of tensors."""

_WRITTEN = {
    *("weights", "skip_scale", "branch_scale", "layernorm_scaling", "temperature"),
    *("head.output_scale", "relative_bias.variance"),
    *(f"{part}.{name}" for part, name in OUTSIDE.values()),
}
"""Fields that `initialize` writes into tensors or hooks."""

_GRADIENTS = {"norm_affine", "norm_bias", "layer_scale", "head.bias"}
"""Fields of parameters that change no signal at initialisation, or repeat another field."""

_OUTSIDE = {
    "head.loss": "the loss is no part of a module",
    "head.target_share": "the loss is no part of a module",
    "head.label_smoothing": "the loss is no part of a module",
    "embedding.padding_id": "it concerns the rows of one token",
}
"""Fields that say (almost) nothing about a module, and why."""

_OF_FEW_TOKENS = {"rotary", "window", "relative_bias", "dropout"}
"""Last parts of fields that a pass over few tokens shows less exactly than a config says them."""

_UNREAD = {"embedding.position_base", "embedding.factor_variance", "head.factor_dim"}
"""Fields that a reading may lack; then the config is believed."""

_PARTS = ("embedding", "head", "relative_bias")
"""Fields that are declarations of their own, compared field by field."""

UNMOVED = "it starts where it changes no signal"
"""Remark on parameters that start at one or zero."""

MANY = 3
"""Shared parameters named at most."""

EXACT = 1e-4
"""Relative difference up to which two numbers are equal."""


class Field(NamedTuple):
    """A field, "embedding.norm", "encoder.causal", ..., in which a plan differs from a module; the
    `remark` says why that is no fault, if so."""

    name: str
    planned: Any
    present: Any
    remark: str = ""

    def row(self, parameter: str) -> Row:
        """The field as a check: failed if it is a fault, passed if it changes no signal at
        initialisation, else neither."""
        name, planned, present, remark = self
        harmless = remark == UNMOVED or name.removeprefix(ENCODER) in _OUTSIDE
        passed = (harmless or None) if remark else False
        one, other = (float(v) if isinstance(v, int | float) else math.nan for v in self[1:3])
        note = f"the plan says {planned!r}, the module has {present!r}"
        note += f"; {remark}" if remark else ""
        return Row(0, name, parameter, "architecture", one, other, passed, note)


def departures(
    model: Transformer, module: nn.Module, reading: ModuleReading, promised: Transformer | None
) -> tuple[Row, ...]:
    """Every field in which a model differs from a module, as rows of quantity "architecture";
    `promised`: what the module's config or class says of it."""
    roles, read = reading.roles, reading.model or promised
    fields = list(_stack_fields("", model, roles, read, promised))
    fields += _missing_matrices(model, roles, shared_by(module, reading))
    if model.encoder is not None:
        if read is not None and read.encoder is not None:
            promised_encoder = promised and promised.encoder
            stacks = model.encoder, roles, read.encoder, promised_encoder
            fields += _stack_fields(ENCODER, *stacks)
        else:
            crosses = any(block.name == "cross" for block in roles.blocks)
            fields.append(Field("encoder", "one", None, "it is outside of the module" * crosses))
    if masked_by_caller(module):
        remark = "the mask is an argument of its forward; without one every token sees all"
        fields = [f._replace(remark=remark) if f.name.endswith("causal") else f for f in fields]
    return tuple(field.row(type(module).__name__) for field in fields)


def _stack_fields(
    stack: str,
    model: Transformer,
    roles: ModuleRoles,
    has: Transformer | None,
    promised: Transformer | None,
) -> Iterator[Field]:
    """The fields of a stack; `has`: the module as it was read."""
    yield from _placements(stack, model, roles)
    yield from _missing_tensors(stack, model, roles)
    if has is None:
        why = "what the module computes could not be read as a Transformer"
        yield Field(f"{stack}architecture", "a Transformer", None, why)
        return
    skipped = {"encoder", "name", "biases", "norm_gain", "norm", *_WRITTEN}
    if not model.parallel:
        skipped.add("parallel_norms")
    if not any(block.stack == stack for block in roles.blocks):
        skipped.remove("norm")
    for name in _names(model):
        if name in skipped or name in _PARTS:
            continue
        planned = _resolved(model, model, name)
        present = _resolved(model, has, name)
        if name == "seq_len":
            tables = [r for r in roles.named("position", stack=stack) if has.embedding is not None]
            if tables and model.seq_len > has.seq_len:
                yield Field(f"{stack}{name}", planned, f"positions for {has.seq_len}")
            continue
        declared = None if promised is None else _resolved(model, promised, name)
        if name == "norm_epsilon" and model.layernorm_scaling == "before-norm":
            # norm(s x) at epsilon e is norm(x) at e / s^2.
            scaled = (float(present * factor**2) for factor in model.norm_scales)
            present = next((e for e in scaled if _same(planned, e)), present)
        yield from _compared(f"{stack}{name}", planned, present, declared)
    for part in _PARTS:
        yield from _part_fields(stack, part, model, roles, has, promised)


def _part_fields(
    stack: str,
    name: str,
    model: Transformer,
    roles: ModuleRoles,
    has: Transformer,
    promised: Transformer | None,
) -> Iterator[Field]:
    """The fields of an embedding, a head or a relative bias."""
    planned, present = getattr(model, name), getattr(has, name)
    declared = None if promised is None else getattr(promised, name)
    present = declared if present is None else present
    if name == "relative_bias" and (planned is None) != (present is None):
        yield Field(f"{stack}{name}", planned, present)
    if planned is None:
        if name == "head" and present is not None and not roles.named("head", stack=stack):
            yield Field(f"{stack}head", None, type(present).__name__, "the plan says nothing")
        return
    if present is None or type(planned) is not type(present):
        named = {"head": ("head",), "embedding": ("token", "patch")}.get(name, ())
        remark = "" if roles.named(*named, stack=stack) else "no parameter of the module is one"
        if present is None:
            remark = remark or "how the module uses it could not be read"
        kind = type(present).__name__ if present is not None else None
        yield Field(f"{stack}{name}", type(planned).__name__, kind, remark)
        return
    for field in _names(planned):
        whole = f"{name}.{field}"
        if whole in _WRITTEN or whole == "head.norm_gain":
            continue
        own, other = getattr(planned, field), getattr(present, field)
        tables = (getattr(part, "position_variance", None) for part in (planned, present))
        if field == "positions" and set(tables) == {0.0}:  # no table, whatever its kind
            own, other = (None if kind in ("learned", "none") else kind for kind in (own, other))
        if whole == "head.vocab_size" and own != other:  # None: as many as the embedding has
            own = own or getattr(model.embedding, field, None)
            other = other or getattr(has.embedding, field, own)
        yield from _compared(f"{stack}{whole}", own, other, getattr(declared, field, None))


def _compared(name: str, planned: Any, present: Any, promised: Any) -> Iterator[Field]:
    """A field if its values differ and neither the reading's limits nor the config explain it."""
    plain = name.removeprefix(ENCODER)
    if _same(planned, present):
        return
    if plain.rpartition("_")[2].rpartition(".")[2] in _OF_FEW_TOKENS and _same(planned, promised):
        return
    if _same(planned, promised) and (plain in _UNREAD or _close(planned, present)):
        return
    remark = _OUTSIDE.get(plain, "")
    if plain in _GRADIENTS:
        remark = UNMOVED
    elif plain.endswith("norm_epsilon") and planned == 0:
        remark = "it counts where variances are not far above it"
    yield Field(name, planned, present, remark)


def _names(declaration: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(declaration) if field.init]


def _resolved(plan: Transformer, model: Transformer, name: str) -> Any:
    """A field with its default resolved; windows beyond the plan's tokens are None."""
    if name == "window":
        return tuple(None if w is None or w >= plan.seq_len else w for w in model.windows)
    if name in ("attention_dropout", "ffn_dropout") and getattr(model, name) is None:
        return model.dropout
    if name == "norm":
        return model.placements
    if name == "attention_sink":  # its entries are drawn, so that only its presence counts
        return tuple(sink is not None for sink in model.attention_sinks)
    return getattr(model, name)


def _same(x: Any, y: Any) -> bool:
    if x is None or y is None or isinstance(x, str) or isinstance(y, str):
        return x is y or bool(x == y)
    if dataclasses.is_dataclass(x) and type(x) is type(y):
        return all(_same(getattr(x, n), getattr(y, n)) for n in _names(x))
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, bool | int | float) and isinstance(y, bool | int | float):
        return bool(np.isclose(float(x), float(y), rtol=EXACT, atol=1e-15))
    return bool(x == y)


def _close(x: Any, y: Any) -> bool:
    """Whether two numbers are equal to the digits of a reading."""
    return isinstance(x, float) and isinstance(y, float) and bool(np.isclose(x, y, rtol=0.01))


def _placements(stack: str, model: Transformer, roles: ModuleRoles) -> Iterator[Field]:
    """Placements of norms, each pair of a planned and a present one once."""
    pairs = dict.fromkeys(
        (model.placements[block.layer - 1], block.placement)
        for block in roles.blocks
        if block.stack == stack and block.layer <= model.layers
    )
    for planned, present in pairs:
        if planned != present:
            yield Field(f"{stack}norm", planned, present)


def _missing_tensors(stack: str, model: Transformer, roles: ModuleRoles) -> Iterator[Field]:
    """Biases, gains and tables of the plan that the module has not, or not in every layer."""
    present = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
    names_present = {name for _, name in present}
    layers = range(1, model.layers + 1)
    for name in () if model.biases is None else _names(model.biases):
        planned = getattr(model.biases, name)
        if planned is None or (name == "gate" and not model.gated):
            continue
        if not all((n, f"{name}.bias") in present for n in layers):
            remark = "" if np.any(planned) else UNMOVED
            yield Field(f"{stack}biases.{name}", planned, None, remark)
    for block, column in (("attention", 0), ("ffn", 1)):
        gains = model.norm_gains[:, column]
        names = (f"{block}.norm.gain", "attention.norm.gain")
        missing = [n for n in layers if not any((n, name) in present for name in names)]
        if any(gains[n - 1] != 1 for n in missing):
            yield Field(f"{stack}norm_gain", gains.tolist(), "no gain")
            break
    head, last = model.head, model.layers + 1
    if head is not None and head.norm_gain != 1 and (last, "final.norm.gain") not in present:
        yield Field(f"{stack}head.norm_gain", head.norm_gain, "no gain")
    for role, (part, name) in OUTSIDE.items():
        planned = getattr(getattr(model, part), name, None)
        # a head, or none, is compared as a whole
        if planned and role not in names_present and name != "weight_variance":
            outside = part == "head"
            outside = outside or (part == "embedding" and not {"token", "patch"} & names_present)
            remark = "no parameter of the module is one" if outside else ""
            yield Field(f"{stack}{part}.{name}", planned, None, remark)


def shared_by(module: nn.Module, reading: ModuleReading) -> tuple[str, ...]:
    """Phrases on parameters with several uses, without a head that is tied to the token table."""
    tables = {role.parameter for role in reading.roles.named("token")}
    phrases = [f"{name} is used by several layers" for name in gathered_names(list(reading.shared))]
    tied = [
        f"{other} is {names[0]}"
        for parameter, names in aliases(module).items()
        for other in names[1:]
        if parameter.ndim > 1 and not tables & set(names)
    ]
    more = [f"and {len(tied) - MANY} more"] if len(tied) > MANY else []
    return (*phrases, *tied[:MANY], *more)


def _missing_matrices(
    model: Transformer, roles: ModuleRoles, shared: Sequence[str]
) -> Iterator[Field]:
    """Matrices of the plan that some layers of the module have not, or share with others."""
    for stack, of_stack in stacks_in(model).items():
        present = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
        for name in of_stack.matrix_shapes:
            planned = [n for n in range(1, of_stack.layers + 1) if name in of_stack.shapes_of(n)]
            missing = [n for n in planned if (n, name) not in present]
            if missing and len(missing) < len(planned):
                variance = of_stack.variances_of(missing[0])[name]
                used = f" ({'; '.join(shared)})" if shared else ""
                where = in_layers(missing, of_stack.layers)
                yield Field(f"{stack}{name}", variance, f"no such matrix{where}{used}")


def masked_by_caller(module: nn.Module) -> bool:
    """Whether a module's forward takes a mask as an argument."""
    if hasattr(getattr(module, "config", None), "to_dict"):
        return False
    names = inspect.signature(module.forward).parameters
    return any("mask" in name or name == "is_causal" for name in names)


def check_sizes(
    model: Transformer, roles: ModuleRoles, has: Transformer | None, shared: Sequence[str] = ()
) -> None:
    """Raise a DomainError if no tensor fits; `has`: the module's architecture, `shared`: phrases of
    `shared_by`."""
    if model.layers != roles.layers:
        allowed = f"the module's {roles.layers}" + (f" ({'; '.join(shared)})" if shared else "")
        raise domain_error("layers of the plan", model.layers, allowed)
    for block in roles.blocks:
        stack = model_of_stack(model, block.stack)
        if block.layer > stack.layers:
            raise domain_error("layers of the plan's encoder", stack.layers, "the module's")
    for name in SIZES[1:]:
        present = None if has is None else getattr(has, name)
        if present is not None and present != getattr(model, name):
            planned = getattr(model, name)
            raise domain_error(f"{name} of the plan", planned, f"the module's {present}")
    widths = {role.fan_in for role in roles.named("query")}
    if widths and widths != {model.d_model}:
        raise domain_error("d_model of the plan", model.d_model, f"the module's {min(widths)}")


def refuse(rows: Sequence[Row]) -> None:
    """Raise a DomainError that names every field in which a plan differs from the module."""
    if faults := [f"{r.role} of the plan: {r.note}" for r in rows if r.passed is False]:
        raise DomainError(
            f"{'; '.join(faults)}: weights and hooks cannot change that; build the module as the "
            "plan says, or declare what the module is"
        )


def phrase_of(row: Row) -> str:
    """A row of `departures` in words."""
    return f"{row.role} ({row.note})"
