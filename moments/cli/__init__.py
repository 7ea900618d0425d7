"""The command `moments`: thin wrappers that parse, call the library and print.

The commands stand in `predict`, `pages`, `check` and `reference`, in the order of the help.
"""

from . import predict, pages, check, reference  # isort: skip
from .base import app, main

__all__ = ["app", "check", "main", "pages", "predict", "reference"]
