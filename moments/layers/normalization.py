"""Normalisation at finite width: centring, epsilon and fluctuating norms; and Dynamic Tanh.

See docs/theory/norms.md, Dividing by a norm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..engine.composition import Leaf, Pullback, PullbackResult
from ..engine.directions import (
    at_tokens,
    expected_cosine,
    expected_pull,
    of_pairs,
    relative_norm_variance,
)
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap, overlap_of_normalised, signed_root
from ..engine.state import Array, Gradient, Kernel, Signal, Values, evaluate
from ..engine.trace import Record
from ..formulas.activation import TANH
from ..formulas.algebra import is_number
from ..formulas.law import ComponentLaws
from ..formulas.normalization import DYT, LAYERNORM, RMSNORM
from ..model.transformer import Transformer
from .elementary import Activation, entrywise_overlap


@dataclass(frozen=True)
class FiniteNormalization(Leaf):
    """A normalisation over features.

    Attributes:
        laws: of the component; the refined ones are used.
        label: site name in a trace.
        epsilon: added to the variance under the root.
        centres: whether the mean over features is removed (LayerNorm) or not (RMSNorm).
        gain: root mean square of the gain on the normalised tensor.
        affine: whether the gain is a parameter per feature that receives a gradient.
        bias: whether there is a bias, which is 0, too.
        groups: number of groups of features that are normalised separately.
    """

    laws: ComponentLaws
    label: str
    epsilon: Any = 0.0
    centres: bool = True
    gain: Any = 1.0
    affine: bool = False
    bias: bool = False
    groups: Any = 1

    normalises = True
    rescales = True

    @classmethod
    def of(cls, model: Transformer, label: str, gain: float = 1.0, groups: int = 1) -> Self:
        """The normalisation of a model (not for DyT)."""
        centres = model.normalization != "rmsnorm"
        return cls(
            LAYERNORM if centres else RMSNORM,
            label,
            model.norm_epsilon,
            centres=centres,
            gain=gain,
            affine=model.norm_affine,
            bias=centres and model.norm_bias,
            groups=groups,
        )

    @property
    def gain_name(self) -> str | None:
        return f"{self.label}.gain" if self.affine else None

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        laws, width = self.laws.under("refined"), signal.width
        kernel = signal.second_moment()
        if self.centres:
            loose = kernel if signal.centred is None else kernel - signal.centred
            kernel = kernel - loose.scaled(1 / width)
            if self.groups > 1:
                # The mean of one group need not be 0 if that of all features is.
                kernel = kernel - signal.second_moment().scaled((self.groups - 1) / width)
        inner = Signal(kernel, signal.seq_len)
        epsilon = self._epsilon(kernel)
        one, two = self._bind(inner, self._norms(signal), epsilon)
        algebra = inner.algebra
        variance = evaluate(laws["variance"], algebra, one)
        spreads = two
        if self.groups > 1:  # norms of groups fluctuate too much for an expansion
            spreads = two | {name: 0.0 for name in two if name.endswith("norm_spread")}
        off_diagonal = evaluate(laws["covariance"], algebra, spreads)
        if self.groups > 1:
            off_diagonal = off_diagonal * expected_cosine(
                self.freedom(signal.width), two["x_correlation"]
            )
        spread = one["norm_spread"]
        if np.any(spread > _EXPANDED):
            normal = Kernel.of_parts(variance, off_diagonal, kernel.resolved)
            first, second = kernel.over_tokens(spread)
            far = np.maximum(first, second) > _EXPANDED
            bounded: Array = np.where(far, _possible(normal, inner), off_diagonal)
            off_diagonal = float(bounded) if algebra.scalar else bounded
        normal = Kernel.of_parts(variance, off_diagonal, kernel.resolved)
        square = self.gain * self.gain
        scaled = normal.scaled(square)
        output = Signal(
            scaled,
            signal.seq_len,
            mean=0.0 * kernel.diagonal,
            width=width,
            fluctuation=overlap_of_normalised(signal, kernel, normal, self.epsilon, square),
            centred=scaled if self.centres else None,
            kurtosis=evaluate(laws["kurtosis"], algebra, {"d_model": width / self.groups}),
            notes=(_unexpandable(spread) if self.groups == 1 else ()) + _undefined(epsilon),
        )
        return output, functools.partial(self._back, signal, normal, one, two, epsilon)

    def _back(
        self,
        signal: Signal,
        normal: Kernel,
        one: Values,
        two: Values,
        epsilon: Array,
        gradient: Gradient,
    ) -> PullbackResult:
        """Gradient at the input; `normal` is the kernel before the gain, `one` and `two` are values
        of the laws' symbols for a token and for a pair."""
        laws, algebra, width = self.laws.under("refined"), signal.algebra, signal.width
        grad_out = gradient.kernel.scaled(self.gain * self.gain)
        radial, mean = self._lost_directions(gradient)
        along, along_first, along_second = at_tokens(grad_out, radial)
        share = (along + grad_out.lift(mean)[0]) / width
        overlap = two["x_correlation"] ** 2
        _, pair_share = grad_out.lift(1 / width)
        lost = of_pairs(along_first, along_second, overlap) + grad_out.lift(mean)[1]
        pair_share = pair_share * lost
        single = one | {"grad_variance": grad_out.diagonal, "removed_share": share}
        pair = two | {"grad_covariance": grad_out.off_diagonal, "removed_pair_share": pair_share}
        variance = evaluate(laws["grad_variance"], algebra, single)
        off_diagonal = evaluate(laws["grad_covariance"], algebra, pair)
        if self.groups > 1:
            variance, off_diagonal = self._by_group(signal, grad_out, epsilon)
        kernel = Kernel.of_parts(variance, off_diagonal, grad_out.resolved)
        # The output does not depend on the input's norm, so the gradient is orthogonal to it.
        centred = 1.0 if self.centres else gradient.centred_share
        grad_in = Gradient(
            kernel, gradient.seq_len, 0.0, centred, norm_response=1.0, alone=gradient.alone
        )
        return PullbackResult(
            grad_in, functools.partial(affine_weights, self, width, normal, gradient)
        )

    def freedom(self, width: Any) -> float:
        """Degrees of freedom of a group's norm."""
        return float(width / self.groups - (1.0 if self.centres else 0.0))

    def _epsilon(self, kernel: Kernel) -> Array:
        """Epsilon, broadcast to a diagonal; infinite for a token of variance 0 without an epsilon,
        whose output and gradient, 0/0, are then 0."""
        epsilon, _ = kernel.lift(self.epsilon)
        if np.all(kernel.diagonal + epsilon):
            return epsilon
        result = np.where(kernel.diagonal + epsilon == 0.0, np.inf, epsilon)[()]
        return float(result) if is_number(kernel.diagonal) else result

    def _by_group(self, signal: Signal, grad_out: Kernel, epsilon: Array) -> tuple[Array, Array]:
        """The gradient for groups, whose norms fluctuate too much for an expansion: the norm of m
        Gaussian features is chi-square with n = m degrees of freedom, or m - 1 if centred."""
        tokens, n = signal.second_moment(), self.freedom(signal.width)
        first, second = tokens.over_tokens(tokens.diagonal + epsilon)
        scale = (first * second) ** 0.5
        variance = grad_out.diagonal * expected_pull(n, 1.0) / (tokens.diagonal + epsilon)
        off_diagonal = grad_out.off_diagonal * expected_pull(n, signal.correlation()) / scale
        if signal.fluctuation is None:
            return variance, off_diagonal
        # the fluctuation common to all groups
        diagonal, common = relative_norm_variance(signal, features=False)
        v, w = tokens.over_tokens(diagonal)
        return variance * (1 + diagonal), off_diagonal * (1 + 0.375 * (v + w) + common / 4)

    def _norms(self, signal: Signal) -> Kernel | None:
        """Covariance of the squared norms that tokens are divided by."""
        if signal.fluctuation is None:
            return None
        norms = signal.fluctuation.norms
        if not self.groups > 1:
            return norms
        # Given the overlaps of earlier layers, features are independent: the norm of one of g
        # groups has g times the fluctuation 2 C o C/width.
        squared = signal.kernel * signal.kernel
        return norms.mixed(1.0, squared, 2 * (self.groups - 1) / signal.width)

    def _bind(
        self, inner: Signal, spread: Kernel | None, eps: Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values of the laws' symbols, for a token and for a pair."""
        kernel = inner.kernel
        first, second = kernel.over_tokens(kernel.diagonal)
        eps_pairs = kernel.lift(self.epsilon)[1]
        if np.any(np.isinf(eps)):
            eps_pairs = np.maximum(*kernel.over_tokens(eps + 0.0 * kernel.diagonal))
        one = {"x_variance": kernel.diagonal, "epsilon": eps}
        two = {
            "x_variance": first,
            "x_other_variance": second,
            "x_correlation": inner.correlation(),
            "epsilon": eps_pairs,
        }
        if spread is None:
            spread = kernel.scaled(0.0)
        diagonal = spread.diagonal / (kernel.diagonal + eps) ** 2
        one["norm_spread"] = diagonal
        two["norm_spread"], two["other_norm_spread"] = kernel.over_tokens(diagonal)
        first, second = first + eps_pairs, second + eps_pairs
        two["pair_norm_spread"] = spread.off_diagonal / (first * second)
        root = signed_root(spread, kernel)
        one_root, other_root = root.over_tokens(root.diagonal)
        both = one_root / first + other_root / second
        two["overlap_norm_spread"] = 0.5 * both * root.off_diagonal / (first * second) ** 0.5
        return one, two

    def _lost_directions(self, gradient: Gradient) -> tuple[Any, Any]:
        """Number of directions that are removed from a token's gradient: along the signal, and the
        mean over features, per group; one less if the gradient is orthogonal or centred already."""
        radial = self.groups - 1.0 + gradient.radial
        return radial, self.groups - gradient.centred_share if self.centres else 0.0


_EXPANDED = 0.05
"""Relative variance of squared norms beyond which covariances are bounded: the expansion's error is
of the order of its square."""

_FAR = 0.3
"""Relative variance of squared norms beyond which a note warns of the expansion."""


def _possible(normal: Kernel, inner: Signal) -> Array:
    """Covariances bounded by the variances, with the sign of the input's."""
    first, second = normal.over_tokens(normal.diagonal)
    sign = np.sign(inner.kernel.off_diagonal)
    off_diagonal = sign * np.clip(sign * normal.off_diagonal, 0.0, (first * second) ** 0.5)
    return off_diagonal if normal.resolved or np.ndim(off_diagonal) else float(off_diagonal)


def _undefined(epsilon: Array) -> tuple[str, ...]:
    if not np.any(np.isinf(epsilon)):
        return ()
    return (
        "a token without variance is normalised with nothing under the root: its output and its "
        "gradient are counted as 0; declare norm_epsilon",
    )


def _unexpandable(spread: Array) -> tuple[str, ...]:
    largest = float(np.max(spread))
    if largest <= _FAR:
        return ()
    return (
        f"squared norms of the tokens vary by {largest:.2g} (relative variance), and normalisation "
        "is expanded to second order in that",
    )


_NOT_GAUSSIAN = 0.5
"""Difference of the kurtosis from a Gaussian's 3 beyond which a note warns."""

NOT_GAUSSIAN = (
    "DyT behind another function of single entries, whose laws take these for Gaussian: behind a "
    "saturated DyT gradients of queries and keys were simulated up to a third larger, behind a "
    "ReLU the variance a quarter larger"
)


@dataclass(frozen=True)
class DynamicTanh(Leaf):
    """gain tanh(alpha x), entry by entry (DyT).

    Below saturation it preserves the input's scale, so gradients do not become orthogonal.

    Attributes:
        label: site name in a trace.
        alpha: factor on the input; its gradient is not predicted.
        gain: root mean square of the gain on the output.
        affine: whether gain and bias are parameters per feature that receive gradients.
    """

    label: str
    alpha: Any = 0.5
    gain: Any = 1.0
    affine: bool = False
    laws: ComponentLaws = DYT

    rescales = True

    @property
    def bias(self) -> bool:
        """Whether there is a bias: always with a learned gain."""
        return self.affine

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        inner = Activation(self.laws, "refined", self.label, {"alpha": self.alpha})
        output, back = inner.forward(signal)
        limit = self.laws.law("variance").domain["x_variance"]  # of alpha x
        notes: tuple[str, ...] = ()
        if not limit.contains(self.alpha * self.alpha * signal.kernel.mean_diagonal()):
            notes = (f"the variance of alpha x is outside {limit}, where laws are resolved",)
        if float(np.max(np.abs(np.asarray(signal.kurtosis) - 3.0))) > _NOT_GAUSSIAN:
            notes += (NOT_GAUSSIAN,)
        normal, square = output.kernel, self.gain * self.gain
        fluctuation = output.fluctuation
        output = output.replace(
            kernel=normal.scaled(square),
            fluctuation=None if fluctuation is None else fluctuation.scaled(square),
            notes=notes,
        )
        return output, functools.partial(self._back, back, signal.width, normal)

    def _back(
        self, inner: Pullback, width: Any, normal: Kernel, gradient: Gradient
    ) -> PullbackResult:
        """Gradient at the input, through the gain and the entrywise function."""
        pulled = inner(gradient.with_kernel(gradient.kernel.scaled(self.gain * self.gain)))
        weights = functools.partial(affine_weights, self, width, normal, gradient)
        return PullbackResult(pulled.gradient, weights)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        square = float(self.alpha * self.alpha)
        return entrywise_overlap(self, record, at, walk.real, TANH, square)


def affine_weights(
    norm: FiniteNormalization | DynamicTanh, width: Any, normal: Kernel, gradient: Gradient
) -> Values:
    """Squared gradient norms of a norm's gain and bias.

    dgain_k = sum_i g_ik n_ik and dbias_k = sum_i g_ik, n of kernel `normal` the input of the gain:
    gradient and signal are independent entry by entry, up to order 1/width if the gradient is
    orthogonal.
    """
    if not norm.affine:
        return {}
    overlap = (normal * gradient.kernel).total(gradient.seq_len)
    result = {f"{norm.label}.gain": width * overlap}
    if norm.bias:
        result[f"{norm.label}.bias"] = width * gradient.kernel.total(gradient.seq_len)
    return result
