"""Routed experts: the router's functions, the block's law both ways, load, declarations."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moments
from moments import Experts
from moments.errors import DomainError
from moments.layers.experts.mixture import one_draw, router_of
from moments.layers.experts.routing import ANGLES, Router, alone, at, functions, sampled

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ROUTERS = {
    "softmax, renormalised": Router(32, 4),
    "softmax over all": Router(16, 2, normalised="all"),
    "sigmoid, renormalised": Router(24, 6, logistic=True),
    "sigmoid": Router(8, 3, logistic=True, normalised="none", scale=2.5),
    "one expert": Router(8, 1),
    "power of a sigmoid": Router(8, 1, logistic=True, normalised="none", power=2.2),
    "all chosen": Router(4, 4, normalised="all"),
}
EACH = pytest.mark.parametrize("name", sorted(ROUTERS))


def drawn(router: Router, s: float, r: float, pairs: int = 6000) -> tuple[Any, Any]:
    """Means of M, N, P over drawn logits, and their standard errors."""
    random = np.random.default_rng(1)
    one, two = random.standard_normal((2, pairs, router.experts)) * math.sqrt(s)
    values = router.of_pair(one, r * one + math.sqrt(1 - r * r) * two)
    return values.mean(-1), values.std(-1) / math.sqrt(pairs)


# --- the router's functions -----------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(("s", "r"), [(0.3, 0.0), (1.6, 0.5), (1.6, 0.95)])
def test_quadrature_is_the_mean_over_drawn_logits(name: str, s: float, r: float) -> None:
    router = ROUTERS[name]
    wanted, error = drawn(router, s, r)
    assert np.all(np.abs(at(router, s, r) - wanted) < 4 * error + 1e-9)


STRONG = {
    "softmax over all": (Router(7, 5, normalised="all"), 20.0, 0.9),
    "sigmoid over all": (Router(32, 8, logistic=True, normalised="all"), 30.0, 0.5),
    "softmax, renormalised": (Router(72, 10), 40.0, 0.3),
}


@pytest.mark.parametrize("name", sorted(STRONG))
def test_logits_of_large_variance(name: str) -> None:
    router, s, r = STRONG[name]
    for value, correlation in ((at(router, s, r), r), (alone(router, s), 1.0)):
        wanted, error = drawn(router, s, correlation)
        assert np.all(np.abs(value - wanted) < 4 * error + 1e-9)


@EACH
def test_a_token_with_itself(name: str) -> None:
    router = ROUTERS[name]
    wanted, error = drawn(router, 1.6, 1.0)
    found = alone(router, 1.6)
    assert np.all(np.abs(found - wanted) < 4 * error + 1e-9)
    np.testing.assert_allclose(found[2], router.chosen, rtol=1e-9)


@EACH
def test_jacobians_of_gates_are_those_of_differences(name: str) -> None:
    """N of one token, E sum (dg_a/dz_e)^2, by moving every logit."""
    router, step = ROUTERS[name], 1e-6
    z = np.random.default_rng(2).standard_normal((50, router.experts))
    rows = []
    for e in range(router.experts):
        moved = step * (np.arange(router.experts) == e)
        rows.append((router.gates(z + moved)[0] - router.gates(z - moved)[0]) / (2 * step))
    wanted = (np.stack(rows) ** 2).sum((0, -1))
    np.testing.assert_allclose(router.of_pair(z, z)[1], wanted, rtol=1e-4, atol=1e-9)


def test_tokens_that_share_nothing() -> None:
    """Gates that add up to 1 have M = 1/E, and k^2/E experts are common by chance."""
    for router in (Router(32, 4), Router(64, 8, logistic=True)):
        m, _, p = at(router, 1.0, 0.0)
        assert m == pytest.approx(1 / router.experts, rel=2e-3)
        assert p == pytest.approx(router.chosen**2 / router.experts, rel=2e-3)


def test_equal_gates_where_logits_hardly_vary() -> None:
    m, n, _ = alone(Router(64, 8), 1e-4)
    assert m == pytest.approx(1 / 8, rel=1e-3)
    assert n == pytest.approx(1 / 8 * (1 - 1 / 8), rel=1e-2)  # sum_ae g_a^2 (d_ae - g_e)^2


def test_a_single_gate_that_is_normalised_teaches_the_router_nothing() -> None:
    m, n, p = functions(Router(8, 1), 1.0, 0.4)
    assert n == 0.0
    assert m == pytest.approx(p)
    assert at(Router(8, 1, normalised="all"), 1.0, 0.4)[1] > 0


def test_slopes_of_a_sigmoid_that_fall_with_the_largest_logit() -> None:
    """Between two tables in s, where they fall most: one of 32 experts, against drawn logits."""
    router, s, r = Router(32, 1, logistic=True, normalised="none"), 9.3, 0.9
    values, error = drawn(router, s, r, pairs=120_000)
    assert error[1] < 0.02 * values[1]
    assert functions(router, s, r)[1] == pytest.approx(values[1], abs=3 * error[1])


@pytest.mark.slow
@pytest.mark.parametrize("router", [Router(8, 2), Router(16, 2, normalised="all")])
def test_tables_between_their_nodes(router: Router) -> None:
    """In the angle and in log s, against the quadrature itself."""
    s = math.exp(-0.25)
    for r in (0.98, 0.7, 0.1):
        np.testing.assert_allclose(functions(router, s, r), at(router, s, r), rtol=2e-3)
    grid = functions(router, np.array([s, s]), np.array([[[0.7, 0.1]], [[0.7, 0.1]]]))
    np.testing.assert_allclose(grid[0][1, 0], [at(router, s, r)[0] for r in (0.7, 0.1)], 2e-3)


def test_groups_are_sampled_and_lower_what_tokens_share() -> None:
    grouped = Router(16, 4, logistic=True, groups=4, kept_groups=2)
    values, errors = sampled(grouped, 1.0, 8000)
    wanted, error = drawn(grouped, 1.0, math.cos(ANGLES[3]))
    assert np.all(np.abs(values[:, 3] - wanted) < 4 * np.hypot(error, errors[:, 3]))
    free = at(Router(16, 4, logistic=True), 1.0, 0.5)
    assert functions(grouped, 1.0, 0.5)[0] < free[0]
    alone_, error = drawn(grouped, 1.0, 1.0)
    assert np.all(np.abs(values[:, 0] - alone_) < 4 * np.hypot(error, errors[:, 0]) + 1e-9)


# --- the block, against simulation ----------------------------------------------------------------

D, WIDTH, LENGTH = 64, 48, 12
STORE = BENCHMARKS / "data" / "expert_draws.json"


def predict(model: Any, **given: Any) -> Any:
    return moments.predict(model, **given)


def model_of(block: Any, **changes: Any) -> Any:
    weights = moments.Weights(1 / D, 1 / D, 1 / D, 1 / D, 1 / D, 1 / WIDTH, 1 / D)
    fields: dict[str, Any] = {
        "d_ff": WIDTH,
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "weights": weights,
    }
    return moments.Transformer(1, D, 4, LENGTH, ffn=block, **(fields | changes))


BLOCKS: dict[str, tuple[Experts, dict[str, Any]]] = {
    "one expert": (Experts(4, 1), {}),
    "shared": (Experts(8, 2, shared=32, shared_gate_variance=1 / D), {}),
    "shift": (
        Experts(8, 2, shift=1.0, clamp=7.0, router_bias_variance=0.2),
        {"activation": "quick_gelu", "gated": True, "biases": moments.Biases()},
    ),
    "input": (Experts(8, 1, rule="sigmoid_input", normalised="none"), {}),
    "not gated": (Experts(8, 2, rule="sigmoid", normalised="none"), {"activation": "relu"}),
}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_layer_is_what_its_twin_computes(name: str) -> None:
    """The mixture's site both ways and every matrix, at 24 draws of the twin."""
    pytest.importorskip("torch")
    block, changes = BLOCKS[name]
    given: Any = {"variance": 1.0, "correlation": 0.4}
    given |= {"grad_variance": 1.0, "grad_correlation": 0.2}
    model = model_of(block, **changes)
    found = predict(model, tokens=False, **given)
    drawn = moments.simulate(model, **given, seeds=24, batch=8)
    for quantity in ("variance", "grad_variance"):
        value, wanted = getattr(found, quantity), getattr(drawn, quantity)
        error: Any = getattr(drawn, f"{quantity}_stderr")
        assert np.all(np.abs(value - wanted) < 3 * error + 0.03 * wanted), quantity
    rows: Any = drawn.weight_gradients().merge(found.weight_gradients(), on=["layer", "weight"])
    assert {"router", "ffn_in", "ffn_out"} <= set(rows.weight)
    for row in rows.to_dict("records"):
        wanted, error, value = (
            row[n] for n in ("squared_norm_x", "squared_norm_stderr", "squared_norm_y")
        )
        if row["weight"] == "key.bias" or (name == "one expert" and row["weight"] == "router"):
            assert value == 0.0
            continue
        assert abs(wanted - value) < 3.5 * error + 0.08 * value, row


