"""One draw of a block: heads, experts or convolutions as functions of drawn preactivations.

The laws of these blocks give moments of two tokens at a time, or are draws themselves. So a change
goes through draws of the function f: of its preactivations p_k, the outputs of its matrices, and of
the gradient at its output. With J_k = df/dp_k, a change u_k = -P_k delta_k + noise gives

    P = E sum_k J_k P_k J_k^T,    U = E |f(p + u) - f(p)|^2,    M = E sum_k J_k M_k J_k^T + drift,

the first by probes e of identity kernel, as E (J P J^T e) e^T, the second by evaluating f at p + u
and p - u, which includes changes of the chosen experts. Derived here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
from ..layers.recurrent.drawn import (
    FIXED,
    Copies,
    Section,
    copies,
    gram,
    on_lists,
    root_of,
    rows_of,
)
from ..layers.recurrent.heads import convolved, sigmoid
from ..layers.recurrent.mixers import taps
from ..model.mixers import LatentAttention, ShortConvolution
from ..model.positions import alibi_slopes
from .change import Array, Change, between
from .rules import Drawn as DrawnRows
from .rules import spread

Arrays = dict[str, Any]

NUMBERS, LEAST, MOST = 2**21, 8, 256
"""Entries of all draws' matrices over pairs of tokens and of rows; and least and most draws."""

ROWS = 4096
"""Most rows of a matrix whose gradients are drawn for the sign rule."""

TINY, NOTHING = 1e-5, 1e-12
"""Relative change below which differences would lose digits: they are taken at this size, with the
experts chosen before the step (the number of tokens that change experts is linear in the change,
other second-order effects quadratic, so that single draws would dominate). And share of the mean
squared gradient below which a row's is set to 0."""


class _Probe(NamedTuple):
    """Cotangents of independent tokens at a block's output, and their pullback."""

    rows: Array
    pulled: dict[str, Array]


class Draws(NamedTuple):
    """Draws of a block.

    Attributes:
        samples: number of draws, N.
        preactivations, own: (N, ...) by section, and by parameter of the function itself.
        run: the function of both; `run_fixed`: with the experts chosen at these preactivations.
        output: (N, T, features).
        push: derivative of the output along changes of both.
        delta, pulled: gradients at the output, and their pullback by section and parameter.
        unit_probe, sized_probe: probes of identity kernel, and these times `sizes`.
        sizes: (T,) root mean square gradients of the tokens, 0 where negligible.
    """

    samples: int
    preactivations: Arrays
    own: Arrays
    run: Callable[..., Array]
    run_fixed: Callable[..., Array]
    output: Array
    push: Callable[..., Array]
    delta: Array
    pulled: Arrays
    unit_probe: _Probe
    sized_probe: _Probe
    sizes: Array


