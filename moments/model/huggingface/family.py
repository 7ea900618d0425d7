"""What a family is: how its config is read, which module it is; the two heads that most have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..embedding import Embedding
from ..head import Head
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import USUAL, Entries

Reader = Callable[[Entries, int | None], Transformer]

TASKS = {
    "ForCausalLM": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "translation",
    "ForImageClassification": "images",
}
"""Ends of classes' names -> what these are trained on."""


def _table(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


_KNOWN, _DEFAULTS = _table("families.json"), _table("defaults.json")


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
    usual: Mapping[str, Any]
    defaults: Mapping[str, Any]
    slip: bool

    @classmethod
    def of(cls, kind: str, read: Reader) -> Family:
        """What `families.json` and `defaults.json` say of a type."""
        row = _KNOWN[kind]
        module, like = row["module"], _KNOWN[row.get("like", kind)]
        task = row.get("task") or next(TASKS[end] for end in TASKS if module.endswith(end))
        ignored = like.get("ignored", [])
        names = ignored.split() if isinstance(ignored, str) else " ".join(ignored).split()
        usual = dict.fromkeys(names, ...) | like.get("usual", {})
        return cls(read, module, task, usual, _DEFAULTS.get(kind, {}), row.get("slip", False))

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


_PLAIN: Mapping[str, Any] = {}


def declared(
    read: Entries,
    seq_len: int | None,
    *,
    names: Mapping[str, str] | None = None,
    table: bool = True,
    length: int | None = None,
    variance: float | None = None,
    epsilon: float | None = None,
    embedding: Any = _PLAIN,
    head: Head | Mapping[str, Any] | None = _PLAIN,
    **fields: Any,
) -> Transformer:
    """What the entries say by their family's `NAMES`: matrices and tables of one variance, norms of
    one epsilon.

    Args:
        names: of "layers", "width" and "heads", where they are others.
        table: whether positions have one, so that a text can be no longer.
        length, variance, epsilon: where no entry says them.
        embedding: the family's own, or fields of plain tables.
        head: the family's own, fields of one that predicts the next token, or None: there is none.
        fields: what else the family has, or has otherwise.
    """
    variance = read.variance() if variance is None else variance
    epsilon = read.number(read.called("epsilon")) if epsilon is None else epsilon
    shape = {what: read.called(what) for what in ("layers", "width", "heads")} | dict(names or {})
    usual: dict[str, Any] = {
        "norm": "pre",
        "weights": Weights.normal(variance),
        "biases": Biases(),
        "norm_affine": True,
    }
    for field, what, of in (
        ("d_ff", "hidden", read),
        ("activation", "activation", read.activation),
        ("dropout", "dropout", read.number),
        ("attention_dropout", "attention_dropout", read.number),
    ):
        name = read.known(what)
        if name is not None and field not in fields:
            usual[field] = of(name)
    if length is None:
        length = read.length(read.called("length"), seq_len, table=table)
    if isinstance(embedding, Mapping):
        tables = {"vocab_size": read("vocab_size"), "token_variance": variance}
        if (name := read.known("embedding_dropout")) is not None:
            tables["dropout"] = read.number(name)
        embedding = Embedding(**(tables | dict(embedding)))
    if isinstance(head, Mapping):
        usual["causal"] = True
        head = Head(**tied_or(read, variance, False), loss="causal", **head)
    layers = read.layers(shape["layers"])
    d_model, heads = read(shape["width"]), read(shape["heads"])
    usual |= {"norm_epsilon": epsilon, "embedding": embedding, "head": head}
    return Transformer(layers, d_model, heads, length, **(usual | fields))


def tied_or(read: Entries, variance: float, default: Any = ...) -> dict[str, Any]:
    """Whether a head's matrix is the token table, else its variance."""
    tied = read.flag("tie_word_embeddings", default)
    return {"tied": tied, "weight_variance": None if tied else variance}


def masked_head(read: Entries, variance: float, activation: str) -> Head:
    """BERT's: a hidden layer with activation and norm, then the token table and a bias."""
    return Head(
        **tied_or(read, variance, True),
        norm=False,
        transform=activation,
        transform_variance=variance,
        transform_bias_variance=0.0,
        bias=True,
        loss="masked",
    )
