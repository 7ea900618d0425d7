"""Classes of positions against sums over every token, and against predictions by token."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moments
from moments import Transformer
from moments.engine.classes import (
    ClassMatrix,
    PositionClasses,
    both_sides,
    documents_on,
)
from moments.engine.texts import TextClasses
from moments.layers.attention.kernels import KernelAttention, row_statistics
from moments.layers.attention.kernels import attention as token_rows
from moments.layers.attention.kernels.position_attention import (
    Across,
    ClassLogits,
    PositionAttention,
)
from moments.layers.attention.kernels.relative_positions import (
    RotaryMeans,
    shifted_classes,
    shifted_together,
)
from moments.prediction import resolution as deciding

LENGTH = 96


@pytest.fixture
def own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By token, a class for every row."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)


def predicted(model: Transformer, **arguments: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **arguments)


# --- sums -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(length=st.integers(32, 4000), power=st.floats(-1.0, 0.5), shift=st.floats(4.0, 20.0))
def test_sums_over_positions(length: int, power: float, shift: float) -> None:
    """Of a function that is smooth in log position, up to a node and from a node on.

    From the third node from the end on two nodes are left beside the last position, where f is
    linear in log i over a step h: off by f'' h^2 / 12 of f, here by (p^2 + |p|/4) h^2 / 12 at most.
    """
    classes = PositionClasses.for_length(length)
    key_counts = classes.key_counts()
    positions = np.arange(1, length + 1)
    every, held = (positions + shift) ** power, (classes.nodes + shift) ** power
    step = np.log(classes.nodes[-2] / classes.nodes[-3])
    linear = (power**2 + abs(power) / 4) * step**2 / 12
    for row, node in enumerate(classes.nodes):
        off = 6e-4 + linear * (row == len(classes.nodes) - 3)
        np.testing.assert_allclose(key_counts.keys[row] @ held, every[:node].sum(), rtol=2e-4)
        later = every[node - 1 :] / positions[node - 1 :]
        np.testing.assert_allclose(
            key_counts.rows[row] @ (held / classes.nodes), later.sum(), rtol=off
        )
        later = later / positions[node - 1 :]
        found = key_counts.rows_of_pair[row, row] @ (held / classes.nodes**2)
        np.testing.assert_allclose(found, later.sum(), rtol=off)
    np.testing.assert_allclose(classes.at_every_position(held), every, rtol=2e-4)
    np.testing.assert_allclose(classes.count.sum(), length, rtol=1e-9)


@pytest.mark.parametrize("length", [600, 8192, 131072])
def test_nodes_that_widen_backwards(length: int) -> None:
    """Sums over positions of what is smooth in log position, with fewer nodes; steps grow."""
    fine = PositionClasses.for_length(length, per_octave=1.0)
    classes = PositionClasses.for_length(length, per_octave=1.25, widening=0.05)
    assert len(classes.nodes) < len(fine.nodes)
    steps = np.diff(np.log(classes.nodes[classes.nodes > 20][:-1]))
    assert np.all(np.diff(steps) < 0.01)
    every = np.arange(1, length + 1)
    sums = np.cumsum((every + 8.0) ** -0.5)
    found = classes.key_counts().keys @ (classes.nodes + 8.0) ** -0.5
    np.testing.assert_allclose(found, sums[classes.nodes - 1], rtol=5e-3)
    np.testing.assert_allclose(found[-4:], sums[classes.nodes[-4:] - 1], rtol=2e-4)
    np.testing.assert_allclose(classes.count.sum(), length, rtol=1e-9)


def test_gradients_that_fall_by_orders_of_magnitude_from_position_to_position() -> None:
    """What 36 layers under Post-LN send to the first token is 1e7 times the second's, 1e16 the
    last's: between nodes none of it may reach the others."""
    classes = PositionClasses.for_length(32)
    every = 1e-6 * np.arange(1.0, 33.0) ** -7
    every[0] = 50.0
    both = np.stack([every, np.append(every[:-1], 0.0)])  # the last predicts nothing
    np.testing.assert_allclose(
        classes.at_every_position(both[:, classes.nodes - 1]), both, rtol=1e-9
    )


def test_a_million_positions_cost_nothing() -> None:
    classes = PositionClasses.for_length(2**20)
    assert len(classes.nodes) < 45
    np.testing.assert_allclose(classes.count.sum(), 2**20, rtol=1e-9)
    np.testing.assert_allclose(classes.pair_count.sum(), 2**20 * (2**20 - 1.0), rtol=1e-9)


def whole(own: np.ndarray, pairs: np.ndarray, blocks: list[int]) -> np.ndarray:
    """The (L, L) matrix of blocks of alike tokens."""
    index = np.repeat(np.arange(len(blocks)), blocks)
    matrix = pairs[np.ix_(index, index)].copy()
    matrix[np.arange(len(index)), np.arange(len(index))] = own[index]
    return matrix


class Blocks(PositionClasses):
    """`PositionClasses` where only counts matter."""

    @property
    def count(self) -> Any:
        return self.nodes.astype(float)


def test_arithmetic_of_class_matrices_is_that_of_blocks() -> None:
    blocks, random = [1, 3, 2, 5], np.random.default_rng(3)
    size = len(blocks)
    classes = Blocks(sum(blocks), np.array(blocks))
    one, other = (
        ClassMatrix(random.normal(size=size), random.normal(size=(size, size)), classes)
        for _ in range(2)
    )
    for matrix in (one, other):  # a class of one has no pairs of its own
        matrix.off_diagonal = matrix.off_diagonal.copy()
        matrix.off_diagonal[0, 0] = matrix.diagonal[0]
    first, second = (whole(m.diagonal, m.off_diagonal, blocks) for m in (one, other))
    places = np.cumsum([0, *blocks[:-1]])
    found, expected = one @ other, first @ second
    np.testing.assert_allclose(found.diagonal, np.diag(expected)[places], rtol=1e-12)
    for p in range(size):
        for q in range(size):
            place = places[q] + (1 if p == q and blocks[q] > 1 else 0)
            np.testing.assert_allclose(
                found.off_diagonal[p, q], expected[places[p], place], rtol=1e-12
            )
    np.testing.assert_allclose(found.total(), expected.sum(), rtol=1e-12)
    np.testing.assert_allclose(found.trace(), np.trace(expected), rtol=1e-12)
    np.testing.assert_allclose(found.row_sums(), expected.sum(1)[places], rtol=1e-12)
    square = (one * 2.0 - other / 3.0).transposed()
    np.testing.assert_allclose(square.total(), (2 * first - second / 3).sum(), rtol=1e-12)
    column = (one @ np.arange(1.0, 5.0)[:, None])[:, 0]
    repeated = np.repeat(np.arange(1.0, 5.0), blocks)
    np.testing.assert_allclose(column, (first @ repeated)[places], rtol=1e-12)
    with pytest.raises(TypeError, match="entrywise"):  # nothing reads it entry by entry
        np.asarray(one)


