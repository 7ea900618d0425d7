"""Which initialisation a network's weights seem to be of: every published one, and frameworks' own.

A rule gives every matrix a variance, and explains those whose mean square lies within its sampling
error of that; the weights seem to be of the rule that explains most. A variance that a rule leaves
free is taken from the matrix that suits it best, then anew from all that it explains.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DomainError, without_warnings
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Biases
from ..scheme.registry import scheme, schemes
from ..scheme.shared import blocks
from .expected import tail_probability

FIT = 1e-4
"""Probability of a mean square this far from its variance, below which it is not explained."""

ROUND = 4.0
"""Standard errors within which an estimated deviation is taken for the round number next to it."""

SLOW = ("dslm", "admin")
"""Schemes that solve for their constants, tried where no other explains all."""

Owner = tuple[int, str]
"""Layer and matrix."""


@dataclass(frozen=True)
class Weight:
    """The entries of one matrix of one layer (from 1): their mean square, its relative standard
    error as an estimate, their count, and the features summed over and made."""

    layer: int
    name: str
    variance: float
    spread: float
    count: int
    fan_in: int
    fan_out: int

    def is_of(self, variance: float) -> bool:
        """Whether the entries may be of this variance."""
        if variance == 0 or self.variance == 0:
            return variance == self.variance
        return tail_probability(self.variance / variance, self.spread) >= FIT


@dataclass(frozen=True)
class WeightRule:
    """One rule for the weights.

    Attributes:
        title, model: what it is, and the network that follows it.
        meant: where the rule is a known slip, the network without it; else None.
        published: whether it is a scheme of `moments.schemes`.
        by_depth: whether outward matrices are divided by a number that grows with depth.
        explained, left: matrices that it explains, and the others.
    """

    title: str
    model: Transformer
    meant: Transformer | None = None
    published: bool = False
    by_depth: bool = False
    explained: frozenset[Owner] = frozenset()
    left: frozenset[Owner] = frozenset()

    @property
    def share(self) -> float:
        """Of all matrices, how many it explains."""
        return len(self.explained) / max(1, len(self.explained) + len(self.left))

    def moved(self) -> tuple[str, ...]:
        """Matrices to which the slip gives another variance than what it stands for."""
        meant, layers = self.meant, range(1, self.model.layers + 1)
        if meant is None:
            return ()
        pairs = [(self.model.layer_weights(n), meant.layer_weights(n)) for n in layers]
        there = [n for n in MATRICES if getattr(pairs[0][0], n) is not None]
        return tuple(n for n in there if any(getattr(a, n) != getattr(b, n) for a, b in pairs))

    def roles_left(self) -> tuple[str, ...]:
        """Matrices of which it leaves at least one layer over, in the order of the network."""
        left = {name for _, name in self.left}
        return tuple(name for name in MATRICES if name in left)


def weights_of(model: Transformer) -> list[Weight]:
    """A declaration's own matrices, which have no sampling error but that of rounding."""
    return [
        Weight(n, name, float(getattr(model.layer_weights(n), name)), 1e-6, 10**12, *fans)
        for n in range(1, model.layers + 1)
        for name, fans in model.shapes_of(n).items()
        if name in MATRICES and not name.startswith("cross_")
    ]


def recognise(
    weights: Sequence[Weight],
    model: Transformer,
    promised: Transformer | None = None,
    by: str = "config",
) -> WeightRule:
    """The reading that explains most matrices; of several the first, what the network itself
    promises (`by` its config or its code) foremost. Known slips come last, and win where they
    explain more."""
    best: WeightRule | None = None
    for reading in _readings(weights, model, promised, by):
        read = _held(reading, weights)
        best = read if best is None or len(read.explained) > len(best.explained) else best
        if not best.left:
            return best
    assert best is not None
    if best.share < 0.5:
        for reading in _published(without_biases(model), SLOW):
            read = _held(reading, weights)
            best = read if len(read.explained) > len(best.explained) else best
    return best


