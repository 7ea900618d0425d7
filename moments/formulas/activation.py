"""Activations applied to a centred Gaussian input, as pair laws.

Each activation is one function of a pair of tokens with variances v, v' and correlation r: the
second moment E phi(x) phi(x'). The gradient's laws are its derivative in the covariance (Price's
theorem, E phi'(x) phi'(x')), and a token with itself is the pair at r = 1, so that every law below
follows from it and from the mean: closed forms where they exist, Gaussian expectations elsewhere.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error
from .algebra import FLOAT, NODES, NUMPY, LogSeries, midpoints
from .checks import SHARE, Interval
from .law import ComponentLaws, Law, Source, Substituted, derived, times
from .price import arc_cosine, differentiated, price
from .references import CHO, kedia

Pair = Callable[[Any, Any, Any, Any], Any]
Single = Callable[[Any, Any], Any]


def activation(
    name: str,
    title: str,
    *,
    mean: Single,
    moment: Pair,
    function: Single,
    slope: Pair | None = None,
    kurtosis: Single | None = None,
    alignment: Single | None = None,
    source: dict[str, Source] | None = None,
    simplified: dict[str, Law | None] | None = None,
    limits: Mapping[str, Interval] | None = None,
    kinks: bool = False,
) -> ComponentLaws:
    """Assemble an activation's laws from its mean and pair moment.

    Args:
        mean, moment: E phi(x), and E phi(x) phi(x') of a pair of tokens.
        function: the activation, f(m, x).
        slope: derivative of the moment in the covariance; None: that of the closed form.
        kurtosis: E phi^4/(E phi^2)^2; None: by quadrature.
        alignment: E phi^2 phi'^2/(E phi^2 E phi'^2); None: by quadrature.
        source, simplified: sources by quantity, and overrides of the theory "simplified".
        limits: domain of the variances if it is limited by numerical resolution.
        kinks: whether the function has kinks.
    """
    default_source = derived("second moment of a Gaussian pair, checked by quadrature")
    if slope is None:
        slope = price(moment)
    if kurtosis is None:
        kurtosis = cached_expectation(lambda m, v: fourth_over_squared(m, function, v, kinks))
    if alignment is None:
        alignment = cached_expectation(lambda m, v: slope_alignment(m, function, v, kinks))

    def covariance(m: Any, v: Any, other: Any, r: Any) -> Any:
        return moment(m, v, other, r) - mean(m, v) * mean(m, other)

    formulas = {
        "mean": Substituted(mean, v="x_variance"),
        "variance": Substituted(covariance, **_OWN),
        "covariance": Substituted(covariance, **_PAIR),
        "hidden_covariance": Substituted(covariance, **_OWN | {"r": "x_hidden_correlation"}),
        "grad_variance": times(Substituted(slope, **_OWN), "grad_variance"),
        "grad_covariance": times(Substituted(slope, **_PAIR), "grad_covariance"),
        "kurtosis": Substituted(kurtosis, v="x_variance"),
        "alignment": Substituted(alignment, v="x_variance"),
    }
    return ComponentLaws(
        name,
        title,
        {
            quantity: Law(
                formula,
                (source or {}).get(quantity, default_source),
                limits=dict(limits or {}),
                note=BY_PRICE if quantity.startswith("grad_") else "",
            )
            for quantity, formula in formulas.items()
        },
        simplified=simplified or {},
        entrywise=(function, differentiated(function)),
    )


BY_PRICE = "derivative of the second moment in the tokens' covariance (Price's theorem)"

_PAIR: dict[str, Any] = {"v": "x_variance", "other": "x_other_variance", "r": "x_correlation"}
_OWN: dict[str, Any] = {"v": "x_variance", "other": "x_variance", "r": lambda m: 1}
"""Symbols of a pair of tokens, and of a token with itself."""


def cached_expectation(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Cache an expectation: floats in a least-recently-used cache, arrays in a `CachingNumpy`, and
    many variances as a series in their logarithm."""

    @functools.lru_cache(maxsize=1024)
    def at_floats(*values: float) -> Any:
        return formula(FLOAT, *values)

    series = LogSeries(lambda variance: np.asarray(formula(NUMPY, variance)))

    @functools.wraps(formula)
    def law(m: Any, *values: Any) -> Any:
        if m is FLOAT:
            return at_floats(*values)
        if (held := getattr(m, "held", None)) is not None:
            key = (law, *map(id, values))
            if key not in held:  # stored with the values, so that their ids stay theirs
                held[key] = law(NUMPY, *values), values
            return held[key][0]
        if m is NUMPY and len(values) == 1:
            variance = np.asarray(values[0], dtype=float)
            if LogSeries.serves(variance):
                return series(variance.ravel()).reshape(variance.shape)
        return formula(m, *values)

    return law


