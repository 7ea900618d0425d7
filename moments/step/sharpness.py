"""Sharpness at initialisation: extreme eigenvalues of the (preconditioned) Hessian of the loss.

Two matrices, a lower one k and an upper one l, have a second derivative of the loss because W_k
moves the input of l, which the gradient of W_l reads. With steps dW = V/sqrt(P), |V| = 1, it is

    <V_l, M_lk V_k>,   M_lk = (B_l/P_l)^(1/2) T_lk (K_k/P_k)^(1/2),

K the Gram matrix over tokens of what W_k reads, B that of the gradient behind W_l, P the root mean
square of an entry of a matrix's gradient (Adam's preconditioner once it has seen some batches; 1
for SGD), and T the linearised network between the two. A matrix is a lower and an upper one in
directions that hardly overlap, so that the Hessian acts on (lower steps, upper steps) as

    [ Q + G   M^T ]
    [   M      0  ],

G the Gauss-Newton part of the logits, and Q what norms, activations and products of a gated unit
add by their second derivatives. K, B and P are the prediction's; T and Q are drawn, with fewer
features than the network has, whose matrices have the same gain: K, B, P and the norms of random
matrices hold all that depends on the width. Left out: second derivatives of softmaxes, and that
lower and upper steps of one matrix overlap.

See docs/theory/sharpness.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.linalg.lapack import spstrf

from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..engine.response import sum_of
from ..errors import DomainError, ValidityWarning
from ..files import as_frame
from ..formulas.algebra import NUMPY
from ..formulas.checks import check_choice, check_count
from ..layers.attention.self_attention import SelfAttention
from ..layers.elementary import Activation, Dropout, Linear, Scale
from ..layers.gated import GatedLinear
from ..layers.head.components import Pool
from ..layers.normalization import FiniteNormalization
from .ends import Words
from .rules import Optimizer, named_optimizer, spread
from .sites import Reading, Site

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

OPTIMIZERS = ("sgd", "adam", "adamw")
"""Those whose step is a fixed multiple of the gradient by parameter, once it has seen batches."""

FEATURES = 64
"""Of the drawn network: at least so many, in whole heads."""

DRAWS = 3

STEPS = 16
"""Of Lanczos' method: eigenvalues come out low by .3 % on average and by 1.2 % at most in eight
models, a tenth of what they vary by between draws."""


@dataclass(frozen=True, repr=False)
class Sharpness:
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

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        return (
            f"Sharpness({self.optimizer}: largest {self.largest:.4g} +- {self.largest_stderr:.2g}, "
            f"least {self.least:.4g} +- {self.least_stderr:.2g})"
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.table())}</pre>"


def sharpness(
    prediction: Prediction,
    optimizer: str,
    *,
    eps: float | None = None,
    clip: float | None = None,
    multipliers: Mapping[str, float] | None = None,
    draws: int = DRAWS,
    features: int = FEATURES,
    seed: int = 0,
) -> Sharpness:
    """See `Prediction.sharpness`."""
    check_choice("optimizer", optimizer, OPTIMIZERS)
    for name, value in {"draws": draws, "features": features}.items():
        check_count(name, value)
    check_count("seed", seed, least=0)
    named = named_optimizer(optimizer, eps=eps, clip=clip, multipliers=multipliers)
    stepping: Stepping = prediction._sharpening
    reading, squares, chosen = stepping.reading, stepping.squares, stepping.clipped(named)
    if float(np.max(reading.logit_variance)) > WIDE_LOGITS:
        warnings.warn(
            f"the logits have a variance of {reading.logit_variance:.2g}: sharpness takes their "
            f"softmax for uniform, which holds below {WIDE_LOGITS:g}",
            ValidityWarning,
            stacklevel=3,
        )
    ends, shares = [], dict.fromkeys(squares, 0.0)
    for draw in range(draws):
        hessian = Hessian(reading, squares, chosen, features, np.random.default_rng((seed, draw)))
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
    """

    def __init__(
        self,
        reading: Reading,
        squares: Mapping[Key, float],
        optimizer: Optimizer,
        features: int,
        rng: np.random.Generator,
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
        self.heads = min(shared, max(1, math.ceil(features * shared / model.d_model)))
        self.share: float = self.heads / shared
        self.shapes: dict[Space, tuple[int, ...]] = {}
        self._roots: dict[int, tuple[Array, Array]] = {}
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
        basis = np.zeros((min(STEPS, self.size) + 1, self.size), np.float32)
        new, matrix = self._normal((self.size,)), np.zeros((len(basis), len(basis)))
        for k in range(1, len(basis)):
            matrix[k, k - 1] = matrix[k - 1, k] = size = np.linalg.norm(new)
            if not size > 0:
                break
            basis[k] = new / size
            new = self(basis[k]) - size * basis[k - 1]
            matrix[k, k] = new @ basis[k]
            new -= np.float32(matrix[k, k]) * basis[k]
        values, vectors = np.linalg.eigh(matrix[1:, 1:])
        return float(values[-1]), float(values[0]), vectors[:, -1].astype(np.float32) @ basis[1:]

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

    def _drawn(self, kernel: Array, width: float) -> Array:
        """(T, features) of that kernel per feature."""
        root = self._root(kernel)
        return np.asarray(root @ self._normal((root.shape[1], self._features(width))))

    # --- parameters ----------------------------------------------------------------------------

    def _inverse(self, key: Key, entries: float) -> float:
        """1/P, times the parameter's factor of the rate; 0 of one without a gradient."""
        factor = self.optimizer.factor(key[1])
        if self.optimizer.rule == "sgd":
            return factor
        square = self.squares.get(key, 0.0)
        return factor / ((square / entries) ** 0.5 + self.optimizer.epsilon) if square > 0 else 0.0

    def _lower(self, key: Key, gram: Array, size: float, width: float) -> Step:
        """A step of a parameter, of `size` times that Gram matrix over P, where its output is."""
        space, root, factor = ("lower", key), self._root(gram), np.float32(size**0.5)
        self.shapes[space] = root.shape[1], self._features(width)

        def back(delta: Array) -> Array:
            self._made[space] = factor * (root.T @ delta)
            return delta

        return lambda y: y + root @ (factor * self._given[space]), back

    def _bias(self, key: Key, width: float) -> Step:
        """A step of a bias, which all tokens share."""
        space, size = ("lower", key), np.float32(self._inverse(key, width) ** 0.5)
        self.shapes[space] = (self._features(width),)

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
        kernel: Array,
        gradient: Array,
        shape: tuple[float, float],
        variance: float,
        bias: bool,
    ) -> Step:
        """An (n, m) matrix that reads tokens of that kernel and receives that gradient."""
        n, m = shape
        inverse = self._inverse(key, n * m)
        weights = self._normal((self._features(n), self._features(m)))
        weights *= np.float32((variance / self.share) ** 0.5)
        random = (lambda x: x @ weights), (lambda delta: delta @ weights.T)
        sees = self._upper(key, gradient, m * inverse, n)
        steps = [sees, random, self._lower(key, kernel, n * inverse, m)]
        if bias:
            steps.append(self._bias((key[0], f"{key[1]}.bias"), m))
        return _chained(steps)

    # --- the network ---------------------------------------------------------------------------

    def _build(self) -> None:
        reading, stream = self.reading, self.reading.main
        width = float(reading.model.d_model)
        steps = [
            self._lower(
                (0, table.name),
                table.same,
                table.amplitude**2 * self._inverse((0, table.name), table.count * width),
                width,
            )
            for table in stream.tables
        ]
        tables = Site(-1, 0, "tables", None, stream.before, stream.received, width)
        steps.append(self._through(stream.embedding, tables)[0])
        site = next(self._points)
        for part in (stream.layers, stream.ending):
            step, site = self._through(part, site)
            steps.append(step)
        self._network = _chained([*steps, self._head()])

    def _head(self) -> Step:
        """The matrix to the logits as an upper one, and G of logits whose softmax is uniform."""
        reading, words, readout = self.reading, Words.of(self.reading), self.reading.readout
        rows, n = float(readout.vocab_size), float(readout.width)
        name = (0, "token") if reading.tied else (reading.model.layers + 1, "head")
        gram = readout.scale**2 * (words.sent * words.rows) @ words.sent.T
        last = reading.model.layers + 1, "head"
        sees = self._upper(last, gram, self._inverse(name, rows * n), n)
        matrix = self._normal((self._features(n), self._features(rows)))
        matrix *= np.float32(readout.scale * (readout.weight_variance / self.share / rows) ** 0.5)
        matrix -= matrix.mean(1, keepdims=True)
        judged = np.asarray(reading.targets >= 0, np.float32)[:, None]
        judged /= judged.sum()
        logits = (lambda x: judged * (x @ matrix)), (lambda delta: delta @ matrix.T)
        return _chained([sees, logits])

    def _through(self, part: Component, at: Site) -> tuple[Step, Site]:
        """A component's step, and the site behind it."""
        if isinstance(part, Chain):
            steps = []
            for one in part.children:
                step, at = self._through(one, at)
                steps.append(step)
            return _chained(steps), at
        if isinstance(part, Layer):
            step, _ = self._through(part.body, at)
            return step, next(self._points)
        if isinstance(part, Residual):
            kept, added = np.float32(part.skip_scale), np.float32(part.branch_scale)
            (forward, back), _ = self._through(part.branch, at)
            step = (
                lambda x: kept * x + added * forward(x),
                lambda delta: kept * delta + back(added * delta),
            )
            return step, next(self._points)
        if isinstance(part, Parallel):
            both = [self._through(branch, at) for branch in part.branches]
            step = (
                lambda x: sum_of([forward(x) for (forward, _), _ in both]),
                lambda delta: sum_of([back(delta) for (_, back), _ in both]),
            )
            return step, both[-1][1]
        leaving = next(self._points)
        return self.leaf(part, at, leaving), leaving

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site) -> Step:
        """A leaf's step, by its class; to be added to as `Walk.leaf`.

        Raises:
            DomainError: no step is known of it.
        """
        raise DomainError(f"sharpness does not cover {type(leaf).__name__} ({leaf.label})")

    @leaf.register(Linear)
    def linear(self, leaf: Linear, at: Site, leaving: Site) -> Step:
        given, key = leaf.parameters, (leaving.layer, leaf.weight)
        shape = float(given["fan_in"]), float(given["fan_out"])
        variance = float(given["weight_variance"])
        return self._matrix(key, at.kernel, leaving.gradient, shape, variance, leaf.has_bias)

    @leaf.register(Activation)
    def activation(self, leaf: Activation, at: Site, leaving: Site) -> Step:
        _, slope, bend = _derivatives(leaf.laws, self._drawn(at.kernel, at.width))
        bend = bend * self._drawn(leaving.gradient, at.width)
        return _bent(lambda x: slope * x, lambda delta: slope * delta, lambda x: bend * x)

    @leaf.register(GatedLinear)
    def gated(self, leaf: GatedLinear, at: Site, leaving: Site) -> Step:
        n, m = shape = float(leaf.fan_in), float(leaf.fan_out)
        variances = {"gate": float(leaf.gate), "ffn_in": float(leaf.ffn_in)}
        biases = float(leaf.gate_bias), float(leaf.bias)
        gate, factor = (
            self._drawn(n * variance * at.kernel + bias, m)
            for variance, bias in zip(variances.values(), biases, strict=True)
        )
        value, slope, bend = _derivatives(leaf.activation, gate)
        slopes = slope * factor, value
        received = self._drawn(leaving.gradient, m)
        # second derivatives: at the gate alone, and of gate and factor
        own, both = received * bend * factor, received * slope
        maps = []
        for (name, variance), one in zip(variances.items(), slopes, strict=True):
            wide = one.astype(float)
            gradient = leaving.gradient * (wide @ wide.T / wide.shape[1])
            key = (leaving.layer, name)
            maps.append(self._matrix(key, at.kernel, gradient, shape, variance, leaf.has_bias))
        (to_gate, from_gate), (to_factor, from_factor) = maps
        moved: list[Array] = []

        def forward(x: Array) -> Array:
            moved[:] = to_gate(x), to_factor(x)
            return np.asarray(slopes[0] * moved[0] + slopes[1] * moved[1])

        def back(delta: Array) -> Array:
            at_gate = slopes[0] * delta + own * moved[0] + both * moved[1]
            return np.asarray(from_gate(at_gate) + from_factor(slopes[1] * delta + both * moved[0]))

        return forward, back

    @leaf.register(FiniteNormalization)
    def norm(self, leaf: FiniteNormalization, at: Site, leaving: Site) -> Step:
        """y = x/rms(x) has the derivative d = (1 - y y^T/n) dx/rms, and with b the gradient at y,
        b.y has the second one -(y.e b.e' + b.e y.e' + b.y e.e' - 3 b.y y.e y.e'/n)/n, e = dx/rms.
        """
        if leaf.groups != 1:
            raise DomainError(f"sharpness does not cover norms of groups ({leaf.label})")
        centred = _about_mean if leaf.centres else _as_it_is
        y = centred(self._drawn(at.kernel, at.width))
        y = y / np.sqrt((y * y).mean(1, keepdims=True))
        b = self._drawn(leaving.gradient, at.width)
        inverse = 1 / np.sqrt(np.diag(at.kernel) + float(leaf.epsilon))
        over_size, gain = np.asarray(inverse, np.float32)[:, None], np.float32(leaf.gain)
        along = (b * y).mean(1, keepdims=True)

        def across(x: Array) -> Array:
            x = centred(over_size * x)
            return np.asarray(x - y * (y * x).mean(1, keepdims=True))

        def back(delta: Array) -> Array:
            delta = delta - y * (y * delta).mean(1, keepdims=True)
            return np.asarray(over_size * centred(delta))

        def bend(x: Array) -> Array:
            e = centred(over_size * x)
            by_y, by_b = (y * e).mean(1, keepdims=True), (b * e).mean(1, keepdims=True)
            sent = y * by_b + b * by_y + along * (e - 3 * by_y * y)
            return np.asarray(-gain * over_size * centred(sent))

        return _chained([_bent(across, back, bend), self._affine(leaf, leaving.layer, y, b)])

    def _affine(self, leaf: FiniteNormalization, layer: int, y: Array, b: Array) -> Step:
        """A gain and a bias per feature, the gain's gradient being sum_t b_t y_t."""
        gain = np.float32(leaf.gain)
        if not leaf.affine:
            return (lambda x: gain * x), (lambda delta: gain * delta)
        name, entries = f"{leaf.label}.gain", y.shape[1] / self.share
        factor = np.float32(self._inverse((layer, name), entries) ** 0.5)
        lower, upper = ("lower", (layer, name)), ("upper", (layer, name))
        self.shapes[lower] = self.shapes[upper] = (y.shape[1],)

        def forward(x: Array) -> Array:
            self._made[upper] = factor * (b * x).sum(0)
            return np.asarray(gain * x + factor * y * self._given[lower])

        def back(delta: Array) -> Array:
            self._made[lower] = factor * (y * delta).sum(0)
            return np.asarray(gain * delta + factor * b * self._given[upper])

        if not leaf.bias:
            return forward, back
        return _chained([(forward, back), self._bias((layer, f"{leaf.label}.bias"), entries)])

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, at: Site, leaving: Site) -> Step:
        kept, shape = 1.0 - float(leaf.parameters["drop_prob"]), self._features(at.width)
        mask = (self.rng.random((len(at.kernel), shape), np.float32) < kept) / np.float32(kept)
        return (lambda x: mask * x), (lambda delta: mask * delta)

    @leaf.register(Scale)
    def scale(self, leaf: Scale, at: Site, leaving: Site) -> Step:
        factor = np.float32(float(leaf.parameters["weight_variance"]) ** 0.5)
        return (lambda x: factor * x), (lambda delta: factor * delta)

    @leaf.register(Pool)
    def pool(self, leaf: Pool, at: Site, leaving: Site) -> Step:
        weights = np.asarray(leaf.weights(len(at.kernel)), np.float32)
        return (lambda x: weights @ x), (lambda delta: weights.T @ delta)

    @leaf.register(SelfAttention)
    def attention(self, leaf: SelfAttention, at: Site, leaving: Site) -> Step:
        rows, has = self.reading.attention(leaf, at, leaving, at), leaf.has_bias
        # sequences side by side, none of which sees another
        count, tokens = rows.sequences, len(at.kernel) // rows.sequences
        weights = rows.heads.weights.reshape(-1, count, tokens, count, tokens)
        if len(weights) > 1:  # heads that differ: some from the first to the last
            drawn_heads = self.heads * rows.heads.sharing
            weights = weights[np.linspace(0, len(weights) - 1, drawn_heads).round().astype(int)]
        weights = np.stack([weights[:, k, :, k] for k in range(count)])
        places = rows.heads.positions[:tokens]
        heads = dataclasses.replace(
            rows.heads, shared=self.heads, weights=weights, positions=places
        )
        split = functools.partial(_split, count=count, d_head=heads.d_head)
        width, d_head = float(leaf.d_model), heads.d_head
        inner = float(rows.heads.shared * d_head)
        widths = inner * heads.sharing, inner, inner
        maps, drawn = [], []
        for k, name in enumerate(("query", "key", "value")):
            size, gradient = float(rows.sizes[k]), np.asarray(rows.gradients[k])
            biased = name in has if isinstance(has, tuple) else bool(has)
            shape, key = (width, widths[k]), (leaving.layer, name)
            to, back_from = self._matrix(key, at.kernel, gradient, shape, size / width, biased)
            maps.append((to, back_from, np.float32(size**0.5)))
            drawn.append(split(self._drawn(at.kernel, widths[k])))
        passed = heads.attended(drawn[0], drawn[1], drawn[2], self.rng)
        gain = np.float32(rows.gain**0.5)

        def forward(x: Array) -> Array:
            # heads are drawn on the scale of the tokens
            query, key, value = (split(to(x) / size) for to, _, size in maps)
            value = np.repeat(value, heads.sharing, axis=1)
            return _joined(gain * (passed.moved(query, key) + passed.seen @ value))

        def back(delta: Array) -> Array:
            sent = passed.back(gain * split(delta))
            three = zip(sent, maps, strict=True)
            return np.asarray(
                sum_of([back_from(_joined(one) / size) for one, (_, back_from, size) in three])
            )

        return forward, back


