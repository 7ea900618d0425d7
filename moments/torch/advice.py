"""Likely causes of what an audit has, in plain words: one table of slips.

A slip gives the matrices of one role a variance in every layer. It is named only where that is
every layer's measured variance within its sampling error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..scheme.shared import xavier
from ..show.expected import tail_probability
from ..show.recognition import FANS, INWARD
from .entries import TRUNCATION, truncated_variance
from .expectation import model_of_stack
from .roles import ENCODER, TABLES, Role
from .running import grouped
from .tensors import Checked, Measured

# --- slips, each with the variance that it gives a matrix -----------------------------------------

BY_LAYER = "a scale 1/sqrt(2 l) that counts the layer l"
BY_DEPTH = "1/sqrt(2 N) of all N layers"


class Place(NamedTuple):
    """One matrix or table of one layer.

    Attributes:
        role, expected: what it is, and the variance that its plan gives it.
        uniform: whether its entries look uniform.
        plan, drawn: the stack's plan, and the module as its framework draws it.
    """

    role: Role
    expected: float
    uniform: bool
    plan: Transformer
    drawn: Transformer | None

    def of(self, model: Transformer | None, name: str, shift: int = 0) -> float | None:
        """What a model gives a matrix of this layer, or of one `shift` layers on."""
        layer = self.role.layer + shift
        if model is None or self.role.name not in MATRICES or not 1 <= layer <= model.layers:
            return None
        return float(getattr(model.layer_weights(layer), name))

    def xavier(self, per_head: bool) -> float | None:
        """Glorot's rule for queries, keys and values."""
        name = self.role.name
        return float(getattr(xavier(self.plan, per_head), name)) if name in INWARD else None


class Slip(NamedTuple):
    """A cause in words, with {n} for the number of layers, and the variance that it gives; None
    where it says nothing. `everywhere`: in all layers, or in those that are off alone."""

    words: str
    variance: Callable[[Place], float | None]
    everywhere: bool = False


def _times(factor: Callable[[Place], float]) -> Callable[[Place], float | None]:
    return lambda p: factor(p) * p.expected


def _by_fans(rule: Callable[[int, int], float]) -> Callable[[Place], float | None]:
    return lambda p: rule(p.role.fan_in, p.role.fan_out) if p.role.is_matrix else None


def _as_of(name: str) -> Callable[[Place], float | None]:
    return lambda p: p.of(p.plan, name)


def _over_layers(power: int) -> Callable[[Place], float | None]:
    """Times (N / l)^power."""
    return lambda p: (
        p.expected * (p.plan.layers / p.role.layer) ** power if p.role.layer > 0 else None
    )


