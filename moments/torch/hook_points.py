"""Where the sites of the theory sit inside real modules, and what their parameters are.

Layouts of families are tables of paths (`moments.model.huggingface`). A layer is told by its
submodules, not by its class, so that subclasses and relatives are found too.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import MomentsError
from ..model.huggingface import FAMILIES, LAYOUTS, Layout
from ..model.huggingface.layout import Side, WeightPart, ends
from ..prediction.draws import STREAM, WeightGradient
from .running import WRAPPED, aliases

if TYPE_CHECKING:
    from torch import nn


__all__ = [
    "HookPoint",
    "Side",
    "WeightPart",
    "family_of",
    "hook_points",
    "stacks_of",
    "weight_parts",
]


class HookPoint(NamedTuple):
    """One site: the first tensor going into, or coming out of, the submodule at `path`."""

    layer: int
    site: str
    path: str
    side: Side


def points_of(sites: Iterable[Any]) -> tuple[HookPoint, ...]:
    """Sites as a user gives them: (layer, site, path, side) each."""
    return tuple(HookPoint(*site) for site in sites)


def family_of(layer: nn.Module) -> Layout | None:
    """The layout of a layer, None where no family knows it.

    Of several that fit, the one that names most: a Llama layer also has all that Cohere's names.
    """
    children = set(layer._modules)
    possible = [layout for layout in LAYOUTS if layout.children <= children]
    if not children or not possible:
        return None  # no layer is a single part
    modules = {name for name, _ in layer.named_modules()}
    parameters = {name for name, _ in layer.named_parameters()}
    fitting = [layout for layout in possible if layout.recognises(layer, modules, parameters)]
    return max(fitting, key=lambda layout: len(layout.sites), default=None)


def stacks_of(module: nn.Module) -> dict[str, list[tuple[str, Layout]]]:
    """The module's stacks of layers: prefix of their names -> (path, layout) of each, in order.

    A module has one stack, "", or beside it an encoder's, "encoder.", which comes first.

    Raises:
        MomentsError: no layer is known, or several stacks have one prefix.
    """
    found: dict[str, list[tuple[str, Layout]]] = {}
    for path, part in module.named_modules():
        if (layout := family_of(part)) is not None:
            found.setdefault(layout.prefix, []).append((path, layout))
    if not found:
        raise MomentsError(
            f"no known layer in {type(module).__name__}: moments finds the layers of Hugging Face "
            f"families ({', '.join(sorted(FAMILIES))}) and of nn.TransformerEncoder; for another "
            "module pass sites=[(layer, site, submodule_path, 'input' or 'output'), ...], of which "
            "moments.torch.draft(module) makes a draft"
        )
    for layers in found.values():
        stacks = sorted({_list_of(path) for path, _ in layers})
        if len(stacks) > 1:
            raise MomentsError(
                f"{type(module).__name__} has several stacks of layers ({', '.join(stacks)}): "
                "measure one of them, or pass sites=[...]"
            )
    if "" not in found:  # an encoder alone is the main stack
        return {"": [(path, layout.alone()) for path, layout in next(iter(found.values()))]}
    return dict(sorted(found.items(), reverse=True))


def _list_of(path: str) -> str:
    """Where a layer is listed: its path without its number, and what wraps the layer itself."""
    return ".".join([part for part in path.split(".") if part not in WRAPPED][:-1])


def hook_points(module: nn.Module) -> tuple[HookPoint, ...]:
    """Every known site of a Hugging Face module of a known family, or of an nn.TransformerEncoder.

    The result is also a template: edit a copy of it for a relative of these, and pass it as
    `sites` to `moments.torch.measure`. A mapping of your own needs at least the site "stream" at
    the input of layer 1, as layer 0, and at the output of every layer.

    Raises:
        MomentsError: no layer is known, or they sit in more than one stack.
    """
    points: list[HookPoint] = []
    for prefix, layers in stacks_of(module).items():
        stack = _points(module, layers)
        points.extend(point._replace(site=prefix + point.site) for point in stack)
    return tuple(points)


def _points(module: nn.Module, layers: list[tuple[str, Layout]]) -> Iterator[HookPoint]:
    first, layout = layers[0]
    yield from _around(module, layout.before, 0, first)
    yield HookPoint(0, STREAM, first, "input")
    for number, (path, kind) in enumerate(layers, start=1):
        for site, inner, side in kind.sites:
            yield HookPoint(number, site, _joined(path, inner), side)
    yield from _around(module, layout.after, len(layers) + 1, first)


def _around(
    module: nn.Module, sites: Iterable[tuple[str, str, Side]], number: int, layer: str
) -> Iterator[HookPoint]:
    """Sites beside the layers.

    Of several submodules of one name the nearest to the layers has it: a pooler's norm (BEiT) is no
    final norm. Nor is nn.Identity, which stands where there is none.
    """
    parts = dict(module.named_modules())
    for site, end, side in sites:
        found = [path for path in parts if ends(path, end)]
        if not found:
            continue
        path = min(found, key=lambda path: (-_common(path, layer), path.count(".")))
        if type(parts[path]).__name__ != "Identity":
            yield HookPoint(number, site, path, side)


def _common(path: str, other: str) -> int:
    """How many components two dotted paths begin with together."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def weight_parts(
    module: nn.Module, sites: Iterable[HookPoint] | None = None
) -> list[tuple[WeightGradient, WeightPart]]:
    """Every parameter that can learn, split into the matrices it holds.

    Names are those of `moments.Weights`, with ".bias" for biases, "attention.norm.gain" and the
    like for norms, "token", "position", "segment", "patch" and "class" in layer 0,
    "final.norm.gain", "head.transform" and "head" in layer N + 1; those of an encoder beside the
    main stack begin with "encoder.". A parameter that no family names keeps its own name as its
    role, in layer 0; so do all where the user gave the `sites`.
    """
    known: dict[str, list[tuple[int, WeightPart]]] = {}
    for layers in stacks_of(module).values() if sites is None else ():
        for number, (path, layout) in enumerate(layers, start=1):
            owner = module.get_submodule(path)
            for part in layout.parts(owner):
                name = _joined(path, part.parameter)
                known.setdefault(name, []).append((number, part))
        for number, part in layers[0][1].beside(module, len(layers)):
            known.setdefault(part.parameter, []).append((number, part))
    names = aliases(module)
    rows = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        # A tied matrix has several names and is what it is first in the network: the token table.
        roles = [known[alias] for alias in names[parameter] if alias in known]
        for number, part in min(roles, default=[(0, WeightPart(name, name))]):
            rows.append((WeightGradient(number, part.weight, name), part._replace(parameter=name)))
    return rows


