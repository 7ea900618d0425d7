"""Where the papers print something else: each correction against a simulation or a count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
from quadrature import (
    AttentionSetting,
    Estimate,
    attention_draws,
    exchangeable,
    layernorm_draws,
    masks,
    repeated_share,
    token_moments,
    zipf_repeats,
)

import moments
from moments.formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from moments.formulas.symbols import SYMBOLS
from studies.analysis import correlation_fixed_points, sensitivity
from studies.figures.drawing import stored
from studies.formulas.kedia_chain import DSLM_CHAIN, PRE_LN_CHAIN
from studies.formulas.noci import UNIFORM_ATTENTION_JACOBIAN
from studies.formulas.sun import CURSE_OF_DEPTH


def assert_within(value: float, estimate: Estimate, slack: float = 0.0) -> None:
    assert abs(value - estimate.mean) <= 3 * estimate.stderr + slack * abs(estimate.mean)


def assert_excluded(value: float, estimate: Estimate) -> None:
    """The printed form is not merely noisy: it is at least ten standard errors away."""
    assert abs(value - estimate.mean) > 10 * estimate.stderr


def test_ffn_covariance_has_d_squared() -> None:
    """Table 18 prints 4 d s_1 s_2 where the composition needs 4 d^2 s_1 s_2."""
    d, d_ff, s_1, s_2, v, r = 256, 1024, 1 / 512, 1 / 600, 1.4, 0.5
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(40):
        x = exchangeable(rng, 8, d, v, r)
        hidden = np.maximum(x @ rng.normal(size=(d, d_ff)) * math.sqrt(s_1), 0)
        draws.append(token_moments(hidden @ rng.normal(size=(d_ff, d)) * math.sqrt(s_2))[1])
    measured = Estimate.of(draws)
    law = moments.component("ffn_block").law("covariance", "published")
    value = law(
        d_model=d, d_ff=d_ff, ffn_in=s_1, ffn_out=s_2, drop_prob=0.1, x_variance=v, x_correlation=r
    )
    assert_within(value, measured, slack=1 / d)
    assert_excluded(value / d, measured)


def test_attention_without_value_has_no_width_factor() -> None:
    """Tables 16, 17, 18 and 20 carry a d_in, and Table 17 a (1-p)^2."""
    setting = AttentionSetting(theta=1e-4, attention_drop_prob=0.4, grad_correlation=0.05)
    values = setting.values()
    p = values["drop_prob"] = values.pop("attention_drop_prob")
    laws = moments.component("attention_without_value").under("published")
    measured = attention_draws(setting, 60, 4)
    for quantity in ("variance", "covariance", "grad_variance", "grad_covariance"):
        value = laws[quantity](**values)
        estimate = measured["attention_without_value", quantity]
        # Forward, the published form leaves out the dropout of the common part, p/((1-p) L).
        slack = 0.0 if quantity.startswith("grad") else p / (1 - p) / setting.seq_len
        assert_within(value, estimate, slack=slack)
        assert_excluded(value * setting.d_model, estimate)
    g, gc = setting.grad_variance, setting.grad_variance * setting.grad_correlation
    squared = (g + (setting.seq_len - 1) * gc * (1 - p) ** 2) / (setting.seq_len * (1 - p) ** 2)
    assert_excluded(squared, measured["attention_without_value", "grad_variance"])


def test_dropout_lowers_the_gradients_correlation() -> None:
    """B.1 as printed keeps r_g through the block's dropout; A.3 composed keeps the covariance."""
    d, p, g2, rg = 64, 0.4, 0.9, 0.7
    rng = np.random.default_rng(1)
    draws = []
    for _ in range(400):
        g = exchangeable(rng, 12, d, g2, rg)
        draws.append(
            token_moments((g * masks(rng, g.shape, p)) @ (rng.normal(size=(d, d)) / math.sqrt(d)))
        )
    variance, covariance = (Estimate.of(column) for column in zip(*draws, strict=True))
    dropout = moments.component("dropout").under("published")
    linear = moments.component("linear").under("published")
    after = {
        kind: dropout[kind](grad_variance=g2, grad_covariance=g2 * rg, drop_prob=p)
        for kind in ("grad_variance", "grad_covariance")
    }
    sent = {kind: linear[kind](fan_out=d, weight_variance=1 / d, **after) for kind in after}
    assert_within(sent["grad_variance"], variance)
    assert_within(sent["grad_covariance"], covariance)
    assert_excluded(sent["grad_variance"] * rg, covariance)


