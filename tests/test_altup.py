"""AltUp, Laurel and sparse gates, against draws, quadrature and Gemma 3n's own module."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad

import moments
from moments import AltUp, DomainError, FeedForward, Laurel, Transformer, Weights
from moments.formulas.activation import GELU_TANH, above_quantile

torch: Any = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from moments.simulation.network import LayerTwin  # noqa: E402
from moments.simulation.parameters import draw_weights  # noqa: E402

draws: Any = importlib.import_module("small_draws")
STREAMS = AltUp(3, *(1 / 64,) * 5)
HALF = [[math.sqrt(0.5), 1.0]] * 2


def model(**changes: Any) -> Transformer:
    fields: dict[str, Any] = {"layers": 2, "d_model": 64, "heads": 4, "seq_len": 8, "norm": "pre"}
    fields |= {"normalization": "rmsnorm", "norm_epsilon": 1e-6, "causal": True, "streams": STREAMS}
    return Transformer(**(fields | {"weights": Weights.normal(1 / 64)} | changes))


@pytest.mark.parametrize("name", draws.ALTERNATING)
def test_moments_and_gradients_are_those_of_the_twin(name: str) -> None:
    measured = draws.stored()[f"alternating/{name}"]["found"]
    predicted = moments.predict(draws.alternating(name), **draws.ENTERING)
    bounds = {"variance": 0.02, "correlation": 0.015, "grad_variance": 0.05}
    for quantity, bound in (bounds | {"grad_correlation": 0.01}).items():
        value, error = np.array(measured[quantity])
        gap = np.abs(getattr(predicted, quantity) - value)
        scale = 1.0 if "correlation" in quantity else value
        assert np.all(gap < bound * scale + 2.5 * error), quantity
    for layer, weight, norm in predicted.weight_gradients().itertuples(index=False):
        value, error = measured["norms"].pop(f"{layer}.{weight}")
        small = weight.startswith("streams.") or weight.endswith(".gain")
        bound = 0.1 if small else 0.06  # docs/theory/streams.md, Measured
        assert abs(norm - value) <= bound * value + 2.5 * error, (layer, weight)
    assert not measured["norms"]


def test_only_the_gain_of_a_block_behind_a_gain_of_zero_has_a_gradient() -> None:
    rows = moments.PerLayerEmbedding(16, *(1 / 64,) * 4)
    of = model(per_layer_embedding=rows, embedding=moments.Embedding(40, 1.0), norm_affine=True)
    of = of.replace(activation="gelu")  # whose slope at 0 is not
    ids, entering = np.arange(16).reshape(2, 8), {"grad_variance": 1.0}
    predicted = moments.predict(of, token_ids=ids, **entering).weight_gradients()
    measured = moments.simulate(of, token_ids=ids, seeds=40, batch=2, seed=3, **entering)
    ours = predicted.set_index(["layer", "weight"]).squared_norm
    theirs = measured.weight_gradients().set_index(["layer", "weight"])
    parts = [key for key in theirs.index if key[1].startswith("per_layer")]
    assert len(parts) == 14
    for key in parts:
        value, error = theirs.loc[key, ["squared_norm", "squared_norm_stderr"]]
        assert abs(ours[key] - value) <= 0.05 * value + 2.5 * error, key
    assert {key[1] for key in parts if theirs.squared_norm[key] > 0} == {"per_layer.gain"}


@pytest.mark.parametrize("r", [0.2, 0.9])
def test_laws_above_a_quantile_are_those_of_quadrature(r: float) -> None:
    """The slope jumps within a cell of the rule, which its law is off by."""
    variance, share = 0.8, 0.9
    laws, start = above_quantile(GELU_TANH, share, variance), 1.2815515655446 * variance**0.5
    given = {"x_variance": variance, "x_other_variance": variance, "x_correlation": r}
    mean = laws.law("mean")(x_variance=variance)
    pair = laws.law("covariance")(**given) + mean**2
    slope = laws.law("grad_covariance")(**given, grad_covariance=1.0)

    def gelu(x: float) -> float:
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def expected(function: Any) -> float:
        rest = math.sqrt(variance * (1 - r * r))

        def density(x: float, sd: float) -> float:
            return math.exp(-0.5 * (x / sd) ** 2) / (sd * math.sqrt(2 * math.pi))

        def inner(x: float) -> float:
            peak = [max(r * x, start)]
            inside = quad(
                lambda y: function(y - start) * density(y - r * x, rest), start, 8, points=peak
            )[0]
            return function(x - start) * density(x, variance**0.5) * float(inside)

        return float(quad(inner, start, 8)[0])

    assert pair == pytest.approx(expected(gelu), rel=1e-5)
    assert slope == pytest.approx(
        expected(lambda x: (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5), rel=0.005
    )


def test_the_twin_s_layer_is_that_of_transformers() -> None:
    """One whole layer with AltUp, Laurel and sparse gates, with the same random numbers."""
    pytest.importorskip("transformers")
    transformers: Any = importlib.import_module("transformers")
    folder = "transformers.models.gemma3n.modeling_gemma3n"
    modeling: Any = importlib.import_module(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 1, "laurel_rank": 8}
    sizes |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.8], "vocab_size": 40}
    sizes |= {"altup_num_inputs": 3, "hidden_size_per_layer_input": 8, "pad_token_id": None}
    config = transformers.Gemma3nTextConfig(**sizes, vocab_size_per_layer_input=40)
    of = moments.from_huggingface(config, seq_len=8)
    random = torch.Generator().manual_seed(0)
    weights = draw_weights(of, 1, random, torch.float32)
    module = modeling.Gemma3nTextModel(config).eval()
    names = {"self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value"}
    names |= {"self_attn.o_proj": "output", "mlp.gate_proj": "gate", "mlp.up_proj": "ffn_in"}
    names |= {"mlp.down_proj": "ffn_out", "laurel.linear_left": "laurel_down"}
    names |= {"laurel.linear_right": "laurel_up", "altup.modality_router": "streams.router"}
    names |= {"altup.prediction_coefs": "streams.prediction"}
    names |= {"altup.correction_coefs": "streams.correction"}
    with torch.no_grad():
        for theirs, ours in names.items():
            module.layers[0].get_submodule(theirs).weight.copy_(weights[ours].T)
        for end, name in (("in", "altup_projections"), ("out", "altup_unembed_projections")):
            for part, linear in zip(
                weights[f"streams.{end}"].split(64, 1), getattr(module, name), strict=True
            ):
                linear.weight.copy_(part.T)
        x = torch.randn(2, 8, 64, generator=random)
        ids = torch.randint(40, (2, 8), generator=random)
        expected = module(inputs_embeds=x).last_hidden_state
        layer = LayerTwin(of, 1, weights, random, lambda t, _: t, sources={0: x}, read=ids)
        y = layer.run(x)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_by_name() -> None:
    for name, changes in {
        "norm": {"norm": "post"},
        "normalization": {"normalization": "layernorm"},
        "layernorm_scaling": {"layernorm_scaling": True},
        "norm_groups": {"norm_groups": 4},
    }.items():
        with pytest.raises(DomainError, match=name):
            model(**changes)
        with pytest.raises(DomainError, match=name):
            model(streams=None, laurel=Laurel(8, 0.1, 0.1), **changes)
    with pytest.raises(DomainError, match="streams = 1"):
        STREAMS.replace(streams=1)
    with pytest.raises(DomainError, match="branch_scale"):
        model(laurel=Laurel(8, 0.1, 0.1), skip_scale=HALF)
    with pytest.raises(DomainError, match="gated"):
        model(ffn=FeedForward(64, sparsity=0.5))
    with pytest.raises(DomainError, match="sparsity"):
        FeedForward(64, sparsity=1.5)
    with pytest.raises(DomainError, match="altup_active_idx"):
        moments.from_huggingface({"model_type": "gemma3n_text", "altup_active_idx": 1})


def test_what_follows_one_stream_alone_is_refused() -> None:
    of = model(laurel=Laurel(8, 0.1, 0.1), skip_scale=HALF, branch_scale=HALF)
    assert Transformer.from_dict(of.to_dict()) == of
    predicted = moments.predict(of, correlation=0.3)
    with pytest.raises(DomainError, match="AltUp"):
        _ = predicted.variance_band
    with pytest.raises(DomainError, match="AltUp"):
        predicted.after("sgd", learning_rate=0.1)
    for one in (of, model(), of.replace(streams=None)):
        with pytest.raises(DomainError, match="block_variance"):
            moments.solve(one, "block_variance", target=1.0)
    head = moments.Head(vocab_size=40, tied=False, weight_variance=0.01)
    text = of.replace(streams=None, embedding=moments.Embedding(40, 1.0), head=head)
    with pytest.raises(DomainError, match="laurel"):
        moments.predict(text, token_ids=np.arange(8)).after("sgd", 0.1)
    frame = predicted.streams()
    assert frame["layer"].tolist() == [1, 2]
    assert np.all(np.diff(frame["likeness"]) > 0)


def test_classes_and_tokens_agree() -> None:
    of = model(seq_len=12, layers=3, embedding=moments.Embedding(40, 1.0))
    of = of.replace(head=moments.Head(vocab_size=40, tied=False, weight_variance=0.01))
    classes, by_token = moments.predict(of), moments.predict(of, tokens=True)
    for quantity in ("variance", "correlation", "grad_variance"):
        one, two = (getattr(p, quantity) for p in (classes, by_token))
        np.testing.assert_allclose(one, two, rtol=0.02, atol=0.002)
    norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (classes, by_token)]
    ratio = (norms[0] / norms[1]).squared_norm
    assert np.all(np.abs(ratio - 1) < 0.03)
