"""Post-LN layers that share one set of weights (ALBERT): signals of different depths correlate.

Let z(0) be the input, z(t+1) = n(u(t) + f(t)) and u(t) = n(z(t) + a(t)), with a(t) and f(t) the
outputs of attention and feed-forward block, of the same weights at every depth. The streams of all
depths are combinations of z(0), a(0), a(1), ..., f(0), f(1), ... The a's and f's have independent
output matrices and are uncorrelated, while E a(s).a(t) and E f(s).f(t) follow from E z(s).z(t) and
E u(s).u(t) as for two tokens of one layer: no matrix is multiplied by its transpose in the forward
pass, so all projections of all depths are jointly Gaussian at infinite width (Yang 2019, Tensor
Programs I, for recurrent networks). E z(s).a(t) follows from these along the residual sums.

The map from the input's covariance across two replicas of the network to that of the last layer is
differentiated by `moments.engine.derivative`: this gives gradients at every depth and, in the
covariance of a weight between two depths, the correlation of its gradients from both depths
(docs/theory/gradients.md, Two replicas). Derived here, to leading order in 1/width.

Tokens are exchangeable: every covariance is a pair, of a token with itself and with another. Rows
of attention weights overlap by the exact statistics of softmax, at the geometric mean of the logit
variances of two depths. Overlaps of tokens, which fluctuate as those of the embedding's rows, enter
queries' and keys' gradients to first order in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import laws
from ..engine.composition import Chain, Layer, Leaf, Pullback, PullbackResult
from ..engine.derivative import plain, primitive, pullback
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from ..engine.trace import Record, Run
from ..errors import DomainError, MomentsError
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from .attention.softmax import AlikeRows, PairStatistics

MATRICES = ("query", "key", "value", "output", "ffn_in", "ffn_out")
_NORMS = ("attention.norm", "ffn.norm")


@dataclass(frozen=True)
class SharedLayer(Leaf):
    """One depth of the shared layer; `SharedStack` computes its moments."""

    label: str = ""

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        raise MomentsError("one layer of many that share their weights is followed with the others")


@dataclass(frozen=True)
class SharedStack(Chain):
    """All layers, with the weights of one.

    Attributes:
        model: the declaration, of which the first layer applies to all.
    """

    model: Any = None

    @classmethod
    def of(cls, model: Transformer) -> SharedStack:
        """The layers of a model with `shared_layers`."""
        layers = tuple(Layer(SharedLayer(), n) for n in range(1, model.layers + 1))
        return cls(layers, model=model)

    def with_children(self, children: tuple[Any, ...]) -> SharedStack:
        return self

    def propagate(self, signal: Signal, run: Run) -> Record:
        if signal.resolved:
            raise DomainError(
                "shared_layers: tokens are followed as alike; leave out tokens=True, kernels, "
                "attention_mask, document_ids and targets of single tokens"
            )
        if np.ndim(signal.kernel.diagonal) or np.ndim(signal.kernel.off_diagonal):
            raise DomainError("shared_layers: one configuration at a time")
        entering_pair = np.array([float(signal.kernel.diagonal), float(signal.kernel.off_diagonal)])
        zeros = (np.zeros(shape) for shape in self._shapes().values())
        points, pull = pullback(self._points, entering_pair, *zeros)
        records, entering = [], signal
        for layer, point in zip(self.components, points, strict=True):
            assert isinstance(layer, Layer)
            kernel = Kernel(float(point[0]), float(point[1]))
            known = None if signal.fluctuation is None else Fluctuation.fixed(kernel)
            leaving = Signal(kernel, signal.seq_len, width=signal.width, fluctuation=known)
            inner = Record(layer.body, layer.number, entering, leaving)
            run.layer = layer.number
            records.append(
                run.record_forward(Record(layer, layer.number, entering, leaving, (inner,)))
            )
            run.layer_done()
            entering = leaving
        return Record(self, run.layer, signal, entering, tuple(records), pull)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        length, width = record.input.seq_len, float(np.asarray(record.input.width))
        counts = width * length * np.array([1.0, length - 1.0])
        top = np.array([float(gradient.kernel.diagonal), float(gradient.kernel.off_diagonal)])
        names = tuple(self._shapes())
        last = np.zeros((len(record.children), 2))
        last[-1] = counts * top
        entered, at_points, *shares = record.pullback(last)

        def gradient_of(cotangent: Array) -> Gradient:
            return Gradient(Kernel(*(cotangent / counts).tolist()), length)

        received = [*map(gradient_of, at_points[:-1]), gradient]
        below = [gradient_of(entered), *received[:-1]]
        children = []
        for number in reversed(range(len(record.children))):
            layer = record.children[number]
            norms = {n: s[number].sum() for n, s in zip(names[1:], shares, strict=True)}
            (inner,) = layer.children
            run.record_backward(layer, received[number])
            pulled = PullbackResult(below[number], norms.copy)  # this depth's part of the norms
            done = inner.completed(received[number], below[number], (), pulled)
            children.append(layer.completed(received[number], below[number], (done,)))
            run.layer_done()
        return record.completed(gradient, below[0], tuple(reversed(children)))

    # --- the map -------------------------------------------------------------------------------

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the variables to differentiate in: an addition to every depth's stream, and to
        the covariance of every parameter between two depths."""
        model, count = self.model, self.model.layers
        depths = (count, count)
        shapes = {"stream": (count, 2)} | dict.fromkeys(MATRICES, depths)
        if model.biases is not None:
            shapes |= {f"{name}.bias": depths for name in MATRICES if name != "key"}
        if model.norm_affine:
            biased = model.norm_bias and model.normalization == "layernorm"
            ends = ("gain", "bias") if biased else ("gain",)
            shapes |= {f"{norm}.{end}": depths for norm in _NORMS for end in ends}
        return shapes

    def _points(self, entering: Array, *extra: Array) -> Array:
        """(N, 2) moments of every layer's output across two replicas, from those of the input and
        the additions of `_shapes`."""
        return np.stack(self._streams(entering, dict(zip(self._shapes(), extra, strict=True))))

    def _streams(self, entering: Array, extra: Mapping[str, Array]) -> list[Array]:
        """Moments of every layer's output, layer by layer."""
        model, epsilon = self.model, self.model.norm_epsilon
        z, points = entering[None, None], []
        first: list[Any] = []  # standard deviations before either norm
        second: list[Any] = []
        for depth in range(model.layers):
            a = self._attention(z, extra)
            with_a = _along(a, first, second, "attention")
            v = z + a + with_a + np.swapaxes(with_a, 0, 1)
            first.append(np.sqrt(plain(v)[depth, depth, 0] + epsilon))
            behind = np.array(first)[:, None, None]
            u = v / (behind * np.swapaxes(behind, 0, 1))
            b = self._learned("attention.norm", plain(u), extra)
            with_b = _along(b, first, second, "ffn")
            u = u + b + with_b / behind + np.swapaxes(with_b / behind, 0, 1)
            f = self._feed_forward(u, extra)
            with_f = _along(f, first, second, "ffn")
            y = u[depth, depth] + f[depth, depth] + 2 * with_f[depth, depth] / first[depth]
            second.append(np.sqrt(plain(y)[0] + epsilon))
            # E z(depth + 1).z(s), before the additions of the second norm's gain and bias
            across = (z + np.swapaxes(with_a, 0, 1))[depth] / first[depth]
            across = (across + np.swapaxes(with_b + with_f, 0, 1)[depth]) / second[depth]
            own = y / second[depth] ** 2
            normal = _grown(plain(z), plain(across), plain(own))[1:, 1:]
            c = self._learned("ffn.norm", normal, extra)
            with_c = _along(c, first, second, "norm")
            across = across + np.swapaxes(with_c, 0, 1)[depth]
            own = own + c[depth, depth]
            own = own + 2 * with_c[depth, depth] / (first[depth] * second[depth])
            own = own + extra["stream"][depth]
            points.append(own)
            z = _grown(z, across, own)
        return points

    def _learned(self, norm: str, normal: Array, extra: Mapping[str, Array]) -> Array:
        """Additions of a norm's gain and bias to the moments after it, beyond gains of 1."""
        count = normal.shape[0]
        added = 0.0 * normal
        if f"{norm}.gain" in extra:
            added = added + normal * extra[f"{norm}.gain"][:count, :count][..., None]
        if f"{norm}.bias" in extra:
            added = added + extra[f"{norm}.bias"][:count, :count][..., None]
        return added

    def _after_matrix(self, x: Array, name: str, extra: Mapping[str, Array]) -> Array:
        """Moments after a matrix and its bias."""
        count = x.shape[0]
        fan_in = self.model.matrix_shapes[name][0]
        variance = getattr(self.model.layer_weights(1), name)
        behind = x * (fan_in * (variance + extra[name][:count, :count][..., None]))
        if f"{name}.bias" in extra:
            start = self.model.biases.layer(1).get(name, 0.0)
            behind = behind + (start + extra[f"{name}.bias"][:count, :count][..., None])
        return behind

    def _attention(self, z: Array, extra: Mapping[str, Array]) -> Array:
        model = self.model
        count, length, overlaps = z.shape[0], model.seq_len, 1.0 / model.d_model
        if isinstance(model.embedding, Embedding):
            overlaps = model.embedding.unshared_overlap(model.d_model)
        gap = z[..., :1] - z[..., 1:]
        # variance of the overlap of the unshared parts of two tokens
        unshared = np.diagonal(plain(gap)[..., 0])
        chance = (np.multiply.outer(unshared, unshared) * overlaps)[..., None]
        scale = float(model.temperatures[0]) ** -2
        queries = self._after_matrix(z, "query", extra) * scale
        keys = self._after_matrix(
            gap, "key", {"key": extra["key"]}
        )  # a common bias of keys cancels
        logits = queries * keys
        own = np.diagonal(plain(logits)[..., 0])
        sizes = np.sqrt(np.multiply.outer(own, own))[..., None]
        weights = _overlap(logits, sizes, length)
        kept = _dropped(count, model.attention_dropout)
        values = self._after_matrix(z, "value", extra)
        unshared_values = values[..., :1] - values[..., 1:]
        heads = values[..., 1:] + unshared_values * (weights * kept)
        for name in ("key", "value"):
            chance = self._after_matrix(chance, name, {name: extra[name]})
        slopes = _slopes(plain(logits), sizes, length) * length
        heads = heads + slopes * queries * chance
        return self._after_matrix(heads, "output", extra) * _dropped(count, model.dropout)

    def _feed_forward(self, u: Array, extra: Mapping[str, Array]) -> Array:
        hidden, count = self._after_matrix(u, "ffn_in", extra), u.shape[0]
        own, pairs = hidden[..., 0], hidden[..., 1]
        # activations take the full matrix of two tokens at every depth
        both = np.concatenate([np.concatenate([own, pairs], 1), np.concatenate([pairs, own], 1)])
        with laws.evaluating(laws.Layout(True), _level(both)):
            active = laws.activation(self.model.activation, both)
        pair = np.stack([active[:count, :count], active[:count, count:]], -1)
        pair = pair * _dropped(count, self.model.activation_dropout)
        out = self._after_matrix(pair, "ffn_out", extra)
        return out * _dropped(count, self.model.ffn_dropout)


