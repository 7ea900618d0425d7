"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import audit, compare, predict, reference, solve, validate
from .base import app, main

__all__ = ["app", "audit", "compare", "main", "predict", "reference", "solve", "validate"]
