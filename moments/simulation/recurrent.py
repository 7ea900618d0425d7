"""Recurrent mixers and short convolutions in torch, token by token."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ..model.block import Block
from ..model.mixers import (
    MIXER,
    RGLRU,
    Absent,
    GatedDeltaNet,
    LinearAttention,
    Mamba,
    Mamba2,
    ParallelMixer,
    ShortConvolution,
)
from ..model.transformer import Transformer

if TYPE_CHECKING:
    from .network import LayerTwin

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}


def present(model: Transformer, number: int, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """A layer's blocks without those that are declared absent."""
    declared = {"attention": model.mixers[number - 1], "ffn": model.ffns[number - 1]}
    return tuple(name for name in blocks if not isinstance(declared.get(name), Absent))


# --- parameters besides matrices ------------------------------------------------------------------


def _taps(
    block: Any, name: str, width: int, random: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights of a depthwise convolution, and its bias if it has one."""
    size, options = (block.kernel, width), {"device": random.device, "dtype": dtype}
    if getattr(block, "tap_distribution", "normal") == "uniform":
        bound = math.sqrt(3 * block.tap_variance)
        taps = (2 * torch.rand(size, generator=random, **options) - 1) * bound
    else:
        taps = torch.randn(size, generator=random, **options) * math.sqrt(block.tap_variance)
    drawn = {f"{name}.taps": taps.requires_grad_()}
    if getattr(block, "bias", False) or getattr(block, "tap_bias", False):
        drawn[f"{name}.taps.bias"] = torch.zeros(width, **options).requires_grad_()
    return drawn


def _steps(block: Any, heads: int, random: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Biases whose softplus is uniform in its logarithm."""
    low, high = map(math.log, block.steps)
    share = torch.rand(heads, generator=random, device=random.device, dtype=dtype)
    step = torch.exp(low + (high - low) * share)
    return (step + torch.log(-torch.expm1(-step))).requires_grad_()


def _draw(
    block: Any, model: Transformer, _number: int, random: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    shapes, options = block.shapes(model), {"device": random.device, "dtype": dtype}
    drawn: dict[str, Tensor] = {}
    if isinstance(block, ShortConvolution):
        return _taps(block, "mixer", model.d_model, random, dtype)
    inner = block.inner_norm is not None if isinstance(block, Mamba) else False
    convolved = ("value",) if isinstance(block, Mamba | RGLRU) else ("query", "key", "value")
    if not isinstance(block, LinearAttention):
        for name in convolved:
            drawn |= _taps(block, name, shapes[name][1], random, dtype)
    if isinstance(block, RGLRU):
        low, high = (decay * decay for decay in block.decays)
        share = torch.rand(block.width, generator=random, **options)
        rates = -0.5 * torch.log(low + (high - low) * share)
        drawn["rate"] = torch.log(torch.expm1(rates)).requires_grad_()
        for name in ("value", "mixer_gate", "mixer_input", "mixer_step"):
            drawn[f"{name}.bias"] = torch.zeros(block.width, **options).requires_grad_()
    elif not isinstance(block, LinearAttention):
        steps = shapes["mixer_step"][1]
        drawn["mixer_step.bias"] = _steps(block, steps, random, dtype)
        drawn["rate"] = torch.log(_rates(block, shapes, random, dtype)).requires_grad_()
        if not isinstance(block, GatedDeltaNet):
            drawn["skip"] = torch.full((steps,), block.skip, **options).requires_grad_()
    for name in ("mixer_step_down", "key", "query") if inner else ():
        if block.inner_norm == "affine":
            ones = torch.ones(shapes[name][1], **options)
            drawn[f"{name}.norm.gain"] = ones.requires_grad_()
    if block.norm:
        per_head = isinstance(block, GatedDeltaNet) or block.norm == "head"
        width = block.d_value if per_head else shapes["value"][1]
        drawn["mixer_norm.gain"] = torch.ones(width, **options).requires_grad_()
    return drawn


def _rates(block: Any, shapes: Any, random: torch.Generator, dtype: torch.dtype) -> Tensor:
    options = {"device": random.device, "dtype": dtype}
    if isinstance(block, Mamba):
        rates = torch.tensor(block.rates or range(1, block.state + 1), **options)
        return rates.repeat(block.width, 1)
    heads = block.value_heads if isinstance(block, GatedDeltaNet) else block.heads
    if block.rates is None:
        return torch.arange(1, heads + 1, **options)
    if isinstance(block, Mamba2) and len(block.rates) == heads:
        return torch.tensor(block.rates, **options)
    low, high = block.rates
    return low + (high - low) * torch.rand(heads, generator=random, **options)


def _draw_parallel(
    block: ParallelMixer, model: Transformer, number: int, random: torch.Generator, dtype: Any
) -> dict[str, Tensor]:
    drawn = _draw(block.mixer, model, number, random, dtype)
    return {block.named(name): parameter for name, parameter in drawn.items()}


# --- forward passes -------------------------------------------------------------------------------


def _convolved(layer: LayerTwin, x: Tensor, name: str) -> Tensor:
    """A causal depthwise convolution of (batch, L, features)."""
    taps = layer.weights[f"{name}.taps"]
    filters = taps.flip(0).T[:, None]  # torch's last tap is for the newest token
    padded = functional.pad(x.transpose(1, 2), (len(taps) - 1, 0))
    bias = layer.weights.get(f"{name}.taps.bias")
    return functional.conv1d(padded, filters, bias, groups=x.shape[-1]).transpose(1, 2)


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon)


def _run(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Callable[..., Tensor]
) -> Tensor:
    """Outputs of the recurrence S_t = decay_t S_{t-1} + k_t write(t, decay_t S_{t-1})^T,
    o_t = S_t^T q_t.

    Args:
        query, key: (batch, heads, L, d_key).
        value: (batch, heads, L, d_value).
        decay: (batch, heads, L, 1 or d_key).
        write: returns (batch, heads, d_value).
    """
    batch, heads, tokens, width = key.shape
    state = torch.zeros(
        (batch, heads, width, value.shape[-1]), dtype=value.dtype, device=value.device
    )
    outputs = []
    for t in range(tokens):
        state = state * decay[:, :, t, :, None]
        state = state + key[:, :, t, :, None] * write(t, state)[:, :, None]
        outputs.append((state * query[:, :, t, :, None]).sum(-2))
    return torch.stack(outputs, 2)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _concatenated(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def _short_convolution(block: ShortConvolution, layer: LayerTwin, z: Tensor) -> Tensor:
    query, key, value = (layer.linear(z, name) for name in ("query", "key", "value"))
    return query * _convolved(layer, key * value, "mixer")


def _linear_attention(block: LinearAttention, layer: LayerTwin, z: Tensor) -> Tensor:
    function = _FUNCTIONS[block.feature_map]
    query, key, value = (
        _heads(function(layer.linear(z, name)), block.heads) for name in ("query", "key", "value")
    )
    decay = torch.ones_like(value[..., :1])
    if block.decays is not None:
        decays = torch.tensor(block.decays, dtype=z.dtype, device=z.device)
        decay = decay * decays[:, None, None]
    if block.decay_gate is not None:
        gates = layer.linear(z, "mixer_step") + block.decay_bias
        decay = _heads(torch.sigmoid(gates) ** (1 / block.decay_power), block.heads)
    scale = 1.0 if block.scale is None else block.scale
    mixed = _run(query * scale, key, value, decay, lambda t, state: value[:, :, t])
    if block.norm == "head":
        mixed = _normalised(mixed, block.norm_epsilon) * layer.weights["mixer_norm.gain"]
    mixed = _concatenated(mixed)
    if block.norm == "all":
        mixed = _normalised(mixed, block.norm_epsilon) * layer.weights["mixer_norm.gain"]
    if block.gate is None:
        return mixed
    return mixed * _FUNCTIONS[block.gate](layer.linear(z, "mixer_gate"))


def _selective(query: Tensor, key: Tensor, value: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
    """Mamba's selective scan; query and key are (batch, L, state), value and steps (batch, L,
    features), rates (features, state)."""
    state, outputs = 0.0, []
    for t in range(value.shape[1]):
        step = steps[:, t, :, None]
        state = torch.exp(-step * rates) * state + step * value[:, t, :, None] * key[:, t, None]
        outputs.append((state * query[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def _mamba(block: Mamba, layer: LayerTwin, z: Tensor) -> Tensor:
    x = functional.silu(_convolved(layer, layer.linear(z, "value"), "value"))

    def read(name: str) -> Tensor:
        projected = layer.linear(x, name)
        if block.inner_norm is None:
            return projected
        normed = _normalised(projected, block.norm_epsilon)
        return normed * layer.weights.get(f"{name}.norm.gain", 1.0)

    steps = functional.softplus(layer.linear(read("mixer_step_down"), "mixer_step"))
    mixed = _selective(read("query"), read("key"), x, steps, torch.exp(layer.weights["rate"]))
    gate = functional.silu(layer.linear(z, "mixer_gate"))
    return (mixed + layer.weights["skip"] * x) * gate


def _rg_lru(block: RGLRU, layer: LayerTwin, z: Tensor) -> Tensor:
    x, weights = _convolved(layer, layer.linear(z, "value"), "value"), layer.weights

    def gate(name: str) -> Tensor:
        matrix = weights[name].unflatten(-1, (block.blocks, -1))
        logits = torch.einsum("blhi,iho->blho", x.unflatten(-1, (block.blocks, -1)), matrix)
        return torch.sigmoid(logits.flatten(-2) + weights[f"{name}.bias"])

    logs = -8 * gate("mixer_step") * functional.softplus(weights["rate"])
    written = gate("mixer_input") * x
    state, outputs = written[:, 0], [written[:, 0]]
    for t in range(1, x.shape[1]):
        kept = torch.exp(logs[:, t])
        state = kept * state + torch.sqrt(1 - kept * kept) * written[:, t]
        outputs.append(state)
    out = _FUNCTIONS[block.gate](layer.linear(z, "mixer_gate"))
    return torch.stack(outputs, 1) * out


def _mamba2(block: Mamba2, layer: LayerTwin, z: Tensor) -> Tensor:
    projected = {name: factor * (z @ layer.weights[name]) for name, factor in block.factors.items()}
    value, key, query = (
        functional.silu(_convolved(layer, projected[name], name))
        for name in ("value", "key", "query")
    )
    gate = functional.silu(projected["mixer_gate"])
    steps = functional.softplus(projected["mixer_step"] + layer.weights["mixer_step.bias"])
    steps = steps.clamp(block.least_step, block.most_step).transpose(1, 2)[..., None]
    value = _heads(value, block.heads)
    each = block.heads // block.groups
    key, query = (_heads(x, block.groups).repeat_interleave(each, 1) for x in (key, query))
    decay = torch.exp(-torch.exp(layer.weights["rate"])[:, None, None] * steps)
    mixed = _run(query, key, value, decay, lambda t, state: steps[:, :, t] * value[:, :, t])
    mixed = _concatenated(mixed + layer.weights["skip"][:, None, None] * value)
    if not block.norm:
        return mixed * gate

    def norm(x: Tensor) -> Tensor:
        by_group = _normalised(x.unflatten(-1, (block.groups, -1)), block.norm_epsilon)
        return by_group.flatten(-2) * layer.weights["mixer_norm.gain"]

    return norm(mixed) * gate if block.norm_before_gate else norm(mixed * gate)


def _gated_delta_net(block: GatedDeltaNet, layer: LayerTwin, z: Tensor) -> Tensor:
    query, key, value = (
        functional.silu(_convolved(layer, layer.linear(z, name), name))
        for name in ("query", "key", "value")
    )
    each = block.value_heads // block.key_heads
    query, key = (
        _unit(_heads(x, block.key_heads)).repeat_interleave(each, 1) for x in (query, key)
    )
    value = _heads(value, block.value_heads)
    gates = [
        layer.linear(z if block.rank is None else z @ layer.weights[f"{name}_down"], name)
        for name in ("mixer_gate", "mixer_step")
    ]
    step = _heads(functional.softplus(gates[1]), block.value_heads)
    decay = torch.exp(-torch.exp(layer.weights["rate"])[:, None, None] * step)
    rate = torch.sigmoid(layer.linear(z, "mixer_rate")).transpose(1, 2)[..., None]
    rate = rate * (2.0 if block.twice else 1.0)

    def write(t: int, state: Tensor) -> Tensor:
        stored = (state * key[:, :, t, :, None]).sum(-2)
        return rate[:, :, t] * (value[:, :, t] - stored)

    mixed = _run(query / math.sqrt(block.d_key), key, value, decay, write)
    mixed = _normalised(mixed, block.norm_epsilon) * layer.weights["mixer_norm.gain"]
    return _concatenated(mixed) * _FUNCTIONS[block.gate](gates[0])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


_MIXED: dict[type[Block], Callable[[Any, LayerTwin, Tensor], Tensor]] = {
    ShortConvolution: _short_convolution,
    LinearAttention: _linear_attention,
    Mamba: _mamba,
    Mamba2: _mamba2,
    GatedDeltaNet: _gated_delta_net,
    RGLRU: _rg_lru,
}


def run_mixer(block: Block, layer: LayerTwin, z: Tensor) -> Tensor:
    """A mixer and its output projection of (batch, L, d_model)."""
    mixed = layer.watch(_MIXED[type(block)](block, layer, z), "attention.heads")
    return layer.watch(layer.linear(mixed, "output"), "attention.projection")


def _parallel(block: ParallelMixer, layer: LayerTwin, z: Tensor) -> Tensor:
    weights = {name: w for name, w in layer.weights.items() if block.named(name) == name}
    for name, weight in layer.weights.items():
        plain = name.removeprefix(MIXER)
        if block.named(plain) == name:
            weights[plain] = weight
    mixer_layer = dataclasses.replace(
        layer,
        weights=weights,
        watch=lambda x, site: layer.watch(x, site.replace("attention", "mixer")),
    )
    mixed = run_mixer(block.mixer, mixer_layer, z)
    return block.attention_scale * layer.attention(z) + block.mixer_scale * mixed


TWINS = dict.fromkeys(_MIXED, run_mixer) | {ParallelMixer: _parallel}
DRAWS = dict.fromkeys(_MIXED, _draw) | {ParallelMixer: _draw_parallel}
"""Entries for `moments.simulation.network` and `moments.simulation.parameters`."""
