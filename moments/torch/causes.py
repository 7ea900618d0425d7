"""Hypotheses about a role whose variance is not the plan's, each with the variances it predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..scheme.registry import scheme
from ..scheme.shared import xavier
from .entries import TRUNCATION, truncated_variance
from .expectation import model_of_stack
from .findings import Measured

BY_LAYER = "a scale 1/sqrt(2 l) that counts the layer l"
BY_DEPTH = "1/sqrt(2 N) of all N layers"


@dataclass(frozen=True)
class Cause:
    """Predicted variance in every layer of the role, and the sentence it stands for."""

    variances: tuple[float, ...]
    words: str


@dataclass(frozen=True)
class Convention:
    """The same plan by another reading of its words.

    Attributes:
        model: the plan so read.
        words: both readings.
    """

    model: Transformer
    words: str


_PER_HEAD = {
    True: "each head of query, key and value as a matrix of its own, 2/(d_model + d_head)",
    False: "query, key and value as whole matrices, 2/(fan_in + fan_out), as xavier_uniform_ does",
}


def conventions(
    plan: Any, options: Mapping[str, Any] | None, model: Transformer
) -> tuple[Convention, ...]:
    """Plans that go by the same name: Glorot's rule by head and by matrix.

    Args:
        plan, options: what the user passed.
        model: what it means.
    """
    remedy = ""
    if isinstance(plan, str):
        given = {**scheme(plan).options, **(options or {})}
        if not isinstance(given.get("per_head"), bool):
            return ()
        by_head = given["per_head"]
        remedy = (
            f"; pass options={{'per_head': {not by_head}}} (--option per_head="
            f"{str(not by_head).lower()}) for the module's"
        )
    else:
        readings = [by for by in (True, False) if _is_xavier(model, by)]
        if len(readings) != 1:  # not drawn by Glorot's rule, or one head, where both agree
            return ()
        (by_head,) = readings
    other = _redrawn(model, by_head)
    if other.encoder is not None:
        other = other.replace(encoder=_redrawn(other.encoder, by_head))
    words = f"the module has {_PER_HEAD[not by_head]}, the plan {_PER_HEAD[by_head]}{remedy}"
    return (Convention(other, words),)


def _is_xavier(model: Transformer, by_head: bool) -> bool:
    wanted = xavier(model, by_head)
    return all(
        math.isclose(getattr(model.layer_weights(n), name), getattr(wanted, name), rel_tol=1e-9)
        for n in range(1, model.layers + 1)
        for name in ("query", "key", "value")
    )


def _redrawn(model: Transformer, by_head: bool) -> Transformer:
    """The model with Glorot's other reading, whatever else multiplies it."""
    assert model.weights is not None
    one, other = xavier(model, by_head), xavier(model, not by_head)
    changed = {}
    for name in ("query", "key", "value"):
        ratio = getattr(other, name) / getattr(one, name)
        layers = range(1, model.layers + 1)
        changed[name] = [ratio * getattr(model.layer_weights(n), name) for n in layers]
    return model.replace(weights=model.weights.replace(**changed))


def by_layer(group: list[Measured], model: Transformer) -> Iterator[Cause]:
    """Hypotheses that mean another factor in every layer, about all layers of one role."""
    total = model_of_stack(model, group[0].role.stack).layers
    layers = [m.role.layer for m in group]
    if total < 2 or not 1 <= min(layers) <= max(layers) <= total:
        return
    expected = [float(m.expected or 0.0) for m in group]
    for power, words in (
        (1, f"{BY_LAYER} was applied for {BY_DEPTH}"),
        (-1, f"{BY_DEPTH} was applied for {BY_LAYER}"),
    ):
        variances = tuple(v * (total / n) ** power for v, n in zip(expected, layers, strict=True))
        yield Cause(variances, f"{words} (N = {total})")


def causes(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> Iterator[Cause]:
    """Hypotheses about one role, the more specific ones first.

    Args:
        readings: other ones of the plan.
    """
    name, layers = group[0].role.name, [m.role.layer for m in group]
    stack = group[0].role.stack
    model = model_of_stack(model, stack)
    if described is not None:
        described = model_of_stack(described, stack)
    expected = [float(m.expected or 0.0) for m in group]

    def scaled(factor: float) -> tuple[float, ...]:
        return tuple(factor * v for v in expected)

    for reading in readings:
        if name in ("query", "key", "value"):
            read = model_of_stack(reading.model, stack)
            yield Cause(tuple(getattr(read.layer_weights(n), name) for n in layers), reading.words)
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
        told = name in ("query", "key", "value") and words.startswith("Xavier's 2/") and readings
        if group[0].role.is_matrix and not told:
            variances = tuple(fans(m.role.fan_in, m.role.fan_out) for m in group)
            yield Cause(variances, f"it is {words}")
    yield Cause(tuple(0.02**2 for _ in group), "it is 0.02^2, as most language models draw")
    role = group[0].role
    if role.is_matrix and role.fan_in != role.fan_out:
        for factor in (role.fan_in / role.fan_out, role.fan_out / role.fan_in):
            yield Cause(scaled(factor), "fan_in and fan_out are swapped")
