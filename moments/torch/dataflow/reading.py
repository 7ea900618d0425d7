"""A module read from one pass: its Transformer, the role of every parameter, its sites."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...errors import DomainError, MomentsError, listed
from ...model.embedding import Embedding
from ...model.head import Head
from ...model.patches import PatchEmbedding
from ...model.positions import RelativeBias, Rotary
from ...model.transformer import Transformer
from ...model.weights import DEFAULTS, MATRICES, Biases, Weights
from ...simulation.collector import squared_norm
from ..inputs import TOKENS, examples, of_one_row
from ..roles import (
    ENCODER,
    BlockSum,
    HookPoint,
    ModuleBranch,
    ModuleRoles,
    Role,
    Sums,
    gathered_names,
    gathered_pattern,
)
from ..running import in_mode, kept_buffers, made_at_hand, padding_row, run
from .around import SINUSOIDAL, After, Before, after, before
from .graph import SOFTMAX, Graph, attention_spans, record
from .places import Roles, Sites, place
from .stream import ORDER, BranchUnit, StreamReader, SumChain
from .units import RotationUnit, close

SEQ_LEN = 128
"""Tokens assumed where a module does not limit them."""

ONE_BASE = 1e-2
"""Relative deviation of rotary speeds below which they are powers of one base, read to 3 digits."""

EXACT = 1e-4
"""A factor this close to 1 is 1."""


@dataclass(frozen=True)
class ModuleReading:
    """What the dataflow of a module tells.

    Attributes:
        model: the Transformer, with the mean squares of the module's entries as its variances; None
            where the module does what no Transformer says.
        roles: what every parameter is.
        sites: hook points, as `moments.torch.measure` takes them.
        reasons: why there is no model, a phrase each.
        doubts: what was assumed or left out, a phrase each.
        example: what the module was run on.
        odd: layer and block ("attention", "cross", "ffn") of the few that lack the norms which all
            others have; the model gives them one.
        over_queries: layers whose attention weights sum to one over queries, not over keys.
        unmasked: layers that see later tokens, where others do not; the model is causal.
        misplaced: layer and placement of the few whose norms sit elsewhere than the others'.
        remarks: what few layers do otherwise and is no fault by itself, a phrase each.
        shared: parameters that several layers use, each with these layers.
        unlayered: why its layers could not be distinguished, a phrase each.
        sums: what every block's residual sum is.
        ahead: whether any layer of a single stack sees later tokens; None where that is not known.
        unused: parameters that nothing reads.
        cut: submodules in which what depends on the batch is detached.
        logit_scale: what multiplies the logits, behind the final norm and behind their matrix; None
            where that could not be read.
    """

    model: Transformer | None
    roles: ModuleRoles
    sites: tuple[HookPoint, ...]
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    example: Any = None
    odd: tuple[tuple[int, str], ...] = ()
    over_queries: tuple[int, ...] = ()
    unmasked: tuple[int, ...] = ()
    misplaced: tuple[tuple[int, str], ...] = ()
    remarks: tuple[str, ...] = ()
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unlayered: tuple[str, ...] = ()
    sums: Sums = field(default_factory=dict)
    ahead: bool | None = None
    unused: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    logit_scale: float | None = None


@made_at_hand
def read(module: nn.Module, batch: Any = None, seq_len: int | None = None) -> ModuleReading:
    """Reads a module from one forward pass.

    What is on another device, or in half precision, is read from a copy on the processor in single
    precision: what a stretch computes is told by numbers, and half of them would not tell.

    Args:
        batch: what it reads, as in `moments.torch.measure`; a few tokens of it are used. None:
            random token ids, features or pictures, whichever it takes.
        seq_len: tokens per sequence; None: as many as the batch has, its position table has rows
            for, its config allows, or 128.

    Raises:
        MomentsError: the module cannot be run, or no residual stream is found in it.
    """
    near = _near_copy(module)
    graph, length, example = _recorded(near, batch, 2, TOKENS)
    far: list[int | None] = []
    if batch is not None and length is not None and length > TOKENS:
        far = _far(near, batch)
    try:
        result = _Reading(near, graph, seq_len or length, far).reading()
    except MomentsError:
        raise
    except Exception as error:  # the module's own operations, on numbers that it never saw
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if routed := graph.selecting_submodule():
            said = f"{routed} chooses by its numbers which tokens go where, as experts are chosen"
        raise MomentsError(
            f"what {type(module).__name__} computes depends on its numbers in a way that could not "
            f"be followed ({said})"
        ) from error
    return dataclasses.replace(result, example=_as_read(example, module))


@made_at_hand
def example(module: nn.Module) -> Any:
    """Random input that a module runs on; None where none is found."""
    for given in examples(module):
        # the module's own code, on input that may be none of its
        with contextlib.suppress(Exception), in_mode(module, False):
            run(module, given)
            return given
    return None


# --- where it is read -----------------------------------------------------------------------------

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _near_copy(module: nn.Module) -> nn.Module:
    """The module itself where its numbers are near and precise; else a copy where they are.

    Raises:
        MomentsError: it cannot be copied.
    """
    parts = list(module.modules())
    held = [*module.parameters(), *module.buffers()]
    held += [v for part in parts for v in vars(part).values() if isinstance(v, Tensor)]
    if all(_near_tensor(tensor) is tensor for tensor in held):
        return module
    memo: dict[int, Any] = {}
    for tensor in held:
        result = _near_tensor(tensor.detach())
        learns = tensor.requires_grad and result.is_floating_point()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(result, requires_grad=learns) if is_parameter else result
    try:
        near = copy.deepcopy(module, memo)
    except Exception as error:  # the module's own parts, which need not be made to be copied
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise MomentsError(
            f"{type(module).__name__} is read from a copy on the processor in single precision, "
            f"and cannot be copied ({said}): pass it as module.float().cpu()"
        ) from error
    for part in near.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.device):
                setattr(part, name, torch.device("cpu"))
            elif isinstance(value, torch.dtype) and value.is_floating_point and value not in WIDE:
                setattr(part, name, torch.float32)
    return near


def _near_tensor(tensor: Tensor) -> Tensor:
    """On the processor, and no real number in less than single precision."""
    half = tensor.is_floating_point() and tensor.dtype not in WIDE
    return tensor.to("cpu", torch.float32) if half else tensor.to("cpu")


def _near_batch(given: Any) -> Any:
    """What is passed to a module, where its copy is."""
    return tree_map(lambda t: _near_tensor(t) if isinstance(t, Tensor) else t, given)


def _as_read(given: Any, module: nn.Module) -> Any:
    """What was passed to a copy, in the module's own precision."""
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()} - set(WIDE)
    if not kinds:
        return given
    kind = next(iter(kinds))
    return tree_map(
        lambda t: t.to(kind) if isinstance(t, Tensor) and t.is_floating_point() else t, given
    )


