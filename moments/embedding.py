"""The declaration of what feeds layer 1: embedding tables, their variances, norm and dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checks import check_count, check_fields, check_flag, check_in
from .symbols import NONNEGATIVE, POSITIVE, PROBABILITY


@dataclass(frozen=True)
class Embedding:
    """A sum of look-up tables, then optionally a normalisation, then dropout.

    Args:
        vocab_size: rows of the token table.
        token_variance: variance of its entries.
        position_variance: variance of a learned position table; 0 where there is none.
        segment_variance: variance of a segment table; 0 where there is none.
        norm: whether the sum is normalised (BERT) or not (GPT-2).
        dropout: probability of dropping an entry of the result.
        norm_epsilon: added to the variance under that normalisation's square root.

    Raises:
        DomainError: a value outside what is allowed.
    """

    vocab_size: int
    token_variance: float
    position_variance: float = 0.0
    segment_variance: float = 0.0
    norm: bool = False
    dropout: float = 0.0
    norm_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size, least=2)
        check_in("token_variance", self.token_variance, POSITIVE)
        check_in("position_variance", self.position_variance, NONNEGATIVE)
        check_in("segment_variance", self.segment_variance, NONNEGATIVE)
        check_in("norm_epsilon", self.norm_epsilon, NONNEGATIVE)
        check_flag("norm", self.norm)
        check_in("dropout", self.dropout, PROBABILITY)

    @property
    def variance(self) -> float:
        """Variance of the sum of the tables."""
        return self.token_variance + self.position_variance + self.segment_variance

    def replace(self, **changes: Any) -> Embedding:
        """A changed copy."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Embedding:
        """Read what `to_dict` wrote.

        Raises:
            DomainError: an unknown field.
        """
        check_fields("embedding", data, dataclasses.fields(cls))
        return cls(**data)

    def __str__(self) -> str:
        tables = [f"{self.vocab_size} tokens of variance {self.token_variance:.3g}"]
        if self.position_variance:
            tables.append(f"positions {self.position_variance:.3g}")
        if self.segment_variance:
            tables.append(f"segments {self.segment_variance:.3g}")
        tail = ", normalised" if self.norm else ""
        return " + ".join(tables) + tail + f", dropout {self.dropout:g}"
