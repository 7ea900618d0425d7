"""The file that a sweep appends to: a JSON line that identifies the sweep, then one per result.

An incomplete last line, from a killed process, is ignored, and cut off before the next result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DomainError, brief
from ..files import parse_json

FORMAT = "moments sweep 1"
QUANTITIES = {
    "variance": "signal variance at the output",
    "correlation": "token correlation at the output",
    "grad_variance": "gradient variance at the input",
    "grad_correlation": "gradient correlation at the input",
    "variance_growth": "signal variance, output / input",
    "grad_variance_growth": "gradient variance, input / output",
    "loss": "loss at initialisation",
    "loss_stderr": "deviation of one draw's loss",
    "logit_variance": "output logits' mean square",
}
"""Quantities of every configuration, of the last layer's output and the first layer's input."""

LONGEST = 2**24
"""Largest line in bytes; a profile of a thousand layers has a hundred thousand."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of configuration `index` (the last axis varies fastest): values by quantity, or
    why it was `refused`; `stream` is the four moments by depth of a sweep with profiles."""

    index: int
    values: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    refused: str | None = None
    stream: tuple[list[float], ...] | None = None

    def line(self) -> str:
        """The row as a line of JSON."""
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
    def of_line(cls, text: bytes) -> Row:
        """Parse the text of `line`; ValueError for any other text."""
        data = parse_json(text, "line")
        match data:
            case {"index": bool()}:
                raise ValueError("no index")
            case {"index": int(index), "refused": str(reason)}:
                return cls(index, refused=reason)
            case {"index": int(index), "values": dict(values)}:
                notes, stream = data.get("warnings", []), data.get("stream")
                if not (isinstance(notes, list) and all(isinstance(n, str) for n in notes)):
                    raise ValueError("warnings that are no texts")
                profile = None if stream is None else tuple(map(_numbers, stream))
                if profile is not None and (len(profile) != 4 or len(set(map(len, profile))) != 1):
                    raise ValueError("no four profiles of one length")
                if not set(values) <= set(QUANTITIES):
                    raise ValueError("a quantity that no sweep has")
                numbers = dict(zip(values, _numbers(list(values.values())), strict=True))
                return cls(index, numbers, tuple(notes), None, profile)
        raise ValueError("no index with values or a reason")


def _numbers(values: Any) -> list[float]:
    """A list of finite numbers as floats; ValueError for anything else."""
    if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
        raise ValueError("no numbers")
    try:
        numbers = [float(value) for value in values]
    except OverflowError as error:
        raise ValueError(str(error)) from None
    if not all(map(math.isfinite, numbers)):
        raise ValueError("numbers that are not finite")
    return numbers


class Store:
    """A sweep's file, open while the sweep runs."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file

    def append(self, rows: Iterable[Row]) -> None:
        """Write results."""
        self.write("".join(f"{row.line()}\n" for row in rows))

    def write(self, lines: str) -> None:
        data = lines.encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise DomainError(
                f"path: cannot write {self.path}: {error.strerror or error}; the whole lines in it "
                "stay, and the same call goes on from there"
            ) from None


@contextmanager
def opened(
    path: str | os.PathLike[str], header: Mapping[str, Any]
) -> Iterator[tuple[Store, list[Row]]]:
    """Open a new file, or one of the sweep with this `header`, to append to it.

    Yields the store and the results in the file. DomainError if the file cannot be written or is
    not of this sweep.
    """
    place = Path(path)
    expected = json.loads(json.dumps({**_version_header(), **header}, allow_nan=False))
    stored, rows, size = _read(place) if place.exists() else (None, [], 0)
    if stored is not None:
        _check_same(place, stored, expected)
    try:
        file = open(place, "ab", buffering=0)  # noqa: SIM115 (`with` below)
        file.truncate(size)
    except OSError as error:
        raise DomainError(f"path: cannot write {place}: {error.strerror or error}") from None
    with file:
        store = Store(place, file)
        if stored is None:
            store.write(json.dumps(expected, allow_nan=False) + "\n")
        yield store, rows


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Row]]:
    """The header and the results in the file of a finished, running or killed sweep; DomainError if
    it has no header."""
    header, rows, _ = _read(Path(path))
    if header is None:
        raise DomainError(f"path = {str(path)!r}: no sweep: the file is empty")
    return header, rows


