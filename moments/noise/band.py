"""The band: spread of one draw of the weights about the mean over draws, at finite width.

A realised kernel x_i . x_j / d differs from its mean by O(1/sqrt(d)). To first order these
fluctuations propagate linearly, and the variance of any scalar follows from its sensitivities to
them (`network`). One draw is close to lognormal: sigma^2 = Var log g, typical = mean
exp(-sigma^2/2).

See docs/theory/band.md, How it travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..engine.classes import ClassMatrix, diagonal_of
from ..engine.composition import Chain, Layer
from ..engine.response import (
    SINGLE,
    Matrix,
    Response,
    Sublayer,
    count_of,
    diagonal_matrix,
    matrix_of,
    per_unit,
    stacked,
    total,
)
from ..engine.state import Array
from ..engine.trace import Trace
from ..errors import listed
from .network import (
    ExchangeableStack,
    ExchangeableWalk,
    Network,
    SensitivityWalk,
    SequentialWalk,
    mean_covariances,
    sublayer_of,
    sublayer_starts,
)
from .sources import GaussianSource, GradientSource

NORMAL_95 = 1.959963984540054
"""Half width, in standard deviations, of the central 95 % of a normal distribution."""

LARGEST = 4.0
"""Largest variance of log g that is believed to first order: the deviation is twice the mean."""


TARGETS = 9
"""Points of the stream at which Var log g is evaluated if tokens are resolved."""

ALIKE_TARGETS = 129
"""Likewise for exchangeable tokens."""

CHUNK_ENTRIES = 2**23
"""Most entries of all sensitivities that are evaluated together."""


def log_variance(
    declaration: Chain,
    trace: Trace,
    batch: float = 1,
    top: GradientSource | None = None,
    across: Sequence[Matrix] | None = None,
) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    To first order in the fluctuations, even where these are large (`first_order`).

    Args:
        declaration: the stack of layers.
        trace: both passes through it.
        batch: sequences of independent input and gradient that share the weights, including those
            that one kernel by token contains.
        top: source of the gradient at the last layer; None: an independent Gaussian tensor.
        across: covariances of tokens of different sequences before every part and behind the last
            (`between_documents`); None: as `across_sequences` assumes.
    """
    layers = _layers(declaration)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if top is None:
            end: tuple[Matrix, Response] = GaussianSource.from_trace(trace)
        else:
            end = top.gradient_response(trace, _independent_kernels(trace, batch))
        network = _network(layers, trace, batch, end, across)
        starts = sublayer_starts(layers)

        def variance(points: Sequence[int]) -> Array:
            return network.variance([starts[n] for n in points])

        result = _at_points(network, variance, len(layers))
    gradients = [point.gradient.kernel for point in trace.stream() if point.gradient]
    sizes = [kernel.mean_diagonal() for kernel in gradients]
    arrives = np.stack(np.broadcast_arrays(*sizes), axis=-1) > 0
    return np.where(arrives, np.where(np.isfinite(result), result, np.inf), 0.0)


def _layers(declaration: Chain) -> list[Layer]:
    return [part for part in declaration.children if isinstance(part, Layer)]


