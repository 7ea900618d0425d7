"""Checks of a prediction's numbers, and warnings where formulas leave their domain of validity.

Variances must be finite and nonnegative, correlations possible for the number of tokens. Rounding
errors are clipped. Larger violations are clipped with a note if other numbers do not depend on
them, else they raise an error. Small matrices are computed on one BLAS thread, if threadpoolctl
(the extra "threads") is installed: several threads would mostly wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..engine.state import Array, ratio_or_zero
from ..engine.trace import Point, Run, Trace
from ..errors import DomainError
from ..formulas.law import Theory
from ..model.transformer import Transformer

ROUNDING = 1e-9
"""Rounding error of a sum, relative to the largest entry."""


class Gate:
    """Checks the numbers of one prediction and collects `notes`. Error messages quote earlier ones
    as a possible cause; `tokens` is the least number of real tokens of a sequence."""

    def __init__(self, theory: Theory, notes: Sequence[str], tokens: int) -> None:
        self.theory, self.before, self.least = theory, tuple(notes), -1.0 / max(tokens - 1, 1)
        self.notes: list[str] = []

    def finite(self, what: str, values: Array) -> Array:
        """The values; DomainError if one is NaN or infinite."""
        if not np.all(np.isfinite(values)):
            raise self._refused(f"{what} is not a finite number")
        return values

    def variance(self, what: str, values: Array) -> Array:
        """The mean squares; DomainError if one is negative, NaN or infinite."""
        self.finite(what, values)
        least = np.min(values)
        if least >= 0:
            return values
        if least < -ROUNDING * np.max(np.abs(values)):
            raise self._refused(f"{what} is {least:.3g}, and no mean square is negative")
        return np.maximum(values, 0.0)

    def parts(
        self,
        what: str,
        values: Array,
        rounding: float = ROUNDING,
        places: Sequence[str] | None = None,
    ) -> Array:
        """Mean squares of tokens or matrices, clipped at 0, with a note beyond `rounding` times
        the largest. `places` are names along the last axis; None: (..., layers, tokens)."""
        self.finite(what, values)
        least = np.min(values, initial=0.0)
        if least >= 0:
            return values
        most = np.max(np.abs(values))
        if least < -rounding * most:
            count = int(np.sum(values < -rounding * most))
            several = f" (and {count - 1} more)" if count > 1 else ""
            where = _place(values, int(np.argmin(values)), places)
            self.notes.append(
                f"{what}, {where}{several}: down to {least:.3g} by cancellation, 0 stands in (the "
                f"largest is {most:.3g}); what is small compared with that is not resolved"
            )
        return np.maximum(values, 0.0)

    def correlation(self, what: str, values: Array, places: Sequence[str] | None = None) -> Array:
        """Correlations clipped to the possible range, -1/(tokens - 1) to 1; larger changes are
        noted. `places` are names along the last axis; None: the stream's layers."""
        self.finite(what, values)
        clipped = np.clip(values, self.least, 1.0)
        change = np.abs(values - clipped)
        if np.max(change, initial=0.0) > 1e-6:  # visible in print
            index = int(np.argmax(change))
            worst = np.ravel(values)[index]
            where = f"{what}, {_place(values[..., None], index, None)}"
            if places is not None:
                where = f"{what}, {_place(values, index, places)}"
            self.notes.append(
                f"{where}: {worst:.3g} is impossible, and the nearest that these tokens can have "
                f"({np.clip(worst, self.least, 1.0):.3g}) stands in; numbers of that place are as "
                f"uncertain{self._because()}"
            )
        return clipped

    def sites(self, points: Sequence[Point]) -> None:
        """Raise a DomainError if the variance of a signal or gradient at any site is impossible."""
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


def _place(values: Array, flat: int, places: Sequence[str] | None) -> str:
    """Name the position of an entry: by `places`, or by layer and token."""
    index = np.unravel_index(flat, np.shape(values))
    if places is not None:
        return places[int(index[-1])]
    token = f", token {index[-1] + 1}" if np.shape(values)[-1] > 1 else ""
    return f"behind layer {index[-2]}{token}" if index[-2] else f"what enters layer 1{token}"


