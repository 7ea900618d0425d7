"""Whether measured numbers are expected: their bands, a verdict, and the published schemes and
simple mistakes that would explain them, because all numbers lie in the bands of these."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import DomainError, MomentsError, domain_error, without_warnings
from ..files import Shown, as_frame
from ..formulas.checks import POSITIVE, check_count, check_number
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Weights
from ..noise.band import NORMAL_95
from ..prediction.gate import computing
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..scheme.registry import schemes
from ..solver.entering import entered
from .expected import CLEAR, TOLERANCE, log_variance, over_draws
from .verdict import NAMES

if TYPE_CHECKING:
    import pandas as pd

CHANCE = 0.1
"""Probability of so many points outside their 95 % bands, below which the verdict is doubtful."""

FAR = 3.0
"""Distance of a variant from the measured numbers, in half bands of the declaration, beyond which
the variant's own band is not computed."""

UNSCALED = 0.45
"""Variance of a block's last matrix over that of the one before it, below which a depth scale is
assumed: the fans of Glorot's rule per head alone give one half."""

TRIED = 8
"""Most variants that are fully predicted."""

SHOWN = 5
"""Most causes that are printed."""


class Point(NamedTuple):
    """A measured number (`quantity` "variance" or "grad_variance" at a `layer` of the stream), its
    predicted mean over draws, the ends of its 95 % band, and its distance from the middle in
    standard deviations of the logarithm."""

    quantity: str
    layer: int
    measured: float
    predicted: float
    low: float
    high: float
    deviations: float

    @property
    def inside(self) -> bool:
        return abs(self.deviations) <= NORMAL_95


@dataclass(frozen=True)
class Variant:
    """A variant of the declaration: in words, as a model, and with its prediction at every measured
    point."""

    words: str
    model: Transformer
    points: tuple[Point, ...]

    @property
    def off(self) -> float:
        """Largest |deviations| of any point."""
        return max(abs(point.deviations) for point in self.points)

    def __str__(self) -> str:
        return f"{self.words}: " + ", ".join(_predicted_range(point) for point in self.points)


