"""Texts on classes of positions whose words are told apart, against sums over every token."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moments
from moments.engine.classes import ClassMatrix, PositionClasses, documents_on, one_class
from moments.engine.texts import TextClasses, repeated_words, text_classes, zipf_classes
from moments.layers.attention.kernels.joint_laws import Mixture, Sums
from moments.layers.attention.kernels.position_attention import PositionAttention

LENGTH = 264


def zipf_text(seed: int, vocab_size: int = 5000, length: int = LENGTH) -> np.ndarray:
    shares = 1.0 / np.arange(1.0, vocab_size + 1.0)
    rng = np.random.default_rng(seed)
    return rng.choice(vocab_size, size=length, p=shares / shares.sum())


def predicted(model: moments.Transformer, **arguments: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **arguments)


def llama(initializer_range: float = 0.08) -> moments.Transformer:
    """Logits of variance 2.7, as Llama's are."""
    return moments.from_huggingface(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "vocab_size": 5000,
            "initializer_range": initializer_range,
            "max_position_embeddings": LENGTH,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    ).replace(seq_len=LENGTH)


def gpt(initializer_range: float = 0.08) -> moments.Transformer:
    return moments.from_huggingface(
        {
            "model_type": "gpt2",
            "n_embd": 256,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 5000,
            "n_positions": LENGTH,
            "initializer_range": initializer_range,
        }
    ).replace(seq_len=LENGTH, dropout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama(), gpt()], ids=["llama", "tied gpt2"])
def test_a_text_word_by_word(model: moments.Transformer) -> None:
    """By classes as by token. The bands differ by less than that of either from 300 draws
    (docs/limits.md), of which the one by classes is nearer."""
    text = zipf_text(5)
    by_token, by_word = (predicted(model, token_ids=text, tokens=kind) for kind in (True, None))
    assert isinstance(by_word.layout.classes, TextClasses)
    np.testing.assert_allclose(by_word.variance, by_token.variance, rtol=4e-3)
    np.testing.assert_allclose(by_word.grad_variance, by_token.grad_variance, rtol=1.5e-2)
    np.testing.assert_allclose(by_word.correlation, by_token.correlation, atol=5e-3)
    np.testing.assert_allclose(by_word.loss, by_token.loss, rtol=1e-3)
    one, other = (p.weight_gradients().set_index(["layer", "weight"]) for p in (by_word, by_token))
    ratio = (one.squared_norm / other.squared_norm).drop(
        "key.bias", level="weight", errors="ignore"
    )
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.1)
    np.testing.assert_allclose(deviation(by_word), deviation(by_token), rtol=0.1)


def deviation(found: moments.Prediction) -> np.ndarray:
    """Of one draw."""
    low, high = found.grad_variance_band
    return np.asarray(np.log(high / low))


TEXTS = np.stack([zipf_text(seed, length=LENGTH) for seed in (3, 4)])

