"""`sweep`: predictions over a grid, together where they can be, stored as they come."""

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

from ..engine.structure import Unlike
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
"""Configurations in one pass: twice the cost each of ten times as many, and results to keep every
second or so."""

NUMBERS = 2**24
"""Numbers that one pass may keep (128 MiB)."""

FEWEST_TOGETHER = 5
"""Fewer go one by one: arrays cost about three times as much as plain numbers."""

SAME = 1e-7
"""Relative difference up to which a configuration among others and alone are the same: single
predictions read attention's statistics off a profile whose error is below 1e-8."""

IN_FLIGHT, LEAST_PIECES = 64, 32
"""Pieces of work that an executor is given at a time, and into how many work is cut for it."""

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

    Configurations of tokens alike that differ in numbers alone, in depth too, go through the engine
    together, a thousand for the price of ten; others one by one. Each is what `predict` gives of it
    alone: to 1e-12 those that go alone, to 1e-7 those that go together, which is tried on two of
    every piece.

    Args:
        model: what varies; or a function that makes it of those axes that are its parameters.
        axes: values by name. A field of the model ("layers", "norm"), of its parts
            ("weights.query", "embedding.token_variance", "head.output_scale"), an argument of
            `predict` ("variance", "correlation", "grad_variance", "grad_correlation", "theory",
            "tokens", "batch"), "scheme" (None: as declared) and its options ("scheme.k").
        theory: as of `predict`.
        executor: any of concurrent.futures, or of Dask (`Client.get_executor()`): pieces of work
            are sent there; None: here.
        path: a file that results are appended to as they come, and read from: a sweep that was
            killed goes on where it was, and one that differs, or is of another version of the
            package, is refused.
        profile: whether to keep every layer, not only the ends.
        progress: whether to show a bar on standard error; None: in a terminal.
        inputs: further arguments of `predict`, the same for all.

    Returns:
        The results in the order of the axes, the last varying fastest. What the theory refuses is
        kept with its reason, and so are warnings.

    Raises:
        DomainError: no such field or argument; every configuration is refused; or `path` holds
            something else.
        MomentsError: the executor broke down.

    Warns:
        ValidityWarning: once, where configurations were refused or left a formula's validity.
    """
    grid = Axes.of(model, axes)
    check_choice("theory", theory, THEORIES)
    check_flag("profile", profile)
    _check_inputs(grid, inputs)
    if executor is not None and not hasattr(executor, "submit"):
        raise domain_error("executor", executor, "a concurrent.futures.Executor, or None")
    work = _Work(grid, theory, dict(inputs), profile)
    found = Sweep.empty(grid, theory, dict(inputs), profile)
    with ExitStack() as stack:
        store: Store | None = None
        if path is not None:
            store, rows = stack.enter_context(opened(path, work.header()))
            found.add(rows)
        missing = found.missing()
        stack.enter_context(without_warnings())
        shown = sys.stderr.isatty() if progress is None else progress
        bar = progress_bar("configurations", grid.size, grid.size - len(missing))
        advance = stack.enter_context(bar) if shown else None
        for more in _results(work, missing, executor):
            if store is not None:
                store.append(more)
            found.add(more)
            if advance is not None:
                advance(len(more))
    _report(found)
    return found


class _Work:
    """What every piece of a sweep needs; it crosses to other processes."""

    def __init__(self, axes: Axes, theory: Theory, inputs: dict[str, Any], profile: bool) -> None:
        self.axes, self.theory, self.inputs, self.profile = axes, theory, inputs, profile
        self.process = os.getpid()

    def header(self) -> dict[str, Any]:
        """What a file must agree with to be gone on with."""
        made = self.axes.model
        if isinstance(made, Transformer):
            model: Any = made.to_dict()
        else:
            names = self.axes.made
            each = [made(**dict(zip(names, v, strict=True))).to_dict() for v in self._made()]
            model = {"made of": list(names), "sha256": _digest(json.dumps(each))}
        return {
            "model": model,
            "axes": {name: list(values) for name, values in self.axes.values.items()},
            "theory": self.theory,
            "inputs": {name: _in_header(value) for name, value in self.inputs.items()},
            "profile": self.profile,
        }

    def _made(self) -> Iterator[tuple[Value, ...]]:
        return itertools.product(*(self.axes.values[name] for name in self.axes.made))

    def pieces(self, missing: Sequence[int], spread: bool) -> Iterator[Piece]:
        """Indices and values of as many as go together; of fewer, to `spread` them."""
        most = self._most()
        if spread:
            most = max(1, min(most, len(missing) // LEAST_PIECES))
        wanted = set(missing)
        piece: Piece = []
        for index, values in enumerate(self.axes.points()):
            if index in wanted:
                piece.append((index, values))
                if len(piece) == most:
                    yield piece
                    piece = []
        if piece:
            yield piece

    def _most(self) -> int:
        depths = [n for n in self.axes.values.get("layers", ()) if isinstance(n, int)]
        try:
            model, arguments = self.axes.configure(next(self.axes.points()))
            theory: Any = arguments.get("theory") or self.theory
            alone = kind(model, theory, self._given(arguments)) is None
        except MomentsError:
            return FEWEST_TOGETHER
        if alone:
            return 1
        return int(max(1, min(MOST_TOGETHER, NUMBERS // (300 * max([model.layers, *depths])))))

    def _given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return self.inputs | {k: v for k, v in arguments.items() if k != "theory"}

    def rows(self, piece: Piece) -> Iterator[list[Row]]:
        groups: dict[Any, list[_Point]] = {}
        known: dict[tuple[str, ...], Transformer] = {}
        for index, values in piece:
            key: Any = self.axes.key(values)
            try:
                if key not in known:
                    known[key] = self.axes.declared(values)
                model, arguments = known[key], self.axes.arguments(values)
                theory: Any = arguments.get("theory") or self.theory
                check_choice("theory", theory, THEORIES)
                point = _Point(index, model, theory, self._given(arguments))
                shared = None
                if set(point.given) <= {*MOMENTS, "batch", "tokens"}:
                    shared = kind(model, theory, point.given)
            except MomentsError as error:
                yield [Row(index, refused=str(error))]
                continue
            key = ("alone", index) if shared is None else (shared, frozenset(point.given))
            groups.setdefault(key, []).append(point)
        for points in groups.values():
            yield from self._group(points)

    def _group(self, points: list[_Point]) -> Iterator[list[Row]]:
        """Of one kind: together where both ends are the same alone and nobody has a note."""
        if len(points) < FEWEST_TOGETHER:
            yield from ([self._alone(point)] for point in points)
            return
        ends = [self._alone(points[0]), self._alone(points[-1])]
        yield ends
        middle = points[1:-1]
        clean = [not row.warnings and row.refused is None for row in ends]
        if all(clean):
            rows = self._together(points)
            if rows is not None and all(map(_same, ends, (rows[0], rows[-1]))):
                yield rows[1:-1]
                return
        if not any(clean):
            yield from ([self._alone(point)] for point in middle)
            return
        half = len(middle) // 2
        yield from self._group(middle[:half])
        yield from self._group(middle[half:])

    def _together(self, points: Sequence[_Point]) -> list[Row] | None:
        """None where one of them has something to say, or they do not go together after all."""
        first = points[0]
        moments = {
            name: np.array([point.given[name] for point in points], dtype=float)
            for name in MOMENTS
            if first.given.get(name) is not None
        }
        try:
            found = predict_together(
                [point.model for point in points],
                first.theory,
                moments,
                first.given.get("batch", 1),
            )
        except (Unlike, MomentsError, ValueError, TypeError, ArithmeticError):
            # Branches on one number refuse arrays of them: then one by one.
            return None
        if found.warnings:
            return None
        return [self._row(point, found, i) for i, point in enumerate(points)]

    def _alone(self, point: _Point) -> Row:
        try:
            p = predict(point.model, theory=point.theory, **point.given)
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
        kept = tuple(v.tolist() for v in stream) if self.profile else None
        return Row(point.index, plain, p.warnings, None, kept)


@dataclass(frozen=True, slots=True)
class _Point:
    """One configuration, declared, and the other arguments of `predict`."""

    index: int
    model: Transformer
    theory: Theory
    given: dict[str, Any]


def _same(alone: Row, together: Row) -> bool:
    return alone.values.keys() == together.values.keys() and all(
        np.isclose(value, together.values[name], rtol=SAME, atol=SAME * 1e-3)
        for name, value in alone.values.items()
    )


def _results(
    work: _Work, missing: Sequence[int], executor: concurrent.futures.Executor | None
) -> Iterator[list[Row]]:
    """Rows as they come: here in order, from an executor piece by piece as each is done."""
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
    if os.getpid() == work.process:  # a thread of one that keeps warnings quiet for all
        return [row for rows in work.rows(piece) for row in rows]
    with without_warnings():  # they stand in the results, and one is given at the end
        return [row for rows in work.rows(piece) for row in rows]


def _first_done(waiting: set[Any]) -> tuple[set[Any], set[Any]]:
    return concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)


def _check_inputs(grid: Axes, inputs: Mapping[str, Any]) -> None:
    own = ("model", "theory", "progress")
    known = [name for name in inspect.signature(predict).parameters if name not in own]
    for name in inputs:
        if name not in known:
            raise unknown_name("argument", name, known)
        if name in grid.values:
            raise domain_error(name, inputs[name], "an axis or an argument, not both")


def _in_header(value: Any) -> Any:
    """An input as a file's header has it: numbers as they are, arrays by their digest."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _in_header(one) for name, one in value.items()}
    array = np.asarray(value)
    return {"shape": list(array.shape), "sha256": _digest(f"{array.dtype}{array.tolist()}")}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _report(found: Sweep) -> None:
    """One warning for all that was refused or doubtful; an error where nothing is left."""
    refused, noted = found.refused, found.warnings
    if len(refused) == found.axes.size:
        raise DomainError(f"every configuration is refused, the first: {refused[min(refused)]}")
    parts = []
    for what, notes in (("were refused", refused), ("left a formula's validity", noted)):
        if notes:
            first = notes[min(notes)]
            text = first if isinstance(first, str) else first[0]
            parts.append(
                f"{len(notes)} of {found.axes.size} configurations {what}, the first: {text}"
            )
    if parts:
        warnings.warn(
            f"{'; '.join(parts)} (to_frame() has all of them)", ValidityWarning, stacklevel=3
        )
