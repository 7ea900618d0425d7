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


@pytest.mark.slow
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
    named = [n for n, w in weights.items() if w.mean() > 1e-9]
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


class Recurrent(nn.Module):
    """Gated averages over the tokens before, one token after the other."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(open_modules.WORDS, width), nn.LayerNorm(width)
        self.gate, self.new = nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.last = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.norm(x)
        gate, new = torch.sigmoid(self.gate(y)), self.new(y)
        state, states = torch.zeros_like(new[:, 0]), []
        for t in range(ids.shape[1]):
            state = (1 - gate[:, t]) * state + gate[:, t] * new[:, t]
            states.append(state)
        return self.last(x + self.out(torch.stack(states, 1)))


class Latents(nn.Module):
    """Learned tokens that read a text, of which raw numbers are a part."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.raw, self.enter = nn.LayerNorm(24), nn.Linear(24, width)
        self.latents = nn.Parameter(torch.randn(6, width))
        self.norm, self.query = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.both, self.out = nn.Linear(width, width // 2), nn.Linear(width, width)
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.raw(x))
        q = self.query(self.norm(self.latents)).unflatten(-1, (4, -1)).transpose(0, 1)
        k, v = self.both(x)[0].chunk(2, -1)  # one head of keys and values for all queries
        mixed = (q @ k.T / 24**0.5).softmax(-1) @ v
        y = self.latents + self.out(mixed.transpose(0, 1).flatten(1))
        return self.head(self.last(y)[None])


