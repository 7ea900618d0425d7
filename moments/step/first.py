"""`Prediction.after`: the network after one step of an optimizer, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import domain_error
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_number,
)
from .change import Change
from .ends import Words, ending, entered, tied_overlap
from .rules import MUON_SCALES, Optimizer
from .several import Updates
from .sites import ENCODER, Reading, Site
from .walk import Walk


def still(reading: Reading, optimizer: Optimizer) -> float:
    """The loss at learning rate 0, as `ending` has it."""
    words = Words.of(reading)
    kernel = np.asarray(reading.readout.kernel.pairs)
    nothing = Change.none(len(kernel))
    tied = tied_overlap(reading, words)
    ones, zeros = np.ones(len(kernel)), np.zeros_like(kernel)
    return ending(reading, words, optimizer, 0.0, nothing, zeros, tied, ones).loss


def stepped(reading: Reading, optimizer: Optimizer, rate: float) -> Walk:
    """One step at one learning rate: the walk, from the tables to the loss."""
    model, words = reading.model, Words.of(reading)
    tied, width = tied_overlap(reading, words), float(model.d_model)
    walk = Walk(optimizer, rate, tied, reading)
    points = iter(reading.points)
    sizes = {"head": reading.readout.weight_variance}
    sizes["patch"] = getattr(model.embedding, "patch_variance", np.nan)
    for stream in reading.streams:
        main = stream is reading.main
        prefix, here = ("", tied) if main else (ENCODER, 0 * stream.before)
        first = entered(reading, words, optimizer, rate, stream, here)
        walk.prefix, walk.tied, walk.along = prefix, here, first.along
        site = Site(-1, 0, "tables", None, stream.before, stream.received, width)
        change, site = walk.through(stream.embedding, first.change, site, points)
        change, site = walk.noted(change, next(points))
        last = walk.through(stream.layers, change, site, points)
        change, site = walk.memory = walk.through(stream.ending, *last, points)
        sizes |= {prefix + table.name: table.variance for table in stream.tables}
        for name, found in first.effects:
            full = prefix + name
            walk.entry(0, full, optimizer.factor(full), found, sizes[full], 1.0)
    kept = np.sqrt(np.diag(last[1].kernel) / np.diag(last[0].new(last[1].kernel)))
    end = ending(reading, words, optimizer, rate, change, site.gradient, tied, kept)
    for name, found in end.effects:
        variance = sizes.get(name, np.nan)
        walk.entry(model.layers + 1, name, optimizer.factor(name), found, variance, 1.0)
    walk.end = end
    return walk


def named_optimizer(
    name: str,
    *,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    nesterov: bool | None = None,
    adjust: str = "original",
    multipliers: Mapping[str, float] | None = None,
    steps: int = 1,
) -> Optimizer:
    """The first step of an optimizer by name, or its first steps.

    Raises:
        DomainError: another name, or an option that it does not have.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    check_choice("adjust", adjust, tuple(MUON_SCALES))
    if adjust != "original" and name != "muon":
        raise domain_error("adjust", adjust, 'left out but for "muon"')
    usual = (0.9, 0.99) if name == "lion" else (0.9, 0.999)
    pair = check_array("betas", usual if betas is None else betas, "two numbers in [0, 1)", None)
    if pair.shape != (2,) or not np.all((pair >= 0) & (pair < 1)):
        raise domain_error("betas", betas, "two numbers in [0, 1)")
    decay = check_number("weight_decay", weight_decay, NONNEGATIVE)
    by_muon = name == "muon"  # whose author's are .95, by Nesterov
    push = check_number(
        "momentum", (0.95 if by_muon else 0.0) if momentum is None else momentum, PROBABILITY
    )
    ahead = check_flag("nesterov", (by_muon and push > 0) if nesterov is None else nesterov)
    if decay and name == "adam":
        raise domain_error(
            "weight_decay", decay, "0 for adam, which adds it to the gradient", 'use "adamw"'
        )
    if (push or ahead) and name not in ("sgd", "muon"):
        raise domain_error("momentum", push, 'left out but for "sgd" and "muon"')
    if ahead and not push:
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
    gain = 1.0 + push if ahead and not by_muon else 1.0
    updates = None
    if check_count("steps", steps) > 1:
        gain = 1.0  # the sum of all steps has it
        # of Muon, what is no hidden matrix steps by Adam
        kind = "adam" if by_adam else name
        updates = Updates(kind, steps, (pair[0], pair[1]), epsilon, push, ahead)
    return Optimizer(name, rule, others, epsilon, decay, gain, adjust, given, updates)


def check_step(optimizer: str, learning_rate: float, **options: Any) -> float:
    """The learning rate, before anything is computed.

    Raises:
        DomainError: as `named_optimizer`, or a rate that is not positive and finite.
    """
    named_optimizer(optimizer, **options)
    return check_number("learning_rate", learning_rate, POSITIVE)


OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "sign", "muon")