def _independent_kernels(trace: Trace, batch: float) -> float:
    """Number of kernels like the trace's, one of which may contain several sequences by token."""
    first = trace.entering
    if first.resolved is not True:
        return batch
    sequences = int(first.kernel.off_diagonal.shape[-1]) // first.seq_len
    return max(1.0, batch // sequences)


def _network(
    layers: Sequence[Layer],
    trace: Trace,
    batch: float,
    end: tuple[Matrix, Response],
    across: Sequence[Matrix] | None,
) -> Network:
    first, batch = trace.entering, _independent_kernels(trace, batch)
    walk: SensitivityWalk
    if first.resolved:
        walk = SequentialWalk(_sublayers(trace))
    else:
        parts = ExchangeableStack.from_trace(trace).sublayers(layers)
        walk = ExchangeableWalk([group for group, _ in parts])
    if across is None:
        covariances = mean_covariances(layers, trace, walk, batch)
    else:
        covariances = [total(one) / count_of(one) ** 2 for one in across]
    return Network(walk, first, batch, covariances, end, across)


def signal_log_variance(
    declaration: Chain,
    trace: Trace,
    batch: float = 1,
    across: Sequence[Matrix] | None = None,
    real: Array | None = None,
) -> Array:
    """Var log v of the signal's variance at every point of the stream, shape (..., N + 1).

    `real` is (n,) by token, 1 for real tokens and 0 for padding; None: all are real.
    """
    layers = _layers(declaration)
    kernels = [
        matrix_of(point.signal.second_moment(), point.signal.seq_len) for point in trace.stream()
    ]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        network = _network(layers, trace, batch, GaussianSource.from_trace(trace), across)
        starts = sublayer_starts(layers)

        def variance(points: Sequence[int]) -> Array:
            sensitivities = [_of_mean_variance(kernels[n], real) for n in points[::-1]]
            return network.signal_variance([starts[n] for n in points[::-1]], sensitivities)[::-1]

        return _at_points(network, variance, len(layers), False)


def _of_mean_variance(kernel: Matrix, real: Array | None) -> Matrix:
    """(1, ..., L, L) sensitivity of the tokens' average variance, over its mean, to a kernel."""
    count = np.ones_like(diagonal_of(kernel)) if real is None else real + 0.0 * diagonal_of(kernel)
    average = diagonal_matrix(count.astype(SINGLE), kernel)
    return stacked([per_unit(average, total(average * kernel))], np.stack)


def between_documents(trace: Trace) -> list[Matrix] | None:
    """Covariances of tokens of two documents before every part of every layer and behind the last,
    of a trace on `classes.DocumentClasses`; None if there is a single document."""
    records = [one for layer in trace.layers for one in layer.children[0].in_order()]
    result = []
    for signal in (*(one.input for one in records), records[-1].output):
        kernel = signal.second_moment()
        assert kernel.classes is not None
        across = kernel.classes.across_block(kernel.diagonal, kernel.off_diagonal)
        if across is None:
            return None
        result.append(ClassMatrix(*across, kernel.classes.one_document_with_words).astype(SINGLE))
    return result


def _sublayers(trace: Trace) -> list[Sublayer]:
    """The parts of all layers, resolved."""
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
    """(..., N + 1) `variance` at all points of the stream.

    It is evaluated at some points, in chunks, and its square root interpolated linearly.

    Args:
        from_above: whether it grows from the last point to the first (gradients), or the reverse.
    """
    resolved = bool(network.first.resolved)
    most = TARGETS if resolved else ALIKE_TARGETS
    # The last point is always a target: above the last layer only the loss is random.
    targets = np.linspace(0, layers - 1, min(most - 1, layers)).round()
    if len(targets) < layers and not from_above:
        # The relative noise of a layer falls with its number: most of it is near the first.
        targets = np.append(0.0, np.geomspace(1, layers, most)[:-1].round())
    elif len(targets) < layers and not resolved:
        # Likewise in a deep Pre-LN stream.
        near = np.geomspace(1, layers, most // 2).round() - 1
        targets = np.union1d(near, np.linspace(0, layers - 1, most // 2).round())
    targets = np.unique(np.append(targets, layers)).astype(int)
    size = max(1, CHUNK_ENTRIES // (network.last_gradient.size * network.parts))
    result = [
        variance(targets[first : first + size].tolist()) for first in range(0, len(targets), size)
    ]
    deviation = np.sqrt(np.concatenate(result))
    points = np.arange(layers + 1)
    after = np.clip(np.searchsorted(targets, points), 1, len(targets) - 1)
    weight = (points - targets[after - 1]) / (targets[after] - targets[after - 1])
    weight = weight.reshape(-1, *(1,) * (deviation.ndim - 1))
    deviation = (1 - weight) * deviation[after - 1] + weight * deviation[after]
    return np.moveaxis(deviation, 0, -1) ** 2


def first_order(variance: Array, what: str = "gradient") -> tuple[Array, tuple[str, ...]]:
    """A variance limited to `LARGEST`, and a note on the points where it is larger."""
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
