"""Every law of every component: what it is made of, and whether its numbers are right."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import sympy
from quadrature import (
    CLOSED,
    GATES,
    GRIDDED,
    REFERENCES,
    AttentionSetting,
    Estimate,
    attention_draws,
    layernorm_draws,
    softmax_draws,
    uniform_attention_draws,
)

import moments
from moments.errors import DomainError
from moments.formulas.activation import BY_VALUES, GELU_TANH
from moments.formulas.algebra import FLOAT, NUMPY
from moments.formulas.checks import Interval
from moments.formulas.law import QUANTITIES, THEORIES, Law, Source
from moments.formulas.registry import ELSEWHERE, component
from moments.formulas.symbols import SYMBOLS

ACTIVATIONS = tuple(sorted({*CLOSED, *GRIDDED}))


def _every_law() -> list[Any]:
    """Each law once, with the first theory that holds it."""
    found: dict[int, Any] = {}
    for name in (n for n in moments.components() if n not in BY_VALUES):
        for theory in THEORIES:
            for quantity, law in moments.component(name).under(theory).items():
                entry = pytest.param(name, quantity, law, id=f"{name}-{quantity}-{theory}")
                found.setdefault(id(law), entry)
    return list(found.values())


EVERY_LAW = _every_law()
every_law = pytest.mark.parametrize(("name", "quantity", "law"), EVERY_LAW)
EXACT = [entry for entry in EVERY_LAW if entry.values[2].status == "exact"]


# --- points inside the domain ---------------------------------------------------------------------

_WEIGHTS = ("query", "key", "value", "output", "ffn_in", "ffn_out")
_WHOLE = ("fan_in", "fan_out", "d_model", "d_head", "d_ff", "seq_len", "vocab_size")


def _draw(rng: np.random.Generator, name: str, interval: Interval) -> float:
    """A value well inside an interval: counts whole, weight variances of the order of 1/d."""
    if name in _WEIGHTS:
        return float(1e-3 * rng.lognormal(0, 0.5))
    if name in _WHOLE:
        return float(rng.integers(interval.lower + 3, interval.lower + 60))
    if math.isfinite(interval.upper):
        return float(rng.uniform(interval.lower, interval.upper) * 0.95)
    if math.isfinite(interval.lower):
        return float(interval.lower + rng.lognormal(0, 0.7))
    return float(rng.normal())


def sample(law: Law, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, interval) for name, interval in law.domain.items()}


def _expectation_order(law: Law) -> int:
    """0 for a closed form, else the number of variables of its Gaussian integral."""
    integrals = law.expr.atoms(sympy.Integral)
    return max((len(integral.variables) for integral in integrals), default=0)


# --- what a law is made of ------------------------------------------------------------------------


@every_law
def test_law_is_a_complete_record(name: str, quantity: str, law: Law) -> None:
    assert quantity in QUANTITIES
    assert isinstance(law.source, Source)
    assert law.source.reference
    assert law.source.place
    assert law.status in ("exact", "asymptotic", "fitted")
    if law.status != "exact":
        assert law.note, "an approximation says what it leaves out"
    assert set(law.domain) == set(law.arguments)
    for symbol in law.arguments:
        assert SYMBOLS[symbol].meaning
        natural, here = SYMBOLS[symbol].domain, law.domain[symbol]
        assert natural.lower <= here.lower < here.upper <= natural.upper


@every_law
def test_expression_is_exact_and_prints(name: str, quantity: str, law: Law) -> None:
    assert not law.expr.atoms(sympy.Float), f"a float in {law.expr}"
    assert law.expr.free_symbols <= set(law.symbols)
    assert law.latex().strip()
    assert str(law.source) in repr(law)
    assert law._repr_latex_().startswith("$")


@every_law
def test_numpy_agrees_with_mpmath(name: str, quantity: str, law: Law) -> None:
    order = _expectation_order(law)
    if order == 2:
        # Nested quadrature at 30 digits takes minutes; the independent reference serves instead.
        assert (name, quantity) in REFERENCES
        return
    for seed in range(1 if order else 4):
        point = sample(law, seed)
        value, precise = law(**point), law.evaluate(digits=20 if order else 30, **point)
        # 1e-15 of the variances: what rounding leaves of a difference.
        slack = 1e-15 * max([abs(point[n]) for n in point if "variance" in n], default=1.0)
        assert value == pytest.approx(float(precise), rel=1e-12, abs=slack)


def test_integrals_have_the_digits_that_were_asked_for() -> None:
    kurtosis = moments.component("gelu").law("kurtosis")
    few, many = (kurtosis.evaluate(digits=digits, x_variance=1e-3) for digits in (45, 60))
    with mp.workdps(70):
        assert abs(few / many - 1) < mp.mpf(10) ** -44


@every_law
def test_expression_agrees_with_mpmath(name: str, quantity: str, law: Law) -> None:
    if _expectation_order(law):
        return  # the integrals are the ones mpmath evaluates
    point = sample(law, 11)
    symbols = {SYMBOLS[k].sympy: sympy.Rational(v) for k, v in point.items()}
    symbolic = sympy.N(law.expr.subs(symbols), 25)
    assert float(symbolic) == pytest.approx(float(law.evaluate(digits=25, **point)), rel=1e-14)


@every_law
def test_shapes_broadcast(name: str, quantity: str, law: Law) -> None:
    if not law.arguments:
        assert np.shape(law()) == ()
        return
    points = [sample(law, seed) for seed in range(3)]
    first, *rest = law.arguments
    column = np.array([p[first] for p in points])[:, None]
    fixed = {n: points[0][n] for n in rest[1:]}
    values: dict[str, Any] = {first: column, **fixed}
    shape: tuple[int, ...] = (3, 1)
    if rest:
        values[rest[0]] = np.array([p[rest[0]] for p in points[:2]])
        shape = (3, 2)
    table = law(**values)
    assert table.shape == shape
    for i in range(shape[0]):
        for j in range(shape[1]):
            single = {n: np.broadcast_to(v, shape)[i, j] for n, v in values.items()}
            assert table[i, j] == pytest.approx(law(**single), rel=1e-13)


@every_law
def test_outside_the_domain_the_argument_is_named(name: str, quantity: str, law: Law) -> None:
    inside = sample(law, 0)
    for symbol, interval in law.domain.items():
        outside = [math.nan, math.inf]
        if math.isfinite(interval.lower):
            outside.append(interval.lower if interval.open_lower else interval.lower - 0.1)
        if math.isfinite(interval.upper):
            outside.append(interval.upper if interval.open_upper else interval.upper + 0.1)
        for value in outside:
            with pytest.raises(DomainError) as caught:
                law(**{**inside, symbol: value})
            assert symbol in str(caught.value)
            assert str(interval) in str(caught.value)
    for symbol in law.arguments:
        if symbol in ("x_mean", "x_other_mean", "x_other_variance", "attention_drop_prob"):
            continue  # these have defaults
        with pytest.raises(DomainError, match=symbol):
            law(**{n: v for n, v in inside.items() if n != symbol})


def test_bad_requests_are_named() -> None:
    with pytest.raises(DomainError, match=r"component = 'swish'.*relu"):
        moments.component("swish")
    with pytest.raises(DomainError, match=r"quantity = 'skew'.*variance"):
        moments.component("relu").law("skew")
    with pytest.raises(DomainError, match=r"theory = 'folklore'.*published"):
        moments.component("relu").under("folklore")  # type: ignore[arg-type]
    with pytest.raises(DomainError, match="x_varience"):
        moments.component("relu").law("variance", "published")(x_varience=1.0)
    with pytest.raises(DomainError, match="overflows"):
        moments.component("linear").law("variance", "published")(
            x_variance=1e300, fan_in=1e10, weight_variance=1e10
        )


def test_shorthands_of_a_call() -> None:
    covariance = moments.component("relu").law("covariance", "published")
    plain = covariance(x_variance=2.0, x_other_variance=2.0, x_correlation=0.25)
    assert covariance(x_variance=2.0, x_correlation=0.25) == plain
    assert covariance(x_variance=2.0, x_covariance=0.5) == plain
    slope = moments.component("relu").law("grad_covariance", "published")
    assert slope(
        x_variance=2.0, x_correlation=0.25, grad_variance=3.0, grad_correlation=0.5
    ) == slope(x_variance=2.0, x_correlation=0.25, grad_covariance=1.5)


# --- exact laws against independent references ----------------------------------------------------

_NEAR = 1 - 1e-9
_PAIRS = [
    *((1.0, 1.0, r) for r in (0.0, 0.3, 0.9, 1 - 1e-3, _NEAR, 1.0, -0.3, -1.0)),
    *((v, v, r) for v in (24.0, 30.0) for r in (0.9999, _NEAR, 1.0, -1 + 1e-6)),
    *((1e-3, 1e-3, r) for r in (0.5, 1.0)),
    *((0.5, 4.0, r) for r in (0.7, 1.0)),
    *((1e-3, 30.0, r) for r in (-0.9, 1.0)),
]
_ACTIVATION_POINTS = [
    {
        "x_variance": v,
        "x_other_variance": w,
        "x_correlation": r,
        "x_hidden_correlation": r,
        "grad_variance": 1.7,
        "grad_covariance": 0.9,
    }
    for v, w, r in _PAIRS
]
_GATED_POINTS = [
    {**point, "factor_variance": 0.6, "factor_covariance": -0.2}
    for point in _ACTIVATION_POINTS
    if (point["x_variance"], point["x_correlation"]) in ((1.0, 0.3), (1.0, _NEAR), (0.5, 0.7))
]
_LINEAR_POINTS = [
    {
        "x_mean": mean,
        "x_other_mean": other_mean,
        "x_variance": v,
        "x_other_variance": w,
        "x_correlation": r,
        "x_hidden_correlation": r,
        "grad_variance": 1.3,
        "grad_correlation": r,
        "drop_prob": p,
        "weight_variance": 0.37,
        "fan_in": 3,
        "fan_out": 2,
    }
    for mean, other_mean, v, w, r, p in [
        (0.0, 0.0, 1.0, 1.0, 0.3, 0.1),
        (0.7, -0.4, 0.2, 5.0, -0.8, 0.5),
        (-1.5, 2.0, 1e-3, 30.0, 1.0, 0.0),
        (0.3, 0.3, 2.0, 2.0, -1.0, 0.9),
    ]
]
_EMBEDDING_POINTS = [
    {"table_variance": s, "pattern_correlation": r, "vocab_size": vocab, "seq_len": length}
    for s, r, vocab, length in [(4e-4, 0.3, 3, 4), (1.0, 1.0, 2, 6), (0.5, 0.0, 5, 3)]
]
_LAYERNORM_POINTS = [
    {"d_model": d, "x_variance": v, "epsilon": 0.0} for d, v in [(8, 1.0), (64, 0.01), (5, 30.0)]
]
_FFN_POINTS = [
    {**point, "d_model": 16, "d_ff": 48, "ffn_in": 0.02, "ffn_out": 0.05, "drop_prob": 0.3}
    for point in _ACTIVATION_POINTS
    if point["x_correlation"] in (0.3, 0.7, _NEAR, -0.9)
]
_RESIDUAL_POINTS = [
    {"skip_square": 0.8, "branch_square": 0.3}
    | {"x_variance": 1.4, "branch_variance": 0.6, "branch_correlation": r}
    | {"grad_variance": 0.9, "grad_branch_variance": 2.0, "grad_branch_correlation": -r}
    for r in (-1.0, -0.4, 0.0, 0.7)
]
POINTS: dict[str, list[dict[str, float]]] = {
    **dict.fromkeys(ACTIVATIONS, _ACTIVATION_POINTS),
    **dict.fromkeys(GATES, _GATED_POINTS),
    "dyt": [{**point, "alpha": alpha} for point in _GATED_POINTS for alpha in (0.3, 1.0)],
    **dict.fromkeys(("linear", "dropout", "scale"), _LINEAR_POINTS),
    "correlated_residual": _RESIDUAL_POINTS,
    "biased_linear": [{**point, "bias_variance": 0.7} for point in _LINEAR_POINTS],
    **{f"{table}_embedding": _EMBEDDING_POINTS for table in ("token", "segment", "position")},
    "layernorm": _LAYERNORM_POINTS,
    "rmsnorm": [*_LAYERNORM_POINTS, {"d_model": 16, "x_variance": 0.3, "epsilon": 0.2}],
    "ffn_block": _FFN_POINTS,
    "softmax": [{"seq_len": 2}, {"seq_len": 7}],
    "attention_without_value": [{}],
    "attention": [{}],
    "attention_block": [{}],
}


@pytest.mark.parametrize(("name", "quantity", "law"), EXACT)
def test_exact_law_has_a_reference_and_meets_it(name: str, quantity: str, law: Law) -> None:
    assert (name, quantity) in REFERENCES, "an exact law needs a reference in tests/quadrature.py"
    assert name in POINTS, "and points at which to compare"
    reference = REFERENCES[name, quantity]
    inside = [
        point
        for point in POINTS[name]
        if all(law.domain[n].contains(v) for n, v in point.items() if n in law.domain)
    ]
    assert len(inside) >= len(POINTS[name]) / 2
    for point in inside:
        value, expected = float(law(**point)), reference(**point)
        # Near its zeros a law is compared on the scale of what it subtracts.
        scale = max([abs(v) for n, v in point.items() if "variance" in n], default=1.0)
        assert value == pytest.approx(expected, rel=1e-10, abs=1e-14 * scale), point


@pytest.mark.parametrize("word", ELSEWHERE)
def test_what_is_no_component_says_where_it_stands(word: str) -> None:
    root = Path(moments.__file__).parents[1]
    with pytest.raises(moments.DomainError, match=f"'{word}': not of one component; see"):
        component(word)
    for place in ELSEWHERE[word].split("; "):
        if place.endswith(".py"):
            assert (root / place.rpartition(" ")[2]).exists()
        elif not place.startswith("docs/theory/"):  # whose headings `test_theory_pages` holds
            assert component(place).name == place


def test_references_belong_to_components() -> None:
    assert {name for name, _ in REFERENCES} <= set(moments.components())


@pytest.mark.parametrize("name", sorted(CLOSED))
def test_conditional_means_of_the_references(name: str) -> None:
    """The pair reference's algebra and its special functions, themselves against quadrature."""
    chosen = CLOSED[name]
    plain: dict[str, tuple[Any, Any]] = {
        "relu": (lambda x: max(x, mp.mpf(0)), lambda x: mp.mpf(x > 0)),
        "gelu": (lambda x: x * mp.ncdf(x), lambda x: mp.ncdf(x) + x * mp.npdf(x)),
        "identity": (lambda x: x, lambda x: mp.mpf(1)),
        "leaky_relu": (lambda x: max(x, x / 100), lambda x: mp.mpf(1) if x > 0 else mp.mpf(".01")),
        "relu_squared": (lambda x: max(x, mp.mpf(0)) ** 2, lambda x: 2 * max(x, mp.mpf(0))),
        "erf": (mp.erf, lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x)),
    }
    theirs = (chosen.function, chosen.mean), (chosen.derivative, chosen.mean_slope)
    for function, (same, mean) in zip(plain[name], theirs, strict=True):
        for x in (-2.3, 0.4):
            assert float(same(np.array(x))) == pytest.approx(float(function(mp.mpf(x))), abs=1e-15)
        for m, s in ((0.3, 1.1), (-0.8, 0.4), (2.0, 3.0)):
            integral = mp.quad(
                lambda z, f=function, m=m, s=s: mp.npdf(z) * f(m + s * z),
                [-12, -m / s, 12],
                method="gauss-legendre",
            )
            assert float(integral) == pytest.approx(float(mean(np.array(m), s)), abs=4e-15)


