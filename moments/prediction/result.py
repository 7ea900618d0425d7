"""What a user holds: the predicted moments of every layer, and what can be asked of them."""

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
"""Of the JSON of a Prediction."""

POINT_COLUMNS = ("mean", *QUANTITIES)


WALKED = ("trace", "encoder", "outer_weights", "top", "alone")
"""Attributes that hold both passes, and are not pickled."""


@dataclass(frozen=True, eq=False)
class Prediction(Shown):
    """Moments of the residual stream and of every site inside the network.

    docs/theory/state.md has the state, docs/theory/index.md what every formula is from.

    Stream arrays have shape (..., N + 1): index 0 enters layer 1, index n leaves layer n. Leading
    axes are those of the moments given to `predict`.

    Attributes:
        model: the declaration.
        theory: "refined", "published" or "simplified".
        variance, correlation: of the signal; correlation between different tokens.
        grad_variance, grad_correlation: of dLoss/dx, means over draws of the weights.
        token_variance, token_grad_variance: by token, (..., N + 1, L) where resolved, else None.
        warnings: where a formula left its validity.
        loss, loss_stderr: at initialisation, and the deviation of one draw of the weights from it,
            in nats; None without a head. Where several configurations are predicted, arrays of
            their shape.
        logit_variance: likewise, mean square of the output logits.
        encoder: the encoder's own prediction; None without one.
        trace, layout: what both passes saw at every site, and how its tokens lie.
        batch: sequences that share the weights.
        outer_weights: what is outside the layers: on what the loss was predicted, and squared
            gradient norms.
        top: gives what the band has to know of what sends the last gradient; None: nothing.
        alone: of several sequences or documents in one kernel, gives the same of one of
            them and how many such there are as its batch; None: there are none.
        asked: arguments of `predict`, the model aside, as they were given.
        again: makes the same prediction anew; None: an encoder's, which is part of another.
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
        """Numbers and what was asked; what both passes saw is made again where it is needed. An
        encoder's own prediction, which nobody asked for, has all of it."""
        names = [f.name for f in dataclasses.fields(self)]
        left = WALKED if self.again is not None else ()
        return {name: getattr(self, name) for name in names if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name not in WALKED or self.__dict__.get("again") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with without_warnings():
            whole = self.__dict__["again"]()
        self.__dict__.update({of: getattr(whole, of) for of in WALKED})
        return self.__dict__[name]

    @property
    def resolution(self) -> str:
        """How finely tokens were distinguished: "tokens alike", "17 classes of positions", the same
        "and of words", or "by token"."""
        classes = self.layout.classes
        if classes is not None:
            words = " and of words" if isinstance(classes, TextClasses) else ""
            return f"{len(classes.inside.nodes)} classes of positions{words}"
        return "tokens alike" if self.token_variance is None else "by token"

    @property
    def _rows(self) -> int:
        """Of the matrices that pairs of tokens fill."""
        if self.layout.classes is not None:
            return len(self.layout.classes.nodes)
        return 1 if self.token_variance is None else self.token_variance.shape[-1]

    @property
    def grad_variance_typical(self) -> np.ndarray:
        """What one draw of the weights looks like, (..., N + 1): the geometric mean over draws.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._draws[0]

    @property
    def grad_variance_band(self) -> np.ndarray:
        """Where one draw of the weights falls 95 % of the time, (2, ..., N + 1).

        It is that of `batch` sequences which share the weights. Resolved by token it follows the
        token kernels themselves, but the decoder that reads an encoder has its tokens taken
        alike. What one draw makes of a head's loss is in it, and of what a decoder sends to its
        encoder; docs/theory/band.md has what it covers of simulated draws.

        Warns:
            ValidityWarning: where fluctuations are too large to follow.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._draws[1]

    @property
    def variance_band(self) -> np.ndarray:
        """Where the stream's variance under one draw of weights and input lies 95 % of the time,
        (2, ..., N + 1).

        It is that of `batch` sequences which share the weights; of a decoder, with its encoder's
        mean. docs/theory/band.md has what it covers of simulated draws.

        Warns:
            ValidityWarning: where fluctuations are too large to follow.

        Raises:
            DomainError: the theory is not "refined".
        """
        self._check_draws()
        return self._signal_draws[0]

    @functools.cached_property
    def _signal_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the band, and the variance of log v."""
        from ..noise.band import band, first_order, signal_log_variance

        one, across, batch = self._drawn_from()
        with computing(self.theory, [one.trace], one._rows):
            spread = signal_log_variance(
                self._declaration(), one.trace, batch, across, one.layout.counted
            )
            spread, notes = first_order(spread, "variance")
            _, ends = band(self.variance, spread)
        for note in notes:
            warnings.warn(note, ValidityWarning, stacklevel=4)
        return self._gate().variance("the variance of one draw", ends), spread

    def _drawn_from(self) -> tuple[Prediction, Any, float]:
        """One document's prediction, what two of them share, and how many there are."""
        from ..noise.band import between_documents

        if self.alone is None:
            return self, None, float(max(self.batch, self.layout.sequences))
        one, batch = self.alone()
        return one, between_documents(self.trace), batch

    def _check_draws(self) -> None:
        self.unshared("the band of one draw")
        if self.theory != "refined":
            raise DomainError(
                f"theory {self.theory!r} gives means over draws only; "
                'use theory="refined" for what one draw does'
            )

    @functools.cached_property
    def _draws(self) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """Typical value, ends of the band, and notes on both."""
        from ..noise.band import band, first_order, log_variance

        one, across, batch = self._drawn_from()
        with computing(self.theory, [one.trace], one._rows):
            top = None if one.top is None else one.top()
            spread = log_variance(self._declaration(), one.trace, batch, top, across)
            spread, notes = first_order(spread)
            typical, ends = band(self.grad_variance, spread)
        for note in notes:
            warnings.warn(note, ValidityWarning, stacklevel=5)
        gate, what = self._gate(), "the gradient variance of one draw"
        return gate.variance(what, typical), gate.variance(what, ends), notes

    def _gate(self) -> Gate:
        return Gate(self.theory, self.warnings, self.layout.fewest(self.model.seq_len))

    def to_frame(self) -> pd.DataFrame:
        """One row per point inside the network: layer, site and its moments.

        Where several configurations were predicted at once, a column `configuration` counts them.
        """
        import pandas as pd

        shape, moments = self.variance.shape[:-1], self.layout.moments
        frames = []
        for index in np.ndindex(shape):
            rows = [
                (
                    point.layer,
                    point.site,
                    *(float(np.broadcast_to(v, shape)[index]) for v in moments(point)),
                )
                for point in self.trace.points
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

        What `parameter.grad.norm()**2` is on average over draws. Of the loss on the whole batch of
        `token_ids` resolved by token or by classes; else for one sequence, though the loss is
        averaged over `batch`: the frame's `attrs["sequences"]` says of how many, `attrs["batch"]`
        of how many the loss is. Layer 0 holds embedding tables, layer N + 1 the head. Theories that
        state no query or key gradient have no such rows.

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
        """How tokens are routed in every layer with experts, a row each, as a DataFrame.

        Columns: `logit_variance` and `logit_correlation` (two tokens') of the router;
        `gate_square` and `gate_overlap`, E sum g^2 of a token and E sum g g' of two; `load`, the
        share of tokens that an expert gets; `load_variance`, over experts in one draw of the
        router and over the load's square (width does not change it: tokens that are alike choose
        alike); and, sampled at the tokens' mean correlation, `largest_load` over an even share,
        `starving` (the part of the experts with less than a tenth of that) and `balance_loss`
        (E sum_e f_e p_e, without its coefficient) with `balance_gradient`, the expected squared
        norm of its gradient at the router's matrix: times the coefficient's square, to be compared
        with the router's in `weight_gradients`. `learns`: whether any gradient reaches the
        router; none does where the gate of a single expert is normalised.

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
        """What connects every block to the residual streams, a row each, as a DataFrame.

        Columns: `layer` and `block`; `read`, E (sum_i r_i)^2, and `write`, E (mean_k w_k)^2, of one
        token; `mixing`, by how much mixing multiplies the variance of streams about their mean;
        `logit_correlation` of two tokens' coefficients, averaged over pairs; and behind the sum
        `variance` of the mean stream, `apart`, that of one stream about it, and `likeness`, the
        correlation of two streams of one token.

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
        """Of how many sequences `weight_gradients` are, and over how many the loss is averaged."""
        return self.layout.sequences, self.layout.sequences * self.batch

    def inner_weights(self) -> list[tuple[int, str, Any]]:
        """Expected squared gradient norms of the layers' parameters: layer, name, norm."""
        if self.theory != "refined":
            return self.trace.weights()
        return self._overlaps.weights(self.trace)

    @functools.cached_property
    def _overlaps(self) -> StackOverlaps:
        """How much two tokens' overlap varies at every attention (refined theory)."""
        from ..noise.overlap import stack_overlaps

        memory = None if self.encoder is None else self.encoder._overlaps.last
        assert self.trace.stack is not None
        embedding, entering = self.model.embedding, None
        if isinstance(embedding, Embedding) and self.trace.embedding is not None:
            entering = embedding.unshared_overlap(self.model.d_model)
        return stack_overlaps(self.trace.stack, memory, entering)

    @property
    def states_draws(self) -> bool:
        """Whether it says what one draw of the weights does, its band included."""
        return self.theory == "refined" and self._together is None

    def unshared(self, what: str) -> None:
        """Raise where layers share their weights or input, for which `what` is not stated."""
        if self._together is not None:
            raise DomainError(f"{what} is not stated where layers {self._together}")

    @property
    def _together(self) -> str | None:
        """What layers share that a walk from one to the next does not follow; None: nothing."""
        if self.model.shared_layers:
            return "share their weights"
        if self.model.adds_again:
            return "add earlier ones again (input_mix, skips)"
        if self.model.values is not None:
            return "read values of other sources (values)"
        if self.model.per_layer_embedding is not None:
            return "read the input again (per_layer_embedding)"
        return "read keys of earlier ones (keys_of)" if self.model.read_again else None

    def _declaration(self) -> Chain:
        return declare(self.model, self.theory, *self.layout.places)

    @functools.cached_property
    def _stepping(self) -> Any:
        """What first steps of all rates share."""
        from ..step.result import Stepping

        self.unshared("a step of an optimizer")
        return Stepping.of(self)

    @functools.cached_property
    def _sharpening(self) -> Any:
        """The same, of many tokens on classes."""
        from ..step.result import Stepping

        return Stepping.on_classes(self) or self._stepping

    def after(self, optimizer: str, learning_rate: float, **options: Any) -> FirstStep:
        """The network after the first step of an optimizer on the batch that was predicted.

        In training mode, dropout's masks being those of the pass that gave the gradient. Kernels
        of signal and gradient are those of this prediction, so that nothing is run; how right it
        is on real modules is measured in docs/accuracy.md, The first step.

        Args:
            optimizer: "sgd", "adam", "adamw", "lion", "sign" (signum's and Adam's without eps) or
                "muon" (every hidden matrix by itself; all else by Adam at the same rate).
            learning_rate: positive.
            options: betas (of Adam and Lion; a first step does not depend on them), eps,
                weight_decay (of every parameter, added to the step), clip (most that the norm of
                all gradients together may be, as `clip_grad_norm_` cuts it), momentum and nesterov
                (SGD, and Muon, whose author's are .95 and True), adjust (of Muon: "original",
                "match_rms_adamw" or "spectral"), steps (that many steps, each on as many of the
                prediction's sequences, in order; the loss and its slope are then the last one's,
                weights' slopes nan, and gradients those before the first), and multipliers of the
                learning rate, by parameter ("query", "token", "ffn_in.bias", ...) or by group:
                "matrices" (hidden), "embedding" (tables and patches; a tied head is one), "head",
                "vectors" (gains and biases).

        Raises:
            DomainError: the prediction is not that of a batch with a loss (give `token_ids`, or
                `pixels` and `targets`), the model has what a step does not cover (the message
                names it), or an option is out of range.

        Warns:
            ValidityWarning: where the step is too large for the theory.
        """
        from ..step.result import check_step

        check_step(optimizer, learning_rate, **options)
        result: FirstStep = self._stepping.after(optimizer, learning_rate, **options)
        for note in result.warnings:
            warnings.warn(note, ValidityWarning, stacklevel=2)
        return result

    def sharpness(self, optimizer: str, **options: Any) -> Sharpness:
        """The largest and the least eigenvalue of the (preconditioned) Hessian of the batch's loss.

        Gradient descent oscillates from a learning rate of 2/largest on, Adam at a constant rate
        from about 38/largest (2 (1 + beta_1)/(1 - beta_1); Cohen et al. 2022). Nothing is run:
        docs/theory/sharpness.md derives it and says where it holds.

        Args:
            optimizer: "sgd" (the Hessian itself), "adam" or "adamw" (divided by the root mean
                square of an entry of every parameter's gradient).
            options: eps and clip, and multipliers of the learning rate, as in `after`; draws of the
                network that are averaged (3), features of a drawn one (at least 64, more for fewer
                tokens), and their seed.

        Returns:
            A Sharpness: `largest`, `least`, `by_matrix`, `table()`, `to_json()`.

        Raises:
            DomainError: as `after`, or the model has an encoder, reads images, or has a component
                without a known step (the message names it).

        Warns:
            ValidityWarning: where logits vary so much that their softmax is not uniform.
        """
        from ..step.result import sharpness

        self.unshared("sharpness")
        return sharpness(self, optimizer, **options)

    def tangent_kernel(self, rates: Mapping[str, float] | None = None) -> TangentKernel:
        """The neural tangent kernel of the last stream, over tokens or classes of positions.

        Theta_ij = sum_W <dh_ik/dW, dh_jk/dW> of the tokens' features k, mean over draws: under
        gradient descent at a small rate the stream h_i changes by -rate sum_j Theta_ij dLoss/dh_j.
        It is of all parameters up to there, the tables that tokens read included.

        >>> import moments
        >>> p = moments.predict(moments.Transformer(2, 64, 4, 16), correlation=0.2)
        >>> p.tangent_kernel()
        TangentKernel(16 tokens alike: diagonal 584.2, off-diagonal 343.7)

        Args:
            rates: what multiplies the learning rate of parameters by name ("query", ...), 0 of
                frozen ones; 1 of those left out.

        Returns:
            A `TangentKernel`: `diagonal`, `off_diagonal`, `matrix()`, `condition`, `to_frame()`,
            `to_json()`. On classes or by token it takes one gradient's pass per pair of them.

        Raises:
            DomainError: several configurations or sequences, an encoder, another theory, more than
                43 tokens each by itself, a parameter that is not there.
        """
        return tangent_kernel(self, rates)

    def attention(self) -> pd.DataFrame:
        """What attention does in every layer, averaged over rows (refined theory).

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
        """What few bits lose of every matrix product, forward and backward.

        Products of weights alone; what multiplies queries with keys, and attention with values, is
        left at 16 bits, as is usual.

        Args:
            format: "fp8" (E4M3 forward, E5M2 for gradients, one scale a tensor), "fp8-row" (one
                scale for a row of what is summed over), "mxfp8" (E4M3 in blocks of 32 whose scale
                is a power of two) or "nvfp4" (E2M1 in blocks of 16 whose scale is E4M3).

        Returns:
            A row for both operands of every product: layer, weight, product ("forward", "input
            gradient", "weight gradient"), operand ("input", "weight", "gradient"), zero and clipped
            (shares of entries that become 0, and that lie beyond the largest number), snr and
            product_snr (signal over noise of the operand and of the product, in dB; missing where
            nothing is lost, of zeros and in groups of one entry). "weight gradient" has rows where
            every token is resolved by itself (`tokens=True`), of attention and dense blocks.

        Raises:
            DomainError: no such format, or several configurations were predicted at once.
        """
        self.unshared("the precision of products")
        return low_precision(self, format)

    def expects(
        self,
        variance: Mapping[int, float] | None = None,
        *,
        grad_variance: Mapping[int, float] | None = None,
        draws: int = 1,
    ) -> Expects:
        """Whether what was measured of the stream is expected, and what else would give it.

        >>> import moments
        >>> p = moments.predict(moments.Transformer(4, 64, 4, 16), correlation=0.2)
        >>> print(p.expects(variance={4: float(p.variance[4])}).verdict)
        expected

        Args:
            variance: the signal's, by layer: n is what leaves layer n, 0 what enters the first.
            grad_variance: likewise, of the gradient of the loss.
            draws: over how many draws of the weights the numbers are means; each on as many
                sequences as the prediction's `batch`.

        Returns:
            An `Expects`, true where all is expected: `verdict`, `points` with their bands,
            `causes`, `to_frame()`.

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
        from ..show.screen import prediction_screen

        return prediction_screen(self)
