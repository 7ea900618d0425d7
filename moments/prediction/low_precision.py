"""What few bits lose of the matrix products of a model: `Prediction.low_precision`.

The laws are those of `formulas.quantization`; here stands which law the entries of an operand have.
They are taken for

* Gaussian of one variance: what a norm gives, weights, what attention hands on, gradients;
* f(u), f(u) w and their derivatives times a Gaussian gradient: hidden units of a feed-forward
  block, u and w Gaussian of the predicted variance.

Left out: that tokens differ in variance, and dropout's zeros. The third product of a matrix, which
gives the gradient of its weights, sums over tokens, whose entries are neither independent nor of
one variance: of it nothing is said.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import DomainError
from ..files import as_frame
from ..formulas.activation import activation_laws
from ..formulas.algebra import NUMPY
from ..formulas.checks import check_choice
from ..formulas.quantization import (
    E2M1,
    E4M3,
    E5M2,
    Elements,
    Entries,
    Loss,
    decibels,
    gaussian_grid,
    loss,
    mean,
    product_noise,
)

if TYPE_CHECKING:
    import pandas as pd

    from ..model.transformer import Transformer
    from .result import Prediction


class Format(NamedTuple):
    """Numbers of what goes forward and of gradients, the kind of scale (`quantization.loss`) and
    entries of a group: None for a whole row, 0 for the whole tensor."""

    forward: Elements
    gradient: Elements
    scale: str
    group: int | None


FORMATS = {
    "fp8": Format(E4M3, E5M2, "any", 0),
    "fp8-row": Format(E4M3, E5M2, "any", None),
    "mxfp8": Format(E4M3, E4M3, "power of two", 32),
    "nvfp4": Format(E2M1, E2M1, "E4M3", 16),
}

PHASES = 8
"""Of a scale that is a power of two, over which an operand of unknown size is averaged."""

READS = {
    "query": "attention.heads",
    "key": "attention.heads",
    "value": "attention.heads",
    "output": "attention.projection",
    "ffn_in": "ffn.activation",
    "gate": "ffn.activation",
    "ffn_out": "ffn.out",
}
"""Sites before which the input of a matrix stands."""


class Operand(NamedTuple):
    """The law of its entries (a name of `_entries`), the `variance` of what they are functions of,
    that function's name, and whether its size is unknown (`free`)."""

    law: str
    variance: float
    activation: str = "identity"
    free: bool = False


