"""The end of the network: heads and their loss against torch, which draws and differentiates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moments.cross_entropy import softmax_expectations
from moments.embedded import embedded_alike, joint_kernel
from moments.embedding import Embedding
from moments.errors import DomainError
from moments.head import Head
from moments.head_parts import head_chain
from moments.inputs import gaussian
from moments.laws.head import CROSS_ENTROPY
from moments.output import carried_amplitude, output_moments
from moments.propagate import Point, Trace, forward
from moments.softmax_agreement import rise
from moments.state import Gradient, Kernel, Signal
from moments.targets import text_targets
from moments.transformer import Transformer

WIDTH, VOCAB, LENGTH, SEQUENCES = 128, 500, 24, 2
SMALL = 0.3 / WIDTH


def text(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.4, (SEQUENCES, LENGTH)) % VOCAB


def model_with(head: Head, embedding: Embedding, **changes: Any) -> Transformer:
    settings: dict[str, Any] = {"norm_epsilon": 1e-5, "norm_affine": True} | changes
    return Transformer(1, WIDTH, 4, LENGTH, embedding=embedding, head=head, **settings)


# --- the referee: the last layer's output is the embedded text ------------------------------------


@dataclass
class Draws:
    """One row per draw of the weights."""

    loss: list[float] = field(default_factory=list)
    logit: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    weights: dict[str, list[float]] = field(default_factory=dict)


def _normal(generator: torch.Generator, variance: float, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * math.sqrt(variance)
    return drawn.requires_grad_()


def _normed(x: Tensor, model: Transformer, gain: Tensor, bias: Tensor) -> Tensor:
    if model.normalization == "rmsnorm":
        return functional.rms_norm(x, x.shape[-1:], gain, eps=model.norm_epsilon)
    return functional.layer_norm(x, x.shape[-1:], gain, bias, eps=model.norm_epsilon)


def simulate(model: Transformer, ids: np.ndarray, targets: np.ndarray, draws: int) -> Draws:
    generator = torch.Generator().manual_seed(7)
    embedding, head = model.embedding, model.head
    rows, goals = torch.as_tensor(ids), torch.as_tensor(targets).reshape(-1)
    activations = {"gelu": functional.gelu, "tanh": torch.tanh}
    found = Draws()
    for _ in range(draws):
        table = _normal(generator, embedding.token_variance, embedding.vocab_size, WIDTH)
        places = _normal(generator, embedding.position_variance, LENGTH, WIDTH)
        x = embedding.scale * table[rows] + places
        x.retain_grad()
        first = head.norm_gain if head.norm else 1.0
        gains = [torch.full((WIDTH,), g, dtype=x.dtype).requires_grad_() for g in (first, 1.0)]
        shifts = [torch.zeros(WIDTH, dtype=x.dtype).requires_grad_() for _ in range(2)]
        matrices = {"final.norm.gain": gains[0], "head.norm.gain": gains[1]}
        matrices |= {"final.norm.bias": shifts[0], "head.norm.bias": shifts[1]}
        h = _normed(x, model, gains[0], shifts[0]) if head.norm else x
        if head.loss == "classification":
            h = h[:, 0] if head.pool == "first" else h.mean(1)
        if head.dropout:
            mask = torch.rand(h.shape, generator=generator, dtype=h.dtype) >= head.dropout
            h = h * mask / (1 - head.dropout)
        if head.transform:
            matrix = _normal(generator, head.transform_variance, WIDTH, WIDTH)
            bias = _normal(generator, 0.0, WIDTH)
            matrices |= {"head.transform": matrix, "head.transform.bias": bias}
            h = activations[head.transform](h @ matrix + bias)
            h = _normed(h, model, gains[1], shifts[1]) if head.transform_norm else h
        last = table
        if not head.tied:
            last = _normal(generator, head.weight_variance, head.classes or VOCAB, WIDTH)
            matrices["head"] = last
        bias = _normal(generator, 0.0, len(last))
        matrices["head.bias"] = bias
        logits = head.output_scale * h @ last.T + bias
        if head.logit_softcap:
            logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
        loss = functional.cross_entropy(
            logits.reshape(-1, len(last)), goals, label_smoothing=head.label_smoothing
        )
        loss.backward()
        gradient = x.grad.reshape(-1, WIDTH)
        found.loss.append(loss.item())
        found.logit.append(logits.square().mean().item())
        found.single.append(gradient.square().mean().item())
        found.total.append(gradient.sum(0).square().sum().item() / WIDTH)
        matrices["token"] = table
        for name, value in matrices.items():
            if value.grad is not None:
                found.weights.setdefault(name, []).append(value.grad.square().sum().item())
    return found


def agree(predicted: Any, measured: list[float], accepted: float) -> None:
    """Within three standard errors of the mean, and what the approximation accepts."""
    mean = float(np.mean(measured))
    error = float(np.std(measured)) / math.sqrt(len(measured))
    assert float(predicted) == pytest.approx(mean, abs=3 * error + accepted * abs(mean))


TABLES = Embedding(VOCAB, SMALL, SMALL)
CASES = {
    "untied": (Head(tied=False, weight_variance=0.05 / WIDTH, bias=True), TABLES, {}),
    "sharp": (Head(tied=False, weight_variance=3 / WIDTH), TABLES, {}),
    "tied": (Head(), TABLES, {}),
    "gained": (Head(norm_gain=2.5), Embedding(VOCAB, SMALL, 0.1 * SMALL), {}),
    "gained, untied": (Head(norm_gain=0.5, tied=False, weight_variance=8 / WIDTH), TABLES, {}),
    "tied to what dominates": (Head(), Embedding(VOCAB, SMALL, 0.1 * SMALL), {}),
    "gemma": (
        Head(logit_softcap=3.0),
        Embedding(VOCAB, SMALL, WIDTH * SMALL, scale=math.sqrt(WIDTH)),
        {"normalization": "rmsnorm"},
    ),
    "scaled and smoothed": (
        Head(tied=False, weight_variance=1.0, output_scale=WIDTH**-0.5, label_smoothing=0.2),
        TABLES,
        {},
    ),
    "no norm": (Head(norm=False), Embedding(VOCAB, 1 / WIDTH, 2 / WIDTH), {"norm": "none"}),
    "dropped": (Head(tied=False, weight_variance=1 / WIDTH, dropout=0.2), TABLES, {}),
    "bert": (
        Head(
            transform="gelu", transform_variance=1 / WIDTH, transform_bias_variance=0.0, bias=True
        ),
        TABLES,
        {},
    ),
}
DRAWS = {"bert": 24, "no norm": 48}


@pytest.mark.parametrize("name", CASES)
def test_language_model_heads(name: str) -> None:
    """Measured over 60 draws: loss within .4 %, gradients within 2 %, both their own error."""
    head, embedding, changes = CASES[name]
    model, ids = model_with(head, embedding, **changes), text()
    targets = np.full(ids.shape, -100)
    targets[:, :-1] = ids[:, 1:]
    measured = simulate(model, ids, targets, DRAWS.get(name, 32))
    first = joint_kernel(embedding, LENGTH, ids)
    found = output_moments(model, gaussian(first, LENGTH, WIDTH, True), token_ids=ids)
    agree(found.loss, measured.loss, 0.002)
    agree(found.logit_variance, measured.logit, 0.01)
    assert found.gradient is not None
    kernel = found.gradient.kernel
    agree(kernel.mean_diagonal(), measured.single, 0.015)
    agree(kernel.pairs.sum(), measured.total, 0.03)
    spread = float(np.std(measured.loss))
    assert found.loss_stderr == pytest.approx(spread, rel=3 / math.sqrt(2 * len(measured.loss)))
    weights = found.weights()
    for weight, values in measured.weights.items():
        if weight in weights:
            agree(weights[weight], values, 0.03)
    assert ("head" in weights) != head.tied
    assert ("final.norm.gain" in weights) == head.norm
    assert ("head.norm.gain" in weights) == (head.transform is not None)
    assert ("head.bias" in weights) == head.bias


def test_a_gain_before_the_matrix_is_a_factor_on_it() -> None:
    """The same function of the same draws, whether the gain or the matrix has the factor."""
    ids = text()
    found = []
    for gain in (1.0, 2.5):
        head = Head(tied=False, weight_variance=3 / WIDTH / gain**2, norm_gain=gain)
        model = model_with(head, TABLES)
        first = joint_kernel(TABLES, LENGTH, ids)
        found.append(output_moments(model, gaussian(first, LENGTH, WIDTH, True), token_ids=ids))
    one, other = found
    assert other.loss == pytest.approx(one.loss, rel=1e-12)
    assert one.gradient is not None
    assert other.gradient is not None
    np.testing.assert_allclose(other.gradient.kernel.pairs, one.gradient.kernel.pairs, rtol=1e-10)
    before, after = one.weights(), other.weights()
    assert after["head"] == pytest.approx(2.5**2 * before["head"], rel=1e-10)
    for name in ("final.norm.gain", "final.norm.bias"):
        assert after[name] == pytest.approx(before[name] / 2.5**2, rel=1e-10)


def test_tied_table_gathers_both_gradients() -> None:
    """The overlap of input and output part, exact where nothing lies between."""
    from moments.embedded import embedding_gradients

    head, embedding, _ = CASES["tied to what dominates"]
    model, ids = model_with(head, embedding), text()
    targets = np.full(ids.shape, -100)
    targets[:, :-1] = ids[:, 1:]
    measured = simulate(model, ids, targets, 32)
    first = joint_kernel(embedding, LENGTH, ids)
    found = output_moments(model, gaussian(first, LENGTH, WIDTH, True), token_ids=ids)
    assert found.gradient is not None
    read = embedding_gradients(embedding, LENGTH, WIDTH, found.gradient.kernel, ids)
    agree(read["token"] + found.table(), measured.weights["token"], 0.02)
    without = simulate(model_with(head, embedding), ids, targets, 1)
    assert set(without.weights) == {"final.norm.gain", "final.norm.bias", "head.bias", "token"}


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("hidden", [False, True])
def test_classification(pool: str, hidden: bool) -> None:
    options: dict[str, Any] = {}
    if hidden:
        options = {"transform": "tanh", "transform_variance": 1 / WIDTH, "transform_norm": False}
    head = Head(
        tied=False,
        weight_variance=1 / WIDTH,
        loss="classification",
        classes=10,
        pool=pool,
        **options,
    )
    model, ids, labels = model_with(head, TABLES), text(), np.array([3, 7])
    measured = simulate(model, ids, labels, 64)
    signal = gaussian(joint_kernel(TABLES, LENGTH, ids), LENGTH, WIDTH, True)
    found = output_moments(model, signal, targets=labels)
    agree(found.loss, measured.loss, 0.005)
    assert found.gradient is not None
    agree(found.gradient.kernel.mean_diagonal(), measured.single, 0.03)
    agree(found.gradient.kernel.pairs.sum(), measured.total, 0.04)
    agree(found.weights()["head"], measured.weights["head"], 0.03)


def test_hidden_layer_and_its_norm_return_the_gradient_of_one_token() -> None:
    """Isotropic gradients through LayerNorm and GELU at d = 128, 20000 draws, to .2 %."""
    generator, variance = torch.Generator().manual_seed(0), 0.46
    z = torch.randn(20_000, WIDTH, generator=generator, dtype=torch.float64) * math.sqrt(variance)
    z.requires_grad_()
    h = functional.layer_norm(functional.gelu(z), (WIDTH,), eps=0.0)
    h.backward(torch.randn(h.shape, generator=generator, dtype=h.dtype))
    assert z.grad is not None
    head = Head(
        tied=False, weight_variance=1.0, norm=False, transform="gelu", transform_variance=1 / WIDTH
    )
    model = model_with(head, TABLES, norm_epsilon=0.0)
    kernel = Kernel(variance, 0.0)
    signal = gaussian(kernel, LENGTH, WIDTH, True)
    _, back = forward(head_chain(model, head, 1), signal, Trace())
    # The matrix has as many outputs as inputs and variance 1/d: it leaves the variance as it is.
    sent = back(Gradient(Kernel(1.0, 0.0), LENGTH)).kernel.diagonal
    agree(sent, z.grad.square().mean(1).tolist(), 0.002)


# --- without a text -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", ["causal", "masked"])
def test_tokens_alike_average_over_texts(tied: bool, loss: str) -> None:
    """Statistics of Zipf's law against the average over texts that are drawn by it."""
    head = Head(tied=tied, weight_variance=None if tied else SMALL, loss=loss, target_share=0.5)
    embedding, vocab_size = Embedding(60, SMALL, SMALL), 60
    model = model_with(head, embedding)
    alike = gaussian(embedded_alike(embedding, LENGTH, "refined"), LENGTH, WIDTH, True)
    predicted = output_moments(model, alike)
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, vocab_size + 1)
    frequency /= frequency.sum()
    losses, singles, pairs = [], [], []
    for _ in range(150):
        ids = rng.choice(vocab_size, (1, LENGTH), p=frequency)
        targets = None
        if loss == "masked":
            chosen = rng.permutation(LENGTH) < LENGTH // 2
            targets = np.where(chosen, rng.choice(vocab_size, (1, LENGTH), p=frequency), -100)
        signal = gaussian(joint_kernel(embedding, LENGTH, ids), LENGTH, WIDTH, True)
        found = output_moments(model, signal, token_ids=ids, targets=targets)
        assert found.gradient is not None
        losses.append(float(found.loss))
        singles.append(float(found.gradient.kernel.mean_diagonal()))
        pairs.append(float(found.gradient.kernel.mean_pairs()))
    assert predicted.gradient is not None
    agree(predicted.loss, losses, 0.001)
    agree(predicted.gradient.kernel.diagonal, singles, 0.003)
    # The pairs' products of averages are not averages of products.
    agree(predicted.gradient.kernel.pairs, pairs, 0.06)


