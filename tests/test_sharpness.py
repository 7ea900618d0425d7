"""Sharpness at initialisation, against Lanczos' method on real modules."""

from __future__ import annotations

import json
import math
import re
import warnings
from typing import Any

import learning_rate as benchmark
import numpy as np
import pytest

import moments
from moments.step.result import Stepping
from moments.step.rules import GROUPS, named_optimizer
from moments.step.search import DAMAGED, edge_of_stability, zipf_text
from moments.step.sharpness import Hessian

torch = pytest.importorskip("torch")
from moments.torch import measure_sharpness, measure_step  # noqa: E402

TEXT = np.random.default_rng(7).choice(
    97, (2, 24), p=1 / np.arange(1, 98) / np.sum(1 / np.arange(1, 98))
)
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 97}
GPT2 |= {"n_positions": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 168}
LLAMA |= {"max_position_embeddings": 24, "pad_token_id": None}
CONFIGS = {"gpt2": GPT2 | {"tie_word_embeddings": False}, "gpt2 tied": GPT2, "llama": LLAMA}


def predicted(config: dict[str, Any]) -> moments.Prediction:
    model = moments.from_huggingface(config, seq_len=TEXT.shape[1])
    return moments.predict(model, token_ids=TEXT)


def module(config: dict[str, Any], seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    given = {name: value for name, value in config.items() if name != "model_type"}
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(config["model_type"], **given)
    return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_real_modules(name: str, optimizer: str) -> None:
    """Within 15 % beyond twice the standard error of either side: of so small modules single draws
    of weights differ by a tenth."""
    value = predicted(CONFIGS[name]).sharpness(optimizer)
    ids = torch.as_tensor(TEXT)
    seen = measure_sharpness(
        lambda seed: module(CONFIGS[name], seed), {"input_ids": ids}, optimizer, seeds=4
    )
    error = math.hypot(value.largest_stderr, seen.largest_stderr)
    assert abs(value.largest - seen.largest) < 0.15 * seen.largest + 2 * error
    # the Hessian is indefinite, nearly symmetric
    assert -1.4 < value.least / value.largest < -0.6


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("fields", [{}, {"activation": "swiglu", "normalization": "rmsnorm"}])
def test_the_operator_is_symmetric(norm: str, fields: dict[str, Any]) -> None:
    model = moments.Transformer(
        layers=2,
        d_model=32,
        heads=4,
        seq_len=8,
        norm=norm,
        causal=True,
        norm_affine=True,
        embedding=moments.Embedding(20, 1.0),
        head=moments.Head(tied=False, weight_variance=1e-3),
        **fields,
    )
    reading = Stepping.of(moments.predict(model, token_ids=TEXT[:, :8] % 20)).reading
    hessian = Hessian(reading, {}, named_optimizer("sgd"), 8, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    one, two = (rng.standard_normal(hessian.size).astype(np.float32) for _ in range(2))
    there, back = np.vdot(two, hessian(one).astype(float)), np.vdot(one, hessian(two).astype(float))
    assert there == pytest.approx(back, rel=1e-3)


def test_lanczos_against_a_dense_hessian() -> None:
    """Of a module small enough to have it entry by entry."""
    from torch.nn.functional import cross_entropy

    made = module(GPT2 | {"n_embd": 4, "n_layer": 1, "vocab_size": 7, "n_positions": 5}, 0)
    ids = torch.as_tensor(TEXT[:1, :5] % 7)
    names = [name for name, _ in made.named_parameters()]
    sizes = [p.numel() for p in made.parameters()]
    flat = torch.cat([p.detach().reshape(-1) for p in made.parameters()])

    def loss(vector: Any) -> Any:
        pieces = zip(names, vector.split(sizes), made.parameters(), strict=True)
        given = {name: piece.view(p.shape) for name, piece, p in pieces}
        logits = torch.func.functional_call(made, given, (ids,)).logits
        return cross_entropy(logits[0, :-1], ids[0, 1:])

    made.eval()
    made.config._attn_implementation = "eager"
    dense = torch.autograd.functional.hessian(loss, flat)
    values = np.linalg.eigvalsh(dense.double().numpy())
    seen = measure_sharpness(made, {"input_ids": ids}, "sgd", steps=60)
    assert seen.largest == pytest.approx(values[-1], rel=1e-3)
    assert seen.least == pytest.approx(values[0], rel=1e-3)
    assert sum(share for *_, share in seen.shares) == pytest.approx(1.0, rel=1e-3)


def test_what_is_not_covered_is_refused_by_name() -> None:
    prediction = predicted(CONFIGS["gpt2"])
    with pytest.raises(moments.DomainError, match="optimizer = 'muon'"):
        prediction.sharpness("muon")
    with pytest.raises(moments.DomainError, match="draws = 0"):
        prediction.sharpness("adam", draws=0)
    encoder = moments.preset("t5-small").replace(layers=1, seq_len=8)
    encoder = encoder.replace(encoder=encoder.encoder.replace(layers=1, seq_len=8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        read = moments.predict(
            encoder, token_ids=TEXT[:, :8], encoder_inputs={"token_ids": TEXT[:, :8]}
        )
        with pytest.raises(moments.DomainError, match="models with an encoder"):
            read.sharpness("adam")


def test_sharpness_under_no_grad_and_of_frozen_modules() -> None:
    one, batch = module(CONFIGS["gpt2"], 0), {"input_ids": torch.as_tensor(TEXT)}
    with torch.no_grad():
        assert measure_sharpness(one, batch, "sgd", steps=1).largest != 0.0
    with pytest.raises(moments.DomainError, match="frozen"):
        measure_sharpness(one.requires_grad_(False), batch, "sgd", steps=1)


def test_strong_logits_carry_a_note() -> None:
    """A tied table of deviation 1 makes logits whose softmax is far from uniform."""
    config = GPT2 | {"initializer_range": 0.3, "n_layer": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        prediction = predicted(config)
        prediction.weight_gradients()
    with pytest.warns(moments.ValidityWarning, match="logits have a variance"):
        prediction.sharpness("adam", draws=1)


def test_table_and_json() -> None:
    value = predicted(CONFIGS["gpt2"]).sharpness("adam", draws=1)
    assert f"largest {value.largest:.4g}" in value.table()
    assert value.by_matrix["share"].is_monotonic_decreasing
    assert value.by_matrix["share"].sum() == pytest.approx(1.0, rel=1e-3)
    assert json.loads(value.to_json())["largest"] == value.largest


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("adam", {}),
        ("adam", {"betas": (0.8, 0.999)}),
    ],
)
def test_edges_against_torch_on_a_quadratic(optimizer: str, options: dict[str, Any]) -> None:
    """Torch's own optimizers leave it above and stay below; Adam's preconditioner is fixed by
    gradients of 1 that its second moments have seen for long."""
    curvature = 7.0
    rate = edge_of_stability(optimizer, curvature, **options)

    def last(factor: float) -> float:
        x = torch.nn.Parameter(torch.tensor([1e-6], dtype=torch.float64))
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        beta = {} if optimizer == "sgd" else {"betas": options.get("betas", (0.9, 0.999))}
        given = options if optimizer == "sgd" else {"betas": (beta["betas"][0], 1.0 - 1e-12)}
        made = kind([x], lr=factor * rate, **given)
        if optimizer == "adam":
            made.state[x] = {
                "step": torch.tensor(1e15),
                "exp_avg": torch.zeros_like(x),
                "exp_avg_sq": torch.ones_like(x),
            }
        for _ in range(60):
            x.grad = curvature * x.data
            made.step()
        return abs(float(x.detach()))

    assert last(0.95) < 1e-6
    assert last(1.05) > 1e-5


@pytest.mark.slow
def test_rates_are_in_order_and_say_what_limits_them() -> None:
    prediction = predicted(CONFIGS["gpt2"])
    rates = moments.learning_rate(prediction, "adam")
    assert rates.range is not None
    low, high = rates.range
    assert rates.first_instability is not None
    assert rates.first_instability_with_warmup is not None
    assert rates.sharpness is not None
    assert rates.step_size < low < high < rates.first_instability
    assert rates.edge == pytest.approx(38 / rates.sharpness.largest)
    assert rates.first_instability == pytest.approx(DAMAGED["adam", "pre"] * rates.edge)
    assert rates.first_instability < rates.first_instability_with_warmup
    assert rates.warmup is not None
    assert 0 <= rates.warmup - rates.first_instability_with_warmup / rates.step_size < 1
    shares = rates.sharpness.by_matrix.groupby("weight")["share"].sum()
    assert rates.limited_by == pytest.approx(shares.to_dict())
    assert len(rates.table().splitlines()) == 4
    assert not re.search(r"\d{6}|inf", repr(rates))
    assert json.loads(rates.to_json())["range"] == [low, high]
    (axes,) = rates.plot().axes
    assert axes.get_xlim()[1] > rates.edge
    assert rates.losses([rates.step_size])[0] == pytest.approx(rates.step.loss)


@pytest.mark.slow
def test_rates_with_momentum_and_multipliers() -> None:
    """Momentum moves the rate by 1 + m, a factor of all rates by its inverse."""
    prediction = predicted(CONFIGS["gpt2"])
    once = moments.learning_rate(prediction, "sgd")
    pushed = moments.learning_rate(prediction, "sgd", momentum=0.5)
    assert once.edge is not None
    assert pushed.edge == pytest.approx(1.5 * once.edge)
    assert once.first_instability is once.warmup is None
    assert "where sgd is damaged is not known" in once.table()
    every = dict.fromkeys(GROUPS, 2.0)
    halved = prediction.sharpness("adam", multipliers=every).largest
    assert halved == pytest.approx(2 * prediction.sharpness("adam").largest, rel=1e-3)


@pytest.mark.slow
def test_where_instability_is_not_known_the_step_size_is() -> None:
    rates = moments.learning_rate(predicted(CONFIGS["gpt2"]), "muon")
    assert rates.edge is rates.first_instability is rates.range is rates.warmup is None
    assert "not known" in rates.table()
    assert json.loads(rates.to_json())["range"] is None
    assert rates.plot().axes


def test_clipping_against_torch() -> None:
    """SGD's step shrinks by clip over the norm; Adam's by what it makes of epsilon."""
    config = CONFIGS["gpt2"]
    prediction, batch = predicted(config), {"input_ids": torch.as_tensor(TEXT)}
    for optimizer, rate, options in (
        ("sgd", 0.05, {"clip": 0.3}),
        ("adam", 1e-4, {"clip": 0.3, "eps": 1e-4}),
    ):
        step = prediction.after(optimizer, rate, **options)
        seen = measure_step(
            lambda seed: module(config, seed), batch, optimizer, rate, seeds=3, **options
        )
        free = prediction.after(optimizer, rate, **options | {"clip": None})
        error = 3 * seen.loss_change_stderr
        assert abs(step.loss_change - seen.loss_change) < 0.05 * abs(seen.loss_change) + error
        assert step.loss_change > 0.9 * free.loss_change
    with pytest.raises(moments.DomainError, match="clip"):
        prediction.after("sgd", 0.1, clip=1.0, steps=2)


def test_post_norms_have_a_range_of_their_own_and_other_places_none() -> None:
    model = moments.from_huggingface(CONFIGS["gpt2"], seq_len=TEXT.shape[1]).replace(layers=1)
    pre, post, other = (
        moments.learning_rate(model.replace(norm=norm), "adam", TEXT)
        for norm in ("pre", "post", "sandwich")
    )
    shares = [rates.range[1] / rates.edge for rates in (pre, post) if rates.range is not None]
    assert shares == pytest.approx([0.26, 0.04])
    assert other.range is None
    assert other.first_instability is None
    assert other.edge is not None
    assert "norm = 'sandwich'" in other.table()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OPT, 3 x 96", "OPT Post-LN, 2 x 64", "GPT-2, 6 x 96"])
def test_stored_training_bears_the_rates_out(name: str) -> None:
    """Modules on which nothing was fixed: the middle of the range within a factor 2 of the best of
    a sweep of 300 steps, the first unstable rate of where that is damaged,
    and the onset of where the loss on one batch first rises. All:
    `python benchmarks/learning_rate.py table`."""
    assert name not in benchmark.FIXED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        rates = benchmark.predicted(name)
    row = benchmark.stored()[name]
    losses = row["best"]
    best = benchmark.at(int(benchmark.best_of(losses)))
    assert rates.range is not None
    assert 0.5 < math.sqrt(math.prod(rates.range)) / best < 2.0
    assert 0.5 < benchmark.first_rise(row) / rates.onset < 2.0
    assert 0.5 < rates.first_instability / benchmark.damaged(losses) < 2.0


def test_kernels_between_classes_give_the_same_sharpness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every token: measured up to 7 % low, beyond what draws differ by."""
    model = moments.preset("gpt2").replace(layers=2, d_model=64, heads=2, d_ff=256, seq_len=36)
    ids = zipf_text(300, 36, 2)
    by_token = moments.predict(model, token_ids=ids).sharpness("adam")
    monkeypatch.setattr("moments.step.result.FEW", 32)
    between = moments.predict(model, token_ids=ids).sharpness("adam")
    for end in ("largest", "least"):
        one, other = getattr(by_token, end), getattr(between, end)
        errors = [getattr(value, f"{end}_stderr") for value in (by_token, between)]
        assert abs(other - one) < 0.08 * abs(one) + 3 * math.hypot(*errors)


def test_few_drawn_heads_stand_for_those_under_penalties_on_distance() -> None:
    """ALiBi's heads differ: a quarter of them, against all, beyond what draws differ by."""
    model = moments.preset("gpt2").replace(layers=1, d_model=128, heads=8, d_ff=128, seq_len=16)
    prediction = moments.predict(model.replace(alibi=True), token_ids=zipf_text(300, 16, 1))
    few, every = (prediction.sharpness("adam", features=n) for n in (32, 128))
    error = 3 * math.hypot(few.largest_stderr, every.largest_stderr)
    assert abs(few.largest - every.largest) < 0.15 * every.largest + error


def test_of_many_tokens_the_first_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moments.step.search.MOST_TOKENS", 32)
    model = moments.preset("gpt2").replace(layers=1, d_model=32, heads=1, d_ff=64, seq_len=16)
    ids = zipf_text(300, 16, 5)
    rates, few = (moments.learning_rate(model, "adam", given) for given in (ids, ids[:2]))
    assert rates.step_size == few.step_size
    assert "one step is that of the first 32 tokens" in rates.table()
    assert rates.edge != few.edge


def test_rates_of_blocks_say_on_what_they_were_fixed() -> None:
    model = moments.Transformer(
        layers=1,
        d_model=32,
        heads=2,
        seq_len=12,
        causal=True,
        activation="silu",
        gated=True,
        d_ff=32,
        ffn=moments.Experts(4, 2, d_ff=32),
        embedding=moments.Embedding(30, 1.0),
        head=moments.Head(tied=False, weight_variance=1e-3),
    )
    rates = moments.learning_rate(moments.predict(model, token_ids=TEXT[:, :12] % 30), "adam")
    assert rates.range is not None
    assert rates.range[0] < rates.range[1]
    assert "router" in rates.limited_by
    assert any("plain attention and feed-forward blocks" in note for note in rates.warnings)


def test_what_kernels_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their smaller eigenvalues, and how the larger ones are had, move the ends by a percent."""
    model = moments.from_huggingface(GPT2 | {"n_positions": 64, "n_layer": 2}, seq_len=64)
    prediction = moments.predict(model, token_ids=zipf_text(97, 64, sequences=4))
    few = prediction.sharpness("adam", draws=1)
    monkeypatch.setattr("moments.step.sharpness.CUTOFF", 1e-6)
    every = prediction.sharpness("adam", draws=1)
    assert few.largest == pytest.approx(every.largest, rel=0.02)
    assert few.least == pytest.approx(every.least, rel=0.02)
    assert few.largest != every.largest
