"""Where a family of modules keeps its sites, matrices, biases and norms: tables of paths.

Where a sum of the stream is seen follows from the placement of the norms (`Layout.of`), and what is
seen inside a block from the paths of its matrices (`attention`, `feed_forward`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

Side = Literal["input", "output"]
Site = tuple[str, str, Side]
"""Name of a site, path of a submodule, and which of its tensors the site is."""

TABLES = ("token", "position", "segment", "patch", "class", "relative_bias")
"""What stands before layer 1 and is no norm."""

Split = Callable[[Any], tuple[int, ...]]
"""From a layer to the widths of the parts of one of its fused parameters."""


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


class Fused(NamedTuple):
    """Several matrices in one parameter, in the order of `weights`."""

    weights: tuple[str, ...]
    parameter: str
    split: Split
    axis: int = 0


def attention(output: str, dropout: str = "", *, name: str = "attention") -> tuple[Site, ...]:
    """Of a block whose last matrix has that path; what is no submodule has an empty one."""
    return _there(
        (f"{name}.heads", output, "input"),
        (f"{name}.projection", output, "output"),
        (f"{name}.dropout", dropout, "output"),
    )


def feed_forward(inner: str, outer: str, dropout: str = "", gate: str = "") -> tuple[Site, ...]:
    """Of a block of two matrices, or three, by their paths."""
    return _there(
        ("ffn.gate", gate, "output"),
        ("ffn.in", inner, "output"),
        ("ffn.activation", outer, "input"),
        ("ffn.out", outer, "output"),
        ("ffn.dropout", dropout, "output"),
    )


def dropped(path: str) -> tuple[Site, ...]:
    """What enters layer 1, about the module that drops it."""
    return (("embedding.sum", path, "input"), ("embedding", path, "output"))


def _there(*sites: Site) -> tuple[Site, ...]:
    return tuple(site for site in sites if site[1])


def matrices(**paths: str) -> tuple[tuple[str, str], ...]:
    """The weights of submodules, by the names of their matrices."""
    return tuple((name, f"{path}.weight") for name, path in paths.items())


def projections(
    attention: str, names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj")
) -> tuple[tuple[str, str], ...]:
    """An attention's four matrices, by what its module calls them."""
    kinds = ("query", "key", "value", "output")
    return tuple((k, f"{attention}.{n}.weight") for k, n in zip(kinds, names, strict=True))


def thirds(parameter: str, axis: int = 0) -> Fused:
    """Query, key and value of equal widths, side by side."""

    def split(layer: Any) -> tuple[int, ...]:
        width = layer.get_parameter(parameter).shape[axis] // 3
        return (width, width, width)

    return Fused(("query", "key", "value"), parameter, split, axis)


@dataclass(frozen=True)
class Layout:
    """Sites and parameters of one kind of layer, and of what stands around its stack.

    Args:
        name: of the kind of layer.
        sites: of a layer, by paths relative to it.
        weights: matrices of a layer, weight name -> path of the parameter.
        norms: norms of a layer, site -> path of the submodule.
        fused: matrices of a layer that share a parameter.
        outside: tables, matrices and norms beside the layers: name -> end of the path of a
            submodule or parameter.
        before: sites of layer 0; a path is the end of a submodule's.
        after: sites of layer N + 1, likewise.
        prefix: of every name, for a stack beside the main one ("encoder.").
        applies: whether a layer with these paths is really of this kind.
    """

    name: str
    sites: tuple[Site, ...]
    weights: tuple[tuple[str, str], ...] = ()
    norms: tuple[tuple[str, str], ...] = ()
    fused: tuple[Fused, ...] = ()
    outside: tuple[tuple[str, str], ...] = ()
    before: tuple[Site, ...] = ()
    after: tuple[Site, ...] = ()
    prefix: str = ""
    applies: Callable[[Any], bool] = lambda layer: True

    @classmethod
    def of(
        cls,
        name: str,
        placement: Literal["pre", "post", "parallel"],
        blocks: Mapping[str, tuple[str, tuple[Site, ...]]],
        *,
        norms: tuple[tuple[str, str], ...] = (),
        final: str = "",
        head: str = "",
        outside: tuple[tuple[str, str], ...] = (),
        after: tuple[Site, ...] = (),
        **rest: Any,
    ) -> Layout:
        """A layer of blocks, each with the path of its norm and the sites inside it.

        A sum is seen where the next norm takes it: the block's own (Post-LN), the next block's
        (Pre-LN), or as the layer's output.

        Args:
            norms: beside those of the blocks.
            final, head: paths of the norm and the matrix behind the layers, where they are.
        """
        found: list[Site] = []
        follows = [*(norm for norm, _ in blocks.values()), ""][1:]
        for (block, (norm, inside)), then in zip(blocks.items(), follows, strict=True):
            normed = _there((f"{block}.norm", norm, "output"))
            taken: Site = (f"{block}.sum", norm if placement == "post" else then, "input")
            summed: tuple[Site, ...] = (taken if taken[1] else (taken[0], "", "output"),)
            if placement == "parallel" and block != list(blocks)[-1]:
                summed = ()
            behind = placement == "post"
            found += [*inside, *summed, *normed] if behind else [*normed, *inside, *summed]
        own = tuple((f"{block}.norm", norm) for block, (norm, _) in blocks.items() if norm)
        last = (("final.norm", final), ("head", head))
        ending = _there(("final.norm", final, "output"), ("logits", head, "output"))
        return cls(
            name,
            (*found, ("stream", "", "output")),
            norms=(*own, *norms),
            outside=(*outside, *(pair for pair in last if pair[1])),
            after=(*ending, *after),
            **rest,
        )

    def alone(self) -> Layout:
        """The layout of a stack that stands by itself, without a prefix."""
        return dataclasses.replace(self, prefix="")

    @functools.cached_property
    def children(self) -> frozenset[str]:
        """Names of parts that a layer of this kind has at least."""
        parameters = [*(path for _, path in self.weights), *(f.parameter for f in self.fused)]
        inside = [path for _, path, _ in self.sites if path]
        inside += [path for path in parameters if "." in path]
        return frozenset(path.partition(".")[0] for path in inside)

    def recognises(self, layer: nn.Module, modules: set[str], parameters: set[str]) -> bool:
        """Whether the layer, of those submodules and parameters, has every one the layout names."""
        return (
            all(path in modules for _, path, _ in self.sites)
            and all(path in parameters for _, path in self.weights)
            and all(fused.parameter in parameters for fused in self.fused)
            and self.applies(layer)
        )

    def parts(self, layer: nn.Module) -> Iterator[WeightPart]:
        """Every matrix, bias and norm parameter of a layer that exists in it, relative to it."""
        parameters = {name for name, _ in layer.named_parameters()}
        for weight, path in self.weights:
            yield WeightPart(self.prefix + weight, path)
            if (bias := _bias(path)) in parameters:
                yield WeightPart(f"{self.prefix}{weight}.bias", bias)
        for fused in self.fused:
            split = fused.split(layer)
            bias = _bias(fused.parameter)
            for place, weight in enumerate(fused.weights):
                name = self.prefix + weight
                yield WeightPart(name, fused.parameter, fused.axis, place, split)
                if bias in parameters:
                    yield WeightPart(f"{name}.bias", bias, 0, place, split)
        for site, path in self.norms:
            for kind, end in (("gain", "weight"), ("bias", "bias")):
                if f"{path}.{end}" in parameters:
                    yield WeightPart(f"{self.prefix}{site}.{kind}", f"{path}.{end}")

    def beside(self, module: nn.Module, layers: int) -> Iterator[tuple[int, WeightPart]]:
        """Every parameter outside the layers that the layout names, each with its layer number."""
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, end in self.outside:
            number = 0 if name in TABLES or name.startswith("embedding.") else layers + 1
            for path in sorted(parameters):
                owner, _, kind = path.rpartition(".")
                if ends(path, end):
                    yield number, WeightPart(self.prefix + name, path)
                elif kind in ("weight", "bias") and ends(owner, end):
                    yield number, WeightPart(self.prefix + _named(name, kind), path)


