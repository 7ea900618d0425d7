"""What enters layer 1: embedded texts and images, and the gradients of what embeds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moments
from moments.engine.state import Kernel
from moments.errors import DomainError
from moments.formulas.normalization import LAYERNORM
from moments.layers.embedding import (
    embedding_gradients,
    fixed_positions,
    text_kernel,
)
from moments.layers.images import (
    check_pixels,
    cut_patches,
    image_gradients,
    image_kernel,
    photograph,
)
from moments.layers.normalization import FiniteNormalization
from moments.model.embedding import Embedding
from moments.model.patches import PatchEmbedding
from moments.prediction.stack import gaussian

WIDTH, LENGTH = 64, 6
IDS = np.array([[1, 2, 1, 0, 4, 0], [2, 5, 1, 3, 0, 0]])
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def sines(length: int, width: int) -> np.ndarray:
    """The original Transformer's table, entry by entry."""
    table = np.empty((length, width))
    for position in range(length):
        for k in range(0, width, 2):
            angle = position / 10000 ** (k / width)
            table[position, k], table[position, k + 1] = math.sin(angle), math.cos(angle)
    return table


def embedded(embedding: Embedding, draws: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws of the embedded text, (draws, tokens, width), and the tables."""
    generator = torch.Generator().manual_seed(2)

    def normal(variance: float, rows: int) -> Tensor:
        drawn = torch.randn((draws, rows, WIDTH), generator=generator, dtype=torch.float64)
        return (drawn * math.sqrt(variance)).requires_grad_()

    tables = {
        "token": normal(embedding.token_variance, embedding.vocab_size),
        "position": normal(embedding.position_variance, LENGTH),
        "segment": normal(embedding.segment_variance, 2),
    }
    rows = tables["token"]
    if embedding.padding_id is not None:
        keep = torch.ones(embedding.vocab_size, 1, dtype=torch.float64)
        keep[embedding.padding_id] = 0
        rows = rows * keep
    flat, places = torch.as_tensor(IDS.reshape(-1)), torch.arange(LENGTH).repeat(len(IDS))
    x = embedding.scale * rows[:, flat] + tables["position"][:, places]
    x = x + tables["segment"][:, torch.as_tensor(SEGMENTS.reshape(-1))]
    if embedding.positions == "sinusoidal":
        x = x + torch.as_tensor(sines(LENGTH, WIDTH))[places]
    return x, tables


TEXTS = {
    "bert": Embedding(6, 0.4, 0.3, 0.2, padding_id=0),
    "gpt2": Embedding(6, 0.4, 0.3),
    "original": Embedding(6, 1 / WIDTH, scale=math.sqrt(WIDTH), positions="sinusoidal"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_kernel_of_a_batch(name: str) -> None:
    embedding, draws = TEXTS[name], 4000
    x, _ = embedded(embedding, draws)
    each = (x @ x.transpose(1, 2) / WIDTH).detach().numpy()
    kernel = text_kernel(embedding, LENGTH, IDS, SEGMENTS, WIDTH).off_diagonal
    assert np.abs(kernel - each.mean(0)).max() < 5 * each.std(0).max() / math.sqrt(draws)
    diagonal = np.diagonal(kernel)
    assert diagonal.max() == pytest.approx(embedding.variance, rel=1e-12)


def test_spread_of_squared_norms() -> None:
    """Fixed positions do not fluctuate: Cov |x_i|^2 |x_j|^2 = 2 (C^2 - P^2)/d."""
    embedding, draws = TEXTS["original"], 4000
    x, _ = embedded(embedding, draws)
    norms = (x**2).mean(-1).detach().numpy()
    kernel = text_kernel(embedding, LENGTH, IDS, SEGMENTS, WIDTH)
    fixed = fixed_positions(embedding, LENGTH, WIDTH, len(IDS))
    signal = gaussian(kernel, LENGTH, WIDTH, True, fixed)
    assert signal.fluctuation is not None
    predicted = signal.fluctuation.norms
    largest = predicted.diagonal.max()
    assert np.abs(np.cov(norms.T) - predicted.off_diagonal).max() < 0.12 * largest
    assert np.diagonal(2 * kernel.off_diagonal**2 / WIDTH).max() > 1.1 * largest


def test_layernorm_of_sinusoidal_positions() -> None:
    """The cosines of slow frequencies have a mean over features, which centring removes."""
    embedding, width = TEXTS["original"], 256
    embedding = embedding.replace(token_variance=1 / width, scale=math.sqrt(width))
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(LENGTH), len(IDS))
    table = sines(LENGTH, width)[place]
    rows = rng.normal(size=(2000, embedding.vocab_size, width))
    x = rows[:, IDS.reshape(-1)] + table
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    measured = (x @ x.swapaxes(1, 2) / width).mean(0)
    kernel = text_kernel(embedding, LENGTH, IDS, None, width)
    fixed = fixed_positions(embedding, LENGTH, width, len(IDS))
    norm = FiniteNormalization(LAYERNORM, "norm")
    found, _ = norm.forward(gaussian(kernel, LENGTH, width, True, fixed))
    plain, _ = norm.forward(gaussian(kernel, LENGTH, width, True))
    assert np.abs(found.kernel.off_diagonal - measured).max() < 0.006
    assert np.abs(plain.kernel.off_diagonal - measured).max() > 0.02


def test_sinusoidal_positions_alike_are_the_averages() -> None:
    embedding = TEXTS["original"]
    resolved = text_kernel(embedding, LENGTH, IDS[:1], None, WIDTH)
    alike = text_kernel(embedding, LENGTH, IDS[:1], None, WIDTH, resolved=False)
    assert alike.diagonal == pytest.approx(float(resolved.mean_diagonal()), rel=1e-12)
    assert alike.off_diagonal == pytest.approx(float(resolved.mean_off_diagonal()), rel=1e-12)


@pytest.mark.parametrize("name", TEXTS)
def test_gradients_of_the_tables(name: str) -> None:
    """Gradients of a given kernel at the sum, sent into the tables by torch."""
    embedding, draws = TEXTS[name], 600
    rng = np.random.default_rng(4)
    mixing = rng.normal(size=(IDS.size, IDS.size))
    kernel = Kernel.of_matrix(mixing @ mixing.T)
    x, tables = embedded(embedding, draws)
    noise = rng.normal(size=(draws, IDS.size, WIDTH))
    x.backward(torch.as_tensor(mixing @ noise))
    found = embedding_gradients(embedding, LENGTH, WIDTH, kernel, IDS, SEGMENTS)
    expected = {"token"}
    expected |= {"position"} if embedding.position_variance else set()
    expected |= {"segment"} if embedding.segment_variance else set()
    assert set(found) == expected
    for table, value in found.items():
        gradient = tables[table].grad
        assert gradient is not None
        each = gradient.square().sum((1, 2)).numpy()
        assert value == pytest.approx(each.mean(), abs=4 * each.std() / math.sqrt(draws))


def test_gradients_of_tokens_alike() -> None:
    """One sequence, counted: what the resolved form gives for the same constant kernel."""
    embedding = Embedding(6, 0.4, 0.3, 0.2)
    alike = embedding_gradients(embedding, LENGTH, WIDTH, Kernel(2.0, 0.5), IDS[:1], SEGMENTS[:1])
    matrix = np.full((LENGTH, LENGTH), 0.5)
    np.fill_diagonal(matrix, 2.0)
    resolved = embedding_gradients(
        embedding, LENGTH, WIDTH, Kernel.of_matrix(matrix), IDS[:1], SEGMENTS[:1]
    )
    assert set(alike) == set(resolved) == {"token", "position", "segment"}
    for name, value in alike.items():
        assert value == pytest.approx(float(resolved[name]), rel=1e-12)


def test_texts_whose_tokens_are_alike_are_one_batch() -> None:
    """The loss is the mean over all of their tokens, whatever tells those apart."""
    model = moments.Transformer(
        2, 64, 4, 12, embedding=moments.Embedding(50, 0.02), head=moments.Head(loss="masked")
    )
    texts = np.random.default_rng(3).integers(50, size=(3, 12))
    by_token = moments.predict(model, token_ids=texts)
    for batch in (1, 3):
        alike = moments.predict(model, token_ids=texts, tokens=False, batch=batch)
        assert alike.resolution == "tokens alike"
        np.testing.assert_allclose(alike.grad_variance, by_token.grad_variance, rtol=0.02)
    with pytest.raises(moments.DomainError, match="batch"):
        moments.predict(model, token_ids=texts, tokens=False, batch=2)


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_texts_under_strong_logits_tell_words_apart() -> None:
    """Zipf's law of any length as well as one text or several; not tokens that are described."""

    def by_word(model: moments.Transformer, **inputs: Any) -> bool:
        return moments.predict(model, **inputs).resolution.endswith("and of words")

    strong = moments.preset("tinyllama-1.1b", seq_len=512).replace(layers=1)
    text = np.arange(512) % 300
    assert by_word(strong)
    assert by_word(strong, token_ids=text)
    assert not by_word(strong.replace(head=None), variance=1.0, correlation=0.2)
    assert by_word(strong.replace(seq_len=40))
    assert by_word(moments.preset("gpt2", seq_len=512).replace(layers=1))
    assert by_word(strong, token_ids=np.stack([text, text[::-1]]))


def test_bad_texts_are_named() -> None:
    embedding = TEXTS["gpt2"]
    with pytest.raises(DomainError, match="vocab_size"):
        text_kernel(embedding, LENGTH, IDS + 5)
    with pytest.raises(DomainError, match="seq_len"):
        text_kernel(embedding, LENGTH + 1, IDS)
    with pytest.raises(DomainError, match="pad shorter sequences"):
        text_kernel(embedding, LENGTH, [[0] * LENGTH, [0]])
    with pytest.raises(DomainError, match="12"):
        embedding_gradients(embedding, LENGTH, WIDTH, Kernel.of_matrix(np.eye(6)), IDS)
    with pytest.raises(DomainError, match="d_model"):
        text_kernel(TEXTS["original"], LENGTH, IDS)
    for wrong, word in (
        ({"scale": 0.0}, "scale"),
        ({"positions": "rotary"}, "positions"),
        ({"positions": "sinusoidal", "position_variance": 0.1}, "position_variance"),
        ({"padding_id": 6}, "padding_id"),
    ):
        with pytest.raises(DomainError, match=word):
            Embedding(6, 0.1, **wrong)  # type: ignore[arg-type]
    full = TEXTS["bert"]
    assert Embedding.from_dict(full.to_dict()) == full
    assert "sinusoidal" in str(TEXTS["original"])


# --- images ---------------------------------------------------------------------------------------

PATCHES = PatchEmbedding(16, 8, 0.01, 0.2, class_token=True, class_variance=0.5, bias_variance=0.1)


def pixels() -> np.ndarray:
    return np.concatenate([photograph(16), photograph(16, top=False)])


def test_patches_are_those_of_a_convolution() -> None:
    images = pixels()
    unfolded = functional.unfold(torch.as_tensor(images), 8, stride=8).transpose(1, 2).numpy()
    assert np.array_equal(cut_patches(PATCHES, images), unfolded)
    assert check_pixels(PATCHES, images[0]).shape == (1, 3, 16, 16)


def test_photograph_is_a_photograph() -> None:
    image = photograph(64)
    assert image.shape == (1, 3, 64, 64)
    assert -1 <= image.min() < image.max() <= 1
    rows = image[:, :, 1:] - image[:, :, :-1]
    # Neighbouring pixels are alike, unlike noise's: E (a - b)^2 < var.
    assert np.mean(rows**2) < 0.5 * image.var()
    assert not np.allclose(image, photograph(64, top=False))
    with pytest.raises(DomainError, match="image_size"):
        photograph(0)


def test_image_kernel_and_gradients_of_what_embeds() -> None:
    """A real convolution, class vector and position table, drawn 400 times."""
    images, draws = pixels(), 400
    generator = torch.Generator().manual_seed(3)
    rng = np.random.default_rng(6)
    count = len(images) * PATCHES.seq_len
    mixing = rng.normal(size=(count, count))
    kernel = image_kernel(PATCHES, images, WIDTH)
    gradients = image_gradients(PATCHES, images, WIDTH, Kernel.of_matrix(mixing @ mixing.T))
    moments, norms = [], {name: [] for name in gradients}

    def normal(variance: float, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (drawn * math.sqrt(variance)).requires_grad_()

    for _ in range(draws):
        drawn = {
            "patch": normal(PATCHES.patch_variance, WIDTH, 3, 8, 8),
            "patch.bias": normal(PATCHES.bias_variance or 0.0, WIDTH),
            "class": normal(PATCHES.class_variance, 1, 1, WIDTH),
            "position": normal(PATCHES.position_variance, PATCHES.seq_len, WIDTH),
        }
        seen = functional.conv2d(
            torch.as_tensor(images), drawn["patch"], drawn["patch.bias"], stride=8
        )
        first = drawn["class"].expand(len(images), 1, WIDTH)
        x = torch.cat([first, seen.flatten(2).transpose(1, 2)], 1) + drawn["position"]
        x = x.reshape(count, WIDTH)
        moments.append((x @ x.T / WIDTH).detach().numpy())
        x.backward(torch.as_tensor(mixing @ rng.normal(size=(count, WIDTH))))
        for name, values in norms.items():
            values.append(drawn[name].grad.square().sum().item())  # type: ignore[union-attr]
    error = np.std(moments, 0) / math.sqrt(draws)
    assert (np.abs(kernel.off_diagonal - np.mean(moments, 0)) < 4.5 * error).all()
    for name, values in norms.items():
        stderr = float(np.std(values)) / math.sqrt(draws)
        assert gradients[name] == pytest.approx(float(np.mean(values)), abs=4 * stderr)


def test_bad_images_are_named() -> None:
    with pytest.raises(DomainError, match="pixels"):
        image_kernel(PATCHES, np.zeros((1, 3, 16, 8)), WIDTH)
    with pytest.raises(DomainError, match="finite"):
        image_kernel(PATCHES, np.full((3, 16, 16), np.nan), WIDTH)
    fixed = PATCHES.replace(position_variance=0.0, positions="sinusoidal")
    with pytest.raises(DomainError, match="a multiple of 4"):
        image_kernel(fixed, np.zeros((3, 16, 16)), 66)
    with pytest.raises(DomainError, match="gradient"):
        image_gradients(PATCHES, pixels(), WIDTH, Kernel.of_matrix(np.eye(3)))
    for wrong, word in (
        ({"patch_size": 5}, "patch_size"),
        ({"class_token": False}, "class_variance"),
        ({"patch_variance": 0.0}, "patch_variance"),
        ({"bias_variance": -1.0}, "bias_variance"),
    ):
        with pytest.raises(DomainError, match=word):
            PATCHES.replace(**wrong)
    assert PatchEmbedding.from_dict(PATCHES.to_dict()) == PATCHES
    assert "4 patches" in str(PATCHES)
    assert PATCHES.seq_len == 5


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_of_two_moments_the_one_not_given_is_the_embeddings(norm: bool, causal: bool) -> None:
    embedding = Embedding(50, 0.03, 0.02, norm=norm, norm_epsilon=0.0, dropout=0.1)
    model = moments.Transformer(
        layers=2, d_model=64, heads=4, seq_len=8, causal=causal, embedding=embedding
    )
    whole = moments.predict(model)
    alike = moments.predict(model, correlation=0.2)
    assert alike.variance[0] == pytest.approx((1.0 if norm else 0.03 + 0.02) / 0.9)
    assert alike.correlation[0] == pytest.approx(0.2)
    large = moments.predict(model, variance=[0.5, 2.0])
    assert large.variance[:, 0] == pytest.approx([0.5, 2.0])
    assert large.correlation[:, 0] == pytest.approx(whole.correlation[0])
    assert whole.correlation[0] > 0.01
