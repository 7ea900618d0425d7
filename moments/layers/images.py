"""Second moments of embedded images and sound, gradients of the embedding, a sample photograph."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..engine import laws
from ..engine.derivative import pullback
from ..engine.state import Array, Kernel
from ..errors import domain_error
from ..formulas.activation import activation_laws
from ..formulas.checks import check_array, check_count
from ..model.patches import PatchEmbedding, SoundEmbedding
from .embedding import FixedPart

ReadsPixels = PatchEmbedding | SoundEmbedding
"""Embeddings of images; a spectrogram is an image of one channel."""


def check_pixels(embedding: ReadsPixels, pixels: Any) -> np.ndarray:
    """Check images and return them with shape (B, C, H, W).

    Raises:
        DomainError: another shape, or values that are not finite.
    """
    images = check_array("pixels", pixels, "numbers of shape (B, C, H, W)")
    if not np.all(np.isfinite(images)):
        raise domain_error("pixels", "NaN or infinity", "finite")
    images = images[None] if images.ndim == 3 else images
    shape = embedding.channels, *embedding.sides
    if images.ndim != 4 or images.shape[1:] != shape:
        allowed = f"of shape (B, {', '.join(map(str, shape))})"
        raise domain_error("pixels", f"shape {np.shape(pixels)}", allowed)
    return images


def cut_patches(embedding: PatchEmbedding, pixels: Any) -> np.ndarray:
    """The patches of images (B, C, H, W), row by row: (B, patches, channels * patch_size**2)."""
    images = check_pixels(embedding, pixels)
    size, (down, across) = embedding.patch_size, embedding.strides
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=(2, 3))
    patches = windows[:, :, ::down, ::across].transpose(0, 2, 3, 1, 4, 5)
    shape = len(images), embedding.patches, embedding.patch_width
    return np.ascontiguousarray(patches.reshape(shape))


def entering(embedding: ReadsPixels, pixels: Any, d_model: int) -> tuple[Kernel, FixedPart | None]:
    """Kernel (B L, B L) of embedded images before norm and dropout, and its deterministic part
    (None if there is none).

    Raises:
        DomainError: pixels of another shape.
    """
    if isinstance(embedding, SoundEmbedding):
        return sound_kernel(embedding, check_pixels(embedding, pixels), d_model)
    kernel = image_kernel(embedding, pixels, d_model)
    return kernel, patch_positions(
        embedding, d_model, len(kernel.off_diagonal) // embedding.seq_len
    )


def image_kernel(embedding: PatchEmbedding, pixels: Any, d_model: int) -> Kernel:
    """Kernel (B L, B L) of the sum of projected patches, bias, learned vectors and positions.

    With Gaussian weights, E (W p_i)_k (W p_j)_k = variance p_i . p_j; learned vectors and rows of
    positions are shared by all images.

    Args:
        pixels: images of shape (B, C, H, W), normalised as for the model.
        d_model: width of sinusoidal positions.

    Raises:
        DomainError: pixels of another shape.
    """
    features, added = patch_layout(embedding, pixels)
    matrix = embedding.patch_variance * features @ features.T
    for vectors in added.values():
        matrix += vectors.variance * vectors.same
    fixed = patch_positions(embedding, d_model, len(matrix) // embedding.seq_len)
    return Kernel.of_matrix(matrix if fixed is None else matrix + fixed.kernel.off_diagonal)


def patch_positions(embedding: PatchEmbedding, d_model: int, images: int) -> FixedPart | None:
    """Sinusoidal positions of patches: sines and cosines of d/4 frequencies w_m = 10000^(-4 m/d)
    times the vertical position, and the same for the horizontal one; 0 for other tokens. None
    without sinusoidal positions.

    Raises:
        DomainError: a width that is no multiple of 4.
    """
    if embedding.placed != "sinusoidal":
        return None
    if d_model % 4:
        raise domain_error("d_model", d_model, "a multiple of 4 for sinusoidal positions")
    speeds = 10000.0 ** (-np.arange(d_model // 4) / (d_model // 4))
    angles = np.indices(embedding.grid).reshape(2, -1, 1) * speeds
    rows = np.concatenate([*np.sin(angles), *np.cos(angles)], axis=1)
    return FixedPart.of_rows(np.tile(np.pad(rows, ((embedding.before, 0), (0, 0))), (images, 1)))


def image_gradients(
    embedding: ReadsPixels, pixels: Any, d_model: int, gradient: Kernel
) -> dict[str, Array]:
    """Squared gradient norms of projection, bias, learned vectors and position table.

    dW = sum_i g_i p_i^T, so E |dW|^2 = d sum_ij G_ij p_i . p_j; other gradients are sums over the
    tokens that share a vector.

    Args:
        pixels: images of shape (B, C, H, W).
        gradient: at the sum, (B L, B L).

    Returns:
        "patch", and "patch.bias", "class", "register" and "position" if there are such parameters;
        for convolutions "convolution_1" and so on.

    Raises:
        DomainError: pixels of another shape, or a gradient of another number of tokens.
    """
    grad_out = gradient.off_diagonal
    if isinstance(embedding, SoundEmbedding):
        return sound_gradients(embedding, check_pixels(embedding, pixels), d_model, grad_out)
    features, added = patch_layout(embedding, pixels)
    if np.shape(grad_out) != (len(features), len(features)):
        allowed = f"of shape {(len(features), len(features))}, one row per token"
        raise domain_error("gradient", f"shape {np.shape(grad_out)}", allowed)
    result = {"patch": d_model * float((grad_out * (features @ features.T)).sum())}
    for name in ("patch.bias", "class", "register", "position"):
        if name in added:
            result[name] = d_model * float((grad_out * added[name].same).sum())
    return result


class LearnedVectors(NamedTuple):
    """A learned table: the row of every token (-1: none), the variance of its entries, and its
    number of rows."""

    rows: np.ndarray
    variance: float
    length: int

    @property
    def same(self) -> np.ndarray:
        """(B L, B L) whether two tokens have the same row."""
        return np.asarray((self.rows[:, None] == self.rows) & (self.rows >= 0))


def patch_layout(
    embedding: PatchEmbedding, pixels: Any
) -> tuple[np.ndarray, dict[str, LearnedVectors]]:
    """Input of the projection, (B L, patch width), and the learned vectors added to it, by name."""
    patches, before = cut_patches(embedding, pixels), embedding.before
    first, place = embedding.class_token, np.tile(np.arange(embedding.seq_len), len(patches))
    register = np.where((place >= first) & (place < before), place - first, -1)
    added = {
        "class": LearnedVectors(np.where(place == 0, 0, -1), embedding.class_variance, int(first)),
        "register": LearnedVectors(register, embedding.register_variance, embedding.registers),
    }
    if embedding.placed == "learned":
        added["position"] = LearnedVectors(place, embedding.position_variance, embedding.seq_len)
    if embedding.bias_variance is not None:
        bias = np.where(place < before, -1, 0)
        added["patch.bias"] = LearnedVectors(bias, embedding.bias_variance, 1)
    inputs = np.pad(patches, ((0, 0), (before, 0), (0, 0))).reshape(len(place), -1)
    return inputs, {name: vectors for name, vectors in added.items() if vectors.length}


# --- sound ----------------------------------------------------------------------------------------
# Given its input, a convolution's output is Gaussian, and the covariance of two positions is a sum
# of the input's over its taps; at infinite width this holds layer by layer (derived here; a test
# compares a real module). Derivatives are those of two replicas (`engine.laws`).


def sound_kernel(
    embedding: SoundEmbedding, pixels: np.ndarray, d_model: int
) -> tuple[Kernel, FixedPart]:
    """Kernel (B L, B L) of embedded sound before dropout, and its part that is the same for all
    draws: positions, and the means after activations.

    Args:
        pixels: spectrograms as images, (B, 1, bins, frames).
    """
    output, inner = _convolved(embedding, _products(pixels), d_model)
    moments = laws.Layout(True, len(pixels)).joined(output)
    variance = np.diagonal(laws.Layout(True, len(pixels)).joined(inner))
    mean = np.asarray(activation_laws(embedding.activation).law("mean")(x_variance=variance))
    rows = np.zeros((embedding.seq_len, d_model))
    if embedding.positions == "sinusoidal":
        half = d_model // 2
        speeds = 10000.0 ** (-np.arange(half) / max(half - 1, 1))
        angles = np.outer(np.arange(embedding.seq_len), speeds)
        rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    fixed = FixedPart.of_rows(np.tile(rows, (len(pixels), 1)) + mean[:, None])
    return Kernel.of_matrix(moments - np.outer(mean, mean) + fixed.kernel.off_diagonal), fixed


def sound_gradients(
    embedding: SoundEmbedding, pixels: np.ndarray, d_model: int, gradient: Array
) -> dict[str, Array]:
    """Squared gradient norms of the convolutions and of their biases, by name.

    Args:
        pixels: as in `sound_kernel`.
        gradient: at the output, (B L, B L).
    """
    names = []
    for number in range(1, len(embedding.kernels) + 1):
        names.append(f"convolution_{number}")
        if embedding.bias_variance is not None:
            names.append(f"convolution_{number}.bias")
    frames = _products(pixels)
    grad_out = laws.Layout(True, len(pixels)).cut(np.asarray(gradient))
    _, pull = pullback(
        lambda *extra: _convolved(embedding, frames, d_model, *extra)[0],
        *(np.zeros(()) for _ in names),
    )
    return {n: d_model * float(g) for n, g in zip(names, pull(grad_out), strict=True)}


def _products(pixels: np.ndarray) -> Array:
    """Products of frames, summed over bins: (B, B, frames, frames), (frames, frames) if B = 1."""
    products = np.einsum("aif,big->abfg", pixels[:, 0], pixels[:, 0])
    return products if len(pixels) > 1 else products[0, 0]


def _convolved(
    embedding: SoundEmbedding, frames: Array, d_model: int, *extra: Array
) -> tuple[Array, Array]:
    """Second moments after the last activation, and before it.

    Args:
        frames: of `_products`.
        d_model: features of every convolution's output.
        extra: additional covariances across replicas of every convolution's entries, each followed
            by that of its bias if there is one.
    """
    covariances, output, inner = list(extra), frames, frames
    sequences = len(frames) if np.ndim(frames) == 4 else 1
    level = extra[0].level if extra else math.inf  # moments within a replica are constants
    with laws.evaluating(laws.Layout(True, sequences), level):
        for number, kernel in enumerate(embedding.kernels):
            inner = _taps(output, kernel, embedding.strides[number]) * (d_model if number else 1)
            inner = inner * (embedding.variance + (covariances.pop(0) if extra else 0.0))
            if embedding.bias_variance is not None:
                inner = inner + (embedding.bias_variance + (covariances.pop(0) if extra else 0.0))
            output = laws.activation(embedding.activation, inner)
    return output, inner


def _taps(x: Array, kernel: int, stride: int) -> Array:
    """Sums of x over a convolution's taps, the same tap at both positions; padding is 0."""
    length, edge = x.shape[-1], kernel // 2
    places = np.arange((length + 2 * edge - kernel) // stride + 1) * stride - edge
    total: Array = 0.0
    for tap in range(kernel):
        index = places + tap
        inside = (index >= 0) & (index < length)
        index = np.clip(index, 0, length - 1)
        total = total + x[..., index[:, None], index] * np.outer(inside, inside)
    return total


# --- a sample image -------------------------------------------------------------------------------


def photograph(image_size: int, top: bool = True) -> np.ndarray:
    """A sample image: matplotlib's portrait of Grace Hopper, (1, 3, size, size).

    The largest square at the top (or bottom) of the photograph, resampled, with values mapped from
    [0, 1] to [-1, 1] as vision transformers expect.

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
