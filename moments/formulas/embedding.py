"""Embedding tables: a look-up has the table's variance; tokens that share a row have one vector.

The token correlation of a text is the share of ordered pairs that repeat a token; a sum of tables
adds variances and covariances.
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Law, asymptotic, derived
from .references import kedia

_SHARED_ROW = {
    "mean": Law(lambda m: 0, kedia("A.1 and Table 15")),
    "variance": Law(
        lambda m, table_variance: table_variance, kedia("A.1"), note="Table 16 prints 0"
    ),
    "covariance": Law(
        lambda m, table_variance, pattern_correlation: table_variance * pattern_correlation,
        kedia("A.1 and Table 18"),
    ),
    "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
}


def _zipf_collision(m: Any, vocab_size: Any) -> Any:
    """sum_i p_i^2 under Zipf's law p_i proportional to 1/i."""
    return m.harmonic(vocab_size, 2) / m.harmonic(vocab_size, 1) ** 2


TOKEN_EMBEDDING = ComponentLaws(
    "token_embedding",
    "Token table read by text with Zipf-distributed tokens",
    {
        **_SHARED_ROW,
        "pattern_correlation": Law(
            _zipf_collision,
            derived("E N_i (N_i - 1) = L (L - 1) p_i^2 for multinomial counts"),
        ),
    },
    published={
        "pattern_correlation": asymptotic(
            lambda m, vocab_size, seq_len: (
                (_zipf_collision(m, vocab_size) * seq_len - 1) / (seq_len - 1)
            ),
            kedia("A.1"),
            "long sequences: counts replaced by their means, N_i = p_i L",
        )
    },
    simplified={
        "pattern_correlation": asymptotic(
            lambda m, vocab_size: m.pi**2 / (6 * m.log(vocab_size) ** 2),
            kedia("A.1 and Table 1"),
            "large vocabulary, long sequence",
        )
    },
)

SEGMENT_EMBEDDING = ComponentLaws(
    "segment_embedding",
    "Segment table, the split point uniform along the sequence",
    {
        **_SHARED_ROW,
        "pattern_correlation": Law(
            lambda m: m.ratio(2, 3),
            derived("a discrete uniform split gives exactly 2/3; test by enumeration"),
        ),
    },
    published={
        "pattern_correlation": asymptotic(
            lambda m, seq_len: (m.ratio(2, 3) * seq_len**2 - seq_len) / (seq_len * (seq_len - 1)),
            kedia("A.1"),
            "continuous split point",
        )
    },
)

POSITION_EMBEDDING = ComponentLaws(
    "position_embedding",
    "Learned position table: every position has a row of its own",
    {**_SHARED_ROW, "pattern_correlation": Law(lambda m: 0, kedia("A.1"))},
)
