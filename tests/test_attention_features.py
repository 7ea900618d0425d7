"""Variants of attention: joint batches, biases, grouped queries, positions, norms, memories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_sampling import Layer, sample
from numpy.typing import NDArray

import moments
from moments.engine.classes import PositionClasses, few_points
from moments.engine.state import Fluctuation, Gradient, Kernel, Signal
from moments.errors import DomainError
from moments.layers.attention.kernels import KernelAttention, Rotation
from moments.layers.attention.kernels.position_attention import ClassLogits, PositionAttention
from moments.layers.attention.kernels.relative_positions import RotaryMeans
from moments.layers.attention.self_attention import CrossAttention, SelfAttention, attended
from moments.model.positions import RelativeBias, Rotary, alibi_slopes

Array = NDArray[np.float64]

D_MODEL, HEADS, D_HEAD, LENGTH = 96, 4, 24, 10


def alike(length: int, variance: float, covariance: float) -> Array:
    return covariance + (variance - covariance) * np.eye(length)


def resolved(kernel: Array, width: int = D_MODEL) -> Signal:
    """Tokens of fixed norm."""
    return Signal(
        Kernel.of_matrix(kernel),
        len(kernel),
        width=width,
        fluctuation=Fluctuation(Kernel.of_matrix(0 * kernel)),
    )


def exchangeable(length: int, variance: float, covariance: float, width: int = D_MODEL) -> Signal:
    kernel = Kernel(variance, covariance)
    return Signal(kernel, length, width=width, fluctuation=Fluctuation(Kernel(0.0, 0.0)))


def text(length: int, seed: int = 0) -> Array:
    """Tokens with a common part, some of them repeated."""
    words = np.random.default_rng(seed).integers(0, length // 2, length)
    return np.asarray(0.25 + 0.35 * np.eye(length) + 0.4 * np.equal.outer(words, words))


def self_attention(**changes: Any) -> SelfAttention:
    settings: dict[str, Any] = {"drop_prob": 0.0, "has_bias": True} | changes
    weight = 1.3 / D_MODEL
    return SelfAttention(
        "attention.heads", D_MODEL, HEADS, D_HEAD, weight, weight, 1 / D_MODEL, **settings
    )


# --- one real layer, every variant ----------------------------------------------------------------

SLOPES = tuple(alibi_slopes(HEADS))
CAUSAL = np.tri(LENGTH, dtype=bool)
TABLE = RelativeBias(0.02, buckets=8, max_distance=16)
OFFSET = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]

# What the leaf declares, what is drawn, and errors allowed in % beyond four standard errors:
# of the output, of the gradient's paths together, of the projections' weight gradients.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float, float]]] = {
    "biases": (
        {"query_bias": 0.5, "key_bias": 0.4, "value_bias": 0.3},
        {"query_bias": 0.5, "key_bias": 0.4, "value_bias": 0.3},
        (1.0, 1.5, 5.0),
    ),
    "grouped queries": ({"kv_heads": 1}, {"kv_heads": 1}, (1.0, 1.5, 5.0)),
    "rotary": ({"rotary": Rotary()}, {"rotary": (1.0, 10000.0)}, (1.0, 1.5, 5.0)),
    "rotary of a part, biases": (
        {"rotary": Rotary(0.25), "query_bias": 0.3, "key_bias": 0.5},
        {"rotary": (0.25, 10000.0), "query_bias": 0.3, "key_bias": 0.5},
        (1.0, 1.5, 5.0),
    ),
    "distance penalty": ({"alibi": True}, {"alibi_slopes": SLOPES}, (1.0, 1.5, 5.0)),
    "relative bias": (
        {"relative_bias": TABLE},
        {"bucket": TABLE.bucket(OFFSET, True), "bias_variance": 0.02},
        (1.0, 1.5, 5.0),
    ),
    "rms queries and keys": ({"qk_norm": "rmsnorm"}, {"qk_norm": "rmsnorm"}, (1.5, 1.5, 7.0)),
    "normalised queries and keys": (
        {"qk_norm": "layernorm"},
        {"qk_norm": "layernorm"},
        (1.5, 1.5, 7.0),
    ),
    "soft cap": ({"logit_softcap": 4.0}, {"logit_softcap": 4.0}, (1.0, 1.5, 5.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_against_a_real_layer(name: str) -> None:
    declared, drawn, (forward, backward, weight) = VARIANTS[name]
    kernel, gradient = text(LENGTH), alike(LENGTH, 1.0, 0.3)
    scale = 1.3 / D_MODEL
    layer = Layer(D_MODEL, HEADS, D_HEAD, scale, scale, 1 / D_MODEL, allowed=CAUSAL, **drawn)
    truth = sample(layer, kernel, gradient, 500)
    leaf = self_attention(causal=True, **declared)
    output, pullback = leaf.forward(resolved(kernel))
    pulled = pullback(Gradient(Kernel.of_matrix(gradient), LENGTH))
    weights = pulled.weights()
    sent = pulled.gradient.kernel.off_diagonal
    paths = [truth[f"{path} path"] for path in ("query", "key", "value")]
    checks = [
        (np.trace(output.kernel.off_diagonal), truth["output"], forward),
        (output.kernel.off_diagonal.sum(), truth["output sum"], forward),
        # what correlates the value and key paths is of order 1/d_model
        (
            np.trace(sent),
            (sum(p for p, _ in paths), sum(e for _, e in paths)),
            backward,
        ),
    ]
    checks += [(weights[w], truth[w], weight) for w in ("query", "key", "value", "query.bias")]
    checks += [(weights["value.bias"], truth["value.bias"], 2.0)]
    if declared.get("rotary"):
        checks += [(weights["key.bias"], truth["key.bias"], 10.0)]
    if "relative_bias" in declared:
        checks += [(weights["relative_bias"], truth["relative_bias"], 8.0)]
    for ours, (mean, error), percent in checks:
        assert abs(float(ours) - mean) < 4 * error + percent / 100 * mean, (ours, mean, error)


def test_rotated_keys_of_tokens_without_correlation() -> None:
    """Products of a narrow head's queries fluctuate together with what rows are sensitive to, so
    rows of unlike tokens add to each other at a key. Traces, sums, and what is linear in both."""
    length, width, narrow, scale = 16, 64, 16, 3.0
    tokens, gradient = np.eye(length), alike(length, 1.0, 0.8)
    seen, size = np.tri(length, dtype=bool), scale**0.5 / width
    layer = Layer(width, 4, narrow, size, size, 1 / width, rotary=(1.0, 1e4), allowed=seen)
    truth = sample(layer, tokens, gradient, 500)
    place = np.arange(length, dtype=float)
    rotation = Rotation.of(*Rotary().frequencies(narrow), place, place)
    widths = {"d_model": float(width), "d_head": float(narrow)}
    attention = KernelAttention(
        tokens, logit_scale=scale, allowed=seen, rotation=rotation, **widths
    )
    key = attention.backward(gradient).key
    for found, name in ((np.trace(key), "key path"), (key.sum(), "key path sum")):
        mean, error = truth[name]
        assert abs(found - mean) < 4 * error + 0.03 * mean  # 16 % low without
    on_classes = PositionClasses(length, np.arange(1, length + 1))
    rotary_means = RotaryMeans.of(on_classes.key_counts(), *Rotary().frequencies(narrow))
    one = np.ones(length), np.zeros((length, length))
    logits = ClassLogits(one, one, one, scale, on_classes.key_counts(), rotary_means)
    own, pairs = PositionAttention(logits, **widths).backward(*alike_on_classes(gradient)).key
    np.testing.assert_allclose(own, np.diagonal(key), rtol=0.02)
    np.testing.assert_allclose(pairs.sum() - np.trace(pairs), key.sum() - np.trace(key), rtol=0.02)


def alike_on_classes(matrix: Array) -> tuple[Array, Array]:
    """Of every position a class: a token's own, and with others."""
    return np.diagonal(matrix).copy(), np.full(matrix.shape, matrix[0, 1])


