"""Experts behind a router: the law of one of them, times what the router makes of a pair of tokens.

Experts are independent of each other and of the router, so that of a sum over experts only terms of
one expert have a mean: the output's kernel is M(r_ij) K_ij, K the kernel of one expert, and r the
correlation of two tokens' logits (`routing`). See docs/theory/experts.md, A mixture.
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
    Pulled,
)
from ...engine.composition import forward as passed
from ...engine.directions import shortened
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, moved_overlaps
from ...engine.response import (
    Around,
    Elementwise,
    GradientAdjoint,
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
    """The router's three functions at tokens' correlations, as kernels.

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
        router: how gates follow from logits.
        expert: one of them, from the tokens to what it gives.
        d_model: features of the input.
        router_variance, bias_variance: of W's and b's entries.
        name: of W in the table of weight gradients; that of b is `name`.bias.
        has_bias: whether there is b, of any variance, that receives a gradient.
        inward: whether the gate multiplies what the expert reads (`_outward`).
        identity: how many of the router's experts are none of these (`identity`).
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
        """Of the router's experts, those that are such as `expert`."""
        return 1.0 - self.identity / self.router.experts

    @property
    def matrices(self) -> tuple[str, ...]:
        return self.expert.matrices

    def with_variances(self, names: tuple[str, ...], factor: float) -> Mixture:
        return replace(self, expert=self.expert.with_variances(names, factor))

    def of_entry(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry | None:
        parts = [part.of_entry(algebra, names) for part in self.expert.components]
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
        """What the router makes of pairs of tokens.

        Args:
            moved: added to the tokens' overlaps.
        """
        tokens = signal.second_moment()
        logits, off_diagonal = self.logits(tokens, moved)
        single = functions(self.router, logits, 1.0 + 0.0 * tokens.mean_diagonal())
        joint = functions(self.router, logits, off_diagonal)
        of_pairs = zip(single, joint, (self.share, self.share, 1.0), strict=True)
        result = [at_tokens(tokens, alone, both).scaled(share) for alone, both, share in of_pairs]
        return Routed(result[0], result[1], result[2], logits)

    def logits(self, tokens: Kernel, moved: Array = 0.0) -> tuple[Array, Array]:
        """Their variance, and the correlation of two tokens'."""
        own = tokens.mean_diagonal()
        gain = self.d_model * self.router_variance
        logits = gain * own + self.bias_variance
        first, second = tokens.over_tokens(tokens.diagonal)
        cosine = np.clip(
            ratio_or_zero(tokens.off_diagonal + moved, (first * second) ** 0.5), -1.0, 1.0
        )
        _, two = tokens.lift(ratio_or_zero(gain * own, logits))
        # a constant shared by all tokens' logits is a bias, which they have in common
        return logits, 1.0 - two * (1.0 - cosine)

    def _outward(self, signal: Signal) -> Mixture:
        """The same with the gate on what the expert gives, where it multiplies what it reads.

        Around the gates' root mean square g, an expert is taken to grow by the power e of its
        input's size, F(h x) = (h/g)^e F(g x), which it has there: gates are then (h/g)^e.

        Raises:
            DomainError: configurations whose logits differ.
        """
        own = np.asarray(signal.second_moment().mean_diagonal())
        if np.ptp(own) > 0.02 * np.max(own):
            raise DomainError(
                "rule = 'sigmoid_input' takes one variance of the tokens at a time: predict its "
                "configurations one by one"
            )
        one = float(own.mean())
        logits = self.d_model * self.router_variance * one + self.bias_variance
        square = float(functions(self.router, logits, 1.0)[0])

        def size(variance: float) -> float:
            given = Signal(Kernel(variance, 0.0), 2, width=signal.width)
            return float(passed(self.expert, given)[0].second_moment().diagonal)

        above, below = (size(square * one * (1 + side)) for side in (0.05, -0.05))
        grows = np.log(above / below) / np.log(1.05 / 0.95) if below > 0 else 1.0
        power = round(float(grows), 2)
        router = replace(self.router, power=power, scale=square ** (-power / 2))
        entering = Scale(SCALE, "refined", "", {"weight_variance": square})
        expert = Chain((entering, *self.expert.components))
        return replace(self, router=router, expert=expert, inward=False)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        with observed(None):  # laws inside are of one expert, some at two overlaps
            return (self._outward(signal) if self.inward else self)._forward(signal)

    def _forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        inner, record = passed(self.expert, signal)
        at = self.routed(signal)
        sides = _Sides.of(self, signal)
        below = (note for one in record.leaves() for note in one.output.notes)
        weight = at.gates if sides is None else sides.weighted(at.gates, "gates", "out")
        output = inner.replace(
            kernel=inner.kernel * weight,
            fluctuation=self._fluctuation(inner, at, weight),
            notes=(*below, *self._notes(signal, at)),
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
    ) -> Pulled:
        """The way back: through the experts, and through the router's logits.

        dL/dz_e = sum_a (dg_a/dz_e) F_a.g has the covariance d G_ij K_ij N(r_ij), summed over
        experts. What the gradient lacks along the output, it lacks along one of k equal experts by
        its share 1/k; sums of dg_a/dz_e F_a over the chosen, which a common factor of gates does
        not change, lie across the output. Of a pair either token lacks its own. And as |F_a|^2
        varies by v, relatively, by their few hidden units, F_a - y has a part of its square along
        y, v/k, and a norm behind sends the less back the larger F_a is: with all of both,
        (1 - v/k)/(1 + v/k).
        """
        several = self.router.chosen * self.share
        lacks = (1.0 - gradient.averaged().radial) / several
        falls = gradient.averaged().norm_response / several
        grad_out = Gradient(
            gradient.kernel * weight, gradient.seq_len, 1.0 - lacks, norm_response=falls
        )
        with observed(None):
            record = record.backward(grad_out)
        through, slopes = record.grad_in.kernel, at.slopes
        if sides is not None:
            back = sides.weighted(at.gates, "gates", "back")
            off_diagonal = through.off_diagonal * ratio_or_zero(
                back.off_diagonal, weight.off_diagonal
            )
            through = Kernel.joined(through.diagonal, off_diagonal, through.resolved)
            slopes = sides.weighted(slopes, "slopes", "out")
        sizes = inner.second_moment()
        if inner.fluctuation is not None:
            sizes = shortened(sizes, inner.fluctuation.norms, falls + lacks)
        logits = (gradient.kernel * sizes * slopes).scaled(inner.width)
        if self.router.normalised != "chosen":
            one, two = logits.lift(1.0 - lacks)
            logits = logits.weighted(one, two * two)
        total = through + logits.scaled(self.router_variance)
        weights = functools.partial(self._weights, signal, record, logits)
        return Pulled(Gradient(total, gradient.seq_len), weights)

    def _weights(self, signal: Signal, experts: Record, logits: Kernel) -> Values:
        """Of all experts together, E of them, each with its share of the tokens: of the record of
        one with the gradient of all, and of the gradient's kernel at the logits."""
        result = {k: v for one in experts.leaves() for k, v in one.weights().items()}
        overlap = (signal.second_moment() * logits).total(signal.seq_len)
        result[self.name] = self.d_model * overlap
        if self.has_bias:
            result[f"{self.name}.bias"] = logits.total(signal.seq_len)
        return result

    def _fluctuation(self, inner: Signal, at: Routed, weight: Kernel) -> Any:
        """Of experts' outputs, Gaussian features given what they sum over.

        What the sum over hidden features varies by is of every expert by itself: the less, the more
        of them two tokens share. How the choice varies over draws of the router is the band's
        alone (`_Routing`).
        """
        result = inner.fluctuation
        if result is None:
            return None
        square = weight * weight
        gaussian = (inner.kernel * inner.kernel).scaled(2 / inner.width)
        load = at.load.scaled(self.share)
        shares = Kernel.joined(
            ratio_or_zero(1.0, load.diagonal),
            ratio_or_zero(1.0, load.off_diagonal),
            load.resolved,
        )

        def of(kernel: Kernel) -> Kernel:
            return square * (gaussian + (kernel - gaussian) * shares)

        shared = None
        if result.shared is not None:
            shared = result.shared[0] * weight, result.shared[1] * weight
        overlaps = None if result.overlaps is None else of(result.overlaps)
        return result._replace(
            norms=of(result.norms), overlaps=overlaps, free_norms=None, shared=shared
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

    def response(self, record: Record, around: Around) -> Response:
        inner = super().response(record, around)
        assert isinstance(inner, Elementwise)
        signal = record.input
        logits, correlation = _mean_logits(self, signal)
        drawn = [
            gate_spread(self.router, float(s), float(r), signal.seq_len)
            for s, r in zip(np.ravel(logits), np.ravel(correlation), strict=True)
        ]
        shape = np.shape(logits)
        spread = np.stack(drawn).reshape(*shape, 2, 2)
        output = matrix_of(record.output.second_moment(), signal.seq_len)
        return _Routing(inner, output, spread)


@dataclass(frozen=True)
class _Routing:
    """How sensitivities pass a mixture whose router is drawn: to first order in what two tokens
    have of gates in common, g.g' over its mean, by its means over tokens and over pairs.

    Attributes:
        inner: for gates that all draws share.
        output: kernel there.
        spread: (..., 2, 2) covariance of the two means over draws of the router.
    """

    inner: Elementwise
    output: Matrix
    spread: Array

    def gradient_adjoint(self, sensitivity: Matrix) -> GradientAdjoint:
        result = self.inner.gradient_adjoint(sensitivity)
        share = _own_and_pairs(result.sensitivity * self.inner.gradient)
        return result._replace(exposure=(result.exposure, share))

    def signal_adjoint(self, sensitivity: Matrix, exposure: Any) -> SignalAdjoint:
        inner, passed_on = exposure
        share = _own_and_pairs(sensitivity * self.output)
        share[: len(passed_on)] += passed_on
        result = self.inner.signal_adjoint(sensitivity, inner)
        noise = np.einsum("...i,...ij,...j->...", share, self.spread, share)
        return result._replace(noise=result.noise + noise)


def _own_and_pairs(matrix: Matrix) -> Array:
    """(..., 2) sums over tokens' own entries, and over those of two."""
    own = trace_of(matrix)
    return np.stack([own, total(matrix) - own], -1).astype(float)


class _Sides(NamedTuple):
    """A pair at the two values of its realised overlap that are averaged over (`GatedLinear`).

    Router and expert see the same overlap o, and the mean over it of their product is wanted:
    factors of the router are weighted by the size of the expert's at either value.

    Attributes:
        routed: the router's functions at both.
        out, back: of an expert, the output's covariance and the factor on a gradient's, at both.
    """

    routed: tuple[Routed, Routed]
    out: tuple[Array, Array]
    back: tuple[Array, Array]

    @classmethod
    def of(cls, leaf: Mixture, signal: Signal) -> _Sides | None:
        moved = moved_overlaps(signal)
        if moved is None:
            return None
        routed, out, back = [], [], []
        for side, still in ((1.0, moved.above), (-1.0, moved.below)):
            given, record = passed(leaf.expert, still)
            even = Gradient(still.kernel.with_ones(), signal.seq_len)
            routed.append(leaf.routed(signal, side * moved.step))
            out.append(abs(given.second_moment().off_diagonal))
            back.append(abs(record.backward(even).grad_in.kernel.off_diagonal))
        return cls(tuple(routed), tuple(out), tuple(back))  # type: ignore[arg-type]

    def weighted(self, kernel: Kernel, name: str, by: str) -> Kernel:
        """A factor of the router, its pairs weighted by an expert's size at either value."""
        one, two = (getattr(at, name).off_diagonal for at in self.routed)
        first, second = getattr(self, by)
        total = first + second
        share = np.where(total > 0, ratio_or_zero(first, total), 0.5)
        off_diagonal = two + share * (one - two)
        if np.ndim(off_diagonal) == 0 and np.ndim(kernel.off_diagonal) == 0:
            off_diagonal = float(off_diagonal)
        return Kernel.joined(kernel.diagonal, off_diagonal, kernel.resolved)


# --- how evenly tokens are routed in one draw ----------------------------------------------------

DRAWS, TOKENS = 200, 256
"""Of the router, and tokens of each, where one draw is sampled."""
STARVING = 0.1
"""An expert starves with less than this part of an even share."""


def gate_spread(router: Router, s: float, r: float, tokens: int) -> Array:
    """Covariance over draws of the router of the means over tokens and over pairs of what gates
    have in common, over its mean.

    Sampled, as `one_draw`, at the nearest of logits' variances a tenth apart in the logarithm and
    of correlations a fiftieth apart.
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
    """(count, E) of tokens whose logits have variance s and correlate alike, by r: given what they
    have in common, sqrt(r) c, they are independent."""
    common, own = (random.standard_normal((n, router.experts)) for n in (1, count))
    return np.sqrt(s) * (np.sqrt(max(r, 0.0)) * common + np.sqrt(1 - max(r, 0.0)) * own)


def _mean_logits(leaf: Mixture, signal: Signal) -> tuple[Array, Array]:
    """Variance of tokens' logits, and the mean correlation of two tokens'."""
    tokens, gain = signal.second_moment(), leaf.d_model * leaf.router_variance
    logits = gain * tokens.mean_diagonal() + leaf.bias_variance
    covariance = gain * tokens.mean_off_diagonal() + leaf.bias_variance
    return logits, ratio_or_zero(covariance, logits)


class OneDraw(NamedTuple):
    """What one draw of the router does, in the mean over draws.

    Attributes:
        largest: tokens of the expert that has most of them, over an even share.
        starving: part of the experts with less than `STARVING` of an even share.
        balance: E sum_e f_e p_e of the tokens' shares f and the mean probabilities p (Switch
            Transformer's auxiliary loss without its coefficient; k where all is even).
        own, pairs: E sum_e of its gradient at a token's logits, times the number of tokens, with
            itself and with another token's.
    """

    largest: float
    starving: float
    balance: float
    own: float
    pairs: float


def one_draw(router: Router, s: float, r: float, tokens: int) -> OneDraw:
    """Of tokens whose logits have variance s and correlate alike, by r.

    Sampled.
    """
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
        sent = experts * slope / total * (share - part @ share[:, None])
        own = (sent * sent).sum() / count
        both = ((sent.sum(0) ** 2).sum() - count * own) / max(count * (count - 1), 1)
        result.append((load.max(), (load < STARVING).mean(), balance, own, both))
    return OneDraw(*map(float, np.mean(result, axis=0)))


def rows(stack: Record) -> Iterator[dict[str, Any]]:
    """A row for every mixture of several experts that a signal has passed, as
    `moments.Prediction.experts` has them."""
    for record in stack.leaves():
        leaf = record.component
        if not isinstance(leaf, Mixture) or leaf.router.experts == 1:
            continue
        signal, router = record.input, leaf.router
        at, length = leaf.routed(signal), signal.seq_len
        ones = at.load.with_ones().total(length)
        s, correlation = (float(np.mean(one)) for one in _mean_logits(leaf, signal))
        shared = float(np.mean(at.load.total(length) / ones))
        even = router.chosen / router.experts
        count = round(float(np.mean(ones)) ** 0.5)
        drawn = one_draw(router, s, correlation, count)
        tokens = signal.second_moment()
        own = float(np.mean(tokens.mean_diagonal())) * drawn.own / count
        pairs = float(np.mean(tokens.mean_off_diagonal())) * drawn.pairs * (1 - 1 / count)
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
            "largest_load": drawn.largest,
            "starving": drawn.starving,
            "balance_loss": drawn.balance,
            "balance_gradient": leaf.d_model * (own + pairs),
            "learns": bool(np.any(at.slopes.diagonal > 0)),
        }


# --- a block of experts ---------------------------------------------------------------------------

GATE = Router(1, 1, logistic=True, normalised="none")
"""A sigmoid in front of one expert that every token passes."""


def router_of(block: Experts) -> Router:
    """How a block's gates follow from its logits."""
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
    """The mixture, and the shared expert."""
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
    given: list[Component] = [routed, *([_shared_expert(parts, block)] if block.shared else [])]
    if block.output_norms:
        norms = [FiniteNormalization.of(model, label) for label in OUTPUT_NORMS]
        given = [Chain(pair) for pair in zip(given, norms, strict=False)]
    yield Parallel(tuple(given)) if block.shared else given[0]


def _shared_expert(parts: Any, block: Experts) -> Component:
    model = parts.model
    gated = block.shared_gate_variance is not None
    hidden = parts._hidden(block.shared, SHARED, "", block.shift, block.clamp)
    label = "" if gated else "ffn.shared"
    out = parts._linear(label, f"{SHARED}ffn_out", block.shared, model.d_model)
    shared: Component = Chain((*hidden, out))
    if block.shared_gate_variance is not None:
        every, name = (model.d_model, block.shared_gate_variance), f"{SHARED}router"
        shared = Mixture("ffn.shared", GATE, Chain((*hidden, out)), *every, name=name)
    return shared
