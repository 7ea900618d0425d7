"""Dense decoders read as variations of Llama, and earlier ones as variations of GPT-2 and GPT-J.

Tests compare these readers with `moments.torch.from_config`, which reads the computation of the
families' modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...formulas.checks import check_count
from ..positions import Rotary
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import FULL, SLIDING, Entries
from .family import Reader, declared
from .gpt import _gpt2
from .llama import (
    _BOTH,
    FFN,
    INWARD,
    _decoder,
    head_width,
    positions_of,
    sliding,
    slowed,
    unclipped,
)
from .parallel import _gptj


def _kinds(read: Entries, full_every: int | None, pattern: str | None = None) -> list[str]:
    """Layer types; by default every `full_every`-th (None: each) is full, the rest have windows;
    `pattern` names an entry that replaces `full_every`."""
    layers = read.layers("num_hidden_layers")
    period = None if pattern is None else read(pattern, None)
    every = period if isinstance(period, int) else full_every
    usual = [SLIDING if every and (n + 1) % every else FULL for n in range(layers)]
    return read.kinds(usual)


def _by_type(
    read: Entries, full: float, sliding: float, local: str, everywhere: str = "rope_theta"
) -> dict[str, tuple[Any, Any]]:
    """Rotary positions and logit temperature by layer type, from one set of entries for each.

    Args:
        full, sliding: default bases of full and of windowed layers.
        local, everywhere: earlier entry names for the bases of windowed and of full layers.
    """
    nested = read.inside("rope_parameters")
    given = {kind: dict(nested(kind, {})) for kind in (FULL, SLIDING)}
    given[FULL] |= read("rope_scaling", {}) if read.has("rope_scaling") else {}
    given[FULL].setdefault("rope_theta", read(everywhere, full))
    given[SLIDING].setdefault("rope_theta", read(local, sliding))
    positions, width = {}, head_width(read)
    for kind, values in given.items():
        scaling = values.get("rope_type", values.get("type", "default"))
        base = Entries(values, f"{read.kind}.{kind}", {}).number("rope_theta")
        rotary, factor = slowed(read, values, Rotary(base=base), width)
        if scaling != "default" and rotary.speeds is None:
            read.leave_out("rope_type", scaling, "unscaled rotary frequencies are assumed")
        positions[kind] = rotary, factor**-2
    return positions


def _positions_per_layer(
    positions: dict[str, tuple[Any, Any]], kinds: Sequence[str]
) -> dict[str, Any]:
    """Fields "rotary" and "temperature" for layers of these types, from `_by_type`."""
    temperatures = [positions[kind][1] for kind in kinds]
    uniform = len(set(temperatures)) == 1
    return {
        "rotary": [positions[kind][0] for kind in kinds],
        "temperature": temperatures[0] if uniform else temperatures,
    }


def _arcee(read: Entries, seq_len: int | None) -> Transformer:
    """No gate, ReLU squared."""
    return _decoder(read, seq_len, biased=_BOTH, gated=False)


def _ernie4_5(read: Entries, seq_len: int | None) -> Transformer:
    biases = Biases() if read.flag("use_bias") else None
    return _decoder(read, seq_len, biases=biases, attention_dropout=0.0)


def _ministral(read: Entries, seq_len: int | None) -> Transformer:
    layers = read.layers("num_hidden_layers")
    kinds = read.kinds([FULL if read.null("sliding_window") else SLIDING] * layers)
    window = sliding(read, seq_len, kinds)
    return _decoder(read, seq_len, biased=(), window=window)


def _seed_oss(read: Entries, seq_len: int | None) -> Transformer:
    """Separate entries for the biases of query, key and value and for that of the output."""
    biased: tuple[str, ...] = INWARD if read.flag("attention_bias") else ()
    biased += ("output",) if read.flag("attention_out_bias") else ()
    biased += FFN if read.flag("mlp_bias", False) else ()
    dropout = read.number("residual_dropout")
    return _decoder(read, seq_len, biases=read.biases(biased), dropout=dropout)


def _glm(
    read: Entries, seq_len: int | None, biased: bool | None = None, **changes: Any
) -> Transformer:
    """Half of every head's features rotated; no bias on the output projection."""
    biased = read.flag("attention_bias") if biased is None else biased
    return _decoder(read, seq_len, biases=read.biases(INWARD if biased else ()), **changes)


def _glm4(read: Entries, seq_len: int | None) -> Transformer:
    """Norms before and after every block."""
    return _glm(read, seq_len, norm="sandwich")


def _helium(read: Entries, seq_len: int | None) -> Transformer:
    """No bias on the output projection."""
    biased: tuple[str, ...] = INWARD if read.flag("attention_bias") else ()
    biased += FFN if read.flag("mlp_bias", False) else ()
    return _decoder(read, seq_len, biases=read.biases(biased))


