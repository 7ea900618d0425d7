"""The last look at numbers before a user holds them.

Variances are finite and not negative, correlations within what so many tokens can have. What lies
beyond by rounding is cut off; what lies further beyond is cut off with a note where the rest can
stand without it, and refused where not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ..engine.state import Array
from ..engine.trace import Point, Run, Trace
from ..errors import DomainError
from ..formulas.law import Theory
from ..model.transformer import Transformer
from .threads import few_threads

ROUNDING = 1e-9
"""Share of the largest entry that sums of so many terms may be off by."""


class Gate:
    """What one prediction may say.

    Args:
        theory: whose numbers they are.
        notes: where its formulas left their validity, which explains what is impossible.
        tokens: the fewest real tokens of a sequence.
    """

    def __init__(self, theory: Theory, notes: Sequence[str], tokens: int) -> None:
        self.theory, self.before, self.least = theory, tuple(notes), -1.0 / max(tokens - 1, 1)
        self.notes: list[str] = []

    def finite(self, what: str, values: Array) -> Array:
        """Numbers, all of them finite.

        Raises:
            DomainError: NaN or infinity.
        """
        if not np.all(np.isfinite(values)):
            raise self._refused(f"{what} is not a finite number")
        return values

    def variance(self, what: str, values: Array) -> Array:
        """Mean squares, not negative.

        Raises:
            DomainError: a negative one, NaN or infinity.
        """
        self.finite(what, values)
        least = np.min(values)
        if least >= 0:
            return values
        if least < -ROUNDING * np.max(np.abs(values)):
            raise self._refused(f"{what} is {least:.3g}, and no mean square is negative")
        return np.maximum(values, 0.0)

    def parts(self, what: str, values: Array, rounding: float = ROUNDING) -> Array:
        """Mean squares of parts (tokens, matrices): 0 for negative ones, noted.

        Args:
            what: is said of them.
            values: of any shape.
            rounding: share of the largest that goes without a note.

        Raises:
            DomainError: NaN or infinity.
        """
        self.finite(what, values)
        least = np.min(values, initial=0.0)
        if least >= 0:
            return values
        most = np.max(np.abs(values))
        if least < -rounding * most:
            self.notes.append(
                f"{what}: down to {least:.3g} by cancellation, 0 stands in (the largest is "
                f"{most:.3g}); what is small beside that is not resolved"
            )
        return np.maximum(values, 0.0)

    def correlation(self, what: str, values: Array) -> Array:
        """Correlations that so many tokens can have with each other, -1/(tokens - 1) to 1.

        Raises:
            DomainError: NaN or infinity.
        """
        self.finite(what, values)
        inside = np.clip(values, self.least, 1.0)
        off = np.abs(values - inside)
        if np.max(off) > 1e-6:  # visible in print
            worst = np.ravel(values)[np.argmax(off)]
            self.notes.append(
                f"{what}: {worst:.3g} is impossible, and the nearest that these tokens can have "
                f"({np.clip(worst, self.least, 1.0):.3g}) stands in; numbers beside it are as "
                f"uncertain{self._because()}"
            )
        return inside

    def sites(self, points: Sequence[Point]) -> None:
        """Refuse a signal or gradient inside the network whose mean square is impossible."""
        kernels = [at.signal.kernel for at in points]
        kernels += [at.gradient.kernel for at in points if at.gradient is not None]
        every = np.concatenate([np.ravel(kernel.diagonal) for kernel in kernels])
        if np.all(np.isfinite(every)) and np.all(every >= 0):
            return
        for at in points:
            where = f"in layer {at.layer} at {at.site}"
            self.variance(f"the variance {where}", at.signal.kernel.mean_diagonal())
            if at.gradient is not None:
                self.variance(f"the gradient variance {where}", at.gradient.kernel.mean_diagonal())

    def _refused(self, message: str) -> DomainError:
        if self.theory != "refined":
            return DomainError(
                f"theory {self.theory!r} leaves its domain here: {message}; use theory='refined', "
                "or correlations of at least 0"
            )
        remedy = "reduce the variances of the weights or the depth, or widen the layers"
        return DomainError(f"{message}{self._because()}: {remedy}")

    def _because(self) -> str:
        return f" ({'; '.join(self.before[:2])})" if self.before else ""


_SAID = {
    *(f.name for f in dataclasses.fields(Transformer)),
    *("grad_variance", "grad_correlation", "grad_kernel", "token_ids", "segment_ids", "targets"),
    *("attention_mask", "document_ids", "pixels", "batch", "encoder_inputs"),
    *("query", "key", "value"),  # weights of zeros where what they make is normalised
}
"""What a user says of a prediction; a DomainError about any other value is the formulas' own."""


@contextlib.contextmanager
def computing(theory: Theory, traces: Sequence[Run | Trace], rows: int = 1) -> Iterator[None]:
    """Turn what breaks inside formulas into one error that says where and why.

    Args:
        theory: of the prediction.
        traces: of the stacks, or their passes under way, in that order.
        rows: of the matrices that are worked on: where they are small, by one BLAS thread.

    Raises:
        DomainError: numbers that overflow, or a division by a variance of zero.
    """
    try:
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")
        with few_threads(rows), quiet:
            yield
    except (ArithmeticError, IndexError):
        raise breakdown(theory, traces) from None
    except DomainError as error:
        if error.argument is None or error.argument in _SAID:
            raise
        raise breakdown(theory, traces) from None


def breakdown(theory: Theory, traces: Sequence[Run | Trace]) -> DomainError:
    """Where the numbers first left what can be computed."""
    points = [point for trace in traces for point in trace.points]
    if not points:
        return DomainError("the moments of what enters layer 1 overflow: use smaller variances")
    behind = "at"
    lost = [p for p in points if not np.all(np.isfinite(p.signal.kernel.pairs))]
    sent = [p for p in points[::-1] if p.gradient is not None]
    lost += [p for p in sent if p.gradient and not np.all(np.isfinite(p.gradient.kernel.pairs))]
    empty = [p for p in points if np.any(np.asarray(p.signal.kernel.diagonal) == 0)]
    if not lost:
        behind, lost = "behind", points[-1:]
    at = lost[0]
    if empty and points.index(empty[0]) <= points.index(at):
        at = empty[0]
        return DomainError(
            f"the variance is 0 in layer {at.layer} at {at.site}, and theory {theory!r} divides by "
            "it: give the weights before it a positive variance"
        )
    other = "" if theory == "refined" else ", or use theory='refined', which is bounded there"
    return DomainError(
        f"the numbers overflow in layer {at.layer} {behind} {at.site} under theory {theory!r}: "
        f"reduce the variances of the queries, keys and inputs, the depth or the scales{other}"
    )
