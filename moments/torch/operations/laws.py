"""Means and covariances of variables, and gradients as derivatives of the same recursion.

Two replicas of a module share all random numbers except those that are perturbed. The covariance of
two variables across equal replicas is that of the signal; its derivative in the covariance of a
variable is that variable's gradient kernel (Price's theorem), in the covariance of a weight the
squared gradient of that weight. Quantities of one replica (variances, means, norms, choices) are
fixed. See docs/theory/any-module.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .variables import (
    Blend,
    Combination,
    Curve,
    Detached,
    Drift,
    Entries,
    Field,
    Fixed,
    Joined,
    Mix,
    Part,
    Parts,
    Product,
    Sampled,
    Slope,
    Square,
    Term,
    Times,
    Variable,
    combination,
    gathered,
    slope,
    varies,
)

F64 = torch.float64
ORDER = 48
"""Terms of a Hermite series; the rest is added to the last power, so that the series is exact at
correlation 1 even for functions with kinks."""
_GRID = torch.linspace(-9, 9, 2400, dtype=F64)  # an even number, so that kinks at 0 lie between


def _hermite() -> tuple[Tensor, Tensor]:
    """Normalised Hermite polynomials on the grid times the Gaussian weights, and the weights."""
    rows = [torch.ones_like(_GRID), _GRID.clone()]
    for n in range(1, ORDER - 1):
        rows.append((_GRID * rows[n] - n**0.5 * rows[n - 1]) / (n + 1) ** 0.5)
    weight = torch.exp(-(_GRID**2) / 2)
    weight = weight / weight.sum()
    return torch.stack(rows) * weight, weight


_HERMITE, _WEIGHT = _hermite()


@dataclass
class Series:
    """Hermite coefficients of a function of a Gaussian plus a parameter that is not Gaussian.

    Attributes:
        deviation: (sites,) of the Gaussian.
        value, slope: (ORDER, sites, levels) of the function and its derivative.
        rest, slope_rest: (sites, levels) sums of squares of higher coefficients.
        added: the parameter, if any, and its factor; levels are those of its entries.
    """

    deviation: Tensor
    value: Tensor
    slope: Tensor
    rest: Tensor
    slope_rest: Tensor
    added: tuple[Entries, float] | None = None

    @property
    def mean(self) -> Tensor:
        """(sites,)."""
        return self.value[0].mean(1)


class _Pair(torch.autograd.Function):
    """E f(X) g(Y) - E f E g from the covariance of X and Y; its derivative is E f'(X) g'(Y)."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, f: Series, g: Series) -> Tensor:
        norm = (f.deviation[:, None] * g.deviation[None]).clamp_min(1e-30)
        one, other = f.added, g.added
        joint = one is not None and other is not None and one[0].root == other[0].root
        if one is not None and other is not None and joint:
            covariance = covariance - one[1] * other[1] * one[0].variance
        rho = (covariance / norm).clamp(-1, 1)
        ctx.save_for_backward(rho)
        ctx.what = f, g, joint
        total = _over_levels(f.rest.sqrt(), g.rest.sqrt(), joint) * rho**ORDER
        power = torch.ones_like(rho)
        for n in range(ORDER):
            total = total + _over_levels(f.value[n], g.value[n], joint) * power
            power = power * rho
        return total - f.mean[:, None] * g.mean[None]

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor, None, None]:
        (rho,), (f, g, joint) = ctx.saved_tensors, ctx.what
        slope = _over_levels(f.slope_rest.sqrt(), g.slope_rest.sqrt(), joint) * rho**ORDER
        power = torch.ones_like(rho)
        for n in range(ORDER):
            slope = slope + _over_levels(f.slope[n], g.slope[n], joint) * power
            power = power * rho
        return received[0] * slope, None, None


def _over_levels(a: Tensor, b: Tensor, joint: bool) -> Tensor:
    """(sites, sites) mean over levels of the product of two tables (sites, levels); `joint`: of one
    parameter, else of two independent ones."""
    if joint:
        return a @ b.T / a.shape[1]
    return a.mean(1)[:, None] * b.mean(1)[None]


