"""From targets to weight variances and scales."""

from .plan import Plan
from .solve import objectives, solve

__all__ = ["Plan", "objectives", "solve"]
