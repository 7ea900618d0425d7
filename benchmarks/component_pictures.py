"""What the pages of components show: points simulated here, lines that the laws draw.

    python benchmarks/component_pictures.py run [NAME ...]   # a minute; stores data/components.json
    python benchmarks/component_pictures.py draw FOLDER      # an SVG each, to look at

A simulation draws tokens and weights and computes: no law is used in it. `docs/generate` draws
stored points and the laws as they are now.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from schemes_page import INPUTS, base, predicted, typical

import moments
from moments.scheme import schemes
from moments.show.chart import shown, ticks
from moments.show.scheme_table import scheme_model
from studies.analysis.kedia import chain_constants

RUNS = Path(__file__).parent / "data" / "schemes.json"
STORE = Path(__file__).parent / "data" / "components.json"
Array = np.ndarray
RS = np.array([0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
VARIANCES = np.geomspace(0.1, 8, 7)


class Panel(NamedTuple):
    """One quantity over one other.

    Attributes:
        x, y: what is drawn.
        at: where it is simulated.
        lines: by label, what the law says at an x.
        simulate: of an x and a generator, one number per draw.
        log: whether both axes are logarithmic.
    """

    x: str
    y: str
    at: Sequence[float]
    lines: dict[str, Callable[[float], float]]
    simulate: Callable[[float, np.random.Generator], Array]
    log: bool = False


# --- tokens and what is done to them --------------------------------------------------------------


def tokens(
    random: np.random.Generator,
    correlation: float,
    variance: float = 1.0,
    shape: tuple[int, int, int] = (64, 2, 256),
) -> Array:
    """(draws, tokens, features), two tokens of a draw correlated at the same feature."""
    draws, length, width = shape
    shared = random.normal(size=(draws, 1, width))
    own = random.normal(size=(draws, length, width))
    return variance**0.5 * (correlation**0.5 * shared + (1 - correlation) ** 0.5 * own)


def centred(y: Array) -> Array:
    """About the mean over all draws."""
    return y - y.mean()


def square(y: Array) -> Array:
    """Second moment of every draw."""
    return np.asarray((y**2).mean((1, 2)))


def product(y: Array) -> Array:
    """That of two tokens, of every draw: over all pairs."""
    length = y.shape[1]
    both = (y.sum(1) ** 2 - (y**2).sum(1)).mean(-1)
    return np.asarray(both / (length * (length - 1)))


def matrix(random: np.random.Generator, draws: int, rows: int, columns: int, var: float) -> Array:
    """Weights of every draw."""
    return var**0.5 * random.normal(size=(draws, rows, columns))


Map = Callable[[Array, np.random.Generator], Array]


def of_map(name: str, function: Map, width: int = 256, **given: float) -> list[Panel]:
    """Variance over the input's and covariance over its correlation, of tokens of mean 0."""
    laws = moments.component(name)
    shape = (64, 2, width)

    def law(quantity: str, **x: float) -> float:
        found = laws.law(quantity)
        known = {"x_mean": 0.0, "x_other_mean": 0.0, "x_other_variance": 1.0, **given, **x}
        return float(found(**{k: v for k, v in known.items() if k in found.arguments}))

    return [
        Panel(
            "input variance",
            "output variance",
            VARIANCES,
            {"": lambda v: law("variance", x_variance=v)},
            lambda v, random: square(centred(function(tokens(random, 0.0, v, shape), random))),
            log=True,
        ),
        Panel(
            "input correlation",
            "output covariance",
            RS,
            {"": lambda r: law("covariance", x_variance=1.0, x_correlation=r)},
            lambda r, random: product(centred(function(tokens(random, r, 1.0, shape), random))),
        ),
    ]


def linear(bias: float = 0.0) -> Map:
    def mapped(x: Array, random: np.random.Generator) -> Array:
        weights = matrix(random, len(x), x.shape[-1], 128, 1.5 / x.shape[-1])
        return x @ weights + bias**0.5 * random.normal(size=(len(x), 1, 128))

    return mapped


