"""The components of a declared Transformer, through which a theory propagates moments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..engine.bottom_to_top import BottomToTop
from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.laws import LawMatrix
from ..engine.layout import Padding
from ..errors import DomainError
from ..formulas.activation import activation_laws
from ..formulas.block import ATTENTION_BLOCK, FFN_BLOCK
from ..formulas.law import Theory
from ..formulas.linear import DROPOUT, LINEAR, SCALE
from ..formulas.normalization import LAYERNORM
from ..model.block import Block
from ..model.embedding import Embedding
from ..model.experts import SHARED, Experts
from ..model.law_block import LawBlock
from ..model.mixers import (
    MIXER,
    RECURRENT,
    Absent,
    FeedForward,
    LatentAttention,
    LayerAttention,
    ParallelMixer,
)
from ..model.placement import BUILT_IN
from ..model.streams import AltUp, HyperConnections
from ..model.transformer import Transformer
from ..model.values import Values
from .attention.self_attention import CrossAttention, NormalizedAttention, SelfAttention
from .by_law import LawLeaf
from .elementary import Activation, Dropout, Lawful, LayerScale, Linear, Scale
from .experts.identity import Fork, Join
from .experts.mixture import experts
from .gated import GatedLinear
from .normalization import DynamicTanh, FiniteNormalization
from .product import Product


@functools.lru_cache(maxsize=32)
def declare(
    model: Transformer,
    theory: Theory,
    padding: Padding | None = None,
    sequences: int = 1,
    memory_padding: Padding | None = None,
) -> Chain:
    """The stack of layers as components with the laws of `theory`.

    Args:
        padding: for every sequence, the number of each token's document, 0 for padding; None: one
            document without padding.
        sequences: number of sequences concatenated in one kernel.
        memory_padding: `padding` of the encoder's sequences.

    Raises:
        DomainError: the theory does not cover a feature of the model.
    """
    check_coverage(model, theory)
    if model.shared_layers:
        result: Chain = _loaded("shared").SharedStack.of(model)
        return result
    stack = _Stack(model, theory, padding, sequences, memory_padding)
    bodies: dict[Any, Component] = {}
    layers = []
    for number, numbers in enumerate(stack.numbers(), 1):
        if numbers not in bodies:
            bodies[numbers] = stack.layer(number).body
        layers.append(Layer(bodies[numbers], number))
    return Chain(tuple(layers))


def declare_layer(model: Transformer, theory: Theory, number: int) -> Layer:
    """One layer of `declare`."""
    return _Stack(model, theory).layer(number)


def declare_embedding(embedding: Embedding, model: Transformer, theory: Theory) -> Chain:
    """The components after the sum of the embedding tables.

    Raises:
        DomainError: the papers' theories do not cover factorised embeddings.
    """
    narrow = getattr(embedding, "factor_dim", None)  # no field of patch embeddings
    if narrow is not None and theory != "refined":
        raise DomainError(f'theory {theory!r} does not cover factor_dim; use theory="refined"')
    parts: list[Component] = []
    if embedding.norm:
        like = model.replace(norm_epsilon=embedding.norm_epsilon)
        parts.append(norm(like, theory, "embedding.norm"))
    parts.append(dropout(theory, "embedding", embedding.dropout))
    if narrow is not None and embedding.norm:
        parameters = {
            "fan_in": narrow,
            "fan_out": model.d_model,
            "weight_variance": embedding.factor_variance,
        } | ({"bias_variance": 0.0} if embedding.factor_bias else {})
        label, width = "embedding.factor", model.d_model
        bias = embedding.factor_bias
        parts.append(Linear(LINEAR, theory, label, parameters, width, "factor", has_bias=bias))
    return Chain(tuple(parts))


def declare_output(model: Transformer, theory: Theory) -> Chain:
    """The components between an encoder's last layer and a decoder's cross-attention."""
    normed, gain = model.placements[-1] not in ("post", "b2t", "none"), 1.0
    if model.head is not None:
        normed, gain = model.head.norm, model.head.norm_gain
    parts: list[Component] = [norm(model, theory, "final.norm", gain)] if normed else []
    drop_prob = getattr(model.head, "dropout", 0.0)
    if drop_prob:
        parts.append(dropout(theory, "final.dropout", drop_prob))
    return Chain(tuple(parts))


class _Stack:
    """Composes blocks, norms and scales by the model's placement of norms."""

    def __init__(
        self,
        model: Transformer,
        theory: Theory,
        padding: Padding | None = None,
        sequences: int = 1,
        memory_padding: Padding | None = None,
    ) -> None:
        self.model, self.theory = model, theory
        self.layout = padding, sequences, memory_padding
        names = ("skip_scale", "branch_scale", "norm_gain")
        self.skip, self.branch, self.gain = (model.by_block(name).tolist() for name in names)
        self.factor = model.norm_scales.tolist()

    def numbers(self) -> Iterator[tuple[Any, ...]]:
        """For every layer, a key of everything that distinguishes it from other layers."""
        model = self.model
        layers, altup = range(1, model.layers + 1), isinstance(model.streams, AltUp)
        columns = (
            [model.layer_weights(n) for n in layers],
            [model.biases and tuple(model.biases.layer(n).items()) for n in layers],
            *([tuple(row) for row in rows] for rows in (self.skip, self.branch, self.gain)),
            [model.layernorm_scaling and n > 1 and self.factor[n - 1] for n in layers],
            model.temperatures.tolist(),
            model.windows,
            model.rotaries,
            model.attention_sinks,
            model.value_sources,
            [(n == 1 and model.reads_first, n in model.read_again) for n in layers],
            model.placements,
            model.mixers,
            model.ffns,
            # the amplitude of the input in a layer depends on all layers before it
            range(model.layers) if model.adds_again or altup else (0,) * model.layers,
            [
                n if self._shortcut_experts(n) or self._shortcut_experts(n - 1) else 0
                for n in layers
            ],
        )
        return zip(*columns, strict=True)

    def layer(self, number: int) -> Layer:
        """Layer `number`, counted from 1."""
        model = self.model
        blocks = Blocks(model, self.theory, number, *self.layout)
        named = {"attention": blocks.attention(), "ffn": blocks.ffn()}
        if model.encoder is not None:
            named = {"attention": named["attention"], "cross": blocks.cross(), "ffn": named["ffn"]}
        for name, block in (("attention", model.mixers), ("ffn", model.ffns)):
            if isinstance(block[number - 1], Absent):
                del named[name]
        kind = "parallel" if model.parallel else model.placements[number - 1]
        body = KINDS[kind](Parts(self, number, named))
        body = self._with_shortcut(body, number)
        if isinstance(model.streams, AltUp):
            return Layer(_loaded("altup").AltUpLayer.around(body, model, number), number)
        if model.per_layer_embedding is not None:
            post_norm = norm(model, self.theory, "per_layer.post_norm")
            body = Chain((body, _loaded("per_layer").per_layer(model, post_norm)))
        if model.adds_again:
            body = Chain((_loaded("input_mix").mixes(model)[number - 1], body))
        return Layer(body, number)

    def _with_shortcut(self, body: Component, number: int) -> Component:
        """Add the shortcut of experts whose output joins the stream at the end of their layer or of
        the next one."""
        before, own = (self._shortcut_experts(n) for n in (number - 1, number))
        if own is not None:
            parts = list(body.in_order())
            place = next(n for n, part in enumerate(parts) if part.label == "ffn.sum")
            body = Chain((*parts[:place], Fork(number), *parts[place:]))
            if not own.delayed:
                body = Chain((*body.components, Join(number)))
        if before is not None and before.delayed:
            body = Chain((*body.in_order(), Join(number - 1)))
        return body

    def _shortcut_experts(self, number: int) -> Experts | None:
        """Experts of a layer that read the stream outside a residual branch."""
        block = self.model.ffns[number - 1] if 1 <= number <= self.model.layers else None
        return block if isinstance(block, Experts) and block.apart else None

    # --- norms and scales ----------------------------------------------------------------------

    def _sum(self, name: str, branch: Component, number: int) -> list[Component]:
        return [self._residual(name, branch, number), *self._sum_scale(name, number)]

    def _sum_scale(self, name: str, number: int) -> tuple[Component, ...]:
        if number == 1 or self.model.layernorm_scaling != "after-residual":
            return ()
        return (self._lns(f"{name}.sum_scale", number),)

    def _residual(self, name: str, branch: Component, number: int) -> Residual:
        if number > 1 and self.model.layernorm_scaling == "after-block":
            branch = Chain((branch, self._lns(f"{name}.scale", number)))
        which = int(name == "ffn")
        skip = self.skip[number - 1][which]
        amplitude = self.branch[number - 1][which]
        if self.model.layer_scale:
            branch = Chain((branch, LayerScale(f"{name}.layer_scale", amplitude)))
        if isinstance(streams := self.model.streams, HyperConnections):
            module, epsilon = _loaded("streams"), self.model.norm_epsilon
            coefficients = module.coefficients(streams, self.model.d_model)
            result: Residual = module.Connection(
                branch, skip, amplitude, f"{name}.sum", name, coefficients, epsilon
            )
            return result
        return Residual(branch, skip, amplitude, f"{name}.sum")

    def _gain(self, name: str, number: int) -> float:
        return float(self.gain[number - 1][int(name == "ffn")])

    def _norm(self, name: str, number: int) -> tuple[Component, ...]:
        where = self.model.layernorm_scaling
        label = f"{name}.norm"
        model = self.model
        if isinstance(model.streams, HyperConnections) and model.norm_epsilon:
            # moments of the norm's input are in units of the mean stream
            size = _loaded("streams").coefficients(model.streams, model.d_model).size
            model = dataclasses.replace(model, norm_epsilon=model.norm_epsilon / size)
        result = norm(model, self.theory, label, self._gain(name, number))
        if number == 1:
            return (result,)
        if where == "before-norm":
            return self._lns(f"{label}_scale", number), result
        scaled = {"attention-only": ("attention", "cross"), "ffn-only": ("ffn",)}
        if where in (True, "after-norm") or name in scaled.get(str(where), ()):
            return result, self._lns(f"{label}_scale", number)
        return (result,)

    def _lns(self, label: str, number: int) -> Component:
        return scale(self.theory, label, self.factor[number - 1] ** 2)


