"""What one step of an optimizer does to one matrix, in closed form.

With x of kernel K the matrix's input (n features) and delta of kernel D the gradient at its output
(m features), the gradient is G = sum_t delta_t x_t^T. Write K^(1/2) D K^(1/2) = O diag(lam) O^T
and B = K^(1/2) O. A row of G, given delta, is Gaussian of variance rho^2 = delta^T K delta, which
is sum_i lam_i z_i^2 over standard normal z. The step is -rate U(G), and on an input x', U(G) x' has

    the coherent part sum_s P_ts delta_s, P = B' diag(F) B^T, B' = E[x' x^T] K^(-1/2) O,
    the kernel Q = B' diag(G2) B'^T + noise,

    rule   F                   G2                                noise
    SGD    n                   n^2 lam                           n tr(KD) K'
    sign   n c E[z_i^2/rho]    n (n-1) c^2 lam_i E[z_i^2/rho^2]  n K'                c^2 = 2/pi
    Muon   n f_i/sigma_i       n^2 (f_i/sigma_i)^2 lam_i         sum f^2/m (K' - B' B'^T)

with sigma_i^2 = n m lam_i the squared singular values of G and f the map that the optimizer applies
to them; f sees singular values one by one, so that for Muon K and D are those of n and m features,
Wishart matrices about their means, averaged over a few draws (`Orthogonal`). Adam's first step,
bias corrections included, is g/(|g| + eps): the sign rule, damped where |g| is near eps. Lion's and
signum's is sign(g); momentum's is g.

Exact for Gaussian x and delta independent of it; sign by E sign(a) b = c E[a b]/rho.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .change import Array

SIGN_MEAN = float(np.sqrt(2 / np.pi))
"""E|z| of a standard normal z."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic (Jordan 2024), applied five times."""

RULES = ("sgd", "sign", "muon")


class Effect(NamedTuple):
    """What a step of learning rate 1 does at a matrix's output.

    Attributes:
        coherent, total: P and Q on the updated input.
        slope: minus the derivative of the loss in the learning rate.
        square: E U^2 of an entry of the step.
        aligned: mean over tokens of the kernel of U x on the old input over K E U^2.
    """

    coherent: Array
    total: Array
    slope: float
    square: float
    aligned: float


class Root(NamedTuple):
    """Roots of a kernel's eigenvalues and its eigenvectors, those that are not 0."""

    values: Array
    vectors: Array

    @classmethod
    def of(cls, kernel: Array) -> Root:
        weights, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
        kept = weights > _RANGE * weights[-1]
        return cls(np.sqrt(weights[kept]), vectors[:, kept])


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The root of K, its pseudoinverse times O, and the eigenvalues: what a step needs of K and D.

    Attributes:
        kernel, gradient: K and D.
        basis: B = K^(1/2) O.
        dual: K^(-1/2) O on the range of K.
        values: lam.
    """

    kernel: Array
    gradient: Array
    basis: Array
    dual: Array
    values: Array

    @classmethod
    def of(cls, kernel: Array, gradient: Array, root: Root | None = None) -> Spectrum:
        """`root`: of the kernel, where it is known."""
        roots, vectors = Root.of(kernel) if root is None else root
        inner = roots[:, None] * (vectors.T @ gradient @ vectors) * roots
        values, turned = np.linalg.eigh((inner + inner.T) / 2)
        basis, dual = vectors @ (roots[:, None] * turned), vectors @ (turned / roots[:, None])
        return cls(kernel, gradient, basis, dual, np.clip(values, 0.0, None))

    @functools.cached_property
    def _orthogonal(self) -> dict[tuple[float, float], Orthogonal]:
        return {}

    def orthogonal(self, n: float, m: float) -> Orthogonal:
        """Muon's step on an (m, n) matrix."""
        if (n, m) not in self._orthogonal:
            self._orthogonal[n, m] = Orthogonal.of(self, n, m)
        return self._orthogonal[n, m]

    @functools.cached_property
    def inverse(self) -> Array:
        """K^+."""
        return np.asarray(self.dual @ self.dual.T)

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
        log_s = np.linspace(-42.0, 28.0, 281)
        step, s = log_s[1] - log_s[0], np.exp(log_s)
        grown = 1 + 2 * s[:, None] * share
        mean = np.exp(-0.5 * np.log(grown).sum(1))[:, None] / grown
        first = (np.sqrt(s)[:, None] * mean).sum(0) * step / np.sqrt(np.pi)
        second = (s[:, None] * mean).sum(0) * step
        root = np.sqrt(scale)
        return root * float((share * first).sum()), first / root, second / scale


