"""Files: JSON read within bounds, whatever is written there whole or not at all, and tables."""

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
"""Bytes of a JSON file: more is no config, plan or store of simulations."""
DEEPEST = 50
"""Levels of lists and objects inside each other; configs have four."""

MOST = 2**63 - 1
"""The largest integer that arrays hold; JSON has no limit of its own."""

StrPath = str | os.PathLike[str]


def read_json(
    path: StrPath, name: str, expected: str = "a readable JSON file", remedy: str = ""
) -> Any:
    """What a JSON file holds, in UTF-8 or another Unicode encoding.

    Args:
        path: of the file.
        name: of the argument, for the error.
        expected: what the file should have been, for the error.
        remedy: what to do where there is no such file, likewise.

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
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
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
    """What a JSON text says.

    Raises:
        DomainError: nested too deeply.
        ValueError: not JSON.
    """
    deep = f"nested at most {DEEPEST} levels deep"
    try:
        found = json.loads(text)
    except RecursionError:
        raise domain_error(name, text[:40], deep) from None
    level = [found]
    for _ in range(DEEPEST):
        level = [
            entry
            for value in level
            if isinstance(value, dict | list)
            for entry in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise domain_error(name, text[:40], deep)


def plain(value: Any) -> Any:
    """A value as JSON has it: lists for arrays and tuples, null for numbers it has no word for."""
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
    """The entries of a JSON file that holds one object; `remedy` is for one that is not there.

    Raises:
        DomainError: as `read_json`, or the file holds something else.
    """
    found = read_json(path, name, expected, remedy)
    if not isinstance(found, dict):
        raise domain_error(name, str(path), f"a JSON object, not {brief(found)}")
    return found


@contextmanager
def replacing(path: StrPath, name: str = "") -> Iterator[Path]:
    """A temporary file that takes the place of `path` once the block ends without an error.

    A reader sees the old file or the new one, never a part; writers side by side have a file each.

    Args:
        path: of the file; its ending is kept, since some writers choose the format by it.
        name: of the option that gave it, for the error.

    Raises:
        DomainError: the file cannot be written there.
    """
    given = Path(path)
    said = f"{name}: " if name else ""
    if not given.name:
        raise DomainError(f"{said}cannot write {str(path)!r}: not the name of a file")
    partial = None
    try:
        if given.exists() and not given.is_file():
            if given.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            yield given  # a pipe or a device, which nothing can take the place of
            return
        import secrets  # half of what loading this module would take

        target = Path(os.path.realpath(given))  # a link stays a link
        kept = target.stat().st_mode & 0o777 if target.exists() else None
        partial = target.with_name(f".{target.stem[:80]}-{secrets.token_hex(6)}{target.suffix}")
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield partial
        if kept is not None:
            os.chmod(partial, kept)
        os.replace(partial, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DomainError(f"{said}cannot write {path}: {reason}") from None
    finally:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)


def as_frame(rows: Iterable[Any], columns: Iterable[str] | None = None) -> pd.DataFrame:
    """A table of rows; pandas, which takes a while to load, is loaded when one is asked for."""
    import pandas as pd

    return pd.DataFrame(rows, columns=None if columns is None else list(columns))


class Shown:
    """What prints as its `table()`, where it has one, and shows in a notebook as it prints."""

    def __str__(self) -> str:
        table = getattr(self, "table", None)
        return repr(self) if table is None else str(table())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Serialised(Shown):
    """The same with a `to_dict` that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
