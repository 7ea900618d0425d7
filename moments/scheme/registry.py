"""Published schemes: the class, and the list of all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import domain_error, unknown_name
from ..formulas.law import Source
from ..model.transformer import Transformer


@dataclass(frozen=True)
class Scheme:
    """One published scheme.

    Attributes:
        name, title: its name in `with_scheme`, and its description in one line.
        sets, source: the fields of the Transformer that it sets, and the paper and place.
        transform: returns the changed model; its keyword arguments are the scheme's options.
        placements: the authors' placements of the norm, the main one first; empty: any.
        both_stacks: whether the transform also sets a model's encoder.
        predictions: roughly how many predictions its application takes.
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
        """Set a model and its encoder.

        Raises:
            DomainError: an unknown option, or a value outside its domain.
        """
        for option in options:
            if option not in self.options:
                allowed = ", ".join(self.options) or "none: this scheme has no options"
                raise domain_error(f"option of {self.name}", option, f"one of {allowed}")
        if model.encoder is not None and not self.both_stacks:
            model = model.replace(encoder=self.transform(model.encoder, **options))
        return self.transform(model, **options)


MODULES = ("weights", "dslm", "scales", "placements")
"""Modules of this folder that define schemes, in the order of `schemes()`."""


def _declared(name: str) -> list[Scheme]:
    """Schemes, or tuples of schemes, that a module defines and does not only import."""
    result: list[Scheme] = []
    for value in vars(importlib.import_module(name)).values():
        values = value if isinstance(value, tuple) else (value,)
        result += [entry for entry in values if isinstance(entry, Scheme)]
    return [entry for entry in result if entry.transform.__module__ == name]


def schemes() -> tuple[Scheme, ...]:
    """Every scheme: name, title, source, what it sets and its options."""
    return tuple(entry for name in MODULES for entry in _declared(f"{__package__}.{name}"))


def scheme(name: str) -> Scheme:
    """A scheme by its name; DomainError if there is none."""
    known = {entry.name: entry for entry in schemes()}
    if not isinstance(name, str) or name not in known:
        raise unknown_name("scheme", name, known)
    return known[name]


def apply(model: Transformer, name: str, **options: Any) -> Transformer:
    """Apply a scheme, with a ValidityWarning if it conflicts with the model."""
    from .conflicts import warn

    chosen = scheme(name)
    changed = chosen.apply(model, **options)
    warn(chosen, model, changed, options)
    return changed


def input_options(model: Transformer, scheme: Scheme, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a scheme that describe the model's input."""
    correlation = inputs.get("correlation")
    if "correlation" in scheme.options and correlation is not None:
        return {"correlation": correlation}
    if "inputs" not in scheme.options:
        return {}
    names = ("correlation", "token_ids", "segment_ids", "kernel", "pixels", "encoder_inputs")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if model.embedding is None and set(given) <= {"correlation"} and given.get("correlation"):
        # `predict` takes the correlation after the embedding's dropout, the scheme that before it.
        return {"input_correlation": min(1.0, given["correlation"] / (1 - model.dropout))}
    if model.embedding is None:
        return {"variant": "solved", "inputs": {"correlation": 0.0, **given}}
    return {"variant": "solved", "inputs": given} if given else {}
