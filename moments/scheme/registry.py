"""What a scheme is, and the list of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import domain_error, unknown_name
from ..formulas.law import Source
from ..model.transformer import Transformer

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Scheme:
    """One published scheme.

    Attributes:
        name, title: what `with_scheme` takes, and what it is, in one line.
        sets, source: which fields of the Transformer it sets, and the paper and place.
        transform: the model it makes of a model; keyword arguments are its options.
        placements: where its authors put the norm, theirs first; empty: anywhere.
        both_stacks: whether the transform takes care of a model's encoder itself.
        predictions: how many applying it takes, about.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    source: Source
    transform: Callable[..., Transformer] = field(repr=False)
    placements: tuple[str, ...] = ()
    both_stacks: bool = False
    predictions: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Names of the options and the authors' defaults."""
        parameters = list(inspect.signature(self.transform).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def apply(self, model: Transformer, **options: Any) -> Transformer:
        """The model as the scheme sets it, its encoder too.

        Raises:
            DomainError: an unknown option, or one outside what is allowed.
        """
        for option in options:
            if option not in self.options:
                allowed = ", ".join(self.options) or "none: this scheme has no options"
                raise domain_error(f"option of {self.name}", option, f"one of {allowed}")
        if model.encoder is not None and not self.both_stacks:
            model = model.replace(encoder=self.transform(model.encoder, **options))
        return self.transform(model, **options)


MODULES = ("weights", "dslm", "scales", "placements")
"""Files of this folder, in the order of the list; each with one Scheme or a tuple of them."""


def _declared(name: str) -> list[Scheme]:
    """Schemes whose transforms a module defines, not those it imports."""
    found: list[Scheme] = []
    for value in vars(importlib.import_module(name)).values():
        several = value if isinstance(value, tuple) else (value,)
        found += [one for one in several if isinstance(one, Scheme)]
    return [one for one in found if one.transform.__module__ == name]


def schemes() -> tuple[Scheme, ...]:
    """Every scheme: name, title, source, what it sets and its options."""
    return tuple(found for name in MODULES for found in _declared(f"{__package__}.{name}"))


def scheme(name: str) -> Scheme:
    """A scheme by its name; DomainError where there is none."""
    known = {found.name: found for found in schemes()}
    if not isinstance(name, str) or name not in known:
        raise unknown_name("scheme", name, known)
    return known[name]


def apply(model: Transformer, name: str, **options: Any) -> Transformer:
    """The model as the scheme sets it; a ValidityWarning says where the two clash."""
    from .conflicts import warn

    found = scheme(name)
    changed = found.apply(model, **options)
    warn(found, model, changed, options)
    return changed


def input_options(model: Transformer, scheme: Scheme, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which a scheme learns of the input; what it does not ask for is left out."""
    correlation = inputs.get("correlation")
    if "correlation" in scheme.options and correlation is not None:
        return {"correlation": correlation}
    if "inputs" not in scheme.options:
        return {}
    names = ("correlation", "token_ids", "segment_ids", "kernel", "pixels", "encoder_inputs")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if model.embedding is None and set(given) <= {"correlation"} and given.get("correlation"):
        # The correlation is that after the embedding's dropout, as `predict` takes it.
        return {"input_correlation": min(1.0, given["correlation"] / (1 - model.dropout))}
    if model.embedding is None:
        return {"variant": "solved", "inputs": {"correlation": 0.0, **given}}
    return {"variant": "solved", "inputs": given} if given else {}