def _readings(
    weights: Sequence[Weight], model: Transformer, promised: Transformer | None, by: str
) -> Iterator[WeightRule]:
    base = without_biases(model)
    if promised is not None:
        words = f"the initialisation that its {by} promises ({in_words(promised)})"
        yield WeightRule(words, promised)
    rules: tuple[_Rule, ...] = _RULES if base.layers > 1 else _RULES[:1]
    rules += (_OF_LAYERS,) if base.layers > 1 and base.encoder is not None else ()
    bases = {rule.words: _base(weights, rule, base) for rule in (*rules, *_SLIPS)}
    for rule in rules:
        if (variance := bases[rule.words]) > 0:
            drawn = rule.drawn(base, variance)
            yield WeightRule(rule.title(base, variance), drawn, by_depth=bool(rule.divided))
    for title, fans in FANS:
        # Left as torch draws it, a Linear keeps torch's bias too.
        start = model if title.startswith("torch") else base
        drawn = _by_fans(weights, start, fans)
        yield WeightRule(title, drawn)
        for words, divisor in _DEPTHS if base.layers > 1 else ():
            yield WeightRule(f"{title}, {words}", _divided(drawn, divisor(base)), by_depth=True)
    yield from _published(base, [s.name for s in schemes() if s.name not in SLOW])
    if base.layers > 1:
        for rule in _SLIPS:
            if (variance := bases[rule.words]) > 0:
                meant = _SCALED.drawn(base, variance)
                yield WeightRule(rule.title(base, variance), rule.drawn(base, variance), meant)
    yield from _fused(weights, base)
    transposed = _by_fans(weights, base, lambda i, o: 1 / o)
    meant = _by_fans(weights, base, lambda i, o: 1 / i)
    words = "LeCun's 1/fan_in with fan_in and fan_out transposed: 1/fan_out"
    yield WeightRule(words, transposed, meant)


def without_biases(model: Transformer) -> Transformer:
    """The architecture without its biases."""
    biases = model.biases
    if biases is not None:
        biases = Biases.of(*(name for name, v in biases.to_dict().items() if v is not None))
    return model.replace(biases=biases)


def _held(reading: WeightRule, weights: Sequence[Weight]) -> WeightRule:
    explained: set[Owner] = set()
    left: set[Owner] = set()
    for weight in weights:
        wanted = float(getattr(reading.model.layer_weights(weight.layer), weight.name))
        (explained if weight.is_of(wanted) else left).add((weight.layer, weight.name))
    return dataclasses.replace(reading, explained=frozenset(explained), left=frozenset(left))


# --- one variance, divided ------------------------------------------------------------------------

INWARD = ("query", "key", "value")
OUTWARD = ("output", "ffn_out")


@dataclass(frozen=True)
class _Rule:
    """One free variance, that of the `divided` matrices over `divisor`(blocks, layer, d_model);
    `words` may hold {std} and {blocks}."""

    words: str
    divided: tuple[str, ...]
    divisor: Callable[[int, int, int], float]

    def by(self, model: Transformer, layer: int, name: str) -> float:
        """What a matrix's variance is divided by."""
        plain = name.removeprefix("cross_")
        return self.divisor(blocks(model), layer, model.d_model) if plain in self.divided else 1.0

    def title(self, model: Transformer, variance: float) -> str:
        return self.words.format(std=f"{math.sqrt(variance):.3g}", blocks=blocks(model))

    def drawn(self, base: Transformer, variance: float) -> Transformer:
        assert base.weights is not None
        layers = range(1, base.layers + 1)
        names = [n for n in MATRICES if getattr(base.weights, n) is not None]
        values = {n: [variance / self.by(base, layer, n) for layer in layers] for n in names}
        return base.replace(weights=base.weights.replace(**values))


