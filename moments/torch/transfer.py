"""`moments.transfer`: whether the learning rate of a small model suits a large one.

Modules of two or three sizes are read, with the rates that their real optimizer gives every
parameter, and their first steps predicted. `step.scaling` interprets the exponents.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import DomainError, ValidityWarning, domain_error
from ..formulas.checks import check_choice, check_count
from ..model.experts import Experts
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..step.result import Stepping
from ..step.rules import OPTIMIZERS, group_of
from ..step.scaling import (
    AXES,
    QUANTITIES,
    TransferReport,
    along_depth,
    along_experts,
    along_width,
    exponent,
    slow_table,
)
from ..step.search import zipf_batch
from ..step.walk import Walk, WeightStep
from .describe import Description, describe
from .roles import block_of, gathered_names, tensors_of
from .running import restored

TOKENS = 16
"""Tokens of each of the two sequences of a prediction."""

_TINY = 1e-9
"""Largest rate of predicted steps, so small that they are linear and no token changes its experts
(`drawn.TINY`)."""


def transfer(
    factory: Callable[[int], Any],
    axis: str = "width",
    sizes: Sequence[int] = (128, 256, 512),
    optimizer: Any = None,
) -> TransferReport:
    """Whether learning rates of small models suit large ones, and if not, why.

    Modules of two or more sizes are read, with the rates that their optimizers give every
    parameter, and their first steps predicted; nothing is trained. The effect of a step is a power
    of the size, whose exponent is 0 if rates transfer.

    Along the number of experts, width, depth, the number of experts of a token and the text are
    fixed, so that each of more experts sees fewer tokens. A token keeps its experts in the step.

    Args:
        factory: from a size to a module of that width, depth or number of experts, or to (module,
            optimizer).
        axis: "width", "depth" or "experts".
        sizes: arguments of the factory, rising. Exponents are those between the two largest, for
            experts between the least and the largest; modules of the others are only read.
        optimizer: a function of the module (or of the module and the size) that makes its torch
            optimizer, or several (Muon and Adam), with the real groups; or a name as in
            `Prediction.after`, all rates being one; None: the factory's, else Adam at one rate.

    Returns:
        A TransferReport: `passed`, `findings` (each with its mend), `table()`, `to_frame()`.

    Raises:
        DomainError: an argument out of range, an optimizer that is not known, or a module that
            is no decoder, encoder or classifier that can be read (the message says why).
    """
    check_choice("axis", axis, AXES)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise domain_error(
            "factory", type(factory).__name__, "a function from a size to a module of that size"
        )
    if not isinstance(sizes, Sequence | np.ndarray):
        raise domain_error("sizes", sizes, "two or more sizes, such as (128, 256)")
    counts = tuple(check_count("sizes", size) for size in sizes)
    if len(set(counts)) < 2 or list(counts) != sorted(set(counts)):
        raise domain_error("sizes", sizes, "two or more sizes, each larger than the last")
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer, OPTIMIZERS)
    read = [_Sized.of(factory, size, optimizer) for size in counts]
    kinds = {one.kind for one in read}
    if len(kinds) > 1:
        raise DomainError(f"optimizers differ between sizes: {', '.join(sorted(kinds))}")
    reference = max(read[0].rates.values())
    if axis == "experts":
        _check_only_experts_differ(counts, read)
        used = [read[0], read[-1]]  # far apart, because draws of experts scatter
    else:
        used = read[-2:]
    steps = [one.steps(reference) for one in used]
    logs = np.log([one.size for one in used])
    rows = []
    for name in steps[0]:
        if not all(name in step for step in steps):
            continue
        exponents = {
            quantity: exponent(logs, [step[name][quantity] for step in steps])
            for quantity in QUANTITIES
        }
        rows.append({"weight": name, "parameters": read[0].names(name), **exponents})
    notes = tuple(dict.fromkeys(note for one in read for note in one.notes))
    if axis == "width":
        heads = exponent(logs, [float(one.model.d_head or 0) for one in used])
        products = heads + exponent(logs, [one.scale for one in used])
        findings = along_width(rows, products, heads if read[0].kind == "sgd" else 0.0)
        notes += tuple(
            f"{row['parameters']}: its rate falls by 1 / sqrt(width), u-muP's rule for tables"
            for row in rows
            if slow_table(row)
        )
    elif axis == "depth":
        findings = along_depth(rows, exponent(logs, [one.growth for one in used]))
    else:
        findings = along_experts(rows, exponent(logs, [one.expert_gain for one in used]))
    return TransferReport(axis, counts, read[0].kind, tuple(rows), tuple(findings), notes)


def _check_only_experts_differ(sizes: Sequence[int], read: Sequence[_Sized]) -> None:
    """Raise a DomainError unless modules differ in the number of experts alone."""
    models = [one.model for one in read]
    for size, model in zip(sizes, models, strict=True):
        counts = sorted({block.experts for block in model.ffns if isinstance(block, Experts)})
        if counts != [size]:
            found = ", ".join(map(str, counts)) or "none"
            raise domain_error(f"experts of factory({size})", found, f"{size} in every mixture")
    for name in ("d_model", "layers"):
        if len(values := {getattr(model, name) for model in models}) > 1:
            seen = ", ".join(map(str, sorted(values)))
            raise domain_error(name, seen, "one for all numbers of experts")
    chosen = {block.chosen for m in models for block in m.ffns if isinstance(block, Experts)}
    if len(chosen) > 1:
        seen = ", ".join(map(str, sorted(chosen)))
        raise domain_error("experts that a token goes to", seen, "one number for all sizes")


# --- one size -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sized:
    """A module of one size.

    Attributes:
        size: argument of the factory.
        described: its description.
        model: its declaration, for few tokens.
        kind: of its optimizer.
        rates: learning rates by role, of matrices as the module multiplies with them.
        options: of the optimizer.
        filled: roles that start at 0 and were drawn instead.
        notes: what was assumed.
    """

    size: int
    described: Description
    model: Transformer
    kind: str
    rates: Mapping[str, float]
    options: Mapping[str, Any]
    filled: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, factory: Callable[[int], Any], size: int, optimizer: Any) -> _Sized:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            result = factory(size)
        made = result if isinstance(result, tuple) else (result, None)
        if len(made) != 2 or not isinstance(made[0], nn.Module):
            got = f"({', '.join(type(one).__name__ for one in made)})"
            got = got if isinstance(result, tuple) else type(result).__name__
            raise domain_error(f"factory({size})", got, "a module, or a module and its optimizer")
        module, own = made
        optimizer = optimizer if own is None else own
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            name = optimizer.__name__
            remedy = f"lambda module: {name}(module.parameters(), lr=1e-3)"
            raise domain_error("optimizer", name, "a function of the module", remedy)
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            several = len(inspect.signature(optimizer).parameters) > 1
            optimizer = optimizer(module, size) if several else optimizer(module)
        kind, by_parameter, options = _rates_of(module, optimizer)
        with _filled(module) as empty, warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidityWarning)
            described = describe(module)
            if described.model is None or not described.found.roles:
                why = "; ".join(described.unplaced)
                raise DomainError(f"the module of size {size} cannot be read: {why}")
            rates, notes = _by_role(described, by_parameter, kind)
        few = described.model.replace(seq_len=min(TOKENS, described.model.seq_len))
        roles = described.found.roles
        filled = frozenset(role.full_name for role in roles if role.parameter in empty)
        if "head" in filled:  # its entries soon have the size of its steps
            assert few.head is not None
            size_soon = _SOON * rates["head"]
            if kind == "sgd":  # steps in proportion to the gradient contain the output scale
                size_soon *= few.head.output_scale
            few = few.replace(head=few.head.replace(weight_variance=size_soon**2))
        if empty:
            names = ", ".join(gathered_names(sorted(empty)))
            notes.append(f"{names}: starts at 0, and was read as drawn")
        return cls(size, described, few, kind, rates, options, filled, tuple(notes))

    def names(self, weight: str) -> str:
        """The module's own names of the parameters of a role."""
        labels = [role.label for role in self.described.found.roles if role.full_name == weight]
        return ", ".join(gathered_names(labels))

    @functools.cached_property
    def prediction(self) -> Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidityWarning)
            result: Prediction = predict(self.model, tokens=True, **zipf_batch(self.model))
        return result

    @property
    def scale(self) -> float:
        """Factor of q k."""
        scale = (self.model.d_head or math.nan) ** -0.5
        return float(scale / self.model.temperatures.mean())

    @property
    def growth(self) -> float:
        """Ratio of the stream's last root mean square to its first."""
        variance = self.prediction.variance
        return float(math.sqrt(variance[-1] / variance[0]))

    @property
    def expert_gain(self) -> float:
        """Ratio of the root mean square of a mixture's output to that of its input."""
        points = self.prediction._stepping.reading.points
        gains = [
            after.kernel.trace() / at.kernel.trace()
            for at, after in itertools.pairwise(points)
            if after.name == "ffn.experts"
        ]
        return _typical_size(np.array(gains))

    def steps(self, reference: float) -> dict[str, dict[str, float]]:
        """Root mean squares of the effects of a step by role, at rates relative to `reference`."""
        shares = {name: rate / reference for name, rate in self.rates.items()}
        values: dict[str, dict[str, float]] = {}
        known = {role.full_name: role for role in self.described.found.roles}
        stepping: Stepping = self.prediction._stepping

        def walk(multipliers: Mapping[str, float]) -> Walk:
            options = {**self.options, "multipliers": multipliers}
            return stepping.walked(self.kind, _TINY, **options)

        weights = walk(shares).weights
        for name in dict.fromkeys(one.weight for one in weights):
            own = [one for one in weights if one.weight == name]
            if name not in known or not shares.get(name) or not any(one.square for one in own):
                continue
            activation, step = self._local(name, own, float(known[name].fan_in))
            logit = math.nan
            if group_of(name) != "vectors":
                only = {one.weight: 0.0 for one in weights} | {name: shares[name]}
                logit = math.sqrt(walk(only).end.change)
            values[name] = {
                "activation": math.nan if name in self.filled else activation,
                "update": logit if name == "head" else step,
                "logit": logit,
                "loss": abs(sum(one.slope for one in own)),
            }
        return values

    def _local(self, name: str, own: Sequence[WeightStep], fan_in: float) -> tuple[float, float]:
        """Root mean square output of a matrix, and of its step, for an input of variance 1; sizes
        of tables and vectors, which have no input."""
        rows = [(one.variance, one.square, one.aligned, one.chosen) for one in own]
        start, step, aligned, chosen = np.array(rows).T
        scale = self.model.head.output_scale if name == "head" and self.model.head else 1.0
        if group_of(name) in ("matrices", "head"):
            start, step = start * fan_in, step * aligned * chosen
        return scale * _typical_size(start), scale * _typical_size(step)


