"""`explain`: one layer's recursion, law by law, with the numbers that went in and came out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.composition import Addition, Component
from ..engine.layout import SequenceLayout
from ..engine.state import Kernel, observed
from ..engine.trace import Record, Run
from ..errors import DomainError, domain_error
from ..files import as_frame
from ..formulas.activation import activation_laws
from ..formulas.checks import check_count
from ..formulas.gated import gated
from ..formulas.law import Law, Theory
from ..formulas.linear import CORRELATED_RESIDUAL
from ..formulas.registry import component, components
from ..model.transformer import Transformer
from .predict import predict

if TYPE_CHECKING:
    import pandas as pd

_INDENTED: dict[str, Any] = {
    "initial_indent": " " * 6,
    "subsequent_indent": " " * 8,
    "break_long_words": False,
    "break_on_hyphens": False,
}

Formula = Callable[..., Any]

__all__ = ["Explanation", "Step", "explain"]

KERNEL = "attention kernel"
GAIN = "gain"
LAW = "law"
DIRECTIONS = "directions"
EXPERTS = "experts"


@dataclass(frozen=True)
class Step:
    """One evaluation of a law, or of a component without a closed law.

    Attributes:
        site, way: site in the network, and "forward" or "backward".
        component, quantity: names of the law, for `moments.component(...).law(...)`.
        law: the formula; None for an "attention kernel", whose moments are sums over all pairs of
            tokens, a norm's "gain", a user's block's "law", "directions" that a gradient lacks
            (`directions`) and "experts" behind a router.
        values, result: values of its symbols and its value, averaged over tokens.
    """

    site: str
    way: str
    component: str
    quantity: str
    law: Law | None
    values: dict[str, float]
    result: float

    @property
    def source(self) -> str:
        if self.component == GAIN:
            return "definition, times the mean square of the gain"
        if self.component == LAW:
            return "a block's own law of second moments"
        if self.component == DIRECTIONS:
            return "derived here, a gradient without its component along the signal, order 1/width"
        if self.component == EXPERTS:
            return "derived here, one expert's law times what the router makes of two tokens"
        if self.law is None:
            return "derived here, softmax of Gaussian logits over an arbitrary token kernel"
        return f"{self.law.source} [{self.law.status}]"


class Log:
    """Records every law of a layer with site, direction and registered name (`names_of_laws`)."""

    def __init__(
        self, layout: SequenceLayout, names: dict[Formula, tuple[str, str]], kept: dict[Any, Any]
    ) -> None:
        self.layout, self.names, self.kept = layout, names, kept
        self.steps: list[Step] = []
        self._where = ("", "")

    def forward(self, record: Record) -> None:
        """Evaluate the leaves again, in the order of the forward pass."""
        for child in record.children:
            self.forward(child)
        component = record.component
        if not component.children:
            with self._at(component.label, "forward") as steps:
                run = Run(record.memory, record.layer, kept=dict(self.kept))
                output = component.propagate(record.input, run).output
            self._complete(component, "forward", output.kernel, steps)
        result = component.addition(record)
        if result is not None:
            kept, added = result.kept.input.kernel, result.added.output.kernel
            self._sum(component.label, result, "forward", kept, added, None)

    def backward(self, record: Record) -> None:
        """Evaluate the leaves again, in the order of the backward pass."""
        component = record.component
        for child in component.in_backward_order(record.children):
            self.backward(child)
        if not component.children:
            with self._at(component.label, "backward") as steps:
                grad_in = record.backward(record.grad_out).grad_in
            self._complete(component, "backward", grad_in.kernel, steps)
        result = component.addition(record)
        if result is not None:
            # The branch's gradient already contains branch_scale^2, which the law multiplies.
            factor = 1 / result.added_scale if result.added_scale else 0.0
            kept = result.kept.grad_out.kernel
            added = result.added.grad_in.kernel.scaled(factor)
            total = record.grad_in.kernel
            self._sum(component.label, result, "backward", kept, added, total)

    @contextmanager
    def _at(self, site: str, way: str) -> Iterator[list[Step]]:
        """Record the laws evaluated inside the context; yields their steps."""
        self._where = (site, way)
        count = len(self.steps)
        added: list[Step] = []
        with observed(self._note):
            yield added
        added += self.steps[count:]

    def _note(self, law: Law, values: Any, result: Any) -> None:
        average = self._of_pairs if np.ndim(result) == 2 else self._of_tokens
        picked = {name: average(values[name]) for name in law.arguments}
        names = self.names.get(law.formula, ("", ""))
        self.steps.append(Step(*self._where, *names, law, picked, average(result)))

    def _of_tokens(self, value: Any) -> float:
        return float(self.layout.average(np.ravel(value) if np.ndim(value) else value))

    def _of_pairs(self, value: Any) -> float:
        """Average over pairs of different tokens of a sequence."""
        if np.ndim(value) == 0:
            return float(value)
        count = max(np.shape(value))
        matrix, classes = np.broadcast_to(value, (count, count)), self.layout.classes
        if classes is not None:
            return float(Kernel(np.diagonal(matrix), matrix, classes).mean_off_diagonal())
        return float(self.layout.token_average(Kernel.of_matrix(matrix))[1])

    def _complete(self, leaf: Component, way: str, kernel: Kernel, steps: list[Step]) -> None:
        """Add steps for the output's moments if no law of the component had that result."""
        prefix = "" if way == "forward" else "grad_"
        component = GAIN if hasattr(leaf, "gain") else DIRECTIONS
        if hasattr(leaf, "law"):
            component = LAW
        elif leaf.mixes_tokens:
            component = KERNEL
        if hasattr(leaf, "router"):
            component = EXPERTS
        for quantity, value in zip(
            ("variance", "covariance"), self.layout.token_average(kernel), strict=True
        ):
            name, actual = prefix + quantity, float(value)
            results = [step.result for step in steps if step.quantity == name]
            if not results or abs(results[-1] - actual) > 1e-9 * max(abs(actual), 1e-12):
                self.steps.append(Step(leaf.label, way, component, name, None, {}, actual))

    def _sum(
        self,
        site: str,
        of: Addition,
        way: str,
        kept: Kernel,
        added: Kernel,
        total: Kernel | None,
    ) -> None:
        """Add the step of a residual sum of the kernels `kept` and `added`."""
        one, two = (float(self.layout.token_average(k)[0]) for k in (kept, added))
        skip, branch = float(of.kept_scale), float(of.added_scale)
        prefix = "" if way == "forward" else "grad_"
        # Uncorrelated at initialisation, except for corrections of order 1/width to gradients
        # (`directions`).
        cross = 2 * np.sqrt(skip * branch * one * two)
        overlap = 0.0
        if total is not None and cross:
            whole = float(self.layout.token_average(total)[0])
            overlap = float((whole - skip * one - branch * two) / cross)
        values = {
            "skip_square": skip,
            "branch_square": branch,
            "x_variance" if way == "forward" else "grad_variance": one,
            f"{prefix}branch_variance": two,
            f"{prefix}branch_correlation": overlap,
        }
        law = CORRELATED_RESIDUAL.law(f"{prefix}variance")
        names = (CORRELATED_RESIDUAL.name, f"{prefix}variance")
        self.steps.append(Step(site, way, *names, law, values, float(law.of(values))))


