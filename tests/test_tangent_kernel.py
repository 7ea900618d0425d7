"""The neural tangent kernel of the last stream, against that of torch's gradients."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import moments
from moments.simulation.network import LayerTwin
from moments.simulation.parameters import draw_weights

LENGTH = 5
MODELS: dict[str, moments.Transformer] = {
    name: moments.Transformer(2, 64, 4, LENGTH, activation="gelu", **given)
    for name, given in {"full": {}, "causal": {"causal": True}, "post": {"norm": "post"}}.items()
}


def empirical(model: moments.Transformer, draws: int, seed: int) -> np.ndarray:
    """(draws, L, L) inner products of gradients of a random feature of two tokens' outputs."""
    generator = torch.Generator().manual_seed(seed)
    length, d_model = model.seq_len, model.d_model

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = []
    for _ in range(draws):
        x = 0.3**0.5 * normal(1, 1, d_model) + 0.7**0.5 * normal(1, length, d_model)
        weights: list[torch.Tensor] = []
        for number in range(1, model.layers + 1):
            drawn = draw_weights(model, number, generator, torch.float32)
            weights += drawn.values()
            x = LayerTwin(model, number, drawn, generator, lambda tensor, site: tensor).run(x)
        feature = x[0] @ normal(d_model) / d_model**0.5
        rows = [torch.autograd.grad(one, weights, retain_graph=True) for one in feature]
        jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        found.append((jacobian @ jacobian.T).numpy())
    return np.array(found)


def of_draws(every: np.ndarray) -> list[float]:
    """Mean own entry and pair, and their standard errors."""
    own = np.diagonal(every, axis1=1, axis2=2).mean(1)
    pairs = (every.sum((1, 2)) - LENGTH * own) / (LENGTH * (LENGTH - 1))
    count = len(every) ** 0.5
    found = own.mean(), own.std() / count, pairs.mean(), pairs.std() / count
    return [float(one) for one in found]


def of_kernel(kernel: Any) -> tuple[float, float]:
    matrix = kernel.matrix()
    own = np.trace(matrix) / LENGTH
    return own, (matrix.sum() - LENGTH * own) / (LENGTH * (LENGTH - 1))


DRAWN: dict[str, list[float]] = {
    "full": [605.18, 3.5932, 445.63, 2.8569],
    "causal": [645.38, 3.7565, 420.34, 2.7087],
    "post": [272.69, 2.0346, 202.13, 1.5026],
}
"""`of_draws(empirical(model, 1500, 1))`."""


@pytest.mark.parametrize("name", MODELS)
def test_it_is_that_of_torch(name: str) -> None:
    """Within three standard errors and 2 percent, of order 1/width."""
    kernel = moments.predict(MODELS[name], correlation=0.3).tangent_kernel()
    own, own_error, pairs, pairs_error = DRAWN[name]
    found = of_kernel(kernel)
    assert found[0] == pytest.approx(own, abs=3 * own_error + 0.02 * own)
    assert found[1] == pytest.approx(pairs, abs=3 * pairs_error + 0.02 * pairs)
    mean, error, *_ = of_draws(empirical(MODELS[name], 4, 2))
    assert abs(mean - own) < 5 * error + 4 * own_error


def test_parts_and_rates() -> None:
    p = moments.predict(MODELS["full"], correlation=0.3)
    kernel = p.tangent_kernel()
    frame = kernel.to_frame()
    assert frame.diagonal.sum() == pytest.approx(kernel.diagonal[0], rel=1e-12)
    assert set(frame.weight) == {"query", "key", "value", "output", "ffn_in", "ffn_out"}
    frozen = p.tangent_kernel({"query": 0.0, "value": 3.0}).to_frame().set_index("weight").diagonal
    assert np.all(frozen["query"] == 0.0)
    every = frame.set_index("weight").diagonal
    assert frozen["value"].to_numpy() == pytest.approx(3 * every["value"].to_numpy())
    stored = json.loads(kernel.to_json())
    assert stored["off_diagonal"] == kernel.off_diagonal.tolist()
    assert stored["weights"][0]["weight"] in set(frame.weight)
    assert "5 tokens alike" in repr(kernel)
    own, pairs = of_kernel(kernel)
    assert kernel.condition == pytest.approx((own + 4 * pairs) / (own - pairs), rel=1e-9)


@pytest.mark.parametrize("r", [0.0, 0.5])
def test_classes_stand_for_every_token(r: float) -> None:
    """What weights receive of a gradient is what the kernel says, followed token by token."""
    model = moments.Transformer(1, 256, 4, 32, causal=True)
    kernel = moments.predict(model, correlation=0.2).tangent_kernel()
    assert kernel.positions is not None
    assert len(kernel.positions) < 12
    p = moments.predict(model, tokens=True, correlation=0.2, grad_correlation=r)
    seen = p.weight_gradients().squared_norm.sum()
    received = r + (1 - r) * np.eye(32)
    assert 256 * (kernel.matrix() * received).sum() == pytest.approx(seen, rel=0.01)


def test_tables_are_among_the_parameters() -> None:
    model = MODELS["causal"].replace(embedding=moments.Embedding(50, 0.5))
    ids = np.array([1, 2, 1, 3, 4])
    kernel = moments.predict(model, token_ids=ids).tangent_kernel()
    rows = kernel.to_frame().set_index(["layer", "weight"]).diagonal
    assert rows.loc[(0, "token")] > 0
    frozen = dict.fromkeys(set(rows.index.get_level_values(1)) - {"token"}, 0.0)
    once = moments.predict(model, token_ids=np.arange(5)).tangent_kernel(frozen)
    twice = moments.predict(model, token_ids=ids).tangent_kernel(frozen)
    assert twice.off_diagonal[0, 2] > once.off_diagonal[0, 2] + 0.4  # one row that both look up


def test_what_has_none_is_refused() -> None:
    model = MODELS["full"]
    for given, said in (
        ({"theory": "published"}, "published"),
        ({"variance": np.ones(2)}, "single configuration"),
    ):
        with pytest.raises(moments.DomainError, match=said):
            moments.predict(model, **given).tangent_kernel()
    with pytest.raises(moments.DomainError, match="did you mean 'query'"):
        moments.predict(model).tangent_kernel({"qurey": 1.0})
    with pytest.raises(moments.DomainError, match="rates"):
        moments.predict(model).tangent_kernel({"query": -1.0})
    long = moments.predict(model.replace(seq_len=48), tokens=True)
    with pytest.raises(moments.DomainError, match="passes of a gradient"):
        long.tangent_kernel()
