"""Blocks that replace attention or the feed-forward block of a layer.

`Transformer(mixer=..., ffn=...)` takes one for all layers, or one or None per layer, None for the
block of the model's fields. A block declares only shapes and variances; its components are
registered in `moments.layers.architecture`, its torch twin in `moments.simulation.network`, both
by its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DomainError, domain_error
from .fields import Stored, set_field

if TYPE_CHECKING:
    from .transformer import Transformer

PLACES = ("mixer", "ffn")
_KINDS: dict[str, type[Block]] = {}


@dataclass(frozen=True)
class Block(Stored):
    """A block that replaces attention ("mixer") or the feed-forward block ("ffn").

    A subclass is a frozen dataclass of numbers with a `kind` of its own.

    Attributes:
        kind: its name in stored declarations.
        places: the fields of a Transformer that take it.
        by_token: whether its laws need one row per token, and hold neither for exchangeable tokens
            nor for classes of positions.
    """

    kind: ClassVar[str]
    places: ClassVar[tuple[str, ...]]
    by_token: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            cls._part = cls.kind
            _KINDS[cls.kind] = cls

    def check(self, model: Transformer) -> None:
        """Raise a DomainError if the block does not fit a model."""

    def shapes(self, model: Transformer) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of every matrix.

        Matrices with names of `moments.Weights` have the variances declared there, which schemes
        set; others have those of `variances`.
        """
        raise NotImplementedError

    def variances(self, model: Transformer) -> dict[str, float]:
        """Variances of the matrices that `moments.Weights` does not have."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary with its kind; `block_from_dict` reads it back."""
        return {"kind": self.kind, **super().to_dict()}

    def __str__(self) -> str:
        fields = {name: value for name, value in super().to_dict().items() if value is not None}
        return f"{self.kind} ({', '.join(f'{name} {value}' for name, value in fields.items())})"


def block_from_dict(name: str, data: Any) -> Block | tuple[Block | None, ...] | None:
    """Read a dictionary of `Block.to_dict`, or a list with one or None per layer.

    Raises:
        DomainError: another kind, or a missing or unknown field.
    """
    if data is None or isinstance(data, Block):
        return data
    if isinstance(data, list | tuple):
        blocks = [block_from_dict(name, entry) for entry in data]
        return tuple(block if isinstance(block, Block) else None for block in blocks)
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        allowed = "a JSON object whose kind is one of " + ", ".join(sorted(_KINDS))
        raise domain_error(name, data, allowed)
    return _KINDS[kind].from_dict({key: data[key] for key in data if key != "kind"})


def settle_blocks(model: Transformer) -> None:
    """Check the blocks of a model under construction: one for all layers, or one per layer."""
    for name in PLACES:
        value = getattr(model, name)
        per_layer = tuple(value) if isinstance(value, list | tuple) else (value,) * model.layers
        if len(per_layer) != model.layers:
            allowed = f"one block, or one or None per layer ({model.layers})"
            remedy = "model.replace(layers=...) goes on by the pattern of those given"
            raise domain_error(name, f"{len(per_layer)} entries", allowed, remedy)
        for block in per_layer:
            if block is not None and not (isinstance(block, Block) and name in block.places):
                kinds = sorted(kind for kind, known in _KINDS.items() if name in known.places)
                allowed = f"a block that takes this place ({', '.join(kinds)}), or None"
                raise domain_error(name, block, allowed)
        for block in set(per_layer) - {None}:
            block.check(model)
        equal = len(set(per_layer)) == 1
        set_field(model, name, per_layer[0] if equal else per_layer)
    _check_names(model)
    pairs = zip(model.mixers, model.ffns, strict=True)
    for layer in {pair: n for n, pair in enumerate(pairs, 1)}.values():
        mixer, ffn = model.shapes_by_place(layer)
        if common := sorted(mixer.keys() & ffn.keys()):
            raise DomainError(
                f"mixer and ffn of layer {layer} both have a matrix {common[0]!r}: "
                "give one of them another name"
            )


def _check_names(model: Transformer) -> None:
    """Raise DomainError if different blocks of a user have the same name, by which they are
    stored."""
    known: dict[str, Block] = {}
    for block in {*model.mixers, *model.ffns} - {None}:
        name = getattr(block, "name", None)
        if block is not None and name is not None and known.setdefault(name, block) != block:
            raise DomainError(
                f"two blocks are called {name!r}, by which stored declarations find them: "
                'pass moments.block(..., name="...") to one of them'
            )
