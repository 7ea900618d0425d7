"""The spread of one draw of the weights at finite width.

A realised kernel x_i . x_j / d differs from its mean by O(1/sqrt(d)). A random matrix applied to
tokens with modes m (the token mean, or one of L - 1 differences) gives realised ones of relative
variance 2/d each; at a residual addition of carried T and added B, independent in direction,

    Var(m) = (4 T B + kappa B^2) / d,    kappa/d = relative variance of |branch|^2.

Different modes fluctuate independently as far as they are orthogonal. Two modes m, m' of mean
overlap 0 have a realised one of second moment q, at first m m'/d; the branch carries it with a gain
h, and

    Cov(m, m') = (4 skip^2 h + kappa h^2) q / d,
    q <- (skip^2 + h)^2 q + (T B' + T' B + kappa B B'/2) / d.

That is O(1/d) of the variance per pair, but pairs are many: it sets the floor below which neither
more tokens nor more sequences that share the weights narrow the band.

Fluctuations then propagate linearly. With x_k those of the signal's modes entering part k, and y_k
those of the gradient's modes there, in relative terms,

    x_{k+1} = R_k x_k + noise,    y_k = P_k y_{k+1} + H_k x_k + noise,

where P_k is the pullback and H_k its dependence on the signal (norms, softmax, activations). The
two passes' noises are independent to leading order, W meeting the signal along x and the gradient
along a direction independent of x, but for the realised scale of the attention logits, which moves
both. Writing y_k = K_k x_k + e_k with e_k independent of x_k,

    K_k = P_k K_{k+1} R_k + H_k,
    Cov e_k = P_k (Cov e_{k+1} + K_{k+1} Xi_k K_{k+1}^T) P_k^T + N_k,
    Cov y_k = Cov e_k + K_k Cov(x_k) K_k^T,

one pass up for Cov(x_k), one pass down for all depths at once. One draw is close to lognormal:
sigma^2 = Var log g, typical = mean exp(-sigma^2/2).

Parallel branches add to the stream one after the other, each with matrices of its own, and so do
the two of a bottom-to-top layer. A decoder meets its memory at the mean.

The gradient at the last layer is a fresh Gaussian tensor of the predicted moments, of which K is 0
and Cov e that of its modes; unless a head's loss sends it (`loss_noise`), K then being its response
to the stream's realised sizes and overlaps, or a decoder (`encoder_noise`).

Share of 60 draws inside the 95 % band, all layers together, and the measured deviation over the
predicted one at the input (standard errors .03 and .09), at d = 64, 16 to 24 tokens:

    parallel, rotary, causal, 8 layers    .93    .93
    bottom-to-top, 8 layers               .92   1.12      causal    .95    .98
    hybrid, 8 layers                      .97    .77      causal    .94   1.12
    decoder, causal, 6 layers             .94    .75

Share of 100 draws inside, at the input and above the last layer, and the same deviations at both
(standard errors .03 and .07), at d = 64 to 96, 20 to 40 tokens (benchmarks/band_coverage.py):

    head, next tokens, 6 layers, Pre-LN   .98  .93    .87  1.04     Post-LN   .95  .99    .94   .93
    tied, 8 layers, Pre-LN                .97  .97    .87   .88     Post-LN   .95  .96    .94   .98
    three texts at once, 6, Pre-LN        .97  .94    .96  1.06
    masked, tokens alike, 10, Pre-LN      .92  .96   1.05   .97     Post-LN   .97  .99    .97   .85
    masked tokens of a text, 6, Pre-LN    .89  .90   1.30  1.23     BERT, 5   .94  .96   1.03   .85
    4 classes, 5, Pre-LN: first token     .92  .92   1.20  1.26     mean      .95  .95   1.13  1.11
    encoder, 4, of a decoder, 5: Pre-LN   .91  .93   1.08  1.07     Post-LN   .96  .95    .96   .94
    encoder, 4, of a decoder with a head  .90  .95   1.15  1.03

Missing is what heads' realised weights do to the signal: its own deviation comes out right where
attention is uniform and up to 12 % low where logits vary by 2.6 within a row, averaged over tokens;
few tokens with a gradient show more of it. Of four sequences at once, 12 % of the points of a
3-layer encoder lay outside (60 draws).

The same tokens, resolved, are given up to 6 % more deviation than alike (10 % bottom-to-top), half
of it where attention is uniform. 600 draws at d = 128 (8 layers Pre-LN, 64 tokens of correlation
.2) deviate at layers 0 to 3 by .172 .131 .092 .061, of which 3 % is statistical error; predicted
are .180 .136 .092 .061 alike and .180 .141 .096 .064 by token. 400 draws of four sequences (6
bottom-to-top layers, d = 96, 12 tokens) deviate by .173 (.006) at the input, predicted are .145
and .159. Causal rows of the tables above were taken with earlier attention maps by token, which
gave .151 .110 .076 .053 where the first of these is given .180 .141 .096 .064 now.

See docs/theory/band.md, How it travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import Chain, Layer
from ..engine.modes import Modes
from ..engine.sensitivity import ratio, transposed
from ..engine.state import Array, Signal
from ..engine.trace import Trace
from .alike import Alike, part_starts
from .block_noise import Addition
from .linearisation import Linearised, linearise
from .token_band import log_variance_by_token

NORMAL_95 = 1.959963984540054
"""Half width, in standard deviations, of the central 95 % of a normal distribution."""

LARGEST = 4.0
"""Variance of log g at which a fluctuation is twice its mean, and no small one."""


def log_variance(declaration: Chain, trace: Trace, batch: int = 1, top: Any = None) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    To first order in the fluctuations, however large it says that they are (`first_order`).

    Args:
        declaration: the stack of layers, as it was propagated through.
        trace: what both passes saw, for tokens alike or by token (`token_band`).
        batch: sequences of independent input and gradient that share the weights, those that one
            kernel by token holds side by side included.
        top: where the gradient at the last layer comes from; None: it is a fresh Gaussian tensor.
    """
    if trace.stream()[0].signal.resolved:
        return _by_token(declaration, trace, batch, top)
    # positions that tell no token from another are left out, as by token
    layers = [part.unplaced() for part in declaration.parts if isinstance(part, Layer)]
    with np.errstate(divide="ignore", invalid="ignore"):
        modes = Modes(trace.entering.seq_len)
        ending = None if top is None else top.alike(trace, modes, batch)
        found = both_ways(layers, Alike.of(trace), batch, ending)
        ends, average = part_starts(layers), found.modes.average
        variance = np.einsum("k...ij,i,j->...k", down(found)[ends], average, average)
    return _where_it_arrives(variance, trace)


