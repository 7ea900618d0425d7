"""Embeddings of images and sound: projected patches, or convolutions.

A spectrogram is an image of one channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.activation import activation_laws
from ..formulas.checks import (
    check_count,
)
from .fields import (
    Count,
    Flag,
    Natural,
    Nonnegative,
    Positive,
    Probability,
    Stored,
    one_of,
    set_field,
)

POSITIONS = ("learned", "sinusoidal", "none")


def _check_sides(name: str, value: Any) -> int | tuple[int, int]:
    """One number, or a pair of different numbers."""
    if not isinstance(value, list | tuple):
        return check_count(name, value)
    if len(value) != 2:
        raise domain_error(name, value, "one number, or height and width")
    first, second = (check_count(name, one) for one in value)
    return first if first == second else (first, second)


Sides = Annotated[int | tuple[int, int], _check_sides]


@dataclass(frozen=True)
class PatchEmbedding(Stored):
    """Square patches, each mapped to d_model features by one matrix, plus a position table.

    Tokens are an optional class token, optional registers, and patches row by row.

    Args:
        image_size: height and width of an image in pixels, or one number for both.
        patch_size: height and width of a patch; without a `stride` it divides image_size.
        patch_variance: variance of the entries of the projection, (channels * patch_size**2,
            d_model).
        position_variance: variance of a learned position table, one row per token.
        channels: number of channels of an image.
        class_token: whether the first token is a learned vector.
        class_variance: variance of that vector's entries.
        bias_variance: variance of the projection's bias; 0: it starts at zero; None: there is none.
        norm: whether the sum is normalised.
        dropout: probability of dropping an entry of the result.
        norm_epsilon: added to the variance under that normalisation's square root.
        stride: pixels from one patch to the next, vertically and horizontally, or one number for
            both; below patch_size patches overlap, and a rest at an edge is not read. None:
            patch_size.
        registers: number of further learned vectors behind the class token (registers, the
            distillation token of DeiT).
        register_variance: variance of those vectors' entries.
        positions: "learned" (a table of `position_variance`, 0: it starts at zero), "sinusoidal"
            (fixed sines and cosines of each coordinate in one half of the features, entries of mean
            square 1/2; zero for tokens that are no patches) or "none". None: "learned" if
            position_variance is above 0.

    Raises:
        DomainError: a value outside what is allowed.
    """

    _part: ClassVar[str] = "embedding"

    image_size: Sides
    patch_size: Count
    patch_variance: Positive
    position_variance: Nonnegative = 0.0
    channels: Count = 3
    class_token: Flag = True
    class_variance: Nonnegative = 0.0
    bias_variance: Nonnegative | None = None
    norm: Flag = False
    dropout: Probability = 0.0
    norm_epsilon: Nonnegative = 0.0
    stride: Sides | None = field(default=None, kw_only=True)
    registers: Natural = field(default=0, kw_only=True)
    register_variance: Nonnegative = field(default=0.0, kw_only=True)
    positions: Annotated[str, one_of(None, *POSITIONS)] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride is None and any(side % self.patch_size for side in self.sides):
            allowed = f"a divisor of image_size = {self.image_size}"
            raise domain_error("patch_size", self.patch_size, allowed)
        if self.patch_size > min(self.sides):
            raise domain_error("patch_size", self.patch_size, f"at most {min(self.sides)}")
        if self.class_variance and not self.class_token:
            raise domain_error("class_variance", self.class_variance, "0 without a class token")
        if self.register_variance and not self.registers:
            raise domain_error("register_variance", self.register_variance, "0 without registers")
        if self.position_variance and self.positions not in (None, "learned"):
            allowed = "0 unless positions are learned"
            raise domain_error("position_variance", self.position_variance, allowed)

    @property
    def placed(self) -> str:
        """How positions enter: "learned", "sinusoidal" or "none"."""
        return self.positions or ("learned" if self.position_variance else "none")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        return _both(self.image_size)

    @property
    def strides(self) -> tuple[int, int]:
        """Pixels from one patch to the next, down and across."""
        return _both(self.patch_size if self.stride is None else self.stride)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = (
            (side - self.patch_size) // stride + 1
            for side, stride in zip(self.sides, self.strides, strict=True)
        )
        return rows, columns

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def before(self) -> int:
        """Tokens that stand before the patches."""
        return self.class_token + self.registers

    @property
    def seq_len(self) -> int:
        """Tokens of one image."""
        return self.patches + self.before

    @property
    def patch_width(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch_size**2

    def __str__(self) -> str:
        size = f"{self.sides[0]} x {self.sides[1]} pixels"
        tables = [
            f"{self.patches} patches of {size}, {self.channels} channels, "
            f"projected at variance {self.patch_variance:.3g}"
        ]
        if self.placed == "learned":
            tables.append(f"positions {self.position_variance:.3g}")
        if self.placed == "sinusoidal":
            tables.append("sinusoidal positions")
        if self.class_token:
            tables.append(f"class token {self.class_variance:.3g}")
        if self.registers:
            tables.append(f"{self.registers} registers {self.register_variance:.3g}")
        tail = ", normalised" if self.norm else ""
        return " + ".join(tables) + tail + f", dropout {self.dropout:g}"


@dataclass(frozen=True)
class SoundEmbedding(Stored):
    """Convolutions over the frames of a spectrogram, each with an activation, plus positions.

    Every convolution is padded with zeros by half its kernel, and makes d_model features.

    Args:
        bins: numbers of a frame (mel bins).
        frames: of a spectrogram.
        variance: of the entries of every convolution.
        kernels: frames that each convolution reads.
        strides: frames from one of its outputs to the next.
        activation: behind each.
        bias_variance: variance of the convolutions' biases; 0: they start at zero; None: there are
            none.
        positions: "sinusoidal" (fixed; sines in the first half of the features, cosines in the
            second, of angles 10000^(-2 k/(d - 2)) times the position) or "none".
        dropout: probability of dropping an entry of the result.

    Raises:
        DomainError: a value outside what is allowed.
    """

    _part: ClassVar[str] = "embedding"
    channels: ClassVar[int] = 1
    norm: ClassVar[bool] = False

    bins: Count
    frames: Count
    variance: Positive
    kernels: tuple[int, ...] = (3, 3)
    strides: tuple[int, ...] = (1, 2)
    activation: str = "gelu"
    bias_variance: Nonnegative | None = None
    positions: Annotated[str, one_of("sinusoidal", "none")] = "sinusoidal"
    dropout: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kernels", "strides"):
            given: Any = getattr(self, name)
            if not isinstance(given, list | tuple) or not given:
                raise DomainError(f"{name} must be a list of one number per convolution")
            set_field(self, name, tuple(check_count(name, one) for one in given))
        if len(self.kernels) != len(self.strides):
            raise DomainError("kernels and strides must be as many: one per convolution")
        activation_laws(self.activation)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a spectrogram as an image of one channel."""
        return self.bins, self.frames

    @property
    def seq_len(self) -> int:
        """Tokens of one spectrogram."""
        length = self.frames
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            length = (length + 2 * (kernel // 2) - kernel) // stride + 1
        return length

    def __str__(self) -> str:
        steps = ", ".join(
            f"{kernel} frames by {stride}"
            for kernel, stride in zip(self.kernels, self.strides, strict=True)
        )
        added = " + sinusoidal positions" if self.positions == "sinusoidal" else ""
        return (
            f"{self.frames} frames of {self.bins} numbers, convolutions over {steps} of variance "
            f"{self.variance:.3g}, {self.activation}{added}, dropout {self.dropout:g}"
        )


def _both(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
