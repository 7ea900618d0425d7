"""Recognise the initialisation of weights: one table of published rules, framework defaults and
known mistakes ("slips").

A rule gives every matrix a variance. It explains a matrix whose mean square is within sampling
error of that variance, and the rule that explains most matrices is recognised. If a rule has one
free variance, it is first taken from the matrix that fits best, then estimated from all matrices
that the rule explains. The same rows are the candidate causes for a single role that is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import DomainError, without_warnings
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Biases
from ..scheme.registry import scheme, schemes
from ..scheme.shared import blocks, xavier
from .expected import TRUNCATION, tail_probability, truncated_variance

FIT = 1e-4
"""Probability of a mean square this far off, below which a rule does not explain the matrix."""

ROUND = 4.0
"""Standard errors within which an estimated std is replaced by the nearest round number."""

SLOW = ("dslm", "admin")
"""Schemes that solve for their constants; tried only if the others explain less than half."""

Owner = tuple[int, str]
"""Layer and matrix."""


@dataclass(frozen=True)
class Weight:
    """Statistics of one matrix of one layer (from 1): mean square of its entries (`variance`), the
    relative standard error of that (`spread`), number of entries, fan_in and fan_out."""

    layer: int
    name: str
    variance: float
    spread: float
    count: int
    fan_in: int
    fan_out: int

    def is_of(self, variance: float) -> bool:
        """Whether the entries are consistent with this variance."""
        if variance == 0 or self.variance == 0:
            return variance == self.variance
        return tail_probability(self.variance / variance, self.spread) >= FIT


@dataclass(frozen=True)
class WeightRule:
    """One rule for the weights.

    Attributes:
        title, model: the rule in words, and the network that follows it.
        intended: if the rule is a known slip, the network without it; else None.
        published: whether it is a scheme of `moments.schemes`.
        by_depth: whether output matrices are divided by a number that grows with depth.
        by_fans: whether it is a rule by fan_in and fan_out other than a framework's default.
        explained, unexplained: matrices that it explains, and the others.
    """

    title: str
    model: Transformer
    intended: Transformer | None = None
    published: bool = False
    by_depth: bool = False
    by_fans: bool = False
    explained: frozenset[Owner] = frozenset()
    unexplained: frozenset[Owner] = frozenset()

    @property
    def share(self) -> float:
        """Fraction of the matrices that it explains."""
        return len(self.explained) / max(1, len(self.explained) + len(self.unexplained))

    def changed_roles(self) -> tuple[str, ...]:
        """Matrices whose variance differs between the slip and the rule that was intended."""
        meant, layers = self.intended, range(1, self.model.layers + 1)
        if meant is None:
            return ()
        pairs = [(self.model.layer_weights(n), meant.layer_weights(n)) for n in layers]
        there = [n for n in MATRICES if getattr(pairs[0][0], n) is not None]
        return tuple(n for n in there if any(getattr(a, n) != getattr(b, n) for a, b in pairs))

    def roles_left(self) -> tuple[str, ...]:
        """Roles with at least one layer that it does not explain, in the order of the network."""
        left = {name for _, name in self.unexplained}
        return tuple(name for name in MATRICES if name in left)


def weights_of(model: Transformer) -> list[Weight]:
    """The matrices of a declaration, whose only error is rounding."""
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
    """Return the rule that explains most matrices, of several the first. The order is: what the
    network promises (`by` its config or code), published rules, known slips."""
    best: WeightRule | None = None
    for reading in _readings(weights, model, promised, by):
        read = _matched(reading, weights)
        best = read if best is None or len(read.explained) > len(best.explained) else best
        if not best.unexplained:
            return best
    assert best is not None
    if best.share < 0.5:
        for reading in _published(without_biases(model), SLOW):
            read = _matched(reading, weights)
            best = read if len(read.explained) > len(best.explained) else best
    return best


def _readings(
    weights: Sequence[Weight], model: Transformer, promised: Transformer | None, by: str
) -> Iterator[WeightRule]:
    base = without_biases(model)
    if promised is not None:
        words = f"the initialisation that its {by} promises ({in_words(promised)})"
        yield WeightRule(words, promised)
    yield from _rule_networks(weights, model, base, slips=False)
    yield from _published(base, [s.name for s in schemes() if s.name not in SLOW])
    yield from _rule_networks(weights, model, base, slips=True)


def _rule_networks(
    weights: Sequence[Weight], model: Transformer, base: Transformer, *, slips: bool
) -> Iterator[WeightRule]:
    """Networks that follow the table's rows."""
    fans = {w.name: (w.fan_in, w.fan_out) for w in weights}
    for rule in RULES:
        alone = base.layers == 1 and rule.by_depth
        if rule.use not in ("network", "whole", "both") or slips != bool(rule.meant) or alone:
            continue
        # A Linear with torch's default weights has torch's default bias too.
        own = rule.words.startswith("torch's")
        start, free = model if own else base, 1.0
        if rule.use == "network":
            places = (Place(w.layer, w.name, w.fan_in, w.fan_out, base) for w in weights)
            shares = [rule.variance(place) for place in places]
            free = _free_variance(weights, [share for share in shares if share])
            if free <= 0:
                continue
        try:
            drawn = _network_of(rule, start, fans, free)
        except DomainError:  # layers that share their weights cannot have one variance each
            continue
        title = rule.words.format(std=f"{math.sqrt(free):.3g}", blocks=blocks(base))
        meant = None if rule.meant is None else _network_of(rule.meant, start, fans, free)
        chosen = rule.use in ("whole", "both") and not own
        yield WeightRule(title, drawn, meant, by_depth=rule.by_depth, by_fans=chosen)


