"""What every analysis returns: a frozen record that shows itself as a table."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Result(abc.ABC):
    """Base of the results. `heading` is one line; `_rows` the table."""

    @property
    @abc.abstractmethod
    def heading(self) -> str:
        """One line that says what was found."""

    @abc.abstractmethod
    def _rows(self) -> list[Mapping[str, Any]]:
        """The table, row by row."""

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self._rows()])

    def __str__(self) -> str:
        shown = self.to_frame().to_string(index=False, float_format=lambda v: f"{v:.4g}")
        return f"{self.heading}\n\n{shown}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
