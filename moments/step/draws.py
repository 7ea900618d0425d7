"""Draws of a network at the T tokens of a batch, component by component.

`DrawnNetwork` runs a declaration's components on drawn features; its subclasses say how a random
matrix is drawn and what is computed at it. `Hessian` (`sharpness`) adds the steps of all
parameters. `Draws` has the scatter of tokens' overlaps about kernels, their means: it grows at
every layer, and is correlated. Over layers overlaps are a Markov chain, which is drawn forward and
backward through random matrices that are never formed (`Draws.behind`), and through norms,
softmaxes and units exactly.

See docs/theory/first-step.md, Draws of the network.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.derivative import pullback
from ..engine.response import sum_of
from ..errors import DomainError
from ..layers.attention.self_attention import CrossAttention, SelfAttention
from ..layers.elementary import Activation, Dropout, Linear, Scale
from ..layers.gated import GatedLinear
from ..layers.head.components import Pool
from ..layers.normalization import FiniteNormalization
from ..layers.product import Product
from ..layers.recurrent.leaf import Mixer
from .change import over, resolved
from .drawn import Block, entrywise, gated_unit
from .ends import Words
from .leaves import SHARED_KEY, block_of
from .rules import Sides, spread
from .sites import ENCODER, Reading, Site

Array = np.ndarray[Any, np.dtype[Any]]

Key = tuple[int, str]
"""A parameter: its layer and its name."""

Step = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""Forward pass of a change of the input, (..., T, features), and backward pass of its cotangent."""

Back = Callable[[Array], Array]

StepAndOutput = tuple[Step, Array]
"""A component's step, and its output at the drawn input."""

Function = tuple[Callable[..., Array], Callable[[Array], list[Array]]]
"""Forward pass of changes of all arguments of a function, and backward pass to all of them."""

Before = tuple[tuple[str, ...], Step, Array]
"""Sections of a block whose matrices read another tensor than the block's input, the step from that
input to the tensor, and the tensor."""

Preactivations = tuple[int, dict[str, Any], dict[str, Array]]
"""Number of drawn parts of a block, its matrices, and their outputs (parts, T, rows)."""


