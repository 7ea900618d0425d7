"""Every family of Hugging Face modules: config, initialisation, sites and parameters."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import FAMILIES, NEAREST, REFUSED
from moments.model.huggingface.sizes import at_depth, sized_config
from moments.model.positions import Rotary

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from moments.torch import hook_points, measure  # noqa: E402
from moments.torch.anatomy import anatomy_of, parts_of  # noqa: E402
from moments.torch.huggingface_modules import build_module, module_batch  # noqa: E402

LENGTH = 12
ALL = pytest.mark.parametrize("kind", sorted(FAMILIES))
# Families whose layer has features beside the defaults' worth a module of their own
VARIANTS: dict[str, dict[str, Any]] = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "distilbert": {"sinusoidal_pos_embds": True},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "gpt_neox": {"use_parallel_residual": False},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "opt": {"do_layer_norm_before": False},
    "phi": {"qk_layernorm": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
    "t5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "vit": {"qkv_bias": False},
}
CASES = [(kind, "") for kind in sorted(FAMILIES)] + [(kind, "variant") for kind in VARIANTS]
EACH = pytest.mark.parametrize(
    ("kind", "variant"), CASES, ids=["-".join(filter(None, case)) for case in CASES]
)


def config_of(kind: str, variant: str = "") -> dict[str, Any]:
    config = sized_config(kind, 2, 32, vocab_size=150, seq_len=24)
    if kind == "distilbert":
        config["dropout"] = 0.0  # at another probability the declaration says what it leaves out
    return config | (VARIANTS[kind] if variant else {})


def quiet(config: Any, **options: Any) -> moments.Transformer:
    """The declaration, whatever it leaves out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return moments.from_huggingface(config, **options)


@functools.cache
def module_of(kind: str, variant: str = "") -> Any:
    module = build_module(config_of(kind, variant), seed=1)
    for part in module.modules():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    module.config.layerdrop = 0.0
    return module


# --- configs --------------------------------------------------------------------------------------


@ALL
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    assert quiet({"model_type": kind}) == quiet(transformers.AutoConfig.for_model(kind))
    small = config_of(kind)
    entries = {name: value for name, value in small.items() if name != "model_type"}
    assert moments.from_huggingface(small) == moments.from_huggingface(
        transformers.AutoConfig.for_model(kind, **entries)
    )


@ALL
def test_an_entry_nobody_knows_is_named(kind: str) -> None:
    config = config_of(kind)
    with pytest.warns(ValidityWarning, match=r"spectral_gate = 3 is not modelled: no entry of"):
        changed = moments.from_huggingface(config | {"spectral_gate": 3})
    assert changed == moments.from_huggingface(config)


@pytest.mark.parametrize(
    ("kind", "entry", "value"),
    [
        ("opt", "layerdrop", 0.1),
        ("gpt2", "quantization_config", {"bits": 4}),
        ("roberta", "chunk_size_feed_forward", 8),
        ("olmo", "clip_qkv", 8.0),
        ("gemma", "mlp_bias", True),
        ("mistral", "attention_bias", True),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", "partial_rotary_factor", 0.5),
        ("deberta-v2", "pos_att_type", ["c2p"]),
    ],
)
def test_what_is_not_modelled_is_named(kind: str, entry: str, value: Any) -> None:
    config = config_of(kind) | {"relative_attention": True} if kind == "deberta-v2" else None
    name = "rope_type" if entry.startswith("rope") else entry
    with pytest.warns(ValidityWarning, match=f"{name} = .* is not modelled"):
        moments.from_huggingface((config or config_of(kind)) | {entry: value})


