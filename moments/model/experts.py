"""Routed mixtures of experts, which replace the feed-forward block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..errors import DomainError, domain_error
from ..formulas.checks import check_count
from .block import Block
from .fields import Count, Flag, Natural, Nonnegative, Positive, Variance, one_of

if TYPE_CHECKING:
    from .transformer import Transformer

RULES = ("softmax", "sigmoid", "sigmoid_input")
NORMALISED = ("chosen", "all", "none")
SHARED = "shared_"
"""Prefix of the names of a shared expert's matrices."""
OUTPUT_NORMS = ("ffn.experts_norm", "ffn.shared_norm")
"""Sites of the norms at the outputs of routed and shared experts."""
MOST_EXPERTS = 2**16


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts, of which each token uses a few: y = sum_e g_e F_e(x).

    Every expert F_e is a feed-forward block with the model's `activation`, `gated` and `biases`,
    and matrices of its own; `weights.ffn_in`, `gate` and `ffn_out` are the variances of their
    entries. Weight gradients are sums over all experts: one expert has the share 1/experts.

    Args:
        experts: number of experts, E.
        chosen: number of experts per token, k: those with the largest logits.
        d_ff: width of an expert's hidden layer; None: the model's.
        rule: gates from logits z. "softmax"; "sigmoid" (DeepSeek-V3); "sigmoid_input" (Llama 4):
            the gate multiplies the expert's input and not its output.
        normalised: the divisor of gates: the sum over the "chosen" (for softmax the softmax of the
            chosen logits), over "all", or "none" (sigmoid).
        scale: factor of the gates.
        groups, kept_groups: number of groups of experts, and of groups from which a token chooses.
        group_best: number of a group's largest gates whose sum is the group's score.
        router_variance: variance of the router matrix, (d_model, E); None: 1/d_model.
        router_bias_variance: variance of its bias; None: no bias.
        shared: width of the hidden layer of a shared expert, used by all tokens; 0: there is none.
            Its matrices have the experts' variances.
        shared_gate_variance: variance of w in the shared expert's gate sigmoid(w.x); None: no gate.
        output_norms: whether the sum of routed experts and the shared expert's output each have a
            norm (Gemma 4).
        shift: added to the linear factor of a gated unit (GPT-OSS: 1).
        clamp: bounds that factor from both sides and the gate from above; None: no bounds.
        identity: number of experts without matrices, which return their input, the normalised
            stream (LongCat Flash's zero experts).
        delayed: whether the sum of routed experts is added behind the next layer, and only the
            shared expert's output at once (LongCat Flash's shortcut).

    Raises:
        DomainError: a value outside what is allowed, named with the remedy.
    """

    kind: ClassVar[str] = "experts"
    places: ClassVar[tuple[str, ...]] = ("ffn",)

    experts: Annotated[int, partial(check_count, most=MOST_EXPERTS)]
    chosen: Count
    d_ff: Count | None = None
    rule: Annotated[str, one_of(*RULES)] = "softmax"
    normalised: Annotated[str, one_of(*NORMALISED)] = "chosen"
    scale: Positive = 1.0
    groups: Count = 1
    kept_groups: Count = 1
    group_best: Count = 2
    router_variance: Variance | None = None
    router_bias_variance: Variance | None = None
    shared: Natural = 0
    shared_gate_variance: Variance | None = None
    output_norms: Flag = False
    shift: Nonnegative = 0.0
    clamp: Positive | None = None
    identity: Natural = 0
    delayed: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.identity >= self.experts:
            raise domain_error("identity", self.identity, f"less than experts = {self.experts}")
        beside = {"shared": not self.shared, "output_norms": self.output_norms}
        beside["rule"] = self.rule == "sigmoid_input"
        for name in (name for name, there in beside.items() if there and self.apart):
            allowed = "a width above 0" if name == "shared" else "its default"
            remedy = "needed where identity or delayed is given"
            raise domain_error(name, getattr(self, name), allowed, remedy)

    @property
    def apart(self) -> bool:
        """Whether the output of routed experts is correlated with the stream, or added later."""
        return bool(self.identity or self.delayed)

    def check(self, model: Transformer) -> None:
        if self.apart:
            self._check_apart(model)
        if (self.shift or self.clamp) and not model.gated:
            raise DomainError("shift and clamp are of gated units: declare the model gated=True")
        if self.output_norms and model.normalization == "dyt":
            raise domain_error("normalization", "dyt", "a norm at the experts' outputs")
        if model.activation_dropout:
            raise domain_error("activation_dropout", model.activation_dropout, "0 inside experts")

    def _check_apart(self, model: Transformer) -> None:
        beside = {
            "norm": (model.norm, "pre"),
            "normalization": (model.normalization, "rmsnorm"),
            "parallel": (model.parallel, False),
            "streams": (model.streams, None),
            "layernorm_scaling": (model.layernorm_scaling, False),
            "layer_scale": (model.layer_scale, False),
            "shared_layers": (model.shared_layers, False),
        }
        for name, (value, allowed) in beside.items():
            if value != allowed:
                remedy = "experts that are delayed or give back what they read know no other"
                raise domain_error(name, value, repr(allowed), remedy)
        if (model.skip_scales != 1.0).any() or (model.branch_scales != 1.0).any():
            raise DomainError("skip_scale and branch_scale are 1 with experts that are delayed")
        late = [bool(getattr(block, "delayed", False)) for block in model.ffns]
        if late[-1] or any(map(all, itertools.pairwise(late))):
            raise DomainError("ffn: delayed experts need a layer behind them without such experts")

    def width(self, model: Transformer) -> int:
        """Width of an expert's hidden layer."""
        return self.d_ff or model.d_ff or 0

    def router_entries(self, model: Transformer) -> float:
        """Variance of the router matrix."""
        return 1 / model.d_model if self.router_variance is None else self.router_variance

    def shapes(self, model: Transformer) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of one expert, the shared expert and the routers."""
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
