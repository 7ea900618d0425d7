"""The states of recorded tensors: known numbers, weights, or entries of a random variable.

A variable has sites (tokens, pairs of tokens, streams, ...) and features. Two integer tensors of a
recorded tensor's shape, its labels, say which site and feature of the variable each of its entries
is. Views, slices, transposes, heads, windows and gathers are run on the labels, so that none of
them needs a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NUMBERS = itertools.count()


@dataclass(eq=False, kw_only=True)
class Variable:
    """Random numbers by site and feature.

    Attributes:
        sites, features: numbers of them.
        gaussian: whether its entries are jointly Gaussian.
        alike: whether all features have one distribution.
        roots: keys of the weights that it depends on.
        number: of variables in the order of their construction.
    """

    sites: int
    features: int
    gaussian: bool = False
    alike: bool = True
    roots: frozenset[object] = frozenset()
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def parents(self) -> tuple[Variable, ...]:
        """The variables that it is a function of."""
        return ()


@dataclass(eq=False, kw_only=True)
class Product(Variable):
    """A matrix product with weights W: sum over k of W[k, feature] x[k].

    Attributes:
        source: the variable x; None: x are the numbers `known`.
        known: (sites, K).
        columns: groups of k along which x is at one site of `source`: (number of k, that site for
            every site of the product).
        key: of the columns of the weights that it uses; those of another key are independent.
        root, variance, mean: the parameter, and the moments of its entries.
        wider: ratio of the true number of k to the one here.
        matrix: (sites,) which of several matrices each site uses; None: there is one.
        route: the variable by which the batch chooses the matrix.
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
    """Entries of a parameter: rows of a table, positions, biases, gains.

    Attributes:
        index: (sites, some features) flat indices in the parameter.
        levels: means of equally large groups of entries, sorted by size; None if the entries are
            taken as Gaussian.
    """

    root: str
    index: Tensor
    variance: float
    mean: float
    levels: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Fixed(Variable):
    """Known numbers (sites, features) that differ between features, such as sinusoids; `moving` as
    of a term."""

    values: Tensor
    moving: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.requires_grad:
            self.moving, self.values = self.values, self.values.detach()


@dataclass
class Term:
    """A summand: a coefficient times a variable at some of its sites.

    Attributes:
        coefficient: a number, (sites, 1) or (sites, features).
        at: (sites,) sites of the variable, -1 for zero; None: every site in order.
        moving: the coefficient as a differentiable function of a parameter that is used as a
            number, if it is one.
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
    """A sum of terms and a shift (sites, 1).

    Attributes:
        through: a larger sum, and those of its features that this one is.
        moving: of the shift, as of a term.
    """

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
    """Sums over the sites of a variable with known numbers, `mixing` (sites, sites of `inner`);
    `moving` as of a term."""

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
    """Concatenated features of several variables: (variable, its first feature)."""

    pieces: list[tuple[Variable, int]]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return tuple(piece for piece, _ in self.pieces)


@dataclass(eq=False, kw_only=True)
class Part(Variable):
    """Some features of a variable; `through`: a larger part of it that contains them."""

    whole: Variable
    chosen: Tensor
    through: Part | None = None

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.whole,)


@dataclass(eq=False, kw_only=True)
class Detached(Variable):
    """A variable through which no gradient flows."""

    inner: Variable

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


@dataclass(eq=False, kw_only=True)
class Curve(Variable):
    """An entrywise function of a Gaussian variable."""

    inner: Variable
    function: Callable[[Tensor], Tensor]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


@dataclass(eq=False, kw_only=True)
class Slope(Variable):
    """The derivative f'(x) y of a curve f(x) along a change y of x, jointly Gaussian with x."""

    curve: Curve
    change: Variable

    @property
    def parents(self) -> tuple[Variable, ...]:
        return self.curve, self.change


@dataclass(eq=False, kw_only=True)
class Times(Variable):
    """The entrywise product of two independent variables at the sites `at` of each."""

    one: Variable
    other: Variable
    at: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.one, self.other)


