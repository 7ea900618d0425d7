"""Names and sites of a module that no family knows, read off its shapes, names and one run.

A draft, to be corrected by whoever wrote the module: what could not be placed is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import MomentsError, domain_error
from ..optional import optional
from .probe import TOKENS, in_mode, run
from .tensors import first_tensor
from .wrappers import unwrapped

with optional("torch", "torch"):
    import torch
    from torch import nn

Site = tuple[int, str, str, str]

_WORDS = {
    "query": {"q", "query", "wq", "queries"},
    "key": {"k", "key", "wk", "keys"},
    "value": {"v", "value", "wv", "values"},
    "output": {"o", "out", "output", "wo", "proj", "dense"},
    "gate": {"gate", "w1"},
}
"""Parts of a matrix's name that tell its role, where its shape leaves a choice."""

_FUSED = "query+key+value"


class _Leaf(NamedTuple):
    """A matrix or a norm of a layer: its path there, its parameter, and features in and out."""

    path: str
    parameter: str
    fan_in: int
    fan_out: int


@dataclass(frozen=True)
class Draft:
    """What `moments.torch.draft` made of a module; `str` gives it as Python to correct.

    Attributes:
        names: patterns of parameter names -> roles, as `moments.torch.audit` takes them.
        sites: (layer, site, path, side), as `moments.torch.measure` takes them.
        unplaced: parameters without a role, with their shapes.
        doubts: what was assumed, in words.
    """

    names: dict[str, str]
    sites: tuple[Site, ...]
    unplaced: tuple[str, ...]
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"# {doubt}" for doubt in self.doubts]
        lines += ["names = {"]
        lines += [f'    "{pattern}": "{role}",' for pattern, role in self.names.items()]
        lines += [f'    # "{name}": "?",' for name in self.unplaced]
        first = self.sites[0][2]
        prefix, number = first[: -len(_number(first))], _number(first)
        layers = max(n for n, site, *_ in self.sites if site == "stream")
        lines += ["}", "sites = [", f'    (0, "stream", "{first}", "input"),']
        lines += ["    *("]
        lines += [f'        (n + 1, site, f"{prefix}{{n + {number}}}{{path}}", side)']
        lines += [f"        for n in range({layers})", "        for site, path, side in ["]
        for layer, *site in self.sites:
            if layer == 1:
                inner = (site[0], site[1].removeprefix(first), site[2])
                lines.append(f"            {inner!r},".replace("'", '"'))
        lines += ["        ]", "    ),"]
        lines += [f"    {s!r},".replace("'", '"') for s in self.sites if s[0] > layers]
        return "\n".join([*lines, "]"]).replace("{n + 0}", "{n}")


def _number(path: str) -> str:
    """The last part of a layer's path."""
    return path.rpartition(".")[2]


def draft(module: nn.Module, batch: Any = None) -> Draft:
    """Names and sites for a module of one's own, to look at, correct and pass on.

    Args:
        module: with a list of layers that are alike.
        batch: what the module reads, as in `moments.torch.measure`; it is run once, to see in which
            order its parts act. None: random token ids, where it has a table of tokens.

    Returns:
        A Draft: `names`, `sites`, `str(...)`.

    Raises:
        DomainError: not an nn.Module.
        MomentsError: it has no list of layers.
    """
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise domain_error("module", type(module).__name__, "an nn.Module")
    return _Drafting(module, batch).draft()