BATCHES: dict[str, dict[str, Any]] = {
    "two texts": {"token_ids": TEXTS[:, :144]},
    "that begin alike": {
        "token_ids": np.concatenate([TEXTS[[0, 0], :48], TEXTS[:, 48:144]], axis=1)
    },
    "of unequal length": {
        "token_ids": TEXTS[:, :144],
        "attention_mask": np.arange(144) < np.array([[144], [100]]),
    },
    "packed": {"token_ids": TEXTS[0], "document_ids": np.repeat([0, 1], [144, 120])},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"),
    list(zip(BATCHES, (llama(), llama(), gpt(), gpt()), strict=True)),
    ids=BATCHES,
)
def test_texts_word_by_word(
    name: str, model: moments.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of several texts by classes as by token, those that two of them share too; texts
    that begin alike are followed less closely."""
    monkeypatch.setattr("moments.prediction.resolution.SHORT_TURNED", 64)
    given = BATCHES[name]
    short = model.replace(seq_len=given["token_ids"].shape[-1])
    by_token, by_word = (predicted(short, tokens=kind, **given) for kind in (True, None))
    assert isinstance(by_word.layout.classes, TextClasses)
    assert len(by_word.layout.classes.document_lengths) == 2
    alike = name == "that begin alike"
    np.testing.assert_allclose(by_word.variance, by_token.variance, rtol=5e-3)
    np.testing.assert_allclose(
        by_word.grad_variance, by_token.grad_variance, rtol=0.015 + 0.02 * alike
    )
    np.testing.assert_allclose(by_word.correlation, by_token.correlation, atol=7e-3)
    np.testing.assert_allclose(by_word.loss, by_token.loss, rtol=1e-3)
    norms = (p.weight_gradients().set_index(["layer", "weight"]) for p in (by_word, by_token))
    one, other = (frame.squared_norm for frame in norms)
    ratio = (one / other).drop("key.bias", level="weight", errors="ignore")
    assert ratio.to_numpy() == pytest.approx(1.0, abs=0.06 + 0.09 * alike)
    if name == "two texts":
        np.testing.assert_allclose(deviation(by_word), deviation(by_token), rtol=0.08)


def test_rows_that_meet_twice_share_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if projected anew for rows of one word: no law writes over what the next one needs."""
    model = moments.preset("llama-3-8b").replace(layers=1, seq_len=1024)
    shared, laws = predicted(model), PositionAttention._joint_laws

    def anew(self: PositionAttention) -> None:
        self._project()
        laws(self)

    monkeypatch.setattr(PositionAttention, "_joint_laws", anew)
    alone = predicted(model)
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(getattr(shared, name), getattr(alone, name), rtol=1e-12)
    squares = (one.weight_gradients()["squared_norm"] for one in (shared, alone))
    np.testing.assert_allclose(*squares, rtol=1e-12)


def test_pairs_of_two_texts_are_counted_by_word() -> None:
    """Of every two tokens of one text and of two, by kind: those near one place of two texts are
    read off both sides of it."""
    rng = np.random.default_rng(4)
    ids, other = rng.integers(0, 12, (3, 90)), rng.integers(0, 5, (3, 90))
    lengths = np.array([90, 70, 33])
    there = np.arange(90) < lengths[:, None]
    classes = text_classes(
        documents_on(PositionClasses.for_length(90), tuple(lengths.tolist())), ids
    )
    read, met = ids[there], other[there]
    off = ~np.eye(len(read), dtype=bool)
    same = (read[:, None] == read[None, :]) & off
    np.testing.assert_allclose(classes.sum_of_pairs(classes.same_word), same.sum(), rtol=3e-3)
    place = np.nonzero(there)[1]
    placed = (place[:, None] == place[None, :]) & off
    np.testing.assert_allclose(classes.sum_of_pairs(classes.same_position), placed.sum(), rtol=3e-3)
    hit = (met[:, None] == read[None, :]) & off
    found = classes.pair_means(other, ids)
    np.testing.assert_allclose(classes.sum_of_pairs(found), hit.sum(), rtol=3e-3)
    both = classes.sum_of_pairs(found * classes.same_word)
    np.testing.assert_allclose(both, (hit & same).sum(), rtol=2e-2)


def test_a_text_that_begins_with_one_word_again_and_again() -> None:
    """First rows that read one word alone: as by token where they are few, by token where many,
    and refused where these are too many."""
    text = zipf_text(5)
    text[0] = text[1]
    by_token, by_word = (predicted(llama(), token_ids=text, tokens=kind) for kind in (True, None))
    assert isinstance(by_word.layout.classes, TextClasses)
    np.testing.assert_allclose(by_word.variance, by_token.variance, rtol=1e-2)
    np.testing.assert_allclose(by_word.grad_variance, by_token.grad_variance, rtol=2.5e-2)
    np.testing.assert_allclose(by_word.correlation, by_token.correlation, atol=6e-3)
    text[: LENGTH // 2] = text[2]
    assert predicted(llama(), token_ids=text).layout.classes is None
    with pytest.raises(moments.DomainError, match=r"token_ids = .*tokens=True"):
        predicted(llama().replace(seq_len=2 * LENGTH), token_ids=np.tile(text, 2))


def test_zipfs_law_is_a_text_by_it() -> None:
    """What no text is given of is what texts drawn by that law are on average: in a sample of 40
    words repeat as often, and as often with a third."""
    classes = zipf_classes(one_class(4000), 5000)
    texts = [text_classes(one_class(4000), zipf_text(seed, length=4000)) for seed in range(40)]
    for name, atol in (("share", 2e-4), ("same_word_share", 3e-3)):
        found = np.array([np.mean(getattr(one, name)) for one in texts])
        error = found.std() / len(found) ** 0.5
        assert abs(found.mean() - np.mean(getattr(classes, name))) < 3 * error + atol / 10
        assert error < atol


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 40), st.integers(2, 60))
def test_repeated_words_sum_as_all_do(seed: int, vocab_size: int, length: int) -> None:
    """Of pairs of one word, and of a third that is of it too."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, length)
    count = np.unique(ids, return_counts=True)[1]
    shares, portions = (count - 1.0) / (length - 1.0), count / length
    repeated, frequent = repeated_words(shares, portions)
    assert 0.0 <= repeated <= 1.0 + 1e-12
    for power in (1, 2):
        assert repeated * frequent**power == pytest.approx(float(shares**power @ portions))


def test_pairs_are_counted_by_word() -> None:
    """Of every pair of tokens, by kind: as many as there are, whatever is asked of them."""
    rng = np.random.default_rng(2)
    ids, other = rng.integers(0, 12, 200), rng.integers(0, 5, 200)
    classes = text_classes(PositionClasses.for_length(200), ids)
    off = ~np.eye(200, dtype=bool)
    same = (ids[:, None] == ids[None, :]) & off
    np.testing.assert_allclose(classes.sum_of_pairs(classes.same_word), same.sum(), rtol=1e-9)
    met = (other[:, None] == ids[None, :]) & off
    found = classes.pair_means(other, ids)
    np.testing.assert_allclose(classes.sum_of_pairs(found), met.sum(), rtol=1e-9)
    both = classes.sum_of_pairs(found * classes.same_word)
    np.testing.assert_allclose(both, (met & same).sum(), rtol=1e-9)
    assert classes.following_pairs.min() >= 0.0


def dense_law(law: tuple[Any, ...], ids: np.ndarray, repeated: np.ndarray) -> np.ndarray:
    """Over every two tokens: of two words, of one, and of a token with itself, by whether its word
    is read once."""
    others, same, own = law
    found = np.where(ids[:, None] == ids[None, :], same, others)
    np.fill_diagonal(found, np.where(repeated, own[1], own[0]))
    return found


def test_a_law_is_scaled_as_if_token_by_token() -> None:
    """One class of tokens: some read once, the others all as often, which two kinds are exactly."""
    ids = np.concatenate([np.arange(30), 100 + np.repeat(np.arange(6), 5)])
    length, repeated = len(ids), ids >= 100
    classes = text_classes(one_class(length), ids)
    mixture = Mixture(classes.share, classes.repeated_share)
    assert classes.repeated_share == pytest.approx(0.5)
    aims = np.where(repeated, 0.7, 1.3)
    others, same, own = 0.8, 3.0, (4.0, 5.0)
    dense = dense_law((others, same, own), ids, repeated)
    left = right = np.ones(length)
    for _ in range(400):
        right = aims / (dense.T @ left / length)
        left = aims / (dense @ right / length)
    dense = left[:, None] * dense * right
    each = np.array([[[1.3, 0.7]]])
    weight = np.full((1, 1), 1.0)  # one over the tokens, times the tokens
    token = np.full((1, 1), 1.0 / length)
    every = slice(0, 1)
    sums = Sums.of(mixture, (every, every), (weight, weight), (token, token), (each, each))
    by_word = [
        (np.full((1, 1), own[kind] - value), np.full((1, 1, 1), value))
        for kind, value in enumerate((others, same))
    ]
    found, _ = sums.balanced_with(by_word, 200, ())
    off = ~np.eye(length, dtype=bool)
    of_one = (ids[:, None] == ids[None, :]) & off
    assert found[1][1].item() == pytest.approx(dense[of_one].mean(), rel=1e-6)
    # Means over pairs are those over tokens of either: one in as many is a token with itself.
    assert found[0][1].item() == pytest.approx(dense[~of_one & off].mean(), rel=3e-3)
    alone = np.diagonal(dense)
    for kind, which in enumerate((~repeated, repeated)):
        single = found[kind][0] + found[kind][1][:, :, 0]
        assert single.item() == pytest.approx(alone[which].mean(), rel=1e-6)


def test_matrices_of_words_multiply_as_by_token() -> None:
    """`ClassMatrix` of words that are all as frequent, in one class: products, sums and traces of
    matrices over every token, up to one token in the sums over cells."""
    words, often = 40, 25
    ids = np.repeat(np.arange(words), often)
    length = len(ids)
    classes = text_classes(one_class(length), ids)
    one_word = ids[:, None] == ids[None, :]
    off = ~np.eye(length, dtype=bool)
    rng = np.random.default_rng(3)
    dense, found = [], []
    for _ in range(2):
        own, others, same = rng.uniform(0.5, 1.0, 3)
        same /= often
        others /= length
        dense.append(np.where(one_word, same, others) * off + np.diag(np.full(length, own)))
        by_word = classes.from_word_blocks(np.full((1, 1), others), np.full((1, 1), same))
        found.append(ClassMatrix(np.full(2, own), by_word, classes))
    both, product = dense[0] @ dense[1], found[0] @ found[1]
    others, same = (part.item() for part in classes.by_word(product.off_diagonal))
    assert same == pytest.approx(both[one_word & off].mean(), rel=2e-3)
    assert others == pytest.approx(both[~one_word].mean(), rel=2e-2)
    assert product.diagonal[0] == pytest.approx(np.diag(both).mean(), rel=2e-3)
    assert product.total() == pytest.approx(both.sum(), rel=1e-2)
    assert product.trace() == pytest.approx(np.trace(both), rel=2e-3)
    column = rng.normal(size=1)
    np.testing.assert_allclose(
        (found[0] @ np.repeat(column, 2)[:, None])[0, 0], (dense[0] @ np.full(length, column))[0]
    )


def test_parts_multiply_by_themselves() -> None:
    """X C X' over every token, of words that are all as frequent: by parts up to one token in the
    sums over cells."""
    words, often = 40, 25
    ids = np.repeat(np.arange(words), often)
    length = len(ids)
    classes = text_classes(one_class(length), ids)
    mixture = Mixture(classes.share, classes.repeated_share)
    rng = np.random.default_rng(1)
    law = [rng.uniform(0.1, 1.0, 3) for _ in range(2)]
    law[0][1:] /= length / 4
    dense = [
        np.where(ids[:, None] == ids[None, :], same, others) + np.diag(np.full(length, own))
        for own, others, same in law
    ]
    product = dense[0] @ dense[1]
    parts = []
    for own, others, same in law:
        pairs = [np.full((1, 1), value) for value in (others, same)]
        parts.append(mixture.parts_of([np.full(1, own + same)], pairs, np.diagonal))
    counts = [float(length), length * classes.same_word_share]
    found = []
    for count, (a, left), (b, right) in zip(counts, *parts, strict=True):
        found.append((a * b, a[:, None] * right + left * b + count * left * right))
    alone, of_relations = parts[0][0][0], mixture.joined(found, found[0][0])
    assert alone.shape == (1,)
    off = ~np.eye(length, dtype=bool)
    one = (ids[:, None] == ids[None, :]) & off
    assert of_relations[1][1].item() == pytest.approx(product[one].mean(), rel=2e-3)
    assert of_relations[0][1].item() == pytest.approx(product[~one & off].mean(), rel=2e-3)


@pytest.mark.parametrize(
    ("seed", "model"), [(5, llama(0.1)), (5, gpt(0.12))], ids=["llama", "gpt2"]
)
def test_texts_of_few_words(
    seed: int, model: moments.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells that hold more of one word than words of its frequency make up of the text: their
    tokens' frequencies agree, and no word's sum over keys turns negative. GPT-2's logit variance
    is beyond 12 here, which predictions warn of."""
    monkeypatch.setattr("moments.prediction.resolution.SHORT_TURNED", 64)
    text = zipf_text(seed, vocab_size=150, length=144)
    by_token, by_word = (
        predicted(model.replace(seq_len=144), token_ids=text, tokens=kind) for kind in (True, None)
    )
    assert isinstance(by_word.layout.classes, TextClasses)
    np.testing.assert_allclose(by_word.variance, by_token.variance, rtol=0.05)
    np.testing.assert_allclose(by_word.correlation, by_token.correlation, atol=0.03)
    np.testing.assert_allclose(by_word.grad_variance[1:], by_token.grad_variance[1:], rtol=0.03)
    assert by_word.grad_variance[0] == pytest.approx(by_token.grad_variance[0], rel=0.1)


