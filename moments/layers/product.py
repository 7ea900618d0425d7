"""Entrywise product of two tensors with independent matrices.

Second moments multiply, and the gradient at either factor is the output's times the other factor's
second moments. For instance gated attention, y = attention(x) * sigmoid(x W_g), with a gate per
entry or per head. See docs/theory/latent_attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..engine.composition import Component
from ..engine.directions import knows_directions, with_alignment
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap
from ..engine.response import (
    GradientAdjoint,
    GradientUnits,
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
    """first(x) * gate(x).

    Attributes:
        first: of mean 0, Gaussian given its input.
        gate: the other factor, with as many features or fewer.
        each: features of the first that share a gate; 1: every entry has its own.
        label: site of the product.
        laws: of the gate's activation, to propagate the gradient's alignment with the signal
            through the product; None: alignment is not propagated.
    """

    first: Component
    gate: Component
    each: float = 1.0
    label: str = "attention.gated"
    laws: ComponentLaws | None = None

    def propagate(self, signal: Signal, run: Run) -> Record:
        records = self.first.propagate(signal, run), self.gate.propagate(signal, run)
        output = self._product(*(record.output for record in records))
        return run.record_forward(Record(self, run.layer, signal, output, records))

    def _product(self, first: Signal, gate: Signal) -> Signal:
        square, kernel = gate.second_moment(), first.kernel
        fluctuation, (excess, _) = None, kernel.lift(gate.kurtosis - 1.0)
        if first.fluctuation is not None:
            # Fluctuations of the first factor, and E g^4 - E^2 g^2 of the gates, which groups of
            # features share.
            both = kernel * kernel * square * square
            of_token, of_pair = both.lift((2.0 + self.each) / first.width)
            excess_i, excess_j = both.over_tokens(excess + 0.0 * kernel.diagonal)
            added = both.weighted(excess * of_token, 0.5 * (excess_i + excess_j) * of_pair)
            norms, overlaps, _, shared, drawn = first.fluctuation
            if shared is not None:
                shared = (shared[0] * square, shared[1] * square)
            fluctuation = Fluctuation(
                norms * square * square + added,
                None if overlaps is None else overlaps * square * square + added,
                shared=shared,
                drawn=drawn,
            )
        return first.replace(
            kernel=kernel * square,
            kurtosis=first.kurtosis * gate.kurtosis,
            fluctuation=fluctuation,
            notes=first.notes + gate.notes,
        )

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        (first, gate), length = record.children, gradient.seq_len
        to_first = gradient.kernel * gate.output.second_moment()
        to_gate = (gradient.kernel * first.output.kernel).scaled(self.each)
        if self.laws and record.output.fluctuation is not None and knows_directions(gradient):
            entering = gate.children[0].output
            law, (values, _) = self.laws.under("refined")["alignment"], bind(entering, {})
            slopes = faintly(law, entering.algebra, values)
            to_first = with_alignment(to_first, record.output, gradient, gate.output.kurtosis)
            to_gate = with_alignment(to_gate, record.output, gradient, 3.0 * slopes)
        back = (
            first.backward(Gradient(to_first, length, norm_response=gradient.norm_response), run),
            gate.backward(Gradient(to_gate, length), run),
        )
        grad_in = sum_of([factor.grad_in.kernel for factor in back])
        return record.completed(gradient, Gradient(grad_in, length), back)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return walk.through(record.children[0], at)  # that of the gates is neglected

    def response(self, record: Record, around: GradientUnits) -> Response:
        first, gate = record.children
        parts = tuple(child.component.response(child, around) for child in record.children)
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
    """Adjoint maps of the product of two functions of the same tokens.

    Attributes:
        parts: of both functions.
        factors: second moments of the other factor of each.
        units: for each, entries of the product per feature.
    """

    parts: tuple[Response, ...]
    factors: tuple[Matrix, Matrix]
    units: tuple[Any, Any]

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        steps = [part.gradient_adjoint(sensitivity) for part in self.parts]
        onward, exposures, noises, coherences = zip(*steps, strict=True)
        back = [
            per_pair(unit) * factor * adjoint
            for unit, factor, adjoint in zip(self.units, self.factors, onward, strict=True)
        ]
        return GradientAdjoint(sum_of(back), list(exposures), sum_of(noises), coherences[0])

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        steps = [
            part.signal_adjoint(factor * sensitivity, exposed)
            for part, factor, exposed in zip(self.parts, self.factors, exposure, strict=True)
        ]
        return SignalAdjoint(*map(sum_of, zip(*steps, strict=True)))
