"""The residual stream of a recorded pass: its sums, and the blocks between them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from ...model.positions import alibi_slopes
from .graph import VIEWS, Graph, Node, attention_span
from .units import (
    EXACT,
    AttentionUnit,
    BranchUnit,
    Core,
    FeedUnit,
    Fit,
    GraphReader,
    LinearUnit,
    Link,
    Norm,
    Projections,
    RotationUnit,
    Stack,
    StreamSum,
    activation_name,
    close,
    proportionality,
    slope_and_cap,
)

MASKED = -5e3
"""A mask adds less than this to a logit."""

ORDER = ("attention", "cross", "ffn")
"""Blocks of a layer."""

_SUMS = ("add", "addcmul", "lerp", "sub")


class StreamReader(GraphReader):
    """Finds the residual sums of a graph, and reads the blocks between them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.chains = self._chains()

    # --- sums --------------------------------------------------------------------------------

    def sums(self) -> list[StreamSum]:
        """Every sum of a value and of what linear maps make of that value."""
        result, nested = [], set()
        for node in reversed(self.graph.nodes):
            if node.name.rstrip("_") not in _SUMS or node.index in nested:
                continue
            terms, inner = self._terms(node)
            for source in terms if len(terms) > 1 else ():
                branches = tuple(t for t in terms if t != source)
                if all(self.linears_between(source, branch) for branch in branches):
                    nested |= inner
                    stream = self._last_shared(terms[source], source, branches)
                    added = tuple(terms[branch] for branch in branches)
                    result.append(StreamSum(node.index, node.outputs[0], stream, branches, added))
                    break
        return result[::-1]

    def _last_shared(self, term: int, source: int, branches: Iterable[int]) -> int:
        """The last value on the way from a term to its source that every branch depends on."""
        for value in self.upstream(term):
            if all(self.graph.depends_on(branch, value) for branch in branches):
                return value
        return source

    def _terms(self, node: Node) -> tuple[dict[int, int], set[int]]:
        """The live terms of a sum; sums of sums are one where nothing else reads the inner sum.

        Returns:
            Source of each term (before views, dropouts and factors) -> value that is added; and the
            indices of the inner sums.
        """
        graph = self.graph
        whole = self.size(node.outputs[0])
        terms: dict[int, int] = {}
        inner: set[int] = set()
        for value in node.inputs:
            if not self.live(value) or self.size(value) != whole:
                continue
            source = self.source(value)
            producer = graph.producer(source)
            read_once = (len(graph.values[v].consumers) == 1 for v in self.upstream(value))
            if producer is not None and producer.name.rstrip("_") == "add" and all(read_once):
                more, deeper = self._terms(producer)
                if len(more) > 1:
                    terms |= more
                    inner |= deeper | {producer.index}
                    continue
            terms[source] = value
        return terms, inner

    # --- chains ------------------------------------------------------------------------------

    def _chains(self) -> list[Stack]:
        """Sums in chains, each with at least one attention: a sum continues the one it reads."""
        chains: list[list[StreamSum]] = []
        sums: list[StreamSum] = []
        for one in self.sums():
            earlier = (s for s in reversed(sums) if self.graph.depends_on(one.stream, s.output))
            previous = next(earlier, None)
            if previous and self.linears_between(previous.output, one.stream):
                previous = None
            chain = next((c for c in chains if c[-1] is previous), [])
            chains = [*(c for c in chains if c is not chain), [*chain, one]]
            sums.append(one)
        attending = (c for c in chains if any(self._cores(s, b) for s in c for b in s.branches))
        result = [Stack(chain[0].stream, chain) for chain in attending]
        return self._joined(sorted(result, key=lambda chain: chain.sums[0].index))

    def _joined(self, chains: list[Stack]) -> list[Stack]:
        """Chains that a single block connects, joined: its sum has the stream times 0."""
        result = chains[:1]
        for chain in chains[1:]:
            end, start = result[-1].sums[-1].output, chain.start
            linears = self.linears_between(end, start)
            alike = self.graph.tensor(end).shape == self.graph.tensor(start).shape
            node = self.graph.producer(start)
            if node is None or not alike or not 2 <= len(linears) <= 4:
                result.append(chain)
                continue
            gap = StreamSum(node.index, start, end, (self.source(start),), (start,))
            result[-1].sums += [gap, *chain.sums]
        return result

    def _cores(self, one: StreamSum, branch: int) -> list[Core]:
        nodes = {node.index for node in self.graph.path([one.stream], branch)}
        return [core for core in self.cores if core.softmax in nodes]

    # --- blocks ------------------------------------------------------------------------------

    def fill(self, chain: Stack) -> None:
        """Read every block of a chain, and the norms between and behind its sums."""
        previous = chain.start
        for number, one in enumerate(chain.sums):
            pairs = zip(one.branches, one.terms, strict=True)
            blocks = [self._block(one, branch, term) for branch, term in pairs]
            self._scales(one, blocks)
            blocks.sort(key=lambda block: ORDER.index(block.name))
            if number:
                self._link(number, chain.blocks[-1], blocks, self.link(previous, one.stream))
            previous = one.output
            chain.blocks += blocks
        norms = self._norms_after(previous)
        last, *others = chain.blocks[::-1]
        normed = bool(others) and not others[0].parallel and others[0].sum_norm is not None
        chain.end = previous
        if norms and normed and last.pre_norm is None:
            last.sum_norm = norms.pop(0)
            chain.end = self._scaled(last.sum_norm.end)
            last.sum_factor = self._factor(last.sum_norm.end, chain.end)
        if norms:
            chain.final = norms[-1]
            chain.end = chain.final.end

    def _link(
        self,
        number: int,
        last: BranchUnit,
        blocks: list[BranchUnit],
        link: Link | None,
    ) -> None:
        """Assign the norm or factor between sum `number` and the next to the blocks around it."""
        if link is None:
            self.doubts.append(
                f"what stands between sums {number} and {number + 1} of the stream is no norm"
            )
        elif link.norm is not None:
            last.sum_norm, last.sum_factor = link
        elif abs(link.factor - 1.0) > EXACT:
            if all(block.pre_norm is not None for block in blocks):
                for block in blocks:  # whose norm removes the factor
                    block.skip *= link.factor
            else:
                self.doubts.append(f"the stream is multiplied by {link.factor:.4g} on its way")

    def _scaled(self, value: int) -> int:
        """The last output of a submodule that follows a value by views, dropouts and factors."""
        outputs = {b.value for b in self.graph.boundaries if b.side == "output"}
        end, users = value, [value]
        while len(users) == 1:
            (value,) = users
            end = value if value in outputs else end
            nodes = (self.graph.nodes[i] for i in self.graph.values[value].consumers)
            users = [n.outputs[0] for n in nodes if self.passed_input(n, scaled=True) == value]
        return end

    def link(self, start: int, end: int) -> Link | None:
        """The norm between two values and the factor behind it; None if there is more."""
        result = self.fit(start, end)
        if not isinstance(result, Fit):
            return None if result is None else Link(None, result)
        size = self.size(start)
        values = [node.outputs[0] for node in self.graph.path([start], end)]
        values = [v for v in values if self.size(v) == size]
        norm = self.norm_among(start, [*values, end])
        assert norm is not None
        return Link(norm, self._factor(norm.end, end))

    def _factor(self, start: int, end: int) -> float:
        """The factor from one value to another; 1 if there is more between them."""
        factor = self.fit(start, end)
        return factor if isinstance(factor, float) else 1.0

    def _norms_after(self, value: int) -> list[Norm]:
        """The norm that a value enters next, if any, and the norm that follows this one, if any."""
        waiting, values = [value], []
        seen: set[int] = set()
        while waiting and len(seen) < 40:
            current = waiting.pop(0)
            for index in self.graph.values[current].consumers:
                node = self.graph.nodes[index]
                if index in self.linears or index in seen or node.name == "_log_softmax":
                    continue
                seen.add(index)
                output = node.outputs[0] if node.outputs else None
                if output is None or not self.live(output):
                    continue
                waiting.append(output)
                if self.size(output) == self.size(value):
                    values.append(output)
        norm, width = self.norm_among(value, values), self.width(value)
        if norm is None or any(
            self.graph.leaf(name).numel() > width for name in (*norm.gains, *norm.biases)
        ):
            return []  # gains and biases have one entry per feature
        # A norm of a norm of x is a norm of x.
        values.sort()
        fits = [v for v in values if isinstance(self.fit(value, v), Fit)]
        inner = [v for v in fits[:-1] if isinstance(self.fit(v, fits[-1]), Fit)]
        first = self.norm_among(value, inner)
        if first is None:
            return [norm]
        second = self.norm_among(first.end, [v for v in values if v > first.end])
        return [first, second or norm]

    def _block(self, one: StreamSum, branch: int, term: int) -> BranchUnit:
        cores = self._cores(one, branch)
        read = self._attention_block(one, branch, cores) if cores else self._feed_block(one, branch)
        read.parallel = len(one.branches) > 1
        if (link := self.link(read.raw, term)) is not None:
            read.output_norm = link.norm
        return read

    def _read_pre_norm(self, block: BranchUnit, inputs: list[int]) -> None:
        """Read the norm between the stream and the inputs of a block's matrices."""
        sources = dict.fromkeys(self.source(value, scaled=False) for value in inputs)
        first, *others = [self.link(block.sum.stream, source) for source in sources]
        if first is None or None in others:
            self.doubts.append("what stands before a block's matrices is no norm")
        else:
            block.pre_norm, block.pre_factor = first

    def _scales(self, one: StreamSum, blocks: list[BranchUnit]) -> None:
        """Read skip, branch and dropout of a sum, by running it with one term at a time."""
        ends = {(b.output_norm.end if b.output_norm else b.raw): b for b in blocks}
        size = self.size(one.output)
        if any(self.size(value) != size for value in ends):
            for b in blocks:  # the matrix that was read is not the block's last: a router's, say
                b.scales_known = False
            return
        zeros = {v: torch.zeros_like(self.graph.tensor(v)) for v in (one.stream, *ends)}
        (base,) = self.graph.run(zeros, one.output)
        for value, block in [(one.stream, None), *ends.items()]:
            row, x = self.random_row(value)  # alike at all tokens, which may be reordered
            (y,) = self.graph.run(zeros | {value: x}, one.output)
            y = (y - base).double().reshape(-1, len(row))
            slope = proportionality(row.expand_as(y), y)
            if slope is None:
                gains = y[0] / row
                slope = float(gains.square().mean().sqrt())
                if not close(y, (gains * row).expand_as(y)):
                    self.doubts.append("a residual sum is not a sum of multiples of its terms")
                    for b in blocks:
                        b.proportional = False
            if block is not None:
                block.branch = slope
            else:
                for b in blocks:
                    b.skip = slope
        for value, block in ends.items():
            path = self.graph.path([value], one.output)
            parameters = self.parameters_of(path)
            block.scale_params = tuple(str(self.graph.values[v].name) for v in parameters)
            deep = {p for n in path if (p := self.drop_path_of(n)) is not None}
            self.notes += [f"stochastic depth of probability {p:g} is left out" for p in deep]
            drops = self.dropouts(value, one.output)
            block.drops_last = bool(drops)
            drops += self.dropouts(block.raw, value) if block.raw != value else []
            if drops:
                node, block.dropout = drops[-1]
                block.dropped = node.outputs[0]

    # --- feed-forward ------------------------------------------------------------------------

    def _feed_block(self, one: StreamSum, branch: int) -> BranchUnit:
        matrices = self.linears_between(one.stream, branch)
        firsts, lasts = self._firsts_and_lasts(matrices)
        output = lasts[-1]
        block = BranchUnit("ffn", one, output.output)
        self._read_pre_norm(block, [linear.input for linear in firsts])
        usual = len(lasts) == 1 and len(firsts) + 1 == len(matrices) <= 3 and output not in firsts
        if not usual:
            every = {name for linear in matrices for name in linear.params}
            names = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in every})
            words = self._unusual_kind(one.stream, branch)
            words = words or f"a feed-forward block of {len(matrices)}"
            self.doubts.append(f"{words} matrices ({', '.join(names)})")
            return block
        uses = [(m, *use) for m in firsts for use in self.first_uses(m, output.input)]
        projections, activation = self._hidden(uses, output.input)
        drops = self.dropouts(uses[0][1], output.input)
        block.feed = FeedUnit(
            projections,
            output,
            activation,
            gated=len({value for _, value, _ in uses}) > 1,
            d_ff=self.width(output.input),
            dropout=drops[0][1] if drops else 0.0,
        )
        if drops:
            node = drops[0][0]
            block.feed.dropped = next(v for v in node.inputs if self.live(v)), node.outputs[0]
        if activation is None:
            self.doubts.append(
                "a feed-forward block's activation is not a known one (teach it: "
                "moments.register_activation(name, function, derivative))"
            )
        return block

    def _hidden(
        self, uses: list[tuple[LinearUnit, int, Tensor]], end: int
    ) -> tuple[Projections, str | None]:
        """The matrices before a hidden layer `end` by role, and its activation.

        With a gate, the hidden layer is linear in what "ffn_in" gives, and not in the gate.
        """
        starts = {value: self.random_like(value) for _, value, _ in uses}
        if len(starts) == 1:
            linear, value, columns = uses[0]
            return {"ffn_in": [(linear, columns.unique())]}, self.activation(value, end)
        projections: Projections = {}
        activation: str | None = None
        (y,) = self.graph.run(starts, end)
        for linear, value, columns in uses:
            (y_changed,) = self.graph.run(starts | {value: -2 * starts[value]}, end)
            is_linear = close(y_changed, -2 * y, 1e-5)  # negative: a ReLU is linear above 0
            role = "ffn_in" if is_linear and "ffn_in" not in projections else "gate"
            projections.setdefault(role, []).append((linear, columns.unique()))
            if role == "gate" and len(uses) == 2:
                ones = {v: torch.ones_like(t) for v, t in starts.items()}
                x = 2 * starts[value]
                activation = activation_name(x, self.graph.run(ones | {value: x}, end)[0])
        return projections, activation

    def _unusual_kind(self, start: int, end: int) -> str:
        """The kind of a block that is neither attention nor a plain feed-forward block, or ""."""
        names = {node.name.rstrip("_") for node in self.graph.path([start], end)}
        if names & {"topk", "sort"}:
            return "a mixture of experts, of routing and shared"
        if names & {"softplus", "cumsum", "logcumsumexp", "cumprod"}:
            return "a recurrence (state space or linear attention), of"
        return ""

    def _firsts_and_lasts(
        self, matrices: list[LinearUnit]
    ) -> tuple[list[LinearUnit], list[LinearUnit]]:
        """Of some linear maps those that depend on no other, and those that no other depends on."""
        pairs = [
            (later.node, earlier.node)
            for later in matrices
            for earlier in matrices
            if later is not earlier and self.graph.depends_on(later.input, earlier.output)
        ]
        fed, feeding = {later for later, _ in pairs}, {earlier for _, earlier in pairs}
        lasts = [m for m in matrices if m.node not in feeding]
        return [m for m in matrices if m.node not in fed], lasts

    # --- attention ---------------------------------------------------------------------------

    def _attention_block(self, one: StreamSum, branch: int, cores: list[Core]) -> BranchUnit:
        output = self.linears_between(cores[0].output, branch)
        name = "attention" if self.graph.depends_on(cores[0].key, one.stream) else "cross"
        block = BranchUnit(name, one, output[-1].output if output else branch)
        projections: Projections = {}
        inputs: list[int] = []
        for core in cores:
            for role, operand in (("query", core.query), ("key", core.key), ("value", core.value)):
                result = self._projection(operand)
                if result is None:
                    self.doubts.append(f"no single matrix makes an attention's {role}")
                    continue
                linear, columns = result
                if role == "query" or name == "attention":
                    inputs.append(linear.input)
                rows = projections.setdefault(role, [])
                if not any(m is linear and torch.equal(c, columns) for m, c in rows):
                    rows.append(result)
        if inputs:
            self._read_pre_norm(block, inputs)
        attention = self._attention(cores[0], projections)
        attention.output = output
        if len(output) != 1:
            self.doubts.append(f"{len(output)} matrices behind an attention's heads")
        elif not self._is_permutation([core.output for core in cores], output[0].input):
            attention.doubts.append("something acts between an attention's heads and its output")
        block.attention = attention
        return block

    def _is_permutation(self, values: list[int], end: int) -> bool:
        """Whether the entries of `end` are those of some values, each once."""
        inputs = {value: self.random_like(value) for value in values}
        (result,) = self.graph.run(inputs, end)
        entries = torch.cat([t.flatten() for t in inputs.values()]).double().sort().values
        return close(result.double().flatten().sort().values, entries)

    def _projection(self, operand: int) -> tuple[LinearUnit, Tensor] | None:
        """The one matrix that makes queries, keys or values, and its columns that do."""
        _, lasts = self._firsts_and_lasts(self.nearest_linears(operand))
        if len(lasts) != 1:
            return None
        columns = [c.flatten() for _, c in self.first_uses(lasts[0], operand)]
        return (lasts[0], torch.cat(columns).unique()) if columns else None

    def _attention(self, core: Core, projections: Projections) -> AttentionUnit:
        d_head = self.width(core.query)
        rows = {role: sum(len(c) for _, c in side) for role, side in projections.items()}
        heads, kv_heads = (rows.get(role, d_head) // d_head for role in ("query", "key"))
        result = AttentionUnit(core, heads, d_head, kv_heads, projections=projections)
        result.dropout = self.dropout(core.weights, core.output)
        if "value" in projections:
            start, _ = self._projected(projections["value"], core.value)
            if self._degree(start, core.value)[2] != 1:
                result.doubts.append("values that are normalised, or changed otherwise")
            else:
                result.rotates_values = self._depends_on_position(start, core.value, 2.0)
        if "query" in projections and "key" in projections:
            self._logits(core, projections, result)
        self._mask(core, result)
        return result

    def _logits(self, core: Core, projections: Projections, result: AttentionUnit) -> None:
        """Read norms and rotations of queries and keys, and what multiplies their product."""
        graph = self.graph
        scale = 1.0
        for role, operand in (("query", core.query), ("key", core.key)):
            start, columns = self._projected(projections[role], operand)
            x, y, degree = self._degree(start, operand)
            if degree == 1:
                used = x.reshape(-1, x.shape[-1])[:, columns].double()
                scale *= float((y.square().mean() / used.square().mean()).sqrt())
            elif degree == 0:
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
        result.rotary = self._rotary(core, projections["query"], result)
        q, k = 30 * self.random_like(core.query), self.random_like(core.key)

        def logits(size: float) -> Tensor:
            (z,) = graph.run({core.query: size * q, core.key: k}, core.logits)
            return z if result.sinks is None else z[..., :-1] - z[..., -1:]

        dots = torch.matmul(q.double(), k.double())
        result.sinks = self._sinks(core, logits(0), dots.shape[-1], result.heads)
        z, base = logits(1), logits(0)
        if dots.numel() != z.numel():
            more = "more" if z.numel() > dots.numel() else "fewer"
            result.doubts.append(f"a softmax over {more} entries than queries times keys")
            return
        visible = torch.isfinite(base) & (base > MASKED)
        slope, result.softcap = slope_and_cap(
            dots.reshape(z.shape)[visible], lambda size: (logits(size) - base)[visible]
        )
        if slope is None:
            result.doubts.append("logits are not a multiple of queries times keys")
        else:
            result.multiplier = scale * slope

    def _sinks(self, core: Core, base: Tensor, keys: int, heads: int) -> str | None:
        """The parameter that gives every head one more logit; `base` are logits of zero queries,
        each row up to a constant, which a softmax does not see."""
        parameters = [self.graph.values[v] for v in self._logit_parameters(core)]
        if base.shape[-1] != keys + 1 or len(parameters) != 1:
            return None
        (parameter,) = parameters
        if parameter.tensor.numel() != heads:
            return None
        visible = torch.isfinite(base[..., :-1]) & (base[..., :-1] > MASKED)
        expected = -parameter.tensor.detach().reshape(-1, 1, 1).expand_as(visible)[visible]
        relative = (base[..., :-1] - base[..., -1:])[visible]
        return str(parameter.name) if close(relative.double(), expected.double()) else None

    def _logit_parameters(self, core: Core) -> list[int]:
        """Parameters that act between the product of queries and keys and the softmax."""
        product = self.graph.nodes[core.product].outputs[0]
        return self.parameters_of(self.graph.path([product], core.logits))

    def _projected(self, side: list[tuple[LinearUnit, Tensor]], operand: int) -> tuple[int, Tensor]:
        """The output of the matrix that makes an operand, with its bias if the operand has it;
        the columns that the operand uses."""
        rows = ((self.graph.nodes[m.node].outputs[0], m, columns) for m, columns in side)
        product, linear, columns = next(r for r in rows if self.graph.depends_on(operand, r[0]))
        biased = self.graph.depends_on(operand, linear.output)
        return (linear.output if biased else product), columns

    def _degree(self, start: int, end: int) -> tuple[Tensor, Tensor, int | None]:
        """A random x at `start`, y at `end`, and 1 if y is linear (affine), 0 if independent of
        the size of x, else None."""
        x = self.random_like(start)
        y, y_double, y_zero = (
            self.graph.run({start: t}, end)[0].double() for t in (x, 2 * x, 0 * x)
        )
        linear = close(y_double - y_zero, 2 * (y - y_zero))
        return x, y, 1 if linear else 0 if close(y_double, y) else None

    def _head_norm(self, start: int, operand: int, d_head: int) -> Norm | None:
        """The norm of queries or keys, by head or (groups 0) of all heads together."""
        graph = self.graph
        values = [v for node in graph.path([start], operand) for v in node.outputs]
        views = [v for v in values if all(n.name in VIEWS for n in graph.path([start], v))]
        for width in (d_head, self.width(start)):
            candidates = (start, *views, *values)  # a rotation may come before the norm
            for first in dict.fromkeys(v for v in candidates if self.width(v) == width):
                shape = graph.tensor(first).shape
                alike = [v for v in values if graph.tensor(v).shape == shape and v > first]
                norm = self.norm_among(first, alike, width)
                if norm is None:
                    continue
                x = self.random_like(norm.end)
                (y,) = graph.run({norm.end: x}, operand)
                ratio = y.double().square().mean() / x.double().square().mean()
                norm.scale = float(ratio.sqrt()) * norm.gain
                norm.groups = 1 if width == d_head else 0
                return norm
        return None

    def _rotary(
        self, core: Core, side: list[tuple[LinearUnit, Tensor]], result: AttentionUnit
    ) -> RotationUnit | None:
        """Read the rotation of queries by their position: basis vectors at positions 0 and 1."""
        graph = self.graph
        start, _ = self._projected(side, core.query)
        length, d_head = graph.tensor(core.query).shape[-2:]
        if length < 2 or not self._depends_on_position(start, core.query):
            return None
        values = [v for node in graph.path([start], core.query) for v in node.outputs]
        values = [v for v in values if self.width(v) == d_head]
        plain = (v for v in values if self._depends_on_position(v, core.query, 2.0))
        normed = (v for v in values if self._depends_on_position(v, core.query, 1.0))
        origin = next(plain, None) or next(normed, None)
        if origin is None:
            result.doubts.append("queries depend on their position in a way not followed")
            return None
        shape = graph.tensor(origin).shape
        angles = []
        for basis in torch.eye(d_head, dtype=graph.tensor(origin).dtype):
            (y,) = graph.run({origin: basis.expand(shape).contiguous()}, core.query)
            rows = y.reshape(-1, length, d_head)[0].double()
            rows = rows / rows[0].norm()
            cosine = float(rows[0] @ rows[1])
            sine = float((rows[1] - cosine * rows[0]).norm())
            fixed = float((rows[-1] - rows[0]).norm()) < 1e-7
            angles.append(0.0 if fixed else math.atan2(sine, cosine))
        rotating = sorted((angle for angle in angles if angle > 0), reverse=True)
        speeds = rotating[::2]  # both features of a pair rotate at one speed
        fraction = len(rotating) / d_head
        if len(speeds) < 2:
            return RotationUnit(fraction, 10000.0, 0.0, (1.0,)) if speeds else None
        exponents = [2 * m / len(rotating) for m in range(len(speeds))]
        base = float(f"{math.exp(-math.log(speeds[-1]) / exponents[-1]):.3g}")
        powers = [base**-e for e in exponents]
        deviation = max(abs(p / s - 1) for p, s in zip(powers, speeds, strict=True))
        return RotationUnit(fraction, base, deviation, tuple(speeds))

    def _depends_on_position(self, start: int, end: int, doubled: float | None = None) -> bool:
        """Whether equal tokens at `start` differ at `end`; if `doubled` is not None, also whether
        they become so many times larger when the start is doubled."""
        graph = self.graph
        _, x = self.random_row(start)
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
        """Read which keys a query attends to, and biases of its logits, at zero queries."""
        graph = self.graph
        zero = {core.query: torch.zeros_like(graph.tensor(core.query))}
        logits, weights = graph.run(zero, core.logits, core.weights)
        length, keys = weights.shape[-2:]
        rows = weights.reshape(-1, length, keys)
        if keys == length + 1 and bool((rows[..., -1] > 0).all()):  # a sink behind the keys
            rows, keys = rows[..., :-1], length
        attended = (rows > 0).any(0)
        if length == keys and length > 1:
            result.causal = not bool(torch.triu(attended, 1).any())
            result.window = attention_span(rows)
        bias = logits.reshape(-1, length, logits.shape[-1])[..., :keys].double()
        bias = torch.where(bias < MASKED, torch.full_like(bias, math.nan), bias)
        finite = bias[torch.isfinite(bias)]
        if finite.numel() and float(finite.abs().max()) > 1e-6:
            if tables := self._logit_parameters(core):
                table = graph.values[tables[0]]
                result.relative, result.buckets = str(table.name), len(table.tensor)
            elif length == keys:
                result.alibi = self._alibi(bias[: result.heads], result)

    def _alibi(self, bias: Tensor, result: AttentionUnit) -> bool | float:
        """Whether a bias (heads, queries, keys) is ALiBi, or the ratio of its slopes to ALiBi's."""
        positions = torch.arange(bias.shape[-1], dtype=torch.float64)
        distance = -(positions[:, None] - positions[None, :]).abs()
        slopes = []
        for head in bias:
            use = torch.isfinite(head) & (distance != 0)
            # softmax is unchanged by a constant on a whole row
            level = head - head.diagonal()[:, None]
            slopes.append(float((level[use] / distance[use]).median()))
            if not close(level[use], slopes[-1] * distance[use]):
                result.doubts.append("what is added to the logits is not ALiBi")
                return False
        published = torch.as_tensor(alibi_slopes(result.heads))
        factor = float((torch.tensor(slopes) / published).mean())
        return True if abs(factor - 1) < 1e-3 else factor
