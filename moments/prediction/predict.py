"""`predict`: one pass forward and one backward through a declared model, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings as _warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..engine.layout import SequenceLayout
from ..engine.state import Gradient, Kernel
from ..engine.trace import Trace
from ..errors import DomainError, ValidityWarning, domain_error
from ..formulas.checks import check_choice, check_count
from ..formulas.law import THEORIES, Theory
from ..layers.architecture import declare
from ..layers.head.output import OutputMoments
from ..model.transformer import Transformer
from .gate import computing
from .resolution import notes_of, resolution
from .result import Prediction
from .stack import (
    Inputs,
    Outcome,
    Stack,
    configurations,
    given_shape,
    head_top,
    last_gradient,
    repeated,
    with_equal_sequences,
)

INPUTS = tuple(field.name for field in dataclasses.fields(Inputs) if field.name != "texts")


def predict(
    model: Transformer,
    *,
    variance: Any = None,
    correlation: Any = None,
    grad_variance: Any = None,
    grad_correlation: Any = None,
    theory: Theory = "refined",
    tokens: bool | None = None,
    token_ids: Any = None,
    segment_ids: Any = None,
    pixels: Any = None,
    targets: Any = None,
    kernel: Any = None,
    grad_kernel: Any = None,
    attention_mask: Any = None,
    document_ids: Any = None,
    encoder_inputs: Mapping[str, Any] | None = None,
    batch: int = 1,
    progress: bool = False,
) -> Prediction:
    """Predict every layer's moments at initialisation.

    Args:
        model: the declaration.
        variance, correlation: of the tensor that enters layer 1, scalars or arrays that broadcast;
            None, each by itself: from the embedding where one is declared, else 1 and 0.
        grad_variance, grad_correlation: of the loss gradient at the last layer's output; None, both
            of them: from the head's loss where one is declared; else 1 and 0.
        theory: "refined", "published" (the papers' full forms) or "simplified" (their Tables 1
            and 2).
        tokens: resolution of tokens in the refined theory. True: by token, at a cost that grows
            with the cube of the length. False: all tokens are exchangeable. None: as fine as the
            inputs need (rules in `moments.prediction.resolution`). Without mask, windows and text
            tokens are exchangeable. With a causal mask, with windows (up to 72 in a sequence) and
            for texts there are classes of positions (`moments.engine.classes`), at any length; if
            an embedding is read these also distinguish pairs of the same word, in unknown texts by
            Zipf's law. By token: up to 31 positions; texts of up to 64 tokens, 256 with rotary
            positions; images and kernels; and with ALiBi, up to 512 tokens, beyond only if True.
            `Prediction.resolution` tells which was chosen.
        token_ids: integers of shape (L,) or (B, L), a text or a batch of texts, whose repeated
            words correlate tokens; None: words by Zipf's law.
        segment_ids: likewise for the segment table; None with token_ids: one segment.
        pixels: images of shape (B, C, H, W) for a patch embedding; a spectrogram is one of one
            channel, bins down and time across.
        targets: token ids of the loss, shaped as token_ids, -100 for no target; classes (B,) for a
            classifier. None: the next token of the sequence (or document) for a causal head, else
            random.
        kernel: second moments E[x_i x_j] per feature of the tensor that enters layer 1, shape
            (..., L, L), instead of variance and correlation.
        grad_kernel: likewise for the gradient at the last layer's output; (..., L, L).
        attention_mask: shape (L,) or (B, L), 1 for real tokens and 0 for padding, which is excluded
            from attention, averages and the loss; None: all are real.
        document_ids: shape (L,) or (B, L), the document of each token in packed rows, consecutive
            for each document (of lengths: numpy.repeat(numpy.arange(len(lengths)), lengths)). A
            token attends to its own document, embedded positions restart with each, a causal head
            does not predict across, and correlations are averages over pairs of one document. None:
            every row is one document.
        encoder_inputs: for a model with an encoder, the arguments `variance`, `correlation`,
            `token_ids`, `segment_ids`, `pixels`, `kernel` and `attention_mask` that describe its
            input. Text k of the decoder reads text k of the encoder; a single text of either is
            repeated (an unknown text: as many different ones).
        batch: number of sequences that share the weights; more of them narrow
            `grad_variance_band`, and the loss of a head averages over them. For given sequences or
            images, 1 and their number mean the same.
        progress: whether to show a progress bar on standard error.

    Returns:
        A `Prediction`: arrays over the stream, `table()`, `to_frame()`, `plot()`.

    Raises:
        DomainError: a bad argument, a feature the theory does not cover, or numbers that overflow.

    Warns:
        ValidityWarning: if a formula leaves the regime it was validated in; also in `warnings`.
    """
    asked = {name: value for name, value in locals().items() if name not in ("model", "progress")}
    if not isinstance(model, Transformer):
        raise DomainError(
            f"model must be a moments.Transformer, not {type(model).__name__}: an nn.Module is for "
            "moments.torch.predict(module), or declared by moments.torch.describe(module).model"
        )
    check_choice("theory", theory, THEORIES)
    check_count("batch", batch)
    inputs = Inputs(**{name: asked[name] for name in INPUTS})
    other = _encoder_inputs(model, encoder_inputs)
    if model.encoder is not None:
        inputs, other = with_equal_sequences(inputs, other)
        if inputs.sequences > 1 and model.head is not None and model.head.loss != "classification":
            targets = repeated(targets, 2, inputs.sequences)
    grad_out = {"grad_variance": grad_variance, "grad_correlation": grad_correlation}
    shapes = {name: given_shape(value) for name, value in grad_out.items()}
    shapes["grad_kernel"] = given_shape(grad_kernel)[:-2]
    shape = configurations(inputs=inputs.shape, encoder_inputs=other.shape, **shapes)
    resolved = resolution(model, theory, tokens, inputs, other, grad_kernel, targets)
    stack = Stack(model, theory, inputs, resolved, shape)
    stack.notes += tuple(notes_of(model, stack.classes))
    encoder = None
    if model.encoder is not None:  # on classes, the encoder's tokens are exchangeable
        encoder = Stack(model.encoder, theory, other, resolved is True, shape)
    stacks = [stack] if encoder is None else [encoder, stack]
    batch = _checked_batch(stack, batch)
    gradient = grad_variance, grad_correlation, grad_kernel
    rows = max(one.rows for one in stacks)
    with computing(theory, [one.run for one in stacks], rows), _progress(stacks, progress):
        outcome = _run(stack, encoder, gradient, targets, batch)
    of_encoder = None
    if encoder is not None:
        top = functools.partial(_decoder_top, model, stack.layout, stack.trace, outcome.output)
        zero = Outcome(Gradient(Kernel(0.0, 0.0), 2))
        of_encoder = encoder.prediction(batch, zero, None, top)
    alone = None
    if stack.classes is not None and stack.classes.one_document_with_words is not stack.classes:
        alone = functools.partial(_of_one_document, stack, gradient[:2], batch)
    result = stack.prediction(batch, outcome, of_encoder, alone=alone)
    again = functools.partial(predict, model, **asked)
    result = dataclasses.replace(result, asked=asked, again=again)
    for note in result.warnings:
        _warnings.warn(note, ValidityWarning, stacklevel=2)
    return result


def _run(
    stack: Stack,
    encoder: Stack | None,
    gradient: tuple[Any, Any, Any],
    targets: Any,
    batch: int,
) -> Outcome:
    """Run both passes; `gradient` is the variance, correlation and kernel given."""
    if encoder is not None:
        encoder.forward()
        stack.set_encoder(encoder)
    outcome = last_gradient(stack, stack.forward(), *gradient, targets, batch)
    stack.backward(outcome)
    if encoder is not None:
        encoder.backward(encoder.read_back(stack.trace.grad_memory()))
    return outcome


def _of_one_document(
    stack: Stack, gradient: tuple[Any, Any], batch: int
) -> tuple[Prediction, float]:
    """The prediction of a single document, and all tokens over those of the longest document."""
    assert stack.classes is not None
    lengths, one = stack.classes.document_lengths, stack.alone()
    with computing(stack.theory, [one.run], one.rows):
        outcome = _run(one, None, (*gradient, None), None, batch)
    return one.prediction(batch, outcome, None), batch * sum(lengths) / max(lengths)


def _decoder_top(
    decoder: Transformer,
    layout: SequenceLayout,
    trace: Trace,
    output: OutputMoments | None,
) -> Any:
    """The decoder as the source of its encoder's gradient (`noise.band`, refined theory)."""
    from ..noise.sources import DecoderTop

    declaration = declare(decoder, "refined", *layout.places)
    return DecoderTop(declaration, trace, head_top(output))