@pytest.fixture(scope="module")
def campaign() -> Iterator[Any]:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("expert_draws")
    sys.path.remove(str(BENCHMARKS))


def within(quantity: str, apart: float, error: float) -> bool:
    """Bounds beyond twice the standard error; covariances are of order 1/width at this width."""
    bounds = {"variance": 0.02, "grad_variance": 0.03, "loss": 0.005, "covariance": 0.08}
    return apart < bounds.get(quantity.split()[0], 0.08) + 2 * error


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe", "llama4_text"])
def test_real_modules_with_experts(campaign: Any, kind: str) -> None:
    """Two layers, all weights drawn 160 times (`benchmarks/expert_draws.py`)."""
    found, stored = campaign.predicted(kind), json.loads(STORE.read_text())[kind]
    assert set(found) >= set(stored)
    for name, (mean, error) in stored.items():
        assert within(name, abs(found[name] / mean - 1), error / mean), name


# --- load -----------------------------------------------------------------------------------------


def test_load_of_one_draw() -> None:
    """Its variance against drawn logits, and experts that starve where tokens are alike."""
    model = model_of(Experts(16, 2))
    given: Any = {"variance": 1.0, "tokens": False}
    apart, alike = (predict(model, correlation=c, **given).experts() for c in (0.0, 0.9))
    assert apart.load[0] == 2 / 16
    assert alike.load_variance[0] > 5 * apart.load_variance[0]
    assert alike.starving[0] > 2 * apart.starving[0]
    assert alike.largest_load[0] > 1.5 * apart.largest_load[0]
    r, random = float(alike.logit_correlation[0]), np.random.default_rng(3)
    found = []
    for _ in range(400):
        common, own = random.standard_normal(16), random.standard_normal((LENGTH, 16))
        z = math.sqrt(r) * common + math.sqrt(1 - r) * own
        share = Router(16, 2).choice(z).mean(0)
        found.append((share * 8).var())
    error = np.std(found) / 20
    assert abs(alike.load_variance[0] - np.mean(found)) < 4 * error
    assert alike.learns[0]


