"""What a module declares by itself, and in which fields a plan departs from it.

What `initialize` writes is compared with tensors and hooks (`_WRITTEN`); what says nothing about a
signal at initialisation is no fault (`_GRADIENTS`, `_OUTSIDE`); sizes must fit (`SIZES`). All else
has to be what the module computes.
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


# --- fields in which a plan departs, and that weights and hooks cannot change --------------------


SIZES = ("layers", "d_model", "d_ff", "d_head", "heads", "kv_heads")
"""Fields without which no tensor of a module fits a plan."""

_WRITTEN = {
    *("weights", "skip_scale", "branch_scale", "layernorm_scaling", "temperature"),
    *("head.output_scale", "relative_bias.variance"),
    *(f"{part}.{name}" for part, name in OUTSIDE.values()),
}
"""Fields that `initialize` writes, wherever the module has their tensors or sums."""

_GRADIENTS = {"norm_affine", "norm_bias", "layer_scale", "head.bias"}
"""Fields of parameters that start where they change nothing, or what another field says."""

_OUTSIDE = {
    "head.loss": "the loss is no part of a module",
    "head.target_share": "the loss is no part of a module",
    "head.label_smoothing": "the loss is no part of a module",
    "embedding.padding_id": "it concerns the rows of one token",
}
"""Fields that say nothing about a module, or nearly so, and why."""

_OF_FEW_TOKENS = {"rotary", "window", "relative_bias", "dropout"}
"""Last parts of fields that a run of few tokens shows less exactly than a config says them."""

_UNREAD = {"embedding.position_base", "embedding.factor_variance", "head.factor_dim"}
"""Fields that a reading may lack, so that what a config says of them is held against nothing."""

_PARTS = ("embedding", "head", "relative_bias")
"""Fields that are declarations of their own, compared field by field."""

UNMOVED = "it starts where it changes no signal"
"""Why a parameter that starts at one or zero is no fault."""

MANY = 3
"""As many shared parameters are named."""

EXACT = 1e-4
"""Relative difference of two numbers that are one."""


class Field(NamedTuple):
    """One field, "embedding.norm", "encoder.causal", ..., in which a plan is not what a module is:
    what the plan says, what the module has, and why that is no fault."""

    name: str
    planned: Any
    present: Any
    remark: str = ""

    def row(self, parameter: str) -> Row:
        """As a check: failed where it is a fault, passed where it changes no signal at
        initialisation, else neither."""
        name, planned, present, remark = self
        unmoved = remark == UNMOVED or name.removeprefix(ENCODER) in _OUTSIDE
        passed = (unmoved or None) if remark else False
        one, other = (float(v) if isinstance(v, int | float) else math.nan for v in self[1:3])
        note = f"the plan says {planned!r}, the module has {present!r}"
        note += f"; {remark}" if remark else ""
        return Row(0, name, parameter, "architecture", one, other, passed, note)


def departures(
    model: Transformer, module: nn.Module, reading: ModuleReading, promised: Transformer | None
) -> tuple[Row, ...]:
    """Every field in which a model departs from a module, whose config or class says `promised`, as
    rows of quantity "architecture"."""
    roles, read = reading.roles, reading.model
    rows = list(_of_stack("", model, roles, read or promised, promised))
    rows += _without_matrices(model, roles, shared_by(module, reading))
    if model.encoder is not None:
        inside, outside = (one and one.encoder for one in (read or promised, promised))
        if inside is not None:
            rows += _of_stack(ENCODER, model.encoder, roles, inside, outside)
        else:
            alone = any(block.name == "cross" for block in roles.blocks)
            rows.append(Field("encoder", "one", None, "it is outside of the module" * alone))
    if masked_by_caller(module):
        remark = "the mask is an argument of its forward; without one every token sees all"
        rows = [r._replace(remark=remark) if r.name.endswith("causal") else r for r in rows]
    return tuple(row.row(type(module).__name__) for row in rows)


def _of_stack(
    stack: str,
    model: Transformer,
    roles: ModuleRoles,
    has: Transformer | None,
    promised: Transformer | None,
) -> Iterator[Field]:
    yield from _placements(stack, model, roles)
    yield from _without_tensors(stack, model, roles)
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
        also = None if promised is None else _resolved(model, promised, name)
        if name == "norm_epsilon" and model.layernorm_scaling == "before-norm":
            # norm(s x) at epsilon e is norm(x) at e / s^2.
            scaled = (float(present * factor**2) for factor in model.norm_scales)
            present = next((e for e in scaled if _same(planned, e)), present)
        yield from _compared(f"{stack}{name}", planned, present, also)
    for part in _PARTS:
        yield from _of_part(stack, part, model, roles, has, promised)


def _of_part(
    stack: str,
    name: str,
    model: Transformer,
    roles: ModuleRoles,
    has: Transformer,
    promised: Transformer | None,
) -> Iterator[Field]:
    planned, present = getattr(model, name), getattr(has, name)
    also = None if promised is None else getattr(promised, name)
    present = also if present is None else present
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
        one, other = getattr(planned, field), getattr(present, field)
        third = getattr(also, field, None)
        tables = (getattr(part, "position_variance", None) for part in (planned, present))
        if field == "positions" and set(tables) == {0.0}:
            one, other = (None if kind == "learned" else kind for kind in (one, other))
            one, other = (None if kind == "none" else kind for kind in (one, other))
        if whole == "head.vocab_size" and one != other:  # None: as many as the embedding has
            one = one or getattr(model.embedding, field, None)
            other = other or getattr(has.embedding, field, one)
        yield from _compared(f"{stack}{whole}", one, other, third)


def _compared(name: str, planned: Any, present: Any, promised: Any) -> Iterator[Field]:
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
    """A field, None resolved; windows that end beyond the plan's tokens are none."""
    if name == "window":
        return tuple(None if w is None or w >= plan.seq_len else w for w in model.windows)
    if name in ("attention_dropout", "ffn_dropout") and getattr(model, name) is None:
        return model.dropout
    if name == "norm":
        return model.placements
    if name == "attention_sink":  # whose entries are drawn where there are any
        return tuple(one is not None for one in model.attention_sinks)
    return getattr(model, name)


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None or isinstance(one, str) or isinstance(other, str):
        return one is other or bool(one == other)
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(_same(getattr(one, n), getattr(other, n)) for n in _names(one))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool | int | float) and isinstance(other, bool | int | float):
        return bool(np.isclose(float(one), float(other), rtol=EXACT, atol=1e-15))
    return bool(one == other)


