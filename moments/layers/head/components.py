"""A head as components: final normalisation, pooling, dropout and hidden layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.classes import ClassMatrix, OneClass, PositionClasses, diagonal_of, one_class
from ...engine.composition import Chain, Component, Leaf, Pullback, Pulled
from ...engine.response import SINGLE, Around, GradientAdjoint, Response, SignalAdjoint
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...formulas.activation import (
    activation_laws,
    gelu_function,
    gelu_tanh_function,
    registered_function,
)
from ...formulas.algebra import NUMPY
from ...formulas.linear import DROPOUT, LINEAR
from ...model.head import Head
from ...model.transformer import Transformer
from ..elementary import Activation, Dropout, Linear
from ..normalization import DynamicTanh, FiniteNormalization


def head_chain(model: Transformer, head: Head, sequences: int, real: Any = None) -> Chain:
    """What stands between the last layer and the matrix to the logits."""
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
    if not head.transform_norm:
        return Chain((*parts, matrix, Activation(laws, "refined", name)))
    parts += [matrix, HiddenActivation(laws, "refined", name)]
    if model.normalization == "dyt":
        parts.append(DynamicTanh("head.norm", model.dyt_alpha, affine=model.norm_affine))
    else:
        parts.append(HiddenNormalization.of(model, "head.norm"))
    return Chain(tuple(parts))


def _norm(model: Transformer, label: str, gain: float = 1.0) -> Component:
    if model.normalization == "dyt":
        return DynamicTanh(label, model.dyt_alpha, gain, model.norm_affine)
    return FiniteNormalization.of(model, label, gain)


# Functions of a number system, where the laws do not hold them.
_FUNCTIONS = {"gelu": gelu_function, "gelu_tanh": gelu_tanh_function}


@dataclass(frozen=True)
class HiddenActivation(Activation):
    """An activation between a matrix and a LayerNorm, whose output tells how the norm fluctuates.

    With c = f - E f, its deviation s and d features, a gradient returns through f' and the norm as
    E sum_k f'_k^2 (1 - 1/d - n_k^2/d)/s^2, where s^2 and n_k = c_k/s hold the same feature: to
    order 1/d that is E f'^2/E c^2 (1 - 2/d) times 1 + (kurtosis(c) - 1 - 2 (q - 1))/d, with
    q = E c^2 f'^2/(E c^2 E f'^2). The output's `kurtosis` is set to what stands for it there,
    kurtosis(c) - 2 (q - 1); for activations other than GELU's forms and registered ones it stays
    that of f.
    """

    def _sent(self, gradient: Gradient, kernel: Kernel, *_: Any) -> Gradient:
        return gradient.with_kernel(kernel)

    def _over_draws(self, signal: Signal, output: Signal, values: Any) -> dict[str, Any]:
        result, function = super()._over_draws(signal, output, values), _function(self.laws.name)
        if function is None:
            return result
        variance = float(np.mean(signal.kernel.mean_diagonal()))
        return result | {"kurtosis": _centred_kurtosis(function, variance)}


def _function(name: str) -> Callable[[np.ndarray], Any] | None:
    if name in _FUNCTIONS:
        return functools.partial(_FUNCTIONS[name], NUMPY)
    result = registered_function(name)
    return None if result is None else result[0]


def _centred_kurtosis(function: Callable[[np.ndarray], Any], variance: float) -> float:
    """kurtosis(c) - 2 (q - 1) by the trapezoidal rule, the slope by central differences."""
    x = np.linspace(-9.0, 9.0, 721)
    weights = np.exp(-(x**2) / 2)
    weights /= weights.sum()
    deviation, step = math.sqrt(variance), 1e-4
    values = function(deviation * x)
    slope = function(deviation * (x + step)) - function(deviation * (x - step))
    centred = values - weights @ values
    square, slopes = weights @ centred**2, weights @ slope**2
    ratio = weights @ (centred * slope) ** 2 / (square * slopes)
    return float(weights @ centred**4 / square**2 - 2 * (ratio - 1))


@dataclass(frozen=True)
class HiddenNormalization(FiniteNormalization):
    """A normalisation of what an activation gives, whose features share a mean.

    Centring removes that mean whole; the norm's spread is that of independent features.
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
    """One vector per sequence: its first token, or the mean of its real tokens, or of a picture's
    "patches" or the tokens "before" them.

    With tokens alike there is one sequence, and the gradient is the average over its tokens; the
    band then takes what is a mean of some tokens for one of all.

    Attributes:
        label: site name in a trace.
        kind: as `Head.pool`.
        sequences: of a resolved kernel, one after the other.
        real: (sequences, L), 1 for real tokens; None: all.
        before: tokens that stand before the patches.
    """

    label: str
    kind: str
    sequences: int = 1
    real: Any = None
    before: int = 0

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        if not signal.resolved:
            return self._alike(signal)
        if signal.kernel.classes is not None:
            return self._on_classes(signal, signal.kernel.classes)
        weights = self.weights(signal.kernel.off_diagonal.shape[-1])
        pooled = Kernel.of_matrix(weights @ signal.second_moment().off_diagonal @ weights.T)
        output = _gaussian(pooled, signal)
        if signal.centred is not None:
            centred = weights @ signal.centred.off_diagonal @ weights.T
            output = output.replace(centred=Kernel.of_matrix(centred))
        return output, functools.partial(self._sent, signal.seq_len, weights)

    def _sent(self, seq_len: int, weights: np.ndarray, gradient: Gradient) -> Pulled:
        grad_in = Kernel.of_matrix(weights.T @ gradient.kernel.off_diagonal @ weights)
        return Pulled(Gradient(grad_in, seq_len))

    def _on_classes(self, signal: Signal, classes: PositionClasses) -> tuple[Signal, Pullback]:
        """Of equally long documents, each of which has one vector."""
        tokens = signal.second_moment()
        inside, *across = classes.blocks(tokens.diagonal, tokens.off_diagonal)
        one, count = classes.inside, float(classes.inside.length)

        def pooled(diagonal: Array, off_diagonal: Array) -> Array:
            if self.kind == "first":
                return diagonal[..., 0]
            return (one.mean(diagonal) + (count - 1.0) * one.mean_of_pairs(off_diagonal)) / count

        alone = pooled(*inside)
        between = pooled(*across[0]) if across else 0.0 * alone
        number = classes.length // one.length
        matrix = np.where(np.eye(number) > 0.0, alone[..., None, None], between[..., None, None])
        back = functools.partial(self._sent_on_classes, signal.seq_len, classes)
        return _gaussian(Kernel.of_matrix(matrix), signal), back

    def _sent_on_classes(
        self, seq_len: int, classes: PositionClasses, gradient: Gradient
    ) -> Pulled:
        grad_out, one = gradient.kernel, classes.inside
        size, count = len(one.nodes), float(one.length)

        def grad_in(value: Array) -> tuple[Array, Array]:
            if self.kind == "mean":
                each = value[..., None] / count**2
                ones = np.ones((size, size))
                return each * ones[0], each[..., None] * ones
            first = np.eye(1, size)[0]
            return value[..., None] * first, np.zeros((*np.shape(value), size, size))

        blocks = [grad_in(np.asarray(grad_out.mean_diagonal()))]
        if len(classes.ends) > 1:
            blocks.append(grad_in(np.asarray(grad_out.mean_off_diagonal())))
        return Pulled(Gradient(Kernel(*classes.joined(*blocks), classes), seq_len))

    def _alike(self, signal: Signal) -> tuple[Signal, Pullback]:
        kernel, count = signal.second_moment(), len(self._tokens(signal.seq_len))
        variance = (kernel.diagonal + (count - 1) * kernel.off_diagonal) / count
        output = _gaussian(Kernel(variance, 0.0 * variance), signal)
        return output, functools.partial(self._sent_alike, signal.seq_len, count)

    def _sent_alike(self, length: int, count: int, gradient: Gradient) -> Pulled:
        """Each of `count` tokens receives that part of it, averaged over all."""
        each = gradient.kernel.diagonal / (count * length)
        return Pulled(Gradient(Kernel(each, each * ((count - 1) / max(length - 1, 1))), length))

    def _tokens(self, length: int) -> range:
        """The tokens that are averaged."""
        first = self.before if self.kind == "patches" else 0
        return range(first, {"first": 1, "before": self.before}.get(self.kind, length))

    def response(self, record: Record, around: Around) -> Response:
        classes = record.input.kernel.classes
        if not record.input.resolved:
            kind = "first" if self.kind == "first" else "mean"
            return _PooledClasses(kind, one_class(record.input.seq_len))
        if classes is not None:
            return _PooledClasses(self.kind, classes.of_one)
        return _Pooled(self.weights(record.input.kernel.off_diagonal.shape[-1]))

    def weights(self, count: int) -> np.ndarray:
        """(sequences, count) with which tokens enter their sequence's vector."""
        length = count // self.sequences
        rows = np.zeros((self.sequences, self.sequences, length))
        each = np.arange(self.sequences)
        real = np.isin(np.arange(length), self._tokens(length)) * np.ones((self.sequences, 1))
        if self.real is not None and self.kind != "first":
            real = real * self.real
        rows[each, each] = real / real.sum(-1, keepdims=True)
        return rows.reshape(self.sequences, count)


