"""Read a module from one pass: its Transformer, the role of every parameter, its sites."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
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
from ..running import grouped, in_mode, made_on_cpu, padding_row, restored_buffers, run
from .around import SINUSOIDAL, read_embedding, read_head
from .graph import SOFTMAX, Graph, attention_spans, record
from .places import Roles, Sites, place
from .stream import ORDER, StreamReader
from .units import AttentionUnit, BranchUnit, EmbeddingUnit, RotationUnit, Stack, close

SEQ_LEN = 128
"""Tokens assumed of a module without a limit."""

ONE_BASE = 1e-2
"""Relative deviation of rotary speeds from powers of one base, of 3 digits, that is rounding."""

EXACT = 1e-4
"""A factor this close to 1 is 1."""


@dataclass(frozen=True)
class ModuleReading:
    """What the operations of one pass say of a module.

    Attributes:
        model: the Transformer, with the mean squares of the module's entries as its variances; None
            if no Transformer describes the module.
        roles: the role of every parameter.
        sites: hook points, as `moments.torch.measure` takes them.
        reasons: why there is no model.
        doubts: what was assumed or left out.
        example: the input of the pass.
        unnormed: layer and block ("attention", "cross", "ffn") of the few that lack the norms which
            all others have; the model gives them one.
        over_queries: layers whose attention weights sum to one over queries, not over keys.
        unmasked: layers that attend to later tokens although others do not; the model is causal.
        misplaced_norms: layer and placement of the few whose norms are elsewhere than the others'.
        remarks: differences of few layers that are no fault by themselves.
        shared: parameters that several layers use -> these layers.
        unlayered: why the layers could not be distinguished.
        sums: the residual sum of every block.
        bidirectional: whether any layer of a single stack attends to later tokens; None: unknown.
        unused: parameters that nothing reads.
        detached: submodules that detach what depends on the batch.
        logit_scale: factor of the logits, from the final norm on; None: unknown.
    """

    model: Transformer | None
    roles: ModuleRoles
    sites: tuple[HookPoint, ...]
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    example: Any = None
    unnormed: tuple[tuple[int, str], ...] = ()
    over_queries: tuple[int, ...] = ()
    unmasked: tuple[int, ...] = ()
    misplaced_norms: tuple[tuple[int, str], ...] = ()
    remarks: tuple[str, ...] = ()
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unlayered: tuple[str, ...] = ()
    sums: Sums = field(default_factory=dict)
    bidirectional: bool | None = None
    unused: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    logit_scale: float | None = None


@made_on_cpu
def read(module: nn.Module, batch: Any = None, seq_len: int | None = None) -> ModuleReading:
    """Read a module from one forward pass.

    A module on another device or in half precision is read from a copy on the CPU in single
    precision, because the reading compares numbers.

    Args:
        batch: its input, as in `moments.torch.measure`; a few tokens of it are used. None: random
            token ids, features or pictures.
        seq_len: tokens per sequence; None: as many as the batch has, its position table has rows
            for, its config allows, or 128.

    Raises:
        MomentsError: the module cannot be run, or it has no residual stream.
    """
    copied = _on_cpu(module)
    graph, length, example = _recorded(copied, batch, 2, TOKENS)
    spans: list[int | None] = []
    if batch is not None and length is not None and length > TOKENS:
        spans = _long_spans(copied, batch)
    try:
        result = _Reader(copied, graph, seq_len or length, spans).reading()
    except MomentsError:
        raise
    except Exception as error:  # the module's own operations, on unusual numbers
        said = _first_line(error)
        if path := graph.selecting_submodule():
            said = f"{path} chooses by its numbers which tokens go where, as experts are chosen"
        raise MomentsError(
            f"what {type(module).__name__} computes depends on its numbers in a way that could not "
            f"be followed ({said})"
        ) from error
    return dataclasses.replace(result, example=_in_own_precision(example, module))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- copies on the CPU ----------------------------------------------------------------------------

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _on_cpu(module: nn.Module) -> nn.Module:
    """The module on the CPU in single precision or better: itself, or a copy.

    Raises:
        MomentsError: it cannot be copied.
    """
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for part in parts for v in vars(part).values() if isinstance(v, Tensor)]
    if all(_tensor_on_cpu(tensor) is tensor for tensor in tensors):
        return module
    memo: dict[int, Any] = {}
    for tensor in tensors:
        result = _tensor_on_cpu(tensor.detach())
        learns = tensor.requires_grad and result.is_floating_point()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(result, requires_grad=learns) if is_parameter else result
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # the module's own parts may not support it
        raise MomentsError(
            f"{type(module).__name__} is read from a copy on the processor in single precision, "
            f"and cannot be copied ({_first_line(error)}): pass it as module.float().cpu()"
        ) from error
    for part in copied.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.device):
                setattr(part, name, torch.device("cpu"))
            elif isinstance(value, torch.dtype) and value.is_floating_point and value not in WIDE:
                setattr(part, name, torch.float32)
    return copied


def _tensor_on_cpu(tensor: Tensor) -> Tensor:
    half = tensor.is_floating_point() and tensor.dtype not in WIDE
    return tensor.to("cpu", torch.float32) if half else tensor.to("cpu")


def _batch_on_cpu(batch: Any) -> Any:
    return tree_map(lambda t: _tensor_on_cpu(t) if isinstance(t, Tensor) else t, batch)


def _in_own_precision(batch: Any, module: nn.Module) -> Any:
    """A batch for a copy on the CPU, in the precision of the module itself."""
    halves = {p.dtype for p in module.parameters() if p.is_floating_point()} - set(WIDE)
    if not halves:
        return batch
    dtype = next(iter(halves))
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, batch
    )


# --- recorded passes ------------------------------------------------------------------------------


@made_on_cpu
def recorded(
    module: nn.Module, batch: Any, rows: int = 2, tokens: int = TOKENS
) -> tuple[Graph, Any]:
    """The graph and the input of a pass over the first tokens of the first rows of a batch.

    Args:
        batch: None: random input.

    Raises:
        MomentsError: the module cannot be run.
    """
    graph, _, used = _recorded(_on_cpu(module), batch, rows, tokens)
    return graph, _in_own_precision(used, module)


def _recorded(
    module: nn.Module, batch: Any, rows: int, tokens: int
) -> tuple[Graph, int | None, Any]:
    """The graph of a short pass, the number of tokens of the whole batch, and the input used."""
    errors = []
    if batch is None:
        random = list(examples(module))
        shown = [*map(of_one_row, random), *random] if rows == 1 else random
        cuts: list[tuple[Any, int | None]] = [(cut, None) for cut in shown]
    else:
        cuts = list(_cuts(batch, rows, tokens))
    for training, (cut, length) in itertools.product((True, False), cuts):
        used = _batch_on_cpu(cut)
        try:
            with restored_buffers(module), in_mode(module, training):
                graph = record(module, functools.partial(run, module, used), _tensors(used))
            return graph, length, used
        except Exception as error:  # the module's own code may reject the input
            errors.append(_first_line(error))
    why = "nothing in it says what it reads" if not errors else errors[0]
    mend = "on the batch that was passed"
    if batch is None:
        arguments = inspect.signature(module.forward).parameters.values()
        names = [a.name for a in arguments if a.default is a.empty and a.kind < a.VAR_POSITIONAL]
        needed = "{" + ", ".join(f"{name!r}: ..." for name in names) + "}" if names[1:] else "..."
        mend = f"pass batch={needed}"
    raise MomentsError(f"{type(module).__name__} could not be run ({why}): {mend}")


@made_on_cpu
def random_part(module: nn.Module, batch: Any) -> str | None:
    """The submodule that draws random numbers in evaluation mode; None if there is none."""
    copied, used = _on_cpu(module), _batch_on_cpu(batch)
    with restored_buffers(copied), in_mode(copied, False):
        graph = record(copied, functools.partial(run, copied, used), _tensors(used))
    path = graph.random_submodule()
    return "the module itself" if path == "" else path


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by their number."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = [values] if isinstance(values, Tensor) else values
    return {str(i): v for i, v in enumerate(v for v in values if isinstance(v, Tensor))}


def _cuts(batch: Any, rows: int = 2, most: int = TOKENS) -> Iterator[tuple[Any, int | None]]:
    """The first rows of a batch, cut to their first tokens and then whole, with their length."""
    is_mapping = isinstance(batch, Mapping)
    tensors = {
        k: torch.as_tensor(v) if isinstance(v, Tensor | np.ndarray | list) else v
        for k, v in (batch if is_mapping else {"": batch}).items()
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
        yield (cut if is_mapping else cut[""]), length


def _long_spans(module: nn.Module, batch: Any) -> list[int | None]:
    """The attention span of every softmax on the whole first sequence of a batch."""
    *_, (first, _) = _cuts(batch, rows=1)
    with in_mode(module, False):
        try:
            return attention_spans(functools.partial(run, module, _batch_on_cpu(first)))
        except Exception:  # a module that runs on few tokens of two sequences may reject this
            return []


# --- a declaration --------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Collects what a `ModuleReading` says of a module."""

    module: nn.Module
    graph: Graph
    length: int | None
    spans: list[int | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unmasked: tuple[int, ...] = ()
    misplaced_norms: tuple[tuple[int, str], ...] = ()
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unlayered: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def reading(self) -> ModuleReading:
        stream = self.stream = StreamReader(self.graph)
        self.tensors = dict(self.module.named_parameters())
        chains = self._chains()
        stacks = self._stacks(chains)
        roles = Roles(self.graph)
        drops = {p for p, part in self.module.named_modules() if isinstance(part, nn.Dropout)}
        sites = Sites(self.graph, [chain.start for chain in chains], drops)
        for stack in stacks:
            roles.add_stack(stack)
        points, blocks, complete = zip(*(place(sites, stack) for stack in stacks), strict=True)
        if not all(complete):
            self.doubts.append(
                "no submodule gives the stream of every layer: it cannot be measured by hooks"
            )
        self.reasons = [*self.unlayered, *_together(stream.doubts), *self.reasons]
        self.doubts += roles.doubts
        module_roles = self._roles(roles.roles(), stacks, [*itertools.chain(*blocks)], sites)
        every = (*module_roles.roles, *module_roles.scales)
        self.squares = _squares(self.tensors, every, self.graph.parameter_factors())
        self._share(roles)
        model = self._model(stacks)
        main = stacks[-1]
        attentions = [
            (n, a) for n, u in main.units() if u.name == "attention" and (a := u.attention)
        ]
        rotated = [n for n, a in attentions if a.rotates_values]
        if rotated:
            self.remarks.append(
                f"rotary positions turn the values of layers {listed(rotated)} too, not queries "
                "and keys alone: what a token reads then depends on where it stands"
            )
        causal = [u.attention.causal for u in main.blocks if u.attention is not None]
        single = len(stacks) == 1 and not any(u.name == "cross" for u in main.blocks)
        leaves = (v for v in self.graph.values if v.name is not None and v.params)
        return ModuleReading(
            model,
            module_roles,
            tuple(itertools.chain(*points)),
            tuple(dict.fromkeys(self.reasons)),
            tuple(dict.fromkeys(self.doubts)),
            unnormed=tuple(row for stack in stacks for row in stack.unnormed),
            over_queries=tuple(n for n, a in attentions if not a.core.over_keys),
            unmasked=self.unmasked,
            misplaced_norms=self.misplaced_norms,
            remarks=tuple(self.remarks),
            shared=self.shared,
            unlayered=tuple(dict.fromkeys(self.unlayered)),
            bidirectional=not all(causal) if single and causal else None,
            unused=tuple(str(v.name) for v in leaves if not v.consumers and v.tensor.numel()),
            detached=self.graph.detaching_submodules(),
            logit_scale=main.head.scale if main.head.scaled else None,
            sums={
                (stack.prefix, number, unit.name): _block_sum(stack.placement(number, unit), unit)
                for stack in stacks
                for number, unit in stack.units()
                if unit.scales_known
            },
        )

    def _roles(
        self, roles: list[Role], stacks: list[Stack], blocks: list[ModuleBranch], sites: Sites
    ) -> ModuleRoles:
        known = {role.parameter for role in roles}
        scales = tuple(r for r in roles if r.name.endswith(".branch_scale"))
        head = None if stacks[-1].head.doubts else stacks[-1].head.matrix
        logits = None if head is None else sites.output(head.output)
        return ModuleRoles(
            layers=len(stacks[-1].layers),
            roles=tuple(r for r in roles if r not in scales),
            unidentified=tuple(n for n, p in self.tensors.items() if n not in known and p.numel()),
            blocks=tuple(blocks),
            scales=scales,
            logits=logits.path if logits is not None and logits.side == "output" else "",
        )

    def _share(self, roles: Roles) -> None:
        """Give every layer the variance of a matrix that it shares, if few matrices are shared."""
        rows = [row for row in roles.repeated if row[2] in MATRICES]
        for _, layer, _, parameter in rows:
            first = self.shared.get(parameter) or (roles.uses[parameter][0].role.layer,)
            self.shared[parameter] = (*first, layer)
        total = len({key for key in self.squares if key[2] in MATRICES}) + len(rows)
        if not rows or 4 * len(rows) > total:
            return
        for stack, layer, name, parameter in rows:
            first_layer = next(
                use.role.layer
                for use in roles.uses[parameter]
                if use.role.full_name == stack + name
            )
            self.squares.setdefault((stack, layer, name), self.squares[stack, first_layer, name])

    # --- stacks ------------------------------------------------------------------------------

    def _chains(self) -> list[Stack]:
        """The streams of the module, at most two, with their blocks."""
        stream = self.stream
        if not stream.chains:
            raise MomentsError(
                f"{type(self.module).__name__}: no attention on a residual stream was found in "
                f"what it computes{_quantised(self.module)}"
            )
        chains = stream.chains if len(stream.chains) <= 2 else self._longest(stream.chains)
        for chain in chains:
            matrices = self._matrices(chain)
            if len(matrices) < len(chain.sums):
                names = gathered_names(sorted(set().union(*matrices)))
                self.unlayered.append(f"layers that share their weights ({', '.join(names)})")
                chain.sums = chain.sums[: len(matrices)]
            stream.fill(chain)
        if adapters := stream.adapters:
            self.doubts.append(
                "adapters that are zero, and add nothing yet, are left out "
                f"({', '.join(gathered_names(adapters))})"
            )
        self.doubts += stream.notes
        return chains

    def _stacks(self, chains: list[Stack]) -> list[Stack]:
        """The encoder's stack, if there are two, and the main one."""
        chains = [c for c in chains if c.blocks]
        decoders = [c for c in chains if any(b.name == "cross" for b in c.blocks)]
        if len(chains) == 2 and len(decoders) != 1:
            chains = self._longest(chains)
        if decoders and len(chains) == 2:
            chains = [c for c in chains if c is not decoders[0]] + decoders
        for stack in chains:
            stack.prefix = ENCODER if len(chains) == 2 and stack is chains[0] else ""
            stack.layers = self._layers(stack)
            stack.embedding = read_embedding(self.stream, stack.start)
            stack.placements, stack.unnormed = self._placements(stack.layers, stack.embedding)
            stack.head = read_head(self.stream, stack, chains)
            self.doubts += stack.head.doubts
        return chains

    def _matrices(self, chain: Stack) -> list[set[str]]:
        """Parameters of every sum's matrices, up to the first sum that only reuses earlier ones.

        The sums from there on repeat the earlier ones.
        """
        result: list[set[str]] = []
        between = self.stream.linears_between
        for one in chain.sums:
            names = {n for b in one.branches for m in between(one.stream, b) for n in m.params}
            if names and names <= set().union(*result):
                break
            result.append(names)
        return result

    def _longest(self, chains: list[Stack]) -> list[Stack]:
        """The longest of several streams, which no Transformer has: that is a reason.

        A stream with a sum that contains all of another stream's matrices comes last.
        """
        sizes = ", ".join(str(len(c.sums)) for c in chains)
        self.unlayered.append(
            f"what its blocks add makes {len(chains)} streams (of {sizes} sums), where a "
            "decoder has one, and an encoder with a decoder two"
        )
        if {node.name for node in self.graph.nodes} & {"topk", "sort"}:
            self.unlayered.append("entries that are chosen by size, as a mixture's router does")
        rows = [self._matrices(chain) for chain in chains]
        wholes = [set().union(*row) for row in rows]

        def length(row: list[set[str]]) -> int:
            nested = len(row) > 1 and any(w and w <= names for names in row for w in wholes)
            return 0 if nested else len(row)

        return [chains[max(range(len(rows)), key=lambda number: length(rows[number]))]]

    def _layers(self, chain: Stack) -> list[list[BranchUnit]]:
        """Blocks by layer: attention, perhaps cross-attention, a feed-forward block."""
        layers: list[list[BranchUnit]] = []
        for block in chain.blocks:
            if not layers or ORDER.index(block.name) <= ORDER.index(layers[-1][-1].name):
                layers.append([])
            layers[-1].append(block)
        kinds = {tuple(b.name for b in units) for units in layers}
        if len(kinds) > 1 or not kinds <= {("attention", "ffn"), ("attention", "cross", "ffn")}:
            words = "; ".join(", ".join(k) for k in sorted(kinds))
            self.unlayered.append(
                f"layers that are not one attention and one feed-forward block each ({words})"
            )
        return layers

    def _placements(
        self, layers: list[list[BranchUnit]], embedding: EmbeddingUnit
    ) -> tuple[list[str], list[tuple[int, str]]]:
        """Where the norms of each layer are, and the blocks without any where these are few."""
        numbered = [(n, unit) for n, units in enumerate(layers, start=1) for unit in units]
        bare = [
            (n, unit)
            for n, unit in numbered
            if not unit.norms and not self._reads_normed_embedding(unit, embedding)
        ]
        unnormed = []
        if len(bare) <= len(numbered) / 4:
            unnormed = [(n, unit.name) for n, unit in bare]
            ids = [id(unit) for _, unit in bare]
            layers = [[u for u in units if id(u) not in ids] for units in layers]
        result = [self._placement(units, embedding) if units else "" for units in layers]
        most = max((name for name in result if name), key=result.count, default="none")
        return [name or most for name in result], unnormed

    def _placement(self, units: list[BranchUnit], embedding: EmbeddingUnit) -> str:
        """Where the norms of a layer are."""
        result = set()
        recognised = [unit for unit in units if unit.attention or unit.feed]
        for unit in recognised or units:  # the norms of any other block are not known
            if self._reads_normed_embedding(unit, embedding) and any(u.pre_norm for u in units):
                # A norm does not change what is normalised already.
                self.doubts.append("the first block reads the embedding's norm, not one of its own")
                continue
            has = bool(unit.pre_norm), bool(unit.output_norm), bool(unit.sum_norm)
            name = {
                (True, False, False): "pre",
                (True, True, False): "sandwich",
                (False, True, False): "output",
                (False, False, True): "post",
                (False, False, False): "none",
            }.get(has)
            if name is None:
                words = ["before its matrices", "behind its output", "behind the sum"]
                where = " and ".join(w for w, h in zip(words, has, strict=True) if h)
                self.reasons.append(f"norms {where} of a block, and nowhere else")
                name = "none"
            result.add(name)
        if len(result) > 1:
            self.reasons.append(
                f"norms that sit differently within a layer ({', '.join(sorted(result))})"
            )
        return min(result)

    def _reads_normed_embedding(self, unit: BranchUnit, embedding: EmbeddingUnit) -> bool:
        """Whether a block without norms reads the output of the embedding's norm."""
        if embedding.norm is None or unit.norms:
            return False
        return self.stream.fit(embedding.norm.end, unit.sum.stream) == 1.0

    # --- the model ---------------------------------------------------------------------------

    def _model(self, stacks: list[Stack]) -> Transformer | None:
        model: Transformer | None = None
        for stack in stacks:
            try:
                fields = self._fields(stack)
                if self.reasons:
                    return None
                if model is not None:
                    fields["encoder"] = model
                model = Transformer(**fields)
            except DomainError as error:
                self.reasons.append(str(error))
                return None
        return model

    def _common(self, name: str, values: list[Any]) -> Any:
        """The one value of all layers; a reason if they differ."""
        different = list(dict.fromkeys(map(repr, values)))
        if len(different) > 1:
            self.reasons.append(f"{name} that differs between layers ({', '.join(different)})")
        return next((v for v in values if v is not None), None)

    def _most_common(self, name: str, values: list[float]) -> float:
        """The dropout probability of most layers; a doubt if they differ."""
        most = max(values, key=values.count)
        self.remarks += [
            f"{name} of layer {n} has a probability of {v:g}, unlike that of the other layers"
            for n, v in enumerate(values, start=1)
            if v != most
        ]
        if len(set(values)) > 1:
            self.doubts.append(f"{name} that differs between layers: taken for {most:g} in all")
        return most

    def _fields(self, stack: Stack) -> dict[str, Any]:
        """The arguments of `Transformer`."""
        units = [unit for _, unit in stack.units()]
        attentions = [u.attention for u in units if u.name == "attention" and u.attention]
        feeds = [u.feed for u in units if u.feed is not None]
        if not attentions or not feeds:
            self.reasons.append("no attention or no feed-forward block that could be read")
            return {}
        self.reasons += [d for u in units if u.attention is not None for d in u.attention.doubts]
        causal = any(a.causal for a in attentions)
        if causal:
            self.unmasked = tuple(n for n, a in enumerate(attentions, start=1) if not a.causal)
        common, most_common = self._common, self._most_common
        norms = [norm for unit in units for norm in unit.norms]
        outer = [n for n in (stack.final, stack.embedding.norm) if n is not None]
        kinds = list(dict.fromkeys(n.kind for n in [*norms, *outer]))
        if len(kinds) > 1:
            self.reasons.append(f"norms of several kinds ({', '.join(kinds)})")
        norms = norms or outer
        epsilons = [n.epsilon for n in norms]
        may_have_bias = any(n.gains and n.kind == "layernorm" for n in norms)
        parallel = any(u.parallel for u in units)
        inputs = [{u.pre_norm and u.pre_norm.end for u in layer} for layer in stack.layers]
        fields: dict[str, Any] = {
            "layers": len(stack.layers),
            "d_model": self.graph.tensor(stack.start).shape[-1],
            "heads": common("a number of heads", [a.heads for a in attentions]),
            "seq_len": self._seq_len(stack),
            "d_ff": common("a hidden width", [f.d_ff for f in feeds]),
            "normalization": kinds[0] if kinds else "layernorm",
            "activation": common("an activation", [f.activation for f in feeds]),
            "gated": common("a gate", [f.gated for f in feeds]),
            "dropout": most_common(
                "dropout behind attention", [u.dropout for u in units if u.name == "attention"]
            ),
            "attention_dropout": most_common("attention dropout", [a.dropout for a in attentions]),
            "ffn_dropout": most_common(
                "dropout behind the feed-forward block",
                [u.dropout for u in units if u.name == "ffn"],
            ),
            "activation_dropout": most_common("activation dropout", [f.dropout for f in feeds]),
            "causal": causal,
            "d_head": common("a head's width", [a.d_head for a in attentions]),
            "kv_heads": common("a number of key heads", [a.kv_heads for a in attentions]),
            "norm_epsilon": max(set(epsilons), key=epsilons.count) if epsilons else 0.0,
            "norm_affine": any(n.gains for n in norms),
            "norm_bias": any(n.biases for n in norms) or not may_have_bias,
            "parallel": parallel,
            "parallel_norms": 2 if parallel and any(len(ends) > 1 for ends in inputs) else 1,
            "alibi": common("ALiBi", [a.alibi for a in attentions]),
            "qk_norm": self._qk_norm(attentions),
            "logit_softcap": common("a cap of logits", [a.softcap for a in attentions]),
        }
        fields |= self._norm_fields(stack) | self._scales(stack)
        fields |= self._positions(attentions)
        sinks = [None if a.sinks is None else self._mean_square(a.sinks) for a in attentions]
        fields["attention_sink"] = one_or_all(sinks)
        fields["temperature"] = one_or_all([rounded(a.temperature) for a in attentions])
        fields["weights"], fields["biases"] = self._weights(stack)
        fields["window"] = one_or_all(self._windows(attentions))
        fields["embedding"] = self._embedding(stack)
        fields["head"] = self._head(stack, fields)
        return fields

    def _windows(self, attentions: list[AttentionUnit]) -> list[int | None]:
        """Attention windows, from the longer pass if there was one."""
        softmaxes = [node.index for node in self.graph.nodes if node.name in SOFTMAX]
        long: dict[int, int | None] = {}
        if len(self.spans) == len(softmaxes):
            long = dict(zip(softmaxes, self.spans, strict=True))
        return [long.get(a.core.softmax) if a.window is None else a.window for a in attentions]

    def _seq_len(self, stack: Stack) -> int:
        if stack.embedding.patch is not None:
            return int(self.graph.tensor(stack.start).shape[1])
        if self.length is not None:
            return self.length
        position = stack.embedding.tables.get("position")
        if position is not None:
            rows = self.tensors[position]
            return int(rows.numel() // rows.shape[-1]) - stack.embedding.offset
        config = getattr(self.module, "config", None)
        for name in ("max_position_embeddings", "n_positions", "seq_length", "block_size"):
            result = getattr(config, name, None)
            if isinstance(result, int) and result > 0:
                return result
        return SEQ_LEN

    def _qk_norm(self, attentions: list[AttentionUnit]) -> str | None:
        queries = [None if a.qk_norm is None else a.qk_norm.kind for a in attentions]
        if queries != [None if a.key_norm is None else a.key_norm.kind for a in attentions]:
            self.reasons.append("queries and keys that are not normalised alike")
        result: str | None = self._common(
            "a norm of queries",
            [
                f"{a.qk_norm.kind}-all"
                if a.qk_norm and a.qk_norm.groups == 0 and a.heads > 1
                else kind
                for kind, a in zip(queries, attentions, strict=True)
            ],
        )
        return result

    def _norm_fields(self, stack: Stack) -> dict[str, Any]:
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
                self.misplaced_norms = tuple(few)
                fields["norm"] = most
            else:
                words = ", ".join(dict.fromkeys(kinds))
                self.reasons.append(f"norms that sit differently in different layers ({words})")
        gains, factors = np.ones((2, n, 2))
        for number, unit in stack.units():
            if unit.norms:
                place = number - 1, int(unit.name == "ffn")
                gains[place], factors[place] = unit.norms[0].gain, unit.norm_factor
            if any(
                abs(norm.gain - 1) > 1e-3 for norm in unit.norms[1:] if norm is unit.output_norm
            ):
                self.doubts.append("gains of second norms are taken as 1")
        return fields | gain_fields(gains, factors)

    def _scales(self, stack: Stack) -> dict[str, Any]:
        skip, branch = np.ones((2, len(stack.layers), 2))
        for number, unit in stack.units():
            place = number - 1, int(unit.name == "ffn")
            skip[place], branch[place] = unit.skip or 1.0, unit.branch
            if unit.skip == 0:
                self.doubts.append(
                    f"nothing bypasses the {unit.name} block of layer {number}: the "
                    "model has the stream there"
                )
            if stack.placements[number - 1] == "none" and unit.pre_norm is None:
                branch[place] *= unit.pre_factor
        return {"skip_scale": fewest(skip), "branch_scale": fewest(branch)}

    def _positions(self, attentions: list[AttentionUnit]) -> dict[str, Any]:
        """Rotary positions and relative biases."""
        fields: dict[str, Any] = {}
        rotations = [a.rotary for a in attentions]
        if any(rotations):
            fields["rotary"] = [None if r is None else _rotary(r) for r in rotations]
        tables = [a.relative for a in attentions if a.relative]
        if tables and len(tables) < len(attentions):
            self.reasons.append("relative biases of logits in some layers only")
        elif tables:
            if len(set(tables)) > 1:
                self.doubts.append("relative biases of every layer's own: taken for shared")
            squares = [self.tensors[t].detach().double().square().mean() for t in tables]
            buckets = attentions[0].buckets
            mean = float(sum(squares)) / len(squares)
            fields["relative_bias"] = RelativeBias(mean, buckets, self._max_distance(buckets))
        return fields

    def _max_distance(self, buckets: int) -> int:
        config = getattr(self.module, "config", None)
        result = getattr(config, "relative_attention_max_distance", None)
        if isinstance(result, int):
            return result
        self.doubts.append(
            "where relative positions share their last bucket is taken as 128 tokens"
        )
        return max(128, buckets + 1)

    def _weights(self, stack: Stack) -> tuple[Weights, Biases | None]:
        squares = {
            (n, k): v for (prefix, n, k), v in self.squares.items() if prefix == stack.prefix
        }
        variances = in_every_layer(MATRICES, len(stack.layers), squares)
        missing = [k for k in MATRICES if k not in variances and k not in DEFAULTS]
        if missing:
            if any((1, k) in squares for k in missing):
                names = ", ".join(gathered_names(list(self.shared)))
                self.reasons.append(f"layers that share their weights{names and f' ({names})'}")
            else:
                self.reasons.append(f"no {', no '.join(missing)} matrix that every layer has")
            return Weights.xavier(8, 1), None
        return Weights(**variances), biases_of(len(stack.layers), squares)

    def _mean_square(self, name: str | None) -> float:
        """Mean square of a table without its padding row, which is never drawn."""
        if name is None:
            return 0.0
        rows = self.tensors[name].detach()
        padding = padding_row(self.module, self.tensors[name])
        rows = rows.reshape(-1, rows.shape[-1])
        skipped = padding is not None and not bool(rows[padding].any())
        return squared_norm(rows) / float(rows.shape[-1] * (len(rows) - skipped))

    def _embedding(self, stack: Stack) -> Embedding | PatchEmbedding | None:
        read = stack.embedding
        if read.is_input:
            return None
        self.doubts += read.doubts
        is_known = "token" in read.tables and "class" not in read.tables
        if read.doubts or not (read.patch is not None or is_known):
            self.doubts.append("what enters layer 1 is not declared")
            return None
        common: dict[str, Any] = {
            "norm": read.norm is not None,
            "dropout": read.dropout,
            "norm_epsilon": 0.0 if read.norm is None else read.norm.epsilon,
        }
        tables = read.tables
        if read.patch is not None:
            try:
                return PatchEmbedding(
                    image_size=read.shape[-1],
                    patch_size=read.patch_size,
                    patch_variance=self.squares.get((stack.prefix, 0, "patch")) or 1.0,
                    position_variance=self._mean_square(tables.get("position")),
                    channels=read.shape[1],
                    class_token="class" in tables,
                    class_variance=self._mean_square(tables.get("class")),
                    bias_variance=self.squares.get((stack.prefix, 0, "patch.bias")),
                    **common,
                )
            except DomainError as error:
                self.doubts.append(f"what enters layer 1 is not declared: {error}")
                return None
        position, segment = (
            self._mean_square(tables.get(role)) * read.factors.get(role, 1.0) ** 2
            for role in ("position", "segment")
        )
        sines = read.sinusoidal
        if "position" in tables and abs(position / SINUSOIDAL - 1) < 0.01:
            sines = sines or _is_sinusoidal(self.tensors[tables["position"]])
        self.doubts += [
            f"the {role} table is multiplied by {factor:.4g} before it is added: its declared "
            "variance is that of what is added"
            for role, factor in read.factors.items()
        ]
        factor = read.factor
        return Embedding(
            vocab_size=len(self.tensors[tables["token"]]),
            token_variance=self._mean_square(tables["token"]),
            position_variance=0.0 if sines else position,
            segment_variance=segment,
            scale=rounded(read.scale),
            positions="sinusoidal" if sines else "learned",
            padding_id=padding_row(self.module, self.tensors[tables["token"]]),
            factor_dim=None if factor is None else self.graph.tensor(factor.input).shape[-1],
            factor_variance=self.squares.get((stack.prefix, 0, "factor")),
            factor_bias=factor is not None and bool(factor.biases),
            **common,
        )

    def _head(self, stack: Stack, fields: Mapping[str, Any]) -> Head | None:
        read, final = stack.head, stack.final
        gain = 1.0 if final is None else rounded(final.gain)
        if stack.prefix:
            return Head(norm=final is not None, norm_gain=gain, loss=None, dropout=read.dropout)
        if read.matrix is None or read.doubts:
            return None
        width = self.graph.tensor(read.matrix.input).shape[-1]
        factor_dim = None if width == fields["d_model"] else width
        if factor_dim not in (None, getattr(fields["embedding"], "factor_dim", None)):
            self.doubts.append(f"the head reads {width} features, not d_model: it is not declared")
            return None
        if read.pool == "other" and not fields["causal"]:
            self.doubts.append("how a sequence's tokens are pooled is not read")
            return None
        last = len(stack.layers) + 1
        variances = {
            k: v for (prefix, n, k), v in self.squares.items() if (prefix, n) == ("", last)
        }
        variance = variances.get("head")
        table = stack.embedding.tables.get("token")
        tied = table in read.matrix.params
        if tied and fields["embedding"] is None:
            self.doubts.append("the head is the token table: taken for a matrix of its own")
            tied, variance = False, self._mean_square(table)
        classes = read.pool in ("first", "mean")
        token_rows = 0 if table is None else len(self.tensors[table])
        loss: str | None = "causal" if fields["causal"] else "masked"
        if classes:
            loss = "classification"
        elif token_rows != read.labels and not tied:
            loss = "causal" if fields["causal"] else None
            self.doubts.append("labels that are no tokens: no loss is declared")
        rows = token_rows if fields["embedding"] is not None else 0
        return Head(
            vocab_size=None if tied or classes or rows == read.labels else read.labels,
            tied=tied,
            weight_variance=None if tied else variance,
            norm=final is not None,
            norm_gain=gain,
            dropout=read.dropout,
            output_scale=rounded(read.scale),
            bias=bool(read.matrix.biases),
            logit_softcap=read.softcap,
            loss=loss,
            classes=read.labels if classes else None,
            pool=read.pool if read.pool in ("first", "mean") else "first",
            factor_dim=factor_dim,
            factor_variance=variances.get("head.factor"),
            transform=None if read.transform is None else read.activation,
            transform_variance=variances.get("head.transform"),
            transform_bias_variance=variances.get("head.transform.bias"),
            transform_norm=read.transform is None or read.norm is not None,
        )


def _block_sum(placement: str, unit: BranchUnit) -> BlockSum:
    norm = unit.pre_norm or unit.sum_norm
    gain = None if norm is None else norm.gain * unit.norm_factor
    multiplier = None if unit.attention is None else unit.attention.multiplier
    return BlockSum(placement, unit.skip, unit.branch, gain, unit.proportional, multiplier)


def _together(phrases: Iterable[str]) -> list[str]:
    """Phrases that only differ in the numbers in names of parameters, as one with stars."""
    result = []
    for pattern, group in grouped(phrases, lambda p: re.sub(r"(?<=\.)\d+(?=\.)", "*", p)).items():
        words, bracket, names = pattern.partition("(")
        distinct = ", ".join(dict.fromkeys(names.removesuffix(")").split(", ")))
        joined = f"{words}{bracket}{distinct}{bracket and ')'}"
        result.append(group[0] if len(group) == 1 else joined)
    return result


def _quantised(module: nn.Module) -> str:
    """A remark on submodules with integer matrices, whose products have no parameter."""
    paths = []
    for path, part in module.named_modules():
        tensors = [t for t in part.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
        matrices = [t for t in tensors if t.ndim > 1]
        packed = hasattr(part, "_packed_params")  # torch's own quantised layers
        integer = any(not t.is_floating_point() and t.dtype != torch.bool for t in matrices)
        if not list(part.children()) and (packed or (integer and len(matrices) < 3)):
            paths.append(path.removesuffix("._packed_params"))
    if not paths:
        return ""
    names = ", ".join(dict.fromkeys(map(gathered_pattern, paths)))
    return f"; {names} hold matrices as integers: pass the module before it is quantised"


def _is_sinusoidal(table: Tensor) -> bool:
    """Whether rows are sines and cosines of Vaswani et al.'s (2017) frequencies, in any order."""
    rows = table.detach().double().reshape(-1, table.shape[-1])
    rows = rows[(rows != 0).any(1)]
    width = rows.shape[1]
    speeds = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    distances = torch.arange(min(len(rows), 8), dtype=torch.float64)
    expected = torch.cos(distances[:, None] * speeds).sum(1)
    return close(rows[: len(distances)] @ rows[0], expected, 0.05)


def _squares(
    tensors: Mapping[str, Tensor], roles: Iterable[Role], factors: Mapping[str, float]
) -> dict[Any, float]:
    """Mean square by stack, layer and role; of hidden matrices with their parameters' factors."""
    sums: dict[Any, tuple[float, int]] = {}
    for role in roles:
        if role.parameter in tensors and tensors[role.parameter].numel():
            block = role.part.of(tensors[role.parameter].detach())
            key = role.stack, role.layer, role.name
            total, count = sums.get(key, (0.0, 0))
            factor = factors.get(role.parameter, 1.0) if role.name in MATRICES else 1.0
            sums[key] = total + factor**2 * squared_norm(block), count + block.numel()
    return {key: total / count for key, (total, count) in sums.items()}


def rounded(value: float) -> float:
    """1 if a number is 1 up to rounding, else its leading digits."""
    return 1.0 if abs(value - 1) < EXACT else float(f"{value:.6g}")


def _rotary(rotation: RotationUnit) -> Rotary:
    """Rotary positions by their base, or by speeds that are not its powers."""
    if rotation.deviation < ONE_BASE:
        return Rotary(rotation.fraction, rotation.base)
    speeds = tuple(float(f"{s:.6g}") for s in rotation.speeds)
    return Rotary(rotation.fraction, speeds=speeds)


def one_or_all(values: list[Any]) -> Any:
    """The value of all layers if it is the same, else a list."""
    return values[0] if len(set(values)) == 1 else values


def in_every_layer(
    names: Iterable[str], layers: int, squares: Mapping[tuple[int, str], float]
) -> dict[str, Any]:
    """The variances, one or one per layer, of those roles that every layer has.

    Args:
        squares: mean squares by layer and role.
    """
    rows = {name: [squares.get((n, name)) for n in range(1, layers + 1)] for name in names}
    return {name: one_or_all(row) for name, row in rows.items() if None not in row}


def biases_of(layers: int, squares: Mapping[tuple[int, str], float]) -> Biases | None:
    """The biases that every layer has; None if there are none."""
    names = [f"{name}.bias" for name in Biases().to_dict()]
    result = in_every_layer(names, layers, squares)
    drawn = {name.removesuffix(".bias"): value for name, value in result.items()}
    return Biases.of().replace(**drawn) if drawn else None


def gain_fields(gains: np.ndarray, factors: np.ndarray) -> dict[str, Any]:
    """The fields of norms' gains and of the factors behind the norms: LayerNorm Scaling if the
    factors are 1/sqrt(layer), else they are part of the gain.

    Args:
        gains, factors: (layers, 2), by layer and block.
    """
    layers = len(gains)
    tolerance = 20 * EXACT
    scaled = np.all(np.abs(factors * np.arange(1, layers + 1)[:, None] ** 0.5 - 1) < tolerance, 0)
    plain = np.all(np.abs(factors - 1) < tolerance, 0)
    scaling: bool | str = False
    if layers > 1:
        if scaled.all():
            scaling = True
        elif scaled[0] and plain[1]:
            scaling = "attention-only"
        elif scaled[1] and plain[0]:
            scaling = "ffn-only"
    if not scaling:
        gains = gains * np.where(np.abs(factors - 1) < tolerance, 1.0, factors)
    return {"layernorm_scaling": scaling, "norm_gain": fewest(gains)}


def fewest(values: np.ndarray) -> Any:
    """(layers, 2) values as one number, one per layer, or pairs, whichever suffices."""
    values = np.where(np.abs(values - 1) < EXACT, 1.0, values)
    if np.ptp(values) <= EXACT * np.abs(values).max():
        return float(values.flat[0])
    if np.all(np.abs(values[:, 0] - values[:, 1]) < EXACT * np.abs(values[:, 0])):
        return [float(v) for v in values[:, 0]]
    return [tuple(float(v) for v in row) for row in values]


__all__ = ["ModuleReading", "read"]
