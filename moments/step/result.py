"""The result of a first step, `FirstStep`, and its computation from a prediction, `Stepping`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import domain_error
from ..files import Serialised, as_frame, plain
from ..prediction.gate import computing
from ..prediction.predict import predict
from . import blocks as _blocks  # noqa: F401 (registers components with the walk)
from .change import Change, between_trace
from .draws import Draws
from .ends import Words, ending, entered, tied_overlap
from .rules import Optimizer, named_optimizer
from .rules import check_step as check_step
from .several import Updates
from .sharpness import Sharpness as Sharpness
from .sharpness import sharpness as sharpness
from .sites import ENCODER, Reading, Site
from .walk import Walk, WeightStep

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from ..model.transformer import Transformer
    from ..prediction.result import Prediction


FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class FirstStep(Serialised):
    """The network after the first step of an optimizer.

    docs/theory/first-step.md derives it.

    Stream arrays have length N + 1: index 0 enters layer 1, index n leaves layer n.

    Attributes:
        model: the declaration.
        optimizer, learning_rate: of the step.
        loss: of the batch after the step, in nats like every loss here.
        loss_before: as predicted at initialisation.
        loss_change: loss - loss_before; negative where the loss falls.
        slope: derivative of the loss in the learning rate, at rate 0: negative.
        variance: of the stream after the step, (N + 1,).
        relative_change: E |dh|^2 over E |h|^2 of the stream before the step, (N + 1,).
        logit_change: mean square of a logit's change.
        warnings: violated limits of the theory.
        site_rows: rows of `to_frame`.
    """

    model: Transformer
    optimizer: str
    learning_rate: float
    loss: float
    loss_before: float
    loss_change: float
    slope: float
    variance: np.ndarray
    relative_change: np.ndarray
    logit_change: float
    warnings: tuple[str, ...]
    site_rows: tuple[Mapping[str, Any], ...]
    _weights: Callable[[], tuple[Mapping[str, Any], ...]] = field(repr=False)

    @classmethod
    def of(
        cls,
        reading: Reading,
        optimizer: Optimizer,
        rate: float,
        before: float,
        moved: Walk,
        slope: float,
    ) -> FirstStep:
        """From a walk; `before` is the loss that it has at rate 0."""
        model, loss = reading.model, reading.loss
        steps = 1 if optimizer.updates is None else optimizer.updates.steps
        rows = []
        for point in moved.sites:
            size, tokens, changed = point.before, len(point.gradient), point.changed
            coherent = between_trace(point.coherent, point.gradient)
            rows.append(
                {
                    "layer": point.layer,
                    "site": point.site,
                    "variance_before": size / tokens,
                    "variance": (size + 2 * point.overlap + changed) / tokens,
                    "relative_change": changed / size if size else math.nan,
                    "coherent": coherent / changed if changed else math.nan,
                }
            )
        end = moved.end
        rows.append(
            {
                "layer": model.layers + 1,
                "site": "logits",
                "variance_before": reading.logit_variance,
                "variance": end.after,
                "relative_change": end.change / reading.logit_variance,
                "coherent": math.nan,
            }
        )
        stream = [row for row in rows if row["site"] == "stream"]
        change = end.loss - before
        return cls(
            model,
            optimizer.name,
            rate,
            loss + change,
            loss,
            change,
            slope,
            np.array([row["variance"] for row in stream]),
            np.array([row["relative_change"] for row in stream]),
            end.change,
            _notes(reading, rows, steps, 2 * change / (slope * rate) - 1 if slope else 1.0),
            tuple(rows),
            functools.partial(_weight_rows, reading, optimizer, moved.weights),
        )

    @functools.cached_property
    def weight_rows(self) -> tuple[Mapping[str, Any], ...]:
        """Rows of `weights`, computed on demand: alignment takes draws of the network."""
        return self._weights()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"weight_rows": self.weight_rows}
        state.pop("_weights", None)
        return state

    def to_frame(self) -> pd.DataFrame:
        """One row per site: layer, site, variance_before and variance (second moments per feature
        before and after the step), relative_change (E |dh|^2/E |h|^2) and coherent (the share of
        the change that lies along the gradients of the batch's tokens)."""
        return as_frame(self.site_rows)

    def weights(self) -> pd.DataFrame:
        """One row per parameter.

        Columns: layer, weight, learning_rate (all factors included), update_variance and
        weight_variance (mean squares of an entry of the step and of the weight; nan where it
        starts at a constant), alignment (the exponent of Everett et al. 2024, between 1/2, a
        random step, and 1: |dW x| = width^alignment times what entries alone would give) and slope
        (the parameter's share of the loss's derivative in the learning rate).
        """
        return as_frame(self.weight_rows)

    def table(self) -> str:
        """The stream, layer by layer, as text."""
        from ..show.report import first_step_table

        return first_step_table(self)

    def plot(self, name: str | None = None) -> Figure:
        """A coordinate check: relative change of every site along the depth; sizes of steps and
        weights, and alignment, of every matrix."""
        from ..show.plot import plot_first_step

        return plot_first_step(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version; nan becomes None."""
        return {
            "format": FORMAT_VERSION,
            "model": self.model.to_dict(),
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            **{
                name: getattr(self, name)
                for name in ("loss", "loss_before", "loss_change", "slope", "logit_change")
            },
            "variance": plain(self.variance),
            "relative_change": plain(self.relative_change),
            "warnings": list(self.warnings),
            "sites": plain(self.site_rows),
            "weights": plain(self.weight_rows),
        }

    def __repr__(self) -> str:
        return (
            f"FirstStep({self.optimizer} at {self.learning_rate:g}: loss {self.loss_before:.4g} to "
            f"{self.loss:.4g}, stream changes by {self.relative_change[-1]:.3g} of its mean square)"
        )


def _weight_rows(
    reading: Reading, optimizer: Optimizer, weights: list[WeightStep]
) -> tuple[Mapping[str, Any], ...]:
    several, rows = optimizer.updates is not None, []
    for one in sorted(weights, key=lambda one: one.layer):
        aligned, rule = one.aligned, optimizer.rule_of(one.weight)
        if rule != "muon" and not several and aligned > 0:
            drawn = Draws.shared(reading)
            if drawn is not None:
                aligned = drawn.aligned.get((one.layer, one.weight, rule), aligned)
        rows.append(
            {
                "layer": one.layer,
                "weight": one.weight,
                "learning_rate": one.rate,
                "update_variance": one.square,
                "weight_variance": one.variance,
                "alignment": _exponent(aligned, one.width),
                "slope": math.nan if several else -one.slope,
            }
        )
    return tuple(rows)


def _exponent(aligned: float, width: float) -> float:
    """log(E |dW x|^2/(E |x|^2 E dW^2 m))/(2 log n); `aligned` is that ratio."""
    if not aligned > 0 or width < 2:
        return math.nan
    return 0.5 + math.log(aligned / width) / (2 * math.log(width))


LARGE = 0.9
"""Share of the change in the new stream's variance beyond which kernels were 5 to 20 % off."""

SEVERAL = 0.3
"""Relative change of the last stream by several steps beyond which gradients have changed."""

HALF = 0.5
"""Share of the loss's slope below which, after several steps, gradients have changed. A slope times
1 - k goes with a loss change of the slope times 1 - k/2."""


def _notes(
    reading: Reading, rows: list[dict[str, Any]], steps: int, slope_left: float
) -> tuple[str, ...]:
    notes = []
    stream = [row for row in rows if row["site"] == "stream"]
    last = stream[-1]
    share = last["relative_change"] * last["variance_before"] / last["variance"]
    if share > LARGE:
        notes.append(
            f"{share:.2g} of the last stream is the step's change: beyond {LARGE} the stream comes "
            "out 5 to 20 % low and the loss's change 2 to 10 % large (SGD's up to 35 % small)"
        )
    if steps > 1 and (last["relative_change"] > SEVERAL or slope_left < HALF):
        notes.append(
            f"over {steps} steps the last stream changes by {last['relative_change']:.2g} of its "
            f"square and {max(slope_left, 0.0):.2g} of the loss's slope is left, all with "
            f"gradients as they are before the first: beyond {SEVERAL} or below {HALF}, the loss's "
            "change came out up to 14 % small under Adam and Lion, up to 45 % under SGD (whose "
            "steps came out up to 2.7 times too large) and up to 60 % under Muon (18 % where the "
            "stream changes by .26)"
        )
    return tuple(notes)


def _by_token(prediction: Prediction) -> Prediction:
    """The prediction of a text token by token instead of by classes of positions."""
    outer = prediction.outer_weights
    no_text = outer is None or outer.ending is None or outer.inputs.token_ids is None
    if no_text or prediction.layout.classes is None:
        # a copy: the prediction refers to its steps, and a cycle would keep gigabytes
        return dataclasses.replace(prediction)
    return predict(prediction.model, **{**prediction.asked, "tokens": True})


def loss_at_rest(reading: Reading, optimizer: Optimizer) -> float:
    """The loss at learning rate 0 by `ending`."""
    words = Words.of(reading)
    kernel = np.asarray(reading.readout.kernel.off_diagonal)
    nothing = Change.none(len(kernel))
    tied = tied_overlap(reading, words)
    ones, zeros = np.ones(len(kernel)), np.zeros_like(kernel)
    return ending(reading, words, optimizer, 0.0, nothing, zeros, tied, ones).loss


@np.errstate(all="ignore")
def stepped(reading: Reading, optimizer: Optimizer, rate: float) -> Walk:
    """One step at one learning rate: the walk from the tables to the loss.

    Raises:
        DomainError: a result overflows.
    """
    model, words = reading.model, Words.of(reading)
    tied, width = tied_overlap(reading, words), float(model.d_model)
    walk = Walk(optimizer, rate, tied, reading)
    points = iter(reading.points)
    sizes = {"head": reading.readout.weight_variance}
    sizes["patch"] = getattr(model.embedding, "patch_variance", np.nan)
    for stream in reading.streams:
        main = stream is reading.main
        prefix, overlap = ("", tied) if main else (ENCODER, 0 * stream.before)
        first = entered(reading, words, optimizer, rate, stream, overlap)
        walk.prefix, walk.tied, walk.along = prefix, overlap, first.along
        site = Site(-1, 0, "tables", None, stream.before, stream.received, width)
        change, site = walk.through(stream.embedding, first.change, site, points)
        change, site = walk.noted(change, next(points))
        last = walk.through(stream.layers, change, site, points)
        change, site = walk.memory = walk.through(stream.ending, *last, points)
        sizes |= {prefix + table.name: table.variance for table in stream.tables}
        for name, size in first.effects:
            full = prefix + name
            walk.entry(0, full, optimizer.factor(full), size, sizes[full], 1.0)
    kept = np.sqrt(np.diag(last[1].kernel) / np.diag(last[0].new(last[1].kernel)))
    end = ending(reading, words, optimizer, rate, change, site.gradient, tied, kept)
    for name, size in end.effects:
        variance = sizes.get(name, np.nan)
        walk.entry(model.layers + 1, name, optimizer.factor(name), size, variance, 1.0)
    walk.end = end
    if np.all(np.isfinite([end.loss, end.change, walk.sites[-1].changed])):
        return walk
    raise domain_error("learning_rate", rate, "small enough for what it changes to stay finite")


FEW = 256
"""Number of tokens up to which sharpness uses a prediction token by token; beyond, its kernels are
interpolated between classes of positions."""


@dataclass(frozen=True, eq=False)
class Stepping:
    """A prediction with the results that steps of all learning rates share."""

    reading: Reading
    prediction: Prediction

    @classmethod
    def of(cls, prediction: Prediction) -> Stepping:
        """Raises:
        DomainError: as `Reading.of`.
        """
        resolved = _by_token(prediction)
        return cls(Reading.of(resolved), resolved)

    @classmethod
    def on_classes(cls, prediction: Prediction) -> Self | None:
        """For the sharpness of more than `FEW` tokens; None if the prediction is not on classes."""
        classes = prediction.layout.classes
        if (
            classes is None
            or sum(classes.document_lengths) <= FEW
            or prediction.model.relative_bias is not None
        ):
            return None
        return cls(Reading.of(prediction), prediction)

    def after(self, optimizer: str, learning_rate: float, **options: Any) -> FirstStep:
        """See `Prediction.after`."""
        rate = check_step(optimizer, learning_rate, **options)
        chosen = self.clipped(named_optimizer(optimizer, **options))
        reading = self.reading
        with computing("refined", [self.prediction.trace]):
            if chosen.updates is None:
                before = loss_at_rest(reading, chosen)
            else:
                reading, before = self._at(chosen, chosen.updates)
                chosen = dataclasses.replace(chosen, batches=reading.batches)
            moved = stepped(reading, chosen, rate)
            slope = -sum(one.slope for one in moved.weights)
            if chosen.updates is not None:
                small = rate * _SLIGHT
                slope = (stepped(reading, chosen, small).end.loss - before) / small
        return FirstStep.of(reading, chosen, rate, before, moved, slope)

    def walked(self, optimizer: str, learning_rate: float, **options: Any) -> Walk:
        """The walk of a step: changes of all sites and steps of all parameters."""
        chosen = self.clipped(named_optimizer(optimizer, **options))
        with computing("refined", [self.prediction.trace]):
            return stepped(self.reading, chosen, learning_rate)

    @functools.cached_property
    def squares(self) -> dict[tuple[int, str], float]:
        """E |dLoss/dW|^2 of every parameter, by layer and name."""
        frame = self.prediction.weight_gradients()
        names = zip(frame["layer"], frame["weight"], frame["squared_norm"], strict=True)
        return {(int(layer), str(name)): float(square) for layer, name, square in names}

    def clipped(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer with the effect of clipping on this batch's gradients."""
        if optimizer.clip is None:
            return optimizer
        return optimizer.clipped(math.sqrt(sum(self.squares.values())))

    @functools.cached_property
    def _several(self) -> dict[Updates, tuple[Reading, float]]:
        return {}

    def _at(self, optimizer: Optimizer, updates: Updates) -> tuple[Reading, float]:
        """The reading for several steps, shared by all rates, and the loss before them."""
        if updates not in self._several:
            self._several.clear()
            reading = self.reading.stepped(updates)
            chosen = dataclasses.replace(optimizer, batches=reading.batches)
            first, before = loss_at_rest(self.reading, optimizer), loss_at_rest(reading, chosen)
            # the loss of the last batch, as far as `ending` distinguishes batches
            reading = dataclasses.replace(reading, loss=reading.loss + before - first)
            self._several[updates] = reading, before
        return self._several[updates]


_SLIGHT = 1e-3
"""Factor on the learning rate at which the slope of the loss of several steps is computed."""
