"""Axes of a sweep: fields of a declaration, schemes, and arguments of `predict`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, unknown_name
from ..model.transformer import Transformer
from ..scheme.registry import scheme

Value = int | float | bool | str | None
Maker = Callable[..., Transformer]

ARGUMENTS = (
    "variance",
    "correlation",
    "grad_variance",
    "grad_correlation",
    "theory",
    "tokens",
    "batch",
)
"""Arguments of `predict` that a sweep varies."""

MOMENTS = ARGUMENTS[:4]
LABELS = {
    "variance": "input_variance",
    "correlation": "input_correlation",
    "grad_variance": "output_grad_variance",
    "grad_correlation": "output_grad_correlation",
}
"""Names of these axes in tables and plots, distinct from those of predicted quantities."""

PARTS = ("weights", "biases", "embedding", "head", "rotary", "relative_bias", "encoder")
"""Fields that are declarations of their own, whose fields have dotted names."""
EXAMPLES = {"weights": "query", "embedding": "token_variance", "head": "output_scale"}

LARGEST = 10_000_000
"""Largest number of configurations of one sweep."""


@dataclass(frozen=True)
class Axes:
    """Names and values of the axes, and the model.

    Attributes:
        model: a declaration, or a function that returns one.
        values: values by axis; the last axis varies fastest.
        parameters: axes that are parameters of the function.
    """

    model: Transformer | Maker
    values: Mapping[str, tuple[Value, ...]]
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, axes: Mapping[str, Any]) -> Axes:
        """Validate names and lists of values, and declare the model at the first values."""
        if not isinstance(model, Transformer) and not callable(model):
            raise DomainError(
                "model must be a moments.Transformer or a function that makes one, not "
                f"{type(model).__name__}"
            )
        if not isinstance(axes, Mapping) or not axes:
            raise domain_error("axes", axes, 'a dictionary such as {"layers": [12, 24]}')
        values = {_name(name): _values(name, entries) for name, entries in axes.items()}
        size = int(np.prod([len(v) for v in values.values()], dtype=float))
        if size > LARGEST:
            raise domain_error("axes", f"{size} configurations", f"at most {LARGEST}")
        parameters = () if isinstance(model, Transformer) else _parameters(model, values)
        result = cls(model, values, parameters)
        result._check_names()
        return result

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.values)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names in tables, by `LABELS`."""
        return tuple(LABELS.get(name, name) for name in self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(v) for v in self.values.values())

    @property
    def size(self) -> int:
        """Number of configurations."""
        return int(np.prod(self.shape))

    def points(self) -> Iterator[tuple[Value, ...]]:
        """The values of every configuration, the last axis varying fastest."""
        return itertools.product(*self.values.values())

    def base(self) -> Transformer:
        """The model at the first values of its parameters."""
        return self._base({name: self.values[name][0] for name in self.parameters})

    def configure(self, values: Sequence[Value]) -> tuple[Transformer, dict[str, Value]]:
        """`declared` and `arguments` at one configuration."""
        return self.declared(values), self.arguments(values)

    def arguments(self, values: Sequence[Value]) -> dict[str, Value]:
        """The arguments of `predict` at one configuration."""
        named = zip(self.values, values, strict=True)
        return {name: value for name, value in named if name in ARGUMENTS}

    def key(self, values: Sequence[Value]) -> tuple[str, ...]:
        """A key that is equal for configurations with the same declaration."""
        named = zip(self.values, values, strict=True)
        return tuple(repr(value) for name, value in named if name not in ARGUMENTS)

    def declared(self, values: Sequence[Value]) -> Transformer:
        """The declaration at one configuration; DomainError for a value outside its domain.

        Fields of the model are set before those of its parts, whose defaults depend on them; the
        scheme is applied last.
        """
        named = zip(self.values, values, strict=True)
        changes = {name: value for name, value in named if name not in ARGUMENTS}
        model = self._base({name: changes.pop(name) for name in self.parameters})
        scheme = changes.pop("scheme", None)
        options = {
            name.partition(".")[2]: changes.pop(name)
            for name in tuple(changes)
            if name.startswith("scheme.")
        }
        changed: Transformer = _changed(model, changes)
        return changed if scheme is None else changed.with_scheme(str(scheme), **options)

    def _base(self, arguments: Mapping[str, Value]) -> Transformer:
        if isinstance(self.model, Transformer):
            return self.model
        model = self.model(**arguments)
        if not isinstance(model, Transformer):
            raise DomainError(
                f"the function that makes the model returned {type(model).__name__}, "
                "not a moments.Transformer"
            )
        return model

    def _check_names(self) -> None:
        base = self.base()
        fields = {f.name for f in dataclasses.fields(Transformer) if f.init}
        for name in self.values:
            if name in self.parameters or name in ARGUMENTS:
                continue
            root, _, rest = name.partition(".")
            if root == "scheme":
                self._check_scheme(name, rest)
            elif name in PARTS:
                example = EXAMPLES.get(name, "...")
                raise domain_error("axis", name, f"one of its fields, such as {name}.{example}")
            elif root not in fields:
                known = sorted([*fields, *ARGUMENTS, "scheme"])
                raise unknown_name("axis", name, known)
            elif rest:
                _check_field(base, root, rest)

    def _check_scheme(self, name: str, option: str) -> None:
        names = [value for value in self.values.get("scheme", ()) if value is not None]
        if option and not names:
            raise domain_error("axis", name, 'next to an axis "scheme" that names the scheme')
        for scheme_name in names:
            swept = scheme(str(scheme_name))
            if option and option not in swept.options:
                raise unknown_name(f"axis of scheme {scheme_name!r}", name, swept.options)
            clash = [n for n in self.values if n.partition(".")[0] in swept.sets]
            if clash:
                allowed = f"none that scheme {scheme_name!r} sets ({', '.join(swept.sets)})"
                raise domain_error("axis", clash[0], allowed)