@dataclass(frozen=True)
class Parts:
    """The blocks of a layer, and its norms and residual sums by the model's declaration.

    Attributes:
        number: of the layer, from 1.
        blocks: "attention", "cross" (in a decoder) and "ffn", with dropout and without norms.
    """

    stack: _Stack
    number: int
    blocks: dict[str, Chain]

    @property
    def model(self) -> Transformer:
        return self.stack.model

    def norm(self, block: str) -> tuple[Component, ...]:
        """The norm "BLOCK.norm" with the factor of LayerNorm Scaling."""
        return self.stack._norm(block, self.number)

    def output_norm(self, block: str) -> Component:
        """The norm "BLOCK.post_norm", with the block's gain."""
        stack = self.stack
        gain = stack._gain(block, self.number)
        return norm(stack.model, stack.theory, f"{block}.post_norm", gain)

    def residual(self, block: str, branch: Component) -> Residual:
        """A residual connection around a branch, with the block's scales."""
        return self.stack._residual(block, branch, self.number)

    def normed(self, block: str, branch: Chain) -> Component:
        """A branch behind its norm."""
        if block == "attention" and self.model.laurel is not None:
            label = "attention.laurel_norm"
            added = norm(self.model, self.stack.theory, label)
            branch = Chain((_loaded("laurel").branch(self.model, branch, added),))
        return Chain(self.norm(block)) >> branch

    def sum(self, block: str, branch: Component) -> tuple[Component, ...]:
        """`residual`, followed by the factor of LayerNorm Scaling after sums."""
        residual: Component = self.residual(block, branch)
        if block == "attention" and self.model.laurel is not None:
            residual = _loaded("laurel").laurel_sum(self.model, residual)
        return residual, *self.stack._sum_scale(block, self.number)