_SCALED = _Rule(
    "GPT-2's scaled init: std {std}, output and ffn_out over sqrt({blocks}) (residual blocks)",
    OUTWARD,
    lambda blocks, layer, width: float(blocks),
)
_RULES = (
    _Rule("one normal distribution for all matrices, std {std}", (), lambda b, n, w: 1.0),
    _SCALED,
    _Rule(
        "depth-scaled init by layer: std {std}, output and ffn_out of layer l over sqrt(2 l)",
        OUTWARD,
        lambda b, n, w: 2.0 * n,
    ),
    _Rule(
        "scaled init by layers: std {std}, output and ffn_out over sqrt(N), N = {blocks}/2",
        OUTWARD,
        lambda b, n, w: b / 2,
    ),
    _Rule(
        "torchtitan's depth init: std {std}, output, ffn_out and ffn_in of layer l over sqrt(2 l)",
        (*OUTWARD, "ffn_in"),
        lambda b, n, w: 2.0 * n,
    ),
    _Rule(
        "torchtitan's init: std {std}, output, ffn_out and ffn_in over sqrt({blocks})",
        (*OUTWARD, "ffn_in"),
        lambda b, n, w: float(b),
    ),
    _Rule(
        "GPT-NeoX's: small init, std {std}, and Wang's 2/(N sqrt(d_model)) on output and ffn_out",
        OUTWARD,
        lambda b, n, w: (2 / (5 * w)) / (2 / (b / 2 * math.sqrt(w))) ** 2,
    ),
)
_OF_LAYERS = _Rule(
    "scaled init by layers: std {std}, output and ffn_out over sqrt(2 N), N layers of three blocks",
    OUTWARD,
    lambda b, n, w: 2 * b / 3,
)
_INSTEAD = (
    "the depth scale 1/sqrt({{blocks}}) of GPT-2's init (std {{std}}) sits on {wrong} instead of "
    "{right}"
)


def _slip(wrong: tuple[str, ...], right: tuple[str, ...], *, rest: tuple[str, ...] = ()) -> _Rule:
    words = _INSTEAD.format(wrong=joined(wrong), right=joined(right))
    return _Rule(words, (*wrong, *rest), _SCALED.divisor)


