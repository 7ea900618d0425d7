"""Numbers that remember how they came about: a number system that writes a program.

A `Recorded` stands where a float would. What is computed with it is computed at once, so that the
code that uses it need not know, and noted on a `Tape`: operations with their operands, equal ones
once. A branch on a recorded number becomes a guard, which says on which values the tape holds.
Whatever would turn one into a plain number unseen (`float`, `math`, formatting, hashing) raises
`Unrecordable`; functions that need plain numbers are marked `whole` and stand on the tape as one
operation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .algebra import FLOAT, NUMPY


class Unrecordable(TypeError):
    """What is computed cannot be written as a program."""


class Operation(NamedTuple):
    """One line of a tape.

    Attributes:
        name: of a function in `FUNCTIONS`, "whole" or "item".
        operands: indices of lines (int) or constants (float); of "whole" a function, constants of
            any kind and lines.
    """

    name: str
    operands: tuple[Any, ...]


class Line(NamedTuple):
    """An operand that is the result of an operation."""

    index: int  # type: ignore[assignment]


class Guard(NamedTuple):
    """After so many operations, the value of a line is true, or is not."""

    after: int
    line: Line
    outcome: bool


class Tape:
    """Operations in their order, and the guards between them.

    Attributes:
        known: where each operation stands; what is not there is noted again.
        held: outcomes that guards stand for already.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.guards: list[Guard] = []
        self.known: dict[Operation, Line] = {}
        self.held: dict[Line, bool] = {}

    def input(self, value: float) -> Recorded:
        self.operations.append(Operation("input", ()))
        return Recorded(float(value), Line(len(self.operations) - 1), self)

    def note(self, name: str, operands: tuple[Any, ...]) -> Line:
        operation = Operation(name, operands)
        found = self.known.get(operation)
        if found is None:
            self.operations.append(operation)
            found = self.known[operation] = Line(len(self.operations) - 1)
        return found

    def guard(self, line: Line, outcome: bool) -> None:
        if line not in self.held:
            self.held[line] = outcome
            self.guards.append(Guard(len(self.operations), line, outcome))


def _operand(value: Any) -> Any:
    return value.line if type(value) is Recorded else float(value)


def _plain(value: Any) -> Any:
    return value.value if type(value) is Recorded else value


def _tape_of(values: Any) -> Tape | None:
    for value in values:
        if type(value) is Recorded:
            return value.tape
    return None


def apply(name: str, *values: Any) -> Any:
    """A function of `FUNCTIONS`, noted where an operand is recorded and what it gives is new."""
    tape = _tape_of(values)
    result = FUNCTIONS[name].number(*map(_plain, values))
    if tape is None:
        return result
    if name in _SHORTER and (known := _SHORTER[name](*values)) is not None:
        return known
    return Recorded(result, tape.note(name, tuple(map(_operand, values))), tape)


def _is(value: Any, constant: float) -> bool:
    return type(value) is not Recorded and value == constant


def _sum(a: Any, b: Any) -> Any:
    return b if _is(a, 0.0) else a if _is(b, 0.0) else None


def _product(a: Any, b: Any) -> Any:
    """Nothing of what is finite is nothing, and what is not finite shows in the moments."""
    if _is(a, 0.0) or _is(b, 0.0):
        return 0.0
    return b if _is(a, 1.0) else a if _is(b, 1.0) else None


def _power(base: Any, exponent: Any) -> Any:
    if _is(exponent, 0.5):
        return apply("sqrt", base)
    for whole_number in (1, 2, 3, 4):
        if _is(exponent, whole_number):
            return functools.reduce(operator.mul, [base] * whole_number)
    return None


# What an operation with a constant comes to without one: an operand, a constant, or products.
_SHORTER: dict[str, Callable[[Any, Any], Any]] = {
    "add": _sum,
    "subtract": lambda a, b: a if _is(b, 0.0) else None,
    "multiply": _product,
    "divide": lambda a, b: a if _is(b, 1.0) else 0.0 if _is(a, 0.0) else None,
    "power": _power,
}