@pytest.mark.parametrize("name", sorted({*CLOSED, *GRIDDED}))
def test_scalars_and_arrays_take_the_same_value_at_equality(name: str) -> None:
    """r = 1 is the single-token law whichever way it is written."""
    laws = moments.component(name).under("published")
    largest = laws["variance"].domain["x_variance"].upper
    for v in (1e-3, 0.3, 4.0, min(25.0, largest)):
        same = laws["variance"](x_variance=v)
        for r in (1.0, np.array([1.0]), np.array([[1.0]])):
            pair = laws["covariance"](x_variance=v, x_correlation=r)
            assert np.ravel(pair)[0] == pytest.approx(same, rel=1e-9)


@pytest.mark.parametrize("name", [*ACTIVATIONS, "ffn_block"])
@pytest.mark.parametrize(
    ("v", "w", "r"), [(1.0, 1.0, 0.3), (0.2, 3.0, -0.6), (2.0, 0.5, 0.95), (4.0, 4.0, 0.0)]
)
def test_slope_is_the_derivative_of_the_moment(name: str, v: float, w: float, r: float) -> None:
    """Price's theorem: d/dc E f(x) f(x') = E f'(x) f'(x')."""
    laws = moments.component(name).under("published")
    widths = {"d_model": 16, "d_ff": 48, "ffn_in": 0.02, "ffn_out": 0.05, "drop_prob": 0.3}
    slope = laws["grad_covariance"](
        x_variance=v, x_other_variance=w, x_correlation=r, grad_covariance=1.0, **widths
    )
    scale, step = math.sqrt(v * w), 1e-5
    shifted = [
        laws["covariance"](x_variance=v, x_other_variance=w, x_correlation=r + h, **widths)
        for h in (-2 * step, -step, step, 2 * step)
    ]
    derivative = (shifted[0] - 8 * shifted[1] + 8 * shifted[2] - shifted[3]) / (12 * step * scale)
    assert derivative == pytest.approx(slope, rel=1e-8, abs=1e-9)


