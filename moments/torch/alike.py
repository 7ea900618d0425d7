"""Layers of one class compared with one another, whatever they compute: tensors, operations, masks.

Asked of modules that no Transformer describes. Layers are the entries of a list of submodules of
one class, with parameters of the same names and shapes, each of which runs once.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import listed
from ..show.findings import Finding
from .dataflow.graph import PRODUCTS, SOFTMAX, VIEWS, Graph, Node
from .entries import EntryMoments
from .roles import gathered_names, split_at_layer
from .running import grouped
from .tensors import odd_tensors

BIDIRECTIONAL = re.compile(r"(?i:bert|mask|encoder|electra|denois|diffusion|bidirect)|MLM|Mlm")
"""In the names of classes that predict tokens which are hidden, not the next one."""

NORMS = re.compile(r"norm|sqrt$")
"""Operations that a norm has one of."""

LEAST = 8
"""Entries from which a parameter's variance is compared with its namesakes'."""

SEEN = 1e-4
"""Relative change of what earlier tokens get, by another last token, that is more than rounding."""

TIGHT = 1e-3
"""How far sums of attention weights are from 1 at most."""


class Layer(NamedTuple):
    """One entry of a list: its path, its operations on the batch, and its first tensors."""

    path: str
    nodes: list[Node]
    given: int
    made: int

    @property
    def number(self) -> int:
        """From 1."""
        return int(self.path.rpartition(".")[2]) + 1


def lists_of(module: nn.Module, graph: Graph) -> Iterator[list[Layer]]:
    """Of every list of submodules the entries that run once, in order."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for path, _, value, at in graph.boundaries:
        spans.setdefault(path, []).append((value, at))
    for parent, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        layers = []
        for name, _ in part.named_children():
            path = f"{parent}.{name}" if parent else name
            if len(ends := spans.get(path, [])) == 2:
                (given, first), (made, last) = ends
                between = (n for n in graph.nodes[first:last] if n.outputs)
                nodes = [n for n in between if graph.values[n.outputs[0]].live]
                layers.append(Layer(path, nodes, given, made))
        yield layers


def layers_of(module: nn.Module, graph: Graph) -> Iterator[list[Layer]]:
    """Lists of three layers or more of one class, with parameters of the same names and shapes."""

    def kind(layer: Layer) -> object:
        part = module.get_submodule(layer.path)
        named = part.named_parameters(remove_duplicate=False)
        return type(part), tuple((name, tuple(p.shape)) for name, p in named)

    for layers in lists_of(module, graph):
        yield from (alike for alike in grouped(layers, kind).values() if len(alike) > 2)


def differences(module: nn.Module, graph: Graph, ids: Tensor | None, end: int) -> Iterator[Finding]:
    """What is wrong with some layers, in that others are not so; `ids` (batch, tokens) of which the
    module gives logits, the value `end`."""
    yield from odd_namesakes(module)
    yield from _unused(module, graph)
    yield from _shared(module)
    stacks = list(layers_of(module, graph))
    for layers in stacks:
        yield from _copied(module, layers)
        yield from _operations(layers)
    yield from _masks(module, graph, stacks, ids, end)
    yield from _over_queries(graph)


# --- tensors --------------------------------------------------------------------------------------


def _pattern(name: str) -> tuple[str, int] | None:
    """A parameter's name without its layer's number, and this from 1."""
    before, number, behind = split_at_layer(name)
    return None if number < 0 else (f"{before}*{behind}", number + 1)


def odd_namesakes(module: nn.Module) -> Iterator[Finding]:
    """Tensors whose variance is unlike that of their namesakes in other layers of one class."""
    alike: dict[tuple[str, type], dict[int, list[tuple[str, EntryMoments]]]] = {}
    for name, parameter in module.named_parameters():
        place = _pattern(name)
        if place is None or parameter.numel() < LEAST or not parameter.is_floating_point():
            continue
        pattern, number = place
        numbered = pattern.partition("*")[0] + str(number - 1)
        kind = type(module.get_submodule(numbered))
        of = alike.setdefault((pattern, kind), {}).setdefault(number, [])
        of.append((name, EntryMoments.of(parameter)))
    for (pattern, _), by_layer in alike.items():
        for _, finding in odd_tensors({pattern: by_layer}, len(alike)):
            yield finding


def _unused(module: nn.Module, graph: Graph) -> Iterator[Finding]:
    """Parameters that no operation reads, of submodules none of whose parameters is read."""
    names = {v.name for v in graph.values if v.params and v.consumers}
    read = {id(p) for name, p in module.named_parameters() if name in names}
    for path, part in module.named_modules():
        own = dict(part.named_parameters(path, recurse=False))
        if own and not read.intersection(map(id, own.values())):
            why = (
                f"{path or 'the module'} is declared and never run: its parameters get no gradient"
            )
            of = "warning", "never used", gathered_names(list(own)), (), 0.0
            yield Finding(*of, reason=why, mend="call it in forward, or delete it")