# --- ReLU: the arc-cosine kernels of degree 1 and 0 ---------------------------------------------


def relu_moment(m: Any, v: Any, other: Any, r: Any) -> Any:
    return m.sqrt(v * other) * arc_cosine(m, 1, r)


RELU = activation(
    "relu",
    "ReLU, max(x, 0)",
    mean=lambda m, v: m.sqrt(v / (2 * m.pi)),
    moment=relu_moment,
    function=lambda m, x: (x + abs(x)) / 2,
    kurtosis=lambda m, v: 6 + 0 * v,
    alignment=lambda m, v: 2 + 0 * v,
    source={
        "mean": kedia("A.4 and Table 15"),
        "variance": kedia("A.4 and Table 16"),
        "covariance": kedia("A.4 and Table 18; unequal variances: arc-cosine kernel of degree 1"),
        "hidden_covariance": kedia("A.4 and Table 19"),
        "grad_variance": kedia("A.4 and Table 17"),
        "grad_covariance": kedia("A.4 and Table 20; arc-cosine kernel of degree 0"),
        "kurtosis": derived("E x^4 / 2 over (E x^2 / 2)^2"),
        "alignment": derived("E x^2 / 2 over (E x^2 / 2)(1 / 2)"),
    },
    simplified={
        "covariance": Law(
            lambda m, x_variance, x_correlation: (
                x_variance
                * (m.pi - 1)
                / (2 * m.pi)
                * (m.ratio(7, 10) * x_correlation + m.ratio(3, 10) * x_correlation**2)
            ),
            kedia("Table 1"),
            "fitted",
            note="the paper's polynomial fit to the exact law on r in [0, 1]",
            limits={"x_correlation": SHARE},
        )
    },
)


# --- GeLU, erf form: x Phi(x) -------------------------------------------------------------------
# x Phi(x) = E (x - z)^+ - phi(x), z an independent standard normal: ReLU's moment at variances
# 1 + v and 1 + v', less a Gaussian integral of all terms with phi. Neither's slope cancels.


def _gelu_moment(m: Any, v: Any, other: Any, r: Any) -> Any:
    c, size = r * m.sqrt(v * other), m.sqrt((1 + v) * (1 + other))
    unshared = (1 - r) * (1 + r)
    gap = 1 + v + other + v * other * unshared  # size^2 - c^2
    rest = 1 + unshared * (v + other) + r**2 * (other / (1 + v) + v / (1 + other))
    return size * arc_cosine(m, 1, c / size) - rest / (2 * m.pi * m.sqrt(gap))


def gelu_function(m: Any, x: Any) -> Any:
    return x * m.normal_cdf(x)


GELU = activation(
    "gelu",
    "GeLU, erf form, x Phi(x)",
    mean=lambda m, v: v / m.sqrt(2 * m.pi * (1 + v)),
    moment=_gelu_moment,
    function=gelu_function,
    source={
        "mean": kedia("A.5 and Table 15"),
        "variance": kedia("A.5 and Table 16"),
        "covariance": kedia("A.5 and Table 18; unequal variances derived here, by quadrature"),
        "hidden_covariance": kedia("A.5; the cell of Table 19 is blank in both versions"),
        "grad_variance": kedia("A.5 and Table 17"),
        "grad_covariance": kedia("A.5 and Table 20; unequal variances derived here"),
    },
)


