"""Sharpness at initialisation: extreme eigenvalues of the (preconditioned) Hessian of the loss.

Two matrices, a lower one k and an upper one l, have a second derivative of the loss because W_k
changes the input of W_l, on which the gradient of W_l depends. With steps dW = V/sqrt(P), |V| = 1,
it is

    <V_l, M_lk V_k>,   M_lk = (B_l/P_l)^(1/2) T_lk (K_k/P_k)^(1/2),

K the Gram matrix over tokens of the input of W_k, B that of the gradient at the output of W_l, P
the root mean square of an entry of a matrix's gradient (Adam's preconditioner once it has settled;
1 for SGD), and T the linearised network between the two. The directions in which a matrix acts as a
lower and as an upper one are treated as independent: on (lower, upper) steps the Hessian acts as

    [ Q + G   M^T ]
    [   M      0  ],

with G the Gauss-Newton part of the logits and Q the second derivatives of norms, activations and
products in gated units. Rows of a table that is also the matrix to the logits have one step in both
roles. K, B and P are predicted; T and Q are those of one drawn network, signal and gradient, with
fewer features than the real one and matrices of the same gain: all that depends on the width is in
K, B, P and the norms of random matrices.

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

from ..engine.derivative import pullback
from ..errors import DomainError, ValidityWarning
from ..files import Serialised, as_frame
from ..formulas.checks import check_choice, check_count
from ..layers.attention.latent import LatentHeads
from ..layers.elementary import LayerScale
from ..layers.experts.mixture import Mixture
from ..layers.normalization import FiniteNormalization
from ..layers.recurrent.drawn import copies
from ..model.mixers import GatedDeltaNet, LinearAttention
from .drawn import Block
from .draws import Array, DrawnNetwork, Function, Key, Step, StepAndOutput, chained
from .ends import Words
from .leaves import latent_block, mixture_block
from .rules import Optimizer, named_optimizer
from .sites import Reading, Site, Table

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction
    from .result import Stepping

Space = tuple[str, Key]
"""Steps of a parameter in its role as a "lower" or as an "upper" matrix."""

OPTIMIZERS = ("sgd", "adam", "adamw")
"""Optimizers whose step is, after some batches, a fixed multiple of each parameter's gradient."""

LEAST_FEATURES, LEAST_NUMBERS = 64, 2**14
"""Least features of the drawn network (in whole heads), and least features times tokens. At width
128 half the features lose 4 to 8 % of an eigenvalue, a quarter of them 20 %."""

DRAWS = 3

LANCZOS_STEPS, LANCZOS_TOLERANCE = 32, 0.03
"""Largest number of steps of Lanczos' method, and residual over eigenvalue of both ends at which it
stops: the error of an eigenvalue is of the order of its square."""


