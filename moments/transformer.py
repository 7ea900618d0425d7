"""The declaration of a transformer: validated numbers that describe an architecture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .checks import (
    check_choice,
    check_count,
    check_fields,
    check_flag,
    check_in,
    frozen_layers,
)
from .embedding import Embedding
from .errors import domain_error
from .symbols import NONNEGATIVE, POSITIVE, PROBABILITY
from .weights import LayerWeights, Weights

FORMAT_VERSION = 1

NORM_PLACEMENTS = ("pre", "post", "none")
NORMALIZATIONS = ("layernorm",)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "identity")
LAYERNORM_SCALINGS = (False, True, "after-norm")

PerLayer = float | Sequence[float]


@dataclass(frozen=True)
class Transformer:
    """An architecture and its initialisation.

    Args:
        layers: number of layers N, each an attention block and a feed-forward block.
        d_model: width of the residual stream.
        heads: attention heads.
        seq_len: tokens per sequence.
        d_ff: width of the feed-forward hidden layer; None: 4 * d_model.
        norm: where normalisation sits: "pre", "post" or "none".
        normalization: "layernorm".
        activation: "relu", "gelu" (erf form), "gelu_tanh", or "identity" for linear networks.
        dropout: probability of dropping an entry of each block's output.
        attention_dropout: the same for attention weights; None: as `dropout`.
        causal: whether a token sees only itself and earlier ones.
        skip_scale: multiplies the stream at every residual addition; one number or one per layer.
        branch_scale: multiplies a block's output there; one number or one per layer.
        layernorm_scaling: True or "after-norm": layer l's normalised output times 1/sqrt(l).
        weights: variances of the weight matrices; None: Weights.xavier(d_model, heads, d_ff).
        embedding: what feeds layer 1; None: the moments are given to `predict`.
        d_head: width of a head; None: d_model / heads.
        temperature: divides the attention logits; one number or one per layer.
        norm_epsilon: added to the variance under the normalisation's square root.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    layers: int
    d_model: int
    heads: int
    seq_len: int
    d_ff: int | None = None
    norm: str = "pre"
    normalization: str = "layernorm"
    activation: str = "relu"
    dropout: float = 0.0
    attention_dropout: float | None = None
    causal: bool = False
    skip_scale: PerLayer = 1.0
    branch_scale: PerLayer = 1.0
    layernorm_scaling: bool | str = False
    weights: Weights | None = None
    embedding: Embedding | None = None
    d_head: int | None = field(default=None, kw_only=True)
    temperature: PerLayer = field(default=1.0, kw_only=True)
    norm_epsilon: float = field(default=0.0, kw_only=True)
    _defaulted: frozenset[str] = field(
        default=frozenset(), init=False, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        check_count("layers", self.layers)
        check_count("d_model", self.d_model, least=2)
        check_count("heads", self.heads)
        check_count("seq_len", self.seq_len, least=2)
        check_choice("norm", self.norm, NORM_PLACEMENTS)
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("layernorm_scaling", self.layernorm_scaling, LAYERNORM_SCALINGS)
        check_flag("causal", self.causal)
        check_in("dropout", self.dropout, PROBABILITY, "pass 0.1 for ten percent")
        check_in("norm_epsilon", self.norm_epsilon, NONNEGATIVE)
        self._resolve_defaults()
        if self.norm == "none" and self.layernorm_scaling:
            raise domain_error(
                "layernorm_scaling", self.layernorm_scaling, "False where norm is 'none'"
            )
        for name in ("skip_scale", "branch_scale", "temperature"):
            self._set(name, self._per_layer(name, getattr(self, name)))
        assert self.weights is not None
        self.weights.check_layers(self.layers)

    def _resolve_defaults(self) -> None:
        defaulted = {
            name
            for name in ("d_ff", "attention_dropout", "weights", "d_head")
            if getattr(self, name) is None
        }
        self._set("_defaulted", frozenset(defaulted))
        if self.d_ff is None:
            self._set("d_ff", 4 * self.d_model)
        check_count("d_ff", self.d_ff)
        if self.d_head is None:
            if self.d_model % self.heads:
                raise domain_error(
                    "heads",
                    self.heads,
                    f"a divisor of d_model = {self.d_model}",
                    "change one of them, or pass d_head",
                )
            self._set("d_head", self.d_model // self.heads)
        check_count("d_head", self.d_head)
        if self.attention_dropout is None:
            self._set("attention_dropout", self.dropout)
        check_in("attention_dropout", self.attention_dropout, PROBABILITY)
        if self.weights is None:
            self._set("weights", Weights.xavier(self.d_model, self.heads, self.d_ff))
        if not isinstance(self.weights, Weights):
            raise domain_error("weights", self.weights, "a moments.Weights, or None for Xavier")
        if self.embedding is not None and not isinstance(self.embedding, Embedding):
            raise domain_error("embedding", self.embedding, "a moments.Embedding, or None")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _per_layer(self, name: str, value: PerLayer) -> PerLayer:
        check_in(name, value, POSITIVE, "scales multiply amplitudes")
        entries = frozen_layers(name, value)
        if isinstance(entries, tuple) and len(entries) != self.layers:
            raise domain_error(
                name, f"{len(entries)} numbers", f"one number, or one per layer ({self.layers})"
            )
        return entries

    # --- what each layer has -------------------------------------------------------------------

    @property
    def skip_scales(self) -> np.ndarray:
        """lambda of every layer, shape (N,)."""
        return np.broadcast_to(np.asarray(self.skip_scale, dtype=float), self.layers).copy()

    @property
    def branch_scales(self) -> np.ndarray:
        """beta of every layer, shape (N,)."""
        return np.broadcast_to(np.asarray(self.branch_scale, dtype=float), self.layers).copy()

    @property
    def temperatures(self) -> np.ndarray:
        """Divisor of the attention logits in every layer, shape (N,)."""
        return np.broadcast_to(np.asarray(self.temperature, dtype=float), self.layers).copy()

    @property
    def norm_scales(self) -> np.ndarray:
        """Multiplier of the normalised output in every layer, shape (N,)."""
        if not self.layernorm_scaling:
            return np.ones(self.layers)
        return np.array([1 / math.sqrt(n) for n in range(1, self.layers + 1)])

    def layer_weights(self, layer: int) -> LayerWeights:
        """Weight variances of layer `layer`, counted from 1."""
        assert self.weights is not None
        return self.weights.layer(layer)

    # --- copies and files ----------------------------------------------------------------------

    def replace(self, **changes: Any) -> Transformer:
        """A changed copy, validated again; what was left to a default follows the change.

        Raises:
            DomainError: an unknown field, or a value outside what is allowed.
        """
        names = {f.name for f in dataclasses.fields(self) if f.init}
        for name in changes:
            if name not in names:
                raise domain_error("field", name, f"one of {', '.join(sorted(names))}")
        current = {name: None if name in self._defaulted else getattr(self, name) for name in names}
        return Transformer(**{**current, **changes})

    def with_scheme(self, name: str, **options: Any) -> Transformer:
        """The model with weights, scales and placement as a published scheme sets them.

        Args:
            name: one of the names in `moments.schemes()`.
            options: the scheme's own, with its authors' defaults.

        Raises:
            DomainError: no such scheme or option, or an option outside what is allowed.
        """
        from .scheme import apply

        return apply(self, name, **options)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary with a format version; `from_dict` reads it back."""
        data: dict[str, Any] = {"format": FORMAT_VERSION}
        for f in dataclasses.fields(self):
            if not f.init:
                continue
            value = None if f.name in self._defaulted else getattr(self, f.name)
            if isinstance(value, Weights | Embedding):
                value = value.to_dict()
            data[f.name] = list(value) if isinstance(value, tuple) else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transformer:
        """Read what `to_dict` wrote.

        Raises:
            DomainError: another format version, or an unknown field.
        """
        fields = dict(data)
        version = fields.pop("format", None)
        if version != FORMAT_VERSION:
            raise domain_error("format", version, f"{FORMAT_VERSION}")
        check_fields("model", fields, dataclasses.fields(cls))
        if fields.get("weights") is not None:
            fields["weights"] = Weights.from_dict(fields["weights"])
        if fields.get("embedding") is not None:
            fields["embedding"] = Embedding.from_dict(fields["embedding"])
        return cls(**fields)

    def _summary(self) -> list[tuple[str, str]]:
        mask = "causal" if self.causal else "full attention"
        rows = [
            ("shape", f"{self.layers} layers, d_model {self.d_model}, d_ff {self.d_ff}"),
            ("attention", f"{self.heads} heads of {self.d_head}, {self.seq_len} tokens, {mask}"),
            ("normalisation", f"{self.normalization}, {self.norm}"),
            ("activation", self.activation),
            ("dropout", f"{self.dropout:g} on blocks, {self.attention_dropout:g} on attention"),
            ("scales", f"skip {_range(self.skip_scales)}, branch {_range(self.branch_scales)}"),
            ("weights", str(self.weights)),
        ]
        if self.layernorm_scaling:
            rows.append(("layernorm scaling", "1/sqrt(layer) after the norm"))
        if self.embedding is not None:
            rows.append(("embedding", str(self.embedding)))
        return rows

    def __str__(self) -> str:
        rows = self._summary()
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Transformer", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>"
            for n, t in self._summary()
        )
        return f"<table><caption>Transformer</caption>{cells}</table>"


def _range(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
