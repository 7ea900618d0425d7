"""How many tokens a model is predicted at where its user names no number of them."""

from __future__ import annotations

from ..model.transformer import Transformer
from .predict import by_position, positional

FEW_TOKENS = 128
"""Tokens of a model that are resolved one by one where its user names no number of them: the cost
of a layer grows with their cube."""


def shortened(model: Transformer) -> Transformer:
    """The model at `FEW_TOKENS` where it has more and they would be resolved one by one."""
    if model.seq_len <= FEW_TOKENS or not positional(model) or by_position(model):
        return model
    return model.replace(seq_len=FEW_TOKENS)
