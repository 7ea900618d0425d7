"""Kinds of layers by name, with their placement of norms, and a registry for further kinds.

`Transformer(norm=...)` names a kind. Those of this package are `BUILT_IN`; another is registered
here, its components in `moments.layers.architecture` and its torch twin in
`moments.simulation.network`, all under the same name. CONTRIBUTING has an example.
"""

from __future__ import annotations

from ..errors import DomainError

BUILT_IN = ("pre", "post", "none", "sandwich", "output", "mix", "hybrid", "b2t")
_REGISTERED: dict[str, tuple[str, ...]] = {}


def register_placement(name: str, norm_sites: tuple[str, ...]) -> None:
    """Register a kind of layer for declarations.

    Args:
        name: value of `norm`.
        norm_sites: sites of a layer's norms, such as "attention.norm".

    Raises:
        DomainError: the name is in use for another kind.
    """
    if name in BUILT_IN or _REGISTERED.setdefault(name, norm_sites) != norm_sites:
        raise DomainError(f"norm = {name!r} is another kind of layer: choose a name of your own")


def registered_norm_sites(name: str) -> tuple[str, ...] | None:
    """Sites of the norms of a registered kind; None for a kind of this package."""
    return _REGISTERED.get(name)


def placement_names() -> tuple[str, ...]:
    """All values of `norm`."""
    return (*BUILT_IN, *_REGISTERED)
