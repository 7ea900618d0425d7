"""What the explorer shows: controls over one model, and the view of a state of them.

A state stands in a link's query, and is one line of Python. The page (`explorer_page`) and the
widgets of Jupyter (`explorer_widgets`) both show `Explorer.view`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..errors import MomentsError, domain_error, without_warnings
from ..model.declaration import GATED
from ..model.summary import in_brief
from ..model.transformer import Transformer
from ..prediction.predict import SoFar, predict
from ..prediction.result import Prediction
from ..scheme.registry import scheme as known_scheme
from ..scheme.registry import schemes as every_scheme
from .chart import Chart
from .page import stream_charts
from .scheme_table import input_options
from .verdict import growth

Value = float | int | str | bool

NO_SCHEME = "none"
HELD = "held"
"""Name under which a link carries the state that is drawn in grey."""


@dataclass(frozen=True)
class Control:
    """One thing to turn: any number between the ends of its `values` (a count where `whole`), or
    one of them where it is a `choice`. Its `name` stands in links, and is the field of a
    Transformer's."""

    name: str
    title: str
    values: tuple[Value, ...]
    start: Value
    choice: bool = False
    whole: bool = False

    def read(self, text: str) -> Value:
        """The value that a link says; DomainError where it can have no such value."""
        if self.choice:
            found = {str(value).lower(): value for value in self.values}.get(text.lower())
            if found is None:
                raise domain_error(self.name, text, f"one of {', '.join(map(str, self.values))}")
            return found
        low, high = float(self.values[0]), float(self.values[-1])
        allowed = f"a {'whole ' * self.whole}number from {low:g} to {high:g}"
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high or (self.whole and not number.is_integer()):
            raise domain_error(self.name, text, allowed)
        return int(number) if self.whole else number

    def html(self, value: Value) -> str:
        """The control as a label of a page, standing at a value or at the stop that is nearest."""
        name = escape(self.name)
        if self.choice:
            options = "".join(
                f"<option value='{escape(str(one).lower())}'{' selected' * (one == value)}>"
                f"{escape(said(one))}</option>"
                for one in self.values
            )
            shown, put = "", f"<select aria-label='{escape(self.title)}'>{options}</select>"
        else:
            stops: Any = self.values
            at = min(range(len(stops)), key=lambda i: abs(stops[i] - value))
            shown = f"<output>{value}</output>"
            put = (
                f"<input type='range' min='0' max='{len(stops) - 1}' step='1' value='{at}' "
                f"aria-label='{escape(self.title)}'>"
            )
        return f"<label id='control-{name}'><span>{escape(self.title)}</span>{shown}{put}</label>"


