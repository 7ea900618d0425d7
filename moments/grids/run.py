"""`sweep`: predictions over a grid, many in one pass if possible, stored as they come."""

from __future__ import annotations

import concurrent.futures
import hashlib
import inspect
import itertools
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.structure import DifferentStructure
from ..errors import (
    DomainError,
    MomentsError,
    ValidityWarning,
    domain_error,
    unknown_name,
    without_warnings,
)
from ..formulas.checks import check_choice, check_flag
from ..formulas.law import THEORIES, Theory
from ..model.transformer import Transformer
from ..prediction.draws import QUANTITIES as STREAM
from ..prediction.predict import predict, progress_bar
from ..prediction.result import Prediction
from .axes import MOMENTS, Axes, Value
from .result import Sweep
from .store import Row, Store, opened
from .together import OUTPUTS, kind, predict_together

MOST_TOGETHER = 256
"""Largest number of configurations in one pass: ten times as many would halve the cost of each, but
results are stored about every second."""

NUMBERS = 2**24
"""Largest number of floats stored by one pass (128 MiB)."""

FEWEST_TOGETHER = 5
"""Smallest number of configurations in one pass: arrays cost about three times a plain number."""

SAME = 1e-7
"""Relative tolerance between a configuration's results in a shared pass and in one of its own,
whose attention statistics come from a profile with an error below 1e-8."""

IN_FLIGHT, LEAST_PIECES = 64, 32
"""Pieces of work submitted to an executor at a time, and the least number of pieces for it."""

Piece = list[tuple[int, tuple[Value, ...]]]


def sweep(
    model: Transformer | Callable[..., Transformer],
    axes: Mapping[str, Any],
    *,
    theory: Theory = "refined",
    executor: concurrent.futures.Executor | None = None,
    path: str | os.PathLike[str] | None = None,
    profile: bool = False,
    progress: bool | None = None,
    **inputs: Any,
) -> Sweep:
    """Predict every combination of values.

    Configurations with exchangeable tokens that differ only in numbers and depth share one pass of
    the engine, a thousand at the cost of ten; others run one by one. Results equal those of
    `predict`: to 1e-12 for single passes, to 1e-7 for shared ones, of which two configurations per
    piece are checked.

    Args:
        model: a declaration, or a function that returns one; axes named like parameters of the
            function are passed to it.
        axes: values by name. A field of the model ("layers", "norm"), of its parts
            ("weights.query", "embedding.token_variance", "head.output_scale"), an argument of
            `predict` ("variance", "correlation", "grad_variance", "grad_correlation", "theory",
            "tokens", "batch"), "scheme" (None: as declared) and its options ("scheme.k").
        theory: as for `predict`.
        executor: an executor of concurrent.futures or Dask (`Client.get_executor()`) for pieces of
            the work; None: this process.
        path: a file to which results are appended as they come, and from which an interrupted sweep
            resumes. A file of another sweep or another version of the package is refused.
        profile: whether to store every layer, not only the ends.
        progress: whether to show a bar on standard error; None: in a terminal.
        inputs: further arguments of `predict`, the same for all configurations.

    Returns:
        The results in the order of the axes, the last varying fastest, with warnings and reasons
        for refused configurations.

    Raises:
        DomainError: no such field or argument, all configurations are refused, or `path` is no file
            of this sweep.
        MomentsError: the executor broke down.

    Warns:
        ValidityWarning: once, if configurations were refused or left a formula's validity.
    """
    grid = Axes.of(model, axes)
    check_choice("theory", theory, THEORIES)
    check_flag("profile", profile)
    _check_inputs(grid, inputs)
    if executor is not None and not hasattr(executor, "submit"):
        raise domain_error("executor", executor, "a concurrent.futures.Executor, or None")
    work = _Work(grid, theory, dict(inputs), profile)
    result = Sweep.empty(grid, theory, dict(inputs), profile)
    with ExitStack() as stack:
        store: Store | None = None
        if path is not None:
            store, rows = stack.enter_context(opened(path, work.header()))
            result.add(rows)
        missing = result.missing()
        stack.enter_context(without_warnings())
        shown = sys.stderr.isatty() if progress is None else progress
        bar = progress_bar("configurations", grid.size, grid.size - len(missing))
        advance = stack.enter_context(bar) if shown else None
        for rows in _results(work, missing, executor):
            if store is not None:
                store.append(rows)
            result.add(rows)
            if advance is not None:
                advance(len(rows))
    _report(result)
    return result


