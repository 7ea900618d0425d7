"""Whatever goes in, what comes out is possible; or one error says why nothing does."""

from __future__ import annotations

import json
import warnings
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moments import Biases, Embedding, Head, Rotary, Transformer, Weights, predict
from moments.errors import DomainError, MomentsError, ValidityWarning
from moments.formulas.algebra import NUMPY
from moments.layers.embedding import fixed_positions
from moments.model.declaration import NORMALIZATIONS
from moments.model.placement import BUILT_IN
from moments.model.weights import MATRICES
from moments.prediction.gate import Gate

SMALL: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "seq_len": 4}
THEORIES = ["refined", "refined", "published", "simplified"]
XAVIER = Weights.xavier(16, 4)


# --- any declaration ------------------------------------------------------------------------------


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: float(10.0**exponent))


@st.composite
def declarations(draw: Any, published: bool) -> Transformer:
    """Small architectures at ordinary and at absurd initialisations.

    Args:
        published: those alone that the papers' theories cover.
    """
    heads = draw(st.sampled_from([1, 2, 4]))
    d_model = heads * draw(st.sampled_from([2, 4, 8]))
    seq_len, layers = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    fields: dict[str, Any] = {
        "norm": draw(st.sampled_from(["pre", "post", "none"])),
        "activation": draw(st.sampled_from(["relu", "relu", "gelu"])),
        "dropout": draw(st.sampled_from([0.0, 0.1, 0.9])),
        "norm_epsilon": draw(st.sampled_from([0.0, 1e-5, 10.0])),
        "causal": draw(st.booleans()),
        "d_ff": draw(st.integers(1, 40)),
        "skip_scale": draw(magnitudes(-1, 1)),
        "branch_scale": draw(magnitudes(-2, 1)),
    }
    if not published:
        norm = fields["norm"] = draw(st.sampled_from(BUILT_IN))
        fields |= {
            "normalization": draw(st.sampled_from(NORMALIZATIONS)),
            "activation": draw(st.sampled_from(["relu", "gelu", "silu", "erf", "tanh", "swiglu"])),
            "norm_affine": draw(st.booleans()),
            "kv_heads": draw(st.sampled_from([1, heads])),
            "post_layers": draw(st.integers(0, layers)) if norm == "mix" else 0,
            "window": draw(st.sampled_from([None, 2])),
            "biases": draw(st.sampled_from([None, Biases()])),
            "rotary": draw(st.sampled_from([None, Rotary()])),
            "qk_norm": draw(st.sampled_from([None, "rmsnorm"])) if norm != "hybrid" else None,
            "parallel": norm in ("pre", "none") and draw(st.booleans()),
        }
    variances = [draw(magnitudes(-6, 2)) for _ in MATRICES]
    if draw(st.integers(0, 9)) == 0:
        variances[draw(st.integers(0, 5))] = 0.0
    fields["weights"] = Weights(**dict(zip(MATRICES, variances, strict=True)))
    if draw(st.booleans()):
        fields["embedding"] = Embedding(
            30, draw(magnitudes(-6, 2)), norm=draw(st.booleans()), norm_epsilon=1e-6
        )
        if fields["causal"] and draw(st.booleans()):
            fields["head"] = Head(tied=False, weight_variance=draw(magnitudes(-6, -1)))
    return Transformer(layers, d_model, heads, seq_len, **fields)


@st.composite
def questions(draw: Any) -> dict[str, Any]:
    """A declaration, a theory and what enters: variances of any size, correlations from the least
    that so many tokens can have."""
    theory = draw(st.sampled_from(THEORIES))
    model = draw(declarations(theory != "refined"))
    asked: dict[str, Any] = {"theory": theory}
    least = -1 / (model.seq_len - 1)
    if model.embedding is None or draw(st.booleans()):
        asked["variance"] = draw(magnitudes(-8, 8))
        asked["correlation"] = draw(st.floats(least, 1.0))
    if draw(st.booleans()):
        asked["grad_variance"] = draw(st.sampled_from([0.0, 1e-12, 1.0, 1e12]))
        asked["grad_correlation"] = draw(st.floats(least, 1.0))
    return {"model": model, **asked}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(questions())
def test_whatever_goes_in_what_comes_out_is_possible(question: dict[str, Any]) -> None:
    told = check(question)
    assert "array(" not in told
    assert "nan" not in told


