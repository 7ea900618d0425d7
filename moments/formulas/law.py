"""A law: one formula with its source, its domain and its status.

A formula is typed once, as a function of a number system and of named symbols; numpy values,
mpmath references, the sympy expression and LaTeX all follow from it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import DomainError, MomentsError, domain_error
from .algebra import NUMPY, mpmath_namespace, sympy_namespace
from .checks import Interval
from .symbols import SYMBOLS

if TYPE_CHECKING:
    import mpmath
    import sympy

Status = Literal["exact", "asymptotic", "fitted"]
Theory = Literal["refined", "published", "simplified"]
THEORIES: tuple[Theory, ...] = ("refined", "published", "simplified")

QUANTITIES = {
    "mean": "mean of the output",
    "variance": "variance of the output",
    "covariance": "covariance of the output between two tokens, same feature",
    "hidden_covariance": "covariance of the output between two features, same token",
    "grad_variance": "variance of the gradient at the input",
    "grad_covariance": "covariance of the gradient at the input between two tokens",
    "grad_factor": "variance of the gradient at the other factor of a product",
    "grad_factor_covariance": "covariance of that gradient between two tokens",
    "value_gradient": "squared gradient norm of the value weights",
    "query_gradient": "squared gradient norm of the query weights",
    "inverse_temperature_square": "square of the factor on the logits that makes both equal",
    "kurtosis": "fourth moment of the output over its squared second moment",
    "alignment": "mean product of the squares of output and slope over the product of their means",
    "pattern_correlation": "correlation between tokens that a table's look-ups imply",
}

# Default values of symbols: the moments of the first token, and one dropout for all.
_DEFAULTS = {
    "x_other_variance": "x_variance",
    "x_other_mean": "x_mean",
    "attention_drop_prob": "drop_prob",
}


@dataclass(frozen=True)
class Source:
    """The source of a formula: a paper and a place in it, or our derivation and its proof."""

    reference: str
    place: str

    def __str__(self) -> str:
        return f"{self.reference}, {self.place}" if self.place else self.reference


def derived(place: str) -> Source:
    """Source of a formula derived for this package; `place` names the argument or the proof."""
    return Source("derived here", place)


def symbols_of(formula: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a formula's symbols, in its order of parameters."""
    return tuple(inspect.signature(formula).parameters)[1:]


class Substituted:
    """A formula with symbols replaced by other symbols or by formulas.

    >>> square = Substituted(lambda m, side, height: side * height, height="side")
    >>> symbols_of(square), square(NUMPY, 3.0)
    (('side',), 9.0)
    """

    def __init__(self, formula: Callable[..., Any], **replaced: str | Callable[..., Any]) -> None:
        replacements = [replaced.get(name, name) for name in symbols_of(formula)]
        used = [(new,) if isinstance(new, str) else symbols_of(new) for new in replacements]
        names = list(dict.fromkeys(name for symbols in used for name in symbols))
        self._formula = formula
        self._arguments = [
            (None if isinstance(new, str) else new, tuple(map(names.index, symbols)))
            for new, symbols in zip(replacements, used, strict=True)
        ]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in ("m", *names)]
        )

    def __call__(self, m: Any, *values: Any) -> Any:
        arguments = [
            values[indices[0]] if inner is None else inner(m, *[values[k] for k in indices])
            for inner, indices in self._arguments
        ]
        return self._formula(m, *arguments)


def times(formula: Callable[..., Any], factor: str) -> Substituted:
    """A formula times another symbol."""
    return Substituted(lambda m, x, y: x * y, x=formula, y=factor)


