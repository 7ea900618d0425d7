"""Both passes through one stack of layers with its embedding and head."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.classes import MOST_WINDOWS, PositionClasses
from ..engine.composition import Chain
from ..engine.layout import SequenceLayout, check_documents, spans
from ..engine.response import sum_of
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ..engine.texts import TextClasses
from ..engine.trace import Point, Record, Run, Trace, with_top_gradient
from ..errors import DomainError, domain_error
from ..formulas.checks import NONNEGATIVE, POSITIVE, Interval, check_array, check_interval
from ..formulas.law import Theory
from ..layers.architecture import declare, declare_embedding, declare_output
from ..layers.embedding import (
    FixedPart,
    SameRow,
    check_ids,
    embedding_gradients,
    fixed_positions,
    text_kernel,
)
from ..layers.head.output import OutputMoments, output_moments
from ..layers.images import ReadsPixels, entering, image_gradients
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..model.values import ROWS
from .gate import Gate, breakdown, validity_warnings
from .result import Prediction


@dataclass(frozen=True, eq=False)
class Inputs:
    """The user's description of the tensor that enters layer 1 (arguments of `predict`); `texts` is
    the number of sequences if they are not given."""

    variance: Any = None
    correlation: Any = None
    token_ids: Any = None
    segment_ids: Any = None
    pixels: Any = None
    kernel: Any = None
    attention_mask: Any = None
    document_ids: Any = None
    texts: int = 1

    @property
    def by_token(self) -> bool:
        """Whether anything is given per token."""
        masks = (self.attention_mask, self.document_ids)
        given = (self.token_ids, self.pixels, self.kernel, *masks)
        return any(value is not None for value in given)

    @property
    def given_by_token(self) -> bool:
        """Whether more than words and document boundaries distinguishes single tokens."""
        segments = self.segment_ids is not None and np.ptp(np.asarray(self.segment_ids)) != 0
        return segments or any(value is not None for value in (self.pixels, self.kernel))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the configurations."""
        if self.kernel is not None:
            return given_shape(self.kernel)[:-2]
        given = {"variance": self.variance, "correlation": self.correlation}
        return configurations(**{name: given_shape(v) for name, v in given.items()})

    @property
    def sequences(self) -> int:
        """Number of texts or images."""
        for name, rank in (("token_ids", 2), ("pixels", 4)):
            shape = given_shape(getattr(self, name))
            if len(shape) == rank:
                return shape[0]
        return self.texts

    def times(self, count: int) -> Inputs:
        """The inputs of `count` sequences: a single one is repeated; unknown texts differ."""
        if self.sequences == count:
            return self
        result = {name: repeated(getattr(self, name), rank, count) for name, rank in RANKS.items()}
        return dataclasses.replace(self, texts=count, **result)

    @property
    def moments(self) -> bool:
        """Whether moments of the tensor are given, instead of the input of an embedding."""
        return any(v is not None for v in (self.variance, self.correlation, self.kernel))


RANKS = {
    "token_ids": 2,
    "segment_ids": 2,
    "attention_mask": 2,
    "document_ids": 2,
    "pixels": 4,
}
"""Number of axes of inputs that are given per sequence."""


def repeated(value: Any, rank: int, count: int) -> Any:
    """Repeat the array of a single sequence; other arrays are unchanged."""
    shape = given_shape(value)
    if value is None or len(shape) not in (rank - 1, rank) or (len(shape) == rank and shape[0] > 1):
        return value
    return np.repeat(np.asarray(value).reshape(1, *shape[1 - rank :]), count, axis=0)


def with_equal_sequences(inputs: Inputs, other: Inputs) -> tuple[Inputs, Inputs]:
    """Inputs of a decoder and of its encoder, with a single sequence of either repeated."""
    mine, theirs = inputs.sequences, other.sequences
    if mine != theirs and 1 not in (mine, theirs):
        raise DomainError(
            f"token_ids hold {mine} texts, and encoder_inputs {theirs}: every text of the decoder "
            "reads one of the encoder's; give as many of both, or one of either, which is repeated"
        )
    return inputs.times(max(mine, theirs)), other.times(max(mine, theirs))


@dataclass(frozen=True, eq=False)
class Outcome:
    """The gradient at the last layer's output, and the results of a head."""

    gradient: Gradient
    output: OutputMoments | None = None
    targets: Any = None


