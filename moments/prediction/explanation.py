"""`explain`: one layer's recursion, law by law, with the numbers that went in and came out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DomainError, domain_error
from ..formulas.checks import check_count
from ..formulas.law import Theory
from ..model.transformer import Transformer
from .predict import predict
from .watched import Log, Step, names_of_laws

if TYPE_CHECKING:
    import pandas as pd

_INDENTED: dict[str, Any] = {
    "initial_indent": " " * 6,
    "subsequent_indent": " " * 8,
    "break_long_words": False,
    "break_on_hyphens": False,
}

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The laws of one layer in the order in which they were used.

    Attributes:
        model: the declaration.
        layer: its number.
        steps: every law that was evaluated, residual additions included.
    """

    model: Transformer
    layer: int
    steps: tuple[Step, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per step: site, way, component, quantity, formula, values, result, source."""
        import pandas as pd

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
        return pd.DataFrame(rows)

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
                given = f"   from {values}" if values else ""
                lines.append(f"    {step.quantity} = {step.result:.5g}{given}")
                if step.law is not None:
                    formula = f"= {step.law.expr}"
                    lines += textwrap.wrap(formula, 100, **_INDENTED)
                lines.append(f"      {step.source}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Explanation(layer {self.layer} of {self.model.layers}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        html: str = self.to_frame()._repr_html_()  # type: ignore[operator]
        return html


def explain(
    model: Transformer, layer: int, *, theory: Theory = "refined", **inputs: Any
) -> Explanation:
    """The recursion at one layer: every law, the numbers in it, and where it comes from.

    Args:
        model: the declaration.
        layer: its number, from 1.
        theory: whose laws.
        inputs: what `predict` takes, for one configuration.

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
    log = Log(prediction.layout, names_of_laws(model))
    record = prediction.trace.layers[layer - 1]
    log.forward(record)
    log.backward(record)
    return Explanation(model, layer, tuple(log.steps))