@dataclass(frozen=True)
class Law:
    """One formula.

    Attributes:
        formula: function of a number system and of symbols named in `symbols.SYMBOLS`.
        source: the paper's equation or table, or our derivation.
        status: "exact" under Gaussian inputs, "asymptotic" in the quantity `note` names, "fitted".
        limits: domains narrower than the symbols' default, by symbol name.
        note: neglected terms, or differences from the printed source.
    """

    formula: Callable[..., Any]
    source: Source
    status: Status = "exact"
    limits: Mapping[str, Interval] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.source, Source):
            raise MomentsError("a law needs a Source: a paper and a place, or derived(...)")
        if self.status not in ("exact", "asymptotic", "fitted"):
            raise domain_error("status", self.status, "'exact', 'asymptotic' or 'fitted'")
        unknown = [name for name in (*self.arguments, *self.limits) if name not in SYMBOLS]
        if unknown:
            raise domain_error("symbol", unknown[0], "declared in moments.formulas.symbols")

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the formula's symbols, in its order of parameters."""
        return symbols_of(self.formula)

    @functools.cached_property
    def pick(self) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
        """A function that returns the formula's arguments, in order, from a mapping by name."""
        names = self.arguments
        if len(names) > 1:
            return operator.itemgetter(*names)
        return lambda values: [values[name] for name in names]

    @functools.cached_property
    def domain(self) -> dict[str, Interval]:
        """The allowed interval of every symbol."""
        return {name: self.limits.get(name, SYMBOLS[name].domain) for name in self.arguments}

    # --- numbers -------------------------------------------------------------------------------

    def of(self, values: Mapping[str, Any]) -> Any:
        """Evaluate on arrays by name, unchecked: the engine's fast path."""
        return self.formula(NUMPY, *self.pick(values))

    def __call__(self, **values: Any) -> Any:
        """Evaluate with numpy, broadcasting over all arguments.

        Every known symbol may be passed, so that one dictionary of moments serves all laws; symbols
        that the formula does not contain are ignored. `x_other_variance` and `x_other_mean` default
        to the first token's, means to 0; `x_covariance` may replace `x_correlation`, and
        `grad_covariance` defaults to `grad_variance` times `grad_correlation`.

        Raises:
            DomainError: an unknown, missing or out-of-domain symbol, or a result that overflows.
        """
        complete = self._complete({k: np.asarray(v, dtype=float) for k, v in values.items()})
        for name, interval in self.domain.items():
            if not interval.contains(complete[name]):
                raise domain_error(name, values.get(name, complete[name]), f"inside {interval}")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            result = np.asarray(self.of(complete), dtype=float)
        shape = np.broadcast_shapes(result.shape, *(np.shape(complete[a]) for a in self.arguments))
        if not np.all(np.isfinite(result)):
            raise DomainError("the formula overflows at these values; use smaller variances")
        return np.broadcast_to(result, shape).copy()[()]

    def evaluate(self, *, digits: int = 50, **values: Any) -> mpmath.mpf:
        """Evaluate with mpmath to `digits` significant digits (scalars only)."""
        import mpmath as mp

        with mp.workdps(digits + 15):
            complete = self._complete({k: mp.mpf(v) for k, v in values.items()})
            for name, interval in self.domain.items():
                if not interval.contains(float(complete[name])):
                    raise domain_error(name, values.get(name), f"inside {interval}")
            arguments = [complete[name] for name in self.arguments]
            result = mp.mpf(self.formula(mpmath_namespace(), *arguments))
        with mp.workdps(digits):
            return +result

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        known = {*SYMBOLS, "x_covariance"}
        for name in values:
            if name not in known:
                raise domain_error(
                    "symbol", name, f"one of this law's: {', '.join(self.arguments) or 'none'}"
                )
        for name, default in _DEFAULTS.items():
            if name not in values and default in values:
                values[name] = values[default]
        for name in ("x_mean", "x_other_mean"):
            values.setdefault(name, 0.0)
        if "x_correlation" not in values and "x_covariance" in values and "x_variance" in values:
            scale = (values["x_variance"] * values["x_other_variance"]) ** 0.5
            values["x_correlation"] = values["x_covariance"] / scale
        if "grad_covariance" not in values and {"grad_variance", "grad_correlation"} <= set(values):
            values["grad_covariance"] = values["grad_variance"] * values["grad_correlation"]
        missing = [name for name in self.arguments if name not in values]
        if missing:
            meaning = SYMBOLS[missing[0]].meaning
            raise DomainError(f"{missing[0]} is missing: pass the {meaning}")
        return values

    # --- symbols -------------------------------------------------------------------------------

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The sympy symbols of the formula."""
        return tuple(SYMBOLS[name].sympy for name in self.arguments)

    @functools.cached_property
    def expr(self) -> sympy.Expr:
        """The formula as a sympy expression."""
        import sympy

        return sympy.sympify(self.formula(sympy_namespace(), *self.symbols))

    def latex(self) -> str:
        """The formula as LaTeX, in the field's notation."""
        import sympy

        names = {SYMBOLS[name].sympy: SYMBOLS[name].tex for name in self.arguments}
        return str(sympy.latex(self.expr, symbol_names=names))

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def __repr__(self) -> str:
        return f"Law({self.expr}, status={self.status!r}, source='{self.source}')"


def asymptotic(
    formula: Callable[..., Any],
    source: Source,
    note: str,
    limits: Mapping[str, Interval] | None = None,
) -> Law:
    """A law to leading order in the quantity that `note` names."""
    return Law(formula, source, "asymptotic", limits or {}, note)


@dataclass(frozen=True, eq=False)
class ComponentLaws:
    """The laws of one component in every theory.

    `laws` hold in all theories that do not override them; "simplified" inherits the overrides of
    "published". None for a quantity: the theory has no law for it.

    Attributes:
        name, title: its name in `moments.component`, and its description.
        laws: laws by quantity, such as "variance" or "grad_covariance".
        refined, published, simplified: the overrides of each theory.
        entrywise: for an elementwise component, the function and its derivative, both functions of
            a number system and a number.
    """

    name: str
    title: str
    laws: Mapping[str, Law] = field(default_factory=dict)
    refined: Mapping[str, Law | None] = field(default_factory=dict)
    published: Mapping[str, Law | None] = field(default_factory=dict)
    simplified: Mapping[str, Law | None] = field(default_factory=dict)
    entrywise: tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]] | None = None
    _merged: dict[str, dict[str, Law]] = field(default_factory=dict, init=False, repr=False)

    def under(self, theory: Theory) -> dict[str, Law]:
        """The laws that hold under one theory, by quantity."""
        if theory in self._merged:
            return self._merged[theory]
        layers: dict[str, tuple[Mapping[str, Law | None], ...]] = {
            "refined": (self.laws, self.refined),
            "published": (self.laws, self.published),
            "simplified": (self.laws, self.published, self.simplified),
        }
        if theory not in layers:
            raise domain_error("theory", theory, f"one of {', '.join(THEORIES)}")
        merged: dict[str, Law | None] = {}
        for layer in layers[theory]:
            merged.update(layer)
        laws = {quantity: law for quantity, law in merged.items() if law is not None}
        self._merged[theory] = laws
        return laws

    def law(self, quantity: str, theory: Theory = "refined") -> Law:
        """The law of a quantity (see `law.QUANTITIES`).

        Raises:
            DomainError: this component has no such law under that theory.
        """
        laws = self.under(theory)
        if quantity not in laws:
            allowed = f"one of {', '.join(laws)} for {self.name} under theory {theory!r}"
            raise domain_error("quantity", quantity, allowed)
        return laws[quantity]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Formulas are code and looked up by name: unpickling or copying returns the same object.
        from .registry import laws_by_recipe, recipe

        return laws_by_recipe, recipe(self)

    def __repr__(self) -> str:
        return f"ComponentLaws({self.name!r}: {', '.join(self.under('refined'))})"
