"""The engine: hand-computed networks, the stream's conventions, batches, kernels by token."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from quadrature import Estimate, exchangeable, token_moments

import moments
from moments.engine.composition import Component, Residual, added, forward
from moments.engine.state import Gradient, Kernel, Signal
from moments.errors import DomainError
from moments.formulas.activation import GELU, IDENTITY, RELU
from moments.formulas.linear import DROPOUT, LINEAR, SCALE
from moments.layers.elementary import Activation, Dropout, Linear, Scale
from moments.prediction.stack import gaussian

STREAM = ("variance", "correlation", "grad_variance", "grad_correlation")


def linear(fan_in: int, fan_out: int, weight_variance: Any) -> Linear:
    parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": weight_variance}
    return Linear(LINEAR, "published", "linear", parameters, fan_out)


def dropout(drop_prob: float) -> Dropout:
    return Dropout(DROPOUT, "published", "dropout", {"drop_prob": drop_prob})


def small(**changes: Any) -> moments.Transformer:
    """A model whose attention stays near uniform at any variance an unnormalised stream reaches."""
    gentle = moments.Weights.xavier(32, 4).replace(query=1e-4, key=1e-4)
    fields: dict[str, Any] = {"layers": 3, "d_model": 32, "heads": 4, "seq_len": 16}
    return moments.Transformer(**{"weights": gentle, **fields, **changes})


# --- one layer by hand ----------------------------------------------------------------------------
# Zero query and key variances make attention uniform, and the identity activation makes the
# feed-forward block linear: every number below is a line of arithmetic.

D, HEADS, LENGTH = 32, 4, 16
LAYER = moments.Weights(0.0, 0.0, value=0.03, output=0.02, ffn_in=0.05, ffn_out=0.01)
ATTENTION_GAIN, FFN_GAIN = D * 0.03 * D * 0.02, D * 0.05 * (4 * D) * 0.01


def uniform_attention(v: float, r: float) -> tuple[float, float]:
    """Every token of the average is the same: E x-bar_i x-bar_j = v (r + (1 - r)/L)."""
    return (v * (r + (1 - r) / LENGTH),) * 2


def test_one_pre_ln_layer_forward() -> None:
    model = small(layers=1, weights=LAYER, activation="identity")
    p = moments.predict(model, variance=2.0, correlation=0.5, theory="published")
    normal_r = (1 - 1 / D) * 0.5
    after = 2.0 + ATTENTION_GAIN * uniform_attention(1.0, normal_r)[0]
    pairs = 1.0 + ATTENTION_GAIN * uniform_attention(1.0, normal_r)[1]
    assert p.variance[1] == pytest.approx(after + FFN_GAIN, rel=1e-13)
    pairs += FFN_GAIN * (1 - 1 / D) * pairs / after
    assert p.correlation[1] == pytest.approx(pairs / (after + FFN_GAIN), rel=1e-13)


def test_one_pre_ln_layer_backward() -> None:
    model = small(layers=1, weights=LAYER, activation="identity")
    p = moments.predict(
        model,
        variance=2.0,
        correlation=0.5,
        grad_variance=0.7,
        grad_correlation=0.2,
        theory="published",
    )
    middle = 2.0 + ATTENTION_GAIN * uniform_attention(1.0, (1 - 1 / D) * 0.5)[0]
    g, gc = 0.7, 0.14
    g, gc = g * (1 + FFN_GAIN / middle), gc * (1 + FFN_GAIN / middle)
    shared = ATTENTION_GAIN * (g + (LENGTH - 1) * gc) / LENGTH / 2.0
    assert p.grad_variance == pytest.approx([g + shared, 0.7], rel=1e-13)
    assert p.grad_correlation == pytest.approx([(gc + shared) / (g + shared), 0.2], rel=1e-13)


def test_one_post_ln_layer() -> None:
    model = small(layers=1, weights=LAYER, activation="identity", norm="post")
    p = moments.predict(
        model, variance=2.0, correlation=0.5, grad_correlation=0.2, theory="published"
    )
    added = ATTENTION_GAIN * uniform_attention(2.0, 0.5)[0]
    first = 2.0 + added
    r = (1 - 1 / D) * (1.0 + added) / first
    assert p.variance == pytest.approx([2.0, 1.0], rel=1e-13)
    # A linear block keeps the correlation; the second norm shrinks it once more.
    assert p.correlation[1] == pytest.approx((1 - 1 / D) * r, rel=1e-13)
    g, gc = (kernel / (1 + FFN_GAIN) * (1 + FFN_GAIN) / first for kernel in (1.0, 0.2))
    shared = ATTENTION_GAIN * (g + (LENGTH - 1) * gc) / LENGTH
    assert p.grad_variance[0] == pytest.approx(g + shared, rel=1e-13)
    assert p.grad_correlation[0] == pytest.approx((gc + shared) / (g + shared), rel=1e-13)


def test_no_norm_and_scales() -> None:
    """lambda^2 x + beta^2 f(x), with dropout 1/(1-p) on what is not common to all tokens."""
    lam, beta, p_drop = 0.8, 1.5, 0.25
    model = small(
        layers=1,
        weights=LAYER,
        activation="identity",
        norm="none",
        skip_scale=lam,
        branch_scale=beta,
        dropout=p_drop,
        attention_dropout=0.0,
    )
    p = moments.predict(
        model, variance=2.0, correlation=0.5, grad_correlation=0.2, theory="published"
    )
    own, pair = uniform_attention(2.0, 0.5)
    v = lam**2 * 2.0 + beta**2 * ATTENTION_GAIN * own / (1 - p_drop)
    c = lam**2 * 1.0 + beta**2 * ATTENTION_GAIN * pair
    v, c = (
        lam**2 * v + beta**2 * FFN_GAIN * v / (1 - p_drop),
        lam**2 * c + beta**2 * FFN_GAIN * c,
    )
    assert (p.variance[1], p.correlation[1]) == pytest.approx((v, c / v), rel=1e-13)
    kept, added = lam**2, beta**2 * FFN_GAIN
    g, gc = kept + added / (1 - p_drop), 0.2 * (kept + added)
    shared = beta**2 * ATTENTION_GAIN * (g + (LENGTH - 1) * gc) / LENGTH
    g, gc = kept * g + shared / (1 - p_drop), kept * gc + shared
    assert p.grad_variance[0] == pytest.approx(g, rel=1e-13)
    assert p.grad_correlation[0] == pytest.approx(gc / g, rel=1e-13)


# --- conventions of the stream --------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_index_n_leaves_layer_n(norm: str) -> None:
    """A model cut after n layers predicts the same first n + 1 points."""
    deep = moments.predict(small(layers=5, norm=norm), correlation=0.3, theory="published")
    for quantity in STREAM:
        assert getattr(deep, quantity).shape == (6,)
    assert (deep.variance[0], deep.correlation[0]) == (1.0, 0.3)
    assert (deep.grad_variance[-1], deep.grad_correlation[-1]) == (1.0, 0.0)
    for n in range(1, 5):
        cut = moments.predict(small(layers=n, norm=norm), correlation=0.3, theory="published")
        assert cut.variance == pytest.approx(deep.variance[: n + 1], rel=1e-14)
        assert cut.correlation == pytest.approx(deep.correlation[: n + 1], rel=1e-14)


def test_gradients_restart_from_any_layer() -> None:
    """The moments at index n, handed to the layers above it, give the same points above."""
    whole = moments.predict(small(layers=5), correlation=0.3, theory="published")
    rest = moments.predict(
        small(layers=3),
        variance=whole.variance[2],
        correlation=whole.correlation[2],
        theory="published",
    )
    for quantity in STREAM:
        assert getattr(rest, quantity) == pytest.approx(getattr(whole, quantity)[2:], rel=1e-12)


def test_post_ln_stream_is_normalised() -> None:
    p = moments.predict(small(norm="post"), variance=7.0, theory="published")
    assert p.variance == pytest.approx([7.0, 1.0, 1.0, 1.0], rel=1e-13)


def test_sites_of_a_trace() -> None:
    frame = moments.predict(small(layers=2), correlation=0.2, theory="published").to_frame()
    assert list(frame["layer"].unique()) == [0, 1, 2]
    assert list(frame.loc[frame["site"] == "stream", "layer"]) == [0, 1, 2]
    first = list(frame.loc[frame["layer"] == 1, "site"])
    assert first[-1] == "stream"
    for before, after in [
        ("attention.norm", "attention.sum"),
        ("attention.sum", "ffn.norm"),
        ("ffn.norm", "ffn.in"),
        ("ffn.in", "ffn.activation"),
        ("ffn.activation", "ffn.out"),
        ("ffn.out", "ffn.sum"),
    ]:
        assert first.index(before) < first.index(after)
    values = frame.drop(columns=["layer", "site"]).to_numpy(float)
    assert np.isfinite(values).all()
    post = moments.predict(small(layers=2, norm="post"), theory="published").to_frame()
    sites = list(post.loc[post["layer"] == 1, "site"])
    assert sites.index("attention.sum") < sites.index("attention.norm") < sites.index("ffn.in")


# --- what is given per layer ----------------------------------------------------------------------


@pytest.mark.parametrize("matrix", ["query", "value", "output", "ffn_in", "ffn_out"])
def test_weights_act_in_their_own_layer(matrix: str) -> None:
    base = moments.Weights.xavier(32, 4)
    plain = moments.predict(small(weights=base), correlation=0.3, theory="published")
    number = getattr(base, matrix)
    changed = base.replace(**{matrix: [number, 3 * number, number]})
    p = moments.predict(small(weights=changed), correlation=0.3, theory="published")
    assert p.variance[:2] == pytest.approx(plain.variance[:2], rel=1e-14)
    assert abs(p.variance[2] / plain.variance[2] - 1) > 1e-4
    uniform = base.replace(**{matrix: [number] * 3})
    again = moments.predict(small(weights=uniform), correlation=0.3, theory="published")
    assert again.variance == pytest.approx(plain.variance, rel=1e-15)


@pytest.mark.parametrize("scale", ["skip_scale", "branch_scale"])
def test_scales_act_in_their_own_layer(scale: str) -> None:
    plain = moments.predict(small(norm="none"), correlation=0.3, theory="published")
    model = small(norm="none", **{scale: [1.0, 1.0, 2.0]})
    p = moments.predict(model, correlation=0.3, theory="published")
    assert p.variance[:3] == pytest.approx(plain.variance[:3], rel=1e-14)
    assert p.variance[3] > 1.5 * plain.variance[3]


def test_layernorm_scaling_is_one_over_root_layer() -> None:
    """LNS as branches that shrink: layer l's block sees variance 1/l, and linear blocks follow."""
    weights = LAYER
    lns = small(layers=4, weights=weights, activation="identity", layernorm_scaling=True)
    scales = [1 / math.sqrt(n) for n in range(1, 5)]
    same = small(layers=4, weights=weights, activation="identity", branch_scale=scales)
    p, q = (moments.predict(m, correlation=0.3, theory="published") for m in (lns, same))
    for quantity in STREAM:
        assert getattr(p, quantity) == pytest.approx(getattr(q, quantity), rel=1e-13)
    plain = small(layers=4, weights=weights, activation="identity")
    assert moments.predict(plain, correlation=0.3, theory="published").variance[4] > p.variance[4]


