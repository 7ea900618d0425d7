"""Checks of a Transformer: defaults are resolved, and fields checked, alone and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, domain_error
from ..formulas.activation import activation_laws
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    REAL,
    Interval,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_layers,
    check_number,
)
from .block import settle_blocks
from .embedding import Embedding
from .fields import Stored, set_field, settle
from .head import Head
from .law_block import LawBlock
from .mixers import QK_NORMS, RECURRENT, Absent
from .patches import PatchEmbedding, SoundEmbedding
from .per_layer import PerLayerEmbedding
from .placement import placement_names
from .positions import RelativeBias, Rotary
from .streams import AltUp, HyperConnections, Laurel
from .values import Values
from .weights import Biases, Weights, check_length, check_lengths

if TYPE_CHECKING:
    from .transformer import Transformer

NORMALIZATIONS = ("layernorm", "rmsnorm", "dyt")
ATTENTION_GATES = (None, "elementwise", "headwise")
LAYERNORM_SCALINGS = (
    False,
    True,
    "after-norm",
    "before-norm",
    "after-block",
    "after-residual",
    "attention-only",
    "ffn-only",
)
MOST_LAYERS = 10**6
"""Largest number of layers; the deepest published network has 1,000."""
MOST_HEADS = 2**20
"""Largest number of heads with ALiBi, and of features of a head with rotary positions."""
PARTS: dict[str, tuple[type[Stored], ...]] = {
    "weights": (Weights,),
    "biases": (Biases,),
    "rotary": (Rotary,),
    "relative_bias": (RelativeBias,),
    "embedding": (Embedding, PatchEmbedding, SoundEmbedding),
    "head": (Head,),
    "streams": (HyperConnections, AltUp),
    "values": (Values,),
    "per_layer_embedding": (PerLayerEmbedding,),
    "laurel": (Laurel,),
}
"""Fields that are declarations of their own, besides the encoder."""
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def check(model: Transformer) -> None:
    """Resolve the defaults of a model under construction and check it."""
    settle(model, ["layers"], check_count, most=MOST_LAYERS)
    name = model.name
    if name is not None and not (isinstance(name, str) and name.strip() and name.isprintable()):
        raise domain_error("name", name, "a text of printable characters, or None")
    settle(model, ("heads", "norm_groups", "parallel_norms", "seq_len"), check_count)
    settle(model, ["d_model"], check_count, least=2)
    settle(model, ["post_layers"], check_count, least=0)
    flags = ("causal", "norm_affine", "norm_bias", "gated", "parallel")
    more = ("identity_attention", "layer_scale", "shared_layers")
    settle(model, (*flags, *more), check_flag)
    settle(model, ["alibi"], _check_alibi)
    check_choice("norm", model.norm, placement_names())
    check_choice("normalization", model.normalization, NORMALIZATIONS)
    if isinstance(model.activation, str) and model.activation in GATED:
        set_field(model, "activation", GATED[model.activation])
        set_field(model, "gated", True)
    try:
        activation_laws(model.activation)
    except DomainError as error:
        raise DomainError(f"{error}; gated units: {', '.join(GATED)}") from None
    check_choice("attention_gate", model.attention_gate, ATTENTION_GATES)
    check_choice("layernorm_scaling", model.layernorm_scaling, LAYERNORM_SCALINGS)
    check_choice("qk_norm", model.qk_norm, QK_NORMS)
    settle(model, ["dropout"], check_number, PROBABILITY, "pass 0.1 for ten percent")
    settle(model, ["activation_dropout"], check_number, PROBABILITY)
    settle(model, ["norm_epsilon"], check_number, NONNEGATIVE)
    settle(model, ("dyt_alpha", "logit_softcap"), check_number, POSITIVE)
    _resolve_defaults(model)
    _check_parts(model)
    for name, interval in (
        ("skip_scale", POSITIVE),
        ("branch_scale", NONNEGATIVE),
        ("norm_gain", POSITIVE),
    ):
        set_field(model, name, _per_block(model, name, interval))
    set_field(model, "temperature", _per_layer(model, "temperature", POSITIVE))
    set_field(model, "window", _of_layers(model, "window", check_count, "reach"))
    sinks = _of_layers(model, "attention_sink", _check_sink, "variance")
    set_field(model, "attention_sink", sinks)
    check_lengths("weights", model.weights, model.layers)
    check_lengths("biases", model.biases, model.layers)
    settle_blocks(model)
    _check_together(model)


def _resolve_defaults(model: Transformer) -> None:
    names = ("d_ff", "attention_dropout", "ffn_dropout", "weights", "d_head", "kv_heads")
    set_field(model, "_defaulted", frozenset(n for n in names if getattr(model, n) is None))
    if model.d_ff is None:
        set_field(model, "d_ff", 4 * model.d_model)
    settle(model, ("d_ff", "d_head", "kv_heads"), check_count)
    if model.d_head is None:
        if model.d_model % model.heads:
            raise domain_error(
                "heads",
                model.heads,
                f"a divisor of d_model = {model.d_model}",
                "change one of them, or pass d_head",
            )
        set_field(model, "d_head", model.d_model // model.heads)
    if model.kv_heads is None:
        set_field(model, "kv_heads", model.heads)
    if model.heads % (model.kv_heads or 1):
        raise domain_error("kv_heads", model.kv_heads, f"a divisor of heads = {model.heads}")
    if model.attention_dropout is None:
        set_field(model, "attention_dropout", model.dropout)
    if model.ffn_dropout is None:
        set_field(model, "ffn_dropout", model.dropout)
    settle(model, ("attention_dropout", "ffn_dropout"), check_number, PROBABILITY)
    if model.weights is None:
        weights = Weights.xavier(model.d_model, model.heads, model.d_ff, model.d_head)
        set_field(model, "weights", weights)


def _check_parts(model: Transformer) -> None:
    for name, kinds in (PARTS | {"encoder": (type(model),)}).items():
        value = getattr(model, name)
        if name in ("rotary", "values") and isinstance(value, list | tuple):
            set_field(model, name, _each_layer(model, name, kinds[0]))
        elif value is not None and not isinstance(value, kinds):
            words = " or ".join(f"moments.{kind.__name__}" for kind in kinds)
            raise domain_error(name, value, f"a {words}, or None")


def _per_layer(model: Transformer, name: str, interval: Interval) -> Any:
    entries = check_layers(name, getattr(model, name), interval, "scales multiply amplitudes")
    check_length(name, entries, model.layers)
    return entries


def _per_block(model: Transformer, name: str, interval: Interval) -> Any:
    values = check_interval(name, getattr(model, name), interval, "scales multiply amplitudes")
    if values.shape != (model.layers, 2):
        return _per_layer(model, name, interval)
    return tuple((attention, ffn) for attention, ffn in values.tolist())


def _of_layers(model: Transformer, name: str, check: Callable[[str, Any], Any], what: str) -> Any:
    """A checked value or None for all layers, or a tuple with one per layer."""

    def checked(entry: Any) -> Any:
        return None if entry is None else check(name, entry)

    value = getattr(model, name)
    if not isinstance(value, list | tuple | np.ndarray):
        return checked(value)
    if len(value) != model.layers:
        allowed = f"one {what}, or one per layer ({model.layers})"
        raise domain_error(name, value, allowed)
    return tuple(map(checked, value))


def _check_sink(name: str, value: Any) -> float:
    return check_number(name, value, NONNEGATIVE, "pass a variance, or None for no sinks")


def _each_layer(model: Transformer, name: str, kind: type) -> Any:
    """A tuple with one part or None per layer, or the part that all layers share."""
    parts = tuple(getattr(model, name))
    if not all(part is None or isinstance(part, kind) for part in parts):
        allowed = f"a moments.{kind.__name__} or None for every layer"
        raise domain_error(name, getattr(model, name), allowed)
    if len(parts) != model.layers:
        allowed = f"one, or one per layer ({model.layers})"
        raise domain_error(name, f"{len(parts)} entries", allowed)
    return parts[0] if len(set(parts)) == 1 else parts


def _check_together(model: Transformer) -> None:
    if model.norm == "none" and model.layernorm_scaling not in (
        False,
        "after-block",
        "after-residual",
    ):
        raise domain_error(
            "layernorm_scaling", model.layernorm_scaling, "False where norm is 'none'"
        )
    if isinstance(model.head, Head) and model.head.tied and isinstance(model.embedding, Embedding):
        width = model.embedding.factor_dim
        if model.head.factor_dim != width:
            remedy = "a tied head reads as many features as a row of the table has"
            raise domain_error("head.factor_dim", model.head.factor_dim, f"{width}", remedy)
    pool, before = getattr(model.head, "pool", None), getattr(model.embedding, "before", 0)
    if pool == "before" and not before:
        raise domain_error("head.pool", pool, "another, as no token stands before patches")
    if model.alibi:
        settle(model, ["heads"], check_count, most=MOST_HEADS)
    if model.rotary is not None:
        settle(model, ["d_head"], check_count, most=MOST_HEADS)
        for rotary in set(model.rotaries):
            if rotary is not None:
                rotary.check_width(model.d_head or 0)
    if model.d_model % model.norm_groups:
        raise domain_error("norm_groups", model.norm_groups, f"a divisor of {model.d_model}")
    if model.norm_groups > 1 and model.d_model // model.norm_groups < 4:
        most = model.d_model // 4
        raise domain_error(
            "norm_groups",
            model.norm_groups,
            f"at most {most}",
            "behind groups of fewer than four features the gradient has no finite mean",
        )
    if model.post_layers and model.norm != "mix":
        raise domain_error("post_layers", model.post_layers, "0, or norm='mix'")
    if model.post_layers > model.layers:
        raise domain_error("post_layers", model.post_layers, f"at most layers = {model.layers}")
    if model.parallel and model.placements[0] not in ("pre", "none"):
        raise domain_error("parallel", True, "False, or norm='pre' or 'none'")
    if model.identity_attention and model.norm == "hybrid":
        raise domain_error(
            "identity_attention", True, "False where queries and keys are normalised"
        )
    if model.normalization == "dyt" and model.norm == "hybrid":
        raise domain_error(
            "normalization", "dyt", "'layernorm' or 'rmsnorm' where queries and keys are normalised"
        )
    if model.parallel_norms not in (1, 2):
        raise domain_error("parallel_norms", model.parallel_norms, "1 or 2")
    if model.identity_attention and any(one is not None for one in model.attention_sinks):
        raise domain_error("attention_sink", model.attention_sink, "None without logits")
    if model.attention_gate is not None and model.norm == "hybrid":
        raise domain_error("attention_gate", model.attention_gate, "None with norm='hybrid'")
    if model.layer_scale and model.parallel:
        raise domain_error("layer_scale", True, "False where blocks share one sum")
    if model.layer_scale and not np.all(model.branch_scales > 0):
        raise domain_error("branch_scale", model.branch_scale, "above 0 where it is learned")
    if model.encoder is not None and model.parallel:
        raise DomainError("encoder and parallel: cross-attention has no place in a parallel layer")
    if model.encoder is not None and model.norm not in ("pre", "post", "none"):
        raise domain_error("norm", model.norm, "'pre', 'post' or 'none' with an encoder")
    if any(model.mixers) and (model.identity_attention or model.norm == "hybrid"):
        which = "identity_attention" if model.identity_attention else "norm='hybrid'"
        raise DomainError(f"mixer and {which}: both say what stands in attention's place")
    _check_unread(model)
    if model.shared_layers:
        _check_shared(model)
    if model.skips is not None:
        set_field(model, "skips", _skips(model))
    if model.adds_again:
        _check_added_again(model)
    if model.streams is not None:
        model.streams.check(model)
    if model.per_layer_embedding is not None:
        model.per_layer_embedding.check(model)
    if model.laurel is not None:
        model.laurel.check(model)
    for number, values in enumerate(model.value_sources, 1):
        if values is not None:
            values.check(model, number)
    _check_biases(model)
    if model.encoder is not None and model.encoder.encoder is not None:
        raise domain_error("encoder", "a model with an encoder", "a model without one")


def _check_shared(model: Transformer) -> None:
    """Raise DomainError if layers differ, or are not covered by `moments.layers.shared`."""
    if model.norm != "post" or model.normalization not in ("layernorm", "rmsnorm"):
        raise domain_error(
            "shared_layers", True, "False but for norm='post' and a LayerNorm or RMSNorm"
        )
    usual = {field.name: field.default for field in dataclasses.fields(model)}
    plain = (
        "causal gated rotary alibi relative_bias qk_norm logit_softcap attention_sink window "
        "attention_gate mixer ffn encoder skip_scale branch_scale layer_scale layernorm_scaling "
        "norm_gain norm_groups parallel identity_attention streams input_mix skips values "
        "per_layer_embedding laurel"
    )
    for name in plain.split():
        value = getattr(model, name)
        if value != usual[name]:
            raise domain_error(name, value, f"{usual[name]!r} where layers share their weights")
    distinct = {
        (model.layer_weights(n), model.temperatures[n - 1]) for n in range(1, model.layers + 1)
    }
    if len(distinct) > 1 or model.kv_heads != model.heads:
        name = "weights" if model.kv_heads == model.heads else "kv_heads"
        allowed = "the same in all layers, and as many as heads, where layers share their weights"
        raise domain_error(name, getattr(model, name), allowed)


def _skips(model: Transformer) -> tuple[tuple[int, float] | None, ...]:
    """The checked `skips`: for every layer None, or an earlier layer and a finite factor."""
    allowed = f"None, or a pair (n, w) of a layer before (0 to l - 1), per layer ({model.layers})"
    skips = model.skips
    if not isinstance(skips, list | tuple) or len(skips) != model.layers:
        raise domain_error("skips", skips, allowed)
    result: list[tuple[int, float] | None] = []
    for number, skip in enumerate(skips):
        pair = isinstance(skip, list | tuple) and len(skip) == 2
        if skip is not None and not (pair and skip[0] in range(number + 1)):
            raise domain_error(f"skips of layer {number + 1}", skip, allowed)
        result.append(skip and (int(skip[0]), check_number("skips", skip[1], REAL)))
    return tuple(result)


def _check_added_again(model: Transformer) -> None:
    """Check `input_mix` and `skips`, and other fields together with them.

    The coefficient of the input of layer 1 in every layer's input must not vanish.
    """
    allowed = f"a pair (r, s), or one per layer ({model.layers}), of r > 0 and finite s"
    if model.input_mix is not None:
        try:
            pairs = np.asarray(model.input_mix, dtype=float)
        except (TypeError, ValueError):
            raise domain_error("input_mix", model.input_mix, allowed) from None
        fits = pairs.shape in ((2,), (model.layers, 2)) and np.all(np.isfinite(pairs))
        if not fits or np.any(pairs[..., 0] <= 0):
            raise domain_error("input_mix", model.input_mix, allowed)
        plain = pairs.tolist()
        set_field(model, "input_mix", tuple(map(tuple, plain)) if pairs.ndim == 2 else tuple(plain))
    field = "skips" if model.input_mix is None else "input_mix"
    if model.norm not in ("pre", "sandwich"):
        raise domain_error("norm", model.norm, f"'pre' or 'sandwich' with {field}")
    excluded = {
        "encoder": model.encoder is not None,
        "streams": model.streams is not None,
        "skip_scale": bool(np.any(model.skip_scales != 1.0)),
        "layernorm_scaling": model.layernorm_scaling == "after-residual",
    }
    for name in (name for name, present in excluded.items() if present):
        default = type(model).__dataclass_fields__[name].default
        raise domain_error(name, getattr(model, name), f"{default!r} with {field}")
    coefficients = [1.0]
    for keep, added in model.additions:
        earlier = sum(factor * coefficients[point] for point, factor in added.items())
        coefficients.append(keep * coefficients[-1] + earlier)
        if abs(coefficients[-1]) < 1e-9:
            remedy = "what a layer holds of the input would be none"
            raise domain_error(field, getattr(model, field), "other factors", remedy)


def _check_biases(model: Transformer) -> None:
    """Raise DomainError if a model with other blocks declares a bias of a matrix that no layer
    has."""
    if model.biases is None or not any((*model.mixers, *model.ffns)):
        return
    known = {name.removeprefix("cross_") for name in model.matrix_shapes}
    known |= set() if model.gated else {"gate"}
    for name, value in vars(model.biases).items():
        if value is not None and np.any(value) and name not in known:
            remedy = f"no layer has a matrix {name!r}, but {', '.join(sorted(known))}"
            raise domain_error(f"biases.{name}", value, "None", remedy)


def _check_unread(model: Transformer) -> None:
    """Raise DomainError if fields of attention are set, but blocks replace it in all layers."""
    known = (*RECURRENT, LawBlock, Absent)
    if model.encoder is not None or not all(isinstance(one, known) for one in model.mixers):
        return
    declared = {
        "alibi": model.alibi is not False,
        "relative_bias": model.relative_bias is not None,
        "qk_norm": model.qk_norm is not None,
        "logit_softcap": model.logit_softcap is not None,
        "attention_sink": any(one is not None for one in model.attention_sinks),
        "attention_gate": model.attention_gate is not None,
        "window": any(one is not None for one in model.windows),
        "rotary": any(one is not None for one in model.rotaries),
        "temperature": bool(np.any(model.temperatures != 1.0)),
        "kv_heads": model.kv_heads not in (None, model.heads),
        "attention_dropout": bool(model.attention_dropout)
        and "attention_dropout" not in model._defaulted,
    }
    for name in (name for name, present in declared.items() if present):
        remedy = "no layer has attention, which alone reads it"
        raise domain_error(name, getattr(model, name), "left out together with this mixer", remedy)


def _check_alibi(name: str, value: Any) -> bool | float:
    """True, False, or a factor of the slopes."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    return check_number(name, value, NONNEGATIVE, "pass True, or what multiplies its slopes")
