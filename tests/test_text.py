"""Real text: ids in range, the same every time, and BERT's corruption in its proportions."""

import numpy as np
import pytest

from moments import DomainError
from moments.layers.head.targets import NO_TARGET
from moments.torch import text
from moments.torch.text import MASK, SPECIAL_TOKENS, mask_tokens, tokenize

pytest.importorskip("tokenizers")


@pytest.mark.parametrize("vocab_size", [128, 1000, 30522])
def test_ids_are_below_the_vocabulary_and_never_special(vocab_size):
    ids = tokenize(vocab_size, seq_len=64, batch=50)
    assert ids.shape == (50, 64)
    assert ids.min() >= len(SPECIAL_TOKENS)
    assert ids.max() < vocab_size


def test_text_is_the_same_after_training_again():
    first = tokenize(600, 100, 3)
    text._encoded.cache_clear()
    np.testing.assert_array_equal(first, tokenize(600, 100, 3))


def test_sequences_follow_one_another_and_wrap():
    rows = tokenize(1000, 10, 4)
    np.testing.assert_array_equal(rows.ravel(), tokenize(1000, 40, 1)[0])
    far = tokenize(1000, 1000, 1000).ravel()  # more tokens than the text has
    period = len(text._encoded(1000))
    assert period < len(far) / 2
    np.testing.assert_array_equal(far[period : 2 * period], far[:period])


def test_text_is_text():
    """English repeats itself: the commonest token of 8000 is far above a uniform share."""
    counts = np.bincount(tokenize(8000, 20000)[0])
    assert counts.max() / 20000 > 0.02
    assert np.count_nonzero(counts) > 1000


def test_masking_has_bert_proportions():
    ids = tokenize(1000, 100, 400)
    corrupted, labels = mask_tokens(ids, 1000, seed=3)
    chosen = labels != NO_TARGET
    count = chosen.sum()
    np.testing.assert_array_equal(corrupted[~chosen], ids[~chosen])
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    # Binomial standard errors: 40000 positions, and about 6000 chosen.
    assert abs(chosen.mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 / ids.size)
    assert abs(np.mean(corrupted[chosen] == MASK) - 0.8) < 5 * np.sqrt(0.16 / count)
    kept = np.mean(corrupted[chosen] == ids[chosen])
    assert abs(kept - 0.1) < 5 * np.sqrt(0.09 / count)
    assert corrupted.min() >= MASK


def test_masking_follows_its_seed_and_never_leaves_a_text_without_target():
    ids = tokenize(1000, 5)
    for seed in range(20):
        corrupted, labels = mask_tokens(ids, 1000, seed=seed)
        again, _ = mask_tokens(ids, 1000, seed=seed)
        np.testing.assert_array_equal(corrupted, again)
        assert (labels != NO_TARGET).any()
    many = [mask_tokens(tokenize(1000, 200), 1000, seed=s)[1] for s in (0, 1)]
    assert (many[0] != many[1]).any()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: tokenize(100, 10), "vocab_size"),
        (lambda: tokenize(1000, 0), "seq_len"),
        (lambda: tokenize(1000, 10, batch=0), "batch"),
        (lambda: mask_tokens(np.full((1, 4), 9), 1000, share=0.0), "share"),
        (lambda: mask_tokens(np.full((1, 4), 9), 4), "vocab_size"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(DomainError, match=name):
        call()
