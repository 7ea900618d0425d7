"""Projections: from the kernels of tokens to the covariance of logits.

Given the tokens, queries and keys are Gaussian with kernels d s_q C + b_q and d s_k C' + b_k. With
norms of queries and keys or a soft cap, logits are replaced by the Gaussian ones of `LogitLaw`. See
docs/theory/logits.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from ...errors import domain_error
from ...formulas.algebra import is_number
from .softmax import LENGTH_MAX, THETA_PEAKED, AlikeRows, chi_square_rule

CAP_NOTED = 0.7
"""Ratio of the logit variance to the squared soft cap beyond which a note warns."""

TABLE_NOTED = 0.1
"""Variance of relative biases beyond which a note warns: the unequal mean attention that they cause
is neglected."""

FAINTEST = 1e-9
"""Replaces a weight variance of 0 beside a bias, relative to it; products keep seven digits."""

LOGIT_VARIANCE_MAX = THETA_PEAKED
"""Cap on the logit variance, averaged over a kernel's tokens."""

LOGIT_VARIANCE_NOTED = 12.0
"""Logit variance beyond which a note warns."""


def variance_notes(logit_variance: Array) -> tuple[str, ...]:
    """A note if the logit variance is beyond the range in which the laws were measured."""
    largest = float(np.max(logit_variance))
    if largest <= LOGIT_VARIANCE_NOTED:
        return ()
    text = (
        f"the logit variance {largest:.3g} is beyond {LOGIT_VARIANCE_NOTED:g}: attention all but "
        "picks one token, by the law of the largest logits (what a layer sends back through "
        "queries and keys was measured 1 to 8 % low at 16 to 60 and 2 to 12 % at 100 to 130; 1.2 "
        "to 1.55 times too large, and the output 4 to 12 % low, where tokens' variances differ by "
        "10; and "
        "where attention is much larger than what it is added to, gradients of 2 to 4 layers .6 to "
        "2 times the right ones, and correlations off by up to .05; the band of one draw was .6 of "
        "its width at 30 and a third at 100)"
    )
    if largest > LOGIT_VARIANCE_MAX:
        lost = (largest / LOGIT_VARIANCE_MAX) ** 0.5
        text += (
            f"; beyond {LOGIT_VARIANCE_MAX:g} that variance stands in, and what queries and keys "
            f"send back is low by up to {lost:.2g} in each such layer"
        )
    return (text,)


class Side(NamedTuple):
    """Kernel of the queries or of the keys.

    Attributes:
        kernel: in units of the tokens' kernel, or with unit variance if they are normalised.
        gain: entrywise factor from a gradient path in `kernel` to the gradient at the tokens;
            None: 1.
        scale: variance of queries or keys per unit of `kernel`.
    """

    kernel: Kernel
    gain: Kernel | None
    scale: Any


class LogitLaw(NamedTuple):
    """Covariance of logits (i, j) and (k, l): scale times queries_ik times keys_jl.

    Attributes:
        scale: of the equivalent Gaussian logits, which differ from the actual ones with a soft cap
            or normalised queries and keys.
        gradient_scale: ratio of the actual scale to it in gradients through queries, and in those
            of the keys' weights.
        key_scale: the same ratio in the gradient that reaches tokens through keys.
        head_freedom: d_head if the queries' norms fluctuate with it; else infinite.
        notes: reasons for larger errors.
    """

    queries: Side
    keys: Side
    scale: Any
    gradient_scale: Any
    key_scale: Any
    head_freedom: Any
    notes: tuple[str, ...]


def attention_diagnostics(
    logit_variance: Array, square: Array, entropy: Array, keys: Array
) -> dict[str, Array]:
    """Reported statistics of attention; `distance_to_uniform` is E sum_j (a_ij - 1/n)^2."""
    return {
        "logit_variance": logit_variance,
        "square_sum": square,
        "distance_to_uniform": square - 1 / keys,
        "entropy": entropy,
    }


