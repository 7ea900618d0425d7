"""The end of the network: heads and their loss against torch, which draws and differentiates."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor
from torch.nn import functional

from moments.engine.composition import forward
from moments.engine.state import Gradient, Kernel
from moments.engine.trace import Run
from moments.errors import DomainError
from moments.formulas.head import CROSS_ENTROPY
from moments.layers.architecture import declare
from moments.layers.embedding import text_kernel
from moments.layers.head.components import head_chain
from moments.layers.head.cross_entropy import _wide_from, softmax_expectations
from moments.layers.head.output import carried_amplitude, output_moments
from moments.layers.head.softmax_agreement import _log_product, agreement_share
from moments.layers.head.targets import text_targets
from moments.model.embedding import Embedding
from moments.model.head import Head
from moments.model.transformer import Transformer
from moments.prediction.predict import predict
from moments.prediction.stack import gaussian

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
    first = text_kernel(embedding, LENGTH, ids)
    found = output_moments(model, gaussian(first, LENGTH, WIDTH, True), token_ids=ids)
    agree(found.loss, measured.loss, 0.002)
    agree(found.logit_variance, measured.logit, 0.01)
    assert found.gradient is not None
    kernel = found.gradient.kernel
    agree(kernel.mean_diagonal(), measured.single, 0.015)
    agree(kernel.off_diagonal.sum(), measured.total, 0.03)
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
        first = text_kernel(TABLES, LENGTH, ids)
        found.append(output_moments(model, gaussian(first, LENGTH, WIDTH, True), token_ids=ids))
    one, other = found
    assert other.loss == pytest.approx(one.loss, rel=1e-12)
    assert one.gradient is not None
    assert other.gradient is not None
    np.testing.assert_allclose(
        other.gradient.kernel.off_diagonal, one.gradient.kernel.off_diagonal, rtol=1e-10
    )
    before, after = one.weights(), other.weights()
    assert after["head"] == pytest.approx(2.5**2 * before["head"], rel=1e-10)
    for name in ("final.norm.gain", "final.norm.bias"):
        assert after[name] == pytest.approx(before[name] / 2.5**2, rel=1e-10)


def test_tied_table_gathers_both_gradients() -> None:
    """The overlap of input and output part, exact where nothing lies between."""
    from moments.layers.embedding import embedding_gradients

    head, embedding, _ = CASES["tied to what dominates"]
    model, ids = model_with(head, embedding), text()
    targets = np.full(ids.shape, -100)
    targets[:, :-1] = ids[:, 1:]
    measured = simulate(model, ids, targets, 32)
    first = text_kernel(embedding, LENGTH, ids)
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
    signal = gaussian(text_kernel(TABLES, LENGTH, ids), LENGTH, WIDTH, True)
    found = output_moments(model, signal, targets=labels)
    agree(found.loss, measured.loss, 0.005)
    assert found.gradient is not None
    agree(found.gradient.kernel.mean_diagonal(), measured.single, 0.03)
    agree(found.gradient.kernel.off_diagonal.sum(), measured.total, 0.04)
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
    _, record = forward(head_chain(model, head, 1), signal)
    # The matrix has as many outputs as inputs and variance 1/d: it leaves the variance as it is.
    sent = record.backward(Gradient(Kernel(1.0, 0.0), LENGTH)).grad_in.kernel.diagonal
    agree(sent, z.grad.square().mean(1).tolist(), 0.002)


# --- without a text -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", ["causal", "masked"])
def test_tokens_alike_average_over_texts(tied: bool, loss: str) -> None:
    """Statistics of Zipf's law against the average over texts that are drawn by it."""
    head = Head(tied=tied, weight_variance=None if tied else SMALL, loss=loss, target_share=0.5)
    embedding, vocab_size = Embedding(60, SMALL, SMALL), 60
    model = model_with(head, embedding)
    alike = gaussian(text_kernel(embedding, LENGTH, resolved=False), LENGTH, WIDTH, True)
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
        signal = gaussian(text_kernel(embedding, LENGTH, ids), LENGTH, WIDTH, True)
        found = output_moments(model, signal, token_ids=ids, targets=targets)
        assert found.gradient is not None
        losses.append(float(found.loss))
        singles.append(float(found.gradient.kernel.mean_diagonal()))
        pairs.append(float(found.gradient.kernel.mean_off_diagonal()))
    assert predicted.gradient is not None
    agree(predicted.loss, losses, 0.001)
    agree(predicted.gradient.kernel.diagonal, singles, 0.003)
    # The pairs' products of averages are not averages of products.
    agree(predicted.gradient.kernel.off_diagonal, pairs, 0.06)


