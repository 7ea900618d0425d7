"""A residual connection between several streams (hyper-connections).

The streams start as copies and their coefficients are exchangeable, so second moments are those of
the streams' mean m and of one stream's deviation from it, x_i = m + d_i, which are uncorrelated.
Rows and columns of the mixing matrix sum to 1, and with the coefficients w of a block's output y,

    m <- m + mean(w) y,    d_k <- sum_j mix_jk d_j + (w_k - mean(w)) y.

The logits of the coefficients are Gaussian, independent of one another and, for two tokens, of
correlation c = E x_s . x_t / (|x_s| |x_t|), all streams concatenated; every average is a function
of c. The block's input (sum_i r_i) m + sum_i r_i d_i is normalised by the block, so its size, which
fluctuates with r, is divided out here token by token. See docs/theory/streams.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from ..engine.composition import Addition, PullbackResult, Residual, added, square
from ..engine.derivative import plain, primitive, pullback
from ..engine.laws import Layout
from ..engine.response import GradientUnits, Sublayer, matrix_of
from ..engine.state import Array, Gradient, Kernel, Signal, Values, ratio_or_zero
from ..engine.trace import Record, Run
from ..model.streams import HyperConnections

NODES = 9
"""Chebyshev nodes in the correlation of logits, on [-1, 1], for means over coefficients."""
DRAWS = 2**12
"""Random draws of the logits, for means of the mixing matrices and of normalised coefficients."""
POINTS = 96
"""Gauss-Hermite points in each of two logits."""

_series: Callable[..., Array] = primitive(
    chebyshev.chebval,
    lambda r, c, series: lambda g: g * _series(c, chebyshev.chebder(series)),
)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Means over the coefficients of two tokens: Chebyshev series in their logits' correlation.

    Attributes:
        declared: the declaration.
        read: E sum_i (r_i - mean r)(r'_i - mean r') N/(N - 1) / (sum r sum r'), weight of d in the
            block's input, per unit of m.
        write: E mean(w) mean(w'), weight of the block's output in m.
        spread: E (w_k - mean w)(w'_k - mean w'), weight of the block's output in d.
        scatter: covariance of mean(w)^2 and mean(w')^2.
        mixing: E tr(M^T P M' P)/(N - 1), P the projection that removes the mean: weight of d in d.
        size: E (sum_i r_i)^2 of one token.
        logit_variance: of every coefficient.
    """

    declared: HyperConnections
    read: Array
    write: Array
    spread: Array
    scatter: Array
    mixing: Array
    size: float
    logit_variance: float

    def at_one(self, name: str) -> float:
        """The mean over one token's coefficients."""
        return float(chebyshev.chebval(1.0, getattr(self, name)))


@functools.lru_cache(maxsize=64)
def coefficients(declared: HyperConnections, d_model: int) -> Coefficients:
    """`Coefficients` of a declaration."""
    count, variance = declared.streams, declared.logit_variance(d_model)
    mean, square_ = _sigmoids(declared.write_bias, variance, declared.write_factor)
    write = _fitted(square_ / count + (1 - 1 / count) * mean**2)
    spread = _fitted((1 - 1 / count) * (square_ - mean**2))
    constant = np.ones(1)
    if declared.reads == "one":
        zero = 0 * constant
        return Coefficients(declared, constant, constant, zero, zero, constant, 1.0, 0.0)
    mean, square_ = _sigmoids(declared.read_bias, variance)
    size = float(count * square_[-1] + count * (count - 1) * mean**2)

    def squares(z: Array) -> Array:
        mean = declared.write_factor * _sigmoid(declared.write_bias + z).mean(-1)
        return mean**2 - np.mean(mean**2)

    scatter = _fitted(_pairs((count,), variance, squares))
    mixing = constant
    if declared.mixing == "sinkhorn":
        mixed = _pairs((count, count), variance, lambda z: _without_mean(sinkhorn(z, declared)))
        mixing = _fitted(mixed / (count - 1))
    read = _pairs(
        (1, count), variance, lambda z: _without_mean(_shares(_sigmoid(z + declared.read_bias)))
    )
    read = _fitted(read * count / (count - 1))
    return Coefficients(declared, read, write, spread, scatter, mixing, size, variance)


