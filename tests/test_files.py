"""Reading JSON within bounds; files written whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from whole_models import save

from moments import DomainError
from moments.errors import brief, unknown_name
from moments.files import DEEPEST, read_json, read_object, replacing
from moments.validation import store
from moments.validation.store import StoredSimulation


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "Is a directory"),
        (b"", "valid JSON"),
        (b"\xff\xfe\x00", "valid JSON"),
        (b"[" * 100_000, f"at most {DEEPEST} levels"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), f"at most {DEEPEST} levels"),
        (b"9" * 5000, "valid JSON"),
        (b"[1]", "a JSON object, not .1."),
    ],
    ids=["folder", "empty", "bytes", "deep", "deeper", "long number", "list"],
)
def test_what_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "given"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(DomainError, match=said):
        read_object(path, "config")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "missing", "here/there"])
def test_a_name_of_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DomainError, match="config = "):
        read_json(tmp_path / name, "config")


def test_json_of_other_encodings_and_as_deep_as_allowed(tmp_path: Path) -> None:
    deep = "[" * DEEPEST + "]" * DEEPEST
    for number, raw in enumerate((deep.encode("utf-16"), b"\xef\xbb\xbf" + deep.encode())):
        (tmp_path / str(number)).write_bytes(raw)
        assert read_json(tmp_path / str(number), "config") == json.loads(deep)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    path.chmod(0o640)

    def broken(partial: Path) -> None:
        partial.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError), replacing(path) as partial:
        broken(partial)
    assert path.read_text() == "old"
    with replacing(path) as partial:
        assert partial.parent == tmp_path
        assert partial.suffix == ".csv"
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "link").symlink_to(path)
    with replacing(tmp_path / "link") as partial:
        partial.write_text("through")
    assert (tmp_path / "link").is_symlink()
    assert path.read_text() == "through"
    assert sorted(os.listdir(tmp_path)) == ["link", "table.csv"]


@pytest.mark.parametrize("name", ["", "/", ".", "folder", "nowhere/x", "x" * 300])
def test_where_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DomainError, match="cannot write"), replacing(name):
        pass
    assert os.listdir(tmp_path) == ["folder"]


def entry(seeds: int = 3) -> StoredSimulation:
    rows = dict.fromkeys(store.KEPT, np.ones(3))
    return StoredSimulation("0" * 16, seeds, 1.0, rows, rows, {}, {})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("measurements"),
        lambda data: data.update(measurements=[1]),
        lambda data: data["measurements"].update(x=3),
        lambda data: data["measurements"]["x"].update(values={"variance": "y"}),
        lambda data: data["measurements"]["x"].update(seeds=None),
    ],
)
def test_a_spoilt_store_is_refused(tmp_path: Path, spoil: Callable[[dict], object]) -> None:
    path = tmp_path / "runs.json"
    save(path, {"x": entry()})
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(DomainError, match="holds no simulations"):
        store.load(path)


def test_long_values_are_cut() -> None:
    for value in ("x" * 10**6, ["x"] * 10**6, {i: i for i in range(10**5)}, 10**5000, b"x" * 10**6):
        assert len(brief(value)) <= 240
    for value in (0.02, "gelu", [1, 2], {"b": 1}, None, True, 2**64):
        assert brief(value) == repr(value)


def test_the_nearest_names_are_said() -> None:
    assert "did you mean 'deepnorm'?" in str(unknown_name("scheme", "deepnrm", ["deepnorm", "x"]))
    for other in ("quite another", 3, None, "x" * 10**6):
        assert "must be one of deepnorm, x" in str(unknown_name("scheme", other, ["deepnorm", "x"]))