def _where_it_arrives(variance: Array, trace: Trace) -> Array:
    """The variance, 0 where no gradient arrives, and infinite where there is none."""
    size = [point.gradient.kernel.mean_diagonal() for point in trace.stream() if point.gradient]
    arrives = np.stack(np.broadcast_arrays(*size), axis=-1) > 0
    return np.where(arrives, np.where(np.isfinite(variance), variance, np.inf), 0.0)


def first_order(variance: Array) -> tuple[Array, tuple[str, ...]]:
    """`log_variance` as far as it holds, at most `LARGEST`, and notes on what is beyond.

    In the causal norm-less network of the note (d = 96, skip .9, branch .43; 17 tokens), simulated
    draws had .31, .91 and 1.6 after 12, 16 and 20 layers, and first order 1.9, 28 and 1700.
    """
    worst = float(np.max(variance))
    if worst <= LARGEST:
        return variance, ()
    points = sorted(set(np.nonzero(variance > LARGEST)[-1].tolist()))
    note = (
        f"one draw's fluctuations explode at points {points} of the stream (0 enters layer 1): "
        f"the variance of its log gradient would be {worst:.3g} to first order, and {LARGEST:g} "
        "stands in. The band there says no more than that draws differ by orders of magnitude, "
        "and the mean over draws may be several times what is predicted"
    )
    return np.minimum(variance, LARGEST), (note,)


