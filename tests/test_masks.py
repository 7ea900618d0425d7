"""Padding in every place: batches with padded rows against the same texts without it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, Head, Rotary, Transformer, predict
from moments.model.huggingface.sizes import sized_config

WORDS = 50
STREAM = ("variance", "correlation", "grad_variance", "grad_correlation")
FAINT: dict[str, Any] = {
    "embedding": Embedding(WORDS, 0.02, padding_id=0),
    "head": Head(tied=False, weight_variance=0.02),
}
RNG = np.random.default_rng(4)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(1, WORDS, shape)


def by_weight(found: Any) -> Any:
    return found.weight_gradients().set_index(["layer", "weight"]).squared_norm


def same(found: Any, wanted: Any, rel: float = 1e-6, logits: float = 1e-6) -> None:
    """Streams, losses and squared gradient norms; `logits`: of those of queries and keys."""
    for name in STREAM:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=rel), name
    if wanted.loss is not None:
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    off = (by_weight(found) / by_weight(wanted) - 1).abs()
    of_logits = off.index.get_level_values("weight").str.contains("query|key")
    assert off[~of_logits].max() < rel
    assert off[of_logits].max() < logits


# --- an encoder's padding and the decoder that reads it -------------------------------------------


def decoder(of_encoder: int, length: int = 8, **changes: Any) -> Transformer:
    shared = {"normalization": "rmsnorm", "norm_epsilon": 1e-6, **FAINT, **changes}
    encoder = Transformer(2, 32, 4, of_encoder, **(shared | {"head": None}))
    return Transformer(2, 32, 4, length, causal=True, encoder=encoder, **shared)


@pytest.mark.parametrize("pad", [0, 7])
def test_a_decoder_does_not_read_its_encoders_padding(pad: int) -> None:
    text, read = words(8), words(30)
    padded = np.append(read, np.full(10, pad))
    mask = np.arange(40) < 30
    given = {"token_ids": padded, "attention_mask": mask + 0}
    found = predict(decoder(40), token_ids=text, encoder_inputs=given)
    wanted = predict(decoder(30), token_ids=text, encoder_inputs={"token_ids": read})
    same(found, wanted, 1e-3, 0.1)
    same(found.encoder, wanted.encoder, 1e-3, 0.1)


def test_rows_of_an_encoder_that_are_padded_each_by_itself() -> None:
    """Each text of the decoder reads the real tokens of its own encoder's row."""
    text, read = words(2, 8), words(2, 12)
    mask = np.array([np.arange(12) < 12, np.arange(12) >= 5]) + 0
    both = predict(
        decoder(12), token_ids=text, encoder_inputs={"token_ids": read, "attention_mask": mask}
    )
    alone = [
        predict(decoder(12), token_ids=text[0], encoder_inputs={"token_ids": read[0]}),
        predict(decoder(7), token_ids=text[1], encoder_inputs={"token_ids": read[1, 5:]}),
    ]
    mean = np.mean([one.variance for one in alone], 0)
    assert both.variance == pytest.approx(mean, rel=1e-5)
    assert both.loss == pytest.approx(np.mean([one.loss for one in alone]), rel=1e-6)


@pytest.mark.parametrize("inputs", [{}, {"token_ids": words(12)}, {"variance": 1.0}])
def test_one_encoder_text_is_read_by_every_text_of_the_decoder(inputs: dict[str, Any]) -> None:
    text = words(8)
    alone = predict(decoder(12), token_ids=text, encoder_inputs=inputs)
    twice = predict(decoder(12), token_ids=np.stack([text, text]), encoder_inputs=inputs)
    # two unknown texts share words as two places of one do, and agree to what that changes
    assert twice.variance == pytest.approx(alone.variance, rel=1e-5)
    assert twice.loss == pytest.approx(alone.loss, rel=1e-6)
    assert twice.encoder.variance == pytest.approx(alone.encoder.variance, rel=1e-6)
    if inputs:  # copies, whose mean loss sends what one does
        assert twice.grad_variance == pytest.approx(alone.grad_variance / 4, rel=1e-3)
        assert (by_weight(twice) / by_weight(alone) - 1).abs().max() < 0.04


def test_one_text_of_the_decoder_is_repeated_for_every_encoder_text() -> None:
    text, read = words(8), words(2, 12)
    wanted = predict(
        decoder(12), token_ids=np.stack([text] * 2), encoder_inputs={"token_ids": read}
    )
    for ids in (text, text[None]):
        found = predict(decoder(12), token_ids=ids, encoder_inputs={"token_ids": read})
        same(found, wanted)
    asked = predict(decoder(12), token_ids=text, targets=text, encoder_inputs={"token_ids": read})
    assert asked.loss > 0
    unknown = predict(decoder(12), encoder_inputs={"token_ids": read})
    assert unknown.loss == pytest.approx(wanted.loss, rel=0.1)


def test_unknown_texts_of_an_encoder_are_texts_of_their_own() -> None:
    """Against the mean over texts that are drawn by Zipf's law.

    By token an unknown text has the mean kernel of all, which misses what gradients have by
    products of what tokens share (a tenth).
    """
    model, text = decoder(6, 4, embedding=Embedding(WORDS, 0.03, 0.01)), words(3, 4)
    found = predict(model, token_ids=text)
    rng, portions = np.random.default_rng(1), 1 / np.arange(1.0, WORDS + 1)
    drawn = [
        predict(
            model,
            token_ids=text,
            encoder_inputs={"token_ids": rng.choice(WORDS, (3, 6), p=portions / portions.sum())},
        )
        for _ in range(12)
    ]
    for name, allowed in {"variance": 0.0, "grad_variance": 0.12}.items():
        every = np.array([getattr(one.encoder, name) for one in drawn])
        error = 4 * every.std(0) / len(drawn) ** 0.5 + allowed * every.mean(0) + 1e-9
        assert np.all(np.abs(getattr(found.encoder, name) - every.mean(0)) < error), name


