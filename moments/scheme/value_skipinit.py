"""Value-SkipInit: attention that starts as the identity."""

from __future__ import annotations

from ..checks import check_in
from ..law import Source
from ..symbols import NONNEGATIVE
from ..transformer import Transformer
from .registry import Scheme


def _value_skipinit(model: Transformer, alpha: float = 1.0, beta: float = 0.0) -> Transformer:
    """Attention weights alpha I + beta softmax(...), with alpha and beta learned.

    Args:
        model: its placement stays.
        alpha: where the identity's share starts; the authors' 1.
        beta: where the softmax's starts; the authors' 0.
    """
    check_in("alpha", alpha, NONNEGATIVE)
    check_in("beta", beta, NONNEGATIVE)
    return model.replace(attention_mix=(alpha, beta))


VALUE_SKIPINIT = Scheme(
    "value-skipinit",
    "Value-SkipInit: attention starts as the identity",
    ("attention_mix",),
    Source("He et al. 2023, Deep Transformers without Shortcuts", "section 3"),
    _value_skipinit,
)
