"""Projections: from the kernels of tokens to the covariance of logits, and back to weights.

Queries q = W_q x + b and keys k = W_k y + c are Gaussian given the tokens, with kernels
d s_q C + b_q and d s_k C' + b_k, and logits q.k/(temperature sqrt(d_head)). Normalised queries and
keys and a soft cap may stand between: the logits then are read as the Gaussian ones of `LogitLaw`.
Back at the weights, dW = sum_i x_i (dq_i)^T and the query path's gradient is W dq_i, so that
E|dW|^2 = d_model sum_ij E[x_i x_j] E[dx_i dx_j] / (variance of W); for the keys alike. Of a bias,
db = sum_i dq_i.

See docs/theory/attention.md, What stands between tokens and logits, and Weight gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...engine.classes import ClassRows
from ...engine.state import Array, Kernel, Signal, ratio_or_zero
from ...errors import domain_error
from ...formulas.algebra import as_number, is_number
from .kernels.exact_rows import THETA_PEAKED

CAP_NOTED = 0.3
"""Logit variance over the square of its soft cap beyond which a note says so."""

TABLE_NOTED = 0.1
"""Variance of relative biases beyond which a note says so: how they spread attention is missing."""

FAINTEST = 1e-9
"""What stands for no weight beside a bias: products of it with the rest keep seven digits."""

LOGIT_VARIANCE_MAX = THETA_PEAKED
"""Logit variance, averaged over a kernel's tokens, beyond which that variance stands in."""

LOGIT_VARIANCE_NOTED = 12.0
"""Logit variance beyond which a note says so."""


def variance_notes(logit_variance: Array) -> tuple[str, ...]:
    """Where the logits' variance leaves what the laws were measured at."""
    largest = as_number(np.max(logit_variance))
    if largest <= LOGIT_VARIANCE_NOTED:
        return ()
    text = (
        f"the logit variance {largest:.3g} is beyond {LOGIT_VARIANCE_NOTED:g}: attention all but "
        "picks one token, by the law of the largest logits (at logit variances of 16 to 94 what a "
        "layer sends back was measured 1 to 9 % low at d_model 512 and more, 3 to 15 % at 256, 11 "
        "to 35 % at 64, tokens alike; off by up to a factor of 1.6 where their variances differ by "
        "10)"
    )
    if largest > LOGIT_VARIANCE_MAX:
        lost = (largest / LOGIT_VARIANCE_MAX) ** 0.5
        text += (
            f"; beyond {LOGIT_VARIANCE_MAX:g} that variance stands in, and what queries and keys "
            f"send back is low by up to {lost:.2g} in each such layer"
        )
    return (text,)


class Side(NamedTuple):
    """Queries or keys.

    Attributes:
        kernel: on the scale of the tokens' kernel, or of unit variance behind a normalisation.
        gain: what multiplies the gradient of the logits' covariance in `kernel`, entry by entry,
            to give the gradient at the tokens; None: 1.
        scale: variance per unit of `kernel`.
    """

    kernel: Kernel
    gain: Kernel | None
    scale: Any


class LogitLaw(NamedTuple):
    """Covariance of logits (i, j) and (k, l): scale times queries_ik times keys_jl.

    Attributes:
        queries, keys: of the layer.
        scale: that of the Gaussian logits which stand for the actual ones.
        gradient_scale: actual scale over it, which multiplies gradients through queries and keys.
        head_freedom: d_head where the queries' norms fluctuate with it; infinite where they do not.
        notes: what made this less certain.
    """

    queries: Side
    keys: Side
    scale: Any
    gradient_scale: Any
    head_freedom: Any
    notes: tuple[str, ...]


class Paths(NamedTuple):
    """Gradient kernels at the tokens by path, before what stands between tokens and logits.

    Attributes:
        value, query, key: through those.
        cross: correlation of the value and key paths.
    """

    value: Kernel
    query: Kernel
    key: Kernel
    cross: Kernel


