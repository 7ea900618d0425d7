"""Findings on a module's tensors, multipliers and structure, one for each cause; `audit`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ..errors import listed
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.expected import tail_probability
from ..show.findings import Finding, Report, Row
from ..show.health import BY_DESIGN
from ..show.recognition import BY_DEPTH, BY_LAYER, MUP, Place, Rule, WeightRule, causes, joined
from .anatomy import as_drawn
from .architecture import fitted
from .expectation import model_of_stack
from .roles import ENCODER, TABLES, gathered, gathered_names, in_layers, tensors_of
from .running import grouped
from .scales import FOLDED
from .tensors import Checked, Measured, Tensors

BIAS = 0.05
"""Share of a bias in the variance of its matrix's output from which it is a warning."""

NEAR = 0.02
"""Relative tolerance of the factor of q k, which has no sampling error, from a known slip's."""

ATTENTION_FIELDS = (
    *("causal", "window", "rotary", "alibi", "qk_norm", "logit_softcap"),
    *("heads", "kv_heads", "d_head"),
)
"""Fields of attention, whose findings name the matrices of queries and keys."""

GAINS = "an initialiser that runs over all parameters draws gains and biases of norms too"
LEAVE_NORMS = "leave norms out: nn.init.ones_(norm.weight), nn.init.zeros_(norm.bias)"
PRE_OR_POST = "x = x + block(norm(x)) is Pre-LN, x = norm(x + block(x)) Post-LN: every layer alike"
AS_DECLARED = "build the module as it is declared, or declare what it is"
VECTORS = ("gain", "mean square")


SCALE_WORDS = {
    "skip_scale": "the skip multiplier lambda",
    "branch_scale": "the residual multiplier beta",
    "norm_output_scale": "the norm's output scale",
    "output_scale": "the factor on the logits",
}
"""Quantities of rows about multipliers, in words."""

STRUCTURE = ("architecture", "norm placement", "unexplained share of the sum")
"""Quantities of rows about how layers are built."""

MISSING = "nothing in the module applies it"


