"""The command `moments`: thin wrappers that parse, call the library and print."""

from . import (
    audit,
    check,
    compare,
    doctor,
    first_step,
    pages,
    papers,
    predict,
    reference,
    solve,
    sweep,
    validate,
)
from .base import app, main

__all__ = [
    "app",
    "audit",
    "check",
    "compare",
    "doctor",
    "first_step",
    "main",
    "pages",
    "papers",
    "predict",
    "reference",
    "solve",
    "sweep",
    "validate",
]