class DrawnNetwork:
    """A drawn network, of features (..., T, features) in single precision.

    Attributes:
        subject: what is computed, for errors.
        share: of the features that are drawn.
        prefix: of the names of parameters in the current stream.

    Args:
        reading: kernels of signal and gradient at every site.
        rng: generator of the draws.
    """

    subject: str
    share: float = 1.0
    prefix: str = ""

    def __init__(self, reading: Reading, rng: np.random.Generator) -> None:
        self.reading, self.rng = reading, rng
        self._points: Iterator[Site] = iter(reading.points)

    # --- what subclasses define ----------------------------------------------------------------

    def drawn_matrix(
        self, x: Array, shape: tuple[float, float], variance: float, rows: int = 0
    ) -> tuple[Any, Array]:
        """Draw an (n, m) matrix, with `rows` outputs unless that is 0, and its output at x."""
        raise NotImplementedError

    def matrix(
        self,
        key: Key,
        drawn: Any,
        kernel: Array,
        gradient: Array,
        shape: tuple[float, float],
        bias: bool,
        whole: tuple[Key, float] | None = None,
    ) -> Step:
        """Step of a drawn (n, m) matrix and of its bias if it has one. `kernel` and `gradient`,
        (T, T), are per feature of its input and output; `whole` is the parameter whose rows these
        are and its number of entries, if not `key` and n m."""
        raise NotImplementedError

    def function(
        self, run: Callable[..., Any], values: Sequence[Array], gradient: Array
    ) -> tuple[Function, Array]:
        """Backward pass of run(*values), with a cotangent of kernel `gradient`, and its output."""
        output, pull = pullback(run, *values)

        def back(delta: Array) -> list[Array]:
            return [np.asarray(cotangent, np.float32) for cotangent in pull(delta)]

        return (no_change, back), np.asarray(output, np.float32)

    def norm_parameters(self, leaf: FiniteNormalization, leaving: Site, y: Array) -> list[Step]:
        """Steps of a norm's gains and biases, at its output y."""
        return []

    def own_parameter(
        self, block: Block, layer: int, name: str, values: Array
    ) -> tuple[Callable[[], Any], Callable[[Array], None]]:
        """Change of a parameter inside a block's function, and use of its cotangent."""
        return no_change, lambda cotangent: None

    def gradients_before(
        self, run: Callable[..., Any], values: Sequence[Array], gradient: Array
    ) -> list[Array]:
        """Kernels of the gradients at the arguments of an entrywise function, from that behind."""
        return [gradient] * len(values)

    def fitted(self, y: Array, site: Site) -> Array:
        """A component's output, as the next component reads it."""
        return y

    # --- draws ---------------------------------------------------------------------------------

    def _features(self, width: float) -> int:
        return max(1, round(float(width) * self.share))

    def _normal(self, shape: tuple[int, ...]) -> Array:
        """Independent standard normal numbers."""
        return np.asarray(self.rng.standard_normal(shape, np.float32))

    def _with_bias(self, y: Array, variance: float) -> Array:
        """y plus a drawn bias."""
        if not variance:
            return y
        return y + np.float32(variance**0.5) * self._normal((*y.shape[:-2], 1, y.shape[-1]))

    # --- components ----------------------------------------------------------------------------

    def component(self, part: Component, at: Site, x: Array) -> tuple[Step, Site, Array]:
        """A component's step, the site after it, and its output at x."""
        if isinstance(part, Chain):
            steps = []
            for child in part.children:
                step, at, x = self.component(child, at, x)
                steps.append(step)
            return chained(steps), at, x
        if isinstance(part, Layer):
            step, _, x = self.component(part.body, at, x)
            return step, next(self._points), x
        if isinstance(part, Residual):
            skip, scale = np.float32(part.skip_scale), np.float32(part.branch_scale)
            (forward, back), _, y = self.component(part.branch, at, x)
            step = (
                lambda x: skip * x + scale * forward(x),
                lambda delta: skip * delta + back(scale * delta),
            )
            site = next(self._points)
            return step, site, self.fitted(skip * x + scale * y, site)
        if isinstance(part, Parallel):
            branches = [self.component(branch, at, x) for branch in part.branches]
            step = (
                lambda x: sum_of([forward(x) for (forward, _), *_ in branches]),
                lambda delta: sum_of([back(delta) for (_, back), *_ in branches]),
            )
            return step, branches[-1][1], sum_of([y for *_, y in branches])
        skips = isinstance(part, Product)  # skip the sites inside a product
        leaving = next(p for p in self._points if not skips or p.name.endswith(part.label))
        step, y = self.leaf(part, at, leaving, x)
        return step, leaving, self.fitted(y, leaving)

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        """A leaf's step and its output at x, by its class; extended as `Walk.leaf` is.

        Raises:
            DomainError: the class is not registered.
        """
        raise DomainError(f"{self.subject} does not cover {type(leaf).__name__} ({leaf.label})")

    @leaf.register(Linear)
    def linear(self, leaf: Linear, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        law, key = leaf.parameters, (leaving.layer, self.prefix + leaf.weight)
        shape = float(law["fan_in"]), float(law["fan_out"])
        drawn, y = self.drawn_matrix(x, shape, float(law["weight_variance"]))
        step = self.matrix(key, drawn, at.kernel, leaving.gradient, shape, leaf.has_bias)
        return step, self._with_bias(y, float(law.get("bias_variance", 0.0)))

    @leaf.register(Activation)
    def activation(self, leaf: Activation, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        (forward, back), y = self.function(entrywise(leaf.laws), [x], leaving.gradient)
        return (forward, lambda delta: back(delta)[0]), y

    @leaf.register(GatedLinear)
    def gated(self, leaf: GatedLinear, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        shape = float(leaf.fan_in), float(leaf.fan_out)
        gate_matrix, gate = self.drawn_matrix(x, shape, float(leaf.gate))
        factor_matrix, factor = self.drawn_matrix(x, shape, float(leaf.ffn_in))
        gate = self._with_bias(gate, float(leaf.gate_bias))
        factor = self._with_bias(factor, float(leaf.bias))
        act = entrywise(leaf.activation)

        def run(gate: Any, factor: Any) -> Any:
            return gated_unit(act, gate, factor, leaf.shift, leaf.clamp)

        (product, product_back), y = self.function(run, [gate, factor], leaving.gradient)
        gradients = self.gradients_before(run, [gate, factor], leaving.gradient)
        matrices = [
            self.matrix(
                (leaving.layer, self.prefix + name),
                drawn,
                at.kernel,
                gradient,
                shape,
                leaf.has_bias,
            )
            for name, drawn, gradient in zip(
                leaf.matrices, (gate_matrix, factor_matrix), gradients, strict=True
            )
        ]

        def back(delta: Array) -> Array:
            cotangents = zip(matrices, product_back(delta), strict=True)
            return np.asarray(sum_of([matrix_back(one) for (_, matrix_back), one in cotangents]))

        return ((lambda x: product(*(forward(x) for forward, _ in matrices))), back), y

    @leaf.register(FiniteNormalization)
    def norm(self, leaf: FiniteNormalization, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        if leaf.groups != 1:
            raise DomainError(f"{self.subject} does not cover norms of groups ({leaf.label})")
        gain = float(leaf.gain)

        def run(x: Array) -> Any:
            x = x - np.mean(x, -1, keepdims=True) if leaf.centres else x
            return gain * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + float(leaf.epsilon))

        (forward, back), y = self.function(run, [x], leaving.gradient)
        step: Step = forward, lambda delta: back(delta)[0]
        return chained([step, *self.norm_parameters(leaf, leaving, y)]), y

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        keep = 1.0 - float(leaf.parameters["drop_prob"])
        mask = (self.rng.random(x.shape, np.float32) < keep) / np.float32(keep)
        return ((lambda x: mask * x), (lambda delta: mask * delta)), mask * x

    @leaf.register(Scale)
    def scale(self, leaf: Scale, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        factor = np.float32(float(leaf.parameters["weight_variance"]) ** 0.5)
        return ((lambda x: factor * x), (lambda delta: factor * delta)), factor * x

    @leaf.register(Pool)
    def pool(self, leaf: Pool, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        weights = np.asarray(leaf.weights(len(at.kernel)), np.float32)
        return ((lambda x: weights @ x), (lambda delta: weights.T @ delta)), weights @ x

    @leaf.register(SelfAttention)
    @leaf.register(Product)
    @leaf.register(Mixer)
    def block(self, leaf: Any, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        return self.drawn_block(block_of(leaf, self.reading, at, leaving), leaving.layer, x)

    # --- blocks --------------------------------------------------------------------------------

    def preactivations(self, block: Block, inputs: Mapping[str, Array]) -> Preactivations:
        """Draw a block's matrices and as many parts of its function (single draws of it) as make up
        the drawn features."""
        features = block.head.features
        parts = math.ceil(block.features / features * self.share - 1e-9)
        matrices, result = {}, {}
        for name, matrix in block.matrices.items():
            shape = float(matrix.fan_in), float(matrix.fan_out)
            rows = self._drawn_rows(block, name)
            matrices[name], y = self.drawn_matrix(inputs[name], shape, matrix.variance, rows)
            y = self._with_bias(y, matrix.bias or 0.0)
            result[name] = block.parted(name, y.reshape(-1, *y.shape[-2:]), parts)
        return parts, matrices, result

    def _drawn_rows(self, block: Block, name: str) -> int:
        """Number of rows of a section's matrix that are drawn: whole parts."""
        drawn: int = block.head.sections[name].drawn
        return drawn * math.ceil(block.matrices[name].fan_out / drawn * self.share - 1e-9)

    def drawn_block(
        self,
        block: Block,
        layer: int,
        x: Array,
        before: Sequence[Before] = (),
        gradients: Mapping[str, Array] | None = None,
        drawn: Preactivations | None = None,
    ) -> StepAndOutput:
        """A drawn function of preactivations, whose matrices read x or the tensors of `before`.
        `gradients`, (T, T) behind the matrices, and `drawn` have defaults."""
        block = block.narrowed(self._features(block.features))
        gradients = block.gradients if gradients is None else gradients
        if drawn is None:
            inputs = dict.fromkeys(block.matrices, x)
            for names, _, y in before:
                inputs |= dict.fromkeys(names, y)
            drawn = self.preactivations(block, inputs)
        parts, weights, preactivations = drawn
        matrices, rows = [], {name: self._drawn_rows(block, name) for name in preactivations}
        for name, matrix in block.matrices.items():
            shape = float(matrix.fan_in), float(matrix.fan_out)
            key, whole = (layer, self.prefix + matrix.name), None
            if name == SHARED_KEY:  # rows of the matrix to the latent
                whole = key, shape[0] * (shape[1] + block.head.latent.kv_rank)
                key = layer, f"{key[1]}.{name}"
            kernel, bias = block.reads[name], matrix.bias is not None
            step = self.matrix(key, weights[name], kernel, gradients[name], shape, bias, whole)
            matrices.append(step)
        batch, features = x.shape[:-2], self._features(block.features)
        count = math.prod(batch)
        own, fixed = block.parameters(self.rng, count * parts)
        own_steps = [self.own_parameter(block, layer, name, one) for name, one in own.items()]
        run = block.function(own, fixed)

        def joined(*arguments: Array) -> Any:
            y = run(*arguments)
            y = np.swapaxes(np.reshape(y, (count, parts, *y.shape[1:])), 1, 2)
            y = np.reshape(y, (*batch, y.shape[1], parts * block.head.features))
            return y[..., :features]

        (function, function_back), y = self.function(
            joined, [*preactivations.values(), *own.values()], block.received
        )

        def forward(x: Array) -> Array:
            inputs = dict.fromkeys(preactivations, x)
            for names, (step, _), _ in before:
                inputs |= dict.fromkeys(names, step(x))
            changes = []
            for name, (matrix, _) in zip(preactivations, matrices, strict=True):
                change = matrix(inputs[name])
                changes.append(block.parted(name, change.reshape(-1, *change.shape[-2:]), parts))
            return function(*changes, *(change() for change, _ in own_steps))

        def back(delta: Array) -> Array:
            every = function_back(delta)
            for cotangent, (_, use) in zip(every[len(matrices) :], own_steps, strict=True):
                use(cotangent)
            cotangents = {}
            for name, b, (_, matrix_back) in zip(preactivations, every, matrices, strict=False):
                b = block.gathered(b, parts, rows[name])
                cotangents[name] = matrix_back(b.reshape(*batch, *b.shape[1:]))
            for names, (_, step_back), _ in before:
                cotangents[names[0]] = step_back(sum_of([cotangents.pop(name) for name in names]))
            return np.asarray(sum_of(list(cotangents.values())))

        return (forward, back), y


def chained(steps: Sequence[Step]) -> Step:
    """The step through several components."""

    def forward(x: Array) -> Array:
        for step, _ in steps:
            x = step(x)
        return x

    def back(delta: Array) -> Array:
        for _, step_back in reversed(steps):
            delta = step_back(delta)
        return delta

    return forward, back


def no_change(*_: Array) -> Array:
    """Changes of the input are not followed."""
    return np.zeros((), np.float32)


class Draws(DrawnNetwork):
    """Draws of both passes, of features (N, T, features).

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
        self._memory: tuple[Array, Site] | None = None
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

    def _record(self, key: Key, x: Array, delta: Array) -> None:
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

    def _rows(self, words: Words) -> Array:
        """(N, V', d) rows of the matrix to the logits, with a subset of those of words that do not
        occur in the batch."""
        readout = self.reading.readout
        some = max(_FEWEST, _REST // self.count)
        rows = len(words.rows) - 1 + min(round(float(words.rows[-1])), some)
        shape = self.count, rows, round(float(readout.width))
        return self._normal(shape) * np.float32(readout.weight_variance**0.5)

    def _entered(self, stream: Any, table: Array, words: Words, main: bool) -> Array:
        """The sum of the tables, with the rows of a tied head."""
        token, kernel = stream.token_table, stream.before
        d = self.reading.model.d_model
        if not self.reading.tied or token is None:
            return self._of_kernel(kernel, d)
        rest = kernel - token.amplitude**2 * token.variance * token.same
        read = words.read if main else words.encoder_read
        own: Array = np.float32(token.amplitude) * table[:, read]
        return np.asarray(own + self._of_kernel(rest, d))

    def _head_gradient(self, x: Array, table: Array, words: Words) -> Array:
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

    def _of_kernel(self, kernel: Array, width: float) -> Array:
        shape = self.count, len(kernel), round(float(width))
        return np.asarray(spread(kernel).astype(np.float32) @ self._normal(shape))

    def _mapped(self, read: _Read, width: float, variance: float) -> Array:
        """The product with a fresh random matrix of entries of that variance."""
        (count, tokens, n), m = read.features.shape, round(float(width))
        scale, by_root = np.float32(variance**0.5), n > tokens
        found = self._normal((count, tokens if by_root else n, m))
        return np.asarray(scale * ((read.root if by_root else read.features) @ found))

    def _read(self, x: Array) -> _Read:
        """`_Read`, shared by successive matrices with the same input."""
        if self._last_input is None or self._last_input.features is not x:
            self._last_input = _Read(x)
        return self._last_input

    def behind(self, x: Array, width: float, variance: float) -> tuple[Array, Back]:
        """y = W x of a random matrix, and the backward pass through the same W. Given y, W is y x^+
        on the span of x and independent of y outside of it:

            W^T delta = f + (delta y^T - f x^T) (x x^T)^+ x,  f fresh, of kernel v delta delta^T.

        Directions in which x is near rounding have both terms, with weights of squared sum 1.
        """
        y = self._mapped(self._read(x), width, variance)

        def back(delta: Array) -> Array:
            fresh, read = self._mapped(_Read(delta), x.shape[2], variance), self._read(x)
            known = delta @ _transposed(y) @ read.known - fresh @ _transposed(x) @ read.taken
            return np.asarray(fresh + known @ x)

        return y, back

    # --- components ----------------------------------------------------------------------------

    def drawn_matrix(
        self, x: Array, shape: tuple[float, float], variance: float, rows: int = 0
    ) -> tuple[tuple[Array, Back], Array]:
        y, back = self.behind(x, rows or shape[1], variance)
        return (x, back), y

    def matrix(self, key: Key, drawn: tuple[Array, Back], *_: Any) -> Step:
        x, back = drawn

        def recorded(delta: Array) -> Array:
            self._record(key, x, delta)
            return back(delta)

        return no_change, recorded

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        return super().leaf(leaf, at, leaving, x)

    @leaf.register(CrossAttention)
    def cross_attention(
        self, leaf: CrossAttention, at: Site, leaving: Site, x: Array
    ) -> StepAndOutput:
        assert self._memory is not None
        memory, site = self._memory

        def to_memory(delta: Array) -> Array:
            self._memory_cotangent = self._memory_cotangent + delta
            return np.zeros((), np.float32)

        block = block_of(leaf, self.reading, at, leaving, site)
        read: Before = ("key", "value"), (no_change, to_memory), memory
        return self.drawn_block(block, leaving.layer, x, [read])


_MOST, _PAIRS = 64, 2**16
"""Largest number of draws, and of pairs of tokens in all draws; at least two draws."""

_SENDERS = 8
"""Number of targets up to which there are four times as many draws, as these scatter more."""

_REST, _FEWEST = 2**14, 512
"""Drawn rows of the matrix to the logits for words outside of the batch: in all draws, and at
least in each. With R rows, the gradients that all tokens share are 1/R of their own."""


class _Read:
    """Input features of matrices, with functions of x x^T."""

    def __init__(self, features: Array) -> None:
        self.features, self.overlaps = features, _overlaps(features)

    @functools.cached_property
    def _eigen(self) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(self.overlaps)
        return values * self.features.shape[2], vectors

    def _with(self, values: Array) -> Array:
        vectors = self._eigen[1]
        return np.asarray((vectors * values[:, None]) @ np.swapaxes(vectors, 1, 2), np.float32)

    @functools.cached_property
    def root(self) -> Array:
        """Symmetric root of x x^T (`spread`)."""
        return self._with(np.sqrt(np.maximum(self._eigen[0], 0.0)))

    @functools.cached_property
    def known(self) -> Array:
        """(x x^T)^+ for the part of W that is known from y."""
        values = self._eigen[0]
        return self._with(over(np.sqrt(resolved(values)), values))

    @functools.cached_property
    def taken(self) -> Array:
        """(x x^T)^+ for the part of a fresh draw that it replaces."""
        values = self._eigen[0]
        return self._with(over(1 - np.sqrt(1 - resolved(values)), values))


_STEP_ROWS = 128
"""Rows of a step from which its alignment is computed."""


def _overlaps(x: Array) -> Array:
    """(N, T, T) mean over features, in full precision: a square of singular values."""
    return np.stack([one @ one.T / one.shape[1] for one in (one.astype(float) for one in x)])


def _transposed(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)
