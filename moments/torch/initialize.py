"""Write a plan into a module: every variance into its weights, every scale into its sums."""

from __future__ import annotations

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
from .expectation import Scales, expected_variance, scales_of
from .roles import ModuleBranch, ModuleRoles, Role, block_of, tensors_of, unit_gain
from .running import padding_rows
from .scales import (
    FOLDED,
    AppliedScales,
    DropProbability,
    applied_scales,
    apply_scales,
    drop_probabilities,
    drops_behind,
    logit_factor,
)
from .tensors import SLACK, attention_of, temperatures

if TYPE_CHECKING:
    import pandas

READ = 1e-6
"""Relative error with which a factor is read off a run, whose sums are in double precision."""


@dataclass(frozen=True)
class Initialization:
    """What `initialize` wrote.

    Attributes:
        rows: (layer, role, parameter, variance) of every matrix and vector written.
        left: parameters that the plan says nothing of, or whose role is not known, as they were.
        scales: the hooks that carry residual and norm scales, also at `module.moments_scales`;
            None where the plan needs none.
        unlike: fields in which the plan is not what the module is, where that changes no signal or
            could not be read, a phrase each.
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
    written where the plan declares them. Residual scales, LayerNorm Scaling and the head's output
    scale become forward hooks, in `module.moments_scales`, unless the module has parameters for
    them; temperatures go into the attention modules' `scaling`.

    Args:
        module: any that can be read from one pass.
        plan: a plan of `moments.solve`, a Transformer, or a scheme's name, which is then applied to
            the module's own architecture.
        seed: the same seed gives the same entries, for each parameter on its own.
        distribution: "normal", "uniform", "truncated" or "orthogonal"; None: as the plan's weights
            declare. Tables and biases are normal where it is "orthogonal".
        batch: what the module may be run on, as in `moments.torch.measure`, to find out whether it
            drops a block's output inside a function; None: random input, where it says what it
            takes.
        options: of the scheme, where the plan is a scheme's name.

    Returns:
        An `Initialization`: what was written, parameter by parameter.

    Raises:
        DomainError: a plan of another architecture, or something the module cannot carry, named
            with the reason; nothing is written then.
        MomentsError: the module cannot be read.
    """
    check_count("seed", seed, least=0)
    of = fitted(module, plan, options, batch)
    module, roles, model = of.module, of.reading.roles, of.model
    chosen = (
        (model.weights and model.weights.distribution) if distribution is None else distribution
    )
    check_choice("distribution", chosen, DISTRIBUTIONS)
    tensors = tensors_of(module)
    blocks = {role: block_of(tensors, role) for role in (*roles.roles, *roles.scales)}
    applied = _attached(of, batch)
    scales = scales_of(model)[""]
    rows, padding = [], padding_rows(module)
    with torch.no_grad():
        for role in roles.roles:
            variance = expected_variance(model, role)
            if variance is None:
                continue
            whole = tensors[role.parameter]
            _write(module, role, blocks[role], variance, seed, str(chosen), padding.get(whole))
            rows.append((role.layer, role.full_name, role.label, variance))
        for role in roles.scales:
            values = scales.skip if role.name.endswith("skip_scale") else scales.branch
            blocks[role].fill_(float(values[role.layer - 1, _column(role)]))
    written = {name for _, _, name, _ in rows} | {role.parameter for role in roles.scales}
    untouched = [role.label for role in roles.roles if role.label not in written]
    unlike = tuple(map(phrase_of, of.departures))
    return Initialization(tuple(rows), (*untouched, *roles.unidentified), applied, unlike)


def attach(
    module: nn.Module, plan: Any, *, batch: Any = None, options: Mapping[str, Any] | None = None
) -> AppliedScales | None:
    """Put a plan's scales onto a module whose weights are there already, and leave these alone.

    For a module rebuilt from stored weights: hooks and attention temperatures are in no state_dict.

    Args:
        module, plan, batch, options: as in `initialize`.

    Returns:
        The hooks, also at `module.moments_scales`; None where the plan needs none.

    Raises:
        DomainError: as `initialize`, or the module was folded: its weights carry the scales.
        MomentsError: the module cannot be read.
    """
    of = fitted(module, plan, options, batch)
    if getattr(of.module, FOLDED, False):
        raise DomainError("the module was folded: its weights carry the scales already")
    return _attached(of, batch)