class BothWays(NamedTuple):
    """A stack of tokens alike, as fluctuations run through it.

    Attributes:
        modes: of the tokens.
        steps: its parts about their means.
        signal: (parts + 1, ..., 2, 2) covariance of the signal's relative modes before every part.
        signal_noise, gradient_noise: (parts, ..., 2, 2) covariance that every part adds.
        received: (..., 2, 2) covariance of the gradient's modes at the top, beside
        exposed: (..., 2, 2) their response to the signal's there.
        logits: (parts, ...) variance of the realised scale of the attention logits.
    """

    modes: Modes
    steps: Linearised
    signal: Array
    signal_noise: Array
    gradient_noise: Array
    received: Array
    exposed: Array
    logits: Array


def both_ways(
    layers: Sequence[Layer], alike: Alike, batch: int, ending: tuple[Array, Array] | None
) -> BothWays:
    """What fluctuates on the way up, and what both ways add.

    Args:
        layers: the stack of layers.
        alike: what both passes through them saw.
        batch: sequences that share the weights.
        ending: response of the last gradient's modes to the last signal's, and their covariance;
            None: they are those of a fresh Gaussian tensor.
    """
    entering, last = alike.entering, alike.received
    modes = Modes(entering.seq_len)
    if batch > 1:
        overlaps = alike.across_sequences(layers)
    else:
        overlaps = [0.0 * entering.kernel.pairs] * (part_starts(layers)[-1] + 1)
    steps = linearise(layers, alike, modes, overlaps)
    draws = _Draws(modes, entering.width, batch)
    signal_noise, first = draws.signal(steps.signal, entering, overlaps)
    injected = ratio(modes.of(last), np.asarray(last.diagonal)[..., None])
    gradient_noise, received = draws.gradient(steps.gradient, injected)
    exposed = 0.0 * received
    if ending is not None:
        exposed, received = ending
    shape = steps.pull.shape[1:]
    first, received, exposed = (np.broadcast_to(e, shape) for e in (first, received, exposed))
    logits = steps.logits.variance / batch
    signal = _up(steps, first, signal_noise, logits)
    return BothWays(modes, steps, signal, signal_noise, gradient_noise, received, exposed, logits)


