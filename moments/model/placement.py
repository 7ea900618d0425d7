"""Kinds of layers by name: where the norms stand, and what a kind of one's own has to say.

`Transformer(norm=...)` names a kind. Those of this package are `BUILT_IN`; another is registered
here, its components in `moments.transfer.architecture` and its torch twin in
`moments.simulation.network`, each under the same name. CONTRIBUTING has an example.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DomainError

BUILT_IN = ("pre", "post", "none", "sandwich", "mix", "hybrid", "b2t")


@dataclass(frozen=True)
class Placement:
    """A kind of layer that is registered.

    Attributes:
        name: what `norm` calls it.
        norm_sites: of the norms in a layer, such as "attention.norm".
    """

    name: str
    norm_sites: tuple[str, ...]


_REGISTERED: dict[str, Placement] = {}


def register_placement(name: str, norm_sites: tuple[str, ...]) -> Placement:
    """Make a kind of layer known to declarations.

    Raises:
        DomainError: the name is that of another kind.
    """
    found = Placement(name, norm_sites)
    if name in BUILT_IN or _REGISTERED.get(name, found) != found:
        raise DomainError(f"norm = {name!r} is another kind of layer: choose a name of your own")
    _REGISTERED[name] = found
    return found


def placement(name: str) -> Placement | None:
    """A registered kind; None: it is one of this package."""
    return _REGISTERED.get(name)


def placement_names() -> tuple[str, ...]:
    """Every name that `norm` takes."""
    return (*BUILT_IN, *_REGISTERED)
