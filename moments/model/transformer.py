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
from .streams import HyperConnections
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
        seq_len: tokens per sequence. Of 1 there are no pairs and correlations are 0; the target
            of a causal head, beyond the sequence, is any token by Zipf's law unless it is given.
        d_ff: width of the feed-forward hidden layer; None: 4 * d_model.
        norm: where normalisation sits. "pre", "post" or "none"; "sandwich" before and after every
            block (Peri-LN's layers too); "output" at every block's output alone (OLMo 2); "mix":
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
        causal: whether a token sees only itself and earlier ones.
        skip_scale: multiplies the stream at every residual addition; one number, one per layer, or
            a pair (attention, feed-forward) per layer.
        branch_scale: multiplies a block's output there; likewise.
        layer_scale: whether `branch_scale` is a gain per feature that is learned (LayerScale) and
            receives a gradient.
        layernorm_scaling: LayerNorm Scaling, 1/sqrt(l) in layer l. True or "after-norm": on the
            normalised output; "before-norm": on the normalisation's input; "after-block": on the
            block's output; "after-residual": on the sum; "attention-only" and "ffn-only": after the
            norm of that block alone.
        weights: variances of the weight matrices; None: Weights.xavier of these widths.
        embedding: what feeds layer 1; None: the moments are given to `predict`.
        head: what follows the last layer, down to the loss; None: its gradient is given.
        d_head: width of a head; None: d_model / heads.
        kv_heads: heads of keys and values, each shared by heads / kv_heads queries; None: heads.
        temperature: divides the attention logits, besides sqrt(d_head); one, or one per layer.
        norm_epsilon: added to the variance under the normalisation's square root.
        norm_affine: whether norms have learnable gains (and biases); they start at `norm_gain` and
            0, and their gradients are predicted.
        norm_bias: whether those of LayerNorm include biases.
        norm_gain: root mean square of the block norms' gain; one number, one per layer, or a pair
            (attention, feed-forward) per layer.
        norm_groups: features are normalised in so many groups (Group-LN).
        dyt_alpha: of "dyt".
        post_layers: layers of norm="mix" that are Post-LN.
        gated: whether the feed-forward block multiplies two maps, activation(x W_gate) * (x W_in).
        activation_dropout: dropout on the feed-forward hidden layer.
        ffn_dropout: `dropout` of the feed-forward block where it is another; None: the same.
        identity_attention: whether every token attends to itself alone and no logits are formed
            (where Value-SkipInit starts).
        biases: variances of the bias vectors; None: there are none.
        parallel: whether attention and feed-forward block read the same stream and share one sum.
        parallel_norms: 1 where they then share a norm, 2 where each has its own.
        rotary: rotary positions of queries and keys; one for all layers, or per layer one or None.
        alibi: whether logits have ALiBi's linear penalties; a number multiplies their slopes
            (Falcon: 1/sqrt(d_head)).
        relative_bias: T5's learned biases by relative position.
        qk_norm: "rmsnorm" or "layernorm" of every head's queries and keys; "rmsnorm-all" or
            "layernorm-all": of all heads' together (OLMo 2); None: neither.
        logit_softcap: c in c tanh(logit/c); None: no cap.
        attention_sink: variance over heads of a logit that every head has for a key of value 0, a
            parameter (GPT-OSS; 0: it starts at logit 0); one value or one per layer; None: none.
        attention_gate: "elementwise": attention's concatenated heads times sigmoid(x W), a number
            for every feature (Qwen3-Next); "headwise": one for every head; None: no gate.
        window: how many tokens back attention reaches (and ahead, unless causal), itself included;
            None: all; one value or one per layer.
        mixer: a block in attention's place (`moments.model.block`): one for all layers, or one per
            layer, None where the fields above say how attention is.
        ffn: a block in the feed-forward block's place; likewise.
        encoder: the model whose output a decoder's cross-attention reads; None: there is none.
        streams: several residual streams (hyper-connections), whose mean is what every point of the
            stream is of; None: one. Of norm="pre" or "sandwich".
        input_mix: (r, s), or such a pair per layer: r x + s x_0 enters a layer, x_0 being what
            enters layer 1 (nanochat); None: x. Of norm="pre" or "sandwich" and skip_scale 1.
        skips: per layer None, or (n, w): w times what left layer n (0: what enters layer 1) is
            added to what enters this one, before `input_mix` (U-net: (layers + 1 - l, 1) in the
            upper half); None: nothing. Of models as with `input_mix`.
        values: what attention's values are a sum of: of the layer's own, the first layer's and rows
            of a table (`moments.Values`); one for all layers, or one or None per layer.
        per_layer_embedding: a block in every layer that reads its tokens anew (Gemma 4 E2B).
        shared_layers: whether all layers are one layer's weights used again (ALBERT): of Post-LN
            without a mask, and of the plain blocks.
        name: what pictures and reports call it; no part of what it is, so that equal models may
            differ in it.

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
    streams: HyperConnections | None = field(default=None, kw_only=True)
    input_mix: Sequence[float] | Sequence[Sequence[float]] | None = field(
        default=None, kw_only=True
    )
    skips: Sequence[tuple[int, float] | None] | None = field(default=None, kw_only=True)
    values: Values | Sequence[Values | None] | None = field(default=None, kw_only=True)
    per_layer_embedding: PerLayerEmbedding | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, repr=False, compare=False, kw_only=True)
    _defaulted: frozenset[str] = field(
        default=frozenset(), init=False, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        check(self)

    # --- what each layer has -------------------------------------------------------------------

    @property
    def skip_scales(self) -> np.ndarray:
        """lambda of every layer, shape (N,); (N, 2) where attention and feed-forward differ."""
        return self._each("skip_scale")

    @property
    def branch_scales(self) -> np.ndarray:
        """beta of every layer, shape (N,); (N, 2) where attention and feed-forward differ."""
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
        """Reach of attention in every layer."""
        if isinstance(self.window, Sequence):
            return tuple(self.window)
        return (self.window,) * self.layers

    @property
    def attention_sinks(self) -> tuple[float | None, ...]:
        """Variance of the sinks' logits in every layer; None where there are none."""
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
        """Of every layer, what its values are a sum of; None: of its own alone."""
        if isinstance(self.values, Sequence):
            return tuple(self.values)
        return (self.values,) * self.layers

    @property
    def read_again(self) -> frozenset[int]:
        """Layers whose keys and values later ones read."""
        sources = (getattr(one, "keys_of", None) for one in self.mixers)
        return frozenset(one for one in sources if one is not None)

    @property
    def reads_first(self) -> bool:
        """Whether later layers read the first one's values."""
        return any(one is not None and one.first for one in self.value_sources[1:])

    @property
    def additions(self) -> tuple[tuple[float, dict[int, float]], ...]:
        """Of every layer, the factor of what enters it, and those of what left earlier layers (0:
        of what enters layer 1) and is added."""
        given = (1.0, 0.0) if self.input_mix is None else self.input_mix
        result = []
        for pair, skip in zip(
            np.broadcast_to(given, (self.layers, 2)).tolist(),
            (None,) * self.layers if self.skips is None else self.skips,
            strict=True,
        ):
            keep, added = pair[0], {0: pair[1]} if pair[1] else {}
            if skip is not None:
                added[skip[0]] = added.get(skip[0], 0.0) + keep * skip[1]
            result.append((keep, added))
        return tuple(result)

    @property
    def adds_again(self) -> bool:
        """Whether layers add what earlier ones left, or what enters layer 1."""
        return self.input_mix is not None or self.skips is not None

    @property
    def mixers(self) -> tuple[Block | None, ...]:
        """What stands in attention's place in every layer; None: attention."""
        return self._blocks("mixer")

    @property
    def ffns(self) -> tuple[Block | None, ...]:
        """What stands in the feed-forward block's place in every layer; None: that block."""
        return self._blocks("ffn")

    def _blocks(self, name: str) -> tuple[Block | None, ...]:
        value = getattr(self, name)
        return tuple(value) if isinstance(value, Sequence) else (value,) * self.layers

    @property
    def placements(self) -> tuple[str, ...]:
        """Where normalisation sits in every layer: "mix" resolved into "post" and "pre"."""
        if self.norm != "mix":
            return (self.norm,) * self.layers
        return ("post",) * self.post_layers + ("pre",) * (self.layers - self.post_layers)

    def by_block(self, name: str) -> np.ndarray:
        """A scale of every layer, (N, 2): attention (and cross-attention), feed-forward."""
        values = np.asarray(getattr(self, name), dtype=float)
        return np.broadcast_to(
            values.reshape(-1, 1) if values.ndim < 2 else values, (self.layers, 2)
        )

    def _each(self, name: str) -> np.ndarray:
        values = np.asarray(getattr(self, name), dtype=float)
        return values.copy() if values.ndim else np.full(self.layers, float(values))

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Of every matrix of any layer, the features that it sums over and those that it makes."""
        layers = {pair: n for n, pair in enumerate(zip(self.mixers, self.ffns, strict=True), 1)}
        return {k: v for n in sorted(layers.values()) for k, v in self.shapes_of(n).items()}

    def shapes_of(self, layer: int) -> dict[str, tuple[int, int]]:
        """The same of layer `layer`, counted from 1."""
        mixer, ffn = self.shapes_by_place(layer)
        values = self.value_sources[layer - 1]
        if values is not None and values.gate is not None:
            mixer = mixer | {"value_gate": (values.gate, self.kv_heads or self.heads)}
        if self.per_layer_embedding is not None:
            ffn = ffn | self.per_layer_embedding.shapes(self.d_model)
        return mixer | ffn | self._cross_shapes()

    def shapes_by_place(self, layer: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes of attention's matrices, or of what stands in its place, and of the
        feed-forward block's."""
        mixer, ffn = self.mixers[layer - 1], self.ffns[layer - 1]
        return (
            self.attention_shapes() if mixer is None else mixer.shapes(self),
            self.dense_shapes(self.d_ff or 0) if ffn is None else ffn.shapes(self),
        )

    def dense_shapes(self, d_ff: int) -> dict[str, tuple[int, int]]:
        """Of the matrices of a feed-forward block of that width."""
        shapes = {"ffn_in": (self.d_model, d_ff), "ffn_out": (d_ff, self.d_model)}
        return shapes | ({"gate": (self.d_model, d_ff)} if self.gated else {})

    def attention_shapes(
        self, d_head: int | None = None, kv_heads: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """Of attention's matrices, as the fields or these arguments say."""
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
        """Weight variances of layer `layer`, counted from 1, those of its blocks' own included."""
        blocks = self.mixers[layer - 1], self.ffns[layer - 1]
        variances: dict[str, float] = dataclasses.asdict(self.layer_weights(layer))
        if (values := self.value_sources[layer - 1]) is not None:
            variances["value_gate"] = values.gate_variance
        if self.per_layer_embedding is not None:
            variances |= self.per_layer_embedding.variances
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
        """A changed copy, validated again; what was left to a default follows the change.

        Of another number of `layers`, what was given layer by layer goes on by its pattern: some
        layers at first, and then one group again and again (at least twice).

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
        """The model with weights, scales and placement as a published scheme sets them.

        Args:
            name: one of the names in `moments.schemes()`.
            options: the scheme's own, with its authors' defaults.

        Raises:
            DomainError: no such scheme or option, or an option outside what is allowed.
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
                data[f.name] = [None if one is None else one.to_dict() for one in value]
                continue
            data[f.name] = value.to_dict() if hasattr(value, "to_dict") else plain(value)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transformer:
        """Read what `to_dict` wrote.

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


def _continued(name: str, given: tuple[Any, ...], layers: Any) -> tuple[Any, ...]:
    """What layers have, one after the other, for so many: by the shortest beginning and group that
    make the pattern.

    Raises:
        DomainError: there is no pattern.
    """
    check_count("layers", layers)
    count = len(given)
    patterns = (
        (first, group)
        for length in range(1, count + 1)
        for first in range(length)
        for group in (length - first,)
        if count - first >= 2 * group
        and all(given[n] == given[n - group] for n in range(first + group, count))
    )
    found = next(patterns, None)
    if found is None:
        remedy = f"no pattern in it says what {layers} layers have: pass {name}=[...] along"
        raise domain_error(name, f"{count} entries", f"one per layer ({layers})", remedy)
    first, group = found
    return tuple(
        given[n] if n < count else given[first + (n - first) % group] for n in range(layers)
    )


def _kind_of(part: Any, kinds: Sequence[Any]) -> Any:
    """The declaration that has most of the fields that are given."""
    given = set(part) if isinstance(part, Mapping) else set()
    return max(kinds, key=lambda kind: len(given & {f.name for f in dataclasses.fields(kind)}))
