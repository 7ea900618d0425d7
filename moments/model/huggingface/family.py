"""A model family: its config reader, its class in transformers, and fields most families share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
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
"""Suffix of a transformers class name -> training task."""


def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return table


SECTIONS, _DEFAULTS = _table("families.json"), _table("defaults.json")
_ROWS = {
    k: row for files in SECTIONS.values() for rows in files.values() for k, row in rows.items()
}


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config reader and its class in transformers.

    Args:
        kind: the `model_type`.
        file: the module of this package whose `READERS` has its reader.
        module: name of the transformers class, with its head.
        task: training task: "causal", "masked", "translation", "images" or "sound"; "text" for an
            encoder of text without a task.
        usual: unmodelled entries, with the value at which they have no effect (...: any value).
        defaults: values of missing entries, from its config class (`defaults.json`).
        slip: whether the class in transformers initialises otherwise than the original authors;
            a config is read as the class initialises.
    """

    kind: str
    file: str
    module: str
    task: str
    usual: Mapping[str, Any]
    defaults: Mapping[str, Any]
    slip: bool

    @classmethod
    def of(cls, kind: str, file: str) -> Family:
        """The family of a type, from `families.json` and `defaults.json`."""
        row = _ROWS[kind]
        module, like = row["module"], _ROWS[row.get("like", kind)]
        task = row.get("task") or next(TASKS[end] for end in TASKS if module.endswith(end))
        ignored = like.get("ignored", [])
        names = ignored.split() if isinstance(ignored, str) else " ".join(ignored).split()
        usual = dict.fromkeys(names, ...) | like.get("usual", {})
        slip = row.get("slip", False)
        return cls(kind, file, module, task, usual, _DEFAULTS.get(kind, {}), slip)

    def read(self, entries: Entries, seq_len: int | None) -> Transformer:
        """The declaration of a config's entries."""
        reader: Reader = import_module(f".{self.file}", __package__).READERS[self.kind]
        return reader(entries, seq_len)

    def declare(
        self, given: Mapping[str, Any], seq_len: int | None
    ) -> tuple[Transformer, list[str]]:
        """The declaration of a config, and a note for each unmodelled feature."""
        entries = Entries(given, str(given.get("model_type")), self.defaults)
        model = self.read(entries, seq_len)
        entries.finish(self.usual)
        return model, entries.notes

    def entries(self, given: Mapping[str, Any]) -> frozenset[str]:
        """Names of the entries that describe the architecture: those read, those with a default,
        and those known to have no effect at one value.

        Raises:
            DomainError: an entry that the reader refuses.
        """
        reader = Entries(given, str(given.get("model_type")), self.defaults)
        self.read(reader, None)
        not_architecture = {"model_type", "quantization_config"}
        return frozenset(reader.read.union(self.defaults, self.usual, USUAL)) - not_architecture


# --- shared by most families ----------------------------------------------------------------------


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
    """Declare a model from the entries listed in `NAMES`, with one variance for all matrices and
    tables and one epsilon for all norms.

    Args:
        names: entry names of "layers", "width" and "heads" that differ from the usual ones.
        table: whether positions index a table, which limits the sequence length.
        length, variance, epsilon: values to use instead of the entries.
        embedding: an embedding, or fields that change the default one.
        head: a head, fields of one that predicts the next token, or None for no head.
        fields: further fields of `Transformer`; they override the usual ones.
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
    for field, quantity, reader in (
        ("d_ff", "hidden", read),
        ("activation", "activation", read.activation),
        ("dropout", "dropout", read.number),
        ("attention_dropout", "attention_dropout", read.number),
    ):
        name = read.known(quantity)
        if name is not None and field not in fields:
            usual[field] = reader(name)
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
    """Fields of a head whose matrix is the token table, or has its own `variance`."""
    tied = read.flag("tie_word_embeddings", default)
    return {"tied": tied, "weight_variance": None if tied else variance}


def masked_head(read: Entries, variance: float, activation: str) -> Head:
    """BERT's head: a hidden layer with activation and norm, then the token table and a bias."""
    return Head(
        **tied_or(read, variance, True),
        norm=False,
        transform=activation,
        transform_variance=variance,
        transform_bias_variance=0.0,
        bias=True,
        loss="masked",
    )