def test_unknown_text_by_token_averages_to_tokens_alike() -> None:
    head = Head(tied=False, weight_variance=SMALL)
    model = model_with(head, TABLES)
    kernel = embedded_alike(TABLES, LENGTH, "refined")
    alike = output_moments(model, gaussian(kernel, LENGTH, WIDTH, True), batch=4)
    matrix = np.full((LENGTH, LENGTH), kernel.pairs)
    np.fill_diagonal(matrix, kernel.diagonal)
    signal = gaussian(Kernel.of_matrix(matrix), LENGTH, WIDTH, True)
    resolved = output_moments(model, signal, batch=4)
    assert resolved.loss == pytest.approx(float(alike.loss), rel=1e-9)
    assert alike.gradient is not None
    assert resolved.gradient is not None
    one, other = alike.gradient.kernel, resolved.gradient.kernel
    assert other.mean_diagonal() == pytest.approx(one.diagonal, rel=1e-9)
    assert other.mean_pairs() == pytest.approx(one.pairs, rel=1e-9)
    assert other.diagonal[-1] == 0  # the last token predicts nothing


def test_padding_is_neither_target_nor_source() -> None:
    ids, real = text(), np.ones((SEQUENCES, LENGTH))
    real[1, 10:] = 0
    targets = text_targets(Head(), VOCAB, LENGTH, ids, None, real)
    assert targets.count == LENGTH - 1 + 9
    assert not targets.active[LENGTH + 9 :].any()