# --- The identity, for linear networks ----------------------------------------------------------

IDENTITY = activation(
    "identity",
    "Identity, for linear networks",
    mean=lambda m, v: 0 * v,
    moment=lambda m, v, other, r: r * m.sqrt(v * other),
    function=lambda m, x: x,
    kurtosis=lambda m, v: 3 + 0 * v,
    alignment=lambda m, v: 1 + 0 * v,
)


# --- Any other function: expectations over the Gaussian ------------------------------------------


def fourth_over_squared(m: Any, function: Single, v: Any, kinks: bool = False) -> Any:
    """Kurtosis about zero of a function of a Gaussian, by quadrature."""
    fourth = m.expect(lambda n, x: function(n, x) ** 4, v, kinks)
    return fourth / m.expect(lambda n, x: function(n, x) ** 2, v, kinks) ** 2


def slope_alignment(m: Any, function: Single, v: Any, kinks: bool = False) -> Any:
    """E f^2 f'^2/(E f^2 E f'^2) of a Gaussian, by quadrature; 1 if the slope vanishes, as for a
    step function."""
    derivative = differentiated(function)
    joint = m.expect(lambda n, x: (function(n, x) * derivative(n, x)) ** 2, v, kinks)
    product = m.expect(lambda n, x: function(n, x) ** 2, v, kinks)
    product = product * m.expect(lambda n, x: derivative(n, x) ** 2, v, kinks)
    vanishes = 1 * (product == 0)
    return (joint + vanishes) / (product + vanishes)


def by_quadrature(
    name: str,
    title: str,
    function: Single,
    *,
    largest_variance: float = 25.0,
    odd: bool = False,
    even_part: Single | None = None,
    kinks: bool = False,
) -> ComponentLaws:
    """An activation without closed forms: its laws are Gaussian expectations.

    `function` is written over a number system, f(m, x), like every formula.
    Numerically: the trapezoidal rule; pairs by the Hermite (Mehler) expansion in r, whose
    coefficients fall like exp(-sqrt(2 n/v) times the distance of the nearest pole from the real
    axis). Resolved for variances up to `largest_variance`, beyond which the function is nearly a
    kink on its input's scale. The mean of an `odd` function is 0; that of an `even_part` is not
    hidden by rounding errors of a linear part. Functions with `kinks` are averaged by midpoints.
    """
    averaged = even_part or function
    resolved = Interval(0.0, largest_variance, open_lower=True)
    return activation(
        name,
        title,
        limits={"x_variance": resolved, "x_other_variance": resolved},
        mean=cached_expectation(lambda m, v: 0 * v if odd else m.expect(averaged, v, kinks)),
        moment=cached_expectation(
            lambda m, v, other, r: m.expect_pair(function, v, other, r, kinks)
        ),
        slope=cached_expectation(
            lambda m, v, other, r: m.expect_pair(differentiated(function), v, other, r, kinks)
        ),
        function=function,
        kinks=kinks,
    )


def _tanh_gate(m: Any, x: Any) -> Any:
    return m.tanh(m.sqrt(2 / m.pi) * (x + m.ratio(44715, 1000000) * x * x * x))


def gelu_tanh_function(m: Any, x: Any) -> Any:
    return x * (1 + _tanh_gate(m, x)) / 2


GELU_TANH = by_quadrature(
    "gelu_tanh",
    "GeLU, tanh form, as in GPT-2",
    gelu_tanh_function,
    even_part=lambda m, x: x * _tanh_gate(m, x) / 2,
)


# --- further closed forms -------------------------------------------------------------------------