class _Drafting:
    """One module's parts, and the order in which they act."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        self.module = module
        self.doubts: list[str] = []
        self.names: dict[str, str] = {}
        self.stack, self.layers = _stack(module)
        self.first = f"{self.stack}.{self.layers[0]}".lstrip(".")
        self.layer = module.get_submodule(self.first)
        self.tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.order = self._acting(batch)

    def draft(self) -> Draft:
        """Everything."""
        matrices, norms = self._leaves()
        width = Counter(n for m in matrices for n in (m.fan_in, m.fan_out)).most_common(1)[0][0]
        roles = self._matrices(matrices, width)
        places = self._norms([n for n in norms if n.fan_out == width], roles)
        for leaf, role in roles.items():
            self._name(leaf, role, role, "+".join(f"{part}.bias" for part in role.split("+")))
        for leaf, role in places.items():
            self._name(leaf, role, f"{role}.gain", f"{role}.bias")
        after = self._outside(width)
        sites = self._sites({role: leaf.path for leaf, role in (roles | places).items()})
        patterns = (re.escape(p).replace(r"\{layer\}", r"\d+") for p in self.names)
        known = re.compile("|".join(patterns))
        unplaced: dict[str, None] = {}
        for name, parameter in self.module.named_parameters():
            if not known.fullmatch(name):
                pattern = re.sub(
                    rf"^{re.escape(self.stack)}\.\d+\.", f"{self.stack}.{{layer}}.", name
                )
                unplaced[f"{pattern} {tuple(parameter.shape)}"] = None
        return Draft(self.names, (*sites, *after), tuple(unplaced), tuple(self.doubts))

    def _acting(self, batch: Any) -> list[str]:
        """Paths of the parts that have parameters or drop, as they act; registered, if unseen."""
        leaves = {
            path: part
            for path, part in self.module.named_modules()
            if not list(part.children()) and not isinstance(part, nn.ModuleList)
        }
        given = _ids(self.module) if batch is None else batch
        seen: list[str] = []

        def acted(path: str) -> Any:
            def hook(part: nn.Module, read: Any, made: Any) -> None:
                seen.append(path)
                if path.startswith(self.first) and read and isinstance(made, torch.Tensor):
                    self.tensors[path] = first_tensor(read), made

            return hook

        hooks = [part.register_forward_hook(acted(path)) for path, part in leaves.items()]
        try:
            if given is not None:
                with in_mode(self.module, False):
                    run(self.module, given)
        except Exception as error:  # the module's own code, on input that may be none of its
            if batch is not None:
                raise
            self.doubts.append(f"random token ids end in {type(error).__name__}: pass batch=")
            seen = []
        finally:
            for hook in hooks:
                hook.remove()
        if not seen:
            self.doubts.append("the order of its parts is that of their declaration: pass batch=")
        return list(dict.fromkeys(seen)) or list(leaves)

    def _leaves(self) -> tuple[list[_Leaf], list[_Leaf]]:
        """Matrices and norms of the first layer, in the order in which they act."""
        matrices, norms = [], []
        inside = {name: part for name, part in self.layer.named_modules() if name}
        ordered = [p.removeprefix(f"{self.first}.") for p in self.order if p.startswith(self.first)]
        for path in [*ordered, *(name for name in inside if name not in ordered)]:
            weight = getattr(inside.get(path), "weight", None)
            if not isinstance(weight, nn.Parameter):
                continue
            if weight.ndim == 1:
                norms.append(_Leaf(path, f"{path}.weight", 0, len(weight)))
            elif weight.ndim == 2:
                fans = (
                    weight.shape if type(inside[path]).__name__ == "Conv1D" else weight.shape[::-1]
                )
                matrices.append(_Leaf(path, f"{path}.weight", *fans))
        return matrices, norms

    def _matrices(self, matrices: Iterable[_Leaf], width: int) -> dict[_Leaf, str]:
        """Roles by shape, then by name, then by order."""
        roles: dict[_Leaf, str] = {}
        square = [m for m in matrices if m.fan_in == width and m.fan_out == width]
        wide = [m for m in matrices if m.fan_in == width and m.fan_out > width]
        narrow = [m for m in matrices if m.fan_in == width and m.fan_out < width]
        back = [m for m in matrices if m.fan_in > width and m.fan_out == width]
        inner = {m.fan_in for m in back}
        for m in wide:
            if m.fan_out == 3 * width and (m.fan_out not in inner or _last(m) & {"qkv", "attn"}):
                roles[m] = _FUSED
                self.doubts.append(f"{m.path}: query, key and value taken for equal parts in order")
        for m in back:
            roles[m] = "ffn_out"
        into = [m for m in wide if m not in roles and m.fan_out in inner]
        gates = [m for m in into if len(into) > 1 and _last(m) & _WORDS["gate"]]
        for m in into:
            roles[m] = "gate" if m in gates else "ffn_in"
        if len(into) > 1 and len(gates) != 1:
            self.doubts.append("two matrices lead into the feed-forward block: one may be the gate")
            for m in into:
                del roles[m]
        for m in [*square, *narrow]:
            fitting = [role for role, words in _WORDS.items() if _last(m) & words]
            fitting = [role for role in fitting if role != "output"] or fitting  # q_proj
            if len(fitting) == 1 and fitting[0] not in roles.values():
                roles[m] = fitting[0]
        missing = [r for r in ("query", "key", "value", "output") if r not in roles.values()]
        if _FUSED in roles.values():
            missing = [r for r in missing if r == "output"]
        left = [m for m in square if m not in roles]
        if left and len(left) == len(missing):
            roles |= dict(zip(left, missing, strict=True))
            self.doubts += [f"{m.path}: taken for the {roles[m]} by its place" for m in left]
        return roles

    def _norms(self, norms: list[_Leaf], roles: dict[_Leaf, str]) -> dict[_Leaf, str]:
        """Which block's norm each is: that which it stands before, or behind which it stands."""
        order = [p.removeprefix(f"{self.first}.") for p in self.order]
        at = {role: order.index(leaf.path) for leaf, role in roles.items() if leaf.path in order}
        begins = {
            "attention": min(
                (at[r] for r in at if r in ("query", "key", "value", _FUSED)), default=-1
            ),
            "ffn": min((at[r] for r in at if r in ("gate", "ffn_in")), default=-1),
        }
        ends = {"attention": at.get("output", -1), "ffn": at.get("ffn_out", -1)}
        if min(*begins.values(), *ends.values()) < 0 or ends["attention"] > begins["ffn"]:
            if norms:
                self.doubts.append("the order of its blocks is not known: place its norms yourself")
            return {}
        places: dict[_Leaf, str] = {}
        first = [n for n in norms if order.index(n.path) < begins["attention"]]
        between = [n for n in norms if ends["attention"] < order.index(n.path) < begins["ffn"]]
        last = [n for n in norms if order.index(n.path) > ends["ffn"]]
        pre = ("attention.norm",), ("ffn.norm",), ()
        post = (), ("attention.norm",), ("ffn.norm",)
        sandwich = ("attention.norm",), ("attention.post_norm", "ffn.norm"), ("ffn.post_norm",)
        for sites in (pre, post, sandwich):
            if [len(s) for s in sites] == [len(first), len(between), len(last)]:
                for found, named in zip((first, between, last), sites, strict=True):
                    places |= dict(zip(found, named, strict=True))
        for role, site in (("output", "attention.norm"), ("ffn_out", "ffn.norm")):
            before = next(leaf.path for leaf, name in roles.items() if name == role)
            for leaf in [n for n in places if places[n] == site and self._reads(n.path, before)]:
                places[leaf] = site.replace("norm", "post_norm")
                self.doubts.append(f"{leaf.path} norms a block's output, not the sum")
        if norms and not places:
            self.doubts.append("its norms are neither Pre-LN nor Post-LN: place them yourself")
        return places

    def _name(self, leaf: _Leaf, role: str, weight: str, bias: str) -> None:
        """The pattern of a part's weight, and of its bias where it has one."""
        pattern = f"{self.stack}.{{layer}}.{leaf.path}".lstrip(".")
        self.names[f"{pattern}.weight"] = weight
        if getattr(self.layer.get_submodule(leaf.path), "bias", None) is not None:
            self.names[f"{pattern}.bias"] = bias

    def _sites(self, paths: dict[str, str]) -> list[Site]:
        """Of every layer, as far as its parts are known."""
        post = "attention.norm" in paths and self._follows(
            paths["attention.norm"], paths.get("output")
        )
        found: list[tuple[str, str, str]] = []

        def add(site: str, path: str | None, side: str) -> None:
            if path is not None:
                found.append((site, path, side))

        for block, role in (("attention", "output"), ("ffn", "ffn_out")):
            norm, out = paths.get(f"{block}.norm"), paths.get(role)
            if not post:
                add(f"{block}.norm", norm, "output")
            if block == "attention":
                add("attention.heads", out, "input")
                add("attention.projection", out, "output")
            else:
                add("ffn.in", paths.get("ffn_in"), "output")
                add("ffn.activation", out, "input")
                add("ffn.out", out, "output")
            add(f"{block}.dropout", self._dropout(out), "output")
            add(f"{block}.post_norm", paths.get(f"{block}.post_norm"), "output")
            if post:
                add(f"{block}.sum", norm, "input")
                add(f"{block}.norm", norm, "output")
            elif block == "attention":
                add("attention.sum", paths.get("ffn.norm"), "input")
            else:
                found.append(("ffn.sum", "", "output"))
        sites: list[Site] = [(0, "stream", self.first, "input")]
        for number, layer in enumerate(self.layers, start=1):
            at = f"{self.stack}.{layer}".lstrip(".")
            for site, path, side in (*found, ("stream", "", "output")):
                sites.append((number, site, f"{at}.{path}".rstrip("."), side))
        return sites

    def _reads(self, path: str, other: str) -> bool:
        """Whether one part reads what another made, unchanged."""
        seen = [self.tensors.get(f"{self.first}.{one}") for one in (path, other)]
        return seen[0] is not None and seen[1] is not None and torch.equal(seen[0][0], seen[1][1])

    def _follows(self, path: str, other: str | None) -> bool:
        at, before = f"{self.first}.{path}", f"{self.first}.{other}"
        return before in self.order and self.order.index(at) > self.order.index(before)

    def _dropout(self, path: str | None) -> str | None:
        """The dropout that acts right behind a matrix."""
        before = f"{self.first}.{path}"
        if before not in self.order[:-1]:
            return None
        behind = self.order[self.order.index(before) + 1]
        inside = behind.startswith(f"{self.first}.")
        if not inside or not isinstance(self.module.get_submodule(behind), nn.Dropout):
            return None
        return behind.removeprefix(f"{self.first}.")

    def _outside(self, width: int) -> list[Site]:
        """Tables before the layers; norm and matrix to logits behind them."""
        last = len(self.layers) + 1
        inside = f"{self.stack}.".lstrip(".")
        parts = [
            (path, part)
            for path, part in self.module.named_modules()
            if not path.startswith(inside) and getattr(part, "weight", None) is not None
        ]
        tables = [pair for pair in parts if isinstance(pair[1], nn.Embedding)]
        tables.sort(key=lambda pair: -pair[1].num_embeddings)
        for role, (path, _) in zip(("token", "position"), tables, strict=False):
            self.names[f"{path}.weight"] = role
        sites: list[Site] = []
        begun = self.order.index(
            next((p for p in self.order if p.startswith(self.first)), self.order[0])
        )
        for path, part in parts:
            if path not in self.order or self.order.index(path) < begun:
                continue
            weight: Any = part.weight
            if weight.ndim == 1 and len(weight) == width:
                self.names[f"{path}.weight"] = "final.norm.gain"
                if getattr(part, "bias", None) is not None:
                    self.names[f"{path}.bias"] = "final.norm.bias"
                sites.append((last, "final.norm", path, "output"))
            elif weight.ndim == 2 and isinstance(part, nn.Linear) and weight.shape[1] == width:
                if not any(weight is table.weight for _, table in tables):
                    self.names[f"{path}.weight"] = "head"
                    if part.bias is not None:
                        self.names[f"{path}.bias"] = "head.bias"
                sites.append((last, "logits", path, "output"))
        return sites


