"""`moments.transfer`: correct recipes pass, planted slips are named, exponents are those of steps
that real modules take."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.model.huggingface.sizes import sized_config
from moments.step.search import zipf_batch, zipf_text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import scaled_modules as styles  # noqa: E402

from moments.torch.huggingface_modules import build_module  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import transfer as benchmark  # noqa: E402

SIZES = (64, 128)


@pytest.mark.slow
@pytest.mark.parametrize("style", styles.STYLES)
def test_correct_recipes_pass(style: str) -> None:
    report = moments.transfer(styles.recipe(style), sizes=SIZES)
    assert report.passed, report.table()
    frame = report.to_frame().set_index("weight")
    hidden = frame.loc[["value", "output", "ffn_in", "ffn_out"]]
    assert hidden[["activation", "update", "loss"]].abs().to_numpy().max() < 0.15
    if style not in ("tied", "wide heads"):  # which have no head, or one that starts at 0
        assert frame["activation"]["head"] == pytest.approx(-0.5, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("style", "slip"), [styles.SLIPS[k] for k in (2, 4, 6, 9, 14, 15, 20, 24)])
def test_planted_slips_are_named_alone(style: str, slip: tuple[str, str]) -> None:
    """All: `python benchmarks/transfer.py`."""
    report = moments.transfer(styles.recipe(style, slip), sizes=SIZES)
    assert report.findings
    for finding in report.findings:
        assert slip[1] in finding.parameters, report.table()
    said = {"rate": "rate lacks 1 / width", "variance": "variance lacks 1 / width"}
    said |= {"slow": "falls too fast", "product": "product's scale lacks 1 / sqrt(width)"}
    said |= {"output": "logits lack" if style == "tied" else "output lacks 1 / width"}
    assert said[slip[0]] in report.findings[0].mend


def test_one_rate_for_all_widths_is_too_much_for_every_matrix() -> None:
    def standard(width: int) -> Any:
        module, _ = styles.recipe("gated")(width)
        torch.nn.init.normal_(module.lm_head.weight, std=width**-0.5)
        module.out = 1.0
        return module

    report = moments.transfer(standard, sizes=SIZES, optimizer="adamw")
    named = {finding.weight for finding in report.findings}
    assert named == {"query", "key", "value", "output", "gate", "ffn_in", "ffn_out", "head"}
    assert {finding.mend for finding in report.findings} == {"its rate lacks 1 / width"}


def test_wide_heads_under_sgd_start_with_smaller_steps() -> None:
    """Values are independent of the gradient that they meet at first, so that queries receive
    1/sqrt(d_head) of what they do later: no slip (Microsoft's MuSGD keeps the matrices' rates)."""

    def made(width: int) -> Any:
        module, _ = styles.recipe("wide heads")(width)
        m = width / styles.BASE
        groups = [
            {"params": [p], "lr": 1e-3 * (1.0 if "blocks" in name and p.ndim == 2 else m)}
            for name, p in module.named_parameters()
        ]
        return module, torch.optim.SGD(groups)

    report = moments.transfer(made, sizes=SIZES)
    assert report.passed, report.table()
    exponents = report.to_frame().set_index("weight")["update"]
    assert exponents[["query", "key"]].to_numpy() == pytest.approx(-0.5, abs=0.15)


def test_a_table_s_rate_over_the_root_of_the_width_is_noted() -> None:
    report = moments.transfer(styles.recipe("unit"), sizes=SIZES)
    assert "wte.weight: its rate falls by 1 / sqrt(width)" in report.table()


def test_one_optimizer_whose_groups_name_their_kind() -> None:
    """As nanochat's: muP needs rates of Muon that are one for all widths, and Adam's head as it is;
    with its 1/sqrt(width) the head's logits move further on wider models."""

    class MuonAdamW(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 1e-3, "eps": 1e-10})

    def made(width: int) -> Any:
        module, several = styles.recipe("muon")(width)
        groups = []
        for kind, one in zip(("muon", "adamw"), several, strict=True):
            for group in one.param_groups:
                rate = group["lr"]
                if any(p is module.lm_head.weight for p in group["params"]):
                    rate *= (width / styles.BASE) ** -0.5
                    module.out = 1.0
                groups.append({"params": group["params"], "lr": rate, "kind": kind})
        return module, MuonAdamW(groups)

    report = moments.transfer(made, sizes=SIZES)
    assert report.optimizer == "muon"
    assert {finding.weight for finding in report.findings} == {"head"}, report.table()