Kind = Callable[[Parts], Component]
"""Composes a layer from its parts."""


def _each(layer: Parts, parts: Callable[[str, Chain], Iterable[Component]]) -> Component:
    """Chain of the components that `parts` makes of every block and its name."""
    return Chain(tuple(part for block in layer.blocks.items() for part in parts(*block)))


def pre(layer: Parts) -> Component:
    """Norms before every block."""
    return _each(layer, lambda name, block: layer.sum(name, layer.normed(name, block)))


def bare(layer: Parts) -> Component:
    """No norms."""
    return _each(layer, layer.sum)


def post(layer: Parts) -> Component:
    """Norms behind every sum."""
    return _each(layer, lambda name, block: (*layer.sum(name, block), *layer.norm(name)))


def sandwich(layer: Parts) -> Component:
    """Norms before every block and on its output."""

    def normed(name: str, block: Chain) -> Component:
        return layer.normed(name, block >> layer.output_norm(name))

    return _each(layer, lambda name, block: layer.sum(name, normed(name, block)))


def output(layer: Parts) -> Component:
    """Norms on every block's output alone."""
    return _each(layer, lambda name, block: layer.sum(name, block >> layer.output_norm(name)))


def hybrid(layer: Parts) -> Component:
    """Norms of queries, keys and values (in `Blocks.attention`) and before feed-forward blocks."""

    def parts(name: str, block: Chain) -> tuple[Component, ...]:
        before = () if name == "attention" else layer.norm(name)
        return *before, *layer.sum(name, block)

    return _each(layer, parts)