# --- a softmax of Gaussian logits -----------------------------------------------------------------


@pytest.mark.parametrize("variance", [0.01, 1.0, 9.0])
def test_two_logits_by_quadrature(variance: float) -> None:
    """log(exp a + exp b) = (a + b)/2 + log(2 cosh((a - b)/2)): one-dimensional."""
    deviation = mp.sqrt(2 * variance)
    expect = lambda f: float(  # noqa: E731
        mp.quad(lambda x: mp.npdf(x) * f(deviation * x), [-12, -4, 0, 4, 12])
    )
    found = softmax_expectations(2, variance)
    assert found.log_sum == pytest.approx(expect(lambda z: mp.log(2 * mp.cosh(z / 2))), rel=1e-8)
    square = expect(lambda z: 1 / (1 + mp.exp(z)) ** 2)
    assert found.other.probability_square == pytest.approx(square, rel=1e-7)
    assert found.own.probability == pytest.approx(0.5, rel=1e-8)


def test_shifted_logits_by_simulation() -> None:
    """Own logit apart and a cap: 2e5 draws of 20 logits."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=(200_000, 20)) * np.sqrt(2.0)
    z[:, 0] = 1.5 + rng.normal(size=len(z))
    f, w = 4 * np.tanh(z / 4), 1 - np.tanh(z / 4) ** 2
    log_sum = np.log(np.exp(f).sum(1))
    p = np.exp(f - log_sum[:, None])
    found = softmax_expectations(20, 2.0, 1.5, 1.0, 4.0)
    agree(found.log_sum, list(log_sum), 0.0)
    for logit, columns in ((found.own, slice(0, 1)), (found.other, slice(1, None))):
        for value, samples in (
            (logit.value, f),
            (logit.square, f**2),
            (logit.slope_square, w**2),
            (logit.probability, p),
            (logit.probability_slope_square, p * w**2),
            (logit.square_slope_square, (p * w) ** 2),
            (logit.probability_square, p**2),
        ):
            agree(value, list(samples[:, columns].mean(1)), 0.0)


@pytest.mark.parametrize(("variance", "correlation"), [(3.0, 0.6), (30.0, 0.3), (30.0, 0.9)])
def test_correlated_softmaxes_agree(variance: float, correlation: float) -> None:
    """E sum_v p_v p'_v of 300 logits, 6000 draws; geometric it would be up to 40 % low."""
    rng, vocab_size = np.random.default_rng(11), 300
    common, *own = rng.normal(size=(3, 6000, vocab_size))
    both = []
    for each in own:
        z = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * each
        p = np.exp(math.sqrt(variance) * (z - z.max(1, keepdims=True)))
        both.append(p / p.sum(1, keepdims=True))
    other = softmax_expectations(vocab_size, variance).other
    ends = float(other.probability_square / other.probability**2)
    found = ends ** rise(vocab_size, variance, correlation) * other.probability**2 * vocab_size
    agree(found, list((both[0] * both[1]).sum(1)), 0.0)


