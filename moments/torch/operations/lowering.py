"""Lowering of recorded operations to variables, one after another.

A rule returns the states of an operation's outputs, or None if it does not apply. Operations
without a rule are sampled; those that cannot be sampled are named and left without a prediction.
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
from .sampling import Sampler, again, pushed
from .variables import (
    NUMBERS,
    Combination,
    Curve,
    Detached,
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
    holds_sampled,
    joined,
    number,
    of_rows,
    times,
    transposed_shape,
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
"""Operations that move entries, which are run on labels."""

_SAME = ("_to_copy", "native_dropout", "dropout", "view_as_complex", "view_as_real")
"""Those of them that do not change the labels."""

_CURVES_NAMES = (
    "gelu relu silu tanh sigmoid exp erf softplus pow sqrt rsqrt abs leaky_relu elu hardtanh "
    "clamp clamp_min clamp_max log sin cos square reciprocal log1p hardswish hardsigmoid mish "
    "relu6 threshold expm1 log_sigmoid sign softsign log2 exp2 sgn maximum minimum prelu "
    "_prelu_kernel log_sigmoid_forward hardshrink nan_to_num logit"
)
_CURVES = frozenset(_CURVES_NAMES.split())
"""Entrywise functions."""

_FACTORIES_NAMES = (
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "rand_like randn_like zero fill bernoulli"
)
_FACTORIES = frozenset(_FACTORIES_NAMES.split())
"""Operations whose results do not depend on the entries of their inputs."""

_MERGES_NAMES = (
    "cat stack overlay copy slice_scatter select_scatter index_copy hstack vstack concat"
)
_MERGES = frozenset(_MERGES_NAMES.split())
"""Operations that combine entries of several tensors in one."""

_BY_PLACES = ("index", "index_put", "index_add", "index_copy", "masked_scatter", "index_select")
"""Operations whose indices may be chosen by the batch; then those of the recorded pass are used."""

_REDUCTIONS = ("mean", "sum", "var", "std", "linalg_vector_norm", "var_mean", "norm")
_SUMS = ("add", "sub", "rsub", "mul", "div", "neg")
Result = TypeVar("Result")

_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_batch_norm", "native_group_norm")

PLACES = 1500
"""Default of the number of sites up to which a variable is predicted: its covariance takes
8 sites^2 bytes."""

UNLIKE = 4.0
"""Standard deviations from the moments of a whole parameter from which some of its rows have
moments of their own."""

MANY = 16
"""Summands from which a sum with random weights is taken as Gaussian."""

SMALL = 0.02
"""Ratio of a bias's variance to that of its output up to which it is taken as Gaussian."""

LEVELS = 32
"""Equally large groups of entries of another bias, by size; their means represent it."""

_FEW = 8
"""Entries below which a parameter is used as numbers: scalars on the stream, lambdas."""


class Unlowered(Exception):
    """An operation without a rule, with the reason."""