def attention_diagnostics(
    logit_variance: Array, square: Array, entropy: Array, keys: Array
) -> dict[str, Array]:
    """What users ask about attention; distance is E sum_j (a_ij - 1/n)^2 over n keys."""
    return {
        "logit_variance": logit_variance,
        "square_sum": square,
        "distance_to_uniform": square - 1 / keys,
        "entropy": entropy,
    }


class RowMoments(NamedTuple):
    """Of every row of attention: E sum a^2, and its logits' variance."""

    squares: Array
    logit_variance: Array


def of_rows(output: Signal, shape: tuple[int, ...] = ()) -> RowMoments:
    """What an attention's output tells of its rows, by token in that shape."""
    assert output.diagnostics is not None
    found = (np.asarray(output.diagnostics[name]) for name in ("square_sum", "logit_variance"))
    return RowMoments(*(one.reshape(shape) if shape else one for one in found))


def _side(tokens: Kernel, gain: Any, bias: Any, norm: str | None, epsilon: Any, width: Any) -> Side:
    shift = bias / gain
    kernel = tokens
    if np.any(shift):
        one, two = tokens.lift(shift)
        kernel = Kernel(tokens.diagonal + one, tokens.pairs + two, tokens.resolved)
    if norm is None:
        return Side(kernel, None, gain)
    first, second = kernel.over_tokens(kernel.diagonal)
    correlation = np.clip(ratio_or_zero(kernel.pairs, np.sqrt(first * second)), -1.0, 1.0)
    inverse = ratio_or_zero(gain + 0.0 * kernel.diagonal, kernel.diagonal * gain + epsilon)
    shrunk = kernel.diagonal * inverse
    left, right = kernel.over_tokens(np.sqrt(shrunk))
    square = correlation**2
    pairs = left * right * correlation * (1.0 - (1.0 - square) / (2.0 * width))
    directions = Kernel.joined(shrunk, pairs, kernel.resolved)
    left, right = kernel.over_tokens(np.sqrt(inverse))
    back = left * right * np.maximum(1.0 + (1.5 * square - 0.5) / width, 0.0)
    own = inverse * (1.0 + 1.0 / width)
    returned = Kernel.joined(own, back, kernel.resolved)
    # On the scale of the largest: epsilon may leave next to nothing.
    largest = shrunk.max(-1) if kernel.resolved else shrunk
    one = ratio_or_zero(1.0, largest)
    return Side(directions.scaled(one), returned.scaled(one), largest)


def capped(own: Any, shared: Any, cap: float, keys: float) -> tuple[Any, Any]:
    """Of logits f = c tanh(s/c): what stands for the variance of s within a row, over that, and
    E f'^2 where attention looks. See docs/theory/attention.md.

    Args:
        own, shared: variance of the logits within a row, and of what all of a row share.
        cap: c.
        keys: how many a row has.
    """
    nodes, weights = _deviates(60)
    others, shares = _deviates(12)
    own, shared = np.maximum(own, 1e-6), np.maximum(shared, 0.0)
    varies = np.multiply.outer(np.sqrt(own), nodes)
    tilt = _tilt(own, np.log(np.exp(cap * np.tanh(varies / cap) - cap) @ weights) + cap, cap, keys)
    moved = np.multiply.outer(np.sqrt(shared), others)[..., None]
    bent = np.tanh((varies[..., None, :] + moved) / cap)
    logits = tilt[..., None, None] * cap * bent
    largest = logits.max(-1, keepdims=True)
    once, twice = np.exp(logits - largest) @ weights, np.exp(2 * (logits - largest)) * weights
    total = twice.sum(-1)
    found = np.log(total) - 2 * np.log(once)
    slopes = (twice * (1 - bent * bent) ** 2).sum(-1) / total
    weighed = np.exp(found) * shares
    size = weighed.sum(-1)
    return np.log(size) / (own * tilt**2), (weighed * slopes).sum(-1) / size


