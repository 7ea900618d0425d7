"""One step of an optimizer on one matrix, in closed form.

With x of kernel K the matrix's input (n features) and delta of kernel D the gradient at its output
(m features), the gradient is G = sum_t delta_t x_t^T and the step -rate U(G). On an input x',
U(G) x' has the coherent part sum_s P_ts delta_s and the kernel Q. In the coordinates of
z = L^(-1) x, K = L L^T, with L^T D L = O diag(lam) O^T, are

    rule   P                            Q without its noise            noise
    SGD    n                            n^2 lam                        n tr(KD) K'
    sign   n c E[z_i^2/rho]             n (n-1) c^2 lam E[z_i^2/rho^2] n K'          c^2 = 2/pi
    Muon   n f_i/sigma_i                n^2 (f_i/sigma_i)^2 lam        |f|^2/m of x' outside of x

rho^2 = sum_i lam_i z_i^2 of a row, sigma^2 = n m lam and f the optimizer's map of singular values,
averaged over draws (`Orthogonal`). Adam's first step is the sign rule's, damped where |g| is near
epsilon.

See docs/theory/first-step.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh, solve_triangular
from scipy.linalg.lapack import dpstrf

from ..errors import domain_error
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_number,
)
from .change import Array, between, precision, product, resolved
from .several import Batches, Updates

SIGN_MEAN = float(np.sqrt(2 / np.pi))
"""E|z| of a standard normal z."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic (Jordan 2024), applied five times."""


class StepSize(NamedTuple):
    """Size of a parameter's step at learning rate 1; fields as in `Effect`."""

    slope: float
    square: float
    aligned: float = math.nan


class Effect(NamedTuple):
    """A step of learning rate 1, at a matrix's output.

    Attributes:
        coherent, total: P and Q on the updated input.
        slope: minus the derivative of the loss in the learning rate.
        square: E U^2 of an entry of the step.
        aligned: trace of the kernel of U x on the old input over that of K E U^2.
        along: part of Q that is a function of delta; None if that is linear, or not known.
        followed: response of P to one draw's overlaps of x.
    """

    coherent: Array
    total: Array
    slope: float
    square: float
    aligned: float
    along: Array | None = None
    followed: float = 0.0


@dataclass(frozen=True, eq=False)
class Root:
    """L of K = L L^T, by Cholesky with pivots, so that identical tokens do not raise its rank.

    Rounding can decide the pivots: L is only defined up to a rotation.

    Attributes:
        lower: (T, rank) L.
        order: (rank,) the tokens whose rows of L are a triangle.
        single: L in `precision`.
    """

    lower: Array
    order: Any

    @classmethod
    def of(cls, kernel: Array) -> Root:
        least = _RANGE * max(float(np.diag(kernel).max(initial=0.0)), 1e-300)
        factor, pivots, rank, _ = dpstrf(kernel, tol=least, lower=1)
        order = pivots - 1
        found = np.zeros((len(kernel), rank))
        found[order] = np.tril(factor)[:, :rank]
        return cls(found, order[:rank])

    @functools.cached_property
    def single(self) -> Array:
        return self.lower.astype(precision(len(self.lower)))

    @functools.cached_property
    def square(self) -> Array:
        """L^T L."""
        return np.asarray(self.single.T @ self.single)

    def solved(self, right: Array) -> Array:
        """Z of L Z = A, for A whose columns are combinations of L's."""
        rows = right[self.order]
        return np.asarray(solve_triangular(self._triangle, rows, lower=True, check_finite=False))

    @functools.cached_property
    def _triangle(self) -> Array:
        return np.asfortranarray(self.lower[self.order])

    def whitened(self, overlap: Array) -> Array:
        """E x' z of z = L^(-1) x, from E x' x^T."""
        return self.solved(overlap.T).T


def spread(kernel: Array) -> Array:
    """(..., T, T) symmetric root of K. Tokens are drawn with it rather than with `Root`, as draws
    are then continuous in K at any rank: rounding can change the pivots of L."""
    values, vectors = np.linalg.eigh(kernel)
    roots = np.sqrt(np.maximum(values, 0.0))[..., None, :]
    return np.asarray((vectors * roots) @ np.swapaxes(vectors, -1, -2))


