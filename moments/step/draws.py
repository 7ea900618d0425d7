"""Draws of the network at the T tokens: the scatter of overlaps about kernels, their means.

The overlaps of tokens scatter more at every layer, and are correlated. Over layers they are a
Markov chain, which is drawn forward and backward at the T tokens only: through random matrices that
are never formed (`Draws.behind`), and through norms, softmaxes and units exactly.

See docs/theory/first-step.md, Draws of the network.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.derivative import pullback
from ..engine.response import sum_of
from ..formulas.algebra import NUMPY
from ..layers.attention.self_attention import CrossAttention, SelfAttention
from ..layers.elementary import Activation, Dropout, Linear, Scale
from ..layers.gated import GatedLinear
from ..layers.head.components import Pool
from ..layers.normalization import FiniteNormalization
from ..layers.product import Product
from ..layers.recurrent.leaf import Mixer
from .change import Array, over, resolved
from .ends import Words
from .leaves import block_of
from .rules import Sides, spread
from .sites import ENCODER

if TYPE_CHECKING:
    from .sites import Reading, Site

Key = tuple[int, str]
"""A matrix: its layer and its name."""

Features = np.ndarray[Any, np.dtype[np.float32]]
"""(N, T, features) of N draws."""

Back = Callable[[Features], Features]


@dataclass(eq=False)
class Draws:
    """Draws of both passes.

    Attributes:
        reading: the prediction.
        count: N.
        sides: overlaps at every matrix.
        aligned: by matrix and rule ("sgd", "sign"), the geometric mean over draws of |U x|^2 over
            |x|^2 U^2 m.
    """

    reading: Reading
    count: int
    sides: dict[Key, Sides]
    aligned: dict[tuple[int, str, str], float]
    _rng: Any
    _points: Iterator[Site]
    _prefix: str = ""
    _memory: tuple[Features, Site] | None = None
    _to_memory: Any = 0.0
    _kept: _Read | None = None

    @classmethod
    def shared(cls, reading: Reading) -> Draws | None:
        """`of`, once for a reading."""
        return reading.once(Draws, make=lambda: cls.of(reading))

    @classmethod
    def of(cls, reading: Reading) -> Draws | None:
        """Draw both passes; None if a component has no function of features."""
        tokens = max(len(stream.before) for stream in reading.streams)
        more = 4 if int(np.sum(reading.targets >= 0)) <= _SENDERS else 1
        count = max(2, min(more * _MOST, more * _PAIRS // tokens**2))
        found = cls(reading, count, {}, {}, np.random.default_rng(21), iter(reading.points))
        try:
            found._draw(Words.of(reading))
        except _Undrawn:
            return None
        return found

    def _record(self, key: Key, x: Features, delta: Features) -> None:
        """Record the overlaps at a matrix, and the alignment of its step."""
        self.sides[key] = Sides(self._read(x).overlaps, _overlaps(delta))
        step = _transposed(delta[:, :, :_STEP_ROWS]) @ x
        for rule, taken in (("sgd", step), ("sign", np.sign(step))):
            sizes = [
                (one * one).mean((1, 2), dtype=float) for one in (x @ _transposed(taken), x, taken)
            ]
            if all(np.all(size) for size in sizes):
                met, before, own = (np.log(size).mean() for size in sizes)
                self.aligned[(*key, rule)] = float(np.exp(met - before - own))

    # --- the two passes ------------------------------------------------------------------------

    def _draw(self, words: Words) -> None:
        reading, backs = self.reading, []
        table = self._rows(words)
        for stream in reading.streams:
            main = stream is reading.main
            self._prefix = "" if main else ENCODER
            x = self._entered(stream, table, words, main)
            summed = dataclasses.replace(reading.points[0], index=-1, kernel=stream.before)
            x, back, at = self._through(stream.embedding, x, summed)
            at = next(self._points)
            x, more, at = self._through(stream.layers, x, at)
            x, last, at = self._through(stream.ending, x, at)
            self._memory = x, at
            backs.append((back, more, last))
        delta = self._sent(x, table, words)
        for k, (back, more, last) in enumerate(reversed(backs)):
            # the encoder's gradient is from the layers that read it
            for step in (last, more, back):
                delta = step(delta if k == 0 or step is not last else self._to_memory)

    def _rows(self, words: Words) -> Features:
        """(N, V', d) rows of the matrix to the logits, with a subset of those of words that do not
        occur in the batch."""
        readout = self.reading.readout
        some = max(_FEWEST, _REST // self.count)
        rows = len(words.rows) - 1 + min(round(float(words.rows[-1])), some)
        shape = self.count, rows, round(float(readout.width))
        return self._normal(shape) * np.float32(readout.weight_variance**0.5)

    def _entered(self, stream: Any, table: Features, words: Words, main: bool) -> Features:
        """The sum of the tables, with the rows of a tied head."""
        token, kernel = stream.token_table, stream.before
        d = self.reading.model.d_model
        if not self.reading.tied or token is None:
            return self._of_kernel(kernel, d)
        rest = kernel - token.amplitude**2 * token.variance * token.same
        read = words.read if main else words.encoder_read
        own: Features = np.float32(token.amplitude) * table[:, read]
        return np.asarray(own + self._of_kernel(rest, d))

    def _sent(self, x: Features, table: Features, words: Words) -> Features:
        """The gradient of the loss at the input of the matrix to the logits."""
        readout, drawn = self.reading.readout, table.shape[1]
        log_rows = np.zeros(drawn, np.float32)
        rest = drawn - len(words.rows) + 1
        log_rows[-rest:] = np.log(words.rows[-1] / rest)
        logits = np.float32(readout.scale) * (x @ _transposed(table)) + log_rows
        sent = np.exp(logits - logits.max(2, keepdims=True))
        sent /= sent.sum(2, keepdims=True)
        active = np.flatnonzero(words.target >= 0)
        sent[:, active, words.target[active]] -= 1
        weights = (words.target >= 0) / len(active)
        if self.reading.batches is not None:
            weights = weights * self.reading.batches.factors(len(weights))
        sent *= weights.astype(np.float32)[:, None]
        return np.asarray(np.float32(readout.scale) * (sent @ table))

    def _through(self, part: Component, x: Features, at: Site) -> tuple[Features, Back, Site]:
        """Output of a component, its backward pass, and its site."""
        if isinstance(part, Chain):
            backs: list[Back] = []
            for one in part.children:
                x, back, at = self._through(one, x, at)
                backs.append(back)
            return x, lambda delta: functools.reduce(lambda d, to: to(d), backs[::-1], delta), at
        if isinstance(part, Layer):
            x, back, _ = self._through(part.body, x, at)
            return x, back, next(self._points)
        if isinstance(part, Residual):
            kept, added = np.float32(part.skip_scale), np.float32(part.branch_scale)
            y, back, _ = self._through(part.branch, x, at)
            leaving = next(self._points)

            def both(delta: Features) -> Features:
                return np.asarray(kept * delta + back(added * delta))

            return kept * x + added * y, both, leaving
        if isinstance(part, Parallel):
            found = [self._through(branch, x, at) for branch in part.branches]
            return (
                sum_of([y for y, *_ in found]),
                lambda delta: sum_of([back(delta) for _, back, _ in found]),
                found[-1][2],
            )
        skips = isinstance(part, Product)  # skip the sites inside a product
        leaving = next(p for p in self._points if not skips or p.name.endswith(part.label))
        y, back = self.leaf(part, x, at, leaving)
        return y, back, leaving

    # --- draws ---------------------------------------------------------------------------------

    def _normal(self, shape: tuple[int, ...]) -> Features:
        """Independent standard normal entries."""
        return np.asarray(self._rng.standard_normal(shape, np.float32))

    def _of_kernel(self, kernel: Array, width: float) -> Features:
        shape = self.count, len(kernel), round(float(width))
        return np.asarray(spread(kernel).astype(np.float32) @ self._normal(shape))

    def _mapped(self, read: _Read, width: float, variance: float) -> Features:
        """The product with a fresh random matrix of entries of that variance."""
        (count, tokens, n), m = read.features.shape, round(float(width))
        scale, by_root = np.float32(variance**0.5), n > tokens
        found = self._normal((count, tokens if by_root else n, m))
        return np.asarray(scale * ((read.root if by_root else read.features) @ found))

    def _read(self, x: Features) -> _Read:
        """`_Read`, shared by successive matrices with the same input."""
        if self._kept is None or self._kept.features is not x:
            self._kept = _Read(x)
        return self._kept

    def behind(self, x: Features, width: float, variance: float) -> tuple[Features, Back]:
        """y = W x of a random matrix, and the backward pass through the same W. Given y, W is y x^+
        on the span of x and independent of y outside of it:

            W^T delta = f + (delta y^T - f x^T) (x x^T)^+ x,  f fresh, of kernel v delta delta^T.

        Directions in which x is near rounding have both terms, with weights of squared sum 1.
        """
        y = self._mapped(self._read(x), width, variance)

        def back(delta: Features) -> Features:
            fresh, read = self._mapped(_Read(delta), x.shape[2], variance), self._read(x)
            known = delta @ _transposed(y) @ read.known - fresh @ _transposed(x) @ read.taken
            return np.asarray(fresh + known @ x)

        return y, back

    # --- components ----------------------------------------------------------------------------

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, x: Features, at: Site, leaving: Site) -> tuple[Features, Back]:
        """Output features of a leaf and its backward pass, by its class; extended as `Walk.leaf`
        is."""
        raise _Undrawn

    @leaf.register(Linear)
    def linear(self, leaf: Linear, x: Features, at: Site, leaving: Site) -> tuple[Features, Back]:
        given = leaf.parameters
        variance, key = float(given["weight_variance"]), (leaving.layer, self._prefix + leaf.weight)
        y, sent = self.behind(x, given["fan_out"], variance)
        y = y + self._bias(float(given.get("bias_variance", 0.0)), y)

        def back(delta: Features) -> Features:
            self._record(key, x, delta)
            return sent(delta)

        return y, back

    def _bias(self, variance: float, like: Features) -> Any:
        if not variance:
            return np.float32(0.0)
        return np.float32(variance**0.5) * self._normal((self.count, 1, like.shape[2]))

    @leaf.register(Activation)
    def activation(self, leaf: Activation, x: Features, *_: Any) -> tuple[Features, Back]:
        value, slope = _entrywise(leaf.laws, x)
        return value, lambda delta: slope * delta

    @leaf.register(GatedLinear)
    def gated(
        self, leaf: GatedLinear, x: Features, at: Site, leaving: Site
    ) -> tuple[Features, Back]:
        variances = float(leaf.gate), float(leaf.ffn_in)
        (gate, by_gate), (factor, by_factor) = (
            self.behind(x, leaf.fan_out, one) for one in variances
        )
        gate = gate + self._bias(float(leaf.gate_bias), gate)
        factor = factor + self._bias(float(leaf.bias), factor)
        value, slope = _entrywise(leaf.activation, gate)
        prefix = self._prefix

        def back(delta: Features) -> Features:
            sent = delta * slope * factor, delta * value
            for name, one in zip(leaf.matrices, sent, strict=True):
                self._record((leaving.layer, prefix + name), x, one)
            return by_gate(sent[0]) + by_factor(sent[1])

        return value * factor, back

    @leaf.register(FiniteNormalization)
    def norm(self, leaf: FiniteNormalization, x: Features, *_: Any) -> tuple[Features, Back]:
        if leaf.groups != 1:
            raise _Undrawn
        centred = (lambda h: h - h.mean(2, keepdims=True)) if leaf.centres else (lambda h: h)
        x = centred(x)
        inverse = 1 / np.sqrt((x * x).mean(2, keepdims=True) + np.float32(leaf.epsilon))
        y, gain = inverse * x, np.float32(leaf.gain)

        def back(delta: Features) -> Features:
            along = y * (y * delta).mean(2, keepdims=True)
            return np.asarray(gain * inverse * (centred(delta) - along))

        return gain * y, back

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, x: Features, *_: Any) -> tuple[Features, Back]:
        kept = 1.0 - float(leaf.parameters["drop_prob"])
        mask = (self._rng.random(x.shape, np.float32) < kept) / np.float32(kept)
        return mask * x, lambda delta: mask * delta

    @leaf.register(Scale)
    def scale(self, leaf: Scale, x: Features, *_: Any) -> tuple[Features, Back]:
        factor = np.float32(float(leaf.parameters["weight_variance"]) ** 0.5)
        return factor * x, lambda delta: factor * delta

    @leaf.register(Pool)
    def pool(self, leaf: Pool, x: Features, *_: Any) -> tuple[Features, Back]:
        weights = np.asarray(leaf.weights(x.shape[1]), np.float32)
        return weights @ x, lambda delta: weights.T @ delta

    @leaf.register(SelfAttention)
    @leaf.register(CrossAttention)
    @leaf.register(Product)
    @leaf.register(Mixer)
    def drawn(self, leaf: Any, x: Features, at: Site, leaving: Site) -> tuple[Features, Back]:
        crossed = isinstance(leaf, CrossAttention)
        memory, there = self._memory if crossed and self._memory else (x, at)
        block = block_of(leaf, self.reading, at, leaving, there)
        features = block.head.features
        parts = round(block.features / features)
        read, ways, given = {}, {}, []
        for name, matrix in block.matrices.items():
            read[name] = memory if name in ("key", "value") else x
            y, ways[name] = self.behind(read[name], matrix.fan_out, matrix.variance)
            given.append(block.parted(name, y + self._bias(matrix.bias or 0.0, y), parts))
        own, fixed = block.parameters(self._rng, self.count * parts)
        output, pull = pullback(block.function(own, fixed), *given, *own.values())

        def back(delta: Features) -> Features:
            apart = np.swapaxes(delta.reshape(*delta.shape[:2], parts, features), 1, 2)
            sent = pull(apart.reshape(output.shape).astype(float))
            result = {}
            for (name, way), one in zip(ways.items(), sent, strict=False):
                matrix = block.matrices[name]
                one = block.gathered(np.asarray(one, np.float32), parts, matrix.fan_out)
                self._record((leaving.layer, self._prefix + matrix.name), read[name], one)
                result[name] = way(one)
            if not crossed:
                return np.asarray(sum_of(list(result.values())))
            self._to_memory = self._to_memory + result["key"] + result["value"]
            return result["query"]

        y = np.swapaxes(output.reshape(self.count, parts, -1, features), 1, 2)
        return y.reshape(*y.shape[:2], -1).astype(np.float32), back


_MOST, _PAIRS = 64, 2**16
"""Largest number of draws, and of pairs of tokens in all draws; at least two draws."""

_SENDERS = 8
"""Number of targets up to which there are four times as many draws, as these scatter more."""

_REST, _FEWEST = 2**14, 512
"""Drawn rows of the matrix to the logits for words outside of the batch: in all draws, and at
least in each. With R rows, the gradients that all tokens share are 1/R of their own."""


class _Read:
    """Input features of matrices, with functions of x x^T."""

    def __init__(self, features: Features) -> None:
        self.features, self.overlaps = features, _overlaps(features)

    @functools.cached_property
    def _eigen(self) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(self.overlaps)
        return values * self.features.shape[2], vectors

    def _with(self, values: Array) -> Features:
        vectors = self._eigen[1]
        return np.asarray((vectors * values[:, None]) @ np.swapaxes(vectors, 1, 2), np.float32)

    @functools.cached_property
    def root(self) -> Features:
        """Symmetric root of x x^T (`spread`)."""
        return self._with(np.sqrt(np.maximum(self._eigen[0], 0.0)))

    @functools.cached_property
    def known(self) -> Features:
        """(x x^T)^+ for the part of W that is known from y."""
        values = self._eigen[0]
        return self._with(over(np.sqrt(resolved(values)), values))

    @functools.cached_property
    def taken(self) -> Features:
        """(x x^T)^+ for the part of a fresh draw that it replaces."""
        values = self._eigen[0]
        return self._with(over(1 - np.sqrt(1 - resolved(values)), values))


_STEP_ROWS = 128
"""Rows of a step from which its alignment is computed."""


class _Undrawn(Exception):
    """A component without a function of features."""


def _entrywise(laws: Any, x: Features) -> tuple[Features, Features]:
    """A function's values and slopes."""
    if laws.entrywise is None:
        raise _Undrawn
    with np.errstate(over="ignore"):
        value, slope = (np.asarray(one(NUMPY, x), np.float32) for one in laws.entrywise)
    return value, slope


def _overlaps(x: Features) -> Array:
    """(N, T, T) mean over features, in full precision: a square of singular values."""
    return np.stack([one @ one.T / one.shape[1] for one in (one.astype(float) for one in x)])


def _transposed(x: Features) -> Features:
    return np.swapaxes(x, -1, -2)