# --- fitted laws: the size of the error that their sources accept ---------------------------------


def test_simplified_relu_polynomial() -> None:
    r = np.linspace(0, 1, 101)
    relu = moments.component("relu")
    variance = relu.law("variance", "published")(x_variance=1.0)
    fitted = relu.law("covariance", "simplified")(x_variance=1.0, x_correlation=r) / variance
    exact = relu.law("covariance", "published")(x_variance=1.0, x_correlation=r) / variance
    assert np.abs(fitted - exact).max() < 0.015
    assert fitted[[0, -1]] == pytest.approx([0.0, 1.0], abs=1e-15)


def test_simplified_ffn_polynomial() -> None:
    r = np.linspace(0, 1, 101)
    widths = {"d_model": 64, "d_ff": 256, "ffn_in": 0.01, "ffn_out": 0.01, "drop_prob": 0.2}
    block = moments.component("ffn_block")
    gain = 64 * 256 * 1e-4 / 2
    fitted, exact = (
        block.law("covariance", theory)(x_variance=1.0, x_correlation=r, **widths) / gain
        for theory in ("simplified", "published")
    )
    assert np.abs(fitted - exact).max() < 0.02
    assert fitted[[0, -1]] == pytest.approx(exact[[0, -1]], rel=1e-12)


