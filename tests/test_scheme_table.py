"""All schemes side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import schemes as benchmark

import moments
from moments.scheme import schemes
from moments.show.plot import MOST_LINES, in_rows
from moments.show.scheme_table import compare_schemes
from studies.analysis import sensitivity


def model(**changes: Any) -> moments.Transformer:
    fields = {"layers": 3, "d_model": 128, "heads": 1, "seq_len": 32, "dropout": 0.1}
    return moments.Transformer(**{**fields, **changes})


def test_every_scheme_has_a_row() -> None:
    compared = compare_schemes(model(), correlation=0.25)
    assert not compared.left_out
    frame = compared.to_frame().set_index("scheme")
    assert list(frame.index) == [scheme.name for scheme in schemes()]
    assert np.all(np.isfinite(frame.drop(columns="norm").to_numpy(dtype=float)))
    plain = moments.predict(model().with_scheme("lns"), correlation=0.25)
    row = frame.loc["lns"]
    assert row.variance_growth == pytest.approx(plain.variance[-1])
    assert row.gradient_ratio == pytest.approx(plain.grad_variance[0])
    assert row.final_correlation == pytest.approx(plain.correlation[-1])
    assert row.sensitivity == pytest.approx(sensitivity(plain).median, rel=1e-9)
    assert frame.loc["dslm"].variance_growth == pytest.approx(1.0, abs=0.1)
    assert (frame.loc["deepnorm"].norm, frame.loc["t-fixup"].norm) == ("post", "none")
    assert f"{len(schemes())} schemes" in str(compared)
    figure = compared.plot()
    drawn = {label for ax in figure.axes for label in ax.get_legend_handles_labels()[1]}
    assert drawn == set(frame.index)


def test_a_choice_and_what_cannot_be_applied() -> None:
    base = model(d_model=60, causal=True, embedding=moments.Embedding(50, 0.02, dropout=0.1))
    compared = compare_schemes(base, ["xavier", "group-ln", "dslm"], token_ids=np.arange(32) % 5)
    assert list(compared.predictions) == ["xavier", "dslm"]
    assert "norm_groups" in compared.left_out["group-ln"]
    assert "without group-ln" in str(compared)
    np.testing.assert_allclose(compared.predictions["dslm"].variance, 1.0, rtol=1e-6)
    assert list(compare_schemes(base, "lns").predictions) == ["lns"]
    with pytest.raises(moments.DomainError, match=r"did you mean .*lns"):
        compare_schemes(base, ["lnss"])
    with pytest.raises(moments.DomainError, match=r"moments\.Transformer"):
        compare_schemes("bert-base")  # type: ignore[arg-type]


def test_uncorrelated_input_solves_dslm() -> None:
    compared = compare_schemes(model(), ["dslm", "admin"])
    np.testing.assert_allclose(compared.predictions["dslm"].variance, 1.0, rtol=1e-6)


def test_rows_of_the_picture_are_readable() -> None:
    found = in_rows([scheme.name for scheme in schemes()])
    assert max(len(names) for _, names in found) <= MOST_LINES
    assert sum(len(names) for _, names in found) == len(schemes())


# --- every scheme simulated -----------------------------------------------------------------------


def test_every_scheme_was_simulated() -> None:
    runs = benchmark.stored()["runs"]
    for scheme in moments.schemes():
        for layers in benchmark.DEPTHS:
            assert runs[f"{scheme.name}/{layers}"]["seeds"] >= 8, scheme.name


def test_schemes_are_within_their_bounds() -> None:
    found = benchmark.rows(benchmark.stored(), 24)
    assert len(found) == len(schemes())
    assert {row.name: row.beyond() for row in found if row.beyond()} == {}


def test_what_counts_as_outside_the_bounds() -> None:
    exact = dict.fromkeys(("growth", "gradient", "correlation"), 0.01)

    def row(norm: str, **errors: float) -> Any:
        numbers = (1.0, 1.0, 1.0, True, 0.5)
        found = {**dict.fromkeys(exact, 0.0), **errors}
        return benchmark.Row("lns", 24, norm, 8, *numbers, {}, found, exact)

    assert row("pre", growth=-0.039, gradient=0.049, correlation=0.034).beyond() == {}
    assert row("pre", growth=-0.05).beyond() == {"growth": pytest.approx(0.01)}
    assert row("pre", gradient=0.07).beyond() == {"gradient": pytest.approx(0.02)}
    assert row("post", gradient=0.07).beyond() == {}


def test_depths_simulated_agree() -> None:
    """DeepScaleLM's stored runs at 192 and 1000 layers: variance near 1, ratios alike."""
    runs = benchmark.stored()["depth"]
    near = [name for name in runs if name.startswith("dslm") and "/192/" in name]
    pairs = [name for name in near if name.replace("/192/", "/1000/") in runs]
    assert len(pairs) >= 2
    for pair in pairs:
        first, last = runs[pair], runs[pair.replace("/192/", "/1000/")]
        (a, error_a), (b, error_b) = first["typical_ratio"], last["typical_ratio"]
        assert abs(np.log(a / b)) < 3 * np.hypot(error_a / a, error_b / b), pair
        for run in (first, last):
            value, stderr = run["last_variance"]
            assert abs(value - 1) < 0.1 + 2 * stderr, pair
