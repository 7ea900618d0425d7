"""The command `moments`: thin functions that parse arguments, call the library and print.

The commands are in `predict`, `pages`, `check` and `reference`, in the order of the help.
"""

from . import predict, pages, check, reference  # isort: skip
from .base import app, main

__all__ = ["app", "check", "main", "pages", "predict", "reference"]
