"""Several texts packed into one row: which document each token belongs to, and its place there.

A token sees its own document alone, positions restart with every document, and no token predicts
the first of the next. Positions in attention need no word: rotary embeddings, distance penalties
and relative biases depend on the distance of two tokens of one document, which packing keeps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import domain_error

# For every sequence of a batch, the document of each of its tokens, from 1; 0 where it pads.
Padding = tuple[tuple[int, ...], ...]


def check_documents(document_ids: Any, shape: tuple[int, ...], real: Any = None) -> np.ndarray:
    """The document of every token, numbered from 1 in each row; 0 where it pads.

    Args:
        document_ids: integers of that shape, or of its last axis for all rows alike; a document is
            a run of one number.
        shape: (L,) or (B, L).
        real: 1 for a real token and 0 for padding; None: all are real.

    Raises:
        DomainError: not integers of such a shape, or a document in two pieces.
    """
    ids = np.asarray(document_ids)
    if not np.issubdtype(ids.dtype, np.integer) or ids.shape not in (shape, shape[-1:]):
        given = f"{ids.dtype} of shape {ids.shape}"
        remedy = "from lengths: numpy.repeat(numpy.arange(len(lengths)), lengths)"
        raise domain_error("document_ids", given, f"integers of shape {shape}", remedy)
    ids = np.broadcast_to(ids, shape)
    begins = np.ones(shape, dtype=np.int64)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    numbers = begins.cumsum(-1)
    for row, number in zip(np.atleast_2d(ids), np.atleast_2d(numbers), strict=True):
        if len(np.unique(row)) < number[-1]:
            twice = next(v for v in row if len(np.unique(number[row == v])) > 1)
            raise domain_error(
                "document_ids", f"{int(twice)} in two places", "one run of tokens per document"
            )
    return numbers if real is None else numbers * (np.asarray(real) > 0)


def places(documents: np.ndarray) -> np.ndarray:
    """Position of every token in its document; padding counts on, and so does what follows it."""
    index = np.broadcast_to(np.arange(documents.shape[-1]), documents.shape)
    last = np.maximum.accumulate(documents, axis=-1)
    begins = np.zeros(documents.shape, dtype=np.int64)
    begins[..., 1:] = (last[..., 1:] != last[..., :-1]) & (last[..., :-1] > 0)
    return index - np.maximum.accumulate(index * begins, axis=-1)


def spans(documents: Any) -> np.ndarray | None:
    """(documents, 3): row, first token and length of every document, in order.

    Args:
        documents: (L,) or (B, L), the document of every token, 0 where it pads.

    Returns:
        None where a document is no run of tokens.
    """
    numbers = np.atleast_2d(np.asarray(documents, dtype=np.int64))
    before = np.zeros_like(numbers)
    before[:, 1:] = numbers[:, :-1]
    row, first = np.nonzero((numbers > 0) & (numbers != before))
    after = np.zeros_like(numbers)
    after[:, :-1] = numbers[:, 1:]
    _, last = np.nonzero((numbers > 0) & (numbers != after))
    kinds = sum(len(np.unique(one[one > 0])) for one in numbers)
    return np.stack([row, first, last - first + 1], axis=1) if kinds == len(row) else None


def by_document(values: Any, where: np.ndarray) -> np.ndarray:
    """(documents, longest) of (L,) or (B, L) values; -1 behind a document's end.

    Args:
        values: of every token.
        where: as from `spans`.
    """
    every = np.atleast_2d(np.asarray(values))
    found = np.full((len(where), int(where[:, 2].max())), -1, dtype=every.dtype)
    for one, (row, first, length) in zip(found, where, strict=True):
        one[:length] = every[row, first : first + length]
    return found


def one_document(documents: Any) -> np.ndarray:
    """(..., L, L) whether two tokens are of one document."""
    numbers = np.asarray(documents, dtype=np.int64)
    first, second = numbers[..., :, None], numbers[..., None, :]
    return np.asarray((first == second) & (first > 0))


def restarted(position_ids: Any, mask: Any = None) -> np.ndarray | None:
    """(B, L) documents, from 1, of positions that begin at 0 again; 0 where `mask` is.

    Args:
        position_ids: (B, L), as a module takes them.
        mask: (B, L), 0 at padding; None, or of another shape: all tokens are real.

    Returns:
        None where no row holds more than one document, or something else begins than a document.
    """
    place = np.atleast_2d(np.asarray(position_ids))
    if place.ndim != 2:
        return None
    begins = np.ones(place.shape, dtype=np.int64)
    begins[:, 1:] = place[:, 1:] != place[:, :-1] + 1
    real = np.ones(place.shape, dtype=bool)
    if mask is not None and np.shape(mask) == place.shape:
        real = np.asarray(mask) > 0
    if np.any(place[real & (begins > 0)]):
        return None
    numbers = begins.cumsum(-1) * real
    several = any(len(np.unique(row[row > 0])) > 1 for row in numbers)
    return numbers if several else None
