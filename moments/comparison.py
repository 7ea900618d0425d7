"""A prediction beside a measurement, point by point, with the measurement's standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import DomainError
from .measurement import Measurement
from .prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

QUANTITIES = ("variance", "correlation", "grad_variance", "grad_correlation")


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was predicted against what was measured, at every site both know."""

    prediction: Prediction
    measurement: Measurement

    def to_frame(self) -> pd.DataFrame:
        """One row per site and quantity.

        Columns: layer, site, quantity, predicted, measured, stderr, error (relative for variances,
        absolute for correlations) and excess (the part of |error| beyond twice the standard error).
        """
        import pandas as pd

        both = self.prediction.to_frame().merge(
            self.measurement.to_frame(), on=["layer", "site"], suffixes=("_predicted", "_measured")
        )
        blocks = []
        for quantity in QUANTITIES:
            block = both[["layer", "site"]].copy()
            block["quantity"] = quantity
            block["predicted"] = both[f"{quantity}_predicted"].to_numpy(float)
            block["measured"] = both[f"{quantity}_measured"].to_numpy(float)
            block["stderr"] = both[f"{quantity}_stderr"].to_numpy(float)
            blocks.append(block[block["predicted"].notna() & block["measured"].notna()])
        frame = pd.concat(blocks, ignore_index=True)
        scale = np.where(
            frame["quantity"].str.endswith("correlation"), 1.0, frame["measured"].abs()
        )
        scale = np.where(scale == 0, 1.0, scale)
        frame["error"] = (frame["predicted"] - frame["measured"]) / scale
        noise = 2 * np.nan_to_num(frame["stderr"].to_numpy(float)) / scale
        frame["excess"] = np.maximum(frame["error"].abs().to_numpy() - noise, 0.0)
        return frame

    def summary(self) -> pd.DataFrame:
        """Errors per quantity over the stream, over block outputs and over every other site.

        Columns: points, quantity, mean, median, max (of |error|), excess (mean of the part beyond
        twice the standard error) and r_squared of predicted against measured (NaN where the
        measured values do not vary).
        """
        import pandas as pd

        frame = self.to_frame()
        group = np.select(
            [frame["site"] == "stream", frame["site"].isin(["attention.dropout", "ffn.dropout"])],
            ["stream", "block outputs"],
            "inside blocks",
        )
        rows = []
        for points in ("stream", "block outputs", "inside blocks"):
            for quantity in QUANTITIES:
                part = frame[(group == points) & (frame["quantity"] == quantity)]
                if part.empty:
                    continue
                error = part["error"].abs()
                rows.append(
                    {
                        "points": points,
                        "quantity": quantity,
                        "mean": error.mean(),
                        "median": error.median(),
                        "max": error.max(),
                        "excess": part["excess"].mean(),
                        "r_squared": _r_squared(part["predicted"], part["measured"]),
                    }
                )
        return pd.DataFrame(rows)

    def table(self) -> str:
        """Stream points side by side, then the errors, as text."""
        from .report import comparison_tables, render, summary_table

        return "\n\n".join(map(render, (*comparison_tables(self), summary_table(self))))

    def plot(self) -> Figure:
        """The prediction as lines, the measurement as points with error bars."""
        from .plot import plot_comparison

        return plot_comparison(self)

    def __repr__(self) -> str:
        stream = self.summary().query("points == 'stream'").set_index("quantity")["mean"]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in stream.items())
        return f"Comparison(mean error along the stream: {parts})"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.table())}</pre>"


def last_gradient(measurement: Measurement) -> np.ndarray:
    """The measured gradient at the last layer as an (L, L) kernel, for `predict(grad_kernel)`.

    Variances by token, and the mean covariance shared in proportion to the tokens' deviations.
    """
    variance = measurement.token_grad_variance[-1]
    deviation = np.sqrt(variance)
    kernel = np.outer(deviation, deviation)
    pairs = kernel.sum() - np.trace(kernel)
    length = variance.size
    mean = measurement.grad_correlation[-1] * variance.mean() * length * (length - 1)
    # Tokens without a target have no gradient; no kernel of the rest falls below -1/(active - 1).
    active = max(int((variance > 0).sum()), 2)
    share = float(np.clip(mean / pairs, -1 / (active - 1), 1.0)) if pairs > 0 else 0.0
    return np.where(np.eye(length, dtype=bool), kernel, share * kernel)


def _r_squared(predicted: pd.Series, measured: pd.Series) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum())
    if spread <= 1e-24 * float((measured**2).sum()):
        return float("nan")
    return 1.0 - float(((predicted - measured) ** 2).sum()) / spread


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Put a measurement beside a prediction of the same model.

    Raises:
        DomainError: not a Prediction and a Measurement, or of different depths.
    """
    if not isinstance(prediction, Prediction) or not isinstance(measurement, Measurement):
        raise DomainError(
            "compare needs a Prediction and a Measurement, got "
            f"{type(prediction).__name__} and {type(measurement).__name__}"
        )
    if prediction.variance.ndim != 1:
        raise DomainError("compare needs a prediction of a single configuration")
    if prediction.variance.shape != measurement.variance.shape:
        raise DomainError(
            f"the prediction has {len(prediction.variance) - 1} layers, "
            f"the measurement {len(measurement.variance) - 1}"
        )
    return Comparison(prediction, measurement)