def test_shared_keys_spread_the_norms() -> None:
    """Heads of one key and value overlap: the squared norm fluctuates more than 2/width."""
    kernel, scale = alike(LENGTH, 1.0, 0.5), 1.0 / D_MODEL
    for groups in (1, HEADS):
        layer = Layer(D_MODEL, HEADS, D_HEAD, scale, scale, scale, kv_heads=groups)
        variance, error = sample(layer, kernel, np.eye(LENGTH), 500)["spread"]
        leaf = SelfAttention("a", D_MODEL, HEADS, D_HEAD, scale, scale, scale, 0.0, kv_heads=groups)
        for signal in (resolved(kernel), exchangeable(LENGTH, 1.0, 0.5)):
            varies = leaf.forward(signal)[0].fluctuation
            assert varies is not None
            mean = varies.norms.total(LENGTH) / LENGTH**2
            assert abs(mean - variance) < 4 * error + 0.06 * variance


@pytest.mark.parametrize("groups", [1, HEADS])
def test_a_memory_shared_by_heads_spreads_the_norms(groups: int) -> None:
    queries, memory, scale = alike(8, 1.0, 0.3), alike(12, 1.0, 0.5), 1.0 / D_MODEL
    layer = Layer(D_MODEL, HEADS, D_HEAD, scale, scale, scale, kv_heads=groups)
    variance, error = sample(layer, queries, np.eye(8), 500, memory)["spread"]
    leaf = CrossAttention(
        "a", D_MODEL, HEADS, D_HEAD, scale, scale, scale, D_MODEL, kv_heads=groups
    )
    sides = (
        (resolved(queries), resolved(memory)),
        (exchangeable(8, 1.0, 0.3), exchangeable(12, 1.0, 0.5)),
    )
    for signal, read in sides:
        varies = leaf.attend(signal, read)[0].fluctuation
        assert varies is not None
        assert abs(varies.norms.total(8) / 64 - variance) < 4 * error + 0.06 * variance


