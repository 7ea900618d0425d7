"""The laws of a block solved for a weight variance, with the numbers of one layer.

See docs/theory/inversion.md, In symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.composition import Component, Residual
from ..engine.layout import SequenceLayout
from ..engine.state import Signal
from ..engine.trace import Point
from ..errors import DomainError, domain_error
from ..formulas.activation import leaky_slope
from ..formulas.attention import ATTENTION
from ..formulas.checks import check_count
from ..formulas.law import Law
from ..formulas.symbols import SYMBOLS
from ..transfer.architecture import declare_layer
from .block import MATRICES, blocks_of
from .entering import entered
from .layerwise import LAYERWISE

if TYPE_CHECKING:
    import sympy

    from .plan import Plan

# Solved for where it is free: behind everything that is not linear.
LAST = ("output", "cross_output", "ffn_out", "value", "cross_value", "ffn_in")


@dataclass(frozen=True)
class InversionStep:
    """One block's laws, composed and solved.

    Attributes:
        block: "attention", "cross" or "ffn".
        unknown: the matrix whose variance the laws are solved for.
        shared: the free matrices of the block, which have one factor in common.
        equation: the target and the composed laws, as sympy.
        solution: the unknown's variance.
        values: numbers of all other symbols at this layer.
        result: what the solution gives there.
        sources: of the laws.
        symbol_names: LaTeX of every symbol.
    """

    block: str
    unknown: str
    shared: tuple[str, ...]
    equation: sympy.Eq
    solution: sympy.Expr
    values: Mapping[str, float]
    result: float
    sources: tuple[str, ...]
    symbol_names: Mapping[Any, str]

    @property
    def latex(self) -> str:
        """The solution."""
        import sympy

        left = TEX.get(self.unknown) or SYMBOLS[self.unknown].tex
        right = sympy.latex(self.solution, symbol_names=dict(self.symbol_names))
        return f"{left} = {right}"

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {value:.6g}" for name, value in self.values.items())
        return (
            f"{self.block}: {self.equation.lhs} = {self.equation.rhs}\n"
            f"  {self.unknown} = {self.solution}\n"
            f"  = {self.result:.8g} with {numbers}\n"
            f"  one factor on {', '.join(self.shared)}; from {'; '.join(self.sources)}"
        )


@dataclass(frozen=True)
class Inversion:
    """How the weight variances of one layer follow from the target."""

    layer: int
    steps: tuple[InversionStep, ...]

    def latex(self) -> str:
        """The solutions as aligned LaTeX, each with its number."""
        lines = [
            step.latex.replace(" = ", " &= ", 1) + rf" = {step.result:.6g}" for step in self.steps
        ]
        return "\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}"

    def __str__(self) -> str:
        return "\n".join([f"Layer {self.layer}", *map(str, self.steps)])

    def _repr_latex_(self) -> str:
        return self.latex()


def invert(plan: Plan, layer: int) -> Inversion:
    """The laws of every block at one layer of a plan, solved for a weight variance.

    Raises:
        DomainError: a plan that was not solved block by block, or no such layer.
    """
    if plan.objective not in LAYERWISE:
        raise DomainError(
            f"{plan.objective} inverts no law by itself: only {' and '.join(LAYERWISE)} do"
        )
    check_count("layer", layer)
    if layer > plan.model.layers:
        raise domain_error("layer", layer, f"at most layers = {plan.model.layers}")
    stack, memory = entered(plan.model, plan.inputs)
    stack.forward()
    layout = stack.layout
    body = declare_layer(plan.model, "refined", layer, *layout.places).body
    found = [p for p in stack.trace.points if p.layer in (layer - 1, layer)]
    points = found[[p.site for p in found].index("stream") :] if layer > 1 else found
    numbers = Numbers(points, layout, memory)
    steps = []
    for node in body.residuals():
        for name, chain in blocks_of(node)[1]:
            matrices = tuple(matrix for matrix in MATRICES[name] if matrix in plan.free)
            if matrices:
                steps.append(_solved(plan, numbers, node, name, chain, matrices))
    return Inversion(layer, tuple(steps))


def _solved(
    plan: Plan,
    numbers: Numbers,
    node: Residual,
    name: str,
    chain: tuple[Component, ...],
    matrices: tuple[str, ...],
) -> InversionStep:
    import sympy

    laws = Composed(numbers, name)
    for part in chain:
        laws.through(part)
    last = next((matrix for matrix in LAST if matrix in matrices and laws.knows(matrix)), None)
    if last is None:
        raise DomainError(
            f"{', '.join(matrices)}: the laws before a product have no closed inverse"
        )
    wanted = laws.symbol("branch_variance", numbers.variance(numbers.at(f"{name}.dropout")))
    behind = [part for part in chain if part.label in (f"{name}.scale", "attention.scale")]
    if plan.objective == "stream_variance" and not behind and len(blocks_of(node)[1]) == 1:
        total = numbers.at(f"{name}.sum")
        skip = laws.symbol("skip_square", node.skip_scale**2)
        kept = laws.symbol("stream", numbers.variance(_entering(numbers, name)))
        scale = laws.symbol("branch_square", node.branch_scale**2)
        wanted = (laws.symbol("target", numbers.variance(total)) - skip * kept) / scale
        del laws.values[SYMBOLS["branch_variance"].sympy]
    equation = sympy.Eq(wanted, laws.variance)
    unknown = laws.matrix(last)
    # The composed laws are affine in every matrix that is not before a product or a curve. What
    # dropout keeps stands for itself meanwhile, or it would come out as -(p - 1).
    kept = {s: 1 - sympy.Symbol(f"{s.name}_kept", positive=True) for s in laws.dropped}
    variance = laws.variance.subs(kept)
    solution = (wanted - variance.subs(unknown, 0)) / sympy.simplify(variance.diff(unknown))
    solution = solution.subs({1 - value: 1 - symbol for symbol, value in kept.items()})
    values = {symbol: v for symbol, v in laws.values.items() if symbol in solution.free_symbols}
    return InversionStep(
        name,
        last,
        matrices,
        equation,
        solution,
        {symbol.name: value for symbol, value in values.items()},
        float(solution.subs(values)),
        tuple(dict.fromkeys(laws.sources)),
        laws.names,
    )


def _entering(numbers: Numbers, name: str) -> Point:
    """The stream at a block's residual addition: the last point of it before the block."""
    sites = [point.site for point in numbers.points]
    first = next(i for i, site in enumerate(sites) if site.partition(".")[0] == name)
    return next(p for p in reversed(numbers.points[:first]) if p.site.endswith(("stream", ".sum")))


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

    def __init__(self, points: list[Point], layout: SequenceLayout, memory: Signal | None) -> None:
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
        return float(self.layout.average(signal.second_moment().diagonal))

    def variance(self, point: Point) -> float:
        return float(self.layout.average(point.signal.kernel.diagonal))


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

    def through(self, part: Any) -> None:
        """Compose one more part's laws; those before the first matrix set what it reads."""
        if self.done:
            return
        self.done = part.label == f"{self.block}.dropout"
        if part.mixes_tokens and part.matrices:
            self._attention(part)
        elif part.hidden is not None and part.matrices:
            self._hidden(part.label)
        elif part.matrices:
            self._linear(part)
        elif self.variance is not None and part.hidden is not None:
            self._activation(part)
        elif self.variance is not None and part.masks:
            name = "drop_prob" if self.done else "activation_drop_prob"
            p = self.symbol(name, part.parameters["drop_prob"])
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
        numbers, cross = self.numbers, part.reads is not None
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

    def _linear(self, part: Any) -> None:
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

    def _activation(self, part: Any) -> None:
        name = part.laws.name
        if name not in ("relu", "identity") and leaky_slope(name) is None:
            self.sources.clear()
            self._hidden(part.label)
            return
        mean = part.laws.law("mean").expr.subs(SYMBOLS["x_variance"].sympy, self.variance)
        self._law(part.laws.law("variance"), {})
        self.mean = mean
