"""Real modules by hooks, against torch's own tensors and gradients."""

import numpy as np
import pytest

from moments import DomainError, MomentsError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import small_modules  # noqa: E402

from moments import torch as measured_by  # noqa: E402
from moments.model.huggingface.sizes import sized_config  # noqa: E402
from moments.torch import hook_points  # noqa: E402
from moments.torch.huggingface_modules import (  # noqa: E402
    build_module,
    image_batch,
    module_batch,
    text_batch,
)

SEQ_LEN = 16
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 500,
    "max_position_embeddings": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 500,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5, VIT = sized_config("t5", 2), sized_config("vit", 2)
CONFIGS = pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
LAYER_SITES = {
    f"{block}.{site}"
    for block, sites in {
        "attention": ("norm", "heads", "projection", "dropout", "sum"),
        "ffn": ("norm", "in", "activation", "out", "dropout", "sum"),
    }.items()
    for site in sites
} | {"stream"}


def stream_modules(module):
    """What leaves the embedding, and the layers, by hand."""
    if hasattr(module, "bert"):
        return [module.bert.embeddings, *module.bert.encoder.layer]
    return [module.transformer.drop, *module.transformer.h]


def without_dropout(module):
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # of attention weights, where it is no module
    return module


@CONFIGS
def test_every_site_is_found(config):
    measured, ids = small_modules.measured(config, SEQ_LEN, 2)
    frame = measured.to_frame()
    for layer in (1, 2):
        assert set(frame[frame["layer"] == layer]["site"]) == LAYER_SITES
    after = {"logits"} | ({"head.transform", "head.norm"} if config is BERT else {"final.norm"})
    assert set(frame[frame["layer"] == 3]["site"]) == after
    before = {"embedding.sum", "embedding", "stream"}
    before |= {"embedding.norm"} if config is BERT else set()
    assert set(frame[frame["layer"] == 0]["site"]) == before
    assert ids.shape == (2, SEQ_LEN)
    assert measured.layers == 2
    assert measured.seq_len == SEQ_LEN
    assert np.isfinite(frame.drop(columns="site").to_numpy(float)).all()
    assert not frame.duplicated(["layer", "site"]).any()


@CONFIGS
def test_moments_are_those_of_the_tensors_themselves(config):
    """Stream, gradient and weight gradients against retain_grad on a second, unwatched pass."""
    module = without_dropout(build_module(config, seed=3))
    data = text_batch(config, seq_len=SEQ_LEN)
    measured = measured_by.measure(module, data)

    kept = []

    def keep(_, __, output):
        output = output[0] if isinstance(output, tuple) else output
        output.retain_grad()
        kept.append(output)

    module.train()
    handles = [part.register_forward_hook(keep) for part in stream_modules(module)]
    output = module(**{name: torch.as_tensor(ids) for name, ids in data.items()})
    output.loss.backward()
    for handle in handles:
        handle.remove()

    for n, x in enumerate(kept):
        for prefix, tensor in (("", x), ("grad_", x.grad)):
            rows = tensor.detach().double().numpy()
            variance = (rows**2).mean()
            gram = np.einsum("bif,bjf->ij", rows, rows) / (2 * 64)
            pairs = (gram.sum() - np.trace(gram)) / (SEQ_LEN * (SEQ_LEN - 1))
            found = getattr(measured, f"{prefix}variance")[n]
            assert found == pytest.approx(variance, rel=1e-5)
            correlation = getattr(measured, f"{prefix}correlation")[n]
            assert correlation == pytest.approx(pairs / variance, abs=1e-5)
            tokens = getattr(measured, f"token_{prefix}variance")[n]
            np.testing.assert_allclose(tokens, (rows**2).mean((0, 2)), rtol=1e-4, atol=1e-20)
    assert measured.loss == pytest.approx(float(output.loss.detach()), rel=1e-6)
    logits = output.logits.detach().double()
    assert measured.logit_variance == pytest.approx(float(logits.square().mean()), rel=1e-6)

    norms = measured.weight_gradients()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, rows in norms.groupby("parameter"):
        total = float(gradients[name].double().square().sum())
        assert rows["squared_norm"].sum() == pytest.approx(total, rel=1e-5)
    layer = norms[norms["layer"] == 2].set_index("weight")["squared_norm"]
    matrices = {"query", "key", "value", "output", "ffn_in", "ffn_out"}
    norms = {f"{b}.norm.{p}" for b in ("attention", "ffn") for p in ("gain", "bias")}
    assert set(layer.index) == matrices | {f"{name}.bias" for name in matrices} | norms
    if config is GPT2:
        fused = gradients["transformer.h.1.attn.c_attn.weight"].double()
        for place, name in enumerate(("query", "key", "value")):
            third = fused[:, 64 * place : 64 * (place + 1)]
            assert layer[name] == pytest.approx(float(third.square().sum()), rel=1e-5)