def test_balancing_loss_is_k_where_all_is_even() -> None:
    even = one_draw(Router(16, 2), 1e-4, 0.0, 256)
    assert even.balance == pytest.approx(2.0, rel=0.01)
    assert even.starving == 0.0
    assert one_draw(Router(16, 2), 1.0, 0.9, 256).balance > 4.0


# --- declarations ---------------------------------------------------------------------------------


def test_a_declaration_round_trips_and_says_its_shapes() -> None:
    block = Experts(8, 2, d_ff=24, shared=32, shared_gate_variance=0.1, router_variance=0.02)
    model = model_of(block).replace(layers=2, ffn=(None, block))
    assert moments.Transformer.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    shapes = model.shapes_of(2)
    assert shapes["router"] == (D, 8)
    assert shapes["gate"] == (D, 24)
    assert shapes["shared_ffn_out"] == (32, D)
    assert "router" not in model.shapes_of(1)
    variances = model.variances_of(2)
    assert variances["router"] == 0.02
    assert variances["shared_ffn_out"] == variances["ffn_out"]
    assert "experts 8" in str(model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chosen": 9}, "chosen = 9: must be at most experts = 8"),
        ({"rule": "hash"}, "rule = 'hash'"),
        ({"normalised": "none"}, "normalised = 'none': must be 'chosen' or 'all'"),
        ({"rule": "sigmoid_input"}, "pass chosen=1"),
        ({"groups": 3}, "a divisor of experts = 8"),
        ({"groups": 8, "kept_groups": 1}, "kept_groups = 1: must be 2 to 8"),
        ({"router_variance": -1.0}, "router_variance = -1"),
        ({"shared_gate_variance": 1.0}, "None: no expert"),
        ({"scale": 0.0}, "scale = 0"),
    ],
)
def test_what_is_no_mixture_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        Experts(**({"experts": 8, "chosen": 2} | fields))


