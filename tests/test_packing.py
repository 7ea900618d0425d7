"""Several texts packed into one row: as if each were a sequence, and as real modules run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moments
from moments import DomainError, Embedding, Head, Rotary, Transformer, predict
from moments.engine.layout import check_documents, places, restarted
from moments.simulation.functions import generator
from moments.simulation.network import LayerTwin
from moments.simulation.parameters import draw_weights
from moments.simulation.twin import run_embedding
from moments.torch.batches import inputs_of

WORDS = 60
IDS = np.random.default_rng(0).integers(0, WORDS, (2, 8))
LENGTHS = (5, 1, 4, 2)
DOCUMENTS = np.repeat(np.arange(4), LENGTHS)


def model(seq_len: int, **changes: Any) -> Transformer:
    tables = Embedding(WORDS, 0.2, position_variance=0.1)
    settings = {"causal": True, "norm_epsilon": 1e-5, "norm_affine": True, "dropout": 0.1}
    settings |= {"embedding": tables, "head": Head(tied=False, weight_variance=0.02)}
    return Transformer(2, 32, 4, seq_len, **(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary": Rotary(), "embedding": Embedding(WORDS, 0.3), "norm": "hybrid"},
        {"causal": False, "head": None, "alibi": True, "norm": "sandwich"},
        {"embedding": Embedding(WORDS, 0.2, positions="sinusoidal"), "norm": "post", "window": 3},
    ],
)
def test_packing_is_predicting_apart(changes: dict[str, Any]) -> None:
    """A row of two documents and a batch of two sequences: every number is the same."""
    apart = predict(model(8, **changes), token_ids=IDS)
    packed = predict(model(16, **changes), token_ids=IDS.ravel(), document_ids=np.repeat([7, 4], 8))
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        found, wanted = getattr(packed, name), getattr(apart, name)
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), name
    assert packed.loss == (None if apart.loss is None else pytest.approx(apart.loss, rel=1e-12))
    assert packed.grad_variance_band == pytest.approx(apart.grad_variance_band, rel=1e-9)
    norms = [p.weight_gradients()["squared_norm"].to_numpy() for p in (packed, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_rows_of_a_batch_are_packed_each_by_itself() -> None:
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [3, 3, 3, 3, 3, 3, 9, 9]])
    both = predict(model(8), token_ids=IDS, document_ids=documents)
    one = [predict(model(8), token_ids=IDS[i], document_ids=documents[i]) for i in (0, 1)]
    assert both.token_variance == pytest.approx(np.mean([p.token_variance for p in one], 0))
    # 6 + 20 and 30 + 2 ordered pairs
    pairs = np.average([p.correlation * p.variance for p in one], 0, [26, 32])
    assert both.correlation * both.variance == pytest.approx(pairs, rel=1e-6)


def test_twin_packs_what_it_runs_apart() -> None:
    """The same weights on a packed row and on its documents."""
    declared = model(12, rotary=Rotary(), relative_bias=None, dropout=0.0, head=None, alibi=True)
    silent, cpu = (lambda x, site: x), torch.device("cpu")
    draw = torch.Generator().manual_seed(1)
    tables = {
        "token": torch.randn(WORDS, 32, generator=draw),
        "position": torch.randn(12, 32, generator=draw),
    }
    weights = draw_weights(declared, 1, generator(cpu, 3), torch.float32)
    ids = torch.as_tensor(IDS.ravel()[:12])[None]

    def run(read: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        own = declared.replace(seq_len=max(read.shape[1], 2))
        cut = tables | {"position": tables["position"][: read.shape[1]]}
        x = run_embedding(own, read, None, cut, draw, silent, numbers)
        return LayerTwin(own, 1, weights, draw, silent, None, numbers).run(x)

    packed = run(ids, torch.as_tensor(DOCUMENTS)[None])
    ends = np.cumsum(LENGTHS)
    for end, length in zip(ends, LENGTHS, strict=True):
        alone = run(ids[:, end - length : end], None)
        torch.testing.assert_close(packed[:, end - length : end], alone)


def test_packed_rows_against_the_twin() -> None:
    """Documents of 5, 1, 4 and 2 tokens: three standard errors, or 3 % of a finite width."""
    declared = model(12, embedding=Embedding(WORDS, 0.3, position_variance=0.2))
    given = {"token_ids": IDS.ravel()[:12], "document_ids": DOCUMENTS}
    found = predict(declared, **given)
    measured = moments.simulate(declared, **given, seeds=48, batch=1)
    assert found.loss == pytest.approx(measured.loss, abs=3 * measured.loss_stderr)
    for name in ("variance", "grad_variance"):
        wanted, error = getattr(measured, name), getattr(measured, f"{name}_stderr")
        off = np.abs(getattr(found, name) - wanted)
        assert np.all(off < 3 * error + 0.03 * wanted), (name, off / wanted)
    for name in ("correlation", "grad_correlation"):
        off = np.abs(getattr(found, name) - getattr(measured, name))
        assert np.all(off < 3 * getattr(measured, f"{name}_stderr") + 0.02), (name, off)


def test_a_real_module_reads_packed_rows() -> None:
    """GPT-2 with restarting positions and a block mask; the loss has no target across documents."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2
    )
    config._attn_implementation = "eager"

    def factory(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(config)

    same = DOCUMENTS[:, None] == DOCUMENTS[None, :]
    seen = torch.as_tensor(np.tril(same))[None, None]
    batch = {
        "input_ids": torch.as_tensor(IDS.ravel()[:12])[None],
        "position_ids": torch.as_tensor(places(check_documents(DOCUMENTS, (12,))))[None],
        "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9),
    }
    measured = moments.torch.measure(factory, batch, seeds=24)
    declared = moments.from_huggingface(config).replace(seq_len=12)
    given = inputs_of(declared, {name: value.numpy() for name, value in batch.items()})
    assert (given["document_ids"] == DOCUMENTS + 1).all()
    found = predict(declared, **given)
    assert found.loss == pytest.approx(measured.loss, abs=3 * measured.loss_stderr + 0.01)
    for name in ("variance", "correlation", "grad_variance"):
        wanted, error = getattr(measured, name), getattr(measured, f"{name}_stderr")
        off = np.abs(getattr(found, name) - wanted)
        assert np.all(off < 3 * error + 0.05 * np.abs(wanted)), (name, off / wanted)


def test_positions_that_restart_are_documents() -> None:
    rows = restarted([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert rows is not None
    assert rows.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]]
    assert restarted([[0, 1, 2]]) is None
    assert restarted([[5, 6, 7, 1, 2]]) is None
    # Left padding as generation has it.
    assert restarted([[1, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]]) is None
    assert places(np.array([0, 1, 1, 0, 2, 2])).tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"document_ids": [0, 0, 1, 1, 0, 0, 1, 1]}, "0 in two places"),
        ({"document_ids": [0, 0, 1]}, "document_ids"),
        ({"document_ids": [0.5] * 8}, "integers"),
        ({"document_ids": [0] * 8, "tokens": False}, "document_ids"),
        ({"document_ids": [0] * 8, "theory": "published"}, "document_ids"),
        ({"encoder_inputs": {"document_ids": [0] * 8}}, "encoder"),
    ],
)
def test_bad_documents_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DomainError, match=said):
        predict(model(8), **given)


