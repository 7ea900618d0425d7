"""How the tokens of a resolved kernel divide into sequences, and averages that respect it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import Padding
from .propagate import Point
from .state import Array, Kernel, Signal, ratio_or_zero


@dataclass(frozen=True, eq=False)
class Layout:
    """The sequences of a batch.

    Attributes:
        sequences: how many share one kernel, one after the other.
        real: (sequences, L) or (L,), 1.0 where a token counts and 0.0 where it pads; None: all do.
    """

    sequences: int = 1
    real: np.ndarray | None = None

    @property
    def padding(self) -> Padding | None:
        """For every sequence, which tokens are real; None: all."""
        if self.real is None:
            return None
        return tuple(tuple(bool(v) for v in row) for row in np.atleast_2d(self.real))

    def fewest(self, seq_len: int) -> int:
        """The fewest real tokens of a sequence."""
        return seq_len if self.real is None else int(self.real.sum(-1).min())

    def split(self, kernel: Kernel) -> Kernel:
        """What tokens of one sequence share, (sequences, L, L); unchanged if there is only one."""
        if self.sequences == 1 or not kernel.resolved:
            return kernel
        length = kernel.pairs.shape[-1] // self.sequences
        blocks = np.reshape(kernel.pairs, (self.sequences, length, self.sequences, length))
        index = np.arange(self.sequences)
        return Kernel.of_matrix(blocks[index, :, index, :])

    def token_average(self, kernel: Kernel) -> tuple[Array, Array]:
        """Variance of a token and covariance of two of one sequence, averaged."""
        own, real = self.split(kernel), self._real
        if own.resolved and real is not None and real.shape[-1] != own.pairs.shape[-1]:
            real = None  # behind a pooling head every token is one sequence's
        found = own.mean_diagonal(real), own.mean_pairs(real)
        if self.sequences == 1 or not kernel.resolved:
            return found
        return np.mean(found[0], axis=0), np.mean(found[1], axis=0)

    @property
    def _real(self) -> np.ndarray | None:
        one = self.sequences == 1 and self.real is not None and self.real.ndim == 2
        return self.real[0] if one else self.real  # type: ignore[index]

    def _mean(self, signal: Signal) -> Array:
        if not signal.resolved or np.ndim(signal.mean) == 0:
            return signal.mean
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
        """(..., L): averaged over the sequences."""
        found = self.by_sequence(diagonal)
        return found if self.sequences == 1 else found.mean(-2)

    def moments(self, point: Point) -> tuple[Any, ...]:
        """Mean, variance, correlation, gradient variance and gradient correlation of one point."""
        variance, covariance = self.token_average(point.signal.kernel)
        signal = (self._mean(point.signal), variance, ratio_or_zero(covariance, variance))
        if point.gradient is None:
            return *signal, np.nan, np.nan
        grad_variance, grad_covariance = self.token_average(point.gradient.kernel)
        return *signal, grad_variance, ratio_or_zero(grad_covariance, grad_variance)