_LEFT = 1e-4, 1e-2
"""Of the largest variance of a token: what is left of it below counts as none. The second where
a kernel between classes has negative eigenvalues, which small pivots would blow up."""


def _root(kernel: Array) -> Array:
    """L of K = L L^T with as many columns as are needed, by Cholesky's method with pivots."""
    sizes = np.diag(kernel)
    for least in _LEFT:
        packed, pivots, rank, _ = spstrf(
            kernel, tol=least * max(float(sizes.max()), 1e-30), lower=1
        )
        root = np.zeros((len(kernel), rank), np.float32)
        root[pivots - 1] = np.tril(packed[:, :rank])
        if np.vdot(root, root) < 1.01 * sizes.sum():
            return root
    return np.asarray(spread(kernel), np.float32)


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


def _bent(
    forward: Callable[[Array], Array],
    back: Callable[[Array], Array],
    bend: Callable[[Array], Array],
) -> Step:
    """A step whose second derivative sends what `bend` makes of its input's change."""
    moved: list[Array] = []

    def through(x: Array) -> Array:
        moved[:] = [x]
        return forward(x)

    return through, lambda delta: back(delta) + bend(moved[0])


def _derivatives(laws: Any, x: Array) -> tuple[Array, Array, Array]:
    """A function's values, slopes and second derivatives, these by central differences of slopes;
    a kink, beside which one is no derivative, counts as none."""
    if laws.entrywise is None:
        raise DomainError(f"sharpness does not cover {laws.name}: its function is not known")
    function, derivative = laws.entrywise
    wide, step = x.astype(float), 1e-3
    with np.errstate(over="ignore"):
        value, slope, above, below = (
            np.asarray(of(NUMPY, at) + 0 * wide)
            for of, at in (
                (function, wide),
                (derivative, wide),
                (derivative, wide + step),
                (derivative, wide - step),
            )
        )
    bend = (above - below) / (2 * step)
    bend[np.abs(above - below) > _KINK] = 0.0
    return value.astype(np.float32), slope.astype(np.float32), bend.astype(np.float32)


_KINK = 0.1
"""Change of a slope over two thousandths beyond which it jumps."""


def _about_mean(x: Array) -> Array:
    return np.asarray(x - x.mean(1, keepdims=True))


def _as_it_is(x: Array) -> Array:
    return x


def _split(x: Array, count: int, d_head: int) -> Array:
    """(sequences, heads, tokens, d_head)."""
    return np.swapaxes(x.reshape(count, len(x) // count, -1, d_head), 1, 2)


def _joined(x: Array) -> Array:
    """(T, features)."""
    return np.swapaxes(x, 1, 2).reshape(len(x) * x.shape[2], -1)
