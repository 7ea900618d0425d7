"""Names of tensors as people read them: those of several layers as one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..model.weights import MATRICES
from .roles import Role


def gathered(roles: Sequence[Role]) -> tuple[str, ...]:
    """Names of tensors, those of several layers as one pattern."""
    return gathered_names([role.label for role in roles])


def gathered_pattern(label: str) -> str:
    """A name with a star for its first number, which counts layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", label, count=1)


def gathered_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Tensors of several layers as one pattern, "h.*.attn.weight"; parts of one tensor together,
    "attn.weight [query, key]"."""
    split = [part for label in labels for part in label.split(" ... ")]
    patterns: dict[str, list[str]] = {}
    for label in dict.fromkeys(split):
        patterns.setdefault(gathered_pattern(label), []).append(label)
    whole: dict[str, list[str]] = {}
    for pattern, group in patterns.items():
        tensor, _, part = (pattern if len(group) > 1 else group[0]).partition(" [")
        whole.setdefault(tensor, []).extend([part.rstrip("]")] if part else [])
    order = {name: place for place, name in enumerate(MATRICES)}
    return tuple(
        f"{tensor} [{', '.join(sorted(parts, key=lambda p: order.get(p, 0)))}]" if parts else tensor
        for tensor, parts in whole.items()
    )
