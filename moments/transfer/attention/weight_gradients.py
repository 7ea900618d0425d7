"""Squared gradient norms of the weights and biases that project tokens to queries, keys, values.

dW = sum_i x_i (dq_i)^T and the query path's gradient is W dq_i, so that E|dW|^2 = d_model
sum_ij E[x_i x_j] E[dx_i dx_j] / (variance of W); for the keys alike. Of a bias, db = sum_i dq_i.

Both hold the overlaps o_jl = x_j.x_l/d twice: with rows' Jacobians J_i = diag(a_i) - a_i a_i^T,

    sum_ii' o_ii' G_ii' sum_jl o_jl (J_i o J_i')_jl.

The query path's kernel averages what is summed over j and l, where o_jl fluctuates against itself
(`overlap`); the key path's kernel is what stands beside o_jl, which is averaged here:
Cov(o_ab, o_cd) = nu (C_ac C_bd + C_ad C_bc) adds to it what it adds to the query path,
nu tr(J_i C) tr(J_i' C), L nu as much as the rest.

Where the tokens that ask are others than those attended to, o_ii' is theirs and o_jl is not: only
the latter is held twice, and all else is the same.

Gains of normalised queries n = q/rms(q), of D free dimensions of d_head, receive sum n g, g what
the logits send. A rotation of a head's features moves neither, over which four vectors' product
averages to its three pairings over D (D + 2), so that

    E sum_k n_ik n_i'k g_ik g_i'k = D/(d_head (D + 2))
        E[(n_i.n_i')(g_i.g_i') + (n_i.g_i)(n_i'.g_i') + (n_i.g_i')(n_i'.g_i)].

The last two are 2/D of the first where g looks anywhere: then the sum is N Q, of the kernel of
normalised queries and the query path there, without the projection and the 1/rms that stand between
g and dq. Two terms are of the order of 1/D beside that, but of L^2 pairs whose N may be 0. A head's
own n_i.n_i' varies about its mean by (1 - N^2)^2/D of its square, which the rows that it makes
alike answer by dQ/dN. And g_i has a part along n_i', on which row i' depends: with H the second
derivatives of a row, it is sum_jql H_jql H'_jql as well, their order being free. Hence

    E|dgain|^2 = d_model sum_ii' [N Q + (2/D)(1 - N^2)^2 dQ/dN].

Rows of logit variance theta and E sum a^2 = S have dQ/dN = theta (1 - 2 p) Q, p = 1/(1 + e^(theta
(1 - N)) (1 - S)/S), as `response.AttentionResponse`. The keys' gains multiply the same features of
the same logits, and receive the same; rotary positions turn features into each other between the
two, which leaves the mean.

See docs/theory/attention.md, Weight gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...engine.state import Array, Kernel, Signal, ratio_or_zero
from .logits import LogitLaw, positive, through


class ProjectionPaths(NamedTuple):
    """What attention sends back, per the kernels of its queries and keys (`logits.Side`).

    Attributes:
        query, key: through queries and keys.
        overlap_path: what `query` gains per unit of the variance of two tokens' overlap.
        repeated: the part of `query` that comes of tokens that repeat within cells of positions,
            and that `key`, which holds means over cells, does not know; None: nothing.
    """

    query: Kernel
    key: Kernel
    overlap_path: Kernel
    repeated: Kernel | None = None


class Rows(NamedTuple):
    """Of every row of attention: E sum a^2, and its logits' variance."""

    squares: Array
    logit_variance: Array


def of_rows(output: Signal, shape: tuple[int, ...] = ()) -> Rows:
    """What an attention's output tells of its rows, by token in that shape."""
    assert output.diagnostics is not None
    found = (np.asarray(output.diagnostics[name]) for name in ("square_sum", "logit_variance"))
    return Rows(*(one.reshape(shape) if shape else one for one in found))


def projection_gradients(
    leaf: Any,
    law: LogitLaw,
    signal: Signal,
    memory: Signal,
    mixed: Kernel,
    received: Kernel,
    paths: ProjectionPaths,
    rows: Rows,
) -> dict[str, Array]:
    """Expected squared gradient norms of the three projections, of their biases and norms.

    Args:
        leaf: a `SelfAttention` or `CrossAttention`.
        law: of its logits.
        signal, memory: the tokens that ask, and those attended to.
        mixed: second moments per feature of sum_j a_ij y_j over the latter.
        received: gradient's kernel at the heads.
        paths: of it.
        rows: of the attention.
    """
    width, length = leaf.heads * leaf.d_head, signal.seq_len
    grown = _overlap_gradients(leaf, law, signal, paths.overlap_path)
    found: dict[str, Array] = {}
    sides = (("query", signal, paths.query), ("key", memory, paths.key))
    inverse = _inverse_variances(leaf)
    for side, tokens, path in sides:
        sent = _of_side(leaf, law, side, tokens, path)
        found |= {name: norm * inverse[side] for name, norm in sent.items()}
    found["value"] = leaf.memory_width * width * (mixed * received).total(length)
    found["key"] = found["key"] + grown["key"] / leaf.memory_width
    if paths.repeated is not None:
        # The same sum of overlaps of queries times overlaps of keys, seen from the keys' side.
        of_query = _of_side(leaf, law, "query", signal, paths.repeated)["query"]
        found["key"] = found["key"] + of_query * inverse["key"]
    if leaf.qk_norm is not None and leaf.norm_affine:
        # E (tr J)^2 of two rows, which the overlaps' variance stands beside, is that of any two.
        path = paths.query + paths.overlap_path.scaled(-1 / leaf.memory_width)
        within = _within_heads(law.queries.kernel, path, rows).scaled(2 / _freedom(leaf))
        gain = _of_gain(leaf, law, law.queries.kernel * paths.query + within, length)
        found["query.norm.gain"] = found["key.norm.gain"] = gain
    if "value" in biased(leaf.has_bias):
        dropped = leaf.drop_prob / (1 - leaf.drop_prob)
        ones = received.with_diagonal(received.diagonal * (1 + dropped * rows.squares))
        found["value.bias"] = width * ones.total(length)
    if "key.bias" in found:
        moved = _moves_with_keys(leaf)
        found["key.bias"] = np.maximum(found["key.bias"], 0.0) if moved else 0.0
    return _prefixed(leaf, dict(sorted(found.items(), key=lambda one: one[0].count("."))))


