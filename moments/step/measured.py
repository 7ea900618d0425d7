"""The quantities of `FirstStep` measured on a real module, with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import as_frame
from ..prediction.draws import STREAM, Place, common_places, mean_over_draws

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StepDraw:
    """One step of one draw of the weights.

    Attributes:
        loss, loss_after: of the batch.
        slope: derivative of the loss in the learning rate, at 0.
        sites: (layer, site) -> mean squares before, after and of the change.
        weights: (layer, weight) -> mean squares of the step and of the weight, alignment exponent
            (nan if not measured), and the parameter's share of the slope.
    """

    loss: float
    loss_after: float
    slope: float
    sites: Mapping[Place, tuple[float, float, float]]
    weights: Mapping[Place, tuple[float, float, float, float]]


@dataclass(frozen=True, repr=False, eq=False)
class StepMeasurement:
    """A first step measured on a module, averaged over draws of its weights.

    Each `*_stderr` is the standard error over draws, nan for a single draw.

    Attributes:
        source, optimizer, learning_rate: the module and its step.
        seeds: number of draws.
        loss, loss_before, loss_change, slope: as in `FirstStep`, in nats.
        variance, relative_change: (N + 1,) of the stream after the step; changes are relative to
            the mean square before it.
        site_rows, weight_rows: rows of `to_frame` and `weights`.
    """

    source: str
    optimizer: str
    learning_rate: float
    seeds: int
    loss: float
    loss_stderr: float
    loss_before: float
    loss_change: float
    loss_change_stderr: float
    slope: float
    slope_stderr: float
    variance: np.ndarray
    variance_stderr: np.ndarray
    relative_change: np.ndarray
    relative_change_stderr: np.ndarray
    site_rows: tuple[Mapping[str, Any], ...]
    weight_rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def from_draws(
        cls, draws: Sequence[StepDraw], *, source: str, optimizer: str, learning_rate: float
    ) -> StepMeasurement:
        """Means and standard errors over draws."""

        def rows(
            labels: tuple[str, str], keys: Sequence[Place], columns: Mapping[str, np.ndarray]
        ) -> list[dict[str, Any]]:
            """One row per key, from columns (draws, keys)."""
            result = []
            for k, key in enumerate(keys):
                row: dict[str, Any] = dict(zip(labels, key, strict=True))
                for name, values in columns.items():
                    row |= mean_over_draws(values[:, k]).row(name)
                result.append(row)
            return result

        places = common_places([draw.sites for draw in draws])
        numbers = np.array([[draw.sites[place] for place in places] for draw in draws])
        before, after, change = np.moveaxis(numbers, -1, 0)
        columns = {
            "variance_before": before,
            "variance": after,
            "relative_change": change / before.mean(0),
        }
        sites = rows(("layer", "site"), places, columns)
        keys = sorted(draws[0].weights, key=lambda key: key[0])
        names = ("update_variance", "weight_variance", "alignment", "slope")
        numbers = np.array([[draw.weights[key] for key in keys] for draw in draws])
        columns = dict(zip(names, np.moveaxis(numbers, -1, 0), strict=True))
        weights = rows(("layer", "weight"), keys, columns)
        stream = [row for row in sites if row["site"] == STREAM]

        def along(name: str) -> np.ndarray:
            return np.array([row[name] for row in stream])

        loss = mean_over_draws(np.array([draw.loss_after for draw in draws]))
        changed = mean_over_draws(np.array([draw.loss_after - draw.loss for draw in draws]))
        slope = mean_over_draws(np.array([draw.slope for draw in draws]))
        return cls(
            source,
            optimizer,
            learning_rate,
            len(draws),
            *loss[:2],
            float(np.mean([draw.loss for draw in draws])),
            *changed[:2],
            *slope[:2],
            along("variance"),
            along("variance_stderr"),
            along("relative_change"),
            along("relative_change_stderr"),
            tuple(sites),
            tuple(weights),
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per site: layer, site, variance_before, variance (after the step) and
        relative_change, each with its `_stderr`."""
        return as_frame(self.site_rows)

    def weights(self) -> pd.DataFrame:
        """One row per parameter: layer, weight, update_variance and weight_variance (mean squares
        of an entry), alignment and slope, each with its `_stderr`."""
        return as_frame(self.weight_rows)

    def __repr__(self) -> str:
        last = self.relative_change[-1]
        return (
            f"StepMeasurement of {self.source}, {self.optimizer} at {self.learning_rate:g}, "
            f"{self.seeds} draws: loss {self.loss_before:.4g} to {self.loss:.4g} "
            f"(change {self.loss_change:.4g} +- {self.loss_change_stderr:.1g}), last stream "
            f"changes by {last:.3g}"
        )
