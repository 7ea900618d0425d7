"""Noci et al.: a linear stack under uniform attention, and how far query gradients fall behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moments.errors import domain_error
from moments.formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from moments.formulas.checks import POSITIVE, Interval, check_count, check_flag, check_interval
from moments.model.transformer import Transformer
from moments.model.weights import Weights
from moments.prediction.result import Prediction

from ..formulas.noci import UNIFORM_ATTENTION_STACK
from .results import Result, expected

# --- Noci et al.'s linear stack under uniform attention: closed forms, their limits, the engine ---


@dataclass(frozen=True)
class UniformAttention(Result):
    """Lemmas 3.2 and 3.3 and Theorem 3.3 along the depth.

    Attributes:
        attention_branch_square, ffn_branch_square: alpha_1^2 and alpha_2^2.
        inner_products: (N + 1,), the sum of all inner products over its value at the input.
        variance, correlation: (N + 1,), exact.
        predicted_variance, predicted_correlation: (N + 1,), the engine with query weights 0; None
            where the two squares differ, which its one branch scale cannot express.
        variance_limit, correlation_limit: many layers, at the same alpha^2 N where depth-scaled;
            else infinity and rank collapse.
    """

    attention_branch_square: float
    ffn_branch_square: float
    inner_products: np.ndarray
    variance: np.ndarray
    correlation: np.ndarray
    predicted_variance: np.ndarray | None
    predicted_correlation: np.ndarray | None
    variance_limit: float
    correlation_limit: float

    @property
    def heading(self) -> str:
        return (
            f"uniform attention, {len(self.variance) - 1} layers: variance "
            f"{self.variance[-1]:.4g} (limit {self.variance_limit:.4g}), correlation "
            f"{self.correlation[-1]:.4g} (limit {self.correlation_limit:.4g})"
        )

    def _table(self) -> dict[str, np.ndarray]:
        columns = {
            "layer": np.arange(len(self.variance)),
            "inner products": self.inner_products,
            "variance": self.variance,
            "correlation": self.correlation,
        }
        if self.predicted_variance is not None and self.predicted_correlation is not None:
            columns["variance, engine"] = self.predicted_variance
            columns["correlation, engine"] = self.predicted_correlation
        return columns


def uniform_attention(
    layers: int,
    seq_len: int,
    *,
    variance: float = 1.0,
    correlation: float = 0.0,
    attention_constant: float = 1.0,
    ffn_constant: float = 1.0,
    depth_scaled: bool = True,
    d_model: int = 256,
) -> UniformAttention:
    """A linear stack without normalisation whose attention is uniform.

    Args:
        layers, seq_len: N and n.
        variance, correlation: of the input.
        attention_constant, ffn_constant: alpha_i^2 N where `depth_scaled`, else alpha_i^2.
        depth_scaled: whether branches are scaled by 1/sqrt(N).
        d_model: width of the engine's model; the closed forms do not depend on it.

    Raises:
        DomainError: a count below 1, or a variance or constant that is not positive.
    """
    check_count("layers", layers)
    check_count("seq_len", seq_len, least=2)
    check_flag("depth_scaled", depth_scaled)
    check_interval("variance", variance, POSITIVE)
    check_interval("correlation", correlation, Interval(-1 / (seq_len - 1), 1.0))
    check_interval("attention_constant", attention_constant, POSITIVE)
    check_interval("ffn_constant", ffn_constant, POSITIVE)
    share = 1 / layers if depth_scaled else 1.0
    squares = attention_constant * share, ffn_constant * share
    values = {
        "attention_branch_square": squares[0],
        "ffn_branch_square": squares[1],
        "attention_depth_constant": squares[0] * layers,
        "ffn_depth_constant": squares[1] * layers,
        "layers": np.maximum(np.arange(layers + 1), 1),
        "seq_len": seq_len,
        "x_variance": variance,
        "x_correlation": correlation,
    }
    laws = UNIFORM_ATTENTION_STACK.laws
    # The laws hold from one layer on; before that, the input.
    growth, v, r = (
        np.where(np.arange(layers + 1) > 0, laws[name](**values), start)
        for name, start in (
            ("inner_product_growth", 1.0),
            ("variance", variance),
            ("correlation", correlation),
        )
    )
    engine: tuple[np.ndarray | None, np.ndarray | None] = None, None
    if squares[0] == squares[1]:
        model = linear_stack(layers, d_model, seq_len, squares[0])
        p = expected(model, variance=variance, correlation=correlation)
        engine = p.variance, p.correlation
    return UniformAttention(
        *squares,
        growth,
        v,
        r,
        *engine,
        float(laws["variance_limit"](**values)) if depth_scaled else float("inf"),
        float(laws["correlation_limit"](**values)) if depth_scaled else 1.0,
    )


def linear_stack(layers: int, d_model: int, seq_len: int, branch_square: float) -> Transformer:
    """The papers' linear network, its attention uniform as in Assumption 3.1: query weights are 0,
    every other matrix preserves variance."""
    unit = 1 / d_model
    return Transformer(
        layers,
        d_model,
        1,
        seq_len,
        d_ff=d_model,
        norm="none",
        activation="identity",
        branch_scale=branch_square**0.5,
        weights=Weights(0.0, unit, unit, unit, unit, unit),
    )


# --- How far query gradients fall behind value gradients, and the temperature that evens them out -


@dataclass(frozen=True)
class GradientGap(Result):
    """Squared gradient norms of query against value weights, layer by layer.

    Attributes:
        prediction: it was read from.
        ratio: (N,), query over value, predicted.
        uniform_ratio: (N,), Noci et al.'s Theorem 3.2 with equations 17 and 18, at the moments that
            enter each layer's attention: one head of width d, weights of variance 1/d, gradients
            uncorrelated between tokens.
        temperature: (N,), the factor tau on the logits that evens the two out at uniform attention
            (equation 47). The logits it makes are not quite small: they raise the value gradient by
            1 + n/(n + d), which leaves a ratio of (n + d)/(2 n + d).
    """

    prediction: Prediction
    ratio: np.ndarray
    uniform_ratio: np.ndarray
    temperature: np.ndarray

    @property
    def heading(self) -> str:
        return (
            f"query over value gradients: {self.ratio[0]:.4g} in layer 1, {self.ratio[-1]:.4g} in "
            f"layer {len(self.ratio)}"
        )

    def _table(self) -> dict[str, np.ndarray]:
        return {
            "layer": np.arange(1, len(self.ratio) + 1),
            "query / value": self.ratio,
            "uniform attention": self.uniform_ratio,
            "temperature": self.temperature,
        }


def gradient_gap(prediction: Prediction) -> GradientGap:
    """Query over value gradients of every layer, beside the uniform-attention law.

    The temperature is infinite where tokens have collapsed into one.

    Raises:
        DomainError: a theory other than "refined", which alone has query gradients, or several
            configurations.
    """
    if prediction.theory != "refined":
        raise domain_error("theory", prediction.theory, "'refined', which alone has query paths")
    frame = prediction.weight_gradients()
    model = prediction.model
    norms = frame.pivot_table(index="layer", columns="weight", values="squared_norm", sort=True)
    ratio = (norms["query"] / norms["value"]).to_numpy(float)
    scale = model.norm_scales**2 if model.norm == "pre" else np.ones(model.layers)
    variance = scale if model.norm == "pre" else prediction.variance[:-1]
    correlation = np.minimum(prediction.correlation[:-1], 1.0)
    square = np.full(model.layers, np.inf)
    apart = correlation < 1.0
    if apart.any():
        square[apart] = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")(
            d_model=model.d_model,
            seq_len=model.seq_len,
            x_variance=np.broadcast_to(variance, model.layers)[apart],
            x_correlation=correlation[apart],
        )
    return GradientGap(prediction, ratio, 1 / square, np.sqrt(square))
