"""Choice of a prediction's resolution: exchangeable tokens, by token, or classes of positions.

* Exchangeable tokens ("alike"): no mask, window or text distinguishes them.
* By token: `tokens=True`; kernels, images, segments or targets given per token; ALiBi; blocks whose
  laws are of single tokens; fewer than 32 positions; texts of up to 64 tokens in a batch, of up to
  256 with rotary or sinusoidal positions; a text that contains the embedding's padding row;
  sequences that differ in more than their length (`_alike_but_for_length`); a text of up to 512
  tokens with one word repeated densely near its start.
* Classes of positions: all else under a causal mask or in windows, if moments are given.
* Classes of positions and words: likewise if an embedding reads a text, given or by Zipf's law.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..engine.classes import (
    MOST_WINDOWS,
    PER_OCTAVE,
    PositionClasses,
    both_sides,
    documents_on,
)
from ..engine.layout import by_document
from ..engine.texts import TextClasses, text_classes, zipf_classes
from ..errors import DomainError, domain_error
from ..formulas.checks import check_flag
from ..formulas.law import Theory
from ..layers.embedding import text_ids
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from .stack import Inputs, document_spans

LEAST_LENGTH = 32
"""Least length with classes: below, there would be hardly fewer classes than positions."""

SHORT_TEXT, SHORT_TURNED = 64, 256
"""Most tokens of a batch of texts that are resolved by token: in general, and with rotary or
sinusoidal positions, which vary within a class."""

MOST_TOGETHER = 512
"""Most tokens that are resolved by token, without `tokens=True`, where classes do not apply: a
layer takes some ten seconds, and eight times as long for twice as many."""


def resolution(
    model: Transformer,
    theory: Theory,
    tokens: bool | None,
    inputs: Inputs,
    other: Inputs,
    grad_kernel: Any = None,
    targets: Any = None,
) -> bool | PositionClasses:
    """`Kernel.resolved` of a prediction: False, True or classes.

    Args:
        inputs, other: inputs of the model and of its encoder; the rest as in `predict`.

    Raises:
        DomainError: the theory, the mask or the inputs do not allow it.
    """
    if tokens is not None:
        check_flag("tokens", tokens)
    masks = inputs.attention_mask, inputs.document_ids
    per_token = inputs.kernel, grad_kernel, inputs.pixels, *masks
    needs_tokens = any(value is not None for value in per_token)
    if model.shared_layers:
        if needs_tokens or tokens or model.seq_len == 1:
            raise DomainError(
                "shared_layers: tokens are followed as alike there: leave out tokens=True, kernel, "
                "grad_kernel, pixels, attention_mask and document_ids, with a seq_len of 2 at least"
            )
        return False
    encoder = model.encoder
    stacks = [model] if encoder is None else [model, encoder]
    positions = any(map(positional, stacks))
    given = inputs.by_token or other.by_token or grad_kernel is not None
    if model.seq_len == 1 or (encoder is not None and encoder.seq_len == 1):
        # Exchangeable tokens need at least one pair.
        if theory != "refined":
            raise domain_error(
                "seq_len", 1, f"2 at least under theory {theory!r}", 'use theory="refined"'
            )
        given, tokens = True, None
    resolved = theory == "refined" and (positions or given or any(map(few_turned, stacks)))
    resolved = resolved if tokens is None else tokens
    if resolved and theory != "refined":
        raise DomainError(
            f'theory {theory!r} covers tokens alike only: use theory="refined", or tokens=False'
        )
    if not resolved and needs_tokens:
        raise DomainError(
            "kernel, grad_kernel, pixels, attention_mask and document_ids are resolved by token: "
            'leave tokens=False out, under theory="refined"'
        )
    if not resolved and theory == "refined" and positions:
        raise DomainError(
            "tokens=False: under a causal mask, a window or a penalty on distance tokens are not "
            'alike; leave tokens out, or use theory="published", which ignores the mask'
        )
    if not resolved or tokens is not None:
        return bool(resolved)
    chosen = targets is not None and not _pooled(model)
    single_tokens = inputs.given_by_token or other.by_token or grad_kernel is not None or chosen
    classes = None if single_tokens else _classes(model, inputs)
    if classes is None:
        _check_penalised(stacks)
    return True if classes is None else classes


def _classes(model: Transformer, inputs: Inputs) -> PositionClasses | None:
    """Classes of positions, with words if a text is read; None: by token."""
    text, where = inputs.token_ids is not None, None
    if not by_position(model, text):
        return None
    lengths: tuple[int, ...] = (model.seq_len,)
    if inputs.by_token:
        where = document_spans(model, inputs)
        if where is None or not _alike_but_for_length(model, inputs, where):
            return None
        lengths = tuple(where[:, 2].tolist())
    words = repeating(model, inputs)
    one = PositionClasses.for_length(
        max(lengths), _least_window(model), **_density(model, words, text)
    )
    one = one if model.causal else both_sides(one)
    classes = one if len(lengths) == 1 else documents_on(one, lengths)
    if not words or not isinstance(model.embedding, Embedding):
        return classes
    if where is None or not text:
        return zipf_classes(classes, model.embedding.vocab_size)
    ids = by_document(text_ids(model.embedding, model.seq_len, inputs.token_ids), where)
    several = text_classes(classes, ids if len(lengths) > 1 else ids[0])
    if several.crowded > MOST_CROWDED:
        if sum(lengths) <= MOST_TOGETHER:
            return None
        raise domain_error(
            "token_ids",
            inputs.token_ids,
            "a text whose words stand spread over it: near its start "
            f"{100 * several.crowded:.1f} % of the pairs that a row reads are of one word beyond "
            "what classes of positions can distinguish",
            "tokens=True resolves each, or cut the stretch that repeats one word",
        )
    return several


def _alike_but_for_length(model: Transformer, inputs: Inputs, where: np.ndarray) -> bool:
    """Whether sequences or documents of a batch (`layout.spans`) differ only in length, so that
    classes apply, and are long enough."""
    lengths, text = where[:, 2], inputs.token_ids is not None
    if lengths.max() < 2 or (model.encoder is not None and inputs.sequences > 1):
        return False
    if (_pooled(model) or not model.causal) and len(set(lengths.tolist())) > 1:
        return False
    if not text:
        return bool(lengths.max() >= LEAST_LENGTH or lengths.sum() > SHORT_TURNED)
    embedding = model.embedding
    padding = getattr(embedding, "padding_id", None)
    if padding is not None and np.any(np.asarray(inputs.token_ids) == padding):
        return False
    placed = getattr(embedding, "position_variance", 0.0) > 0.0
    if placed and inputs.document_ids is None and len(set(where[:, 1].tolist())) > 1:
        return False  # with padding on the left, one position has several rows of the table
    rotated = model.rotary is not None or _waves(model)
    return bool(lengths.sum() > (SHORT_TURNED if rotated else SHORT_TEXT))


def resolution_of(
    model: Transformer, theory: Theory, tokens: bool | None = None
) -> bool | PositionClasses:
    """`resolution` without a text, kernel or mask."""
    return resolution(model, theory, tokens, Inputs(), Inputs())


def _check_penalised(stacks: list[Transformer]) -> None:
    """Raise if ALiBi or a block requires resolution by token and there are too many tokens."""
    for stack in stacks:
        if stack.alibi and stack.seq_len > MOST_TOGETHER:
            raise domain_error(
                "seq_len",
                stack.seq_len,
                f"{MOST_TOGETHER} at most under ALiBi",
                "its penalties fall by orders of magnitude inside any class of positions, so that "
                "every token is followed by itself, at a cost that grows with the cube of the "
                f"length: use model.replace(seq_len={MOST_TOGETHER}), or tokens=True to have it "
                "nonetheless",
            )
        if single(stack) and stack.seq_len > MOST_TOGETHER:
            kinds = {one.kind for one in (*stack.mixers, *stack.ffns) if one and one.by_token}
            raise domain_error(
                "seq_len",
                stack.seq_len,
                f"{MOST_TOGETHER} at most with {', '.join(sorted(kinds))}",
                "every token is followed by itself there, at a cost that grows with the cube of "
                f"the length: use model.replace(seq_len={MOST_TOGETHER}), or tokens=True to have "
                "it nonetheless",
            )


def most_tokens(model: Transformer) -> int:
    """Largest length, up to the model's, that is covered without `tokens=True`."""
    return min(model.seq_len, MOST_TOGETHER) if model.alibi or single(model) else model.seq_len


