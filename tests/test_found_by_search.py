"""Declarations and modules that random search and faults planted by hand found wrong."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments import Embedding, Head, Transformer, Weights
from moments.show.outliers import odd_layers

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

nn = torch.nn
V = 1 / 128
TEXTS = np.random.default_rng(0).integers(1, 50, (2, 40))


def predict(model: Transformer, **given: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **given)


# Means of 6 x 8 draws of `moments.simulate` with their standard errors: tokens correlated by .01
BEHIND = {
    "convolution": (moments.ShortConvolution(3, 0.1), 0.00747, 0.00038),
    "linear": (moments.LinearAttention(4, 8, 8), 0.0402, 0.0009),
    "delta": (moments.GatedDeltaNet(4, 4, 16, 16, V, V, V), 0.00678, 0.00026),
}


@pytest.mark.parametrize("name", BEHIND)
def test_tokens_behind_a_mixer_and_a_gated_block(name: str) -> None:
    """How their correlation is raised by overlaps that vary over draws, which a mixer's squared
    norms, of products, do by an order of magnitude more: it came out three times too large."""
    mixer, expected, error = BEHIND[name]
    model = Transformer(
        *(1, 128, 4, 16),
        causal=True,
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        weights=Weights.normal(0.01),
        mixer=mixer,
    )
    p = predict(model, variance=1.0, correlation=0.01, tokens=True)
    value = p.to_frame().set_index("site").correlation["ffn.activation"]
    assert abs(value - expected) < 0.002 + 0.1 * expected + 2 * error


def test_masked_text_in_several_sequences() -> None:
    model = Transformer(
        2, 32, 4, 40, norm="pre", embedding=Embedding(50, 1.0), head=Head(loss="masked")
    )
    p, by_token = (predict(model, token_ids=TEXTS, tokens=tokens) for tokens in (None, True))
    assert "loss" in p.table()
    assert p.loss_stderr == pytest.approx(by_token.loss_stderr, rel=0.01)


def test_one_token_behind_a_mixer() -> None:
    model = Transformer(1, 32, 1, 1, causal=True, mixer=moments.Mamba(8, 2, 2, V, 0.1, V))
    assert np.all(np.isfinite(predict(model).variance))


def test_gates_that_start_at_zero() -> None:
    """A constant half, whose variance rounds below 0."""
    weights = Weights.normal(0.0)
    model = Transformer(3, 16, 1, 3, causal=True, weights=weights, attention_gate="elementwise")
    assert predict(model, variance=1.0, correlation=1.0).variance == pytest.approx(np.ones(4))


def test_a_text_that_opens_with_padding() -> None:
    """Norms divide the zero row by the root of epsilon; against 40 draws of the twin."""
    model = Transformer(
        *(2, 48, 2, 24),
        norm="b2t",
        qk_norm="rmsnorm",
        norm_epsilon=1e-5,
        causal=True,
        embedding=Embedding(50, 1.0, padding_id=0),
        head=Head(loss="masked"),
    )
    ids = np.array([0, 1, 0, 3, 0, 1, 0, 0, 1, 3, 2, 1, 1, 2, 1, 1, 2, 2, 3, 1, 3, 2, 1, 0])
    found = predict(model, token_ids=ids)
    assert found.variance == pytest.approx([0.756, 0.9583, 0.9583], rel=0.01)
    assert np.all(np.isfinite(found.grad_variance))


def test_biases_that_a_mixer_does_not_read_are_simulated() -> None:
    mixer = moments.Mamba2(2, 4, 2, 0.02, 0.02)
    model = Transformer(1, 32, 4, 6, causal=True, mixer=mixer, biases=moments.Biases())
    seen = moments.simulate(
        model, variance=1.0, correlation=0.0, grad_variance=1.0, grad_correlation=0.0, seeds=1
    )
    rows = seen.weight_gradients().set_index("weight").squared_norm
    assert rows["query.bias"] == 0.0
    assert rows["output.bias"] > 0.0


# --- modules --------------------------------------------------------------------------------------

WIDTH, HEADS, VOCAB, LENGTH = 64, 4, 200, 24


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.causal = causal

    def forward(self, x: Any, memory: Any = None) -> Any:
        memory = x if memory is None else memory
        q, k, v = (
            matrix(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for matrix, y in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        logits = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(later, -math.inf)
        return self.wo((logits.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.attention, self.norms = Attention(causal), nn.ModuleList()
        self.cross = Attention(False) if cross else None
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms.extend(nn.LayerNorm(WIDTH) for _ in range(2 + cross))

    def forward(self, x: Any, memory: Any = None) -> Any:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before = nn.ModuleList(Layer(False) for _ in range(3 * cross))
        self.layers = nn.ModuleList(Layer(causal, cross) for _ in range(3))
        self.ends = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(1 + cross))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for name, p in self.named_parameters():
            out = name.endswith(("wo.weight", "down.weight"))
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(6) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def read(self, ids: Any, layers: Any, memory: Any = None) -> Any:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in layers:
            x = layer(x, memory)
        return x

    def forward(self, ids: Any, source: Any = None) -> Any:
        memory = None if source is None else self.ends[1](self.read(source, self.before))
        return self.head(self.ends[0](self.read(ids, self.layers, memory)))


def made(**options: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Model(**options)


IDS = torch.as_tensor(np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH)))


def test_a_zero_is_odd_next_to_a_single_other() -> None:
    for square, odd in (((0.0, 0.1), (0,)), ((0.1, 0.0), (1,)), ((0.0, 0.0), ()), ((0.1, 0.4), ())):
        assert odd_layers(square, (0.01, 0.01)) == odd, square


def test_full_attention_is_named_where_ids_alone_are_given() -> None:
    kinds = [f.kind for f in moments.check(made(causal=False), IDS).findings]
    assert kinds == ["tokens see later ones"]
    assert moments.check(made(), IDS).findings == ()


def test_a_head_that_is_a_copy_of_the_token_table_is_noted() -> None:
    module = made()
    with torch.no_grad():
        module.head.weight.copy_(module.tokens.weight)
    assert "copy of the token table" in moments.check(module, IDS).text(whole=True)
    assert "copy of the token table" not in moments.check(made(), IDS).text(whole=True)


def test_a_depth_scale_of_layers_with_three_blocks() -> None:
    """1/sqrt(2 N) for a decoder's three blocks in each of N layers."""
    report = moments.check(made(cross=True), (IDS, IDS.flip(0)))
    assert report.findings == ()
    assert "over sqrt(2 N)" in report.scheme
