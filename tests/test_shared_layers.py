"""Layers that share one set of weights, against draws of the twin and of transformers' ALBERT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, Transformer, ValidityWarning, Weights
from moments.model.weights import Biases

IDS = np.random.default_rng(0).integers(0, 300, (1, 16))
LAST = {"grad_variance": 1.0, "grad_correlation": 0.2}


def stack(variance: float, **changes: Any) -> Transformer:
    fields: dict[str, Any] = {
        "norm": "post",
        "activation": "gelu_tanh",
        "weights": Weights.normal(variance),
        "biases": Biases(),
        "norm_affine": True,
        "norm_epsilon": 1e-12,
        "shared_layers": True,
        "embedding": Embedding(300, 0.04, 0.04, norm=True, norm_epsilon=1e-12),
    }
    return Transformer(4, 192, 4, 16, **(fields | changes))


# Bounds, relative but the correlation's, beyond two standard errors; of queries and keys their own
# (docs/limits.md): overlaps of tokens count with 1/width, as they enter layer 1
CASES = {
    "small": (stack(0.003), 0.02),
    "strong": (stack(0.008), 0.06),
    "dropped": (stack(0.004, dropout=0.2, attention_dropout=0.3), 0.03),
    "rmsnorm, relu": (stack(0.006, normalization="rmsnorm", activation="relu"), 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_moments_and_gradients_are_those_of_the_twin(name: str) -> None:
    pytest.importorskip("torch")
    model, bound = CASES[name]
    p = moments.predict(model, token_ids=IDS, **LAST)
    s = moments.simulate(model, token_ids=IDS, seeds=20, **LAST)
    for quantity, allowed in (("variance", 0.02), ("correlation", 0.015), ("grad_variance", bound)):
        draws = s.samples[quantity]
        error = draws.std(0, ddof=1) / len(draws) ** 0.5
        gap = np.abs(getattr(p, quantity) - draws.mean(0))
        scale = 1.0 if quantity == "correlation" else draws.mean(0)
        assert np.all(gap < allowed * scale + 2 * error), quantity
    ours, drawn = (
        frame[frame.layer.between(1, 4)].groupby("weight").sum()
        for frame in (p.weight_gradients(), s.weight_gradients())
    )
    for weight in ours.index.drop("query.bias"):  # which is next to nothing
        error = drawn.squared_norm_stderr[weight]
        allowed = 0.2 if weight in ("query", "key") else 0.08
        gap = abs(ours.squared_norm[weight] - drawn.squared_norm[weight])
        assert gap < allowed * drawn.squared_norm[weight] + 2 * error, weight


def test_sharing_makes_tokens_alike_and_gradients_coherent() -> None:
    """Of layers of their own tokens stay apart longer; a shared matrix gathers more."""
    shared = stack(0.003)
    p, q = (
        moments.predict(m, token_ids=IDS, **LAST)
        for m in (shared, stack(0.003, shared_layers=False))
    )
    assert p.correlation[-1] > q.correlation[-1] + 0.02
    norms = [f.weight_gradients().groupby("weight").squared_norm.sum()["ffn_in"] for f in (p, q)]
    assert norms[0] > 1.1 * norms[1]


def test_one_layer_is_one_layer() -> None:
    """The engine's own layer, whose finite width is not in the map: 1/width apart."""
    model = stack(0.003, embedding=None).replace(layers=1)
    given = {"correlation": 0.3, **LAST}
    p = moments.predict(model, **given)
    q = moments.predict(model.replace(shared_layers=False), **given)
    assert p.correlation == pytest.approx(q.correlation, abs=3e-3)
    assert p.grad_variance == pytest.approx(q.grad_variance, rel=0.02)
    rows = [f.weight_gradients().set_index("weight").squared_norm for f in (p, q)]
    for weight in ("query", "key", "value", "output", "ffn_in", "ffn_out", "ffn_in.bias"):
        assert rows[0][weight] == pytest.approx(rows[1][weight], rel=0.05), weight