HEAD_QUANTITIES = {
    "loss": "the loss",
    "loss_stderr": "the loss's deviation",
    "logit_variance": "the logit variance",
}


class Stack:
    """One stack of layers with its embedding, and the state of both passes."""

    def __init__(
        self,
        model: Transformer,
        theory: Theory,
        inputs: Inputs,
        resolved: bool | PositionClasses,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Arguments as in `predict`; `shape` of the configurations."""
        self.model, self.theory, self.inputs, self.resolved = model, theory, inputs, resolved
        self.shape = shape
        self.run = Run()
        self._embedding: Record | None = None
        self._layers: Record | None = None
        self._ending: Record | None = None
        self._logits: Point | None = None
        self.notes: tuple[str, ...] = ()
        tokens = model.seq_len * (inputs.sequences if resolved else 1)
        positions = 0
        if isinstance(resolved, PositionClasses):
            tokens, positions = len(resolved.nodes), model.seq_len
        self.rows = tokens if resolved else 1
        check_memory(model, bool(resolved), math.prod(shape), tokens, positions)
        mask = inputs.attention_mask
        real = None if mask is None else check_mask(mask, model.seq_len, inputs.token_ids)
        self.documents = _documents(model, inputs, real)
        self.classes = resolved if isinstance(resolved, PositionClasses) else None
        self.counted = self.classes  # over whose documents a loss is averaged
        self.ids = inputs.token_ids
        if isinstance(self.classes, TextClasses) and self.classes.ids is not None:
            self.ids = self.classes.ids
        self.first = self._first(real)
        if resolved and self.first.off_diagonal.shape[:-2] != shape:
            if inputs.sequences > 1:
                raise DomainError(
                    f"gradients of {math.prod(shape)} configurations for {inputs.sequences} "
                    "sequences that share the weights: give one grad_variance, or one sequence"
                )
            self.first = _spread(self.first, shape)
        self.layout = self._layout(real)

    def _layout(self, real: np.ndarray | None) -> SequenceLayout:
        sequences = 1
        if self.resolved is True:
            sequences = self.first.off_diagonal.shape[-1] // self.model.seq_len
            if real is not None and sequences > 1:
                real = np.broadcast_to(real, (sequences, self.model.seq_len))
        if self.classes is not None and len(self.classes.document_lengths) > 1:
            sequences = self.inputs.sequences
        return SequenceLayout(sequences, real, self.documents, self.classes)

    def set_encoder(self, encoder: Stack) -> None:
        """Let cross-attention read an encoder, after the encoder's forward pass."""
        self.run.memory = encoder.read()
        self.layout = dataclasses.replace(self.layout, memory=encoder.layout.padding)

    def alone(self) -> Stack:
        """The stack of a single document with the average kernel of all documents."""
        documents = self.classes
        assert documents is not None
        first, one = (
            documents.within_block(self.first.diagonal, self.first.off_diagonal),
            documents.one_document_with_words,
        )
        result = copy.copy(self)
        result.resolved = result.classes = one
        result.first = Kernel(*first, one)
        result.layout = SequenceLayout(classes=one)
        result.run = Run()
        result._embedding = result._layers = result._ending = result._logits = None
        return result

    def _first(self, real: np.ndarray | None) -> Kernel:
        """The kernel of the tables' sum, or of the tensor that enters layer 1."""
        source = self.resolved, self.inputs, self.ids, self.documents
        one = first_kernel(self.model, self.theory, *source)
        if self.resolved is True and real is not None:
            one = _with_padding_variance(one, real)
        length, texts = self.model.seq_len, self.inputs.sequences
        if self.resolved is not True or texts == 1 or one.off_diagonal.shape[-1] != length:
            return one
        off_diagonal = np.tile(one.off_diagonal, (texts, texts))
        if not self.inputs.moments:
            # Tokens at one position of two unknown texts share only the row of the position table.
            embedding = self.model.embedding
            assert isinstance(embedding, Embedding)
            patterns = SameRow.of(embedding, length, theory=self.theory)
            tables = patterns.kernel(embedding)
            unshared = tables.diagonal - tables.off_diagonal - embedding.position_variance
            off_diagonal = off_diagonal - unshared * np.kron(1.0 - np.eye(texts), np.eye(length))
        return Kernel.of_matrix(off_diagonal)

    def enter(self) -> Signal:
        """The signal that enters layer 1."""
        model, theory = self.model, self.theory
        fixed = None
        read = model.embedding is not None and not self.inputs.moments
        if read and isinstance(model.embedding, Embedding):
            sequences = self.layout.sequences
            fixed = placed_positions(model, self.resolved, sequences, self.documents)
        elif read:
            fixed = _of_image(model, self.inputs)[1]
        width = model.d_model
        if read and isinstance(model.embedding, Embedding):
            width = model.embedding.table_width(width)
        signal = gaussian(self.first, model.seq_len, width, theory == "refined", fixed)
        if model.embedding is not None and read:
            rest = declare_embedding(model.embedding, model, theory)
            self._embedding = rest.propagate(signal, self.run)
            signal = self._embedding.output
        tables = any(one is not None and one.table for one in model.value_sources)
        if tables or model.per_layer_embedding is not None:
            self.run.kept[ROWS] = self._rows()
        self._entering = signal
        return signal

    def _rows(self) -> Kernel:
        """Second moments of the rows that tokens look up in a table of unit variance."""
        length = self.model.seq_len
        assert isinstance(self.model.embedding, Embedding)
        table = Embedding(self.model.embedding.vocab_size, 1.0)
        if isinstance(self.classes, TextClasses):
            return text_kernel(table, length, resolved=self.classes)
        if self.resolved is True and self.ids is not None:
            return text_kernel(table, length, self.ids)
        of_text = text_kernel(table, length, self.ids, resolved=False, theory=self.theory)
        repeated = of_text.off_diagonal
        tokens = self.first.off_diagonal.shape[-1] if self.resolved is True else length
        return exchangeable_kernel(1.0, repeated, tokens, self.resolved)

    def forward(self) -> Signal:
        """Run the forward pass; returns the last layer's output."""
        signal = self.enter()
        self.run.reached.append(Point(0, "stream", signal))
        self._layers = self.declaration().propagate(signal, self.run)
        return self._layers.output

    def declaration(self) -> Chain:
        """The layers as components."""
        return declare(self.model, self.theory, *self.layout.places)

    def backward(self, outcome: Outcome) -> None:
        """Run the backward pass, from the last layer's output to the embedding tables."""
        assert self._layers is not None
        gradient, output = outcome.gradient, outcome.output
        self._layers = self._layers.backward(gradient, self.run)
        if self._embedding is not None:
            self._embedding = self._embedding.backward(self._layers.grad_in, self.run)
        if output is None:
            return
        self._ending, self._logits = output.record, output.logits
        if output.radial is not None:
            # A measured gradient includes the component that the last normalisation removes.
            measured = Gradient(gradient.kernel + output.radial, self.model.seq_len)
            self._layers = with_top_gradient(self._layers, measured)

    def read(self) -> Signal:
        """The signal that a decoder's cross-attention reads."""
        assert self._layers is not None
        self.run.layer = self.model.layers + 1
        reading = declare_output(self.model, self.theory)
        self._ending = reading.propagate(self._layers.output, self.run)
        return self._ending.output

    def read_back(self, gradients: list[Gradient]) -> Outcome:
        """The gradient at an encoder's last layer, from those of the decoder's layers."""
        assert self._ending is not None
        total = sum_of([gradient.kernel for gradient in gradients])
        self._ending = self._ending.backward(Gradient(total, self.model.seq_len), self.run)
        return Outcome(self._ending.grad_in)

    @property
    def trace(self) -> Trace:
        """Both passes, as far as they have run."""
        records = self._layers, self._embedding, self._ending, self._logits
        return Trace(self._entering, *records, self.run.kept)

    def prediction(
        self,
        batch: int,
        outcome: Outcome,
        encoder: Prediction | None,
        top: Any = None,
        alone: Any = None,
    ) -> Prediction:
        """The prediction, after both passes; `top` and `alone` as in `Prediction`."""
        model, trace, layout, output = self.model, self.trace, self.layout, outcome.output
        variance, correlation, grad_variance, grad_correlation = self._stream_moments(trace)
        notes = validity_warnings(model, self.theory, trace) + self.notes
        if output is not None:
            notes += output.notes
        gate = Gate(self.theory, notes, layout.fewest(model.seq_len))
        gate.variance("the variance of the stream", variance)
        correlation = gate.correlation("the correlation of the stream", correlation)
        grad_variance = gate.variance("the gradient variance of the stream", grad_variance)
        grad_correlation = gate.correlation("the gradient correlation", grad_correlation)
        gate.sites(trace.points)
        token_variance, token_grad_variance = None, None
        if self.resolved:
            token_variance, token_grad_variance = _by_token(trace.stream(), layout)
            gate.parts("the variance of single tokens", token_variance)
            token_grad_variance = gate.parts("single tokens' gradients", token_grad_variance)
        of_head: dict[str, Any] = {}
        if output is not None:
            for name, what in HEAD_QUANTITIES.items():
                value = gate.variance(what, getattr(output, name))
                scalar = np.ndim(value) == 0
                of_head[name] = float(value) if scalar else np.asarray(value, dtype=float)
        notes += tuple(gate.notes)
        if encoder is not None:
            notes = (*(f"encoder, {note}" for note in encoder.warnings), *notes)
        embedded = None if self._embedding is None else self._embedding.grad_in
        return Prediction(
            model,
            self.theory,
            variance,
            correlation,
            grad_variance,
            grad_correlation,
            token_variance,
            token_grad_variance,
            notes,
            trace,
            layout,
            batch,
            **of_head,
            encoder=encoder,
            outer_weights=OuterWeights(
                model, self.inputs, embedded, output, self.documents, outcome.targets
            ),
            top=top if output is None else functools.partial(head_top, output),
            alone=alone,
        )

    def _stream_moments(self, trace: Trace) -> np.ndarray:
        """(4, ..., N + 1) `QUANTITIES` of the stream; DomainError if one is not finite."""
        columns: list[Any] = [self.layout.moments(point)[1:] for point in trace.stream()]
        if any(np.ndim(one) for column in columns for one in column):
            columns = [np.broadcast_arrays(*column) for column in columns]
        moments = np.moveaxis(np.array(columns, dtype=float), 0, -1)
        if not np.all(np.isfinite(moments)):
            raise breakdown(self.theory, [trace])
        return moments


@dataclass(frozen=True, eq=False)
class OuterWeights:
    """The embedding and the head: the gradient at the sum of the tables, the head's output, the
    document of every token (None if each row is one document), and the targets as given."""

    model: Transformer
    inputs: Inputs
    gradient: Gradient | None
    output: OutputMoments | None
    documents: np.ndarray | None
    targets: Any

    @property
    def ending(self) -> tuple[Any, Any] | None:
        """The components before the matrix to the logits, and its readout; None without a loss."""
        return None if self.output is None else self.output.ending

    def rows(self) -> list[tuple[int, str, Array]]:
        """Squared gradient norms (layer, name, norm) of layers 0 and N + 1."""
        model, inputs, output = self.model, self.inputs, self.output
        embedding, gradient = model.embedding, self.gradient
        norms: dict[str, Array] = {}
        if gradient is not None and inputs.pixels is not None:
            norms = image_gradients(embedding, inputs.pixels, model.d_model, gradient.kernel)
        elif gradient is not None and isinstance(embedding, Embedding):
            norms = embedding_gradients(
                embedding,
                model.seq_len,
                embedding.table_width(model.d_model),
                gradient.kernel,
                inputs.token_ids,
                inputs.segment_ids,
                self.documents,
            )
        if output is not None and "token" in norms:
            norms["token"] = norms["token"] + output.table()
        head = {} if output is None else output.weights()
        result = [(0, name, norm) for name, norm in norms.items()]
        return result + [(model.layers + 1, name, norm) for name, norm in head.items()]


def last_gradient(
    stack: Stack,
    signal: Signal,
    variance: Any,
    correlation: Any,
    kernel: Any,
    targets: Any,
    batch: int,
) -> Outcome:
    """The gradient at the last layer: the given moments, or the gradient of the head's loss."""
    model, layout = stack.model, stack.layout
    given = any(value is not None for value in (variance, correlation, kernel))
    if model.head is not None and stack.theory == "refined":
        output = output_moments(
            model,
            signal,
            run=stack.run,
            stack=stack.trace.stack,
            token_ids=stack.ids,
            counted=stack.counted,
            targets=targets,
            real=layout.numbers,
            batch=batch,
        )
        if output.gradient is not None and not given:
            return Outcome(output.gradient, output, targets)
    elif targets is not None:
        raise DomainError("targets are what a head predicts: declare model.head")
    last = last_kernel(model, stack.resolved, variance, correlation, kernel, layout.sequences)
    leading = np.shape(stack.first.off_diagonal)[:-2]
    if stack.resolved and leading != last.off_diagonal.shape[:-2]:
        last = _spread(last, leading)
    if layout.real is not None and layout.classes is None:
        real = layout.real.reshape(-1) if layout.sequences > 1 else layout.real
        real = real[0] if real.ndim == 2 else real
        last = Kernel.of_matrix(last.off_diagonal * real[..., :, None] * real[..., None, :])
    return Outcome(Gradient(last, model.seq_len))


def _spread(kernel: Kernel, shape: tuple[int, ...]) -> Kernel:
    """The kernel broadcast to all configurations."""
    diagonal = np.broadcast_to(kernel.diagonal, (*shape, kernel.diagonal.shape[-1]))
    off_diagonal = np.broadcast_to(kernel.off_diagonal, (*shape, *kernel.off_diagonal.shape[-2:]))
    return Kernel(diagonal, off_diagonal, kernel.resolved)


def head_top(output: OutputMoments | None) -> Any:
    """The head as the source of the last gradient (`noise.band`); None without a loss."""
    if output is None or output.ending is None:
        return None
    _, readout = output.ending
    from ..noise.sources import HeadTop

    return HeadTop(readout)


def document_spans(model: Transformer, inputs: Inputs) -> np.ndarray | None:
    """`layout.spans` of all sequences or documents."""
    mask = inputs.attention_mask
    real = None if mask is None else check_mask(mask, model.seq_len, inputs.token_ids)
    documents = _documents(model, inputs, real)
    numbers = real if documents is None else documents
    if numbers is None:
        numbers = np.ones(check_ids(inputs.token_ids, model.seq_len, "token_ids").shape)
    return spans(numbers)


def _documents(model: Transformer, inputs: Inputs, real: np.ndarray | None) -> np.ndarray | None:
    """The document of every token; None if each row is one document."""
    if inputs.document_ids is None:
        return None
    pooled = model.head is not None and model.head.loss == "classification"
    for present, other in ((model.encoder is not None, "an encoder"), (pooled, "a classifier")):
        if present:
            raise DomainError(f"document_ids pack texts of one stack by token: not with {other}")
    if inputs.pixels is not None:
        raise DomainError("document_ids pack texts: leave pixels out")
    shape: tuple[int, ...] = (model.seq_len,)
    if inputs.token_ids is not None:
        shape = check_ids(inputs.token_ids, model.seq_len, "token_ids").shape
    return check_documents(inputs.document_ids, shape, real)


# --- first signal and last gradient ---------------------------------------------------------------


def check_moments(
    prefix: str, variance: Any, correlation: Any, seq_len: int
) -> tuple[Array, Array]:
    """Validate a variance and a token correlation, shape (...,); floats where both are scalars."""
    interval = NONNEGATIVE if prefix else POSITIVE
    check_interval(f"{prefix}variance", variance, interval, "pass a variance, not a deviation")
    if seq_len == 1 and np.any(np.asarray(correlation) != 0):
        remedy = "one token has no pairs: leave it out"
        raise domain_error(f"{prefix}correlation", correlation, "0 where seq_len is 1", remedy)
    least = -1.0 / max(seq_len - 1, 1)
    check_interval(
        f"{prefix}correlation",
        correlation,
        Interval(least, 1.0),
        f"{seq_len} tokens cannot all correlate below -1/(seq_len - 1) = {least:.4g}",
    )
    if np.ndim(variance) == 0 and np.ndim(correlation) == 0:
        return float(variance), float(correlation)
    try:
        v, r = np.broadcast_arrays(np.asarray(variance, float), np.asarray(correlation, float))
    except ValueError:
        shapes = f"{np.shape(variance)} and {np.shape(correlation)}"
        raise DomainError(
            f"{prefix}variance and {prefix}correlation of shapes {shapes} must broadcast"
        ) from None
    return v, r


def exchangeable_kernel(
    variance: Array, correlation: Array, seq_len: int, resolved: bool | PositionClasses
) -> Kernel:
    """The kernel of exchangeable tokens, in any resolution."""
    if not resolved:
        return Kernel(variance, variance * correlation)
    size = len(resolved.nodes) if isinstance(resolved, PositionClasses) else seq_len
    v, c = np.asarray(variance, float), np.asarray(variance * correlation, float)
    diagonal = np.broadcast_to(v[..., None], (*v.shape, size))
    off_diagonal = np.broadcast_to(c[..., None, None], (*c.shape, size, size))
    return Kernel.of_parts(diagonal, off_diagonal, resolved)


def gaussian(
    kernel: Kernel, seq_len: int, d_model: int, spread: bool, fixed: FixedPart | None = None
) -> Signal:
    """A signal of independent Gaussian features, with norms' covariances 2 C o C / d if `spread`.

    With a fixed part, x = e + p, Cov(|x_i|^2, |x_j|^2) = 2 d E_ij^2 + 4 d E_ij P_ij =
    2 d (C_ij^2 - P_ij^2); the mean over features is that of p, and 1/d of e.
    """
    mean = 0.0 * kernel.diagonal
    signal = Signal(kernel, seq_len, mean=mean, width=d_model)
    if spread:
        drawn = kernel * kernel if fixed is None else kernel * kernel - fixed.kernel * fixed.kernel
        norms = drawn.scaled(2 / d_model)
        signal = signal.replace(fluctuation=Fluctuation(norms, norms))
    if spread and fixed is not None:
        # The part of p that is not centred is d times the square of its mean.
        signal = signal.replace(centred=fixed.kernel - fixed.common.scaled(float(d_model)))
    return signal


def check_kernel(name: str, kernel: Any, seq_len: int) -> Kernel:
    """Validate a user's positive semidefinite (..., L, L) array of second moments."""
    matrix = check_array(name, kernel, f"of shape (..., {seq_len}, {seq_len})")
    if matrix.ndim < 2 or matrix.shape[-2:] != (seq_len, seq_len):
        raise domain_error(name, f"shape {matrix.shape}", f"of shape (..., {seq_len}, {seq_len})")
    if not np.all(np.isfinite(matrix)):
        raise domain_error(name, "NaN or infinity", "finite")
    scale = np.abs(matrix).max()
    if not np.allclose(matrix, np.swapaxes(matrix, -1, -2), atol=1e-9 * scale, rtol=0):
        raise domain_error(name, "not symmetric", "symmetric in its last two axes")
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    if name == "kernel" and diagonal.min() <= 0:
        raise domain_error(name, float(diagonal.min()), "positive on its diagonal")
    if np.linalg.eigvalsh(matrix).min() < -1e-9 * scale:
        raise domain_error(name, "not positive semidefinite", "a matrix of second moments")
    return Kernel.of_matrix((matrix + np.swapaxes(matrix, -1, -2)) / 2)


def _with_padding_variance(kernel: Kernel, real: np.ndarray) -> Kernel:
    """Give padding of zero variance the mean variance, to avoid division by zero; nothing attends
    to it. `real` is (L,) or (B, L), 0 for padding."""
    is_real = np.broadcast_to(real.reshape(-1) > 0, kernel.diagonal.shape)
    empty = ~is_real & (kernel.diagonal == 0)
    if not empty.any():
        return kernel
    mean = (kernel.diagonal * is_real).sum(-1, keepdims=True) / is_real.sum(-1, keepdims=True)
    diagonal = np.where(empty, mean, kernel.diagonal)
    return Kernel.of_parts(diagonal, kernel.off_diagonal, kernel.resolved)


def given_shape(value: Any) -> tuple[int, ...]:
    """Shape of an argument; () if it is None, or no array, which is rejected elsewhere."""
    try:
        return () if value is None else np.shape(value)
    except ValueError:
        return ()


def configurations(**arrays: Any) -> tuple[int, ...]:
    """Broadcast the shapes of several arguments."""
    try:
        return np.broadcast_shapes(*arrays.values())
    except ValueError:
        given = ", ".join(f"{name} {shape}" for name, shape in arrays.items() if shape)
        raise DomainError(
            f"configurations of different shapes: {given}; arrays must broadcast"
        ) from None


NUMBERS = {True: (0, 200), False: (30_000, 300)}
"""By whether tokens are resolved: upper bounds of the numbers that a prediction and its band store
per layer, and per layer, configuration and pair of tokens."""


POSITIONS = 12
"""Numbers per position of a sequence on classes, without the token variances of `Prediction`."""


def check_memory(
    model: Transformer, resolved: bool, configurations: int, tokens: int, positions: int = 0
) -> None:
    """Raise a DomainError if a prediction would not fit into this machine's memory.

    `positions` is the length of a sequence on classes, whose variances are stored per position.
    """
    fixed, each = NUMBERS[resolved]
    pairs = float(tokens) ** 2 if resolved else 1.0
    needed = 8.0 * model.layers * (fixed + each * configurations * pairs)
    needed += 8.0 * positions * (POSITIONS + 2.0 * (model.layers + 1) * configurations)
    available = memory()
    if needed > available:
        what = f"{tokens} tokens, each with every other" if resolved else "tokens alike"
        what = f"{positions} positions" if positions else what
        windows = [window for window in model.windows if window is not None]
        most = MOST_WINDOWS * min(windows, default=model.seq_len)
        if resolved and most < model.seq_len:
            what += f" (classes of positions hold windows of {min(windows)} up to seq_len = {most})"
        raise DomainError(
            f"{model.layers} layers of {what} in {configurations} configurations need about "
            f"{needed / 2**30:.3g} GiB of memory, and {available / 2**30:.3g} GiB are there: use "
            f"fewer {'or shorter sequences (seq_len)' if resolved else 'configurations'}, "
            "or fewer layers"
        )


def memory() -> float:
    """Bytes of memory of this machine; 2**34 if unknown."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2.0**34


def check_mask(mask: Any, seq_len: int, token_ids: Any) -> np.ndarray:
    """Validate an attention mask: 0.0 and 1.0, (B, L) like token_ids, else (L,), with at least two
    real tokens per sequence."""
    real = check_array("attention_mask", mask, "0 or 1, of shape (L,) or (B, L)")
    shape = (seq_len,) if token_ids is None else check_ids(token_ids, seq_len, "token_ids").shape
    if real.shape == (seq_len,):
        real = np.broadcast_to(real, shape)
    if real.shape != shape:
        raise domain_error("attention_mask", f"shape {real.shape}", f"of shape {shape}")
    if not np.all((real == 0) | (real == 1)) or np.any(real.sum(-1) < min(2, seq_len)):
        raise domain_error("attention_mask", mask, "0 or 1, with two real tokens at least")
    return real


def first_kernel(
    model: Transformer,
    theory: Theory,
    resolved: bool | PositionClasses,
    inputs: Inputs,
    token_ids: Any,
    documents: np.ndarray | None = None,
) -> Kernel:
    """The kernel of the tensor that enters layer 1, as given or from the embedding.

    Several texts by token are one kernel (B L, B L); `token_ids` have the layout of the classes.
    """
    variance, correlation, segment_ids = inputs.variance, inputs.correlation, inputs.segment_ids
    moments_given = variance is not None or correlation is not None
    embedding = model.embedding
    if inputs.pixels is not None:
        return _of_image(model, inputs)[0]
    if inputs.kernel is not None:
        if moments_given or token_ids is not None:
            raise DomainError("kernel replaces variance, correlation and token_ids: give one")
        return check_kernel("kernel", inputs.kernel, model.seq_len)
    if token_ids is not None and (moments_given or not isinstance(embedding, Embedding)):
        raise DomainError(
            "token_ids describe the text an embedding reads: declare model.embedding and leave "
            "variance and correlation out"
        )
    if embedding is None or moments_given:
        defaults = (1.0, 0.0)
        if isinstance(embedding, Embedding) and (variance is None or correlation is None):
            defaults = embedded(model, theory)
        v, r = check_moments(
            "",
            defaults[0] if variance is None else variance,
            defaults[1] if correlation is None else correlation,
            model.seq_len,
        )
        return exchangeable_kernel(v, r, model.seq_len, resolved)
    if not isinstance(embedding, Embedding):
        raise DomainError(
            "what an embedding of pictures or sound makes depends on them: pass pixels (see "
            "moments.layers.images.photograph), or variance and correlation; an encoder's in "
            "encoder_inputs"
        )
    text = token_ids, segment_ids, model.d_model, documents, resolved, theory
    return text_kernel(embedding, model.seq_len, *text)


def embedded(model: Transformer, theory: Theory) -> tuple[float, float]:
    """Variance and correlation behind the embedding with its norm and dropout, exchangeable
    tokens."""
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    tables = text_kernel(
        embedding, model.seq_len, d_model=model.d_model, resolved=False, theory=theory
    )
    width = embedding.table_width(model.d_model)
    signal = gaussian(tables, model.seq_len, width, theory == "refined")
    output = declare_embedding(embedding, model, theory).propagate(signal, Run()).output
    return float(output.kernel.diagonal), float(output.correlation())


def placed_positions(
    model: Transformer,
    resolved: bool | PositionClasses,
    sequences: int,
    documents: np.ndarray | None,
) -> FixedPart | None:
    """Sinusoidal positions in any resolution; None without such."""
    assert isinstance(model.embedding, Embedding)
    classes = resolved if isinstance(resolved, PositionClasses) else None
    several = sequences if resolved else None
    length, width = model.seq_len, model.d_model
    return fixed_positions(model.embedding, length, width, several, documents, classes)


def last_kernel(
    model: Transformer,
    resolved: bool | PositionClasses,
    variance: Any,
    correlation: Any,
    kernel: Any,
    sequences: int = 1,
) -> Kernel:
    """The given gradient at the last layer's output; defaults are variance 1 and correlation 0.

    The gradients of several sequences are independent, unless the kernel given is that of all their
    tokens.
    """
    if kernel is None:
        v, r = check_moments(
            "grad_",
            1.0 if variance is None else variance,
            0.0 if correlation is None else correlation,
            model.seq_len,
        )
        one = exchangeable_kernel(v, r, model.seq_len, resolved)
        if sequences == 1:
            return one
        if isinstance(resolved, PositionClasses):
            size = len(resolved.one_document.nodes)
            return Kernel(
                one.diagonal,
                one.off_diagonal * resolved.block_diagonal(np.ones((size, size))),
                resolved,
            )
        return Kernel.of_matrix(np.kron(np.eye(sequences), one.off_diagonal))
    if variance is not None or correlation is not None:
        raise DomainError("grad_kernel replaces grad_variance and grad_correlation: give one")
    if sequences > 1 and np.shape(kernel)[-1:] == (sequences * model.seq_len,):
        return check_kernel("grad_kernel", kernel, sequences * model.seq_len)
    single = check_kernel("grad_kernel", kernel, model.seq_len)
    if sequences == 1:
        return single
    length = model.seq_len
    joint = np.zeros((sequences, length, sequences, length))
    index = np.arange(sequences)
    joint[index, :, index, :] = single.off_diagonal
    return Kernel.of_matrix(joint.reshape(sequences * length, sequences * length))


def _of_image(model: Transformer, inputs: Inputs) -> tuple[Kernel, FixedPart | None]:
    if not isinstance(model.embedding, ReadsPixels):
        raise DomainError("pixels are read by a patch embedding: declare model.embedding")
    if inputs.moments or inputs.token_ids is not None:
        raise DomainError("pixels replace variance, correlation, kernel and token_ids: give one")
    if model.embedding.seq_len != model.seq_len:
        raise DomainError(
            f"seq_len = {model.seq_len}: the image has {model.embedding.seq_len} tokens; use "
            f"model.replace(seq_len={model.embedding.seq_len})"
        )
    return entering(model.embedding, inputs.pixels, model.d_model)


def _by_token(stream: list[Any], layout: SequenceLayout) -> tuple[np.ndarray, np.ndarray]:
    """Variances of signal and gradient, shape (..., N + 1, L)."""
    gradients = [point.gradient.kernel.diagonal for point in stream if point.gradient is not None]
    shape = np.broadcast_shapes(*(np.shape(g) for g in gradients))
    both = []
    for diagonals in ([point.signal.kernel.diagonal for point in stream], gradients):
        stacked = np.stack([np.broadcast_to(d, shape) for d in diagonals], axis=-2)
        classes = stream[0].signal.kernel.classes
        if classes is None:
            both.append(layout.by_token(stacked))
        else:
            both.append(
                layout.by_position(classes.at_every_position(stacked), 0.0 if both else None)
            )
    return both[0], both[1]