def sites_by_hand(module, ids):
    """Every tensor of layer 1, recomputed from the parameters without dropout: name -> array."""
    p = {name: value.detach().double().numpy() for name, value in module.named_parameters()}
    bert = hasattr(module, "bert")

    def norm(x, epsilon):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)

    def attend(q, k, v):
        length = q.shape[1]
        q, k, v = (a.reshape(-1, length, 4, 16).swapaxes(1, 2) for a in (q, k, v))
        logits = q @ k.swapaxes(2, 3) / 4.0
        if not bert:
            logits = np.where(np.tril(np.ones((length, length))) == 1, logits, -np.inf)
        mixing = np.exp(logits - logits.max(-1, keepdims=True))
        heads = mixing / mixing.sum(-1, keepdims=True) @ v
        return heads.swapaxes(1, 2).reshape(-1, length, 64)

    found = {}
    if bert:
        layer = "bert.encoder.layer.0."
        tables = "bert.embeddings."
        x = p[tables + "word_embeddings.weight"][ids]
        x = x + p[tables + "position_embeddings.weight"][: ids.shape[1]]
        x = norm(x + p[tables + "token_type_embeddings.weight"][0], 1e-12)
        q, k, v = (x @ p[f"{layer}attention.self.{w}.weight"].T for w in ("query", "key", "value"))
        output = p[layer + "attention.output.dense.weight"].T
        ffn_in, ffn_out = (p[f"{layer}{w}.dense.weight"].T for w in ("intermediate", "output"))
    else:
        layer = "transformer.h.0."
        x = p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: ids.shape[1]]
        found["attention.norm"] = norm(x, 1e-5)
        q, k, v = np.split(found["attention.norm"] @ p[layer + "attn.c_attn.weight"], 3, axis=-1)
        output = p[layer + "attn.c_proj.weight"]
        ffn_in, ffn_out = p[layer + "mlp.c_fc.weight"], p[layer + "mlp.c_proj.weight"]
    found["attention.heads"] = attend(q, k, v)
    found["attention.projection"] = found["attention.dropout"] = found["attention.heads"] @ output
    found["attention.sum"] = x + found["attention.projection"]
    if bert:
        into = middle = found["attention.norm"] = norm(found["attention.sum"], 1e-12)
    else:
        middle = found["attention.sum"]
        into = found["ffn.norm"] = norm(middle, 1e-5)
    found["ffn.in"] = into @ ffn_in
    activation = torch.nn.GELU(approximate="none" if bert else "tanh")
    found["ffn.activation"] = activation(torch.as_tensor(found["ffn.in"])).numpy()
    found["ffn.out"] = found["ffn.dropout"] = found["ffn.activation"] @ ffn_out
    found["ffn.sum"] = found["stream"] = middle + found["ffn.out"]
    if bert:
        found["ffn.norm"] = found["stream"] = norm(found["ffn.sum"], 1e-12)
    return found


