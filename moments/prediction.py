"""`predict`: the moments of every layer of a declared model, without running it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import warnings as _warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .architecture import declare, declare_embedding
from .attention import Padding
from .checks import check_choice, check_count
from .errors import DomainError, ValidityWarning
from .inputs import check_mask, first_kernel, gaussian, last_kernel
from .law import THEORIES, Theory
from .propagate import Point, Trace, forward, start
from .state import Gradient, Kernel, ratio_or_zero
from .transformer import Transformer
from .validity import validity_warnings

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
        token_variance, token_grad_variance: by token, (..., N + 1, L) where resolved, else None.
        warnings: where a formula left its validity.
    """

    model: Transformer
    theory: Theory
    variance: np.ndarray
    correlation: np.ndarray
    grad_variance: np.ndarray
    grad_correlation: np.ndarray
    token_variance: np.ndarray | None
    token_grad_variance: np.ndarray | None
    warnings: tuple[str, ...]
    trace: Trace = field(repr=False)
    sequences: bool = field(default=False, repr=False)
    batch: int = field(default=1, repr=False)
    real: np.ndarray | None = field(default=None, repr=False)

    @property
    def grad_variance_typical(self) -> np.ndarray:
        """What one draw of the weights looks like, (..., N + 1): the geometric mean over draws.

        Raises:
            DomainError: the theory is not "refined".
        """
        return self._spread_of_draws[0]

    @property
    def grad_variance_band(self) -> np.ndarray:
        """Where one draw of the weights falls 95 % of the time, (2, ..., N + 1).

        It is that of `batch` sequences which share the weights. Resolved by token it is borrowed
        from tokens alike with the same average moments: under a causal mask it holds in Post-LN and
        at both ends of Pre-LN, in whose middle layers it is up to 1.7 times too narrow.

        Raises:
            DomainError: the theory is not "refined".
        """
        return self._spread_of_draws[1]

    @functools.cached_property
    def _spread_of_draws(self) -> tuple[np.ndarray, np.ndarray]:
        from .band import band, log_variance

        if self.theory != "refined":
            raise DomainError(
                f"theory {self.theory!r} gives means over draws only; "
                'use theory="refined" for what one draw does'
            )
        spread = log_variance(declare(self.model, self.theory), self.trace, self.batch)
        if self.sequences:
            spread = spread.mean(0)
        return band(self.grad_variance, spread)

    def to_frame(self) -> pd.DataFrame:
        """One row per point inside the network: layer, site and its moments.

        Where several configurations were predicted at once, a column `configuration` counts them.
        """
        import pandas as pd

        shape = self.variance.shape[:-1]
        frames = []
        for index in np.ndindex(shape):
            rows = [
                (point.layer, point.site, *(_at(v, shape, index) for v in self._moments(point)))
                for point in self.trace.points
            ]
            frame = pd.DataFrame(rows, columns=["layer", "site", *POINT_COLUMNS])
            if shape:
                frame.insert(0, "configuration", np.ravel_multi_index(index, shape))
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def _moments(self, point: Point) -> tuple[Any, ...]:
        return point_moments(point, self.sequences, self.real)

    def weight_gradients(self) -> pd.DataFrame:
        """Expected squared gradient norm of every weight matrix: layer, weight, squared_norm.

        For one sequence, or the sum over those of `token_ids`, each as if alone in its batch: what
        sequences share through a common text is left out. Theories that state no query or key
        gradient have no such rows.
        """
        import pandas as pd

        shape = self.variance.shape[:-1]
        if shape:
            raise DomainError("weight_gradients needs a single configuration, not a batch of them")
        return pd.DataFrame(
            [(layer, weight, float(np.sum(n))) for layer, weight, n in self.trace.weights()],
            columns=["layer", "weight", "squared_norm"],
        )

    def attention(self) -> pd.DataFrame:
        """What attention does in every layer, averaged over rows (refined theory).

        Columns: layer, logit_variance (within a row), square_sum (E sum_j a_ij^2),
        distance_to_uniform (E sum_j (a_ij - 1/n)^2 over a row's n keys) and entropy (nats).
        """
        import pandas as pd

        rows = [
            {"layer": point.layer, **{k: float(np.mean(v)) for k, v in point.signal.facts.items()}}
            for point in self.trace.points
            if point.signal.facts is not None
        ]
        columns = ["layer", "logit_variance", "square_sum", "distance_to_uniform", "entropy"]
        return pd.DataFrame(rows, columns=columns)

    def table(self) -> str:
        """The stream, layer by layer, as text."""
        from .report import prediction_table, render

        return render(prediction_table(self))

    def plot(self) -> Figure:
        """Four panels: variance and correlation of signal and gradient along the depth."""
        from .plot import plot_prediction

        return plot_prediction(self)

    def to_json(self) -> str:
        """Model, stream moments, the band of one draw (refined theory) and warnings as JSON."""
        quantities = list(POINT_COLUMNS[1:])
        if self.theory == "refined":
            quantities += ["grad_variance_typical", "grad_variance_band"]
        data = {
            "model": self.model.to_dict(),
            "theory": self.theory,
            **{name: getattr(self, name).tolist() for name in quantities},
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


def point_moments(point: Point, sequences: bool = False, real: Any = None) -> tuple[Any, ...]:
    """Token-averaged moments of one point, in the order of POINT_COLUMNS.

    With `sequences`, the first axis counts sequences of one batch and is averaged over. `real`
    tells the tokens that count, (..., L).
    """

    def average(value: Any) -> Any:
        return np.mean(value, axis=0) if sequences else value

    kernel = point.signal.kernel
    variance, covariance = average(kernel.mean_diagonal(real)), average(kernel.mean_pairs(real))
    mean: Any = point.signal.mean
    if kernel.resolved:
        mean = average(Kernel(mean + 0.0 * kernel.diagonal, 0.0, True).mean_diagonal(real))
    if point.gradient is None:
        return mean, variance, covariance / variance, np.nan, np.nan
    received = point.gradient.kernel
    grad_variance = average(received.mean_diagonal(real))
    grad_correlation = ratio_or_zero(average(received.mean_pairs(real)), grad_variance)
    return mean, variance, covariance / variance, grad_variance, grad_correlation


def _at(value: Any, shape: tuple[int, ...], index: tuple[int, ...]) -> float:
    return float(np.broadcast_to(value, shape)[index])


def predict(
    model: Transformer,
    *,
    variance: Any = None,
    correlation: Any = None,
    grad_variance: Any = None,
    grad_correlation: Any = None,
    theory: Theory = "refined",
    tokens: bool | None = None,
    token_ids: Any = None,
    segment_ids: Any = None,
    kernel: Any = None,
    grad_kernel: Any = None,
    attention_mask: Any = None,
    batch: int = 1,
    progress: bool = False,
) -> Prediction:
    """Predict every layer's moments at initialisation.

    Args:
        model: the declaration.
        variance, correlation: of the tensor that enters layer 1, scalars or arrays that broadcast;
            None: from the embedding where one is declared, else 1 and 0.
        grad_variance, grad_correlation: of the loss gradient at the last layer's output;
            None: 1 and 0.
        theory: "refined", "published" (the papers' full forms) or "simplified" (their Tables 1
            and 2).
        tokens: whether moments are resolved by token; None: where the model is causal, or a text
            or a kernel is given, under the refined theory.
        token_ids: integers of shape (L,) or (B, L), the text whose repetitions correlate the
            tokens; None: Zipf's law.
        segment_ids: likewise for the segment table; None with token_ids: one segment.
        kernel: second moments E[x_i x_j] per feature of the tensor that enters layer 1, shape
            (..., L, L), instead of variance and correlation.
        grad_kernel: likewise for the gradient at the last layer's output; (..., L, L).
        attention_mask: shape (L,) or (B, L), 1 for a real token and 0 for padding, which no token
            attends to and which neither averages nor the loss count; None: all are real.
        batch: sequences that share the weights; the more, the narrower `grad_variance_band`.
        progress: whether to show a bar on standard error, layer by layer.

    Raises:
        DomainError: a bad argument, a feature the theory does not cover, or numbers that overflow.

    Warns:
        ValidityWarning: where a formula leaves the regime it was validated in; also in `warnings`.
    """
    if not isinstance(model, Transformer):
        raise DomainError(f"model must be a moments.Transformer, not {type(model).__name__}")
    check_choice("theory", theory, THEORIES)
    check_count("batch", batch)
    given = (token_ids, kernel, grad_kernel, attention_mask)
    texts = any(value is not None for value in given)
    resolved = (theory == "refined" and (model.causal or texts)) if tokens is None else tokens
    _check_resolution(model, theory, resolved, texts and token_ids is None)
    real = None if attention_mask is None else check_mask(attention_mask, model.seq_len, token_ids)
    trace = Trace()
    first = first_kernel(
        model, theory, resolved, variance, correlation, token_ids, segment_ids, kernel
    )
    last = last_kernel(model, resolved, grad_variance, grad_correlation, grad_kernel)
    sequences = token_ids is not None and resolved
    if sequences and np.ndim(last.diagonal) < np.ndim(first.diagonal):
        # Every sequence receives the same gradient moments.
        last = Kernel.of_matrix(np.broadcast_to(last.pairs, first.pairs.shape))
    if real is not None:
        last = Kernel.of_matrix(last.pairs * real[..., :, None] * real[..., None, :])
    signal = gaussian(first, model.seq_len, model.d_model, theory == "refined")
    try:
        with (
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),
            _collector_paused(),
            _layer_bar(trace, model.layers, progress),
        ):
            if kernel is None and variance is None and correlation is None and model.embedding:
                rest = declare_embedding(model.embedding, model.d_model, theory)
                signal, _ = forward(rest, signal, trace)
            start(signal, trace)
            _, backward = forward(declare(model, theory, _hashable(real)), signal, trace)
            trace.stream()[0].gradient = backward(Gradient(last, model.seq_len))
    except (OverflowError, ZeroDivisionError):
        raise _overflow(theory, trace) from None
    stream = trace.stream()
    columns = [np.broadcast_arrays(*point_moments(p, sequences, real)[1:]) for p in stream]
    moments = np.moveaxis(np.array(columns, dtype=float), 0, -1)
    if not np.all(np.isfinite(moments)):
        raise _overflow(theory, trace)
    notes = validity_warnings(model, theory, trace)
    for note in notes:
        _warnings.warn(note, ValidityWarning, stacklevel=2)
    tokens_v, tokens_g = _by_token(stream, sequences) if resolved else (None, None)
    v, r, g, rg = moments
    return Prediction(
        model,
        theory,
        v,
        r,
        g,
        rg,
        tokens_v,
        tokens_g,
        notes,
        trace,
        sequences,
        batch,
        real,
    )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while a trace grows: many small objects, and no cycles among them."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def _layer_bar(trace: Trace, layers: int, shown: bool) -> Iterator[None]:
    """A progress bar over the layers of both passes, while `trace` is being written."""
    if not shown:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("layers, forward and backward", total=2 * layers)
        trace.on_layer = lambda: bar.advance(task)
        yield


