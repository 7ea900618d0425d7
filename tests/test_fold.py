"""Folded modules: plain code gives what the scaled module gave."""

from __future__ import annotations

import copy

import pytest

from moments import DomainError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import small_modules  # noqa: E402

from moments.torch import audit, fold, initialize  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402
from moments.torch.dataflow.reading import recorded  # noqa: E402
from moments.torch.scales import applied_scales, remove_scales  # noqa: E402


def encoder(norm_first=True, final=True):
    return small_modules.encoder(3, 32, 64, final=final, pre=norm_first)


KINDS = {
    "BERT": "bert",
    "GPT-2": "gpt2",
    "Llama": "llama",
    "Gemma-2": "gemma2",
    "GPT-NeoX": "gpt_neox",
    "Granite": "granite",
    "OPT": "opt",
    "T5": "t5",
    "ViT": "vit",
}


def built(name):
    if name.startswith("encoder"):
        return encoder() if "Pre-LN" in name else encoder(norm_first=False, final=False)
    own = {"residual_multiplier": 0.5, "attention_multiplier": 0.3} if name == "Granite" else {}
    return small_modules.family_module(KINDS[name], 3, 32, **own)


def run(module):
    _, batch = recorded(module, None)
    output = module(**batch) if isinstance(batch, dict) else module(batch)
    return (output if torch.is_tensor(output) else output.logits).detach()


NAMES = ("encoder, Pre-LN", "encoder, Post-LN", *KINDS)


@pytest.mark.slow
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

    assert "epsilon" in refused(lambda: small_modules.family_module("olmo", 3, 32))


def test_folding_twice():
    module = encoder()
    plan = architecture_of(module).replace(branch_scale=0.5)
    initialize(module, plan)
    fold(module, plan)
    with pytest.raises(DomainError, match="folded before"):
        fold(module, plan)
    assert audit(module, plan).notes[0].startswith("the module was folded")
    initialize(module, plan)  # new weights and hooks: not folded any more
    fold(module, plan)
    with pytest.raises(DomainError, match="module"):
        fold(3, plan)