def bottom_to_top(layer: Parts) -> Component:
    """Post-LN with the layer's input added again at its end."""
    attention = layer.residual("attention", layer.blocks["attention"])
    ffn, *scaled = layer.sum("ffn", layer.blocks["ffn"])
    assert isinstance(ffn, Residual)
    whole = BottomToTop(attention, Chain(layer.norm("attention")), ffn)
    return Chain((whole, *scaled, *layer.norm("ffn")))


def parallel(layer: Parts) -> Component:
    """Attention and feed-forward block read the same stream and share one sum."""
    model, blocks = layer.model, layer.blocks
    scales = layer.stack.branch[layer.number - 1]
    if scales[0] != scales[1]:
        # The shared sum has the scale of the feed-forward block.
        ratio = scale(layer.stack.theory, "attention.scale", (scales[0] / scales[1]) ** 2)
        blocks = blocks | {"attention": Chain((*blocks["attention"].children, ratio))}
    norms = {name: () if model.norm == "none" else layer.norm(name) for name in blocks}
    if model.parallel_norms == 2:
        both = [Chain((*norms[name], *block.children)) for name, block in blocks.items()]
        branch: Component = Parallel(tuple(both))
    else:
        branch = Chain((*norms["attention"], Parallel(tuple(blocks.values()))))
    return Chain(layer.sum("ffn", branch))


KINDS: dict[str, Kind] = {
    "pre": pre,
    "none": bare,
    "post": post,
    "sandwich": sandwich,
    "output": output,
    "hybrid": hybrid,
    "b2t": bottom_to_top,
    "parallel": parallel,
}
"""By the names of `Transformer.norm`; "parallel" by its flag. Register another one by name."""


# --- blocks ---------------------------------------------------------------------------------------


class Normalization(Lawful):
    """A normalisation by the papers' laws, without width and learned parameters."""

    normalises = True
    rescales = True


def dropout(theory: Theory, label: str, drop_prob: float) -> Dropout:
    return Dropout(DROPOUT, theory, label, {"drop_prob": float(drop_prob)})


