"""What every analysis returns and begins with: a table, and a prediction."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moments.errors import DomainError, without_warnings
from moments.files import Shown, as_frame
from moments.formulas.law import Theory
from moments.model.transformer import Transformer
from moments.prediction.predict import predict
from moments.prediction.resolution import positional
from moments.prediction.result import Prediction

if TYPE_CHECKING:
    import pandas as pd


class Result(Shown, abc.ABC):
    """Base of the results. `heading` is one line; the table is `rows`, or what `_table` makes."""

    rows: tuple[Mapping[str, Any], ...]

    @property
    @abc.abstractmethod
    def heading(self) -> str:
        """One line that says what was found."""

    def _table(self) -> Any:
        """Rows, or columns by name."""
        return self.rows

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        return as_frame(self._table())

    def __str__(self) -> str:
        shown = self.to_frame().to_string(index=False, float_format=lambda v: f"{v:.4g}")
        return f"{self.heading}\n\n{shown}"


def predict_alike(model: Transformer, theory: Theory, **moments: Any) -> Prediction:
    """`predict` with tokens=False; warnings stay in `.warnings`.

    Raises:
        DomainError: attention that tells tokens apart by position, under the refined theory.
    """
    if theory == "refined" and positional(model):
        raise DomainError(
            "this analysis treats tokens alike, which a causal mask, a window or positions in "
            "attention exclude: pass model.replace(causal=False) and the like, or "
            'theory="published"'
        )
    return expected(model, theory=theory, tokens=False, **moments)


def expected(model: Transformer, **arguments: Any) -> Prediction:
    """A prediction whose validity notes stay in its `warnings` and go into the result."""
    with without_warnings():
        return predict(model, **arguments)
