"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import audit, compare, papers, predict, reference, solve, sweep, validate
from .base import app, main

__all__ = [
    "app",
    "audit",
    "compare",
    "main",
    "papers",
    "predict",
    "reference",
    "solve",
    "sweep",
    "validate",
]
