"""`explain`: one layer's recursion, law by law, with the numbers that went in and came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import parts
from .architecture import declare
from .checks import check_count
from .errors import domain_error
from .law import Law, Theory
from .passes import predict
from .propagate import Point, Trace, forward
from .transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Step:
    """One law at work.

    Attributes:
        site: of the network.
        way: "forward" or "backward".
        component, quantity: names under which `moments.component(...).law(...)` finds the law.
        law: the formula with its source.
        values: what its symbols were, averaged over tokens where resolved by token.
        result: what it gave.
    """

    site: str
    way: str
    component: str
    quantity: str
    law: Law
    values: dict[str, float]
    result: float


@dataclass(frozen=True)
class Explanation:
    """The laws of one layer in the order in which they were used, and the stream around it.

    Attributes:
        model: the declaration.
        layer: its number.
        steps: every law that was evaluated.
        sums: (site, way, text): what residual additions did.
    """

    model: Transformer
    layer: int
    steps: tuple[Step, ...]
    sums: tuple[tuple[str, str, str], ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per law: site, way, component, quantity, formula, values, result, source."""
        import pandas as pd

        rows = [
            {
                "site": step.site,
                "way": step.way,
                "component": step.component,
                "quantity": step.quantity,
                "formula": str(step.law.expr),
                "values": ", ".join(f"{k} = {v:.6g}" for k, v in step.values.items()),
                "result": step.result,
                "status": step.law.status,
                "source": str(step.law.source),
            }
            for step in self.steps
        ]
        return pd.DataFrame(rows)

    def latex(self) -> str:
        """The laws as aligned LaTeX, each with its number."""
        lines = [
            rf"{step.law.latex()} &= {step.result:.6g} && \text{{{step.site}, {step.quantity}}}"
            for step in self.steps
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
                    lines.append(f"  {site}")
                values = ", ".join(f"{k} {v:.4g}" for k, v in step.values.items())
                lines.append(f"    {step.quantity} = {step.result:.5g}   from {values}")
                lines.append(f"      {step.law.source} [{step.law.status}]")
            lines += [f"  {site}\n    {text}" for site, w, text in self.sums if w == way]
        return "\n".join(lines)

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
        inputs: what `predict` takes.

    Raises:
        DomainError: no such layer, or as `predict`.
    """
    check_count("layer", layer)
    if layer > model.layers:
        raise domain_error("layer", layer, f"at most layers = {model.layers}")
    prediction = predict(model, theory=theory, **inputs)
    stream = prediction.trace.stream()
    entering, leaving = stream[layer - 1], stream[layer]
    assert leaving.gradient is not None
    layout = prediction.layout
    body = declare(model, theory, layout.padding, layout.sequences).parts[layer - 1]
    trace = Trace(memory=prediction.trace.memory)
    names = _names()
    with _recording(trace) as records:
        _, back = forward(body, entering.signal, trace)
        back(leaving.gradient)
    steps = tuple(
        Step(site, way, *names.get(id(law), ("", "")), law, values, result)
        for site, way, law, values, result in records
    )
    return Explanation(model, layer, steps, _sums(trace, layout))


@contextmanager
def _recording(trace: Trace) -> Iterator[list[tuple[str, str, Law, dict[str, float], float]]]:
    """Collect every law evaluated while `trace` is written."""
    records: list[tuple[Any, str, Law, dict[str, float], float]] = []
    seen: list[Point] = []

    def note(law: Law, values: Any, result: Any) -> None:
        picked = {name: _mean(values[name]) for name in law.arguments}
        received = [p for p in trace.points if p.gradient is not None]
        if not received:
            # A leaf's site is recorded after its laws were evaluated.
            records.append((len(trace.points), "forward", law, picked, _mean(result)))
            return
        seen.extend(p for p in reversed(received) if not any(p is s for s in seen))
        records.append((seen[-1].site, "backward", law, picked, _mean(result)))

    parts.observer = note
    try:
        yield records
    finally:
        parts.observer = None
        for index, (site, *rest) in enumerate(records):
            if isinstance(site, int):
                site = trace.points[min(site, len(trace.points) - 1)].site
            records[index] = (site, *rest)  # type: ignore[assignment]


def _mean(value: Any) -> float:
    return float(np.mean(value))


def _names() -> dict[int, tuple[str, str]]:
    """Where the registry has each law."""
    from .registry import component, components

    found = {}
    for name in components():
        for theory in ("simplified", "published", "refined"):
            for quantity, law in component(name).under(theory).items():  # type: ignore[arg-type]
                found[id(law)] = (name, quantity)
    return found


def _sums(trace: Trace, layout: Any) -> tuple[tuple[str, str, str], ...]:
    """What every residual sum came to."""
    rows = []
    for point in trace.points:
        if not point.site.endswith((".sum", "stream")):
            continue
        _, variance, correlation, grad, grad_correlation = layout.moments(point)
        rows.append(
            (point.site, "forward", f"variance {variance:.5g}, correlation {correlation:.4g}")
        )
        rows.append(
            (point.site, "backward", f"variance {grad:.5g}, correlation {grad_correlation:.4g}")
        )
    return tuple(rows)
