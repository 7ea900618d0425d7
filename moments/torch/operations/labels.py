"""Labels of entries: joint labels of several tensors, labels of rows, flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from .variables import Field, Known, State, Weights


def joined(labels: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """One label in place of several, and for each of its values which of each it stands for."""
    same = all(torch.equal(one, labels[0]) for one in labels[1:])
    if same and len(set(sizes)) == 1:
        values, new = torch.unique(labels[0], return_inverse=True)
        return new, [values] * len(labels)
    code = labels[0].long()
    for label, size in zip(labels[1:], sizes[1:], strict=True):
        code = code * size + label
    rest, new = torch.unique(code, return_inverse=True)
    at = []
    for size in reversed(sizes[1:]):
        at.append(rest % size)
        rest = rest // size
    return new, [rest, *reversed(at)]


def of_rows(label: Tensor, axis: int) -> Tensor:
    """A label for every row along an axis, in the shape without that axis."""
    moved = label.movedim(axis, -1)
    new = torch.unique(moved.reshape(-1, moved.shape[-1]), dim=0, return_inverse=True)[1]
    return new.reshape(moved.shape[:-1])


def varies(label: Tensor, axes: Sequence[int]) -> bool:
    """Whether a label changes along any of some axes."""
    return any(label.shape[a] > 1 and bool((label != label.narrow(a, 0, 1)).any()) for a in axes)


@overload
def flipped(x: Field) -> Field: ...
@overload
def flipped(x: Weights) -> Weights: ...
@overload
def flipped(x: Known) -> Known: ...
@overload
def flipped(x: Field | Known) -> Field | Known: ...


def flipped(x: State) -> State:
    """With its last two axes exchanged."""
    if isinstance(x, Field):
        return Field(x.variable, x.site.transpose(-1, -2), x.feature.transpose(-1, -2))
    if isinstance(x, Weights):
        index = x.index.transpose(-1, -2)
        return Weights(x.tensor.transpose(-1, -2), x.root, index, x.pool, x.route)
    return Known(x.tensor.transpose(-1, -2))


def flipped_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """That of `flipped`."""
    return *shape[:-2], shape[-1], shape[-2]