def test_unknown_text_by_token_averages_to_tokens_alike() -> None:
    head = Head(tied=False, weight_variance=SMALL)
    model = model_with(head, TABLES)
    kernel = text_kernel(TABLES, LENGTH, resolved=False)
    alike = output_moments(model, gaussian(kernel, LENGTH, WIDTH, True), batch=4)
    matrix = np.full((LENGTH, LENGTH), kernel.off_diagonal)
    np.fill_diagonal(matrix, kernel.diagonal)
    signal = gaussian(Kernel.of_matrix(matrix), LENGTH, WIDTH, True)
    resolved = output_moments(model, signal, batch=4)
    assert resolved.loss == pytest.approx(float(alike.loss), rel=1e-9)
    assert alike.gradient is not None
    assert resolved.gradient is not None
    one, other = alike.gradient.kernel, resolved.gradient.kernel
    assert other.mean_diagonal() == pytest.approx(one.diagonal, rel=1e-9)
    assert other.mean_off_diagonal() == pytest.approx(one.off_diagonal, rel=1e-9)
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
    found = (
        ends ** agreement_share(vocab_size, variance, correlation)
        * other.probability**2
        * vocab_size
    )
    agree(found, list((both[0] * both[1]).sum(1)), 0.0)


def test_agreement_is_geometric_where_softmaxes_are_flat() -> None:
    assert agreement_share(100, 0.9, 0.4) == 0.4
    assert agreement_share(2000, 1.05, np.array([0.3, 1.0])) == pytest.approx([0.3, 1.0], rel=5e-3)


def test_expectations_keep_shape_and_sum_to_one() -> None:
    variance = np.array([[0.1, 2.0, 400.0]])
    found = softmax_expectations(100, variance, np.array([[0.0], [3.0]]), variance)
    assert found.log_sum.shape == found.own.value.shape == (2, 3)
    total = found.own.probability + 99 * found.other.probability
    assert total == pytest.approx(np.ones((2, 3)), abs=1e-6)


@pytest.mark.parametrize("variance", [60.0, 1e3, 1e10])
@pytest.mark.parametrize("count", [2, 1000])
def test_wide_logits_by_quadrature(variance: float, count: int) -> None:
    """z_v + G_v with Gumbel variables: E log S is the mean of their largest, less Euler's constant.

    mpmath integrates the law of one, P(z + G < y), by its own rule, and E p^2 where V = 2.
    """
    deviation = mp.sqrt(variance)
    found = softmax_expectations(count, variance)
    if count == 2:
        twice = mp.sqrt(2) * deviation
        ends = [-mp.inf, -40, 0, 40, mp.inf]
        # log(e^a + e^b) = (a + b)/2 + |a - b|/2 + log1p(e^-|a - b|), p (1 - p) = 1/(2 cosh(x/2))^2.
        near = lambda f: float(mp.quad(lambda x: mp.npdf(x, 0, twice) * f(x), ends))  # noqa: E731
        mean = float(twice / mp.sqrt(2 * mp.pi)) + near(lambda x: mp.log1p(mp.exp(-abs(x))))
        one_sided = near(lambda x: mp.sech(x / 2) ** 2 / 4)
        assert found.log_sum == pytest.approx(mean, rel=1e-9)
        first = found.other.probability - found.other.probability_square
        assert first == pytest.approx(one_sided, rel=1e-5)
        return
    # The largest of normal deviates; the Gumbel variable's mean is added and taken away again, and
    # what its fluctuation does to the largest is of the second order.
    edge = [-6, 0, 2, 3, 4, 6, 12]
    largest = mp.quad(lambda x: x * count * mp.npdf(x) * mp.ncdf(x) ** (count - 1), edge)
    second = mp.pi**2 / 6 * mp.sqrt(2 * mp.log(count)) / deviation
    allowed = float(second) * (1.2 if variance > 100 else 2.0)
    assert 0 < found.log_sum - float(largest * deviation) < allowed + 1e-9 * found.log_sum
    assert count * found.other.probability == pytest.approx(1.0, rel=1e-8)


