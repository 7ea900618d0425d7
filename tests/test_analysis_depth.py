"""Analyses along the depth: fixed points, growth, sensitivity, correlated branches, angles."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import moments
from moments.formulas.linear import CORRELATED_RESIDUAL
from studies.analysis import (
    angular_distance,
    chain_constants,
    correlation_fixed_points,
    dslm_bounds,
    growth_exponents,
    growth_laws,
    sensitivity,
    trade_off,
    variance_recursion,
)
from studies.analysis.fixed_points import repeated_layer
from studies.analysis.recursion import blocks
from studies.formulas.kedia_chain import (
    DSLM_CHAIN,
    POST_LN_CHAIN,
    PRE_LN_CHAIN,
)


def model(**changes: object) -> moments.Transformer:
    fields = {"layers": 24, "d_model": 256, "heads": 4, "seq_len": 64, "dropout": 0.1}
    return moments.Transformer(**{**fields, **changes})  # type: ignore[arg-type]


# --- fixed points ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c1", "c2", "r", "rg"), [(2.2, 0.4, 0.887, 0.863), (20 / 9, 0.32 / 0.9, 0.888, 0.867)]
)
def test_closed_fixed_points_are_the_papers(c1: float, c2: float, r: float, rg: float) -> None:
    values = {"attention_gain": c1, "ffn_gain": c2, "drop_prob": 0.1}
    found = PRE_LN_CHAIN.law("correlation")(**values)
    assert found == pytest.approx(r, abs=5e-4)
    # The equation of Appendix F, not its solution.
    polynomial = 1 / math.pi + found / 2 + (1 / 2 - 1 / math.pi) * found**2
    assert found == pytest.approx((c1 * 0.9 + c2 * 0.9 * polynomial) / (c1 + c2), rel=1e-12)
    back = PRE_LN_CHAIN.law("grad_correlation")(x_correlation=found, **values)
    slope = 1 / 2 + math.asin(found) / math.pi
    assert back == pytest.approx((c1 * 0.9 + c2 * 0.9 * slope * back) / (c1 + c2), rel=1e-12)
    assert back == pytest.approx(rg, abs=5e-4)


@pytest.mark.parametrize("theory", ["simplified", "published", "refined"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_fixed_points_are_stationary(norm: str, theory: str) -> None:
    found = correlation_fixed_points(model(norm=norm), theory)  # type: ignore[arg-type]
    p = moments.predict(
        model(norm=norm, layers=300),
        correlation=found.correlation,
        grad_correlation=found.grad_correlation,
        theory=theory,  # type: ignore[arg-type]
    )
    assert not found.collapses
    assert p.correlation == pytest.approx(found.correlation, abs=2e-3)
    assert p.grad_correlation[250:] == pytest.approx(found.grad_correlation, abs=0.02)
    assert str(found)
    assert len(found.to_frame()) == 4


@pytest.mark.parametrize(
    "declared",
    [
        model(norm="post"),
        model(norm="post", dropout=0.0),
        model(norm="pre", layers=48).with_scheme("dslm", input_correlation=0.25),
    ],
    ids=["post", "post without dropout", "dslm"],
)
def test_geometric_rate_is_that_of_a_deep_stack(declared: moments.Transformer) -> None:
    layer = declared.layers
    found = correlation_fixed_points(declared, "refined", layer=layer)
    weights = declared.weights
    assert weights is not None
    last = {k: v[-1] for k, v in vars(weights).items() if isinstance(v, tuple)}
    deep = declared.replace(layers=200, weights=weights.replace(**last))
    p = moments.predict(deep, variance=found.variance, correlation=0.5)
    # A stack's own limit: what its layers before leave of finite width, one layer does not have.
    assert p.correlation[-1] == pytest.approx(found.correlation, abs=2e-3)
    distance = np.abs(p.correlation - p.correlation[-1])
    window = (distance < 0.2) & (distance > 2e-3)
    measured = distance[1:][window[1:]] / distance[:-1][window[1:]]
    assert measured[-1] == pytest.approx(found.rate, abs=0.02)
    assert found.kind == "geometric"


def test_without_dropout_tokens_collapse_at_the_closed_rates() -> None:
    # The closed rates are those of wide networks.
    wide = {"d_model": 2048, "dropout": 0.0}
    post = correlation_fixed_points(model(norm="post", **wide))
    gains = chain_constants(model(**wide))._asdict()
    assert post.collapses
    assert post.rate == pytest.approx(POST_LN_CHAIN.law("correlation_rate")(**gains), rel=5e-3)
    pre = correlation_fixed_points(model(**wide))
    assert pre.collapses
    assert pre.kind == "power"
    assert pre.rate == pytest.approx(PRE_LN_CHAIN.law("correlation_rate")(**gains), rel=5e-3)
    p = moments.predict(model(dropout=0.0, layers=1000), correlation=0.5)
    depth = np.arange(200, 1001)
    slope = np.polyfit(np.log(depth), np.log(1 - p.correlation[200:]), 1)[0]
    assert -slope == pytest.approx(pre.rate, abs=0.03)
    assert post.layers_to(0.01) == pytest.approx(math.log(0.01) / math.log(post.rate))


def test_fixed_points_need_layers_alike() -> None:
    for wrong, words in (({"norm": "none"}, "norm"), ({"layernorm_scaling": True}, "another map")):
        with pytest.raises(moments.DomainError, match=words):
            correlation_fixed_points(model(**wrong))
    with pytest.raises(moments.DomainError, match="layer"):
        correlation_fixed_points(model(), layer=99)
    with pytest.raises(moments.DomainError, match="causal"):
        correlation_fixed_points(model(causal=True))
    assert not correlation_fixed_points(model(causal=True), "published").collapses


# --- growth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("theory", ["simplified", "refined"])
def test_growth_laws_meet_predictions(theory: str) -> None:
    pre = growth_laws(model(), theory)  # type: ignore[arg-type]
    for quantity, closed in pre.closed.items():
        assert pre.predicted[quantity] == pytest.approx(closed, rel=0.02)
    post = growth_laws(model(norm="post"), theory)  # type: ignore[arg-type]
    tolerance = 1e-6 if theory == "simplified" else 0.02
    assert post.predicted["grad_growth"] == pytest.approx(post.closed["grad_growth"], rel=tolerance)
    assert post.closed["grad_growth"] == pytest.approx(0.96, abs=5e-3)


def test_growth_exponents_are_table_three() -> None:
    table = growth_exponents(model(), (64, 192)).to_frame()
    rows = {(r["method"], r["norm"], r["quantity"]): r for r in table.to_dict("records")}
    expected = {
        ("vanilla", "pre", "forward"): 1.0,
        ("vanilla", "pre", "backward"): 1.0,
        ("vanilla", "pre", "sensitivity"): 0.0,
        ("ds-init", "pre", "sensitivity"): -1.0,
        ("layerscale", "pre", "sensitivity"): 1.0,
        ("dslm", "pre", "forward"): 0.0,
        ("dslm", "pre", "backward"): 0.0,
        ("dslm", "post", "backward"): 0.0,
        ("dslm", "pre", "sensitivity"): 0.0,
    }
    for key, exponent in expected.items():
        assert rows[key]["exponent"] == pytest.approx(exponent, abs=0.05), key
    assert rows["vanilla", "post", "backward"]["rate"] == pytest.approx(-math.log(0.963), abs=0.01)
    mean = rows["vanilla", "pre", "sensitivity (mean)"]
    assert mean["N=192"] - mean["N=64"] == pytest.approx(math.log(3) / 2, rel=0.05)
    with pytest.raises(moments.DomainError, match="vanilla"):
        growth_exponents(model(), methods=["adam"])


# --- sensitivity ----------------------------------------------------------------------------------


def test_sensitivity_of_dslm_is_k() -> None:
    scaled = model(layers=96).with_scheme("dslm", k=2.0, input_correlation=0.25)
    p = moments.predict(scaled, correlation=0.225)
    found = sensitivity(p)
    assert found.closed == pytest.approx(2.0)
    assert found.median == pytest.approx(2.0, rel=0.05)
    assert found.mean == pytest.approx(2.0, rel=0.05)
    assert found.blocks.shape == (96, 2)


def test_sensitivity_over_the_plane() -> None:
    table = trade_off(model(layers=64), (0.5, 2.0), (0.4, 1.0, 2.0)).to_frame()
    assert len(table) == 6
    expected = table["k"] * 64.0 ** (1 - table["alpha"])
    assert table["sensitivity"].to_numpy() == pytest.approx(expected.to_numpy())
    assert (table["grad_ratio"] >= table["fall"]).all()
    steady = table[table["alpha"] >= 1]
    assert steady["predicted sensitivity"].to_numpy() == pytest.approx(
        steady["sensitivity"].to_numpy(), rel=0.08
    )
    assert len(trade_off(model(layers=4), (5.0,), (1.0, 2.0)).to_frame()) == 1


# --- bounds of DeepScaleLM ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1.0, 2.0])
def test_bounds_of_the_simplified_scheme(k: float) -> None:
    layers, square = 4000, k / 4000
    ends = []
    for r in (0.0, 1.0):
        v = 1.0
        for _ in range(layers):
            v = (1 - square) * ((1 - square) * v + square * r / 2) + square
        ends.append(v)
    lower, upper = (
        DSLM_CHAIN.law(f"simplified_variance_{side}")(branch_constant=k)
        for side in ("lower", "upper")
    )
    assert ends == pytest.approx([lower, upper], rel=2e-3)


@pytest.mark.parametrize("theory", ["simplified", "refined"])
@pytest.mark.parametrize("grad_correlation", [0.0, 0.4, 0.8])
@pytest.mark.parametrize(
    ("norm", "simplified"), [("pre", False), ("post", False), ("pre", True)], ids=str
)
def test_dslm_stays_within_its_bounds(
    norm: str, simplified: bool, grad_correlation: float, theory: str
) -> None:
    declared = model(layers=192, norm=norm).with_scheme(
        "dslm", variant="released", input_correlation=0.227, simplified=simplified
    )
    found = dslm_bounds(declared, theory, grad_correlation=grad_correlation)  # type: ignore[arg-type]
    assert found.branch_constant == pytest.approx(2.0)
    assert found.simplified == simplified
    for name, (low, high) in found.bounds.items():
        smallest, largest = found.extremes[name]
        # The bounds are those of many layers: 1/N of what changes.
        assert low * (1 - 5 / 192) < smallest <= largest < high * (1 + 5 / 192), name
    assert not simplified or found.extremes["variance"][0] < 0.7
    assert len(found.to_frame()) == 2


def test_dslm_bound_is_met_by_a_white_gradient() -> None:
    """Table 2's attention returns nothing of it: skip connections alone, e^(-k)."""
    declared = model(layers=1000).with_scheme("dslm", k=1.5, input_correlation=0.227)
    found = dslm_bounds(declared)
    smallest = found.extremes["grad_variance"][0]
    assert smallest == pytest.approx(math.exp(-1.5), rel=0.01)
    assert smallest == pytest.approx(found.bounds["grad_variance"][0], rel=0.01)


