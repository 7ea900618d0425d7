"""Mixtures of experts in torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..model.experts import OUTPUT_NORMS, SHARED, Experts
from ..model.transformer import Transformer
from .functions import activation, affine_norm
from .network import BLOCK_TWINS, LayerTwin
from .parameters import BLOCK_DRAWS, affine, draw


def draw_experts(
    block: Experts,
    model: Transformer,
    number: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Matrices of all experts, (E, fan_in, fan_out), and every bias."""
    assert model.weights is not None
    kind, variances = model.weights.distribution, model.variances_of(number)
    shapes, drawn = block.shapes(model), {}
    biases = {} if model.biases is None else model.biases.layer(number)
    for name, (fan_in, fan_out) in shapes.items():
        routed_matrix = name in ("ffn_in", "gate", "ffn_out")
        count = block.experts - block.identity if routed_matrix else 1
        matrices = [
            draw((fan_in, fan_out), variances[name], generator, dtype, kind) for _ in range(count)
        ]
        drawn[name] = _stacked(matrices) if routed_matrix else matrices[0]
        if (like := name.removeprefix(SHARED)) in biases:
            vector = "normal" if kind == "orthogonal" else kind
            variance = biases[like]
            vectors = [draw((fan_out,), variance, generator, dtype, vector) for _ in range(count)]
            drawn[f"{name}.bias"] = _stacked(vectors) if count > 1 else vectors[0]
    if block.router_bias_variance is not None:
        variance = block.router_bias_variance
        drawn["router.bias"] = draw((block.experts,), variance, generator, dtype)
    for site in OUTPUT_NORMS[: 1 + bool(block.shared)] if block.output_norms else ():
        drawn |= affine(model, site, 1.0, generator.device, dtype)
    return drawn


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).detach().requires_grad_()


def experts(block: Experts, layer: LayerTwin, z: Tensor) -> Tensor:
    """The output of a mixture and its shared expert for an input (batch, L, d_model)."""
    x = z.flatten(0, -2)
    gates = routed(block, layer.linear(x, "router"))
    y = torch.zeros_like(x)
    for number in range(block.experts):
        (rows,) = gates[:, number].detach().nonzero(as_tuple=True)
        gate, tokens = gates[rows, number, None], x[rows]
        if number >= block.experts - block.identity:
            output = gate * tokens
        elif block.rule == "sigmoid_input":
            output = unit(block, layer, gate * tokens, "", number)
        else:
            output = gate * unit(block, layer, tokens, "", number)
        y = y.index_add(0, rows, output)
    y = y.reshape(z.shape)
    if block.apart:
        layer.exports["shortcut", layer.number] = y
        y = torch.zeros_like(y)
    else:
        y = layer.watch(y, "ffn.experts")
    normed = functools.partial(_normed, layer) if block.output_norms else lambda x, site: x
    y = normed(y, OUTPUT_NORMS[0])
    if not block.shared:
        return y
    common = unit(block, layer, z, SHARED)
    if block.shared_gate_variance is not None:
        common = torch.sigmoid(layer.linear(z, f"{SHARED}router")) * common
    return y + normed(layer.watch(common, "ffn.shared"), OUTPUT_NORMS[1])


def _normed(layer: LayerTwin, x: Tensor, site: str) -> Tensor:
    return layer.watch(affine_norm(layer.model, x, layer.weights, site), site)


def unit(
    block: Experts, layer: LayerTwin, x: Tensor, prefix: str, number: int | None = None
) -> Tensor:
    """One expert."""

    def linear(x: Tensor, name: str) -> Tensor:
        names = prefix + name, f"{prefix}{name}.bias"
        found = [layer.weights.get(n) for n in names]
        weight, bias = (w if w is None or number is None else w[number] for w in found)
        assert weight is not None
        return x @ weight if bias is None else x @ weight + bias

    act, hidden = activation(layer.model.activation), linear(x, "ffn_in")
    if not layer.model.gated:
        return linear(act(hidden), "ffn_out")
    gate = linear(x, "gate")
    if block.clamp is not None:
        gate, hidden = gate.clamp(max=block.clamp), hidden.clamp(-block.clamp, block.clamp)
    return linear(act(gate) * (hidden + block.shift), "ffn_out")


def routed(block: Experts, logits: Tensor) -> Tensor:
    """Gates (tokens, E) from the router's logits, 0 for experts that are not chosen."""
    score = torch.softmax(logits, -1) if block.rule == "softmax" else torch.sigmoid(logits)
    rank = score.detach()
    if block.groups > 1:
        by_group = rank.unflatten(-1, (block.groups, -1))
        best = by_group.topk(block.group_best, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(block.kept_groups, -1).indices, 1.0)
        rank = by_group.masked_fill(kept[..., None] == 0, -1.0).flatten(-2)
    chosen = rank.topk(block.chosen, -1).indices
    gates = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
    if block.normalised == "chosen":
        gates = gates / gates.sum(-1, keepdim=True)
    return block.scale * gates


BLOCK_TWINS[Experts], BLOCK_DRAWS[Experts] = experts, draw_experts
