"""Where the sites of the theory sit in real modules, and their residual branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

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
