"""Likely causes of what an audit found, in plain words.

A cause is a hypothesis about the variance of one role in every layer. It is named only where it
predicts every layer's measured variance within its sampling error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moments.modules.entries import tail_probability
from moments.modules.expectation import model_of_stack
from moments.modules.findings import Finding, Measured
from moments.modules.roles import TABLES
from moments.modules.truncation import TRUNCATION, truncated_variance
from moments.transformer import Transformer
from moments.weights import MATRICES

FIT = 1e-3
"""A cause is named where its worst layer is at least this probable (Bonferroni over the layers)."""

PAIRS = (
    (("ffn_in",), ("ffn_out",)),
    (("gate", "ffn_in"), ("ffn_out",)),
    (("query", "key", "value"), ("output",)),
    (("value",), ("output",)),
    (("query",), ("key",)),
    (("query", "key"), ("value",)),
)
"""Matrices among which one factor is easily put on the wrong side."""


@dataclass(frozen=True)
class Cause:
    """Predicted variance in every layer of the role, and the sentence it stands for."""

    variances: tuple[float, ...]
    words: str


def advise(
    findings: list[Finding],
    measured: list[Measured],
    model: Transformer,
    described: Transformer | None,
) -> tuple[str, ...]:
    """One sentence per role or scale that failed."""
    groups: dict[str, list[Measured]] = {}
    for m in measured:
        if m.expected is not None and (m.role.is_matrix or m.role.name in TABLES):
            groups.setdefault(m.role.full_name, []).append(m)
    failed = [f for f in findings if f.passed is False]
    variances = ("variance", "variance over its expectation")
    roles = [
        name for name in groups if any(f.role == name and f.quantity in variances for f in failed)
    ]
    sentences = list(_crossed(groups, roles))
    for name in roles:
        sentences.append(_role_sentence(groups[name], groups, model, described))
    sentences += list(_scale_sentences(failed, model))
    sentences += list(_other_sentences(failed, groups))
    return tuple(sentences)


def _where(layers: list[int], total: int) -> str:
    if layers == [0]:
        return ""
    if len(layers) == total and total > 1:
        return " in every layer"
    return f" in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _role_sentence(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
) -> str:
    name = group[0].role.full_name
    zeros = [m for m in group if m.expected and m.entries.square == 0]
    if zeros:
        where = _where([m.role.layer for m in zeros], model.layers)
        labels = ", ".join(m.role.label for m in zeros[:4])
        more = " ..." if len(zeros) > 4 else ""
        return (
            f"{name} is zero{where} ({labels}{more}): a zero initialisation, or storage that was "
            "never filled"
        )
    bad = [m for m in group if m.expected and not _within(m, m.expected)] or group
    where = _where([m.role.layer for m in bad], model.layers)
    ratio = _ratio(bad)
    found = [
        (score, cause.words)
        for cause in causes(bad, groups, model, described)
        if (score := _score(bad, cause)) > FIT / len(bad)
    ]
    text = f"{name}{where} has {ratio:.3g} times the plan's variance"
    if not found:
        return f"{text}; no common cause fits"
    words: list[str] = []
    for _, word in sorted(found, key=lambda pair: -min(pair[0], 0.05)):
        if word not in words:
            words.append(word)
    return f"{text}: " + "; or ".join(words[:2])


def _within(m: Measured, variance: float) -> bool:
    return tail_probability(m.entries.square / variance, m.entries.spread) > 1e-4


def _score(group: list[Measured], cause: Cause) -> float:
    """Probability of the worst layer under the cause."""
    worst = 1.0
    for m, variance in zip(group, cause.variances, strict=True):
        if not variance > 0 or not math.isfinite(variance):
            return 0.0
        worst = min(worst, tail_probability(m.entries.square / variance, m.entries.spread))
    return worst


def _ratio(group: list[Measured]) -> float:
    """Geometric mean of measured over expected."""
    logs = [math.log(m.entries.square / m.expected) for m in group if m.expected]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


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
        for other in MATRICES:
            if other != name and stack + other in groups:
                variances = tuple(getattr(model.layer_weights(n), other) for n in layers)
                yield Cause(
                    variances,
                    f"it is what the plan gives {other}: {name} was skipped, or "
                    "took the other's scale",
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


def _crossed(groups: dict[str, list[Measured]], roles: list[str]) -> Iterator[str]:
    """One factor on one side of a block, its inverse on the other."""
    for wrong, right in (pair for both in PAIRS for pair in (both, both[::-1])):
        if not set(wrong + right) <= set(roles) or any(n not in groups for n in wrong + right):
            continue
        ratios = {n: _ratio(groups[n]) for n in wrong + right if _nonzero(groups[n])}
        if len(ratios) < len(wrong + right):
            continue
        factor = ratios[wrong[0]]
        tolerance = 6 * max(m.entries.spread for n in wrong + right for m in groups[n])
        same = all(abs(math.log(ratios[n] / factor)) < tolerance for n in wrong)
        inverse = all(abs(math.log(ratios[n] * factor)) < tolerance for n in right)
        if same and inverse and factor < 1:
            yield (
                f"{' and '.join(wrong)} carry the factor {factor:.3g} that {' and '.join(right)} "
                "lack: the scale was put on the wrong matrix"
            )


def _nonzero(group: list[Measured]) -> bool:
    return all(m.entries.square > 0 and m.expected for m in group)


def _scale_sentences(failed: list[Finding], model: Transformer) -> Iterator[str]:
    names = {
        "skip_scale": "the skip multiplier lambda",
        "branch_scale": "the residual multiplier beta",
        "norm_output_scale": "the norm's output scale",
        "norm_input_scale": "the norm's input scale",
    }
    for quantity, words in names.items():
        rows = [f for f in failed if f.quantity == quantity]
        if not rows:
            continue
        where = _where(sorted({f.layer for f in rows}), model.layers)
        blocks = " and ".join(sorted({f.role.partition(".")[0] for f in rows}))
        values = [f.measured for f in rows]
        if all(math.isnan(v) for v in values):
            yield f"{words} of {blocks}{where} could not be measured"
        elif all(abs(v - 1) < 1e-2 for v in values):
            yield (
                f"{words} of {blocks}{where} is missing (1 instead of "
                f"{rows[0].expected:.4g}): nothing in the module applies it"
            )
        elif all(abs(v) < 1e-3 for v in values):
            yield (
                f"{words} of {blocks}{where} is 0: a scale that was erased, for example a buffer "
                "lost when the module was materialised or loaded"
            )
        else:
            ratios = ", ".join(f"{f.ratio:.3g}" for f in rows[:3])
            hint = ""
            if all(abs(f.measured - f.expected**2) < 0.01 * f.expected**2 for f in rows):
                hint = ": it was squared, or applied twice"
            elif all(abs(f.measured**2 - f.expected) < 0.01 * f.expected for f in rows):
                hint = ": its square root was applied"
            yield f"{words} of {blocks}{where} is {ratios} times the plan's{hint}"


def _other_sentences(failed: list[Finding], groups: dict[str, list[Measured]]) -> Iterator[str]:
    variances = ("variance", "variance over its expectation")
    for f in failed:
        if f.quantity in ("norm placement", "unexplained share of the sum"):
            yield f"layer {f.layer}, {f.role}: {f.note}"
    for f in [f for f in failed if f.quantity == "temperature"][:1]:
        yield (
            f"attention logits of layer {f.layer} are divided by {f.measured:.4g} sqrt(d_head), "
            f"not by {f.expected:.4g} sqrt(d_head)"
        )
    vectors = [f for f in failed if f.quantity in variances and f.role.endswith("bias")]
    if vectors and all(f.expected == 0 for f in vectors):
        yield f"{len(vectors)} bias vectors are not zero, first {vectors[0].parameter}"
    gains = [f for f in failed if f.quantity in ("gain", "mean square")]
    if gains:
        yield f"{len(gains)} gains or biases of norms are not as set, first {gains[0].parameter}"
    means = [f for f in failed if f.quantity == "mean"]
    if means:
        yield f"{len(means)} matrices have a mean that is not zero, first {means[0].parameter}"
