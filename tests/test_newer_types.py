"""Types read over earlier ones' blocks: defaults, entries, sides, and the real small modules."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import OF_BLOCKS, READERS
from moments.model.huggingface.newer import READERS as NEWER
from moments.model.huggingface.sizes import sized_config

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from moments.torch.huggingface_modules import build_module  # noqa: E402

KINDS = sorted(NEWER)
LENGTH, WIDTH = 16, 64
TWO = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
_EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_EXPERTS |= {"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "moe_topk": 2}
_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "v_head_dim": 16}
_LATENT |= {"qk_rope_head_dim": 8, "num_key_value_heads": 4}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4}
_DELTA |= {"linear_num_value_heads": 8}
OWN: dict[str, dict[str, Any]] = {
    "exaone_moe": {"layer_types": TWO},
    "granitemoe_swa": {"layer_types": TWO, "layer_rope_theta": [10000.0, 0.0]}
    | {"attention_multiplier": 0.15, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "deepseek_v32": {"n_group": 2, "topk_group": 1},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "intermediate_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mellum": {"layer_types": TWO, "mlp_layer_types": ["dense", "sparse"]},
    "mistral4": {"n_group": 2, "topk_group": 1},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}


def config_of(kind: str) -> dict[str, Any]:
    config, defaults = (
        sized_config(kind, 2, WIDTH, vocab_size=150, seq_len=32),
        READERS[kind].defaults,
    )
    given = _EXPERTS | _DELTA | (_LATENT if "kv_lora_rank" in defaults else {})
    config |= {name: value for name, value in given.items() if name in defaults}
    if "sliding_window" in defaults:
        config["sliding_window"] = 6
    return config | {"initializer_range": 0.1} | OWN.get(kind, {})


def read(config: Any, **options: Any) -> tuple[moments.Transformer, list[str]]:
    """The declaration, and what is said of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = moments.from_huggingface(config, **options)
    return model, [str(one.message) for one in caught if one.category is ValidityWarning]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    assert kind in OF_BLOCKS
    needed = {"layer_types": ["conv"] * 32} if kind == "lfm2_moe" else {}
    config = transformers.AutoConfig.for_model(kind, **needed).to_dict()
    config.pop("tie_word_embeddings", None)  # of the whole model where that reads pictures too
    assert read({"model_type": kind} | needed, seq_len=16)[0].replace(head=None) == read(
        config, seq_len=16
    )[0].replace(head=None)
    model, said = read(config_of(kind) | {"spectral_gate": 3})
    assert any("spectral_gate = 3 is not modelled" in one for one in said)
    assert model == read(config_of(kind))[0]


