"""What stands in attention's place: recurrences, short convolutions, latent attention.

Their query, key, value and output matrices are those of `moments.Weights`; what they have besides
is declared with them. See
docs/theory/recurrences.md and latent_attention.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import (
    POSITIVE,
    REAL,
    check_number,
)
from .block import Block, block_from_dict
from .fields import (
    Count,
    Flag,
    Natural,
    Nonnegative,
    Positive,
    Probability,
    Real,
    Variance,
    one_of,
    set_field,
)
from .streams import HyperConnections

if TYPE_CHECKING:
    from .transformer import Transformer

Shapes = dict[str, tuple[int, int]]
QK_NORMS = (None, "rmsnorm", "layernorm", "rmsnorm-all", "layernorm-all")
MIXER = "mixer_"
"""Prefix of a mixer's matrices that have names of attention's, in layers with both."""


@dataclass(frozen=True)
class _Mixer(Block):
    """A causal mixer that replaces attention, with laws by token."""

    places: ClassVar[tuple[str, ...]] = ("mixer",)
    by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "tap_variance", 0.0) is None:
            # torch's convolutions: U(-1/sqrt(kernel), 1/sqrt(kernel))
            set_field(self, "tap_variance", 1 / (3 * self.kernel))  # type: ignore[attr-defined]

    def variances(self, model: Transformer) -> dict[str, float]:
        ends = len("_variance")
        names = [f.name for f in fields(self) if f.name.endswith("_variance")]
        return {f"mixer_{n[:-ends]}": getattr(self, n) for n in names if n != "tap_variance"}

    def check(self, model: Transformer) -> None:
        if not model.causal:
            allowed = f"True where a {self.kind} stands in attention's place"
            raise domain_error("causal", model.causal, allowed, "it sees no later token")


def _range(name: str, value: Any) -> tuple[float, float]:
    """A pair of positive bounds, in order."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise domain_error(name, value, "a pair: the least and the most")
    low, high = (check_number(name, one, POSITIVE) for one in value)
    if low > high:
        raise domain_error(name, value, "a pair: the least and the most")
    return low, high


Range = Annotated[tuple[float, float], _range]
Taps = Annotated[str, one_of("uniform", "normal")]


@dataclass(frozen=True)
class Absent(Block):
    """Nothing: no block, norm or residual sum in this place, as in stacks of mixers alone.

    >>> str(Absent())
    'absent'
    """

    kind: ClassVar[str] = "absent"
    places: ClassVar[tuple[str, ...]] = ("mixer", "ffn")

    def check(self, model: Transformer) -> None:
        if model.parallel or model.encoder is not None or model.norm not in _SEQUENTIAL:
            raise domain_error(
                "norm",
                model.norm,
                f"one of {', '.join(_SEQUENTIAL)} where a block is absent",
                "without parallel blocks and without an encoder",
            )
        for number, both in enumerate(zip(model.mixers, model.ffns, strict=True), 1):
            if all(isinstance(one, Absent) for one in both):
                raise DomainError(f"mixer and ffn are both absent in layer {number}")

    def shapes(self, model: Transformer) -> Shapes:
        return {}

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class FeedForward(Block):
    """The model's feed-forward block with another width in this layer.

    Args:
        d_ff: hidden units.
        sparsity: share of a token's gates that are zero before the activation; the other gates are
            reduced by mean + z sd over the token's gates, z the normal's quantile (Gemma 3n).
    """

    kind: ClassVar[str] = "feed_forward"
    places: ClassVar[tuple[str, ...]] = ("ffn",)

    d_ff: Count
    sparsity: Probability | None = None

    def check(self, model: Transformer) -> None:
        if not self.sparsity:
            return
        gains = bool((model.norm_gains[:, 1] != 1.0).any())
        required = {
            "gated": (not model.gated, "True"),
            "norm": (model.norm not in ("pre", "sandwich"), "'pre' or 'sandwich'"),
            "normalization": (model.normalization == "dyt", "'layernorm' or 'rmsnorm'"),
            "norm_gain": (gains, "1.0"),
            "layernorm_scaling": (bool(model.layernorm_scaling), "False"),
        }
        for name, (wrong, allowed) in required.items():
            if wrong:
                allowed = f"{allowed} where gates are sparse"
                raise domain_error(name, getattr(model, name), allowed)

    def shapes(self, model: Transformer) -> Shapes:
        return model.dense_shapes(self.d_ff)


