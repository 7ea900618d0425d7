"""Several residual streams, and an input that layers add again, against draws and modules."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

import moments
from moments import DomainError, HyperConnections, Transformer, Weights
from moments.layers.streams import DRAWS, coefficients, sinkhorn

torch: Any = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from moments.simulation.network import LayerTwin  # noqa: E402
from moments.simulation.streams import connection  # noqa: E402

draws: Any = importlib.import_module("small_draws")

DEEPSEEK = HyperConnections(4, variance=0.02**2)  # at width 4096, of its released configs
HEAD = moments.Head(vocab_size=40, tied=False, weight_variance=0.01)
ENTERING = {"variance": 1.0, "correlation": 0.3, "grad_correlation": 0.2}


def model(streams: HyperConnections | None, **changes: Any) -> Transformer:
    fields = {"layers": 3, "d_model": 64, "heads": 4, "seq_len": 12, "normalization": "rmsnorm"}
    fields |= {"weights": Weights.normal(1 / 64), "streams": streams}
    return Transformer(**(fields | changes))


@pytest.mark.parametrize("name", draws.STREAMS)
def test_moments_and_gradients_are_those_of_the_twin(name: str) -> None:
    measured = draws.stored()[f"streams/{name}"]["found"]
    predicted = moments.predict(draws.streamed(name), **draws.ENTERING)
    bounds = {
        "variance": 0.02,
        "correlation": 0.015,
        "grad_variance": 0.05,
        "grad_correlation": 0.01,
    }
    for quantity, bound in bounds.items():
        value, error = np.array(measured[quantity])
        gap = np.abs(getattr(predicted, quantity) - value)
        scale = 1.0 if "correlation" in quantity else value
        assert np.all(gap < bound * scale + 2.5 * error), quantity
    for layer, weight, norm in predicted.weight_gradients().itertuples(index=False):
        value, error = measured["norms"].pop(f"{layer}.{weight}")
        bound = 0.17 if ".streams" in weight else 0.05  # docs/theory/streams.md, What is left out
        assert abs(norm - value) <= bound * value + 2.5 * error, (layer, weight)
    assert not measured["norms"]


def test_the_twin_is_that_of_the_draws_stored() -> None:
    again = draws.twin_draws(draws.streamed("sinkhorn"), 2, 11, 4)
    entry = draws.stored()["streams/sinkhorn"]
    for quantity in draws.STREAM:
        (first, error), (second, _) = (np.array(v[quantity]) for v in (entry["found"], again))
        z = (second - first) / np.maximum(error * (entry["draws"] / 2 + 1) ** 0.5, 2e-6)
        assert np.sqrt(np.mean(z**2)) < 3, quantity


STATIC = {
    "one in turn": HyperConnections(3, reads="one", mixing="identity"),
    "constants": HyperConnections(4),
    "hunyuan": HyperConnections(4, mixing="identity", read_bias=-np.log(3)),
}


@pytest.mark.parametrize("name", STATIC)
def test_constant_coefficients_leave_copies_and_one_stream_s_numbers(name: str) -> None:
    """Exactly so: an epsilon meets what is read, (sum of r)^2 times the stream."""
    one = model(None, causal=True)
    several = moments.predict(one.replace(streams=STATIC[name]), **ENTERING)
    alone = moments.predict(one, **ENTERING)
    for quantity in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(getattr(several, quantity), getattr(alone, quantity), rtol=1e-9)
    np.testing.assert_allclose(several.streams()["likeness"], 1.0, rtol=1e-12)
    norms = (p.weight_gradients()["squared_norm"] for p in (several, alone))
    np.testing.assert_allclose(*norms, rtol=1e-9)


def test_means_over_coefficients_are_those_of_draws() -> None:
    """Of matrices at other random numbers, by the definitions; errors of 40,000 draws."""
    of, random = coefficients(DEEPSEEK, 4096), np.random.default_rng(7)
    assert of.logit_variance == pytest.approx(6.5536)
    correlation, count = 0.6, 40_000
    shared = np.array([[1.0, 0.0], [correlation, (1 - correlation**2) ** 0.5]])
    z = np.einsum(
        "ab,bnij->anij", shared * of.logit_variance**0.5, random.standard_normal((2, count, 4, 4))
    )
    first, second = (sinkhorn(one, DEEPSEEK) for one in z)
    for matrix in (first, second):
        np.testing.assert_allclose(matrix.sum(-2), 1.0, atol=1e-5)
    at = {"mixing": (np.einsum("nij,nij->n", first, second) - 1) / 3}
    write = 2 * expit(z[:, :, 0])
    at["write"] = write[0].mean(-1) * write[1].mean(-1)
    apart = write - write.mean(-1, keepdims=True)
    at["spread"] = (apart[0] * apart[1]).mean(-1)
    read = expit(z[:, :, 1])
    at["read"] = (read / read.sum(-1, keepdims=True) - 0.25).prod(0).sum(-1) * 4 / 3
    error = (1 / count + 1 / DRAWS) ** 0.5
    for name, values in at.items():
        series = np.polynomial.chebyshev.chebval(correlation, getattr(of, name))
        assert series == pytest.approx(values.mean(), abs=4 * values.std() * error), name


def test_streams_with_random_mixing_become_alike() -> None:
    """Their Gram matrix followed draw by draw, blocks giving independent directions of one size."""
    of, random, count = coefficients(DEEPSEEK, 4096), np.random.default_rng(1), 4000
    gram, mean, apart = np.ones((count, 4, 4)), 1.0, 0.0
    deviation = of.logit_variance**0.5
    for _ in range(20):
        mixed = sinkhorn(deviation * random.standard_normal((count, 4, 4)), DEEPSEEK)
        write = 2 * expit(deviation * random.standard_normal((count, 4)))
        gram = np.swapaxes(mixed, 1, 2) @ gram @ mixed + write[:, :, None] * write[:, None, :]
        mean, apart = mean + of.at_one("write"), of.at_one("mixing") * apart + of.at_one("spread")
        own = np.einsum("nii->n", gram).mean() / 4
        other = (gram.sum((1, 2)).mean() - 4 * own) / 12
        assert (mean - apart / 3) / (mean + apart) == pytest.approx(other / own, abs=0.01)
    deep = Transformer(
        44,
        4096,
        32,
        64,
        streams=DEEPSEEK,
        normalization="rmsnorm",
        weights=Weights.normal(1 / 4096),
    )
    likeness = moments.predict(deep, **ENTERING).streams()["likeness"]
    assert likeness.iloc[1] < 0.9 < likeness.iloc[20] < likeness.iloc[-1]
    finding = {one.kind: one for one in moments.check(deep).findings}["streams become alike"]
    assert finding.measured == pytest.approx(likeness.iloc[-1], abs=0.01)


@pytest.mark.parametrize("kind", ["deepseek_v4", "hy_v4"])
def test_the_twin_reads_writes_and_mixes_as_modules_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    name = {"deepseek_v4": "DeepseekV4", "hy_v4": "HYV4"}[kind]
    folder = f"transformers.models.{kind}"
    configuration: Any = importlib.import_module(f"{folder}.configuration_{kind}")
    modeling: Any = importlib.import_module(f"{folder}.modeling_{kind}")
    size = 16
    config = getattr(configuration, f"{name}Config")(hidden_size=size, hc_mult=4)
    if kind == "deepseek_v4":
        declared, scale = HyperConnections(4, variance=0.2), 1.0
    else:
        bias, scale = -float(np.log(3)), 0.01
        declared = HyperConnections(4, 0.2, scale, mixing="identity", read_bias=bias)
    module = getattr(modeling, f"{name}HyperConnection")(config)
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(4 * size, declared.logits, generator=random) * 0.2**0.5
    base = torch.zeros(declared.logits)
    base[:4] = declared.read_bias
    with torch.no_grad():
        module.fn.copy_(weights.T)
        module.scale.fill_(scale)
        module.base.copy_(base)
    x = torch.randn(2, 5, 4, size, generator=random)
    *theirs, entering = module(x)
    of = model(declared, d_model=size, norm_epsilon=config.rms_norm_eps)
    zero = torch.zeros(declared.logits)
    leaves = {"ffn.streams": weights, "ffn.streams.bias": zero}
    layer = LayerTwin(of, 1, leaves, random, lambda tensor, _: tensor)
    read, write, mix = connection(declared, layer, x, "ffn", 1)
    torch.testing.assert_close((read.unsqueeze(-1) * x).sum(-2), entering, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(write, theirs[0], rtol=1e-4, atol=2e-5)
    if kind == "deepseek_v4":
        torch.testing.assert_close(mix, theirs[1], rtol=1e-4, atol=2e-5)


def test_one_draw_scatters_as_the_band_says() -> None:
    """Within a third: signals and gradients answer to one draw of coefficients in opposite ways,
    which the band leaves out."""
    value, error = np.array(draws.stored()["streams/sinkhorn"]["found"]["variance"])
    drawn = error * draws.stored()["streams/sinkhorn"]["draws"] ** 0.5 / value
    predicted = moments.predict(draws.streamed("sinkhorn"), batch=4, **draws.ENTERING)
    low, high = predicted.variance_band
    ratio = np.log(high / low)[1:] / (2 * 1.96) / drawn[1:]
    assert np.all((ratio > 2 / 3) & (ratio < 3 / 2)), ratio


def test_classes_tokens_and_a_text_agree() -> None:
    streams = HyperConnections(4, variance=6.55 / (4 * 64))
    embedding = moments.Embedding(40, 1.0)
    of = model(streams, causal=True, embedding=embedding, head=HEAD, norm_epsilon=1e-6)
    classes, by_token = moments.predict(of), moments.predict(of, tokens=True)
    for quantity in ("variance", "correlation", "grad_variance"):
        one, two = (getattr(p, quantity) for p in (classes, by_token))
        np.testing.assert_allclose(one, two, rtol=0.02, atol=0.002)
    norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (classes, by_token)]
    inside = norms[0].index.get_level_values(0).isin([1, 2, 3])
    ratio = (norms[0] / norms[1]).squared_norm[inside]
    assert np.all(np.abs(ratio - 1) < 0.03)


def test_what_cannot_stand_between_streams_is_refused_by_name() -> None:
    streams = HyperConnections(4, variance=1e-3)
    for name, changes in {
        "norm": {"norm": "post"},
        "normalization": {"normalization": "dyt"},
        "parallel": {"parallel": True},
        "skip_scale": {"skip_scale": 0.5},
        "layernorm_scaling": {"layernorm_scaling": "after-residual"},
        "norm_groups": {"norm_groups": 4},
    }.items():
        with pytest.raises(DomainError, match=name):
            model(streams, **changes)
    with pytest.raises(DomainError, match="reads='one'"):
        HyperConnections(4, variance=0.1, reads="one")
    with pytest.raises(DomainError, match="streams = 1"):
        HyperConnections(1)
    with pytest.raises(DomainError, match="one residual stream"):
        moments.predict(model(None), **ENTERING).streams()
    of = model(streams)
    plain = of.replace(normalization="layernorm")
    with pytest.raises(DomainError, match="streams"):
        moments.predict(plain, theory="published", **ENTERING)
    with pytest.raises(DomainError, match="several residual streams"):
        moments.solve(of, "stream_variance", target=1.0)
    text = model(streams, causal=True, embedding=moments.Embedding(40, 1.0), head=HEAD)
    predicted = pickle.loads(pickle.dumps(moments.predict(text, token_ids=np.arange(12))))
    assert "ffn.streams" in set(predicted.weight_gradients()["weight"])
    with pytest.raises(DomainError, match="several residual streams"):
        predicted.after("sgd", learning_rate=0.1)
    assert Transformer.from_dict(of.to_dict()) == of
    (note,) = moments.check(of.replace(streams=STATIC["constants"])).notes
    assert "streams stay copies" in note


def test_an_input_added_again_is_that_of_one_factor_where_nothing_else_is() -> None:
    """Before layer 1 x = x_0: r x + s x_0 = (r + s) x_0, which only the stream's size shows."""
    one = model(None, layers=1)
    mixed = moments.predict(one.replace(input_mix=(0.5, 0.7)), **ENTERING)
    scaled = moments.predict(one, **(ENTERING | {"variance": 1.44}))
    np.testing.assert_allclose(mixed.variance[1], scaled.variance[1], rtol=1e-12)
    np.testing.assert_allclose(mixed.correlation[1], scaled.correlation[1], rtol=1e-12)
    np.testing.assert_allclose(mixed.grad_variance[0], 1.44 * scaled.grad_variance[0], rtol=1e-9)
    none = moments.predict(one.replace(layers=3, input_mix=(1.0, 0.0)), **ENTERING)
    np.testing.assert_allclose(
        none.grad_variance, moments.predict(one.replace(layers=3), **ENTERING).grad_variance
    )


