"""Comparison of the layers of a module that no Transformer describes: tensors, operations, masks.

Layers are the entries of a list of submodules that are of one class, with parameters of the same
names and shapes, and run once each.
"""

from __future__ import annotations

import contextlib
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
"""In names of classes that predict masked tokens, not the next one."""

NORMS = re.compile(r"norm|sqrt$")
"""Operations of which every norm has one."""

LEAST = 8
"""Entries from which a parameter's variance is compared with that in other layers."""

SEEN = 1e-4
"""Relative change of earlier tokens' outputs by another last token that is more than rounding."""

TIGHT = 1e-3
"""Largest rounding error of sums of attention weights from 1."""


class Layer(NamedTuple):
    """One entry of a list: its path, operations on the batch, first input and first output."""

    path: str
    nodes: list[Node]
    input: int
    output: int

    @property
    def number(self) -> int:
        """From 1."""
        return int(self.path.rpartition(".")[2]) + 1


def lists_of(module: nn.Module, graph: Graph) -> Iterator[list[Layer]]:
    """The entries of every list of submodules that run once, in order."""
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
                (start, first), (end, last) = ends
                inside = (n for n in graph.nodes[first:last] if n.outputs)
                nodes = [n for n in inside if graph.values[n.outputs[0]].live]
                layers.append(Layer(path, nodes, start, end))
        yield layers


def layers_of(module: nn.Module, graph: Graph) -> Iterator[list[Layer]]:
    """Groups of at least three layers of one class with parameters of the same names and shapes."""

    def kind(layer: Layer) -> object:
        part = module.get_submodule(layer.path)
        named = part.named_parameters(remove_duplicate=False)
        return type(part), tuple((name, tuple(p.shape)) for name, p in named)

    for layers in lists_of(module, graph):
        yield from (alike for alike in grouped(layers, kind).values() if len(alike) > 2)


def differences(module: nn.Module, graph: Graph, ids: Tensor | None, end: int) -> Iterator[Finding]:
    """Findings on layers that differ from the others.

    Args:
        ids: (batch, tokens) of which the module gives logits, if it does.
        end: value of the module's output.
    """
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


def odd_namesakes(module: nn.Module) -> Iterator[Finding]:
    """Findings on tensors whose variance differs from that in the other layers of one class."""
    rows: dict[tuple[str, type], dict[int, list[tuple[str, EntryMoments]]]] = {}
    modules = dict(module.named_modules())  # the entries of a ParameterList are none
    for name, parameter in module.named_parameters():
        before, number, after = split_at_layer(name)
        if number < 0 or parameter.numel() < LEAST or not parameter.is_floating_point():
            continue
        layer = modules.get(f"{before}{number}")
        by_layer = rows.setdefault((f"{before}*{after}", type(layer)), {})
        by_layer.setdefault(number + 1, []).append((name, EntryMoments.of(parameter)))
    for (pattern, _), by_layer in rows.items():
        for _, finding in odd_tensors({pattern: by_layer}, len(rows)):
            yield finding


def _unused(module: nn.Module, graph: Graph) -> Iterator[Finding]:
    """Submodules none of whose parameters is read."""
    names = {v.name for v in graph.values if v.params and v.consumers}
    read = {id(p) for name, p in module.named_parameters() if name in names}
    for path, part in module.named_modules():
        own = dict(part.named_parameters(path, recurse=False))
        unread = own and not read.intersection(map(id, own.values()))
        if unread and any(p.requires_grad for p in own.values()):
            yield never_used(path or "the module", list(own))


def never_used(path: str, parameters: Sequence[str]) -> Finding:
    why = f"{path} is declared and never run: its parameters get no gradient"
    names, mend = gathered_names(parameters), "call it in forward, or delete it"
    return Finding("warning", "never used", names, (), 0.0, reason=why, mend=mend)