def _side(tokens: Kernel, gain: Any, bias: Any, norm: str | None, epsilon: Any, width: Any) -> Side:
    """Queries or keys of these tokens, normalised over `width` features if `norm` is given."""
    shift = bias / gain
    kernel = tokens
    if np.any(shift):
        of_token, of_pair = tokens.lift(shift)
        kernel = Kernel(tokens.diagonal + of_token, tokens.off_diagonal + of_pair, tokens.resolved)
    if norm is None:
        return Side(kernel, None, gain)
    first, second = kernel.over_tokens(kernel.diagonal)
    correlation = np.clip(ratio_or_zero(kernel.off_diagonal, np.sqrt(first * second)), -1.0, 1.0)
    inverse = ratio_or_zero(gain + 0.0 * kernel.diagonal, kernel.diagonal * gain + epsilon)
    shrunk = kernel.diagonal * inverse
    left, right = kernel.over_tokens(np.sqrt(shrunk))
    square = correlation**2
    off_diagonal = left * right * correlation * (1.0 - (1.0 - square) / (2.0 * width))
    directions = Kernel.of_parts(shrunk, off_diagonal, kernel.resolved)
    left, right = kernel.over_tokens(np.sqrt(inverse))
    back = left * right * np.maximum(1.0 + (1.5 * square - 0.5) / width, 0.0)
    diagonal = inverse * (1.0 + 1.0 / width)
    returned = Kernel.of_parts(diagonal, back, kernel.resolved)
    # In units of the largest, as epsilon may shrink the variance to almost 0.
    largest = shrunk.max(-1) if kernel.resolved else shrunk
    unit = ratio_or_zero(1.0, largest)
    return Side(directions.scaled(unit), returned.scaled(unit), largest)


BENT_STEP, BENT_TAIL = 0.5, 16.0
"""Spacing in log t of `_bent_row`, and its distance below the bulk at which the integral starts."""

BENT_LEAST = 1e-3
"""Floor of the logit variance within a row in `bent`, which has a limit there. Its cap is the
larger of `LOGIT_VARIANCE_MAX` and 100 times the square of the soft cap."""

BENT_NODES = 200
"""Most nodes of a logit on either side; logits of larger variance than these resolve are capped."""

BENT_SWEEPS = 8
"""Newton steps to the variance of a given P2, whose logarithm is nearly linear in it."""


class Bent(NamedTuple):
    """Gaussian logits equivalent to logits f(s) that are not Gaussian.

    Attributes:
        shrunk: variance of the Gaussian logits whose rows have the same P2, over that of s.
        driven: response of a row to the unshared parts of its keys, over that with these Gaussian
            logits.
        with_common: likewise to whole keys, since a cap also acts on what all keys share.
    """

    shrunk: Any
    driven: Any
    with_common: Any