@dataclass(frozen=True, eq=False)
class Spectrum:
    """K and D of a matrix, and the spectrum of L^T D L.

    Attributes:
        kernel, gradient: K and D.
        root: of K.
        total: tr(K D).
        inner: L^T D L / total, in the range of single precision.
    """

    kernel: Array
    gradient: Array
    root: Root
    total: float
    inner: Array

    @classmethod
    def of(cls, kernel: Array, gradient: Array, root: Root | None = None) -> Spectrum:
        """`root`: of the kernel, if known."""
        found = Root.of(kernel) if root is None else root
        total, lower = max(float(np.vdot(kernel, gradient)), 0.0), found.single
        inner = lower.T @ (gradient / (total or 1.0)).astype(lower.dtype) @ lower
        return cls(kernel, gradient, found, total, (inner + inner.T) / 2)

    @functools.cached_property
    def values(self) -> Array:
        """lam."""
        return np.clip(self._eigen[0].astype(float) * self.total, 0.0, None)

    @functools.cached_property
    def _eigen(self) -> tuple[Array, Array]:
        values, vectors = eigh(self.inner, driver="evd", check_finite=False)
        return values, vectors

    @functools.cached_property
    def signs(self) -> Signs:
        """The sign rule for Gaussian rows and columns."""
        (mean, by_root, by_square), turned = self.inverse_moments, self._eigen[1]
        kind = turned.dtype
        coherent, square = (
            (turned * one.astype(kind)) @ turned.T
            for one in (by_root * self.total**0.5, self.values * by_square)
        )
        return Signs(mean, coherent, square)

    @functools.cached_property
    def inverse_moments(self) -> tuple[float, Array, Array]:
        """E rho, E z_i^2/rho and E z_i^2/rho^2.

        1/rho = pi^(-1/2) int s^(-1/2) exp(-s rho^2) ds and 1/rho^2 = int exp(-s rho^2) ds, and
        E exp(-s rho^2) z_i^2 = prod_j (1 + 2 s lam_j)^(-1/2)/(1 + 2 s lam_i): one integral over
        log s, whose integrand is analytic, by equally spaced points.
        """
        scale = float(self.values.sum())
        if scale <= 0.0:
            none = np.zeros_like(self.values)
            return 0.0, none, none
        share = self.values / scale
        log_s = np.linspace(-42.0, 28.0, 141)
        step, s = log_s[1] - log_s[0], np.exp(log_s)
        grown = 1 + 2 * s[:, None] * share
        mean = np.exp(-0.5 * np.log(grown).sum(1))[:, None] / grown
        first = (np.sqrt(s)[:, None] * mean).sum(0) * step / np.sqrt(np.pi)
        second = (s[:, None] * mean).sum(0) * step
        root = np.sqrt(scale)
        return root * float((share * first).sum()), first / root, second / scale


class Sides(NamedTuple):
    """Overlaps of tokens at a matrix's input and output in N draws of the network.

    Attributes:
        inputs: (N, T, T) x x^T/n.
        gradients: (N, T, T) delta delta^T/m, delta at its output.
    """

    inputs: Array
    gradients: Array