class Recorded:
    """A number on a tape."""

    __slots__ = ("line", "tape", "value")
    ndim, shape, size = 0, (), 1

    def __init__(self, value: Any, line: Line, tape: Tape) -> None:
        self.value, self.line, self.tape = value, line, tape

    def __bool__(self) -> bool:
        outcome = bool(self.value)
        self.tape.guard(self.line, outcome)
        return outcome

    def __float__(self) -> float:
        raise Unrecordable("a recorded number becomes a plain one")

    __int__ = __index__ = __round__ = __float__

    def __hash__(self) -> int:
        raise Unrecordable("a recorded number as a key")

    def __format__(self, spec: str) -> str:
        raise Unrecordable("a recorded number becomes a word")

    def __repr__(self) -> str:
        return f"Recorded({self.value})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Unrecordable("a recorded number becomes an array")

    def __getitem__(self, key: Any) -> Recorded:
        if key == ():
            return self
        raise Unrecordable("a recorded number has no axes")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or name is None or options:
            raise Unrecordable(f"numpy.{ufunc.__name__}.{method}")
        return apply(name, *inputs)

    def __array_function__(self, function: Any, _types: Any, args: Any, options: Any) -> Any:
        name = function.__name__
        if name == "ndim":
            return 0
        if name == "shape":
            return ()
        if name == "where" and len(args) == 3:
            return apply("where", *args)
        if name == "clip":
            x, low, high = args
            return apply("minimum", apply("maximum", x, low), high)
        if name in ("max", "min", "mean", "amax", "amin"):
            return args[0]
        if name in ("any", "all"):
            return bool(args[0])
        raise Unrecordable(f"numpy.{name}")


class _Function(NamedTuple):
    """How an operation is computed: on floats, on arrays, and as Python text."""

    number: Callable[..., Any]
    array: Callable[..., Any]
    text: str  # for floats; that of arrays is the function's name


def sign(x: float) -> float:
    return math.copysign(1.0, x) if x else 0.0


FUNCTIONS: dict[str, _Function] = {
    "add": _Function(operator.add, np.add, "{}+{}"),
    "subtract": _Function(operator.sub, np.subtract, "{}-{}"),
    "multiply": _Function(operator.mul, np.multiply, "{}*{}"),
    "divide": _Function(operator.truediv, np.divide, "{}/{}"),
    "power": _Function(operator.pow, np.power, "{}**{}"),
    "negative": _Function(operator.neg, np.negative, "-{}"),
    "absolute": _Function(abs, np.absolute, "abs({})"),
    "less": _Function(operator.lt, np.less, "{}<{}"),
    "less_equal": _Function(operator.le, np.less_equal, "{}<={}"),
    "greater": _Function(operator.gt, np.greater, "{}>{}"),
    "greater_equal": _Function(operator.ge, np.greater_equal, "{}>={}"),
    "equal": _Function(operator.eq, np.equal, "{}=={}"),
    "not_equal": _Function(operator.ne, np.not_equal, "{}!={}"),
    "maximum": _Function(max, np.maximum, "{0} if {0}>={1} else {1}"),
    "minimum": _Function(min, np.minimum, "{0} if {0}<={1} else {1}"),
    "where": _Function(lambda c, a, b: a if c else b, np.where, "{1} if {0} else {2}"),
    "sign": _Function(sign, np.sign, "sign({})"),
    "copysign": _Function(math.copysign, np.copysign, "copysign({},{})"),
    "isinf": _Function(math.isinf, np.isinf, "isinf({})"),
    "isfinite": _Function(math.isfinite, np.isfinite, "isfinite({})"),
    "sqrt": _Function(math.sqrt, np.sqrt, "sqrt({})"),
    "exp": _Function(math.exp, np.exp, "exp({})"),
    "expm1": _Function(math.expm1, np.expm1, "expm1({})"),
    "log": _Function(math.log, np.log, "log({})"),
    "log1p": _Function(math.log1p, np.log1p, "log1p({})"),
    "asin": _Function(math.asin, np.arcsin, "asin({})"),
    "atan": _Function(math.atan, np.arctan, "atan({})"),
    "tanh": _Function(math.tanh, np.tanh, "tanh({})"),
}
_UFUNCS = {name: name for name in FUNCTIONS} | {
    "arcsin": "asin",
    "arctan": "atan",
    "true_divide": "divide",
}


