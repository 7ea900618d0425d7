"""Published initialisation and scaling schemes, a short function each.

`registry` says what a scheme is and applies one; `plan` is `moments.solve`, from a scheme or an
objective.

Imports `solver`. Start with `weights`.
"""

from .registry import Scheme, apply, schemes

__all__ = ["Scheme", "apply", "schemes"]
