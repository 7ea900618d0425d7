"""Texts that are not known, by Zipf's law, against texts drawn by it, each token by itself."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.engine.classes import PositionClasses, documents_on
from moments.engine.texts import TextClasses, zipf_classes
from moments.layers.head.targets import position_targets

WORDS = 2000


def zipf(size: int) -> np.ndarray:
    shares = 1.0 / np.arange(1.0, size + 1.0)
    return shares / shares.sum()


def predicted(model: moments.Transformer, **given: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **given)


@pytest.mark.parametrize(
    "classes",
    [
        PositionClasses.for_length(200),
        PositionClasses.for_length(4096, 256),
        documents_on(PositionClasses.for_length(192), (192, 100)),
        zipf_classes(PositionClasses.for_length(200), 40),
    ],
)
def test_every_target_is_read_as_often_as_it_is(classes: PositionClasses) -> None:
    """A token's target is read by the next one, and by others by chance."""
    targets, chance = position_targets(moments.Head(), 40, classes), float(zipf(40) @ zipf(40))
    pairs = classes.pair_count
    expected = targets.count + chance * (pairs.sum() - targets.count)
    assert (targets.hits * pairs).sum() == pytest.approx(expected, rel=1e-3)


def test_a_word_that_two_tokens_share_is_a_frequent_one() -> None:
    """Coincidences of targets with it, summed over a vocabulary of forty."""
    classes, shares = zipf_classes(PositionClasses.for_length(4096), 40), zipf(40)
    targets = position_targets(moments.Head(), 40, classes)
    far, size = np.s_[-3, 5], len(classes.one.nodes)  # cells in which no token follows the other
    joint = np.outer(shares, shares)  # of what two tokens read
    same, other = np.eye(40), 1.0 - np.eye(40)
    for kind, mask in enumerate((other, same)):
        held = mask * joint / (mask * joint).sum()
        hit, both = (
            (one[:size, kind * size : (kind + 1) * size])[far]
            for one in (targets.hits, targets.both_hit)
        )
        assert hit == pytest.approx((held * shares[None, :]).sum(), rel=2e-3)  # i's target is r_j
        assert both == pytest.approx((held * shares[:, None] ** 2).sum(), rel=2e-3)


def tied(variance: float, length: int = 64, **fields: Any) -> moments.Transformer:
    table = moments.Embedding(WORDS, variance)
    fields = {"rotary": moments.Rotary()} | fields
    return moments.Transformer(
        1, 128, 4, length, causal=True, embedding=table, head=moments.Head(), **fields
    )


def norms(prediction: moments.Prediction) -> Any:
    frame = prediction.weight_gradients().set_index(["layer", "weight"])["squared_norm"]
    return frame[[(1, "query"), (1, "key"), (1, "ffn_in"), (0, "token")]]


@pytest.mark.parametrize("variance", [0.01, 0.1])
def test_an_unknown_text_is_one_of_its_law(
    variance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys, what reads a tied table and the table, over eight texts; by means over
    cells, which no two tokens are, queries are 7 and 16 % too small."""
    model, draw = tied(variance), np.random.default_rng(0)
    texts = [draw.choice(WORDS, size=model.seq_len, p=zipf(WORDS)) for _ in range(8)]
    each = np.stack([norms(predicted(model, token_ids=ids, tokens=True)) for ids in texts])
    mean, error = each.mean(0), each.std(0, ddof=1) / np.sqrt(len(texts))
    found = predicted(model)
    assert isinstance(found.layout.classes, TextClasses)
    assert (np.abs(norms(found) / mean - 1.0) < 0.03 + 2.0 * error / mean).all()
    monkeypatch.setattr("moments.prediction.resolution.repeating", lambda *_: False)
    by_means = predicted(model)
    assert not isinstance(by_means.layout.classes, TextClasses)
    assert norms(by_means).iloc[0] < (0.95 if variance < 0.1 else 0.88) * mean[0]


def test_an_unknown_text_under_faint_logits_is_one_of_its_law() -> None:
    """Queries, keys and what reads the stream, over twelve texts, beside a table of positions as
    large as that of words: by means over cells queries and keys were 8 % low."""
    table = moments.Embedding(WORDS, 4e-4, position_variance=4e-4)
    model = tied(1.0, rotary=None, weights=moments.Weights.normal(4e-4)).replace(embedding=table)
    draw = np.random.default_rng(0)
    texts = [draw.choice(WORDS, size=model.seq_len, p=zipf(WORDS)) for _ in range(12)]
    each = np.stack([norms(predicted(model, token_ids=ids, tokens=True)) for ids in texts])
    mean, error = each.mean(0), each.std(0, ddof=1) / np.sqrt(len(texts))
    apart = np.abs(norms(predicted(model)) / mean - 1.0)
    assert (apart < 0.03 + 2.0 * error / mean)[:3].all()


def test_configurations_side_by_side() -> None:
    model = tied(0.05, 40)
    variance = np.array([0.5, 2.0])
    both = predicted(model, variance=variance)
    for index, one in enumerate(variance):
        alone = predicted(model, variance=one)
        assert both.grad_variance[index] == pytest.approx(alone.grad_variance, rel=1e-9)
