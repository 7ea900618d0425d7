"""Readers of text encoders, older decoders and encoder-decoders: against their modules as these are
read by what they compute, entry by entry, and what is special to single types.

Real modules of released configs are in `test_released_configs`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from test_dense_readers import flat, numbers

import moments
from moments import DomainError, ValidityWarning
from moments.model.huggingface import DENSE, READERS, encoders
from moments.model.huggingface.relatives import EARLIER
from moments.model.huggingface.sizes import sized_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

POSITIONED = [kind for kind, family in DENSE.items() if family.file == "t5"]
KINDS = sorted({*POSITIONED, *EARLIER, *encoders.READERS})
# Modules whose narrow copies are not read: tables of one's own width, heads in fours; samples
BY_MODULE = [
    kind
    for kind in sorted({**EARLIER, **encoders.READERS})
    if kind not in ("albert", "codegen", "openai-gpt", "rembert", "roformer")
]
FIELDS = {"d_model": 64, "vocab_size": 300, "seq_len": 32}


def config_of(kind: str) -> dict[str, Any]:
    small = {"decoder_vocab_size": 300} if kind == "marian" else {}
    return sized_config(kind, 2, **FIELDS) | small


def read(config: Any) -> tuple[moments.Transformer, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ValidityWarning)
        model = moments.from_huggingface(config)
    return model, [str(one.message) for one in caught]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_MODULE)
def test_a_reader_says_what_its_module_computes(kind: str) -> None:
    """At the class's own sizes, two layers and a probability of its own for every dropout."""
    from moments.torch.from_config import from_config

    config = transformers.AutoConfig.for_model(kind)
    entries = config.to_dict() | {"model_type": kind, "num_hidden_layers": 2}
    given = {name: value for name, value in entries.items() if "summary" not in name}
    for name in ("n_layer", "n_layers", "num_layers", "num_hidden_layers"):
        if name in given:
            given[name] = 2
    if "layer_types" in given:
        given["layer_types"] = ["sliding_attention", "full_attention"]
    ends = ("dropout", "dropout_prob", "pdrop")
    dropouts = [name for name in sorted(given) if name.endswith(ends) and "class" not in name]
    given |= {name: 0.05 * number for number, name in enumerate(dropouts, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        ours = moments.from_huggingface(given, seq_len=48)
    theirs, _ = from_config(given, 48)
    first, second = (dict(flat(numbers(model))) for model in (ours, theirs))
    unused = set() if ours.gated else {".biases.gate"}
    if kind == "xglm":  # whose frequencies end at 1/10000, which a reading takes for the original's
        unused.add(".embedding.position_base")
    for place in (first.keys() | second.keys()) - unused:
        one, other = first.get(place), second.get(place)
        if isinstance(one, float) and isinstance(other, float):
            assert math.isclose(one, other, rel_tol=5e-3), place  # variances are sampled
        else:
            assert one == other, place


# Of entries whose kind alone does not say a second value
SECOND: dict[str, Any] = {
    "activation_function": "tanh",
    "afn": "relu",
    "attn_config": {"softmax_scale": 0.3},
    "decoder_vocab_size": 200,
    "initializer_cutoff_factor": 1.0,
    "layer_types": ["full_attention", "full_attention"],
    "local_attention": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 3,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_theta": 10.0, "full_attention": {"rope_theta": 10.0}},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "relative_attention_num_buckets": 16,
    "feed_forward_proj": "relu",
    "initializer_range": 0.05,
    "type_vocab_size": 0,
    "position_embedding_type": "relative_key",
}
# Read, and of no weight here: lengths of other texts, what a class makes of other entries or
# overrules, counts of rows of which one is read, and what means something with another entry alone
SPARED = {
    "classifier_pooling", "dense_act_fn", "is_gated_act", "max_position_embeddings", "max_seq_len",
    "n_positions", "num_hidden_layers", "relative_attention_max_distance", "scale_attn_weights",
    "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers", "rope_scaling",
    "scale_decoder_outputs", "share_encoder_decoder_embeddings",
    "scale_attn_by_inverse_layer_idx", "type_vocab_size", "vocab_size",
}  # fmt: skip


def second(name: str, value: Any) -> Any:
    if name in SECOND:
        return SECOND[name]
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, str):
        return "relu" if value != "relu" else "tanh"
    if name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop")):
        return 0.35
    if name.endswith(("eps", "epsilon")):
        return 0.05
    return 2 * value if isinstance(value, int) else 3.0 * value


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    config = config_of(kind)
    first, said = read(config)
    known = READERS[kind].defaults | config
    asked = READERS[kind].entries(config) & known.keys()
    if kind == "umt5":
        asked -= {"tie_word_embeddings"}  # it ties in any case
    for entry in sorted(asked - SPARED - {"model_type"}):
        try:
            model, notes = read(config | {entry: second(entry, known[entry])})
        except DomainError as error:
            model, notes = first, [str(error)]
        assert model != first or any(entry in note for note in set(notes) - set(said)), entry


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_read_whole(kind: str) -> None:
    model, _ = read(config_of(kind))
    assert (model.layers, model.d_model, model.heads) == (2, 64, 4)
    assert model == moments.Transformer.from_dict(model.to_dict())
    if kind in POSITIONED:
        assert model.encoder is not None
        assert (model.causal, model.encoder.causal) == (True, False)
        own = {"head": model.head, "embedding": model.embedding}  # BlenderbotSmall's norm is first
        assert model.encoder.replace(causal=True, encoder=model.encoder, **own) == model
        if kind != "blenderbot-small":
            assert model.encoder.embedding == model.embedding
        assert model.head.norm == (model.norm == "pre")


def test_two_sides_of_different_sizes() -> None:
    changes = {"encoder_layers": 3, "decoder_ffn_dim": 96, "encoder_attention_heads": 2}
    model, _ = read(config_of("bart") | changes | {"num_hidden_layers": 3})
    encoder = model.encoder
    assert encoder is not None
    assert (model.layers, encoder.layers) == (2, 3)
    assert (model.d_ff, encoder.d_ff) == (96, 256)
    assert (model.heads, encoder.heads) == (4, 2)
    with pytest.raises(DomainError, match="num_hidden_layers"):
        read(config_of("bart") | {"num_hidden_layers": 5})


def test_two_tables_of_a_translation() -> None:
    apart = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 200}
    model, notes = read(config_of("marian") | apart)
    assert notes == []
    assert model.encoder is not None
    assert model.encoder.embedding.vocab_size == 300
    assert model.embedding.vocab_size == 200


