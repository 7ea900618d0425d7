"""Predictions and measurements, of a network or of its first step, point by point."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..errors import DomainError
from ..files import Shown, as_frame
from ..formulas.checks import NONNEGATIVE, check_interval
from ..noise.band import NORMAL_95
from ..prediction.draws import QUANTITIES
from ..prediction.measurement import Measurement
from ..prediction.result import Prediction
from ..step.measured import StepMeasurement
from ..step.result import FirstStep
from .expected import TOLERANCE, Expected, expected
from .report import comparison_screen, comparison_tables, number, summary_table, tabled
from .verdict import verdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["QUANTITIES", "Comparison", "compare"]


@dataclass(frozen=True, eq=False)
class Comparison(Shown):
    """A prediction next to a measurement, at every site that both contain.

    Attributes:
        prediction, measurement: the two results.
        same_weights: whether the measurement's draws differ only in dropout.
        tolerance: relative error of the theory itself, one standard deviation.
        encoder: comparison of the encoders; None without encoders.
    """

    prediction: Prediction
    measurement: Measurement
    same_weights: bool = False
    tolerance: float = TOLERANCE
    encoder: Comparison | None = None

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
            block = both[["layer", "site"]].assign(quantity=quantity)
            for kind in ("predicted", "measured", "stderr"):
                block[kind] = both[f"{quantity}_{kind}"].to_numpy(float)
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
        measured values vary no more than twice their standard errors).
        """
        frame = self.to_frame()
        site, size = frame["site"], frame["error"].abs()
        blocks = site.isin(["attention.dropout", "ffn.dropout"])
        kinds = ("stream", "block outputs", "inside blocks")
        points = np.select([site == "stream", blocks], kinds[:2], kinds[2])
        rows = []
        for kind, quantity in itertools.product(kinds, QUANTITIES):
            here = (points == kind) & (frame["quantity"] == quantity)
            if here.any():
                part = frame[here]
                errors = size[here].agg(["mean", "median", "max"])
                fit = _r_squared(*(part[name] for name in ("predicted", "measured", "stderr")))
                rows.append((kind, quantity, *errors, part["excess"].mean(), fit))
        columns = ["points", "quantity", "mean", "median", "max", "excess", "r_squared"]
        return as_frame(rows, columns=columns)

    @functools.cached_property
    def ranges(self) -> dict[str, Expected]:
        """Expected ranges of "variance" and "grad_variance", (N + 1,) each."""
        return expected(
            self.prediction,
            self.measurement,
            same_weights=self.same_weights,
            tolerance=self.tolerance,
        )

    def points(self) -> pd.DataFrame:
        """Every point of the stream, the encoder's first, with the band in which it is expected.

        Columns: stack ("" or "encoder."), layer, quantity ("variance" or "grad_variance"),
        predicted, measured, error (relative, as in `to_frame`), low and high (95 % of
        measurements of as many draws; for one draw and without `tolerance` they are
        `grad_variance_band`), deviations (distance from the expectation in standard deviations) and
        inside. Theories without a band use the measured standard error instead; with one draw
        deviations are then nan.
        """
        import pandas as pd

        frames = []
        if self.encoder is not None:
            frames.append(self.encoder.points().assign(stack="encoder."))
        for quantity, range_ in self.ranges.items():
            measured, predicted = np.asarray(getattr(self.measurement, quantity)), range_.mean
            deviations = range_.deviations(measured)
            columns: dict[str, Any] = {"stack": "", "layer": np.arange(predicted.size)}
            columns |= {"quantity": quantity, "predicted": predicted, "measured": measured}
            columns["error"] = (predicted - measured) / np.where(measured > 0, measured, 1.0)
            columns |= {"low": range_.low, "high": range_.high, "deviations": deviations}
            columns["inside"] = ~(np.abs(deviations) > NORMAL_95)
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    def outliers(self, deviations: float = NORMAL_95) -> pd.DataFrame:
        """The rows of `points` that are off by more than `deviations` standard deviations.

        The default, 1.96, is the 95 % band, outside of which one point in twenty of a correct model
        lies (neighbouring points together).
        """
        frame = self.points()
        return frame[frame["deviations"].abs() > deviations].reset_index(drop=True)

    def outputs(self) -> pd.DataFrame:
        """Loss, logits and total gradient, as far as both results have them.

        Columns: quantity ("loss", "logit_variance", or "gradient_norm", the norm of the gradient
        with respect to all common parameters), predicted, measured, stderr (of the measurement, nan
        for one draw) and deviations: for the loss in units of its predicted scatter over draws, for
        the others of measured standard error and `tolerance`; nan if neither is known.
        """
        p, m = self.prediction, self.measurement
        rows = []
        if p.loss is not None and m.loss is not None:
            draws = 1 if self.same_weights else m.seeds
            noise = np.fmax((p.loss_stderr or 0.0) / math.sqrt(draws), m.loss_stderr or 0.0)
            rows.append(("loss", p.loss, m.loss, m.loss_stderr, noise))
        if p.logit_variance is not None and m.logit_variance is not None:
            stderr = math.nan if m.logit_variance_stderr is None else m.logit_variance_stderr
            noise = math.hypot(stderr, self.tolerance * p.logit_variance)
            rows.append(("logit_variance", p.logit_variance, m.logit_variance, stderr, noise))
        norms = self.weight_gradients()
        if len(norms):
            square, seen = norms["predicted"].sum(), norms["measured"].sum()
            rows.append(("gradient_norm", math.sqrt(square), math.sqrt(seen), math.nan, math.nan))
        frame = as_frame(rows, columns=["quantity", "predicted", "measured", "stderr", "noise"])
        noise = frame.pop("noise").astype(float)
        frame["deviations"] = (frame["measured"] - frame["predicted"]) / noise.where(noise > 0)
        return frame

    def weight_gradients(self) -> pd.DataFrame:
        """Squared gradient norm of every common parameter, the encoder's first.

        Columns: stack, layer, weight, predicted, measured, stderr, error (relative).
        """
        import pandas as pd

        if self.prediction.variance.ndim > 1:
            raise DomainError("weight_gradients needs a prediction of a single configuration")
        frames = [] if self.encoder is None else [self.encoder.weight_gradients()]
        frames = [frame.assign(stack="encoder.") for frame in frames]
        result = side_by_side(self.prediction, self.measurement)
        result.insert(0, "stack", "")
        return pd.concat([*frames, result], ignore_index=True)

    def verdict(self) -> str:
        """Whether the measured growth along the depth is expected, in a sentence."""
        return verdict(self)

    def table(self) -> str:
        """The verdict, stream points side by side, the loss, then the errors, as text."""
        tables = (*comparison_tables(self), summary_table(self))
        return "\n\n".join([self.verdict(), *tables])

    def plot(self, name: str | None = None) -> Figure:
        """Draw the prediction as lines, the measurement as points, with `name` in the title."""
        from .plot import plot_comparison

        return plot_comparison(self, name)

    def __str__(self) -> str:
        return comparison_screen(self)

    def __repr__(self) -> str:
        stream = self.summary().query("points == 'stream'").set_index("quantity")["mean"]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in stream.items())
        return f"Comparison(mean error along the stream: {parts})"


