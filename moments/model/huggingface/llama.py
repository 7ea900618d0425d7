"""Llama and its relatives: sequential Pre-LN decoders with rotary positions, mostly gated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import domain_error
from ..mixers import RECURRENT, Absent
from ..positions import Rotary
from ..transformer import Transformer
from ..weights import Biases
from .entries import FULL, SLIDING, Entries
from .family import Reader, declared

_OF_ATTENTION = (
    *("attention_dropout", "attention_gate", "kv_heads", "qk_norm", "rotary", "temperature"),
    "window",
)
"""Fields without effect in a stack that has no attention layer."""


def _decoder(
    read: Entries,
    seq_len: int | None,
    *,
    biased: tuple[str, ...] = ("attention_bias",),
    **changes: Any,
) -> Transformer:
    """Declare Llama; `changes` are the fields of `declared` in which a related family differs.

    `biased` names those of attention_bias and mlp_bias that the module implements.
    """
    heads = read.count("num_attention_heads")
    defaults: dict[str, Callable[[], Any]] = {
        "biases": lambda: read.biases(_biased(read, biased)),
        "kv_heads": lambda: read("num_key_value_heads", heads),
        "d_head": lambda: head_width(read),
    }
    fields: dict[str, Any] = {"normalization": "rmsnorm", "gated": True, "dropout": 0.0}
    if "rotary" not in changes:
        positions, temperature = positions_of(read), changes.get("temperature", 1.0)
        fields |= positions
        changes["temperature"] = temperature * positions["temperature"]
    fields |= {name: value() for name, value in defaults.items() if name not in changes} | changes
    mixers = changes.get("mixer")
    no_attention = (*RECURRENT, Absent)
    if isinstance(mixers, tuple | list) and all(isinstance(m, no_attention) for m in mixers):
        fields = {name: value for name, value in fields.items() if name not in _OF_ATTENTION}
        read("attention_dropout", None)
        fields["attention_dropout"] = None
    return declared(
        read,
        seq_len,
        table=False,
        embedding={"padding_id": read.padding()} | fields.pop("embedding", {}),
        **fields,
    )


INWARD = ("query", "key", "value")
FFN = ("ffn_in", "ffn_out", "gate")
_BIASED = {"attention_bias": (*INWARD, "output"), "mlp_bias": FFN}
_BOTH = tuple(_BIASED)


def _biased(read: Entries, entries: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(matrix for e in entries if read.flag(e, False) for matrix in _BIASED[e])


def _length(read: Entries, seq_len: int | None) -> int:
    return read.length("max_position_embeddings", seq_len, table=False)


def head_width(read: Entries) -> int:
    """Width of an attention head."""
    return read.count("head_dim", read.count("hidden_size") // read.count("num_attention_heads"))


def _llama(read: Entries, seq_len: int | None) -> Transformer:
    return _decoder(read, seq_len, biased=_BOTH)


def _mistral(read: Entries, seq_len: int | None) -> Transformer:
    window = read.window("sliding_window", _length(read, seq_len))
    return _decoder(read, seq_len, biased=(), window=window)


def _qwen2(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """Query, key and value have biases, the output projection has none."""
    window = _qwen_windows(read, seq_len)
    return _decoder(read, seq_len, window=window, biases=read.biases(INWARD), **changes)


def _qwen3(read: Entries, seq_len: int | None) -> Transformer:
    return _decoder(read, seq_len, window=_qwen_windows(read, seq_len), qk_norm="rmsnorm")


def _qwen_windows(read: Entries, seq_len: int | None) -> Any:
    """Windows from layer max_window_layers on, if use_sliding_window is set."""
    layers, first = read.layers("num_hidden_layers"), read("max_window_layers")
    used = read.flag("use_sliding_window")
    usual = [SLIDING if used and number >= first else FULL for number in range(layers)]
    return sliding(read, seq_len, read.kinds(usual))


def sliding(read: Entries, seq_len: int | None, kinds: Sequence[str]) -> Any:
    """Attention window of every layer, given their types; full layers have None."""
    return read.windows(kinds, SLIDING, "sliding_window", _length(read, seq_len))


def _gemma(read: Entries, seq_len: int | None) -> Transformer:
    """Token rows times sqrt(d_model); gains are 1 + w with w = 0, which are gains of 1.

    The first releases have "gelu", but the module computes the tanh form. Of the two entries for
    the activation, transformers 5 reads only `hidden_act`.
    """
    read.expect("use_bidirectional_attention", None, "a causal mask is assumed")
    name, other = "hidden_act", "hidden_activation"
    given = {
        entry: read.activation(entry) for entry in (name, other) if read(entry, None) is not None
    }
    given = {entry: "gelu_tanh" if a == "gelu" else a for entry, a in given.items()}
    if given.get(other, given[name]) != given[name]:
        read.leave_out(other, read(other), "hidden_act says the activation since transformers 5")
    return _decoder(
        read,
        seq_len,
        activation=given[name],
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
    )


def _gemma2(read: Entries, seq_len: int | None, norm: str = "sandwich") -> Transformer:
    """Norms before and after every block, windows in every second layer, capped logits."""
    read.expect("use_bidirectional_attention", None, "a causal mask is assumed")
    layers = range(read.layers("num_hidden_layers"))
    return _decoder(
        read,
        seq_len,
        norm=norm,
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
        head={"logit_softcap": read.cap("final_logit_softcapping")},
        logit_softcap=read.cap("attn_logit_softcapping"),
        temperature=math.sqrt(read.positive("query_pre_attn_scalar") / head_width(read)),
        window=sliding(read, seq_len, read.kinds([FULL if n % 2 else SLIDING for n in layers])),
    )


# --- further relatives: Phi-3, StarCoder2, StableLM, OLMo, Cohere, Granite ------------------------


def _longrope(read: Entries, width: int, length: int) -> dict[str, Any]:
    """LongRoPE: rotary positions with one frequency divisor per pair of features, and the logit
    temperature that follows from the factor on cosines and sines.

    That factor a scales only the rotated fraction f of queries and keys, so the variance of the
    logits is f a^4 + 1 - f times as large. Approximation: its rotated fraction is still taken as f.

    Source:
        Ding et al. 2024, LongRoPE, section 3; factors as in transformers.
    """
    given, plain = read.rope(), read.rotary(scaled=("longrope",))
    if given.get("rope_type", given.get("type")) != "longrope":
        return {"rotary": plain}
    extended = read.count("max_position_embeddings")
    original = read.count("original_max_position_embeddings", extended)
    name = "long_factor" if length > original else "short_factor"
    factors, pairs = given.get(name), int(plain.fraction * width) // 2
    numbers = list(factors) if isinstance(factors, list | tuple) else []
    if len(numbers) != pairs or not all(isinstance(x, int | float) and x > 0 for x in numbers):
        raise domain_error(name, factors, f"{pairs} positive numbers")
    ratio = extended / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    factor = given.get("attention_factor") or usual
    if not isinstance(factor, int | float) or factor <= 0:
        raise domain_error("attention_factor", factor, "a positive number")
    speeds = tuple(plain.base ** (-m / pairs) / float(x) for m, x in enumerate(numbers))
    logit_variance = plain.fraction * factor**4 + 1 - plain.fraction
    return {"rotary": plain.replace(speeds=speeds), "temperature": 1 / math.sqrt(logit_variance)}


SCALED = ("linear", "llama3", "yarn")
"""Scaling types that change each rotary frequency as a function of that frequency alone."""


def positions_of(read: Entries) -> dict[str, Any]:
    """Rotary positions with the config's scaling, and the logit temperature that follows from the
    scaling's factor on the rotated features."""
    given, plain = read.rope() or read.usual("rope_parameters"), read.rotary(scaled=SCALED)
    rotary, factor = slowed(read, given, plain, round(plain.fraction * head_width(read)))
    logit_variance = plain.fraction * factor**4 + 1 - plain.fraction
    return {"rotary": rotary, "temperature": logit_variance**-0.5}


