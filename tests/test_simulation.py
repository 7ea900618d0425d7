"""The torch twin against exact arithmetic, numpy and torch's own differentiation."""

import importlib
import json
import math
import sys

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, MomentsError, Transformer, Weights
from moments.prediction.draws import (
    Draw,
    RawMoments,
    mean_over_draws,
    ratio_over_draws,
    typical_over_draws,
)
from moments.prediction.measurement import Measurement

torch = pytest.importorskip("torch")

from moments.simulation.collector import Collector, raw_moments, squared_norm  # noqa: E402
from moments.simulation.functions import dropout, exchangeable_normal, generator  # noqa: E402
from moments.simulation.network import LayerTwin  # noqa: E402
from moments.simulation.parameters import draw_weights  # noqa: E402
from moments.simulation.run import simulate  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("correlation", [-1 / 5, -0.1, 0.0, 0.4, 1.0])
def test_sampled_tokens_have_the_asked_covariance(correlation):
    seq_len, count = 6, 4000 * 8
    x = exchangeable_normal((4000, seq_len, 8), 2.0, correlation, generator(CPU, 1), torch.float64)
    rows = x.transpose(1, 2).reshape(-1, seq_len).numpy()
    expected = 2.0 * ((1 - correlation) * np.eye(seq_len) + correlation)
    # Var(x_i x_j) = C_ii C_jj + C_ij^2 for Gaussians.
    stderr = np.sqrt((4.0 + expected**2) / count)
    assert np.all(np.abs(rows.T @ rows / count - expected) < 5 * stderr)
    if correlation == 1:
        np.testing.assert_allclose(rows, rows[:, :1] * np.ones(seq_len), atol=1e-12)
    if correlation == -1 / 5:
        np.testing.assert_allclose(rows.sum(1), 0, atol=1e-12)


def test_dropout_drops_and_rescales():
    x = torch.ones(200_000, dtype=torch.float64)
    y = dropout(x, 0.25, generator(CPU, 2))
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float((y == 0).double().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 200_000)


def test_random_streams_differ_and_repeat():
    drawn = [torch.randn(3, generator=generator(CPU, *key)) for key in [(0, 1), (1, 0), (0, 1)]]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("padded", [False, True])
def test_raw_moments_agree_with_explicit_sums(padded):
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, (3, 5, 4))
    kept = np.ones((3, 5), bool)
    if padded:
        kept[0, 3:] = kept[1, 4] = False
        x[~kept] = 1e6
    mask = torch.as_tensor(kept) if padded else None
    found = raw_moments(torch.as_tensor(x), mask)
    pairs = [
        x[b, i] * x[b, j]
        for b in range(3)
        for i in range(5)
        for j in range(5)
        if i != j and kept[b, i] and kept[b, j]
    ]
    assert found.mean == pytest.approx(x[kept].mean())
    assert found.square == pytest.approx((x[kept] ** 2).mean())
    assert found.pair == pytest.approx(np.mean(pairs))
    by_token = [(x[kept[:, i], i] ** 2).mean() for i in range(5)]
    np.testing.assert_allclose(found.token_square, by_token)


def test_squared_norm_in_blocks():
    x = torch.randn(3, 700_000, generator=generator(CPU, 3))
    assert squared_norm(x.T) == pytest.approx(
        float((x.numpy().astype(float) ** 2).sum()), rel=1e-12
    )


def test_statistics_over_draws():
    random = np.random.default_rng(1)
    a, b = random.lognormal(size=7), random.lognormal(size=7)
    mean = mean_over_draws(a)
    assert mean.stderr == pytest.approx(np.sqrt(a.var(ddof=1) / 7))
    typical = typical_over_draws(a)
    assert typical.value == pytest.approx(np.prod(a) ** (1 / 7))
    ratio = ratio_over_draws(a, b)
    left_out = [np.delete(a, k).sum() / np.delete(b, k).sum() for k in range(7)]
    assert ratio.value == pytest.approx(a.sum() / b.sum())
    assert ratio.stderr == pytest.approx(
        np.sqrt(6 / 7 * np.sum((left_out - np.mean(left_out)) ** 2))
    )
    assert math.isnan(mean_over_draws(a[:1]).stderr)
    assert ratio_over_draws(np.zeros(2), np.zeros(2)).value == 0


