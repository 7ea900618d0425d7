"""A layer's program: what one layer computes, recorded once and replayed for every layer like it.

`Program` runs a layer forward and, gradient by gradient, backward on recorded numbers
(`formulas.algebra`): the layer's own parameters, the moments that enter, the gradient that
arrives. What remains, without the operations that nothing needs, is written as straight functions
of floats. No formula stands here: whatever the laws say is what is recorded.

Compiling programs does not pay (docs/cost.md, Programs of layers, and numba).

A program holds for layers of one shape, on values that take the same branches: its guards say so,
and a replay that meets another value returns None.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..formulas.algebra import FUNCTIONS, Guard, Line, Operation, Recorded, Tape, Unrecordable
from .composition import Component
from .state import Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Point, Record, Run

_Found = TypeVar("_Found")

_VALUES = (Kernel, Fluctuation, Signal, Gradient)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names to walk through of a class that holds numbers; None: it is no such class."""
    if kind in _VALUES or issubclass(kind, Component):
        names = getattr(kind, "_fields", None) or [f.name for f in dataclasses.fields(kind)]
        return tuple(name for name in names if name != "diagnostics")
    return None


def flattened(value: Any, numbers: list[Any], axes: bool = False) -> Any:
    """The structure of a state or a declaration, hashable; its numbers are appended.

    A number is a float, or an array (B,) of one for each of B configurations; with `axes` an array
    of any shape.

    Raises:
        Unrecordable: a state with other axes.
    """
    kind: Any = type(value)
    if kind is float or kind is Recorded or (kind is np.ndarray and (axes or value.ndim == 1)):
        numbers.append(value)
        return float
    if kind is Kernel and value.resolved:
        raise Unrecordable("tokens told apart")
    names = _fields(kind)
    if names is not None:
        return (kind, *[(name, flattened(getattr(value, name), numbers, axes)) for name in names])
    if kind is tuple:
        return (tuple, *[flattened(one, numbers, axes) for one in value])
    if kind is dict:
        return (dict, *[(name, flattened(one, numbers, axes)) for name, one in value.items()])
    if isinstance(value, np.floating):
        numbers.append(float(value))
        return float
    if isinstance(value, np.ndarray):
        raise Unrecordable("a state with axes")
    return value


def unflattened(structure: Any, numbers: Iterator[Any]) -> Any:
    """The value of that structure with those numbers."""
    if structure is float:
        return next(numbers)
    if not (isinstance(structure, tuple) and structure and isinstance(structure[0], type)):
        return structure
    kind, *rest = structure
    if kind is tuple:
        return tuple(unflattened(one, numbers) for one in rest)
    return kind(**{name: unflattened(one, numbers) for name, one in rest})


@functools.lru_cache(maxsize=512)
def fields_of(structure: Any, field: str = "") -> tuple[str, ...]:
    """Names of the fields that hold its numbers, in their order."""
    if structure is float:
        return (field,)
    if not (isinstance(structure, tuple) and structure and isinstance(structure[0], type)):
        return ()
    kind, *rest = structure
    named = ((field, one) for one in rest) if kind is tuple else rest
    return tuple(name for one, inner in named for name in fields_of(inner, one))


class Unlike(Exception):
    """Values that differ in more than numbers."""


def joined(values: Sequence[Any], join: Callable[[str, tuple[Any, ...]], Any]) -> Any:
    """One value of the structure that all have.

    Args:
        values: states or declarations.
        join: of a field's name and its numbers, the number that takes their place.

    Raises:
        Unlike: they differ in more than numbers.
    """
    numbers: list[list[Any]] = [[] for _ in values]
    structure, *others = (flattened(*one, True) for one in zip(values, numbers, strict=True))
    for other in others:
        if other != structure:
            raise Unlike(f"{structure!r} is not {other!r}")
    columns = zip(fields_of(structure), zip(*numbers, strict=True), strict=True)
    return unflattened(structure, (join(*column) for column in columns))


class Mixed(Exception):
    """Configurations that take different branches; `first`: (B,), those that take one of them."""

    def __init__(self, first: np.ndarray) -> None:
        self.first = first


class _Ahead(NamedTuple):
    """A layer's forward function, and the lines whose values it keeps for the way back."""

    function: Callable[..., Any]
    kept: tuple[int, ...]