# --- asymptotic laws: Monte Carlo in their regime -------------------------------------------------
# Each entry: (component, quantity, theory) -> the error its source accepts, beyond three standard
# errors of the simulation.

_UNIFORM = AttentionSetting(theta=1e-4)
_TILTED = AttentionSetting(theta=0.4)
_ALIKE = AttentionSetting(
    theta=1e-4, x_correlation=0.9, grad_correlation=0.9, drop_prob=0.0, attention_drop_prob=0.05
)

_ATTENTION_CHECKS = {
    # theta = .4: Var v_x within 2 % plus the dropout of the common part, p/(1-p) r/L = .2 %.
    **{
        (name, quantity, "published"): (_TILTED, 0.02)
        for name in ("attention_without_value", "attention", "attention_block")
        for quantity in ("variance", "covariance")
    },
    # The value path at uniform attention is exact.
    **{
        (name, quantity, "published"): (_UNIFORM, 1e-3)
        for name in ("attention_without_value", "attention", "attention_block")
        for quantity in ("grad_variance", "grad_covariance")
    },
    # As printed the block keeps r_g through its dropout: compared where there is none.
    ("attention_block", "grad_variance", "published"): (
        dataclasses.replace(_UNIFORM, drop_prob=0.0),
        1e-3,
    ),
    # Many correlated tokens: what is dropped is (1 - r)/(r L) and p/((1-p) r L), .3 % here.
    **{
        (name, quantity, "simplified"): (_ALIKE, 0.01)
        for name in ("attention_without_value", "attention_block")
        for quantity in ("variance", "covariance", "grad_variance", "grad_covariance")
    },
}
_SOFTMAX_CHECKS = {
    # 6 % high at logit variance 1, L = 300 (the law's own note); at small variances the full form's
    # exponent has L/(L-1) where L centred logits have (L-1)/L, so it is 2/L high.
    ("variance", "published"): [(300, 1.0, 0.0, 0.065), (128, 0.1, 0.3, 2 / 128)],
    ("variance", "simplified"): [(300, 1.0, 0.0, 0.065), (300, 0.1, 0.3, 0.015)],
    ("grad_variance", "published"): [(300, 0.5, 0.0, 0.02)],
    ("grad_variance", "simplified"): [(300, 0.5, 0.0, 0.02)],
}
_LAYERNORM_CHECKS = {
    # O(1/d) left out: up to 1/d forward, 2/d for the projection and 2/d for the norm backward.
    ("covariance", "published"): 1 / 256,
    ("covariance", "simplified"): 1 / 256,
    ("grad_variance", "published"): 3 / 256,
    ("grad_covariance", "published"): 3 / 256,
}
_COUNTED = {
    ("token_embedding", "pattern_correlation", "published"),
    ("token_embedding", "pattern_correlation", "simplified"),
    ("segment_embedding", "pattern_correlation", "published"),
}
_UNIFORM_GRADIENTS = "uniform_attention_gradients"
_NOCI = {
    (_UNIFORM_GRADIENTS, quantity, "published")
    for quantity in ("value_gradient", "query_gradient", "inverse_temperature_square")
}