def as_shown(value: Any) -> Any:
    """A value in a table: "none" for None and NaN."""
    return "none" if value is None or value != value else value


def in_words(value: Any) -> str:
    """A value as text, floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(as_shown(value))


def numeric(values: Iterable[Any]) -> bool:
    """Whether all values are numbers."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise domain_error("axis", name, "the name of a field or of an argument of predict")
    return name


def _values(name: str, given: Any) -> tuple[Value, ...]:
    if isinstance(given, str | bytes | Mapping) or (np.ndim(given) == 0 and not np.iterable(given)):
        raise domain_error(f"axes[{name!r}]", given, "a list of values")
    values = tuple(v.item() if isinstance(v, np.generic) else v for v in given)
    if not values:
        raise domain_error(f"axes[{name!r}]", given, "one value at least")
    for value in values:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise domain_error(f"axes[{name!r}]", value, "a number, a name, True, False or None")
        if isinstance(value, float) and not np.isfinite(value):
            raise domain_error(f"axes[{name!r}]", value, "finite")
    if len(set(map(repr, values))) < len(values):
        twice = next(v for v in values if values.count(v) > 1)
        raise domain_error(f"axes[{name!r}]", twice, "there once")
    return values


def _parameters(model: Maker, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that are parameters of the function."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in values if name in named)


def _changed(declaration: Any, changes: Mapping[str, Value]) -> Any:
    """Replace fields of a declaration, then (dotted names) fields of its parts, recursively."""
    flat = {name: value for name, value in changes.items() if "." not in name}
    result = declaration.replace(**flat) if flat else declaration
    by_part: dict[str, dict[str, Value]] = {}
    for name, value in changes.items():
        part, dot, rest = name.partition(".")
        if dot:
            by_part.setdefault(part, {})[rest] = value
    for part, inner in by_part.items():
        before = getattr(result, part)
        if before is None:
            raise DomainError(f"the model declares no {part}, whose {next(iter(inner))} would vary")
        result = result.replace(**{part: _changed(before, inner)})
    return result


def _check_field(declaration: Any, part: str, rest: str) -> None:
    """Raise DomainError unless the part is declared and has the field."""
    name, _, deeper = rest.partition(".")
    inner = getattr(declaration, part)
    if inner is None:
        raise domain_error(
            "axis", f"{part}.{rest}", f"of something declared: the model has no {part}"
        )
    if not dataclasses.is_dataclass(inner):
        raise domain_error("axis", f"{part}.{rest}", f"{part} alone, which is no declaration")
    known = [f.name for f in dataclasses.fields(inner) if f.init]
    if name not in known:
        raise unknown_name("axis", f"{part}.{rest}", [f"{part}.{field}" for field in known])
    if deeper:
        _check_field(inner, name, deeper)
