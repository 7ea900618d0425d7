"""A block of a user's own, from one law of second moments and one torch function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import DomainError, domain_error, unknown_name
from ..formulas.checks import NONNEGATIVE, check_number
from .block import PLACES, Block
from .weights import MATRICES

Fan = int | str
Shape = tuple[Fan, Fan] | tuple[Fan, Fan, float]

_MADE: dict[str, LawBlock] = {}
_SIZES = ("d_model", "d_ff", "d_head", "heads", "seq_len")


@dataclass(frozen=True)
class LawBlock(Block):
    """A block from `block`, with that function's arguments as attributes."""

    kind: ClassVar[str] = "law"
    places: ClassVar[tuple[str, ...]] = PLACES

    name: str
    law: Callable[..., Any]
    twin: Callable[..., Any] | None
    weights: tuple[tuple[str, Fan, Fan, float | None], ...]
    mixes_tokens: bool

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        return self.mixes_tokens

    def shapes(self, model: Any) -> dict[str, tuple[int, int]]:
        return {
            name: (self._size(model, fan_in), self._size(model, fan_out))
            for name, fan_in, fan_out, _ in self.weights
        }

    def variances(self, model: Any) -> dict[str, float]:
        return {name: variance for name, *_, variance in self.weights if variance is not None}

    def _size(self, model: Any, fan: Fan) -> int:
        return int(getattr(model, fan) or 0) if isinstance(fan, str) else fan

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        name: Any = data.get("name")
        if name not in _MADE:
            raise DomainError(
                f"block {name!r} is a user's own, and functions are not stored: run the "
                f"moments.block(..., name={name!r}) that made it before reading the declaration"
            )
        found: Any = _MADE[name]
        return found  # type: ignore[no-any-return]

    def __str__(self) -> str:
        names = ", ".join(name for name, *_ in self.weights)
        return f"{self.name} ({names})" if names else self.name


def block(
    *,
    law: Callable[..., Any],
    twin: Callable[..., Any] | None = None,
    weights: Mapping[str, Shape] | None = None,
    mixes_tokens: bool = True,
    name: str | None = None,
) -> LawBlock:
    """A block of your own, for `Transformer(mixer=...)` instead of attention, or `ffn=...` instead
    of the feed-forward block.

    Its law is one function of second moments; gradients, also of weights, the band, `explain` and
    plots follow from its derivatives. An example, gated averages over earlier tokens:

    >>> import numpy as np
    >>> import moments
    >>> from moments import laws
    >>> def average(length):
    ...     return np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    >>> def law(x, w):
    ...     a = average(x.shape[-1])
    ...     return w.output(laws.activation("sigmoid", w.gate(x)) * (a @ w.value(x) @ a.T))
    >>> def twin(x, w):
    ...     a = x.new_tensor(average(x.shape[-2]))
    ...     return w.output(w.gate(x).sigmoid() * (a @ w.value(x)))
    >>> square = ("d_model", "d_model")
    >>> gated = moments.block(
    ...     law=law, twin=twin, name="gated average",
    ...     weights={"gate": square, "value": square, "output": square},
    ... )
    >>> model = moments.Transformer(2, 64, 4, 16, mixer=gated)
    >>> moments.predict(model).grad_variance.shape
    (3,)

    Args:
        law: a function of an array x and the weights w that returns an array of x's shape.
            x[..., i, j] is E x_i . x'_j per feature, of tokens i and j of two replicas of the
            network, which may be the same; `w.gate(x)` is that behind the matrix "gate". The moment
            of a sum of tensors with independent weights is the sum of moments, that of an
            elementwise product the product, that of a matrix A over tokens A @ x @ A.T.
            `moments.laws` has activations, norms and quantities of single replicas. The block must
            end with a matrix, or another operation that centres its features.
        twin: the same in torch, a function of x (batch, L, d_model) and weights w: `w.gate(x)` is
            the tensor behind the matrix. None: the block cannot be simulated.
        weights: matrices by name, each (fan_in, fan_out, variance of an entry); sizes are numbers
            or fields of the model ("d_model", "d_ff", "d_head", "heads", "seq_len"). Names of
            `moments.Weights` have no variance here: it is declared there, and schemes set it.
        mixes_tokens: whether an output token depends on other tokens. False: the law acts on
            entries, and is also called with x of shape (..., P + 1, P).
        name: its name in tables and stored declarations; None: that of the law.

    Raises:
        DomainError: an argument out of range.
    """
    for what, function in (("law", law), ("twin", twin)):
        if not callable(function) and not (what == "twin" and function is None):
            raise domain_error(what, function, "a function of moments or tensors and of weights")
    name = getattr(law, "__name__", "<lambda>") if name is None else name
    if not isinstance(name, str) or not name or name == "<lambda>":
        raise domain_error("name", name, "a name", 'pass name="..." along with an unnamed law')
    if not isinstance(weights, Mapping | None):
        raise domain_error("weights", weights, "a dictionary from names to shapes, or None")
    rows = tuple(_row(one, shape) for one, shape in (weights or {}).items())
    found = _MADE[name] = LawBlock(name, law, twin, rows, bool(mixes_tokens))
    return found


def _row(name: Any, shape: Any) -> tuple[str, Fan, Fan, float | None]:
    """A matrix as `LawBlock` holds it."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise domain_error("weights", name, "names that Python can call: w.gate(x)")
    needed = 2 if name in MATRICES else 3
    if not isinstance(shape, Sequence) or len(shape) != needed:
        allowed = (
            "(features in, features out): its variance is that of moments.Weights"
            if needed == 2
            else "(features in, features out, variance of an entry)"
        )
        raise domain_error(f"weights[{name!r}]", shape, allowed)
    for fan in shape[:2]:
        if isinstance(fan, str) and fan not in _SIZES:
            raise unknown_name(f"weights[{name!r}]", fan, _SIZES)
        if not isinstance(fan, str) and (type(fan) is bool or not isinstance(fan, int) or fan < 1):
            raise domain_error(f"weights[{name!r}]", fan, "a number of features, or its name")
    variance = None
    if needed == 3:
        variance = check_number(f"variance of weights[{name!r}]", shape[2], NONNEGATIVE)
    return name, shape[0], shape[1], variance
