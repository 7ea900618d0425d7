"""Experts that give back what they read, and what is added a layer later (LongCat Flash)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import moments
from moments import Experts
from moments.errors import DomainError
from moments.layers.experts.routing import Router, together

D, LENGTH = 64, 12
EXPERTS = Experts(
    *(24, 8), d_ff=32, normalised="all", scale=1.5, router_variance=1 / D, shared=64, identity=8
)
GIVEN: dict[str, Any] = {"variance": 1.0, "correlation": 0.4}
GIVEN |= {"grad_variance": 1.0, "grad_correlation": 0.2}


def model_of(*ffns: Any, **changes: Any) -> moments.Transformer:
    fields = {"normalization": "rmsnorm", "activation": "swiglu", "causal": True} | changes
    return moments.Transformer(len(ffns), D, 4, LENGTH, d_ff=64, ffn=ffns, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("normalised", ["all", "chosen"])
def test_gates_of_several_experts_are_those_of_drawn_logits(normalised: str) -> None:
    """The mean, the second moment and the Jacobian's, by torch's own derivatives."""
    torch = pytest.importorskip("torch")
    router, count, s, r = Router(10, 4, normalised=normalised, scale=1.5), 4, 0.8, 0.6
    random = np.random.default_rng(5)
    one, two = random.standard_normal((2, 20_000, 10)) * math.sqrt(s)
    found = []
    for z in (one, r * one + math.sqrt(1 - r * r) * two):
        logits = torch.tensor(z, requires_grad=True)
        weights = logits.softmax(-1)
        chosen = weights.topk(4, -1).indices
        gates = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
        if normalised == "chosen":
            gates = gates / gates.sum(-1, keepdim=True)
        given = 1.5 * gates[:, :count].sum(-1)
        (slopes,) = torch.autograd.grad(given.sum(), logits)
        found.append((given.detach().numpy(), slopes.numpy()))
    (g, t), (other, steep) = found
    mean, pairs = together(router, count, s, r)
    lean = (g + other) / 2 - float(mean)
    wanted = [g * other, (t * steep).sum(-1), g * other * lean, (t * steep).sum(-1) * lean]
    assert float(mean) == pytest.approx(g.mean(), abs=4 * g.std() / math.sqrt(len(g)))
    for value, drawn in zip(pairs, wanted, strict=True):
        assert value == pytest.approx(drawn.mean(), abs=5 * drawn.std() / math.sqrt(len(g)))


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [True, False])
def test_layers_are_what_their_twins_compute(delayed: bool) -> None:
    pytest.importorskip("torch")
    model = model_of(replace(EXPERTS, delayed=delayed), None)
    found = moments.predict(model, **GIVEN)
    drawn = moments.simulate(model, **GIVEN, seeds=32, batch=4)
    for quantity, bound in (("variance", 0.03), ("grad_variance", 0.05)):
        value, wanted = getattr(found, quantity), getattr(drawn, quantity)
        error: Any = getattr(drawn, f"{quantity}_stderr")
        assert np.all(np.abs(value - wanted) < bound * wanted + 2.5 * error), quantity
    correlations = np.abs(found.correlation - drawn.correlation)
    assert np.all(correlations < 0.015 + 2.5 * np.asarray(drawn.correlation_stderr))
    ours, theirs = (one.weight_gradients().set_index(["layer", "weight"]) for one in (found, drawn))
    for place, row in theirs.iterrows():
        value, wanted = ours.squared_norm[place], row.squared_norm
        assert abs(value - wanted) < 0.08 * wanted + 2.5 * row.squared_norm_stderr, place


def test_the_stream_grows_along_itself() -> None:
    """Without what experts give back the same layers have less of the stream."""
    with_, without = (
        moments.predict(model_of(one, None), **GIVEN)
        for one in (EXPERTS, replace(EXPERTS, identity=0, delayed=True))
    )
    assert with_.variance[-1] > 1.1 * without.variance[-1]
    rows = with_.weight_gradients().set_index(["layer", "weight"]).squared_norm
    assert rows[1, "router"] > 0


def test_what_is_added_later_is_not_read_before() -> None:
    """What the next layer's blocks read does not know of it, and all is there behind that layer."""
    late, at_once = (
        moments.predict(model_of(replace(EXPERTS, delayed=delayed), None), **GIVEN)
        for delayed in (True, False)
    )
    assert late.variance[1] < at_once.variance[1]
    assert late.variance[2] == pytest.approx(at_once.variance[2], rel=0.15)


def test_what_cannot_be_is_refused() -> None:
    for changes, word in (
        ({"identity": 24}, "identity"),
        ({"shared": 0}, "shared"),
        ({"output_norms": True}, "output_norms"),
    ):
        with pytest.raises(DomainError, match=word):
            replace(EXPERTS, **changes)
    delayed = replace(EXPERTS, delayed=True)
    with pytest.raises(DomainError, match="layer behind them"):
        model_of(None, delayed)
    with pytest.raises(DomainError, match="layer behind them"):
        model_of(delayed, delayed, None)
    with pytest.raises(DomainError, match="norm"):
        model_of(EXPERTS, None, norm="post")
    with pytest.raises(DomainError, match="normalization"):
        model_of(EXPERTS, None, normalization="layernorm")


@pytest.mark.slow
def test_the_reader_makes_two_layers_of_one() -> None:
    config = {"model_type": "longcat_flash", "num_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
    config |= {"q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "head_dim": 8}
    config |= {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3, "vocab_size": 100}
    config |= {"qk_nope_head_dim": 8, "v_head_dim": 16}
    model = moments.from_huggingface(config, seq_len=16)
    first, second = model.ffns[:2]
    assert (model.layers, second, model.d_ff) == (4, None, 96)
    assert isinstance(first, Experts)
    assert (first.experts, first.identity, first.chosen, first.delayed) == (12, 4, 3, True)
    assert (first.shared, first.d_ff, first.scale, first.normalised) == (96, 32, 6.0, "all")
    assert model.mixers[0].query_factor == 2.0
    assert model.mixers[0].kv_factor == pytest.approx(math.sqrt(2))
    with pytest.warns(moments.ValidityWarning, match="head_dim"):
        moments.from_huggingface(config | {"head_dim": 16}, seq_len=16)
    config |= {"routed_scaling_factor": 0.2, "initializer_range": 0.1}
    model = moments.from_huggingface(config, seq_len=16)
    p = moments.predict(model, token_ids=np.arange(16)[None])
    with pytest.raises(DomainError, match="give back"):
        p.after("sgd", 0.1)