@dataclass
class WeightFindings:
    """Findings from failed rows.

    Attributes:
        target: the model that the module's tensors are compared with; `words` name it ("the plan").
        checked: the checks of the tensors against it.
        planned: whether the user chose it; else the module's config, class or other tensors do.
        promised: what the config or class says of the initialisation, if anything.
        rule: the rule that was recognised in the module's matrices.
        notes: remarks; `wrong`: roles of wrong variance. Both are filled by `findings`.
    """

    read: Tensors
    target: Transformer
    checked: Checked
    words: str
    planned: bool
    promised: Transformer | None = None
    rule: WeightRule | None = None
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    advice: Advice = field(init=False)

    @property
    def strict(self) -> bool:
        """Whether a deviation without a known cause is a finding."""
        return self.planned or self.promised is not None

    def rows(self) -> Iterator[Row]:
        """The variance of every role over all layers, measured and expected."""
        shown = [m for m in self.checked.measured if m.role.is_matrix or m.role.name in TABLES]
        for name, group in grouped(shown, lambda m: m.role.full_name).items():
            count = sum(m.entries.count for m in group)
            variance = sum(m.entries.count * m.entries.square for m in group) / count
            compared = self.strict or (name in MATRICES and variance)
            first = 0, name, ", ".join(gathered([m.role for m in group])), "variance"
            if not compared or not all(m.expected for m in group):
                yield Row(*first, math.nan, variance)
                continue
            expected = sum(m.entries.count * (m.expected or 0.0) for m in group) / count
            spread = math.hypot(*(m.entries.count * m.entries.spread for m in group)) / count
            low, high = expected * math.exp(-1.96 * spread), expected * math.exp(1.96 * spread)
            passed = variance > 0 and abs(math.log(variance / expected)) < 4.5 * spread + 1e-9
            stderr = expected * spread
            yield Row(*first, expected, variance, passed, "", stderr, low=low, high=high)

    def findings(self, failed: Sequence[Row]) -> Iterator[Finding]:
        """One finding for each cause of failed rows."""
        self.advice = advise(self.checked, self.target, self.promised)
        groups = grouped(failed, lambda row: (row.quantity.partition(" over")[0], row.role))
        yield from self._copied([g for (kind, _), g in groups.items() if "another" in kind])
        variances = {role: g for (kind, role), g in groups.items() if kind == "variance"}
        yield from self._variances(variances)
        gains = [g for (kind, _), g in groups.items() if kind in VECTORS]
        yield from self._gains(gains)
        drawn_gains = list(self._drawn_gains())
        yield from drawn_gains
        yield from self._structure([row for row in failed if row.quantity in STRUCTURE[1:]])
        yield from self._declared([row for row in failed if row.quantity == "architecture"])
        explained = ("norm_output_scale",) if drawn_gains or gains else ()
        scales = (r for r in failed if r.quantity in SCALE_WORDS and r.quantity not in explained)
        yield from self._scales(scales)
        for (kind, role), group in groups.items():
            if kind == "mean" and not all(self._has_constant_norms(row.parameter) for row in group):
                yield self._mean(role, group)
        yield from self.attention(
            (row.role.removesuffix("attention").removesuffix("cross"), row.layer, factor)
            for row in failed
            if row.quantity == "temperature" and (factor := row.expected / row.measured)
        )

    # --- entries ----------------------------------------------------------------------------------

    def _copied(self, groups: list[list[Row]]) -> Iterator[Finding]:
        if not groups:
            return
        names = in_order(row.role for group in groups for row in group)
        layers = tuple(sorted({row.layer for group in groups for row in group}))
        tensors = gathered_names([row.parameter for group in groups for row in group])
        # nn.Transformer draws the matrices of copied layers again, but not their biases.
        severity = "note" if all(name.endswith(".bias") for name in names) else "warning"
        why = f"{', '.join(names)} of layers {listed(layers)} hold the same entries as an earlier "
        why += "layer's: what such layers add is not independent and grows faster"
        mend = "build every layer anew instead of copy.deepcopy (nn.TransformerEncoder copies one "
        mend += "layer), or draw each again: moments.torch.initialize"
        yield Finding(severity, "copied layers", tensors, layers, 1.0, 0.0, why, mend)

    def _variances(self, groups: dict[str, list[Row]]) -> Iterator[Finding]:
        biases = {r: g for r, g in groups.items() if r.endswith(".bias")}
        rest = {r: g for r, g in groups.items() if r not in biases}
        if not self.planned:  # a config's usual draw does not forbid blocks of zeros
            rest = {r: g for r, g in rest.items() if r not in self.read.zero}
            yield from self._zero(self.read.zero)
        self.wrong = list(rest)
        rule = self.rule
        if rule is not None and rule.intended is not None and not self.strict:
            moved = [name for name in rest if name in rule.changed_roles()]
            if moved:
                yield self._together(rule.title, [row for name in moved for row in rest[name]])
            rest = {r: g for r, g in rest.items() if r not in moved}
        for names, sentence in self.advice.crossed:
            if rows := [row for name in names for row in rest.get(name, ())]:
                yield self._together(sentence, rows)
                rest = {r: g for r, g in rest.items() if r not in names}

        def cause(role: str) -> Any:
            """The causes of a role, with its layers if these are few, as not all need to fail."""
            causes = self.advice.reasons.get(role)
            layers = tuple(sorted({row.layer for row in rest[role]}))
            few = 2 * len(layers) < self.target.layers
            return (causes, layers if few else ()) if causes else role

        for roles in grouped(rest, cause).values():
            yield self._variance(roles, [row for role in roles for row in rest[role]])
        if biases:
            yield self._biases(biases)

    def _zero(self, names: frozenset[str]) -> Iterator[Finding]:
        """Matrices that are zero in every layer, by design or not.

        A block that starts at zero can learn if one of its two factors is not zero; if both are,
        neither gets a gradient, nor do parameters before an activation that is flat at 0.
        """
        zero = {name.split(".")[-1].removeprefix("cross_") for name in names}
        for first, second in (("value", "output"), ("query", "key"), ("ffn_in", "ffn_out")):
            if {first, second} <= zero:
                words = "neither of them gets a gradient: zero one alone"
                yield self._zero_finding((first, second), "error", words)
                zero -= {first, second}
        if {"output", "ffn_out"} <= zero:
            self.notes.append(BY_DESIGN)
            zero -= {"output", "ffn_out"}
        for name, block in (("output", "attention"), ("ffn_out", "feed-forward")):
            if name in zero:
                words = f"{name} is zero in every layer: {block} blocks are the identity at step 0"
                self.notes.append(f"{words}, by design")
        if "query" in zero:
            words = "query is zero in every layer: attention starts uniform, as muP draws it"
            self.notes.append(words)
        for name, partner, words in (
            ("key", "query", "attention starts uniform over all tokens"),
            ("value", "output", "attention adds nothing"),
            ("ffn_in", "ffn_out", "feed-forward blocks add nothing"),
            ("gate", "", "feed-forward blocks add nothing"),
        ):
            if name in zero and not any(role.split(".")[-1] == partner for role in names):
                yield self._zero_finding((name,), "warning", words)

    def _zero_finding(self, names: tuple[str, ...], severity: str, words: str) -> Finding:
        roles = [r for r in self.read.zero if r.split(".")[-1] in names]
        layers = tuple(range(1, self.target.layers + 1))
        are = "are" if len(names) > 1 else "is"
        why = f"{' and '.join(names)} {are} zero in every layer: {words}"
        mend = "draw them, or zero the outward matrices (output, ffn_out) alone"
        where = self.read.names(*roles), layers
        return Finding(severity, "zero matrix", *where, 0.0, math.nan, why, mend)

    def _together(self, sentence: str, rows: list[Row]) -> Finding:
        """A factor on the wrong matrices, as one finding for all of them."""
        places = {role: n for n, role in enumerate(in_order(row.role for row in rows))}
        rows = sorted(rows, key=lambda row: places[row.role])
        groups = grouped(rows, lambda row: row.role)
        expected = {role: {_std(row.expected) for row in group} for role, group in groups.items()}
        mend = "multiply the matrices that the plan scales, and no others"
        if all(len(stds) == 1 for stds in expected.values()):
            values = {role: min(stds) for role, stds in expected.items()}
            mend = f"draw {', '.join(_by_std(values, ' with std '))}"
        rule = self.rule
        if rule is not None and rule.intended is not None and not self.strict:
            first = rule.model.layer_weights(1)
            drawn = {role: _std(float(getattr(first, role))) for role in groups}
            sentence += f": {', '.join(_by_std(drawn, ' of std '))}"
        return Finding("warning", "wrong variance", *_stated(rows, rows[0]), sentence, mend)

    def _variance(self, roles: list[str], group: list[Row]) -> Finding:
        """Roles of wrong variance in the same layers and for the same causes."""
        causes = self.advice.reasons.get(roles[0], ())
        ratios = [row.ratio for row in group if row.measured > 0 and row.expected > 0]
        ratio = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        layers = tuple(sorted({row.layer for row in group if row.layer}))
        every = not layers or len(layers) == self.target.layers or group[0].layer == 0
        hidden = {role.split(".")[-1] for role in roles} <= set(MATRICES)
        slip = self.rule is not None and self.rule.intended is not None
        usual = not hidden or (every and (not causes or slip))
        severity = "note" if usual and not self.strict else "warning"
        worst = max(group, key=lambda row: row.size)
        said = f": {'; or '.join(causes)}" if causes else ""
        if not ratios and all(row.measured == 0 for row in group):
            said = ": every entry is 0, a zero initialisation or storage that was never filled"
        elif not ratios:
            said = f": {worst.note}" if worst.note else said
        elif not causes and worst.note not in ("normal", "") and "together" not in worst.note:
            said += f" (entries look {worst.note})"
        where = "" if every else f" in layer{'s' * (len(layers) > 1)} {listed(layers)}"
        why = f"{', '.join(in_order(roles))}{where}: {ratio:.3g} times the variance of "
        why += f"{self.words}{said}"
        mend = "draw it anew" if any(row.expected > 0 for row in group) else "set to zero"
        if worst.expected > 0 and "..." not in worst.parameter:
            mend = f"draw with std {_std(worst.expected)}"
        return Finding(severity, "wrong variance", *_stated(group, worst), why, mend)

    def _biases(self, groups: dict[str, list[Row]]) -> Finding:
        """Biases that are not zero, judged by what they add to the output of their matrix."""
        matrices = {
            role.full_name: (entries.square, role.fan_in)
            for role, entries in self.read.entries
            if role.is_matrix
        }
        shares = {}
        for role, group in groups.items():
            weight, fan_in = matrices.get(role.removesuffix(".bias"), (0.0, 1))
            square = max(row.measured for row in group)
            output = weight * fan_in  # for a normalised input
            shares[role] = square / (square + output) if square else 0.0, fan_in
        role = max(shares, key=lambda name: shares[name][0])
        (share, fan_in), worst = shares[role], max(groups[role], key=lambda row: row.size)
        default = "uniform" in worst.note or abs(worst.measured * 3 * fan_in - 1) < 0.3
        origin = ", nn.Linear's own uniform draw, which was not reset" if default else ""
        why = f"biases have a variance of {worst.measured:.3g}, not {worst.expected:.3g}{origin}; "
        why += f"at {role} that is {100 * share:.2g} % of what a normalised input makes"
        severity = "warning" if self.strict or share > BIAS else "note"
        at = _stated([row for group in groups.values() for row in group], worst)
        return Finding(severity, "biases", *at, why, "nn.init.zeros_(linear.bias)")

    def _gains(self, groups: list[list[Row]]) -> Iterator[Finding]:
        if not groups:
            return
        rows = [row for group in groups for row in group]
        worst = max(rows, key=lambda row: row.size)
        why = f"{worst.quantity} of {worst.role} is {worst.measured:.3g} instead of "
        why += f"{worst.expected:.3g} (root mean square)"
        equal = {r.name for r, e in self.read.entries if e.mean**2 > (1 - 1e-6) * e.square}
        if all(
            row.role in equal and row.role.partition(".")[0] in ("query", "key") for row in rows
        ):
            why += ": all entries are equal, which sets the length of queries and keys"
            yield Finding("note", "norm gain", *_stated(rows, worst), why)
        else:
            why += f": {GAINS}"
            yield Finding("warning", "norm gain", *_stated(rows, worst), why, LEAVE_NORMS)

    def _drawn_gains(self) -> Iterator[Finding]:
        """Gains of mean zero in a module of which no gains are declared."""
        if self.promised is not None or self.planned:
            return
        drawn = [
            (role, math.sqrt(entries.square))
            for role, entries in self.read.entries
            if role.name.endswith("norm.gain")
            if entries.count >= 8 and entries.mean**2 < 0.25 * entries.square
        ]
        if not drawn:
            return
        size, roles = drawn[0][1], [role for role, _ in drawn]
        layers = tuple(sorted({role.layer for role in roles if role.layer <= self.target.layers}))
        why = f"gains of norms are entries about 0 with a root mean square of {size:.3g}, not "
        why += f"about 1: {GAINS}"
        yield Finding("warning", "norm gain", gathered(roles), layers, size, 1.0, why, LEAVE_NORMS)

    def _mean(self, role: str, group: list[Row]) -> Finding:
        worst = max(group, key=lambda row: abs(row.measured))
        why = f"entries of {role} have a mean of {worst.measured:.3g}, which no draw about zero has"
        mend = "draw entries symmetric about 0 (uniform from -a to a)"
        return Finding("warning", "mean not zero", *_stated(group, worst), why, mend)

    def _has_constant_norms(self, name: str) -> bool:
        """Whether all rows of a table have one norm, as sines have and random rows do not."""
        table = tensors_of(self.read.module).get(name)
        if table is None or table.ndim != 2:
            return False
        norms = table.detach().double().square().sum(1)
        norms = norms[norms > 0]
        return len(norms) > 1 and float(norms.std() / norms.mean()) < 1e-3

    # --- sums, norms, attention -------------------------------------------------------------------

    def _structure(self, rows: list[Row]) -> Iterator[Finding]:
        """Norms or sums at the wrong places, one finding for all layers that differ alike."""

        def place(item: tuple[tuple[str, str], list[Row]]) -> tuple[str, str]:
            (_, note), group = item
            return in_layers(sorted(row.layer for row in group), self.target.layers), note

        by_role = grouped(rows, lambda row: (row.role, row.note))
        for (where, note), alike in grouped(by_role.items(), place).items():
            group = [row for _, part in alike for row in part]
            why = f"{' and '.join(role for (role, _), _ in alike)}{where}: {note}"
            yield Finding("warning", "norm placement", *_stated(group, group[0]), why, PRE_OR_POST)

    def _declared(self, rows: list[Row]) -> Iterator[Finding]:
        """Fields of the plan, scheme or config that differ from the module's computation."""
        for row in rows:
            name = row.role.rpartition(".")[2]
            kind = "attention mask" if name in ("causal", "window") else "not as declared"
            kind = "tied head" if name == "tied" else kind
            names = self.read.names("query", "key")[:2] if name in ATTENTION_FIELDS else ()
            why = f"{row.role}: {row.note}"
            yield Finding("error", kind, names, (), row.measured, row.expected, why, AS_DECLARED)

    def _scales(self, rows: Iterable[Row]) -> Iterator[Finding]:
        """Wrong multipliers of sums, norms and logits, one finding for all that have one fault."""
        faults: dict[tuple[str, str], list[Row]] = {}
        for kind, of_kind in grouped(rows, lambda row: row.quantity).items():
            for encoder, group in grouped(of_kind, lambda r: r.role.startswith(ENCODER)).items():
                layers = model_of_stack(self.target, ENCODER * encoder).layers
                if kind == "skip_scale" and not self.planned:
                    for role, own in grouped(group, lambda row: row.role).items():
                        faults.setdefault(("", _rescaled(role, own)), []).extend(own)
                    continue
                inside = sorted({row.layer for row in group if row.layer <= layers})
                fault = f"{in_layers(inside or [0], layers)} {_scale_fault(group, layers)}"
                faults.setdefault((SCALE_WORDS[kind], fault), []).extend(group)
        for (multiplier, fault), group in faults.items():
            blocks = sorted({row.role.removesuffix(".norm") for row in group})
            why, mend = fault, PRE_OR_POST
            if multiplier:
                why = f"{multiplier} of {' and '.join(blocks)}{fault}"
                mend = "let the code multiply by the scheme's factor once"
            if MISSING in why:
                mend = (
                    "multiply in the code, or call moments.torch.attach(module, plan) once weights "
                    "are loaded: hooks of moments.torch.initialize are in no state_dict"
                )
            worst = max(group, key=lambda row: row.size)
            inside = sorted({r.layer for r in group if 1 <= r.layer <= self.target.layers})
            where = gathered_names([row.parameter for row in group]), tuple(inside)
            name = worst.quantity.replace("_", " ")
            yield Finding("warning", name, *where, worst.measured, worst.expected, why, mend)

    def attention(
        self, rows: Iterable[tuple[str, int, float]], known: bool = True
    ) -> Iterator[Finding]:
        """Findings on the factor of q k.

        Args:
            rows: stack, layer and excess factor.
            known: whether the right factor is known; else only published slips are findings.
        """
        groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for stack, layer, factor in rows:
            words = next((w for by, w in self._slips() if abs(factor / by - 1) < NEAR), "")
            if words or known:
                groups.setdefault((stack, words), []).append((layer, factor))
        for (stack, words), result in groups.items():
            layers, factor = tuple(layer for layer, _ in result), result[0][1]
            # muP, whose matrices are drawn by their fans, has this factor
            is_mup = words.startswith(MUP.partition("{")[0])
            intended = is_mup and not known and self.rule is not None and self.rule.by_fans
            severity = "note" if intended else "warning"
            names = self.read.names(f"{stack}query", f"{stack}key", layers=layers)
            why = f"q k is multiplied by {factor:.3g} times what it should be, so that logits have "
            why += f"{factor**2:.3g} times the variance (d_head = {self.target.d_head}): "
            why += words or "something else than 1/sqrt(d_head) multiplies q k"
            mend = "multiply q k by d_head ** -0.5 once"
            yield Finding(severity, "attention scale", names, layers, factor, 1.0, why, mend)

    def _slips(self) -> Iterator[tuple[float, str]]:
        """Excess factors of q k by known slips, and their words."""
        place = Place(1, "query", 0, 0, self.target)
        is_root = float(self.target.d_head or 1) ** 2 == self.target.d_model
        same = ", which is sqrt(d_model)," if is_root else ","
        for rule in causes("logits"):
            factor = math.sqrt(rule.variance(place) or 0.0)
            if abs(factor - 1) > NEAR:
                yield factor, rule.words.format(same=same)


