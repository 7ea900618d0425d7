"""`Prediction.after`: the network after one step of an optimizer, without running it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .change import Array, Change
from .ends import Words, ending, entered, tied_overlap
from .rules import Optimizer
from .sites import Reading, Site
from .walk import SiteStep, Walk, WeightStep

class Stepped:
    """One step at one learning rate.

    Attributes:
        sites: every site before and after.
        weights: every parameter's step.
        end: the logits and the loss.
    """

    def __init__(self, reading: Reading, optimizer: Optimizer, rate: float) -> None:
        words = Words.of(reading)
        tied = tied_overlap(reading, words)
        walk = Walk(optimizer, rate, tied, reading.spectra, reading.rows)
        at_tables = _at_tables(reading)
        first = entered(reading, words, optimizer, rate, at_tables, tied)
        points = iter(reading.points)
        site = Site(-1, 0, "tables", None, reading.before, at_tables, float(reading.model.d_model))
        change: Change = first.change
        change, site = walk.through(reading.embedding, change, site, points)
        change, site = walk._noted(change, next(points))
        change, site = walk.through(reading.layers, change, site, points)
        last, at_last = change, site
        change, site = walk.through(reading.head, change, site, points)
        kept = np.sqrt(np.diag(at_last.kernel) / np.diag(last.new(at_last.kernel)))
        end = ending(
            reading, words, optimizer, rate, change, site.gradient, at_tables, tied, kept
        )
        for name, step, found in first.effects:
            walk._entry(0, name, step, found, np.nan, 1.0)
        for name, step, found in end.effects:
            walk._entry(reading.model.layers + 1, name, step, found, np.nan, 1.0)
        self.sites, self.weights, self.end = walk.sites, walk.weights, end


def _at_tables(reading: Reading) -> Array:
    """E delta delta at the sum of the tables, behind the embedding's dropout and norm."""
    from ..normalization import FiniteNormalization
    from ..parts import Dropout

    sites = reading.points
    parts = reading.embedding.parts
    gradient = sites[len(parts) - 1].gradient
    for k in reversed(range(len(parts))):
        part = parts[k]
        gradient = sites[k].gradient
        if isinstance(part, Dropout):
            kept = 1 - float(part.parameters["drop_prob"])
            gradient = gradient * (1 + np.eye(len(gradient)) * (1 / kept - 1))
        elif isinstance(part, FiniteNormalization):
            s = np.sqrt(np.diag(reading.before) + float(part.epsilon)) / float(part.gain)
            lost = 1 - (1 + float(part.centres)) / sites[k].width
            gradient = gradient * lost / np.outer(s, s)
    return np.asarray(gradient)
