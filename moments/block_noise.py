"""What one draw of a block's matrices adds at random, and what several sequences share of it.

Tokens alike have two kinds of modes: the token mean, with eigenvalue v + (L - 1) c, and L - 1
differences with eigenvalue v - c. A Gaussian matrix onto w features makes the realised eigenvalue
of each fluctuate by 2/w of its square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention import SelfAttention
from .composition import Chain, Component, Layer, Leaf, Residual
from .errors import MomentsError
from .parts import Dropout
from .propagate import Trace
from .softmax import SquareTable
from .softmax.chebyshev import THETA_MAX
from .state import Array, Gradient, Kernel, Signal


@dataclass(frozen=True)
class Modes:
    """The two eigenvalues of a kernel over L tokens alike, last axis (mean, difference)."""

    seq_len: int

    @property
    def count(self) -> Array:
        """Number of modes of each kind."""
        return np.array([1.0, self.seq_len - 1.0])

    @property
    def average(self) -> Array:
        """Weights with which the modes make up the variance of a token."""
        return self.count / self.seq_len

    def of(self, kernel: Kernel) -> Array:
        """Eigenvalues (..., 2) of a kernel."""
        diagonal, pairs = np.broadcast_arrays(kernel.diagonal, kernel.pairs)
        return np.stack([diagonal + (self.seq_len - 1) * pairs, diagonal - pairs], axis=-1)

    def kernel(self, modes: Array) -> Kernel:
        """The kernel with eigenvalues (..., 2)."""
        mean, difference = modes[..., 0], modes[..., 1]
        pairs = (mean - difference) / self.seq_len
        return Kernel(difference + pairs, pairs)


class Addition(NamedTuple):
    """What one residual addition adds at random; nothing is added where a part is no residual.

    Attributes:
        carried, added: (..., 2) modes of the skip connection and of the branch.
        alone: (..., 2) own variance of each mode.
        coherent: (..., 2, 2) covariance that modes of a kind share, and so does their average.
        kept: (...,) factor of the skip connection on a kernel.
        gain: (..., 2, 2) factor of the branch on the overlap of two different modes: of the means
            of two sequences, of a mean and a difference, of two differences.
        kappa: (...,) d_model times the relative variance of |branch|^2.
    """

    carried: Array
    added: Array
    alone: Array
    coherent: Array
    kept: Array
    gain: Array
    kappa: Array


def addition(
    carried: Array, added: Array, kept: Array, gain: Array, kappa: Array, width: Array
) -> Addition:
    """Modes that fluctuate one by one: carried and added are independent in direction."""
    alone = (4 * carried + kappa[..., None] * added) * added / width
    return Addition(carried, added, alone, 0.0 * gain, kept, gain, kappa)


def attention_addition(
    attention: SelfAttention,
    plain: Addition,
    returned: Array,
    received: Array,
    tokens: Kernel,
    modes: Modes,
) -> Addition:
    """Noise of the gradient that attention sends back, where modes do not fluctuate one by one.

    The output projection's noise, 2 over its fan-in for each mode received, is passed on by every
    path. The token mean that comes back is Gaussian through the value projection, 2/d. What the
    mean sends into the differences (through the keys, and by how often a token is attended to) is
    in each head one vector over tokens, J X W_v u: its squared norm has as many degrees of freedom
    as the keys and features that a^2 sees, and heads average.

    Args:
        attention: the block's attention.
        plain: the noise if every mode fluctuated by itself.
        returned: (..., 2, 2) what the branch does to the gradient's modes.
        received: (..., 2) the gradient's modes at the block's output.
        tokens: kernel of the tokens that attend.
        modes: of the tokens.
    """
    inner, width = attention.heads * attention.d_head, attention.d_model
    stage = returned * (2 / inner * received**2 / modes.count)[..., None, :]
    direct = np.stack([plain.added[..., 0], returned[..., 1, 1] * received[..., 1]], axis=-1)
    alone = (4 * plain.carried * plain.added + 2 * direct**2) / width
    # a_j^2 over its sum is the softmax of the doubled logits (no further than the table goes)
    scale = tokens.diagonal * width**2 * attention.query * attention.key
    theta = np.clip(4 * (tokens.diagonal - tokens.pairs) * scale, 0.0, THETA_MAX)
    squares = SquareTable.load().at_length(modes.seq_len).single(theta).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    coherent = stage @ np.swapaxes(returned, -1, -2)
    coherent[..., 1, 1] += share * (returned[..., 1, 0] * received[..., 0]) ** 2
    return plain._replace(alone=alone, coherent=coherent)


def logit_variance(attention: SelfAttention, base: Array, received: Array, modes: Modes) -> Array:
    """Relative variance of |W_k^T W_q x|^2, averaged over heads, and over tokens as gradients do.

    The paths through the logits hold G_ik x_i^T W_q W_k W_k^T W_q^T x_k summed over i, k, a
    quadratic form with one eigenvalue per mode, the product of the signal's and the gradient's.
    """
    weight = base * received
    alike = (weight**2 * modes.count).sum(-1) / (weight * modes.count).sum(-1) ** 2
    return alike * 2 * (1 / attention.d_head + 1 / attention.d_model) / attention.heads


def attention_of(component: Component) -> SelfAttention | None:
    """The attention in a branch, if there is one."""
    return next((part for part in _leaves(component) if isinstance(part, SelfAttention)), None)


def attending(branch: Component, inner: Trace, entering: Kernel) -> Kernel:
    """Kernel of the tokens that reach the attention in a branch, unchanged moments."""
    before = [isinstance(part, SelfAttention) for part in _leaves(branch)].index(True)
    if before == 0:
        return entering
    reached = inner.points[before - 1].signal.kernel
    return Kernel(reached.diagonal[0], reached.pairs[0])


def with_logits(component: Component, factor: Array) -> Component:
    """The component with the variance of its attention logits changed."""
    if isinstance(component, Chain):
        parts = tuple(with_logits(part, factor) for part in component.parts)
        return dataclasses.replace(component, parts=parts)
    if isinstance(component, SelfAttention):
        return dataclasses.replace(component, query=component.query * factor)
    return component


def _leaves(component: Component) -> tuple[Component, ...]:
    return component.parts if isinstance(component, Chain) else (component,)


def own_fluctuation(branch: Component, inner: Trace) -> Array:
    """Relative variance of |branch|^2 that its own matrices add, the same in both directions.

    A Gaussian matrix onto w features adds 2/w; an activation makes it (kurtosis - 1)/w. Backward
    the kurtosis is that of slope times Gaussian, equal for functions of degree 1 (at unit variance
    6.3 against 7.2 forward for GELU). Dropout's masks are fresh for every token and average out.
    """
    last = max(i for i, leaf in enumerate(_leaves(branch)) if not isinstance(leaf, Dropout))
    reached = inner.points[last].signal
    assert reached.spread is not None
    moment = reached.second_moment().diagonal
    relative: Array = reached.spread.diagonal / moment**2
    return relative[0]


def ratio(numerator: Array, denominator: Array) -> Array:
    """A ratio; 0 where there is no such mode (tokens identical, or of zero sum)."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def parts_of(layer: Layer) -> tuple[Component, ...]:
    """What follows one another in a layer."""
    return layer.body.parts if isinstance(layer.body, Chain) else (layer.body,)