def test_how_much_relative_terms_matter() -> None:
    """What a DeBERTa's note says of its query and key gradients is what they are."""
    config = config_of("deberta-v2") | {"relative_attention": True, "pos_att_type": ["c2p"]}
    config |= {"norm_rel_ebd": "layer_norm", "num_hidden_layers": 1, "vocab_size": 200}
    config |= {"hidden_dropout_prob": 0.0, "position_biased_input": False}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "initializer_range": 0.05}
    config |= {"intermediate_size": 64, "share_att_key": True}
    with pytest.warns(ValidityWarning, match="query and key weights up to 2 times too small"):
        model = moments.from_huggingface(config, seq_len=24)
    ids = torch.arange(10, 34)[None]
    prediction = moments.predict(model, token_ids=ids.numpy(), targets=ids.numpy())
    expected = prediction.weight_gradients().set_index(["layer", "weight"]).squared_norm
    found, names = [], ("query", "key", "value")
    for seed in range(5):
        module = build_module(config, seed=seed)
        module(input_ids=ids, labels=ids).loss.backward()
        layer = module.deberta.encoder.layer[0].attention.self
        found.append([float(getattr(layer, f"{n}_proj").weight.grad.square().sum()) for n in names])
    ratio = np.mean(found, 0) / [expected[1, name] for name in names]
    assert ratio[:2] / ratio[2] == pytest.approx([2.0, 2.0], rel=0.25)
    assert ratio[2] == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_no_declaration_can_express_is_refused_by_name(kind: str) -> None:
    with pytest.raises(DomainError, match=f"model_type = '{kind}'.*{REFUSED[kind]}"):
        moments.from_huggingface({"model_type": kind})
    assert kind not in FAMILIES


def test_types_that_are_not_read_say_what_is_nearest() -> None:
    known = set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    assert set(NEAREST.values()) <= set(FAMILIES)
    assert not set(NEAREST) & set(FAMILIES)
    assert set(NEAREST) <= known
    assert {kind for kind in REFUSED if kind not in known} <= {"rwkv"}
    for kind in ("deberta", "layoutlm", "longt5"):
        with pytest.raises(DomainError, match=f"'{NEAREST[kind]}' is built most like it"):
            moments.from_huggingface({"model_type": kind})
    with pytest.raises(DomainError, match=r"did you mean 'llama'\?"):
        moments.from_huggingface({"model_type": "lama"})


def test_a_name_where_a_path_is_wanted() -> None:
    for given, hint in (
        ("gpt2", r"moments.preset\('gpt2'\)"),
        ("bert", r"\{'model_type': 'bert'\}"),
        ("bert-bass", r"did you mean moments.preset\('bert-base'\)"),
    ):
        with pytest.raises(DomainError, match=hint):
            moments.from_huggingface(given)


@pytest.mark.parametrize(
    ("kind", "entry", "value", "feature"),
    [
        ("opt", "_remove_final_layer_norm", True, "without a final norm"),
        ("deberta-v2", "conv_kernel_size", 3, "convolution"),
        ("bloom", "apply_residual_connection_post_layernorm", True, "behind the norm"),
        ("cohere", "use_qk_norm", True, "norm with gains of its own"),
        ("stablelm", "qk_layernorm", True, "norm with gains of its own"),
        ("t5", "feed_forward_proj", "gated-mish", "an activation"),
        ("gpt_neo", "attention_types", [[["global"], 5]], "each of 2 layers"),
        ("llama", "rope_parameters", {"rope_theta": "long"}, "a number"),
        ("llama", "rope_scaling", "linear", "a JSON object"),
        ("deberta-v2", "pos_att_type", True, "a list of texts"),
        ("llama", "tie_word_embeddings", "yes", "true or false"),
        ("mistral", "sliding_window", -1, "integer of at least 1"),
        ("qwen2", "layer_types", "full", "must be a list"),
    ],
)
def test_an_entry_outside_the_model_is_refused(
    kind: str, entry: str, value: Any, feature: str
) -> None:
    with pytest.raises(DomainError, match=feature):
        moments.from_huggingface(config_of(kind) | {entry: value})


