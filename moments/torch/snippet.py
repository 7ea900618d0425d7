"""A plan as code to paste, and as a table of every tensor. Needs no framework itself."""

from __future__ import annotations

import math
import pprint
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import domain_error
from ..files import as_frame
from ..formulas.checks import check_choice
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from .entries import TRUNCATION, truncated_variance

if TYPE_CHECKING:
    import pandas

FRAMEWORKS = ("pytorch",)
TABLES = ("token", "position", "segment", "patch", "class")

ENCODER_NAMES = {
    "layers.{layer}.self_attn.in_proj_weight": "query+key+value",
    "layers.{layer}.self_attn.out_proj.weight": "output",
    "layers.{layer}.linear1.weight": "ffn_in",
    "layers.{layer}.linear2.weight": "ffn_out",
}
"""Names of nn.TransformerEncoder."""

_ENCODER_BIASES = {
    "layers.{layer}.self_attn.in_proj_bias": "query.bias+key.bias+value.bias",
    "layers.{layer}.self_attn.out_proj.bias": "output.bias",
    "layers.{layer}.linear1.bias": "ffn_in.bias",
    "layers.{layer}.linear2.bias": "ffn_out.bias",
}

_CODE = '''\
"""Initialisation of {title}."""

import math
import re

import torch

# Variance of the entries of every matrix and bias: one number, or one per layer.
VARIANCES = {variances}

# Names of your module's parameters, and what they are; {{layer}} counts from 0.
NAMES = {names}
{scales}

@torch.no_grad()
def initialize(module, seed=0):
    """Draw every named tensor, zero every other bias, set every norm to gain 1 and bias 0."""
    generator = torch.Generator().manual_seed(seed)
    owners = dict(module.named_modules())
    missing = set(NAMES)
    for name, parameter in module.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        if parameter.ndim == 1:
            is_gain = "norm" in type(owner).__name__.lower() and name.endswith("weight")
            parameter.fill_(1.0 if is_gain else 0.0)
        for pattern, roles in NAMES.items():
            expression = re.escape(pattern).replace(r"\\{{layer\\}}", r"(?P<layer>\\d+)")
            match = re.fullmatch(expression, name)
            if match is None:
                continue
            missing.discard(pattern)
            layer = int(match.groupdict().get("layer") or 0)
            if layer >= {layers}:
                raise ValueError(f"{{name}} is beyond the {layers} layers of the plan")
            axis = 1 if type(owner).__name__ == "Conv1D" and parameter.ndim > 1 else 0
            roles = roles.split("+")
            for block, role in zip(parameter.chunk(len(roles), dim=axis), roles):
                variance = VARIANCES[role]
                if isinstance(variance, list):
                    variance = variance[layer]
                drawn = torch.randn(block.shape, generator=generator, device="cpu")
                block.copy_(drawn * math.sqrt(variance))
            if getattr(owner, "padding_idx", None) is not None:
                parameter[owner.padding_idx] = 0.0
    if missing:
        raise ValueError(f"no parameter is named {{', '.join(sorted(missing))}}: edit NAMES")
'''

_OUTPUT_SCALE = """
# Multiply the logits, or what the output matrix reads, by
OUTPUT_SCALE = {value}
"""

_LEFT_OUT = """
# Not drawn here, for want of a name above: {roles}.
"""

_SCALES = """
# In the forward pass of layer l, counted from 0, x is the residual stream and f a block:
#     {line}
{constants}
"""

_LINES = {
    "pre": "x = SKIP[l] * x + BRANCH[l] * f({norm})",
    "post": "x = {norm_of_sum}",
    "sandwich": "x = SKIP[l] * x + BRANCH[l] * post_norm(f({norm}))",
    "output": "x = SKIP[l] * x + BRANCH[l] * post_norm(f(x))",
    "none": "x = SKIP[l] * x + BRANCH[l] * f(x)",
}


def snippet(
    plan: Any, framework: str = "pytorch", *, names: Mapping[str, str] | None = None
) -> str:
    """A plan as a script that initialises a module without this package.

    Args:
        plan: a plan of `moments.solve`, or a Transformer.
        framework: "pytorch".
        names: patterns of parameter names with {layer} in them -> role, as for
            `moments.torch.initialize`, layers counted from 0; None: those of nn.TransformerEncoder.
            Biases that the plan draws need theirs ("ffn_in.bias"), those that are zero do not.

    Returns:
        Python source with a function `initialize(module, seed=0)`, which raises a ValueError where
        a pattern of `names` fits no parameter or the module is deeper than the plan. Residual
        scales and the factor on the logits stand in it as constants, with the line of a forward
        pass that uses them; tables of the plan that have no name, as a comment.

    Raises:
        DomainError: another framework, no plan, a role without a variance, or a bias that the plan
            draws and `names` leaves out.
    """
    check_choice("framework", framework, FRAMEWORKS)
    model = _model(plan)
    drawn = [f"{name}.bias" for name, variance in _biases(model).items() if np.any(variance)]
    given = dict(ENCODER_NAMES if names is None else names)
    if names is None:
        given |= {k: v for k, v in _ENCODER_BIASES.items() if set(v.split("+")) & set(drawn)}
    roles = list(dict.fromkeys(role for value in given.values() for role in value.split("+")))
    if left := [role for role in drawn if role not in roles]:
        raise domain_error(
            "names",
            f"nothing for {', '.join(left)}",
            "a pattern for every bias that the plan draws",
            "name them, or pass the model with biases=None, which is zero biases",
        )
    variances = {role: _variance(model, role) for role in roles}
    factor = 1.0 if model.head is None else model.head.output_scale
    on_logits = "" if factor == 1 else _OUTPUT_SCALE.format(value=_source(factor))
    return _CODE.format(
        title=f"a transformer: {model.layers} layers, d_model {model.d_model}, norm {model.norm!r}",
        variances=_source(variances),
        names=_source(given),
        layers=model.layers,
        scales=_scales(model) + on_logits + _left_out(model, roles),
    )