def _hashable(real: np.ndarray | None) -> Padding | None:
    if real is None:
        return None
    return tuple(tuple(bool(v) for v in row) for row in np.atleast_2d(real))


def _check_resolution(model: Transformer, theory: Theory, resolved: bool, kernels: bool) -> None:
    if resolved and theory != "refined":
        raise DomainError(
            f'theory {theory!r} covers tokens alike only: use theory="refined", or tokens=False'
        )
    if not resolved and kernels:
        raise DomainError(
            "kernel, grad_kernel and attention_mask are resolved by token: leave tokens=False out"
        )
    if not resolved and theory == "refined" and model.causal:
        raise DomainError(
            "tokens=False: under a causal mask tokens are not alike; leave tokens out, "
            'or use theory="published", which ignores the mask'
        )


def _by_token(stream: list[Point], sequences: bool) -> tuple[np.ndarray, np.ndarray]:
    """Variances of signal and gradient, shape (..., N + 1, L)."""
    gradients = [point.gradient.kernel.diagonal for point in stream if point.gradient is not None]
    shape = np.broadcast_shapes(*(np.shape(g) for g in gradients))
    both = []
    for diagonals in ([point.signal.kernel.diagonal for point in stream], gradients):
        stacked = np.stack([np.broadcast_to(d, shape) for d in diagonals], axis=-2)
        both.append(stacked.mean(0) if sequences else stacked)
    return both[0], both[1]


def _overflow(theory: Theory, trace: Trace) -> DomainError:
    broken = [p for p in trace.points if not np.all(np.isfinite(p.signal.kernel.pairs))]
    point = (broken or trace.points[-1:])[0]
    return DomainError(
        f"the numbers overflow in layer {point.layer} at {point.site} under theory {theory!r}: "
        "reduce the query and key variances, the depth or the scales"
    )
