"""Sampling of variables without a law, by running recorded operations on draws of their inputs.

Softmax over keys, top-k, scans and norms of few features are drawn so. Draws have the width of the
module, so that they depend on the heads' width; averages over draws have a Monte-Carlo error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dataflow.graph import Graph, Node
from .laws import F64, Laws, Replicas
from .variables import (
    Blend,
    Combination,
    Drift,
    Entries,
    Field,
    Known,
    Mix,
    Part,
    Product,
    Sampled,
    State,
    Times,
    Variable,
    Weights,
    gathered,
)

MORE, SETTLED = 8, 0.02
"""Draws continue up to MORE times their number until mean squares have this relative error."""


def again(
    graph: Graph, node: Node, values: dict[int, Tensor], states: Mapping[int, State]
) -> list[Tensor]:
    """Run a recorded operation on other tensors, which are added to `values`; known tensors and
    weights are those of `states`."""

    def value(index: int) -> Tensor:
        x = values.get(index)
        state = states.get(index)
        if x is None and isinstance(state, Known | Weights):
            x = state.tensor
            if values and x.dtype == F64:
                x = x.to(graph.tensor(index).dtype)
        return graph.tensor(index) if x is None else x

    tensors = node.rerun(value)
    values.update(zip(node.outputs, tensors, strict=False))
    return tensors


@dataclass
class _Plan:
    """How a variable is drawn: by the operations `nodes` from the fields at `cuts`, whose Gaussian
    variables are drawn jointly in `groups`; `free`: with Gram matrices of their own, and matrices
    between them drawn anew."""

    nodes: list[int]
    cuts: dict[int, Field]
    groups: list[list[Variable]]
    free: bool = False

    @property
    def pairs(self) -> list[tuple[Variable, Variable]]:
        return [(a, b) for group in self.groups for a in group for b in group]


class _Drawn(torch.autograd.Function):
    """The covariance of a sampled variable; its backward pass is that of the operations."""

    @staticmethod
    def forward(
        ctx: Any, sampler: Sampler, variable: Sampled, value: Tensor, inside: Tensor, *below: Tensor
    ) -> Tensor:
        ctx.what = sampler, variable
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Any, ...]:
        sampler, variable = ctx.what
        return None, None, None, None, *sampler.pulled(variable, received[0])


class _Shared(torch.autograd.Function):
    """The identity; its backward pass adds the gradients of keys and values of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, queries: Tensor, sampler: Sampler, shared: _SharedSource
    ) -> Tensor:
        ctx.what = sampler, shared
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Any, ...]:
        sampler, shared = ctx.what
        at = shared.row.clamp_min(0)
        kernel = received[0][at][:, at] * shared.gram
        used = shared.row >= 0
        kernel = kernel * (used[:, None] & used[None])
        queries = sampler.laws.covariance(shared.queries, shared.queries)
        square = float((kernel * queries).sum()) / shared.key_variance
        sampler.add_square(shared.key_root, square * sampler.slope(shared.key_root))
        return received[0], kernel, None, None


@dataclass
class _SharedSource:
    """The part of queries' gradients that is one matrix W_k W_v' times the rows' cotangents.

    `gram` by sites of the queries, `row` the site of the mix that each belongs to (-1: none).
    """

    queries: Variable
    row: Tensor
    gram: Tensor
    key_root: str
    key_variance: float


@dataclass
class _Reading:
    """A variable of the form amplitude(site) W x[site] for one matrix W."""

    source: Variable
    at: Tensor
    amplitude: Tensor
    count: float
    root: str
    variance: float