def test_dslm_bounds_need_dslm() -> None:
    with pytest.raises(moments.DomainError, match="skip_scale"):
        dslm_bounds(model())
    post = model(norm="post").with_scheme("dslm", input_correlation=0.227, simplified=True)
    with pytest.raises(moments.DomainError, match="simplified"):
        dslm_bounds(post)


# --- correlated branches --------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_correlation_the_recursion_is_the_prediction(norm: str) -> None:
    for declared in (model(norm=norm), model(norm=norm, skip_scale=0.9, branch_scale=0.3)):
        p = moments.predict(declared, correlation=0.3)
        found = variance_recursion(p)
        np.testing.assert_allclose(found.variance, p.variance, rtol=1e-12)
        np.testing.assert_allclose(found.grad_variance, p.grad_variance, rtol=1e-12)


def test_variance_of_a_correlated_sum() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 400_000))
    rho, b, skip, branch = 0.4, 2.5, 0.8, 0.3
    added = math.sqrt(b) * (rho * x + math.sqrt(1 - rho**2) * y)
    law = CORRELATED_RESIDUAL.law("variance")(
        skip_square=skip**2,
        branch_square=branch**2,
        x_variance=1.0,
        branch_variance=b,
        branch_correlation=rho,
    )
    assert law == pytest.approx(np.var(skip * x + branch * added), rel=0.01)