def bent(
    diagonal: Any, shared: Any, keys: float, spread: float, cap: float | None, dimension: Any
) -> Bent:
    """Equivalent Gaussian logits of f = c tanh(s/c), s the coordinates of points on a sphere.

    With J the softmax's Jacobian, D = diag(f') and y^2 the part of a key that is orthogonal to the
    query, `driven` is E tr J D^2 y^2 J over E tr J^2, averaged over the queries' norms and the
    logits' common part; `with_common` adds shared/diagonal E|J f'|^2.

    Args:
        diagonal, shared: variance of the logits within a row, and of their common part.
        keys: number of keys of a row.
        spread: relative variance of a row's logit variance.
        cap: c; None: f = s.
        dimension: of the sphere; infinite: s is Gaussian.

    Source:
        the integrals of `_bent_row`; see docs/theory/logits.md, Soft caps.
    """
    most = max(LOGIT_VARIANCE_MAX, 0.0 if cap is None else 100.0 * cap**2)
    # A row of zeros at the start of a text has no logits; such texts are refused by the head.
    diagonal, shared, dimension = (
        np.nan_to_num(x, posinf=np.inf) for x in (diagonal, shared, dimension)
    )
    shared = shared * np.minimum(most / np.maximum(diagonal, most), 1.0)
    diagonal = np.minimum(np.maximum(diagonal, BENT_LEAST), most)
    diagonal, shared, dimension = np.broadcast_arrays(diagonal, np.maximum(shared, 0.0), dimension)
    keys = min(max(float(keys), 1.0 + 1e-6), LENGTH_MAX)
    norms = chi_square_rule(2.0 / spread if spread > 0.0 else np.inf)
    rows = AlikeRows.of(keys)

    def averages(theta: Any) -> list[Array]:
        result = rows.rows(np.multiply.outer(norms.nodes, theta))
        fields = result.sum_square, result.jacobian_square, result.sum_square_slope
        return [np.tensordot(norms.weights, field, 1) for field in fields]

    each = [_bent_rows(xi * diagonal, xi * shared, keys, cap, dimension) for xi in norms.nodes]
    square, driven, common = np.tensordot(norms.weights, each, 1)
    theta = np.array(diagonal)
    for _ in range(BENT_SWEEPS):
        reached, _, slope = averages(theta)
        step = np.clip((square - reached) / np.maximum(slope, 1e-300), -1.0, 1.0)
        theta = np.minimum(theta * np.exp(step), diagonal)
    jacobian = np.maximum(averages(theta)[1], 1e-300)
    whole = driven + shared / diagonal * common
    return Bent(theta / diagonal, driven / jacobian, whole / jacobian)


def _bent_rows(
    diagonal: Array, shared: Array, keys: float, cap: float | None, dimension: Array
) -> Array:
    """(3, ...) `_bent_row` of every variance."""
    rows = zip(*(np.ravel(x).tolist() for x in (diagonal, shared, dimension)), strict=True)
    result = np.transpose([_bent_row(*row, keys, cap) for row in rows])
    return np.asarray(result.reshape(3, *np.shape(diagonal)))


@functools.lru_cache(maxsize=4096)
def _bent_row(
    diagonal: float, shared: float, dimension: float, keys: float, cap: float | None
) -> Array:
    """P2, E tr J D^2 y^2 J and E |J f'|^2 of a row of logits f(s + u), averaged over u.

    E sum over distinct keys of prod a_j^p g(s_j) is n (n-1) .. / Gamma(sum p) int phi^{n-c} prod
    M dlog t, phi = E e^{-t e^f} and M = E (t e^f)^p g e^{-t e^f}, by the trapezoidal rule; sums
    over other keys k give (J^2)_ll = sum_k a_l^2 a_k^2 + (sum_k a_l a_k)^2 and
    (J f')_l = sum_k a_l a_k (f'_l - f'_k).
    """
    # e^{-t e^f} is analytic in a strip of width pi/sigma, which bounds the spacing
    half = min(math.ceil(6.4 / min(0.3, 1.07 / diagonal**0.5)), BENT_NODES)
    if dimension < BENT_GAUSSIAN:
        top = min(0.5 * np.pi, 6.4 / dimension**0.5 * (1.0 + 6.4 / dimension**0.5))
        angle = np.linspace(-top, top, 2 * half + 1)
        weights = np.maximum(np.cos(angle), 1e-300) ** (dimension - 2.0)
        along = np.sin(angle)
        z, orthogonal = dimension**0.5 * along, dimension / (dimension - 1.0) * (1.0 - along**2)
    else:
        z = np.linspace(-6.4, 6.4, 2 * half + 1)
        weights, orthogonal = np.exp(-0.5 * z * z), np.ones(len(z))
    weights = weights / weights.sum()
    logits, slopes, shares = diagonal**0.5 * z[None], np.ones((1, len(z))), np.ones(1)
    if cap is not None:
        shifts, shares = np.polynomial.hermite_e.hermegauss(6 if shared > 0.0 else 1)
        unit = np.tanh((logits + shared**0.5 * shifts[:, None]) / cap)
        logits, slopes, shares = cap * unit, 1.0 - unit * unit, shares / shares.sum()
    first = -logits.max() - BENT_TAIL - np.log(keys)
    x = np.arange(first, 3.6 - logits.min() - np.log(keys), BENT_STEP)
    e = np.exp(x[:, None] + logits[:, None])  # (u, x, z)
    survival = np.exp(-e)
    below = np.log1p(np.maximum(np.expm1(-e) @ weights, -0.75))
    phi = survival @ weights
    log_phi = np.where(phi < 0.5, np.log(np.maximum(phi, 1e-130)), below)
    once = e * survival
    twice = e * once

    def mean(values: Array, factor: Array) -> Array:
        return np.asarray((values @ (weights * factor)[..., None])[..., 0])

    one, one_f = mean(once, slopes**0), mean(once, slopes)
    two, two_f, two_ff = (mean(twice, slopes**power) for power in (0, 1, 2))
    driven = mean(twice, slopes**2 * orthogonal)

    def integral(distinct: int, integrand: Array) -> float:
        falling = np.prod([keys - i for i in range(distinct)])
        each = (np.exp((keys - distinct) * log_phi) * integrand).sum(-1)
        return float(falling * BENT_STEP * (shares @ each))

    jacobian = 2.0 * integral(2, driven * two) + integral(3, driven * one * one)
    # sum_l a_l^2 (sum_k a_k (f'_l - f'_k))^2, of one k and of two
    common = integral(2, 2.0 * (two_ff * two - two_f * two_f))
    common += integral(3, two_ff * one * one - 2.0 * two_f * one_f * one + two * one_f * one_f)
    return np.array([integral(1, two), jacobian / 6.0, max(common, 0.0) / 6.0])


