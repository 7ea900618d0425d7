"""Components of a block of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...engine.composition import Chain, Component, Parallel
from ...errors import domain_error
from ...model.experts import SHARED, Experts
from .mixture import Mixture
from .routing import Router

if TYPE_CHECKING:
    from ..architecture import Blocks

GATE = Router(1, 1, logistic=True, normalised="none")
"""A sigmoid in front of one expert that every token passes."""


def router_of(block: Experts) -> Router:
    """How a block's gates follow from its logits."""
    return Router(
        block.experts,
        block.chosen,
        block.rule != "softmax",
        block.normalised,
        block.scale,
        block.groups,
        block.kept_groups,
        block.group_best,
    )


def experts(parts: Blocks, block: Experts) -> Iterator[Component]:
    """The mixture, and the shared expert beside it."""
    model = parts.model
    if parts.theory != "refined":
        raise domain_error("theory", parts.theory, "'refined' with experts")
    hidden = parts._hidden(block.width(model), "", "", block.shift, block.clamp)
    out = parts._linear("", "ffn_out", block.width(model), model.d_model)
    bias = block.router_bias_variance
    routed = Mixture(
        "ffn.experts",
        router_of(block),
        Chain((*hidden, out)),
        model.d_model,
        block.router_entries(model),
        bias or 0.0,
        has_bias=bias is not None,
        inward=block.rule == "sigmoid_input",
    )
    if not block.shared:
        yield routed
        return
    gated = block.shared_gate_variance is not None
    hidden = parts._hidden(block.shared, SHARED, "", block.shift, block.clamp)
    label = "" if gated else "ffn.shared"
    out = parts._linear(label, f"{SHARED}ffn_out", block.shared, model.d_model)
    shared: Component = Chain((*hidden, out))
    if block.shared_gate_variance is not None:
        every, name = (model.d_model, block.shared_gate_variance), f"{SHARED}router"
        shared = Mixture("ffn.shared", GATE, Chain((*hidden, out)), *every, name=name)
    yield Parallel((routed, shared))
