"""Weights, tokens and logits of zeros, and configurations that are predicted side by side."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, Transformer, ValidityWarning, Weights
from moments.engine.state import Kernel
from moments.layers.attention.kernels import KernelAttention
from moments.layers.attention.layers import AlikeLayer

SMALL: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "seq_len": 4}
XAVIER = Weights.xavier(16, 4)
WEIGHTS = ("query", "key", "value", "output", "ffn_in", "ffn_out")
ARRAYS = ("variance", "correlation", "grad_variance", "grad_correlation")


def zeroed(weights: Weights, *names: str) -> Weights:
    return weights.replace(**dict.fromkeys(names, 0.0))


def by_weight(found: Any) -> dict[tuple[int, str], float]:
    table = found.weight_gradients()
    return {(r.layer, r.weight): float(r.squared_norm) for r in table.itertuples()}


# --- logits that vanish --------------------------------------------------------------------------


def first_order(
    kernel: np.ndarray, allowed: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Query and key path per unit of tau as tau -> 0, where every softmax is uniform.

    Logits of rows i and i' covary by tau C_ii' C_jl, and a Jacobian is J = diag(w) - w w^T.
    """
    rows = allowed / allowed.sum(1, keepdims=True)
    jacobians = [np.diag(w) - np.outer(w, w) for w in rows]
    moved = [j @ kernel for j in jacobians]
    query = gradient * np.array([[np.trace(a @ b) for b in moved] for a in moved])
    key = np.zeros_like(kernel)
    for i, one in enumerate(moved):
        for k, two in enumerate(jacobians):
            key += gradient[i, k] * kernel[i, k] * one @ two
    return query, key


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_vanishing_logits_have_the_paths_of_uniform_attention(causal: bool, empty: bool) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(7, 20))
    if empty:
        rows[4] = 0.0
    kernel = rows @ rows.T / 20
    given = rng.normal(size=(7, 30))
    gradient = given @ given.T / 30
    allowed = np.tri(7, dtype=bool) if causal else np.ones((7, 7), bool)
    query, key = first_order(kernel, allowed.astype(float), gradient)
    for tau in (1e-9, 1e-30):
        layer = KernelAttention(kernel, logit_scale=tau, allowed=allowed)
        paths = layer.backward(gradient)
        assert paths.query / tau == pytest.approx(query, rel=1e-3, abs=1e-4 * query.max())
        assert paths.key / tau == pytest.approx(key, rel=1e-3, abs=1e-3 * np.abs(key).max())
        mean = allowed / allowed.sum(1, keepdims=True)
        assert layer.forward() == pytest.approx(mean @ kernel @ mean.T, abs=1e-5)


@pytest.mark.parametrize("tau", [1e-1, 1e-3, 1e-5, 1e-7, 1e-12, 1e-60])
def test_vanishing_logits_by_token_are_those_of_tokens_alike(tau: float) -> None:
    kernel, gradient = np.full((4, 4), 0.3), np.full((4, 4), 0.2)
    np.fill_diagonal(kernel, 1.0)
    np.fill_diagonal(gradient, 1.0)
    widths = {"logit_scale": tau, "d_model": 16.0, "d_head": 4.0}
    one = KernelAttention(kernel, **widths).backward(gradient)
    tokens = Kernel(1.0, 0.3)
    two = AlikeLayer(
        tokens,
        tokens,
        tokens,
        query_count=4,
        key_count=4,
        scale=tau,
        drop_prob=0.0,
        d_model=16,
        d_head=4,
        norm_spread=0.0,
    ).backward(Kernel(1.0, 0.2))
    for name in ("query", "key"):
        matrix, pair = getattr(one, name) / tau, getattr(two, name)
        assert matrix[0, 0] == pytest.approx(pair.diagonal / tau, rel=2e-5)
        assert matrix[0, 1] == pytest.approx(pair.off_diagonal / tau, rel=1e-4)


# --- weights of zeros ----------------------------------------------------------------------------

