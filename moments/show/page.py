"""`moments.report`: everything about one model as a single HTML page that needs nothing else; its
pictures are SVG inside it and take the reader's light or dark colours."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, without_warnings
from ..files import replacing
from ..formulas.references import bibtex
from ..model.summary import in_brief, rows
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..prediction.draws import QUANTITIES
from ..prediction.explanation import Explanation, explain
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..scheme.registry import scheme as scheme_of
from ..scheme.registry import schemes as every_scheme
from .chart import ROLES, STYLE, Chart, Curve, shown
from .expected import one_draw
from .html import details, document, table
from .report import TITLES
from .scheme_table import COLUMNS as SCHEME_COLUMNS
from .scheme_table import SchemeComparison, compare_schemes
from .verdict import growth

SHOWN_LAYERS = 400
"""Rows of a table by layer; of deeper models every so many."""


@dataclass(frozen=True, eq=False)
class Report:
    """What is known of one model at initialisation, as a page: its prediction, what the published
    schemes would make of it (None: not asked for), and the laws at work in its first layer (None
    where `moments.explain` does not follow the theory)."""

    name: str
    prediction: Prediction
    schemes: SchemeComparison | None
    explanation: Explanation | None

    def to_html(self) -> str:
        """The whole page."""
        return _page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, whole or not at all; DomainError where its name does not end in .html."""
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
    """Raise a DomainError for a file name that no browser takes for a page."""
    if not os.fspath(path).lower().endswith((".html", ".htm")):
        raise domain_error("report", os.fspath(path), "a file name that ends in .html")


def report(
    model: Transformer,
    *,
    name: str | None = None,
    schemes: bool | Sequence[str] = True,
    step: Callable[[str], None] | None = None,
    **inputs: Any,
) -> Report:
    """Everything about one model: what it is, growth, gradients, loss, schemes, laws, citations.

    Args:
        model: the declaration.
        name: for titles; None: the model's own, if it has one.
        schemes: whether to apply every published scheme to it too, or the names of some.
        step: is called with the name of every scheme before it is predicted.
        inputs: what `predict` takes, for one configuration.

    Raises:
        DomainError: as `predict`, or several configurations at once.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    names = [s.name for s in every_scheme()] if isinstance(schemes, bool) else list(schemes)
    for one in names:
        scheme_of(one)  # before anything is predicted
    plain = {key: value for key, value in inputs.items() if key != "progress"}
    with without_warnings():  # they stand on the page
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
    title = name or model.name or "a declared model"
    return Report(title, prediction, compared, explanation)


# --- the page ------------------------------------------------------------------------------------


def _page(report: Report) -> str:
    from .. import __version__

    prediction, model = report.prediction, report.prediction.model
    title, words = escape(report.name), growth(prediction)
    stored = json.dumps(model.to_dict(), indent=1, allow_nan=False)
    body = [
        f"<h1>{title} at initialisation</h1>",
        f'<p class="soft">{in_brief(model)}; theory {prediction.theory}, '
        f"{escape(prediction.resolution)}; moments {__version__}</p>",
        f'<p class="card">{escape(words[:1].upper() + words[1:])}.</p>',
        _warnings(prediction),
        "<h2>What it is</h2>",
        table([], [(name, text) for name, text in rows(model)], text={0, 1}),
        f"<h2>Signal and gradient along the depth of {title}</h2>",
        '<p class="soft">Variances are means over draws of the weights; shaded: where one draw '
        "falls 95 % of the time. Correlations are those between different tokens. Gradients are "
        f"{_of_what(prediction)}.</p>",
        _charts(stream_charts(prediction)),
        details("layer by layer", _stream_table(prediction)),
        f"<h2>Gradients of the weight matrices of {title}</h2>",
        _weights(prediction),
        _tokens(prediction),
        _loss(prediction),
        _schemes(report),
        _laws(report),
        "<h2>Do it again</h2>",
        "<p>As <code>model.json</code>: <code>moments report model.json -o report.html</code>, "
        "or in Python:</p>",
        f"<pre>{escape(_SNIPPET)}</pre>",
        details("model.json", f"<pre>{escape(stored)}</pre>"),
    ]
    return document(f"{report.name} at initialisation", "".join(body), STYLE)


_SNIPPET = """import json, pathlib, moments