def _network_of(
    rule: Rule, base: Transformer, fans: Mapping[str, tuple[int, int]], free: float
) -> Transformer:
    """The network that follows a rule; where a slip says nothing, the intended rule applies."""
    drawn = base if rule.meant is None else _network_of(rule.meant, base, fans, free)
    weights = drawn.weights
    assert weights is not None
    known = [n for n in MATRICES if n in fans or rule.use == "network"]
    values = {}
    for name in (n for n in known if getattr(weights, n) is not None):
        places = (
            Place(layer, name, *fans.get(name, (1, 1)), base, free)
            for layer in range(1, base.layers + 1)
        )
        row = [rule.variance(place) for place in places]
        if None not in row:
            values[name] = row if len(set(row)) > 1 else row[0]
    return drawn.replace(weights=weights.replace(**values))


def without_biases(model: Transformer) -> Transformer:
    """The architecture without its biases."""
    biases = model.biases
    if biases is not None:
        biases = Biases.of(*(name for name, v in biases.to_dict().items() if v is not None))
    return model.replace(biases=biases)


def _matched(reading: WeightRule, weights: Sequence[Weight]) -> WeightRule:
    every = frozenset((weight.layer, weight.name) for weight in weights)
    explained = frozenset(
        (weight.layer, weight.name)
        for weight in weights
        if weight.is_of(float(getattr(reading.model.layer_weights(weight.layer), weight.name)))
    )
    return dataclasses.replace(reading, explained=explained, unexplained=every - explained)


