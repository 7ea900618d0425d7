"""One draw of a block: heads, experts or convolutions as functions of drawn preactivations.

Blocks whose laws know two tokens at a time, or are draws themselves, are followed through draws of
the function that they are: of preactivations p_k behind their matrices, and of a gradient at their
output. With J_k the derivative in p_k, a change u_k = -P_k delta_k + noise there makes

    P = E sum_k J_k P_k J_k^T,    U = E |f(p + u) - f(p)|^2,    M = E sum_k J_k M_k J_k^T + drift,

the first by probes e of kernel 1, as E (J P J^T e) e^T, the second by the function itself at both
signs of u, so that a choice of experts that the step changes is in it. Derived here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..engine.derivative import plain, primitive, pullback
from ..engine.laws import LawMatrix
from ..errors import DomainError
from ..formulas.algebra import NUMPY
from ..formulas.law import ComponentLaws
from ..layers.attention.layers import self_masks
from ..layers.attention.projections import over_all_heads
from ..layers.attention.self_attention import CrossAttention, SelfAttention
from ..layers.experts.routing import Router
from ..layers.recurrent.drawn import FIXED, OF_SECTION, Section, gram, on_lists, root_of, rows_of
from ..layers.recurrent.heads import convolved, sigmoid
from ..layers.recurrent.mixers import taps
from ..model.mixers import LatentAttention, ShortConvolution
from ..model.positions import alibi_slopes
from .change import Array, Change, between
from .rules import Drawn as DrawnRows
from .rules import spread

Arrays = dict[str, Any]

NUMBERS, LEAST, MOST = 2**21, 8, 256
"""Numbers that draws hold, of matrices over pairs of tokens and of rows; and how many draws."""

ROWS = 4096
"""Rows of a matrix whose gradients are drawn for the sign rule."""

TINY, NOTHING = 1e-5, 1e-12
"""Relative change below which differences would lose digits, and are those of one of this size, at
the choice of experts that was: tokens that change theirs are in proportion to the change, what else
a step does squared is to its square, and single draws would be all there is of it. And share of the
mean square gradient below which a row has none."""


class Copies(NamedTuple):
    """Of parameters that multiply no input: how many there are of what is drawn (`times`), and in
    how many independent parts of the block each of them stands."""

    times: float
    shared: float


def copies(head: Any, name: str) -> Copies:
    """Of a head's own parameter."""
    if hasattr(head, "copies"):
        result: Copies = head.copies(name)
        return result
    first = name.partition(".")[0]
    first = OF_SECTION.get(first, first)
    if first in head.inner:
        return Copies(head.inner[first].served ** 0.5, head.inner[first].served ** 0.5)
    of = head.sections[first]
    return Copies(of.rows / of.drawn, of.shared)


class _Probe(NamedTuple):
    """Rows of independent tokens at a block's output, and what it sends back of them."""

    rows: Array
    sent: dict[str, Array]


class Draws(NamedTuple):
    """Of a block.

    Attributes:
        many: N.
        entering, own: (N, ...) preactivations by section, and what is the function's own.
        run: the function of both; `settled` with the choice of experts made at these.
        output: (N, T, features).
        push: its derivative along changes of both.
        delta, sent: gradients at the output, and what it sends back of them.
        even, sized: probes of kernel 1, and times `sizes`, (T,) the tokens' gradients'.
    """

    many: int
    entering: Arrays
    own: Arrays
    run: Callable[..., Array]
    settled: Callable[..., Array]
    output: Array
    push: Callable[..., Array]
    delta: Array
    sent: Arrays
    even: _Probe
    sized: _Probe
    sizes: Array


