"""Whether the growth along the depth is expected of a model, in words."""

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
"""Relative difference below which a prediction was started from the measurement at that point."""

NAMES = {"variance": "variance", "grad_variance": "gradient variance"}


def growth_phrases(
    prediction: Any,
    measurement: Any = None,
    prefix: str = "",
    *,
    weights: str = "",
    short: bool = False,
) -> list[str]:
    """Phrases for the growth of variance and gradient and the change of token correlation.

    Args:
        measurement: if given, its numbers are shown, with predictions in brackets.
        prefix: put before every phrase.
        weights: the weights of the prediction, in words.
        short: leave out directions and predictions.
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
    """The growth along the depth of one configuration, in a line."""
    if prediction.variance.ndim > 1:
        return f"{prediction.variance.size // prediction.variance.shape[-1]} configurations"
    parts = growth_phrases(prediction)
    if notes := len(prediction.warnings):
        parts.append(f"{notes} validity warning{'s' * (notes > 1)}")
    return "; ".join(parts)


class Judgement(NamedTuple):
    """The points of a comparison that have a band and are not its starting points: all, those
    `beyond` CLEAR standard deviations, the number outside their 95 % bands, and the number that
    chance allows outside."""

    points: pd.DataFrame
    beyond: pd.DataFrame
    outside: int
    allowed: int

    @property
    def expected(self) -> bool:
        """Whether chance explains the points outside."""
        return self.beyond.empty and self.outside <= self.allowed


def judge(comparison: Comparison) -> Judgement:
    """Judge the points of a comparison."""
    frame = comparison.points()
    last = frame.groupby("stack")["layer"].transform("max")
    ends = frame["layer"].where(frame["quantity"] == "variance", last - frame["layer"]) == 0
    given = ends & np.isclose(frame["measured"], frame["predicted"], rtol=GIVEN, atol=0.0)
    points = frame[frame["deviations"].notna() & ~given]
    beyond = points[points["deviations"].abs() > CLEAR]
    outside = int((~points["inside"]).sum())
    return Judgement(points, beyond, outside, allowed_outside(len(points)))


def verdict(comparison: Comparison) -> str:
    """Say in a sentence whether the measured growth is expected, and how large it is."""
    judged, beyond, outside, allowed = judgement = judge(comparison)
    parts = growth_phrases(comparison.prediction, comparison.measurement)
    if (inner := comparison.encoder) is not None:
        parts += growth_phrases(inner.prediction, inner.measurement, "encoder ")
    if judged.empty:
        why = 'there is one draw, and only theory="refined" predicts the spread between draws'
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
    """`above` / `below`; nan if that is 0."""
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


def class_count(model: Transformer) -> int | None:
    """Number of classes or words that the head chooses from; None without a head and its loss."""
    known = model.head is not None and model.head.loss is not None
    return model.head.choices(model.embedding) if known else None
