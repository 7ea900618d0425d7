"""Published initialisation and scaling schemes, one small declarative definition each."""

from .registry import Scheme, apply, schemes

__all__ = ["Scheme", "apply", "schemes"]