def sinkhorn(logits: Array, declared: HyperConnections) -> Array:
    """(..., N, N) matrices with these logits whose rows and columns sum to 1."""
    epsilon = declared.epsilon
    matrix = np.exp(logits - logits.max(-1, keepdims=True))
    matrix = matrix / matrix.sum(-1, keepdims=True) + epsilon
    matrix = matrix / (matrix.sum(-2, keepdims=True) + epsilon)
    for _ in range(declared.rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdims=True) + epsilon)
        matrix = matrix / (matrix.sum(-2, keepdims=True) + epsilon)
    return matrix


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _shares(read: Array) -> Array:
    return read / read.sum(-1, keepdims=True)


def _without_mean(x: Array) -> Array:
    """Remove the means of columns, and of rows if there are several."""
    x = x - x.mean(-1, keepdims=True)
    return x - x.mean(-2, keepdims=True) if x.shape[-2] > 1 else x


def _nodes() -> Array:
    return -np.cos(np.pi * np.arange(NODES) / (NODES - 1))


def _fitted(values: Array) -> Array:
    return chebyshev.chebfit(_nodes(), values, NODES - 1)


def _pairs(shape: tuple[int, ...], variance: float, function: Callable[[Array], Array]) -> Array:
    """E f(z) . f(z') over matrices of logits, at the correlations of `_nodes`, by random draws."""
    random, deviation = np.random.default_rng(0), variance**0.5
    z, fresh = random.standard_normal((2, DRAWS, *shape))
    first = function(deviation * z)
    return np.array(
        [
            np.sum(first * function(deviation * (c * z + (1 - c * c) ** 0.5 * fresh))) / DRAWS
            for c in _nodes()
        ]
    )


def _sigmoids(bias: float, variance: float, factor: float = 1.0) -> tuple[float, Array]:
    """E f(z) and, at the correlations of `_nodes`, E f(z) f(z'), f a sigmoid times a factor."""
    at, weights = np.polynomial.hermite_e.hermegauss(POINTS)
    weights, deviation = weights / weights.sum(), variance**0.5
    first = factor * _sigmoid(bias + deviation * at)
    c = _nodes()[:, None, None]
    second = factor * _sigmoid(bias + deviation * (c * at[:, None] + np.sqrt(1 - c * c) * at))
    return float(weights @ first), (second @ weights) @ (weights * first)


