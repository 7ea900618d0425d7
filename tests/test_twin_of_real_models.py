"""The twin's mechanics against tiny models of the transformers library, weight by weight."""

from __future__ import annotations

import numpy as np
import pytest

from moments import Embedding, Transformer
from moments.model.head import Head
from moments.model.patches import PatchEmbedding
from moments.model.positions import RelativeBias, Rotary
from moments.model.weights import Biases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.simulation.attention import alibi_slopes, buckets  # noqa: E402
from moments.simulation.functions import generator  # noqa: E402
from moments.simulation.network import LayerTwin  # noqa: E402
from moments.simulation.output import run_final, run_head  # noqa: E402
from moments.simulation.twin import run_embedding  # noqa: E402

RANDOM = generator(torch.device("cpu"), 1)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
COMMON = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS = COMMON | {"intermediate_size": 24}
SHAPE = {"layers": 2, "d_model": 16, "heads": 4, "seq_len": 8}


def silent(x, site):
    return x


def real(name, config, **fields):
    """A model with random parameters of order one, in double precision and without dropout."""
    fields = {"attn_implementation": "eager", **fields}
    module = getattr(transformers, name)(getattr(transformers, config)(**fields)).double().eval()
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        scale = 0.3 if parameter.ndim > 1 or "bias" in name else 0.1
        offset = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
        torch.nn.init.normal_(parameter, offset, scale)
    return module


def parameters(module, names):
    """Matrices as (fan_in, fan_out), biases and gains, by the twin's names."""
    found = {}
    for ours, theirs in names.items():
        part = module.get_submodule(theirs)
        normalises = part.weight.ndim == 1
        weight = part.weight.T if isinstance(part, torch.nn.Linear) else part.weight
        found[f"{ours}.gain" if normalises else ours] = weight
        if getattr(part, "bias", None) is not None:
            found[f"{ours}.bias"] = part.bias
    return found


def stack(model, x, layers, memory=None, **shared):
    for number, weights in enumerate(layers, 1):
        x = LayerTwin(model, number, weights | shared, RANDOM, silent, memory).run(x)
    return x


def run(model, read, embedding, layers, head, targets=None):
    x = run_embedding(model, read, None, embedding, RANDOM, silent)
    return run_head(model, stack(model, x, layers), targets, embedding | head, RANDOM, silent)


def same(found, expected, rtol=1e-6):
    np.testing.assert_allclose(found.detach(), expected.detach(), rtol=rtol, atol=rtol)


GATED = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "ffn_in": "mlp.up_proj",
    "ffn_out": "mlp.down_proj",
    "attention.norm": "input_layernorm",
}
BLOCKS = {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 8}


def test_qwen3():
    """Rotary positions on normalised queries and keys, grouped heads, SwiGLU, RMSNorm, the loss."""
    module = real("Qwen3ForCausalLM", "Qwen3Config", **WIDTHS, **BLOCKS, rms_norm_eps=1e-3)
    layers = []
    for layer in module.model.layers:
        torch.nn.init.ones_(layer.self_attn.q_norm.weight)
        torch.nn.init.ones_(layer.self_attn.k_norm.weight)
        layers.append(parameters(layer, GATED | {"ffn.norm": "post_attention_layernorm"}))
    model = Transformer(
        **SHAPE,
        d_ff=24,
        d_head=6,
        kv_heads=2,
        normalization="rmsnorm",
        norm_epsilon=1e-3,
        activation="swiglu",
        causal=True,
        rotary=Rotary(),
        qk_norm="rmsnorm",
        embedding=Embedding(11, 1.0),
        head=Head(tied=False, weight_variance=1.0),
    )
    head = parameters(module, {"final.norm": "model.norm", "head": "lm_head"})
    targets = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    found = run(
        model, IDS, parameters(module, {"token": "model.embed_tokens"}), layers, head, targets
    )
    expected = module(input_ids=IDS, labels=IDS)
    same(found.logits, expected.logits)
    same(found.loss, expected.loss)