def test_the_printed_block_gradient_is_the_law_and_says_so() -> None:
    """Where r_g dominates, the block's published gradient is 1/(1-p) above the simulated one."""
    setting = AttentionSetting(
        theta=1e-4, drop_prob=0.4, attention_drop_prob=0.0, grad_correlation=0.8
    )
    law = moments.component("attention_block").law("grad_variance", "published")
    estimate = attention_draws(setting, 60, 5)["attention_block", "grad_variance"]
    assert "dropout" in law.note
    assert_excluded(law(**setting.values()), estimate)
    share = 1 + (setting.seq_len - 1) * setting.grad_correlation
    composed = 1 / (1 - 0.4) + (setting.seq_len - 1) * setting.grad_correlation
    assert_within(law(**setting.values()) * (1 - 0.4) * composed / share, estimate)


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_layernorm_correlation_at_finite_width(r: float) -> None:
    """Right to O(1/d): r [1 - (1 - r^2)/(2 (d - 1))]; A.6 prints r (1 - 1/d)."""
    d = 24
    measured = layernorm_draws(d, 1.0, r, 200_000, 6)["covariance"]
    right = r * (1 - (1 - r * r) / (2 * (d - 1)))
    assert_within(right, measured, slack=1 / d**2)
    law = moments.component("layernorm").law("covariance", "published")
    printed = law(d_model=d, x_correlation=r)
    if r:
        assert_excluded(printed, measured)


def test_zipf_repeats_are_multinomial() -> None:
    """A.1 replaces counts by their means, N_i -> p_i L; the expectation is sum p_i^2 itself."""
    vocab, length = 2000, 64
    odds = 1 / np.arange(1, vocab + 1)
    rng = np.random.default_rng(7)
    texts = rng.choice(vocab, size=(4000, length), p=odds / odds.sum())
    shares = [
        ((text[:, None] == text[None, :]).sum() - length) / (length * (length - 1))
        for text in texts
    ]
    measured = Estimate.of(shares)
    laws = moments.component("token_embedding")
    right = laws.law("pattern_correlation", "refined")(vocab_size=vocab)
    printed = laws.law("pattern_correlation", "published")(vocab_size=vocab, seq_len=length)
    assert right == pytest.approx(0.0246, abs=5e-5)
    assert printed == pytest.approx(0.0091, abs=5e-5)
    assert_within(right, measured)
    assert_excluded(printed, measured)
    assert laws.law("pattern_correlation", "refined")(vocab_size=4) == pytest.approx(
        zipf_repeats(4, 4), rel=1e-14
    )


@pytest.mark.parametrize("length", [2, 5, 40])
def test_a_uniform_split_gives_two_thirds(length: int) -> None:
    splits = [(0,) * n + (1,) * (length - n) for n in range(length + 1)]
    counted = sum(repeated_share(split) for split in splits) / len(splits)
    laws = moments.component("segment_embedding")
    assert laws.law("pattern_correlation", "refined")() == float(counted)
    assert laws.law("pattern_correlation", "published")(seq_len=length) < float(counted)


def test_an_embedding_has_its_tables_variance() -> None:
    """Table 16 prints 0."""
    rng = np.random.default_rng(8)
    tables = rng.normal(size=(200, 50)) * 0.3
    looked_up = tables[rng.integers(0, 200, size=1000)]
    for name in ("token", "segment", "position"):
        law = moments.component(f"{name}_embedding").law("variance", "published")
        assert law(table_variance=0.09) == pytest.approx(np.mean(looked_up**2), rel=0.05)
    assert "prints 0" in law.note


# --- Kedia et al., Appendices A, E, F and G -------------------------------------------------------


def test_softmax_returns_less_of_correlated_gradients() -> None:
    """A.7 has no factor 1 - r_g: what all logits of a row receive alike, softmax returns as 0."""
    length, r_g = 40, 0.7
    rng = np.random.default_rng(10)
    draws = []
    for _ in range(300):
        logits = rng.normal(size=length) * 0.1
        a = np.exp(logits) / np.exp(logits).sum()
        g = math.sqrt(r_g) * rng.normal() + math.sqrt(1 - r_g) * rng.normal(size=length)
        draws.append(float(np.mean((a * g - a * (a @ g)) ** 2)))
    measured = Estimate.of(draws)
    printed = moments.component("softmax").law("grad_variance", "published")(
        seq_len=length, x_variance=0.01, x_correlation=0.0, grad_variance=1.0
    )
    assert_within(printed * (1 - r_g), measured, slack=1 / length)
    assert_excluded(printed, measured)


