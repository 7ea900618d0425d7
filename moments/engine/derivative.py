"""Reverse-mode automatic differentiation of functions written in numpy.

`pullback` evaluates a function on traced arrays, which implement numpy's dispatch protocols, and
returns the value with the transposed derivative. Pullbacks consist of traced operations, so that
they nest: a tangent is the derivative of a pullback by its cotangent, a second derivative that of a
first. `primitive` defines an operation with a given pullback.

Traced arrays are immutable. Arrays are real, in double precision unless given in single.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DomainError

Array = Any
Cotangent = Callable[[Array], Array]

_COUNT = itertools.count(1)
_RULES: dict[Any, Callable[..., Any]] = {}
"""Implementations for traced arrays, by numpy function."""


class Traced:
    """An array on a tape.

    Attributes:
        value: the array; in a nested derivative, an array on an outer tape.
        level: of its tape; higher levels are nested in lower ones.
        parents: its arguments, each with the map from the cotangent of this array to theirs.
        order: of creation.
    """

    __slots__ = ("level", "order", "parents", "value")
    __array_priority__ = 1000.0

    def __init__(
        self, value: Array, level: int, parents: Sequence[tuple[Traced, Cotangent]] = ()
    ) -> None:
        self.value, self.level, self.parents = value, level, parents
        self.order = next(_COUNT)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _rule(ufunc, method == "__call__" and not options)(*inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return _rule(function)(*args, **options)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DomainError(
            "a traced array cannot become a plain one: write the law in numpy's functions of whole "
            "arrays, or take plain(x), which its derivative holds constant"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def ndim(self) -> int:
        return np.ndim(self.value)

    @property
    def T(self) -> Array:
        return np.transpose(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Array) -> Array:
        return add(self, other)

    def __sub__(self, other: Array) -> Array:
        return subtract(self, other)

    def __rsub__(self, other: Array) -> Array:
        return subtract(other, self)

    def __mul__(self, other: Array) -> Array:
        return multiply(self, other)

    def __truediv__(self, other: Array) -> Array:
        return divide(self, other)

    def __rtruediv__(self, other: Array) -> Array:
        return divide(other, self)

    def __pow__(self, exponent: Array) -> Array:
        return power(self, exponent)

    def __matmul__(self, other: Array) -> Array:
        return matmul(self, other)

    def __rmatmul__(self, other: Array) -> Array:
        return matmul(other, self)

    def __neg__(self) -> Array:
        return multiply(self, -1.0)

    def __abs__(self) -> Array:
        return np.abs(self)

    def __getitem__(self, index: Any) -> Array:
        return taken(self, index)

    def __lt__(self, other: Array) -> Array:
        return plain(self) < plain(other)

    def __le__(self, other: Array) -> Array:
        return plain(self) <= plain(other)

    def __gt__(self, other: Array) -> Array:
        return plain(self) > plain(other)

    def __ge__(self, other: Array) -> Array:
        return plain(self) >= plain(other)

    def __bool__(self) -> bool:
        return bool(plain(self))

    def sum(self, axis: Any = None, keepdims: bool = False) -> Array:
        return total(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Array:
        return np.mean(self, axis, keepdims=keepdims)

    def swapaxes(self, first: int, second: int) -> Array:
        return np.swapaxes(self, first, second)

    def reshape(self, *shape: Any) -> Array:
        return np.reshape(self, shape[0] if len(shape) == 1 else shape)

    __radd__, __rmul__ = __add__, __mul__


def _rule(function: Any, covered: bool = True) -> Callable[..., Any]:
    """The implementation of a numpy function for traced arrays.

    Raises:
        DomainError: there is none.
    """
    if function not in _RULES and isinstance(function, np.ufunc):
        _with_scipy()
    if covered and function in _RULES:
        return _RULES[function]
    known = sorted({one.__name__ for one in _RULES})
    raise DomainError(
        f"numpy's {function.__name__} with these options has no derivative on the tape; it has "
        f"those of {', '.join(known)}, and any other by derivative.primitive"
    )


def plain(x: Array) -> Array:
    """The untraced value, which derivatives treat as constant."""
    while type(x) is Traced:
        x = x.value
    return x


def primitive(
    function: Callable[..., Array], *pullbacks: Callable[..., Cotangent] | None
) -> Callable[..., Array]:
    """Define an operation for traced arrays.

    Args:
        function: of arrays.
        pullbacks: for each differentiable argument, a function of the result and the arguments that
            returns the map from the cotangent of the result to that of the argument, in traceable
            operations. None: no derivative.

    >>> square = primitive(lambda x: x * x, lambda result, x: lambda g: 2 * x * g)
    >>> float(gradient(square)(3.0))
    6.0
    """

    @functools.wraps(function)
    def traceable(*arguments: Any, **options: Any) -> Array:
        level = 0
        for one in arguments:
            if type(one) is Traced and one.level > level:
                level = one.level
        if not level:
            return function(*arguments, **options)
        here = [type(one) is Traced and one.level == level for one in arguments]
        inner = [one.value if on else one for one, on in zip(arguments, here, strict=True)]
        result = traceable(*inner, **options)
        parents = [
            (one, rule(result, *inner, **options))
            for one, on, rule in zip(arguments, here, pullbacks, strict=False)
            if on and rule is not None
        ]
        if any(here[len(pullbacks) :]):
            raise TypeError(f"no derivative in argument {len(pullbacks) + 1} of {function}")
        return Traced(result, level, parents)

    return traceable


def pullback(function: Callable[..., Array], *arguments: Array) -> tuple[Array, Any]:
    """Evaluate a function of arrays, which returns an array or a tuple of arrays.

    Returns:
        The value, and the map from its cotangent(s) to the tuple of the arguments' cotangents.
    """
    level = next(_COUNT)
    starts = [Traced(_number(one), level) for one in arguments]
    ends = function(*starts)
    several = isinstance(ends, tuple)
    ends = ends if several else (ends,)
    values = tuple(one.value if _at(one, level) else one for one in ends)

    def pull(cotangent: Any) -> tuple[Array, ...]:
        cotangents = cotangent if several else (cotangent,)
        sums: dict[int, Array] = {}
        nodes: dict[int, Traced] = {}
        for end, one in zip(ends, cotangents, strict=True):
            if _at(end, level):
                known = sums.get(end.order)
                sums[end.order] = one if known is None else known + one
                nodes[end.order] = end
        for node in _backwards(list(nodes.values())):
            grad_out = sums[node.order]
            for parent, rule in node.parents:
                grad_in, known = rule(grad_out), sums.get(parent.order)
                sums[parent.order] = grad_in if known is None else known + grad_in
        return tuple(sums.get(one.order, np.zeros(np.shape(plain(one)))) for one in starts)

    return (values if several else values[0]), pull


def gradient(function: Callable[..., Array]) -> Callable[..., Array]:
    """The derivative of a scalar function of an array, or of a function that acts entrywise."""

    def slope(argument: Array) -> Array:
        value, pull = pullback(function, argument)
        return pull(np.ones(np.shape(plain(value))))[0]

    return slope


def tangent(
    function: Callable[..., Array], arguments: Sequence[Array], directions: Sequence[Array]
) -> tuple[Array, Array]:
    """A function's value and its derivative along directions: the derivative of its pullback,
    which is linear, by the cotangent."""
    value, pull = pullback(function, *arguments)
    several = isinstance(value, tuple)
    zeros = [np.zeros(np.shape(one)) for one in (value if several else (value,))]
    _, push = pullback(lambda *given: pull(given if several else given[0]), *zeros)
    result = push(tuple(directions))
    return value, result if several else result[0]


def _number(value: Array) -> Array:
    if type(value) is Traced or getattr(value, "dtype", None) == np.float32:
        return value
    return np.asarray(value, dtype=float)


def _at(value: Any, level: int) -> bool:
    return type(value) is Traced and value.level == level


def _backwards(ends: list[Traced]) -> list[Traced]:
    """`ends` and all their ancestors, the last created first."""
    visited, pending = {one.order: one for one in ends}, list(ends)
    while pending:
        for parent, _ in pending.pop().parents:
            if parent.order not in visited:
                visited[parent.order] = parent
                pending.append(parent)
    return [visited[order] for order in sorted(visited, reverse=True)]


# --- operations -----------------------------------------------------------------------------------


def _fitted(cotangent: Array, like: Array) -> Array:
    """Sum a cotangent over the axes along which its argument `like` was broadcast."""
    shape, full = np.shape(plain(like)), np.shape(plain(cotangent))
    if shape == full:
        return cotangent
    lead = len(full) - len(shape)
    axes = tuple(range(lead))
    axes += tuple(lead + k for k, n in enumerate(shape) if n == 1 and full[lead + k] != 1)
    if axes:
        cotangent = np.reshape(np.sum(cotangent, axes), shape)
    same = np.shape(plain(cotangent)) == shape
    return cotangent if same else np.broadcast_to(cotangent, shape)


def _elementwise(function: Any, *slopes: Any) -> Callable[..., Array]:
    """Define an entrywise operation; `slopes` are functions of the result and the arguments."""

    def rule(index: int, slope: Any) -> Any:
        def pull(result: Array, *arguments: Array) -> Cotangent:
            return lambda g: _fitted(g * slope(result, *arguments), arguments[index])

        return pull

    operation = primitive(function, *(rule(k, slope) for k, slope in enumerate(slopes)))
    _RULES[function] = operation
    return operation


add = primitive(
    np.add, lambda r, a, b: lambda g: _fitted(g, a), lambda r, a, b: lambda g: _fitted(g, b)
)
subtract = primitive(
    np.subtract, lambda r, a, b: lambda g: _fitted(g, a), lambda r, a, b: lambda g: _fitted(-g, b)
)
_RULES[np.add], _RULES[np.subtract] = add, subtract
multiply = _elementwise(np.multiply, lambda r, a, b: b, lambda r, a, b: a)
divide = _elementwise(np.divide, lambda r, a, b: 1.0 / b, lambda r, a, b: -r / b)
power = _elementwise(np.power, lambda r, a, n: n * a ** (n - 1.0), lambda r, a, n: r * np.log(a))
_elementwise(np.negative, lambda r, x: -1.0)
_elementwise(np.square, lambda r, x: 2.0 * x)
_elementwise(np.sqrt, lambda r, x: 0.5 / r)
_elementwise(np.exp, lambda r, x: r)
_elementwise(np.expm1, lambda r, x: r + 1.0)
_elementwise(np.log, lambda r, x: 1.0 / x)
_elementwise(np.log1p, lambda r, x: 1.0 / (1.0 + x))
_elementwise(np.sin, lambda r, x: np.cos(x))
_elementwise(np.cos, lambda r, x: -np.sin(x))
_elementwise(np.arcsin, lambda r, x: 1.0 / np.sqrt((1.0 - x) * (1.0 + x)))
_elementwise(np.arccos, lambda r, x: -1.0 / np.sqrt((1.0 - x) * (1.0 + x)))
_elementwise(np.arctan, lambda r, x: 1.0 / (1.0 + x * x))
_elementwise(np.tanh, lambda r, x: 1.0 - r * r)
_elementwise(np.abs, lambda r, x: np.sign(plain(x)))
_elementwise(
    np.maximum,
    lambda r, a, b: plain(a) >= plain(b),
    lambda r, a, b: plain(a) < plain(b),
)
_elementwise(
    np.minimum,
    lambda r, a, b: plain(a) <= plain(b),
    lambda r, a, b: plain(a) > plain(b),
)
_elementwise(
    np.where,
    lambda r, c, a, b: 0.0,
    lambda r, c, a, b: plain(c),
    lambda r, c, a, b: np.logical_not(plain(c)),
)


def _transposed(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


_matrices = primitive(
    np.matmul,
    lambda r, a, b: lambda g: _fitted(g @ _transposed(b), a),
    lambda r, a, b: lambda g: _fitted(_transposed(a) @ g, b),
)


def matmul(a: Array, b: Array) -> Array:
    if np.ndim(a) == 1:
        return matmul(a[None, :], b)[..., 0, :]
    return _matrices(a, b[:, None])[..., 0] if np.ndim(b) == 1 else _matrices(a, b)


def _spread(g: Array, x: Array, axis: Any, keepdims: bool) -> Array:
    shape = np.shape(plain(x))
    if axis is not None and not keepdims:
        axes = {a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,))}
        g = np.reshape(g, tuple(1 if k in axes else n for k, n in enumerate(shape)))
    return np.broadcast_to(g, shape)


total = primitive(
    lambda x, axis=None, keepdims=False: np.sum(x, axis=axis, keepdims=keepdims),
    lambda r, x, axis=None, keepdims=False: lambda g: _spread(g, x, axis, keepdims),
)


def _scattered(g: Array, shape: tuple[int, ...], index: Any) -> Array:
    result = np.zeros(shape, np.result_type(g))
    np.add.at(result, index, g)
    return result


_placed: Callable[..., Array] = primitive(_scattered, lambda r, g, shape, index: lambda h: h[index])
taken = primitive(
    lambda x, index: x[index],
    lambda r, x, index: lambda g: _placed(g, np.shape(plain(x)), index),
)


def _linear(function: Any, transpose: Callable[..., Array]) -> None:
    """Define a function that moves entries, by its transpose: of a cotangent and the arguments."""

    def rule(result: Array, x: Array, *arguments: Any, **options: Any) -> Cotangent:
        return lambda g: transpose(g, x, *arguments, **options)

    _RULES[function] = primitive(function, rule)


_linear(np.reshape, lambda g, x, shape, **_: np.reshape(g, np.shape(plain(x))))
_linear(np.swapaxes, lambda g, x, a, b: np.swapaxes(g, a, b))
_linear(np.moveaxis, lambda g, x, a, b: np.moveaxis(g, b, a))
_linear(np.broadcast_to, lambda g, x, shape: _fitted(g, x))
_linear(np.expand_dims, lambda g, x, axis: np.reshape(g, np.shape(plain(x))))
_linear(
    np.transpose,
    lambda g, x, axes=None: np.transpose(g, None if axes is None else np.argsort(axes)),
)
_linear(np.flip, lambda g, x, axis=None: np.flip(g, axis))
_linear(np.cumsum, lambda g, x, axis=None: np.flip(np.cumsum(np.flip(g, axis), axis=axis), axis))
_einsum = primitive(
    lambda subscripts, *operands, **_: np.einsum(subscripts, *operands, optimize=True),
    None,
    *(
        lambda r, subscripts, *operands, k=k, **_: (
            lambda g: _einsum_back(g, subscripts, operands, k)
        )
        for k in range(6)
    ),
)


def _einsum_back(g: Array, subscripts: str, operands: tuple[Array, ...], index: int) -> Array:
    inputs, _, output = subscripts.replace(" ", "").partition("->")
    parts, others = inputs.split(","), list(operands)
    own, like = parts.pop(index), plain(others.pop(index))
    summed = "".join(k for k in own if k not in output + "".join(parts))
    ones = np.ones([np.shape(like)[own.index(k)] for k in summed])  # sums over this operand alone
    return _einsum(f"{','.join([output, summed, *parts])}->{own}", g, ones, *others)


def _joined(parts: Sequence[Array], axis: int = 0) -> Array:
    return _concatenated(axis, *parts)


def _cut(result: Array, axis: int, *parts: Array, part: int) -> Cotangent:
    sizes = [np.shape(plain(one))[axis] for one in parts]
    start = sum(sizes[:part])
    index = [slice(None)] * np.ndim(plain(result))
    index[axis] = slice(start, start + sizes[part])
    return lambda g: g[tuple(index)]


_concatenated = primitive(
    lambda axis, *parts: np.concatenate(parts, axis),
    None,
    *(functools.partial(_cut, part=k) for k in range(32)),
)
_RULES |= {
    np.sum: total,
    np.matmul: matmul,
    np.concatenate: _joined,
    np.einsum: _einsum,
    np.stack: lambda parts, axis=0: _joined([np.expand_dims(one, axis) for one in parts], axis),
    np.mean: lambda x, axis=None, keepdims=False: total(x, axis, keepdims) / _count(x.shape, axis),
    np.diagonal: lambda x, offset=0, axis1=0, axis2=1: _diagonal(x, offset, axis1, axis2),
    np.clip: lambda x, low=None, high=None: np.minimum(np.maximum(x, low), high),
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: np.size(plain(x)),
    np.zeros_like: lambda x, **_: np.zeros(x.shape),
    np.ones_like: lambda x, **_: np.ones(x.shape),
}


def _count(shape: tuple[int, ...], axis: Any) -> int:
    """Number of entries along axes; None: along all."""
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return math.prod(shape[k] for k in axes)


def _diagonal(x: Array, offset: int, axis1: int, axis2: int) -> Array:
    x = np.moveaxis(x, (axis1, axis2), (0, 1))
    where = np.arange(min(x.shape[:2]))
    return np.moveaxis(x[where, where], 0, -1)


@functools.cache
def _with_scipy() -> None:
    """Define the scipy functions that occur in laws of activations."""
    from scipy import special

    density = 1 / np.sqrt(2 * np.pi)
    _elementwise(special.ndtr, lambda r, x: density * np.exp(-0.5 * x * x))
    _elementwise(special.erf, lambda r, x: 2 / np.sqrt(np.pi) * np.exp(-x * x))
    _elementwise(special.expit, lambda r, x: r * (1.0 - r))
