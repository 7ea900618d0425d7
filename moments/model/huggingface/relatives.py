"""Dense decoders that the readers of Llama, and earlier ones that those of GPT-2 and GPT-J, read
with a few changes.

A module of theirs is read by what it computes (`moments.torch.from_config`), which is what these
readers are held against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...formulas.checks import check_count
from ..positions import Rotary
from ..transformer import Transformer
from ..weights import Weights
from .entries import FULL, SLIDING, Entries
from .family import Family, causal_head, declared
from .gpt import _gpt2
from .llama import _BOTH, _decoder, _length, slowed, yarn
from .parallel import _gptj

_INWARD = ("query", "key", "value")
_ALL = ("query", "key", "value", "output", "ffn_in", "ffn_out", "gate")


def _head_width(read: Entries) -> int:
    return read.count("head_dim", read.count("hidden_size") // read.count("num_attention_heads"))


def _turned(read: Entries) -> dict[str, Any]:
    """Positions, scaled where the config says so, and the temperature that their factor gives."""
    rotary, factor = yarn(read, _head_width(read))
    return {"rotary": rotary, "temperature": factor**-2}


def _kinds(read: Entries, full_every: int | None, pattern: str | None = None) -> list[str]:
    """Kinds of layers: every so many-th is full, the others see a window; None: all are full."""
    layers = read.layers("num_hidden_layers")
    said = None if pattern is None else read(pattern, None)
    every = said if isinstance(said, int) else full_every
    usual = [SLIDING if every and (n + 1) % every else FULL for n in range(layers)]
    return read.kinds(usual)


def _windows(read: Entries, kinds: Sequence[str], seq_len: int | None) -> Any:
    return read.windows(kinds, SLIDING, "sliding_window", _length(read, seq_len))


def _by_type(
    read: Entries, full: float, sliding: float, local: str, everywhere: str = "rope_theta"
) -> dict[str, tuple[Any, Any]]:
    """Positions of full layers and of those with windows, which have entries of their own.

    Args:
        full, sliding: their usual bases.
        local, everywhere: the older entries for the second and for the first.
    """
    nested = read.inside("rope_parameters")
    given = {kind: dict(nested(kind, {})) for kind in (FULL, SLIDING)}
    given[FULL] |= read("rope_scaling", {}) if read.has("rope_scaling") else {}
    given[FULL].setdefault("rope_theta", read(everywhere, full))
    given[SLIDING].setdefault("rope_theta", read(local, sliding))
    found, width = {}, _head_width(read)
    for kind, one in given.items():
        named = one.get("rope_type", one.get("type", "default"))
        base = Entries(one, f"{read.kind}.{kind}", {}).number("rope_theta")
        rotary, factor = slowed(read, one, Rotary(base=base), width)
        if named != "default" and rotary.speeds is None:
            read.leave_out("rope_type", named, "unscaled rotary frequencies are assumed")
        found[kind] = rotary, factor**-2
    return found


def _of_kinds(found: dict[str, tuple[Any, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    temperatures = [found[kind][1] for kind in kinds]
    alike = len(set(temperatures)) == 1
    return {
        "rotary": [found[kind][0] for kind in kinds],
        "temperature": temperatures[0] if alike else temperatures,
    }


def _arcee(read: Entries, seq_len: int | None) -> Transformer:
    """No gate, ReLU squared."""
    return _decoder(read, seq_len, biased=_BOTH, gated=False, **_turned(read))


def _ernie4_5(read: Entries, seq_len: int | None) -> Transformer:
    biased = _ALL if read.flag("use_bias") else ()
    return _decoder(
        read, seq_len, biases=read.biases(biased), attention_dropout=0.0, **_turned(read)
    )


def _ministral(read: Entries, seq_len: int | None) -> Transformer:
    layers = read.layers("num_hidden_layers")
    kinds = read.kinds([FULL if read.null("sliding_window") else SLIDING] * layers)
    window = _windows(read, kinds, seq_len)
    return _decoder(read, seq_len, biased=(), window=window, **_turned(read))


def _seed_oss(read: Entries, seq_len: int | None) -> Transformer:
    """Biases of queries, keys and values, and by another entry of the output."""
    biased: tuple[str, ...] = _INWARD if read.flag("attention_bias") else ()
    biased += ("output",) if read.flag("attention_out_bias") else ()
    biased += ("ffn_in", "ffn_out", "gate") if read.flag("mlp_bias", False) else ()
    dropout = read.number("residual_dropout")
    return _decoder(read, seq_len, biases=read.biases(biased), dropout=dropout, **_turned(read))


def _glm(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """Half of every head's features turned; no bias on the output."""
    biased = _INWARD if read.flag("attention_bias") else ()
    return _decoder(read, seq_len, biases=read.biases(biased), **changes)