# --- a pass ---------------------------------------------------------------------------------------


@made_at_hand
def recorded(
    module: nn.Module, batch: Any, rows: int = 2, tokens: int = TOKENS
) -> tuple[Graph, Any]:
    """One pass over the first tokens of the first rows of a batch, or over random input where that
    is None, and what was passed.

    Raises:
        MomentsError: the module cannot be run.
    """
    graph, _, given = _recorded(_near_copy(module), batch, rows, tokens)
    return graph, _as_read(given, module)


def _recorded(
    module: nn.Module, batch: Any, rows: int, tokens: int
) -> tuple[Graph, int | None, Any]:
    """The graph of a short pass, the tokens that the batch has, and what was passed."""
    errors = []
    if batch is None:
        random = list(examples(module))
        shown = [*map(of_one_row, random), *random] if rows == 1 else random
        cuts: list[tuple[Any, int | None]] = [(given, None) for given in shown]
    else:
        cuts = list(_cuts(batch, rows, tokens))
    for training, (given, length) in itertools.product((True, False), cuts):
        given = _near_batch(given)
        try:
            with kept_buffers(module), in_mode(module, training):
                graph = record(module, functools.partial(run, module, given), _tensors(given))
            return graph, length, given
        except Exception as error:  # the module's own code, on input that may be none of its
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
    what = "nothing in it says what it reads" if not errors else errors[0]
    mend = "on the batch that was passed"
    if batch is None:
        arguments = inspect.signature(module.forward).parameters.values()
        names = [a.name for a in arguments if a.default is a.empty and a.kind < a.VAR_POSITIONAL]
        given = "{" + ", ".join(f"{name!r}: ..." for name in names) + "}" if names[1:] else "..."
        mend = f"pass batch={given}"
    raise MomentsError(f"{type(module).__name__} could not be run ({what}): {mend}")


@made_at_hand
def random_part(module: nn.Module, batch: Any) -> str | None:
    """The submodule that draws random numbers in evaluation mode; None where none does."""
    near, given = _near_copy(module), _near_batch(batch)
    with kept_buffers(near), in_mode(near, False):
        path = record(near, functools.partial(run, near, given), _tensors(given)).random_submodule()
    return "the module itself" if path == "" else path


def _tensors(given: Any) -> dict[str, Tensor]:
    """What a module is passed, by number."""
    values = given.values() if isinstance(given, Mapping) else given
    values = [values] if isinstance(values, Tensor) else values
    return {str(i): v for i, v in enumerate(v for v in values if isinstance(v, Tensor))}


def _cuts(batch: Any, rows: int = 2, most: int = TOKENS) -> Iterator[tuple[Any, int | None]]:
    """The first tokens of the first sequences of a batch, else the whole sequences."""
    many = isinstance(batch, Mapping)
    entries = dict(batch) if many else {"": batch}
    tensors = {
        k: torch.as_tensor(v) if isinstance(v, Tensor | np.ndarray | list) else v
        for k, v in entries.items()
    }
    shapes = [t.shape for t in tensors.values() if isinstance(t, Tensor) and t.ndim > 1]
    length = next((s[1] for s in shapes if len(s) in (2, 3)), None)
    sequences = next((s[0] for s in shapes), 0)
    for tokens in (most, None):
        cut = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] == sequences:
                tensor = tensor[:rows]
                if tokens is not None and length is not None and length > tokens:
                    for axis in range(1, tensor.ndim):
                        if tensor.shape[axis] == length and tensor.ndim < 5:
                            tensor = tensor.narrow(axis, 0, tokens)
            cut[name] = tensor
        yield (cut if many else cut[""]), length


def _far(module: nn.Module, batch: Any) -> list[int | None]:
    """How far back every softmax reaches at the batch's own length, on its first sequence."""
    *_, (given, _) = _cuts(batch, rows=1)
    with in_mode(module, False):
        try:
            return attention_spans(functools.partial(run, module, _near_batch(given)))
        except Exception:  # what ran on a few tokens of two sequences need not on one whole one
            return []


# --- a declaration --------------------------------------------------------------------------------


@dataclass
class _Stack:
    """One chain of the stream, its layers, and what stands around it."""

    prefix: str
    chain: SumChain
    layers: list[list[BranchUnit]]
    placements: list[str]
    before: Before
    after: After


