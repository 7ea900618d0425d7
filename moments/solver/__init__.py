"""From objectives to weight variances and scales.

`block` and `layerwise` invert the formulas block by block, `search` what only a whole prediction
answers; `plan` is what comes out.

Imports `prediction`; the schemes stand on it. Start with `solve`.
"""

from .plan import Plan
from .solve import objectives, solve_objective

__all__ = ["Plan", "objectives", "solve_objective"]
