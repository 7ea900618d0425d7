"""Attention sinks: an additional key of value 0 whose logit is a parameter of the head.

With Z = sum_j e^{l_j} of a row and a sink logit s, the output is rho y, where y is attention
without a sink and rho = Z/(Z + e^s) = 1/(1 + e^{s - log Z}). For a row with itself powers of
1 - rho are integrals over exchangeable keys; for two rows log Z is taken as Gaussian, with the
moments E 1/Z and E 1/Z^2. See docs/theory/latent_attention.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ...engine.classes import ClassRows
from ...engine.state import Array, Kernel, ratio_or_zero
from .kernels import Paths
from .projections import LogitLaw, attention_diagnostics

NODES, DEGREES = 40, 16
"""Gauss-Hermite nodes of a function of log Z - s, and terms of its Hermite series: four digits for
products of two rows at a standard deviation of 3."""

STEP, SHARED_NODES = 0.5, 14
"""Spacing in log t of the integrals of one row, and nodes of the logits' common part."""


class OneRow(NamedTuple):
    """Statistics of rows of exchangeable keys, in the rows' shape.

    Attributes:
        center, variance: of the Gaussian log Z, without the logits' common part.
        kept, moved: E rho^2 and E rho^2 (1 - rho)^2.
        kept_squares, moved_squares: E rho^2 sum a^2 and E rho^2 (1 - rho)^2 sum a^2, a of a row
            without its sink, over E sum a^2.
    """

    center: Array
    variance: Array
    kept: Array
    moved: Array
    kept_squares: Array
    moved_squares: Array


def one_row(theta: Array, count: Array, shared: Array) -> OneRow:
    """Statistics of rows of n exchangeable keys, of logit variance theta around a common part b.

    E prod_j f(l_j) (Z + u)^{-k} = int t^{k-1} e^{-t u}/Gamma(k) prod_j E f e^{-t e^l} dt, with
    u = e^{s - b}, averaged over s - b.

    Args:
        shared: variance of s - b.
    """
    theta, count, shared = np.broadcast_arrays(
        *(np.asarray(a, float) for a in (theta, count, shared))
    )
    shape, (theta, count, shared) = theta.shape, (np.ravel(a) for a in (theta, count, shared))
    z = np.linspace(-6.4, 6.4, 65)
    weights = np.exp(-0.5 * z * z)
    weights /= weights.sum()
    root = np.sqrt(theta)
    first = -(6.4 * root + np.log(count)).max() - 16.0 - 4.0 * np.sqrt(shared.max())
    x = np.arange(first, 6.4 * root.max() + 4.0, STEP)
    e = np.exp(x[:, None] + root[:, None, None] * z)  # (rows, t, l)
    log_phi = np.log1p(np.maximum(np.expm1(-e) @ weights, -1.0 + 1e-15))
    twice = (e * e * np.exp(-e)) @ weights
    every = np.exp(count[:, None] * log_phi)
    rest = count[:, None] * np.exp((count[:, None] - 1.0) * log_phi) * twice

    nodes, shares = np.polynomial.hermite_e.hermegauss(SHARED_NODES)
    power = x + (np.sqrt(shared)[:, None] * nodes)[..., None]  # log t u: (rows, u, t)
    power = np.exp(np.minimum(power, 170.0))
    decay = np.exp(-power)

    def total(order: int, integrand: Array) -> Array:
        """Integral over log t, with the factor (t u)^order e^{-t u}, averaged over u."""
        integrals = np.einsum("rut,rt->ru", power**order * decay, integrand)
        return np.asarray(STEP * (integrals @ (shares / shares.sum())))

    p = [total(k, every) / math.factorial(k - 1) for k in (1, 2, 3, 4)]  # E (1 - rho)^k
    inverse = [STEP * (np.exp(k * x) * every).sum(1) for k in (1, 2)]
    variance = np.maximum(np.log(inverse[1] / inverse[0] ** 2), 0.0)
    squares = STEP * rest.sum(1)
    result = (
        0.5 * variance - np.log(inverse[0]),
        variance,
        1.0 - 2.0 * p[0] + p[1],
        p[1] - 2.0 * p[2] + p[3],
        total(0, rest) / squares,
        total(2, rest) / (6.0 * squares),
    )
    return OneRow(*(values.reshape(shape)[()] for values in result))