def packed(seed: int, *lengths: int, tokens: bool | None = None) -> moments.Prediction:
    """Texts by Zipf's law in one row, under a logit variance of 2.7."""
    count = sum(lengths)
    model = moments.Transformer(
        layers=1,
        d_model=256,
        heads=4,
        seq_len=count,
        d_ff=512,
        normalization="rmsnorm",
        activation="silu",
        causal=True,
        weights=moments.Weights.normal(0.0064),
        rotary=moments.Rotary(),
        embedding=moments.Embedding(vocab_size=32000, token_variance=0.0064),
        head=moments.Head(tied=False, weight_variance=0.0064, loss="causal"),
    )
    ids = np.minimum(np.random.default_rng(seed).zipf(1.1, count), 31_999)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, token_ids=ids, document_ids=documents, tokens=tokens)


def test_shares_of_words_of_two_texts_are_shares() -> None:
    """In cells that are read off those beside them some were negative, and texts were refused."""
    found = [
        share for seed in range(6) for _, share in packed(seed, 292, 220).layout.classes.shares
    ]
    assert np.min(found) >= 0.0
    assert np.max(found) <= 1.0


@pytest.mark.slow
def test_rows_of_two_texts_move_their_own() -> None:
    """What a row adds to the tokens that it attends to is of its own text: spread over what two
    texts share at one place, which may sum to nothing, gradients came out up to 1e9 too large."""
    ours, every = packed(2, 292, 281), packed(2, 292, 281, tokens=True)
    for layer in ours.trace.stack.walk():
        kernel = layer.output.kernel
        assert np.abs(kernel.off_diagonal).max() <= kernel.diagonal.max() * (1.0 + 1e-9)
    norms = [
        one.weight_gradients().set_index(["layer", "weight"])["squared_norm"]
        for one in (ours, every)
    ]
    for weight, bound in (("value", 0.1), ("output", 0.1), ("key", 0.2)):
        assert norms[0][1, weight] == pytest.approx(norms[1][1, weight], rel=bound)


def test_a_text_of_which_much_is_one_word_is_noted() -> None:
    """By classes alone."""
    text = zipf_text(3)
    often, model = np.where(np.arange(LENGTH) % 4 == 0, 0, text), llama().replace(layers=1)
    for ids, tokens, noted in ((text, None, False), (often, None, True), (often, True, False)):
        notes = predicted(model, token_ids=ids, tokens=tokens).warnings
        assert any("more than a fifth" in note for note in notes) == noted