def _glm4(read: Entries, seq_len: int | None) -> Transformer:
    """Norms behind every block too."""
    return _glm(read, seq_len, norm="sandwich")


def _helium(read: Entries, seq_len: int | None) -> Transformer:
    """No bias on the output."""
    biased: tuple[str, ...] = _INWARD if read.flag("attention_bias") else ()
    biased += ("ffn_in", "ffn_out", "gate") if read.flag("mlp_bias", False) else ()
    return _decoder(read, seq_len, biases=read.biases(biased), **_turned(read))


def _hunyuan(read: Entries, seq_len: int | None) -> Transformer:
    """Queries and keys normalised; a fixed factor stretches the positions' base."""
    given, width = read.rope(), _head_width(read)
    rotary = read.rotary(scaled=("dynamic",))
    if given.get("type", given.get("rope_type")) == "dynamic" and given.get("alpha"):
        stretch = float(given["alpha"]) ** (width / (width - 2))
        rotary = rotary.replace(base=rotary.base * stretch)
    read.expect("use_qk_norm", True, "queries and keys are normalised")
    return _decoder(read, seq_len, rotary=rotary, qk_norm="rmsnorm")


def _nemotron(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm whose gains count from 1 and start at 1; no gate, ReLU squared."""
    head = causal_head(read, read.variance(), read.number("norm_eps"))
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        epsilon="norm_eps",
        biased=_BOTH,
        gated=False,
        norm_gain=2.0,
        head=head.replace(norm_gain=2.0),
    )


def _nanochat(read: Entries, seq_len: int | None) -> Transformer:
    """Norms without gains, one of the embedding too; outputs of attention divided by depth."""
    variance, epsilon = read.variance(), read.number("rms_norm_eps")
    output = variance / (2 * read.layers("num_hidden_layers"))
    cap = read.cap("final_logit_softcapping")
    return _decoder(
        read,
        seq_len,
        gated=False,
        norm_affine=False,
        qk_norm="rmsnorm",
        weights=Weights.normal(variance).replace(output=output),
        embedding={"norm": True, "norm_epsilon": epsilon},
        head=causal_head(read, variance, epsilon, logit_softcap=cap),
    )


def _olmo2(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """Norms at every block's output alone, and of all heads' queries and keys together."""
    clip = read("clip_qkv", None)
    if clip is not None:
        read.leave_out("clip_qkv", clip, "queries, keys and values are not clipped")
    turned = changes if "rotary" in changes else _turned(read)
    return _decoder(read, seq_len, norm="output", qk_norm="rmsnorm-all", **({**turned, **changes}))


def _olmo3(read: Entries, seq_len: int | None) -> Transformer:
    kinds = _kinds(read, 4)
    found = _by_type(read, 500000.0, 500000.0, "rope_local_base_freq")
    window = _windows(read, kinds, seq_len)
    return _olmo2(read, seq_len, window=window, **_of_kinds(found, kinds))


def _exaone4(read: Entries, seq_len: int | None) -> Transformer:
    """Norms at outputs; where some layers have windows, only they have positions."""
    free = read.null("sliding_window")
    pattern = None if free else "sliding_window_pattern"
    kinds = _kinds(read, None if free else 4, pattern)
    read.read.add("sliding_window_pattern")
    turned = _turned(read)
    rotary = [turned["rotary"] if free or kind == SLIDING else None for kind in kinds]
    window = _windows(read, kinds, seq_len)
    fields: dict[str, Any] = turned | {"rotary": rotary, "window": window}
    return _decoder(read, seq_len, biased=(), norm="output", qk_norm="rmsnorm", **fields)


def _smollm3(read: Entries, seq_len: int | None) -> Transformer:
    """No positions in every fourth layer."""
    layers, every = read.layers("num_hidden_layers"), read.count("no_rope_layer_interval")
    usual = [int((n + 1) % every != 0) for n in range(layers)]
    flags = read.several("no_rope_layers", 0, layers) or usual
    used = read.flag("use_sliding_window")
    kinds = read.kinds([FULL if flag or not used else SLIDING for flag in flags])
    turned = _turned(read)
    rotary = [turned["rotary"] if flag else None for flag in flags]
    fields: dict[str, Any] = turned | {"rotary": rotary, "window": _windows(read, kinds, seq_len)}
    return _decoder(read, seq_len, biased=_BOTH, **fields)


def _cohere2(read: Entries, seq_len: int | None) -> Transformer:
    """Parallel blocks behind one LayerNorm without bias; positions in layers with windows alone."""
    kinds = _kinds(read, 4, "sliding_window_pattern")
    rotary, epsilon = read.rotary(), read.number("layer_norm_eps")
    scale = read.number("logit_scale")
    return _decoder(
        read,
        seq_len,
        normalization="layernorm",
        epsilon="layer_norm_eps",
        norm_bias=False,
        parallel=True,
        rotary=[rotary if kind == SLIDING else None for kind in kinds],
        window=_windows(read, kinds, seq_len),
        head=causal_head(read, read.variance(), epsilon, output_scale=scale),
    )


def _gemma3(read: Entries, seq_len: int | None) -> Transformer:
    """Gemma 2 with norms of queries and keys, and bases of their own in layers with windows."""
    read.refuse("use_bidirectional_attention", False, "attention without a causal mask")
    kinds, width = _kinds(read, 6, "sliding_window_pattern"), _head_width(read)
    fields = _of_kinds(_by_type(read, 1e6, 1e4, "rope_local_base_freq"), kinds)
    scalar = math.sqrt(read.positive("query_pre_attn_scalar") / width)
    cap = read.cap("final_logit_softcapping", None)
    fields["temperature"] = (scalar * np.asarray(fields["temperature"])).tolist()
    return _decoder(
        read,
        seq_len,
        activation=read.activation("hidden_activation"),
        norm="sandwich",
        qk_norm="rmsnorm",
        window=_windows(read, kinds, seq_len),
        logit_softcap=read.cap("attn_logit_softcapping", None),
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
        head=causal_head(read, read.variance(), read.number("rms_norm_eps"), logit_softcap=cap),
        **fields,
    )


# --- decoders of 2018 to 2023, read as GPT-2, GPT-J and OPT with a few changes -------------------

_GPT2_SHAPE = ("n_layer", "n_embd", "n_head")


def _gpt_bigcode(read: Entries, seq_len: int | None) -> Transformer:
    """GPT-2 with one head of keys and values."""
    model = _gpt2(read, seq_len)
    return model.replace(kv_heads=1) if read.flag("multi_query") else model


def _openai_gpt(read: Entries, seq_len: int | None) -> Transformer:
    """Post-LN, with neither a norm of the embedding nor a last one; "gelu" is the tanh form."""
    variance, activation = read.variance(), read.activation("afn")
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=_GPT2_SHAPE,
        seq_len=read.length("n_positions", seq_len),
        norm="post",
        activation="gelu_tanh" if activation == "gelu" else activation,
        dropout=read.number("resid_pdrop"),
        attention_dropout=read.number("attn_pdrop"),
        causal=True,
        embedding={"position_variance": variance, "dropout": read.number("embd_pdrop")},
        head=causal_head(read, variance, None),
    )


def _ctrl(read: Entries, seq_len: int | None) -> Transformer:
    """Sinusoidal positions, token rows times sqrt(d_model); attention weights are not dropped, and
    the epsilon of all norms but the last is written into the code."""
    epsilon, variance = 1e-6, read.variance()
    read.expect("layer_norm_epsilon", epsilon, "the last norm has the others' epsilon")
    return declared(
        read,
        epsilon,
        shape=_GPT2_SHAPE,
        seq_len=read.length("n_positions", seq_len),
        d_ff=read("dff"),
        dropout=read.number("resid_pdrop"),
        attention_dropout=0.0,
        causal=True,
        embedding={
            "positions": "sinusoidal",
            "scale": math.sqrt(read.count("n_embd")),
            "dropout": read.number("embd_pdrop"),
        },
        head=causal_head(read, variance, epsilon, bias=True),
    )


def _neox_japanese(read: Entries, seq_len: int | None) -> Transformer:
    """Sequential, without biases; the one that its last layer's attention has is left out."""
    return declared(
        read,
        read.number("layer_norm_eps"),
        seq_len=read.length("max_position_embeddings", seq_len, table=False),
        d_ff=read.count("intermediate_multiple_size") * read.count("hidden_size"),
        activation=read.activation("hidden_act"),
        dropout=read.number("hidden_dropout"),
        attention_dropout=read.number("attention_dropout"),
        biases=None,
        rotary=read.rotary("rotary_emb_base", "rotary_pct"),
    )


def _mpt(read: Entries, seq_len: int | None) -> Transformer:
    """ALiBi, neither biases nor those of norms; one probability of attn_config drops what blocks
    give and attention's weights."""
    given = read.inside("attn_config")
    for name, value in read("attn_config", {}).items():
        if name == "clip_qkv" and value is not None:
            read.leave_out(name, value, "queries, keys and values are not clipped")
        elif name in _MPT_ATTENTION and value != _MPT_ATTENTION[name]:
            read.leave_out(name, value, "its module does not read it")
    d_model, heads = read.count("d_model"), read.count("n_heads")
    usual = math.sqrt(heads / d_model)
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=("n_layers", "d_model", "n_heads"),
        seq_len=read.length("max_seq_len", seq_len),
        activation="gelu",
        dropout=given.number("attn_pdrop", 0.0),
        temperature=usual / given.positive("softmax_scale", usual),
        norm_bias=False,
        biases=None,
        alibi=True,
    )


