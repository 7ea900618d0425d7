"""Whether the growth along the depth is what a model is expected to do, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .expected import CLEAR, allowed_outside

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction
    from .comparison import Comparison

GIVEN = 1e-9
"""Relative difference below which a prediction is the measurement that it was begun with."""

NAMES = {"variance": "variance", "grad_variance": "gradient variance"}


def growth(prediction: Prediction) -> str:
    """What the depth does to one configuration, in a line."""
    if prediction.variance.ndim > 1:
        return f"{prediction.variance.size // prediction.variance.shape[-1]} configurations"
    variance, gradient = prediction.variance, prediction.grad_variance
    parts = [
        f"{title} × {to / start:.3g} {way}"
        for title, to, start, way in (
            ("variance", variance[-1], variance[0], "from input to output"),
            ("gradient variance", gradient[0], gradient[-1], "from output to input"),
        )
        if start > 0
    ]
    ends = prediction.correlation[[0, -1]]
    parts.append(f"token correlation {ends[0]:.3g} to {ends[1]:.3g}")
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
    """One sentence per quantity, after whether it is expected."""
    frame = comparison.points()
    judged, beyond, outside, allowed = judgement = judge(comparison)
    if judged.empty:
        return (
            "whether the growth you see is expected cannot be told: one draw, and a theory that "
            'states no spread (theory="refined" does)'
        )
    sentences = [
        _growth(part, str(stack), str(quantity))
        for (stack, quantity), part in frame.groupby(["stack", "quantity"], sort=False)
    ]
    if beyond.empty and not judgement.expected:
        return (
            f"the growth you see is doubtful: {outside} of {len(judged)} points lie outside their "
            f"95 % band, where chance explains at most {allowed}, though none is more than "
            f"{CLEAR:g} standard deviations off; neighbouring layers move together, so measure "
            f"more draws; {'; '.join(sentences)}"
        )
    if beyond.empty:
        where = f"all {len(judged)} points lie in their 95 % band"
        if outside:
            where = (
                f"{outside} of {len(judged)} points lie outside their 95 % band, which chance "
                f"explains (up to {allowed}), and none is more than {CLEAR:g} standard deviations "
                "off"
            )
        return f"the growth you see is expected: {'; '.join(sentences)}; {where}"
    worst = [
        _worst(part, str(stack), str(quantity))
        for (stack, quantity), part in beyond.groupby(["stack", "quantity"], sort=False)
    ]
    return f"the growth you see is not expected: {'; '.join(worst)}; {'; '.join(sentences)}"


def _name(stack: str, quantity: str) -> str:
    return f"{'encoder ' if stack else ''}{NAMES[quantity]}"


def _growth(part: Any, stack: str, quantity: str) -> str:
    """From the first point to the last; a gradient travels the other way."""
    first, last = part.iloc[0], part.iloc[-1]
    way = "from input to output"
    if quantity.startswith("grad"):
        first, last, way = last, first, "from output to input"
    factors = [times(last[kind], first[kind]) for kind in ("measured", "predicted")]
    name = _name(stack, quantity)
    return f"{name} x {factors[0]:.3g} {way}, x {factors[1]:.3g} predicted"


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
        f"{_name(stack, quantity)} is out of its band at {where}, "
        f"{times(worst['measured'], worst['predicted']):.3g} times the prediction "
        f"({worst['deviations']:+.1f} standard deviations)"
    )
