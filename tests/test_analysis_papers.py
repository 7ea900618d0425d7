"""Analyses of single papers: Jacobian bounds, uniform attention, query gradients, named cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy

import moments
from moments.formulas.law import ComponentLaws
from studies.analysis import (
    compute_table,
    gradient_gap,
    jacobian_bounds,
    named_cases,
    uniform_attention,
)
from studies.analysis.cases import PaperCase, double_query_key
from studies.analysis.kedia import parameter_count
from studies.formulas.stacks import STACKS


@pytest.mark.parametrize("record", STACKS.values(), ids=lambda record: record.name)
def test_laws_have_numbers_symbols_and_sources(record: ComponentLaws) -> None:
    for law in record.laws.values():
        values = dict.fromkeys(law.arguments, 0.3)
        values |= {name: 5.0 for name in law.arguments if law.domain[name].lower >= 1}
        number = law(**values)
        assert float(law.evaluate(**values)) == pytest.approx(number, rel=1e-12)
        substituted = law.expr.subs(dict(zip(law.symbols, values.values(), strict=True)))
        assert float(sympy.N(substituted)) == pytest.approx(number, rel=1e-9)
        assert law.source.reference
        assert law.latex()


# --- Sun et al. -----------------------------------------------------------------------------------


def test_jacobian_bounds_of_a_prediction() -> None:
    model = moments.Transformer(24, 128, 4, 32)
    p = moments.predict(model, correlation=0.3)
    plain = jacobian_bounds(p)
    scaled = jacobian_bounds(moments.predict(model.with_scheme("lns"), correlation=0.3))
    # They are bounds, by far; scaling lowers them though it lets the stream's variance grow less.
    assert (plain.predicted[1:] < plain.corrected[1:]).all()
    assert scaled.corrected[-1] < plain.corrected[-1]
    assert np.diff(plain.corrected) == pytest.approx(
        np.log1p(
            plain.constants["jacobian_linear"] / np.sqrt(p.variance[:-1])
            + plain.constants["jacobian_quadratic"] / p.variance[:-1]
        )
    )
    assert plain.query == pytest.approx(plain.corrected + plain.query[0])
    assert len(plain.to_frame()) == 25
    with pytest.raises(moments.DomainError, match="pre"):
        jacobian_bounds(moments.predict(model.replace(norm="post")))


# --- Noci et al. ----------------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [0.0, 0.4])
def test_uniform_attention_is_the_engine_and_a_simulation(correlation: float) -> None:
    layers, tokens, d = 5, 8, 128
    found = uniform_attention(layers, tokens, correlation=correlation, d_model=d)
    assert found.predicted_variance is not None
    assert found.predicted_correlation is not None
    assert found.variance == pytest.approx(found.predicted_variance, rel=1e-9)
    assert found.correlation == pytest.approx(found.predicted_correlation, abs=1e-9)
    rng = np.random.default_rng(2)
    squares, products = [], []
    for _ in range(60):
        x = math.sqrt(correlation) * rng.normal(size=(1, d))
        x = x + math.sqrt(1 - correlation) * rng.normal(size=(tokens, d))
        for _ in range(layers):
            value, ffn = rng.normal(size=(2, d, d)) / math.sqrt(d)
            x = x + (x.mean(0, keepdims=True) @ value) / math.sqrt(layers)
            x = x + x @ ffn / math.sqrt(layers)
        squares.append((x**2).mean())
        products.append((x.sum(0) ** 2).sum() / (tokens * d))
    assert found.variance[-1] == pytest.approx(np.mean(squares), rel=0.05)
    share = 1 + (tokens - 1) * correlation
    assert found.inner_products[-1] * share == pytest.approx(np.mean(products), rel=0.08)


def test_limits_are_those_of_many_layers() -> None:
    deep = uniform_attention(20_000, 20, correlation=0.1, attention_constant=1.5, ffn_constant=0.7)
    assert deep.variance[-1] == pytest.approx(deep.variance_limit, rel=1e-3)
    assert deep.correlation[-1] == pytest.approx(deep.correlation_limit, abs=1e-4)
    assert deep.inner_products[-1] == pytest.approx(math.exp(2.2), rel=1e-3)
    # Equation 15 in the paper's own symbols, C = n d v (1 + (n - 1) r) and |X|^2 = n d v.
    n, c, square = 20, 20 * 2.9, 20.0
    grown = math.exp(1.5)
    printed = n * grown * c / ((n - 1) * ((grown - 1) * c + n * square)) - 1 / (n - 1)
    assert deep.correlation_limit == pytest.approx(printed, rel=1e-12)
    collapsing = uniform_attention(60, 20, depth_scaled=False)
    assert collapsing.correlation_limit == 1.0
    assert collapsing.correlation[-1] == pytest.approx(1.0, abs=1e-9)
    assert collapsing.predicted_variance is not None


def test_uniform_attention_checks_its_arguments() -> None:
    for wrong in ({"layers": 0}, {"seq_len": 1}, {"variance": 0.0}, {"correlation": -0.9}):
        with pytest.raises(moments.DomainError, match=next(iter(wrong))):
            uniform_attention(**{"layers": 2, "seq_len": 8, **wrong})  # type: ignore[arg-type]


def test_query_gradients_fall_behind_as_tokens_collapse() -> None:
    model = moments.Transformer(6, 64, 1, 32, norm="post")
    found = gradient_gap(moments.predict(model, correlation=0.2))
    assert (np.diff(found.ratio) < 0).all()
    assert (np.diff(found.temperature) > 0).all()
    with pytest.raises(moments.DomainError, match="refined"):
        gradient_gap(moments.predict(model, theory="published"))


def test_temperature_evens_gradients_out() -> None:
    """Up to a factor: the logits it makes raise the value gradient by 1 + n/(n + d) as well."""
    d, n, variance = 64, 512, 0.02
    weights = moments.Weights(*[1 / d] * 6)
    model = moments.Transformer(1, d, 1, n, norm="none", weights=weights)
    found = gradient_gap(moments.predict(model, variance=variance))
    assert found.uniform_ratio[0] == pytest.approx(found.ratio[0], rel=0.05)
    assert found.ratio[0] < 0.01
    # The engine's logits: what enters attention is the unnormalised stream.
    tempered = model.replace(temperature=1 / found.temperature[0])
    even = gradient_gap(moments.predict(tempered, variance=variance))
    assert even.ratio[0] == pytest.approx((n + d) / (2 * n + d), rel=0.06)


# --- compute --------------------------------------------------------------------------------------


def test_table_of_parameters_and_compute() -> None:
    table = compute_table().to_frame()
    whole = np.floor(table["parameters"].to_numpy() / 1e6) * 1e6
    assert whole == pytest.approx(table["printed parameters"].to_numpy(), abs=0.5)
    extra = table.dropna(subset=["printed extra"])
    assert extra["extra"].to_numpy() == pytest.approx(extra["printed extra"].to_numpy(), abs=1.0)
    other = compute_table([(12, 768), (48, 384)]).to_frame()
    assert other["printed shape"].isna().all()


def test_parameter_count_is_that_of_a_module() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256)
    tables = (1000 + 128) * 64
    counted = 3 * sum(p.numel() for p in layer.parameters()) + tables
    assert parameter_count(3, 64, vocab_size=1000, positions=128) == counted


# --- named cases ----------------------------------------------------------------------------------

FAST = (
    "small_branches",
    "relu_polynomial",
    "uniformity",
    "query_value_ratio",
    "gradients_in_depth",
    "reversal",
    "angles_in_house",
    "angles_under_scaling",
)


@pytest.fixture(scope="module")
def cases() -> dict[str, PaperCase]:
    return dict(named_cases(FAST).cases)


@pytest.mark.slow
def test_every_case_says_what_it_is(cases: dict[str, PaperCase]) -> None:
    for name, case in cases.items():
        assert case.name == name
        assert case.source.place
        assert case.settings
        assert all(math.isfinite(value) for value in case.predicted.values())
        assert name in str(case)
        assert case._repr_html_()
    with pytest.raises(moments.DomainError, match="reversal"):
        named_cases(["nothing"])


@pytest.mark.slow
def test_angles_before_training(cases: dict[str, PaperCase]) -> None:
    """Pre-LN's fall with depth, Post-LN's rise; LayerNorm Scaling's fall faster, not slower."""
    steps = {
        (name, label): np.diagonal(matrix, 1)
        for name in ("angles_in_house", "angles_under_scaling")
        for label, matrix in cases[name].series.items()
    }
    pre, scaled = (steps["angles_under_scaling", x] for x in ("Pre-LN", "LayerNorm Scaling"))
    assert np.all(np.diff(pre) < 0)
    assert np.all(np.diff(steps["angles_in_house", "Post-LN"]) > 0)
    assert scaled[0] == pytest.approx(pre[0])
    assert np.all(scaled[1:] < pre[1:])
    assert max(pre.max(), scaled.max()) < 0.5