class Orthogonal(NamedTuple):
    """Muon's step at a matrix's output, on the old input.

    Attributes:
        coherent, aligned: P and P D P^T, D that of the draw.
        square, slope: sum of f^2 and of f sigma.
    """

    coherent: Array
    aligned: Array
    square: float
    slope: float

    @classmethod
    def of(cls, spectrum: Spectrum, n: float, m: float) -> Orthogonal:
        count = len(spectrum.kernel)
        draws = max(2, min(128, 512 // count))
        rng = np.random.default_rng(0)
        left, right = _root(spectrum.kernel), _root(spectrum.gradient)
        coherent, aligned = np.zeros_like(left), np.zeros_like(left)
        square = slope = 0.0
        for _ in range(draws):
            x = left @ _wishart_root(count, n, rng)  # x x^T: kernel of n features
            d = right @ _wishart_root(count, m, rng)
            _, sigma, turned = np.linalg.svd(d.T @ x, full_matrices=False)
            sigma = sigma * (n * m) ** 0.5
            mapped = newton_schulz(sigma / np.sqrt((sigma**2).sum()))
            ratio = np.divide(
                mapped, sigma, out=np.zeros_like(sigma), where=sigma > 1e-12 * sigma.max()
            )
            basis = x @ turned.T
            found = n * (basis * ratio) @ basis.T
            coherent += found / draws
            moved = found @ d
            aligned += moved @ moved.T / draws
            square += float((mapped**2).sum()) / draws
            slope += float((mapped * sigma).sum()) / draws
        # where a draw's delta is large its step is small: on the scale at which m tr(P D) is the
        # mean of f sigma
        size = m * float((coherent * spectrum.gradient).sum())
        return cls(coherent * (slope / size), aligned, square, slope)


def _root(kernel: Array) -> Array:
    weights, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
    return np.asarray(vectors * np.sqrt(np.clip(weights, 0.0, None)))


def _wishart_root(count: int, features: float, rng: np.random.Generator) -> Array:
    """(count, .) a root of Z Z^T/features, Z of independent normal entries: Bartlett's."""
    if features < count:
        width = max(1, round(features))
        return np.asarray(rng.standard_normal((count, width)) / width**0.5)
    root = np.tril(rng.standard_normal((count, count)), -1)
    freedom = features - np.arange(count)
    np.fill_diagonal(root, np.sqrt(rng.chisquare(freedom)))
    return np.asarray(root / features**0.5)


class Signs(NamedTuple):
    """What the sign of a gradient does at a matrix's output where its rows are not Gaussian.

    Attributes:
        mean: E rho over sqrt(E rho^2), of the rows or columns as they are.
        coherent: P/(n sqrt(2/pi)) on the old input; None: the Gaussian one, scaled to the mean.
        square: of it the kernel, over n (n - 1) 2/pi.
    """

    mean: float
    coherent: Array | None
    square: Array


def sign_of_rows(kernel: Array, delta: Array) -> Signs:
    """Rows of G given by draws (N, T) of delta across tokens, the input Gaussian of a kernel.

    Given delta, E sign(G) x = sqrt(2/pi) K delta/rho.
    """
    onward = delta @ kernel
    rho = np.sqrt(np.maximum((onward * delta).sum(1), 0.0))
    size = float(np.sqrt((rho**2).mean())) or 1.0
    alike = np.divide(onward, rho[:, None], out=np.zeros_like(onward), where=rho[:, None] > 0)
    return Signs(float(rho.mean()) / size, None, alike.T @ alike / len(delta))


def sign_of_columns(values: Array, gradient: Array, delta: Array) -> Signs:
    """Columns of G given by draws (N, T) of the input's features, delta Gaussian of a kernel.

    Given x, E sign(G) delta = sqrt(2/pi) D x/rho; the input's mean under the sign of G is taken
    over two halves of the draws, whose product has no bias.

    Args:
        values: draws of a feature across tokens.
        gradient: D.
        delta: draws of its law.
    """
    rho = np.sqrt(np.maximum(((values @ gradient) * values).sum(1), 0.0))
    size = float(np.sqrt((rho**2).mean())) or 1.0
    alike = np.divide(values, rho[:, None], out=np.zeros_like(values), where=rho[:, None] > 0)
    half = len(values) // 2
    first, second = (
        np.sign(delta @ part.T) @ part / len(part) for part in (values[:half], values[half:])
    )
    square = first.T @ second / len(delta) / SIGN_MEAN**2
    return Signs(float(rho.mean()) / size, alike.T @ values / len(values), (square + square.T) / 2)


_RANGE = 1e-9
"""Eigenvalues of K below this share of the largest are none: tokens that read the same."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's first step.

    Attributes:
        name: as the user gave it.
        rule: of the hidden matrices: "sgd", "sign" or "muon".
        others: of tables, norms, biases and the head.
        epsilon: of Adam.
        weight_decay: every parameter also shrinks by rate times this.
        gain: multiplies the rate of every step: Nesterov's momentum.
        adjust: Muon's scale of a matrix's step: "original", "match_rms_adamw" or "spectral".
        multipliers: of the learning rate, by parameter or group of them.
    """

    name: str
    rule: str
    others: str
    epsilon: float = 0.0
    weight_decay: float = 0.0
    gain: float = 1.0
    adjust: str = "original"
    multipliers: Mapping[str, float] = field(default_factory=dict)

    def factor(self, name: str, n: float = 1.0, m: float = 1.0) -> float:
        """What multiplies the learning rate of a parameter, an (m, n) matrix where it is hidden."""
        rate = self.gain * self.multiplier(name)
        if self.rule == "muon" and group_of(name) == "matrices":
            rate *= MUON_SCALES[self.adjust](n, m)
        return rate

    def multiplier(self, name: str) -> float:
        """The user's, of the parameter itself or else of its group."""
        return float(self.multipliers.get(name, self.multipliers.get(group_of(name), 1.0)))

    def rule_of(self, name: str) -> str:
        return self.rule if group_of(name) == "matrices" else self.others


# Muon's scale of a step on an (m, n) matrix, of singular values about 1.
MUON_SCALES = {
    "original": lambda n, m: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda n, m: 0.2 * max(n, m) ** 0.5,
    "spectral": lambda n, m: (m / n) ** 0.5,
}

GROUPS = ("matrices", "embedding", "head", "vectors")
"""Hidden matrices; tables and patches; the matrix to the logits; norms' gains and all biases."""

_TABLES = ("token", "position", "segment", "patch", "class")


def group_of(name: str) -> str:
    """The group of a parameter, by its name in `Prediction.weight_gradients`."""
    if name.endswith((".bias", ".gain")):
        return "vectors"
    if name in _TABLES:
        return "embedding"
    return "head" if name == "head" else "matrices"


def newton_schulz(values: Array, steps: int = 5) -> Array:
    """What five steps of Muon's quintic make of singular values."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        square = values * values
        values = values * (a + b * square + c * square * square)
    return values


def damping(deviation: float, epsilon: float) -> tuple[float, float]:
    """By how much Adam's epsilon lowers E y u and E u^2, u = y/(|y| + eps) for y of a row of G.

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
    met: Array,
    new: Array,
    n: float,
    m: float,
    excess: float = 0.0,
    epsilon: float = 0.0,
    signs: Signs | None = None,
) -> Effect:
    """A step of learning rate 1 on an (m, n) matrix, at its output.

    Args:
        spectrum: of the input's and the gradient's kernels before the step.
        rule: "sgd", "sign" or "muon".
        met: E x'_t x_s of the updated input with the old one.
        new: E x' x'.
        n, m: features of input and output.
        excess: variance of the overlap of two tokens' inputs, relative to the squares, beyond the
            1/n of independent features.
        epsilon: Adam's.
        signs: under the sign rule, rows or columns that are not Gaussian.
    """
    kernel, lam = spectrum.kernel, spectrum.values
    total = float(lam.sum())
    if total == 0.0:
        nothing = np.zeros_like(kernel)
        return Effect(nothing, nothing, 0.0, 0.0, 0.0)
    basis = spectrum.basis
    if rule == "sgd":
        # overlaps of variance 1/n + excess: Cov(x_t.x_s, x_t'.x_s') = n^2 (1/n + excess) times
        # K_tt' K_ss' + K_ts' K_st', of which the second is K D K again
        first, second = n + 0 * lam, (n * n + n + n * n * excess) * lam
        plain, size, slope = n * total, total, n * m * total
        drawn = excess * n * plain
    elif rule == "sign":
        mean, by_root, by_square = spectrum.inverse_moments
        pulled, noise = damping(total**0.5, epsilon)
        if signs is not None:
            by_root = by_root * (signs.mean * total**0.5 / mean)
            mean = signs.mean * total**0.5
        first = SIGN_MEAN * n * pulled * by_root
        second = SIGN_MEAN**2 * n * (n - 1) * pulled**2 * lam * by_square
        plain, size, slope = n * noise, noise, SIGN_MEAN * n * m * pulled * mean
        drawn = excess * SIGN_MEAN**2 * n * (n - 1) * pulled**2
    else:
        found = spectrum.orthogonal(n, m)
        size, slope = found.square / (n * m), found.slope
        first = second = 0 * lam
        plain = drawn = 0.0
    coherent, aligned = (basis * first) @ basis.T, (basis * second) @ basis.T
    if rule == "muon":
        coherent, aligned = found.coherent, found.aligned
    if rule == "sign" and signs is not None:
        aligned = SIGN_MEAN**2 * n * (n - 1) * pulled**2 * signs.square
        if signs.coherent is not None:
            # on the scale at which its trace with D is the mean of rho
            scale = float((signs.coherent * spectrum.gradient).sum())
            coherent = signs.coherent * (SIGN_MEAN * n * pulled * mean / scale)

    def spread(square: Array, moment: Array) -> Array:
        lost = square if rule == "sign" else 0.0 * square
        return square + (plain + drawn) * moment - excess * lost

    sizes = np.diag(kernel) * size
    old = np.diag(aligned if rule == "muon" else spread(aligned, kernel))
    ratio = np.divide(old, sizes, out=np.zeros_like(old), where=sizes > 0)
    # on the updated input, as far as the old one tells it
    through = met @ spectrum.inverse
    onward = through @ aligned @ through.T
    if rule == "muon":  # what the old input does not span meets no gradient
        total_now = onward + n * size * (new - through @ met.T)
    else:
        total_now = spread(onward, new)
    return Effect(through @ coherent, total_now, slope, size, float(ratio.mean()))


def gain_effect(
    kernel: Array,
    gradient: Array,
    rule: str,
    met: Array,
    new: Array,
    m: float,
    epsilon: float = 0.0,
) -> Effect:
    """A step of learning rate 1 on a norm's gain, one number per feature (n = 1).

    Under the sign rule with P in proportion to K, as exact where all of rho's shares move alike,
    and E rho that of a chi-square of rho^2's mean and variance: gains hold a thousandth of a step.
    """
    total = float((kernel * gradient).sum())
    if total <= 0.0:
        nothing = np.zeros_like(kernel)
        return Effect(nothing, nothing, 0.0, 0.0, 0.0)
    if rule == "sgd":
        square = met @ gradient @ met.T
        return Effect(met.copy(), 2 * square + total * new, m * total, total, 1.0)
    onward = kernel @ gradient
    freedom = total * total / float((onward * onward.T).sum())
    mean = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    mean *= math.sqrt(2 * total / freedom)
    pulled, noise = damping(math.sqrt(total), epsilon)
    slope = SIGN_MEAN * pulled * mean
    return Effect(slope / total * met, noise * new, m * slope, noise, 1.0)


def vector_effect(gradient: Array, rule: str, m: float, epsilon: float = 0.0) -> Effect:
    """A step of learning rate 1 on a bias, whose gradient is the sum over tokens."""
    variance, ones = float(gradient.sum()), np.ones_like(gradient)
    if variance <= 0.0:
        return Effect(0 * ones, 0 * ones, 0.0, 0.0, 0.0)
    if rule == "sgd":
        return Effect(ones, ones * variance, m * variance, variance, 1.0)
    root = variance**0.5
    pulled, noise = damping(root, epsilon)
    coherent = SIGN_MEAN * pulled / root * ones
    return Effect(coherent, noise * ones, SIGN_MEAN * pulled * m * root, noise, 1.0)