@pytest.mark.parametrize(("length", "missing"), [(50, 0.029), (100, 0.015)])
def test_attention_dropout_acts_on_the_common_part(length: int, missing: float) -> None:
    """A.8's forward variance leaves dropout off the part that tokens share."""
    r, p = 0.9, 0.6
    rng = np.random.default_rng(11)
    draws = []
    for _ in range(60):
        x = exchangeable(rng, length, 200, 1.0, r)
        weights = masks(rng, (40, length), p) / length
        draws.append(float(np.mean((weights @ x) ** 2)))
    measured = Estimate.of(draws)
    printed = (1 - r) / (length * (1 - p)) + r
    right = printed + r * p / ((1 - p) * length)
    assert_within(right, measured)
    assert 1 - printed / right == pytest.approx(missing, abs=5e-4)


def test_the_feed_forward_gradient_does_not_depend_on_the_output() -> None:
    """Table 2 prints sigma_xout^2 sigma_gout^2, the block's gain only where its input is unit."""
    d, v = 64, 3.0
    rng = np.random.default_rng(12)
    ratios, outputs = [], []
    for _ in range(60):
        x = math.sqrt(v) * rng.normal(size=(8, d))
        up, down = rng.normal(size=(d, 4 * d)) / d, rng.normal(size=(4 * d, d)) / d
        hidden = x @ up
        g = rng.normal(size=(8, d))
        ratios.append(float(np.mean((((g @ down.T) * (hidden > 0)) @ up.T) ** 2)))
        outputs.append(float(np.mean((np.maximum(hidden, 0) @ down) ** 2)))
    law = moments.component("ffn_block").law("grad_variance", "published")
    weights = {"d_model": d, "d_ff": 4 * d, "ffn_in": d**-2, "ffn_out": d**-2, "drop_prob": 0.0}
    assert_within(law(grad_variance=1.0, **weights), Estimate.of(ratios), slack=1 / d)
    assert_excluded(float(np.mean(outputs)), Estimate.of(ratios))


def test_pre_ln_gradient_upper_bound() -> None:
    """E.1.2's recursion prints the smaller exponent on both sides."""
    c1, c2, layers, start = 2.2, 0.4, 2000, 50
    n = np.arange(start + 1, layers + 1)
    grown = np.prod(1 + (c1 * 0.9 + c2) / (c1 * 0.3 + c2) / (n - 1))
    laws = PRE_LN_CHAIN.laws
    gains = {"attention_gain": c1, "ffn_gain": c2}
    lower, upper = (laws[f"grad_exponent_{side}"](**gains) for side in ("lower", "upper"))
    assert (lower, upper) == pytest.approx((0.15, 6.5), abs=0.005)
    assert (layers / start) ** lower < grown < (layers / start) ** upper


def test_powers_of_c_five() -> None:
    """E.2.2: 0.96 a layer over 200 layers is a fall of 3,500, printed as 2,000."""
    fall = 0.96**-200
    assert fall == pytest.approx(3500, rel=0.01)


@pytest.mark.parametrize("c6", [0.6, 1.3])
def test_gradient_of_dslm_over_its_depth(c6: float) -> None:
    """E.3.2 puts beta^2 = 1/N into the product; at DeepScaleLM's 2/N its exponent is doubled."""
    layers, grown = 20_000, 1.0
    for _ in range(layers):
        grown *= (1 - 2 / layers) + 2 / layers * c6
    law = DSLM_CHAIN.law("grad_bound")(branch_constant=2.0, gradient_ratio=c6)
    assert grown == pytest.approx(law, rel=1e-3)
    assert grown != pytest.approx(math.exp(c6 - 1), rel=0.1)


