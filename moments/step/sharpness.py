"""Sharpness at initialisation: extreme eigenvalues of the (preconditioned) Hessian of the loss.

Two matrices, a lower one k and an upper one l, have a second derivative of the loss because W_k
moves the input of l, which the gradient of W_l reads. With steps dW = V/sqrt(P), |V| = 1, it is

    <V_l, M_lk V_k>,   M_lk = (B_l/P_l)^(1/2) T_lk (K_k/P_k)^(1/2),

K the Gram matrix over tokens of what W_k reads, B that of the gradient behind W_l, P the root mean
square of an entry of a matrix's gradient (Adam's preconditioner once it has seen some batches; 1
for SGD), and T the linearised network between the two. A matrix is taken for a lower and an upper
one in directions of their own, so that the Hessian acts on (lower steps, upper steps) as

    [ Q + G   M^T ]
    [   M      0  ],

G the Gauss-Newton part of the logits, and Q what norms, activations and products of a gated unit
add by their second derivatives. Rows of a table that is also the matrix to the logits are one step
in both. K, B and P are the prediction's; T and Q are those of one network that is drawn, signal and
gradient, with fewer features than the real one has and matrices of the same gain: K, B, P and the
norms of random matrices hold all that depends on the width.

See docs/theory/sharpness.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.derivative import pullback
from ..engine.response import sum_of
from ..errors import DomainError, ValidityWarning
from ..files import Serialised, as_frame
from ..formulas.checks import check_choice, check_count
from ..layers.attention.latent import LatentHeads
from ..layers.attention.self_attention import SelfAttention
from ..layers.elementary import Activation, Dropout, LayerScale, Linear, Scale
from ..layers.experts.mixture import Mixture
from ..layers.gated import GatedLinear
from ..layers.head.components import Pool
from ..layers.normalization import FiniteNormalization
from ..layers.product import Product
from ..layers.recurrent.leaf import Mixer
from ..model.mixers import GatedDeltaNet, LinearAttention
from .drawn import Block, copies, entrywise
from .ends import Words
from .leaves import SHARED_KEY, block_of, latent_block, mixture_block
from .rules import Optimizer, named_optimizer
from .sites import Reading, Site, Table

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction
    from .result import Stepping

Array = np.ndarray[Any, np.dtype[Any]]

Key = tuple[int, str]
"""A parameter: its layer and its name."""

Space = tuple[str, Key]
"""The steps of a parameter as a "lower" or as an "upper" one."""

Step = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""What a component makes of a change of its input, (T, features), and the way back."""

Made = tuple[Step, Array]
"""A component's step, and what it makes of the drawn features that enter."""

OPTIMIZERS = ("sgd", "adam", "adamw")
"""Those whose step is a fixed multiple of the gradient by parameter, once it has seen batches."""

FEATURES, NUMBERS = 64, 2**14
"""Of the drawn network: at least so many features, in whole heads, and as many as make up these
numbers of all tokens. Fewer lose what its random matrices have beyond: of width 128 half the
features 4 to 8 % of an eigenvalue, a quarter 20 %."""

DRAWS = 3

STEPS, SETTLED = 32, 0.03
"""Of Lanczos' method, at most, and what is left of both ends' residuals, over the eigenvalue, where
no more are made: what is missed is of the order of its square."""


