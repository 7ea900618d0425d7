"""Recorded operations to variables, one after another; what is known is computed on the way.

Every rule answers with the states of an operation's outputs, or with None where it does not apply;
what no rule takes is sampled, and what cannot even be sampled is named and left unpredicted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..dataflow.graph import PRODUCTS, VIEWS, Graph, Node, Ref
from .laws import F64, Laws
from .sampling import Sampler, again
from .variables import (
    NUMBERS,
    Combination,
    Curve,
    Entries,
    Field,
    Fixed,
    Joined,
    Known,
    Mix,
    Part,
    Parts,
    Product,
    Sampled,
    Square,
    State,
    Term,
    Times,
    Variable,
    Weights,
    blend,
    combination,
    curve_of,
    flipped,
    flipped_shape,
    holds_sampled,
    joined,
    number,
    of_rows,
    times,
    varies,
)

_COPIES_NAMES = (
    "repeat index_select index gather roll flip unfold as_strided narrow embedding diagonal "
    "repeat_interleave view_as_real view_as_complex slice_copy expand_copy permute_copy "
    "view_copy take_along_dim resolve_conj movedim view_as tile im2col native_dropout "
    "dropout split_copy unsafe_split squeeze_copy unsqueeze_copy alias_copy reflection_pad1d "
    "replication_pad1d unsafe_chunk chunk rot90 constant_pad_nd pad pixel_unshuffle "
    "pixel_shuffle channel_shuffle _unsafe_index upsample_nearest2d as_strided_scatter real"
)
_COPIES = VIEWS | frozenset(_COPIES_NAMES.split())
"""Operations that move entries: run on labels."""

_SAME = ("_to_copy", "native_dropout", "dropout", "view_as_complex", "view_as_real")
"""Those among them that leave every entry where it is, or nearly."""

_CURVES_NAMES = (
    "gelu relu silu tanh sigmoid exp erf softplus pow sqrt rsqrt abs leaky_relu elu hardtanh "
    "clamp clamp_min clamp_max log sin cos square reciprocal log1p hardswish hardsigmoid mish "
    "relu6 threshold expm1 log_sigmoid sign softsign log2 exp2 sgn maximum minimum prelu "
    "_prelu_kernel log_sigmoid_forward hardshrink nan_to_num logit"
)
_CURVES = frozenset(_CURVES_NAMES.split())
"""Functions of every entry by itself."""

_FACTORIES_NAMES = (
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "rand_like randn_like zero fill bernoulli"
)
_FACTORIES = frozenset(_FACTORIES_NAMES.split())
"""Operations whose numbers do not depend on what they are given."""

_MERGES_NAMES = (
    "cat stack overlay copy slice_scatter select_scatter index_copy hstack vstack concat"
)
_MERGES = frozenset(_MERGES_NAMES.split())
"""Operations that put several tensors into one."""

_BY_PLACES = ("index", "index_put", "index_add", "index_copy", "masked_scatter", "index_select")
"""Operations whose indices may be what the batch chose: those of the recorded pass are taken."""

_REDUCTIONS = ("mean", "sum", "var", "std", "linalg_vector_norm", "var_mean", "norm")
_SUMS = ("add", "sub", "rsub", "mul", "div", "neg")
Made = TypeVar("Made")

_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_batch_norm", "native_group_norm")

PLACES = 1500
"""Sites of a variable beyond which it is not followed, unless more is asked for: a covariance of
two has as many squared, of 8 bytes each."""

UNLIKE = 4.0
"""Deviations from all entries of a parameter beyond which rows of it have a law of their own."""

MANY = 16
"""Summands from which a sum with random weights is taken as Gaussian."""

SMALL = 0.02
"""Of the variance of what a bias is added to, below which its entries are taken as Gaussian."""

LEVELS = 32
"""Of a bias that is not: means of as many of its entries each, by size."""

_FEW = 8
"""Entries below which a parameter counts as numbers: scalars on the stream, lambdas."""


class Unlowered(Exception):
    """An operation without a rule, with the reason."""


class Lowering:
    """States of all values of a recorded pass.

    Args:
        graph: the pass.
        draws, seed: of the sampler.
        wider: by parameter and axis, how many times more entries it stands for.
        places: sites of a variable beyond which it is not followed.

    Attributes:
        states: of every value.
        laws: of variables.
        unread: (operation, reason) of what no rule covers, with how often.
        sampled: names of operations that are sampled, with how often.
        chosen: places that the batch chose, which are those of the recorded pass, with the roots of
            what they were chosen by.
        tied: tables that a matrix behind them is, too.
        whole: all entries of every parameter, and of every tensor that is made of some.
        coherent: parameters of which one entry acts on all features of a place, or that are used as
            numbers: they move norms as well (`scalars`).
        numbers: these, by name, as what depends on them does.
        owned: variables of whose mean, or mean square, known numbers are made, with it.
    """

    def __init__(
        self,
        graph: Graph,
        draws: int,
        seed: int,
        wider: Mapping[str, tuple[float, ...]],
        places: int = PLACES,
    ) -> None:
        self.graph, self.wider, self.places = graph, wider, places
        self.states: dict[int, State] = {}
        self.parts = Parts()
        self.sampler = Sampler(graph, self.states, draws, seed)
        self.laws = self.sampler.laws = Laws(self.sampler, self.parts)
        self.unread: Counter[tuple[str, str]] = Counter()
        self.sampled: Counter[str] = Counter()
        self.lost: set[int] = set()
        self.chosen: dict[int, frozenset[object]] = {}
        self.tied: set[str] = set()
        self.whole: dict[str, Tensor] = {}
        self.coherent: set[str] = set()
        self.numbers: dict[str, Tensor] = {}
        self.owned: dict[tuple[int, bool], tuple[Variable, Tensor]] = {}
        for index, value in enumerate(graph.values):
            if value.producer is not None:
                continue
            tensor = value.tensor.detach()
            if value.params and tensor.is_floating_point():
                entries = torch.arange(tensor.numel()).reshape(tensor.shape)
                self.states[index] = Weights(tensor, str(value.name), entries)
                self.whole[str(value.name)] = tensor
            else:
                self.states[index] = Known(tensor)
        for node in graph.nodes:
            self._node(node)

    # --- one operation ----------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        name = node.name.rstrip("_")
        states = [self.states.get(v) for v in node.inputs]
        try:
            made = self._made(node, name, states)
            for state in made:
                if isinstance(state, Field) and state.variable.sites > self.places:
                    raise Unlowered(f"{state.variable.sites} places, {self.places} at most")
        except Unlowered as reason:
            made = self._unknown(node, name, str(reason))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError) as error:
            # A rule met a spelling that it does not know; what stands behind it is marked.
            made = self._unknown(node, name, f"{type(error).__name__}: {str(error)[:80]}")
        for value, state in zip(node.outputs, made, strict=False):
            self.states[value] = state
        if self.lost.intersection(node.inputs):
            fields = (v for v in node.outputs if isinstance(self.states.get(v), Field))
            self.lost.update(fields)

    def _made(self, node: Node, name: str, states: list[State | None]) -> Sequence[State]:
        if name in _FACTORIES:
            return [Known(self.graph.tensor(v)) for v in node.outputs]
        if name in _BY_PLACES and not isinstance(states[0], Weights):
            for n, v in enumerate(node.inputs):  # places that the batch chose
                state = states[n]
                if isinstance(state, Field) and not self.graph.tensor(v).is_floating_point():
                    self.chosen[v] = state.variable.roots
                    states[n] = self.states[v] = Known(self.graph.tensor(v))
        by = _union(self.chosen.get(v, frozenset()) for v in node.inputs)
        fields = [s for s in states if isinstance(s, Field)]
        if fields:
            empty = all(not self._shape(v).numel() for v in node.outputs)
            if name == "nonzero" or empty:  # which rows an expert has, or one that has none
                by = by.union(*(field.variable.roots for field in fields))
                self.chosen.update(dict.fromkeys(node.outputs, by))
                return [Known(self.graph.tensor(v)) for v in node.outputs]
            cuts = by and name in ("index", "index_select")
            if cuts and not all(self._ranked(f.variable, by) for f in fields):
                raise Unlowered("what the batch chose by, at the places that it chose")
            return self._of_fields(node, name)
        if any(isinstance(s, Weights) for s in states):
            return self._of_weights(node, name)
        self.chosen.update(dict.fromkeys(node.outputs if by else (), by))
        return [Known(t) for t in again(self.graph, node, {}, self.states)]

    def _ranked(self, v: Variable, roots: frozenset[object]) -> bool:
        """Whether a variable says nothing of a choice by these roots, or is sorted by it: what was
        chosen has another law than what was not."""
        if not v.roots & roots or not isinstance(v, Sampled):
            return all(self._ranked(p, roots) for p in v.parents) if v.roots & roots else True
        node = self.graph.producer(v.value)
        if node is None or node.name in ("topk", "sort", "max"):
            return node is not None
        real = [n for n in node.inputs if self.graph.tensor(n).is_floating_point()]
        if len(real) < len(node.inputs) and node.name != "gather":
            return not any(isinstance(self.states.get(n), Field) for n in node.inputs)
        below = [s.variable for n in real if isinstance(s := self.states.get(n), Field)]
        return node.name == "gather" or all(self._ranked(b, roots) for b in below if b is not v)

    def _unknown(self, node: Node, name: str, reason: str) -> list[State]:
        """Variables of which nothing is known."""
        self.unread[name, reason] += 1
        self.lost.update(node.outputs)
        made: list[State] = []
        for v in node.outputs:
            shape = self._shape(v)
            feature = torch.arange(max(1, shape.numel())).reshape(shape)
            made.append(self._opaque(node, v, torch.zeros_like(feature), feature))
        return made

    def _state(self, argument: Any) -> Any:
        return self.states[argument.value] if isinstance(argument, Ref) else argument

    def _shape(self, value: int) -> torch.Size:
        return self.graph.tensor(value).shape

    def _opaque(self, node: Node, value: int, site: Tensor, feature: Tensor) -> Field:
        below = [self.states.get(v) for v in node.inputs]
        roots = _roots(s.variable for s in below if isinstance(s, Field))
        variable = Sampled(
            sites=_count(site),
            features=_count(feature),
            alike=False,
            roots=roots.union(s.root for s in below if isinstance(s, Weights)),
            value=value,
        )
        return Field(variable, site, feature)

    def _of_fields(self, node: Node, name: str) -> Sequence[State]:
        first = self._state(node.args[0]) if node.args else None
        others = [s for s in map(self.states.get, node.inputs[1:]) if isinstance(s, Field)]
        if name in ("index_add", "index_put"):
            return [self._added_at(node, name)]
        if name in ("index", "index_select", "embedding") and isinstance(first, Weights):
            chosen = self._chosen_matrix(node, first)
            if chosen is not None:
                return [chosen]
        if name in _COPIES and isinstance(first, Field) and not others:
            kinds = {self.graph.tensor(v).is_complex() for v in (node.inputs[0], node.outputs[0])}
            if name == "_to_copy" and len(kinds) > 1:  # labels of no imaginary part
                return self._sampled(node, name)
            return self._copied(node, name, first)
        if name in _MERGES:
            return [self._merged(node, name)]
        if name in PRODUCTS or name == "linear":
            return [self._product(node, name)]
        if name == "convolution":
            return [self._convolution(node)]
        if name in _NORMS:
            return self._normalized(node, name)
        made: Sequence[State] | None = None
        if name in _REDUCTIONS:
            made = self._reduced(node, name)
        elif name in _SUMS:
            made = _single(self._arithmetic(node, name))
        elif name == "masked_fill" and isinstance(first, Field):
            mask = self._state(node.args[1])
            if isinstance(mask, Known) and not bool(mask.tensor.any()):
                made = [first]
        if made is None and name in _CURVES:
            made = _single(self._curve(node, name))
        return self._sampled(node, name) if made is None else made

    # --- weights alone ----------------------------------------------------------------------------

    def _of_weights(self, node: Node, name: str) -> Sequence[State]:
        values = self.graph.values
        first = self.states[node.inputs[0]]
        live = any(values[v].live for v in node.inputs)
        weights = [s for s in map(self.states.get, node.inputs) if isinstance(s, Weights)]
        if name in _COPIES and isinstance(first, Weights) and len(weights) == 1:
            indices = [first.index]
            if name != "_to_copy":
                given = {node.inputs[0]: first.index}
                indices = again(self.graph, node, given, self.states)
            return [
                self._looked_up(name, first, values[v].tensor.detach(), index, live)
                for v, index in zip(node.outputs, indices, strict=False)
            ]
        if name in _NORMS and isinstance(first, Weights):  # of learned tokens
            self.states[node.inputs[0]] = self._places(first)
            return self._normalized(node, name)
        if live and (name in PRODUCTS or name == "linear"):
            return [self._product(node, name)]
        if live and name == "convolution":
            return [self._convolution(node)]
        if live:
            self.sampled[name] += 1
            return [self._opaque(node, v, *self._by_place(name, v)) for v in node.outputs]
        made: list[State] = []
        for v in node.outputs:
            tensor = values[v].tensor.detach()
            if not tensor.is_floating_point() and not tensor.is_complex():
                made.append(Known(tensor))
                continue
            roots = sorted({s.root for s in weights})
            root = f"{roots[0]}#{v}" if len(roots) == 1 else f"derived#{v}"
            index = torch.arange(tensor.numel()).reshape(tensor.shape)
            self.whole[root] = tensor
            if len(values[v].params) > 1:
                self.coherent |= values[v].params
            elif (slope := self._slope(v, next(iter(values[v].params), ""))) is not None:
                self.sampler.slopes[root] = slope
            made.append(Weights(tensor, root, index))
        return made

    def _slope(self, value: int, name: str) -> Tensor | None:
        """Squared derivatives of a tensor that is a function of every entry of a parameter."""
        number = next((n for n, v in enumerate(self.graph.values) if v.name == name), None)
        if number is None or self._shape(number).numel() != self._shape(value).numel():
            return None
        leaf = self.graph.tensor(number).detach().clone().requires_grad_(True)
        tensors = {number: leaf}
        with torch.enable_grad():
            for node in self.graph.ancestor_nodes(value):
                again(self.graph, node, tensors, {})
            if not tensors[value].requires_grad:
                return None
            (slope,) = torch.autograd.grad(tensors[value].sum(), leaf)
        return slope.square().reshape(-1).to(F64)

    def _looked_up(
        self, name: str, of: Weights, tensor: Tensor, index: Tensor, live: bool
    ) -> State:
        made = Weights(tensor, of.root, index.reshape(tensor.shape), of.pool, of.route)
        tables = name in ("embedding", "index", "index_select", "gather")
        if live and tables and tensor.ndim < 4 and of.tensor.ndim == 2:
            return self._places(made)
        return made

    def _places(self, w: Weights) -> Field:
        """Every place along all axes but the last is a site."""
        shape = w.index.shape
        sites, features = shape[:-1].numel(), shape[-1]
        site = torch.arange(sites).reshape(*shape[:-1], 1).expand(shape)
        feature = torch.arange(features).expand(shape)
        return Field(self._entries(w, w.index.reshape(sites, features)), site, feature)

    def _by_place(self, name: str, value: int) -> tuple[Tensor, Tensor]:
        """Labels of a tensor whose features lie along its last axis, or are its channels."""
        shape = self._shape(value)
        axis = 1 if name in ("native_batch_norm", "native_group_norm") else len(shape) - 1
        entries = torch.arange(shape.numel()).reshape(shape)
        site = torch.unique(entries.narrow(axis, 0, 1), return_inverse=True)[1].expand(shape)
        view = [-1 if a == axis else 1 for a in range(len(shape))]
        return site, torch.arange(shape[axis]).reshape(view).expand(shape)

    def _entries(self, w: Weights, index: Tensor) -> Entries:
        mean, variance = self._statistics(w)
        few = torch.linspace(0, index.shape[1] - 1, min(_FEW, index.shape[1])).round().long()
        return Entries(
            sites=index.shape[0],
            features=index.shape[1],
            gaussian=True,
            roots=frozenset([w.root]),
            root=w.root,
            index=index[:, few],
            variance=variance,
            mean=mean,
        )

    def _statistics(self, w: Weights) -> tuple[float, float]:
        """Mean and variance of what rows of a parameter are draws of: of all its entries, unless
        the rows differ from them beyond chance."""
        own, whole = statistics(w.tensor), statistics(self.whole[w.root])
        count = len(torch.unique(w.index))
        if count < 2 * UNLIKE**2:
            return own
        squares = [mean**2 + variance for mean, variance in (own, whole)]
        apart = UNLIKE * (2 / count) ** 0.5
        near = squares[0] > 0 and abs(math.log(squares[0] / squares[1])) <= apart
        return whole if near and abs(own[0] - whole[0]) <= apart * squares[1] ** 0.5 else own

    def _chosen_matrix(self, node: Node, w: Weights) -> Weights | None:
        """A matrix for every place, by the batch's choice."""
        chosen = [s for s in map(self.states.get, node.inputs) if isinstance(s, Field)]
        if len(chosen) != 1 or chosen[0].site.ndim != 1:
            return None
        if not isinstance(chosen[0].variable, Sampled):
            raise Unlowered("matrices chosen by what was put together of several choices")
        index = again(self.graph, node, {node.inputs[0]: w.index}, {})[0]
        tensor = self.graph.tensor(node.outputs[0]).detach()
        return Weights(tensor, w.root, index, w.tensor, chosen[0])

    # --- entries that move ------------------------------------------------------------------------

    def _settled(self, variable: Variable, site: Tensor, feature: Tensor) -> Field:
        """Of only such features as the labels have, in order."""
        used = torch.unique(feature)
        if len(used) < variable.features:
            variable = self.parts.of(variable, used)
            feature = torch.searchsorted(used, feature.contiguous())
        return Field(variable, site, feature)

    def _copied(self, node: Node, name: str, x: Field) -> Sequence[State]:
        rest = [Known(self.graph.tensor(v)) for v in node.outputs[1:]]
        complex_ = self.graph.tensor(node.inputs[0]).is_complex()
        if name in _SAME:
            return [Field(x.variable, x.site, x.feature), *rest]
        if name == "real":
            return [self._settled(x.variable, x.site[..., 0], x.feature[..., 0])]

        def moved(labels: Tensor) -> list[Tensor]:
            if complex_:
                parts = [of_part(labels[..., n]) for n in range(2)]
                return [torch.stack(both, -1) for both in zip(*parts, strict=True)]
            return of_part(labels)

        def of_part(labels: Tensor) -> list[Tensor]:
            return again(self.graph, node, {node.inputs[0]: labels}, self.states)

        if name in ("constant_pad_nd", "pad"):
            there, feature = moved(torch.ones_like(x.site))[0] > 0, moved(x.feature)[0]
            if not bool(there.all()):
                return [self._padded(x, moved(x.site)[0], feature, ~there)]
        sites, features = moved(x.site), moved(x.feature)
        return [self._settled(x.variable, *at) for at in zip(sites, features, strict=True)]

    def _added_at(self, node: Node, name: str) -> State:
        """Rows of one tensor added to, or put in the place of, rows of another one."""
        shape = whole = self._shape(node.outputs[0])
        adds = name == "index_add"
        into: State = self._state(node.args[0])
        source = self._state(node.args[3 if adds else 2])
        if adds:
            dim, at = node.args[1], _tensor(self._state(node.args[2])).long()
        else:
            adds = len(node.args) > 3 and bool(node.args[3])
            places = [self._state(a) for a in node.args[1]]
            if not all(isinstance(p, Known) for p in places):
                raise Unlowered("entries that are put along a later axis, or at unknown places")
            dim, at = 0, torch.zeros(1, dtype=torch.long)
            for p in (p.tensor for p in places):
                columns = p.nonzero().unbind(1) if p.dtype == torch.bool else [p]
                for column in columns:
                    at, dim = at * shape[dim] + column, dim + 1
            shape = torch.Size((shape[:dim].numel(), *shape[dim:]))
            dim = 0
        if isinstance(source, Known) and not source.tensor.numel():
            return into
        if not isinstance(source, Field):
            source = self._in_place_of(into, source, shape, dim, at) if not adds else None
        if source is None:
            raise Unlowered("known numbers added at places that the batch chose")
        source = _expanded(source, (*shape[:dim], len(at), *shape[dim + 1 :]))
        before = torch.stack([(at[:n] == at[n]).sum() for n in range(len(at))])
        total = _reshaped(into, shape) if isinstance(into, Field) else None
        if not adds and total is not None:
            kept = torch.ones(shape[dim], dtype=torch.bool).index_fill(0, at, False)
            total = self._rows(total, shape, dim, kept.nonzero()[:, 0], kept.nonzero()[:, 0])
        elif total is None and bool((_tensor(into) != 0).any()):
            raise Unlowered("known numbers to which rows are added")
        for nth in range(int(before.max()) + 1):  # a place may be given several rows
            rows = (before == nth).nonzero()[:, 0]
            placed = self._rows(source, shape, dim, rows, at[rows])
            summed = placed if total is None else self._added(total, placed, (1.0, 1.0), shape)
            if summed is None:
                raise Unlowered("rows added to a sampled variable")
            total = summed
        assert total is not None
        made: Field = _reshaped(total, whole)
        return made

    def _in_place_of(
        self, into: State, given: Any, shape: Sequence[int], dim: int, at: Tensor
    ) -> Field | None:
        """Numbers or weights, labelled as the rows of a field whose place they take."""
        if not isinstance(into, Field):
            return None
        x = _reshaped(into, shape)
        rows = Field(x.variable, x.site.index_select(dim, at), x.feature.index_select(dim, at))
        return self._as_field(given, rows)

    def _rows(self, x: Field, shape: Sequence[int], dim: int, rows: Tensor, at: Tensor) -> Field:
        """Some rows of a field at places of a tensor that is zero elsewhere."""
        site = torch.full(tuple(shape), -1).index_copy(dim, at, x.site.index_select(dim, rows))
        feature = x.feature.narrow(dim, 0, 1).expand(tuple(shape)).clone()
        feature = feature.index_copy(dim, at, x.feature.index_select(dim, rows))
        values, new = torch.unique(site, return_inverse=True)
        terms = [Term(x.variable, number(1), values)]
        return Field(combination(len(values), x.variable.features, terms), new, feature)

    def _padded(self, x: Field, site: Tensor, feature: Tensor, gone: Tensor) -> Field:
        """With places that are zero, which are sites of their own where whole rows are."""
        if bool((gone.all(-1) | ~gone.any(-1)).all()):
            place = torch.arange(gone[..., 0].numel()).reshape(*gone.shape[:-1], 1)
            label = torch.where(gone, -1 - place, site)
        else:
            axis = _padded_axis(gone)
            if axis is None:
                label = torch.where(gone, -1, site)
                feature = torch.where(gone, torch.zeros_like(feature), feature)
            else:
                shape = [1] * gone.ndim
                shape[axis] = -1
                place = torch.arange(gone.shape[axis]).reshape(shape)
                label = torch.where(gone, -1 - place, site)
                feature = torch.where(gone, feature.amax(axis, keepdim=True), feature)
        values, new = torch.unique(label, return_inverse=True)
        at = torch.where(values < 0, -1, values)
        terms = [Term(x.variable, number(1), at)]
        return Field(combination(len(values), x.variable.features, terms), new, feature)

    # --- sums and products of entries -------------------------------------------------------------

    def _aligned(
        self, shape: Sequence[int], fields: list[Field]
    ) -> tuple[Tensor, Tensor, int, int, list[Variable], list[Tensor | None]] | None:
        """Joint sites and features, their numbers, and the variables with the sites they give;
        None where one's features are the other's sites."""
        sites = [f.site.expand(shape) for f in fields]
        features = [f.feature.expand(shape) for f in fields]
        site, site_of = joined(sites, [f.variable.sites for f in fields])
        count = _count(site)
        tied = [
            f.variable.features > 1
            and count > 1
            and len(torch.unique(t)) > 1
            and len(torch.unique(site * f.variable.features + t)) == count
            for f, t in zip(fields, features, strict=True)
        ]
        if any(tied) and not all(tied):
            return None
        feature, feature_of = joined(features, [f.variable.features for f in fields])
        width = _count(feature)
        if len(torch.unique(site * width + feature)) < count * width:
            return None
        variables, places = [], []
        for f, at, chosen in zip(fields, site_of, feature_of, strict=True):
            variable = f.variable
            if variable.features == width and not torch.equal(chosen, torch.arange(width)):
                variable = self.parts.of(variable, chosen)
            plain = variable.sites == count and torch.equal(at, torch.arange(count))
            variables.append(variable)
            places.append(None if plain else at)
        return site, feature, count, width, variables, places

    def _split(self, x: Field, shape: Sequence[int]) -> Field:
        """New sites along the axes that a field is the same over."""
        site, feature = x.site.expand(shape), x.feature.expand(shape)
        code = torch.zeros(tuple(shape), dtype=torch.long)
        for axis, size in enumerate(shape):
            if size > 1 and not varies(site, [axis]) and not varies(feature, [axis]):
                view = [1] * len(shape)
                view[axis] = size
                code = code * size + torch.arange(size).reshape(view)
        sites = x.variable.sites
        values, new = torch.unique(code * sites + site, return_inverse=True)
        terms = [Term(x.variable, number(1), values % sites)]
        return Field(combination(len(values), x.variable.features, terms), new, feature)

    def _coefficient(self, c: Tensor, x: Field) -> Tensor | None:
        """A known tensor by site and feature of a field; None where it is no function of them."""
        c = c.to(F64)
        if c.numel() == 1:
            return c.reshape(())
        table = _by_entry(c, x)
        if table is not None and bool((table == table[:, :1]).all()):
            table = table[:, :1]
            if bool((table == table[:1]).all()):
                return table[0, 0]
        return table

    def _as_field(self, other: Weights | Known, x: Field) -> Field | None:
        """Weights or numbers, by site and feature of a field."""
        table = _by_entry(other.index if isinstance(other, Weights) else other.tensor.to(F64), x)
        if table is None:
            return None
        if isinstance(other, Weights) and table.shape[1] > 1 and not varies(table, [1]):
            self.coherent.add(other.root)
        made = self._entries(other, table) if isinstance(other, Weights) else _fixed(table, other)
        return Field(made, x.site, x.feature)

    def _matched(
        self, x: Field, other: Any, shape: Sequence[int], by: Callable[[Any, Field], Made | None]
    ) -> tuple[Field, Made | None]:
        """A field, with new sites where it takes them, and what `by` makes of another tensor by its
        sites and features."""
        made = by(other, x)
        if made is None:
            x = self._split(x, shape)
            made = by(other, x)
        return x, made

    def _arithmetic(self, node: Node, name: str) -> Field | None:
        shape, args = self._shape(node.outputs[0]), [self._state(a) for a in node.args]
        if any(self.graph.tensor(v).is_complex() for v in (*node.inputs, *node.outputs)):
            return self._turned(args, shape) if name == "mul" else None
        if name == "neg":
            return self._scaled(_expanded(args[0], shape), number(-1))
        x, y = args[0], args[1]
        if name in ("add", "sub", "rsub"):
            alpha = float(node.kwargs.get("alpha", args[2] if len(args) > 2 else 1.0))
            if name == "rsub":
                x, y = y, x
            return self._added(x, y, (1.0, alpha if name == "add" else -alpha), shape)
        if name == "div":
            if isinstance(y, Field) or "rounding_mode" in node.kwargs:
                return None
            y = Known(1 / self._numbers_of(y).to(F64))
        return self._multiplied(x, y, shape)

    def _turned(self, args: list[Any], shape: torch.Size) -> Field | None:
        """A complex field times known complex numbers, as rotary positions are spelled."""
        x, numbers = args if isinstance(args[0], Field) else args[::-1]
        if not isinstance(numbers, Known) or not numbers.tensor.is_complex():
            return None
        turns = torch.view_as_real(numbers.tensor.resolve_conj()).to(F64)
        full = (*shape, 2)
        along = turns[..., :1].expand(turns.shape)
        across = turns[..., 1:] * torch.tensor([-1.0, 1.0], dtype=F64)
        exchanged = Field(x.variable, x.site.flip(-1), x.feature.flip(-1))
        one = self._multiplied(x, Known(along), full)
        other = self._multiplied(exchanged, Known(across), full)
        return one and other and self._added(one, other, (1.0, 1.0), full)

    def _by_feature(self, w: Weights, x: Field) -> bool:
        """Whether a few entries are one for every feature of a field."""
        count = w.tensor.numel()
        return w.tensor.shape[-1:] == (count,) == x.site.shape[-1:] and varies(x.feature, [-1])

    def _numbers_of(self, state: Any) -> Tensor:
        """The numbers that a tensor has, be they a parameter's, on which they depend then."""
        if not isinstance(state, Weights):
            return _tensor(state)
        self.coherent.add(state.root)
        return self.moving(state)

    def moving(self, w: Weights) -> Tensor:
        """Numbers of weights as they depend on the parameters that they are made of."""
        graph, (name, _, made) = self.graph, w.root.partition("#")
        if made:
            value = int(made)
        else:
            value = next(n for n, v in enumerate(graph.values) if v.params and v.name == name)
        tensors: dict[int, Tensor] = {}
        for leaf in graph.leaves(value):
            if graph.values[leaf].params:
                tensor = self.graph.tensor(leaf).detach().clone().requires_grad_(True)
                tensors[leaf] = self.numbers.setdefault(str(graph.values[leaf].name), tensor)
        for node in graph.ancestor_nodes(value):
            again(graph, node, tensors, {})
        return tensors[value].reshape(-1)[w.index]

    def own(self, v: Variable, square: bool = False) -> Tensor:
        """Mean (sites,) of a variable, or mean square; where a parameter is used as a number before
        it, as what known numbers made of it depend on."""
        law = self.laws.square(v) if square else self.laws.mean(v)
        if not self.coherent:
            return law
        if (v.number, square) not in self.owned:
            self.owned[v.number, square] = v, law.detach().clone().requires_grad_(True)
        return self.owned[v.number, square][1] * 1.0

    def _scaled(self, x: Field, c: Tensor) -> Field:
        terms = [Term(x.variable, c)]
        return Field(combination(x.variable.sites, x.variable.features, terms), x.site, x.feature)

    def _added(
        self, x: Any, y: Any, signs: tuple[float, float], shape: Sequence[int]
    ) -> Field | None:
        if not isinstance(x, Field):
            x, y, signs = y, x, (signs[1], signs[0])
        one, other = number(signs[0]), number(signs[1])
        if isinstance(y, Field):
            together = self._aligned(shape, [x, y])
            if together is None or self._entangled(*together[4]):
                return None
            site, feature, sites, features, (a, b), (i, j) = together
            terms = [Term(a, one, i), Term(b, other, j)]
            return Field(combination(sites, features, terms), site, feature)
        x = _expanded(x, shape)
        if isinstance(y, Weights) and (y.tensor.numel() >= _FEW or self._by_feature(y, x)):
            x, field = self._matched(x, _weights_expanded(y, shape), shape, self._as_field)
            if field is None:
                return None
            if not _shared(field.variable):
                self._level(field.variable, y, x.variable)
                return self._sum(x, one, field, other)
            y = _weights_expanded(y, shape)
        numbers = self._numbers_of(y)
        if numbers.is_complex() or numbers.dtype == torch.bool:
            return None
        largest = float(numbers.detach().to(F64).abs().max())
        if not largest <= 1e9:
            return None
        numbers = numbers.expand(tuple(shape))
        x, c = self._matched(x, numbers, shape, self._coefficient)
        if c is None:
            return None
        if c.ndim == 2 and c.shape[1] > 1:
            field = self._as_field(Known(numbers), x)
            return None if field is None else self._sum(x, one, field, other)
        sites = x.variable.sites
        shift = (c * other).reshape(-1, 1).expand(sites, 1)
        terms = [Term(x.variable, one)]
        return Field(combination(sites, x.variable.features, terms, shift), x.site, x.feature)

    def _level(self, entries: Variable, w: Weights, x: Variable) -> None:
        """Levels of a bias that is far from Gaussian and not small beside what it is added to."""
        if not isinstance(entries, Entries) or varies(entries.index, [0]) or not x.gaussian:
            return
        if entries.variance > SMALL * float(self.laws.variance(x).mean()):
            entries.levels = _levels(self.whole[w.root], entries.mean, entries.variance)

    def _sum(self, x: Field, c: Tensor, y: Field, d: Tensor) -> Field:
        """Of two fields with the same labels."""
        terms = [Term(x.variable, c), Term(y.variable, d)]
        return Field(combination(x.variable.sites, x.variable.features, terms), x.site, x.feature)

    def _multiplied(self, x: Any, y: Any, shape: Sequence[int]) -> Field | None:
        if not isinstance(x, Field):
            x, y = y, x
        if isinstance(y, Field):
            together = self._aligned(shape, [x, y])
            if together is None:
                return None
            site, feature, sites, features, (a, b), (i, j) = together
            one, other = curve_of(a), curve_of(b)
            if one and other and one[0] is other[0] and i is None and j is None:
                f, g = one[1], other[1]
                return Field(_curve(one[0], lambda z: f(z) * g(z)), site, feature)
            if self._independent(a, b):
                return Field(times(a, b, (i, j), sites, features), site, feature)
            return None
        x = _expanded(x, shape)
        few = isinstance(y, Weights) and 1 < y.tensor.numel() < _FEW
        if isinstance(y, Weights) and (not few or self._by_feature(y, x)):
            x, field = self._matched(x, _weights_expanded(y, shape), shape, self._as_field)
            if field is None:
                return None
            a, b = x.variable, field.variable
            if not _shared(b):
                return Field(times(a, b, (None, None), a.sites, a.features), x.site, x.feature)
            y = _weights_expanded(y, shape)
        numbers = self._numbers_of(y)
        if numbers.is_complex():
            return None
        x, c = self._matched(x, numbers.expand(tuple(shape)), shape, self._coefficient)
        return None if c is None else self._scaled(x, c)

    def _entangled(self, a: Variable, b: Variable) -> bool:
        """Whether a sum needs a covariance that only joint draws give."""
        if not a.roots & b.roots or (a.gaussian and b.gaussian):
            return False
        if not (holds_sampled(a) or holds_sampled(b)):
            return False
        pairs = itertools.product(self._signs(a), self._signs(b))
        return not all(
            m == n or (s and not s & q) or (t and not t & r) for (m, s, r), (n, t, q) in pairs
        )

    def _signs(self, v: Variable) -> list[tuple[int, frozenset[object], frozenset[object]]]:
        """Of every summand its number, the roots of a factor that is as often positive as negative
        whatever the others are, and those of all factors."""
        if isinstance(v, Combination):
            return [pair for term in v.terms for pair in self._signs(term.variable)]
        if isinstance(v, Times):
            for one in v.parents:
                if one.gaussian and not bool(self.laws.mean(one).any()):
                    return [(v.number, one.roots, v.roots)]
        return [(v.number, frozenset(), v.roots)]

    def _independent(self, a: Variable, b: Variable) -> bool:
        if not a.roots & b.roots:
            return True
        one, other = curve_of(a), curve_of(b)
        if not one or not other or one[0] is other[0]:
            return False
        size = (self.laws.variance(one[0]).max() * self.laws.variance(other[0]).max()).sqrt()
        return bool(self.laws.covariance(one[0], other[0]).abs().max() <= 1e-9 * size)

    def _curve(self, node: Node, name: str) -> Field | None:
        fields = [v for v in node.inputs if isinstance(self.states.get(v), Field)]
        if len(fields) != 1:
            return None
        (at,) = fields
        x = self.states[at]
        assert isinstance(x, Field)
        others = [v for v in node.inputs if v != at]
        if any(_tensor(self.states[v]).numel() != 1 for v in others):
            return None
        base = curve_of(x.variable)
        if base is None:
            if name == "square" or (name == "pow" and node.args[1] == 2):
                v = x.variable
                square = Square(
                    sites=v.sites,
                    features=v.features,
                    alike=False,
                    roots=v.roots,
                    value=node.outputs[0],
                    inner=v,
                )
                return Field(square, x.site, x.feature)
            return None
        graph, states, (gaussian, inner) = self.graph, self.states, base

        def function(z: Tensor) -> Tensor:
            given = {at: inner(z)}
            for v in others:
                given[v] = _tensor(states[v]).to(z.dtype).reshape(())
            return again(graph, node, given, states)[0]

        return Field(_curve(gaussian, function), x.site, x.feature)

    # --- means over features, sums over sites -----------------------------------------------------

    def _reduced(self, node: Node, name: str) -> Sequence[State] | None:
        x, args = self._state(node.args[0]), node.args
        axes = args[1] if len(args) > 1 else node.kwargs.get("dim")
        if name in ("linalg_vector_norm", "norm"):
            if len(args) > 1 and args[1] not in (2, 2.0):
                return None
            axes = args[2] if len(args) > 2 else node.kwargs.get("dim")
        axes = [axes] if isinstance(axes, int) else list(axes or range(x.site.ndim))
        axes = [a % x.site.ndim for a in axes]
        count = 1
        for a in axes:
            count *= x.site.shape[a]
        if not varies(x.feature, axes):
            pools = name in ("mean", "sum")
            share = number(1.0 / count if name == "mean" else 1.0)
            shape = self._shape(node.outputs[0])
            return [self._pooled(x, axes, share, shape)] if pools else None
        mean = self.own(x.variable)[x.site]
        over = mean.mean(axes, keepdim=True)
        positive = isinstance(x.variable, Square)
        if name == "mean" or (name == "sum" and positive):
            return [self._known(node, 0, over * (count if name == "sum" else 1))]
        second = self.own(x.variable, square=True)[x.site]
        if name == "sum" and float((mean**2).mean()) * count < 4 * float(second.mean()):
            return None  # noise of the same order as what follows
        if name == "sum":
            return [self._known(node, 0, over * count)]
        square = second.mean(axes, keepdim=True)
        if name in ("linalg_vector_norm", "norm"):
            return [self._known(node, 0, (count * square).sqrt())]
        variance = square - over**2
        if name == "var_mean":
            return [self._known(node, 0, variance), self._known(node, 1, over)]
        return [self._known(node, 0, variance if name == "var" else variance.sqrt())]

    def _known(self, node: Node, output: int, tensor: Tensor) -> Known:
        return Known(tensor.reshape(self._shape(node.outputs[output])))

    def _pooled(self, x: Field, axes: list[int], share: Tensor, shape: Sequence[int]) -> Field:
        """A sum over sites, times a number."""
        kept = [a for a in range(x.site.ndim) if a not in axes]
        site = x.site.permute(kept + axes).flatten(len(kept))
        feature = x.feature.permute(kept + axes).reshape(site.shape)[..., 0]
        rows, new = torch.unique(site.reshape(-1, site.shape[-1]), dim=0, return_inverse=True)
        made = blend(x.variable, rows, share)
        return self._settled(made, new.reshape(shape), feature.reshape(shape))

    def _normalized(self, node: Node, name: str) -> Sequence[State]:
        x, args = self._state(node.args[0]), node.args
        if not isinstance(x, Field):
            raise Unlowered("a norm of known numbers with gains of the batch")
        shape, weight, bias = x.site.shape, args[1], args[2]
        if name == "native_batch_norm":
            centred, scale = self._by_channel(x, args)
        elif name == "native_group_norm":
            rows = torch.Size((shape[0], args[6], shape[1:].numel() // args[6]))
            centred, scale = self._over_features(x, rows, [2], args[7])
        else:
            axes = list(range(x.site.ndim - len(args[1]), x.site.ndim))
            weight, bias, epsilon = args[2], None, args[3] if len(args) > 3 else None
            if name == "native_layer_norm":
                bias, epsilon = args[3:5]
            epsilon = epsilon or torch.finfo(torch.float32).eps
            centres = name == "native_layer_norm"
            centred, scale = self._over_features(x, shape, axes, epsilon, centres)
        out = centred and self._multiplied(centred, Known(scale), shape)
        channels = (-1, *[1] * (x.site.ndim - 2)) if "group" in name or "batch" in name else (-1,)
        if "layer" in name or "rms" in name:
            channels = tuple(args[1])
        if weight is not None:
            out = out and self._multiplied(out, _reshaped(self._state(weight), channels), shape)
        if bias is not None:
            gains = _reshaped(self._state(bias), channels)
            out = out and self._added(out, gains, (1.0, 1.0), shape)
        if out is None:
            raise Unlowered("a norm whose gains follow no feature")
        return [out, *(Known(self.graph.tensor(v)) for v in node.outputs[1:])]

    def _over_features(
        self, x: Field, rows: torch.Size, axes: list[int], epsilon: float, centres: bool = True
    ) -> tuple[Field | None, Tensor]:
        """A field less its mean over axes of `rows`, a shape of it, and 1 over its deviation
        there: known numbers, to leading order in 1/features."""

        def over(numbers: Tensor) -> Tensor:
            whole = numbers[x.site].reshape(rows)
            return whole.mean(axes, keepdim=True).expand(rows).reshape(x.site.shape)

        mean, square = over(self.own(x.variable)), over(self.own(x.variable, square=True))
        if not centres:
            return x, (square + epsilon).rsqrt()
        centred = self._added(x, Known(-mean), (1.0, 1.0), x.site.shape)
        return centred, (square - mean**2 + epsilon).rsqrt()

    def _by_channel(self, x: Field, args: Any) -> tuple[Field | None, Tensor]:
        """A field less every channel's mean over its places, and 1 over the deviation there, whose
        square is taken as its mean over channels: to leading order in 1/places."""
        shape, view = x.site.shape, (1, -1, *[1] * (x.site.ndim - 2))
        axes = [a for a in range(x.site.ndim) if a != 1]
        if not args[5]:  # by what it has seen before
            mean, variance = (self.graph.tensor(a.value).reshape(view) for a in args[3:5])
            centred = self._added(x, Known(-mean), (1.0, 1.0), shape)
            return centred, (variance.to(F64) + args[7]).rsqrt()
        if varies(x.feature, axes):
            raise Unlowered("channels that are no feature of what is normalised")
        places = shape.numel() // shape[1]
        if places < _FEW:  # of n values that are normalised, two directions have no gradient
            raise Unlowered(f"a batch norm over {places} values of a channel")
        mean_of = self._pooled(x, axes, number(1 / places), (1, shape[1], *[1] * len(axes[1:])))
        centred = self._added(x, mean_of, (1.0, -1.0), shape)
        if centred is None:
            return None, torch.ones(())
        square = self.own(centred.variable, square=True)[centred.site].mean()
        return centred, (square + args[7]).rsqrt()

    # --- several tensors in one -------------------------------------------------------------------

    def _merged(self, node: Node, name: str) -> Field:
        states = {v: self.states[v] for v in dict.fromkeys(node.inputs)}
        partner = next(s for s in states.values() if isinstance(s, Field))
        for v, state in states.items():
            if isinstance(state, Weights):
                states[v] = self._along(node, name, state, partner) or self._places(state)
            elif isinstance(state, Known) and bool((state.tensor != 0).any()):
                states[v] = self._numbers(state)
        site_of, feature_of, which_of = {}, {}, {}
        first, bases = 1, {}
        for n, (v, state) in enumerate(states.items(), 1):
            if isinstance(state, Field):
                site_of[v], feature_of[v] = state.site + first, state.feature
                which_of[v] = torch.full_like(state.site, n)
                bases[n] = state, first
                first += state.variable.sites
            else:
                zero = torch.zeros(self._shape(v), dtype=torch.long)
                site_of[v] = feature_of[v] = which_of[v] = zero
        site, feature, which = (
            again(self.graph, node, dict(labels), self.states)[0]
            for labels in (site_of, feature_of, which_of)
        )
        axis = self._feature_axis(node, name, which, [state for state, _ in bases.values()])
        if axis is not None:
            return self._side_by_side(site, feature, which, axis, bases)
        blank = which == 0
        if bool(blank.any()):  # zeros are sites of their own, by place along all axes but features
            place = torch.arange(site.shape[:-1].numel()).reshape(*site.shape[:-1], 1)
            site = torch.where(blank, first + place, site)
            feature = torch.where(blank, torch.zeros_like(feature), feature)
        values, new = torch.unique(site, return_inverse=True)
        parts = [state.variable for state, _ in bases.values()]
        if any(self._entangled(a, b) for a, b in itertools.combinations(parts, 2)):
            self.sampled[name] += 1
            return self._opaque(node, node.outputs[0], new, feature)
        terms = []
        for state, low in bases.values():
            inside = (values >= low) & (values < low + state.variable.sites)
            if bool(inside.any()):
                at = torch.where(inside, values - low, -1)
                terms.append(Term(state.variable, number(1), at))
        width = max(state.variable.features for state, _ in bases.values())
        return self._settled(combination(len(values), width, terms), new, feature)

    def _feature_axis(
        self, node: Node, name: str, which: Tensor, fields: list[Field]
    ) -> int | None:
        """The axis along which features of several tensors stand side by side; None: sites do."""
        axis = (
            (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))
            if (name in ("cat", "concat", "stack"))
            else None
        )
        axis = None if axis is None else axis % which.ndim
        if name == "stack":
            one = fields[0]
            parts = all(_is_part(f.variable) for f in fields)
            several = 1 < len(fields) == len({f.variable.number for f in fields})
            same = all(
                f.variable.roots == one.variable.roots and torch.equal(f.site, one.site)
                for f in fields
            )
            alone = len(fields) == len(set(node.inputs))
            return axis if parts and several and same and alone else None
        if axis is None:
            mixed = bool((which != which[..., :1]).any())
            plain = all(not varies(f.site, [f.site.ndim - 1]) for f in fields)
            return which.ndim - 1 if mixed and plain else None
        along = any(
            f.site.shape[axis] > 1 and not varies(f.site, [axis]) and varies(f.feature, [axis])
            for f in fields
        )
        return axis if along else None

    def _numbers(self, known: Known) -> Field:
        """Numbers without a partner, whose places are those of `_places`."""
        shape = known.tensor.shape
        sites, features = shape[:-1].numel(), shape[-1]
        site = torch.arange(sites).reshape(*shape[:-1], 1).expand(shape)
        values = known.tensor.to(F64).reshape(sites, features)
        return Field(_fixed(values, known), site, torch.arange(features).expand(shape))

    def _along(self, node: Node, name: str, w: Weights, partner: Field) -> Field | None:
        """Weights concatenated to a field whose features lie along another axis than the last, as
        a sink for every head does to the scores."""
        shape = w.tensor.shape
        if name not in ("cat", "concat") or len(shape) != partner.site.ndim:
            return None
        at = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
        others = [a for a in range(len(shape)) if a != at and shape[a] > 1]
        axes = [a for a in others if varies(partner.feature, [a])]
        if not axes or len(shape) - 1 in axes or varies(partner.feature, [at]):
            return None
        feature = partner.feature.narrow(at, 0, 1).expand(shape)
        place = torch.arange(shape.numel()).reshape(shape)
        for a in axes:
            place = place.narrow(a, 0, 1)
        site = torch.unique(place, return_inverse=True)[1].expand(shape)
        index = torch.zeros(_count(site), partner.variable.features, dtype=torch.long)
        index[site, feature] = w.index
        return Field(self._entries(w, index), site, feature)

    def _side_by_side(
        self,
        site: Tensor,
        feature: Tensor,
        which: Tensor,
        axis: int,
        bases: dict[int, tuple[Field, int]],
    ) -> Field:
        column = which.movedim(axis, -1).reshape(-1, which.shape[axis])[0]
        at, width = torch.zeros_like(feature), 0
        pieces: list[tuple[Variable, int]] = []
        new_site, count = torch.zeros_like(site.narrow(axis, 0, 1)), 0
        for n in torch.unique_consecutive(column).tolist():
            if n not in bases:
                continue
            state, low = bases[n]
            columns = (column == n).nonzero()[:, 0]
            here = site.index_select(axis, columns[:1]) - low
            if not pieces:
                values, new_site = torch.unique(here, return_inverse=True)
                count = len(values)
            gather = torch.full((count,), -1, dtype=torch.long)
            gather[new_site.reshape(-1)] = here.reshape(-1)
            chosen = feature.index_select(axis, columns)
            used = torch.unique(chosen)
            piece = self.parts.of(state.variable, used)
            piece = combination(count, piece.features, [Term(piece, number(1), gather)])
            pieces.append((piece, width))
            at = at.index_copy(axis, columns, width + torch.searchsorted(used, chosen.contiguous()))
            width += piece.features
        blanks = (column == 0).nonzero()[:, 0]
        if len(blanks):
            zero = Combination(sites=count, features=len(blanks), gaussian=True, terms=[])
            pieces.append((zero, width))
            view = [1] * feature.ndim
            view[axis] = len(blanks)
            size = [len(blanks) if a == axis else n for a, n in enumerate(feature.shape)]
            places = width + torch.arange(len(blanks)).reshape(view)
            at = at.index_copy(axis, blanks, places.expand(size).contiguous())
            width += len(blanks)
        whole = Joined(
            sites=count,
            features=width,
            gaussian=all(piece.gaussian for piece, _ in pieces),
            alike=False,
            roots=_roots(piece for piece, _ in pieces),
            pieces=pieces,
        )
        return Field(whole, new_site.expand(site.shape), at)

    # --- matrices ---------------------------------------------------------------------------------

    def _product(self, node: Node, name: str) -> Field:
        args = [self._state(a) for a in node.args]
        bias, beta, alpha = None, node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if name in ("addmm", "baddbmm", "addmv"):
            bias, x, y = args[:3]
        elif name == "linear":
            x, y, bias = (*args, None)[:3]
            y = flipped(y)
        else:
            x, y = args[:2]
        out = node.outputs[0]
        shape = self._shape(out)
        if name in ("mv", "addmv"):
            raise Unlowered("a matrix times a vector")
        made = self._contracted(node, x, y, shape)
        if made is None:  # numbers along features
            made = self._fixed_matrix(node, x, y, shape)
        elif bias is not None and beta and not isinstance(made.variable, Sampled):
            made = self._added(made, bias, (float(alpha), float(beta)), shape)
            if made is None:
                raise Unlowered("a bias that follows no feature")
        return made

    def _contracted(self, node: Node, x: Any, y: Any, shape: torch.Size) -> Field | None:
        if isinstance(y, Weights) and isinstance(x, Field | Known):
            return self._weighted(x, y, shape)
        if isinstance(x, Weights) and isinstance(y, Field | Known):
            made = self._weighted(flipped(y), flipped(x), flipped_shape(shape))
        elif isinstance(x, Field) and isinstance(y, Field):
            return self._pairs(node, x, y)
        elif isinstance(x, Known) and isinstance(y, Field):
            return self._mixed(x.tensor, y, shape)
        elif isinstance(y, Known) and isinstance(x, Field):
            made = self._mixed(y.tensor.transpose(-1, -2), flipped(x), flipped_shape(shape))
        else:
            raise Unlowered("a product of two parameters with numbers of the batch")
        return None if made is None else flipped(made)

    def _fixed_matrix(self, node: Node, x: Any, y: Any, shape: torch.Size) -> Field:
        """Known numbers along features: sampled."""
        self.sampled["fixed matrix"] += 1
        at_left = isinstance(x, Field)
        field = x if at_left else flipped(y)
        shape_of = shape if at_left else torch.Size(flipped_shape(shape))
        site = of_rows(field.site, -1).unsqueeze(-1).expand(shape_of)
        code = of_rows(field.feature, -1).unsqueeze(-1) * shape_of[-1]
        feature = torch.unique(
            (code + torch.arange(shape_of[-1])).expand(shape_of), return_inverse=True
        )[1]
        made = self._opaque(node, node.outputs[0], site, feature)
        return made if at_left else flipped(made)

    def _mixed(self, numbers: Tensor, y: Field, shape: Sequence[int]) -> Field | None:
        """Known numbers times a field along its sites; None where features vary along them."""
        if varies(y.feature, [y.feature.ndim - 2]):
            return None
        rows, full = y.site.movedim(-2, -1), torch.Size(shape)
        k, c = rows.shape[-1], numbers.to(F64)
        sites = rows.unsqueeze(-3).expand(*full[:-2], full[-2], full[-1], k)
        count = c.shape[-2] if c.ndim > 1 else 1
        factors = c.unsqueeze(-2).expand(*full[:-2], count, full[-1], k)
        sites, factors = sites.reshape(-1, k), factors.reshape(-1, k)
        code = torch.cat((sites.to(F64), factors.detach()), 1)
        new = torch.unique(code, dim=0, return_inverse=True)[1]
        first = torch.zeros(_count(new), dtype=torch.long)
        first[new] = torch.arange(len(new))
        feature = y.feature.select(-2, 0).unsqueeze(-2).expand(full)
        made = blend(y.variable, sites[first], factors[first])
        return self._settled(made, new.reshape(full), feature)

    def _weighted(self, x: Field | Known, w: Weights, shape: Sequence[int]) -> Field | None:
        """x W, for fresh W."""
        k = w.index.shape[-2]
        streams = isinstance(x, Field) and not varies(x.feature, [x.feature.ndim - 1])
        if isinstance(x, Field) and streams and x.site.ndim >= 2 and k > 1:  # or places
            made = self._mixed(self._numbers_of(w).mT, flipped(x), flipped_shape(shape))
            if made is not None and k >= MANY:
                made.variable.gaussian = True
            return None if made is None else flipped(made)
        full, columns_used = torch.Size(shape), w.index[..., 0, :]
        source, known, columns, matrix = None, None, [], None
        if isinstance(x, Field):
            source = x.variable
            cols, counts = torch.unique(x.site.reshape(-1, k).T, dim=0, return_counts=True)
            code = cols.T
            batched = columns_used.ndim > 1 and varies(columns_used, [0])
            several = w.route is not None or (batched and varies(x.site, [0]))
            if several:
                which = torch.unique(columns_used[:, 0], return_inverse=True)[1]
                which = which if w.route is None else w.route.site
                own = which[:, None].expand(x.site.shape[:-1]).reshape(-1, 1)
                code = torch.cat((code, own), 1)
            rows, new = torch.unique(code, dim=0, return_inverse=True)
            site = new.reshape(*x.site.shape[:-1], 1).expand(full)
            sites = len(rows)
            columns = [(float(n), rows[:, c]) for c, n in enumerate(counts.tolist())]
            matrix = rows[:, -1] if several else None
        else:
            numbers = x.tensor.to(F64)
            sites = numbers.shape[:-1].numel()
            site = torch.arange(sites).reshape(*numbers.shape[:-1], 1).expand(full)
            known = numbers.detach().reshape(sites, k)
        if matrix is not None:
            feature = torch.arange(full[-1]).expand(full)
            key: object = (w.root, "several")
        else:
            used, labels = torch.unique(columns_used, return_inverse=True)
            feature = (labels if labels.ndim == 1 else labels.unsqueeze(-2)).expand(full)
            key = (w.root, used.numpy().tobytes())
        read = source, known, columns
        more = self._more(w)
        if source is not None and w.root in source.roots:
            self.tied.add(w.root)
        fresh = _product(w, key, (sites, _count(feature)), *read, matrix, more)
        return Field(fresh, site, feature)

    def _more(self, w: Weights) -> float:
        """How many times more features a matrix sums over than it has here."""
        sizes = self.wider.get(w.root, ())
        if not sizes or w.index.shape[-2] < 2:
            return 1.0
        rows = w.index[(0,) * (w.index.ndim - 2)]
        step = abs(int(rows[1, 0] - rows[0, 0]))
        shape = self.graph.leaf(w.root).shape
        return next((n for a, n in enumerate(sizes) if step >= shape[a + 1 :].numel()), 1.0)

    def _pairs(self, node: Node, x: Field, y: Field) -> Field:
        """Two fields contracted."""
        shape = self._shape(node.outputs[0])
        for p, q, turned in ((x, y, False), (flipped(y), flipped(x), True)):
            along_sites = not varies(q.feature, [q.feature.ndim - 2])
            along_weights = not turned or not varies(p.feature, [p.feature.ndim - 1])
            apart = self._apart(p.variable, q.variable)
            if isinstance(p.variable, Sampled) and along_sites and along_weights and apart:
                made = self._mix(p, q, flipped_shape(shape) if turned else shape)
                return flipped(made) if turned else made
        self.sampled[f"{node.name} of two fields"] += 1
        labels = []
        for one, other in ((x.site, y.site), (x.feature, y.feature)):
            rows, columns = of_rows(one, -1), of_rows(other, -2)
            both = [rows.unsqueeze(-1).expand(shape), columns.unsqueeze(-2).expand(shape)]
            labels.append(joined(both, [_count(rows), _count(columns)])[0])
        return self._opaque(node, node.outputs[0], *labels)

    def _apart(self, a: Variable, b: Variable) -> bool:
        """Whether two variables share no weights, or other columns of them only."""
        if not a.roots & b.roots:
            return True
        one, other = self._columns(a), self._columns(b)
        return all(
            one[root] is not None and other[root] is not None and not one[root] & other[root]
            for root in one.keys() & other.keys()
        )

    def _columns(self, v: Variable) -> dict[object, Any]:
        """Of every root of a variable, the features of it that it rests on; None: all."""
        if isinstance(v, Part) and isinstance(v.whole, Product | Entries):
            return dict.fromkeys(v.roots, frozenset(v.chosen.tolist()))
        below = v.parents
        if isinstance(v, Sampled):
            below = tuple(field.variable for field in self.sampler.plan(v).cuts.values())
        if isinstance(v, Product) or not below:
            return dict.fromkeys(v.roots)
        total: dict[object, Any] = {}
        for parent in below:
            for root, columns in self._columns(parent).items():
                both = root not in total or (total[root] is not None and columns is not None)
                total[root] = columns | total.get(root, frozenset()) if both and columns else None
        return total

    def _mix(self, a: Field, x: Field, shape: Sequence[int]) -> Field:
        """Sampled weights times an independent field, along the latter's sites."""
        full = torch.Size(shape)
        if varies(a.feature, [a.feature.ndim - 2]):
            a = self._of_one_feature(a)
        rows = a.site.unsqueeze(-2).expand(*full, a.site.shape[-1])
        columns = x.site.transpose(-1, -2).unsqueeze(-3).expand(rows.shape)
        k = rows.shape[-1]
        code = torch.cat((rows.reshape(-1, k), columns.reshape(-1, k)), 1)
        both = torch.stack(
            (
                of_rows(a.site, -1).unsqueeze(-1).expand(full),
                of_rows(x.site, -2).unsqueeze(-2).expand(full),
            )
        )
        place = torch.unique(both.reshape(2, -1).T, dim=0, return_inverse=True)[1]
        first = torch.zeros(_count(place), dtype=torch.long)
        first[place] = torch.arange(len(place))
        rows_of = x.feature.select(-2, 0).unsqueeze(-2).expand(full)
        heads_of = a.feature.narrow(-1, 0, 1).expand(full)
        labels = [heads_of, rows_of]  # heads that share values have entries of their own
        feature, _ = joined(labels, [a.variable.features, x.variable.features])
        mix = Mix(
            sites=len(first),
            features=_count(feature),
            alike=False,
            roots=a.variable.roots | x.variable.roots,
            weights=a.variable,
            values=x.variable,
            weights_at=code[first][:, :k],
            values_at=code[first][:, k:],
        )
        return Field(mix, place.reshape(full), feature)

    def _of_one_feature(self, a: Field) -> Field:
        """A sampled field every entry of which is a site of its own, so that rows stay apart."""
        old = a.variable
        assert isinstance(old, Sampled)
        sites = old.sites * old.features
        new = replace(old, sites=sites, features=1, number=next(NUMBERS))

        def spread(x: Field) -> Field:
            site = x.site * old.features + x.feature
            return Field(new, site, torch.zeros_like(site))

        for value, state in self.states.items():
            if isinstance(state, Field) and state.variable is old:
                self.states[value] = spread(state)
        return spread(a)

    def _convolution(self, node: Node) -> Field:
        x, w, bias, stride, padding, dilation, transposed, _, groups = (
            self._state(a) for a in node.args[:9]
        )
        if transposed:
            raise Unlowered("a transposed convolution")
        if not isinstance(w, Weights):
            raise Unlowered("a convolution whose weights depend on the batch")
        labels = x.site if isinstance(x, Field) else x.tensor
        taps = tuple(w.tensor.shape[2:])
        channels, axes = labels.shape[1], len(taps)
        lists = (stride, padding, dilation)
        settings = [list(s) * (axes if len(s) == 1 else 1) for s in lists]

        def windows(a: Tensor) -> Tensor:
            """(B, places, channels * taps), 0 beyond the edges."""
            a = functional.pad(a, [n for p in reversed(settings[1]) for n in (p, p)])
            for axis, (size, step, _, apart) in enumerate(zip(taps, *settings, strict=True)):
                a = a.unfold(2 + axis, apart * (size - 1) + 1, step)[..., ::apart]
            return a.movedim(1, 1 + axes).flatten(1 + axes).flatten(1, axes)

        source, known, columns = None, None, []
        if isinstance(x, Known):
            if groups > 1:
                raise Unlowered("a grouped convolution of known numbers")
            rows = windows(x.tensor.to(F64))
            known = rows.reshape(-1, rows.shape[-1])
            sites = len(known)
            site = torch.arange(sites).reshape(rows.shape[:2])
        else:
            rows = windows(x.site + 1) - 1
            if groups == channels:
                rows = rows[..., : torch.Size(taps).numel()]
            cols, counts = torch.unique(
                rows.reshape(-1, rows.shape[-1]).T, dim=0, return_counts=True
            )
            places, site = torch.unique(cols.T, dim=0, return_inverse=True)
            site, sites, source = site.reshape(rows.shape[:2]), len(places), x.variable
            share = 1.0 if groups == channels else 1.0 / groups
            columns = [(n * share, places[:, c]) for c, n in enumerate(counts.tolist())]
        shape, key = self._shape(node.outputs[0]), (w.root, "convolution")
        more = self.wider.get(w.root, (1.0, 1.0))[1]
        made = _product(w, key, (sites, shape[1]), source, known, columns, wider=more)
        site = site.reshape(shape[0], 1, *shape[2:]).expand(shape)
        feature = torch.arange(shape[1]).reshape(1, -1, *[1] * len(taps)).expand(shape)
        out: Field | None = Field(made, site, feature)
        if bias is not None:
            bias = _reshaped(bias, (-1, *[1] * len(taps)))
            out = out and self._added(out, bias, (1.0, 1.0), shape)
        if out is None:
            raise Unlowered("a bias that follows no channel")
        return out

    # --- what is drawn ----------------------------------------------------------------------------

    def _sampled(self, node: Node, name: str) -> list[State]:
        fields = [s for s in map(self.states.get, node.inputs) if isinstance(s, Field)]
        made: list[State] = []
        for v in node.outputs:
            labels = self._labels(name, fields, self._shape(v))
            if labels is None:
                raise Unlowered("no labels for what it gives")
            if self.graph.tensor(v).is_complex():
                site, feature = labels
                parts = 2 * feature.unsqueeze(-1) + torch.arange(2)
                labels = site.unsqueeze(-1).expand(parts.shape), parts
            made.append(self._opaque(node, v, *labels))
        self.sampled[name] += 1
        return made

    def _labels(
        self, name: str, fields: list[Field], shape: torch.Size
    ) -> tuple[Tensor, Tensor] | None:
        ranking = name in ("topk", "sort", "argsort")
        scatters = name in ("scatter", "index_put", "scatter_add")
        if not ranking and not scatters and _broadcast([f.site.shape for f in fields], shape):
            return self._joint(shape, fields)
        x, last = fields[0], fields[-1]
        if name == "gather" and last.site.shape == shape:
            return last.site, last.feature
        if scatters and x.site.ndim == len(shape):
            site = of_rows(x.site, -1).unsqueeze(-1)
            if site.shape[:-1] == shape[:-1]:
                return site.expand(shape), torch.arange(shape[-1]).expand(shape)
        if ranking and len(shape) == x.site.ndim:
            k = shape[-1]
            site = of_rows(x.site, -1).unsqueeze(-1) * k + torch.arange(k)
            return site.expand(shape), torch.zeros(shape, dtype=torch.long)
        return _cut(x, shape) if len(fields) == 1 else None

    def _joint(self, shape: torch.Size, fields: list[Field]) -> tuple[Tensor, Tensor]:
        """Joint labels; features that sites say already are left out."""
        sites = [f.site.expand(shape) for f in fields]
        site, _ = joined(sites, [f.variable.sites for f in fields])
        count, features = _count(site), [f.feature.expand(shape) for f in fields]
        for n, f in enumerate(fields):
            width = f.variable.features
            distinct = len(torch.unique(site * width + features[n]))
            several = len(fields) > 1 and width > 1 and count > 1
            if several and len(torch.unique(features[n])) > 1 and distinct == count:
                features[n] = torch.zeros_like(features[n])
        feature, _ = joined(features, [f.variable.features for f in fields])
        width = _count(feature)
        entries, at = torch.unique(site * width + feature, return_inverse=True)
        if len(entries) < count * width:  # features of every site by themselves
            first = torch.searchsorted(entries // width, torch.arange(count))
            feature = (torch.arange(len(entries)) - first[entries // width])[at]
        return site, feature


def statistics(tensor: Tensor) -> tuple[float, float]:
    """Mean and variance of a parameter's entries; a mean inside its own noise is 0."""
    x = tensor.detach().to(F64)
    mean, variance = float(x.mean()), float(x.var(unbiased=False))
    if mean**2 * x.numel() < 16 * variance:
        return 0.0, variance + mean**2
    return mean, variance


def _levels(tensor: Tensor, mean: float, variance: float) -> Tensor | None:
    """Of entries whose skewness differs from a Gaussian's by a quarter or kurtosis by a half, means
    of as many each, by size; at this mean and variance."""
    x = tensor.detach().to(F64).reshape(-1)
    if x.numel() < 2 * LEVELS:
        return None
    z = (x - x.mean()) / x.std(unbiased=False).clamp_min(1e-300)
    if abs(float((z**3).mean())) < 0.25 and abs(float((z**4).mean()) - 3) < 0.5:
        return None
    means = torch.stack([part.mean() for part in z.sort().values.tensor_split(LEVELS)])
    return mean + variance**0.5 * means / means.square().mean().sqrt()


def _count(label: Tensor) -> int:
    return int(label.max()) + 1 if label.numel() else 1


def _by_entry(numbers: Tensor, x: Field) -> Tensor | None:
    """(sites, features) of the numbers that stand where a field's entries do; None where several
    stand at one."""
    sites, features = x.variable.sites, x.variable.features
    at = (x.site * features + x.feature).reshape(-1)
    entries = numbers.expand(x.site.shape).reshape(-1)
    table = torch.zeros(sites * features, dtype=numbers.dtype)
    table[at] = entries
    return table.reshape(sites, features) if torch.equal(table[at], entries) else None


def _roots(variables: Any) -> frozenset[object]:
    return _union(v.roots for v in variables)


def _union(sets: Iterable[frozenset[object]]) -> frozenset[object]:
    return frozenset[object]().union(*sets)


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Known | Weights):
        return x.tensor
    return x if isinstance(x, Tensor) else torch.tensor(float(x))


def _single(made: Field | None) -> list[State] | None:
    return None if made is None else [made]


def _expanded(x: Field, shape: Sequence[int]) -> Field:
    return Field(x.variable, x.site.expand(tuple(shape)), x.feature.expand(tuple(shape)))


def _weights_expanded(w: Weights, shape: Sequence[int]) -> Weights:
    full = tuple(shape)
    return Weights(w.tensor.expand(full), w.root, w.index.expand(full))


def _reshaped(state: Any, shape: Sequence[int]) -> Any:
    """The same entries in another shape."""
    if isinstance(state, Field):
        return Field(state.variable, state.site.reshape(shape), state.feature.reshape(shape))
    if isinstance(state, Weights):
        return Weights(state.tensor.reshape(shape), state.root, state.index.reshape(shape))
    return Known(state.tensor.reshape(shape)) if isinstance(state, Known) else state


def _product(
    w: Weights,
    key: object,
    shape: tuple[int, int],
    source: Variable | None,
    known: Tensor | None,
    columns: list[tuple[float, Tensor]],
    matrix: Tensor | None = None,
    wider: float = 1.0,
) -> Product:
    """(sites, features) of fresh weights times what they read."""
    mean, variance = statistics(w.tensor if w.pool is None else w.pool)
    return Product(
        sites=shape[0],
        features=shape[1],
        gaussian=True,
        roots=frozenset([key]),
        source=source,
        known=known,
        columns=columns,
        key=key,
        root=w.root,
        variance=variance,
        mean=mean,
        wider=wider,
        matrix=matrix,
        route=None if w.route is None else w.route.variable,
    )


def _fixed(values: Tensor, source: Known | Weights) -> Fixed:
    return Fixed(
        sites=values.shape[0],
        features=values.shape[1],
        gaussian=True,
        alike=False,
        roots=frozenset([("numbers", id(source))]),
        values=values.detach(),
    )


def _curve(inner: Variable, function: Any) -> Curve:
    return Curve(
        sites=inner.sites,
        features=inner.features,
        alike=inner.alike,
        roots=inner.roots,
        inner=inner,
        function=function,
    )


def _is_part(v: Variable) -> bool:
    if isinstance(v, Combination):
        return any(isinstance(t.variable, Part) for t in v.terms)
    return isinstance(v, Part)


def _shared(v: Variable) -> bool:
    """Whether one entry of a parameter acts on all features of a site."""
    return isinstance(v, Entries) and v.features > 1 and not varies(v.index, [1])


def _padded_axis(gone: Tensor) -> int | None:
    """The one axis along which whole slices are padding."""
    for axis in range(gone.ndim):
        others = tuple(a for a in range(gone.ndim) if a != axis)
        if bool((gone.all(others) | ~gone.any(others)).all()):
            return axis
    return None


def _broadcast(shapes: list[torch.Size], shape: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(*shapes, shape) == shape)
    except RuntimeError:
        return False


def _cut(x: Field, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """Labels of what is reduced, or cut, along axes of one field."""
    site, feature = x.site, x.feature
    if len(shape) > site.ndim:
        return None
    if len(shape) < site.ndim:
        fits = (
            a for a in range(site.ndim) if [*site.shape[:a], *site.shape[a + 1 :]] == list(shape)
        )
        axis = next(fits, None)
        if axis is None:
            return None
        site, feature = (of_rows(t, axis) for t in (site, feature))
    else:
        for a, (n, m) in enumerate(zip(site.shape, shape, strict=True)):
            if m > n:
                return None
            if m == 1 and n > 1:
                site, feature = (of_rows(t, a).unsqueeze(a) for t in (site, feature))
            elif m < n:
                site, feature = site.narrow(a, 0, m), feature.narrow(a, 0, m)
    site, feature = (torch.unique(t, return_inverse=True)[1] for t in (site, feature))
    return site, feature