def test_gemma2():
    """Norms on both sides, windows, capped logits, a divisor of its own, scaled tokens."""
    module = real(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **WIDTHS,
        **BLOCKS,
        sliding_window=3,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
        query_pre_attn_scalar=10,
        rms_norm_eps=1e-3,
    )
    norms = {
        "attention.post_norm": "post_attention_layernorm",
        "ffn.norm": "pre_feedforward_layernorm",
        "ffn.post_norm": "post_feedforward_layernorm",
    }
    layers = [parameters(layer, GATED | norms) for layer in module.model.layers]
    head = parameters(module, {"final.norm": "model.norm"})
    for weights in (*layers, head):  # Gemma multiplies by 1 + weight
        weights.update({k: v + 1 for k, v in weights.items() if k.endswith(".gain")})
    model = Transformer(
        **SHAPE,
        d_ff=24,
        d_head=6,
        kv_heads=2,
        norm="sandwich",
        normalization="rmsnorm",
        norm_epsilon=1e-3,
        activation="geglu_tanh",
        causal=True,
        rotary=Rotary(),
        temperature=(10 / 6) ** 0.5,
        logit_softcap=2.0,
        window=(3, None),
        embedding=Embedding(11, 1.0, scale=4.0),
        head=Head(logit_softcap=1.5),
    )
    assert module.config.layer_types == ["sliding_attention", "full_attention"]
    found = run(model, IDS, parameters(module, {"token": "model.embed_tokens"}), layers, head)
    # The library takes this model's norms and softmax in single precision.
    same(found.logits, module(input_ids=IDS).logits, rtol=1e-4)


def test_olmo3():
    """Norms at the blocks' outputs alone, queries and keys normalised over all heads, windows and
    rotary positions that differ between layers."""
    module = real(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        **WIDTHS,
        num_key_value_heads=2,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        },
        rms_norm_eps=1e-3,
        pad_token_id=0,
    )
    norms = {
        "attention.post_norm": "post_attention_layernorm",
        "ffn.post_norm": "post_feedforward_layernorm",
        "query.norm": "self_attn.q_norm",
        "key.norm": "self_attn.k_norm",
    }
    names = {name: path for name, path in GATED.items() if name != "attention.norm"} | norms
    layers = [parameters(layer, names) for layer in module.model.layers]
    head = parameters(module, {"final.norm": "model.norm", "head": "lm_head"})
    model = Transformer(
        **SHAPE,
        d_ff=24,
        kv_heads=2,
        norm="output",
        normalization="rmsnorm",
        norm_epsilon=1e-3,
        activation="swiglu",
        causal=True,
        qk_norm="rmsnorm-all",
        rotary=(Rotary(base=100.0), Rotary(speeds=(0.25, 0.025))),
        window=(3, None),
        embedding=Embedding(11, 1.0),
        head=Head(tied=False, weight_variance=1.0),
    )
    found = run(model, IDS, parameters(module, {"token": "model.embed_tokens"}), layers, head)
    same(found.logits, module(input_ids=IDS).logits, rtol=1e-4)


def test_gpt_neox():
    """Parallel blocks with a norm each, a quarter of every head rotated, biases."""
    module = real("GPTNeoXForCausalLM", "GPTNeoXConfig", **WIDTHS, rotary_pct=0.5)
    model = Transformer(
        **SHAPE,
        d_ff=24,
        norm_epsilon=1e-5,
        activation="gelu",
        causal=True,
        rotary=Rotary(0.5),
        parallel=True,
        parallel_norms=2,
        biases=Biases(),
        embedding=Embedding(11, 1.0),
        head=Head(tied=False, weight_variance=1.0),
    )
    names = {
        "output": "attention.dense",
        "ffn_in": "mlp.dense_h_to_4h",
        "ffn_out": "mlp.dense_4h_to_h",
        "attention.norm": "input_layernorm",
        "ffn.norm": "post_attention_layernorm",
    }
    layers = []
    for layer in module.gpt_neox.layers:
        fused = layer.attention.query_key_value
        weights = fused.weight.view(4, 3, 4, 16).permute(1, 3, 0, 2).flatten(2)
        biases = fused.bias.view(4, 3, 4).transpose(0, 1).flatten(1)
        own = {}
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            own |= {name: weight, f"{name}.bias": bias}
        layers.append(parameters(layer, names) | own)
    head = parameters(module, {"final.norm": "gpt_neox.final_layer_norm", "head": "lm_head"})
    embedding = parameters(module, {"token": "gpt_neox.embed_in"})
    same(run(model, IDS, embedding, layers, head).logits, module(input_ids=IDS).logits)


