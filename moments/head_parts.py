"""A head as components: final normalisation, pooling, dropout and hidden layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .activations import activation_laws
from .composition import Chain, Component, Leaf, Pullback, Pulled
from .head import Head
from .laws.linear import DROPOUT, LINEAR
from .laws.normalization import LAYERNORM, RMSNORM
from .normalization import DynamicTanh, FiniteNormalization
from .parts import Activation, Dropout, Linear
from .state import Gradient, Kernel, Signal
from .transformer import Transformer


def head_chain(model: Transformer, head: Head, sequences: int, real: Any = None) -> Chain:
    """What stands between the last layer and the matrix to the logits."""
    parts: list[Component] = []
    if head.norm:
        parts.append(_final_norm(model))
    if head.loss == "classification":
        weights = None if real is None else np.asarray(real, float).reshape(sequences, -1)
        parts.append(Pool("head.pool", head.pool, sequences, weights))
    if head.dropout:
        parts.append(Dropout(DROPOUT, "refined", "final.dropout", {"drop_prob": head.dropout}))
    if head.transform is None:
        return Chain(tuple(parts))
    width = model.d_model
    parameters = {"fan_in": width, "fan_out": width, "weight_variance": head.transform_variance}
    has_bias = head.transform_bias_variance is not None
    if has_bias:
        parameters["bias_variance"] = head.transform_bias_variance
    name = "head.transform"
    matrix = Linear(LINEAR, "refined", f"{name}.in", parameters, width, name, has_bias=has_bias)
    parts += [matrix, Activation(activation_laws(head.transform), "refined", name)]
    if head.transform_norm:
        parts.append(_norm(model, f"{name}.norm", HiddenNormalization))
    return Chain(tuple(parts))


def _final_norm(model: Transformer) -> Component:
    if model.normalization == "dyt":
        return DynamicTanh("final.norm", model.dyt_alpha, affine=model.norm_affine)
    return _norm(model, "final.norm", FiniteNormalization)


def _norm(model: Transformer, label: str, kind: type[FiniteNormalization]) -> Component:
    centres = model.normalization != "rmsnorm"
    return kind(
        LAYERNORM if centres else RMSNORM,
        label,
        model.norm_epsilon,
        centres=centres,
        affine=model.norm_affine,
        bias=centres and model.norm_bias,
    )


@dataclass(frozen=True)
class HiddenNormalization(FiniteNormalization):
    """A normalisation of what an activation gives, whose features share a mean.

    Centring removes that mean whole. The centred features' kurtosis is taken to be that of the
    activation's output about zero, in the norm's spread of order 1/width.
    """

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if not self.centres:
            return super().forward(signal)
        kernel = signal.kernel
        spread = (kernel * kernel).scaled((signal.kurtosis - 1) / signal.width)
        return super().forward(
            Signal(
                kernel,
                signal.seq_len,
                mean=0.0 * kernel.diagonal,
                width=signal.width,
                spread=spread,
            )
        )


@dataclass(frozen=True)
class Pool(Leaf):
    """One vector per sequence: its first token, or the mean of its real tokens.

    With tokens alike there is one sequence, and the gradient is the average over its tokens.

    Attributes:
        label: site name in a trace.
        kind: "first" or "mean".
        sequences: of a resolved kernel, one after the other.
        real: (sequences, L), 1 for real tokens; None: all.
    """

    label: str
    kind: str
    sequences: int = 1
    real: Any = None

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if not signal.resolved:
            return self._alike(signal)
        weights = self._weights(signal.kernel.pairs.shape[-1])
        pooled = Kernel.of_matrix(weights @ signal.second_moment().pairs @ weights.T)
        output = _gaussian(pooled, signal)

        def pullback(gradient: Gradient) -> Pulled:
            sent = Kernel.of_matrix(weights.T @ gradient.kernel.pairs @ weights)
            return Pulled(Gradient(sent, signal.seq_len))

        return output, pullback

    def _alike(self, signal: Signal) -> tuple[Signal, Pullback]:
        kernel, count = signal.second_moment(), signal.seq_len
        variance = kernel.diagonal
        if self.kind == "mean":
            variance = (kernel.diagonal + (count - 1) * kernel.pairs) / count

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel.diagonal
            if self.kind == "mean":
                sent = Kernel(received / count**2, received / count**2)
            else:
                sent = Kernel(received / count, 0.0 * received)
            return Pulled(Gradient(sent, count))

        return _gaussian(Kernel(variance, 0.0 * variance), signal), pullback

    def _weights(self, count: int) -> np.ndarray:
        length = count // self.sequences
        rows = np.zeros((self.sequences, self.sequences, length))
        each = np.arange(self.sequences)
        if self.kind == "first":
            rows[each, each, 0] = 1.0
        else:
            real = np.ones((self.sequences, length)) if self.real is None else self.real
            rows[each, each] = real / real.sum(-1, keepdims=True)
        return rows.reshape(self.sequences, count)


def _gaussian(pooled: Kernel, signal: Signal) -> Signal:
    """One token per sequence; squared norms vary as those of independent Gaussian features."""
    return Signal(
        pooled,
        1,
        mean=0.0 * pooled.diagonal,
        width=signal.width,
        spread=(pooled * pooled).scaled(2 / signal.width),
    )