def scale(theory: Theory, label: str, variance: float) -> Scale:
    return Scale(SCALE, theory, label, {"weight_variance": variance})


def norm(model: Transformer, theory: Theory, label: str, gain: float = 1.0) -> Component:
    """The model's normalisation, with a gain of that root mean square."""
    if theory != "refined":
        parameters = {"d_model": model.d_model}
        return Normalization(LAYERNORM, theory, label, parameters)
    if model.normalization == "dyt":
        return DynamicTanh(label, model.dyt_alpha, gain, model.norm_affine)
    return FiniteNormalization.of(model, label, gain, model.norm_groups)


@dataclass(frozen=True)
class Blocks:
    """Makes the blocks of layer `number`, counted from 1; other fields as in `declare`."""

    model: Transformer
    theory: Theory
    number: int
    padding: Padding | None = None
    sequences: int = 1
    memory_padding: Padding | None = None

    @property
    def _biases(self) -> dict[str, float]:
        return {} if self.model.biases is None else self.model.biases.layer(self.number)

    def _projections(self) -> dict[str, Any]:
        """Arguments common to self-attention and cross-attention."""
        model, biases = self.model, self._biases
        names = ("query", "key", "value")
        return {
            "kv_heads": model.kv_heads,
            "qk_norm": model.qk_norm,
            "logit_softcap": model.logit_softcap,
            "norm_epsilon": model.norm_epsilon if model.qk_norm else 0.0,
            "norm_affine": model.norm_affine,
            "sequences": self.sequences,
            "has_bias": tuple(name for name in names if name in biases),
            **{f"{name}_bias": biases.get(name, 0.0) for name in names},
        }

    def _linear(self, label: str, weight: str, fan_in: int, fan_out: int) -> Linear:
        field = weight.removeprefix(SHARED).removeprefix(MIXER)
        variance = getattr(self.model.layer_weights(self.number), field)
        parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": variance}
        biases = self._biases
        name = field.removeprefix("cross_")
        if name not in biases:
            return Linear(LINEAR, self.theory, label, parameters, fan_out, weight)
        parameters["bias_variance"] = biases[name]
        return Linear(LINEAR, self.theory, label, parameters, fan_out, weight, has_bias=True)

    def attention(self) -> Chain:
        """Self-attention with output projection and dropout, or the block that replaces it."""
        model, weights = self.model, self.model.layer_weights(self.number)
        block = model.mixers[self.number - 1]
        if block is not None:
            last = dropout(self.theory, "attention.dropout", model.dropout)
            return Chain((*BLOCKS[type(block)](self, block), last))
        if model.identity_attention:
            width = model.heads * (model.d_head or 0)
            values = self._linear("attention.heads", "value", model.d_model, width)
            return self._projected("attention", "output", self._gated(values))
        temperature = float(model.temperatures[self.number - 1])
        if self.theory != "refined":
            # The papers treat the block as one unit.
            parameters = {
                "d_model": model.d_model,
                "seq_len": model.seq_len,
                "drop_prob": model.dropout,
                "attention_drop_prob": model.attention_dropout,
                # The temperature divides the logits, through which alone queries enter.
                "query": weights.query / temperature**2,
                "key": weights.key,
                "value": weights.value,
                "output": weights.output,
            }
            return Chain((Lawful(ATTENTION_BLOCK, self.theory, "attention.dropout", parameters),))
        heads = SelfAttention(
            "attention.heads",
            model.d_model,
            model.heads,
            model.d_head,
            weights.query,
            weights.key,
            weights.value,
            model.attention_dropout,
            model.causal,
            temperature=temperature,
            padding=self.padding,
            rotary=model.rotaries[self.number - 1],
            alibi=model.alibi,
            relative_bias=model.relative_bias,
            window=model.windows[self.number - 1],
            sink=model.attention_sinks[self.number - 1],
            **self._projections(),
        )
        if model.placements[self.number - 1] == "hybrid":
            kind = "rmsnorm" if model.normalization == "rmsnorm" else "layernorm"
            normalised = dataclasses.replace(
                heads, qk_norm=kind, norm_epsilon=model.norm_epsilon, norm_affine=False
            )
            return self._projected("attention", "output", NormalizedAttention(normalised))
        mixing, keeps = model.value_sources[self.number - 1], self.number == 1 and model.reads_first
        if mixing is not None or keeps:
            own = Values() if mixing is None else mixing
            kv_heads = int(model.kv_heads or model.heads)
            module = _loaded("attention.other_sources")
            mixed = module.MixedValues(heads, own, self.number == 1, keeps, kv_heads)
            return self._projected("attention", "output", self._gated(mixed))
        return self._projected("attention", "output", self._gated(heads))

    def _gated(self, heads: Component) -> Component:
        """The heads times their gates, if any."""
        model = self.model
        if model.attention_gate is None:
            return heads
        width = model.shapes_of(self.number)["attention_gate"][1]
        gate = Chain(
            (
                self._linear("attention.gate", "attention_gate", model.d_model, width),
                Activation(activation_laws("sigmoid"), self.theory, "attention.gates"),
            )
        )
        per_gate = 1.0 if model.attention_gate == "elementwise" else float(model.d_head or 0)
        return Product(heads, gate, per_gate)

    def cross(self) -> Chain:
        """Attention to the encoder's output, with projection and dropout."""
        model, weights = self.model, self.model.layer_weights(self.number)
        encoder = model.encoder
        assert encoder is not None
        heads = CrossAttention(
            "cross.heads",
            model.d_model,
            model.heads,
            model.d_head,
            weights.cross_query,
            weights.cross_key,
            weights.cross_value,
            encoder.d_model,
            drop_prob=model.attention_dropout,
            temperature=float(model.temperatures[self.number - 1]),
            padding=self.memory_padding,
            **self._projections(),
        )
        return self._projected("cross", "cross_output", heads)

    def _projected(self, name: str, weight: str, heads: Component) -> Chain:
        model = self.model
        inner = model.heads * (model.d_head or 0)
        projection = self._linear(f"{name}.projection", weight, inner, model.d_model)
        return Chain((heads, projection, dropout(self.theory, f"{name}.dropout", model.dropout)))

    def ffn(self) -> Chain:
        """The feed-forward block, or the block that replaces it, with dropout."""
        model, theory = self.model, self.theory
        block = model.ffns[self.number - 1]
        if block is not None:
            last = dropout(theory, "ffn.dropout", model.ffn_dropout or 0.0)
            return Chain((*BLOCKS[type(block)](self, block), last))
        weights = model.layer_weights(self.number)
        d_model, d_ff = model.d_model, model.d_ff or 0
        if theory == "simplified":
            parameters = {
                "d_model": d_model,
                "d_ff": d_ff,
                "ffn_in": weights.ffn_in,
                "ffn_out": weights.ffn_out,
                "drop_prob": model.dropout,
            }
            return Chain((Lawful(FFN_BLOCK, theory, "ffn.dropout", parameters),))
        last = dropout(theory, "ffn.dropout", model.ffn_dropout or 0.0)
        return Chain((*self.dense(d_ff), last))

    def dense(self, d_ff: int, sparsity: float | None = None) -> tuple[Component, ...]:
        """A feed-forward block of width `d_ff`; `sparsity` of its gates as in `FeedForward`."""
        model, parts = self.model, self._hidden(d_ff, sparsity=sparsity)
        if model.activation_dropout:
            site = "ffn.activation_dropout"
            parts += (dropout(self.theory, site, model.activation_dropout),)
        return *parts, self._linear("ffn.out", "ffn_out", d_ff, model.d_model)

    def _hidden(
        self,
        d_ff: int,
        prefix: str = "",
        label: str = "ffn.",
        shift: float = 0.0,
        clamp: float | None = None,
        sparsity: float | None = None,
    ) -> tuple[Component, ...]:
        """Components from the stream to the hidden features.

        Args:
            prefix: of the matrices' names.
            label: prefix of the sites' names; empty: no names.
            shift, clamp, sparsity: of a gated unit (`GatedLinear`).
        """
        model, theory = self.model, self.theory
        d_model, site = model.d_model, f"{label}activation" if label else ""
        if model.gated:
            weights, biases = model.layer_weights(self.number), self._biases
            laws, widths = activation_laws(model.activation), (d_model, d_ff)
            gate_bias, bias = biases.get("gate", 0.0), biases.get("ffn_in", 0.0)
            fields = weights.gate, weights.ffn_in, gate_bias, bias
            has_bias = "ffn_in" in biases
            unit = GatedLinear(
                site, laws, *widths, *fields, has_bias, prefix, shift, clamp, sparsity
            )
            return (unit,)
        # the papers' GeLU is the erf form
        published = (theory, model.activation) == ("published", "gelu_tanh")
        laws = activation_laws("gelu" if published else model.activation)
        entering = f"{label}in" if label else ""
        return (
            self._linear(entering, f"{prefix}ffn_in", d_model, d_ff),
            Activation(laws, theory, site),
        )


