"""Named architectures: published sizes, as their config entries."""

from __future__ import annotations

from typing import Any

from ..errors import unknown_name
from .huggingface.config import from_huggingface
from .transformer import Transformer

Config = dict[str, Any]


def _sized(kind: str, *names: str, **common: Any) -> Any:
    """A maker of configs of one family, whose positional arguments are these entries."""

    def config(*values: Any, **more: Any) -> Config:
        return {"model_type": kind} | common | dict(zip(names, values, strict=True)) | more

    return config


_FOUR = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_GQA = (*_FOUR, "num_key_value_heads")
_bert = _sized("bert", *_FOUR)
_roberta = _sized(
    "roberta",
    *_FOUR,
    vocab_size=50265,
    max_position_embeddings=514,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
)
_gpt2 = _sized("gpt2", "n_layer", "n_embd", "n_head")
_opt = _sized("opt", "num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim")
_pythia = _sized("gpt_neox", *_FOUR, "vocab_size", rotary_pct=0.25)
_bloom = _sized("bloom", "n_layer", "hidden_size", "n_head")
_llama = _sized("llama", *_FOUR)
_ROPE_LLAMA = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE_LLAMA |= {"original_max_position_embeddings": 8192}
_ROPE_OLMO = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
_ROPE_OLMO |= {"original_max_position_embeddings": 8192}
_ROPE_OLMO |= {"attention_factor": 1.2079441541679836}
_llama2 = _sized("llama", *_GQA, rms_norm_eps=1e-5, max_position_embeddings=4096)
_qwen2 = _sized("qwen2", *_GQA, "vocab_size", rope_theta=1e6, max_position_embeddings=131072)
_qwen3 = _sized(
    "qwen3", *_GQA, head_dim=128, vocab_size=151936, rope_theta=1e6, max_position_embeddings=40960
)
_olmo = _sized("", *_GQA, rope_theta=5e5, rms_norm_eps=1e-6, pad_token_id=100277)
_OLMO_2 = {"model_type": "olmo2", "vocab_size": 100352, "max_position_embeddings": 4096}
_OLMO_3 = {"model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536}
_OLMO_3 |= {"sliding_window": 4096, "rope_scaling": _ROPE_OLMO}
_gemma3 = _sized(
    "gemma3_text", *_GQA, "sliding_window", "max_position_embeddings", "vocab_size", head_dim=256
)
_t5 = _sized("t5", "num_layers", "d_model", "num_heads", "d_ff")
_vit = _sized("vit", *_FOUR, num_labels=1000)


def _neo(layers: int, d_model: int, heads: int) -> Config:
    return {
        "model_type": "gpt_neo",
        "num_layers": layers,
        "hidden_size": d_model,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
    }


_CONFIGS: dict[str, Config] = {
    "bert-tiny": _bert(2, 128, 2, 512),
    "bert-mini": _bert(4, 256, 4, 1024),
    "bert-small": _bert(4, 512, 8, 2048),
    "bert-medium": _bert(8, 512, 8, 2048),
    "bert-base": _bert(12, 768, 12, 3072),
    "bert-large": _bert(24, 1024, 16, 4096),
    "roberta-base": _roberta(12, 768, 12, 3072),
    "roberta-large": _roberta(24, 1024, 16, 4096),
    "distilbert-base": {"model_type": "distilbert"},
    "electra-base": {"model_type": "electra", "embedding_size": 768, "hidden_size": 768}
    | {"num_attention_heads": 12, "intermediate_size": 3072},
    "distilgpt2": _gpt2(6, 768, 12),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt-neo-125m": _neo(12, 768, 12),
    "gpt-neo-1.3b": _neo(24, 2048, 16),
    "gpt-neo-2.7b": _neo(32, 2560, 20),
    "opt-125m": _opt(12, 768, 12, 3072),
    "opt-1.3b": _opt(24, 2048, 32, 8192),
    "opt-2.7b": _opt(32, 2560, 32, 10240),
    "opt-6.7b": _opt(32, 4096, 32, 16384),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b1": _bloom(30, 4096, 32),
    "pythia-70m": _pythia(6, 512, 8, 2048, 50304),
    "pythia-160m": _pythia(12, 768, 12, 3072, 50304),
    "pythia-410m": _pythia(24, 1024, 16, 4096, 50304),
    "pythia-1b": _pythia(16, 2048, 8, 8192, 50304),
    "pythia-1.4b": _pythia(24, 2048, 16, 8192, 50304),
    "pythia-2.8b": _pythia(32, 2560, 32, 10240, 50304),
    "pythia-6.9b": _pythia(32, 4096, 32, 16384, 50432),
    "gpt-neox-20b": _pythia(44, 6144, 64, 24576, 50432, hidden_act="gelu_fast"),
    "gpt-j-6b": {"model_type": "gptj"},
    "falcon-7b": {"model_type": "falcon"},
    "llama-7b": _llama(32, 4096, 32, 11008),
    "llama-13b": _llama(40, 5120, 40, 13824),
    "llama-2-7b": _llama2(32, 4096, 32, 11008, 32),
    "llama-2-13b": _llama2(40, 5120, 40, 13824, 40),
    "llama-2-70b": _llama2(80, 8192, 64, 28672, 8),
    "llama-3-8b": _llama2(
        32, 4096, 32, 14336, 8, vocab_size=128256, rope_theta=5e5, max_position_embeddings=8192
    ),
    "llama-3.2-1b": _llama2(
        16, 2048, 32, 8192, 8, vocab_size=128256, rope_theta=5e5, max_position_embeddings=131072
    )
    | {"tie_word_embeddings": True, "rope_scaling": _ROPE_LLAMA | {"factor": 32.0}},
    "tinyllama-1.1b": _llama2(22, 2048, 32, 5632, 4, max_position_embeddings=2048),
    "mistral-7b": {"model_type": "mistral", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
    "qwen2-0.5b": _qwen2(24, 896, 14, 4864, 2, 151936, tie_word_embeddings=True),
    "qwen2-1.5b": _qwen2(28, 1536, 12, 8960, 2, 151936, tie_word_embeddings=True),
    "qwen2-7b": _qwen2(28, 3584, 28, 18944, 4, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, 8),
    "qwen3-30b-a3b": _sized("qwen3_moe", *_GQA)(48, 2048, 32, 6144, 4)
    | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"moe_intermediate_size": 768, "vocab_size": 151936, "rope_theta": 1e6}
    | {"max_position_embeddings": 40960},
    "mixtral-8x7b": {"model_type": "mixtral", "rope_theta": 1e6, "max_position_embeddings": 32768},
    "olmo-2-1b": _olmo(16, 2048, 16, 8192, 16) | _OLMO_2,
    "olmo-2-7b": _olmo(32, 4096, 32, 11008, 32) | _OLMO_2,
    "olmo-3-7b": _olmo(32, 4096, 32, 11008, 32) | _OLMO_3,
    "smollm3-3b": {"model_type": "smollm3", "rope_theta": 5e6, "tie_word_embeddings": True}
    | {"max_position_embeddings": 65536, "use_sliding_window": False},
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "gemma-2b": _sized("gemma", *_GQA)(18, 2048, 8, 16384, 1),
    "gemma-7b": {"model_type": "gemma"},
    "gemma-2-2b": {"model_type": "gemma2"},
    "gemma-3-1b": _gemma3(26, 1152, 4, 6912, 1, 512, 32768, 262144),
    "gemma-3-4b": _gemma3(34, 2560, 8, 10240, 4, 1024, 131072, 262208),
    "phi-1.5": {"model_type": "phi"},
    "phi-2": _sized("phi", *_FOUR)(32, 2560, 32, 10240, partial_rotary_factor=0.4, resid_pdrop=0.1),
    "t5-small": _t5(6, 512, 8, 2048),
    "t5-base": _t5(12, 768, 12, 3072),
    "t5-large": _t5(24, 1024, 16, 4096),
    "vit-base": _vit(12, 768, 12, 3072),
    "vit-large": _vit(24, 1024, 16, 4096),
}


class _Presets:
    """Callable collection of named architectures."""

    def __call__(self, name: str, *, seq_len: int | None = None) -> Transformer:
        """The architecture of that name.

        Args:
            name: one of `preset.names()`.
            seq_len: tokens per sequence; None: the most its config allows. A model of images has
                as many as its patches and its class token.

        Raises:
            DomainError: no preset of that name.
        """
        return from_huggingface(self.config(name), seq_len=seq_len).replace(name=name)

    def names(self) -> tuple[str, ...]:
        """Every preset's name."""
        return tuple(_CONFIGS)

    def config(self, name: str) -> Config:
        """The Hugging Face config entries behind a preset."""
        if not isinstance(name, str) or name not in _CONFIGS:
            raise unknown_name("preset", name, _CONFIGS)
        return dict(_CONFIGS[name])

    def __repr__(self) -> str:
        return f"moments.preset(name), name one of {', '.join(_CONFIGS)}"


preset = _Presets()
