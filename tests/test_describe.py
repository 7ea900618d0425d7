"""Real modules read back as declarations."""

from __future__ import annotations

import json
import math
import warnings

import nano_gpt
import numpy as np
import pytest

import moments
from moments import DomainError, MomentsError, ValidityWarning

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.torch import audit, describe, initialize, weight_statistics  # noqa: E402
from moments.torch.anatomy import anatomy_of  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402
from moments.torch.assumptions import WeightStatistics  # noqa: E402
from moments.torch.entries import EntryMoments  # noqa: E402

WIDTH = 64


def encoder(norm_first=True):
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, norm_first=norm_first, batch_first=True)
    norm = torch.nn.LayerNorm(WIDTH) if norm_first else None
    return torch.nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=WIDTH,
        n_head=4,
        vocab_size=101,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def t5(**changes):
    config = transformers.T5Config(
        **changes,
        num_layers=2,
        d_model=WIDTH,
        d_kv=16,
        num_heads=4,
        d_ff=96,
        vocab_size=101,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("norm_first", [True, False])
def test_what_was_written_is_read_back(norm_first):
    module = encoder(norm_first)
    plan = architecture_of(module).replace(
        weights=moments.Weights([1e-2, 2e-2, 3e-2], 4e-2, 5e-2, 6e-2, 7e-2, 8e-2),
        skip_scale=[0.9, 0.8, 0.7],
        branch_scale=[(0.3, 0.4), (0.5, 0.6), (0.7, 0.8)],
        layernorm_scaling=True,
    )
    # Rows of orthogonal matrices have one length: variances come out exactly.
    initialize(module, plan, distribution="orthogonal")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ValidityWarning)
        found = describe(module).model
    assert found.norm == plan.norm
    assert found.layernorm_scaling is True
    np.testing.assert_allclose(found.skip_scales, plan.skip_scales, rtol=1e-5)
    np.testing.assert_allclose(found.branch_scales, plan.branch_scales, rtol=1e-5)
    for n in (1, 2, 3):
        for name in ("query", "key", "value", "output", "ffn_in", "ffn_out"):
            written = getattr(plan.layer_weights(n), name)
            assert getattr(found.layer_weights(n), name) == pytest.approx(written, rel=1e-4)
    assert found.norm_gain == 1
    assert (found.biases.query, found.biases.output) == (0.0, 0.0)
    np.testing.assert_allclose(found.biases.ffn_in, plan.biases.ffn_in, rtol=0.4)
    assert found.activation_dropout == found.ffn_dropout == 0.1


