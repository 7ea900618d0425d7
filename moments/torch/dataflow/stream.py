"""The residual stream of a recorded pass: its sums, and the blocks between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...model.positions import alibi_slopes
from .graph import VIEWS, Graph, Node, attention_span
from .units import (
    EXACT,
    AttentionUnit,
    Core,
    Fit,
    GraphReader,
    LinearUnit,
    Norm,
    RotationUnit,
    activation_name,
    close,
    proportionality,
    slope_and_cap,
)

HIDDEN = -5e3
"""What is added to a logit that is meant to vanish is below this."""

ORDER = ("attention", "cross", "ffn")
"""Blocks of a layer."""

_SUMS = ("add", "addcmul", "lerp", "sub")


@dataclass
class StreamSum:
    """skip_scale * stream + branch_scale * f, plus perhaps a second block's f."""

    index: int
    value: int
    stream: int
    tips: tuple[int, ...]
    ends: tuple[int, ...] = ()


@dataclass
class Feed:
    """A feed-forward block."""

    into: dict[str, list[tuple[LinearUnit, Tensor]]]
    output: LinearUnit
    activation: str | None
    gated: bool
    d_ff: int
    dropout: float
    dropped: tuple[int, int] | None = None


@dataclass
class BranchUnit:
    """One residual branch, recognised; `late`: dropped behind its last norm, `whole`: its sum is
    one of multiples, `summed`: what it gives the sum was read."""

    name: str
    sum: StreamSum
    raw: int
    before: Norm | None = None
    factor: float = 1.0
    behind: Norm | None = None
    after: Norm | None = None
    after_factor: float = 1.0
    skip: float = 1.0
    branch: float = 1.0
    scale_params: tuple[str, ...] = ()
    dropout: float = 0.0
    dropped: int | None = None
    late: bool = False
    whole: bool = True
    summed: bool = True
    parallel: bool = False
    attention: AttentionUnit | None = None
    core: Core | None = None
    feed: Feed | None = None


@dataclass
class SumChain:
    """One stack's sums in order."""

    start: int
    sums: list[StreamSum]
    blocks: list[BranchUnit] = field(default_factory=list)
    final: Norm | None = None
    end: int = 0