def _scale_fault(rows: list[Row], layers: int) -> str:
    """The fault of multipliers of one kind, in words; `layers`: number in the stack."""
    values = [row.measured for row in rows]
    if all(math.isnan(v) for v in values):
        return "could not be measured"
    if all(abs(v - 1) < 1e-2 for v in values):
        return f"is missing (1 instead of {rows[0].expected:.4g}): {MISSING}"
    if all(abs(v) < 1e-3 for v in values):
        return (
            "is 0: a scale that was erased, for example a buffer lost when the module was "
            "materialised or loaded"
        )
    ratios = ", ".join(f"{row.ratio:.3g}" for row in rows[:3])
    hint = ""
    if all(abs(row.measured - row.expected**2) < 0.01 * row.expected**2 for row in rows):
        hint = ": it was squared, or applied twice"
    elif all(abs(row.measured**2 - row.expected) < 0.01 * row.expected for row in rows):
        hint = ": its square root was applied"
    elif len({row.layer for row in rows}) > 1:
        for power, applied, right in ((0.5, BY_LAYER, BY_DEPTH), (-0.5, BY_DEPTH, BY_LAYER)):
            if all(abs(row.ratio / (layers / row.layer) ** power - 1) < 0.01 for row in rows):
                hint = f": {applied} was applied for {right} (N = {layers})"
    return f"is {ratios} times the plan's{hint}"


