"""A step's change through blocks that are drawn (`drawn`): recurrences, experts, latent attention,
and attention with norms of queries and keys, caps, sinks or gates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..engine.laws import LawMatrix
from ..engine.state import Gradient, Kernel
from ..errors import DomainError
from ..layers.attention.gates import GatedHeads
from ..layers.attention.latent import LatentHeads
from ..layers.attention.projections import over_all_heads
from ..layers.attention.self_attention import SelfAttention
from ..layers.elementary import Activation, LayerScale, Linear
from ..layers.experts.mixture import Mixture
from ..layers.gated import GatedLinear
from ..layers.recurrent.leaf import Mixer
from ..layers.recurrent.mixers import HEADS
from ..model.mixers import ShortConvolution
from .change import Array, Change
from .drawn import AttentionHead, Block, Convolution, Units, copies, routed_apart
from .rules import Told, gain_effect, sign_of_rows
from .sites import Site, bent
from .walk import Walk, columns_of

SHARED_KEY = "shared"
"""The part of the keys that all heads of latent attention share, rows of the matrix `kv_down`."""


class Read(NamedTuple):
    """What a matrix of a block reads: its change, the site, and how it follows the overlaps of the
    stream's tokens."""

    change: Change
    at: Site
    response: Any


def through(
    walk: Walk,
    block: Block,
    reads: Mapping[str, Read],
    leaving: Site,
    named: Callable[[str], str] = str,
) -> Change:
    """The change behind a block whose matrices read that, all steps in it included; its own
    parameters are `named`."""
    changes, carried, by_sign, responses = {}, {}, {}, {}
    layer = leaving.layer
    for name, matrix in block.matrices.items():
        change, at, walk.response = reads[name]
        gradient, shape = block.gradients[name], (float(matrix.fan_in), float(matrix.fan_out))
        signs = functools.partial(sign_of_rows, delta=block.rows(name))
        variance = max(matrix.variance, 1e-60)
        result = walk.matrix(matrix.name, change, at, gradient, layer, shape, variance, signs)
        if matrix.bias is not None:
            result = walk.bias(f"{matrix.name}.bias", result, gradient, shape[1], layer)
        changes[name] = result
        carried[name] = matrix.fan_in * matrix.variance * change.coherent
        if walk.optimizer.rule_of(walk.prefix + matrix.name) == "sign":
            by_sign[name] = at.kernel
        responses[name] = matrix.fan_in * matrix.variance * walk.response
    steps, follow = {}, {}
    for name in block.own:
        full, sent = walk.prefix + named(name), block.sent[name]
        move, mean, square = _entrywise(walk, full, sent, leaving)
        count = copies(block.head, name).times * sent[0].size
        note = Told(count * mean, square)
        rate = walk.entry(layer, full, walk.optimizer.factor(full), note, np.nan, 1.0)
        steps[name] = -rate * move
        size = float((sent * sent).mean())
        follow[name] = rate * mean / size if size > 0 else 0.0
    walk.response = block.followed(responses)
    return block.carried(changes, carried, by_sign, steps, follow, leaving.gradient)


def _entrywise(walk: Walk, name: str, sent: Array, leaving: Site) -> tuple[Array, float, float]:
    """A step of rate 1 on drawn parameters, the mean of its product with the gradient, and its mean
    square."""
    optimizer = walk.optimizer
    if optimizer.rule_of(name) == "sgd":
        move = sent
    elif optimizer.batches is not None:
        pulled, square = optimizer.pulled(leaving.kernel * leaving.gradient)
        mean = pulled * float(np.abs(sent).mean())
        return pulled * np.sign(sent), mean, square
    else:
        move = sent / np.maximum(np.abs(sent) + optimizer.epsilon, 1e-300)
    return move, float((move * sent).mean()), float((move * move).mean())


