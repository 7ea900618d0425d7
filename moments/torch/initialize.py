"""Write the variances and scales of a plan into a module."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DomainError
from ..files import as_frame
from ..formulas.checks import check_choice, check_count
from ..model.transformer import Transformer
from ..model.weights import DISTRIBUTIONS
from ..simulation.parameters import draw
from .architecture import Fitted, fitted, phrase_of
from .dataflow import ModuleReading
from .expectation import Scales, expected_variance, scales_of
from .roles import ModuleRoles, Role, block_of, tensors_of, unit_gain
from .running import padding_rows
from .scales import (
    FOLDED,
    AppliedScales,
    apply_scales,
    logit_factor,
)
from .tensors import SLACK, attention_of, temperatures

if TYPE_CHECKING:
    import pandas

READ = 1e-6
"""Relative error of a factor that is measured with sums in double precision."""


@dataclass(frozen=True)
class Initialization:
    """The result of `initialize`.

    Attributes:
        rows: (layer, role, parameter, variance) of every matrix and vector written.
        left: unchanged parameters, of which the plan says nothing or whose role is unknown.
        scales: the hooks that carry residual and norm scales, also at `module.moments_scales`;
            None if the plan needs none.
        unlike: fields in which the plan differs from the module without changing the signal, or
            that could not be read, in phrases.
    """

    rows: tuple[tuple[int, str, str, float], ...]
    left: tuple[str, ...]
    scales: AppliedScales | None
    unlike: tuple[str, ...] = ()

    def to_frame(self) -> pandas.DataFrame:
        """One row per matrix or vector written: layer, role, parameter, variance."""
        return as_frame(list(self.rows), columns=["layer", "role", "parameter", "variance"])

    def __str__(self) -> str:
        lines = [f"{len(self.rows)} tensors written"]
        if self.scales is not None:
            lines.append(str(self.scales))
        if self.left:
            lines.append(f"left as they were: {', '.join(self.left)}")
        lines += [f"not as planned: {phrase}" for phrase in self.unlike]
        return "\n".join(lines)


def initialize(
    module: nn.Module,
    plan: Any,
    seed: int = 0,
    distribution: str | None = None,
    *,
    batch: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Initialization:
    """Write a plan's weights and scales into a module, in place.

    Matrices get entries of mean zero and the plan's variance, biases are zero (or as the plan
    declares them), norms gain 1 and bias 0. Tables (padding rows stay zero) and an untied head are
    written if the plan declares them. Residual scales, LayerNorm Scaling and the head's output
    scale become forward hooks, in `module.moments_scales`, unless the module has parameters for
    them; temperatures change the attention modules' `scaling`.

    Args:
        module: any that can be read from one pass.
        plan: a plan of `moments.solve`, a Transformer, or a scheme's name, which is then applied to
            the module's own architecture.
        seed: the same seed gives the same entries, for each parameter on its own.
        distribution: "normal", "uniform", "truncated" or "orthogonal" (tables and biases are normal
            then); None: that of the plan's weights.
        batch: input of the module, as in `moments.torch.measure`, with which dropouts inside
            functions are detected; None: random input.
        options: of the scheme, if the plan is a scheme's name.

    Returns:
        An `Initialization` with what was written into every parameter.

    Raises:
        DomainError: a plan of another architecture, or one that the module cannot carry, with the
            reason; nothing is written then.
        MomentsError: the module cannot be read.
    """
    check_count("seed", seed, least=0)
    fit = fitted(module, plan, options, batch)
    module, roles, model = fit.module, fit.reading.roles, fit.model
    if distribution is None and model.weights is not None:
        distribution = model.weights.distribution
    check_choice("distribution", distribution, DISTRIBUTIONS)
    tensors = tensors_of(module)
    blocks = {role: block_of(tensors, role) for role in (*roles.roles, *roles.scales)}
    applied = _attached(fit, batch)
    scales = scales_of(model)[""]
    rows, padding = [], padding_rows(module)
    with torch.no_grad():
        for role in roles.roles:
            variance = expected_variance(model, role)
            if variance is None:
                continue
            row = padding.get(tensors[role.parameter])
            _write(module, role, blocks[role], variance, seed, str(distribution), row)
            rows.append((role.layer, role.full_name, role.label, variance))
        for role in roles.scales:
            blocks[role].fill_(float(scales.branch[role.layer - 1, _column(role)]))
    written = {name for _, _, name, _ in rows} | {role.parameter for role in roles.scales}
    untouched = [role.label for role in roles.roles if role.label not in written]
    unlike = tuple(map(phrase_of, fit.departures))
    return Initialization(tuple(rows), (*untouched, *roles.unidentified), applied, unlike)


def attach(
    module: nn.Module, plan: Any, *, batch: Any = None, options: Mapping[str, Any] | None = None
) -> AppliedScales | None:
    """Add a plan's scales to a module and leave its weights unchanged.

    For a module rebuilt from stored weights: hooks and attention temperatures are in no state_dict.

    Args:
        module, plan, batch, options: as in `initialize`.

    Returns:
        The hooks, also at `module.moments_scales`; None if the plan needs none.

    Raises:
        DomainError: as `initialize`, or the module was folded: its weights carry the scales.
        MomentsError: the module cannot be read.
    """
    fit = fitted(module, plan, options, batch)
    if getattr(fit.module, FOLDED, False):
        raise DomainError("the module was folded: its weights carry the scales already")
    return _attached(fit, batch)


def _attached(fit: Fitted, batch: Any) -> AppliedScales | None:
    """Add hooks and temperatures, after a check that all of them are possible."""
    module, reading, model, described, _ = fit
    roles = reading.roles
    batch = reading.example if batch is None else batch
    stacks = scales_of(model)
    own = _check_scales(roles, stacks[""])
    scalings = _scalings(module, reading, model)
    dropped = (model if described is None else described).dropout > 0
    logits = logit_factor(module, reading, model, described)
    applied = apply_scales(module, roles.blocks, stacks, own, logits, batch, drops=dropped)
    if hasattr(module, FOLDED):
        delattr(module, FOLDED)
    for part, scaling in scalings:
        part.scaling = scaling
    return applied


def _write(
    module: nn.Module,
    role: Role,
    block: Tensor,
    variance: float,
    seed: int,
    distribution: str,
    padding: int | None,
) -> None:
    if role.name.endswith("norm.gain"):
        block.fill_(variance**0.5 - (0.0 if unit_gain(module, role) else 1.0))
        return
    if variance == 0:
        block.zero_()
        return
    # One random stream per seed and parameter, independent of the module's other parameters.
    entropy = np.random.SeedSequence((seed, zlib.crc32(role.label.encode())))
    state = int(entropy.generate_state(2, np.uint64)[0]) >> 1
    generator = torch.Generator().manual_seed(state)
    if not role.is_matrix and distribution == "orthogonal":
        distribution = "normal"
    rows, columns = block.numel() // block.shape[-1], block.shape[-1]
    if role.is_matrix and block.ndim == 2:  # not of several experts
        rows, columns = role.fan_out, role.fan_in
        if role.transposed:
            rows, columns = columns, rows
    drawn = draw((rows, columns), variance, generator, torch.float32, distribution)
    block.copy_(drawn.detach().reshape(block.shape))
    if padding is not None:
        block[padding].zero_()


def _column(role: Role) -> int:
    return int(role.name.startswith("ffn"))


def _check_scales(roles: ModuleRoles, scales: Scales) -> set[tuple[int, int]]:
    """Blocks with a parameter for their branch scale; a DomainError for scales without a place."""
    own = {(role.layer, _column(role)) for role in roles.scales}
    for place in itertools.product(range(1, roles.layers + 1), (0, 1)):
        skip, branch, *norm = scales.at(*place)
        if place in own and skip != 1:
            raise DomainError(
                f"layer {place[0]}: the module has a parameter for branch_scale but none for "
                "skip_scale"
            )
        scaled = (place not in own and (skip, branch) != (1, 1)) or norm != [1, 1]
        if scaled and not roles.blocks:
            raise DomainError(
                f"layer {place[0]}: the plan scales residual sums or norms, and no submodule of "
                "this module takes or gives them, where a hook could act"
            )
    return own


def _scalings(
    module: nn.Module, reading: ModuleReading, model: Transformer
) -> list[tuple[nn.Module, float]]:
    """Attention modules whose `scaling` must change, with the new one: logits are
    q k / (sqrt(d_head) temperature).

    Raises:
        DomainError: the temperatures differ from the module's own and cannot be set.
    """
    changes = []
    for role, planned, present in temperatures(reading.roles, reading.sums, model):
        attention = _scaled_attention(module, role)
        tolerance = READ if attention is not None else SLACK
        if np.isclose(1.0 if present is None else present, planned, rtol=tolerance):
            continue
        if attention is None or present is None:
            raise DomainError(
                f"{role.stack}layer {role.layer}, {attention_of(role)}: the plan's temperature "
                f"{planned:g} has no place in this module, whose attention has no attribute "
                "'scaling'; divide the query weights' variance by its square instead"
            )
        changes.append((attention, attention.scaling * present / planned))
    return changes


def _scaled_attention(module: nn.Module, role: Role) -> Any:
    """The innermost submodule around a matrix that has a numeric `scaling`; None without one."""
    path = role.parameter
    while path := path.rpartition(".")[0]:
        part = module.get_submodule(path)
        if isinstance(getattr(part, "scaling", None), float):
            return part
    return None