# --- one layer ------------------------------------------------------------------------------------


def test_every_position_a_class_is_attention_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a class for every row there, too."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    monkeypatch.setattr(row_statistics, "TOLERANCE", 1e-6)  # for classes as fine
    length = 20
    scale = 1.5
    settings = {
        "drop_prob": 0.1,
        "d_model": 128.0,
        "d_head": 32.0,
        "norm_spread": 0.002,
    }
    place = np.arange(length)
    own = 1.0 + 0.3 / (1 + place)
    pairs = 0.2 + 0.1 / (1 + np.maximum.outer(place, place))
    kernel = np.where(np.eye(length) > 0, own[:, None], pairs)
    gradient = np.where(np.eye(length) > 0, 1.0, 0.05)
    allowed = np.tri(length, dtype=bool)
    by_token = KernelAttention(kernel, logit_scale=scale, allowed=allowed, **settings)
    tokens, classes = (own, pairs), PositionClasses(length, np.arange(1, length + 1))
    logits = ClassLogits(tokens, tokens, tokens, scale, classes.key_counts())
    by_class = PositionAttention(logits, **settings)
    # in single precision by token
    np.testing.assert_allclose(by_class.output[0], np.diag(by_token.forward()), rtol=3e-5)
    off = np.tril_indices(length, -1)
    np.testing.assert_allclose(by_class.output[1][off], by_token.forward()[off], rtol=1e-4)
    np.testing.assert_allclose(by_class.sum_square, by_token.sum_square, rtol=3e-5)
    np.testing.assert_allclose(by_class.logit_variance, by_token.logit_variance, rtol=1e-6)
    np.testing.assert_allclose(by_class.entropy, by_token.entropy, rtol=1e-6, atol=1e-9)
    expected = by_token.backward(gradient)
    found = by_class.backward(np.diag(gradient).copy(), np.full((length, length), 0.05))
    for name in ("value", "query", "key"):
        diagonal_factor, pair_part = getattr(found, name)
        matrix = getattr(expected, name)
        size = np.abs(np.diag(matrix)).max()
        np.testing.assert_allclose(diagonal_factor, np.diag(matrix), rtol=3e-4, atol=3e-5 * size)
        np.testing.assert_allclose(pair_part[off], matrix[off], rtol=2e-3, atol=3e-5 * size)


def test_two_documents_are_attention_by_token_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of rows that see their own document alone, whose keys share something across: most
    at one place, as under a table of positions."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    monkeypatch.setattr(row_statistics, "TOLERANCE", 1e-6)
    length, scale = 14, 1.2
    settings = {"d_model": 128.0, "d_head": 32.0, "norm_spread": 0.002}
    place, same = np.arange(length), np.eye(length) > 0
    later = np.maximum.outer(place, place)
    own, pairs = 1.0 + 0.3 / (1 + place), 0.2 + 0.1 / (1 + later)
    met, across = np.full(length, 0.5), 0.15 + 0.05 / (1 + later)
    blocks = [np.where(same, *both) for both in ((own[:, None], pairs), (met[:, None], across))]
    kernel = np.block([blocks, blocks[::-1]])
    sent = [np.where(same, 1.0, 0.05), np.where(same, 0.1, 0.02)]
    mask = np.kron(np.eye(2), np.tri(length)) > 0
    by_token = KernelAttention(kernel, logit_scale=scale, allowed=mask, **settings)
    inside, between = (own, pairs), (met, across)
    logits = ClassLogits(
        *[inside] * 3,
        scale,
        PositionClasses(length, np.arange(1, length + 1)).key_counts(),
        across=Across(*[between] * 3),
    )
    by_class = PositionAttention(logits, **settings)
    off, gradient = np.tril_indices(length, -1), np.block([sent, sent[::-1]])
    whole, paths = by_token.forward(), by_token.backward(gradient)
    for rows, block, (one_own, one_pairs) in (
        (by_class, slice(0, length), (1.0, 0.05)),
        (by_class.others[0], slice(length, 2 * length), (0.1, 0.02)),
    ):
        expected = whole[:length, block]
        np.testing.assert_allclose(rows.output[0], np.diag(expected), rtol=1e-4)
        np.testing.assert_allclose(rows.output[1][off], expected[off], rtol=2e-4)
        found = rows.backward(np.full(length, one_own), np.full((length, length), one_pairs))
        for name in ("value", "query", "key"):
            matrix = getattr(paths, name)[:length, block]
            size = np.abs(np.diag(matrix)).max()
            diagonal_factor, pair_part = getattr(found, name)
            np.testing.assert_allclose(
                diagonal_factor, np.diag(matrix), rtol=3e-4, atol=5e-5 * size
            )
            np.testing.assert_allclose(pair_part[off], matrix[off], rtol=2e-3, atol=5e-5 * size)


def one_layer(
    classes: PositionClasses,
    correlation: float,
    window: int | None = None,
    rotary: moments.Rotary | None = None,
) -> tuple[PositionAttention, Any]:
    """Tokens of one correlation, whose gradients correlate by .3, and what goes back."""
    key_counts, size = classes.key_counts(window), len(classes.nodes)
    tokens = np.ones(size), np.full((size, size), correlation)
    rotary_means = None if rotary is None else RotaryMeans.of(key_counts, *rotary.frequencies(64))
    layer = PositionAttention(
        ClassLogits(*[tokens] * 3, 2.7, key_counts, rotary_means), d_model=512.0
    )
    return layer, layer.backward(np.ones(size), np.full((size, size), 0.3))


@pytest.mark.parametrize("window", [None, 32])
def test_what_rows_send_is_split_where_they_begin_and_cease_to_see_the_other_key(
    window: int | None,
) -> None:
    """Sums over rows that jump where another key begins and ceases to be seen."""
    classes = PositionClasses.for_length(128, window)
    key_counts, place = classes.key_counts(window), np.arange(1, 129)
    size = np.minimum(place, window or 128)
    begins = classes.nodes[:, None] <= place
    seen = begins & (place < classes.nodes[:, None] + (window or 128))
    for key, other in np.ndindex(seen.shape[0], seen.shape[0]):
        rows = seen[key] / size * np.where(seen[other], 1.0, 0.2)
        at_nodes = np.where(seen[other], 1.0, 0.2)[classes.nodes - 1] / key_counts.size
        held = key_counts.rows_split[key, other]
        few = seen[key] & ~seen[other] & (place > classes.nodes[other])
        if few.any() and not few[classes.nodes - 1].any():  # no node is among them
            continue
        assert held @ at_nodes == pytest.approx(rows.sum(), rel=0.03, abs=1e-3)


