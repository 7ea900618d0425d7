"""A product, entry by entry, of two tensors made of independent matrices.

Second moments multiply, and a gradient reaches either factor by the other's. Attention's output
times a gate of what attention reads: y = attention(x) * sigmoid(x W_g), entry by entry or a number
per head. See docs/theory/latent_attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..engine.composition import Component
from ..engine.directions import knows_directions, realigned
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap
from ..engine.response import (
    Around,
    GradientAdjoint,
    Matrix,
    Response,
    SignalAdjoint,
    matrix_of,
    per_pair,
    sum_of,
)
from ..engine.state import Array, Fluctuation, Gradient, Signal, bind
from ..engine.trace import Record, Run
from ..formulas.law import ComponentLaws
from .elementary import faintly


@dataclass(frozen=True)
class Product(Component):
    """first(x) * gate(x), both of the same tokens.

    Attributes:
        first: of mean 0, Gaussian given its input.
        gate: gives what it is multiplied by: as many features, or one for several.
        each: features of the first that share a gate; 1: every entry has its own.
        label: site of the product.
        laws: of the activation that the gate ends in, where what a gradient knows of its signal is
            followed through the product; None: it is not.
    """

    first: Component
    gate: Component
    each: float = 1.0
    label: str = "attention.gated"
    laws: ComponentLaws | None = None

    def propagate(self, signal: Signal, run: Run) -> Record:
        records = self.first.propagate(signal, run), self.gate.propagate(signal, run)
        output = self._product(*(record.output for record in records))
        return run.passed(Record(self, run.layer, signal, output, records))

    def _product(self, first: Signal, gate: Signal) -> Signal:
        square, kernel = gate.second_moment(), first.kernel
        fluctuation, (excess, _) = None, kernel.lift(gate.kurtosis - 1.0)
        if first.fluctuation is not None:
            # Of independent features: the first's, and E g^4 - E^2 g^2 of the gates, which several
            # features share.
            both = kernel * kernel * square * square
            more = (2.0 + self.each) / first.width
            one, two = both.lift(more)
            at_one, at_two = both.over_tokens(excess + 0.0 * kernel.diagonal)
            added = both.weighted(excess * one, 0.5 * (at_one + at_two) * two)
            norms, overlaps, _, shared = first.fluctuation
            if shared is not None:
                shared = (shared[0] * square, shared[1] * square)
            fluctuation = Fluctuation(
                norms * square * square + added,
                None if overlaps is None else overlaps * square * square + added,
                shared=shared,
            )
        return first.replace(
            kernel=kernel * square,
            kurtosis=first.kurtosis * gate.kurtosis,
            fluctuation=fluctuation,
            notes=first.notes + gate.notes,
        )

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        (first, gate), length = record.children, gradient.seq_len
        to_first = gradient.kernel * gate.output.second_moment()
        to_gate = (gradient.kernel * first.output.kernel).scaled(self.each)
        if self.laws and record.output.fluctuation is not None and knows_directions(gradient):
            entering = gate.children[0].output
            law, (values, _) = self.laws.under("refined")["alignment"], bind(entering, {})
            slopes = faintly(law, entering.algebra, values)
            to_first = realigned(to_first, record.output, gradient, gate.output.kurtosis)
            to_gate = realigned(to_gate, record.output, gradient, 3.0 * slopes)
        back = (
            first.backward(Gradient(to_first, length), run),
            gate.backward(Gradient(to_gate, length), run),
        )
        grad_in = sum_of([one.grad_in.kernel for one in back])
        return record.completed(gradient, Gradient(grad_in, length), back)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return walk.through(record.children[0], at)  # of the gates, which hardly vary, nothing

    def response(self, record: Record, around: Around) -> Response:
        first, gate = record.children
        parts = tuple(one.component.response(one, around) for one in record.children)
        of_gate = matrix_of(gate.output.second_moment(), gate.output.seq_len)
        of_first = matrix_of(first.output.kernel, first.output.seq_len)
        return _Factors(parts, (of_gate, of_first), (1.0, self.each))

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        return record.children[0].paths()

    @property
    def children(self) -> tuple[Component, ...]:
        return self.first, self.gate

    def with_children(self, children: tuple[Component, ...]) -> Product:
        return replace(self, first=children[0], gate=children[1])


@dataclass(frozen=True)
class _Factors:
    """How sensitivities pass the product of two functions of the same tokens.

    Attributes:
        factors: second moments of each one's other factor.
        units: how many entries that it multiplies a feature of each gathers gradients of.
    """

    parts: tuple[Response, ...]
    factors: tuple[Matrix, Matrix]
    units: tuple[Any, Any]

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        steps = [part.gradient_adjoint(sensitivity) for part in self.parts]
        onward, exposures, noises, coherences = zip(*steps, strict=True)
        back = [
            per_pair(unit) * factor * one
            for unit, factor, one in zip(self.units, self.factors, onward, strict=True)
        ]
        return GradientAdjoint(sum_of(back), list(exposures), sum_of(noises), coherences[0])

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        steps = [
            part.signal_adjoint(factor * sensitivity, exposed)
            for part, factor, exposed in zip(self.parts, self.factors, exposure, strict=True)
        ]
        return SignalAdjoint(*map(sum_of, zip(*steps, strict=True)))