_SAID = {
    *(f.name for f in dataclasses.fields(Transformer)),
    *("grad_variance", "grad_correlation", "grad_kernel", "token_ids", "segment_ids", "targets"),
    *("attention_mask", "document_ids", "pixels", "batch", "encoder_inputs"),
    *("query", "key", "value"),  # zero weights whose product is normalised
}
"""Arguments of a user; a DomainError about any other value is an internal one of the formulas."""


@contextlib.contextmanager
def computing(theory: Theory, traces: Sequence[Run | Trace], rows: int = 1) -> Iterator[None]:
    """Turn numerical errors inside the context into one DomainError that says where they occurred,
    from the stacks' `traces`, in order; `rows` of the matrices are for `few_threads`."""
    try:
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")
        with few_threads(rows), quiet:
            yield
    except (OverflowError, ZeroDivisionError, FloatingPointError):
        raise breakdown(theory, traces) from None
    except DomainError as error:
        if error.argument is None or error.argument in _SAID:
            raise
        raise breakdown(theory, traces) from None


def breakdown(theory: Theory, traces: Sequence[Run | Trace]) -> DomainError:
    """A DomainError that names the first site whose numbers overflow, or are 0."""
    points = [point for trace in traces for point in trace.points]
    if not points:
        return DomainError("the moments of what enters layer 1 overflow: use smaller variances")
    behind = "at"
    lost = [p for p in points if not np.all(np.isfinite(p.signal.kernel.off_diagonal))]
    grad_in = [p for p in points[::-1] if p.gradient is not None]
    lost += [
        p for p in grad_in if p.gradient and not np.all(np.isfinite(p.gradient.kernel.off_diagonal))
    ]
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


# --- validity warnings ----------------------------------------------------------------------------

SIZE_SPREAD_NOTED = 0.2
"""Relative variance of the last stream's squared norms from which a note is issued."""


def validity_warnings(model: Transformer, theory: Theory, trace: Trace) -> tuple[str, ...]:
    """Warnings on formulas outside their domain, with layer and size of the error if known."""
    if theory == "refined":
        of_stack = _unnormalised(model, trace) + _of_sizes(model, trace)
        of_stack += _behind_gates(model, trace) + _behind_tanh(model, trace)
        return _collected(trace) + of_stack
    notes = []
    if model.causal:
        notes.append(
            f"theory {theory!r} ignores the causal mask, as the papers do: forward correlations "
            "shift, and the gradient at the first tokens is off by an order of magnitude or more"
        )
    if model.activation == "gelu_tanh":
        notes.append(
            "the papers' GeLU is the erf form; the tanh form's moments differ by less than 3e-4 "
            "for variances up to 4"
        )
    if model.norm_epsilon and model.norm != "none":
        inputs = [p.signal.kernel.mean_diagonal() for p in trace.points if p.site != "embedding"]
        least = min(float(v.min()) if hasattr(v, "min") else float(v) for v in inputs)
        if model.norm_epsilon > 1e-3 * least:
            share = f"{100 * model.norm_epsilon / least:.2g} % of" if least else "added to"
            notes.append(
                f"theory {theory!r} has no norm_epsilon: here it is {share} the least variance, "
                f"{least:.2g}, in the network"
            )
    return tuple(notes)


LOOSE = 0.4
"""Logit variance times relative variance of tokens' norms, up to which no errors were measured."""