@pytest.mark.parametrize("window", [None, 32])
def test_gradients_of_keys_sum_to_zero_over_classes(window: int | None) -> None:
    """Rows of a softmax's Jacobian sum to 0, and so does what all keys receive, of rows whose
    gradients correlate too: to 1.5 % of it, where sums that ran over the rows that do not see one
    of two keys left 14 and 22 %."""
    classes = PositionClasses.for_length(128, window)
    _, paths = one_layer(classes, 0.6, window)
    own, pairs = (paths.key[0] * classes.count).sum(), (paths.key[1] * classes.pair_count).sum()
    assert pairs == pytest.approx(-own, rel=0.02)


@pytest.mark.parametrize("window", [None, 24])
def test_what_turns_inside_cells_is_what_it_is_by_position(window: int | None) -> None:
    """Rotations that turn within a cell, of which cells hold the mean, and keys that share half of
    what they are, or most: against a class for every position. Bounds are a quarter more than was
    measured: of the half queries' own 1.4 %, of pairs 4.5 %, keys' 2.3 and of pairs 3.5 %; of most
    7, 7.4, 4.4 and 7.1 %."""
    rotary, every = moments.Rotary(base=150.0), PositionClasses(72, np.arange(1, 73))
    classes, apart = PositionClasses.for_length(72, window), ~np.eye(72, dtype=bool)
    for shared, off in ((0.5, (0.018, 0.057, 0.029, 0.044)), (0.8, (0.088, 0.093, 0.056, 0.089))):
        exact, sent = one_layer(every, shared, window, rotary)
        found, paths = one_layer(classes, shared, window, rotary)
        rotary_means = found.logits.rotary_means
        assert rotary_means is not None
        own = (found.response[0] * classes.count).sum()
        assert own == pytest.approx(exact.response[0].sum(), rel=off[0])
        pairs = (found.response[1] * rotary_means.pair_count()).sum()
        assert pairs == pytest.approx(exact.response[1][apart].sum(), rel=off[1])
        keys = (paths.key[0] * classes.count).sum()
        assert keys == pytest.approx(sent.key[0].sum(), rel=off[2])
        keys = (paths.key[1] * classes.pair_count).sum()
        assert keys == pytest.approx(sent.key[1][apart].sum(), rel=off[3])
        assert rotary_means.pair_count().sum() == pytest.approx(72 * 71)


@pytest.mark.parametrize("causal", [True, False])
def test_correlated_tokens_of_rotary_positions_against_simulation(causal: bool) -> None:
    """Keys that share most of what they are, whose logits differ as they turn: of means over cells
    queries and keys are within 3 % of what is drawn, of which what varies inside cells and how laws
    lean to it once took 9 % from keys."""
    model = Transformer(1, 128, 2, 96, causal=causal, rotary=moments.Rotary())
    given = {"correlation": 0.8, "grad_correlation": 0.6}
    found = predicted(model, tokens=None if causal else False, **given).weight_gradients()
    drawn = moments.simulate(model, grad_variance=1.0, seeds=8, batch=16, **given)
    frames = [f.set_index(["layer", "weight"]) for f in (found, drawn.weight_gradients())]
    for name in ("query", "key"):
        expected, error = frames[1].loc[(1, name), ["squared_norm", "squared_norm_stderr"]]
        one = frames[0].loc[(1, name), "squared_norm"]
        assert one == pytest.approx(expected, abs=3 * error + 0.02 * expected)


@pytest.mark.parametrize("tokens", [True, None])
def test_strongly_correlated_tokens_of_rotary_positions_are_noted(tokens: bool | None) -> None:
    model = Transformer(1, 64, 2, 40, causal=True, rotary=moments.Rotary())
    for correlation, noted in ((0.5, False), (0.8, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moments.predict(model, correlation=correlation, tokens=tokens)
        assert (
            any("logits differ mostly as keys turn" in str(one.message) for one in caught) == noted
        )


# --- whole models ---------------------------------------------------------------------------------

CASES = {
    "pre": (Transformer(6, 256, 4, LENGTH, dropout=0.1, causal=True), {"correlation": 0.2}),
    "post": (
        Transformer(6, 256, 4, LENGTH, dropout=0.1, norm="post", causal=True),
        {"correlation": 0.2},
    ),
    "sharp logits": (
        Transformer(4, 256, 4, LENGTH, causal=True, temperature=0.7, activation="gelu"),
        {"correlation": 0.3},
    ),
    "gated, grouped heads": (
        Transformer(
            4,
            256,
            8,
            LENGTH,
            kv_heads=2,
            normalization="rmsnorm",
            activation="swiglu",
            causal=True,
        ),
        {"correlation": 0.1, "variance": 0.3},
    ),
    "gpt2": (
        moments.preset("gpt2", seq_len=LENGTH).replace(layers=4, embedding=None, head=None),
        {"correlation": 0.1},
    ),
}


def test_tokens_that_become_alike_do_not_become_more_than_that() -> None:
    model = moments.Transformer(12, 192, 4, 32, causal=True, norm="post")
    prediction = predicted(model, correlation=0.9)
    assert prediction.layout.classes is not None
    np.testing.assert_allclose(prediction.correlation[0], 0.9, rtol=1e-9)
    by_token = predicted(model, correlation=0.9, tokens=True)
    np.testing.assert_allclose(prediction.correlation, by_token.correlation, atol=2e-4)
    assert prediction.correlation[-1] > 0.99
    assert not any("impossible" in note for note in prediction.warnings)


@pytest.mark.parametrize("name", CASES)
def test_classes_against_every_token(name: str) -> None:
    """The bounds are those of the interpolation between nodes; by token, rows are grouped, which
    by itself costs up to 1e-2 of a gradient and 5 percent of a query's or key's."""
    model, given_ = CASES[name]
    by_token, by_class = predicted(model, tokens=True, **given_), predicted(model, **given_)
    assert by_class.layout.classes is not None
    assert by_token.layout.classes is None
    np.testing.assert_allclose(by_class.variance, by_token.variance, rtol=1e-3)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=2e-3)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=1e-2)
    np.testing.assert_allclose(by_class.grad_correlation, by_token.grad_correlation, atol=2e-3)
    assert by_class.token_variance.shape == by_token.token_variance.shape
    np.testing.assert_allclose(by_class.token_variance, by_token.token_variance, rtol=4e-3)
    np.testing.assert_allclose(
        by_class.token_grad_variance, by_token.token_grad_variance, rtol=0.08, atol=1e-12
    )
    band = [np.log(p.grad_variance_band[1] / p.grad_variance_band[0]) for p in (by_class, by_token)]
    np.testing.assert_allclose(band[0], band[1], rtol=0.05)
    if by_class.loss is not None:
        np.testing.assert_allclose(by_class.loss, by_token.loss, rtol=1e-5)
        np.testing.assert_allclose(by_class.loss_stderr, by_token.loss_stderr, rtol=1e-3)
    frames = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    ratio = (frames[0] / frames[1])["squared_norm"].dropna()
    ratio = ratio.drop("token", level=1, errors="ignore")  # repetitions count on classes alone
    sharp = ratio.index.get_level_values(1).str.startswith(("query", "key"))
    assert abs(ratio[~sharp] - 1).max() < 0.02
    assert abs(ratio[sharp] - 1).max() < 0.06