def said(value: Value) -> str:
    """A value as a control shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:g}"


_SCALES = tuple(round(10 ** (n / 10), 3) for n in range(-10, 11))
_LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_DEPTHS = (*range(1, 13), 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 160, 200)
_WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1600, 2048, 2560, 4096, 5120, 8192)
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "identity", "swiglu", "geglu")


def _controls(model: Transformer) -> tuple[Control, ...]:
    """Those that make sense of a model, standing where it is."""
    widths_follow = model.weights is None or "weights" in model._defaulted  # widths can follow
    embedded = model.embedding is not None
    found = [Control("layers", "layers", _DEPTHS, model.layers, whole=True)]
    if widths_follow and not embedded and model.encoder is None:
        found += [
            Control("d_model", "width d_model", _WIDTHS, model.d_model, whole=True),
            Control(
                "heads", "heads", (1, 2, 4, 6, 8, 12, 16, 20, 25, 32, 64), model.heads, whole=True
            ),
        ]
    found.append(Control("seq_len", "tokens", _LENGTHS, model.seq_len, whole=True))
    if not embedded:
        stops = tuple(n / 20 for n in range(20))
        found.append(Control("correlation", "input correlation", stops, 0.0))
    found += [
        Control("dropout", "dropout", tuple(n / 40 for n in range(21)), model.dropout),
        Control("logit_scale", "factor on the logits", _SCALES, 1.0),
    ]
    for name, title, stops in (
        ("skip_scale", "skip scale λ", tuple(n / 40 for n in range(20, 41))),
        ("branch_scale", "branch scale β", tuple(n / 20 for n in range(1, 41))),
    ):
        value = getattr(model, name)
        if isinstance(value, int | float):
            found.append(Control(name, title, stops, float(value)))
    placements = ("pre", "post", "none", "sandwich", "output", "hybrid", "b2t")
    names = (NO_SCHEME, *(scheme.name for scheme in every_scheme()))
    activations = tuple(dict.fromkeys((_named_activation(model), *_ACTIVATIONS)))
    for name, title, choices, start in (
        ("norm", "norm placement", tuple(dict.fromkeys((model.norm, *placements))), model.norm),
        ("normalization", "normalisation", ("layernorm", "rmsnorm", "dyt"), model.normalization),
        ("activation", "activation", activations, activations[0]),
        ("causal", "causal mask", (False, True), model.causal),
        ("scheme", "scheme", names, NO_SCHEME),
    ):
        found.append(Control(name, title, choices, start, choice=True))
    return tuple(_reaching(control) for control in found)


def _reaching(control: Control) -> Control:
    """With where the model stands among its stops."""
    if control.choice or control.start in control.values:
        return control
    return dataclasses.replace(control, values=tuple(sorted({*control.values, control.start})))


def _named_activation(model: Transformer) -> str:
    gated = {unit: name for name, unit in GATED.items()}
    return gated.get(model.activation, model.activation) if model.gated else model.activation


@dataclass(frozen=True)
class View:
    """What one state looks like.

    Attributes:
        values, settled: of every control, and what was changed to fit, in words.
        by_scheme: controls that the scheme decides.
        title, verdict: which model it is, and what the depth does to it.
        python, link: one line that gives the same prediction, and the query of an address.
        charts, warnings: SVG panels, and where formulas left their validity.
        error: why there is nothing to see; "" where there is.
        complete: whether all is there; before, curves end where layers are still to come.
    """

    values: Mapping[str, Value]
    settled: tuple[str, ...] = ()
    by_scheme: tuple[str, ...] = ()
    title: str = ""
    verdict: str = ""
    python: str = ""
    link: str = ""
    charts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""
    milliseconds: float = 0.0
    complete: bool = True


FRAME = 0.075
"""Seconds after which what is known of a state is shown."""

PAUSE = 0.15
"""Seconds that a state must stand before what cannot be given up is begun: its bands."""


MOST_VIEWERS = 16
"""Pages whose last state is remembered."""


class _Superseded(Exception):
    """Another state is asked for."""


class _Progress:
    """A state on its way to being known, behind what was `last` shown."""

    def __init__(self, last: Prediction | None) -> None:
        self.began, self.last = time.perf_counter(), last
        self.model: Transformer | None = None
        self.held: Prediction | None = None
        self.so_far: SoFar | None = None
        self.prediction: Prediction | None = None
        self.ended = threading.Event()

    def passed(self, so_far: SoFar) -> None:
        """Behind a layer."""
        self.so_far = so_far
        if self.ended.is_set():
            raise _Superseded

    def predicted(self, prediction: Prediction) -> None:
        """All but the bands is known."""
        self.prediction = prediction
        slow = time.perf_counter() - self.began > FRAME
        if self.ended.wait(PAUSE if slow else 0.0):
            raise _Superseded


class Explorer:
    """Controls over a model, and what they show.

    Args:
        model: where the controls stand at first; None: 12 layers of width 768 without embedding.
        name: of the model, in titles.
        python: the expression that makes the model in the line of Python; None: written out.
    """

    def __init__(
        self, model: Transformer | None = None, name: str | None = None, python: str | None = None
    ) -> None:
        if model is not None and not isinstance(model, Transformer):
            raise domain_error("model", type(model).__name__, "a moments.Transformer, or None")
        import matplotlib.ticker  # noqa: F401  # two threads that begin to draw must not both import

        self._written_out = model is None
        self.model = model or Transformer(12, 768, 12, 128)
        self.name = name or self.model.name or ("a declared model" if model else "a plain model")
        self._python = python or "model"
        self.controls = {control.name: control for control in _controls(self.model)}
        self._lock = threading.Lock()
        self._predicted = functools.lru_cache(maxsize=64)(self._predict)
        self._progress: _Progress | None = None
        self._viewers: dict[str, _Progress] = {}

    def read(self, query: str) -> tuple[dict[str, Value], dict[str, Value] | None]:
        """The state that a link's query says, and the one drawn in grey, if any; DomainError for a
        control or value that does not exist."""
        given = dict(parse_qsl(query.removeprefix("?"), keep_blank_values=True))
        held = given.pop(HELD, None)
        return self._state(given), None if held is None else self._state(dict(parse_qsl(held)))

    def _state(self, given: Mapping[str, str]) -> dict[str, Value]:
        for name in given:
            if name not in self.controls:
                raise domain_error("control", name, f"one of {', '.join(self.controls)}")
        return {
            name: control.read(given[name]) if name in given else control.start
            for name, control in self.controls.items()
        }

    def link(self, state: Mapping[str, Value], held: Mapping[str, Value] | None = None) -> str:
        """What `read` reads; controls at their start are left out."""
        changed = {
            name: str(state[name]).lower()
            for name, control in self.controls.items()
            if name in state and state[name] != control.start
        }
        if held is not None:
            changed[HELD] = self.link(held)
        return urlencode(changed)

    def view(self, query: str = "") -> View:
        """What a state looks like; where it is none that can be, why."""
        return self._view(query, None)

    def views(self, query: str = "", viewer: str = "") -> Iterator[View]:
        """A state as it becomes known: what is known within `FRAME`, and at last all; it ends where
        the same viewer asks for another state."""
        try:
            self.read(query)
        except MomentsError:
            yield self.view(query)
            return
        before = self._viewers.pop(viewer, None)
        progress = _Progress(None if before is None else before.prediction or before.last)
        if before is not None:
            before.ended.set()
        self._viewers[viewer] = progress
        while len(self._viewers) > MOST_VIEWERS:
            self._viewers.pop(next(iter(self._viewers))).ended.set()
        found: list[View] = []

        def work() -> None:
            with contextlib.suppress(_Superseded):
                found.append(self._view(query, progress))

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            pause = FRAME
            while True:
                worker.join(pause)
                if not worker.is_alive() or progress.ended.is_set():
                    break
                yield self._so_far(query, progress)
                pause = min(1.4 * pause, 1.0)
            yield from found
        finally:
            progress.ended.set()

    def _view(self, query: str, progress: _Progress | None) -> View:
        with self._lock, without_warnings():  # they stand in the view
            began = time.perf_counter()
            state = {name: control.start for name, control in self.controls.items()}
            try:
                state, held = self.read(query)
                self._progress = progress
                behind = None if held is None else self._at(_settle(held)[0])
                if progress is not None:
                    progress.held, progress.so_far = behind, None
                found = self._at(_settle(state)[0])
                if progress is not None:
                    progress.predicted(found)
                charts = stream_charts(found, behind)
                notes = (*found.warnings, *(found._draws[2] if found.theory == "refined" else ()))
            except MomentsError as error:
                return View(state, error=str(error), python=self.python(state), link=query)
            finally:
                self._progress = None
            seen: dict[str, Any] = {"verdict": growth(found), "warnings": notes}
            return self._drawn(state, held, charts, found.model, began, **seen)

    def _so_far(self, query: str, progress: _Progress) -> View:
        known = progress.prediction
        charts: list[Chart] = []
        state, held = self.read(query)
        if known is not None:
            charts = stream_charts(known, progress.held, bands=False)
        elif progress.so_far is not None:
            charts = stream_charts(progress.so_far(), progress.held, before=progress.last)
        seen: dict[str, Any] = {"verdict": "" if known is None else growth(known)}
        model, began = progress.model, progress.began
        return self._drawn(state, held, charts, model, began, **seen, complete=False)

    def _drawn(
        self,
        state: dict[str, Value],
        held: dict[str, Value] | None,
        charts: Sequence[Chart],
        model: Transformer | None,
        began: float,
        **seen: Any,
    ) -> View:
        values, settled = _settle(state)
        return View(
            values,
            settled,
            self._by_scheme(values),
            "" if model is None else self._title(model, values),
            python=self.python(values),
            link=self.link(values, held),
            charts=tuple(chart.svg() for chart in charts),
            milliseconds=1e3 * (time.perf_counter() - began),
            **seen,
        )

    def _at(self, state: Mapping[str, Value]) -> Prediction:
        return self._predicted(tuple(state.items()))

    def _predict(self, state: tuple[tuple[str, Value], ...]) -> Prediction:
        model, inputs = self._declared(dict(state))
        if self._progress is None:
            return predict(model, **inputs)
        self._progress.model = model
        return predict(model, **inputs, progress=self._progress.passed)

    def _declared(self, state: Mapping[str, Value]) -> tuple[Transformer, dict[str, Any]]:
        fields, scheme, options, inputs = self._parts(state)
        model = self.model.replace(**fields) if fields else self.model
        return model.with_scheme(scheme, **options) if scheme else model, inputs

    def _parts(
        self, state: Mapping[str, Value]
    ) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
        """Changed fields of the Transformer, a scheme or "", its options, what `predict` is told.

        A scheme whose constants depend on the input learns of it by its options.
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

    def _title(self, model: Transformer, state: Mapping[str, Value]) -> str:
        scheme = state.get("scheme", NO_SCHEME)
        under = "" if scheme == NO_SCHEME else f", scheme {scheme}"
        return f"{self.name}: {in_brief(model)}{under}"

    def python(self, state: Mapping[str, Value]) -> str:
        """One line that gives the state's prediction."""
        fields, scheme, options, inputs = self._parts(state)
        if self._written_out:
            shape = {n: getattr(self.model, n) for n in ("layers", "d_model", "heads", "seq_len")}
            made = f"moments.Transformer({_arguments(shape | fields)})"
        else:
            made = self._python + (f".replace({_arguments(fields)})" if fields else "")
        if scheme:
            made += f".with_scheme({', '.join(filter(None, (repr(scheme), _arguments(options))))})"
        return f"moments.predict({', '.join(filter(None, (made, _arguments(inputs))))})"


def _divided(temperature: Any, scale: float) -> Any:
    if isinstance(temperature, int | float):
        return float(f"{temperature / scale:.6g}")
    return tuple(float(f"{one / scale:.6g}") for one in temperature)


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _settle(state: dict[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The nearest state that can be: heads divide the width."""
    width, heads = state.get("d_model"), state.get("heads")
    if not (isinstance(width, int) and isinstance(heads, int)) or width % heads == 0:
        return state, ()
    divisors = [count for count in range(1, width + 1) if width % count == 0]
    fitting = min(divisors, key=lambda count: abs(math.log(count / heads)))
    return {**state, "heads": fitting}, (f"{fitting} heads: {heads} do not divide {width}",)
