"""Folded modules: plain code gives what the scaled module gave."""

from __future__ import annotations

import copy

import pytest

from moments import DomainError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.modules.architecture import architecture_of  # noqa: E402
from moments.modules.probe import default_batch  # noqa: E402
from moments.modules.scales import applied_scales, remove_scales  # noqa: E402
from moments.torch import fold, initialize  # noqa: E402

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def encoder(norm_first=True, final=True):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=True)
    norm = torch.nn.LayerNorm(32) if final else None
    return torch.nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)


def built(name):
    if name == "encoder, Pre-LN":
        return encoder()
    if name == "encoder, Post-LN":
        return encoder(norm_first=False, final=False)
    kind, config, changes = {
        "BERT": ("BertForMaskedLM", "BertConfig", {}),
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 3, "n_embd": 32, "n_head": 4}),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
        "Gemma-2": (
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {"num_key_value_heads": 2, "head_dim": 8},
        ),
        "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
        "Granite": (
            "GraniteForCausalLM",
            "GraniteConfig",
            {"num_key_value_heads": 4, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        ),
    }[name]
    entries = {k: v for k, v in SMALL.items() if name != "GPT-2" or k not in changes}
    if name == "GPT-2":
        entries = {k: v for k, v in SMALL.items() if "size" not in k and "num" not in k}
        entries = {**entries, "vocab_size": 101} | {"n_positions": 32}
        entries.pop("max_position_embeddings")
    return getattr(transformers, kind)(getattr(transformers, config)(**(entries | changes)))


def run(module):
    batch = default_batch(module)
    output = module(**batch) if isinstance(batch, dict) else module(batch)
    return (output if torch.is_tensor(output) else output.logits).detach()


NAMES = (
    "encoder, Pre-LN", "encoder, Post-LN", "BERT", "GPT-2", "Llama", "Gemma-2", "GPT-NeoX",
    "Granite",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaling", [False, True, "before-norm", "after-residual"])
def test_the_output_stays(name, scaling):
    torch.manual_seed(0)
    module = built(name)
    plan = architecture_of(module).replace(
        skip_scale=[0.9, 0.7, 0.8], branch_scale=[0.5, 0.4, 0.6], layernorm_scaling=scaling
    )
    initialize(module, plan, seed=3)
    with torch.no_grad():  # as if trained: gains, biases and all
        for p in module.parameters():
            p.add_(0.05 * torch.randn_like(p))
    module.eval()
    before = run(module)
    bare = copy.deepcopy(module)
    remove_scales(bare)
    assert (run(bare) - before).abs().max() > 1e-3 * before.abs().max()  # the scales do something
    assert fold(module, plan) is module
    assert applied_scales(module) is None
    assert not any(p._forward_hooks or p._forward_pre_hooks for p in module.modules())
    torch.testing.assert_close(
        run(module), before, rtol=1e-5, atol=1e-5 * float(before.abs().max())
    )


def test_a_module_trained_elsewhere():
    """Without hooks, the scales come from the plan alone."""
    module = encoder()
    plan = architecture_of(module).replace(skip_scale=0.8, branch_scale=0.5)
    initialize(module, plan)
    module.eval()
    before = run(module)
    remove_scales(module)
    fold(module, plan)
    torch.testing.assert_close(run(module), before, rtol=1e-5, atol=1e-5)


def test_epsilon_is_adapted():
    """A stream as small as its epsilon: without the adapted one, the output is off by half."""
    module = encoder()
    plan = architecture_of(module).replace(skip_scale=0.5, branch_scale=0.5)
    initialize(module, plan)
    module.eval()
    x = 3e-3 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    before = module(x).detach()
    fold(module, plan)
    assert module.layers[0].norm1.eps == 1e-5
    assert module.layers[0].norm2.eps == pytest.approx(4e-5)
    assert module.norm.eps == pytest.approx(1e-5 * 4**6)
    torch.testing.assert_close(module(x).detach(), before, rtol=1e-5, atol=1e-5)


def refused(change, plan_change=None):
    module = change()
    plan = architecture_of(module).replace(skip_scale=0.9, branch_scale=0.5)
    initialize(module, plan)
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(DomainError) as error:
        fold(module, plan if plan_change is None else plan.replace(**plan_change))
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    assert applied_scales(module) is not None
    return str(error.value)


def test_what_cannot_be_folded():
    assert "no final norm" in refused(lambda: encoder(final=False))
    assert "hooks apply" in refused(encoder, {"branch_scale": 0.4})

    def without_norms():
        module = built("GPT-2")
        for block in module.transformer.h:
            block.ln_1, block.ln_2 = torch.nn.Identity(), torch.nn.Identity()
        return module

    module = without_norms()
    plan = architecture_of(module).replace(norm="none", skip_scale=0.9)
    initialize(module, plan)
    with pytest.raises(DomainError, match="without a norm"):
        fold(module, plan)
    unscaled = plan.replace(skip_scale=1.0, branch_scale=0.5)
    initialize(module, unscaled)
    before = run(module.eval())
    torch.testing.assert_close(run(fold(module, unscaled)), before, rtol=1e-5, atol=1e-6)

    config = transformers.OlmoConfig(**SMALL | {"num_key_value_heads": 4})
    assert "epsilon" in refused(lambda: transformers.OlmoForCausalLM(config))


def test_folding_twice():
    module = encoder()
    plan = architecture_of(module).replace(branch_scale=0.5)
    initialize(module, plan)
    fold(module, plan)
    with pytest.raises(DomainError, match="folded before"):
        fold(module, plan)
    initialize(module, plan)  # new weights and hooks: not folded any more
    fold(module, plan)
    with pytest.raises(DomainError, match="module"):
        fold(3, plan)