FEW_TOKENS = 128
"""Default length of a model that is resolved by token."""


def at_default_length(model: Transformer) -> Transformer:
    """The model with at most `FEW_TOKENS` tokens, if it would be resolved by token."""
    if model.seq_len <= FEW_TOKENS or not positional(model) or by_position(model):
        return model
    return model.replace(seq_len=FEW_TOKENS)


# --- what distinguishes tokens --------------------------------------------------------------------


def by_position(model: Transformer, text: bool = False) -> bool:
    """Whether tokens differ only in how many keys they attend to, so that classes apply. Without a
    mask, windows or a text all tokens are exchangeable."""
    encoder, losses = model.encoder, (None, "causal" if model.causal else "masked")
    bidirectional = (text or any(model.windows)) and model.relative_bias is None
    return (
        (model.causal or bidirectional)
        and LEAST_LENGTH <= model.seq_len <= MOST_WINDOWS * _least_window(model)
        and not single(model)
        and not model.alibi  # penalties vary by orders of magnitude inside a class
        and (model.seq_len > MOST_TOGETHER or not mostly_waves(model))
        and (encoder is None or not positional(encoder))
        and (model.head is None or model.head.loss in (*losses, "classification"))
    )


def repeating(model: Transformer, inputs: Inputs) -> bool:
    """Whether the input repeats words: a given text, or one by Zipf's law."""
    if inputs.token_ids is not None:
        return True
    return isinstance(model.embedding, Embedding) and not inputs.moments


def positional(model: Transformer) -> bool:
    """Whether tokens differ by their position in the sequence."""
    return any((model.causal, model.alibi, any(model.windows), single(model)))


