"""How tokens divide into sequences and documents, and averages that respect it.

A row may hold several texts. A token sees its own document alone, positions restart with every
document, and no token predicts the first of the next.
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

# For every sequence of a batch, the document of each of its tokens, from 1; 0 where it pads.
Padding = tuple[tuple[int, ...], ...]


def check_documents(document_ids: Any, shape: tuple[int, ...], real: Any = None) -> np.ndarray:
    """The document of every token, numbered from 1 in each row; 0 where it pads.

    Args:
        document_ids: integers of that shape, or of its last axis for all rows alike; a document is
            a run of one number.
        shape: (L,) or (B, L).
        real: 1 for a real token and 0 for padding; None: all are real.

    Raises:
        DomainError: not integers of such a shape, or a document in two pieces.
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
    """Position of every token in its document; padding counts on, and so does what follows it."""
    index = np.broadcast_to(np.arange(documents.shape[-1]), documents.shape)
    last = np.maximum.accumulate(documents, axis=-1)
    begins = np.zeros(documents.shape, dtype=np.int64)
    begins[..., 1:] = (last[..., 1:] != last[..., :-1]) & (last[..., :-1] > 0)
    return index - np.maximum.accumulate(index * begins, axis=-1)


def spans(documents: Any) -> np.ndarray | None:
    """(documents, 3): row, first token and length of every document, in order.

    Args:
        documents: (L,) or (B, L), the document of every token, 0 where it pads.

    Returns:
        None where a document is no run of tokens.
    """
    numbers = np.atleast_2d(np.asarray(documents, dtype=np.int64))
    before = np.zeros_like(numbers)
    before[:, 1:] = numbers[:, :-1]
    row, first = np.nonzero((numbers > 0) & (numbers != before))
    after = np.zeros_like(numbers)
    after[:, :-1] = numbers[:, 1:]
    _, last = np.nonzero((numbers > 0) & (numbers != after))
    kinds = sum(len(np.unique(one[one > 0])) for one in numbers)
    return np.stack([row, first, last - first + 1], axis=1) if kinds == len(row) else None


def by_document(values: Any, where: np.ndarray) -> np.ndarray:
    """(documents, longest) of (L,) or (B, L) values; -1 behind a document's end."""
    every = np.atleast_2d(np.asarray(values))
    result = np.full((len(where), int(where[:, 2].max())), -1, dtype=every.dtype)
    for one, (row, first, length) in zip(result, where, strict=True):
        one[:length] = every[row, first : first + length]
    return result


def one_document(documents: Any) -> np.ndarray:
    """(..., L, L) whether two tokens are of one document."""
    numbers = np.asarray(documents, dtype=np.int64)
    first, second = numbers[..., :, None], numbers[..., None, :]
    return np.asarray((first == second) & (first > 0))