def test_wide_logits_by_simulation() -> None:
    """Of the other's kind, at a variance of 400: 2e5 draws of 8 logits, one of a law of its own."""
    rng = np.random.default_rng(5)
    z = rng.normal(size=(200_000, 8)) * 20.0
    z[:, 0] = 25.0 + 3.0 * rng.normal(size=len(z))
    top = z.max(1, keepdims=True)
    p = np.exp(z - top)
    size = p.sum(1, keepdims=True)
    p /= size
    found = softmax_expectations(8, 400.0, 25.0, 9.0)
    agree(found.log_sum, list((top + np.log(size))[:, 0]), 0.0)
    for logit, columns in ((found.own, slice(0, 1)), (found.other, slice(1, None))):
        agree(logit.probability, list(p[:, columns].mean(1)), 0.0)
        agree(logit.probability_square, list((p[:, columns] ** 2).mean(1)), 0.0)
        close = logit.probability - logit.probability_square
        agree(close, list((p * (1 - p))[:, columns].mean(1)), 0.0)


def test_both_quadratures_agree_where_they_join() -> None:
    """Nodes of the logit on one side, of a Gumbel variable on the other."""
    edge = _wide_from(1000)
    low, high = (
        softmax_expectations(1000, v, 30.0, v) for v in (edge * (1 - 1e-9), edge * (1 + 1e-9))
    )
    assert high.log_sum == pytest.approx(low.log_sum, rel=1e-8)
    for one, other in ((low.own, high.own), (low.other, high.other)):
        assert other.probability == pytest.approx(one.probability, rel=1e-7)
        assert other.probability_square == pytest.approx(one.probability_square, rel=1e-7)


def test_capped_wide_logits_end_at_the_cap() -> None:
    """Of z/c to infinity logits are +c or -c: a binomial number of either."""
    found = softmax_expectations(6, 1e12, softcap=3.0)
    number = np.arange(7)
    chance = np.array([math.comb(6, int(k)) for k in number]) / 64
    log_sum = np.log(number * math.exp(3.0) + (6 - number) * math.exp(-3.0))
    assert found.log_sum == pytest.approx(float(chance @ log_sum), rel=1e-5)
    assert found.other.square == pytest.approx(9.0, rel=1e-5)


def test_beyond_all_bounds_logits_only_grow() -> None:
    at, far = softmax_expectations(50, 1e13), softmax_expectations(50, 1e17)
    assert far.log_sum == pytest.approx(100 * at.log_sum, rel=1e-6)
    close = far.other.probability - far.other.probability_square
    first = at.other.probability - at.other.probability_square
    assert close == pytest.approx(first / 100, rel=1e-3)


def test_largest_of_correlated_logits_agree() -> None:
    """Two logits of variance to infinity: both largest are one with probability 1/2 + asin(rho)/pi.

    The differences z_1 - z_2 of two such tokens are normal and correlate by rho.
    """
    for correlation in (0.15, 0.65):
        wanted = 0.5 + math.asin(correlation) / math.pi
        found = 2 * math.exp(_log_product(2, 1e12, correlation))
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore::moments.errors.ValidityWarning")
@pytest.mark.parametrize("head", [Head(), Head(tied=False, weight_variance=1e10)])
def test_heads_of_large_logits_have_finite_moments(head: Head) -> None:
    """torch's own N(0, 1) table, and what no softmax was meant for: size of work and numbers."""
    model = Transformer(1, 768, 12, 8, embedding=Embedding(50_257, 1.0), head=head)
    found = predict(model)
    numbers = np.array([found.loss, found.logit_variance, *found.grad_variance])
    assert np.isfinite(numbers).all()
    assert numbers.min() > 0
    assert np.isfinite(found.grad_variance_band).all()
    if not head.tied:  # what a target's logit lacks to the largest of all, which is independent
        size = math.sqrt(768 * 1e10)
        x = np.linspace(-9.0, 9.0, 40_001)
        below = special.ndtr(x) ** 50_257
        largest = float(np.trapezoid((x > 0) - below, x))
        assert found.logit_variance == pytest.approx(size**2, rel=1e-6)
        assert found.loss == pytest.approx(size * largest, rel=1e-4)


