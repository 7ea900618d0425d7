"""Attention's output times a gate of what attention reads.

y = attention(x) * sigmoid(x W_g), entry by entry or a number per head. The gate's matrix is
independent of attention's, so that second moments multiply, and a gradient reaches either factor by
the other's. See docs/theory/latent_attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engine.composition import Component
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap
from ...engine.response import (
    Around,
    GradientAdjoint,
    Matrix,
    Response,
    SignalAdjoint,
    matrix_of,
    per_pair,
    sum_of,
)
from ...engine.state import Array, Fluctuation, Gradient, Signal
from ...engine.trace import Record, Run


@dataclass(frozen=True)
class GatedHeads(Component):
    """Concatenated heads times a gate, both of the same tokens.

    Attributes:
        heads: gives the heads, of mean 0.
        gate: gives what they are multiplied by: as many features, or one per head.
        each: features of a head that share a gate; 1: every entry has its own.
        label: site of the product.
    """

    heads: Component
    gate: Component
    each: float = 1.0
    label: str = "attention.gated"

    def propagate(self, signal: Signal, run: Run) -> Record:
        records = self.heads.propagate(signal, run), self.gate.propagate(signal, run)
        output = product(records[0].output, records[1].output, self.each)
        return run.passed(Record(self, run.layer, signal, output, records))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        heads, gate = record.children
        grad_out, length = gradient.kernel, gradient.seq_len
        back = (
            heads.backward(Gradient(grad_out * gate.output.second_moment(), length), run),
            gate.backward(
                Gradient((grad_out * heads.output.kernel).scaled(self.each), length), run
            ),
        )
        grad_in = sum_of([one.grad_in.kernel for one in back])
        return record.completed(gradient, Gradient(grad_in, length), back)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return walk.through(record.children[0], at)  # of the gates, which hardly vary, nothing

    def response(self, record: Record, around: Around) -> Response:
        heads, gate = record.children
        parts = tuple(one.component.response(one, around) for one in record.children)
        of_gate = matrix_of(gate.output.second_moment(), gate.output.seq_len)
        of_heads = matrix_of(heads.output.kernel, heads.output.seq_len)
        return _Product(parts, (of_gate, of_heads), (1.0, self.each))

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        return record.children[0].paths()

    @property
    def children(self) -> tuple[Component, ...]:
        return self.heads, self.gate

    def with_children(self, children: tuple[Component, ...]) -> GatedHeads:
        return GatedHeads(children[0], children[1], self.each, self.label)


def product(signal: Signal, gate: Signal, each: float = 1.0) -> Signal:
    """Of features of mean 0 and independent gates, each of which so many of them share."""
    square, kernel, fluctuation = gate.second_moment(), signal.kernel, None
    if signal.fluctuation is not None:
        # Of independent features: the signal's, and E g^4 - E^2 g^2 of the gates.
        both = kernel * kernel * square * square
        added = both.weighted(*both.lift((gate.kurtosis - 1.0) * (2.0 + each) / signal.width))
        norms, overlaps, _, shared = signal.fluctuation
        if shared is not None:
            shared = (shared[0] * square, shared[1] * square)
        fluctuation = Fluctuation(
            norms * square * square + added,
            None if overlaps is None else overlaps * square * square + added,
            shared=shared,
        )
    return signal.replace(
        kernel=kernel * square,
        kurtosis=signal.kurtosis * gate.kurtosis,
        fluctuation=fluctuation,
        notes=signal.notes + gate.notes,
    )


@dataclass(frozen=True)
class _Product:
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
