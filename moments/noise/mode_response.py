"""Between gradients by token and those of tokens alike: their fluctuations by two modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.modes import Modes
from ..engine.propagate import Trace
from ..engine.sensitivity import SINGLE, Ascent, Descent, ratio, transposed
from ..engine.state import Array


@dataclass(frozen=True)
class OfModes:
    """A gradient by token that fluctuates by its modes, and responds to those of the signal.

    Attributes:
        response, covariance: (..., 2, 2), as `DecoderTop.alike` gives them.
        received: (..., L, L) the gradient, of trace 1.
        kernel: (..., L, L) of the signal.
        modes: of the tokens of a sequence.
    """

    response: Array
    covariance: Array
    received: Array
    kernel: Array
    modes: Modes

    def ascend(self, sensitivity: Array) -> Ascent:
        mean = _means(sensitivity @ self.received, self.modes.seq_len)
        split = np.stack([mean, (sensitivity * self.received).sum((-2, -1)) - mean], axis=-1)
        weights = ratio(split, self._relative(self.received))
        noise = (weights * _times(self.covariance, weights)).sum(-1)
        return Ascent(sensitivity, weights, noise, 0.0 * noise)

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        # of x_j = dm_j/m_j, with the modes m of the tokens averaged over sequences
        per_mode = (transposed(self.response) @ exposure[..., None])[..., 0]
        kernel, count = self.kernel, self.kernel.shape[-1]
        size = np.trace(kernel, axis1=-2, axis2=-1) / count
        per_mode = ratio(per_mode, self._relative(kernel) * size[..., None])
        per_mode = per_mode / (self.modes.count * count / self.modes.seq_len)
        mean, difference = (per_mode[..., i, None, None] for i in range(2))
        same = np.kron(np.eye(count // self.modes.seq_len), np.ones((self.modes.seq_len,) * 2))
        found = difference * np.eye(count) + (mean - difference) * same / self.modes.seq_len
        none = np.zeros(sensitivity.shape[:-2])
        return Descent(sensitivity + found.astype(SINGLE), none, none)

    def _relative(self, kernel: Array) -> Array:
        """(..., 2) modes over the variance."""
        whole = np.trace(kernel, axis1=-2, axis2=-1)
        mean = _means(kernel, self.modes.seq_len) / whole
        sizes = np.stack([mean, 1 - mean], axis=-1)
        return sizes * self.modes.seq_len / self.modes.count


def _means(kernel: Array, seq_len: int) -> Array:
    """tr(P K), P the projection on the token mean of every sequence."""
    count = kernel.shape[-1] // seq_len
    blocks = kernel.reshape(*kernel.shape[:-2], count, seq_len, count, seq_len)
    return np.einsum("...aiaj->...", blocks) / seq_len


@dataclass(frozen=True)
class AsAlike:
    """What the decoder's last gradient comes from, of tokens resolved, as of tokens alike."""

    top: Any
    trace: Trace

    def alike(self, trace: Trace, modes: Modes, batch: int) -> tuple[Array, Array]:
        count = self.trace.stream()[-1].signal.kernel.pairs.shape[-1]
        sequences = count // modes.seq_len
        received, response = self.top.by_token(self.trace, max(1, batch // sequences))
        same = np.kron(np.eye(sequences), np.full((modes.seq_len,) * 2, 1 / modes.seq_len))
        mean = [same * modes.seq_len, (np.eye(count) - same) * modes.seq_len / modes.count[1]]
        # the two modes over the variance, and their sum, whose noise tells their covariance
        each = np.stack([*mean, mean[0] + mean[1]])
        each = each.reshape(3, *(1,) * (received.ndim - 2), count, count)
        each = np.broadcast_to(each, (3, *received.shape)).astype(SINGLE)
        step = response.ascend(each)
        noise = step.noise / max(1, batch // sequences)
        cross = (noise[2] - noise[0] - noise[1]) / 2
        covariance = np.stack(
            [np.stack([noise[0], cross], -1), np.stack([cross, noise[1]], -1)], axis=-2
        )
        gamma = response.descend(np.zeros_like(each), step.exposure).sensitivity[:2]
        kernel = self.trace.stream()[-1].signal.second_moment().pairs
        parts = [same @ kernel @ same, kernel - same @ kernel @ same]
        found = [(gamma * part).sum((-2, -1)) for part in parts]
        return np.moveaxis(np.stack(found), (0, 1), (-1, -2)), covariance


def _times(matrix: Array, vector: Array) -> Array:
    return (matrix @ vector[..., None])[..., 0]
