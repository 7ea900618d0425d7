"""The declaration of a transformer: validated numbers that describe an architecture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import domain_error
from ..files import plain
from ..formulas.checks import check_count
from .block import PLACES, Block, block_from_dict
from .declaration import PARTS, check
from .experts import SHARED
from .fields import check_fields
from .mixers import MIXER
from .per_layer import PerLayerEmbedding
from .positions import RelativeBias, Rotary
from .streams import AltUp, HyperConnections, Laurel
from .summary import html, text
from .values import Values
from .weights import Biases, LayerWeights, Weights

FORMAT_VERSION = 1

PerLayer = float | Sequence[float]
PerBlock = float | Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Transformer:
    """An architecture and its initialisation.

    Args:
        layers: number of layers N, each an attention block and a feed-forward block.
        d_model: width of the residual stream.
        heads: attention heads.
        seq_len: tokens per sequence. With 1 token there are no pairs, and correlations are 0; the
            default target of a causal head is then a random token by Zipf's law.
        d_ff: width of the feed-forward hidden layer; None: 4 * d_model.
        norm: placement of normalisation. "pre", "post" or "none"; "sandwich" before and after every
            block (also Peri-LN's layers); "output" only at every block's output (OLMo 2); "mix":
            the first `post_layers` layers Post-LN, the others Pre-LN; "hybrid": query, key and
            value normalised, and Post-LN around the feed-forward block (HybridNorm); "b2t": Post-LN
            with a connection from each layer's input to its last normalisation.
        normalization: "layernorm", "rmsnorm" or "dyt" (tanh(dyt_alpha x) instead of a norm; not
            with norm="hybrid").
        activation: "relu", "gelu" (erf form), "gelu_tanh", "silu", "identity", ...
            (see `moments.formulas.activation.activation_names()`); "swiglu", "geglu",
            "geglu_tanh" and "reglu" are the gated forms.
        dropout: probability of dropping an entry of each block's output.
        attention_dropout: the same for attention weights; None: as `dropout`.
        causal: whether a token attends only to itself and earlier tokens.
        skip_scale: factor of the stream in every residual sum; one number, one per layer, or a pair
            (attention, feed-forward) per layer.
        branch_scale: factor of a block's output in the residual sum; likewise.
        layer_scale: whether `branch_scale` is a learned gain per feature (LayerScale), with a
            gradient.
        layernorm_scaling: LayerNorm Scaling, 1/sqrt(l) in layer l. True or "after-norm": on the
            normalised output; "before-norm": on the normalisation's input; "after-block": on the
            block's output; "after-residual": on the sum; "attention-only" and "ffn-only": after the
            norm of that block alone.
        weights: variances of the weight matrices; None: Weights.xavier of these widths.
        embedding: the embedding of layer 1's input; None: `predict` takes the input's moments.
        head: the head and loss; None: `predict` takes the moments of the output's gradient.
        d_head: width of a head; None: d_model / heads.
        kv_heads: heads of keys and values, each shared by heads / kv_heads queries; None: heads.
        temperature: divisor of the attention logits, besides sqrt(d_head); one, or one per layer.
        norm_epsilon: added to the variance under the normalisation's square root.
        norm_affine: whether norms have learnable gains (and biases), which start at `norm_gain` and
            0, and whose gradients are predicted.
        norm_bias: whether affine LayerNorms have biases.
        norm_gain: root mean square of the block norms' gain; one number, one per layer, or a pair
            (attention, feed-forward) per layer.
        norm_groups: number of groups of features that are normalised separately (Group-LN).
        dyt_alpha: alpha of "dyt".
        post_layers: number of Post-LN layers for norm="mix".
        gated: whether the feed-forward block multiplies two maps, activation(x W_gate) * (x W_in).
        activation_dropout: dropout on the feed-forward hidden layer.
        ffn_dropout: `dropout` of the feed-forward block; None: as `dropout`.
        identity_attention: whether every token attends only to itself, without logits
            (Value-SkipInit at initialisation).
        biases: variances of the bias vectors; None: there are none.
        parallel: whether attention and feed-forward block read the same stream and share one sum.
        parallel_norms: 1 if parallel blocks share a norm, 2 if each has its own.
        rotary: rotary positions of queries and keys; one for all layers, or one or None per layer.
        alibi: whether logits have ALiBi's linear penalties, or a factor on their slopes (Falcon:
            1/sqrt(d_head)).
        relative_bias: T5's learned biases by relative position.
        qk_norm: "rmsnorm" or "layernorm" of every head's queries and keys; "rmsnorm-all" or
            "layernorm-all": of all heads together (OLMo 2); None: neither.
        logit_softcap: c in c tanh(logit/c); None: no cap.
        attention_sink: variance over heads of the learned logit of a key with value 0 (GPT-OSS; 0:
            logits start at 0); one value or one per layer; None: no sink.
        attention_gate: "elementwise": attention's concatenated heads times sigmoid(x W), one factor
            per feature (Qwen3-Next); "headwise": one factor per head; None: no gate.
        window: number of tokens to which a token attends backward (and forward, unless causal),
            itself included; None: all; one value or one per layer.
        mixer: a block that replaces attention (`moments.model.block`): one for all layers, or one
            or None per layer, None for the attention of the fields above.
        ffn: a block that replaces the feed-forward block; likewise.
        encoder: the encoder whose output cross-attention reads; None: a single stack.
        streams: several residual streams; None: one. Requires norm="pre" or "sandwich". Points of
            the stream are, with `moments.HyperConnections`, the mean of the streams; with
            `moments.AltUp` the first, but the mean behind the last layer, and gradients those of
            what a layer adds to all of them.
        input_mix: (r, s), or such a pair per layer: the layer's input is r x + s x_0, x_0 the input
            of layer 1 (nanochat); None: x. Requires norm="pre" or "sandwich" and skip_scale 1.
        skips: per layer None, or (n, w): w times the output of layer n (0: the input of layer 1) is
            added to the layer's input, before `input_mix` (U-net: (layers + 1 - l, 1) in the upper
            half); None: none. Requirements as for `input_mix`.
        values: sums of the layer's own values, the first layer's and rows of a table
            (`moments.Values`); one for all layers, or one or None per layer.
        per_layer_embedding: a block in every layer that reads the tokens again (Gemma 4 E2B).
        laurel: a learned addition to attention's residual sum (`moments.Laurel`); None: none.
        shared_layers: whether all layers share their weights (ALBERT); requires Post-LN, no mask
            and no optional parts.
        name: a name for plots and reports, which equality of models ignores.

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
    skip_scale: PerBlock = 1.0
    branch_scale: PerBlock = 1.0
    layernorm_scaling: bool | str = False
    weights: Weights | None = None
    embedding: Any = None
    head: Any = None
    d_head: int | None = field(default=None, kw_only=True)
    kv_heads: int | None = field(default=None, kw_only=True)
    temperature: PerLayer = field(default=1.0, kw_only=True)
    norm_epsilon: float = field(default=0.0, kw_only=True)
    norm_affine: bool = field(default=False, kw_only=True)
    norm_bias: bool = field(default=True, kw_only=True)
    norm_gain: PerBlock = field(default=1.0, kw_only=True)
    norm_groups: int = field(default=1, kw_only=True)
    layer_scale: bool = field(default=False, kw_only=True)
    dyt_alpha: float = field(default=0.5, kw_only=True)
    post_layers: int = field(default=0, kw_only=True)
    gated: bool = field(default=False, kw_only=True)
    activation_dropout: float = field(default=0.0, kw_only=True)
    ffn_dropout: float | None = field(default=None, kw_only=True)
    identity_attention: bool = field(default=False, kw_only=True)
    biases: Biases | None = field(default=None, kw_only=True)
    parallel: bool = field(default=False, kw_only=True)
    parallel_norms: int = field(default=1, kw_only=True)
    rotary: Rotary | Sequence[Rotary | None] | None = field(default=None, kw_only=True)
    alibi: bool | float = field(default=False, kw_only=True)
    relative_bias: RelativeBias | None = field(default=None, kw_only=True)
    qk_norm: str | None = field(default=None, kw_only=True)
    logit_softcap: float | None = field(default=None, kw_only=True)
    attention_sink: float | Sequence[float | None] | None = field(default=None, kw_only=True)
    attention_gate: str | None = field(default=None, kw_only=True)
    window: int | Sequence[int | None] | None = field(default=None, kw_only=True)
    mixer: Block | Sequence[Block | None] | None = field(default=None, kw_only=True)
    ffn: Block | Sequence[Block | None] | None = field(default=None, kw_only=True)
    encoder: Transformer | None = field(default=None, kw_only=True)
    shared_layers: bool = field(default=False, kw_only=True)
    streams: HyperConnections | AltUp | None = field(default=None, kw_only=True)
    input_mix: Sequence[float] | Sequence[Sequence[float]] | None = field(
        default=None, kw_only=True
    )
    skips: Sequence[tuple[int, float] | None] | None = field(default=None, kw_only=True)
    values: Values | Sequence[Values | None] | None = field(default=None, kw_only=True)
    per_layer_embedding: PerLayerEmbedding | None = field(default=None, kw_only=True)
    laurel: Laurel | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, repr=False, compare=False, kw_only=True)
    _defaulted: frozenset[str] = field(
        default=frozenset(), init=False, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        check(self)

    # --- values per layer ----------------------------------------------------------------------

    @property
    def skip_scales(self) -> np.ndarray:
        """lambda of every layer, shape (N,); (N, 2) if attention and feed-forward differ."""
        return self._each("skip_scale")

    @property
    def branch_scales(self) -> np.ndarray:
        """beta of every layer, shape (N,); (N, 2) if attention and feed-forward differ."""
        return self._each("branch_scale")

    @property
    def temperatures(self) -> np.ndarray:
        """Divisor of the attention logits in every layer, shape (N,)."""
        return self._each("temperature")

    @property
    def norm_gains(self) -> np.ndarray:
        """Root mean square of the norms' gains, (N, 2): attention and feed-forward block."""
        return self.by_block("norm_gain")

    @property
    def norm_scales(self) -> np.ndarray:
        """LayerNorm Scaling's factor of every layer, shape (N,); 1 without it."""
        if not self.layernorm_scaling:
            return np.ones(self.layers)
        return np.array([1 / math.sqrt(n) for n in range(1, self.layers + 1)])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of attention in every layer."""
        if isinstance(self.window, Sequence):
            return tuple(self.window)
        return (self.window,) * self.layers

    @property
    def attention_sinks(self) -> tuple[float | None, ...]:
        """Variance of the sinks' logits in every layer; None for a layer without sinks."""
        if isinstance(self.attention_sink, Sequence):
            return tuple(self.attention_sink)
        return (self.attention_sink,) * self.layers

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """Rotary positions of every layer."""
        if isinstance(self.rotary, Sequence):
            return tuple(self.rotary)
        return (self.rotary,) * self.layers

    @property
    def value_sources(self) -> tuple[Values | None, ...]:
        """Sources of values in every layer; None: only the layer's own."""
        if isinstance(self.values, Sequence):
            return tuple(self.values)
        return (self.values,) * self.layers

    @property
    def read_again(self) -> frozenset[int]:
        """Layers whose keys and values are also read by later layers."""
        sources = (getattr(mixer, "keys_of", None) for mixer in self.mixers)
        return frozenset(layer for layer in sources if layer is not None)

    @property
    def reads_first(self) -> bool:
        """Whether later layers read the first layer's values."""
        return any(values is not None and values.first for values in self.value_sources[1:])

    @property
    def additions(self) -> tuple[tuple[float, dict[int, float]], ...]:
        """For every layer, the factor of its input, and the factors of added earlier outputs, by
        layer (0: the input of layer 1)."""
        mix = (1.0, 0.0) if self.input_mix is None else self.input_mix
        pairs = np.broadcast_to(mix, (self.layers, 2)).tolist()
        skips = (None,) * self.layers if self.skips is None else self.skips
        result = []
        for pair, skip in zip(pairs, skips, strict=True):
            keep, added = pair[0], {0: pair[1]} if pair[1] else {}
            if skip is not None:
                added[skip[0]] = added.get(skip[0], 0.0) + keep * skip[1]
            result.append((keep, added))
        return tuple(result)

    @property
    def adds_again(self) -> bool:
        """Whether layers add outputs of earlier layers or the input of layer 1."""
        return self.input_mix is not None or self.skips is not None

    @property
    def mixers(self) -> tuple[Block | None, ...]:
        """The block that replaces attention in every layer; None: attention."""
        return self._blocks("mixer")

    @property
    def ffns(self) -> tuple[Block | None, ...]:
        """The block that replaces the feed-forward block in every layer; None: that block."""
        return self._blocks("ffn")

    def _blocks(self, name: str) -> tuple[Block | None, ...]:
        value = getattr(self, name)
        return tuple(value) if isinstance(value, Sequence) else (value,) * self.layers

    @property
    def placements(self) -> tuple[str, ...]:
        """Placement of norms in every layer, "mix" resolved into "post" and "pre"."""
        if self.norm != "mix":
            return (self.norm,) * self.layers
        return ("post",) * self.post_layers + ("pre",) * (self.layers - self.post_layers)

    def by_block(self, name: str) -> np.ndarray:
        """A scale by layer and block, (N, 2): attention (and cross-attention), feed-forward."""
        values = np.asarray(getattr(self, name), dtype=float)
        return np.broadcast_to(
            values.reshape(-1, 1) if values.ndim < 2 else values, (self.layers, 2)
        )

    def _each(self, name: str) -> np.ndarray:
        values = np.asarray(getattr(self, name), dtype=float)
        return values.copy() if values.ndim else np.full(self.layers, float(values))

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of every matrix of any layer."""
        layers = {pair: n for n, pair in enumerate(zip(self.mixers, self.ffns, strict=True), 1)}
        return {k: v for n in sorted(layers.values()) for k, v in self.shapes_of(n).items()}

    def shapes_of(self, layer: int) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of every matrix of layer `layer`, counted from 1."""
        mixer, ffn = self.shapes_by_place(layer)
        values = self.value_sources[layer - 1]
        if values is not None and values.gate is not None:
            mixer = mixer | {"value_gate": (values.gate, self.kv_heads or self.heads)}
        if self.per_layer_embedding is not None:
            ffn = ffn | self.per_layer_embedding.shapes(self.d_model)
        if self.laurel is not None:
            mixer = mixer | self.laurel.shapes(self.d_model)
        if isinstance(self.streams, AltUp):
            ffn = ffn | self.streams.shapes(self, layer)
        return mixer | ffn | self._cross_shapes()

    def shapes_by_place(self, layer: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes of the matrices of attention and of the feed-forward block, or of the blocks that
        replace them."""
        mixer, ffn = self.mixers[layer - 1], self.ffns[layer - 1]
        return (
            self.attention_shapes() if mixer is None else mixer.shapes(self),
            self.dense_shapes(self.d_ff or 0) if ffn is None else ffn.shapes(self),
        )

    def dense_shapes(self, d_ff: int) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of a feed-forward block of width `d_ff`."""
        shapes = {"ffn_in": (self.d_model, d_ff), "ffn_out": (d_ff, self.d_model)}
        return shapes | ({"gate": (self.d_model, d_ff)} if self.gated else {})

    def attention_shapes(
        self, d_head: int | None = None, kv_heads: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """Shapes of attention's matrices; None for an argument: the field."""
        d_model, d_head = self.d_model, d_head or self.d_head or 0
        heads, shared = self.heads * d_head, (kv_heads or self.kv_heads or self.heads) * d_head
        attention = {
            "query": (d_model, heads),
            "key": (d_model, shared),
            "value": (d_model, shared),
            "output": (heads, d_model),
        }
        if self.attention_gate is not None:
            wide = self.attention_gate == "elementwise"
            attention["attention_gate"] = (d_model, heads if wide else self.heads)
        return attention

    def _cross_shapes(self) -> dict[str, tuple[int, int]]:
        if self.encoder is None:
            return {}
        d_model, d_head = self.d_model, self.d_head or 0
        heads, shared = self.heads * d_head, (self.kv_heads or self.heads) * d_head
        return {
            "cross_query": (d_model, heads),
            "cross_key": (self.encoder.d_model, shared),
            "cross_value": (self.encoder.d_model, shared),
            "cross_output": (heads, d_model),
        }

    def variances_of(self, layer: int) -> dict[str, float]:
        """Weight variances of layer `layer`, counted from 1, with those of all its blocks."""
        blocks = self.mixers[layer - 1], self.ffns[layer - 1]
        variances: dict[str, float] = dataclasses.asdict(self.layer_weights(layer))
        if (values := self.value_sources[layer - 1]) is not None:
            variances["value_gate"] = values.gate_variance
        if self.per_layer_embedding is not None:
            variances |= self.per_layer_embedding.variances
        if self.laurel is not None:
            variances |= self.laurel.variances
        if isinstance(self.streams, AltUp):
            variances |= self.streams.variances
        for block in blocks:
            variances |= {} if block is None else block.variances(self)
        shared = {name for name in self.shapes_of(layer) if name not in variances}
        like = {name: name.removeprefix(SHARED).removeprefix(MIXER) for name in shared}
        return variances | {name: variances[like[name]] for name in shared}

    def layer_weights(self, layer: int) -> LayerWeights:
        """Weight variances of layer `layer`, counted from 1."""
        assert self.weights is not None
        return self.weights.layer(layer)

    # --- copies and files ----------------------------------------------------------------------

    def replace(self, **changes: Any) -> Transformer:
        """A changed copy, validated again; defaults are resolved anew.

        With another number of `layers`, lists per layer are continued by their pattern: some first
        layers, and then a group of layers that is repeated (at least twice).

        Raises:
            DomainError: an unknown field, or a value outside what is allowed.
        """
        names = {f.name for f in dataclasses.fields(self) if f.init}
        for name in changes:
            if name not in names:
                raise domain_error("field", name, f"one of {', '.join(sorted(names))}")
        current = {name: None if name in self._defaulted else getattr(self, name) for name in names}
        if (layers := changes.get("layers", self.layers)) != self.layers:
            for name in (*PLACES, "window", "rotary", "attention_sink", "values"):
                if isinstance(value := current[name], tuple) and name not in changes:
                    current[name] = _continued(name, value, layers)
        return Transformer(**{**current, **changes})

    def with_scheme(self, name: str, **options: Any) -> Transformer:
        """The model with weights, scales and placement of a published scheme.

        Args:
            name: one of the names in `moments.schemes()`.
            options: options of the scheme, by default its authors' values.

        Raises:
            DomainError: no such scheme or option, or a value outside its domain.
        """
        from ..scheme import apply

        return apply(self, name, **options)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary with a format version; `from_dict` reads it back."""
        data: dict[str, Any] = {"format": FORMAT_VERSION}
        for f in dataclasses.fields(self):
            if not f.init or (f.name == "name" and self.name is None):
                continue
            value: Any = None if f.name in self._defaulted else getattr(self, f.name)
            if f.name in ("rotary", "values", *PLACES) and isinstance(value, tuple):
                data[f.name] = [None if part is None else part.to_dict() for part in value]
                continue
            data[f.name] = value.to_dict() if hasattr(value, "to_dict") else plain(value)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transformer:
        """Read a dictionary of `to_dict`.

        Raises:
            DomainError: another format version, or an unknown field.
        """
        if not isinstance(data, Mapping):
            raise domain_error("model", data, "a JSON object of its fields")
        fields = dict(data)
        version = fields.pop("format", None)
        if version != FORMAT_VERSION:
            raise domain_error("format", version, f"{FORMAT_VERSION}")
        check_fields("model", fields, cls)
        for name in PLACES:
            fields[name] = block_from_dict(name, fields.get(name))
        for name, kinds in (PARTS | {"encoder": (cls,)}).items():
            part = fields.get(name)
            if name in ("rotary", "values") and isinstance(part, list | tuple):
                (kind,) = kinds
                fields[name] = [None if one is None else kind.from_dict(one) for one in part]
            elif part is not None:
                fields[name] = _kind_of(part, kinds).from_dict(part)
        return cls(**fields)

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html(self)


def _continued(name: str, entries: tuple[Any, ...], layers: Any) -> tuple[Any, ...]:
    """A list per layer continued to `layers` entries by its shortest pattern: `first` entries, and
    then a repeated group.

    Raises:
        DomainError: there is no pattern.
    """
    check_count("layers", layers)
    count = len(entries)
    patterns = (
        (first, length - first)
        for length in range(1, count + 1)
        for first in range(length)
        if count - first >= 2 * (length - first)
        and all(entries[n] == entries[n - (length - first)] for n in range(length, count))
    )
    pattern = next(patterns, None)
    if pattern is None:
        remedy = f"no pattern in it says what {layers} layers have: pass {name}=[...] along"
        raise domain_error(name, f"{count} entries", f"one per layer ({layers})", remedy)
    first, group = pattern
    return tuple(
        entries[n] if n < count else entries[first + (n - first) % group] for n in range(layers)
    )


def _kind_of(part: Any, kinds: Sequence[Any]) -> Any:
    """The declaration that has most fields of a stored part."""
    names = set(part) if isinstance(part, Mapping) else set()
    return max(kinds, key=lambda kind: len(names & {f.name for f in dataclasses.fields(kind)}))