@pytest.mark.parametrize("make", [Recurrent, Latents])
def test_states_and_learned_tokens(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    batch = IDS if make is Recurrent else torch.randn(1, TOKENS, 24)
    result = predict(make(), batch)
    assert not result.unread
    squares, gradients, weights = measured(make, batch, draws=40)
    forward = {row.module: row.variance + row.mean**2 for row in result.outputs}
    assert forward.keys() == squares.keys()
    assert not departures(forward, squares, 0.06)
    back = {row.module: row.grad_variance for row in result.outputs if row.grad_variance}
    assert not departures(back, gradients, 0.12)
    assert result.weights.keys() == weights.keys()
    assert not departures(result.weights, weights, 0.15)


def test_states_of_neighbouring_tokens_are_alike() -> None:
    """A recurrence keeps part of its state, which what was drawn state by state had lost."""
    seen = []
    for seed in range(20):
        torch.manual_seed(seed)
        module = Recurrent()
        with torch.no_grad():
            x = module.norm(module.table(IDS))
            gate, new = torch.sigmoid(module.gate(x)), module.new(x)
            state, states = torch.zeros_like(new[:, 0]), []
            for t in range(TOKENS):
                state = (1 - gate[:, t]) * state + gate[:, t] * new[:, t]
                states.append(state[0])
        gram = torch.stack(states) @ torch.stack(states).T
        own = gram.trace()
        seen.append(float((gram.sum() - own) / own / (TOKENS - 1)))
    torch.manual_seed(0)
    row = next(r for r in predict(Recurrent(), IDS).operations if r.operation == "stack")
    noise = np.std(seen, ddof=1) / len(seen) ** 0.5
    assert row.correlation == pytest.approx(np.mean(seen), abs=0.02 + 3 * noise)
    assert np.mean(seen) > 0.1


def test_rows_of_a_table_are_draws_of_the_table() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(open_modules.WORDS, 16)
    with torch.no_grad():
        table.weight[IDS[0]] /= table.weight[IDS[0]].square().mean().sqrt()
        table.weight[next(n for n in range(open_modules.WORDS) if n not in IDS)] = 0.0
    module = nn.Sequential(table, nn.Linear(16, 16))
    (first, *_) = predict(module, IDS).outputs
    assert first.variance == pytest.approx(float(table.weight.detach().var()), rel=1e-3)
    with torch.no_grad():
        table.weight[IDS[0]] *= 10  # beyond chance: a law of their own
    (first, *_) = predict(module, IDS).outputs
    assert first.variance == pytest.approx(100, rel=0.02)


class Lambdas(nn.Module):
    """Numbers on the stream and on its first state, in attention's scores and on its values, a
    small matrix of them between two streams, and a number that a function of another one is."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.fused = (
            nn.Embedding(open_modules.WORDS, width),
            nn.Linear(width, 3 * width),
        )
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, open_modules.WORDS)
        self.stream = nn.Parameter(torch.tensor([0.8, 0.5]))
        self.sharpness, self.share = (
            nn.Parameter(torch.tensor(3.0)),
            nn.Parameter(torch.tensor(0.7)),
        )
        self.mixing = nn.Parameter(torch.tensor([[0.9, 0.2], [-0.3, 0.6]]))
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = functional.rms_norm(self.table(ids), (64,))
        q, k, v = self.fused(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scores = self.sharpness * q @ k.mT / 4
        mixed = scores.masked_fill(torch.ones(16, 16).triu(1) > 0, -1e30).softmax(-1) @ v
        x = x + self.share * mixed.transpose(1, 2).flatten(2)
        x = self.stream[0] * x + self.stream[1] * first
        y = self.down(functional.gelu(self.up(functional.rms_norm(x, (64,)))))
        x, y = torch.einsum("mn,nbtd->mbtd", self.mixing, torch.stack((x, y)))
        x = functional.rms_norm(x + torch.sigmoid(self.gate) * y, (64,))
        return self.head(functional.relu(x))


@pytest.mark.slow
def test_numbers_that_multiply_a_stream() -> None:
    torch.manual_seed(0)
    result = predict(Lambdas(), IDS)
    names = [n for n, p in Lambdas().named_parameters() if p.numel() < 8]
    assert result.weights.keys() >= set(names)
    assert not result.notes
    _, _, weights = measured(Lambdas, IDS, draws=200)
    assert not departures({n: result.weights[n] for n in names}, weights, 0.1)


def test_what_a_norm_takes_away() -> None:
    class Normed(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.table, self.both = nn.Embedding(open_modules.WORDS, width), nn.Linear(width, width)
            self.scale, self.share = (nn.Parameter(torch.tensor(x)) for x in (1.7, 0.5))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return functional.rms_norm(self.scale * (x + self.share * self.both(x)), (x.shape[-1],))

    result = predict(Normed(), IDS)
    # Of u = x + share y, with y of variance 1/3 beside x: |y/|u| - u (y.u)/|u|^3|^2 by feature.
    own, share = 1 / 3, 0.5
    size = 1 + share**2 * own
    assert result.weights["scale"] < 1e-6
    expected = TOKENS * 256 * (own / size - (share * own) ** 2 / size**2)
    assert result.weights["share"] == pytest.approx(expected, rel=0.05)


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


class Loop(nn.Module):
    """Two of eight experts for every token, in a loop over the rows that each of them has."""

    def __init__(self, spelling: str, width: int = 96, experts: int = 8) -> None:
        super().__init__()
        self.spelling, self.table = spelling, nn.Embedding(open_modules.WORDS, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 192), nn.GELU(), nn.Linear(192, width))
            for _ in range(experts)
        )
        self.last = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.spelling == "unsorted":
                rows = (chosen == number).any(-1)
                share = (weights * (chosen == number)).sum(-1)
                made[rows] += expert(flat[rows]) * share[rows][:, None]
                continue
            rows, rank = torch.where(chosen == number)
            out = expert(flat[rows]) * weights[rows, rank, None]
            if self.spelling == "added":
                made.index_add_(0, rows, out)
            else:
                made[rows] += out
        return self.last(x + made.view_as(x))


@pytest.mark.parametrize("spelling", ["added", "put"])
def test_loops_over_the_rows_of_experts(spelling: str) -> None:
    make = functools.partial(Loop, spelling)
    torch.manual_seed(0)
    result = predict(make(), IDS)
    assert not result.unread
    assert any("that this pass chose" in note for note in result.notes)
    squares, gradients, weights = measured(make, IDS)
    free = "experts"  # whose rows are others in every draw
    forward = {r.module: r.variance + r.mean**2 for r in result.outputs if free not in r.module}
    assert forward.keys() >= {"table", "router", "last"}
    assert not departures(forward, squares, 0.06)
    back = {r.module: r.grad_variance for r in result.outputs if free not in r.module}
    assert not departures({n: g for n, g in back.items() if g is not None}, gradients, 0.12)
    named = {name: value for name, value in result.weights.items() if free not in name}
    assert not departures(named, weights, 0.15)
    whole = sum(value for name, value in result.weights.items() if free in name)
    drawn = sum(values.mean() for name, values in weights.items() if free in name)
    assert whole == pytest.approx(drawn, rel=0.1)


def test_what_a_choice_was_made_by_is_not_cut_to_what_was_chosen() -> None:
    torch.manual_seed(0)
    result = predict(Loop("unsorted"), IDS)
    assert any("what the batch chose by" in why for _, why in result.unread)
    rows = {row.module: row for row in result.outputs}
    assert rows.keys() == {"table", "router", *(m for m in rows if "experts" in m)}
    assert rows["table"].grad_variance is None
    assert "table.weight" not in result.weights


def test_one_expert_for_every_token() -> None:
    torch.manual_seed(0)
    result = predict(with_experts(True), IDS)
    assert not result.unread

    def drawn(seed: int) -> float:
        torch.manual_seed(seed)
        modules = nn.Sequential(nn.Embedding(open_modules.WORDS, 64), Experts(True))
        return float(modules(IDS).detach().square().mean())

    squares = {"1": np.array([drawn(seed) for seed in range(100, 140)])}
    row = next(row for row in result.outputs if row.module == "1")
    assert not departures({"1": row.variance}, squares, 0.06)
    assert moments.check(with_experts(True), IDS).healthy


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


def test_more_tokens_and_fewer_places() -> None:
    """Of 24 tokens the last ones' attention is over more keys than of 16; pairs of 24 are 576."""
    torch.manual_seed(0)
    module, ids = open_modules.Latent(), IDS.repeat(1, 2)[:, :24]
    assert predict(module, ids).tokens == 16
    result = predict(module, ids, tokens=24)
    assert (result.tokens, result.unread) == (24, {})
    few = predict(module, ids, tokens=24, places=500)
    assert any("500 at most" in why for _, why in few.unread)


class Tied(nn.Module):
    """A head that is its table: the logit of a token's own id has a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(60, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 60, bias=False)
        nn.init.normal_(self.table.weight, std=0.1)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids)))


class Steps(nn.Module):
    """Step sizes as recurrences have them: a bias uniform in the logarithm, in front of a bend."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.steps = nn.Embedding(open_modules.WORDS, 64), nn.Linear(64, 512)
        self.out = nn.Linear(512, 32, bias=False)
        nn.init.uniform_(self.steps.bias, -7.0, -1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(functional.softplus(self.steps(self.table(ids))))


class Turned(nn.Module):
    """Rotary positions spelled as complex numbers; differences to the first token show them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(open_modules.WORDS, 64), nn.Linear(64, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(TOKENS), 100.0 ** (-torch.arange(32) / 32))
        x = self.up(self.table(ids[:, :1].expand_as(ids))).unflatten(-1, (32, 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        x = torch.view_as_real(torch.view_as_complex(x) * turns).flatten(-2)
        return self.down(x - x[:, :1])


@pytest.mark.parametrize("make", [Tied, Steps, Turned])
def test_tied_heads_bends_of_uneven_biases_and_complex_turns(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    ids = IDS % 60
    result = predict(make(), ids)
    assert not result.sampled
    assert not result.notes
    squares, gradients, weights = measured(make, ids, draws=60)
    rows = {row.module: row for row in result.outputs}
    assert not departures({p: r.variance + r.mean**2 for p, r in rows.items()}, squares, 0.03)
    back = {path: row.grad_variance for path, row in rows.items() if row.grad_variance}
    assert not departures(back, gradients, 0.05)
    assert not departures(result.weights, weights, 0.05)


def test_a_head_that_is_its_table_is_named_under_a_loss() -> None:
    (note,) = predict(Tied(), IDS % 60, loss="cross-entropy").notes
    assert note.startswith("table.weight: a table and a matrix behind it")


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


@pytest.mark.slow
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
