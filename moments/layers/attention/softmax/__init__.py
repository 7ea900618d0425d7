"""Statistics of softmax rows with Gaussian logits, from tables."""

from .norms import ChiSquareRule, chi_square_rule
from .table import PairStatistics, RowStatistics, SquareTable

__all__ = ["ChiSquareRule", "PairStatistics", "RowStatistics", "SquareTable", "chi_square_rule"]
