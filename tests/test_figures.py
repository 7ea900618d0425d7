"""The papers' figures, redrawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moments
from studies.analysis import angular_distance
from studies.figures import draw, names, setup
from studies.figures.__main__ import main
from studies.figures.drawing import key, stored
from studies.figures.setup import LAYER_NORM, HeatMap, read
from studies.figures.simulate import made_with

LINES = [
    (name, index, line)
    for name in names()
    for index, panel in enumerate(setup(name).panels)
    for line in panel.lines
    if line.points
]


def test_figures_are_named_by_paper_and_number() -> None:
    for name in names():
        paper, _, number = name.partition("-")
        assert setup(name).source.place.startswith(f"Figure {number}")
        assert paper in {"kedia", "sun", "noci"}
    with pytest.raises(moments.DomainError, match="kedia-13"):
        setup("kedia-5")


def test_points_are_those_of_the_declared_set_ups() -> None:
    for name, index, line in LINES:
        found = stored()[key(name, index, line.label)]
        assert made_with(found["made"], line), (name, line.label)
        assert len(found["x"]) == len(found["value"]) == len(found["stderr"])


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


def test_the_command_lists_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(names())
    assert "Pre-LN: forward variance grows linearly" in listed
    main(["kedia-13", "--folder", str(tmp_path / "new"), "--format", "svg"])
    assert (tmp_path / "new" / "kedia-13.svg").stat().st_size > 10_000


def test_axes_and_panels() -> None:
    (left, right) = draw("kedia-2").axes
    assert {ax.get_yscale() for ax in (left, right)} == {"log"}
    assert {ax.get_xscale() for ax in (left, right)} == {"symlog"}
    assert {panel.title for panel in setup("kedia-4").panels} == {"Pre-LN", "Post-LN"}
    with pytest.raises(moments.DomainError, match=r"\.svg or \.pdf"):
        draw("kedia-13", "figure.gif")


@pytest.mark.parametrize(
    ("name", "label"), [("kedia-7", "feed-forward block"), ("kedia-13", "exact")]
)
def test_swept_points_have_draws_of_their_own(name: str, label: str) -> None:
    """They scatter about the line as their errors say: shared draws would put all on one side."""
    line = next(line for line in setup(name).panels[0].lines if line.label == label)
    found = stored()[key(name, 0, label)]
    predicted = np.interp(found["x"], *line.predicted())
    off = (np.array(found["value"]) - predicted) / np.array(found["stderr"])
    # Seven draws of Student's t, from eight runs each: mean square 7/5, deviation of it .8.
    assert np.mean(off**2) < 3.0
    assert abs(np.mean(off)) < 3 * np.sqrt(7 / 5 / 7)


def test_sun_is_labelled_as_initialisation() -> None:
    for name in names():
        if name.startswith("sun"):
            assert "AT INITIALISATION" in setup(name).title
            assert "The paper shows" in setup(name).settings


def test_heat_maps_read_by_layer_and_steps() -> None:
    pre = setup("sun-3").panels[1]
    assert isinstance(pre, HeatMap)
    values = pre.distances()
    expected = angular_distance(pre.predicted)
    assert values.shape == (12, 12)
    for steps in (1, 5, 12):
        kept = values[steps - 1]
        np.testing.assert_array_equal(kept[: 13 - steps], expected.from_layer(steps))
        assert np.all(np.isnan(kept[13 - steps :]))
    figure = draw("sun-3")
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == ["Post-LN", "Pre-LN"]
    assert "angular distance" in figure.axes[2].get_ylabel()


def test_norms_of_a_layers_weight_gradients() -> None:
    model = moments.Transformer(2, 32, 2, 16, dropout=0.1)
    predicted, none = read(moments.predict(model, correlation=0.3), LAYER_NORM)
    values, stderr = read(moments.simulate(model, correlation=0.3, seeds=16), LAYER_NORM)
    assert none is None
    assert stderr is not None
    assert predicted.shape == values.shape == stderr.shape == (2,)
    assert np.all(np.abs(predicted - values) < 3 * stderr + 0.03 * values)
    assert np.all(stderr < 0.2 * values)


def test_bars_on_a_logarithmic_axis_stay_above_zero() -> None:
    (ax,) = draw("noci-8").axes[:1]
    for container in ax.containers:
        (bars,) = container[2]
        assert min(segment[:, 1].min() for segment in bars.get_segments()) > 0