def check(question: dict[str, Any]) -> str:
    """Whether numbers came out, all of them possible, or an error of our own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("ignore", ValidityWarning)
        try:
            prediction = predict(**question)
            stored = json.loads(prediction.to_json())
            weights = prediction.weight_gradients().squared_norm
            typical = [prediction.grad_variance_typical] if prediction.theory == "refined" else []
            prediction.to_frame()
        except MomentsError as error:
            return f"refused: {error}"
    least = -1 / (prediction.model.seq_len - 1) - 1e-9
    for correlation in (prediction.correlation, prediction.grad_correlation):
        assert np.all((correlation >= least) & (correlation <= 1))
    variances = [prediction.variance, prediction.grad_variance, *typical, weights.dropna()]
    by_token = (prediction.token_variance, prediction.token_grad_variance)
    variances += [v for v in by_token if v is not None]
    for variance in variances:
        assert np.all((np.asarray(variance) >= 0) & np.isfinite(variance))
    if typical:
        low, high = prediction.grad_variance_band
        assert np.all((low <= high) & np.isfinite(high) & (low >= 0))
    assert stored["variance"] == prediction.variance.tolist()
    assert Transformer.from_dict(stored["model"]) == prediction.model
    repr(prediction)
    return "predicted"


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("theory", ["simplified", "published"])
@pytest.mark.parametrize("sign", ["", "grad_"])
def test_impossible_numbers_of_the_papers_are_refused(theory: str, sign: str) -> None:
    """Linearised around correlations of 0, they turn variances negative below it."""
    asked = {f"{sign}correlation": -1 / 3}
    if theory == "simplified":
        with pytest.raises(DomainError, match=r"variance .* is -0\.\d+, and no mean square is neg"):
            predict(Transformer(**SMALL), theory="simplified", **asked)
    else:
        check({"model": Transformer(**SMALL), "theory": "published", **asked})


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_a_negative_gradient_variance_is_refused_with_its_reason() -> None:
    model = Transformer(3, 64, 1, 2, d_ff=1, norm="post", activation="relu_squared")
    with pytest.raises(DomainError, match=r"is -0\.00\d+, .*squared norms of the tokens vary by"):
        predict(model.with_scheme("normal", variance=1.47))


def test_weight_gradients_of_a_million_tokens_do_not_cancel() -> None:
    """With a gradient S of the logits both squared norms are tr(S C S^T C), weights alike."""
    model = Transformer(6, 512, 4, 10**6, norm="hybrid", activation="erf", norm_epsilon=10.0)
    prediction = predict(model, variance=0.04, correlation=-1e-6, grad_correlation=0.22)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms = prediction.weight_gradients().pivot_table("squared_norm", "layer", "weight")
    assert np.all(norms > 0.0)
    np.testing.assert_allclose(norms["key"], norms["query"], rtol=1e-3)


def test_the_gate_cuts_off_rounding_and_says_the_rest() -> None:
    gate = Gate("refined", ["layer 1: far out"], 3)
    assert gate.correlation("r", np.array([-0.5 - 1e-9, 1 + 1e-9])).tolist() == [-0.5, 1.0]
    assert gate.variance("v", np.array([1.0, -1e-12])).tolist() == [1.0, 0.0]
    assert gate.parts("p", np.array([1.0, -1e-12])).tolist() == [1.0, 0.0]
    assert not gate.notes
    assert gate.correlation("r", np.array([0.0, -1.8])).tolist() == [0.0, -0.5]
    named = gate.parts("p", np.array([1.0, -0.1]), places=("here", "there"))
    assert named.tolist() == [1.0, 0.0]
    assert "r, behind layer 1: -1.8 is impossible" in gate.notes[0]
    assert "layer 1: far out" in gate.notes[0]
    assert "p, there: down to -0.1" in gate.notes[1]
    for read in (gate.variance, gate.parts, gate.correlation):
        with pytest.raises(DomainError, match="what is not a finite number"):
            read("what", np.array([1.0, np.nan]))
    with pytest.raises(DomainError, match=r"what is -0\.1, and no mean square"):
        gate.variance("what", np.array([1.0, -0.1]))


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_peaked_attention_has_a_band_that_json_can_hold() -> None:
    model = Transformer(4, 64, 4, 8, causal=True, temperature=0.1, weights=Weights.normal(0.1))
    assert check({"model": model, "variance": 4e-4, "correlation": 0.01}) == "predicted"


@pytest.mark.filterwarnings("ignore:theory .* has no norm_epsilon")
@pytest.mark.parametrize("theory", ["published", "simplified"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_values_of_zero_under_the_papers_theories(theory: str, norm: str) -> None:
    """Zero variances end in numbers or in an error of our own; of zeros alone, in the stream."""
    model = Transformer(**SMALL, norm=norm, norm_epsilon=1e-5, weights=XAVIER.replace(value=0.0))
    check({"model": model, "theory": theory})
    zeros = model.replace(weights=Weights.normal(0.0))
    found = predict(zeros, theory=theory, correlation=0.3, grad_correlation=0.2)
    np.testing.assert_allclose(found.variance, 1.0, rtol=1e-4)
    np.testing.assert_allclose(found.grad_variance, 1.0, rtol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("causal", [False, True])
def test_overflow_names_the_place_and_no_internals(activation: str, causal: bool) -> None:
    weights = Weights.normal(1e200)
    model = Transformer(**SMALL, norm="none", activation=activation, causal=causal, weights=weights)
    with pytest.raises(DomainError, match=r"^the numbers overflow in layer \d (at|behind) \w+"):
        predict(model, variance=1e300)


@pytest.mark.parametrize("slip", [IndexError, KeyError, ValueError, NotImplementedError])
def test_a_slip_in_a_formula_is_no_overflow(
    slip: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise slip("of the programmer")

    monkeypatch.setattr("moments.layers.elementary.evaluate", wrong)
    with pytest.raises(slip, match="of the programmer"):
        predict(Transformer(**SMALL).replace(d_ff=97))


def test_repr_of_a_gradient_that_is_zero() -> None:
    assert "gradient variance 0)" in repr(
        predict(Transformer(**SMALL), theory="published", grad_variance=0.0)
    )


# --- what goes in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0.1", [0.1], np.array([0.1]), True, None, "x", [[0.1], [1, 2]]])
def test_one_number_is_one_number(value: Any) -> None:
    with pytest.raises(DomainError, match=r"^dropout = "):
        Transformer(**SMALL, dropout=value)
    with pytest.raises(DomainError, match=r"^scale = "):
        Embedding(100, 1.0, scale=value)
    with pytest.raises(DomainError, match=r"^output_scale = "):
        Head(output_scale=value)
    with pytest.raises(DomainError, match=r"^variance = "):
        Weights.normal(value)


@pytest.mark.parametrize("value", ["1", True, [True, False], [[1, 1], [1]], ["1", "2"]])
def test_scales_are_numbers(value: Any) -> None:
    for name in ("skip_scale", "branch_scale", "norm_gain", "temperature"):
        with pytest.raises(DomainError, match=rf"^{name} = "):
            Transformer(**SMALL, **{name: value})
    with pytest.raises(DomainError, match=r"^weights.query = "):
        XAVIER.replace(query=value)
    with pytest.raises(DomainError, match=r"^variance = |must be"):
        predict(Transformer(**SMALL), variance=value)


def test_fields_are_pythons_own_numbers() -> None:
    """Whatever numpy calls a number, JSON holds it."""
    model = Transformer(
        np.int64(2), np.int64(16), np.int32(4), np.uint8(4), dropout=np.float32(0.1),
        causal=np.bool_(True), window=np.array([2, 3]), skip_scale=np.ones((2, 2)),
        temperature=np.array(2.0), d_ff=np.int64(8), post_layers=np.int64(0),
        embedding=Embedding(np.int64(100), np.float64(1.0), norm=np.bool_(True)),
        head=Head(classes=None, dropout=np.float32(0.5)), rotary=Rotary(np.float32(0.5)),
    )  # fmt: skip
    stored = json.loads(json.dumps(model.to_dict()))
    assert Transformer.from_dict(stored) == model
    assert type(model.layers) is int
    assert model.dropout == pytest.approx(0.1)
    assert model.window == (2, 3)


def test_default_weights_of_impossible_widths() -> None:
    for make in (Weights.torch_default, lambda d, f: Weights.xavier(d, 4, f), Biases.torch_default):
        for width in (0, "a", 2.5):
            with pytest.raises(DomainError, match=r"^d_ff = "):
                make(16, width)


@pytest.mark.parametrize("causal", [False, True])
def test_configurations_broadcast_or_are_refused(causal: bool) -> None:
    model = Transformer(**SMALL, causal=causal)
    several = predict(model, grad_variance=[1.0, 2.0], variance=[[1.0], [2.0]])
    assert several.grad_variance.shape == (2, 2, 3)
    single = predict(model, grad_variance=2.0, variance=1.0)
    assert several.grad_variance[0, 1] == pytest.approx(single.grad_variance, rel=1e-4)
    with pytest.raises(DomainError, match=r"inputs \(2,\), grad_variance \(3,\)"):
        predict(model, variance=[1.0, 2.0], grad_variance=[1.0, 2.0, 3.0])


def test_ragged_arrays_are_refused() -> None:
    model = Transformer(**SMALL, embedding=Embedding(100, 1.0), head=Head(loss="masked"))
    ids = [[1, 2, 3, 4], [1, 2, 3, 5]]
    for wrong in (
        {"token_ids": ids, "attention_mask": [[1, 1], [1]]},
        {"token_ids": [[1, 2, 3, 4], [1]]},
        {"token_ids": []},
        {"token_ids": ids, "targets": [[1], [1, 2]]},
        {"kernel": [[1, 1], [1]]},
        {"grad_kernel": [[1, 1], [1]]},
        {"pixels": [[1, 1], [1]]},
    ):
        with pytest.raises(DomainError):
            predict(model, **wrong)


def test_sequences_of_a_text_are_counted_once() -> None:
    model = Transformer(2, 64, 4, 4, causal=True, embedding=Embedding(100, 0.01), head=Head())
    ids = np.arange(16).reshape(4, 4)
    alone = predict(model, token_ids=ids)
    assert predict(model, token_ids=ids, batch=4).grad_variance == pytest.approx(
        alone.grad_variance
    )
    with pytest.raises(DomainError, match="batch = 3: must be 1 or 4"):
        predict(model, token_ids=ids, batch=3)
    with pytest.raises(DomainError, match="2 configurations for 4 sequences"):
        predict(model, token_ids=ids, grad_variance=[1.0, 2.0])


# --- sizes ----------------------------------------------------------------------------------------


def test_what_memory_cannot_hold_is_refused_before_the_work() -> None:
    with pytest.raises(DomainError, match=r"about .* GiB of memory, and .* are there"):
        predict(Transformer(20, 64, 4, 10**6, causal=True), tokens=True)
    with pytest.raises(DomainError, match="layers = 1000000000: must be an integer of at most"):
        Transformer(10**9, 64, 4, 16)
    with pytest.raises(DomainError, match=r"heads = .* at most"):
        Transformer(1, 2**30, 2**30, 16, alibi=True)
    with pytest.raises(DomainError, match=r"d_head = .* at most"):
        Transformer(1, 2**30, 1, 16, rotary=Rotary())
    with pytest.raises(DomainError, match=r"vocab_size = .* at most"):
        Embedding(10**30, 1.0)


def test_long_sequences_and_large_vocabularies_take_no_room() -> None:
    embedding = Embedding(10**12, 1.0, positions="sinusoidal")
    prediction = predict(Transformer(1, 64, 4, 10**6, embedding=embedding))
    assert 0 < prediction.correlation[0] < 1


@pytest.mark.parametrize(("seq_len", "d_model"), [(2, 2), (5, 4), (300, 64), (64, 300)])
def test_averages_of_sinusoids_are_those_of_their_kernel(seq_len: int, d_model: int) -> None:
    embedding = Embedding(100, 1.0, positions="sinusoidal")
    alike = fixed_positions(embedding, seq_len, d_model)
    placed = fixed_positions(embedding, seq_len, d_model, 1)
    assert alike is not None
    assert placed is not None
    for one, other in zip(alike, placed, strict=True):
        assert one.diagonal == pytest.approx(other.mean_diagonal(), rel=1e-12)
        assert one.off_diagonal == pytest.approx(other.mean_off_diagonal(), rel=1e-9)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 50257, 10**9, 10**15])
def test_harmonic_sums_against_zeta(count: int) -> None:
    for order in (1, 2, 3):
        exact = mp.harmonic(count) if order == 1 else mp.zeta(order) - mp.zeta(order, count + 1)
        assert float(NUMPY.harmonic(count, order)) == pytest.approx(float(exact), rel=4e-16)


def test_caches_hold_tens_of_megabytes_at_most() -> None:
    """The largest result that a cache of arrays is asked for, times how many it keeps."""
    from moments.layers.attention.layers import _profile

    most = _profile.cache_parameters()["maxsize"]
    assert most * _profile(1.0, 16, 64.0, 16.0).nbytes < 40e6


@pytest.mark.parametrize("target", [1e300, 1e-300])
def test_targets_out_of_reach_are_a_plan_that_says_so(target: float) -> None:
    from moments import solve

    model = Transformer(**SMALL, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        try:
            assert not solve(model, "block_variance", target=target).feasible
        except MomentsError as error:
            assert "variance" in str(error)  # noqa: PT017