SETTINGS = [
    {"norm": "pre"},
    {"norm": "post", "normalization": "rmsnorm", "causal": True},
    {"norm": "none", "causal": True},
    {"norm": "pre", "normalization": "dyt", "causal": True},
    {"norm": "pre", "tokens": True},
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_of_zeros_are_finite_and_without_a_note(setting: dict[str, Any]) -> None:
    tokens = setting.get("tokens")
    fields = SMALL | {k: v for k, v in setting.items() if k != "tokens"}
    for names in (("query",), ("value",), ("ffn_in",), ("output", "ffn_out"), WEIGHTS):
        model = Transformer(**fields, weights=zeroed(XAVIER, *names))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if fields["norm"] == "post":  # of four tokens, what seven matrices add in all varies
                warnings.filterwarnings("ignore", message=".*squared norms of the tokens")
            if fields["norm"] == "none":  # with four tokens and six features, sizes vary at random
                warnings.filterwarnings("ignore", message="without normalisation")
                warnings.filterwarnings("ignore", message="attention logits' variance changes")
            found = moments.predict(model, correlation=0.3, tokens=tokens)
            band = found.grad_variance_band
            found.to_json()
        for name in ARRAYS:
            assert np.isfinite(getattr(found, name)).all(), (names, name)
        assert np.isfinite(band).all()
        assert np.all(band > 0.0)
        gradients = np.array(list(by_weight(found).values()))
        assert np.all(np.isfinite(gradients) & (gradients >= 0.0)), names


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_zero_where_those_of_torch_are(causal: bool) -> None:
    """ReLU's too, whose derivative at 0 torch takes as 0."""
    pytest.importorskip("torch")
    for name in ("key", "value", "ffn_in", "ffn_out"):
        model = Transformer(**SMALL, causal=causal, weights=zeroed(XAVIER, name))
        predicted = by_weight(moments.predict(model, correlation=0.3))
        measured = by_weight(moments.simulate(model, correlation=0.3, seeds=1, batch=1))
        assert {k for k, v in predicted.items() if v == 0.0} == {
            k for k in predicted if measured[k] == 0.0
        }, name


def test_blocks_of_zeros_leave_the_stream_alone() -> None:
    for causal in (False, True):
        model = Transformer(**SMALL, causal=causal, weights=zeroed(XAVIER, "output", "ffn_out"))
        found = moments.predict(model, correlation=0.3, grad_correlation=0.2)
        for name, value in zip(ARRAYS, (1.0, 0.3, 1.0, 0.2), strict=True):
            assert getattr(found, name) == pytest.approx(np.full(3, value), abs=1e-12)


def test_normalised_projections_of_zeros_are_refused() -> None:
    for change, named in (
        ({"qk_norm": "rmsnorm", "weights": zeroed(XAVIER, "query")}, "query"),
        ({"norm": "hybrid", "weights": zeroed(XAVIER, "value")}, "value"),
    ):
        with pytest.raises(DomainError, match=f"{named} = 0.0: must be above 0"):
            moments.predict(Transformer(**(SMALL | change)))


# --- tokens of zeros -----------------------------------------------------------------------------


def embedded(padding_id: int | None, **changes: Any) -> Transformer:
    table = Embedding(100, 1.0, positions="none", padding_id=padding_id)
    fields: dict[str, Any] = {"layers": 2, "d_model": 32, "heads": 4, "seq_len": 5, "causal": True}
    return Transformer(**(fields | {"embedding": table} | changes))


@pytest.mark.filterwarnings("ignore:attention logits' variance changes")
@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_padding_that_nobody_sees_changes_nothing(norm: str) -> None:
    """The row of zeros is a token of its own: what others do does not depend on it."""
    text: dict[str, Any] = {"token_ids": [[5, 6, 7, 0, 0]], "attention_mask": [[1, 1, 1, 0, 0]]}
    changes: dict[str, Any] = {"norm": norm, "norm_epsilon": 1e-6}
    if norm == "none":
        changes["branch_scale"] = 0.5
    zeros, drawn = (
        moments.predict(embedded(padding_id, **changes), tokens=True, **text)
        for padding_id in (0, None)
    )
    for name in ("token_variance", "token_grad_variance"):
        ours, theirs = (getattr(found, name)[:, :3] for found in (zeros, drawn))
        # one spread of norms stands for all of a kernel's tokens
        assert ours == pytest.approx(theirs, rel=0.01), name


def test_padding_that_is_seen() -> None:
    """A key of zeros has logit 0; its token is what attention adds to it, which torch confirms."""
    pytest.importorskip("torch")
    model = embedded(0, norm_epsilon=0.01, normalization="rmsnorm")
    text = {"token_ids": [[5, 0, 7, 8, 0]]}
    found = moments.predict(model, **text)
    measured = moments.simulate(model, **text, seeds=30, batch=1)
    for name in ("variance", "grad_variance"):
        error = np.abs(getattr(found, name) / getattr(measured, name) - 1)
        noise = getattr(measured, f"{name}_stderr") / getattr(measured, name)
        assert np.all(error < 4 * noise + 0.02), name


def test_normalising_nothing_without_epsilon_is_noted() -> None:
    with pytest.warns(ValidityWarning, match="declare norm_epsilon"):
        found = moments.predict(embedded(0), token_ids=[[5, 6, 7, 8, 0]])
    assert np.isfinite(found.grad_variance).all()


# --- configurations side by side -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "pre"},
        {"norm": "post"},
        {"norm": "none", "branch_scale": 0.5},
        {"norm": "none", "branch_scale": 0.5, "causal": True},
        {"norm": "none", "branch_scale": 0.5, "causal": True, "qk_norm": "rmsnorm"},
        {"norm": "none", "branch_scale": 0.5, "logit_softcap": 5.0},
    ],
)
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_configurations_are_what_they_are_alone(change: dict[str, Any]) -> None:
    model = Transformer(**(SMALL | change))
    variances = [0.5, 1.0, 3.0]
    several = moments.predict(model, variance=np.array(variances), correlation=0.2)
    for index, variance in enumerate(variances):
        alone = moments.predict(model, variance=variance, correlation=0.2)
        for name in ARRAYS:
            ours = getattr(several, name)[index]
            assert ours == pytest.approx(getattr(alone, name), rel=1e-6, abs=1e-12), name