def _within(value: float, estimate: Estimate, error: float) -> None:
    distance = abs(value - estimate.mean)
    assert distance <= 3 * estimate.stderr + error * abs(estimate.mean), (value, estimate)


@pytest.mark.parametrize("key", _ATTENTION_CHECKS, ids="-".join)
def test_attention_as_published(key: tuple[str, str, str]) -> None:
    name, quantity, theory = key
    setting, error = _ATTENTION_CHECKS[key]
    values = setting.values()
    if name != "attention_block":
        values["drop_prob"] = values.pop("attention_drop_prob")
    law = moments.component(name).law(quantity, theory)  # type: ignore[arg-type]
    _within(law(**values), attention_draws(setting, 60, 1)[name, quantity], error)


@pytest.mark.parametrize("key", _SOFTMAX_CHECKS, ids="-".join)
def test_softmax_as_published(key: tuple[str, str]) -> None:
    law = moments.component("softmax").law(*key)  # type: ignore[arg-type]
    for length, variance, correlation, error in _SOFTMAX_CHECKS[key]:
        value = law(
            seq_len=length, x_variance=variance, x_correlation=correlation, grad_variance=1.0
        )
        _within(value, softmax_draws(length, variance, correlation, 4000, 2)[key[0]], error)


@pytest.mark.parametrize("key", _LAYERNORM_CHECKS, ids="-".join)
def test_layernorm_as_published(key: tuple[str, str]) -> None:
    law = moments.component("layernorm").law(*key)  # type: ignore[arg-type]
    value = law(
        d_model=256, x_variance=1.7, x_correlation=0.4, grad_variance=1.0, grad_covariance=1.0
    )
    _within(value, layernorm_draws(256, 1.7, 0.4, 6000, 3)[key[0]], _LAYERNORM_CHECKS[key])


