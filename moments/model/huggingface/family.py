"""What a family is: how its config is read, which module it is; the two heads that most have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..embedding import Embedding
from ..head import Head
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import USUAL, Entries

Reader = Callable[[Entries, int | None], Transformer]


@dataclass(frozen=True)
class Family:
    """One `model_type`: how its config is read, and which module it is.

    Args:
        read: from entries and a sequence length to the declaration.
        module: name of the transformers class with its head.
        task: what it is trained on: "causal", "masked", "translation", "images" or "sound"; "text"
            where nothing but a text is read.
        usual: entries that are not modelled, with the value at which they change nothing (... where
            none does).
        defaults: what its config class means by entries that are left out (`defaults.json`).
        slip: whether the class draws otherwise than the authors whom it follows: then a config is
            read as the class draws, and promises nothing.
    """

    read: Reader
    module: str
    task: str
    usual: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    slip: bool = False

    def declare(
        self, given: Mapping[str, Any], seq_len: int | None
    ) -> tuple[Transformer, list[str]]:
        """The declaration of a config, and a note for each feature that is left out."""
        entries = Entries(given, str(given.get("model_type")), self.defaults)
        model = self.read(entries, seq_len)
        entries.finish(self.usual)
        return model, entries.notes

    def entries(self, given: Mapping[str, Any]) -> frozenset[str]:
        """Names of the entries that describe the architecture: read, known by their default, or
        known to change nothing at one value.

        Raises:
            DomainError: an entry that the declaration refuses.
        """
        reader = Entries(given, str(given.get("model_type")), self.defaults)
        self.read(reader, None)
        elsewhere = {"model_type", "quantization_config"}
        return frozenset(reader.read.union(self.defaults, self.usual, USUAL)) - elsewhere


# --- what most families have in common ------------------------------------------------------------

_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads")


def declared(
    read: Entries,
    epsilon: float,
    *,
    variance: float | None = None,
    shape: tuple[str, str, str] = _SHAPE,
    embedding: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Transformer:
    """Tables, matrices and norms of one variance and one epsilon: what a family adds are `fields`.

    Without a head of its own it predicts the next token.

    Args:
        variance: of tables and matrices; None: that of initializer_range.
        shape: the entries for the depth, the width and the heads.
        embedding: of the tables, beside their variance.
    """
    variance = read.variance() if variance is None else variance
    layers, d_model, heads = (read(name) for name in shape)
    usual: dict[str, Any] = {
        "norm": "pre",
        "weights": Weights.normal(variance),
        "biases": Biases(),
        "norm_affine": True,
    }
    tables = {"vocab_size": read("vocab_size"), "token_variance": variance}
    usual["embedding"] = Embedding(**(tables | dict(embedding or {})))
    if "head" not in fields:
        usual |= {"causal": True, "head": causal_head(read, variance, epsilon)}
    return Transformer(layers, d_model, heads, norm_epsilon=epsilon, **(usual | fields))


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
    tied = read.flag("tie_word_embeddings", False)
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
