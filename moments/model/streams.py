"""Several residual streams (hyper-connections, AltUp), and a learned addition to one (Laurel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import NONNEGATIVE, POSITIVE, REAL, check_choice, check_count, check_number
from .fields import Count, PositiveVariance, Stored, Variance, settle

if TYPE_CHECKING:
    from .transformer import Transformer

READS = ("sigmoid", "one")
MIXINGS = ("sinkhorn", "identity")
MOST_STREAMS = 64
"""Coefficients of mixing are sampled as square matrices."""


@dataclass(frozen=True)
class HyperConnections(Stored):
    """Residual streams x_1 ... x_N, which start as copies of the embedding (hyper-connections).

    A block reads u = sum_i r_i x_i, and its output y changes the streams to
    x_k <- sum_j m_jk x_j + w_k y. The output of the last layer is their mean; a norm behind it
    makes their sum equivalent. With n a token's streams, divided by their common root mean square,
    and z = scale W n, N (N + 2) logits, or 2 N without mixing,

        r_i = sigmoid(read_bias + z_i),  w_k = write_factor sigmoid(write_bias + z_{N+k}),

    and m the exponentials of the other logits, rows and columns alternately normalised (Xie et al.
    2026).

    Args:
        streams: N.
        variance: of the entries of W, (N d_model, logits); 0: coefficients start as constants.
        scale: of the logits.
        reads: "sigmoid" as above; "one": blocks read the streams in turn, with r = 1 for one stream
            and w_k = 1 for all (static hyper-connections, Zhu et al. 2024).
        mixing: "sinkhorn" as above, or "identity", m = 1 (Hunyuan V4).
        read_bias, write_bias: initial biases.
        write_factor: factor of w.
        rounds: number of normalisations of rows and columns.
        epsilon: added to every r, to the rows' softmax, and to divisors.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    _part: ClassVar[str] = "streams"

    streams: int = 4
    variance: float = 0.0
    scale: float = 1.0
    reads: str = "sigmoid"
    mixing: str = "sinkhorn"
    read_bias: float = 0.0
    write_bias: float = 0.0
    write_factor: float = 2.0
    rounds: int = 20
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        settle(self, ["streams"], check_count, least=2, most=MOST_STREAMS)
        settle(self, ["variance"], check_number, NONNEGATIVE, "pass a variance")
        settle(self, ["epsilon"], check_number, NONNEGATIVE)
        settle(self, ("scale", "write_factor"), check_number, POSITIVE)
        settle(self, ("read_bias", "write_bias"), check_number, REAL)
        settle(self, ["rounds"], check_count)
        check_choice("reads", self.reads, READS)
        check_choice("mixing", self.mixing, MIXINGS)
        if self.reads == "one" and (self.variance or self.mixing != "identity"):
            raise DomainError(
                "reads='one' is of static coefficients: pass variance=0 and mixing='identity'"
            )

    def check(self, model: Transformer) -> None:
        """Raise a DomainError if a model cannot have several streams."""
        if model.norm not in ("pre", "sandwich") or model.normalization == "dyt":
            allowed = "norm='pre' or 'sandwich' of LayerNorm or RMSNorm with several streams"
            name = "normalization" if model.normalization == "dyt" else "norm"
            raise domain_error(name, getattr(model, name), allowed)
        excluded = {
            "parallel": model.parallel,
            "encoder": model.encoder is not None,
            "skip_scale": bool((model.skip_scales != 1.0).any()),
            "layernorm_scaling": model.layernorm_scaling in ("after-residual", "before-norm"),
            "norm_groups": model.norm_groups > 1,
        }
        for name in (name for name, present in excluded.items() if present):
            default = type(model).__dataclass_fields__[name].default
            allowed = f"{default!r} where there are several streams"
            raise domain_error(name, getattr(model, name), allowed)

    def logit_variance(self, d_model: int) -> float:
        """Variance of a coefficient's logit."""
        return self.scale**2 * self.streams * d_model * self.variance

    @property
    def logits(self) -> int:
        """Number of logits of a token at each block."""
        mixing = self.streams**2 if self.mixing == "sinkhorn" else 0
        return 2 * self.streams + mixing


