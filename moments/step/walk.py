"""The third walk over the engine: after the signal's pass and the gradient's, the step's.

It carries a `Change` through the declaration in the order of the forward pass, meets at every site
the kernels that both passes left there, and adds what the parameters of each component do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import Chain, Component, Layer, Parallel, Residual
from ..errors import DomainError
from ..formulas.law import ComponentLaws
from ..layers.by_law import LawLeaf
from ..layers.elementary import Activation, Dropout, Linear, Scale
from ..layers.gated import GatedLinear
from ..layers.head.components import Pool
from ..layers.normalization import FiniteNormalization
from ..layers.product import Product
from .by_law import Segments
from .change import (
    Array,
    Beyond,
    Change,
    Overlaps,
    between,
    between_trace,
)
from .drawn import Block
from .draws import Draws
from .elementwise import activated, gated
from .neurons import Neurons, gaussian
from .rules import (
    Drawn,
    Effect,
    Optimizer,
    Orthogonal,
    Root,
    Sides,
    Signs,
    Spectrum,
    StepSize,
    effect,
    gain_effect,
    sign_of_columns,
    sign_of_rows,
    vector_effect,
)
from .sites import ENCODER, Reading, Site


class SiteStep(NamedTuple):
    """A site before and after the step.

    Attributes:
        layer, site: where.
        before: tr K, the tensor's square summed over tokens.
        overlap, changed: tr M and tr U of the step.
        coherent, gradient: P, and E delta delta before.
    """

    layer: int
    site: str
    before: float
    overlap: float
    changed: float
    coherent: Array
    gradient: Array


class WeightStep(NamedTuple):
    """A parameter's step.

    Attributes:
        layer, weight: which.
        rate: its learning rate, all factors included.
        slope: its share of minus the loss's derivative in the learning rate.
        square: E of an entry of its step squared, at that rate.
        variance: of an entry before; nan where the parameter starts at a constant.
        width: features of the input.
        aligned: kernel of the step's output over that of its input and the square.
        chosen: of one expert's matrices, `aligned` of the tokens that go to it over that of all.
    """

    layer: int
    weight: str
    rate: float
    slope: float
    square: float
    variance: float
    width: float
    aligned: float
    chosen: float = 1.0


@dataclass
class Walk:
    """One step of one learning rate.

    Attributes:
        optimizer: which.
        rate: its learning rate.
        tied: E h_t delta_s along the stream's identity path.
        reading: every site, in order, and what all rates share.
        along: of the tables' step, what it has of the stream (`ends.Entered`).
        prefix: of the names of parameters in the stream that is walked.
        memory: what an encoder's last tokens do, and where they are.
        sites, weights: what every site and every parameter does, and `end` the logits behind.
        moved: by the index of a site, its updated tensor in terms of the old one, and its kernel.
        overlaps: of the tokens that the current residual branch reads; None: outside of any.
        response: how the kernel follows those overlaps.
    """

    optimizer: Optimizer
    rate: float
    tied: Array
    reading: Reading
    along: Any = 0.0
    prefix: str = ""
    memory: tuple[Change, Site] | None = None
    sites: list[SiteStep] = field(default_factory=list)
    weights: list[WeightStep] = field(default_factory=list)
    moved: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    overlaps: Overlaps | None = None
    response: Any = 0.0
    end: Any = None
    _unit: Activation | None = None

    # --- the walk ------------------------------------------------------------------------------

    def through(
        self, component: Component, change: Change, entering: Site, points: Iterator[Site]
    ) -> tuple[Change, Site]:
        """The change behind a component, and the site it is at."""
        if isinstance(component, Chain):
            for part, behind in itertools.zip_longest(component.children, component.children[1:]):
                self._unit = behind if isinstance(behind, Activation) else None
                change, entering = self.through(part, change, entering, points)
            return change, entering
        if isinstance(component, Layer):
            change, _ = self.through(component.body, change, entering, points)
            return self.noted(change, next(points))
        if isinstance(component, Residual):
            return self._residual(component, change, entering, points)
        if isinstance(component, Parallel):
            return self._parallel(component, change, entering, points)
        inside = isinstance(component, Product)  # whose own sites are passed by
        leaving = next(at for at in points if not inside or at.name.endswith(component.label))
        return self.noted(self.leaf(component, change, entering, leaving), leaving)

    def _residual(
        self, node: Residual, change: Change, entering: Site, points: Iterator[Site]
    ) -> tuple[Change, Site]:
        overlaps = Overlaps.of(entering.kernel, entering.width)
        self.overlaps = overlaps
        first = self.response = np.outer(overlaps.sizes, overlaps.sizes)
        # what a branch's matrices send back is another delta than the stream's
        inner = dataclasses.replace(change, beyond=None)
        branch, _ = self.through(node.branch, inner, entering, points)
        leaving = next(points)
        scales = float(node.skip_scale) ** 2, float(node.branch_scale) ** 2
        received = leaving.gradient
        change = change.parted(entering.gradient, scales[0] * received)
        kept, added = change.times(scales[0]), branch.times(scales[1])
        found = kept.plus(added, received)
        both = scales[0] * scales[1] * overlaps.square(change.scattered, branch.scattered, received)
        # per unit of the sum's own scatter: what of it is the input's, through skip and branch
        size = np.sqrt(np.diag(leaving.kernel))
        here = (scales[0] * first + scales[1] * self.response) / np.outer(size, size)
        self.overlaps = None
        # what the branch adds along delta meets the stream's own words
        overlap = found.overlap - added.coherent @ self.tied.T
        if np.any(self.along):
            # tables of a tied head move along what the branch gives too
            given = leaving.kernel - scales[0] * entering.kernel
            both = both - self.along @ added.overlap.T
            overlap = overlap - self.along @ given
        found = dataclasses.replace(
            found,
            overlap=overlap,
            total=found.total + both + both.T,
            scattered=here * found.scattered,
        )
        return self.noted(found, leaving)

    def _parallel(
        self, node: Parallel, change: Change, entering: Site, points: Iterator[Site]
    ) -> tuple[Change, Site]:
        first = self.response
        found, leaving = self.through(node.branches[0], change, entering, points)
        for branch in node.branches[1:]:
            before, self.response = self.response, first
            other, last = self.through(branch, change, entering, points)
            self.response = before + self.response
            # a sum hands both the gradient that it receives
            total = found.plus(other, leaving.gradient)
            if self.overlaps is not None:
                more = self.overlaps.square(found.scattered, other.scattered, leaving.gradient)
                total = dataclasses.replace(total, total=total.total + more + more.T)
            found, leaving = total, leaving.plus(last)
        return found, leaving

    @property
    def _draws(self) -> Draws | None:
        """Of the network, where steps follow those."""
        return Draws.shared(self.reading) if self.optimizer.rule == "muon" else None

    def noted(self, change: Change, at: Site) -> tuple[Change, Site]:
        if at.name in ("", ENCODER):
            return change, at
        before, met, changed = (
            float(np.trace(part)) for part in (at.kernel, change.overlap, change.total)
        )
        self.sites.append(
            SiteStep(at.layer, at.name, before, met, changed, change.coherent, at.gradient)
        )
        return change, at

    # --- parameters ----------------------------------------------------------------------------

    def entry(
        self,
        layer: int,
        name: str,
        factor: float,
        found: Effect | StepSize,
        variance: float,
        n: float,
    ) -> float:
        """Note a parameter's step; its learning rate."""
        rate = self.rate * factor
        self.weights.append(
            WeightStep(
                layer,
                name,
                rate,
                factor * found.slope,
                rate * rate * found.square,
                variance,
                n,
                found.aligned,
            )
        )
        return rate

    def _neurons(
        self, laws: ComponentLaws, kernels: tuple[Array, ...], leaving: Site
    ) -> Neurons | None:
        """Of the hidden units whose output is that site."""
        return self.reading.once(
            Neurons, leaving.index, make=lambda: Neurons.of(laws, kernels, leaving.gradient)
        )

    def kept(self, name: str) -> float:
        """What weight decay leaves of a parameter."""
        return self.optimizer.left(name, self.rate)

    def matrix(
        self,
        name: str,
        change: Change,
        entering: Site,
        gradient: Array,
        layer: int,
        shape: tuple[float, float],
        variance: float,
        signs: Callable[[Spectrum], Signs] | None = None,
        writes: bool = False,
    ) -> Change:
        """Behind an (m, n) matrix of random entries, its own step included.

        `change` is that of its input, at the site `entering`, and `gradient` E delta delta at its
        output; `shape` is n and m. `signs` gives what is not Gaussian across tokens at it; `writes`
        says that a residual sum is next.
        """
        n, m = shape
        kernel, gain = entering.kernel, n * variance
        name, rule = self.prefix + name, self.optimizer.rule_of(self.prefix + name)
        # the matrices that read a site, and steps of every rule, share its root
        once, key = self.reading.once, (entering.index, layer, name, rule)
        root = once(Root, entering.index, make=lambda: Root.of(kernel))
        spectrum = once(Spectrum, *key, make=lambda: Spectrum.of(kernel, gradient, root))
        carried = change.times(gain)
        left = self.kept(name)
        if left != 1.0:
            same = np.full(len(kernel), left)
            carried = carried.rescaled(gain * kernel, same, same - 1.0)
        block = self.reading.made.get((Block, entering.index))
        not_gaussian = orthogonal = None
        if rule == "sign" and signs is not None and spectrum.total > 0:
            not_gaussian = once(Signs, *key, make=lambda: signs(spectrum))
        elif rule == "muon":
            met = self._met(layer, name, len(kernel))
            orthogonal = once(Orthogonal, *key, make=lambda: Orthogonal.of(spectrum, n, m, *met))
        found = effect(
            spectrum,
            rule,
            *self._moved(change, entering),
            n,
            m,
            entering.excess() if block is None else block.excess,
            self.optimizer.pulled,
            not_gaussian,
            orthogonal,
        )
        factor = self.optimizer.factor(name, n, m)
        rate = self.entry(layer, name, factor, found, variance, n)
        # W delta_x = W W^T delta_y: the coherent part appears as if W were independent, and once
        # more as a mean, beside which the matrix's own stands
        own = rate * found.coherent
        cross = between(carried.coherent, gradient, carried.coherent / 2 + own)
        total = carried.total + rate * rate * found.total + cross + cross.T
        scattered = carried.scattered
        if self.overlaps is not None:
            mine = rate * found.followed * self.response
            beside = self.overlaps.square(carried.scattered, carried.scattered / 2 + mine, gradient)
            total = total + beside + beside.T
            scattered = scattered + mine
        beyond = None
        if found.along is not None and writes:
            linear = between_trace(own, gradient)
            whole = rate * rate * float(np.trace(found.along))
            if whole > linear:
                rest = rate * rate * (1 - linear / whole) * found.along
                beyond = Beyond.of(rest, linear / whole)
        return Change(carried.coherent + own, carried.overlap, total, scattered, beyond)

    def _moved(self, change: Change, entering: Site) -> tuple[Array, Array]:
        """The updated input in terms of the old one, and its kernel."""
        if entering.index not in self.moved:
            root = self.reading.made[Root, entering.index]
            met = root.whitened(change.met(entering.kernel))
            self.moved[entering.index] = met, change.new(entering.kernel)
        return self.moved[entering.index]

    def _met(self, layer: int, name: str, tokens: int) -> tuple[Sides | None, Array | None]:
        """What Muon needs of a matrix: draws of both sides, and the steps' parts of the tokens."""
        draws, batches = self._draws, self.optimizer.batches
        sides = None if draws is None else draws.sides.get((layer, name))
        return sides, None if batches is None else batches.momenta(tokens)

    def bias(self, name: str, change: Change, gradient: Array, m: float, layer: int) -> Change:
        """With a bias's step."""
        name = self.prefix + name
        rule = self.optimizer.rule_of(name)
        found = vector_effect(gradient, rule, m, self.optimizer.pulled)
        rate = self.entry(layer, name, self.optimizer.factor(name), found, np.nan, 1.0)
        shift = float(found.coherent.flat[0]), float(found.total.flat[0])
        return change.shifted(rate * shift[0], rate * rate * shift[1], gradient)

    # --- components ----------------------------------------------------------------------------

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, change: Change, entering: Site, leaving: Site) -> Change:
        """The change behind a leaf, its parameters' own steps included, by its class.

        `Walk.leaf.register(MyLeaf, function)` adds one of a user's own.

        Raises:
            DomainError: a leaf of no class that is known.
        """
        known = Walk.__dict__["leaf"].dispatcher.registry
        names = ", ".join(sorted(one.__name__ for one in known if one is not object))
        raise DomainError(
            f"the first step does not cover {type(leaf).__name__} ({leaf.label}): only {names}"
        )

    @leaf.register(Linear)
    def linear(self, leaf: Linear, change: Change, entering: Site, leaving: Site) -> Change:
        given = leaf.parameters
        shape = float(given["fan_in"]), float(given["fan_out"])
        variance = float(given["weight_variance"])
        signs = None
        before = self.reading.made.get((Neurons, entering.index))
        if self._unit is not None:
            units = self._neurons(
                self._unit.laws, (leaving.kernel,), self.reading.points[leaving.index + 1]
            )
            if units is not None:
                signs = functools.partial(_rows_of, units, 0)
        elif before is not None:
            signs = functools.partial(columns_of, before.given)
        elif (block := self.reading.made.get((Block, entering.index))) is not None:
            signs = functools.partial(columns_of, block.columns)
        found = self.matrix(
            leaf.weight,
            change,
            entering,
            leaving.gradient,
            leaving.layer,
            shape,
            variance,
            signs,
            self._unit is None,
        )
        self.response = shape[0] * variance * self.response
        if not leaf.has_bias:
            return found
        return self.bias(f"{leaf.weight}.bias", found, leaving.gradient, shape[1], leaving.layer)

    @leaf.register(GatedLinear)
    def gated(self, leaf: GatedLinear, change: Change, entering: Site, leaving: Site) -> Change:
        if leaf.shift or leaf.clamp:
            raise DomainError("the first step covers shift and clamp of routed experts alone")
        n, m = float(leaf.fan_in), float(leaf.fan_out)
        inner = {
            f"{leaf.prefix}gate": (float(leaf.gate), float(leaf.gate_bias)),
            f"{leaf.prefix}ffn_in": (float(leaf.ffn_in), float(leaf.bias)),
        }
        both = tuple(n * v * entering.kernel + b for v, b in inner.values())
        unit = gated(leaf.activation, *both)
        units = self._neurons(leaf.activation, both, leaving)
        moved = []
        for place, name in enumerate(inner):
            gradient = unit.slopes[place] * leaving.gradient
            variance = inner[name][0]
            signs = None
            if units is not None:
                signs = functools.partial(_rows_of, units, place)
            found = self.matrix(
                name, change, entering, gradient, leaving.layer, (n, m), variance, signs
            )
            if leaf.has_bias:
                found = self.bias(f"{name}.bias", found, gradient, m, leaving.layer)
            moved.append(found)
        found = unit.carried(moved[0], moved[1], leaving.gradient)
        ways = sum(v * way for (v, _), way in zip(inner.values(), unit.slopes, strict=True))
        self.response = n * ways * self.response
        if units is None:
            return found
        more = units.beyond_pairs((moved[0].coherent, moved[1].coherent))
        return dataclasses.replace(found, total=found.total + more)

    @leaf.register(Activation)
    def activation(self, leaf: Activation, change: Change, entering: Site, leaving: Site) -> Change:
        old = entering.kernel
        found, slope = activated(leaf.laws, change, old, leaving.kernel)
        self.response = slope * self.response
        units = self._neurons(leaf.laws, (entering.kernel,), leaving)
        if units is None:
            return found
        more = units.beyond_pairs((change.coherent,))
        return dataclasses.replace(found, total=found.total + more)

    @leaf.register(FiniteNormalization)
    def norm(
        self, leaf: FiniteNormalization, change: Change, entering: Site, leaving: Site
    ) -> Change:
        if leaf.groups != 1:
            raise DomainError(f"the first step does not cover norm_groups = {leaf.groups}")
        kernel, epsilon = entering.kernel, float(leaf.epsilon)
        before = np.diag(kernel) + epsilon
        grown = 2 * np.diag(change.overlap) + np.diag(change.total)
        # r = s/s' and r - 1 = -grown/(s' (s + s'))
        s, s_new = np.sqrt(before), np.sqrt(before + grown)
        r, less = s / s_new, -grown / (s_new * (s + s_new))
        found = change.rescaled(kernel, r, less)
        # on the scale of the output, with the package's corrections of order 1/width
        square = float(leaf.gain) ** 2
        passed = square / np.outer(s, s)
        there = np.abs(kernel) * passed > 1e-6 * square
        fix = np.where(there, leaving.kernel / np.where(there, kernel, 1.0), passed)
        fix = np.clip(fix, 0.8 * passed, 1.25 * passed)
        found = found.each(lambda part: fix * part, lambda part: passed * part)
        self.response = passed * self.response
        if not leaf.affine:
            return found
        return self._affine(leaf, found, leaving)

    def _affine(self, leaf: Any, change: Change, leaving: Site) -> Change:
        square, gradient = float(leaf.gain) ** 2, leaving.gradient
        name = f"{self.prefix}{leaf.label}.gain"
        kept = self.kept(name)
        if kept != 1.0:
            same = np.full(len(gradient), kept)
            change = change.rescaled(leaving.kernel, same, same - 1.0)
        normal, inner = leaving.kernel / square, change.times(1 / square)
        found = gain_effect(
            normal,
            gradient,
            self.optimizer.rule_of(name),
            inner.met(normal),
            inner.new(normal),
            leaving.width,
            self.optimizer.pulled,
        )
        rate = self.entry(leaving.layer, name, self.optimizer.factor(name), found, np.nan, 1.0)
        nothing = 0 * gradient
        own = Change(rate * found.coherent, nothing, rate * rate * found.total, nothing)
        change = change.plus(own, gradient)
        if leaf.bias:
            change = self.bias(f"{leaf.label}.bias", change, gradient, leaving.width, leaving.layer)
        return change

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, change: Change, entering: Site, leaving: Site) -> Change:
        kept = 1.0 - float(leaf.parameters["drop_prob"])
        if kept == 1.0:
            return change
        units = self.reading.made.get((Neurons, entering.index))
        if units is not None:
            self.reading.once(Neurons, leaving.index, make=lambda: units.dropped(kept))
        change = change.parted(entering.gradient, leaving.gradient)
        return change.times(1.0 + np.eye(len(entering.kernel)) * (1 / kept - 1))

    @leaf.register(Scale)
    def scale(self, leaf: Scale, change: Change, entering: Site, leaving: Site) -> Change:
        return change.times(float(leaf.parameters["weight_variance"]))

    @leaf.register(LawLeaf)
    def by_law(self, leaf: LawLeaf, change: Change, entering: Site, leaving: Site) -> Change:
        cut = self.reading.once(
            Segments, leaving.index, make=lambda: Segments(leaf, entering.kernel)
        )
        received, responses = cut.received(leaving.gradient), [self.response]
        changes = [change]
        for place, one in enumerate(cut.matrices):
            at, gradient = entering, received[one.name]
            if not np.array_equal(cut.before(one.name), entering.kernel):
                at = entering.behind(
                    one.name,
                    cut.before(one.name),
                    one.fan_out * one.variance * gradient,
                    float(one.fan_in),
                )
            self.response = sum(cut.carried(place, k, part) for k, part in enumerate(responses))
            found = self.matrix(
                one.name,
                cut.gathered(place, changes, at.gradient),
                at,
                gradient,
                leaving.layer,
                (float(one.fan_in), float(one.fan_out)),
                max(one.variance, 1e-60),
                writes=place + 1 == len(cut.matrices),
            )
            if one.bias is not None:
                width = float(one.fan_out)
                found = self.bias(f"{one.name}.bias", found, gradient, width, leaving.layer)
            changes.append(found)
            responses.append(one.fan_in * one.variance * self.response)
        last = len(cut.matrices)
        self.response = sum(cut.carried(last, k, part) for k, part in enumerate(responses))
        return cut.gathered(last, changes, leaving.gradient)

    @leaf.register(Pool)
    def pool(self, leaf: Pool, change: Change, entering: Site, leaving: Site) -> Change:
        weights = leaf.weights(len(entering.kernel))
        return change.each(lambda part: weights @ part @ weights.T)


def _rows_of(units: Neurons, place: int, spectrum: Spectrum) -> Signs:
    return sign_of_rows(spectrum, units.sent(place, spectrum.gradient))


def columns_of(given: Callable[[Array], Drawn], spectrum: Spectrum) -> Signs:
    """Of features that are drawn, by their kernel."""
    return sign_of_columns(spectrum, given(spectrum.kernel), gaussian(spectrum.gradient, 9)[:512])