@CONFIGS
def test_sites_hold_the_tensors_they_name(config):
    module = without_dropout(build_module(config, seed=9))
    for name, parameter in module.named_parameters():
        if "dense" in name or "c_" in name or "self" in name:
            parameter.data.mul_(5)  # so that attention is not uniform and the activation curves
    data = text_batch(config, seq_len=SEQ_LEN)
    frame = measured_by.measure(module, data).to_frame().set_index(["layer", "site"])
    by_hand = sites_by_hand(module, data["input_ids"])
    assert set(by_hand) == LAYER_SITES
    for site, x in by_hand.items():
        row = frame.loc[(1, site)]
        assert row["mean"] == pytest.approx(x.mean(), abs=1e-5 * x.std()), site
        variance = x.var() if site == "ffn.activation" else (x**2).mean()
        assert row["variance"] == pytest.approx(variance, rel=1e-5), site


@CONFIGS
def test_embedding_variance_is_the_sum_of_the_tables(config):
    measured, _ = small_modules.measured(config, SEQ_LEN, 16)
    row = measured.to_frame().query("site == 'embedding.sum'").iloc[0]
    tables = 3 if config is BERT else 2
    assert row["variance_stderr"] < 0.03 * row["variance"]
    assert abs(row["variance"] - tables * 0.02**2) < 4 * row["variance_stderr"]


@CONFIGS
def test_the_module_is_left_as_it_was(config):
    module = build_module(config, seed=1).eval()
    state = torch.random.get_rng_state()
    data = text_batch(config, seq_len=SEQ_LEN)
    measured_by.measure(module, data)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert not any(p._forward_hooks or p._forward_pre_hooks for p in module.modules())


def test_seeds_redraw_dropout_or_weights():
    data = text_batch(GPT2, seq_len=SEQ_LEN)
    module = build_module(GPT2, seed=5)
    fixed = measured_by.measure(module, data, seeds=3)
    fresh = measured_by.measure(lambda seed: build_module(GPT2, seed), data, seeds=3)
    again = measured_by.measure(lambda seed: build_module(GPT2, seed), data, seeds=3)
    assert fresh.to_json() == again.to_json()
    # Dropout leaves the tables alone; new weights do not.
    sums = [m.to_frame().query("site == 'embedding.sum'").iloc[0] for m in (fixed, fresh)]
    assert sums[0]["variance_stderr"] < 1e-9 * sums[0]["variance"]
    assert sums[1]["variance_stderr"] > 1e-4 * sums[1]["variance"]
    assert len(set(fixed.samples["variance"][:, 2])) == 3


def test_a_causal_head_predicts_the_next_token_by_default():
    ids = text_batch(GPT2, seq_len=SEQ_LEN)["input_ids"]
    module = build_module(GPT2)
    default = measured_by.measure(module, ids)
    given = measured_by.measure(module, {"input_ids": ids, "labels": ids})
    assert default.to_json() == given.to_json()
    assert default.token_grad_variance[2, -1] == 0


def test_a_bare_module_gets_a_white_gradient():
    module = build_module(BERT).bert
    ids = text_batch(BERT, seq_len=SEQ_LEN)["input_ids"]
    measured = measured_by.measure(module, {"input_ids": ids})
    assert measured.loss is None
    # 2 x 16 x 64 draws of variance 1
    assert abs(measured.grad_variance[-1] - 1) < 5 * np.sqrt(2 / (2 * SEQ_LEN * 64))