_CUT = truncated_variance(TRUNCATION)
SLIPS = (
    Slip(f"{BY_LAYER} was applied for {BY_DEPTH} (N = {{n}})", _over_layers(1), True),
    Slip(f"{BY_DEPTH} was applied for {BY_LAYER} (N = {{n}})", _over_layers(-1), True),
    Slip(
        "it is Xavier's for each head of query, key and value as a matrix of its own, 2/(d_model + "
        "d_head) (the scheme's option per_head=true)",
        lambda p: p.xavier(True),
    ),
    Slip(
        "it is Xavier's for query, key and value as whole matrices, 2/(fan_in + fan_out), as "
        "xavier_uniform_ does (the scheme's option per_head=false)",
        lambda p: p.xavier(False),
    ),
    Slip(
        "it is the framework's own initialisation, unscaled", lambda p: p.of(p.drawn, p.role.name)
    ),
    Slip(
        "it is that of layer l + 1: layers are counted from another number",
        lambda p: p.of(p.plan, p.role.name, 1),
    ),
    Slip(
        "it is that of layer l - 1: layers are counted from another number",
        lambda p: p.of(p.plan, p.role.name, -1),
    ),
    Slip("a normal cut at two deviations without correcting its variance", _times(lambda p: _CUT)),
    Slip("a correction for truncation where nothing was cut", _times(lambda p: 1 / _CUT)),
    Slip("a correction for truncation that went the wrong way", _times(lambda p: _CUT**2)),
    Slip(
        "the standard deviation was passed as the bound of a uniform draw, whose variance is a "
        "third of its bound's square",
        lambda p: p.expected / 3 if p.uniform else None,
    ),
    Slip("the variance was passed as a standard deviation", lambda p: p.expected**2),
    Slip("the standard deviation was used as a variance", lambda p: p.expected**0.5),
    Slip("1/N written for 1/(2N), or a factor 2 twice (N = {n})", _times(lambda p: 2.0)),
    Slip("1/(2N) written for 1/N, or a factor 2 missing (N = {n})", _times(lambda p: 0.5)),
    Slip("a factor 1/N is missing (N = {n})", _times(lambda p: p.plan.layers)),
    Slip("a factor 1/N too much (N = {n})", _times(lambda p: 1 / p.plan.layers)),
    Slip("a factor 1/(2N) is missing (N = {n})", _times(lambda p: 2.0 * p.plan.layers)),
    Slip("a factor 1/(2N) too much (N = {n})", _times(lambda p: 0.5 / p.plan.layers)),
    Slip(
        "a scale 1/sqrt(N) was applied to the variance, not to the deviation (N = {n})",
        _times(lambda p: p.plan.layers**0.5),
    ),
    Slip("the dropout correction is missing", _times(lambda p: 1 / (1 - p.plan.dropout))),
    Slip("the dropout correction was applied twice", _times(lambda p: 1 - p.plan.dropout)),
    Slip("a factor 4", _times(lambda p: 4.0)),
    Slip("a factor 1/4", _times(lambda p: 0.25)),
    Slip(
        "it is Xavier's 2/(fan_in + fan_out)",
        lambda p: (
            2 / (p.role.fan_in + p.role.fan_out)
            if p.role.is_matrix and p.role.name not in INWARD
            else None
        ),
    ),
    Slip(
        "it is Xavier's for query, key and value as one fused matrix",
        lambda p: 2 / (p.role.fan_in + 3 * p.role.fan_out) if p.role.name in INWARD else None,
    ),
    *(Slip(f"it is {words}", _by_fans(rule)) for words, rule in FANS),
    Slip("it is 1/fan_out", _by_fans(lambda i, o: 1 / o)),
    Slip("it is 0.02^2, as most language models draw", lambda p: 0.02**2),
    Slip(
        "fan_in and fan_out are swapped",
        lambda p: p.expected * p.role.fan_in / p.role.fan_out if p.role.is_matrix else None,
    ),
    Slip(
        "fan_in and fan_out are swapped",
        lambda p: p.expected * p.role.fan_out / p.role.fan_in if p.role.is_matrix else None,
    ),
)
"""What is easily got wrong, specific slips first."""


def _others(places: Sequence[Place], groups: Collection[str]) -> Iterator[Slip]:
    """What a plan gives other matrices of the same layers, those that share it together."""
    role = places[0].role
    there = (n for n in MATRICES if n != role.name and role.stack + n in groups)
    by_variance = grouped(there, lambda n: tuple(p.of(p.plan, n) for p in places))
    for alike in by_variance.values():
        words = f"it is what the plan gives {' and '.join(alike)}: {role.name} was skipped, or "
        yield Slip(f"{words}took another's scale", _as_of(alike[0]))


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

    def place(m: Measured) -> Place:
        uniform = all(one.entries.distribution == "uniform" for one in bad)
        return Place(m.role, float(m.expected or 0.0), uniform, plan, drawn)

    others = list(_others([place(m) for m in bad], groups))
    at = next(n for n, slip in enumerate(SLIPS) if slip.words.startswith("it is the framework's"))
    fitting = []
    for slip in (*SLIPS[:at], *others, *SLIPS[at:]):
        members = group if slip.everywhere else bad
        wanted = [(m, slip.variance(p), p.expected) for m in members for p in [place(m)]]
        if any(v is None for _, v, _ in wanted) or all(v == e for _, v, e in wanted):
            continue
        score = min(_chance(m, v) for m, v, _ in wanted if v is not None)
        if score > FIT / len(members):
            fitting.append((score, slip.words.format(n=plan.layers)))
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
