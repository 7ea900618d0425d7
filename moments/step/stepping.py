"""First steps of one prediction, at any number of learning rates and by any optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..formulas.checks import check_number
from ..formulas.symbols import POSITIVE
from ..prediction.gate import computing
from ..prediction.result import Prediction
from .first import Stepped, named_optimizer, still
from .result import FirstStep
from .sites import Reading


@dataclass(frozen=True, eq=False)
class Stepping:
    """What steps of different rates share: kernels' eigenvalues, attention, the loss at rate 0."""

    reading: Reading
    prediction: Prediction

    @classmethod
    def of(cls, prediction: Prediction) -> Stepping:
        """Raises:
        DomainError: as `Reading.of`.
        """
        return cls(Reading.of(prediction), prediction)

    def after(self, optimizer: str, learning_rate: float, **options: Any) -> FirstStep:
        """See `Prediction.after`."""
        chosen = named_optimizer(optimizer, **options)
        rate = check_number("learning_rate", learning_rate, POSITIVE)
        with computing("refined", [self.prediction.trace]):
            before = still(self.reading, chosen)
            moved = Stepped(self.reading, chosen, rate)
        return FirstStep.of(self.reading, chosen, rate, before, moved)
