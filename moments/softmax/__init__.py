"""Statistics of softmax rows with Gaussian logits: exact, and tabulated for speed."""

from moments.softmax.chisquare import (
    ChiSquareRule,
    PairRule,
    chi_square_pair_rule,
    chi_square_rule,
)
from moments.softmax.exact import (
    PairStatistics,
    RowStatistics,
    pair_statistics,
    row_statistics,
)
from moments.softmax.table import SquareRows, SquareTable

__all__ = [
    "ChiSquareRule",
    "PairRule",
    "PairStatistics",
    "RowStatistics",
    "SquareRows",
    "SquareTable",
    "chi_square_pair_rule",
    "chi_square_rule",
    "pair_statistics",
    "row_statistics",
]
