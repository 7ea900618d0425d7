"""The theories against the simulated grid of `moments validate`, as a table of docs/accuracy.md.

python benchmarks/whole_models.py table    # predicts 72 models under three theories, a minute
"""

from __future__ import annotations

import tables

from moments.formulas.law import THEORIES
from moments.validation.errors import by_class, errors

CLASSES = (("pre", "full"), ("pre", "causal"), ("post", "full"), ("post", "causal"))


def table() -> None:
    """Mean error of log gradient variance by theory, placement and mask; the refined theory's
    forward errors and the simulation's standard error."""
    found = by_class(errors(), ("norm", "mask")).set_index(["norm", "mask", "theory"])

    def row(title: str, theory: str, measure: str) -> list[str]:
        return [title, *(f"{found.loc[(*c, theory), measure]:.2g}" for c in CLASSES)]

    lines = [row(f"`{theory}`", theory, "grad") for theory in THEORIES]
    lines.append(row("standard error of the simulation", "refined", "noise"))
    lines.append(row("`refined`, beyond two of these", "refined", "grad_beyond"))
    lines.append(row("`refined`, forward variance (relative)", "refined", "variance"))
    lines.append(row("`refined`, correlation", "refined", "correlation"))
    header = ("", "Pre-LN", "Pre-LN, causal", "Post-LN", "Post-LN, causal")
    tables.put("accuracy", "whole-models", tables.markdown(header, lines))


if __name__ == "__main__":
    table()