@dataclass(frozen=True, repr=False)
class Sharpness(Serialised):
    """The extreme eigenvalues of P^(-1/2) H P^(-1/2), H the Hessian of the loss on the batch.

    Attributes:
        optimizer: "sgd" (P = 1), or "adam" and "adamw" (P the root mean square of an entry of each
            parameter's gradient).
        largest, least: means over draws of the network, in 1/(learning rate).
        largest_stderr, least_stderr: their standard errors; 0 for one draw.
        shares: (layer, parameter, share of the squared eigenvector of the largest).
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
        """From the (largest, least) eigenvalues of each draw."""
        (largest, least), count = np.mean(ends, axis=0), len(ends)
        spreads = np.std(ends, axis=0, ddof=1) / math.sqrt(count) if count > 1 else np.zeros(2)
        errors = float(spreads[0]), float(spreads[1])
        return cls(optimizer, float(largest), float(least), *errors, shares)

    @property
    def by_matrix(self) -> pd.DataFrame:
        """Shares in the largest eigenvector: columns layer, weight and share, the largest first."""
        return as_frame(
            sorted(self.shares, key=lambda row: -row[2]), columns=["layer", "weight", "share"]
        )

    def table(self) -> str:
        """Both eigenvalues, and the largest shares in the eigenvector of the largest, as text."""
        rows = [
            f"{layer:5d}  {name:16} {100 * share:5.1f} %"
            for layer, name, share in self.by_matrix.head(8).itertuples(index=False)
        ]
        operator = "the Hessian" if self.optimizer == "sgd" else "the Hessian over root gradients"
        return "\n".join(
            [
                f"{self.optimizer}: eigenvalues of {operator}",
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
    unclipped = named_optimizer(optimizer, eps=eps, clip=clip, multipliers=multipliers)
    stepping: Stepping = prediction._sharpening
    if features is None:
        features = max(LEAST_FEATURES, LEAST_NUMBERS // len(stepping.reading.main.before))
    check_count("features", features)
    reading, squares, rule = stepping.reading, stepping.squares, stepping.clipped(unclipped)
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
        hessian = Hessian(reading, squares, rule, features, rng, roots)
        largest, least, vector = hessian.extremes()
        ends.append((largest, least))
        for (_, key), part in hessian.split(vector):
            shares[key] = shares.get(key, 0.0) + float(np.vdot(part, part)) / draws
    rows = tuple((layer, name, share) for (layer, name), share in shares.items())
    return Sharpness.of(optimizer, ends, rows)


WIDE_LOGITS = 0.5
"""Variance of the logits up to which a mean of e^z differs from 1 by less than a third."""


class Hessian(DrawnNetwork):
    """The preconditioned Hessian of one draw of the network, as a linear operator.

    A product with a vector is one forward and one backward pass of the drawn network: components
    read their part of the vector from `_vector` and write theirs of the product to `_product`.

    Args:
        reading: kernels of signal and gradient at every site.
        squares: E |dLoss/dW|^2 of every parameter.
        optimizer: defines the preconditioner and the factors of the learning rate.
        features: least number of features of the drawn network.
        rng: generator of the draw.
        roots: cache shared by draws, from id(kernel) to the kernel and its root.
    """

    subject = "sharpness"

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
        for name, present in {
            "models with an encoder": reading.encoder is not None,
            "images": reading.main.patch is not None,
            "several steps": reading.batches is not None,
        }.items():
            if present:
                raise DomainError(f"sharpness does not cover {name}")
        super().__init__(reading, rng)
        self.squares, self.optimizer = squares, optimizer
        # the share of features is one of whole heads, of attention's keys and of mixers
        kv_heads = int(model.kv_heads or model.heads)
        value_heads = [_value_heads(block) for block in model.mixers]
        multiple = math.lcm(*(kv_heads // math.gcd(kv_heads, count) for count in value_heads))
        heads = math.ceil(features * kv_heads / model.d_model / multiple) * multiple
        self.share = min(1.0, heads / kv_heads)
        self.shapes: dict[Space, tuple[int, ...]] = {}
        self._roots = {} if roots is None else roots
        self._vector: dict[Space, Array] = {}
        self._product: dict[Space, Array] = {}
        self._build()

    # --- the operator --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def split(self, vector: Array) -> Iterator[tuple[Space, Array]]:
        """Split a vector into the steps of every parameter, with their spaces."""
        ends = list(itertools.accumulate(math.prod(shape) for shape in self.shapes.values()))
        pieces = np.split(np.asarray(vector, np.float32).ravel(), ends[:-1])
        for (space, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            yield space, piece.reshape(shape)

    def __call__(self, vector: Array) -> Array:
        self._vector = dict(self.split(vector))
        forward, back = self._network
        back(forward(np.zeros((), np.float32)))
        return np.concatenate([self._product[space].ravel() for space in self.shapes])

    def extremes(self) -> tuple[float, float, Array]:
        """Largest and least eigenvalue by Lanczos' method, and the eigenvector of the largest."""
        steps = min(LANCZOS_STEPS, self.size)
        basis, matrix = np.empty((steps, self.size), np.float32), np.zeros((steps, steps))
        new = self._normal((self.size,))
        residual = np.linalg.norm(new)
        for k in range(steps):
            np.divide(new, residual, out=basis[k])
            new = self(basis[k])
            if k:
                matrix[k, k - 1] = matrix[k - 1, k] = residual
                new -= residual * basis[k - 1]
            matrix[k, k] = new @ basis[k]
            new -= np.float32(matrix[k, k]) * basis[k]
            residual = np.linalg.norm(new)
            values, vectors = np.linalg.eigh(matrix[: k + 1, : k + 1])
            ends = [-1, 0]
            # an eigenvalue lies within residual * |last entry| of each
            if np.all(
                residual * np.abs(vectors[-1, ends]) <= LANCZOS_TOLERANCE * np.abs(values[ends])
            ):
                break
        vector = vectors[:, -1].astype(np.float32) @ basis[: k + 1]
        return float(values[-1]), float(values[0]), vector

    # --- draws ---------------------------------------------------------------------------------

    def _root(self, kernel: Array) -> Array:
        """`_kernel_root`, cached by array."""
        if id(kernel) not in self._roots:
            self._roots[id(kernel)] = kernel, _kernel_root(kernel)
        return self._roots[id(kernel)][1]

    def drawn_matrix(
        self, x: Array, shape: tuple[float, float], variance: float, rows: int = 0
    ) -> tuple[Array, Array]:
        """Draw the share of the matrix."""
        weights = self._normal((self._features(shape[0]), rows or self._features(shape[1])))
        weights = np.asarray(weights * np.float32((variance / self.share) ** 0.5))
        return weights, x @ weights

    # --- parameters ----------------------------------------------------------------------------

    def _inverse_p(self, key: Key, entries: float) -> float:
        """1/P times the parameter's factor of the learning rate; 0 without a gradient."""
        factor = self.optimizer.factor(key[1])
        if self.optimizer.rule == "sgd":
            return factor
        square = self.squares.get(key, 0.0)
        return factor / ((square / entries) ** 0.5 + self.optimizer.epsilon) if square > 0 else 0.0

    def _lower(self, key: Key, gram: Array, size: float, features: int) -> Step:
        """Lower steps, which change a parameter's output through a root of size * gram, (T, T)."""
        space, root, factor = ("lower", key), self._root(gram), np.float32(size**0.5)
        self.shapes[space] = root.shape[1], features

        def back(delta: Array) -> Array:
            self._product[space] = factor * (root.T @ delta)
            return delta

        return lambda y: y + root @ (factor * self._vector[space]), back

    def _bias(self, key: Key, width: float, features: int) -> Step:
        """Lower steps of a bias, which are the same at all tokens."""
        drawn = features / (width * self.share)
        space, size = ("lower", key), np.float32((drawn * self._inverse_p(key, width)) ** 0.5)
        self.shapes[space] = (features,)

        def back(delta: Array) -> Array:
            self._product[space] = size * delta.sum(0)
            return delta

        return lambda y: y + size * self._vector[space], back

    def _upper(self, key: Key, gram: Array, size: float, width: float) -> Step:
        """Upper steps, on which a change of input acts through a root of size * gram, (T, T)."""
        space, root, factor = ("upper", key), self._root(gram), np.float32(size**0.5)
        self.shapes[space] = root.shape[1], self._features(width)

        def forward(x: Array) -> Array:
            self._product[space] = factor * (root.T @ x)
            return x

        return forward, lambda delta: delta + root @ (factor * self._vector[space])

    def matrix(
        self,
        key: Key,
        drawn: Array,
        kernel: Array,
        gradient: Array,
        shape: tuple[float, float],
        bias: bool,
        whole: tuple[Key, float] | None = None,
    ) -> Step:
        """Both roles of a matrix, and that of its bias."""
        (n, m), weights, rows = shape, drawn, drawn.shape[1]
        inverse = self._inverse_p(*(whole or (key, n * m)))
        part = rows / (m * self.share)
        product = (lambda x: x @ weights), (lambda delta: delta @ weights.T)
        upper = self._upper(key, gradient, m * inverse, n)
        steps = [upper, product, self._lower(key, kernel, part * n * inverse, rows)]
        if bias:
            steps.append(self._bias((key[0], f"{key[1]}.bias"), m, rows))
        return chained(steps)

    # --- the network ---------------------------------------------------------------------------

    def _build(self) -> None:
        reading, stream = self.reading, self.reading.main
        width = float(reading.model.d_model)
        words, table = Words.of(reading), stream.token_table
        lookups = {
            other.name: self._lower(
                (0, other.name),
                other.same,
                other.amplitude**2 * self._inverse_p((0, other.name), other.count * width),
                self._features(width),
            )
            for other in stream.tables
            if not (other is table and reading.tied)
        }
        head = self._head(words)
        if reading.tied and table is not None:
            lookups[table.name], tied_head = self._tied(words, table)
            head.insert(0, tied_head)
        rows = self._normal((len(words.rows), self._features(width)))
        rows *= np.sqrt(words.rows * reading.readout.weight_variance)[:, None].astype(np.float32)
        x = np.zeros((), np.float32)
        for other in stream.tables:
            if other is table and reading.tied:
                vectors = rows[words.read]
            else:
                first, row_of_token, _ = other.places
                vectors = self._normal((len(first), self._features(width)))[row_of_token]
                vectors *= np.float32(other.variance**0.5) * (other.rows >= 0)[:, None]
            x = x + np.float32(other.amplitude) * vectors
        tables = Site(-1, 0, "tables", None, stream.before, stream.received, width)
        step, _, x = self.component(stream.embedding, tables, x)
        steps = [*lookups.values(), step]
        site = next(self._points)
        for part in (stream.layers, stream.ending):
            step, site, x = self.component(part, site, x)
            steps.append(step)
        forward, back = chained(steps)
        # one backward pass of the loss's gradient sets every `_FixedCotangent`
        self._vector = dict(self.split(np.zeros(self.size)))
        self._product = dict(self._vector)
        forward(np.zeros((), np.float32))
        back(self._loss_gradient(words, rows, x))
        self._network = chained([(forward, back), *head])

    def _loss_gradient(self, words: Words, rows: Array, x: Array) -> Array:
        """Gradient of the loss at the head's input x: the rows' part, and the part along x, from
        the softmax of logits of variance s^2, E_p z - E z = s^2."""
        readout = self.reading.readout
        along = np.asarray(self.reading.targets >= 0, np.float32)
        along *= np.float32(self.reading.logit_variance / along.sum() / readout.width)
        size = (x * x).mean(1)
        along /= np.where(size > 0, size, 1.0)
        return np.asarray(
            readout.scale * words.logit_gradient @ rows + along[:, None] * x, np.float32
        )

    def _head(self, words: Words) -> list[Step]:
        """The head: upper steps of its matrix, unless it is tied, and G of a uniform softmax."""
        reading, readout = self.reading, self.reading.readout
        rows, n = float(readout.vocab_size), float(readout.width)
        matrix = self._normal((self._features(n), self._features(rows)))
        matrix *= np.float32(readout.scale * (readout.weight_variance / self.share / rows) ** 0.5)
        matrix -= matrix.mean(1, keepdims=True)
        weights = np.asarray(reading.targets >= 0, np.float32)[:, None]
        weights /= weights.sum()
        logits = (lambda x: weights * (x @ matrix)), (lambda delta: delta @ matrix.T)
        if reading.tied:
            return [logits]
        key = reading.model.layers + 1, "head"
        gram = readout.scale**2 * (words.logit_gradient * words.rows) @ words.logit_gradient.T
        return [self._upper(key, gram, self._inverse_p(key, rows * n), n), logits]

    def _tied(self, words: Words, table: Table) -> tuple[Step, Step]:
        """Steps of a table that is also the matrix to the logits, at the lookup and at the head.
        Both act on the same rows, so they are not independent."""
        key, width = (0, table.name), float(self.reading.readout.width)
        space, root = ("lower", key), np.float32(self._inverse_p(key, table.count * width) ** 0.5)
        self.shapes[space] = len(words.rows), self._features(width)
        reads = np.asarray(root * table.amplitude * words.reads, np.float32)
        logit_gradient = words.logit_gradient * np.sqrt(words.rows)
        logit_gradient = np.asarray(root * self.reading.readout.scale * logit_gradient, np.float32)

        def lookup_back(delta: Array) -> Array:
            self._product[space] = self._product[space] + reads.T @ delta
            return delta

        def head(x: Array) -> Array:
            self._product[space] = logit_gradient.T @ x
            return x

        lookup = (lambda x: x + reads @ self._vector[space]), lookup_back
        return lookup, (head, lambda delta: delta + logit_gradient @ self._vector[space])

    def fitted(self, y: Array, site: Site) -> Array:
        return _rescaled(y, site.kernel)

    def function(
        self, run: Callable[..., Any], values: Sequence[Array], gradient: Array
    ) -> tuple[Function, Array]:
        """Forward, changes of all values are mapped by the Jacobian of f = run(*values). Backward,
        the Hessian of <b, f> times these changes is added to the cotangents, b the output's one, of
        kernel `gradient`."""
        output, pull = pullback(run, *values)
        _, push = pullback(pull, np.zeros_like(output))
        fixed, changes = _FixedCotangent(gradient), list[Array]()

        @functools.cache
        def hessian() -> Any:
            return pullback(lambda *x: pullback(run, *x)[1](fixed.value), *values)[1]

        def forward(*arguments: Array) -> Array:
            pairs = zip(arguments, values, strict=True)
            changes[:] = [np.broadcast_to(u, x.shape) for u, x in pairs]
            return np.asarray(push(tuple(changes))[0], np.float32)

        def back(delta: Array) -> list[Array]:
            fixed(delta)
            terms = zip(pull(delta), hessian()(tuple(changes)), strict=True)
            return [np.asarray(first + second, np.float32) for first, second in terms]

        return (forward, back), np.asarray(output, np.float32)

    def gradients_before(
        self, run: Callable[..., Any], values: Sequence[Array], gradient: Array
    ) -> list[Array]:
        output, pull = pullback(run, *(value.astype(float) for value in values))
        return [
            gradient * (slope @ slope.T / slope.shape[1]) for slope in pull(np.ones(output.shape))
        ]

    def norm_parameters(self, leaf: FiniteNormalization, leaving: Site, y: Array) -> list[Step]:
        if not leaf.affine:
            return []
        key, entries = (leaving.layer, f"{leaf.label}.gain"), y.shape[1] / self.share
        steps = [self._gains(key, y / np.float32(leaf.gain), leaving.gradient)]
        if leaf.bias:
            steps.append(self._bias((key[0], f"{leaf.label}.bias"), entries, y.shape[1]))
        return steps

    def _gains(self, key: Key, y: Array, gradient: Array) -> Step:
        """Steps of gains on y, whose gradient is sum_t b_t y_t, b the cotangent of the output."""
        fixed = _FixedCotangent(gradient)
        factor = np.float32(self._inverse_p(key, y.shape[1] / self.share) ** 0.5)
        lower, upper = ("lower", key), ("upper", key)
        self.shapes[lower] = self.shapes[upper] = (y.shape[1],)

        def forward(x: Array) -> Array:
            self._product[upper] = factor * (fixed.value * x).sum(0)
            return np.asarray(x + factor * y * self._vector[lower])

        def back(delta: Array) -> Array:
            b = fixed(delta)
            self._product[lower] = factor * (y * delta).sum(0)
            return np.asarray(delta + factor * b * self._vector[upper])

        return forward, back

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        return super().leaf(leaf, at, leaving, x)

    @leaf.register(LayerScale)
    def layer_scale(self, leaf: LayerScale, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        """Steps of gains whose value `Residual.branch_scale` applies, so that they are 1 here."""
        key, gain = (leaving.layer, leaf.label), np.float32(leaf.gain)
        return self._gains(key, x / gain, leaving.gradient / gain**2), x

    @leaf.register(LatentHeads)
    def latent(self, leaf: LatentHeads, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        block, latents = latent_block(leaf, self.reading, at, leaving)
        before, d = [], float(leaf.heads.d_model)
        layer, rope_dim = leaving.layer, int(leaf.block.rope_dim)
        for latent in latents:
            shape, key = (d, latent.at.width), (layer, latent.name)
            rows = latent.at.width + (rope_dim if latent.name == "kv_down" else 0)
            weights, y = self.drawn_matrix(x, shape, latent.variance)
            gradient, whole = latent.at.gradient, (key, d * rows)
            down = self.matrix(key, weights, at.kernel, gradient, shape, False, whole)
            after = dataclasses.replace(latent.after, layer=layer)
            norm, y = self.norm(latent.norm, latent.at, after, y)
            before.append((latent.readers, chained([down, norm]), y))
        return self.drawn_block(block, layer, x, before)

    @leaf.register(Mixture)
    def mixture(self, leaf: Mixture, at: Site, leaving: Site, x: Array) -> StepAndOutput:
        block, hidden, out, gates = mixture_block(leaf, self.reading, at, leaving)
        mean = (gates @ np.swapaxes(gates, -1, -2)).mean(0)
        drawn = self.preactivations(block, dict.fromkeys(block.matrices, x))
        own = block.head.gates(drawn[2][leaf.name][:1])[0]
        # two tokens share the weights of those experts only that this draw's router gives to both
        nonzero = mean > 1e-9 * mean.max()
        shared = np.where(nonzero, own @ own.T / np.where(nonzero, mean, 1.0), 0.0)
        hidden = dataclasses.replace(hidden, kernel=shared * hidden.kernel)
        gradients = {
            name: kernel if name == leaf.name else shared * kernel
            for name, kernel in block.gradients.items()
        }
        step, y = self.drawn_block(block, leaving.layer, x, gradients=gradients, drawn=drawn)
        key, shape = (leaving.layer, out.name), (float(out.fan_in), float(out.fan_out))
        weights, y = self.drawn_matrix(y, shape, out.variance)
        steps = [step, self.matrix(key, weights, hidden.kernel, leaving.gradient, shape, False)]
        if out.bias is not None:
            key = leaving.layer, f"{out.name}.bias"
            inverse = self._inverse_p(key, own.shape[1] * shape[1])
            steps.append(self._lower(key, own @ own.T, inverse, self._features(shape[1])))
        return chained(steps), y

    def own_parameter(
        self, block: Block, layer: int, name: str, values: Array
    ) -> tuple[Callable[[], Any], Callable[[Array], None]]:
        """Lower steps of a parameter inside a block's function, the same for all its uses."""
        key, parts = (layer, block.named(name)), len(values)
        space, times = ("lower", key), copies(block.head, name).times
        drawn = max(1, min(parts, math.ceil(times * self.share - 1e-9)))
        self.shapes[space] = drawn, *values.shape[1:]
        inverse = self._inverse_p(key, times * values[0].size)
        size = np.float32((inverse * drawn / (times * self.share)) ** 0.5)
        index = np.arange(parts) * drawn // parts

        def use(cotangent: Array) -> None:
            total = np.zeros(self.shapes[space], np.float32)
            np.add.at(total, index, cotangent)
            self._product[space] = size * total

        return (lambda: size * self._vector[space][index]), use


def _value_heads(block: Any) -> int:
    """Number of value heads of a mixer whose heads can only be drawn whole; 0 for others."""
    if isinstance(block, GatedDeltaNet):
        return block.value_heads
    return block.heads if isinstance(block, LinearAttention) and block.norm != "all" else 0


CUTOFF = 0.03
"""Share of a kernel's largest eigenvalue below which others are left out: they belong to single
tokens, and hardly contribute to directions in which all layers move."""


def _kernel_root(kernel: Array) -> Array:
    """R, (T, rank), with R R^T the kernel without its eigenvalues below `CUTOFF`.

    Found on the span of products with random vectors, of which there are twice as many until they
    suffice (Halko, Martinsson and Tropp 2011, Finding structure with randomness, algorithm 4.4), or
    by a full decomposition at few tokens or high rank."""
    size, tokens = float(np.diag(kernel).max()) or 1.0, len(kernel)
    scaled, rng = (kernel / size).astype(np.float32), np.random.default_rng(0)
    count = 32
    while 4 * count <= tokens:
        span = np.linalg.qr(scaled @ (scaled @ rng.standard_normal((tokens, count), np.float32)))[0]
        values, vectors = np.linalg.eigh(span.T @ (scaled @ span))
        if values[0] < CUTOFF * values[-1]:
            vectors = span @ vectors
            break
        count *= 2
    else:
        values, vectors = np.linalg.eigh(scaled)
    kept = values > CUTOFF * max(values[-1], 0)
    return np.asarray(vectors[:, kept] * np.sqrt(size * values[kept]), np.float32)


class _FixedCotangent:
    """The cotangent of the first backward pass at a point, scaled per token to its kernel."""

    def __init__(self, gradient: Array) -> None:
        self._gradient = gradient
        self.value: Array = np.zeros((), np.float32)

    def __call__(self, delta: Array) -> Array:
        if not self.value.shape:
            self.value = _rescaled(delta, self._gradient)
        return self.value


def _rescaled(x: Array, kernel: Array) -> Array:
    """Scale every token to the mean square in the kernel's diagonal."""
    square = (x * x).mean(1)
    size = np.sqrt(np.where(square > 0, np.diag(kernel) / np.where(square > 0, square, 1.0), 0.0))
    return np.asarray(x * size[:, None], np.float32)