def two_blocks(
    name: str,
    norms: tuple[str, ...],
    attended: str,
    ffn: tuple[str, ...],
    *,
    placement: Literal["pre", "post", "parallel"] = "pre",
    dropouts: tuple[str, str] = ("", ""),
    behind: tuple[str, str] = ("", ""),
    weights: tuple[tuple[str, str], ...] | None = None,
    fused: tuple[Fused, ...] = (),
    beside: tuple[tuple[str, str], ...] = (),
    head: str = "lm_head",
    **rest: Any,
) -> Layout:
    """A layer of an attention and a feed-forward block, by the paths of their parts.

    Args:
        norms: of the blocks; one alone is shared.
        attended: attention's last matrix, beside which stand q_proj, k_proj and v_proj unless they
            are `fused`.
        ffn: the inner matrix ("" where it is fused), the outer one, and a gate where there is one.
        dropouts, behind: of the blocks' outputs: modules that drop them, and norms of them.
        weights: paths of the matrices where those are not the ones that follow from the others.
        beside: norms inside the blocks.
        head, rest: as of `Layout.of`.
    """
    posts = tuple(zip(("attention.post_norm", "ffn.post_norm"), behind, strict=True))
    inner, outer, gate = (*ffn, "")[:3]
    inside = (attention(attended, dropouts[0]), feed_forward(inner, outer, dropouts[1], gate))
    blocks = {
        block: (norm, (*sites, *_there((*post, "output"))))
        for block, norm, sites, post in zip(
            ("attention", "ffn"), (*norms, "")[:2], inside, posts, strict=True
        )
    }
    if weights is None:
        root, _, last = attended.rpartition(".")
        hidden = {"gate": gate, "ffn_in": inner, "ffn_out": outer}
        there = {kind: path for kind, path in hidden.items() if path}
        several = {kind for each in fused for kind in each.weights}
        every = (*projections(root, ("q_proj", "k_proj", "v_proj", last)), *matrices(**there))
        weights = tuple(pair for pair in every if pair[0] not in several)
    more = (*(pair for pair in posts if pair[1]), *beside)
    rest |= {"norms": more, "weights": weights, "fused": fused, "head": head}
    return Layout.of(name, placement, blocks, **rest)


def ends(path: str, end: str) -> bool:
    """Whether a dotted path is `end` or ends with it."""
    return path == end or path.endswith(f".{end}")


def _named(name: str, kind: str) -> str:
    """Role of the weight or bias of a submodule: of a norm they are its gain and bias."""
    if kind == "bias":
        return f"{name}.bias"
    return f"{name}.gain" if name.endswith("norm") else name


def _bias(weight: str) -> str:
    """The path of the bias beside a weight: `in_proj_weight` -> `in_proj_bias`."""
    return f"{weight.removesuffix('weight')}bias"