def _made(
    walk: Walk,
    leaving: Site,
    head: Any,
    matrices: Mapping[str, LawMatrix],
    reads: Mapping[str, Array],
    features: float,
    sequences: int = 1,
    received: Array | None = None,
    gains: Mapping[str, float] = MappingProxyType({}),
) -> Block:
    """Draws of a block, which steps of all rates share."""
    known, layer = walk.reading.norms(), leaving.layer
    given = {
        name: known[layer, matrix.name]
        for name, matrix in matrices.items()
        if (layer, matrix.name) in known and name != SHARED_KEY
    }
    gradient = leaving.gradient if received is None else received
    return walk.reading.once(
        Block,
        leaving.index,
        make=lambda: Block(head, matrices, reads, gradient, features, given, sequences, gains),
    )


def _from(
    walk: Walk, change: Change, entering: Site, names: Mapping[str, Any]
) -> tuple[dict[str, Read], dict[str, Array]]:
    """All sections read what enters."""
    read = Read(change, entering, walk.response)
    return dict.fromkeys(names, read), dict.fromkeys(names, entering.kernel)


def mixer(walk: Walk, leaf: Mixer, change: Change, entering: Site, leaving: Site) -> Change:
    block = leaf.block
    head = (
        Convolution(block, leaf.width, min(leaf.width, 64))
        if isinstance(block, ShortConvolution)
        else HEADS[type(block)](block)
    )
    if any(one.square != 1.0 for one in leaf.inward):
        raise DomainError("the first step does not cover factors of a mixer's matrices")
    matrices = {
        one.name: LawMatrix(leaf.named(one.name), one.fan_in, one.rows, float(one.variance))
        for one in leaf.inward
        if one.name in head.sections
    }
    gains = {one.name: one.fan_in * float(one.variance) for one in leaf.inward}
    reads, kernels = _from(walk, change, entering, matrices)
    of = head, matrices, kernels, float(leaf.width), leaf.sequences
    return through(walk, _made(walk, leaving, *of, gains=gains), reads, leaving, leaf.named)


# --- attention ------------------------------------------------------------------------------------


def _check(leaf: SelfAttention) -> None:
    for name, there in {
        "alibi": bool(leaf.alibi),
        "relative_bias": leaf.relative_bias is not None,
        "attention_dropout": bool(leaf.drop_prob),
        "rotary.grid": leaf.rotary is not None and leaf.rotary.grid is not None,
    }.items():
        if there:
            raise DomainError(
                f"the first step does not cover {name} along with norms of queries and keys, caps, "
                "sinks, gates or latents"
            )


def attention(
    walk: Walk, leaf: SelfAttention, change: Change, entering: Site, leaving: Site
) -> Change:
    if bent(leaf):
        return _heads(walk, leaf, None, change, entering, leaving)
    return walk.attention(leaf, change, entering, leaving)


