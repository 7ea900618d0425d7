"""What a sweep predicted, as tables, arrays and pictures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, ValidityWarning, domain_error, optional, unknown_name
from ..files import Shown, as_frame
from ..formulas.checks import check_choice
from ..formulas.law import THEORIES, Theory
from ..model.transformer import Transformer
from ..prediction.draws import QUANTITIES as STREAM
from ..prediction.predict import predict
from .axes import Axes, as_shown, in_words, numeric
from .store import QUANTITIES, Row, of_another_version, read

if TYPE_CHECKING:
    import pandas as pd
    import xarray
    from matplotlib.figure import Figure

    from ..prediction.result import Prediction


@dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """Predictions over a grid.

    Attributes:
        axes: names and values of what varied; arrays have its shape.
        theory: of all configurations that name no other.
        inputs: what else `predict` was given, the same for all.
        values: by quantity (`QUANTITIES`), arrays of that shape. What came through all layers: the
            signal at the last layer's output, the gradient at the first layer's input. NaN marks a
            configuration that is refused or not there yet.
        stream: with `profile`, those of the stream at every depth, shape (..., N + 1) of the
            deepest, NaN beyond a shallower one's end; else empty.
        warnings: of validity, by index of the configuration, the last axis varying fastest.
        refused: why the theory gives nothing, likewise.
        done: by the same index, whether a configuration is there yet.
    """

    axes: Axes
    theory: Theory
    inputs: Mapping[str, Any]
    values: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    stream: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    warnings: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    refused: dict[int, str] = field(default_factory=dict, repr=False)
    done: np.ndarray = field(default_factory=lambda: np.zeros(0, bool), repr=False)

    @classmethod
    def empty(cls, axes: Axes, theory: Theory, inputs: Mapping[str, Any], profile: bool) -> Sweep:
        """Without results."""
        found = cls(axes, theory, inputs, done=np.zeros(axes.size, dtype=bool))
        if profile:
            found.stream.update({name: np.full((*axes.shape, 1), np.nan) for name in STREAM})
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sweep:
        """The results that a file holds, of a sweep that may still run or was killed.

        Raises:
            DomainError: no such file, or not a sweep's; or its model was made by a function, which
                only the same call of `sweep` has.

        Warns:
            ValidityWarning: another version of the package predicted them.
        """
        header, rows = read(path)
        if note := of_another_version(header):
            warnings.warn(f"{path} holds {note}", ValidityWarning, stacklevel=2)
        if "made of" in header["model"]:
            raise DomainError(
                f"path: the models of {path} were made by a function: call sweep again with it"
            )
        try:
            axes = Axes.of(Transformer.from_dict(header["model"]), header["axes"])
            check_choice("theory", header["theory"], THEORIES)
        except DomainError as error:
            raise DomainError(f"path: line 1 of {path} is none of a sweep's ({error})") from None
        found = cls.empty(axes, header["theory"], header["inputs"], header["profile"])
        found.add(rows)
        return found

    # --- results as they come --------------------------------------------------------------------

    def add(self, rows: Iterable[Row]) -> None:
        """Take in results."""
        for row in rows:
            self.done[row.index] = True
            if row.refused is not None:
                self.refused[row.index] = row.refused
                continue
            if row.warnings:
                self.warnings[row.index] = row.warnings
            for name, value in row.values.items():
                if name not in self.values:
                    self.values[name] = np.full(self.axes.shape, np.nan)
                self.values[name].reshape(-1)[row.index] = value
            if row.stream is not None and self.stream:
                self._add_stream(row.index, row.stream)

    def _add_stream(self, index: int, stream: Iterable[Iterable[float]]) -> None:
        for name, column in zip(STREAM, stream, strict=True):
            values = np.asarray(column, dtype=float)
            held = self.stream[name]
            if values.size > held.shape[-1]:
                grown = np.full((*self.axes.shape, values.size), np.nan)
                grown[..., : held.shape[-1]] = held
                self.stream[name] = held = grown
            held.reshape(-1, held.shape[-1])[index, : values.size] = values

    def missing(self) -> list[int]:
        """Indices of configurations without a result."""
        return np.flatnonzero(~self.done).tolist()

    # --- what a user asks ------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of values of the axes."""
        return self.axes.shape

    def __getitem__(self, quantity: str) -> np.ndarray:
        if quantity not in self.values:
            raise unknown_name("quantity", quantity, self.values)
        return self.values[quantity]

    def model(self, **values: Any) -> Transformer:
        """The declaration at values of the axes; the first of those not named.

        Axes with dotted names are given as sweep.model(**{"weights.query": 1e-3}).
        """
        return self.axes.declared(self._chosen(values))

    def arguments(self, **values: Any) -> dict[str, Any]:
        """What else `predict` is given, likewise."""
        varied = self.axes.arguments(self._chosen(values))
        given = {"theory": self.theory, **self.inputs}
        return given | {name: value for name, value in varied.items() if value is not None}

    def prediction(self, **values: Any) -> Prediction:
        """The whole prediction at values of the axes; the first of those not named."""
        return predict(self.model(**values), **self.arguments(**values))

    def _chosen(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        for name in values:
            if name not in self.axes.values:
                raise unknown_name("axis", name, self.axes.values)
        return tuple(values.get(name, given[0]) for name, given in self.axes.values.items())

    def to_frame(self, by_layer: bool = False) -> pd.DataFrame:
        """One row a configuration: values of the axes, quantities, `warnings` and `refused`.

        Axes of moments say where they were given: `input_variance`, `input_correlation`,
        `output_grad_variance` and `output_grad_correlation`.

        Args:
            by_layer: one row for every point of every stream instead, which `profile` keeps.

        Raises:
            DomainError: `by_layer` of a sweep without profiles.
        """
        points = [
            values for values, there in zip(self.axes.points(), self.done, strict=True) if there
        ]
        frame = as_frame(points, columns=list(self.axes.labels))
        for label, values in zip(self.axes.labels, self.axes.values.values(), strict=True):
            if not numeric(values):
                frame[label] = [as_shown(value) for value in frame[label]]
        done = np.flatnonzero(self.done)
        if by_layer:
            return self._by_layer(frame, done)
        for name in self._quantities():
            frame[name] = self.values[name].reshape(-1)[done]
        frame["warnings"] = ["; ".join(self.warnings.get(i, ())) for i in done.tolist()]
        frame["refused"] = [self.refused.get(i, "") for i in done.tolist()]
        return frame

    def _by_layer(self, frame: pd.DataFrame, done: np.ndarray) -> pd.DataFrame:
        if not self.stream:
            raise domain_error("by_layer", True, "False for a sweep without profile=True")
        columns = {n: v.reshape(-1, v.shape[-1])[done] for n, v in self.stream.items()}
        there = ~np.isnan(columns["variance"])
        row, layer = np.nonzero(there)
        found = frame.iloc[row].reset_index(drop=True)
        # "layers" may be an axis, so the point of the stream goes by the name it has elsewhere.
        found["layer"] = layer
        for name, values in columns.items():
            found[name] = values[there]
        return found

    def _quantities(self) -> list[str]:
        return [name for name in QUANTITIES if name in self.values]

    def to_xarray(self) -> xarray.Dataset:
        """Quantities as labelled arrays over the axes; NaN where there is none, and `refused` and
        `warnings` as text.

        With profiles also those of the stream by `layer`, as stream_variance and so on.

        Raises:
            MomentsError: xarray is not installed.
        """
        with optional("xarray", "xarray"):
            import xarray

        names = self.axes.labels
        data: dict[str, Any] = {
            name: (names, self.values[name], {"long_name": QUANTITIES[name]})
            for name in self._quantities()
        }
        for name, notes in (("warnings", self.warnings), ("refused", self.refused)):
            text = np.full(self.axes.size, "", dtype=object)
            for index, note in notes.items():
                text[index] = note if isinstance(note, str) else "; ".join(note)
            data[name] = (names, text.reshape(self.axes.shape))
        for name, values in self.stream.items():
            data[f"stream_{name}"] = ((*names, "layer"), values)
        coordinates = {
            label: _coordinate(values)
            for label, values in zip(names, self.axes.values.values(), strict=True)
        }
        if self.stream:
            coordinates["layer"] = np.arange(self.stream["variance"].shape[-1])
        return xarray.Dataset(data, coordinates, {"theory": self.theory})

    def plot(
        self,
        x: str | None = None,
        y: str | None = None,
        quantity: str = "grad_variance",
        *,
        by: str | None = None,
        name: str | None = None,
    ) -> Figure:
        """Lines over one axis, a map over two, small ones for every value of a third.

        Args:
            x: along the picture; None: the first axis.
            y: up a map; None: none of one axis, lines of two where the second has at most eight
                values, else the second.
            quantity: one of `QUANTITIES`.
            by: of whose values there is a line or a map each; None: what is left.
            name: of the model, for the title.

        Raises:
            DomainError: no such axis or quantity, or axes left over that have several values.
        """
        from .picture import plot_sweep

        return plot_sweep(self, x, y, quantity, by, name)

    @property
    def heading(self) -> str:
        """One line that says what varied, and how much of it is there."""
        named = zip(self.axes.labels, self.axes.values.values(), strict=True)
        axes = " x ".join(f"{label} {_span(values)}" for label, values in named)
        parts = [f"{self.axes.size} configurations"]
        left = self.axes.size - int(self.done.sum())
        for count, what in (
            (left, "not there yet"),
            (len(self.refused), "refused"),
            (len(self.warnings), "with warnings"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return f"{axes}: {', '.join(parts)}, theory {self.theory}"

    def __repr__(self) -> str:
        return f"Sweep({self.heading})"

    def __str__(self) -> str:
        return f"{self.heading}\n\n{self._shown()}"

    def _shown(self, most: int = 20) -> str:
        """The first rows of the table, without columns that say nothing."""
        frame = self.to_frame()
        shown = frame.head(most)
        empty = [name for name in ("warnings", "refused") if not shown[name].any()]
        shown = shown.drop(columns=[*empty, *({"loss_stderr"} & set(shown))])
        for name in ("warnings", "refused"):
            if name in shown:
                shown[name] = [
                    f"{text[:40]}..." if len(text) > 43 else text for text in shown[name]
                ]
        text = shown.to_string(index=False, float_format=lambda v: f"{v:.4g}")
        rest = len(frame) - len(shown)
        return f"{text}\n... and {rest} more" if rest else str(text)


def _coordinate(values: tuple[Any, ...]) -> Any:
    if numeric(values):
        return np.array(values)
    return np.array([str(as_shown(v)) for v in values], dtype=object)


def _span(values: tuple[Any, ...]) -> str:
    if len(values) <= 3:
        return ", ".join(map(in_words, values))
    if numeric(values):
        return f"{in_words(min(values))} to {in_words(max(values))} ({len(values)})"
    return f"({len(values)})"