def _unnormalised(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """Note on logits of tokens whose norms vary much over draws."""
    if model.norm != "none" or model.qk_norm is not None:
        return ()
    stream = trace.stream()
    worst = 0.0
    for point in trace.points:
        entering = stream[point.layer - 1].signal
        if not point.signal.diagnostics or entering.fluctuation is None:
            continue
        square = entering.second_moment().diagonal ** 2
        relative = np.max(ratio_or_zero(entering.fluctuation.norms.diagonal, square))
        worst = max(worst, float(np.max(point.signal.diagnostics["logit_variance"]) * relative))
    if worst <= LOOSE:
        return ()
    return (
        f"attention logits' variance changes by {worst:.2g} from draw to draw with the norms of "
        "the tokens, which nothing normalises: gradients may be several times larger than "
        "predicted (under a causal mask 1.5 times at 1.2 and 2.8 times at 2.7 were simulated), and "
        "the band of one draw too wide (2.5 times in its logarithm at .49)",
    )


def _collected(trace: Trace) -> tuple[str, ...]:
    """Notes of all sites, one line for all layers with the same note."""
    layers: dict[tuple[str, str], list[int]] = {}
    for layer, site, note in trace.notes():
        layers.setdefault((site, note), []).append(layer)
    return tuple(
        f"{_layer_range(numbers)}, {site}: {note}" for (site, note), numbers in layers.items()
    )


def _of_sizes(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """Note on streams without normalisation, where query and key gradients depend on products of
    realised norms."""
    if model.norm != "none" or (last := trace.stream()[-1].signal).fluctuation is None:
        return ()
    size = np.asarray(last.second_moment().mean_diagonal())
    with np.errstate(all="ignore"):
        largest = float(np.max(last.fluctuation.norms.mean_off_diagonal() / size / size))
    if not SIZE_SPREAD_NOTED <= largest < np.inf:
        return ()
    return (
        "without normalisation all tokens' squared norms vary together over draws, by "
        f"{largest:.2g} of their squared mean: squared gradients of query and key weights in the "
        "upper layers are low by up to a quarter",
    )


GATED_SPREAD = 0.04
"""Relative variance of squared norms behind gated units from which a note is issued."""


def _behind_gates(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """Note on gated units without normalisation, where larger tokens grow faster. The relative
    variance of squared norms, 2/d_model at the input, is multiplied by the square of the stack's
    elasticity, the growth of the gradient over that of the signal."""
    stream = trace.stream()
    ends = [point.gradient for point in (stream[0], stream[-1])]
    if model.norm != "none" or not model.gated or ends[0] is None or ends[1] is None:
        return ()
    grad_in = ratio_or_zero(ends[0].kernel.mean_diagonal(), ends[1].kernel.mean_diagonal())
    sizes = [np.asarray(stream[end].signal.second_moment().mean_diagonal()) for end in (0, -1)]
    elastic = grad_in * ratio_or_zero(*sizes)
    spread = float(np.max(elastic**2)) * 2.0 / model.d_model
    if not GATED_SPREAD < spread < np.inf:
        return ()
    return (
        f"gated units without normalisation: the squared norms of tokens vary from draw to draw by "
        f"about {spread:.2g} of their squared mean, and what grows with them was simulated larger: "
        "at .06 to .12 the variance by 1 to 7 %, gradients by 5 to 25 %, those of queries and keys "
        "by 8 to 60 %; at .3 by 40 to 70 % and 2.5 to 6 times",
    )


SATURATED = 0.1
"""Mean square of DyT's output without gain, from which a note on its non-Gaussian entries is
issued."""


def _behind_tanh(model: Transformer, trace: Trace) -> tuple[str, ...]:
    """Note on Post-LN with DyT, whose stream is the bounded output of a tanh."""
    if model.normalization != "dyt" or (model.norm != "post" and not model.post_layers):
        return ()
    sizes = [np.max(point.signal.kernel.mean_diagonal()) for point in trace.stream()[1:]]
    largest = float(np.max(sizes) / np.min(model.norm_gains) ** 2)
    if not largest > SATURATED:
        return ()
    return (
        f"DyT behind DyT, which leaves a mean square of {largest:.2g} of at most 1: its laws read "
        "bounded entries for Gaussian ones, and the variance was simulated 4 to 12 % larger behind "
        "one layer and 8 to 20 % behind four (dyt_alpha .7 to 1.5), correlations .01 to .02 and "
        ".02 to .2 lower, gradients 4 to 15 % and 1.1 to 3 times larger",
    )


def _layer_range(numbers: list[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"layer {first}" if first == last else f"layers {first} to {last}"


# --- threads --------------------------------------------------------------------------------------

SMALL = 512
"""Most rows of matrices that are computed on one thread: a product of twice as many rows takes some
ten milliseconds, which several threads share well."""


@contextlib.contextmanager
def few_threads(rows: int) -> Iterator[None]:
    """Use one BLAS thread inside the context, for matrices of few rows. In the main thread only:
    OpenBLAS did not respect a limit set from another thread."""
    main = threading.current_thread() is threading.main_thread()
    limit = 1 < rows <= SMALL and main
    controller = _controller("scipy.linalg" in sys.modules) if limit else None
    if controller is None:
        yield
        return
    with controller.limit(limits=1, user_api="blas"):
        yield


@functools.cache
def _controller(_also_scipy: bool) -> Any:
    """A controller of the BLAS libraries loaded so far (cached per argument, as scipy loads its own
    later); None without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()