@pytest.mark.parametrize("cut", [0.5, 2.0, 3.0])
def test_variance_of_a_normal_variable_that_is_cut(cut: float) -> None:
    """Against scipy's distribution."""
    from scipy.stats import truncnorm

    assert encoders.cut_normal(4.0, cut) == pytest.approx(4 * truncnorm(-cut, cut).var(), rel=1e-9)


@pytest.mark.parametrize("kind", ["m2m_100", "marian", "xglm"])
def test_sinusoidal_positions_are_the_module_s(kind: str) -> None:
    """Cosines of position differences, by the table that the class makes."""
    names = {"m2m_100": "M2M100", "marian": "Marian", "xglm": "XGLM"}
    package = transformers.models.__getattr__(kind)
    modeling = getattr(package, f"modeling_{kind}")
    made = getattr(modeling, f"{names[kind]}SinusoidalPositionalEmbedding")
    table = made(24, 64)
    if kind == "marian":
        table.weight.data = table.create_weight()
    rows = np.asarray((table.weight if kind == "marian" else table.weights).detach())[2:20]
    embedding = read(config_of(kind))[0].embedding
    from moments.layers.embedding import fixed_positions

    fixed = fixed_positions(embedding, 18, 64, sequences=1)
    assert fixed is not None
    assert fixed.kernel.off_diagonal == pytest.approx(rows @ rows.T / 64, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv = 6.0 is not modelled"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi = False is not modelled"),
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop = 0.1 is not modelled"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "counts 32 buckets"),
        ("marian", {"normalize_before": True}, "normalize_before = True is not modelled"),
        ("ctrl", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon"),
    ],
)
def test_what_is_not_modelled_is_named(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.warns(ValidityWarning, match=words):
        moments.from_huggingface(config_of(kind) | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("rembert", {"tie_word_embeddings": True}, "tables of input and output differ"),
        ("roformer", {"rotary_value": True}, "rotated values"),
        ("mpt", {"attn_config": {"softmax_scale": -1.0}}, "must be positive"),
        ("modernbert", {"initializer_cutoff_factor": 0.0}, "positive"),
        ("modernbert", {"layer_types": ["sliding"] * 2}, "must be 2 of 'full_attention'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "must be 2 of"),
        ("olmo3", {"layer_types": [[1], [1]]}, r"layer_types\[0\] = \[1\]: must be a text"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "full_attention = 3"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "a number"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("xglm", {"d_model": 3}, "d_model = 3"),
    ],
)
def test_what_is_outside_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        moments.from_huggingface(config_of(kind) | changes)
