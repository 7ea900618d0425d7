"""How much two tokens' overlap varies, and what that does to query and key gradients. About 6 s.

The Monte Carlo draws networks in numpy and shares no code with the package.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import moments
from moments.engine.composition import Chain, Component, Layer, Parallel, Residual, forward
from moments.engine.fluctuation import OverlapWalk, UnsharedOverlap
from moments.engine.state import Fluctuation, Gradient, Kernel
from moments.formulas.activation import activation_laws
from moments.formulas.algebra import NUMPY
from moments.formulas.linear import DROPOUT, LINEAR
from moments.formulas.normalization import LAYERNORM, RMSNORM
from moments.layers.attention.response import averaging, uniform_rows, unshared_spread
from moments.layers.attention.self_attention import SelfAttention
from moments.layers.attention.softmax import participation_variance
from moments.layers.elementary import Activation, Dropout, Linear
from moments.layers.gated import GatedLinear
from moments.layers.normalization import FiniteNormalization
from moments.noise.overlap import stack_overlaps
from moments.prediction.stack import exchangeable_kernel, gaussian

TOKENS, WIDTH, HIDDEN = 48, 64, 96
Draw = np.random.Generator
Map = Callable[[np.ndarray, Draw], np.ndarray]


# --- the variance of overlaps -----------------------------------------------------------------


def measured(network: Map, draws: int = 150) -> float:
    """nu from the overlaps of what tokens have of their own, their mean P taken away.

    With Cov(o_ab, o_cd) = nu u^2 (1_ac 1_bd + 1_ad 1_bc),
    E sum_(a != b) (PoP)_ab^2 = u^2 (n - 1) (1/n + nu (n - 2 + 2/n)).
    """
    random = np.random.default_rng(5)
    first, second = 0.0, 0.0
    for _ in range(draws):
        x = network(random.normal(size=(TOKENS, WIDTH)), random)
        x = x - x.mean(0)
        overlap = x @ x.T / x.shape[1]
        first += np.trace(overlap) / draws
        second += ((overlap**2).sum() - (np.diag(overlap) ** 2).sum()) / draws
    own = first / (TOKENS - 1)
    mean = second / (own**2 * (TOKENS - 1)) - 1 / TOKENS
    return float(mean / (TOKENS - 2 + 2 / TOKENS))


def predicted(*parts: Component) -> float:
    signal = gaussian(exchangeable_kernel(1.0, 0.0, TOKENS, False), TOKENS, WIDTH, True)
    _, record = forward(Chain((Layer(Chain(parts), 1),)), signal)
    return stack_overlaps(record.backward(Gradient(Kernel(1.0, 0.0), TOKENS))).last


def linear(fan_in: int, fan_out: int, gain: float) -> Linear:
    values = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": gain / fan_in}
    return Linear(LINEAR, "refined", "linear", values, fan_out, "weight")


def matrix(x: np.ndarray, width: int, gain: float, random: Draw) -> np.ndarray:
    return x @ random.normal(scale=math.sqrt(gain / x.shape[1]), size=(x.shape[1], width))


def normalised(x: np.ndarray) -> np.ndarray:
    x = x - x.mean(1, keepdims=True)
    return x / x.std(1, keepdims=True)


NORM = FiniteNormalization(LAYERNORM, "norm")
RELU = Activation(activation_laws("relu"), "refined", "relu")
GATED = GatedLinear("gated", activation_laws("silu"), WIDTH, HIDDEN, 1 / WIDTH, 1 / WIDTH)


def relu_block(gain: float) -> Residual:
    inner = linear(WIDTH, HIDDEN, 2.0), RELU, linear(HIDDEN, WIDTH, gain)
    return Residual(Chain((NORM, *inner)))


def relu_sum(x: np.ndarray, random: Draw, gain: float) -> np.ndarray:
    hidden = np.maximum(matrix(normalised(x), HIDDEN, 2.0, random), 0)
    return x + matrix(hidden, WIDTH, gain, random)


def gated_sum(x: np.ndarray, random: Draw) -> np.ndarray:
    gate, factor = (matrix(normalised(x), HIDDEN, 1.0, random) for _ in range(2))
    return x + matrix(gate / (1 + np.exp(-gate)) * factor, WIDTH, 4.0, random)


def parallel_sum(x: np.ndarray, random: Draw) -> np.ndarray:
    one = matrix(np.maximum(matrix(x, HIDDEN, 2.0, random), 0), WIDTH, 1.0, random)
    return x + one + matrix(matrix(x, WIDTH, 1.0, random), WIDTH, 1.0, random)


def attended_sum(x: np.ndarray, random: Draw) -> np.ndarray:
    """Logits of variance 1; values large enough that rows' differences matter."""
    heads = []
    for _ in range(4):
        query, key = (matrix(x, WIDTH // 4, 1.0, random) for _ in "qk")
        logits = query @ key.T / math.sqrt(WIDTH // 4)
        a = np.exp(logits - logits.max(1, keepdims=True))
        heads.append(a / a.sum(1, keepdims=True) @ matrix(x, WIDTH // 4, 6.0, random))
    return x + matrix(np.hstack(heads), WIDTH, 1.0, random)


def dropped(x: np.ndarray, random: Draw) -> np.ndarray:
    x = matrix(x, WIDTH, 1.0, random)
    return x * (random.random(x.shape) < 0.5) / 0.5


ATTENTION = SelfAttention("heads", WIDTH, 4, WIDTH // 4, 1 / WIDTH, 1 / WIDTH, 6 / WIDTH, 0.0)
TWICE = Chain((linear(WIDTH, WIDTH, 1.0), linear(WIDTH, WIDTH, 1.0)))
PARALLEL = Parallel((Chain((linear(WIDTH, HIDDEN, 2.0), RELU, linear(HIDDEN, WIDTH, 1.0))), TWICE))
CASES: dict[str, tuple[tuple[Component, ...], Map]] = {
    "tokens": ((), lambda x, random: x),
    "one matrix": ((linear(WIDTH, WIDTH, 1.0),), lambda x, g: matrix(x, WIDTH, 1.0, g)),
    "Pre-LN block": ((relu_block(0.5),), lambda x, g: relu_sum(x, g, 0.5)),
    "two blocks": (
        (relu_block(2.0), relu_block(2.0)),
        lambda x, g: relu_sum(relu_sum(x, g, 2.0), g, 2.0),
    ),
    "gated block": ((Residual(Chain((NORM, GATED, linear(HIDDEN, WIDTH, 4.0)))),), gated_sum),
    "attention": ((Residual(Chain((ATTENTION, linear(WIDTH, WIDTH, 1.0)))),), attended_sum),
    "parallel": ((Residual(PARALLEL),), parallel_sum),
    "dropout": (
        (linear(WIDTH, WIDTH, 1.0), Dropout(DROPOUT, "refined", "drop", {"drop_prob": 0.5})),
        dropped,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_overlaps_vary_as_predicted(name: str) -> None:
    parts, network = CASES[name]
    assert predicted(*parts) == pytest.approx(measured(network), rel=0.05)


def test_averages_of_a_causal_mask_share_overlaps_with_their_tokens() -> None:
    """E tr P d P D of the fluctuations d of o and D of W o W^T is nu ((tr PM)^2 + tr PMPM), with
    M = C W^T and (tr PM)^2 = (n - 1)^2 e u u_W."""
    random, draws = np.random.default_rng(2), 400
    weights = np.tri(TOKENS) / np.arange(1, TOKENS + 1)[:, None]
    centre = np.eye(TOKENS) - 1 / TOKENS
    mean, pairs = centre, centre @ weights @ weights.T @ centre
    shared = []
    for _ in range(draws):
        x = random.normal(size=(TOKENS, WIDTH))
        one, two = (y - y.mean(0) for y in (x, weights @ x))
        moved = (one @ one.T / WIDTH - mean) * (two @ two.T / WIDTH - pairs)
        shared.append(moved.sum())
    leaf = SelfAttention("heads", WIDTH, 1, WIDTH, 0.0, 0.0, 1 / WIDTH, 0.0, causal=True)
    tokens = gaussian(exchangeable_kernel(1.0, 0.0, TOKENS, True), TOKENS, WIDTH, True)
    own = np.trace(mean) / (TOKENS - 1), np.trace(pairs) / (TOKENS - 1)
    met = (
        averaging(uniform_rows(leaf, tokens), tokens).elasticity
        * own[0]
        * own[1]
        * (TOKENS - 1) ** 2
    )
    expected = (met + np.trace(centre @ weights.T @ centre @ weights.T)) / WIDTH
    error = np.std(shared) / math.sqrt(draws)
    assert expected == pytest.approx(np.mean(shared), abs=2.5 * error)
    assert error < 0.1 * expected
    full = SelfAttention("heads", WIDTH, 1, WIDTH, 0.0, 0.0, 1 / WIDTH, 0.0)
    assert averaging(uniform_rows(full, tokens), tokens).elasticity < 1e-9


def test_what_tokens_have_of_their_own_varies_with_what_they_share() -> None:
    """Behind normalisations; query and key gradients hold its square."""
    draws, own = 250, []
    random = np.random.default_rng(4)
    for _ in range(draws):
        x = normalised(random.normal(size=(TOKENS, WIDTH)))
        for _ in range(4):
            x = normalised(relu_sum(x, random, 2.0))
        overlap = x @ x.T / WIDTH
        own.append(1 - (overlap.sum() - TOKENS) / (TOKENS * (TOKENS - 1)))
    squares = (np.array(own) / np.mean(own) - 1) ** 2
    signal = gaussian(exchangeable_kernel(1.0, 0.0, TOKENS, False), TOKENS, WIDTH, True)
    parts = [part for _ in range(4) for part in (relu_block(2.0), NORM)]
    output, _ = forward(Chain((Layer(Chain((NORM, *parts)), 1),)), signal)
    error = squares.std() / math.sqrt(draws)
    assert squares.mean() > 0.02
    assert unshared_spread(output) == pytest.approx(squares.mean(), abs=2.5 * error)


POST_LN = {"norm": "post", "normalization": "rmsnorm", "activation": "gelu", "d_ff": 1024}


@pytest.mark.parametrize(
    ("causal", "spreads", "queries"),
    [
        (
            False,
            {4: 0.027, 8: 0.094, 12: 0.165, 20: 0.324, 24: 0.387, 32: 0.532},
            {12: (1.13, 0.18), 24: (-13.91, 0.16), 32: (-23.90, 0.40)},
        ),
        (True, {}, {12: (2.04, 0.14), 24: (-0.72, 0.12), 32: (-1.95, 0.14)}),
    ],
)
def test_deep_post_layers(
    causal: bool, spreads: dict[int, float], queries: dict[int, tuple[float, float]]
) -> None:
    """Against 255 draws in double precision: Var log of what tokens have of their own, entering a
    layer, whose relative error is .09; and the logarithm of the queries' squared gradient norm."""
    width = 256
    names = ("query", "key", "value", "output", "ffn_in", "ffn_out")
    weights = moments.Weights(**dict.fromkeys(names, 1 / width))
    model = moments.Transformer(32, width, 4, 128, causal=causal, weights=weights, **POST_LN)
    prediction = moments.predict(model, correlation=0.25)
    for layer, simulated in spreads.items():
        entering = next(prediction.trace.layers[layer - 1].leaves()).input
        assert unshared_spread(entering) == pytest.approx(simulated, rel=2 * 0.09)
    rows = prediction.weight_gradients()
    found = rows[rows.weight == "query"].squared_norm.to_numpy()
    for layer, (simulated, error) in queries.items():
        assert math.log(found[layer - 1]) == pytest.approx(simulated, abs=2 * error)


# --- entrywise units ----------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_around_a_unit(gated: bool) -> None:
    """Tokens of fixed norm and r = 0, gradients correlated by 1/2: L r_g/d is not small."""
    width, hidden, draws = 32, 64, 600
    keep = 0.5 * np.eye(TOKENS) + 0.5
    first = ("gate", "ffn_in") if gated else ("ffn_in",)
    random, root = np.random.default_rng(3), np.linalg.cholesky(keep)
    names = (*first, "ffn_out", "norm.gain")
    found = np.zeros((draws, len(names)))
    for draw in range(draws):
        x = normalised(random.normal(size=(TOKENS, width)))
        w = [random.normal(scale=width**-0.5, size=(width, hidden)) for _ in first]
        out = random.normal(scale=hidden**-0.5, size=(hidden, width))
        given = root @ random.normal(size=(TOKENS, width))
        y, sent = [x @ one for one in w], given @ out.T
        if gated:
            sigmoid = 1 / (1 + np.exp(-y[0]))
            features = y[0] * sigmoid * y[1]
            slope = sigmoid * (1 + y[0] * (1 - sigmoid))
            back = [sent * slope * y[1], sent * y[0] * sigmoid]
        else:
            features, back = np.maximum(y[0], 0), [sent * (y[0] > 0)]
        at_tokens = sum(b @ one.T for b, one in zip(back, w, strict=True))
        norms = [((x.T @ b) ** 2).sum() for b in back]
        norms += [((features.T @ given) ** 2).sum(), ((x * at_tokens).sum(0) ** 2).sum()]
        found[draw] = norms
    mean, error = found.mean(0), found.std(0) / math.sqrt(draws)

    norm = FiniteNormalization(RMSNORM, "norm", centres=False, affine=True)
    if gated:
        inner: tuple[Component, ...] = (
            GatedLinear("gated", activation_laws("silu"), width, hidden, 1 / width, 1 / width),
        )
    else:
        values = {"fan_in": width, "fan_out": hidden, "weight_variance": 1 / width}
        inner = (Linear(LINEAR, "refined", "in", values, hidden, "ffn_in"), RELU)
    values = {"fan_in": hidden, "fan_out": width, "weight_variance": 1 / hidden}
    last = Linear(LINEAR, "refined", "out", values, width, "ffn_out")
    stack = Chain((Layer(Chain((norm, *inner, last)), 1),))
    signal = gaussian(exchangeable_kernel(1.0, 0.0, TOKENS, False), TOKENS, width, True)
    done = forward(stack, signal)[1].backward(Gradient(Kernel(1.0, 0.5), TOKENS))
    growth = stack_overlaps(done).growth
    plain = {name: value for one in done.leaves() for name, value in one.weights().items()}
    expected = np.array([plain[name] * growth[1, name] for name in names])
    assert np.abs(expected / mean - 1) == pytest.approx(0, abs=0.05 + 2 * (error / mean).max())
    assert signal.fluctuation is not None
    signal = signal.replace(fluctuation=Fluctuation(signal.fluctuation.norms))  # no overlaps
    done = forward(stack, signal)[1].backward(Gradient(Kernel(1.0, 0.5), TOKENS))
    plain = {name: value for one in done.leaves() for name, value in one.weights().items()}
    without = np.array([plain[name] for name in names])
    assert np.all(without < expected)
    if gated:
        assert np.all(without / mean < 0.9)


@pytest.mark.parametrize("shared", [0.5, 0.95, 0.9999])
@pytest.mark.parametrize("name", ["relu", "gelu", "silu gate"])
def test_units_that_all_tokens_share_count_for_less(name: str, shared: float) -> None:
    """nu behind W and f of nearly alike tokens, (h_a - h_b).(h_c - h_d) over what each differs by:
    slopes that are large are so for every token. What is left out is of second order in 1/width."""
    width, hidden, draws = (24, 48, 4000) if name != "silu gate" else (48, 48, 2000)
    random, laws = np.random.default_rng(5), activation_laws(name.removesuffix(" gate"))
    assert laws.entrywise is not None
    x = shared**0.5 * random.normal(size=(draws, 1, width))
    x = x + (1 - shared) ** 0.5 * random.normal(size=(draws, 4, width))
    h, other = (x @ random.normal(scale=width**-0.5, size=(draws, width, hidden)) for _ in "ab")
    h = laws.entrywise[0](NUMPY, h) * (other if "gate" in name else 1.0)
    one, two = h[:, 0] - h[:, 1], h[:, 2] - h[:, 3]
    square, size = (one * two).sum(1) ** 2, 0.5 * ((one**2).sum(1) + (two**2).sum(1))
    nu, error = square.mean() / size.mean() ** 2, square.std() / size.mean() ** 2 / draws**0.5

    signal = gaussian(exchangeable_kernel(1.0, shared, 4, False), 4, width, True)
    at, walk = UnsharedOverlap(1 / width), OverlapWalk()
    if "gate" in name:
        leaf: Component = GatedLinear("gated", laws, width, hidden, 1 / width, 1 / width)
        done = forward(leaf, signal)[1]
    else:
        values = {"fan_in": width, "fan_out": hidden, "weight_variance": 1 / width}
        matrix = Linear(LINEAR, "refined", "in", values, hidden, "ffn_in")
        done = forward(Chain((matrix, Activation(laws, "refined", "unit"))), signal)[1]
    assert walk.through(done, at).variance == pytest.approx(nu, abs=3 * error + 1.5 * nu / width)


# --- query and key gradients ------------------------------------------------------------------

HEADS, HEAD_WIDTH = 2, 16
SMALL = 32


def attention_gradients(
    causal: bool, scale: float, keep: np.ndarray, draws: int
) -> dict[str, tuple[float, float]]:
    """Mean squared norms of dLoss/dW and of a query bias's gradient, with standard errors.

    Tokens x = mixture of Gaussian rows, gradients at the heads Gaussian with kernel `keep`.
    """
    random = np.random.default_rng(11)
    found: dict[str, list[float]] = {"query": [], "key": [], "query.bias": []}
    root = np.linalg.cholesky(keep)
    for _ in range(draws):
        x = root @ random.normal(size=(TOKENS, SMALL))
        total = dict.fromkeys(found, 0.0)
        for _ in range(HEADS):
            wq, wk = random.normal(scale=math.sqrt(scale / SMALL), size=(2, SMALL, HEAD_WIDTH))
            v = matrix(x, HEAD_WIDTH, 1.0, random)
            g = root @ random.normal(size=(TOKENS, HEAD_WIDTH))
            logits = (x @ wq) @ (x @ wk).T / math.sqrt(HEAD_WIDTH)
            if causal:
                logits = np.where(np.tri(TOKENS, dtype=bool), logits, -np.inf)
            a = np.exp(logits - logits.max(1, keepdims=True))
            a /= a.sum(1, keepdims=True)
            sent = g @ v.T
            ds = a * (sent - (a * sent).sum(1, keepdims=True)) / math.sqrt(HEAD_WIDTH)
            dq, dk = ds @ x @ wk, ds.T @ x @ wq
            total["query"] += ((x.T @ dq) ** 2).sum()
            total["key"] += ((x.T @ dk) ** 2).sum()
            total["query.bias"] += (dq.sum(0) ** 2).sum()
        for key, value in total.items():
            found[key].append(float(value))
    return {
        key: (float(np.mean(each)), float(np.std(each) / math.sqrt(draws)))
        for key, each in found.items()
    }


@pytest.mark.parametrize("resolved", [False, True])
@pytest.mark.parametrize("logits", [0.1, 0.7])
def test_query_and_key_gradients_at_small_width(resolved: bool, logits: float) -> None:
    scale = math.sqrt(logits)
    kernel = 0.8 * np.eye(TOKENS) + 0.2
    simulated = attention_gradients(resolved, scale, kernel, 500)
    leaf = SelfAttention(
        "heads",
        SMALL,
        HEADS,
        HEAD_WIDTH,
        scale / SMALL,
        scale / SMALL,
        1 / SMALL,
        0.0,
        causal=resolved,
        has_bias=True,
    )
    tokens = Kernel.of_matrix(kernel) if resolved else exchangeable_kernel(1.0, 0.2, TOKENS, False)
    _, pullback = leaf.forward(gaussian(tokens, TOKENS, SMALL, True))
    pulled = pullback(Gradient(tokens, TOKENS))
    weights = pulled.weights()
    for name, (mean, error) in simulated.items():
        assert weights[name] == pytest.approx(mean, abs=0.04 * mean + 2 * error), name
    assert weights["key.bias"] == 0.0


@pytest.mark.parametrize("norm", ["pre", "hybrid"])
def test_query_and_key_gradients_deep_in_a_network(norm: str) -> None:
    """Overlaps vary by more than 1/d above two layers; without that, norms fall short."""
    model = moments.Transformer(3, 48, 2, 64, norm=norm, temperature=4.0)
    inputs = {"correlation": 0.0, "grad_variance": 1.0, "grad_correlation": 0.0}
    seen = moments.simulate(model, seeds=16, batch=1, **inputs).weight_gradients()
    prediction = moments.predict(model, **inputs)
    rows = prediction.weight_gradients().merge(seen, on=["layer", "weight"], suffixes=("", "_seen"))
    last = rows[(rows.layer == 3) & rows.weight.isin(["query", "key"])]
    noise = last.squared_norm_stderr / last.squared_norm_seen
    assert len(last) == 2
    assert ((last.squared_norm / last.squared_norm_seen - 1).abs() < 0.08 + 2 * noise).all()
    plain = {(layer, name): norm for layer, name, norm in prediction.trace.weights()}
    without = np.array([plain[3, name] for name in last.weight])
    assert (without / last.squared_norm_seen - 1 < -0.08 - noise).all()


def test_squares_of_drawn_weights_vary_as_tabulated() -> None:
    random = np.random.default_rng(6)
    for theta, keys in ((0.1, 3), (0.7, 2), (0.7, 24), (4.0, 7)):
        weights = np.exp(math.sqrt(theta) * random.normal(size=(60_000, keys)))
        square = (weights**2).sum(1) / weights.sum(1) ** 2
        found = participation_variance(np.array(square.mean()), np.array(float(keys)))
        assert float(found) == pytest.approx(square.var(), rel=0.05)
    assert participation_variance(np.array([1.0, 0.25, 1e-6]), np.array([1.0, 4.0, 1e6]))[0] == 0.0


def test_weights_drawn_in_a_single_head() -> None:
    """Tokens that are mostly the output of one causal head: with weights at their means, gradients
    of the next queries and keys fall short by a fifth."""
    model = moments.Transformer(2, 96, 1, 24, causal=True, temperature=2.0)
    model = model.replace(branch_scale=[[1.0, 0.1], [1.0, 1.0]])
    inputs = {"variance": 0.01, "correlation": 0.0, "grad_variance": 1.0, "grad_correlation": 0.0}
    seen = moments.simulate(model, seeds=80, batch=4, **inputs)
    found = moments.predict(model, tokens=True, **inputs)
    rows = found.weight_gradients().merge(
        seen.weight_gradients(), on=["layer", "weight"], suffixes=("", "_seen")
    )
    last = rows[(rows.layer == 2) & rows.weight.isin(["query", "key"])]
    noise = last.squared_norm_stderr / last.squared_norm_seen
    assert ((last.squared_norm / last.squared_norm_seen - 1).abs() < 0.04 + 2 * noise).all()


@pytest.mark.parametrize(("layers", "noted"), [(2, False), (20, True)])
def test_sizes_that_vary_are_noted(layers: int, noted: bool) -> None:
    model = moments.Transformer(
        layers, 64, 4, 17, norm="none", skip_scale=0.9, branch_scale=0.43, activation="gelu"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = moments.predict(model, correlation=0.3).warnings
    assert any("low by up to a quarter" in note for note in found) is noted
    assert bool(caught) is noted


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_behind_a_pooling_head(pool: str, sequences: int) -> None:
    """One token per sequence is left: nothing to average over pairs, be some of it padding."""
    head = moments.Head(
        loss="classification", classes=3, pool=pool, tied=False, weight_variance=0.01
    )
    table = moments.Embedding(vocab_size=9, token_variance=1.0)
    model = moments.Transformer(2, 32, 4, 5, norm="b2t", embedding=table, head=head)
    text = np.array([[1, 2, 3, 1, 4], [5, 2, 6, 7, 1]])[:sequences]
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])[-sequences:]
    prediction = moments.predict(model, token_ids=text, attention_mask=mask)
    last = prediction.to_frame().set_index("site").loc["logits"]
    assert last.correlation == last.grad_correlation == 0.0
    norms = prediction.weight_gradients().squared_norm
    assert np.isfinite(norms).all()
    assert (norms[-2:] > 0).all()