class Program:
    """One layer's passes as functions of floats, on values that take the same branches.

    Attributes:
        output: structure of the signal that leaves.
    """

    def __init__(self, layer: Any, parameters: list[float], signal: Any, numbers: list[float]):
        """Run one layer forward on recorded numbers.

        Args:
            layer, parameters: the component's structure and its numbers.
            signal, numbers: of what enters, likewise.

        Raises:
            Unrecordable: the layer's formulas need plain numbers or arrays, or it has notes.
        """
        self._shape = layer, signal
        self._tape = tape = Tape()
        self._entering = [tape.input(v) for v in (*parameters, *numbers)]
        inputs = iter(self._entering)
        component = unflattened(layer, inputs)
        self._record = component.propagate(unflattened(signal, inputs), Run())
        output = self._record.output
        if any(one.output.notes for one in self._record.walk()):
            raise Unrecordable("the layer has something to say of these numbers")
        self._leaving: list[Any] = []
        self.output = flattened(output, self._leaving)
        self._split, self._guards = len(tape.operations), list(tape.guards)
        self._used: set[int] | None = None  # by the ways back that are recorded
        self._backs: list[_Recording] = []
        self._aheads: dict[bool, _Ahead] = {}

    def ahead(self, many: bool) -> _Ahead:
        """The forward function, for arrays where there are many configurations."""
        if (found := self._aheads.get(many)) is not None:
            return found
        kept = range(self._split) if self._used is None else sorted(self._used)
        held = [Line(place) for place in kept]
        function = self._function(held, self._guards, self._split, many)
        found = self._aheads[many] = _Ahead(function, tuple(kept))
        return found

    def _function(
        self, beside: list[Any], guards: list[Guard], stop: int, many: bool
    ) -> Callable[..., Any]:
        """Of what enters, what leaves and what is told beside it."""
        lines, wanted = self._tape.operations, _places([*self._leaving, *beside])
        text = _Text(lines, _needed(lines, [*wanted, *_places(guards)]), many, wanted)
        body = text.statements(0, stop, guards)
        result = f"({text.tuple_of(self._leaving)}),({text.tuple_of(beside)})"
        return text.function("ahead", self._entering, body, result)

    def again(self, entering: list[float]) -> Program:
        """The same operations on other numbers that enter, parameters first.

        Raises:
            Unrecordable: they are not the same.
        """
        layer, signal = self._shape
        found = Program(layer, entering, signal, [])
        if found._tape.operations != self._tape.operations[: self._split]:
            raise Unrecordable("numbers of other branches")
        return found

    def backward(self, step: Step, structure: Any, numbers: Any, many: bool) -> Any:
        """(structure, numbers) of the gradient below, from those of the gradient above.

        Raises:
            Unrecordable: as at construction.
        """
        for found in self._backs:
            if found.structure == structure:
                below = found.written(step.ahead, many)(step.kept, *numbers)
                if below is not None:
                    return found.below, below
        if len(self._backs) >= MOST_BRANCHES:
            raise Unrecordable("gradients take too many branches")
        # On what entered this very layer: another's would take other branches.
        found = _Recording(self.again(_first(step.entering)), structure, _first(numbers))
        self._backs.append(found)
        self._used = (self._used or set()) | found.used
        self._aheads.clear()
        below = found.written(step.ahead, many)(step.kept, *numbers)
        if below is None:
            raise Unrecordable("a branch that its own numbers do not take")
        return found.below, below


class Step(NamedTuple):
    """One layer on the way up.

    Attributes:
        program, ahead: that were used.
        kept: what the way back needs.
        entering: parameters and the signal's numbers.
    """

    program: Program
    ahead: _Ahead
    kept: Any
    entering: tuple[Any, ...]


