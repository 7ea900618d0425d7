"""The two heads that most families have."""

from __future__ import annotations

from ..head import Head
from .entries import Entries


def causal_head(
    read: Entries,
    variance: float,
    epsilon: float | None,
    *,
    bias: bool = False,
    output_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Head:
    """A final norm and one matrix, which `tie_word_embeddings` may make the token table.

    Args:
        variance: of the matrix where it is its own.
        epsilon: of the final norm; None: there is none.
    """
    tied = read.flag("tie_word_embeddings")
    return Head(
        tied=tied,
        weight_variance=None if tied else variance,
        norm=epsilon is not None,
        bias=bias,
        output_scale=output_scale,
        logit_softcap=logit_softcap,
        loss="causal",
    )


def masked_head(read: Entries, variance: float, activation: str) -> Head:
    """BERT's: a hidden layer with activation and norm, then the token table and a bias."""
    tied = read.flag("tie_word_embeddings", True)
    return Head(
        tied=tied,
        weight_variance=None if tied else variance,
        norm=False,
        transform=activation,
        transform_variance=variance,
        transform_bias_variance=0.0,
        bias=True,
        loss="masked",
    )