@pytest.mark.parametrize("given", [3, (0, 1), (1.0, -1.0), [(1.0, 0.1)] * 2, (1.0, np.inf)])
def test_input_mixes_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(DomainError, match="input_mix"):
        model(None, input_mix=given)


def test_what_does_not_follow_the_input_is_refused_by_name() -> None:
    of = model(None, causal=True, embedding=moments.Embedding(40, 1.0), head=HEAD)
    of = of.replace(input_mix=[(1.1, 0.2), (1.0, 0.1), (1.0, 0.1)])
    assert Transformer.from_dict(of.to_dict()) == of
    predicted = pickle.loads(pickle.dumps(moments.predict(of, token_ids=np.arange(12))))
    with pytest.raises(DomainError, match="input_mix"):
        _ = predicted.grad_variance_band
    with pytest.raises(DomainError, match="input_mix"):
        predicted.after("sgd", learning_rate=0.1)
    for name, changes in {"norm": {"norm": "post"}, "skip_scale": {"skip_scale": 0.5}}.items():
        with pytest.raises(DomainError, match=name):
            of.replace(**changes)
    with pytest.raises(DomainError, match="streams"):
        of.replace(streams=STATIC["constants"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "extra", [{"streams": STATIC["constants"]}, {"input_mix": (1.1, 0.2)}], ids=["streams", "input"]
)
def test_several_configurations_are_each_as_one(extra: dict[str, Any], causal: bool) -> None:
    of = model(None, seq_len=32, causal=causal).replace(**extra)
    variances = np.array([0.5, 1.0, 2.0])
    several = moments.predict(of, variance=variances, correlation=0.1)
    one = moments.predict(of, variance=2.0, correlation=0.1)
    for quantity in ("variance", "correlation", "grad_variance"):
        np.testing.assert_allclose(getattr(several, quantity)[2], getattr(one, quantity), rtol=1e-6)