@pytest.mark.parametrize("common", [0.0, 0.5])
@pytest.mark.parametrize("reads", [False, True])
def test_gains_of_normalised_queries_and_keys(reads: bool, common: float) -> None:
    """With gradients in common, what one head's queries have in common counts L times over."""
    length, width, d_head, scale = 32, 64, 32, 1 / 64
    tokens, gradient = np.eye(length), alike(length, 1.0, common)
    layer = Layer(width, 2, d_head, scale, scale, scale, qk_norm="rmsnorm")
    memory = alike(24, 1.0, 0.2) if reads else None
    truth = sample(layer, tokens, gradient, 400, memory)
    settings: dict[str, Any] = {"qk_norm": "rmsnorm", "norm_affine": True}
    received = Gradient(Kernel.of_matrix(gradient), length)
    signal, sizes = resolved(tokens, width), (scale, scale, scale)
    if reads:
        cross = CrossAttention("a", width, 2, d_head, *sizes, width, **settings)
        assert memory is not None
        pulled, _ = cross.attend(signal, resolved(memory, width))[1](received)
    else:
        own = SelfAttention("a", width, 2, d_head, *sizes, 0.0, **settings)
        pulled = own.forward(signal)[1](received)
    weights, prefix = pulled.weights(), "cross_" if reads else ""
    for name in ("query", "key"):
        mean, error = truth[f"{name}.norm.gain"]
        found = float(weights[f"{prefix}{name}.norm.gain"])
        assert abs(found - mean) < 2.5 * error + 0.05 * mean, (name, found, mean, error)


