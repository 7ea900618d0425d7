"""Hooks that give residual and norm scales to a module whose code has none.

Code that computes x + f computes lambda x + beta f if the block's output f is replaced by
beta f + (lambda - 1) x. The hook stands behind the block's dropout, which must not act on x. A
dropout that the layer applies inside a function is switched off and applied by the hook.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import DomainError, MomentsError
from ..model.transformer import Transformer
from .anatomy import anatomy_of
from .dataflow import ModuleReading
from .expectation import Scales
from .roles import ModuleBranch, ModuleRoles, Side, SubmoduleTensor
from .running import first_tensor, grouped, with_first_tensor

ATTRIBUTE = "moments_scales"
"""Attribute of a module that holds its `AppliedScales`."""

DIGITS = 1e-5
"""Relative error of a factor of the module's code, which is read to six digits."""

FOLDED = "moments_folded"
"""Attribute of a module whose scales are absorbed in its weights."""


class LogitFactor(NamedTuple):
    """The factor of a hook on the output of the submodule at `path`, which gives the logits."""

    path: str
    factor: float


def logits_path(roles: ModuleRoles) -> str | None:
    """Path of the submodule that gives the logits; None without a head."""
    heads = [role.parameter.rpartition(".")[0] for role in roles.named("head")]
    return roles.logits or next(iter(heads), None)


def logit_factor(
    module: nn.Module, reading: ModuleReading, model: Transformer, described: Transformer | None
) -> LogitFactor | None:
    """The factor that is missing to a model's output scale; None if there is none."""
    path = logits_path(reading.roles)
    if path is None or model.head is None:
        return None
    if described is not None and described.head is not None:
        own = described.head.output_scale
    else:  # of the code and the hooks, without that of the hooks
        applied = applied_scales(module)
        hooks = 1.0 if applied is None else applied.logits
        own = float(f"{(reading.logit_scale or 1.0) / hooks:.6g}")
    factor = float(model.head.output_scale / own)
    return None if abs(factor - 1) < DIGITS else LogitFactor(path, factor)


class ScaleRow(NamedTuple):
    """The scales of one block."""

    stack: str
    layer: int
    block: str
    skip: float
    branch: float
    norm_input: float
    norm_output: float


@dataclass
class AppliedScales:
    """The hooks that carry a model's scales; at `module.moments_scales`.

    They survive deepcopy and pickle of the module, but are no part of its state_dict: a module
    rebuilt from a state_dict needs them again.

    Attributes:
        rows: one per block whose sum or norm is scaled.
        logits: factor of the logits.
        dropouts: block -> the probability of dropout that its hook applies instead of the module's
            code; in the submodule that holds the probability it is 0 until `remove`.
        natives: (stack, layer, block) -> the factor of its output in the module's code.
        handles: of the hooks.
    """

    rows: tuple[ScaleRow, ...]
    handles: list[RemovableHandle]
    logits: float = 1.0
    dropouts: dict[ModuleBranch, DropProbability] = field(default_factory=dict, repr=False)
    natives: dict[tuple[str, int, str], float] = field(default_factory=dict)

    def remove(self) -> None:
        """Remove every hook, so that the module runs by its own code alone."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for drop in self.dropouts.values():
            drop.set(drop.drop_prob)
        self.rows, self.logits, self.dropouts, self.natives = (), 1.0, {}, {}

    def __str__(self) -> str:
        lines = [f"{len(self.handles)} hooks scale {len(self.rows)} blocks"]
        for rows in grouped(self.rows, lambda row: (row.stack, *row[3:])).values():
            factors = zip(ScaleRow._fields[3:], rows[0][3:], strict=True)
            words = ", ".join(f"{name} {value:.6g}" for name, value in factors if value != 1)
            lines.append(f"  {_where(rows)}: {words}")
        if self.logits != 1:
            lines.append(f"  logits: {self.logits:.6g}")
        return "\n".join(lines)


def _where(rows: list[ScaleRow]) -> str:
    layers = list(dict.fromkeys(row.layer for row in rows))
    blocks = list(dict.fromkeys(row.block for row in rows))
    stack, names = rows[0].stack, ", ".join(blocks)
    if len(layers) == 1:
        return f"{stack}layer {layers[0]} {names}"
    if len(rows) == len(layers) * len(blocks) and layers[-1] - layers[0] == len(layers) - 1:
        return f"{stack}layers {layers[0]} to {layers[-1]} {names}"
    return ", ".join(f"{stack}layer {row.layer} {row.block}" for row in rows)


def applied_scales(module: nn.Module) -> AppliedScales | None:
    """A module's scale hooks; None if it has none."""
    scales = getattr(module, ATTRIBUTE, None)
    return scales if isinstance(scales, AppliedScales) and scales.handles else None


