"""Types that are read from their config alone, each against the real module at a small size.

Draws of transformers' own initialisation on one text: the stream's variances, the loss, and the
squared gradient of every parameter, whose names are translated here.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import FAMILIES, OF_BLOCKS, READERS
from moments.model.huggingface.latent import READERS as LATENT
from moments.model.huggingface.sizes import sized_config

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from moments.torch.huggingface_modules import build_module  # noqa: E402

LENGTH, DRAWS = 20, 16
_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 12}
_LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 48}
SMALL: dict[str, dict[str, Any]] = {
    "minicpm3": _LATENT | {"dim_model_base": 32},
    "youtu": _LATENT,
    "deepseek_v2": _LATENT
    | _EXPERTS
    | {"num_experts_per_tok": 2, "initializer_range": 0.12}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": _LATENT
    | _EXPERTS
    | {"initializer_range": 0.12, "first_k_dense_replace": 1}
    | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "glm4_moe_lite": _LATENT | _EXPERTS | {"initializer_range": 0.12, "num_experts_per_tok": 2},
    "longcat_flash": _LATENT
    | {"n_routed_experts": 8, "expert_ffn_hidden_size": 48, "zero_expert_num": 4, "moe_topk": 2}
    | {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8, "ffn_hidden_size": 96},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.12}
    | {"sliding_window": 6, "intermediate_size": 96},
    "apertus": {"initializer_range": 0.1, "num_key_value_heads": 2},
    "granite_swa": {"num_key_value_heads": 2, "sliding_window": 6, "initializer_range": 0.1}
    | {"attention_multiplier": 0.15, "logits_scaling": 2.0, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.7, "layer_rope_theta": [10000.0, 0.0]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "minicpm3": {"q_lora_rank": None, "scale_depth": None, "scale_emb": 2},
    "youtu": {"tie_word_embeddings": False, "initializer_range": 0.12, "hidden_act": "gelu"},
    "granite_swa": {"layer_types": ["sliding_attention", "full_attention"]}
    | {"attention_bias": True, "mlp_bias": True},
}
KINDS = sorted(LATENT)
# Softmax over all experts without renormalising takes ten seconds to tabulate; two layers in one
# are compared in test_identity_experts
CASES = [(kind, "") for kind in KINDS if kind not in ("deepseek_v2", "longcat_flash")] + [
    (kind, "variant") for kind in VARIANTS
]
EACH = pytest.mark.parametrize(
    ("kind", "variant"), CASES, ids=["-".join(filter(None, case)) for case in CASES]
)
# What parameters of modules are called here
ROLES = {
    "embed_tokens": ("token",),
    "lm_head": ("head",),
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("output",),
    "q_a_proj": ("query_down",),
    "q_b_proj": ("query",),
    "kv_a_proj_with_mqa": ("kv_down",),
    "kv_b_proj": ("key", "value"),
    "sinks": ("attention_sink",),
    "gate_up_proj": ("gate", "ffn_in"),
    "gate_up_proj_bias": ("gate.bias", "ffn_in.bias"),
    "down_proj_bias": ("ffn_out.bias",),
    "gate": ("router",),
    "router": ("router",),
    "gate_proj": ("gate",),
    "up_proj": ("ffn_in",),
    "down_proj": ("ffn_out",),
    "q_a_layernorm": ("attention.query_latent.gain",),
    "kv_a_layernorm": ("attention.kv_latent.gain",),
    "input_layernorm": ("attention.norm.gain",),
    "post_attention_layernorm": ("ffn.norm.gain",),
    "norm": ("final.norm.gain",),
    "attention_layernorm": ("attention.norm.gain",),
    "feedforward_layernorm": ("ffn.norm.gain",),
    "q_norm": ("query.norm.gain",),
    "k_norm": ("key.norm.gain",),
}


def config_of(kind: str, variant: str = "") -> dict[str, Any]:
    config = sized_config(kind, 2, 64, vocab_size=150, seq_len=32) | SMALL[kind]
    return config | (VARIANTS[kind] if variant else {})


def quiet(config: Any, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return moments.from_huggingface(config, **options)


@functools.cache
def text() -> np.ndarray:
    return np.random.default_rng(0).integers(4, 60, (1, LENGTH))


def roles_of(name: str) -> tuple[int, tuple[str, ...]]:
    """Layer and roles of a parameter."""
    layer = re.search(r"layers\.(\d+)\.", name)
    parts = name.split(".")
    bias = ".bias" if parts[-1] == "bias" else ""
    part = parts[-1] if parts[-1] in ROLES else parts[-2]
    shared = "shared_" if "shared_experts" in parts else ""
    roles = tuple(f"{shared}{role}{bias}" for role in ROLES[part])
    return int(layer[1]) + 1 if layer else -1, roles


@functools.cache
def drawn(kind: str, variant: str) -> dict[str, np.ndarray]:
    """(draws, ...) of the stream's variances, the loss and the gradients by layer and roles."""
    ids = torch.as_tensor(text())
    found: dict[Any, list[Any]] = {}
    for seed in range(DRAWS):
        module, stream = build_module(config_of(kind, variant), seed=seed), []
        for layer in module.model.layers:
            layer.register_forward_hook(
                lambda _, __, out, s=stream: s.append(
                    float((out[0] if isinstance(out, tuple) else out).detach().square().mean())
                )
            )
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        found.setdefault("stream", []).append(stream)
        found.setdefault("loss", []).append(float(loss.detach()))
        for name, parameter in module.named_parameters():
            if name.endswith(("alpha_p", "alpha_n")):
                continue  # of an activation: the table has no row for it
            square = float(parameter.grad.double().square().sum())
            found.setdefault(roles_of(name), []).append(square)
    return {name: np.array(values) for name, values in found.items()}


def mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5


@pytest.mark.slow
@EACH
def test_moments_and_gradients_are_those_of_the_module(kind: str, variant: str) -> None:
    model, measured = quiet(config_of(kind, variant), seq_len=LENGTH), drawn(kind, variant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        p = moments.predict(model, token_ids=text(), tokens=True)
    stream, error = mean(measured["stream"])
    assert np.all(np.abs(p.variance[1:] / stream - 1) < 0.02 + 2 * error / stream)
    loss, error = mean(measured["loss"])
    assert abs(p.loss / loss - 1) < 0.005 + 2 * error / loss
    rows = p.weight_gradients().set_index(["layer", "weight"]).squared_norm
    for place, values in measured.items():
        if isinstance(place, str):
            continue
        layer, roles = place
        if layer < 0:
            layer = 0 if roles == ("token",) else 3
        expected = sum(rows[layer, role] for role in roles)
        value, error = mean(values)
        if any(role.startswith("key.bias") for role in roles) and value < 1e-12:
            assert expected < 1e-9 * rows.sum()
            continue
        small = 0.2 if roles == ("attention_sink",) else 0.08
        assert abs(expected / value - 1) < small + 2.5 * error / value, place


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    given = {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}  # which its class lacks
    config = transformers.AutoConfig.for_model(kind, **given)
    assert quiet({"model_type": kind} | given) == quiet(config)
    assert kind in OF_BLOCKS
    assert kind not in FAMILIES
    with pytest.warns(ValidityWarning, match=r"spectral_gate = 3 is not modelled: no entry of"):
        moments.from_huggingface(config_of(kind) | {"spectral_gate": 3})


SECOND = {
    "attention_bias": True,
    "attention_dropout": 0.3,
    "attention_multiplier": 0.3,
    "dim_model_base": 64,
    "embedding_initializer_range": 0.3,
    "embedding_multiplier": 5.0,
    "first_k_dense_replace": 2,
    "hidden_act": "relu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 80,
    "kv_lora_rank": 20,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "moe_topk": 1,
    "num_layers": 3,
    "zero_expert_num": 2,
    "layer_rope_theta": [0.0, 0.0],
    "layer_types": ["full_attention", "full_attention"],
    "logits_scaling": 3.0,
    "input_jitter_noise": 0.1,
    "max_position_embeddings": 16,
    "mlp_layer_types": ["sparse", "sparse"],
    "moe_intermediate_size": 24,
    "n_group": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "output_router_logits": True,
    "routed_scaling_factor": 3.0,
    "router_jitter_noise": 0.1,
    "swiglu_alpha": 1.0,
    "swiglu_limit": 2.0,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "mlp_bias": True,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 8,
    "head_dim": 8,
    "pad_token_id": 5,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "residual_multiplier": 0.3,
    "rms_norm_eps": 0.05,
    "rope_parameters": {"rope_theta": 10.0},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0},
    "rope_theta": 10.0,
    "scale_depth": 2.0,
    "scale_emb": 3,
    "sliding_window": 4,
    "tie_word_embeddings": False,
    "v_head_dim": 8,
    "vocab_size": 90,
}
# Read where another entry asks for it, or made of others by the config's class
SPARED = {
    ("minicpm3", "original_max_position_embeddings"),
    *((kind, "original_max_position_embeddings") for kind in ("gpt_oss", "apertus")),
    ("minicpm3", "head_dim"),
    ("longcat_flash", "head_dim"),
    ("deepseek_v3", "topk_method"),  # the second values here are their own
    *((kind, "head_dim") for kind in ("youtu", "glm4_moe_lite", "deepseek_v2", "deepseek_v3")),
    *((kind, "num_experts") for kind in ("deepseek_v2",)),  # a second name, of which one is given
    *((kind, "num_local_experts") for kind in ("glm4_moe_lite", "deepseek_v3")),
    *((kind, name) for kind in ("deepseek_v2",) for name in ("n_group", "topk_group")),
    *((kind, "norm_topk_prob") for kind in ("deepseek_v2",)),  # which its module does not read
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    config = {k: v for k, v in config_of(kind).items() if k != "layer_rope_theta"}
    first = quiet(config)
    for entry in sorted(READERS[kind].entries(config)):
        if (kind, entry) in SPARED or READERS[kind].usual.get(entry) is ...:
            continue
        if entry not in SECOND:
            assert entry not in READERS[kind].defaults, entry
            continue
        usual = READERS[kind].defaults.get(entry)
        other = not usual if isinstance(usual, bool) else SECOND[entry]
        changed, refusal = config | {entry: other}, ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                second = moments.from_huggingface(changed)
            except DomainError as error:
                refusal = str(error)
        name = "rope_type" if entry == "rope_scaling" else entry
        said = any(f"{name} = " in str(w.message) for w in caught)
        assert f"{entry} = " in refusal or second != first or said, entry
