"""Heads of recurrent mixers as functions of their pre-activations, for whole sequences.

A recurrence with a state is a lower triangular matrix over tokens, y = T v: T_ts = (q_t.k_s) times
the decays in between for linear attention and Mamba-2 (Dao and Gu 2024, section 3), times the
inverse of a unit triangular matrix for the delta rule (Yang et al. 2024, section 3.2). All are
written in operations that `engine.derivative` can transpose. Arrays are (draws, L, features).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...engine.derivative import primitive

Array = Any


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _silu_slope(x: Array) -> Array:
    share = _sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


silu = primitive(lambda x: x * _sigmoid(x), lambda r, x: lambda g: g * _silu_slope(x))
sigmoid = primitive(_sigmoid, lambda r, x: lambda g: g * r * (1.0 - r))
softplus = primitive(lambda x: np.logaddexp(0.0, x), lambda r, x: lambda g: g * _sigmoid(x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


FUNCTIONS = {
    "identity": lambda x: x,
    "silu": silu,
    "sigmoid": sigmoid,
    "gelu_tanh": gelu_tanh,
}
"""Activations of features and of gates."""


solved: Callable[..., Array] = primitive(
    np.linalg.solve,
    lambda r, a, b: lambda g: -solved(np.swapaxes(a, -1, -2), g) @ np.swapaxes(r, -1, -2),
    lambda r, a, b: lambda g: solved(np.swapaxes(a, -1, -2), g),
)


def _convolved(x: Array, taps: Array) -> Array:
    """Causal depthwise convolution sum_a taps_a x_{t-a} of (draws, L, features) with (draws,
    kernel, features)."""
    out = x * taps[:, :1]
    for a in range(1, min(taps.shape[1], x.shape[1])):
        out[:, a:] += x[:, :-a] * taps[:, a : a + 1]
    return out


def _back_to_taps(g: Array, x: Array, kernel: int) -> Array:
    tokens = x.shape[1]
    later = [(g[:, a:] * x[:, : tokens - a]).sum(1) for a in range(kernel)]
    return np.stack(later, 1)


convolved: Callable[..., Array] = primitive(
    _convolved,
    lambda r, x, taps: lambda g: convolved(g[:, ::-1], taps)[:, ::-1],
    lambda r, x, taps: lambda g: _back_to_taps(g, x, taps.shape[1]),
)


def _decays(logs: Array) -> Array:
    """(..., L, L) product of the decays after token s up to t, 0 above the diagonal, from their
    (..., L) logarithms."""
    sums, tokens = np.cumsum(logs, axis=-1), logs.shape[-1]
    result = np.subtract(sums[..., :, None], sums[..., None, :])
    np.exp(np.minimum(result, 0.0, out=result), out=result)
    result *= np.tri(tokens, dtype=bool)
    return result


def _back_to_logs(grad_out: Array) -> Array:
    """Gradient at the logarithms, from that at `_decays` times their values: row sums minus column
    sums, summed over this token and later ones."""
    rest = grad_out.sum(-1) - grad_out.sum(-2)
    return np.flip(np.cumsum(np.flip(rest, -1), -1), -1)


decays = primitive(_decays, lambda r, logs: lambda g: _back_to_logs(g * r))


def _recurred(x: Array, logs: Array) -> Array:
    """h_t = exp(logs_t) h_{t-1} + x_t, of (draws, L, ...)."""
    result = np.array(np.broadcast_to(x, np.broadcast_shapes(x.shape, logs.shape)))
    decay = np.exp(logs)
    for t in range(1, x.shape[1]):
        result[:, t] += decay[:, t] * result[:, t - 1]
    return result


def _recurred_back(g: Array, logs: Array) -> Array:
    later = np.concatenate((logs[:, 1:], logs[:, :1]), 1)  # the last entry is unused
    return recurred(g[:, ::-1], later[:, ::-1])[:, ::-1]


recurred: Callable[..., Array] = primitive(
    _recurred,
    lambda r, x, logs: lambda g: _recurred_back(g, logs),
    lambda r, x, logs: lambda g: _recurred_back(g, logs) * (r - x),
)


def by_heads(x: Array, heads: int) -> Array:
    """(draws, L, heads * features) to (draws, heads, L, features)."""
    draws, tokens, features = x.shape
    return np.swapaxes(np.reshape(x, (draws, tokens, heads, features // heads)), 1, 2)


def joined(x: Array) -> Array:
    """(draws, heads, L, features) to (draws, L, heads * features)."""
    draws, heads, tokens, features = x.shape
    return np.reshape(np.swapaxes(x, 1, 2), (draws, tokens, heads * features))


def normalised(x: Array, epsilon: float) -> Array:
    """Divide by the root mean square over the last axis."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon)


def transposed(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def scan(query: Array, key: Array, value: Array, logs: Array, steps: Array) -> Array:
    """y_t = sum_{s <= t} (q_t.k_s) [decays after s up to t] step_s v_s.

    Args:
        query, key: (draws, 1, L, state), shared by the heads.
        value: (draws, heads, L, features).
        logs: (draws, heads, L) of the decays.
        steps: (draws, heads, L).
    """
    mixing = (query @ transposed(key)) * decays(logs) * np.expand_dims(steps, -2)
    return mixing @ value


def selective_scan(query: Array, key: Array, value: Array, rates: Array, steps: Array) -> Array:
    """`scan` with steps and decays per feature.

    Args:
        query, key: (draws, L, state), shared by the features.
        value, steps: (draws, L, features).
        rates: (draws, features, state).
    """
    written = np.expand_dims(steps * value, -1) @ np.expand_dims(key, -2)
    states = recurred(written, np.expand_dims(steps, -1) * np.expand_dims(-rates, 1))
    read = states @ np.expand_dims(query, -1)
    return np.reshape(read, value.shape)


def kept_products(query: Array, key: Array, logs: Array) -> Array:
    """(..., L, L) sum_n q_tn k_sn [decays of channel n after s up to t], of (..., L, n) arrays."""
    channels, by_channel = transposed(query), decays(transposed(logs))
    products = by_channel * np.expand_dims(channels, -1)
    return np.sum(products * np.expand_dims(transposed(key), -2), -3)


def delta_rule(query: Array, key: Array, value: Array, logs: Array, rate: Array) -> Array:
    """o_t = S_t^T q_t, S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T.

    Args:
        query, key: (draws, L, state), keys of unit length.
        value: (draws, L, features).
        logs: of the decays a, (draws, L), or (draws, L, state) for decays per channel.
        rate: (draws, L) b.
    """
    tokens = key.shape[-2]
    if len(logs.shape) == len(key.shape):
        read, overlaps = (kept_products(x, key, logs) for x in (query, key))
    else:
        decay = decays(logs)
        read, overlaps = ((x @ transposed(key)) * decay for x in (query, key))
    erased = overlaps * np.tri(tokens, k=-1, dtype=bool)
    rate = np.expand_dims(rate, -1)
    return read @ solved(np.eye(tokens, dtype=bool) + erased * rate, value * rate)
