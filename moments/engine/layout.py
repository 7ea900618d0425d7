"""How the tokens of a resolved kernel divide into sequences, and averages that respect it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .classes import PositionClasses
from .packing import Padding, one_document, spans
from .state import Array, Kernel, Signal, ratio_or_zero
from .trace import Point


@dataclass(frozen=True, eq=False)
class Layout:
    """The sequences of a batch.

    Attributes:
        sequences: how many share one kernel, one after the other.
        real: (sequences, L) or (L,), 1.0 where a token counts and 0.0 where it pads; None: all do.
        classes: of positions, in which one sequence is resolved; None: it is not.
        documents: of the same shape, of packed rows: each token's, from 1, and 0 where it pads.
    """

    sequences: int = 1
    real: np.ndarray | None = None
    documents: np.ndarray | None = None
    classes: PositionClasses | None = None

    @property
    def padding(self) -> Padding | None:
        """For every sequence, the document of each token, 0 where it pads; None: one of all."""
        numbers = self.numbers
        if numbers is None:
            return None
        return tuple(tuple(int(v) for v in row) for row in np.atleast_2d(numbers))

    @property
    def numbers(self) -> np.ndarray | None:
        """`documents`, or `real`, which says that all real tokens are of one."""
        return self.real if self.documents is None else self.documents

    def fewest(self, seq_len: int) -> int:
        """The fewest real tokens of a sequence."""
        return seq_len if self.real is None else int(self.real.sum(-1).min())

    def split(self, kernel: Kernel) -> Kernel:
        """What tokens of one sequence share, (sequences, L, L); unchanged if there is only one."""
        if self.sequences == 1 or kernel.resolved is not True:
            return kernel
        length = kernel.pairs.shape[-1] // self.sequences
        blocks = np.reshape(kernel.pairs, (self.sequences, length, self.sequences, length))
        index = np.arange(self.sequences)
        return Kernel.of_matrix(blocks[index, :, index, :])

    def token_average(self, kernel: Kernel) -> tuple[Array, Array]:
        """Variance of a token and covariance of two of one sequence, averaged."""
        if kernel.classes is not None:
            return kernel.mean_diagonal(), kernel.mean_pairs()
        own, numbers = self.split(kernel), self.numbers
        # Behind a pooling head every token is one sequence's.
        if own.resolved and numbers is not None and numbers.shape[-1] == own.pairs.shape[-1]:
            return self._of_documents(own, numbers)
        found = own.mean_diagonal(), own.mean_pairs()
        if self.sequences == 1 or not kernel.resolved:
            return found
        return np.mean(found[0], axis=0), np.mean(found[1], axis=0)

    def _of_documents(self, kernel: Kernel, documents: np.ndarray) -> tuple[Array, Array]:
        """Averages over all tokens, and over all pairs of one document; 0 without any."""
        documents = documents.reshape(-1, kernel.pairs.shape[-1])
        axes: tuple[int, ...] = (-2, -1)
        if self.sequences == 1:
            documents = documents[0]
        else:
            axes = (-3, -2, -1)
        real, pairs = (documents > 0) + 0.0, one_document(documents) + 0.0
        pairs -= np.eye(pairs.shape[-1]) * real[..., None]
        variance = (kernel.diagonal * real).sum(axes[1:]) / real.sum()
        return variance, (kernel.pairs * pairs).sum(axes) / max(pairs.sum(), 1.0)

    @property
    def _real(self) -> np.ndarray | None:
        one = self.sequences == 1 and self.real is not None and self.real.ndim == 2
        return self.real[0] if one else self.real  # type: ignore[index]

    def _mean(self, signal: Signal) -> Array:
        if not signal.resolved or np.ndim(signal.mean) == 0:
            return signal.mean
        if signal.kernel.classes is not None:
            return signal.kernel.average(signal.mean)
        means = self.by_sequence(signal.mean)
        if self._real is None:
            return means.mean((-2, -1) if self.sequences > 1 else -1)
        return (means * self._real).sum() / self._real.sum()

    def by_sequence(self, diagonal: Array) -> Array:
        """(..., sequences, L) from (..., sequences L); (..., L) of only one."""
        if self.sequences == 1:
            return diagonal
        return np.reshape(diagonal, (*np.shape(diagonal)[:-1], self.sequences, -1))

    def by_token(self, diagonal: Array) -> Array:
        """(..., L): averaged over the sequences, those that have a real token there if any has."""
        found = self.by_sequence(diagonal)
        return found if self.sequences == 1 else self._over_rows(found)

    def placed(self, values: Array, padding: float | None = None) -> Array:
        """(..., L) averages over sequences of (..., longest) values by place in a document.

        Args:
            values: of every place.
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
        found = values[..., place]
        return self._over_rows(found if padding is None else np.where(place < 0, padding, found))

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
