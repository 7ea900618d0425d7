"""Normalisation at finite width: centring, the constant under the root, and the norms' spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .composition import Leaf, Pullback, Pulled
from .law import ComponentLaws
from .parts import evaluate
from .state import Gradient, Kernel, Signal


@dataclass(frozen=True)
class FiniteNormalization(Leaf):
    """A normalisation over features, unit gain and no bias.

    Attributes:
        laws: the component's laws, of which the refined ones are used.
        label: site name in a trace.
        epsilon: added to the variance under the root.
        centres: whether the mean over features is removed (LayerNorm) or not (RMSNorm).
    """

    laws: ComponentLaws
    label: str
    epsilon: Any = 0.0
    centres: bool = True

    normalises = True

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        laws, width = self.laws.under("refined"), signal.width
        kernel = signal.second_moment()
        if self.centres:
            loose = kernel if signal.centred is None else kernel - signal.centred
            kernel = kernel - loose.scaled(1 / width)
        inner = Signal(kernel, signal.seq_len)
        one, two = self._bind(inner, signal.spread)
        algebra = inner.algebra
        variance = evaluate(laws["variance"], algebra, one)
        pairs = evaluate(laws["covariance"], algebra, two)
        normal = Kernel.joined(variance, pairs, kernel.resolved)
        output = Signal(
            normal,
            signal.seq_len,
            mean=0.0 * kernel.diagonal,
            width=width,
            spread=normal.scaled(0.0),
            centred=normal if self.centres else None,
            kurtosis=evaluate(laws["kurtosis"], algebra, {"d_model": width}),
        )

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel
            radial, mean = self._lost_directions(gradient)
            share, _ = received.lift((radial + mean) / width)
            overlap = two["x_correlation"] ** 2
            _, pair_share = received.lift(1 / width)
            pair_share = pair_share * (radial * (2 - overlap) + received.lift(mean)[1])
            single = one | {"grad_variance": received.diagonal, "removed_share": share}
            pair = two | {"grad_covariance": received.pairs, "removed_pair_share": pair_share}
            variance = evaluate(laws["grad_variance"], algebra, single)
            pairs = evaluate(laws["grad_covariance"], algebra, pair)
            sent = Kernel.joined(variance, pairs, received.resolved)
            # What is normalised has no scale, so its gradient is orthogonal to it.
            centred = 1.0 if self.centres else gradient.centred_share
            return Pulled(Gradient(sent, gradient.seq_len, True, centred))

        return output, pullback

    def _bind(self, inner: Signal, spread: Kernel | None) -> tuple[dict[str, Any], dict[str, Any]]:
        kernel = inner.kernel
        first, second = kernel.over_tokens(kernel.diagonal)
        eps, eps_pairs = kernel.lift(self.epsilon)
        one = {"x_variance": kernel.diagonal, "epsilon": eps}
        two = {
            "x_variance": first,
            "x_other_variance": second,
            "x_correlation": inner.correlation(),
            "epsilon": eps_pairs,
        }
        if spread is None:
            spread = kernel.scaled(0.0)
        own = spread.diagonal / (kernel.diagonal + eps) ** 2
        one["norm_spread"] = own
        two["norm_spread"], two["other_norm_spread"] = kernel.over_tokens(own)
        two["pair_norm_spread"] = spread.pairs / ((first + eps_pairs) * (second + eps_pairs))
        return one, two

    def _lost_directions(self, gradient: Gradient) -> tuple[float, Any]:
        """How many directions a token's gradient loses: the signal's own, the mean over features.

        A gradient that is orthogonal or centred already loses nothing there.
        """
        radial = 0.0 if gradient.orthogonal else 1.0
        return radial, 1.0 - gradient.centred_share if self.centres else 0.0
