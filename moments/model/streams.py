"""Several residual streams that every block reads from and writes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import NONNEGATIVE, POSITIVE, REAL, check_choice, check_count, check_number
from .fields import Stored, settle

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