# --- batches of configurations --------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "identity"])
def test_a_batch_is_a_loop(norm: str, activation: str) -> None:
    model = small(norm=norm, activation=activation, dropout=0.1)
    v = np.array([0.5, 1.0, 4.0])[:, None]
    r = np.array([0.0, 0.7])
    p = moments.predict(model, variance=v, correlation=r, theory="published")
    for quantity in STREAM:
        assert getattr(p, quantity).shape == (3, 2, 4)
    for i in range(3):
        for j in range(2):
            single = moments.predict(model, variance=v[i, 0], correlation=r[j], theory="published")
            for quantity in STREAM:
                assert getattr(p, quantity)[i, j] == pytest.approx(
                    getattr(single, quantity), rel=1e-12, abs=1e-15
                )


def test_a_batch_of_gradients() -> None:
    rg = np.array([0.0, 0.4, 0.9])
    p = moments.predict(small(), correlation=0.3, grad_correlation=rg, theory="published")
    assert p.variance.shape in {(4,), (3, 4)}
    assert p.grad_variance.shape == (3, 4)
    for k in range(3):
        one = moments.predict(small(), correlation=0.3, grad_correlation=rg[k], theory="published")
        assert p.grad_variance[k] == pytest.approx(one.grad_variance, rel=1e-13)
    frame = p.to_frame()
    assert sorted(frame["configuration"].unique()) == [0, 1, 2]


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("variance", 0.0),
        ("variance", -1.0),
        ("variance", math.nan),
        ("variance", [1.0, -1.0]),
        ("variance", "wide"),
        ("correlation", 1.01),
        ("correlation", -0.5),
        ("correlation", math.inf),
        ("grad_variance", -1.0),
        ("grad_correlation", 1.5),
    ],
)
def test_impossible_moments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(DomainError, match=rf"^{argument} = "):
        moments.predict(small(), theory="published", **{argument: value})


