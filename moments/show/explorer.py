"""`moments.explore`: one model with interactive controls, an ipywidgets app for notebooks, which
`moments explore` serves with Voilà."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MomentsError, domain_error, optional, without_warnings
from ..model.declaration import GATED
from ..model.summary import in_brief
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..scheme.registry import input_options
from ..scheme.registry import scheme as known_scheme
from ..scheme.registry import schemes as every_scheme
from .html import fragment, picture, render
from .plot import plot_stream
from .verdict import growth

Value = float | int | str | bool

NO_SCHEME = "none"


@dataclass(frozen=True)
class Control:
    """One control: a slider through `values`, or a dropdown if `choice`. Its `name` is the field of
    the Transformer that it sets, if any."""

    name: str
    title: str
    values: tuple[Value, ...]
    start: Value
    choice: bool = False


_SCALES = tuple(round(10 ** (n / 10), 3) for n in range(-10, 11))
_LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_DEPTHS = (*range(1, 13), 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 160, 200)
_WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1600, 2048, 2560, 4096, 5120, 8192)
_HEADS = (1, 2, 4, 6, 8, 12, 16, 20, 25, 32, 64)
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "identity", "swiglu", "geglu")
_PLACEMENTS = ("pre", "post", "none", "sandwich", "output", "hybrid", "b2t")


def _controls(model: Transformer) -> tuple[Control, ...]:
    """The controls that apply to a model, set to its values."""
    widths_follow = model.weights is None or "weights" in model._defaulted  # widths can follow
    embedded = model.embedding is not None
    sliders: list[tuple[str, str, Iterable[float], Any]] = [
        ("layers", "layers", _DEPTHS, model.layers)
    ]
    if widths_follow and not embedded and model.encoder is None:
        sliders.append(("d_model", "width d_model", _WIDTHS, model.d_model))
        sliders.append(("heads", "heads", _HEADS, model.heads))
    sliders.append(("seq_len", "tokens", _LENGTHS, model.seq_len))
    if not embedded:
        sliders.append(("correlation", "input correlation", (n / 20 for n in range(20)), 0.0))
    sliders.append(("dropout", "dropout", (n / 40 for n in range(21)), model.dropout))
    sliders.append(("logit_scale", "logit factor", _SCALES, 1.0))
    if isinstance(model.skip_scale, int | float):
        stops = (n / 40 for n in range(20, 41))
        sliders.append(("skip_scale", "skip scale λ", stops, float(model.skip_scale)))
    if isinstance(model.branch_scale, int | float):
        stops = (n / 20 for n in range(1, 41))
        sliders.append(("branch_scale", "branch scale β", stops, float(model.branch_scale)))
    result = [
        Control(name, title, tuple(sorted({*stops, start})), start)
        for name, title, stops, start in sliders
    ]
    gated = {unit: name for name, unit in GATED.items()}
    activation = gated.get(model.activation, model.activation) if model.gated else model.activation
    schemes = (NO_SCHEME, *(scheme.name for scheme in every_scheme()))
    for name, title, choices, start in (
        ("norm", "norm placement", (model.norm, *_PLACEMENTS), model.norm),
        ("normalization", "normalisation", ("layernorm", "rmsnorm", "dyt"), model.normalization),
        ("activation", "activation", (activation, *_ACTIVATIONS), activation),
        ("causal", "causal mask", (False, True), model.causal),
        ("scheme", "scheme", schemes, NO_SCHEME),
    ):
        result.append(Control(name, title, tuple(dict.fromkeys(choices)), start, choice=True))
    return tuple(result)


class Explorer:
    """A model with interactive controls, for notebooks.

    Attributes:
        inputs: the widgets by the name of their control (`layers`, `norm`, `scheme`, ...).
        box: controls and picture as one widget.
        prediction: the prediction shown; None if it failed, and `error` says why.
        python: one line of Python that makes the same prediction.
    """

    def __init__(
        self, model: Transformer | None = None, name: str | None = None, python: str | None = None
    ) -> None:
        if model is not None and not isinstance(model, Transformer):
            raise domain_error("model", type(model).__name__, "a moments.Transformer, or None")
        with optional("notebook", "ipywidgets"):
            import ipywidgets
        self._written_out = model is None
        self.model = model or Transformer(12, 768, 12, 128)
        self.name = name or self.model.name or "a Transformer"
        self._python = python or "model"
        self.controls = {control.name: control for control in _controls(self.model)}
        self.prediction: Prediction | None = None
        self.error = ""
        self._kept: Prediction | None = None
        self.inputs = {name: _widget(control) for name, control in self.controls.items()}
        self._shown = ipywidgets.HTML()
        for widget in self.inputs.values():
            widget.observe(self._show, names="value")
        again = ipywidgets.Button(description="start again")
        again.on_click(lambda _: self.turn())
        self.keep = ipywidgets.ToggleButton(
            description="keep", tooltip="keep these curves in grey behind what follows"
        )
        self.keep.observe(self._keep, names="value")
        controls = [*self.inputs.values(), ipywidgets.HBox([again, self.keep])]
        whole = ipywidgets.Layout(flex="0 0 auto")  # the picture does not squeeze them
        self.box = ipywidgets.HBox([ipywidgets.VBox(controls, layout=whole), self._shown])
        self._show()

    def turn(self, **values: Value) -> None:
        """Set controls to values, and reset all others.

        Raises:
            DomainError: no such control, or no such value of it.
        """
        for name, value in values.items():
            if name not in self.controls:
                raise domain_error("control", name, f"one of {', '.join(self.controls)}")
            if value not in self.controls[name].values:
                allowed = ", ".join(map(str, self.controls[name].values))
                raise domain_error(name, value, f"one of {allowed}")
        for name, widget in self.inputs.items():
            widget.unobserve(self._show, names="value")
            widget.value = values.get(name, self.controls[name].start)
            widget.observe(self._show, names="value")
        self._show()

    @property
    def python(self) -> str:
        """One line of Python that makes the prediction shown."""
        fields, scheme, options, inputs = self._parts(self._state)
        if self._written_out:
            shape = {n: getattr(self.model, n) for n in ("layers", "d_model", "heads", "seq_len")}
            made = f"moments.Transformer({_arguments(shape | fields)})"
        else:
            made = self._python + (f".replace({_arguments(fields)})" if fields else "")
        if scheme:
            made += f".with_scheme({', '.join(filter(None, (repr(scheme), _arguments(options))))})"
        return f"moments.predict({', '.join(filter(None, (made, _arguments(inputs))))})"

    @property
    def _state(self) -> dict[str, Value]:
        """Values of the controls; heads are changed to the nearest divisor of the width."""
        state: dict[str, Value] = {name: w.value for name, w in self.inputs.items()}
        width, heads = state.get("d_model"), state.get("heads")
        if isinstance(width, int) and isinstance(heads, int) and width % heads:
            divisors = [count for count in range(1, width + 1) if width % count == 0]
            state["heads"] = min(divisors, key=lambda count: abs(math.log(count / heads)))
        return state

    def _keep(self, change: Any) -> None:
        self._kept = self.prediction if change["new"] else None
        self._show()

    def _show(self, _: Any = None) -> None:
        state, notes = self._state, []
        decided = self._by_scheme(state)
        for name, widget in self.inputs.items():
            widget.disabled = name in decided
        if "heads" in state and state["heads"] != self.inputs["heads"].value:
            notes.append(f"{state['heads']} heads, because heads must divide the width")
        self.prediction, self.error = None, ""
        shown = {"title": self.name, "verdict": "", "picture": ""}
        try:
            fields, scheme, options, inputs = self._parts(state)
            with without_warnings():  # shown as notes
                model = self.model.replace(**fields) if fields else self.model
                model = model.with_scheme(scheme, **options) if scheme else model
                self.prediction = predict(model, **inputs)
                shown["picture"] = picture(plot_stream(self.prediction, self._kept))
            shown["verdict"] = growth(self.prediction)
            words = f", scheme {scheme}" if scheme else ""
            shown["title"] = f"{self.name}: {in_brief(model)}{words}"
            notes += self.prediction.warnings
        except MomentsError as error:
            self.error = str(error)
        said = {"notes": notes, "error": self.error, "python": self.python}
        self._shown.value = fragment(render("explorer.html", **shown, **said))

    def _parts(
        self, state: Mapping[str, Value]
    ) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
        """Changed fields of the Transformer, a scheme or "", its options, arguments of `predict`.

        A scheme whose constants depend on the input gets the input through its options.
        """
        decided = self._by_scheme(state)
        changed: dict[str, Any] = {
            name: value
            for name, value in state.items()
            if value != self.controls[name].start and name not in decided
        }
        scheme = changed.pop("scheme", "")
        correlation = changed.pop("correlation", None)
        scale = changed.pop("logit_scale", None)
        if scale is not None:
            changed["temperature"] = _divided(self.model.temperature, scale)
        inputs = {} if correlation is None else {"correlation": correlation}
        if not scheme:
            return changed, "", {}, inputs
        model = self.model.replace(dropout=changed.get("dropout", self.model.dropout))
        return changed, scheme, input_options(model, known_scheme(scheme), inputs), inputs

    def _by_scheme(self, state: Mapping[str, Value]) -> tuple[str, ...]:
        """Controls whose values a scheme overwrites."""
        name = state.get("scheme", NO_SCHEME)
        if name == NO_SCHEME:
            return ()
        fields = set(known_scheme(str(name)).sets)
        if "temperature" in fields:
            fields.add("logit_scale")
        return tuple(control for control in self.controls if control in fields)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)

    def __repr__(self) -> str:
        return f"Explorer({self.python})"


def explore(
    model: Transformer | None = None, name: str | None = None, python: str | None = None
) -> Explorer:
    """Change a model's depth, width, scales, placement and scheme interactively in Jupyter.

    `moments explore` shows the same in a browser. The line of Python below the picture makes the
    prediction shown.

    Args:
        model: the model to start with; None: 12 layers of width 768.
        name: name of the model in titles.
        python: expression for the model in the line of Python; None: `model`.

    Raises:
        DomainError: not a Transformer.
        MomentsError: ipywidgets is not installed (extra `notebook`).
    """
    return Explorer(model, name, python)


def serve(cell: str, folder: Path, port: int | None, browser: bool) -> None:
    """Serve the output of a Python cell as a local web page with Voilà, until Ctrl-C.

    Args:
        cell: Python code whose last expression is shown.
        folder: an empty folder for the notebook that Voilà runs.
        port: port of the page; None: the first free one from 8866.
        browser: whether to open the page.

    Raises:
        MomentsError: Voilà is not installed (extra `notebook`).
    """
    with optional("notebook", "voila", "nbformat"):
        import nbformat
        from voila.app import Voila

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    file = folder / "moments.ipynb"
    nbformat.write(book, file)
    options = ["--Voila.ip=127.0.0.1", "--theme=light", "--Voila.log_level=WARN"]
    options += [] if port is None else [f"--port={port}", "--Voila.port_retries=0"]
    options += [] if browser else ["--no-browser"]
    Voila.launch_instance([str(file), *options])


def _divided(temperature: Any, scale: float) -> Any:
    if isinstance(temperature, int | float):
        return float(f"{temperature / scale:.6g}")
    return tuple(float(f"{one / scale:.6g}") for one in temperature)


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _widget(control: Control) -> Any:
    import ipywidgets

    def said(value: Value) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else f"{value:g}"

    options = {
        "options": [(said(value), value) for value in control.values],
        "value": control.start,
        "description": control.title,
        "style": {"description_width": "9em"},
        "layout": ipywidgets.Layout(width="24em"),
    }
    if control.choice:
        return ipywidgets.Dropdown(**options)
    return ipywidgets.SelectionSlider(continuous_update=False, **options)
