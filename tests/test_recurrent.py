"""Recurrent mixers and short convolutions: laws against modules of transformers and torch twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moments
from moments import (
    RGLRU,
    Absent,
    DomainError,
    GatedDeltaNet,
    LinearAttention,
    Mamba,
    Mamba2,
    ParallelMixer,
    ShortConvolution,
)
from moments.engine.derivative import pullback
from moments.layers.recurrent import Mixer
from moments.layers.recurrent.drawn import OF_SECTION, DrawnHeads
from moments.layers.recurrent.exact import GatedConvolution, LinearHeads
from moments.layers.recurrent.leaf import Inward
from moments.layers.recurrent.mixers import HEADS
from moments.model.mixers import lightning_decays, retnet_decays

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.simulation.network import BLOCK_TWINS, LayerTwin  # noqa: E402
from moments.simulation.parameters import draw_weights  # noqa: E402

D_MODEL, LENGTH = 48, 12
VARIANCE = 1 / D_MODEL

MIXERS: dict[str, Any] = {
    "convolution": ShortConvolution(bias=True),
    "linear": LinearAttention(3, 8, 10),
    "retention": LinearAttention(2, 8, 10, decays=retnet_decays(2), norm="head", norm_epsilon=0.1),
    "lightning": LinearAttention(
        3, 8, 8, lightning_decays(3, 1, 4), "silu", 1.0, "all", 0.1, "sigmoid", 0.02
    ),
    "gated linear": LinearAttention(
        2, 8, 10, norm="head", norm_epsilon=0.1, decay_gate="channel", decay_variance=VARIANCE
    ),
    "gated heads": LinearAttention(2, 8, 10, decay_gate="head", decay_variance=VARIANCE),
    "mamba2": Mamba2(
        4, 8, 6, gate_variance=VARIANCE, step_variance=VARIANCE, groups=2, steps=(0.1, 1.0)
    ),
    "norm first": Mamba2(4, 8, 6, VARIANCE, VARIANCE, norm_before_gate=True, tap_bias=False),
    "no norm": Mamba2(4, 8, 6, VARIANCE, VARIANCE, norm=False, rates=(1.0, 4.0)),
    "delta": GatedDeltaNet(
        2, 4, 8, 8, VARIANCE, VARIANCE, VARIANCE, rates=(0.1, 2.0), norm_epsilon=2e-4
    ),
    "kimi": GatedDeltaNet(
        *(3, 3, 8, 8, VARIANCE, VARIANCE, VARIANCE),
        rates=(0.1, 2.0),
        norm_epsilon=2e-4,
        decay="channel",
        gate="sigmoid",
        rank=6,
        steps=(0.01, 0.5),
    ),
    "mamba": Mamba(64, 6, 5, VARIANCE, 0.2, 1 / 64, steps=(0.1, 1.0)),
    "jamba": Mamba(
        *(64, 6, 5, VARIANCE, 0.2, 1 / 64), inner_norm="affine", norm_epsilon=1e-3, steps=(0.1, 0.1)
    ),
    "rg_lru": RGLRU(60, 3, VARIANCE, 0.1, 0.1, tap_variance=0.2),
    "parallel": ParallelMixer(
        Mamba2(4, 8, 6, VARIANCE, VARIANCE, norm=False, multipliers=(0.7, 0.8, 1.2, 1.5, 0.4)),
        *(0.8, 0.6),
    ),
}
EACH = pytest.mark.parametrize("name", MIXERS)


def model_of(mixer: Any, **fields: Any) -> moments.Transformer:
    weights = moments.Weights(VARIANCE, VARIANCE, VARIANCE, VARIANCE, VARIANCE, VARIANCE)
    settings: dict[str, Any] = {"d_ff": D_MODEL, "causal": True, "normalization": "rmsnorm"}
    given = {"weights": weights, "mixer": mixer, **settings, **fields}
    return moments.Transformer(given.pop("layers", 2), D_MODEL, 3, LENGTH, **given)


def layer_of(model: moments.Transformer, seed: int = 0) -> LayerTwin:
    random = torch.Generator().manual_seed(seed)
    weights = draw_weights(model, 1, random, torch.float64)
    return LayerTwin(model, 1, weights, random, lambda x, _: x)


# --- what heads compute is what the twin computes, a token after the other ------------------------


@pytest.mark.parametrize("name", [name for name in MIXERS if type(MIXERS[name]) in HEADS])
def test_heads_are_those_of_the_twin_forward_and_back(name: str) -> None:
    block = MIXERS[name]
    layer = layer_of(model_of(block))
    width = block.shapes(layer.model)["output"][0]
    weights = layer.weights | {"output": torch.eye(width, dtype=torch.float64)}
    layer = LayerTwin(layer.model, 1, weights, layer.generator, lambda one, _: one)
    x = torch.randn(1, LENGTH, D_MODEL, dtype=torch.float64, requires_grad=True)
    whole = BLOCK_TWINS[type(block)](block, layer, x)
    received = torch.randn_like(whole)
    (sent,) = torch.autograd.grad((whole * received).sum(), x)

    head = HEADS[type(block)](block)
    tokens, arrays = x.detach().numpy(), {k: one.detach().numpy() for k, one in weights.items()}
    parts, values, back = width // head.features, [], np.zeros((LENGTH, D_MODEL))
    for part in range(parts):
        matrices = {k: arrays[k][:, columns(head, k, part, parts)] for k in head.sections}
        own = own_of(head, arrays, part, parts)
        for name, one in head.inner.items():
            width = arrays[name].shape[1] // one.fan_out
            at = slice(part % width * one.fan_out, (part % width + 1) * one.fan_out)
            own[name] = arrays[name][None, :, at]
        names = list(matrices)

        def run(*entering: Any, names: Any = names, own: Any = own) -> Any:
            return head(dict(zip(names, entering, strict=True)), own)

        value, pull = pullback(run, *(tokens @ one for one in matrices.values()))
        here = slice(part * head.features, (part + 1) * head.features)
        for key, one in zip(names, pull(received[..., here].numpy()), strict=True):
            back += one[0] @ matrices[key].T
        values.append(value[0])
    np.testing.assert_allclose(np.concatenate(values, -1), whole[0].detach().numpy(), atol=1e-10)
    np.testing.assert_allclose(back, sent[0].numpy(), atol=1e-9)


def columns(head: Any, key: str, part: int, parts: int) -> slice:
    """Of a matrix, those that a part of the mixer reads; parts may share those of keys."""
    drawn, rows = head.sections[key].drawn, head.sections[key].rows
    at = part * (rows // drawn) // parts
    return slice(at * drawn, (at + 1) * drawn)


def own_of(head: Any, arrays: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Parameters that multiply no input, of a part of the mixer."""
    found = {}
    for key in head.own(np.random.default_rng(0), 1):
        if key == "decay":
            each = len(head.block.decays) // parts
            found[key] = np.array(head.block.decays)[None, part * each : (part + 1) * each]
            continue
        first = key.partition(".")[0]
        first, whole = OF_SECTION.get(first, first), arrays[key]
        if first in head.sections:
            of = columns(head, first, part, parts)
        else:  # behind an inner matrix
            each = len(whole) // parts
            of = slice(part * each, (part + 1) * each)
        same = len(whole) == of.stop - of.start
        found[key] = whole[None] if same else whole[None, ..., of]
    return found