def test_training_turns_linear_growth_quadratic() -> None:
    """d sigma / d block = rho sigma_b: with correlated branches the deviation is linear."""
    p = moments.predict(model(layers=400), correlation=0.88)
    found = variance_recursion(p, 0.5)
    late = slice(200, None)
    slope = np.polyfit(np.log(np.arange(401)[late]), np.log(found.variance[late]), 1)[0]
    assert slope == pytest.approx(2.0, abs=0.1)
    c1, c2 = chain_constants(model())
    line = np.polyfit(np.arange(401), p.variance, 1)[0]
    assert line == pytest.approx(c1 * p.correlation[-1] + c2, rel=0.02)


def test_a_large_beta_loses_the_gradient_in_training() -> None:
    """Kedia et al.'s Figure 9 against Figure 10: 2/N keeps the gradient, beta^2 = .1 does not."""
    falls = {}
    for name, square in (("large", 0.1), ("2/N", 2 / 96)):
        scaled = model(layers=96).with_scheme("dslm", k=square * 96, input_correlation=0.25)
        p = moments.predict(scaled.replace(norm="post"), correlation=0.225)
        found = variance_recursion(p, 0.2)
        falls[name] = found.grad_variance[0] / p.grad_variance[0]
    assert falls["large"] < 1e-4
    assert falls["large"] < 1e-2 * falls["2/N"]
    with pytest.raises(moments.DomainError, match="branch_correlation"):
        variance_recursion(moments.predict(model()), 1.5)