# --- Leaky ReLU: a x + (1 - a) ReLU(x) ------------------------------------------------------------
# Stein: E x ReLU(x') = c/2, so that the moment is a c + (1-a)^2 times ReLU's.


def leaky_relu(slope: str | int | float | Fraction = "0.01") -> ComponentLaws:
    """ReLU with `slope` below zero, read as an exact decimal.

    The name contains the slope unless it is 0.01.

    Raises:
        DomainError: a slope that is not a finite number.
    """
    try:
        exact = Fraction(str(slope))
    except (ValueError, ZeroDivisionError):
        raise domain_error("slope", slope, "a finite number, such as 0.2") from None

    def a(m: Any) -> Any:
        return m.ratio(exact.numerator, exact.denominator)

    usual = exact == Fraction(1, 100)
    return activation(
        "leaky_relu" if usual else f"leaky_relu({float(exact):g})",
        f"Leaky ReLU, {float(exact):g} x below zero",
        mean=lambda m, v: (1 - a(m)) * m.sqrt(v / (2 * m.pi)),
        moment=lambda m, v, other, r: (
            a(m) * r * m.sqrt(v * other) + (1 - a(m)) ** 2 * relu_moment(m, v, other, r)
        ),
        function=lambda m, x: a(m) * x + (1 - a(m)) * (x + abs(x)) / 2,
        kurtosis=lambda m, v: 6 * (1 + a(m) ** 4) / (1 + a(m) ** 2) ** 2 + 0 * v,
        alignment=lambda m, v: 2 * (1 + a(m) ** 4) / (1 + a(m) ** 2) ** 2 + 0 * v,
    )


LEAKY_RELU = leaky_relu()


# --- Squared ReLU: the arc-cosine kernels of degree 2 and 1 ---------------------------------------


RELU_SQUARED = activation(
    "relu_squared",
    "Squared ReLU, max(x, 0)^2",
    mean=lambda m, v: v / 2,
    moment=lambda m, v, other, r: v * other * arc_cosine(m, 2, r),
    function=lambda m, x: (x + abs(x)) ** 2 / 4,
    kurtosis=lambda m, v: m.ratio(70, 3) + 0 * v,
    alignment=lambda m, v: 10 + 0 * v,
    source=dict.fromkeys(
        ("covariance", "hidden_covariance", "variance", "grad_covariance", "grad_variance"),
        Source(CHO, "Section 2.1, the arc-cosine kernels of degree 2 and 1"),
    ),
)


# --- erf: the arcsine kernel ----------------------------------------------------------------------
# erf(x) = 2 Phi(sqrt(2) x) - 1: orthant probabilities again.


def erf_function(m: Any, x: Any) -> Any:
    return 2 * m.normal_cdf(m.sqrt(2) * x) - 1


ERF = activation(
    "erf",
    "Error function, erf(x)",
    mean=lambda m, v: 0 * v,
    # the arcsine's tangent: (1+2v)(1+2v') - 4c^2 written without cancellation at r near 1
    moment=lambda m, v, other, r: (
        2
        / m.pi
        * m.atan(
            2
            * r
            * m.sqrt(v * other)
            / m.sqrt(1 + 2 * v + 2 * other + 4 * v * other * (1 - r) * (1 + r))
        )
    ),
    function=erf_function,
    # phi'^2 = (4/pi) e^(-2 x^2) makes a Gaussian of variance v/(1 + 4v) of one of variance v.
    alignment=lambda m, v: m.asin(2 * v / (1 + 6 * v)) / m.asin(2 * v / (1 + 2 * v)),
)


# --- smooth functions, by quadrature --------------------------------------------------------------


def _sigmoid(m: Any, x: Any) -> Any:
    return (1 + m.tanh(x / 2)) / 2


def _softplus(m: Any, x: Any) -> Any:
    return m.log1p(m.exp(x))


def _mish_gate(m: Any, x: Any) -> Any:
    return m.tanh(_softplus(m, x))


def _quick(m: Any) -> Any:
    return m.ratio(1702, 1000)


