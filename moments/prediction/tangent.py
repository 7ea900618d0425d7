"""The neural tangent kernel of the last stream, from squared gradients of weights.

Of outputs h_i of width d, Theta_ij = sum_W <dh_ik/dW, dh_jk/dW>, the same for every feature k.
Under a gradient of second moments G_ij at the output, E |dLoss/dW|^2 summed over all W is
d sum_ij G_ij Theta_ij: what predicts those norms is linear in G, with these coefficients.
See docs/theory/gradients.md, The tangent kernel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.classes import DocumentClasses, PositionClasses
from ..engine.state import Array, Gradient, Kernel
from ..engine.trace import Trace
from ..errors import DomainError, domain_error, unknown_name
from ..files import as_frame, plain
from ..formulas.checks import NONNEGATIVE, check_in
from .gate import computing

if TYPE_CHECKING:
    import pandas as pd


MOST_PASSES = 1000
"""Passes of a gradient beyond which a kernel is refused: 43 tokens each by itself."""


@dataclass(frozen=True, eq=False, repr=False)
class TangentKernel:
    """What one unit of learning rate does to the outputs of the last stream.

    Under gradient descent at a small rate h_i changes by -rate sum_j Theta_ij dLoss/dh_j.

    Attributes:
        diagonal: Theta_ii of a token with itself, (P,): one number for tokens alike, else of every
            class of positions or every token.
        off_diagonal: Theta_ij of two different tokens, (P, P); by token Theta_ii on its diagonal.
        positions: (P,) of the tokens, from 1, or of the classes' nodes; None: tokens are alike.
        weights: layer, parameter and its part of the mean of `diagonal` over tokens.
    """

    diagonal: np.ndarray
    off_diagonal: np.ndarray
    positions: np.ndarray | None
    seq_len: int
    weights: tuple[tuple[int, str, float], ...]

    def matrix(self) -> np.ndarray:
        """(L, L) the kernel of all tokens, between nodes linear in log position."""
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
        """Largest over smallest eigenvalue of `matrix`: by how much the fastest direction of tokens
        learns faster than the slowest; infinite where tokens are one."""
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
    """As `Prediction.tangent_kernel`, which says what it is."""
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
        check_in(f"rates[{name!r}]", rate, NONNEGATIVE)
    read = _Read(prediction, dict(rates or {}))
    with computing(prediction.theory, [prediction.trace], prediction._rows):
        return _of_pairs(read, kernel, count)


@dataclass(frozen=True, eq=False)
class _Read:
    """Squared gradients of all weights, as a function of the gradient at the last stream."""

    prediction: Any
    rates: dict[str, float]

    def rows(self, kernel: Kernel) -> list[tuple[int, str, Array]]:
        """Under a gradient of these second moments, each times its rate."""
        prediction, trace = self.prediction, self.prediction.trace
        assert trace.stack is not None
        stack = trace.stack.backward(Gradient(kernel, prediction.model.seq_len))
        embedding = trace.embedding
        if embedding is not None:
            embedding = embedding.backward(stack.grad_in)
        result = prediction._overlaps.weights(Trace(trace.entering, stack, embedding))
        outer = prediction.outer_weights
        if outer is not None and outer.gradient is not None and embedding is not None:
            grad_out = dataclasses.replace(
                outer, gradient=embedding.grad_in, output=None, targets=None
            )
            result = [*grad_out.rows(), *result]
        if unknown := sorted(self.rates.keys() - {name for _, name, _ in result}):
            raise unknown_name("rates", unknown[0], sorted({name for _, name, _ in result}))
        return [(n, name, norm * self.rates.get(name, 1.0)) for n, name, norm in result]

    def total(self, kernel: Kernel) -> Array:
        """Over all of them."""
        return sum(norm for _, _, norm in self.rows(kernel))

    def parts(self, rows: list[tuple[int, str, Array]]) -> tuple[tuple[int, str, float], ...]:
        """Each one's part of the mean own entry, of those under a gradient of ones and nothing."""
        over = self.width * self.prediction.model.seq_len
        return tuple((layer, name, float(norm) / over) for layer, name, norm in rows)

    @property
    def width(self) -> float:
        """Features of the output."""
        return float(self.prediction.model.d_model)


def _of_pairs(read: _Read, kernel: Kernel, count: int) -> TangentKernel:
    """From one pass for every pair of tokens, or of classes; tokens alike are one class."""
    classes, length, by_token = kernel.classes, read.prediction.model.seq_len, False
    if classes is not None:
        sizes, of_pairs, positions = classes.count, classes.pair_count, classes.nodes
    elif kernel.resolved:
        sizes, of_pairs, positions = np.ones(count), np.ones((count, count)), np.arange(count) + 1
        by_token = True
    else:
        sizes, positions = np.array([float(length)]), None
        of_pairs = np.array([[length * (length - 1.0)]])

    def given(diagonal: Array, off_diagonal: Array) -> Kernel:
        if not kernel.resolved:
            return Kernel(float(diagonal[0]), float(off_diagonal[0, 0]))
        return Kernel.joined(diagonal, off_diagonal, kernel.resolved)

    ones, nothing = np.ones(count), np.zeros((count, count))
    rows = read.rows(given(ones, nothing))
    first = sum(norm for _, _, norm in rows)

    def more(one: Array, two: Array) -> float:
        return float(read.total(given(ones + one, nothing + two)) - first) / read.width

    diagonal = np.array([more(one, 0.0) for one in np.eye(count)]) / sizes
    off_diagonal = np.diag(diagonal) if by_token else nothing.copy()
    for i, j in _pairs(count, not by_token):
        if of_pairs[i, j] <= 0.0:
            continue
        change = np.zeros((count, count))
        change[i, j] = change[j, i] = 0.5
        counted = of_pairs[i, j] + (of_pairs[j, i] if i != j else 0.0)
        off_diagonal[i, j] = off_diagonal[j, i] = more(0.0, change) / (0.5 * counted)
    return TangentKernel(diagonal, off_diagonal, positions, length, read.parts(rows))


def _pairs(count: int, alike: bool) -> Iterator[tuple[int, int]]:
    """Pairs of tokens or of classes, each once; with two of one class."""
    return ((i, j) for i in range(count) for j in range(i if alike else i + 1, count))
