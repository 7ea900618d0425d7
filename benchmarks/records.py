"""What is stored of runs, small: dictionaries as JSON, all lists of numbers as one array.

    save("schemes", {"runs": {"xavier/24": {"seeds": 24, "last_variance": [1.02, 0.01]}}})
    load("schemes")["runs"]["xavier/24"]["last_variance"]  # an array

Numbers keep so many bits of their mantissa (15: 2e-5 of the number, far below the Monte-Carlo error
of a mean over draws), are sorted by bytes and compressed: what is stored fits a repository.

    python benchmarks/records.py NAME    # prints what one file holds
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
BITS = 15
_MANTISSA = 52


def path_of(name: str | Path) -> Path:
    """Of a name below data/, or of a whole path."""
    return name if isinstance(name, Path) else DATA / f"{name}.npz"


def exists(name: str | Path) -> bool:
    """Whether there is such a file."""
    return path_of(name).exists()


def save(name: str | Path, tree: Any, bits: int = BITS) -> None:
    """Write a tree of dictionaries, lists, arrays, numbers and words; whole or not at all."""
    numbers: list[np.ndarray] = []
    skeleton = json.dumps(_without_numbers(tree, numbers), separators=(",", ":"))
    values = np.concatenate([*numbers, np.zeros(0)])
    planes = _rounded(values, bits).view(np.uint8).reshape(-1, 8).T
    part = path_of(name).with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, tree=np.frombuffer(skeleton.encode(), np.uint8), numbers=planes)
    part.replace(path_of(name))


def load(name: str | Path) -> Any:
    """What `save` wrote; lists of numbers are arrays."""
    with np.load(path_of(name)) as file:
        tree = json.loads(file["tree"].tobytes())
        values = np.ascontiguousarray(file["numbers"].T).view(np.float64).ravel()
    return _with_numbers(tree, values, [0])


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """To the nearest of so many bits; infinities and what is no number stay."""
    drop = _MANTISSA - bits
    words = np.ascontiguousarray(values, dtype=np.float64).view(np.uint64)
    near = (words + np.uint64(1 << (drop - 1))) & ~np.uint64((1 << drop) - 1)
    return np.where(np.isfinite(values), near.view(np.float64), values)


def _array(value: Any) -> np.ndarray | None:
    """The numbers of a rectangular list with fractions among them."""
    if isinstance(value, np.ndarray):
        return value.astype(float)
    if not isinstance(value, list) or not value:
        return None
    try:
        found = np.array(value)
    except ValueError:  # lists of several lengths
        return None
    return found if found.dtype.kind == "f" else None


def _without_numbers(value: Any, numbers: list[np.ndarray]) -> Any:
    if isinstance(value, dict):
        assert "$" not in value
        return {key: _without_numbers(entry, numbers) for key, entry in value.items()}
    array = _array(value)
    if array is not None:
        numbers.append(array.ravel())
        return {"$": list(array.shape)}
    if isinstance(value, list | tuple):
        return [_without_numbers(entry, numbers) for entry in value]
    return value


def _with_numbers(value: Any, values: np.ndarray, at: list[int]) -> Any:
    if isinstance(value, dict):
        if "$" in value:
            start, count = at[0], int(np.prod(value["$"]))
            at[0] += count
            return values[start : start + count].reshape(value["$"])
        return {key: _with_numbers(entry, values, at) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry, values, at) for entry in value]
    return value


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1]), indent=1, default=np.ndarray.tolist))
