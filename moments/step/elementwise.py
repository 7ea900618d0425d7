"""A step's change through activations and gated units, by their pair laws.

With y' = y + u jointly Gaussian to the order that is followed, the second moments of phi(y') and of
phi(y') with phi(y) are the activation's pair law at E y' y' and at E y' y, and the coherent part is
E phi'(y'_t) phi'(y_s) P_ts. Small changes are multiplied by the slopes alone, U -> E phi' phi' o U,
as differences of kernels would lose digits. `neurons` adds the contribution to U of correlations
between one neuron's slopes at more than two tokens.

See docs/theory/step-travels.md, The change travels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..engine.laws import of_pairs
from ..formulas.gated import gated as gated_laws
from ..formulas.law import ComponentLaws
from .change import Array, Change

_SMALL = 1e-5
"""Relative change of a tensor below which it is multiplied by slopes."""


def moment(laws: ComponentLaws, first: Array, second: Array, kernel: Array) -> Array:
    """E phi(y_t) phi(z_s), of variances `first` and `second` and covariance `kernel`."""
    law = gated_laws(laws).law("grad_factor_covariance")
    return np.asarray(of_pairs(law, first[:, None], second[None, :], kernel))


def slope(laws: ComponentLaws, first: Array, second: Array, kernel: Array) -> Array:
    """E phi'(y_t) phi'(z_s)."""
    law = laws.law("grad_covariance")
    return np.asarray(of_pairs(law, first[:, None], second[None, :], kernel))


def activated(
    laws: ComponentLaws, change: Change, kernel: Array, output: Array
) -> tuple[Change, Array]:
    """The change of an activation's output, of kernel `output`, from that of its Gaussian
    preactivations, of `kernel`; and the slopes E phi' phi'."""
    old = np.diag(kernel)
    if change.share(kernel) < _SMALL:
        slopes = slope(laws, old, old, kernel)
        return change.times(slopes), slopes
    mixed, new = change.updated_overlap(kernel), change.new(kernel)
    grown = np.diag(new)
    between = moment(laws, grown, old, mixed)
    overlap = between - output
    total = moment(laws, grown, grown, new) - between - overlap.T
    slopes = slope(laws, grown, old, mixed)
    result = dataclasses.replace(change.times(slopes), overlap=overlap, total=total, beyond=None)
    return result, slopes


@dataclass(frozen=True, eq=False)
class Unit:
    """phi(a) u, of independent maps a and u of one input.

    Attributes:
        laws: of phi.
        gate, factor: kernels of a and u.
        slopes: factors of the product's gradient kernel that give those at a and at u.
    """

    laws: ComponentLaws
    gate: Array
    factor: Array
    slopes: tuple[Array, Array]

    def propagated(self, gate: Change, factor: Change, gradient: Array) -> Change:
        """The change of the product, from those of a and u."""
        laws, old = self.laws, np.diag(self.gate)
        if max(gate.share(self.gate), factor.share(self.factor)) < _SMALL:
            of_gate, of_factor = self.slopes
            return gate.times(of_gate).plus(factor.times(of_factor), gradient)
        mixed, new = gate.updated_overlap(self.gate), gate.new(self.gate)
        grown = np.diag(new)
        between = moment(laws, grown, old, mixed)
        mixed_factor = factor.updated_overlap(self.factor)
        overlap = between * mixed_factor - self.slopes[1] * self.factor
        total = moment(laws, grown, grown, new) * factor.new(self.factor)
        total = total - between * mixed_factor - overlap.T
        first, second = (
            dataclasses.replace(one.times(way), overlap=0 * total, total=0 * total, beyond=None)
            for one, way in (
                (gate, slope(laws, grown, old, mixed) * mixed_factor),
                (factor, between),
            )
        )
        both = first.plus(second, gradient)
        return dataclasses.replace(both, overlap=overlap, total=total + both.total)


def gated(laws: ComponentLaws, gate: Array, factor: Array) -> Unit:
    """A gated unit at the kernels of its two maps."""
    old = np.diag(gate)
    slopes = slope(laws, old, old, gate) * factor, moment(laws, old, old, gate)
    return Unit(laws, gate, factor, slopes)