def test_simplified_dslm_gradient_bound() -> None:
    """E.5.2's premise, variance at least 1/2, gives e^(2 C_6); printed e^(2 C_6 + 2)."""
    layers, c6, v = 20_000, 0.9, 0.5
    factor = (1 + 2 / layers * (c6 / 2 / v - 1)) * (1 + 2 / layers * (1 / v - 1))
    law = DSLM_CHAIN.law("simplified_grad_upper")(branch_constant=2.0, gradient_ratio=c6)
    assert factor**layers == pytest.approx(law, rel=1e-3)
    assert law == pytest.approx(math.exp(2 * c6))


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.5])
def test_skip_connections_lose_gradient(alpha: float) -> None:
    """Appendix G (L in v1): (1 - beta^2)^(2 N) falls, and is printed with a growing exponent."""
    k, layers = 1.5, 50_000
    kept = (1 - k / layers**alpha) ** (2 * layers)
    law = DSLM_CHAIN.law("fall")(branch_constant=k, branch_exponent=alpha, layers=layers)
    assert math.log(kept) == pytest.approx(math.log(law), rel=1e-3)
    assert kept < 1 < math.exp(2 * k * layers ** (1 - alpha))


def test_sensitivity_grows_with_the_block() -> None:
    """4.6 prints 1/sigma_block^2: relative change of the output is proportional to it instead."""
    rng = np.random.default_rng(13)
    x, y, step = rng.normal(size=(3, 100_000))
    changes = []
    for beta in (0.1, 0.2):
        output, moved = x + beta * y, x + beta * (y + 0.01 * step)
        changes.append(np.var(moved - output) / np.var(output))
    assert changes[1] / changes[0] == pytest.approx(4, rel=0.05)
    law = DSLM_CHAIN.law("sensitivity")
    assert law(layers=50, branch_square=0.04) == 4 * law(layers=50, branch_square=0.01)


def test_layerscale_sensitivity_is_quadratic() -> None:
    """Table 3 prints O(beta N) where Section 4.6's measure is N beta^2."""
    found = []
    for beta in (0.01, 0.02):
        model = moments.Transformer(24, 64, 4, 32, branch_scale=beta)
        found.append(sensitivity(moments.predict(model, correlation=0.5)).mean)
    assert found[1] / found[0] == pytest.approx(4, rel=0.01)


def test_rank_collapse_bound_needs_dropout() -> None:
    """3.5 states r < 1 - e^-2 for DeepScaleLM; without dropout, as in ViT, r passes it."""
    bound, layers = 1 - math.exp(-2), 192
    ends = {}
    for p, start in ((0.0, 0.46), (0.0, 0.227), (0.1, 0.227)):
        r, mix = start * (1 - p), 2 / layers
        for _ in range(layers):
            r = (1 - mix) * r + mix * (1 - p)
            kernel = r + math.sqrt(1 - r * r) / math.pi - r * math.acos(r) / math.pi
            r = (1 - mix) * r + mix * (1 - p) * kernel
        ends[p, start] = r
    assert ends[0.0, 0.46] == pytest.approx(0.94, abs=0.005)
    assert ends[0.0, 0.227] == pytest.approx(0.92, abs=0.01)
    assert ends[0.1, 0.227] < bound < ends[0.0, 0.227]


def test_stationary_correlation_is_one_number() -> None:
    """E.1.1 uses .85 for what Appendix F derives as .88."""
    law = PRE_LN_CHAIN.law("correlation")
    assert law(attention_gain=2.2, ffn_gain=0.4, drop_prob=0.1) == pytest.approx(0.887, abs=5e-4)


def test_weights_of_one_over_fan_out_do_not_cause_collapse() -> None:
    """Appendix F blames them for Noci et al.'s: without dropout, Xavier's collapse just as well."""
    for weights in (None, moments.Weights(1 / 8, 1 / 8, 1 / 8, 1 / 32, 1 / 128, 1 / 32)):
        for norm in ("pre", "post"):
            model = moments.Transformer(2, 32, 4, 50, norm=norm, weights=weights)
            assert correlation_fixed_points(model).collapses
            if weights is None:
                assert not correlation_fixed_points(model.replace(dropout=0.1)).collapses
    # By hand, Xavier, Post-LN, uniform attention: the FFN (ReLU kernel) never undoes attention.
    r, c1, c2 = 0.2, 2 / 1.25, 0.32
    for _ in range(30):
        r = (r + c1 * r) / (1 + c1 * r)
        r = (r + c2 * (math.sqrt(1 - r * r) + r * (math.pi - math.acos(r))) / math.pi) / (1 + c2)
        r = min(r, 1.0)
    assert r > 1 - 1e-6