# --- the twin is the module -----------------------------------------------------------------------


def run_twin(block: Any, weights: dict[str, Any], x: Any) -> Any:
    made = {name: one.detach().to(torch.float64) for name, one in weights.items()}
    layer = LayerTwin(model_of(block), 1, made, torch.Generator(), lambda one, _: one)
    return BLOCK_TWINS[type(block)](block, layer, x)


def drawn_alike(module: Any) -> Any:
    """Every parameter of a module as Gaussian noise, in double precision."""
    module = module.double().eval()
    with torch.no_grad():
        for one in module.parameters():
            one.normal_(0.0, 0.3)
    return module


def check_module(block: Any, weights: dict[str, Any], run: Any) -> None:
    x = torch.randn(2, LENGTH, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(run_twin(block, weights, x), run(x), atol=1e-5, rtol=1e-4)


def test_the_twin_of_mamba2_is_the_module() -> None:
    sizes = {"num_heads": 4, "head_dim": 24, "state_size": 6, "n_groups": 2, "expand": 2}
    sizes |= {"hidden_size": D_MODEL, "num_hidden_layers": 1, "vocab_size": 8, "chunk_size": 4}
    config = transformers.Mamba2Config(pad_token_id=0, **sizes)
    module = drawn_alike(transformers.Mamba2Model(config).layers[0].mixer)
    names = "mixer_gate", "value", "key", "query", "mixer_step"
    weights = dict(zip(names, module.in_proj.weight.T.split([96, 96, 12, 12, 4], 1), strict=True))
    taps = module.conv1d.weight[:, 0].T.flip(0).split([96, 12, 12], 1)
    bias = module.conv1d.bias.split([96, 12, 12])
    for name, one, of in zip(("value", "key", "query"), taps, bias, strict=True):
        weights |= {f"{name}.taps": one, f"{name}.taps.bias": of}
    weights |= {"mixer_step.bias": module.dt_bias, "rate": module.A_log, "skip": module.D}
    weights |= {"mixer_norm.gain": module.norm.weight, "output": module.out_proj.weight.T}
    check_module(Mamba2(4, 24, 6, 1.0, 1.0, groups=2), weights, module)


def test_the_twin_of_kimis_delta_attention_is_the_module() -> None:
    kimi = transformers.models.kimi_linear.modeling_kimi_linear
    sizes = {"linear_head_dim": 6, "linear_num_heads": 3, "hidden_size": D_MODEL}
    config = transformers.KimiLinearConfig(num_hidden_layers=1, **sizes)
    module = drawn_alike(kimi.KimiLinearDeltaAttention(config, 0))
    names = {"query": module.q_proj, "key": module.k_proj, "value": module.v_proj}
    gate = module.forget_gate
    names |= {"mixer_step_down": gate.f_a_proj, "mixer_step": gate.f_b_proj}
    names |= {"mixer_gate_down": module.g_a_proj, "mixer_gate": module.g_b_proj}
    names |= {"mixer_rate": module.b_proj, "output": module.o_proj}
    weights = {name: one.weight.T for name, one in names.items()}
    taps = module.conv1d.weight[:, 0].T.flip(0).split([18] * 3, 1)
    weights |= {f"{name}.taps": one for name, one in zip(names, taps, strict=False)}
    weights |= {"mixer_step.bias": gate.dt_bias, "rate": gate.A_log.flatten()}
    weights["mixer_norm.gain"] = module.o_norm.weight
    fields = {"decay": "channel", "gate": "sigmoid", "rank": 6, "norm_epsilon": 1e-5}
    check_module(GatedDeltaNet(3, 3, 6, 6, 1.0, 1.0, 1.0, **fields), weights, module)


@pytest.mark.parametrize("kind", ["mamba", "jamba", "falcon_mamba"])
def test_the_twin_of_mamba_is_the_module(kind: str) -> None:
    sizes = {"hidden_size": D_MODEL, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0}
    sizes |= {"mamba_d_state": 5, "mamba_dt_rank": 3} if kind == "jamba" else {}
    sizes |= {"state_size": 5, "time_step_rank": 3} if kind != "jamba" else {"num_experts": 1}
    config = transformers.AutoConfig.for_model(kind, intermediate_size=8, **sizes)
    layer = transformers.AutoModel.from_config(config).layers[0]
    module = drawn_alike(layer.mamba if kind == "jamba" else layer.mixer)
    value, gate = module.in_proj.weight.T.chunk(2, 1)
    down, key, query = module.x_proj.weight.T.split([3, 5, 5], 1)
    weights = {"value": value, "mixer_gate": gate, "key": key, "query": query}
    weights |= {"mixer_step_down": down, "mixer_step": module.dt_proj.weight.T}
    weights |= {"mixer_step.bias": module.dt_proj.bias, "rate": module.A_log, "skip": module.D}
    taps = module.conv1d.weight[:, 0].T.flip(0)
    weights |= {"value.taps": taps, "value.taps.bias": module.conv1d.bias}
    norms = {"mixer_step_down": "dt", "key": "b", "query": "c"}
    if kind == "jamba":
        of_norm = {k: getattr(module, f"{name}_layernorm").weight for k, name in norms.items()}
        weights |= {f"{name}.norm.gain": gain for name, gain in of_norm.items()}
    inner = {"mamba": None, "jamba": "affine", "falcon_mamba": "plain"}[kind]
    weights["output"] = module.out_proj.weight.T
    check_module(Mamba(96, 5, 3, 1.0, 1.0, 1.0, inner_norm=inner), weights, module)


def test_the_twin_of_the_rg_lru_is_the_module() -> None:
    gemma = transformers.models.recurrent_gemma.modeling_recurrent_gemma
    sizes = {"hidden_size": D_MODEL, "lru_width": 60, "num_attention_heads": 3}
    config = transformers.RecurrentGemmaConfig(num_hidden_layers=1, **sizes)
    module = drawn_alike(gemma.RecurrentGemmaRecurrentBlock(config, 0))
    unit, weights = module.rg_lru, {}
    for name, one in (("value", module.linear_x), ("mixer_gate", module.linear_y)):
        weights |= {name: one.weight.T, f"{name}.bias": one.bias}
    for name, of in (("mixer_input", "input"), ("mixer_step", "recurrent")):
        matrix = getattr(unit, f"{of}_gate_weight")  # (blocks, in, out)
        weights[name] = matrix.transpose(0, 1).flatten(1)
        weights[f"{name}.bias"] = getattr(unit, f"{of}_gate_bias").flatten()
    taps = module.conv_1d.weight[:, 0].T.flip(0)
    weights |= {"value.taps": taps, "value.taps.bias": module.conv_1d.bias}
    weights |= {"rate": unit.recurrent_param, "output": module.linear_out.weight.T}
    weights["output.bias"] = module.linear_out.bias
    places = torch.arange(LENGTH)[None]
    block = RGLRU(60, 3, 1.0, 1.0, 1.0)
    check_module(block, weights, lambda x: module(x, places, None, use_cache=False)[0])


def test_the_twin_of_the_gated_delta_net_is_the_module() -> None:
    qwen = transformers.models.qwen3_next.modeling_qwen3_next
    sizes = {"linear_key_head_dim": 6, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    sizes |= {"linear_num_value_heads": 4, "hidden_size": D_MODEL, "num_hidden_layers": 1}
    module = drawn_alike(qwen.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**sizes), 0))
    by_head = module.in_proj_qkvz.weight.T.unflatten(1, (2, -1)).split([6, 6, 16, 16], -1)
    names = "query", "key", "value", "mixer_gate"
    weights = {name: one.flatten(1) for name, one in zip(names, by_head, strict=True)}
    rate, step = module.in_proj_ba.weight.T.unflatten(1, (2, -1)).split([2, 2], -1)
    weights |= {"mixer_rate": rate.flatten(1), "mixer_step": step.flatten(1)}
    taps = module.conv1d.weight[:, 0].T.flip(0).split([12, 12, 32], 1)
    weights |= {f"{name}.taps": one for name, one in zip(names, taps, strict=False)}
    weights |= {"mixer_step.bias": module.dt_bias, "rate": module.A_log}
    weights |= {"mixer_norm.gain": module.norm.weight, "output": module.out_proj.weight.T}
    check_module(GatedDeltaNet(2, 4, 6, 8, 1.0, 1.0, 1.0), weights, module)