class Replicas:
    """Covariances between two replicas.

    Attributes:
        crossed: whether derivatives are needed; else both replicas are one network.
        given: choices that are equal in both.
        known: covariances by the numbers of two variables.
        weights: root -> covariance of its entries, a differentiable leaf.
        outer, within: replicas with one choice less and more in `given`.
    """

    def __init__(self, crossed: bool = False, given: frozenset[int] = frozenset()) -> None:
        self.crossed, self.given = crossed, given
        self.known: dict[tuple[int, int], Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.outer: Replicas | None = None
        self.within: dict[int, Replicas] = {}

    def inside(self, route: int) -> Replicas:
        """The replicas in which a choice is equal, too."""
        if route not in self.within:
            new = self.within[route] = Replicas(self.crossed, self.given | {route})
            new.weights, new.outer = self.weights, self
        return self.within[route]

    def weight(self, root: str, variance: float) -> Tensor:
        """Covariance of a weight's entries across the replicas."""
        if not self.crossed:
            return torch.tensor(variance, dtype=F64)
        if root not in self.weights:
            self.weights[root] = torch.tensor(variance, dtype=F64, requires_grad=True)
        return self.weights[root]

    def collect(self) -> None:
        """Add the gradients of covariances within choices to those outside."""
        for inner in self.within.values():
            inner.collect()
            for key, covariance in inner.known.items():
                if covariance.grad is None:
                    continue
                mine = self.known.get(key)
                if mine is None:
                    self.known[key] = covariance
                elif mine is not covariance:
                    mine.grad = covariance.grad + (0.0 if mine.grad is None else mine.grad)


class Drawn(Protocol):
    """Moments of variables without a law (`sampling.Sampler`)."""

    def law(self, variable: Sampled) -> tuple[Tensor, Tensor]: ...
    def covariance(self, variable: Sampled, replicas: Replicas) -> Tensor: ...
    def drift(self, variable: Drift) -> tuple[Tensor, Tensor, Tensor]: ...
    def same_choice(self, route: Variable) -> Tensor: ...
    def shared_source(self, mix: Mix, total: Tensor, replicas: Replicas) -> Tensor: ...


class Laws:
    """Means and covariances of variables; (sites,) and (sites, sites), means over features."""

    def __init__(self, drawn: Drawn, parts: Parts) -> None:
        self.drawn, self.parts = drawn, parts
        self.one = Replicas()
        self.left_out: set[tuple[str, str]] = set()
        self._means: dict[int, Tensor] = {}
        self._series: dict[int, Series] = {}
        self._chosen: dict[int, frozenset[int]] = {}
        self._changes: dict[int, Series] = {}
        self._gains: dict[int, list[tuple[Entries, Variable]]] = {}
        self._slope: dict[tuple[int, int], Slope] = {}

    # --- means ------------------------------------------------------------------------------------

    def mean(self, v: Variable) -> Tensor:
        """(sites,)."""
        if v.number not in self._means:
            self._means[v.number] = self._mean(v)
        return self._means[v.number]

    def _mean(self, v: Variable) -> Tensor:
        nothing = torch.zeros(v.sites, dtype=F64)
        match v:
            case Product(mean=0.0):
                return nothing
            case Product(known=Tensor() as known):
                return v.mean * known.sum(1)
            case Product(source=Variable() as source):
                rows = (n * gathered(self.mean(source), at) for n, at in v.columns)
                return v.mean * v.wider * sum(rows, nothing)
            case Entries():
                return torch.full((v.sites,), v.mean, dtype=F64)
            case Fixed():
                return v.values.mean(1)
            case Combination():
                total = nothing if v.shift is None else nothing + v.shift.mean(-1)
                for term in v.terms:
                    c = _by_site(term.coefficient)
                    total = total + c * gathered(self.mean(term.variable), term.at)
                return total
            case Blend():
                return v.mixing @ self.mean(v.inner)
            case Detached():
                return self.mean(v.inner)
            case Joined():
                shares = (p.features / v.features * self.mean(p) for p, _ in v.pieces)
                return sum(shares, nothing)
            case Part():
                return self.mean(v.whole)
            case Curve():
                return self.series(v).mean
            case Square():
                return self.square(v.inner)
            case Times():
                one, other = (
                    gathered(self.mean(x), at) for x, at in zip(v.parents, v.at, strict=True)
                )
                return one * other
            case Mix():
                weights = self.mean(v.weights)[v.weights_at]
                return (weights * self.mean(v.values)[v.values_at]).sum(-1)
            case Sampled():
                return self.drawn.law(v)[0]
            case Slope():
                return self.changes(v).value[0].mean(1)
            case Drift():
                return self.drawn.drift(v)[0]
        raise TypeError(type(v).__name__)

    def variance(self, v: Variable) -> Tensor:
        """(sites,)."""
        return self.covariance(v, v).diagonal().clamp_min(0)

    def square(self, v: Variable) -> Tensor:
        """(sites,) second moments."""
        return self.variance(v) + self.mean(v) ** 2

    def moment(self, u: Variable, v: Variable, replicas: Replicas | None = None) -> Tensor:
        """E u v, (sites of u, sites of v)."""
        return self.covariance(u, v, replicas) + self.mean(u)[:, None] * self.mean(v)[None]

    def shown(self, s: Field) -> tuple[Tensor, Tensor]:
        """Means and covariance of the sites of a recorded tensor, averaged over its entries."""
        v = s.variable
        if not isinstance(v, Joined):
            return self.mean(v), self.covariance(v, v)
        counts = torch.bincount(s.feature.reshape(-1), minlength=v.features).to(F64)
        mean, moment = torch.zeros(v.sites, dtype=F64), torch.zeros(v.sites, v.sites, dtype=F64)
        for piece, first in v.pieces:
            share = counts[first : first + piece.features].sum() / counts.sum()
            mean, moment = (
                mean + share * self.mean(piece),
                moment + share * self.moment(piece, piece),
            )
        return mean, moment - mean[:, None] * mean[None]

    # --- covariances ------------------------------------------------------------------------------

    def covariance(self, u: Variable, v: Variable, replicas: Replicas | None = None) -> Tensor:
        """(sites of u, sites of v), the mean over features."""
        where = self.one if replicas is None else replicas
        while where.outer is not None and not (self._routes(u) & self._routes(v) & where.given):
            where = where.outer
        if (u.number, v.number) in where.known:
            return where.known[u.number, v.number]
        if (v.number, u.number) in where.known:
            return where.known[v.number, u.number].T
        if u is not v and not u.roots & v.roots:
            return torch.zeros(u.sites, v.sites, dtype=F64)
        made = self._covariance(u, v, where)
        where.known[u.number, v.number] = made
        if where.crossed and made.requires_grad:
            made.retain_grad()
        return made

    def _routes(self, v: Variable) -> frozenset[int]:
        """The choices of a matrix that a variable depends on."""
        if v.number not in self._chosen:
            own = v.route if isinstance(v, Product) else None
            mine = frozenset() if own is None else frozenset({own.number})
            self._chosen[v.number] = mine.union(*map(self._routes, v.parents))
        return self._chosen[v.number]

    def _covariance(self, u: Variable, v: Variable, where: Replicas) -> Tensor:
        if isinstance(u, Detached) or isinstance(v, Detached):
            u, v = (x.inner if isinstance(x, Detached) else x for x in (u, v))
            return self.covariance(u, v)
        match u, v:
            case Combination(through=(a, i)), Combination(through=(b, j)) if torch.equal(i, j):
                return self.covariance(a, b, where) * 1.0  # collects the gradients of all parts
            case Combination(), Combination() if u is v or (u.by_feature and v.by_feature):
                return self._of_combinations(u, v, where)
        # Only the later variable is expanded, so that derivatives in the covariance of an earlier
        # one contain every path from it.
        late, early = (u, v) if u.number > v.number else (v, u)
        if isinstance(late, Combination):
            made = self._taken_apart(late, early, where)
        elif isinstance(late, Blend):
            made = late.mixing @ self.covariance(late.inner, early, where)
        elif isinstance(late, Times) and late is not early and self._one_sided(late, early):
            made = self._of_factor(late, early, where)
        elif isinstance(early, Combination):
            made = self._taken_apart(early, late, where).T
        elif isinstance(early, Blend):
            made = (early.mixing @ self.covariance(early.inner, late, where)).T
        else:
            return self._of_kinds(u, v, where)
        return made if late is u else made.T

    def _of_kinds(self, u: Variable, v: Variable, where: Replicas) -> Tensor:
        nothing = torch.zeros(u.sites, v.sites, dtype=F64)
        match u, v:
            case Joined(), _:
                return self._of_joined(u, v, where)
            case _, Joined():
                return self._of_joined(v, u, where).T
            case Part(), Part():
                if not torch.equal(u.chosen, v.chosen):
                    return nothing
                a, b = u.through, v.through  # collects the gradients of all parts
                if a is not None and b is not None and torch.equal(a.chosen, b.chosen):
                    return self.covariance(a, b, where) * 1.0
                return self.covariance(u.whole, v.whole, where) * 1.0
            case (Part(), Product() | Entries() | Fixed()) | (
                Product() | Entries() | Fixed(),
                Part(),
            ):
                return nothing
            case Product(), Product():
                return self._of_products(u, v, where)
            case Entries(), Entries():
                if u.root != v.root:
                    return nothing
                k = min(u.index.shape[1], v.index.shape[1])
                same = u.index[:, None, :k] == v.index[None, :, :k]
                return where.weight(u.root, u.variance) * same.to(F64).mean(-1)
            case Fixed(), Fixed():
                both = u.values @ v.values.T / u.features
                return both - self.mean(u)[:, None] * self.mean(v)[None]
            case Curve(), Curve() if u.inner.features == v.inner.features:
                inner = self.covariance(u.inner, v.inner, where)
                pair: Tensor = _Pair.apply(inner, self.series(u), self.series(v))
                return pair + self._of_gains(u, v, where) if where.crossed else pair
            case Slope(), Slope() | Curve():
                return self._of_slopes(u, v)
            case Curve(), Slope():
                return self._of_slopes(v, u).T
            case Slope(), Product() | Entries() | Part() | Fixed():
                return self._of_slope(u, v)
            case Product() | Entries() | Part() | Fixed(), Slope():
                return self._of_slope(v, u).T
            case Drift(), Drift() if u is v:
                return self.drawn.drift(u)[2]
            case Drift(), Sampled() if u.sampled is v:
                return self.drawn.drift(u)[1]
            case Sampled(), Drift() if v.sampled is u:
                return self.drawn.drift(v)[1].T
            case Curve(), Product() | Entries() | Part() | Fixed():
                return self._stein(u, v, where)
            case Product() | Entries() | Part() | Fixed(), Curve():
                return self._stein(v, u, where).T
            case Times(), Times():
                return self._of_times(u, v, where)
            case Times(), _:
                return self._of_factor(u, v, where)
            case _, Times():
                return self._of_factor(v, u, where).T
            case Mix(), Mix():
                return self._of_mixes(u, v, where)
            case Sampled(), Sampled() if u is v:
                return self.drawn.covariance(u, where)
        self.left_out.add((type(u).__name__, type(v).__name__))
        return nothing

    def _of_combinations(self, u: Combination, v: Combination, where: Replicas) -> Tensor:
        total = torch.zeros(u.sites, v.sites, dtype=F64)
        for s in u.terms:
            for t in v.terms:
                c = self.covariance(s.variable, t.variable, where)
                c = gathered(gathered(c, s.at).T, t.at).T
                total = total + _gram(s.coefficient, t.coefficient) * c
        return total

    def _taken_apart(self, sum_: Combination, other: Variable, where: Replicas) -> Tensor:
        total = torch.zeros(sum_.sites, other.sites, dtype=F64)
        for term in sum_.terms:
            c = _by_site(term.coefficient)
            c = c if c.ndim == 0 else c[:, None]
            total = total + c * gathered(self.covariance(term.variable, other, where), term.at)
        return total

    def _one_sided(self, product: Times, other: Variable) -> bool:
        """Whether only one factor of a product can depend on another variable."""
        return not product.one.roots & other.roots or not product.other.roots & other.roots

    def _of_factor(self, product: Times, other: Variable, where: Replicas) -> Tensor:
        (a, b), (i, j) = product.parents, product.at
        through_a = gathered(self.mean(b), j)[:, None]
        through_a = through_a * gathered(self.covariance(a, other, where), i)
        through_b = gathered(self.mean(a), i)[:, None]
        return through_a + through_b * gathered(self.covariance(b, other, where), j)

    def _of_joined(self, u: Joined, v: Variable, where: Replicas) -> Tensor:
        total = torch.zeros(u.sites, v.sites, dtype=F64)
        sizes = [p.features for p, _ in u.pieces]
        if isinstance(v, Joined) and sizes == [p.features for p, _ in v.pieces]:
            for (p, _), (q, _) in zip(u.pieces, v.pieces, strict=True):
                total = total + p.features / u.features * self.moment(p, q, where)
            return total - self.mean(u)[:, None] * self.mean(v)[None]
        if v.features == u.features:
            for p, first in u.pieces:
                piece = self.parts.of(v, torch.arange(first, first + p.features))
                total = total + p.features / u.features * self.covariance(p, piece, where)
        return total

    def _stein(self, f: Curve, y: Variable, where: Replicas) -> Tensor:
        return self.series(f).slope[0].mean(1, keepdim=True) * self.covariance(f.inner, y, where)

    def _of_products(self, u: Product, v: Product, where: Replicas) -> Tensor:
        nothing = torch.zeros(u.sites, v.sites, dtype=F64)
        if u.key != v.key:
            return nothing
        weight = where.weight(u.root, u.variance) * u.wider
        if u.known is not None and v.known is not None:
            return weight * (u.known @ v.known.T)
        x, y = u.source, v.source
        if x is None or y is None:
            return nothing
        route = u.route if u.route is not None and u.route is v.route else None
        within = where if route is None else where.inside(route.number)
        moment, total, of_mean = self.moment(x, y, within), nothing, nothing
        mean = u.mean * v.mean * u.wider
        own = self._own_rows(u) @ self._own_rows(v).T / u.features if u.root in x.roots else nothing
        for (n, i), (_, j) in zip(u.columns, v.columns, strict=False):
            total = total + n * gathered(gathered(moment, i).T, j).T
            if mean:
                c = self.covariance(x, y, where)
                of_mean = of_mean + n * gathered(gathered(c, i).T, j).T
        if u.matrix is not None and v.matrix is not None:
            if route is None:
                total = total * (u.matrix[:, None] == v.matrix[None]).to(F64)
            elif route.number not in where.given:
                total = total * self.drawn.same_choice(route)[u.matrix][:, v.matrix]
        return weight * total + mean * of_mean + own

    def _own_rows(self, u: Product) -> Tensor:
        """(sites, rows) means of products of a table's rows with variables that depend on them, if
        the head is the table: width times their covariance."""
        if u.source is None or len(u.columns) != 1:
            return torch.zeros(u.sites, 1, dtype=F64)
        (count, at), rows = u.columns[0], dict[int, Tensor]()
        for entries in _entries_of(u.source, u.root, {}):
            covariance = gathered(self.covariance(u.source, entries), at)
            for site, first in enumerate(entries.index[:, 0].tolist()):
                rows.setdefault(first, count * u.wider * covariance[:, site])
        return torch.stack(list(rows.values()), 1) if rows else torch.zeros(u.sites, 1, dtype=F64)

    def _of_times(self, u: Times, v: Times, where: Replicas) -> Tensor:
        (a, b), (i, j) = u.parents, u.at
        (c, d), (k, m) = v.parents, v.at
        straight = a.roots & c.roots or b.roots & d.roots
        if not straight and (a.roots & d.roots or b.roots & c.roots):
            (c, d), (k, m) = (d, c), (m, k)
        one = gathered(gathered(self.moment(a, c, where), i).T, k).T
        other = gathered(gathered(self.moment(b, d, where), j).T, m).T
        return one * other - self.mean(u)[:, None] * self.mean(v)[None]

    def _of_mixes(self, u: Mix, v: Mix, where: Replicas) -> Tensor:
        weights = self.moment(u.weights, v.weights, where)
        values = self.moment(u.values, v.values, where)
        weights = weights[u.weights_at.reshape(-1)][:, v.weights_at.reshape(-1)]
        values = values[u.values_at.reshape(-1)][:, v.values_at.reshape(-1)]
        shape = u.sites, u.weights_at.shape[1], v.sites, v.weights_at.shape[1]
        total = (weights * values).reshape(shape).sum((1, 3))
        if u is v and where.crossed and total.requires_grad:
            total = self.drawn.shared_source(u, total, where)
        return total - self.mean(u)[:, None] * self.mean(v)[None]

    def series(self, v: Curve) -> Series:
        """The Hermite series of a curve's function at the mean and deviation of every site."""
        if v.number in self._series:
            return self._series[v.number]
        mean, variance, shifts = self.mean(v.inner), self.variance(v.inner), torch.zeros(1)
        added = self.added(v.inner)
        if added is not None:
            entries, times = added
            assert entries.levels is not None
            shifts = times * (entries.levels - entries.mean)
            variance = (variance - times**2 * entries.variance).clamp_min(0)
        deviation = variance.sqrt()
        deviation = torch.where(deviation > 1e-12 * (1 + mean.abs()), deviation, 0.0 * deviation)
        levels = [self._level(v.function, mean + shift, deviation) for shift in shifts.to(F64)]
        value, slope, rest, slope_rest = (torch.stack(t, -1) for t in zip(*levels, strict=True))
        made = Series(deviation, value, slope, rest, slope_rest, added)
        self._series[v.number] = made
        return made

    def _level(
        self, function: Callable[[Tensor], Tensor], mean: Tensor, deviation: Tensor
    ) -> tuple[Tensor, ...]:
        """Coefficients (ORDER, sites) of a function and its derivative, and squares of the rest."""
        with torch.enable_grad():
            z = (mean[:, None] + deviation[:, None] * _GRID[None]).detach().requires_grad_(True)
            y = function(z)
            (slope,) = torch.autograd.grad(y.sum(), z)
        y = y.detach()
        value, derivative = _HERMITE @ y.T, _HERMITE @ slope.T
        rests = (
            ((x**2) @ _WEIGHT - (coefficients**2).sum(0)).clamp_min(0)
            for x, coefficients in ((y, value), (slope, derivative))
        )
        return value, derivative, *rests

    # --- derivatives of curves --------------------------------------------------------------------

    def changes(self, v: Slope) -> Series:
        """Hermite coefficients of E[f'(x) y | x]."""
        if v.number not in self._changes:
            x, y = v.curve.inner, v.change
            base, mean = self.series(v.curve), self.mean(y)
            share = self._share(v) * base.deviation
            levels = [
                _HERMITE @ (slope * (mean[:, None] + share[:, None] * _GRID)).T
                for slope in self._slopes(v.curve)
            ]
            value = torch.stack(levels, -1)
            zero = torch.zeros(x.sites, value.shape[-1], dtype=F64)
            self._changes[v.number] = replace(base, value=value, rest=zero)
        return self._changes[v.number]

    def share(self, y: Variable, x: Variable) -> Tensor:
        """(sites,) cov(x, y) / var x."""
        return self.covariance(y, x).diagonal() / self.variance(x).clamp_min(1e-300)

    def _share(self, v: Slope) -> Tensor:
        return self.share(v.change, v.curve.inner)

    def _apart(self, v: Slope, other: Variable) -> Tensor:
        """(sites, sites of another variable) its covariance with y - E[y | x] of every site."""
        own = self._share(v)[:, None] * self.covariance(v.curve.inner, other)
        return self.covariance(v.change, other) - own

    def _of_slope(self, f: Slope, y: Variable) -> Tensor:
        """The covariance of a slope with a Gaussian: Stein's lemma in x and in y - E[y | x]."""
        made, base = self.changes(f), self.series(f.curve)
        along = made.value[1].mean(1) / base.deviation.clamp_min(1e-300)
        through = along[:, None] * self.covariance(f.curve.inner, y)
        return through + base.slope[0].mean(1, keepdim=True) * self._apart(f, y)

    def _of_slopes(self, u: Slope, v: Slope | Curve) -> Tensor:
        """The covariance of f'(x) y with f'(x') y' or f(x'), with y = E[y | x] + e: Hermite series
        in x and Stein's lemma in e."""
        curve = v.curve if isinstance(v, Slope) else v
        x, z, f, g = u.curve.inner, curve.inner, self.series(u.curve), self.series(curve)
        made = self.changes(u)
        other = self.changes(v) if isinstance(v, Slope) else g
        scale = (f.deviation[:, None] * g.deviation[None]).clamp_min(1e-30)
        between = self.covariance(x, z)
        rho = (between / scale).clamp(-1, 1)
        one = self._apart(u, z)
        of_slopes = _over_levels(f.slope_rest.sqrt(), g.slope_rest.sqrt(), False) * rho**ORDER
        total, straight, crossed, twice = (torch.zeros_like(rho) for _ in range(4))
        power, before, earlier = (torch.ones_like(rho), *(torch.zeros_like(rho) for _ in range(2)))
        for n in range(ORDER):
            a, b = made.value[n].mean(1), f.value[n].mean(1)
            c, d = other.value[n].mean(1), g.value[n].mean(1)
            total = total + a[:, None] * c * power
            of_slopes = of_slopes + _over_levels(f.slope[n], g.slope[n], False) * power
            straight = straight + n * b[:, None] * c * before
            crossed = crossed + n * a[:, None] * d * before
            twice = twice + n * (n - 1) * b[:, None] * d * earlier
            power, before, earlier = power * rho, power, before
        total = total - self.mean(u)[:, None] * self.mean(v)[None]
        if not isinstance(v, Slope):
            return total + of_slopes * one
        two = self._apart(v, x).T
        both = (
            self.covariance(u.change, v.change)
            - self._share(u)[:, None] * self.covariance(x, v.change)
            - self._share(v) * (self.covariance(u.change, z) - self._share(u)[:, None] * between)
        )
        total = total + of_slopes * both + twice * one * two / scale**2
        return total + (straight * one + crossed * two) / scale

    def _of_gains(self, u: Curve, v: Curve, where: Replicas) -> Tensor:
        """Zero, with a correction of derivatives in gains g of f(g x + b): E f'(g x) x f'(g x') x'
        instead of E f'f' E x x', the derivative through the covariance of g x."""
        total = torch.zeros(u.sites, v.sites, dtype=F64)
        for gain, x in self.gained(u.inner):
            for other, y in self.gained(v.inner):
                if gain.root != other.root or not torch.equal(gain.index[0], other.index[0]):
                    continue
                leaf = where.weight(gain.root, gain.variance)
                one, two = self._slope_of(u, x), self._slope_of(v, y)
                inner = self.covariance(u.inner, v.inner).detach().requires_grad_(True)
                made = _Pair.apply(inner, self.series(u), self.series(v))
                (slopes,) = torch.autograd.grad(made.sum(), inner)
                apart = self.moment(one, two) - slopes * self.moment(x, y)
                total = total + (leaf - leaf.detach()) * apart
        return total

    def gained(self, v: Variable) -> list[tuple[Entries, Variable]]:
        """The gains, one for every feature, in a sum, and the variables that they multiply."""
        if v.number not in self._gains:
            terms = v.terms if isinstance(v, Combination) else [Term(v, torch.ones((), dtype=F64))]
            self._gains[v.number] = [
                (gain, combination(v.sites, v.features, [Term(x, term.coefficient, term.at)]))
                for term in terms
                if isinstance(term.variable, Times) and term.variable.at == (None, None)
                for x, gain in (term.variable.parents, term.variable.parents[::-1])
                if isinstance(gain, Entries) and gain.mean and not varies(gain.index, [0])
            ]
        return self._gains[v.number]

    def _slope_of(self, curve: Curve, change: Variable) -> Slope:
        key = curve.number, change.number
        if key not in self._slope:
            self._slope[key] = slope(curve, change)
        return self._slope[key]

    def _slopes(self, v: Curve) -> list[Tensor]:
        """(sites, grid) f' at every level."""
        base, mean = self.series(v), self.mean(v.inner)
        shifts = torch.zeros(1, dtype=F64)
        if base.added is not None and base.added[0].levels is not None:
            shifts = base.added[1] * (base.added[0].levels - base.added[0].mean)
        made = []
        for shift in shifts:
            with torch.enable_grad():
                z = (mean + shift)[:, None] + base.deviation[:, None] * _GRID
                z = z.detach().requires_grad_(True)
                made.append(torch.autograd.grad(v.function(z).sum(), z)[0])
        return made

    def added(self, v: Variable) -> tuple[Entries, float] | None:
        """The parameter in a sum that is far from Gaussian, and its coefficient."""
        for term in v.terms if isinstance(v, Combination) else ():
            one = term.variable
            if isinstance(one, Entries) and one.levels is not None:
                return one, float(term.coefficient)
        return None


def _entries_of(v: Variable, root: str, seen: dict[int, list[Entries]]) -> list[Entries]:
    """Entries of a parameter that a variable depends on."""
    if v.number not in seen:
        seen[v.number] = [v] if isinstance(v, Entries) and v.root == root else []
        for parent in v.parents:
            if root in parent.roots:
                seen[v.number] += _entries_of(parent, root, seen)
    return list({e.number: e for e in seen[v.number]}.values())


def _by_site(coefficient: Tensor) -> Tensor:
    """The mean of a coefficient over features."""
    return coefficient if coefficient.ndim == 0 else coefficient.mean(-1)


def _gram(c: Tensor, d: Tensor) -> Tensor:
    """The mean over features of the product of two coefficients."""
    if c.ndim == 0 and d.ndim == 0:
        return c * d
    c = c.reshape(1, 1) if c.ndim == 0 else c
    d = d.reshape(1, 1) if d.ndim == 0 else d
    n = max(c.shape[1], d.shape[1])
    return c.expand(-1, n) @ d.expand(-1, n).T / n
