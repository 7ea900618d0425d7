"""A residual connection between several streams (hyper-connections).

Streams start as copies, and nothing in how their coefficients are drawn distinguishes one from
another. So their second moments are those of their mean m and of one stream's deviation from it,
x_i = m + d_i, which are uncorrelated; rows and columns of the mixing matrix sum to 1, and with the
mean of the coefficients w of a block's output y,

    m <- m + mean(w) y,    d_k <- sum_j mix_jk d_j + (w_k - mean(w)) y.

Logits of coefficients are Gaussian, independent of one another and, between two tokens, correlated
by c = E x_s . x_t / (|x_s| |x_t|), all streams side by side; every average is a function of c. What
a block reads, (sum_i r_i) m + sum_i r_i d_i, is normalised behind: its size, which varies with r,
is divided out here token by token. See docs/theory/streams.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from ..engine.composition import Addition, Pulled, Residual, added, square
from ..engine.derivative import plain, primitive, pullback
from ..engine.laws import Layout
from ..engine.response import Around, Sublayer, matrix_of
from ..engine.state import Array, Gradient, Kernel, Signal, Values, ratio_or_zero
from ..engine.trace import Record, Run
from ..model.streams import HyperConnections

NODES = 9
"""Correlations of logits, between -1 and 1, at which means over coefficients are taken; between
them they are polynomials."""
DRAWS = 2**12
"""Of matrices of logits, for mixing and for what a norm divides by."""
POINTS = 96
"""Of Gauss-Hermite quadrature in each of two logits."""

_series: Callable[..., Array] = primitive(
    chebyshev.chebval,
    lambda r, c, series: lambda g: g * _series(c, chebyshev.chebder(series)),
)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Means over two tokens' coefficients, Chebyshev series in their logits' correlation.

    Attributes:
        declared: what they are of.
        read: E sum_i (r_i - mean r)(r'_i - mean r') N/(N - 1) / (sum r sum r'): of d in what a
            block reads, per unit of m.
        write: E mean(w) mean(w'), what the mean stream gets of a block's output.
        spread: E (w_k - mean w)(w'_k - mean w'), what one stream's deviation gets.
        scatter: covariance of mean(w)^2 and mean(w')^2.
        mixing: E tr(M^T P M' P)/(N - 1), P without the mean: what is left of d.
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
        """A mean over one token's coefficients."""
        return float(chebyshev.chebval(1.0, getattr(self, name)))


@functools.lru_cache(maxsize=64)
def coefficients(declared: HyperConnections, d_model: int) -> Coefficients:
    """Means over the coefficients that a declaration draws."""
    count, variance = declared.streams, declared.logit_variance(d_model)
    mean, square_ = _sigmoids(declared.write_bias, variance, declared.write_factor)
    write = _fitted(square_ / count + (1 - 1 / count) * mean**2)
    spread = _fitted((1 - 1 / count) * (square_ - mean**2))
    one = np.ones(1)
    if declared.reads == "one":
        return Coefficients(declared, one, one, 0 * one, 0 * one, one, 1.0, 0.0)
    mean, square_ = _sigmoids(declared.read_bias, variance)
    size = float(count * square_[-1] + count * (count - 1) * mean**2)

    def squares(z: Array) -> Array:
        mean = declared.write_factor * _sigmoid(declared.write_bias + z).mean(-1)
        return mean**2 - np.mean(mean**2)

    scatter = _fitted(_pairs((count,), variance, squares))
    mixing = one
    if declared.mixing == "sinkhorn":
        mixed = _pairs((count, count), variance, lambda z: _without_mean(sinkhorn(z, declared)))
        mixing = _fitted(mixed / (count - 1))
    read = _pairs(
        (1, count), variance, lambda z: _without_mean(_shares(_sigmoid(z + declared.read_bias)))
    )
    read = _fitted(read * count / (count - 1))
    return Coefficients(declared, read, write, spread, scatter, mixing, size, variance)