def test_the_twin_of_the_gated_convolution_is_the_module() -> None:
    lfm2 = transformers.models.lfm2.modeling_lfm2
    config = transformers.Lfm2Config(hidden_size=D_MODEL, num_hidden_layers=1)
    module = drawn_alike(lfm2.Lfm2ShortConv(config, 0))
    names = "key", "query", "value"
    weights = dict(zip(names, module.in_proj.weight.T.chunk(3, 1), strict=True))
    weights["mixer.taps"] = module.conv.weight[:, 0].T.flip(0)
    weights["output"] = module.out_proj.weight.T
    check_module(ShortConvolution(), weights, module)


def test_the_twin_of_lightning_attention_is_the_module() -> None:
    minimax = transformers.models.minimax.modeling_minimax
    sizes = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = transformers.MiniMaxConfig(head_dim=12, **sizes)
    module = drawn_alike(minimax.MiniMaxLightningAttention(config, 1))
    by_head = module.qkv_proj.weight.T.unflatten(1, (4, -1)).chunk(3, -1)
    names = "query", "key", "value"
    weights = {name: one.flatten(1) for name, one in zip(names, by_head, strict=True)}
    weights["mixer_gate"] = module.output_gate.weight.T
    weights |= {"mixer_norm.gain": module.norm.weight, "output": module.out_proj.weight.T}
    decays = lightning_decays(4, 1, 3)
    block = LinearAttention(4, 12, 12, decays, "silu", 1.0, "all", 1e-6, "sigmoid")
    check_module(block, weights, lambda x: module(x, (None, None), None)[0])


