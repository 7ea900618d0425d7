"""`moments.explore`: the explorer inside a notebook, on ipywidgets."""

from __future__ import annotations

import asyncio
from html import escape
from typing import TYPE_CHECKING, Any

from ..errors import optional
from .chart import STYLE
from .explorer import Control, Explorer, Value, said
from .html import fragment

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from .explorer import View


class Widgets:
    """Controls beside live charts as a notebook shows them: `inputs` are the widgets by the name of
    their control, `box` all as one."""

    def __init__(self, explorer: Explorer) -> None:
        with optional("notebook", "ipywidgets"):
            import ipywidgets

        self.explorer = explorer
        self.inputs = {name: _widget(control) for name, control in explorer.controls.items()}
        self._shown = ipywidgets.HTML()
        for widget in self.inputs.values():
            widget.observe(self._changed, names="value")
        controls = ipywidgets.VBox(list(self.inputs.values()))
        self.box = ipywidgets.HBox([controls, self._shown])
        self._following: asyncio.Task[None] | None = None
        self._show(self._state, self.explorer.view(self._state))

    @property
    def view(self) -> View:
        """What is shown, as soon as all of it is."""
        state = self._state
        if state != self._seen or not self._view.complete:
            self._show(state, self.explorer.view(state))
        return self._view

    @property
    def python(self) -> str:
        """One line that gives the prediction shown."""
        return self.view.python

    @property
    def _state(self) -> str:
        state: dict[str, Value] = {name: w.value for name, w in self.inputs.items()}
        return self.explorer.link(state)

    def _changed(self, _: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no notebook waits for what is moved next
            self._show(self._state, self.explorer.view(self._state))
            return
        if self._following is None or self._following.done():
            self._following = loop.create_task(self._follow())

    async def _follow(self) -> None:
        """Show states as they become known; each at least once before a newer one."""
        one_by_one = asyncio.get_running_loop().run_in_executor
        while (state := self._state) != self._seen or not self._view.complete:
            views = self.explorer.views(state, "widgets")
            while (view := await one_by_one(None, next, views, None)) is not None:
                self._show(state, view)
                if self._state != state:
                    break

    def _show(self, state: str, view: View) -> None:
        self._seen, self._view = state, view
        for name, widget in self.inputs.items():
            widget.disabled = name in view.by_scheme
        if view.charts or view.error:
            self._shown.value = _html(view)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)

    def __repr__(self) -> str:
        return f"Widgets({self.explorer.name}: {self._seen or 'as it was given'})"


def explore(model: Transformer | None = None, name: str | None = None) -> Widgets:
    """Turn a model's depth, width, scales, placement and scheme by hand, and see what they do.

    For Jupyter; `moments explore` is the same as a page. Under the charts stands the line of Python
    that gives what they show.

    Args:
        model: where the controls stand at first; None: 12 layers of width 768.
        name: of the model, in titles.

    Raises:
        DomainError: not a Transformer.
        MomentsError: ipywidgets is not installed.
    """
    return Widgets(Explorer(model, name))


def _widget(control: Control) -> Any:
    import ipywidgets

    options = [(said(value), value) for value in control.values]
    style = {"description_width": "8.5em"}
    layout = ipywidgets.Layout(width="23em")
    kind = ipywidgets.Dropdown if control.choice else ipywidgets.SelectionSlider
    return kind(
        options=options,
        value=control.start,
        description=control.title,
        style=style,
        layout=layout,
    )


def _html(view: View) -> str:
    if view.error:
        return f"<p><b>{escape(view.error)}</b></p><pre>{escape(view.python)}</pre>"
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*view.settled, *view.warnings))
    return fragment(
        f"<div style='min-width:40rem'><b>{escape(view.title)}</b><p>{escape(view.verdict)}</p>"
        f"<div class='charts'>{''.join(view.charts)}</div>{notes}"
        f"<pre>{escape(view.python)}</pre></div>",
        STYLE,
    )