def stack_of(model: Transformer, inputs: Inputs, tokens: bool | None = None) -> Stack:
    """A model's stack with these inputs, in the refined theory; `tokens` as in `predict`."""
    resolved = resolution(model, "refined", tokens, inputs, Inputs())
    return Stack(model, "refined", inputs, resolved, inputs.shape)


def _checked_batch(stack: Stack, batch: int) -> int:
    """Number of kernels like the stack's that share the weights, after a check of `batch`."""
    given = stack.inputs.sequences
    if given == 1:
        return batch
    if batch not in (1, given):
        remedy = "the sequences given are counted already"
        raise domain_error("batch", batch, f"1 or {given}", remedy)
    # The kernel contains all sequences, unless tokens are exchangeable.
    return 1 if stack.layout.sequences > 1 else given


def _encoder_inputs(model: Transformer, given: Mapping[str, Any] | None) -> Inputs:
    if given is None:
        return Inputs()
    if model.encoder is None:
        raise DomainError("encoder_inputs describe an encoder's input: declare model.encoder")
    known = [name for name in INPUTS if name != "document_ids"]
    for name in given:
        if name not in known:
            raise DomainError(f"encoder_inputs has no {name!r}: one of {', '.join(known)}")
    return Inputs(**given)


@contextlib.contextmanager
def _progress(stacks: list[Stack], progress: bool) -> Iterator[None]:
    """Show a progress bar for the layers of both passes."""
    runs, layers = [s.run for s in stacks], sum(s.model.layers for s in stacks)
    if not progress:
        yield
        return
    with progress_bar("layers, forward and backward", 2 * layers) as advance:
        for run in runs:
            run.on_layer = advance
        yield


@contextlib.contextmanager
def progress_bar(title: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error; yields a function of each step's work and the next step."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(work: float = 1.0, doing: str = "") -> None:
            bar.update(task, advance=work, description=f"{title}: {doing}" if doing else title)

        yield advance