def test_agreement_is_geometric_where_softmaxes_are_flat() -> None:
    assert rise(100, 0.9, 0.4) == 0.4
    assert rise(2000, 1.05, np.array([0.3, 1.0])) == pytest.approx([0.3, 1.0], rel=5e-3)


def test_expectations_keep_shape_and_sum_to_one() -> None:
    variance = np.array([[0.1, 2.0, 400.0]])
    found = softmax_expectations(100, variance, np.array([[0.0], [3.0]]), variance)
    assert found.log_sum.shape == found.own.value.shape == (2, 3)
    total = found.own.probability + 99 * found.other.probability
    assert total == pytest.approx(np.ones((2, 3)), abs=1e-6)


# --- what the stream carries ----------------------------------------------------------------------


def test_carried_amplitude_in_post_norm() -> None:
    """Two norms divide by the stream's deviation; skip scales multiply."""
    embedding = Embedding(VOCAB, 1.0, scale=2.0)
    model = model_with(Head(norm=False), embedding, norm="post", skip_scale=0.5)

    def point(layer: int, site: str, variance: float) -> Point:
        return Point(layer, site, Signal(Kernel(variance, 0.0), LENGTH))

    points = [
        point(0, "stream", 4.0),
        point(1, "attention.heads", 9.0),
        point(1, "attention.sum", 2.0),
        point(1, "attention.norm", 1.0),
        point(1, "ffn.sum", 5.0),
        point(1, "ffn.norm", 1.0),
        point(1, "stream", 1.0),
    ]
    assert carried_amplitude(model, points) == pytest.approx(2 * 0.5**2 / math.sqrt(10))