def _free_variance(weights: Sequence[Weight], shares: Sequence[float]) -> float:
    """The free variance with which a rule explains most matrices; 0 if it explains none. The rule
    gives every matrix a share of this variance."""
    pairs = list(zip(weights, shares, strict=False)) if len(shares) == len(weights) else []
    best: list[tuple[Weight, float]] = []
    for name in dict.fromkeys(weight.name for weight, _ in pairs):
        group = [pair for pair in pairs if pair[0].name == name]
        middle = sorted(group, key=lambda pair: pair[0].variance / pair[1])
        # Try the median layer as well as the mean, which one wrong layer would move.
        for pool in (group, middle[len(middle) // 2 :][:1]):
            start = _pooled(pool)
            if start > 0:
                read = [(w, share) for w, share in pairs if w.is_of(start * share)]
                best = read if len(read) > len(best) else best
    return _pooled(best) if best else 0.0


def _pooled(group: Sequence[tuple[Weight, float]]) -> float:
    """Estimate the free variance from matrices and their shares of it; a std within its error of a
    round number is replaced by that."""
    count = sum(w.count for w, _ in group)
    variance = sum(w.count * w.variance / share for w, share in group) / count
    spread = math.sqrt(sum((w.count * w.spread) ** 2 for w, _ in group)) / count
    if variance <= 0:
        return 0.0
    for digits in (1, 2):
        rounded = float(f"{math.sqrt(variance):.{digits}g}") ** 2
        if abs(variance / rounded - 1) <= ROUND * spread:
            return rounded
    return variance


# --- the table ------------------------------------------------------------------------------------

INWARD = ("query", "key", "value")
OUTWARD = ("output", "ffn_out")
BY_LAYER = "a scale 1/sqrt(2 l) that counts the layer l"
BY_DEPTH = "1/sqrt(2 N) of all N layers"
MUP = "q k is divided by d_head (as muP does){same} not by its root"
CUT = truncated_variance(TRUNCATION)


class Place(NamedTuple):
    """One matrix or table of one layer, the argument of a rule.

    Attributes:
        layer, name, fan_in, fan_out: the matrix and its sizes; fans are 0 for other tensors.
        plan: the intended stack, or only its architecture.
        expected: the intended variance, or the free variance of a network.
        drawn: the stack as its framework initialises it.
        uniform: whether the entries look uniformly distributed.
    """

    layer: int
    name: str
    fan_in: int
    fan_out: int
    plan: Transformer
    expected: float = 1.0
    drawn: Transformer | None = None
    uniform: bool = False

    def of(self, model: Transformer | None, name: str = "", shift: int = 0) -> float | None:
        """Variance of a matrix in another model, in this layer or `shift` layers later."""
        layer, there = self.layer + shift, self.name in MATRICES
        if model is None or not there or not 1 <= layer <= model.layers:
            return None
        return float(getattr(model.layer_weights(layer), name or self.name))

    def xavier(self, per_head: bool) -> float | None:
        """Variance of Glorot's rule for queries, keys and values; None for others."""
        wanted = self.name in INWARD
        return float(getattr(xavier(self.plan, per_head), self.name)) if wanted else None

    @property
    def fused(self) -> int:
        """Number of outputs of query, key and value together."""
        shapes = self.plan.shapes_of(self.layer)
        return sum(shapes[name][1] for name in INWARD if name in shapes)


Variance = Callable[[Place], float | None]


class Rule(NamedTuple):
    """One row of the table: its words (with {std}, {blocks} residual blocks, {n} layers) and the
    variance that it gives a `Place`, None if it gives none.

    Attributes:
        use: where the rule applies: "network", all matrices up to a free variance; "whole", all
            matrices by their fans; "role", a single role compared with its plan; "both", whole and
            role; "logits", as a factor on the query-key products.
        meant: for a slip, the rule that was intended.
        everywhere: for the slip of a role, whether all layers must show it, not only wrong ones.
        by_depth: whether some matrices are divided by a number that grows with depth.
    """

    words: str
    variance: Variance
    use: str = "role"
    meant: Rule | None = None
    everywhere: bool = False
    by_depth: bool = False


def _times(factor: Callable[[Place], float]) -> Variance:
    return lambda p: factor(p) * p.expected


def _by_fans(rule: Callable[[int, int], float]) -> Variance:
    """A rule of fan_in and fan_out, for all matrices."""
    return lambda p: rule(p.fan_in, p.fan_out) if p.fan_in and p.name in MATRICES else None


def _over_layers(power: int) -> Variance:
    """The expected variance times (N / l)^power in layer l."""
    return lambda p: p.expected * (p.plan.layers / p.layer) ** power if p.layer > 0 else None


def _blocks(p: Place) -> float:
    return float(blocks(p.plan))


def joined(names: Sequence[str]) -> str:
    """Join words as in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _free(
    words: str,
    names: Sequence[str],
    divisor: Callable[[Place], float] = _blocks,
    meant: Rule | None = None,
) -> Rule:
    """Rule for a network: one free variance, divided by `divisor` for the matrices named."""

    def variance(p: Place) -> float:
        return p.expected / (divisor(p) if p.name.removeprefix("cross_") in names else 1.0)

    return Rule(words, variance, "network", meant, by_depth=bool(names))


def _neox(p: Place) -> float:
    """Ratio of variances: small init over Wang's std 2/(N sqrt(d_model))."""
    return (2 / (5 * p.plan.d_model)) / (2 / (_blocks(p) / 2 * math.sqrt(p.plan.d_model))) ** 2


_GPT = "GPT-2's scaled init"
_SCALED = _free(
    f"{_GPT}: std {{std}}, output and ffn_out over sqrt({{blocks}}) (residual blocks)", OUTWARD
)
_LECUN = Rule("LeCun's 1/fan_in", _by_fans(lambda i, o: 1 / i), "both")
_OF_FANS = (
    Rule(
        "torch's default for nn.Linear, variance 1/(3 fan_in)",
        _by_fans(lambda i, o: 1 / (3 * i)),
        "both",
    ),
    _LECUN,
    Rule("Kaiming's 2/fan_in", _by_fans(lambda i, o: 2 / i), "both"),
    Rule(
        "orthogonal matrices, variance 1/max(fan_in, fan_out)",
        _by_fans(lambda i, o: 1 / max(i, o)),
        "both",
    ),
)
_XAVIER = Rule("Xavier's 2/(fan_in + fan_out)", _by_fans(lambda i, o: 2 / (i + o)))
_OF_THREE = _free(
    "scaled init by layers: std {std}, output and ffn_out over sqrt(2 N), N layers of three blocks",
    OUTWARD,
    lambda p: 2 * _blocks(p) / 3,
)


def _divided(rule: Rule, words: str, divisor: Callable[[Place], float]) -> Rule:
    """A rule by fans, with the output matrices of blocks divided."""

    def variance(p: Place) -> float | None:
        drawn = rule.variance(p)
        return drawn if drawn is None or p.name not in OUTWARD else drawn / divisor(p)

    return Rule(f"{rule.words}, {words}", variance, "whole", by_depth=True)


def _slip(words: str, *names: str, divisor: Callable[[Place], float] = _blocks) -> Rule:
    """A slip of GPT-2's scaled init."""
    return _free(f"{_GPT} (std {{std}}), {words}", names, divisor, _SCALED)


def _misplaced_scale(wrong: tuple[str, ...], right: tuple[str, ...], *rest: str) -> Rule:
    words = "the depth scale 1/sqrt({blocks}) of GPT-2's init (std {std}) sits on "
    words += f"{joined(wrong)} instead of {joined(right)}"
    return _free(words, (*wrong, *rest), meant=_SCALED)


def _swapped(power: int) -> Rule:
    return Rule(
        "fan_in and fan_out are swapped",
        lambda p: p.expected * (p.fan_in / p.fan_out) ** power if p.fan_in else None,
    )


RULES = (
    _free("one normal distribution for all matrices, std {std}", ()),
    _SCALED,
    _free(
        "depth-scaled init by layer: std {std}, output and ffn_out of layer l over sqrt(2 l)",
        OUTWARD,
        lambda p: 2.0 * p.layer,
    ),
    _free(
        "scaled init by layers: std {std}, output and ffn_out over sqrt(N), N = {blocks}/2",
        OUTWARD,
        lambda p: _blocks(p) / 2,
    ),
    _free(
        "torchtitan's depth init: std {std}, output, ffn_out and ffn_in of layer l over sqrt(2 l)",
        (*OUTWARD, "ffn_in"),
        lambda p: 2.0 * p.layer,
    ),
    _free(
        "torchtitan's init: std {std}, output, ffn_out and ffn_in over sqrt({blocks})",
        (*OUTWARD, "ffn_in"),
    ),
    _free(
        "GPT-NeoX's: small init, std {std}, and Wang's 2/(N sqrt(d_model)) on output and ffn_out",
        OUTWARD,
        _neox,
    ),
    _OF_THREE._replace(variance=lambda p: _OF_THREE.variance(p) if p.plan.encoder else None),
    Rule(f"{BY_LAYER} was applied for {BY_DEPTH} (N = {{n}})", _over_layers(1), everywhere=True),
    Rule(f"{BY_DEPTH} was applied for {BY_LAYER} (N = {{n}})", _over_layers(-1), everywhere=True),
    Rule(
        "it is Xavier's for each head of query, key and value as a matrix of its own, 2/(d_model + "
        "d_head) (the scheme's option per_head=true)",
        lambda p: p.xavier(True),
    ),
    Rule(
        "it is Xavier's for query, key and value as whole matrices, 2/(fan_in + fan_out), as "
        "xavier_uniform_ does (the scheme's option per_head=false)",
        lambda p: p.xavier(False),
    ),
    Rule("it is the framework's own initialisation, unscaled", lambda p: p.of(p.drawn)),
    Rule(
        "it is that of layer l + 1: the code counts layers from another number",
        lambda p: p.of(p.plan, shift=1),
    ),
    Rule(
        "it is that of layer l - 1: the code counts layers from another number",
        lambda p: p.of(p.plan, shift=-1),
    ),
    Rule("a normal cut at two deviations without correcting its variance", _times(lambda p: CUT)),
    Rule("a correction for truncation where nothing was cut", _times(lambda p: 1 / CUT)),
    Rule("a correction for truncation that went the wrong way", _times(lambda p: CUT**2)),
    Rule(
        "the standard deviation was passed as the bound of a uniform draw, whose variance is a "
        "third of its bound's square",
        lambda p: p.expected / 3 if p.uniform else None,
    ),
    Rule("the variance was passed as a standard deviation", lambda p: p.expected**2),
    Rule("the standard deviation was used as a variance", lambda p: p.expected**0.5),
    Rule("1/N written for 1/(2N), or a factor 2 twice (N = {n})", _times(lambda p: 2.0)),
    Rule("1/(2N) written for 1/N, or a factor 2 missing (N = {n})", _times(lambda p: 0.5)),
    Rule("a factor 1/N is missing (N = {n})", _times(lambda p: p.plan.layers)),
    Rule("a factor 1/N too much (N = {n})", _times(lambda p: 1 / p.plan.layers)),
    Rule("a factor 1/(2N) is missing (N = {n})", _times(lambda p: 2.0 * p.plan.layers)),
    Rule("a factor 1/(2N) too much (N = {n})", _times(lambda p: 0.5 / p.plan.layers)),
    Rule(
        "a scale 1/sqrt(N) was applied to the variance, not to the deviation (N = {n})",
        _times(lambda p: p.plan.layers**0.5),
    ),
    Rule("the dropout correction is missing", _times(lambda p: 1 / (1 - p.plan.dropout))),
    Rule("the dropout correction was applied twice", _times(lambda p: 1 - p.plan.dropout)),
    Rule("a factor 4", _times(lambda p: 4.0)),
    Rule("a factor 1/4", _times(lambda p: 0.25)),
    Rule(f"it is {_XAVIER.words}", lambda p: None if p.name in INWARD else _XAVIER.variance(p)),
    *_OF_FANS,
    *(_divided(rule, "output and ffn_out over sqrt(2 N)", _blocks) for rule in _OF_FANS),
    *(
        _divided(rule, "output and ffn_out over sqrt(N)", lambda p: float(p.plan.layers))
        for rule in _OF_FANS
    ),
    _misplaced_scale(INWARD, ("output",), "ffn_out"),
    _misplaced_scale(("ffn_in",), ("ffn_out",), "output"),
    _misplaced_scale((*INWARD, "ffn_in"), OUTWARD),
    _misplaced_scale((*INWARD, "output"), OUTWARD),
    _misplaced_scale(("value",), ("output",), "ffn_out"),
    _misplaced_scale(("ffn_in", "ffn_out"), OUTWARD),
    _slip("but on output alone: ffn_out lacks it", "output"),
    _slip("but on ffn_out alone: output lacks it", "ffn_out"),
    _slip(
        "but over N instead of sqrt(2 N), 2 N = {blocks}",
        *OUTWARD,
        divisor=lambda p: _blocks(p) ** 2 / 4,
    ),
    _slip(
        "applied twice: output and ffn_out over {blocks}",
        *OUTWARD,
        divisor=lambda p: _blocks(p) ** 2,
    ),
    Rule(
        "orthogonal matrices, variance 1/max(fan_in, fan_out), query, key and value as one",
        lambda p: 1 / max(p.fan_in, p.fused if p.name in INWARD else p.fan_out),
        "whole",
    ),
    Rule(
        "Xavier's, but with the fans of query, key and value as one fused matrix",
        lambda p: 2 / (p.fan_in + p.fused) if p.name in INWARD else None,
        "both",
        _XAVIER,
    ),
    Rule(
        "LeCun's 1/fan_in with fan_in and fan_out transposed: 1/fan_out",
        _by_fans(lambda i, o: 1 / o),
        "both",
        _LECUN,
    ),
    Rule(
        "it is Xavier's for query, key and value as one fused matrix, all as wide as this one",
        lambda p: (
            2 / (p.fan_in + 3 * p.fan_out)
            if p.name in INWARD and p.fused != 3 * p.fan_out
            else None
        ),
    ),
    Rule("it is 0.02^2, as most language models draw", lambda p: 0.02**2),
    _swapped(1),
    _swapped(-1),
    Rule("the division by sqrt(d_head) is missing", lambda p: float(p.plan.d_head or 1), "logits"),
    Rule(MUP, lambda p: 1 / float(p.plan.d_head or 1), "logits"),
    Rule(
        "q k is divided by sqrt(d_model), not by sqrt(d_head)",
        lambda p: float(p.plan.d_head or 1) / p.plan.d_model,
        "logits",
    ),
)
"""Every rule and slip; if several fit equally, the first is taken, so specific ones come first."""


def causes(of: str) -> Iterator[Rule]:
    """Candidate causes for a wrong "role" or wrong "logits", as sentences."""
    for rule in RULES:
        if rule.use == "both" and of == "role":
            yield rule._replace(words=f"it is {rule.words}")
        elif rule.use == of:
            yield rule


# --- published ------------------------------------------------------------------------------------


def _published(base: Transformer, names: Sequence[str]) -> Iterator[WeightRule]:
    """The schemes that set weights, with all their variants."""
    for name in names:
        known = scheme(name)
        if "weights" not in known.sets or name in ("normal", "scaled-init"):
            continue  # rows of the table, with a free variance
        for options in _variants(known.options):
            try:
                with without_warnings():
                    result = known.apply(base, **options)
            except DomainError:
                continue
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            title = f"{name}{f' ({given})' if given else ''}: {known.title}"
            yield WeightRule(title, result, published=True)
    if "scaled-init" in names:
        for variant in ("olmo", "sun"):
            with without_warnings():
                result = base.with_scheme("scaled-init", variant=variant)
            yield WeightRule(f"scaled-init ({variant})", result, published=True)


def _variants(options: dict[str, Any]) -> list[dict[str, Any]]:
    heads = [{}, {"per_head": False}] if options.get("per_head") is True else [{}]
    suns = [{}, {"variant": "sun"}] if options.get("variant") == "authors" else [{}]
    return [{**one, **other} for other in suns for one in heads]


def in_words(model: Transformer) -> str:
    """The stds of a declaration's matrices, with equal ones merged."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in MATRICES:
        if name not in model.matrix_shapes or name.startswith("cross_"):
            continue
        values = (getattr(model.layer_weights(n), name) for n in sorted({1, model.layers}))
        stds = tuple(dict.fromkeys(f"{math.sqrt(v):.3g}" for v in values))
        alike.setdefault(stds, []).append(name)
    if len(alike) == 1:
        return f"std {' to '.join(next(iter(alike)))}"
    largest = max(alike, key=lambda stds: len(alike[stds]))
    rest = (f"{', '.join(n)} std {' to '.join(t)}" for t, n in alike.items() if t != largest)
    return f"std {' to '.join(largest)}, {'; '.join(rest)}"