def test_padding_counts_nowhere():
    module = without_dropout(build_module(GPT2))
    ids = text_batch(GPT2, seq_len=SEQ_LEN, batch=1)["input_ids"]
    short = measured_by.measure(module, ids[:, :10])
    mask = (np.arange(SEQ_LEN) < 10).astype(int)[None]
    labels = np.where(mask, ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    padded = measured_by.measure(module, batch)
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(getattr(padded, name), getattr(short, name), rtol=1e-4)
    assert not padded.token_variance[:, 10:].any()


def test_padding_of_an_encoder_and_its_decoder():
    """Each stack's moments leave its own padding out; labels are the decoder's inputs, shifted."""
    module = without_dropout(build_module(T5))
    ids = text_batch(T5, seq_len=SEQ_LEN, batch=1)
    short = measured_by.measure(
        module, {"input_ids": ids["input_ids"][:, :10], "labels": ids["labels"][:, :6]}
    )
    read, made = ((np.arange(SEQ_LEN) < n).astype(int)[None] for n in (10, 6))
    padded = measured_by.measure(
        module,
        {
            "input_ids": ids["input_ids"],
            "attention_mask": read,
            "decoder_attention_mask": made,
            "labels": np.where(made, ids["labels"], -100),
        },
    )
    for found, wanted in ((padded, short), (padded.encoder, short.encoder)):
        for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
            np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-4)
    assert not padded.token_variance[:, 6:].any()
    assert padded.encoder.token_variance[:, 9].all()
    assert not padded.encoder.token_variance[:, 10:].any()