def _shared(module: nn.Module) -> Iterator[Finding]:
    """Matrices that several layers use, where others, or these layers' other matrices, are not."""
    uses: dict[int, list[tuple[str, str, int]]] = {}
    patterns: dict[str, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (place := _pattern(name)) is not None and parameter.ndim > 1:
            uses.setdefault(id(parameter), []).append((name, *place))
            patterns.setdefault(place[0], set()).add(place[1])
    groups = [g for g in uses.values() if len({layer for _, _, layer in g}) > 1]
    if len({pattern for group in groups for _, pattern, _ in group}) * 2 > len(patterns):
        return  # as a scheme shares whole layers
    for group in groups:
        _, pattern, _ = group[0]
        layers = tuple(sorted({layer for _, _, layer in group}))
        if len(layers) == len(patterns[pattern]) > 2:
            continue  # shared by all, by design
        why = (
            f"{group[0][0]} is used by layers {listed(layers)}, where the others have matrices of "
        )
        why += "their own: these layers give the same map and move together"
        names = tuple(name for name, _, _ in group)
        yield Finding(
            "warning", "shared matrix", names, layers, reason=why, mend="build every layer anew"
        )


def _copied(module: nn.Module, layers: Sequence[Layer]) -> Iterator[Finding]:
    """Matrices that are equal, entry by entry, in several layers."""
    parts = [dict(module.get_submodule(layer.path).named_parameters()) for layer in layers]
    equal: dict[tuple[int, ...], list[str]] = {}
    for name, first in parts[0].items():
        if first.numel() < LEAST**2:
            continue
        rows = [part.get(name) for part in parts]
        for n, one in enumerate(rows):
            same = [
                m
                for m, other in enumerate(rows)
                if one is not None and other is not None and torch.equal(one, other)
            ]
            drawn = one is not None and 2 * len(torch.unique(one.detach())) > one.numel()
            distinct = len({id(rows[m]) for m in same}) == len(same)
            if drawn and distinct and len(same) > 1 and same[0] == n:
                equal.setdefault(tuple(same), []).append(name)
    for same_layers, names in equal.items():
        where = [f"{layers[m].path}.{name}" for name in names for m in same_layers]
        numbers = tuple(layers[m].number for m in same_layers)
        why = f"{', '.join(names)} of layers {listed(numbers)} hold the same entries: what such "
        why += "layers add is not independent and grows faster"
        mend = "build every layer anew instead of copy.deepcopy"
        of = "warning", "copied layers", gathered_names(where), numbers, 1.0, 0.0
        yield Finding(*of, why, mend)


# --- operations -----------------------------------------------------------------------------------


def _spelled(layer: Layer) -> list[tuple[str, tuple[float, ...]]]:
    """Names of its operations that compute, each with the numbers that it is called with."""
    rows = []
    for node in layer.nodes:
        name = node.name.rstrip("_")
        if name not in VIEWS and name != "native_dropout":
            numbers = tuple(float(a) for a in node.args if type(a) is float)
            rows.append((name, numbers))
    return rows


def _operations(layers: Sequence[Layer]) -> Iterator[Finding]:
    """One layer in the middle that normalises elsewhere, or multiplies by another number."""
    spelled = [_spelled(layer) for layer in layers]
    for place, own in enumerate(spelled):
        others = [rows for n, rows in enumerate(spelled) if n != place]
        if any(rows != others[0] for rows in others) or own == others[0]:
            continue
        layer, usual = layers[place], others[0]
        norms, wanted = _norms(own), _norms(usual)
        if norms != wanted:
            words = "norms in other places"
            if len(norms) != len(wanted):
                words = f"{len(norms)} norms" if norms else "no norm"
                words += f" where the others have {len(wanted)}"
            else:
                words += " than the other layers"
            why = f"{layer.path} has {words}"
            mend = "let every layer normalise what its blocks read: x = x + block(norm(x))"
            at = "warning", "norm placement", (layer.path,), (layer.number,)
            yield Finding(*at, len(norms), len(wanted), why, mend)
        elif [name for name, _ in own] == [name for name, _ in usual]:
            name, here, rest = next(
                (a, m, n) for (a, m), (_, n) in zip(own, usual, strict=True) if m != n
            )
            if name in ("mul", "div") and here and rest:
                why = (
                    f"{layer.path} multiplies by {here[0] if name == 'mul' else 1 / here[0]:.4g}, "
                )
                why += (
                    f"where the other layers have {rest[0] if name == 'mul' else 1 / rest[0]:.4g}"
                )
                at = "warning", "odd multiplier", (layer.path,), (layer.number,)
                yield Finding(*at, here[0], rest[0], why, "multiply in every layer alike")
        elif 0 < place < len(layers) - 1:
            more, less = (Counter(n for n, _ in rows) for rows in (own, usual))
            parts = [f"{', '.join(sorted(more - less))} more"] if more - less else []
            parts += [f"{', '.join(sorted(less - more))} less"] if less - more else []
            why = f"{layer.path} runs other operations than the other layers of its class"
            why += f": {' and '.join(parts)}" if parts else ", in another order"
            yield Finding("note", "odd operations", (layer.path,), (layer.number,), reason=why)


def _norms(rows: Sequence[tuple[str, tuple[float, ...]]]) -> list[int]:
    """After how many products each normalisation stands."""
    count, places = 0, []
    for name, _ in rows:
        if name in PRODUCTS:
            count += 1
        elif NORMS.search(name):
            places.append(count)
    return places


# --- masks ----------------------------------------------------------------------------------------


def _masks(
    module: nn.Module, graph: Graph, stacks: Sequence[list[Layer]], ids: Tensor | None, end: int
) -> Iterator[Finding]:
    """Layers that let a token see later ones, where others do not; all of them, where the module
    gives logits of its tokens."""
    tokens = 0 if ids is None else ids.shape[1]
    if tokens < 3:
        return
    mend = "mask attention: is_causal=True, or -inf above the diagonal before the softmax"
    for layers in stacks:
        ahead = [_sees_ahead(graph, one.given, one.made, tokens) for one in layers]
        odd = [layer for layer, sees in zip(layers, ahead, strict=True) if sees]
        if odd and None not in ahead and 2 * len(odd) < len(layers):
            numbers, paths = tuple(one.number for one in odd), tuple(one.path for one in odd)
            why = f"{', '.join(paths)} do{'es' * (len(odd) == 1)} not mask later tokens, where the "
            why += "other layers do: what follows is of the whole sequence"
            of = "error", "tokens see later ones", paths, numbers
            yield Finding(*of, reason=why, mend=mend)
            return
    start = next(n for n, v in enumerate(graph.values) if v.tensor is ids)
    names = {type(part).__name__ for part in module.modules()}
    if any(map(BIDIRECTIONAL.search, names)) or not _sees_ahead(graph, start, end, tokens):
        return
    why = "a token's output changes with a later token, and the module gives logits over the "
    why += "vocabulary of its tokens: a model of the next token sees what it is to predict (where "
    why += "hidden tokens are predicted, say so in its class's name: Masked, BERT, Encoder)"
    yield Finding("warning", "tokens see later ones", (), (), reason=why, mend=mend)


def _sees_ahead(graph: Graph, given: int, made: int, tokens: int) -> bool | None:
    """Whether earlier tokens of a value change with the last token of another one; None where it
    is not laid out by token, or cannot be run again."""
    x, before = graph.tensor(given), graph.tensor(made)
    if x.ndim < 2 or x.shape[1] != tokens or before.ndim < 3 or before.shape[1] != tokens:
        return None
    other = x.clone()
    other[:, -1] = x[:, 0] if bool((x[:, -1] != x[:, 0]).any()) else x[:, 1]
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        (behind,) = graph.run({given: other}, made)
        if behind.shape != before.shape:
            return None
        change = (behind - before)[:, :-1].double().square().mean(dtype=torch.float64)
        size = (behind - before)[:, -1:].double().square().mean()
        return bool(change > SEEN**2 * size) and float(size) > 0
    return None


def _over_queries(graph: Graph) -> Iterator[Finding]:
    """Softmaxes whose weights sum to one over queries, not over the keys that are averaged."""
    wrong = []
    for node in graph.nodes:
        if node.name not in SOFTMAX or not graph.values[node.outputs[0]].live:
            continue
        value, users = node.outputs[0], [node]
        while len(users) == 1:
            consumers = graph.values[value].consumers
            user = graph.nodes[consumers[0]] if consumers else None
            users = [user] if user is not None and user.name in VIEWS else []
            value = users[0].outputs[0] if users else value
        if user is None or user.name not in PRODUCTS or user.inputs[0] != value:
            continue
        weights = graph.tensor(value).double()
        keys, queries = ((weights.sum(a) - 1).abs().max() for a in (-1, -2))
        if float(keys) > TIGHT >= float(queries):
            wrong.append(node)
    if wrong:
        why = "attention weights are normalised over queries, not over keys: rows do not sum to 1, "
        why += "and a mask does not hide what it should"
        of = "error", "softmax over the wrong axis", ()
        yield Finding(*of, (), math.nan, math.nan, why, "softmax(..., dim=-1)")