def test_the_least_correlation_depends_on_the_length() -> None:
    moments.predict(small(norm="none"), correlation=-1 / 15, theory="published")
    with pytest.raises(DomainError, match="16 tokens"):
        moments.predict(small(), correlation=-1 / 14, theory="published")


def test_no_gradient_has_no_correlation() -> None:
    p = moments.predict(small(), correlation=0.3, grad_variance=0.0, theory="published")
    assert np.array_equal(p.grad_variance, np.zeros(4))
    assert np.array_equal(p.grad_correlation, np.zeros(4))


def test_equal_tokens_stay_equal_without_dropout() -> None:
    for norm in ("none", "post"):
        p = moments.predict(small(norm=norm), correlation=1.0, theory="simplified")
        assert p.correlation == pytest.approx(np.ones(4), abs=1e-12)


def test_overflow_is_an_error_not_a_warning() -> None:
    wide = moments.Weights.xavier(32, 4).replace(query=10.0, key=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DomainError, match=r"overflow in layer 1 behind attention.*reduce"):
            moments.predict(small(weights=wide), theory="published")
        deep = small(layers=400, norm="none", branch_scale=3.0)
        with pytest.raises(DomainError, match="overflow"):
            moments.predict(deep, correlation=0.5, theory="simplified")


def test_overflow_of_a_batch_names_where_it_began() -> None:
    wide = moments.Weights.xavier(32, 4).replace(query=10.0, key=10.0)
    with pytest.raises(DomainError, match="overflow in layer 1"):
        moments.predict(small(weights=wide), correlation=np.array([0.0, 0.5]), theory="published")