@dataclass(frozen=True)
class AltUp(Stored):
    """Alternating updates (Baykal et al. 2023), as Gemma 3n has them: streams x_0 ... x_(N-1), of
    which the layers read the first alone.

    x_0 enters as the embedding e, the others as W_i e, rescaled to the size of e. With y the output
    of a layer for its prediction of x_0, and n RMSNorm without a gain,

        m = tanh(V n(x_0) / d_model),  x_i <- x_i + sum_j (P m)_ij x_j,
        x_i <- x_i + (1 + (C m')_i) (y - x_0),  m' = m of y.

    Behind the last layer, streams other than the first are multiplied by matrices U_i and rescaled
    to its size, and the head reads the mean. The block of a `per_layer_embedding` reads x_0 times a
    gain that starts at zero, and is added to the other streams.

    V is small, so coefficients start at 0 and 1 up to about sqrt(router_variance/d_model) times the
    deviations of P and C. They count as constants here; their gradients are predicted.

    Args:
        streams: N.
        router_variance, prediction_variance, correction_variance: variances of the entries of V
            (d_model, N), P (N, N^2) and C (N, N).
        in_variance, out_variance: those of all W_i and U_i, which have no effect but on their own
            gradients.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    _part: ClassVar[str] = "streams"

    streams: int
    router_variance: Variance
    prediction_variance: Variance
    correction_variance: Variance
    in_variance: PositiveVariance
    out_variance: PositiveVariance

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, ["streams"], check_count, least=2, most=MOST_STREAMS)

    def check(self, model: Transformer) -> None:
        """Raise a DomainError if a model cannot have these streams."""
        excluded = {
            "norm": (model.norm not in ("pre", "sandwich"), "'pre' or 'sandwich'"),
            "normalization": (model.normalization != "rmsnorm", "'rmsnorm'"),
            "norm_epsilon": (
                model.per_layer_embedding is not None and not model.norm_epsilon,
                "above 0 with a per_layer_embedding, whose block has the input 0",
            ),
            "encoder": (model.encoder is not None, "None"),
            "norm_groups": (model.norm_groups > 1, "1"),
            "layernorm_scaling": (bool(model.layernorm_scaling), "False"),
        }
        for name, (wrong, allowed) in excluded.items():
            if wrong:
                value = getattr(model, name)
                raise domain_error(name, value, f"{allowed}, where streams is a moments.AltUp")

    def shapes(self, model: Transformer, layer: int) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of the matrices of a layer; W_i and U_i side by side."""
        count, d_model = self.streams, model.d_model
        shapes = {
            "streams.router": (d_model, count),
            "streams.prediction": (count, count**2),
            "streams.correction": (count, count),
        }
        wide = d_model, (count - 1) * d_model
        shapes |= {"streams.in": wide} if layer == 1 else {}
        return shapes | ({"streams.out": wide} if layer == model.layers else {})

    @property
    def variances(self) -> dict[str, float]:
        """Variances of the same matrices."""
        names = "router", "prediction", "correction", "in", "out"
        return {f"streams.{name}": getattr(self, f"{name}_variance") for name in names}


@dataclass(frozen=True)
class Laurel(Stored):
    """A learned addition to attention's residual sum (LAuReL-LR, Menghani et al. 2024; Gemma 3n).

    Where attention's block reads n = N(x), the sum gains n + N'(W_u W_d n), with N' an RMSNorm of
    its own; `skip_scale` and `branch_scale` multiply x and everything else.

    Args:
        rank: features of W_d n.
        down_variance, up_variance: variances of the entries of W_d and W_u.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    _part: ClassVar[str] = "laurel"

    rank: Count
    down_variance: PositiveVariance
    up_variance: PositiveVariance

    def check(self, model: Transformer) -> None:
        """Raise a DomainError if a model's layers cannot have it."""
        hyper = isinstance(model.streams, HyperConnections)
        scales = model.by_block("skip_scale")[:, 0] != model.by_block("branch_scale")[:, 0]
        excluded = {
            "norm": (model.norm not in ("pre", "sandwich"), "'pre' or 'sandwich'"),
            "normalization": (model.normalization != "rmsnorm", "'rmsnorm'"),
            "streams": (hyper, "None or a moments.AltUp"),
            "encoder": (model.encoder is not None, "None"),
            "parallel": (model.parallel, "False"),
            "norm_groups": (model.norm_groups > 1, "1"),
            "layernorm_scaling": (bool(model.layernorm_scaling), "False"),
            "layer_scale": (model.layer_scale, "False"),
            "norm_gain": (bool((model.norm_gains[:, 0] != 1.0).any()), "1.0"),
            "branch_scale": (bool(scales.any()), "that of attention's skip_scale"),
        }
        for name, (wrong, allowed) in excluded.items():
            if wrong:
                raise domain_error(name, getattr(model, name), f"{allowed} with laurel")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Shape (fan_in, fan_out) of every matrix of a layer."""
        return {"laurel_down": (d_model, self.rank), "laurel_up": (self.rank, d_model)}

    @property
    def variances(self) -> dict[str, float]:
        """Variances of the same matrices."""
        return {"laurel_down": self.down_variance, "laurel_up": self.up_variance}