def _rescaled(role: str, rows: Sequence[Row]) -> str:
    """The fault of a skip multiplier that no plan asks for, in words."""
    worst = max(rows, key=lambda row: row.size)
    if abs(worst.measured) < 0.01:
        return f"{role} drops the residual connection: lambda is {worst.measured:.2g}"
    far = abs(worst.measured - worst.expected) > 0.5
    words = f"lambda of x in {role}'s sum is {worst.measured:.4g} instead of {worst.expected:.4g}"
    return words + ": the stream itself is rescaled or normalised before the sum" * far


def _stated(
    group: Sequence[Row], worst: Row
) -> tuple[tuple[str, ...], tuple[int, ...], float, float]:
    """Parameters, layers, measured and expected number of a finding on some rows."""
    layers = sorted({row.layer for row in group if row.layer})
    names = gathered_names([row.parameter for row in group])
    return names, tuple(layers), worst.measured, worst.expected


def in_order(roles: Iterable[str]) -> tuple[str, ...]:
    """Distinct roles: matrices in the order of the network, then the others, biases last."""
    order = {name: place for place, name in enumerate(MATRICES)}

    def place(role: str) -> tuple[bool, int]:
        return role.endswith(".bias"), order.get(role.split(".")[-1], len(order))

    return tuple(sorted(dict.fromkeys(roles), key=place))


