"""Positions in attention: rotary queries and keys, and biases on the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import domain_error
from ..formulas.checks import (
    POSITIVE,
    check_count,
    check_interval,
)
from .fields import Nonnegative, Positive, Share, Stored, set_field

Array = NDArray[np.float64]
Offsets = NDArray[np.intp]


@dataclass(frozen=True)
class Rotary(Stored):
    """Rotary position embedding: pairs of features of queries and keys, rotated by w_m position.

    Args:
        fraction: fraction of each head's features that are rotated (1: all; GPT-NeoX .25).
        base: frequencies are w_m = base^(-2 m / R), m = 0 ... R/2 - 1, of R rotated features.
        speeds: the frequencies, one per pair of rotated features, if they are no powers of one base
            (scaled for longer texts); None: they are.
        grid: rows and columns of an image's patches, whose coordinates replace positions: half of
            the pairs of features are rotated by 2 pi base^(-4 m / d_head) times the vertical, the
            others by the same times the horizontal coordinate, from -1 to 1 between the image's
            edges. Tokens before the patches are not rotated. None: positions in the sequence.

    Raises:
        DomainError: a value outside what is allowed.

    Source:
        Su et al. 2021, RoFormer, section 3.2.2; of patches Simeoni et al. 2025, DINOv3, section
        3.2, and its released code.
    """

    _part: ClassVar[str] = "rotary"

    fraction: Share = 1.0
    base: Positive = 10000.0
    speeds: tuple[float, ...] | None = None
    grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speeds is not None:
            given = check_interval("speeds", self.speeds, POSITIVE)
            if given.ndim != 1:
                raise domain_error("speeds", self.speeds, "one positive number per pair")
            set_field(self, "speeds", tuple(given.tolist()))
        if self.grid is not None:
            if not isinstance(self.grid, list | tuple) or len(self.grid) != 2:
                raise domain_error("grid", self.grid, "rows and columns of patches")
            set_field(self, "grid", tuple(check_count("grid", side) for side in self.grid))
            if self.fraction != 1.0 or self.speeds is not None:
                raise domain_error("grid", self.grid, "None with a fraction or speeds")

    def check_width(self, d_head: int) -> None:
        """Raise DomainError unless each pair of a head's rotated features has one speed."""
        pairs = int(self.fraction * d_head) // 2
        if self.grid is not None and d_head % 4:
            raise domain_error("d_head", d_head, "a multiple of 4 where places of patches turn")
        if self.speeds is not None and len(self.speeds) != pairs:
            raise domain_error("speeds", f"{len(self.speeds)} numbers", f"{pairs}, one per pair")

    def frequencies(self, d_head: int) -> tuple[Array, Array]:
        """Frequencies w_m and their shares of the logit's covariance, which sum to 1.

        Features that are not rotated have the frequency 0.
        """
        pairs = int(self.fraction * d_head) // 2
        if pairs == 0:
            return np.zeros(1), np.ones(1)
        rotated = self.base ** (-np.arange(pairs) / pairs)
        if self.speeds is not None:
            rotated = np.array(self.speeds)
        if self.grid is not None:
            quarter = 2 * np.pi * self.base ** (-np.arange(pairs // 2) / (pairs // 2))
            rotated = np.concatenate([quarter, quarter])
        share = np.full(pairs, 2.0 / d_head)
        rest = 1.0 - float(share.sum())
        if rest <= 1e-12:
            return rotated, share
        return np.append(0.0, rotated), np.append(rest, share)

    def angles(self, positions: Any, d_head: int) -> Array:
        """Angles (tokens, m) of an image's tokens at these positions of a sequence that ends with
        the patches.

        Raises:
            DomainError: fewer tokens than there are patches.
        """
        assert self.grid is not None
        speeds, _ = self.frequencies(d_head)
        where = np.asarray(positions, dtype=np.float64)
        rows, columns = self.grid
        before = int(where.max(initial=0.0)) + 1 - rows * columns
        if before < 0:
            allowed = f"at least the {rows * columns} patches whose places turn"
            raise domain_error("seq_len", int(where.max()) + 1, allowed)
        patch = where.astype(np.intp) - before
        down, across = np.divmod(np.maximum(patch, 0), columns)
        places = (2 * down + 1) / rows - 1, (2 * across + 1) / columns - 1
        half = np.repeat([0, 1], len(speeds) // 2)
        return np.stack(places, 1)[:, half] * speeds * (patch >= 0)[:, None]

    def kernel(self, offset: Any, d_head: int) -> Array:
        """rho(offset) = sum_m share_m cos(w_m offset): the covariance of two logits whose relative
        positions differ by `offset`, over its value without rotation.

        With q_i and k_j of independent Gaussian projections, E over them of
        (R_i q)^T (R_j k) (R_i' q')^T (R_j' k') = d_head C_ii' C_jj' rho((j' - j) - (i' - i)).
        """
        frequencies, shares = self.frequencies(d_head)
        phases = np.multiply.outer(np.asarray(offset, dtype=np.float64), frequencies)
        return np.asarray(np.cos(phases) @ shares)

    def __str__(self) -> str:
        share = "" if self.fraction == 1.0 else f" on {self.fraction:g} of each head"
        if self.grid is not None:
            share = " of {} by {} patches".format(*self.grid)
        if self.speeds is not None:
            return f"rotary, speeds {max(self.speeds):.3g} to {min(self.speeds):.3g}{share}"
        return f"rotary, base {self.base:g}{share}"


@dataclass(frozen=True)
class RelativeBias(Stored):
    """A learned bias on the logits, one per head and bucket of relative positions (T5).

    Args:
        variance: of a table entry over heads.
        buckets: number of buckets; without a causal mask each direction has half of them.
        max_distance: tokens farther apart share the last bucket.

    Raises:
        DomainError: a value outside what is allowed.

    Source:
        Raffel et al. 2020, T5, section 2.1; bucket boundaries as in its released code.
    """

    _part: ClassVar[str] = "relative bias"

    variance: Nonnegative
    buckets: Annotated[int, partial(check_count, least=4)] = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        distance = check_count("max_distance", self.max_distance, least=self.buckets + 1)
        set_field(self, "max_distance", distance)

    def bucket(self, offset: Any, causal: bool) -> Offsets:
        """Bucket of key position minus query position.

        Near offsets have one bucket each; buckets of farther offsets grow in proportion to the
        distance, up to `max_distance`.
        """
        offset = np.asarray(offset, dtype=np.intp)
        count = self.buckets
        if causal:
            base, distance = np.zeros_like(offset), np.maximum(-offset, 0)
        else:
            count //= 2
            base, distance = np.where(offset > 0, count, 0), np.abs(offset)
        near = count // 2
        growth = math.log(self.max_distance / near)
        far = np.log(np.maximum(distance, near) / near) / growth * (count - near)
        bucket = np.where(distance < near, distance, near + far.astype(np.intp))
        return np.asarray(base + np.minimum(bucket, count - 1))

    def __str__(self) -> str:
        return f"{self.buckets} relative biases of variance {self.variance:.3g}"


def alibi_slopes(heads: int) -> Array:
    """Slope of the distance penalty of every head: geometric, from 2^(-8/heads) to 2^-8.

    If `heads` is no power of two, the slopes of the next smaller power and then every second slope
    of the next larger.

    Source:
        Press et al. 2022, ALiBi, section 3 and its released code.
    """
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    if power == heads:
        return np.asarray(slopes)
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between[: heads - power]])


__all__ = ["Array", "RelativeBias", "Rotary", "alibi_slopes"]
