"""The spread of one draw of the weights at finite width.

A realised kernel x_i . x_j / d differs from its mean by O(1/sqrt(d)). To first order such
fluctuations propagate linearly, so that what one number owes to each of them follows from its
sensitivities (`network`), by token, on classes of positions or for tokens alike, one class of all.
One draw is close to lognormal: sigma^2 = Var log g, typical = mean exp(-sigma^2/2).

See docs/theory/band.md, How it travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..engine.classes import ClassMatrix, diagonal_of
from ..engine.composition import Chain, Layer
from ..engine.response import (
    SINGLE,
    GradientAdjoint,
    Matrix,
    Response,
    SignalAdjoint,
    Sublayer,
    count_of,
    diagonal_matrix,
    matrix_of,
    paired,
    per_unit,
    stacked,
    total,
    trace_of,
)
from ..engine.state import Array
from ..engine.trace import Trace
from ..errors import listed
from .alike import Alike, across_sequences, sublayer_of, sublayer_starts
from .network import Network, SensitivityWalk, SequentialWalk

NORMAL_95 = 1.959963984540054
"""Half width, in standard deviations, of the central 95 % of a normal distribution."""

LARGEST = 4.0
"""Variance of log g at which a fluctuation is twice its mean, and no small one."""


TARGETS = 9
"""Points of the stream that are followed by token; the deviation is linear in between."""

ALIKE_TARGETS = 129
"""The same of tokens alike."""

CHUNK_ENTRIES = 2**23
"""Numbers kept at once: sensitivities of several points at all parts."""


class End(Protocol):
    """Where the gradient at the last layer comes from."""

    def gradient_response(self, trace: Trace, batch: float) -> tuple[Matrix, Response]:
        """That gradient, and how it answers to all that is behind it.

        Args:
            trace: what both passes through the stack saw.
            batch: sequences that share the weights.
        """


def log_variance(
    declaration: Chain,
    trace: Trace,
    batch: float = 1,
    top: End | None = None,
    across: Sequence[Matrix] | None = None,
) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    To first order in the fluctuations, however large it says that they are (`first_order`).

    Args:
        declaration: the stack of layers, as it was propagated through.
        trace: what both passes saw.
        batch: sequences of independent input and gradient that share the weights, those that one
            kernel by token holds side by side included.
        top: where the gradient at the last layer comes from; None: it is a fresh Gaussian tensor.
        across: of two sequences, what their tokens share before every part and behind all, where
            that is known (`between_documents`); None: what two texts do.
    """
    layers = _layers(declaration)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        alone = _alone(trace, batch)
        end = Fresh.of(trace) if top is None else top.gradient_response(trace, alone)
        network = _network(layers, trace, batch, end, across)
        starts = sublayer_starts(layers)

        def variance(points: Sequence[int]) -> Array:
            return network.variance([starts[n] for n in points])

        result = _at_points(network, variance, len(layers))
    return _where_it_arrives(result, trace)


def _layers(declaration: Chain) -> list[Layer]:
    return [part for part in declaration.children if isinstance(part, Layer)]