def test_what_a_model_with_experts_does_not_have() -> None:
    with pytest.raises(DomainError, match="gated"):
        model_of(Experts(8, 2, shift=1.0), activation="relu")
    with pytest.raises(DomainError, match="activation_dropout"):
        model_of(Experts(8, 2), activation_dropout=0.1)
    with pytest.raises(DomainError, match="does not cover"):
        predict(model_of(Experts(8, 2)), variance=1.0, theory="published")
    with pytest.raises(DomainError, match="no experts"):
        predict(model_of(None), variance=1.0).experts()


def test_the_balancing_loss_s_gradient_is_autograd_s() -> None:
    """At the router's matrix, tokens given, over draws of it."""
    tokens, draws = 48, 150
    rng = np.random.default_rng(0)
    x = 0.6**0.5 * rng.standard_normal((1, D)) + 0.4**0.5 * rng.standard_normal((tokens, D))
    x = torch.tensor(x * (D / (x * x).sum(1, keepdims=True)) ** 0.5)
    kernel = (x @ x.T / D).numpy()
    pairs = (kernel.sum() - tokens) / (tokens * (tokens - 1))
    for block in (Experts(8, 2), Experts(8, 2, rule="sigmoid")):
        router, found = router_of(block), []
        for seed in range(draws):
            random = torch.Generator().manual_seed(seed)
            weight = torch.randn(D, 8, generator=random, dtype=torch.float64) / D**0.5
            weight.requires_grad_()
            logits = x @ weight
            score = torch.sigmoid(logits) if router.logistic else torch.softmax(logits, -1)
            share = torch.zeros_like(score).scatter(-1, score.topk(2, -1).indices, 1.0).mean(0)
            loss = 8 * (share * (score / score.sum(-1, keepdim=True)).mean(0)).sum()
            (sent,) = torch.autograd.grad(loss, weight)
            found.append(float((sent * sent).sum()))
        drawn = one_draw(router, 1.0, float(pairs), tokens)
        mean = D * (drawn.own / tokens + pairs * drawn.pairs * (1 - 1 / tokens))
        error = np.std(found) / draws**0.5
        assert abs(mean / np.mean(found) - 1) < 0.05 + 3 * error / np.mean(found)


SPREAD = {
    (0.0, "all"): ((0.0356, 0.1262, 0.1039, 0.0932), (0.1874, 0.1580, 0.0958)),
    (0.6, "all"): ((0.0895, 0.3022, 0.2237, 0.1781), (0.2734, 0.2669, 0.1347)),
    (0.6, "chosen"): ((0.0895, 0.1465, 0.1289, 0.1145), (0.2235, 0.1399, 0.0763)),
}
"""Deviations over 400 draws of the twin of the logarithms of the stream's and the gradient's
variance, by the tokens' correlation and what gates are divided by: `simulate(seeds=400)`."""


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "normalised"), SPREAD)
def test_the_band_follows_the_router_s_draw(correlation: float, normalised: str) -> None:
    """Deviations within 20 percent and three standard errors; without the router's draw, that of
    the first layer was .126 where it is .302."""
    weights = moments.Weights(*[1 / 96] * 4, ffn_in=2 / 96, ffn_out=4 / 64)
    scale = 3.0 if normalised == "all" else 1.0
    model = moments.Transformer(
        *(3, 96, 4, 16),
        d_ff=64,
        causal=True,
        activation="relu",
        normalization="rmsnorm",
        norm="pre",
        ffn=Experts(8, 2, d_ff=64, normalised=normalised, scale=scale),
        weights=weights,
    )
    found = predict(model, variance=1.0, correlation=correlation)
    for name, seen in zip(
        ("variance", "grad_variance"), SPREAD[correlation, normalised], strict=True
    ):
        low, high = getattr(found, f"{name}_band")
        deviation = np.log(high / low) / (2 * 1.959963984540054)
        off = np.abs(deviation[: len(seen)] / np.array(seen) - 1)
        assert np.all(off < 0.2 + 3 / 800**0.5), (name, deviation)