def test_small_branches_keep_tokens_apart(cases: dict[str, PaperCase]) -> None:
    found = cases["small_branches"].predicted
    for norm in ("pre", "post"):
        assert found[f"{norm}, lambda = 1, beta = 1"] > 0.99
        assert found[f"{norm}, lambda = 1, beta^2 = 1/N"] < 0.8
    kept = found["pre, lambda = 1, beta^2 = 1/N"]
    assert kept < found["pre, lambda^2 = 1 - 1/N, beta^2 = 1/N"] - 0.1


def test_relu_polynomial_is_the_least_squares_to_a_digit(cases: dict[str, PaperCase]) -> None:
    found = cases["relu_polynomial"].predicted
    assert found["least squares, r"] == pytest.approx(0.7, abs=0.05)
    assert found["least squares, r^2"] == pytest.approx(0.3, abs=0.05)
    # ReLU's correlation by the arc-cosine kernel of Cho and Saul.
    r = np.linspace(0, 1, 501)
    kernel = (np.sqrt(1 - r**2) + r * (math.pi - np.arccos(r))) / math.pi
    exact = (kernel / 2 - 1 / (2 * math.pi)) / (1 / 2 - 1 / (2 * math.pi))
    assert found["largest error"] == pytest.approx(
        np.abs(0.7 * r + 0.3 * r**2 - exact).max(), abs=1e-5
    )


