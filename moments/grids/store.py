"""The file that a sweep appends to: one line of JSON that says which sweep, then one per result. A
last line without its end is a dead process's: it is ignored, and cut off before the next."""

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
"""What a sweep keeps of every configuration: at the last layer's output, at the first one's input.
"""

LONGEST = 2**24
"""Bytes of a line: a profile of a thousand layers has a hundred thousand."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of the configuration `index` (the last axis varies fastest): values by quantity,
    or why it was `refused`; and the four moments along the depth where profiles are kept."""

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
    def of_line(cls, text: bytes) -> Row:
        """Read what `line` wrote; ValueError for anything else."""
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
                kept = None if stream is None else tuple(map(_numbers, stream))
                if kept is not None and (len(kept) != 4 or len(set(map(len, kept))) != 1):
                    raise ValueError("no four profiles of one length")
                if not set(values) <= set(QUANTITIES):
                    raise ValueError("a quantity that no sweep has")
                numbers = dict(zip(values, _numbers(list(values.values())), strict=True))
                return cls(index, numbers, tuple(notes), None, kept)
        raise ValueError("no index with values or a reason")


def _numbers(values: Any) -> list[float]:
    """Finite numbers; ValueError for others."""
    if not isinstance(values, list) or not all(type(one) in (int, float) for one in values):
        raise ValueError("no numbers")
    try:
        numbers = [float(one) for one in values]
    except OverflowError as error:
        raise ValueError(str(error)) from None
    if not all(map(math.isfinite, numbers)):
        raise ValueError("numbers that are not finite")
    return numbers


class Store:
    """A sweep's file, open for as long as the sweep runs."""

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
    """A file (which may be new) to append to, begun with a `header` that says which sweep it is,
    and the results that it holds; DomainError where it holds something else or cannot be written.
    """
    place = Path(path)
    wanted = json.loads(json.dumps({**_written(), **header}, allow_nan=False))
    there, rows, whole = _read(place) if place.exists() else (None, [], 0)
    if there is not None:
        _check_same(place, there, wanted)
    try:
        file = open(place, "ab", buffering=0)  # noqa: SIM115 (`with` below)
        file.truncate(whole)
    except OSError as error:
        raise DomainError(f"path: cannot write {place}: {error.strerror or error}") from None
    with file:
        store = Store(place, file)
        if there is None:
            store.write(json.dumps(wanted, allow_nan=False) + "\n")
        yield store, rows


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Row]]:
    """The header and the results of a file, of a sweep that may still run; DomainError where it has
    none."""
    header, rows, _ = _read(Path(path))
    if header is None:
        raise DomainError(f"path = {str(path)!r}: no sweep: the file is empty")
    return header, rows


def _read(place: Path) -> tuple[dict[str, Any] | None, list[Row], int]:
    """The header (None of an empty file), the results, and the bytes of whole lines."""
    try:
        if place.exists() and not place.is_file():
            raise DomainError(f"path: {place} is no regular file: name a new file")
        with open(place, "rb") as file:
            first = file.readline(LONGEST)
            header, whole, rows = _header(place, first), len(first), []
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
                whole += len(line)
    except OSError as error:
        raise DomainError(f"path: cannot read {place}: {error.strerror or error}") from None
    return header, rows, whole


def _header(place: Path, first: bytes) -> dict[str, Any] | None:
    if not first.endswith(b"\n"):
        # A first line cut short is a sweep's of any version as far as this.
        begun = json.dumps(_written()).encode()[: len('{"format": "moments sw')]
        if begun.startswith(first[: len(begun)]) and len(first) < LONGEST:
            return None
        raise _foreign(place)
    try:
        header = parse_json(first, "line")
        named = header["format"]
    except (ValueError, TypeError, KeyError):
        raise _foreign(place) from None
    if named != FORMAT:
        raise DomainError(
            f"path: {place} is of format {brief(named)}, and this version reads {FORMAT!r}"
        )
    kinds = {"model": dict, "axes": dict, "theory": str, "inputs": dict, "profile": bool}
    for name, kind in kinds.items():
        if not isinstance(header.get(name), kind):
            raise _damaged(place, 1, f"{name} is {brief(header.get(name), 80)}")
    if not all(isinstance(values, list) for values in header["axes"].values()):
        raise _damaged(place, 1, "an axis is no list")
    return dict(header)


def _written() -> dict[str, Any]:
    from .. import __version__

    return {"format": FORMAT, "version": __version__}


def of_another_version(header: Mapping[str, Any]) -> str:
    """Whose predictions a file holds where they are not this version's, in words; else ""."""
    here, there = _written()["version"], header.get("version")
    if there == here:
        return ""
    whose = "a version that kept no number" if there is None else f"moments {brief(there)}"
    return f"predictions of {whose}, and those of {here} may be others"


def _foreign(place: Path) -> DomainError:
    return DomainError(f"path: {place} holds something else: name a new file")


def _damaged(place: Path, number: int, why: object) -> DomainError:
    return DomainError(
        f"path: line {number} of {place} is none of a sweep's ({brief(str(why), 120)[1:-1]}): "
        "take that line out, or name a new file"
    )


def _check_same(place: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise where a file holds another sweep, or another version's, and say what differs."""
    if note := of_another_version(there):
        raise DomainError(
            f"path: {place} holds {note}: name a new file or remove this one, or go on with the "
            "version that began it; moments.Sweep.load reads what it holds"
        )
    for name in sorted({*there, *wanted}):
        if there.get(name) != wanted.get(name):
            where = _difference(there.get(name), wanted.get(name))
            raise DomainError(
                f"path: {place} holds another sweep: {name}{where}; name a new file, or remove it"
            )


def _difference(there: Any, wanted: Any) -> str:
    """Where two entries first part, and how."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        for name in [*wanted, *there]:
            if there.get(name) != wanted.get(name):
                return f".{name}{_difference(there.get(name), wanted.get(name))}"
    return f" is {brief(there, 80)} there and {brief(wanted, 80)} here"
