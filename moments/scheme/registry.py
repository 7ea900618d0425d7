"""What a scheme is, and the list of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import domain_error
from ..law import Source
from ..transformer import Transformer


@dataclass(frozen=True)
class Scheme:
    """One published scheme.

    Attributes:
        name: what `with_scheme` takes.
        title: what it is, in one line.
        sets: which fields of the Transformer it sets.
        source: the paper and place.
        transform: the model it makes of a model; keyword arguments are its options.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    source: Source
    transform: Callable[..., Transformer]

    @property
    def options(self) -> dict[str, Any]:
        """Names of the options and the authors' defaults."""
        parameters = list(inspect.signature(self.transform).parameters.values())[1:]
        return {p.name: p.default for p in parameters}


def _all() -> tuple[Scheme, ...]:
    from . import dslm, plain

    return (*plain.SCHEMES, dslm.DSLM)


def schemes() -> tuple[Scheme, ...]:
    """Every scheme: name, title, source, what it sets and its options."""
    return _all()


def apply(model: Transformer, name: str, **options: Any) -> Transformer:
    """The model as the scheme sets it.

    Raises:
        DomainError: no such scheme or option, or an option outside what is allowed.
    """
    known = {scheme.name: scheme for scheme in _all()}
    if name not in known:
        raise domain_error("scheme", name, f"one of {', '.join(known)}")
    scheme = known[name]
    for option in options:
        if option not in scheme.options:
            allowed = ", ".join(scheme.options) or "none: this scheme has no options"
            raise domain_error(f"option of {name}", option, f"one of {allowed}")
    return scheme.transform(model, **options)
