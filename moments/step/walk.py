"""The third pass over a model: after those of the signal and the gradient, that of the step.

It propagates a `Change` through the components in the order of the forward pass, using the kernels
of both passes at every site, and adds the steps of each component's parameters.
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
        layer, site: layer and name of the site.
        before: tr K, the tensor's square summed over tokens.
        overlap, changed: tr M and tr U of the step.
        coherent, gradient: P, and E delta delta before the step.
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
        layer, weight: layer and name of the parameter.
        rate: its learning rate, all factors included.
        slope: its share of minus the loss's derivative in the learning rate.
        square: mean square of an entry of its step, at that rate.
        variance: of an entry before the step; nan if the parameter starts at a constant.
        width: features of the input.
        aligned: as in `Effect`.
        chosen: for matrices of experts, `aligned` over each expert's tokens relative to all tokens.
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
    """One step at one learning rate.

    Attributes:
        optimizer: the optimizer.
        rate: its learning rate.
        tied: `ends.tied_overlap`.
        reading: every site, in order, and results that do not depend on the rate.
        along: as in `ends.Entered`.
        prefix: of the names of parameters in the current stream.
        memory: change of the encoder's output, and its site.
        sites, weights, end: steps of every site and parameter so far, and the logits.
        moved: by index of a site, E x' z and E x' x' of its updated tensor x' (`effect`).
        overlaps: scatter at the input of the current residual branch; None: outside of any.
        response: (T, T) response of the current kernel to those overlaps.
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
        """The change of a component's output, and its site."""
        if isinstance(component, Chain):
            for part, following in itertools.zip_longest(
                component.children, component.children[1:]
            ):
                self._unit = following if isinstance(following, Activation) else None
                change, entering = self.through(part, change, entering, points)
            return change, entering
        if isinstance(component, Layer):
            change, _ = self.through(component.body, change, entering, points)
            return self.noted(change, next(points))
        if isinstance(component, Residual):
            return self._residual(component, change, entering, points)
        if isinstance(component, Parallel):
            return self._parallel(component, change, entering, points)
        skips = isinstance(component, Product)  # skip the sites inside a product
        leaving = next(at for at in points if not skips or at.name.endswith(component.label))
        return self.noted(self.leaf(component, change, entering, leaving), leaving)

    def _residual(
        self, node: Residual, change: Change, entering: Site, points: Iterator[Site]
    ) -> tuple[Change, Site]:
        overlaps = Overlaps.of(entering.kernel, entering.width)
        self.overlaps = overlaps
        first = self.response = np.outer(overlaps.sizes, overlaps.sizes)
        # the gradients of a branch's matrices are not the stream's delta
        inner = dataclasses.replace(change, beyond=None)
        branch, _ = self.through(node.branch, inner, entering, points)
        leaving = next(points)
        scales = float(node.skip_scale) ** 2, float(node.branch_scale) ** 2
        received = leaving.gradient
        change = change.decorrelated(entering.gradient, scales[0] * received)
        skip, added = change.times(scales[0]), branch.times(scales[1])
        total = skip.plus(added, received)
        cross = (
            scales[0] * scales[1] * overlaps.square(change.scattered, branch.scattered, received)
        )
        # the sum's scatter that is due to the input's, through skip and branch
        size = np.sqrt(np.diag(leaving.kernel))
        response = (scales[0] * first + scales[1] * self.response) / np.outer(size, size)
        self.overlaps = None
        # the branch's change along delta overlaps with the words that tokens look up
        overlap = total.overlap - added.coherent @ self.tied.T
        if np.any(self.along):
            # tables of a tied head also move along the branch's output
            output = leaving.kernel - scales[0] * entering.kernel
            cross = cross - self.along @ added.overlap.T
            overlap = overlap - self.along @ output
        total = dataclasses.replace(
            total,
            overlap=overlap,
            total=total.total + cross + cross.T,
            scattered=response * total.scattered,
        )
        return self.noted(total, leaving)

    def _parallel(
        self, node: Parallel, change: Change, entering: Site, points: Iterator[Site]
    ) -> tuple[Change, Site]:
        first = self.response
        total, leaving = self.through(node.branches[0], change, entering, points)
        for branch in node.branches[1:]:
            before, self.response = self.response, first
            other, last = self.through(branch, change, entering, points)
            self.response = before + self.response
            # all terms of a sum have its gradient
            both = total.plus(other, leaving.gradient)
            if self.overlaps is not None:
                cross = self.overlaps.square(total.scattered, other.scattered, leaving.gradient)
                both = dataclasses.replace(both, total=both.total + cross + cross.T)
            total, leaving = both, leaving.plus(last)
        return total, leaving

    @property
    def _draws(self) -> Draws | None:
        """Draws of the network, for optimizers whose steps are computed from them."""
        return Draws.shared(self.reading) if self.optimizer.rule == "muon" else None

    def noted(self, change: Change, at: Site) -> tuple[Change, Site]:
        if at.name in ("", ENCODER):
            return change, at
        before, overlap, changed = (
            float(np.trace(part)) for part in (at.kernel, change.overlap, change.total)
        )
        self.sites.append(
            SiteStep(at.layer, at.name, before, overlap, changed, change.coherent, at.gradient)
        )
        return change, at

    # --- parameters ----------------------------------------------------------------------------

    def entry(
        self,
        layer: int,
        name: str,
        factor: float,
        step: Effect | StepSize,
        variance: float,
        n: float,
    ) -> float:
        """Record a parameter's step and return its learning rate."""
        rate = self.rate * factor
        slope, square = factor * step.slope, rate * rate * step.square
        self.weights.append(WeightStep(layer, name, rate, slope, square, variance, n, step.aligned))
        return rate

    def _neurons(
        self, laws: ComponentLaws, kernels: tuple[Array, ...], leaving: Site
    ) -> Neurons | None:
        """Draws of the hidden units whose output is the site `leaving`."""
        return self.reading.once(
            Neurons, leaving.index, make=lambda: Neurons.of(laws, kernels, leaving.gradient)
        )

    def kept(self, name: str) -> float:
        """Factor of a parameter by weight decay."""
        return self.optimizer.decay(name, self.rate)

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
        """The change of the output of an (m, n) matrix of random entries, its own step included.

        `change` is that of its input, at the site `entering`, `gradient` E delta delta at its
        output, and `shape` n and m. `signs` is given if its input or gradient is not Gaussian
        across tokens; `writes` if its output is added to the residual stream.
        """
        n, m = shape
        kernel, gain = entering.kernel, n * variance
        name, rule = self.prefix + name, self.optimizer.rule_of(self.prefix + name)
        # the root of a site's kernel is shared by all matrices that read it and by all rules
        once, key = self.reading.once, (entering.index, layer, name, rule)
        root = once(Root, entering.index, make=lambda: Root.of(kernel))
        spectrum = once(Spectrum, *key, make=lambda: Spectrum.of(kernel, gradient, root))
        through = change.times(gain)
        decay = self.kept(name)
        if decay != 1.0:
            factor_by_token = np.full(len(kernel), decay)
            through = through.rescaled(gain * kernel, factor_by_token, factor_by_token - 1.0)
        block = self.reading.cache.get((Block, entering.index))
        not_gaussian = orthogonal = None
        if rule == "sign" and signs is not None and spectrum.total > 0:
            not_gaussian = once(Signs, *key, make=lambda: signs(spectrum))
        elif rule == "muon":
            sampled = self._muon_draws(layer, name, len(kernel))
            orthogonal = once(
                Orthogonal, *key, make=lambda: Orthogonal.of(spectrum, n, m, *sampled)
            )
        step = effect(
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
        rate = self.entry(layer, name, factor, step, variance, n)
        # W delta_x = W W^T delta_y: the coherent part appears once as if W were independent, and
        # once more as a mean, to which the matrix's own step adds
        own = rate * step.coherent
        cross = between(through.coherent, gradient, through.coherent / 2 + own)
        total = through.total + rate * rate * step.total + cross + cross.T
        scattered = through.scattered
        if self.overlaps is not None:
            followed = rate * step.followed * self.response
            both = through.scattered / 2 + followed
            cross = self.overlaps.square(through.scattered, both, gradient)
            total = total + cross + cross.T
            scattered = scattered + followed
        beyond = None
        if step.along is not None and writes:
            linear = between_trace(own, gradient)
            whole = rate * rate * float(np.trace(step.along))
            if whole > linear:
                rest = rate * rate * (1 - linear / whole) * step.along
                beyond = Beyond.of(rest, linear / whole)
        return Change(through.coherent + own, through.overlap, total, scattered, beyond)

    def _moved(self, change: Change, entering: Site) -> tuple[Array, Array]:
        """E x' z and E x' x' of the updated input x' (`effect`)."""
        if entering.index not in self.moved:
            root = self.reading.cache[Root, entering.index]
            onto = root.whitened(change.updated_overlap(entering.kernel))
            self.moved[entering.index] = onto, change.new(entering.kernel)
        return self.moved[entering.index]

    def _muon_draws(self, layer: int, name: str, tokens: int) -> tuple[Sides | None, Array | None]:
        """The arguments `sides` and `parts` of `Orthogonal.of`."""
        draws, batches = self._draws, self.optimizer.batches
        sides = None if draws is None else draws.sides.get((layer, name))
        return sides, None if batches is None else batches.momenta(tokens)

    def bias(self, name: str, change: Change, gradient: Array, m: float, layer: int) -> Change:
        """Add the step of a bias to a change."""
        name = self.prefix + name
        rule = self.optimizer.rule_of(name)
        step = vector_effect(gradient, rule, m, self.optimizer.pulled)
        rate = self.entry(layer, name, self.optimizer.factor(name), step, np.nan, 1.0)
        coherent, total = float(step.coherent.flat[0]), float(step.total.flat[0])
        return change.shifted(rate * coherent, rate * rate * total, gradient)

    # --- components ----------------------------------------------------------------------------

    @functools.singledispatchmethod
    def leaf(self, leaf: Any, change: Change, entering: Site, leaving: Site) -> Change:
        """The change of a leaf's output, its parameters' steps included, by its class.

        `Walk.leaf.register(MyLeaf, function)` adds a class.

        Raises:
            DomainError: the class is not registered.
        """
        known = Walk.__dict__["leaf"].dispatcher.registry
        names = ", ".join(sorted(one.__name__ for one in known if one is not object))
        raise DomainError(
            f"the first step does not cover {type(leaf).__name__} ({leaf.label}): only {names}"
        )

    @leaf.register(Linear)
    def linear(self, leaf: Linear, change: Change, entering: Site, leaving: Site) -> Change:
        law = leaf.parameters
        shape = float(law["fan_in"]), float(law["fan_out"])
        variance = float(law["weight_variance"])
        signs = None
        before = self.reading.cache.get((Neurons, entering.index))
        if self._unit is not None:
            units = self._neurons(
                self._unit.laws, (leaving.kernel,), self.reading.points[leaving.index + 1]
            )
            if units is not None:
                signs = functools.partial(_rows_of, units, 0)
        elif before is not None:
            signs = functools.partial(columns_of, before.outputs)
        elif (block := self.reading.cache.get((Block, entering.index))) is not None:
            signs = functools.partial(columns_of, block.columns)
        layer, gradient, writes = leaving.layer, leaving.gradient, self._unit is None
        change = self.matrix(
            leaf.weight, change, entering, gradient, layer, shape, variance, signs, writes
        )
        self.response = shape[0] * variance * self.response
        if not leaf.has_bias:
            return change
        return self.bias(f"{leaf.weight}.bias", change, gradient, shape[1], layer)

    @leaf.register(GatedLinear)
    def gated(self, leaf: GatedLinear, change: Change, entering: Site, leaving: Site) -> Change:
        if leaf.shift or leaf.clamp:
            raise DomainError("the first step covers shift and clamp of routed experts alone")
        n, m = float(leaf.fan_in), float(leaf.fan_out)
        variances = {
            f"{leaf.prefix}gate": (float(leaf.gate), float(leaf.gate_bias)),
            f"{leaf.prefix}ffn_in": (float(leaf.ffn_in), float(leaf.bias)),
        }
        kernels = tuple(n * v * entering.kernel + b for v, b in variances.values())
        unit = gated(leaf.activation, *kernels)
        units = self._neurons(leaf.activation, kernels, leaving)
        changes = []
        for place, (name, (variance, _)) in enumerate(variances.items()):
            gradient, layer = unit.slopes[place] * leaving.gradient, leaving.layer
            signs = None if units is None else functools.partial(_rows_of, units, place)
            result = self.matrix(name, change, entering, gradient, layer, (n, m), variance, signs)
            if leaf.has_bias:
                result = self.bias(f"{name}.bias", result, gradient, m, layer)
            changes.append(result)
        result = unit.propagated(changes[0], changes[1], leaving.gradient)
        slopes = sum(
            v * slope for (v, _), slope in zip(variances.values(), unit.slopes, strict=True)
        )
        self.response = n * slopes * self.response
        if units is None:
            return result
        more = units.beyond_pairs((changes[0].coherent, changes[1].coherent))
        return dataclasses.replace(result, total=result.total + more)

    @leaf.register(Activation)
    def activation(self, leaf: Activation, change: Change, entering: Site, leaving: Site) -> Change:
        result, slope = activated(leaf.laws, change, entering.kernel, leaving.kernel)
        self.response = slope * self.response
        units = self._neurons(leaf.laws, (entering.kernel,), leaving)
        if units is None:
            return result
        more = units.beyond_pairs((change.coherent,))
        return dataclasses.replace(result, total=result.total + more)

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
        result = change.rescaled(kernel, r, less)
        # on the scale of the output, with the engine's corrections of order 1/width
        square = float(leaf.gain) ** 2
        slope = square / np.outer(s, s)
        resolved = np.abs(kernel) * slope > 1e-6 * square
        ratio = np.where(resolved, leaving.kernel / np.where(resolved, kernel, 1.0), slope)
        ratio = np.clip(ratio, 0.8 * slope, 1.25 * slope)
        result = result.each(lambda part: ratio * part, lambda part: slope * part)
        self.response = slope * self.response
        return self._affine(leaf, result, leaving) if leaf.affine else result

    def _affine(self, leaf: Any, change: Change, leaving: Site) -> Change:
        square, gradient = float(leaf.gain) ** 2, leaving.gradient
        name = f"{self.prefix}{leaf.label}.gain"
        decay = self.kept(name)
        if decay != 1.0:
            factor = np.full(len(gradient), decay)
            change = change.rescaled(leaving.kernel, factor, factor - 1.0)
        normal, before = leaving.kernel / square, change.times(1 / square)
        step = gain_effect(
            normal,
            gradient,
            self.optimizer.rule_of(name),
            before.updated_overlap(normal),
            before.new(normal),
            leaving.width,
            self.optimizer.pulled,
        )
        rate = self.entry(leaving.layer, name, self.optimizer.factor(name), step, np.nan, 1.0)
        zeros = 0 * gradient
        own = Change(rate * step.coherent, zeros, rate * rate * step.total, zeros)
        change = change.plus(own, gradient)
        if leaf.bias:
            change = self.bias(f"{leaf.label}.bias", change, gradient, leaving.width, leaving.layer)
        return change

    @leaf.register(Dropout)
    def dropout(self, leaf: Dropout, change: Change, entering: Site, leaving: Site) -> Change:
        keep = 1.0 - float(leaf.parameters["drop_prob"])
        if keep == 1.0:
            return change
        units = self.reading.cache.get((Neurons, entering.index))
        if units is not None:
            self.reading.once(Neurons, leaving.index, make=lambda: units.dropped(keep))
        change = change.decorrelated(entering.gradient, leaving.gradient)
        return change.times(1.0 + np.eye(len(entering.kernel)) * (1 / keep - 1))

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
        for place, matrix in enumerate(cut.matrices):
            name, gradient = matrix.name, received[matrix.name]
            n, m, at = float(matrix.fan_in), float(matrix.fan_out), entering
            if not np.array_equal(cut.before(name), entering.kernel):
                at = entering.inner(name, cut.before(name), m * matrix.variance * gradient, n)
            self.response = sum(
                cut.push_forward(place, k, part) for k, part in enumerate(responses)
            )
            result = self.matrix(
                name,
                cut.gathered(place, changes, at.gradient),
                at,
                gradient,
                leaving.layer,
                (n, m),
                max(matrix.variance, 1e-60),
                writes=place + 1 == len(cut.matrices),
            )
            if matrix.bias is not None:
                result = self.bias(f"{name}.bias", result, gradient, m, leaving.layer)
            changes.append(result)
            responses.append(matrix.fan_in * matrix.variance * self.response)
        last = len(cut.matrices)
        self.response = sum(cut.push_forward(last, k, part) for k, part in enumerate(responses))
        return cut.gathered(last, changes, leaving.gradient)

    @leaf.register(Pool)
    def pool(self, leaf: Pool, change: Change, entering: Site, leaving: Site) -> Change:
        weights = leaf.weights(len(entering.kernel))
        return change.each(lambda part: weights @ part @ weights.T)


def _rows_of(units: Neurons, place: int, spectrum: Spectrum) -> Signs:
    return sign_of_rows(spectrum, units.input_gradients(place, spectrum.gradient))


def columns_of(features: Callable[[Array], Drawn], spectrum: Spectrum) -> Signs:
    """The sign rule for an input whose features are drawn, as a function of their kernel."""
    return sign_of_columns(
        spectrum, features(spectrum.kernel), gaussian(spectrum.gradient, 9)[:512]
    )