def _attached(of: Fitted, batch: Any) -> AppliedScales | None:
    """Hooks and temperatures, decided before the first is placed."""
    module, roles, model, described = of.module, of.reading.roles, of.model, of.described
    batch = of.reading.example if batch is None else batch
    stacks = scales_of(model)
    own = _check_scales(roles, stacks[""])
    scalings = _scalings(module, roles, model)
    dropped = (model if described is None else described).dropout > 0

    def drops() -> dict[ModuleBranch, DropProbability | None]:
        if not dropped:
            return {}
        before = applied_scales(module)
        known = {} if before is None else before.dropouts
        behind = drops_behind(module, roles.blocks, batch)
        known = known | drop_probabilities(module, behind - set(known), batch)
        return {block: known.get(block) for block in behind}

    logits = logit_factor(roles, model, described)
    applied = apply_scales(module, roles.blocks, stacks, drops=drops, own=own, logits=logits)
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
    # One stream per seed and parameter, whatever else the module holds.
    entropy = np.random.SeedSequence((seed, zlib.crc32(role.label.encode())))
    state = int(entropy.generate_state(2, np.uint64)[0]) >> 1
    generator = torch.Generator().manual_seed(state)
    if not role.is_matrix and distribution == "orthogonal":
        distribution = "normal"
    rows, columns = block.numel() // block.shape[-1], block.shape[-1]
    if role.is_matrix and block.ndim == 2:  # else of several experts
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
    """Blocks whose scales the module holds itself; refuse a scale that it has no place for."""
    own: dict[tuple[int, int], set[str]] = {}
    for role in roles.scales:
        columns = (0, 1) if role.name in ("skip_scale", "branch_scale") else (_column(role),)
        for column in columns:
            own.setdefault((role.layer, column), set()).add(role.name.rpartition(".")[2])
    for layer, column in ((n + 1, c) for n in range(roles.layers) for c in (0, 1)):
        there = own.get((layer, column))
        *wanted, before, after = scales.at(layer, column)
        named = zip(("skip_scale", "branch_scale"), wanted, strict=True)
        lacking = [name for name, value in named if value != 1 and name not in (there or ())]
        if there and lacking:
            raise DomainError(
                f"layer {layer}: the module has a parameter for {', '.join(there)} but none for "
                f"{', '.join(lacking)}"
            )
        if not roles.blocks and ((lacking and not there) or (before, after) != (1, 1)):
            raise DomainError(
                f"layer {layer}: the plan scales residual sums or norms, and no submodule of "
                "this module takes or gives them, where a hook could act"
            )
    return set(own)


def _scalings(
    module: nn.Module, roles: ModuleRoles, model: Transformer
) -> list[tuple[nn.Module, float]]:
    """Attention modules whose `scaling` must change, and to what: logits are q k / (sqrt(d_head)
    temperature).

    Raises:
        DomainError: the temperatures differ from the module's own and cannot be set.
    """
    changes = []
    for role, wanted, present in temperatures(roles, model):
        holder = _holder(module, role)
        same = READ if holder is not None else SLACK
        if np.isclose(1.0 if present is None else present, wanted, rtol=same):
            continue
        if holder is None or present is None:
            raise DomainError(
                f"{role.stack}layer {role.layer}, {attention_of(role)}: the plan's temperature "
                f"{wanted:g} has no place in this module, whose attention has no attribute "
                "'scaling'; divide the query weights' variance by its square instead"
            )
        changes.append((holder, holder.scaling * present / wanted))
    return changes


def _holder(module: nn.Module, role: Role) -> nn.Module | None:
    """The module nearest to a matrix that has a numeric `scaling`."""
    path = role.parameter
    while path := path.rpartition(".")[0]:
        part = module.get_submodule(path)
        if isinstance(getattr(part, "scaling", None), float):
            return part
    return None
