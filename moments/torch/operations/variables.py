"""What a recorded tensor is: known, made of weights, or entries of a random variable.

A variable has sites (tokens, pairs of tokens, streams, ...) and features. Every entry of a recorded
tensor is one of its entries, by two integer tensors of the recorded tensor's shape. Views, slices,
transposes, heads, windows and gathers are run on these labels themselves, so that none of them
needs a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor

NUMBERS = itertools.count()


@dataclass(eq=False, kw_only=True)
class Variable:
    """Random numbers by site and feature.

    Attributes:
        sites, features: how many.
        gaussian: whether its entries are jointly Gaussian given nothing else.
        alike: whether all features have one law.
        roots: keys of the weights without which it would be independent of what uses them.
        number: counts variables in the order in which they are made.
    """

    sites: int
    features: int
    gaussian: bool = False
    alike: bool = True
    roots: frozenset[object] = frozenset()
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def parents(self) -> tuple[Variable, ...]:
        """What it is made of."""
        return ()


@dataclass(eq=False, kw_only=True)
class Product(Variable):
    """Fresh weights W times what they read: sum over k of W[k, feature] x[k].

    Attributes:
        source: the variable that is read; None: known numbers.
        known: (sites, K) these.
        columns: for the sites of `source` along the contracted axis, (how many entries, which site
            of it each site reads).
        key: of the columns of the weights that it uses; those of another key are independent.
        root, variance, mean: the parameter, and what its entries have.
        wider: how many times more entries it stands for than are summed here.
        matrix: (sites,) which of several matrices each site uses; None: there is one.
        route: the choice of it that depends on the batch.
    """

    source: Variable | None
    known: Tensor | None
    columns: list[tuple[float, Tensor]]
    key: object
    root: str
    variance: float
    mean: float
    wider: float = 1.0
    matrix: Tensor | None = None
    route: Variable | None = None

    @property
    def parents(self) -> tuple[Variable, ...]:
        return () if self.source is None else (self.source,)


@dataclass(eq=False, kw_only=True)
class Entries(Variable):
    """Entries of a parameter: looked-up rows, positions, biases, gains.

    `index` (sites, some features) says which, `variance` and `mean` what they have; `levels` are
    means of as many of them each, by size, where they are far from Gaussian.
    """

    root: str
    index: Tensor
    variance: float
    mean: float
    levels: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Fixed(Variable):
    """Known numbers (sites, features) that features depend on, such as sinusoids."""

    values: Tensor


@dataclass
class Term:
    """One summand: a coefficient, a number, (sites, 1) or (sites, features), times a variable whose
    sites are gathered; site -1 is zero, None every site in order.

    `moving`: the coefficient with what it depends on, where that is a parameter used as a number.
    """

    variable: Variable
    coefficient: Tensor
    at: Tensor | None = None
    moving: Tensor | None = None

    def __post_init__(self) -> None:
        if self.coefficient.requires_grad:
            self.moving, self.coefficient = self.coefficient, self.coefficient.detach()


@dataclass(eq=False, kw_only=True)
class Combination(Variable):
    """A sum of terms, and a shift (sites, 1), `moving` as of a term; `through` a larger one that
    has these features."""

    terms: list[Term]
    shift: Tensor | None = None
    through: tuple[Combination, Tensor] | None = None
    moving: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shift is not None and self.shift.requires_grad:
            self.moving, self.shift = self.shift, self.shift.detach()

    @property
    def parents(self) -> tuple[Variable, ...]:
        return tuple(term.variable for term in self.terms)

    @property
    def by_feature(self) -> bool:
        """Whether a coefficient depends on the feature."""
        return any(t.coefficient.ndim == 2 and t.coefficient.shape[1] > 1 for t in self.terms)


@dataclass(eq=False, kw_only=True)
class Blend(Variable):
    """Sums over the sites of a variable: known numbers (sites, its sites), `moving` as of a term,
    times it."""

    inner: Variable
    mixing: Tensor
    moving: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mixing.requires_grad:
            self.moving, self.mixing = self.mixing, self.mixing.detach()

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


@dataclass(eq=False, kw_only=True)
class Joined(Variable):
    """Features of several variables one after the other: (variable, its first feature)."""

    pieces: list[tuple[Variable, int]]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return tuple(piece for piece, _ in self.pieces)


@dataclass(eq=False, kw_only=True)
class Part(Variable):
    """Some features of a variable; `through` a larger part of it of which they were taken."""

    whole: Variable
    chosen: Tensor
    through: Part | None = None

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.whole,)


@dataclass(eq=False, kw_only=True)
class Curve(Variable):
    """A function of every entry of a Gaussian variable."""

    inner: Variable
    function: Callable[[Tensor], Tensor]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


@dataclass(eq=False, kw_only=True)
class Slope(Variable):
    """How a curve f(x) changes where x does by y, jointly Gaussian with x: f'(x) y."""

    curve: Curve
    change: Variable

    @property
    def parents(self) -> tuple[Variable, ...]:
        return self.curve, self.change