def test_released_figures_show_weight_gradients() -> None:
    """Simulated: norms over a layer's weights follow 1/sqrt(n); the stream's gradient does not."""
    layer = np.arange(1, 193)
    norms = np.array(stored()["kedia-2/1/refined"]["value"])
    stream = np.array(stored()["kedia-2/0/refined"]["value"])[1:]
    late = layer >= 10
    slope = np.polyfit(np.log(layer[late]), np.log(norms[late]), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.07)
    assert (norms[9] / norms[-1]) ** 2 > 4 * stream[9] / stream[-1]
    for panels in ((1, 2), (4, 5)):  # of Pre-LN and of Post-LN
        white, level = (np.array(stored()[f"kedia-4/{n}/refined"]["value"]) for n in panels)
        assert np.all(np.abs(level - 1) < 0.3)
        assert white[0] < 0.4


def test_compute_table_has_two_misprinted_shapes() -> None:
    """Table 23: 784 x 128 has the parameters of 768 x 128, and 384 x 128 those of 384 x 256."""

    def millions(layers: int, width: int) -> float:
        return (12 * layers * width**2 + 13 * layers * width + 33_280 * width) / 1e6

    assert math.floor(millions(768, 128)) == 156
    assert math.floor(millions(384, 256)) == 311
    assert millions(784, 128) > 159
    assert millions(384, 128) < 90


# --- Sun et al. -----------------------------------------------------------------------------------


def test_jacobian_product_at_linear_variance_is_not_linear() -> None:
    """Theorem 3.3: with sigma = sqrt(l) the product grows like e^(2 A sqrt(L))."""
    a, b = 1.0, 0.5
    logs = {}
    for layers in (10_000, 40_000):
        sigma = np.sqrt(np.arange(1, layers))
        logs[layers] = float(np.log1p(a / sigma + b / sigma**2).sum())
    law = CURSE_OF_DEPTH.law("jacobian_growth")
    rise = math.log(law(jacobian_linear=a, layers=40_000)) - math.log(
        law(jacobian_linear=a, layers=10_000)
    )
    assert logs[40_000] - logs[10_000] == pytest.approx(rise, rel=0.01)
    # Printed: the logarithm rises by log 4; the proof's own sum of A/k would give A log 4.
    assert rise > 100 * math.log(4)


def test_jacobian_product_at_exponential_variance() -> None:
    """The proof sums A/e^k and B/e^(2k); sigma = e^(k/2) calls for A/e^(k/2) and B/e^k."""
    a, b = 0.3, 0.05
    sigma = np.exp(np.arange(1, 200) / 2)
    right = np.log1p(a / sigma + b / sigma**2).sum()
    e = math.e
    printed = a / (e - 1) + b / (e**2 - 1)
    printed -= (a**2 / (e**2 - 1) + 2 * a * b / (e**3 - 1) + b**2 / (e**4 - 1)) / 2
    assert right > 2 * printed


def test_uniform_attention_divides_independent_values() -> None:
    """Equation 27 keeps the variance of n averaged independent values, and adds a d_head."""
    rng = np.random.default_rng(14)
    values = rng.normal(size=(4000, 25, 8))
    assert np.var(values.mean(1)) == pytest.approx(1 / 25, rel=0.05)


def test_bound_constants_are_equation_36_multiplied_out() -> None:
    """47 and 48 lose a weight variance and the product; 41 moves 40's numerator below."""
    names = ("weight_variance", "d_model", "d_ff", "d_head", "heads", "seq_len")
    s, d, f, k, h, n = (SYMBOLS[name].sympy for name in names)
    x = sympy.Symbol("x", positive=True)  # 1/sigma
    reach = sympy.sqrt(n) + 2 + 1 / sympy.sqrt(n)
    feed = s * (sympy.sqrt(d) + sympy.sqrt(f)) ** 2
    attend = 2 * d * h * reach * s * (s * d * sympy.sqrt(k) + 1 + sympy.sqrt(k / d))
    product = sympy.Poly(sympy.expand((1 + feed * x) * (1 + attend * x)), x)
    point = {s: 0.01, d: 64, f: 256, k: 16, h: 4, n: 32}
    constant = {name: point[SYMBOLS[name].sympy] for name in names}
    for power, name in ((1, "jacobian_linear"), (2, "jacobian_quadratic")):
        value = float(product.coeff_monomial(x**power).subs(point))
        assert CURSE_OF_DEPTH.law(name)(**constant) == pytest.approx(value, rel=1e-12)
        printed = CURSE_OF_DEPTH.law(f"{name}_printed")
        assert printed(**constant) != pytest.approx(value, rel=0.5)
    # Equation 40 against the norm of random matrices; equation 41's quotient is no bound.
    rng = np.random.default_rng(15)
    chain = rng.normal(size=(64, 256)) @ rng.normal(size=(256, 64)) * 0.01
    largest = np.linalg.norm(chain, 2)
    assert largest < float(feed.subs(point))
    assert largest > 100 * 0.01 / (math.sqrt(64) + math.sqrt(256)) ** 2