class Block:
    """A block at the kernels of both passes.

    Attributes:
        matrices: by section.

    Args:
        head: the function.
        matrices: that sections are made by.
        reads: (T, T) what each reads.
        received: (T, T) gradient at the output.
        features: of the whole output.
        known: squared norms of the matrices' gradients, by section, where they are known better.
        sequences: that the tokens are.
        gains: of matrices inside a draw, what they make per unit of what they read.
        factors: of what matrices make, before the function reads it.
        gradients: behind matrices, where they are known better than by draws.
        named: what the function's own parameters are called.
    """

    def __init__(
        self,
        head: Any,
        matrices: Mapping[str, LawMatrix],
        reads: Mapping[str, Array],
        received: Array,
        features: float,
        known: Mapping[str, float],
        sequences: int = 1,
        gains: Mapping[str, float] = MappingProxyType({}),
        factors: Mapping[str, float] = MappingProxyType({}),
        gradients: Mapping[str, Array] = MappingProxyType({}),
        named: Callable[[str], str] = str,
    ) -> None:
        self.head, self.features = head, features
        self.matrices = {name: matrices[name] for name in head.sections}
        self.reads, self.received = reads, received
        self.sequences, self.gains, self.named = sequences, gains, named
        self._factors, self._known, self._gradients = factors, known, gradients

    def narrowed(self, features: int) -> Block:
        """At the same gradients, with draws that make up so many features, where a part of those
        drawn together can stand for all."""
        if features % self.head.features == 0 or not hasattr(self.head, "most"):
            return self
        most = math.gcd(features, self.head.features) if features > self.head.features else features
        head, options = dataclasses.replace(self.head, most=most), (self.gains, self._factors)
        return Block(
            head,
            self.matrices,
            self.reads,
            self.received,
            self.features,
            self._known,
            self.sequences,
            *options,
            self.gradients,
            self.named,
        )

    @functools.cached_property
    def draws(self) -> Draws:
        head, tokens, sections = self.head, len(self.received), self.head.sections
        rows = head.features + sum(one.drawn for one in sections.values())
        pairs = head.pairs * tokens * tokens // self.sequences
        pairs += getattr(head, "states", 0) * tokens
        count = int(np.clip(NUMBERS // (pairs + rows * tokens), LEAST, MOST))

        def drawn(many: int, root: Array, name: str) -> Array:
            return np.swapaxes(rows_of(count, many, len(root), name) @ root, 1, 2)

        roots, entering = dict[int, Array](), {}
        for name, one in sections.items():
            read, matrix = self.reads[name], self.matrices[name]
            gain = matrix.fan_in * matrix.variance
            if matrix.bias:
                root = root_of(gain * read + matrix.bias)
            else:  # what matrices read is often one
                if id(read) not in roots:
                    roots[id(read)] = root_of(read)
                root = gain**0.5 * roots[id(read)]
            entering[name] = drawn(one.drawn, root, name)
        own, fixed = self.parameters(np.random.default_rng(0), count)
        run = settled = self.function(own, fixed)
        if isinstance(head, Units):
            settled = self.function(own, fixed, head.settled(entering))
        output, pull = pullback(run, *entering.values(), *own.values())
        _, push = pullback(pull, np.zeros(output.shape))

        def sent(delta: Array) -> dict[str, Array]:
            return dict(zip((*entering, *own), pull(delta), strict=True))

        delta = drawn(head.features, root_of(self.received), "gradient")
        probe = np.swapaxes(rows_of(count, head.features, tokens, "probe"), 1, 2)
        # a token that receives next to nothing has a P that is next to infinite
        sizes = np.sqrt(np.maximum(np.diag(self.received), 0.0))
        sizes = sizes * (sizes > NOTHING * sizes.max(initial=0.0))
        even, sized = (_Probe(one, sent(one)) for one in (probe, sizes[:, None] * probe))
        return Draws(
            count, entering, own, run, settled, output, push, delta, sent(delta), even, sized, sizes
        )

    def _gram(self, name: str) -> Array:
        """(T, T) of a section's gradients, by draws."""
        one, draws = self.head.sections[name], self.draws
        return np.asarray(gram(draws.sent[name]) * (one.shared / (draws.many * one.drawn)))

    @functools.cached_property
    def gradients(self) -> dict[str, Array]:
        """(T, T) E delta delta at every section."""
        result = {}
        for name, matrix in self.matrices.items():
            kernel = self._gradients[name] if name in self._gradients else self._gram(name)
            square = matrix.fan_in * matrix.fan_out * float(np.vdot(kernel, self.reads[name]))
            result[name] = (self._known.get(name, square) / square if square > 0 else 1.0) * kernel
        return result

    @functools.cached_property
    def sent(self) -> dict[str, Array]:
        """Draws of what every section and own parameter receives from all that it stands in."""
        result = {}
        for name, one in self.draws.sent.items():
            if name in self.matrices:
                size = float(np.trace(self._gram(name)))
                size = np.trace(self.gradients[name]) / max(size, 1e-300)
                result[name] = size**0.5 * _of_all(one, self.head.sections[name].shared)
            else:
                result[name] = _of_all(one, copies(self.head, name).shared)
        return result

    def parameters(self, random: np.random.Generator, draws: int) -> tuple[Arrays, Arrays]:
        """The function's own, and what draws differ in that no gradient reaches."""
        own = self.head.own(random, draws)
        for name, one in getattr(self.head, "inner", {}).items():
            entries = random.standard_normal((draws, one.fan_in, one.fan_out))
            own[name] = entries * (self.gains[name] / one.fan_in) ** 0.5
        fixed = {name: one for name, one in own.items() if name in FIXED}
        return {name: one for name, one in own.items() if name not in FIXED}, fixed

    def function(self, own: Iterable[str], fixed: Arrays, head: Any = None) -> Callable[..., Array]:
        """Of preactivations by section, and of what is the function's own."""
        names, own = list(self.head.sections), list(own)
        run = on_lists(head or self.head, names, own, fixed, self.sequences)
        if not self._factors:
            return run
        factors = [self._factors.get(name, 1.0) for name in (*names, *own)]
        return lambda *given: run(*(f * x for f, x in zip(factors, given, strict=True)))

    def parted(self, name: str, y: Any, parts: int) -> Any:
        """(N parts, T, rows in a draw) of (N, T, rows) of a section, by the draws that read it."""
        heads = y.reshape(*y.shape[:2], -1, self.head.sections[name].drawn)
        read = np.arange(parts) * heads.shape[2] // parts
        return np.swapaxes(heads[:, :, read], 1, 2).reshape(-1, y.shape[1], heads.shape[3])

    def gathered(self, sent: Any, parts: int, rows: int) -> Any:
        """(N, T, rows) of what draws send back to a section: the transpose of `parted`."""
        by_draw = np.swapaxes(sent.reshape(-1, parts, *sent.shape[1:]), 1, 2)
        copies = rows // sent.shape[2]
        read = np.arange(parts) * copies // parts
        result = np.stack([by_draw[:, :, read == k].sum(2) for k in range(copies)], 2)
        return result.reshape(*result.shape[:2], -1)

    def rows(self, name: str) -> DrawnRows:
        """Gradients of a section's rows across tokens, which are not Gaussian."""
        return _as_rows(self.sent[name])

    def columns(self, kernel: Array) -> DrawnRows:
        """The output's features across tokens, likewise, on the scale of that kernel."""
        result = _as_rows(self.draws.output)
        size = np.trace(kernel) / float((result.values**2).sum() / len(result.values))
        return result._replace(values=size**0.5 * result.values, twins=size**0.5 * result.twins)

    @functools.cached_property
    def excess(self) -> float:
        """As `Site.excess`, over all pairs: Gaussian features' overlaps have the mean square
        K_tt K_ss + K_ts^2 over their number."""
        parts = self.features / self.draws.output.shape[2]
        overlaps = (
            self.draws.output @ np.swapaxes(self.draws.output, 1, 2) / self.draws.output.shape[2]
        )
        kernel = overlaps.mean(0)
        own = np.diag(kernel)
        gaussian = float(np.outer(own, own).sum() + (kernel * kernel).sum())
        result = float(overlaps.var(0).sum()) / parts / gaussian if gaussian > 0 else 0.0
        return max(result - 1 / self.features, 0.0)

    def _mean(self, first: Array, second: Array) -> Array:
        """(T, T) over draws and features of the output."""
        flat = (np.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in (first, second))
        one, two = flat
        return np.asarray(one @ two.T / one.shape[1])

    def _by_row(self, sent: Array, kernel: Array) -> Array:
        """What the sign rule leaves of each row's own size: its step is of one size, whatever the
        size rho of the row's gradient, rho^2 = delta^T K delta."""
        square = np.maximum(np.sum(sent * (kernel @ sent), 1, keepdims=True), 0.0)
        there = square > NOTHING * square.mean()
        rho = np.sqrt(np.where(there, square, 1.0))
        size = square.mean() / np.mean(rho * there) if there.any() else 1.0
        return np.asarray(np.where(there, size / rho, 0.0) * sent)

    def _linear(self, ways: Mapping[str, Array], probe: _Probe) -> Array:
        """E of J way, of changes of what is drawn, with the probe that they were made of."""
        if not any(np.any(one) for one in ways.values()):
            return np.zeros((self.draws.output.shape[1],) * 2)
        every = (ways.get(name, 0.0 * sent) for name, sent in probe.sent.items())
        return self._mean(self.draws.push(tuple(every))[0], probe.rows)

    def _averaged(self, parts: Mapping[str, Array]) -> Array:
        """sum_k J_k A_k J_k^T."""
        probe = self.draws.even
        ways = {name: part @ probe.sent[name] for name, part in parts.items()}
        return self._linear(ways, probe)

    def carried(
        self,
        changes: Mapping[str, Change],
        carried: Mapping[str, Array],
        reads: Mapping[str, Array],
        steps: Mapping[str, Array],
        follow: Mapping[str, float],
        gradient: Array,
    ) -> tuple[Change, dict[str, float]]:
        """The output's change; and of what each matrix of experts steps by, its square at those
        that tokens go to over that at all.

        Args:
            changes: behind every matrix.
            carried: of their coherent parts what the matrices carry, and do not step.
            reads: what matrices read whose steps are by the sign rule, and so not linear in rows.
            steps: of own parameters, in every draw.
            follow: how far those follow their gradients.
            gradient: (T, T) received at the output.
        """
        parts = {name: one.coherent for name, one in changes.items()}

        own = {name: part - carried[name] for name, part in parts.items()}

        def stepped(name: str, rows: Array) -> Array:
            kernel = reads.get(name)
            rows = rows if kernel is None else self._by_row(rows, kernel)
            return np.asarray(own[name] @ rows)

        def along(rows: Mapping[str, Array]) -> dict[str, Array]:
            result = {name: carried[name] @ rows[name] for name in parts}
            moved = [name for name in parts if own[name].any()]
            return result | {name: result[name] + stepped(name, rows[name]) for name in moved}

        probe, there = self.draws.sized, self.draws.sizes > 0
        ways = along(probe.sent) | {k: one * probe.sent[k] for k, one in follow.items()}
        coherent = self._linear(ways, probe) / np.where(there, self.draws.sizes, 1.0) ** 2 * there
        along_delta = self.features * float(np.vdot(coherent, gradient))
        slope = sum(
            self.matrices[name].fan_out * float(np.vdot(part, self.gradients[name]))
            for name, part in parts.items()
        )
        slope += sum(
            one
            * copies(self.head, name).times
            * float((self.sent[name] ** 2).sum())
            / self.draws.many
            for name, one in follow.items()
        )
        if along_delta > 0 and slope > 0:  # what probes scatter by
            coherent = coherent * (slope / along_delta)
        ways, moved_by = dict(steps), along(self.sent)
        fresh = _independent(tuple(way.shape for way in moved_by.values()))
        for (name, way), one in zip(moved_by.items(), fresh, strict=True):
            scale = way.shape[0] * way.shape[2]
            rest = spread(changes[name].total - gram(way) / scale)
            ways[name] = rest @ one - way
        every = self.draws.entering | self.draws.own
        share = max(float(np.abs(ways[k]).max() / (np.abs(every[k]).max() or 1.0)) for k in ways)
        grown = max(TINY / share, 1.0) if share > 0 else 1.0
        run, sides = self.draws.run if grown == 1.0 else self.draws.settled, []
        for sign in (grown, -grown):
            given = [one + sign * ways.get(name, 0.0) for name, one in every.items()]
            sides.append(run(*given) - self.draws.output)
        moved = (sides[0] - sides[1]) / (2 * grown)
        kept = self._saturated(moved, coherent, gradient)
        coherent = kept[:, None] * coherent
        total = (self._mean(sides[0], sides[0]) + self._mean(sides[1], sides[1])) / (2 * grown**2)
        drift = self._mean((sides[0] + sides[1]) / (2 * grown**2), self.draws.output)
        overlap = self._averaged({name: one.overlap for name, one in changes.items()})
        scattered = self.followed({name: one.scattered for name, one in changes.items()})
        change = Change(coherent, overlap + drift, total, kept[:, None] * scattered)
        if not isinstance(self.head, Units):
            return change, {}
        router, *maps = self.head.names
        there = self.head.router.choice(self.draws.entering[router])[..., None]
        at_chosen = {}
        for name in maps:
            square = stepped(name, self.sent[name]).reshape(*there.shape[:-1], -1) ** 2
            if square.any():
                at_chosen[name] = float((there * square).mean() / (there.mean() * square.mean()))
        return change, at_chosen

    def _saturated(self, moved: Array, coherent: Array, gradient: Array) -> Array:
        """(T,) what is left of each token's coherent change as the function bends, where that is
        beyond what draws scatter by: a norm of next to nothing has slopes that no step follows."""
        each = -(moved * self.draws.delta).mean(-1)
        linear = np.sum(coherent * gradient, -1)
        there = linear > 0
        left = np.where(there, each.mean(0) / np.where(there, linear, 1.0), 1.0)
        error = (
            np.where(there, each.std(0) / np.where(there, linear, 1.0), 1.0) / self.draws.many**0.5
        )
        off = np.clip(left, 0.0, 1.0) - 1.0
        beyond = off**4 / (off**4 + (3 * error) ** 4 + 1e-12)
        return np.asarray(1.0 + off * beyond)

    def followed(self, parts: Mapping[str, Array]) -> Array:
        """(T, T) how the output's kernel follows overlaps of the stream's tokens, from how those
        behind the matrices do: nothing is left of one where tokens are averaged."""
        if self.head.pairs:
            return np.zeros((self.draws.output.shape[1],) * 2)
        return self._averaged(parts)


@functools.lru_cache(maxsize=1)
def _independent(shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Standard normal numbers, the same at every rate and in all layers alike."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape) for shape in shapes]


def _of_all(sent: Array, shared: float) -> Array:
    """What a part receives that stands in several independent places, of what it does in one."""
    return sent if shared <= 1.0 else sent + (shared - 1.0) ** 0.5 * np.roll(sent, 1, axis=0)


def _as_rows(x: Array) -> DrawnRows:
    flat = np.swapaxes(x, 1, 2).reshape(-1, x.shape[1])
    some = np.random.default_rng(7).permutation(len(flat))[:ROWS]
    return DrawnRows(flat[some], flat[:0], 0.0)


# --- functions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A feature of a gated short convolution."""

    block: ShortConvolution
    width: int
    most: int = 64
    pairs: int = 1

    @property
    def features(self) -> int:
        return self.most

    @property
    def sections(self) -> dict[str, Section]:
        return dict.fromkeys(("query", "key", "value"), Section(self.width, self.features))

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        result = {"mixer.taps": taps(random, self.block, draws, self.features)}
        if self.block.bias:
            result["mixer.taps.bias"] = np.zeros((draws, self.features))
        return result

    def copies(self, name: str) -> Copies:
        return Copies(self.width / self.features, 1.0)

    def __call__(self, entering: Arrays, own: Arrays) -> Any:
        mixed = convolved(entering["key"] * entering["value"], own["mixer.taps"])
        if self.block.bias:
            mixed = mixed + np.expand_dims(own["mixer.taps.bias"], 1)
        return entering["query"] * mixed


@dataclass(frozen=True)
class AttentionHead:
    """A head of attention.

    Attributes:
        leaf: the attention.
        latent: latent attention's declaration; None: it is none.
        gate: features of a head that have a gate each; 0: there are no gates.
        sizes: (T,) roots of the second moments of "query" and "key" over all heads.
    """

    leaf: SelfAttention | CrossAttention
    latent: LatentAttention | None = None
    gate: int = 0
    sizes: Mapping[str, Array] | None = None
    pairs: int = 4

    @property
    def _groups(self) -> float:
        return float(self.leaf.heads) / float(self.leaf.kv_heads or self.leaf.heads)

    @property
    def features(self) -> int:
        return int(self.leaf.d_head if self.latent is None else self.latent.value_dim)

    @property
    def sections(self) -> dict[str, Section]:
        leaf, block = self.leaf, self.latent
        heads, d = int(leaf.heads), int(leaf.d_head)
        if block is not None:
            result = {
                "query": Section(heads * d, d),
                "key": Section(heads * block.nope_dim, block.nope_dim),
                "value": Section(heads * block.value_dim, block.value_dim),
            }
            if block.rope_dim:
                result["shared"] = Section(block.rope_dim, block.rope_dim, heads)
            return result
        shared = Section(int(heads / self._groups) * d, d, self._groups)
        result = {"query": Section(heads * d, d), "key": shared, "value": shared}
        if self.gate:
            result["attention_gate"] = Section(heads * self.gate, self.gate)
        return result

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        """Heads of draws follow one after the other; where these are fewer, some from the first to
        the last."""
        leaf, heads = self.leaf, int(self.leaf.heads)
        result: Arrays = {}
        if leaf.alibi:
            some = np.arange(draws) % heads
            if draws < heads:
                some = np.linspace(0, heads - 1, draws).round().astype(int)
            result["alibi"] = leaf.alibi * np.asarray(alibi_slopes(heads))[some]
        if leaf.relative_bias is not None:
            size = draws, leaf.relative_bias.buckets
            result["relative_bias"] = (
                random.standard_normal(size) * leaf.relative_bias.variance**0.5
            )
        if (sink := getattr(leaf, "sink", None)) is not None:
            result["attention_sink"] = random.standard_normal((draws, 1)) * sink**0.5
        if leaf.qk_norm is not None and leaf.norm_affine:
            for name in ("query", "key"):
                result[f"{name}.norm.gain"] = np.ones((draws, int(leaf.d_head)))
        return result

    def copies(self, name: str) -> Copies:
        heads = float(self.leaf.heads)
        if name == "attention_sink":
            return Copies(heads, 1.0)
        shared = heads if name.startswith("query") else heads / self._groups
        if over_all_heads(self.leaf):
            return Copies(shared, 1.0 if name.startswith("query") else self._groups)
        return Copies(1.0, heads)

    def _normalised(self, x: Array, own: Arrays, name: str) -> Any:
        leaf = self.leaf
        if leaf.qk_norm is None:
            return x
        if self.sizes is not None:
            size = self.sizes[name]
            x = x / np.reshape(np.resize(size, x.shape[1]), (1, -1, 1))
        else:
            if leaf.qk_norm == "layernorm":
                x = x - np.mean(x, -1, keepdims=True)
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + leaf.norm_epsilon)
        gain = own.get(f"{name}.norm.gain")
        return x if gain is None else x * np.expand_dims(gain, 1)

    def _turned(self, x: Array) -> Any:
        leaf, width = self.leaf, x.shape[-1]
        if leaf.rotary is None:
            return x
        pairs, places = int(leaf.rotary.fraction * width) // 2, np.arange(x.shape[1])
        if leaf.rotary.grid is not None:
            phases = leaf.rotary.angles(places, width)
        else:
            speeds = leaf.rotary.frequencies(width)[0]
            phases = np.outer(places, speeds[len(speeds) - pairs :])  # behind 0, of what stays
        cos, sin = np.cos(phases), np.sin(phases)
        one, two, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
        return np.concatenate([cos * one - sin * two, cos * two + sin * one, rest], -1)

    def __call__(self, entering: Arrays, own: Arrays) -> Any:
        leaf, block = self.leaf, self.latent
        query, key, value = (entering[name] for name in ("query", "key", "value"))
        if block is None:
            query, key = (
                self._turned(self._normalised(x, own, name))
                for x, name in ((query, "query"), (key, "key"))
            )
        else:
            query, nope = query * block.query_factor, block.nope_dim
            key, value = key * block.kv_factor, value * block.kv_factor
            if block.rope_dim:
                query = np.concatenate([query[..., :nope], self._turned(query[..., nope:])], -1)
                key = np.concatenate([key, self._turned(entering["shared"])], -1)
        scale = 1 / (float(leaf.d_head) ** 0.5 * float(leaf.temperature))
        logits = (query @ np.swapaxes(key, -1, -2)) * scale
        if leaf.logit_softcap is not None:
            logits = leaf.logit_softcap * np.tanh(logits / leaf.logit_softcap)
        count, keys = logits.shape[-2:]
        offset = np.subtract.outer(np.arange(count), np.arange(keys))
        if "alibi" in own:
            logits = logits - np.multiply.outer(own["alibi"], np.abs(offset))
        if leaf.relative_bias is not None:
            bucket = leaf.relative_bias.bucket(-offset, leaf.causal)
            logits = logits + own["relative_bias"][:, bucket]
        seen = np.ones((count, keys), bool)
        if isinstance(leaf, SelfAttention):
            (seen,) = self_masks(dataclasses.replace(leaf, sequences=1, padding=None), count, 1)
        most = np.where(seen, plain(logits), -np.inf).max(-1, keepdims=True)
        sink = own.get("attention_sink")
        if sink is not None:
            sink = np.expand_dims(sink, -1)
            most = np.maximum(most, plain(sink))
        weights = np.exp(np.where(seen, logits - most, -700.0)) * seen
        total = np.sum(weights, -1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - most)
        weights = weights / total
        if leaf.drop_prob:  # the same masks before and after a step
            kept = 1.0 - float(leaf.drop_prob)
            there = np.random.default_rng(6).random(weights.shape, np.float32) < kept
            weights = weights * there / kept
        result = weights @ value
        return result * sigmoid(entering["attention_gate"]) if self.gate else result


def entrywise(laws: ComponentLaws) -> Callable[[Array], Array]:
    """An activation as an operation of the tape."""
    if laws.entrywise is None:
        raise DomainError(f"the function of {laws.name} is not known")
    function, derivative = laws.entrywise

    def times(factor: Any) -> Callable[[Any], Any]:
        return lambda g: g * factor

    def as_precise(y: Array, x: Array) -> Array:
        return np.asarray(y, np.result_type(x))

    slope = primitive(
        lambda x: as_precise(derivative(NUMPY, x), x),
        lambda r, x: times(as_precise(bend(derivative, plain(x)), plain(x))),
    )
    return primitive(lambda x: as_precise(function(NUMPY, x), x), lambda r, x: times(slope(x)))


def bend(derivative: Callable[..., Array], x: Array) -> Array:
    """The second derivative by central differences of the first; a kink, at which there is none,
    counts as none."""
    step = 1e-3
    with np.errstate(over="ignore"):
        above, below = (np.asarray(derivative(NUMPY, x + one) + 0 * x) for one in (step, -step))
    return np.where(np.abs(above - below) > KINK, 0.0, (above - below) / (2 * step))


KINK = 0.1
"""Change of a slope over two thousandths beyond which it jumps."""


@dataclass(frozen=True)
class Units:
    """Hidden features of all experts behind their gates: some of every expert.

    Attributes:
        router: how gates follow from logits.
        laws: of the activation.
        width: hidden features of an expert.
        gated: whether there is a gate's matrix besides that of the factor.
        inward: whether an expert's gate multiplies what it reads.
        shift, clamp: of a gated unit (`GatedLinear`).
        names: of the sections: the router's, and those of the matrices.
        chosen: (N, T, E) 1 for the experts that are chosen; None: by their logits.
    """

    router: Router
    laws: ComponentLaws
    width: int
    gated: bool
    inward: bool
    shift: float
    clamp: float | None
    names: tuple[str, ...]
    chosen: Array | None = None
    pairs: int = 0

    def settled(self, entering: Arrays) -> Units:
        """With the choice of experts made, at these logits."""
        return dataclasses.replace(self, chosen=self.router.choice(entering[self.names[0]]))

    @property
    def _some(self) -> int:
        return max(1, min(self.width, 512 // self.router.experts))

    @property
    def features(self) -> int:
        return self.router.experts * self._some

    @property
    def sections(self) -> dict[str, Section]:
        router, *maps = self.names
        experts, some = self.router.experts, self._some
        result = {router: Section(experts, experts, self.width / some)}
        return result | dict.fromkeys(maps, Section(experts * self.width, experts * some))

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        return {}

    def gates(self, logits: Array) -> Any:
        """Of (..., E) logits, the choice a constant to the derivative."""
        router, fixed = self.router, plain(logits)
        chosen = router.choice(fixed) if self.chosen is None else self.chosen
        if router.logistic:
            weight = sigmoid(logits)
        else:
            weight = np.exp(logits - fixed.max(-1, keepdims=True))
        kept = weight * chosen
        if router.normalised == "none":
            return router.scale * kept
        among = kept if router.normalised == "chosen" else weight
        return router.scale * kept / np.sum(among, -1, keepdims=True)

    def __call__(self, entering: Arrays, own: Arrays) -> Any:
        logits, *maps = (entering[name] for name in self.names)
        shape = (*logits.shape, self._some)
        gates = np.expand_dims(self.gates(logits), -1)
        hidden = [np.reshape(x, shape) for x in maps]
        if self.inward:
            hidden = [gates * x for x in hidden]
        act = entrywise(self.laws)
        if self.gated:
            gate, factor = hidden
            if self.clamp is not None:
                gate = np.minimum(gate, self.clamp)
                factor = np.maximum(np.minimum(factor, self.clamp), -self.clamp)
            result = act(gate) * (factor + self.shift)
        else:
            result = act(hidden[0])
        result = result if self.inward else gates * result
        return np.reshape(result, (*logits.shape[:2], self.features))


def routed_apart(change: Change, gates: Array, gradient: Array) -> Change:
    """With what P varies by as the tokens that share experts vary over draws of the router.

    P is in proportion to what two tokens have of experts in common, sum_e g_e g'_e of (draws, T, E)
    gates.
    """
    shared = gates @ np.swapaxes(gates, -1, -2)
    mean = shared.mean(0)
    there = mean > 1e-9 * mean.max()
    every = np.where(there, shared / np.where(there, mean, 1.0), 1.0) * change.coherent
    square = (every @ gradient @ np.swapaxes(every, -1, -2)).mean(0)
    more = square - between(change.coherent, gradient, change.coherent)
    return dataclasses.replace(change, total=change.total + more)