def _r_squared(predicted: pd.Series, measured: pd.Series, stderr: pd.Series) -> float:
    """R²; nan if the measured values vary no more than their noise or by rounding."""
    spread = float(((measured - measured.mean()) ** 2).sum())
    noise = float(((2 * stderr.fillna(0.0)) ** 2).sum())
    if spread <= max(noise, 1e-24 * float((measured**2).sum())):
        return float("nan")
    return 1.0 - float(((predicted - measured) ** 2).sum()) / spread


@overload
def compare(prediction: FirstStep, measurement: StepMeasurement) -> StepComparison: ...


@overload
def compare(
    prediction: Prediction,
    measurement: Measurement,
    *,
    same_weights: bool = False,
    tolerance: float = TOLERANCE,
) -> Comparison: ...


def compare(
    prediction: Any,
    measurement: Any,
    *,
    same_weights: bool = False,
    tolerance: float = TOLERANCE,
) -> Comparison | StepComparison:
    """Compare a measurement with a prediction of the same model.

    Args:
        prediction: of a single configuration, or a first step (`Prediction.after`).
        measurement: by `simulate` or `moments.torch.measure`; of a step by
            `moments.torch.measure_step`.
        same_weights: whether the measurement's draws share their weights, as they do for a module
            (not a factory): then they count as one draw.
        tolerance: relative error of the theory itself, one standard deviation, in addition to the
            scatter over draws.

    Returns:
        A `Comparison`: `summary()`, `to_frame()` by site, `plot()`.

    Raises:
        DomainError: the two are not a Prediction and a Measurement, or of different depths, or the
            tolerance is negative.
    """
    if isinstance(prediction, FirstStep):
        return compare_steps(prediction, measurement)
    if not isinstance(prediction, Prediction) or not isinstance(measurement, Measurement):
        raise DomainError(
            "compare needs a Prediction and a Measurement, got "
            f"{type(prediction).__name__} and {type(measurement).__name__}"
        )
    check_interval("tolerance", tolerance, NONNEGATIVE)
    if prediction.variance.ndim != 1:
        raise DomainError("compare needs a prediction of a single configuration")
    if prediction.variance.shape != measurement.variance.shape:
        raise DomainError(
            f"the prediction has {len(prediction.variance) - 1} layers, "
            f"the measurement {len(measurement.variance) - 1}"
        )
    encoder = None
    if prediction.encoder is not None and measurement.encoder is not None:
        encoder = compare(
            prediction.encoder,
            measurement.encoder,
            same_weights=same_weights,
            tolerance=tolerance,
        )
    return Comparison(prediction, measurement, same_weights, tolerance, encoder)