def _scaled_block(x: np.ndarray, up: np.ndarray, down: np.ndarray, layer: int) -> np.ndarray:
    normal = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    return np.maximum(normal / math.sqrt(layer) @ up, 0) @ down


def test_layernorm_scaling_divides_by_the_root_once() -> None:
    """52 gives the FFN 1/l^2 for 1/l; 59 to 62 give the Jacobian 1/l for 1/sqrt(l)."""
    rng = np.random.default_rng(16)
    d, layer = 32, 9
    x = rng.normal(size=(50, d))
    up, down = rng.normal(size=(d, 4 * d)) / d, rng.normal(size=(4 * d, d)) / d
    variances = [np.var(_scaled_block(x, up, down, n)) for n in (1, layer)]
    assert variances[0] / variances[1] == pytest.approx(layer, rel=1e-9)
    step = 1e-5 * rng.normal(size=x.shape)
    changes = [
        np.linalg.norm(_scaled_block(x + step, up, down, n) - _scaled_block(x, up, down, n))
        for n in (1, layer)
    ]
    assert changes[0] / changes[1] == pytest.approx(math.sqrt(layer), rel=1e-6)
    values = {"x_variance": 4.0, "jacobian_linear": 1e-6, "jacobian_quadratic": 0.0}
    plain = CURSE_OF_DEPTH.law("jacobian_factor")(**values) - 1
    scaled = CURSE_OF_DEPTH.law("lns_jacobian_factor")(layer=layer, **values) - 1
    printed = CURSE_OF_DEPTH.law("lns_jacobian_factor_printed")(layer=layer, **values) - 1
    assert (plain / scaled, plain / printed) == pytest.approx((3, 9), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 0.9])
def test_scaled_jacobian_stays_bounded_at_the_upper_variance(epsilon: float) -> None:
    """Theorem 4.2 prints omega(1) at variance l^(2 - epsilon): either product converges."""
    a, b = 1.0, 1.0
    for law in ("lns_jacobian_factor", "lns_jacobian_factor_printed"):
        sums = []
        for layers in (10**4, 10**5, 10**6):
            n = np.arange(1, layers, dtype=float)
            factor = CURSE_OF_DEPTH.law(law)(
                layer=n, x_variance=n ** (2 - epsilon), jacobian_linear=a, jacobian_quadratic=b
            )
            sums.append(float(np.log(factor).sum()))
        decay = (1 - epsilon) / 2 if law == "lns_jacobian_factor" else 1 - epsilon / 2
        ratio = (sums[2] - sums[1]) / (sums[1] - sums[0])
        assert ratio == pytest.approx(10**-decay, rel=0.05)
        assert ratio < 1


def test_variance_recursions_iterated() -> None:
    """Lemma 3.2 gives l^2/4, not an exponential; Lemma 4.1, whose 58 writes k for sqrt(k), l."""
    plain = scaled = 1.0
    layers = 200_000
    for layer in range(1, layers):
        plain += math.sqrt(plain)
        scaled += math.sqrt(scaled / layer)
    laws = CURSE_OF_DEPTH.laws
    assert plain == pytest.approx(laws["variance_after"](layer=layers), rel=0.01)
    assert scaled == pytest.approx(laws["lns_variance_after"](layer=layers), rel=0.02)


def test_at_initialisation_scaled_variance_is_logarithmic() -> None:
    """Lemma 4.1's lower bound, linear in depth, needs blocks correlated with the stream."""
    d, layers = 48, 60
    rng = np.random.default_rng(17)
    ends = {True: [], False: []}
    for scaled in ends:
        for _ in range(12):
            x = rng.standard_normal((8, d), np.float32)
            for layer in range(1, layers + 1):
                up = rng.standard_normal((d, 4 * d), np.float32) / np.float32(math.sqrt(2 * d))
                down = rng.standard_normal((4 * d, d), np.float32) / np.float32(math.sqrt(d))
                x = x + _scaled_block(x, up, down, layer if scaled else 1)
            ends[scaled].append(float(np.mean(x**2)))
    laws = CURSE_OF_DEPTH.laws
    values = {"x_variance": 1.0, "branch_variance": 1.0, "layer": layers}
    assert laws["lns_initial_variance_after"](**values) == pytest.approx(
        np.mean(ends[True]), rel=0.06
    )
    assert laws["initial_variance_after"](**values) == pytest.approx(np.mean(ends[False]), rel=0.06)
    model = moments.Transformer(400, 256, 4, 32).with_scheme("lns")
    v = moments.predict(model, correlation=0.9).variance
    assert v[400] - v[200] == pytest.approx(v[200] - v[100], rel=0.05)