def test_a_head_that_starts_at_zero_is_read_as_it_soon_is() -> None:
    def zero(width: int) -> Any:
        module, optimizer = styles.recipe("gated")(width)
        torch.nn.init.zeros_(module.lm_head.weight)
        return module, optimizer

    report = moments.transfer(zero, sizes=SIZES)
    assert report.passed, report.table()
    assert "lm_head.weight: starts at 0" in report.table()


def by_depth(branch: bool) -> Any:
    def made(layers: int) -> Any:
        module, optimizer = styles.recipe("linears", layers=layers)(64)
        for block in module.blocks:
            block.branch = 0.5 * 4 / layers if branch else 0.5
        return module, optimizer

    return made


@pytest.mark.slow
def test_blocks_over_the_depth_transfer_along_it() -> None:
    report = moments.transfer(by_depth(True), "depth", (4, 8))
    assert report.passed, report.table()


@pytest.mark.slow
def test_blocks_of_one_size_do_not_transfer_along_the_depth() -> None:
    report = moments.transfer(by_depth(False), "depth", (4, 8))
    assert {"ffn_in", "ffn_out", "value", "output"} <= {one.weight for one in report.findings}
    assert "lacks 1 / " in report.table()


@pytest.mark.parametrize("recipe", ["mup", "standard"])
def test_exponents_are_those_of_real_steps(recipe: str) -> None:
    """One step of torch's own AdamW: what each matrix's step makes of what it reads, and how far
    the logits go where one matrix steps alone; over a factor 4 of width, six draws."""

    def made(width: int) -> Any:
        module, optimizer = styles.recipe("gated")(width)
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 if recipe == "standard" else 5e-3 * group["lr"]
        return module, optimizer

    sizes, paths = (64, 256), {"query": "wq", "output": "wo", "gate": "w1", "ffn_out": "w2"}
    frame = moments.transfer(made, sizes=sizes).to_frame().set_index("weight")
    seen = {
        name: np.array([steps(made, size, path) for size in sizes]) for name, path in paths.items()
    }
    for name, rows in seen.items():
        logs = np.log(rows).mean(1)  # (sizes, quantities)
        noise = 3 * np.log(rows).std(1, ddof=1).max() / math.sqrt(6) / math.log(4)
        exponents = (logs[1] - logs[0]) / math.log(4)
        for value, quantity in zip(exponents, ("update", "logit"), strict=True):
            assert abs(frame[quantity][name] - value) < 0.05 + noise, (name, quantity)


def steps(made: Any, width: int, path: str) -> list[tuple[float, float]]:
    """Of draws: root mean square of dW x over that of x, and of the logits' change."""
    ids = torch.as_tensor(zipf_text(styles.VOCAB, styles.LENGTH))
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    values = []
    for seed in range(6):
        torch.manual_seed(seed)
        module, optimizer = made(width)
        layer = getattr(module.blocks[0], path)
        entering: list[Any] = []
        handle = layer.register_forward_pre_hook(lambda _, x, into=entering: into.append(x[0]))
        logits, loss = module(ids, targets)
        handle.remove()
        loss.backward()
        for p in module.parameters():
            p.grad = p.grad if p is layer.weight else None
        old = layer.weight.detach().clone()
        optimizer.step()
        with torch.no_grad():
            x = entering[0]
            moved = torch.nn.functional.linear(x, layer.weight - old)
            change = module(ids)[0] - logits
            ratio = moved.square().mean() / x.square().mean()
        values.append((float(ratio.sqrt()), float(change.square().mean().sqrt())))
    return values


# --- experts --------------------------------------------------------------------------------------


def routed(experts: int, kind: str = "mixtral", **more: Any) -> Any:
    entries = {"intermediate_size": 48, "num_experts_per_tok": 2, "initializer_range": 0.1} | more
    entries |= {"num_local_experts" if kind == "mixtral" else "num_experts": experts}
    config = sized_config(kind, 1, 32, vocab_size=61, seq_len=16) | entries
    return build_module(config, seed=1)


def test_a_step_of_experts_is_linear_where_it_is_small() -> None:
    """Tokens that change their experts are in proportion to the rate, and single draws of them
    would be all that the smallest steps show."""
    model = moments.torch.describe(routed(8)).model
    prediction = moments.predict(model, **zipf_batch(model))
    small, smaller = (prediction.after("adam", rate).logit_change for rate in (1e-8, 1e-10))
    assert small / smaller == pytest.approx(1e4, rel=1e-3)


@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (32, 2)])
def test_steps_of_routers_without_a_gradient_and_of_experts_without_tokens(
    experts: int, chosen: int
) -> None:
    model = moments.torch.describe(routed(experts, num_experts_per_tok=chosen)).model
    step = moments.predict(model, **zipf_batch(model)).after("adam", 1e-4)
    assert -1 < step.loss_change < 0


