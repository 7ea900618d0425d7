"""Second moments of embedded images, the gradients of what embeds them, and a photograph."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine.state import Array, Kernel
from ..errors import domain_error
from ..formulas.checks import check_array, check_count
from ..model.patches import PatchEmbedding


def check_pixels(embedding: PatchEmbedding, pixels: Any) -> np.ndarray:
    """Images of shape (B, C, H, W).

    Raises:
        DomainError: another shape, or values that are not finite.
    """
    images = check_array("pixels", pixels, "numbers of shape (B, C, H, W)")
    if not np.all(np.isfinite(images)):
        raise domain_error("pixels", "NaN or infinity", "finite")
    images = images[None] if images.ndim == 3 else images
    size = embedding.image_size
    if images.ndim != 4 or images.shape[1:] != (embedding.channels, size, size):
        allowed = f"of shape (B, {embedding.channels}, {size}, {size})"
        raise domain_error("pixels", f"shape {np.shape(pixels)}", allowed)
    return images


def cut_patches(embedding: PatchEmbedding, pixels: Any) -> np.ndarray:
    """The patches of images (B, C, H, W), row by row: (B, patches, channels * patch_size**2)."""
    images = check_pixels(embedding, pixels)
    side = embedding.image_size // embedding.patch_size
    shape = (len(images), embedding.channels, side, embedding.patch_size, side, -1)
    cut = images.reshape(shape).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(cut.reshape(len(images), embedding.patches, embedding.patch_width))


def image_kernel(embedding: PatchEmbedding, pixels: Any) -> Kernel:
    """Sum of projected patches, bias, class vector and positions: one kernel (B L, B L).

    With Gaussian weights, E (W p_i)_k (W p_j)_k = variance p_i . p_j; the class vector and a
    position's row are shared by the images.

    Args:
        embedding: the declaration.
        pixels: images of shape (B, C, H, W) as the model reads them, normalised.

    Raises:
        DomainError: pixels of another shape, or two blank patches with nothing added to them.
    """
    features, shared = _layout(embedding, pixels)
    matrix = embedding.patch_variance * features @ features.T
    matrix += embedding.position_variance * shared["position"]
    matrix += embedding.class_variance * shared["class"]
    matrix += (embedding.bias_variance or 0.0) * shared["patch.bias"]
    if np.diagonal(matrix).min() <= 0:
        raise domain_error(
            "pixels", "a patch that is zero", "of positive variance", "declare position_variance"
        )
    return Kernel.of_matrix(matrix)


def image_gradients(
    embedding: PatchEmbedding, pixels: Any, d_model: int, gradient: Kernel
) -> dict[str, Array]:
    """Squared gradient norms of projection, bias, class vector and position table.

    dW = sum_i g_i p_i^T, so E |dW|^2 = d sum_ij G_ij p_i . p_j; the others gather the gradients of
    the tokens that share them.

    Args:
        embedding: the declaration.
        pixels: images of shape (B, C, H, W).
        d_model: width.
        gradient: at the sum, (B L, B L).

    Returns:
        "patch", and "patch.bias", "class" and "position" where there are such parameters.

    Raises:
        DomainError: pixels of another shape, or not as many tokens as the gradient has.
    """
    features, shared = _layout(embedding, pixels)
    grad_out = gradient.off_diagonal
    if np.shape(grad_out) != (len(features), len(features)):
        allowed = f"of shape {(len(features), len(features))}, one row per token"
        raise domain_error("gradient", f"shape {np.shape(grad_out)}", allowed)
    there = {
        "patch.bias": embedding.bias_variance is not None,
        "class": embedding.class_token,
        "position": embedding.position_variance > 0,
    }
    result = {"patch": d_model * float((grad_out * (features @ features.T)).sum())}
    for name, present in there.items():
        if present:
            result[name] = d_model * float((grad_out * shared[name]).sum())
    return result


def _layout(embedding: PatchEmbedding, pixels: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What the projection reads, (B L, patch width), and which tokens share a vector."""
    cut = cut_patches(embedding, pixels)
    if embedding.class_token:
        cut = np.concatenate([np.zeros_like(cut[:, :1]), cut], axis=1)
    place = np.tile(np.arange(embedding.seq_len), len(cut))
    first = (place == 0) & embedding.class_token
    shared = {
        "position": place[:, None] == place[None, :],
        "class": first[:, None] & first[None, :],
        "patch.bias": ~first[:, None] & ~first[None, :],
    }
    return cut.reshape(len(place), -1), shared


def photograph(image_size: int, top: bool = True) -> np.ndarray:
    """A real image to predict with: matplotlib's portrait of Grace Hopper, (1, 3, size, size).

    The largest square at the top (or bottom) of the photograph, resampled, its values mapped from
    [0, 1] to [-1, 1] as vision transformers expect them.

    >>> photograph(32).shape
    (1, 3, 32, 32)

    Raises:
        DomainError: a size that is not a positive integer.
    """
    check_count("image_size", image_size)
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    result = get_sample_data("grace_hopper.jpg", asfileobj=False)
    with Image.open(str(result)) as file:
        image = file.convert("RGB")
    side = min(image.size)
    start = 0 if top else image.size[1] - side
    square = image.crop((0, start, side, start + side))
    small = square.resize((image_size, image_size), Image.Resampling.BICUBIC)
    values = np.asarray(small, dtype=float) / 255
    return (2 * values - 1).transpose(2, 0, 1)[None]