class Orthogonal(NamedTuple):
    """Muon's step at a matrix's output, in the coordinates of z = L^(-1) x.

    Attributes:
        coherent: (rank, T) P, given delta.
        kernel: P D P^T, D that of the draw.
        square, slope: sum of f^2 and of f sigma.
        aligned: as in `Effect`.
    """

    coherent: Array
    kernel: Array
    square: float
    slope: float
    aligned: float

    @classmethod
    def of(
        cls,
        spectrum: Spectrum,
        n: float,
        m: float,
        sides: Sides | None = None,
        parts: Array | None = None,
    ) -> Orthogonal:
        """Averages over draws of both sides of the gradient.

        With one draw's x = L R Q, Q of orthonormal rows, R D R = O diag(lam) O^T there and
        sigma^2 = n m lam, the step is U = delta^T (L R O diag(f/sigma) O^T) Q.

        Args:
            sides: the draws; None: n and m independent features.
            parts: (k, T) factors of the tokens' gradients in each of k steps; None: one step.
        """
        lower, gradient = spectrum.root.lower, spectrum.gradient
        draws = _independent(spectrum, n, m) if sides is None else sides
        count, (tokens, rank) = len(draws.inputs), lower.shape
        parts = np.ones((1, tokens)) if parts is None else parts
        coherent = np.zeros((rank, tokens))
        kernel = np.zeros((rank, rank))
        square, slope, size, aligned = np.zeros((4, count))
        for k, (read, received) in enumerate(zip(*draws, strict=True)):
            overlaps = spectrum.root.whitened(spectrum.root.whitened(read).T)
            right = spread(overlaps)
            left = lower @ right
            step = np.zeros_like(left)
            for part in parts:
                weighted = part[:, None] * left
                values, vectors = eigh(weighted.T @ received @ weighted, check_finite=False)
                sigma = np.sqrt(np.maximum(values, np.finfo(float).tiny))
                mapped = newton_schulz(sigma / np.sqrt((sigma**2).sum()))
                ratio = resolved(values, _FLAT**2) * mapped / sigma
                step += weighted @ (vectors * ratio) @ vectors.T
            step /= (n * m) ** 0.5
            coherent += n * right @ step.T / count
            by_gradient = received @ step
            inner = step.T @ by_gradient
            kernel += n * n * right @ inner @ right.T / count
            square[k] = n * m * float(np.trace(inner))
            slope[k] = n * m * float((left * by_gradient).sum())
            size[k] = float((left * (received @ left)).sum())
            on_input = float(((left @ inner) * left).sum()) * n * n
            aligned[k] = on_input / (float((left * left).sum()) * square[k] / (n * m))
        # mean slope relative to the gradient's size, times the predicted size
        along = float(slope.mean() / np.sqrt(n * m * size.mean())) * (n * m) ** 0.5
        along *= spectrum.total**0.5
        # where a draw's delta is large its P is small: P, which multiplies the mean D, is scaled so
        # that m tr(P D) is the mean of f sigma
        coherent *= along / (m * float(((coherent @ gradient) * lower.T).sum()))
        return cls(
            coherent,
            kernel,
            float(square.mean()),
            along,
            float(np.exp(np.log(np.maximum(aligned, 1e-300)).mean())),
        )


_FLAT = 1e-5
"""Share of the largest singular value near which others are lost in single precision, some hundred
times its rounding; the Newton-Schulz iteration maps it to 5e-3."""


