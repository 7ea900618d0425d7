"""The papers' statements about whole networks, from laws and from predictions.

Each returns a small frozen object with `to_frame()`; `boundaries` draws some of them over a
`moments.sweep`.
"""

from .boundary import boundaries
from .fixed_points import correlation_fixed_points, exponents
from .frozen import random_energy
from .growth import growth_exponents
from .kedia import chain_constants, compute_table
from .noci import gradient_gap
from .recursion import variance_recursion
from .sun import angular_distance, jacobian_bounds

__all__ = [
    "angular_distance",
    "boundaries",
    "chain_constants",
    "compute_table",
    "correlation_fixed_points",
    "exponents",
    "gradient_gap",
    "growth_exponents",
    "jacobian_bounds",
    "random_energy",
    "variance_recursion",
]