def joined(names: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_SLIPS = (
    _slip(INWARD, ("output",), rest=("ffn_out",)),
    _slip(("ffn_in",), ("ffn_out",), rest=("output",)),
    _slip((*INWARD, "ffn_in"), OUTWARD),
    _slip((*INWARD, "output"), OUTWARD),
    _slip(("value",), ("output",), rest=("ffn_out",)),
    _slip(("ffn_in", "ffn_out"), OUTWARD),
    _Rule(
        "GPT-2's scaled init (std {std}), but on output alone: ffn_out lacks it",
        ("output",),
        _SCALED.divisor,
    ),
    _Rule(
        "GPT-2's scaled init (std {std}), but on ffn_out alone: output lacks it",
        ("ffn_out",),
        _SCALED.divisor,
    ),
    _Rule(
        "GPT-2's scaled init (std {std}), but over N instead of sqrt(2 N), 2 N = {blocks}",
        OUTWARD,
        lambda b, n, w: b * b / 4,
    ),
    _Rule(
        "GPT-2's scaled init (std {std}), applied twice: output and ffn_out over {blocks}",
        OUTWARD,
        lambda b, n, w: float(b * b),
    ),
)


def _base(weights: Sequence[Weight], rule: _Rule, model: Transformer) -> float:
    """The free variance under which a rule explains most matrices; 0 where it explains none."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.name, []).append(weight)
    best: list[Weight] = []
    for group in groups.values():
        middle = sorted(group, key=lambda w: w.variance * rule.by(model, w.layer, w.name))
        # The layer in the middle as well as all of them, since one that is off moves their mean.
        for pool in (group, middle[len(middle) // 2 :][:1]):
            start = _pooled(pool, rule, model)
            if start > 0:
                read = [w for w in weights if w.is_of(start / rule.by(model, w.layer, w.name))]
                best = read if len(read) > len(best) else best
    return _pooled(best, rule, model) if best else 0.0


def _pooled(group: Sequence[Weight], rule: _Rule, model: Transformer) -> float:
    """The variance before division; that of a round deviation where it is one within its error."""
    count = sum(w.count for w in group)
    total = sum(w.count * w.variance * rule.by(model, w.layer, w.name) for w in group)
    variance = total / count
    spread = math.sqrt(sum((w.count * w.spread) ** 2 for w in group)) / count
    if variance <= 0:
        return 0.0
    for digits in (1, 2):
        rounded = float(f"{math.sqrt(variance):.{digits}g}") ** 2
        if abs(variance / rounded - 1) <= ROUND * spread:
            return rounded
    return variance


# --- published, and by fans -----------------------------------------------------------------------


def _published(base: Transformer, names: Sequence[str]) -> Iterator[WeightRule]:
    """Schemes that set weights, in each of their variants."""
    for name in names:
        known = scheme(name)
        if "weights" not in known.sets or name in ("normal", "scaled-init"):
            continue  # those two with a free variance
        for options in _variants(known.options):
            try:
                with without_warnings():
                    found = known.apply(base, **options)
            except DomainError:
                continue
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            title = f"{name}{f' ({given})' if given else ''}: {known.title}"
            yield WeightRule(title, found, published=True)
    if "scaled-init" in names:
        for variant in ("olmo", "sun"):
            with without_warnings():
                found = base.with_scheme("scaled-init", variant=variant)
            yield WeightRule(f"scaled-init ({variant})", found, published=True)


def _variants(options: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    if options.get("per_head") is True:
        found.append({"per_head": False})
    if options.get("variant") == "authors":
        found += [{**one, "variant": "sun"} for one in list(found)]
    return found


Fans = Callable[[int, int], float]
FANS: tuple[tuple[str, Fans], ...] = (
    ("torch's default for nn.Linear, variance 1/(3 fan_in)", lambda i, o: 1 / (3 * i)),
    ("LeCun's 1/fan_in", lambda i, o: 1 / i),
    ("Kaiming's 2/fan_in", lambda i, o: 2 / i),
)


_DEPTHS: tuple[tuple[str, Callable[[Transformer], float]], ...] = (
    ("output and ffn_out over sqrt(2 N)", lambda model: float(blocks(model))),
    ("output and ffn_out over sqrt(N)", lambda model: float(model.layers)),
)


def _divided(model: Transformer, divisor: float) -> Transformer:
    """With what blocks add divided."""
    weights = model.weights
    assert weights is not None
    of = {n: v / divisor for n in OUTWARD if (v := getattr(weights, n)) is not None}
    return model.replace(weights=weights.replace(**of))


def _by_fans(weights: Sequence[Weight], base: Transformer, rule: Fans) -> Transformer:
    assert base.weights is not None
    by_name = {w.name: rule(w.fan_in, w.fan_out) for w in weights}
    return base.replace(weights=base.weights.replace(**by_name))


def _fused(weights: Sequence[Weight], base: Transformer) -> Iterator[WeightRule]:
    """Xavier's rule with the fans of one matrix that holds query, key and value."""
    assert base.weights is not None
    meant = _by_fans(weights, base, lambda i, o: 2 / (i + o))
    fans = {w.name: (w.fan_in, w.fan_out) for w in weights if w.name in INWARD}
    fan_in, fan_out = next(iter(fans.values()), (1, 0))[0], sum(out for _, out in fans.values())
    assert meant.weights is not None
    wrong = meant.weights.replace(**dict.fromkeys(fans, 2 / (fan_in + fan_out)))
    words = "xavier, but with the fans of query, key and value as one fused matrix"
    yield WeightRule(words, meant.replace(weights=wrong), meant)


def in_words(model: Transformer) -> str:
    """Deviations of a declaration's matrices, those that agree together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    layers = sorted({1, model.layers})
    shapes = model.matrix_shapes
    names = [name for name in MATRICES if name in shapes and not name.startswith("cross_")]
    for name in names:
        values = (getattr(model.layer_weights(n), name) for n in layers)
        stds = tuple(dict.fromkeys(f"{math.sqrt(v):.3g}" for v in values))
        alike.setdefault(stds, []).append(name)
    if len(alike) == 1:
        return f"std {' to '.join(next(iter(alike)))}"
    largest = max(alike, key=lambda stds: len(alike[stds]))
    rest = (f"{', '.join(n)} std {' to '.join(t)}" for t, n in alike.items() if t != largest)
    return f"std {' to '.join(largest)}, {'; '.join(rest)}"