def _both_sides(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def left(self: Recorded, other: Any) -> Any:
        if isinstance(other, np.ndarray) and other.ndim:
            raise Unrecordable("a recorded number meets an array")
        return apply(name, self, other)

    def right(self: Recorded, other: Any) -> Any:
        return apply(name, other, self)

    return left, right


for _method, _name in (
    ("add", "add"),
    ("sub", "subtract"),
    ("mul", "multiply"),
    ("truediv", "divide"),
    ("pow", "power"),
):
    _left, _right = _both_sides(_name)
    setattr(Recorded, f"__{_method}__", _left)
    setattr(Recorded, f"__r{_method}__", _right)
for _method, _name in (
    ("lt", "less"),
    ("le", "less_equal"),
    ("gt", "greater"),
    ("ge", "greater_equal"),
    ("eq", "equal"),
    ("ne", "not_equal"),
):
    setattr(Recorded, f"__{_method}__", _both_sides(_name)[0])
for _method, _name in (("neg", "negative"), ("abs", "absolute")):
    setattr(
        Recorded, f"__{_method}__", functools.partialmethod(lambda self, n: apply(n, self), _name)
    )


def whole(function: Callable[..., Any], array: Callable[..., Any] | None = None) -> Any:
    """Mark a function that needs plain numbers: it is noted as one operation.

    Args:
        function: of numbers and hashable constants, by position; gives a number or a tuple of them.
        array: the same for arrays (B,); None: one by one.
    """

    @functools.wraps(function)
    def called(*values: Any) -> Any:
        tape = _tape_of(values)
        found = function(*map(_plain, values))
        if tape is None:
            return found
        operands = tuple(v.line if type(v) is Recorded else v for v in values)
        line = tape.note("whole", (called, *operands))
        if not isinstance(found, tuple):
            return Recorded(found, line, tape)
        items = (Recorded(one, tape.note("item", (line, k)), tape) for k, one in enumerate(found))
        return tuple(items)

    operation: Any = called
    operation.array, operation.number = array or _one_by_one(function), function
    return called


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*values: Any) -> Any:
        if not any(np.ndim(v) for v in values):
            return function(*values)
        rows = zip(*np.broadcast_arrays(*values), strict=True)
        return np.array([function(*(v.item() for v in row)) for row in rows]).T

    return called


def _by_quadrature(name: str) -> Any:
    return whole(getattr(FLOAT, name), getattr(NUMPY, name))


# The number system of recorded numbers; on plain ones it is FLOAT.
RECORDED = SimpleNamespace(
    **{
        **vars(FLOAT),
        **{
            name: functools.partial(apply, name)
            for name in ("sqrt", "exp", "expm1", "log", "log1p", "asin", "atan", "tanh")
        },
        "normal_cdf": whole(lambda x: float(NUMPY.normal_cdf(x)), NUMPY.normal_cdf),
        "expect": _by_quadrature("expect"),
        "expect_pair": _by_quadrature("expect_pair"),
    }
)


def is_number(value: Any) -> bool:
    """Whether a value is one number of a configuration without axes: a float, or a recorded one."""
    return type(value) is float or type(value) is Recorded


def number_system(value: Any) -> Any:
    """That of a configuration's numbers: floats, recorded ones, or arrays with axes."""
    kind = type(value)
    return FLOAT if kind is float else RECORDED if kind is Recorded else NUMPY


def as_number(value: Any) -> Any:
    """One number as a float, a recorded one as it is."""
    return value if type(value) is Recorded else float(value)