# By kind or for all; what is not here and no flag or number has no second value
SECOND: dict[str, Any] = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "layer_rope_theta": [10.0, 0.0],
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["sparse"] * 2,
    "mlp_only_layers": [0],
    "rope_parameters": {"rope_theta": 10.0, "full_attention": {"rope_theta": 10.0}},
    "pad_token_id": 5,
}
# Read beside another entry alone, or a second name of one
SPARED = {
    *((kind, "max_window_layers") for kind in KINDS),
    *((kind, "use_sliding_window") for kind in KINDS),
    *((kind, "num_local_experts") for kind in ("flex_olmo", "hunyuan_v1_moe")),
    *((kind, "topk_group") for kind in KINDS),
    ("exaone_moe", "sliding_window_pattern"),
    ("granitemoe_swa", "rope_parameters"),  # of layers whose bases have a list
    ("internlm3", "num_key_value_heads"),
    *((kind, "head_dim") for kind in KINDS if "kv_lora_rank" in READERS[kind].defaults),
    *((kind, "first_k_dense_replace") for kind in ("mellum",)),
    *((kind, "intermediate_size") for kind in KINDS),  # where every layer has experts
    *((kind, "num_hidden_layers") for kind in OWN),  # as many as their lists say
    *((kind, "index_topk") for kind in KINDS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    config = config_of(kind)
    first, said = read(config)
    for entry, usual in (READERS[kind].defaults | config).items():
        if (kind, entry) in SPARED or READERS[kind].usual.get(entry) is ...:
            continue
        if entry in SECOND:
            other = SECOND[entry]
        elif isinstance(usual, bool):
            other = not usual
        elif isinstance(usual, int | float):
            other = 2 * usual or 1
        else:
            continue
        if config.get(entry) == other or entry in ("bos_token_id", "eos_token_id"):
            continue
        try:
            second, more = read(config | {entry: other})
        except DomainError:
            continue
        assert second != first or more != said, entry


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2_moe", "mistral4", "exaone_moe"])
def test_moments_are_those_of_the_module(kind: str) -> None:
    """The stream, its tokens' correlation, the loss and the sum of all squared gradients."""
    config, ids = config_of(kind), np.random.default_rng(0).integers(4, 60, (2, LENGTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        model = moments.from_huggingface(config, seq_len=LENGTH)
        p = moments.predict(model, token_ids=ids, tokens=True)
    drawn: list[list[float]] = []
    for seed in range(10):
        module, row = build_module(config, seed=seed), list[float]()

        def keep(_: Any, __: Any, out: Any, row: list[float] = row) -> None:
            x = (out[0] if isinstance(out, tuple) else out).detach()
            square = float(x.square().mean())
            pairs = float(x.sum(1).square().mean()) - LENGTH * square
            row.extend((square, pairs / (LENGTH * (LENGTH - 1)) / square))

        for layer in module.model.layers:
            layer.register_forward_hook(keep)
        text = torch.as_tensor(ids)
        loss = module(input_ids=text, labels=text).loss
        loss.backward()
        total = sum(
            float(one.grad.double().square().sum())
            for one in module.parameters()
            if one.grad is not None
        )
        drawn.append([*row, float(loss.detach()), total])
    values = np.array(drawn)
    mean, error = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
    predicted = np.array(
        [x for n in (1, 2) for x in (p.variance[n], p.correlation[n])]
        + [p.loss, p.weight_gradients().squared_norm.sum()]
    )
    allowed = np.array([0.02, 0.0, 0.02, 0.0, 0.005, 0.05]) * mean
    allowed[[1, 3]] = 0.015
    assert np.all(np.abs(predicted - mean) < allowed + 2.5 * error), (
        predicted / mean,
        error / mean,
    )


def test_configs_whose_entries_stand_elsewhere() -> None:
    """Text entries beside the others', types named by their class, layers that differ."""
    text = config_of("qwen2_5_vl_text")
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {"depth": 2}}
    flat = text | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}
    flat |= {"image_token_id": 3, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (one, said), (other, _) = read(flat), read(nested)
    assert one == other
    assert [word for word in said if "not modelled" in word] == []
    kimi = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    model, said = read(kimi, seq_len=16)
    assert model.layers == 61
    assert any("'kimi_k2' is read as 'deepseek_v3'" in word for word in said)
    hunyuan = config_of("hunyuan_v1_moe")
    assert read(hunyuan | {"moe_topk": [2, 2]})[0] == read(hunyuan)[0]
    with pytest.raises(DomainError, match="the same number in every layer"):
        moments.from_huggingface(hunyuan | {"moe_topk": [2, 1]})
    long = {"model_type": "deepseek_v32", "index_topk": 64}
    assert any("index_topk = 64" in word for word in read(long, seq_len=65)[1])
    assert not any("index_topk" in word for word in read(long, seq_len=64)[1])


def test_minimax_by_its_authors_names() -> None:
    factors = {"full": "full_attention", "linear": "linear_attention"}
    old: dict[str, Any] = {"attn_type_list": [0, 0, 1], "layernorm_mlp_alpha": 3.0}
    new: dict[str, Any] = {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    new["mlp_alpha_factor"] = 3.0
    for short, name in factors.items():
        old |= {f"layernorm_{name}_alpha": 2.0, f"layernorm_{name}_beta": 0.5}
        new |= {f"{short}_attn_alpha_factor": 2.0, f"{short}_attn_beta_factor": 0.5}
    config = {"model_type": "minimax", "num_hidden_layers": 3}
    (one, said), (other, _) = (read(config | given, seq_len=16) for given in (old, new))
    assert one == other
    assert said == []


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "qwen3_moe"])
def test_scaled_positions_are_those_of_transformers(kind: str) -> None:
    """Llama 3's and YaRN's frequencies and factor, in types that had them left out."""
    config = sized_config(kind, 1, WIDTH, seq_len=64)
    for given in (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ):
        entries = config | {"rope_parameters": given | {"rope_theta": 1e4}}
        model, said = read(entries)
        assert said == []
        settings = transformers.CONFIG_MAPPING[kind](
            **{k: v for k, v in entries.items() if k != "model_type"}
        )
        rope = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[given["rope_type"]]
        speeds, factor = rope(settings, device="cpu")
        np.testing.assert_allclose(model.rotary.speeds, speeds.numpy(), rtol=1e-5)
        assert model.temperature == pytest.approx(float(factor) ** -2)


def test_a_type_with_large_experts_is_refused_at_once() -> None:
    """Samples of its parameters are small in every axis; they took gigabytes before."""
    from moments.torch.from_config import squares_drawn

    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=256, hidden_size=2048, moe_intermediate_size=1024
    )
    with torch.device("meta"):
        module = transformers.Qwen3MoeForCausalLM(config)
    squares = squares_drawn(module)
    assert max(p.numel() for p in module.parameters()) <= 2**17
    experts = [value for name, value in squares.items() if "experts" in name]
    np.testing.assert_allclose(experts, 4e-4, rtol=0.05)