def test_queries_and_keys_against_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By token, with a class for every row; see above for what grouped rows cost there."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    model = Transformer(3, 128, 4, 40, dropout=0.1, norm="post", causal=True)
    by_token = predicted(model, tokens=True, correlation=0.2)
    by_class = predicted(model, correlation=0.2)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=2e-4)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=4e-3)
    norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    assert (norms[0] / norms[1] - 1).abs()["squared_norm"].max() < 0.012


def test_counts_of_windows_are_sums_over_every_token() -> None:
    classes = PositionClasses.for_length(600, 150)
    key_counts, nodes = classes.key_counts(150), classes.nodes
    positions = np.arange(1, 601)
    every, held = (positions + 30.0) ** -0.5, (nodes + 30.0) ** -0.5
    size, inner = np.minimum(positions, 150), nodes[:-1]
    for p, node in enumerate(nodes):
        seen = (positions > node - 150) & (positions <= node)
        np.testing.assert_allclose(key_counts.keys[p] @ held, every[seen].sum(), rtol=1e-3)
        later = (positions >= node) & (positions < node + 150)
        found = key_counts.rows[p] @ (held / key_counts.size)
        np.testing.assert_allclose(found, (every / size)[later].sum(), rtol=2e-3)
        for s, other in enumerate(nodes[: p + 1]):
            both = seen & (positions <= other)
            found = key_counts.shared[p, s] @ held
            few = np.sum((inner > node - 150) & (inner <= other)) < 2  # one node stands for all
            np.testing.assert_allclose(found, every[both].sum(), rtol=0.05 if few else 1e-3)
            np.testing.assert_allclose(
                key_counts.split[s, p] @ held, key_counts.keys[p] @ held, rtol=2e-2
            )
            both = later & (positions < other + 150)
            found = key_counts.rows_of_pair[p, s] @ (held / key_counts.size**2)
            expected = (every / size**2)[both].sum()
            few = np.sum((inner >= node) & (inner < other + 150)) < 2
            np.testing.assert_allclose(found, expected, rtol=0.05 if few else 3e-3)
            # what jumps where the longer row's keys begin
            jumps = np.where(positions > node - 150, 1.0, 2.0) * every
            at_nodes = np.where(nodes > node - 150, 1.0, 2.0) * held
            jumps = jumps[(positions > other - 150) & (positions <= other)].sum()
            if other > node - 150 and np.any((inner > other - 150) & (inner <= node - 150)):
                np.testing.assert_allclose(key_counts.split[p, s] @ at_nodes, jumps, rtol=3e-2)


def test_means_over_cells_are_those_of_the_pairs_of_a_text() -> None:
    random = np.random.default_rng(7)
    ids = random.zipf(1.4, 300) % 40
    classes = PositionClasses.for_length(300)
    same = (ids[:, None] == ids[None, :]) & ~np.eye(300, dtype=bool)
    found = classes.pair_means(ids, ids)
    assert classes.basis.sum(0) == pytest.approx(1.0)
    np.testing.assert_allclose((found * classes.pair_count).sum(), same.sum(), rtol=1e-9)
    weights = classes.basis
    for q, r in ((8, 8), (9, 4), (12, 11)):
        several = np.outer(weights[q], weights[r]) * ~np.eye(300, dtype=bool)
        direct = (several * same).sum() / several.sum()
        assert found[q, r] == pytest.approx(direct, rel=0.05)  # but for the common factor
    following = np.append(ids[1:], -1)
    hit = (following[:, None] == ids[None, :]) & ~np.eye(300, dtype=bool)
    found = classes.pair_means(following, ids)
    np.testing.assert_allclose((found * classes.pair_count).sum(), hit.sum(), rtol=1e-9)


def test_short_texts_go_by_token_and_longer_ones_word_by_word() -> None:
    """Up to 64 tokens, under rotary positions 256; that copies are not followed as well is said."""
    strong = moments.preset("gpt2", seq_len=128).replace(layers=1, temperature=0.2)
    text = np.random.default_rng(3).zipf(1.1, 300) % 5000
    assert isinstance(predicted(strong, token_ids=text[:128]).layout.classes, TextClasses)
    assert predicted(strong.replace(seq_len=64), token_ids=text[:64]).layout.classes is None
    for length, by_token in ((256, True), (257, False)):
        turned = strong.replace(rotary=moments.Rotary(), seq_len=length)
        assert (predicted(turned, token_ids=text[:length]).layout.classes is None) == by_token
    long = strong.replace(seq_len=300)
    assert isinstance(predicted(long, token_ids=text).layout.classes, TextClasses)
    several = predicted(long, token_ids=np.stack([text, text[::-1]]))
    assert isinstance(several.layout.classes, TextClasses)
    assert not any("copies" in note for note in several.warnings)
    with pytest.warns(moments.ValidityWarning, match="mostly copies"):
        moments.predict(long, token_ids=np.stack([text, text]))