def test_features_of_single_families() -> None:
    """What sets a family apart, where the declaration says it in so many words."""
    assert quiet(config_of("gpt2", "variant")).temperature == (1.0, 2.0)
    assert moments.from_huggingface(config_of("roberta")).seq_len == 24 - 2
    assert moments.from_huggingface(config_of("mistral") | {"sliding_window": 4}).window == 4
    assert moments.from_huggingface(config_of("mistral") | {"sliding_window": None}).window is None
    assert moments.from_huggingface(config_of("mistral") | {"sliding_window": 24}).window is None
    assert moments.from_huggingface(config_of("qwen2", "variant")).window == (None, 4)
    gemma = moments.from_huggingface({"model_type": "gemma2"}, seq_len=5000)
    assert gemma.window == tuple([4096, None] * 13)
    assert (gemma.norm, gemma.logit_softcap, gemma.head.logit_softcap) == ("sandwich", 50.0, 30.0)
    assert gemma.embedding.scale == pytest.approx(2304**0.5)
    assert gemma.temperature == 1.0  # query_pre_attn_scalar is the head's width
    legacy = {"model_type": "gemma", "hidden_act": "gelu"}
    assert moments.from_huggingface(legacy) == moments.preset("gemma-7b")
    legacy["hidden_activation"] = "gelu_pytorch_tanh"
    assert moments.from_huggingface(legacy) == moments.preset("gemma-7b")
    uncapped = {"model_type": "gemma2", "final_logit_softcapping": None}
    assert moments.from_huggingface(uncapped).head.logit_softcap is None
    phi = moments.preset("phi-2")
    assert (phi.parallel, phi.parallel_norms, phi.rotary.fraction) == (True, 1, 0.4)
    assert moments.preset("pythia-70m").parallel_norms == 2
    assert moments.preset("falcon-7b").kv_heads == 1
    old = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    for kind in ("phi", "phi3", "stablelm"):
        assert moments.from_huggingface({"model_type": kind} | old).rotary == Rotary(0.5, 5e5)
    old = {"rotary_emb_base": 5e5, "rotary_pct": 0.5}
    assert moments.from_huggingface({"model_type": "gpt_neox"} | old).rotary == Rotary(0.5, 5e5)
    t5 = moments.preset("t5-small")
    assert t5.head.output_scale == pytest.approx(512**-0.5)
    assert t5.temperature == pytest.approx(64**-0.5)
    assert t5.encoder.causal is False
    assert t5.encoder.weights == t5.weights
    later = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    assert moments.from_huggingface(later).head.output_scale == 1.0
    assert moments.from_huggingface(later).activation == "gelu_tanh"
    vit = moments.preset("vit-base")
    assert (vit.seq_len, vit.head.classes, vit.embedding.patch_width) == (197, 1000, 768)
    with pytest.raises(DomainError, match="seq_len = 64: must be 197"):
        moments.preset("vit-base", seq_len=64)
    for kind in FAMILIES:
        if FAMILIES[kind].task == "masked":
            name = "activation" if kind == "distilbert" else "hidden_act"
            model = quiet(config_of(kind) | {name: "relu"})
            fixed = kind in ("roberta", "camembert", "xlm-roberta", "electra")
            assert (model.activation, model.head.transform) == ("relu", "gelu" if fixed else "relu")
    both = {"model_type": "gemma", "hidden_act": "silu", "hidden_activation": "relu"}
    with pytest.warns(ValidityWarning, match="hidden_activation = 'relu' is not modelled"):
        assert moments.from_huggingface(both).activation == "silu"
    smaller = moments.from_huggingface(config_of("t5") | {"initializer_factor": 0.5})
    assert (smaller.head.norm_gain, smaller.encoder.head.norm_gain) == (0.5, 0.5)
    deberta = quiet(config_of("deberta-v2", "variant"))
    assert deberta.temperature == pytest.approx(3**0.5)


