"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import audit, compare, first_step, papers, predict, reference, solve, validate
from .base import app, main

__all__ = [
    "app",
    "audit",
    "compare",
    "first_step",
    "main",
    "papers",
    "predict",
    "reference",
    "solve",
    "validate",
]
