"""Every field of a declaration is written into a module, or named where the module differs."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

import moments
from moments import Biases, DomainError, Embedding, Head, RelativeBias, Rotary, Weights
from moments.model.patches import PatchEmbedding

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import small_modules  # noqa: E402
from own_block import Bottleneck  # noqa: E402

from moments.torch import audit, initialize  # noqa: E402
from moments.torch.anatomy import anatomy_of  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402

LAYERS, WIDTH = 2, 48
NO_FIELD = {"name", "_defaulted"}
"""Of a declaration, what it is called and how it was written."""

SINES = {"positions": "sinusoidal", "position_variance": 0.0, "position_base": 500.0}

UNTRIED = {"weights.": {"attention_gate"}}
"""By what stands before them: no module of these families has gates."""

# Family, field and another value of it; "x": a number is multiplied by 4.
CHANGES: list[tuple[str, str, Any]] = [
    ("gpt2", "layers", 3),
    ("gpt2", "d_model", 96),
    ("gpt2", "heads", {"heads": 2, "d_head": 12}),
    ("gpt2", "seq_len", 64),
    ("gpt2", "d_ff", 64),
    ("gpt2", "norm", "post"),
    ("gpt2", "normalization", "rmsnorm"),
    ("gpt2", "activation", "relu"),
    ("gpt2", "dropout", 0.2),
    ("gpt2", "attention_dropout", 0.3),
    ("gpt2", "causal", False),
    ("gpt2", "skip_scale", 0.7),
    ("gpt2", "branch_scale", [0.5, 0.25]),
    ("gpt2", "layernorm_scaling", True),
    ("gpt2", "d_head", 24),
    ("llama", "kv_heads", 1),
    ("gpt2", "temperature", 2.0),
    ("gpt2", "norm_epsilon", 0.01),
    ("gpt2", "norm_affine", False),
    ("gpt2", "norm_bias", False),
    ("gpt2", "norm_gain", 2.0),
    ("gpt2", "norm_groups", 2),
    ("gpt2", "dyt_alpha", 0.7),
    ("gpt2", "post_layers", {"norm": "mix", "post_layers": 1}),
    ("gpt2", "gated", True),
    ("gpt2", "activation_dropout", 0.3),
    ("gpt2", "ffn_dropout", 0.3),
    ("gpt2", "identity_attention", True),
    ("gpt2", "parallel", True),
    ("gptj", "parallel_norms", 2),
    ("gpt2", "rotary", Rotary()),
    ("llama", "rotary", None),
    ("llama", "rotary.fraction", 0.5),
    ("llama", "rotary.base", 500.0),
    ("llama", "rotary.grid", (4, 8)),
    ("llama", "rotary.speeds", (1.0, 0.5, 0.3, 0.2, 0.1, 0.05)),
    ("gpt2", "alibi", True),
    ("gpt2", "relative_bias", RelativeBias(0.1)),
    ("t5", "relative_bias.variance", "x"),
    ("t5", "relative_bias.buckets", 16),
    ("t5", "relative_bias.max_distance", 64),
    ("gpt2", "qk_norm", "rmsnorm"),
    ("gpt2", "logit_softcap", 3.0),
    ("gpt2", "window", 4),
    ("gpt2", "attention_sink", 0.0),
    ("gpt2", "attention_gate", "elementwise"),
    ("gpt2", "layer_scale", True),
    ("bert", "shared_layers", True),
    ("gpt2", "streams", moments.HyperConnections(2)),
    ("llama", "laurel", moments.Laurel(8, *(0.01,) * 2)),
    ("gpt2", "input_mix", (0.5, 0.5)),
    ("gpt2", "skips", [None, (0, 0.5)]),
    ("gpt2", "values", moments.Values(0.5, 0.5)),
    ("llama", "per_layer_embedding", moments.PerLayerEmbedding(8, *(0.01,) * 4)),
    ("gpt2", "mixer", Bottleneck(out="output")),
    ("gpt2", "ffn", Bottleneck()),
    ("mistral", "window", None),
    ("t5", "encoder", None),
    ("t5", "encoder.causal", True),
    ("t5", "encoder.temperature", 2.0),
    *(("gpt2", f"weights.{f}", "x") for f in ("query", "key", "value", "output")),
    *(("gpt2", f"weights.{f}", "x") for f in ("ffn_in", "ffn_out")),
    ("llama", "weights.gate", "x"),
    *(("t5", f"weights.cross_{f}", "x") for f in ("query", "key", "value", "output")),
    ("gpt2", "weights.distribution", "uniform"),
    ("gpt2", "weights", Weights.torch_default(WIDTH)),
    *(("gpt2", f"biases.{f}", 0.01) for f in ("query", "key", "value", "output")),
    *(("gpt2", f"biases.{f}", 0.01) for f in ("ffn_in", "ffn_out")),
    ("llama", "biases.gate", 0.01),
    ("llama", "biases", Biases.of("query").replace(query=0.01)),
    ("gpt2", "embedding", None),
    ("gpt2", "embedding.vocab_size", 64),
    ("gpt2", "embedding.token_variance", "x"),
    ("gpt2", "embedding.position_variance", "x"),
    ("bert", "embedding.segment_variance", "x"),
    ("gpt2", "embedding.segment_variance", 0.1),
    ("bert", "embedding.norm", False),
    ("gpt2", "embedding.dropout", 0.3),
    ("bert", "embedding.norm_epsilon", 0.01),
    ("gpt2", "embedding.scale", 2.0),
    ("gpt2", "embedding.positions", "sinusoidal"),
    ("gpt2", "embedding.position_base", SINES),
    ("bert", "embedding.padding_id", 3),
    ("gpt2", "embedding.factor_dim", 24),
    ("gpt2", "embedding.factor_variance", 0.1),
    ("bert", "embedding.factor_bias", True),
    ("vit", "embedding.image_size", 96),
    ("vit", "embedding.patch_size", 16),
    ("vit", "embedding.patch_variance", "x"),
    ("vit", "embedding.position_variance", "x"),
    ("vit", "embedding.channels", 1),
    ("vit", "embedding.class_token", False),
    ("vit", "embedding.class_variance", "x"),
    ("vit", "embedding.bias_variance", 0.2),
    ("vit", "embedding.stride", 4),
    ("vit", "embedding.registers", 2),
    ("vit", "embedding.register_variance", {"registers": 2, "register_variance": 0.1}),
    ("vit", "embedding.norm", True),
    ("vit", "embedding.dropout", 0.3),
    ("vit", "embedding.norm_epsilon", 0.01),
    ("gpt2", "head", None),
    ("gpt2", "head.vocab_size", 64),
    ("gpt2", "head.tied", False),
    ("llama", "head.weight_variance", "x"),
    ("gpt2", "head.norm", False),
    ("gpt2", "head.dropout", 0.3),
    ("gpt2", "head.transform", "gelu"),
    ("bert", "head.transform_variance", "x"),
    ("bert", "head.transform_bias_variance", 0.2),
    ("bert", "head.transform_norm", False),
    ("gpt2", "head.output_scale", 0.5),
    ("gpt2", "head.bias", True),
    ("gpt2", "head.logit_softcap", 5.0),
    ("gpt2", "head.loss", None),
    ("vit", "head.classes", 7),
    ("vit", "head.pool", "mean"),
    ("vit", "head.pool_norm", True),
    ("bert", "head.target_share", 0.3),
    ("gpt2", "head.label_smoothing", 0.1),
    ("gpt2", "head.norm_gain", 2.0),
    ("gpt2", "head.factor_dim", 24),
    ("gpt2", "head.factor_variance", 0.1),
]


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """A module per family with its plan, initialised with it."""
    built = {}
    for kind in dict.fromkeys(kind for kind, *_ in CHANGES):
        window = {"sliding_window": 8} if kind == "mistral" else {}
        module = small_modules.family_module(kind, LAYERS, WIDTH, **window)
        plan = architecture_of(module)
        initialize(module, plan, seed=1)
        assert audit(module, plan).passed
        built[kind] = module, plan
    return built


def changed(plan: Any, name: str, value: Any) -> Any:
    """The plan with one other field; None where no declaration has it by itself."""
    part, _, field = name.partition(".")
    if isinstance(value, dict):
        inside = getattr(plan, part).replace(**value) if field else None
        return plan.replace(**{part: inside} if field else value)
    if not field:
        return plan.replace(**{name: value})
    if part == "encoder":
        return plan.replace(encoder=changed(plan.encoder, field, value))
    inside = getattr(plan, part)
    if inside is None and part == "biases":
        inside = Biases.of()
    if value == "x":
        old = getattr(plan.layer_weights(1) if part == "weights" else inside, field)
        value = 4 * old
    if field.startswith("factor"):
        table = {"factor_dim": 24, "factor_variance": 0.1} | {field: value}
        if part == "head":
            return plan.replace(head=inside.replace(tied=False, weight_variance=0.1, **table))
        own = plan.head.replace(tied=False, weight_variance=0.1)
        return plan.replace(embedding=inside.replace(**table), head=own)
    if name == "embedding.positions":
        return plan.replace(embedding=inside.replace(positions=value, position_variance=0.0))
    if name == "embedding.class_token":
        return plan.replace(embedding=inside.replace(class_token=value, class_variance=0.0))
    if name == "embedding.vocab_size" and plan.head is not None:
        return plan.replace(embedding=inside.replace(vocab_size=value))
    if name == "head.tied":
        return plan.replace(head=inside.replace(tied=value, weight_variance=0.1))
    if name == "head.transform":
        return plan.replace(head=inside.replace(transform=value, transform_variance=0.1))
    return plan.replace(**{part: inside.replace(**{field: value})})


def attempted(call: Any, *given: Any) -> tuple[str, Any]:
    """The refusal of a call, or what it returns."""
    try:
        return "", call(*given)
    except DomainError as error:
        return str(error), None


def value_of(model: Any, name: str) -> Any:
    for part in name.split("."):
        model = getattr(model, part)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "value"), CHANGES)
def test_every_field_is_written_or_named(
    families: dict[str, Any], kind: str, name: str, value: Any
) -> None:
    right, base = families[kind]
    plan = changed(base, name, value)
    field = name.rpartition(".")[2]
    # A module that has the base plan is no silent pass for the other one.
    refusal, report = attempted(audit, right, plan)
    said = refusal if report is None else " ".join((*report.unchecked, *report.notes))
    failed = report is not None and not report.passed
    field = "factor_dim" if field == "factor_variance" else field  # without which there is none
    if name == "embedding":
        assert "token, position (of which nothing is planned)" in said
    else:
        assert failed or field in said or field == "distribution"
    module = copy.deepcopy(right)
    refusal, done = attempted(initialize, module, plan, 2)
    if done is None:
        assert field in refusal or (field, refusal[:4]) == ("post_layers", "norm")
        for parameter, other in zip(module.parameters(), right.parameters(), strict=True):
            assert torch.equal(parameter, other)
        return
    report = audit(module, plan)
    assert report.passed, str(report)
    if any(field in phrase for phrase in done.unlike) or value is None:
        return
    if field == "distribution":
        w = module.transformer.h[0].mlp.c_fc.weight.detach()
        kurtosis = float((w**4).mean() / w.square().mean() ** 2)
        assert kurtosis == pytest.approx(1.8, abs=0.1)  # of a uniform distribution
        return
    has = anatomy_of(module).model
    if field == "weights":
        name, has, plan = "query", has.weights, plan.weights
    wanted, present = value_of(plan, name), value_of(has, name)
    drawn = name.startswith(("weights", "biases")) or "variance" in field or name == "query"
    # Biases have 48 entries, whose mean square has a standard error of a fifth.
    tolerance = 0.9 if "bias" in name else 0.3 if drawn else 1e-3
    rows = np.broadcast_arrays(np.asarray(wanted, float), np.asarray(present, float))
    np.testing.assert_allclose(rows[1], rows[0], rtol=tolerance)


@pytest.mark.parametrize(
    ("declaration", "prefix"),
    [
        (moments.Transformer, ""),
        (Weights, "weights."),
        (Biases, "biases."),
        (Embedding, "embedding."),
        (PatchEmbedding, "embedding."),
        (Head, "head."),
        (Rotary, "rotary."),
        (RelativeBias, "relative_bias."),
    ],
)
def test_no_field_escapes(declaration: Any, prefix: str) -> None:
    fields = (
        {f.name for f in dataclasses.fields(declaration)} - NO_FIELD - UNTRIED.get(prefix, set())
    )
    tried = {name.removeprefix(prefix) for _, name, _ in CHANGES if name.startswith(prefix)}
    assert fields <= tried
