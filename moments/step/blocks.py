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
from ..layers.recurrent.drawn import copies
from ..layers.recurrent.leaf import Mixer
from .change import Array, Change, Overlaps
from .drawn import Block, with_router_variance
from .leaves import SHARED_KEY, block_of, latent_block, mixture_block
from .rules import StepSize, gain_effect, sign_of_rows
from .sites import Site
from .walk import Walk, columns_of


class Read(NamedTuple):
    """Input of a matrix: change, site, and response to the overlaps of a stream's tokens."""

    change: Change
    at: Site
    response: Any
    overlaps: Overlaps | None


def through(walk: Walk, block: Block, reads: Mapping[str, Read], leaving: Site) -> Change:
    """The change of a block's output from those of its matrices' inputs, all its steps included."""
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
        full, drawn_gradient = walk.prefix + block.named(name), block.drawn_gradients[name]
        step, mean, square = _entrywise(walk, full, drawn_gradient, leaving)
        count = copies(block.head, name).times * drawn_gradient[0].size
        step_size = StepSize(count * mean, square)
        rate = walk.entry(layer, full, walk.optimizer.factor(full), step_size, np.nan, 1.0)
        steps[name] = -rate * step
        size = float((drawn_gradient * drawn_gradient).mean())
        follow[name] = rate * mean / size if size > 0 else 0.0
    walk.response, walk.overlaps = block.response(responses), overlaps
    change, chosen = block.propagated(changes, incoming, by_sign, steps, follow, leaving.gradient)
    for name, share in chosen.items():
        _set_chosen(walk, block.matrices[name].name, share)
    return change


def _set_chosen(walk: Walk, name: str, share: float) -> None:
    """Set `chosen` of the last recorded step of that name."""
    last = max(k for k, one in enumerate(walk.weights) if one.weight == walk.prefix + name)
    walk.weights[last] = walk.weights[last]._replace(chosen=share)


def _entrywise(walk: Walk, name: str, drawn: Array, leaving: Site) -> tuple[Array, float, float]:
    """The step of rate 1 of parameters with drawn gradients, the mean of its product with the
    gradient, and its mean square."""
    optimizer = walk.optimizer
    if optimizer.rule_of(name) == "sgd":
        step = drawn
    elif optimizer.batches is not None:
        pulled, square = optimizer.pulled(leaving.kernel * leaving.gradient)
        mean = pulled * float(np.abs(drawn).mean())
        return pulled * np.sign(drawn), mean, square
    else:
        step = drawn / np.maximum(np.abs(drawn) + optimizer.epsilon, 1e-300)
    return step, float((step * drawn).mean()), float((step * step).mean())


def drawn(walk: Walk, leaf: Any, change: Change, entering: Site, leaving: Site) -> Change:
    """The change of a leaf whose matrices all read its input, or keys and values the encoder."""
    own = memory = Read(change, entering, walk.response, walk.overlaps)
    if isinstance(leaf, CrossAttention):
        assert walk.memory is not None
        memory_change, at = walk.memory
        # keys and values respond to the overlaps of the encoder's tokens
        overlaps = None if walk.overlaps is None else Overlaps.of(at.kernel, at.width)
        response = 0.0 if overlaps is None else np.outer(overlaps.sizes, overlaps.sizes)
        memory = Read(memory_change, at, response, overlaps)
    block = block_of(leaf, walk.reading, entering, leaving, memory.at)
    reads = {name: memory if name in ("key", "value") else own for name in block.matrices}
    return through(walk, block, reads, leaving)


def latent_attention(
    walk: Walk, leaf: LatentHeads, change: Change, entering: Site, leaving: Site
) -> Change:
    """The change of latent attention: the latents' matrices and norms, then the heads."""
    block, latents = latent_block(leaf, walk.reading, entering, leaving)
    own = Read(change, entering, walk.response, walk.overlaps)
    reads = {"query": own, SHARED_KEY: own}
    for latent in latents:
        walk.response, shape = own.response, (float(leaf.heads.d_model), latent.at.width)
        gradient, layer, variance = latent.at.gradient, leaving.layer, latent.variance
        result = walk.matrix(latent.name, change, entering, gradient, layer, shape, variance)
        walk.response = shape[0] * variance * own.response
        result = walk.norm(latent.norm, result, latent.at, latent.after)
        inner = Read(result, latent.after, walk.response, own.overlaps)
        reads |= dict.fromkeys(latent.readers, inner)
    result = through(walk, block, reads, leaving)
    if SHARED_KEY in block.matrices:
        _merge(walk, "kv_down", (leaf.block.kv_rank, leaf.block.rope_dim))
    return result


def _merge(walk: Walk, name: str, rows: tuple[int, int]) -> None:
    """Merge the last two recorded steps of that name, of so many rows of one matrix each."""
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
    """The change of a mixture: gated hidden features of all experts, and one matrix to the sum."""
    block, at, out, gates = mixture_block(leaf, walk.reading, entering, leaving)
    own = Read(change, entering, walk.response, walk.overlaps)
    reads, received = dict.fromkeys(block.matrices, own), at.gradient
    result = through(walk, block, reads, dataclasses.replace(leaving, gradient=received))
    columns = functools.partial(columns_of, block.columns)
    layer, gradient = leaving.layer, leaving.gradient
    shape = float(out.fan_in), float(out.fan_out)
    result = walk.matrix(out.name, result, at, gradient, layer, shape, out.variance, columns, True)
    walk.response = shape[0] * out.variance * walk.response
    # its inputs from experts that are not chosen are 0
    _set_chosen(walk, out.name, leaf.router.chosen / leaf.router.experts)
    if out.bias is not None:  # the experts' biases are a matrix whose inputs are the gates
        experts = float(leaf.router.experts)
        shared = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
        at = leaving.inner("gates", shared / experts, shape[0] * gradient, experts)
        nothing, shape = Change.none(len(gradient)), (experts, shape[1])
        name = f"{out.name}.bias"
        moved = walk.matrix(name, nothing, at, gradient, layer, shape, max(out.bias, 1e-60))
        result = result.plus(moved, gradient)
    return with_router_variance(result, gates, gradient)


def layer_scale(
    walk: Walk, leaf: LayerScale, change: Change, entering: Site, leaving: Site
) -> Change:
    """The step of gains whose value `Residual.branch_scale` applies, so that they are 1 here."""
    name, square = walk.prefix + leaf.label, float(leaf.gain) ** 2
    kernel, gradient = leaving.kernel, leaving.gradient
    result = gain_effect(
        kernel,
        gradient / square,
        walk.optimizer.rule_of(name),
        change.updated_overlap(kernel),
        change.new(kernel),
        leaving.width,
        walk.optimizer.pulled,
    )
    rate = walk.entry(leaving.layer, name, walk.optimizer.factor(name), result, np.nan, 1.0)
    own, nothing = rate * result.coherent / square, 0.0 * gradient
    return change.plus(Change(own, nothing, rate * rate * result.total / square, nothing), gradient)


_DRAWN: dict[type, Any] = {
    LayerScale: layer_scale,
    Mixer: drawn,
    SelfAttention: drawn,
    CrossAttention: drawn,
    Product: drawn,
    LatentHeads: latent_attention,
    Mixture: mixture,
}
for _kind, _function in _DRAWN.items():
    Walk.__dict__["leaf"].register(_kind, _function)