def _independent(spectrum: Spectrum, n: float, m: float) -> Sides:
    """Wishart matrices about K and D."""
    rng, roots = np.random.default_rng(0), (spread(spectrum.kernel), spread(spectrum.gradient))
    count = max(2, min(1024, 2**15 // len(spectrum.kernel) ** 2))

    def drawn(root: Array, features: float) -> Array:
        roots = [root @ wishart_root(root.shape[1], features, rng) for _ in range(count)]
        return np.stack([one @ one.T for one in roots])

    return Sides(drawn(roots[0], n), drawn(roots[1], m))


def wishart_root(count: int, features: float, rng: np.random.Generator) -> Array:
    """(count, .) a root of Z Z^T/features, Z of independent normal entries (Bartlett)."""
    if features < count:
        width = max(1, round(features))
        return np.asarray(rng.standard_normal((count, width)) / width**0.5)
    root = np.tril(rng.standard_normal((count, count)), -1)
    freedom = features - np.arange(count)
    np.fill_diagonal(root, np.sqrt(rng.chisquare(freedom)))
    return np.asarray(root / features**0.5)


class Drawn(NamedTuple):
    """Non-Gaussian draws, with correlated Gaussian draws of the same kernel as control variates.

    Attributes:
        values, twins: (N, T) non-Gaussian and Gaussian draws.
        share: coefficient of the control variate, the share of the kernel that both have in common.
    """

    values: Array
    twins: Array
    share: float


class Signs(NamedTuple):
    """The sign rule's step at a matrix's output, in the coordinates z = L^(-1) x of its input.

    Attributes:
        mean: E rho.
        coherent: P/(n sqrt(2/pi)), times the root of tr(K D).
        square: kernel of the coherent part, over n (n - 1) 2/pi.
    """

    mean: float
    coherent: Array
    square: Array

    def by_draws(self, draws: Drawn, average: Callable[[Array], Signs]) -> Signs:
        """Averages over draws, with their Gaussian twins, whose averages are these, as control."""
        values, share = average(draws.values), draws.share
        if share == 0.0:
            return values
        twins = average(draws.twins)
        return Signs(
            values.mean + share * (self.mean - twins.mean),
            values.coherent + share * (self.coherent - twins.coherent),
            values.square + share * (self.square - twins.square),
        )


def sign_of_rows(spectrum: Spectrum, delta: Drawn) -> Signs:
    """Rows of G given by draws of delta across tokens, the input Gaussian.

    Given delta, E sign(G) z = sqrt(2/pi) a/|a|, a = L^T delta. P is the Gaussian one, scaled so
    that its trace with D is the mean of rho = |a|.
    """
    exact, size, lower = spectrum.signs, spectrum.total**0.5, spectrum.root.single

    def average(draws: Array) -> Signs:
        # on the scale of tr(K D)
        a = (draws / size).astype(lower.dtype) @ lower
        rho2 = (a * a).sum(1)
        divisor = np.maximum(rho2, np.finfo(rho2.dtype).tiny)
        # a a^T has the mean L^T D L: with least variance at this multiple
        known = float(rho2.mean() / max((rho2**2).mean(), 1e-300))
        weights = (np.where(rho2 > 0, 1 / divisor, known) - known).astype(a.dtype) / len(a)
        mean = float(np.sqrt(rho2).mean() / np.sqrt(max(rho2.mean(), 1e-300)))
        square = known * spectrum.inner + (a * weights[:, None]).T @ a
        return Signs(mean * size, exact.coherent, square)

    found = exact.by_draws(delta, average)
    return found._replace(coherent=exact.coherent * (found.mean / exact.mean))


def sign_of_columns(spectrum: Spectrum, values: Drawn, delta: Array) -> Signs:
    """Columns of G given by draws of the input's features, delta (N, T) drawn by its law.

    Given x, E sign(G) delta = sqrt(2/pi) D x/rho; the input's mean under the sign of G is taken
    over two halves of the draws, whose product has no bias.
    """
    exact, root, kind = spectrum.signs, spectrum.root, spectrum.inner.dtype
    # of signs, draws need no more than single precision
    single_delta = (delta / spectrum.total**0.5).astype(np.float32) @ root.lower.astype(np.float32)

    def average(draws: Array) -> Signs:
        z = root.solved(draws.T).T.astype(kind)
        rho2 = np.maximum(((z @ spectrum.inner) * z).sum(1), 0.0)
        mean = float(np.sqrt(rho2).mean() / np.sqrt(rho2.mean()))
        # a feature that is nonzero only at tokens without gradient does not step
        nonzero = rho2 > _NOTHING * rho2.mean()
        inverse = np.where(nonzero, 1 / np.sqrt(np.where(nonzero, rho2, 1.0)), 0.0)
        size = (z * z).sum(1)
        known = float((size**2 * inverse).mean() / (size**2).mean())
        weights = (inverse - known).astype(kind) / len(z)
        coherent = known * np.eye(z.shape[1], dtype=kind) + (z * weights[:, None]).T @ z
        # on the scale at which its trace with D is the mean of rho
        coherent = coherent * (mean / float((coherent * spectrum.inner).sum()))
        half, single = len(z) // 2, z.astype(np.float32)
        first, second = (
            np.sign(single_delta @ part.T) @ part / len(part)
            for part in (single[:half], single[half:])
        )
        square = np.asarray(first.T @ second, kind) / (len(single_delta) * SIGN_MEAN**2)
        return Signs(mean * spectrum.total**0.5, coherent, (square + square.T) / 2)

    return exact.by_draws(values, average)


_NOTHING = 1e-12
"""Share of the mean square below which a squared gradient is rounding."""

_RANGE = 1e-9
"""Share of the largest pivot below which a token is a combination of others."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's first step.

    Attributes:
        name: its name.
        rule: rule of the hidden matrices: "sgd", "sign" or "muon".
        others: rule of tables, norms, biases and the head.
        epsilon: of Adam.
        weight_decay: every parameter also shrinks by rate times this.
        gain: factor on the rate of every step, by Nesterov's momentum.
        clip: largest norm of all gradients together, or None.
        adjust: Muon's scale of a matrix's step: "original", "match_rms_adamw" or "spectral".
        multipliers: of the learning rate, by parameter or group.
        updates: several steps; None: the first.
        batches: their batches, once known.
    """

    name: str
    rule: str
    others: str
    epsilon: float = 0.0
    weight_decay: float = 0.0
    gain: float = 1.0
    clip: float | None = None
    adjust: str = "original"
    multipliers: Mapping[str, float] = field(default_factory=dict)
    updates: Updates | None = None
    batches: Batches | None = None

    def clipped(self, norm: float) -> Optimizer:
        """The optimizer if all gradients together have that norm.

        Clipping multiplies gradients by one factor, and so SGD's step. Adam's and Muon's do not
        depend on it but for epsilon, which is divided by it.
        """
        share = 1.0 if self.clip is None else min(1.0, self.clip / max(norm, 1e-300))
        gain = self.gain * (share if self.rule == "sgd" else 1.0)
        return dataclasses.replace(self, epsilon=self.epsilon / share, gain=gain)

    def pulled(self, product: Array) -> tuple[float, float]:
        """For an entry of a step under the sign rule: E U g over that of a sign, and E U^2.

        `product`: (T, T) contributions of pairs of tokens to the variance of the entry's gradient.
        """
        if self.batches is not None:
            return self.batches.pulled(self.batches.blocks(product))
        return damping(max(float(product.sum()), 0.0) ** 0.5, self.epsilon)

    def decay(self, name: str, rate: float) -> float:
        """Factor of a parameter by weight decay."""
        steps = 1 if self.updates is None else self.updates.steps
        return (1.0 - rate * self.multiplier(name) * self.weight_decay) ** steps

    def factor(self, name: str, n: float = 1.0, m: float = 1.0) -> float:
        """Factor of the learning rate of a parameter; n and m are features of a hidden matrix."""
        rate = self.gain * self.multiplier(name)
        if self.rule == "muon" and group_of(name) == "matrices":
            rate *= MUON_SCALES[self.adjust](n, m)
        return rate

    def multiplier(self, name: str) -> float:
        """The user's multiplier of the parameter or else of its group."""
        return float(self.multipliers.get(name, self.multipliers.get(group_of(name), 1.0)))

    def rule_of(self, name: str) -> str:
        return self.rule if group_of(name) == "matrices" else self.others


# Muon's scale of a step on an (m, n) matrix, of singular values about 1.
MUON_SCALES = {
    "original": lambda n, m: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda n, m: 0.2 * max(n, m) ** 0.5,
    "spectral": lambda n, m: (m / n) ** 0.5,
}

OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "sign", "muon")


def named_optimizer(
    name: str,
    *,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    nesterov: bool | None = None,
    adjust: str = "original",
    clip: float | None = None,
    multipliers: Mapping[str, float] | None = None,
    steps: int = 1,
) -> Optimizer:
    """An optimizer's first step, or first steps, by its name.

    Raises:
        DomainError: an unknown name, or an option that the optimizer does not have.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    check_choice("adjust", adjust, tuple(MUON_SCALES))
    if adjust != "original" and name != "muon":
        raise domain_error("adjust", adjust, 'left out but for "muon"')
    usual = (0.9, 0.99) if name == "lion" else (0.9, 0.999)
    pair = check_array("betas", usual if betas is None else betas, "two numbers in [0, 1)", None)
    if pair.shape != (2,) or not np.all((pair >= 0) & (pair < 1)):
        raise domain_error("betas", betas, "two numbers in [0, 1)")
    decay = check_number("weight_decay", weight_decay, NONNEGATIVE)
    by_muon = name == "muon"  # its author's momentum is .95, Nesterov's
    push = check_number(
        "momentum", (0.95 if by_muon else 0.0) if momentum is None else momentum, PROBABILITY
    )
    ahead = check_flag("nesterov", (by_muon and push > 0) if nesterov is None else nesterov)
    if decay and name == "adam":
        raise domain_error(
            "weight_decay", decay, "0 for adam, which adds it to the gradient", 'use "adamw"'
        )
    if (push or ahead) and name not in ("sgd", "muon"):
        raise domain_error("momentum", push, 'left out but for "sgd" and "muon"')
    if ahead and not push:
        raise domain_error("nesterov", nesterov, "False without momentum")
    by_adam = name in ("adam", "adamw", "muon")
    if eps is not None and not by_adam:
        raise domain_error("eps", eps, "left out but for adam, adamw and muon")
    epsilon = check_number("eps", 1e-8 if eps is None else eps, NONNEGATIVE) if by_adam else 0.0
    most = None if clip is None else check_number("clip", clip, POSITIVE)
    if most is not None and steps != 1:
        raise domain_error("clip", clip, "left out of several steps, whose norms differ")
    given = dict(multipliers or {})
    for key, factor in given.items():
        given[key] = check_number(f"multipliers[{key!r}]", factor, NONNEGATIVE)
    rule = {"sgd": "sgd", "muon": "muon"}.get(name, "sign")
    others = "sgd" if name == "sgd" else "sign"
    gain = 1.0 + push if ahead and not by_muon else 1.0
    updates = None
    if check_count("steps", steps) > 1:
        gain = 1.0  # the sum of all steps has it
        # Muon's other parameters step by Adam
        kind = "adam" if by_adam else name
        updates = Updates(kind, steps, (pair[0], pair[1]), epsilon, push, ahead)
    return Optimizer(name, rule, others, epsilon, decay, gain, most, adjust, given, updates)


def check_step(optimizer: str, learning_rate: float, **options: Any) -> float:
    """The learning rate, before anything is computed.

    Raises:
        DomainError: as `named_optimizer`, or a rate that is not positive and finite.
    """
    named_optimizer(optimizer, **options)
    return check_number("learning_rate", learning_rate, POSITIVE)


GROUPS = ("matrices", "embedding", "head", "vectors")
"""Hidden matrices; tables and patches; the matrix to the logits; norms' gains, biases and other
vectors."""

_OF_HEADS = ("rate", "skip", "attention_sink")

_TABLES = ("token", "position", "segment", "patch", "class", "relative_bias")


def group_of(name: str) -> str:
    """The group of a parameter, by its name in `Prediction.weight_gradients`."""
    if name.endswith((".bias", ".gain", ".taps", ".layer_scale")) or name in _OF_HEADS:
        return "vectors"
    if name.removeprefix("encoder.") in _TABLES:
        return "embedding"
    return "head" if name == "head" else "matrices"


def newton_schulz(values: Array) -> Array:
    """Five steps of Muon's quintic on singular values."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        square = values * values
        values = values * (a + b * square + c * square * square)
    return values


Pull = Callable[[Array], tuple[float, float]]


def _signs_alone(product: Array) -> tuple[float, float]:
    """`Optimizer.pulled` without epsilon."""
    return 1.0, 1.0


def damping(deviation: float, epsilon: float) -> tuple[float, float]:
    """Factors of E y u and E u^2 by Adam's epsilon, u = y/(|y| + eps) for y of a row of G.

    `deviation`: root mean square of y. 1 and 1 without epsilon.
    """
    if epsilon == 0.0 or deviation == 0.0:
        return 1.0, 1.0
    t, step = np.linspace(-30.0, 2.3, 400, retstep=True)  # z = exp(t)
    z = np.exp(t)
    weight = SIGN_MEAN * step * z * np.exp(-z * z / 2)
    near = z / (z + epsilon / deviation)
    return float((weight * z * near).sum()) / SIGN_MEAN, float((weight * near * near).sum())


def effect(
    spectrum: Spectrum,
    rule: str,
    onto: Array,
    new: Array,
    n: float,
    m: float,
    excess: float = 0.0,
    pull: Pull = _signs_alone,
    signs: Signs | None = None,
    orthogonal: Orthogonal | None = None,
) -> Effect:
    """A step of learning rate 1 on an (m, n) matrix, at its output.

    Args:
        spectrum: of the input's and the gradient's kernels before the step.
        rule: "sgd", "sign" or "muon".
        onto: E x' z, overlap of the updated input with the old one (`Root.whitened`).
        new: E x' x'.
        n, m: features of input and output.
        excess: variance of the overlap of two tokens' inputs, relative to the squares, beyond the
            1/n of independent features.
        pull: `Optimizer.pulled`; by default that of a sign.
        signs: for the sign rule, if rows or columns are not Gaussian.
        orthogonal: Muon's step; None: for independent features.
    """
    kernel, total, lower = spectrum.kernel, spectrum.total, spectrum.root.single
    if total <= 0.0:
        nothing = np.zeros_like(kernel)
        return Effect(nothing, nothing, 0.0, 0.0, 0.0)
    # P and its kernel on the old input, in the coordinates of z = L^(-1) x
    if rule == "sgd":
        # overlaps of variance 1/n + excess: Cov(x_t.x_s, x_t'.x_s') = n^2 (1/n + excess) times
        # K_tt' K_ss' + K_ts' K_st', of which the second is K D K again
        coherent = n * lower.T
        aligned = (n * n + n + n * n * excess) * total * spectrum.inner
        plain, size, slope = n * total * (1 + excess * n), total, n * m * total
    elif rule == "sign":
        signs = spectrum.signs if signs is None else signs
        pulled, noise = pull(kernel * spectrum.gradient)
        coherent = (SIGN_MEAN * n * pulled / total**0.5) * signs.coherent @ lower.T
        pairs = SIGN_MEAN**2 * n * (n - 1) * pulled**2
        aligned = (1 - excess) * pairs * signs.square
        plain, size = n * noise + excess * pairs, noise
        slope = SIGN_MEAN * n * m * pulled * signs.mean
    else:
        step = Orthogonal.of(spectrum, n, m) if orthogonal is None else orthogonal
        size, slope = step.square / (n * m), step.slope
        # outside the span of the old input there is no gradient
        coherent, plain = step.coherent, n * size
        aligned = step.kernel - plain * np.eye(lower.shape[1])
    if rule == "muon":
        followed, alignment = 0.0, step.aligned
    else:
        old = float((spectrum.root.square * aligned).sum()) + plain * float(np.trace(kernel))
        followed, alignment = slope / (m * total), old / (float(np.trace(kernel)) * size)
    along = product(onto, aligned, onto.T)
    nonlinear = along / (1 - excess) if rule == "sign" else None
    both = along + plain * new
    return Effect(product(onto, coherent), both, slope, size, alignment, nonlinear, followed)


def gain_effect(
    kernel: Array,
    gradient: Array,
    rule: str,
    met: Array,
    new: Array,
    m: float,
    pull: Pull = _signs_alone,
) -> Effect:
    """A step of learning rate 1 on a norm's gain, one number per feature (n = 1).

    Under the sign rule P is taken as proportional to K, which is exact if all terms of rho change
    by one factor, and E rho as that of a chi-square with rho^2's mean and variance: gains have a
    thousandth of a step's effect.
    """
    total = float(np.vdot(kernel, gradient))
    if total <= 0.0:
        nothing = np.zeros_like(kernel)
        return Effect(nothing, nothing, 0.0, 0.0, 0.0)
    if rule == "sgd":
        square = between(met, gradient, met)
        return Effect(met.copy(), 2 * square + total * new, m * total, total, 1.0)
    onward = product(kernel, gradient)
    freedom = float(np.trace(onward)) ** 2 / float(np.vdot(onward, onward.T))
    mean = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    mean *= math.sqrt(2 * total / freedom)
    pulled, noise = pull(kernel * gradient)
    slope = SIGN_MEAN * pulled * mean
    return Effect(slope / total * met, noise * new, m * slope, noise, 1.0)


def vector_effect(gradient: Array, rule: str, m: float, pull: Pull = _signs_alone) -> Effect:
    """A step of learning rate 1 on a bias, its gradient the sum over tokens: (1, 1) for all."""
    variance, ones = float(gradient.sum()), np.ones((1, 1))
    if variance <= 0.0:
        return Effect(0 * ones, 0 * ones, 0.0, 0.0, 0.0)
    if rule == "sgd":
        return Effect(ones, ones * variance, m * variance, variance, 1.0)
    root = variance**0.5
    pulled, noise = pull(gradient)
    coherent = SIGN_MEAN * pulled / root * ones
    return Effect(coherent, noise * ones, SIGN_MEAN * pulled * m * root, noise, 1.0)