@pytest.mark.parametrize("given", ["documents", "text"])
@pytest.mark.filterwarnings("ignore::moments.errors.ValidityWarning")
def test_normalised_keys_on_classes_of_documents_and_texts(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On classes of any documents and texts as by token."""
    if given == "documents":  # of no text, by token as well
        monkeypatch.setattr("moments.prediction.resolution.repeating", lambda *_: False)
    length = 264 if given == "text" else 96
    tables = {"embedding": moments.Embedding(60, 0.02), "head": moments.Head()}
    model = moments.Transformer(1, 64, 4, length, causal=True, qk_norm="rmsnorm", **tables)
    told: dict[str, Any] = {"document_ids": np.repeat([0, 1, 2], 32)}
    if given == "text":
        told = {"token_ids": np.random.default_rng(0).zipf(1.3, length) % 60}
    found, exact = (moments.predict(model, tokens=tokens, **told) for tokens in (None, True))
    assert "classes" in found.resolution
    np.testing.assert_allclose(found.grad_variance, exact.grad_variance, rtol=0.02)


def test_a_memory_is_attended_to_as_own_tokens_are() -> None:
    """Of the same moments, it differs in one thing: those that ask share nothing with it."""
    kernel, scales = text(10), (1.2 / D_MODEL, 1.2 / D_MODEL, 1 / D_MODEL)
    tokens = Signal(
        Kernel.of_matrix(kernel),
        10,
        width=D_MODEL,
        fluctuation=Fluctuation(*map(Kernel.of_matrix, (0 * kernel, 2 * kernel**2 / D_MODEL))),
    )
    settings: dict[str, Any] = {"kv_heads": 2, "query_bias": 0.2, "has_bias": True}
    settings |= {"qk_norm": "layernorm", "norm_affine": True}
    own = SelfAttention("a", D_MODEL, HEADS, D_HEAD, *scales, 0.0, **settings)
    cross = CrossAttention("a", D_MODEL, HEADS, D_HEAD, *scales, D_MODEL, **settings)
    output, back = own.forward(tokens)
    read, back_read = cross.attend(tokens, tokens.replace())
    np.testing.assert_allclose(read.kernel.off_diagonal, output.kernel.off_diagonal)
    other, one = read.fluctuation, output.fluctuation
    assert other is not None
    assert one is not None
    np.testing.assert_allclose(other.norms.off_diagonal, one.norms.off_diagonal)
    assert other.overlaps is not None
    assert one.overlaps is not None
    np.testing.assert_allclose(other.overlaps.off_diagonal, one.overlaps.off_diagonal)
    assert other.shared is not None
    assert one.shared is not None
    assert not np.any(other.shared[0].off_diagonal)
    assert np.all(one.shared[0].diagonal > 0)
    received = Gradient(Kernel.of_matrix(alike(10, 1.0, 0.3)), 10)
    pulled, (across, _) = back(received), back_read(received)
    for one, other in ((pulled.weights, across.weights), (pulled.overlaps, across.overlaps)):
        assert one is not None
        assert other is not None
        found = dict(other())
        for name, norm in one().items():
            assert found.pop(f"cross_{name}") == pytest.approx(norm, rel=1e-9), name
        assert not found


def test_cross_attention_against_a_real_layer() -> None:
    queries, memory, gradient = text(8), text(12, 1), alike(8, 1.0, 0.3)
    width, scales = 64, (1.2 / D_MODEL, 1.2 / 64, 1 / 64)
    layer = Layer(D_MODEL, HEADS, D_HEAD, *scales, memory_width=width, query_bias=0.2)
    truth = sample(layer, queries, gradient, 600, memory)
    leaf = CrossAttention(
        "cross.heads", D_MODEL, HEADS, D_HEAD, *scales, width, query_bias=0.2, has_bias=True
    )
    output, pullback = leaf.attend(resolved(queries), resolved(memory, width))
    pulled, sent = pullback(Gradient(Kernel.of_matrix(gradient), 8))
    weights = pulled.weights()
    there = [truth["key path"], truth["value path"]]
    checks = [
        (np.trace(output.kernel.off_diagonal), truth["output"], 1.0),
        (output.kernel.off_diagonal.sum(), truth["output sum"], 1.0),
        (np.trace(pulled.gradient.kernel.off_diagonal), truth["query path"], 4.0),
        (
            np.trace(sent.kernel.off_diagonal),
            (sum(m for m, _ in there), sum(e for _, e in there)),
            2.0,
        ),
        (weights["cross_query"], truth["query"], 4.0),
        (weights["cross_key"], truth["key"], 8.0),
        (weights["cross_value"], truth["value"], 2.0),
        (weights["cross_query.bias"], truth["query.bias"], 4.0),
        (weights["cross_value.bias"], truth["value.bias"], 2.0),
    ]
    for ours, (mean, error), percent in checks:
        assert abs(float(ours) - mean) < 4 * error + percent / 100 * mean, (ours, mean, error)


# --- rotary positions at infinite width -----------------------------------------------------------


def _rotated_field(
    kernel: Array, tau: float, allowed: NDArray[np.bool_], rotary: Rotary, draws: int
) -> tuple[Array, Array]:
    """E a_ij a_kl and E (J_i C J_k)_jl for logits Re sum_m sqrt(share) e^{i w_m (j - i)} Z_m."""
    length, generator = len(kernel), np.random.default_rng(0)
    values, vectors = np.linalg.eigh(kernel)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    angle = np.arange(length)[None] - np.arange(length)[:, None]
    pairs, responses = np.zeros((2, length, length, length, length))
    for _ in range(draws):
        logits = np.zeros((length, length))
        for speed, share in zip(*rotary.frequencies(16), strict=True):
            one, two = (root @ generator.standard_normal((length, length)) @ root for _ in "ab")
            turned = np.cos(speed * angle) * one - np.sin(speed * angle) * two
            logits += np.sqrt(share) * turned
        logits = np.where(allowed, np.sqrt(tau) * logits, -np.inf)
        a = np.exp(logits - logits.max(1, keepdims=True))
        a /= a.sum(1, keepdims=True)
        jacobian = a[:, :, None] * np.eye(length) - a[:, :, None] * a[:, None, :]
        onward = (jacobian @ kernel).reshape(length**2, length)
        flat = onward @ jacobian.reshape(length**2, length).T
        responses += flat.reshape(pairs.shape)
        pairs += np.multiply.outer(a, a)
    return pairs / draws, responses / draws


# tau, the tokens' common part, and the error allowed in % of the traces of key and query paths.
FIELDS = [(1.0, 0.0, True, 3.0), (1.0, 0.7, True, 3.5), (3.0, 0.7, False, 8.0)]


@pytest.mark.parametrize(("tau", "common", "causal", "percent"), FIELDS)
def test_rotary_paths_at_infinite_width(
    tau: float, common: float, causal: bool, percent: float
) -> None:
    length = 20
    kernel = common + (1 - common) * (text(length) - 0.25) / 0.75
    gradient = alike(length, 1.0, 0.3)
    allowed = np.tri(length, dtype=bool) if causal else np.ones((length, length), bool)
    rotary = Rotary(base=1000.0)
    pairs, responses = _rotated_field(kernel, tau, allowed, rotary, 150)
    place = np.arange(length)
    shift = (place[None] - place[:, None])[None, :, None, :]
    moved = (place[None] - place[:, None])[:, None, :, None]
    weighted = responses * rotary.kernel(shift - moved, 16) * tau  # (i, j, k, l)
    truth = {
        "output": np.einsum("ijkl,jl->ik", pairs, kernel),
        "value": np.einsum("ijkl,ik->jl", pairs, gradient),
        "key": np.einsum("ijkl,ik,ik->jl", weighted, gradient, kernel),
        "query": gradient * np.einsum("ijkl,jl->ik", weighted, kernel),
    }
    where = place.astype(np.float64)
    rotation = Rotation.of(*rotary.frequencies(16), where, where)
    layer = KernelAttention(kernel, logit_scale=tau, allowed=allowed, rotation=rotation)
    parts = layer.backward(gradient)
    ours = {"output": layer.forward(), **parts._asdict()}
    allowed_percent = {"output": 1.5, "value": 3.0, "key": percent, "query": percent}
    for path, bound in allowed_percent.items():
        trace = np.trace(truth[path])
        assert abs(np.trace(ours[path]) / trace - 1) < bound / 100, path
        rest, whole = ours[path].sum() - truth[path].sum(), abs(truth[path]).sum()
        assert abs(rest) < 0.02 * (1 + tau) * whole + 1e-3 * trace, path
    # and it matters
    flat = KernelAttention(kernel, logit_scale=tau, allowed=allowed).backward(gradient)
    missed = flat.query.sum() / truth["query"].sum() - 1
    assert abs(missed) > 5 * abs(parts.query.sum() / truth["query"].sum() - 1)


def test_slow_rotation_is_no_rotation() -> None:
    length = 16
    kernel, gradient = text(length), alike(length, 1.0, 0.2)
    place = np.arange(length, dtype=np.float64)
    still = Rotation.of(np.array([1e-9]), np.ones(1), place, place)
    settings = {"logit_scale": 1.5, "d_model": 64.0, "d_head": 16.0, "drop_prob": 0.1}
    one = KernelAttention(kernel, rotation=still, **settings)
    two = KernelAttention(kernel, **settings)
    np.testing.assert_allclose(one.forward(), two.forward(), rtol=2e-3)
    total = two.backward(gradient).total
    np.testing.assert_allclose(one.backward(gradient).total, total, atol=1e-2 * np.abs(total).max())


@pytest.mark.parametrize("drop_prob", [0.0, 0.5])
def test_the_unit_of_the_tokens_is_free(drop_prob: float) -> None:
    """Tokens four times as large, logits of the same variance: the output is four times as large,
    and as dLogit grows with the values what reaches queries and keys stays the same."""
    kernel, gradient = text(12), alike(12, 1.0, 0.2)
    one, two = (
        KernelAttention(size * kernel, logit_scale=1.5 / size**2, drop_prob=drop_prob)
        for size in (1.0, 4.0)
    )
    np.testing.assert_allclose(two.forward(), 4.0 * one.forward(), rtol=1e-4)
    for path, same in zip(one.backward(gradient), two.backward(gradient), strict=True):
        np.testing.assert_allclose(same, path, atol=1e-4 * np.abs(path).max())


# --- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_prob", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["rotated", "penalised", "other keys", "memory"])
def test_values_are_sent_what_they_are_gathered_by(kind: str, drop_prob: float) -> None:
    queries, keys = (9, 14) if kind == "memory" else (14, 14)
    generator = np.random.default_rng(0)

    def random(length: int) -> Array:
        features = generator.standard_normal((length, 2 * length))
        return np.asarray(features @ features.T / (2 * length))

    place = np.arange(keys, dtype=np.float64)
    changes: dict[str, dict[str, Any]] = {
        "rotated": {"rotation": Rotation.of(*Rotary(base=50.0).frequencies(8), place, place)},
        "penalised": {"bias": -0.3 * np.abs(place[:, None] - place)},
        "other keys": {"key_kernel": random(keys)},
        "memory": {"query_kernel": random(queries)},
    }
    mask = None if kind == "memory" else np.tri(keys, dtype=bool)
    layer = KernelAttention(
        text(keys),
        logit_scale=1.5,
        allowed=mask,
        drop_prob=drop_prob,
        value_bias=0.1,
        **changes[kind],
    )
    gradient = random(queries)
    sent = (text(keys) * layer.backward(gradient).value).sum()
    assert sent == pytest.approx((layer.forward() * gradient).sum(), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_bias": 0.5, "value_bias": 0.3},
        {"qk_norm": "layernorm", "key_bias": 0.2},
        {"logit_softcap": 3.0},
        {"drop_prob": 0.2, "query_bias": 0.2, "value_bias": 0.2},
    ],
)
def test_tokens_alike_agree_with_tokens_resolved(changes: dict[str, Any]) -> None:
    leaf = self_attention(**changes)
    found = []
    for signal, gradient in (
        (exchangeable(LENGTH, 1.0, 0.2), Kernel(1.0, 0.3)),
        (resolved(alike(LENGTH, 1.0, 0.2)), Kernel.of_matrix(alike(LENGTH, 1.0, 0.3))),
    ):
        output, pullback = leaf.forward(signal)
        pulled = pullback(Gradient(gradient, LENGTH))
        kernels = (output.kernel, pulled.gradient.kernel)
        numbers = [n for k in kernels for n in (np.mean(k.diagonal), k.mean_off_diagonal())]
        found.append([*numbers, *(float(v) for v in pulled.weights().values())])
    np.testing.assert_allclose(found[0], found[1], rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize(("logit_variance", "covariance"), [(1.0, 0.2), (4.0, 0.2), (1.0, 0.8)])
def test_the_laws_and_statistics_of_alike_rows_are_one(
    logit_variance: float, covariance: float
) -> None:
    """Two evaluations of one layer: the laws', and that of any queries, which knows no law."""
    weight = logit_variance**0.5 / 256
    leaf = SelfAttention("a", 256, 4, 64, weight, weight, 1 / 256, 0.1)
    signal = exchangeable(64, 1.0, covariance, 256)
    found = []
    for way in (leaf.forward(signal)[1], attended(leaf, signal, signal)):
        pulled = way(Gradient(Kernel(1.0, 0.1), 64))
        kernels = (way.output.kernel, pulled.gradient.kernel)  # type: ignore[attr-defined]
        numbers = [n for k in kernels for n in (k.diagonal, k.off_diagonal)]
        found.append([*numbers, *pulled.weights().values(), *pulled.overlaps().values()])
    np.testing.assert_allclose(found[0][:-2], found[1][:-2], rtol=3e-5)
    np.testing.assert_allclose(found[0][-2:], found[1][-2:], rtol=4e-4)


def test_memory_alike_agrees_with_memory_resolved() -> None:
    leaf = CrossAttention(
        "c", D_MODEL, HEADS, D_HEAD, 1 / D_MODEL, 1 / 64, 1 / 64, 64, drop_prob=0.1, value_bias=0.1
    )
    found = []
    for signal, memory, gradient in (
        (exchangeable(8, 1.0, 0.4), exchangeable(12, 1.2, 0.2, 64), Kernel(1.0, 0.3)),
        (
            resolved(alike(8, 1.0, 0.4)),
            resolved(alike(12, 1.2, 0.2), 64),
            Kernel.of_matrix(alike(8, 1.0, 0.3)),
        ),
    ):
        output, pullback = leaf.attend(signal, memory)
        pulled, sent = pullback(Gradient(gradient, 8))
        kernels = (output.kernel, pulled.gradient.kernel, sent.kernel)
        numbers = [n for k in kernels for n in (np.mean(k.diagonal), k.mean_off_diagonal())]
        found.append([*numbers, *(float(v) for v in pulled.weights().values())])
    np.testing.assert_allclose(found[0], found[1], rtol=5e-3)


def test_a_joint_batch_is_its_sequences() -> None:
    """Inside its block nothing changes; padding and windows reach every sequence."""
    length = 10
    kernel, gradient = text(2 * length), alike(2 * length, 1.0, 0.2)
    padding = ((True,) * 7 + (False,) * 3, (True,) * length)
    for changes in ({}, {"window": 4}, {"rotary": Rotary()}, {"alibi": True}):
        leaf = self_attention(causal=True, sequences=2, padding=padding, **changes)
        joint, pullback = leaf.forward(resolved(kernel))
        back = pullback(Gradient(Kernel.of_matrix(gradient), length)).gradient.kernel.off_diagonal
        for index in range(2):
            part = slice(index * length, (index + 1) * length)
            own = self_attention(causal=True, padding=padding[index : index + 1], **changes)
            alone, own_back = own.forward(resolved(kernel[part, part]))
            np.testing.assert_allclose(
                joint.kernel.off_diagonal[part, part], alone.kernel.off_diagonal, rtol=2e-2
            )
            received = Gradient(Kernel.of_matrix(gradient[part, part]), length)
            sent = own_back(received).gradient.kernel.off_diagonal
            assert np.trace(back[part, part]) == pytest.approx(np.trace(sent), rel=1e-2)


def test_gradients_of_biases_that_start_at_zero() -> None:
    leaf = self_attention(causal=True)
    gradient = Kernel.of_matrix(alike(LENGTH, 1.0, 0.3))
    pulled = leaf.forward(resolved(text(LENGTH)))[1](Gradient(gradient, LENGTH))
    weights = pulled.weights()
    assert weights["value.bias"] == pytest.approx(HEADS * D_HEAD * gradient.off_diagonal.sum())
    assert weights["query.bias"] > 0.0
    assert weights["key.bias"] < 1e-4 * weights["query.bias"]
    none = self_attention(has_bias=False).forward(resolved(text(LENGTH)))[1]
    unbiased = none(Gradient(gradient, LENGTH)).weights
    assert unbiased is not None
    assert set(unbiased()) == {"query", "key", "value"}


def test_extremes_stay_finite() -> None:
    for changes in (
        {"rotary": Rotary(), "key_bias": 1.0},
        {"qk_norm": "rmsnorm", "norm_epsilon": 1e-6},
        {"alibi": True},
        {"window": 1},
        {"relative_bias": RelativeBias(0.1)},
        {"logit_softcap": 1e-3},
    ):
        for variance in (0.0, 1e-12, 1.0, 1e3):
            leaf = SelfAttention(
                "a", 32, 2, 16, variance, variance, 1 / 32, 0.1, causal=True, **changes
            )
            output, pullback = leaf.forward(resolved(text(8), 32))
            pulled = pullback(Gradient(Kernel.of_matrix(np.eye(8)), 8))
            assert np.all(np.isfinite(output.kernel.off_diagonal))
            assert np.all(np.isfinite(pulled.gradient.kernel.off_diagonal))
            assert all(np.all(np.isfinite(v)) for v in pulled.weights().values())


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"causal": True}, {"alibi": True}, {"window": 3}])
def test_positions_need_tokens_resolved(changes: dict[str, Any]) -> None:
    with pytest.raises(DomainError, match="tokens=True"):
        self_attention(**changes).forward(exchangeable(LENGTH, 1.0, 0.2))