model = moments.Transformer.from_dict(json.loads(pathlib.Path("model.json").read_text()))
moments.report(model).save("report.html")"""


def _of_what(prediction: Prediction) -> str:
    if prediction.loss is None:
        return (
            "relative to a variance of "
            f"{shown(float(prediction.grad_variance[-1]))} at the last layer: no loss is declared"
        )
    return "those of the model's own loss"


def _warnings(prediction: Prediction) -> str:
    if not prediction.warnings:
        return '<p class="soft">No formula left the range in which it was validated.</p>'
    notes = "".join(f"<p>{escape(note)}</p>" for note in prediction.warnings)
    title = "<strong>Where formulas leave their range</strong>"
    return f'<div class="card warning">{title}{notes}</div>'


def _charts(charts: Iterable[Chart]) -> str:
    return f'<div class="charts">{"".join(chart.svg() for chart in charts)}</div>'


STREAM = (
    ("variance", "signal variance", "signal"),
    ("correlation", "token correlation", "signal"),
    ("grad_variance", "gradient variance", "gradient"),
    ("grad_correlation", "gradient correlation", "gradient"),
)
"""Quantity, title and role of the charts of a stream."""


def stream_charts(
    shown: Prediction | np.ndarray,
    held: Prediction | None = None,
    *,
    before: Prediction | None = None,
    bands: bool = True,
) -> list[Chart]:
    """Variance, correlation, gradient variance and gradient correlation along the depth.

    Args:
        shown: a prediction of one configuration, or as much of one as is known, (4, layers + 1).
        held, before: others, drawn in grey behind it, the second as far as the layers go.
        bands: whether to shade where one draw falls.
    """
    if isinstance(shown, Prediction):
        known = np.array([getattr(shown, quantity) for quantity, *_ in STREAM])
        ranges = one_draw(shown) if bands else {}
    else:
        known, ranges = shown, {}
    layers = np.arange(known.shape[-1])
    found = []
    for values, (quantity, title, role) in zip(known, STREAM, strict=True):
        band = ranges.get(quantity)
        ends = None if band is None else np.stack([band.low, band.high])
        curves = [Curve("", values, layers, role, ends)]
        for other, behind in ((held, "held"), (before, "before")):
            if other is not None:
                old = getattr(other, quantity)[: None if behind == "held" else layers.size]
                curves.append(Curve("", old, np.arange(old.size), behind))
        found.append(Chart(title, curves, bounded=quantity.endswith("correlation")))
    return found


def _by_layer(columns: Mapping[str, np.ndarray], first: int) -> str:
    """A row for every layer, of deeper models for every so many."""
    count = len(next(iter(columns.values())))
    kept = sorted({*range(0, count, -(-count // SHOWN_LAYERS)), count - 1})
    cells = [
        [str(first + n), *(shown(float(column[n])) for column in columns.values())] for n in kept
    ]
    return table(["layer", *columns], cells)


def _stream_table(prediction: Prediction) -> str:
    columns = {TITLES[name]: getattr(prediction, name) for name in QUANTITIES}
    if prediction.theory == "refined":
        last = columns.popitem()
        columns["gradient of one draw, typical"] = prediction.grad_variance_typical
        columns |= [last]
    return _by_layer(columns, 0)


def _weights(prediction: Prediction) -> str:
    frame = prediction.weight_gradients()
    inner = frame[(frame.layer > 0) & (frame.layer <= prediction.model.layers)]
    if inner.empty:
        return "<p>This theory states no gradients of weights.</p>"
    square = inner.pivot_table(index="layer", columns="weight", values="squared_norm", sort=False)
    matrices = [name for name in MATRICES if name in square]
    blocks = [
        ("attention", [n for n in matrices if not n.startswith(("ffn", "gate"))]),
        ("feed-forward block", [n for n in matrices if n.startswith(("ffn", "gate"))]),
    ]
    charts = [
        Chart(
            f"squared gradient norm, {title}",
            [
                Curve(_spaced(name), square[name].to_numpy(), square.index.to_numpy(), role)
                for name, role in zip(names, itertools.cycle(ROLES))
            ],
            "layer",
        )
        for title, names in blocks
        if names
    ]
    names = [*matrices, *(name for name in square.columns if name not in matrices)]
    columns = {_spaced(name): square[name].to_numpy() for name in names}
    outer = frame[(frame.layer == 0) | (frame.layer > prediction.model.layers)]
    rest = [(str(r["weight"]), shown(r["squared_norm"])) for r in outer.to_dict("records")]
    one, every = prediction.sequences
    of = f", of {one} of {every} sequences" if one < every else ""
    tables = details(f"every parameter, layer by layer{of}", _by_layer(columns, 1))
    if rest:
        tables += details("embedding and head", table(["parameter", "squared norm"], rest, {0}))
    return _charts(charts) + tables


def _spaced(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")


def _tokens(prediction: Prediction) -> str:
    """Profiles by position, where positions count."""
    signal, gradient = prediction.token_variance, prediction.token_grad_variance
    if signal is None or gradient is None or signal.shape[-1] < 3:
        return ""
    layers = prediction.model.layers
    chosen = sorted({0, layers // 2, layers})
    places = np.arange(1, signal.shape[-1] + 1)
    kept = np.unique(np.rint(np.linspace(0, places.size - 1, 200)).astype(int))
    charts = [
        Chart(
            f"{title} by position",
            [
                Curve(f"layer {n}", values[n][kept], places[kept], role)
                for n, role in zip(chosen, ("signal", "gradient", "third"), strict=False)
            ],
            "position in the sequence",
        )
        for title, values in (("signal variance", signal), ("gradient variance", gradient))
    ]
    return "<h2>By position</h2>" + _charts(charts)


def _loss(prediction: Prediction) -> str:
    if prediction.loss is None:
        return ""
    head = prediction.model.head
    count = head.choices(prediction.model.embedding)
    text = (
        f"Loss {float(prediction.loss):.4g} ± {float(prediction.loss_stderr):.2g} (one draw of the "
        f"weights); mean square of the logits {shown(float(prediction.logit_variance or 0.0))}."
    )
    what = "labels" if head.loss == "classification" else "words"
    text += f" Guessing evenly among {count} {what} costs {np.log(count):.4g}."
    return f"<h2>Loss</h2><p>{escape(text)}</p>"


def _schemes(report: Report) -> str:
    found = report.schemes
    if found is None:
        return ""
    every = SchemeComparison(found.model, {"as it is": report.prediction, **found.predictions}, {})
    sets = {scheme.name: ", ".join(scheme.sets) for scheme in every_scheme()}
    heads = ["scheme", "norm", "variance, last over first", "gradient, first over last"]
    heads += ["last token correlation", "sensitivity", "what it sets"]
    cells = []
    for r in every.to_frame().to_dict("records"):
        numbers = [shown(float(r[column])) for column in SCHEME_COLUMNS[2:]]
        fields = sets.get(r["scheme"], "").replace("_", " ")
        cells.append([r["scheme"], r["norm"], *numbers, fields])
    missing = "".join(
        f"<p class=soft>Without {escape(name)}: {escape(why)}</p>"
        for name, why in found.left_out.items()
    )
    return (
        f"<h2>What every scheme would change of {escape(report.name)}</h2>"
        '<p class="soft">Each at its authors’ placement of the norm, with their options. '
        "Sensitivity: median over blocks of the number of layers times the variance that a block "
        "adds over that of the skip connection.</p>"
        + table(heads, cells, text={0, 1, 6}, marked=0)
        + missing
    )


def _laws(report: Report) -> str:
    applied = () if report.schemes is None else report.schemes.predictions
    sources = [str(scheme.source) for scheme in every_scheme() if scheme.name in applied]
    used = ""
    if report.explanation is not None:
        seen: dict[tuple[str, str], tuple[str, str]] = {}
        for step in report.explanation.steps:
            status = "" if step.law is None else step.law.status
            source = step.source if step.law is None else str(step.law.source)
            seen.setdefault((step.component, step.quantity), (status, source))
            sources.append(source)
        cells = [
            (component, quantity.replace("_", " "), *about)
            for (component, quantity), about in sorted(seen.items())
        ]
        heads = ["component", "quantity", "status", "source"]
        used = details(f"{len(cells)} laws", table(heads, cells, text={0, 1, 2, 3}))
    return (
        f"<h2>Laws at work in layer 1 of {escape(report.name)}, and what to cite</h2>{used}"
        f"<pre>{escape(bibtex(sources))}</pre>"
    )
