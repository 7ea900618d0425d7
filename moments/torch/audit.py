"""A module's tensors, multipliers and structure against what a plan says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..show.findings import Report, ranked
from .advice import advise
from .anatomy import as_drawn
from .architecture import fitted
from .scales import FOLDED
from .tensors import Checked, Tensors
from .weight_findings import WeightFindings

_FOLDED = "the module was folded: its weights carry the plan's scales; audit it before folding"


def audit(
    module: nn.Module,
    plan: Any = None,
    *,
    batch: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a freshly initialised module with a plan.

    Compared are mean squares, by matrix and by role over all layers, with their sampling errors,
    means, norms' gains and biases; no layer may have another one's entries. The multipliers of its
    residual sums and norms are those of one recorded pass. A right module fails with probability
    1e-5, all checks together.

    Args:
        module: any that can be read. It is left as it was. Compiled and
            data-parallel modules are audited as what they hold.
        plan: a plan of `moments.solve`, a Transformer, or a scheme's name, which is then applied to
            the module's own architecture; None: what the module's config or class promises.
        batch: what to run the module on, as in `moments.torch.measure`; None: random input, where
            the module says what it takes.
        options: of the scheme, where the plan is a scheme's name.

    Returns:
        A report: `passed`, `unchecked`, `str(report)`, `to_frame()`.

    Raises:
        DomainError: a plan of another depth, width or number of heads, or none for a module that
            does not say how it is meant to be drawn.
        MomentsError: the module cannot be read.
    """
    of = fitted(module, plan, options, batch, strict=False)
    module, reading, model, described = of.module, of.reading, of.model, of.described
    read = Tensors.of(module, reading)
    checked = Checked.of(read, model)
    words = "the plan"
    if plan is None:
        words = "what its config or class promises"
    elif isinstance(plan, str):
        words = f"the scheme {plan!r}"
    weights = WeightFindings(read, model, advise(checked, model, described), words)
    weights.planned, weights.promised = plan is not None, described
    failed = [row for row in checked.rows if row.passed is False]
    found = list(weights.findings(failed))
    folded = bool(failed) and getattr(module, FOLDED, False)
    unknown = reading.roles.unidentified
    return Report(
        source=type(module).__name__,
        scheme=f"compared with {words}",
        findings=ranked([one for one in found if one.severity != "note"]),
        notes=(
            *((_FOLDED,) if folded else ()),
            *weights.notes,
            *("; ".join(one.lines()) for one in found if one.severity == "note"),
            *(f"not as planned: {phrase}" for phrase in checked.unlike),
        ),
        unchecked=(
            *checked.unchecked,
            *((f"of unknown role: {', '.join(unknown)}",) * bool(unknown)),
        ),
        rows=tuple(checked.rows),
        model=as_drawn(reading),
    )
