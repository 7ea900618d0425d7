"""Draws of the network at the T tokens: the scatter of overlaps about kernels, their means.

The overlaps of tokens scatter more at every layer, and are correlated. Over layers they are a
Markov chain, which is drawn forward and backward at the T tokens only: through random matrices that
are never formed (`Draws.behind`), and through norms, softmaxes and units exactly.

See docs/theory/first-step.md, Draws of the network.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine.derivative import pullback
from ..errors import DomainError
from ..layers.attention.self_attention import CrossAttention
from .change import Array, over, resolved
from .ends import Words
from .leaves import block_of
from .network import Before, DrawnNetwork, Function, Key, Step, StepAndOutput, chained
from .rules import Sides, spread
from .sites import ENCODER, Reading, Site

Features = np.ndarray[Any, np.dtype[np.float32]]
"""(N, T, features) of N draws."""

Back = Callable[[Features], Features]


class Draws(DrawnNetwork):
    """Draws of both passes.

    Attributes:
        count: N.
        sides: overlaps at every matrix.
        aligned: by matrix and rule ("sgd", "sign"), the geometric mean over draws of |U x|^2 over
            |x|^2 U^2 m.
    """

    subject = "the pass over draws"

    def __init__(self, reading: Reading, count: int, rng: np.random.Generator) -> None:
        super().__init__(reading, rng)
        self.count = count
        self.sides: dict[Key, Sides] = {}
        self.aligned: dict[tuple[int, str, str], float] = {}
        self._memory: tuple[Features, Site] | None = None
        self._memory_cotangent: Any = np.float32(0.0)
        self._last_input: _Read | None = None

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
        draws = cls(reading, count, np.random.default_rng(21))
        try:
            with np.errstate(over="ignore"):
                draws._draw(Words.of(reading))
        except DomainError:
            return None
        return draws

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
        reading, passes = self.reading, []
        table = self._rows(words)
        for stream in reading.streams:
            main = stream is reading.main
            self.prefix = "" if main else ENCODER
            x = self._entered(stream, table, words, main)
            summed = dataclasses.replace(reading.points[0], index=-1, kernel=stream.before)
            embedding, at, x = self.component(stream.embedding, summed, x)
            layers, at, x = self.component(stream.layers, next(self._points), x)
            ending, at, x = self.component(stream.ending, at, x)
            self._memory = x, at
            passes.append(chained([embedding, layers, ending]))
        delta = self._head_gradient(x, table, words)
        for _, back in reversed(passes):
            back(delta)
            delta = self._memory_cotangent  # the encoder's, from the layers that read it

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

    def _head_gradient(self, x: Features, table: Features, words: Words) -> Features:
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

    # --- draws ---------------------------------------------------------------------------------

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
        if self._last_input is None or self._last_input.features is not x:
            self._last_input = _Read(x)
        return self._last_input

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

    def drawn_matrix(
        self, x: Features, shape: tuple[float, float], variance: float, rows: int = 0
    ) -> tuple[tuple[Features, Back], Features]:
        y, back = self.behind(x, rows or shape[1], variance)
        return (x, back), y

    def matrix(self, key: Key, drawn: tuple[Features, Back], *_: Any) -> Step:
        x, back = drawn

        def recorded(delta: Features) -> Features:
            self._record(key, x, delta)
            return back(delta)

        return _no_change, recorded

    def function(
        self, run: Callable[..., Any], values: Sequence[Array], gradient: Array
    ) -> tuple[Function, Features]:
        output, pull = pullback(run, *values)

        def back(delta: Features) -> list[Array]:
            return [np.asarray(cotangent, np.float32) for cotangent in pull(delta)]

        return (_no_change, back), np.asarray(output, np.float32)

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site, x: Features) -> StepAndOutput:
        return super().leaf(leaf, at, leaving, x)

    @leaf.register(CrossAttention)
    def cross_attention(
        self, leaf: CrossAttention, at: Site, leaving: Site, x: Features
    ) -> StepAndOutput:
        assert self._memory is not None
        memory, site = self._memory

        def to_memory(delta: Features) -> Features:
            self._memory_cotangent = self._memory_cotangent + delta
            return np.zeros((), np.float32)

        block = block_of(leaf, self.reading, at, leaving, site)
        read: Before = ("key", "value"), (_no_change, to_memory), memory
        return self.drawn_block(block, leaving.layer, x, [read])


def _no_change(*_: Array) -> Array:
    """Changes of the input are not followed."""
    return np.zeros((), np.float32)


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


def _overlaps(x: Features) -> Array:
    """(N, T, T) mean over features, in full precision: a square of singular values."""
    return np.stack([one @ one.T / one.shape[1] for one in (one.astype(float) for one in x)])


def _transposed(x: Features) -> Features:
    return np.swapaxes(x, -1, -2)
