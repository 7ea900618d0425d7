"""Neighbours told apart from their cell, against sums over every token and kernels by token."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.engine.classes import PositionClasses, documents_on
from moments.engine.neighbours import with_neighbours
from moments.engine.state import Kernel
from moments.prediction import predict as deciding
from moments.transfer.attention.kernels import joint_laws, logits
from moments.transfer.head.targets import position_targets

LENGTH = 200


def smooth(x: Any, y: Any) -> Any:
    """Of two positions."""
    return 1.0 / (1.0 + np.log(np.maximum(x, y))) + 0.1 * np.log(np.minimum(x, y) + 1.0)


@pytest.mark.parametrize("window", [None, 16])
def test_totals_are_sums_over_every_pair(window: int | None) -> None:
    classes = with_neighbours(PositionClasses.of(LENGTH, window))
    place, nodes = np.arange(1.0, LENGTH + 1), classes.one.nodes.astype(float)
    matrix = smooth(place[:, None], place[None, :])
    ahead = np.arange(1, LENGTH)
    for hit in (0.0, 5.0):
        matrix[ahead, ahead - 1] += hit * place[1:] ** -0.5
        matrix[ahead - 1, ahead] += hit * place[1:] ** -0.5
        beside = smooth(nodes, nodes - 1.0) + hit * nodes**-0.5
        pairs = classes.of_smooth(0.0 * nodes, smooth(nodes[:, None], nodes), beside)[1]
        kernel = Kernel(np.zeros(len(pairs)), pairs, classes)
        expected = matrix.sum() - np.trace(matrix)
        assert kernel.total(LENGTH) == pytest.approx(expected, rel=2e-4)
        assert kernel.mean_pairs() == pytest.approx(expected / LENGTH / (LENGTH - 1), rel=2e-4)


@pytest.mark.parametrize(
    "classes",
    [
        PositionClasses.of(LENGTH),
        PositionClasses.of(4096, 256),
        with_neighbours(PositionClasses.of(LENGTH)),
        documents_on(PositionClasses.of(192), (192, 100)),
    ],
)
def test_every_target_is_hit_once(classes: PositionClasses) -> None:
    head = moments.Head()
    targets = position_targets(head, 10**9, classes)
    assert targets.same_token.max() < 0.01
    hits = (targets.hit - targets.same_token) / (1.0 - targets.same_token)
    assert (hits * classes.pair_count).sum() == pytest.approx(targets.count, rel=1e-9)


def test_means_of_a_text_without_its_neighbours() -> None:
    classes = with_neighbours(PositionClasses.of(LENGTH))
    ids = np.random.default_rng(1).integers(0, 12, LENGTH)
    ids[1:] = np.where(np.random.default_rng(2).random(LENGTH - 1) < 0.3, ids[:-1], ids[1:])
    shares, size = classes.pair_means(ids, np.roll(ids, -1)), len(classes.before)
    hats, same = classes.one.hats, ids[:, None] == np.roll(ids, -1)[None, :]
    far = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))) > 1
    rest = (hats @ (same * far) @ hats.T) / np.maximum(hats @ far @ hats.T, 1e-9)
    wide = np.s_[size // 2 : -2, size // 2 : -2]
    assert shares[:size, :size][wide] == pytest.approx(rest[wide], rel=0.03)
    each, place = np.arange(1, size), np.arange(1, LENGTH)
    weight = hats[1:, 1:]
    for token, other, found in ((place, place - 1, (0, 1)), (place - 1, place, (1, 0))):
        expected = weight @ same[token, other] / weight.sum(1)
        met = shares[found[0] * size + each, found[1] * size + each]
        assert met == pytest.approx(expected, abs=1e-12)


SMALL = {"d_model": 128, "heads": 4, "causal": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "rotary": {"rotary": moments.Rotary()},
    "penalties, window": {"alibi": True, "window": 9, "heads": 1},
    "biases, dropout": {
        "dropout": 0.1,
        "biases": moments.Biases(query=0.3, key=0.3, value=0.2),
    },
}


def tied(layers: int, length: int, variance: float = 0.05, **fields: Any) -> moments.Transformer:
    embedding = moments.Embedding(1000, variance, positions="none")
    return moments.Transformer(
        layers, seq_len=length, embedding=embedding, head=moments.Head(), **SMALL | fields
    )


def predicted(model: moments.Transformer, **given: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **given)


def norms(prediction: moments.Prediction) -> Any:
    frame = prediction.weight_gradients().set_index(["layer", "weight"])["squared_norm"]
    return frame.drop("key.bias", level=1, errors="ignore").dropna()


@pytest.mark.parametrize("name", KINDS)
def test_every_position_a_class_needs_no_neighbours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the pair is an entry of the kernel like any other, and sums over it have no cells."""
    of, model = PositionClasses.of, tied(1, 33, **KINDS[name])
    monkeypatch.setattr(
        PositionClasses, "of", classmethod(lambda _, length, *args, **__: of(length, exact=length))
    )
    monkeypatch.setattr(deciding, "LEAST_FOUND", 0.0)
    found = predicted(model)
    assert isinstance(found.layout.classes, type(with_neighbours(of(34))))
    monkeypatch.setattr(deciding, "LEAST_FOUND", 2.0)
    expected = predicted(model)
    assert found.grad_variance == pytest.approx(expected.grad_variance, rel=1e-6)
    assert found.variance == pytest.approx(expected.variance, rel=1e-9)
    assert found.grad_correlation == pytest.approx(expected.grad_correlation, abs=1e-6)
    assert norms(found).to_numpy() == pytest.approx(norms(expected).to_numpy(), rel=1e-5)


