"""Attention sinks: one more key, of value 0 and of a logit that is a parameter of the head.

With Z = sum_j e^{l_j} of a row and a sink logit s, what leaves is rho y, where y is attention
without a sink and rho = Z/(Z + e^s) = 1/(1 + e^{s - log Z}). log Z is taken as Gaussian: of its
variance, what all keys of a row share, and log(1 + (e^theta - 1)/n) of the sum of n log-normal
terms of logit variance theta (Fenton 1960). That is exact for one key, and to leading order in 1/n.
See docs/theory/latent_attention.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...engine.classes import ClassRows
from ...engine.state import Array, Kernel, ratio_or_zero
from .kernels import Paths
from .projections import LogitLaw, attention_diagnostics

NODES, DEGREES = 40, 16
"""Gauss-Hermite nodes of a function of log Z - s, and terms of its series: at a standard deviation
of 3, products of two rows keep four digits."""


@functools.lru_cache(maxsize=1)
def _hermite() -> tuple[Array, Array, Array]:
    """Nodes z, weights w, and (degrees, nodes) Hermite polynomials of E h_m h_n = delta_mn."""
    z, w = np.polynomial.hermite_e.hermegauss(NODES)
    every = [np.polynomial.hermite_e.hermeval(z, np.eye(DEGREES)[k]) for k in range(DEGREES)]
    sizes = [math.sqrt(math.factorial(k)) for k in range(DEGREES)]
    return z, w / w.sum(), np.array(every) / np.array(sizes)[:, None]


class SinkLayer:
    """A layer of attention whose heads have a sink; what it does not state is the layer's own.

    Attributes:
        layer: the attention without sinks, in whatever resolution.
        rows: second moments of rho, what is left of a row that summed to 1.
        moved: second moments of rho (1 - rho), the derivative of rho in log Z.
    """

    def __init__(self, layer: Any, law: LogitLaw, sink: float) -> None:
        """Args:
        layer: the attention without sinks.
        law: of its logits.
        sink: variance of the sinks' logits over heads.
        """
        self.layer, self._law = layer, law
        queries, keys = law.queries.kernel, law.keys.kernel
        told = layer.diagnostics()
        size = queries.diagonal
        theta = np.reshape(told["logit_variance"], np.shape(size))
        count = np.reshape(layer.keys + 0.0 * told["logit_variance"], np.shape(size))
        scale, mean = (queries.lift(one)[0] for one in (law.scale, keys.mean_diagonal()))
        total = scale * mean * size
        shared = np.maximum(total - theta, 0.0)

        def apart(theta: Any, count: Any) -> Any:
            return np.log1p(np.expm1(np.minimum(theta, 500.0)) / count)

        own = apart(theta, count)
        variance = shared + own + sink
        center = np.log(count) + 0.5 * theta - 0.5 * own

        cosine = self._of_pairs(queries, ratio_or_zero)
        both = [np.sqrt(np.multiply(*queries.over_tokens(one))) for one in (shared, theta)]
        most = np.maximum(*queries.over_tokens(count))
        covariance = cosine * both[0] + apart(cosine * both[1], most) + sink
        sizes = np.sqrt(np.multiply(*queries.over_tokens(variance)))
        correlation = np.clip(ratio_or_zero(covariance, sizes), -1.0, 1.0)

        z, weights, polynomials = _hermite()
        logits = center[..., None] + np.sqrt(variance)[..., None] * z
        kept = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
        self._mean = (kept * weights).sum(-1)[()]
        entropy = -(kept * np.log(np.maximum(kept, 1e-300)))
        entropy = entropy + np.where(kept < 1.0, -(1 - kept) * np.log1p(-kept * (kept < 1.0)), 0.0)
        self._entropy = (entropy * weights).sum(-1)

        def moments(values: Array) -> Kernel:
            terms = (values * weights) @ polynomials.T
            first, second = (
                (terms, terms)
                if not queries.resolved
                else (terms[..., :, None, :], terms[..., None, :, :])
            )
            pairs = np.zeros(np.broadcast_shapes(np.shape(correlation), first.shape[:-1]))
            for k in reversed(range(DEGREES)):
                pairs = pairs * correlation + first[..., k] * second[..., k]
            own = (values * values * weights).sum(-1)[()]
            return Kernel.joined(own, pairs[()], queries.resolved)

        self.rows, self.moved = moments(kept), moments(kept * (1.0 - kept))
        # covariance of sum_j a_j l_j of two rows, over their queries'
        alone = shared + theta / count
        pairs = both[0] + both[1] / most
        unit = np.sqrt(np.multiply(*queries.over_tokens(size)))
        self._logits = Kernel.joined(
            ratio_or_zero(alone, size), ratio_or_zero(pairs, unit), queries.resolved
        )

    @staticmethod
    def _of_pairs(queries: Kernel, ratio: Any) -> Array:
        first, second = queries.over_tokens(queries.diagonal)
        return np.clip(ratio(queries.pairs, np.sqrt(first * second)), -1.0, 1.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij x_j."""
        found: Kernel = self.layer.forward() * self.rows
        return found

    def mean_output(self) -> Kernel:
        """Overlap of the outputs of two heads that share keys and values, not their sinks."""
        first, second = self.rows.over_tokens(self._mean)
        found: Kernel = self.layer.mean_output()
        return found.weighted(self._mean**2, first * second)

    def weights(self) -> Any:
        """Mean attention; None: uniform, as far as tokens alike can tell."""
        found = self.layer.weights()
        if isinstance(found, ClassRows):
            mean = self._mean[..., : found.weights.shape[-2], None]
            return found._replace(weights=found.weights * mean)
        return None if found is None else found * self._mean[..., None]

    @property
    def sum_square(self) -> Array:
        """E sum_j a_ij^2 over the keys with values."""
        return self.layer.sum_square * self.rows.diagonal

    def diagnostics(self) -> dict[str, Array]:
        """See `attention_diagnostics`; the entropy is that of a row with its sink."""
        found = self.layer.diagnostics()
        entropy = self._mean * found["entropy"] + self._entropy
        return attention_diagnostics(
            found["logit_variance"], self.sum_square, entropy, self.layer.keys
        )

    def _of_sums(self, gained: Kernel) -> Kernel:
        """Of dLoss/dlog Z of two rows, per feature, from the gradient at sum_j a_ij x_j."""
        found: Kernel = gained * self.layer.forward() * self.moved
        return found

    def backward(self, gained: Kernel) -> Paths[Kernel]:
        """Of the gradient at sum_j a_ij x_j: as without sinks, and through log Z, whose gradient
        in a row's logits are its weights."""
        plain: Paths[Kernel] = self.layer.backward(gained * self.rows)
        sums = self._of_sums(gained)
        sent = (sums * self._law.queries.kernel).scaled(self._law.scale)
        keys = self.layer.backward(sent).value
        return plain._replace(query=plain.query + sums * self._logits, key=plain.key + keys)

    def overlap_path(self, gained: Kernel) -> Kernel:
        """What the query path gains per unit of the variance of two tokens' overlap."""
        found: Kernel = self.layer.overlap_path(gained * self.rows)
        return found

    def response(self) -> Kernel:
        """What the query path is per unit of the gradient."""
        ones = self.rows.with_ones()
        found: Kernel = self.layer.response() * self.rows
        return found + self._of_sums(ones) * self._logits

    def table_gradient(self, leaf: Any, gained: Kernel) -> Array | None:
        """Of a table of relative biases."""
        found: Array | None = self.layer.table_gradient(leaf, gained * self.rows)
        return found

    def sink_gradient(self, leaf: Any, gained: Kernel, length: int) -> Array:
        """Of the heads' sinks: dLoss/ds = -sum_i dLoss/dlog Z_i."""
        return np.asarray(leaf.memory_width * self._of_sums(gained).total(length))