def test_wrong_calls() -> None:
    with pytest.raises(DomainError, match=r"model must be a moments\.Transformer, not dict"):
        moments.predict({"layers": 2})  # type: ignore[arg-type]
    with pytest.raises(DomainError, match=r"theory = 'best'.*published"):
        moments.predict(small(), theory="best")  # type: ignore[arg-type]
    with pytest.raises(DomainError, match=r"d_head|heads"):
        moments.predict(small(d_head=4), theory="published")
    with pytest.raises(DomainError, match=r"simplified.*relu"):
        moments.predict(small(activation="gelu"), theory="simplified")


def test_a_causal_model_is_warned_about() -> None:
    with pytest.warns(moments.ValidityWarning, match="causal mask"):
        p = moments.predict(small(causal=True), correlation=0.3, theory="published")
    assert len(p.warnings) == 1
    full = moments.predict(small(), correlation=0.3, theory="published")
    assert p.variance == pytest.approx(full.variance, rel=1e-15)


# --- weight gradients -----------------------------------------------------------------------------


def test_weight_gradient_of_a_linear_map() -> None:
    """E |sum_i g_i x_i^T|^2 with both token correlations, by simulation."""
    d_in, d_out, tokens, v, r, g2, rg = 24, 40, 10, 1.5, 0.6, 0.8, -0.05
    rng = np.random.default_rng(0)
    norms = []
    for _ in range(600):
        x = exchangeable(rng, tokens, d_in, v, r)
        g = np.sqrt(g2) * rng.normal(size=(tokens, d_out))
        g = math.sqrt(1 - rg) * (g - g.mean(0)) + g.mean(0) * math.sqrt(1 + (tokens - 1) * rg)
        norms.append(float(((g.T @ x) ** 2).sum()))
    signal = Signal(Kernel(v, v * r), tokens, width=d_in)
    _, record = forward(linear(d_in, d_out, 0.01), signal)
    done = record.backward(Gradient(Kernel(g2, g2 * rg), tokens))
    ((name, norm),) = done.weights().items()
    measured = Estimate.of(norms)
    assert (done.layer, name) == (0, "weight")
    assert abs(norm - measured.mean) < 3 * measured.stderr
    assert measured.stderr < 0.02 * measured.mean


