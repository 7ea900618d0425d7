"""A first step as a table, alone or next to a measured one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DomainError
from ..files import Shown, as_frame
from ..step.measured import StepMeasurement
from ..step.result import FirstStep
from .report import number, tabled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def first_step_table(step: FirstStep) -> str:
    """The stream layer by layer, and the loss."""
    changes = zip(step.variance, step.relative_change, strict=True)
    return tabled(
        f"first step of {step.optimizer} at learning rate {step.learning_rate:.3g}: loss "
        f"{step.loss_before:.4g} to {step.loss:.4g}",
        ("layer", "variance after", "relative change"),
        ((str(k), number(v), number(change)) for k, (v, change) in enumerate(changes)),
        f"layer 0 is the input of layer 1; relative change: E |dh|^2/E |h|^2 before the step\n"
        f"slope {step.slope:.4g}: the loss would fall by "
        f"{-step.slope * step.learning_rate:.4g} if it were linear",
    )


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
        from .step_plot import plot_first_step

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