_SIMULATED = "the simulated declaration"


def per_sequence(prediction: Prediction, measurement: Measurement) -> int:
    """Number of sequences by which to multiply a predicted norm to compare with the measured one.

    A white gradient injected into a real module is independent between sequences, and its weight
    gradients are those of the whole batch; a simulation divides them by the batch size.
    """
    alone = prediction.layout.sequences == 1 and prediction.loss is None
    whole = measurement.loss is None and measurement.source != _SIMULATED
    return measurement.batch if alone and whole else 1


def side_by_side(prediction: Prediction, measurement: Measurement) -> pd.DataFrame:
    """One row per common role of parameters.

    Columns: layer, weight, predicted, measured, stderr (nan from one draw), error (relative).
    """
    import pandas as pd

    keys = ["layer", "weight"]
    first = prediction.weight_gradients().groupby(keys, as_index=False)["squared_norm"].sum()
    rows = measurement.weight_gradients()
    rows["square"] = rows["squared_norm_stderr"].astype(float) ** 2
    second = rows.groupby(keys, as_index=False)[["squared_norm", "square"]].sum(min_count=1)
    both = pd.merge(first, second, on=keys, suffixes=("_predicted", ""))
    predicted = both["squared_norm_predicted"] * per_sequence(prediction, measurement)
    measured = both["squared_norm"]
    both = both[keys].assign(
        predicted=predicted, measured=measured, stderr=np.sqrt(both["square"].to_numpy(float))
    )
    both["error"] = (predicted - measured) / measured.where(measured > 0, 1.0)
    return both