def test_falcon_with_and_without_linear_biases() -> None:
    """As its module's two branches and two kinds of layers have it."""
    drops = {"attention_dropout": 0.3, "hidden_dropout": 0.2, "multi_query": False}
    config = config_of("falcon") | drops
    turned = moments.from_huggingface(config)
    assert (turned.alibi, turned.attention_dropout, turned.dropout) == (False, 0.0, 0.2)
    biased = moments.from_huggingface(config | {"alibi": True})
    assert biased.alibi == pytest.approx((32 // 4) ** -0.5)
    assert (biased.rotary, biased.attention_dropout) == (None, 0.3)
    in_turn = moments.from_huggingface(config | {"parallel_attn": False})
    assert (in_turn.dropout, in_turn.ffn_dropout) == (0.3, 0.2)


PUBLISHED: dict[str, dict[str, Any]] = {
    # Entries as checkpoints of those families have them, those that say nothing here included.
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1}
    | {"hidden_act": "silu", "max_position_embeddings": 4096, "num_key_value_heads": 32}
    | {"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0}
    | {"tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0"}
    | {"use_cache": True, "vocab_size": 32000, "_name_or_path": "somewhere"},
    "gpt2": {"activation_function": "gelu_new", "n_ctx": 1024, "resid_pdrop": 0.1}
    | {"summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None}
    | {"task_specific_params": {"text-generation": {"do_sample": True}}},
    "opt": {"activation_dropout": 0.0, "layerdrop": 0.0, "prefix": "</s>", "dropout": 0.1}
    | {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "init_std": 0.02},
    "distilbert": {"sinusoidal_pos_embds": False, "tie_weights_": True, "qa_dropout": 0.1}
    | {"seq_classif_dropout": 0.2, "pad_token_id": 0, "dropout": 0.0},
    "t5": {"is_encoder_decoder": True, "n_positions": 512, "output_past": True}
    | {"decoder_start_token_id": 0, "task_specific_params": {"summarization": {"num_beams": 4}}},
    "bloom": {"n_embed": 1024, "num_attention_heads": 16, "n_head": 16, "seq_length": 2048}
    | {"offset_alibi": 100, "skip_bias_add": True, "masked_softmax_fusion": True, "n_inner": None},
    "vit": {"encoder_stride": 16, "id2label": {"0": "a", "1": "b", "2": "c"}}
    | {"label2id": {"a": 0, "b": 1, "c": 2}, "qkv_bias": True},
}


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_published_configs_are_read_without_a_warning(kind: str) -> None:
    model = moments.from_huggingface({"model_type": kind} | PUBLISHED[kind])
    if kind == "vit":
        assert model.head.classes == 3
    if kind == "bloom":
        assert model.d_model == 1024


# --- initialisation -------------------------------------------------------------------------------


def declared_square(model: moments.Transformer, layer: int, name: str) -> float | None:
    """Mean square of the entries of a parameter, as the declaration has it."""
    assert model.weights is not None
    if 1 <= layer <= model.layers and hasattr(model.layer_weights(layer), name):
        return float(getattr(model.layer_weights(layer), name))
    embedding, head = model.embedding, model.head
    found = {
        "token": getattr(embedding, "token_variance", None),
        "position": embedding.position_variance,
        "segment": getattr(embedding, "segment_variance", None),
        "patch": getattr(embedding, "patch_variance", None),
        "class": getattr(embedding, "class_variance", None),
        "head": head.weight_variance,
        "head.transform": head.transform_variance,
        "relative_bias": model.relative_bias.variance if model.relative_bias else None,
    }
    return found.get(name)


@pytest.mark.slow
@EACH
def test_initialisation_is_what_the_module_draws(kind: str, variant: str) -> None:
    """Mean square of every matrix against the declared variance, with the error of so many normal
    entries; biases at zero, gains at one."""
    config = config_of(kind, variant)
    if "initializer_range" in FAMILIES[kind].defaults:
        config["initializer_range"] = 0.03
    module, model = build_module(config, seed=3), quiet(config)
    parameters = dict(module.named_parameters())
    matrices = 0
    for row, part in parts_of(module, anatomy_of(module)):
        entries = part.of(parameters[row.parameter]).detach().double()
        if row.parameter.startswith(("deberta.encoder.rel", "deberta.encoder.LayerNorm")):
            continue  # relative positions, which are left out
        assert row.weight != row.parameter, f"{row.parameter} has no role"
        if row.weight.endswith(".bias") and row.weight != "relative_bias":
            assert not entries.any(), row
        elif row.weight.endswith(".gain"):
            shifted = "gemma" in kind
            assert torch.equal(entries + shifted, torch.ones_like(entries)), row
        else:
            stack = model.encoder if row.weight.startswith("encoder.") else model
            variance = declared_square(stack, row.layer, row.weight.removeprefix("encoder."))
            if getattr(model.embedding, "positions", "") == "sinusoidal":
                variance = 0.5 if row.weight == "position" else variance
            padding = getattr(model.embedding, "padding_id", None)
            if row.weight == "token" and padding is not None:
                assert not entries[padding].any()
                entries = torch.cat([entries[:padding], entries[padding + 1 :]])
            assert variance is not None, row
            error = 5 * (2 / entries.numel()) ** 0.5
            assert float(entries.square().mean()) == pytest.approx(variance, rel=error), row
            matrices += 1
    assert matrices >= 2 * 6 + 1


# --- sites and parameters -------------------------------------------------------------------------


class Passed(NamedTuple):
    """One pass of a module: tensors by (layer, site), parameters and their gradients by name."""

    tensors: dict[tuple[int, str], Any]
    weights: dict[tuple[int, str], Any]
    gradients: dict[tuple[int, str], Any]


def run(module: Any, kind: str, variant: str = "", *, distinct: bool = False) -> Passed:
    """Forward and backward in training mode, every hook point's tensor kept in double precision.

    Tokens are those of a text, or all different.
    """
    points, tensors, handles = hook_points(module), {}, []
    modules = dict(module.named_modules())

    def hold(point: Any, value: Any) -> None:
        entries = value if isinstance(value, tuple | list) else [value]
        first = next(v for v in entries if isinstance(v, torch.Tensor))
        assert (point.layer, point.site) not in tensors, f"{point} is passed twice"
        tensors[point.layer, point.site] = first.detach().clone().double()

    for point in points:
        owner = modules[point.path]
        if point.side == "input":
            handles.append(
                owner.register_forward_pre_hook(
                    lambda _, a, k, p=point: hold(p, [*a, *k.values()]), with_kwargs=True
                )
            )
        else:
            handles.append(owner.register_forward_hook(lambda _, __, o, p=point: hold(p, o)))
    module.train()
    batch = module_batch(config_of(kind, variant), seq_len=LENGTH)
    if distinct and kind != "vit":
        ids = 10 + np.arange(batch["labels"].size).reshape(batch["labels"].shape)
        batch = {"input_ids": ids, "labels": ids}
    loss = module(**{name: torch.as_tensor(value) for name, value in batch.items()}).loss
    parameters = dict(module.named_parameters())
    pulled = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for handle in handles:
        handle.remove()
    gradients = dict(zip(parameters, pulled, strict=True))
    weights, found = {}, {}
    for row, part in parts_of(module, anatomy_of(module)):
        place = (row.layer, row.weight)
        assert place not in weights, f"{place} twice"
        weights[place] = part.of(parameters[row.parameter].detach()).double()
        gradient = gradients[row.parameter]
        found[place] = None if gradient is None else part.of(gradient).double()
    return Passed(tensors, weights, found)


@functools.cache
def passed(kind: str, variant: str = "", *, distinct: bool = False) -> Passed:
    return run(module_of(kind, variant), kind, variant, distinct=distinct)


def through(p: Passed, layer: int, x: Any, name: str, kind: str) -> Any:
    """x through a matrix of a layer and its bias, by torch's or Conv1D's convention."""
    weight = p.weights[layer, name]
    if kind != "gpt2":
        weight = weight.flatten(0, -2).T
    y = x @ weight.reshape(x.shape[-1], -1)
    bias = p.weights.get((layer, f"{name}.bias"))
    return y if bias is None else y + bias.flatten()


def close(found: Any, wanted: Any, what: Any) -> None:
    found = found.reshape(wanted.shape)
    assert float((found - wanted).abs().max()) < 2e-5 * max(1.0, float(wanted.abs().max())), what


@pytest.mark.slow
@EACH
def test_sites_hold_the_tensors_they_name(kind: str, variant: str) -> None:
    """Every site against its neighbours and the matrices between them; dropout is off."""
    p = passed(kind, variant)
    model = quiet(config_of(kind, variant))
    branch = float(model.by_block("branch_scale")[0, 0])
    for prefix in {"": [""], "t5": ["", "encoder."], "mt5": ["", "encoder."]}.get(kind, [""]):
        t = {k: v for k, v in p.tensors.items() if k[1].startswith("encoder.") == bool(prefix)}
        for layer in (1, 2):

            def at(site: str, layer: int = layer, prefix: str = prefix, t: Any = t) -> Any:
                return t.get((layer, prefix + site))

            def matrix(x: Any, name: str, layer: int = layer, prefix: str = prefix) -> Any:
                return through(p, layer, x, prefix + name, kind)

            x = t[layer - 1, f"{prefix}stream"]
            close(matrix(at("attention.heads"), "output"), at("attention.projection"), "projection")
            close(matrix(at("ffn.activation"), "ffn_out"), at("ffn.out"), "ffn.out")
            entering = at("ffn.norm") if at("ffn.norm") is not None else at("attention.norm")
            if model.norm == "post":
                entering = at("attention.norm")
            if at("ffn.in") is not None:
                close(matrix(entering, "ffn_in"), at("ffn.in"), "ffn.in")
            gated = (layer, f"{prefix}gate") in p.weights
            if gated and at("ffn.gate") is not None:
                close(matrix(entering, "gate"), at("ffn.gate"), "ffn.gate")
            if gated:
                act = {"silu": torch.nn.SiLU(), "gelu_tanh": torch.nn.GELU("tanh")}
                product = act[model.activation](matrix(entering, "gate"))
                close(product * matrix(entering, "ffn_in"), at("ffn.activation"), "ffn.activation")
            added = {
                name: at(f"{name}.post_norm") if model.norm == "sandwich" else at(site)
                for name, site in (
                    ("attention", "attention.projection"),
                    ("cross", "cross.projection"),
                    ("ffn", "ffn.out"),
                )
            }
            for name in ("attention", "cross", "ffn"):
                if added[name] is None:
                    continue
                x = x.reshape(added[name].shape) + branch * added[name]
                if at(f"{name}.sum") is not None:
                    close(x, at(f"{name}.sum"), f"{name}.sum")
                if model.norm == "post":
                    x = at(f"{name}.norm")
            close(x, at("stream"), "stream")
    final = p.tensors.get((3, "final.norm"))
    if final is not None and (3, "logits") in p.tensors:
        scale = model.head.output_scale if kind == "t5" else 1.0
        weight = p.weights.get((3, "head"), p.weights[0, "token"])
        close(scale * final @ weight.T, p.tensors[3, "logits"], "logits")


def equal_share(x: Any, y: Any) -> float:
    return float((x == y.reshape(x.shape)).double().mean())


@pytest.mark.slow
@EACH
def test_dropout_is_where_the_declaration_has_it(kind: str, variant: str) -> None:
    """What is dropped adds exactly nothing to the stream; attention has its own probability."""
    config = config_of(kind, variant)
    for name in FAMILIES[kind].defaults:
        if "drop" in name:
            config[name] = 0.2 if "att" in name else 0.4
    model = quiet(config)
    p = run(build_module(config, seed=2), kind, variant)
    error = 5 * (0.25 / p.tensors[1, "stream"].numel()) ** 0.5
    if "dropout" in FAMILIES[kind].defaults or "hidden_dropout" in FAMILIES[kind].defaults:
        assert max(model.dropout, model.ffn_dropout) > 0
    entering, leaving = p.tensors[0, "stream"], p.tensors[1, "stream"]
    embedded = float((entering == 0).double().mean())
    assert embedded == pytest.approx(model.embedding.dropout, abs=error)
    if (1, "ffn.activation_dropout") in p.tensors:
        before, after = (p.tensors[1, f"ffn.activation{end}"] for end in ("", "_dropout"))
        kept = float((after[before != 0] == 0).double().mean())
        assert kept == pytest.approx(model.activation_dropout, abs=error)
    if model.parallel:
        # Falcon drops the sum of both blocks, the others each of them.
        share = model.dropout if kind == "falcon" else model.dropout * model.ffn_dropout
        assert equal_share(leaving, entering) == pytest.approx(share, abs=error)
        return
    middle, last = p.tensors[1, "attention.sum"], p.tensors[1, "ffn.sum"]
    between = p.tensors.get((1, "cross.sum"), middle)
    if model.norm == "post":
        between = p.tensors[1, "attention.norm"]
    assert equal_share(middle, entering) == pytest.approx(model.dropout, abs=error)
    assert equal_share(last, between) == pytest.approx(model.ffn_dropout, abs=error)


@EACH
def test_every_parameter_has_a_part_and_parts_fill_it(kind: str, variant: str) -> None:
    module = module_of(kind, variant)
    filled: dict[str, int] = {}
    parameters = dict(module.named_parameters())
    for row, part in parts_of(module, anatomy_of(module)):
        size = part.of(parameters[row.parameter]).numel()
        filled[row.parameter] = filled.get(row.parameter, 0) + size
    assert filled == {name: parameter.numel() for name, parameter in parameters.items()}


@pytest.mark.slow
@EACH
def test_query_key_and_value_are_told_apart(kind: str, variant: str) -> None:
    """With queries at zero, keys receive no gradient and every head averages its values."""
    module = build_module(config_of(kind, variant), seed=5)
    module.load_state_dict({k: v.clone() for k, v in module_of(kind, variant).state_dict().items()})
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for row, part in parts_of(module, anatomy_of(module)):
            if row.weight in ("query", "relative_bias"):
                part.of(parameters[row.parameter]).zero_()
    p, model = run(module, kind, variant), quiet(config_of(kind, variant))
    assert float(p.gradients[1, "query"].abs().max()) > 0
    if "c2p" not in str(VARIANTS.get(kind) if variant else ""):
        assert float(p.gradients[1, "key"].abs().max()) < 1e-9
    if model.alibi:
        return
    entering = p.tensors[0, "stream"] if model.norm == "post" else p.tensors[1, "attention.norm"]
    if variant and kind == "deberta-v2":
        return  # keys still meet the positions' queries
    value = through(p, 1, entering, "value", kind)
    batch, length, _ = value.shape
    allowed = torch.ones(length, length, dtype=torch.double)
    if model.causal:
        allowed = allowed.tril()
    reach = model.window[0] if isinstance(model.window, tuple) else model.window
    if reach:
        allowed = allowed.triu(1 - reach)
    mean = torch.einsum("ij,bjf->bif", allowed / allowed.sum(1, keepdim=True), value)
    by_head = mean.reshape(batch, length, model.kv_heads, 1, -1)
    shared = by_head.expand(-1, -1, -1, model.heads // model.kv_heads, -1)
    close(shared.reshape(batch, length, -1), p.tensors[1, "attention.heads"], "heads")


@EACH
def test_a_query_is_no_key(kind: str, variant: str) -> None:
    """A vector added to every key changes no softmax: the key bias has no gradient. Under a causal
    mask the first token's query chooses among one key, so that it has none either."""
    model = quiet(config_of(kind, variant))
    if (kind, variant) in (("deberta-v2", "variant"), ("vit", "variant")):
        return  # keys that also meet the positions' queries; no bias and no mask
    p = passed(kind, variant, distinct=True)
    size = {n: p.gradients.get((1, f"{n}.bias")) for n in ("query", "key")}
    if size["key"] is not None and model.rotary is None:
        assert float(size["key"].abs().max()) < 1e-4 * float(size["query"].abs().max())
        return
    assert model.causal
    x = p.tensors[1, "attention.norm"].reshape(-1, LENGTH, 32)
    others, first = x[:, 1:].flatten(0, 1), x[0, 0]
    q, _ = torch.linalg.qr(others.T)
    along = first - q @ (q.T @ first)  # no other token has any of it
    assert float(along.norm()) > 0.1
    pulled = {}
    for name in size:
        gradient = p.gradients[1, name].flatten(0, -2)
        pulled[name] = float((gradient @ along).abs().max() / gradient.abs().max())
    assert pulled["query"] < 1e-4 * pulled["key"]


@pytest.mark.slow
@ALL
def test_gradients_of_all_parameters_make_the_total(kind: str) -> None:
    module = module_of(kind)
    batch = module_batch(config_of(kind), seq_len=LENGTH)
    measured = measure(module, batch)
    loss = module(**{name: torch.as_tensor(value) for name, value in batch.items()}).loss
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    total = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    rows = [*measured.weight_gradient_rows]
    if measured.encoder is not None:
        rows += measured.encoder.weight_gradient_rows
        assert measured.encoder.layers == 2
    assert sum(row["squared_norm"] for row in rows) == pytest.approx(total, rel=1e-4)
    assert measured.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert measured.layers == 2
    assert np.isfinite(measured.grad_variance).all()


def test_stacks_of_an_encoder_and_a_decoder() -> None:
    module = module_of("t5")
    assert {block.stack for block in anatomy_of(module).roles.blocks} == {"encoder.", ""}
    assert {block.stack for block in anatomy_of(module.encoder).roles.blocks} == {""}
    points = {(point.layer, point.site) for point in hook_points(module.encoder)}
    assert (2, "stream") in points
    assert not any(site.startswith("encoder.") for _, site in points)


# --- sizes and presets ----------------------------------------------------------------------------


@ALL
def test_depth_and_width_of_a_sized_config(kind: str) -> None:
    model = quiet(sized_config(kind, 4, 48, heads=2, seq_len=32))
    assert (model.layers, model.d_model, model.heads) == (4, 48, 2)
    deeper = quiet(at_depth(sized_config(kind, 2, 48), 6))
    assert deeper.layers == 6
    assert deeper.encoder is None or deeper.encoder.layers == 6


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sized_config("abacus"), "kind = 'abacus'"),
        (lambda: sized_config("bert", d_model=30), "heads = 4"),
        (lambda: at_depth({"model_type": "gpt_neo"}, 3), "layers = 3"),
        (lambda: at_depth({"model_type": "bert"}, 0), "layers"),
    ],
)
def test_sizes_that_do_not_exist(call: Any, text: str) -> None:
    with pytest.raises(DomainError, match=text):
        call()


PARAMETERS = {
    # Counts of the checkpoints of those names, heads included and tied tables once.
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "bloom-560m": 559_214_592,
    "pythia-70m": 70_426_624,
    "pythia-1b": 1_011_781_632,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_050_882_784,
    "falcon-7b": 6_921_720_704,
    "llama-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "phi-2": 2_779_683_840,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_presets_have_the_published_sizes(name: str) -> None:
    entries = moments.preset.config(name)
    kind = entries.pop("model_type")
    settings = transformers.AutoConfig.for_model(kind, **entries)
    with torch.device("meta"):
        module = getattr(transformers, FAMILIES[kind].module)(settings)
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]
