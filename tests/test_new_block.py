"""A kind of layer of one's own, as CONTRIBUTING shows it: one file, and everything works on it."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moments
from moments.model import placement
from moments.prediction.measurement import Measurement

FILE = Path(__file__).with_name("new_block.py")
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
HEADING = "## Add a kind of layer"
DRAWS = 60


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


@pytest.fixture(scope="module")
def model() -> Iterator[moments.Transformer]:
    from moments.layers.architecture import KINDS
    from moments.simulation.network import TWINS

    given = importlib.util.spec_from_file_location("new_block", FILE)
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    given.loader.exec_module(module)
    yield moments.Transformer(
        3, 48, 4, 12, dropout=0.1, norm=module.NAME, branch_scale=0.7, norm_affine=True
    )
    del TWINS[module.NAME], KINDS[module.NAME], placement._REGISTERED[module.NAME]


@pytest.fixture(scope="module")
def measured(model: moments.Transformer) -> Measurement:
    return moments.simulate(model, seeds=DRAWS, batch=1, correlation=0.3, seed=3)


def test_contributing_shows_it() -> None:
    text = GUIDE.read_text()
    if HEADING in text:
        assert FILE.read_text().partition("\n\n")[2].strip() in text


@pytest.mark.parametrize("name", ["variance", "correlation", "grad_variance"])
def test_moments_are_those_of_draws(
    model: moments.Transformer, measured: Measurement, name: str
) -> None:
    found, mean = getattr(moments.predict(model, correlation=0.3), name), getattr(measured, name)
    error = getattr(measured, f"{name}_stderr")
    assert np.all(np.abs(found - mean) < 3.5 * error + 0.01 * np.abs(mean))


@pytest.mark.parametrize("tokens", [False, True])
def test_draws_lie_in_the_band(
    model: moments.Transformer, measured: Measurement, tokens: bool
) -> None:
    """And their logarithm deviates as predicted, within three standard errors."""
    p = moments.predict(model, correlation=0.3, tokens=tokens)
    draws = np.asarray(measured.samples["grad_variance"])[:, 0]
    low, high = p.grad_variance_band[:, 0]
    assert np.mean((draws > low) & (draws < high)) >= 0.85
    sigma = np.log(high / low) / (2 * 1.959963984540054)
    seen = np.log(draws).std(ddof=1)
    assert sigma == pytest.approx(seen, abs=3 * seen / np.sqrt(2 * (DRAWS - 1)))


def test_weight_gradients_are_those_of_draws(
    model: moments.Transformer, measured: Measurement
) -> None:
    found = moments.predict(model, correlation=0.3).weight_gradients()
    seen = measured.weight_gradients()
    both = found.merge(seen, on=["layer", "weight"], suffixes=("", "_seen"))
    assert len(both) == len(found) == len(seen)
    error = both["squared_norm_stderr"] / both.squared_norm_seen
    off = both.squared_norm / both.squared_norm_seen - 1
    assert (off.abs() < 3.5 * error + 0.03).all(), both.assign(off=off)


def test_everything_else_works_on_it(model: moments.Transformer, tmp_path: Path) -> None:
    p = moments.predict(model, correlation=0.3)
    record = p.trace.layers[1]
    sites = {one.component.label for one in record.sites()}
    assert {"attention.norm", "ffn.post_norm", "ffn.sum"} <= sites
    steps = moments.explain(model, 2, correlation=0.3).steps
    assert {step.site for step in steps} == sites - {"stream"}
    last = next(s for s in steps if (s.site, s.quantity) == ("ffn.sum", "grad_variance"))
    assert last.result == pytest.approx(p.grad_variance[1], rel=1e-9)
    again = pickle.loads(pickle.dumps(p))
    assert again.weight_gradients().equals(p.weight_gradients())
    p.plot().savefig(tmp_path / "prediction.png")
    assert "(3 layers" in repr(p)
    causal = moments.predict(model.replace(causal=True, seq_len=40))
    assert np.all(np.isfinite(causal.grad_variance_band))
    with pytest.raises(moments.DomainError, match="norm = 'parallel-sandwich'"):
        moments.predict(model, theory="published")


def test_grids_hold_what_single_predictions_say(model: moments.Transformer) -> None:
    found = moments.sweep(model, {"branch_scale": [0.4, 0.9], "layers": [2, 3]}).to_frame()
    for row in found.itertuples():
        alone = moments.predict(model.replace(branch_scale=row.branch_scale, layers=row.layers))
        assert row.grad_variance == pytest.approx(alone.grad_variance[0], rel=1e-9)


def test_the_first_step_falls_as_its_slope_says(model: moments.Transformer) -> None:
    """Two ways to one number: what every tensor does, and the norms of the gradients."""
    ids = np.random.default_rng(0).integers(0, 50, (2, 12))
    tables = {"embedding": moments.Embedding(50, 0.02), "head": moments.Head()}
    p = moments.predict(model.replace(causal=True, norm_affine=False, **tables), token_ids=ids)
    step = p.after("sgd", 1e-4)
    assert 0.85 < step.loss_change / (step.slope * 1e-4) < 1.05


def test_names_are_unique() -> None:
    for name in placement.BUILT_IN:
        with pytest.raises(moments.DomainError, match="another kind"):
            placement.register_placement(name, ())