@dataclass(frozen=True, eq=False)
class Block:
    """A block at the kernels of both passes.

    Attributes:
        head: the function.
        matrices: by section, whose preactivations they give.
        reads: (T, T) kernels of the matrices' inputs.
        received: (T, T) gradient at the output.
        features: width of the whole output.
        known: predicted squared norms of the matrices' gradients, by section; others are drawn.
        sequences: number of sequences in the T tokens.
        gains: fan_in times variance of matrices inside the function.
        factors: multiply preactivations before the function.
        predicted: (T, T) gradients at the matrices' outputs, by section; others are drawn.
        named: maps the function's own parameters to their names in the model.
    """

    head: Any
    matrices: Mapping[str, LawMatrix]
    reads: Mapping[str, Array]
    received: Array
    features: float
    known: Mapping[str, float]
    sequences: int = 1
    gains: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, Array] = field(default_factory=dict)
    named: Callable[[str], str] = str

    def narrowed(self, features: int) -> Block:
        """The block with draws of so few features that whole ones make up `features`, if it can."""
        if features % self.head.features == 0 or not hasattr(self.head, "most"):
            return self
        most = math.gcd(features, self.head.features) if features > self.head.features else features
        head = dataclasses.replace(self.head, most=most)
        return dataclasses.replace(self, head=head, predicted=self.gradients)

    @functools.cached_property
    def draws(self) -> Draws:
        head, tokens, sections = self.head, len(self.received), self.head.sections
        rows = head.features + sum(one.drawn for one in sections.values())
        pairs = head.pairs * tokens * tokens // self.sequences
        pairs += getattr(head, "states", 0) * tokens
        count = int(np.clip(NUMBERS // (pairs + rows * tokens), LEAST, MOST))

        def drawn(features: int, root: Array, name: str) -> Array:
            return np.swapaxes(rows_of(count, features, len(root), name) @ root, 1, 2)

        roots, inputs = dict[int, Array](), {}
        for name, section in sections.items():
            read, matrix = self.reads[name], self.matrices[name]
            gain = matrix.fan_in * matrix.variance
            if matrix.bias:
                root = root_of(gain * read + matrix.bias)
            else:  # matrices often have one input
                if id(read) not in roots:
                    roots[id(read)] = root_of(read)
                root = gain**0.5 * roots[id(read)]
            inputs[name] = drawn(section.drawn, root, name)
        own, fixed = self.parameters(np.random.default_rng(0), count)
        run = frozen = self.function(own, fixed)
        if isinstance(head, Units):
            frozen = self.function(own, fixed, head.with_choice(inputs))
        output, pull = pullback(run, *inputs.values(), *own.values())
        _, push = pullback(pull, np.zeros(output.shape))

        def pulled(delta: Array) -> dict[str, Array]:
            return dict(zip((*inputs, *own), pull(delta), strict=True))

        delta = drawn(head.features, root_of(self.received), "gradient")
        probe = np.swapaxes(rows_of(count, head.features, tokens, "probe"), 1, 2)
        # the P of a token diverges as its gradient goes to 0
        sizes = np.sqrt(np.maximum(np.diag(self.received), 0.0))
        sizes = sizes * (sizes > NOTHING * sizes.max(initial=0.0))
        unit, sized = (_Probe(rows, pulled(rows)) for rows in (probe, sizes[:, None] * probe))
        return Draws(
            count, inputs, own, run, frozen, output, push, delta, pulled(delta), unit, sized, sizes
        )

    def _gram(self, name: str) -> Array:
        """(T, T) gradient of a section, from draws."""
        section, draws = self.head.sections[name], self.draws
        scale = section.shared / (draws.samples * section.drawn)
        return np.asarray(gram(draws.pulled[name]) * scale)

    @functools.cached_property
    def gradients(self) -> dict[str, Array]:
        """(T, T) E delta delta at every section."""
        result = {}
        for name, matrix in self.matrices.items():
            kernel = self.predicted[name] if name in self.predicted else self._gram(name)
            square = matrix.fan_in * matrix.fan_out * float(np.vdot(kernel, self.reads[name]))
            result[name] = (self.known.get(name, square) / square if square > 0 else 1.0) * kernel
        return result

    @functools.cached_property
    def drawn_gradients(self) -> dict[str, Array]:
        """Draws of the gradient of every section and own parameter, from all uses of it."""
        result = {}
        for name, pulled in self.draws.pulled.items():
            if name in self.matrices:
                size = float(np.trace(self._gram(name)))
                size = np.trace(self.gradients[name]) / max(size, 1e-300)
                result[name] = size**0.5 * _summed(pulled, self.head.sections[name].shared)
            else:
                result[name] = _summed(pulled, copies(self.head, name).shared)
        return result

    def parameters(self, random: np.random.Generator, draws: int) -> tuple[Arrays, Arrays]:
        """Draw the function's own parameters: trained ones, and constants without a gradient."""
        own = self.head.own(random, draws)
        for name, one in getattr(self.head, "inner", {}).items():
            entries = random.standard_normal((draws, one.fan_in, one.fan_out))
            own[name] = entries * (self.gains[name] / one.fan_in) ** 0.5
        fixed = {name: one for name, one in own.items() if name in FIXED}
        return {name: one for name, one in own.items() if name not in FIXED}, fixed

    def function(self, own: Iterable[str], fixed: Arrays, head: Any = None) -> Callable[..., Array]:
        """The function of the list of preactivations by section and its own parameters."""
        names, own = list(self.head.sections), list(own)
        run = on_lists(head or self.head, names, own, fixed, self.sequences)
        if not self.factors:
            return run
        factors = [self.factors.get(name, 1.0) for name in (*names, *own)]
        return lambda *values: run(*(f * x for f, x in zip(factors, values, strict=True)))

    def parted(self, name: str, y: Any, parts: int) -> Any:
        """Split (N, T, rows) of a section by part of the block: (N parts, T, rows of a part)."""
        heads = y.reshape(*y.shape[:2], -1, self.head.sections[name].drawn)
        index = np.arange(parts) * heads.shape[2] // parts
        return np.swapaxes(heads[:, :, index], 1, 2).reshape(-1, y.shape[1], heads.shape[3])

    def gathered(self, delta: Any, parts: int, rows: int) -> Any:
        """(N, T, rows) cotangents of a section from those of its parts, transpose of `parted`."""
        by_part = np.swapaxes(delta.reshape(-1, parts, *delta.shape[1:]), 1, 2)
        copies = rows // delta.shape[2]
        index = np.arange(parts) * copies // parts
        result = np.stack([by_part[:, :, index == k].sum(2) for k in range(copies)], 2)
        return result.reshape(*result.shape[:2], -1)

    def rows(self, name: str) -> DrawnRows:
        """Drawn gradients of a section's rows across tokens, which are not Gaussian."""
        return _as_rows(self.drawn_gradients[name])

    def columns(self, kernel: Array) -> DrawnRows:
        """Drawn features of the output across tokens, scaled to the trace of `kernel`."""
        result = _as_rows(self.draws.output)
        size = np.trace(kernel) / float((result.values**2).sum() / len(result.values))
        return result._replace(values=size**0.5 * result.values, twins=size**0.5 * result.twins)

    @functools.cached_property
    def excess(self) -> float:
        """As `Site.excess`, over all pairs. For independent Gaussian features the variance of an
        overlap is (K_tt K_ss + K_ts^2)/features."""
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
        """(T, T) mean of first second^T over draws and features of the output."""
        one, two = (np.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in (first, second))
        return np.asarray(one @ two.T / one.shape[1])

    def _by_row(self, delta: Array, kernel: Array) -> Array:
        """Scale the rows' gradients to one norm rho, rho^2 = delta^T K delta: under the sign rule
        the step of a row does not depend on its gradient's size."""
        square = np.maximum(np.sum(delta * (kernel @ delta), 1, keepdims=True), 0.0)
        nonzero = square > NOTHING * square.mean()
        rho = np.sqrt(np.where(nonzero, square, 1.0))
        size = square.mean() / np.mean(rho * nonzero) if nonzero.any() else 1.0
        return np.asarray(np.where(nonzero, size / rho, 0.0) * delta)

    def _linear(self, tangents: Mapping[str, Array], probe: _Probe) -> Array:
        """(T, T) E (J u) e^T, from tangents u that are linear in the probe e."""
        if not any(np.any(one) for one in tangents.values()):
            return np.zeros((self.draws.output.shape[1],) * 2)
        every = (tangents.get(name, 0.0 * pulled) for name, pulled in probe.pulled.items())
        return self._mean(self.draws.push(tuple(every))[0], probe.rows)

    def _averaged(self, parts: Mapping[str, Array]) -> Array:
        """sum_k J_k A_k J_k^T."""
        probe = self.draws.unit_probe
        return self._linear({name: a @ probe.pulled[name] for name, a in parts.items()}, probe)

    def propagated(
        self,
        changes: Mapping[str, Change],
        incoming: Mapping[str, Array],
        reads: Mapping[str, Array],
        steps: Mapping[str, Array],
        follow: Mapping[str, float],
        gradient: Array,
    ) -> tuple[Change, dict[str, float]]:
        """The change of the output; and for each matrix of experts, the mean squared change by its
        step over tokens' chosen experts, relative to that over all experts.

        Args:
            changes: of every section's preactivations.
            incoming: parts of their P from the change of the input, not the matrices' steps.
            reads: kernels of the inputs of matrices with steps by the sign rule, which are not
                linear in rows.
            steps: of own parameters, in every draw.
            follow: coefficients of the own parameters' coherent steps on their gradients.
            gradient: (T, T) at the output.
        """
        draws = self.draws
        parts = {name: change.coherent for name, change in changes.items()}
        stepping = {name: part - incoming[name] for name, part in parts.items()}

        def stepped(name: str, rows: Array) -> Array:
            kernel = reads.get(name)
            rows = rows if kernel is None else self._by_row(rows, kernel)
            return np.asarray(stepping[name] @ rows)

        def coherently(rows: Mapping[str, Array]) -> dict[str, Array]:
            result = {name: incoming[name] @ rows[name] for name in parts}
            moving = [name for name in parts if stepping[name].any()]
            return result | {name: result[name] + stepped(name, rows[name]) for name in moving}

        probe, nonzero = draws.sized_probe, draws.sizes > 0
        tangents = coherently(probe.pulled)
        tangents |= {name: factor * probe.pulled[name] for name, factor in follow.items()}
        coherent = (
            self._linear(tangents, probe) / np.where(nonzero, draws.sizes, 1.0) ** 2 * nonzero
        )
        along_delta = self.features * float(np.vdot(coherent, gradient))
        slope = sum(
            self.matrices[name].fan_out * float(np.vdot(part, self.gradients[name]))
            for name, part in parts.items()
        )
        slope += sum(
            factor
            * copies(self.head, name).times
            * float((self.drawn_gradients[name] ** 2).sum())
            / draws.samples
            for name, factor in follow.items()
        )
        if along_delta > 0 and slope > 0:  # removes the scatter of the probes
            coherent = coherent * (slope / along_delta)
        shifts, along_gradient = dict(steps), coherently(self.drawn_gradients)
        normal = _independent(tuple(shift.shape for shift in along_gradient.values()))
        for (name, shift), noise in zip(along_gradient.items(), normal, strict=True):
            rows = shift.shape[0] * shift.shape[2]
            rest = spread(changes[name].total - gram(shift) / rows)
            shifts[name] = rest @ noise - shift
        every = draws.preactivations | draws.own
        ratios = [np.abs(u).max() / (np.abs(every[k]).max() or 1.0) for k, u in shifts.items()]
        share = float(max(ratios))
        scale = max(TINY / share, 1.0) if share > 0 else 1.0
        run, sides = draws.run if scale == 1.0 else draws.run_fixed, []
        for signed_scale in (scale, -scale):
            shifted = [x + signed_scale * shifts.get(name, 0.0) for name, x in every.items()]
            sides.append(run(*shifted) - draws.output)
        change = (sides[0] - sides[1]) / (2 * scale)
        saturation = self._saturation(change, coherent, gradient)
        coherent = saturation[:, None] * coherent
        total = (self._mean(sides[0], sides[0]) + self._mean(sides[1], sides[1])) / (2 * scale**2)
        drift = self._mean((sides[0] + sides[1]) / (2 * scale**2), draws.output)
        overlap = self._averaged({name: one.overlap for name, one in changes.items()})
        scattered = self.response({name: one.scattered for name, one in changes.items()})
        result = Change(coherent, overlap + drift, total, saturation[:, None] * scattered)
        if not isinstance(self.head, Units):
            return result, {}
        router, *maps = self.head.names
        chosen = self.head.router.choice(draws.preactivations[router])[..., None]
        at_chosen = {}
        for name in maps:
            square = stepped(name, self.drawn_gradients[name]).reshape(*chosen.shape[:-1], -1) ** 2
            if square.any():
                at_chosen[name] = float((chosen * square).mean() / (chosen.mean() * square.mean()))
        return result, at_chosen

    def _saturation(self, change: Array, coherent: Array, gradient: Array) -> Array:
        """(T,) ratio of each token's finite coherent change to the linear one, at most 1, and 1
        within three standard errors: near 0, slopes of a norm are steeper than any change."""
        each = -(change * self.draws.delta).mean(-1)
        linear = np.sum(coherent * gradient, -1)
        positive = linear > 0
        divisor = np.where(positive, linear, 1.0)
        ratio = np.where(positive, each.mean(0) / divisor, 1.0)
        error = np.where(positive, each.std(0) / divisor, 1.0) / self.draws.samples**0.5
        off = np.clip(ratio, 0.0, 1.0) - 1.0
        significance = off**4 / (off**4 + (3 * error) ** 4 + 1e-12)
        return np.asarray(1.0 + off * significance)

    def response(self, parts: Mapping[str, Array]) -> Array:
        """(T, T) response of the output's kernel to overlaps of the stream's tokens, from those of
        the preactivations; 0 where the function averages over tokens."""
        if self.head.pairs:
            return np.zeros((self.draws.output.shape[1],) * 2)
        return self._averaged(parts)


@functools.lru_cache(maxsize=1)
def _independent(shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Standard normal numbers, the same at every rate and in all layers."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape) for shape in shapes]


def _summed(delta: Array, shared: float) -> Array:
    """Sum of the gradients of `shared` independent uses, by those of one use in other draws."""
    return delta if shared <= 1.0 else delta + (shared - 1.0) ** 0.5 * np.roll(delta, 1, axis=0)


def _as_rows(x: Array) -> DrawnRows:
    flat = np.swapaxes(x, 1, 2).reshape(-1, x.shape[1])
    subset = np.random.default_rng(7).permutation(len(flat))[:ROWS]
    return DrawnRows(flat[subset], flat[:0], 0.0)


# --- functions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """Features of a gated short convolution."""

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
        latent: declaration of latent attention, or None.
        gate: number of gates of a head, or 0.
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
        """Draws take the heads in turn or, if they are fewer, heads evenly from first to last."""
        leaf, heads = self.leaf, int(self.leaf.heads)
        result: Arrays = {}
        if leaf.alibi:
            index = np.arange(draws) % heads
            if draws < heads:
                index = np.linspace(0, heads - 1, draws).round().astype(int)
            result["alibi"] = leaf.alibi * np.asarray(alibi_slopes(heads))[index]
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

    def _rotated(self, x: Array) -> Any:
        leaf, width = self.leaf, x.shape[-1]
        if leaf.rotary is None:
            return x
        pairs, positions = int(leaf.rotary.fraction * width) // 2, np.arange(x.shape[1])
        if leaf.rotary.grid is not None:
            phases = leaf.rotary.angles(positions, width)
        else:
            frequencies = leaf.rotary.frequencies(width)[0]  # 0 first, of features that stay
            phases = np.outer(positions, frequencies[len(frequencies) - pairs :])
        cos, sin = np.cos(phases), np.sin(phases)
        first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
        return np.concatenate([cos * first - sin * second, cos * second + sin * first, rest], -1)

    def __call__(self, entering: Arrays, own: Arrays) -> Any:
        leaf, block = self.leaf, self.latent
        query, key, value = (entering[name] for name in ("query", "key", "value"))
        if block is None:
            query, key = (
                self._rotated(self._normalised(x, own, name))
                for x, name in ((query, "query"), (key, "key"))
            )
        else:
            query, nope = query * block.query_factor, block.nope_dim
            key, value = key * block.kv_factor, value * block.kv_factor
            if block.rope_dim:
                query = np.concatenate([query[..., :nope], self._rotated(query[..., nope:])], -1)
                key = np.concatenate([key, self._rotated(entering["shared"])], -1)
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
        mask = np.ones((count, keys), bool)
        if isinstance(leaf, SelfAttention):
            (mask,) = self_masks(dataclasses.replace(leaf, sequences=1, padding=None), count, 1)
        largest = np.where(mask, plain(logits), -np.inf).max(-1, keepdims=True)
        sink = own.get("attention_sink")
        if sink is not None:
            sink = np.expand_dims(sink, -1)
            largest = np.maximum(largest, plain(sink))
        weights = np.exp(np.where(mask, logits - largest, -700.0)) * mask
        total = np.sum(weights, -1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - largest)
        weights = weights / total
        if leaf.drop_prob:  # the same masks before and after a step
            keep = 1.0 - float(leaf.drop_prob)
            dropout = np.random.default_rng(6).random(weights.shape, np.float32) < keep
            weights = weights * dropout / keep
        result = weights @ value
        return result * sigmoid(entering["attention_gate"]) if self.gate else result


def entrywise(laws: ComponentLaws) -> Callable[[Array], Array]:
    """An activation as an operation that `pullback` differentiates."""
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


def gated_unit(
    act: Callable[[Any], Any], gate: Any, factor: Any, shift: float, clamp: float | None
) -> Any:
    """A gated unit of `GatedLinear`."""
    if clamp is not None:
        gate = np.minimum(gate, clamp)
        factor = np.maximum(np.minimum(factor, clamp), -clamp)
    return act(gate) * (factor + shift if shift else factor)


def bend(derivative: Callable[..., Array], x: Array) -> Array:
    """The second derivative by central differences of the first, and 0 at a kink."""
    step = 1e-3
    with np.errstate(over="ignore"):
        above, below = (np.asarray(derivative(NUMPY, x + h) + 0 * x) for h in (step, -step))
    return np.where(np.abs(above - below) > KINK, 0.0, (above - below) / (2 * step))


KINK = 0.1
"""Change of a slope over an interval of .002 that counts as a kink."""


@dataclass(frozen=True)
class Units:
    """Gated hidden features of all experts, of which some of every expert are drawn.

    Attributes:
        router: gates as functions of logits.
        laws: of the activation.
        width: hidden features of an expert.
        gated: whether the experts are gated units, with two matrices.
        inward: whether the router's gate multiplies the expert's input.
        shift, clamp: of a gated unit (`GatedLinear`).
        names: of the sections: the router's, and those of the matrices.
        chosen: (N, T, E) 1 for the chosen experts; None: chosen by the logits.
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

    def with_choice(self, preactivations: Arrays) -> Units:
        """The same function with the experts fixed that these logits choose."""
        return dataclasses.replace(self, chosen=self.router.choice(preactivations[self.names[0]]))

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
        """Gates at (..., E) logits; the choice of experts has no derivative."""
        router, fixed = self.router, plain(logits)
        chosen = router.choice(fixed) if self.chosen is None else self.chosen
        if router.logistic:
            weight = sigmoid(logits)
        else:
            weight = np.exp(logits - fixed.max(-1, keepdims=True))
        gates = weight * chosen
        if router.normalised == "none":
            return router.scale * gates
        among = gates if router.normalised == "chosen" else weight
        return router.scale * gates / np.sum(among, -1, keepdims=True)

    def __call__(self, entering: Arrays, own: Arrays) -> Any:
        logits, *maps = (entering[name] for name in self.names)
        shape = (*logits.shape, self._some)
        gates = np.expand_dims(self.gates(logits), -1)
        hidden = [np.reshape(x, shape) for x in maps]
        if self.inward:
            hidden = [gates * x for x in hidden]
        act: Callable[..., Any] = entrywise(self.laws)
        if self.gated:
            act = functools.partial(gated_unit, act, shift=self.shift, clamp=self.clamp)
        result = act(*hidden)
        result = result if self.inward else gates * result
        return np.reshape(result, (*logits.shape[:2], self.features))


def with_router_variance(change: Change, gates: Array, gradient: Array) -> Change:
    """Add to U the variance of P over draws of the router.

    In each draw P is proportional to the experts that two tokens share, sum_e g_e g'_e of the
    (draws, T, E) gates.
    """
    shared = gates @ np.swapaxes(gates, -1, -2)
    mean = shared.mean(0)
    nonzero = mean > 1e-9 * mean.max()
    coherent = np.where(nonzero, shared / np.where(nonzero, mean, 1.0), 1.0) * change.coherent
    square = (coherent @ gradient @ np.swapaxes(coherent, -1, -2)).mean(0)
    more = square - between(change.coherent, gradient, change.coherent)
    return dataclasses.replace(change, total=change.total + more)