def remove_scales(module: nn.Module) -> None:
    """Remove a module's scale hooks, if it has any."""
    scales = getattr(module, ATTRIBUTE, None)
    if isinstance(scales, AppliedScales):
        scales.remove()
        delattr(module, ATTRIBUTE)


def apply_scales(
    module: nn.Module,
    blocks: Sequence[ModuleBranch],
    scales: Mapping[str, Scales],
    own: Collection[tuple[int, int]],
    logits: LogitFactor | None,
    batch: Any,
    *,
    drops: bool,
) -> AppliedScales | None:
    """Add the hooks of a model's scales to a module; None if there is nothing to scale.

    Args:
        own: (layer, column) of blocks whose scales are parameters of the module.
        batch: on which dropouts inside functions are detected, if the module `drops` at all.

    Raises:
        DomainError: a scale that no hook can apply to this module, with the reason.
    """
    parts = dict(module.named_modules())
    native = natives(module, blocks)
    rows = _rows(native, scales, own)
    dropouts = _dropouts(module, parts, rows, batch) if drops else {}
    planned = [
        (row, hooks)
        for block, row in rows.items()
        if (hooks := _hooks(block, row, native[block], dropouts.get(block)))
    ]
    remove_scales(module)
    if not planned and logits is None:
        return None
    handles = [
        _place(parts[point.path], point.side, hook) for _, hooks in planned for point, hook in hooks
    ]
    if logits is not None:
        handles.append(_place(parts[logits.path], "output", ScaleOutput(logits.factor)))
    factor = 1.0 if logits is None else logits.factor
    for drop in dropouts.values():
        drop.set(0.0)
    placed = tuple(row for row, _ in planned)
    of_code = {_place_of(block): value for block, value in native.items()}
    applied = AppliedScales(placed, handles, factor, dropouts, of_code)
    setattr(module, ATTRIBUTE, applied)
    return applied


def _place(part: nn.Module, side: str, hook: Any) -> RemovableHandle:
    if side == "input":
        return part.register_forward_pre_hook(hook, with_kwargs=True)
    return part.register_forward_hook(hook)


def _rows(
    native: Mapping[ModuleBranch, float],
    scales: Mapping[str, Scales],
    own: Collection[tuple[int, int]],
) -> dict[ModuleBranch, ScaleRow]:
    """The scales of every block; blocks that share a sum or a norm have it scaled once."""
    rows = {}
    summed: set[str] = set()
    normed: set[str | None] = set()
    for block in native:
        skip, branch, before, after = scales[block.stack].at(block.layer, block.column)
        if not block.stack and (block.layer, block.column) in own:
            skip, branch = 1.0, native[block]
        if block.parallel:  # one sum, and perhaps one norm, for both blocks
            if len(set(scales[block.stack].skip[block.layer - 1])) > 1:
                raise DomainError(
                    f"layer {block.layer}: attention and feed-forward block share one residual "
                    "sum, which has one skip scale, not two"
                )
            skip = 1.0 if block.path in summed else skip
            before, after = (1.0, 1.0) if block.norm in normed else (before, after)
        summed.add(block.path)
        normed.add(block.norm)
        rows[block] = ScaleRow(block.stack, block.layer, block.name, skip, branch, before, after)
    return rows


