"""Why a measurement differs from its prediction, one feature of the declared model at a time.

Let E(C) be the distance of the measured stream from the prediction for a case C: the sum of |log
ratio| over the points outside their bands. The declared case D and the actual case A differ in some
features. Each feature f is judged twice, added to D alone and removed from A alone:

    explains = (E(D) - E(D + f) + E(A - f) - E(A)) / (2 E(D)),

This is 1 for the only cause of a discrepancy, and also finds causes that cancel each other. A
feature that no declaration can express, such as layers that are copies of one another, is removed
from the network instead, which is measured again; E then uses that measurement.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, without_warnings
from ..noise.band import NORMAL_95
from ..prediction.measurement import Measurement
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .comparison import Comparison, compare
from .differences import Case, Feature, applied
from .findings import Finding, Report, Row
from .verdict import NAMES, judge

if TYPE_CHECKING:
    import pandas as pd

TOKENS = "input tokens"
"""Name of the feature for tokens of a batch that differ from the declared input."""

SHARE = 0.05
"""A feature that explains less than this is not called a cause."""

ENOUGH = 0.8
"""Share of a difference from which the causes count as its explanation."""


def diagnose_case(
    case: Case,
    measurement: Measurement,
    features: Sequence[Feature],
    *,
    source: str = "measurement",
    same_weights: bool = False,
    notes: Sequence[str] = (),
    advice: Sequence[str] = (),
    unchecked: Sequence[str] = (),
    read: str = "",
    progress: bool = False,
) -> Report:
    """Rank the features in which a network differs from its declaration by what they explain.

    Args:
        case: the declared model and its input.
        measurement: of the network.
        features: candidates; each costs two predictions if any point is outside its band.
        source: what was measured.
        same_weights: as in `compare`.
        notes, unchecked, read: copied into the report.
        advice: likely mistakes in the weights, which become the first findings.
        progress: write the verdict, the length of the search and every cause to standard error.
    """
    with without_warnings():
        began = time.perf_counter()
        declared = predict(case.model, **case.inputs)
        seconds = time.perf_counter() - began
        comparison = compare(declared, measurement, same_weights=same_weights)
        points = comparison.outliers(NORMAL_95)
        if progress:
            print_to_stderr(comparison.verdict())
        causes, by_point, shown = [_cause(f, math.nan) for f in features], {}, declared
        explained = math.nan
        if not points.empty:
            distance = _Distance(comparison, points)
            if progress and features:
                runs = 1 + (2 * len(features) if len(features) > 1 else 1)
                print_to_stderr(
                    f"ranking {len(features)} differences: {runs} predictions of some "
                    f"{seconds:.1f} s"
                )
            everything, usable = applied(case, list(features))
            as_found = _predicted(everything)
            ranked_causes = _ranked(case, usable, everything, as_found, distance, progress)
            causes = [cause for cause, _ in ranked_causes]
            by_point = {cause.reason: share for cause, share in ranked_causes}
            if as_found is not None and usable:
                left = distance(as_found, everything.measurement)
                explained = 1 - float(left.sum() / distance.declared.sum())
                shown = as_found
    noted, expected = list(notes), judge(comparison).expected
    if math.isfinite(explained) and len(causes) > 1:
        noted.insert(0, f"all differences together explain {100 * explained:.0f} % of what is off")
    if not expected and not explained > ENOUGH:
        noted.append(
            "the rest is not visible in weights, scales and the mask: it may be the chance of this "
            "draw, custom masking or code in the module, dropout elsewhere, features that are not "
            "independent, or an error of the theory"
        )
    own = [c for c in causes if c.kind != TOKENS or abs(c.explains) >= SHARE]
    noted += [c.reason for c in causes if c not in own]
    findings = [Finding("warning", "wrong matrix", (), reason=sentence) for sentence in advice]
    findings += own
    if not expected and not any(c.explains >= SHARE for c in own):
        why = "the stream is not as predicted, and no difference from the declaration explains it"
        findings.append(Finding("warning", "not as predicted", (), reason=why))
    return Report(
        source=source,
        scheme="",
        findings=tuple(findings),
        notes=tuple(noted),
        unchecked=tuple(unchecked),
        rows=tuple(_rows(comparison, points, by_point)),
        model=shown.model,
        prediction=shown,
        comparison=comparison,
        read=read,
        explained=explained,
        _compared=True,
        _why=lambda: tuple(causes),
    )


def _cause(feature: Feature, share: float) -> Finding:
    """The finding for a feature that differs from the declaration, with the share it explains."""
    words = feature.words
    if share >= SHARE:
        words += f": explains {100 * share:.0f} % of the difference"
    elif share <= -SHARE:
        words += f": hides {-100 * share:.0f} % of the difference"
    elif math.isfinite(share):
        words += ": no part of the difference"
    of = feature.name, (), feature.layers, feature.ratio, math.nan
    return Finding("warning", *of, words, explains=0.0 if math.isnan(share) else share)


def _rows(
    comparison: Comparison, points: pd.DataFrame, by_point: Mapping[str, np.ndarray]
) -> Iterator[Row]:
    """Rows for every point of the stream; points outside their band note the cause that explains a
    quarter or more."""
    keys = ["stack", "quantity", "layer"]
    notes = {}
    for index, key in enumerate(points[keys].itertuples(index=False, name=None)):
        best = max(by_point, key=lambda words: by_point[words][index], default="")
        known = best and float(by_point[best][index]) >= 0.25
        notes[key] = best.rpartition(": ")[0] if known else "no difference explains it"
    for row in comparison.points().to_dict("records"):
        note = notes.get(tuple(row[key] for key in keys), "")
        words = f"{'encoder ' if row['stack'] else ''}{NAMES[str(row['quantity'])]}"
        words += f" leaving layer {row['layer']}" if row["layer"] else " entering layer 1"
        both = float(row["predicted"]), float(row["measured"])
        passed = None if math.isnan(row["deviations"]) else bool(row["inside"])
        band = {"low": float(row["low"]), "high": float(row["high"])}
        yield Row(int(row["layer"]), "", "", words, *both, passed, note, **band)


def print_to_stderr(words: str) -> None:
    """Print one line to standard error."""
    print(" ".join(words.split()), file=sys.stderr, flush=True)


class _Distance:
    """|log of measured over expected| at the points outside their band."""

    def __init__(self, comparison: Comparison, points: pd.DataFrame) -> None:
        self.comparison = comparison
        self.rows = list(points[["stack", "layer", "quantity"]].itertuples(index=False, name=None))
        self.declared = self(comparison.prediction)

    def __call__(self, prediction: Prediction, seen: Measurement | None = None) -> np.ndarray:
        """Distances (P,) from the measurement of the network, or from another one (`seen`)."""
        measured = self.comparison.measurement if seen is None else seen
        return np.array([self._at(prediction, measured, *row) for row in self.rows])

    def _at(self, prediction: Any, seen: Any, stack: str, layer: int, quantity: str) -> float:
        comparison: Any = self.comparison
        if stack:
            comparison, prediction, seen = comparison.encoder, prediction.encoder, seen.encoder
        measured = float(getattr(seen, quantity)[layer])
        mean = float(getattr(prediction, quantity)[layer])
        if measured <= 0 or mean <= 0:
            return 0.0 if measured == mean else FAR
        # a draw of a lognormal is centred at its geometric mean
        centre = float(comparison.ranges[quantity].deviation[layer]) ** 2 / 2
        return min(FAR, abs(math.log(measured / mean) + centre))


FAR = 100.0
"""Distance used if one side is 0 or the numbers overflow."""


def _predicted(case: Case) -> Prediction | None:
    try:
        return predict(case.model, **case.inputs)
    except DomainError:
        return None


def _ranked(
    case: Case,
    features: list[Feature],
    everything: Case,
    prediction: Prediction | None,
    distance: _Distance,
    progress: bool,
) -> list[tuple[Finding, np.ndarray]]:
    start = distance.declared
    total = float(start.sum())
    end = None if prediction is None else distance(prediction, everything.measurement)
    causes = []
    for number, feature in enumerate(features, start=1):
        gains = []
        changed = feature.apply(case)
        if (alone := _predicted(changed)) is not None:
            gains.append(start - distance(alone, changed.measurement))
        if end is not None and len(features) > 1:
            rest = applied(case, [other for other in features if other is not feature])[0]
            if (without := _predicted(rest)) is not None:
                gains.append(distance(without, rest.measurement) - end)
        gain = np.mean(gains, axis=0) if gains else np.zeros_like(start)
        share = float(gain.sum()) / total
        causes.append((_cause(feature, share), gain / np.where(start > 0, start, 1.0)))
        if progress:
            print_to_stderr(f"{number} of {len(features)}: {causes[-1][0].reason}")
    return sorted(causes, key=lambda cause: -cause[0].explains)