# --- first steps ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepComparison(Shown):
    """A predicted first step next to a measured one.

    Attributes:
        step, measurement: the two results.
    """

    step: FirstStep
    measurement: StepMeasurement

    def to_frame(self) -> pd.DataFrame:
        """One row per site: layer, site, and predicted, measured, stderr (relative) and error
        (relative) of the change and of the variance after the step."""
        both = self.step.to_frame().merge(
            self.measurement.to_frame(), on=["layer", "site"], suffixes=("", "_measured")
        )
        return _with_errors(both, ("relative_change", "variance"), ["layer", "site"])

    def weights(self) -> pd.DataFrame:
        """One row per common parameter: the same for update_variance, alignment and slope."""
        both = self.step.weights().merge(
            self.measurement.weights(), on=["layer", "weight"], suffixes=("", "_measured")
        )
        return _with_errors(both, ("update_variance", "alignment", "slope"), ["layer", "weight"])

    def outputs(self) -> pd.DataFrame:
        """The loss after the step, its change and the slope: predicted, measured, stderr, error
        (relative; of the loss itself too)."""
        rows = []
        for name in ("loss", "loss_change", "slope"):
            result = getattr(self.step, name)
            seen = getattr(self.measurement, name)
            stderr = getattr(self.measurement, f"{name}_stderr")
            rows.append((name, result, seen, stderr, result / seen - 1 if seen else np.nan))
        return as_frame(rows, columns=["quantity", "predicted", "measured", "stderr", "error"])

    def summary(self) -> pd.DataFrame:
        """Errors over sites and parameters: quantity, mean, median and max of |error|, and excess,
        the mean of the part beyond twice the standard error. Errors of alignment are absolute."""
        rows = []
        for frame, names in (
            (self.to_frame(), ("relative_change", "variance")),
            (self.weights(), ("update_variance", "alignment", "slope")),
        ):
            for name in names:
                error = frame[f"{name}_error"].abs().to_numpy(float)
                stderr = np.nan_to_num(frame[f"{name}_stderr"].to_numpy(float))
                seen = np.isfinite(error)
                if seen.any():
                    beyond = np.maximum(error - 2 * stderr, 0.0)[seen]
                    error = error[seen]
                    rows.append((name, error.mean(), np.median(error), error.max(), beyond.mean()))
        return as_frame(rows, columns=["quantity", "mean", "median", "max", "excess"])

    def table(self) -> str:
        """Outputs and summary as text."""
        outputs = tabled(
            f"first step of {self.step.optimizer} at {self.step.learning_rate:g}: "
            f"{self.measurement.source}, {self.measurement.seeds} draws",
            ("quantity", "predicted", "measured", "+-", "error"),
            (
                (quantity, *map(number, cells), f"{100 * error:+z.1f} %")
                for quantity, *cells, error in self.outputs().to_numpy().tolist()
            ),
        )
        summary = tabled(
            "errors over sites and parameters (relative; alignment absolute)",
            ("quantity", "mean", "median", "max", "beyond 2 s.e."),
            (
                (quantity, *(f"{value:.3f}" for value in errors))
                for quantity, *errors in self.summary().to_numpy().tolist()
            ),
        )
        return f"{outputs}\n\n{summary}"

    def plot(self, name: str | None = None) -> Figure:
        """Draw the predicted coordinate check with the measured one."""
        from .plot import plot_first_step

        return plot_first_step(self.step, name, self.measurement)

    def __repr__(self) -> str:
        return f"StepComparison({self.step!r} against {self.measurement!r})"


def _with_errors(both: pd.DataFrame, names: tuple[str, ...], keys: list[str]) -> pd.DataFrame:
    result = both[keys].copy()
    for name in names:
        measured, stderr = both[f"{name}_measured"], both[f"{name}_stderr"]
        absolute = name == "alignment"
        scale = 1.0 if absolute else measured.abs().where(measured != 0)
        result[name] = both[name]
        result[f"{name}_measured"] = measured
        result[f"{name}_stderr"] = stderr / scale
        result[f"{name}_error"] = (both[name] - measured) / scale
    return result


def compare_steps(step: FirstStep, measurement: StepMeasurement) -> StepComparison:
    """Compare a predicted step with a measured one; DomainError if depths or rates differ."""
    if not isinstance(measurement, StepMeasurement):
        raise DomainError(
            "a FirstStep is compared with a result of moments.torch.measure_step, not with "
            f"{type(measurement).__name__}"
        )
    if len(step.variance) != len(measurement.variance):
        raise DomainError(
            f"the step has {len(step.variance) - 1} layers, the measurement "
            f"{len(measurement.variance) - 1}"
        )
    if not np.isclose(step.learning_rate, measurement.learning_rate, rtol=1e-6):
        raise DomainError(
            f"the step was taken at learning rate {step.learning_rate:g}, the measured one at "
            f"{measurement.learning_rate:g}"
        )
    return StepComparison(step, measurement)
