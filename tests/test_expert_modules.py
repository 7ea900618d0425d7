"""Modules with routed experts: roles of their parameters, audits, initialisation."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.model.huggingface.sizes import sized_config

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from moments.torch.anatomy import anatomy_of  # noqa: E402
from moments.torch.huggingface_modules import build_module  # noqa: E402
from moments.torch.roles import ModuleRoles, with_experts  # noqa: E402

SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
    | {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "llama4_text": {"intermediate_size": 48, "intermediate_size_mlp": 48},
}


@functools.cache
def module_of(kind: str) -> Any:
    config = sized_config(kind, 2, 32, vocab_size=120, seq_len=24) | SMALL[kind]
    return build_module(config | {"initializer_range": 0.05}, seed=1)


def roles(module: Any) -> dict[tuple[int, str], Any]:
    """Of the mixtures alone, whether or not the rest of a module can be read."""
    tensors = dict(module.named_parameters())
    found = with_experts(ModuleRoles(2, (), tuple(tensors), ()), tensors)
    assert not any("mlp" in name or "feed_forward" in name for name in found.unidentified)
    return {(r.layer, r.full_name): r.part.of(tensors[r.parameter]) for r in found.roles}


def test_experts_are_read_by_role_in_either_layout() -> None:
    d = 32
    for kind, axes in {
        "mixtral": {"gate": (8, 48, d), "ffn_out": (8, d, 48), "router": (8, d)},
        "gpt_oss": {"router.bias": (8,), "ffn_out.bias": (8, d), "ffn_out": (8, 48, d)},
        "llama4_text": {"gate": (16, d, 48), "ffn_in": (16, d, 48), "shared_gate": (48, d)},
        "qwen2_moe": {"shared_router": (1, d), "shared_ffn_out": (d, 40), "gate": (8, 48, d)},
    }.items():
        found = roles(module_of(kind))
        for name, shape in axes.items():
            assert tuple(found[2, name].shape) == shape, (kind, name)
    interleaved = roles(module_of("gpt_oss"))
    whole = module_of("gpt_oss").model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(interleaved[1, "gate"].reshape(8, d, 48), whole[..., ::2])
    assert torch.equal(interleaved[1, "ffn_in"].reshape(8, d, 48), whole[..., 1::2])


def test_a_check_names_experts_that_are_drawn_otherwise() -> None:
    config = sized_config("mixtral", 2, 32, vocab_size=120, seq_len=24) | SMALL["mixtral"]
    module = build_module(config, seed=2)
    assert "wrong variance" not in {f.kind for f in moments.check(module).findings}
    with torch.no_grad():
        module.model.layers[1].mlp.experts.down_proj.mul_(3.0)
    found = [f for f in moments.check(module).findings if "down_proj" in " ".join(f.where)]
    assert found
    assert found[0].measured == pytest.approx(9 * 0.02**2, rel=0.1)


def test_initialize_writes_all_experts() -> None:
    config = sized_config("mixtral", 2, 32, vocab_size=120, seq_len=24) | SMALL["mixtral"]
    module = build_module(config, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        model = moments.from_huggingface(config)
    assert model.weights is not None
    plan = model.replace(weights=model.weights.replace(ffn_out=(0.01, 0.02), gate=0.03))
    moments.torch.initialize(module, plan, seed=0)
    for layer, wanted in enumerate((0.01, 0.02)):
        experts = module.model.layers[layer].mlp.experts
        gate, factor = experts.gate_up_proj.detach().chunk(2, 1)
        squares = [float(x.square().mean()) for x in (experts.down_proj.detach(), gate, factor)]
        np.testing.assert_allclose(squares, [wanted, 0.03, 0.02**2], rtol=0.05)
        per_expert = gate.square().mean((1, 2))
        np.testing.assert_allclose(per_expert.numpy(), 0.03, rtol=0.15)


def test_gradients_of_a_module_are_by_role() -> None:
    module = module_of("mixtral")
    found = anatomy_of(module).roles
    assert found.unidentified == ()
    assert found.scales == ()
    ids = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(0))
    measured = moments.torch.measure(module, {"input_ids": ids, "labels": ids})
    rows = {(row["layer"], row["weight"]): row for row in measured.weight_gradient_rows}
    module.zero_grad()
    module(input_ids=ids, labels=ids).loss.backward()
    layer = module.model.layers[1].mlp
    gate, factor = layer.experts.gate_up_proj.grad.chunk(2, 1)
    for name, gradient in {
        "router": layer.gate.weight.grad,
        "gate": gate,
        "ffn_in": factor,
        "ffn_out": layer.experts.down_proj.grad,
    }.items():
        square = float(gradient.double().square().sum())
        assert rows[2, name]["squared_norm"] == pytest.approx(square, rel=1e-4), name
    module.zero_grad(set_to_none=True)
