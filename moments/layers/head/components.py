"""Components of a head: final normalisation, pooling, dropout and hidden layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.composition import Chain, Component, Leaf, Pullback, PullbackResult
from ...engine.response import (
    SINGLE,
    GradientAdjoint,
    GradientUnits,
    Matrix,
    Response,
    SignalAdjoint,
    count_of,
    kernel_of,
    matrix_of,
    total,
)
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...formulas.activation import activation_laws
from ...formulas.linear import DROPOUT, LINEAR
from ...model.head import Head
from ...model.transformer import Transformer
from ..elementary import Activation, Dropout, Linear
from ..normalization import DynamicTanh, FiniteNormalization


def head_chain(model: Transformer, head: Head, sequences: int, real: Any = None) -> Chain:
    """Components between the last layer and the matrix to the logits."""
    parts: list[Component] = []
    if head.norm:
        parts.append(_norm(model, "final.norm", head.norm_gain))
    if head.loss == "classification":
        weights = None if real is None else np.asarray(real, float).reshape(sequences, -1)
        before = getattr(model.embedding, "before", 0)
        parts.append(Pool("head.pool", head.pool, sequences, weights, before))
        if head.pool_norm:
            parts.append(_norm(model, "head.norm"))
    if head.dropout:
        parts.append(Dropout(DROPOUT, "refined", "final.dropout", {"drop_prob": head.dropout}))
    width = head.factor_dim or model.d_model
    parameters: dict[str, Any] = {"fan_in": model.d_model, "fan_out": width}
    if head.transform is None:
        if head.factor_variance is not None:
            parameters["weight_variance"] = head.factor_variance
            name = "head.factor"
            parts.append(Linear(LINEAR, "refined", name, parameters, width, name))
        return Chain(tuple(parts))
    parameters["weight_variance"] = head.transform_variance
    has_bias = head.transform_bias_variance is not None
    if has_bias:
        parameters["bias_variance"] = head.transform_bias_variance
    name = "head.transform"
    matrix = Linear(LINEAR, "refined", f"{name}.in", parameters, width, name, has_bias=has_bias)
    laws = activation_laws(head.transform)
    parts += [matrix, Activation(laws, "refined", name)]
    if not head.transform_norm:
        return Chain(tuple(parts))
    if model.normalization == "dyt":
        parts.append(DynamicTanh("head.norm", model.dyt_alpha, affine=model.norm_affine))
    else:
        parts.append(HiddenNormalization.of(model, "head.norm"))
    return Chain(tuple(parts))


def _norm(model: Transformer, label: str, gain: float = 1.0) -> Component:
    if model.normalization == "dyt":
        return DynamicTanh(label, model.dyt_alpha, gain, model.norm_affine)
    return FiniteNormalization.of(model, label, gain)


@dataclass(frozen=True)
class HiddenNormalization(FiniteNormalization):
    """Normalisation of an activation's output, whose features share a mean.

    Centring removes that mean; the norm fluctuates as that of independent features.
    """

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if not self.centres:
            return super().forward(signal)
        kernel = signal.kernel
        norms = Fluctuation((kernel * kernel).scaled((signal.kurtosis - 1) / signal.width))
        mean, width = 0.0 * kernel.diagonal, signal.width
        return super().forward(Signal(kernel, signal.seq_len, mean, width, fluctuation=norms))


@dataclass(frozen=True)
class Pool(Leaf):
    """One vector per sequence: its first token, or the mean of its real tokens, of a picture's
    "patches", or of the tokens "before" these.

    Exchangeable tokens form one sequence, and the gradient is averaged over its tokens; the band
    then takes the mean of some tokens as that of all.

    Attributes:
        label: site name in a trace.
        kind: as `Head.pool`.
        sequences: number of concatenated sequences in a resolved kernel.
        real: (sequences, L), 1 for real tokens; None: all.
        before: number of tokens before the patches.
    """

    label: str
    kind: str
    sequences: int = 1
    real: Any = None
    before: int = 0

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        kernel, maps = signal.second_moment(), PoolMaps.of(self, signal)
        pooled, centred = maps.pooled(kernel), None
        if signal.centred is not None and signal.resolved is True:
            centred = maps.pooled(signal.centred)
        norms = Fluctuation.of_gaussian(pooled, signal.width)
        mean = 0.0 * pooled.diagonal
        output = Signal(pooled, 1, mean, signal.width, fluctuation=norms, centred=centred)
        return output, maps

    def tokens(self, length: int) -> range:
        """Indices of the averaged tokens."""
        first = self.before if self.kind == "patches" else 0
        return range(first, {"first": 1, "before": self.before}.get(self.kind, length))

    def response(self, record: Record, around: GradientUnits) -> Response:
        return PoolMaps.of(self, record.input)

    def weights(self, count: int) -> np.ndarray:
        """(sequences, count) weights of the tokens in each sequence's vector."""
        length = count // self.sequences
        rows = np.zeros((self.sequences, self.sequences, length))
        diagonal = np.arange(self.sequences)
        averaged = np.isin(np.arange(length), self.tokens(length)) * np.ones((self.sequences, 1))
        if self.real is not None and self.kind != "first":
            averaged = averaged * self.real
        rows[diagonal, diagonal] = averaged / averaged.sum(-1, keepdims=True)
        return rows.reshape(self.sequences, count)


