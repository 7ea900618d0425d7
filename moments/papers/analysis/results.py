"""What every analysis returns and begins with: a table, a prediction, its residual additions."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DomainError, without_warnings
from ...files import Shown, as_frame
from ...formulas.law import Theory
from ...model.transformer import Transformer
from ...prediction.predict import positional, predict
from ...prediction.result import Prediction

if TYPE_CHECKING:
    import pandas as pd


class Result(Shown, abc.ABC):
    """Base of the results. `heading` is one line; the table is `rows`, or what `_table` makes."""

    rows: tuple[Mapping[str, Any], ...]

    @property
    @abc.abstractmethod
    def heading(self) -> str:
        """One line that says what was found."""

    def _table(self) -> Any:
        """Rows, or columns by name."""
        return self.rows

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        return as_frame(self._table())

    def __str__(self) -> str:
        shown = self.to_frame().to_string(index=False, float_format=lambda v: f"{v:.4g}")
        return f"{self.heading}\n\n{shown}"


def predict_alike(model: Transformer, theory: Theory, **moments: Any) -> Prediction:
    """`predict` with tokens=False; warnings stay in `.warnings`.

    Raises:
        DomainError: attention that tells tokens apart by position, under the refined theory.
    """
    if theory == "refined" and positional(model):
        raise DomainError(
            "this analysis treats tokens alike, which a causal mask, a window or positions in "
            "attention exclude: pass model.replace(causal=False) and the like, or "
            'theory="published"'
        )
    return expected(model, theory=theory, tokens=False, **moments)


def expected(model: Transformer, **arguments: Any) -> Prediction:
    """A prediction whose validity notes stay in its `warnings` and go into the result."""
    with without_warnings():
        return predict(model, **arguments)


@dataclass(frozen=True)
class ResidualAddition:
    """One residual addition: variances of the signal and of its gradient, averaged over tokens.

    Attributes:
        layer, name: where; "attention" or "ffn".
        skip_square, branch_square: lambda^2 and beta^2.
        entering, total, leaving: signal before the block, after the addition, after a Post-LN.
        grad_entering, grad_total, grad_leaving: the gradient at the same points.
    """

    layer: int
    name: str
    skip_square: float
    branch_square: float
    entering: float
    total: float
    leaving: float
    grad_entering: float
    grad_total: float
    grad_leaving: float

    @property
    def added(self) -> float:
        """Variance of the block's output, before its scale."""
        return max(self.total - self.skip_square * self.entering, 0.0) / self.branch_square

    @property
    def returned(self) -> float:
        """Gradient variance that comes back through the block, before its scale, per unit."""
        kept = self.grad_entering - self.skip_square * self.grad_total
        return max(kept, 0.0) / (self.branch_square * self.grad_total)


def blocks(prediction: Prediction) -> list[ResidualAddition]:
    """Every residual addition, from the input to the output; the mean over configurations.

    Raises:
        DomainError: a model whose layers are not an attention and a feed-forward addition alone.
    """
    model = prediction.model
    points = {(p.layer, p.site): p for p in prediction.trace.points}

    def signal(layer: int, site: str) -> float:
        return float(np.mean(_moment(points, layer, site).signal.kernel.mean_diagonal()))

    def gradient(layer: int, site: str) -> float:
        point = _moment(points, layer, site)
        return float(np.mean(point.gradient.kernel.mean_diagonal()))

    if model.norm in ("b2t", "hybrid"):
        raise DomainError(f"norm = {model.norm!r} adds more than blocks to the stream")
    found: list[ResidualAddition] = []
    before = (0, "stream")
    for layer in range(1, model.layers + 1):
        skips = model.by_block("skip_scale")[layer - 1] ** 2
        branches = model.by_block("branch_scale")[layer - 1] ** 2
        for column, name in enumerate(("attention", "ffn")):
            total = (layer, f"{name}.sum")
            last = "stream" if name == "ffn" else f"{name}.norm"
            post = model.placements[layer - 1] == "post"
            after = (layer, last) if post or name == "ffn" else total
            sites = (before, total, after)
            found.append(
                ResidualAddition(
                    layer,
                    name,
                    float(skips[column]),
                    float(branches[column]),
                    *(signal(*site) for site in sites),
                    *(gradient(*site) for site in sites),
                )
            )
            before = after
    return found


def _moment(points: Any, layer: int, site: str) -> Any:
    if (layer, site) not in points:
        raise DomainError(
            f"layer {layer} has no site {site!r}: this analysis covers layers that are an "
            "attention block and a feed-forward block added to the stream one after the other"
        )
    return points[layer, site]
