"""Attention sinks and gates on attention's output, against draws of all weights.

Numbers stored here are means over 300 draws (`moments.simulate(..., seeds=300, batch=4)`), relative
standard errors beside them.
"""

import dataclasses

import numpy as np
import pytest
import torch

import moments

WIDTH, HEADS, HIDDEN, TOKENS = 96, 6, 128, 12
WEIGHTS = moments.Weights(
    query=1.6 / WIDTH,
    key=1 / WIDTH,
    value=1 / WIDTH,
    output=1 / WIDTH,
    ffn_in=1 / WIDTH,
    ffn_out=1 / HIDDEN,
)


def model(layers: int = 1, **fields: object) -> moments.Transformer:
    given = {"normalization": "rmsnorm", "activation": "gelu", "weights": WEIGHTS} | fields
    return moments.Transformer(layers, WIDTH, HEADS, TOKENS, HIDDEN, **given)


def predicted(declared: moments.Transformer, correlation: float, tokens: object) -> dict:
    p = moments.predict(
        declared,
        variance=1.0,
        correlation=correlation,
        grad_variance=1.0,
        grad_correlation=0.2,
        tokens=tokens,
    )
    found = p.weight_gradients().set_index("weight").squared_norm.to_dict()
    return found | {"variance": p.variance[-1], "grad_variance": p.grad_variance[0]}


SINKS = {
    # causal, rotary with 2 key heads, correlation: mean and relative standard error
    (True, False, 0.6): {
        "query": (6866.2, 0.012),
        "key": (11195.8, 0.012),
        "value": (201828.0, 0.009),
        "output": (203649.0, 0.008),
        "attention_sink": (56.14, 0.041),
    },
    (False, False, 0.6): {
        "query": (5630.0, 0.012),
        "key": (9336.7, 0.013),
        "value": (238225.0, 0.008),
        "output": (240220.0, 0.007),
        "attention_sink": (25.19, 0.048),
    },
    (True, True, 0.6): {
        "query": (6590.1, 0.012),
        "key": (10848.5, 0.011),
        "value": (203716.0, 0.010),
        "output": (203695.0, 0.009),
        "attention_sink": (53.03, 0.042),
    },
    (True, False, 0.1): {
        "query": (13813.6, 0.007),
        "key": (22959.7, 0.008),
        "value": (91949.5, 0.007),
        "output": (92507.8, 0.007),
        "attention_sink": (21.84, 0.037),
    },
}


@pytest.mark.parametrize(("causal", "rotary", "correlation"), SINKS)
def test_weight_gradients_behind_a_sink(causal: bool, rotary: bool, correlation: float) -> None:
    extra = {"rotary": moments.Rotary(), "kv_heads": 2} if rotary else {}
    declared = model(causal=causal, attention_sink=0.5, **extra)
    for tokens in (True, None) if causal else (True, None, False):
        found = predicted(declared, correlation, tokens)
        for name, (mean, error) in SINKS[causal, rotary, correlation].items():
            bound = 0.03 if name != "attention_sink" else 0.06
            assert abs(found[name] / mean - 1) < bound + 2 * error, (name, tokens)


GATES = {
    ("elementwise", True, 0.6): {
        "query": (1565.6, 0.015),
        "key": (2577.1, 0.016),
        "value": (90796.7, 0.009),
        "output": (90962.4, 0.009),
        "attention_gate": (10582.4, 0.011),
    },
    ("elementwise", False, 0.1): {
        "query": (4864.7, 0.008),
        "key": (8273.7, 0.009),
        "value": (27215.6, 0.007),
        "output": (27346.1, 0.008),
        "attention_gate": (2290.1, 0.007),
    },
    ("headwise", True, 0.1): {
        "query": (4942.7, 0.011),
        "key": (8266.5, 0.012),
        "value": (38193.1, 0.009),
        "output": (38119.6, 0.009),
        "attention_gate": (3473.8, 0.011),
    },
    ("headwise", False, 0.6): {
        "query": (1628.7, 0.018),
        "key": (2734.5, 0.020),
        "value": (85556.7, 0.012),
        "output": (85929.7, 0.012),
        "attention_gate": (9757.6, 0.021),
    },
}


@pytest.mark.parametrize(("kind", "causal", "correlation"), GATES)
def test_weight_gradients_behind_a_gate(kind: str, causal: bool, correlation: float) -> None:
    weights = dataclasses.replace(WEIGHTS, attention_gate=1 / WIDTH)
    declared = model(causal=causal, attention_gate=kind, weights=weights)
    for tokens in (True, None):
        found = predicted(declared, correlation, tokens)
        for name, (mean, error) in GATES[kind, causal, correlation].items():
            assert abs(found[name] / mean - 1) < 0.025 + 2 * error, (name, tokens)


