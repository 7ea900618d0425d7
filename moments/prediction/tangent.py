"""The neural tangent kernel of the last stream, from squared gradients of weights.

Theta_ij = sum_W <dh_ik/dW, dh_jk/dW> of outputs h_i of width d, the same for every feature k. Under
a gradient of second moments G_ij at the output, E |dLoss/dW|^2 summed over all W is
d sum_ij G_ij Theta_ij. The predicted norms are linear in G, and Theta is read off the coefficients.
See docs/theory/gradients.md, The tangent kernel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.classes import DocumentClasses, PositionClasses
from ..engine.state import Array, Gradient, Kernel
from ..engine.trace import Trace
from ..errors import DomainError, domain_error, unknown_name
from ..files import as_frame, plain
from ..formulas.checks import NONNEGATIVE, check_interval
from .gate import computing

if TYPE_CHECKING:
    import pandas as pd


MOST_PASSES = 1000
"""Most backward passes for one kernel: 43 resolved tokens."""


@dataclass(frozen=True, eq=False, repr=False)
class TangentKernel:
    """The neural tangent kernel Theta of the last stream.

    Under gradient descent at a small rate h_i changes by -rate sum_j Theta_ij dLoss/dh_j.

    Attributes:
        diagonal: Theta_ii, (P,): one number for exchangeable tokens, else for every class of
            positions or every token.
        off_diagonal: Theta_ij of two different tokens, (P, P); by token Theta_ii on its diagonal.
        positions: (P,) of the tokens, from 1, or of the classes' nodes; None: exchangeable tokens.
        seq_len: number of tokens.
        weights: layer, parameter and its part of the mean of `diagonal` over tokens.
    """

    diagonal: np.ndarray
    off_diagonal: np.ndarray
    positions: np.ndarray | None
    seq_len: int
    weights: tuple[tuple[int, str, float], ...]

    def matrix(self) -> np.ndarray:
        """(L, L) kernel of all tokens, interpolated linearly in log position between nodes."""
        length = self.seq_len
        if self.positions is not None and len(self.positions) == length:
            return self.off_diagonal
        if self.positions is None:
            basis = np.ones((1, length))
        else:
            basis = PositionClasses(length, self.positions).basis
        result: np.ndarray = basis.T @ self.off_diagonal @ basis
        np.fill_diagonal(result, self.diagonal @ basis)
        return result

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue of `matrix`, the ratio of the fastest and the slowest
        rate of learning; infinite for identical tokens."""
        values = np.linalg.eigvalsh(self.matrix())
        return float(values[-1] / values[0]) if values[0] > 0 else float("inf")

    def to_frame(self) -> pd.DataFrame:
        """Columns layer, weight and diagonal: a parameter's part of the mean `diagonal`."""
        return as_frame(list(self.weights), columns=["layer", "weight", "diagonal"])

    def to_json(self) -> str:
        """Every attribute as JSON."""
        data = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        names = ("layer", "weight", "diagonal")
        data["weights"] = [dict(zip(names, row, strict=True)) for row in self.weights]
        return json.dumps(data, indent=2, allow_nan=False)

    def __repr__(self) -> str:
        diagonal, off_diagonal = float(np.mean(self.diagonal)), float(np.mean(self.off_diagonal))
        where = "alike" if self.positions is None else f"at {len(self.positions)} positions"
        entries = f"diagonal {diagonal:.4g}, off-diagonal {off_diagonal:.4g}"
        return f"TangentKernel({self.seq_len} tokens {where}: {entries})"


def tangent_kernel(prediction: Any, rates: Mapping[str, float] | None = None) -> TangentKernel:
    """See `Prediction.tangent_kernel`."""
    if prediction.theory != "refined":
        raise domain_error("theory", prediction.theory, "'refined' for a tangent kernel")
    if prediction.encoder is not None:
        raise DomainError("the tangent kernel covers one stack: model.encoder must be None")
    last = prediction.trace.layers[-1].output
    kernel, classes = last.kernel, last.kernel.classes
    if prediction.variance.ndim > 1:
        raise DomainError("tangent_kernel needs a single configuration, not a batch of them")
    if isinstance(classes, DocumentClasses) or prediction.layout.sequences > 1:
        raise DomainError("the tangent kernel is that of one text: give token_ids of one")
    count = len(np.atleast_1d(kernel.diagonal)) if kernel.resolved else 1
    passes = 1 + count * (count + 1) // 2
    if kernel.resolved and passes > MOST_PASSES:
        raise domain_error(
            "tangent_kernel",
            f"{count} tokens",
            f"{MOST_PASSES} passes of a gradient at most, and each pair of tokens takes one",
            "predict with tokens=False, on classes of positions, or of fewer tokens",
        )
    for name, rate in (rates or {}).items():
        check_interval(f"rates[{name!r}]", rate, NONNEGATIVE)
    norms = _Norms(prediction, dict(rates or {}))
    with computing(prediction.theory, [prediction.trace], prediction._rows):
        return _by_pairs(norms, kernel, count)