_SEQUENTIAL = ("pre", "post", "none", "sandwich", "output", "mix")


@dataclass(frozen=True)
class ShortConvolution(_Mixer):
    """A gated short convolution (LFM2): W_o [q * conv(k * v)], q, k and v linear in the input.

    Attributes:
        kernel: width of the depthwise convolution in tokens, the last of them the output's own.
        tap_variance: variance of its entries; None: torch's default, 1/(3 kernel).
        bias: whether it has a bias, of variance 0.

    >>> ShortConvolution(kernel=3).tap_variance
    0.1111111111111111
    """

    kind: ClassVar[str] = "short_convolution"

    kernel: Count = 3
    tap_variance: Nonnegative | None = None
    bias: Flag = False

    def shapes(self, model: Transformer) -> Shapes:
        square = model.d_model, model.d_model
        return dict.fromkeys(("query", "key", "value", "output"), square)


@dataclass(frozen=True)
class LinearAttention(_Mixer):
    """Linear attention with decays: y_t = scale sum_{s <= t} (q_t.k_s) [decays] v_s, head by head.

    Without decays, with one for every head (RetNet, `retnet_decays`; lightning attention,
    `lightning_decays`), or with gates of the input (gated linear attention).

    Attributes:
        heads: number of heads.
        d_key, d_value: features of each head's queries and keys, and of its values.
        decays: factor of each head's state per token; None: 1.
        feature_map: map of queries, keys and values: "identity" or "silu".
        scale: factor of the logits; None: 1/sqrt(d_key).
        norm: RMSNorm over each head's values ("head"), over those of all heads ("all"), or None.
        norm_epsilon: added to the mean square under its root.
        gate: "silu" or "sigmoid" of a linear map multiplies the norm's output; None: no gate.
        gate_variance: variance of that map's weights.
        decay_gate: decays sigmoid(bias + w.x)^(1/decay_power), one for every key feature
            ("channel") or for every head ("head"); None: only `decays`.
        decay_variance, decay_bias, decay_power: variance of w, the bias, and the power.
    """

    kind: ClassVar[str] = "linear_attention"

    heads: Count
    d_key: Count
    d_value: Count
    decays: tuple[float, ...] | None = None
    feature_map: Annotated[str, one_of("identity", "silu")] = "identity"
    scale: Positive | None = None
    norm: Annotated[str, one_of(None, "head", "all")] | None = None
    norm_epsilon: Nonnegative = 1e-6
    gate: Annotated[str, one_of(None, "silu", "sigmoid")] | None = None
    gate_variance: Nonnegative = 0.0
    decay_gate: Annotated[str, one_of(None, "channel", "head")] | None = None
    decay_variance: Nonnegative = 0.0
    decay_bias: Real = 0.0
    decay_power: Positive = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is None:
            set_field(self, "scale", 1 / math.sqrt(self.d_key))
        if self.decays is not None:
            values = tuple(check_number("decays", one, POSITIVE) for one in self.decays)
            if len(values) != self.heads or max(values) > 1:
                raise domain_error("decays", self.decays, f"{self.heads} numbers in (0, 1]")
            set_field(self, "decays", values)
            if self.decay_gate is not None:
                raise DomainError("decays and decay_gate: declare one of the two")

    def shapes(self, model: Transformer) -> Shapes:
        keys, values = self.heads * self.d_key, self.heads * self.d_value
        d = model.d_model
        result = {"query": (d, keys), "key": (d, keys), "value": (d, values), "output": (values, d)}
        if self.gate is not None:
            result["mixer_gate"] = d, values
        if self.decay_gate is not None:
            result["mixer_step"] = d, keys if self.decay_gate == "channel" else self.heads
        return result

    def variances(self, model: Transformer) -> dict[str, float]:
        return {"mixer_gate": self.gate_variance, "mixer_step": self.decay_variance}