class _Recording:
    """A program's way back for one structure of the gradient, on values of the same branches."""

    def __init__(self, program: Program, structure: Any, numbers: Any) -> None:
        tape = self._tape = program._tape
        tape.guards = []
        self.structure, self._start = structure, len(tape.operations)
        self._arriving = [tape.input(v) for v in numbers]
        self._leaving: list[Any] = []
        gradient = unflattened(structure, iter(self._arriving))
        self.below = flattened(program._record.backward(gradient).gradient_sent, self._leaving)
        self._stop, self._guards = len(tape.operations), list(tape.guards)
        self._wanted = _places(self._leaving)
        ends = [*self._wanted, *_places(self._guards)]
        self._needed = _needed(tape.operations, ends)
        own = range(self._start, self._stop)
        met = (tape.operations[place].operands for place in self._needed.intersection(own))
        ends += [one.place for operands in met for one in operands if type(one) is Line]
        self.used = {place for place in ends if place < program._split}
        self._texts: dict[tuple[bool, tuple[int, ...]], Callable[..., Any]] = {}

    def written(self, ahead: _Ahead, many: bool) -> Callable[..., Any]:
        """The way back from what that forward function kept."""
        found = self._texts.get((many, ahead.kept))
        if found is None and not self.used.issubset(ahead.kept):
            # Written when fewer ways back were known: the next forward function keeps more.
            raise Unrecordable("a way back that needs more than the way up kept")
        if found is None:
            text = _Text(self._tape.operations, self._needed, many, self._wanted)
            place = {line: k for k, line in enumerate(ahead.kept)}
            body = [f"x{line}=kept[{place[line]}]" for line in sorted(self.used)]
            body += text.statements(self._start, self._stop, self._guards)
            values = f"({text.tuple_of(self._leaving)})"
            found = text.function("behind", ["kept", *self._arriving], body, values)
            self._texts[many, ahead.kept] = found
        return found


MOST_BRANCHES = 12
"""Programs of one shape, and ways back of one program, beyond which nothing is gained."""
MOST_SHAPES = 256
"""Shapes of layers kept: some 0.6 MB each, measured on three."""


class Passage:
    """A stack of layers whose way up was replayed.

    Attributes:
        signals: structure and numbers of what entered every layer, and of what left the last; the
            first two numbers are a variance and a covariance.
    """

    def __init__(self, library: Library, signal: Signal) -> None:
        numbers: list[Any] = []
        structure = flattened(signal, numbers)
        self._library, self.signals = library, [(structure, tuple(numbers))]
        self._steps: list[Step] = []
        sizes = [v.size for v in numbers if isinstance(v, np.ndarray)]
        self.many, self.configurations = bool(sizes), max(sizes, default=1)

    def up(self, layers: Iterable[FlatLayer]) -> None:
        """Raises:
        Unrecordable: a layer cannot be written as a program, or has something to say.
        Mixed: configurations take different branches.
        """
        structure, numbers = self.signals[0]
        shape = self._library.shape(structure)
        self.many = self.many or any(layer.many for layer in layers)
        for layer in layers:
            programs = self._library.programs(layer.shape, shape)
            program, ahead, numbers, kept = _forward(
                programs, layer, structure, numbers, lambda one: one.ahead(self.many)
            )
            self._steps.append(Step(program, ahead, kept, (*layer.numbers, *self.signals[-1][1])))
            if program.output is not structure:
                structure = program.output
                shape = self._library.shape(structure)
            self.signals.append((structure, numbers))

    def down(self, gradient: Gradient) -> list[tuple[Any, Any]]:
        """Structure and numbers of the gradients at the same places.

        Raises:
            Unrecordable, Mixed: as `up`.
        """
        numbers: Any = []
        structure = flattened(gradient, numbers)
        found = [(structure, tuple(numbers))]
        for step in reversed(self._steps):
            structure, numbers = step.program.backward(step, structure, found[-1][1], self.many)
            found.append((structure, numbers))
        return found[::-1]


class FlatLayer(NamedTuple):
    """A layer's structure, its number in the library, and its numbers."""

    structure: Any
    shape: int
    numbers: list[Any]
    many: bool