def _tilt(own: Any, others: Any, cap: float, keys: float) -> Array:
    """t: a^2 picks keys whose logits s are 2 t own above others' mean, t = 1 - E a^3/E a^2; there
    a is the key's share beside the others, whose log mean weight is given. By bisection."""
    low, high = np.zeros(np.shape(own)), np.ones(np.shape(own))
    rest = np.log(max(keys - 1.0, 1.0)) + others
    for _ in range(30):
        half = 0.5 * (low + high)
        share = 1 / (1 + np.exp(np.clip(rest - cap * np.tanh(2 * half * own / cap), -700, 700)))
        less = half + share < 1
        low, high = np.where(less, half, low), np.where(less, high, half)
    return np.asarray(np.maximum(low, 1e-3))


def _deviates(count: int) -> tuple[Array, Array]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


def logit_law(
    leaf: Any,
    query_tokens: Kernel,
    key_tokens: Kernel,
    widths: tuple[Any, Any],
    length: float = np.inf,
) -> LogitLaw:
    """The law of the logits of an attention leaf.

    Args:
        leaf: with the fields of `SelfAttention` that name variances and norms.
        query_tokens, key_tokens: kernels of the tokens behind queries and keys.
        widths: of those tokens.
        length: how many keys there are.
    """
    norm, d_head = leaf.qk_norm, leaf.d_head
    if norm is not None and leaf.norm_epsilon == 0.0:
        for name in ("query", "key"):
            size = np.add(getattr(leaf, name), getattr(leaf, f"{name}_bias"))
            if not np.all(size > 0):
                allowed = "above 0 where queries and keys are normalised without norm_epsilon"
                remedy = "zeros have no direction"
                raise domain_error(name, getattr(leaf, name), allowed, remedy)
    width = d_head - 1.0 if norm == "layernorm" else 1.0 * d_head
    gains = (
        widths[0] * positive(leaf.query, leaf.query_bias / widths[0]),
        widths[1] * positive(leaf.key, leaf.key_bias / widths[1]),
    )
    queries = _side(query_tokens, gains[0], leaf.query_bias, norm, leaf.norm_epsilon, width)
    keys = _side(key_tokens, gains[1], leaf.key_bias, norm, leaf.norm_epsilon, width)
    scale = queries.scale * keys.scale / leaf.temperature**2
    gradient_scale: Any = 1.0
    if norm is not None:
        scale = scale * d_head / width
        variance, pairs = keys.kernel.mean_diagonal(), keys.kernel.mean_pairs()
        theta = scale * queries.kernel.mean_diagonal() * (variance - pairs)
        unshared = (variance - pairs) / variance
        gradient_scale = np.exp(3.5 * unshared**2 * theta / (width + 2.0))
        scale = scale / gradient_scale
    notes: tuple[str, ...] = ()
    if leaf.logit_softcap is not None:
        seen = (length + 1) / 2 if getattr(leaf, "causal", False) else length
        size = scale * queries.kernel.mean_diagonal()
        total, shared = size * keys.kernel.mean_diagonal(), size * keys.kernel.mean_pairs()
        shrunk, slope = capped(total - shared, shared, leaf.logit_softcap, seen)
        scale = scale * shrunk
        gradient_scale = gradient_scale * slope / shrunk
        share = float(np.max(total)) / leaf.logit_softcap**2
        if share > CAP_NOTED:
            notes = (
                f"the logits' variance is {share:.2g} of their soft cap squared: gradients of "
                "queries and keys were simulated up to a quarter larger",
            )
    table = getattr(leaf, "relative_bias", None)
    if table is not None and table.variance > TABLE_NOTED:
        notes += (
            f"relative biases of variance {table.variance:.2g} spread attention: gradients of "
            "queries and keys were simulated up to 7 % larger at .1 and 65 % at 1, the table's own "
            "up to 8 % and 55 %",
        )
    return LogitLaw(
        queries, keys, scale, gradient_scale, np.inf if norm is not None else d_head, notes
    )