class _Work:
    """The picklable task of predicting pieces of a sweep."""

    def __init__(self, axes: Axes, theory: Theory, inputs: dict[str, Any], profile: bool) -> None:
        self.axes, self.theory, self.inputs, self.profile = axes, theory, inputs, profile
        self.process = os.getpid()

    def header(self) -> dict[str, Any]:
        """The header that a file must have for this sweep to resume from it."""
        declared = self.axes.model
        if isinstance(declared, Transformer):
            model: Any = declared.to_dict()
        else:
            names = self.axes.parameters
            points = itertools.product(*(self.axes.values[name] for name in names))
            models = [declared(**dict(zip(names, p, strict=True))).to_dict() for p in points]
            model = {"made of": list(names), "sha256": _digest(json.dumps(models))}
        return {
            "model": model,
            "axes": {name: list(values) for name, values in self.axes.values.items()},
            "theory": self.theory,
            "inputs": {name: _in_header(value) for name, value in self.inputs.items()},
            "profile": self.profile,
        }

    def pieces(self, missing: Sequence[int], spread: bool) -> Iterator[Piece]:
        """Indices and values by piece; `spread` makes pieces smaller for an executor."""
        most = self._most()
        if spread:
            most = max(1, min(most, len(missing) // LEAST_PIECES))
        indices = set(missing)
        piece: Piece = []
        for index, values in enumerate(self.axes.points()):
            if index in indices:
                piece.append((index, values))
                if len(piece) == most:
                    yield piece
                    piece = []
        if piece:
            yield piece

    def _most(self) -> int:
        """Largest number of configurations in a piece."""
        depths = [n for n in self.axes.values.get("layers", ()) if isinstance(n, int)]
        try:
            model, arguments = self.axes.configure(next(self.axes.points()))
            theory: Any = arguments.get("theory") or self.theory
            single = kind(model, theory, self._arguments(arguments)) is None
        except MomentsError:
            return FEWEST_TOGETHER
        if single:
            return 1
        return int(max(1, min(MOST_TOGETHER, NUMBERS // (300 * max([model.layers, *depths])))))

    def _arguments(self, varied: Mapping[str, Any]) -> dict[str, Any]:
        return self.inputs | {k: v for k, v in varied.items() if k != "theory"}

    def rows(self, piece: Piece) -> Iterator[list[Row]]:
        """The results of a piece, as they come."""
        groups: dict[Any, list[_Point]] = {}
        declared: dict[tuple[str, ...], Transformer] = {}
        for index, values in piece:
            key: Any = self.axes.key(values)
            try:
                if key not in declared:
                    declared[key] = self.axes.declared(values)
                model, varied = declared[key], self.axes.arguments(values)
                theory: Any = varied.get("theory") or self.theory
                check_choice("theory", theory, THEORIES)
                point = _Point(index, model, theory, self._arguments(varied))
                shared = None
                if set(point.arguments) <= {*MOMENTS, "batch", "tokens"}:
                    shared = kind(model, theory, point.arguments)
            except MomentsError as error:
                yield [Row(index, refused=str(error))]
                continue
            key = ("single", index) if shared is None else (shared, frozenset(point.arguments))
            groups.setdefault(key, []).append(point)
        for points in groups.values():
            yield from self._group(points)

    def _group(self, points: list[_Point]) -> Iterator[list[Row]]:
        """Predict points of one kind in one pass, if no point has a warning or is refused and both
        end points have the results of a pass of their own; else split the group."""
        if len(points) < FEWEST_TOGETHER:
            yield from ([self._single(point)] for point in points)
            return
        ends = [self._single(points[0]), self._single(points[-1])]
        yield ends
        middle = points[1:-1]
        clean = [not row.warnings and row.refused is None for row in ends]
        if all(clean):
            rows = self._together(points)
            if rows is not None and all(map(_same, ends, (rows[0], rows[-1]))):
                yield rows[1:-1]
                return
        if not any(clean):
            yield from ([self._single(point)] for point in middle)
            return
        half = len(middle) // 2
        yield from self._group(middle[:half])
        yield from self._group(middle[half:])

    def _together(self, points: Sequence[_Point]) -> list[Row] | None:
        """The results of one shared pass; None if it is impossible or gives a warning."""
        first = points[0]
        moments = {
            name: np.array([point.arguments[name] for point in points], dtype=float)
            for name in MOMENTS
            if first.arguments.get(name) is not None
        }
        try:
            prediction = predict_together(
                [point.model for point in points],
                first.theory,
                moments,
                first.arguments.get("batch", 1),
            )
        except (DifferentStructure, MomentsError, ValueError, TypeError, ArithmeticError):
            # Code that branches on a number raises for an array.
            return None
        if prediction.warnings:
            return None
        return [self._row(point, prediction, i) for i, point in enumerate(points)]

    def _single(self, point: _Point) -> Row:
        """The result of a pass for one point."""
        try:
            p = predict(point.model, theory=point.theory, **point.arguments)
        except MomentsError as error:
            return Row(point.index, refused=str(error))
        if p.variance.ndim > 1:
            raise DomainError(
                "a sweep's inputs describe one configuration: make what varies an axis"
            )
        return self._row(point, p)

    def _row(self, point: _Point, p: Prediction, place: Any = ()) -> Row:
        depth = point.model.layers + 1
        stream = [getattr(p, name)[place][:depth] for name in STREAM]
        variance, correlation, grad_variance, grad_correlation = stream
        values = {
            "variance": variance[-1],
            "correlation": correlation[-1],
            "grad_variance": grad_variance[0],
            "grad_correlation": grad_correlation[0],
            "variance_growth": variance[-1] / variance[0],
        }
        if grad_variance[-1] > 0:
            values["grad_variance_growth"] = grad_variance[0] / grad_variance[-1]
        for name in OUTPUTS:
            if getattr(p, name) is not None:
                values[name] = np.asarray(getattr(p, name))[place]
        plain = {name: float(value) for name, value in values.items()}
        profile = tuple(v.tolist() for v in stream) if self.profile else None
        return Row(point.index, plain, p.warnings, None, profile)


@dataclass(frozen=True, slots=True)
class _Point:
    """One configuration: its model and the other arguments of `predict`."""

    index: int
    model: Transformer
    theory: Theory
    arguments: dict[str, Any]


def _same(single: Row, together: Row) -> bool:
    return single.values.keys() == together.values.keys() and all(
        np.isclose(value, together.values[name], rtol=SAME, atol=SAME * 1e-3)
        for name, value in single.values.items()
    )


def _results(
    work: _Work, missing: Sequence[int], executor: concurrent.futures.Executor | None
) -> Iterator[list[Row]]:
    """Rows as they come: in order in this process, by completed piece from an executor."""
    if executor is None:
        for piece in work.pieces(missing, spread=False):
            yield from work.rows(piece)
        return
    pieces = work.pieces(missing, spread=True)
    waiting: set[concurrent.futures.Future[list[Row]]] = set()
    try:
        for piece in pieces:
            waiting.add(executor.submit(_rows, work, piece))
            if len(waiting) >= IN_FLIGHT:
                done, waiting = _first_done(waiting)
                yield from (future.result() for future in done)
        while waiting:
            done, waiting = _first_done(waiting)
            yield from (future.result() for future in done)
    except concurrent.futures.BrokenExecutor as error:
        raise MomentsError(
            f"the executor broke down ({error}); what is predicted is in the file that path names, "
            "and the same call goes on from there"
        ) from None
    except (pickle.PicklingError, AttributeError) as error:
        if "pickle" not in str(error):
            raise
        raise MomentsError(
            f"the executor cannot be sent this sweep ({error}): a function that makes the model "
            "must stand at the top of a module"
        ) from None
    finally:
        for future in waiting:
            future.cancel()


def _rows(work: _Work, piece: Piece) -> list[Row]:
    if os.getpid() == work.process:  # a thread: `sweep` suppresses warnings of the process
        return [row for rows in work.rows(piece) for row in rows]
    with without_warnings():  # the rows contain them
        return [row for rows in work.rows(piece) for row in rows]


def _first_done(waiting: set[Any]) -> tuple[set[Any], set[Any]]:
    return concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)


def _check_inputs(grid: Axes, inputs: Mapping[str, Any]) -> None:
    excluded = ("model", "theory", "progress")
    known = [name for name in inspect.signature(predict).parameters if name not in excluded]
    for name in inputs:
        if name not in known:
            raise unknown_name("argument", name, known)
        if name in grid.values:
            raise domain_error(name, inputs[name], "an axis or an argument, not both")


def _in_header(value: Any) -> Any:
    """An input in a file's header: a number itself, the digest of an array."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _in_header(entry) for name, entry in value.items()}
    array = np.asarray(value)
    return {"shape": list(array.shape), "sha256": _digest(f"{array.dtype}{array.tolist()}")}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _report(result: Sweep) -> None:
    """Give one warning for all configurations; DomainError if all are refused."""
    refused, noted = result.refused, result.warnings
    if len(refused) == result.axes.size:
        raise DomainError(f"every configuration is refused, the first: {refused[min(refused)]}")
    parts = []
    for what, notes in (("were refused", refused), ("left a formula's validity", noted)):
        if notes:
            first = notes[min(notes)]
            text = first if isinstance(first, str) else first[0]
            parts.append(
                f"{len(notes)} of {result.axes.size} configurations {what}, the first: {text}"
            )
    if parts:
        warnings.warn(
            f"{'; '.join(parts)} (to_frame() has all of them)", ValidityWarning, stacklevel=3
        )
