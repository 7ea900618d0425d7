"""How much two tokens' overlap x_a.x_b/d varies over draws, beyond independent features.

Gaussian features have overlaps o of covariance

    Cov(o_ab, o_cd) = (C_ac C_bd + C_ad C_bc)/d.

One over d, little as it is, meets L^2 pairs of tokens where their mean, C_ab, is 0 beside L terms
C_aa: the gradients of queries and keys sum o_ab^2 over keys, and so gain L/d relative to that.
A network's features are not independent: it moves the overlaps it is given, and a residual sum adds
them up with their sign. Here the 1/d is followed as one number, the relative variance nu of the
overlap of what two tokens have of their own. With T the skip connection's and B the branch's own
variance of a token, and e the relative response of the branch's overlap to the stream's,

    linear map          nu + 1/width
    activation          e^2 (nu - 1/width) + 1/width
    dropout             (nu u^2 + (u'^2 - u^2)/width)/u'^2, own variance u before and u' after
    normalisation       nu: what the norms of two tokens do to C_ab is no overlap of their own
    attention           nu + 1/width of the values + e_q^2 (2/width + 1/(keys heads)); e = e_q + e_a
    residual sum        (nu T^2 + nu_b B^2 + 2 (e nu + 1/width) T B)/(T + B)^2

since the branch is turned at random, E (t_a.b_b)^2 = d T B. An activation's e is the slope of its
covariance law times own variance in over own variance out (Price). So is attention's e_q: rows
differ because their queries do, and two outputs' overlap moves with that of the tokens that ask by
what the query path sends back. In each head these differences pass through two matrices of d_head
columns and a sum over keys, whence the third term. Beside it e_a is as far as averages meet their
own tokens, of rows taken uniform. Left out: how features that two tokens share crowd activations
(up to 1/width more, for tokens all but equal). Three Post-LN layers of width 64 on 32 tokens have,
behind each block, nu = .0196, .0235, .0255, .0304, .0314, .0371 (standard error .0003); here .0193,
.0236, .0257, .0304, .0313, .0365, and without e_q .0162, .0208, .0202, .0252, .0246, .0301.

Tokens of fixed norm share a part whose size is one number a draw, and leave the rest to each: own
variance then varies as a whole (`own_spread`), and squared norms of query and key gradients, which
hold it twice, are its mean square.

nu is one number for all pairs of tokens. In six layers of width 128 on a text of 2 x 64 tokens,
overlaps vary by 1, 1.3, 1.6, 1.8, 2.0, 2.1 over d in GPT-2 (here 1, 1.4, 1.7, 1.9, 2.1, 2.3) and
by 1 to 2.8 in Llama at deviation .02 (2.6). There causal averages fill the stream, what tokens have
of their own lies in few directions whose sizes vary by more (up to 6/d), and squared query and key
norms stay 2 to 6 percent low (standard error 4 a layer); docs/real-modules.md has every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import (
    BottomToTop,
    Chain,
    Component,
    Layer,
    Leaf,
    Parallel,
    Pulled,
    Residual,
)
from ..engine.propagate import Point, Trace
from ..engine.realised import between_rows, has_fixed_norms, met_by
from ..engine.state import Gradient, Kernel, Signal
from ..transfer.attention.by_token import self_masks
from ..transfer.attention.cross import CrossAttention
from ..transfer.attention.normalized import NormalizedAttention
from ..transfer.attention.self_attention import SelfAttention
from ..transfer.elementary import Activation, Dropout, Linear
from ..transfer.gated import GatedLinear
from ..transfer.normalization import DynamicTanh
from .overlap_units import unit_growth, units


class Overlap(NamedTuple):
    """At one point of a network.

    Attributes:
        variance: nu.
        response: relative change of the overlap per relative change of the stack's input's.
    """

    variance: float
    response: float = 1.0


class Overlaps(NamedTuple):
    """What attention attends to, over a whole stack.

    Attributes:
        attended: nu of what every attention attends to, by the identity of its `Signal`.
        growth: factors on squared gradient norms, by layer and name.
        last: nu at the stack's output.
    """

    attended: dict[int, float]
    growth: dict[tuple[int, str], float]
    last: float


def stack_overlaps(stack: Component, trace: Trace, memory: float | None = None) -> Overlaps:
    """Follow nu through a declaration along the trace of its forward pass.

    Args:
        stack: the layers, `architecture.declare`.
        trace: of their forward pass, one configuration.
        memory: nu of what cross-attention reads; None: 1/width of that.
    """
    points = iter(trace.points)
    start = next(point for point in points if point.site == "stream").signal
    walk = _Walk(trace, points)
    if trace.memory is not None:
        walk.memory = memory if memory is not None else 1.0 / trace.memory.width
        walk.attended[id(trace.memory)] = walk.memory
    _, last = walk.through(stack, start, Overlap(1.0 / start.width))
    return Overlaps(walk.attended, walk.growth, last.variance)


def own_variance(signal: Signal) -> float:
    """What a token's second moment has beyond what two tokens share, averaged."""
    tokens = signal.second_moment()
    return max(float(tokens.mean_diagonal()) - float(tokens.mean_pairs()), 0.0)


