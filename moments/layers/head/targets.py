"""Targets of the loss: coincidences of targets and tokens, of a text or as probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.classes import PositionClasses
from ...engine.state import Array
from ...engine.texts import TextClasses
from ...errors import DomainError, domain_error
from ...formulas.algebra import NUMPY
from ...formulas.checks import check_array, check_count
from ...formulas.embedding import TOKEN_EMBEDDING
from ...model.head import Head
from ..embedding import check_ids

NO_TARGET = -100


@dataclass(frozen=True, eq=False)
class Targets:
    """Coincidences of targets and tokens: 0 or 1 for a known text, else probabilities.

    Scalars for exchangeable tokens; else (n,) and (n, n).

    Attributes:
        count: terms of the loss, over the whole batch.
        active: token i has a target.
        both_active: both tokens have a target.
        same_target: both tokens have the same target.
        same_token: both tokens are the same word.
        hits: (i, j): the target of i is the word of j.
        own_word: the target of i is the word of i.
        both_hit: (i, j): the targets of i and j are both the word of i.
        blank: the target of i has a row of zeros in the matrix.
    """

    count: float
    active: Array
    both_active: Array
    same_target: Array
    same_token: Array
    hits: Array
    own_word: Array
    both_hit: Array
    blank: Array = 0.0

    def of_one(self, classes: PositionClasses) -> Targets:
        """Targets within one of several documents, on average."""
        fields = {}
        for name, value in vars(self).items():
            if np.ndim(value) == 1:
                fields[name], _ = classes.within_block(value, 0.0 * self.same_token)
            elif np.ndim(value) == 2:
                _, fields[name] = classes.within_block(0.0 * self.active, value)
        return Targets(self.count / len(classes.document_lengths), **fields)

    def repeated(self, batch: int) -> Targets:
        """The same targets with a loss that averages over `batch` times as many sequences."""
        check_count("batch", batch)
        return replace(self, count=self.count * batch)


def text_targets(
    head: Head,
    vocab_size: int,
    seq_len: int,
    token_ids: Any,
    targets: Any,
    real: Any = None,
    blank: int | None = None,
) -> Targets:
    """Targets of a text, token by token: n = B L.

    Args:
        head: with its `loss`: "causal" (the next token) or "masked" (given by `targets`).
        seq_len: tokens per sequence L.
        token_ids: integers (L,) or (B, L); None: unknown tokens, drawn by Zipf's law.
        targets: the same shape, -100 for no target; None: the next token, or for a masked loss
            tokens drawn at random.
        real: (n,) or (B, L), the number of every token's document, 0 for padding, which is neither
            target nor source. No token of a causal head predicts one of another document.
        blank: the target whose row of the matrix is 0; None: no such row.

    Raises:
        DomainError: targets of another shape, outside the vocabulary, or none at all.
    """
    if token_ids is None and targets is not None:
        raise DomainError("targets belong to a text: give token_ids too")
    collision = zipf_collision(vocab_size)
    if token_ids is None:
        count = seq_len if real is None else np.size(real)
        place = np.arange(count)
        same_token: Array = np.where(place[:, None] == place[None, :], 1.0, collision)
    else:
        ids = check_ids(token_ids, seq_len, "token_ids")
        count = ids.size
        same_token = _equal(ids.reshape(-1), ids.reshape(-1))
    number = np.ones(count) if real is None else np.asarray(real, float).reshape(-1)
    is_real, follows = (number > 0) + 0.0, _follows(number, seq_len)
    # In a sequence of a single token the next one is beyond it, and unknown.
    shifted = head.loss == "causal" and seq_len > 1
    if targets is None and (not shifted or token_ids is None):
        share = 1.0 if head.loss == "causal" else head.target_share
        return _random_text(vocab_size, same_token, is_real, follows if shifted else None, share)
    if targets is None:
        chosen = np.full(ids.shape, NO_TARGET)
        chosen[:, :-1] = np.where(follows.reshape(ids.shape)[:, :-1], ids[:, 1:], NO_TARGET)
    else:
        chosen = _checked(targets, ids.shape, vocab_size)
    flat, read = chosen.reshape(-1), ids.reshape(-1)
    active = (flat != NO_TARGET) * is_real
    if not active.any():
        raise DomainError(
            "targets: every entry is -100, or no token is followed by another of its text; give "
            "one target at least"
        )
    result = _coincidences(active, flat, read, lambda values: values, _equal)
    return replace(result, blank=0.0 if blank is None else (flat == blank) + 0.0)


def _coincidences(
    active: Array, chosen: Array, read: Array, means: Callable[..., Any], pairs: Callable[..., Any]
) -> Targets:
    """Coincidences of known targets.

    Args:
        active: whether a token has a target.
        means, pairs: average values of tokens, and the equality of two tokens' values, over cells.
    """
    # Missing targets get ids of their own, equal to no other target and no word.
    none = NO_TARGET - 1 - np.arange(2 * read.size).reshape(2, *read.shape)
    chosen = np.where(active > 0.0, chosen, none[0])
    itself, share = chosen == read, means(active)
    return Targets(
        float(active.sum()),
        share,
        np.multiply.outer(share, share),
        pairs(chosen, chosen),
        pairs(read, read),
        pairs(chosen, read),
        means(itself + 0.0),
        pairs(np.where(itself, read, none[1]), chosen),
    )


def _follows(number: Array, seq_len: int) -> Array:
    """(n,) whether the next token of the row is real and of the same document."""
    result = np.zeros(len(number), dtype=bool)
    result[:-1] = (number[1:] == number[:-1]) & (number[1:] > 0)
    result[seq_len - 1 :: seq_len] = False
    return result


def _random_text(
    vocab_size: int, same_token: Array, real: Array, follows: Array | None, share: float
) -> Targets:
    """Unknown targets: the next token if `follows` is given, else a random share of the tokens."""
    collision, count = zipf_collision(vocab_size), len(real)
    place = np.arange(count)
    same_target = np.where(place[:, None] == place[None, :], 1.0, collision)
    hit = np.full((count, count), collision)
    if follows is not None:
        active = follows + 0.0
        both = active[:, None] * active[None, :]
        hit[place[:-1], place[1:]] = 1.0
        if len(same_token) == count:
            hit[:-1, :] = np.where(active[:-1, None] > 0, same_token[1:, :], hit[:-1, :])
        same_target[:-1, :-1] = same_token[1:, 1:]
    else:
        active = real * share
        pair = _chosen_pairs(share, float(real.sum()))
        both = np.where(place[:, None] == place[None, :], active, pair * real[:, None] * real)
    if not active.any():
        raise DomainError(
            "no token has a target: sequences, and documents of packed rows, need two real tokens "
            "at least"
        )
    own = np.diagonal(hit).copy()
    # If j's target is i's word, i's target is so by chance; else three words coincide by chance.
    both_hit = np.where(hit.T == 1.0, own[:, None], zipf_collision(vocab_size, 3))
    both_hit[place, place] = own
    return Targets(float(active.sum()), active, both, same_target, same_token, hit, own, both_hit)


def alike_targets(head: Head, vocab_size: int, seq_len: int, batch: int = 1) -> Targets:
    """Targets of exchangeable tokens, for one sequence of a batch: a text by Zipf's law."""
    check_count("batch", batch)
    collision, triple = zipf_collision(vocab_size), zipf_collision(vocab_size, 3)
    hit, both_hit = collision, triple
    if head.loss == "causal":
        active = (seq_len - 1) / seq_len
        both = (seq_len - 2) / seq_len
        # One in L of all ordered pairs is a token with the next one.
        hit = 1 / seq_len + (1 - 1 / seq_len) * collision
        both_hit = collision / seq_len + (1 - 1 / seq_len) * triple
    else:
        active = head.target_share
        both = _chosen_pairs(active, float(batch * seq_len))
    count = batch * seq_len * active
    return Targets(count, active, both, collision, collision, hit, collision, both_hit)


