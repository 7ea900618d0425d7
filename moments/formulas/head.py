"""Cross-entropy of the logits of a random matrix: z ~ N(0, v), independent over a vocabulary V.

The loss of one token with target t is log sum_v e^{z_v} - z_t. To leading order in 1/V the sum is
V e^{v/2}, with relative variance (e^v - 1)/V, so that p_v = e^{z_v - v/2}/V.
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Substituted, asymptotic, derived
from .price import price

_NOTE = "large vocabulary: e^v small against it; the engine's softmax has no such limit"


def _shared(m: Any, x_variance: Any, x_other_variance: Any, x_correlation: Any) -> Any:
    return x_correlation * m.sqrt(x_variance * x_other_variance)


def _loss_covariance(m: Any, vocab_size: Any, shared: Any, pattern_correlation: Any) -> Any:
    return shared * (pattern_correlation - 2 / vocab_size) + m.expm1(shared) / vocab_size


_SAME_TOKEN: dict[str, Any] = {
    "x_other_variance": "x_variance",
    "x_correlation": lambda m: 1,
    "pattern_correlation": lambda m: 1,
}
_COVARIANCE = Substituted(_loss_covariance, shared=_shared)


def _logit_gradient(m: Any, vocab_size: Any, slope: Any, grad_covariance: Any) -> Any:
    return grad_covariance * slope / vocab_size


_LOGIT_GRADIENT = Substituted(
    _logit_gradient, slope=price(_COVARIANCE, "x_variance", "x_other_variance", "x_correlation")
)
_BACK = derived("derivative of the losses' covariance in the logits', for each of V")

CROSS_ENTROPY = ComponentLaws(
    "cross_entropy",
    "Cross-entropy of a softmax over a vocabulary, per token; gradients at a logit",
    refined={
        "mean": asymptotic(
            lambda m, vocab_size, x_variance: (
                m.log(vocab_size) + x_variance / 2 - m.expm1(x_variance) / (2 * vocab_size)
            ),
            derived("log of the mean sum, less half its relative variance"),
            _NOTE,
        ),
        "variance": asymptotic(
            Substituted(_COVARIANCE, **_SAME_TOKEN),
            derived("the covariance of a token with itself"),
            _NOTE,
        ),
        # pattern_correlation: whether the two tokens have the same target.
        "covariance": asymptotic(
            _COVARIANCE,
            derived("int_0^1 E (p - t).(p' - t') c ds, the logits sharing s of their covariance c"),
            _NOTE,
        ),
        "grad_variance": asymptotic(
            Substituted(_LOGIT_GRADIENT, **_SAME_TOKEN, grad_covariance="grad_variance"),
            _BACK,
            _NOTE,
        ),
        "grad_covariance": asymptotic(_LOGIT_GRADIENT, _BACK, _NOTE),
    },
)
