"""`moments.report`: everything about one model as a self-contained HTML page; its pictures are
inline SVG that follow the reader's light or dark theme."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, without_warnings
from ..files import replacing
from ..formulas.references import bibtex
from ..model.summary import in_short, rows
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..prediction.draws import QUANTITIES
from ..prediction.explanation import Explanation, explain
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..scheme.registry import scheme as scheme_of
from ..scheme.registry import schemes as every_scheme
from .html import document, picture, render
from .plot import plot_curves, plot_stream, shown
from .report import TITLES, spaced
from .scheme_table import COLUMNS as SCHEME_COLUMNS
from .scheme_table import SchemeComparison, compare_schemes
from .verdict import growth

SHOWN_LAYERS = 400
"""Most rows of a table by layer; deeper models show every k-th layer."""


@dataclass(frozen=True, eq=False)
class Report:
    """Page about one model at initialisation: its prediction, the published schemes applied to it
    (None: not requested), and the laws of its first layer (None if `moments.explain` refuses the
    model)."""

    name: str
    prediction: Prediction
    schemes: SchemeComparison | None
    explanation: Explanation | None

    def to_html(self) -> str:
        """The whole page."""
        body = render("report.html", **_values(self))
        return document(f"{self.name} at initialisation", body)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page completely or not at all; DomainError if `path` is not .html."""
        check_html(path)
        with replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
            file.write(self.to_html())

    def _repr_html_(self) -> str:
        source = escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:42em;border:0"></iframe>'

    def __repr__(self) -> str:
        count = 0 if self.schemes is None else len(self.schemes.predictions)
        return f"Report({self.name}: {growth(self.prediction)}; {count} schemes)"


def check_html(path: str | os.PathLike[str]) -> None:
    """Raise a DomainError for a file name that does not end in .html or .htm."""
    if not os.fspath(path).lower().endswith((".html", ".htm")):
        raise domain_error("the page", os.fspath(path), "a file name that ends in .html")