SIGMOID = by_quadrature(
    "sigmoid",
    "Logistic sigmoid, 1/(1 + exp(-x))",
    _sigmoid,
)

SILU = by_quadrature(
    "silu",
    "SiLU (Swish), x sigmoid(x)",
    lambda m, x: x * _sigmoid(m, x),
    largest_variance=20.0,
    even_part=lambda m, x: x * m.tanh(x / 2) / 2,
)

QUICK_GELU = by_quadrature(
    "quick_gelu",
    "GeLU, sigmoid form, x sigmoid(1.702 x), as in CLIP",
    lambda m, x: x * _sigmoid(m, _quick(m) * x),
    largest_variance=9.0,
    even_part=lambda m, x: x * m.tanh(_quick(m) * x / 2) / 2,
)

TANH = by_quadrature(
    "tanh",
    "Hyperbolic tangent",
    lambda m, x: m.tanh(x),
    largest_variance=9.0,
    odd=True,
)

SOFTPLUS = by_quadrature("softplus", "Softplus, log(1 + exp(x))", _softplus)

MISH = by_quadrature(
    "mish",
    "Mish, x tanh(softplus(x))",
    lambda m, x: x * _mish_gate(m, x),
    largest_variance=12.0,
)


# --- functions known by their values --------------------------------------------------------------

Function = Callable[[np.ndarray], np.ndarray]


def _formula(name: str, function: Function, derivative: Function | None = None) -> Single:
    """The function over any number system: by name as a symbol, else by its values in double
    precision."""

    def formula(m: Any, x: Any) -> Any:
        if hasattr(x, "free_symbols"):
            import sympy

            return sympy.Function(name)(x)
        if isinstance(x, np.ndarray):
            return np.asarray(function(x), dtype=float)
        return float(function(np.asarray([float(x)]))[0])

    if derivative is not None:
        formula.derivative = _formula(f"{name}'", derivative)  # type: ignore[attr-defined]
    return formula


def _xielu(x: np.ndarray) -> np.ndarray:
    above, below = np.maximum(x, 0.0), np.minimum(x, 0.0)
    return np.asarray(0.8 * above**2 + 0.8 * (np.expm1(below) - below) + 0.5 * x)


def _xielu_slope(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.6 * np.maximum(x, 0.0) + 0.8 * np.expm1(np.minimum(x, 0.0)) + 0.5)


BY_VALUES: dict[str, tuple[Function, Function]] = {"xielu": (_xielu, _xielu_slope)}
"""Function and derivative of activations that are registered at first use: xIELU of Huang and
Schlag 2024 with its initial parameters, alpha_p = alpha_n = .8 and beta = .5."""

# --- the part of the input above a quantile -------------------------------------------------------


@functools.lru_cache(maxsize=64)
def above_quantile(base: ComponentLaws, share: float, variance: float) -> ComponentLaws:
    """f(max(x - q, 0)), q the normal's quantile of `share` at the inputs' variance (Gemma 3n).

    A program takes mean and deviation over features for q. Their gradients, of order 1/features,
    are neglected.
    """
    quantile = NormalDist(0.0, variance**0.5).inv_cdf(share)
    assert base.entrywise is not None
    function, slope = base.entrywise

    def above(x: np.ndarray) -> np.ndarray:
        return np.maximum(x - quantile, 0.0)

    name = f"{base.name}_above_{share:g}"
    formula = _formula(
        name,
        lambda x: np.asarray(function(NUMPY, above(x))),
        lambda x: np.asarray(slope(NUMPY, above(x)) * (x > quantile)),
    )
    title = f"{base.title}, of what is above the quantile {share:g}"
    return by_quadrature(name, title, formula, kinks=True)


# --- names ----------------------------------------------------------------------------------------

