"""One reported case: settings, claim, prediction."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ValidityWarning
from ...formulas.law import Source
from ...model.transformer import Transformer
from ...prediction.predict import predict
from ...prediction.result import Prediction
from .results import Result


@dataclass(frozen=True)
class Case(Result):
    """What a paper reports, and what is predicted for it.

    Attributes:
        name, source, claim: which statement.
        settings: as the paper gives them; `assumed` holds what it leaves open.
        predicted, claimed: numbers by quantity; a claim in words has none.
        verdict: how the two compare, in words.
        series: columns for a plot, by name.
        notes: where the prediction left its validity.
    """

    name: str
    source: Source
    claim: str
    settings: Mapping[str, Any]
    assumed: Mapping[str, Any]
    predicted: Mapping[str, float]
    verdict: str
    claimed: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        lines = [f"{self.name} ({self.source}): {self.claim}. {self.verdict}", *self.notes]
        return "\n".join(lines)

    def _rows(self) -> list[Mapping[str, Any]]:
        return [
            {"quantity": name, "predicted": value, "claimed": self.claimed.get(name)}
            for name, value in self.predicted.items()
        ]


def expected(model: Transformer, **moments: Any) -> Prediction:
    """A prediction whose validity notes go into the case instead of a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return predict(model, **moments)


def limits(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Where predictions left their validity: how many notes there are, and the first."""
    notes = list(dict.fromkeys(note for p in predictions for note in p.warnings))
    if len(notes) < 2:
        return tuple(notes)
    return (f"{notes[0]}; and {len(notes) - 1} such notes more",)
