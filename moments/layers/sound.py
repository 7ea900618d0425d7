"""Second moments behind convolutions over a spectrogram, and the gradients of those convolutions.

A convolution's output is Gaussian given its input, with the covariance of two places a sum over its
taps of what they read; at infinite width that holds layer by layer (derived here; a test holds it
to a real module). The derivatives are those of two replicas (`engine.laws`).
"""

from __future__ import annotations

import math

import numpy as np

from ..engine import laws
from ..engine.derivative import pullback
from ..engine.state import Array, Kernel
from ..formulas.activation import activation_laws
from ..model.sound import SoundEmbedding
from .embedding import FixedPart


def sound_kernel(
    embedding: SoundEmbedding, pixels: np.ndarray, d_model: int
) -> tuple[Kernel, FixedPart]:
    """What enters layer 1 but for dropout, (B L, B L), and of it what no feature has of its own:
    positions, and the means that activations leave.

    Args:
        embedding: the declaration.
        pixels: spectrograms as images, (B, 1, bins, frames).
        d_model: width.
    """
    behind, inner = _convolved(embedding, _products(pixels), d_model)
    own = laws.Layout(True, len(pixels)).joined(behind)
    read = np.diagonal(laws.Layout(True, len(pixels)).joined(inner))
    mean = np.asarray(activation_laws(embedding.activation).law("mean")(x_variance=read))
    rows = np.zeros((embedding.seq_len, d_model))
    if embedding.positions == "sinusoidal":
        half = d_model // 2
        speeds = 10000.0 ** (-np.arange(half) / max(half - 1, 1))
        angles = np.outer(np.arange(embedding.seq_len), speeds)
        rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    fixed = FixedPart.of_rows(np.tile(rows, (len(pixels), 1)) + mean[:, None])
    return Kernel.of_matrix(own - np.outer(mean, mean) + fixed.kernel.off_diagonal), fixed


def sound_gradients(
    embedding: SoundEmbedding, pixels: np.ndarray, d_model: int, gradient: Array
) -> dict[str, Array]:
    """Squared gradient norms of the convolutions and of their biases, by name.

    Args:
        embedding, pixels, d_model: as of `sound_kernel`.
        gradient: at the sum, (B L, B L).
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
    """Of frames, summed over their numbers: (B, B, frames, frames), or (frames, frames) of one."""
    found = np.einsum("aif,big->abfg", pixels[:, 0], pixels[:, 0])
    return found if len(pixels) > 1 else found[0, 0]


def _convolved(
    embedding: SoundEmbedding, frames: Array, d_model: int, *extra: Array
) -> tuple[Array, Array]:
    """Second moments behind the last activation, and before it.

    Args:
        embedding: the declaration.
        frames: products of what is read.
        d_model: features behind every convolution.
        extra: covariances across replicas of every convolution's entries, each followed by that of
            its bias where there is one; none: 0.
    """
    given, found, inner = list(extra), frames, frames
    sequences = len(frames) if np.ndim(frames) == 4 else 1
    level = extra[0].level if extra else math.inf  # what a replica has by itself is held constant
    with laws.evaluating(laws.Layout(True, sequences), level):
        for number, kernel in enumerate(embedding.kernels):
            inner = _taps(found, kernel, embedding.strides[number]) * (d_model if number else 1)
            inner = inner * (embedding.variance + (given.pop(0) if given else 0.0))
            if embedding.bias_variance is not None:
                inner = inner + (embedding.bias_variance + (given.pop(0) if given else 0.0))
            found = laws.activation(embedding.activation, inner)
    return found, inner


def _taps(x: Array, kernel: int, stride: int) -> Array:
    """Sums over a convolution's taps of x at both places, padding being zero."""
    length, edge = x.shape[-1], kernel // 2
    places = np.arange((length + 2 * edge - kernel) // stride + 1) * stride - edge
    total: Array = 0.0
    for tap in range(kernel):
        read = places + tap
        there = (read >= 0) & (read < length)
        read = np.clip(read, 0, length - 1)
        total = total + x[..., read[:, None], read] * np.outer(there, there)
    return total
