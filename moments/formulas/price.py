"""Derivatives of formulas: nobody types a law that is the derivative of another.

A formula is run once on `_Step`s, which write down what is done to them together with its
derivative. What counts of that is compiled to a formula of its own, for every number system.
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
"""Of functions of a number system, the derivative of y where the argument has the derivative d."""


class _Step:
    """A step of a formula, written down instead of taken; `slope` names its derivative, if any."""

    def __init__(
        self, lines: dict[str, str], code: str, *operands: Any, slopes: tuple[str, ...] = ()
    ) -> None:
        names = [getattr(one, "name", one) for one in operands]
        self.lines, self.name, self.slope = lines, f"_{len(lines)}", ""
        lines[self.name] = code.format(*names)
        for one, slope in zip(operands, slopes, strict=False):
            if d := getattr(one, "slope", ""):
                part = _Step(lines, slope.format(*names, d=d, y=self.name)).name
                self.slope = _Step(lines, f"{self.slope} + {part}").name if self.slope else part

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
    """E f(x) f(x') of two standard normals that correlate by r, f(x) = max(x, 0)^degree.

    A family closed under derivatives in r (Cho and Saul 2009), which are finite at r = 1 down to
    degree 0 where those of its parts are not.
    """
    if isinstance(r, _Step):
        code = "arc_cosine(m, {}, {})"
        slope = "{0} ** 2 * arc_cosine(m, {0} - 1, {1}) * {d}"
        return _Step(r.lines, code, degree, r, slopes=("", slope))
    step = m.ratio(1, 4) + m.asin(r) / (2 * m.pi)
    if degree == 0:
        return step
    edge = m.sqrt((1 - r) * (1 + r)) / (2 * m.pi)
    return r * step + edge if degree == 1 else (1 + 2 * r**2) * step + 3 * r * edge


def _compiled(formula: Callable[..., Any], faint: tuple[str, ...], **seed: str) -> Any:
    """A formula's derivative along one argument, given the code of that one's own derivative; of
    arguments in `faint` that are 0 it is the limit."""
    names = list(inspect.signature(formula).parameters)[1:]
    lines: dict[str, str] = {}

    def written(name: str, slope: str = "") -> Callable[..., _Step]:
        return lambda *x: _Step(
            lines, f"m.{name}({', '.join('{}' for _ in x)})", *x, slopes=(slope,)
        )

    system = SimpleNamespace(**{name: written(name, d) for name, d in _FUNCTIONS.items()})
    system.ratio, system.pi = written("ratio"), _Step(lines, "m.pi")
    given = {n: _Step(lines, f"m.faint({n})" if n in faint else n) for n in names}
    for name, code in seed.items():
        given[name].slope = _Step(lines, code.format(*(given[n].name for n in faint))).name
    slope = getattr(formula(system, *given.values()), "slope", "") or f"0 * {names[0]}"
    needed, kept = {slope}, []
    for name, code in reversed(lines.items()):
        if name in needed:  # of the steps, those that count
            kept.append(f"    {name} = {code}\n")
            needed |= set(re.findall(r"\b_\d+\b", code))
    made: dict[str, Any] = {"arc_cosine": arc_cosine}
    body = "".join(reversed(kept))
    exec(f"def slope(m, {', '.join(names)}):\n{body}    return m.tidy({slope})\n", made)
    return made["slope"]


@functools.cache
def price(pair: Callable[..., Any], v: str = "v", other: str = "other", r: str = "r") -> Any:
    """The derivative of a formula in the covariance c = r sqrt(v v') of two tokens, v and v' fixed.

    Of a second moment E f(x) f(x') it is E f'(x) f'(x'), by Price's theorem.

    Args:
        pair: the formula.
        v, other, r: names of its arguments.
    """
    return _compiled(pair, (v, other), **{r: "1 / m.sqrt({} * {})"})


@functools.lru_cache(maxsize=256)
def differentiated(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The derivative of f(m, x), unless the function holds one as its `derivative`.

    >>> from moments.formulas.algebra import FLOAT
    >>> differentiated(lambda m, x: m.exp(x) / x)(FLOAT, 1.0)
    0.0
    """
    given: Callable[[Any, Any], Any] | None = getattr(function, "derivative", None)
    (x,) = list(inspect.signature(function).parameters)[1:]
    return _compiled(function, (), **{x: "m.ratio(1, 1)"}) if given is None else given
