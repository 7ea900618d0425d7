"""Cross-entropy of logits that a random matrix makes: z ~ N(0, v), independent over a vocabulary V.

The loss of one token with target t is log sum_v e^{z_v} - z_t. To leading order in 1/V the sum is
V e^{v/2}, with relative variance (e^v - 1)/V, so that p_v = e^{z_v - v/2}/V.
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Substituted, asymptotic, derived

_NOTE = "large vocabulary: e^v small against it; the engine's softmax has no such limit"


def _shared(m: Any, x_variance: Any, x_other_variance: Any, x_correlation: Any) -> Any:
    return x_correlation * m.sqrt(x_variance * x_other_variance)


def _loss_covariance(m: Any, vocab_size: Any, shared: Any, pattern_correlation: Any) -> Any:
    return shared * (pattern_correlation - 2 / vocab_size) + m.expm1(shared) / vocab_size


def _logit_grad_covariance(
    m: Any, vocab_size: Any, shared: Any, pattern_correlation: Any, grad_covariance: Any
) -> Any:
    overlap = pattern_correlation - 2 / vocab_size + m.exp(shared) / vocab_size
    return grad_covariance * overlap / vocab_size


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
            lambda m, vocab_size, x_variance: (
                x_variance * (1 - 2 / vocab_size) + m.expm1(x_variance) / vocab_size
            ),
            derived("the target's logit, and the sum's fluctuation"),
            _NOTE,
        ),
        # pattern_correlation: whether the two tokens have the same target.
        "covariance": asymptotic(
            Substituted(_loss_covariance, shared=_shared),
            derived("int_0^1 E (p - t).(p' - t') c ds, the logits sharing s of their covariance c"),
            _NOTE,
        ),
        "grad_variance": asymptotic(
            lambda m, vocab_size, x_variance, grad_variance: (
                grad_variance * (1 - 2 / vocab_size + m.exp(x_variance) / vocab_size) / vocab_size
            ),
            derived("E |p - t|^2/V = (1 - 2 E p_t + E sum p^2)/V"),
            _NOTE,
        ),
        "grad_covariance": asymptotic(
            Substituted(_logit_grad_covariance, shared=_shared),
            derived("E (p - t).(p' - t')/V, E p_v p'_v = e^c/V^2"),
            _NOTE,
        ),
    },
)