# AlbertForMaskedLM of transformers 5.23 at ALBERT-base's width and depth (768, 12 heads, 12 layers,
# 128-wide tables of 1,000 rows, initializer_range .02), means of 16 draws on 64 tokens of text.
CORRELATION = [0.3434, 0.3689, 0.4265, 0.4935, 0.5603, 0.6236, 0.6818, 0.7342, 0.7802, 0.8199]
CORRELATION += [0.8535, 0.8815, 0.9045]
GRADIENT = [0.4704, 0.0156, 0.0128, 0.0120, 0.0122, 0.0131, 0.0147, 0.0172, 0.0211, 0.0272]
GRADIENT += [0.0376, 0.0588, 0.1134]
NORMS = {"query": (0.00855, 0.0007), "key": (0.0089, 0.0008)}
NORMS |= {
    "value": (27.2, 2.5),
    "output": (27.6, 2.5),
    "ffn_in": (38.5, 3.2),
    "ffn_out": (40.8, 3.2),
}


def test_albert_is_what_its_module_is() -> None:
    pytest.importorskip("torch")
    from moments.torch.text import mask_tokens, tokenize

    ids, targets = mask_tokens(tokenize(1000, 64, 1), 1000, 0)
    config = json.loads(
        (Path(__file__).parent / "released_configs" / "albert-base-v2.json").read_text()
    )
    model = moments.from_huggingface(config | {"vocab_size": 1000}, seq_len=64)
    share = float((targets >= 0).mean())
    model = model.replace(head=model.head.replace(target_share=share))
    p = moments.predict(model, token_ids=ids)
    assert p.correlation == pytest.approx(CORRELATION, abs=0.015)
    assert 1e6 * p.grad_variance == pytest.approx(GRADIENT, rel=0.05)
    rows = p.weight_gradients().groupby("weight").squared_norm.sum()
    for weight, (norm, error) in NORMS.items():
        assert abs(rows[weight] - norm) < 0.08 * norm + 2 * error, weight


def test_albert_is_read() -> None:
    config = {"model_type": "albert", "embedding_size": 4096, "hidden_dropout_prob": 0.1}
    model = moments.from_huggingface(config)
    assert model.shared_layers
    assert (model.embedding.factor_dim, model.head.factor_dim) == (4096, 4096)
    assert (model.dropout, model.ffn_dropout) == (0.1, 0.0)
    assert model == Transformer.from_dict(model.to_dict())
    with pytest.raises(DomainError, match="share their weights in groups"):
        moments.from_huggingface(config | {"num_hidden_groups": 2})
    with pytest.warns(ValidityWarning, match="gap_size = 1 is not modelled"):
        moments.from_huggingface(config | {"gap_size": 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "pre"}, "norm='post'"),
        ({"gated": True}, "gated = True"),
        ({"causal": True}, "causal = True"),
        ({"branch_scale": 0.5}, "branch_scale = 0.5"),
        ({"temperature": [1.0, 1.0, 2.0, 1.0]}, "the same in all layers"),
        ({"kv_heads": 2}, "kv_heads = 2"),
    ],
)
def test_layers_that_differ_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        stack(0.003, **changes)


def test_what_is_not_stated_of_shared_layers_is_refused() -> None:
    model = stack(0.003)
    p = moments.predict(model, token_ids=IDS, **LAST)
    for call in (
        lambda: p.grad_variance_band,
        lambda: p.after("sgd", 1e-3),
        lambda: p.sharpness("sgd"),
        lambda: p.low_precision("fp8"),
        lambda: moments.explain(model, 1, correlation=0.0, **LAST),
    ):
        with pytest.raises(DomainError, match="where layers share their weights"):
            call()
    with pytest.raises(DomainError, match="tokens are followed as alike"):
        moments.predict(model, token_ids=IDS, tokens=True, **LAST)
    with pytest.raises(DomainError, match="one configuration"):
        moments.predict(model, correlation=[0.1, 0.2], **LAST)
    assert not p.states_draws
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "grad_variance_band" not in p.to_json()
        assert "sharing their weights" in str(p.table())