class Sampler:
    """Draws variables that have no law.

    Args:
        graph: the recorded pass.
        states: of its values, filled during lowering.
        draws: of a variable of 16 features or more, four times as many of a narrower one; up to
            MORE times as many until its mean square has the relative error SETTLED.
        seed: of random numbers.

    Attributes:
        squares: squared gradients of parameters inside sampled operations.
        error: the largest relative standard error of a sampled mean square.
        slopes: squared derivatives of tensors that are entrywise functions of a parameter.
    """

    laws: Laws

    def __init__(self, graph: Graph, states: dict[int, State], draws: int, seed: int) -> None:
        self.graph, self.states, self.draws, self.seed = graph, states, draws, seed
        self.squares: dict[str, float] = {}
        self.slopes: dict[str, Tensor] = {}
        self.error = 0.0
        self._plans: dict[int, _Plan] = {}
        self._laws: dict[int, tuple[Tensor, Tensor]] = {}
        self._roots: dict[tuple[int, ...], Tensor] = {}
        self._choices: dict[int, Tensor] = {}
        self._shared: dict[int, list[_SharedSource]] = {}
        self._drifts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add_square(self, root: str, square: float) -> None:
        """Add to a parameter's squared gradient."""
        name = root.partition("#")[0]
        self.squares[name] = self.squares.get(name, 0.0) + square

    def slope(self, root: str) -> float:
        """Mean squared derivative of a derived tensor in its parameter."""
        return float(self.slopes[root].mean()) if root in self.slopes else 1.0

    # --- draws ------------------------------------------------------------------------------------

    def plan(self, v: Sampled) -> _Plan:
        """The operations from the nearest Gaussian variables with equal laws of all features."""
        if v.number in self._plans:
            return self._plans[v.number]
        cuts, nodes = self._walk(v, frozenset())
        opened = self._sharing(cuts, nodes)
        if opened:
            cuts, nodes = self._walk(v, opened)
        groups: list[list[Variable]] = []
        for variable in {f.variable.number: f.variable for f in cuts.values()}.values():
            near = [g for g in groups if any(self._related(one, variable) for one in g)]
            groups = [g for g in groups if g not in near]
            groups.append([one for g in near for one in g] + [variable])
        self._plans[v.number] = _Plan(sorted(nodes), cuts, groups, bool(opened))
        return self._plans[v.number]

    def _walk(self, v: Sampled, opened: frozenset[int]) -> tuple[dict[int, Field], set[int]]:
        """The nearest Gaussian variables other than multiples of some matrix products (by their
        number), and the operations behind them."""
        cuts: dict[int, Field] = {}
        nodes: set[int] = set()
        open_values, seen = [v.value], set()
        while open_values:
            value = open_values.pop()
            if value in seen:
                continue
            seen.add(value)
            state = self.states.get(value)
            if isinstance(state, Field) and state.variable is not v:
                product = _origin(state.variable) if opened else None
                inside = product is not None and product.number in opened
                if state.variable.gaussian and state.variable.alike and not inside:
                    cuts[value] = state
                    continue
            elif isinstance(state, Known | Weights):
                continue
            node = self.graph.producer(value)
            if node is not None:
                nodes.add(node.index)
                open_values.extend(node.inputs)
        return cuts, nodes

    def _sharing(self, cuts: Mapping[int, Field], nodes: Iterable[int]) -> frozenset[int]:
        """Matrix products that are multiplied with others of the same tensor, or with that tensor,
        other than in a softmax. Both have the Gram matrix of one draw of it, so that its variation
        counts, a term tokens / width: they are drawn as products of one draw of the tensor."""
        names = {self.graph.nodes[n].name for n in nodes}
        if not names & {"bmm", "mul"} or any("softmax" in name for name in names):
            return frozenset()
        drawn = {f.variable.number: f.variable for f in cuts.values()}
        origins = [o for v in drawn.values() if (o := _origin(v)) is not None and o.source]
        read = Counter(o.source.number for o in origins if o.source)
        return frozenset(
            o.number
            for o in origins
            if o.source
            and (
                "bmm" in names  # of two parts of one fused product
                or read[o.source.number] > 1
                or any(p.number in drawn for p in _between(o.source))
            )
        )

    def passed(self) -> set[int]:
        """Recorded tensors inside sampled operations, which have no gradients of their own."""
        inside: set[int] = set()
        for plan in self._plans.values():
            between = {v for n in plan.nodes for v in self.graph.nodes[n].inputs}
            inside |= between - plan.cuts.keys()
        return inside

    def _related(self, u: Variable, v: Variable) -> bool:
        if not u.roots & v.roots:
            return False
        size = (self.laws.variance(u).max() * self.laws.variance(v).max()).sqrt()
        return bool(self.laws.covariance(u, v).abs().max() > 1e-9 * size)

    def fields(
        self, groups: list[list[Variable]], random: torch.Generator, free: bool = False
    ) -> dict[int, Tensor]:
        """Joint draws (sites, features) of Gaussian variables, by their numbers."""
        made = {}
        for group in groups:
            features, root = max(v.features for v in group), self._root_of(group)
            x, first = root @ _white(len(root), features, random, free), 0
            for v in group:
                rows_of = x[first : first + v.sites, : v.features]
                made[v.number] = rows_of + self.laws.mean(v)[:, None]
                added = self.laws.added(v)
                if added is not None and added[0].levels is not None:
                    entries, times, levels = *added, added[0].levels
                    order = torch.randperm(v.features, generator=random)
                    levels = levels[order * len(levels) // v.features]
                    made[v.number] += times * (levels - entries.mean)
                first += v.sites
        return made

    def _root_of(self, group: list[Variable]) -> Tensor:
        """A square root of the joint covariance of all sites of a group."""
        key = tuple(v.number for v in group)
        if key not in self._roots:
            rows = [torch.cat([self._gaussian(a, b) for b in group], 1) for a in group]
            self._roots[key] = _root(torch.cat(rows))
        return self._roots[key]

    def _gaussian(self, a: Variable, b: Variable) -> Tensor:
        """The covariance of two variables without that of a common non-Gaussian parameter."""
        one, other = self.laws.added(a), self.laws.added(b)
        whole = self.laws.covariance(a, b)
        if one is None or other is None or one[0].root != other[0].root:
            return whole
        return whole - one[1] * other[1] * one[0].variance

    def run(
        self, v: Sampled, random: torch.Generator, weights: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """One draw of the recorded tensors up to a variable's, and of the Gaussian variables; with
        `weights`, all are differentiable."""
        plan = self.plan(v)
        fields = self.fields(plan.groups, random, plan.free)
        for field in fields.values():
            field.requires_grad_(weights is not None)
        values = dict(weights or {})
        with torch.set_grad_enabled(weights is not None):
            if plan.free:
                values = self._redrawn(plan, values, random)
            for value, at in plan.cuts.items():
                x = fields[at.variable.number][at.site, at.feature]
                values[value] = self._spelled(value, x)
            for index in plan.nodes:
                again(self.graph, self.graph.nodes[index], values, self.states)
        return values, fields

    def _redrawn(
        self, plan: _Plan, values: Mapping[int, Tensor], random: torch.Generator
    ) -> dict[int, Tensor]:
        """The matrices in the operations of a draw with their entries in another order."""
        made = dict(values)
        for n in sorted({n for i in plan.nodes for n in self.graph.nodes[i].inputs}):
            state = self.states.get(n)
            if isinstance(state, Weights) and state.tensor.ndim == 2:
                tensor = made.get(n, state.tensor)
                order = torch.randperm(tensor.numel(), generator=random)
                made[n] = tensor.reshape(-1)[order].reshape(tensor.shape)
        return made

    def _spelled(self, value: int, x: Tensor) -> Tensor:
        """Entries in the dtype of the recorded tensor."""
        recorded = self.graph.tensor(value)
        return (torch.view_as_complex(x) if recorded.is_complex() else x).to(recorded.dtype)

    def field(self, v: Sampled, drawn: Mapping[int, Tensor]) -> Tensor:
        """A draw of the recorded tensor by site and feature."""
        state = self.states[v.value]
        assert isinstance(state, Field)
        u = state.variable  # v, or v with its features as sites
        x = by_label(drawn[v.value], state.site, state.feature, u.sites, u.features)
        return x.reshape(v.sites, v.features)

    def _random(self, v: Variable) -> torch.Generator:
        order = list(self._plans).index(v.number) if v.number in self._plans else -1
        return torch.Generator().manual_seed(self.seed * 1_000_003 + order)

    # --- laws -------------------------------------------------------------------------------------

    def law(self, v: Sampled) -> tuple[Tensor, Tensor]:
        """Mean (sites,) and covariance (sites, sites)."""
        if v.number not in self._laws:
            self._draw_laws(v)
        return self._laws[v.number]

    def _draw_laws(self, v: Sampled) -> None:
        """Draw the laws of a variable and of those before it that are not drawn yet."""
        plan, open_ = self.plan(v), {v.number: v}
        for value in (n for i in plan.nodes for n in self.graph.nodes[i].outputs):
            state = self.states.get(value)
            if isinstance(state, Field) and type(state.variable) is Sampled:
                open_.setdefault(state.variable.number, state.variable)
        todo = [u for n, u in open_.items() if n not in self._laws]
        random = self._random(v)
        sizes: list[Tensor] = []
        sums: list[tuple[Any, Any]] = [(0.0, 0.0) for _ in todo]
        least = self.draws if v.features >= 16 else min(200, 4 * self.draws)
        while len(sizes) < least or (len(sizes) < MORE * self.draws and _error(sizes) > SETTLED):
            drawn, row = self.run(v, random)[0], []
            for n, u in enumerate(todo):
                x = self.field(u, drawn)
                mean, gram = sums[n]
                sums[n] = mean + x.mean(1), gram + x @ x.T / u.features
                row.append(x.square().mean())
            sizes.append(torch.stack(row))
        draws = len(sizes)
        self.error = max(self.error, _error(sizes))
        for u, (mean, gram) in zip(todo, sums, strict=True):
            mean, gram = mean / draws, gram / draws
            noise = gram.diagonal().mean() / (draws * u.features)
            if (mean**2).mean() < 4 * noise:
                mean = torch.zeros_like(mean)
            self._laws[u.number] = mean, gram - mean[:, None] * mean[None]

    def covariance(self, v: Sampled, replicas: Replicas) -> Tensor:
        """As `Laws.covariance`, of a sampled variable with itself."""
        value = self.law(v)[1]
        if not replicas.crossed:
            return value
        below = [self.laws.covariance(a, b, replicas) for a, b in self.plan(v).pairs]
        inside = torch.zeros((), requires_grad=bool(self._weights_inside(v)))
        if not any(c.requires_grad for c in (inside, *below)):
            return value
        made: Tensor = _Drawn.apply(self, v, value, inside, *below)
        return made

    def drift(self, v: Drift) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (sites,) of the derivative of a sampled variable, its covariance with the variable,
        and its own, (sites, sites)."""
        if v.number not in self._drifts:
            plan, graph = self.plan(v.sampled), self.graph
            groups = [
                group + [v.changes[u.number] for u in group if u.number in v.changes]
                for group in plan.groups
            ]
            random = self._random(v.sampled)
            mean, other = torch.zeros(2, v.sites, dtype=F64)
            crossed, own = torch.zeros(2, v.sites, v.sites, dtype=F64)
            for _ in range(self.draws):
                fields, values, moved = self.fields(groups, random), {}, []
                for value, at in plan.cuts.items():
                    x = self._spelled(value, fields[at.variable.number][at.site, at.feature])
                    values[value] = x
                    change = v.changes.get(at.variable.number)
                    if change is not None:
                        y = self._spelled(value, fields[change.number][at.site, at.feature])
                        moved.append((x.requires_grad_(True), y))
                for value, y in v.numbers.items():
                    state = self.states[value]
                    assert isinstance(state, Known | Weights)
                    x = state.tensor.detach().to(graph.tensor(value).dtype, copy=True)
                    values[value] = x.requires_grad_(True)
                    moved.append((x, y.to(x.dtype)))
                with torch.enable_grad():
                    for index in plan.nodes:
                        again(graph, graph.nodes[index], values, self.states)
                    x = values[v.sampled.value]
                    y = pushed(x, moved)
                x, y = x.detach(), torch.zeros_like(x) if y is None else y
                x, y = (self.field(v.sampled, {v.sampled.value: t}) for t in (x, y))
                mean, other = mean + y.mean(1) / self.draws, other + x.mean(1) / self.draws
                crossed = crossed + y @ x.T / (v.features * self.draws)
                own = own + y @ y.T / (v.features * self.draws)
            noise = own.diagonal().mean() / (self.draws * v.features)
            if (mean**2).mean() < 4 * noise:
                mean = torch.zeros_like(mean)
            crossed = crossed - mean[:, None] * other[None]
            self._drifts[v.number] = mean, crossed, own - mean[:, None] * mean[None]
        return self._drifts[v.number]

    def same_choice(self, route: Variable) -> Tensor:
        """(sites, sites) probability that two choices are equal."""
        assert isinstance(route, Sampled)
        if route.number not in self._choices:
            self.plan(route)
            random, draws = self._random(route), 8 * self.draws
            total = torch.zeros(route.sites, route.sites, dtype=F64)
            for _ in range(draws):
                x = self.field(route, self.run(route, random)[0])[:, 0]
                total = total + (x[:, None] == x[None]).to(F64) / draws
            self._choices[route.number] = total
        return self._choices[route.number]

    def pulled(self, v: Sampled, kernel: Tensor) -> list[Tensor]:
        """The gradient kernel of every pair of the Gaussian variables of a sampled variable, from
        the kernel of that; squared gradients of parameters between are added to `squares`."""
        pairs = self.plan(v).pairs
        totals = [torch.zeros(a.sites, b.sites, dtype=F64) for a, b in pairs]
        if float(kernel.abs().max()) == 0:
            return totals
        random, root = self._random(v), _root((kernel + kernel.T) / 2 / v.features)
        weights = self._weights_inside(v)
        squares: dict[str, float] = {}
        sizes: list[Tensor] = []
        gains = [
            (n, gain, x, self.laws.share(x, a))
            for n, (a, b) in enumerate(pairs)
            if a is b
            for gain, x in self.laws.gained(a)
        ]
        while len(sizes) < self.draws or (
            len(sizes) < MORE * self.draws and _error(sizes) > SETTLED
        ):
            drawn, fields = self.run(v, random, weights)
            cotangent = root @ _white(v.sites, v.features, random)
            with torch.enable_grad():
                leaves = [*fields.values(), *weights.values()]
                received = torch.autograd.grad(
                    (self.field(v, drawn) * cotangent).sum(), leaves, allow_unused=True
                )
            self._count_weights(weights, received[len(fields) :], squares)
            cotangents = dict(zip(fields, received, strict=False))
            for n, (a, b) in enumerate(pairs):
                one, other = cotangents[a.number], cotangents[b.number]
                if one is not None and other is not None and a.features == b.features:
                    totals[n] = totals[n] + one @ other.T
            for n, gain, x, share in gains:  # the gain's gradient is a signed sum over sites
                a = pairs[n][0]
                g = cotangents[a.number]
                if g is not None:
                    centred = fields[a.number].detach() - self.laws.mean(a)[:, None]
                    of_x = share[:, None] * centred + self.laws.mean(x)[:, None]
                    whole = float((g * of_x).sum(0).square().sum())
                    apart = whole - float((g @ g.T * self.laws.moment(x, x)).sum())
                    squares[gain.root] = squares.get(gain.root, 0.0) + apart
            squared = [g.square().sum() for g in cotangents.values() if g is not None]
            sizes.append(torch.stack(squared) if squared else torch.ones(1))
        for name, square in squares.items():
            self.add_square(name, square / len(sizes))
        return [total / len(sizes) for total in totals]

    def _weights_inside(self, v: Sampled) -> dict[int, Tensor]:
        """Differentiable copies of the parameters in the operations of a draw."""
        inside = {n for i in self.plan(v).nodes for n in self.graph.nodes[i].inputs}
        made = {}
        for n in sorted(inside):
            state = self.states.get(n)
            if isinstance(state, Weights) and state.tensor.is_floating_point():
                made[n] = state.tensor.clone().requires_grad_(True)
        return made

    def _count_weights(
        self,
        weights: Mapping[int, Tensor],
        received: Iterable[Tensor | None],
        squares: dict[str, float],
    ) -> None:
        for n, x in zip(weights, received, strict=True):
            state = self.states[n]
            if x is None or not isinstance(state, Weights):
                continue
            total = torch.zeros(int(state.index.max()) + 1, dtype=F64)
            total = total.index_add(0, state.index.reshape(-1), x.reshape(-1).to(F64))
            slope = self.slopes.get(state.root, torch.ones(()))
            square = total**2 * (slope[: len(total)] if slope.ndim else slope)
            squares[state.root] = squares.get(state.root, 0.0) + float(square.sum())

    # --- keys and values of one tensor ------------------------------------------------------------

    def shared_source(self, mix: Mix, total: Tensor, replicas: Replicas) -> Tensor:
        """The covariance of a mix with itself, whose backward pass also contains the correlation of
        keys and values of one tensor: E[Gram x Gram] = Gram x Gram + (tr J K)^2 / width."""
        if mix.number not in self._shared:
            self._shared[mix.number] = self._find_shared(mix)
        for shared in self._shared[mix.number]:
            queries = self.laws.covariance(shared.queries, shared.queries, replicas)
            total = _Shared.apply(total, queries, self, shared)
        return total

    def _find_shared(self, mix: Mix) -> list[_SharedSource]:
        """With keys and values of one x, a query's gradient contains a matrix times the row's
        gradient g_t: s sum_s D_ts R_(s-t) W_k W_v' g_t, with D_ts = (J_t K)_ss, J_t = diag(A_t) -
        A_t A_t', K the covariance of x and R rotary positions. Returns Gram matrices of that for
        unit W_k W_v' g."""
        soft, of_values = mix.weights, self._reading(mix.values)
        if not isinstance(soft, Sampled) or of_values is None:
            return []
        plan = self.plan(soft)
        inside = [self.graph.nodes[i] for i in plan.nodes]
        softmaxes = [node for node in inside if "softmax" in node.name]
        if len(softmaxes) != 1:
            return []
        before = softmaxes[0].inputs[0]
        origins = {f.variable.number: _origin(f.variable) for f in plan.cuts.values()}
        ends = {o.number: o for o in origins.values() if o is not None and self._reading(o)}
        if not ends:
            return []
        state = self.states[soft.value]
        assert isinstance(state, Field)
        width = self.graph.tensor(before).shape[-1]

        def scores(fields: Mapping[int, Tensor]) -> Tensor:
            values: dict[int, Tensor] = {}
            for value, cut in plan.cuts.items():
                origin = origins[cut.variable.number]
                v = cut.variable
                x = None if origin is None else self._expressed(v, origin, fields)
                x = torch.zeros(v.sites, v.features, dtype=F64) if x is None else x
                values[value] = self._spelled(value, x[cut.site, cut.feature])
            for node in inside:
                if before in values:
                    break
                again(self.graph, node, values, self.states)
            return values[before]

        def pull(received: Tensor, fields: Mapping[int, Tensor], at: list[int]) -> list[Tensor]:
            rest = width - received.shape[-1]  # sinks, without cotangents here
            received = torch.nn.functional.pad(received, (0, rest)) if rest else received
            with torch.enable_grad():
                z = torch.where(received != 0, scores(fields), 0.0)
                got = torch.autograd.grad(
                    (z * received).sum(), [fields[n] for n in at], allow_unused=True
                )
            return [
                torch.zeros_like(fields[n]) if g is None else g
                for n, g in zip(at, got, strict=True)
            ]

        ones = {
            n: torch.ones(o.sites, o.features, dtype=F64, requires_grad=True)
            for n, o in ends.items()
        }

        def marked(row: int, at: list[int], fields: Mapping[int, Tensor]) -> list[Tensor]:
            mark = torch.zeros(soft.sites, dtype=F64)
            mark[mix.weights_at[row]] = 1.0
            return [g != 0 for g in pull(mark[state.site], fields, at)]

        # Queries are the features of which the scores of a row depend on a single site.
        hits = (hit.sum(0) for hit in marked(-1, list(ends), ones))
        reached = dict(zip(ends, hits, strict=True))
        queries = [n for n, sites in reached.items() if bool((sites == 1).any())]
        readings = {
            n: self._reading(ends[n]) for n, hit in reached.items() if bool((hit > 1).any())
        }
        same = {n: r for n, r in readings.items() if r and r.source is of_values.source}
        if len(queries) != 1 or len(same) != 1:
            return []
        (query,), ((key, of_keys),) = queries, same.items()
        ones = {n: ones[n] for n in (query, key)}
        (hit,) = marked(-1, [query], ones)  # other keys do not count
        chosen = hit.sum(0) == 1
        row = torch.full((ends[query].sites,), -1, dtype=torch.long)
        for i in range(mix.sites):
            (hit,) = marked(i, [query], ones)
            row[hit[:, chosen].any(1)] = i
        kernel, variance = self._keys_by_values(mix, of_keys, of_values), of_keys.variance
        groups = self._groups(ends[query], chosen, [f.variable for f in plan.cuts.values()])
        sites = ends[query].sites
        grams = torch.zeros(len(groups), sites, sites, dtype=F64)
        random, draws = self._random(soft), 4 * self.draws
        sent = torch.zeros(soft.sites, soft.features, dtype=F64)
        for n in range(draws):
            if n % 4 == 0:
                weights = self.field(soft, self.run(soft, random)[0])[mix.weights_at]
                mixed = torch.einsum("ikl,ilh->ikh", kernel, weights)
                own = kernel.diagonal(dim1=1, dim2=2)[..., None]
                back = weights * (own - mixed)
                sent[mix.weights_at.reshape(-1)] = back.reshape(-1, soft.features)
            signs = torch.randn(ends[key].features, dtype=F64, generator=random).sign()
            signs = torch.where(reached[key] > 1, signs, 0.0)
            fields = {key: signs.expand(ends[key].sites, -1)}
            zeros = torch.zeros(ends[query].sites, ends[query].features, dtype=F64)
            fields[query] = zeros.requires_grad_(True) + fields.get(query, 0.0)
            (g,) = pull(sent[state.site, state.feature], fields, [query])
            for gram, (_, group, _) in zip(grams, groups, strict=True):
                gram += g[:, group] @ g[:, group].T / draws
        count = soft.features * of_values.count
        return [
            _SharedSource(read, row, gram / (count * factor**2), of_keys.root, variance)
            for gram, (read, _, factor) in zip(grams, groups, strict=True)
        ]

    def _groups(
        self, origin: Variable, chosen: Tensor, read: list[Variable]
    ) -> list[tuple[Variable, Tensor, float]]:
        """Some features of a matrix's product by the largest parts of it that are used: each as a
        variable, its features in the product, and its factor relative to the product."""
        left, groups = chosen.clone(), []
        for v in sorted(read, key=lambda v: len(_taken(v, origin)), reverse=True):
            taken = _taken(v, origin)
            fresh = left[taken].nonzero()[:, 0]
            if len(fresh):
                group = taken[fresh]
                factor = _factor(v, origin) if len(taken) == v.features else None
                whole, at = (origin, group) if factor is None else (v, fresh)
                groups.append((self.laws.parts.of(whole, at), group, factor or 1.0))
                left[group] = False
        return groups

    def _keys_by_values(self, mix: Mix, keys: _Reading, values: _Reading) -> Tensor:
        """(rows, keys, keys) width times the covariance of the inputs of keys and values."""
        covariance = self.laws.covariance(values.source, values.source)
        amplitude = torch.zeros(covariance.shape[0], dtype=F64)
        amplitude[keys.at] = keys.amplitude
        at = values.at[mix.values_at]
        left, right = amplitude[at], values.amplitude[mix.values_at]
        both = covariance[at[:, :, None], at[:, None, :]]
        return values.count * left[:, :, None] * both * right[:, None, :]

    def _reading(self, v: Variable) -> _Reading | None:
        """The matrix and its input, if a variable is its product behind scalings, gains, parts."""
        if isinstance(v, Product):
            if v.source is None or len(v.columns) != 1:
                return None
            count, at = v.columns[0]
            amplitude = torch.full((v.sites,), (v.variance * v.wider) ** 0.5, dtype=F64)
            return _Reading(v.source, at, amplitude, count, v.root, v.variance)
        if isinstance(v, Part):
            return self._reading(v.whole)
        if isinstance(v, Times) and v.at == (None, None):
            for one, gain in (v.parents, v.parents[::-1]):
                inner = self._reading(one) if isinstance(gain, Entries) else None
                if inner is not None:
                    inner.amplitude = inner.amplitude * self.laws.mean(gain)
                    return inner
        if isinstance(v, Combination):
            for term in v.terms:
                inner = self._reading(term.variable)
                if inner is None:
                    continue
                at = torch.arange(v.sites) if term.at is None else term.at
                if bool((at < 0).any()):
                    return None
                c = term.coefficient
                c = c if c.ndim == 0 else c.square().mean(-1).sqrt()
                inner.at, inner.amplitude = inner.at[at], inner.amplitude[at] * c
                return inner
        return None

    def _expressed(
        self, v: Variable, origin: Variable, fields: Mapping[int, Tensor]
    ) -> Tensor | None:
        """A variable (sites, features) as a function of its origin, which `fields` contains."""
        if v is origin:
            return fields.get(origin.number)
        if isinstance(v, Part):
            inner = self._expressed(v.whole, origin, fields)
            return None if inner is None else inner[:, v.chosen]
        if isinstance(v, Combination):
            total = None
            for term in v.terms:
                inner = self._expressed(term.variable, origin, fields)
                if inner is not None:
                    inner = term.coefficient * gathered(inner, term.at)
                    total = inner if total is None else total + inner
            return total
        if isinstance(v, Blend):
            inner = self._expressed(v.inner, origin, fields)
            return None if inner is None else v.mixing @ inner
        if isinstance(v, Times):
            (one, other), (i, j) = v.parents, v.at
            for inside, at, gain, gain_at in ((one, i, other, j), (other, j, one, i)):
                inner = self._expressed(inside, origin, fields)
                if inner is not None:
                    factor = gathered(self.laws.mean(gain), gain_at)
                    return gathered(inner, at) * factor[:, None]
        return None


def _origin(v: Variable) -> Product | None:
    """The matrix product that a variable is, behind scalings, gains, parts and gathers."""
    if isinstance(v, Product):
        return v
    if isinstance(v, Part | Combination | Blend | Times):
        return next((o for o in map(_origin, v.parents) if o is not None), None)
    return None


def _taken(v: Variable, origin: Variable) -> Tensor:
    """Features of a matrix product that a variable behind it contains."""
    if v is origin:
        return torch.arange(origin.features)
    if isinstance(v, Part) and v.whole is origin:
        return v.chosen
    return next((_taken(p, origin) for p in v.parents if _origin(p) is origin), torch.arange(0))


def _factor(v: Variable, origin: Variable) -> float | None:
    """The number by which a variable is a multiple of (part of) a matrix product, plus a bias."""
    if not isinstance(v, Combination):
        same = v is origin or (isinstance(v, Part) and v.whole is origin)
        return 1.0 if same else None
    terms = [t for t in v.terms if _origin(t.variable) is origin]
    if len(terms) != 1 or terms[0].at is not None or terms[0].coefficient.numel() != 1:
        return None
    inner = _factor(terms[0].variable, origin)
    return None if inner is None else inner * float(terms[0].coefficient)


def pushed(y: Tensor, moved: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The forward-mode derivative of a tensor along `moved`, pairs of a source and its tangent;
    None if it depends on none. It is the derivative of the backward pass in its cotangent."""
    if not y.requires_grad:
        return None
    cotangent = torch.zeros_like(y, requires_grad=True)
    leaves = [x for x, _ in moved]
    gradients = torch.autograd.grad(
        y, leaves, cotangent, create_graph=True, retain_graph=True, allow_unused=True
    )
    parts = [
        (gradient * tangent).sum()
        for gradient, (_, tangent) in zip(gradients, moved, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not parts:
        return None
    total = torch.stack(parts).sum()
    (result,) = torch.autograd.grad(total, cotangent, retain_graph=True, allow_unused=True)
    return None if result is None else result.detach()


def by_label(x: Tensor, site: Tensor, feature: Tensor, sites: int, features: int) -> Tensor:
    """Entries of a recorded tensor as (sites, features), 0 where there are none."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    flat = torch.zeros(sites * features, dtype=F64)
    at = (site * features + feature).reshape(-1)
    return flat.index_put((at,), x.reshape(-1).to(F64)).reshape(sites, features)


def _error(sizes: list[Tensor]) -> float:
    """The largest relative standard error of means over draws."""
    x = torch.stack(sizes)
    if len(x) < 2 or x.shape[1] == 0:
        return 0.0
    relative = x.std(0) / len(x) ** 0.5 / x.mean(0).abs().clamp_min(1e-300)
    return float(relative.nan_to_num(0.0, 0.0).max())


def _white(sites: int, features: int, random: torch.Generator, free: bool = False) -> Tensor:
    """Independent standard Gaussians (sites, features), whose Gram matrix is fixed to its mean if
    there are at least twice as many features as sites, unless `free`."""
    z = torch.randn(sites, features, dtype=F64, generator=random)
    fixed = features >= 2 * sites and not free
    return torch.linalg.qr(z.T)[0].T * features**0.5 if fixed else z


def _between(v: Variable) -> Iterator[Variable]:
    """A variable and those that it is a function of entry by entry, down to matrix products."""
    yield v
    if not isinstance(v, Product):
        for parent in v.parents:
            yield from _between(parent)


def _root(kernel: Tensor) -> Tensor:
    """A square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
    return vectors * values.clamp_min(0).sqrt()
