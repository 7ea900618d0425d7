"""Sharpness at initialisation, against Lanczos' method on real modules."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments.step.result import Stepping
from moments.step.rules import named_optimizer
from moments.step.sharpness import Hessian

torch = pytest.importorskip("torch")
from moments.torch import measure_sharpness  # noqa: E402

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
    import json

    value = predicted(CONFIGS["gpt2"]).sharpness("adam", draws=1)
    assert "largest eigenvalue" in value.table()
    assert value.by_matrix["share"].is_monotonic_decreasing
    assert value.by_matrix["share"].sum() == pytest.approx(1.0, rel=1e-3)
    assert json.loads(value.to_json())["largest"] == value.largest