# --- Noci et al. ----------------------------------------------------------------------------------


def _input_jacobians(x: np.ndarray, draws: int, scale: float) -> np.ndarray:
    """|dS/dX|^2 per draw of the weights, A = 1/n and dA = L dM / n, by differences of M."""
    n, d = x.shape
    rng = np.random.default_rng(18)
    query, key, value = rng.normal(size=(3, draws, d, d)) * scale
    total = np.zeros(draws)
    centring = np.eye(n) - 1 / n
    mixed = x @ value
    for token in range(n):
        for feature in range(d):
            ends = []
            for sign in (0.5, -0.5):
                moved = x.copy()
                moved[token, feature] += sign
                ends.append((moved @ query) @ (moved @ key).transpose(0, 2, 1) / math.sqrt(d))
            # M is quadratic in X, so the central difference is its derivative.
            change = (ends[0] - ends[1]) @ centring / n @ mixed
            change += value[:, feature][:, None, :] / n
            total += (change**2).sum((1, 2))
    return total


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_lemma_three_one_is_no_bound(size: float) -> None:
    """Equation 35 drops the commutation: |X|^2 tr(X^T L X) belongs where n |X^T L X|^2 stands."""
    n, d, scale = 6, 5, 0.5
    rng = np.random.default_rng(19)
    x = size * (rng.normal(size=(1, d)) * 4 + rng.normal(size=(n, d)) * 0.4)
    gram = x.T @ (np.eye(n) - 1 / n) @ x
    values = {
        **dict.fromkeys(("query", "key", "value"), scale**2),
        "d_model": d,
        "fan_out": d,
        "seq_len": n,
        "gram_square": float((gram**2).sum()),
        "gram_trace": float(np.trace(gram)),
        "token_square": float((x**2).sum()),
    }
    measured = Estimate.of(list(_input_jacobians(x, 4000, scale)))
    laws = UNIFORM_ATTENTION_JACOBIAN.laws
    assert_within(laws["input_gradient"](**values), measured, slack=0.01)
    if size > 1:
        assert laws["input_gradient_printed"](**values) < measured.mean - 10 * measured.stderr


def test_temperature_of_the_translation_task() -> None:
    """C.3: 8.5 needs a correlation of about .56, not a small one; its warm-up's max is a min."""
    law = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")

    def temperature(r: float) -> float:
        return math.sqrt(law(d_model=512, seq_len=25, x_variance=1.0, x_correlation=r))

    assert temperature(0.1) < 3
    assert temperature(0.56) == pytest.approx(8.5, abs=0.2)
    steps = np.arange(0, 2001, 500) / 1000
    assert np.maximum(1, steps)[0] == 1
    assert np.minimum(1, steps)[[0, 2, 4]] == pytest.approx([0, 1, 1])


def test_temperature_changes_value_gradients() -> None:
    """C.2 says it does not: at equation 47's they rise by 1 + n/(n + d), finite width's tilt."""
    n, d = 96, 24
    rng = np.random.default_rng(20)
    law = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")
    tau = math.sqrt(law(d_model=d, seq_len=n, x_variance=1.0, x_correlation=0.0))
    draws = []
    for _ in range(150):
        x = rng.normal(size=(n, d))
        query, key = rng.normal(size=(2, d, d)) / math.sqrt(d)
        a = np.exp(tau * (x @ query) @ (x @ key).T / math.sqrt(d))
        a /= a.sum(1, keepdims=True)
        draws.append(float(((a @ x) ** 2).sum() / d))
    measured = Estimate.of(draws)
    # The logits' variance d/n also sharpens attention, by a factor e^(d/n) on 1/n at most.
    assert 1 + n / (n + d) < measured.mean < 1 + n / (n + d) + 2 * (math.exp(d / n) - 1)
    assert_excluded(1.0, measured)
