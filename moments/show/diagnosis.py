"""Why a measurement is not what was predicted: one feature of the declared model at a time.

Let E(C) be the distance of the measured stream from what a case C predicts, the sum of |log ratio|
over the points out of their band. Of the features in which the declared case D and the one found,
A, differ, each is judged twice: put into D alone, and taken out of A alone,

    explains = (E(D) - E(D + f) + E(A - f) - E(A)) / (2 E(D)),

which is 1 for the one cause of a discrepancy, and does not lose causes that make up for each other.
What no declaration can say, such as layers that are copies of one another, is taken out of the
network instead, which is then measured again: E compares a prediction with that measurement.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, listed, without_warnings
from ..files import Shown, as_frame
from ..noise.band import NORMAL_95
from ..prediction.measurement import Measurement
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .comparison import Comparison, compare
from .differences import Case, Feature, applied
from .expected import TOLERANCE
from .verdict import NAMES, judge

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


TOKENS = "input tokens"
"""Name of the feature that says how a batch's tokens are not as declared: not the module's."""

SHARE = 0.05
"""A feature that explains less than this is not called a cause."""


@dataclass(frozen=True)
class Cause:
    """One feature in which the module is not as declared.

    Attributes:
        feature, words: its name, and what was found beside what was declared.
        ratio, layers: as of `moments.show.differences.Feature`.
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
class Diagnosis(Shown):
    """Whether a measurement is what its declaration lets expect, and why not.

    Attributes:
        comparison: the declared prediction beside the measurement.
        found: the prediction for the module as it was found to be; None where it could not be made.
        causes: every feature in which it is not as declared, what explains most first.
        explained: share of the discrepancy that all of them together explain; nan where there is
            none, or no `found`.
        notes: what else was seen, in words.
        advice: what the weights are likely to have suffered, a sentence each.
        unchecked: what of the declaration was not held against the network, a phrase each.
    """

    comparison: Comparison
    found: Prediction | None
    causes: tuple[Cause, ...]
    explained: float
    notes: tuple[str, ...]
    _points: pd.DataFrame = dataclasses.field(repr=False)
    advice: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def expected(self) -> bool:
        """Whether the stream is as predicted, whatever else is not as declared.

        No point lies further than three standard deviations from its expectation, and no more of
        them out of their 95 % bands than chance allows (`moments.show.expected.allowed_outside`).
        """
        return judge(self.comparison).expected

    @property
    def differing(self) -> tuple[str, ...]:
        """Names of the features in which the network is not as declared."""
        return tuple(cause.feature for cause in self.causes if cause.feature != TOKENS)

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
        columns = ["feature", "words", "ratio", "layers", "explains"]
        rows = [[getattr(cause, name) for name in columns] for cause in self.causes]
        return as_frame(rows, columns=columns)

    def plot(self, name: str | None = None) -> Figure:
        """Prediction, measurement and what the module as found should do, `name` in the title."""
        from .plot import plot_diagnosis

        return plot_diagnosis(self, name)

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        state = "expected" if self.expected else "not expected"
        state += f", {len(self.differing)} differences" if self.differing else ""
        state += f", {len(self.unchecked)} things not checked" if self.unchecked else ""
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
    advice: Sequence[str] = (),
    unchecked: Sequence[str] = (),
    progress: bool = False,
) -> Diagnosis:
    """Rank the features in which a network is not as declared by what they explain.

    Args:
        case: the declared model and its input.
        measurement: of the network.
        features: candidates, two predictions each where any point is out of its band.
        same_weights, tolerance: as of `compare`.
        notes, advice, unchecked: put into the diagnosis as they are.
        progress: write the verdict, the length of the search and every cause to standard error.
    """
    with without_warnings():
        began = time.perf_counter()
        declared = predict(case.model, **case.inputs)
        seconds = time.perf_counter() - began
        comparison = compare(declared, measurement, same_weights=same_weights, tolerance=tolerance)
        points = comparison.outliers(NORMAL_95)
        told = (tuple(notes), points, tuple(advice), tuple(unchecked))
        if progress:
            say(comparison.verdict())
        if points.empty:
            none = np.zeros(0)
            idle = tuple(Cause(f.name, f.words, f.ratio, f.layers, 0.0, none) for f in features)
            found = declared if not features else None
            return Diagnosis(comparison, found, idle, math.nan, *told)
        distance = _Distance(comparison, points)
        if progress and features:
            runs = 1 + (2 * len(features) if len(features) > 1 else 1)
            say(f"ranking {len(features)} differences: {runs} predictions of some {seconds:.1f} s")
        everything, usable = applied(case, list(features))
        found = _predicted(everything)
        causes = _ranked(case, usable, everything, found, distance, progress)
    explained = math.nan
    if found is not None and usable:
        left = distance(found, everything.measurement)
        explained = 1 - float(left.sum() / distance.declared.sum())
    return Diagnosis(comparison, found, tuple(causes), explained, *told)


def say(words: str) -> None:
    """One line on standard error."""
    print(" ".join(words.split()), file=sys.stderr, flush=True)