OTHERS = {
    "window": {"window": 10},
    "hybrid": {"norm": "hybrid"},
    "rotary in a window": {"window": 10, "rotary": moments.Rotary()},
    "rotary": {"rotary": moments.Rotary()},
    "normalised": {"rotary": moments.Rotary(), "qk_norm": "layernorm"},
    "biases": {"biases": moments.Biases(query=0.3, key=0.3, value=0.2)},
    "relative biases": {"relative_bias": moments.RelativeBias(0.3)},
    "relative biases in a window": {"window": 10, "relative_bias": moments.RelativeBias(0.3)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_queries_and_keys_that_are_not_the_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By token, with a class for every row: grouped rows alone cost .7 % of a Llama's gradient."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    model = Transformer(2, 128, 4, 40, dropout=0.1, causal=True, **OTHERS[name])
    by_class = predicted(model, correlation=0.3)
    by_token = predicted(model, tokens=True, correlation=0.3)
    assert by_class.layout.classes is not None
    np.testing.assert_allclose(by_class.variance, by_token.variance, rtol=1e-3)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=1.5e-3)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=4e-3)
    norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    ratio = (norms[0] / norms[1])["squared_norm"].dropna()
    table = ratio[ratio.index.get_level_values(1) == "relative_bias"]  # by rows of equal weights
    assert not len(table) or abs(table - 1).max() < 0.035
    others = ratio.drop(["key.bias", "relative_bias"], level=1, errors="ignore")
    assert abs(others - 1).max() < 0.012


@pytest.mark.parametrize("name", ["relative biases", "rotary"])
def test_tokens_that_know_their_distances_are_one_class(name: str) -> None:
    """Without a mask; which tokens are near each other is not known, which rotary positions of
    correlated tokens show: their queries' gradients by 4 %."""
    model = Transformer(2, 128, 4, 64, dropout=0.1, **OTHERS[name])
    alike, by_token = (predicted(model, tokens=t, correlation=0.2) for t in (False, True))
    assert alike.token_variance is None
    rotary = name == "rotary"
    np.testing.assert_allclose(alike.variance, by_token.variance, rtol=5e-4)
    np.testing.assert_allclose(alike.correlation, by_token.correlation, atol=5e-4)
    np.testing.assert_allclose(alike.grad_variance, by_token.grad_variance, rtol=5e-3)
    norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (alike, by_token)]
    ratio = (norms[0] / norms[1])["squared_norm"].dropna()
    assert abs(ratio - 1).max() < (0.05 if rotary else 0.02)
    assert "relative_bias" in ratio.index.get_level_values(1) or rotary


@pytest.mark.parametrize("relative", [None, moments.RelativeBias(0.2)])
def test_decoders_on_classes_read_encoders_of_tokens_alike(
    relative: moments.RelativeBias | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    encoder = Transformer(2, 96, 4, 36, dropout=0.1, relative_bias=relative)
    model = Transformer(
        2, 128, 4, 40, dropout=0.1, causal=True, encoder=encoder, relative_bias=relative
    )
    given = {"correlation": 0.2, "grad_correlation": 0.05}
    by_token, by_class = (predicted(model, tokens=t, **given) for t in (True, None))
    assert by_class.layout.classes is not None
    for found, expected in ((by_class, by_token), (by_class.encoder, by_token.encoder)):
        assert found is not None
        assert expected is not None
        np.testing.assert_allclose(found.variance, expected.variance, rtol=5e-4)
        np.testing.assert_allclose(found.correlation, expected.correlation, atol=5e-4)
        np.testing.assert_allclose(found.grad_variance, expected.grad_variance, rtol=4e-3)
        norms = [p.weight_gradients().set_index(["layer", "weight"]) for p in (found, expected)]
        ratio = (norms[0] / norms[1])["squared_norm"].dropna()
        assert abs(ratio - 1).drop("relative_bias", level=1, errors="ignore").max() < 0.015
        bands = [
            np.log(p.grad_variance_band[1] / p.grad_variance_band[0]) for p in (found, expected)
        ]
        np.testing.assert_allclose(*bands, rtol=0.06)


def test_gradients_that_fall_steeply_meet_those_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind many norms on the stream the first tokens' gradients are orders above the others'."""
    monkeypatch.setattr(token_rows, "SUPPORT_SLACK", 0.0)
    model = Transformer(16, 64, 4, 32, causal=True, norm="post")
    by_token, by_class = (predicted(model, tokens=t) for t in (True, None))
    assert by_class.layout.classes is not None
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=4e-3)
    logs = np.log(by_class.token_grad_variance / by_token.token_grad_variance)
    assert np.abs(logs[0, :-1]).max() < 0.04


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_halving_the_classes_of_a_long_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's by a third, whose words are not told apart."""
    model = moments.preset(name).replace(layers=2, seq_len=8192)
    fine = PositionClasses.for_length(8192, per_octave=3.0 if name == "gpt2" else 2.0)
    coarse = predicted(model)
    assert coarse.layout.classes is not None
    assert len(coarse.layout.classes.one_document.nodes) < len(fine.nodes)
    monkeypatch.setattr(PositionClasses, "for_length", classmethod(lambda *_, **__: fine))
    finer = predicted(model)
    np.testing.assert_allclose(coarse.variance, finer.variance, rtol=2e-3)
    np.testing.assert_allclose(coarse.grad_variance, finer.grad_variance, rtol=5e-3)
    np.testing.assert_allclose(coarse.correlation, finer.correlation, atol=2e-3)


def test_configurations_side_by_side_are_what_they_are_alone() -> None:
    model = Transformer(2, 64, 4, 40, causal=True, dropout=0.1)
    both = predicted(model, correlation=[0.0, 0.4], variance=[1.0, 2.0])
    for index, (variance, correlation) in enumerate(((1.0, 0.0), (2.0, 0.4))):
        alone = predicted(model, correlation=correlation, variance=variance)
        for name in ("variance", "correlation", "grad_variance", "grad_variance_typical"):
            np.testing.assert_allclose(
                getattr(both, name)[index], getattr(alone, name), rtol=2e-3, atol=1e-12
            )


def test_what_classes_do_not_cover_is_resolved_by_token() -> None:
    plain = Transformer(1, 64, 4, 40, causal=True)
    assert predicted(plain).layout.classes is not None
    text = np.arange(40) % 7
    embedded = plain.replace(embedding=moments.Embedding(50, 1.0))
    assert predicted(embedded, token_ids=text).layout.classes is None
    mostly = moments.Embedding(50, 0.1, positions="sinusoidal")
    assert predicted(plain.replace(embedding=mostly)).layout.classes is None
    assert predicted(plain.replace(causal=False)).token_variance is None
    assert predicted(plain.replace(seq_len=16)).layout.classes is None


def test_what_the_benchmark_measured_is_within_the_bounds() -> None:
    """The stored run of `benchmarks/position_classes.py`: against every token with a row of its
    own, and against twice the classes."""
    path = Path(__file__).parents[1] / "benchmarks" / "data" / "position_classes.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    bounds = {
        "variance": 1e-3,
        "correlation": 2e-3,
        "gradient": 5e-3,
        "weight gradients": 0.02,
        "queries and keys": 0.03,
    }
    assert len(stored["rows of their own"]) >= 6
    for name, found in stored["rows of their own"].items():
        for quantity, bound in bounds.items():
            assert found[quantity] < bound, (name, quantity)
        assert found["band"] < 0.05, name  # a mask's edge is met to the order of a cell there
    words = bounds | {"variance": 5e-3, "correlation": 6e-3, "gradient": 0.03}
    words |= {"weight gradients": 0.1, "queries and keys": 0.1}
    assert len(stored["texts under strong logits"]) >= 7
    for name, found in stored["texts under strong logits"].items():
        for quantity, bound in words.items():
            assert found[quantity] < bound, (name, quantity)
    several = stored["several texts under strong logits"]
    assert len(several) >= 6
    for name, found in several.items():
        alike = {"weight gradients": 0.11, "queries and keys": 0.17} if "common" in name else {}
        for quantity, bound in (words | {"weight gradients": 0.06} | alike).items():
            assert found[quantity] < bound, (name, quantity)
    # Of texts what differs from one to the other is averaged: docs/theory/positions.md
    texts = {"correlation": 2.5e-3, "gradient": 6e-3, "queries and keys": 0.035}
    beyond = {
        "sinusoidal positions, tables of variance 0.5, 4 x 64": {"variance": 1.3e-3},
        "windows of 16, Post-LN without a mask, 3 x 64": {"correlation": 2.5e-3},
    }
    assert len(stored["several documents"]) >= 8
    assert len(stored["places"]) >= 7
    for name, found in (stored["several documents"] | stored["places"]).items():
        own = bounds | (texts if "texts" in name else beyond.get(name, {}))
        for quantity, bound in own.items():
            assert found[quantity] < bound, (name, quantity)
        assert found["band"] < 0.08, name
    for name, found in stored["rotary positions without a mask"].items():
        assert max(found["variance"], found["correlation"]) < 1e-3, name
        assert found["gradient"] < 0.012, name
        assert max(found["band"], found["queries and keys"]) < 0.13, name  # repeats.md
    assert "Llama 3 8B, 32 x 8192" in stored["twice the classes"]
    for name, found in stored["twice the classes"].items():
        # turned positions over thousands of tokens, and tables: docs/theory/positions.md
        windowed = name.startswith("Mistral")
        for quantity in ("variance", "correlation", "gradient"):
            most = 1e-3 if windowed and quantity == "gradient" else bounds[quantity]
            assert found[quantity] < most, (name, quantity)
        apart = {
            "Mistral": ("queries and keys", 0.05),
            "Pythia ": ("queries and keys", 0.04),
            "T5 smal": ("weight gradients", 0.06),
        }
        quantity, most = apart.get(name[:7], ("queries and keys", 0.03))
        assert found[quantity] < most, name
        assert windowed or max(found["weight gradients"], found["queries and keys"]) < 0.07, name