@pytest.mark.filterwarnings("ignore::moments.errors.ValidityWarning")
@pytest.mark.parametrize("words", [2, 32])
def test_rows_that_win_with_certainty(words: int) -> None:
    """Few rows of variance 1, one of them read: all others' probabilities are e^-500."""
    ids = np.arange(8) % words
    model = Transformer(1, 768, 12, 8, causal=True, embedding=Embedding(words, 1.0), head=Head())
    found = predict(model, token_ids=ids)
    numbers = [found.grad_variance, found.grad_correlation, found.grad_variance_band.ravel()]
    assert np.isfinite(np.concatenate(numbers)).all()
    # At the normalised output E_id - E_t over T, less E_id's share 1/s^2 along the stream of
    # variance s^2, by which the norm divides what it returns. The last token has no target.
    level = found.token_variance[-1, :-1]
    wanted = float(((2 - 1 / level) / level).sum() / 7**2 / 8)
    assert found.grad_variance[-1] == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_several_configurations_at_once(causal: bool) -> None:
    """Each as if it were alone; its tokens alike, attention is interpolated, to 7e-4 here."""
    own = {"head": Head(tied=False, weight_variance=0.02, vocab_size=100)}
    model = Transformer(1, 32, 2, 6, causal=causal, norm="none", **own)
    variances = np.linspace(0.5, 2.0, 3)
    found = predict(model, variance=variances, correlation=0.2)
    assert len(json.loads(found.to_json())["loss"]) == 3
    for index, variance in enumerate(variances):
        one = predict(model, variance=variance, correlation=0.2)
        for name in ("loss", "loss_stderr", "logit_variance", "grad_variance", "grad_correlation"):
            assert getattr(found, name)[index] == pytest.approx(
                getattr(one, name), rel=1e-6 if causal else 1e-2
            )


# --- what the stream carries ----------------------------------------------------------------------


def test_carried_amplitude_in_post_norm() -> None:
    """Two norms divide by the stream's deviation; skip scales multiply."""
    embedding = Embedding(VOCAB, 1.0, scale=2.0)
    model = model_with(Head(norm=False), embedding, norm="post", skip_scale=0.5)
    entering = gaussian(Kernel(4.0, 0.0), LENGTH, WIDTH, True)
    stack = declare(model, "refined").propagate(entering, Run())
    sums = [one.output.kernel.diagonal for one in stack.sites() if one.place[1].endswith("sum")]
    assert len(sums) == 2
    expected = 2 * 0.5**2 / math.sqrt(math.prod(sums))
    assert carried_amplitude(model, stack) == pytest.approx(expected, rel=1e-4)


# --- what cannot be -------------------------------------------------------------------------------


def test_bad_requests_are_named() -> None:
    signal = gaussian(text_kernel(TABLES, LENGTH, text()), LENGTH, WIDTH, True)
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


# --- the laws of a loss, against sampled logits ---------------------------------------------------


def test_laws_of_the_loss_by_sampling() -> None:
    """Two tokens' losses and gradients with all targets averaged out, and what is known of a sample
    (mean square and mean exponential of its logits) subtracted as control variates. Beyond five
    standard errors a term of the next order in 1/V is left."""
    random, vocab, first, second, correlation = np.random.default_rng(5), 400, 0.5, 0.9, 0.6
    shared = correlation * math.sqrt(first * second)
    series: dict[str, list[np.ndarray]] = {}
    for _ in range(12):
        own = random.standard_normal((1500, vocab))
        other = correlation * own
        other = other + math.sqrt(1 - correlation**2) * random.standard_normal(own.shape)
        z, y = own * math.sqrt(first), other * math.sqrt(second)
        sums = [np.exp(x - v / 2).mean(1) for x, v in ((z, first), (y, second))]
        a, b = (
            math.log(vocab) + v / 2 + np.log(s) for v, s in zip((first, second), sums, strict=True)
        )
        means = [x.mean(1) for x in (z, y)]
        squares, crossed = (z * z).mean(1), (z * y).mean(1)
        loss = a - means[0]  # averaged over targets
        same = a * b - a * means[1] - b * means[0] + crossed
        both = (vocab * loss * (b - means[1]) - same) / (vocab - 1)
        p = [
            np.exp(x - v / 2) / vocab / s[:, None]
            for x, v, s in zip((z, y), (first, second), sums, strict=True)
        ]
        drawn = {
            "mean": a - (sums[0] - 1),  # less the mean logit, which is 0 on average
            "loss": loss,
            "other": b - means[1],
            "square": a * a - 2 * a * means[0] + squares,
            "same": same,
            "both": both,
            "agreement": (p[0] * p[0]).sum(1),
            "overlap": (p[0] * p[1]).sum(1),
            "squares": squares,
            "crossed": crossed,
        }
        for name, values in drawn.items():
            series.setdefault(name, []).append(values)
    found = {name: np.concatenate(parts) for name, parts in series.items()}
    laws = CROSS_ENTROPY.under("refined")
    given = {"vocab_size": vocab, "x_variance": first}
    pair = {**given, "x_other_variance": second, "x_correlation": correlation}

    def agrees(samples: np.ndarray, value: float, scale: float) -> None:
        error = samples.std() / math.sqrt(len(samples))
        assert abs(samples.mean() - value) < 5 * error + 4 * scale / vocab**2, (value, error)

    agrees(found["mean"], laws["mean"](**given), 1.0)
    centre, beside = found["loss"].mean(), found["other"].mean()
    variance = found["square"] - 2 * centre * found["loss"] + centre**2
    agrees(variance - found["squares"] + first, laws["variance"](**given), 1.0)
    for pattern, name in ((1.0, "same"), (0.0, "both")):
        product = found[name] - centre * found["other"] - beside * found["loss"] + centre * beside
        known = (found["crossed"] - shared) * pattern
        agrees(product - known, laws["covariance"](**pair, pattern_correlation=pattern), 1.0)
        value = laws["grad_covariance"](**pair, pattern_correlation=pattern, grad_covariance=2.0)
        agrees(2 * (found["overlap"] - 2 / vocab + pattern) / vocab, value, 2.0 / vocab)
    value = laws["grad_variance"](**given, grad_variance=3.0)
    agrees(3 * (found["agreement"] - 2 / vocab + 1) / vocab, value, 3.0 / vocab)