BlockParts = Callable[[Blocks, Any], Iterable[Component]]
"""Makes the components of a block's branch, without its dropout."""


def by_law(parts: Blocks, block: LawBlock) -> tuple[LawLeaf]:
    """The single component of a user's block."""
    model, number = parts.model, parts.number
    if parts.padding is not None and block.mixes_tokens:
        raise DomainError(
            f"attention_mask and document_ids: the law of block {block.name!r} knows no padding: "
            "leave them out, or give one text of full length"
        )
    variances, biases = model.variances_of(number), parts._biases
    matrices = (
        LawMatrix(name, *shape, float(variances[name]), biases.get(name))
        for name, shape in block.shapes(model).items()
    )
    sizes = model.d_model, model.seq_len
    return (LawLeaf(block.name, block.law, tuple(matrices), *sizes, block.mixes_tokens),)


def latent(blocks: Blocks, block: LatentAttention) -> tuple[Component, ...]:
    """Latent heads and their output projection."""
    model, number = blocks.model, blocks.number
    weights, name = model.layer_weights(number), "attention.projection"
    heads = SelfAttention(
        "attention.heads",
        model.d_model,
        model.heads,
        block.nope_dim + block.rope_dim,
        weights.query,
        weights.key,
        weights.value,
        model.attention_dropout,
        model.causal,
        temperature=float(model.temperatures[number - 1]),
        padding=blocks.padding,
        rotary=model.rotaries[number - 1],
        window=model.windows[number - 1],
        sequences=blocks.sequences,
    )
    projection = blocks._linear(name, "output", model.heads * block.value_dim, model.d_model)
    latent_heads = _loaded("attention.latent").LatentHeads(heads, block, model.norm_affine)
    return latent_heads, projection