def summed(
    one: Overlap, other: Overlap, own: tuple[float, float], source: Overlap, width: float
) -> Overlap:
    """Of a sum of two tensors, independent in direction, that both depend on `source`.

    Args:
        one, other: of the two.
        own: their own variances.
        source: of what both are made from.
        width: number of features.
    """
    first, second = own
    total = first + second
    if total == 0.0:
        return one
    # Where nothing of the input is left in the overlap, nothing of it is common to both.
    moved = one.response * other.response
    moved *= source.variance / source.response**2 if source.response else 0.0
    variance = one.variance * first**2 + other.variance * second**2
    variance += 2.0 * (moved + 1.0 / width) * first * second
    response = (one.response * first + other.response * second) / total
    return Overlap(variance / total**2, response)


def activated(before: Overlap, elasticity: float, widths: tuple[float, float]) -> Overlap:
    """Of independent features' nonlinear images, (features in, features out)."""
    moved = elasticity**2 * (before.variance - 1.0 / widths[0])
    return Overlap(moved + 1.0 / widths[1], before.response * elasticity)


def elasticity(leaf: Leaf, before: Signal, after: Signal) -> float:
    """Relative change of two tokens' overlap behind an entrywise function per that before it."""
    tokens = Kernel(float(before.kernel.mean_diagonal()), float(before.kernel.mean_pairs()))
    mean = before.second_moment().mean_diagonal() - before.kernel.mean_diagonal()
    entering = Signal(tokens, before.seq_len, float(max(mean, 0.0)) ** 0.5, before.width)
    output, pullback = leaf.forward(entering)
    own = own_variance(output)
    if own == 0.0:
        return 1.0
    sent = pullback(Gradient(Kernel(1.0, 1.0), before.seq_len)).gradient.kernel.pairs
    return float(float(sent) * before.width / after.width * own_variance(entering) / own)


def uniform_rows(leaf: SelfAttention, tokens: Signal) -> np.ndarray:
    """(L, L) attention that keeps to the mask alone, of tokens resolved; (P, P) on classes."""
    classes = tokens.kernel.classes
    if classes is not None:
        return np.asarray(np.tril(np.ones_like(classes.keys)) / classes.nodes[:, None])
    mask = self_masks(leaf, tokens.kernel.pairs.shape[-1], 1)[0]
    return np.asarray(mask / mask.sum(1, keepdims=True))


def averaging_elasticity(weights: np.ndarray, tokens: Signal) -> float:
    """What is left of two tokens' overlap in that of their rows' averages, per unit of both.

    Averages W x meet their tokens as M = C W^T, and Cov(o_ab, (W o W^T)_ab) = nu (M_aa M_bb + ...).
    Rows that see the same keys alike have nothing of a token's own; those of a causal mask have.
    """
    kernel = tokens.second_moment()
    if kernel.classes is not None:
        kernels = met_by(weights, kernel), kernel, between_rows(weights, kernel)
    else:
        met = weights @ kernel.pairs
        kernels = Kernel.of_matrix(met), kernel, Kernel.of_matrix(met @ weights.T)
    owns = [float(one.mean_diagonal() - one.mean_pairs()) for one in kernels]
    return max(owns[0], 0.0) ** 2 / (owns[1] * owns[2]) if min(owns[1:]) > 0.0 else 0.0


def asking_elasticity(pulled: Pulled | None, before: Signal, after: Signal) -> float:
    """As `elasticity`, of rows that differ because their queries do; 0 where nothing was pulled."""
    own = own_variance(after)
    if pulled is None or pulled.response is None or own == 0.0:
        return 0.0
    sent = float(pulled.response().mean_pairs())
    return float(sent * before.width / after.width * own_variance(before) / own)


def own_spread(tokens: Signal) -> float:
    """Relative variance over draws of what tokens have of their own, their norms made equal.

    They share a part whose squared norm c varies by y_kl^2, and the norms leave u = 1 - c to each:
    of two disjoint pairs, Cov(d o - c d q, d o' - c d q') = (1 - c)^2 y_kl^2 (`realised`).
    """
    if tokens.realised is None:
        return 0.0
    size = float(tokens.second_moment().mean_diagonal())
    return float(tokens.realised.overlaps.mean_pairs()) / size**2 if size > 0.0 else 0.0


_Walked = Callable[..., tuple[Signal, Overlap]]