def names_of_laws(model: Transformer) -> dict[Formula, tuple[str, str]]:
    """Component and quantity of each registered law, by its formula."""
    result: dict[Formula, tuple[str, str]] = {}
    for name in components():
        for theory in ("simplified", "published", "refined"):
            for quantity, law in component(name).under(theory).items():
                result.setdefault(law.formula, (name, quantity))
    if model.gated:
        product = gated(activation_laws(model.activation))
        result |= {law.formula: (product.name, q) for q, law in product.under("refined").items()}
    return result


@dataclass(frozen=True)
class Explanation:
    """The laws of one layer of a `model`, residual sums included, in the order of evaluation:
    `steps` with their numbers; `layer` counts from 1."""

    model: Transformer
    layer: int
    steps: tuple[Step, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per step: site, way, component, quantity, formula, values, result, source."""
        rows = [
            {
                "site": step.site,
                "way": step.way,
                "component": step.component,
                "quantity": step.quantity,
                "formula": "" if step.law is None else str(step.law.expr),
                "values": ", ".join(f"{k} = {v:.6g}" for k, v in step.values.items()),
                "result": step.result,
                "status": "" if step.law is None else step.law.status,
                "source": step.source if step.law is None else str(step.law.source),
            }
            for step in self.steps
        ]
        return as_frame(rows)

    def latex(self) -> str:
        """The laws as aligned LaTeX, each with its number."""
        lines = [
            rf"{step.law.latex()} &= {step.result:.6g} && "
            rf"\text{{{step.site}, {step.quantity.replace('_', ' ')}}}"
            for step in self.steps
            if step.law is not None
        ]
        return "\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}"

    def __str__(self) -> str:
        lines = [f"Layer {self.layer} of {self.model.layers}"]
        for way in ("forward", "backward"):
            lines.append(f"\n{way}")
            site = ""
            for step in (s for s in self.steps if s.way == way):
                if step.site != site:
                    site = step.site
                    lines.append(f"  {site} ({step.component})")
                values = ", ".join(f"{k} {v:.4g}" for k, v in step.values.items())
                inputs = f"   from {values}" if values else ""
                lines.append(f"    {step.quantity} = {step.result:.5g}{inputs}")
                if step.law is not None:
                    formula = str(step.law.expr)
                    if "Integral(" in formula:
                        formula = "a mean over Gaussians, by quadrature (as LaTeX: --latex)"
                    lines += textwrap.wrap(f"= {formula}", 100, **_INDENTED)
                lines.append(f"      {step.source}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Explanation(layer {self.layer} of {self.model.layers}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        frame: Any = self.to_frame()
        return str(frame._repr_html_())


def explain(
    model: Transformer, layer: int, *, theory: Theory = "refined", **inputs: Any
) -> Explanation:
    """The recursion at one layer: every law with its numbers and its source.

    docs/theory/index.md relates the laws to each other.

    Args:
        model: the declaration.
        layer: its number, from 1.
        theory: as in `predict`.
        inputs: arguments of `predict`, for one configuration.

    Raises:
        DomainError: no such layer, several configurations at once, or as `predict`.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    check_count("layer", layer)
    if layer > model.layers:
        raise domain_error("layer", layer, f"at most layers = {model.layers}")
    prediction = predict(model, theory=theory, **inputs)
    if prediction.variance.ndim > 1:
        raise DomainError("explain takes one configuration: pass numbers, not arrays")
    if prediction.model.shared_layers:
        prediction.require_unshared("one layer's recursion")
    log = Log(prediction.layout, names_of_laws(model), prediction.trace.kept)
    record = prediction.trace.layers[layer - 1]
    log.forward(record)
    log.backward(record)
    return Explanation(model, layer, tuple(log.steps))