def _persimmon(read: Entries, seq_len: int | None) -> Transformer:
    """Queries and keys normalised; what attention gives is not dropped."""
    return declared(
        read,
        read.number("layer_norm_eps"),
        seq_len=read.length("max_position_embeddings", seq_len, table=False),
        d_ff=read("intermediate_size"),
        activation=read.activation("hidden_act"),
        ffn_dropout=read.number("hidden_dropout"),
        attention_dropout=read.number("attention_dropout"),
        rotary=read.rotary(),
        qk_norm="layernorm" if read.flag("qk_layernorm") else None,
    )


def spread_base(d_model: int) -> float:
    """Base of sinusoidal positions whose slowest frequency is 1/10000, as in tensor2tensor."""
    half = check_count("d_model", d_model, least=4) // 2
    return float(10000 ** (half / (half - 1)))


def _scaled(
    read: Entries, seq_len: int | None, names: Mapping[str, str], **embedding: Any
) -> Transformer:
    """Pre-LN as in fairseq: token rows times sqrt(d_model), LayerNorm's own epsilon."""
    shape = (names["layers"], names["width"], names["heads"])
    scaled = read.flag("scale_embedding")
    variance, dropout = read.variance(names["variance"]), read.number(names["dropout"])
    layerdrop = read.number("layerdrop")
    if layerdrop:
        read.leave_out("layerdrop", layerdrop, "no whole layer is dropped")
    learned = "positions" not in embedding
    return declared(
        read,
        1e-5,
        variance=variance,
        shape=shape,
        seq_len=read.length("max_position_embeddings", seq_len, table=learned),
        d_ff=read(names["hidden"]),
        activation=read.activation(names["activation"]),
        dropout=dropout,
        attention_dropout=read.number(names["attention"]),
        activation_dropout=read.number("activation_dropout"),
        embedding={
            "position_variance": variance if learned else 0.0,
            "scale": math.sqrt(read.count(names["width"])) if scaled else 1.0,
            "padding_id": read.padding(),
            "dropout": dropout,
        }
        | embedding,
    )