def _units(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    laws = activation_laws(name)
    if laws.entrywise is None:
        raise DomainError(f"low_precision knows no function of the activation {name!r}")
    value, slope = laws.entrywise
    return functools.partial(value, NUMPY), functools.partial(slope, NUMPY)


def _product(points: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """Independent standard Gaussians over a grid, and their weights."""
    axes = [gaussian_grid(count, 6.5) for count in points]
    values = np.meshgrid(*(at for at, _ in axes), indexing="ij")
    weights = functools.reduce(np.multiply.outer, (weight for _, weight in axes))
    return list(values), weights


@functools.lru_cache(maxsize=256)
def _entries(law: str, variance: float, activation: str) -> Entries:
    """Of an operand."""
    deviation = math.sqrt(variance)
    if law in ("gaussian", "hidden"):
        at, weights = gaussian_grid()
        return Entries(_units(activation)[0](deviation * at), weights)
    value, slope = _units(activation)
    if law == "gate gradient":
        (u, w, g), weights = _product((60, 60, 60))
        return Entries(slope(deviation * u) * w * g, weights)
    (u, other), weights = _product((300, 300))
    outer = slope if law == "hidden gradient" else value
    return Entries(outer(deviation * u) * other * deviation, weights)


@functools.lru_cache(maxsize=4096)
def _loss(operand: Operand, elements: Elements, scale: str, size: int, entries: int) -> Loss:
    """Of groups of `size` of a tensor of so many entries."""
    free = operand.free and scale == "power of two"
    shifts = 2.0 ** (np.arange(PHASES) / PHASES) if free else np.ones(1)
    law = _entries(operand.law, operand.variance, operand.activation)
    (top,) = law.largest(entries, np.array([0.5]))
    # a factor on all entries is one on the scale's unit, the other way round
    return mean([loss(law, elements, scale, size, float(top), float(s)) for s in shifts])


def _unsized(operand: Operand, scale: str) -> Operand:
    """The same of a size that is as good: of Gaussian entries it counts up to a factor of two, or
    not at all."""
    if operand.law != "gaussian":
        return operand
    octaves = math.log2(operand.variance) % 2 if scale == "power of two" else 0.0
    return operand._replace(variance=2.0**octaves)


def low_precision(prediction: Prediction, format: str) -> pd.DataFrame:
    """See `Prediction.low_precision`."""
    check_choice("format", format, tuple(FORMATS))
    if prediction.variance.ndim > 1:
        raise DomainError("low_precision takes one configuration: predict one at a time")
    sites: Any = prediction.to_frame().to_dict("records")
    layers = range(1, prediction.model.layers + 1)
    return as_frame(
        row for layer in layers for row in _rows(prediction, sites, layer, FORMATS[format])
    )


def _rows(
    prediction: Prediction, sites: list[dict[str, Any]], layer: int, form: Format
) -> Iterator[dict[str, Any]]:
    """Two rows a product, one for each operand."""
    model = prediction.model
    tokens = prediction.layout.sequences * model.seq_len * prediction.batch
    places = {site["site"]: at for at, site in enumerate(sites) if site["layer"] == layer}
    variances = model.layer_weights(layer)
    for name, (inputs, outputs) in model.shapes_of(layer).items():
        if READS.get(name) not in places:
            continue
        read, grad_in = _operands(model, sites, places, layer, name)
        weight = Operand("gaussian", _rounded(float(getattr(variances, name))))
        for product, along, operands in (
            ("forward", inputs, {"input": (read, form.forward)}),
            ("input gradient", outputs, {"gradient": (grad_in, form.gradient)}),
        ):
            losses = {}
            for kind, (operand, elements) in (
                operands | {"weight": (weight, form.forward)}
            ).items():
                entries = (inputs if kind == "weight" else tokens) * (
                    outputs if kind == "weight" else along
                )
                size = {None: along, 0: entries}.get(form.group, form.group)
                unsized = _unsized(operand, form.scale)
                losses[kind] = _loss(unsized, elements, form.scale, size, entries)
            noise = product_noise(*losses.values())
            for kind, lost in losses.items():
                yield {
                    "layer": layer,
                    "weight": name,
                    "product": product,
                    "operand": kind,
                    "zero": lost.zero,
                    "clipped": lost.clipped,
                    "snr": decibels(lost.noise),
                    "product_snr": decibels(noise),
                }


def _operands(
    model: Transformer,
    sites: list[dict[str, Any]],
    places: dict[str, int],
    layer: int,
    name: str,
) -> tuple[Operand, Operand]:
    """What a matrix reads, and the gradient at what it makes."""
    at = places[READS[name]]
    before = sites[at - 1]
    if before["site"] == "ffn.in":
        before = sites[at - 2]
    read = Operand("gaussian", _rounded(before["variance"] + before["mean"] ** 2))
    if name in ("query", "key", "value"):
        return read, Operand("gaussian", 1.0, free=True)
    if name == "output":
        return read, Operand("gaussian", _rounded(sites[at]["grad_variance"]))
    units = _units_of(model, sites, places, layer)
    laws = ("gated hidden", "gate gradient") if model.gated else ("hidden", "hidden gradient")
    if name == "ffn_out":
        grad_in = Operand("gaussian", _rounded(sites[at]["grad_variance"]))
        return Operand(laws[0], units, model.activation, model.gated), grad_in
    law = "linear gradient" if model.gated and name == "ffn_in" else laws[1]
    return read, Operand(law, units, model.activation, True)


def _units_of(
    model: Transformer, sites: list[dict[str, Any]], places: dict[str, int], layer: int
) -> float:
    """The variance of what a hidden unit is a function of."""
    weights = model.layer_weights(layer)
    if "ffn.in" in places:
        return _rounded(sites[places["ffn.in"]]["variance"])
    entering = sites[places["ffn.activation"] - 1]
    diagonal = weights.gate if model.gated else weights.ffn_in
    return _rounded((entering["variance"] + entering["mean"] ** 2) * model.d_model * diagonal)


def _rounded(value: float) -> float:
    """To a 16th of an octave, so that layers that hardly differ share a law."""
    return float(2.0 ** (round(16 * math.log2(value)) / 16))
