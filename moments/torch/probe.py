"""What a module's residual sums and norms really compute: run it once and regress.

At every sum y the numbers lambda and beta of y = lambda x + beta f are least squares over all
tokens and features, with x the stream and f what the block's own matrix (or second norm) gave
before anything scaled it. The same for every norm's output upon the normalised input,
and for the logits upon what the head's own matrix gives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import MomentsError, optional
from ..model.transformer import Transformer
from .dataflow.reading import example
from .hook_points import ModuleBranch, SubmoduleTensor
from .roles import ModuleRoles
from .running import hooked, in_mode, run, watch_tensor

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Slope:
    """A measured multiplier, its standard error, and the share of the target left unexplained."""

    value: float
    stderr: float
    unexplained: float


@dataclass(frozen=True)
class BlockProbe:
    """Multipliers of one block; None where a part of it is zero or absent.

    `skip`, `branch` are lambda and beta, `norm_input` and `norm_output` factors around the norm,
    without its own gain; no tensor passed the submodules `unseen`.
    """

    block: ModuleBranch
    skip: Slope | None
    branch: Slope | None
    norm_input: Slope | None
    norm_output: Slope | None
    unseen: tuple[str, ...] = ()


def probe(
    module: nn.Module,
    blocks: tuple[ModuleBranch, ...],
    batch: Any,
    *,
    epsilon: float = 0.0,
    training: bool = False,
) -> list[BlockProbe]:
    """Run a module once and measure every block's multipliers.

    `epsilon` is of norms that have no attribute for it; with `training` dropout acts.
    """
    seen: Seen = {}
    parts = dict(module.named_modules())
    hooks = (hook for block in blocks for hook in _watch(parts, block, seen))
    with in_mode(module, training), hooked(hooks):
        run(module, batch)
    return [_measured(parts, block, blocks, seen, epsilon) for block in blocks]


def drops_behind(
    module: nn.Module, blocks: tuple[ModuleBranch, ...], batch: Any = None
) -> set[ModuleBranch]:
    """Blocks whose output passes dropout between its last hook and the sum, or that cannot be
    measured.

    In training mode their sum is not lambda x + beta f.
    """
    parts = dict(module.named_modules())
    doubtful = tuple(b for b in blocks if not isinstance(parts[b.branch.path], nn.Dropout))
    if doubtful and batch is None:
        batch = example(module)
    if not doubtful or batch is None:
        return set(doubtful)
    probes = probe(module, doubtful, batch, training=True)
    return {
        p.block for p in probes if p.skip is None or p.branch is None or p.skip.unexplained > 1e-3
    }


def probe_or_why(
    module: nn.Module, found: ModuleRoles, batch: Any, *, epsilon: float = 0.0
) -> tuple[list[BlockProbe], str]:
    """The probes of every block, or none and why; random input (batch None) may fail."""
    if not found.blocks:
        return [], "no submodule takes or gives the sums inside its layers"
    given = example(module) if batch is None else batch
    if given is None:
        return [], "nothing in it says what it reads (pass batch=)"
    try:
        return probe(module, found.blocks, given, epsilon=epsilon), ""
    except Exception as error:  # the module's own code, on input that it never asked for
        if batch is not None or isinstance(error, MomentsError):
            raise
        return [], f"random input ends in {type(error).__name__} (pass batch=)"


Seen = dict[tuple[ModuleBranch, str], Tensor]
"""Tensors by what they are, in double precision."""


def _watch(
    parts: dict[str, nn.Module], block: ModuleBranch, seen: Seen
) -> Iterator[RemovableHandle]:
    """Hooks at every tensor of the regression: own outputs before other hooks change them
    (prepended), inputs of sums and of norms as they arrive.
    """

    def keep(name: str, tensor: Tensor) -> None:
        seen[block, name] = tensor.detach().to(torch.float64, copy=True)

    for name, point in _points(block).items():
        first = name != "norm output" and (name == "raw" or point.side == "input")
        shown = functools.partial(keep, name)
        yield watch_tensor(parts[point.path], point.side, shown, first=first)
    if block.norm is not None:
        yield watch_tensor(parts[block.norm], "input", functools.partial(keep, "norm input"))


def _points(block: ModuleBranch) -> dict[str, SubmoduleTensor]:
    points = {"stream": block.stream, "raw": block.raw, "total": block.total}
    if block.norm is not None:
        points |= {
            "norm before": SubmoduleTensor(block.norm, "input"),
            "norm output": SubmoduleTensor(block.norm, "output"),
        }
    return points


def _measured(
    parts: dict[str, nn.Module],
    block: ModuleBranch,
    blocks: tuple[ModuleBranch, ...],
    seen: Seen,
    epsilon: float,
) -> BlockProbe:
    together = [b for b in blocks if b.path == block.path] if block.parallel else [block]
    total, x = seen.get((block, "total")), seen.get((together[0], "stream"))
    branches = [seen.get((b, "raw")) for b in together]
    slopes: list[Slope | None] = [None] * (1 + len(together))
    if total is not None and x is not None and all(f is not None for f in branches):
        slopes = regress(total, [x, *(_as(total, f) for f in branches if f is not None)])
    norm_input = norm_output = None
    before, entering = seen.get((block, "norm before")), seen.get((block, "norm input"))
    output = seen.get((block, "norm output"))
    if block.norm is not None and before is not None and entering is not None:
        (norm_input,) = regress(entering, [before])
        if output is not None:
            norm_output = _norm_slope(parts[block.norm], entering, output, epsilon)
    unseen = (p.path for name, p in _points(block).items() if seen.get((block, name)) is None)
    of = slopes[0], slopes[1 + together.index(block)], norm_input, norm_output
    return BlockProbe(block, *of, tuple(dict.fromkeys(unseen)))


def _as(total: Tensor, branch: Tensor) -> Tensor:
    """A branch whose tokens come before its sequences, in the order of the stream."""
    swapped = branch.ndim == 3 and branch.shape != total.shape
    return branch.transpose(0, 1) if swapped and branch.shape[:2] == total.shape[1::-1] else branch


def _norm_slope(norm: nn.Module, x: Tensor, output: Tensor, epsilon: float) -> Slope | None:
    """Output, less the norm's bias, upon the normalised input, centred or not as fits better."""
    epsilon = float(getattr(norm, "eps", getattr(norm, "variance_epsilon", epsilon)) or 0.0)
    bias = getattr(norm, "bias", None)
    if isinstance(bias, Tensor) and bias.numel() == output.shape[-1]:
        output = output - bias.detach().double()
    found: list[Slope | None] = []
    for entering in (x - x.mean(-1, keepdim=True), x):
        square = entering.square().mean(-1, keepdim=True)
        found += regress(output, [entering * (square + epsilon).rsqrt()])
    return min(found, key=lambda slope: math.inf if slope is None else slope.unexplained)