def yarn(read: Entries, width: int) -> tuple[Rotary, float]:
    """Rotary positions of `width` features, and the factor on cosines and sines."""
    given = read.rope() or read.usual("rope_parameters")
    return slowed(read, given, read.rotary(scaled=SCALED), width)


def slowed(
    read: Entries, given: Mapping[str, Any], plain: Rotary, width: int
) -> tuple[Rotary, float]:
    """Apply the scaling in the rotary entries `given` to the positions `plain`.

    Returns:
        The positions, and the factor on cosines and sines.

    Source:
        Peng et al. 2023, YaRN, section 3; boundaries and factor, and all of Llama 3's, as in
        transformers.
    """
    kind = given.get("rope_type", given.get("type"))
    if kind not in SCALED:
        return plain, 1.0

    def number(name: str, default: float | None = None) -> float:
        value = given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise domain_error(f"rope_parameters.{name}", value, "a positive number")
        return float(value)

    speeds = [plain.base ** (-2 * index / width) for index in range(width // 2)]
    if kind == "linear":
        factor = number("factor")
        return plain.replace(speeds=tuple(speed / factor for speed in speeds)), 1.0
    extended, name = read.count("max_position_embeddings"), "original_max_position_embeddings"
    original = number(name, read(name, extended))
    factor = number("factor", extended / original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")

        def unscaled(speed: float) -> float:
            turns = original * speed / (2 * math.pi)
            return min(max((turns - low) / (high - low), 0.0), 1.0)

        shares, usual = [unscaled(speed) for speed in speeds], 1.0
    else:
        if plain.base <= 1:
            raise domain_error("rope_theta", plain.base, "above 1")

        def pair(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

        low, high = pair(number("beta_fast", 32.0)), pair(number("beta_slow", 1.0))
        if given.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high += 0.001 if low == high else 0.0
        shares = [1 - min(max((n - low) / (high - low), 0.0), 1.0) for n in range(len(speeds))]

        def size(share: float) -> float:
            return 0.1 * share * math.log(factor) + 1.0 if factor > 1.0 else 1.0

        usual = size(1.0)
        if given.get("mscale") and given.get("mscale_all_dim"):
            usual = size(number("mscale")) / size(number("mscale_all_dim"))
        usual = number("attention_factor", usual)
    scaled = [speed * (s + (1 - s) / factor) for speed, s in zip(speeds, shares, strict=True)]
    return plain.replace(speeds=tuple(scaled)), usual


def _phi3(read: Entries, seq_len: int | None) -> Transformer:
    return _decoder(
        read,
        seq_len,
        biased=(),
        **_longrope(read, head_width(read), _length(read, seq_len)),
        dropout=read.number("resid_pdrop"),
        window=read.window("sliding_window", _length(read, seq_len)),
        embedding={"dropout": 0.0},
    )


def _starcoder2(read: Entries, seq_len: int | None) -> Transformer:
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        gated=False,
        dropout=read.number("residual_dropout"),
        biases=Biases() if read.flag("use_bias") else None,
        window=read.window("sliding_window", _length(read, seq_len)),
    )


def _stablelm(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm; dropout only on the output of the feed-forward block."""
    read.refuse("qk_layernorm", False, "a norm with gains of its own for every head")
    width = read.count("hidden_size") // read.count("num_attention_heads")
    read.refuse("head_dim", width, "a width of heads that its module does not follow")
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        ffn_dropout=read.number("hidden_dropout"),
        parallel=read.flag("use_parallel_residual"),
        biases=read.biases(INWARD if read.flag("use_qkv_bias") else ()),
    )


def _olmo(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm without gains or biases; the module hard-codes its epsilon."""
    unclipped(read)
    return _decoder(read, seq_len, normalization="layernorm", epsilon=1e-5, norm_affine=False)


def unclipped(read: Entries) -> None:
    """Note that queries, keys and values would be clipped."""
    if (clip := read("clip_qkv", None)) is not None:
        read.leave_out("clip_qkv", clip, "queries, keys and values are not clipped")


def _cohere(read: Entries, seq_len: int | None) -> Transformer:
    """Parallel blocks behind one LayerNorm without bias; logits times a constant."""
    read.refuse("use_qk_norm", False, "a norm with gains of its own for every head")
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        norm_bias=False,
        parallel=True,
        head={"output_scale": read.number("logit_scale")},
    )


def _granite(
    read: Entries, seq_len: int | None, biased: tuple[str, ...] = _BOTH, **changes: Any
) -> Transformer:
    """Llama with multipliers on the embedding, attention logits, residual branches and logits."""
    scale = read.positive("attention_multiplier") * math.sqrt(head_width(read))
    return _decoder(
        read,
        seq_len,
        biased=biased,
        temperature=1 / scale,
        branch_scale=read.number("residual_multiplier"),
        embedding={"scale": read.number("embedding_multiplier")},
        head={"output_scale": 1 / read.positive("logits_scaling")},
        **changes,
    )


READERS: dict[str, Reader] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "olmo": _olmo,
    "cohere": _cohere,
    "granite": _granite,
}