class Library:
    """Programs of the layers met so far."""

    def __init__(self) -> None:
        self._programs: dict[tuple[int, int], list[Program]] = {}
        self._shapes: dict[Any, int] = {}
        self._last: tuple[Any, int] = (None, -1)
        self._met: dict[int, int] = {}
        self.busy = threading.Lock()

    def shape(self, structure: Any) -> int:
        """A number for a structure."""
        if structure is not self._last[0]:  # a stack's layers share one, which is long to hash
            self._last = structure, self._shapes.setdefault(structure, len(self._shapes))
        return self._last[1]

    def programs(self, layer: int, signal: int) -> list[Program]:
        """Those of one shape, which become the last to be forgotten."""
        found = self._programs.pop((layer, signal), [])
        self._programs[layer, signal] = found
        if len(self._programs) > MOST_SHAPES:
            del self._programs[next(iter(self._programs))]
        return found

    def flat(self, layers: Iterable[Component]) -> list[FlatLayer]:
        """The layers' bodies, of which equal ones are one object.

        Raises:
            Unrecordable: a layer holds arrays with other axes than configurations.
        """
        known: dict[int, FlatLayer] = {}
        found: list[FlatLayer] = []
        for layer in layers:
            if id(layer) not in known:
                known[id(layer)] = self._flat(layer, found[-1] if found else None)
            found.append(known[id(layer)])
        return found

    def _flat(self, layer: Component, before: FlatLayer | None) -> FlatLayer:
        """A layer's body, which may have the structure of the one before."""
        if before is not None:
            numbers = _flattener(before.structure)(layer)
            if numbers is not None:
                return before._replace(numbers=numbers, many=False)
        own: list[Any] = []
        structure = flattened(layer, own)
        many = any(isinstance(v, np.ndarray) for v in own)
        return FlatLayer(structure, self.shape(structure), own, many)

    def worth(self, layers: Sequence[FlatLayer], configurations: int = 1) -> bool:
        """Whether so many layers of these shapes were met that writing programs pays."""
        for layer in layers:
            met = 1 + configurations // AS_LONG
            self._met[layer.shape] = self._met.get(layer.shape, 0) + met
        return all(self._met[layer.shape] >= WORTH for layer in layers)

    def tried(self, replay: Callable[[], _Found | None]) -> _Found | None:
        """What that finds; None where layers cannot be replayed, or another thread does so."""
        if not self.busy.acquire(blocking=False):
            return None
        try:
            return replay()
        except NOT_REPLAYED:
            return None
        finally:
            self.busy.release()


WORTH = 64
"""Layers of one shape from which on they are replayed: to record one and write its functions was
measured to cost as much as 50 to 70 plain ones."""

AS_LONG = 140
"""Configurations at once that a plain layer was measured to take twice as long for as for one."""

LIBRARY = Library()


# --- in place of a record -------------------------------------------------------------------------


class Replayed(Record):
    """The record of a stack of layers that were replayed: what passed between them is known, and
    what passed inside a layer is found when asked for, by the plain passes of that layer."""

    def __init__(
        self,
        component: Component,
        signals: Sequence[tuple[Any, Any]],
        gradients: Sequence[tuple[Any, Any]] | None = None,
        passage: Passage | None = None,
    ) -> None:
        self.component, self.layer = component, 0
        self._signals, self._gradients, self._passage = signals, gradients, passage
        self.input, self.output = built(signals[0]), built(signals[-1])
        self.pullback = self.memory = self.pulled = self.sent_to_memory = None
        self.received = self.sent = None
        if gradients is not None:
            self.received, self.sent = built(gradients[-1]), built(gradients[0])

    def backward(self, gradient: Gradient, run: Run | None = None) -> Record:
        if (passage := self._passage) is not None:
            gradients = LIBRARY.tried(lambda: passage.down(gradient))
            if gradients is not None:
                return Replayed(self.component, self._signals, gradients)
        run = Run() if run is None else run
        return self._plain().backward(gradient, run)

    def _plain(self) -> Record:
        return self.component.propagate(self.input, Run())

    @functools.cached_property
    def children(self) -> tuple[Record, ...]:  # type: ignore[override]
        """Of the layers, each with what passed inside it."""
        found = []
        for k, layer in enumerate(self.component.children):
            record = layer.propagate(built(self._signals[k]), Run())
            if self._gradients is not None:
                record = record.backward(built(self._gradients[k + 1]))
            found.append(record)
        return tuple(found)

    def notes(self) -> list[tuple[int, str, str]]:
        """None: where there was something to say, nothing was recorded."""
        return []

    def between_layers(self) -> list[Point]:
        return self._between

    def stream(self) -> list[tuple[Any, ...]]:
        """Variance and correlation at every point of the stream, of signal and gradient."""
        gradients = self._gradients
        assert gradients is not None
        found = []
        for (_, signal), (_, gradient) in zip(self._signals, gradients, strict=True):
            (own, pairs), (sent, both) = signal[:2], gradient[:2]
            found.append((own, ratio_or_zero(pairs, own), sent, ratio_or_zero(both, sent)))
        return found

    @functools.cached_property
    def _between(self) -> list[Point]:
        last = [None] * len(self._signals) if self._gradients is None else self._gradients
        return [
            Point(number, "stream", built(signal), gradient and built(gradient))
            for number, (signal, gradient) in enumerate(zip(self._signals, last, strict=True))
            if number
        ]

    def __reduce__(self) -> Any:
        return Replayed, (self.component, self._signals, self._gradients)


