"""The drawn block (`drawn`) of a component, at the kernels of a prediction."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..engine.laws import LawMatrix
from ..engine.state import Gradient, Kernel
from ..errors import DomainError
from ..layers.attention.latent import LatentHeads
from ..layers.attention.projections import over_all_heads
from ..layers.attention.self_attention import CrossAttention, SelfAttention
from ..layers.elementary import Activation, Linear
from ..layers.experts.mixture import Mixture
from ..layers.gated import GatedLinear
from ..layers.normalization import FiniteNormalization
from ..layers.product import Product
from ..layers.recurrent.leaf import Mixer
from ..layers.recurrent.mixers import HEADS
from ..model.mixers import ShortConvolution
from .change import Array
from .drawn import AttentionHead, Block, Convolution, Units
from .sites import ENCODER, Reading, Site

SHARED_KEY = "shared"
"""Section of the keys that all heads of latent attention share: rows of the matrix `kv_down`."""


def drawn_block(
    reading: Reading,
    leaving: Site,
    head: Any,
    matrices: Mapping[str, LawMatrix],
    reads: Mapping[str, Array],
    features: float,
    sequences: int = 1,
    received: Array | None = None,
    **options: Any,
) -> Block:
    """The block of a component, cached for steps at all rates."""
    known, prefix = {}, ENCODER if leaving.name.startswith(ENCODER) else ""
    for name, matrix in matrices.items():
        # predicted norms are those of a single batch
        square = reading.norms().get((leaving.layer, prefix + matrix.name))
        if square is not None and name != SHARED_KEY and reading.batches is None:
            known[name] = square
    gradient = leaving.gradient if received is None else received
    matrices = {name: matrices[name] for name in head.sections}
    given = matrices, reads, gradient, features, known, sequences
    return reading.once(Block, leaving.index, make=lambda: Block(head, *given, **options))


@functools.singledispatch
def block_of(
    leaf: Any, reading: Reading, entering: Site, leaving: Site, memory: Site | None = None
) -> Block:
    """The block of a component that is a function of preactivations, whose matrices read its input
    or, for keys and values, `memory`."""
    raise DomainError(f"{type(leaf).__name__} ({leaf.label}) is not drawn")


@block_of.register
def mixer_block(leaf: Mixer, reading: Reading, entering: Site, leaving: Site, *_: Any) -> Block:
    block = leaf.block
    head = (
        Convolution(block, leaf.width, min(leaf.width, 64))
        if isinstance(block, ShortConvolution)
        else HEADS[type(block)](block)
    )
    variances = {one.name: float(one.variance / one.square) for one in leaf.inward}
    matrices = {
        one.name: LawMatrix(leaf.named(one.name), one.fan_in, one.rows, variances[one.name])
        for one in leaf.inward
        if one.name in head.sections
    }
    return drawn_block(
        reading,
        leaving,
        head,
        matrices,
        dict.fromkeys(matrices, entering.kernel),
        float(leaf.width),
        leaf.sequences,
        gains={one.name: one.fan_in * variances[one.name] for one in leaf.inward},
        factors={one.name: float(one.square) ** 0.5 for one in leaf.inward if one.square != 1.0},
        named=leaf.named,
    )


@block_of.register(SelfAttention)
@block_of.register(CrossAttention)
@block_of.register(Product)
def attention_block(
    leaf: SelfAttention | CrossAttention | Product,
    reading: Reading,
    entering: Site,
    leaving: Site,
    memory: Site | None = None,
) -> Block:
    gates = leaf if isinstance(leaf, Product) else None
    heads: Any = leaf if gates is None else gates.first
    if not isinstance(heads, SelfAttention | CrossAttention):
        raise DomainError(f"the first step does not cover gates on {type(heads).__name__}")
    source = entering if memory is None else memory
    width = int(heads.heads * heads.d_head)
    shared = int(float(heads.kv_heads or heads.heads) * heads.d_head)
    biased = ("query", "key", "value") if heads.has_bias is True else heads.has_bias or ()
    if heads.rotary is None and heads.qk_norm is None and heads.logit_softcap is None:
        # a bias common to all keys cancels in the softmax, unless there is a sink
        has_sink = getattr(heads, "sink", None) is not None
        biased = tuple(name for name in biased if name != "key" or has_sink)
    matrices = {
        name: LawMatrix(
            heads.prefix + name,
            int(reads),
            rows,
            float(getattr(heads, name)),
            float(getattr(heads, f"{name}_bias")) if name in biased else None,
        )
        for name, reads, rows in (
            ("query", heads.d_model, width),
            ("key", heads.memory_width, shared),
            ("value", heads.memory_width, shared),
        )
    }
    gates_per_head = 0
    if gates is not None:
        linear = gates.gate.children[0]
        assert isinstance(linear, Linear)
        law = linear.parameters
        rows = int(law["fan_out"])
        bias = float(law.get("bias_variance", 0.0)) if linear.has_bias else None
        variance = float(law["weight_variance"])
        matrices["attention_gate"] = LawMatrix(
            "attention_gate", int(heads.d_model), rows, variance, bias
        )
        gates_per_head = rows // int(heads.heads)
    kernels = {
        name: source.kernel if name in ("key", "value") else entering.kernel for name in matrices
    }
    sizes = None
    if over_all_heads(heads):
        sizes = {}
        for name, m in matrices.items():
            square = np.diag(kernels[name])[: len(kernels[name]) // heads.sequences]
            square = m.fan_in * m.variance * square + (m.bias or 0.0)
            sizes[name] = np.sqrt(square + heads.norm_epsilon)
    head, sequences = AttentionHead(heads, None, gates_per_head, sizes), int(heads.sequences)
    gradients, size = entering.attention_gradients(heads, source), float(width)
    return drawn_block(
        reading, leaving, head, matrices, kernels, size, sequences, predicted=gradients
    )


class Latent(NamedTuple):
    """One of the latents of `latent_block`.

    Attributes:
        name, variance: of the matrix whose output it is.
        norm: norm of the latent.
        at, after: sites before and after the norm.
        readers: sections whose matrices read it.
    """

    name: str
    variance: float
    norm: FiniteNormalization
    at: Site
    after: Site
    readers: tuple[str, ...]


def latent_block(
    leaf: LatentHeads, reading: Reading, entering: Site, leaving: Site
) -> tuple[Block, list[Latent]]:
    """The heads of latent attention as a block, and the latents that they read."""
    heads, block, tokens = leaf.heads, leaf.block, entering.signal
    assert tokens is not None
    d, count = int(heads.d_model), int(heads.heads)
    downs: dict[str, tuple[str, int, tuple[str, ...]]]
    downs = {"kv_down": ("attention.kv_latent", block.kv_rank, ("key", "value"))}
    if block.query_rank is not None:
        downs["query_down"] = ("attention.query_latent", block.query_rank, ("query",))
    passes, read = {}, {"query": entering.kernel, SHARED_KEY: entering.kernel}
    for name, (label, rank, readers) in downs.items():
        down, norm = leaf._latent(name, label, rank, 1.0)
        before, _ = down.forward(tokens)
        normed, back = norm.forward(before)
        passes[name] = down, norm, before, back
        read |= dict.fromkeys(readers, np.asarray(normed.second_moment().off_diagonal))
    rows = {
        "query": (block.query_rank or d, count * int(heads.d_head)),
        "key": (block.kv_rank, count * block.nope_dim),
        "value": (block.kv_rank, count * block.value_dim),
    }
    matrices = {
        name: LawMatrix(name, *shape, float(getattr(heads, name))) for name, shape in rows.items()
    }
    if block.rope_dim:
        matrices[SHARED_KEY] = LawMatrix("kv_down", d, block.rope_dim, float(block.kv_down))
    features, sequences = float(count * block.value_dim), int(heads.sequences)
    head = AttentionHead(heads, block)
    result = drawn_block(reading, leaving, head, matrices, read, features, sequences)
    latents = []
    for name, (label, rank, readers) in downs.items():
        down, norm, before, back = passes[name]
        after_norm = np.asarray(
            sum(
                matrices[one].fan_out * matrices[one].variance * result.gradients[one]
                for one in readers
            )
        )
        pulled = back(Gradient(Kernel.of_matrix(after_norm), tokens.seq_len))
        kernel = np.asarray(before.second_moment().off_diagonal)
        gradient = np.asarray(pulled.gradient.kernel.off_diagonal)
        if (square := reading.norms().get((leaving.layer, name))) is not None:
            if name == "kv_down" and block.rope_dim:
                overlap = float(np.vdot(result.gradients[SHARED_KEY], read[SHARED_KEY]))
                square -= d * block.rope_dim * overlap
            gradient = gradient * (square / (d * rank * float(np.vdot(gradient, entering.kernel))))
        at = entering.inner(name, kernel, gradient, float(rank))
        after = entering.inner(label, read[readers[0]], after_norm, float(rank))
        variance = max(float(down.parameters["weight_variance"]), 1e-60)
        latents.append(Latent(name, variance, norm, at, after, readers))
    return result, latents


def mixture_block(
    leaf: Mixture, reading: Reading, entering: Site, leaving: Site
) -> tuple[Block, Site, LawMatrix, Array]:
    """The gated hidden features of all experts as a block, their site, the joint output matrix that
    reads them, and draws of the gates (N, T, E)."""
    *hidden, out = leaf.expert.children
    first, unit = hidden[0], hidden[-1]
    assert isinstance(out, Linear)
    assert isinstance(first, GatedLinear | Linear)
    d, experts = int(leaf.d_model), leaf.router.experts
    law = out.parameters
    width, variance = int(law["fan_in"]), max(float(law["weight_variance"]), 1e-60)
    total_width = experts * width
    router_bias = leaf.bias_variance if leaf.has_bias else None
    matrices = {leaf.name: LawMatrix(leaf.name, d, experts, leaf.router_variance, router_bias)}
    if isinstance(first, GatedLinear):
        laws, limits = first.activation, (first.shift, first.clamp)
        biases = {"gate": first.gate_bias, "ffn_in": first.bias}
        for role in ("gate", "ffn_in"):
            bias = float(biases[role]) if first.has_bias else None
            name = f"{first.prefix}{role}"
            matrices[name] = LawMatrix(name, d, total_width, float(getattr(first, role)), bias)
    else:
        assert isinstance(unit, Activation)
        laws, limits, entry = unit.laws, (0.0, None), first.parameters
        bias = float(entry.get("bias_variance", 0.0)) if first.has_bias else None
        matrices[first.weight] = LawMatrix(
            first.weight, d, total_width, float(entry["weight_variance"]), bias
        )
    gated = isinstance(first, GatedLinear)
    head = Units(leaf.router, laws, width, gated, leaf.inward, *limits, tuple(matrices))
    kernels, received = dict.fromkeys(matrices, entering.kernel), d * variance * leaving.gradient
    block = drawn_block(
        reading, leaving, head, matrices, kernels, float(total_width), received=received
    )
    gates = reading.once(
        Units, leaving.index, make=lambda: head.gates(block.draws.preactivations[leaf.name])
    )
    out_bias = float(law.get("bias_variance", 0.0)) if out.has_bias else None
    shared = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
    kernel = (leaving.kernel - (out_bias or 0.0) * shared) / (total_width * variance)
    at = leaving.inner("hidden", kernel, received, float(total_width))
    return (
        block,
        at,
        LawMatrix(out.weight, total_width, int(law["fan_out"]), variance, out_bias),
        gates,
    )