# --- laws -----------------------------------------------------------------------------------------


def gains_of(block: Any, variance: float) -> dict[str, float]:
    return dict.fromkeys(set(block.shapes(model_of(block))) - {"output"}, variance)


def kernel_of(length: int) -> Any:
    """Tokens that share most with those near them."""
    lag = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    return 0.2 + 0.5 * np.exp(-lag / 3.0) + 0.3 * np.eye(length)


@pytest.mark.parametrize("feature_map", ["identity", "silu"])
def test_linear_attention_in_closed_form_is_the_mean_over_draws(feature_map: str) -> None:
    """Own moments and pairs, forward and each path back."""
    block = LinearAttention(2, 5, 7, (0.9, 0.6), feature_map, gate="sigmoid", gate_variance=0.1)
    kernel, received, gains = kernel_of(6), kernel_of(6)[::-1, ::-1].copy(), gains_of(block, 1.3)
    closed = LinearHeads(block, kernel, gains, 1)
    drawn = DrawnHeads(HEADS[LinearAttention](block), kernel, gains, draws=30_000)
    pairs = [(closed.forward(), drawn.forward())]
    back, expected = drawn.backward(received), closed.backward(received)
    pairs += [(expected.kernels[name], back.kernels[name]) for name in gains]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0.04, atol=0.03 * one.max())