def test_similar_gradient_correlation_makes_up_for_most_of_the_fall() -> None:
    """E.6.2: equal correlations of signals and gradients cancel; exactly so only at C_6 = 1."""
    scaled = model(layers=96, norm="post").with_scheme("dslm", input_correlation=0.25)
    p = moments.predict(scaled, correlation=0.225)
    both = math.log(variance_recursion(p, 0.2, 0.2).grad_variance[0] / p.grad_variance[0])
    alone = math.log(variance_recursion(p, 0.2).grad_variance[0] / p.grad_variance[0])
    assert alone < -6
    assert 0.6 * alone < both < 0


# --- angles ---------------------------------------------------------------------------------------

Array = np.ndarray


def _norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / centred.std(-1, keepdims=True)


def _attention(x: Array, weights: list[Array], heads: int) -> Array:
    query, key, value, output = weights
    d_head = x.shape[1] // heads

    def split(y: Array) -> Array:
        return y.reshape(len(x), heads, d_head).transpose(1, 0, 2)

    logits = split(x @ query) @ split(x @ key).transpose(0, 2, 1) / math.sqrt(d_head)
    weights_a = np.exp(logits - logits.max(-1, keepdims=True))
    weights_a /= weights_a.sum(-1, keepdims=True)
    mixed = (weights_a @ split(x @ value)).transpose(1, 0, 2).reshape(x.shape)
    return mixed @ output


def simulated_streams(norm: str, layers: int, d: int, heads: int, length: int) -> list[Array]:
    """The stream of a small transformer, written out; `wrap` places the norms."""
    rng = np.random.default_rng(3)
    streams = []
    for _ in range(16):
        common = rng.normal(size=(1, d))
        x = math.sqrt(0.3) * common + math.sqrt(0.7) * rng.normal(size=(length, d))
        seen = [x]
        for _ in range(layers):
            xavier = math.sqrt(2 / (d + d / heads))
            matrices = [rng.normal(size=(d, d)) * xavier for _ in range(3)]
            matrices.append(rng.normal(size=(d, d)) / math.sqrt(d))
            up = rng.normal(size=(d, 4 * d)) * math.sqrt(2 / (5 * d))
            down = rng.normal(size=(4 * d, d)) * math.sqrt(2 / (5 * d))
            branches: list[Callable[[Array], Array]] = [
                lambda y, m=matrices: _attention(y, m, heads),  # type: ignore[misc]
                lambda y, a=up, b=down: np.maximum(y @ a, 0) @ b,  # type: ignore[misc]
            ]
            for branch in branches:
                x = x + branch(_norm(x)) if norm == "pre" else _norm(x + branch(x))
            seen.append(x)
        streams.append(np.stack(seen))
    return streams


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_angles_between_layers(norm: str) -> None:
    layers, d, heads, length = 6, 128, 4, 16
    measured = []
    for stream in simulated_streams(norm, layers, d, heads, length):
        unit = stream / np.linalg.norm(stream, axis=-1, keepdims=True)
        measured.append(np.arccos(np.einsum("ltd,mtd->lmt", unit, unit).clip(-1, 1)).mean(-1))
    average = np.mean(measured, axis=0) / math.pi
    p = moments.predict(moments.Transformer(layers, d, heads, length, norm=norm), correlation=0.3)
    found = angular_distance(p)
    assert found.matrix == pytest.approx(average, abs=0.02)
    assert found.matrix == pytest.approx(found.matrix.T)
    assert found.from_layer(2)[0] == found.matrix[0, 2]
    assert len(found.to_frame()) == layers * (layers + 1) // 2


def test_pre_ln_layers_turn_ever_less_and_scaling_does_not_change_that_at_init() -> None:
    """Depth's curse at initialisation: LayerNorm Scaling shrinks later branches further."""
    plain = angular_distance(moments.predict(model(layers=48), correlation=0.3)).from_layer(1)
    scaled = angular_distance(
        moments.predict(model(layers=48).with_scheme("lns"), correlation=0.3)
    ).from_layer(1)
    assert (np.diff(plain) < 0).all()
    assert scaled[-1] < plain[-1]
    trained = angular_distance(moments.predict(model(layers=48), correlation=0.3), 0.5)
    assert trained.from_layer(1)[-1] < plain[-1]


@pytest.mark.parametrize("scheme", ["admin", "lns", "deepnorm"])
def test_scales_of_each_block_are_read_block_by_block(scheme: str) -> None:
    # One layer of these may carry two scales: a model's own numbers, whatever their shape.
    declared = model(norm="pre" if scheme == "lns" else "post").with_scheme(scheme)
    whole = moments.predict(declared)
    for block in blocks(whole):
        scale = declared.by_block("branch_scale")[block.layer - 1]
        assert block.branch_square == pytest.approx(scale[int(block.name == "ffn")] ** 2)
    single = repeated_layer(declared, 3, 2)
    assert single.layers == 2
    for name in ("skip_scale", "branch_scale"):
        both, own = single.by_block(name), declared.by_block(name)[2]
        assert both == pytest.approx(np.stack([own, own]))
