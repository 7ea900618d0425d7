"""Imports that only an extra brings: absent, they say which one to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MomentsError


@contextmanager
def optional(extra: str, *packages: str) -> Iterator[None]:
    """Turn a missing `packages` import inside the block into an error that names the extra.

    Args:
        extra: the extra of `transformer-moments` that brings the packages.
        packages: top-level import names; any other failing import passes through untouched.

    Raises:
        MomentsError: one of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in packages:
            raise
        raise MomentsError(
            f"this needs {missing.name}, which is not installed; "
            f'pip install "transformer-moments[{extra}]"'
        ) from missing