def test_the_gated_convolution_in_closed_form_is_the_mean_over_draws() -> None:
    block, length, width, draws = ShortConvolution(), 6, 64, 1500
    kernel, received = kernel_of(length), 0.3 + 0.7 * np.eye(length)
    gains = {"query": 0.8, "key": 1.5, "value": 1.1}
    law = GatedConvolution(block, width, kernel, gains, 1)
    rng = np.random.default_rng(0)

    def drawn(of: Any, gain: float = 1.0) -> Any:
        root = np.linalg.cholesky(gain * of)
        found = torch.tensor(root @ rng.standard_normal((draws, length, width)))
        return found.requires_grad_()

    query, key, value = (drawn(kernel, gains[name]) for name in ("query", "key", "value"))
    taps = torch.tensor(rng.standard_normal((draws, 3, width)) * block.tap_variance**0.5)
    taps.requires_grad_()
    padded = torch.nn.functional.pad(key * value, (0, 0, 2, 0))
    mixed = sum(taps[:, a, None] * padded[:, 2 - a : 2 - a + length] for a in range(3))
    out = query * mixed
    sent = torch.autograd.grad((out * drawn(received)).sum(), (query, key, value, taps))
    back = law.backward(received)

    def gram(x: Any) -> Any:
        return (x @ x.mT).mean(0).detach().numpy() / width

    pairs = [(law.forward(), gram(out))]
    names = "query", "key", "value"
    pairs += [(back.kernels[k], gram(one)) for k, one in zip(names, sent[:3], strict=True)]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0.04, atol=0.02 * one.max())
    of_taps = float((sent[3] ** 2).sum()) / draws
    assert back.own["mixer.taps"] == pytest.approx(of_taps, rel=0.03)


def test_several_sequences_do_not_mix() -> None:
    """Two of one kernel: each as it is alone."""
    for name in ("convolution", "linear", "delta", "mamba2"):
        block, length = MIXERS[name], 5
        gains, alone = gains_of(block, 1.0), kernel_of(length)
        both = np.kron(np.eye(2), alone)
        one, two = (laws_of(block, kernel, gains, n) for kernel, n in ((alone, 1), (both, 2)))
        for law, reach in ((one, length), (two, 2 * length)):
            found = law.forward()
            assert found.shape == (reach, reach)
        across = two.forward()[:length, length:]
        own = one.forward().max()
        tolerance = 1e-12 if name in ("convolution", "linear") else 0.15 * own
        means = 0.0 if name != "mamba2" else across.mean()
        np.testing.assert_allclose(across - means, 0.0, atol=tolerance)


