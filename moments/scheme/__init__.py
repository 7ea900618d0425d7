"""Published initialisation and scaling schemes, a short function each.

`registry` lists and applies them; `plan` is `moments.solve`, for a scheme or an objective.

Imports `solver`. Start with `weights`.
"""

from .registry import Scheme, apply, schemes

__all__ = ["Scheme", "apply", "schemes"]