@dataclass(eq=False, kw_only=True)
class Mix(Variable):
    """A sum of products of sampled weights and an independent variable, as in attention.

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
    """A variable without a law, drawn by running the recorded operations on draws of their inputs.

    `value`: number of its recorded tensor.
    """

    value: int


@dataclass(eq=False, kw_only=True)
class Drift(Variable):
    """The derivative of a sampled variable along changes of the Gaussian variables that it depends
    on (by their number) and of known numbers and parameters (by their recorded value)."""

    sampled: Sampled
    changes: dict[int, Variable]
    numbers: dict[int, Tensor]

    @property
    def parents(self) -> tuple[Variable, ...]:
        return self.sampled, *self.changes.values()


@dataclass(eq=False, kw_only=True)
class Square(Sampled):
    """The square of a variable that is not Gaussian; only its mean has a law."""

    inner: Variable

    @property
    def parents(self) -> tuple[Variable, ...]:
        return (self.inner,)


# --- recorded tensors -----------------------------------------------------------------------------


@dataclass
class Known:
    """A tensor without randomness to leading order: ids, masks, norms, means over features."""

    tensor: Tensor

    def transposed(self) -> Known:
        """The state with its last two axes exchanged."""
        return Known(self.tensor.transpose(-1, -2))


@dataclass
class Weights:
    """A tensor computed from parameters alone.

    Attributes:
        tensor: its entries.
        root: the parameter, or the derived tensor, whose entries these are.
        index: flat indices of the entries in the root, of the shape of the tensor.
        pool: all matrices of which the batch chooses one, if it does.
        route: the variable by which it chooses.
    """

    tensor: Tensor
    root: str
    index: Tensor
    pool: Tensor | None = None
    route: Field | None = None

    def transposed(self) -> Weights:
        tensor, index = (t.transpose(-1, -2) for t in (self.tensor, self.index))
        return Weights(tensor, self.root, index, self.pool, self.route)


@dataclass
class Field:
    """A tensor of entries of a variable: the labels `site` and `feature` have its shape, for a
    complex tensor with a last axis for its real and imaginary part."""

    variable: Variable
    site: Tensor
    feature: Tensor

    def transposed(self) -> Field:
        return Field(self.variable, self.site.transpose(-1, -2), self.feature.transpose(-1, -2))


State = Known | Weights | Field


def number(value: float) -> Tensor:
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
    """A sum of terms; the variable itself for one term times 1."""
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
    """The entrywise product of two independent variables."""

    def constant(v: Variable) -> bool:
        return isinstance(v, Entries) and v.variance <= 1e-3 * v.mean**2

    return Times(
        sites=sites,
        features=features,
        gaussian=(a.gaussian and constant(b)) or (b.gaussian and constant(a)),
        alike=a.alike and b.alike,
        roots=a.roots | b.roots,
        one=a,
        other=b,
        at=at,
    )


def blend(inner: Variable, rows: Tensor, numbers: Tensor) -> Blend:
    """Sums over sites of a variable, `rows` (sites, summands), times `numbers`."""
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
    """Parts of variables, each constructed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bytes], Variable] = {}

    def of(self, whole: Variable, chosen: Tensor) -> Variable:
        """The features `chosen` of a variable, in that order."""
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
    """The Gaussian variable and the function of it that a variable is; None: it is none."""
    if isinstance(variable, Curve):
        return variable.inner, variable.function
    if isinstance(variable, Combination) and variable.terms:
        curve = _curve_of_sum(variable)
        if curve is not None:
            return curve
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
    """Whether a variable is sampled, or a sum, product or part of one that is."""
    if isinstance(variable, Sampled):
        return True
    transparent = Combination | Blend | Times | Part | Joined | Detached
    return isinstance(variable, transparent) and any(map(holds_sampled, variable.parents))


# --- labels ---------------------------------------------------------------------------------------


def joined(labels: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """A joint label for several, and the value of each of these for each value of the joint one."""
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


def transposed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return *shape[:-2], shape[-1], shape[-2]
