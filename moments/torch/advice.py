"""Likely causes of what an audit found, in plain words.

A cause is a hypothesis about the variance of one role in every layer. It is named only where it
predicts every layer's measured variance within its sampling error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..scheme.registry import scheme
from ..scheme.shared import xavier
from ..show.expected import tail_probability
from ..show.findings import Row
from .entries import TRUNCATION, truncated_variance
from .expectation import model_of_stack
from .findings import Measured, in_layers
from .hook_points import ENCODER
from .roles import TABLES
from .running import grouped

# --- hypotheses about a role, each with the variances it predicts ---------------------------------


BY_LAYER = "a scale 1/sqrt(2 l) that counts the layer l"
BY_DEPTH = "1/sqrt(2 N) of all N layers"


@dataclass(frozen=True)
class RoleCause:
    """Predicted variance in every layer of the role, and the sentence it stands for."""

    variances: tuple[float, ...]
    words: str


@dataclass(frozen=True)
class Convention:
    """The same plan by another reading of its words, which `words` gives both."""

    model: Transformer
    words: str


_PER_HEAD = {
    True: "each head of query, key and value as a matrix of its own, 2/(d_model + d_head)",
    False: "query, key and value as whole matrices, 2/(fan_in + fan_out), as xavier_uniform_ does",
}


def conventions(
    plan: Any, options: Mapping[str, Any] | None, model: Transformer
) -> tuple[Convention, ...]:
    """Plans that go by the same name: Glorot's rule by head or matrix; the plan means `model`."""
    remedy = ""
    if isinstance(plan, str):
        by_head = {**scheme(plan).options, **(options or {})}.get("per_head")
        if not isinstance(by_head, bool):
            return ()
        remedy = f"; pass options={{'per_head': {not by_head}}} (--option per_head="
        remedy += f"{str(not by_head).lower()}) for the module's"
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


def causes_by_layer(group: list[Measured], model: Transformer) -> Iterator[RoleCause]:
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
        yield RoleCause(variances, f"{words} (N = {total})")


