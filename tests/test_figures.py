"""The papers' figures, redrawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import moments
from moments.figures import draw, names, setup
from moments.figures.catalogue import NAMES, _declared
from moments.figures.drawing import _unsimulated
from moments.figures.points import key, stored

ROOT = Path(__file__).parent.parent
LINES = [
    (name, index, line)
    for name in names()
    for index, panel in enumerate(setup(name).panels)
    for line in panel.lines
    if line.points
]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_catalogue_is_what_the_papers_modules_declare() -> None:
    for paper in set(NAMES.values()):
        assert list(_declared(paper)) == [name for name in NAMES if NAMES[name] == paper]
    with pytest.raises(moments.DomainError, match="kedia-13"):
        setup("kedia-5")


def test_points_are_those_of_the_declared_set_ups() -> None:
    made_with = script("figures").made_with
    simulated = set()
    for name, index, line in LINES:
        found = stored().get(key(name, index, line.label))
        if found is None:
            assert "NOT SIMULATED" in _unsimulated(setup(name))
            continue
        simulated.add(name)
        assert made_with(found["made"], line), (name, line.label)
        assert len(found["x"]) == len(found["value"]) == len(found["stderr"])
    assert simulated == set(names())


@pytest.mark.parametrize("name", ["kedia-13", "kedia-8", "noci-8", "noci-10"])
def test_lines_run_through_the_points(name: str) -> None:
    """Within 10 % and two standard errors in the median, where quick to predict."""
    for index, panel in enumerate(setup(name).panels):
        for line in panel.lines:
            if not line.points:
                continue
            found = stored()[key(name, index, line.label)]
            x, value, stderr = (np.array(found[part]) for part in ("x", "value", "stderr"))
            predicted = np.interp(x, *line.predicted())
            off = np.maximum(np.abs(predicted - value) - 2 * stderr, 0)
            assert np.median(off) < 0.1 * np.median(np.abs(value)), (line.label, panel.title)


def test_draw_saves_a_picture(tmp_path: Path) -> None:
    figure = draw("kedia-13", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "Figure 13" in figure.get_suptitle()
    (ax,) = figure.axes
    assert len(ax.containers) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "exact",
        "polynomial of Table 2",
    ]


def test_sun_is_labelled_as_initialisation() -> None:
    assert "INITIALISATION" in setup("sun-4").title


def test_the_page_of_schemes_is_the_registry() -> None:
    page = (ROOT / "docs/schemes.md").read_text(encoding="utf-8")
    benchmark = script("schemes")
    assert benchmark.listing() in page
    for layers in benchmark.DEPTHS:
        table = page.partition(f"## {layers} layers")[2].partition("\n## ")[0]
        for scheme in moments.schemes():
            assert f"| `{scheme.name}` |" in table, (scheme.name, layers)