def test_a_shared_expert_in_a_parallel_layer_has_a_band() -> None:
    """Branches in a branch: attention beside a mixture beside its shared expert."""
    model = model_of(Experts(8, 2, shared=32), parallel=True)
    found = predict(model, variance=1.0, correlation=0.3, tokens=False)
    alike = predict(model, variance=1.0, correlation=0.3, tokens=True)
    low, high = found.grad_variance_band
    assert np.all(low <= found.grad_variance_typical)
    assert np.all(found.grad_variance_typical <= high)
    assert low[0] < high[0] < 2 * low[0]
    np.testing.assert_allclose(alike.grad_variance_band, found.grad_variance_band, rtol=0.02)


def test_a_router_of_zeros_sends_all_tokens_to_the_same_experts() -> None:
    """As torch breaks ties; two halves of every token's gate."""
    model = model_of(Experts(8, 2, router_variance=0.0))
    found = predict(model, variance=1.0, correlation=0.1, tokens=False).experts()
    assert found.gate_square[0] == pytest.approx(0.5, rel=1e-3)
    assert found.gate_overlap[0] == pytest.approx(0.5, rel=1e-3)
    assert found.load_variance[0] == pytest.approx(8 / 2 - 1, rel=1e-3)


def test_schemes_reach_the_experts() -> None:
    model = model_of(Experts(8, 2)).replace(layers=2)
    with pytest.warns(moments.ValidityWarning, match="its authors use"):
        scaled = model.with_scheme("ds-init")
    assert scaled.weights.ffn_out != model.weights.ffn_out
    assert scaled.ffns == model.ffns


def test_a_router_that_cannot_learn_and_experts_that_starve_are_findings() -> None:
    embedding = moments.Embedding(vocab_size=40, token_variance=1.0)
    head = moments.Head(tied=False, weight_variance=1 / D, loss="causal")
    fields = {"embedding": embedding, "head": head, "causal": True}
    report = moments.check(model_of(Experts(8, 1), **fields))
    assert [f.kind for f in report.findings if f.severity == "error"] == ["router cannot learn"]
    healthy = moments.check(model_of(Experts(8, 2), **fields))
    assert not {"router cannot learn", "experts starve"} & {f.kind for f in healthy.findings}
    alike = embedding.replace(token_variance=0.05, segment_variance=0.95)
    report = moments.check(model_of(Experts(16, 2), **(fields | {"embedding": alike})))
    (starving,) = [f for f in report.findings if f.kind == "experts starve"]
    assert starving.measured > starving.expected
    assert "balancing loss" in starving.mend
    # few tokens for many experts, of which most get none however evenly they choose
    few = moments.predict(model_of(Experts(256, 2), **fields))
    assert few.experts().starving.min() > 0.5
    assert not [f for f in moments.check(few.model).findings if f.kind == "experts starve"]


def test_a_clamp_that_binds_is_named() -> None:
    weights = moments.Weights(1 / D, 1 / D, 1 / D, 1 / D, 16 / D, 1 / WIDTH, 16 / D)
    model = model_of(Experts(8, 2, clamp=7.0), weights=weights)
    with pytest.warns(moments.ValidityWarning, match="clamps at 7 bind"):
        predict(model, variance=1.0, tokens=False)