def position_targets(head: Head, vocab_size: int, classes: PositionClasses) -> Targets:
    """Targets of an unknown text on classes of positions: the next token, or masked tokens at
    random.

    A token's target is another token of the kernel as often as that follows it
    (`following_pairs`). A word shared by two tokens is a frequent one, of probability p^2 instead
    of p, so a further token is the same word with probability triple/collision.
    """
    if head.loss != "causal":
        return _chosen_at_random(head, vocab_size, classes)
    collision, triple, four = (zipf_collision(vocab_size, tokens) for tokens in (2, 3, 4))
    size, active = len(classes.nodes), classes.cell_means(_followed(classes))
    by_chance, one_more = np.full((size, size), collision), triple / collision
    same_token, same_word, both_same_word = by_chance, by_chance, np.full((size, size), triple)
    if isinstance(classes, TextClasses):
        different = np.ones_like(classes.share) / (1.0 - collision)
        same_token, same_in_four = classes.same_word, np.array(four / collision)
        same_word = classes.from_word_blocks((collision - triple) * different, np.array(one_more))
        both_same_word = classes.from_word_blocks((triple - four) * different, same_in_four)
    follows = classes.following_pairs
    hit = follows + (1.0 - follows) * same_word
    neither = 1.0 - (follows + follows.T)
    both_hit = follows.T * same_word + follows * same_token * one_more + neither * both_same_word
    count, own = float(_followed(classes).sum()), np.full(size, collision)
    both = np.outer(active, active)
    return Targets(count, active, both, by_chance, same_token, hit, own, both_hit)


