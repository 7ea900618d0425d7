"""`predict`: the moments of every layer of a declared model, without running it."""

from __future__ import annotations

import json
import warnings as _warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .architecture import declare, declare_embedding
from .checks import check_choice
from .errors import DomainError, ValidityWarning
from .inputs import check_moments, embedded_signal, given_signal
from .law import THEORIES, Theory
from .propagate import Point, Trace, forward, start
from .state import Gradient, Kernel, Signal
from .transformer import Transformer
from .validity import published_warnings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

POINT_COLUMNS = ("mean", "variance", "correlation", "grad_variance", "grad_correlation")


@dataclass(frozen=True, eq=False)
class Prediction:
    """Moments of the residual stream and of every site inside the network.

    Stream arrays have shape (..., N + 1): index 0 enters layer 1, index n leaves layer n. Leading
    axes are those of the moments given to `predict`.

    Attributes:
        model: the declaration.
        theory: "refined", "published" or "simplified".
        variance, correlation: of the signal; correlation between different tokens.
        grad_variance, grad_correlation: of dLoss/dx, means over draws of the weights.
        warnings: where a formula left its validity.
    """

    model: Transformer
    theory: Theory
    variance: np.ndarray
    correlation: np.ndarray
    grad_variance: np.ndarray
    grad_correlation: np.ndarray
    warnings: tuple[str, ...]
    trace: Trace = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row per point inside the network: layer, site and its moments.

        Where several configurations were predicted at once, a column `configuration` counts them.
        """
        import pandas as pd

        shape = self.variance.shape[:-1]
        frames = []
        for index in np.ndindex(shape):
            rows = [
                (point.layer, point.site, *(_at(v, shape, index) for v in point_moments(point)))
                for point in self.trace.points
            ]
            frame = pd.DataFrame(rows, columns=["layer", "site", *POINT_COLUMNS])
            if shape:
                frame.insert(0, "configuration", np.ravel_multi_index(index, shape))
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def weight_gradients(self) -> pd.DataFrame:
        """Expected squared gradient norm of every weight matrix: layer, weight, squared_norm.

        One sequence; under theories that state no query or key gradient those rows are absent.
        """
        import pandas as pd

        shape = self.variance.shape[:-1]
        if shape:
            raise DomainError("weight_gradients needs a single configuration, not a batch of them")
        rows = sorted(self.trace.weights, key=lambda row: row[0])
        return pd.DataFrame(
            [(layer, weight, float(norm)) for layer, weight, norm in rows],
            columns=["layer", "weight", "squared_norm"],
        )

    def table(self) -> str:
        """The stream, layer by layer, as text."""
        from .report import prediction_table, render

        return render(prediction_table(self))

    def plot(self) -> Figure:
        """Four panels: variance and correlation of signal and gradient along the depth."""
        from .plot import plot_prediction

        return plot_prediction(self)

    def to_json(self) -> str:
        """Model, stream moments and warnings as JSON."""
        data = {
            "model": self.model.to_dict(),
            "theory": self.theory,
            **{name: getattr(self, name).tolist() for name in POINT_COLUMNS[1:]},
            "warnings": list(self.warnings),
        }
        return json.dumps(data, indent=2, allow_nan=False)

    def __repr__(self) -> str:
        first, last = self.variance[..., 0], self.variance[..., -1]
        if self.variance.ndim > 1:
            return f"Prediction({self.variance.shape[:-1]} configurations, {self.theory})"
        growth, ratio = last / first, self.grad_variance[0] / self.grad_variance[-1]
        return (
            f"Prediction({self.model.layers} layers, {self.theory}: variance x {growth:.4g}, "
            f"correlation {self.correlation[0]:.3f} to {self.correlation[-1]:.3f}, "
            f"gradient variance x {ratio:.4g} down to the input)"
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(repr(self))}\n\n{escape(self.table())}</pre>"


def point_moments(point: Point) -> tuple[Any, ...]:
    """Token-averaged moments of one point, in the order of POINT_COLUMNS."""
    kernel = point.signal.kernel
    variance, covariance = kernel.mean_diagonal(), kernel.mean_pairs()
    mean = np.mean(point.signal.mean, axis=-1) if point.signal.resolved else point.signal.mean
    if point.gradient is None:
        return mean, variance, covariance / variance, np.nan, np.nan
    received = point.gradient.kernel
    grad_variance = received.mean_diagonal()
    return (
        mean,
        variance,
        covariance / variance,
        grad_variance,
        _ratio(received.mean_pairs(), grad_variance),
    )


def _ratio(numerator: Any, denominator: Any) -> Any:
    """A correlation; 0 where the gradient vanishes."""
    if np.ndim(denominator) == 0:
        return numerator / denominator if denominator else 0.0
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator != 0)


def _at(value: Any, shape: tuple[int, ...], index: tuple[int, ...]) -> float:
    return float(np.broadcast_to(value, shape)[index])


def predict(
    model: Transformer,
    *,
    variance: Any = None,
    correlation: Any = None,
    grad_variance: Any = None,
    grad_correlation: Any = None,
    theory: Theory = "published",
    token_ids: Any = None,
    segment_ids: Any = None,
) -> Prediction:
    """Predict every layer's moments at initialisation.

    Args:
        model: the declaration.
        variance, correlation: of the tensor that enters layer 1, scalars or arrays that broadcast;
            None: from the embedding where one is declared, else 1 and 0.
        grad_variance, grad_correlation: of the loss gradient at the last layer's output;
            None: 1 and 0.
        theory: "published" (the papers' full forms) or "simplified" (their Tables 1 and 2).
        token_ids: integers of shape (L,) or (B, L), the text whose repetitions correlate the
            tokens; None: Zipf's law.
        segment_ids: likewise for the segment table; None with token_ids: one segment.

    Raises:
        DomainError: a bad argument, a feature the theory does not cover, or numbers that overflow.
    """
    if not isinstance(model, Transformer):
        raise DomainError(f"model must be a moments.Transformer, not {type(model).__name__}")
    check_choice("theory", theory, THEORIES)
    trace = Trace()
    signal = _input(model, theory, variance, correlation, token_ids, segment_ids, trace)
    start(signal, trace)
    grad = check_moments(
        "grad_",
        1.0 if grad_variance is None else grad_variance,
        0.0 if grad_correlation is None else grad_correlation,
        model.seq_len,
    )
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            _, backward = forward(declare(model, theory), signal, trace)
            gradient = Gradient(Kernel(grad[0], grad[0] * grad[1]), model.seq_len)
            trace.stream()[0].gradient = backward(gradient)
    except (OverflowError, ZeroDivisionError):
        raise _overflow(theory, trace) from None
    columns = np.array(
        [np.broadcast_arrays(*point_moments(point)[1:]) for point in trace.stream()], dtype=float
    )
    if not np.all(np.isfinite(columns)):
        raise _overflow(theory, trace)
    stream = np.moveaxis(columns, 0, -1)
    notes = published_warnings(model, theory, trace)
    for note in notes:
        _warnings.warn(note, ValidityWarning, stacklevel=2)
    return Prediction(model, theory, *stream, notes, trace)


def _input(
    model: Transformer,
    theory: Theory,
    variance: Any,
    correlation: Any,
    token_ids: Any,
    segment_ids: Any,
    trace: Trace,
) -> Signal:
    given = variance is not None or correlation is not None
    if token_ids is not None and (given or model.embedding is None):
        raise DomainError(
            "token_ids describe the text an embedding reads: declare model.embedding and leave "
            "variance and correlation out"
        )
    if given or model.embedding is None:
        v, r = check_moments(
            "",
            1.0 if variance is None else variance,
            0.0 if correlation is None else correlation,
            model.seq_len,
        )
        return given_signal(v, r, model.seq_len, model.d_model)
    tables = embedded_signal(
        model.embedding, model.seq_len, model.d_model, theory, token_ids, segment_ids
    )
    rest = declare_embedding(model.embedding, model.d_model, theory)
    return forward(rest, tables, trace)[0]


def _overflow(theory: Theory, trace: Trace) -> DomainError:
    point = trace.points[-1]
    return DomainError(
        f"the numbers overflow in layer {point.layer} at {point.site} under theory {theory!r}: "
        "reduce the query and key variances, the depth or the scales"
    )