def test_closed_forms_of_different_targets_and_variances_by_simulation() -> None:
    """200 logits of variances 1 and .4, tokens correlated by .6, 10,000 draws; e^v V terms count.

    Left out is the square of the sum's relative variance, (e/200)^2 = 2e-4 of the leading terms.
    """
    rng = np.random.default_rng(7)
    vocab_size, correlation, draws = 200, 0.6, 10_000
    common, first, second = rng.normal(size=(3, draws, vocab_size))
    shared, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    losses, gradients = [], []
    for target, variance, rest in ((0, 1.0, first), (1, 0.4, second)):
        z = math.sqrt(variance) * (shared * common + own * rest)
        log_sum = np.log(np.exp(z).sum(1))
        losses.append(log_sum - z[:, target])
        p = np.exp(z - log_sum[:, None])
        p[:, target] -= 1
        gradients.append(p)
    laws = CROSS_ENTROPY.under("refined")
    values = {
        "vocab_size": float(vocab_size),
        "x_variance": 1.0,
        "x_other_variance": 0.4,
        "x_correlation": correlation,
        "pattern_correlation": 0.0,
        "grad_variance": 1.0,
        "grad_covariance": 1.0,
    }
    one, other = (loss - loss.mean() for loss in losses)
    agree(laws["covariance"](**values), list(one * other), 0.02)
    agree(laws["grad_variance"](**values), list((gradients[0] ** 2).mean(1)), 1e-3)
    agree(laws["grad_covariance"](**values), list((gradients[0] * gradients[1]).mean(1)), 0.04)
    same = values | {"pattern_correlation": 1.0}
    gradients[1][:, [0, 1]] += [-1.0, 1.0]  # the second token's target is the first one's
    agree(laws["grad_covariance"](**same), list((gradients[0] * gradients[1]).mean(1)), 1e-3)


def test_vocabularies_beyond_any_transforms_rounding() -> None:
    """Where E p p' is below rounding, log V^2 E p p' is rho times the variance; it is within half a
    percent of that where both are known."""
    for vocab_size, variance, correlation in ((10**6, 2.0, 0.4), (10**6, 8.0, -0.4)):
        rise = _log_product(vocab_size, variance, correlation) + 2 * math.log(vocab_size)
        assert rise == pytest.approx(correlation * variance, rel=5e-3)
    head = Head(tied=False, vocab_size=10**12, weight_variance=0.05)
    found = predict(Transformer(1, 64, 4, 8, head=head))
    assert np.isfinite(found.grad_variance).all()
    assert found.loss == pytest.approx(math.log(1e12) + found.logit_variance / 2, rel=0.05)


def test_tokens_that_differ_little_are_interpolated() -> None:
    """Many at once, against each alone, which is evaluated: as a text's tokens differ, and capped
    logits of a variance of 60."""
    random = np.random.default_rng(0)
    for size, mean, softcap in ((0.3, 0.9, None), (60.0, 20.0, 30.0)):
        variance = size * (1 + 2e-3 * random.random(400))
        own_mean = mean + 0.4 * random.random(400)
        own_variance = variance * (1 - 4e-3 * random.random(400))
        many = softmax_expectations(5000, variance, own_mean, own_variance, softcap)
        for k in (0, 57, 399):
            one = (variance[k], own_mean[k], own_variance[k])
            alone = softmax_expectations(5000, *one, softcap)
            assert many.log_sum[k] == pytest.approx(float(alone.log_sum), rel=1e-10)
            for which in ("own", "other"):
                for name, value in vars(getattr(alone, which)).items():
                    found = getattr(getattr(many, which), name)[k]
                    assert found == pytest.approx(float(value), rel=1e-10, abs=1e-12), name