ACTIVATION_LAWS: dict[str, ComponentLaws] = {
    record.name: record
    for record in (
        RELU,
        GELU,
        GELU_TANH,
        IDENTITY,
        SILU,
        TANH,
        RELU_SQUARED,
        LEAKY_RELU,
        QUICK_GELU,
        SIGMOID,
        SOFTPLUS,
        MISH,
        ERF,
    )
}

_REGISTERED: dict[str, tuple[ComponentLaws, Function, Function]] = {}
_LOCK = threading.Lock()
_LEAKY = re.compile(r"leaky_relu\(([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\)")


def activation_names() -> tuple[str, ...]:
    """Every name that `activation_laws` takes, besides "leaky_relu(SLOPE)" for other slopes."""
    return tuple(dict.fromkeys((*ACTIVATION_LAWS, *BY_VALUES, *_REGISTERED)))


def activation_laws(name: str) -> ComponentLaws:
    """The laws of an activation.

    >>> activation_laws("leaky_relu(0.2)").law("mean")(x_variance=1.0).round(4)
    np.float64(0.3192)

    Raises:
        DomainError: no activation of that name.
    """
    if isinstance(name, str) and name in ACTIVATION_LAWS:
        return ACTIVATION_LAWS[name]
    if isinstance(name, str) and name in BY_VALUES and name not in _REGISTERED:
        return register_activation(name, *BY_VALUES[name])
    if isinstance(name, str) and name in _REGISTERED:
        return _REGISTERED[name][0]
    slope = leaky_slope(name)
    if slope is not None:
        return _leaky(slope)
    raise domain_error(
        "activation",
        name,
        f'one of {", ".join(activation_names())}, or "leaky_relu(0.2)" for another slope',
        "pass any other function to moments.register_activation first",
    )


def leaky_slope(name: str) -> str | None:
    """The slope below zero that "leaky_relu" or "leaky_relu(0.2)" names; None: another activation.

    >>> leaky_slope("leaky_relu(0.2)"), leaky_slope("leaky_relu"), leaky_slope("relu")
    ('0.2', '0.01', None)
    """
    if name == "leaky_relu":
        return "0.01"
    found = _LEAKY.fullmatch(name) if isinstance(name, str) else None
    return None if found is None else found[1]


@functools.lru_cache(maxsize=64)
def _leaky(slope: str) -> ComponentLaws:
    return leaky_relu(slope)


def registered_function(name: str) -> tuple[Function, Function] | None:
    """Function and derivative of an activation given by values; None for the built-in ones."""
    return _REGISTERED[name][1:] if name in _REGISTERED else BY_VALUES.get(name)