# --- what cannot be -------------------------------------------------------------------------------


def test_bad_requests_are_named() -> None:
    signal = gaussian(joint_kernel(TABLES, LENGTH, text()), LENGTH, WIDTH, True)
    with pytest.raises(DomainError, match=r"declare model\.head"):
        output_moments(Transformer(1, WIDTH, 4, LENGTH), signal)
    with pytest.raises(DomainError, match="token table"):
        output_moments(Transformer(1, WIDTH, 4, LENGTH, head=Head()), signal)
    model = model_with(Head(), TABLES)
    with pytest.raises(DomainError, match="targets"):
        output_moments(model, signal, token_ids=text(), targets=text() + VOCAB)
    with pytest.raises(DomainError, match="-100"):
        output_moments(model, signal, token_ids=text(), targets=np.full_like(text(), -100))
    with pytest.raises(DomainError, match="token_ids"):
        output_moments(model, signal, targets=text())
    for wrong, word in (
        ({"tied": False}, "weight_variance"),
        ({"loss": "classification"}, "tied"),
        ({"transform": "gelu"}, "transform_variance"),
        ({"loss": "ranking"}, "loss"),
        ({"output_scale": 0.0}, "output_scale"),
        ({"classes": 5}, "classes"),
        ({"transform": "swosh", "transform_variance": 1.0}, "swosh"),
    ):
        with pytest.raises(DomainError, match=word):
            Head(**wrong)