def _read(place: Path) -> tuple[dict[str, Any] | None, list[Row], int]:
    """The header (None for an empty file), the results, and the size of complete lines in bytes."""
    try:
        if place.exists() and not place.is_file():
            raise DomainError(f"path: {place} is no regular file: name a new file")
        with open(place, "rb") as file:
            first = file.readline(LONGEST)
            header, length, rows = _header(place, first), len(first), []
            if header is None:
                return None, [], 0
            size = math.prod(map(len, header["axes"].values()))
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), start=2):
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    break
                try:
                    row = Row.of_line(line)
                except (ValueError, TypeError) as error:
                    raise _damaged(place, number, error) from None
                if not 0 <= row.index < size:
                    raise _damaged(place, number, f"no configuration has the index {row.index}")
                rows.append(row)
                length += len(line)
    except OSError as error:
        raise DomainError(f"path: cannot read {place}: {error.strerror or error}") from None
    return header, rows, length


def _header(place: Path, first: bytes) -> dict[str, Any] | None:
    if not first.endswith(b"\n"):
        # An incomplete first line is compared up to where headers of all versions agree.
        prefix = json.dumps(_version_header()).encode()[: len('{"format": "moments sw')]
        if prefix.startswith(first[: len(prefix)]) and len(first) < LONGEST:
            return None
        raise _foreign(place)
    try:
        header = parse_json(first, "line")
        format_name = header["format"]
    except (ValueError, TypeError, KeyError):
        raise _foreign(place) from None
    if format_name != FORMAT:
        raise DomainError(
            f"path: {place} is of format {brief(format_name)}, and this version reads {FORMAT!r}"
        )
    kinds = {"model": dict, "axes": dict, "theory": str, "inputs": dict, "profile": bool}
    for name, kind in kinds.items():
        if not isinstance(header.get(name), kind):
            raise _damaged(place, 1, f"{name} is {brief(header.get(name), 80)}")
    if not all(isinstance(values, list) for values in header["axes"].values()):
        raise _damaged(place, 1, "an axis is no list")
    return dict(header)


def _version_header() -> dict[str, Any]:
    from .. import __version__

    return {"format": FORMAT, "version": __version__}


def of_another_version(header: Mapping[str, Any]) -> str:
    """A note if a file was written by another version of the package, else ""."""
    version, stored = _version_header()["version"], header.get("version")
    if stored == version:
        return ""
    source = "a version that kept no number" if stored is None else f"moments {brief(stored)}"
    return f"predictions of {source}, and those of {version} may be others"


def _foreign(place: Path) -> DomainError:
    return DomainError(f"path: {place} holds something else: name a new file")


def _damaged(place: Path, number: int, why: object) -> DomainError:
    return DomainError(
        f"path: line {number} of {place} is none of a sweep's ({brief(str(why), 120)[1:-1]}): "
        "take that line out, or name a new file"
    )


def _check_same(place: Path, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise DomainError with the first difference if a file is of another sweep or version."""
    if note := of_another_version(stored):
        raise DomainError(
            f"path: {place} holds {note}: name a new file or remove this one, or go on with the "
            "version that began it; moments.Sweep.load reads what it holds"
        )
    for name in sorted({*stored, *expected}):
        if stored.get(name) != expected.get(name):
            where = _difference(stored.get(name), expected.get(name))
            raise DomainError(
                f"path: {place} holds another sweep: {name}{where}; name a new file, or remove it"
            )


def _difference(stored: Any, expected: Any) -> str:
    """The path to the first difference of two entries, and both values."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        for name in [*expected, *stored]:
            if stored.get(name) != expected.get(name):
                return f".{name}{_difference(stored.get(name), expected.get(name))}"
    return f" is {brief(stored, 80)} there and {brief(expected, 80)} here"
