"""A mixture of experts: the law of one expert, times the router's functions of two tokens.

Experts are independent of each other and of the router, so that in a sum over pairs of experts only
terms with the same expert have a mean: the output's kernel is M(r_ij) K_ij, K the kernel of one
expert, r the correlation of two tokens' logits (`routing`). See docs/theory/experts.md, A mixture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...engine.composition import (
    Chain,
    Component,
    Leaf,
    OfEntry,
    Parallel,
    Pullback,
    PullbackResult,
)
from ...engine.composition import forward as passed
from ...engine.directions import weighted_by_gradient
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, shifted_overlaps
from ...engine.response import (
    Elementwise,
    GradientAdjoint,
    GradientUnits,
    Matrix,
    Response,
    SignalAdjoint,
    matrix_of,
    total,
    trace_of,
)
from ...engine.state import Array, Gradient, Kernel, Signal, Values, observed, ratio_or_zero
from ...engine.trace import Record
from ...errors import DomainError, domain_error
from ...formulas.linear import SCALE
from ...model.experts import OUTPUT_NORMS, SHARED, Experts
from ..elementary import Scale, entrywise_overlap
from ..normalization import FiniteNormalization
from .identity import Tap, at_tokens
from .routing import LARGEST, LEAST, Router, functions


class Routed(NamedTuple):
    """The router's three functions at the tokens' correlations, as kernels.

    Attributes:
        gates, slopes, load: M, N and P.
        logits: variance of a token's logits.
    """

    gates: Kernel
    slopes: Kernel
    load: Kernel
    logits: Array


@dataclass(frozen=True)
class Mixture(Leaf):
    """sum_e g_e(z) F_e(x), z = W x + b.

    Attributes:
        label: site name of the sum in a trace.
        router: gates as functions of logits.
        expert: components of one expert.
        d_model: features of the input.
        router_variance, bias_variance: of the entries of W and b.
        name: of W in the table of weight gradients; that of b is `name`.bias.
        has_bias: whether b (of any variance) receives a gradient.
        inward: whether the gate multiplies the input of the expert (`_outward`).
        identity: number of the router's experts that are identities (`identity`).
    """

    label: str
    router: Router
    expert: Chain
    d_model: int
    router_variance: float
    bias_variance: float = 0.0
    name: str = "router"
    has_bias: bool = False
    inward: bool = False
    identity: int = 0

    @property
    def share(self) -> float:
        """Fraction of the router's experts that are not identities."""
        return 1.0 - self.identity / self.router.experts

    @property
    def matrices(self) -> tuple[str, ...]:
        return self.expert.matrices

    def with_variances(self, names: tuple[str, ...], factor: float) -> Mixture:
        return replace(self, expert=self.expert.with_variances(names, factor))

    def entry_moments(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry | None:
        parts = [part.entry_moments(algebra, names) for part in self.expert.components]
        if self.inward or None in parts:
            return None

        def result(entering: tuple[Array, Array], factor: float) -> tuple[Array, Array]:
            square = np.mean(entering[0] * entering[0] + entering[1])
            logits = self.d_model * self.router_variance * float(square) + self.bias_variance
            for part in parts:
                assert part is not None
                entering = part(entering, factor)
            return 0.0, entering[1] * functions(self.router, logits, 1.0)[0]

        return result

    def domain_share(self, mean: Array, variance: Array, algebra: Any) -> Array:
        return self.expert.components[0].domain_share(mean, variance, algebra)

    def routed(self, signal: Signal, moved: Array = 0.0) -> Routed:
        """The router's functions at all tokens and pairs of tokens, with `moved` added to the
        tokens' overlaps."""
        tokens = signal.second_moment()
        logits, correlation = self.logits(tokens, moved)
        single = functions(self.router, logits, 1.0 + 0.0 * tokens.mean_diagonal())
        joint = functions(self.router, logits, correlation)
        both = zip(single, joint, strict=True)
        gates, slopes, load = (at_tokens(tokens, *values) for values in both)
        return Routed(gates.scaled(self.share), slopes.scaled(self.share), load, logits)

    def logits(self, tokens: Kernel, moved: Array = 0.0) -> tuple[Array, Array]:
        """Variance of the logits, and correlation of those of two tokens."""
        own = tokens.mean_diagonal()
        gain = self.d_model * self.router_variance
        logits = gain * own + self.bias_variance
        first, second = tokens.over_tokens(tokens.diagonal)
        cosine = np.clip(
            ratio_or_zero(tokens.off_diagonal + moved, (first * second) ** 0.5), -1.0, 1.0
        )
        # the bias is common to all tokens
        _, share = tokens.lift(ratio_or_zero(gain * own, logits))
        return logits, 1.0 - share * (1.0 - cosine)

    def _outward(self, signal: Signal) -> Mixture:
        """The equivalent mixture with gates on the experts' outputs instead of their inputs.

        Around the gates' root mean square g, an expert is approximated as a power of its input's
        size, F(h x) = (h/g)^e F(g x), with e its local exponent: gates on outputs are (h/g)^e.

        Raises:
            DomainError: configurations whose logits differ.
        """
        own = np.asarray(signal.second_moment().mean_diagonal())
        if np.ptp(own) > 0.02 * np.max(own):
            raise DomainError(
                "rule = 'sigmoid_input' takes one variance of the tokens at a time: predict its "
                "configurations one by one"
            )
        variance = float(own.mean())
        logits = self.d_model * self.router_variance * variance + self.bias_variance
        square = float(functions(self.router, logits, 1.0)[0])

        def size(variance: float) -> float:
            token = Signal(Kernel(variance, 0.0), 2, width=signal.width)
            return float(passed(self.expert, token)[0].second_moment().diagonal)

        above, below = (size(square * variance * (1 + side)) for side in (0.05, -0.05))
        exponent = np.log(above / below) / np.log(1.05 / 0.95) if below > 0 else 1.0
        power = round(float(exponent), 2)
        router = replace(self.router, power=power, scale=square ** (-power / 2))
        entering = Scale(SCALE, "refined", "", {"weight_variance": square})
        expert = Chain((entering, *self.expert.components))
        return replace(self, router=router, expert=expert, inward=False)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        with observed(None):  # `explain` does not show laws of a single expert
            return (self._outward(signal) if self.inward else self)._forward(signal)

    def _forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        inner, record = passed(self.expert, signal)
        at = self.routed(signal)
        sides = _Sides.of(self, signal)
        inside = (note for leaf in record.leaves() for note in leaf.output.notes)
        weight = at.gates if sides is None else sides.weighted(at.gates, "gates", "out")
        output = inner.replace(
            kernel=inner.kernel * weight,
            fluctuation=self._fluctuation(inner, at, weight),
            notes=(*inside, *self._notes(signal, at)),
            diagnostics={"logit_variance": at.logits},
        )
        return output, functools.partial(self._back, signal, inner, record, at, weight, sides)

    def _back(
        self,
        signal: Signal,
        inner: Signal,
        record: Record,
        at: Routed,
        weight: Kernel,
        sides: _Sides | None,
        gradient: Gradient,
    ) -> PullbackResult:
        """Gradient at the input, through the experts and through the router's logits.

        dL/dz_e = sum_a (dg_a/dz_e) F_a.g has the covariance d G_ij K_ij N(r_ij), summed over
        experts. A gradient without its part along the output lacks 1/k of that along each of k
        equal experts. Sums of dg_a/dz_e F_a over the chosen experts, which a common factor of the
        gates does not change, are orthogonal to the output. In pairs this holds for both tokens. As
        |F_a|^2 has a relative variance v (the hidden units are few), F_a - y has the fraction v/k
        of its square along y, and a later norm reduces the gradient of large F_a: in total by
        (1 - v/k)/(1 + v/k).
        """
        chosen = self.router.chosen * self.share
        lacks = (1.0 - gradient.averaged().radial) / chosen
        response = gradient.averaged().norm_response / chosen
        grad_out = Gradient(
            gradient.kernel * weight, gradient.seq_len, 1.0 - lacks, norm_response=response
        )
        with observed(None):
            record = record.backward(grad_out)
        through, slopes = record.grad_in.kernel, at.slopes
        if sides is not None:
            back = sides.weighted(at.gates, "gates", "back")
            off_diagonal = through.off_diagonal * ratio_or_zero(
                back.off_diagonal, weight.off_diagonal
            )
            through = Kernel.of_parts(through.diagonal, off_diagonal, through.resolved)
            slopes = sides.weighted(slopes, "slopes", "out")
        sizes = inner.second_moment()
        if inner.fluctuation is not None:
            sizes = weighted_by_gradient(sizes, inner.fluctuation.norms, response + lacks)
        logits = (gradient.kernel * sizes * slopes).scaled(inner.width)
        if self.router.normalised != "chosen":
            of_token, of_pair = logits.lift(1.0 - lacks)
            logits = logits.weighted(of_token, of_pair * of_pair)
        total = through + logits.scaled(self.router_variance)
        weights = functools.partial(self._weights, signal, record, logits)
        return PullbackResult(Gradient(total, gradient.seq_len), weights)

    def _weights(self, signal: Signal, experts: Record, logits: Kernel) -> Values:
        """Squared gradient norms, summed over experts: each receives its fraction of the tokens,
        so they are those of one expert with the gradient of all tokens."""
        result = {k: v for leaf in experts.leaves() for k, v in leaf.weights().items()}
        overlap = (signal.second_moment() * logits).total(signal.seq_len)
        result[self.name] = self.d_model * overlap
        if self.has_bias:
            result[f"{self.name}.bias"] = logits.total(signal.seq_len)
        return result

    def _fluctuation(self, inner: Signal, at: Routed, weight: Kernel) -> Any:
        """Fluctuation of the mixture's output, whose features are Gaussian given the hidden ones.

        The fluctuation due to an expert's hidden features is independent between experts, and is
        divided by the number of experts that two tokens share. The fluctuation of the choice over
        draws of the router is in the band alone (`_Routing`).
        """
        result = inner.fluctuation
        if result is None:
            return None
        square = weight * weight
        gaussian = (inner.kernel * inner.kernel).scaled(2 / inner.width)
        load = at.load.scaled(self.share)
        shares = Kernel.of_parts(
            ratio_or_zero(1.0, load.diagonal),
            ratio_or_zero(1.0, load.off_diagonal),
            load.resolved,
        )

        def mixed(kernel: Kernel) -> Kernel:
            return square * (gaussian + (kernel - gaussian) * shares)

        shared = None
        if result.shared is not None:
            shared = result.shared[0] * weight, result.shared[1] * weight
        overlaps = None if result.overlaps is None else mixed(result.overlaps)
        return result._replace(
            norms=mixed(result.norms), overlaps=overlaps, free_norms=None, shared=shared
        )

    def _notes(self, signal: Signal, at: Routed) -> tuple[str, ...]:
        notes = []
        if np.max(at.logits) > LARGEST:
            notes.append(
                f"the router's logits have variance {float(np.max(at.logits)):.3g}, taken as "
                f"{LARGEST:g}: beyond it gates are all but one"
            )
        correlation = signal.correlation()
        if np.min(correlation) < LEAST:
            notes.append(f"tokens correlate by less than {LEAST:.2f}, at which they are routed")
        own = signal.second_moment().diagonal
        mean = signal.second_moment().mean_diagonal()
        spread = np.max(abs(own - signal.second_moment().lift(mean)[0]))
        if signal.resolved and spread > 0.1 * np.max(mean):
            notes.append(
                "tokens of different norms enter a router without a normalisation: its logits are "
                "given their mean variance"
            )
        return tuple(notes)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return entrywise_overlap(self, record, at, walk.real)

    def response(self, record: Record, around: GradientUnits) -> Response:
        inner = super().response(record, around)
        assert isinstance(inner, Elementwise)
        signal = record.input
        logits, correlation = _mean_logits(self, signal)
        spreads = [
            gate_spread(self.router, float(s), float(r), signal.seq_len)
            for s, r in zip(np.ravel(logits), np.ravel(correlation), strict=True)
        ]
        spread = np.stack(spreads).reshape(*np.shape(logits), 2, 2)
        output = matrix_of(record.output.second_moment(), signal.seq_len)
        return _Routing(inner, output, spread)


@dataclass(frozen=True)
class _Routing:
    """Adjoint maps of a mixture with a random router, to first order in the fluctuation of two
    tokens' gate products g.g' over their mean, averaged over tokens and over pairs.

    Attributes:
        inner: the maps at the mean over draws of the router.
        output: kernel at the output.
        spread: (..., 2, 2) covariance of both averages over draws of the router.
    """

    inner: Elementwise
    output: Matrix
    spread: Array

    def gradient_adjoint(self, sensitivity: Matrix) -> GradientAdjoint:
        result = self.inner.gradient_adjoint(sensitivity)
        share = _own_and_pairs(result.sensitivity * self.inner.gradient)
        return result._replace(exposure=(result.exposure, share))

    def signal_adjoint(self, sensitivity: Matrix, exposure: Any) -> SignalAdjoint:
        inner, of_gradient = exposure
        share = _own_and_pairs(sensitivity * self.output)
        share[: len(of_gradient)] += of_gradient
        result = self.inner.signal_adjoint(sensitivity, inner)
        noise = np.einsum("...i,...ij,...j->...", share, self.spread, share)
        return result._replace(noise=result.noise + noise)


def _own_and_pairs(matrix: Matrix) -> Array:
    """(..., 2) sums of the diagonal and of the off-diagonal entries."""
    own = trace_of(matrix)
    return np.stack([own, total(matrix) - own], -1).astype(float)


class _Sides(NamedTuple):
    """Pairs of tokens at the two overlaps whose mean is taken (`GatedLinear`).

    Router and expert depend on the same fluctuating overlap, and the mean of their product is
    needed: the router's functions are weighted by the size of the expert's at each overlap.

    Attributes:
        routed: the router's functions at both overlaps.
        out, back: covariance of an expert's output, and its factor on a gradient's, at both.
    """

    routed: tuple[Routed, Routed]
    out: tuple[Array, Array]
    back: tuple[Array, Array]

    @classmethod
    def of(cls, leaf: Mixture, signal: Signal) -> _Sides | None:
        moved = shifted_overlaps(signal)
        if moved is None:
            return None
        routed, out, back = [], [], []
        for side, tokens in ((1.0, moved.above), (-1.0, moved.below)):
            output, record = passed(leaf.expert, tokens)
            ones = Gradient(tokens.kernel.with_ones(), signal.seq_len)
            routed.append(leaf.routed(signal, side * moved.step))
            out.append(abs(output.second_moment().off_diagonal))
            back.append(abs(record.backward(ones).grad_in.kernel.off_diagonal))
        return cls(tuple(routed), tuple(out), tuple(back))  # type: ignore[arg-type]

    def weighted(self, kernel: Kernel, name: str, by: str) -> Kernel:
        """A function of the router, with pairs weighted by an expert's size at both overlaps."""
        above, below = (getattr(at, name).off_diagonal for at in self.routed)
        first, second = getattr(self, by)
        total = first + second
        share = np.where(total > 0, ratio_or_zero(first, total), 0.5)
        off_diagonal = below + share * (above - below)
        if np.ndim(off_diagonal) == 0 and np.ndim(kernel.off_diagonal) == 0:
            off_diagonal = float(off_diagonal)
        return Kernel.of_parts(kernel.diagonal, off_diagonal, kernel.resolved)


# --- fluctuation of the load in one draw of the router -------------------------------------------

DRAWS, TOKENS = 200, 256
"""Sampled draws of the router, and tokens of each."""
STARVING = 0.1
"""Load over an even load below which an expert counts as starving."""


def gate_spread(router: Router, s: float, r: float, tokens: int) -> Array:
    """(2, 2) covariance, over draws of the router, of g.g' over its mean, averaged over tokens and
    over pairs.

    Sampled, like `one_draw`, at the logit variance rounded to .1 in its logarithm and the
    correlation rounded to .02.
    """
    steps = round(10 * float(np.log(max(s, 1e-12)))), round(50 * r)
    return _gate_spread(router, *steps, min(tokens, max(8, 4096 // router.experts), 64))


@functools.lru_cache(maxsize=256)
def _gate_spread(router: Router, log_s: int, r: int, tokens: int) -> Array:
    random, count = np.random.default_rng(1), max(tokens, 2)
    result = []
    for _ in range(2 * DRAWS):
        z = _equal_logits(router, float(np.exp(log_s / 10)), r / 50, count, random)
        gates, _ = router.gates(z)
        own = (gates * gates).sum(-1)
        pairs = ((gates.sum(0) ** 2).sum() - own.sum()) / (count * (count - 1))
        result.append((own.mean(), pairs))
    means = np.mean(result, 0)
    scale = np.where(means > 0, 1 / np.where(means > 0, means, 1.0), 0.0)
    return np.cov(np.array(result).T) * np.outer(scale, scale)


def _equal_logits(
    router: Router, s: float, r: float, count: int, random: np.random.Generator
) -> Array:
    """(count, E) logits of variance s with correlation r between all tokens: independent given a
    common part sqrt(r) c."""
    common, own = (random.standard_normal((n, router.experts)) for n in (1, count))
    return np.sqrt(s) * (np.sqrt(max(r, 0.0)) * common + np.sqrt(1 - max(r, 0.0)) * own)


def _mean_logits(leaf: Mixture, signal: Signal) -> tuple[Array, Array]:
    """Variance of the logits, and the mean correlation of those of two tokens."""
    tokens, gain = signal.second_moment(), leaf.d_model * leaf.router_variance
    logits = gain * tokens.mean_diagonal() + leaf.bias_variance
    covariance = gain * tokens.mean_off_diagonal() + leaf.bias_variance
    return logits, ratio_or_zero(covariance, logits)


class OneDraw(NamedTuple):
    """Load balance in one draw of the router, averaged over draws.

    Attributes:
        largest: largest load of an expert over an even load.
        starving: fraction of the experts with less than `STARVING` of an even load.
        balance: E sum_e f_e p_e of the loads f and the mean probabilities p (Switch Transformer's
            auxiliary loss without its coefficient; k for an even load).
        own, pairs: E sum_e of the squared gradient of `balance` at a token's logits and of the
            product of two tokens' gradients, times the number of tokens.
    """

    largest: float
    starving: float
    balance: float
    own: float
    pairs: float


def one_draw(router: Router, s: float, r: float, tokens: int) -> OneDraw:
    """`OneDraw` at logits of variance s and correlation r between all tokens, by sampling."""
    random = np.random.default_rng(0)
    count, experts = min(tokens, TOKENS), router.experts
    result = []
    for _ in range(DRAWS):
        z = _equal_logits(router, s, r, count, random)
        share = router.choice(z).mean(0)
        weight, slope = router.weight(z)
        total = weight.sum(-1, keepdims=True)
        part = weight / total
        load = share * experts / router.chosen
        balance = experts * (share * part.mean(0)).sum()
        # dp_a/dz_e = w'_e/sum(w) (1 (a = e) - p_a); the choice has no derivative
        gradient = experts * slope / total * (share - part @ share[:, None])
        own = (gradient * gradient).sum() / count
        both = ((gradient.sum(0) ** 2).sum() - count * own) / max(count * (count - 1), 1)
        result.append((load.max(), (load < STARVING).mean(), balance, own, both))
    return OneDraw(*map(float, np.mean(result, axis=0)))


def rows(stack: Record) -> Iterator[dict[str, Any]]:
    """Rows of `moments.Prediction.experts`, one for every mixture of several experts."""
    for record in stack.leaves():
        leaf = record.component
        if not isinstance(leaf, Mixture) or leaf.router.experts == 1:
            continue
        signal, router = record.input, leaf.router
        at, length = leaf.routed(signal), signal.seq_len
        ones = at.load.with_ones().total(length)
        s, correlation = (float(np.mean(x)) for x in _mean_logits(leaf, signal))
        shared = float(np.mean(at.load.total(length) / ones))
        even = router.chosen / router.experts
        count = round(float(np.mean(ones)) ** 0.5)
        draw = one_draw(router, s, correlation, count)
        tokens = signal.second_moment()
        own = float(np.mean(tokens.mean_diagonal())) * draw.own / count
        pairs = float(np.mean(tokens.mean_off_diagonal())) * draw.pairs * (1 - 1 / count)
        yield {
            "layer": record.layer,
            "experts": router.experts,
            "chosen": router.chosen,
            "logit_variance": s,
            "logit_correlation": correlation,
            "gate_square": float(np.mean(at.gates.mean_diagonal())),
            "gate_overlap": float(np.mean(at.gates.mean_off_diagonal())),
            "load": even,
            "load_variance": max(shared / router.experts / even**2 - 1.0, 0.0),
            "largest_load": draw.largest,
            "starving": draw.starving,
            "balance_loss": draw.balance,
            "balance_gradient": leaf.d_model * (own + pairs),
            "learns": bool(np.any(at.slopes.diagonal > 0)),
        }


# --- a block of experts ---------------------------------------------------------------------------

GATE = Router(1, 1, logistic=True, normalised="none")
"""The router of a single expert with a sigmoid gate."""


def router_of(block: Experts) -> Router:
    """The router of a declared block."""
    return Router(
        block.experts,
        block.chosen,
        block.rule != "softmax",
        block.normalised,
        block.scale,
        block.groups,
        block.kept_groups,
        block.group_best,
    )


def experts(parts: Any, block: Experts) -> Iterator[Component]:
    """Components of a block of experts: the mixture, and the shared expert if any."""
    model = parts.model
    if parts.theory != "refined":
        raise domain_error("theory", parts.theory, "'refined' with experts")
    hidden = parts._hidden(block.width(model), "", "", block.shift, block.clamp)
    out = parts._linear("", "ffn_out", block.width(model), model.d_model)
    bias = block.router_bias_variance
    routed = Mixture(
        "ffn.experts",
        router_of(block),
        Chain((*hidden, out)),
        model.d_model,
        block.router_entries(model),
        bias or 0.0,
        has_bias=bias is not None,
        inward=block.rule == "sigmoid_input",
        identity=block.identity,
    )
    if block.apart:
        yield from (Tap(routed, parts.number), _shared_expert(parts, block))
        return
    branches: list[Component] = [routed, *([_shared_expert(parts, block)] if block.shared else [])]
    if block.output_norms:
        norms = [FiniteNormalization.of(model, label) for label in OUTPUT_NORMS]
        branches = [Chain(pair) for pair in zip(branches, norms, strict=False)]
    yield Parallel(tuple(branches)) if block.shared else branches[0]


def _shared_expert(parts: Any, block: Experts) -> Component:
    """The expert of all tokens, with its gate if it has one."""
    model = parts.model
    gated = block.shared_gate_variance is not None
    hidden = parts._hidden(block.shared, SHARED, "", block.shift, block.clamp)
    label = "" if gated else "ffn.shared"
    out = parts._linear(label, f"{SHARED}ffn_out", block.shared, model.d_model)
    shared: Component = Chain((*hidden, out))
    if block.shared_gate_variance is not None:
        gate, name = (model.d_model, block.shared_gate_variance), f"{SHARED}router"
        shared = Mixture("ffn.shared", GATE, Chain((*hidden, out)), *gate, name=name)
    return shared