def test_distance_penalties_go_token_by_token() -> None:
    """In windows of 8 tokens under RMSNorm and in parallel blocks, where sums over cells of
    positions once gave queries of the second layer no gradient at all."""
    given: dict[str, Any] = {"causal": True, "alibi": True, "window": 8, "parallel": True}
    model = Transformer(2, 64, 2, 40, normalization="rmsnorm", **given)
    moments_given = {"correlation": 0.9, "grad_correlation": 0.6}
    found = predicted(model, **moments_given)
    assert found.layout.classes is None
    assert found.resolution == "by token"
    measured = moments.simulate(model, grad_variance=1.0, seeds=16, batch=8, **moments_given)
    frames = [one.weight_gradients().set_index(["layer", "weight"]) for one in (found, measured)]
    drawn, error = frames[1]["squared_norm"], frames[1]["squared_norm_stderr"]
    for name in ("query", "key"):
        for layer in (1, 2):
            expected, one = drawn[layer, name], frames[0]["squared_norm"][layer, name]
            assert one == pytest.approx(expected, abs=4 * error[layer, name] + 0.08 * expected)


def test_long_sequences_under_distance_penalties_are_refused() -> None:
    model = Transformer(1, 64, 4, 513, causal=True, alibi=True)
    with pytest.raises(moments.DomainError, match=r"513.*512 at most under ALiBi.*tokens=True"):
        moments.predict(model)
    with pytest.raises(moments.DomainError, match="ALiBi"):
        moments.predict(Transformer(1, 64, 4, 40, encoder=model))


# --- several sequences and documents --------------------------------------------------------------


def shares_of_one_token(lengths: tuple[int, ...], ids: np.ndarray) -> tuple[float, float, float]:
    """Ordered pairs of two tokens that are one word: of one document, of two, at one place of two;
    counted token by token."""
    found = np.zeros(3)
    for d, first in enumerate(lengths):
        for e, second in enumerate(lengths):
            same = ids[d, :first, None] == ids[e, None, :second]
            at_place = np.eye(first, second, dtype=bool)
            found[0] += (same & ~at_place).sum() * (d == e)
            found[1] += (same & ~at_place).sum() * (d != e)
            found[2] += (same & at_place).sum() * (d != e)
    return tuple(found)