def test_weight_gradient_of_inputs_with_a_mean() -> None:
    """Behind a ReLU the second moment, mean included, multiplies the gradient."""
    d, d_ff, tokens, v, r, g2, rg = 16, 64, 8, 1.2, 0.4, 0.5, 0.3
    rng = np.random.default_rng(1)
    norms = []
    for _ in range(600):
        hidden = np.maximum(exchangeable(rng, tokens, d_ff, v, r), 0)
        g = exchangeable(rng, tokens, d, g2, rg)
        norms.append(float(((g.T @ hidden) ** 2).sum()))
    chain = Activation(RELU, "published", "relu") >> linear(d_ff, d, 0.1)
    _, record = forward(chain, Signal(Kernel(v, v * r), tokens, width=d_ff))
    done = record.backward(Gradient(Kernel(g2, g2 * rg), tokens))
    (norm,) = (norm for one in done.leaves() for norm in one.weights().values())
    measured = Estimate.of(norms)
    assert abs(norm - measured.mean) < 3 * measured.stderr


def test_weight_gradients_of_a_prediction() -> None:
    p = moments.predict(small(), correlation=0.3, theory="published")
    table = p.weight_gradients()
    assert list(table.columns) == ["layer", "weight", "squared_norm"]
    assert list(table["layer"].unique()) == [1, 2, 3]
    assert {"ffn_in", "ffn_out"} <= set(table["weight"])
    assert (table["squared_norm"] > 0).all()
    batch = moments.predict(small(), correlation=np.array([0.1, 0.3]), theory="published")
    with pytest.raises(DomainError, match="single configuration"):
        batch.weight_gradients()


# --- token-resolved kernels -----------------------------------------------------------------------

TOKENS = 6
ELEMENTWISE: list[tuple[str, Component]] = [
    ("linear", linear(24, 40, 0.03)),
    ("dropout", dropout(0.3)),
    ("scale", Scale(SCALE, "published", "scale", {"weight_variance": 0.49})),
    ("relu", Activation(RELU, "published", "relu")),
    ("gelu", Activation(GELU, "published", "gelu")),
    ("identity", Activation(IDENTITY, "published", "identity")),
    ("chain", linear(24, 40, 0.03) >> Activation(RELU, "published", "relu") >> dropout(0.2)),
    ("residual", Residual(Activation(RELU, "published", "relu") >> dropout(0.2), 0.9, 1.3)),
]
elementwise = pytest.mark.parametrize(
    "component", [c for _, c in ELEMENTWISE], ids=[n for n, _ in ELEMENTWISE]
)


def exchangeable_matrix(variance: float, covariance: float) -> np.ndarray:
    return np.full((TOKENS, TOKENS), covariance) + (variance - covariance) * np.eye(TOKENS)


def both(component: Component, signal: Signal, gradient: Gradient) -> tuple[Signal, Gradient]:
    output, record = forward(component, signal)
    return output, record.backward(gradient).grad_in


@elementwise
def test_a_resolved_exchangeable_kernel_stays_the_same(component: Component) -> None:
    v, c, g2, gc = 1.4, 0.5, 0.8, 0.3
    scalar, sent = both(
        component,
        Signal(Kernel(v, c), TOKENS, width=24),
        Gradient(Kernel(g2, gc), TOKENS),
    )
    resolved, resolved_sent = both(
        component,
        Signal(Kernel.of_matrix(exchangeable_matrix(v, c)), TOKENS, width=24),
        Gradient(Kernel.of_matrix(exchangeable_matrix(g2, gc)), TOKENS),
    )
    for one, many in ((scalar.kernel, resolved.kernel), (sent.kernel, resolved_sent.kernel)):
        expected = exchangeable_matrix(one.diagonal, one.off_diagonal)
        assert many.resolved
        assert many.diagonal == pytest.approx(np.full(TOKENS, one.diagonal), rel=1e-13)
        assert many.off_diagonal == pytest.approx(expected, rel=1e-13)
        assert many.mean_diagonal() == pytest.approx(one.diagonal, rel=1e-13)
        assert many.mean_off_diagonal() == pytest.approx(one.off_diagonal, rel=1e-13)
        assert many.total(TOKENS) == pytest.approx(one.total(TOKENS), rel=1e-13)
    assert np.broadcast_to(resolved.mean, TOKENS) == pytest.approx(
        np.full(TOKENS, scalar.mean), rel=1e-13
    )