def test_documents_go_beside_neither_classifier_nor_encoder() -> None:
    pooled = model(8, head=Head(loss="classification", classes=3, tied=False, weight_variance=0.1))
    for declared in (pooled, model(8, encoder=model(8, head=None))):
        with pytest.raises(DomainError, match="document_ids"):
            predict(declared, document_ids=[0] * 8)
        with pytest.raises(DomainError, match="document_ids"):
            moments.simulate(declared, document_ids=[0] * 8, seeds=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"head": None},
        {"norm": "post"},
        {"rotary": Rotary(), "window": 4, "norm": "hybrid", "head": None},
        {
            "causal": False,
            "head": Head(target_share=0.5, loss="masked", tied=False, weight_variance=0.02),
        },
    ],
)
def test_sequences_of_one_token(changes: dict[str, Any]) -> None:
    """Attention returns the token's own value; there are no pairs, and no number is NaN."""
    found = predict(model(1, **changes))
    assert not found.correlation.any()
    assert not found.grad_correlation.any()
    numbers = [found.variance, found.grad_variance, *found.grad_variance_band]
    numbers.append(found.weight_gradients()["squared_norm"].to_numpy())
    assert all(np.isfinite(each).all() for each in numbers)
    # A query and a key of one token move no softmax.
    rows = found.weight_gradients().set_index("weight")["squared_norm"]
    assert rows[["query", "key"]].to_numpy() == pytest.approx(0.0, abs=1e-12)


def test_one_token_against_the_twin() -> None:
    """Many rows of one token: three standard errors, or 3 % of a finite width."""
    declared = model(1)
    found = predict(declared, token_ids=[3])
    measured = moments.simulate(declared, token_ids=[3], targets=[7], seeds=64, batch=1)
    again = predict(declared, token_ids=[3], targets=[7])
    assert again.loss == pytest.approx(found.loss, rel=0.01)
    assert found.loss == pytest.approx(measured.loss, abs=3 * measured.loss_stderr)
    for name in ("variance", "grad_variance"):
        wanted, error = getattr(measured, name), getattr(measured, f"{name}_stderr")
        off = np.abs(getattr(again, name) - wanted)
        assert np.all(off < 3 * error + 0.03 * wanted), (name, off / wanted)
    assert not measured.correlation.any()


@pytest.mark.parametrize(
    ("given", "said"), [({"correlation": 0.3}, "no pairs"), ({"theory": "published"}, "refined")]
)
def test_one_token_has_neither_pairs_nor_published_laws(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DomainError, match=said):
        predict(model(1, embedding=None, head=None), **given)