def layer_attention(parts: Blocks, block: LayerAttention) -> tuple[Component, ...]:
    """Attention with fields that differ from the model's."""
    blocks = dataclasses.replace(parts, model=block.applied(parts.model))
    heads, *rest, _ = blocks.attention().components  # `Blocks.attention` adds the dropout
    source = block.keys_of
    if source is not None:
        weights = blocks.model.layer_weights(source)
        biases = dataclasses.replace(blocks, number=source)._biases
        assert isinstance(heads, SelfAttention)
        heads = dataclasses.replace(
            heads,
            key=weights.key,
            value=weights.value,
            key_bias=biases.get("key", 0.0),
            value_bias=biases.get("value", 0.0),
        )
    if block.value_norm:
        assert isinstance(heads, SelfAttention)
        heads = NormalizedAttention(heads)
    if source is not None or parts.number in parts.model.read_again:
        heads = _loaded("attention.other_sources").SharedKeys(heads, source)
    return heads, *rest


def _loaded(name: str) -> Any:
    """Import a module that only few models need."""
    return import_module(f".{name}", __package__)


def _recurrent(name: str) -> BlockParts:
    """A function of `recurrent`, imported at its first call."""

    def parts(blocks: Blocks, block: Any) -> Iterable[Component]:
        function: BlockParts = getattr(_loaded("recurrent"), name)
        return function(blocks, block)

    return parts


