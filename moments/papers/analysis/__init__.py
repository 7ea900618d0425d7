"""The papers' statements about whole networks, from laws and from predictions.

`correlation_fixed_points`, `growth_laws`, `dslm_bounds`, `growth_exponents`, `sensitivity`,
`trade_off`, `variance_recursion`, `jacobian_bounds`, `angular_distance`, `uniform_attention`,
`gradient_gap`, `compute_table`, `exponents`, `random_energy`, `named_cases`: each returns a small
frozen object with
`to_frame()`. `boundaries` draws some of them over a `moments.sweep`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "angular_distance": "sun",
    "boundaries": "boundary",
    "chain_constants": "kedia",
    "compute_table": "kedia",
    "correlation_fixed_points": "fixed_points",
    "dslm_bounds": "kedia",
    "exponents": "fixed_points",
    "gradient_gap": "noci",
    "growth_exponents": "growth",
    "growth_laws": "growth",
    "jacobian_bounds": "sun",
    "named_cases": "cases",
    "random_energy": "frozen",
    "sensitivity": "kedia",
    "trade_off": "kedia",
    "uniform_attention": "noci",
    "variance_recursion": "recursion",
}

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

if TYPE_CHECKING:
    from .boundary import boundaries
    from .cases import named_cases
    from .fixed_points import correlation_fixed_points, exponents
    from .frozen import random_energy
    from .growth import growth_exponents, growth_laws
    from .kedia import chain_constants, compute_table, dslm_bounds, sensitivity, trade_off
    from .noci import gradient_gap, uniform_attention
    from .recursion import variance_recursion
    from .sun import angular_distance, jacobian_bounds


# Loaded on first use. No submodule bears the name of a function: importing it would shadow that.
def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