def _by_token(declaration: Chain, trace: Trace, batch: int, top: Any) -> Array:
    layers = [part for part in declaration.parts if isinstance(part, Layer)]
    first = trace.stream()[0].signal
    if first.resolved is True:
        batch = max(1, batch // (first.kernel.pairs.shape[-1] // first.seq_len))
    overlaps: list[Array] = [0.0] * (part_starts(layers)[-1] + 1)
    if batch > 1:
        # what sequences share, followed with moments averaged over tokens
        overlaps = Alike.of(trace).across_sequences(layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = log_variance_by_token(trace, batch, overlaps, top)
    return _where_it_arrives(variance, trace)


def band(mean: Array, log_variance: Array) -> tuple[Array, Array]:
    """Typical value (geometric mean) and 95 % interval of a lognormal quantity.

    Args:
        mean: its expectation, shape (...,).
        log_variance: variance of its logarithm, shape (...,).

    Returns:
        The typical value (...,), and the interval's two ends (2, ...).
    """
    typical = mean * np.exp(-log_variance / 2)
    half = np.exp(NORMAL_95 * np.sqrt(log_variance))
    return typical, np.stack([typical / half, typical * half])


def _up(steps: Linearised, entering: Array, noise: Array, logits: Array) -> Array:
    """Covariance of the signal's relative modes before every part, (parts + 1, ..., 2, 2)."""
    found = [entering]
    noise = noise + _outer(steps.logits.signal) * logits[..., None, None]
    for response, back, own in zip(steps.response, transposed(steps.response), noise, strict=True):
        found.append(response @ found[-1] @ back + own)
    return np.stack(found)


def down(found: BothWays) -> Array:
    """Covariance of the gradient's modes before every part, (parts + 1, ..., 2, 2).

    Of more than two modes where `gradient_noise` and the rest follow more.
    """
    steps, count = found.steps, len(found.steps.pull)
    gains = [found.exposed] * (count + 1)
    for k in range(count - 1, -1, -1):
        gains[k] = steps.pull[k] @ gains[k + 1] @ steps.response[k] + steps.exposure[k]
    gain = np.stack(gains)
    # Everything a part adds itself; the logits move signal and gradient together.
    pulled = steps.pull @ gain[1:]
    both = (pulled @ steps.logits.signal[..., None])[..., 0] + steps.logits.gradient
    added = pulled @ found.signal_noise @ transposed(pulled) + found.gradient_noise
    added = added + _outer(both) * found.logits[..., None, None]
    own = [found.received] * (count + 1)
    back = transposed(steps.pull)
    for k in range(count - 1, -1, -1):
        own[k] = steps.pull[k] @ own[k + 1] @ back[k] + added[k]
    return np.stack(own) + gain @ found.signal @ transposed(gain)


class _Draws:
    """Noise covariances (parts, ..., 2, 2) of modes averaged over alike ones of all sequences."""

    def __init__(self, modes: Modes, width: Array, batch: int) -> None:
        self.modes, self.width, self.batch = modes, width, batch
        self.alone = np.diag(1 / (batch * modes.count))

    def signal(
        self, additions: Addition, entering: Signal, overlaps: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Relative noise of every part, and covariance of what enters."""
        base = self.modes.of(entering.kernel)
        shared = np.stack(overlaps) * self.modes.seq_len
        axes = (1,) * (additions.kept.ndim - shared.ndim)  # a gradient's configurations alone
        shared = shared.reshape(len(shared), *axes, *shared.shape[1:])
        kept = additions.kept * shared[:-1]
        noise = self._noise(additions, base)
        # modes of two sequences that overlap in the mean: T B' and B B' of the shared direction
        branch = np.where(additions.kappa > 0, shared[1:] - kept, 0.0)
        mean = (4 * kept + additions.kappa * branch) * branch / self.width
        noise[..., 0, 0] += (1 - 1 / self.batch) * mean
        after = additions.carried + additions.added
        return ratio(noise, _outer(after)), self._entering(entering, base, shared[0])

    def gradient(self, additions: Addition, injected: Array) -> tuple[Array, Array]:
        """Noise of every part, and covariance of the Gaussian gradient at the top."""
        reverse = Addition(*(entry[::-1] for entry in additions))
        own = 2 * _outer(injected) / self.width * self.alone
        return self._noise(reverse, injected)[::-1], own

    def _noise(self, additions: Addition, first: Array) -> Array:
        """Noise of every part, in the order in which the pass meets them."""
        carried, added, alone, coherent, kept, gain, kappa = additions
        kept, kappa = kept[..., None, None], kappa[..., None, None]
        cross = carried[..., :, None] * added[..., None, :]
        grown = (cross + transposed(cross) + kappa / 2 * _outer(added)) / self.width
        overlaps = [np.broadcast_to(_outer(first) / self.width, grown.shape[1:])]
        for factor, own in zip((kept + gain) ** 2, grown, strict=True):
            overlaps.append(factor * overlaps[-1] + own)
        others = (4 * kept + kappa * gain) * gain * np.stack(overlaps[:-1]) * (1 - self.alone)
        return alone[..., None] * self.alone + coherent / self.batch + others / self.width

    def _entering(self, signal: Signal, base: Array, shared: Array) -> Array:
        """Covariance of the relative modes of a Gaussian tensor that enters layer 1."""
        noise = 2 / self.width * (self.alone + 0 * _outer(base) + 0 * shared[..., None, None])
        across = ratio(shared, base[..., 0]) ** 2
        noise[..., 0, 0] += 2 / self.width * (1 - 1 / self.batch) * across
        if signal.spread is None or np.any(signal.spread.diagonal):
            return noise
        # a norm has fixed every token's size: only the split between the modes is left
        part = ratio(base * self.modes.average, np.asarray(signal.kernel.diagonal)[..., None])
        split = np.eye(2) - part[..., None, :]
        return split @ noise @ transposed(split)


def _outer(vector: Array) -> Array:
    return vector[..., :, None] * vector[..., None, :]