def regress(target: Tensor, columns: list[Tensor]) -> list[Slope | None]:
    """Least squares without intercept; None for a column of zeros, nan if not finite."""
    if any(column.shape != target.shape for column in columns):
        columns = [column.reshape(target.shape) for column in columns]
    y = target.reshape(-1)
    norms = [float(column.norm()) for column in columns]
    used = [i for i, norm in enumerate(norms) if norm != 0]
    if not used:
        return [None] * len(columns)
    design = torch.stack([columns[i].reshape(-1) / norms[i] for i in used], dim=1)
    if not bool(torch.isfinite(design).all() and torch.isfinite(y).all()):
        return [Slope(math.nan, math.nan, math.nan) if n else None for n in norms]
    gram = design.T @ design
    inverse = torch.linalg.pinv(gram)
    solved = inverse @ (design.T @ y)
    rest = y - design @ solved
    variance = float(rest.square().sum()) / max(1, len(y) - len(used))
    size = float(y.norm())
    unexplained = float(rest.norm()) / size if size else 0.0
    slopes: list[Slope | None] = [None] * len(columns)
    for place, i in enumerate(used):
        error = math.sqrt(variance * max(float(inverse[place, place]), 0.0))
        slopes[i] = Slope(float(solved[place]) / norms[i], error / norms[i], unexplained)
    return slopes


# --- the factor on the logits: what code applies, and what a hook must add ------------------------


EXPLAINED = 1e-3
"""A tensor whose share left unexplained is below this is a multiple of another one."""


class LogitFactor(NamedTuple):
    """What a hook behind the matrix to logits multiplies by."""

    path: str
    factor: float


def logits_path(found: ModuleRoles) -> str | None:
    """Path of the submodule that gives the logits; None where the module has no head."""
    heads = [role.parameter.rpartition(".")[0] for role in found.named("head")]
    return found.logits or next(iter(heads), None)


def logit_factor(
    found: ModuleRoles, model: Transformer, described: Transformer | None
) -> LogitFactor | None:
    """The hook that a model's output scale needs beside the module's own; None where none."""
    path = logits_path(found)
    if path is None or model.head is None:
        return None
    there = 1.0 if described is None or described.head is None else described.head.output_scale
    factor = float(model.head.output_scale / there)
    return None if abs(factor - 1) < 1e-12 else LogitFactor(path, factor)


def measured_scale(
    module: nn.Module, found: ModuleRoles, model: Transformer, batch: Any
) -> Slope | None:
    """What really multiplies the logits, whatever code does it; None where it cannot be seen.

    The product of two slopes: of the module's logits upon what the head's own matrix gives, and of
    what that matrix reads upon the final norm's output where it is a multiple of it (T5).
    """
    path = logits_path(found)
    if path is None or batch is None or model.head is None:
        return None
    seen: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        seen[name] = tensor.detach().to(torch.float64, copy=True)

    head = module.get_submodule(path)
    norms = (role.parameter.rpartition(".")[0] for role in found.named("final.norm.gain"))
    hooks = (
        watch_tensor(part, side, functools.partial(keep, name), first=first)
        for name, part, side, first in (
            ("read", head, "input", False),
            ("own", head, "output", True),
            ("hooked", head, "output", False),
            *(("norm", module.get_submodule(norm), "output", False) for norm in norms),
        )
    )
    with in_mode(module, False), hooked(hooks):
        output = run(module, batch)
    logits = getattr(output, "logits", None)
    capped = model.head.logit_softcap is not None
    if logits is None or capped or logits.shape != seen["own"].shape:
        logits = seen["hooked"]
    (behind,) = regress(logits.detach().double(), [seen["own"]])
    if behind is None or not seen["own"].any():
        return None
    before = 1.0
    if "norm" in seen and seen["norm"].shape == seen["read"].shape:
        (slope,) = regress(seen["read"], [seen["norm"]])
        before = slope.value if slope is not None and slope.unexplained < EXPLAINED else 1.0
    return Slope(behind.value * before, behind.stderr * abs(before), behind.unexplained)