def retnet_decays(heads: int) -> tuple[float, ...]:
    """1 - 2^(-5 - h) of head h from 0 (Sun et al. 2023, section 2.2).

    >>> retnet_decays(2)
    (0.96875, 0.984375)
    """
    return tuple(1 - 2.0 ** (-5 - head) for head in range(heads))


def lightning_decays(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """exp(-2^(-8 h/heads) (1 - layer/(layers - 1 + 1e-5) + 1e-5)) of head h from 1, layer from 0
    (Qin et al. 2024, section 3, as in MiniMax-01).

    >>> [round(one, 4) for one in lightning_decays(2, 0, 4)]
    [0.9394, 0.9961]
    """
    left = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(math.exp(-(2.0 ** (-8 * head / heads)) * left) for head in range(1, heads + 1))


@dataclass(frozen=True)
class Mamba2(_Mixer):
    """Mamba-2's mixer (Dao and Gu 2024): x, B and C are the values, keys and queries.

    [x, B, C] = SiLU(conv(.)) of linear maps, steps d_t = softplus(bias + w.u_t),
    y_t = sum_{s <= t} (C_t.B_s) exp(-A sum_{s < r <= t} d_r) d_s x_s + D x_t, and then
    W_o RMSNorm(y * SiLU(z)), z another linear map.

    Attributes:
        heads, d_head: number of heads, and features of x in each.
        state: features of B and C.
        groups: number of groups of heads with a common B, C and norm.
        kernel: width of the short convolution.
        tap_variance: variance of its entries; None: torch's default, 1/(3 kernel).
        tap_distribution: "uniform" or "normal".
        tap_bias: whether it has a bias, of variance 0.
        rates: A of every head; or a pair, between which it is drawn uniformly; None: 1, 2, ...
        steps: range in which softplus(bias) is drawn, uniformly in its logarithm.
        gate_variance, step_variance: variances of the weights of z and of the steps.
        skip: D.
        norm: whether there is a norm.
        norm_before_gate: whether it precedes the product with SiLU(z).
        norm_epsilon: added to the mean square under its root.
        least_step, most_step: bounds of the steps; None: no upper bound.
        multipliers: factors of the projections to z, x, B, C and the steps (Falcon-H1).
    """

    kind: ClassVar[str] = "mamba2"

    heads: Count
    d_head: Count
    state: Count
    gate_variance: Nonnegative
    step_variance: Nonnegative
    groups: Count = 1
    kernel: Count = 4
    tap_variance: Nonnegative | None = None
    tap_distribution: Taps = "uniform"
    tap_bias: Flag = True
    rates: tuple[float, ...] | None = None
    steps: Range = (1e-3, 1e-1)
    skip: Real = 1.0
    norm: Flag = True
    norm_before_gate: Flag = False
    norm_epsilon: Nonnegative = 1e-5
    least_step: Nonnegative = 0.0
    most_step: Positive | None = None
    multipliers: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.multipliers, list | tuple) or len(self.multipliers) != 5:
            raise domain_error(
                "multipliers", self.multipliers, "five numbers: of z, x, B, C, steps"
            )
        several = tuple(check_number("multipliers", one, REAL) for one in self.multipliers)
        set_field(self, "multipliers", several)
        if self.rates is not None:
            values = tuple(check_number("rates", one, POSITIVE) for one in self.rates)
            if len(values) not in (2, self.heads):
                allowed = f"a pair of bounds, or one number for each of {self.heads} heads"
                raise domain_error("rates", self.rates, allowed)
            set_field(self, "rates", values)
        if self.heads % self.groups:
            raise domain_error("groups", self.groups, f"a divisor of the {self.heads} heads")

    def shapes(self, model: Transformer) -> Shapes:
        width, d, shared = self.heads * self.d_head, model.d_model, self.groups * self.state
        result = {"query": (d, shared), "key": (d, shared), "value": (d, width)}
        own = {"mixer_gate": (d, width), "mixer_step": (d, self.heads)}
        return result | {"output": (width, d)} | own

    @property
    def factors(self) -> dict[str, float]:
        """`multipliers` by matrix."""
        names = "mixer_gate", "value", "key", "query", "mixer_step"
        return dict(zip(names, self.multipliers, strict=True))


