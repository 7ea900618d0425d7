"""Functions in which users write laws of second moments of their blocks: `moments.laws`.

Two replicas of a network have the same architecture and Gaussian weights, of variance s in each and
covariance s + c across. A block's law maps the array X of E x_i . x'_j per feature, x and x' of one
replica each, to that of its output. At c = 0 both are the same network and the law is that of the
signal. Its derivative in X at fixed moments of each replica gives the gradient's second moments
(Price's theorem), its derivative in c the squared gradients of the weights.

If a block mixes tokens, X is (..., L, L). If not, it may also be (..., P + 1, P): pairs of
different tokens of P classes, and in the last row the diagonal. See docs/theory/gradients.md, Two
replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..errors import DomainError, unknown_name
from ..formulas.activation import activation_laws
from ..formulas.algebra import NUMPY
from ..formulas.gated import gated
from ..formulas.law import Law
from .derivative import Traced, plain, primitive
from .response import STEP
from .state import Array, Kernel, ratio_or_zero

__all__ = ["activation", "normalized", "plain", "primitive", "selves", "variances"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Conversion of a kernel to the array that a law maps, and back.

    Attributes:
        resolved: as `Kernel.resolved`.
        sequences: number B of sequences in a kernel by token, with the array (..., B, B, L, L).
    """

    resolved: Any
    sequences: int = 1

    @classmethod
    def of(cls, kernel: Kernel, seq_len: int) -> Layout:
        if kernel.resolved is not True:
            return cls(kernel.resolved)
        return cls(True, max(np.shape(kernel.off_diagonal)[-1] // seq_len, 1))

    def array(self, kernel: Kernel) -> Array:
        if self.resolved is True:
            return self.cut(np.asarray(kernel.off_diagonal, float))
        diagonal = np.asarray(kernel.diagonal, float)
        off_diagonal = np.asarray(kernel.off_diagonal, float)
        if not self.resolved:
            diagonal, off_diagonal = np.broadcast_arrays(diagonal, off_diagonal)
            diagonal, off_diagonal = diagonal[..., None], off_diagonal[..., None, None]
        return np.concatenate([off_diagonal, diagonal[..., None, :]], -2)

    def kernel(self, array: Array) -> Kernel:
        if self.resolved is True:
            return Kernel.of_matrix(self.joined(array))
        diagonal, off_diagonal = array[..., -1, :], array[..., :-1, :]
        if self.resolved:
            return Kernel(diagonal, off_diagonal, self.resolved)
        one, two = diagonal[..., 0], off_diagonal[..., 0, 0]
        return Kernel(one, two) if np.ndim(one) else Kernel(float(one), float(two))

    def cut(self, matrix: Array) -> Array:
        """(..., B, B, L, L) from (..., B L, B L)."""
        if self.sequences == 1:
            return matrix
        *lead, size, _ = matrix.shape
        count = self.sequences
        return np.swapaxes(matrix.reshape(*lead, count, size // count, count, -1), -3, -2)

    def joined(self, array: Array) -> Array:
        """(..., B L, B L) from (..., B, B, L, L)."""
        if self.sequences == 1:
            return array
        *lead, count, _, length, _ = array.shape
        return np.swapaxes(array, -3, -2).reshape(*lead, count * length, count * length)

    def selves(self, array: Array) -> tuple[Array, Array]:
        """(..., L, L) moments of each replica by itself."""
        if self.sequences == 1:
            return array, array
        diagonal = np.moveaxis(np.diagonal(array, axis1=-4, axis2=-3), -1, -3)
        return diagonal[..., :, None, :, :], diagonal[..., None, :, :, :]

    def variances(self, array: Array) -> tuple[Array, Array]:
        """Second moments of the first and of the second token of every entry."""
        if self.resolved is True:
            first, second = (np.diagonal(s, axis1=-2, axis2=-1) for s in self.selves(array))
            return first[..., :, None], second[..., None, :]
        diagonal = array[..., -1:, :]
        square = *diagonal.shape[:-2], *diagonal.shape[-1:] * 2
        first = np.broadcast_to(np.swapaxes(diagonal, -1, -2), square)
        return np.concatenate([first, diagonal], -2), diagonal

    def diagonal(self, shape: tuple[int, ...]) -> Array:
        """Which entries are of a token with itself."""
        result = np.zeros(shape, bool)
        if self.resolved is not True:
            result[..., -1, :] = True
            return result
        one = np.eye(shape[-1], dtype=bool)
        if self.sequences == 1:
            return result | one
        return result | (np.eye(self.sequences, dtype=bool)[:, :, None, None] & one)


class _At(NamedTuple):
    """Context of a law's evaluation; tapes of a level >= `level` trace moments across replicas."""

    layout: Layout
    level: float


_AT: ContextVar[_At | None] = ContextVar("law", default=None)


@contextmanager
def evaluating(layout: Layout, level: float) -> Iterator[None]:
    """Provide a law's functions with the layout of its arrays and the level of its tape."""
    token = _AT.set(_At(layout, level))
    try:
        yield
    finally:
        _AT.reset(token)


def _here() -> _At:
    at = _AT.get()
    if at is None:
        raise DomainError("functions of moments.laws work inside a block's law alone")
    return at


def _untraced(x: Array, level: float) -> Array:
    while type(x) is Traced and x.level >= level:
        x = x.value
    return x


# --- functions of laws ----------------------------------------------------------------------------


def selves(x: Array) -> tuple[Array, Array]:
    """(..., L, L) second moments of the first replica and of the second, each by itself, for a
    tensor whose moments across replicas are `x`; constant in derivatives by `x`.

    Raises:
        DomainError: the block does not mix tokens, so that only `variances` are defined.
    """
    at = _here()
    if at.layout.resolved is not True:
        raise DomainError(
            "selves(x) are moments of all tokens with all: declare the block with mixes_tokens=True"
        )
    return at.layout.selves(_untraced(x, at.level))


def variances(x: Array) -> tuple[Array, Array]:
    """Variances of the first and of the second token of every entry of `x`, which broadcast against
    it; constant in derivatives by `x`."""
    at = _here()
    return at.layout.variances(_untraced(x, at.level))


def normalized(x: Array, epsilon: float = 0.0) -> Array:
    """Moments behind a normalisation of every token, with `epsilon` added to its variance; to
    leading order in 1/width."""
    first, second = variances(x)
    return x / np.sqrt((first + epsilon) * (second + epsilon))


def activation(name: str, x: Array) -> Array:
    """E f(u_i) f(u'_j) for Gaussian entries u with moments `x`.

    Args:
        name: of the activation f, as in `Transformer(activation=...)`.
        x: moments across replicas, behind a matrix.
    """
    first, second = variances(x)
    return _moment(first, second, x, _here().layout.diagonal(np.shape(plain(x))), _pair(name))


class _Pair(NamedTuple):
    """Laws of E f(u) f(u') and E f'(u) f'(u') of an activation f."""

    moment: Law
    slope: Law


@functools.cache
def _pair(name: str) -> _Pair:
    laws = activation_laws(name)
    return _Pair(gated(laws).law("grad_factor_covariance"), laws.law("grad_covariance"))


def of_pairs(law: Law, v: Array, w: Array, x: Array) -> Array:
    """A law's factor on the gradient's covariance, at variances v and w and covariance x."""
    values = {"x_variance": v, "x_other_variance": w, "grad_covariance": np.ones_like(x)}
    values["x_correlation"] = np.clip(ratio_or_zero(x, np.sqrt(v * w)), -1.0, 1.0)
    return np.asarray(law.formula(NUMPY, *law.pick(values)))


def _in_variance(order: int, v: Array, w: Array, x: Array, diagonal: Array, pair: _Pair) -> Array:
    """Derivative of the moment (order 0) or slope (1) by v.

    A diagonal entry is a function f(q, q, q) of one number, whose total derivative is finite even
    where partial ones are not. Without its part by the covariance, half belongs to either variance.
    """
    h, law = STEP, pair[order]
    partial = (of_pairs(law, v * (1 + h), w, x) - of_pairs(law, v * (1 - h), w, x)) / (2 * h)
    whole = (of_pairs(law, *(v * (1 + h),) * 3) - of_pairs(law, *(v * (1 - h),) * 3)) / (2 * h)
    if order == 0:
        whole = whole - v * of_pairs(pair.slope, v, v, v)
    return ratio_or_zero(np.where(diagonal, whole / 2, partial), v + 0.0 * x)


def _in_covariance(v: Array, w: Array, x: Array, diagonal: Array, pair: _Pair) -> Array:
    """Derivative of the slope by x."""
    step = STEP * np.sqrt(v * w)
    result = of_pairs(pair.slope, v, w, x + step) - of_pairs(pair.slope, v, w, x - step)
    return np.where(diagonal, 0.0, ratio_or_zero(result, 2 * step + 0.0 * x))


def _times(slope: Callable[..., Array], argument: int) -> Callable[..., Any]:
    """Pullback of a law with this slope in one argument, summed over broadcast axes."""

    def rule(_: Array, *arguments: Any) -> Any:
        shape = np.shape(plain(arguments[argument]))

        def pull(g: Array) -> Array:
            grad_in = g * slope(*arguments)
            axes = tuple(
                k for k, n in enumerate(shape, -len(shape)) if n < np.shape(plain(grad_in))[k]
            )
            lead = tuple(range(np.ndim(grad_in) - len(shape)))
            total = np.sum(np.sum(grad_in, axis=axes, keepdims=True), axis=lead)
            return np.reshape(total, shape)

        return pull

    return rule


_slope = primitive(
    lambda v, w, x, diagonal, pair: of_pairs(pair.slope, v, w, x),
    _times(lambda v, w, x, *more: _in_variance(1, *map(plain, (v, w, x)), *more), 0),
    _times(lambda v, w, x, *more: _in_variance(1, *map(plain, (w, v, x)), *more), 1),
    _times(lambda v, w, x, *more: _in_covariance(*map(plain, (v, w, x)), *more), 2),
)
_moment = primitive(
    lambda v, w, x, diagonal, pair: of_pairs(pair.moment, v, w, x),
    _times(lambda v, w, x, *more: _in_variance(0, *map(plain, (v, w, x)), *more), 0),
    _times(lambda v, w, x, *more: _in_variance(0, *map(plain, (w, v, x)), *more), 1),
    _times(_slope, 2),
)


# --- the weights of a block -----------------------------------------------------------------------


class LawMatrix(NamedTuple):
    """A weight matrix of a block.

    Attributes:
        name: in the table of weight gradients.
        fan_in, fan_out: number of input and output features.
        variance: of its entries.
        bias: variance of its bias; None: no bias.
    """

    name: str
    fan_in: int
    fan_out: int
    variance: float
    bias: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the matrix and of its bias."""
        return (self.name,) if self.bias is None else (self.name, f"{self.name}.bias")


class Applied:
    """A block's weights in its law: `w.gate(x)` are the moments behind the matrix "gate".

    Public attributes are the names of matrices, hence all else is private.
    """

    def __init__(
        self,
        block: str,
        matrices: tuple[LawMatrix, ...],
        extra: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """`extra`: by name, c of each weight; that of a bias of "gate" is called "gate.bias"."""
        self._block, self._extra = block, extra
        self._matrices = {one.name: one for one in matrices}
        self._passed: dict[str, tuple[Array, Array]] = {}

    def __getitem__(self, name: str) -> Callable[[Array], Array]:
        if name not in self._matrices:
            raise unknown_name(f"weight of block {self._block!r}", name, self._matrices)
        return functools.partial(self._applied, self._matrices[name])

    def __getattr__(self, name: str) -> Callable[[Array], Array]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def _applied(self, matrix: LawMatrix, x: Array) -> Array:
        result = self._behind(matrix, x)
        self._passed[matrix.name] = x, result
        return result

    def _behind(self, matrix: LawMatrix, x: Array) -> Array:
        variance = matrix.variance + self._extra.get(matrix.name, 0.0)
        added = self._extra.get(f"{matrix.name}.bias", 0.0)
        return variance * (matrix.fan_in * x) + ((matrix.bias or 0.0) + added)


class Cut(Applied):
    """`Applied` with prescribed moments `extra` behind every matrix, independent of its input."""

    def _behind(self, matrix: LawMatrix, x: Array) -> Array:
        if matrix.name in self._passed:
            raise DomainError(
                f"the first step follows matrices that a law applies once: block {self._block!r} "
                f"applies {matrix.name!r} again"
            )
        return self._extra[matrix.name]


def passed(weights: Applied) -> dict[str, tuple[Array, Array]]:
    """Moments before and behind each matrix, in the order of application."""
    return weights._passed
