"""Moments at the head: from the last layer's output to the loss, and the gradient back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.classes import PositionClasses
from ...engine.composition import Chain
from ...engine.state import Array, Gradient, Kernel, Signal, ratio_or_zero
from ...engine.trace import Point, Record, Run
from ...errors import DomainError
from ...model.embedding import Embedding
from ...model.head import Head
from ...model.transformer import Transformer
from .components import head_chain
from .readout import Readout
from .targets import (
    Targets,
    alike_targets,
    class_targets,
    position_targets,
    position_text,
    text_targets,
)


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Loss, logits and gradient of the head.

    Attributes:
        loss: expected mean cross-entropy; None, like the next three, if the head has no loss.
        loss_stderr: standard deviation of the loss over draws of the weights.
        gradient: at the last layer's output, before the final normalisation. If the layer ends in a
            normalisation, the part along the signal is in `radial` instead.
        radial: part of a measured gradient along the signal; None: contained in `gradient`.
        logit_variance: mean square of a logit.
        record: of the components before the matrix to the logits ("final.norm", "head.transform",
            ...); for a classification, sites after "head.pool" have one token per sequence.
        notes: reasons for larger errors.
        readout: the matrix to the logits and its loss.
    """

    loss: Array
    loss_stderr: Array
    gradient: Gradient | None
    radial: Kernel | None
    logit_variance: Array
    record: Record
    logits: Point
    notes: tuple[str, ...]
    model: Transformer
    readout: Readout

    @property
    def head(self) -> Head:
        """Head of the model."""
        head = self.model.head
        assert isinstance(head, Head)
        return head

    @property
    def ending(self) -> tuple[Chain, Readout] | None:
        """The components before the matrix to the logits, and that; None without a loss."""
        chain = self.record.component
        assert isinstance(chain, Chain)
        return None if self.head.loss is None else (chain, self.readout)

    def weights(self) -> Mapping[str, Array]:
        """Squared gradient norms of the head's own parameters, by name."""
        head, readout = self.head, self.readout
        if head.loss is None:
            return {}
        records = self.record.walk_back()
        result = {name: norm for record in records for name, norm in record.weights().items()}
        last = _last_norm(head)
        if f"{last}.gain" in result:
            # The gain's input is that of the readout divided by the gain.
            square = head.norm_gain**2 if last == "final.norm" else 1.0
            result[f"{last}.gain"] = result[f"{last}.gain"] + readout.gain_gradient() / square
        if readout.normalised and f"{last}.bias" in result:
            # `gradient` lacks the part along h that the norm removes; the bias comes after it.
            result[f"{last}.bias"] += readout.width * readout.radial().total(readout.seq_len)
        if not head.tied:
            result["head"] = readout.matrix_gradient()
        if head.bias:
            result["head.bias"] = readout.bias_gradient()
        return result

    def table(self) -> Array:
        """Squared gradient norm of a token table through a tied head: that of the matrix plus twice
        its overlap with the gradient through the input; 0 for an untied head."""
        if not self.head.tied or self.head.loss is None:
            return 0.0
        return self.readout.matrix_gradient() + self.readout.cross_gradient()


