"""A step's change through blocks that are drawn (`drawn`): attention, recurrences and experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..layers.attention.latent import LatentHeads
from ..layers.attention.self_attention import CrossAttention, SelfAttention
from ..layers.elementary import LayerScale
from ..layers.experts.mixture import Mixture
from ..layers.product import Product
from ..layers.recurrent.leaf import Mixer
from .change import Array, Change, Overlaps
from .drawn import Block, copies, with_router_variance
from .leaves import SHARED_KEY, block_of, latent_block, mixture_block
from .rules import StepSize, gain_effect, sign_of_rows
from .sites import Site
from .walk import Walk, columns_of


class Read(NamedTuple):
    """What a matrix of a block reads: its change, the site, how it follows the overlaps of the
    stream's tokens, and those."""

    change: Change
    at: Site
    response: Any
    overlaps: Overlaps | None


def through(walk: Walk, block: Block, reads: Mapping[str, Read], leaving: Site) -> Change:
    """The change behind a block whose matrices read that, all steps in it included."""
    changes, incoming, by_sign, responses = {}, {}, {}, {}
    layer, overlaps = leaving.layer, walk.overlaps
    for name, matrix in block.matrices.items():
        change, at, walk.response, walk.overlaps = reads[name]
        gradient, shape = block.gradients[name], (float(matrix.fan_in), float(matrix.fan_out))
        signs = functools.partial(sign_of_rows, delta=block.rows(name))
        variance = max(matrix.variance, 1e-60)
        result = walk.matrix(matrix.name, change, at, gradient, layer, shape, variance, signs)
        if matrix.bias is not None:
            result = walk.bias(f"{matrix.name}.bias", result, gradient, shape[1], layer)
        changes[name] = result
        incoming[name] = matrix.fan_in * matrix.variance * change.coherent
        if walk.optimizer.rule_of(walk.prefix + matrix.name) == "sign":
            by_sign[name] = at.kernel
        responses[name] = matrix.fan_in * matrix.variance * walk.response
    steps, follow = {}, {}
    for name in block.draws.own:
        full, sent = walk.prefix + block.named(name), block.drawn_gradients[name]
        move, mean, square = _entrywise(walk, full, sent, leaving)
        count = copies(block.head, name).times * sent[0].size
        note = StepSize(count * mean, square)
        rate = walk.entry(layer, full, walk.optimizer.factor(full), note, np.nan, 1.0)
        steps[name] = -rate * move
        size = float((sent * sent).mean())
        follow[name] = rate * mean / size if size > 0 else 0.0
    walk.response, walk.overlaps = block.response(responses), overlaps
    change, met = block.propagated(changes, incoming, by_sign, steps, follow, leaving.gradient)
    for name, share in met.items():
        _at_chosen(walk, block.matrices[name].name, share)
    return change


def _at_chosen(walk: Walk, name: str, share: float) -> None:
    """Of the last note of that name."""
    last = max(k for k, one in enumerate(walk.weights) if one.weight == walk.prefix + name)
    walk.weights[last] = walk.weights[last]._replace(chosen=share)


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


def drawn(walk: Walk, leaf: Any, change: Change, entering: Site, leaving: Site) -> Change:
    """Behind a leaf whose matrices read what enters, or an encoder's tokens."""
    own = memory = Read(change, entering, walk.response, walk.overlaps)
    if isinstance(leaf, CrossAttention):
        assert walk.memory is not None
        there, at = walk.memory
        # keys and values follow the scatter of the tokens that they read
        overlaps = None if walk.overlaps is None else Overlaps.of(at.kernel, at.width)
        response = 0.0 if overlaps is None else np.outer(overlaps.sizes, overlaps.sizes)
        memory = Read(there, at, response, overlaps)
    block = block_of(leaf, walk.reading, entering, leaving, memory.at)
    reads = {name: memory if name in ("key", "value") else own for name in block.matrices}
    return through(walk, block, reads, leaving)


def latent(walk: Walk, leaf: LatentHeads, change: Change, entering: Site, leaving: Site) -> Change:
    """The latents' matrices and norms, then heads that read them."""
    block, latents = latent_block(leaf, walk.reading, entering, leaving)
    own = Read(change, entering, walk.response, walk.overlaps)
    reads = {"query": own, SHARED_KEY: own}
    for one in latents:
        walk.response, shape = own.response, (float(leaf.attention.d_model), one.at.width)
        gradient, layer = one.at.gradient, leaving.layer
        result = walk.matrix(one.name, change, entering, gradient, layer, shape, one.variance)
        walk.response = shape[0] * one.variance * own.response
        result = walk.norm(one.norm, result, one.at, one.behind)
        inner = Read(result, one.behind, walk.response, own.overlaps)
        reads |= dict.fromkeys(one.readers, inner)
    result = through(walk, block, reads, leaving)
    if SHARED_KEY in block.matrices:
        _joined(walk, "kv_down", (leaf.block.kv_rank, leaf.block.rope_dim))
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
    block, at, out, gates = mixture_block(leaf, walk.reading, entering, leaving)
    own = Read(change, entering, walk.response, walk.overlaps)
    reads, received = dict.fromkeys(block.matrices, own), at.gradient
    result = through(walk, block, reads, dataclasses.replace(leaving, gradient=received))
    columns = functools.partial(columns_of, block.columns)
    layer, gradient = leaving.layer, leaving.gradient
    shape = float(out.fan_in), float(out.fan_out)
    result = walk.matrix(out.name, result, at, gradient, layer, shape, out.variance, columns, True)
    walk.response = shape[0] * out.variance * walk.response
    # what it reads of experts that a token does not go to is 0
    _at_chosen(walk, out.name, leaf.router.chosen / leaf.router.experts)
    if out.bias is not None:  # a matrix that reads gates
        experts = float(leaf.router.experts)
        shared = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
        at = leaving.behind("gates", shared / experts, shape[0] * gradient, experts)
        nothing, shape = Change.none(len(gradient)), (experts, shape[1])
        name = f"{out.name}.bias"
        moved = walk.matrix(name, nothing, at, gradient, layer, shape, max(out.bias, 1e-60))
        result = result.plus(moved, gradient)
    return with_router_variance(result, gates, gradient)


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
    Mixer: drawn,
    SelfAttention: drawn,
    CrossAttention: drawn,
    Product: drawn,
    LatentHeads: latent,
    Mixture: mixture,
}
for _kind, _function in _FOLLOWED.items():
    Walk.__dict__["leaf"].register(_kind, _function)
