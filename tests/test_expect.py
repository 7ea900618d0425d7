"""The metrics of a first step, as loggers compute them, lie where they are expected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import moments

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import small_modules  # noqa: E402

from moments.torch.expect import _band  # noqa: E402

Ranges = dict[str, tuple[float, float]]


@pytest.fixture(scope="module")
def step() -> tuple[Ranges, dict[str, float]]:
    """What is expected of GPT-2 at width 96, and what hooks and autograd see of it."""
    module = small_modules.family_module("gpt2", 2, 96, seed=2)
    ids = torch.randint(101, (8, 24), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    expected = moments.expect(module, batch)
    seen: dict[str, float] = {}

    def look(path: str) -> Any:
        def hook(_: Any, given: Any) -> None:
            if given and given[0].is_floating_point():
                norms = torch.linalg.vector_norm(given[0], dim=-1)
                seen[f"activations/l2_norm/{path}_input.0"] = norms.mean().item()

        return hook

    def rms(layer: int) -> Any:
        def hook(_: Any, given: Any, output: Any) -> None:
            stream = output if isinstance(output, torch.Tensor) else output[0]
            size = given[0].square().mean().sqrt().item()
            seen[f"massive_act/layer_{layer}/activation_rms"] = size

            def sent(gradient: Any) -> None:
                size = gradient.square().mean().sqrt().item()
                for name in ("layer_out_rms", "layer_out_rms_global"):
                    seen[f"grad_health/layer_{layer}/{name}"] = size

            stream.register_hook(sent)

        return hook

    hooks = [m.register_forward_pre_hook(look(path)) for path, m in module.named_modules()]
    hooks += [block.register_forward_hook(rms(n)) for n, block in enumerate(module.transformer.h)]
    torch.manual_seed(0)
    loss = module.train()(**batch).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    seen |= dict.fromkeys(("loss", "lm loss", "lm_loss", "train/CE loss"), loss.item())
    for name, parameter in module.named_parameters():
        norm = torch.linalg.vector_norm(parameter.grad).item()
        seen[f"l2_norm/grad/{name}"] = seen[f"grad_2.0_norm/{name}"] = norm
        seen[f"gradients/{name}"] = norm / math.sqrt(parameter.numel())
    every = [p.grad for p in module.parameters()]
    whole = torch.nn.utils.get_total_norm(every).item()
    names = ("grad-norm", "grad_norm", "l2_norm/grad/global", "optim/total grad norm")
    seen |= dict.fromkeys(names, whole)
    return expected, seen


def test_what_is_measured_lies_inside(step: tuple[Ranges, dict[str, float]]) -> None:
    expected, seen = step
    both = expected.keys() & seen.keys()
    kinds = {name.split("/")[0] for name in both}
    assert {"activations", "gradients", "l2_norm", "grad_2.0_norm", "lm loss"} <= kinds
    assert {"massive_act", "grad_health", "train", "lm_loss", "optim"} <= kinds
    assert len(both) > 30
    outside = {n: (expected[n], seen[n]) for n in both if not _inside(expected[n], seen[n])}
    assert not outside


def test_the_ranges_are_narrow_enough_to_be_worth_a_look(
    step: tuple[Ranges, dict[str, float]],
) -> None:
    expected, seen = step
    for name, (low, high) in expected.items():
        assert low < high < 2 * low, name
    for name in ("l2_norm/grad/transformer.h.0.mlp.c_fc.weight", "grad-norm"):
        assert not _inside(expected[name], 1.5 * seen[name])
        assert not _inside(expected[name], seen[name] / 1.5)


def _inside(band: tuple[float, float], value: float) -> bool:
    return band[0] <= value <= band[1]


def test_a_declaration_has_a_loss_and_a_gradient() -> None:
    model = moments.preset("gpt2", seq_len=64)
    expected = moments.expect(model)
    assert {"lm loss", "grad_norm", "loss_metrics/global_avg_loss"} <= set(expected)
    assert {"massive_act/layer_11/activation_rms", "grad_health/layer_0/layer_out_rms"} <= set(
        expected
    )
    assert not any(name.startswith("l2_norm/grad/transformer") for name in expected)
    low, high = expected["lm loss"]
    assert low < float(moments.predict(model).loss or 0.0) < high


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(moments.DomainError, match=r"nn\.Module"):
        moments.expect(3)


def test_a_range_holds_95_percent_of_draws() -> None:
    """Norms whose squares are log-normal of mean 2 and relative deviation 0.5."""
    low, high = _band(2.0, 0.5)
    sigma = math.sqrt(math.log1p(0.25))
    random = np.random.default_rng(0)
    norms = np.sqrt(2.0 * np.exp(sigma * random.standard_normal(100_000) - sigma**2 / 2))
    assert np.mean(norms < low) == pytest.approx(0.025, abs=2e-3)
    assert np.mean(norms > high) == pytest.approx(0.025, abs=2e-3)
