"""Second moments of embedded text, and gradients of the embedding tables."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..engine.classes import Matrix, PositionClasses, one_class
from ..engine.layout import places
from ..engine.state import Array, Kernel
from ..engine.texts import TextClasses
from ..errors import DomainError, domain_error
from ..formulas.embedding import SEGMENT_EMBEDDING, TOKEN_EMBEDDING
from ..formulas.law import Theory
from ..model.embedding import Embedding
from .attention.kernels.relative_positions import basis_sums, of_pairs, turned_means

WIDEST = 2**16
"""Largest width of sinusoidal positions: their cost grows with the square of the frequencies."""


def repeated_pairs(ids: Any, seq_len: int, name: str) -> float:
    """Fraction of ordered token pairs with the same id, averaged over sequences.

    Raises:
        DomainError: not integers of shape (L,) or (B, L).
    """
    matrix = check_ids(ids, seq_len, name)
    same = (matrix[:, :, None] == matrix[:, None, :]).sum((1, 2)) - seq_len
    return float(np.mean(same / (seq_len * (seq_len - 1))))


def check_ids(ids: Any, seq_len: int, name: str) -> np.ndarray:
    """Check ids and return them with shape (B, L)."""
    allowed = f"{name} must be non-negative integers of shape (L,) or (B, L)"
    try:
        matrix = np.atleast_2d(np.asarray(ids))
    except ValueError:
        raise DomainError(f"{allowed}: pad shorter sequences") from None
    whole = matrix.ndim == 2 and matrix.size and np.issubdtype(matrix.dtype, np.integer)
    if not whole or matrix.min() < 0:
        raise DomainError(allowed)
    if matrix.shape[1] != seq_len:
        given, remedy = matrix.shape[1], f"use model.replace(seq_len={matrix.shape[1]})"
        allowed = f"sequences of seq_len = {seq_len}"
        raise domain_error(name, f"sequences of {given} tokens", allowed, remedy)
    return matrix


class SameRow(NamedTuple):
    """For every table, the probability that two tokens look up the same row: the derivative of the
    tables' summed kernel in the table's variance, and of the squared gradient norm."""

    token: Kernel
    position: Kernel
    segment: Kernel

    @classmethod
    def of(
        cls,
        embedding: Embedding,
        seq_len: int,
        token_ids: Any = None,
        segment_ids: Any = None,
        resolved: Any = False,
        documents: np.ndarray | None = None,
        sequences: int = 1,
        theory: Theory = "refined",
    ) -> SameRow:
        """Patterns of a text, at any resolution.

        Args:
            seq_len: tokens per sequence L.
            token_ids, segment_ids: integers of shape (L,) or (B, L). Without `token_ids` the text
                follows Zipf's law and segments split it uniformly; for exchangeable tokens
                repetitions are averaged. Without segments, and on classes of words, there is one.
            resolved: as `Kernel.resolved`; on classes entries are means over cells.
            documents: of packed rows, (L,) or (B, L), see `layout`: positions restart in each.
            sequences: B, for a kernel by token without `token_ids`.

        Raises:
            DomainError: ids of another shape or outside the table.
        """
        if resolved is True and token_ids is not None:
            ids, places, segments = table_rows(
                embedding, seq_len, token_ids, segment_ids, documents
            )
            same_token = _same(ids) * (ids != embedding.padding_id)
            matrices = same_token, _same(places), _same(segments)
            return cls(*(Kernel.of_matrix(matrix + 0.0) for matrix in matrices))
        token: Array = 0.0
        segment: Array = 1.0
        if isinstance(resolved, TextClasses):
            token = resolved.same_word
        else:
            token, segment = _patterns(embedding, seq_len, theory, token_ids, segment_ids)
        if not resolved:
            return cls(Kernel(1.0, token), Kernel(1.0, 0.0), Kernel(1.0, segment))
        if resolved is True:
            places = _places(seq_len, sequences, documents)
            eye = np.eye(len(places))
            same_place = _same(places) + 0.0
            matrices = eye + (1.0 - eye) * token, same_place, eye + (1.0 - eye) * segment
            return cls(*map(Kernel.of_matrix, matrices))
        diagonal = np.ones(len(resolved.nodes))
        ones = np.ones((len(diagonal), len(diagonal)))
        matrices = ones * token, ones * resolved.same_position, ones * segment
        return cls(*(Kernel(diagonal, matrix, resolved) for matrix in matrices))

    def kernel(self, embedding: Embedding) -> Kernel:
        """Kernel of the sum of the tables, before the embedding's norm and dropout; sinusoidal
        positions, which are not random, are not included."""
        return (
            self.token.scaled(embedding.row_variance)
            + self.segment.scaled(embedding.segment_variance)
            + self.position.scaled(embedding.position_variance)
        )


def text_kernel(
    embedding: Embedding,
    seq_len: int,
    token_ids: Any = None,
    segment_ids: Any = None,
    d_model: int | None = None,
    documents: np.ndarray | None = None,
    resolved: Any = True,
    theory: Theory = "refined",
) -> Kernel:
    """Kernel of the sum of the embedding tables, before the embedding's norm and dropout: by token
    (B L, B L) for a whole batch, whose sequences share the rows of positions.

    Args:
        d_model: width; needed for sinusoidal positions.

    Raises:
        DomainError: as `SameRow.of`, or sinusoidal positions without d_model.
    """
    text = token_ids, segment_ids, resolved, documents
    total = SameRow.of(embedding, seq_len, *text, theory=theory).kernel(embedding)
    sequences = len(total.diagonal) // seq_len if resolved is True else None
    classes = resolved if isinstance(resolved, PositionClasses) else None
    fixed = fixed_positions(embedding, seq_len, d_model, sequences, documents, classes)
    return total if fixed is None else total + fixed.kernel


def _frequencies(d_model: int, base: float) -> np.ndarray:
    return np.asarray(base ** (-2 * np.arange(d_model // 2) / d_model))


class FixedPart(NamedTuple):
    """The deterministic part of a tensor.

    Attributes:
        common: product of two tokens' means over features, which centring removes.
    """

    kernel: Kernel
    common: Kernel

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> FixedPart:
        """From the vectors added to every token, (tokens, d)."""
        means = rows.mean(1)
        both = rows @ rows.T / rows.shape[1], means[:, None] * means[None, :]
        return cls(*map(Kernel.of_matrix, both))


def fixed_positions(
    embedding: Embedding,
    seq_len: int,
    d_model: int | None,
    sequences: int | None = None,
    documents: np.ndarray | None = None,
    classes: PositionClasses | None = None,
) -> FixedPart | None:
    """Sinusoidal positions; None without.

    p_i . p_j/d is half the mean of cos(w_m (i - j)) over the d/2 frequencies
    w_m = position_base^(-2 m/d).

    Args:
        seq_len: tokens per sequence L.
        sequences: B for kernels of shape (B L, B L); None: exchangeable tokens.
        documents: of packed rows, (L,) or (B, L); None: each row is one document.
        classes: of positions, for means over cells.

    Raises:
        DomainError: sinusoidal positions of unknown or odd width.

    Source:
        Vaswani et al. 2017, section 3.5.
    """
    if embedding.positions != "sinusoidal":
        return None
    if d_model is None or d_model % 2 or d_model > WIDEST:
        allowed = f"an even number, {WIDEST} at most, for sinusoidal positions"
        raise domain_error("d_model", d_model, allowed)
    if classes is not None:
        blocks = _fixed_on(d_model, embedding.position_base, classes.one_document)
        return FixedPart(
            *(Kernel(*classes.same_within_and_across(block), classes) for block in blocks)
        )
    if sequences is None:
        blocks = _fixed_on(d_model, embedding.position_base, one_class(seq_len))
        return FixedPart(*(Kernel(diagonal[0], pairs[0, 0]) for diagonal, pairs in blocks))
    frequencies = _frequencies(d_model, embedding.position_base)
    angles = np.multiply.outer(np.arange(seq_len), frequencies)
    rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return FixedPart.of_rows(rows[_places(seq_len, sequences, documents)])


@functools.lru_cache(maxsize=16)
def _fixed_on(d_model: int, base: float, classes: PositionClasses) -> tuple[Matrix, Matrix]:
    """Kernel and common part of sinusoidal positions within one document, averaged over cells."""
    frequencies = _frequencies(d_model, base)
    count = len(frequencies)
    phases, mass, same_token = (part[-1] for part in basis_sums(classes, frequencies))
    cosines = (phases @ phases.conj().T).real / count
    pairs = mass[:, None] * mass
    near = float(np.cos(frequencies).mean())
    kernel = 0.5 * of_pairs(cosines / pairs, pairs, same_token, 1.0, near)
    # A token's mean over features is sum_m (sin + cos)(w_m t)/d, t counted from 0.
    rotated = turned_means(classes.length, frequencies, np.full(count, 0.5 / count))
    means = rotated.real + rotated.imag
    sums, squares = classes.basis @ means, (classes.basis * means**2) @ classes.basis.T
    diagonal = classes.basis @ means**2 / mass
    common = np.outer(sums, sums) - squares
    rest = pairs - same_token
    usable = rest > 0.5
    common = np.where(usable, common / np.where(usable, rest, 1.0), 0.0)
    return (np.full(len(mass), 0.5), kernel), (diagonal, common)


def embedding_gradients(
    embedding: Embedding,
    seq_len: int,
    d_model: int,
    gradient: Kernel,
    token_ids: Any = None,
    segment_ids: Any = None,
    documents: np.ndarray | None = None,
) -> dict[str, Array]:
    """Squared gradient norms of the tables that have parameters.

    E |dTable|^2 = d sum of G_ij over pairs of tokens with the same row, for token rows times the
    squared scale of the embedding. The padding row has no gradient.

    Args:
        seq_len: tokens per sequence L.
        d_model: width of the sum of the tables.
        gradient: at the sum of the tables, (B L, B L) for a text of (B, L) tokens, or of one
            sequence of exchangeable tokens.
        token_ids, segment_ids: the text; None: unknown, its tokens repeat by Zipf's law.
        documents: of packed rows, (L,) or (B, L), see `layout`.

    Returns:
        "token", and "position", "segment" and the "factor" of token rows if they have parameters.

    Raises:
        DomainError: ids that do not fit the gradient.
    """
    resolved, sequences = gradient.resolved, 1
    if resolved is True:
        sequences = gradient.off_diagonal.shape[-1] // seq_len
    text = token_ids, segment_ids, resolved, documents, sequences
    patterns = SameRow.of(embedding, seq_len, *text)
    if resolved is True and len(patterns.token.diagonal) != len(gradient.diagonal):
        allowed = f"{len(gradient.diagonal)}, as the gradient has"
        raise domain_error("token_ids", f"{len(patterns.token.diagonal)} tokens", allowed)
    factors = {
        "token": embedding.scale**2,
        "position": float(embedding.position_variance > 0),
        "segment": float(embedding.segment_variance > 0),
    }
    norms = {
        name: d_model * factor * (pattern * gradient).total(seq_len)
        for (name, factor), pattern in zip(factors.items(), patterns, strict=True)
        if factor
    }
    if embedding.factor_dim is not None and not embedding.norm:
        # Rows E and matrix W of E W: both squared gradients are sums over the same pairs, times the
        # variance of the other factor.
        shared = embedding.factor_dim * norms["token"]
        norms["token"] = shared * (embedding.factor_variance or 0.0)
        norms["factor"] = shared * embedding.token_variance
    return norms


def table_rows(
    embedding: Embedding,
    seq_len: int,
    token_ids: Any,
    segment_ids: Any,
    documents: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the token, position and segment table of every token of a batch, each (B L,)."""
    ids = text_ids(embedding, seq_len, token_ids)
    segments = np.zeros_like(ids)
    if segment_ids is not None:
        segments = np.broadcast_to(check_ids(segment_ids, seq_len, "segment_ids"), ids.shape)
    return ids.reshape(-1), _places(seq_len, len(ids), documents), segments.reshape(-1)


