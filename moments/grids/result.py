"""The result of a sweep, as tables, arrays and plots."""

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
        axes: names and values of the axes; arrays have its shape.
        theory: the theory of all configurations, unless it is an axis.
        inputs: further arguments of `predict`, the same for all.
        values: arrays of the axes' shape by quantity (`QUANTITIES`): the signal at the last layer's
            output, the gradient at the first layer's input. NaN for a configuration that is refused
            or not computed yet.
        stream: with `profile`, moments of the stream at every depth, of shape (..., N + 1), N of
            the deepest model, NaN beyond the depth of shallower ones; else empty.
        warnings: validity warnings by index of the configuration, the last axis varying fastest.
        refused: reasons why the theory refuses a configuration, by the same index.
        done: by the same index, whether a configuration is computed.
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
        """A sweep without results."""
        result = cls(axes, theory, inputs, done=np.zeros(axes.size, dtype=bool))
        if profile:
            result.stream.update({name: np.full((*axes.shape, 1), np.nan) for name in STREAM})
        return result

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sweep:
        """Read the file of a finished, running or killed sweep.

        Raises:
            DomainError: no such file, or not of a sweep; or its model comes from a function, so
                that only the same call of `sweep` can read it.

        Warns:
            ValidityWarning: the results are from another version of the package.
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
        result = cls.empty(axes, header["theory"], header["inputs"], header["profile"])
        result.add(rows)
        return result

    # --- results as they come --------------------------------------------------------------------

    def add(self, rows: Iterable[Row]) -> None:
        """Add results."""
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
            array = self.stream[name]
            if values.size > array.shape[-1]:
                longer = np.full((*self.axes.shape, values.size), np.nan)
                longer[..., : array.shape[-1]] = array
                self.stream[name] = array = longer
            array.reshape(-1, array.shape[-1])[index, : values.size] = values

    def missing(self) -> list[int]:
        """Indices of configurations without a result."""
        return np.flatnonzero(~self.done).tolist()

    # --- access ----------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values of every axis."""
        return self.axes.shape

    def __getitem__(self, quantity: str) -> np.ndarray:
        if quantity not in self.values:
            raise unknown_name("quantity", quantity, self.values)
        return self.values[quantity]

    def model(self, **values: Any) -> Transformer:
        """The declaration at values of the axes, by default the first.

        For axes with dotted names: sweep.model(**{"weights.query": 1e-3}).
        """
        return self.axes.declared(self._chosen(values))

    def arguments(self, **values: Any) -> dict[str, Any]:
        """The other arguments of `predict` at values of the axes, by default the first."""
        varied = self.axes.arguments(self._chosen(values))
        fixed = {"theory": self.theory, **self.inputs}
        return fixed | {name: value for name, value in varied.items() if value is not None}

    def prediction(self, **values: Any) -> Prediction:
        """The whole prediction at values of the axes, by default the first."""
        return predict(self.model(**values), **self.arguments(**values))

    def _chosen(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        for name in values:
            if name not in self.axes.values:
                raise unknown_name("axis", name, self.axes.values)
        return tuple(values.get(name, axis[0]) for name, axis in self.axes.values.items())

    def to_frame(self, by_layer: bool = False) -> pd.DataFrame:
        """One row per configuration: values of the axes, quantities, `warnings` and `refused`.

        Axes of moments are named `input_variance`, `input_correlation`, `output_grad_variance` and
        `output_grad_correlation`.

        Args:
            by_layer: one row per configuration and depth instead, for a sweep with profiles.

        Raises:
            DomainError: `by_layer` for a sweep without profiles.
        """
        points = [
            values for values, done in zip(self.axes.points(), self.done, strict=True) if done
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
        exists = ~np.isnan(columns["variance"])
        row, layer = np.nonzero(exists)
        result = frame.iloc[row].reset_index(drop=True)
        result["layer"] = layer
        for name, values in columns.items():
            result[name] = values[exists]
        return result

    def _quantities(self) -> list[str]:
        return [name for name in QUANTITIES if name in self.values]

    def to_xarray(self) -> xarray.Dataset:
        """Quantities as labelled arrays over the axes, NaN if missing, and `refused` and `warnings`
        as text.

        With profiles also moments of the stream by `layer`, as stream_variance and so on.

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
        """Lines over one axis, a map over two, or one map for every value of a third.

        Args:
            x: the horizontal axis; None: the first.
            y: the vertical axis of a map; None: lines for one axis, or for two if the second has at
                most eight values, else a map with the second.
            quantity: one of `QUANTITIES`.
            by: the axis with one line or map per value; None: the remaining one.
            name: of the model, for the title.

        Raises:
            DomainError: no such axis or quantity, or further axes with several values.
        """
        from .picture import plot_sweep

        return plot_sweep(self, x, y, quantity, by, name)

    @property
    def heading(self) -> str:
        """The axes, and how many configurations are computed, in one line."""
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
        """The first rows of the table, without empty columns."""
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