BLOCKS: dict[type[Block], BlockParts] = {
    LawBlock: by_law,
    Experts: experts,
    LatentAttention: latent,
    **dict.fromkeys(RECURRENT, _recurrent("recurrent_parts")),
    LayerAttention: layer_attention,
    ParallelMixer: _recurrent("parallel_parts"),
    Absent: lambda parts, block: (),
    FeedForward: lambda parts, block: parts.dense(block.d_ff, block.sparsity),
}
"""By the class of a block (`moments.model.block`). Register another one by its class."""


def check_coverage(model: Transformer, theory: Theory) -> None:
    """Check that a theory covers all features of a model.

    Raises:
        DomainError: it does not; names the feature.
    """
    if theory == "refined":
        return
    remedy = 'use theory="refined"'
    if model.heads * (model.d_head or 0) != model.d_model:
        raise DomainError(
            f"theory {theory!r} covers only heads * d_head = d_model, and here "
            f"{model.heads} * {model.d_head} is not {model.d_model}; {remedy}"
        )
    if theory == "simplified" and model.activation != "relu":
        raise DomainError(
            f"theory 'simplified' (Table 2) covers only activation = 'relu', "
            f'not {model.activation!r}; use theory="published" or "refined"'
        )
    for feature, present in _beyond_the_papers(model).items():
        if present:
            raise DomainError(f"theory {theory!r} does not cover {feature}; {remedy}")


def _beyond_the_papers(model: Transformer) -> dict[str, Any]:
    """Features that only the refined theory covers, and whether the model has them."""
    known = ("relu", "gelu", "gelu_tanh", "identity")
    return {
        f"activation = {model.activation!r}": model.activation not in known,
        f"normalization = {model.normalization!r}": model.normalization != "layernorm",
        f"norm = {model.norm!r}": model.norm in ("output", "hybrid", "b2t")
        or model.norm not in BUILT_IN,
        "gated units": model.gated,
        "grouped heads (kv_heads)": model.kv_heads != model.heads,
        "biases": model.biases is not None and any(_entries(model.biases)),
        "parallel blocks": model.parallel,
        "rotary positions": model.rotary is not None,
        "ALiBi": model.alibi,
        "relative_bias": model.relative_bias is not None,
        "qk_norm": model.qk_norm,
        "logit_softcap": model.logit_softcap,
        "windows": any(model.windows),
        "layer_scale": model.layer_scale,
        "attention_gate": model.attention_gate is not None,
        "attention_sink": any(sink is not None for sink in model.attention_sinks),
        "identity_attention": model.identity_attention,
        "ffn_dropout": model.ffn_dropout != model.dropout,
        "blocks in a mixer's place": any(model.mixers),
        "blocks in the feed-forward block's place": any(model.ffns),
        "an encoder": model.encoder is not None,
        "activation_dropout": model.activation_dropout,
        "norm_groups": model.norm_groups > 1,
        "shared_layers": model.shared_layers,
        "streams": model.streams is not None,
        "input_mix": model.input_mix is not None,
        "skips": model.skips is not None,
        "values": model.values is not None,
        "per_layer_embedding": model.per_layer_embedding is not None,
        "laurel": model.laurel is not None,
        "keys and values of an earlier layer": bool(model.read_again),
    }


def _entries(biases: Any) -> list[float]:
    """The largest entry of every field of `Biases`."""
    values = biases.to_dict().values()
    return [max(v) if isinstance(v, list) else v or 0.0 for v in values]
