"""Absorb residual and norm scales into weights, gains and epsilons, so that no hooks are needed.

Pre-LN. Let L be the product of all skip scales so far and z = y / L the stream of code without
scales. Then z' = z + (beta / L') f(norm(y)) with L' = lambda L, and norm(y) at epsilon e equals
norm(z) at e / L^2. Branches get the factor beta / L', norms (also the final one) epsilon e / L^2.

Post-LN. norm(lambda x + beta f) at e equals norm(x + (beta / lambda) f) at e / lambda^2; L is 1
again behind it.

LayerNorm Scaling behind a norm is absorbed in that norm's gain and bias, a factor of the logits in
the head's matrix, or, if that is the token table, in the norm before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import DomainError, domain_error
from ..model.transformer import Transformer
from .architecture import fitted
from .expectation import Scales, scales_of
from .roles import ModuleBranch, ModuleRoles, Role, block_of, tensors_of, unit_gain
from .scales import (
    FOLDED,
    LogitFactor,
    ScaleRow,
    applied_scales,
    logit_factor,
    natives,
    remove_scales,
)

_OUTPUTS = {"attention": "output", "cross": "cross_output", "ffn": "ffn_out"}

Step = Callable[[], object]


def fold(module: nn.Module, plan: Any) -> nn.Module:
    """Absorb a plan's scales into a module, in place, for inference; its output stays the same.

    The hooks of `initialize` are removed. Hidden states between layers are then the declared ones
    up to a factor each, and further training would differ. Epsilons of norms are changed, which are
    in no state_dict: a module rebuilt from stored weights has the old ones.

    Args:
        module: initialised with the plan, trained or not.
        plan: as given to `initialize`.

    Returns:
        The module.

    Raises:
        DomainError: the scales cannot be absorbed, with the reason (no norm to make the stream's
            size irrelevant, no gain to hold a factor), or the module was folded before; nothing is
            changed then.
    """
    if getattr(module, FOLDED, False):
        raise DomainError("the module was folded before: fold a copy of the unfolded one")
    module, reading, model, described, _ = fitted(module, plan)
    roles = reading.roles
    if not roles.blocks:
        raise DomainError("no submodule takes or gives the module's residual sums and norms")
    logits = logit_factor(module, reading, model, described)
    _check_hooks(module, model, logits)
    steps = [
        step
        for stack, scales in scales_of(model).items()
        for step in _Plan(module, roles, stack, scales).steps()
    ]
    if logits is not None:
        steps += list(_Plan(module, roles, "", scales_of(model)[""]).logits(logits.factor))
    remove_scales(module)
    with torch.no_grad():
        for step in steps:
            step()
    setattr(module, FOLDED, True)
    return module


def _check_hooks(module: nn.Module, model: Transformer, logits: LogitFactor | None) -> None:
    """Raise a DomainError unless the module's hooks, if any, are the plan's."""
    applied = applied_scales(module)
    if applied is None:
        return
    if applied.logits != 1 and (logits is None or applied.logits != logits.factor):
        planned = 1.0 if logits is None else logits.factor
        raise domain_error(
            "factor on the logits",
            planned,
            f"the {applied.logits:g} that the module's hook applies",
        )
    scales = scales_of(model)
    for row in applied.rows:
        planned_scales = scales[row.stack].at(row.layer, int(row.block == "ffn"))
        for name, scale in zip(ScaleRow._fields[3:], planned_scales, strict=True):
            present = getattr(row, name)
            if present not in (1.0, scale):
                raise domain_error(
                    f"{name} scale of the plan, layer {row.layer}",
                    scale,
                    f"the {present:g} that the module's hooks apply",
                )


class _Plan:
    """The changes of one stack, as functions to be called once all of them are known to exist."""

    def __init__(self, module: nn.Module, roles: ModuleRoles, stack: str, scales: Scales) -> None:
        self.module, self.scales = module, scales
        self.blocks = [block for block in roles.blocks if block.stack == stack]
        self.parameters = roles.scales if not stack else ()
        self.last = max((block.layer for block in self.blocks), default=0)
        self.tensors, self.natives = tensors_of(module), natives(module, self.blocks)
        self.roles = {(role.layer, role.name): role for role in roles.roles if role.stack == stack}
        self.seen: set[str] = set()

    def steps(self) -> Iterable[Step]:
        size = 1.0  # L
        for place, block in enumerate(self.blocks):
            skip, branch, before, after = self.scales.at(block.layer, block.column)
            branch /= self.natives[block]
            if block.placement == "none" and skip * size != 1:
                raise DomainError(
                    f"layer {block.layer}, {block.name}: without a norm the block's output depends "
                    "on the size of the stream, so that a skip scale cannot be absorbed"
                )
            size_after = size * skip
            if block.norm is not None:
                input_size = size_after if block.placement == "post" else size
                yield from self._norm(block, before * input_size, after)
            yield from self._branch(block, branch / size_after)
            following = self.blocks[place + 1] if place + 1 < len(self.blocks) else None
            one_sum = block.parallel and following is not None and following.layer == block.layer
            if not one_sum:
                size = 1.0 if block.placement == "post" else size_after
        if size != 1:
            yield from self._final(size)
        for role in self.parameters:
            yield functools.partial(block_of(self.tensors, role).fill_, 1.0)

    def _norm(self, block: ModuleBranch, size: float, after: float) -> Iterable[Step]:
        """A block's norm; `size`: of its input over that without scales, `after`: the factor behind
        it."""
        assert block.norm is not None
        if block.norm in self.seen:
            return
        self.seen.add(block.norm)
        if size != 1:
            yield self._epsilon(block.norm, size)
        if after != 1:
            where = f"layer {block.layer}, {block.name}"
            yield from self._gain(block.layer, f"{block.name}.norm", after, where)

    def _branch(self, block: ModuleBranch, factor: float) -> Iterable[Step]:
        if factor == 1:
            return
        where = f"layer {block.layer}, {block.name}"
        if block.placement in ("sandwich", "output"):
            yield from self._gain(block.layer, f"{block.name}.post_norm", factor, where)
            return
        name = _OUTPUTS[block.name]
        role = self.roles.get((block.layer, name))
        if role is None:
            raise DomainError(f"{where}: no {name} matrix that could hold the branch scale")
        yield self._times(role, factor)
        yield from self._bias(self.roles.get((block.layer, f"{name}.bias")), factor)

    def _final(self, size: float) -> Iterable[Step]:
        role = self.roles.get((self.last + 1, "final.norm.gain"))
        if role is None:
            raise DomainError(
                "no final norm with a gain stands behind the last layer, so that the size of "
                "the stream, which the skip scales set, would be lost"
            )
        yield self._epsilon(role.parameter.rpartition(".")[0], size)

    def logits(self, factor: float) -> Iterable[Step]:
        """A factor of the logits: in the head's own matrix, else in the norm before it."""
        layer = self.last + 1
        yield from self._bias(self.roles.get((layer, "head.bias")), factor)
        head = self.roles.get((layer, "head"))
        if head is not None:
            yield self._times(head, factor)
            return
        named = ((layer, f"{site}.norm.gain") for site in ("head", "final"))
        gain = next((self.roles[key] for key in named if key in self.roles), None)
        if gain is None:
            raise DomainError(
                "the head's matrix is the token table and no norm with a gain stands before it, so "
                f"that the factor {factor:g} on the logits has no place"
            )
        yield from self._norm_times(gain, factor)

    def _epsilon(self, path: str, size: float) -> Step:
        norm = self.module.get_submodule(path)
        name = next((n for n in ("eps", "variance_epsilon") if hasattr(norm, n)), None)
        if name is None:
            raise DomainError(f"{path}: a norm without an epsilon that could be adapted")
        epsilon = getattr(norm, name)
        if epsilon is None:
            epsilon = torch.finfo(next(norm.parameters()).dtype).eps
        return lambda: setattr(norm, name, float(epsilon) / size**2)

    def _gain(self, layer: int, site: str, factor: float, where: str) -> Iterable[Step]:
        gain = self.roles.get((layer, f"{site}.gain")) or (
            self.roles.get((layer, "attention.norm.gain")) if site == "ffn.norm" else None
        )
        if gain is None:
            raise DomainError(
                f"{where}: its norm has no gain that could hold the factor {factor:g}"
            )
        yield from self._norm_times(gain, factor)

    def _times(self, role: Role, factor: float) -> Step:
        return functools.partial(block_of(self.tensors, role).mul_, factor)

    def _bias(self, role: Role | None, factor: float) -> Iterable[Step]:
        if role is not None:
            yield self._times(role, factor)

    def _norm_times(self, gain: Role, factor: float) -> Iterable[Step]:
        """A factor of a norm's gain and bias."""
        yield self._times(gain, factor)
        if not unit_gain(self.module, gain):
            yield functools.partial(block_of(self.tensors, gain).add_, factor - 1)
        yield from self._bias(
            self.roles.get((gain.layer, gain.name.replace(".gain", ".bias"))), factor
        )