def test_declaration_goes_round() -> None:
    head = Head(transform="gelu", transform_variance=0.01, loss="masked", bias=True)
    assert Head.from_dict(head.to_dict()) == head
    assert "gelu" in str(head)
    assert head.replace(bias=False).bias is False
    with pytest.raises(DomainError, match="head field"):
        Head.from_dict({"depth": 3})


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [0.05, 1.0, 3.0])
def test_closed_forms_are_the_limit_of_many_logits(variance: float) -> None:
    laws = CROSS_ENTROPY.under("refined")
    vocab_size = 50_000
    exact = softmax_expectations(vocab_size, variance)
    square = vocab_size * float(exact.other.probability_square)
    point = {"vocab_size": float(vocab_size), "x_variance": variance, "grad_variance": 1.0}
    # Left out: the square of the sum's relative variance, e^{2v}/V^2 times small numbers.
    slack = 3 * math.exp(3 * variance) / vocab_size**2
    assert laws["mean"](**point) == pytest.approx(float(exact.log_sum), abs=slack)
    spread = (1 - 2 / vocab_size + square) / vocab_size
    assert laws["grad_variance"](**point) == pytest.approx(spread, rel=1e-3)


def test_closed_forms_of_one_and_of_two_tokens_by_simulation() -> None:
    """1000 logits of variance 1, tokens correlated by .6, 4000 draws."""
    rng = np.random.default_rng(5)
    vocab_size, correlation, draws = 1000, 0.6, 4000
    common, first, second = rng.normal(size=(3, draws, vocab_size))
    shared, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    losses, gradients = [], []
    for z in (shared * common + own * first, shared * common + own * second):
        log_sum = np.log(np.exp(z).sum(1))
        losses.append(log_sum - z[:, 0])
        p = np.exp(z - log_sum[:, None])
        p[:, 0] -= 1
        gradients.append(p)
    laws = CROSS_ENTROPY.under("refined")
    values = {
        "vocab_size": float(vocab_size),
        "x_variance": 1.0,
        "x_correlation": correlation,
        "pattern_correlation": 1.0,
        "grad_variance": 1.0,
        "grad_covariance": 1.0,
    }
    one, other = (loss - loss.mean() for loss in losses)
    agree(laws["mean"](**values), list(losses[0]), 1e-4)
    agree(laws["variance"](**values), list(one**2), 2e-3)
    agree(laws["covariance"](**values), list(one * other), 2e-3)
    agree(laws["grad_variance"](**values), list((gradients[0] ** 2).mean(1)), 1e-3)
    agree(laws["grad_covariance"](**values), list((gradients[0] * gradients[1]).mean(1)), 1e-3)