def _shared(module: nn.Module) -> Iterator[Finding]:
    """Matrices that several layers share, although most matrices or layers are not shared."""
    uses: dict[int, list[tuple[str, str, int]]] = {}
    patterns: dict[str, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        before, number, after = split_at_layer(name)
        if number >= 0 and parameter.ndim > 1:
            uses.setdefault(id(parameter), []).append((name, f"{before}*{after}", number + 1))
            patterns.setdefault(f"{before}*{after}", set()).add(number + 1)
    groups = [g for g in uses.values() if len({layer for _, _, layer in g}) > 1]
    if len({pattern for group in groups for _, pattern, _ in group}) * 2 > len(patterns):
        return  # whole layers are shared, as some schemes do
    for group in groups:
        _, pattern, _ = group[0]
        layers = tuple(sorted({layer for _, _, layer in group}))
        if len(layers) == len(patterns[pattern]) > 2:
            continue  # shared by all layers, by design
        yield shared_matrix(group[0][0], tuple(name for name, _, _ in group), layers)


def shared_matrix(which: str, names: tuple[str, ...], layers: tuple[int, ...]) -> Finding:
    why = f"{which} is used by layers {listed(layers)}, where the others have matrices of their "
    why += "own: these layers give the same map and move together"
    mend = "build every layer anew"
    return Finding("warning", "shared matrix", names, layers, reason=why, mend=mend)


def _copied(module: nn.Module, layers: Sequence[Layer]) -> Iterator[Finding]:
    """Matrices with equal entries in several layers."""
    parts = [dict(module.get_submodule(layer.path).named_parameters()) for layer in layers]
    equal: dict[tuple[int, ...], list[str]] = {}
    for name, first in parts[0].items():
        if first.numel() < LEAST**2:
            continue
        rows = [part.get(name) for part in parts]
        for n, own in enumerate(rows):
            same = [
                m
                for m, other in enumerate(rows)
                if own is not None and other is not None and torch.equal(own, other)
            ]
            drawn = own is not None and 2 * len(torch.unique(own.detach())) > own.numel()
            distinct = len({id(rows[m]) for m in same}) == len(same)
            if drawn and distinct and len(same) > 1 and same[0] == n:
                equal.setdefault(tuple(same), []).append(name)
    for same_layers, names in equal.items():
        where = [f"{layers[m].path}.{name}" for name in names for m in same_layers]
        numbers = tuple(layers[m].number for m in same_layers)
        why = f"{', '.join(names)} of layers {listed(numbers)} hold the same entries: what such "
        why += "layers add is not independent and grows faster"
        mend = "build every layer anew instead of copy.deepcopy"
        places = gathered_names(where), numbers
        yield Finding("warning", "copied layers", *places, 1.0, 0.0, why, mend)


# --- operations -----------------------------------------------------------------------------------


def _calls(layer: Layer) -> list[tuple[str, tuple[float, ...]]]:
    """Names and numeric arguments of a layer's operations, without views and dropout."""
    rows = []
    for node in layer.nodes:
        name = node.name.rstrip("_")
        if name not in VIEWS and name != "native_dropout":
            numbers = tuple(float(a) for a in node.args if type(a) is float)
            rows.append((name, numbers))
    return rows


def _operations(layers: Sequence[Layer]) -> Iterator[Finding]:
    """One layer with norms at other places, another multiplier or (inside the list) other calls
    than all others, which are equal."""
    calls = [_calls(layer) for layer in layers]
    for place, own in enumerate(calls):
        others = [rows for n, rows in enumerate(calls) if n != place]
        if any(rows != others[0] for rows in others) or own == others[0]:
            continue
        layer, usual = layers[place], others[0]
        where = (layer.path,), (layer.number,)
        norms, usual_norms = _norms(own), _norms(usual)
        if norms != usual_norms:
            words = "norms in other places than the other layers"
            if len(norms) != len(usual_norms):
                words = f"{len(norms)} norms" if norms else "no norm"
                words += f" where the others have {len(usual_norms)}"
            why, counts = f"{layer.path} has {words}", (len(norms), len(usual_norms))
            mend = "let every layer normalise what its blocks read: x = x + block(norm(x))"
            yield Finding("warning", "norm placement", *where, *counts, why, mend)
        elif [name for name, _ in own] == [name for name, _ in usual]:
            name, numbers, usual_numbers = next(
                (a, m, n) for (a, m), (_, n) in zip(own, usual, strict=True) if m != n
            )
            if name in ("mul", "div") and numbers and usual_numbers:
                pair = numbers[0], usual_numbers[0]
                factor, usual_factor = pair if name == "mul" else (1 / x for x in pair)
                why = f"{layer.path} multiplies by {factor:.4g}, "
                why += f"where the other layers have {usual_factor:.4g}"
                mend = "multiply in every layer alike"
                yield Finding("warning", "odd multiplier", *where, *pair, why, mend)
        elif 0 < place < len(layers) - 1:
            more, less = (Counter(n for n, _ in rows) for rows in (own, usual))
            parts = [f"{', '.join(sorted(more - less))} more"] if more - less else []
            parts += [f"{', '.join(sorted(less - more))} less"] if less - more else []
            why = f"{layer.path} runs other operations than the other layers of its class"
            why += f": {' and '.join(parts)}" if parts else ", in another order"
            yield Finding("note", "odd operations", *where, reason=why)


def _norms(rows: Sequence[tuple[str, tuple[float, ...]]]) -> list[int]:
    """The number of products before each normalisation."""
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
    """Layers without the causal mask that others have; a module without one that gives logits over
    the vocabulary of its input."""
    tokens = 0 if ids is None else ids.shape[1]
    if tokens < 3:
        return
    for layers in stacks:
        seen = [_sees_later_tokens(graph, one.input, one.output, tokens) for one in layers]
        odd = [layer for layer, sees in zip(layers, seen, strict=True) if sees]
        if odd and None not in seen and 2 * len(odd) < len(layers):
            numbers, paths = tuple(one.number for one in odd), tuple(one.path for one in odd)
            why = f"{', '.join(paths)} do{'es' * (len(odd) == 1)} not mask later tokens, where the "
            why += "other layers do: what follows is of the whole sequence"
            yield not_masked("error", paths, numbers, why)
            return
    start = next(n for n, v in enumerate(graph.values) if v.tensor is ids)
    names = {type(part).__name__ for part in module.modules()}
    if any(map(BIDIRECTIONAL.search, names)) or not _sees_later_tokens(graph, start, end, tokens):
        return
    why = "a token's output changes with a later token, and the module gives logits over the "
    why += "vocabulary of its tokens: a model of the next token sees what it is to predict (where "
    why += "hidden tokens are predicted, say so in its class's name: Masked, BERT, Encoder)"
    yield not_masked("warning", (), (), why)


def not_masked(severity: str, names: tuple[str, ...], layers: tuple[int, ...], why: str) -> Finding:
    mend = "mask attention: is_causal=True, or -inf above the diagonal before the softmax"
    return Finding(severity, "tokens see later ones", names, layers, reason=why, mend=mend)


def _sees_later_tokens(graph: Graph, start: int, end: int, tokens: int) -> bool | None:
    """Whether earlier tokens of `end` change with the last token of `start`; None if these have no
    axis of tokens, or the graph cannot be run again."""
    x, y = graph.tensor(start), graph.tensor(end)
    if x.ndim < 2 or x.shape[1] != tokens or y.ndim < 3 or y.shape[1] != tokens:
        return None
    other = x.clone()
    other[:, -1] = x[:, 0] if bool((x[:, -1] != x[:, 0]).any()) else x[:, 1]
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        (changed,) = graph.run({start: other}, end)
        if changed.shape != y.shape:
            return None
        earlier = (changed - y)[:, :-1].double().square().mean(dtype=torch.float64)
        last = (changed - y)[:, -1:].double().square().mean()
        return bool(earlier > SEEN**2 * last) and float(last) > 0
    return None


def _over_queries(graph: Graph) -> Iterator[Finding]:
    """Softmaxes whose weights sum to one over queries, not over keys."""
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
            yield normalised_over_queries((), ())
            return


def normalised_over_queries(names: tuple[str, ...], layers: tuple[int, ...]) -> Finding:
    why = "attention weights are normalised over queries, not over keys: rows do not sum to 1, "
    why += "and a mask does not hide what it should"
    kind, mend = "softmax over the wrong axis", "softmax(..., dim=-1)"
    return Finding("error", kind, names, layers, reason=why, mend=mend)
