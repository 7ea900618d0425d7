"""Analyses of single papers: Jacobian bounds, uniform attention, query gradients, their cases."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import sympy

import moments
from moments.formulas import kedia_chain, noci, sun
from moments.formulas.activation import RELU
from moments.formulas.law import ComponentLaws
from moments.papers.analysis import compute_table, gradient_gap, jacobian_bounds
from moments.papers.analysis.kedia import parameter_count

RECORDS = (
    kedia_chain.PRE_LN_CHAIN,
    kedia_chain.POST_LN_CHAIN,
    kedia_chain.DSLM_CHAIN,
    kedia_chain.CORRELATED_RESIDUAL,
    sun.CURSE_OF_DEPTH,
    noci.UNIFORM_ATTENTION_STACK,
    noci.UNIFORM_ATTENTION_JACOBIAN,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
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


def linear_stack(layers: int, d: int, tokens: int) -> moments.Transformer:
    """Attention is uniform, for queries are zero; every other matrix keeps the variance."""
    weights = moments.Weights(0.0, 0.0, *[1 / d] * 4)
    return moments.Transformer(
        layers, d, 1, tokens, d_ff=d, norm="none", activation="identity", weights=weights
    )


def uniform(quantity: str, **values: float) -> float:
    """Of the linear stack under uniform attention, by its law."""
    given = {"x_variance": 1.0, "x_correlation": 0.0, **values}
    return float(noci.UNIFORM_ATTENTION_STACK.law(quantity)(**given))


@pytest.mark.parametrize("correlation", [0.0, 0.4])
def test_uniform_attention_is_the_engine_and_a_simulation(correlation: float) -> None:
    layers, tokens, d = 5, 8, 128
    p = moments.predict(
        linear_stack(layers, d, tokens).replace(branch_scale=layers**-0.5), correlation=correlation
    )
    squares = {"attention_branch_square": 1 / layers, "ffn_branch_square": 1 / layers}
    at = {**squares, "seq_len": tokens, "x_correlation": correlation}
    for n in range(1, layers + 1):
        assert p.variance[n] == pytest.approx(uniform("variance", layers=n, **at), rel=1e-9)
        assert p.correlation[n] == pytest.approx(uniform("correlation", layers=n, **at), abs=1e-9)
    rng = np.random.default_rng(2)
    drawn, products = [], []
    for _ in range(60):
        x = math.sqrt(correlation) * rng.normal(size=(1, d))
        x = x + math.sqrt(1 - correlation) * rng.normal(size=(tokens, d))
        for _ in range(layers):
            value, ffn = rng.normal(size=(2, d, d)) / math.sqrt(d)
            x = x + (x.mean(0, keepdims=True) @ value) / math.sqrt(layers)
            x = x + x @ ffn / math.sqrt(layers)
        drawn.append((x**2).mean())
        products.append((x.sum(0) ** 2).sum() / (tokens * d))
    assert p.variance[-1] == pytest.approx(np.mean(drawn), rel=0.05)
    grown = uniform("inner_product_growth", layers=layers, **at)
    assert grown * (1 + (tokens - 1) * correlation) == pytest.approx(np.mean(products), rel=0.08)


def test_limits_are_those_of_many_layers() -> None:
    layers, n = 20_000, 20
    at = {
        "attention_branch_square": 1.5 / layers,
        "ffn_branch_square": 0.7 / layers,
        "attention_depth_constant": 1.5,
        "ffn_depth_constant": 0.7,
        "layers": layers,
        "seq_len": n,
        "x_correlation": 0.1,
    }
    assert uniform("variance", **at) == pytest.approx(uniform("variance_limit", **at), rel=1e-3)
    limit = uniform("correlation_limit", **at)
    assert uniform("correlation", **at) == pytest.approx(limit, abs=1e-4)
    assert uniform("inner_product_growth", **at) == pytest.approx(math.exp(2.2), rel=1e-3)
    # Equation 15 in the paper's own symbols, C = n d v (1 + (n - 1) r) and |X|^2 = n d v.
    c, square = n * 2.9, float(n)
    grown = math.exp(1.5)
    printed = n * grown * c / ((n - 1) * ((grown - 1) * c + n * square)) - 1 / (n - 1)
    assert limit == pytest.approx(printed, rel=1e-12)
    unscaled = {"attention_branch_square": 1.0, "ffn_branch_square": 1.0, "layers": 60}
    assert uniform("correlation", seq_len=n, **unscaled) == pytest.approx(1.0, abs=1e-9)


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
    assert parameter_count(3, 64, rows=1000 + 128) == counted


# --- what the papers report -----------------------------------------------------------------------


def test_small_branches_keep_tokens_apart() -> None:
    """Kedia et al. 3.4, without dropout: beta^2 = 1/N does, and in Pre-LN a whole skip connection
    more than one of 1 - 1/N."""
    layers = 192
    ends = {}
    for norm in ("post", "pre"):
        for skip, branch in ((1, 1), (1, 1 / layers), (1 - 1 / layers, 1 / layers)):
            model = moments.Transformer(
                layers, 256, 4, 256, norm=norm, skip_scale=skip**0.5, branch_scale=branch**0.5
            )
            ends[norm, skip, branch] = moments.predict(model, correlation=0.227).correlation[-1]
        assert ends[norm, 1, 1] > 0.99
        assert ends[norm, 1, 1 / layers] < 0.8
    assert ends["pre", 1, 1 / layers] < ends["pre", 1 - 1 / layers, 1 / layers] - 0.1


def test_relu_polynomial_is_the_least_squares_to_a_digit() -> None:
    """Figure 12 of Kedia et al.: .7 r + .3 r^2 beside ReLU's correlation law."""
    r = np.linspace(0, 1, 1001)
    unit = RELU.law("variance", "published")(x_variance=1.0)
    fitted, law = (
        RELU.law("covariance", theory)(x_variance=1.0, x_correlation=r) / unit
        for theory in ("simplified", "published")
    )
    # ReLU's correlation by the arc-cosine kernel of Cho and Saul.
    kernel = (np.sqrt(1 - r**2) + r * (math.pi - np.arccos(r))) / math.pi
    exact = (kernel / 2 - 1 / (2 * math.pi)) / (1 / 2 - 1 / (2 * math.pi))
    assert law == pytest.approx(exact, abs=1e-12)
    assert fitted == pytest.approx(0.7 * r + 0.3 * r**2, abs=1e-12)
    assert np.abs(fitted - exact).max() == pytest.approx(0.006, abs=5e-4)
    coefficients = np.linalg.lstsq(np.stack([r, r**2], axis=1), exact, rcond=None)[0]
    assert coefficients == pytest.approx([0.714, 0.277], abs=5e-4)


