"""The moments of the tensor that enters layer 1: from an embedding, a text, or the user."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import check_in
from .embedding import Embedding
from .errors import DomainError, domain_error
from .law import ComponentLaws, Theory
from .laws.embedding import POSITION_EMBEDDING, SEGMENT_EMBEDDING, TOKEN_EMBEDDING
from .state import Array, Kernel, Signal
from .symbols import NONNEGATIVE, POSITIVE, Interval
from .transformer import Transformer


def check_moments(
    prefix: str, variance: Any, correlation: Any, seq_len: int
) -> tuple[Array, Array]:
    """Validate a variance and a token correlation, shape (...,); floats where both are scalars.

    Raises:
        DomainError: a variance that is not positive (or, for a gradient, negative), a correlation
            below -1/(L-1), which no L tokens can share, or above 1.
    """
    interval = NONNEGATIVE if prefix else POSITIVE
    check_in(f"{prefix}variance", variance, interval, "pass a variance, not a deviation")
    least = -1.0 / (seq_len - 1)
    check_in(
        f"{prefix}correlation",
        correlation,
        Interval(least, 1.0),
        f"{seq_len} tokens cannot all correlate below -1/(seq_len - 1) = {least:.4g}",
    )
    if np.ndim(variance) == 0 and np.ndim(correlation) == 0:
        return float(variance), float(correlation)
    v, r = np.broadcast_arrays(np.asarray(variance, float), np.asarray(correlation, float))
    return v, r


def alike(variance: Array, correlation: Array, seq_len: int, resolved: bool) -> Kernel:
    """Tokens alike, in either resolution."""
    if not resolved:
        return Kernel(variance, variance * correlation)
    v, c = np.asarray(variance, float), np.asarray(variance * correlation, float)
    matrix = np.broadcast_to(c[..., None, None], (*c.shape, seq_len, seq_len))
    diagonal = np.broadcast_to(v[..., None], (*v.shape, seq_len))
    return Kernel(diagonal, matrix, True).with_diagonal(diagonal)


def gaussian(kernel: Kernel, seq_len: int, d_model: int, spread: bool) -> Signal:
    """Independent Gaussian features; their squared norms vary by 2 C o C / d."""
    mean = 0.0 * kernel.diagonal
    signal = Signal(kernel, seq_len, mean=mean, width=d_model)
    if spread:
        signal = signal.replace(spread=(kernel * kernel).scaled(2 / d_model))
    return signal


def check_kernel(name: str, kernel: Any, seq_len: int) -> Kernel:
    """Token-resolved second moments given by the user.

    Raises:
        DomainError: not a finite symmetric (..., L, L) array, or not positive on the diagonal.
    """
    matrix = np.asarray(kernel, dtype=float)
    if matrix.ndim < 2 or matrix.shape[-2:] != (seq_len, seq_len):
        raise domain_error(name, f"shape {matrix.shape}", f"of shape (..., {seq_len}, {seq_len})")
    if not np.all(np.isfinite(matrix)):
        raise domain_error(name, "NaN or infinity", "finite")
    scale = np.abs(matrix).max()
    if not np.allclose(matrix, np.swapaxes(matrix, -1, -2), atol=1e-9 * scale, rtol=0):
        raise domain_error(name, "not symmetric", "symmetric in its last two axes")
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    if name == "kernel" and diagonal.min() <= 0:
        raise domain_error(name, float(diagonal.min()), "positive on its diagonal")
    if np.linalg.eigvalsh(matrix).min() < -1e-9 * scale:
        raise domain_error(name, "not positive semidefinite", "a matrix of second moments")
    return Kernel.of_matrix((matrix + np.swapaxes(matrix, -1, -2)) / 2)


def check_mask(mask: Any, seq_len: int, token_ids: Any) -> np.ndarray:
    """Which tokens are real, as 0.0 and 1.0: (B, L) beside token_ids of that shape, else (L,).

    Raises:
        DomainError: another shape, other values, or a sequence with fewer than two real tokens.
    """
    real = np.asarray(mask, dtype=float)
    shape = (seq_len,) if token_ids is None else check_ids(token_ids, seq_len, "token_ids").shape
    if real.shape == (seq_len,):
        real = np.broadcast_to(real, shape)
    if real.shape != shape:
        raise domain_error("attention_mask", f"shape {real.shape}", f"of shape {shape}")
    if not np.all((real == 0) | (real == 1)) or np.any(real.sum(-1) < 2):
        raise domain_error("attention_mask", mask, "0 or 1, with two real tokens at least")
    return real


def repeated_pairs(ids: Any, seq_len: int, name: str) -> float:
    """Share of ordered token pairs with the same id, averaged over sequences.

    Raises:
        DomainError: not integers of shape (L,) or (B, L).
    """
    matrix = check_ids(ids, seq_len, name)
    same = (matrix[:, :, None] == matrix[:, None, :]).sum((1, 2)) - seq_len
    return float(np.mean(same / (seq_len * (seq_len - 1))))


def check_ids(ids: Any, seq_len: int, name: str) -> np.ndarray:
    """Integers of shape (B, L)."""
    matrix = np.atleast_2d(np.asarray(ids))
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.integer) or matrix.min() < 0:
        raise DomainError(f"{name} must be non-negative integers of shape (L,) or (B, L)")
    if matrix.shape[1] != seq_len:
        raise domain_error(
            name,
            f"sequences of {matrix.shape[1]} tokens",
            f"sequences of seq_len = {seq_len}",
            f"use model.replace(seq_len={matrix.shape[1]})",
        )
    return matrix


def embedded_alike(
    embedding: Embedding,
    seq_len: int,
    theory: Theory,
    token_ids: Any = None,
    segment_ids: Any = None,
) -> Kernel:
    """Sum of the embedding tables for tokens alike, before the embedding's norm and dropout.

    Without `token_ids` the text follows Zipf's law and segments split it uniformly; with them the
    repetitions are counted, and a text without `segment_ids` is one segment.
    """
    if token_ids is not None:
        ids = _text_ids(embedding, seq_len, token_ids)
        token = repeated_pairs(ids, seq_len, "token_ids")
        segment = (
            1.0 if segment_ids is None else repeated_pairs(segment_ids, seq_len, "segment_ids")
        )
    else:
        token = _pattern(TOKEN_EMBEDDING, theory, vocab_size=embedding.vocab_size, seq_len=seq_len)
        segment = _pattern(SEGMENT_EMBEDDING, theory, seq_len=seq_len)
    tables = [
        (TOKEN_EMBEDDING, embedding.token_variance, token),
        (SEGMENT_EMBEDDING, embedding.segment_variance, segment),
        (POSITION_EMBEDDING, embedding.position_variance, 0.0),
    ]
    total = Kernel(0.0, 0.0)
    for laws, variance, pattern in tables:
        values = {"table_variance": variance, "pattern_correlation": pattern}
        total = total + Kernel(
            float(laws.law("variance", theory).of(values)),
            float(laws.law("covariance", theory).of(values)),
        )
    return total


def embedded_by_token(
    embedding: Embedding, seq_len: int, token_ids: Any, segment_ids: Any = None
) -> Kernel:
    """Sum of the embedding tables of a text, kernel of shape (B, L, L).

    Two tokens share what the tables they look up share: E x_i x_j is a table's variance where the
    two rows are one.
    """
    ids = _text_ids(embedding, seq_len, token_ids)
    segments = (
        np.zeros_like(ids)
        if segment_ids is None
        else check_ids(segment_ids, seq_len, "segment_ids")
    )
    same = lambda rows: rows[:, :, None] == rows[:, None, :]  # noqa: E731
    matrix = (
        embedding.token_variance * same(ids)
        + embedding.segment_variance * same(segments)
        + embedding.position_variance * np.eye(seq_len)
    )
    return Kernel.of_matrix(matrix)


def _text_ids(embedding: Embedding, seq_len: int, token_ids: Any) -> np.ndarray:
    ids = check_ids(token_ids, seq_len, "token_ids")
    if ids.max() >= embedding.vocab_size:
        raise domain_error(
            "token_ids", int(ids.max()), f"below vocab_size = {embedding.vocab_size}"
        )
    return ids


def _pattern(laws: ComponentLaws, theory: Theory, **values: float) -> float:
    return float(laws.law("pattern_correlation", theory).of(values))


def first_kernel(
    model: Transformer,
    theory: Theory,
    resolved: bool,
    variance: Any,
    correlation: Any,
    token_ids: Any,
    segment_ids: Any,
    kernel: Any,
) -> Kernel:
    """What the user, a text or the embedding says of the tensor that enters layer 1.

    Raises:
        DomainError: more than one of them, or a bad value.
    """
    moments_given = variance is not None or correlation is not None
    if kernel is not None:
        if moments_given or token_ids is not None:
            raise DomainError("kernel replaces variance, correlation and token_ids: give one")
        return check_kernel("kernel", kernel, model.seq_len)
    if token_ids is not None and (moments_given or model.embedding is None):
        raise DomainError(
            "token_ids describe the text an embedding reads: declare model.embedding and leave "
            "variance and correlation out"
        )
    if model.embedding is None or moments_given:
        v, r = check_moments(
            "",
            1.0 if variance is None else variance,
            0.0 if correlation is None else correlation,
            model.seq_len,
        )
        return alike(v, r, model.seq_len, resolved)
    if token_ids is not None and resolved:
        return embedded_by_token(model.embedding, model.seq_len, token_ids, segment_ids)
    tables = embedded_alike(model.embedding, model.seq_len, theory, token_ids, segment_ids)
    return alike(tables.diagonal, tables.pairs / tables.diagonal, model.seq_len, resolved)


def last_kernel(
    model: Transformer, resolved: bool, variance: Any, correlation: Any, kernel: Any
) -> Kernel:
    """The gradient at the last layer's output; 1 and 0 where nothing is given.

    Raises:
        DomainError: a kernel and moments together, or a bad value.
    """
    if kernel is not None:
        if variance is not None or correlation is not None:
            raise DomainError("grad_kernel replaces grad_variance and grad_correlation: give one")
        return check_kernel("grad_kernel", kernel, model.seq_len)
    v, r = check_moments(
        "grad_",
        1.0 if variance is None else variance,
        0.0 if correlation is None else correlation,
        model.seq_len,
    )
    return alike(v, r, model.seq_len, resolved)