BENT_GAUSSIAN = 1e6
"""Dimension of a sphere beyond which its coordinates are taken as Gaussian."""


def real_tokens(leaf: Any) -> Array | None:
    """(tokens,) 1 for real tokens attended to and 0 for padding; None: all are real."""
    if leaf.padding is None or np.all(leaf.padding):
        return None
    return np.asarray(np.ravel(leaf.padding) > 0, dtype=float)


def _keys_of_a_row(leaf: Any, length: float) -> float:
    """Tokens in a token's document, averaged over real tokens."""
    if leaf.padding is None:
        return length
    sizes = [np.unique([n for n in row if n > 0], return_counts=True)[1] for row in leaf.padding]
    every = np.concatenate(sizes).astype(float)
    return float((every @ every) / every.sum())


def logit_law(
    leaf: Any,
    query_tokens: Kernel,
    key_tokens: Kernel,
    widths: tuple[Any, Any],
    length: float = np.inf,
) -> LogitLaw:
    """The law of the logits of an attention leaf.

    Args:
        leaf: with the fields of `SelfAttention` for variances and norms.
        query_tokens, key_tokens: kernels of the tokens of queries and of keys.
        widths: widths of these tokens.
        length: number of keys.
    """
    norm, d_head = leaf.qk_norm, leaf.d_head
    if norm is not None and leaf.norm_epsilon == 0.0:
        for name in ("query", "key"):
            size = np.add(getattr(leaf, name), getattr(leaf, f"{name}_bias"))
            if not np.all(size > 0):
                allowed = "above 0 where queries and keys are normalised without norm_epsilon"
                remedy = "zeros have no direction"
                raise domain_error(name, getattr(leaf, name), allowed, remedy)
    by_head = norm is not None and not over_all_heads(leaf)
    widths_normed = norm_freedom(leaf), norm_freedom(leaf, leaf.kv_heads)
    gains = (
        widths[0] * positive(leaf.query, leaf.query_bias / widths[0]),
        widths[1] * positive(leaf.key, leaf.key_bias / widths[1]),
    )
    normed = norm, leaf.norm_epsilon
    queries = _side(query_tokens, gains[0], leaf.query_bias, *normed, widths_normed[0])
    keys = _side(key_tokens, gains[1], leaf.key_bias, *normed, widths_normed[1])
    scale = queries.scale * keys.scale / leaf.temperature**2
    gradient_scale: Any = 1.0
    key_scale: Any = 1.0
    cap = leaf.logit_softcap
    if by_head:
        width = widths_normed[0]
        scale = scale * d_head / width
    notes: tuple[str, ...] = ()
    if by_head or cap is not None:
        real = real_tokens(leaf)
        real_queries = real if query_tokens is key_tokens else None
        count = _keys_of_a_row(leaf, length)
        count = (count + 1) / 2 if leaf.causal else count
        size = scale * queries.kernel.mean_diagonal(real_queries)
        total = size * keys.kernel.mean_diagonal(real)
        shared = size * keys.kernel.mean_off_diagonal(real)
        unshared = np.maximum(1.0 - ratio_or_zero(shared, total), 1e-6)
        spread, dimension = 2.0 / widths[0], np.inf
        if by_head:
            dimension = width / unshared**2
        else:
            spread += 2.0 / d_head
        gaussian = bent(total - shared, shared, count, spread, cap, dimension)
        scale = scale * gaussian.shrunk
        key_scale = gaussian.driven / gaussian.shrunk
        gradient_scale = gaussian.with_common / gaussian.shrunk
    if cap is not None:
        share = float(np.max(total)) / cap**2
        if share > CAP_NOTED:
            notes = (
                f"the logits' variance is {share:.2g} of their soft cap squared: gradients of "
                "queries and keys were simulated up to 15 % smaller at 1 to 5, and up to a quarter "
                "larger where queries and keys are normalised",
            )
    table = leaf.relative_bias
    if table is not None and table.variance > TABLE_NOTED:
        notes += (
            f"relative biases of variance {table.variance:.2g} spread attention: gradients of "
            "queries and keys were simulated up to 7 % larger at .1 and 65 % at 1, the table's own "
            "up to 8 % and 55 %",
        )
    return LogitLaw(
        queries, keys, scale, gradient_scale, key_scale, np.inf if by_head else d_head, notes
    )


