"""What every declaration can do, whatever stands in it: pickled, solved, expected, checked."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import moments

BASE: dict[str, Any] = {"layers": 2, "d_model": 64, "heads": 4, "seq_len": 16, "causal": True}
UNUSUAL: dict[str, dict[str, Any]] = {
    "sinks": {"attention_sink": 0.0},
    "experts": {"gated": True, "ffn": moments.Experts(4, 2, d_ff=32)},
    "shared layers": {"norm": "post", "causal": False, "shared_layers": True},
    "values of the first layer": {"values": moments.Values(own=0.5, first=0.5)},
    "skips": {"skips": [None, (0, 0.5)]},
    "mixed input": {"input_mix": (1.0, 0.2)},
    "gated heads": {"attention_gate": "headwise"},
    "latent attention": {"mixer": moments.LatentAttention(16, 16, 16, 16, 1 / 64)},
    "parallel mixer": {"mixer": moments.ParallelMixer(moments.ShortConvolution(3))},
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_prediction_pickles_small_and_answers_again(kind: str) -> None:
    p = moments.predict(moments.Transformer(**BASE | UNUSUAL[kind]), correlation=0.2)
    stored = pickle.dumps(p)
    again = pickle.loads(stored)
    assert len(stored) < 20_000
    np.testing.assert_array_equal(again.variance, p.variance)
    assert again.weight_gradients().equals(p.weight_gradients())


IN_TURN = {"sinks", "experts"}
"""Of these every block is solved by itself."""


@pytest.mark.parametrize("kind", UNUSUAL)
def test_blocks_are_solved_or_refused_in_words(kind: str) -> None:
    model = moments.Transformer(**BASE | UNUSUAL[kind])
    if kind in IN_TURN:
        assert moments.solve(model, "block_variance", target=0.5).residual < 1e-9
        return
    words = "share their weights" if kind == "shared layers" else "solve for final_variance"
    with pytest.raises(moments.MomentsError, match=words):
        moments.solve(model, "block_variance", target=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNUSUAL)
def test_the_last_variance_is_solved_for(kind: str) -> None:
    model = moments.Transformer(**BASE | UNUSUAL[kind])
    target = 1.0 if model.norm == "post" else 3.0
    assert moments.solve(model, "final_variance", target=target).residual < 1e-9


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_expected_of_a_first_step_has_its_loss(kind: str) -> None:
    task = "masked" if kind == "shared layers" else "causal"
    ends = {
        "embedding": moments.Embedding(80, 0.02, positions="none"),
        "head": moments.Head(tied=False, weight_variance=0.02, loss=task),
    }
    model = moments.Transformer(**BASE | UNUSUAL[kind] | ends)
    low, high = moments.expect(model)["lm loss"]
    assert low < moments.simulate(model, seeds=4, batch=2).loss < high


def test_layers_that_share_their_weights_are_checked() -> None:
    assert moments.check(moments.Transformer(**BASE | UNUSUAL["shared layers"])).healthy


@pytest.mark.parametrize(
    ("objective", "given"),
    [
        ("dslm", {"target": 3.0}),
        ("dslm", {"free": "query"}),
        ("dslm", {"bound": ("final_correlation", 0.9)}),
        ("block_variance", {"bound": ("final_correlation", 0.9)}),
        ("largest_depth", {"bound": ("final_correlation", 0.9), "target": 5.0}),
        ([("final_variance", 2.0)], {"target": 5.0}),
        ("final_variance", {"options": {"variant": "solved"}}),
    ],
)
def test_what_an_objective_has_no_use_for_is_refused(objective: Any, given: dict[str, Any]) -> None:
    (name,) = [n for n in given if n != "bound" or len(given) == 1]
    with pytest.raises(moments.DomainError, match=f"{name} = "):
        moments.solve(moments.Transformer(**BASE), objective, **given)


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize("length", [1, 2])
def test_a_step_needs_a_target(length: int) -> None:
    model = moments.Transformer(
        **BASE | {"seq_len": length},
        embedding=moments.Embedding(80, 0.02, positions="none"),
        head=moments.Head(tied=True),
    )
    p = moments.predict(model, token_ids=np.arange(length)[None])
    for work in (lambda: p.sharpness("adam"), lambda: p.after("adam", learning_rate=1e-3)):
        if length == 1:
            with pytest.raises(moments.DomainError, match="no token has one"):
                work()
        else:
            work()


def test_groups_of_features_that_turn_with_the_position_are_noted() -> None:
    sines = moments.Embedding(80, 0.02, positions="sinusoidal", norm=True)
    model = moments.Transformer(**BASE, embedding=sines)
    assert not any("norm_groups" in note for note in moments.predict(model).warnings)
    with pytest.warns(moments.ValidityWarning, match="norm_groups"):
        moments.predict(model.replace(norm_groups=4))