def _dropped(x: Array, random: np.random.Generator, p: float = 0.2) -> Array:
    return x * (random.random(x.shape) >= p) / (1 - p)


def gated(name: str, function: Callable[[Array], Array]) -> list[Panel]:
    """A unit of two projections: gate and factor are alike."""
    laws = moments.component(name)

    def unit(r: float, v: float, random: np.random.Generator) -> Array:
        shape = (64, 2, 1024)
        return function(tokens(random, r, v, shape)) * tokens(random, r, v, shape)

    return [
        Panel(
            "variance of gate and factor",
            "output variance",
            VARIANCES,
            {"": lambda v: float(laws.law("variance")(x_variance=v, factor_variance=v))},
            lambda v, random: square(unit(0.0, v, random)),
            log=True,
        ),
        Panel(
            "correlation of gate and factor",
            "output covariance",
            RS,
            {
                "": lambda r: float(
                    laws.law("covariance")(
                        x_variance=1.0, x_other_variance=1.0, x_correlation=r, factor_covariance=r
                    )
                )
            },
            lambda r, random: product(unit(r, 1.0, random)),
        ),
    ]


# --- what stands in a layer -----------------------------------------------------------------------

LAYER = {"layers": 1, "d_model": 128, "heads": 4, "seq_len": 32, "dropout": 0.1}
SEEDS = 12