@dataclass(frozen=True, eq=False)
class _Norms:
    """Squared gradient norms of all weights, as a function of the gradient at the last stream."""

    prediction: Any
    rates: dict[str, float]

    def rows(self, kernel: Kernel) -> list[tuple[int, str, Array]]:
        """(layer, name, norm times rate) under a gradient with this kernel."""
        prediction, trace = self.prediction, self.prediction.trace
        assert trace.stack is not None
        stack = trace.stack.backward(Gradient(kernel, prediction.model.seq_len))
        embedding = trace.embedding
        if embedding is not None:
            embedding = embedding.backward(stack.grad_in)
        result = prediction._overlaps.weights(Trace(trace.entering, stack, embedding))
        outer = prediction.outer_weights
        if outer is not None and outer.gradient is not None and embedding is not None:
            outer = dataclasses.replace(
                outer, gradient=embedding.grad_in, output=None, targets=None
            )
            result = [*outer.rows(), *result]
        if unknown := sorted(self.rates.keys() - {name for _, name, _ in result}):
            raise unknown_name("rates", unknown[0], sorted({name for _, name, _ in result}))
        return [(n, name, norm * self.rates.get(name, 1.0)) for n, name, norm in result]

    def total(self, kernel: Kernel) -> Array:
        """Sum over all weights."""
        return sum(norm for _, _, norm in self.rows(kernel))


def _by_pairs(norms: _Norms, kernel: Kernel, count: int) -> TangentKernel:
    """One backward pass per pair of tokens or classes; exchangeable tokens are one class."""
    model, classes = norms.prediction.model, kernel.classes
    length, width, by_token = model.seq_len, float(model.d_model), kernel.resolved is True
    if classes is not None:
        sizes, pair_counts, positions = classes.count, classes.pair_count, classes.nodes
    elif by_token:
        sizes, pair_counts = np.ones(count), np.ones((count, count))
        positions = np.arange(count) + 1
    else:
        sizes, positions = np.array([float(length)]), None
        pair_counts = np.array([[length * (length - 1.0)]])

    def gradient(diagonal: Array, off_diagonal: Array) -> Kernel:
        if not kernel.resolved:
            return Kernel(float(diagonal[0]), float(off_diagonal[0, 0]))
        return Kernel.of_parts(diagonal, off_diagonal, kernel.resolved)

    ones, zeros = np.ones(count), np.zeros((count, count))
    rows = norms.rows(gradient(ones, zeros))
    base = sum(norm for _, _, norm in rows)

    def change(diagonal: Array, off_diagonal: Array) -> float:
        """Change of the sum of norms with the gradient, from independent tokens of variance 1."""
        total = norms.total(gradient(ones + diagonal, zeros + off_diagonal))
        return float(total - base) / width

    diagonal = np.array([change(unit, 0.0) for unit in np.eye(count)]) / sizes
    off_diagonal = np.diag(diagonal) if by_token else zeros.copy()
    for i in range(count):
        for j in range(i + 1 if by_token else i, count):
            if pair_counts[i, j] > 0.0:
                unit = np.zeros((count, count))
                unit[i, j] = unit[j, i] = 0.5
                pairs = pair_counts[i, j] + (pair_counts[j, i] if i != j else 0.0)
                off_diagonal[i, j] = off_diagonal[j, i] = change(0.0, unit) / (0.5 * pairs)
    tokens = width * length
    weights = tuple((layer, name, float(norm) / tokens) for layer, name, norm in rows)
    return TangentKernel(diagonal, off_diagonal, positions, length, weights)
