"""Statistics of softmax rows with Gaussian logits: exact, and tabulated for speed."""

from .exact import PairStatistics, RowStatistics, pair_statistics, row_statistics
from .norms import ChiSquareRule, chi_square_rule
from .table import SquareRows, SquareTable

__all__ = [
    "ChiSquareRule",
    "PairStatistics",
    "RowStatistics",
    "SquareRows",
    "SquareTable",
    "chi_square_rule",
    "pair_statistics",
    "row_statistics",
]
