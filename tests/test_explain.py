"""`explain` walks one layer again: its numbers are the prediction's, its laws have names."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import moments
from moments.cli import app
from moments.prediction.explanation import Explanation, Step, explain

BASE = moments.Transformer(3, 64, 4, 16, dropout=0.1)
RUNNER = CliRunner()

CASES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post"},
    "none": {"norm": "none"},
    "scaled": {"skip_scale": 0.8, "branch_scale": 0.6, "layernorm_scaling": True},
    "sandwich": {"norm": "sandwich"},
    "hybrid": {"norm": "hybrid"},
    "b2t": {"norm": "b2t"},
    "gelu": {"activation": "gelu"},
    "gated": {"activation": "swiglu"},
    "gated without a name": {"activation": "tanh", "gated": True},
    "biased": {"biases": moments.Biases.torch_default(64)},
    "causal": {"causal": True, "activation": "gelu_tanh"},
    "parallel": {"parallel": True},
    "parallel, causal, two norms": {"parallel": True, "parallel_norms": 2, "causal": True},
    "dyt": {"normalization": "dyt"},
    "gains": {"norm_gain": 1.5},
    "normalised queries": {"qk_norm": "rmsnorm"},
    "decoder": {"encoder": moments.Transformer(2, 48, 4, 12)},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


def steps(found: Explanation, way: str, quantity: str) -> dict[str, Step]:
    """The last step of a site that gives a quantity: maps inside a gated block come first."""
    return {s.site: s for s in found.steps if (s.way, s.quantity) == (way, quantity)}


def point(model: moments.Transformer, layer: int, **inputs: Any) -> Any:
    frame = moments.predict(model, **inputs).to_frame()
    return frame[frame.layer == layer].set_index("site")


@pytest.mark.parametrize("case", CASES)
def test_every_site_has_the_predictions_variance_and_covariance(case: str) -> None:
    model = BASE.replace(**CASES[case])
    found, frame = explain(model, 2, correlation=0.3), point(model, 2, correlation=0.3)
    variances = steps(found, "forward", "variance")
    missing = set(frame.index) - set(variances) - {"stream", "ffn.bottom_to_top"}
    assert not missing
    for site, step in variances.items():
        if site in frame.index:
            assert step.result == pytest.approx(frame.variance[site], rel=1e-9), site
    for site, step in steps(found, "forward", "covariance").items():
        covariance = frame.variance[site] * frame.correlation[site]
        assert step.result == pytest.approx(covariance, rel=1e-9), site


@pytest.mark.parametrize("case", CASES)
def test_every_law_has_a_name_and_gives_its_number(case: str) -> None:
    model = BASE.replace(**CASES[case])
    for step in explain(model, 2, correlation=0.3).steps:
        assert step.component
        assert step.quantity
        if step.law is None:
            assert step.component in ("attention kernel", "gain", "directions")
            continue
        if not model.causal:
            given = float(step.law.of(step.values))
            assert given == pytest.approx(step.result, rel=1e-9, abs=1e-300), step.site
        names = ("correlated_residual", "gated_tanh")
        if step.component not in names:
            record = moments.component(step.component)
            assert any(
                step.law is record.under(theory).get(step.quantity)  # type: ignore[arg-type]
                or str(step.law.expr) == str(record.under(theory)[step.quantity].expr)
                for theory in ("refined", "published", "simplified")
                if step.quantity in record.under(theory)  # type: ignore[arg-type]
            )


ATTENTION = ("dropout", "projection", "heads")
FFN = ("dropout", "out", "activation", "in")


def order(*blocks: tuple[str, tuple[str, ...]]) -> list[str]:
    return [f"{block}.{site}" for block, sites in blocks for site in sites]


BACKWARD = {
    "pre": order(("ffn", (*FFN, "norm", "sum")), ("attention", (*ATTENTION, "norm", "sum"))),
    "post": order(("ffn", ("norm", *FFN, "sum")), ("attention", ("norm", *ATTENTION, "sum"))),
    "gated": order(
        ("ffn", ("dropout", "out", "activation", "norm", "sum")),
        ("attention", (*ATTENTION, "norm", "sum")),
    ),
    "causal": order(("ffn", (*FFN, "norm", "sum")), ("attention", (*ATTENTION, "norm", "sum"))),
    "parallel, causal, two norms": order(
        ("attention", (*ATTENTION, "norm")), ("ffn", (*FFN, "norm", "sum"))
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_the_way_back_passes_the_sites_in_order(case: str) -> None:
    found = explain(BASE.replace(**CASES[case]), 2, correlation=0.3)
    sites: list[str] = []
    for step in found.steps:
        if step.way == "backward" and (not sites or sites[-1] != step.site):
            sites.append(step.site)
    assert sites == BACKWARD[case]


@pytest.mark.parametrize("case", ["pre", "post", "gelu", "causal", "scaled"])
def test_what_a_site_sends_back_is_what_the_site_before_it_receives(case: str) -> None:
    model = BASE.replace(**CASES[case])
    found, frame = explain(model, 2, correlation=0.3), point(model, 2, correlation=0.3)
    sent = steps(found, "backward", "grad_variance")
    pairs = [(f"ffn.{site}", f"ffn.{before}") for site, before in itertools.pairwise(FFN)]
    pairs += [("attention.dropout", "attention.projection")]
    pairs += [("attention.projection", "attention.heads")]
    if case != "post":
        pairs += [("ffn.sum", "attention.sum")]
    for site, before in pairs:
        assert sent[site].result == pytest.approx(frame.grad_variance[before], rel=1e-9), site
    whole = moments.predict(model, correlation=0.3)
    last = sent["attention.sum"]
    assert last.result == pytest.approx(whole.grad_variance[1], rel=1e-9)
    # of order 1/width: scale invariance, and norms that persist
    assert abs(last.values["grad_branch_correlation"]) < (0.05 if case == "post" else 0.005)


def test_token_averages_leave_padding_out() -> None:
    model = BASE.replace(causal=True, embedding=moments.Embedding(50, 1.0))
    ids = np.random.default_rng(0).integers(0, 50, (2, 16))
    mask = np.ones((2, 16), dtype=int)
    mask[0, 9:] = 0
    inputs = {"token_ids": ids, "attention_mask": mask}
    found, frame = explain(model, 3, **inputs), point(model, 3, **inputs)
    for site, step in steps(found, "forward", "variance").items():
        assert step.result == pytest.approx(frame.variance[site], rel=1e-9)
    for site, step in steps(found, "forward", "covariance").items():
        covariance = frame.variance[site] * frame.correlation[site]
        assert step.result == pytest.approx(covariance, rel=1e-9)


def test_the_papers_theories_have_their_own_laws() -> None:
    published = explain(BASE, 2, theory="published", correlation=0.3)
    assert {s.component for s in published.steps} >= {"attention_block", "layernorm"}
    simplified = explain(BASE, 2, theory="simplified", correlation=0.3)
    assert "Table 2" in steps(simplified, "forward", "variance")["attention.dropout"].source


def test_the_displays() -> None:
    found = explain(BASE.replace(causal=True), 2, correlation=0.3)
    frame = found.to_frame()
    assert len(frame) == len(found.steps)
    assert set(frame.way) == {"forward", "backward"}
    assert (frame.source != "").all()
    text = str(found)
    assert "attention.heads (attention kernel)" in text
    assert "Kedia et al. 2024" in text
    assert found.latex().count("&&") == sum(s.law is not None for s in found.steps)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize(
    ("layer", "inputs", "match"),
    [
        (0, {}, "layer"),
        (4, {}, "at most layers = 3"),
        (1, {"correlation": [0.1, 0.2]}, "one conf"),
        (1, {"correlation": [0.1, 0.2], "variance": [1, 1, 1]}, "must broadcast"),
    ],
)
def test_bad_input_is_named(layer: int, inputs: dict[str, Any], match: str) -> None:
    with pytest.raises(moments.DomainError, match=match):
        explain(BASE, layer, **inputs)


def test_an_error_leaves_no_observer_behind() -> None:
    from moments.engine.state import _OBSERVER, observed

    with pytest.raises(moments.DomainError), observed(lambda *_: None):
        explain(BASE.replace(causal=True), 1, tokens=False)
    assert _OBSERVER.get() is None


def test_explain_command(tmp_path: Any) -> None:
    file = tmp_path / "layer.csv"
    common = ["explain", "bert-tiny", "--layer", "2", "--correlation", "0.3"]
    done = RUNNER.invoke(app, [*common, "--json", "--csv", str(file)])
    assert done.exit_code == 0
    records = json.loads(done.stdout)
    assert len(records) == len(file.read_text().splitlines()) - 1
    assert {"site", "way", "formula", "result", "source"} <= set(records[0])
    assert "Layer 2 of 2" in RUNNER.invoke(app, common).stdout
    assert "begin{align*}" in RUNNER.invoke(app, [*common, "--latex"]).stdout