def laws_of(block: Any, kernel: Any, gains: dict[str, float], sequences: int) -> Any:
    width = block.shapes(model_of(block))["output"][0]
    inward = tuple(Inward(name, 1, 1, gains[name], 1.0) for name in gains)
    return Mixer("", block, 1, inward, width, sequences=sequences)._law(kernel)


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize(
    "name",
    ["convolution", "lightning", "mamba2", "delta", "kimi", "mamba", "jamba", "rg_lru", "parallel"],
)
def test_predictions_hold_in_the_twin(name: str) -> None:
    """Two layers of width 48: variances within 5 %, gradients within 10 %, beyond two errors."""
    model = model_of(MIXERS[name])
    given = {"variance": 1.0, "correlation": 0.3, "grad_variance": 1.0, "grad_correlation": 0.1}
    p = moments.predict(model, **given)
    m = moments.simulate(model, **given, seeds=24, batch=4)
    for quantity, bound in (("variance", 0.05), ("grad_variance", 0.1)):
        found, true = getattr(p, quantity), getattr(m, quantity)
        error = 2 * getattr(m, f"{quantity}_stderr")
        assert np.all(np.abs(found - true) < bound * true + error), quantity
    for quantity in ("correlation", "grad_correlation"):
        error = 2 * getattr(m, f"{quantity}_stderr")
        gap = np.abs(getattr(p, quantity) - getattr(m, quantity))
        assert np.all(gap < 0.015 + error), quantity
    ours = p.weight_gradients().groupby("weight").squared_norm.sum()
    theirs = m.weight_gradients().groupby("weight")
    total, error = theirs.squared_norm.sum(), theirs.squared_norm_stderr.apply(np.linalg.norm)
    assert set(ours.index) == set(total.index)
    for weight in ours.index:
        gap = abs(ours[weight] - total[weight])
        assert gap < 0.1 * total[weight] + 3 * error[weight], weight


def test_declarations_go_through_json() -> None:
    model = model_of((MIXERS["mamba2"], None))
    assert moments.Transformer.from_dict(model.to_dict()) == model
    for block in MIXERS.values():
        one = model_of(block)
        assert moments.Transformer.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: ShortConvolution(kernel=0), "kernel"),
        (lambda: LinearAttention(2, 4, 4, decays=(0.5, 1.5)), "decays"),
        (lambda: LinearAttention(2, 4, 4, norm="both"), "norm"),
        (lambda: Mamba2(4, 8, 6, 1.0, 1.0, groups=3), "groups"),
        (lambda: Mamba2(4, 8, 6, 1.0, 1.0, steps=(0.1, 0.01)), "steps"),
        (lambda: GatedDeltaNet(3, 4, 8, 8, 1.0, 1.0, 1.0), "key_heads"),
        (lambda: GatedDeltaNet(2, 2, 8, 8, 1.0, 1.0, 1.0, decay="token"), "decay"),
        (lambda: Mamba(8, 4, 2, 1.0, 1.0, 1.0, rates=(1.0, 2.0)), "rates"),
        (lambda: Mamba2(4, 8, 6, 1.0, 1.0, multipliers=(1.0,)), "multipliers"),
        (lambda: RGLRU(60, 7, 1.0, 1.0, 1.0), "blocks"),
        (lambda: RGLRU(60, 3, 1.0, 1.0, 1.0, decays=(0.9, 1.0)), "decays"),
        (lambda: ParallelMixer(Absent()), "mixer"),
        (lambda: model_of(moments.LayerAttention(value_norm=True)), "qk_norm"),
        (lambda: model_of(ShortConvolution(), causal=False), "causal"),
        (lambda: moments.predict(model_of(ShortConvolution()), tokens=False), "tokens"),
        (lambda: moments.predict(model_of(ShortConvolution()).replace(seq_len=4096)), "seq_len"),
    ],
)
def test_bad_declarations_name_the_argument(make: Any, names: str) -> None:
    with pytest.raises(DomainError, match=names):
        make()


