"""Value-SkipInit: attention that starts as the identity."""

from __future__ import annotations

from ..formulas.law import Source
from ..model.transformer import Transformer
from .registry import Scheme


def _value_skipinit(model: Transformer) -> Transformer:
    """Attention weights alpha I + beta softmax(...), learned, that start at alpha 1 and beta 0."""
    return model.replace(identity_attention=True)


VALUE_SKIPINIT = Scheme(
    "value-skipinit",
    "Value-SkipInit: attention starts as the identity",
    ("identity_attention",),
    Source("He et al. 2023, Deep Transformers without Shortcuts", "section 3"),
    _value_skipinit,
)