@dataclass(frozen=True)
class PoolMaps:
    """Linear maps of kernels from tokens to one vector per sequence (`pooled`) and back
    (`returned`). The first also maps sensitivities to gradients, the second those to signals.

    Attributes:
        resolved: resolution of the tokens' kernel.
        weights: (sequences, tokens) if resolved by token.
        length: tokens of a sequence.
    """

    pool: Pool
    resolved: Any
    weights: Array
    length: int

    @classmethod
    def of(cls, pool: Pool, signal: Signal) -> PoolMaps:
        by_token = signal.resolved is True
        weights = pool.weights(signal.kernel.off_diagonal.shape[-1]) if by_token else None
        return cls(pool, signal.resolved, weights, signal.seq_len)

    def pooled(self, kernel: Kernel) -> Kernel:
        classes = kernel.classes
        if classes is None and kernel.resolved:
            return Kernel.of_matrix(self.weights @ kernel.off_diagonal @ self.weights.T)
        if classes is None:
            count = len(self.pool.tokens(self.length))
            variance = (kernel.diagonal + (count - 1) * kernel.off_diagonal) / count
            return Kernel(variance, 0.0 * variance)
        # equally long documents, with one vector each
        inside, *across = classes.blocks(kernel.diagonal, kernel.off_diagonal)
        document, count = classes.one_document, classes.one_document.length

        def mean(diagonal: Array, off_diagonal: Array) -> Array:
            if self.pool.kind == "first":
                return diagonal[..., 0]
            pairs = document.mean_of_pairs(off_diagonal)
            return (document.mean(diagonal) + (count - 1) * pairs) / count

        within = mean(*inside)
        between = mean(*across[0]) if across else 0.0 * within
        same = np.eye(classes.length // count) > 0.0
        return Kernel.of_matrix(np.where(same, within[..., None, None], between[..., None, None]))

    def returned(self, kernel: Kernel) -> Kernel:
        """Transpose of `pooled`; for exchangeable tokens averaged over all tokens."""
        length, classes = self.length, self.resolved
        if classes is True:
            return Kernel.of_matrix(self.weights.T @ kernel.off_diagonal @ self.weights)
        if classes is False:
            count = len(self.pool.tokens(length))
            diagonal = kernel.diagonal / (count * length)
            return Kernel(diagonal, diagonal * ((count - 1) / max(length - 1, 1)))
        size, count = len(classes.one_document.nodes), classes.one_document.length
        first = np.eye(1, size)[0]

        def spread(value: Array) -> tuple[Array, Array]:
            if self.pool.kind == "first":
                return value[..., None] * first, np.zeros((*np.shape(value), size, size))
            diagonal = value[..., None] / count**2 + np.zeros(size)
            return diagonal, diagonal[..., None] + np.zeros(size)

        blocks = [spread(np.asarray(kernel.mean_diagonal()))]
        if len(classes.document_lengths) > 1:
            blocks.append(spread(np.asarray(kernel.mean_off_diagonal())))
        diagonal, off_diagonal = classes.joined(*blocks)
        return Kernel(diagonal, off_diagonal, classes)

    def __call__(self, gradient: Gradient) -> PullbackResult:
        return PullbackResult(Gradient(self.returned(gradient.kernel), self.length))

    def gradient_adjoint(self, sensitivity: Matrix) -> GradientAdjoint:
        onward = matrix_of(self.pooled(kernel_of(sensitivity)), 1)
        if not isinstance(self.resolved, bool) and self.pool.kind == "mean":
            # a matrix on classes is a sum over the tokens of each class
            onward = total(sensitivity)[..., None, None] / count_of(sensitivity) ** 2
        return GradientAdjoint(onward.astype(SINGLE))

    def signal_adjoint(self, sensitivity: Matrix, exposure: Any) -> SignalAdjoint:
        by_class = not isinstance(self.resolved, bool)
        maps = replace(self, resolved=self.resolved.one_document_with_words) if by_class else self
        result = matrix_of(maps.returned(kernel_of(sensitivity)), self.length)
        return SignalAdjoint(result.astype(SINGLE))
