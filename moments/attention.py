"""Self-attention with all its gradient paths, for tokens alike or resolved by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .algebra import FLOAT
from .attention_profile import profiled_statistics
from .attention_statistics import AttentionStatistics, attention_statistics
from .composition import Leaf, Pullback, Pulled
from .kernels import KernelAttention
from .laws.attention import ATTENTION, ATTENTION_WITHOUT_VALUE
from .parts import evaluate
from .state import Array, Gradient, Kernel, Signal

# For every sequence of a batch, whether each of its tokens is real.
Padding = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class SelfAttention(Leaf):
    """Query, key and value projections, softmax with dropout, heads concatenated.

    Attributes:
        d_model: width of the input.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        causal: whether a token sees only itself and earlier ones.
        padding: for every sequence, which tokens are real; None: all. Nobody attends to the others.
    """

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    drop_prob: Any
    temperature: Any = 1.0
    causal: bool = False
    padding: Padding | None = None

    mixes_tokens: ClassVar[bool] = True

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        return self._by_token(signal) if signal.resolved else self._alike(signal)

    def _logit_scale(self) -> Any:
        """Covariance of the logits (i, j) and (k, l) over E[x_i x_k] E[x_j x_l]."""
        weights = _positive(self.query) * _positive(self.key)
        return self.d_model**2 * weights / self.temperature**2

    def _by_token(self, signal: Signal) -> tuple[Signal, Pullback]:
        tokens = signal.second_moment()
        matrices = tokens.pairs.reshape(-1, *tokens.pairs.shape[-2:])
        length = signal.seq_len
        masks = self._allowed(length, len(matrices))
        # What the tokens have of their own, which is what a row's logits vary with.
        own = tokens.mean_diagonal() * (tokens.mean_diagonal() - tokens.mean_pairs())
        wanted = self._logit_scale() * float(np.max(own))
        shrunk = min(1.0, LOGIT_VARIANCE_MAX / max(wanted, 1e-300))
        rows = [
            KernelAttention(
                matrix,
                logit_scale=self._logit_scale() * shrunk,
                allowed=allowed,
                drop_prob=self.drop_prob,
                d_model=self.d_model,
                d_head=self.d_head,
                norm_spread=_mean_spread(signal),
            )
            for matrix, allowed in zip(matrices, masks, strict=True)
        ]
        mixed = Kernel.of_matrix(
            np.stack([one.forward() for one in rows]).reshape(tokens.pairs.shape)
        )
        width = self.heads * self.d_head
        heads = mixed.scaled(self.d_model * self.value)
        output = Signal(heads, length, mean=0.0 * heads.diagonal, width=width)
        theta = np.stack([one.logit_variance for one in rows])
        output.facts = _facts(
            theta,
            np.stack([one.sum_square for one in rows]),
            np.stack([one.entropy for one in rows]),
            np.stack([mask.sum(-1) for mask in masks]).astype(float),
        )
        output.notes = _notes(wanted)
        if not output.notes and any(np.any(one.beyond_tables) for one in rows):
            output.notes = (_BEYOND_TABLES,)
        if signal.spread is not None:
            output.spread = (heads * heads).scaled(2 / width)

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel
            gained = received.scaled(width * self.value).pairs.reshape(matrices.shape)
            parts = [one.backward(matrix) for one, matrix in zip(rows, gained, strict=True)]

            def path(name: str) -> Kernel:
                stacked = np.stack([getattr(part, name) for part in parts])
                return Kernel.of_matrix(stacked.reshape(received.pairs.shape))

            def weights() -> dict[str, Array]:
                return self._weight_gradients(
                    length, tokens, mixed, received, path("query"), path("key")
                )

            return Pulled(Gradient(path("total"), gradient.seq_len), weights)

        return output, pullback

    def _allowed(self, length: int, sequences: int) -> list[np.ndarray]:
        """Which keys each query of each sequence sees, (L, L)."""
        mask = np.tri(length, dtype=bool) if self.causal else np.ones((length, length), bool)
        if self.padding is None:
            return [mask] * sequences
        # A query that sees no real key keeps itself: padding before a causal text.
        itself = np.eye(length, dtype=bool)
        padded = [mask & np.asarray(real, dtype=bool) for real in self.padding]
        seen = [np.where(one.any(-1, keepdims=True), one, itself) for one in padded]
        return seen if len(seen) == sequences else seen * sequences

    def _statistics(self, signal: Signal, wanted: Array, correlation: Array) -> AttentionStatistics:
        """Softmax statistics at the wanted logit scale, or at the most that is validated."""
        own = 1 - correlation
        spread = 0.0
        if signal.spread is not None:
            spread = signal.spread.diagonal / signal.kernel.diagonal**2
        if signal.algebra is FLOAT:
            # Tokens that are all but equal have logits without variance at any scale.
            scale = min(wanted, LOGIT_VARIANCE_MAX / max(own, 1e-12))
            if spread == 0.0 and scale <= PROFILED_SCALE:
                return profiled_statistics(
                    scale, correlation, signal.seq_len, self.d_model, self.d_head
                )
        else:
            scale = np.minimum(wanted, LOGIT_VARIANCE_MAX / np.maximum(own, 1e-12))
        return attention_statistics(
            scale, correlation, signal.seq_len, self.d_model, self.d_head, spread
        )

    def _alike(self, signal: Signal) -> tuple[Signal, Pullback]:
        kernel, algebra = signal.kernel, signal.algebra
        correlation = signal.correlation()
        wanted = kernel.diagonal**2 * self._logit_scale()
        statistics = self._statistics(signal, wanted, correlation)
        width = self.heads * self.d_head
        values: dict[str, Array] = {
            **statistics.values,
            "d_model": self.d_model,
            "d_head": self.d_head,
            "fan_out": width,
            "value": self.value,
            "seq_len": signal.seq_len,
            "drop_prob": self.drop_prob,
            "x_variance": kernel.diagonal,
            "x_correlation": correlation,
        }
        average = ATTENTION_WITHOUT_VALUE.under("refined")
        with_value = ATTENTION.under("refined")
        values["average_variance"] = evaluate(average["variance"], algebra, values)
        values["average_covariance"] = evaluate(average["covariance"], algebra, values)
        mixed = Kernel(
            kernel.diagonal * values["average_variance"],
            kernel.diagonal * values["average_covariance"],
        )
        heads = Kernel(
            evaluate(with_value["variance"], algebra, values),
            evaluate(with_value["covariance"], algebra, values),
        )
        output = Signal(heads, signal.seq_len, mean=0.0 * kernel.diagonal, width=width)
        output.facts = _facts(
            statistics.logit_variance,
            statistics.values["row_square"],
            statistics.entropy,
            float(signal.seq_len),
        )
        output.notes = _notes((1 - correlation) * wanted)
        if signal.spread is not None:
            # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment.
            output.spread = (heads * heads).scaled(2 / width)

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel
            paths = values | {
                "grad_variance": received.diagonal,
                "grad_covariance": received.pairs,
            }

            def path(name: str) -> Array:
                return evaluate(average[name], algebra, paths)

            paths |= {
                "value_path": path("grad_value"),
                "value_path_covariance": path("grad_value_covariance"),
                "query_path": path("grad_query"),
                "query_path_covariance": path("grad_query_covariance"),
                "key_path": path("grad_key"),
                "cross_path": path("grad_cross"),
            }
            sent = Kernel(
                evaluate(with_value["grad_variance"], algebra, paths),
                evaluate(with_value["grad_covariance"], algebra, paths),
            )

            def weights() -> dict[str, Array]:
                gain = width * self.value
                query = Kernel(paths["query_path"], paths["query_path_covariance"])
                key = Kernel(paths["key_path"], -paths["key_path"] / (signal.seq_len - 1))
                return self._weight_gradients(
                    signal.seq_len,
                    signal.second_moment(),
                    mixed,
                    received,
                    query.scaled(gain),
                    key.scaled(gain),
                )

            return Pulled(Gradient(sent, gradient.seq_len), weights)

        return output, pullback

    def _weight_gradients(
        self,
        length: int,
        tokens: Kernel,
        mixed: Kernel,
        received: Kernel,
        query: Kernel,
        key: Kernel,
    ) -> dict[str, Array]:
        """Expected squared gradient norms of the three projections.

        dW = sum_i x_i (dq_i)^T and the query path's gradient is W dq_i, so that
        E|dW|^2 = d_model sum_ij E[x_i x_j] E[dx_i dx_j] / (variance of W); for the keys alike.
        """
        size = self.d_model
        return {
            "query": size * (tokens * query).total(length) / _positive(self.query),
            "key": size * (tokens * key).total(length) / _positive(self.key),
            "value": size * self.heads * self.d_head * (mixed * received).total(length),
        }


PROFILED_SCALE = 5.0
"""Logit scale up to which statistics are read off a profile: its nodes, at every correlation, then
stay inside the softmax tables."""

LOGIT_VARIANCE_MAX = 12.0
"""Logit variance beyond which that of 12 stands in, with a warning."""


_BEYOND_TABLES = (
    "some rows have a logit variance beyond 8, where attention by token is extrapolated"
)


def _mean_spread(signal: Signal) -> float:
    """Var |x|^2 / E^2 |x|^2, averaged over tokens; 0 where it is not followed."""
    if signal.spread is None:
        return 0.0
    return float(np.mean(signal.spread.diagonal / signal.kernel.diagonal**2))


def _notes(logit_variance: Array) -> tuple[str, ...]:
    """Where the logits' variance leaves what the laws were measured at."""
    largest = float(np.max(logit_variance))
    if largest <= LOGIT_VARIANCE_MAX:
        return ()
    return (
        f"the logit variance {largest:.3g} is beyond {LOGIT_VARIANCE_MAX:g}: attention all but "
        f"picks one token, and the moments of {LOGIT_VARIANCE_MAX:g} stand in",
    )


def _facts(logit_variance: Array, square: Array, entropy: Array, keys: Array) -> dict[str, Array]:
    """What users ask about attention; distance is E sum_j (a_ij - 1/n)^2 over n keys."""
    return {
        "logit_variance": logit_variance,
        "square_sum": square,
        "distance_to_uniform": square - 1 / keys,
        "entropy": entropy,
    }


def _positive(variance: Any) -> Any:
    """A projection of zeros still receives a gradient: the limit of small variances."""
    return np.maximum(variance, 1e-60) if np.ndim(variance) else max(variance, 1e-60)


__all__ = ["AttentionStatistics", "SelfAttention"]
