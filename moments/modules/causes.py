"""Hypotheses about a role whose variance is not the plan's, each with the variances it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moments.modules.expectation import model_of_stack
from moments.modules.findings import Measured
from moments.modules.truncation import TRUNCATION, truncated_variance
from moments.transformer import Transformer
from moments.weights import MATRICES


@dataclass(frozen=True)
class Cause:
    """Predicted variance in every layer of the role, and the sentence it stands for."""

    variances: tuple[float, ...]
    words: str


def causes(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
) -> Iterator[Cause]:
    """Hypotheses about one role, the more specific ones first."""
    name, layers = group[0].role.name, [m.role.layer for m in group]
    stack = group[0].role.stack
    model = model_of_stack(model, stack)
    if described is not None:
        described = model_of_stack(described, stack)
    expected = [float(m.expected or 0.0) for m in group]

    def scaled(factor: float) -> tuple[float, ...]:
        return tuple(factor * v for v in expected)

    if name in MATRICES:
        alike: dict[tuple[float, ...], list[str]] = {}
        for other in MATRICES:
            if other != name and stack + other in groups:
                variances = tuple(getattr(model.layer_weights(n), other) for n in layers)
                alike.setdefault(variances, []).append(other)
        for variances, others in alike.items():
            yield Cause(
                variances,
                f"it is what the plan gives {' and '.join(others)}: {name} was skipped, or "
                "took another's scale",
            )
        if described is not None:
            variances = tuple(getattr(described.layer_weights(n), name) for n in layers)
            yield Cause(variances, "it is the framework's own initialisation, unscaled")
        for shift in (1, -1):
            if all(1 <= n + shift <= model.layers for n in layers):
                variances = tuple(getattr(model.layer_weights(n + shift), name) for n in layers)
                yield Cause(
                    variances,
                    f"it is that of layer l {'+' if shift > 0 else '-'} 1: "
                    "layers are counted from another number",
                )
    cut = truncated_variance(TRUNCATION)
    yield Cause(scaled(cut), "a normal cut at two deviations without correcting its variance")
    yield Cause(scaled(1 / cut), "a correction for truncation where nothing was cut")
    yield Cause(scaled(cut**2), "a correction for truncation that went the wrong way")
    yield Cause(tuple(v**2 for v in expected), "the variance was passed as a standard deviation")
    yield Cause(tuple(v**0.5 for v in expected), "the standard deviation was used as a variance")
    n = model.layers
    for factor, words in (
        (2.0, "1/N written for 1/(2N), or a factor 2 twice"),
        (0.5, "1/(2N) written for 1/N, or a factor 2 missing"),
        (float(n), "a factor 1/N is missing"),
        (1 / n, "a factor 1/N too much"),
        (2.0 * n, "a factor 1/(2N) is missing"),
        (0.5 / n, "a factor 1/(2N) too much"),
        (float(n) ** 0.5, "a scale 1/sqrt(N) was applied to the variance, not to the deviation"),
        (1 / (1 - model.dropout), "the dropout correction is missing"),
        (1 - model.dropout, "the dropout correction was applied twice"),
        (4.0, "a factor 4"),
        (0.25, "a factor 1/4"),
    ):
        if factor != 1:
            yield Cause(scaled(factor), f"{words} (N = {n})" if "N" in words else words)
    for fans, words in (
        (lambda i, o: 1 / (3 * i), "torch's default 1/(3 fan_in)"),
        (lambda i, o: 2 / (i + o), "Xavier's 2/(fan_in + fan_out)"),
        (lambda i, o: 2 / (i + 3 * o), "Xavier's for query, key and value as one fused matrix"),
        (lambda i, o: 2 / i, "Kaiming's 2/fan_in"),
        (lambda i, o: 1 / i, "LeCun's 1/fan_in"),
        (lambda i, o: 1 / o, "1/fan_out"),
    ):
        if group[0].role.is_matrix:
            variances = tuple(fans(m.role.fan_in, m.role.fan_out) for m in group)
            yield Cause(variances, f"it is {words}")
    yield Cause(tuple(0.02**2 for _ in group), "it is 0.02^2, as most language models draw")
    role = group[0].role
    if role.is_matrix and role.fan_in != role.fan_out:
        for factor in (role.fan_in / role.fan_out, role.fan_out / role.fan_in):
            yield Cause(scaled(factor), "fan_in and fan_out are swapped")