@functools.lru_cache(maxsize=1)
def _hermite() -> tuple[Array, Array, Array]:
    """Nodes z, weights w, and (degrees, nodes) Hermite polynomials with E h_m h_n = delta_mn."""
    z, w = np.polynomial.hermite_e.hermegauss(NODES)
    values = [np.polynomial.hermite_e.hermeval(z, np.eye(DEGREES)[k]) for k in range(DEGREES)]
    sizes = [math.sqrt(math.factorial(k)) for k in range(DEGREES)]
    return z, w / w.sum(), np.array(values) / np.array(sizes)[:, None]


class SinkLayer:
    """An attention layer with a sink in every head; other attributes are those of `layer`.

    Attributes:
        layer: the attention without sinks, at any resolution.
        rows: second moments of rho, the sum of a row's weights.
    """

    def __init__(self, layer: Any, law: LogitLaw, sink: float, tokens: Kernel) -> None:
        """Args:
        layer: the attention without sinks.
        sink: variance of the sinks' logits over heads.
        tokens: kernel of the values.
        """
        self.layer, self._law = layer, law
        queries, keys = law.queries.kernel, law.keys.kernel
        statistics = layer.diagnostics()
        size = queries.diagonal
        theta = np.reshape(statistics["logit_variance"], np.shape(size))
        count = np.reshape(layer.keys + 0.0 * statistics["logit_variance"], np.shape(size))
        scale, mean = (queries.lift(x)[0] for x in (law.scale, keys.mean_diagonal()))
        shared = np.maximum(scale * mean * size - theta, 0.0)
        row = one_row(theta, count, shared + sink)
        variance = shared + row.variance + sink

        # Correlation of s - log Z of two rows; the unshared parts of common keys correlate.
        first, second = queries.over_tokens(size)
        cosine = np.clip(ratio_or_zero(queries.off_diagonal, np.sqrt(first * second)), -1.0, 1.0)
        common, both = (np.sqrt(np.multiply(*queries.over_tokens(x))) for x in (shared, theta))
        most = np.maximum(*queries.over_tokens(count))
        fenton = np.log1p(np.expm1(np.minimum(theta, 500.0)) / count)
        narrow = np.sqrt(np.multiply(*queries.over_tokens(ratio_or_zero(row.variance, fenton))))
        diagonal = narrow * np.log1p(np.expm1(np.minimum(cosine * both, 500.0)) / most)
        sizes = np.sqrt(np.multiply(*queries.over_tokens(variance)))
        correlation = np.clip(ratio_or_zero(cosine * common + diagonal + sink, sizes), -1.0, 1.0)

        z, weights, polynomials = _hermite()
        logits = np.asarray(row.center)[..., None] + np.sqrt(variance)[..., None] * z
        kept = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
        self._mean = (kept * weights).sum(-1)[()]
        entropy = -(kept * np.log(np.maximum(kept, 1e-300)))
        entropy = entropy + np.where(kept < 1.0, -(1 - kept) * np.log1p(-kept * (kept < 1.0)), 0.0)
        self._entropy = (entropy * weights).sum(-1)

        def moments(values: Array, diagonal: Array) -> Kernel:
            """Second moments over rows of a function with these values at the nodes z."""
            terms = (values * weights) @ polynomials.T
            one, other = terms, terms
            if queries.resolved:
                one, other = terms[..., :, None, :], terms[..., None, :, :]
            off_diagonal = np.zeros(np.broadcast_shapes(np.shape(correlation), one.shape[:-1]))
            for k in reversed(range(DEGREES)):
                off_diagonal = off_diagonal * correlation + one[..., k] * other[..., k]
            return Kernel.of_parts(diagonal, off_diagonal[()], queries.resolved)

        # The unshared part of a row's output is correlated with Z.
        self._output, self._squares = layer.forward(), row.kept_squares
        squares = np.reshape(layer.sum_square, np.shape(size))
        unshared, _ = queries.lift(
            np.maximum(tokens.mean_diagonal() - tokens.mean_off_diagonal(), 0.0)
        )
        part = np.minimum(ratio_or_zero(squares * unshared, self._output.diagonal), 1.0)

        def mixed(whole: Array, of_squares: Array) -> Array:
            return whole + part * (of_squares - whole)

        self.rows = moments(kept, row.kept)
        self._mixing = moments(kept, mixed(row.kept, row.kept_squares))
        self._moved = moments(kept * (1.0 - kept), mixed(row.moved, row.moved_squares))
        # covariance of sum_j a_j l_j of two rows, over that of their queries
        unit = np.sqrt(first * second)
        self._logits = Kernel.of_parts(
            ratio_or_zero(shared + theta / count, size),
            ratio_or_zero(common + both / most, unit),
            queries.resolved,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij x_j."""
        result: Kernel = self._output * self._mixing
        return result

    def mean_output(self) -> Kernel:
        """Overlap of the outputs of two heads that share keys and values, but not sinks."""
        first, second = self.rows.over_tokens(self._mean)
        result: Kernel = self.layer.mean_output()
        return result.weighted(self._mean**2, first * second)

    def weights(self) -> Any:
        """Mean attention; None: uniform, for exchangeable tokens."""
        result = self.layer.weights()
        if isinstance(result, ClassRows):
            mean = self._mean[..., : result.weights.shape[-2], None]
            return result._replace(weights=result.weights * mean)
        return None if result is None else result * self._mean[..., None]

    @property
    def sum_square(self) -> Array:
        """E sum_j a_ij^2 over the keys with values."""
        result: Array = self.layer.sum_square
        return result * np.reshape(self._squares, np.shape(result))

    def diagnostics(self) -> dict[str, Array]:
        """See `attention_diagnostics`; the entropy is that of a row with its sink."""
        result = self.layer.diagnostics()
        entropy = self._mean * result["entropy"] + self._entropy
        return attention_diagnostics(
            result["logit_variance"], self.sum_square, entropy, self.layer.keys
        )

    def _of_sums(self, gained: Kernel) -> Kernel:
        """Kernel of dLoss/dlog Z of the rows, per feature, from the gradient at sum_j a_ij x_j."""
        result: Kernel = gained * self._output * self._moved
        return result

    def backward(self, gained: Kernel) -> Paths[Kernel]:
        """Paths of the gradient at sum_j a_ij x_j: those without sinks, and through log Z, whose
        gradient in a row's logits are its weights."""
        plain: Paths[Kernel] = self.layer.backward(gained * self._mixing)
        sums = self._of_sums(gained)
        grad_in = (sums * self._law.queries.kernel).scaled(self._law.scale)
        keys = self.layer.backward(grad_in).value
        return plain._replace(query=plain.query + sums * self._logits, key=plain.key + keys)

    def overlap_path(self, gained: Kernel) -> Kernel:
        """Growth of the query path per unit of the variance of two tokens' overlap."""
        result: Kernel = self.layer.overlap_path(gained * self._mixing)
        return result

    def response(self) -> Kernel:
        """Query path per unit of the gradient."""
        result: Kernel = self.layer.response() * self._mixing
        return result + self._of_sums(self.rows.with_ones()) * self._logits

    def table_gradient(self, leaf: Any, gained: Kernel) -> Array | None:
        """Squared gradient norm of a table of relative biases."""
        result: Array | None = self.layer.table_gradient(leaf, gained * self._mixing)
        return result

    def sink_gradient(self, leaf: Any, gained: Kernel, length: int) -> Array:
        """Squared gradient norm of the sinks: dLoss/ds = -sum_i dLoss/dlog Z_i."""
        return np.asarray(leaf.memory_width * self._of_sums(gained).total(length))