def output_moments(
    model: Transformer,
    signal: Signal,
    *,
    run: Run | None = None,
    stack: Record | None = None,
    token_ids: Any = None,
    counted: PositionClasses | None = None,
    targets: Any = None,
    real: Any = None,
    batch: int = 1,
) -> OutputMoments:
    """Carry the last layer's output to the loss, and the loss's gradient back to it.

    Args:
        model: with a head.
        signal: the last layer's output, of exchangeable tokens (one sequence) or resolved, with all
            tokens of the batch in one kernel (B L, B L).
        run: the current pass; None: a new one.
        stack: record of the layers, from which a tied head without hidden layer takes the amplitude
            of the token's row in the stream; None: it is not rescaled by the layers.
        token_ids: integers (L,) or (B, L), the text; None: unknown, by Zipf's law. On classes of
            positions as in `position_text`.
        counted: the classes of that text, if the signal belongs to one of several documents; None:
            the signal's.
        targets: shaped as token_ids, -100 for no target; for a classification labels (B,). None:
            the next token for a causal loss, else drawn at random.
        real: (L,) or (B, L), number of every token's document, 0 for padding.
        batch: factor on the number of sequences that the loss averages over.

    Raises:
        DomainError: a tied head without a token table, or targets that do not fit.
    """
    head = model.head
    if not isinstance(head, Head):
        raise DomainError("the model has no head: declare model.head")
    sequences = 1
    if signal.resolved is True:
        sequences = signal.kernel.off_diagonal.shape[-1] // model.seq_len
    elif signal.kernel.classes is not None:
        sequences = len(signal.kernel.classes.document_lengths)
    run = Run() if run is None else run
    run.layer = model.layers + 1
    chain = head_chain(model, head, sequences, real)
    record = chain.propagate(signal, run)
    read = record.output
    vocab_size, variance = _matrix(model, head)
    carried = _carried_to_logits(model, head, signal, read, stack)
    padding = getattr(model.embedding, "padding_id", None)
    by_text = token_ids is not None and signal.resolved is True and np.any(carried)
    if padding is not None and by_text:
        # the row of the padding token is 0
        carried = carried * (np.ravel(token_ids) != padding)
    readout = Readout(
        read.second_moment(),  # an activation without a following norm has a mean
        read.seq_len,
        head.factor_dim or model.d_model,
        _targets(
            model,
            head,
            signal,
            vocab_size,
            token_ids,
            targets,
            real,
            batch,
            sequences,
            signal.kernel.classes if counted is None else counted,
        ),
        vocab_size,
        variance,
        head.output_scale,
        head.logit_softcap,
        head.label_smoothing,
        carried,
        _normalised(model, head),
        model.normalization == "layernorm",
    )
    logits = Point(run.layer, "logits", _logits(readout))
    run.reached.append(logits)
    if head.loss is None:
        square = readout.logit_square
        return OutputMoments(None, None, None, None, square, record, logits, (), model, readout)
    grad_out = Gradient(readout.overlap.scaled(1 / vocab_size), read.seq_len)
    logits = logits._replace(gradient=grad_out)
    kernel = readout.gradient()
    radial = None
    if not readout.normalised:
        kernel = kernel + readout.radial()
    elif not chain.children:
        radial = readout.radial()
    record = record.backward(Gradient(kernel, read.seq_len), run)
    loss = readout.loss, np.sqrt(readout.loss_variance())[()]
    moments = *loss, record.grad_in, radial, readout.logit_square
    notes = output_notes(head, readout, signal)
    return OutputMoments(*moments, record, logits, notes, model, readout)


def carried_amplitude(model: Transformer, stack: Record | None) -> Array:
    """Amplitude of a token's row of the table in the last layer's output.

    Skip connections multiply it by their scales; a norm on the stream divides it by the stream's
    standard deviation there. Branches rotate it by random matrices and contribute nothing.

    Args:
        model: with a token table as embedding.
        stack: record of the layers; None: no layers.
    """
    embedding: Embedding = model.embedding
    amplitude: Array = embedding.scale
    if embedding.norm:
        variance = embedding.variance * (1 - 1 / model.d_model) + embedding.norm_epsilon
        amplitude = amplitude / np.sqrt(variance)
    return amplitude if stack is None else stack.component.amplitude_of_input(stack, amplitude)


def _carried_to_logits(
    model: Transformer, head: Head, signal: Signal, read: Signal, stack: Record | None
) -> Array:
    """Amplitude of a token's own row in the input of the matrix to the logits."""
    if not head.tied or head.transform is not None or head.factor_dim is not None:
        return 0.0
    amplitude = carried_amplitude(model, stack)
    if not head.norm:
        return amplitude
    inner = signal.second_moment().diagonal
    if model.normalization == "layernorm":
        centred = 0.0 if signal.centred is None else signal.centred.diagonal
        inner = inner - (inner - centred) / model.d_model
    kept = 1 - head.dropout
    return amplitude * np.sqrt(ratio_or_zero(kept * read.kernel.diagonal, inner))


def _normalised(model: Transformer, head: Head) -> bool:
    """Whether the input of the matrix to the logits has a fixed norm, up to dropout."""
    if model.normalization == "dyt":
        return False
    if head.transform is not None:
        return head.transform_norm
    if head.pool_norm:
        return True
    return bool(_last_norm(head)) and (head.norm or model.placements[-1] == "post")


