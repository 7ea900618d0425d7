"""One BLAS thread where matrices are small: more of them wait for each other longer than they work.

Measured on two cores that others used too, 1 thread against 2: a model by token at length 256 takes
a sixth of the time and a fifth of the processor's (1.3 s and 0.7 s for 8.1 s and 3.2 s), by classes
of positions three quarters of the time. Needs threadpoolctl (the extra "threads"); without it
nothing is changed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SMALL = 512
"""Rows of matrices up to which one thread computes. Twice as many rows are eight times the work of
a product, some ten milliseconds, which threads share well."""


@contextmanager
def few_threads(rows: int) -> Iterator[None]:
    """One BLAS thread while matrices of so many rows are worked on; then as many as before.

    In the main thread alone: set from another, OpenBLAS's limit was seen not to hold there.
    """
    main = threading.current_thread() is threading.main_thread()
    controller = _controller() if 1 < rows <= SMALL and main else None
    if controller is None:
        yield
        return
    with controller.limit(limits=1, user_api="blas"):
        yield


@functools.cache
def _controller() -> Any:
    """Of the libraries that are loaded by then, numpy's among them; None without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()
