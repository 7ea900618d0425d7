"""The file that a sweep appends to: one line of JSON that says which sweep, then one a result.

The first line keeps the version of the package too: another one may predict otherwise, and does not
go on with the file.

A line is written whole by one call and reaches the disk before the next batch is asked for; what a
process that died left of a line is cut off by the next. The file is locked while a sweep writes, so
that two never write the same one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DomainError, brief

FORMAT = "moments sweep 1"


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of one configuration.

    Attributes:
        index: of the configuration, the last axis varying fastest.
        values: by quantity; empty where it was refused.
        warnings: of validity.
        refused: why there is nothing; None: there is.
        stream: variance, correlation, gradient variance and correlation along the depth, where
            profiles are kept.
    """

    index: int
    values: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    refused: str | None = None
    stream: tuple[list[float], ...] | None = None

    def line(self) -> str:
        """As stored."""
        data: dict[str, Any] = {"index": self.index}
        if self.refused is not None:
            data["refused"] = self.refused
        else:
            data["values"] = self.values
        if self.warnings:
            data["warnings"] = self.warnings
        if self.stream is not None:
            data["stream"] = self.stream
        return json.dumps(data, allow_nan=False, separators=(",", ":"))

    @classmethod
    def of_line(cls, text: str | bytes) -> Row:
        """Read what `line` wrote.

        Raises:
            ValueError: it did not.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or not isinstance(data.get("index"), int):
            raise ValueError("no index")
        stream = data.get("stream")
        return cls(
            data["index"],
            {str(name): float(value) for name, value in data.get("values", {}).items()},
            tuple(map(str, data.get("warnings", ()))),
            data.get("refused"),
            None if stream is None else tuple(stream),
        )


class Store:
    """A sweep's file, open for as long as the sweep runs."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    def append(self, rows: Iterable[Row]) -> None:
        """Write results, on disk when this returns."""
        text = "".join(f"{row.line()}\n" for row in rows).encode()
        while text:
            text = text[os.write(self._handle, text) :]
        os.fsync(self._handle)


@contextmanager
def opened(
    path: str | os.PathLike[str], header: Mapping[str, Any]
) -> Iterator[tuple[Store, list[Row]]]:
    """A file to append to, begun with `header`, and the results that it holds already.

    Raises:
        DomainError: it cannot be written, holds another sweep or none, or another process has it.
    """
    file = Path(path)
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise DomainError(f"path: cannot write {file}: {error.strerror or error}") from None
    try:
        _lock(handle, file)
        whole, found, rows = _read(file)
        if found is None:
            os.ftruncate(handle, 0)
            store = Store(file, handle)
            line = json.dumps({**_written(), **header}, allow_nan=False) + "\n"
            os.write(handle, line.encode())
        else:
            _check_same(file, found, header)
            os.ftruncate(handle, whole)
            store = Store(file, handle)
        yield store, rows
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Row]]:
    """The header and the results of a file, of a sweep that may still run.

    Raises:
        DomainError: no such file, or no sweep's.
    """
    _, header, rows = _read(Path(path))
    if header is None:
        raise DomainError(f"path = {str(path)!r}: no sweep: the file is empty")
    return header, rows


def _lock(handle: int, file: Path) -> None:
    """Alone, or refused; where the system knows no such locks (Windows) there is none."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DomainError(
            f"path: another process is writing {file}; wait for it, or use another file"
        ) from None


def _read(file: Path) -> tuple[int, dict[str, Any] | None, list[Row]]:
    """Bytes in whole lines, the header (None of an empty file) and the results."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DomainError(f"path: cannot read {file}: {error.strerror or error}") from None
    whole = raw.rfind(b"\n") + 1
    lines = raw[:whole].splitlines()
    if not lines:
        if raw and not raw.startswith(b'{"format": "moments sw'[: len(raw)]):
            raise _foreign(file)
        return 0, None, []
    try:
        header = json.loads(lines[0])
        named = header["format"]
    except (ValueError, TypeError, KeyError):
        raise _foreign(file) from None
    if named != FORMAT:
        raise DomainError(
            f"path: {file} is of format {brief(named)}, and this version reads {FORMAT!r}"
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(Row.of_line(line))
        except (ValueError, TypeError, AttributeError):
            raise DomainError(f"path: line {number} of {file} is no result of a sweep") from None
    return whole, header, rows


def _written() -> dict[str, Any]:
    """What a header says of who writes it."""
    from .. import __version__

    return {"format": FORMAT, "version": __version__}


def of_another_version(header: Mapping[str, Any]) -> str:
    """Whose predictions a file holds where they are not this version's, in words; else ""."""
    here, there = _written()["version"], header.get("version")
    if there == here:
        return ""
    whose = "a version that kept no number" if there is None else f"moments {brief(there)}"
    return f"predictions of {whose}, and those of {here} may be others"


def _foreign(file: Path) -> DomainError:
    return DomainError(f"path: {file} holds something else: name a new file")


def _check_same(file: Path, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raise where a file holds another sweep, or another version's, and say what differs."""
    wanted = json.loads(json.dumps({**_written(), **header}))
    if note := of_another_version(found):
        raise DomainError(
            f"path: {file} holds {note}: name a new file or remove this one, or go on with the "
            "version that began it; moments.Sweep.load reads what it holds"
        )
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            where = _difference(found.get(name), wanted.get(name))
            raise DomainError(
                f"path: {file} holds another sweep: {name}{where}; name a new file, or remove it"
            )


def _difference(there: Any, wanted: Any) -> str:
    """Where two entries first part, and how."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        for name in [*wanted, *there]:
            if there.get(name) != wanted.get(name):
                return f".{name}{_difference(there.get(name), wanted.get(name))}"
    return f" is {brief(there, 80)} there and {brief(wanted, 80)} here"