@dataclass(frozen=True)
class Mamba(_Mixer):
    """Mamba's mixer (Gu and Dao 2023): a state for every feature, B, C and steps from all features.

    x = SiLU(conv(W_value u)), B and C = W_key x and W_query x, steps
    d_t = softplus(bias + W_step W_step_down x_t), and for feature c
    y_t = sum_{s <= t} sum_n C_tn B_sn exp(-A_n sum_{s < r <= t} d_rc) d_sc x_sc + D x_tc; then
    W_o (y * SiLU(z)), z another linear map of u.

    Attributes:
        width: features of x.
        state: features of B and C.
        step_rank: features of W_step_down x.
        gate_variance, step_variance, step_down_variance: variances of the entries of the matrix to
            z, of W_step and of W_step_down.
        kernel: width of the short convolution.
        tap_variance: variance of its entries; None: torch's default, 1/(3 kernel).
        tap_distribution: "uniform" or "normal".
        tap_bias: whether it has a bias, of variance 0.
        rates: A of every entry of a state; None: 1, 2, ...
        steps: range in which softplus(bias) is drawn, uniformly in its logarithm.
        skip: D.
        inner_norm: RMSNorm of W_step_down x, B and C, "affine" with gains (Jamba) or "plain"
            (Falcon Mamba); None: no norm.
        norm_epsilon: added to the mean square under their root.
    """

    kind: ClassVar[str] = "mamba"
    norm: ClassVar[bool] = False

    width: Count
    state: Count
    step_rank: Count
    gate_variance: Nonnegative
    step_variance: Nonnegative
    step_down_variance: Nonnegative
    kernel: Count = 4
    tap_variance: Nonnegative | None = None
    tap_distribution: Taps = "uniform"
    tap_bias: Flag = True
    rates: tuple[float, ...] | None = None
    steps: Range = (1e-3, 1e-1)
    skip: Real = 1.0
    inner_norm: Annotated[str, one_of(None, "affine", "plain")] | None = None
    norm_epsilon: Nonnegative = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates is not None:
            values = tuple(check_number("rates", one, POSITIVE) for one in self.rates)
            if len(values) != self.state:
                raise domain_error("rates", self.rates, f"{self.state} numbers")
            set_field(self, "rates", values)

    def shapes(self, model: Transformer) -> Shapes:
        wide, inner = (model.d_model, self.width), (self.width, self.state)
        steps = {"mixer_step_down": (self.width, self.step_rank)}
        steps["mixer_step"] = (self.step_rank, self.width)
        result = {"value": wide, "mixer_gate": wide, "key": inner, "query": inner}
        return result | steps | {"output": (self.width, model.d_model)}


