"""Likely causes of what an audit has, in plain words: rows of the table of rules.

A slip is named only where its variance is every layer's measured one within its sampling error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.expected import tail_probability
from ..show.recognition import Place, Rule, causes
from .expectation import model_of_stack
from .roles import ENCODER, TABLES
from .running import grouped
from .tensors import Checked, Measured

CHANCE = 1e-4
"""Probability under the plan from which a layer is not counted among the wrong ones."""

FIT = 1e-3
"""A cause is named where its worst layer is at least this probable (Bonferroni over the layers)."""

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


def _of(place: Place, name: str) -> float | None:
    return place.of(place.plan, name)


def _others(
    role: str, stack: str, places: Sequence[Place], there: Collection[str]
) -> Iterator[Rule]:
    """What a plan gives other matrices of the same layers, those that share it together."""
    names = (n for n in MATRICES if n != role and stack + n in there)
    for alike in grouped(names, lambda n: tuple(p.of(p.plan, n) for p in places)).values():
        words = f"it is what the plan gives {' and '.join(alike)}: {role} was skipped, or took "
        yield Rule(f"{words}another's scale", functools.partial(_of, name=alike[0]))


class Advice(NamedTuple):
    """Likely causes of what failed.

    Attributes:
        crossed: sets of roles among which a factor sits on the wrong matrix, and what is said.
        reasons: of a role's variance, the likeliest first.
    """

    crossed: tuple[tuple[tuple[str, ...], str], ...]
    reasons: dict[str, tuple[str, ...]]


def advise(checked: Checked, model: Transformer, described: Transformer | None) -> Advice:
    """Why roles failed; `described` is the module as its framework draws it."""
    known = [m for m in checked.measured if m.expected is not None]
    drawn = [m for m in known if m.role.is_matrix or m.role.name in TABLES]
    groups = grouped(drawn, lambda m: m.role.full_name)
    failed = (row for row in checked.rows if row.passed is False)
    off = {row.role for row in failed if row.quantity.partition(" over")[0] == "variance"}
    roles = [name for name in groups if name in off]
    reasons = {n: _causes(groups[n], groups, model, described) for n in roles}
    # What fits every matrix is likelier than another cause for each.
    several = [set(r) for n, r in reasons.items() if r and n.split(".")[-1] in MATRICES]
    if len(several) >= 3 and (common := set.intersection(*several)):
        reasons = {n: tuple(c for c in r if c in common) or r for n, r in reasons.items()}
    return Advice(
        tuple(_crossed(groups, roles)),
        {name: causes[:SHOWN] for name, causes in reasons.items() if causes},
    )


def _causes(
    group: list[Measured],
    groups: Collection[str],
    model: Transformer,
    described: Transformer | None,
) -> tuple[str, ...]:
    """What fits the layers of a role that are off, the likeliest first."""
    if any(m.expected and m.entries.square == 0 for m in group):
        return ()
    stack = group[0].role.stack
    plan, drawn = (m and model_of_stack(m, stack) for m in (model, described))
    assert plan is not None
    bad = [m for m in group if m.expected and not _chance(m, m.expected) > CHANCE] or group
    uniform = all(m.entries.distribution == "uniform" for m in bad)

    def place(m: Measured) -> Place:
        of = m.role.layer, m.role.name, m.role.fan_in, m.role.fan_out
        return Place(*of, plan, float(m.expected or 0.0), drawn, uniform)

    others = _others(group[0].role.name, stack, [place(m) for m in bad], groups)
    rules = list(causes("role"))
    at = next(n for n, rule in enumerate(rules) if rule.words.startswith("it is the framework's"))
    fitting = []
    for rule in (*rules[:at], *others, *rules[at:]):
        members = group if rule.everywhere else bad
        wanted = [(m, rule.variance(p), p.expected) for m in members for p in [place(m)]]
        if any(v is None for _, v, _ in wanted) or all(v == e for _, v, e in wanted):
            continue
        score = min(_chance(m, v) for m, v, _ in wanted if v is not None)
        if score > FIT / len(members):
            fitting.append((score, rule.words.format(n=plan.layers)))
    ranked = sorted(fitting, key=lambda pair: -min(pair[0], 0.05))
    return tuple(dict.fromkeys(word for _, word in ranked))


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