def sinkhorn(logits: Array, declared: HyperConnections) -> Array:
    """(..., N, N) the matrices of these logits, whose rows and columns sum to 1."""
    small = declared.epsilon
    mixed = np.exp(logits - logits.max(-1, keepdims=True))
    mixed = mixed / mixed.sum(-1, keepdims=True) + small
    mixed = mixed / (mixed.sum(-2, keepdims=True) + small)
    for _ in range(declared.rounds - 1):
        mixed = mixed / (mixed.sum(-1, keepdims=True) + small)
        mixed = mixed / (mixed.sum(-2, keepdims=True) + small)
    return mixed


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _shares(read: Array) -> Array:
    return read / read.sum(-1, keepdims=True)


def _without_mean(x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x - x.mean(-2, keepdims=True) if x.shape[-2] > 1 else x


def _nodes() -> Array:
    return -np.cos(np.pi * np.arange(NODES) / (NODES - 1))


def _fitted(values: Array) -> Array:
    return chebyshev.chebfit(_nodes(), values, NODES - 1)


def _pairs(shape: tuple[int, ...], variance: float, function: Callable[[Array], Array]) -> Array:
    """E f(z) . f(z') over matrices of logits, at the correlations of `_nodes`."""
    random, deviation = np.random.default_rng(0), variance**0.5
    one, other = random.standard_normal((2, DRAWS, *shape))
    first = function(deviation * one)
    return np.array(
        [
            np.sum(first * function(deviation * (c * one + (1 - c * c) ** 0.5 * other))) / DRAWS
            for c in _nodes()
        ]
    )


def _sigmoids(bias: float, variance: float, factor: float = 1.0) -> tuple[float, Array]:
    """E f(z) and, at the correlations of `_nodes`, E f(z) f(z'), of f a sigmoid times a factor."""
    at, weights = np.polynomial.hermite_e.hermegauss(POINTS)
    weights, deviation = weights / weights.sum(), variance**0.5
    first = factor * _sigmoid(bias + deviation * at)
    c = _nodes()[:, None, None]
    second = factor * _sigmoid(bias + deviation * (c * at[:, None] + np.sqrt(1 - c * c) * at))
    return float(weights @ first), (second @ weights) @ (weights * first)


@dataclass(frozen=True)
class Connection(Residual):
    """A block that reads from several streams and writes to them; of their mean, which is what
    travels as the signal, a residual connection.

    Attributes:
        block: name of the block.
        streams: means over its coefficients.
        epsilon: added to the streams' mean square where they are normalised for the logits.
    """

    block: str = ""
    streams: Any = None
    epsilon: float = 0.0

    def propagate(self, signal: Signal, run: Run) -> Record:
        kernel = signal.kernel
        apart = kernel.scaled(0.0) if signal.apart is None else signal.apart
        read = _Law(self._read, signal, kernel, apart)
        entering = signal.replace(kernel=read.kernels[0], apart=None)
        branch = self.branch.propagate(entering, run)
        scale = square(self.branch_scale)
        scaled = branch.output.kernel.scaled(scale)
        write = _Law(self._write, signal, kernel, apart, scaled)
        share = scale * self.streams.at_one("write")
        varies = branch.output.fluctuation
        if varies is not None:
            varies = varies.scaled(share)
            varies = varies._replace(norms=varies.norms + self._scattered(write, scaled))
        gained = branch.output.replace(kernel=write.kernels[0], fluctuation=varies)
        output = added(signal, gained, 1.0, 1.0, keeps_mean=True).replace(apart=write.kernels[1])
        return run.passed(Record(self, run.layer, signal, output, (branch,), (read, write)))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        kernel, (read, write) = gradient.kernel, record.pullback
        apart = kernel.scaled(0.0) if gradient.apart is None else gradient.apart
        none = kernel.scaled(0.0)
        *_, handed, _, _ = write.pull(kernel, apart, none)
        along = self._at_coefficients(record, gradient)
        kept, kept_apart, _, *of_writing = write.pull(along, apart, none)
        scale = square(self.branch_scale)
        returned: list[Kernel] = []

        def entered(grad_in: Kernel) -> Kernel:
            returned.extend(read.pull(grad_in))
            return returned[0]

        gained = write.kernels[0].diagonal
        kept, handed = kernel + kept, self._as_norms_answer(record, gradient, handed.scaled(scale))
        done = self._normalised(record, gradient, kept, handed, gained, run, entered)
        _, more_apart, *of_reading = returned
        assert done.grad_in is not None
        done.grad_in.apart = kept_apart + more_apart
        both = [one + two for one, two in zip(of_writing, of_reading, strict=True)]
        weights = functools.partial(self._weights, record.input, *both)
        done.pulled = Pulled(done.grad_in, weights)
        return done

    def _weights(self, signal: Signal, by_weights: Kernel, by_biases: Kernel) -> Values:
        """Of the derivatives in what replicas' weights and biases share."""
        of, length, width = self.streams, signal.seq_len, signal.width
        if not of.logit_variance:
            return {}
        return {
            f"{self.block}.streams": width * by_weights.total(length) / of.declared.variance,
            f"{self.block}.streams.bias": width * by_biases.total(length) / of.logit_variance,
        }

    def _scattered(self, write: _Law, gained: Kernel) -> Kernel:
        """Covariances of squared norms that coefficients scatter, of what the mean stream gets.

        Of pairs, such that Cov(o_ij, o_ii) = y_ii y_ij (`engine.fluctuation`) is that of a scale a
        in o_ij = a_i a_j C_ij: (1 + Corr(a_i^2, a_j^2))/2 of one token's.
        """
        one = self.streams.at_one("scatter")
        pairs = one * (0.5 + 0.5 * self._scattered_alike(write)) ** 2 * gained.off_diagonal**2
        return Kernel.joined(one * gained.diagonal**2, pairs, gained.resolved)

    def _scattered_alike(self, write: _Law) -> Array:
        """Correlation of two tokens' mean(w)^2."""
        of, c = self.streams, write.kernels[2].off_diagonal
        one = of.at_one("scatter")
        return chebyshev.chebval(c, of.scatter) / one if one else 1.0

    def _as_norms_answer(self, record: Record, gradient: Gradient, handed: Kernel) -> Kernel:
        """What a block receives where norms behind send the less back to a token the more it got:
        E mean(w)^2 |g|^2 = E mean(w)^2 E |g|^2 (1 - response Cov(mean(w)^2, |m|^2)/...), written
        1/(1 + ...)."""
        of, (_, write) = self.streams, record.pullback
        gained = write.kernels[0].diagonal
        spread = of.at_one("scatter") / of.at_one("write") ** 2
        falls = (
            spread * gradient.norm_response * ratio_or_zero(gained, record.output.kernel.diagonal)
        )
        first, second = handed.over_tokens(falls)
        like = self._scattered_alike(write)
        return handed.weighted(1 / (1 + falls), 1 / (1 + 0.25 * (first + second) * (1 + like)))

    def _at_coefficients(self, record: Record, gradient: Gradient) -> Kernel:
        """The gradient at the mean stream as it meets the block's output y in a coefficient's own,
        g . y: of what g lacks along m, the part of y in m lies along y."""
        gained = record.pullback[1].kernels[0].diagonal
        share = ratio_or_zero(gained, record.output.kernel.diagonal)
        lost = share * (1.0 - gradient.radial)
        first, second = gradient.kernel.over_tokens(lost)
        return gradient.kernel.weighted(1.0 - lost, 1.0 - (first + second) / 2)

    def response(self, record: Record, around: Around) -> Sublayer:
        of, c = self.streams, record.pullback[1].kernels[2]
        square_of_mean = of.at_one("write") - of.at_one("spread") / (of.declared.streams - 1)
        one, two = (chebyshev.chebval(part, of.write) for part in (c.diagonal, c.off_diagonal))
        relative = Kernel.joined(one, two, c.resolved).scaled(1 / square_of_mean)
        scatter = relative - relative.with_ones()
        adding = square(self.branch_scale) * of.at_one("write")
        result = around.added(record, record.children[0], square(self.skip_scale), adding)
        return dataclasses.replace(result, scatter=matrix_of(scatter, record.input.seq_len))

    def addition(self, record: Record) -> Addition:
        mean = square(self.branch_scale) * self.streams.at_one("write")
        return Addition(record, record.children[0], 1.0, mean)

    def stream_row(self, record: Record) -> dict[str, Any]:
        """What it does, as `Prediction.streams` has it."""
        of, (_, write) = self.streams, record.pullback
        both = record.output.kernel, write.kernels[1]
        mean, apart = (float(one.mean_diagonal()) for one in both)
        return {
            "layer": record.layer,
            "block": self.block,
            "read": of.size,
            "write": of.at_one("write"),
            "mixing": of.at_one("mixing"),
            "logit_correlation": float(write.kernels[2].mean_off_diagonal()),
            "variance": mean,
            "apart": apart,
            "likeness": (mean - apart / (of.declared.streams - 1)) / (mean + apart),
        }

    def _read(
        self, layout: Layout, m: Array, d: Array, weights: Array, biases: Array
    ) -> tuple[Array, ...]:
        """What the block reads, of every token the part that its norm leaves, in the size of m."""
        mean, apart = layout.variances(plain(m)), layout.variances(plain(d))
        one = self.streams.at_one("read")
        sizes = [1.0 + one * ratio_or_zero(b, a) for a, b in zip(mean, apart, strict=True)]
        c = self._logits(mean, apart, m, d, weights, biases)
        return ((m + _series(c, self.streams.read) * d) / np.sqrt(sizes[0] * sizes[1]),)

    def _write(
        self, layout: Layout, m: Array, d: Array, y: Array, weights: Array, biases: Array
    ) -> tuple[Array, ...]:
        """What the mean stream gets of the block's output, what a stream's deviation becomes, and
        the logits' correlation."""
        mean, apart = layout.variances(plain(m)), layout.variances(plain(d))
        c = self._logits(mean, apart, m, d, weights, biases)
        of = self.streams
        mixed = _series(c, of.mixing) * d + _series(c, of.spread) * y
        return _series(c, of.write) * y, mixed, c

    def _logits(
        self, mean: Any, apart: Any, m: Array, d: Array, weights: Array, biases: Array
    ) -> Array:
        """Correlation of two tokens' logits, across replicas: `weights` and `biases` are what the
        replicas' matrices and biases share beyond, per unit of the logits' variance."""
        first, second = (a + b + self.epsilon for a, b in zip(mean, apart, strict=True))
        c = (m + d) * ratio_or_zero(1.0, np.sqrt(first * second))
        return c * (1.0 + weights) + biases


class _Law:
    """A function entry by entry of kernels, and of what replicas of the weights share."""

    def __init__(
        self, function: Callable[..., tuple[Array, ...]], signal: Signal, *kernels: Kernel
    ) -> None:
        self.layout, self.function = Layout.of(kernels[0], signal.seq_len), function
        given = np.broadcast_arrays(*(self.layout.array(one) for one in kernels))
        self.given = *given, *(np.zeros(given[0].shape) for _ in range(2))
        self.kernels = tuple(map(self.layout.kernel, function(self.layout, *self.given)))

    def pull(self, *gradients: Kernel) -> list[Kernel]:
        """Gradients at the kernels, then at what replicas share, from those at the results."""
        function = functools.partial(self.function, self.layout)
        _, pull = pullback(function, *self.given)
        back = pull(tuple(map(self.layout.array, gradients)))
        return [self.layout.kernel(one) for one in back]