@dataclass(frozen=True, repr=False)
class Sharpness(Serialised):
    """The extreme eigenvalues of P^(-1/2) H P^(-1/2), H the Hessian of the loss on the batch.

    Attributes:
        optimizer: "sgd" (P = 1), or "adam" and "adamw" (P the root mean square of an entry of each
            parameter's gradient).
        largest, least: means over draws of the network, in 1/(learning rate).
        largest_stderr, least_stderr: of those means; 0 for one draw.
        shares: (layer, parameter, share of the square of the largest one's eigenvector).
    """

    optimizer: str
    largest: float
    least: float
    largest_stderr: float
    least_stderr: float
    shares: tuple[tuple[int, str, float], ...]

    @classmethod
    def of(
        cls, optimizer: str, ends: list[Any], shares: tuple[tuple[int, str, float], ...]
    ) -> Self:
        """Of draws, each its largest and its least."""
        (largest, least), count = np.mean(ends, axis=0), len(ends)
        spreads = np.std(ends, axis=0, ddof=1) / math.sqrt(count) if count > 1 else np.zeros(2)
        errors = float(spreads[0]), float(spreads[1])
        return cls(optimizer, float(largest), float(least), *errors, shares)

    @property
    def by_matrix(self) -> pd.DataFrame:
        """Columns layer, weight and share, the largest first: what carries the largest one."""
        return as_frame(
            sorted(self.shares, key=lambda row: -row[2]), columns=["layer", "weight", "share"]
        )

    def table(self) -> str:
        """Both, and the matrices that carry the largest one, as text."""
        rows = [
            f"{layer:5d}  {name:16} {100 * share:5.1f} %"
            for layer, name, share in self.by_matrix.head(8).itertuples(index=False)
        ]
        of = "the Hessian" if self.optimizer == "sgd" else "the Hessian over root gradients"
        return "\n".join(
            [
                f"{self.optimizer}: eigenvalues of {of}",
                f"largest {self.largest:.4g} (± {self.largest_stderr:.2g}), least {self.least:.4g} "
                f"(± {self.least_stderr:.2g}), ± over draws of the network",
                "layer  parameter        share of the largest",
                *rows,
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version."""
        return {"format": 1} | dataclasses.asdict(self)

    def __repr__(self) -> str:
        return (
            f"Sharpness({self.optimizer}: largest {self.largest:.4g} +- {self.largest_stderr:.2g}, "
            f"least {self.least:.4g} +- {self.least_stderr:.2g})"
        )


def sharpness(
    prediction: Prediction,
    optimizer: str,
    *,
    eps: float | None = None,
    clip: float | None = None,
    multipliers: Mapping[str, float] | None = None,
    draws: int = DRAWS,
    features: int | None = None,
    seed: int = 0,
) -> Sharpness:
    """See `Prediction.sharpness`."""
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_count("draws", draws)
    check_count("seed", seed, least=0)
    named = named_optimizer(optimizer, eps=eps, clip=clip, multipliers=multipliers)
    stepping: Stepping = prediction._sharpening
    if features is None:
        features = max(FEATURES, NUMBERS // len(stepping.reading.main.before))
    check_count("features", features)
    reading, squares, chosen = stepping.reading, stepping.squares, stepping.clipped(named)
    if float(np.max(reading.logit_variance)) > WIDE_LOGITS:
        warnings.warn(
            f"the logits have a variance of {reading.logit_variance:.2g}: sharpness takes their "
            f"softmax for uniform, which holds below {WIDE_LOGITS:g}",
            ValidityWarning,
            stacklevel=3,
        )
    ends, shares = [], dict.fromkeys(squares, 0.0)
    roots: dict[int, tuple[Array, Array]] = {}
    for draw in range(draws):
        rng = np.random.default_rng((seed, draw))
        hessian = Hessian(reading, squares, chosen, features, rng, roots)
        *both, vector = hessian.extremes()
        ends.append(both)
        for (_, key), part in hessian.split(vector):
            shares[key] = shares.get(key, 0.0) + float(np.vdot(part, part)) / draws
    carried = tuple((layer, name, share) for (layer, name), share in shares.items())
    return Sharpness.of(optimizer, ends, carried)


WIDE_LOGITS = 0.5
"""Variance of the logits up to which a mean of e^z differs from 1 by less than a third."""


class Hessian:
    """The operator, of one draw of the network.

    Args:
        reading: kernels of signal and gradient at every site.
        squares: E |dLoss/dW|^2 of every parameter.
        optimizer: whose steps.
        features: of the drawn network, at least.
        rng: of the draw.
        roots: of kernels, which draws share: by the kernel's identity, it and its root.
    """

    def __init__(
        self,
        reading: Reading,
        squares: Mapping[Key, float],
        optimizer: Optimizer,
        features: int,
        rng: np.random.Generator,
        roots: dict[int, tuple[Array, Array]] | None = None,
    ) -> None:
        model = reading.model
        for name, there in {
            "models with an encoder": reading.encoder is not None,
            "images": reading.main.patch is not None,
            "several steps": reading.batches is not None,
        }.items():
            if there:
                raise DomainError(f"sharpness does not cover {name}")
        self.reading, self.squares, self.optimizer, self.rng = reading, squares, optimizer, rng
        shared = int(model.kv_heads or model.heads)
        values = [_value_heads(block) for block in model.mixers]
        fewest = math.lcm(*(shared // math.gcd(shared, count) for count in values))
        heads = math.ceil(features * shared / model.d_model / fewest) * fewest
        self.share: float = min(1.0, heads / shared)
        self.shapes: dict[Space, tuple[int, ...]] = {}
        self._roots = {} if roots is None else roots
        self._given: dict[Space, Array] = {}
        self._made: dict[Space, Array] = {}
        self._points = iter(reading.points)
        self._build()

    # --- the operator --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def split(self, vector: Array) -> Iterator[tuple[Space, Array]]:
        """A vector's parts, by the steps that they are."""
        ends = list(itertools.accumulate(math.prod(shape) for shape in self.shapes.values()))
        pieces = np.split(np.asarray(vector, np.float32).ravel(), ends[:-1])
        for (space, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            yield space, piece.reshape(shape)

    def __call__(self, vector: Array) -> Array:
        self._given = dict(self.split(vector))
        forward, back = self._network
        back(forward(np.zeros((), np.float32)))
        return np.concatenate([self._made[space].ravel() for space in self.shapes])

    def extremes(self) -> tuple[float, float, Array]:
        """The largest and the least eigenvalue by Lanczos' method, and the largest one's vector."""
        steps = min(STEPS, self.size)
        basis, matrix = np.empty((steps, self.size), np.float32), np.zeros((steps, steps))
        new = self._normal((self.size,))
        left = np.linalg.norm(new)
        for k in range(steps):
            np.divide(new, left, out=basis[k])
            new = self(basis[k])
            if k:
                matrix[k, k - 1] = matrix[k - 1, k] = left
                new -= left * basis[k - 1]
            matrix[k, k] = new @ basis[k]
            new -= np.float32(matrix[k, k]) * basis[k]
            left = np.linalg.norm(new)
            values, vectors = np.linalg.eigh(matrix[: k + 1, : k + 1])
            ends = [-1, 0]
            # there is an eigenvalue within what is left of each
            if np.all(left * np.abs(vectors[-1, ends]) <= SETTLED * np.abs(values[ends])):
                break
        vector = vectors[:, -1].astype(np.float32) @ basis[: k + 1]
        return float(values[-1]), float(values[0]), vector

    # --- draws ---------------------------------------------------------------------------------

    def _features(self, width: float) -> int:
        return max(1, round(float(width) * self.share))

    def _normal(self, shape: tuple[int, ...]) -> Array:
        return np.asarray(self.rng.standard_normal(shape, np.float32))

    def _root(self, kernel: Array) -> Array:
        """`_root`, once for every array."""
        if id(kernel) not in self._roots:
            self._roots[id(kernel)] = kernel, _root(kernel)
        return self._roots[id(kernel)][1]

    def _weights(self, shape: tuple[float, float], variance: float, rows: int = 0) -> Array:
        """An (n, m) matrix, of which so many `rows` are drawn, or the share of all."""
        drawn = self._normal((self._features(shape[0]), rows or self._features(shape[1])))
        return np.asarray(drawn * np.float32((variance / self.share) ** 0.5))

    def _shifted(self, y: Array, variance: float) -> Array:
        """With a bias of that variance."""
        return y + np.float32(variance**0.5) * self._normal(y.shape[1:]) if variance else y

    # --- parameters ----------------------------------------------------------------------------

    def _inverse(self, key: Key, entries: float) -> float:
        """1/P, times the parameter's factor of the rate; 0 of one without a gradient."""
        factor = self.optimizer.factor(key[1])
        if self.optimizer.rule == "sgd":
            return factor
        square = self.squares.get(key, 0.0)
        return factor / ((square / entries) ** 0.5 + self.optimizer.epsilon) if square > 0 else 0.0

    def _lower(self, key: Key, gram: Array, size: float, features: int) -> Step:
        """A step of a parameter, of `size` times that Gram matrix over P, where its output is."""
        space, root, factor = ("lower", key), self._root(gram), np.float32(size**0.5)
        self.shapes[space] = root.shape[1], features

        def back(delta: Array) -> Array:
            self._made[space] = factor * (root.T @ delta)
            return delta

        return lambda y: y + root @ (factor * self._given[space]), back

    def _bias(self, key: Key, width: float, features: int) -> Step:
        """A step of a bias, which all tokens share."""
        spread = features / (width * self.share)
        space, size = ("lower", key), np.float32((spread * self._inverse(key, width)) ** 0.5)
        self.shapes[space] = (features,)

        def back(delta: Array) -> Array:
            self._made[space] = size * delta.sum(0)
            return delta

        return lambda y: y + size * self._given[space], back

    def _upper(self, key: Key, gram: Array, size: float, width: float) -> Step:
        """A change of what a parameter reads, seen by its gradient, of `size` times that Gram
        matrix over P."""
        space, root, factor = ("upper", key), self._root(gram), np.float32(size**0.5)
        self.shapes[space] = root.shape[1], self._features(width)

        def forward(x: Array) -> Array:
            self._made[space] = factor * (root.T @ x)
            return x

        return forward, lambda delta: delta + root @ (factor * self._given[space])

    def _matrix(
        self,
        key: Key,
        weights: Array,
        kernel: Array,
        gradient: Array,
        shape: tuple[float, float],
        bias: bool,
        inverse: float | None = None,
    ) -> Step:
        """An (n, m) matrix, drawn as `weights`, that reads tokens of that kernel and receives that
        gradient."""
        (n, m), rows = shape, weights.shape[1]
        if inverse is None:
            inverse = self._inverse(key, n * m)
        spread = rows / (m * self.share)
        random = (lambda x: x @ weights), (lambda delta: delta @ weights.T)
        sees = self._upper(key, gradient, m * inverse, n)
        steps = [sees, random, self._lower(key, kernel, spread * n * inverse, rows)]
        if bias:
            steps.append(self._bias((key[0], f"{key[1]}.bias"), m, rows))
        return _chained(steps)

    # --- the network ---------------------------------------------------------------------------

    def _build(self) -> None:
        reading, stream = self.reading, self.reading.main
        width = float(reading.model.d_model)
        words, table = Words.of(reading), stream.token_table
        lookups = {
            one.name: self._lower(
                (0, one.name),
                one.same,
                one.amplitude**2 * self._inverse((0, one.name), one.count * width),
                self._features(width),
            )
            for one in stream.tables
            if not (one is table and reading.tied)
        }
        head = self._head(words)
        if reading.tied and table is not None:
            lookups[table.name], reads = self._tied(words, table)
            head.insert(0, reads)
        rows = self._normal((len(words.rows), self._features(width)))
        rows *= np.sqrt(words.rows * reading.readout.weight_variance)[:, None].astype(np.float32)
        x = np.zeros((), np.float32)
        for one in stream.tables:
            if one is table and reading.tied:
                looked = rows[words.read]
            else:
                first, of, _ = one.places
                looked = self._normal((len(first), self._features(width)))[of]
                looked *= np.float32(one.variance**0.5) * (one.rows >= 0)[:, None]
            x = x + np.float32(one.amplitude) * looked
        tables = Site(-1, 0, "tables", None, stream.before, stream.received, width)
        step, _, x = self._through(stream.embedding, tables, x)
        steps = [*lookups.values(), step]
        site = next(self._points)
        for part in (stream.layers, stream.ending):
            step, site, x = self._through(part, site, x)
            steps.append(step)
        forward, back = _chained(steps)
        # the gradient at the end, which every part keeps of what comes back first
        self._given = dict(self.split(np.zeros(self.size)))
        self._made = dict(self._given)
        forward(np.zeros((), np.float32))
        back(self._sent(words, rows, x))
        self._network = _chained([(forward, back), *head])

    def _sent(self, words: Words, rows: Array, x: Array) -> Array:
        """The gradient of the loss at what the logits read, x: of their rows, and along x, as the
        softmax follows logits of variance s^2: E_p z - E z = s^2."""
        readout = self.reading.readout
        along = np.asarray(self.reading.targets >= 0, np.float32)
        along *= np.float32(self.reading.logit_variance / along.sum() / readout.width)
        size = (x * x).mean(1)
        along /= np.where(size > 0, size, 1.0)
        return np.asarray(readout.scale * words.sent @ rows + along[:, None] * x, np.float32)

    def _head(self, words: Words) -> list[Step]:
        """The matrix to the logits as an upper one, and G of logits whose softmax is uniform."""
        reading, readout = self.reading, self.reading.readout
        rows, n = float(readout.vocab_size), float(readout.width)
        matrix = self._normal((self._features(n), self._features(rows)))
        matrix *= np.float32(readout.scale * (readout.weight_variance / self.share / rows) ** 0.5)
        matrix -= matrix.mean(1, keepdims=True)
        judged = np.asarray(reading.targets >= 0, np.float32)[:, None]
        judged /= judged.sum()
        logits = (lambda x: judged * (x @ matrix)), (lambda delta: delta @ matrix.T)
        if reading.tied:
            return [logits]
        key = reading.model.layers + 1, "head"
        gram = readout.scale**2 * (words.sent * words.rows) @ words.sent.T
        return [self._upper(key, gram, self._inverse(key, rows * n), n), logits]

    def _tied(self, words: Words, table: Table) -> tuple[Step, Step]:
        """Steps of a table that is also the matrix to the logits: what tokens look up, and what
        reads the stream at the end. As a row is a word's in both, they have much in common."""
        key, width = (0, table.name), float(self.reading.readout.width)
        space, root = ("lower", key), np.float32(self._inverse(key, table.count * width) ** 0.5)
        self.shapes[space] = len(words.rows), self._features(width)
        looked = np.asarray(root * table.amplitude * words.reads, np.float32)
        sent = words.sent * np.sqrt(words.rows)
        sent = np.asarray(root * self.reading.readout.scale * sent, np.float32)

        def looked_up(delta: Array) -> Array:
            self._made[space] = self._made[space] + looked.T @ delta
            return delta

        def read(x: Array) -> Array:
            self._made[space] = sent.T @ x
            return x

        lookup = (lambda x: x + looked @ self._given[space]), looked_up
        return lookup, (read, lambda delta: delta + sent @ self._given[space])

    def _through(self, part: Component, at: Site, x: Array) -> tuple[Step, Site, Array]:
        """A component's step, the site behind it, and what it makes of x."""
        if isinstance(part, Chain):
            steps = []
            for one in part.children:
                step, at, x = self._through(one, at, x)
                steps.append(step)
            return _chained(steps), at, x
        if isinstance(part, Layer):
            step, _, x = self._through(part.body, at, x)
            return step, next(self._points), x
        if isinstance(part, Residual):
            kept, added = np.float32(part.skip_scale), np.float32(part.branch_scale)
            (forward, back), _, y = self._through(part.branch, at, x)
            step = (
                lambda x: kept * x + added * forward(x),
                lambda delta: kept * delta + back(added * delta),
            )
            site = next(self._points)
            return step, site, _sized(kept * x + added * y, site.kernel)
        if isinstance(part, Parallel):
            both = [self._through(branch, at, x) for branch in part.branches]
            step = (
                lambda x: sum_of([forward(x) for (forward, _), *_ in both]),
                lambda delta: sum_of([back(delta) for (_, back), *_ in both]),
            )
            return step, both[-1][1], sum_of([y for *_, y in both])
        inside = isinstance(part, Product)  # whose own sites are passed by
        leaving = next(p for p in self._points if not inside or p.name.endswith(part.label))
        step, y = self.leaf(part, at, leaving, x)
        return step, leaving, _sized(y, leaving.kernel)

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site, x: Array) -> Made:
        """A leaf's step and what it makes of x, by its class; to be added to as `Walk.leaf`.

        Raises:
            DomainError: no step is known of it.
        """
        raise DomainError(f"sharpness does not cover {type(leaf).__name__} ({leaf.label})")

    @leaf.register(Linear)
    def linear(self, leaf: Linear, at: Site, leaving: Site, x: Array) -> Made:
        given, key = leaf.parameters, (leaving.layer, leaf.weight)
        shape = float(given["fan_in"]), float(given["fan_out"])
        weights = self._weights(shape, float(given["weight_variance"]))
        step = self._matrix(key, weights, at.kernel, leaving.gradient, shape, leaf.has_bias)
        return step, self._shifted(x @ weights, float(given.get("bias_variance", 0.0)))

    @leaf.register(Activation)
    def activation(self, leaf: Activation, at: Site, leaving: Site, x: Array) -> Made:
        (forward, back), value = _curved(entrywise(leaf.laws), [x], leaving.gradient)
        return (forward, lambda delta: back(delta)[0]), value

    @leaf.register(GatedLinear)
    def gated(self, leaf: GatedLinear, at: Site, leaving: Site, x: Array) -> Made:
        shape = float(leaf.fan_in), float(leaf.fan_out)
        matrices = {
            "gate": (float(leaf.gate), float(leaf.gate_bias)),
            "ffn_in": (float(leaf.ffn_in), float(leaf.bias)),
        }
        every = {name: self._weights(shape, variance) for name, (variance, _) in matrices.items()}
        gate, factor = (
            self._shifted(x @ every[name], bias) for name, (_, bias) in matrices.items()
        )
        act = entrywise(leaf.activation)
        (through, returned), y = _curved(
            lambda gate, factor: act(gate) * factor, [gate, factor], leaving.gradient
        )
        _, slopes = pullback(lambda gate: act(gate) * factor, gate.astype(float))
        maps = []
        for (name, weights), one in zip(
            every.items(), (slopes(np.ones(gate.shape))[0], act(gate.astype(float))), strict=True
        ):
            gradient = leaving.gradient * (one @ one.T / one.shape[1])
            key = (leaving.layer, f"{leaf.prefix}{name}")
            maps.append(self._matrix(key, weights, at.kernel, gradient, shape, leaf.has_bias))

        def back(delta: Array) -> Array:
            sent = zip(maps, returned(delta), strict=True)
            return np.asarray(sum_of([back_from(one) for (_, back_from), one in sent]))

        return ((lambda x: through(*(to(x) for to, _ in maps))), back), y

    @leaf.register(FiniteNormalization)
    def norm(self, leaf: FiniteNormalization, at: Site, leaving: Site, x: Array) -> Made:
        if leaf.groups != 1:
            raise DomainError(f"sharpness does not cover norms of groups ({leaf.label})")
        gain = float(leaf.gain)

        def run(x: Array) -> Any:
            x = x - np.mean(x, 1, keepdims=True) if leaf.centres else x
            return gain * x / np.sqrt(np.mean(x * x, 1, keepdims=True) + float(leaf.epsilon))

        (forward, returned), y = _curved(run, [x], leaving.gradient)
        steps: list[Step] = [(forward, lambda delta: returned(delta)[0])]
        if leaf.affine:
            key, entries = (leaving.layer, f"{leaf.label}.gain"), y.shape[1] / self.share
            steps.append(self._gains(key, y / np.float32(gain), leaving.gradient))
            if leaf.bias:
                key = leaving.layer, f"{leaf.label}.bias"
                steps.append(self._bias(key, entries, y.shape[1]))
        return _chained(steps), y

    def _gains(self, key: Key, y: Array, gradient: Array) -> Step:
        """Gains behind y, whose gradient is sum_t b_t y_t of what they receive."""
        received = _Received(gradient)
        factor = np.float32(self._inverse(key, y.shape[1] / self.share) ** 0.5)
        lower, upper = ("lower", key), ("upper", key)
        self.shapes[lower] = self.shapes[upper] = (y.shape[1],)

        def forward(x: Array) -> Array:
            self._made[upper] = factor * (received.value * x).sum(0)
            return np.asarray(x + factor * y * self._given[lower])

        def back(delta: Array) -> Array:
            b = received(delta)
            self._made[lower] = factor * (y * delta).sum(0)
            return np.asarray(delta + factor * b * self._given[upper])

        return forward, back

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, at: Site, leaving: Site, x: Array) -> Made:
        kept, shape = 1.0 - float(leaf.parameters["drop_prob"]), self._features(at.width)
        mask = (self.rng.random((len(at.kernel), shape), np.float32) < kept) / np.float32(kept)
        return ((lambda x: mask * x), (lambda delta: mask * delta)), mask * x

    @leaf.register(Scale)
    def scale(self, leaf: Scale, at: Site, leaving: Site, x: Array) -> Made:
        factor = np.float32(float(leaf.parameters["weight_variance"]) ** 0.5)
        return ((lambda x: factor * x), (lambda delta: factor * delta)), factor * x

    @leaf.register(Pool)
    def pool(self, leaf: Pool, at: Site, leaving: Site, x: Array) -> Made:
        weights = np.asarray(leaf.weights(len(at.kernel)), np.float32)
        return ((lambda x: weights @ x), (lambda delta: weights.T @ delta)), weights @ x

    @leaf.register(LayerScale)
    def layer_scale(self, leaf: LayerScale, at: Site, leaving: Site, x: Array) -> Made:
        """Gains that multiply the branch behind this, and are 1 here."""
        key, gain = (leaving.layer, leaf.label), np.float32(leaf.gain)
        return self._gains(key, x / gain, leaving.gradient / gain**2), x

    @leaf.register(SelfAttention)
    @leaf.register(Product)
    @leaf.register(Mixer)
    def drawn(self, leaf: Any, at: Site, leaving: Site, x: Array) -> Made:
        return self._block(block_of(leaf, self.reading, at, leaving), leaving.layer, x)

    @leaf.register(LatentHeads)
    def latent(self, leaf: LatentHeads, at: Site, leaving: Site, x: Array) -> Made:
        block, latents = latent_block(leaf, self.reading, at, leaving)
        before, d = [], float(leaf.attention.d_model)
        layer, shared = leaving.layer, int(leaf.block.rope_dim)
        for one in latents:
            shape = d, one.at.width
            key, rows = (layer, one.name), one.at.width + (shared if one.name == "kv_down" else 0)
            inverse, weights = self._inverse(key, d * rows), self._weights(shape, one.variance)
            down = self._matrix(key, weights, at.kernel, one.at.gradient, shape, False, inverse)
            behind = dataclasses.replace(one.behind, layer=layer)
            norm, y = self.norm(one.norm, one.at, behind, x @ weights)
            before.append((one.readers, _chained([down, norm]), y))
        return self._block(block, layer, x, before)

    @leaf.register(Mixture)
    def mixture(self, leaf: Mixture, at: Site, leaving: Site, x: Array) -> Made:
        block, hidden, out, gates = mixture_block(leaf, self.reading, at, leaving)
        mean = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
        drawn = self._entering(block, dict.fromkeys(block.matrices, x))
        own = block.head.gates(drawn[2][leaf.name][:1])[0]
        # tokens meet in the weights of the experts that this draw's router gives to both
        there = mean > 1e-9 * mean.max()
        met = np.where(there, own @ own.T / np.where(there, mean, 1.0), 0.0)
        hidden = dataclasses.replace(hidden, kernel=met * hidden.kernel)
        sent = {
            name: one if name == leaf.name else met * one for name, one in block.gradients.items()
        }
        step, y = self._block(block, leaving.layer, x, gradients=sent, drawn=drawn)
        key, shape = (leaving.layer, out.name), (float(out.fan_in), float(out.fan_out))
        weights, gradient = self._weights(shape, out.variance), leaving.gradient
        steps = [step, self._matrix(key, weights, hidden.kernel, gradient, shape, False)]
        y = y @ weights
        if out.bias is not None:
            key = leaving.layer, f"{out.name}.bias"
            inverse = self._inverse(key, own.shape[1] * shape[1])
            steps.append(self._lower(key, own @ own.T, inverse, self._features(shape[1])))
        return _chained(steps), y

    def _entering(
        self, block: Block, reads: Mapping[str, Array]
    ) -> tuple[int, dict[str, Array], dict[str, Array]]:
        """How many draws of a block its drawn features are, the matrices behind which it stands,
        and the preactivations (parts, T, rows) that they make of what they read."""
        features = block.head.features
        parts = math.ceil(block.features / features * self.share - 1e-9)
        every, result = {}, {}
        for name, matrix in block.matrices.items():
            shape, rows = (float(matrix.fan_in), float(matrix.fan_out)), self._rows(block, name)
            every[name] = self._weights(shape, matrix.variance, rows)
            y = self._shifted(reads[name] @ every[name], matrix.bias or 0.0)
            result[name] = block.parted(name, y[None], parts)
        return parts, every, result

    def _rows(self, block: Block, name: str) -> int:
        """Rows of a section's matrix that are drawn, in whole draws."""
        drawn: int = block.head.sections[name].drawn
        return drawn * math.ceil(block.matrices[name].fan_out / drawn * self.share - 1e-9)

    def _block(
        self,
        block: Block,
        layer: int,
        x: Array,
        before: Sequence[tuple[tuple[str, ...], Step, Array]] = (),
        gradients: Mapping[str, Array] | None = None,
        drawn: tuple[int, dict[str, Array], dict[str, Array]] | None = None,
    ) -> Made:
        """A drawn function of preactivations, with its second derivatives: of <b, f(p)>, b what it
        receives. `before` are steps from what enters, x, to what some of the matrices read, and
        that."""
        block = block.narrowed(self._features(block.features))
        head, sent = block.head, block.gradients if gradients is None else gradients
        if drawn is None:
            given_by = dict.fromkeys(block.matrices, x)
            for names, _, y in before:
                given_by |= dict.fromkeys(names, y)
            drawn = self._entering(block, given_by)
        parts, every, entering = drawn
        maps, rows = [], {name: self._rows(block, name) for name in entering}
        for name, matrix in block.matrices.items():
            shape, key = (float(matrix.fan_in), float(matrix.fan_out)), (layer, matrix.name)
            inverse, shared = None, name == SHARED_KEY
            if shared:  # rows of the matrix to the latent
                inverse = self._inverse(key, shape[0] * (shape[1] + block.head.latent.kv_rank))
                key = layer, f"{matrix.name}.{name}"
            step = self._matrix(
                key,
                every[name],
                block.reads[name],
                sent[name],
                shape,
                matrix.bias is not None,
                inverse,
            )
            maps.append(step)
        own, fixed = block.parameters(self.rng, parts)
        spaces = {name: self._own(block, layer, name, one) for name, one in own.items()}
        run, kept = block.function(own, fixed), self._features(block.features)

        def joined(*given: Array) -> Any:
            y = np.swapaxes(run(*given), 0, 1)
            return np.reshape(y, (y.shape[0], parts * head.features))[:, :kept]

        (through, returned), y = _curved(
            joined, [*entering.values(), *own.values()], block.received
        )

        def forward(x: Array) -> Array:
            reads = dict.fromkeys(entering, x)
            for names, (to, _), _ in before:
                reads |= dict.fromkeys(names, to(x))
            ways = [
                block.parted(name, to(reads[name])[None], parts)
                for name, (to, _) in zip(entering, maps, strict=True)
            ]
            for space, read, size in spaces.values():
                ways.append(size * self._given[space][read])
            return through(*ways)

        def back(delta: Array) -> Array:
            every = returned(delta)
            for one, (space, read, size) in zip(every[len(maps) :], spaces.values(), strict=True):
                total = np.zeros(self.shapes[space], np.float32)
                np.add.at(total, read, one)
                self._made[space] = size * total
            sent = {
                name: back_from(block.gathered(one, parts, rows[name])[0])
                for name, one, (_, back_from) in zip(entering, every, maps, strict=False)
            }
            for names, (_, back_from), _ in before:
                sent[names[0]] = back_from(sum_of([sent.pop(name) for name in names]))
            return np.asarray(sum_of(list(sent.values())))

        return (forward, back), y

    def _own(
        self, block: Block, layer: int, name: str, values: Array
    ) -> tuple[Space, Array, np.float32]:
        """Steps of a function's own parameter, which draws read, and their size."""
        key, parts = (layer, block.named(name)), len(values)
        space, times = ("lower", key), copies(block.head, name).times
        count = max(1, min(parts, math.ceil(times * self.share - 1e-9)))
        self.shapes[space] = count, *values.shape[1:]
        inverse = self._inverse(key, times * values[0].size)
        size = np.float32((inverse * count / (times * self.share)) ** 0.5)
        return space, np.arange(parts) * count // parts, size


def _value_heads(block: Any) -> int:
    """Of a mixer whose heads are drawn as wholes; 0 of others."""
    if isinstance(block, GatedDeltaNet):
        return block.value_heads
    return block.heads if isinstance(block, LinearAttention) and block.norm != "all" else 0


LEFT = 0.03
"""Of a kernel's largest eigenvalue: smaller ones are left out. They are those of single tokens, of
which no direction in which all layers move has much."""


def _root(kernel: Array) -> Array:
    """R of R R^T, the kernel without its eigenvalues below so much of the largest, as (T, rank):
    of few tokens, or where they are many, by its decomposition, else on the span of its products
    with a few random vectors (Halko, Martinsson and Tropp 2011, Finding structure with randomness,
    algorithm 4.4)."""
    size, tokens = float(np.diag(kernel).max()) or 1.0, len(kernel)
    scaled, rng = (kernel / size).astype(np.float32), np.random.default_rng(0)
    count = 32
    while 4 * count <= tokens:
        span = np.linalg.qr(scaled @ (scaled @ rng.standard_normal((tokens, count), np.float32)))[0]
        values, vectors = np.linalg.eigh(span.T @ (scaled @ span))
        if values[0] < LEFT * values[-1]:
            vectors = span @ vectors
            break
        count *= 2
    else:
        values, vectors = np.linalg.eigh(scaled)
    kept = values > LEFT * max(values[-1], 0)
    return np.asarray(vectors[:, kept] * np.sqrt(size * values[kept]), np.float32)


def _chained(steps: list[Step]) -> Step:
    def forward(x: Array) -> Array:
        for one, _ in steps:
            x = one(x)
        return x

    def back(delta: Array) -> Array:
        for _, one in reversed(steps):
            delta = one(delta)
        return delta

    return forward, back


def _curved(
    run: Callable[..., Any], values: Sequence[Array], gradient: Array
) -> tuple[tuple[Callable[..., Array], Callable[[Array], list[Array]]], Array]:
    """A function of drawn values as a step with the second derivatives of <b, f>, b what it
    receives, of that kernel: on changes of all of them, and back to these; and its output."""
    output, pull = pullback(run, *values)
    _, push = pullback(pull, np.zeros_like(output))
    received, moved = _Received(gradient), list[Array]()

    @functools.cache
    def bend() -> Any:
        return pullback(lambda *x: pullback(run, *x)[1](received.value), *values)[1]

    def forward(*ways: Array) -> Array:
        moved[:] = [np.broadcast_to(way, x.shape) for way, x in zip(ways, values, strict=True)]
        return np.asarray(push(tuple(moved))[0], np.float32)

    def back(delta: Array) -> list[Array]:
        received(delta)
        both = zip(pull(delta), bend()(tuple(moved)), strict=True)
        return [np.asarray(one + two, np.float32) for one, two in both]

    return (forward, back), np.asarray(output, np.float32)


class _Received:
    """The gradient at a point: what is sent back there first, of its kernel's size by token."""

    def __init__(self, gradient: Array) -> None:
        self._gradient = gradient
        self.value: Array = np.zeros((), np.float32)

    def __call__(self, delta: Array) -> Array:
        if not self.value.shape:
            self.value = _sized(delta, self._gradient)
        return self.value


def _sized(x: Array, kernel: Array) -> Array:
    """Tokens of the mean squares that are the kernel's."""
    square = (x * x).mean(1)
    size = np.sqrt(np.where(square > 0, np.diag(kernel) / np.where(square > 0, square, 1.0), 0.0))
    return np.asarray(x * size[:, None], np.float32)