def _dropouts(
    module: nn.Module,
    parts: dict[str, nn.Module],
    rows: Mapping[ModuleBranch, ScaleRow],
    batch: Any,
) -> dict[ModuleBranch, DropProbability]:
    """The dropouts that hooks must apply themselves: none may follow a hook that adds x."""
    adding = [
        block
        for block, row in rows.items()
        if row.skip != 1 and not isinstance(parts[block.branch.path], nn.Dropout)
    ]
    if not adding:
        return {}
    before, behind = applied_scales(module), _drops_behind(module, rows, batch)
    known = {} if before is None else before.dropouts
    known = known | _drop_probabilities(module, parts, behind - set(known), batch)
    for block in adding:
        if block in behind and block not in known:
            raise DomainError(
                f"layer {block.layer}, {block.name}: the module drops its output inside a "
                "function, behind every point that a hook can reach, so that a skip scale would "
                "pass through the dropout; build the module with dropout 0 or use a plan whose "
                "skip scale is 1"
            )
    # Blocks may share one probability; then all of them need the hook.
    drops = {block: known[block] for block in behind if block in known}
    replaced = {drops[block][:2] for block in adding if block in drops}
    return {block: drop for block, drop in drops.items() if drop[:2] in replaced}


def _hooks(
    block: ModuleBranch, row: ScaleRow, native: float, dropout: DropProbability | None
) -> list[tuple[SubmoduleTensor, Any]]:
    """The hooks of one block in the order in which they act: a norm's output is scaled before the
    stream of a Post-LN layer is stored, a norm's input after the stream of a Pre-LN layer is.
    """
    hooks: list[tuple[SubmoduleTensor, Any]] = []
    if row.norm_output != 1:
        hooks.append((SubmoduleTensor(_norm(block), "output"), ScaleOutput(row.norm_output)))
    branch_scaled = abs(row.branch - native) > DIGITS * abs(native)
    if row.skip != 1 or branch_scaled or dropout is not None:
        stored = StoreStream(block.stream.side) if row.skip != 1 else None
        if stored is not None:
            hooks.append((block.stream, stored))
        drop_prob = 0.0 if dropout is None else dropout.drop_prob
        hooks.append((block.branch, ScaleBranch(row.skip, row.branch, native, stored, drop_prob)))
    if row.norm_input != 1:
        hooks.append((SubmoduleTensor(_norm(block), "input"), ScaleInput(row.norm_input)))
    return hooks


def natives(module: nn.Module, blocks: Iterable[ModuleBranch]) -> dict[ModuleBranch, float]:
    """The factor of every block's output in the module's code, without that of its hooks."""
    applied = applied_scales(module)
    known = {} if applied is None else applied.natives
    return {block: known.get(_place_of(block), block.native) for block in blocks}


def _place_of(block: ModuleBranch) -> tuple[str, int, str]:
    """What names a block with hooks on its module as without; its paths may differ."""
    return block.stack, block.layer, block.name


def _norm(block: ModuleBranch) -> str:
    if block.norm is None:
        raise DomainError(f"layer {block.layer}, {block.name}: no norm that could be scaled")
    return block.norm


# --- the hooks themselves -------------------------------------------------------------------------


@dataclass
class StoreStream:
    """Hook that stores the first input or output of a submodule until the sum's hook takes it, one
    per thread; what it stores is never copied or pickled."""

    side: Side
    streams: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __call__(self, _: nn.Module, args: Any, other: Any) -> None:
        # `other`: the named arguments before a forward, the output behind it.
        x = first_tensor([*args, *other.values()] if self.side == "input" else other)
        self.streams[threading.get_ident()] = x

    def take(self) -> Tensor:
        x = self.streams.pop(threading.get_ident(), None)
        if x is None:
            raise MomentsError(
                "a block ran without its layer's residual stream: run the whole layer, or take "
                f"the scales off with module.{ATTRIBUTE}.remove()"
            )
        return x

    def __getstate__(self) -> dict[str, Any]:
        return {"side": self.side, "streams": {}}


