"""Where the sites of the theory sit in real modules, and their residual branches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import MomentsError
from ..prediction.draws import STREAM

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["input", "output"]


class WeightPart(NamedTuple):
    """One matrix or vector within a parameter.

    Along `axis` the parameter is groups of `split` rows, and this is part number `part` of every
    group; an empty split stands for the whole parameter. Query, key and value side by side are one
    group; GPT-NeoX, which interleaves them by head, has as many groups as heads.
    """

    weight: str
    parameter: str
    axis: int = 0
    part: int = 0
    split: tuple[int, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor shaped like the parameter, as a view.

        Where there are several groups, their number is an axis of its own before `axis`.
        """
        if not self.split:
            return tensor
        start = sum(self.split[: self.part])
        grouped = tensor.unflatten(self.axis, (-1, sum(self.split)))
        found = grouped.narrow(self.axis + 1, start, self.split[self.part])
        return found.flatten(self.axis, self.axis + 1) if grouped.shape[self.axis] == 1 else found


class HookPoint(NamedTuple):
    """One site: the first tensor going into, or coming out of, the submodule at `path`."""

    layer: int
    site: str
    path: str
    side: Side


# --- residual sums, branches and norms of hook points -------------------------------------


ENCODER = "encoder."
BLOCKS = ("attention", "cross", "ffn")


class SubmoduleTensor(NamedTuple):
    """The first tensor going into, or coming out of, a submodule."""

    path: str
    side: Side


@dataclass(frozen=True)
class ModuleBranch:
    """One residual branch.

    Attributes:
        stack: "", or "encoder." of an encoder beside the main stack.
        layer: from 1.
        path: of the layer.
        name: "attention", "cross" or "ffn".
        placement: "pre", "post", "sandwich", "output" or "none".
        norm: path of the block's norm; None where there is none.
        post_norm: path of the norm at the block's output.
        stream: x of the residual sum lambda x + beta f.
        raw: f as the output projection (or a sandwich's second norm) gives it.
        branch: f as it enters the sum, behind dropout or a second norm where they are modules.
        total: the sum.
        parallel: whether this block and another share one sum.
        drops: whether its output is dropped behind `branch`.
    """

    stack: str
    layer: int
    path: str
    name: str
    placement: str
    norm: str | None
    post_norm: str | None
    stream: SubmoduleTensor
    raw: SubmoduleTensor
    branch: SubmoduleTensor
    total: SubmoduleTensor
    parallel: bool = False
    drops: bool = field(default=False, compare=False)

    @property
    def column(self) -> int:
        """Of the (N, 2) arrays of scales: attention and cross-attention, or feed-forward."""
        return int(self.name == "ffn")


class BlockSum(NamedTuple):
    """lambda x + beta f of one block, x the stream and f what the block's own matrix or second norm
    gives, as one pass computes it.

    Attributes:
        placement: of its norms.
        skip, branch: lambda, beta.
        norm: what multiplies the normalised input behind its norm, root mean square over features;
            None where it has none.
        whole: whether the sum is that.
    """

    placement: str
    skip: float
    branch: float
    norm: float | None
    whole: bool


Sums = Mapping[tuple[str, int, str], BlockSum]
"""By stack, layer and block."""

Told = Mapping[tuple[int, str], tuple[str, SubmoduleTensor, bool]]
"""By layer and block: placement, stream, and whether dropout acts behind the block's last norm."""


def blocks_of(points: Iterable[HookPoint], read: Told) -> tuple[ModuleBranch, ...]:
    """Residual branches in order."""
    stacks: dict[str, dict[int, dict[str, SubmoduleTensor]]] = {}
    for point in points:
        stack = ENCODER if point.site.startswith(ENCODER) else ""
        sites = stacks.setdefault(stack, {}).setdefault(point.layer, {})
        sites.setdefault(point.site.removeprefix(stack), SubmoduleTensor(point.path, point.side))
    return tuple(
        block
        for stack, layers in stacks.items()
        for layer in sorted(number for number in layers if number > 0)
        for block in _layer_blocks(stack, layer, layers[layer], read)
    )


def _layer_blocks(
    stack: str,
    layer: int,
    sites: dict[str, SubmoduleTensor],
    read: Told,
) -> list[ModuleBranch]:
    names = [name for name in BLOCKS if any(site.startswith(f"{name}.") for site in sites)]
    if not names:
        return []  # what follows the last layer
    if STREAM not in sites or any((layer, name) not in read for name in names):
        raise MomentsError(f"layer {layer}: no submodule gives or takes its stream")
    parallel = len(names) > 1 and f"{names[0]}.sum" not in sites
    blocks = []
    for name in names:
        norm = sites.get(f"{name}.norm") or (sites.get("attention.norm") if parallel else None)
        post_norm = sites.get(f"{name}.post_norm")
        placement, entering, late = read[layer, name]
        raw = ("ffn.out",) if name == "ffn" else (f"{name}.projection",)
        branch = _first(layer, sites, (f"{name}.post_norm", f"{name}.dropout", *raw))
        blocks.append(
            ModuleBranch(
                stack=stack,
                layer=layer,
                path=sites[STREAM].path,
                name=name,
                placement=placement,
                norm=None if norm is None else norm.path,
                post_norm=None if post_norm is None else post_norm.path,
                stream=entering,
                raw=branch if post_norm is not None else _first(layer, sites, raw),
                branch=branch,
                total=sites.get(f"{name}.sum", sites[STREAM]),
                parallel=parallel,
                drops=late and branch != sites.get(f"{name}.dropout"),
            )
        )
    return blocks


def _first(layer: int, sites: dict[str, SubmoduleTensor], names: Iterable[str]) -> SubmoduleTensor:
    for site in names:
        if site in sites and sites[site].side == "output":
            return sites[site]
    raise MomentsError(f"layer {layer} has no site {' or '.join(names)} at a module's output")
