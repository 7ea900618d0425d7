"""Normalisation at finite width: centring, the constant under the root, and the norms' spread.

And Dynamic Tanh, which stands where a normalisation would and is none.

See docs/theory/norms.md, Dividing by a norm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..engine.composition import Leaf, Pullback, Pulled
from ..engine.directions import at_tokens, expected_cosine, expected_pull, of_pairs, relative_spread
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap, normalised, signed_root
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
        laws: the component's laws, of which the refined ones are used.
        label: site name in a trace.
        epsilon: added to the variance under the root.
        centres: whether the mean over features is removed (LayerNorm) or not (RMSNorm).
        gain: root mean square of the gain, which multiplies what is normalised.
        affine: whether the gain is a parameter per feature that receives a gradient.
        bias: whether there is a bias too; it is zero.
        groups: into how many groups of features, each normalised by itself.
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
        """That of a declaration; DyT has none."""
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
                # A group's features need not average to zero where all of them do.
                kernel = kernel - signal.second_moment().scaled((self.groups - 1) / width)
        inner = Signal(kernel, signal.seq_len)
        epsilon = self._epsilon(kernel)
        one, two = self._bind(inner, self._norms(signal), epsilon)
        algebra = inner.algebra
        variance = evaluate(laws["variance"], algebra, one)
        spreads = two
        if self.groups > 1:  # whose norms fluctuate too much to expand
            spreads = two | {name: 0.0 for name in two if name.endswith("norm_spread")}
        off_diagonal = evaluate(laws["covariance"], algebra, spreads)
        if self.groups > 1:
            off_diagonal = off_diagonal * expected_cosine(
                self.freedom(signal.width), two["x_correlation"]
            )
        varies = one["norm_spread"]
        if np.any(varies > _EXPANDED):
            normal = Kernel.joined(variance, off_diagonal, kernel.resolved)
            first, second = kernel.over_tokens(varies)
            far = np.maximum(first, second) > _EXPANDED
            bounded: Array = np.where(far, _possible(normal, inner), off_diagonal)
            off_diagonal = float(bounded) if algebra.scalar else bounded
        normal = Kernel.joined(variance, off_diagonal, kernel.resolved)
        square = self.gain * self.gain
        scaled = normal.scaled(square)
        output = Signal(
            scaled,
            signal.seq_len,
            mean=0.0 * kernel.diagonal,
            width=width,
            fluctuation=normalised(signal, kernel, normal, self.epsilon, square),
            centred=scaled if self.centres else None,
            kurtosis=evaluate(laws["kurtosis"], algebra, {"d_model": width / self.groups}),
            notes=(_unexpandable(varies) if self.groups == 1 else ()) + _undefined(epsilon),
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
    ) -> Pulled:
        """The way back; `normal` is the kernel of what the gain multiplies, and the next two are
        values of the laws' symbols, for a token and for a pair."""
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
        kernel = Kernel.joined(variance, off_diagonal, grad_out.resolved)
        # What is normalised has no scale, so its gradient is orthogonal to it.
        centred = 1.0 if self.centres else gradient.centred_share
        grad_in = Gradient(
            kernel, gradient.seq_len, 0.0, centred, norm_response=1.0, alone=gradient.alone
        )
        return Pulled(grad_in, functools.partial(affine_weights, self, width, normal, gradient))

    def freedom(self, width: Any) -> float:
        """Degrees of freedom of a group's norm."""
        return float(width / self.groups - (1.0 if self.centres else 0.0))

    def _epsilon(self, kernel: Kernel) -> Array:
        """Epsilon, to meet a diagonal. Infinite where neither it nor the token has any size:
        nothing leaves then, and no gradient returns, where both would be 0/0."""
        one, _ = kernel.lift(self.epsilon)
        if np.all(kernel.diagonal + one):
            return one
        result = np.where(kernel.diagonal + one == 0.0, np.inf, one)[()]
        return float(result) if is_number(kernel.diagonal) else result

    def _by_group(self, signal: Signal, grad_out: Kernel, epsilon: Array) -> tuple[Array, Array]:
        """The gradient behind small groups, whose norms fluctuate too much to expand.

        A group's m Gaussian features leave a chi-square norm of n degrees of freedom: n = m, or
        m - 1 about their mean.
        """
        tokens, n = signal.second_moment(), self.freedom(signal.width)
        first, second = tokens.over_tokens(tokens.diagonal + epsilon)
        scale = (first * second) ** 0.5
        variance = grad_out.diagonal * expected_pull(n, 1.0) / (tokens.diagonal + epsilon)
        off_diagonal = grad_out.off_diagonal * expected_pull(n, signal.correlation()) / scale
        if signal.fluctuation is None:
            return variance, off_diagonal
        # what all groups' norms share
        diagonal, common = relative_spread(signal, features=False)
        v, w = tokens.over_tokens(diagonal)
        return variance * (1 + diagonal), off_diagonal * (1 + 0.375 * (v + w) + common / 4)

    def _norms(self, signal: Signal) -> Kernel | None:
        """Covariance of the squared norms that are divided by."""
        if signal.fluctuation is None:
            return None
        norms = signal.fluctuation.norms
        if not self.groups > 1:
            return norms
        # Given the overlaps of earlier layers, features are independent: a group's norm has as
        # many times the fluctuation 2 C o C/width as there are groups.
        squared = signal.kernel * signal.kernel
        return norms.mixed(1.0, squared, 2 * (self.groups - 1) / signal.width)

    def _bind(
        self, inner: Signal, spread: Kernel | None, eps: Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
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
        """How many directions a token's gradient loses: the signal's own, the mean over features.

        A gradient that is orthogonal or centred already loses nothing there. Of several groups'
        directions, that takes away one.
        """
        radial = self.groups - 1.0 + gradient.radial
        return radial, self.groups - gradient.centred_share if self.centres else 0.0


_EXPANDED = 0.05
"""Relative variance of squared norms up to which covariances need no bound: what the expansion
leaves out is of the order of its square."""

_FAR = 0.3
"""Relative variance of squared norms beyond which a note says that it is expanded."""


def _possible(normal: Kernel, inner: Signal) -> Array:
    """Covariances no larger than the variances allow, and of the sign they had."""
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
    varies = float(np.max(spread))
    if varies <= _FAR:
        return ()
    return (
        f"squared norms of the tokens vary by {varies:.2g} (relative variance), and normalisation "
        "is expanded to second order in that",
    )


_NOT_GAUSSIAN = 0.5
"""How far from a Gaussian's 3 a kurtosis is beyond which a note says so."""

NOT_GAUSSIAN = (
    "DyT behind another function of single entries, whose laws take these for Gaussian: behind a "
    "saturated DyT gradients of queries and keys were simulated up to a third larger, behind a "
    "ReLU the variance a quarter larger"
)


@dataclass(frozen=True)
class DynamicTanh(Leaf):
    """gain tanh(alpha x), entry by entry (DyT).

    It keeps the scale of its input up to saturation, so that gradients do not become orthogonal.

    Attributes:
        label: site name in a trace.
        alpha: multiplies the input; its own gradient is not given.
        gain: root mean square of the gain, which multiplies the output.
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
        """A bias comes with the gain."""
        return self.affine

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        inner = Activation(self.laws, "refined", self.label, {"alpha": self.alpha})
        output, back = inner.forward(signal)
        limit = self.laws.law("variance").domain["x_variance"]  # where alpha is 1
        notes: tuple[str, ...] = ()
        if not limit.contains(self.alpha * self.alpha * signal.kernel.mean_diagonal()):
            notes = (f"the variance of alpha x is outside {limit}, where laws are resolved",)
        off = float(np.max(np.abs(np.asarray(signal.kurtosis) - 3.0)))
        if off > _NOT_GAUSSIAN:
            notes += (NOT_GAUSSIAN,)
        normal, square = output.kernel, self.gain * self.gain
        varies = output.fluctuation
        output = output.replace(
            kernel=normal.scaled(square),
            fluctuation=None if varies is None else varies.scaled(square),
            notes=notes,
        )
        return output, functools.partial(self._back, back, signal.width, normal)

    def _back(self, inner: Pullback, width: Any, normal: Kernel, gradient: Gradient) -> Pulled:
        """The way back: the gain, and the entrywise function behind it."""
        pulled = inner(gradient.with_kernel(gradient.kernel.scaled(self.gain * self.gain)))
        weights = functools.partial(affine_weights, self, width, normal, gradient)
        return Pulled(pulled.gradient, weights)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        square = float(self.alpha * self.alpha)
        return entrywise_overlap(self, record, at, walk.real, TANH, square)


def affine_weights(
    norm: FiniteNormalization | DynamicTanh, width: Any, normal: Kernel, gradient: Gradient
) -> Values:
    """Of a norm's gain and bias per feature.

    d gain_k = sum_i g_ik n_ik and d bias_k = sum_i g_ik, n of kernel `normal` what the gain
    multiplies: gradients and signal are independent entry by entry, up to order 1/width where the
    gradient is orthogonal.
    """
    if not norm.affine:
        return {}
    overlap = (normal * gradient.kernel).total(gradient.seq_len)
    result = {f"{norm.label}.gain": width * overlap}
    if norm.bias:
        result[f"{norm.label}.bias"] = width * gradient.kernel.total(gradient.seq_len)
    return result