def _std(variance: float) -> str:
    return f"{math.sqrt(max(variance, 0.0)):.3g}"


def _by_std(values: Mapping[str, str], between: str) -> list[str]:
    """Roles with their standard deviations, one phrase for roles that share one."""
    groups = grouped(values.items(), lambda item: item[1])
    return [f"{joined([role for role, _ in rows])}{between}{std}" for std, rows in groups.items()]


def in_words(plan: Any) -> str:
    """A plan or the name of a scheme, as the end of "compared with"."""
    return f"the scheme {plan!r}" if isinstance(plan, str) else "the plan"


# --- audit ----------------------------------------------------------------------------------------


_FOLDED = "the module was folded: its weights carry the plan's scales; audit it before folding"


def audit(
    module: nn.Module,
    plan: Any = None,
    *,
    batch: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a freshly initialised module with a plan.

    It compares mean squares, by matrix and by role over all layers, with their sampling errors,
    means, gains and biases of norms, and the multipliers of residual sums and norms in one recorded
    pass; no layer may repeat the entries of another. A correct module fails with probability 1e-5
    over all checks together.

    Args:
        module: any that can be read; it is not changed. Of compiled and data-parallel modules the
            module inside is audited.
        plan: a plan of `moments.solve`, a Transformer, or a scheme's name, which is then applied to
            the module's own architecture; None: what the module's config or class promises.
        batch: input of the module, as in `moments.torch.measure`; None: random input.
        options: of the scheme, if the plan is a scheme's name.

    Returns:
        A report: `passed`, `unchecked`, `str(report)`, `to_frame()`.

    Raises:
        DomainError: a plan of another depth, width or number of heads, or none for a module that
            does not say how it is meant to be drawn.
        MomentsError: the module cannot be read.
    """
    module, reading, model, described, _ = fitted(module, plan, options, batch, strict=False)
    read = Tensors.of(module, reading)
    checked = Checked.of(read, model)
    words = "what its config or class promises" if plan is None else in_words(plan)
    weights = WeightFindings(read, model, checked, words, plan is not None, described)
    failed = [row for row in checked.rows if row.passed is False]
    result = list(weights.findings(failed))
    folded = bool(failed) and getattr(module, FOLDED, False)
    unknown = reading.roles.unidentified
    return Report(
        source=type(module).__name__,
        scheme=f"compared with {words}",
        findings=tuple(result),
        notes=(
            *((_FOLDED,) if folded else ()),
            *weights.notes,
            *(f"not as planned: {phrase}" for phrase in checked.unlike),
        ),
        unchecked=(
            *checked.unchecked,
            *((f"of unknown role: {', '.join(unknown)}",) * bool(unknown)),
        ),
        rows=tuple(checked.rows),
        model=as_drawn(reading),
    )


# --- likely causes: rules whose variance fits every layer within its sampling error ---------------


CHANCE = 1e-4
"""Probability under the plan from which a layer does not count as wrong."""

FIT = 1e-3
"""A cause is named if its worst layer is at least this probable (Bonferroni over the layers)."""

SHOWN = 2
"""Causes named in one finding."""

PAIRS = (
    (("ffn_in",), ("ffn_out",)),
    (("gate", "ffn_in"), ("ffn_out",)),
    (("query", "key", "value"), ("output",)),
    (("value",), ("output",)),
    (("query",), ("key",)),
    (("query", "key"), ("value",)),
)
"""Pairs of matrices between which a factor is easily misplaced."""


def _variance_of(place: Place, name: str) -> float | None:
    return place.of(place.plan, name)


def _others(
    role: str, stack: str, places: Sequence[Place], present: Collection[str]
) -> Iterator[Rule]:
    """The variances that a plan gives to other matrices of the same layers, as causes."""
    names = (n for n in MATRICES if n != role and stack + n in present)
    for alike in grouped(names, lambda n: tuple(p.of(p.plan, n) for p in places)).values():
        words = f"it is what the plan gives {' and '.join(alike)}: {role} was skipped, or took "
        yield Rule(f"{words}another's scale", functools.partial(_variance_of, name=alike[0]))


class Advice(NamedTuple):
    """Likely causes of failed rows.

    Attributes:
        crossed: sets of roles with a factor on the wrong matrix, each with its sentence.
        reasons: role -> causes of its variance, the likeliest first.
    """

    crossed: tuple[tuple[tuple[str, ...], str], ...]
    reasons: dict[str, tuple[str, ...]]


def advise(checked: Checked, model: Transformer, described: Transformer | None) -> Advice:
    """The likely causes of failed rows; `described`: the module as its framework draws it."""
    known = [m for m in checked.measured if m.expected is not None]
    drawn = [m for m in known if m.role.is_matrix or m.role.name in TABLES]
    groups = grouped(drawn, lambda m: m.role.full_name)
    failed = (row for row in checked.rows if row.passed is False)
    off = {row.role for row in failed if row.quantity.partition(" over")[0] == "variance"}
    roles = [name for name in groups if name in off]
    reasons = {n: _causes(groups[n], groups, model, described) for n in roles}
    # A cause that fits every matrix is likelier than a different one for each.
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
    """The causes that fit the wrong layers of a role, the likeliest first."""
    if any(m.expected and m.entries.square == 0 for m in group):
        return ()
    stack = group[0].role.stack
    plan, drawn = (m and model_of_stack(m, stack) for m in (model, described))
    assert plan is not None
    bad = [m for m in group if m.expected and not _chance(m, m.expected) > CHANCE] or group
    uniform = all(m.entries.distribution == "uniform" for m in bad)

    def place(m: Measured) -> Place:
        numbers = m.role.layer, m.role.name, m.role.fan_in, m.role.fan_out
        return Place(*numbers, plan, float(m.expected or 0.0), drawn, uniform)

    others = _others(group[0].role.name, stack, [place(m) for m in bad], groups)
    rules = list(causes("role"))
    at = next(n for n, rule in enumerate(rules) if rule.words.startswith("it is the framework's"))
    fitting = []
    for rule in (*rules[:at], *others, *rules[at:]):
        members = group if rule.everywhere else bad
        variances = [rule.variance(place(m)) for m in members]
        unchanged = all(v == (m.expected or 0.0) for m, v in zip(members, variances, strict=True))
        if None in variances or unchanged:
            continue
        score = min(_chance(m, v or 0.0) for m, v in zip(members, variances, strict=True))
        if score > FIT / len(members):
            fitting.append((score, rule.words.format(n=plan.layers)))
    ranked = sorted(fitting, key=lambda pair: -min(pair[0], 0.05))
    return tuple(dict.fromkeys(word for _, word in ranked))


def _chance(m: Measured, variance: float) -> float:
    """Probability of a mean square at least as far from a variance as the measured one."""
    if not 0 < variance < math.inf:
        return 0.0
    return tail_probability(m.entries.square / variance, m.entries.spread)


def _crossed(
    groups: dict[str, list[Measured]], roles: list[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Sets of matrices of which some have a factor and the others its inverse, with a sentence."""
    result: list[set[str]] = []
    for stack, pair in itertools.product(("", ENCODER), PAIRS):
        sides = [tuple(stack + name for name in side) for side in pair]
        for wrong, right in (sides, sides[::-1]):
            both = {*wrong, *right}
            if any(both <= names for names in result) or not both <= set(roles):
                continue
            if sentence := _crossing(groups, wrong, right):
                result.append(both)
                yield wrong + right, sentence


def _crossing(
    groups: dict[str, list[Measured]], wrong: tuple[str, ...], right: tuple[str, ...]
) -> str:
    """The sentence on a factor that `wrong` have instead of `right`; "" if they have not."""
    every = [m for name in wrong + right for m in groups[name]]
    if not all(m.entries.square > 0 and m.expected for m in every):
        return ""
    ratios = {  # logarithms, averaged over layers
        n: float(np.mean([math.log(m.entries.square / (m.expected or 1.0)) for m in groups[n]]))
        for n in wrong + right
    }
    factor, tolerance = ratios[wrong[0]], 6 * max(m.entries.spread for m in every)
    same = all(abs(ratios[n] - factor) < tolerance for n in wrong)
    inverse = all(abs(ratios[n] + factor) < tolerance for n in right)
    if not (same and inverse and factor < -tolerance):
        return ""
    carries, lack = "carries" if len(wrong) == 1 else "carry", "s" * (len(right) == 1)
    return (
        f"{' and '.join(wrong)} {carries} the factor {math.exp(factor):.3g} that "
        f"{' and '.join(right)} lack{lack}: the scale was put on the wrong matrix"
    )