def _chosen_at_random(head: Head, vocab_size: int, classes: PositionClasses) -> Targets:
    """Targets of tokens masked at random, drawn by Zipf's law, on classes of positions."""
    fields = dict(vars(alike_targets(head, vocab_size, classes.length)))
    for name in fields.keys() - {"count", "blank"}:
        axes = 1 if name in ("active", "own_word") else 2
        fields[name] = np.full((len(classes.nodes),) * axes, fields[name])
    return Targets(**fields)


def _followed(classes: PositionClasses) -> Array:
    """(L,) or (documents, longest): 1 for a token followed by another one of its document."""
    real = classes.is_real + 0.0
    result = np.zeros(real.shape)
    result[..., :-1] = real[..., 1:]
    return result


def position_text(
    head: Head, vocab_size: int, classes: PositionClasses, ids: np.ndarray
) -> Targets:
    """Targets of a text on classes of positions, averaged over cells: the next token, or masked
    tokens at random.

    Args:
        ids: (L,), or (documents, longest) for several documents.
    """
    read, active = ids.astype(np.int64), _followed(classes)
    if head.loss != "causal":
        same = classes.pair_means(read, read)
        return replace(_chosen_at_random(head, vocab_size, classes), same_token=same)
    chosen = np.roll(read, -1, axis=-1)
    return _coincidences(active, chosen, read, classes.cell_means, classes.pair_means)


def class_targets(classes: int, sequences: int, labels: Any = None, batch: int = 1) -> Targets:
    """Targets of a classification, one label per sequence; None: drawn uniformly.

    Raises:
        DomainError: not integers of shape (B,) below `classes`.
    """
    if labels is None:
        same = np.eye(sequences) + (1 - np.eye(sequences)) / classes
    else:
        labels = check_array("targets", labels, f"integers ({sequences},)", None)
        if labels.shape != (sequences,) or not np.issubdtype(labels.dtype, np.integer):
            raise domain_error("targets", f"shape {labels.shape}", f"integers ({sequences},)")
        if labels.min() < 0 or labels.max() >= classes:
            raise domain_error("targets", int(labels.max()), f"labels below {classes}")
        same = _equal(labels, labels)
    ones, none = np.ones((sequences, sequences)), np.zeros((sequences, sequences))
    count = float(sequences * batch)
    return Targets(count, np.ones(sequences), ones, same, none, none, np.zeros(sequences), none)


def _chosen_pairs(share: float, count: float) -> float:
    """Probability that two of `count` tokens are both in a random subset of this share of them."""
    return max(0.0, share * (share * count - 1) / max(count - 1, 1))


def zipf_collision(vocab_size: int, tokens: int = 2) -> float:
    """Probability that this number of tokens, drawn by Zipf's law, are all the same word."""
    if tokens == 2:
        law = TOKEN_EMBEDDING.law("pattern_correlation", "refined")
        return float(law.of({"vocab_size": float(vocab_size)}))
    return float(NUMPY.harmonic(vocab_size, tokens) / NUMPY.harmonic(vocab_size, 1) ** tokens)


def _equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n, m) 1.0 where an entry of the first equals one of the second, else 0.0."""
    return np.asarray(first[:, None] == second[None, :], dtype=float)


def _checked(targets: Any, shape: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Targets as an array, with shape and range checked."""
    chosen = check_array("targets", targets, f"integers of shape {shape}", None)
    chosen = chosen[None] if chosen.ndim == 1 else chosen
    if chosen.shape != shape or not np.issubdtype(chosen.dtype, np.integer):
        raise domain_error("targets", f"shape {chosen.shape}", f"integers of shape {shape}")
    valid = (chosen == NO_TARGET) | ((chosen >= 0) & (chosen < vocab_size))
    if not valid.all():
        allowed = f"token ids below {vocab_size}, or {NO_TARGET} for no target"
        raise domain_error("targets", int(chosen[~valid][0]), allowed)
    return chosen