def _left_out(model: Transformer, roles: list[str]) -> str:
    """Tables that the plan draws and no name stands for."""
    drawn = _tables(model).items()
    rows = [f"{table} (variance {value:.6g})" for table, value in drawn if table not in roles]
    return _LEFT_OUT.format(roles=", ".join(rows)) if rows else ""


def _tables(model: Transformer) -> dict[str, float]:
    found = {table: getattr(model.embedding, f"{table}_variance", None) for table in TABLES}
    return {table: float(variance) for table, variance in found.items() if variance}


def _model(plan: Any) -> Transformer:
    model = plan if isinstance(plan, Transformer) else getattr(plan, "model", None)
    if not isinstance(model, Transformer):
        raise domain_error("plan", type(plan).__name__, "a plan of moments.solve or a Transformer")
    return model


def _biases(model: Transformer) -> dict[str, Any]:
    return {} if model.biases is None else model.biases.to_dict()


def _variance(model: Transformer, role: str) -> float | list[float]:
    layers = range(1, model.layers + 1)
    if role in MATRICES:
        values = [getattr(model.layer_weights(n), role) for n in layers]
        return values[0] if len(set(values)) == 1 else values
    if role.endswith(".bias") and role.removesuffix(".bias") in MATRICES:
        variance = _biases(model).get(role.removesuffix(".bias"))
        return 0.0 if variance is None else variance
    variance = getattr(model.embedding, f"{role}_variance", None)
    if variance is None:
        allowed = f"one of {', '.join(MATRICES)}, or a table of the plan's embedding"
        raise domain_error("names: role", role, allowed)
    return float(variance)


def _scales(model: Transformer) -> str:
    constants = {
        "SKIP": model.skip_scales,
        "BRANCH": model.branch_scales,
        "NORM_SCALE": model.norm_scales,
        "TEMPERATURE": model.temperatures,
    }
    used = {name: values for name, values in constants.items() if not np.all(values == 1)}
    if not used:
        return ""
    scaled = "NORM_SCALE[l] * norm({x})" if "NORM_SCALE" in used else "norm({x})"
    line = _LINES.get(model.norm, "SKIP[l] multiplies x, BRANCH[l] a block's output").format(
        norm=scaled.format(x="x"), norm_of_sum=scaled.format(x="SKIP[l] * x + BRANCH[l] * f(x)")
    )
    for name in ("SKIP", "BRANCH"):
        if name not in used:
            line = line.replace(f"{name}[l] * ", "")
    if "TEMPERATURE" in used:
        line += "\n# and attention logits are divided by sqrt(d_head) * TEMPERATURE[l]"
    if any(values.ndim > 1 for values in used.values()):
        line += "\n# (pairs: attention block, feed-forward block)"
    lines = [f"{name} = {_source(values.tolist())}" for name, values in used.items()]
    return _SCALES.format(line=line, constants="\n".join(lines))


def _source(value: Any) -> str:
    """Python source of numbers, strings, lists and dictionaries."""
    return pprint.pformat(value, width=96, compact=True, sort_dicts=False)


def tensor_table(plan: Any) -> pandas.DataFrame:
    """Every matrix and table of a plan, and the parameter of each way to draw it.

    Columns: layer (0: the embedding), tensor, fan_in, fan_out, variance, normal_deviation,
    uniform_bound (entries in +-bound), truncated_deviation (of a normal that is then cut at two of
    these deviations).

    Raises:
        DomainError: no plan and no Transformer.
    """
    model = _model(plan)
    rows = [(0, name, 0, model.d_model, value) for name, value in _tables(model).items()]
    for n in range(1, model.layers + 1):
        weights = model.layer_weights(n)
        shapes = model.matrix_shapes.items()
        rows += [(n, name, *shape, getattr(weights, name)) for name, shape in shapes]
    frame = as_frame(rows, columns=["layer", "tensor", "fan_in", "fan_out", "variance"])
    deviation = np.sqrt(frame["variance"])
    frame["normal_deviation"] = deviation
    frame["uniform_bound"] = math.sqrt(3) * deviation
    frame["truncated_deviation"] = deviation / math.sqrt(truncated_variance(TRUNCATION))
    return frame
