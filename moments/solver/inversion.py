"""The laws of a block solved for a weight variance, with the numbers of one layer.

See docs/theory/inversion.md, In symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.composition import Component, Residual
from ..engine.trace import Point
from ..errors import DomainError, domain_error
from ..formulas.checks import check_count
from ..formulas.symbols import SYMBOLS
from ..transfer.architecture import declare
from .block import MATRICES, flat
from .composed import TEX, Composed, Numbers
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
    body = declare(plan.model, "refined", layout.padding, layout.sequences).parts[layer - 1].body  # type: ignore[attr-defined]
    found = [p for p in stack.trace.points if p.layer in (layer - 1, layer)]
    points = found[[p.site for p in found].index("stream") :] if layer > 1 else found
    numbers = Numbers(points, layout, memory)
    steps = []
    for node in body.residuals():
        for name, chain in _chains(node):
            own = tuple(matrix for matrix in MATRICES[name] if matrix in plan.free)
            if own:
                steps.append(_solved(plan, numbers, node, name, chain, own))
    return Inversion(layer, tuple(steps))


def _chains(node: Residual) -> list[tuple[str, tuple[Component, ...]]]:
    parts = flat(node.branch)
    if not parts[-1].splits:
        return [(node.label.partition(".")[0], parts)]
    return [
        (next(n for n in MATRICES if any(p.label == f"{n}.dropout" for p in flat(b))), flat(b))
        for b in parts[-1].children
    ]


def _solved(
    plan: Plan,
    numbers: Numbers,
    node: Residual,
    name: str,
    chain: tuple[Component, ...],
    own: tuple[str, ...],
) -> InversionStep:
    import sympy

    laws = Composed(numbers, name)
    for part in chain:
        laws.through(part)
    last = next((matrix for matrix in LAST if matrix in own and laws.knows(matrix)), None)
    if last is None:
        raise DomainError(f"{', '.join(own)}: the laws before a product have no closed inverse")
    wanted = laws.symbol("branch_variance", numbers.variance(numbers.at(f"{name}.dropout")))
    behind = [part for part in chain if part.label in (f"{name}.scale", "attention.scale")]
    if plan.objective == "stream_variance" and not behind and len(_chains(node)) == 1:
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
        own,
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