@dataclass(eq=False, kw_only=True)
class Times(Variable):
    """Two independent variables, entry by entry; `at` gathers the sites of each."""

    one: Variable
    other: Variable
    at: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.one, self.other)


@dataclass(eq=False, kw_only=True)
class Mix(Variable):
    """Sampled weights times an independent variable, summed over `values`' sites.

    `weights_at`, `values_at`: (sites, summands) sites of the two.
    """

    weights: Variable
    values: Variable
    weights_at: Tensor
    values_at: Tensor

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.weights, self.values)


@dataclass(eq=False, kw_only=True)
class Sampled(Variable):
    """Anything else: drawn by running the recorded operations on draws of what they rest on.

    `value` is the number of its recorded tensor.
    """

    value: int


@dataclass(eq=False, kw_only=True)
class Drift(Variable):
    """How a sampled variable changes: with changes of Gaussian variables under it, by their number,
    and of known numbers and parameters on the way, by their recorded value."""

    sampled: Sampled
    changes: dict[int, Variable]
    numbers: dict[int, Tensor]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return self.sampled, *self.changes.values()


@dataclass(eq=False, kw_only=True)
class Square(Sampled):
    """The square of a variable that is not Gaussian; its mean alone has a law."""

    inner: Variable

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


# --- recorded tensors -----------------------------------------------------------------------------


@dataclass
class Known:
    """A tensor that is determined to leading order: ids, masks, norms, means over features."""

    tensor: Tensor


@dataclass
class Weights:
    """A tensor made of parameters alone.

    Attributes:
        tensor: its numbers.
        root: the parameter, or the derived tensor, whose entries these are.
        index: which of its entries, in this tensor's shape.
        pool: all entries that a matrix of these may be of, where the batch chooses.
        route: that choice.
    """

    tensor: Tensor
    root: str
    index: Tensor
    pool: Tensor | None = None
    route: Field | None = None


@dataclass
class Field:
    """Entries of a variable: `site` and `feature` of each, in the recorded tensor's shape; of a
    complex tensor with a last axis of two, its real and imaginary part."""

    variable: Variable
    site: Tensor
    feature: Tensor


State = Known | Weights | Field


def number(value: float) -> Tensor:
    """A coefficient."""
    return torch.tensor(float(value), dtype=torch.float64)


def gathered(x: Tensor, at: Tensor | None) -> Tensor:
    """Rows of x; row -1 is zero."""
    if at is None:
        return x
    rows = x[at.clamp_min(0)]
    if bool((at < 0).any()):
        present = (at >= 0).to(x.dtype)
        rows = rows * (present if x.ndim == 1 else present[:, None])
    return rows