@pytest.mark.parametrize("lengths", [(96, 96), (96, 40, 70), (40, 40, 96, 41, 7)])
def test_counts_of_several_documents(lengths: tuple[int, ...]) -> None:
    """Of tokens and pairs as many as there are, and of pairs of one word as many as a text has."""
    classes = documents_on(PositionClasses.for_length(max(lengths)), lengths)
    every, size = np.array(lengths), len(classes.one_document.nodes)
    np.testing.assert_allclose(classes.count.sum(), every.sum(), rtol=1e-9)
    whole = float(every.sum() * (every.sum() - 1))
    np.testing.assert_allclose(classes.pair_count.sum(), whole, rtol=5e-4)
    np.testing.assert_allclose(classes.inside_count.sum(), every @ (every - 1.0), rtol=1e-9)
    # of a function that is smooth in log position
    place = np.log(np.arange(1.0, max(lengths) + 1) + 3.0)
    held = np.tile(np.log(classes.one_document.nodes + 3.0), 2)
    direct = sum(place[:length].sum() for length in lengths)
    np.testing.assert_allclose((classes.count * held).sum(), direct, rtol=1e-4)
    pairs = sum(np.outer(place[:a], place[:b]).sum() for a in lengths for b in lengths)
    pairs -= sum((place[:a] ** 2).sum() for a in lengths)
    found = (classes.pair_count * np.outer(held, held)).sum()
    np.testing.assert_allclose(found, pairs, rtol=2e-3)  # those beside the diagonal are read off it
    ids = np.random.default_rng(1).zipf(1.4, (len(lengths), max(lengths))) % 50
    inside, across, at_place = shares_of_one_token(lengths, ids)
    shares = classes.pair_means(ids, ids)
    (_, inner), (own, outer) = classes.blocks(np.zeros(2 * size), shares)
    np.testing.assert_allclose((inner * classes.inside_count).sum(), inside, rtol=1e-9)
    np.testing.assert_allclose((own * classes.across_count[0]).sum(), at_place, rtol=1e-9)
    whole = (classes.pair_count * shares).sum()
    np.testing.assert_allclose(whole, inside + across + at_place, rtol=0.05)
    assert outer.shape == (size, size)


def test_documents_alike_are_one_that_shares_its_weights() -> None:
    """With every position a node: what is inside is one document by itself, and what two share at
    one place is where theirs is."""
    classes = documents_on(PositionClasses.for_length(6), (6, 6))
    random = np.random.default_rng(2)
    inside, across = ((random.normal(size=6), random.normal(size=(6, 6))) for _ in range(2))
    across = across[0], across[1] + across[1].T
    own, pairs = classes.joined(inside, across)
    np.testing.assert_array_equal(
        pairs, np.block([[inside[1], pairs[:6, 6:]], [pairs[:6, 6:].T, inside[1]]])
    )
    back = classes.blocks(own, pairs)
    np.testing.assert_array_equal(back[0][1], inside[1])
    np.testing.assert_array_equal(back[1][0], across[0])
    apart = ~np.eye(6, dtype=bool)
    np.testing.assert_array_equal(back[1][1][apart], across[1][apart])


def test_several_texts_are_those_by_token() -> None:
    """Bounds: those of all, and what was measured of the band and half again."""
    rank = np.arange(1.0, 50258)
    text = np.random.default_rng(3).choice(50257, (2, 64), p=1 / rank / (1 / rank).sum())
    model = moments.preset("gpt2", seq_len=64).replace(layers=2)
    inputs = {"token_ids": text, "attention_mask": np.arange(64) < np.array([[64], [56]])}
    by_token, by_class = (predicted(model, tokens=t, **inputs) for t in (True, None))
    assert by_class.resolution == "11 classes of positions and of words"
    assert not by_class.warnings
    np.testing.assert_allclose(by_class.variance, by_token.variance, rtol=1e-3)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=2e-3)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=5e-3)
    np.testing.assert_allclose(by_class.loss, by_token.loss, rtol=1e-3)
    np.testing.assert_allclose(by_class.loss_stderr, by_token.loss_stderr, rtol=0.02)
    both = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    ratio = (both[0].squared_norm / both[1].squared_norm).drop("key.bias", level="weight")
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.02)
    bands = [
        np.log(p.grad_variance_band[1] / p.grad_variance_band[0]) for p in (by_class, by_token)
    ]
    np.testing.assert_allclose(*bands, rtol=0.06)


def test_packed_rows_are_those_by_token() -> None:
    model = Transformer(3, 256, 4, 104, causal=True)
    inputs = {"correlation": 0.2, "document_ids": np.repeat([0, 1], [64, 40])}
    by_token, by_class = (predicted(model, tokens=t, **inputs) for t in (True, None))
    assert by_class.resolution == "13 classes of positions"
    np.testing.assert_allclose(by_class.variance, by_token.variance, rtol=5e-4)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=3e-4)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=4e-3)
    both = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    assert (both[0].squared_norm / both[1].squared_norm).to_numpy() == pytest.approx(1.0, abs=0.015)
    places = by_class.token_variance[:, [0, 63, 64, 103]]
    np.testing.assert_allclose(places, by_token.token_variance[:, [0, 63, 64, 103]], rtol=2e-3)
    alone = predicted(model.replace(seq_len=64), correlation=0.2)
    np.testing.assert_allclose(by_class.token_variance[:, :64], alone.token_variance, rtol=1e-6)


def test_a_padded_row_is_the_shorter_one() -> None:
    model = Transformer(2, 256, 4, 96, causal=True)
    found = predicted(model, correlation=0.2, attention_mask=np.arange(96) < 60)
    alone = predicted(model.replace(seq_len=60), correlation=0.2)
    np.testing.assert_allclose(found.variance, alone.variance, rtol=1e-12)
    np.testing.assert_allclose(found.grad_variance, alone.grad_variance, rtol=1e-12)
    np.testing.assert_array_equal(found.token_grad_variance[:, 60:], 0.0)


# --- sinusoidal positions, and windows without a mask ---------------------------------------------


def as_by_token(
    model: Transformer, inputs: dict[str, Any], without: tuple[str, ...] = ()
) -> moments.Prediction:
    """A prediction on classes within the bounds of all, against one by token."""
    by_token, by_class = (predicted(model, tokens=t, **inputs) for t in (True, None))
    assert by_class.layout.classes is not None
    np.testing.assert_allclose(by_class.variance, by_token.variance, rtol=1e-3)
    np.testing.assert_allclose(by_class.correlation, by_token.correlation, atol=2e-3)
    np.testing.assert_allclose(by_class.grad_variance, by_token.grad_variance, rtol=5e-3)
    both = [p.weight_gradients().set_index(["layer", "weight"]) for p in (by_class, by_token)]
    ratio = both[0].squared_norm / both[1].squared_norm
    ratio = ratio[~ratio.index.get_level_values("weight").isin(without)]
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.02)
    return by_class


