"""`Prediction`: the predicted moments of every layer, and all that derives from them."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.layout import SequenceLayout
from ..engine.texts import TextClasses
from ..engine.trace import Trace
from ..errors import DomainError, ValidityWarning, without_warnings
from ..files import Shown, as_frame
from ..formulas.law import Theory
from ..layers.architecture import declare
from ..layers.experts.mixture import rows as expert_rows
from ..model.embedding import Embedding
from ..model.streams import AltUp
from ..model.transformer import Transformer
from .draws import QUANTITIES
from .gate import Gate, computing
from .low_precision import low_precision
from .tangent import TangentKernel, tangent_kernel

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from ..engine.composition import Chain
    from ..noise.overlap import StackOverlaps
    from ..show.expects import Expects
    from ..step.result import FirstStep
    from ..step.sharpness import Sharpness


FORMAT_VERSION = 1
"""Version of a Prediction's JSON."""

POINT_COLUMNS = ("mean", *QUANTITIES)

WALKED = ("trace", "encoder", "outer_weights", "top", "alone")
"""Attributes that contain both passes; they are computed again instead of pickled."""


@dataclass(frozen=True, eq=False)
class Prediction(Shown):
    """Moments of the residual stream and of every site inside the network.

    docs/theory/state.md describes the state, docs/theory/index.md the sources of all formulas.

    Stream arrays have shape (..., N + 1): index 0 enters layer 1, index n leaves layer n. Leading
    axes are those of the moments given to `predict`.

    Attributes:
        model: the declaration.
        theory: "refined", "published" or "simplified".
        variance, correlation: of the signal; correlation between different tokens.
        grad_variance, grad_correlation: of dLoss/dx, means over draws of the weights.
        token_variance, token_grad_variance: by token, (..., N + 1, L) if resolved, else None.
        warnings: formulas that left their domain of validity.
        loss, loss_stderr: mean over draws at initialisation, and its standard deviation over draws,
            in nats; None without a head. With several configurations, arrays of their shape.
        logit_variance: likewise, mean square of the output logits.
        encoder: the encoder's own prediction; None without one.
        trace, layout: both passes at every site, and the arrangement of their tokens.
        batch: number of sequences that share the weights.
        outer_weights: embedding and head, with their squared gradient norms.
        top: returns the source of the last gradient, for the band; None: it is given.
        alone: for several documents on classes, returns the prediction of a single document and the
            number of such documents; else None.
        asked: arguments of `predict` as given, except the model.
        again: repeats the prediction; None for an encoder's, which is part of another.
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
    layout: SequenceLayout = field(default_factory=SequenceLayout, repr=False)
    batch: int = field(default=1, repr=False)
    loss: Any = None
    loss_stderr: Any = None
    logit_variance: Any = None
    encoder: Prediction | None = field(repr=False, kw_only=True)
    outer_weights: Any = field(repr=False, kw_only=True)
    top: Callable[[], Any] | None = field(repr=False, kw_only=True)
    alone: Callable[[], tuple[Prediction, float]] | None = field(repr=False, kw_only=True)
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)
    again: Callable[[], Prediction] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The fields except `WALKED`, which are computed again on access. An encoder's prediction,
        which cannot be repeated, has all fields."""
        names = [f.name for f in dataclasses.fields(self)]
        omitted = WALKED if self.again is not None else ()
        return {name: getattr(self, name) for name in names if name not in omitted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name not in WALKED or self.__dict__.get("again") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with without_warnings():
            whole = self.__dict__["again"]()
        self.__dict__.update({attribute: getattr(whole, attribute) for attribute in WALKED})
        return self.__dict__[name]

    @property
    def resolution(self) -> str:
        """The resolution of tokens: "tokens alike" (exchangeable), "17 classes of positions",
        "17 classes of positions and of words", or "by token"."""
        classes = self.layout.classes
        if classes is not None:
            words = " and of words" if isinstance(classes, TextClasses) else ""
            return f"{len(classes.one_document.nodes)} classes of positions{words}"
        return "tokens alike" if self.token_variance is None else "by token"

    @property
    def _rows(self) -> int:
        """Number of rows of matrices over pairs of tokens."""
        if self.layout.classes is not None:
            return len(self.layout.classes.nodes)
        return 1 if self.token_variance is None else self.token_variance.shape[-1]

    @property
    def grad_variance_typical(self) -> np.ndarray:
        """Gradient variance of a typical draw of the weights, (..., N + 1): geometric mean.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._draws[0]

    @property
    def grad_variance_band(self) -> np.ndarray:
        """Interval of the gradient variance that contains 95 % of draws of the weights,
        (2, ..., N + 1).

        For `batch` sequences that share the weights. It includes the fluctuations of a head's loss,
        and of the gradient that a decoder sends to its encoder, with the decoder's tokens treated
        as exchangeable. docs/theory/band.md has its measured coverage.

        Warns:
            ValidityWarning: if fluctuations are too large for first order.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._draws[1]

    @property
    def variance_band(self) -> np.ndarray:
        """Interval of the stream's variance that contains 95 % of draws of weights and input,
        (2, ..., N + 1).

        For `batch` sequences that share the weights; a decoder's at the mean of its encoder.
        docs/theory/band.md has its measured coverage.

        Warns:
            ValidityWarning: if fluctuations are too large for first order.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._signal_draws[0]

    @functools.cached_property
    def _signal_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the band, and the variance of log v."""
        from ..noise.band import band, first_order, signal_log_variance

        one, across, batch = self._single_document()
        with computing(self.theory, [one.trace], one._rows):
            log_variance = signal_log_variance(
                self._declaration(), one.trace, batch, across, one.layout.counted
            )
            log_variance, notes = first_order(log_variance, "variance")
            _, ends = band(self.variance, log_variance)
        for note in notes:
            warnings.warn(note, ValidityWarning, stacklevel=4)
        return self._gate().variance("the variance of one draw", ends), log_variance

    def _single_document(self) -> tuple[Prediction, Any, float]:
        """The prediction of one document, the covariances across documents, and their number."""
        from ..noise.band import between_documents

        if self.alone is None:
            return self, None, float(max(self.batch, self.layout.sequences))
        one, batch = self.alone()
        return one, between_documents(self.trace), batch

    def _check_draws(self) -> None:
        self.require_unshared("the band of one draw")
        if self.theory != "refined":
            raise DomainError(
                f"theory {self.theory!r} gives means over draws only; "
                'use theory="refined" for what one draw does'
            )

    @functools.cached_property
    def _draws(self) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """Typical value, ends of the band, and notes on both."""
        from ..noise.band import band, first_order, log_variance

        one, across, batch = self._single_document()
        with computing(self.theory, [one.trace], one._rows):
            top = None if one.top is None else one.top()
            variance = log_variance(self._declaration(), one.trace, batch, top, across)
            variance, notes = first_order(variance)
            typical, ends = band(self.grad_variance, variance)
        for note in notes:
            warnings.warn(note, ValidityWarning, stacklevel=5)
        gate, what = self._gate(), "the gradient variance of one draw"
        return gate.variance(what, typical), gate.variance(what, ends), notes

    def _gate(self) -> Gate:
        return Gate(self.theory, self.warnings, self.layout.fewest(self.model.seq_len))

    def to_frame(self) -> pd.DataFrame:
        """One row per site of the network: layer, site and its moments.

        With several configurations a column `configuration` numbers them.
        """
        import pandas as pd

        shape = self.variance.shape[:-1]
        points = [(p.layer, p.site, self.layout.moments(p)) for p in self.trace.points]
        frames = []
        for index in np.ndindex(shape):
            rows = [
                (layer, site, *(float(np.broadcast_to(v, shape)[index]) for v in moments))
                for layer, site, moments in points
            ]
            frame = pd.DataFrame(rows, columns=["layer", "site", *POINT_COLUMNS])
            if shape:
                frame.insert(0, "configuration", np.ravel_multi_index(index, shape))
            frames.append(frame)
        whole = pd.concat(frames, ignore_index=True)
        gate = self._gate()
        for column in ("correlation", "grad_correlation"):
            known = whole[column].notna()
            result = whole[known]
            if len(result):
                places = [
                    f"layer {n}, {site}" for n, site in zip(result.layer, result.site, strict=True)
                ]
                what = "the " + column.replace("grad_", "gradient ")
                values = result[column].to_numpy(dtype=float)
                whole.loc[known, column] = gate.correlation(what, values, places)
        for note in gate.notes:
            warnings.warn(note, ValidityWarning, stacklevel=2)
        return whole

    def weight_gradients(self) -> pd.DataFrame:
        """Expected squared gradient norm of every parameter: layer, weight, squared_norm.

        The mean of `parameter.grad.norm()**2` over draws. For given `token_ids`, resolved by token
        or classes, the gradient is that of all sequences; else of one sequence, while the loss is
        averaged over `batch`. The frame's `attrs["sequences"]` and `attrs["batch"]` are these two
        numbers of sequences. Embedding tables are in layer 0, the head in layer N + 1. Theories
        without query and key gradients have no such rows.

        Raises:
            DomainError: several configurations were predicted at once.
        """
        shape = self.variance.shape[:-1]
        if shape:
            raise DomainError("weight_gradients needs a single configuration, not a batch of them")
        with computing(self.theory, [self.trace], self._rows):
            outer = [] if self.outer_weights is None else self.outer_weights.rows()
            rows = sorted([*self.inner_weights(), *outer], key=lambda row: row[0])
            norms = np.array([float(np.sum(norm)) for _, _, norm in rows])
        gate = self._gate()
        names = [(layer, weight) for layer, weight, _ in rows]
        places = [f"{weight} of layer {layer}" for layer, weight in names]
        norms = gate.parts("squared gradient norms of weights", norms, 0.0, places)
        for note in gate.notes:
            warnings.warn(note, ValidityWarning, stacklevel=2)
        frame = as_frame(names, columns=["layer", "weight"])
        frame = frame.assign(squared_norm=norms)
        frame.attrs["sequences"], frame.attrs["batch"] = self.sequences
        return frame

    def experts(self) -> Any:
        """Statistics of routing, a row for every layer with experts, as a DataFrame.

        Columns: `logit_variance` and `logit_correlation` (of two tokens) of the router;
        `gate_square` and `gate_overlap`, E sum g^2 of a token and E sum g g' of two; `load`, the
        share of tokens per expert; `load_variance`, its relative variance over experts in one draw
        of the router (at any width, as similar tokens choose the same experts). Sampled at the
        tokens' mean correlation: `largest_load` over an even share, `starving` (share of experts
        with less than a tenth of it) and `balance_loss` (E sum_e f_e p_e, without coefficient) with
        `balance_gradient`, the expected squared norm of its gradient at the router's matrix, which
        times the squared coefficient compares with the router's in `weight_gradients`. `learns`:
        whether a gradient reaches the router; none does if the gate of a single expert is
        normalised.

        Raises:
            DomainError: the model has no experts, or several configurations were predicted.
        """
        if self.variance.shape[:-1]:
            raise DomainError("experts needs a single configuration, not a batch of them")
        assert self.trace.stack is not None
        result = list(expert_rows(self.trace.stack))
        if not result:
            raise DomainError("the model has no experts: declare them by ffn=moments.Experts(...)")
        return as_frame([tuple(row.values()) for row in result], columns=list(result[0]))

    def streams(self) -> Any:
        """Connections of every block to the residual streams, a row each, as a DataFrame.

        Columns: `layer` and `block`; `read`, E (sum_i r_i)^2, and `write`, E (mean_k w_k)^2, of one
        token; `mixing`, factor of mixing on the variance of streams about their mean;
        `logit_correlation` of two tokens' coefficients, averaged over pairs; and behind the sum the
        `variance` of the mean stream, `apart`, that of a stream about it, and `likeness`, the
        correlation of two streams of one token. With `moments.AltUp` a row for every layer:
        `variance` of the first stream, `other_variance` of any other, and their `likeness`.

        Raises:
            DomainError: the model has one stream, or several configurations were predicted.
        """
        if self.variance.shape[:-1]:
            raise DomainError("streams needs a single configuration, not a batch of them")
        assert self.trace.stack is not None
        result = [
            one.component.stream_row(one)
            for one in self.trace.stack.walk()
            if hasattr(one.component, "stream_row")
        ]
        if not result:
            raise DomainError(
                "the model has one residual stream: declare streams=moments.HyperConnections(...)"
            )
        return as_frame([tuple(row.values()) for row in result], columns=list(result[0]))

    @property
    def sequences(self) -> tuple[int, int]:
        """Number of sequences of `weight_gradients`, and number that the loss averages over."""
        return self.layout.sequences, self.layout.sequences * self.batch

    def inner_weights(self) -> list[tuple[int, str, Any]]:
        """Expected squared gradient norms of the layers' parameters: layer, name, norm."""
        if self.theory != "refined":
            return self.trace.weights()
        return self._overlaps.weights(self.trace)

    @functools.cached_property
    def _overlaps(self) -> StackOverlaps:
        """Variance of two tokens' overlap at every attention (refined theory)."""
        from ..noise.overlap import stack_overlaps

        memory = None if self.encoder is None else self.encoder._overlaps.last
        assert self.trace.stack is not None
        embedding, entering = self.model.embedding, None
        if isinstance(embedding, Embedding) and self.trace.embedding is not None:
            entering = embedding.unshared_overlap(self.model.d_model)
        return stack_overlaps(self.trace.stack, memory, entering)

    @property
    def states_draws(self) -> bool:
        """Whether the bands of one draw are available."""
        return self.theory == "refined" and self._shared is None

    def require_unshared(self, what: str) -> None:
        """Raise a DomainError if layers share weights or inputs, for which `what` is undefined."""
        if self._shared is not None:
            raise DomainError(f"{what} is not stated where layers {self._shared}")

    @property
    def _shared(self) -> str | None:
        """What layers share besides the stream; None: nothing."""
        if self.model.shared_layers:
            return "share their weights"
        if self.model.adds_again:
            return "add earlier ones again (input_mix, skips)"
        if isinstance(self.model.streams, AltUp):
            return "correct several streams at once (streams=moments.AltUp)"
        if self.model.values is not None:
            return "read values of other sources (values)"
        if self.model.per_layer_embedding is not None:
            return "read the input again (per_layer_embedding)"
        return "read keys of earlier ones (keys_of)" if self.model.read_again else None

    def _declaration(self) -> Chain:
        return declare(self.model, self.theory, *self.layout.places)

    @functools.cached_property
    def _stepping(self) -> Any:
        """The part of first steps that does not depend on the learning rate."""
        from ..step.result import Stepping

        self.require_unshared("a step of an optimizer")
        return Stepping.of(self)

    @functools.cached_property
    def _sharpening(self) -> Any:
        """`_stepping`, on classes if there are many tokens."""
        from ..step.result import Stepping

        return Stepping.on_classes(self) or self._stepping

    def after(self, optimizer: str, learning_rate: float, **options: Any) -> FirstStep:
        """The network after the first step of an optimizer on the batch that was predicted.

        In training mode, with the dropout masks of the pass that computed the gradient. It is
        computed from this prediction's kernels, nothing is run; errors on real modules are measured
        in docs/accuracy.md, The first step.

        Args:
            optimizer: "sgd", "adam", "adamw", "lion", "sign" (signum, and Adam without eps) or
                "muon" (for hidden matrices; Adam at the same rate for all else).
            learning_rate: positive.
            options: betas (of Adam and Lion; a first step does not depend on them), eps,
                weight_decay (of every parameter, added to the step), clip (largest norm of all
                gradients together, as in `clip_grad_norm_`), momentum and nesterov (SGD, and Muon,
                by default .95 and True), adjust (of Muon: "original", "match_rms_adamw" or
                "spectral"), steps (number of steps, each on the same number of the prediction's
                sequences, in order; loss and slope are then those of the last step, slopes of
                weights nan, and gradients those before the first), and multipliers of the learning
                rate, by parameter ("query", "token", "ffn_in.bias", ...) or by group: "matrices"
                (hidden), "embedding" (tables and patches, including a tied head), "head",
                "vectors" (gains and biases).

        Raises:
            DomainError: the prediction is not that of a batch with a loss (give `token_ids`, or
                `pixels` and `targets`), the model has a component that steps do not cover (named in
                the message), or an option is out of range.

        Warns:
            ValidityWarning: if the step is too large for the theory.
        """
        from ..step.result import check_step

        check_step(optimizer, learning_rate, **options)
        result: FirstStep = self._stepping.after(optimizer, learning_rate, **options)
        for note in result.warnings:
            warnings.warn(note, ValidityWarning, stacklevel=2)
        return result

    def sharpness(self, optimizer: str, **options: Any) -> Sharpness:
        """Largest and smallest eigenvalue of the (preconditioned) Hessian of the batch's loss.

        Gradient descent oscillates at learning rates above 2/largest, Adam at a constant rate above
        about 38/largest (2 (1 + beta_1)/(1 - beta_1); Cohen et al. 2022). Nothing is run:
        docs/theory/sharpness.md has the derivation and its domain.

        Args:
            optimizer: "sgd" (the Hessian itself), "adam" or "adamw" (divided by the root mean
                square of an entry of every parameter's gradient).
            options: eps, clip and multipliers of the learning rate, as in `after`; draws, number of
                networks drawn and averaged (3), features of each (at least 64, more for fewer
                tokens), and seed.

        Returns:
            A Sharpness: `largest`, `least`, `by_matrix`, `table()`, `to_json()`.

        Raises:
            DomainError: as `after`, or the model has an encoder, reads images, or has a component
                without a known step (named in the message).

        Warns:
            ValidityWarning: if logits vary so much that their softmax is not uniform.
        """
        from ..step.result import sharpness

        self.require_unshared("sharpness")
        return sharpness(self, optimizer, **options)

    def tangent_kernel(self, rates: Mapping[str, float] | None = None) -> TangentKernel:
        """The neural tangent kernel of the last stream, over tokens or classes of positions.

        Theta_ij = sum_W <dh_ik/dW, dh_jk/dW> for a feature k, mean over draws: under gradient
        descent at a small rate the stream h_i changes by -rate sum_j Theta_ij dLoss/dh_j. W are
        all parameters up to there, including embedding tables.

        >>> import moments
        >>> p = moments.predict(moments.Transformer(2, 64, 4, 16), correlation=0.2)
        >>> p.tangent_kernel()
        TangentKernel(16 tokens alike: diagonal 584.2, off-diagonal 343.7)

        Args:
            rates: factors on the learning rate by parameter name ("query", ...), 0 for frozen
                parameters; 1 by default.

        Returns:
            A `TangentKernel`: `diagonal`, `off_diagonal`, `matrix()`, `condition`, `to_frame()`,
            `to_json()`. It takes one backward pass per pair of classes or tokens.

        Raises:
            DomainError: several configurations or sequences, an encoder, another theory, more than
                43 resolved tokens, an unknown parameter.
        """
        return tangent_kernel(self, rates)

    def attention(self) -> pd.DataFrame:
        """Statistics of attention in every layer, averaged over rows (refined theory).

        Columns: layer, logit_variance (within a row), square_sum (E sum_j a_ij^2),
        distance_to_uniform (E sum_j (a_ij - 1/n)^2 over a row's n keys) and entropy (nats).
        """
        rows = [
            {
                "layer": point.layer,
                **{
                    name: float(np.mean(point.signal.kernel.average(values)))
                    for name, values in known.items()
                },
            }
            for point in self.trace.points
            if "entropy" in (known := point.signal.diagnostics or {})
        ]
        columns = ["layer", "logit_variance", "square_sum", "distance_to_uniform", "entropy"]
        return as_frame(rows, columns=columns)

    def low_precision(self, format: str) -> pd.DataFrame:
        """Errors of a low-precision number format in every matrix product, forward and backward.

        Products with weights only; those of queries with keys, and of attention with values, are
        assumed to be in 16 bits, as is usual.

        Args:
            format: "fp8" (E4M3 forward, E5M2 for gradients, one scale per tensor), "fp8-row" (one
                scale per row, along the summed axis), "mxfp8" (E4M3 in blocks of 32 whose scale is
                a power of two) or "nvfp4" (E2M1 in blocks of 16 whose scale is E4M3).

        Returns:
            A row for each operand of every product: layer, weight, product ("forward", "input
            gradient", "weight gradient"), operand ("input", "weight", "gradient"), zero and clipped
            (shares of entries rounded to 0, and beyond the largest number), snr and product_snr
            (signal-to-noise ratio of the operand and of the product, in dB; missing without noise,
            for zeros and groups of one entry). "weight gradient" is given for attention and dense
            blocks if tokens are resolved by token (`tokens=True`).

        Raises:
            DomainError: no such format, or several configurations were predicted at once.
        """
        self.require_unshared("the precision of products")
        return low_precision(self, format)

    def expects(
        self,
        variance: Mapping[int, float] | None = None,
        *,
        grad_variance: Mapping[int, float] | None = None,
        draws: int = 1,
    ) -> Expects:
        """Whether measured moments of the stream are expected, and what else would explain them.

        >>> import moments
        >>> p = moments.predict(moments.Transformer(4, 64, 4, 16), correlation=0.2)
        >>> print(p.expects(variance={4: float(p.variance[4])}).verdict)
        expected

        Args:
            variance: of the signal by layer; n leaves layer n, 0 enters the first.
            grad_variance: likewise, of the gradient of the loss.
            draws: number of draws of the weights that were averaged, each on as many sequences as
                the prediction's `batch`.

        Returns:
            An `Expects`, true if all is expected: `verdict`, `points` with their bands, `causes`,
            `to_frame()`.

        Raises:
            DomainError: no such layer, a number that is not positive, several configurations, or a
                theory that states no band.
        """
        from ..show.expects import expects

        return expects(self, variance, grad_variance, draws)

    def table(self) -> str:
        """The stream, layer by layer, as text."""
        from ..show.report import prediction_table

        return prediction_table(self)

    def plot(self, name: str | None = None) -> Figure:
        """Variance and correlation of signal and gradient along the depth, `name` in the title."""
        from ..show.plot import plot_prediction

        return plot_prediction(self, name)

    def to_json(self) -> str:
        """Model, stream moments, the band of one draw (refined theory) and warnings as JSON."""
        quantities, notes = list(QUANTITIES), self.warnings
        if self.states_draws:
            quantities += ["grad_variance_typical", "grad_variance_band"]
            notes += self._draws[2]
        data = {
            "format": FORMAT_VERSION,
            "model": self.model.to_dict(),
            "theory": self.theory,
            **{name: getattr(self, name).tolist() for name in quantities},
            "warnings": list(notes),
        }
        if self.loss is not None:
            for name in ("loss", "loss_stderr", "logit_variance"):
                data[name] = np.asarray(getattr(self, name)).tolist()
        if self.encoder is not None:
            data["encoder"] = json.loads(self.encoder.to_json())
        return json.dumps(data, indent=2, allow_nan=False)

    def __repr__(self) -> str:
        first, last = self.variance[..., 0], self.variance[..., -1]
        if self.variance.ndim > 1:
            return f"Prediction({self.variance.shape[:-1]} configurations, {self.theory})"
        grad_in = self.grad_variance[-1]
        growth = f"x {self.grad_variance[0] / grad_in:.4g} down to the input" if grad_in else "0"
        change = f"x {last / first:.4g}" if first else f"0 to {last:.4g}"
        return (
            f"Prediction({self.model.layers} layers, {self.theory}: variance {change}, "
            f"correlation {self.correlation[0]:.3f} to {self.correlation[-1]:.3f}, "
            f"gradient variance {growth})"
        )

    def __str__(self) -> str:
        from ..show.report import prediction_screen

        return prediction_screen(self)