def _pairs(psi: Array, theta: Array, keys: int) -> PairStatistics:
    """Statistics of two softmax rows of logit variance theta and covariance psi."""
    rho = np.clip(ratio_or_zero(psi, theta + 0.0 * psi), -1.0, 1.0)
    return AlikeRows.of(float(keys)).pairs(theta + 0.0 * psi, keys, rho)


def _slopes(psi: Array, theta: Array, keys: int) -> Array:
    return np.asarray(_pairs(psi, theta, keys).jacobian_overlap)


_overlap = primitive(
    lambda psi, theta, keys: np.asarray(_pairs(psi, theta, keys).overlap),
    lambda _, psi, theta, keys: lambda g: g * _slopes(psi, theta, keys),
)
"""E sum_k p_k p'_k, in the covariance of the logits; their variances are constants."""


def _level(x: Array) -> float:
    return float(getattr(x, "level", np.inf))


def _dropped(count: int, drop_prob: float) -> Array:
    """(count, count, 2) factors of dropout: on a token with itself, at one depth."""
    factors = np.ones((count, count, 2))
    factors[np.arange(count), np.arange(count), 0] = 1 / (1 - drop_prob)
    return factors


def _along(made: Array, first: list[Any], second: list[Any], where: str) -> Array:
    """E z(s).x(t) for additions x(t) to the stream at one place of every layer, (depth + 1,
    depth + 1, 2), whose layers are correlated.

    Args:
        made: E x(s).x(t).
        first, second: standard deviations before the norms after attention and feed-forward block.
        where: "attention": before the first norm; "ffn": between both; "norm": after the second.
    """
    rows = [0.0 * made[0]]
    for s in range(made.shape[0] - 1):
        at = made[s]
        if where == "attention":
            rows.append((rows[s] + at) / (first[s] * second[s]))
        elif where == "ffn":
            rows.append((rows[s] / first[s] + at) / second[s])
        else:
            rows.append(rows[s] / (first[s] * second[s]) + at)
    return np.stack(rows)


def _grown(z: Array, across: Array, own: Array) -> Array:
    """Append a depth to moments, from its moments with earlier depths and with itself."""
    rows = np.concatenate([z, across[:, None]], 1)
    return np.concatenate([rows, np.concatenate([across, own[None]])[None]])
