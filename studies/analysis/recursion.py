"""A prediction re-accumulated with blocks that correlate with the stream, as training makes them.

At initialisation a block's last matrix is independent of the stream, so the two are uncorrelated.
Both papers' statements about training turn on their correlation (Sun et al.'s rho_1 and rho_2,
Kedia et al.'s 3.5, E.5 and E.6): one number each for the signal and the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moments.errors import DomainError, domain_error
from moments.formulas.checks import CORRELATION, check_interval
from moments.formulas.linear import CORRELATED_RESIDUAL
from moments.prediction.result import Prediction

from .results import Result


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


@dataclass(frozen=True)
class VarianceRecursion(Result):
    """Variances along the stream where blocks correlate with it.

    Attributes:
        prediction: at initialisation, where they do not.
        branch_correlation: of every block's output with the stream it is added to.
        grad_branch_correlation: of the gradient that returns through a block with the one past it.
        variance, grad_variance: of the stream, (N + 1,).
        cosine: between the two ends of every block, (2 N,), in order.
    """

    prediction: Prediction
    branch_correlation: float
    grad_branch_correlation: float
    variance: np.ndarray
    grad_variance: np.ndarray
    cosine: np.ndarray

    @property
    def heading(self) -> str:
        growth = self.grad_variance[0] / self.grad_variance[-1]
        return (
            f"branch correlation {self.branch_correlation:g}, of gradients "
            f"{self.grad_branch_correlation:g}: variance x "
            f"{self.variance[-1] / self.variance[0]:.4g}, gradient variance x {growth:.4g} down to "
            "the input"
        )

    def _table(self) -> dict[str, np.ndarray]:
        return {
            "layer": np.arange(len(self.variance)),
            "variance": self.variance,
            "variance, uncorrelated": self.prediction.variance,
            "grad_variance": self.grad_variance,
            "grad_variance, uncorrelated": self.prediction.grad_variance,
        }


def variance_recursion(
    prediction: Prediction,
    branch_correlation: float = 0.0,
    grad_branch_correlation: float = 0.0,
) -> VarianceRecursion:
    """Variances of signal and gradient where every block correlates with the stream.

    Block outputs keep the variances of the prediction, which normalised inputs fix; a block's
    returned gradient scales with one over the variance its normalisation divides by. Token
    correlations are held at the prediction's.

    Args:
        prediction: of a single configuration, Pre-LN or Post-LN.
        branch_correlation, grad_branch_correlation: in [-1, 1].

    Raises:
        DomainError: a correlation outside [-1, 1], another norm, or several configurations.
    """
    check_interval("branch_correlation", branch_correlation, CORRELATION)
    check_interval("grad_branch_correlation", grad_branch_correlation, CORRELATION)
    norm = prediction.model.norm
    if norm not in ("pre", "post"):
        raise domain_error("norm", norm, "'pre' or 'post', whose blocks see normalised inputs")
    if prediction.model.normalization not in ("layernorm", "rmsnorm"):
        raise domain_error(
            "normalization",
            prediction.model.normalization,
            "'layernorm' or 'rmsnorm', whose output does not depend on the stream's variance",
        )
    if prediction.variance.ndim != 1:
        raise domain_error("prediction", prediction, "of a single configuration")
    parts = blocks(prediction)
    post = norm == "post"
    entering, totals = _forward(parts, float(prediction.variance[0]), branch_correlation, post)
    leaving = [b.leaving for b in parts] if post else totals
    gradients = _backward(
        parts,
        entering,
        totals,
        float(prediction.grad_variance[-1]),
        grad_branch_correlation,
        post,
    )
    cosine = [
        (np.sqrt(b.skip_square * v) + branch_correlation * np.sqrt(b.branch_square * b.added))
        / np.sqrt(total)
        if total
        else 1.0
        for b, v, total in zip(parts, entering, totals, strict=True)
    ]
    return VarianceRecursion(
        prediction,
        branch_correlation,
        grad_branch_correlation,
        np.array([entering[0], *leaving[1::2]]),
        np.array(gradients[::2]),
        np.array(cosine),
    )


def _forward(
    parts: list[ResidualAddition], variance: float, correlation: float, post: bool
) -> tuple[list[float], list[float]]:
    """Signal variance that enters every block, and after its addition."""
    law = CORRELATED_RESIDUAL.law("variance")
    entering, totals = [], []
    for block in parts:
        entering.append(variance)
        total = law.of(
            {
                "skip_square": block.skip_square,
                "branch_square": block.branch_square,
                "x_variance": variance,
                "branch_variance": block.added,
                "branch_correlation": correlation,
            }
        )
        totals.append(float(total))
        variance = block.leaving if post else totals[-1]
    return entering, totals


def _backward(
    parts: list[ResidualAddition],
    entering: list[float],
    totals: list[float],
    gradient: float,
    correlation: float,
    post: bool,
) -> list[float]:
    """Gradient variance at the input of every block, and at the last block's output."""
    law = CORRELATED_RESIDUAL.law("grad_variance")
    found = [gradient]
    for block, variance, total in zip(parts[::-1], entering[::-1], totals[::-1], strict=True):
        returned = block.returned
        if post:
            # The norm above divides by the new sum instead of the predicted one.
            gradient *= block.grad_total / block.grad_leaving * block.total / total
        else:
            returned *= block.entering / variance
        gradient = float(
            law.of(
                {
                    "skip_square": block.skip_square,
                    "branch_square": block.branch_square,
                    "grad_variance": gradient,
                    "grad_branch_variance": returned * gradient,
                    "grad_branch_correlation": correlation,
                }
            )
        )
        found.insert(0, gradient)
    return found