def test_a_gate_at_zero_halves_what_it_multiplies() -> None:
    plain = model(causal=True)
    weights = dataclasses.replace(WEIGHTS, attention_gate=1e-12)
    gated = plain.replace(attention_gate="elementwise", weights=weights)
    halved = plain.replace(branch_scale=[(0.5, 1.0)])
    one, other = (moments.predict(m, variance=1.0, correlation=0.3) for m in (gated, halved))
    assert one.variance == pytest.approx(other.variance, rel=1e-9)
    # what goes through the gate, whose matrix is next to nothing, adds nothing
    assert one.grad_variance == pytest.approx(other.grad_variance, rel=1e-6)
    assert one.grad_variance_band == pytest.approx(other.grad_variance_band, rel=0.02)


def test_a_sink_beside_few_keys_of_large_logits() -> None:
    """As GPT-OSS has them in its windows; means over 150 draws, each with relative errors."""
    weights = moments.Weights.normal(0.0144)
    given = {"causal": True, "window": 6, "temperature": 1 / 1.813, "attention_sink": 0.0144}
    declared = moments.Transformer(
        1, 64, 4, 20, 64, d_head=64, normalization="rmsnorm", weights=weights, **given
    )
    p = moments.predict(declared, variance=1.0, correlation=0.005, tokens=True)
    heads = p.to_frame().set_index("site").variance["attention.heads"]
    assert heads == pytest.approx(0.34948, rel=0.01)  # .0010
    # without the law of its own squares it would be .3234


def test_gains_on_branches() -> None:
    """LayerScale's gradients, and everything else as without it."""
    declared = model(layers=2, causal=True, branch_scale=[(0.3, 0.1), (0.2, 0.5)])
    learned = declared.replace(layer_scale=True)
    given = {"variance": 1.0, "correlation": 0.4, "grad_variance": 1.0, "grad_correlation": 0.2}
    one, other = (moments.predict(m, **given) for m in (declared, learned))
    assert one.grad_variance == pytest.approx(other.grad_variance, rel=1e-12)
    assert one.grad_variance_band == pytest.approx(other.grad_variance_band, rel=1e-6)
    rows = other.weight_gradients().set_index(["layer", "weight"]).squared_norm
    m = moments.simulate(learned, seeds=48, batch=2, **given)
    drawn = m.weight_gradients().set_index(["layer", "weight"])
    assert set(rows.index) == set(drawn.index)
    for where in rows.index:
        if "layer_scale" in where[1]:
            mean, error = drawn.loc[where, ["squared_norm", "squared_norm_stderr"]]
            assert abs(rows[where] / mean - 1) < 0.03 + 2.5 * error / mean, where
    with pytest.raises(moments.DomainError, match="branch_scale"):
        learned.replace(branch_scale=0.0)


def test_one_key_beside_a_sink_is_a_sigmoid() -> None:
    # one token: its weight is sigmoid(logit - sink), and the branch its value
    declared = model(attention_sink=2.0)
    declared = declared.replace(seq_len=1, weights=dataclasses.replace(WEIGHTS, ffn_out=0.0))
    variance = 1.6 + 2.0  # of the logit and of the sink
    z, w = np.polynomial.hermite_e.hermegauss(80)
    kept = (w / w.sum()) @ (1 / (1 + np.exp(-np.sqrt(variance) * z))) ** 2
    found = moments.predict(declared, variance=1.0, correlation=0.0).variance
    assert found[-1] == pytest.approx(1 + kept, rel=2e-3)


def test_the_twin_has_one_more_key_of_value_zero() -> None:
    from moments.simulation.attention import self_attention

    declared = model(causal=True, attention_sink=1.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    drawn = {
        name: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
        for name in ("query", "key", "value")
    }
    sink = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    given = declared, 1, x, lambda z, name: z @ drawn[name], None, generator
    found = self_attention(*given, None, {"attention_sink": sink})
    q, k, v = (
        (x @ drawn[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    logits = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    terms = logits.exp() * mask
    expected = terms @ v / (terms.sum(-1, keepdim=True) + sink.exp()[:, None, None])
    assert torch.allclose(found, expected.transpose(1, 2).flatten(-2))


def test_layers_may_differ_in_their_sinks() -> None:
    per_layer = model(layers=2, attention_sink=(None, 0.0))
    assert per_layer.attention_sinks == (None, 0.0)
    assert moments.Transformer.from_dict(per_layer.to_dict()) == per_layer
    names = moments.predict(per_layer).weight_gradients()
    assert list(names[names.weight == "attention_sink"].layer) == [2]


def test_sinks_are_refused_where_nothing_knows_them() -> None:
    with pytest.raises(moments.DomainError, match="attention_sink"):
        model(attention_sink=-1.0)
    with pytest.raises(moments.DomainError, match="attention_sink"):
        model(layers=2, attention_sink=(0.0,))
    with pytest.raises(moments.DomainError, match="attention_sink"):
        moments.predict(model(normalization="layernorm", attention_sink=0.0), theory="published")
