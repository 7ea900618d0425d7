"""Modules predicted operation by operation, against hooks on fresh draws of the same modules."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import open_modules
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import moments
from moments.torch import predict

TOKENS = 16
IDS = torch.randint(0, open_modules.WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def _keep(seen: dict[str, Tensor], path: str, _: Any, __: Any, made: Tensor) -> None:
    if made.requires_grad:
        made.retain_grad()
    seen[path] = made


def measured(
    make: Callable[[], nn.Module], batch: Any, loss: Any = None, draws: int = 30
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Of fresh draws: mean squares of submodules' outputs and of their gradients, by path, and
    squared gradients of parameters, by name; (draws,) each."""
    squares: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for draw in range(draws):
        torch.manual_seed(1000 + draw)
        module = make()
        seen: dict[str, Tensor] = {}
        for path, part in module.named_modules():
            part.register_forward_hook(functools.partial(_keep, seen, path))
        output = module(batch)
        if loss is None:
            output.backward(torch.randn(output.shape))
        else:
            loss(output).backward()
        for path, tensor in seen.items():
            squares.setdefault(path, []).append(float(tensor.detach().square().mean()))
            if tensor.grad is not None:
                gradients.setdefault(path, []).append(float(tensor.grad.square().mean()))
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                weights.setdefault(name, []).append(float(parameter.grad.square().sum()))
    arrays = ({k: np.array(v) for k, v in x.items()} for x in (squares, gradients, weights))
    return tuple(arrays)  # type: ignore[return-value]


def departures(
    predicted: dict[str, float], drawn: dict[str, np.ndarray], bound: float
) -> dict[str, tuple[float, float, float]]:
    """What lies beyond a relative bound and three standard errors."""
    beyond = {}
    for name, expected in predicted.items():
        if name not in drawn:
            continue
        values = drawn[name]
        mean, noise = values.mean(), values.std(ddof=1) / np.sqrt(len(values))
        if abs(expected - mean) > bound * mean + 3 * noise:
            beyond[name] = expected, float(mean), float(noise)
    return beyond


@pytest.mark.parametrize("kind", ["Hourglass", "Chosen", "Latent"])
def test_modules_of_no_one_shape(kind: str) -> None:
    make = getattr(open_modules, kind)
    torch.manual_seed(0)
    result = predict(make(), IDS)
    assert not result.unread
    squares, gradients, weights = measured(make, IDS)
    rows = {row.module: row for row in result.outputs}
    assert rows.keys() == squares.keys()
    forward = {path: row.variance + row.mean**2 for path, row in rows.items()}
    assert not departures(forward, squares, 0.06)
    back = {p: r.grad_variance for p, r in rows.items() if r.grad_variance is not None}
    assert len(back) > 0.8 * len(gradients)
    assert not departures(back, gradients, 0.12)
    assert result.weights.keys() == weights.keys()
    assert not departures(result.weights, weights, 0.15)


def test_a_loss() -> None:
    torch.manual_seed(0)
    result = predict(open_modules.Hourglass(), IDS, loss="cross-entropy")

    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits[0, :-1], IDS[0, 1:])

    _, gradients, weights = measured(open_modules.Hourglass, IDS, loss)
    back = {row.module: row.grad_variance for row in result.outputs}
    assert not departures(back, gradients, 0.12)
    assert not departures(result.weights, weights, 0.15)