def test_measured_variances_are_mean_squares():
    torch.manual_seed(0)
    module = gpt2()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.01 * torch.randn_like(p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        found = describe(module).model
    block = module.transformer.h[1]
    value = block.attn.c_attn.weight.detach().double()[:, 2 * WIDTH :]
    assert found.layer_weights(2).value == pytest.approx(float(value.square().mean()), rel=1e-6)
    gain = block.ln_2.weight.detach().double().square().mean()
    assert found.norm_gains[1, 1] ** 2 == pytest.approx(float(gain), rel=1e-6)
    bias = block.mlp.c_fc.bias.detach().double().square().mean()
    assert found.biases.layer(2)["ffn_in"] == pytest.approx(float(bias), rel=1e-6)
    wte = module.transformer.wte.weight.detach().double().square().mean()
    assert found.embedding.token_variance == pytest.approx(float(wte), rel=1e-6)
    assert found.causal


def test_both_stacks_of_an_encoder_and_decoder():
    module = t5()
    block = module.encoder.block[1].layer[1].DenseReluDense.wi
    with torch.no_grad():
        block.weight.mul_(3)
    found = describe(module).model
    expected = float(block.weight.detach().double().square().mean())
    assert found.encoder.layer_weights(2).ffn_in == pytest.approx(expected, rel=1e-6)
    assert found.layer_weights(2).ffn_in < 0.3 * expected
    cross = module.decoder.block[0].layer[1].EncDecAttention.v.weight.detach().double()
    assert found.layer_weights(1).cross_value == pytest.approx(
        float(cross.square().mean()), rel=1e-6
    )


def test_gains_of_final_norms_are_read_back():
    """T5 draws them at its initializer_factor, in both stacks."""
    module = t5(initializer_factor=0.5)
    with torch.no_grad():
        module.decoder.final_layer_norm.weight.mul_(3)
    declared = moments.from_huggingface(module.config)
    assert not audit(module, declared).passed
    assert audit(t5(initializer_factor=0.5), declared).passed
    found = describe(module).model
    assert found.head.norm_gain == pytest.approx(1.5)
    assert found.encoder.head.norm_gain == pytest.approx(0.5)
    initialize(module, declared, seed=1)
    assert float(module.decoder.final_layer_norm.weight.detach().mean()) == pytest.approx(0.5)
    assert "gain 0.5" in str(declared)


def test_a_description_predicts():
    """What the module shows on a text, whose draws of the weights are the one it has."""
    torch.manual_seed(0)
    module = gpt2()
    found = describe(module).model
    ids = np.random.default_rng(0).integers(3, 101, (8, 16))
    p = moments.predict(found, token_ids=ids)
    seen = moments.torch.measure(module, {"input_ids": torch.tensor(ids)}, seeds=2)
    np.testing.assert_allclose(p.variance, seen.variance, rtol=0.05)
    np.testing.assert_allclose(p.grad_variance, seen.grad_variance, rtol=0.1)
    assert p.loss == pytest.approx(seen.loss, rel=0.01)


# --- broken assumptions ---------------------------------------------------------------------------


def noted(module):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        describe(module)
    return [str(w.message) for w in caught if w.category is ValidityWarning]


def test_a_check_before_it_changes_no_description():
    module = nano_gpt.GPT(nano_gpt.Config(n_layer=2, dropout=0.0))
    alone = describe(module).model
    moments.check(module, torch.arange(12)[None])
    assert describe(module).model == alone
    assert alone.seq_len == 24


def test_fresh_weights_break_nothing():
    for seed in range(5):
        torch.manual_seed(seed)
        assert noted(gpt2()) == []


def test_broken_assumptions_are_named_with_numbers():
    torch.manual_seed(0)
    module = gpt2()
    first, second = module.transformer.h
    u, v = torch.randn(WIDTH), torch.randn(WIDTH)
    with torch.no_grad():
        first.attn.c_proj.weight.add_(0.01 * torch.outer(u, v))
        second.mlp.c_fc.weight.add_(0.01)
        heavy = second.mlp.c_proj.weight
        heavy.mul_(1 + 9 * (torch.rand_like(heavy) < 0.01))
        second.ln_1.weight.mul_(1 + 0.5 * torch.rand(WIDTH))
        query, key, _ = first.attn.c_attn.weight.split(WIDTH, dim=1)
        key.copy_((query + key) / math.sqrt(2))
    messages = noted(module)
    kinds = {
        "output: the largest squared singular value is": "stable rank",
        "ffn_in: entries have a mean of": "mlp.c_fc",
        "ffn_out: heavy tails, kurtosis": "against a normal's 3",
        "norm gains differ between features": "ln_1",
        "query and key are not independent: their entries correlate by 0.7": "layer 1",
    }
    for start, part in kinds.items():
        assert any(m.startswith(start) and part in m for m in messages), (start, messages)
    frame = weight_statistics(module)
    row = frame[(frame["role"] == "output") & (frame["layer"] == 1)].iloc[0]
    w = first.attn.c_proj.weight.detach().double()
    top = float(torch.linalg.matrix_norm(w, 2)) ** 2
    assert row["stable_rank"] == pytest.approx(float(w.square().sum()) / top, rel=1e-3)
    assert row["spectral"] == pytest.approx(top / (4 * WIDTH * row["variance"]), rel=1e-3)


def test_the_spectral_edge_of_independent_entries():
    """Largest squared singular values of Gaussian matrices: about the edge, within the scale."""
    generator = torch.Generator().manual_seed(1)
    role = anatomy_of(gpt2()).roles.named("ffn_in")[0]
    deviations = []
    for _ in range(40):
        block = torch.randn((40, 100), generator=generator)
        s = WeightStatistics.of(role, block, EntryMoments.of(block))
        deviations.append((s.spectral - 1) / s.spectral_error)
    # The Tracy-Widom law of real matrices has mean -1.21 and deviation 1.27.
    assert abs(np.mean(deviations) + 1.21) < 5 * 1.27 / math.sqrt(40)
    assert max(deviations) < 6


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints(tmp_path):
    torch.manual_seed(0)
    module = gpt2()
    module.save_pretrained(tmp_path)
    found = describe(module).model
    assert describe(tmp_path).model == found
    assert describe(str(tmp_path / "model.safetensors")).model == found
    module.transformer.save_pretrained(tmp_path / "bare")
    assert describe(tmp_path / "bare").model == found


def test_checkpoints_that_cannot_be_read(tmp_path):
    with pytest.raises(DomainError, match="checkpoint"):
        describe(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(DomainError, match="model_type"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    (tmp_path / "broken.safetensors").write_bytes(b"no such thing")
    with pytest.raises(DomainError, match="safetensors"):
        describe(tmp_path / "broken.safetensors")
    with pytest.raises(DomainError, match="module"):
        describe(3)
    with pytest.raises(MomentsError, match="no attention on a residual"):
        describe(torch.nn.Linear(2, 2))


def test_missing_parameters_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    gpt2().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["transformer.h.1.mlp.c_fc.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(ValidityWarning, match="1 parameters are not in the checkpoint"):
        describe(tmp_path)


def test_checkpoints_choose_no_format_and_no_code(tmp_path):
    """Only safetensors files of the folder itself, and only a class of the config's own family."""
    module = gpt2()
    module.save_pretrained(tmp_path / "good")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(module.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_text(json.dumps(config))
    with pytest.raises(DomainError, match=r"a folder with model.safetensors or its index"):
        describe(pickled)
    index = pickled / "model.safetensors.index.json"
    for outside in ("../good/model.safetensors", str(tmp_path / "good" / "model.safetensors"), 3):
        index.write_text(json.dumps({"weight_map": {"x": outside}}))
        with pytest.raises(DomainError, match="the name of a file in the folder of the index"):
            describe(pickled)
    chosen = {"architectures": ["pipeline", "BertModel", "GPT2LMHeadModel"]}
    evil = {"attn_implementation": "evil/kernel", "auto_map": {"AutoModel": "evil--evil.Evil"}}
    (tmp_path / "good" / "config.json").write_text(json.dumps(config | chosen | evil))
    assert describe(tmp_path / "good").model == describe(module).model


def test_shards_are_read(tmp_path):
    module = gpt2()
    module.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert describe(tmp_path).model == describe(module).model


def test_only_the_architecture_reaches_transformers():
    from moments.model.huggingface.sizes import sized_config
    from moments.torch.huggingface_modules import settings_of

    config = sized_config("gpt2", 2, 16, heads=4)
    elsewhere = {
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "evil/kernel",
        "auto_map": {"AutoModel": "evil--evil.Evil"},
        "quantization_config": {"quant_method": "evil"},
        "torch_dtype": "float16",
        "dtype": "float16",
        "use_kernels": True,
        "name_or_path": "evil/evil",
    }
    assert settings_of(config | elsewhere)[1].to_dict() == settings_of(config)[1].to_dict()
    shaping = {"scale_attn_weights": False, "n_inner": 24, "resid_pdrop": 0.3}
    _, settings = settings_of(config | shaping)
    assert {name: getattr(settings, name) for name in shaping} == shaping
    with pytest.raises(DomainError, match="n_layer = '2': must be an integer"):
        settings_of(config | {"n_layer": "2"})
