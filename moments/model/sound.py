"""The declaration of what feeds layer 1 of an encoder of sound: convolutions over a spectrogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import DomainError
from ..formulas.activation import activation_laws
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_choice,
    check_count,
    check_number,
)
from .fields import Stored, set_field, settle


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

    bins: int
    frames: int
    variance: float
    kernels: tuple[int, ...] = (3, 3)
    strides: tuple[int, ...] = (1, 2)
    activation: str = "gelu"
    bias_variance: float | None = None
    positions: str = "sinusoidal"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        settle(self, ("bins", "frames"), check_count)
        settle(self, ["variance"], check_number, POSITIVE)
        settle(self, ["bias_variance"], check_number, NONNEGATIVE)
        settle(self, ["dropout"], check_number, PROBABILITY)
        for name in ("kernels", "strides"):
            given: Any = getattr(self, name)
            if not isinstance(given, list | tuple) or not given:
                raise DomainError(f"{name} must be a list of one number per convolution")
            set_field(self, name, tuple(check_count(name, one) for one in given))
        if len(self.kernels) != len(self.strides):
            raise DomainError("kernels and strides must be as many: one per convolution")
        activation_laws(self.activation)
        check_choice("positions", self.positions, ("sinusoidal", "none"))

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