@elementwise
def test_every_entry_of_a_general_kernel_is_its_own_pair(component: Component) -> None:
    """Each pair of an uneven kernel goes as it would in a kernel of those two tokens alone."""
    rng = np.random.default_rng(2)
    factor = rng.normal(size=(TOKENS, 9))
    x, g = (
        np.cov(rng.normal(size=(TOKENS, 9))) + 0.1 * np.eye(TOKENS),
        factor @ factor.T / 9,
    )
    output, sent = both(
        component,
        Signal(Kernel.of_matrix(x), TOKENS, width=24),
        Gradient(Kernel.of_matrix(g), TOKENS),
    )
    assert output.kernel.off_diagonal == pytest.approx(output.kernel.off_diagonal.T, rel=1e-12)
    for i, j in ((0, 1), (2, 5), (3, 4)):
        pair = np.ix_([i, j], [i, j])
        two, two_sent = both(
            component,
            Signal(Kernel.of_matrix(x[pair]), 2, width=24),
            Gradient(Kernel.of_matrix(g[pair]), 2),
        )
        assert output.kernel.off_diagonal[pair] == pytest.approx(two.kernel.off_diagonal, rel=1e-12)
        assert sent.kernel.off_diagonal[pair] == pytest.approx(
            two_sent.kernel.off_diagonal, rel=1e-12
        )


def test_the_diagonal_is_not_a_pair_under_dropout() -> None:
    """Masks are shared by a token with itself only, even where two tokens are equal."""
    kernel = Kernel.of_matrix(np.ones((3, 3)))
    output, sent = both(dropout(0.5), Signal(kernel, 3), Gradient(kernel, 3))
    for moment in (output.kernel, sent.kernel):
        assert moment.off_diagonal == pytest.approx(np.ones((3, 3)) + np.eye(3), rel=1e-14)
        assert moment.diagonal == pytest.approx([2.0, 2.0, 2.0], rel=1e-14)


def test_resolved_relu_and_dropout_by_simulation() -> None:
    rng = np.random.default_rng(3)
    root = rng.normal(size=(4, 6))
    matrix = root @ root.T / 4
    chain = Activation(RELU, "published", "relu") >> dropout(0.3)
    output, _ = both(
        chain,
        Signal(Kernel.of_matrix(matrix), 4),
        Gradient(Kernel.of_matrix(np.eye(4)), 4),
    )
    draws = 400_000
    x = np.maximum(np.linalg.cholesky(matrix) @ rng.normal(size=(4, draws)), 0)
    x = x * (rng.random(x.shape) >= 0.3) / 0.7
    centred = x - np.sqrt(np.diag(matrix) / (2 * math.pi))[:, None]
    products = centred[:, None, :] * centred[None, :, :]
    measured, stderr = products.mean(-1), products.std(-1) / math.sqrt(draws)
    assert np.abs((output.kernel.off_diagonal - measured) / stderr).max() < 4


def test_configurations_lead_the_tokens() -> None:
    """A batch of resolved kernels with a parameter per configuration."""
    rng = np.random.default_rng(4)
    matrices = np.stack([np.cov(rng.normal(size=(TOKENS, 12))) for _ in range(3)])
    weights = np.array([0.01, 0.02, 0.05])
    chain = linear(24, 40, weights) >> Activation(GELU, "published", "gelu")
    gradient = Gradient(Kernel.of_matrix(np.broadcast_to(np.eye(TOKENS), matrices.shape)), TOKENS)
    output, sent = both(chain, Signal(Kernel.of_matrix(matrices), TOKENS, width=24), gradient)
    assert output.kernel.off_diagonal.shape == (3, TOKENS, TOKENS)
    for k in range(3):
        one, one_sent = both(
            linear(24, 40, weights[k]) >> Activation(GELU, "published", "gelu"),
            Signal(Kernel.of_matrix(matrices[k]), TOKENS, width=24),
            Gradient(Kernel.of_matrix(np.eye(TOKENS)), TOKENS),
        )
        assert output.kernel.off_diagonal[k] == pytest.approx(one.kernel.off_diagonal, rel=1e-13)
        assert sent.kernel.off_diagonal[k] == pytest.approx(
            one_sent.kernel.off_diagonal, rel=1e-13, abs=1e-16
        )


