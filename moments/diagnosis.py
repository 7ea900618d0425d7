"""Why a measurement is not what was predicted: one feature of the declared model at a time.

Let E(C) be the distance of the measured stream from what a case C predicts, the sum of |log ratio|
over the points out of their band. Of the features in which the declared case D and the one found,
A, differ, each is judged twice: put into D alone, and taken out of A alone,

    explains = (E(D) - E(D + f) + E(A - f) - E(A)) / (2 E(D)),

which is 1 for the one cause of a discrepancy, and does not lose causes that make up for each other.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .band import NORMAL_95
from .comparison import CLEAR, Comparison, compare
from .differences import Case, Feature, applied
from .errors import DomainError, ValidityWarning
from .expected import TOLERANCE
from .measurement import Measurement
from .passes import predict
from .prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd

SHARE = 0.05
"""A feature that explains less than this is not called a cause."""


@dataclass(frozen=True)
class Cause:
    """One feature in which the module is not as declared.

    Attributes:
        feature: its name.
        words: what was found, beside what was declared.
        ratio: found over declared, nan where they are no numbers.
        layers: where they differ; empty where the feature has no layers.
        explains: share of the whole discrepancy that it explains (see the module's text). Below 0
            it makes up for another one.
        by_point: (P,) the same at every point out of its band.
    """

    feature: str
    words: str
    ratio: float
    layers: tuple[int, ...]
    explains: float
    by_point: np.ndarray = dataclasses.field(repr=False)

    def __str__(self) -> str:
        if self.explains >= SHARE:
            return f"{self.words}: explains {100 * self.explains:.0f} % of the difference"
        if self.explains <= -SHARE:
            return f"{self.words}: hides {-100 * self.explains:.0f} % of the difference"
        return f"{self.words}: no part of the difference"


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Whether a measurement is what its declaration lets expect, and why not.

    Attributes:
        comparison: the declared prediction beside the measurement.
        found: the prediction for the module as it was found to be; None where it could not be made.
        causes: every feature in which it is not as declared, what explains most first.
        explained: share of the discrepancy that all of them together explain; nan where there is
            none, or no `found`.
        notes: what else was seen, in words.
    """

    comparison: Comparison
    found: Prediction | None
    causes: tuple[Cause, ...]
    explained: float
    notes: tuple[str, ...]
    _points: pd.DataFrame = dataclasses.field(repr=False)

    @property
    def expected(self) -> bool:
        """Whether no point lies further than three standard deviations from its expectation."""
        return self.comparison.outliers(CLEAR).empty

    def to_frame(self) -> pd.DataFrame:
        """One row per point of the stream out of its 95 % band.

        Columns: those of `Comparison.points`, then cause (in words; empty where no feature found
        explains a quarter of it) and explains (its share there).
        """
        frame = self._points.copy()
        causes, shares = [], []
        for index in range(len(frame)):
            best = max(self.causes, key=lambda c: c.by_point[index], default=None)
            share = math.nan if best is None else float(best.by_point[index])
            known = best is not None and share >= 0.25
            causes.append(best.words if best is not None and known else "")
            shares.append(share if known else math.nan)
        return frame.assign(cause=causes, explains=shares)

    def differences(self) -> pd.DataFrame:
        """One row per feature that is not as declared: feature, words, ratio, layers, explains."""
        import pandas as pd

        columns = ["feature", "words", "ratio", "layers", "explains"]
        rows = [[getattr(cause, name) for name in columns] for cause in self.causes]
        return pd.DataFrame(rows, columns=columns)

    def __str__(self) -> str:
        from .diagnosis_text import text

        return text(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def __repr__(self) -> str:
        state = "expected" if self.expected else "not expected"
        causes = [cause for cause in self.causes if cause.explains >= SHARE]
        first = f", likeliest cause: {causes[0].words}" if causes else ""
        return f"Diagnosis({state}, {len(self._points)} points out of their band{first})"


def diagnose_case(
    case: Case,
    measurement: Measurement,
    features: Sequence[Feature],
    *,
    same_weights: bool = False,
    tolerance: float = TOLERANCE,
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Rank the features in which a network is not as declared by what they explain.

    Args:
        case: the declared model and its input.
        measurement: of the network.
        features: candidates, as `moments.differences.differences` finds them. Each costs two
            predictions, where any point is out of its band.
        same_weights, tolerance: as of `compare`.
        notes: put into the diagnosis as they are.

    Raises:
        DomainError: as `predict` and `compare`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        declared = predict(case.model, **case.inputs)
        comparison = compare(declared, measurement, same_weights=same_weights, tolerance=tolerance)
        points = comparison.outliers(NORMAL_95)
        if points.empty:
            none = np.zeros(0)
            idle = tuple(Cause(f.name, f.words, f.ratio, f.layers, 0.0, none) for f in features)
            found = declared if not features else None
            return Diagnosis(comparison, found, idle, math.nan, tuple(notes), points)
        distance = _Distance(comparison, points)
        everything, usable = applied(case, list(features))
        found = _predicted(everything)
        causes = _ranked(case, usable, found, distance)
    explained = math.nan
    if found is not None and usable:
        explained = 1 - float(distance(found).sum() / distance.declared.sum())
    return Diagnosis(comparison, found, tuple(causes), explained, tuple(notes), points)


class _Distance:
    """|log of measured over expected| at the points out of their band."""

    def __init__(self, comparison: Comparison, points: pd.DataFrame) -> None:
        self.comparison = comparison
        self.rows = [
            (str(row["stack"]), int(row["layer"]), str(row["quantity"]))
            for row in points.to_dict("records")
        ]
        self.declared = self(comparison.prediction)

    def __call__(self, prediction: Prediction) -> np.ndarray:
        """(P,)"""
        return np.array([self._at(prediction, *row) for row in self.rows])

    def _at(self, prediction: Prediction, stack: str, layer: int, quantity: str) -> float:
        comparison = self.comparison
        if stack:
            assert comparison.encoder is not None
            assert prediction.encoder is not None
            comparison, prediction = comparison.encoder, prediction.encoder
        measured = float(getattr(comparison.measurement, quantity)[layer])
        mean = float(getattr(prediction, quantity)[layer])
        if measured <= 0 or mean <= 0:
            return 0.0 if measured == mean else FAR
        # one draw of a lognormal lies about its geometric mean
        centre = float(comparison.ranges[quantity].deviation[layer]) ** 2 / 2
        return min(FAR, abs(math.log(measured / mean) + centre))


FAR = 100.0
"""Distance that stands in where one side is 0 or the numbers overflow."""


def _predicted(case: Case) -> Prediction | None:
    try:
        return predict(case.model, **case.inputs)
    except DomainError:
        return None


def _ranked(
    case: Case, features: list[Feature], found: Prediction | None, distance: _Distance
) -> list[Cause]:
    start = distance.declared
    total = float(start.sum())
    end = None if found is None else distance(found)
    causes = []
    for feature in features:
        gains = []
        alone = _predicted(feature.apply(case))
        if alone is not None:
            gains.append(start - distance(alone))
        if end is not None and len(features) > 1:
            others = [other for other in features if other is not feature]
            without = _predicted(applied(case, others)[0])
            if without is not None:
                gains.append(distance(without) - end)
        gain = np.mean(gains, axis=0) if gains else np.zeros_like(start)
        causes.append(
            Cause(
                feature.name,
                feature.words,
                feature.ratio,
                feature.layers,
                float(gain.sum()) / total,
                gain / np.where(start > 0, start, 1.0),
            )
        )
    return sorted(causes, key=lambda cause: -cause.explains)
