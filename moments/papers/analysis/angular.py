"""Angular distance between the stream at two depths (Sun et al. equation 1), from moments.

A block's last matrix has mean zero and knows nothing of the stream, so x_{l+1} = lambda x_l +
beta b has cosine lambda sqrt(v_l / v_{l+1}) with x_l, a normalisation changes no angle, and cosines
of successive blocks multiply. Exact for the mean inner product; the angle itself fluctuates by
O(1/sqrt(d)). A branch correlation makes it a Markov chain: a block knows earlier streams only
through the one it is added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import domain_error
from ...prediction.result import Prediction
from .recursion import variance_recursion
from .results import Result


@dataclass(frozen=True)
class AngularDistance(Result):
    """Angles between the stream's points.

    Attributes:
        prediction: it was read from.
        branch_correlation: of blocks and stream; 0 at initialisation.
        cosine: (N + 1, N + 1), between point l and point m of the stream.
    """

    prediction: Prediction
    branch_correlation: float
    cosine: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        """arccos(cosine) / pi, (N + 1, N + 1): 0 alike, 0.5 unrelated."""
        return np.asarray(np.arccos(np.clip(self.cosine, -1.0, 1.0)) / np.pi)

    def from_layer(self, steps: int) -> np.ndarray:
        """Distance over `steps` layers from every starting point, (N + 1 - steps,)."""
        if not 1 <= steps <= len(self.cosine) - 1:
            raise domain_error("steps", steps, f"from 1 to {len(self.cosine) - 1}")
        return np.asarray(np.diagonal(self.matrix, steps).copy())

    @property
    def heading(self) -> str:
        step = self.from_layer(1)
        return (
            f"angular distance of one layer: {step[0]:.3f} at the input, {step[-1]:.3f} at the "
            f"output, {self.prediction.model.norm} norm"
        )

    def _rows(self) -> list[Mapping[str, Any]]:
        matrix, count = self.matrix, len(self.cosine)
        return [
            {"layer": first, "steps": last - first, "angular_distance": float(matrix[first, last])}
            for first in range(count)
            for last in range(first + 1, count)
        ]


def angular_distance(prediction: Prediction, branch_correlation: float = 0.0) -> AngularDistance:
    """Angular distance between every two points of the stream, for heat maps over depth.

    Args:
        prediction: of a single configuration, Pre-LN or Post-LN.
        branch_correlation: of every block's output with the stream; 0 at initialisation.

    Raises:
        DomainError: as `variance_recursion`.
    """
    steps = variance_recursion(prediction, branch_correlation).cosine
    layers = steps[0::2] * steps[1::2]
    count = len(layers) + 1
    cosine = np.eye(count)
    for first in range(count - 1):
        cosine[first, first + 1 :] = np.cumprod(layers[first:])
    return AngularDistance(
        prediction, branch_correlation, np.maximum(np.triu(cosine), np.triu(cosine).T)
    )