def test_t5():
    """Encoder and decoder: shared relative biases, unscaled logits, cross-attention."""
    fields = {"vocab_size": 11, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2}
    biases = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    module = real(
        "T5ForConditionalGeneration", "T5Config", **fields, **biases, num_heads=4, dropout_rate=0.0
    )
    like = {
        "d_ff": 24,
        "d_head": 6,
        "normalization": "rmsnorm",
        "norm_epsilon": 1e-6,
        "temperature": 6**-0.5,
        "relative_bias": RelativeBias(1.0, 8, 16),
        "embedding": Embedding(11, 1.0),
    }
    encoder = Transformer(**SHAPE, **like)
    scale = 16**-0.5 if module.config.tie_word_embeddings else 1.0
    assert torch.equal(module.lm_head.weight, module.shared.weight)
    model = Transformer(
        **SHAPE, **like, causal=True, encoder=encoder, head=Head(output_scale=scale)
    )

    def attention(path, prefix):
        kinds = {"query": "q", "key": "k", "value": "v", "output": "o"}
        return {f"{prefix}{ours}": f"{path}.{theirs}" for ours, theirs in kinds.items()}

    def names(ffn):
        dense = f"layer.{ffn}.DenseReluDense"
        return {
            **attention("layer.0.SelfAttention", ""),
            "attention.norm": "layer.0.layer_norm",
            "ffn_in": f"{dense}.wi",
            "ffn_out": f"{dense}.wo",
            "ffn.norm": f"layer.{ffn}.layer_norm",
        }

    cross = {**attention("layer.1.EncDecAttention", "cross_"), "cross.norm": "layer.1.layer_norm"}
    read, embedding = IDS.flip(1), {"token": module.shared.weight}

    def table(stack):
        return stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight

    layers = [parameters(block, names(1)) for block in module.encoder.block]
    x = run_embedding(encoder, read, None, embedding, RANDOM, silent)
    x = stack(encoder, x, layers, relative_bias=table(module.encoder))
    final = parameters(module.encoder, {"final.norm": "final_layer_norm"})
    memory = run_final(encoder, x, final, RANDOM, silent)

    layers = [parameters(block, names(2) | cross) for block in module.decoder.block]
    x = run_embedding(model, IDS, None, embedding, RANDOM, silent)
    x = stack(model, x, layers, memory, relative_bias=table(module.decoder))
    final = parameters(module.decoder, {"final.norm": "final_layer_norm"})
    logits = run_head(model, x, None, embedding | final, RANDOM, silent).logits
    same(logits, module(input_ids=read, decoder_input_ids=IDS).logits)