def _close(one: Any, other: Any) -> bool:
    """Within the digits of what was read."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return numbers and bool(np.isclose(one, other, rtol=0.01))


def _placements(stack: str, model: Transformer, roles: ModuleRoles) -> Iterator[Field]:
    seen = set()
    for block in roles.blocks:
        if block.stack != stack or block.layer > model.layers:
            continue
        wanted = model.placements[block.layer - 1]
        if wanted != block.placement and (wanted, block.placement) not in seen:
            seen.add((wanted, block.placement))
            yield Field(f"{stack}norm", wanted, block.placement)


def _without_tensors(stack: str, model: Transformer, roles: ModuleRoles) -> Iterator[Field]:
    """What the plan draws or sets, for which the module has no tensor in some layer."""
    there = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
    layers = range(1, model.layers + 1)
    for name in () if model.biases is None else _names(model.biases):
        planned = getattr(model.biases, name)
        if planned is None or (name == "gate" and not model.gated):
            continue
        if all((n, f"{name}.bias") in there for n in layers):
            continue
        zero = not np.any(planned)
        remark = UNMOVED if zero else ""
        yield Field(f"{stack}biases.{name}", planned, None, remark)
    for block, column in (("attention", 0), ("ffn", 1)):
        gains = model.norm_gains[:, column]
        names = (f"{block}.norm.gain", "attention.norm.gain")
        lacking = [n for n in layers if not any((n, name) in there for name in names)]
        if any(gains[n - 1] != 1 for n in lacking):
            yield Field(f"{stack}norm_gain", gains.tolist(), "no gain")
            break
    head, last = model.head, model.layers + 1
    if head is not None and head.norm_gain != 1 and (last, "final.norm.gain") not in there:
        yield Field(f"{stack}head.norm_gain", head.norm_gain, "no gain")
    for role, (part, name) in OUTSIDE.items():
        planned = getattr(getattr(model, part), name, None)
        if planned and not any(known == role for _, known in there):
            gone = part == "embedding" and not ({"token", "patch"} & {k for _, k in there})
            tables = "no parameter of the module is one" if gone or part == "head" else ""
            if name == "weight_variance":  # a head, or none, is compared as a whole
                continue
            yield Field(f"{stack}{part}.{name}", planned, None, tables)


def shared_by(module: nn.Module, reading: ModuleReading) -> tuple[str, ...]:
    """Parameters with several uses, a phrase each, but for a head that is the token table."""
    tables = {role.parameter for role in reading.roles.named("token")}
    phrases = [f"{name} is used by several layers" for name in gathered_names(list(reading.shared))]
    rows = [
        (names[0], other)
        for parameter, names in aliases(module).items()
        for other in names[1:]
        if parameter.ndim > 1 and not tables & set(names)
    ]
    shown = [f"{other} is {one}" for one, other in rows]
    more = [f"and {len(shown) - MANY} more"] if len(shown) > MANY else []
    return (*phrases, *shown[:MANY], *more)


def _without_matrices(
    model: Transformer, roles: ModuleRoles, shared: Sequence[str]
) -> Iterator[Field]:
    """Matrices that the plan draws and the module has not, or has once for several layers."""
    for stack, of_stack in stacks_in(model).items():
        there = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
        for name in of_stack.matrix_shapes:
            having = [n for n in range(1, of_stack.layers + 1) if name in of_stack.shapes_of(n)]
            lacking = [n for n in having if (n, name) not in there]
            if lacking and len(lacking) < len(having):
                planned = of_stack.variances_of(lacking[0])[name]
                used = f" ({'; '.join(shared)})" if shared else ""
                where = in_layers(lacking, of_stack.layers)
                yield Field(f"{stack}{name}", planned, f"no such matrix{where}{used}")


def masked_by_caller(module: nn.Module) -> bool:
    """Whether a module's forward takes a mask that only its caller knows."""
    if hasattr(getattr(module, "config", None), "to_dict"):
        return False
    names = inspect.signature(module.forward).parameters
    return any("mask" in name or name == "is_causal" for name in names)


def check_sizes(
    model: Transformer, roles: ModuleRoles, has: Transformer | None, shared: Sequence[str] = ()
) -> None:
    """Raise a DomainError where no tensor would fit; `shared`: phrases of `shared_by`."""
    if model.layers != roles.layers:
        own = f"the module's {roles.layers}" + (f" ({'; '.join(shared)})" if shared else "")
        raise domain_error("layers of the plan", model.layers, own)
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
    """Raise a DomainError that names every field in which a plan is not what the module is."""
    if faults := [f"{r.role} of the plan: {r.note}" for r in rows if r.passed is False]:
        raise DomainError(
            f"{'; '.join(faults)}: weights and hooks cannot change that; build the module as the "
            "plan says, or declare what the module is"
        )


def phrase_of(row: Row) -> str:
    """A field, and what both sides have."""
    return f"{row.role} ({row.note})"