@functools.lru_cache(maxsize=64)
def _seen(correlation: float, changes: tuple[tuple[str, Any], ...], told: bool) -> Any:
    model = moments.Transformer(**{**LAYER, **dict(changes)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        if told:
            return moments.predict(model, correlation=correlation).to_frame().set_index("site")
        ends = {"variance": 1.0, "grad_variance": 1.0, "grad_correlation": 0.0}
        return [
            moments.simulate(model, correlation=correlation, seeds=1, batch=4, seed=seed, **ends)
            .to_frame()
            .set_index("site")
            for seed in range(SEEDS)
        ]


def in_layer(site: str, **changes: Any) -> list[Panel]:
    """Variance and correlation at a site of one layer, by the input's correlation."""
    key = tuple(sorted(changes.items()))

    def panel(quantity: str) -> Panel:
        return Panel(
            "correlation of what enters the layer",
            f"{quantity} of the output",
            RS,
            {"": lambda r: float(_seen(r, key, True).loc[site, quantity])},
            lambda r, _: measured(quantity, _seen(r, key, False)),
        )

    def measured(quantity: str, frames: list[Any]) -> Array:
        variance = np.array([f.loc[site, "variance"] for f in frames], dtype=float)
        if quantity == "variance":
            return variance
        # of a draw's covariance over the mean variance, whose mean has no bias
        correlation = np.array([f.loc[site, "correlation"] for f in frames], dtype=float)
        return np.asarray(correlation * variance / variance.mean())

    return [panel("variance"), panel("correlation")]


def _attention(r: float, random: np.random.Generator, scale: float = 1.0) -> tuple[Array, Array]:
    """Tokens (draws, 64, 64) and their rows of attention by one head."""
    x = tokens(random, r, 1.0, (48, 64, 64))
    query, key = (matrix(random, 48, 64, 64, scale / 64) for _ in range(2))
    logits = (x @ query) @ np.swapaxes(x @ key, 1, 2) / 8.0
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return x, weights / weights.sum(-1, keepdims=True)


def softmax() -> list[Panel]:
    """A row of 64 logits."""
    laws = moments.component("softmax")

    def weights(v: float, r: float, random: np.random.Generator) -> Array:
        shared = random.normal(size=(4000, 1))
        logits = v**0.5 * (r**0.5 * shared + (1 - r) ** 0.5 * random.normal(size=(4000, 64)))
        found = np.exp(logits)
        return found / found.sum(1, keepdims=True)

    def law(v: float, r: float, theory: Any) -> float:
        return float(laws.law("variance", theory)(seq_len=64.0, x_variance=v, x_correlation=r))

    return [
        Panel(
            "logit variance, uncorrelated",
            "variance of a weight",
            np.geomspace(0.05, 3, 7),
            {t: functools.partial(law, r=0.0, theory=t) for t in ("published", "simplified")},
            lambda v, random: ((weights(v, 0.0, random) - 1 / 64) ** 2).mean(1),
            log=True,
        ),
        Panel(
            "correlation of the logits, variance 1",
            "variance of a weight",
            RS,
            {t: functools.partial(law, 1.0, theory=t) for t in ("published", "simplified")},
            lambda r, random: ((weights(1.0, r, random) - 1 / 64) ** 2).mean(1),
        ),
    ]


def without_value() -> list[Panel]:
    """softmax(Q K^T) X of one head of 64 features."""
    laws = moments.component("attention_without_value")
    given = {"d_model": 64.0, "seq_len": 64.0, "query": 1 / 64, "key": 1 / 64, "drop_prob": 0.0}

    def law(quantity: str, r: float) -> float:
        found = laws.law(quantity, "published")
        known = {**given, "x_variance": 1.0, "x_correlation": r}
        return float(found(**{k: v for k, v in known.items() if k in found.arguments}))

    def mixed(r: float, random: np.random.Generator) -> Array:
        x, weights = _attention(r, random)
        return weights @ x

    return [
        Panel(
            "correlation of the input",
            f"{name} of the output",
            RS,
            {"published": functools.partial(law, name)},
            lambda r, random, of=of: of(mixed(r, random)),
        )
        for name, of in (("variance", square), ("covariance", product))
    ]


# --- tables and the loss --------------------------------------------------------------------------


def table(name: str, rows: Callable[[np.random.Generator, float], Array], x: str) -> list[Panel]:
    """Variance by that of the table's entries, covariance by what decides which rows are alike."""
    laws = moments.component(name)
    at = {"rows of the table": (50, 200, 1000, 5000, 20000), "tokens": (16, 32, 64, 128, 256)}[x]

    def looked_up(ids: Array, v: float, random: np.random.Generator) -> Array:
        return v**0.5 * random.normal(size=(int(ids.max()) + 1, 64))[ids]

    def covariance(n: float) -> float:
        known = laws.law("pattern_correlation")
        pattern = float(known(**dict.fromkeys(known.arguments, n)))
        return float(laws.law("covariance")(table_variance=1.0, pattern_correlation=pattern))

    def draws(n: float, v: float, of: Callable[[Array], Array], random: Any) -> Array:
        return np.array([of(looked_up(rows(random, n), v, random)[None])[0] for _ in range(400)])

    return [
        Panel(
            "variance of the table's entries",
            "output variance",
            np.geomspace(0.1, 4, 6),
            {"": lambda v: float(laws.law("variance")(table_variance=v))},
            lambda v, random: draws(at[1], v, square, random),
            log=True,
        ),
        Panel(x, "output covariance", at, {"": covariance}, lambda n, r: draws(n, 1.0, product, r)),
    ]


def _text(random: np.random.Generator, vocabulary: float) -> Array:
    """A text of 64 tokens whose ranks follow Zipf's law."""
    weights = 1 / np.arange(1, int(vocabulary) + 1)
    return random.choice(int(vocabulary), size=64, p=weights / weights.sum())


def _segments(random: np.random.Generator, length: float) -> Array:
    return (np.arange(int(length)) >= random.integers(0, int(length) + 1)).astype(int)


def cross_entropy(rows: int = 5000) -> list[Panel]:
    """Of Gaussian logits and a target chosen at random."""
    laws = moments.component("cross_entropy")

    def losses(v: float, random: np.random.Generator) -> Array:
        logits = v**0.5 * random.normal(size=(1500, rows))
        return np.log(np.exp(logits).sum(1)) - logits[:, 0]

    def spread(v: float, random: np.random.Generator) -> Array:
        found = losses(v, random)
        return (found - found.mean()) ** 2

    at = np.linspace(0.1, 3, 6)
    return [
        Panel("logit variance", f"{name} of the loss", at, {"": law}, simulate)
        for name, simulate, law in (
            (n, s, lambda v, n=n: float(laws.law(n)(vocab_size=float(rows), x_variance=v)))
            for n, s in (("mean", losses), ("variance", spread))
        )
    ]


# --- one head's Jacobians -------------------------------------------------------------------------


def _jacobians(x: Array, random: np.random.Generator, with_input: bool) -> dict[str, float]:
    """Squared norms at uniform attention, by automatic differentiation; weights of variance 1/d."""
    import torch

    d = x.shape[-1]
    q, k, v = (torch.tensor(matrix(random, 1, d, d, 1 / d)[0]) for _ in range(3))

    def head(x_: Any, q_: Any, v_: Any) -> Any:
        logits = (x_ @ q_) @ (x_ @ k).T / d**0.5
        return torch.softmax(logits, -1) @ (x_ @ v_)

    given = torch.tensor(x)
    flat = torch.zeros_like(q)  # uniform attention
    which = ("query", "value") if not with_input else ("query",)
    found = {}
    for name in which:
        place = {"query": 1, "value": 2}[name]
        jacobian = torch.func.jacrev(head, argnums=place)(given, flat, v)
        found[name] = float((jacobian**2).sum())
    return found


def uniform_gradients(d: int = 16, length: int = 12) -> list[Panel]:
    laws = moments.component("uniform_attention_gradients")

    def draws(r: float, name: str, random: np.random.Generator) -> Array:
        xs = tokens(random, r, 1.0, (40, length, d))
        return np.array([_jacobians(x, random, False)[name] for x in xs])

    return [
        Panel(
            "token correlation",
            f"squared norm, {name} matrix",
            RS[:-1],
            {
                "": lambda r, n=name: float(
                    laws.law(f"{n}_gradient")(
                        d_model=float(d), seq_len=float(length), x_variance=1.0, x_correlation=r
                    )
                )
            },
            lambda r, random, n=name: draws(r, n, random),
        )
        for name in ("query", "value")
    ]


def jacobian_at_tokens(d: int = 16) -> list[Panel]:
    law = moments.component("uniform_attention_jacobian").law("query_gradient")

    def given(length: float) -> Array:
        return tokens(np.random.default_rng(7), 0.2, 1.0, (1, int(length), d))[0]

    def predicted(length: float) -> float:
        x = given(length)
        centred = x - x.mean(0)
        return float(
            law(
                key=1 / d,
                value=1 / d,
                fan_out=float(d),
                seq_len=float(length),
                gram_square=float(((x.T @ centred) ** 2).sum()),
                token_square=float((x**2).sum()),
            )
        )

    return [
        Panel(
            "tokens",
            "squared norm of the Jacobian, queries",
            (4, 6, 9, 14, 20),
            {"": predicted},
            lambda n, random: np.array(
                [_jacobians(given(n), random, True)["query"] for _ in range(60)]
            ),
        )
    ]


# --- whole networks -------------------------------------------------------------------------------


def uniform_stack(attention: float = 0.1, ffn: float = 0.05, length: int = 16) -> list[Panel]:
    laws = moments.component("uniform_attention_stack")

    def drawn(layers: float, random: np.random.Generator) -> Array:
        x = tokens(random, 0.3, 1.0, (200, length, 64))
        for _ in range(int(layers)):
            weights = matrix(random, len(x), 64, 64, 1 / 64)
            x = x + attention**0.5 * x.mean(1, keepdims=True) @ weights
            x = x + ffn**0.5 * x @ matrix(random, len(x), 64, 64, 1 / 64)
        return x

    def law(quantity: str, n: float) -> float:
        found = laws.law(quantity)
        known = {
            "attention_branch_square": attention,
            "ffn_branch_square": ffn,
            "layers": float(n),
            "seq_len": float(length),
            "x_variance": 1.0,
            "x_correlation": 0.3,
        }
        return float(found(**{k: v for k, v in known.items() if k in found.arguments}))

    def correlation(n: float, random: np.random.Generator) -> Array:
        x = drawn(n, random)
        return product(x) / square(x).mean()

    return [
        Panel(
            "layers",
            name,
            (1, 3, 6, 10, 15),
            {"": functools.partial(law, name)},
            simulate,
        )
        for name, simulate in (
            ("variance", lambda n, random: square(drawn(n, random))),
            ("correlation", correlation),
        )
    ]


def random_energy() -> list[Panel]:
    laws = moments.component("random_energy")

    def row(theta: float, length: float) -> float:
        if theta <= float(laws.law("critical_logit_variance")(seq_len=length)):
            return 0.0
        return float(laws.law("row_square")(logit_scale=theta, x_correlation=0.0, seq_len=length))

    def drawn(theta: float, length: int, random: np.random.Generator) -> Array:
        logits = theta**0.5 * random.normal(size=(400, length))
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return (weights**2).sum(1) / weights.sum(1) ** 2

    return [
        Panel(
            f"logit variance, {length} keys",
            "Σ a² of a row",
            (2, 6, 12, 20, 30, 45, 60),
            {"infinitely many keys": functools.partial(row, length=float(length))},
            functools.partial(lambda theta, random, n: drawn(theta, n, random), n=length),
        )
        for length in (128, 16384)
    ]


@functools.lru_cache(maxsize=8)
def _streams(norm: str) -> list[Any]:
    model = moments.Transformer(12, 128, 2, 32, norm=norm)
    ends = {"variance": 1.0, "correlation": 0.5, "grad_variance": 1.0, "grad_correlation": 0.2}
    return [moments.simulate(model, seeds=1, batch=4, seed=s, **ends) for s in range(SEEDS)]


def _chain(norm: str) -> dict[str, float]:
    constants = chain_constants(moments.Transformer(12, 128, 2, 32, norm=norm))
    return {"attention_gain": constants.attention_gain, "ffn_gain": constants.ffn_gain}


def _mean(norm: str, name: str, n: float) -> float:
    return float(np.mean([getattr(s, name)[int(n)] for s in _streams(norm)]))


def pre_chain() -> list[Panel]:
    """At the correlations that were simulated, as the laws take them."""
    laws, given = moments.component("pre_ln_chain"), _chain("pre")
    each = range(1, 13)
    return [
        Panel(
            "layer",
            "what it adds to the variance",
            each,
            {
                "at the correlation measured": lambda n: float(
                    laws.law("variance_growth")(
                        **given, x_correlation=_mean("pre", "correlation", n - 1)
                    )
                )
            },
            lambda n, _: np.array([np.diff(s.variance)[int(n) - 1] for s in _streams("pre")]),
        )
    ]


def post_chain() -> list[Panel]:
    laws, given = moments.component("post_ln_chain"), _chain("post")
    gain = given["attention_gain"]
    return [
        Panel(
            "layer",
            "gradient below it over above",
            range(1, 13),
            {
                "at the correlations measured": lambda n: float(
                    laws.law("grad_growth")(
                        attention_gain=gain,
                        x_correlation=_mean("post", "correlation", n - 1),
                        grad_correlation=_mean("post", "grad_correlation", n),
                    )
                )
            },
            lambda n, _: np.array(
                [s.grad_variance[int(n) - 1] / s.grad_variance[int(n)] for s in _streams("post")]
            ),
        ),
        Panel(
            "layer",
            "1 - r behind it over before",
            range(1, 13),
            {"many layers": lambda _: float(laws.law("correlation_rate")(attention_gain=gain))},
            lambda n, _: np.array(
                [
                    (1 - s.correlation[int(n)]) / (1 - s.correlation[int(n) - 1])
                    for s in _streams("post")
                ]
            ),
        ),
    ]


def residual() -> list[Panel]:
    laws = moments.component("correlated_residual")

    def drawn(rho: float, random: np.random.Generator) -> Array:
        both = tokens(random, rho, 1.0, (64, 2, 2048))
        return ((0.9**0.5 * both[:, 0] + 0.1**0.5 * both[:, 1]) ** 2).mean(-1)

    def law(quantity: str, prefix: str, rho: float) -> float:
        names = {"skip_square": 0.9, "branch_square": 0.1}
        names |= {f"{prefix}_variance": 1.0}
        names |= {("branch" if prefix == "x" else "grad_branch") + "_variance": 1.0}
        names |= {("branch" if prefix == "x" else "grad_branch") + "_correlation": rho}
        return float(laws.law(quantity)(**names))

    return [
        Panel(
            "correlation of stream and branch",
            "variance of the sum",
            (0.0, 0.2, 0.4, 0.6, 0.8),
            {"": functools.partial(law, "variance", "x")},
            drawn,
        )
    ]


def curse() -> list[Panel]:
    """Feed-forward blocks alone: attention's values are 0, so that branches are alike."""
    laws = moments.component("curse_of_depth")

    def ended(n: float, lns: bool) -> Array:
        model = moments.Transformer(int(n), 128, 2, 16, layernorm_scaling=lns)
        assert model.weights is not None
        model = model.replace(weights=model.weights.replace(value=1e-12))
        runs = (
            moments.simulate(model, variance=1.0, correlation=0.0, seeds=1, batch=4, seed=seed)
            for seed in range(8)
        )
        return np.array([run.variance[-1] for run in runs])

    branch = chain_constants(moments.Transformer(1, 128, 2, 16)).ffn_gain
    return [
        Panel(
            "layer",
            "variance behind it",
            (1, 2, 4, 8, 16),
            {
                "": lambda n, q=quantity: float(
                    laws.law(q)(x_variance=1.0, branch_variance=branch, layer=float(n))
                )
            },
            lambda n, _, lns=lns: ended(n, lns),
        )
        for quantity, lns in (
            ("initial_variance_after", False),
            ("lns_initial_variance_after", True),
        )
    ]


def dslm() -> list[Panel]:
    """Gradients of DeepScaleLM's Pre-LN model, at the correlations measured."""
    laws = moments.component("dslm_chain")

    @functools.cache
    def runs(layers: int) -> list[Any]:
        plain = moments.Transformer(layers, 128, 2, 128, norm="pre")
        model = plain.with_scheme("dslm", input_correlation=0.5)
        ends = {"variance": 1.0, "correlation": 0.5, "grad_variance": 1.0, "grad_correlation": 0.2}
        return [moments.simulate(model, seeds=1, batch=2, seed=s, **ends) for s in range(SEEDS)]

    def law(n: float) -> float:
        branch = laws.law("branch_square")(
            branch_constant=2.0, branch_exponent=1.0, layers=float(n)
        )
        entering = np.mean([s.correlation[:-1] for s in runs(int(n))], 0)
        frames = [s.to_frame() for s in runs(int(n))]
        meets = np.mean(
            [f[f.site == "attention.sum"].grad_correlation.to_numpy() for f in frames], 0
        )
        factors = laws.law("grad_growth")(
            skip_square=1 - branch, branch_square=branch, gradient_ratio=meets / entering
        )
        return float(np.prod(factors))

    return [
        Panel(
            "layers",
            "gradient at the input over the output",
            (4, 8, 16),
            {"at the correlations measured": law},
            lambda n, _: np.array([s.grad_variance[0] / s.grad_variance[-1] for s in runs(int(n))]),
        )
    ]


# --- all of them ----------------------------------------------------------------------------------


def _activations() -> dict[str, Callable[[Array], Array]]:
    """Written out again: no law checks a law."""
    from scipy.special import erf, expit

    return {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "identity": lambda x: x,
        "silu": lambda x: x * expit(x),
        "tanh": np.tanh,
        "relu_squared": lambda x: np.maximum(x, 0) ** 2,
        "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
        "quick_gelu": lambda x: x * expit(1.702 * x),
        "sigmoid": expit,
        "softplus": lambda x: np.logaddexp(x, 0),
        "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
        "erf": erf,
    }


def _panels() -> dict[str, Callable[[], list[Panel]]]:
    """Of every component, by its name."""
    found: dict[str, Callable[[], list[Panel]]] = {}
    shapes = _activations()
    for name, function in shapes.items():
        found[name] = functools.partial(of_map, name, lambda x, _, f=function: f(x), 1024)
    for name, gate in (
        ("swiglu", "silu"),
        ("geglu", "gelu"),
        ("geglu_tanh", "gelu_tanh"),
        ("reglu", "relu"),
        ("glu", "sigmoid"),
        ("bilinear", "identity"),
    ):
        found[name] = functools.partial(gated, name, shapes[gate])
    half = 0.5**0.5
    weights = {"fan_in": 256.0, "weight_variance": 1.5 / 256}
    found |= {
        "linear": lambda: of_map("linear", linear(), **weights),
        "biased_linear": lambda: of_map("biased_linear", linear(0.3), **weights, bias_variance=0.3),
        "dropout": lambda: of_map("dropout", _dropped, drop_prob=0.2),
        "scale": lambda: of_map("scale", lambda x, _: half * x, weight_variance=0.5),
        "layernorm": lambda: in_layer("attention.norm")[1:],
        "rmsnorm": lambda: in_layer("attention.norm", normalization="rmsnorm")[1:],
        "dyt": lambda: in_layer("attention.norm", normalization="dyt"),
        "softmax": softmax,
        "attention_without_value": without_value,
        "attention": lambda: in_layer("attention.heads"),
        "attention_block": lambda: in_layer("attention.dropout"),
        "ffn_block": lambda: in_layer("ffn.dropout"),
        "cross_entropy": cross_entropy,
        "token_embedding": lambda: table("token_embedding", _text, "rows of the table"),
        "segment_embedding": lambda: table("segment_embedding", _segments, "tokens"),
        "position_embedding": lambda: table(
            "position_embedding", lambda _, n: np.arange(int(n)), "tokens"
        ),
        "uniform_attention_gradients": uniform_gradients,
        "uniform_attention_jacobian": jacobian_at_tokens,
        "uniform_attention_stack": uniform_stack,
        "random_energy": random_energy,
        "pre_ln_chain": pre_chain,
        "post_ln_chain": post_chain,
        "dslm_chain": dslm,
        "correlated_residual": residual,
        "curse_of_depth": curse,
    }
    return found


PANELS = _panels()

# --- schemes --------------------------------------------------------------------------------------

DEPTHS = (6, 12, 24, 48, 96)


def scheme_panels(name: str) -> list[dict[str, Any]]:
    """Growth of signal and gradient over the depth, beside `data/schemes.json`'s simulations."""
    scheme = next(one for one in schemes() if one.name == name)
    runs = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    known = {n: runs[f"{name}/{n}"] for n in DEPTHS if f"{name}/{n}" in runs}
    found: dict[int, moments.Prediction] = {}
    for layers in DEPTHS:
        with contextlib.suppress(moments.DomainError):
            found[layers] = predicted(scheme_model(base(layers), scheme, INPUTS))
    panels = []
    for quantity, title, line in (
        ("variance_growth", "variance, output / input", lambda p: p.variance[-1] / p.variance[0]),
        ("typical_ratio", "gradient variance, input / output", typical),
    ):
        points = {n: run[quantity] for n, run in known.items() if run.get(quantity)}
        ends = [mean for mean, _ in points.values()]
        panels.append(
            {
                "x": "layers",
                "y": title,
                "log": bool(ends) and max(ends) > 5 * min(ends) > 0,
                "at": [float(n) for n in points],
                "mean": ends,
                "stderr": [stderr for _, stderr in points.values()],
                "grid": [float(n) for n in found],
                "lines": {"typical draw": [float(line(p)) for p in found.values()]},
            }
        )
    return panels


# --- stored and drawn -----------------------------------------------------------------------------


def grid(panel: Panel) -> list[float]:
    """Where lines are drawn: between the points, unless those are counts."""
    if all(isinstance(x, int) for x in panel.at):
        return [float(x) for x in panel.at]
    ends = min(panel.at), max(panel.at)
    return [float(x) for x in (np.geomspace if panel.log else np.linspace)(*ends, 25)]


def lines(panel: Panel) -> dict[str, list[float]]:
    """What the laws say on `grid`."""
    return {label: [law(x) for x in grid(panel)] for label, law in panel.lines.items()}


def _run(name: str) -> list[dict[str, Any]]:
    random, found = np.random.default_rng(0), []
    for panel in PANELS[name]():
        draws = [panel.simulate(x, random) for x in panel.at]
        found.append(
            {
                "x": panel.x,
                "y": panel.y,
                "log": panel.log,
                "at": [float(x) for x in panel.at],
                "mean": [float(np.mean(d)) for d in draws],
                "stderr": [float(np.std(d, ddof=1) / len(d) ** 0.5) for d in draws],
                "grid": grid(panel),
                "lines": lines(panel),
            }
        )
    return found


def stored() -> dict[str, Any]:
    """Panels of every component."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def panels(axes: Sequence[Any], of: list[dict[str, Any]]) -> None:
    """Draw what is stored of one component."""
    for ax, panel in zip(axes, of, strict=True):
        kind = "predicted" if "typical draw" in panel["lines"] else "law"
        for (label, line), style in zip(panel["lines"].items(), ("-", "--"), strict=False):
            ax.plot(
                panel["grid"], line, style, color="C0", label=", ".join(filter(None, (kind, label)))
            )
        errors = 2 * np.array(panel["stderr"])
        ax.errorbar(
            panel["at"], panel["mean"], errors, fmt="o", color="C1", ms=4, label="simulated"
        )
        values = np.concatenate([panel["mean"], *panel["lines"].values()])
        if panel["log"]:
            ax.set_yscale("log")
            _plain(ax, "y", ticks(0.99 * values.min(), 1.01 * values.max(), True))
        elif values.min() >= 0 and values.max() > 0:
            ax.set_ylim(0, 1.12 * values.max())
        if panel["x"] == "layer":
            _plain(ax, "x", [x for x in panel["grid"] if len(panel["grid"]) < 8 or x % 2 == 0])
        elif panel["x"] in COUNTS or panel["log"]:
            ax.set_xscale("log")
            ends = min(panel["grid"]), max(panel["grid"])
            _plain(ax, "x", panel["grid"] if panel["x"] in COUNTS else ticks(*ends, True))
        ax.set(xlabel=panel["x"], ylabel=panel["y"])
    axes[-1].legend(frameon=False)


COUNTS = ("tokens", "rows of the table", "layers")
"""What is counted by factors."""


def _plain(ax: Any, which: str, places: Sequence[float]) -> None:
    getattr(ax, f"set_{which}ticks")(places, [shown(place) for place in places])
    getattr(ax, f"set_{which}ticks")([], minor=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    if given.what == "run":
        for name in given.names or [*PANELS, *(f"scheme/{one.name}" for one in schemes())]:
            kind, _, scheme = name.rpartition("/")
            new = scheme_panels(scheme) if kind else _run(name)
            found = {**stored(), name: _rounded(new)}
            STORE.write_text(json.dumps(found, indent=None, sort_keys=True) + "\n")
            off = [
                abs(np.interp(p["at"], p["grid"], next(iter(p["lines"].values()))) - p["mean"])
                / np.maximum(p["stderr"], 1e-300)
                for p in found[name]
            ]
            print(name, [f"{o.max():.1f}" for o in off], flush=True)
        return
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "docs/generate"))
    from figure import svg

    for name, of in stored().items():
        picture = svg(functools.partial(panels, of=of), name, len(of))
        (Path(given.names[0]) / f"{name.replace('/', '-')}.svg").write_bytes(picture)


if __name__ == "__main__":
    main()