NOT_REPLAYED = (Unrecordable, Mixed, ArithmeticError, ValueError)
"""What the plain passes are for: they compute what can be computed, and say what is wrong."""


def built(value: tuple[Any, Any]) -> Any:
    """The state of a structure and its numbers."""
    structure, numbers = value
    return unflattened(structure, iter(numbers))


@functools.lru_cache(maxsize=64)
def _flattener(structure: Any) -> Callable[[Any], list[float] | None]:
    """`flattened` of what may have this structure, with a float for every number: its numbers, or
    None where it has another."""
    text, count = _Text([], set(), False), itertools.count()
    body: list[str] = []
    numbers: list[str] = []

    def of(part: Any, value: str) -> None:
        if part is float:
            body.append(f"if type({value}) is not float: return None")
            numbers.append(value)
            return
        if not (isinstance(part, tuple) and part and isinstance(part[0], type)):
            constant = text.name(part)
            body.append(f"if {value} is not {constant} and {value} != {constant}: return None")
            return
        kind, *rest = part
        body.append(f"if type({value}) is not {text.name(kind)}: return None")
        places = [f"v{next(count)}" for _ in rest]
        if kind is dict:
            names = text.name([name for name, _ in rest])
            body.append(f"if [*{value}] != {names}: return None")
        if kind in (dict, tuple):
            if kind is tuple:
                body.append(f"if len({value}) != {len(rest)}: return None")
            inner = f"{value}.values()" if kind is dict else value
            body.extend([f"{''.join(f'{place},' for place in places)}={inner}"] if places else [])
        else:
            body.extend(f"{p}={value}.{name}" for p, (name, _) in zip(places, rest, strict=True))
        for place, one in zip(places, rest, strict=True):
            of(one if kind is tuple else one[1], place)

    of(structure, "layer")
    return text.function("take", ["layer"], body, f"[{','.join(numbers)}]")


def replayed(stack: Component, signal: Signal) -> Record | None:
    """The record of a signal's way up through a chain of layers; None where the plain way is."""

    def replay() -> Record | None:
        layers = LIBRARY.flat([layer.children[0] for layer in stack.children])
        passage = Passage(LIBRARY, signal)
        if not LIBRARY.worth(layers, passage.configurations):
            return None
        passage.up(layers)
        return Replayed(stack, passage.signals, passage=passage)

    return LIBRARY.tried(replay)


def _first(numbers: Iterable[Any]) -> list[float]:
    """Those of the first configuration."""
    return [float(v[0]) if isinstance(v, np.ndarray) else v for v in numbers]


def _forward(
    programs: list[Program],
    layer: FlatLayer,
    signal: Any,
    numbers: Any,
    of: Callable[[Program], Any],
) -> tuple[Program, Any, Any, Any]:
    """The program that these values take, its forward function as `of` it, and what that gives."""
    own = layer.numbers
    for program in programs:
        ahead = of(program)
        found = ahead.function(*own, *numbers)
        if found is not None:
            return program, ahead, *found
    if len(programs) >= MOST_BRANCHES:
        raise Unrecordable("layers take too many branches")
    program = Program(layer.structure, _first(own), signal, _first(numbers))
    programs.append(program)
    ahead = of(program)
    found = ahead.function(*own, *numbers)
    if found is None:
        raise Unrecordable("a branch that its own numbers do not take")
    return program, ahead, *found


