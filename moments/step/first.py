"""`Prediction.after`: the network after one step of an optimizer, without running it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import domain_error
from ..formulas.checks import check_array, check_choice, check_flag, check_number
from ..formulas.symbols import NONNEGATIVE, PROBABILITY
from .change import Change
from .ends import Words, ending, entered, tied_overlap
from .rules import MUON_SCALES, Optimizer
from .sites import Reading, Site
from .walk import Walk


def still(reading: Reading, optimizer: Optimizer) -> float:
    """The loss at learning rate 0, as `ending` has it."""
    words = Words.of(reading)
    kernel = np.asarray(reading.readout.kernel.pairs)
    nothing = Change.none(len(kernel))
    tied = tied_overlap(reading, words)
    ones, zeros = np.ones(len(kernel)), np.zeros_like(kernel)
    at_tables = np.zeros_like(reading.before)
    return ending(reading, words, optimizer, 0.0, nothing, zeros, at_tables, tied, ones).loss


class Stepped:
    """One step at one learning rate.

    Attributes:
        sites: every site before and after.
        weights: every parameter's step.
        end: the logits and the loss.
    """

    def __init__(self, reading: Reading, optimizer: Optimizer, rate: float) -> None:
        model, words = reading.model, Words.of(reading)
        tied = tied_overlap(reading, words)
        walk = Walk(
            optimizer,
            rate,
            tied,
            reading.spectra,
            reading.roots,
            reading.signs,
            reading.rows,
            reading.neurons,
            reading.points,
        )
        at_tables = reading.received
        first = entered(reading, words, optimizer, rate, at_tables, tied)
        points = iter(reading.points)
        site = Site(-1, 0, "tables", None, reading.before, at_tables, float(reading.model.d_model))
        change: Change = first.change
        change, site = walk.through(reading.embedding, change, site, points)
        change, site = walk.noted(change, next(points))
        change, site = walk.through(reading.layers, change, site, points)
        last, at_last = change, site
        change, site = walk.through(reading.head, change, site, points)
        kept = np.sqrt(np.diag(at_last.kernel) / np.diag(last.new(at_last.kernel)))
        end = ending(reading, words, optimizer, rate, change, site.gradient, at_tables, tied, kept)
        sizes = {table.name: table.variance for table in reading.tables}
        sizes |= {"patch": getattr(reading.model.embedding, "patch_variance", np.nan)}
        sizes |= {"head": reading.readout.weight_variance}
        for name, found in first.effects:
            walk.entry(0, name, optimizer.factor(name), found, sizes[name], 1.0)
        for name, found in end.effects:
            variance = sizes.get(name, np.nan)
            walk.entry(model.layers + 1, name, optimizer.factor(name), found, variance, 1.0)
        self.sites, self.weights, self.end = walk.sites, walk.weights, end


def named_optimizer(
    name: str,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    adjust: str = "original",
    multipliers: Mapping[str, float] | None = None,
) -> Optimizer:
    """The first step of an optimizer by name.

    Raises:
        DomainError: another name, or an option that it does not have.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    check_choice("adjust", adjust, tuple(MUON_SCALES))
    if adjust != "original" and name != "muon":
        raise domain_error("adjust", adjust, 'left out but for "muon"')
    pair = check_array("betas", betas, "two numbers in [0, 1)", None)
    if pair.shape != (2,) or not np.all((pair >= 0) & (pair < 1)):
        raise domain_error("betas", betas, "two numbers in [0, 1)")
    decay = check_number("weight_decay", weight_decay, NONNEGATIVE)
    push = check_number("momentum", momentum, PROBABILITY)
    if decay and name == "adam":
        raise domain_error(
            "weight_decay", decay, "0 for adam, which adds it to the gradient", 'use "adamw"'
        )
    if (push or check_flag("nesterov", nesterov)) and name != "sgd":
        raise domain_error("momentum", push, 'left out but for "sgd": a first step has no past')
    if nesterov and not push:
        raise domain_error("nesterov", nesterov, "False without momentum")
    by_adam = name in ("adam", "adamw", "muon")
    if eps is not None and not by_adam:
        raise domain_error("eps", eps, "left out but for adam, adamw and muon")
    epsilon = check_number("eps", 1e-8 if eps is None else eps, NONNEGATIVE) if by_adam else 0.0
    given = dict(multipliers or {})
    for key, factor in given.items():
        given[key] = check_number(f"multipliers[{key!r}]", factor, NONNEGATIVE)
    rule = {"sgd": "sgd", "muon": "muon"}.get(name, "sign")
    others = "sgd" if name == "sgd" else "sign"
    gain = 1.0 + push if nesterov else 1.0
    return Optimizer(name, rule, others, epsilon, decay, gain, adjust, given)


OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "sign", "muon")
