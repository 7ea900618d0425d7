"""What a sweep varies: fields of a declaration, its schemes, and arguments of `predict`."""

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
"""What tables and pictures call these axes, next to the quantities that are predicted."""

PARTS = ("weights", "biases", "embedding", "head", "rotary", "relative_bias", "encoder")
"""Fields that are declarations of their own, whose fields have dotted names."""

LARGEST = 10_000_000
"""Configurations of one sweep."""


@dataclass(frozen=True)
class Axes:
    """Names and values of what varies, and the model that it varies.

    Attributes:
        model: a declaration, or a function of the axes in `made` that makes one.
        values: of every axis, in the order given; the last varies fastest.
    """

    model: Transformer | Maker
    values: Mapping[str, tuple[Value, ...]]
    made: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, axes: Mapping[str, Any]) -> Axes:
        """Validate names and values, which are lists of single ones, and that a declaration can be
        made of the first of each."""
        if not isinstance(model, Transformer) and not callable(model):
            raise DomainError(
                "model must be a moments.Transformer or a function that makes one, not "
                f"{type(model).__name__}"
            )
        if not isinstance(axes, Mapping) or not axes:
            raise domain_error("axes", axes, 'a dictionary such as {"layers": [12, 24]}')
        values = {_name(name): _values(name, given) for name, given in axes.items()}
        size = int(np.prod([len(v) for v in values.values()], dtype=float))
        if size > LARGEST:
            raise domain_error("axes", f"{size} configurations", f"at most {LARGEST}")
        made = () if isinstance(model, Transformer) else _taken(model, values)
        found = cls(model, values, made)
        found._check_names()
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.values)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names as tables have them: those of moments say where they were given."""
        return tuple(LABELS.get(name, name) for name in self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(v) for v in self.values.values())

    @property
    def size(self) -> int:
        """Number of configurations."""
        return int(np.prod(self.shape))

    def points(self) -> Iterator[tuple[Value, ...]]:
        """The values at every configuration, the last axis varying fastest."""
        return itertools.product(*self.values.values())

    def base(self) -> Transformer:
        """The model at the first value of what makes it."""
        return self._made({name: self.values[name][0] for name in self.made})

    def configure(self, values: Sequence[Value]) -> tuple[Transformer, dict[str, Value]]:
        """`declared` and `arguments` at one configuration."""
        return self.declared(values), self.arguments(values)

    def arguments(self, values: Sequence[Value]) -> dict[str, Value]:
        """Those of `predict` at one configuration."""
        both = zip(self.values, values, strict=True)
        return {name: value for name, value in both if name in ARGUMENTS}

    def key(self, values: Sequence[Value]) -> tuple[str, ...]:
        """What the declaration depends on: the same for configurations that share it."""
        both = zip(self.values, values, strict=True)
        return tuple(repr(value) for name, value in both if name not in ARGUMENTS)

    def declared(self, values: Sequence[Value]) -> Transformer:
        """The declaration at one configuration: fields of the model before those of its parts,
        which what is left to a default follows, and schemes last. DomainError for a value outside
        what is allowed."""
        both = zip(self.values, values, strict=True)
        given = {name: value for name, value in both if name not in ARGUMENTS}
        model = self._made({name: given.pop(name) for name in self.made})
        scheme = given.pop("scheme", None)
        options = {
            name.partition(".")[2]: given.pop(name)
            for name in tuple(given)
            if name.startswith("scheme.")
        }
        found: Transformer = _changed(model, given)
        return found if scheme is None else found.with_scheme(str(scheme), **options)

    def _made(self, given: Mapping[str, Value]) -> Transformer:
        if isinstance(self.model, Transformer):
            return self.model
        found = self.model(**given)
        if not isinstance(found, Transformer):
            raise DomainError(
                f"the function that makes the model returned {type(found).__name__}, "
                "not a moments.Transformer"
            )
        return found

    def _check_names(self) -> None:
        base = self.base()
        fields = {f.name for f in dataclasses.fields(Transformer) if f.init}
        for name in self.values:
            if name in self.made or name in ARGUMENTS:
                continue
            root, _, rest = name.partition(".")
            if root == "scheme":
                self._check_scheme(name, rest)
            elif name in PARTS:
                raise domain_error(
                    "axis", name, f"one of its fields, such as {name}.{_field(name)}"
                )
            elif root not in fields:
                known = sorted([*fields, *ARGUMENTS, "scheme"])
                raise unknown_name("axis", name, known)
            elif rest:
                _check_field(base, root, rest)

    def _check_scheme(self, name: str, option: str) -> None:
        chosen = [one for one in self.values.get("scheme", ()) if one is not None]
        if option and not chosen:
            raise domain_error("axis", name, 'next to an axis "scheme" that names the scheme')
        for one in chosen:
            found = scheme(str(one))
            if option and option not in found.options:
                raise unknown_name(f"axis of scheme {one!r}", name, found.options)
            clash = [n for n in self.values if n.partition(".")[0] in found.sets]
            if clash:
                raise domain_error(
                    "axis", clash[0], f"none that scheme {one!r} sets ({', '.join(found.sets)})"
                )


def as_shown(value: Any) -> Any:
    """A value as tables have it: None is "none", as among names of schemes."""
    return "none" if value is None or value != value else value


def in_words(value: Any) -> str:
    """The same in few signs."""
    return f"{value:.4g}" if isinstance(value, float) else str(as_shown(value))


def numeric(values: Iterable[Any]) -> bool:
    """Whether all of them are numbers."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise domain_error("axis", name, "the name of a field or of an argument of predict")
    return name


