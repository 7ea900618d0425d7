"""Whether the growth along the depth is what a model is expected to do, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .expected import CLEAR, allowed_outside

if TYPE_CHECKING:
    import pandas as pd

    from ..model.transformer import Transformer
    from ..prediction.result import Prediction
    from .comparison import Comparison

GIVEN = 1e-9
"""Relative difference below which a prediction is the measurement that it was begun with."""

NAMES = {"variance": "variance", "grad_variance": "gradient variance"}


def growths(
    prediction: Any,
    measurement: Any = None,
    prefix: str = "",
    *,
    weights: str = "",
    short: bool = False,
) -> list[str]:
    """What the depth does to a signal and to its gradient, a phrase each.

    Args:
        measurement: with it, what is predicted stands behind in brackets.
        prefix: of every phrase.
        weights: for which it is predicted, in words.
        short: without directions and what is predicted.
    """
    seen = prediction if measurement is None else measurement
    parts: list[str] = []
    for name, ends, way in (
        ("variance", (0, -1), "first to last"),
        ("grad_variance", (-1, 0), "last to first"),
    ):
        factors = []
        for one in (seen, prediction):
            start, to = (float(np.asarray(getattr(one, name))[end]) for end in ends)
            factors.append(times(to, start))
        if math.isnan(factors[0]):
            continue
        words = "" if short else f" from {way} layer"
        if not short and measurement is not None:
            words += f" (x {factors[1]:.3g}{'' if parts else f' predicted{weights}'})"
        parts.append(f"{prefix}{NAMES[name]} x {factors[0]:.3g}{words}")
    first, last = (float(np.asarray(seen.correlation)[end]) for end in (0, -1))
    return [*parts, f"{prefix}token correlation {first:z.2f} to {last:z.2f}"]


def growth(prediction: Prediction) -> str:
    """What the depth does to one configuration, in a line."""
    if prediction.variance.ndim > 1:
        return f"{prediction.variance.size // prediction.variance.shape[-1]} configurations"
    parts = growths(prediction)
    if notes := len(prediction.warnings):
        parts.append(f"{notes} warning{'s' * (notes > 1)} of validity")
    return "; ".join(parts)


class Judgement(NamedTuple):
    """The points of a comparison that have a band and were not given: all, those `beyond` CLEAR
    standard deviations, how many lie out of their 95 % band, and how many chance allows to."""

    points: pd.DataFrame
    beyond: pd.DataFrame
    outside: int
    allowed: int

    @property
    def expected(self) -> bool:
        """Whether chance may have done it."""
        return self.beyond.empty and self.outside <= self.allowed


def judge(comparison: Comparison) -> Judgement:
    """Whether points lie where they are expected."""
    frame = comparison.points()
    last = frame.groupby("stack")["layer"].transform("max")
    ends = frame["layer"].where(frame["quantity"] == "variance", last - frame["layer"]) == 0
    given = ends & np.isclose(frame["measured"], frame["predicted"], rtol=GIVEN, atol=0.0)
    points = frame[frame["deviations"].notna() & ~given]
    beyond = points[points["deviations"].abs() > CLEAR]
    outside = int((~points["inside"]).sum())
    return Judgement(points, beyond, outside, allowed_outside(len(points)))


def verdict(comparison: Comparison) -> str:
    """Whether what was measured is expected, and what the depth does, in a sentence."""
    judged, beyond, outside, allowed = judgement = judge(comparison)
    parts = growths(comparison.prediction, comparison.measurement)
    if (inner := comparison.encoder) is not None:
        parts += growths(inner.prediction, inner.measurement, "encoder ")
    if judged.empty:
        why = 'one draw, and this theory gives no spread between draws (theory="refined" does)'
        return f"it is not known whether the growth is expected: {why}; {'; '.join(parts)}"
    one = outside == 1
    count = f"{outside} of {len(judged)} points {'lies' if one else 'lie'} outside "
    count += "its 95 % band" if one else "their 95 % bands"
    if not beyond.empty:
        word = "not expected"
        parts = [
            _worst(part, str(stack), str(quantity))
            for (stack, quantity), part in beyond.groupby(["stack", "quantity"], sort=False)
        ] + parts
    elif not judgement.expected:
        word = "doubtful"
        why = f"up to {allowed} would by chance, and none is off by {CLEAR:g} standard deviations"
        parts = [f"{count}, where {why}: measure more draws", *parts]
    else:
        word = "expected"
        every = f"all {len(judged)} points lie in their 95 % bands"
        parts.append(f"{count}, as happens by chance" if outside else every)
    return f"the growth you see is {word}: {'; '.join(parts)}"


def _name(stack: str, quantity: str) -> str:
    return f"{'encoder ' if stack else ''}{NAMES[quantity]}"


def times(above: float, below: float) -> float:
    """One over the other; nan where that is 0."""
    return float(above / below) if below else math.nan


def _worst(part: Any, stack: str, quantity: str) -> str:
    index = int(np.argmax(np.abs(np.nan_to_num(part["deviations"].to_numpy(), posinf=1e9))))
    worst = part.iloc[index]
    layers = part["layer"].tolist()
    where = f"point {layers[0]}"
    if len(layers) > 1:
        several = "points" if layers[-1] - layers[0] < len(layers) else f"{len(layers)} points from"
        where = f"{several} {layers[0]} to {layers[-1]}, most at {worst['layer']}"
    return (
        f"{_name(stack, quantity)} is outside its band at {where}, "
        f"{times(worst['measured'], worst['predicted']):.3g} times the prediction "
        f"({worst['deviations']:+.1f} standard deviations)"
    )


def choices(model: Transformer) -> int | None:
    """Logits per prediction, where a head declares them."""
    known = model.head is not None and model.head.loss is not None
    return model.head.choices(model.embedding) if known else None