def _uniform(condition: Any) -> bool:
    """What all configurations answer.

    Raises:
        Mixed: some one thing, and some the other.
    """
    if np.ndim(condition) == 0:
        return bool(condition)
    held = np.asarray(condition, dtype=bool)
    some, every = bool(held.any()), bool(held.all())
    if some != every:
        raise Mixed(held)
    return every


# --- from a tape to functions ---------------------------------------------------------------------


def _places(held: Iterable[Any]) -> list[int]:
    """On the tape, of lines, recorded numbers and guards; plain numbers have none."""
    return [getattr(one, "line", one).place for one in held if type(one) is not float]


def _needed(lines: list[Operation], wanted: list[int]) -> set[int]:
    """The lines that those wanted stand on."""
    found: set[int] = set()
    todo = list(wanted)
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            todo += [one.place for one in lines[index].operands if type(one) is Line]
    return found


class _Text:
    """Python text of a stretch of a tape: names and numbers, of this module's own making."""

    def __init__(
        self, lines: list[Operation], needed: set[int], many: bool, kept: Iterable[int] = ()
    ) -> None:
        """`kept`: lines that stand to the end."""
        self.lines, self.needed, self.many, self.kept = lines, needed, many, set(kept)
        kind = "array" if many else "number"
        self.environment: dict[str, Any] = {
            name: getattr(function, kind) for name, function in FUNCTIONS.items()
        }
        self.environment |= {"inf": math.inf, "nan": math.nan, "uniform": _uniform}

    def name(self, one: Any) -> str:
        if type(one) is Recorded:
            one = one.line
        if type(one) is Line:
            return f"x{one.place}"
        if type(one) is float:
            return f"({one!r})"
        key = f"c{len(self.environment)}"
        self.environment[key] = one
        return key

    def statements(self, start: int, stop: int, guards: list[Guard]) -> list[str]:
        waiting = iter(guards)
        guard, found = next(waiting, None), []
        last = self._last_uses(start, stop, guards) if self.many else {}
        for index in range(start, stop + 1):
            while guard is not None and guard.after == index:
                unmet, met = "not " if guard.outcome else "", self.name(guard.line)
                met = f"uniform({met})" if self.many else met
                found.append(f"if {unmet}{met}: return None")
                guard = next(waiting, None)
            if index < stop and index in self.needed:
                operation, operands = self.lines[index]
                if operation == "input":
                    continue
                if operation == "whole":
                    function, *rest = map(self.name, operands)
                    function += ".array" if self.many else ".number"
                    text = f"{function}({','.join(rest)})"
                elif operation == "item":
                    text = f"{self.name(operands[0])}[{operands[1]}]"
                else:
                    text = self._of(operation).format(*map(self.name, operands))
                found.append(f"x{index}={text}")
            if index in last:
                found.append(f"del {','.join(f'x{one}' for one in last[index])}")
        return found

    def _last_uses(self, start: int, stop: int, guards: list[Guard]) -> dict[int, list[int]]:
        """The lines of this stretch that nothing needs behind an operation: arrays that are let go
        leave their memory, which is near, to the next."""
        used = {g.line.place: g.after for g in guards}
        for index in range(start, stop):
            if index in self.needed:
                lines = (one.place for one in self.lines[index].operands if type(one) is Line)
                used |= {line: max(index, used.get(line, 0)) for line in lines}
        found: dict[int, list[int]] = {}
        for line, at in used.items():
            if line >= start and line not in self.kept and self.lines[line].name != "input":
                found.setdefault(at, []).append(line)
        return found

    def _of(self, operation: str) -> str:
        text = FUNCTIONS[operation].text
        if not self.many or " if " not in text:
            return text
        return f"{operation}({{}},{{}},{{}})" if operation == "where" else f"{operation}({{}},{{}})"

    def tuple_of(self, values: list[Any]) -> str:
        return "".join(f"{self.name(v)}," for v in values)

    def function(
        self, name: str, arguments: list[Any], body: list[str], result: str
    ) -> Callable[..., Any]:
        names = ",".join(one if type(one) is str else self.name(one) for one in arguments)
        text = "\n ".join([f"def {name}({names}):", *body, f"return {result}"])
        exec(compile(text, "<program of a layer>", "exec"), self.environment)
        made: Callable[..., Any] = self.environment[name]
        return made