def _heads(
    walk: Walk,
    leaf: SelfAttention,
    gates: GatedHeads | None,
    change: Change,
    entering: Site,
    leaving: Site,
) -> Change:
    _check(leaf)
    d, width = int(leaf.d_model), int(leaf.heads * leaf.d_head)
    shared = int(float(leaf.kv_heads or leaf.heads) * leaf.d_head)
    has = ("query", "key", "value") if leaf.has_bias is True else leaf.has_bias or ()
    matrices = {
        name: LawMatrix(
            name,
            d,
            rows,
            float(getattr(leaf, name)),
            float(getattr(leaf, f"{name}_bias")) if name in has else None,
        )
        for name, rows in (("query", width), ("key", shared), ("value", shared))
    }
    each = 0
    if gates is not None:
        linear = gates.gate.children[0]
        assert isinstance(linear, Linear)
        given = linear.parameters
        rows = int(given["fan_out"])
        bias = float(given.get("bias_variance", 0.0)) if linear.has_bias else None
        variance = float(given["weight_variance"])
        matrices["attention_gate"] = LawMatrix("attention_gate", d, rows, variance, bias)
        each = rows // int(leaf.heads)
    sizes = None
    if over_all_heads(leaf):
        own = np.diag(entering.kernel)[: len(entering.kernel) // leaf.sequences]
        sizes = {
            name: np.sqrt(d * m.variance * own + (m.bias or 0.0) + leaf.norm_epsilon)
            for name, m in matrices.items()
        }
    reads, kernels = _from(walk, change, entering, matrices)
    head = AttentionHead(leaf, None, each, sizes)
    made = _made(walk, leaving, head, matrices, kernels, float(width), int(leaf.sequences))
    return through(walk, made, reads, leaving)


def gated_heads(
    walk: Walk, node: GatedHeads, change: Change, entering: Site, leaving: Site
) -> Change:
    """Heads and gates as one block."""
    heads = node.heads
    if not isinstance(heads, SelfAttention):
        raise DomainError(f"the first step does not cover gates on {type(heads).__name__}")
    return _heads(walk, heads, node, change, entering, leaving)


def latent(walk: Walk, leaf: LatentHeads, change: Change, entering: Site, leaving: Site) -> Change:
    """The latents' matrices and norms, then heads that read them."""
    heads, block = leaf.attention, leaf.block
    _check(heads)
    assert entering.signal is not None
    own, tokens = Read(change, entering, walk.response), entering.signal
    d, count = int(heads.d_model), int(heads.heads)
    downs: dict[str, tuple[str, int, tuple[str, ...]]]
    downs = {"kv_down": ("attention.kv_latent", block.kv_rank, ("key", "value"))}
    if block.query_rank is not None:
        downs["query_down"] = ("attention.query_latent", block.query_rank, ("query",))
    passed, read = {}, {"query": entering.kernel, SHARED_KEY: entering.kernel}
    for name, (label, rank, readers) in downs.items():
        down, norm = leaf._latent(name, label, rank, 1.0)
        before, _ = down.forward(tokens)
        after, back = norm.forward(before)
        passed[name] = down, norm, before, after, back
        read |= dict.fromkeys(readers, np.asarray(after.second_moment().off_diagonal))
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
    made = _made(walk, leaving, head, matrices, read, features, sequences)
    reads = {"query": own, SHARED_KEY: own}
    for name, (label, rank, readers) in downs.items():
        down, norm, before, after, back = passed[name]
        there = sum(
            matrices[one].fan_out * matrices[one].variance * made.gradients[one] for one in readers
        )
        sent = back(Gradient(Kernel.of_matrix(np.asarray(there)), tokens.seq_len)).gradient.kernel
        kernel = np.asarray(before.second_moment().off_diagonal)
        gradient = np.asarray(sent.off_diagonal)
        if (square := walk.reading.norms().get((leaving.layer, name))) is not None:
            if name == "kv_down" and block.rope_dim:
                square -= (
                    d
                    * block.rope_dim
                    * float(np.vdot(made.gradients[SHARED_KEY], read[SHARED_KEY]))
                )
            gradient = gradient * (square / (d * rank * float(np.vdot(gradient, entering.kernel))))
        at = entering.behind(name, kernel, gradient, float(rank))
        behind = entering.behind(label, read[readers[0]], np.asarray(there), float(rank))
        walk.response = own.response
        variance = max(float(down.parameters["weight_variance"]), 1e-60)
        result = walk.matrix(
            name, change, entering, at.gradient, leaving.layer, (float(d), float(rank)), variance
        )
        walk.response = d * variance * own.response
        result = walk.norm(norm, result, at, behind)
        reads |= dict.fromkeys(readers, Read(result, behind, walk.response))
    result = through(walk, made, reads, leaving)
    if block.rope_dim:
        _joined(walk, "kv_down", (block.kv_rank, block.rope_dim))
    return result


def _joined(walk: Walk, name: str, rows: tuple[int, int]) -> None:
    """The two last notes of that name as one, of a matrix with so many rows of either kind."""
    last = [k for k, one in enumerate(walk.weights) if one.weight == walk.prefix + name][-2:]
    first, second = (walk.weights[k] for k in last)
    share = np.array(rows) / sum(rows)
    square = float(share @ (first.square, second.square))
    aligned = float((share * (first.square, second.square)) @ (first.aligned, second.aligned))
    walk.weights[last[0]] = first._replace(
        slope=first.slope + second.slope,
        square=square,
        aligned=aligned / square if square > 0 else 0.0,
    )
    del walk.weights[last[1]]


# --- experts --------------------------------------------------------------------------------------


def mixture(walk: Walk, leaf: Mixture, change: Change, entering: Site, leaving: Site) -> Change:
    """All experts as one: hidden features of each behind its gates, and one matrix to the sum."""
    *hidden, out = leaf.expert.children
    first, unit = hidden[0], hidden[-1]
    assert isinstance(out, Linear)
    assert isinstance(first, GatedLinear | Linear)
    d, experts = int(leaf.d_model), leaf.router.experts
    given = out.parameters
    width, variance = int(given["fan_in"]), max(float(given["weight_variance"]), 1e-60)
    many = experts * width
    router = LawMatrix(
        leaf.name, d, experts, leaf.router_variance, leaf.bias_variance if leaf.has_bias else None
    )
    matrices = {leaf.name: router}
    if isinstance(first, GatedLinear):
        laws, bend = first.activation, (first.shift, first.clamp)
        biases = {"gate": first.gate_bias, "ffn_in": first.bias}
        for own in ("gate", "ffn_in"):
            bias = float(biases[own]) if first.has_bias else None
            name = f"{first.prefix}{own}"
            matrices[name] = LawMatrix(name, d, many, float(getattr(first, own)), bias)
    else:
        assert isinstance(unit, Activation)
        laws, bend, entry = unit.laws, (0.0, None), first.parameters
        bias = float(entry.get("bias_variance", 0.0)) if first.has_bias else None
        matrices[first.weight] = LawMatrix(
            first.weight, d, many, float(entry["weight_variance"]), bias
        )
    head = Units(
        leaf.router,
        laws,
        width,
        isinstance(first, GatedLinear),
        leaf.inward,
        *bend,
        tuple(matrices),
    )
    reads, kernels = _from(walk, change, entering, matrices)
    received = d * variance * leaving.gradient
    made = _made(walk, leaving, head, matrices, kernels, float(many), received=received)
    gates = walk.reading.once(
        Units, leaving.index, make=lambda: head.gates(made.entering[leaf.name])
    )
    shared = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
    added = float(given.get("bias_variance", 0.0)) if out.has_bias else 0.0
    kernel = (leaving.kernel - added * shared) / (many * variance)
    at = leaving.behind("hidden", kernel, received, float(many))
    result = through(walk, made, reads, dataclasses.replace(leaving, gradient=received))

    columns = functools.partial(columns_of, made.columns)
    layer, gradient = leaving.layer, leaving.gradient
    shape = float(many), float(given["fan_out"])
    result = walk.matrix(out.weight, result, at, gradient, layer, shape, variance, columns, True)
    walk.response = many * variance * walk.response
    if out.has_bias:  # a matrix that reads gates
        at = leaving.behind("gates", shared / experts, many * gradient, float(experts))
        nothing, shape = Change.none(len(gradient)), (float(experts), shape[1])
        name = f"{out.weight}.bias"
        moved = walk.matrix(name, nothing, at, gradient, layer, shape, max(added, 1e-60))
        result = result.plus(moved, gradient)
    return routed_apart(result, gates, gradient)


def layer_scale(
    walk: Walk, leaf: LayerScale, change: Change, entering: Site, leaving: Site
) -> Change:
    """Gains whose square multiplies the branch behind this, and is no part of the signal here."""
    name, square = walk.prefix + leaf.label, float(leaf.gain) ** 2
    kernel, gradient = leaving.kernel, leaving.gradient
    result = gain_effect(
        kernel,
        gradient / square,
        walk.optimizer.rule_of(name),
        change.met(kernel),
        change.new(kernel),
        leaving.width,
        walk.optimizer.pulled,
    )
    rate = walk.entry(leaving.layer, name, walk.optimizer.factor(name), result, np.nan, 1.0)
    own, nothing = rate * result.coherent / square, 0.0 * gradient
    return change.plus(Change(own, nothing, rate * rate * result.total / square, nothing), gradient)


_FOLLOWED: dict[type, Any] = {
    LayerScale: layer_scale,
    Mixer: mixer,
    SelfAttention: attention,
    LatentHeads: latent,
    Mixture: mixture,
    GatedHeads: gated_heads,
}
for _kind, _function in _FOLLOWED.items():
    Walk.__dict__["leaf"].register(_kind, _function)