@pytest.mark.parametrize(("seq_len", "correlation"), [(16, 0.0), (6, 0.5)])
def test_query_and_value_gradients_under_uniform_attention(
    seq_len: int, correlation: float
) -> None:
    laws = moments.component(_UNIFORM_GRADIENTS).under("published")
    point = {
        "d_model": 96,
        "seq_len": seq_len,
        "x_variance": 1.4,
        "x_correlation": correlation,
    }
    measured = uniform_attention_draws(96, seq_len, 1.4, correlation, 800, 4)
    for quantity in ("value_gradient", "query_gradient"):
        # Norms of Gaussian tokens fluctuate: O(1/d) left out.
        _within(laws[quantity](**point), measured[quantity], 2 / 96)
    scale = laws["inverse_temperature_square"](**point)
    ratio = measured["value_gradient"].mean / measured["query_gradient"].mean
    assert scale == pytest.approx(ratio, rel=0.1)


def test_embedding_patterns_approach_the_counted_ones() -> None:
    token = moments.component("token_embedding")
    exact = token.law("pattern_correlation", "refined")(vocab_size=32000)
    for length in (256, 4096):
        plug_in = token.law("pattern_correlation", "published")(vocab_size=32000, seq_len=length)
        assert abs(plug_in - exact) <= 1 / (length - 1)
        segment = moments.component("segment_embedding").law("pattern_correlation", "published")
        assert abs(segment(seq_len=length) - 2 / 3) <= 1 / (length - 1)
    # H_V is log V + .5772: the logarithm alone is off by twice that, relatively.
    for vocab in (32000, 10**6):
        simple = token.law("pattern_correlation", "simplified")(vocab_size=vocab)
        exact = token.law("pattern_correlation", "refined")(vocab_size=vocab)
        assert 0 < simple / exact - 1 < 2.2 * np.euler_gamma / math.log(vocab)