def by_distance(leaf: Any) -> bool:
    """Whether logits know how far apart tokens are."""
    table = leaf.relative_bias
    return leaf.rotary is not None or (table is not None and table.variance > 0.0)


def positive(variance: Any, least: Any = 0.0) -> Any:
    """A projection of zeros still receives a gradient: the limit of small variances.

    With a bias that limit is taken at `FAINTEST` of `least`, the bias's share of a weight.
    """
    floor = np.maximum(1e-60, FAINTEST * least) if np.ndim(least) else max(1e-60, FAINTEST * least)
    return np.maximum(variance, floor) if np.ndim(variance) else max(variance, floor)


def through(path: Kernel, side: Side, gradient_scale: Array) -> Kernel:
    """A path's kernel at the tokens, from that in the kernel of their queries or keys."""
    moved = path if side.gain is None else path * side.gain
    if is_number(gradient_scale) and gradient_scale == 1.0:
        return moved
    return moved.scaled(gradient_scale)


def normalised_cross(
    law: LogitLaw, rows: RowMoments, attention: Any, width: Any, received: Array, plain: Paths
) -> Kernel:
    """Correlation of the value and key paths of normalised keys.

    Args:
        law: of the logits.
        rows: of the attention, in the shape of the queries.
        attention: mean weights, an array or `ClassRows`; None: uniform.
        width: of the tokens attended to.
        received: variance of the gradient at every row.
        plain: the paths of keys that are not normalised.
    """
    queries, keys = law.queries.kernel, law.keys.kernel
    total = queries.scaled(law.scale * keys.mean_diagonal()).diagonal
    apart = np.clip(ratio_or_zero(rows.logit_variance, total), 0.0, 1.0)
    several = np.maximum((1 - rows.squares) * (1 - 2 * rows.squares), 0.0)
    lost = 2 / width * rows.logit_variance * apart * several
    value = plain.value
    if attention is None:
        value = value.scaled(queries.average(lost))
    else:
        one, two = (_of_keys(attention, received, lost, power, value) for power in (2, 1))
        first, second = value.over_tokens(two)
        value = value.weighted(one, (first + second) / 2)
    return plain.cross.scaled(1 - queries.average(apart)) - value


def _of_keys(attention: Any, received: Array, values: Array, power: int, keys: Kernel) -> Array:
    """A number per row at every one of `keys`: its average over the rows, by powers of their
    weights."""
    sizes, sums = np.asarray(received), np.asarray(received * values)
    if not isinstance(attention, ClassRows):
        return _averaged(attention**power, sizes, sums)
    sight, classes = attention.sight, keys.classes
    assert classes is not None
    met = sight.later_own if power == 2 else sight.rows
    weights = attention.weights**power * np.swapaxes(met, -1, -2)
    of_one = (classes.in_one(one + 0.0 * keys.diagonal) for one in (sizes, sums))
    return classes.repeated(_averaged(weights, *of_one))


def _averaged(weights: Array, sizes: Array, sums: Array) -> Array:
    total, size = ((weights * one[..., None]).sum(-2) for one in (sums, sizes))
    return ratio_or_zero(total, size)


# --- gradients of the projections -----------------------------------------------------------------


class ProjectionPaths(NamedTuple):
    """What attention sends back, per the kernels of its queries and keys (`Side`).

    Attributes:
        query, key: through queries and keys.
        overlap_path: what `query` gains per unit of the variance of two tokens' overlap.
    """

    query: Kernel
    key: Kernel
    overlap_path: Kernel


def projection_gradients(
    leaf: Any,
    law: LogitLaw,
    signal: Signal,
    memory: Signal,
    mixed: Kernel,
    received: Kernel,
    paths: ProjectionPaths,
    rows: RowMoments,
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


def _within_heads(kernel: Kernel, path: Kernel, rows: RowMoments) -> Kernel:
    """(1 - N^2)^2 dQ/dN of different rows."""
    size_i, other = kernel.over_tokens(kernel.diagonal)
    size = np.sqrt(size_i * other)
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