@dataclass(frozen=True)
class Connection(Residual):
    """A block that reads from several streams and writes to them. The signal is their mean.

    Attributes:
        block: name of the block.
        streams: `Coefficients`.
        epsilon: added to the streams' mean square in the normalisation for the logits.
    """

    block: str = ""
    streams: Any = None
    epsilon: float = 0.0

    def propagate(self, signal: Signal, run: Run) -> Record:
        kernel = signal.kernel
        apart = kernel.scaled(0.0) if signal.stream_deviation is None else signal.stream_deviation
        read = _Law(self._read, signal, kernel, apart)
        entering = signal.replace(kernel=read.kernels[0], stream_deviation=None)
        branch = self.branch.propagate(entering, run)
        scale = square(self.branch_scale)
        scaled = branch.output.kernel.scaled(scale)
        write = _Law(self._write, signal, kernel, apart, scaled)
        share = scale * self.streams.at_one("write")
        fluctuation = branch.output.fluctuation
        if fluctuation is not None:
            fluctuation = fluctuation.scaled(share)
            norms = fluctuation.norms + self._scattered(write, scaled)
            fluctuation = fluctuation._replace(norms=norms)
        addend = branch.output.replace(kernel=write.kernels[0], fluctuation=fluctuation)
        output = added(signal, addend, 1.0, 1.0, keeps_mean=True).replace(
            stream_deviation=write.kernels[1]
        )
        return run.record_forward(Record(self, run.layer, signal, output, (branch,), (read, write)))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        kernel, (read, write) = gradient.kernel, record.pullback
        apart = (
            kernel.scaled(0.0) if gradient.stream_deviation is None else gradient.stream_deviation
        )
        zero = kernel.scaled(0.0)
        *_, to_branch, _, _ = write.pull(kernel, apart, zero)
        along = self._at_coefficients(record, gradient)
        carried, carried_apart, _, *of_writing = write.pull(along, apart, zero)
        to_branch = to_branch.scaled(square(self.branch_scale))
        returned: list[Kernel] = []

        def entered(grad_in: Kernel) -> Kernel:
            returned.extend(read.pull(grad_in))
            return returned[0]

        gained = write.kernels[0].diagonal
        to_branch = self._behind_norms(record, gradient, to_branch)
        carried = kernel + carried
        done = self._normalised(record, gradient, carried, to_branch, gained, run, entered)
        _, read_apart, *of_reading = returned
        assert done.grad_in is not None
        done.grad_in.stream_deviation = carried_apart + read_apart
        both = [w + r for w, r in zip(of_writing, of_reading, strict=True)]
        weights = functools.partial(self._weights, record.input, *both)
        done.pulled = PullbackResult(done.grad_in, weights)
        return done

    def _weights(self, signal: Signal, by_weights: Kernel, by_biases: Kernel) -> Values:
        """Squared gradient norms, from the derivatives in the replicas' covariance of weights and
        of biases."""
        streams, length, width = self.streams, signal.seq_len, signal.width
        if not streams.logit_variance:
            return {}
        return {
            f"{self.block}.streams": width * by_weights.total(length) / streams.declared.variance,
            f"{self.block}.streams.bias": width * by_biases.total(length) / streams.logit_variance,
        }

    def _scattered(self, write: _Law, gained: Kernel) -> Kernel:
        """Covariances of squared norms due to the fluctuation of mean(w), in the mean stream.

        Of pairs, such that Cov(o_ij, o_ii) = y_ii y_ij (`engine.fluctuation`) is that of a scale a
        in o_ij = a_i a_j C_ij: (1 + Corr(a_i^2, a_j^2))/2 of one token's.
        """
        scatter = self.streams.at_one("scatter")
        correlation = self._scatter_correlation(write)
        pairs = scatter * (0.5 + 0.5 * correlation) ** 2 * gained.off_diagonal**2
        return Kernel.of_parts(scatter * gained.diagonal**2, pairs, gained.resolved)

    def _scatter_correlation(self, write: _Law) -> Array:
        """Correlation of two tokens' mean(w)^2."""
        scatter, c = self.streams.at_one("scatter"), write.kernels[2].off_diagonal
        return chebyshev.chebval(c, self.streams.scatter) / scatter if scatter else 1.0

    def _behind_norms(self, record: Record, gradient: Gradient, to_branch: Kernel) -> Kernel:
        """Gradient at the block, if later norms reduce the gradient of tokens of large mean(w):
        E mean(w)^2 |g|^2 = E mean(w)^2 E |g|^2 (1 - response Cov(mean(w)^2, |m|^2)/...), written
        1/(1 + ...)."""
        streams, (_, write) = self.streams, record.pullback
        gained = write.kernels[0].diagonal
        spread = streams.at_one("scatter") / streams.at_one("write") ** 2
        reduction = (
            spread * gradient.norm_response * ratio_or_zero(gained, record.output.kernel.diagonal)
        )
        first, second = to_branch.over_tokens(reduction)
        pairs = 0.25 * (first + second) * (1 + self._scatter_correlation(write))
        return to_branch.weighted(1 / (1 + reduction), 1 / (1 + pairs))

    def _at_coefficients(self, record: Record, gradient: Gradient) -> Kernel:
        """The gradient g at the mean stream as it enters a coefficient's gradient g . y, y the
        block's output: if g lacks its part along m, it lacks that share of y in m along y."""
        gained = record.pullback[1].kernels[0].diagonal
        share = ratio_or_zero(gained, record.output.kernel.diagonal)
        lost = share * (1.0 - gradient.radial)
        first, second = gradient.kernel.over_tokens(lost)
        return gradient.kernel.weighted(1.0 - lost, 1.0 - (first + second) / 2)

    def response(self, record: Record, around: GradientUnits) -> Sublayer:
        streams, c = self.streams, record.pullback[1].kernels[2]
        count = streams.declared.streams
        square_of_mean = streams.at_one("write") - streams.at_one("spread") / (count - 1)
        diagonal, pairs = (
            chebyshev.chebval(x, streams.write) for x in (c.diagonal, c.off_diagonal)
        )
        relative = Kernel.of_parts(diagonal, pairs, c.resolved).scaled(1 / square_of_mean)
        scatter = relative - relative.with_ones()
        adding = square(self.branch_scale) * streams.at_one("write")
        result = around.added(record, record.children[0], square(self.skip_scale), adding)
        return dataclasses.replace(result, scatter=matrix_of(scatter, record.input.seq_len))

    def addition(self, record: Record) -> Addition:
        mean = square(self.branch_scale) * self.streams.at_one("write")
        return Addition(record, record.children[0], 1.0, mean)

    def stream_row(self, record: Record) -> dict[str, Any]:
        """A row of `Prediction.streams`."""
        streams, (_, write) = self.streams, record.pullback
        both = record.output.kernel, write.kernels[1]
        mean, apart = (float(kernel.mean_diagonal()) for kernel in both)
        return {
            "layer": record.layer,
            "block": self.block,
            "read": streams.size,
            "write": streams.at_one("write"),
            "mixing": streams.at_one("mixing"),
            "logit_correlation": float(write.kernels[2].mean_off_diagonal()),
            "variance": mean,
            "apart": apart,
            "likeness": (mean - apart / (streams.declared.streams - 1)) / (mean + apart),
        }

    def _read(
        self, layout: Layout, m: Array, d: Array, weights: Array, biases: Array
    ) -> tuple[Array, ...]:
        """The block's input, normalised token by token to the size of m."""
        mean, apart = layout.variances(plain(m)), layout.variances(plain(d))
        read = self.streams.at_one("read")
        sizes = [1.0 + read * ratio_or_zero(b, a) for a, b in zip(mean, apart, strict=True)]
        c = self._logits(mean, apart, m, d, weights, biases)
        return ((m + _series(c, self.streams.read) * d) / np.sqrt(sizes[0] * sizes[1]),)

    def _write(
        self, layout: Layout, m: Array, d: Array, y: Array, weights: Array, biases: Array
    ) -> tuple[Array, ...]:
        """The addition to m, the new d, and the logits' correlation."""
        mean, apart = layout.variances(plain(m)), layout.variances(plain(d))
        c = self._logits(mean, apart, m, d, weights, biases)
        streams = self.streams
        mixed = _series(c, streams.mixing) * d + _series(c, streams.spread) * y
        return _series(c, streams.write) * y, mixed, c

    def _logits(
        self, mean: Any, apart: Any, m: Array, d: Array, weights: Array, biases: Array
    ) -> Array:
        """Correlation of two tokens' logits across replicas. `weights` and `biases` are additional
        covariances of the replicas' matrices and biases, per unit of the logits' variance."""
        first, second = (a + b + self.epsilon for a, b in zip(mean, apart, strict=True))
        c = (m + d) * ratio_or_zero(1.0, np.sqrt(first * second))
        return c * (1.0 + weights) + biases


class _Law:
    """An entrywise function of kernels and of additional covariances of the replicas' weights."""

    def __init__(
        self, function: Callable[..., tuple[Array, ...]], signal: Signal, *kernels: Kernel
    ) -> None:
        self.layout, self.function = Layout.of(kernels[0], signal.seq_len), function
        arrays = np.broadcast_arrays(*map(self.layout.array, kernels))
        self.arguments = *arrays, *(np.zeros(arrays[0].shape) for _ in range(2))
        self.kernels = tuple(map(self.layout.kernel, function(self.layout, *self.arguments)))

    def pull(self, *gradients: Kernel) -> list[Kernel]:
        """Gradients at the kernels, then at both covariances, from those at the results."""
        function = functools.partial(self.function, self.layout)
        _, pull = pullback(function, *self.arguments)
        return list(map(self.layout.kernel, pull(tuple(map(self.layout.array, gradients)))))