@dataclass(frozen=True)
class RGLRU(_Mixer):
    """The real-gated linear recurrent unit (De et al. 2024, Griffin): a state of one number per
    feature.

    x = conv(W_value u), i = sigmoid(W_input x) and r = sigmoid(W_step x), both block-diagonal,
    a_t = exp(-8 r_t softplus(p)), h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t, h_1 = i_1 x_1; then
    W_o (h * gelu(W_gate u)). All maps have biases that start at 0.

    Attributes:
        width: features of x.
        blocks: number of diagonal blocks of W_input and W_step.
        gate_variance, input_variance, step_variance: variances of the entries of W_gate, W_input
            and W_step.
        kernel: width of the short convolution.
        tap_variance: variance of its entries; None: torch's default, 1/(3 kernel).
        decays: range of exp(-softplus(p)), whose square is drawn uniformly.
        gate: the activation behind W_gate.
    """

    kind: ClassVar[str] = "rg_lru"
    norm: ClassVar[bool] = False
    tap_distribution: ClassVar[str] = "normal"
    tap_bias: ClassVar[bool] = True

    width: Count
    blocks: Count
    gate_variance: Nonnegative
    input_variance: Nonnegative
    step_variance: Nonnegative
    kernel: Count = 4
    tap_variance: Nonnegative | None = None
    decays: Range = (0.9, 0.999)
    gate: Annotated[str, one_of("gelu_tanh", "silu", "sigmoid", "identity")] = "gelu_tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decays[1] >= 1:
            raise domain_error("decays", self.decays, "a pair of numbers in (0, 1)")
        if self.width % self.blocks:
            raise domain_error("blocks", self.blocks, f"a divisor of width = {self.width}")

    def shapes(self, model: Transformer) -> Shapes:
        wide, block = (model.d_model, self.width), (self.width // self.blocks, self.width)
        result = {"value": wide, "mixer_gate": wide, "mixer_input": block, "mixer_step": block}
        return result | {"output": (self.width, model.d_model)}


@dataclass(frozen=True)
class LayerAttention(Block):
    """Attention of a layer that differs from the model's; None for a field: that of the model.

    Attributes:
        d_head, kv_heads, qk_norm: as in a Transformer.
        qk_gains: whether norms of queries and keys have gains if the model's norms have.
        value_norm: whether every head's values are divided by their root mean square (Gemma 4).
        keys_of: earlier layer whose keys and values this layer reads instead of its own (Gemma 4
            E2B); None: its own.
    """

    kind: ClassVar[str] = "attention"
    places: ClassVar[tuple[str, ...]] = ("mixer",)

    d_head: Count | None = None
    kv_heads: Count | None = None
    qk_norm: Annotated[str, one_of(*QK_NORMS)] | None = None
    qk_gains: Flag = True
    value_norm: Flag = False
    keys_of: Count | None = None

    def check(self, model: Transformer) -> None:
        if self.keys_of is not None:
            self._check_source(model)
        if self.value_norm and (self.qk_norm or model.qk_norm) != "rmsnorm":
            given = self.qk_norm or model.qk_norm
            raise domain_error("qk_norm", given, "'rmsnorm' where values are normalised")
        if self.value_norm and model.attention_gate is not None:
            allowed = "None where values are normalised"
            raise domain_error("attention_gate", model.attention_gate, allowed)

    def _check_source(self, model: Transformer) -> None:
        """Raise DomainError unless `keys_of` is an earlier layer with the same heads."""
        first, source = model.mixers.index(self) + 1, self.keys_of or 0
        mixer = model.mixers[source - 1] if 0 < source < first else None
        if mixer != dataclasses.replace(self, keys_of=None):
            allowed = "a layer before, whose block is the same but for keys_of=None"
            raise domain_error("keys_of", self.keys_of, allowed)
        excluded = {
            "encoder": model.encoder is not None,
            "streams": isinstance(model.streams, HyperConnections),
            "values": any(values is not None for values in model.value_sources),
        }
        for name in (name for name, present in excluded.items() if present):
            allowed = "None where layers read the keys and values of others"
            raise domain_error(name, getattr(model, name), allowed)

    def shapes(self, model: Transformer) -> Shapes:
        shapes = model.attention_shapes(self.d_head, self.kv_heads)
        absent = () if self.keys_of is None else ("key", "value")
        return {name: shape for name, shape in shapes.items() if name not in absent}

    def applied(self, model: Transformer) -> Transformer:
        """The model with this attention in all layers."""
        fields = {name: getattr(self, name) for name in ("d_head", "kv_heads", "qk_norm")}
        changes: dict[str, Any] = {k: value for k, value in fields.items() if value is not None}
        return model.replace(mixer=None, norm_affine=model.norm_affine and self.qk_gains, **changes)


@dataclass(frozen=True)
class ParallelMixer(Block):
    """The model's attention and a mixer in parallel (Falcon-H1), whose outputs are added.

    The mixer's query, key, value and output matrices are called "mixer_query" and so on, and have
    the variances of attention's.

    Attributes:
        mixer: the mixer.
        attention_scale, mixer_scale: factors of the two outputs.
    """

    kind: ClassVar[str] = "parallel mixer"
    places: ClassVar[tuple[str, ...]] = ("mixer",)
    by_token: ClassVar[bool] = True

    mixer: Block
    attention_scale: Real = 1.0
    mixer_scale: Real = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.mixer, dict):
            set_field(self, "mixer", block_from_dict("mixer", self.mixer))
        if not isinstance(self.mixer, RECURRENT):
            kinds = ", ".join(one.kind for one in RECURRENT)
            raise domain_error("mixer", self.mixer, f"one of {kinds}")

    def check(self, model: Transformer) -> None:
        self.mixer.check(model)

    @staticmethod
    def named(name: str) -> str:
        """What a matrix or parameter of the mixer is called, attention having those names too."""
        shared = name.partition(".")[0] in ("query", "key", "value", "output")
        return MIXER + name if shared else name

    def shapes(self, model: Transformer) -> Shapes:
        mixer = {self.named(name): shape for name, shape in self.mixer.shapes(model).items()}
        return model.attention_shapes() | mixer

    def variances(self, model: Transformer) -> dict[str, float]:
        return self.mixer.variances(model)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"mixer": self.mixer.to_dict()}


