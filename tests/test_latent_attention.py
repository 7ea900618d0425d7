"""Latent attention against draws of all weights.

Stored numbers are means over 200 draws of `moments.simulate(..., seeds=200, batch=4)`, with their
relative standard errors; ranks of 32 and 48 are small, so that terms of order 1/rank would show.
"""

import dataclasses

import numpy as np
import pytest
import torch

import moments

WIDTH, HEADS, HIDDEN = 96, 6, 128
BLOCK = moments.LatentAttention(
    kv_rank=32,
    nope_dim=12,
    rope_dim=8,
    value_dim=16,
    kv_down=1.5 / WIDTH,
    query_rank=48,
    norm_epsilon=0.0,
)


def model(block: moments.LatentAttention = BLOCK, **fields: object) -> moments.Transformer:
    weights = moments.Weights(
        query=2 / (block.query_rank or WIDTH),
        key=1 / block.kv_rank,
        value=1 / block.kv_rank,
        output=1 / (HEADS * block.value_dim),
        ffn_in=1 / WIDTH,
        ffn_out=1 / HIDDEN,
    )
    given: dict = {
        "layers": 1,
        "normalization": "rmsnorm",
        "activation": "gelu",
        "norm_affine": True,
        "weights": weights,
        "mixer": block,
    }
    given |= fields
    return moments.Transformer(d_model=WIDTH, heads=HEADS, seq_len=12, d_ff=HIDDEN, **given)


DRAWN = {
    "turned": {
        "attention.query_latent.gain": (136.60, 0.028),
        "attention.kv_latent.gain": (3355.2, 0.024),
        "query_down": (8981.2, 0.020),
        "kv_down": (212069.0, 0.012),
        "query": (3295.1, 0.017),
        "key": (2309.5, 0.019),
        "value": (100940.0, 0.009),
        "output": (301551.0, 0.009),
        "attention.norm.gain": (3302.8, 0.018),
    },
    "queries of tokens": {
        "attention.kv_latent.gain": (1355.3, 0.022),
        "kv_down": (96095.0, 0.010),
        "query": (20067.5, 0.010),
        "key": (7455.8, 0.011),
        "value": (34871.9, 0.009),
        "output": (104008.0, 0.009),
        "attention.norm.gain": (1846.7, 0.015),
    },
    "factors": {
        "attention.query_latent.gain": (1673.2, 0.019),
        "attention.kv_latent.gain": (3500.3, 0.018),
        "query_down": (113121.0, 0.011),
        "kv_down": (252545.0, 0.007),
        "query": (42005.9, 0.009),
        "key": (37834.5, 0.011),
        "value": (69753.6, 0.008),
        "output": (209345.0, 0.008),
    },
}
MODELS = {
    "turned": (model(causal=True, rotary=moments.Rotary()), 0.6),
    "queries of tokens": (model(dataclasses.replace(BLOCK, query_rank=None)), 0.1),
    "factors": (
        model(dataclasses.replace(BLOCK, query_factor=1.5, kv_factor=1.3), rotary=moments.Rotary()),
        0.1,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weight_gradients(name: str) -> None:
    declared, correlation = MODELS[name]
    for tokens in (True, None) if declared.causal else (True, False):
        p = moments.predict(
            declared,
            variance=1.0,
            correlation=correlation,
            grad_variance=1.0,
            grad_correlation=0.2,
            tokens=tokens,
        )
        found = p.weight_gradients().set_index("weight").squared_norm
        for matrix, (mean, error) in DRAWN[name].items():
            assert abs(found[matrix] / mean - 1) < 0.05 + 2 * error, (matrix, tokens)


def test_a_stack_of_it_is_predicted_as_it_is_simulated() -> None:
    declared = model(layers=3, causal=True, rotary=moments.Rotary())
    p = moments.predict(declared, variance=1.0, correlation=0.3)
    m = moments.simulate(declared, variance=1.0, correlation=0.3, seeds=24, batch=2)
    for name, bound in (("variance", 0.02), ("grad_variance", 0.05)):
        ratio = getattr(p, name) / getattr(m, name)
        noise = getattr(m, f"{name}_stderr") / getattr(m, name)
        assert np.all(np.abs(ratio - 1) < bound + 2.5 * noise), name
    assert np.all(np.abs(p.correlation - m.correlation) < 0.015 + 2.5 * m.correlation_stderr)
    low, high = p.grad_variance_band
    assert np.all((low < m.grad_variance) & (m.grad_variance < high))


def test_the_twin_is_latent_attention_written_out() -> None:
    from moments.simulation.network import BLOCK_TWINS, LayerTwin
    from moments.simulation.parameters import draw_weights

    declared = model(causal=True)
    generator = torch.Generator().manual_seed(1)
    weights = draw_weights(declared, 1, generator, torch.float64)
    x = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
    layer = LayerTwin(declared, 1, weights, generator, lambda tensor, _: tensor)
    found = BLOCK_TWINS[type(BLOCK)](BLOCK, layer, x)

    def unit(z: torch.Tensor) -> torch.Tensor:
        return z / z.square().mean(-1, keepdim=True).sqrt()

    asked = unit(x @ weights["query_down"]) @ weights["query"]
    down = x @ weights["kv_down"]
    latent, shared = unit(down[..., :32]), down[..., 32:]
    out = []
    for h in range(HEADS):
        q = asked[..., 20 * h : 20 * h + 20]
        k = torch.cat([latent @ weights["key"][:, 12 * h : 12 * h + 12], shared], -1)
        logits = (q @ k.mT / 20**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        out.append(logits.softmax(-1) @ latent @ weights["value"][:, 16 * h : 16 * h + 16])
    assert torch.allclose(found, torch.cat(out, -1) @ weights["output"])


def test_positions_turn_the_shared_part_alone() -> None:
    # without a shared part's variance positions are nothing
    still = dataclasses.replace(BLOCK, kv_down=1e-9)
    weights = dataclasses.replace(model().weights, key=0.05)
    one, other = (
        moments.predict(model(still, causal=True, rotary=rotary, weights=weights), tokens=True)
        for rotary in (None, moments.Rotary())
    )
    assert one.grad_variance == pytest.approx(other.grad_variance, rel=1e-3)


def test_what_it_does_not_know_is_refused() -> None:
    for fields, word in (
        ({"qk_norm": "rmsnorm"}, "qk_norm"),
        ({"attention_sink": 0.0}, "attention_sink"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"alibi": True}, "alibi"),
        ({"rotary": moments.Rotary(fraction=0.5)}, "rotary.fraction"),
        ({"biases": moments.Biases()}, "biases"),
    ):
        with pytest.raises(moments.DomainError, match=word):
            model(**fields)
    with pytest.raises(moments.DomainError, match="query_down"):
        dataclasses.replace(BLOCK, query_rank=None, query_down=0.1)
    assert moments.Transformer.from_dict(model().to_dict()) == model()