@dataclass
class _Reading:
    """Everything that is said of a module on the way to its `ModuleReading`."""

    module: nn.Module
    graph: Graph
    length: int | None
    far: list[int | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    odd: list[tuple[int, str]] = field(default_factory=list)
    unmasked: tuple[int, ...] = ()
    misplaced: tuple[tuple[int, str], ...] = ()
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unlayered: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def reading(self) -> ModuleReading:
        leaves = (v for v in self.graph.values if v.name is not None and v.params)
        unused = tuple(str(v.name) for v in leaves if not v.consumers and v.tensor.numel())
        stream = self.stream = StreamReader(self.graph)
        if not stream.chains:
            raise MomentsError(
                f"{type(self.module).__name__}: no attention on a residual stream was found in "
                f"what it computes{_quantised(self.module)}"
            )
        chains = stream.chains
        if len(chains) > 2:  # whatever stands in them: what is read is the longest
            chains = self._longest(chains)
        for chain in chains:
            matrices = len(self._matrices(chain))
            if matrices < len(chain.sums):
                named = gathered_names(sorted(set().union(*self._matrices(chain))))
                self.unlayered.append(f"layers that share their weights ({', '.join(named)})")
                chain.sums = chain.sums[:matrices]
            stream.fill(chain)
        if stream.reader.adapters:
            names = ", ".join(gathered_names(stream.reader.adapters))
            self.doubts.append(
                f"adapters that are zero, and add nothing yet, are left out ({names})"
            )
        self.doubts += stream.notes
        self.tensors = dict(self.module.named_parameters())
        stacks = self._stacks(chains)
        roles = Roles(self.graph)
        drops = {p for p, part in self.module.named_modules() if isinstance(part, nn.Dropout)}
        sites = Sites(self.graph, [chain.start for chain in chains], drops)
        points: list[HookPoint] = []
        branches: list[ModuleBranch] = []
        for stack in stacks:
            self._claim(roles, stack)
            placed = place(
                sites, stack.chain, stack.layers, stack.prefix, stack.placements, self.odd
            )
            points += placed.points + self._points_around(sites, stack)
            head = None if stack.after.doubts else stack.after.matrix
            logits = None if head is None else sites.output(head.output)
            branches += placed.blocks
            if not placed.streams:
                self.doubts.append(
                    "no submodule gives the stream of every layer: it cannot be measured by hooks"
                )
        self.reasons = [*self.unlayered, *_together(stream.doubts), *self.reasons]
        self.doubts += roles.doubts
        result = roles.roles()
        known = {role.parameter for role in result}
        main = stacks[-1]
        scales = tuple(r for r in result if r.name.endswith(("skip_scale", "branch_scale")))
        module_roles = ModuleRoles(
            layers=len(main.layers),
            roles=tuple(r for r in result if r not in scales),
            unidentified=tuple(n for n, p in self.tensors.items() if n not in known and p.numel()),
            blocks=tuple(branches),
            scales=scales,
            multipliers=tuple(
                (stack.prefix, number, unit.name, unit.attention.multiplier)
                for stack in stacks
                for number, units in enumerate(stack.layers, start=1)
                for unit in units
                if unit.attention and unit.attention.multiplier
            ),
            logits=logits.path if logits is not None and logits.side == "output" else "",
        )
        self.squares = _squares(self.tensors, result, self.graph.parameter_factors())
        self._share(roles)
        model = self._model(stacks)

        def layers_of(what: Callable[[BranchUnit], bool]) -> tuple[int, ...]:
            rows = enumerate(main.layers, start=1)
            return tuple(
                n for n, units in rows if any(u.name == "attention" and what(u) for u in units)
            )

        if turned := layers_of(lambda u: u.attention is not None and u.attention.rotates_values):
            self.remarks.append(
                f"rotary positions turn the values of layers {listed(turned)} too, not queries and "
                "keys alone: what a token reads then depends on where it stands"
            )
        looking = [u.attention for u in main.chain.blocks if u.attention is not None]
        alone = len(stacks) == 1 and not any(u.name == "cross" for u in main.chain.blocks)
        return ModuleReading(
            model,
            module_roles,
            tuple(points),
            tuple(dict.fromkeys(self.reasons)),
            tuple(dict.fromkeys(self.doubts)),
            odd=tuple(self.odd),
            over_queries=layers_of(lambda u: u.core is not None and not u.core.over_keys),
            unmasked=self.unmasked,
            misplaced=self.misplaced,
            remarks=tuple(self.remarks),
            shared=self.shared,
            unlayered=tuple(dict.fromkeys(self.unlayered)),
            ahead=not all(a.causal for a in looking) if alone and looking else None,
            unused=unused,
            cut=self.graph.detaching_submodules(),
            logit_scale=main.after.scale if main.after.scaled else None,
            sums={
                (stack.prefix, n, unit.name): self._sum(stack.placements[n - 1], n, unit)
                for stack in stacks
                for n, units in enumerate(stack.layers, start=1)
                for unit in units
                if unit.summed
            },
        )

    def _sum(self, placement: str, layer: int, unit: BranchUnit) -> BlockSum:
        norm = unit.before or unit.after
        factor = unit.after_factor if unit.before is None else unit.factor
        place = "none" if (layer, unit.name) in self.odd else placement
        gain = None if norm is None else norm.gain * factor
        return BlockSum(place, unit.skip, unit.branch, gain, unit.whole)

    def _share(self, roles: Roles) -> None:
        """Matrices that several layers use: each has their variance, and few may be."""
        rows = [row for row in roles.again if row[2] in MATRICES]
        for _, layer, _, parameter in rows:
            first = self.shared.get(parameter) or (roles.claims[parameter][0].layer,)
            self.shared[parameter] = (*first, layer)
        total = len({key for key in self.squares if key[2] in MATRICES}) + len(rows)
        if not rows or 4 * len(rows) > total:
            return
        for stack, layer, name, parameter in rows:
            known = next(
                claim.layer
                for claim in roles.claims[parameter]
                if (claim.stack, claim.name) == (stack, name)
            )
            self.squares.setdefault((stack, layer, name), self.squares[stack, known, name])

    # --- stacks ------------------------------------------------------------------------------

    def _stacks(self, chains: list[SumChain]) -> list[_Stack]:
        """The encoder's stack, if there are two, and the main one."""
        chains = [c for c in chains if len(c.blocks) >= 1]
        crossing = [c for c in chains if any(b.name == "cross" for b in c.blocks)]
        if len(chains) == 2 and len(crossing) != 1:
            chains = self._longest(chains)
        if crossing and len(chains) == 2:
            chains = [c for c in chains if c is not crossing[0]] + crossing
        result = []
        for chain in chains:
            prefix = ENCODER if len(chains) == 2 and chain is chains[0] else ""
            layers = self._layers(chain)
            read = before(self.stream, chain)
            placements, behind = self._placements(layers, read), after(self.stream, chain, chains)
            result.append(_Stack(prefix, chain, layers, placements, read, behind))
            self.doubts += behind.doubts
        return result

    def _matrices(self, chain: SumChain) -> list[set[str]]:
        """Parameters of every sum's matrices, up to the first sum that only uses earlier ones.

        What follows is the same again, however often the module goes round.
        """
        result: list[set[str]] = []
        between = self.stream.reader.linears_between
        for one in chain.sums:
            names = {n for tip in one.tips for m in between(one.stream, tip) for n in m.params}
            if names and names <= set().union(*result):
                break
            result.append(names)
        return result

    def _longest(self, chains: list[SumChain]) -> list[SumChain]:
        """Of streams that no Transformer has the one of most sums; the rest is a reason.

        A stream of which one sum is all that another one does is not looked into.
        """
        sizes = ", ".join(str(len(c.sums)) for c in chains)
        words = f"what its blocks add makes {len(chains)} streams (of {sizes} sums), where a "
        words += "decoder has one, and an encoder with a decoder two"
        self.unlayered.append(words)
        if {node.name for node in self.graph.nodes} & {"topk", "sort"}:
            self.unlayered.append("entries that are chosen by size, as a mixture's router does")
        rows = [self._matrices(chain) for chain in chains]
        wholes = [set().union(*row) for row in rows]
        plain = [
            not any(other and other <= names for names in row for other in wholes if len(row) > 1)
            for row in rows
        ]
        scores = [len(row) if alone else 0 for row, alone in zip(rows, plain, strict=True)]
        return [chains[scores.index(max(scores))]]

    def _layers(self, chain: SumChain) -> list[list[BranchUnit]]:
        """Blocks by layer: attention, perhaps cross-attention, a feed-forward block."""
        layers: list[list[BranchUnit]] = []
        for block in chain.blocks:
            if not layers or ORDER.index(block.name) <= ORDER.index(layers[-1][-1].name):
                layers.append([])
            layers[-1].append(block)
        kinds = {tuple(b.name for b in units) for units in layers}
        allowed = {("attention", "ffn"), ("attention", "cross", "ffn")}
        if len(kinds) > 1 or not kinds <= allowed:
            words = "; ".join(", ".join(k) for k in sorted(kinds))
            self.unlayered.append(
                f"layers that are not one attention and one feed-forward block each ({words})"
            )
        return layers

    def _placements(self, layers: list[list[BranchUnit]], read: Before) -> list[str]:
        """Where the norms of every layer stand; few blocks without any are named, not believed."""
        bare = [
            (number, unit)
            for number, units in enumerate(layers, start=1)
            for unit in units
            if not (unit.before or unit.behind or unit.after or self._begins_normed(unit, read))
        ]
        count = sum(len(units) for units in layers)
        if 0 < len(bare) <= count / 4:
            self.odd += [(number, unit.name) for number, unit in bare]
            odd = [id(unit) for _, unit in bare]
            layers = [[u for u in units if id(u) not in odd] for units in layers]
        result = [self._placement(units, read) if units else "" for units in layers]
        most = max((name for name in result if name), key=result.count, default="none")
        return [name or most for name in result]

    def _placement(self, units: list[BranchUnit], read: Before) -> str:
        result = set()
        for unit in units:
            if self._begins_normed(unit, read) and any(u.before is not None for u in units):
                # What is normalised already does not change by it.
                self.doubts.append("the first block reads the embedding's norm, not one of its own")
                continue
            have = (unit.before is not None, unit.behind is not None, unit.after is not None)
            name = {
                (True, False, False): "pre",
                (True, True, False): "sandwich",
                (False, True, False): "output",
                (False, False, True): "post",
                (False, False, False): "none",
            }.get(have)
            if name is None:
                words = ["before its matrices", "behind its output", "behind the sum"]
                where = " and ".join(w for w, h in zip(words, have, strict=True) if h)
                self.reasons.append(f"norms {where} of a block, and nowhere else")
                name = "none"
            result.add(name)
        if len(result) > 1:
            self.reasons.append(
                f"norms that sit differently within a layer ({', '.join(sorted(result))})"
            )
        return min(result)

    def _begins_normed(self, unit: BranchUnit, read: Before) -> bool:
        """Whether a block without norms reads what the norm of the embedding gives."""
        if read.norm is None or unit.before or unit.behind or unit.after:
            return False
        return self.stream.reader.fit(read.norm.end, unit.sum.stream) == 1.0

    # --- roles -------------------------------------------------------------------------------

    def _claim(self, roles: Roles, stack: _Stack) -> None:
        s, last = stack.prefix, len(stack.layers) + 1
        for number, units in enumerate(stack.layers, start=1):
            for unit in units:
                cross = "cross_" if unit.name == "cross" else ""
                if unit.attention is not None:
                    for role, rows in unit.attention.projections.items():
                        for linear, columns in rows:
                            roles.linear(s, number, cross + role, linear, columns)
                    for linear in unit.attention.output[-1:]:
                        roles.linear(s, number, f"{cross}output", linear)
                    roles.norm(s, number, f"{cross}query.norm", unit.attention.qk_norm)
                    roles.norm(s, number, f"{cross}key.norm", unit.attention.key_norm)
                    if unit.attention.sinks is not None:
                        roles.whole(s, number, "attention_sink", unit.attention.sinks)
                    if unit.attention.relative is not None and number == 1:
                        roles.whole(s, 0, "relative_bias", unit.attention.relative)
                if unit.feed is not None:
                    for role, rows in unit.feed.into.items():
                        for linear, columns in rows:
                            roles.linear(s, number, role, linear, columns)
                    roles.linear(s, number, "ffn_out", unit.feed.output)
                for norm in (unit.before, unit.after):
                    roles.norm(s, number, f"{unit.name}.norm", norm)
                roles.norm(s, number, f"{unit.name}.post_norm", unit.behind)
                for name in unit.scale_params:
                    roles.whole(s, number, f"{unit.name}.branch_scale", name)
        for role, name in stack.before.tables.items():
            if role != "token" or not s or name not in roles.claims:
                roles.whole("" if role == "token" else s, 0, role, name)
        result = stack.after
        for role, one in (("patch", stack.before.patch), ("factor", stack.before.factor)):
            if one is not None:
                roles.linear(s, 0, role, one)
        roles.norm(s, 0, "embedding.norm", stack.before.norm)
        roles.norm(s, last, "final.norm", stack.chain.final)
        for role, one in (("head.transform", result.transform), ("head.factor", result.factor)):
            if one is not None:
                roles.linear(s, last, role, one)
        roles.norm(s, last, "head.norm", result.norm)
        if result.matrix is not None:
            tied = result.matrix.params & set(stack.before.tables.values())
            if not tied:
                roles.linear(s, last, "head", result.matrix)
            else:
                for bias in result.matrix.biases:
                    for name in self.graph.values[bias].params:
                        roles.whole(s, last, "head.bias", name)

    def _points_around(self, sites: Sites, stack: _Stack) -> list[HookPoint]:
        last = len(stack.layers) + 1
        rows: list[tuple[int, str, Any]] = []
        result = stack.before
        if result.total != stack.chain.start:
            rows.append((0, "embedding.sum", sites.output(result.total)))
        if result.norm is not None:
            rows.append((0, "embedding.norm", sites.output(result.norm.end)))
        if not result.given:
            widened = result.factor is not None and result.norm is not None
            end = result.factor.input if result.factor and widened else stack.chain.start
            rows.append((0, "embedding", sites.output(end)))
            if widened:
                rows.append((0, "embedding.factor", sites.output(stack.chain.start)))
        if stack.chain.final is not None:
            rows.append((last, "final.norm", sites.output(stack.chain.final.end)))
        if stack.after.norm is not None:
            rows.append((last, "head.transform", sites.output(stack.after.norm.start)))
            rows.append((last, "head.norm", sites.output(stack.after.norm.end)))
        if stack.after.matrix is not None and stack.after.pool not in ("first", "mean"):
            rows.append((last, "logits", sites.output(stack.after.matrix.output)))
        return [
            HookPoint(layer, stack.prefix + site, point.path, point.side)
            for layer, site, point in rows
            if point in sites.tokens
        ]

    # --- the model ---------------------------------------------------------------------------

    def _model(self, stacks: list[_Stack]) -> Transformer | None:
        models: list[Transformer] = []
        for stack in stacks:
            try:
                fields = self._fields(stack)
                if self.reasons:
                    return None
                if models:
                    fields["encoder"] = models[-1]
                models.append(Transformer(**fields))
            except DomainError as error:
                self.reasons.append(str(error))
                return None
        return models[-1]

    def _one(self, name: str, values: list[Any]) -> Any:
        """What all layers have alike."""
        rest = [v for v in values if v is not None]
        different = list(dict.fromkeys(map(repr, values)))
        if len(different) > 1:
            self.reasons.append(f"{name} that differs between layers ({', '.join(different)})")
        return rest[0] if rest else None

    def _most(self, name: str, values: list[float]) -> float:
        """A probability of dropping that most layers have."""
        most = max(values, key=values.count)
        self.remarks += [
            f"{name} of layer {n} has a probability of {v:g}, unlike that of the other layers"
            for n, v in enumerate(values, start=1)
            if v != most
        ]
        if len(set(values)) > 1:
            self.doubts.append(f"{name} that differs between layers: taken for {most:g} in all")
        return most

    def _fields(self, stack: _Stack) -> dict[str, Any]:
        units = [unit for layer in stack.layers for unit in layer]
        attentions = [u.attention for u in units if u.name == "attention" and u.attention]
        feeds = [u.feed for u in units if u.feed is not None]
        norms = [n for u in units for n in (u.before, u.after, u.behind) if n is not None]
        if not attentions or not feeds:
            self.reasons.append("no attention or no feed-forward block that could be read")
            return {}
        for u in units:
            if u.attention is not None:
                self.reasons += u.attention.doubts
        causal = any(a.causal for a in attentions)
        if causal:
            self.unmasked = tuple(n for n, a in enumerate(attentions, start=1) if not a.causal)
        one = self._one
        width = self.graph.tensor(stack.chain.start).shape[-1]
        outer = [n for n in (stack.chain.final, stack.before.norm) if n is not None]
        kinds = list(dict.fromkeys(n.kind for n in [*norms, *outer]))
        if len(kinds) > 1:
            self.reasons.append(f"norms of several kinds ({', '.join(kinds)})")
        every = norms or outer
        epsilons = [n.epsilon for n in every]
        biasable = any(n.gains and n.kind == "layernorm" for n in every)
        fields: dict[str, Any] = {
            "layers": len(stack.layers),
            "d_model": width,
            "heads": one("a number of heads", [a.heads for a in attentions]),
            "seq_len": self._length(stack),
            "d_ff": one("a hidden width", [f.d_ff for f in feeds]),
            "normalization": kinds[0] if kinds else "layernorm",
            "activation": one("an activation", [f.activation for f in feeds]),
            "gated": one("a gate", [f.gated for f in feeds]),
            "dropout": self._most(
                "dropout behind attention", [u.dropout for u in units if u.name == "attention"]
            ),
            "attention_dropout": self._most("attention dropout", [a.dropout for a in attentions]),
            "ffn_dropout": self._most(
                "dropout behind the feed-forward block",
                [u.dropout for u in units if u.name == "ffn"],
            ),
            "activation_dropout": self._most("activation dropout", [f.dropout for f in feeds]),
            "causal": causal,
            "d_head": one("a head's width", [a.d_head for a in attentions]),
            "kv_heads": one("a number of key heads", [a.kv_heads for a in attentions]),
            "norm_epsilon": max(set(epsilons), key=epsilons.count) if epsilons else 0.0,
            "norm_affine": any(n.gains for n in every),
            "norm_bias": any(n.biases for n in every) or not biasable,
            "parallel": any(u.parallel for u in units),
            "alibi": one("ALiBi", [a.alibi for a in attentions]),
            "qk_norm": self._qk_norm(attentions),
            "logit_softcap": one("a cap of logits", [a.softcap for a in attentions]),
        }
        before = [{u.before and u.before.end for u in layer} for layer in stack.layers]
        apart = fields["parallel"] and any(len(ends) > 1 for ends in before)
        fields["parallel_norms"] = 2 if apart else 1
        fields |= self._norm_fields(stack) | self._scales(stack)
        fields |= self._positions(attentions, stack)
        sinks = [None if a.sinks is None else self._table(a.sinks) for a in attentions]
        fields["attention_sink"] = one_or_all(sinks)
        temperatures = [near(a.temperature) for a in attentions]
        fields["temperature"] = one_or_all(temperatures)
        fields["weights"], fields["biases"] = self._weights(stack)
        windows = self._windows(stack, [a.window for a in attentions])
        fields["window"] = windows[0] if len(set(windows)) == 1 else windows
        fields["embedding"] = self._embedding(stack)
        fields["head"] = self._head(stack, fields)
        return fields

    def _windows(self, stack: _Stack, near: list[int | None]) -> list[int | None]:
        """Reaches of attention, from the longer pass where there was one."""
        softmaxes = [node.index for node in self.graph.nodes if node.name in SOFTMAX]
        cores = [u.core for u in stack.chain.blocks if u.name == "attention" and u.core]
        if len(self.far) != len(softmaxes) or len(cores) != len(near):
            return near
        seen = [self.far[softmaxes.index(core.softmax)] for core in cores]
        return [a if a is not None else b for a, b in zip(near, seen, strict=True)]

    def _length(self, stack: _Stack) -> int:
        tokens = self.graph.tensor(stack.chain.start).shape
        if stack.before.patch is not None:
            return int(tokens[1])
        if self.length is not None:
            return self.length
        position = stack.before.tables.get("position")
        if position is not None:
            rows = self.tensors[position]
            return int(rows.numel() // rows.shape[-1]) - stack.before.offset
        config = getattr(self.module, "config", None)
        for name in ("max_position_embeddings", "n_positions", "seq_length", "block_size"):
            result = getattr(config, name, None)
            if isinstance(result, int) and result > 0:
                return result
        return SEQ_LEN

    def _qk_norm(self, attentions: list[Any]) -> str | None:
        kinds = [None if a.qk_norm is None else a.qk_norm.kind for a in attentions]
        keys = [None if a.key_norm is None else a.key_norm.kind for a in attentions]
        if kinds != keys:
            self.reasons.append("queries and keys that are not normalised alike")
        kinds = [
            f"{kind}-all" if kind and a.qk_norm and a.qk_norm.groups == 0 and a.heads > 1 else kind
            for kind, a in zip(kinds, attentions, strict=True)
        ]
        result: str | None = self._one("a norm of queries", kinds)
        return result

    def _norm_fields(self, stack: _Stack) -> dict[str, Any]:
        kinds = stack.placements
        n = len(kinds)
        fields: dict[str, Any] = {"norm": kinds[0]}
        if len(set(kinds)) > 1:
            post = kinds.count("post")
            most = max(kinds, key=kinds.count)
            few = [(number, kind) for number, kind in enumerate(kinds, start=1) if kind != most]
            if kinds == ["post"] * post + ["pre"] * (n - post):
                fields |= {"norm": "mix", "post_layers": post}
            elif len(few) <= max(1, n // 4) < n / 2:
                self.misplaced = tuple(few)
                fields["norm"] = most
            else:
                words = ", ".join(dict.fromkeys(kinds))
                self.reasons.append(f"norms that sit differently in different layers ({words})")
        gains, factors = np.ones((2, n, 2))
        for number, units in enumerate(stack.layers):
            for unit in units:
                norm = unit.before or unit.after or unit.behind
                column = int(unit.name == "ffn")
                if norm is not None:
                    factor = unit.after_factor if unit.before is None else unit.factor
                    gains[number, column], factors[number, column] = norm.gain, factor
                second = None if unit.behind is norm else unit.behind
                if second is not None and abs(second.gain - 1) > 1e-3:
                    self.doubts.append("gains of second norms are taken as 1")
        return fields | gain_fields(gains, factors)

    def _scales(self, stack: _Stack) -> dict[str, Any]:
        skip, branch = np.ones((2, len(stack.layers), 2))
        for number, units in enumerate(stack.layers):
            for unit in units:
                column = int(unit.name == "ffn")
                skip[number, column], branch[number, column] = unit.skip or 1.0, unit.branch
                if unit.skip == 0:
                    self.doubts.append(
                        f"nothing bypasses the {unit.name} block of layer {number + 1}: the "
                        "model has the stream there"
                    )
                if stack.placements[number] == "none" and unit.before is None:
                    branch[number, column] *= unit.factor
        return {"skip_scale": fewest(skip), "branch_scale": fewest(branch)}

    def _positions(self, attentions: list[Any], stack: _Stack) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        turns = [a.rotary for a in attentions]
        if any(turns):
            fields["rotary"] = [None if t is None else _rotary(t) for t in turns]
        tables = [a.relative for a in attentions]
        if any(tables):
            if not all(tables):
                self.reasons.append("relative biases of logits in some layers only")
            else:
                if len(set(tables)) > 1:
                    self.doubts.append("relative biases of every layer's own: taken for shared")
                squares = [self.tensors[t].detach().double().square().mean() for t in tables]
                far = self._distance(attentions[0].buckets)
                square = float(sum(squares)) / len(squares)
                fields["relative_bias"] = RelativeBias(square, attentions[0].buckets, far)
        return fields

    def _distance(self, buckets: int) -> int:
        config = getattr(self.module, "config", None)
        result = getattr(config, "relative_attention_max_distance", None)
        if isinstance(result, int):
            return result
        self.doubts.append(
            "where relative positions share their last bucket is taken as 128 tokens"
        )
        return max(128, buckets + 1)

    def _weights(self, stack: _Stack) -> tuple[Weights, Biases | None]:
        squares = {(n, k): v for (of, n, k), v in self.squares.items() if of == stack.prefix}
        given = in_every_layer(MATRICES, len(stack.layers), squares)
        missing = [k for k in MATRICES if k not in given and k not in DEFAULTS]
        if missing:
            if any((1, k) in squares for k in missing):
                names = ", ".join(gathered_names(list(self.shared)))
                self.reasons.append(f"layers that share their weights{names and f' ({names})'}")
            else:
                self.reasons.append(f"no {', no '.join(missing)} matrix that every layer has")
            return Weights.xavier(8, 1), None
        return Weights(**given), biases_of(len(stack.layers), squares)

    def _table(self, name: str | None) -> float:
        """Mean square of a table without its padding row, which is never drawn."""
        if name is None:
            return 0.0
        rows = self.tensors[name].detach()
        padding = padding_row(self.module, self.tensors[name])
        rows = rows.reshape(-1, rows.shape[-1])
        skipped = padding is not None and not bool(rows[padding].any())
        return squared_norm(rows) / float(rows.shape[-1] * (len(rows) - skipped))

    def _embedding(self, stack: _Stack) -> Any:
        result = stack.before
        if result.given:
            return None
        self.doubts += result.doubts
        tables = result.tables
        common: dict[str, Any] = {
            "norm": result.norm is not None,
            "dropout": result.dropout,
            "norm_epsilon": 0.0 if result.norm is None else result.norm.epsilon,
        }
        if result.patch is not None:
            if result.doubts:
                self.doubts.append("what enters layer 1 is not declared")
                return None
            try:
                return PatchEmbedding(
                    image_size=result.shape[-1],
                    patch_size=result.patch_size,
                    patch_variance=self.squares.get((stack.prefix, 0, "patch")) or 1.0,
                    position_variance=self._table(tables.get("position")),
                    channels=result.shape[1],
                    class_token="class" in tables,
                    class_variance=self._table(tables.get("class")),
                    bias_variance=self.squares.get((stack.prefix, 0, "patch.bias")),
                    **common,
                )
            except DomainError as error:
                self.doubts.append(f"what enters layer 1 is not declared: {error}")
                return None
        if "token" not in tables or result.doubts or "class" in tables:
            self.doubts.append("what enters layer 1 is not declared")
            return None
        added = {
            role: self._table(tables.get(role)) * result.factors.get(role, 1.0) ** 2
            for role in ("position", "segment")
        }
        sines = result.sinusoidal
        if "position" in tables and abs(added["position"] / SINUSOIDAL - 1) < 0.01:
            sines = sines or _of_sines(self.tensors[tables["position"]])
        self.doubts += [
            f"the {role} table is multiplied by {factor:.4g} before it is added: its declared "
            "variance is that of what is added"
            for role, factor in result.factors.items()
        ]
        padding = padding_row(self.module, self.tensors[tables["token"]])
        factor = result.factor
        return Embedding(
            vocab_size=len(self.tensors[tables["token"]]),
            token_variance=self._table(tables["token"]),
            position_variance=0.0 if sines else added["position"],
            segment_variance=added["segment"],
            scale=near(result.scale),
            positions="sinusoidal" if sines else "learned",
            padding_id=padding,
            factor_dim=None if factor is None else self.graph.tensor(factor.input).shape[-1],
            factor_variance=self.squares.get((stack.prefix, 0, "factor")),
            factor_bias=factor is not None and bool(factor.biases),
            **common,
        )

    def _head(self, stack: _Stack, fields: Mapping[str, Any]) -> Head | None:
        result, final = stack.after, stack.chain.final
        gain = 1.0 if final is None else near(final.gain)
        if stack.prefix:
            return Head(norm=final is not None, norm_gain=gain, loss=None, dropout=result.dropout)
        if result.matrix is None or result.doubts:
            return None
        read = self.graph.tensor(result.matrix.input).shape[-1]
        narrow = None if read == fields["d_model"] else read
        if narrow not in (None, getattr(fields["embedding"], "factor_dim", None)):
            self.doubts.append(f"the head reads {read} features, not d_model: it is not declared")
            return None
        if result.pool == "other" and not fields["causal"]:
            self.doubts.append("how a sequence's tokens are pooled is not read")
            return None
        table = stack.before.tables.get("token")
        tied = table in result.matrix.params
        square = self.squares.get(("", len(stack.layers) + 1, "head"))
        if tied and fields["embedding"] is None:
            self.doubts.append("the head is the token table: taken for a matrix of its own")
            tied, square = False, self._table(table)
        classes = result.pool in ("first", "mean")
        last = len(stack.layers) + 1
        loss: str | None = "classification" if classes else "masked"
        if fields["causal"] and not classes:
            loss = "causal"
        token_rows = 0 if table is None else len(self.tensors[table])
        if not classes and token_rows != result.labels and not tied:
            loss = "causal" if fields["causal"] else None
            self.doubts.append("labels that are no tokens: no loss is declared")
        variance = {
            name: value for (of, n, name), value in self.squares.items() if (of, n) == ("", last)
        }
        rows = token_rows if fields["embedding"] is not None else 0
        return Head(
            vocab_size=None if tied or classes or rows == result.labels else result.labels,
            tied=tied,
            weight_variance=None if tied else square,
            norm=final is not None,
            norm_gain=gain,
            dropout=result.dropout,
            output_scale=near(result.scale),
            bias=bool(result.matrix.biases),
            logit_softcap=result.softcap,
            loss=loss,
            classes=result.labels if classes else None,
            pool=result.pool if result.pool in ("first", "mean") else "first",
            factor_dim=narrow,
            factor_variance=variance.get("head.factor"),
            transform=None if result.transform is None else result.activation,
            transform_variance=variance.get("head.transform"),
            transform_bias_variance=variance.get("head.transform.bias"),
            transform_norm=result.transform is None or result.norm is not None,
        )


def _together(phrases: Iterable[str]) -> list[str]:
    """Phrases that differ in numbers of parameters' names alone as one, with stars for these."""
    result: dict[str, list[str]] = {}
    for phrase in phrases:
        result.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", phrase), []).append(phrase)
    rows = []
    for pattern, group in result.items():
        before, bracket, names = pattern.partition("(")
        listed = ", ".join(dict.fromkeys(names.removesuffix(")").split(", ")))
        rows.append(group[0] if len(group) == 1 else f"{before}{bracket}{listed}{bracket and ')'}")
    return rows


def _quantised(module: nn.Module) -> str:
    """A remark on parts that hold matrices as integers, whose products are of no parameter."""
    result = []
    for path, part in module.named_modules():
        held = [t for t in part.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
        matrices = [t for t in held if t.ndim > 1]
        packed = hasattr(part, "_packed_params")  # torch's own quantised layers
        counts = any(not t.is_floating_point() and t.dtype != torch.bool for t in matrices)
        if not list(part.children()) and (packed or (counts and len(matrices) < 3)):
            result.append(path.removesuffix("._packed_params"))
    if not result:
        return ""
    names = ", ".join(dict.fromkeys(map(gathered_pattern, result)))
    return f"; {names} hold matrices as integers: pass the module before it is quantised"


def _of_sines(table: Tensor) -> bool:
    """Whether rows are sines and cosines of the original's frequencies, in whatever order."""
    rows = table.detach().double().reshape(-1, table.shape[-1])
    rows = rows[(rows != 0).any(1)]
    width = rows.shape[1]
    speeds = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    far = torch.arange(min(len(rows), 8), dtype=torch.float64)
    wanted = torch.cos(far[:, None] * speeds).sum(1)
    return close(rows[: len(far)] @ rows[0], wanted, 0.05)


def _squares(
    tensors: Mapping[str, Tensor], roles: list[Role], multiples: Mapping[str, float]
) -> dict[Any, float]:
    """Mean squares by stack, layer and role, of all blocks that play it; of a hidden matrix with
    what it is multiplied by."""
    sums: dict[Any, tuple[float, int]] = {}
    for role in roles:
        if role.parameter in tensors and tensors[role.parameter].numel():
            block = role.part.of(tensors[role.parameter].detach())
            key = role.stack, role.layer, role.name
            total, count = sums.get(key, (0.0, 0))
            factor = multiples.get(role.parameter, 1.0) if role.name in MATRICES else 1.0
            sums[key] = total + factor**2 * squared_norm(block), count + block.numel()
    return {key: total / count for key, (total, count) in sums.items()}


def near(value: float) -> float:
    """1 where a number is 1 to rounding, else its leading digits."""
    return 1.0 if abs(value - 1) < EXACT else float(f"{value:.6g}")


def _rotary(turn: RotationUnit) -> Rotary:
    """Powers of a base where the speeds are that, else the speeds themselves."""
    if turn.deviation < ONE_BASE:
        return Rotary(turn.fraction, turn.base)
    return Rotary(turn.fraction, speeds=tuple(float(f"{s:.6g}") for s in turn.speeds))


def one_or_all(values: list[Any]) -> Any:
    """One number where all layers have the same."""
    return values[0] if len(set(values)) == 1 else values


def in_every_layer(
    names: Iterable[str], layers: int, squares: Mapping[tuple[int, str], float]
) -> dict[str, Any]:
    """Of roles that every layer has: one number, or one per layer.

    Args:
        squares: by layer and role.
    """
    rows = {name: [squares.get((n, name)) for n in range(1, layers + 1)] for name in names}
    return {name: one_or_all(row) for name, row in rows.items() if None not in row}


def biases_of(layers: int, squares: Mapping[tuple[int, str], float]) -> Biases | None:
    """The biases of which every layer has one; None where there are none."""
    names = [f"{name}.bias" for name in Biases().to_dict()]
    result = in_every_layer(names, layers, squares)
    drawn = {name.removesuffix(".bias"): value for name, value in result.items()}
    return Biases.of().replace(**drawn) if drawn else None


def gain_fields(gains: np.ndarray, factors: np.ndarray) -> dict[str, Any]:
    """How a model declares norms' gains, and what multiplies the norms beside these: as LayerNorm
    Scaling where it is that, else in the gain.

    Args:
        gains, factors: by layer and block.
    """
    layers = len(gains)
    wanted = np.arange(1, layers + 1) ** -0.5
    near = [bool(np.all(np.abs(column / wanted - 1) < 20 * EXACT)) for column in factors.T]
    plain = [bool(np.all(np.abs(column - 1) < 20 * EXACT)) for column in factors.T]
    scaling: bool | str = layers > 1 and all(near)
    if layers > 1 and not scaling:
        for one, (other, name) in enumerate(((1, "attention-only"), (0, "ffn-only"))):
            scaling = name if near[one] and plain[other] else scaling
    if not scaling:
        gains = gains * np.where(np.abs(factors - 1) < 20 * EXACT, 1.0, factors)
    return {"layernorm_scaling": scaling, "norm_gain": fewest(gains)}


def fewest(values: np.ndarray) -> Any:
    """One number where all agree, one per layer where both blocks do, else pairs."""
    values = np.where(np.abs(values - 1) < EXACT, 1.0, values)
    if np.ptp(values) <= EXACT * np.abs(values).max():
        return float(values.flat[0])
    if np.all(np.abs(values[:, 0] - values[:, 1]) < EXACT * np.abs(values[:, 0])):
        return [float(v) for v in values[:, 0]]
    return [tuple(float(v) for v in row) for row in values]


__all__ = ["ModuleReading", "read"]
