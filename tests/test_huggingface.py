"""Configs of Hugging Face: every way to pass one, defaults, what is not modelled, presets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.head import Head
from moments.model.weights import Biases

transformers = pytest.importorskip("transformers")

BERT = {
    "model_type": "bert",
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "intermediate_size": 200,
    "max_position_embeddings": 64,
    "vocab_size": 1000,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.05,
    "attention_probs_dropout_prob": 0.15,
    "initializer_range": 0.03,
    "layer_norm_eps": 1e-6,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 5,
    "n_embd": 80,
    "n_head": 5,
    "n_positions": 48,
    "n_inner": None,
    "vocab_size": 700,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.2,
    "embd_pdrop": 0.3,
    "initializer_range": 0.01,
    "layer_norm_epsilon": 1e-4,
}


def pretrained(config: dict[str, Any]) -> Any:
    classes = {"bert": transformers.BertConfig, "gpt2": transformers.GPT2Config}
    return classes[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})


def test_bert() -> None:
    m = moments.from_huggingface(BERT)
    assert (m.layers, m.d_model, m.heads, m.d_ff, m.seq_len) == (3, 96, 6, 200, 64)
    assert (m.norm, m.activation, m.causal) == ("post", "relu", False)
    assert (m.dropout, m.attention_dropout, m.norm_epsilon) == (0.05, 0.15, 1e-6)
    assert m.weights == moments.Weights.normal(0.03**2)
    assert m.embedding == moments.Embedding(
        1000,
        0.03**2,
        0.03**2,
        0.03**2,
        norm=True,
        dropout=0.05,
        norm_epsilon=1e-6,
        padding_id=0,
    )
    assert m.head == Head(
        norm=False,
        transform="relu",
        transform_variance=0.03**2,
        transform_bias_variance=0.0,
        bias=True,
        loss="masked",
    )
    assert (m.biases, m.norm_affine) == (Biases(), True)


def test_gpt2() -> None:
    m = moments.from_huggingface(GPT2)
    assert (m.layers, m.d_model, m.heads, m.d_ff, m.seq_len) == (5, 80, 5, 320, 48)
    assert (m.norm, m.activation, m.causal) == ("pre", "gelu_tanh", True)
    assert (m.dropout, m.attention_dropout, m.norm_epsilon) == (0.0, 0.2, 1e-4)
    assert m.weights == moments.Weights.normal(0.01**2, output_divisor=10)
    assert m.embedding == moments.Embedding(700, 0.01**2, 0.01**2, dropout=0.3)
    assert m.head == Head()
    assert (m.biases, m.norm_affine) == (Biases(), True)


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_every_way_to_pass_a_config(config: dict[str, Any], tmp_path: Path) -> None:
    expected = moments.from_huggingface(config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    other = tmp_path / "my-model.json"
    other.write_text(json.dumps(config))
    for given in (str(file), file, tmp_path, str(tmp_path), other, pretrained(config)):
        assert moments.from_huggingface(given) == expected
    saved = tmp_path / "saved"
    pretrained(config).save_pretrained(saved)
    assert moments.from_huggingface(saved) == expected


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_missing_entries_take_the_classes_defaults(kind: str) -> None:
    """An entry left out of a config.json means what the real class means by it."""
    assert moments.from_huggingface({"model_type": kind}) == moments.from_huggingface(
        pretrained({"model_type": kind})
    )


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_initialisation_is_what_the_module_draws(config: dict[str, Any]) -> None:
    """Variances of a real, freshly initialised module, layer 1."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    real = pretrained(config)
    module = {"bert": transformers.BertModel, "gpt2": transformers.GPT2Model}[config["model_type"]](
        real
    )
    m = moments.from_huggingface(config)
    if config["model_type"] == "bert":
        layer, tables = module.encoder.layer[0], module.embeddings
        drawn = {
            "query": layer.attention.self.query.weight,
            "key": layer.attention.self.key.weight,
            "value": layer.attention.self.value.weight,
            "output": layer.attention.output.dense.weight,
            "ffn_in": layer.intermediate.dense.weight,
            "ffn_out": layer.output.dense.weight,
        }
        token, position = tables.word_embeddings.weight, tables.position_embeddings.weight
        assert tables.token_type_embeddings.weight.shape[1] == m.d_model
    else:
        layer = module.h[0]
        query, key, value = layer.attn.c_attn.weight.split(m.d_model, dim=1)
        drawn = {
            "query": query,
            "key": key,
            "value": value,
            "output": layer.attn.c_proj.weight,
            "ffn_in": layer.mlp.c_fc.weight,
            "ffn_out": layer.mlp.c_proj.weight,
        }
        token, position = module.wte.weight, module.wpe.weight
    declared = m.layer_weights(1)
    assert m.embedding is not None
    pairs = [(weight, getattr(declared, name)) for name, weight in drawn.items()]
    pairs += [(token, m.embedding.token_variance), (position, m.embedding.position_variance)]
    for weight, variance in pairs:
        # n normal draws: relative standard error of the variance sqrt(2/n).
        error = 4.5 * (2 / weight.numel()) ** 0.5
        assert float(weight.detach().square().mean()) == pytest.approx(variance, rel=error)


