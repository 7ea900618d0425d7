"""Kinds of layers by name: where the norms stand, and what a kind of one's own has to say.

`Transformer(norm=...)` names a kind. Those of this package are `BUILT_IN`; another is registered
here, its components in `moments.layers.architecture` and its torch twin in
`moments.simulation.network`, each under the same name. CONTRIBUTING has an example.
"""

from __future__ import annotations

from ..errors import DomainError

BUILT_IN = ("pre", "post", "none", "sandwich", "output", "mix", "hybrid", "b2t")
_REGISTERED: dict[str, tuple[str, ...]] = {}


def register_placement(name: str, norm_sites: tuple[str, ...]) -> None:
    """Make a kind of layer known to declarations.

    Args:
        name: what `norm` calls it.
        norm_sites: of the norms in a layer, such as "attention.norm".

    Raises:
        DomainError: the name is that of another kind.
    """
    if name in BUILT_IN or _REGISTERED.setdefault(name, norm_sites) != norm_sites:
        raise DomainError(f"norm = {name!r} is another kind of layer: choose a name of your own")


def registered_norm_sites(name: str) -> tuple[str, ...] | None:
    """Of a registered kind; None: it is one of this package."""
    return _REGISTERED.get(name)


def placement_names() -> tuple[str, ...]:
    """Every name that `norm` takes."""
    return (*BUILT_IN, *_REGISTERED)