def causes(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> Iterator[RoleCause]:
    """Hypotheses about one role, specific ones first; `readings`: other ones of the plan."""
    name, layers = group[0].role.name, [m.role.layer for m in group]
    stack = group[0].role.stack
    model = model_of_stack(model, stack)
    if described is not None:
        described = model_of_stack(described, stack)
    expected = [float(m.expected or 0.0) for m in group]

    def scaled(factor: float) -> tuple[float, ...]:
        return tuple(factor * v for v in expected)

    def planned(matrix: str, of: Transformer = model, shift: int = 0) -> tuple[float, ...]:
        return tuple(getattr(of.layer_weights(n + shift), matrix) for n in layers)

    for reading in readings:
        if name in ("query", "key", "value"):
            read = model_of_stack(reading.model, stack)
            yield RoleCause(planned(name, read), reading.words)
    if name in MATRICES:
        others = (other for other in MATRICES if other != name and stack + other in groups)
        for variances, alike in grouped(others, planned).items():
            yield RoleCause(
                variances,
                f"it is what the plan gives {' and '.join(alike)}: {name} was skipped, or "
                "took another's scale",
            )
        if described is not None:
            words = "it is the framework's own initialisation, unscaled"
            yield RoleCause(planned(name, described), words)
        for shift in (1, -1):
            if all(1 <= n + shift <= model.layers for n in layers):
                yield RoleCause(
                    planned(name, shift=shift),
                    f"it is that of layer l {'+' if shift > 0 else '-'} 1: "
                    "layers are counted from another number",
                )
    cut = truncated_variance(TRUNCATION)
    yield RoleCause(scaled(cut), "a normal cut at two deviations without correcting its variance")
    yield RoleCause(scaled(1 / cut), "a correction for truncation where nothing was cut")
    yield RoleCause(scaled(cut**2), "a correction for truncation that went the wrong way")
    if all(m.entries.distribution == "uniform" for m in group):
        words = "the standard deviation was passed as the bound of a uniform draw"
        yield RoleCause(scaled(1 / 3), f"{words}, whose variance is a third of its bound's square")
    yield RoleCause(
        tuple(v**2 for v in expected), "the variance was passed as a standard deviation"
    )
    yield RoleCause(
        tuple(v**0.5 for v in expected), "the standard deviation was used as a variance"
    )
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
            yield RoleCause(scaled(factor), f"{words} (N = {n})" if "N" in words else words)
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
            yield RoleCause(variances, f"it is {words}")
    yield RoleCause(tuple(0.02**2 for _ in group), "it is 0.02^2, as most language models draw")
    role = group[0].role
    if role.is_matrix and role.fan_in != role.fan_out:
        for factor in (role.fan_in / role.fan_out, role.fan_out / role.fan_in):
            yield RoleCause(scaled(factor), "fan_in and fan_out are swapped")


CHANCE = 1e-4
"""Probability under the plan from which a layer is not counted among the wrong ones."""

FIT = 1e-3
"""A cause is named where its worst layer is at least this probable (Bonferroni over the layers)."""

MISSING = "nothing in the module applies it"

SHOWN = 2
"""Causes named beside one another."""

PAIRS = (
    (("ffn_in",), ("ffn_out",)),
    (("gate", "ffn_in"), ("ffn_out",)),
    (("query", "key", "value"), ("output",)),
    (("value",), ("output",)),
    (("query",), ("key",)),
    (("query", "key"), ("value",)),
)
"""Matrices among which one factor is easily put on the wrong side."""


class Advice(NamedTuple):
    """Likely causes of what failed.

    Attributes:
        crossed: sets of roles among which a factor sits on the wrong matrix, and what is said.
        reasons: of a role's variance, the likeliest first.
        scales: of a multiplier, by its quantity and block.
    """

    crossed: tuple[tuple[tuple[str, ...], str], ...]
    reasons: dict[str, tuple[str, ...]]
    scales: dict[tuple[str, str], str]


def advise(
    rows: Sequence[Row],
    measured: Sequence[Measured],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> Advice:
    """Why roles and scales failed.

    `described` is the module's architecture as its framework draws it, `readings` are others of the
    plan.
    """
    known = [m for m in measured if m.expected is not None]
    drawn = [m for m in known if m.role.is_matrix or m.role.name in TABLES]
    groups = grouped(drawn, lambda m: m.role.full_name)
    failed = [row for row in rows if row.passed is False]
    off = {row.role for row in failed if row.quantity.partition(" over")[0] == "variance"}
    roles = [name for name in groups if name in off]
    reasons = {n: _causes(groups[n], groups, model, described, readings) for n in roles}
    # What fits every matrix is likelier than another cause for each.
    several = [set(r) for n, r in reasons.items() if r and n.split(".")[-1] in MATRICES]
    if len(several) >= 3 and (common := set.intersection(*several)):
        reasons = {n: tuple(c for c in r if c in common) or r for n, r in reasons.items()}
    return Advice(
        tuple(_crossed(groups, roles)),
        {name: causes[:SHOWN] for name, causes in reasons.items() if causes},
        {
            (kind, block): said
            for kind, blocks, said in _scale_sentences(failed, model)
            for block in blocks
        },
    )


def _causes(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention],
) -> tuple[str, ...]:
    """What fits the layers of a role that are off, the likeliest first."""
    if any(m.expected and m.entries.square == 0 for m in group):
        return ()
    bad = [m for m in group if m.expected and not _chance(m, m.expected) > CHANCE] or group
    hypotheses = [(group, cause) for cause in causes_by_layer(group, model)]
    hypotheses += [(bad, cause) for cause in causes(bad, groups, model, described, readings)]
    fitting = [
        (score, cause.words)
        for members, cause in hypotheses
        if (score := _score(members, cause)) > FIT / len(members)
    ]
    ranked = sorted(fitting, key=lambda pair: -min(pair[0], 0.05))
    return tuple(dict.fromkeys(word for _, word in ranked))


def _score(group: list[Measured], cause: RoleCause) -> float:
    """Probability of the worst layer under the cause."""
    return min(_chance(m, v) for m, v in zip(group, cause.variances, strict=True))


def _chance(m: Measured, variance: float) -> float:
    """Probability of a mean square as far from a variance as the measured one."""
    if not 0 < variance < math.inf:
        return 0.0
    return tail_probability(m.entries.square / variance, m.entries.spread)


def _ratio(group: list[Measured]) -> float:
    """Geometric mean of measured over expected."""
    logs = [math.log(m.entries.square / m.expected) for m in group if m.expected]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _crossed(
    groups: dict[str, list[Measured]], roles: list[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """One factor on one side of a block, its inverse on the other: which matrices, and in words."""
    found: list[tuple[str, ...]] = []
    for stack, both in itertools.product(("", ENCODER), PAIRS):
        for wrong, right in (both, both[::-1]):
            one, other = (tuple(stack + name for name in side) for side in (wrong, right))
            covered = any(set(one + other) <= set(names) for names in found)
            if not covered and (sentence := _crossing(groups, roles, one, other)):
                found.append(one + other)
                yield one + other, sentence


def _crossing(
    groups: dict[str, list[Measured]],
    roles: list[str],
    wrong: tuple[str, ...],
    right: tuple[str, ...],
) -> str:
    """The sentence; empty where it does not hold."""
    if not set(wrong + right) <= set(roles):
        return ""
    if not all(m.entries.square > 0 and m.expected for n in wrong + right for m in groups[n]):
        return ""
    ratios = {n: _ratio(groups[n]) for n in wrong + right}
    factor = ratios[wrong[0]]
    tolerance = 6 * max(m.entries.spread for n in wrong + right for m in groups[n])
    same = all(abs(math.log(ratios[n] / factor)) < tolerance for n in wrong)
    inverse = all(abs(math.log(ratios[n] * factor)) < tolerance for n in right)
    if not (same and inverse and math.log(factor) < -tolerance):
        return ""
    carry, lack = ("s" if len(side) == 1 else "" for side in (wrong, right))
    return (
        f"{' and '.join(wrong)} carr{'ies' if carry else 'y'} the factor {factor:.3g} that "
        f"{' and '.join(right)} lack{lack}: the scale was put on the wrong matrix"
    )


SCALE_WORDS = {
    "skip_scale": "the skip multiplier lambda",
    "branch_scale": "the residual multiplier beta",
    "norm_output_scale": "the norm's output scale",
    "output_scale": "the factor on the logits",
}
"""Quantities of findings about multipliers, in words."""

STRUCTURE = ("architecture", "norm placement", "unexplained share of the sum")
"""Quantities of findings about how layers are built."""


def _scale_sentences(failed: list[Row], model: Transformer) -> Iterator[tuple[str, list[str], str]]:
    """Quantity, blocks, and what is wrong with that of these."""
    for quantity, words in SCALE_WORDS.items():
        told: dict[tuple[str, str], list[str]] = {}
        for stack in ("", ENCODER):
            rows = [f for f in failed if f.quantity == quantity and _stack(f.role) == stack]
            if not rows:
                continue
            layers = model_of_stack(model, stack).layers
            where = in_layers(sorted({f.layer for f in rows if f.layer <= layers}) or [0], layers)
            blocks = sorted({f.role.removesuffix(".norm") for f in rows})
            told.setdefault((where, _scale_fault(rows, layers)), []).extend(blocks)
        for (where, fault), blocks in told.items():
            yield quantity, blocks, f"{words} of {' and '.join(blocks)}{where} {fault}"


def _stack(role: str) -> str:
    return ENCODER if role.startswith(ENCODER) else ""


def _scale_fault(rows: list[Row], layers: int) -> str:
    """What is wrong with multipliers of one kind in a stack of so many layers."""
    values = [f.measured for f in rows]
    if all(math.isnan(v) for v in values):
        return "could not be measured"
    if all(abs(v - 1) < 1e-2 for v in values):
        return f"is missing (1 instead of {rows[0].expected:.4g}): {MISSING}"
    if all(abs(v) < 1e-3 for v in values):
        return (
            "is 0: a scale that was erased, for example a buffer lost when the module was "
            "materialised or loaded"
        )
    ratios = ", ".join(f"{f.ratio:.3g}" for f in rows[:3])
    hint = ""
    if all(abs(f.measured - f.expected**2) < 0.01 * f.expected**2 for f in rows):
        hint = ": it was squared, or applied twice"
    elif all(abs(f.measured**2 - f.expected) < 0.01 * f.expected for f in rows):
        hint = ": its square root was applied"
    elif len({f.layer for f in rows}) > 1:
        for power, one, other in ((0.5, BY_LAYER, BY_DEPTH), (-0.5, BY_DEPTH, BY_LAYER)):
            if all(abs(f.ratio / (layers / f.layer) ** power - 1) < 0.01 for f in rows):
                hint = f": {one} was applied for {other} (N = {layers})"
    return f"is {ratios} times the plan's{hint}"