def _hunyuan(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """Queries and keys normalised; `alpha` scales the rotary base at every length."""
    given, width = read.rope(), head_width(read)
    rotary = read.rotary(scaled=("dynamic",))
    if given.get("type", given.get("rope_type")) == "dynamic" and given.get("alpha"):
        stretch = float(given["alpha"]) ** (width / (width - 2))
        rotary = rotary.replace(base=rotary.base * stretch)
    read.expect("use_qk_norm", True, "queries and keys are normalised")
    return _decoder(read, seq_len, rotary=rotary, qk_norm="rmsnorm", **changes)


def _nemotron(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm that multiplies by 1 + gain, with gains of 1; no gate, ReLU squared."""
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        biased=_BOTH,
        gated=False,
        norm_gain=2.0,
        head={"norm_gain": 2.0},
    )


def _nanochat(read: Entries, seq_len: int | None) -> Transformer:
    """Norms without gains, also on the embedding; output projections' variance over 2 layers."""
    variance = read.variance()
    output = variance / (2 * read.layers("num_hidden_layers"))
    return _decoder(
        read,
        seq_len,
        gated=False,
        norm_affine=False,
        qk_norm="rmsnorm",
        weights=Weights.normal(variance).replace(output=output),
        embedding={"norm": True, "norm_epsilon": read.number("rms_norm_eps")},
        head={"logit_softcap": read.cap("final_logit_softcapping")},
    )


def _olmo2(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """Norms only on block outputs; one norm over the queries, and keys, of all heads."""
    unclipped(read)
    return _decoder(read, seq_len, norm="output", qk_norm="rmsnorm-all", **changes)


def _olmo3(read: Entries, seq_len: int | None) -> Transformer:
    kinds = _kinds(read, 4)
    positions = _by_type(read, 500000.0, 500000.0, "rope_local_base_freq")
    window = sliding(read, seq_len, kinds)
    return _olmo2(read, seq_len, window=window, **_positions_per_layer(positions, kinds))


def _exaone4(
    read: Entries, seq_len: int | None, norm: str = "output", **changes: Any
) -> Transformer:
    """Norms on block outputs; if any layers have windows, only these are rotary."""
    all_full = read.null("sliding_window")
    pattern = None if all_full else "sliding_window_pattern"
    kinds = _kinds(read, None if all_full else 4, pattern)
    read.read.add("sliding_window_pattern")
    positions = positions_of(read)
    rotary = [positions["rotary"] if all_full or kind == SLIDING else None for kind in kinds]
    window = sliding(read, seq_len, kinds)
    fields: dict[str, Any] = positions | {"rotary": rotary, "window": window} | changes
    return _decoder(read, seq_len, biased=(), norm=norm, qk_norm="rmsnorm", **fields)


def _smollm3(read: Entries, seq_len: int | None) -> Transformer:
    """No rotation in every fourth layer, by default."""
    layers, every = read.layers("num_hidden_layers"), read.count("no_rope_layer_interval")
    usual = [int((n + 1) % every != 0) for n in range(layers)]
    flags = read.several("no_rope_layers", 0, layers) or usual
    used = read.flag("use_sliding_window")
    kinds = read.kinds([FULL if flag or not used else SLIDING for flag in flags])
    positions = positions_of(read)
    rotary = [positions["rotary"] if flag else None for flag in flags]
    fields: dict[str, Any] = positions | {"rotary": rotary, "window": sliding(read, seq_len, kinds)}
    return _decoder(read, seq_len, biased=_BOTH, **fields)


def _cohere2(read: Entries, seq_len: int | None) -> Transformer:
    """Parallel blocks after one LayerNorm without bias; only windowed layers are rotary."""
    kinds = _kinds(read, 4, "sliding_window_pattern")
    rotary = read.rotary()
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        norm_bias=False,
        parallel=True,
        rotary=[rotary if kind == SLIDING else None for kind in kinds],
        window=sliding(read, seq_len, kinds),
        head={"output_scale": read.number("logit_scale")},
    )


def _gemma3(read: Entries, seq_len: int | None) -> Transformer:
    """Gemma 2 with normalised queries and keys, and a separate rotary base for windowed layers."""
    read.refuse("use_bidirectional_attention", False, "attention without a causal mask")
    kinds = _kinds(read, 6, "sliding_window_pattern")
    read.read.add("_sliding_window_pattern")  # in configs of transformers, beside `layer_types`
    fields = _positions_per_layer(_by_type(read, 1e6, 1e4, "rope_local_base_freq"), kinds)
    scalar = math.sqrt(read.positive("query_pre_attn_scalar") / head_width(read))
    fields["temperature"] = (scalar * np.asarray(fields["temperature"])).tolist()
    return _decoder(
        read,
        seq_len,
        norm="sandwich",
        qk_norm="rmsnorm",
        window=sliding(read, seq_len, kinds),
        logit_softcap=read.cap("attn_logit_softcapping", None),
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
        head={"logit_softcap": read.cap("final_logit_softcapping", None)},
        **fields,
    )


# --- decoders of 2018 to 2023, read as GPT-2, GPT-J and OPT with a few changes -------------------


def _gpt_bigcode(read: Entries, seq_len: int | None) -> Transformer:
    """GPT-2 with multi-query attention."""
    model = _gpt2(read, seq_len)
    return model.replace(kv_heads=1) if read.flag("multi_query") else model


def _openai_gpt(read: Entries, seq_len: int | None) -> Transformer:
    """Post-LN without norms of the embedding or before the head; "gelu" is the tanh form."""
    activation = read.activation("afn")
    return declared(
        read,
        seq_len,
        norm="post",
        activation="gelu_tanh" if activation == "gelu" else activation,
        embedding={"position_variance": read.variance()},
        head={"norm": False},
    )


def _ctrl(read: Entries, seq_len: int | None) -> Transformer:
    """Sinusoidal positions, token rows times sqrt(d_model), no attention dropout; the module
    hard-codes the epsilon of all norms but the last."""
    epsilon = 1e-6
    read.expect("layer_norm_epsilon", epsilon, "the last norm has the others' epsilon")
    return declared(
        read,
        seq_len,
        epsilon=epsilon,
        attention_dropout=0.0,
        embedding={"positions": "sinusoidal", "scale": math.sqrt(read.count("n_embd"))},
        head={"bias": True},
    )


def _neox_japanese(read: Entries, seq_len: int | None) -> Transformer:
    """Sequential, without biases; the last layer's attention bias is not modelled."""
    return declared(
        read,
        seq_len,
        table=False,
        d_ff=read.count("intermediate_multiple_size") * read.count("hidden_size"),
        biases=None,
        rotary=read.rotary("rotary_emb_base", "rotary_pct"),
    )


def _mpt(read: Entries, seq_len: int | None) -> Transformer:
    """ALiBi, no biases anywhere; attn_pdrop is the dropout of block outputs and of attention."""
    given = read.inside("attn_config")
    d_model, heads = read.count("d_model"), read.count("n_heads")
    usual = math.sqrt(heads / d_model)
    return declared(
        read,
        seq_len,
        activation="gelu",
        dropout=given.number("attn_pdrop", 0.0),
        temperature=usual / given.positive("softmax_scale", usual),
        norm_bias=False,
        biases=None,
        alibi=True,
    )


def _persimmon(read: Entries, seq_len: int | None) -> Transformer:
    """Queries and keys normalised; no dropout on attention's output."""
    return declared(
        read,
        seq_len,
        table=False,
        dropout=0.0,
        ffn_dropout=read.number("hidden_dropout"),
        rotary=read.rotary(),
        qk_norm="layernorm" if read.flag("qk_layernorm") else None,
    )


def spread_base(d_model: int) -> float:
    """Base of sinusoidal positions with lowest frequency 1/10000, as in tensor2tensor."""
    half = check_count("d_model", d_model, least=4) // 2
    return float(10000 ** (half / (half - 1)))


def _biogpt(read: Entries, seq_len: int | None, **embedding: Any) -> Transformer:
    """Pre-LN as in fairseq: token rows times sqrt(d_model), torch's default LayerNorm epsilon."""
    scaled, learned = read.flag("scale_embedding"), "positions" not in embedding
    read.without("layerdrop", "no whole layer is dropped")
    return declared(
        read,
        seq_len,
        table=learned,
        epsilon=1e-5,
        activation_dropout=read.number("activation_dropout"),
        embedding={
            "position_variance": read.variance() if learned else 0.0,
            "scale": math.sqrt(read.count(read.called("width"))) if scaled else 1.0,
            "padding_id": read.padding(),
            "dropout": read.number(read.called("dropout")),
        }
        | embedding,
    )


def _xglm(read: Entries, seq_len: int | None) -> Transformer:
    base = spread_base(read.count("d_model"))
    return _biogpt(read, seq_len, positions="sinusoidal", position_base=base)


EARLIER: dict[str, Reader] = {
    "biogpt": _biogpt,
    "codegen": _gptj,
    "ctrl": _ctrl,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox_japanese": _neox_japanese,
    "mpt": _mpt,
    "openai-gpt": _openai_gpt,
    "persimmon": _persimmon,
    "xglm": _xglm,
}
READERS: dict[str, Reader] = EARLIER | {
    "arcee": _arcee,
    "cohere2": _cohere2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "ministral": _ministral,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