def register_activation(name: str, function: Function, derivative: Function) -> ComponentLaws:
    """Make an activation of your own known by name, wherever an activation is named.

    Its laws are Gaussian expectations of the values of `function`, right to 1e-5 even with a kink.
    One is less precise: a pair's slope where the derivative jumps and tokens correlate above .99;
    for ReLU given in this way it is off by up to .6 percent.

    >>> import numpy as np
    >>> laws = register_activation("sine", np.sin, np.cos)
    >>> laws.law("variance")(x_variance=1.0).round(4)  # (1 - exp(-2))/2
    np.float64(0.4323)

    Args:
        name: lower-case letters, digits and underscores, not taken already.
        function: maps an array of any shape to one of the same shape, entry by entry.
        derivative: the same for its derivative; at a kink or a jump, either side's.

    Returns:
        The laws, also to be had as `moments.component(name)`. Their domain is the variances up to
        which the expectations converge, 25 at most.

    Raises:
        DomainError: a name that is taken or malformed, values that are not finite real numbers of
            the input's shape, a derivative that is not the function's, a constant function, or one
            whose expectations do not converge.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise domain_error(
            "name", name, "lower-case letters, digits and underscores", "choose another name"
        )
    _check_function(name, function, derivative)
    laws = by_quadrature(
        name,
        f"{name}, registered by the user",
        _formula(name, function, derivative),
        largest_variance=_largest_variance(name, function, derivative),
        kinks=True,
    )
    with _LOCK:
        if name in _REGISTERED and _same(_REGISTERED[name][1:], (function, derivative)):
            return _REGISTERED[name][0]
        # Predictions made under a name stay what they were: it cannot be given to another function.
        if name in ACTIVATION_LAWS or name in _REGISTERED:
            raise domain_error("name", name, "a name that is free", "choose another name")
        _REGISTERED[name] = (laws, function, derivative)
    return laws


# Irrational steps and offset, so that no point is on a kink.
_PROBES = np.sqrt(2) / 20 * np.arange(-300, 300) + 0.01 * np.pi


def _evaluated(what: str, name: str, function: Function, x: np.ndarray) -> np.ndarray:
    if not callable(function):
        raise domain_error(what, function, "a function of a numpy array")
    with np.errstate(all="ignore"):
        values = np.asarray(function(x))
    if values.shape != x.shape or values.dtype.kind not in "fiub":
        raise DomainError(
            f"{what} of {name!r} gives shape {values.shape} of {values.dtype} for shape {x.shape}; "
            "it must map an array to real numbers entry by entry: write it with numpy"
        )
    if not np.all(np.isfinite(values)):
        where = x[~np.isfinite(values)].flat[0]
        raise DomainError(
            f"{what} of {name!r} is not finite at x = {where:.3g}; it must be finite everywhere: "
            "write it without overflow, for example with np.logaddexp"
        )
    return values.astype(float)


def _check_function(name: str, function: Function, derivative: Function) -> None:
    x, step = _PROBES, 1e-5
    values = _evaluated("function", name, function, x)
    slopes = _evaluated("derivative", name, derivative, x)
    _evaluated("function", name, function, x.reshape(20, -1))
    above = _evaluated("function", name, function, x + step)
    below = _evaluated("function", name, function, x - step)
    apart = np.abs((above - below) / (2 * step) - slopes)
    # Rounding of the difference, and its third-order error.
    allowed = 1e-5 * (1 + np.abs(slopes)) + 1e-10 * np.abs(values)
    if np.any(apart > allowed):
        worst = int(np.argmax(apart / allowed))
        raise DomainError(
            f"derivative of {name!r} at x = {x[worst]:.3g} is {slopes[worst]:.6g}, and differences "
            f"of function give {(above - below)[worst] / (2 * step):.6g}; pass its derivative"
        )
    if np.ptp(values) == 0.0:
        raise DomainError(f"function of {name!r} is constant; an activation must vary")


def _largest_variance(name: str, function: Function, derivative: Function) -> float:
    """The largest variance at which halving the step and cutting the tails change nothing."""
    for variance in (25.0, 9.0, 4.0, 1.0):
        if _converged(name, function, derivative, variance):
            return variance
    raise DomainError(
        f"the moments of {name!r} do not converge at variance 1: it varies too fast or grows too "
        "fast; an activation must be resolved by steps of 0.005 and grow no faster than a power"
    )


def _converged(name: str, function: Function, derivative: Function, variance: float) -> bool:
    for what, chosen, power in (
        ("function", function, 2),
        ("function", function, 4),
        ("derivative", derivative, 2),
    ):
        with np.errstate(over="ignore"):
            coarse, fine = (
                weights * _evaluated(what, name, chosen, np.sqrt(variance) * nodes) ** power
                for nodes, weights in (midpoints(NODES), midpoints(2 * NODES))
            )
            total = fine.sum()
        if not np.isfinite(total):
            return False
        if total == 0.0:  # a step function's slope
            continue
        if abs(coarse.sum() - total) > 1e-3 * total or max(fine[0], fine[-1]) > 1e-12 * total:
            return False
    return True


def _same(known: tuple[Function, Function], new: tuple[Function, Function]) -> bool:
    return all(
        np.array_equal(np.asarray(old(_PROBES)), np.asarray(other(_PROBES)))
        for old, other in zip(known, new, strict=True)
    )