class Lowering:
    """States of all values of a recorded pass.

    Args:
        graph: the pass.
        draws, seed: of the sampler.
        wider: parameter -> by axis, the ratio of the true size to the module's.
        places: sites up to which a variable is predicted.

    Attributes:
        states: of every value.
        laws: of variables.
        unread: (operation, reason) of operations without a prediction, and how often.
        sampled: names of operations that are sampled, and how often.
        lost: values without a prediction.
        chosen: indices that the batch chose, those of the recorded pass, with the roots of the
            variables by which it chose.
        tied: tables that are also a matrix behind them.
        whole: all entries of every parameter, and of every tensor computed from parameters.
        coherent: parameters of which one entry acts on all features of a site, or that are used as
            numbers: they change norms to leading order (`scalars`).
        numbers: the latter by name, as differentiable leaves.
        sums: sums of parameters by root, with the names of these.
        owned: variables with their mean, or mean square, as a leaf of the numbers computed from it.
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
        self.sums: dict[str, frozenset[str]] = {}
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
            outputs = self._outputs(node, name, states)
            for state in outputs:
                if isinstance(state, Field) and state.variable.sites > self.places:
                    raise Unlowered(f"{state.variable.sites} places, {self.places} at most")
        except Unlowered as reason:
            outputs = self._unknown(node, name, str(reason))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError) as error:
            # The operation has arguments that its rule does not know.
            outputs = self._unknown(node, name, f"{type(error).__name__}: {str(error)[:80]}")
        for value, state in zip(node.outputs, outputs, strict=False):
            self.states[value] = state
        if self.lost.intersection(node.inputs):
            fields = (v for v in node.outputs if isinstance(self.states.get(v), Field))
            self.lost.update(fields)

    def _outputs(self, node: Node, name: str, states: list[State | None]) -> Sequence[State]:
        if name in _FACTORIES:
            return [Known(self.graph.tensor(v)) for v in node.outputs]
        by_place = name in _BY_PLACES and not isinstance(states[0], Weights)
        if by_place or name == "embedding":
            for n, v in enumerate(node.inputs):  # indices that the batch chose
                state = states[n]
                if isinstance(state, Field) and not self.graph.tensor(v).is_floating_point():
                    self.chosen[v] = state.variable.roots
                    states[n] = self.states[v] = Known(self.graph.tensor(v))
        by = _union(self.chosen.get(v, frozenset()) for v in node.inputs)
        fields = [s for s in states if isinstance(s, Field)]
        if fields:
            empty = all(not self._shape(v).numel() for v in node.outputs)
            if name == "nonzero" or empty:  # the rows of an expert, perhaps none
                if name == "nonzero":
                    by = by.union(*(field.variable.roots for field in fields))
                self.chosen.update(dict.fromkeys(node.outputs if by else (), by))
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
        """Whether a variable is independent of a choice by these roots, or sorted by it; else the
        chosen entries have another law than all entries."""
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
        """States of the outputs of an operation without a prediction."""
        self.unread[name, reason] += 1
        self.lost.update(node.outputs)
        states: list[State] = []
        for v in node.outputs:
            shape = self._shape(v)
            feature = torch.arange(max(1, shape.numel())).reshape(shape)
            states.append(self._opaque(node, v, torch.zeros_like(feature), feature))
        return states

    def _state(self, argument: Any) -> Any:
        return self.states[argument.value] if isinstance(argument, Ref) else argument

    def _shape(self, value: int) -> torch.Size:
        return self.graph.tensor(value).shape

    def _opaque(self, node: Node, value: int, site: Tensor, feature: Tensor) -> Field:
        """A sampled variable with these labels."""
        inputs = [self.states.get(v) for v in node.inputs]
        self._as_one(inputs)
        roots = _union(s.variable.roots for s in inputs if isinstance(s, Field))
        variable = Sampled(
            sites=_count(site),
            features=_count(feature),
            alike=False,
            roots=roots.union(s.root for s in inputs if isinstance(s, Weights)),
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
            if name == "_to_copy" and len(kinds) > 1:  # labels of real and complex tensors differ
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
        if name in _REDUCTIONS and (outputs := self._reduced(node, name)) is not None:
            return outputs
        field = self._arithmetic(node, name) if name in _SUMS else None
        if name == "masked_fill" and isinstance(first, Field):
            mask = self._state(node.args[1])
            if isinstance(mask, Known) and not bool(mask.tensor.any()):
                field = first
        if field is None and name in _CURVES:
            field = self._curve(node, name)
        return self._sampled(node, name) if field is None else [field]

    # --- weights alone ----------------------------------------------------------------------------

    def _of_weights(self, node: Node, name: str) -> Sequence[State]:
        values = self.graph.values
        first = self.states[node.inputs[0]]
        live = any(values[v].live for v in node.inputs)
        weights = [s for s in map(self.states.get, node.inputs) if isinstance(s, Weights)]
        if name in _COPIES and isinstance(first, Weights) and len(weights) == 1:
            indices = [first.index]
            if name != "_to_copy":
                indices = again(self.graph, node, {node.inputs[0]: first.index}, self.states)
            return [
                self._looked_up(name, first, values[v].tensor.detach(), index, live)
                for v, index in zip(node.outputs, indices, strict=False)
            ]
        if name in _NORMS and isinstance(first, Weights):  # of learned tokens
            self.states[node.inputs[0]] = self._by_row(first)
            return self._normalized(node, name)
        if live and (name in PRODUCTS or name == "linear"):
            return [self._product(node, name)]
        if live and name == "convolution":
            return [self._convolution(node)]
        if live:
            self.sampled[name] += 1
            return [self._opaque(node, v, *self._by_place(name, v)) for v in node.outputs]
        states: list[State] = []
        for v in node.outputs:
            tensor = values[v].tensor.detach()
            if not tensor.is_floating_point() and not tensor.is_complex():
                states.append(Known(tensor))
                continue
            names = values[v].params
            root = f"{next(iter(names)) if len(names) == 1 else 'derived'}#{v}"
            index = torch.arange(tensor.numel())
            self.whole[root] = tensor
            if len(names) > 1:
                self.sums[root] = frozenset(names)
                if name not in ("add", "sub") or len(weights) < 2:
                    self.coherent |= names
            else:
                self.sampler.slopes[root], index = self._slopes(v, next(iter(names)))
            states.append(Weights(tensor, root, index.reshape(tensor.shape)))
        return states

    def _as_one(self, states: Iterable[Any]) -> None:
        """Note that sums of parameters are not followed summand by summand."""
        for state in states:
            if isinstance(state, Weights) and state.root in self.sums:
                self.coherent |= self.sums[state.root]

    def _summands(self, w: Weights) -> list[tuple[float, Weights]]:
        """The two parameters in a sum of parameters with their signs; [] for other weights."""
        value = int(w.root.rpartition("#")[2]) if w.root in self.sums else -1
        node = self.graph.producer(value) if value >= 0 else None
        if node is None or node.name.rstrip("_") not in ("add", "sub"):
            return []
        parts = [self._state(a) for a in node.args[:2]]
        if not all(isinstance(part, Weights) for part in parts):
            return []
        full = [_weights_expanded(part, self._shape(value)) for part in parts]
        factor = float(node.kwargs.get("alpha", 1.0)) * (1 if "add" in node.name else -1)
        return [
            (c, Weights(f.tensor.reshape(-1)[w.index], f.root, f.index.reshape(-1)[w.index]))
            for c, f in zip((1.0, factor), full, strict=True)
        ]

    def _slopes(self, value: int, name: str) -> tuple[Tensor, Tensor]:
        """Squared derivatives of the entries of a tensor in a parameter, and for each the first
        entry that is the same function of the same entry of it (flat indices); a mean squared
        derivative and all indices if entries depend on several of the parameter."""
        graph = self.graph
        number = next(n for n, v in enumerate(graph.values) if v.params and v.name == name)
        leaf = graph.tensor(number).detach().clone().requires_grad_(True)
        tensors, shape, size = {number: leaf}, leaf.shape, self._shape(value).numel()
        random = torch.Generator().manual_seed(0)
        with torch.enable_grad():
            for node in graph.ancestor_nodes(value):
                again(graph, node, tensors, {})
            # The derivative along a direction d is the slope times d[k] for a function of entry k.
            x = 1 + torch.rand(shape, generator=random).to(leaf.dtype)
            place = torch.arange(1, leaf.numel() + 1, dtype=leaf.dtype).reshape(shape)
            signs = torch.randn(shape, generator=random).sign().to(leaf.dtype)
            directions = torch.ones_like(x), place, x, x**2, signs
            along = [pushed(tensors[value], [(leaf, d)]) for d in directions]
        zero = torch.zeros(size, dtype=F64)
        slope, first, one, two, sign = (zero if t is None else t.reshape(-1).to(F64) for t in along)
        single = (two * slope - one**2).abs() <= 1e-4 * one**2
        if not bool(single.all()) or not bool(slope.all()):
            return sign.square().mean(), torch.arange(size)
        same = torch.stack(((first / slope).round(), slope), 1)
        copy = torch.unique(same, dim=0, return_inverse=True)[1]
        return slope.square(), _first_places(copy)[copy]

    def _looked_up(
        self, name: str, of: Weights, tensor: Tensor, index: Tensor, live: bool
    ) -> State:
        weights = Weights(tensor, of.root, index.reshape(tensor.shape), of.pool, of.route)
        tables = name in ("index", "index_select", "gather") and tensor.ndim < 4
        if live and (tables or name == "embedding") and of.tensor.ndim == 2:
            return self._by_row(weights)
        return weights

    def _by_row(self, state: Weights | Known) -> Field:
        """Weights or numbers as a field whose sites are the rows along the last axis."""
        shape = state.tensor.shape
        site = torch.arange(shape[:-1].numel()).reshape(*shape[:-1], 1).expand(shape)
        feature = torch.arange(shape[-1]).expand(shape)
        if isinstance(state, Weights):
            return Field(self._entries(state, state.index.reshape(-1, shape[-1])), site, feature)
        return Field(_fixed(state.tensor.to(F64).reshape(-1, shape[-1]), state), site, feature)

    def _by_place(self, name: str, value: int) -> tuple[Tensor, Tensor]:
        """Labels of a tensor with features along its last axis, or its channels."""
        shape = self._shape(value)
        axis = 1 if name in ("native_batch_norm", "native_group_norm") else len(shape) - 1
        entries = torch.arange(shape.numel()).reshape(shape)
        site = torch.unique(entries.narrow(axis, 0, 1), return_inverse=True)[1].expand(shape)
        view = [-1 if a == axis else 1 for a in range(len(shape))]
        return site, torch.arange(shape[axis]).reshape(view).expand(shape)

    def _entries(self, w: Weights, index: Tensor) -> Entries:
        self._as_one([w])
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
        """Mean and variance of weights: those of the whole parameter, unless these differ beyond
        chance."""
        own, whole = statistics(w.tensor), statistics(self.whole[w.root])
        count = len(torch.unique(w.index))
        if count < 2 * UNLIKE**2:
            return own
        squares = [mean**2 + variance for mean, variance in (own, whole)]
        limit = UNLIKE * (2 / count) ** 0.5
        near = squares[0] > 0 and abs(math.log(squares[0] / squares[1])) <= limit
        return whole if near and abs(own[0] - whole[0]) <= limit * squares[1] ** 0.5 else own

    def _chosen_matrix(self, node: Node, w: Weights) -> Weights | None:
        """One of several matrices for every site, chosen by the batch."""
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
        """A field of a variable without the features that the labels do not use."""
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
        if name == "detach":
            return [Field(_detached(x.variable), x.site, x.feature)]
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
        """Rows of one tensor added to rows of another, or replacing them."""
        shape = whole = self._shape(node.outputs[0])
        adds = name == "index_add"
        into: State = self._state(node.args[0])
        source = self._state(node.args[3 if adds else 2])
        if adds:
            dim, at = node.args[1], _tensor(self._state(node.args[2])).long()
        else:
            adds = len(node.args) > 3 and bool(node.args[3])
            indices = [self._state(a) for a in node.args[1]]
            if not all(isinstance(index, Known) for index in indices):
                raise Unlowered("entries that are put along a later axis, or at unknown places")
            dim, at = 0, torch.zeros(1, dtype=torch.long)
            for index in (index.tensor for index in indices):
                columns = index.nonzero().unbind(1) if index.dtype == torch.bool else [index]
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
        for nth in range(int(before.max()) + 1):  # an index may occur several times
            rows = (before == nth).nonzero()[:, 0]
            placed = self._rows(source, shape, dim, rows, at[rows])
            summed = placed if total is None else self._added(total, placed, (1.0, 1.0), shape)
            if summed is None:
                raise Unlowered("rows added to a sampled variable")
            total = summed
        assert total is not None
        result: Field = _reshaped(total, whole)
        return result

    def _in_place_of(
        self, into: State, source: Any, shape: Sequence[int], dim: int, at: Tensor
    ) -> Field | None:
        """Numbers or weights with the labels of the rows of a field that they replace."""
        if not isinstance(into, Field):
            return None
        x = _reshaped(into, shape)
        rows = Field(x.variable, x.site.index_select(dim, at), x.feature.index_select(dim, at))
        return self._as_field(source, rows)

    def _rows(self, x: Field, shape: Sequence[int], dim: int, rows: Tensor, at: Tensor) -> Field:
        """Some rows of a field at the indices `at` of a tensor that is zero elsewhere."""
        site = torch.full(tuple(shape), -1).index_copy(dim, at, x.site.index_select(dim, rows))
        feature = x.feature.narrow(dim, 0, 1).expand(tuple(shape)).clone()
        feature = feature.index_copy(dim, at, x.feature.index_select(dim, rows))
        values, new = torch.unique(site, return_inverse=True)
        return _at_sites(x.variable, values, new, feature)

    def _padded(self, x: Field, site: Tensor, feature: Tensor, gone: Tensor) -> Field:
        """A field with zeros where `gone`, which are sites of their own if they are whole rows."""
        if bool((gone.all(-1) | ~gone.any(-1)).all()):
            place = torch.arange(gone[..., 0].numel()).reshape(*gone.shape[:-1], 1)
            label = torch.where(gone, -1 - place, site)
            if not bool(gone.all()):
                feature = torch.where(gone, feature[~gone[..., 0]][0], feature)
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
        return _at_sites(x.variable, torch.where(values < 0, -1, values), new, feature)

    # --- sums and products of entries -------------------------------------------------------------

    def _aligned(
        self, shape: Sequence[int], fields: list[Field]
    ) -> tuple[Tensor, Tensor, int, int, list[Variable], list[Tensor | None]] | None:
        """Joint labels of several fields, their numbers of values, and the variables with their
        sites for each joint site; None if a feature of one is a site of another."""
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
        """A field with sites of their own along the axes over which it is constant."""
        site, feature = x.site.expand(shape), x.feature.expand(shape)
        code = torch.zeros(tuple(shape), dtype=torch.long)
        for axis, size in enumerate(shape):
            if size > 1 and not varies(site, [axis]) and not varies(feature, [axis]):
                view = [1] * len(shape)
                view[axis] = size
                code = code * size + torch.arange(size).reshape(view)
        sites = x.variable.sites
        values, new = torch.unique(code * sites + site, return_inverse=True)
        return _at_sites(x.variable, values % sites, new, feature)

    def _coefficient(self, c: Tensor, x: Field) -> Tensor | None:
        """A known tensor by site and feature of a field; None if it is no function of them."""
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
        """Weights or numbers as a field with the labels of another."""
        table = _by_entry(other.index if isinstance(other, Weights) else other.tensor.to(F64), x)
        if table is None:
            return None
        if isinstance(other, Known):
            return Field(_fixed(table, other), x.site, x.feature)
        if table.shape[1] > 1 and not varies(table, [1]):
            self.coherent.add(other.root)
        return Field(self._entries(other, table), x.site, x.feature)

    def _matched(
        self, x: Field, other: Any, shape: Sequence[int], by: Callable[[Any, Field], Result | None]
    ) -> tuple[Field, Result | None]:
        """A field, with more sites if needed, and the result of `by` for another tensor and it."""
        result = by(other, x)
        if result is None:
            x = self._split(x, shape)
            result = by(other, x)
        return x, result

    def _arithmetic(self, node: Node, name: str) -> Field | None:
        shape, args = self._shape(node.outputs[0]), [self._state(a) for a in node.args]
        if any(self.graph.tensor(v).is_complex() for v in (*node.inputs, *node.outputs)):
            return self._rotated(args, shape) if name == "mul" else None
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

    def _rotated(self, args: list[Any], shape: torch.Size) -> Field | None:
        """A complex field times known complex numbers, as in rotary positions."""
        x, numbers = args if isinstance(args[0], Field) else args[::-1]
        if not isinstance(numbers, Known) or not numbers.tensor.is_complex():
            return None
        factors = torch.view_as_real(numbers.tensor.resolve_conj()).to(F64)
        full = (*shape, 2)
        cosine = factors[..., :1].expand(factors.shape)
        sine = factors[..., 1:] * torch.tensor([-1.0, 1.0], dtype=F64)
        exchanged = Field(x.variable, x.site.flip(-1), x.feature.flip(-1))
        one = self._multiplied(x, Known(cosine), full)
        other = self._multiplied(exchanged, Known(sine), full)
        return one and other and self._added(one, other, (1.0, 1.0), full)

    def _by_feature(self, w: Weights, x: Field) -> bool:
        """Whether weights have one entry for every feature of a field."""
        count = w.tensor.numel()
        return w.tensor.shape[-1:] == (count,) == x.site.shape[-1:] and varies(x.feature, [-1])

    def _few(self, w: Weights) -> bool:
        """Whether weights depend on so few entries of parameters that they are used as numbers."""
        names = self.sums.get(w.root, (w.root.partition("#")[0],))
        count = sum(self.graph.leaf(name).numel() for name in names)
        return bool(min(count, w.tensor.numel()) < _FEW)

    def _numbers_of(self, state: Any) -> Tensor:
        """The numbers of a state; of weights as differentiable functions of parameters."""
        if not isinstance(state, Weights):
            return _tensor(state)
        self.coherent.add(state.root)
        return self.moving(state)

    def moving(self, w: Weights) -> Tensor:
        """The entries of weights as differentiable functions of the parameters in `numbers`."""
        graph, (name, _, derived) = self.graph, w.root.partition("#")
        if derived:
            value = int(derived)
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
        """Mean (sites,) of a variable, or mean square; a differentiable leaf if any parameter is
        used as a number."""
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
        if isinstance(y, Weights) and (summands := self._summands(y)):
            total: Field | None = self._scaled(x, number(signs[0])) if signs[0] != 1.0 else x
            for sign, part in summands:
                total = total and self._added(total, part, (1.0, sign * signs[1]), shape)
            return total
        one, other = number(signs[0]), number(signs[1])
        if isinstance(y, Field):
            together = self._aligned(shape, [x, y])
            if together is None or self._entangled(*together[4]):
                return None
            site, feature, sites, features, (a, b), (i, j) = together
            terms = [Term(a, one, i), Term(b, other, j)]
            return Field(combination(sites, features, terms), site, feature)
        x = _expanded(x, shape)
        if isinstance(y, Weights) and (not self._few(y) or self._by_feature(y, x)):
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
        """Set the levels of a bias that is far from Gaussian and not small relative to x."""
        if not isinstance(entries, Entries) or varies(entries.index, [0]) or not x.gaussian:
            return
        if entries.variance > SMALL * float(self.laws.variance(x).mean()):
            entries.levels = _levels(self.whole[w.root], entries.mean, entries.variance)

    def _sum(self, x: Field, c: Tensor, y: Field, d: Tensor) -> Field:
        """The sum of two fields with the same labels, with coefficients."""
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
            same = one and other and one[0] is other[0] and one[0].features == features
            if one and other and same and i is None and j is None:
                f, g = one[1], other[1]
                return Field(_curve(one[0], lambda z: f(z) * g(z)), site, feature)
            if self._independent(a, b):
                return Field(times(a, b, (i, j), sites, features), site, feature)
            return None
        x = _expanded(x, shape)
        few = isinstance(y, Weights) and y.tensor.numel() > 1 and self._few(y)
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
        """Whether a sum needs a covariance that only joint draws can estimate."""
        if not a.roots & b.roots or (a.gaussian and b.gaussian):
            return False
        if not (holds_sampled(a) or holds_sampled(b)):
            return False
        pairs = itertools.product(self._signs(a), self._signs(b))
        return not all(
            m == n or (s and not s & q) or (t and not t & r) for (m, s, r), (n, t, q) in pairs
        )

    def _signs(self, v: Variable) -> list[tuple[int, frozenset[object], frozenset[object]]]:
        """For every summand its number, the roots of a factor with a sign independent of the other
        factors, and the roots of all factors."""
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
            inputs = {at: inner(z)}
            for v in others:
                inputs[v] = _tensor(states[v]).to(z.dtype).reshape(())
            return again(graph, node, inputs, states)[0]

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
            return None  # the sum's deviation is of the order of its mean
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
        others = [a for a in range(x.site.ndim) if a not in axes]
        site = x.site.permute(others + axes).flatten(len(others))
        feature = x.feature.permute(others + axes).reshape(site.shape)[..., 0]
        rows, new = torch.unique(site.reshape(-1, site.shape[-1]), dim=0, return_inverse=True)
        pooled = blend(x.variable, rows, share)
        return self._settled(pooled, new.reshape(shape), feature.reshape(shape))

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
        """A field less its mean over some axes, and 1 over its deviation: known numbers to leading
        order in 1/features; `rows`: its shape with these axes."""

        def over(numbers: Tensor) -> Tensor:
            whole = numbers[x.site].reshape(rows)
            return whole.mean(axes, keepdim=True).expand(rows).reshape(x.site.shape)

        mean, square = over(self.own(x.variable)), over(self.own(x.variable, square=True))
        if not centres:
            return x, (square + epsilon).rsqrt()
        centred = self._added(x, Known(-mean), (1.0, 1.0), x.site.shape)
        return centred, (square - mean**2 + epsilon).rsqrt()

    def _by_channel(self, x: Field, args: Any) -> tuple[Field | None, Tensor]:
        """A field less the mean of every channel over its sites, and 1 over the root mean variance
        of channels: the deviation of each channel to leading order in 1/sites."""
        shape, view = x.site.shape, (1, -1, *[1] * (x.site.ndim - 2))
        axes = [a for a in range(x.site.ndim) if a != 1]
        if not args[5]:  # by running statistics
            mean, variance = (self.graph.tensor(a.value).reshape(view) for a in args[3:5])
            centred = self._added(x, Known(-mean), (1.0, 1.0), shape)
            return centred, (variance.to(F64) + args[7]).rsqrt()
        if varies(x.feature, axes):
            raise Unlowered("channels that are no feature of what is normalised")
        places = shape.numel() // shape[1]
        if places < _FEW:  # n normalised values have no gradient along two directions
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
                states[v] = self._along(node, name, state, partner) or self._by_row(state)
            elif isinstance(state, Known) and bool((state.tensor != 0).any()):
                states[v] = self._by_row(state)
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
        """The axis along which features of several tensors are concatenated; None: sites are."""
        axis = None
        if name in ("cat", "concat", "stack"):
            axis = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % which.ndim
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

    def _along(self, node: Node, name: str, w: Weights, partner: Field) -> Field | None:
        """Weights that are concatenated to a field, with its features: a sink of every head to the
        logits, keys and values that are learned."""
        shape = w.tensor.shape
        if name not in ("cat", "concat") or len(shape) != partner.site.ndim:
            return None
        at = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
        others = [a for a in range(len(shape)) if a != at and shape[a] > 1]
        axes = [a for a in others if varies(partner.feature, [a])]
        if not axes or varies(partner.feature, [at]):
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
            roots=_union(piece.roots for piece, _ in pieces),
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
            y = y.transposed()
        else:
            x, y = args[:2]
        out = node.outputs[0]
        whole = shape = self._shape(out)
        if name in ("mv", "addmv"):
            shape = torch.Size((*whole, 1))
            y, bias = _reshaped(y, (-1, 1)), _reshaped(bias, shape)
        product = self._contracted(node, x, y, shape)
        if product is None:  # numbers along features
            product = self._fixed_matrix(node, x, y, shape)
        elif bias is not None and beta and not isinstance(product.variable, Sampled):
            product = self._added(product, bias, (float(alpha), float(beta)), shape)
            if product is None:
                raise Unlowered("a bias that follows no feature")
        return product if shape == whole else _reshaped(product, whole)

    def _contracted(self, node: Node, x: Any, y: Any, shape: torch.Size) -> Field | None:
        if isinstance(y, Weights) and isinstance(x, Field | Known):
            return self._weighted(x, y, shape)
        if isinstance(x, Weights) and isinstance(y, Field | Known):
            made = self._weighted(y.transposed(), x.transposed(), transposed_shape(shape))
        elif isinstance(x, Field) and isinstance(y, Field):
            return self._pairs(node, x, y)
        elif isinstance(x, Known) and isinstance(y, Field):
            return self._mixed(x.tensor, y, shape)
        elif isinstance(y, Known) and isinstance(x, Field):
            made = self._mixed(y.tensor.transpose(-1, -2), x.transposed(), transposed_shape(shape))
        else:
            raise Unlowered("a product of two parameters with numbers of the batch")
        return None if made is None else made.transposed()

    def _fixed_matrix(self, node: Node, x: Any, y: Any, shape: torch.Size) -> Field:
        """A product with known numbers along features, which is sampled."""
        self.sampled["fixed matrix"] += 1
        at_left = isinstance(x, Field)
        field = x if at_left else y.transposed()
        shape_of = shape if at_left else torch.Size(transposed_shape(shape))
        site = of_rows(field.site, -1).unsqueeze(-1).expand(shape_of)
        code = of_rows(field.feature, -1).unsqueeze(-1) * shape_of[-1]
        feature = torch.unique(
            (code + torch.arange(shape_of[-1])).expand(shape_of), return_inverse=True
        )[1]
        made = self._opaque(node, node.outputs[0], site, feature)
        return made if at_left else made.transposed()

    def _mixed(self, numbers: Tensor, y: Field, shape: Sequence[int]) -> Field | None:
        """Known numbers times a field along its sites; None if features vary along these."""
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
        """x W for weights W."""
        self._as_one([w])
        k = w.index.shape[-2]
        streams = isinstance(x, Field) and not varies(x.feature, [x.feature.ndim - 1])
        if isinstance(x, Field) and streams and x.site.ndim >= 2 and k > 1:  # or places
            made = self._mixed(self._numbers_of(w).mT, x.transposed(), transposed_shape(shape))
            if made is not None and k >= MANY:
                made.variable.gaussian = True
            return None if made is None else made.transposed()
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
        if source is not None and w.root in source.roots:
            self.tied.add(w.root)
        size, wider = (sites, _count(feature)), self._wider(w)
        return Field(_product(w, key, size, source, known, columns, matrix, wider), site, feature)

    def _wider(self, w: Weights) -> float:
        """The ratio of the true number of summed features of a matrix to the one here."""
        sizes = self.wider.get(w.root, ())
        if not sizes or w.index.shape[-2] < 2:
            return 1.0
        rows = w.index[(0,) * (w.index.ndim - 2)]
        step = abs(int(rows[1, 0] - rows[0, 0]))
        shape = self.graph.leaf(w.root).shape
        return next((n for a, n in enumerate(sizes) if step >= shape[a + 1 :].numel()), 1.0)

    def _pairs(self, node: Node, x: Field, y: Field) -> Field:
        """The product of two fields."""
        shape = self._shape(node.outputs[0])
        mixes = []
        for p, q, swapped in ((x, y, False), (y.transposed(), x.transposed(), True)):
            along_sites = not varies(q.feature, [q.feature.ndim - 2])
            along_weights = not swapped or not varies(p.feature, [p.feature.ndim - 1])
            disjoint = self._disjoint(p.variable, q.variable)
            if isinstance(p.variable, Sampled) and along_sites and along_weights and disjoint:
                spread = p.variable.features if varies(p.feature, [-2, -1]) else 1
                mixes.append((spread * p.variable.sites, swapped, p, q))
        if mixes:
            _, swapped, p, q = min(mixes, key=lambda mix: mix[0])
            mix = self._mix(p, q, transposed_shape(shape) if swapped else shape)
            return mix.transposed() if swapped else mix
        self.sampled[f"{node.name} of two fields"] += 1
        labels = []
        for one, other in ((x.site, y.site), (x.feature, y.feature)):
            rows, columns = of_rows(one, -1), of_rows(other, -2)
            both = [rows.unsqueeze(-1).expand(shape), columns.unsqueeze(-2).expand(shape)]
            labels.append(joined(both, [_count(rows), _count(columns)])[0])
        return self._opaque(node, node.outputs[0], *labels)

    def _disjoint(self, a: Variable, b: Variable) -> bool:
        """Whether two variables depend on no common weights, or on different columns of them."""
        if not a.roots & b.roots:
            return True
        one, other = self._columns(a), self._columns(b)
        return all(
            one[root] is not None and other[root] is not None and not one[root] & other[root]
            for root in one.keys() & other.keys()
        )

    def _columns(self, v: Variable) -> dict[object, Any]:
        """Root of a variable -> the features of the root that it depends on; None: all."""
        if isinstance(v, Part) and isinstance(v.whole, Product | Entries):
            return dict.fromkeys(v.roots, frozenset(v.chosen.tolist()))
        parents = v.parents
        if isinstance(v, Sampled):
            parents = tuple(field.variable for field in self.sampler.plan(v).cuts.values())
        if isinstance(v, Product) or not parents:
            return dict.fromkeys(v.roots)
        total: dict[object, Any] = {}
        for parent in parents:
            for root, columns in self._columns(parent).items():
                both = root not in total or (total[root] is not None and columns is not None)
                total[root] = columns | total.get(root, frozenset()) if both and columns else None
        return total

    def _mix(self, a: Field, x: Field, shape: Sequence[int]) -> Field:
        """Sampled weights times an independent field, summed over the field's sites."""
        full = torch.Size(shape)
        if varies(a.feature, [-2, -1]):
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
        """A sampled field with one feature, whose entries are all sites, so that rows differ."""
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
            """(B, positions, channels * taps), 0 beyond the edges."""
            a = functional.pad(a, [n for p in reversed(settings[1]) for n in (p, p)])
            for axis, (size, step, _, spacing) in enumerate(zip(taps, *settings, strict=True)):
                a = a.unfold(2 + axis, spacing * (size - 1) + 1, step)[..., ::spacing]
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
        wider = self.wider.get(w.root, (1.0, 1.0))[1]
        product = _product(w, key, (sites, shape[1]), source, known, columns, wider=wider)
        site = site.reshape(shape[0], 1, *shape[2:]).expand(shape)
        feature = torch.arange(shape[1]).reshape(1, -1, *[1] * len(taps)).expand(shape)
        out: Field | None = Field(product, site, feature)
        if bias is not None:
            bias = _reshaped(bias, (-1, *[1] * len(taps)))
            out = out and self._added(out, bias, (1.0, 1.0), shape)
        if out is None:
            raise Unlowered("a bias that follows no channel")
        return out

    # --- operations that are sampled --------------------------------------------------------------

    def _sampled(self, node: Node, name: str) -> list[State]:
        fields = [
            Field(s.variable, *(of_rows(t, -1) for t in (s.site, s.feature)))
            if self.graph.tensor(v).is_complex()
            else s
            for v in node.inputs
            if isinstance(s := self.states.get(v), Field)
        ]
        states: list[State] = []
        for v in node.outputs:
            labels = self._labels(name, fields, self._shape(v))
            if labels is None:
                raise Unlowered("no labels for what it gives")
            if self.graph.tensor(v).is_complex():
                site, feature = labels
                parts = 2 * feature.unsqueeze(-1) + torch.arange(2)
                labels = site.unsqueeze(-1).expand(parts.shape), parts
            states.append(self._opaque(node, v, *labels))
        self.sampled[name] += 1
        return states

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
        """Joint labels, without features that are functions of the site."""
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
        if len(entries) < count * width:  # number the features of every site separately
            first = torch.searchsorted(entries // width, torch.arange(count))
            feature = (torch.arange(len(entries)) - first[entries // width])[at]
        return site, feature


def statistics(tensor: Tensor) -> tuple[float, float]:
    """Mean and variance of a parameter's entries; a mean within four standard errors is 0."""
    x = tensor.detach().to(F64)
    mean, variance = float(x.mean()), float(x.var(unbiased=False))
    if mean**2 * x.numel() < 16 * variance:
        return 0.0, variance + mean**2
    return mean, variance


def _levels(tensor: Tensor, mean: float, variance: float) -> Tensor | None:
    """Means of equally large groups of entries, sorted by size, scaled to a mean and a variance;
    None unless their skewness differs from a Gaussian's by 1/4 or their kurtosis by 1/2."""
    x = tensor.detach().to(F64).reshape(-1)
    if x.numel() < 2 * LEVELS:
        return None
    z = (x - x.mean()) / x.std(unbiased=False).clamp_min(1e-300)
    if abs(float((z**3).mean())) < 0.25 and abs(float((z**4).mean()) - 3) < 0.5:
        return None
    means = torch.stack([part.mean() for part in z.sort().values.tensor_split(LEVELS)])
    return mean + variance**0.5 * means / means.square().mean().sqrt()


def _first_places(label: Tensor) -> Tensor:
    """The first place of every value of a label (flat)."""
    places = torch.full((_count(label),), len(label))
    return places.scatter_reduce(0, label, torch.arange(len(label)), "amin")


def _count(label: Tensor) -> int:
    return int(label.max()) + 1 if label.numel() else 1


def _by_entry(numbers: Tensor, x: Field) -> Tensor | None:
    """Numbers of a field's shape as a table (sites, features); None if an entry has several."""
    sites, features = x.variable.sites, x.variable.features
    at = (x.site * features + x.feature).reshape(-1)
    entries = numbers.expand(x.site.shape).reshape(-1)
    table = torch.zeros(sites * features, dtype=numbers.dtype)
    table[at] = entries
    return table.reshape(sites, features) if torch.equal(table[at], entries) else None


def _union(sets: Iterable[frozenset[object]]) -> frozenset[object]:
    return frozenset[object]().union(*sets)


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Known | Weights):
        return x.tensor
    return x if isinstance(x, Tensor) else torch.tensor(float(x))


def _at_sites(v: Variable, at: Tensor, site: Tensor, feature: Tensor) -> Field:
    """The field of a variable at some of its sites, -1 for zero; `site` numbers these."""
    return Field(combination(len(at), v.features, [Term(v, number(1), at)]), site, feature)


def _expanded(x: Field, shape: Sequence[int]) -> Field:
    return Field(x.variable, x.site.expand(tuple(shape)), x.feature.expand(tuple(shape)))


def _weights_expanded(w: Weights, shape: Sequence[int]) -> Weights:
    full = tuple(shape)
    return Weights(w.tensor.expand(full), w.root, w.index.expand(full))


def _reshaped(state: Any, shape: Sequence[int]) -> Any:
    """A state in another shape."""
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
    """A product with weights, of (sites, features)."""
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
        values=values,
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


def _detached(inner: Variable) -> Detached:
    return Detached(
        sites=inner.sites,
        features=inner.features,
        gaussian=inner.gaussian,
        alike=inner.alike,
        roots=inner.roots,
        inner=inner,
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
    """Labels of a field that is reduced, cut, or transformed along axes."""
    site, feature, ndim = x.site, x.feature, x.site.ndim
    if len(shape) > ndim:
        return None
    if len(shape) < ndim:
        choices = itertools.combinations(range(ndim), ndim - len(shape))
        rest = (
            c for c in choices if [n for a, n in enumerate(site.shape) if a not in c] == [*shape]
        )
        axes = next(rest, None)
        if axes is None:
            return None
        for axis in reversed(axes):
            site, feature = (of_rows(t, axis) for t in (site, feature))
    else:
        for a, (n, m) in enumerate(zip(site.shape, shape, strict=True)):
            if m > n:  # as by a Fourier transform
                if varies(feature, [a]):
                    return None
                place = torch.arange(m).reshape([-1 if b == a else 1 for b in range(ndim)])
                site = of_rows(site, a).unsqueeze(a) * m + place
                feature = feature.narrow(a, 0, 1).expand(site.shape)
            elif m == 1 and n > 1:
                site, feature = (of_rows(t, a).unsqueeze(a) for t in (site, feature))
            elif m < n:
                site, feature = site.narrow(a, 0, m), feature.narrow(a, 0, m)
    site, feature = (torch.unique(t, return_inverse=True)[1] for t in (site, feature))
    return site, feature
