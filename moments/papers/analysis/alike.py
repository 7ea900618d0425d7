"""Predictions of idealised stacks: tokens alike, validity notes kept in the result."""

from __future__ import annotations

import warnings
from typing import Any

from ...errors import DomainError, ValidityWarning
from ...formulas.law import Theory
from ...model.transformer import Transformer
from ...prediction.predict import positional, predict
from ...prediction.result import Prediction


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return predict(model, theory=theory, tokens=False, **moments)
