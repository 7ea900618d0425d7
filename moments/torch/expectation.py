"""The model of a plan, its scales and the variance that it gives to every role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error
from ..model.experts import SHARED, Experts
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Biases
from ..prediction.draws import Array
from ..scheme.registry import scheme
from .roles import ENCODER, Role

OUTSIDE = {
    "token": ("embedding", "token_variance"),
    "position": ("embedding", "position_variance"),
    "segment": ("embedding", "segment_variance"),
    "patch": ("embedding", "patch_variance"),
    "class": ("embedding", "class_variance"),
    "factor": ("embedding", "factor_variance"),
    "relative_bias": ("relative_bias", "variance"),
    "head": ("head", "weight_variance"),
    "head.factor": ("head", "factor_variance"),
    "head.transform": ("head", "transform_variance"),
    "patch.bias": ("embedding", "bias_variance"),
    "head.transform.bias": ("head", "transform_bias_variance"),
}
"""Role -> field of the model, and the field in it that is the role's variance."""


def model_of(
    plan: Any,
    described: Transformer | None = None,
    options: Mapping[str, Any] | None = None,
    why: str = "",
) -> Transformer:
    """The model of a plan: its `model`, the plan if it is a Transformer, or the model `described`
    with the scheme of that name.

    Args:
        options: of the scheme.
        why: reason why nothing is described, if so.

    Raises:
        DomainError: none of these, or a scheme for a module whose architecture is not known.
    """
    if options and not isinstance(plan, str):
        raise domain_error("options", dict(options), "for a scheme by its name, nothing else")
    if isinstance(plan, Transformer):
        return plan
    if isinstance(plan, str):
        if described is None:
            raise DomainError(
                f"scheme {plan!r} needs the module's architecture, which could not be read"
                f"{why and f' ({why})'}: pass moments.Transformer(...).with_scheme({plan!r})"
            )
        scheme(plan)  # raises for an unknown name
        try:
            return with_zero_biases(described).with_scheme(plan, **(options or {}))
        except DomainError as error:
            raise DomainError(
                f"{error}; to give the scheme your input, pass plan = "
                f"moments.solve(model, {plan!r}, ...) instead of its name"
            ) from None
    model = getattr(plan, "model", None)
    if isinstance(model, Transformer):
        return model
    raise domain_error(
        "plan", type(plan).__name__, "a plan of moments.solve, a Transformer or a scheme's name"
    )


def with_zero_biases(model: Transformer) -> Transformer:
    """The model with biases that start at zero, as schemes have them."""
    changes: dict[str, Any] = {}
    if model.biases is not None:
        names = (name for name, value in model.biases.to_dict().items() if value is not None)
        changes["biases"] = Biases.of(*names)
    if model.encoder is not None:
        changes["encoder"] = with_zero_biases(model.encoder)
    return model.replace(**changes)


@dataclass(frozen=True)
class Scales:
    """Multipliers by layer and block, each (N, 2), with the factors of LayerNorm Scaling."""

    skip: Array
    branch: Array
    norm_input: Array
    norm_output: Array

    @classmethod
    def of(cls, model: Transformer) -> Scales:
        """The scales of a model."""
        skip, branch = (model.by_block(name).copy() for name in ("skip_scale", "branch_scale"))
        before, after = np.ones_like(skip), np.ones_like(skip)
        factor = model.norm_scales[:, None]
        where = model.layernorm_scaling
        if where in (True, "after-norm"):
            after = after * factor
        elif where in ("attention-only", "ffn-only"):
            column = int(where == "ffn-only")
            after[:, column] *= factor[:, 0]
        elif where == "before-norm":
            before = before * factor
        elif where == "after-block":
            branch = branch * factor
        elif where == "after-residual":
            skip, branch = skip * factor, branch * factor
        return cls(skip, branch, before, after)

    def at(self, layer: int, column: int) -> tuple[float, float, float, float]:
        """Skip, branch, norm input and norm output of one block."""
        place = layer - 1, column
        skip, branch = float(self.skip[place]), float(self.branch[place])
        return skip, branch, float(self.norm_input[place]), float(self.norm_output[place])


def scales_of(model: Transformer) -> dict[str, Scales]:
    """The scales of every stack."""
    return {stack: Scales.of(of_stack) for stack, of_stack in stacks_in(model).items()}


def expected_variance(model: Transformer, role: Role) -> float | None:
    """Mean square of a role's entries; None if the model says nothing of it."""
    matrix, _, kind = role.name.rpartition(".")
    model = model_of_stack(model, role.stack)
    if 1 <= role.layer <= model.layers:
        if role.name in MATRICES:
            return float(getattr(model.layer_weights(role.layer), role.name))
        mixture, block = role.name.startswith((SHARED, "router")), model.ffns[role.layer - 1]
        if mixture and not isinstance(block, Experts):
            return None
        if role.name == "router.bias" and isinstance(block, Experts):
            return block.router_bias_variance or 0.0
        if role.name == "attention_sink":
            return model.attention_sinks[role.layer - 1]
        if kind == "bias":
            biases = {} if model.biases is None else model.biases.layer(role.layer)
            return float(biases.get(matrix.removeprefix(SHARED), 0.0))
        if mixture:
            return model.variances_of(role.layer).get(role.name)
        if role.name in ("attention.norm.gain", "cross.norm.gain", "ffn.norm.gain"):
            column = int(matrix.startswith("ffn"))
            return float(model.norm_gains[role.layer - 1, column]) ** 2
    if role.name.startswith("head") and model.head is None:
        return None
    if role.name in OUTSIDE:
        part, name = OUTSIDE[role.name]
        # The variance of a table that the model does not declare is 0 or None.
        variance = getattr(getattr(model, part), name, None)
        return float(variance) if variance else 0.0 if kind == "bias" else None
    if kind == "gain":
        of_head = role.name == "final.norm.gain" and model.head is not None
        return float(model.head.norm_gain) ** 2 if of_head else 1.0
    return 0.0 if kind == "bias" else None


def stacks_in(model: Transformer) -> dict[str, Transformer]:
    """Prefix of names -> the model ("") and its encoder."""
    return {"": model} if model.encoder is None else {"": model, ENCODER: model.encoder}


def model_of_stack(model: Transformer, stack: str) -> Transformer:
    """The model, or its encoder."""
    if not stack:
        return model
    if model.encoder is None:
        raise DomainError("the module has an encoder besides its main stack, the plan has none")
    return model.encoder