def test_kernel_algebra() -> None:
    rng = np.random.default_rng(5)
    a, b = (np.cov(rng.normal(size=(TOKENS, 9))) for _ in range(2))
    first, second = Kernel.of_matrix(a), Kernel.of_matrix(b)
    for combined, expected in (
        (first + second, a + b),
        (first - second, a - b),
        (first * second, a * b),
        (first.scaled(2.5), 2.5 * a),
        (first.with_diagonal(np.arange(1.0, TOKENS + 1)), None),
    ):
        if expected is None:
            expected = a.copy()
            np.fill_diagonal(expected, np.arange(1.0, TOKENS + 1))
        assert combined.off_diagonal == pytest.approx(expected, rel=1e-15)
        assert combined.diagonal == pytest.approx(np.diag(expected), rel=1e-15)
    off = ~np.eye(TOKENS, dtype=bool)
    assert first.mean_off_diagonal() == pytest.approx(a[off].mean(), rel=1e-13)
    assert first.total(TOKENS) == pytest.approx(a.sum(), rel=1e-13)
    row, column = first.over_tokens(first.diagonal)
    assert (row * column) == pytest.approx(np.outer(np.diag(a), np.diag(a)), rel=1e-15)


def test_correlation_stays_inside_one() -> None:
    matrix = np.array([[1.0, 3.0], [3.0, 9.0]]) * (1 + 1e-15)
    matrix[0, 1] = matrix[1, 0] = 3.0 * (1 + 1e-14)
    assert np.abs(Signal(Kernel.of_matrix(matrix), 2).correlation()).max() <= 1.0
    assert Signal(Kernel(1.0, 1.0 + 1e-15), 2).correlation() == 1.0


def test_token_moments_of_the_simulator_are_a_kernels() -> None:
    """The reference's own averages, against the kernel of its products."""
    x = np.random.default_rng(6).normal(size=(TOKENS, 50))
    kernel = Kernel.of_matrix(x @ x.T / 50)
    assert token_moments(x) == pytest.approx((kernel.mean_diagonal(), kernel.mean_off_diagonal()))


def test_numbers_stay_possible_where_norms_vary_too_much_to_expand() -> None:
    """Few, strongly nonlinear units at a tiny width, and an unnormalised stack that explodes."""
    tiny = moments.Transformer(
        6, 8, 2, 33, d_ff=7, norm="post", activation="relu_squared", gated=True, dropout=0.5
    )
    with pytest.warns(moments.ValidityWarning, match="squared norms"):
        p = moments.predict(tiny, correlation=0.99)
    assert np.all(np.abs(p.correlation) <= 1)
    assert np.all(np.isfinite(p.grad_variance_band))
    assert np.all(np.isfinite(p.weight_gradients().squared_norm))
    explodes = moments.Transformer(8, 64, 4, 2, norm="none", activation="silu", gated=True)
    with pytest.warns(moments.ValidityWarning):
        assert np.all(np.isfinite(moments.predict(explodes, correlation=0.3).variance))


@pytest.mark.parametrize(("skip", "branch"), [(0.7, 1.3), (1.0, 1.0), (1.4, 0.2)])
def test_norms_of_a_scaled_sum_of_gaussians(skip: float, branch: float) -> None:
    """Such a sum is Gaussian again, and Gaussian norms covary by 2 C o C/d."""
    width, kernels = 64, (Kernel(2.0, 0.6), Kernel(0.5, -0.05))
    first, second = (gaussian(kernel, 8, width, spread=True) for kernel in kernels)
    varies = added(first, second, skip**2, branch**2).fluctuation
    total = kernels[0].mixed(skip**2, kernels[1], branch**2)
    assert varies is not None
    assert varies.norms.diagonal == pytest.approx(2 * total.diagonal**2 / width, rel=1e-12)
    assert varies.norms.off_diagonal == pytest.approx(2 * total.off_diagonal**2 / width, rel=1e-12)
