"""Checks of what attention on a kernel is given."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....errors import domain_error

Array = NDArray[np.float64]


def square(name: str, kernel: ArrayLike, length: int | None = None) -> Array:
    """The symmetric part of a finite square matrix, of the given length where there is one."""
    array = np.asarray(kernel, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise domain_error(name, kernel, "a square matrix", f"its shape is {array.shape}")
    if length is not None and len(array) != length:
        raise domain_error(name, array, f"of shape ({length}, {length})")
    if not np.all(np.isfinite(array)):
        raise domain_error(name, kernel, "finite everywhere")
    return np.asarray(0.5 * (array + array.T))


def mask_of(allowed: ArrayLike | None, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """The mask, all True by default; every row has a key."""
    mask = np.ones(shape, bool) if allowed is None else np.asarray(allowed, bool)
    if mask.shape != shape or not mask.any(1).all():
        remedy = "let a padded query see itself"
        raise domain_error("allowed", mask, f"{shape}, a key in each row", remedy)
    return mask


def bias_of(bias: ArrayLike, mask: NDArray[np.bool_]) -> Array:
    """What is added to the logits, finite wherever the mask allows."""
    offset = np.asarray(bias, dtype=np.float64)
    if offset.shape != mask.shape or not np.all(np.isfinite(offset[mask])):
        raise domain_error("bias", bias, f"of shape {mask.shape}, finite where allowed")
    return offset
