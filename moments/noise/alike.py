"""Tokens alike: layers of one structure at once; and what sequences share of one draw.

Cross-attention asks nothing of a sequence beyond its own memory. Memories of texts read by one
embedding are taken to share what two of their own tokens do; those of other inputs, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import Layer
from ..engine.layout import SequenceLayout
from ..engine.response import Around, Sublayer, matrix_of, trace_of
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.structure import fields_of, flattened, joined
from ..engine.trace import Record, Run, Trace
from .network import ExchangeableWalk, Group

ENDLESS = 10**9
"""Tokens of a sequence whose averages hold nothing of a single token."""

_OF_KERNELS = ("diagonal", "off_diagonal")
_EITHER = ("off_diagonal", "norm_response")


class Alike(NamedTuple):
    """A stack whose tokens are alike, or as they are on average.

    Attributes:
        entering: what enters layer 1.
        passing: what enters every layer, and the gradient that its output receives.
    """

    entering: Signal
    passing: Sequence[tuple[Signal, Gradient]]
    memory: Signal | None

    @classmethod
    def of(cls, trace: Trace) -> Alike:
        """Of a trace, averaged where it is resolved."""
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
        """Of all layers, those of one structure at once, with the record of both passes.

        Positions that distinguish no tokens are left out, as by token.
        """
        starts, alike = sublayer_starts(layers), dict[Any, list[int]]()
        distinct = {id(layer.body): layer.body for layer in layers}  # most layers share one body
        bodies = {key: body.unplaced() for key, body in distinct.items()}
        kinds = {key: structure(body) for key, body in bodies.items()}
        for n, (layer, (signal, gradient)) in enumerate(zip(layers, self.passing, strict=True)):
            key = kinds[id(layer.body)], structure(signal), structure(gradient)
            alike.setdefault(key, []).append(n)
        memory, result = None if self.memory is None else stacked([self.memory]), []
        for numbers in alike.values():
            body = stacked([bodies[id(layers[n].body)] for n in numbers])
            signals, gradients = (stacked([self.passing[n][i] for n in numbers]) for i in (0, 1))
            record = body.propagate(signals, Run(memory)).backward(gradients)
            for position, one in enumerate(record.in_order()):
                places = [starts[n] + position for n in numbers]
                axes = one.input.kernel.diagonal, one.grad_in.kernel.diagonal
                shape = np.broadcast_shapes(*map(np.shape, axes))
                result.append((Group(sublayer_of(one, shape), places, True), one))
        return result

    def walk(self, layers: Sequence[Layer]) -> ExchangeableWalk:
        """Through all of them."""
        return ExchangeableWalk([group for group, _ in self.sublayers(layers)])


def sublayer_of(record: Record, shape: tuple[int, ...]) -> Sublayer:
    """What a part does, in as many configurations."""
    unit = trace_of(matrix_of(record.grad_in.kernel, record.input.seq_len))
    return Around(np.broadcast_to(unit, shape)).part(record)


def across_sequences(
    layers: Sequence[Layer], trace: Trace, variances: Sequence[Array]
) -> list[Array]:
    """Covariance of two tokens of different sequences before every part and after the last.

    Independent inputs start at 0, texts read by one embedding as two tokens of one sequence. What
    grows from there is the mean of the activations, which all tokens share. `variances` are those
    of a token, before every part.
    """
    embedded = trace.embedding is not None
    entering = averaged_tokens(trace.entering.kernel, trace.entering.seq_len)
    overlap = entering.off_diagonal if embedded else 0.0 * entering.off_diagonal
    width, memory = trace.entering.width, None
    if trace.memory is not None:
        read = averaged_tokens(trace.memory.second_moment(), trace.memory.seq_len)
        kernel = Kernel(read.diagonal, read.off_diagonal * float(embedded))
        memory = Signal(kernel, ENDLESS, width=trace.memory.width)
    parts = [part for layer in layers for part in layer.body.apart().in_order()]
    result = [overlap]
    for part, variance in zip(parts, variances, strict=True):
        tokens = Signal(Kernel(0.0 * overlap + variance, overlap), ENDLESS, width=width)
        overlap = part.propagate(tokens, Run(memory)).output.kernel.off_diagonal
        result.append(overlap)
    return result


def sublayer_starts(layers: Sequence[Layer]) -> list[int]:
    """Number of parts before each layer, and in all: where the points of the stream lie."""
    return [0, *np.cumsum([len(layer.body.in_order()) for layer in layers]).tolist()]


# --- many as one ----------------------------------------------------------------------------------


def structure(value: Any) -> Any:
    """What values must share to be evaluated at once with arrays for numbers: everything else, and
    which numbers vanish, since 0 often says that there is nothing. Where two tokens share nothing,
    or a gradient does not answer to norms, it is a number like others: sweeps hold both at once."""
    numbers: list[Any] = []
    result = flattened(value, numbers, axes=True)
    pairs = zip(fields_of(result), numbers, strict=True)
    return result, tuple(name in _EITHER or not np.any(number) for name, number in pairs)


def stacked(values: Sequence[Any]) -> Any:
    """One value of that structure, whose numbers have `values` on a last axis; numbers outside
    kernels that agree stay as they are."""
    first = values[0]
    same = len(values) > 1 and all(value is first for value in values)
    return joined(values[:1] if same else values, _on_last_axis)


def _on_last_axis(field: str, numbers: tuple[Any, ...]) -> Any:
    if field in _OF_KERNELS or any(isinstance(number, np.ndarray) for number in numbers):
        return np.stack(np.broadcast_arrays(*numbers), axis=-1)
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers)


def averaged_tokens(kernel: Kernel, seq_len: int) -> Kernel:
    """Of tokens alike: averages over those of one sequence."""
    if not kernel.resolved:
        return kernel
    several = kernel.resolved is True and seq_len > 1
    sequences = kernel.off_diagonal.shape[-1] // seq_len if several else 1
    return Kernel(*SequenceLayout(sequences).token_average(kernel))


def _of_signal(signal: Signal) -> Signal:
    kernel = averaged_tokens(signal.second_moment(), signal.seq_len)
    return Signal(kernel, signal.seq_len, width=signal.width, fluctuation=Fluctuation.fixed(kernel))