@dataclass(frozen=True)
class GatedDeltaNet(_Mixer):
    """The gated delta rule (Yang et al. 2024) as Qwen3-Next has it, and Kimi's delta attention.

    q, k, v = SiLU(conv(.)) of linear maps, q and k of unit length, q over sqrt(d_key); with
    b = sigmoid(w.x) and a = exp(-A softplus(bias + w'.x)),
    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T and o_t = S_t^T q_t; then
    W_o [RMSNorm(o) * SiLU(z)], a norm for every head.

    Attributes:
        key_heads, value_heads: heads of keys, each shared by value_heads/key_heads of values.
        d_key, d_value: features of each.
        kernel: of the short convolution.
        tap_variance: of its entries; None: torch's default, 1/(3 kernel).
        tap_distribution: "uniform" or "normal".
        rates: A is drawn uniformly between these two.
        steps: softplus(bias) is drawn between these two, uniformly in its logarithm.
        gate_variance, step_variance, rate_variance: of the weights to z, to a and to b.
        twice: whether b is twice that sigmoid.
        norm_epsilon: added to the mean square under the norm's root.
        decay: one a for every "head", or for every "channel" of its keys (Kimi Team 2025, Kimi
            Linear, section 3), a then multiplying the rows of S_{t-1}.
        gate: "silu" or "sigmoid", of z.
        rank: the maps to z and a go through so many features, by matrices "mixer_gate_down" and
            "mixer_step_down" of the same variances; None: they are one matrix.
    """

    kind: ClassVar[str] = "gated_delta_net"
    norm: ClassVar[bool] = True

    key_heads: Count
    value_heads: Count
    d_key: Count
    d_value: Count
    gate_variance: Nonnegative
    step_variance: Nonnegative
    rate_variance: Nonnegative
    kernel: Count = 4
    tap_variance: Nonnegative | None = None
    tap_distribution: Taps = "normal"
    rates: Range = (0.01, 16.0)
    steps: Range = (1.3132616875182228, 1.3132616875182228)
    twice: Flag = False
    norm_epsilon: Nonnegative = 1e-6
    decay: Annotated[str, one_of("head", "channel")] = "head"
    gate: Annotated[str, one_of("silu", "sigmoid")] = "silu"
    rank: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_heads % self.key_heads:
            allowed = f"a divisor of the {self.value_heads} heads of values"
            raise domain_error("key_heads", self.key_heads, allowed)

    def shapes(self, model: Transformer) -> Shapes:
        keys, values = self.key_heads * self.d_key, self.value_heads * self.d_value
        d = model.d_model
        result = {"query": (d, keys), "key": (d, keys), "value": (d, values), "output": (values, d)}
        steps = self.value_heads * (self.d_key if self.decay == "channel" else 1)
        for name, width in (("mixer_gate", values), ("mixer_step", steps)):
            result[name] = self.rank or d, width
            if self.rank is not None:
                result[f"{name}_down"] = d, self.rank
        return result | {"mixer_rate": (d, self.value_heads)}

    def variances(self, model: Transformer) -> dict[str, float]:
        result = super().variances(model)
        if self.rank is not None:
            result |= {f"{name}_down": result[name] for name in ("mixer_gate", "mixer_step")}
        return result