def _last_norm(head: Head) -> str:
    """Label of the norm whose output the matrix multiplies; "": a mean or a matrix is between."""
    if head.transform is not None or head.pool_norm:
        return "head.norm"
    mean = head.loss == "classification" and head.pool != "first"
    return "" if mean or head.factor_dim is not None else "final.norm"


def _matrix(model: Transformer, head: Head) -> tuple[int, float]:
    """Rows of the matrix and the variance of its entries."""
    embedding = model.embedding
    if not head.tied:
        rows = head.choices(embedding)
        if rows is None:
            raise DomainError("head.vocab_size is missing: the model has no token table")
        return rows, float(head.weight_variance or 0.0)
    if not isinstance(embedding, Embedding):
        raise DomainError("a tied head needs a token table: declare model.embedding, or tied=False")
    if head.vocab_size not in (None, embedding.vocab_size):
        raise DomainError(
            f"head.vocab_size = {head.vocab_size}: a tied head has the token table's "
            f"{embedding.vocab_size} rows; leave it out"
        )
    return embedding.vocab_size, embedding.token_variance


def _targets(
    model: Transformer,
    head: Head,
    signal: Signal,
    vocab_size: int,
    token_ids: Any,
    targets: Any,
    real: Any,
    batch: int,
    sequences: int,
    counted: Any,
) -> Targets:
    """Targets at the resolution of the signal; arguments as in `output_moments`."""
    if head.loss == "classification":
        if signal.resolved:
            return class_targets(vocab_size, sequences, targets, batch)
        return Targets(float(batch), 1.0, *[0.0] * 6)
    if signal.resolved is not True:
        if targets is not None:
            raise DomainError("targets are resolved by token: leave tokens=False out")
        classes = signal.kernel.classes
        if classes is not None:
            result = (
                position_targets(head, vocab_size, counted)
                if token_ids is None
                else position_text(head, vocab_size, counted, token_ids)
            )
            if len(counted.document_lengths) > len(classes.document_lengths):
                result = result.of_one(counted)
            return result.repeated(batch)
        return alike_targets(head, vocab_size, model.seq_len, batch)
    documents = np.ones(sequences * model.seq_len)
    if real is not None:
        documents = np.broadcast_to(real, (sequences, model.seq_len)).reshape(-1)
    blank = getattr(model.embedding, "padding_id", None) if head.tied else None
    result = text_targets(head, vocab_size, model.seq_len, token_ids, targets, documents, blank)
    return result.repeated(batch)


def _logits(readout: Readout) -> Signal:
    """Moments of the logits, which are independent over the vocabulary given the input."""
    gain = readout.scale**2 * readout.width * readout.weight_variance
    kernel = readout.kernel.scaled(gain)
    return Signal(kernel, readout.seq_len, 0.0 * kernel.diagonal, float(readout.vocab_size))


# E sum_v p_v^2 beyond which softmaxes are nearly one-hot and two tokens' overlap is interpolated.
_PEAKED = 0.1


def output_notes(head: Head, readout: Readout, signal: Signal) -> tuple[str, ...]:
    """Notes on larger errors of a head at this signal."""
    softmax, notes = readout.softmax, []
    # A uniform softmax over few classes is not peaked.
    peak = (readout.vocab_size - 1) * softmax.other.probability_square - 1 / readout.vocab_size
    if np.max(peak) > _PEAKED:
        notes.append(
            f"head: the logits' variance {float(np.max(readout.variance)):.3g} makes the softmax "
            "nearly one-hot; how gradients correlate between tokens is interpolated there"
        )
    own = float(np.max(softmax.own.probability)) if np.any(readout.carried) else 0.0
    if own > _PEAKED:
        notes.append(
            f"head: the tied table gives the token that is read a probability of {own:.2g}; then "
            "gradients point along what layer 1 reads, and in the layers they come out low: in 1 "
            "to 4 layers by up to a quarter, an encoder's by up to 40 %"
        )
    if head.loss == "classification" and head.pool == "first" and not signal.resolved:
        notes.append(
            "head: only the first token has a gradient, and tokens alike share its average; "
            "resolve the prediction by token"
        )
    return tuple(notes)
