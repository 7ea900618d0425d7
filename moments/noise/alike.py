"""Stacks of exchangeable tokens, whose layers of one structure are evaluated together; and the
covariance of tokens of different sequences.

Memories of an encoder's texts are assumed to covary as two tokens of one text do; memories of other
inputs not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import Layer
from ..engine.layout import SequenceLayout
from ..engine.response import GradientUnits, Sublayer, matrix_of, trace_of
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.structure import fields_of, flattened, joined
from ..engine.trace import Record, Run, Trace
from .network import Group

ENDLESS = 10**9
"""Length of a sequence in whose averages a single token has no weight."""

_KERNEL_FIELDS = ("diagonal", "off_diagonal")
_ZERO_OR_NOT = ("off_diagonal", "norm_response")


class ExchangeableStack(NamedTuple):
    """A stack of exchangeable tokens, or of averaged ones.

    Attributes:
        entering: the signal that enters layer 1.
        passing: for each layer the signal at its input and the gradient at its output.
        memory: the signal that cross-attention reads; None: there is no cross-attention.
    """

    entering: Signal
    passing: Sequence[tuple[Signal, Gradient]]
    memory: Signal | None

    @classmethod
    def from_trace(cls, trace: Trace) -> ExchangeableStack:
        """The stack of a trace, averaged over tokens where these are resolved."""
        passing, memory = trace.passing(), trace.memory
        length = trace.entering.seq_len
        if trace.entering.resolved:
            passing = [
                (_of_signal(signal), Gradient(averaged_tokens(gradient.kernel, length), length))
                for signal, gradient in passing
            ]
            memory = None if memory is None else _of_signal(memory)
        passing = [(signal.replace(notes=()), gradient) for signal, gradient in passing]
        return cls(passing[0][0], passing, memory and memory.replace(notes=()))

    def sublayers(self, layers: Sequence[Layer]) -> list[tuple[Group, Record]]:
        """The parts of all layers, grouped by structure, with the records of both passes.

        Positional components are removed, as exchangeable tokens have no positions.
        """
        starts, by_structure = sublayer_starts(layers), dict[Any, list[int]]()
        distinct = {id(layer.body): layer.body for layer in layers}  # most layers share one body
        bodies = {key: body.without_positions() for key, body in distinct.items()}
        structures = {key: structure(body) for key, body in bodies.items()}
        for n, (layer, (signal, gradient)) in enumerate(zip(layers, self.passing, strict=True)):
            key = structures[id(layer.body)], structure(signal), structure(gradient)
            by_structure.setdefault(key, []).append(n)
        memory, result = None if self.memory is None else stacked([self.memory]), []
        for numbers in by_structure.values():
            body = stacked([bodies[id(layers[n].body)] for n in numbers])
            signals, gradients = (stacked([self.passing[n][i] for n in numbers]) for i in (0, 1))
            record = body.propagate(signals, Run(memory)).backward(gradients)
            for position, one in enumerate(record.in_order()):
                places = [starts[n] + position for n in numbers]
                axes = one.input.kernel.diagonal, one.grad_in.kernel.diagonal
                shape = np.broadcast_shapes(*map(np.shape, axes))
                result.append((Group(sublayer_of(one, shape), places, True), one))
        return result


def sublayer_of(record: Record, shape: tuple[int, ...]) -> Sublayer:
    """The response of a part, for configurations of this shape."""
    unit = trace_of(matrix_of(record.grad_in.kernel, record.input.seq_len))
    return GradientUnits(np.broadcast_to(unit, shape)).part(record)


def across_sequences(
    layers: Sequence[Layer], trace: Trace, variances: Sequence[Array]
) -> list[Array]:
    """Covariance of two tokens of different sequences, before every part and behind the last.

    It starts at 0 for independent inputs, at that of two tokens of one sequence for embedded texts,
    and grows by the mean of the activations, which all tokens share.

    Args:
        variances: of a token before every part.
    """
    embedded = trace.embedding is not None
    entering = averaged_tokens(trace.entering.kernel, trace.entering.seq_len)
    covariance = entering.off_diagonal if embedded else 0.0 * entering.off_diagonal
    width, memory = trace.entering.width, None
    if trace.memory is not None:
        tokens = averaged_tokens(trace.memory.second_moment(), trace.memory.seq_len)
        kernel = Kernel(tokens.diagonal, tokens.off_diagonal * float(embedded))
        memory = Signal(kernel, ENDLESS, width=trace.memory.width)
    parts = [part for layer in layers for part in layer.body.apart().in_order()]
    result = [covariance]
    for part, variance in zip(parts, variances, strict=True):
        signal = Signal(Kernel(0.0 * covariance + variance, covariance), ENDLESS, width=width)
        covariance = part.propagate(signal, Run(memory)).output.kernel.off_diagonal
        result.append(covariance)
    return result


def sublayer_starts(layers: Sequence[Layer]) -> list[int]:
    """Index of the first part of each layer, and the number of all parts."""
    return [0, *np.cumsum([len(layer.body.in_order()) for layer in layers]).tolist()]


# --- stacking values of one structure -------------------------------------------------------------


def structure(value: Any) -> Any:
    """A hashable key: values with equal keys can be `stacked`.

    It holds everything but numbers, and which numbers are 0, as 0 often switches a formula; not so
    for off-diagonal entries and norm responses, of which sweeps have zeros and other values.
    """
    numbers: list[Any] = []
    result = flattened(value, numbers, axes=True)
    pairs = zip(fields_of(result), numbers, strict=True)
    return result, tuple(name in _ZERO_OR_NOT or not np.any(number) for name, number in pairs)


def stacked(values: Sequence[Any]) -> Any:
    """Join values of one structure on a last axis of their numbers; equal numbers outside kernels
    get no such axis."""
    first = values[0]
    same = len(values) > 1 and all(value is first for value in values)
    return joined(values[:1] if same else values, _on_last_axis)


def _on_last_axis(field: str, numbers: tuple[Any, ...]) -> Any:
    if field in _KERNEL_FIELDS or any(isinstance(number, np.ndarray) for number in numbers):
        return np.stack(np.broadcast_arrays(*numbers), axis=-1)
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers)


def averaged_tokens(kernel: Kernel, seq_len: int) -> Kernel:
    """The kernel of exchangeable tokens, averaged over the tokens of each sequence."""
    if not kernel.resolved:
        return kernel
    several = kernel.resolved is True and seq_len > 1
    sequences = kernel.off_diagonal.shape[-1] // seq_len if several else 1
    return Kernel(*SequenceLayout(sequences).token_average(kernel))


def _of_signal(signal: Signal) -> Signal:
    kernel = averaged_tokens(signal.second_moment(), signal.seq_len)
    return Signal(kernel, signal.seq_len, width=signal.width, fluctuation=Fluctuation.fixed(kernel))