def combination(
    sites: int, features: int, terms: list[Term], shift: Tensor | None = None
) -> Variable:
    """A sum of terms; one term times 1 is that variable."""
    if len(terms) == 1 and shift is None:
        (term,) = terms
        same = term.at is None or (
            term.variable.sites == sites and torch.equal(term.at, torch.arange(sites))
        )
        c = term.coefficient
        once = c.numel() == 1 and float(c) == 1.0 and term.moving is None
        if same and once and term.variable.features == features:
            return term.variable
    return Combination(
        sites=sites,
        features=features,
        terms=terms,
        shift=shift,
        gaussian=all(t.variable.gaussian for t in terms),
        alike=features == 1
        or all(t.variable.alike and t.coefficient.shape[-1:] != (features,) for t in terms),
        roots=frozenset().union(*(t.variable.roots for t in terms)),
    )


def slope(curve: Curve, change: Variable) -> Slope:
    """How a curve changes."""
    return Slope(
        sites=curve.sites,
        features=curve.features,
        alike=curve.alike and change.alike,
        roots=curve.roots | change.roots,
        curve=curve,
        change=change,
    )


def times(
    a: Variable, b: Variable, at: tuple[Tensor | None, Tensor | None], sites: int, features: int
) -> Times:
    """Two independent variables, entry by entry."""

    def steady(v: Variable) -> bool:
        return isinstance(v, Entries) and v.variance <= 1e-3 * v.mean**2

    return Times(
        sites=sites,
        features=features,
        gaussian=(a.gaussian and steady(b)) or (b.gaussian and steady(a)),
        alike=a.alike and b.alike,
        roots=a.roots | b.roots,
        one=a,
        other=b,
        at=at,
    )


def blend(inner: Variable, rows: Tensor, numbers: Tensor) -> Blend:
    """Of every row (sites, summands) the sum of these sites of a variable, times `numbers`."""
    mixing = torch.zeros(len(rows), inner.sites, dtype=torch.float64)
    mixing.scatter_add_(1, rows, numbers.to(torch.float64).expand(rows.shape))
    return Blend(
        sites=len(rows),
        features=inner.features,
        gaussian=inner.gaussian,
        alike=inner.alike,
        roots=inner.roots,
        inner=inner,
        mixing=mixing,
    )