def restarted(position_ids: Any, mask: Any = None) -> np.ndarray | None:
    """(B, L) documents, from 1, of positions that begin at 0 again; 0 where `mask` is.

    Args:
        position_ids: (B, L), as a module takes them.
        mask: (B, L), 0 at padding; None, or of another shape: all tokens are real.

    Returns:
        None where no row holds more than one document, or something else begins than a document.
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
    """The sequences of a batch.

    Attributes:
        sequences: how many share one kernel, one after the other.
        real: (sequences, L) or (L,), 1.0 where a token counts and 0.0 where it pads; None: all do.
        classes: of positions, in which one sequence is resolved; None: it is not.
        documents: of the same shape, of packed rows: each token's, from 1, and 0 where it pads.
        memory: as `padding`, of the encoder's output that a decoder reads; None: all of it counts.
    """

    sequences: int = 1
    real: np.ndarray | None = None
    documents: np.ndarray | None = None
    classes: PositionClasses | None = None
    memory: Padding | None = None

    @property
    def places(self) -> tuple[Padding | None, int, Padding | None]:
        """Where the tokens lie, for a declaration of layers."""
        return self.padding, self.sequences, self.memory

    @property
    def padding(self) -> Padding | None:
        """For every sequence, the document of each token, 0 where it pads; None: one of all."""
        if self.numbers is None:
            return None
        return tuple(tuple(int(v) for v in row) for row in np.atleast_2d(self.numbers))

    @property
    def numbers(self) -> np.ndarray | None:
        """`documents`, or `real`, which says that all real tokens are of one."""
        return self.real if self.documents is None else self.documents

    @property
    def counted(self) -> np.ndarray | None:
        """(n,) by token, 1.0 where one counts; None: all do, or there are classes."""
        if self.numbers is None or self.classes is not None:
            return None
        real = np.atleast_2d(self.numbers > 0) + 0.0
        return np.asarray(real.reshape(-1) if self.sequences > 1 else real[0])

    def fewest(self, seq_len: int) -> int:
        """The fewest real tokens of a sequence."""
        return seq_len if self.real is None else int(self.real.sum(-1).min())

    def split(self, kernel: Kernel) -> Kernel:
        """What tokens of one sequence share, (sequences, L, L); unchanged if there is only one."""
        if self.sequences == 1 or kernel.resolved is not True:
            return kernel
        length = kernel.off_diagonal.shape[-1] // self.sequences
        blocks = np.reshape(kernel.off_diagonal, (self.sequences, length, self.sequences, length))
        index = np.arange(self.sequences)
        return Kernel.of_matrix(blocks[index, :, index, :])

    def token_average(self, kernel: Kernel) -> tuple[Array, Array]:
        """Variance of a token and covariance of two of one sequence, averaged."""
        if kernel.classes is not None:
            return kernel.mean_diagonal(), kernel.mean_off_diagonal()
        within, numbers = self.split(kernel), self.numbers
        # Behind a pooling head every token is one sequence's.
        if (
            within.resolved
            and numbers is not None
            and numbers.shape[-1] == within.off_diagonal.shape[-1]
        ):
            return self._of_documents(within, numbers)
        result = within.mean_diagonal(), within.mean_off_diagonal()
        if self.sequences == 1 or not kernel.resolved:
            return result
        return np.mean(result[0], axis=0), np.mean(result[1], axis=0)

    def _of_documents(self, kernel: Kernel, documents: np.ndarray) -> tuple[Array, Array]:
        """Averages over all tokens, and over all pairs of one document; 0 without any."""
        documents = documents.reshape(-1, kernel.off_diagonal.shape[-1])
        axes: tuple[int, ...] = (-3, -2, -1)
        if self.sequences == 1:
            documents, axes = documents[0], axes[1:]
        real, off_diagonal = (documents > 0) + 0.0, one_document(documents) + 0.0
        off_diagonal -= np.eye(off_diagonal.shape[-1]) * real[..., None]
        variance = (kernel.diagonal * real).sum(axes[1:]) / real.sum()
        return variance, (kernel.off_diagonal * off_diagonal).sum(axes) / max(
            off_diagonal.sum(), 1.0
        )

    def average(self, values: Array) -> Array:
        """Over the tokens that do not pad, of (..., L) numbers by token; one for all stays."""
        if np.ndim(values) and self.classes is not None:
            return self.classes.mean(np.asarray(values))
        return self._by_token(values)

    def _by_token(self, values: Array) -> Array:
        if np.ndim(values) == 0:
            return values
        tokens, numbers = self.by_sequence(values), self.numbers
        axes = (-1,) if self.sequences == 1 else (-2, -1)
        # Behind a pooling head every token is one sequence's.
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
        """(..., sequences, L) from (..., sequences L); (..., L) of only one."""
        if self.sequences == 1:
            return diagonal
        return np.reshape(diagonal, (*np.shape(diagonal)[:-1], self.sequences, -1))

    def by_token(self, diagonal: Array) -> Array:
        """(..., L): averaged over the sequences, those that have a real token there if any has."""
        result = self.by_sequence(diagonal)
        return result if self.sequences == 1 else self._over_rows(result)

    def placed(self, values: Array, padding: float | None = None) -> Array:
        """(..., L) averages over sequences of (..., longest) values by place in a document.

        Args:
            padding: what stands where all tokens pad; None: the last place's.
        """
        if self.numbers is None:
            return values
        numbers = np.atleast_2d(self.numbers)
        place = np.full(numbers.shape, -1)
        where = spans(numbers)
        assert where is not None
        for row, first, length in where:
            place[row, first : first + length] = np.arange(length)
        result = values[..., place]
        return self._over_rows(result if padding is None else np.where(place < 0, padding, result))

    def _over_rows(self, values: Array) -> Array:
        """(..., L) from (..., sequences, L)."""
        if self.numbers is None:
            return values.mean(-2)
        real = np.broadcast_to(np.atleast_2d(self.numbers) > 0, values.shape[-2:]) + 0.0
        real = np.where(real.any(0), real, 1.0)
        return (values * real).sum(-2) / real.sum(0)

    def moments(self, point: Point) -> tuple[Any, ...]:
        """Mean, variance, correlation, gradient variance and gradient correlation of one point."""
        variance, covariance = self.token_average(point.signal.kernel)
        signal = (self._mean(point.signal), variance, ratio_or_zero(covariance, variance))
        if point.gradient is None:
            return *signal, np.nan, np.nan
        grad_variance, grad_covariance = self.token_average(point.gradient.kernel)
        return *signal, grad_variance, ratio_or_zero(grad_covariance, grad_variance)
