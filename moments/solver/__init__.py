"""From objectives to weight variances and scales.

`block` and `layerwise` invert the formulas block by block, `search` finds roots of numbers that
need a whole prediction; `plan` is the result.

Imports `prediction`; the schemes import this package. Start with `solve`.
"""

from .plan import Plan
from .solve import objectives, solve_objective

__all__ = ["Plan", "objectives", "solve_objective"]