class StreamReader:
    """Finds the sums of a graph, and reads what stands between them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reader = GraphReader(graph)
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.chains = self._chains()

    # --- sums --------------------------------------------------------------------------------

    def sums(self) -> list[StreamSum]:
        """Every addition of a value to what products make of that value."""
        result, inner = [], set()
        for node in reversed(self.graph.nodes):
            if node.name.rstrip("_") not in _SUMS or node.index in inner:
                continue
            terms, used = self._terms(node)
            if len(terms) < 2:
                continue
            for stream in terms:
                others = [t for t in terms if t != stream]
                tips = tuple(terms[t] for t in others)
                if tips and all(self.reader.linears_between(stream, tip) for tip in others):
                    inner |= used
                    near = self._nearest(terms[stream], stream, others)
                    one = StreamSum(node.index, node.outputs[0], near, tuple(others), tips)
                    result.append(one)
                    break
        return result[::-1]

    def _nearest(self, end: int, root: int, tips: list[int]) -> int:
        """Of what a sum's term passes unchanged but for factors, the last that the others read."""
        reads = (
            v for v in self.reader.upstream(end) if all(self.graph.depends_on(t, v) for t in tips)
        )
        return next(reads, root)

    def _terms(self, node: Node) -> tuple[dict[int, int], set[int]]:
        """What a sum adds, sums in it that nothing else reads taken apart; the nodes of these.

        Terms are roots, behind views, dropouts and factors -> what enters the sum of each.
        """
        graph, reader = self.graph, self.reader
        whole = graph.tensor(node.outputs[0]).numel()
        terms: dict[int, int] = {}
        used: set[int] = set()
        for value in node.inputs:
            if not reader.live(value) or graph.tensor(value).numel() != whole:
                continue
            root = reader.source(value)
            made = graph.producer(root)
            alone = (len(graph.values[v].consumers) == 1 for v in reader.upstream(value))
            if made is not None and made.name.rstrip("_") == "add" and all(alone):
                more, deeper = self._terms(made)
                if len(more) > 1:
                    terms |= more
                    used |= deeper | {made.index}
                    continue
            terms[root] = value
        return terms, used

    # --- chains ------------------------------------------------------------------------------

    def _chains(self) -> list[SumChain]:
        sums = self.sums()
        following: dict[int, int] = {}
        for place, one in enumerate(sums):
            for before in reversed(range(place)):
                value = sums[before].value
                if self.graph.depends_on(one.stream, value):
                    if not self.reader.linears_between(value, one.stream):
                        following[place] = before
                    break
        chains: dict[int, list[int]] = {}
        for place in range(len(sums)):
            earlier = following.get(place)
            line = chains.pop(earlier, None) if earlier is not None else None
            chains[place] = [*(line or []), place]
        result = []
        for line in chains.values():
            rows = [sums[p] for p in line]
            chain = SumChain(rows[0].stream, rows)
            if any(self._cores(s, t) for s in rows for t in s.tips):
                result.append(chain)
        return self._joined(sorted(result, key=lambda chain: chain.sums[0].index))

    def _joined(self, chains: list[SumChain]) -> list[SumChain]:
        """Streams in a row as one, where nothing but one block stands between them: its sum lacks
        the stream, as if that were multiplied by 0."""
        result = chains[:1]
        for chain in chains[1:]:
            before, value = result[-1].sums[-1].value, chain.start
            between = self.reader.linears_between(before, value)
            alike = self.graph.tensor(before).shape == self.graph.tensor(value).shape
            made = self.graph.producer(value)
            if made is None or not alike or not 2 <= len(between) <= 4:
                result.append(chain)
                continue
            gap = StreamSum(made.index, value, before, (self.reader.source(value),), (value,))
            result[-1].sums += [gap, *chain.sums]
        return result

    def _cores(self, one: StreamSum, tip: int) -> list[Core]:
        nodes = {node.index for node in self.graph.path([one.stream], tip)}
        return [core for core in self.reader.cores if core.softmax in nodes]

    # --- blocks ------------------------------------------------------------------------------

    def fill(self, chain: SumChain) -> None:
        """Reads every block of a chain."""
        previous = chain.start
        for place, one in enumerate(chain.sums):
            blocks = [
                self._block(one, tip, end) for tip, end in zip(one.tips, one.ends, strict=True)
            ]
            for block in blocks:
                block.parallel = len(blocks) > 1
            self._scales(one, blocks)
            blocks.sort(key=lambda block: ORDER.index(block.name))
            if place:
                link = self.norm(previous, one.stream)
                last = chain.blocks[-1]
                if isinstance(link, tuple):
                    last.after, last.after_factor = link
                elif link is None:
                    self.doubts.append(
                        f"what stands between sums {place} and {place + 1} of the stream is no norm"
                    )
                elif abs(link - 1.0) > EXACT:
                    if all(block.before is not None for block in blocks):
                        for block in blocks:  # whose norm takes the factor away
                            block.skip *= link
                    else:
                        self.doubts.append(f"the stream is multiplied by {link:.4g} on its way")
            previous = one.value
            chain.blocks += blocks
        norms = self._norms_after(previous)
        last, *others = chain.blocks[::-1]
        afters = [b.after is not None for b in others[:1] if not b.parallel]
        if norms and afters and all(afters) and last.before is None:
            after = norms.pop(0)
            chain.end = self._scaled(after.end)
            factor = self.reader.fit(after.end, chain.end)
            last.after, last.after_factor = after, factor if isinstance(factor, float) else 1.0
        else:
            chain.end = previous
        if norms:
            chain.final = norms[-1]
            chain.end = chain.final.end

    def _scaled(self, value: int) -> int:
        """A value behind the factors that follow it inside of the submodule that gives it."""
        given = {b.value for b in self.graph.boundaries if b.side == "output"}
        end, users = value, [value]
        while len(users) == 1:
            (value,) = users
            end = value if value in given else end
            nodes = (self.graph.nodes[i] for i in self.graph.values[value].consumers)
            users = [
                n.outputs[0] for n in nodes if self.reader.passed_input(n, scaled=True) == value
            ]
        return end

    def norm(self, start: int, end: int) -> tuple[Norm, float] | float | None:
        """A norm and the factor behind it, a factor alone, or what is neither (None)."""
        result = self.reader.fit(start, end)
        if not isinstance(result, Fit):
            return result
        size = self.graph.tensor(start).numel()
        values = [node.outputs[0] for node in self.graph.path([start], end)]
        values = [v for v in values if self.graph.tensor(v).numel() == size]
        norm = self.reader.norm_among(start, [*values, end])
        assert norm is not None
        rest = self.reader.fit(norm.end, end)
        return norm, rest if isinstance(rest, float) else 1.0

    def _norms_after(self, value: int) -> list[Norm]:
        """The norm that a value enters next, if it enters one, and the norm that this enters."""
        waiting, result = [value], []
        seen: set[int] = set()
        while waiting and len(seen) < 40:
            current = waiting.pop(0)
            for index in self.graph.values[current].consumers:
                node = self.graph.nodes[index]
                if index in self.reader.linears or index in seen or node.name in ("_log_softmax",):
                    continue
                seen.add(index)
                output = node.outputs[0] if node.outputs else None
                if output is None or not self.reader.live(output):
                    continue
                waiting.append(output)
                if self.graph.tensor(output).numel() == self.graph.tensor(value).numel():
                    result.append(output)
        norm, width = self.reader.norm_among(value, result), self.graph.tensor(value).shape[-1]
        if norm is None or any(
            self.graph.leaf(name).numel() > width for name in (*norm.gains, *norm.biases)
        ):
            return []  # gains and biases have one entry per feature
        # A norm of a norm is a norm of what went in.
        fits = [v for v in sorted(result) if isinstance(self.reader.fit(value, v), Fit)]
        between = [v for v in fits[:-1] if isinstance(self.reader.fit(v, fits[-1]), Fit)]
        first = self.reader.norm_among(value, between)
        if first is None:
            return [norm]
        second = self.reader.norm_among(first.end, [v for v in sorted(result) if v > first.end])
        return [first, second or norm]

    def _block(self, one: StreamSum, tip: int, end: int) -> BranchUnit:
        cores = self._cores(one, tip)
        block = self._attention_block(one, tip, cores) if cores else self._feed_block(one, tip)
        link = self.norm(block.raw, end)
        if isinstance(link, tuple):
            block.behind = link[0]
        return block

    def _before(self, block: BranchUnit, reads: list[int]) -> None:
        """The norm between the stream and what a block's matrices read."""
        roots = dict.fromkeys(self.reader.source(read, scaled=False) for read in reads)
        first, *others = [self.norm(block.sum.stream, root) for root in roots]
        if first is None or None in others:
            self.doubts.append("what stands before a block's matrices is no norm")
        elif isinstance(first, tuple):
            block.before, block.factor = first
        else:
            block.factor = first

    def _scales(self, one: StreamSum, blocks: list[BranchUnit]) -> None:
        """lambda and beta of a sum, by running it on one term alone."""
        tips = {(b.behind.end if b.behind else b.raw): b for b in blocks}
        size = self.graph.tensor(one.value).numel()
        if any(self.graph.tensor(value).numel() != size for value in tips):
            for b in blocks:  # what was read of one is not what it gives: a router's logits
                b.summed = False
            return
        zeros = {v: torch.zeros_like(self.graph.tensor(v)) for v in (one.stream, *tips)}
        (base,) = self.graph.run(zeros, one.value)
        for value, block in [(one.stream, None), *tips.items()]:
            row, x = self.reader.random_row(value)  # whatever the order of the tokens
            (made,) = self.graph.run(zeros | {value: x}, one.value)
            made = (made - base).double().reshape(-1, len(row))
            slope = proportionality(row.expand_as(made), made)
            if slope is None:
                gains = made[0] / row
                slope = float(gains.square().mean().sqrt())
                if not close(made, (gains * row).expand_as(made)):
                    self.doubts.append("a residual sum is not a sum of multiples of its terms")
                    for b in blocks:
                        b.whole = False
            if block is None:
                for b in blocks:
                    b.skip = slope
            else:
                block.branch = slope
        for value, block in tips.items():
            path = self.graph.path([value], one.value)
            leaves = self.reader.parameters_of(path)
            block.scale_params = tuple(str(self.graph.values[v].name) for v in leaves)
            deep = {p for n in path if (p := self.reader.drop_path_of(n)) is not None}
            self.notes += [f"stochastic depth of probability {p:g} is left out" for p in deep]
            drops = self.reader.dropouts(value, one.value)
            block.late = bool(drops)
            drops += self.reader.dropouts(block.raw, value) if block.raw != value else []
            if drops:
                block.dropout = drops[-1][1]
                block.dropped = drops[-1][0].outputs[0]

    # --- feed-forward ------------------------------------------------------------------------

    def _feed_block(self, one: StreamSum, tip: int) -> BranchUnit:
        graph, reader = self.graph, self.reader
        matrices = reader.linears_between(one.stream, tip)
        ins, outs = self._ends(matrices)
        output = outs[-1]
        block = BranchUnit("ffn", one, output.output)
        self._before(block, [linear.input for linear in ins])
        if len(outs) != 1 or len(ins) > 2 or len(ins) + 1 != len(matrices) or output in ins:
            every = {name for linear in matrices for name in linear.params}
            names = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in every})
            words = self._kind_of(one.stream, tip) or f"a feed-forward block of {len(matrices)}"
            self.doubts.append(f"{words} matrices ({', '.join(names)})")
            return block
        tails = [
            (linear, *tail) for linear in ins for tail in reader.first_uses(linear, output.input)
        ]
        starts = {value: reader.random_like(value) for _, value, _ in tails}
        into: dict[str, list[tuple[LinearUnit, Tensor]]] = {}
        activation: str | None = None
        if len(starts) == 1:
            activation = reader.activation(tails[0][1], output.input)
            into["ffn_in"] = [(tails[0][0], tails[0][2].unique())]
        else:  # the product of two maps: it is linear in one of them
            (plain,) = graph.run(starts, output.input)
            for linear, value, columns in tails:
                (turned,) = graph.run(starts | {value: -2 * starts[value]}, output.input)
                straight = close(turned, -2 * plain, 1e-5)  # a ReLU is linear in positive factors
                role = "ffn_in" if straight and "ffn_in" not in into else "gate"
                into.setdefault(role, []).append((linear, columns.unique()))
                if role == "gate" and len(tails) == 2:
                    ones = {v: torch.ones_like(t) for v, t in starts.items()}
                    x = 2 * starts[value]
                    activation = activation_name(x, graph.run(ones | {value: x}, output.input)[0])
        drops = reader.dropouts(tails[0][1], output.input)
        block.feed = Feed(
            into,
            output,
            activation,
            gated=len(starts) > 1,
            d_ff=graph.tensor(output.input).shape[-1],
            dropout=drops[0][1] if drops else 0.0,
        )
        if drops:
            (node, _), *_ = drops
            entering = next(v for v in node.inputs if reader.live(v))
            block.feed.dropped = entering, node.outputs[0]
        if activation is None:
            self.doubts.append(
                "a feed-forward block's activation is not a known one (teach it: "
                "moments.register_activation(name, function, derivative))"
            )
        return block

    def _kind_of(self, start: int, end: int) -> str:
        """What a block is that is neither attention nor a plain feed-forward block, in words."""
        names = {node.name.rstrip("_") for node in self.graph.path([start], end)}
        if names & {"topk", "sort"}:
            return "a mixture of experts, of routing and shared"
        if names & {"softplus", "cumsum", "logcumsumexp", "cumprod"}:
            return "a recurrence (state space or linear attention), of"
        return ""

    def _ends(self, matrices: list[LinearUnit]) -> tuple[list[LinearUnit], list[LinearUnit]]:
        """Of some products those that no other one feeds, and those that feed no other one."""
        fed, feeding = set(), set()
        for one in matrices:
            for other in matrices:
                if one is not other and self.graph.depends_on(one.input, other.output):
                    fed.add(one.node)
                    feeding.add(other.node)
        outs = [m for m in matrices if m.node not in feeding]
        return [m for m in matrices if m.node not in fed], outs

    # --- attention ---------------------------------------------------------------------------

    def _attention_block(self, one: StreamSum, tip: int, cores: list[Core]) -> BranchUnit:
        graph, reader = self.graph, self.reader
        stream = one.stream
        output = reader.linears_between(cores[0].output, tip)
        name = "attention" if graph.depends_on(cores[0].key, stream) else "cross"
        raw = output[-1].output if output else tip
        block = BranchUnit(name, one, raw, core=cores[0])
        sides: dict[str, list[tuple[LinearUnit, Tensor]]] = {}
        reads: list[int] = []
        for core in cores:
            for role, operand in (("query", core.query), ("key", core.key), ("value", core.value)):
                result = self._projection(operand, core)
                if result is None:
                    self.doubts.append(f"no single matrix makes an attention's {role}")
                    continue
                linear, columns = result
                if role == "query" or name == "attention":
                    reads.append(linear.input)
                row = (linear, columns)
                rows = sides.setdefault(role, [])
                if not any(m is linear and torch.equal(c, columns) for m, c in rows):
                    rows.append(row)
        if reads:
            self._before(block, reads)
        attention = self._attention(cores, sides, name)
        attention.output = output
        if len(output) != 1:
            self.doubts.append(f"{len(output)} matrices behind an attention's heads")
        elif not self._passed_whole([core.output for core in cores], output[0].input):
            attention.doubts.append("something acts between an attention's heads and its output")
        block.attention = attention
        return block

    def _passed_whole(self, values: list[int], end: int) -> bool:
        """Whether some values reach another one entry by entry, each once."""
        given = {value: self.reader.random_like(value) for value in values}
        (one,) = self.graph.run(given, end)
        entries = torch.cat([t.flatten() for t in given.values()]).double().sort().values
        return close(one.double().flatten().sort().values, entries)

    def _projection(self, operand: int, core: Core) -> tuple[LinearUnit, Tensor] | None:
        """The matrix that makes queries, keys or values, and its columns that do."""
        reader = self.reader
        _, near = self._ends(reader.nearest_linears(operand))
        if len(near) != 1:
            return None
        (linear,) = near
        columns = [c for _, c in reader.first_uses(linear, operand)]
        if not columns:
            return None
        return linear, torch.cat([c.flatten() for c in columns]).unique()

    def _attention(
        self, cores: list[Core], sides: dict[str, list[tuple[LinearUnit, Tensor]]], name: str
    ) -> AttentionUnit:
        graph, reader = self.graph, self.reader
        core = cores[0]
        d_head = graph.tensor(core.query).shape[-1]
        rows = {role: sum(len(c) for _, c in side) for role, side in sides.items()}
        heads = rows.get("query", d_head) // d_head
        kv_heads = rows.get("key", d_head) // d_head
        result = AttentionUnit(heads, d_head, kv_heads, projections=sides)
        drops = reader.dropouts(core.weights, core.output)
        result.dropout = drops[0][1] if drops else 0.0
        if "value" in sides:
            linear, _ = self._source(sides["value"], core.value)
            start = self._made(linear, core.value)
            if self._doubled(start, core.value)[2] != 2:
                result.doubts.append("values that are normalised, or changed otherwise")
            else:
                result.rotates_values = self._turns(start, core.value)
        if "query" in sides and "key" in sides:
            self._logits(core, sides, result)
        self._mask(core, result)
        return result

    def _logits(
        self, core: Core, sides: dict[str, list[tuple[LinearUnit, Tensor]]], result: AttentionUnit
    ) -> None:
        """Norms and rotations of queries and keys, and what multiplies their product."""
        graph, reader = self.graph, self.reader
        scale = 1.0
        for role, operand in (("query", core.query), ("key", core.key)):
            linear, columns = self._source(sides[role], operand)
            start = self._made(linear, operand)
            x, one, doubled = self._doubled(start, operand)
            if doubled == 2:
                taken = x.reshape(-1, x.shape[-1])[:, columns].double()
                scale *= float((one.square().mean() / taken.square().mean()).sqrt())
            elif doubled == 1:
                norm = self._head_norm(start, operand, result.d_head)
                if norm is None:
                    result.doubts.append(f"a {role}'s norm is not a known one")
                else:
                    scale *= norm.scale
                    setattr(result, "qk_norm" if role == "query" else "key_norm", norm)
            else:
                result.doubts.append(
                    f"between a {role}'s matrix and its use stands something unknown"
                )
        result.rotary = self._rotary(core, sides["query"], result)
        q, k = 30 * reader.random_like(core.query), reader.random_like(core.key)

        def logits(size: float) -> Tensor:
            (z,) = graph.run({core.query: size * q, core.key: k}, core.logits)
            return z if result.sinks is None else z[..., :-1]

        dots = torch.matmul(q.double(), k.double())
        z, base = logits(1), logits(0)
        if z.shape[-1] == dots.shape[-1] + 1 and torch.equal(z[..., -1], base[..., -1]):
            path = graph.path([graph.nodes[core.product].outputs[0]], core.logits)
            held = [graph.values[v] for v in self.reader.parameters_of(path)]
            if len(held) == 1 and held[0].tensor.numel() == result.heads:
                result.sinks = str(held[0].name)
                z, base = logits(1), logits(0)
        if dots.numel() != z.numel():
            more = "more" if z.numel() > dots.numel() else "fewer"
            result.doubts.append(f"a softmax over {more} entries than queries times keys")
            return
        dots = dots.reshape(z.shape)
        there = torch.isfinite(base) & (base > HIDDEN)

        def moved(size: float) -> Tensor:
            return (logits(size) - base)[there]

        slope, result.softcap = slope_and_cap(dots[there], moved)
        if slope is None:
            result.doubts.append("logits are not a multiple of queries times keys")
        else:
            result.multiplier = scale * slope

    def _source(self, side: list[tuple[LinearUnit, Tensor]], end: int) -> tuple[LinearUnit, Tensor]:
        """Of some matrices the one that makes a value, and its columns."""
        return next(row for row in side if self.graph.depends_on(end, self._first(row[0])))

    def _doubled(self, start: int, end: int) -> tuple[Tensor, Tensor, int | None]:
        """A draw of a value, what is made of it, and what that is multiplied by (2 or 1, else None)
        where the draw is doubled."""
        x = self.reader.random_like(start)
        one, two, zero = (self.graph.run({start: t}, end)[0].double() for t in (x, 2 * x, 0 * x))
        linear = close(two - zero, 2 * (one - zero))
        return x, one, 2 if linear else 1 if close(two, one) else None

    def _head_norm(self, start: int, operand: int, d_head: int) -> Norm | None:
        """A norm of queries or keys: of every head, or (groups 0) of all heads together.

        Its `scale` is what multiplies the normalised entries on their way to the product.
        """
        graph, reader = self.graph, self.reader
        values = [v for node in graph.path([start], operand) for v in node.outputs]
        plain = [start] + [
            v for v in values if all(n.name in VIEWS for n in graph.path([start], v))
        ]
        for width in (d_head, graph.tensor(start).shape[-1]):
            firsts = [v for v in [*plain, *values] if graph.tensor(v).shape[-1] == width]
            for first in dict.fromkeys(firsts):  # a rotation may come before the norm
                shape = graph.tensor(first).shape
                alike = [v for v in values if graph.tensor(v).shape == shape and v > first]
                norm = reader.norm_among(first, alike, width)
                if norm is None:
                    continue
                x = reader.random_like(norm.end)
                (y,) = graph.run({norm.end: x}, operand)
                ratio = y.double().square().mean() / x.double().square().mean()
                norm.scale = float(ratio.sqrt()) * norm.gain
                norm.groups = 1 if width == d_head else 0
                return norm
        return None

    def _rotary(
        self, core: Core, side: list[tuple[LinearUnit, Tensor]], result: AttentionUnit
    ) -> RotationUnit | None:
        """Whether, and how fast, queries turn with their position."""
        graph = self.graph
        start = self._made(side[0][0], core.query)
        length, d_head = graph.tensor(core.query).shape[-2:]
        if length < 2 or not self._turns(start, core.query):
            return None
        values = [v for node in graph.path([start], core.query) for v in node.outputs]
        values = [v for v in values if graph.tensor(v).shape[-1] == d_head]
        plain = (v for v in values if self._turns(v, core.query, 2.0))
        normed = (v for v in values if self._turns(v, core.query, 1.0))
        origin = next(plain, None) or next(normed, None)
        if origin is None:
            result.doubts.append("queries depend on their position in a way not followed")
            return None
        shape = graph.tensor(origin).shape
        speeds = []
        for basis in torch.eye(d_head, dtype=graph.tensor(origin).dtype):
            (y,) = graph.run({origin: basis.expand(shape).contiguous()}, core.query)
            rows = y.reshape(-1, length, d_head)[0].double()
            rows = rows / rows[0].norm()
            cosine = float(rows[0] @ rows[1])
            sine = float((rows[1] - cosine * rows[0]).norm())
            still = float((rows[-1] - rows[0]).norm()) < 1e-7
            speeds.append(0.0 if still else math.atan2(sine, cosine))
        turned = sorted((s for s in speeds if s > 0), reverse=True)
        pairs = turned[::2]
        if len(pairs) < 2:
            return RotationUnit(len(turned) / d_head, 10000.0, 0.0, (1.0,)) if pairs else None
        exponents = [2 * m / len(turned) for m in range(len(pairs))]
        base = float(f"{math.exp(-math.log(pairs[-1]) / exponents[-1]):.3g}")
        predicted = [base**-e for e in exponents]
        deviation = max(abs(p / q - 1) for p, q in zip(predicted, pairs, strict=True))
        return RotationUnit(len(turned) / d_head, base, deviation, tuple(pairs))

    def _made(self, linear: LinearUnit, end: int) -> int:
        """A product's outcome on the way to a value, behind its bias where that lies there."""
        return linear.output if self.graph.depends_on(end, linear.output) else self._first(linear)

    def _first(self, linear: LinearUnit) -> int:
        """A product's outcome itself."""
        return self.graph.nodes[linear.node].outputs[0]

    def _turns(self, start: int, end: int, doubled: float | None = None) -> bool:
        """Whether what is alike at all positions differs between them later.

        `doubled`: and is so many times as large where the start is twice as large.
        """
        graph = self.graph
        _, x = self.reader.random_row(start)
        if not x.is_floating_point():
            return False
        (y,) = graph.run({start: x}, end)
        rows = y.reshape(-1, *y.shape[-2:]).double()
        if close(rows, rows[:, :1].expand_as(rows), 1e-5):
            return False
        if doubled is None:
            return True
        return close(graph.run({start: 2 * x}, end)[0].double(), doubled * y.double())

    def _mask(self, core: Core, result: AttentionUnit) -> None:
        """Which keys a query sees, and what is added to its logits."""
        graph = self.graph
        zero = {core.query: torch.zeros_like(graph.tensor(core.query))}
        logits, weights = graph.run(zero, core.logits, core.weights)
        length, keys = weights.shape[-2:]
        rows = weights.reshape(-1, length, keys)
        if keys == length + 1 and bool((rows[..., -1] > 0).all()):  # a sink behind the keys
            rows, keys = rows[..., :-1], length
        seen = (rows > 0).any(0)
        if length == keys and length > 1:
            result.causal = not bool(torch.triu(seen, 1).any())
            result.window = attention_span(rows)
        flat = logits.reshape(-1, length, logits.shape[-1])[..., :keys].double()
        flat = torch.where(flat < HIDDEN, torch.full_like(flat, math.nan), flat)
        finite = flat[torch.isfinite(flat)]
        if finite.numel() and float(finite.abs().max()) > 1e-6:
            path = graph.path([graph.nodes[core.product].outputs[0]], core.logits)
            if tables := self.reader.parameters_of(path):
                table = graph.values[tables[0]]
                result.relative, result.buckets = str(table.name), len(table.tensor)
            elif length == keys:
                result.alibi = self._alibi(flat[: result.heads], result)

    def _alibi(self, bias: Tensor, result: AttentionUnit) -> bool | float:
        length = bias.shape[-1]
        places = torch.arange(length, dtype=torch.float64)
        distance = -(places[:, None] - places[None, :]).abs()
        slopes = []
        for head in bias:
            use = torch.isfinite(head) & (distance != 0)
            # softmax does not see what is added to a whole row
            level = head - head.diagonal()[:, None]
            slopes.append(float((level[use] / distance[use]).median()))
            if not close(level[use], slopes[-1] * distance[use]):
                result.doubts.append("what is added to the logits is not ALiBi")
                return False
        wanted = torch.as_tensor(alibi_slopes(result.heads))
        factor = float((torch.tensor(slopes) / wanted).mean())
        return True if abs(factor - 1) < 1e-3 else factor