def test_seq_len() -> None:
    assert moments.from_huggingface(BERT, seq_len=16).seq_len == 16
    assert moments.from_huggingface(GPT2, seq_len=48).seq_len == 48
    with pytest.raises(DomainError, match="seq_len = 65: must be at most max_position_embeddings"):
        moments.from_huggingface(BERT, seq_len=65)
    assert moments.from_huggingface(BERT, seq_len=1).seq_len == 1
    with pytest.raises(DomainError, match="seq_len = 0"):
        moments.from_huggingface(BERT, seq_len=0)


@pytest.mark.parametrize(
    ("config", "entry", "value"),
    [
        (BERT, "position_embedding_type", "relative_key"),
        (BERT, "is_decoder", True),
        (BERT, "add_cross_attention", True),
        (GPT2, "add_cross_attention", True),
    ],
)
def test_what_is_not_modelled_is_named(config: dict[str, Any], entry: str, value: Any) -> None:
    with pytest.warns(ValidityWarning, match=f"{entry} = {value!r} is not modelled"):
        changed = moments.from_huggingface({**config, entry: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed == moments.from_huggingface(config)


def test_logits_that_are_scaled_otherwise() -> None:
    """Logits over sqrt(d_head) and over the layer's number: as a temperature."""
    unscaled = moments.from_huggingface({**GPT2, "scale_attn_weights": False})
    assert unscaled.temperature == pytest.approx(1 / 4)
    by_layer = moments.from_huggingface({**GPT2, "scale_attn_by_inverse_layer_idx": True})
    assert by_layer.temperature == (1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
def test_activation_names(name: str, ours: str) -> None:
    assert moments.from_huggingface({**BERT, "hidden_act": name}).activation == ours
    assert moments.from_huggingface({**GPT2, "activation_function": name}).activation == ours


def test_unknown_activation() -> None:
    with pytest.raises(DomainError, match=r"hidden_act = 'mish': must be one of .*gelu_new"):
        moments.from_huggingface({**BERT, "hidden_act": "mish"})


def test_bad_configs(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"model_type = 'resnet': no stack of attention"):
        moments.from_huggingface({"model_type": "resnet"})
    with pytest.raises(DomainError, match="model_type = None"):
        moments.from_huggingface({"hidden_size": 3})
    with pytest.raises(DomainError, match=r"nowhere.json.*a readable config.json \(No such file"):
        moments.from_huggingface(tmp_path / "nowhere.json")
    with pytest.raises(DomainError, match=r"config.json.*a readable config.json"):
        moments.from_huggingface(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"model_type": ')
    with pytest.raises(DomainError, match=r"broken.json.*valid JSON"):
        moments.from_huggingface(broken)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(DomainError, match=r"binary.json.*valid JSON"):
        moments.from_huggingface(binary)
    listed = tmp_path / "list.json"
    listed.write_text("[1, 2]")
    with pytest.raises(DomainError, match="a JSON object"):
        moments.from_huggingface(listed)
    with pytest.raises(DomainError, match="a path, a dict or a PretrainedConfig, not int"):
        moments.from_huggingface(3)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("num_hidden_layers", "twelve"),
        ("hidden_size", 0),
        ("num_attention_heads", 7),
        ("hidden_dropout_prob", 1.5),
        ("vocab_size", -1),
        ("initializer_range", "small"),
        ("layer_norm_eps", [1]),
        ("max_position_embeddings", "long"),
        ("hidden_act", ["gelu"]),
    ],
)
def test_bad_entries_are_domain_errors(entry: str, value: Any) -> None:
    """A config is a user's file: nothing in it may surface as a bare TypeError."""
    with pytest.raises(DomainError):
        moments.from_huggingface({**BERT, entry: value})


# --- presets --------------------------------------------------------------------------------------


PARAMETERS = {
    # Counts the checkpoints of those names have; BERT's include the pooler.
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


def parameters(m: moments.Transformer) -> int:
    """Weights, biases, norms and tables of a BERT or GPT-2 of these sizes."""
    assert m.embedding is not None
    assert m.d_ff is not None
    d = m.d_model
    layer = 4 * d * d + 4 * d + 2 * d * m.d_ff + m.d_ff + d + 4 * d
    tables = (m.embedding.vocab_size + m.seq_len) * d
    if m.norm == "post":
        return tables + 2 * d + 2 * d + m.layers * layer + d * d + d
    return tables + m.layers * layer + 2 * d


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_presets_have_the_published_sizes(name: str) -> None:
    assert name in moments.preset.names()
    assert parameters(moments.preset(name)) == PARAMETERS[name]


@pytest.mark.filterwarnings("ignore:dropout = 0.1 is not modelled")  # DistilBERT's, on one block
@pytest.mark.parametrize("name", moments.preset.names())
def test_presets_are_real_configs(name: str) -> None:
    config = moments.preset.config(name)
    entries = {key: value for key, value in config.items() if key != "model_type"}
    real = transformers.AutoConfig.for_model(config["model_type"], **entries)
    assert moments.preset(name) == moments.from_huggingface(real)
    if config["model_type"] != "vit":
        assert moments.preset(name, seq_len=64).seq_len == 64
    config["hidden_size"] = 1
    assert moments.preset.config(name) != config


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama-3.2-1b", "llama3.2-1b"),
        ("olmo-2-1b", "olmo2-1b"),
        ("olmo-2-7b", "olmo2-7b"),
        ("olmo-3-7b", "olmo3-7b"),
        ("smollm3-3b", "smollm3-3b"),
        ("gemma-3-1b", "gemma3-1b"),
    ],
)
def test_presets_are_as_released(name: str, file: str) -> None:
    released = json.loads((Path(__file__).parent / f"released_configs/{file}.json").read_text())
    model = moments.from_huggingface(released, seq_len=512)
    assert moments.preset(name, seq_len=512) == model.replace(name=name)


def test_default_presets_are_the_classes_own() -> None:
    assert moments.preset("bert-base") == moments.from_huggingface(transformers.BertConfig())
    assert moments.preset("gpt2") == moments.from_huggingface(transformers.GPT2Config())


def test_unknown_preset() -> None:
    with pytest.raises(DomainError, match=r"preset = 'bert-huge': .* did you mean 'bert-large'"):
        moments.preset("bert-huge")
    assert "bert-base" in repr(moments.preset)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "opt", "olmo", "gemma", "cohere", "phi3"])
def test_a_null_padding_token_leaves_no_row_of_zeros(kind: str) -> None:
    """As the module has it, whose table then has no padding_idx."""
    config = transformers.AutoConfig.for_model(kind, pad_token_id=None)
    assert config.pad_token_id is None
    for given in (config, {"model_type": kind, "pad_token_id": None}):
        assert moments.from_huggingface(given, seq_len=16).embedding.padding_id is None
    usual = moments.from_huggingface({"model_type": kind}, seq_len=16).embedding
    assert usual.padding_id == transformers.AutoConfig.for_model(kind).pad_token_id


def test_positions_that_count_from_a_null_padding_token_are_refused() -> None:
    with pytest.raises(DomainError, match="pad_token_id"):
        moments.from_huggingface({"model_type": "roberta", "pad_token_id": None})
