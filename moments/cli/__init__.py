"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import audit, check, compare, papers, predict, reference, solve, validate
from .base import app, main

__all__ = [
    "app",
    "audit",
    "check",
    "compare",
    "main",
    "papers",
    "predict",
    "reference",
    "solve",
    "validate",
]