def report(
    model: Transformer,
    *,
    name: str | None = None,
    schemes: bool | Sequence[str] = True,
    step: Callable[[str], None] | None = None,
    **inputs: Any,
) -> Report:
    """One model as a page: declaration, growth, gradients, loss, schemes, laws, citations.

    Args:
        model: the declaration.
        name: for titles; None: the model's own name, if it has one.
        schemes: whether to compare all published schemes, or the names of some.
        step: called with the name of every scheme before it is predicted.
        inputs: keyword arguments of `predict`, for one configuration.

    Raises:
        DomainError: as in `predict`, or for several configurations at once.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    names = [s.name for s in every_scheme()] if isinstance(schemes, bool) else list(schemes)
    for one in names:
        scheme_of(one)  # before anything is predicted
    plain = {key: value for key, value in inputs.items() if key != "progress"}
    with without_warnings():  # the page shows them
        prediction = predict(model, **inputs)
        if prediction.variance.ndim > 1:
            raise DomainError("report takes one configuration: pass numbers, not arrays")
        try:
            explanation = explain(model, 1, **plain)
        except DomainError:
            explanation = None
        compared = None
        if schemes is not False and names:
            compared = compare_schemes(model, names, step=step, **plain)
    title = name or model.name or "the model"
    return Report(title, prediction, compared, explanation)


# --- the page ------------------------------------------------------------------------------------


def _values(report: Report) -> dict[str, Any]:
    """Values for templates/report.html."""
    from .. import __version__

    prediction, model = report.prediction, report.prediction.model
    words, theory = growth(prediction), prediction.theory
    formulas = "" if theory == "refined" else f", {theory} formulas"
    laws, citations = _laws(report)
    stream = {TITLES[name]: getattr(prediction, name) for name in QUANTITIES}
    if prediction.states_draws:
        last = stream.popitem()
        stream["gradient of one draw, typical"] = prediction.grad_variance_typical
        stream |= [last]
    return {
        "name": report.name,
        "about": f"{in_short(model)}{formulas}; moments {__version__}",
        "verdict": words[:1].upper() + words[1:],
        "warnings": prediction.warnings,
        "declared": rows(model),
        "gradients_of": "those of the model's own loss"
        if prediction.loss is not None
        else f"relative to a variance of {shown(float(prediction.grad_variance[-1]))} at the last "
        "layer: no loss is declared",
        "stream_picture": picture(plot_stream(prediction)),
        "stream": _by_layer(stream, 0),
        "weights": _weights(prediction),
        "positions": _positions(prediction),
        "loss": _loss(prediction),
        "schemes": _schemes(report),
        "laws": laws,
        "citations": citations,
        "stored": json.dumps(model.to_dict(), indent=1, allow_nan=False),
    }


def _by_layer(columns: Mapping[str, np.ndarray], first: int) -> dict[str, Any]:
    """Table with a row per layer, or per k-th layer of deep models."""
    count = len(next(iter(columns.values())))
    kept = sorted({*range(0, count, -(-count // SHOWN_LAYERS)), count - 1})
    cells = [
        [str(first + n), *(shown(float(column[n])) for column in columns.values())] for n in kept
    ]
    return {"heads": ["layer", *columns], "cells": cells}


def _weights(prediction: Prediction) -> dict[str, Any] | None:
    """Squared gradient norms of the weights; None if the theory does not give them."""
    frame = prediction.weight_gradients()
    inner = frame[(frame.layer > 0) & (frame.layer <= prediction.model.layers)]
    if inner.empty:
        return None
    square = inner.pivot_table(index="layer", columns="weight", values="squared_norm", sort=False)
    matrices = [name for name in MATRICES if name in square]
    blocks: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for name in matrices:
        block = "feed-forward block" if name.startswith(("ffn", "gate")) else "attention"
        line = (square.index.to_numpy(), square[name].to_numpy())
        blocks.setdefault(f"Squared gradient norm, {block}", {})[spaced(name)] = line
    names = [*matrices, *(name for name in square.columns if name not in matrices)]
    outer = frame[(frame.layer == 0) | (frame.layer > prediction.model.layers)]
    one, every = prediction.sequences
    return {
        "picture": picture(plot_curves(blocks, "layer")) if blocks else "",
        "inner": _by_layer({spaced(name): square[name].to_numpy() for name in names}, 1),
        "outer": [(str(r["weight"]), shown(r["squared_norm"])) for r in outer.to_dict("records")],
        "of": f", of {one} of {every} sequences" if one < every else "",
    }


def _positions(prediction: Prediction) -> str:
    """Picture of profiles over positions; "" if tokens are exchangeable."""
    signal, gradient = prediction.token_variance, prediction.token_grad_variance
    if signal is None or gradient is None or signal.shape[-1] < 3:
        return ""
    layers, places = prediction.model.layers, np.arange(1, signal.shape[-1] + 1)
    kept = np.unique(np.rint(np.linspace(0, places.size - 1, 200)).astype(int))
    few = sorted({0, layers // 2, layers})
    panels = {
        f"{title} variance by position": {
            f"layer {n}": (places[kept], values[n][kept]) for n in few
        }
        for title, values in (("Signal", signal), ("Gradient", gradient))
    }
    return picture(plot_curves(panels, "position in the sequence"))


def _loss(prediction: Prediction) -> str:
    if prediction.loss is None:
        return ""
    head = prediction.model.head
    count = head.choices(prediction.model.embedding)
    what = "labels" if head.loss == "classification" else "words"
    return (
        f"Loss {float(prediction.loss):.4g} ± {float(prediction.loss_stderr):.2g} (one draw of the "
        f"weights); mean square of the logits {shown(float(prediction.logit_variance or 0.0))}. "
        f"Guessing uniformly among {count} {what} has a loss of {np.log(count):.4g}."
    )


def _schemes(report: Report) -> dict[str, Any] | None:
    result = report.schemes
    if result is None:
        return None
    every = SchemeComparison(
        result.model, {"as it is": report.prediction, **result.predictions}, {}
    )
    sets = {scheme.name: ", ".join(scheme.sets) for scheme in every_scheme()}
    heads = ["scheme", "norm", "variance, last over first", "gradient, first over last"]
    heads += ["last token correlation", "sensitivity", "fields it sets"]
    cells = []
    for r in every.to_frame().to_dict("records"):
        numbers = [shown(float(r[column])) for column in SCHEME_COLUMNS[2:]]
        fields = sets.get(r["scheme"], "").replace("_", " ")
        cells.append([r["scheme"], r["norm"], *numbers, fields])
    table = {"heads": heads, "cells": cells, "text": (0, 1, 6), "marked": 0}
    return {"table": table, "left_out": list(result.left_out.items())}


def _laws(report: Report) -> tuple[list[tuple[str, str, str, str]], str]:
    """Component, quantity, status and source of every law in layer 1, and their BibTeX."""
    applied = () if report.schemes is None else report.schemes.predictions
    sources = [str(scheme.source) for scheme in every_scheme() if scheme.name in applied]
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for step in () if report.explanation is None else report.explanation.steps:
        status = "" if step.law is None else step.law.status
        source = step.source if step.law is None else str(step.law.source)
        seen.setdefault((step.component, step.quantity), (status, source))
        sources.append(source)
    laws = [(part, name.replace("_", " "), *about) for (part, name), about in sorted(seen.items())]
    return laws, bibtex(sources)
