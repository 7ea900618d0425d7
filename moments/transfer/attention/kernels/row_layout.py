"""Which rows a layer has: their patterns and classes, reference statistics and mean attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .balance import self_overlap
from .logits import Logits
from .row_classes import RowClass, as_slice, find_patterns, group_patterns, window
from .row_statistics import RowStatistics, mean_attention, row_statistics

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class RowLayout(NamedTuple):
    """The rows of one layer.

    Attributes:
        statistics: of the patterns, then of the classes' own rows.
        pattern: (Lq,) the pattern of every row.
        group: (P,) the class of every pattern.
        classes: all classes.
        weights: (Lq, Lk) mean attention.
        norm: (Lq,) norm of a row's query over its pattern's.
    """

    statistics: RowStatistics
    pattern: Indices
    group: Indices
    classes: list[RowClass]
    weights: Array
    norm: Array

    @classmethod
    def of(cls, logits: Logits) -> RowLayout:
        """Sort the rows of a layer; patterns are numbered class by class."""
        temperature, kernel = logits.temperature, logits.within
        first, pattern = find_patterns(logits.prior, temperature, logits.biased)
        groups = group_patterns(logits.prior[first], _means(temperature, pattern), logits.biased)
        order = np.concatenate(groups)
        pattern = np.argsort(order)[pattern]
        patterns = logits.prior[first[order]]
        pattern_temperature = _means(temperature, pattern)
        ends = np.cumsum([len(group) for group in groups])
        spans = [
            slice(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)
        ]
        shared = [_shared(patterns[span], logits.biased) for span in spans]
        extended = np.vstack([patterns, *shared])
        means = [pattern_temperature[span].mean() for span in spans]
        statistics = row_statistics(
            kernel, extended, np.concatenate([pattern_temperature, means]), logits.scale
        )
        classes = [
            _make_class(span, len(patterns) + index, extended, statistics, kernel, logits.scale)
            for index, span in enumerate(spans)
        ]
        compact = np.zeros(patterns.shape)
        group = np.empty(len(patterns), dtype=np.intp)
        for index, one in enumerate(classes):
            compact[window(one.patterns, one.keys)] = one.weights
            group[one.patterns] = index
        norm = np.sqrt(temperature / pattern_temperature[pattern])
        return cls(statistics, pattern, group, classes, compact[pattern], norm)


def _shared(patterns: Array, biased: bool) -> Array:
    """The prior of a class's own row: over every key that its patterns attend to."""
    if biased:
        return np.asarray(patterns.mean(0))
    union = (patterns > 0.0).any(0)
    return np.asarray(union / union.sum())


def _make_class(
    span: slice, own: int, extended: Array, stats: RowStatistics, kernel: Array, scale: float
) -> RowClass:
    keys = as_slice(np.flatnonzero(extended[own]))
    members = np.append(np.arange(span.start, span.stop), own)
    inside = kernel[window(keys, keys)]
    prior = extended[members][:, keys]
    weights = mean_attention(inside, prior, stats, members, scale)
    response = np.zeros_like(inside)
    if len(inside) > 1:
        pull = stats.odds[own]
        tau = scale * stats.temperature[own] * stats.held[own]
        guess = np.exp(pull * tau * (inside - inside.max(1, keepdims=True))) * prior[-1]
        exponent = pull * tau / max(stats.strength[own], 1e-6) ** 2
        response = self_overlap(inside, weights[-1], guess, exponent)
    return RowClass(span, keys, own, weights[:-1], weights[-1], response)


def _means(values: Array, group: Indices) -> Array:
    return np.asarray(np.bincount(group, values) / np.bincount(group))