def test_positions_without_effect_need_nothing() -> None:
    for changes in ({"window": LENGTH}, {"relative_bias": RelativeBias(0.0)}):
        output, _ = self_attention(**changes).forward(exchangeable(LENGTH, 1.0, 0.2))
        plain, _ = self_attention().forward(exchangeable(LENGTH, 1.0, 0.2))
        assert output.kernel.diagonal == plain.kernel.diagonal


def test_bad_batches_are_named() -> None:
    with pytest.raises(DomainError, match="3 sequences"):
        self_attention(sequences=3).forward(resolved(text(LENGTH)))
    leaf = self_attention(sequences=2, padding=((True,) * 5,))
    with pytest.raises(DomainError, match="padding"):
        leaf.forward(resolved(text(LENGTH)))
    memory = CrossAttention("c", D_MODEL, HEADS, D_HEAD, 0.01, 0.01, 0.01, 64)
    with pytest.raises(DomainError, match="memory"):
        memory.attend(resolved(text(8)), exchangeable(8, 1.0, 0.2, 64))


def test_a_strong_cap_is_noted() -> None:
    noted, _ = self_attention(logit_softcap=0.5).forward(exchangeable(LENGTH, 1.0, 0.2))
    quiet, _ = self_attention(logit_softcap=30.0).forward(exchangeable(LENGTH, 1.0, 0.2))
    assert any("soft cap" in note for note in noted.notes)
    assert quiet.notes == ()