def _values(name: str, given: Any) -> tuple[Value, ...]:
    if isinstance(given, str | bytes | Mapping) or (np.ndim(given) == 0 and not np.iterable(given)):
        raise domain_error(f"axes[{name!r}]", given, "a list of values")
    found = tuple(v.item() if isinstance(v, np.generic) else v for v in given)
    if not found:
        raise domain_error(f"axes[{name!r}]", given, "one value at least")
    for value in found:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise domain_error(f"axes[{name!r}]", value, "a number, a name, True, False or None")
        if isinstance(value, float) and not np.isfinite(value):
            raise domain_error(f"axes[{name!r}]", value, "finite")
    if len(set(map(repr, found))) < len(found):
        twice = next(v for v in found if found.count(v) > 1)
        raise domain_error(f"axes[{name!r}]", twice, "there once")
    return found


def _taken(model: Maker, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that are parameters of a function."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in values if name in named)


def _changed(holder: Any, changes: Mapping[str, Value]) -> Any:
    """`holder` with its fields changed, then those of its parts, at any depth."""
    flat = {name: value for name, value in changes.items() if "." not in name}
    found = holder.replace(**flat) if flat else holder
    of_parts: dict[str, dict[str, Value]] = {}
    for name, value in changes.items():
        part, dot, rest = name.partition(".")
        if dot:
            of_parts.setdefault(part, {})[rest] = value
    for part, inner in of_parts.items():
        held = getattr(found, part)
        if held is None:
            raise DomainError(f"the model declares no {part}, whose {next(iter(inner))} would vary")
        found = found.replace(**{part: _changed(held, inner)})
    return found


def _check_field(holder: Any, part: str, rest: str) -> None:
    """Raise unless a part is there and has the field."""
    name, _, deeper = rest.partition(".")
    inner = getattr(holder, part)
    if inner is None:
        raise domain_error(
            "axis", f"{part}.{rest}", f"of something declared: the model has no {part}"
        )
    if not dataclasses.is_dataclass(inner):
        raise domain_error("axis", f"{part}.{rest}", f"{part} alone, which is no declaration")
    known = [f.name for f in dataclasses.fields(inner) if f.init]
    if name not in known:
        raise unknown_name("axis", f"{part}.{rest}", [f"{part}.{one}" for one in known])
    if deeper:
        _check_field(inner, name, deeper)


def _field(part: str) -> str:
    return {"weights": "query", "embedding": "token_variance", "head": "output_scale"}.get(
        part, "..."
    )
