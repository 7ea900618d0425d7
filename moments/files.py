"""Files: JSON read within bounds, atomic writes, and tables."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DomainError, brief, domain_error

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 2**26
"""Largest size of a JSON file in bytes."""
DEEPEST = 50
"""Largest depth of nested lists and objects; configs have four levels."""

MOST = 2**63 - 1
"""Largest integer of an array; JSON has no limit."""

StrPath = str | os.PathLike[str]


def read_json(
    path: StrPath, name: str, expected: str = "a readable JSON file", remedy: str = ""
) -> Any:
    """The content of a JSON file, in UTF-8 or another Unicode encoding.

    Args:
        path: of the file.
        name: of the argument, for the error.
        expected: a description of the expected file, for the error.
        remedy: what to do if there is no such file, for the error.

    Raises:
        DomainError: no such file, a folder, too large, not JSON, or nested too deeply.
    """
    raw = _bytes(path, name, expected, remedy)
    try:
        return parse_json(raw, name)
    except DomainError:
        raise
    except ValueError as error:
        raise domain_error(name, str(path), f"valid JSON ({error})") from None


def _bytes(path: StrPath, name: str, expected: str, remedy: str = "") -> bytes:
    shown = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: not the name of a file
        reason = getattr(error, "strerror", None) or str(error)
        raise domain_error(name, shown, f"{expected} ({reason})", remedy) from None
    if len(raw) > LARGEST:
        raise domain_error(name, shown, f"{expected} of at most {LARGEST >> 20} MiB")
    return raw


def read_toml(path: StrPath, name: str) -> dict[str, Any]:
    """The entries of a TOML file.

    Args:
        path: of the file.
        name: of the argument, for the error.

    Raises:
        DomainError: no such file, a folder, too large, or not TOML.
    """
    import tomllib

    raw = _bytes(path, name, "a readable TOML file")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise domain_error(name, str(path), f"valid TOML ({error})") from None


def parse_json(text: str | bytes, name: str) -> Any:
    """The content of a JSON text.

    Raises:
        DomainError: nested too deeply.
        ValueError: not JSON.
    """
    allowed = f"nested at most {DEEPEST} levels deep"
    try:
        content = json.loads(text)
    except RecursionError:
        raise domain_error(name, text[:40], allowed) from None
    level = [content]
    for _ in range(DEEPEST):
        level = [
            entry
            for value in level
            if isinstance(value, dict | list)
            for entry in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return content
    raise domain_error(name, text[:40], allowed)


def plain(value: Any) -> Any:
    """A value for JSON: lists for arrays and tuples, None for NaN and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(
    path: StrPath, name: str, expected: str = "a readable JSON file", remedy: str = ""
) -> dict[str, Any]:
    """The entries of a JSON file that contains one object; arguments as for `read_json`.

    Raises:
        DomainError: as `read_json`, or the content is no object.
    """
    content = read_json(path, name, expected, remedy)
    if not isinstance(content, dict):
        raise domain_error(name, str(path), f"a JSON object, not {brief(content)}")
    return content


@contextmanager
def replacing(path: StrPath, name: str = "") -> Iterator[Path]:
    """A temporary file that replaces `path` if the block ends without an error.

    Readers never see a part of the new file; concurrent writers have separate temporary files.

    Args:
        path: of the file; the temporary file has its suffix, which some writers read the format of.
        name: of the option for the path, for the error.

    Raises:
        DomainError: the file cannot be written.
    """
    requested = Path(path)
    prefix = f"{name}: " if name else ""
    if not requested.name:
        raise DomainError(f"{prefix}cannot write {str(path)!r}: not the name of a file")
    partial = None
    try:
        if requested.exists() and not requested.is_file():
            if requested.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            yield requested  # a pipe or a device cannot be replaced
            return
        import secrets  # would double the import time of this module

        target = Path(os.path.realpath(requested))  # follow a symbolic link
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        partial = target.with_name(f".{target.stem[:80]}-{secrets.token_hex(6)}{target.suffix}")
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield partial
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DomainError(f"{prefix}cannot write {path}: {reason}") from None
    finally:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)


def as_frame(rows: Iterable[Any], columns: Iterable[str] | None = None) -> pd.DataFrame:
    """A table of rows; imports pandas, which is slow to load, on the first call."""
    import pandas as pd

    return pd.DataFrame(rows, columns=None if columns is None else list(columns))


class Shown:
    """Base of results that print as their `table()`, if they have one, also in notebooks."""

    def __str__(self) -> str:
        table = getattr(self, "table", None)
        return repr(self) if table is None else str(table())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Serialised(Shown):
    """Base of printed results with a `to_dict` for JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