def _joined(path: str, inner: str) -> str:
    return ".".join(part for part in (path, inner) if part)


# --- residual sums, branches and norms, read from hook points -------------------------------------


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
        placement: "pre", "post", "sandwich" or "none".
        norm: path of the block's norm; None where there is none.
        post_norm: path of a sandwich's second norm.
        stream: x of the residual sum lambda x + beta f.
        raw: f as the output projection (or a sandwich's second norm) gives it.
        branch: f as it enters the sum, behind dropout or a second norm where they are modules.
        total: the sum.
        parallel: whether this block and another share one sum.
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

    @property
    def column(self) -> int:
        """Of the (N, 2) arrays of scales: attention and cross-attention, or feed-forward."""
        return int(self.name == "ffn")


def blocks_of(points: Iterable[HookPoint], absent: Container[str] = ()) -> tuple[ModuleBranch, ...]:
    """The residual branches of a module in the order the signal passes them.

    Args:
        points: sites of the module.
        absent: paths of norms that an nn.Identity stands in for.

    Raises:
        MomentsError: the points lack a site that places a branch.
    """
    stacks: dict[str, dict[int, dict[str, SubmoduleTensor]]] = {}
    for point in points:
        stack = ENCODER if point.site.startswith(ENCODER) else ""
        sites = stacks.setdefault(stack, {}).setdefault(point.layer, {})
        sites.setdefault(point.site.removeprefix(stack), SubmoduleTensor(point.path, point.side))
    return tuple(
        block
        for stack, layers in stacks.items()
        for layer in sorted(number for number in layers if number > 0)
        for block in _layer_blocks(stack, layer, layers[layer], absent)
    )


def _layer_blocks(
    stack: str, layer: int, sites: dict[str, SubmoduleTensor], absent: Container[str]
) -> list[ModuleBranch]:
    names = [name for name in BLOCKS if any(site.startswith(f"{name}.") for site in sites)]
    if not names:
        return []  # what follows the last layer
    if STREAM not in sites:
        raise MomentsError(f"no site '{STREAM}' in layer {layer}: map one to its output")
    parallel = len(names) > 1 and f"{names[0]}.sum" not in sites
    entering = SubmoduleTensor(sites[STREAM].path, "input")
    blocks = []
    for name in names:
        norm = sites.get(f"{name}.norm") or (sites.get("attention.norm") if parallel else None)
        post_norm = sites.get(f"{name}.post_norm")
        norm = None if norm is not None and norm.path in absent else norm
        total = sites.get(f"{name}.sum", sites[STREAM])
        placement = _placement(post_norm, norm, total)
        if placement in ("pre", "sandwich") and norm is not None:
            entering = SubmoduleTensor(norm.path, "input")
        branch = _first(layer, sites, (f"{name}.post_norm", f"{name}.dropout", *_raw(name)))
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
                raw=branch if post_norm is not None else _first(layer, sites, _raw(name)),
                branch=branch,
                total=total,
                parallel=parallel,
            )
        )
        if not parallel:
            entering = norm if placement == "post" and norm is not None else total
    return blocks


def _placement(
    post_norm: SubmoduleTensor | None, norm: SubmoduleTensor | None, total: SubmoduleTensor
) -> str:
    if norm is None:
        return "none"
    if post_norm is not None:
        return "sandwich"
    return "post" if total == SubmoduleTensor(norm.path, "input") else "pre"


def _raw(name: str) -> tuple[str, ...]:
    return ("ffn.out",) if name == "ffn" else (f"{name}.projection",)


def _first(layer: int, sites: dict[str, SubmoduleTensor], names: Iterable[str]) -> SubmoduleTensor:
    for site in names:
        if site in sites and sites[site].side == "output":
            return sites[site]
    raise MomentsError(f"layer {layer} has no site {' or '.join(names)} at a module's output")