def test_absent_blocks_leave_no_trace() -> None:
    """A layer of a mixer alone, and one of a feed-forward block alone."""
    blocks = {"mixer": (MIXERS["convolution"], Absent()), "ffn": (Absent(), None)}
    model = model_of(**blocks)
    p = moments.predict(model, variance=1.0, correlation=0.3)
    m = moments.simulate(model, variance=1.0, correlation=0.3, seeds=12)
    assert np.all(np.abs(p.variance - m.variance) < 0.03 * m.variance + 2 * m.variance_stderr)
    ours, theirs = p.weight_gradients(), m.weight_gradients()
    pairs = [set(zip(one.layer, one.weight, strict=True)) for one in (ours, theirs)]
    assert pairs[0] == pairs[1]
    assert not any(w.startswith("ffn") for n, w in pairs[0] if n == 1)
    with pytest.raises(DomainError, match="both absent in layer 1"):
        model_of(Absent(), ffn=Absent())
    with pytest.raises(DomainError, match="norm"):
        model_of(Absent(), parallel=True)


def test_padding_is_refused() -> None:
    table = moments.Embedding(vocab_size=20, token_variance=1.0)
    model = model_of(ShortConvolution(), embedding=table)
    mask = np.array([[1] * 12, [0] * 4 + [1] * 8])
    with pytest.raises(DomainError, match="padded sequences"):
        moments.predict(model, token_ids=np.arange(24).reshape(2, 12) % 20, attention_mask=mask)


# --- what is said of a mixer's health -------------------------------------------------------------


def test_a_norm_below_its_epsilon_is_named() -> None:
    """Qwen3-Next at its own initialisation: what the norm divides is below its epsilon."""
    own = 4e-4  # of a standard deviation of 0.02
    block = GatedDeltaNet(1, 2, 128, 128, own, own, own, tap_variance=own)
    weights = moments.Weights.normal(own)
    with pytest.warns(moments.ValidityWarning):
        p = moments.predict(
            model_of(block, weights=weights, layers=1), variance=1.0, correlation=0.2
        )
    assert any("nearly dead" in note for note in p.warnings)
    assert any("own token" in note for note in p.warnings)


def test_a_mixer_in_order_says_nothing() -> None:
    p = moments.predict(model_of(MIXERS["mamba2"], layers=1), variance=1.0, correlation=0.2)
    assert p.warnings == ()


def test_a_norm_over_many_heads_divides_by_their_mean() -> None:
    """64 heads of 64 with lightning attention's decays, against draws of their pre-activations run
    token by token."""
    heads, width, tokens, draws = 64, 64, 10, 40
    block = moments.LinearAttention(
        heads,
        width,
        width,
        decays=lightning_decays(heads, 3, 12),
        feature_map="silu",
        scale=1.0,
        norm="all",
        gate="sigmoid",
    )
    assert LinearHeads.covers(block)
    kernel = 0.8 * np.eye(tokens) + 0.2
    names = ("query", "key", "value", "mixer_gate")
    law = LinearHeads(block, kernel, dict.fromkeys(names, 2.0), 1)
    torch.manual_seed(0)
    root = torch.linalg.cholesky(torch.tensor(2.0 * kernel))
    decays = torch.tensor(block.decays)[:, None, None]
    given: dict[str, list[float]] = {}
    for _ in range(draws):
        entering = [root @ torch.randn(heads, tokens, width, dtype=torch.float64) for _ in names]
        query, key, value, gate = (one.requires_grad_() for one in entering)
        state, rows = torch.zeros(heads, width, width, dtype=torch.float64), []
        q, k, v = (torch.nn.functional.silu(one) for one in (query, key, value))
        for t in range(tokens):
            state = decays * state + k[:, t, :, None] * v[:, t, None]
            rows.append((q[:, t, None] @ state)[:, 0])
        mixed = torch.stack(rows, 1)
        size = (mixed**2).mean((0, 2), keepdim=True)
        out = mixed / torch.sqrt(size + block.norm_epsilon) * torch.sigmoid(gate)
        out.backward(torch.randn_like(out))
        grads = {name: one.grad for name, one in zip(names, entering, strict=True)}
        for name, one in {"out": out.detach(), **grads}.items():
            given.setdefault(name, []).append(one.square().sum().item() / heads / width)
    back = law.backward(np.eye(tokens)).kernels
    expected = {"out": law.forward(), **back}
    for name, sizes in given.items():
        mean, error = np.mean(sizes), np.std(sizes) / draws**0.5
        assert np.trace(expected[name]) == pytest.approx(mean, rel=0.03, abs=2 * error), name