def test_the_activation_is_centred_and_the_stream_is_not():
    random = np.random.default_rng(2)
    x = random.normal(3.0, 1.0, (4, 2, 6, 5))
    zero = RawMoments(0.0, 0.0, 0.0, np.zeros(6))
    places = [(0, "stream"), (1, "ffn.activation"), (1, "stream")]
    draws = [
        Draw(dict.fromkeys(places, raw_moments(torch.as_tensor(part))), dict.fromkeys(places, zero))
        for part in x
    ]
    measured = Measurement.from_draws(draws, batch=2, source="a test")
    frame = measured.to_frame().set_index(["layer", "site"])
    assert measured.variance[1] == pytest.approx((x**2).mean())
    active = frame.loc[(1, "ffn.activation")]
    centred = x - x.mean()
    products = np.einsum("sbif,sbjf->ij", centred, centred) / (4 * 2 * 5)
    covariance = (products.sum() - np.trace(products)) / 30
    assert active["mean"] == pytest.approx(x.mean())
    assert active["variance"] == pytest.approx(x.var())
    assert active["correlation"] == pytest.approx(covariance / x.var())
    by_draw = (centred**2).mean((1, 2, 3))
    assert active["variance_stderr"] == pytest.approx(by_draw.std(ddof=1) / 2)
    assert measured.grad_variance_typical[1] == 0


def kernel(seq_len, variance, correlation):
    return variance * ((1 - correlation) * np.eye(seq_len) + correlation)


def off_diagonal(matrix):
    count = len(matrix) * (len(matrix) - 1)
    return (matrix.sum() - np.trace(matrix)) / count