@dataclass(frozen=True, eq=False)
class Expects(Shown):
    """Whether measured numbers of the stream (means over `draws` of the weights) are expected; its
    truth value is `expected`. `points` are the numbers next to their predictions."""

    prediction: Prediction
    points: tuple[Point, ...]
    draws: int = 1

    @property
    def verdict(self) -> str:
        """ "expected", "doubtful" or "not expected".

        "not expected": a point is further than three standard deviations from the middle of its
        band. "doubtful": more points are outside their 95 % bands than chance gives in one of ten
        cases, if points were independent.
        """
        from scipy.special import bdtrc

        if any(abs(point.deviations) > CLEAR for point in self.points):
            return "not expected"
        outside = sum(not point.inside for point in self.points)
        likely = outside == 0 or bdtrc(outside - 1, len(self.points), 0.05) > CHANCE
        return "expected" if likely else "doubtful"

    @property
    def expected(self) -> bool:
        return self.verdict == "expected"

    def __bool__(self) -> bool:
        return self.expected

    @functools.cached_property
    def _variants(self) -> tuple[Variant, ...]:
        """Variants with another prediction, the nearest to the measured numbers first."""
        result = []
        with without_warnings():
            for words, model in self._candidates():
                try:
                    points = self._points_under(model)
                except MomentsError:
                    continue  # a variant that the theory does not cover
                if points is not None:
                    result.append(Variant(words, model, points))
        return tuple(sorted(result, key=lambda one: one.off))

    def _candidates(self) -> list[tuple[str, Transformer]]:
        """The variants worth a full prediction, by a fast one with exchangeable tokens."""
        every = list(variants(self.prediction.model))
        if len(every) <= TRIED:
            return every
        start, asked = self.prediction, self.prediction.asked
        entering = {name: asked[name] for name in ("variance", "correlation") if name in asked}
        if asked.get("kernel") is not None or asked.get("pixels") is not None:
            entering = {"variance": start.variance[0], "correlation": start.correlation[0]}
        places = [point.layer for point in self.points]
        wanted = np.log([point.measured / point.predicted for point in self.points])
        plain = exchangeable(start.model)
        before, off = _forward(plain, entering), []
        for _, model in every:
            other = exchangeable(model)
            try:
                after = before if other == plain else _forward(other, entering)
                moved = np.log([after[n] / before[n] for n in places])
            except (MomentsError, ValueError):
                off.append(math.inf)  # no variance at all
                continue
            # a variant that exchangeable tokens do not show is always tried
            away = float(np.max(np.abs(moved - wanted)))
            off.append(0.0 if other == plain else away if math.isfinite(away) else math.inf)
        order = sorted(range(len(every)), key=off.__getitem__)
        return [every[n] for n in order[:TRIED] if off[n] < math.inf]

    def _points_under(self, model: Transformer) -> tuple[Point, ...] | None:
        """The measured points judged by another declaration; None if its prediction is the same."""
        asked = self.prediction.asked
        mine = np.array([point.predicted for point in self.points])
        if any(point.quantity != "variance" for point in self.points):
            other = predict(model, **asked)
            theirs = np.array([getattr(other, p.quantity)[p.layer] for p in self.points])
        else:  # variances need no backward pass
            other, variance = None, _forward(model, asked)
            theirs = np.array([variance[point.layer] for point in self.points])
        if np.allclose(mine, theirs, rtol=1e-6, atol=0.0) or not np.all(theirs > 0):
            return None
        given = [point.measured for point in self.points]
        wide = [math.log(point.high / point.low) / 2 for point in self.points]
        off = np.abs(np.log(np.divide(given, theirs))) / wide
        if np.any(off > FAR):
            return tuple(
                Point(*point[:3], mean, math.nan, math.nan, float(NORMAL_95 * one))
                for point, mean, one in zip(self.points, theirs.tolist(), off, strict=True)
            )
        other = predict(model, **asked) if other is None else other
        return _points(other, [(p.quantity, p.layer, p.measured) for p in self.points], self.draws)

    @property
    def causes(self) -> tuple[Variant, ...]:
        """Variants whose bands contain all measured numbers, the nearest first; none if the numbers
        are expected."""
        if self.expected:
            return ()
        return tuple(one for one in self._variants if one.off <= NORMAL_95)

    def to_frame(self) -> pd.DataFrame:
        """One row per measured number.

        Columns: quantity, layer, measured, predicted, low and high (of the 95 % band), deviations,
        verdict (of all) and causes (in words).
        """
        causes = "; ".join(one.words for one in self.causes[:SHOWN])
        rows = [{**p._asdict(), "verdict": self.verdict, "causes": causes} for p in self.points]
        return as_frame(rows, columns=[*Point._fields, "verdict", "causes"])

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {'; '.join(map(_point_text, self.points))}"]
        if self.expected:
            return lines[0]
        causes = self.causes
        if causes:
            lines.append("what would explain it:")
            lines += [f"  {one}" for one in causes[:SHOWN]]
            if len(causes) > SHOWN:
                lines.append(f"  and {len(causes) - SHOWN} more, in .causes")
        elif self._variants:
            nearest = self._variants[0]
            means = ", ".join(f"{point.predicted:.3g}" for point in nearest.points)
            lines.append(
                "no published scheme and no common mistake explains it; the nearest is "
                f"{nearest.words}, which predicts {means}"
            )
        return "\n".join(lines)


def _forward(model: Transformer, asked: Mapping[str, Any]) -> list[float]:
    """Variance of every point of the stream, by the forward pass alone."""
    stack, _ = entered(model, asked)
    with computing("refined", [stack.run], stack.rows):
        stack.forward()
    return [float(stack.layout.moments(point)[1]) for point in stack.trace.stream()]


def _predicted_range(point: Point) -> str:
    return f"{point.predicted:.3g} ({point.low:.3g} to {point.high:.3g})"


