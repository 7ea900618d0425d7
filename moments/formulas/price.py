"""Forward-mode differentiation of formulas, so that a derived law is never written by hand.

A formula is traced once with `_Step`s, which record every operation as code together with its
derivative. The recorded steps that the derivative needs are compiled to a new formula, valid for
every number system.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_FUNCTIONS = {
    "sqrt": "{d} / (2 * {y})",
    "exp": "{y} * {d}",
    "expm1": "({y} + 1) * {d}",
    "log": "{d} / {0}",
    "log1p": "{d} / (1 + {0})",
    "asin": "{d} / m.sqrt((1 - {0}) * (1 + {0}))",
    "atan": "{d} / (1 + {0} ** 2)",
    "tanh": "(1 - {y} ** 2) * {d}",
    "normal_cdf": "m.exp(-({0} ** 2) / 2) / m.sqrt(2 * m.pi) * {d}",
}
"""Function of a number system -> derivative of y = f({0}), if its argument has derivative d."""


class _Step:
    """A recorded operation of a formula; `slope` names the step with its derivative, "" if zero."""

    def __init__(
        self, lines: dict[str, str], code: str, *operands: Any, slopes: tuple[str, ...] = ()
    ) -> None:
        names = [getattr(operand, "name", operand) for operand in operands]
        self.lines, self.name, self.slope = lines, f"_{len(lines)}", ""
        lines[self.name] = code.format(*names)
        for operand, slope in zip(operands, slopes, strict=False):
            if d := getattr(operand, "slope", ""):
                term = _Step(lines, slope.format(*names, d=d, y=self.name)).name
                self.slope = _Step(lines, f"{self.slope} + {term}").name if self.slope else term

    def _then(self, code: str, *operands: Any, slopes: tuple[str, ...]) -> _Step:
        return _Step(self.lines, code, *operands, slopes=slopes)

    def __add__(self, other: Any) -> _Step:
        return self._then("{} + {}", self, other, slopes=("{d}", "{d}"))

    def __sub__(self, other: Any) -> _Step:
        return self._then("{} - {}", self, other, slopes=("{d}", "-{d}"))

    def __rsub__(self, other: Any) -> _Step:
        return self._then("{} - {}", other, self, slopes=("{d}", "-{d}"))

    def __mul__(self, other: Any) -> _Step:
        return self._then("{} * {}", self, other, slopes=("{1} * {d}", "{0} * {d}"))

    def __truediv__(self, other: Any) -> _Step:
        return self._then("{} / {}", self, other, slopes=("{d} / {1}", "-{y} * {d} / {1}"))

    def __rtruediv__(self, other: Any) -> _Step:
        return self._then("{} / {}", other, self, slopes=("", "-{y} * {d} / {1}"))

    def __pow__(self, exponent: int) -> _Step:
        return self._then("{} ** {}", self, exponent, slopes=("{1} * {0} ** ({1} - 1) * {d}",))

    def __neg__(self) -> _Step:
        return self._then("-{}", self, slopes=("-{d}",))

    def __abs__(self) -> _Step:
        return self._then("abs({})", self, slopes=("(2 * ({0} > 0) - 1) * {d}",))

    __radd__, __rmul__ = __add__, __mul__


def arc_cosine(m: Any, degree: int, r: Any) -> Any:
    """E f(x) f(x') of two standard normals with correlation r, f(x) = max(x, 0)^degree.

    The derivative in r is in the same family (Cho and Saul 2009). It is recorded as such, because
    it is finite at r = 1 (down to degree 0) although the derivatives of the terms below are not.
    """
    if isinstance(r, _Step):
        code = "arc_cosine(m, {}, {})"
        slope = "{0} ** 2 * arc_cosine(m, {0} - 1, {1}) * {d}"
        return _Step(r.lines, code, degree, r, slopes=("", slope))
    quadrant = m.ratio(1, 4) + m.asin(r) / (2 * m.pi)  # P(x > 0, x' > 0)
    if degree == 0:
        return quadrant
    sine = m.sqrt((1 - r) * (1 + r)) / (2 * m.pi)
    return r * quadrant + sine if degree == 1 else (1 + 2 * r**2) * quadrant + 3 * r * sine


def _compiled(formula: Callable[..., Any], faint: tuple[str, ...], **seed: str) -> Any:
    """Compile a formula's derivative by the argument `seed`, given the code of that argument's own
    derivative; where arguments in `faint` are 0, the limit is taken."""
    names = list(inspect.signature(formula).parameters)[1:]
    lines: dict[str, str] = {}

    def recorded(name: str, slope: str = "") -> Callable[..., _Step]:
        return lambda *x: _Step(
            lines, f"m.{name}({', '.join('{}' for _ in x)})", *x, slopes=(slope,)
        )

    system = SimpleNamespace(**{name: recorded(name, d) for name, d in _FUNCTIONS.items()})
    system.ratio, system.pi = recorded("ratio"), _Step(lines, "m.pi")
    arguments = {n: _Step(lines, f"m.faint({n})" if n in faint else n) for n in names}
    for name, code in seed.items():
        arguments[name].slope = _Step(lines, code.format(*(arguments[n].name for n in faint))).name
    slope = getattr(formula(system, *arguments.values()), "slope", "") or f"0 * {names[0]}"
    needed, kept = {slope}, []
    for name, code in reversed(lines.items()):
        if name in needed:  # drop steps that the derivative does not use
            kept.append(f"    {name} = {code}\n")
            needed |= set(re.findall(r"\b_\d+\b", code))
    namespace: dict[str, Any] = {"arc_cosine": arc_cosine}
    body = "".join(reversed(kept))
    exec(f"def slope(m, {', '.join(names)}):\n{body}    return m.tidy({slope})\n", namespace)
    return namespace["slope"]


@functools.cache
def price(pair: Callable[..., Any], v: str = "v", other: str = "other", r: str = "r") -> Any:
    """The derivative of a formula by the covariance c = r sqrt(v v') of two tokens, at fixed v, v'.

    For a second moment E f(x) f(x') it is E f'(x) f'(x'), by Price's theorem.

    Args:
        pair: the formula.
        v, other, r: names of its arguments.
    """
    return _compiled(pair, (v, other), **{r: "1 / m.sqrt({} * {})"})


@functools.lru_cache(maxsize=256)
def differentiated(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The derivative of f(m, x): the function's attribute `derivative` if it has one, else traced.

    >>> from moments.formulas.algebra import FLOAT
    >>> differentiated(lambda m, x: m.exp(x) / x)(FLOAT, 1.0)
    0.0
    """
    known: Callable[[Any, Any], Any] | None = getattr(function, "derivative", None)
    (x,) = list(inspect.signature(function).parameters)[1:]
    return _compiled(function, (), **{x: "m.ratio(1, 1)"}) if known is None else known