@pytest.mark.parametrize("causal", [False, True])
def test_a_linear_layer_with_uniform_attention_is_exact(causal):
    """Query variance 0 makes attention uniform: then every moment is a finite sum.

    With A the mixing matrix and q = 1 - p, a block takes C to kappa A C A^T, attention dropout adds
    (p/q) sum_j A_ij^2 C_jj to the diagonal, and output dropout divides the diagonal by q; the
    gradient goes through A^T.
    """
    d, length, d_ff, drop, attention_drop = 96, 5, 160, 0.2, 0.3
    skip, branch = 0.8, 1.3
    s_value, s_output, s_in, s_out = 0.0125, 0.0075, 0.01, 0.005
    model = Transformer(
        layers=1,
        d_model=d,
        heads=3,
        seq_len=length,
        d_ff=d_ff,
        norm="none",
        activation="identity",
        dropout=drop,
        attention_dropout=attention_drop,
        causal=causal,
        skip_scale=skip,
        branch_scale=branch,
        weights=Weights(0.0, 0.0, s_value, s_output, s_in, s_out),
    )
    measured = simulate(
        model,
        variance=2.0,
        correlation=-0.1,
        grad_variance=3.0,
        grad_correlation=0.4,
        seeds=200,  # their spread falls with the width, too
        batch=2,
        seed=5,
    )
    mixing = np.tril(np.ones((length, length))) if causal else np.ones((length, length))
    mixing /= mixing.sum(1, keepdims=True)
    extra = attention_drop / (1 - attention_drop)

    def mixed(c, a):
        return a @ c @ a.T + extra * np.diag((a**2) @ np.diag(c))

    def dropped(c):
        return c + drop / (1 - drop) * np.diag(np.diag(c))

    attention, ffn = d * s_value * d * s_output, d * s_in * d_ff * s_out
    entering = kernel(length, 2.0, -0.1)
    middle = skip**2 * entering + branch**2 * dropped(attention * mixed(entering, mixing))
    leaving = skip**2 * middle + branch**2 * dropped(ffn * middle)
    received = kernel(length, 3.0, 0.4)
    at_ffn_out = branch**2 * dropped(received)
    grad_middle = skip**2 * received + ffn * at_ffn_out
    at_heads = branch**2 * dropped(grad_middle)
    grad_entering = skip**2 * grad_middle + attention * mixed(at_heads, mixing.T)

    def check(name, expected, *index):
        value, stderr = getattr(measured, name)[index], getattr(measured, f"{name}_stderr")[index]
        assert stderr < 0.02 * max(abs(expected), 0.2)
        assert abs(value - expected) < 4.5 * stderr, name

    for n, c in enumerate((entering, leaving)):
        check("variance", np.trace(c) / length, n)
        check("correlation", off_diagonal(c) / (np.trace(c) / length), n)
    for n, g in enumerate((grad_entering, received)):
        check("grad_variance", np.trace(g) / length, n)
        check("grad_correlation", off_diagonal(g) / (np.trace(g) / length), n)
    for token in range(length):
        assert measured.token_variance[1, token] == pytest.approx(leaving[token, token], rel=0.06)
        assert measured.token_grad_variance[0, token] == pytest.approx(
            grad_entering[token, token], rel=0.06
        )

    norms = measured.weight_gradients().set_index("weight")
    heads = d * s_value * mixed(entering, mixing)
    for weight, size, signal, gradient in (
        ("output", d * d, heads, at_heads),
        ("ffn_in", d * d_ff, middle, d * s_out * at_ffn_out),
        ("ffn_out", d_ff * d, d * s_in * middle, at_ffn_out),
    ):
        row, expected = norms.loc[weight], size * (signal * gradient).sum()
        assert row["squared_norm_stderr"] < 0.03 * expected
        assert abs(row["squared_norm"] - expected) < 4.5 * row["squared_norm_stderr"], weight


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_backward_by_layers_is_backward_through_the_whole(norm):
    """Redrawing each layer's weights and masks gives the gradient of the one connected graph."""
    model = Transformer(
        layers=3, d_model=16, heads=2, seq_len=6, norm=norm, dropout=0.1, activation="gelu"
    )
    measured = simulate(model, seeds=1, batch=2, seed=4, dtype="float64", correlation=0.3)

    shape = (2, 6, 16)
    x = exchangeable_normal(shape, 1.0, 0.3, generator(CPU, 4, 0, 0), torch.float64)
    stream = [x.requires_grad_()]
    for n in (1, 2, 3):
        random = generator(CPU, 4, 0, n)
        weights = draw_weights(model, n, random, torch.float64)
        layer = LayerTwin(model, n, weights, random, lambda y, site: y)
        stream.append(layer.run(stream[-1]))
    top = exchangeable_normal(shape, 1.0, 0.0, generator(CPU, 4, 0, 4), torch.float64)
    gradients = torch.autograd.grad(stream[-1], stream, top)
    for n in range(4):
        assert measured.variance[n] == pytest.approx(
            float(stream[n].detach().square().mean()), rel=1e-12
        )
        expected = float(gradients[n].square().mean())
        assert measured.grad_variance[n] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "kv_heads": 2, "window": 5, "rotary": moments.Rotary()},
        {"alibi": 1.0, "causal": True},
        {"relative_bias": moments.RelativeBias(variance=0.1), "logit_softcap": 2.0},
    ],
)
@pytest.mark.parametrize("group", [1, 3])
def test_heads_in_groups_are_heads_at_once(changes, group, monkeypatch):
    """Many logits are computed by groups of heads, and again in the backward pass; no graph that is
    kept is another than the one drawn again."""
    model = Transformer(2, 32, 8, 12, dropout=0.1, attention_dropout=0.0, **changes)
    once = simulate(model, correlation=0.2, seeds=1, batch=2)
    calls = []
    attention = importlib.import_module("moments.simulation.attention")
    dropped = attention.dropout  # by every group, once
    monkeypatch.setattr(attention, "dropout", lambda *of: calls.append(1) or dropped(*of))
    monkeypatch.setattr(attention, "MOST_LOGITS", group * 2 * 12 * 12)
    monkeypatch.setattr("moments.simulation.twin.STORED_GRAPHS", 0)
    grouped = simulate(model, correlation=0.2, seeds=1, batch=2)
    assert len(calls) == 3 * 2 * -(-8 // group)
    np.testing.assert_allclose(grouped.variance, once.variance, rtol=1e-5)
    np.testing.assert_allclose(grouped.grad_variance, once.grad_variance, rtol=1e-5)
    norms = [m.weight_gradients()["squared_norm"] for m in (grouped, once)]
    np.testing.assert_allclose(*norms, rtol=1e-4)


def test_dropped_logits_in_groups_are_drawn_once(monkeypatch):
    """The masks of a group's forward pass are those of its backward pass."""
    model = Transformer(1, 32, 8, 12, attention_dropout=0.5)
    monkeypatch.setattr("moments.simulation.attention.MOST_LOGITS", 2 * 12 * 12)
    found = simulate(model, correlation=0.2, seeds=40, batch=2)
    p = moments.predict(model, correlation=0.2)
    gap = abs(found.grad_variance[0] / p.grad_variance[0] - 1)
    assert gap < 0.01 + 4 * found.grad_variance_stderr[0] / p.grad_variance[0]


def test_one_layer_agrees_with_numpy():
    """A Pre-LN layer with everything on but dropout, written out again in numpy."""
    model = Transformer(
        layers=2,
        d_model=12,
        heads=3,
        seq_len=5,
        causal=True,
        skip_scale=0.9,
        branch_scale=0.7,
        layernorm_scaling=True,
        norm_epsilon=1e-3,
        temperature=1.5,
    )
    random = generator(CPU, 6)
    weights = draw_weights(model, 2, random, torch.float64)
    x = torch.randn(1, 5, 12, generator=random, dtype=torch.float64)
    layer = LayerTwin(model, 2, weights, random, lambda y, site: y)
    found = layer.run(x)[0].detach().numpy()

    w = {name: matrix.detach().numpy() for name, matrix in weights.items()}

    def norm(z):
        centred = z - z.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) / np.sqrt(2)

    z = x[0].numpy()
    y = norm(z)
    heads = []
    for head in range(3):
        q, k, v = (y @ w[name][:, 4 * head : 4 * head + 4] for name in ("query", "key", "value"))
        logits = np.where(np.tril(np.ones((5, 5))) == 1, q @ k.T / (2.0 * 1.5), -np.inf)
        mixing = np.exp(logits - logits.max(1, keepdims=True))
        heads.append(mixing / mixing.sum(1, keepdims=True) @ v)
    z = 0.9 * z + 0.7 * np.concatenate(heads, 1) @ w["output"]
    z = 0.9 * z + 0.7 * np.maximum(norm(z) @ w["ffn_in"], 0) @ w["ffn_out"]
    np.testing.assert_allclose(found, z, rtol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_every_predicted_site_is_simulated(norm):
    model = Transformer(
        layers=2,
        d_model=32,
        heads=2,
        seq_len=8,
        norm=norm,
        layernorm_scaling=norm != "none",
        embedding=Embedding(50, 0.5, 0.3, 0.2, norm=True, dropout=0.1),
    )
    ids = np.random.default_rng(0).integers(0, 50, (2, 8))
    measured = simulate(model, seeds=2, token_ids=ids)
    found = set(measured.to_frame()[["layer", "site"]].itertuples(index=False, name=None))
    predicted = moments.predict(model, theory="published").to_frame()
    wanted = set(predicted[["layer", "site"]].itertuples(index=False, name=None))
    assert wanted <= found
    assert measured.batch == 2
    assert {"token", "position", "segment"} <= set(measured.weight_gradients()["weight"])


def test_embedded_input_has_the_tables_variances():
    model = Transformer(
        layers=1, d_model=64, heads=2, seq_len=16, embedding=Embedding(40, 0.5, 0.3, 0.2)
    )
    ids = np.arange(16)
    ids[8:] = ids[:8]
    frame = simulate(model, seeds=200, batch=1, token_ids=ids).to_frame()
    row = frame[frame["site"] == "embedding.sum"].iloc[0]
    assert abs(row["variance"] - 1.0) < 4.5 * row["variance_stderr"]
    # Each token meets its repetition in 1 of 15 others; the segment is the same for all.
    expected = 0.5 / 15 + 0.2
    assert row["correlation_stderr"] < 0.01
    assert abs(row["correlation"] - expected) < 4.5 * row["correlation_stderr"]


def test_reproducible_without_touching_the_global_state():
    model = Transformer(layers=2, d_model=16, heads=2, seq_len=4, dropout=0.1)
    before = torch.random.get_rng_state()
    first = simulate(model, seeds=2, seed=7)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.to_json() == simulate(model, seeds=2, seed=7).to_json()
    other = simulate(model, seeds=2, seed=8)
    assert not np.any(first.grad_variance[:-1] == other.grad_variance[:-1])
    assert first.samples["variance"].shape == (2, 3)
    assert first.samples["variance"][0, 2] != first.samples["variance"][1, 2]


@pytest.mark.parametrize("seeds", [1, 3])
def test_json_round_trip(seeds):
    model = Transformer(layers=2, d_model=16, heads=2, seq_len=4)
    first = simulate(model, seeds=seeds)
    stored = json.loads(first.to_json())
    again = Measurement.from_dict(stored)
    assert again.to_dict() == first.to_dict()
    np.testing.assert_array_equal(again.variance_stderr, first.variance_stderr)
    assert again.to_frame().equals(first.to_frame())
    assert repr(again) == repr(first)
    with pytest.raises(DomainError, match="format_version"):
        Measurement.from_dict(stored | {"format_version": 99})


MODEL = Transformer(layers=1, d_model=8, heads=2, seq_len=4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"variance": -1.0}, "variance"),
        ({"correlation": -0.5}, "correlation"),
        ({"grad_correlation": 1.5}, "grad_correlation"),
        ({"seeds": 0}, "seeds"),
        ({"batch": 0}, "batch"),
        ({"seed": -1}, "seed"),
        ({"device": "abacus"}, "device"),
        ({"dtype": "float16"}, "dtype"),
        ({"token_ids": [1, 2, 3, 4]}, "embedding"),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(DomainError, match=name):
        simulate(MODEL, **changes)


def test_ids_outside_the_table_are_named():
    model = MODEL.replace(embedding=Embedding(10, 1.0))
    with pytest.raises(DomainError, match="vocab_size = 10"):
        simulate(model, token_ids=[1, 2, 3, 10])


def test_overflow_is_an_error():
    model = Transformer(layers=8, d_model=64, heads=2, seq_len=4, norm="none", branch_scale=1e6)
    with pytest.raises(MomentsError, match="overflows"):
        simulate(model, seeds=1)


def test_a_place_is_passed_once():
    collector = Collector()
    x = torch.ones(1, 2, 3, requires_grad=True)
    collector.watch(x, [(1, "stream")])
    with pytest.raises(MomentsError, match="twice"):
        collector.watch(x, [(1, "stream")])


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("moments.simulation.run", "torch", "torch"),
        ("moments.torch", "torch", "torch"),
        ("moments.torch.huggingface_modules", "transformers", "hf"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, module, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MomentsError, match=rf"transformer-moments\[{extra}\]"):
        importlib.import_module(module)