class _Distance:
    """|log of measured over expected| at the points out of their band."""

    def __init__(self, comparison: Comparison, points: pd.DataFrame) -> None:
        self.comparison = comparison
        self.rows = [
            (str(row["stack"]), int(row["layer"]), str(row["quantity"]))
            for row in points.to_dict("records")
        ]
        self.declared = self(comparison.prediction)

    def __call__(self, prediction: Prediction, seen: Measurement | None = None) -> np.ndarray:
        """(P,), of the network as it is unless something else was `seen`."""
        measured = self.comparison.measurement if seen is None else seen
        return np.array([self._at(prediction, measured, *row) for row in self.rows])

    def _at(
        self, prediction: Prediction, seen: Measurement, stack: str, layer: int, quantity: str
    ) -> float:
        comparison = self.comparison
        if stack:
            assert comparison.encoder is not None
            assert prediction.encoder is not None
            assert seen.encoder is not None
            comparison, prediction, seen = comparison.encoder, prediction.encoder, seen.encoder
        measured = float(getattr(seen, quantity)[layer])
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
    case: Case,
    features: list[Feature],
    everything: Case,
    found: Prediction | None,
    distance: _Distance,
    progress: bool,
) -> list[Cause]:
    start = distance.declared
    total = float(start.sum())
    end = None if found is None else distance(found, everything.measurement)
    causes = []
    for number, feature in enumerate(features, start=1):
        gains = []
        changed = feature.apply(case)
        alone = _predicted(changed)
        if alone is not None:
            gains.append(start - distance(alone, changed.measurement))
        if end is not None and len(features) > 1:
            others = [other for other in features if other is not feature]
            rest = applied(case, others)[0]
            without = _predicted(rest)
            if without is not None:
                gains.append(distance(without, rest.measurement) - end)
        gain = np.mean(gains, axis=0) if gains else np.zeros_like(start)
        f, by_point = feature, gain / np.where(start > 0, start, 1.0)
        share = float(gain.sum()) / total
        causes.append(Cause(f.name, f.words, f.ratio, f.layers, share, by_point))
        if progress:
            say(f"{number} of {len(features)}: {causes[-1]}")
    return sorted(causes, key=lambda cause: -cause.explains)


WIDTH = 100
MOST = 8
"""Features that a headline names."""

ENOUGH = 0.8
"""Share of a difference from which what is found counts as the explanation."""


def text(diagnosis: Diagnosis) -> str:
    """The whole diagnosis."""
    return "\n".join(
        wrapped
        for line in _lines(diagnosis)
        for wrapped in textwrap.wrap(line, WIDTH, subsequent_indent="   ")
    )


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield _headline(diagnosis)
    frame = diagnosis.to_frame()
    for sentence in diagnosis.advice:
        yield f"in its weights, {sentence}"
    causes = [c for c in diagnosis.causes if abs(c.explains) >= SHARE]
    idle = [c for c in diagnosis.causes if abs(c.explains) < SHARE]
    if causes:
        yield "likeliest causes:"
        for number, cause in enumerate(causes, start=1):
            yield f"{number}. {cause}"
    if math.isfinite(diagnosis.explained) and len(causes) > 1:
        yield f"together they explain {100 * diagnosis.explained:.0f} %"
    for note in diagnosis.notes:
        yield f"note: {note}"
    if not diagnosis.expected and not diagnosis.explained > ENOUGH and not diagnosis.notes:
        yield (
            "what is left comes from something that neither weights nor scales nor the causal mask "
            "show: the chance of this draw, a mask or code of the module's own, dropout elsewhere, "
            "features that are not independent, or an error of the theory"
        )
    if idle:
        small = f"explaining less than {100 * SHARE:.0f} % of the difference each"
        rest = "with no point out of its band" if frame.empty else small
        yield f"{'also ' if causes else ''}not as declared, {rest}:"
        for cause in idle:
            yield f"- {cause.words}"
    if not frame.empty:
        yield "points out of their 95 % band:"
        keys = ["stack", "quantity", "cause"]
        for (stack, quantity, words), part in frame.groupby(keys, sort=False):
            yield _points(str(stack), str(quantity), str(words), part.to_dict("records"))


def _headline(diagnosis: Diagnosis) -> str:
    """The verdict; before it what it cannot speak for."""
    verdict = diagnosis.comparison.verdict()
    if diagnosis.unchecked:
        verdict = f"{verdict}; NOT CHECKED: {'; '.join(diagnosis.unchecked)}"
    if not (diagnosis.differing and diagnosis.expected):
        return verdict
    names = list(diagnosis.differing)
    some = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" * (len(names) > MOST))
    return f"NOT AS DECLARED: {some} (below); all the same, {verdict}"


def _points(stack: str, quantity: str, cause: str, rows: list[Any]) -> str:
    """One line for all points of a quantity that have one cause."""
    worst: Mapping[str, Any] = max(rows, key=lambda row: abs(row["deviations"]))
    times = worst["measured"] / worst["predicted"] if worst["predicted"] else math.inf
    most = f", most at {worst['layer']}" if len(rows) > 1 else ""
    line = (
        f"- {'encoder ' if stack else ''}{NAMES[quantity]} at {listed([r['layer'] for r in rows])}"
        f"{most}: {worst['measured']:.4g}, predicted {worst['predicted']:.4g} "
        f"({times:.3g}x, {worst['deviations']:+.1f} standard deviations)"
    )
    return f"{line}: {cause}" if cause else f"{line}: no difference found explains it"