def single(model: Transformer) -> bool:
    """Whether a block requires resolution by token."""
    return any(one is not None and one.by_token for one in (*model.mixers, *model.ffns))


def few_turned(model: Transformer) -> bool:
    """Whether rotary positions without a mask are few enough to be resolved; otherwise tokens are
    exchangeable, which ignores their distances."""
    if positional(model) or not model.rotary:
        return False
    patches = any(one is not None and one.grid is not None for one in model.rotaries)
    return patches or model.seq_len < SHORT_TURNED


LEAST_DRAWN = 0.5
"""Variance of an embedding's rows below which sinusoidal positions, of variance 1/2, dominate."""


def mostly_waves(model: Transformer) -> bool:
    """Whether sinusoidal positions dominate the embedding."""
    embedding = model.embedding
    if not isinstance(embedding, Embedding) or not _waves(model):
        return False
    return embedding.row_variance < LEAST_DRAWN


def _waves(model: Transformer) -> bool:
    return getattr(model.embedding, "positions", None) == "sinusoidal"


def _pooled(model: Transformer) -> bool:
    return model.head is not None and model.head.loss == "classification"


def _least_window(model: Transformer) -> int:
    """The narrowest window of any layer; the length if there is none."""
    windows = [window for window in model.windows if window is not None]
    return min([*windows, model.seq_len])


# --- how many classes -----------------------------------------------------------------------------

DEEPEST_POST, DENSE_PER_OCTAVE = 4, 4.0
"""Number of norms on the stream beyond which classes are twice as dense: gradients then vary by
orders of magnitude from one position to the next."""

WORDS_PER_OCTAVE, UNKNOWN_PER_OCTAVE = 1.5, 1.0
"""Nodes per doubling of the position with words, each of which costs three times as much: for a
given text, and in windows for an unknown text by Zipf's law."""

LAST_PER_OCTAVE, WIDENING = 1.25, 0.05
"""Nodes for the last doubling of the position for an unknown text without windows, and relative
growth of each earlier step (`PositionClasses.for_length`)."""


def _density(model: Transformer, words: bool, text: bool) -> dict[str, Any]:
    """Arguments of `PositionClasses.for_length`."""
    on_stream = sum(placement in ("post", "b2t") for placement in model.placements)
    if _waves(model) or (model.causal and on_stream > DEEPEST_POST):
        return {"per_octave": DENSE_PER_OCTAVE}
    if not words:
        return {"per_octave": PER_OCTAVE}
    if text:
        return {"per_octave": WORDS_PER_OCTAVE}
    if model.causal and not any(model.windows):
        return {"per_octave": LAST_PER_OCTAVE, "widening": WIDENING}
    return {"per_octave": UNKNOWN_PER_OCTAVE}


# --- limits of classes ----------------------------------------------------------------------------

MOST_CROWDED = 0.01
"""Largest `TextClasses.crowded` for which classes are accurate."""

COPIES = 0.5
"""Share of positions with the same word in two texts, from which these count as copies."""

OF_COPIES = (
    "texts of this batch are mostly copies of each other: what their tokens share except those at "
    "one place is a mean over classes of positions, and gradients of weights were measured up to "
    "11 % low, those of queries and keys up to 23 % (two copies of 192 tokens in Llama's widths at "
    "a logit variance of 2.7; GPT-2's within 3 %); tokens=True resolves each"
)

OFTEN = 0.2
"""Share of one word in a text from which a note is issued: sums over keys neglect the excess of
same-word entries of such frequent words."""

OF_ONE_WORD = (
    "more than a fifth of this text is one word, and classes of positions hold words by one "
    "frequency: under strong logits gradients of queries and keys were measured 16 to 34 % low "
    "where it is a quarter to .4 of the text, those of other weights up to 11 % (Llama's widths at "
    "a logit variance of 2.7; GPT-2's within 2 %); tokens=True resolves each"
)

OF_WAVES = (
    "sinusoidal positions are most of this embedding's variance, and classes of positions hold "
    "means of what two places share: measured at a variance of .1 of the tables, query and key "
    "gradients are within 4 % where logits are faint and up to 19 % low at a logit variance of 3; "
    "tokens=True resolves each"
)


OF_GROUPS = (
    "norm_groups beside sinusoidal positions: features of a group turn alike with the position, "
    "where groups are taken as equal: against simulation a correlation behind the embedding's norm "
    "was .49 for .56 (4 groups of 128 features), queries and keys up to 39 % high, the token "
    "table's gradient half"
)


def notes_of(model: Transformer, classes: PositionClasses | None) -> Iterator[str]:
    """Notes on the errors of classes of positions and words, and of groups of features."""
    if model.norm_groups > 1 and _waves(model):
        yield OF_GROUPS
    if classes is not None and mostly_waves(model):
        yield OF_WAVES
    if not isinstance(classes, TextClasses):
        return
    if len(classes.document_lengths) > 1 and float(np.mean(classes.shares[1][0])) > COPIES:
        yield OF_COPIES
    if classes.ids is not None:
        read = classes.ids[classes.is_real]
        if np.bincount(np.unique(read, return_inverse=True)[1]).max() > OFTEN * read.size:
            yield OF_ONE_WORD