def sites(layers: Sequence[Layer], trace: Trace) -> list[list[tuple[Kernel, Kernel]]]:
    """Kernels of signal and gradient before, between and after the parts of every layer."""
    by_place = {(point.layer, point.site): point for point in trace.points}
    stream = trace.stream()
    found = []
    for index, layer in enumerate(layers):
        inner = [by_place[layer.number, part.label] for part in parts_of(layer)]
        points = [stream[index], *inner]
        found.append([(p.signal.kernel, p.gradient.kernel) for p in points if p.gradient])
    return found


def coherent_gain(component: Component, kernel: Kernel, overlap: Array, width: Array) -> Array:
    """Factor (..., 2, 2) on a small overlap between two modes, the same in both directions."""
    _, across = _pair(component, Signal(Kernel(kernel.diagonal, overlap), 2, width=width))
    if attention_of(component) is not None:
        within = 0.0 * across  # differences between tokens do not survive averaging over them
    else:
        _, within = _pair(component, Signal(kernel, 2, width=width))
    within, across = np.broadcast_arrays(within, across)
    return np.stack([np.stack([across, within], -1), np.stack([within, within], -1)], -1)


def _pair(component: Component, pair: Signal) -> tuple[Array, Array]:
    """Covariance of two tokens of different sequences at the output, and its pullback's factor."""
    factor = 1.0 + 0.0 * pair.kernel.pairs
    for part in _leaves(component):
        if isinstance(part, SelfAttention):
            # Weights sum to 1 within each sequence, and all pairs across have one covariance.
            inner = part.heads * part.d_head
            pair = Signal(pair.kernel.scaled(part.d_model * part.value), 2, width=inner)
            factor = factor * inner * part.value
        elif isinstance(part, Leaf):
            pair, pullback = part.forward(pair)
            one = 1.0 + 0.0 * factor
            unit = Gradient(Kernel(one, one), 2)
            factor = factor * pullback(unit).gradient.kernel.pairs
        else:
            raise MomentsError(f"no overlap of sequences through a {type(part).__name__}")
    return pair.kernel.pairs, factor


def sequence_overlaps(layers: Sequence[Layer], trace: Trace) -> list[Array]:
    """Covariance of two tokens of different sequences before every part and after the last.

    Independent inputs start at 0, texts read by one embedding as two tokens of one sequence. What
    grows from there is the mean of the activations, which all tokens share.
    """
    entering = trace.stream()[0].signal
    start = entering.kernel.pairs
    read = any(point.layer == 0 and point.site != "stream" for point in trace.points)
    overlap = start if read else 0.0 * start
    found = [overlap]
    for layer, points in zip(layers, sites(layers, trace), strict=True):
        for part, (kernel, _) in zip(parts_of(layer), points, strict=False):
            pair = Signal(Kernel(0.0 * overlap + kernel.diagonal, overlap), 2, width=entering.width)
            if isinstance(part, Residual):
                added, _ = _pair(part.branch, pair)
                overlap = part.skip_scale**2 * overlap + part.branch_scale**2 * added
            else:
                overlap, _ = _pair(part, pair)
            found.append(overlap)
    return found
