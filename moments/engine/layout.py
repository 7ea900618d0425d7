"""Division of a batch into sequences and documents, and averages over real tokens.

A row may contain several documents. A token attends to its own document, positions restart with
every document, and the last token of a document has no next token to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import domain_error
from .classes import PositionClasses
from .state import Array, Kernel, Signal, ratio_or_zero
from .trace import Point

# --- documents ------------------------------------------------------------------------------------

Padding = tuple[tuple[int, ...], ...]
"""For every sequence of a batch, the document of each token, from 1; 0 for padding."""


def check_documents(document_ids: Any, shape: tuple[int, ...], real: Any = None) -> np.ndarray:
    """Number the documents from 1 in each row, with 0 for padding.

    Args:
        document_ids: integers of this shape, or of its last axis for all rows; the tokens of a
            document are consecutive.
        shape: (L,) or (B, L).
        real: 1 for real tokens and 0 for padding; None: all are real.

    Raises:
        DomainError: not integers of such a shape, or a document that is not consecutive.
    """
    ids = np.asarray(document_ids)
    if not np.issubdtype(ids.dtype, np.integer) or ids.shape not in (shape, shape[-1:]):
        given = f"{ids.dtype} of shape {ids.shape}"
        remedy = "from lengths: numpy.repeat(numpy.arange(len(lengths)), lengths)"
        raise domain_error("document_ids", given, f"integers of shape {shape}", remedy)
    ids = np.broadcast_to(ids, shape)
    begins = np.ones(shape, dtype=np.int64)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    numbers = begins.cumsum(-1)
    for row, number in zip(np.atleast_2d(ids), np.atleast_2d(numbers), strict=True):
        if len(np.unique(row)) < number[-1]:
            twice = next(v for v in row if len(np.unique(number[row == v])) > 1)
            raise domain_error(
                "document_ids", f"{int(twice)} in two places", "one run of tokens per document"
            )
    return numbers if real is None else numbers * (np.asarray(real) > 0)


def places(documents: np.ndarray) -> np.ndarray:
    """Position of every token in its document; padding inside a document counts."""
    index = np.broadcast_to(np.arange(documents.shape[-1]), documents.shape)
    last = np.maximum.accumulate(documents, axis=-1)
    begins = np.zeros(documents.shape, dtype=np.int64)
    begins[..., 1:] = (last[..., 1:] != last[..., :-1]) & (last[..., :-1] > 0)
    return index - np.maximum.accumulate(index * begins, axis=-1)


def spans(documents: Any) -> np.ndarray | None:
    """(documents, 3): row, first token and length of every document, in order.

    Args:
        documents: (L,) or (B, L), the document of every token, 0 for padding.

    Returns:
        None if the tokens of some document are not consecutive.
    """
    numbers = np.atleast_2d(np.asarray(documents, dtype=np.int64))
    before = np.zeros_like(numbers)
    before[:, 1:] = numbers[:, :-1]
    row, first = np.nonzero((numbers > 0) & (numbers != before))
    after = np.zeros_like(numbers)
    after[:, :-1] = numbers[:, 1:]
    _, last = np.nonzero((numbers > 0) & (numbers != after))
    count = sum(len(np.unique(one[one > 0])) for one in numbers)
    return np.stack([row, first, last - first + 1], axis=1) if count == len(row) else None


def by_document(values: Any, where: np.ndarray) -> np.ndarray:
    """(documents, longest) values from (L,) or (B, L), at the `spans` `where`; -1 at the end."""
    rows = np.atleast_2d(np.asarray(values))
    result = np.full((len(where), int(where[:, 2].max())), -1, dtype=rows.dtype)
    for document, (row, first, length) in zip(result, where, strict=True):
        document[:length] = rows[row, first : first + length]
    return result


def same_document(documents: Any) -> np.ndarray:
    """(..., L, L) whether two tokens belong to the same document."""
    numbers = np.asarray(documents, dtype=np.int64)
    first, second = numbers[..., :, None], numbers[..., None, :]
    return np.asarray((first == second) & (first > 0))


def restarted(position_ids: Any, mask: Any = None) -> np.ndarray | None:
    """(B, L) documents, from 1, according to positions that restart at 0; 0 for padding.

    Args:
        position_ids: (B, L), as a module receives them.
        mask: (B, L), 0 for padding; None, or of another shape: all tokens are real.

    Returns:
        None if no row has several documents, or if positions restart at another number.
    """
    place = np.atleast_2d(np.asarray(position_ids))
    if place.ndim != 2:
        return None
    begins = np.ones(place.shape, dtype=np.int64)
    begins[:, 1:] = place[:, 1:] != place[:, :-1] + 1
    real = np.ones(place.shape, dtype=bool)
    if mask is not None and np.shape(mask) == place.shape:
        real = np.asarray(mask) > 0
    if np.any(place[real & (begins > 0)]):
        return None
    numbers = begins.cumsum(-1) * real
    several = any(len(np.unique(row[row > 0])) > 1 for row in numbers)
    return numbers if several else None


# --- sequences ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Division of the tokens of a kernel into sequences and documents.

    Attributes:
        sequences: number of sequences in one kernel, one after the other.
        real: (sequences, L) or (L,), 1.0 for real tokens and 0.0 for padding; None: all are real.
        documents: of the same shape, for packed rows: document of each token, 0 for padding.
        classes: classes of positions of the kernel; None: other resolutions.
        memory: `padding` of the encoder's output that a decoder reads; None: all tokens are real.
    """

    sequences: int = 1
    real: np.ndarray | None = None
    documents: np.ndarray | None = None
    classes: PositionClasses | None = None
    memory: Padding | None = None

    @property
    def places(self) -> tuple[Padding | None, int, Padding | None]:
        """Arguments of `architecture.declare`."""
        return self.padding, self.sequences, self.memory

    @property
    def padding(self) -> Padding | None:
        """For every sequence, the document of each token, 0 for padding; None: one document."""
        if self.numbers is None:
            return None
        return tuple(tuple(int(v) for v in row) for row in np.atleast_2d(self.numbers))

    @property
    def numbers(self) -> np.ndarray | None:
        """`documents`, or `real` if each row is a single document."""
        return self.real if self.documents is None else self.documents

    @property
    def counted(self) -> np.ndarray | None:
        """(n,) by token, 1.0 for real tokens; None: all are real, or there are classes."""
        if self.numbers is None or self.classes is not None:
            return None
        real = np.atleast_2d(self.numbers > 0) + 0.0
        return np.asarray(real.reshape(-1) if self.sequences > 1 else real[0])

    def fewest(self, seq_len: int) -> int:
        """Least number of real tokens of a sequence."""
        return seq_len if self.real is None else int(self.real.sum(-1).min())

    def split(self, kernel: Kernel) -> Kernel:
        """The blocks of single sequences, (sequences, L, L); unchanged for a single sequence."""
        if self.sequences == 1 or kernel.resolved is not True:
            return kernel
        length = kernel.off_diagonal.shape[-1] // self.sequences
        blocks = np.reshape(kernel.off_diagonal, (self.sequences, length, self.sequences, length))
        index = np.arange(self.sequences)
        return Kernel.of_matrix(blocks[index, :, index, :])

    def token_average(self, kernel: Kernel) -> tuple[Array, Array]:
        """Average variance of a token, and average covariance of two tokens of one document."""
        if kernel.classes is not None:
            return kernel.mean_diagonal(), kernel.mean_off_diagonal()
        blocks, numbers = self.split(kernel), self.numbers
        # Behind a pooling head there is one token per sequence.
        if (
            blocks.resolved
            and numbers is not None
            and numbers.shape[-1] == blocks.off_diagonal.shape[-1]
        ):
            return self._document_average(blocks, numbers)
        result = blocks.mean_diagonal(), blocks.mean_off_diagonal()
        if self.sequences == 1 or not kernel.resolved:
            return result
        return np.mean(result[0], axis=0), np.mean(result[1], axis=0)

    def _document_average(self, kernel: Kernel, documents: np.ndarray) -> tuple[Array, Array]:
        """Averages over real tokens, and over pairs of one document; 0 without pairs."""
        documents = documents.reshape(-1, kernel.off_diagonal.shape[-1])
        axes: tuple[int, ...] = (-3, -2, -1)
        if self.sequences == 1:
            documents, axes = documents[0], axes[1:]
        real, pairs = (documents > 0) + 0.0, same_document(documents) + 0.0
        pairs -= np.eye(pairs.shape[-1]) * real[..., None]
        variance = (kernel.diagonal * real).sum(axes[1:]) / real.sum()
        return variance, (kernel.off_diagonal * pairs).sum(axes) / max(pairs.sum(), 1.0)

    def average(self, values: Array) -> Array:
        """Average of (..., L) values over real tokens; a scalar is unchanged."""
        if np.ndim(values) and self.classes is not None:
            return self.classes.mean(np.asarray(values))
        return self._by_token(values)

    def _by_token(self, values: Array) -> Array:
        if np.ndim(values) == 0:
            return values
        tokens, numbers = self.by_sequence(values), self.numbers
        axes = (-1,) if self.sequences == 1 else (-2, -1)
        # Behind a pooling head there is one token per sequence.
        if numbers is None or numbers.shape[-1] != np.shape(tokens)[-1]:
            return np.mean(tokens, axes)
        real = np.atleast_2d(numbers > 0) + 0.0
        real = real[0] if self.sequences == 1 else real
        return (tokens * real).sum(axes) / real.sum()

    def _mean(self, signal: Signal) -> Array:
        if not signal.resolved or signal.kernel.classes is not None:
            return signal.kernel.average(signal.mean)
        return self._by_token(signal.mean)

    def by_sequence(self, diagonal: Array) -> Array:
        """(..., sequences, L) from (..., sequences L); unchanged for a single sequence."""
        if self.sequences == 1:
            return diagonal
        return np.reshape(diagonal, (*np.shape(diagonal)[:-1], self.sequences, -1))

    def by_token(self, diagonal: Array) -> Array:
        """(..., L) averages over the sequences with a real token at a position, or over all."""
        result = self.by_sequence(diagonal)
        return result if self.sequences == 1 else self._over_rows(result)

    def by_position(self, values: Array, padding: float | None = None) -> Array:
        """(..., L) averages over sequences, of (..., longest) values by position in a document.

        Args:
            padding: value where all sequences have padding; None: that of the last position.
        """
        if self.numbers is None:
            return values
        numbers = np.atleast_2d(self.numbers)
        position = np.full(numbers.shape, -1)
        where = spans(numbers)
        assert where is not None
        for row, first, length in where:
            position[row, first : first + length] = np.arange(length)
        result = values[..., position]
        if padding is not None:
            result = np.where(position < 0, padding, result)
        return self._over_rows(result)

    def _over_rows(self, values: Array) -> Array:
        """(..., L) averages over sequences of (..., sequences, L) values."""
        if self.numbers is None:
            return values.mean(-2)
        real = np.broadcast_to(np.atleast_2d(self.numbers) > 0, values.shape[-2:]) + 0.0
        real = np.where(real.any(0), real, 1.0)
        return (values * real).sum(-2) / real.sum(0)

    def moments(self, point: Point) -> tuple[Any, ...]:
        """Mean, variance, correlation, gradient variance and gradient correlation at a point."""
        variance, covariance = self.token_average(point.signal.kernel)
        signal = (self._mean(point.signal), variance, ratio_or_zero(covariance, variance))
        if point.gradient is None:
            return *signal, np.nan, np.nan
        grad_variance, grad_covariance = self.token_average(point.gradient.kernel)
        return *signal, grad_variance, ratio_or_zero(grad_covariance, grad_variance)