# Largest relative error of gradients of weights, with and without queries and keys.
BOUNDS = {
    "window": (0.006, 0.007),
    "rotary": (0.004, 0.015),
    "penalties, window": (0.04, 0.04),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_next_tokens_that_a_tied_head_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "SUPPORT_SLACK", 0.0)
    monkeypatch.setattr(joint_laws, "TOLERANCE", 2e-5)
    model = tied(2, 40, 0.2, **KINDS[name])
    expected = norms(predicted(model, tokens=True))
    ratio = norms(predicted(model)) / expected
    sharp = ratio.index.get_level_values(1).str.startswith(("query", "key"))
    others, queries = BOUNDS[name]
    assert float(abs(ratio[~sharp] - 1).max()) < others
    assert float(abs(ratio[sharp] - 1).max()) < queries
    monkeypatch.setattr(deciding, "LEAST_FOUND", 2.0)
    mean = (
        norms(predicted(model)) / expected
    )  # that neighbours meet their cell's mean is told apart
    assert float(abs(mean - 1).max()) > 1.5 * float(abs(ratio - 1).max())


def test_neighbours_are_told_apart_where_the_head_finds_the_token_that_is_read() -> None:
    faint, strong = (predicted(tied(2, 40, variance)) for variance in (4e-4, 0.2))
    assert not isinstance(faint.layout.classes, type(with_neighbours(PositionClasses.of(40))))
    assert isinstance(strong.layout.classes, type(with_neighbours(PositionClasses.of(40))))


def test_configurations_side_by_side_with_neighbours() -> None:
    model = tied(1, 40)
    variance = np.array([0.5, 2.0])
    both = predicted(model, variance=variance)
    for index, one in enumerate(variance):
        alone = predicted(model, variance=one)
        assert both.grad_variance[index] == pytest.approx(alone.grad_variance, rel=1e-9)


def test_its_band_is_that_of_means_over_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied(2, 40, variance=0.001)
    monkeypatch.setattr(deciding, "LEAST_FOUND", 0.0)
    found = predicted(model)
    monkeypatch.setattr(deciding, "LEAST_FOUND", 2.0)
    both = [one.grad_variance_band for one in (found, predicted(model))]
    widths = [np.log(ends[1] / ends[0]) for ends in both]
    assert widths[0] == pytest.approx(widths[1], rel=1e-9)
