"""The declaration of the head: final norm, output matrix and loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.activation import activation_laws
from ..formulas.checks import (
    POSITIVE,
    check_number,
)
from .fields import (
    Flag,
    Positive,
    PositiveVariance,
    Probability,
    Several,
    Share,
    Stored,
    Variance,
    one_of,
)

Gain = Annotated[
    float, partial(check_number, interval=POSITIVE, remedy="a gain multiplies amplitudes")
]
LOSSES = ("causal", "masked", "classification", None)
POOLS = ("first", "mean", "patches", "before")


@dataclass(frozen=True, kw_only=True)
class Head(Stored):
    """Final normalisation, optional hidden layer, matrix to logits, and the mean cross-entropy.

    Args:
        vocab_size: logits per token; None: rows of the token table, or `classes`.
        tied: whether the matrix is the token table itself.
        weight_variance: variance of the matrix's entries if it is not tied.
        norm: whether the head begins with a norm, as for Pre-LN.
        norm_gain: root mean square of that norm's gain.
        dropout: probability of dropping an entry of the head's input, for a classifier of the
            pooled one.
        transform: activation of a hidden layer d_model to d_model before the matrix (BERT: "gelu",
            then a LayerNorm); None: there is none.
        transform_variance: variance of that layer's matrix.
        transform_bias_variance: variance of its bias; 0: starts at zero; None: there is none.
        transform_norm: whether a normalisation follows the hidden layer (BERT's masked language
            model) or not (the pooler before a classifier, transform="tanh").
        output_scale: factor of the logits.
        bias: whether the logits have a bias, which starts at zero.
        logit_softcap: c in c tanh(logit/c); None: no cap.
        loss: "causal" (every token predicts the next), "masked" (masked tokens predict
            themselves), "classification" (one label per sequence) or None: no loss.
        classes: number of classes of a classification.
        pool: input of a classifier: the "first" token or the "mean" of all tokens; for an image
            also the mean of its "patches", or of the tokens "before" them.
        pool_norm: whether a normalisation follows the pooling.
        target_share: share of tokens with a target for "masked" without explicit targets.
        factor_dim: number of features that the matrix reads if it is less than d_model: the width
            of a tied token table. Their source is the `transform` (ELECTRA), else another matrix
            (OPT-350m).
        factor_variance: variance of that matrix's entries.
        label_smoothing: share of the target's weight that is spread over all logits.

    Raises:
        DomainError: a value outside what is allowed, or fields that contradict each other.
    """

    _part: ClassVar[str] = "head"

    vocab_size: Several | None = None
    tied: Flag = True
    weight_variance: Variance | None = None
    norm: Flag = True
    dropout: Probability = 0.0
    transform: str | None = None
    transform_variance: Variance | None = None
    transform_bias_variance: Variance | None = None
    transform_norm: Flag = True
    output_scale: Positive = 1.0
    bias: Flag = False
    logit_softcap: Positive | None = None
    loss: Annotated[str, one_of(*LOSSES)] | None = "causal"
    classes: Several | None = None
    pool: Annotated[str, one_of(*POOLS)] = "first"
    pool_norm: Flag = False
    target_share: Share = 0.15
    label_smoothing: Probability = 0.0
    norm_gain: Gain = 1.0
    factor_dim: Several | None = None
    factor_variance: PositiveVariance | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transform is not None:
            activation_laws(self.transform)
        self._check_together()

    def _check_together(self) -> None:
        if (self.transform is None) != (self.transform_variance is None):
            raise DomainError("transform and transform_variance belong together: give both")
        if self.transform is None and self.transform_bias_variance is not None:
            raise domain_error(
                "transform_bias_variance", self.transform_bias_variance, "None without a transform"
            )
        if (self.factor_dim is not None and self.transform is None) != (
            self.factor_variance is not None
        ):
            raise DomainError(
                "factor_dim and factor_variance belong together, without a transform: give both"
            )
        if not self.tied and self.weight_variance is None:
            raise DomainError("weight_variance is missing: an untied head has its own matrix")
        if self.tied and self.weight_variance is not None:
            raise domain_error(
                "weight_variance", self.weight_variance, "None where the head is tied", "tied=False"
            )
        if not self.norm and self.norm_gain != 1:
            raise domain_error("norm_gain", self.norm_gain, "1 without a final norm", "norm=True")
        if self.loss == "classification":
            if self.tied:
                raise domain_error("tied", True, "False for a classification")
            if self.classes is None and self.vocab_size is None:
                raise DomainError("classes is missing: pass the number of labels")
            if self.pool_norm and self.transform is not None:
                raise domain_error("pool_norm", True, "False before a transform")
        elif self.pool_norm:
            raise domain_error("pool_norm", True, "False unless loss='classification'")
        elif self.classes is not None:
            raise domain_error("classes", self.classes, "None unless loss='classification'")

    def choices(self, embedding: Any) -> int | None:
        """Logits per prediction: labels, rows of its own or of a token table; None: nobody says."""
        found: int | None = self.classes or self.vocab_size
        return found or getattr(embedding, "vocab_size", None)

    def __str__(self) -> str:
        gain = "" if self.norm_gain == 1 else f", gain {self.norm_gain:.4g}"
        parts = [f"normalised{gain}"] if self.norm else []
        if self.transform is not None:
            tail = " and norm" if self.transform_norm else ""
            parts.append(f"{self.transform} layer of variance {self.transform_variance:.3g}{tail}")
        if self.factor_dim is not None:
            parts.append(f"narrowed to {self.factor_dim} features")
        matrix = "tied" if self.tied else f"matrix of variance {self.weight_variance:.3g}"
        parts.append(
            matrix if self.output_scale == 1 else f"{matrix}, logits times {self.output_scale:.4g}"
        )
        if self.logit_softcap is not None:
            parts.append(f"capped at {self.logit_softcap:g}")
        return ", ".join(parts) + f"; {self.loss or 'no'} loss"
