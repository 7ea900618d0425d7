"""Laws at work: what their symbols are bound to, and the one place where they are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..formulas.law import Law
from .state import Array, Signal, ratio_or_zero

Values = dict[str, Array]

Observer = Callable[[Law, Mapping[str, Array], Array], None]

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Show every law that is evaluated inside, in this thread or task alone."""
    token = _OBSERVER.set(by)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def bind(signal: Signal, parameters: Mapping[str, Array]) -> tuple[Values, Values]:
    """Values of the laws' symbols: those of one token, and those of a pair of tokens.

    With tokens alike both are one dictionary, so that a law may mix them, as the published ones do.
    """
    kernel = signal.kernel
    if not signal.resolved:
        values = dict(parameters)
        values["x_mean"] = values["x_other_mean"] = signal.mean
        values["x_variance"] = values["x_other_variance"] = kernel.diagonal
        values["x_correlation"] = signal.correlation()
        if signal.fluctuation is None:
            values["x_hidden_correlation"] = ratio_or_zero(
                signal.hidden_covariance, kernel.diagonal
            )
        return values, values
    lifted = {name: kernel.lift(value) for name, value in parameters.items()}
    single = {name: one for name, (one, _) in lifted.items()}
    single |= {"x_mean": signal.mean, "x_variance": kernel.diagonal}
    pair = {name: two for name, (_, two) in lifted.items()}
    pair["x_variance"], pair["x_other_variance"] = kernel.over_tokens(kernel.diagonal)
    pair["x_mean"], pair["x_other_mean"] = kernel.over_tokens(signal.mean + 0 * kernel.diagonal)
    pair["x_correlation"] = signal.correlation()
    return single, pair


def evaluate(law: Law, algebra: Any, values: Values) -> Array:
    """One law on bound values, in the number system of the signal."""
    result = law.formula(algebra, *law.pick(values))
    if (observer := _OBSERVER.get()) is not None:
        observer(law, values, result)
    return result


def evaluate_sides(
    law: Law, algebra: Any, values: Values, sides: tuple[Values, Values]
) -> tuple[Array, Array]:
    """One law at two values of some symbols.

    What is observed is the law at `values`, between them.
    """
    if (observer := _OBSERVER.get()) is not None:
        observer(law, values, law.formula(algebra, *law.pick(values)))
    one, two = (law.formula(algebra, *law.pick(values | side)) for side in sides)
    return one, two
