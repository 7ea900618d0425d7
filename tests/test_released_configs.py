"""Released configs of current models: read, with or without a reader of their own, and predicted.

What real modules of them do at a small size is stored (`python benchmarks/released_configs.py
measure`); here some quick cases of the whole comparison, `table`.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, MomentsError, Rotary, Transformer, Weights
from moments.model.head import Head
from moments.model.weights import Biases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FILES = {
    file.stem: file
    for folder in ("released_configs", "text_configs")
    for file in (Path(__file__).parent / folder).glob("*.json")
}
NAMES = sorted(FILES)
QUICK = ("olmo3-7b", "electra-small", "opt-350m", "phi4-mini")
QUICK += ("bart-large", "opus-mt-en-de", "modernbert-base", "mpnet-base", "codegen-350m", "rembert")
UNMEASURED = {"albert-base-v2"}  # whose module is not measured layer by layer
# A type without a reader, which is read through its module
UNREAD_TYPE = {"model_type": "jais2", "num_hidden_layers": 1, "hidden_size": 128}
UNREAD_TYPE |= {"num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 300}


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("released_configs")
    sys.path.remove(folder)


def released(name: str) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(FILES[name].read_text(encoding="utf-8"))
    return entries


def read(entries: dict[str, Any], **options: Any) -> Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.from_huggingface(entries, **options)


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_released_config_is_read(benchmark: Any, name: str) -> None:
    entries = released(name)
    model = read(entries)
    config = transformers.CONFIG_MAPPING[entries["model_type"]](
        **{k: v for k, v in entries.items() if k not in ("architectures", "model_type")}
    )
    assert model.d_model == config.hidden_size
    assert model.heads == config.num_attention_heads
    assert model.layers == getattr(config, "decoder_layers", config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // model.heads
    assert model.d_head == head_dim
    if getattr(config, "num_key_value_heads", None):
        assert model.kv_heads == config.num_key_value_heads
    if isinstance(model.embedding, Embedding):
        assert model.embedding.vocab_size == config.vocab_size
    assert model.head is not None
    assert model == Transformer.from_dict(model.to_dict())
    counted = sum(math.prod(shape) for shape in model.matrix_shapes.values())
    counted *= 1 if model.shared_layers else model.layers
    with torch.device("meta"):
        module = transformers.AutoModel.from_config(config)
    matrices = sum(
        p.numel()
        for path, part in module.named_modules()
        for p in part.parameters(recurse=False)
        if isinstance(part, torch.nn.Linear) and p.ndim == 2 and "pooler" not in path
    )
    factor = getattr(model.embedding, "factor_dim", None) or 0
    narrow = factor * model.d_model * (2 if name.startswith("opt") else 1)
    elsewhere = ("vit-base", "openai-gpt")  # matrices of another class
    assert matrices == counted + narrow or model.encoder is not None or name in elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases_agree_with_the_real_module(benchmark: Any, name: str) -> None:
    found = benchmark.errors(name)
    assert benchmark.failures(name, found) == [], found


def test_stored_measurements_are_of_every_config_that_is_read(benchmark: Any) -> None:
    assert set(benchmark.stored()) == set(NAMES) - UNMEASURED
    assert all(f.stat().st_size < 200_000 for f in benchmark.DATA.glob("*_configs.json"))


def test_bounds_find_a_wrong_prediction(benchmark: Any) -> None:
    found = {"variance": (0.03, 0.004, ""), "loss": (0.004, 0.0, ""), "matrices": (0.1, 0.02, "")}
    assert benchmark.failures("any", found) == ["variance"]


# --- one at its own size --------------------------------------------------------------------------


def test_modernbert_at_its_own_width() -> None:
    """Truncated entries, outputs divided by the depth, two bases of rotary positions, windows."""
    entries = released("modernbert-base") | {"num_hidden_layers": 4}
    model = read(entries)
    # A normal cut at two deviations has 1 - 4 phi(2)/(2 Phi(2) - 1) of its variance.
    inside = math.erf(math.sqrt(2))
    variance = 4e-4 * (1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / inside)
    assert model.weights is not None
    for name, value in {
        "query": variance,
        "gate": variance,
        "output": variance / 8,
        "ffn_out": variance / 8,
    }.items():
        assert model.weights.of(name) == pytest.approx(value, rel=5e-3)
    assert model.embedding.token_variance == pytest.approx(variance, rel=5e-3)
    assert (model.embedding.padding_id, model.seq_len, model.d_ff) == (50283, 8192, 1152)
    assert model.windows == (None, 65, 65, None)
    assert [one and one.base for one in model.rotaries] == [160000.0, 10000.0, 10000.0, 160000.0]
    assert read(entries, seq_len=65).window is None


def test_what_changes_with_the_width_is_that_of_the_true_one() -> None:
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    gemma = read(released("gemma3-1b") | two)
    assert gemma.embedding.scale == pytest.approx(math.sqrt(1152), rel=1e-4)
    assert gemma.temperature == 1.0
    assert gemma.windows == (512, None)
    assert [one.base for one in gemma.rotaries if one] == [1e4, 1e6]
    cohere = read(released("command-r7b") | two)
    assert cohere.head.output_scale == 0.25
    assert cohere.rotaries[1] is None
    assert cohere.windows == (4096, None)


def test_variances_are_those_of_the_real_class() -> None:
    """Of a small module that is drawn whole."""
    small = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 900}
    entries = released("nanochat-d20") | small | {"pad_token_id": 5, "bos_token_id": 1}
    model = read(entries | {"eos_token_id": 2})
    torch.manual_seed(0)
    settings = transformers.NanoChatConfig(**small, pad_token_id=5)
    module = transformers.NanoChatForCausalLM(settings)
    layer = module.model.layers[1]
    for name, matrix in {
        "query": layer.self_attn.q_proj,
        "output": layer.self_attn.o_proj,
        "ffn_in": layer.mlp.fc1,
        "ffn_out": layer.mlp.fc2,
    }.items():
        square = float(matrix.weight.detach().square().mean())
        error = math.sqrt(2 / matrix.weight.numel())
        assert model.weights.of(name) == pytest.approx(square, rel=5 * error), name


def test_longrope_slows_every_pair_and_sharpens_logits() -> None:
    """Against the cosines that the real module turns by."""
    entries = released("phi4-mini")
    model = read(entries, seq_len=64)
    config = transformers.CONFIG_MAPPING["phi3"](
        **{k: v for k, v in entries.items() if k not in ("architectures", "model_type")}
    )
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, 2, 8), torch.tensor([[0, 1]]))
    angles = torch.atan2(sin, cos)[0, 1, :48]
    np.testing.assert_allclose(model.rotary.speeds, angles, rtol=1e-4)
    factor = float(cos[0, 0, 0])
    assert model.temperature == pytest.approx((0.75 * factor**4 + 0.25) ** -0.5, rel=1e-5)


# --- what is refused ------------------------------------------------------------------------------


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MomentsError, match=r'jais2.*pip install "transformer-moments\[hf\]"'):
        moments.from_huggingface({"model_type": "jais2"})


def test_entries_that_reach_no_module_are_named() -> None:
    entries = UNREAD_TYPE | {"spectral_gate": "fourier"}
    with pytest.warns(moments.ValidityWarning, match="left out: spectral_gate"):
        moments.from_huggingface(entries)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "pegasus_x"}, "an encoder and a decoder"),
        ({"hidden_size": "wide"}, "config of type 'jais2'"),
        ({"hidden_act": "no_such"}, "config of type 'jais2'|narrow copy"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        read(UNREAD_TYPE | changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rotary": [Rotary()]}, "1 entries"),
        ({"rotary": [Rotary(), 3]}, "a moments.Rotary or None for every layer"),
        ({"rotary": Rotary(speeds=(1.0, 0.1))}, "one per pair"),
        ({"qk_norm": "all"}, "qk_norm"),
        ({"embedding": Embedding(50, 1.0, factor_dim=8, factor_variance=0.1)}, "head.factor_dim"),
    ],
)
def test_bad_declarations(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        Transformer(2, 64, 4, 8, head=Head(), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"factor_dim": 8},
        {"factor_variance": 0.1},
        {"factor_bias": True},
        {"factor_dim": 8, "factor_variance": 0.1, "segment_variance": 0.1},
        {"factor_dim": 8, "factor_variance": 0.1, "norm": True, "positions": "sinusoidal"},
    ],
)
def test_bad_factors_of_tables(fields: dict[str, Any]) -> None:
    with pytest.raises(DomainError):
        Embedding(50, 1.0, **fields)


# --- against simulation ---------------------------------------------------------------------------

WEIGHTS = Weights.normal(0.05**2)
IDS = np.random.default_rng(0).integers(0, 300, (2, 16))
NARROW = {"factor_dim": 64, "factor_variance": 0.01}
STACKS: dict[str, dict[str, Any]] = {
    "output": {
        "norm": "output",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "qk_norm": "rmsnorm-all",
        "kv_heads": 2,
        "causal": True,
        "rotary": [Rotary(), None],
        "embedding": Embedding(300, 4e-4),
        "head": Head(tied=False, weight_variance=4e-4),
    },
    "narrow tables behind a norm": {
        "norm": "post",
        "biases": Biases(),
        "embedding": Embedding(300, 0.04, 0.04, norm=True, factor_bias=True, **NARROW),
        "head": Head(norm=False, tied=False, weight_variance=0.01, loss="masked"),
    },
    "narrow token rows": {
        "norm": "post",
        "causal": True,
        "embedding": Embedding(300, 0.04, 0.01, **NARROW),
        "head": Head(norm=False, **NARROW),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_stacks_against_simulation(name: str) -> None:
    """Every matrix, tables and their factors included; queries and keys of narrow heads to 12 %."""
    model = Transformer(
        2, 128, 4, 16, weights=WEIGHTS, norm_affine=True, norm_epsilon=1e-6, **STACKS[name]
    )
    targets = {"targets": IDS} if model.head.loss == "masked" else {}
    p = moments.predict(model, token_ids=IDS, tokens=True, **targets)
    s = moments.simulate(model, token_ids=IDS, seeds=64, **targets)
    np.testing.assert_allclose(p.variance, s.variance, rtol=0.03)
    np.testing.assert_allclose(p.correlation, s.correlation, atol=0.02)
    np.testing.assert_allclose(p.grad_variance, s.grad_variance, rtol=0.06)
    assert p.loss == pytest.approx(s.loss, abs=4 * s.loss_stderr)
    rows = p.weight_gradients().merge(s.weight_gradients(), on=["layer", "weight"], how="right")
    rows = rows[rows.squared_norm_y > 1e-12]
    assert not rows.squared_norm_x.isna().any()
    for row in rows.itertuples():
        if row.weight.endswith((".bias", ".gain")):
            continue
        gap = abs(row.squared_norm_x - row.squared_norm_y)
        rough = 0.12 if row.weight in ("query", "key") else 0.06
        assert gap < 4 * row.squared_norm_stderr + rough * row.squared_norm_y, row