def over_all_heads(leaf: Any) -> bool:
    """Whether queries and keys are normalised over all heads together; those of one head are then
    as Gaussian as without a norm."""
    return leaf.qk_norm is not None and leaf.qk_norm.endswith("-all")


def by_distance(leaf: Any) -> bool:
    """Whether logits depend on the tokens' distance."""
    table = leaf.relative_bias
    return leaf.rotary is not None or (table is not None and table.variance > 0.0)


def positive(variance: Any, least: Any = 0.0) -> Any:
    """A weight variance with a floor, since a projection of zeros still receives a gradient: the
    limit of small variances. Beside a bias the floor is `FAINTEST` times `least`, the bias variance
    over the number of inputs."""
    larger = np.maximum if np.ndim(variance) or np.ndim(least) else max
    return larger(variance, larger(1e-60, FAINTEST * least))


def through(path: Kernel, side: Side, gradient_scale: Array) -> Kernel:
    """Gradient kernel at the tokens, from a path in the kernel of their queries or keys."""
    at_tokens = path if side.gain is None else path * side.gain
    if is_number(gradient_scale) and gradient_scale == 1.0:
        return at_tokens
    return at_tokens.scaled(gradient_scale)


def biased(given: bool | tuple[str, ...]) -> tuple[str, ...]:
    """Names of the projections that have a bias."""
    if isinstance(given, tuple):
        return given
    return ("query", "key", "value") if given else ()


def norm_freedom(leaf: Any, heads: int | None = None) -> Any:
    """Degrees of freedom under the norm of queries, or of keys with their number of heads."""
    width = leaf.d_head * ((heads or leaf.heads) if over_all_heads(leaf) else 1.0)
    return width - 1.0 if (leaf.qk_norm or "").startswith("layernorm") else width