class _Walk:
    """The declaration once more, beside the points that its forward pass left."""

    def __init__(self, trace: Trace, points: Iterator[Point]) -> None:
        self._trace, self._points, self._layer = trace, points, 0
        self._pulled = {(norms.layer, id(norms.signal)): norms.pulled for norms in trace.norms}
        self.attended: dict[int, float] = {}
        self.growth: dict[tuple[int, str], float] = {}
        self.memory = 0.0

    def through(self, component: Component, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        """The signal behind a component, and its overlap."""
        walks: dict[type, _Walked] = {
            Chain: self._chain,
            Residual: self._residual,
            Layer: self._numbered,
            Parallel: self._parallel,
            BottomToTop: self._bottom_to_top,
        }
        walk: _Walked = walks.get(type(component), self._leaf)
        return walk(component, signal, at)

    def _passed(self) -> Signal:
        self._point = next(self._points)
        return self._point.signal

    def _chain(self, chain: Chain, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        starts = {unit.first: unit for unit in units(chain.parts)}
        ends = {unit.last: unit for unit in starts.values()}
        tokens, entering = signal, at
        for index, part in enumerate(chain.parts):
            if index in starts:
                tokens, entering = signal, at
            signal, at = self.through(part, signal, at)
            received = self._point.gradient
            if index in ends and received is not None:
                grown = unit_growth(ends[index], tokens, received, entering.variance)
                self.growth |= {(self._layer, name): factor for name, factor in grown.items()}
        return signal, at

    def _numbered(self, layer: Layer, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        self._layer = layer.number
        _, at = self.through(layer.body, signal, at)
        return self._passed(), at

    def _residual(self, node: Residual, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        branch, inner = self.through(node.branch, signal, at)
        own = own_variance(signal) * node.skip_scale**2, own_variance(branch) * node.branch_scale**2
        return self._passed(), summed(at, inner, own, at, signal.width)

    def _parallel(self, node: Parallel, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        total, own, output = at, 0.0, signal
        for index, branch in enumerate(node.branches):
            output, inner = self.through(branch, signal, at)
            added = own_variance(output)
            total = summed(total, inner, (own, added), at, output.width) if index else inner
            own += added
        # The sum itself is no point of the trace: its moments are those of the branches.
        return _of_own_variance(output, own), total

    def _bottom_to_top(
        self, node: BottomToTop, signal: Signal, at: Overlap
    ) -> tuple[Signal, Overlap]:
        for part in (node.attention, node.norm, node.ffn):
            signal, at = self.through(part, signal, at)
        return self._passed(), at

    def _leaf(self, leaf: Any, signal: Signal, at: Overlap) -> tuple[Signal, Overlap]:
        output = self._passed()
        if isinstance(leaf, NormalizedAttention):  # norms are no overlaps of their own
            return output, self._attention(leaf.attention, signal, output, at, fixed=True)
        if isinstance(leaf, (SelfAttention, CrossAttention)):
            return output, self._attention(leaf, signal, output, at)
        if isinstance(leaf, Linear):
            return output, Overlap(at.variance + 1.0 / output.width, at.response)
        if isinstance(leaf, GatedLinear):
            # Of its hidden features, unlike an activation's, it takes the tokens' overlap itself.
            inner = Overlap(at.variance + 1.0 / output.width, at.response)
            widths = output.width, output.width
            return output, activated(inner, elasticity(leaf, signal, output), widths)
        if isinstance(leaf, (Activation, DynamicTanh)):
            widths = signal.width, output.width
            return output, activated(at, elasticity(leaf, signal, output), widths)
        if isinstance(leaf, Dropout):
            return output, _dropped(at, own_variance(signal), own_variance(output), output.width)
        return output, at

    def _attention(
        self, leaf: Any, signal: Signal, output: Signal, at: Overlap, fixed: bool = False
    ) -> Overlap:
        memory = signal if isinstance(leaf, SelfAttention) else self._trace.memory
        assert memory is not None
        attended, averaged, keys = self.memory, 0.0, 1.0 / memory.seq_len
        if memory is signal:
            attended = self.attended[id(signal)] = at.variance
            if signal.resolved:
                weights = uniform_rows(leaf, signal)
                averaged = averaging_elasticity(weights, signal)
                classes = signal.kernel.classes
                seen = weights * weights if classes is None else classes.keys * weights**2
                keys = float(signal.kernel.average(seen.sum(-1)))
        pulled = self._pulled.get((self._layer, id(memory)))
        asked = asking_elasticity(pulled, signal, output)
        grown = 1.0 + (own_spread(memory) if fixed or has_fixed_norms(memory) else 0.0)
        for name in ("query", "key", "query.bias", "query.norm.gain", "key.norm.gain"):
            self.growth[self._layer, f"{leaf.prefix}{name}"] = grown
        groups = leaf.kv_heads
        kept = 1.0 if groups is None else groups / leaf.heads  # heads that have own values
        fresh = 1.0 / (kept * output.width)
        fresh += min(asked, 1.0) ** 2 * (2.0 / output.width + keys / leaf.heads)
        return Overlap(attended + fresh, at.response * (averaged + asked))


def _dropped(at: Overlap, before: float, after: float, width: float) -> Overlap:
    if after == 0.0:
        return at
    kept = before / after
    return Overlap(at.variance * kept**2 + (1.0 - kept**2) / width, at.response * kept)


def _of_own_variance(signal: Signal, own: float) -> Signal:
    return Signal(Kernel(own, 0.0), signal.seq_len, width=signal.width)
