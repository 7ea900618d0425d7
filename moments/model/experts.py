"""Routed mixtures of experts as a block in the feed-forward block's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    check_choice,
    check_count,
    check_flag,
    check_number,
)
from .block import Block
from .fields import settle

if TYPE_CHECKING:
    from .transformer import Transformer

RULES = ("softmax", "sigmoid", "sigmoid_input")
NORMALISED = ("chosen", "all", "none")
SHARED = "shared_"
"""Begins the names of the matrices of a shared expert."""
OUTPUT_NORMS = ("ffn.experts_norm", "ffn.shared_norm")
"""Sites of the norms at their outputs."""
MOST_EXPERTS = 2**16


@dataclass(frozen=True)
class Experts(Block):
    """A token's feed-forward block is a weighted sum of a few of many: y = sum_e g_e F_e(x).

    Every expert F_e is a feed-forward block as the model declares it (`activation`, `gated`,
    `biases`), with matrices of its own; `weights.ffn_in`, `gate` and `ffn_out` are the variances of
    their entries. Weight gradients are sums over all experts: one expert has its share 1/experts.

    Args:
        experts: how many there are, E.
        chosen: to how many of them a token goes, k: those of the largest logits.
        d_ff: width of an expert's hidden layer; None: the model's.
        rule: gates from logits z. "softmax"; "sigmoid" (DeepSeek-V3); "sigmoid_input" (Llama 4):
            the gate multiplies the expert's input and not its output.
        normalised: what "softmax" and "sigmoid" are divided by: the sum over the "chosen" (also
            softmax of the chosen logits alone), over "all", or "none" (sigmoid).
        scale: multiplies the gates.
        groups, kept_groups: experts are chosen among those of `kept_groups` of so many groups.
        group_best: a group scores by the sum of so many of its largest gates.
        router_variance: of the entries of the router's matrix, (d_model, E); None: 1/d_model.
        router_bias_variance: of its bias; None: there is none.
        shared: width of a shared expert's hidden layer, which every token passes; 0: there is none.
            Its matrices have the experts' variances.
        shared_gate_variance: of the vector w of a gate sigmoid(w.x) on it; None: there is none.
        output_norms: whether one of the model's norms stands at what the routed experts give
            together and one at what the shared expert gives (Gemma 4).
        shift: added to the factor that a gated unit multiplies its activation by (GPT-OSS: 1).
        clamp: bounds that factor from both sides and the gate from above; None: no bounds.

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    kind: ClassVar[str] = "experts"
    places: ClassVar[tuple[str, ...]] = ("ffn",)

    experts: int
    chosen: int
    d_ff: int | None = None
    rule: str = "softmax"
    normalised: str = "chosen"
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    router_variance: float | None = None
    router_bias_variance: float | None = None
    shared: int = 0
    shared_gate_variance: float | None = None
    output_norms: bool = False
    shift: float = 0.0
    clamp: float | None = None

    def __post_init__(self) -> None:
        settle(self, ["experts"], check_count, most=MOST_EXPERTS)
        settle(self, ("chosen", "groups", "kept_groups", "group_best", "d_ff"), check_count)
        settle(self, ["shared"], check_count, least=0)
        variances = ("router_variance", "router_bias_variance", "shared_gate_variance")
        settle(self, variances, check_number, NONNEGATIVE, "pass a variance")
        settle(self, ("scale", "clamp"), check_number, POSITIVE)
        settle(self, ["shift"], check_number, NONNEGATIVE)
        settle(self, ["output_norms"], check_flag)
        check_choice("rule", self.rule, RULES)
        check_choice("normalised", self.normalised, NORMALISED)
        if self.chosen > self.experts:
            raise domain_error("chosen", self.chosen, f"at most experts = {self.experts}")
        if (self.rule, self.normalised) in (("softmax", "none"), ("sigmoid", "all")):
            allowed = "'chosen' or " + ("'all'" if self.rule == "softmax" else "'none'")
            raise domain_error("normalised", self.normalised, allowed)
        if self.rule == "sigmoid_input" and (self.chosen, self.normalised) != (1, "none"):
            raise DomainError(
                "rule = 'sigmoid_input' is of one expert per token whose gate is not normalised: "
                "pass chosen=1 and normalised='none'"
            )
        if self.experts % self.groups:
            raise domain_error("groups", self.groups, f"a divisor of experts = {self.experts}")
        size = self.experts // self.groups
        if self.kept_groups > self.groups or self.kept_groups * size < self.chosen:
            least = -(-self.chosen // size)
            raise domain_error("kept_groups", self.kept_groups, f"{least} to {self.groups}")
        if self.groups > 1 and self.group_best > size:
            raise domain_error("group_best", self.group_best, f"at most {size}, experts of a group")
        if self.shared_gate_variance is not None and not self.shared:
            raise domain_error("shared_gate_variance", self.shared_gate_variance, "None: no expert")

    def check(self, model: Transformer) -> None:
        if (self.shift or self.clamp) and not model.gated:
            raise DomainError("shift and clamp are of gated units: declare the model gated=True")
        if self.output_norms and model.normalization == "dyt":
            raise domain_error("normalization", "dyt", "a norm at the experts' outputs")
        if model.activation_dropout:
            raise domain_error("activation_dropout", model.activation_dropout, "0 inside experts")

    def width(self, model: Transformer) -> int:
        """Of an expert's hidden layer."""
        return self.d_ff or model.d_ff or 0

    def router_entries(self, model: Transformer) -> float:
        """Their variance."""
        return 1 / model.d_model if self.router_variance is None else self.router_variance

    def shapes(self, model: Transformer) -> dict[str, tuple[int, int]]:
        """Of one expert's matrices, the shared expert's and the routers'."""
        d_model, names = model.d_model, ("ffn_in", *(("gate",) if model.gated else ()))
        found = {"router": (d_model, self.experts)}
        for prefix, width in (("", self.width(model)), (SHARED, self.shared)):
            if width:
                found |= {f"{prefix}{name}": (d_model, width) for name in names}
                found[f"{prefix}ffn_out"] = (width, d_model)
        if self.shared_gate_variance is not None:
            found[f"{SHARED}router"] = (d_model, 1)
        return found

    def variances(self, model: Transformer) -> dict[str, float]:
        found = {"router": self.router_entries(model)}
        if self.shared_gate_variance is not None:
            found[f"{SHARED}router"] = self.shared_gate_variance
        return found
