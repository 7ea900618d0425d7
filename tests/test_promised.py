"""Checks of modules whose layers are not alike, by what their config declares."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import moments

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import moments.torch as torch_door  # noqa: E402
from moments.torch.open_check import NEAR  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def experts(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES))


def checked(module: Any) -> moments.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return moments.check(module)


@pytest.mark.slow
def test_experts_beside_a_shared_one_are_held_to_their_config() -> None:
    report = checked(experts())
    assert report.healthy, report.text()
    assert report.comparison is not None
    points = report.comparison.points()
    assert set(points["layer"]) == {0, 1, 2}
    assert (points["deviations"].abs() < 4).all()
    assert "config promises" in report.scheme
    assert "1 sequence of 32 tokens" in report.read


def test_a_matrix_of_another_variance_is_named() -> None:
    module = experts(1)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.mul_(3)
    (finding,) = [f for f in checked(module).findings if f.kind == "wrong variance"]
    assert finding.where == ("model.layers.*.self_attn.o_proj.weight",)
    assert finding.measured == pytest.approx(9 * 0.02**2, rel=2 * NEAR)
    assert finding.expected == pytest.approx(0.02**2, rel=NEAR)


@pytest.mark.parametrize(
    "spoiled",
    [
        ("model.layers.*.mamba.in_proj.weight", "mul", 0.5),
        ("model.layers.*.mamba.D", "mul", 2.0),
        ("model.layers.*.mamba.dt_bias", "fill", 3.0),
        ("model.embed_tokens.weight", "mul", 3.0),
    ],
)
def test_a_parameter_that_is_drawn_otherwise_is_named_whatever_its_role(
    spoiled: tuple[str, str, float],
) -> None:
    """What a variance should be is the class's word, not any variance that some matrix has."""
    pattern, how, number = spoiled
    sizes = SIZES | {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
    sizes |= {"mamba_n_groups": 1, "attn_layer_indices": [1], "num_key_value_heads": 2}
    torch.manual_seed(5)
    module = transformers.BambaForCausalLM(transformers.BambaConfig(**sizes))
    assert "wrong variance" not in {f.kind for f in checked(module).findings}
    head, _, tail = pattern.partition("*")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(head) and name.endswith(tail):
                parameter.mul_(number) if how == "mul" else parameter.fill_(number)
    (finding,) = [f for f in checked(module).findings if f.kind == "wrong variance"]
    assert [name.replace(".0.", ".*.") for name in finding.where] == [pattern]


def test_a_block_that_is_scaled_is_seen_in_the_stream() -> None:
    module = experts(2)
    block = module.model.layers[0].self_attn
    block.register_forward_hook(lambda part, given, output: (8 * output[0], *output[1:]))
    kinds = {f.kind: f for f in checked(module).findings}
    assert "not what its config gives" in kinds
    assert kinds["not what its config gives"].layers == (1,)


def test_one_odd_layer_is_named() -> None:
    module = experts(3)
    with torch.no_grad():
        module.model.layers[1].self_attn.v_proj.weight.mul_(0.25)
    named = {name for f in checked(module).findings for name in f.where}
    assert any("v_proj" in name for name in named)


def test_two_inputs_of_one_module_leave_it_to_its_text() -> None:
    """Both towers have two layers; ids reach one of them."""
    text = SIZES | {"layer_types": ["full_attention"] * 2, "head_dim": 32}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=vision | {"out_hidden_size": 128}
    )
    torch.manual_seed(0)
    module = transformers.AutoModelForImageTextToText.from_config(config)
    report = checked(module)
    assert report.healthy, report.text()


def test_entries_that_are_not_modelled_are_named_and_make_no_finding() -> None:
    """Llama 4 in chunks shorter than the text, which its declaration attends to whole."""
    sizes = SIZES | {"intermediate_size_mlp": 256, "num_experts_per_tok": 1}
    sizes |= {"num_local_experts": sizes.pop("num_experts")}
    config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=8)
    torch.manual_seed(0)
    report = checked(transformers.Llama4ForCausalLM(config))
    assert report.healthy, report.text()
    assert any("attention_chunk_size = 8 is not modelled" in note for note in report.notes)


def test_a_matrix_of_zeros_is_named() -> None:
    module = experts(4)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    (finding,) = [f for f in checked(module).findings if f.kind == "wrong variance"]
    assert finding.where == ("model.layers.*.self_attn.o_proj.weight",)
    assert finding.measured == 0.0


def test_a_description_falls_back_on_the_config() -> None:
    module = experts(5)
    described = torch_door.describe(module)
    assert described.model is not None
    assert described.model.layers == 2
    assert described.model.ffn is not None
    assert any("that of its config" in note for note in described.notes)
    assert any(phrase.startswith("its layers: ") for phrase in described.unplaced)
    frame = described.to_frame().set_index("parameter")
    assert set(frame.index) == {name for name, _ in module.named_parameters()}
    gate = "model.layers.1.mlp.gate.weight"
    square = float(module.get_parameter(gate).detach().double().square().mean())
    assert frame.loc[gate, "variance"] == pytest.approx(square)