@pytest.mark.parametrize("tokens", [None, True])
def test_other_numbers_of_texts_are_refused(tokens: bool | None) -> None:
    inputs = {"token_ids": words(2, 12)}
    with pytest.raises(DomainError, match="token_ids hold 3 texts, and encoder_inputs 2"):
        predict(decoder(12), token_ids=words(3, 8), tokens=tokens, encoder_inputs=inputs)


# --- rows that begin with padding, or have windows full of it -------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "rotary": {"normalization": "rmsnorm", "rotary": Rotary(), "gated": True, "activation": "silu"},
    "window": {"normalization": "rmsnorm", "rotary": Rotary(), "window": 2},
    "post": {"norm": "post", "norm_epsilon": 1e-12},
    "sandwich": {"norm": "sandwich", "normalization": "rmsnorm"},
    "alibi": {"alibi": True, "normalization": "layernorm"},
}


def layers(length: int, **changes: Any) -> Transformer:
    return Transformer(2, 32, 4, length, causal=True, **(FAINT | {"norm_epsilon": 1e-5} | changes))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tied", [False, True])
def test_padding_that_nobody_sees_may_have_no_size(name: str, side: str, tied: bool) -> None:
    text, none = words(6), np.zeros(4, dtype=int)
    order = [none, text] if side == "left" else [text, none]
    ids = np.concatenate(order)
    changes = LAYERS[name] | ({"head": Head(output_scale=0.5)} if tied else {})
    found = predict(layers(10, **changes), token_ids=ids, attention_mask=(ids > 0) + 0)
    wanted = predict(layers(6, **changes), token_ids=text)
    # averages over all tokens stand for norms' spread and a sum's shares, and padding is in them
    same(found, wanted, 2e-2 if name == "post" else 3e-3, 0.1)


def test_a_batch_that_is_padded_on_the_left() -> None:
    model, rows = lambda n: layers(n, **LAYERS["rotary"]), [words(7), words(4)]
    ids = np.stack([rows[0], np.append(np.zeros(3, dtype=int), rows[1])])
    both = predict(model(7), token_ids=ids, attention_mask=(ids > 0) + 0)
    alone = [predict(model(len(row)), token_ids=row) for row in rows]
    for name in ("variance", "grad_variance"):
        assert np.all(np.isfinite(getattr(both, name)))
    mean = (7 * alone[0].variance + 4 * alone[1].variance) / 11
    assert both.variance == pytest.approx(mean, rel=1e-6)
    loss = (6 * alone[0].loss + 3 * alone[1].loss) / 9
    assert both.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_row_that_begins_with_a_token_of_no_size(tied: bool) -> None:
    """Unmasked padding is a token like any other, whose row and logit are 0; torch confirms."""
    pytest.importorskip("torch")
    head = Head() if tied else FAINT["head"]
    model = layers(7, normalization="rmsnorm", head=head).replace(norm_epsilon=0.01)
    text = {"token_ids": [[0, 0, 0, 5, 6, 7, 8]]}
    found = predict(model, **text)
    measured = moments.simulate(model, **text, seeds=30, batch=1)
    for name in ("variance", "grad_variance"):
        error = np.abs(getattr(found, name) / getattr(measured, name) - 1)
        noise = getattr(measured, f"{name}_stderr") / getattr(measured, name)
        assert np.all(error < 4 * noise + 0.05), name
    assert abs(found.loss - measured.loss) < 4 * measured.loss_stderr


# --- how many sequences a gradient is of ----------------------------------------------------------


def test_weight_gradients_say_of_how_many_sequences_they_are() -> None:
    model = layers(8)
    unknown, both = predict(model, batch=2), predict(model, token_ids=words(2, 8))
    assert unknown.weight_gradients().attrs == {"sequences": 1, "batch": 2}
    assert both.weight_gradients().attrs == {"sequences": 2, "batch": 2}
    assert "weight_gradients() are for 1 of the 2 sequences" in unknown.table()
    assert "weight_gradients()" not in both.table()


# --- families -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opt", "llama", "mistral", "gemma2", "phi", "bert", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_families_with_a_padding_row(kind: str, side: str) -> None:
    """A padded row against the same text without padding; one of each way to place and norm."""
    config = sized_config(kind, 2, 32, vocab_size=WORDS, seq_len=16) | {"pad_token_id": 0}
    model = moments.from_huggingface(config, seq_len=10)
    text, none = words(6), np.zeros(4, dtype=int)
    ids = np.concatenate([none, text] if side == "left" else [text, none])
    real = ids > 0
    padded: dict[str, Any] = {"token_ids": ids, "attention_mask": real + 0}
    alone: dict[str, Any] = {"token_ids": text}
    short = model.replace(seq_len=6)
    if model.encoder is not None:
        model = model.replace(encoder=model.encoder.replace(seq_len=10))
        short = short.replace(encoder=model.encoder.replace(seq_len=6))
        padded["encoder_inputs"], alone["encoder_inputs"] = dict(padded), dict(alone)
    if model.head.loss == "masked":
        alone["targets"] = np.where(np.arange(6) % 3 == 1, text, -100)
        padded["targets"] = np.full(10, -100)
        padded["targets"][real] = alone["targets"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)  # T5's logits are wide
        found, wanted = predict(model, **padded), predict(short, **alone)
    same(found, wanted, 1e-3, 0.1)
