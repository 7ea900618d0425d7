"""The declaration of what feeds layer 1 of a vision transformer: projected patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import domain_error
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_count,
    check_flag,
    check_number,
)
from .fields import Stored, settle


@dataclass(frozen=True)
class PatchEmbedding(Stored):
    """Square patches, each mapped to d_model features by one matrix, plus a position table.

    Args:
        image_size: height and width of an image in pixels.
        patch_size: height and width of a patch; divides image_size.
        patch_variance: variance of the entries of the projection, (channels * patch_size**2,
            d_model).
        position_variance: variance of a learned position table, one row per token; 0: there is
            none.
        channels: of an image.
        class_token: whether a learned vector stands before the patches.
        class_variance: variance of that vector's entries.
        bias_variance: variance of the projection's bias; 0: it starts at zero; None: there is none.
        norm: whether the sum is normalised.
        dropout: probability of dropping an entry of the result.
        norm_epsilon: added to the variance under that normalisation's square root.

    Raises:
        DomainError: a value outside what is allowed.
    """

    _part: ClassVar[str] = "embedding"

    image_size: int
    patch_size: int
    patch_variance: float
    position_variance: float = 0.0
    channels: int = 3
    class_token: bool = True
    class_variance: float = 0.0
    bias_variance: float | None = None
    norm: bool = False
    dropout: float = 0.0
    norm_epsilon: float = 0.0

    def __post_init__(self) -> None:
        settle(self, ("image_size", "patch_size", "channels"), check_count)
        if self.image_size % self.patch_size:
            allowed = f"a divisor of image_size = {self.image_size}"
            raise domain_error("patch_size", self.patch_size, allowed)
        settle(self, ["patch_variance"], check_number, POSITIVE)
        names = ("position_variance", "class_variance", "norm_epsilon", "bias_variance")
        settle(self, names, check_number, NONNEGATIVE)
        settle(self, ("class_token", "norm"), check_flag)
        settle(self, ["dropout"], check_number, PROBABILITY)
        if self.class_variance and not self.class_token:
            raise domain_error("class_variance", self.class_variance, "0 without a class token")

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """Tokens of one image: the patches, and the class token where there is one."""
        return self.patches + int(self.class_token)

    @property
    def patch_width(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch_size**2

    def __str__(self) -> str:
        size = f"{self.image_size} x {self.image_size} pixels"
        tables = [
            f"{self.patches} patches of {size}, {self.channels} channels, "
            f"projected at variance {self.patch_variance:.3g}"
        ]
        if self.position_variance:
            tables.append(f"positions {self.position_variance:.3g}")
        if self.class_token:
            tables.append(f"class token {self.class_variance:.3g}")
        tail = ", normalised" if self.norm else ""
        return " + ".join(tables) + tail + f", dropout {self.dropout:g}"