@pytest.mark.slow
def test_what_does_not_transfer_along_experts_is_named() -> None:
    def thin(experts: int) -> Any:
        module = routed(experts)
        with torch.no_grad():
            module.model.layers[0].mlp.experts.down_proj.mul_((4 / experts) ** 0.5)
        return module

    def shared(experts: int) -> Any:
        return routed(experts, "olmoe", norm_topk_prob=False)

    def slow(module: Any, experts: int) -> Any:
        own = [p for name, p in module.named_parameters() if "gate_up" in name]
        others = [p for name, p in module.named_parameters() if "gate_up" not in name]
        groups = [{"params": own, "lr": 1e-3 * 4 / experts}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-3)

    variance = "ffn_out: its initial variance falls too fast with experts: by 1 / experts"
    gates = "experts: its sum falls too fast with experts: by 1 / sqrt(experts)"
    cases: list[Any] = [(routed, None, []), (thin, None, [variance]), (shared, None, [gates])]
    rate = "its rate falls too fast with experts: by 1 / "
    cases.append((routed, slow, [f"{name}: {rate}" for name in ("gate", "ffn_in")]))
    for factory, optimizer, slips in cases:
        report = moments.transfer(factory, axis="experts", sizes=(4, 16), optimizer=optimizer)
        found = [f"{one.weight}: {one.mend}" for one in report.findings]
        assert len(found) == len(slips), report.table()
        assert all(one.startswith(slip) for one, slip in zip(found, slips, strict=True)), found


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda experts: routed(4), "experts of factory(8)"),
        (lambda experts: routed(experts, num_experts_per_tok=experts // 4), "one number for all"),
    ],
)
def test_other_differences_than_the_number_of_experts(factory: Any, said: str) -> None:
    with pytest.raises(moments.DomainError, match=re.escape(said)):
        moments.transfer(factory, axis="experts", sizes=(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(benchmark.CASES))
def test_exponents_are_those_of_stored_real_steps(name: str) -> None:
    """Over a factor 8, of six draws in double precision (`benchmarks/transfer.py`)."""
    axis, sizes, made = benchmark.CASES[name]
    frame = moments.transfer(made, axis=axis, sizes=sizes).to_frame().set_index("weight")
    allowed = 0.05 if axis == "width" else 0.1
    for weight, row in benchmark.stored()[name].items():
        for quantity, (value, error) in row.items():
            assert abs(frame[quantity][weight] - value) < allowed + 2 * error, (weight, quantity)


def test_results_show_themselves() -> None:
    report = moments.transfer(styles.recipe("gated", ("rate", "w3")), sizes=SIZES)
    assert "rates do not transfer along width (64, 128)" in report.table()
    assert repr(report) == "TransferReport(width (64, 128), adamw: 1 findings)"
    assert json.loads(report.to_json())["findings"][0]["weight"] == "ffn_in"
    assert list(report.to_frame()) == [
        "weight",
        "parameters",
        "activation",
        "update",
        "logit",
        "loss",
    ]


def mamba(size: int) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=size, num_hidden_layers=1, vocab_size=50)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"axis": "heads"}, "axis = 'heads'"),
        ({"axis": "experts"}, "experts of factory"),
        ({"sizes": (128,)}, "sizes"),
        ({"sizes": (128, 64)}, "sizes"),
        ({"sizes": 64}, "two or more sizes"),
        ({"optimizer": "newton"}, "optimizer = 'newton'"),
        ({"optimizer": torch.optim.Adam}, "lambda module: Adam"),
        ({"factory": torch.nn.Linear(2, 2)}, "factory"),
        ({"factory": lambda size: None}, "factory"),
        ({"factory": lambda size: (torch.nn.Linear(2, 2), None, 3)}, "Linear, NoneType, int"),
        ({"factory": lambda size: mamba(size)}, "cannot be read: its layers"),
        ({"optimizer": lambda module: torch.optim.Rprop(module.parameters())}, "Rprop"),
    ],
)
def test_bad_input(given: dict[str, Any], said: str) -> None:
    def plain(size: int) -> Any:
        return styles.recipe("fused")(size)[0]

    with pytest.raises(moments.DomainError, match=said):
        moments.transfer(**{"factory": plain, "sizes": SIZES} | given)


def test_weights_that_are_multiplied_before_use_are_described_with_that() -> None:
    module, _ = styles.recipe("unit")(64)
    weights = moments.torch.describe(module).model.weights
    assert weights.query == pytest.approx(1 / 64, rel=0.1)
    assert weights.ffn_out == pytest.approx(1 / 128, rel=0.1)