def _biogpt(read: Entries, seq_len: int | None) -> Transformer:
    return _scaled(
        read,
        seq_len,
        {
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "hidden": "intermediate_size",
            "variance": "initializer_range",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention": "attention_probs_dropout_prob",
        },
    )


def _xglm(read: Entries, seq_len: int | None) -> Transformer:
    return _scaled(
        read,
        seq_len,
        {
            "layers": "num_layers",
            "width": "d_model",
            "heads": "attention_heads",
            "hidden": "ffn_dim",
            "variance": "init_std",
            "activation": "activation_function",
            "dropout": "dropout",
            "attention": "attention_dropout",
        },
        positions="sinusoidal",
        position_base=spread_base(read.count("d_model")),
    )


_MPT_ATTENTION = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
_BIGCODE = (
    "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner "
    "validate_runner_input pre_allocate_kv_cache max_sequence_length max_batch_size pad_key_length"
)
_MPT = {"learned_pos_emb": ..., "init_device": ..., "norm_type": ..., "no_bias": True}
_MPT |= {"expansion_ratio": 4, "resid_pdrop": ..., "emb_pdrop": ..., "logit_scale": None}
_MPT |= dict.fromkeys(("embedding_fraction", "verbose", "init_config", "tokenizer_name"), ...)
_JAPANESE = {"layer_norm_type": ..., "use_parallel_residual": ...}
_EARLIER = {
    "biogpt": Family(_biogpt, "BioGptForCausalLM", "causal", {"layer_norm_eps": ...}),
    "codegen": Family(
        _gptj, "CodeGenForCausalLM", "causal", {"n_ctx": ..., "scale_attn_weights": True}
    ),
    "ctrl": Family(
        _ctrl, "CTRLLMHeadModel", "causal", {"n_ctx": ..., "attn_pdrop": ..., "from_tf": ...}
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        "GPTBigCodeForCausalLM",
        "causal",
        # the class makes it of multi_query
        dict.fromkeys(_BIGCODE.split(), ...) | {"num_key_value_heads": ...},
    ),
    "gpt_neox_japanese": Family(_neox_japanese, "GPTNeoXJapaneseForCausalLM", "causal", _JAPANESE),
    "mpt": Family(_mpt, "MptForCausalLM", "causal", _MPT),
    "openai-gpt": Family(
        _openai_gpt,
        "OpenAIGPTLMHeadModel",
        "causal",
        {"n_ctx": ..., "n_special": ..., "predict_special_tokens": ...},
    ),
    "persimmon": Family(_persimmon, "PersimmonForCausalLM", "causal"),
    "xglm": Family(_xglm, "XGLMForCausalLM", "causal"),
}


