"""The benchmark of speed: what it compares with computes the same."""

from __future__ import annotations

import numpy as np
import speed

import moments


def test_the_formulas_by_hand_are_those_of_the_package() -> None:
    """Typed apart from the laws, so that each checks the other."""
    for dropout in (0.0, 0.1):
        model = speed.ALIKE.replace(layers=7, dropout=dropout)
        p = moments.predict(model, theory="simplified", correlation=0.2, grad_correlation=0.2)
        names = ("variance", "correlation", "grad_variance", "grad_correlation")
        for name, hand in zip(names, speed.by_hand(model), strict=True):
            assert np.allclose(getattr(p, name), hand, rtol=1e-12), name