class Normed(nn.Module):
    """A residual block of convolutions, with norms of channels over a batch or in groups."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), norm(64)
        self.second, self.behind = nn.Conv2d(64, 64, 3, padding=1), norm(64)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.first(x)))
        x = functional.relu(x + self.behind(self.second(x)))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, functools.partial(nn.GroupNorm, 2)])
def test_norms_of_channels(norm: Callable[[int], nn.Module]) -> None:
    make = functools.partial(Normed, norm)
    torch.manual_seed(0)
    pixels = torch.randn(4 if norm is nn.BatchNorm2d else 1, 3, 6, 6)
    result = predict(make(), pixels)
    assert not result.unread
    squares, gradients, weights = measured(make, pixels, draws=60)
    rows = {row.module: row for row in result.outputs}
    assert rows.keys() == squares.keys()
    forward = {path: row.variance + row.mean**2 for path, row in rows.items()}
    assert not departures(forward, squares, 0.06)
    back = {path: row.grad_variance for path, row in rows.items() if row.grad_variance}
    assert len(back) == len(gradients)
    assert not departures(back, gradients, 0.12)
    # A gain in front of a ReLU moves with the sign of what it multiplies: a stated limit.
    named = [n for n, w in weights.items() if w.mean() > 1e-9 and n[:-7] not in ("norm", "behind")]
    assert not departures({n: result.weights[n] for n in named}, weights, 0.15)


class Two(nn.Module):
    """Linear, ReLU, linear: exact laws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 4096, bias=False), nn.Linear(4096, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def test_exact_laws() -> None:
    torch.manual_seed(0)
    module, x = Two(), torch.randn(1, 5, 64)
    result = predict(module, x)
    v_up, v_down = (
        float(w.detach().square().mean()) for w in (module.up.weight, module.down.weight)
    )
    rows = {row.module: row for row in result.outputs}
    variance = v_up * float(x.double().square().sum(-1).mean())
    assert rows["up"].variance == pytest.approx(variance, rel=1e-6)
    assert rows["down"].variance == pytest.approx(v_down * 4096 * variance / 2, rel=1e-6)
    # Of an independent gradient of variance 1: half of 64 entries of each come through the kink.
    assert rows["up"].grad_variance == pytest.approx(v_down * 64 / 2, rel=1e-6)
    square = float(x.double().square().sum())
    assert result.weights["up.weight"] == pytest.approx(v_down * 64 / 2 * 4096 * square, rel=1e-6)
    assert not result.sampled


class Transformed(nn.Module):
    """A transposed convolution, which no rule covers, in one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(open_modules.WORDS, 64)
        self.one, self.other = nn.Linear(64, 64), nn.ConvTranspose1d(64, 64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.one(x) + self.other(x.transpose(1, 2)).transpose(1, 2)


def test_what_is_not_followed_is_named_and_the_rest_predicted() -> None:
    torch.manual_seed(0)
    result = predict(Transformed(), IDS)
    assert ("convolution", "a transposed convolution") in result.unread
    paths = {row.module for row in result.outputs}
    assert paths == {"table", "one"}
    assert "not followed" in str(result)


class Experts(nn.Module):
    """Every token through the one of twelve matrices that it chooses."""

    def __init__(self, rows_alone: bool) -> None:
        super().__init__()
        self.rows_alone = rows_alone
        self.router = nn.Linear(64, 12, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        weight, best = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if not self.rows_alone:
                made = made + expert(x) * (weight * (best == number))[..., None]
                continue
            rows = torch.where(best == number)
            made = made.index_put(rows, expert(x[rows]) * weight[rows][:, None], accumulate=True)
        return made


def with_experts(rows_alone: bool) -> nn.Module:
    torch.manual_seed(0)
    table = nn.Embedding(open_modules.WORDS, 64)
    return nn.Sequential(table, Experts(rows_alone), nn.Linear(64, open_modules.WORDS))


def test_rows_gathered_for_each_expert_are_refused_in_words() -> None:
    with pytest.raises(moments.MomentsError, match=r"1 gathers as many rows .* give every expert"):
        predict(with_experts(True), IDS)
    with pytest.raises(moments.MomentsError, match="give every expert all rows"):
        moments.check(with_experts(True), IDS)


def test_what_tokens_chose_is_no_finding() -> None:
    report = moments.check(with_experts(False), IDS)
    assert report.healthy, str(report)
    assert any("gradients inside experts" in words for words in report.unchecked)


def test_what_it_says() -> None:
    torch.manual_seed(0)
    result = predict(open_modules.Latent(), IDS)
    assert "~ rests on operations without a law" in result.table()
    stored = json.loads(result.to_json())
    assert stored["tokens"] == TOKENS
    assert len(stored["outputs"]) == len(result.to_frame())
    assert set(result.weight_gradients().parameter) == set(result.weights)
    torch.manual_seed(0)
    assert predict(open_modules.Latent(), IDS).to_json() == result.to_json()


def test_bad_input() -> None:
    with pytest.raises(moments.DomainError, match="loss"):
        predict(open_modules.Latent(), IDS, loss="hinge")
    with pytest.raises(moments.DomainError, match="it takes logits"):
        predict(Two(), torch.randn(1, 5, 64), loss="cross-entropy")
    with pytest.raises(moments.DomainError, match="draws"):
        predict(open_modules.Latent(), IDS, draws=0)
    with pytest.raises(moments.MomentsError, match="depends on the batch"):
        predict(nn.Identity(), torch.randn(1, 5, 64))


# --- checked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Hourglass", "Chosen", "Latent"])
def test_a_right_module_has_no_finding(kind: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        report = moments.check(getattr(open_modules, kind)(), IDS)
        assert report.healthy, str(report)
        assert "operation by operation" in str(report)
        assert any(row.quantity == "gradient variance" for row in report.rows)


def test_one_odd_layer_is_named() -> None:
    torch.manual_seed(0)
    module = open_modules.Hourglass(layers=6)
    with torch.no_grad():
        module.mixers[3].out.weight *= 3
    (finding,) = moments.check(module, IDS).findings
    assert finding.kind == "odd layer"
    assert finding.where == ("mixers.3.out.weight",)
    assert finding.measured == pytest.approx(9 * finding.expected, rel=0.1)


def test_entries_that_are_no_draws_are_named() -> None:
    """A copy of an earlier matrix: coherent, 4096/128 times the square of an independent one."""
    torch.manual_seed(0)
    module = Two()
    with torch.no_grad():
        module.down.weight.copy_(module.up.weight.T)
    (finding,) = moments.check(module, torch.randn(1, 5, 64)).findings
    assert "down" in finding.where
    assert finding.measured / finding.expected == pytest.approx(32, rel=0.5)


def test_what_cannot_be_followed_says_why() -> None:
    logits = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    ids = torch.arange(4)[None]
    with pytest.raises(moments.DomainError, match="no other follows it"):
        predict(logits, ids[:, :1], loss="cross-entropy")
    with pytest.raises(moments.DomainError, match="one sequence or more"):
        predict(logits, ids[:0])
    with pytest.raises(moments.MomentsError, match="meta device"):
        predict(nn.Linear(4, 4, device="meta"), torch.randn(3, 4))
    with pytest.raises(moments.MomentsError, match="gives is nan"):
        predict(nn.Linear(4, 4), torch.full((3, 4), float("nan")))


def test_a_check_leaves_buffers_and_random_state_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    batch = torch.randn(6, 8)
    state = torch.get_rng_state()
    assert moments.check(module, batch).rows
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