def test_bert():
    """Post-LN with biases, a normalised embedding, and the head of the masked language model."""
    module = real("BertForMaskedLM", "BertConfig", **WIDTHS, max_position_embeddings=8)
    model = Transformer(
        **SHAPE,
        d_ff=24,
        norm="post",
        norm_epsilon=1e-12,
        activation="gelu",
        biases=Biases(),
        embedding=Embedding(11, 1.0, 1.0, 1.0, norm=True, norm_epsilon=1e-12),
        head=Head(norm=False, transform="gelu", transform_variance=1.0, bias=True, loss="masked"),
    )
    names = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "output": "attention.output.dense",
        "attention.norm": "attention.output.LayerNorm",
        "ffn_in": "intermediate.dense",
        "ffn_out": "output.dense",
        "ffn.norm": "output.LayerNorm",
    }
    layers = [parameters(layer, names) for layer in module.bert.encoder.layer]
    tables = ("token", "word"), ("position", "position"), ("segment", "token_type")
    places = {ours: f"bert.embeddings.{theirs}_embeddings" for ours, theirs in tables}
    norm = {"embedding.norm": "bert.embeddings.LayerNorm"}
    embedding = parameters(module, places | norm)
    transform = "cls.predictions.transform"
    head = {"head.transform": f"{transform}.dense", "head.norm": f"{transform}.LayerNorm"}
    own = parameters(module, head) | {"head.bias": module.cls.predictions.bias}
    targets = IDS.masked_fill(IDS > 4, -100)
    found = run(model, IDS, embedding, layers, own, targets)
    expected = module(input_ids=IDS, labels=targets)
    same(found.logits, expected.logits)
    same(found.loss, expected.loss)


def test_vit():
    """Patches of an image, a class token, a classifier of it."""
    fields = {k: v for k, v in WIDTHS.items() if k != "vocab_size"}
    module = real(
        "ViTForImageClassification",
        "ViTConfig",
        **fields,
        image_size=6,
        patch_size=2,
        num_channels=2,
        num_labels=5,
    )
    patches = PatchEmbedding(6, 2, 1.0, 1.0, channels=2, bias_variance=0.0)
    model = Transformer(
        **(SHAPE | {"seq_len": patches.seq_len}),
        d_ff=24,
        norm_epsilon=1e-12,
        activation="gelu",
        biases=Biases(),
        embedding=patches,
        head=Head(tied=False, weight_variance=1.0, bias=True, loss="classification", classes=5),
    )
    inside = {name.rpartition(".")[2]: name for name, _ in module.named_modules()}
    layer = "vit.encoder.layer.0" if "vit.encoder.layer.0" in inside.values() else "vit.layers.0"
    linear = [n for n, p in module.get_submodule(layer).named_modules() if hasattr(p, "weight")]
    order = {
        "query": ("query", "q_proj"),
        "key": ("key", "k_proj"),
        "value": ("value", "v_proj"),
        "output": ("attention.output.dense", "o_proj"),
        "attention.norm": ("layernorm_before",),
        "ffn.norm": ("layernorm_after",),
        "ffn_in": ("intermediate.dense", "fc1"),
        "ffn_out": ("output.dense", "fc2"),
    }
    names = {
        ours: min((n for n in linear if n.endswith(ends)), key=len) for ours, ends in order.items()
    }
    layers = [parameters(module.get_submodule(layer[:-1] + str(n)), names) for n in (0, 1)]
    inner = module.vit.embeddings
    projection = inner.patch_embeddings.projection
    embedding = {
        "patch": projection.weight.flatten(1).T,
        "patch.bias": projection.bias,
        "class": inner.cls_token[0, 0],
        "position": inner.position_embeddings[0],
    }
    head = parameters(module, {"final.norm": "vit.layernorm", "head": "classifier"})
    pixels = torch.randn(3, 2, 6, 6, generator=generator(torch.device("cpu"), 5)).double()
    targets = torch.tensor([0, 3, 4])
    found = run(model, pixels, embedding, layers, head, targets)
    expected = module(pixel_values=pixels, labels=targets)
    same(found.logits[:, 0], expected.logits)
    same(found.loss, expected.loss)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "distance"), [(32, 128), (8, 20)])
def test_t5_buckets(causal, count, distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    offset = torch.arange(-300, 300)
    expected = T5Attention._relative_position_bucket(offset, not causal, count, distance)
    bias = RelativeBias(1.0, count, distance)
    assert torch.equal(buckets(offset, bias, causal), expected)
    # The declaration's own function, which the theory uses.
    np.testing.assert_array_equal(bias.bucket(offset.numpy(), causal), expected)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16])
def test_alibi_slopes(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-6)