_SOON = 100.0
"""Steps after which a head that starts at 0 is considered; exponents do not depend on it."""


def _typical_size(squares: np.ndarray) -> float:
    """Root of the geometric mean of squares over layers; nan without positive ones."""
    known = squares[np.isfinite(squares) & (squares > 0)]
    return float(np.exp(0.5 * np.log(known).mean())) if len(known) else math.nan


@contextlib.contextmanager
def _filled(module: nn.Module) -> Iterator[set[str]]:
    """Draw the matrices that start at 0 with variance 1/width within the context, because no
    gradient passes them in the first step, but from the second on."""
    empty = {n: p for n, p in module.named_parameters() if p.ndim > 1 and not p.detach().any()}
    generator = torch.Generator().manual_seed(0)
    with restored(empty.values()):
        for p in empty.values():
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=generator) / min(p.shape[-2:]) ** 0.5)
        yield set(empty)


def _by_role(
    described: Description, rates: Mapping[str, float], kind: str
) -> tuple[dict[str, float], list[str]]:
    """The learning rate of every role, and notes.

    If the module multiplies with a parameter times a factor, the step of the product is the
    parameter's times that factor; in proportion to the gradient, times the factor's square.
    """
    model, tensors = described.model, tensors_of(described.module)
    assert model is not None
    power = 2 if kind == "sgd" else 1
    rates_of: dict[str, list[float]] = {}
    for role in described.found.roles:
        if role.parameter not in rates:
            continue
        factor = 1.0
        if role.name in MATRICES and 1 <= role.layer <= model.layers:
            square = float(block_of(tensors, role).double().square().mean())
            variance = float(getattr(model.layer_weights(role.layer), role.name))
            if square > 0 and variance > 0:
                factor = math.sqrt(variance / square)
        rates_of.setdefault(role.full_name, []).append(rates[role.parameter] * factor**power)
    notes = [
        f"{name}: rates differ between layers, and their geometric mean was taken"
        for name, values in rates_of.items()
        if max(values) > 1.5 * min(values)
    ]
    means = {name: float(np.exp(np.mean(np.log(values)))) for name, values in rates_of.items()}
    return means, notes


_KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Lion": "lion", "Muon": "muon"}
_KINDS |= {"FusedAdam": "adam", "MuAdam": "adam", "MuAdamW": "adamw", "MuSGD": "sgd"}


def _rates_of(module: nn.Module, optimizer: Any) -> tuple[str, dict[str, float], dict[str, Any]]:
    """The kind of the optimizer, the rate of every parameter that it moves, and its options."""
    named = {id(p): name for name, p in module.named_parameters()}
    if optimizer is None or isinstance(optimizer, str):
        return optimizer or "adam", dict.fromkeys(named.values(), 1e-3), {}
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    kinds, rates, options = [], dict[str, float](), dict[str, Any]()
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise domain_error(
                "optimizer",
                type(one).__name__,
                "a torch optimizer, several of them, a function of the module that makes them, or "
                f"one of {', '.join(OPTIMIZERS)}",
            )
        known = [_KINDS[c.__name__] for c in type(one).__mro__ if c.__name__ in _KINDS]
        for group in one.param_groups:
            # an optimizer of several kinds names the kind of each group, as nanochat's does
            own = [group["kind"]] if group.get("kind") in OPTIMIZERS else known
            if not own:
                raise domain_error(
                    "optimizer", type(one).__name__, f"one of {', '.join(_KINDS)}, or a name"
                )
            kinds.append(own[0])
            if own[0] in ("adam", "adamw"):
                options["eps"] = float(group["eps"])
            for p in group["params"]:
                if id(p) in named and float(group["lr"]) > 0:
                    rates[named[id(p)]] = float(group["lr"])
    if not rates:
        raise DomainError(
            "optimizer: none of its parameters with a rate above 0 is one of the module's"
        )
    kind = "muon" if "muon" in kinds else kinds[0]
    if kind != "muon" and len(set(kinds)) > 1:
        raise domain_error("optimizer", ", ".join(kinds), "one kind, or Muon with Adam")
    return kind, rates, options