def test_a_large_table_of_relative_biases_is_noted() -> None:
    for variance, noted in ((0.1, False), (0.3, True)):
        leaf = self_attention(relative_bias=RelativeBias(variance))
        output, _ = leaf.forward(resolved(text(LENGTH)))
        assert any("relative biases" in note for note in output.notes) is noted


def test_few_points_average_polynomials() -> None:
    values = np.log(alibi_slopes(12))
    nodes, shares = few_points(values, 4)
    for power in range(8):
        assert shares @ nodes**power == pytest.approx((values**power).mean(), rel=1e-9)
    assert len(few_points(values[:3], 4)[0]) == 3


# Logit variance, table's variance, buckets, max_distance, tokens, whether causal.
TABLES = [
    (1.0, 0.002, 32, 128, 16, False),
    (2.0, 0.002, 32, 128, 40, False),
    (2.0, 0.002, 8, 16, 40, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("logits", "variance", "buckets", "far", "length", "causal"), TABLES)
def test_gradients_of_tables_of_relative_biases_against_a_real_layer(
    logits: float, variance: float, buckets: int, far: int, length: int, causal: bool
) -> None:
    """By their mean weights rows move 25 to 55 % less than they do, 8 to 27 % under a mask."""
    of_logits = logits**0.5 / 128
    weights = moments.Weights(of_logits, of_logits, 1 / 128, 1 / 128, 1 / 128, 1 / 512)
    table = RelativeBias(variance, buckets, far)
    model = moments.Transformer(
        1, 128, 4, length, causal=causal, weights=weights, relative_bias=table
    )
    given = {"correlation": 0.3, "grad_correlation": 0.2}
    measured = moments.simulate(model, **given, seeds=120, batch=16, seed=1).weight_gradients()
    truth = measured[(measured["layer"] == 1) & (measured["weight"] == "relative_bias")].iloc[0]
    for tokens in (True, None):
        found = moments.predict(model, tokens=tokens, **given).weight_gradients()
        found = found[(found["layer"] == 1) & (found["weight"] == "relative_bias")]
        error = abs(float(found["squared_norm"].iloc[0]) - truth["squared_norm"])
        assert error < 3 * truth["squared_norm_stderr"] + 0.04 * truth["squared_norm"]
