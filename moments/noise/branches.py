"""How a part of a layer divides into branches, each with random matrices of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..engine.bottom_to_top import BottomToTop
from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.state import Array
from ..formulas.normalization import RMSNORM
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.normalized import NormalizedAttention
from ..transfer.attention.self_attention import SelfAttention
from ..transfer.elementary import Dropout
from ..transfer.normalization import FiniteNormalization


def parts_of(layer: Layer) -> tuple[Component, ...]:
    """What follows one another in a layer."""
    return layer.body.parts if isinstance(layer.body, Chain) else (layer.body,)


def paths(component: Component) -> tuple[Chain, ...]:
    """Every way through parallel branches, as a chain of leaves: together they are the component.

    What comes before and behind the branches is in each of them.
    """
    if isinstance(component, Chain):
        found: tuple[Chain, ...] = (Chain(()),)
        for part in component.parts:
            found = tuple(Chain(one.parts + own.parts) for one in found for own in paths(part))
        return found
    if isinstance(component, Parallel):
        return tuple(path for branch in component.branches for path in paths(branch))
    return (Chain((component,)),)


def attention_of(component: Component) -> SelfAttention | None:
    """The self-attention in a branch, if there is one; see `values_normalised`."""
    for leaf in leaves(component):
        if isinstance(leaf, SelfAttention):
            return leaf
        if isinstance(leaf, NormalizedAttention):
            return values_normalised(leaf)[1]
    return None


def cross_attention_of(component: Component) -> CrossAttention | None:
    """The cross-attention in a branch, if there is one."""
    return next((leaf for leaf in leaves(component) if isinstance(leaf, CrossAttention)), None)


def values_normalised(leaf: NormalizedAttention) -> tuple[FiniteNormalization, SelfAttention]:
    """Tokens of unit norm and attention with values of unit variance, which `leaf` amounts to."""
    own = leaf.attention
    unit = FiniteNormalization(RMSNORM, own.label, own.norm_epsilon, centres=False)
    bias = own.value_bias / (own.d_model * own.value)
    return unit, dataclasses.replace(own, value=1 / own.d_model, value_bias=bias)


def leaves(component: Component) -> tuple[Component, ...]:
    """The leaves of a part, in the order of the forward pass."""
    inner: tuple[Component, ...]
    if isinstance(component, Chain):
        inner = component.parts
    elif isinstance(component, Parallel):
        inner = component.branches
    elif isinstance(component, Residual):
        inner = (component.branch,)
    elif isinstance(component, BottomToTop):
        inner = (component.attention, component.norm, component.ffn)
    else:
        return (component,)
    return tuple(leaf for part in inner for leaf in leaves(part))


def last_matrix(path: Sequence[Component]) -> int:
    """Index of a path's last leaf but dropout, whose masks, fresh for every token, average out."""
    return max(i for i, leaf in enumerate(path) if not isinstance(leaf, Dropout))


def cross_back_kappa(attention: CrossAttention, memory_len: int) -> Array:
    """d_model times the relative variance of what queries of a memory send back, squared.

    Behind W_q, 2 over d_model, stand in each head W_k and what the output projection sent, 2 over
    d_head each, and M W_v g, M the kernel over features of the memory's tokens around their mean,
    all but of rank r = memory_len - 1: 2/r + 2/memory_width.
    """
    rank = 1 / max(memory_len - 1, 1) + 1 / attention.memory_width
    by_head = 2 * (2 / attention.d_head + rank) / attention.heads
    return 2.0 + attention.d_model * by_head
