"""Squared gradient norms of the weights and biases that project tokens to queries, keys, values.

dW = sum_i x_i (dq_i)^T and the query path's gradient is W dq_i, so that E|dW|^2 = d_model
sum_ij E[x_i x_j] E[dx_i dx_j] / (variance of W); for the keys alike. Of a bias, db = sum_i dq_i.

Both hold the overlaps o_jl = x_j.x_l/d twice: with rows' Jacobians J_i = diag(a_i) - a_i a_i^T,

    sum_ii' o_ii' G_ii' sum_jl o_jl (J_i o J_i')_jl.

The query path's kernel averages what is summed over j and l, where o_jl fluctuates against itself
(`overlap`); the key path's kernel is what stands beside o_jl, which is averaged here:
Cov(o_ab, o_cd) = nu (C_ac C_bd + C_ad C_bc) adds to it what it adds to the query path,
nu tr(J_i C) tr(J_i' C), L nu as much as the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .logits import positive
from .state import Array, Kernel, Signal


def projection_gradients(
    leaf: Any,
    signal: Signal,
    mixed: Kernel,
    received: Kernel,
    query: Kernel,
    key: Kernel,
    tilt: Kernel,
    squares: Array,
) -> dict[str, Array]:
    """Expected squared gradient norms of the three projections and of their biases.

    Args:
        leaf: a `SelfAttention`.
        signal: the tokens.
        mixed: second moments per feature of sum_j a_ij x_j.
        received: gradient's kernel at the heads.
        query, key: what the two paths send back to the tokens.
        tilt: what the query path gains per unit of the variance of two tokens' overlap.
        squares: E sum_j a_ij^2.
    """
    size, length, tokens = leaf.d_model, signal.seq_len, signal.second_moment()
    width, weight = leaf.heads * leaf.d_head, _weights(leaf)
    grown = overlap_gradients(leaf, signal, tilt)
    norms = {
        "query": size * (tokens * query).total(length) * weight["query"],
        "key": size * (tokens * key).total(length) * weight["key"] + grown["key"] / size,
        "value": size * width * (mixed * received).total(length),
    }
    if leaf.has_bias:
        ones = received.with_diagonal(
            received.diagonal * (1 + leaf.drop_prob / (1 - leaf.drop_prob) * squares)
        )
        # A shift of all keys moves no softmax, unless positions turn it or a norm takes it up.
        moved = leaf.rotary is not None or leaf.qk_norm is not None
        biases = {
            "query": query.total(length) * weight["query"],
            "key": np.maximum(key.total(length), 0.0) * weight["key"] if moved else 0.0,
            "value": width * ones.total(length),
        }
        norms |= {f"{name}.bias": biases[name] for name in biased(leaf.has_bias)}
    return norms | _gains(leaf, norms)


def biased(given: bool | tuple[str, ...]) -> tuple[str, ...]:
    """Names of the projections that have a bias."""
    if isinstance(given, tuple):
        return given
    return ("query", "key", "value") if given else ()


def overlap_gradients(leaf: Any, signal: Signal, tilt: Kernel) -> dict[str, Array]:
    """What queries' and keys' squared gradient norms gain per unit of the overlaps' variance."""
    weight = _weights(leaf)
    total = leaf.d_model * (signal.second_moment() * tilt).total(signal.seq_len)
    grown = {name: total * weight[name] for name in ("query", "key")}
    grown |= _gains(leaf, grown)
    if "query" in biased(leaf.has_bias):
        grown["query.bias"] = tilt.total(signal.seq_len) * weight["query"]
    return grown


def _gains(leaf: Any, norms: dict[str, Array]) -> dict[str, Array]:
    """Of the gains of normalised queries and keys, from what their projections have.

    g_q = g_n (1 - 1/d_head) / rms(q) and dgain = sum n g_n, so that with n = q / rms(q)
    E|dgain|^2 = d_model sum E[x x'] E[g g'] = Var(W) E|dW|^2, radial parts added.
    """
    if leaf.qk_norm is None or not leaf.norm_affine:
        return {}
    tangent = 1 - 1 / leaf.d_head
    return {
        f"{name}.norm.gain": norms[name] * getattr(leaf, name) / tangent
        for name in ("query", "key")
    }


def _weights(leaf: Any) -> dict[str, Array]:
    """What a path's kernel is times for its weight's gradient: 1 over the weight's variance, and
    nothing where the other of the two is without weights and without a bias."""
    return inverse_variances(leaf, leaf.d_model, leaf.d_model)


def inverse_variances(leaf: Any, asking: Any, asked: Any) -> dict[str, Array]:
    """As `_weights`, for queries and keys of tokens of these widths."""
    query = positive(leaf.query, leaf.query_bias / asking)
    key = positive(leaf.key, leaf.key_bias / asked)
    there = (np.add(leaf.query, leaf.query_bias) > 0, np.add(leaf.key, leaf.key_bias) > 0)
    return {"query": there[1] / query, "key": there[0] / key}
