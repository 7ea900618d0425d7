"""The declaration of embeddings: tables, their variances, norm and dropout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..errors import DomainError, domain_error
from .fields import (
    Flag,
    Natural,
    Nonnegative,
    Positive,
    PositiveVariance,
    Probability,
    Several,
    Stored,
    one_of,
)

POSITIONS = ("learned", "sinusoidal", "none")
_SINUSOIDAL_SQUARE = 0.5  # mean square of a sine and a cosine of one angle


@dataclass(frozen=True)
class Embedding(Stored):
    """A sum of look-up tables, then optionally a normalisation, then dropout.

    Args:
        vocab_size: number of rows of the token table.
        token_variance: variance of its entries.
        position_variance: variance of a learned position table; 0: no table.
        segment_variance: variance of a segment table; 0: no table.
        norm: whether the sum is normalised (BERT) or not (GPT-2).
        dropout: probability of dropping an entry of the result.
        norm_epsilon: added to the variance under that normalisation's square root.
        scale: factor of the token rows; sqrt(d_model) in the original Transformer and in Gemma.
        positions: "learned" (a table of `position_variance`), "sinusoidal" (the original
            Transformer's fixed sines and cosines, entries of mean square 1/2) or "none".
        position_base: b of their frequencies b^(-2 m/d_model), m = 0 ... d_model/2 - 1.
        padding_id: the token whose row is zero, without a gradient from the input; None: all rows
            are drawn.
        factor_dim: width of tables in front of a matrix (factor_dim, d_model); None: tables have
            the width d_model. With `norm` all tables have width factor_dim, and the matrix follows
            their norm and dropout (ELECTRA, ALBERT); without `norm` only the token table has, and
            positions are added behind the matrix (OPT-350m).
        factor_variance: variance of that matrix's entries.
        factor_bias: whether it has a bias, which starts at zero.

    Raises:
        DomainError: a value outside what is allowed.
    """

    _part: ClassVar[str] = "embedding"

    vocab_size: Several
    token_variance: Positive
    position_variance: Nonnegative = 0.0
    segment_variance: Nonnegative = 0.0
    norm: Flag = False
    dropout: Probability = 0.0
    norm_epsilon: Nonnegative = 0.0
    scale: Positive = field(default=1.0, kw_only=True)
    positions: Annotated[str, one_of(*POSITIONS)] = field(default="learned", kw_only=True)
    position_base: Positive = field(default=10000.0, kw_only=True)
    padding_id: Natural | None = field(default=None, kw_only=True)
    factor_dim: Several | None = field(default=None, kw_only=True)
    factor_variance: PositiveVariance | None = field(default=None, kw_only=True)
    factor_bias: Flag = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor()
        if self.positions != "learned" and self.position_variance:
            raise domain_error(
                "position_variance", self.position_variance, "0 unless positions are learned"
            )
        if self.padding_id is not None and self.padding_id >= self.vocab_size:
            allowed = f"below vocab_size = {self.vocab_size}"
            raise domain_error("padding_id", self.padding_id, allowed)

    def _check_factor(self) -> None:
        if (self.factor_dim is None) != (self.factor_variance is None):
            raise DomainError("factor_dim and factor_variance belong together: give both")
        if self.factor_dim is None:
            if self.factor_bias:
                raise domain_error("factor_bias", True, "False without factor_dim")
        elif not self.norm and (self.factor_bias or self.segment_variance):
            name = "factor_bias" if self.factor_bias else "segment_variance"
            allowed = "0 where the matrix widens token rows alone"
            raise domain_error(name, getattr(self, name), allowed, "norm=True")
        elif self.norm and self.positions == "sinusoidal":
            raise domain_error("positions", self.positions, "'learned' or 'none' with factor_dim")

    def table_width(self, d_model: int) -> int:
        """Features of the sum of the tables."""
        return self.factor_dim if self.factor_dim is not None and self.norm else d_model

    @property
    def row_variance(self) -> float:
        """Mean square of an entry of what the sum of the tables has of a token's row."""
        inner = 1.0
        if self.factor_dim is not None and not self.norm:
            inner = self.factor_dim * (self.factor_variance or 0.0)
        return inner * self.scale**2 * self.token_variance

    def unshared_overlap(self, d_model: int) -> float:
        """Relative variance of the overlap of two tokens' own rows, per feature of the stream: rows
        of fewer features overlap more."""
        if self.factor_dim is None:
            return 1.0 / d_model
        share = 1.0 if self.norm else self.row_variance / self.variance
        return 1.0 / d_model + share**2 / self.factor_dim

    @property
    def variance(self) -> float:
        """Mean square of an entry of the sum of the tables."""
        sinusoidal = self.positions == "sinusoidal"
        positions = _SINUSOIDAL_SQUARE if sinusoidal else self.position_variance
        return self.row_variance + positions + self.segment_variance

    def __str__(self) -> str:
        times = "" if self.scale == 1 else f" times {self.scale:.4g}"
        tables = [f"{self.vocab_size} tokens of variance {self.token_variance:.3g}{times}"]
        if self.position_variance:
            tables.append(f"positions {self.position_variance:.3g}")
        if self.positions == "sinusoidal":
            tables.append("sinusoidal positions")
        if self.segment_variance:
            tables.append(f"segments {self.segment_variance:.3g}")
        tail = ", normalised" if self.norm else ""
        if self.factor_dim is not None:
            tail += f", widened from {self.factor_dim} features by {self.factor_variance:.3g}"
        return " + ".join(tables) + tail + f", dropout {self.dropout:g}"
