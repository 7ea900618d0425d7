"""From the kernels of query and key tokens to the covariance of their logits, and back.

Queries q = W_q x + b and keys k = W_k y + c are Gaussian given the tokens, with kernels
d s_q C + b_q and d s_k C' + b_k, and logits q.k/(temperature sqrt(d_head)). What may stand between:

Normalised queries and keys. |q|^2 is chi-square over D features, so that directions of correlation
r keep r (1 - (1 - r^2)/(2 D)) of it, and the way back is multiplied by E 1/(|q| |q'|), which is
1 + (3 + r^2)/(2 D), and projected, 1 - (2 - r^2)/D; D = d_head, one less behind LayerNorm. A
logit is then a coordinate of a point on a sphere, of fourth cumulant -6 theta^2/(D + 2):
log E e^{ts} = t^2 theta/2 - t^4 theta^2/(4 (D + 2)). The Gaussian logits of the same
log E e^{2s} - 2 log E e^s, which is what E sum a^2 is for many keys, have
theta (1 - 7 theta/(2 (D + 2))), written as an exponential; where keys share a part, it is the
square of their own that enters.

A soft cap c tanh(s/c). By Stein's lemma its part that is linear in the logits is their product with
E sech^2(s/c); what is not linear is of relative order (variance/c^2)^2, and left out.

See docs/theory/attention.md, What stands between tokens and logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from ...errors import domain_error
from ...formulas.recording import is_number

CAP_NOTED = 0.3
"""Logit variance over the square of its soft cap beyond which a note says so."""


FAINTEST = 1e-9
"""What stands for no weight beside a bias: products of it with the rest keep seven digits."""


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


def cap_slope(variance: Any, cap: float) -> Any:
    """E sech^2(s/c) for a Gaussian s."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    logits = np.multiply.outer(np.sqrt(variance), nodes)
    return (1.0 / np.cosh(np.clip(logits / cap, -300.0, 300.0)) ** 2) @ weights


def logit_law(
    leaf: Any, query_tokens: Kernel, key_tokens: Kernel, widths: tuple[Any, Any]
) -> LogitLaw:
    """The law of the logits of an attention leaf.

    Args:
        leaf: with the fields of `SelfAttention` that name variances and norms.
        query_tokens, key_tokens: kernels of the tokens behind queries and keys.
        widths: of those tokens.
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
        own = (variance - pairs) / variance
        gradient_scale = np.exp(3.5 * own**2 * theta / (width + 2.0))
        scale = scale / gradient_scale
    notes: tuple[str, ...] = ()
    if leaf.logit_softcap is not None:
        total = scale * queries.kernel.mean_diagonal() * keys.kernel.mean_diagonal()
        scale = scale * cap_slope(total, leaf.logit_softcap) ** 2
        share = float(np.max(total)) / leaf.logit_softcap**2
        if share > CAP_NOTED:
            notes = (
                f"the logits' variance is {share:.2g} of their soft cap squared: only the cap's "
                "linear part is followed",
            )
    return LogitLaw(
        queries, keys, scale, gradient_scale, np.inf if norm is not None else d_head, notes
    )


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
