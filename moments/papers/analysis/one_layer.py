"""The engine's map of one layer, and the stream's correlations that it leaves unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import DomainError, domain_error
from ...formulas.law import Theory
from ...model.transformer import Transformer
from .alike import predict_alike

# A Pre-LN stream so large that one layer hardly moves it; what it adds is then a function of the
# correlation alone, wrong by one part in LARGE.
LARGE = 1e6


class State(NamedTuple):
    """Moments at one point of the stream."""

    variance: float
    correlation: float
    grad_variance: float
    grad_correlation: float


@dataclass(frozen=True)
class OneLayer:
    """One layer of a model, as a map of moments: forward from its input, backward from its output.

    Raises:
        DomainError: a norm other than pre or post, or layers that differ by LayerNorm Scaling.
    """

    model: Transformer
    theory: Theory

    @classmethod
    def of(cls, model: Transformer, theory: Theory, layer: int) -> OneLayer:
        if model.norm not in ("pre", "post"):
            raise domain_error("norm", model.norm, "'pre' or 'post'")
        if model.layernorm_scaling:
            raise DomainError(
                "layernorm_scaling makes every layer another map: no correlation is stationary"
            )
        if not 1 <= layer <= model.layers:
            raise domain_error("layer", layer, f"from 1 to {model.layers}")
        return cls(repeated_layer(model, layer, 1).replace(embedding=None), theory)

    @property
    def carries_all(self) -> bool:
        """Pre-LN whose skip connection keeps the whole stream, so that its variance grows."""
        return self.model.norm == "pre" and float(self.model.skip_scales.min()) >= 1.0

    def __call__(
        self, variance: float, correlation: float, grad_correlation: float = 0.0
    ) -> tuple[State, State]:
        """Moments at the input and at the output."""
        p = predict_alike(
            self.model,
            self.theory,
            variance=variance,
            correlation=correlation,
            grad_correlation=grad_correlation,
        )
        columns = (p.variance, p.correlation, p.grad_variance, p.grad_correlation)
        first, last = (State(*(float(c[i]) for c in columns)) for i in (0, 1))
        return first, last

    def added(self, correlation: float) -> float:
        """Token correlation of what one layer adds to a large Pre-LN stream."""
        before, after = self(LARGE, correlation)
        pairs = after.variance * after.correlation - before.variance * before.correlation
        return pairs / (after.variance - before.variance)

    def returned(self, correlation: float, grad_correlation: float) -> float:
        """Token correlation of the gradient one layer adds to that of a large Pre-LN stream."""
        after, before = self(LARGE, correlation, grad_correlation)
        pairs = (
            after.grad_variance * after.grad_correlation
            - before.grad_variance * before.grad_correlation
        )
        return pairs / (after.grad_variance - before.grad_variance)


def repeated_layer(model: Transformer, layer: int, times: int) -> Transformer:
    """Layer `layer` of a model, from 1, `times` times: every list of one per layer becomes its."""

    def own(values: Any) -> Any:
        return values[layer - 1] if isinstance(values, tuple) else values

    def each(variances: Any) -> Any:
        if variances is None:
            return None
        lists = {name: own(value) for name, value in vars(variances).items()}
        return variances.replace(**lists)

    pairs = ("skip_scale", "branch_scale", "norm_gain")
    found = {name: own(getattr(model, name)) for name in (*pairs, "temperature", "window")}
    for name in pairs:
        if isinstance(found[name], tuple):
            found[name] = [found[name]] * times
    return model.replace(
        layers=times, weights=each(model.weights), biases=each(model.biases), **found
    )
