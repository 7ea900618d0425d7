"""Row classes in few shapes, so that many pairs of small classes are treated together.

Classes of few keys cost more to address than to compute. Those whose numbers of keys share their
next power of two are brought to the largest of them, by keys of weight 0 and rows of weight 0: a
joint law between such keys is 1, and neither they nor the rows contribute to any sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .row_classes import RowClass

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Indices = NDArray[np.intp]

MOST_PADDED = 32
"""Classes of more keys keep their shape."""


class PaddedClass(NamedTuple):
    """One class in the shape of its bin, in single precision.

    Attributes:
        source: the class.
        patterns, keys: of its a rows and n keys, real and added.
        own_patterns, own_keys: where among them the real ones are.
        weights: (a, n) mean attention.
        own_weights: (n,) of the class's own row.
        response: (n, n) 1 - A.
    """

    source: RowClass
    patterns: slice
    keys: slice | Indices
    own_patterns: slice
    own_keys: slice
    weights: Single
    own_weights: Single
    response: Single


def padded(classes: list[RowClass], patterns: int, tokens: int) -> dict[int, PaddedClass]:
    """The classes of more than one key, by index; `patterns` and `tokens` count either in all."""
    several = {i: one for i, one in enumerate(classes) if len(one.own_weights) > 1}
    shapes: dict[int, tuple[int, int]] = {}
    for one in several.values():
        rows, keys = one.weights.shape
        most = shapes.get(_bin(keys), (0, 0))
        shapes[_bin(keys)] = max(most[0], rows), max(most[1], keys)
    return {
        index: _in_shape(one, shapes[_bin(one.weights.shape[1])], patterns, tokens)
        for index, one in several.items()
    }


def _bin(keys: int) -> int:
    """Next power of two; classes beyond `MOST_PADDED` have bins of their own shape's."""
    return 1 << (keys - 1).bit_length() if keys <= MOST_PADDED else keys


def _in_shape(one: RowClass, shape: tuple[int, int], patterns: int, tokens: int) -> PaddedClass:
    rows, own_rows = _wider(one.patterns, shape[0], patterns)
    if isinstance(one.keys, slice):
        keys: slice | Indices
        keys, own_keys = _wider(one.keys, shape[1], tokens)
    else:
        others = np.setdiff1d(np.arange(tokens), one.keys)
        keys = np.concatenate([one.keys, others[: shape[1] - len(one.keys)]])
        own_keys = slice(0, len(one.keys))

    def placed(values: Array, shape: tuple[int, ...], where: Any) -> Single:
        if values.shape == shape:
            return values.astype(np.float32)
        whole = np.zeros(shape, dtype=np.float32)
        whole[where] = values
        return whole

    return PaddedClass(
        one,
        rows,
        keys,
        own_rows,
        own_keys,
        placed(one.weights, shape, (own_rows, own_keys)),
        placed(one.own_weights, shape[1:], own_keys),
        placed(one.response, (shape[1], shape[1]), (own_keys, own_keys)),
    )


def _wider(span: slice, length: int, limit: int) -> tuple[slice, slice]:
    """A slice of the given length around `span`, within `limit`, and where `span` is inside."""
    start = min(span.start, limit - length)
    inner = span.start - start
    return slice(start, start + length), slice(inner, inner + span.stop - span.start)