@dataclass
class ScaleBranch:
    """Hook that replaces f by (beta f + (lambda - 1) x) / native, after dropout of f.

    Attributes:
        native: factor of f in the module's code behind the hook.
        stored: holds x; None if lambda is 1.
    """

    skip: float
    branch: float
    native: float
    stored: StoreStream | None
    drop_prob: float = 0.0

    def __call__(self, part: nn.Module, _: Any, output: Any) -> Any:
        f = first_tensor(output)
        if self.drop_prob and part.training:
            f = nn.functional.dropout(f, self.drop_prob)
        scaled = self.branch / self.native * f
        if self.stored is not None:
            scaled = scaled + (self.skip - 1) / self.native * self.stored.take()
        return with_first_tensor(output, scaled)


@dataclass
class ScaleOutput:
    """Hook that multiplies a submodule's first output."""

    factor: float

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        return with_first_tensor(output, self.factor * first_tensor(output))


@dataclass
class ScaleInput:
    """Hook that multiplies a submodule's first input."""

    factor: float

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if any(isinstance(value, Tensor) for value in args):
            return with_first_tensor(args, self.factor * first_tensor(args)), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: self.factor * kwargs[name]}


# --- dropouts inside a function, behind every hook: their probability is 0 while the hook drops ---


class DropProbability(NamedTuple):
    """A dropout probability in the attribute `name` of the submodule `part` at `path`."""

    path: str
    name: str
    drop_prob: float
    part: nn.Module

    def set(self, drop_prob: float) -> None:
        setattr(self.part, self.name, drop_prob)


def _drop_probabilities(
    module: nn.Module, parts: dict[str, nn.Module], blocks: Iterable[ModuleBranch], batch: Any
) -> dict[ModuleBranch, DropProbability]:
    """The probability that controls the dropout of each block, found by setting it to 0."""
    result: dict[ModuleBranch, DropProbability] = {}
    candidates = [(block, drop) for block in blocks for drop in _candidates(parts, block)]
    for key in dict.fromkeys(_relative(block, drop) for block, drop in candidates):
        tried = {
            block: drop
            for block, drop in candidates
            if block not in result and _relative(block, drop) == key
        }
        try:
            for drop in tried.values():
                drop.set(0.0)
            still = _drops_behind(module, tried, batch)
        finally:
            for drop in tried.values():
                drop.set(drop.drop_prob)
        result |= {block: drop for block, drop in tried.items() if block not in still}
    return result


def _drops_behind(
    module: nn.Module, blocks: Iterable[ModuleBranch], batch: Any
) -> set[ModuleBranch]:
    """Blocks whose output passes dropout between its last hook and the sum."""
    return {b for b in anatomy_of(module, batch).roles.blocks if b.drops} & set(blocks)


def _relative(block: ModuleBranch, drop: DropProbability) -> tuple[str, str]:
    """The place of a probability relative to its layer."""
    return drop.path.removeprefix(block.path), drop.name


def _candidates(parts: dict[str, nn.Module], block: ModuleBranch) -> Iterator[DropProbability]:
    """Dropout probabilities of the submodules that contain a block, the layer's first."""
    inner = block.branch.path.removeprefix(block.path).split(".")
    for depth in range(1, len(inner) + 1):
        path = block.path + ".".join(inner[:depth])
        for name, value in vars(parts[path]).items():
            if "drop" in name and isinstance(value, float) and 0 < value < 1:
                yield DropProbability(path, name, value, parts[path])