def _point_text(point: Point) -> str:
    times, name = point.measured / point.predicted, NAMES[point.quantity]
    return (
        f"{name} {point.measured:.4g} at layer {point.layer}, where {_predicted_range(point)} is "
        f"predicted: {times:.3g} times, {point.deviations:+.1f} standard deviations"
    )


def expects(
    prediction: Prediction,
    variance: Mapping[int, float] | None = None,
    grad_variance: Mapping[int, float] | None = None,
    draws: int = 1,
) -> Expects:
    """See `Prediction.expects`."""
    if prediction.theory != "refined":
        raise DomainError(
            f'theory {prediction.theory!r} states no band: predict with theory="refined"'
        )
    if prediction.variance.ndim > 1:
        raise DomainError("expects judges one configuration, and the prediction holds several")
    check_count("draws", draws)
    given = []
    for quantity, values in (("variance", variance), ("grad_variance", grad_variance)):
        if not isinstance(values or {}, Mapping):
            allowed = "a mapping from layers to numbers, such as {24: 20.0}"
            raise domain_error(quantity, values, allowed)
        for layer, value in (values or {}).items():
            check_count("layer", layer, least=0)
            if layer > prediction.model.layers:
                allowed = f"0 to {prediction.model.layers}: layer n is what leaves layer n"
                raise domain_error("layer", layer, allowed)
            number = check_number(f"{quantity}[{layer}]", value, POSITIVE)
            given.append((quantity, int(layer), number))
    if not given:
        raise DomainError("no measured numbers: pass them by layer, such as variance={24: 20.0}")
    return Expects(prediction, _points(prediction, given, draws), draws)


WRITTEN = re.compile(r"(?:(?P<name>\w+)@(?P<layer>\d+)=(?P<value>\S+)|(?P<only>\S+)@(?P<at>\d+))")
"""variance@24=20, and 20@24 for the same."""


def measurements(texts: Sequence[str], argument: str) -> dict[str, dict[int, float]]:
    """Arguments of `Prediction.expects` as they are written on a command line; DomainError for
    others."""
    result: dict[str, dict[int, float]] = {}
    for text in texts:
        parts = WRITTEN.fullmatch(text.strip())
        name = "" if parts is None else parts["name"] or "variance"
        try:
            if parts is None or name not in NAMES:
                raise ValueError(text)
            layer = int(parts["layer"] or parts["at"])
            value = float(parts["value"] or parts["only"])
        except ValueError:
            allowed = f"QUANTITY@LAYER=NUMBER, such as variance@24=20; {' or '.join(NAMES)}"
            raise domain_error(argument, text, allowed) from None
        if layer in result.setdefault(name, {}):
            remedy = "for several draws pass the mean"
            raise domain_error(argument, text, "one number per place", remedy)
        result[name][layer] = value
    return result


def _points(
    prediction: Prediction, given: Sequence[tuple[str, int, float]], draws: int
) -> tuple[Point, ...]:
    """Points for measured (quantity, layer, value); bands include the error of the theory."""
    result = []
    for quantity, layer, value in given:
        mean = float(getattr(prediction, quantity)[layer])
        if not mean:
            allowed = "0, which is predicted exactly there"
            raise domain_error(f"{quantity}[{layer}]", value, allowed, "leave it out")
        band = getattr(prediction, f"{quantity}_band")[:, layer]
        chance = float(over_draws(log_variance(band), draws))
        middle, spread = mean * math.exp(-chance / 2), math.sqrt(chance + TOLERANCE**2)
        away = math.log(value / middle) / spread
        half = math.exp(NORMAL_95 * spread)
        result.append(Point(quantity, layer, value, mean, middle / half, middle * half, away))
    return tuple(result)


# --- variants of a declaration --------------------------------------------------------------------


