"""Likely causes of what an audit found, in plain words.

A cause is a hypothesis about the variance of one role in every layer. It is named only where it
predicts every layer's measured variance within its sampling error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.expected import tail_probability
from .causes import BY_DEPTH, BY_LAYER, Cause, Convention, by_layer, causes
from .expectation import model_of_stack
from .findings import Finding, Measured, in_layers
from .roles import TABLES
from .structure import ENCODER

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


def advise(
    findings: list[Finding],
    measured: list[Measured],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> Advice:
    """One sentence per role or scale that failed.

    Args:
        described: the module's architecture with its framework's own initialisation.
        readings: other ones of the plan.
    """
    groups: dict[str, list[Measured]] = {}
    for m in measured:
        if m.expected is not None and (m.role.is_matrix or m.role.name in TABLES):
            groups.setdefault(m.role.full_name, []).append(m)
    failed = [f for f in findings if f.passed is False]
    variances = ("variance", "variance over its expectation")
    roles = [
        name for name in groups if any(f.role == name and f.quantity in variances for f in failed)
    ]
    crossed = list(_crossed(groups, roles))
    told = {name for names, _ in crossed for name in names}
    diagnoses = [_diagnosis(groups[n], groups, model, described, readings) for n in roles]
    wanting = [d for d in diagnoses if d.causes or d.instead or d.name not in told]
    sentences = list(_structure_sentences(failed, model))
    sentences += [sentence for _, sentence in crossed]
    sentences += _role_sentences(_with_common_cause(wanting))
    sentences += list(_scale_sentences(failed, model))
    sentences += list(_other_sentences(failed))
    if any(MISSING in sentence for sentence in sentences):
        sentences.append(
            "hooks of moments.torch.initialize are in no state_dict: moments.torch.attach(module, "
            "plan) puts them onto a module whose weights were loaded"
        )
    reasons = {d.name: d.causes[:SHOWN] for d in diagnoses if d.causes}
    return Advice(tuple(sentences), tuple(sentence for _, sentence in crossed), reasons)


class Advice(NamedTuple):
    """Likely causes.

    Attributes:
        sentences: of everything that failed.
        crossed: those of them that find a factor on the wrong matrix.
        reasons: of a role's variance, where they are known, the likeliest first.
    """

    sentences: tuple[str, ...]
    crossed: tuple[str, ...]
    reasons: dict[str, tuple[str, ...]]


class Diagnosis(NamedTuple):
    """What is wrong with one role: where, by how much, and why."""

    name: str
    where: str
    ratio: float
    causes: tuple[str, ...]
    instead: str = ""

    def __str__(self) -> str:
        if self.instead:
            return f"{self.name} {self.instead}"
        text = f"{self.name}{self.where} has {self.ratio:.3g} times the plan's variance"
        return text + (
            ": " + "; or ".join(self.causes[:SHOWN]) if self.causes else "; no common cause fits"
        )


def _with_common_cause(found: list[Diagnosis]) -> list[Diagnosis]:
    """What fits every matrix is likelier than another cause for each."""
    matrices = [set(d.causes) for d in found if d.causes and d.name.split(".")[-1] in MATRICES]
    if len(matrices) < 3 or not (common := set.intersection(*matrices)):
        return found
    return [d._replace(causes=tuple(c for c in d.causes if c in common) or d.causes) for d in found]


def _role_sentences(found: list[Diagnosis]) -> Iterator[str]:
    """One each, or one together where the same cause holds in the same layers."""
    together: dict[Any, list[Diagnosis]] = {}
    for number, diagnosis in enumerate(found):
        shared = (diagnosis.where, diagnosis.causes[:SHOWN]) if diagnosis.causes else number
        together.setdefault(shared, []).append(diagnosis)
    for group in together.values():
        if len(group) == 1:
            yield str(group[0])
            continue
        names = ", ".join(diagnosis.name for diagnosis in group)
        ratios = ", ".join(f"{diagnosis.ratio:.3g}" for diagnosis in group)
        causes = "; or ".join(group[0].causes[:SHOWN])
        yield f"{names}{group[0].where} have {ratios} times the plan's variance: {causes}"


def _diagnosis(
    group: list[Measured],
    groups: dict[str, list[Measured]],
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention],
) -> Diagnosis:
    name = group[0].role.full_name
    layers = model_of_stack(model, group[0].role.stack).layers
    zeros = [m for m in group if m.expected and m.entries.square == 0]
    if zeros:
        where = in_layers([m.role.layer for m in zeros], layers)
        labels = ", ".join(m.role.label for m in zeros[:4])
        more = " ..." if len(zeros) > 4 else ""
        why = "a zero initialisation, or storage that was never filled"
        return Diagnosis(name, where, 0.0, (), f"is zero{where} ({labels}{more}): {why}")
    bad = [m for m in group if m.expected and not _within(m, m.expected)] or group
    where = in_layers([m.role.layer for m in bad], layers)
    hypotheses = [(group, cause) for cause in by_layer(group, model)]
    hypotheses += [(bad, cause) for cause in causes(bad, groups, model, described, readings)]
    found = [
        (score, cause.words)
        for members, cause in hypotheses
        if (score := _score(members, cause)) > FIT / len(members)
    ]
    ranked = sorted(found, key=lambda pair: -min(pair[0], 0.05))
    words = tuple(dict.fromkeys(word for _, word in ranked))
    return Diagnosis(name, where, _ratio(bad), words)


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
    ratios = {n: _ratio(groups[n]) for n in wrong + right if _nonzero(groups[n])}
    if len(ratios) < len(wrong + right):
        return ""
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


def _nonzero(group: list[Measured]) -> bool:
    return all(m.entries.square > 0 and m.expected for m in group)


def _scale_sentences(failed: list[Finding], model: Transformer) -> Iterator[str]:
    names = {
        "skip_scale": "the skip multiplier lambda",
        "branch_scale": "the residual multiplier beta",
        "norm_output_scale": "the norm's output scale",
        "norm_input_scale": "the norm's input scale",
        "output_scale": "the factor on the logits",
    }
    for quantity, words in names.items():
        told: dict[tuple[str, str], list[str]] = {}
        for stack in ("", ENCODER):
            rows = [
                f
                for f in failed
                if f.quantity == quantity and f.role.startswith(ENCODER) == bool(stack)
            ]
            if not rows:
                continue
            layers = model_of_stack(model, stack).layers
            where = in_layers(sorted({f.layer for f in rows if f.layer <= layers}) or [0], layers)
            blocks = sorted({f.role.removesuffix(".norm") for f in rows})
            told.setdefault((where, _scale_fault(rows, layers)), []).extend(blocks)
        for (where, fault), blocks in told.items():
            yield f"{words} of {' and '.join(blocks)}{where} {fault}"


def _scale_fault(rows: list[Finding], layers: int) -> str:
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


def _structure_sentences(failed: list[Finding], model: Transformer) -> Iterator[str]:
    """What is wrong in how layers are built: one sentence for all layers alike."""
    layers: dict[tuple[str, str], list[int]] = {}
    for f in failed:
        if f.quantity in ("norm placement", "unexplained share of the sum"):
            layers.setdefault((f.role, f.note), []).append(f.layer)
    roles: dict[tuple[str, str], list[str]] = {}
    for (role, note), found in layers.items():
        stack = ENCODER if role.startswith(ENCODER) else ""
        where = in_layers(sorted(found), model_of_stack(model, stack).layers)
        roles.setdefault((where, note), []).append(role)
    for (where, note), names in roles.items():
        yield f"{' and '.join(names)}{where}: {note}"


def _other_sentences(failed: list[Finding]) -> Iterator[str]:
    variances = ("variance", "variance over its expectation")
    for f in [f for f in failed if f.quantity == "temperature"][:1]:
        yield (
            f"attention logits of layer {f.layer} are divided by {f.measured:.4g} sqrt(d_head), "
            f"not by {f.expected:.4g} sqrt(d_head)"
        )
    vectors = [f for f in failed if f.quantity in variances and f.role.endswith("bias")]
    if any(f.expected != 0 for f in vectors):
        vectors = []
    gains = [f for f in failed if f.quantity in ("gain", "mean square")]
    means = [f for f in failed if f.quantity == "mean"]
    for found, one, several in (
        (vectors, "bias vector is not zero", "bias vectors are not zero"),
        (gains, "gain or bias of a norm is not as set", "gains or biases of norms are not as set"),
        (means, "matrix has a mean that is not zero", "matrices have a mean that is not zero"),
    ):
        if found:
            words = one if len(found) == 1 else f"{several}, first"
            yield f"{len(found)} {words}: {found[0].parameter}"
