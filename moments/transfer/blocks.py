"""The blocks of a layer as components: attention, cross-attention, feed-forward, normalisation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..engine.composition import Chain, Component
from ..engine.layout import Padding
from ..errors import DomainError
from ..formulas.block import ATTENTION_BLOCK, FFN_BLOCK
from ..formulas.law import Theory
from ..formulas.linear import DROPOUT, LINEAR, SCALE
from ..formulas.named_activations import activation_laws
from ..formulas.normalization import LAYERNORM
from ..model.placement import placement
from ..model.transformer import Transformer
from .attention.self_attention import NormalizedAttention, SelfAttention
from .elementary import Activation, Dropout, Lawful, Linear, Scale
from .gated import GatedLinear
from .normalization import DynamicTanh, FiniteNormalization


class Normalization(Lawful):
    """A normalisation whose laws are the papers': width and learned parameters leave no trace."""

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
    """Makes the blocks of one layer.

    Attributes:
        model: the declaration.
        theory: whose laws they hold.
        number: of the layer, from 1.
        padding: for every sequence, the document of each token, 0 where it pads; None: one of all.
        sequences: of one joint kernel.
        memory_padding: as `padding`, of what cross-attention reads.
    """

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
        """What self-attention and cross-attention have in common beside their matrices."""
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
        variance = getattr(self.model.layer_weights(self.number), weight)
        parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": variance}
        biases = self._biases
        name = weight.removeprefix("cross_")
        if name not in biases:
            return Linear(LINEAR, self.theory, label, parameters, fan_out, weight)
        parameters["bias_variance"] = biases[name]
        return Linear(LINEAR, self.theory, label, parameters, fan_out, weight, has_bias=True)

    def attention(self) -> Chain:
        """Self-attention, its output projection and dropout."""
        model, weights = self.model, self.model.layer_weights(self.number)
        if model.identity_attention:
            width = model.heads * (model.d_head or 0)
            values = self._linear("attention.heads", "value", model.d_model, width)
            return self._projected("attention", "output", values)
        temperature = float(model.temperatures[self.number - 1])
        if self.theory != "refined":
            # The papers treat the block as one unit.
            parameters = {
                "d_model": model.d_model,
                "seq_len": model.seq_len,
                "drop_prob": model.dropout,
                "attention_drop_prob": model.attention_dropout,
                # Queries enter through the logits alone, which the temperature divides.
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
            temperature,
            model.causal,
            self.padding,
            rotary=model.rotary,
            alibi=model.alibi,
            relative_bias=model.relative_bias,
            window=model.windows[self.number - 1],
            **self._projections(),
        )
        if model.placements[self.number - 1] == "hybrid":
            kind = "rmsnorm" if model.normalization == "rmsnorm" else "layernorm"
            normalised = dataclasses.replace(
                heads, qk_norm=kind, norm_epsilon=model.norm_epsilon, norm_affine=False
            )
            return self._projected("attention", "output", NormalizedAttention(normalised))
        return self._projected("attention", "output", heads)

    def cross(self) -> Chain:
        """Attention to the encoder's output, its projection and dropout."""
        from .attention.self_attention import CrossAttention

        model, weights = self.model, self.model.layer_weights(self.number)
        encoder = model.encoder
        assert encoder is not None
        heads = CrossAttention(
            "cross.heads",
            model.d_model,
            encoder.d_model,
            model.heads,
            model.d_head,
            weights.cross_query,
            weights.cross_key,
            weights.cross_value,
            model.attention_dropout,
            float(model.temperatures[self.number - 1]),
            padding=self.memory_padding,
            **self._projections(),
        )
        return self._projected("cross", "cross_output", heads)

    def _projected(self, name: str, weight: str, heads: Component) -> Chain:
        model = self.model
        inner = model.heads * (model.d_head or 0)
        return Chain(
            (
                heads,
                self._linear(f"{name}.projection", weight, inner, model.d_model),
                dropout(self.theory, f"{name}.dropout", model.dropout),
            )
        )

    def ffn(self) -> Chain:
        """The feed-forward block and its dropout."""
        model, theory = self.model, self.theory
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
        parts: tuple[Component, ...] = self._hidden()
        if model.activation_dropout:
            parts += (dropout(theory, "ffn.activation_dropout", model.activation_dropout),)
        return Chain(
            (
                *parts,
                self._linear("ffn.out", "ffn_out", d_ff, d_model),
                dropout(theory, "ffn.dropout", model.ffn_dropout or 0.0),
            )
        )

    def _hidden(self) -> tuple[Component, ...]:
        model, theory = self.model, self.theory
        d_model, d_ff = model.d_model, model.d_ff or 0
        if model.gated:
            weights, biases = model.layer_weights(self.number), self._biases
            return (
                GatedLinear(
                    "ffn.activation",
                    activation_laws(model.activation),
                    d_model,
                    d_ff,
                    weights.gate,
                    weights.ffn_in,
                    gate_bias=biases.get("gate", 0.0),
                    bias=biases.get("ffn_in", 0.0),
                    has_bias="ffn_in" in biases,
                ),
            )
        # The papers' GeLU is the erf form; they state no other.
        published = (theory, model.activation) == ("published", "gelu_tanh")
        laws = activation_laws("gelu" if published else model.activation)
        return (
            self._linear("ffn.in", "ffn_in", d_model, d_ff),
            Activation(laws, theory, "ffn.activation"),
        )


def check_coverage(model: Transformer, theory: Theory) -> None:
    """Whether the papers' theories know everything that a model declares.

    Raises:
        DomainError: they do not; names the feature.
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
    known = ("relu", "gelu", "gelu_tanh", "identity")
    return {
        f"activation = {model.activation!r}": model.activation not in known,
        f"normalization = {model.normalization!r}": model.normalization != "layernorm",
        f"norm = {model.norm!r}": model.norm in ("hybrid", "b2t") or placement(model.norm),
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
        "identity_attention": model.identity_attention,
        "ffn_dropout": model.ffn_dropout != model.dropout,
        "an encoder": model.encoder is not None,
        "activation_dropout": model.activation_dropout,
        "norm_groups": model.norm_groups > 1,
    }


def _entries(biases: Any) -> list[float]:
    values = biases.to_dict().values()
    return [max(v) if isinstance(v, list) else v or 0.0 for v in values]