def test_attention_tends_to_uniform_with_the_head_width() -> None:
    """Figure 7 of Noci et al. at d_v = 100: squared distance from uniform, per entry."""

    def distance(d_head: int) -> float:
        share = 2 / (100 + d_head)
        weights = moments.Weights(share, share, 0.01, 0.01, 0.01, 0.01)
        model = moments.Transformer(
            1, 100, 1, 50, norm="none", d_head=d_head, weights=weights, activation="identity"
        )
        # The mean over rows of sum_j (a_ij - 1/n)^2, over all n^2 entries and another n^2 / n.
        return moments.predict(model).attention()["distance_to_uniform"].iloc[0] / 50

    widths = np.array([1000, 3000, 10000])
    slope = np.polyfit(np.log(widths), np.log([distance(int(width)) for width in widths]), 1)[0]
    assert slope == pytest.approx(-2, abs=0.1)
    rng = np.random.default_rng(5)
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
        assert distance(d_head) == pytest.approx(np.mean(found), rel=0.1)


def test_query_value_ratio_is_uniform_for_small_inputs() -> None:
    """Figures 12 to 14 of Noci et al.: squared gradients of one head's queries over its values."""
    law = noci.UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")
    gaps: dict[float, list[float]] = {0.1: [], 0.5: [], 1.0: []}
    for d, n, r, deviation in itertools.product((32, 128), (16, 64), (0.0, 0.3, 0.9), gaps):
        model = moments.Transformer(1, d, 1, n, norm="none", weights=moments.Weights(*[1 / d] * 6))
        p = moments.predict(model, variance=deviation**2, correlation=r, tokens=False)
        norms = p.weight_gradients().set_index("weight")["squared_norm"]
        square = law(d_model=d, seq_len=n, x_variance=deviation**2, x_correlation=r)
        gaps[deviation].append(abs(math.log(square * norms["query"] / norms["value"])))
    assert max(gaps[0.1]) < 1e-3
    assert max(gaps[0.5]) < 0.2
    assert max(gaps[1.0]) > 0.5


