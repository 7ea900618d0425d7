"""The variance of a block's output as one expression, composed of its components' laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.composition import Component
from ..engine.layout import Layout
from ..engine.state import Signal
from ..engine.trace import Point
from ..formulas.attention import ATTENTION
from ..formulas.law import Law
from ..formulas.named_activations import leaky_slope
from ..formulas.symbols import SYMBOLS
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.self_attention import SelfAttention
from ..transfer.elementary import Activation, Dropout, Linear
from ..transfer.gated import GatedLinear
from .block import average

TEX = {
    "cross_value": r"\sigma_{v,c}^2",
    "cross_output": r"\sigma_{o,c}^2",
    "target": r"\sigma_*^2",
    "stream": r"\sigma^2",
    "hidden_square": r"E f^2",
    "activation_drop_prob": "p_f",
    "inner": "h d_k",
}


INSIDE = (".heads", ".projection", ".dropout", ".scale")
"""Ends of the names of sites that only their own block reads."""


class Numbers:
    """Variances of a layer's points, averaged over tokens."""

    def __init__(self, points: list[Point], layout: Layout, memory: Signal | None) -> None:
        self.points, self.layout, self.memory = points, layout, memory

    def at(self, site: str) -> Point:
        return next(point for point in self.points if point.site == site)

    def before(self, site: str) -> Point:
        """What the component at a site reads: nothing inside another block, such as a parallel."""
        sites = [point.site for point in self.points]
        block = site.partition(".")[0]
        return next(
            point
            for point in reversed(self.points[: sites.index(site)])
            if point.site.partition(".")[0] == block or not point.site.endswith(INSIDE)
        )

    def square(self, signal: Signal) -> float:
        """Second moment."""
        return average(self.layout, signal.second_moment().diagonal)

    def variance(self, point: Point) -> float:
        return average(self.layout, point.signal.kernel.diagonal)


class Composed:
    """The variance of a block's output as one expression, part by part."""

    def __init__(self, numbers: Numbers, block: str) -> None:
        self.numbers, self.block = numbers, block
        self.values: dict[Any, float] = {}
        self.names: dict[Any, str] = {}
        self.sources: list[str] = []
        self.variance: Any = None
        self.mean: Any = 0
        self.dropped: list[Any] = []
        self.done = False

    def symbol(self, name: str, value: float, tex: str = "") -> Any:
        """The symbol of a name, its number noted."""
        import sympy

        found = SYMBOLS[name].sympy if name in SYMBOLS else sympy.Symbol(name, positive=True)
        self.values[found] = float(value)
        self.names[found] = tex or TEX.get(name) or SYMBOLS[name].tex
        return found

    def matrix(self, name: str) -> Any:
        return next(symbol for symbol in self.values if symbol.name == name)

    def knows(self, name: str) -> bool:
        return any(symbol.name == name for symbol in self.variance.free_symbols)

    def through(self, part: Component) -> None:
        """Compose one more part's laws; those before the first matrix set what it reads."""
        if self.done:
            return
        self.done = part.label == f"{self.block}.dropout"
        if isinstance(part, SelfAttention | CrossAttention):
            self._attention(part)
        elif isinstance(part, GatedLinear):
            self._hidden(part.label)
        elif isinstance(part, Linear):
            self._linear(part)
        elif self.variance is not None and isinstance(part, Activation):
            self._activation(part)
        elif self.variance is not None and isinstance(part, Dropout):
            own = "drop_prob" if self.done else "activation_drop_prob"
            p = self.symbol(own, part.parameters["drop_prob"])
            self.dropped.append(p)
            self._law(part.laws.law("variance"), {"drop_prob": p})

    def _law(self, law: Law, bound: Mapping[str, Any]) -> None:
        moments = {"x_variance": self.variance, "x_mean": self.mean, **bound}
        pairs = {SYMBOLS[name].sympy: value for name, value in moments.items()}
        self.variance = law.expr.subs(pairs, simultaneous=True)
        self.sources.append(str(law.source))

    def _enter(self, label: str) -> None:
        self.variance = self.symbol(
            "x_variance", self.numbers.square(self.numbers.before(label).signal)
        )

    def _attention(self, part: Any) -> None:
        numbers, cross = self.numbers, isinstance(part, CrossAttention)
        heads = numbers.at(part.label)
        width = part.memory_width if cross else part.d_model
        read = numbers.memory if cross else numbers.before(part.label).signal
        assert read is not None
        entering = numbers.square(read)
        dropped = part.drop_prob / (1 - part.drop_prob)
        assert heads.signal.diagnostics is not None
        square = float(np.mean(heads.signal.kernel.average(heads.signal.diagnostics["square_sum"])))
        constant = part.value_bias * (1 + dropped * square)
        share = (numbers.variance(heads) - constant) / (width * part.value * entering)
        bound = {
            "d_model": self.symbol("d_model", width),
            "value": self.symbol("cross_value" if cross else "value", part.value),
            "average_variance": self.symbol("average_variance", share),
        }
        self.variance = self.symbol("x_variance", entering)
        self._law(ATTENTION.law("variance"), bound)
        if constant:
            self.variance = self.variance + self.symbol("value_bias", constant, r"\sigma_{b,v}^2")

    def _hidden(self, label: str) -> None:
        square = self.numbers.square(self.numbers.at(label).signal)
        self.variance, self.mean = self.symbol("hidden_square", square), 0

    def _linear(self, part: Linear) -> None:
        if self.variance is None:
            self._enter(part.label)
        fans = {"ffn.in": "d_model", "ffn.out": "d_ff"}
        parameters = part.parameters
        bound = {
            "fan_in": self.symbol(fans.get(part.label, "inner"), parameters["fan_in"]),
            "weight_variance": self.symbol(part.weight, parameters["weight_variance"]),
        }
        if parameters.get("bias_variance"):
            name = f"{part.weight}_bias"
            tex = rf"\sigma_{{b,\mathrm{{{part.weight.replace('_', ' ')}}}}}^2"
            bound["bias_variance"] = self.symbol(name, parameters["bias_variance"], tex)
        elif "bias_variance" in parameters:
            bound["bias_variance"] = 0
        self._law(part.laws.law("variance"), bound)
        self.mean = 0

    def _activation(self, part: Activation) -> None:
        name = part.laws.name
        if name not in ("relu", "identity") and leaky_slope(name) is None:
            self.sources.clear()
            self._hidden(part.label)
            return
        mean = part.laws.law("mean").expr.subs(SYMBOLS["x_variance"].sympy, self.variance)
        self._law(part.laws.law("variance"), {})
        self.mean = mean