_OLD: dict[str, dict[str, Any]] = {
    # Of earlier configs, which the modules do not read
    "cohere2": {
        "layer_switch": ...,
        "order_of_interleaved_layers": ...,
        "position_embedding_type": ...,
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
        "use_qk_norm": False,
        "cache_implementation": ...,
    },
    "gemma3_text": {"cache_implementation": ..., "rope_scaling": None},
    "smollm3": {"max_window_layers": ...},
    "hunyuan_v1_dense": {"eod_token_id": ...},
}
FAMILIES = _EARLIER | {
    kind: Family(read, module, "causal", _OLD.get(kind, {}))
    for kind, read, module in (
        ("arcee", _arcee, "ArceeForCausalLM"),
        ("cohere2", _cohere2, "Cohere2ForCausalLM"),
        ("ernie4_5", _ernie4_5, "Ernie4_5ForCausalLM"),
        ("exaone4", _exaone4, "Exaone4ForCausalLM"),
        ("gemma3_text", _gemma3, "Gemma3ForCausalLM"),
        ("glm", _glm, "GlmForCausalLM"),
        ("glm4", _glm4, "Glm4ForCausalLM"),
        ("helium", _helium, "HeliumForCausalLM"),
        ("hunyuan_v1_dense", _hunyuan, "HunYuanDenseV1ForCausalLM"),
        ("ministral", _ministral, "MinistralForCausalLM"),
        ("nanochat", _nanochat, "NanoChatForCausalLM"),
        ("nemotron", _nemotron, "NemotronForCausalLM"),
        ("olmo2", _olmo2, "Olmo2ForCausalLM"),
        ("olmo3", _olmo3, "Olmo3ForCausalLM"),
        ("seed_oss", _seed_oss, "SeedOssForCausalLM"),
        ("smollm3", _smollm3, "SmolLM3ForCausalLM"),
    )
}
