"""Real English text without a download: the help topics of Python's standard library, byte-pair
encoded.

The text depends on the version of Python; on one installation every call gives the same ids.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ..errors import domain_error, optional
from ..formulas.checks import check_count
from ..layers.head.targets import NO_TARGET

Ids = NDArray[np.int64]

PAD, CLS, SEP, MASK = range(4)
"""Ids of the special tokens; `tokenize` never emits them."""
SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
LEAST_VOCABULARY = 128
MOST_TRAINED = 8000
"""Largest trained vocabulary: the text is half a megabyte and has about 9000 merges."""


def tokenize(vocab_size: int, seq_len: int, batch: int = 1) -> Ids:
    """Consecutive parts of English text as token ids.

    The encoder is trained on the text itself, in about a second, once per process and size; beyond
    8000 tokens it stops growing, so that the ids of a larger table (BERT's 30522) stay below 8000.

    Args:
        vocab_size: rows of the token table, at least 128; every id is below it.
        seq_len: tokens per sequence L.
        batch: sequences B, consecutive in the text, which is repeated if it ends.

    Returns:
        Integers of shape (B, L).

    Raises:
        DomainError: an argument out of range.
        MomentsError: `tokenizers` is not installed.
    """
    check_count("vocab_size", vocab_size, least=LEAST_VOCABULARY)
    check_count("seq_len", seq_len)
    check_count("batch", batch)
    ids = _encoded(min(vocab_size, MOST_TRAINED))
    return np.resize(ids, (batch, seq_len))


def mask_tokens(
    ids: Ids, vocab_size: int, seed: int = 0, *, share: float = 0.15
) -> tuple[Ids, Ids]:
    """BERT's masked-language-model corruption (Devlin et al. 2019, section 3.1).

    Of the chosen positions 80 % become [MASK], 10 % a random token and 10 % stay.

    Args:
        ids: (B, L).
        vocab_size: random tokens are drawn below it, special ones excepted.
        seed: of the choice.
        share: of positions chosen, in expectation; at least one position always is.

    Returns:
        The corrupted ids and the labels, both (B, L); a label is -100 where nothing was chosen.

    Raises:
        DomainError: a share outside (0, 1], or a vocabulary of special tokens alone.
    """
    check_count("vocab_size", vocab_size, least=len(SPECIAL_TOKENS) + 1)
    check_count("seed", seed, least=0)
    if not 0 < share <= 1:
        raise domain_error("share", share, "in (0, 1]", "BERT chooses 0.15")
    random = np.random.default_rng(seed)
    draw = random.random(ids.shape)
    chosen = draw < max(share, draw.min() * (1 + 1e-12))
    fate = random.random(ids.shape)
    replacement = random.integers(len(SPECIAL_TOKENS), vocab_size, ids.shape)
    corrupted = np.where(chosen & (fate < 0.8), MASK, ids)
    corrupted = np.where(chosen & (fate >= 0.9), replacement, corrupted)
    return corrupted, np.where(chosen, ids, NO_TARGET)


@functools.cache
def _encoded(vocab_size: int) -> Ids:
    from pydoc_data.topics import topics

    with optional("hf", "tokenizers"):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = "\n".join(topics[name] for name in sorted(topics))
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    encoder.train_from_iterator([text], trainer)
    ids = np.array(encoder.encode(text).ids, dtype=np.int64)
    ids.flags.writeable = False
    return ids
