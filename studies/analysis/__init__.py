"""The papers' statements about whole networks, from laws and from predictions.

Each returns a small frozen object with `to_frame()`; `boundaries` draws some of them over a
`moments.sweep`.
"""

from .boundary import boundaries
from .cases import named_cases
from .fixed_points import correlation_fixed_points, exponents
from .frozen import random_energy
from .growth import growth_exponents, growth_laws
from .kedia import chain_constants, compute_table, dslm_bounds, sensitivity, trade_off
from .noci import gradient_gap, uniform_attention
from .recursion import variance_recursion
from .sun import angular_distance, jacobian_bounds

__all__ = [
    "angular_distance",
    "boundaries",
    "chain_constants",
    "compute_table",
    "correlation_fixed_points",
    "dslm_bounds",
    "exponents",
    "gradient_gap",
    "growth_exponents",
    "growth_laws",
    "jacobian_bounds",
    "named_cases",
    "random_energy",
    "sensitivity",
    "trade_off",
    "uniform_attention",
    "variance_recursion",
]