def seq2seq(name, seed=0):
    """A small BART, mBART, Pegasus or Whisper, without dropout, and what it reads."""
    sizes = {"d_model": 32, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2, "decoder_start_token_id": 1, "init_std": 0.2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 64, f"{side}_attention_heads": 4}
    drops = ("dropout", "attention_dropout", "activation_dropout")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (2, SEQ_LEN), generator=generator)
    if name == "Whisper":
        sizes |= {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
        read = {"input_features": torch.randn(2, 8, 24, generator=generator)}
    else:
        sizes |= {"max_position_embeddings": 32}
        read = {"input_ids": ids}
    config = getattr(transformers, f"{name}Config")(**sizes, **dict.fromkeys(drops, 0.0))
    torch.manual_seed(seed)
    module = getattr(transformers, f"{name}ForConditionalGeneration")(config).train()
    return module, read | {"labels": ids}


@pytest.mark.parametrize(
    ("name", "pre"), [("Bart", 0), ("MBart", 1), ("Pegasus", 1), ("Whisper", 1)]
)
def test_encoders_with_decoders_whose_configs_are_not_read(name, pre):
    """Both streams are the hidden states that the module gives, every parameter has a gradient's
    norm, and what a block adds stands between its sums."""
    module, batch = seq2seq(name)
    caught, handles, parts = {}, [], dict(module.named_modules())
    for point in hook_points(module):
        key = (point.layer, point.site)
        assert key not in caught
        caught[key] = None

        def keep(_, value, key=key):
            caught[key] = (value[0] if isinstance(value, tuple) else value).detach()

        def enter(_, given, kwargs, key=key):
            caught[key] = (given[0] if given else next(iter(kwargs.values()))).detach()

        owner = parts[point.path]
        if point.side == "input":
            handles.append(owner.register_forward_pre_hook(enter, with_kwargs=True))
        else:
            handles.append(owner.register_forward_hook(lambda m, _, out, k=keep: k(m, out)))
    output = module(**batch, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for prefix, states in (
        ("", output.decoder_hidden_states),
        ("encoder.", output.encoder_hidden_states),
    ):
        states = [state.detach() for state in states]
        assert len(states) == 3
        for n in (0, 1) if pre else (0, 1, 2):  # the last of a Pre-LN stack is behind its norm
            torch.testing.assert_close(caught[n, f"{prefix}stream"], states[n])
        if pre:
            torch.testing.assert_close(caught[3, f"{prefix}final.norm"], states[2])
        for layer in (1, 2):
            x = caught[layer - 1, f"{prefix}stream"]
            for block in ("attention", "ffn") if prefix else ("attention", "cross", "ffn"):
                added = "ffn.out" if block == "ffn" else f"{block}.projection"
                x = x + caught[layer, prefix + added].reshape(x.shape)
                torch.testing.assert_close(caught[layer, f"{prefix}{block}.sum"], x)
                x = x if pre else caught[layer, f"{prefix}{block}.norm"]
            torch.testing.assert_close(caught[layer, f"{prefix}stream"], x)
    measured = measured_by.measure(module, batch)
    assert measured.loss == pytest.approx(float(output.loss.detach()), rel=1e-5)
    squares = float(caught[1, "stream"].square().mean())
    assert measured.variance[1] == pytest.approx(squares, rel=1e-5)
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.loss, learned, allow_unused=True)
    total = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    rows = [*measured.weight_gradient_rows, *measured.encoder.weight_gradient_rows]
    assert sum(row["squared_norm"] for row in rows) == pytest.approx(total, rel=1e-4)
    named = {row["weight"] for row in rows}
    assert {"query", "cross_key", "cross.norm.gain", "ffn_out", "token"} <= named


def test_a_poolers_norm_is_no_final_norm():
    """BEiT has an identity behind its layers and a norm of the pooled vector."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "out_indices": [1, 2]}
    module = transformers.BeitForImageClassification(transformers.BeitConfig(**sizes))
    assert "final.norm" not in {point.site for point in hook_points(module)}
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    measured = measured_by.measure(module, batch)
    assert measured.layers == 2
    assert np.isfinite(measured.grad_variance).all()
    points = {point.site: point.path for point in hook_points(build_module(VIT))}
    assert points["final.norm"] == "vit.layernorm"


def test_pictures_are_natural_in_their_spectrum():
    """Power over 1/f^2: neighbouring pixels agree, the mean is 0 and the variance 1."""
    batch = image_batch(VIT, batch=64, seed=2)
    pixels = batch["pixel_values"]
    assert pixels.shape == (64, 3, 32, 32)
    np.testing.assert_allclose(pixels.mean((2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(pixels.var((2, 3)), 1, rtol=1e-4)
    power = (np.abs(np.fft.fft2(pixels)) ** 2).mean((0, 1))
    # Frequencies 1 and 4 along one axis: 16 times less power; 192 fields of a chi-square of 2.
    assert power[0, 1] / power[0, 4] == pytest.approx(16, rel=4 * np.sqrt(2 / 192))
    assert set(batch["labels"]) == {0, 1}


def encoder(norm_first, batch_first=True):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        32, 2, 64, 0.0, batch_first=batch_first, norm_first=norm_first
    )
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_encoder(norm_first):
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    module = encoder(norm_first)

    def squared(output, batch):
        assert batch.shape == (2, 7, 32) or batch.shape == (7, 2, 32)
        return output.pow(3).sum()  # a norm has fixed the sum of the squares

    measured = measured_by.measure(module, x, loss=squared)
    leaf = x.clone().requires_grad_()
    module.train()
    (3 * module(leaf).pow(3).sum()).backward()
    assert measured.grad_variance[0] == pytest.approx(
        float(leaf.grad.square().mean()) / 9, rel=1e-5
    )
    assert measured.variance[0] == pytest.approx(float(x.square().mean()), rel=1e-6)
    sites = set(measured.to_frame().query("layer == 1")["site"])
    assert sites == LAYER_SITES - {"attention.heads"}
    rows = measured.to_frame().set_index(["layer", "site"])["variance"]
    layer, normed = module.layers[0], module.layers[0].norm1(x) if norm_first else x
    middle = x + layer.self_attn(normed, normed, normed)[0]
    assert rows[1, "attention.sum"] == pytest.approx(
        float(middle.detach().square().mean()), rel=1e-5
    )
    first = x if norm_first else middle
    assert rows[1, "attention.norm"] == pytest.approx(
        float(layer.norm1(first).detach().square().mean()), rel=1e-5
    )
    inner = layer.linear1(layer.norm2(middle) if norm_first else layer.norm1(middle)).detach()
    assert rows[1, "ffn.in"] == pytest.approx(float(inner.square().mean()), rel=1e-5)
    assert rows[1, "ffn.activation"] == pytest.approx(
        float(inner.relu().var(correction=0)), rel=1e-5
    )

    norms = measured.weight_gradients()
    value = norms[(norms["layer"] == 2) & (norms["weight"] == "value")]["squared_norm"].item()
    expected = float(module.layers[1].self_attn.in_proj_weight.grad[64:].square().sum()) / 9
    assert value == pytest.approx(expected, rel=1e-4)

    turned = encoder(norm_first, batch_first=False)
    other = measured_by.measure(turned, x.transpose(0, 1), loss=squared)
    np.testing.assert_allclose(other.grad_variance, measured.grad_variance, rtol=1e-5)
    np.testing.assert_allclose(other.token_variance, measured.token_variance, rtol=1e-5)
    assert (other.batch, other.seq_len) == (2, 7)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


def test_hook_points_of_a_module_without_storage():
    with torch.device("meta"):
        bare = build_module(GPT2)
    assert hook_points(bare) == hook_points(build_module(GPT2))


def test_hook_points_have_paths():
    points = hook_points(build_module(GPT2))
    assert (2, "ffn.in", "transformer.h.1.mlp.c_fc", "output") in points


@pytest.mark.parametrize("kept", ["nothing", "all but the tables", "one matrix"])
def test_gradients_pass_what_is_frozen(kept: str) -> None:
    whole = measured_by.measure(build_module(GPT2), IDS)
    module = build_module(GPT2)
    for name, parameter in module.named_parameters():
        learns = {"all but the tables": ".h." in name, "one matrix": "h.1.mlp.c_fc.weight" in name}
        parameter.requires_grad_(learns.get(kept, False))
    before = [p.requires_grad for p in module.parameters()]
    found = measured_by.measure(module, IDS)
    np.testing.assert_allclose(found.grad_variance, whole.grad_variance, rtol=1e-6)
    assert [p.requires_grad for p in module.parameters()] == before
    names = ["parameter", "layer", "weight"]
    rows, every = (m.weight_gradients().set_index(names) for m in (found, whole))
    learning = {n for n, p in module.named_parameters() if p.requires_grad}
    assert {name for name, *_ in rows.index} == learning
    norms = every.loc[rows.index, "squared_norm"]
    given = rows["squared_norm"].to_numpy(float)
    np.testing.assert_allclose(given, norms.to_numpy(float), rtol=1e-6, atol=1e-12)


def cut():
    """Whose first layer is run without gradients."""
    module = build_module(GPT2)
    layer = module.transformer.h[0]
    layer.forward = torch.no_grad()(layer.forward)
    return module


IDS = np.full((1, 8), 7)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: measured_by.measure(Plain(), torch.ones(1, 2, 4)), MomentsError, "no attention"),
        (lambda: measured_by.measure(cut(), IDS), MomentsError, "no gradient reaches"),
        (lambda: measured_by.measure(build_module(BERT), IDS), DomainError, "labels"),
        (lambda: measured_by.measure(build_module(T5), IDS), DomainError, "module_batch"),
        (lambda: text_batch(VIT, seq_len=8), DomainError, "image_batch"),
        (lambda: image_batch(BERT), DomainError, "text_batch"),
        (lambda: module_batch(BERT), DomainError, "seq_len"),
        (lambda: measured_by.measure(build_module(GPT2), "text"), DomainError, "batch"),
        (lambda: measured_by.measure(3, IDS), DomainError, "module"),
        (lambda: measured_by.measure(lambda seed: 3, IDS), DomainError, "module"),
        (lambda: measured_by.measure(Plain(), IDS, seeds=0), DomainError, "seeds"),
        (lambda: build_module({"model_type": "abacus"}), DomainError, "model_type"),
        (lambda: build_module(GPT2, layers=0), DomainError, "layers"),
        (
            lambda: measured_by.measure(build_module(GPT2), IDS, loss=lambda y, _: y.logits),
            DomainError,
            "loss",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_depth_and_seed_of_a_built_module():
    module = build_module(GPT2, seed=4, layers=3)
    assert len(module.transformer.h) == 3
    again = build_module(GPT2, seed=4, layers=3)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    # GPT-2's residual projections: variance 0.02^2 / (2 layers), 64 x 64 entries.
    variance = float(module.transformer.h[0].attn.c_proj.weight.detach().var())
    assert variance == pytest.approx(0.02**2 / 6, rel=5 * np.sqrt(2 / 4096))
