"""Statistics of softmax rows with Gaussian logits: exact, and tabulated for speed."""

from .exact import PairStatistics, RowStatistics, pair_statistics, row_statistics
from .norms import ChiSquareRule, PairRule, chi_square_pair_rule, chi_square_rule
from .table import SquareRows, SquareTable

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