def test_attention_tends_to_uniform_with_the_head_width(cases: dict[str, PaperCase]) -> None:
    case = cases["uniformity"]
    assert case.predicted["exponent from d_k = 1000"] == pytest.approx(-2, abs=0.1)
    rng = np.random.default_rng(5)
    widths, distances = case.series["d_k"], case.series["distance"]
    for d_head in (30, 300):
        scale = math.sqrt(2 / (100 + d_head))
        found = []
        for _ in range(40):
            x = rng.normal(size=(50, 100))
            query, key = rng.normal(size=(2, 100, d_head)) * scale
            logits = (x @ query) @ (x @ key).T / math.sqrt(d_head)
            a = np.exp(logits - logits.max(1, keepdims=True))
            a /= a.sum(1, keepdims=True)
            found.append(((a - 1 / 50) ** 2).mean())
        predicted = distances[list(widths).index(d_head)]
        assert predicted == pytest.approx(np.mean(found), rel=0.1)


def test_query_value_ratio_is_uniform_for_small_inputs(cases: dict[str, PaperCase]) -> None:
    found = cases["query_value_ratio"].predicted
    assert found["deviation 0.1: largest |log ratio|"] < 1e-3
    assert found["deviation 0.5: largest |log ratio|"] < 0.2
    assert found["deviation 1: largest |log ratio|"] > 0.5


def test_pre_ln_keeps_query_gradients(cases: dict[str, PaperCase]) -> None:
    found = cases["gradients_in_depth"].predicted
    assert found["post: correlation, last layer"] > 0.999
    assert found["pre: correlation, last layer"] < 0.95
    assert found["post: query / value, last layer"] < 1e-6
    assert found["pre: query / value, last layer"] > 1e-4
    toy = cases["reversal"].predicted
    # .891 with a standard error of .002 in simulation, from an input of correlation .3
    assert toy["correlation, last layer"] == pytest.approx(0.89, abs=0.02)
    # .090 (.004) in 4,000 draws of the toy, digits and all, written out in torch
    fall = toy["query / value, last layer"] / toy["query / value, layer 1"]
    assert fall == pytest.approx(0.090, abs=0.02)


def test_double_query_key_grows_with_depth() -> None:
    """A few layers of the case: most of what 192 layers do comes from the first."""
    found = double_query_key(layers=6).predicted
    assert found["pre, deviations: over Xavier's"] > 20
    assert found["pre, deviations: over Xavier's"] > 5 * found["pre, variances: over Xavier's"]
    assert found["post, deviations: over Xavier's"] > found["post, variances: over Xavier's"] > 1


def test_doubled_queries_and_keys_are_not_ten_thousandfold() -> None:
    """Two simulated draws of the Pre-LN with 512 tokens grow 192-fold (65) where variances are
    doubled, and 1.9e8-fold (1.7e8) where deviations are."""
    found = double_query_key().predicted
    assert found["pre, variances: growth"] == pytest.approx(192, abs=65)
    assert 1e7 < found["pre, deviations: growth"] < 1e9
    for norm in ("pre", "post"):
        assert found[f"{norm}, variances: over Xavier's"] < 100
        assert found[f"{norm}, deviations: over Xavier's"] > 1e6


def test_norm_growth_before_attention_is_sharp() -> None:
    """Figure 11's first five layers against draws of the linear network."""
    width, tokens, layers = 30, 20, 4
    case = named_cases(["norm_growth"])["norm_growth"]
    assert case.notes
    rng = np.random.default_rng(6)
    for name, deviation in (("1/sqrt(d)", width**-0.5), ("uniform", width**-0.5)):
        ends = []
        for _ in range(400):
            x = deviation * rng.normal(size=(tokens, width))
            for _ in range(layers):
                q, k, v, o, a, b = rng.normal(size=(6, width, width)) / math.sqrt(width)
                logits = (x @ q) @ (x @ k).T / math.sqrt(width) * (name != "uniform")
                weights = np.exp(logits - logits.max(1, keepdims=True))
                x = x + weights / weights.sum(1, keepdims=True) @ x @ v @ o
                x = x + x @ a @ b
            ends.append(float(np.mean(x**2)) / deviation**2)
        series = case.series["uniform" if name == "uniform" else f"deviation {name}"]
        slack = 3 * float(np.std(ends)) / 20
        assert series[layers] == pytest.approx(np.mean(ends), abs=slack + 0.01 * series[layers])