def test_pre_ln_keeps_query_gradients() -> None:
    """Figures 3 and 9 of Noci et al., with Table 2's network."""
    ends = {}
    for norm in ("post", "pre"):
        p = moments.predict(
            moments.Transformer(12, 32, 4, 50, d_ff=128, norm=norm), correlation=0.2
        )
        ends[norm] = p.correlation[-1], gradient_gap(p).ratio[-1]
    assert ends["post"][0] > 0.999
    assert ends["post"][1] < 1e-6
    assert ends["pre"][0] < 0.95
    assert ends["pre"][1] > 1e-4


def test_reversal_of_digits_collapses() -> None:
    """C.1 of Noci et al.: five Post-LN layers, one head, twenty digits, sinusoidal positions."""
    width, tokens, digits = 16, 20, 10
    position = np.arange(tokens)
    rates = 10000.0 ** (-np.arange(width // 2) * 2 / width)
    # E x_i x_j per feature: table rows of variance 1 that agree with odds 1/digits, and the mean
    # over features of the two positions' sines and cosines.
    waves = np.cos((position[:, None] - position[None, :])[..., None] * rates).mean(-1) / 2
    kernel = waves + np.where(np.eye(tokens, dtype=bool), 1.0, 1 / digits)
    p = moments.predict(moments.Transformer(5, width, 1, tokens, norm="post"), kernel=kernel)
    # .891 with a standard error of .002 in simulation, from an input of correlation .3
    assert p.correlation[-1] == pytest.approx(0.89, abs=0.02)
    # .072 (.015) in 200 draws of the toy, digits and all, written out in torch
    ratio = gradient_gap(p).ratio
    assert ratio[-1] / ratio[0] == pytest.approx(0.072, abs=0.03)


def query_key_growth(layers: int, norm: str, factor: float) -> float:
    """Of the gradient's variance over a stack whose queries' and keys' variances are so many times
    Xavier's."""
    model = moments.Transformer(layers, 256, 4, 512, norm=norm, dropout=0.1)
    weights = model.weights
    louder = weights.replace(query=factor * weights.query, key=factor * weights.key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        p = moments.predict(model.replace(weights=louder), correlation=0.9 * 0.227)
    return float(p.grad_variance[0] / p.grad_variance[-1])


def test_doubled_queries_and_keys_make_gradients_explode() -> None:
    """Kedia et al. 3.3 say 10,000-fold over 192 layers, and neither where the norm is nor whether
    variances or deviations are doubled. Two simulated draws of a Pre-LN, 512 tokens: 192 (65), and
    1.9e8 (1.7e8)."""
    variances, deviations = (query_key_growth(192, "pre", factor) for factor in (2.0, 4.0))
    assert variances == pytest.approx(192, abs=65)
    assert 1e7 < deviations < 1e9
    over = {
        (norm, factor): query_key_growth(6, norm, factor) / query_key_growth(6, norm, 1.0)
        for norm in ("pre", "post")
        for factor in (2.0, 4.0)
    }
    assert over["pre", 4.0] > max(20, 5 * over["pre", 2.0])
    assert over["post", 4.0] > over["post", 2.0] > 1


def test_norm_growth_before_attention_is_sharp() -> None:
    """Figure 11 of Noci et al.: the linear network's first four layers against draws of it, with
    queries that make attention and without."""
    width, tokens, layers = 30, 20, 4
    rng = np.random.default_rng(6)
    for query in (0.0, 1 / width):
        stack = linear_stack(layers, width, tokens)
        model = stack.replace(weights=stack.weights.replace(query=query, key=1 / width))
        p = moments.predict(model, variance=1 / width)
        ends = []
        for _ in range(400):
            x = rng.normal(size=(tokens, width)) / math.sqrt(width)
            for _ in range(layers):
                q, k, v, o, a, b = rng.normal(size=(6, width, width)) / math.sqrt(width)
                logits = (x @ q) @ (x @ k).T / math.sqrt(width) * (query > 0)
                weights = np.exp(logits - logits.max(1, keepdims=True))
                x = x + weights / weights.sum(1, keepdims=True) @ x @ v @ o
                x = x + x @ a @ b
            ends.append(float(np.mean(x**2)) * width)
        grown = p.variance[-1] * width
        assert grown == pytest.approx(np.mean(ends), abs=3 * np.std(ends) / 20 + 0.01 * grown)