def exchangeable(model: Transformer) -> Transformer:
    """The model with exchangeable tokens and without a loss. Recurrent mixers, which take a second
    per layer, become attention if the model has attention too."""
    if any(one is None for one in model.mixers):
        model = model.replace(mixer=None)
    changes: dict[str, Any] = {"causal": False, "window": None, "alibi": False, "rotary": None}
    changes |= {"relative_bias": None, "head": None}
    if any(one is not None and one.by_token for one in (*model.mixers, *model.ffns)):
        changes = {"head": None}  # its blocks are followed token by token
    if model.encoder is not None:
        changes["encoder"] = exchangeable(model.encoder).replace(head=model.encoder.head)
    return model.replace(**changes)


def variants(model: Transformer) -> Iterator[tuple[str, Transformer]]:
    """Every published scheme and common mistake that changes the declaration, with its words."""
    for words, changed in _all(model):
        if changed != model:
            yield words, changed


def _all(model: Transformer) -> Iterator[tuple[str, Transformer]]:
    for words, changes in _common_mistakes(model):
        with suppress(DomainError):  # a mistake that this declaration cannot have
            yield words, model.replace(**changes)
    for one in schemes():
        # A temperature that is solved for takes many predictions, and hardly moves a variance.
        options = {"temperature": None} if one.predictions else {}
        with suppress(DomainError):  # not every scheme applies
            yield f"scheme {one.name} ({one.title})", one.apply(model, **options)


def _common_mistakes(model: Transformer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Common mistakes: their words and the fields that they change."""
    weights = model.weights
    assert weights is not None
    there = [name for name in MATRICES if weights.of(name) is not None]
    values = {name: np.asarray(weights.of(name), dtype=float) for name in there}

    def drawn(**changed: Any) -> dict[str, Any]:
        several = {name: value.tolist() for name, value in changed.items()}
        return {"weights": weights.replace(**several)}

    for words, factor, power in (
        ("weights of twice the variance", 2, 1),
        ("weights of half the variance", 0.5, 1),
        ("weights of twice the std", 4, 1),
        ("weights of half the std", 0.25, 1),
        ("standard deviations used as variances", 1, 0.5),
        ("variances used as standard deviations", 1, 2),
    ):
        yield words, drawn(**{name: factor * value**power for name, value in values.items()})
    default = Weights.torch_default(model.d_model, model.d_ff)
    yield "weights of torch's default for nn.Linear", {"weights": default}
    for name in there:
        for words, factor in (
            ("alone with twice the std", 4),
            ("alone with three times the std", 9),
            ("of zeros", 0),
        ):
            yield f"{name.replace('_', ' ')} {words}", drawn(**{name: factor * values[name]})
    scaled = {
        name: (values[name], values[before])
        for name, before in (("output", "value"), ("ffn_out", "ffn_in"))
        if np.mean(values[name]) < UNSCALED * np.mean(values[before])
    }
    if scaled:
        names = " and ".join(scaled)
        yield f"no depth scale on {names}", drawn(**{n: whole for n, (_, whole) in scaled.items()})
        yield (
            f"the depth scale of {names} applied twice",
            drawn(**{n: own * own / whole for n, (own, whole) in scaled.items()}),
        )
    for name, words in (("branch_scale", "branch scale"), ("skip_scale", "skip scale")):
        scale = np.asarray(getattr(model, name), dtype=float)
        yield f"no {words}", {name: 1.0}
        yield f"the {words} applied twice", {name: (scale * scale).tolist()}
    yield "no norms", {"norm": "none"}
    yield "no LayerNorm Scaling", {"layernorm_scaling": False}
    yield "no causal mask", {"causal": False}
    yield "no dropout", {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    table = model.embedding
    if isinstance(table, Embedding):
        one, root = "a token table of variance 1", "token embeddings times sqrt(d_model)"
        yield one, {"embedding": table.replace(token_variance=1.0)}
        yield "token embeddings without their factor", {"embedding": table.replace(scale=1.0)}
        times = table.scale * math.sqrt(model.d_model)
        yield root, {"embedding": table.replace(scale=times)}