def test_sinusoidal_positions_by_means_over_cells(
    own_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = moments.Embedding(1000, 1.0, positions="sinusoidal")
    model = Transformer(2, 128, 4, 64, causal=True, embedding=tables)
    monkeypatch.setattr("moments.prediction.resolution.repeating", lambda *_: False)
    # By token the tokens of an unknown text differ, on classes they follow Zipf's law.
    as_by_token(model, {}, without=("token",))


def test_windows_without_a_mask(own_rows: None) -> None:
    model = Transformer(2, 128, 4, 48, window=(12, None), dropout=0.1, rotary=moments.Rotary())
    found = as_by_token(model, {"correlation": 0.2})
    # Nothing tells the two sides apart.
    by_place = found.token_variance
    np.testing.assert_allclose(by_place, by_place[:, ::-1], rtol=0.01)


@pytest.mark.parametrize("window", [16, 128])
def test_sums_over_what_rows_see_on_both_sides(window: int) -> None:
    classes = both_sides(PositionClasses.for_length(128, 16))
    key_counts, place = classes.key_counts(window), np.arange(1, 129)
    values = np.log(place + 10.0)
    held = values[classes.nodes - 1]
    seen = np.abs(np.subtract.outer(classes.nodes, place)) < window
    np.testing.assert_array_equal(key_counts.size, seen.sum(1))
    np.testing.assert_allclose(key_counts.keys @ held, seen @ values, rtol=1e-3)
    sizes = (np.abs(np.subtract.outer(place, place)) < window).sum(1)
    sums = key_counts.rows @ (held / key_counts.size)
    np.testing.assert_allclose(sums, seen @ (values / sizes), rtol=2e-3)
    both = np.einsum("pi,qi->pqi", seen, seen)
    np.testing.assert_allclose(key_counts.shared @ held, both @ values, rtol=0.01, atol=0.1)
    sums = np.einsum("pqr,r->pq", key_counts.rows_of_pair, held / key_counts.size**2)
    np.testing.assert_allclose(sums, both @ (values / sizes**2), rtol=0.02, atol=2e-3)


# --- texts that see both sides, and classifiers ---------------------------------------------------


def texts(*shape: int) -> np.ndarray:
    """Tokens by Zipf's law, none of which pads."""
    share = 1.0 / np.arange(1.0, 30001)
    return np.random.default_rng(0).choice(30000, shape, p=share / share.sum()) + 1


def compared(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[moments.Prediction, moments.Prediction, Any]:
    """On classes and by token, and the ratios of their gradients of weights."""
    monkeypatch.setattr(deciding, "SHORT_TEXT", 32)
    monkeypatch.setattr(deciding, "SHORT_TURNED", 32)
    found, expected = predicted(model, **given), predicted(model, tokens=True, **given)
    assert found.layout.classes is not None
    one, other = (p.weight_gradients().set_index(["layer", "weight"]) for p in (found, expected))
    ratio = (one.squared_norm / other.squared_norm).drop("key.bias", level=1, errors="ignore")
    return found, expected, ratio.dropna()


@pytest.mark.parametrize("count", [1, 3])
def test_texts_without_a_mask(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moments.preset("bert-base").replace(layers=2, seq_len=64)
    ids = texts(count, 64)
    same = np.zeros_like(ids)  # as tokenizers say of one segment
    found, expected, ratio = compared(model, monkeypatch, token_ids=ids)
    np.testing.assert_allclose(found.correlation, expected.correlation, atol=3e-4)
    np.testing.assert_allclose(found.grad_variance, expected.grad_variance, rtol=3e-4)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.035)  # words of one frequency
    sharp = ratio.index.get_level_values(1).str.startswith(("query", "key"))
    assert ratio[~sharp].to_numpy() == pytest.approx(1.0, abs=2e-3)
    again = predicted(model, token_ids=ids, segment_ids=same)
    assert again.resolution == found.resolution
    np.testing.assert_allclose(again.grad_variance, found.grad_variance, rtol=1e-12)


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("causal", [False, True])
def test_classifiers_of_texts(pool: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    head = moments.Head(
        loss="classification", classes=3, tied=False, weight_variance=4e-4, pool=pool, norm=causal
    )
    model = moments.preset("gpt2" if causal else "bert-base")
    model = model.replace(layers=2, seq_len=64, head=head)
    given = {"token_ids": texts(3, 64), "targets": np.array([0, 1, 0])}
    found, expected, _ = compared(model, monkeypatch, **given)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-3)
    np.testing.assert_allclose(found.loss_stderr, expected.loss_stderr, rtol=0.03)
    np.testing.assert_allclose(found.grad_variance, expected.grad_variance, rtol=8e-3)
    one, other = (p.weight_gradients().set_index(["layer", "weight"]) for p in (found, expected))
    whole = other.squared_norm.groupby(level="weight").sum()
    apart = (one.squared_norm - other.squared_norm).groupby(level="weight").sum()
    assert (apart / whole)[whole > 1e-6 * whole.max()].abs().max() < (
        0.06 if causal and pool == "mean" else 0.02
    )


def test_batches_that_were_too_large_by_token() -> None:
    model = moments.preset("bert-base").replace(layers=1)
    assert "classes" in predicted(model, token_ids=texts(8, 512)).resolution
    mask = np.ones((2, 512))
    mask[1, 300:] = 0.0  # what bidirectional rows see differs with the length
    with pytest.raises(moments.DomainError, match="memory"):
        predicted(
            model.replace(layers=40),
            token_ids=texts(16, 512),
            attention_mask=np.repeat(mask, 8, axis=0),
        )


@pytest.mark.parametrize(("length", "window"), [(300, None), (700, None), (300, 64)])
@pytest.mark.parametrize("shared", [0.0, 0.2])
def test_buckets_that_two_rows_share_are_summed_over_every_pair(
    length: int, window: int | None, shared: float
) -> None:
    """Of rows that see their keys alike, against sums over every two of them; of keys of their own
    and of keys that have the less in common the later they are."""
    table = moments.RelativeBias(0.1)
    classes = PositionClasses.for_length(length, window)
    key_counts, size = classes.key_counts(window), len(classes.nodes)
    weights = np.where(key_counts.visible, 1.0 / key_counts.size[:, None], 0.0)
    later = shared * (8.0 / (8.0 + np.maximum.outer(classes.nodes, classes.nodes)))
    own, pairs = shifted_classes(key_counts, table, weights, (np.ones(size), later))
    place = np.arange(length)
    seen = (place <= place[:, None]) & (place > place[:, None] - (window or length))
    bucket = table.bucket(place - place[:, None], True)
    kernel = shared * (8.0 / (9.0 + np.maximum.outer(place, place)))
    np.fill_diagonal(kernel, 1.0)
    exact = shifted_together(seen / seen.sum(1, keepdims=True), bucket, kernel)
    assert own @ classes.count == pytest.approx(np.trace(exact), rel=0.02)
    np.fill_diagonal(exact, 0.0)
    apart = (pairs * classes.pair_count).sum() - exact.sum()
    assert abs(apart) < 0.07 * np.abs(exact).sum()