@dataclass(frozen=True)
class LatentAttention(Block):
    """Multi-head latent attention of DeepSeek V2 and V3, Kimi and MiniCPM3.

    Queries are W_query N(W_query_down x); keys are W_key N(c) and a part r that all heads share,
    and values W_value N(c), where [c | r] = W_kv_down x and N is RMSNorm. Rotary positions turn r
    and as many features of the queries, and logits are divided by
    sqrt(nope_dim + rope_dim) temperature. The model's heads, causal, window, rotary, temperature
    and attention_dropout hold for it, `Weights.query`, `.key`, `.value` and `.output` are the
    variances of the matrices from the latents to the heads and back.

    Args:
        kv_rank: features of c.
        nope_dim, rope_dim: of a head's queries and keys without positions, and with them.
        value_dim: features of a head's values.
        kv_down: variance of the entries of W_kv_down (d_model, kv_rank + rope_dim).
        query_rank: features between W_query_down and W_query; None: W_query reads the tokens.
        query_down: variance of W_query_down; None: as kv_down.
        query_factor, kv_factor: multiply queries, and N(c) (LongCat: sqrt(d_model / rank)).
        norm_epsilon: added to the variance under the norms' square root.

    Raises:
        DomainError: a value outside what is allowed.

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, section 2.1 and appendix C.
    """

    kind: ClassVar[str] = "latent attention"
    places: ClassVar[tuple[str, ...]] = ("mixer",)

    kv_rank: Count
    nope_dim: Count
    rope_dim: Natural
    value_dim: Count
    kv_down: Variance
    query_rank: Count | None = None
    query_down: Variance | None = None
    query_factor: Positive = 1.0
    kv_factor: Positive = 1.0
    norm_epsilon: Nonnegative = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_down is not None and self.query_rank is None:
            raise domain_error("query_down", self.query_down, "None without a query_rank")

    def check(self, model: Transformer) -> None:
        """Raise where the model has what latent attention knows nothing of."""
        beside = {
            "alibi": model.alibi,
            "relative_bias": model.relative_bias is not None,
            "qk_norm": model.qk_norm is not None,
            "logit_softcap": model.logit_softcap is not None,
            "attention_gate": model.attention_gate is not None,
            "attention_sink": any(one is not None for one in model.attention_sinks),
            "kv_heads": model.kv_heads not in (None, model.heads),
            "biases": model.biases is not None
            and any(getattr(model.biases, name) is not None for name in ("query", "key", "value")),
        }
        for name, there in beside.items():
            if there:
                raise DomainError(f"mixer: latent attention has no {name}; leave it out")
        for rotary in {one for one in model.rotaries if one is not None}:
            if not self.rope_dim or self.rope_dim % 2:
                raise domain_error("rope_dim", self.rope_dim, "even and above 0 with rotary")
            if rotary.grid is not None:
                raise domain_error("rotary.grid", rotary.grid, "None in latent attention")
            if rotary.fraction != 1.0:
                remedy = "positions turn rope_dim features of every head"
                raise domain_error("rotary.fraction", rotary.fraction, "1", remedy)
            if rotary.speeds is not None and len(rotary.speeds) != self.rope_dim // 2:
                allowed = f"{self.rope_dim // 2}, one per pair of rope_dim features"
                remedy = "declare d_head = rope_dim"
                raise domain_error("rotary.speeds", len(rotary.speeds), allowed, remedy)

    def shapes(self, model: Transformer) -> dict[str, tuple[int, int]]:
        """Of every matrix, the features that it sums over and those that it makes."""
        width, heads = model.d_model, model.heads
        down = {"kv_down": (width, self.kv_rank + self.rope_dim)}
        if self.query_rank is not None:
            down = {"query_down": (width, self.query_rank)} | down
        return down | {
            "query": (self.query_rank or width, heads * (self.nope_dim + self.rope_dim)),
            "key": (self.kv_rank, heads * self.nope_dim),
            "value": (self.kv_rank, heads * self.value_dim),
            "output": (heads * self.value_dim, width),
        }

    def variances(self, model: Transformer) -> dict[str, float]:
        """Of W_query_down and W_kv_down."""
        return self.down_variances

    @property
    def down_variances(self) -> dict[str, float]:
        """The same by name."""
        if self.query_rank is None:
            return {"kv_down": self.kv_down}
        query = self.kv_down if self.query_down is None else self.query_down
        return {"query_down": query, "kv_down": self.kv_down}


RECURRENT = ShortConvolution, LinearAttention, Mamba, Mamba2, GatedDeltaNet, RGLRU
"""Mixers whose laws are of recurrences and short convolutions."""
