"""What makes the numbers of a head less certain."""

from __future__ import annotations

import numpy as np

from ...engine.state import Signal
from ...model.head import Head
from .readout import Readout

# Beyond this E sum_v p_v^2, softmaxes are near one-hot and two tokens' overlap is an interpolation.
_PEAKED = 0.1


def output_notes(head: Head, readout: Readout, signal: Signal) -> tuple[str, ...]:
    """Of a head that reads this signal."""
    softmax, notes = readout.softmax, []
    # A uniform softmax over few classes is not peaked.
    peak = (readout.vocab_size - 1) * softmax.other.probability_square - 1 / readout.vocab_size
    if np.max(peak) > _PEAKED:
        notes.append(
            f"head: the logits' variance {float(np.max(readout.variance)):.3g} makes the softmax "
            "nearly one-hot; how gradients correlate between tokens is interpolated there"
        )
    own = float(np.max(readout.softmax.own.probability)) if np.any(readout.carried) else 0.0
    if own > _PEAKED:
        notes.append(
            f"head: the tied table gives the token that is read a probability of {own:.2g}; then "
            "gradients point along what layer 1 reads, and in the layers they come out low, by up "
            "to a quarter in 1 to 4 layers"
        )
    if head.loss == "classification" and head.pool == "first" and not signal.resolved:
        notes.append(
            "head: only the first token has a gradient, and tokens alike share its average; "
            "resolve the prediction by token"
        )
    return tuple(notes)