def biased(given: bool | tuple[str, ...]) -> tuple[str, ...]:
    """Names of the projections that have a bias."""
    if isinstance(given, tuple):
        return given
    return ("query", "key", "value") if given else ()


def overlap_gradients(
    leaf: Any, law: LogitLaw, signal: Signal, overlap_path: Kernel
) -> dict[str, Array]:
    """What queries' and keys' squared gradient norms gain per unit of the overlaps' variance."""
    return _prefixed(leaf, _overlap_gradients(leaf, law, signal, overlap_path))


def _overlap_gradients(
    leaf: Any, law: LogitLaw, signal: Signal, overlap_path: Kernel
) -> dict[str, Array]:
    inverse = _inverse_variances(leaf)
    of_query = _of_side(leaf, law, "query", signal, overlap_path)
    grown = {name: norm * inverse["query"] for name, norm in of_query.items()}
    # The same sum of overlaps of queries times overlaps of keys, seen from the keys' side.
    grown["key"] = of_query["query"] * inverse["key"]
    if leaf.qk_norm is not None and leaf.norm_affine:
        gain = _of_gain(leaf, law, law.queries.kernel * overlap_path, signal.seq_len)
        grown["query.norm.gain"] = grown["key.norm.gain"] = gain
    return grown


def _of_gain(leaf: Any, law: LogitLaw, product: Kernel, length: int) -> Array:
    share = _freedom(leaf) / leaf.d_head
    return leaf.memory_width * share * law.gradient_scale * product.total(length)


def _freedom(leaf: Any) -> Any:
    return leaf.d_head - 1.0 if leaf.qk_norm == "layernorm" else leaf.d_head


def _within_heads(kernel: Kernel, path: Kernel, rows: Rows) -> Kernel:
    """(1 - N^2)^2 dQ/dN of different rows."""
    own, other = kernel.over_tokens(kernel.diagonal)
    size = np.sqrt(own * other)
    cosine = kernel.pairs / size
    theta, square = (
        np.sqrt(np.multiply(*kernel.over_tokens(np.asarray(of))))
        for of in (rows.logit_variance, rows.squares)
    )
    # p of the own key of a row beside the others'
    odds = ratio_or_zero(square, np.maximum(1 - square, 0.0)) * np.exp((cosine - 1) * theta)
    slope = theta * (1 - odds) / (1 + odds)
    pairs = size * (1 - cosine * cosine) ** 2 * slope * path.pairs
    return Kernel.joined(0.0 * kernel.diagonal, pairs, kernel.resolved)


def _of_side(leaf: Any, law: LogitLaw, name: str, tokens: Signal, path: Kernel) -> dict[str, Array]:
    """Of one projection, its bias and the gain behind it, from what a path sends, times the
    variance of the projection's entries."""
    side = law.queries if name == "query" else law.keys
    kernel, length = tokens.second_moment(), tokens.seq_len
    if name == "key" and not _moves_with_keys(leaf):
        kernel = kernel.without_common()
    sent, size = through(path, side, law.gradient_scale), leaf.memory_width
    found = {name: size * (kernel * sent).total(length)}
    if name in biased(leaf.has_bias):
        found[f"{name}.bias"] = size / tokens.width * sent.total(length)
    return found


def _moves_with_keys(leaf: Any) -> bool:
    """A shift of all keys moves no softmax, unless positions turn it or a norm takes it up: what
    all tokens share meets rows that sum to 0."""
    return leaf.rotary is not None or leaf.qk_norm is not None


def _inverse_variances(leaf: Any) -> dict[str, Array]:
    """1 over the variance of a projection's entries, in the limit of small ones; 0 where the other
    of the two is without weights and without a bias, so that nothing reaches this one."""
    query = positive(leaf.query, leaf.query_bias / leaf.d_model)
    key = positive(leaf.key, leaf.key_bias / leaf.memory_width)
    there = (np.add(leaf.query, leaf.query_bias) > 0, np.add(leaf.key, leaf.key_bias) > 0)
    return {"query": there[1] / query, "key": there[0] / key}


def _prefixed(leaf: Any, norms: dict[str, Array]) -> dict[str, Array]:
    return {f"{leaf.prefix}{name}": norm for name, norm in norms.items()}
