"""Errors and cost of `KernelAttention` against Monte Carlo of one attention layer.

The samplers share no code with the package. `sample_field` draws the logits of an infinitely wide
layer as a Gaussian field and integrates the value gradient out; `sample_layer` draws tokens, query
and key matrices and a gradient, and runs attention forward and backward by hand.

    python benchmarks/kernel_attention_validation.py [--draws 2000] [--section NAME ...]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.layers.attention.kernels import KernelAttention

Array = NDArray[np.float64]
PATHS = ("output", "value", "key", "query", "cross", "total")


class Sample(NamedTuple):
    """Mean kernels over draws, (L, L) each; standard errors of (trace, sum off the diagonal)."""

    mean: dict[str, Array]
    error: dict[str, Array]


def summary(kernel: Array) -> Array:
    """(trace, sum off the diagonal)."""
    trace = np.trace(kernel)
    return np.array([trace, kernel.sum() - trace])


def _root(kernel: Array) -> Array:
    values, vectors = np.linalg.eigh(kernel)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def _softmax(logits: Array, allowed: Array) -> Array:
    logits = np.where(allowed, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _collect(
    draw: Callable[[np.random.Generator], dict[str, Array]], batches: int, seed: int
) -> Sample:
    generator = np.random.default_rng(seed)
    drawn = [draw(generator) for _ in range(batches)]
    mean = {name: np.mean([one[name] for one in drawn], axis=0) for name in drawn[0]}
    spread = {
        name: np.std([summary(one[name]) for one in drawn], axis=0) / math.sqrt(batches - 1)
        for name in drawn[0]
    }
    return Sample(mean, spread)


def sample_field(
    kernel: Array,
    gradient: Array,
    logit_scale: float,
    allowed: Array | None = None,
    drop_prob: float = 0.0,
    draws: int = 2000,
    seed: int = 0,
    batch: int = 50,
) -> Sample:
    """Kernels of a layer of infinite width, where only the logits are random (and the dropout).

    With a = softmax(s), mask m, J = diag(a) - a a^T and the logit gradient J diag(m) X g, the paths
    are sums over rows of tau E[...]; the mask is averaged in closed form: E m m^T = 1 + eps I.
    """
    length = len(kernel)
    allowed = np.ones((length, length), bool) if allowed is None else allowed
    root, extra = _root(kernel), 1.0 / (1.0 - drop_prob) - 1.0
    variance = np.diag(kernel)

    def draw(generator: np.random.Generator) -> dict[str, Array]:
        field = generator.standard_normal((batch, length, length))
        a = _softmax(math.sqrt(logit_scale) * root @ field @ root, allowed)
        eye = np.eye(length)
        value_kernel = kernel + extra * np.diag(variance)  # of one row with itself
        output, query = np.zeros((2, length, length))
        value = np.einsum("bij,ik,bkl->jl", a, gradient, a, optimize=True) / batch
        value = value + extra * np.diag(np.einsum("bij,i->j", a * a, np.diag(gradient)) / batch)
        key = np.zeros((length, length))
        for one in a:
            jacobian = one[:, :, None] * eye - one[:, :, None] * one[:, None, :]  # (i, j, l)
            onward = jacobian @ kernel  # (i, j, l)
            same = jacobian @ value_kernel @ jacobian  # (i, j, l)
            flat = onward.reshape(length, -1)
            across = flat @ onward.transpose(0, 2, 1).reshape(length, -1).T  # tr(J C J' C)
            query += across - np.diag(np.diag(across))
            query += np.diag(np.einsum("ijl,lj->i", same, kernel))
            pair_weights = logit_scale * gradient * kernel
            off = pair_weights - np.diag(np.diag(pair_weights))
            mixed = np.tensordot(off, jacobian, 1)  # (i, j, l)
            key += np.einsum("ijl,ilm->jm", onward, mixed, optimize=True)
            key += np.einsum("i,ijl->jl", np.diag(pair_weights), same)
            output += one @ kernel @ one.T + extra * np.diag((one * one) @ variance)
        query *= logit_scale * gradient / batch
        key /= batch
        zero = np.zeros_like(key)
        return {
            "output": output / batch,
            "value": value,
            "key": key,
            "query": query,
            "cross": zero,
            "total": value + key + query,
            "mean_attention": a.mean(0),
        }

    return _collect(draw, max(2, draws // batch), seed)


def sample_layer(
    kernel: Array,
    gradient: Array,
    logit_scale: float,
    d_model: int,
    d_head: int,
    allowed: Array | None = None,
    drop_prob: float = 0.0,
    draws: int = 6000,
    seed: int = 0,
    batch: int = 100,
) -> tuple[Sample, Array]:
    """Kernels of one softmax head with fresh tokens, query, key and gradient in every draw.

    Tokens are Gaussian with the given kernel and then scaled to |x|^2 = d_model C_ii, as behind a
    normalisation; the second result is their kernel, which the scaling changes by O(1/d_model).
    """
    length = len(kernel)
    allowed = np.ones((length, length), bool) if allowed is None else allowed
    root, gradient_root = _root(kernel), _root(gradient)
    weight = math.sqrt(math.sqrt(logit_scale) / d_model)

    def draw(generator: np.random.Generator) -> dict[str, Array]:
        normal = generator.standard_normal
        x = root @ normal((batch, length, d_model))
        x *= np.sqrt(d_model * np.diag(kernel)[:, None] / (x**2).sum(-1, keepdims=True))
        query_weight = weight * normal((batch, d_model, d_head))
        key_weight = weight * normal((batch, d_model, d_head))
        q, k = x @ query_weight, x @ key_weight
        a = _softmax(q @ k.swapaxes(1, 2) / math.sqrt(d_head), allowed)
        mask = (generator.random(a.shape) >= drop_prob) / (1.0 - drop_prob)
        y = (a * mask) @ x
        g = gradient_root @ normal((batch, length, d_model))
        value = (a * mask).swapaxes(1, 2) @ g
        inner = mask * (g @ x.swapaxes(1, 2))
        delta = a * (inner - (a * inner).sum(-1, keepdims=True)) / math.sqrt(d_head)
        query = (delta @ k) @ query_weight.swapaxes(1, 2)
        key = (delta.swapaxes(1, 2) @ q) @ key_weight.swapaxes(1, 2)

        def overlap(u: Array, v: Array) -> Array:
            return np.asarray((u @ v.swapaxes(1, 2)).mean(0) / d_model)

        cross = overlap(value, key)
        total = value + key + query
        return {
            "output": overlap(y, y),
            "value": overlap(value, value),
            "key": overlap(key, key),
            "query": overlap(query, query),
            "cross": cross + cross.T,
            "total": overlap(total, total),
            "tokens": overlap(x, x),
        }

    sample = _collect(draw, max(2, draws // batch), seed)
    return sample, sample.mean["tokens"]


def predicted(layer: KernelAttention, gradient: Array) -> dict[str, Array]:
    """The layer's kernels under the samplers' names."""
    paths = layer.backward(gradient)
    return {"output": layer.forward(), "total": paths.total, **paths._asdict()}


def test_kernels(length: int) -> dict[str, Array]:
    """Token kernels of unit diagonal, from exchangeable to far from it."""
    generator = np.random.default_rng(5)
    eye, index = np.eye(length), np.arange(length)
    cluster = generator.permutation(length) % 8
    together = np.equal.outer(cluster, cluster)
    # word frequencies of a text: Zipf, with many repeats
    words = np.minimum(generator.zipf(1.3, length), 200)
    repeated = np.equal.outer(words, words)

    def gram(features: Array) -> Array:
        features = features / np.linalg.norm(features, axis=1)[:, None]
        return np.asarray(features @ features.T)

    return {
        "correlation 0": eye,
        "correlation 0.3": 0.3 + 0.7 * eye,
        "correlation 0.9": 0.9 + 0.1 * eye,
        "8 clusters at 0.5": 0.5 * eye + 0.5 * together,
        "8 clusters at 0.9": 0.1 * eye + 0.9 * together,
        "repeated tokens": 0.5 * eye + 0.5 * repeated,
        "positions": 0.1
        + 0.8 * np.exp(-0.5 * (np.subtract.outer(index, index) / 6.0) ** 2)
        + 0.1 * eye,
        "random, rank L/4": gram(generator.standard_normal((length, length // 4))),
        "random, rank 6": gram(generator.standard_normal((length, 6)) + 0.6),
    }


def _report(layer: KernelAttention, sample: Sample, gradient: Array, paths: tuple[str, ...]) -> str:
    """Per path, error in % of the trace and of the sum off it (standard error in brackets)."""
    kernels = predicted(layer, gradient)
    cells = []
    for name in paths:
        truth = summary(sample.mean[name])
        error = 100.0 * (summary(kernels[name]) / truth - 1.0)
        noise = 100.0 * sample.error[name] / np.abs(truth)
        off = f" {error[1]:+5.1f}({noise[1]:.1f})" if noise[1] < 5.0 else ""
        cells.append(f"{name} {error[0]:+5.1f}({noise[0]:.1f}){off}")
    return " | ".join(cells)


def _whole(layer: KernelAttention, sample: Sample, gradient: Array) -> float:
    """Relative Frobenius distance of the total gradient kernel in %, Monte Carlo noise included."""
    truth = sample.mean["total"]
    difference = layer.backward(gradient).total - 0.5 * (truth + truth.T)
    return float(100.0 * np.linalg.norm(difference) / np.linalg.norm(truth))


def infinite_width(draws: int) -> Iterator[str]:
    """Kernels and masks at infinite width, L = 64."""
    length = 64
    gradient = 0.2 + 0.8 * np.eye(length)
    for name, kernel in test_kernels(length).items():
        for mask_name, mask in (("full", None), ("causal", np.tri(length, dtype=bool))):
            for scale in (1.0, 3.0):
                sample = sample_field(kernel, gradient, scale, mask, draws=draws)
                layer = KernelAttention(kernel, logit_scale=scale, allowed=mask)
                text = _report(
                    layer, sample, gradient, ("output", "value", "key", "query", "total")
                )
                whole = _whole(layer, sample, gradient)
                yield f"{name:18s} {mask_name:6s} tau {scale:g}: {text} | kernel {whole:.1f}"


def causal_exchangeable(draws: int) -> Iterator[str]:
    """Causal masks over correlations and logit scales, L = 48."""
    length = 48
    mask, gradient = np.tri(length, dtype=bool), 0.5 + 0.5 * np.eye(length)
    for correlation in (0.0, 0.3, 0.6, 0.9):
        kernel = correlation + (1.0 - correlation) * np.eye(length)
        for scale in (0.3, 1.0, 3.0):
            sample = sample_field(kernel, gradient, scale, mask, draws=draws)
            layer = KernelAttention(kernel, logit_scale=scale, allowed=mask)
            text = _report(layer, sample, gradient, ("output", "value", "key", "query", "total"))
            whole = _whole(layer, sample, gradient)
            yield f"r {correlation} tau {scale:g}: {text} | kernel {whole:.1f}"


def dropout(draws: int) -> Iterator[str]:
    """What attention dropout of 0.5 adds to every trace, infinite width, L = 32."""
    length, rate = 32, 0.5
    gradient = 0.2 + 0.8 * np.eye(length)
    for name, kernel in test_kernels(length).items():
        for mask_name, mask in (("full", None), ("causal", np.tri(length, dtype=bool))):
            for scale in (1.0, 3.0):
                cells = []
                wet = sample_field(kernel, gradient, scale, mask, rate, draws)
                dry = sample_field(kernel, gradient, scale, mask, 0.0, draws)
                layers = [
                    KernelAttention(kernel, logit_scale=scale, allowed=mask, drop_prob=p)
                    for p in (rate, 0.0)
                ]
                ours = [predicted(layer, gradient) for layer in layers]
                for path in ("output", "value", "key", "query"):
                    truth = np.trace(wet.mean[path] - dry.mean[path])
                    error = np.trace(ours[0][path] - ours[1][path]) / truth - 1.0
                    cells.append(f"{path} {100 * error:+5.1f}")
                yield f"{name:18s} {mask_name:6s} tau {scale:g}: {' | '.join(cells)}"


def finite_width(draws: int) -> Iterator[str]:
    """A real layer, tokens of fixed norm, L = 16; the theory with and without width terms."""
    length = 16
    gradient = 0.4 + 0.6 * np.eye(length)
    causal = np.tri(length, dtype=bool)
    blocks = np.kron(np.eye(4), np.ones((4, 4)))
    cases = (
        ("r 0.3 full", 0.3 + 0.7 * np.eye(length), None, 0.0),
        ("r 0.3 full p 0.3", 0.3 + 0.7 * np.eye(length), None, 0.3),
        ("r 0.6 causal p 0.2", 0.6 + 0.4 * np.eye(length), causal, 0.2),
        ("clusters causal p 0.2", 0.1 + 0.3 * np.eye(length) + 0.6 * blocks, causal, 0.2),
    )
    for name, kernel, mask, rate in cases:
        for d_model, d_head in ((64, 16), (256, 32)):
            sample, tokens = sample_layer(
                kernel, gradient, 1.5, d_model, d_head, mask, rate, draws=10 * draws
            )
            # the scaling's own effect on the kernel, averaged over pairs of equal correlation
            actual = kernel.copy()
            for level in np.unique(kernel.round(12)):
                same = np.isclose(kernel, level)
                actual[same] = tokens[same].mean()
            shared = {"logit_scale": 1.5, "allowed": mask, "drop_prob": rate}
            layer = KernelAttention(actual, d_model=d_model, d_head=d_head, **shared)
            wide = KernelAttention(actual, **shared)
            yield f"{name} d {d_model} d_head {d_head}: " + _report(layer, sample, gradient, PATHS)
            bare = _report(wide, sample, gradient, ("output", "value", "key", "query", "total"))
            yield f"{'':>12s} without width terms: {bare}"


def timing(draws: int) -> Iterator[str]:
    """CPU time of construction, forward and backward, finite width."""
    del draws
    generator = np.random.default_rng(0)
    for length in (64, 128, 256, 512):
        words = generator.integers(0, length // 3, length)
        kernel = 0.2 + 0.4 * np.equal.outer(words, words) + 0.4 * np.eye(length)
        gradient = 0.2 + 0.8 * np.eye(length)
        cells = []
        for name, mask in (("full", None), ("causal", np.tri(length, dtype=bool))):
            for rate in (0.0, 0.1):
                best = math.inf
                for _ in range(4):
                    start = time.process_time()
                    layer = KernelAttention(
                        kernel,
                        logit_scale=1.0,
                        allowed=mask,
                        drop_prob=rate,
                        d_model=256,
                        d_head=64,
                    )
                    layer.forward()
                    layer.backward(gradient)
                    best = min(best, time.process_time() - start)
                cells.append(f"{name} p {rate}: {1e3 * best:.0f} ms")
        yield f"L {length}: {', '.join(cells)}"


SECTIONS = {
    section.__name__: section
    for section in (infinite_width, causal_exchangeable, dropout, finite_width, timing)
}


def main() -> None:
    """Print every section asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--section", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    for name in arguments.section:
        print(f"\n{name}: {SECTIONS[name].__doc__}")
        print("errors in %: trace, then the sum off the diagonal; Monte Carlo noise in brackets")
        for line in SECTIONS[name](arguments.draws):
            print(line, flush=True)


if __name__ == "__main__":
    main()