def test_every_published_approximation_is_checked() -> None:
    checked = {
        *_ATTENTION_CHECKS,
        *(("softmax", *key) for key in _SOFTMAX_CHECKS),
        *(("layernorm", *key) for key in _LAYERNORM_CHECKS),
        *_COUNTED,
        *_NOCI,
    }
    seen = set()
    for theory in ("published", "simplified"):
        for name in (n for n in moments.components() if n not in BY_VALUES):
            for quantity, law in moments.component(name).under(theory).items():
                if law.status == "asymptotic" and id(law) not in seen:
                    seen.add(id(law))
                    assert (name, quantity, theory) in checked


# --- properties -----------------------------------------------------------------------------------


def _points() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two variances and a correlation: all ends and near-ends, and 300 draws inside."""
    rng = np.random.default_rng(5)
    ends = [1e-3, 1.0, 9.0]  # inside every activation's domain
    near = [-1.0, np.nextafter(-1.0, 0.0), -0.5, 0.0, 5e-324, 1e-9, 1 - 1e-9, 1.0]
    corners = np.array(np.meshgrid(ends, ends, near)).reshape(3, -1)
    inside = 10 ** rng.uniform(-3, math.log10(9.0), (2, 300))
    drawn = np.vstack([inside, rng.uniform(-1.0, 1.0, 300)])
    v, w, r = np.hstack([corners, drawn])
    return v, w, r


V, W, R = _points()


@functools.cache
def _law(name: str, quantity: str) -> Law:
    return moments.component(name).law(quantity, "published")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_cauchy_schwarz(name: str) -> None:
    covariance = _law(name, "covariance")(x_variance=V, x_other_variance=W, x_correlation=R)
    variance = _law(name, "variance")
    bound = np.sqrt(variance(x_variance=V) * variance(x_variance=W))
    assert np.all(np.abs(covariance) <= bound * (1 + 1e-9))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("quantity", ["covariance", "grad_covariance"])
def test_the_two_tokens_are_interchangeable(name: str, quantity: str) -> None:
    law = _law(name, quantity)
    common = {"x_correlation": R, "grad_covariance": 1.0}
    one = law(x_variance=V, x_other_variance=W, **common)
    other = law(x_variance=W, x_other_variance=V, **common)
    assert np.all(np.abs(one - other) <= 1e-10 * np.abs(other) + 1e-13 * np.sqrt(V * W))


@pytest.mark.parametrize(("name", "least"), [("relu", -1.0), ("gelu", 0.0), ("gelu_tanh", 0.0)])
def test_covariance_rises_with_correlation(name: str, least: float) -> None:
    """For GeLU only where r >= 0: its slope turns negative near r = -1 at large variances."""
    law, below = _law(name, "covariance"), np.maximum(R, least)
    for s in (*R[:8], *np.roll(R, 1)[-32:]):
        low, high = np.minimum(below, max(s, least)), np.maximum(below, max(s, least))
        rise = law(x_variance=V, x_correlation=high) - law(x_variance=V, x_correlation=low)
        assert np.all(rise >= -1e-14 * V)


@pytest.mark.parametrize("k", [1e-2, 0.3, 1.0, 7.0, 1e2])
def test_relu_is_homogeneous(k: float) -> None:
    law = _law("relu", "covariance")
    one, scaled = (law(x_variance=x * V, x_correlation=R) for x in (1.0, k))
    assert np.all(np.abs(scaled - k * one) <= 1e-12 * k * np.abs(one) + 1e-15 * k * V)


@pytest.mark.parametrize(
    ("name", "quantity", "values"),
    [
        ("erf", "alignment", {"x_variance": 1e-6}),
        ("erf", "alignment", {"x_variance": 3.0}),
        ("erf", "alignment", {"x_variance": 1e4}),
        ("silu", "mean", {"x_variance": 1e-30}),
        ("quick_gelu", "mean", {"x_variance": 1e-25}),
        ("gelu_tanh", "mean", {"x_variance": 1e-25}),
        ("gelu", "grad_variance", {"x_variance": 1e30, "grad_variance": 1.0}),
    ],
)
def test_laws_at_extreme_variances(name: str, quantity: str, values: dict[str, float]) -> None:
    """Against quadrature of the function itself, or its leading terms at 0 and infinity."""
    v = values["x_variance"]
    curvature = {"silu": 0.25, "quick_gelu": 0.4255, "gelu_tanh": math.sqrt(1 / (2 * math.pi))}
    if name == "erf":
        with mp.workdps(25):
            breaks = [0, 0.5, 1, 2, 4, 8] if v > 1 else [0, math.sqrt(v), 12 * math.sqrt(v)]

            def expect(function: Any, ends: list[float]) -> mp.mpf:
                weight = lambda x: mp.exp(-x * x / (2 * v)) / mp.sqrt(2 * mp.pi * v)  # noqa: E731
                return 2 * mp.quad(lambda x: weight(x) * function(x), ends)

            far = [*breaks, *(math.sqrt(v) * k for k in (1, 3, 6, 12) if v > 1)]
            far = sorted(set(far))
            slope = lambda x: 4 / mp.pi * mp.exp(-2 * x * x)  # noqa: E731
            both = expect(lambda x: mp.erf(x) ** 2 * slope(x), breaks)
            exact = float(both / expect(lambda x: mp.erf(x) ** 2, far) / expect(slope, breaks))
    elif quantity == "mean":
        exact = curvature[name] * v  # f = x/2 + c x^2 + O(x^4)
    else:
        exact = 0.5  # a step's, but for terms in 1/sqrt(v)
    law = moments.component(name).law(quantity)
    assert float(law(**values)) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1e-3), (0.7, 1.3), (0.05, 20.0)])
def test_many_variances_are_what_each_is_alone(low: float, high: float) -> None:
    """Arrays read series in log variance where single numbers are integrated."""
    random = np.random.default_rng(11)
    variance = np.exp(random.uniform(np.log(low), np.log(high), 12))
    correlation = np.append(random.uniform(-1, 1, 11), 1.0)
    laws = GELU_TANH.under("refined")
    pair = variance, variance[::-1].copy(), correlation
    for name, values in (("kurtosis", (variance,)), ("alignment", (variance,))):
        found = laws[name].formula(NUMPY, *values)
        alone = [laws[name].formula(FLOAT, *map(float, one)) for one in zip(*values, strict=True)]
        np.testing.assert_allclose(found, alone, rtol=1e-11)
    for name, last in (("covariance", ()), ("grad_covariance", (1.0,))):
        found = laws[name].formula(NUMPY, *pair, *last)
        each = zip(*pair, strict=True)
        alone = [laws[name].formula(FLOAT, *map(float, one), *last) for one in each]
        np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12 * high)
