"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import audit, check, compare, doctor, pages, papers, predict, reference, solve, validate
from .base import app, main

__all__ = [
    "app",
    "audit",
    "check",
    "compare",
    "doctor",
    "main",
    "pages",
    "papers",
    "predict",
    "reference",
    "solve",
    "validate",
]