def _stack(module: nn.Module) -> tuple[str, list[str]]:
    """Path of the list of layers that holds most parameters, and the layers' names in it."""
    best: tuple[int, str, list[str]] = (0, "", [])
    for path, part in module.named_modules():
        children = [(n, c) for n, c in part.named_children() if n.isdigit()]
        kinds = {tuple((n, p.shape) for n, p in child.named_parameters()) for _, child in children}
        matrices = [p for _, c in children[:1] for p in c.parameters() if p.ndim == 2]
        if len(kinds) == 1 and len(matrices) > 1:
            size = sum(p.numel() for _, c in children for p in c.parameters())
            best = max(best, (size, path, [name for name, _ in children]))
    if not best[2]:
        raise MomentsError(
            f"{type(module).__name__} has no list of layers that are alike: write names and sites "
            "yourself, as moments.torch.audit and measure take them"
        )
    return best[1], best[2]


def _ids(module: nn.Module) -> Any:
    """Random token ids for the largest table, as many as the others have rows for."""
    rows = sorted(p.num_embeddings for p in module.modules() if isinstance(p, nn.Embedding))
    if not rows:
        return None
    length = min(TOKENS, *rows)
    return torch.randint(rows[-1], (2, length), generator=torch.Generator().manual_seed(0))


def _last(leaf: _Leaf) -> set[str]:
    """Words of the last part of a path that is no number, digits within kept (w1)."""
    parts = [part for part in leaf.path.split(".") if not part.isdigit()]
    return set(re.split(r"[_\W]+", parts[-1].lower())) if parts else set()