def _alone(trace: Trace, batch: float) -> float:
    """Sequences beyond those that one kernel by token holds."""
    first = trace.entering
    if first.resolved is not True:
        return batch
    together = int(first.kernel.off_diagonal.shape[-1]) // first.seq_len
    return max(1.0, batch // together)


def _network(
    layers: Sequence[Layer],
    trace: Trace,
    batch: float,
    end: tuple[Matrix, Response],
    across: Sequence[Matrix] | None,
) -> Network:
    first, batch = trace.entering, _alone(trace, batch)
    walk = SequentialWalk(_by_token(trace)) if first.resolved else Alike.of(trace).walk(layers)
    common = shared(layers, trace, walk, batch) if across is None else _means(across)
    return Network(walk, first, batch, common, end, across)


def signal_log_variance(
    declaration: Chain,
    trace: Trace,
    batch: float = 1,
    across: Sequence[Matrix] | None = None,
    real: Array | None = None,
) -> Array:
    """Var log v of the signal's variance at every point of the stream, shape (..., N + 1).

    Args:
        real: (n,) by token, 1 for tokens that count and 0 for padding; None: all count.
    """
    layers = _layers(declaration)
    kernels = [
        matrix_of(point.signal.second_moment(), point.signal.seq_len) for point in trace.stream()
    ]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        network = _network(layers, trace, batch, Fresh.of(trace), across)
        starts = sublayer_starts(layers)

        def variance(points: Sequence[int]) -> Array:
            diagonal = [_averaging(kernels[n], real) for n in points[::-1]]
            return network.signal_variance([starts[n] for n in points[::-1]], diagonal)[::-1]

        return _at_points(network, variance, len(layers), False)


def _averaging(kernel: Matrix, real: Array | None) -> Matrix:
    """(1, ..., L, L) sensitivity of tokens' average variance over its mean to a kernel."""
    count = np.ones_like(diagonal_of(kernel)) if real is None else real + 0.0 * diagonal_of(kernel)
    one = diagonal_matrix(count.astype(SINGLE), kernel)
    return stacked([per_unit(one, total(one * kernel))], np.stack)


def between_documents(trace: Trace) -> list[Matrix] | None:
    """What tokens of two documents share before every part of every layer, and behind the last, of
    a trace on `classes.DocumentClasses`; None where there is one document."""
    records = [one for layer in trace.layers for one in layer.children[0].in_order()]
    result = []
    for signal in (*(one.input for one in records), records[-1].output):
        kernel = signal.second_moment()
        assert kernel.classes is not None
        across = kernel.classes.between(kernel.diagonal, kernel.off_diagonal)
        if across is None:
            return None
        result.append(ClassMatrix(*across, kernel.classes.of_one).astype(SINGLE))
    return result


def _means(matrices: Sequence[Matrix]) -> list[Array]:
    return [total(one) / count_of(one) ** 2 for one in matrices]


def shared(
    layers: Sequence[Layer], trace: Trace, walk: SensitivityWalk, batch: float
) -> Sequence[Array]:
    """What sequences that share the weights have in common, before every part and behind all."""
    if batch == 1:
        return (0.0,)
    variances: dict[int, Array] = {}
    for group in walk.groups:
        kernel = group.sublayer.entering
        variances |= group.by_place(trace_of(kernel) / count_of(kernel))
    return across_sequences(layers, trace, [variances[k] for k in sorted(variances)])


@dataclass(frozen=True)
class Fresh:
    """A Gaussian gradient of its own at the last layer, kernel (..., L, L)."""

    grad_out: Matrix
    width: Array

    @classmethod
    def of(cls, trace: Trace) -> tuple[Matrix, Fresh]:
        """The gradient, and what it comes from."""
        signal, gradient = trace.passing()[-1]
        grad_out = matrix_of(gradient.kernel, signal.seq_len)
        grad_out = per_unit(grad_out, trace_of(grad_out)).astype(SINGLE)
        return grad_out, cls(grad_out, signal.width)

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        noise = 2 / self.width * paired(sensitivity, self.grad_out, self.grad_out)
        return GradientAdjoint(sensitivity, None, noise, 0.0)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        return SignalAdjoint(sensitivity)


def _by_token(trace: Trace) -> list[Sublayer]:
    """All parts of all layers."""
    stream = trace.stream()
    kernels = [point.signal.kernel for point in stream]
    kernels += [point.gradient.kernel for point in stream if point.gradient is not None]
    axes = np.broadcast_shapes(*(kernel.diagonal.shape[:-1] for kernel in kernels))
    records = (one for layer in trace.layers for one in layer.children[0].in_order())
    return [sublayer_of(one, axes) for one in records]


def _at_points(
    network: Network,
    variance: Callable[[Sequence[int]], Array],
    layers: int,
    from_above: bool = True,
) -> Array:
    """(..., N + 1) variance at the points of the stream, as many at once as the network's kernels
    leave room for. `from_above`: it grows from the last point down, else from the first up."""
    resolved = bool(network.first.resolved)
    most = TARGETS if resolved else ALIKE_TARGETS
    # The last points are their own: above the topmost layer there is no randomness but the loss's.
    below = np.linspace(0, layers - 1, min(most - 1, layers)).round()
    if len(below) < layers and not from_above:
        # What a layer adds to a signal falls with its number: where it grows is near the first.
        below = np.append(0.0, np.geomspace(1, layers, most)[:-1].round())
    elif len(below) < layers and not resolved:
        # In a deep stream of Pre-LN what one layer adds falls with its number.
        fewer = most // 2
        near = np.geomspace(1, layers, fewer).round() - 1
        below = np.union1d(near, np.linspace(0, layers - 1, fewer).round())
    targets = np.unique(np.append(below, layers)).astype(int)
    parts = sum(len(group.places) for group in network.walk.groups)
    size = max(1, CHUNK_ENTRIES // (network.last_gradient.size * parts))
    result = [
        variance(targets[first : first + size].tolist()) for first in range(0, len(targets), size)
    ]
    deviation = np.sqrt(np.concatenate(result))
    points = np.arange(layers + 1)
    after = np.clip(np.searchsorted(targets, points), 1, len(targets) - 1)
    way = (points - targets[after - 1]) / (targets[after] - targets[after - 1])
    way = way.reshape(-1, *(1,) * (deviation.ndim - 1))
    return np.moveaxis((1 - way) * deviation[after - 1] + way * deviation[after], 0, -1) ** 2


def _where_it_arrives(variance: Array, trace: Trace) -> Array:
    """The variance, 0 where no gradient arrives, and infinite where there is none."""
    size = [point.gradient.kernel.mean_diagonal() for point in trace.stream() if point.gradient]
    arrives = np.stack(np.broadcast_arrays(*size), axis=-1) > 0
    return np.where(arrives, np.where(np.isfinite(variance), variance, np.inf), 0.0)


def first_order(variance: Array, what: str = "gradient") -> tuple[Array, tuple[str, ...]]:
    """`log_variance` as far as it holds, at most `LARGEST`, and notes on what is beyond."""
    worst = float(np.max(variance))
    if worst <= LARGEST:
        return variance, ()
    points = sorted(set(np.nonzero(variance > LARGEST)[-1].tolist()))
    size = f"{worst:.3g}" if np.isfinite(worst) else "unbounded"
    note = (
        f"one draw's fluctuations explode at points {listed(points)} of the stream (0 enters "
        f"layer 1): the variance of its log {what} would be {size} to first order, and "
        f"{LARGEST:g} stands in. The band there says no more than that draws differ by orders of "
        "magnitude, and the mean over draws may be several times what is predicted"
    )
    return np.minimum(variance, LARGEST), (note,)


def band(mean: Array, log_variance: Array) -> tuple[Array, Array]:
    """Typical value (geometric mean) and 95 % interval of a lognormal quantity.

    Args:
        mean: its expectation, shape (...,).
        log_variance: variance of its logarithm, shape (...,).

    Returns:
        The typical value (...,), and the interval's two ends (2, ...).
    """
    typical = mean * np.exp(-log_variance / 2)
    half = np.exp(NORMAL_95 * np.sqrt(log_variance))
    return typical, np.stack([typical / half, typical * half])