def _places(seq_len: int, sequences: int, documents: np.ndarray | None) -> np.ndarray:
    """(B L,) position of every token."""
    documents = np.ones(seq_len, dtype=np.int64) if documents is None else documents
    return np.broadcast_to(places(documents), (sequences, seq_len)).reshape(-1)


def _same(rows: np.ndarray) -> np.ndarray:
    """(n, n) whether two rows are equal."""
    return np.asarray(rows[:, None] == rows[None, :])


def _patterns(
    embedding: Embedding, seq_len: int, theory: Theory, token_ids: Any, segment_ids: Any
) -> tuple[float, float]:
    """Fractions of token pairs with the same token row and the same segment; 0 for one token."""
    if seq_len == 1:
        return 0.0, 0.0
    if token_ids is None:
        values = {"vocab_size": embedding.vocab_size, "seq_len": seq_len}
        token, segment = (
            float(laws.law("pattern_correlation", theory).of(values))
            for laws in (TOKEN_EMBEDDING, SEGMENT_EMBEDDING)
        )
        return token, segment
    token = repeated_pairs(text_ids(embedding, seq_len, token_ids), seq_len, "token_ids")
    if segment_ids is None:
        return token, 1.0
    return token, repeated_pairs(segment_ids, seq_len, "segment_ids")


def text_ids(embedding: Embedding, seq_len: int, token_ids: Any) -> np.ndarray:
    """(B, L) rows of the token table.

    Raises:
        DomainError: as `check_ids`, or ids outside the table.
    """
    ids = check_ids(token_ids, seq_len, "token_ids")
    if ids.max() >= embedding.vocab_size:
        raise domain_error(
            "token_ids", int(ids.max()), f"below vocab_size = {embedding.vocab_size}"
        )
    return ids