class Parts:
    """Parts of variables, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bytes], Variable] = {}

    def of(self, whole: Variable, chosen: Tensor) -> Variable:
        """Some features of a variable, in an order."""
        if len(chosen) == whole.features and torch.equal(chosen, torch.arange(whole.features)):
            return whole
        key = whole.number, chosen.numpy().tobytes()
        if key not in self._made:
            self._made[key] = self._new(whole, chosen)
        return self._made[key]

    def _new(self, whole: Variable, chosen: Tensor) -> Variable:
        if isinstance(whole, Part):
            known = len(self._made)
            part = self.of(whole.whole, whole.chosen[chosen])
            if len(self._made) > known and isinstance(part, Part):
                part.through = whole
            return part
        if isinstance(whole, Joined):
            low, high = int(chosen.min()), int(chosen.max())
            for piece, first in whole.pieces:
                if first <= low and high < first + piece.features:
                    return self.of(piece, chosen - first)
        if isinstance(whole, Combination):
            sizes = {t.variable.features for t in whole.terms}
            if sizes <= {1, whole.features}:
                terms = [self._cut(term, chosen, whole.features) for term in whole.terms]
                shift = whole.shift if whole.moving is None else whole.moving
                part = combination(whole.sites, len(chosen), terms, shift)
                if isinstance(part, Combination) and not whole.by_feature:
                    part.through = whole, chosen
                return part
        if isinstance(whole, Blend):
            inner = self.of(whole.inner, chosen)
            return replace(whole, inner=inner, features=len(chosen), number=next(NUMBERS))
        return Part(
            sites=whole.sites,
            features=len(chosen),
            whole=whole,
            chosen=chosen,
            gaussian=whole.gaussian,
            alike=whole.alike,
            roots=whole.roots,
        )

    def _cut(self, term: Term, chosen: Tensor, features: int) -> Term:
        variable = term.variable
        coefficient = term.coefficient if term.moving is None else term.moving
        if variable.features == features:
            variable = self.of(variable, chosen)
        if coefficient.ndim == 2 and coefficient.shape[1] == features > 1:
            coefficient = coefficient[:, chosen]
        return Term(variable, coefficient, term.at)


def curve_of(variable: Variable) -> tuple[Variable, Callable[[Tensor], Tensor]] | None:
    """The Gaussian variable, and the function, whose curve a variable is; None: there is none."""
    if isinstance(variable, Curve):
        return variable.inner, variable.function
    if isinstance(variable, Combination) and variable.terms:
        made = _curve_of_sum(variable)
        if made is not None:
            return made
    return (variable, lambda z: z) if variable.gaussian else None


def _curve_of_sum(
    variable: Combination,
) -> tuple[Variable, Callable[[Tensor], Tensor]] | None:
    inner = []
    for term in variable.terms:
        plain = term.at is None and term.coefficient.ndim == 0 and term.moving is None
        own = curve_of(term.variable) if plain else None
        if own is None or term.variable.features != variable.features:
            return None
        inner.append((term.coefficient, *own))
    shift = variable.shift
    if shift is not None and not bool((shift == shift[0, 0]).all()):
        return None
    if variable.moving is not None:
        return None
    if len({base.number for _, base, _ in inner}) > 1:
        return None
    added = 0.0 if shift is None else float(shift[0, 0])

    def function(z: Tensor) -> Tensor:
        total = torch.full_like(z, added)
        for coefficient, _, f in inner:
            total = total + coefficient * f(z)
        return total

    return inner[0][1], function


def holds_sampled(variable: Variable) -> bool:
    """Whether a sum or product of it holds a sampled variable."""
    if isinstance(variable, Sampled):
        return True
    open_kinds = Combination | Blend | Times | Part | Joined
    return isinstance(variable, open_kinds) and any(map(holds_sampled, variable.parents))


# --- labels ---------------------------------------------------------------------------------------


def joined(labels: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """One label in place of several, and for each of its values which of each it stands for."""
    same = all(torch.equal(one, labels[0]) for one in labels[1:])
    if same and len(set(sizes)) == 1:
        values, new = torch.unique(labels[0], return_inverse=True)
        return new, [values] * len(labels)
    code = labels[0].long()
    for label, size in zip(labels[1:], sizes[1:], strict=True):
        code = code * size + label
    rest, new = torch.unique(code, return_inverse=True)
    at = []
    for size in reversed(sizes[1:]):
        at.append(rest % size)
        rest = rest // size
    return new, [rest, *reversed(at)]


def of_rows(label: Tensor, axis: int) -> Tensor:
    """A label for every row along an axis, in the shape without that axis."""
    moved = label.movedim(axis, -1)
    new = torch.unique(moved.reshape(-1, moved.shape[-1]), dim=0, return_inverse=True)[1]
    return new.reshape(moved.shape[:-1])


def varies(label: Tensor, axes: Sequence[int]) -> bool:
    """Whether a label changes along any of some axes."""
    return any(label.shape[a] > 1 and bool((label != label.narrow(a, 0, 1)).any()) for a in axes)


@overload
def flipped(x: Field) -> Field: ...
@overload
def flipped(x: Weights) -> Weights: ...
@overload
def flipped(x: Known) -> Known: ...
@overload
def flipped(x: Field | Known) -> Field | Known: ...


def flipped(x: State) -> State:
    """With its last two axes exchanged."""
    if isinstance(x, Field):
        return Field(x.variable, x.site.transpose(-1, -2), x.feature.transpose(-1, -2))
    if isinstance(x, Weights):
        index = x.index.transpose(-1, -2)
        return Weights(x.tensor.transpose(-1, -2), x.root, index, x.pool, x.route)
    return Known(x.tensor.transpose(-1, -2))


def flipped_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """That of `flipped`."""
    return *shape[:-2], shape[-1], shape[-2]