def _gaussian(pooled: Kernel, signal: Signal) -> Signal:
    """One token per sequence; squared norms vary as those of independent Gaussian features."""
    mean, norms = 0.0 * pooled.diagonal, Fluctuation.of_gaussian(pooled, signal.width)
    return Signal(pooled, 1, mean, signal.width, fluctuation=norms)


@dataclass(frozen=True)
class _Pooled:
    """One vector per sequence, by weights (sequences, tokens)."""

    weights: Array

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        none = np.zeros(sensitivity.shape[:-2])
        onward = self.weights @ sensitivity @ self.weights.T
        return GradientAdjoint(onward.astype(SINGLE), None, none, none + 1.0)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        none = np.zeros(sensitivity.shape[:-2])
        result = self.weights.T @ sensitivity @ self.weights
        return SignalAdjoint(result.astype(SINGLE), none, none)


@dataclass(frozen=True)
class _PooledClasses:
    """One vector of a sequence on classes, of which tokens alike are one: their first token's
    gradient is spread over all, whose fluctuations then average out."""

    kind: str
    classes: PositionClasses

    def gradient_adjoint(self, sensitivity: ClassMatrix) -> GradientAdjoint:
        none = np.zeros(sensitivity.shape[:-2])
        result = np.asarray(sensitivity.diagonal[..., 0])
        if self.kind == "mean":
            result = np.asarray(sensitivity.total() / self.classes.length**2)
        onward: Any = result[..., None, None]
        if isinstance(self.classes, OneClass):
            onward = ClassMatrix(result[..., None], 0.0 * onward, one_class(1))
        return GradientAdjoint(onward.astype(SINGLE), None, none, none + 1.0)

    def signal_adjoint(self, sensitivity: Any, exposure: Any) -> SignalAdjoint:
        none, given = np.zeros(sensitivity.shape[:-2]), diagonal_of(sensitivity)[..., 0]
        size = len(self.classes.nodes)
        first = np.eye(1, size)[0] / self.classes.count[0]
        diagonal, off_diagonal = given[..., None] * first, np.zeros((*given.shape, size, size))
        if self.kind == "mean":
            off_diagonal = off_diagonal + given[..., None, None] / self.classes.length**2
            diagonal = off_diagonal[..., 0]
        return SignalAdjoint(
            ClassMatrix(diagonal, off_diagonal, self.classes).astype(SINGLE), none, none
        )
