"""Errors of low-precision number formats in the matrix products: `Prediction.low_precision`.

The error of rounding follows from the distribution of an operand's entries
(`formulas.quantization`), which is assumed to be

* Gaussian with a single variance for outputs of norms and of attention, weights, and gradients;
* f(u), f(u) w or their derivatives times a Gaussian gradient for hidden units of a feed-forward
  block, with Gaussian u and w of the predicted variance.

Unequal variances of tokens and the zeros of dropout are neglected.

The gradient of a matrix, dW = sum_t g_t x_t^T, sums over tokens, and a group of entries is one
feature at consecutive tokens: a Gaussian draw over tokens with the predicted kernel, K at the input
and D at the gradient. Features are drawn, rounded and multiplied, so that the noise E |dW_Q - dW|^2
includes unequal variances of tokens and their correlation inside a group; the signal is
sum_ts K_ts D_ts. Hidden units are functions of Gaussian draws. The signal of a key also includes
the variance of overlaps (docs/theory/norms.md), which only concerns pairs of different tokens and
does not contribute to the noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
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
    cast,
    decibels,
    gaussian_grid,
    loss,
    mean,
    product_noise,
)
from ..layers.attention.self_attention import AttentionPulled

if TYPE_CHECKING:
    import pandas as pd

    from ..engine.state import Kernel
    from ..engine.trace import Record
    from ..model.transformer import Transformer


class Format(NamedTuple):
    """Number formats of forward operands and of gradients, kind of scale (`quantization.loss`), and
    size of a group that shares a scale: None for a row, 0 for the whole tensor."""

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

COLUMNS = ("layer", "weight", "product", "operand", "zero", "clipped", "snr", "product_snr")

PHASES = 8
"""Values of the scale, within a power of two, over which an operand of unknown size is averaged."""

READS = {
    "query": "attention.heads",
    "key": "attention.heads",
    "value": "attention.heads",
    "output": "attention.projection",
    "ffn_in": "ffn.activation",
    "gate": "ffn.activation",
    "ffn_out": "ffn.out",
}
"""For each matrix the site that follows its input."""


class Operand(NamedTuple):
    """Distribution of the entries of an operand.

    Attributes:
        law: a name that `_entries` accepts.
        variance: of the Gaussian variables that the entries are functions of.
        activation: name of that function.
        free: whether the scale of the operand is unknown.
    """

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
    """Values of independent standard Gaussian variables on a grid, and their weights."""
    axes = [gaussian_grid(count, 6.5) for count in points]
    values = np.meshgrid(*(at for at, _ in axes), indexing="ij")
    weights = functools.reduce(np.multiply.outer, (weight for _, weight in axes))
    return list(values), weights


@functools.lru_cache(maxsize=256)
def _entries(law: str, variance: float, activation: str) -> Entries:
    """The distribution of an operand's entries."""
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
    return Entries(outer(deviation * u) * other, weights)


@functools.lru_cache(maxsize=4096)
def _loss(operand: Operand, elements: Elements, scale: str, size: int, entries: int) -> Loss:
    """Loss in groups of `size` of a tensor of `entries` entries."""
    free = operand.free and scale == "power of two"
    shifts = 2.0 ** (np.arange(PHASES) / PHASES) if free else np.ones(1)
    law = _entries(operand.law, operand.variance, operand.activation)
    (top,) = law.largest(entries, np.array([0.5]))
    # A factor on all entries is equivalent to its inverse on the scale's unit.
    return mean([loss(law, elements, scale, size, float(top), float(s)) for s in shifts])


def _unsized(operand: Operand, scale: str) -> Operand:
    """An operand with the same loss and a standard scale, to share cached results: Gaussian entries
    depend on their scale at most within a power of two."""
    if operand.law != "gaussian" or not operand.variance:
        return operand
    octaves = math.log2(operand.variance) % 2 if scale == "power of two" else 0.0
    return operand._replace(variance=2.0**octaves)


def low_precision(prediction: Any, format: str) -> pd.DataFrame:
    """See `Prediction.low_precision`."""
    check_choice("format", format, tuple(FORMATS))
    if prediction.variance.ndim > 1:
        raise DomainError("low_precision takes one configuration: predict one at a time")
    sites: Any = prediction.to_frame().to_dict("records")
    form = FORMATS[format]
    squares = {(at, name): float(np.sum(norm)) for at, name, norm in prediction.inner_weights()}
    rows: list[tuple[Any, ...]] = []
    for layer in range(1, prediction.model.layers + 1):
        rows += _rows(prediction, sites, layer, form, squares)
        rows += _weight_rows(prediction, layer, form, squares)
    return as_frame(rows, COLUMNS)


def _rows(
    prediction: Any,
    sites: list[dict[str, Any]],
    layer: int,
    form: Format,
    squares: Mapping[tuple[int, str], float],
) -> Iterator[tuple[Any, ...]]:
    """Two rows per product, one for each operand."""
    model = prediction.model
    tokens = prediction.layout.sequences * model.seq_len * prediction.batch
    places = {site["site"]: at for at, site in enumerate(sites) if site["layer"] == layer}
    variances = model.layer_weights(layer)
    for name, (inputs, outputs) in model.shapes_of(layer).items():
        if READS.get(name) not in places:
            continue
        read, grad_in = _operands(model, sites, places, layer, name)
        if read.variance and not squares.get((layer, name), 1.0):
            grad_in = Operand("gaussian", 0.0)
        weight = Operand("gaussian", _rounded(float(getattr(variances, name))))
        for product, kind, summed, operand, elements in (
            ("forward", "input", inputs, read, form.forward),
            ("input gradient", "gradient", outputs, grad_in, form.gradient),
        ):
            losses = {}
            for key, values, numbers, entries in (
                (kind, operand, elements, tokens * summed),
                ("weight", weight, form.forward, inputs * outputs),
            ):
                size = {None: summed, 0: entries}.get(form.group, form.group)
                unsized = _unsized(values, form.scale)
                losses[key] = _loss(unsized, numbers, form.scale, size, entries)
            noise = product_noise(*losses.values())
            for key, lost in losses.items():
                own = lost.zero, lost.clipped, decibels(lost.noise)
                yield layer, name, product, key, *own, decibels(noise)


def _operands(
    model: Transformer,
    sites: list[dict[str, Any]],
    places: dict[str, int],
    layer: int,
    name: str,
) -> tuple[Operand, Operand]:
    """The input of a matrix, and the gradient at its output."""
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
        hidden = Operand(laws[0], units, model.activation, model.gated)
        return hidden if read.variance else read, grad_in
    law = "linear gradient" if model.gated and name == "ffn_in" else laws[1]
    return read, Operand(law, units, model.activation, True)


def _units_of(
    model: Transformer, sites: list[dict[str, Any]], places: dict[str, int], layer: int
) -> float:
    """Variance of a hidden unit before its activation."""
    weights = model.layer_weights(layer)
    if "ffn.in" in places:
        return _rounded(sites[places["ffn.in"]]["variance"])
    entering = sites[places["ffn.activation"] - 1]
    diagonal = weights.gate if model.gated else weights.ffn_in
    return _rounded((entering["variance"] + entering["mean"] ** 2) * model.d_model * diagonal)


def _rounded(value: float) -> float:
    """Rounded to a 16th of an octave, so that similar layers share cached results."""
    return 2.0 ** (round(16 * math.log2(value)) / 16) if value else 0.0


# --- weight gradients -----------------------------------------------------------------------------

FEATURES = 1024
"""Features drawn of either operand. If all tokens' gradients have one direction, the noise is a sum
of as many squares, with an error of sqrt(2/FEATURES) = .2 dB; less otherwise."""


class Drawn(NamedTuple):
    """Features of a matrix's input and of the gradient at its output, (features, tokens) each."""

    read: np.ndarray
    sent: np.ndarray


def _weight_rows(
    prediction: Any, layer: int, form: Format, norms: Mapping[tuple[int, str], float]
) -> Iterator[tuple[Any, ...]]:
    """Two rows per weight gradient, if tokens are resolved by token."""
    squares = _squares(prediction, layer, norms)
    for name, (read, sent) in _drawn(prediction, layer).items():
        casts, rows = [], []
        for kind, values, elements in (
            ("input", read, form.forward),
            ("gradient", sent, form.gradient),
        ):
            grouped = values.reshape(1, -1) if form.group == 0 else values
            size = form.group or grouped.shape[-1]
            changed, clipped = cast(grouped, elements, form.scale, size)
            casts.append(changed.reshape(values.shape))
            zero = float(np.mean((casts[-1] == 0) & (values != 0)))
            lost = _share(casts[-1] - values, float(np.mean(values**2)))
            rows.append((kind, zero, clipped, decibels(lost)))
        lost = _share(casts[1] @ casts[0].T - sent @ read.T, squares[name])
        for kind, *own in rows:
            yield layer, name, "weight gradient", kind, *own, decibels(lost)


def _share(noise: np.ndarray, square: float) -> float:
    """Mean square of noise over that of the signal; 0 without a signal."""
    return float(np.mean(noise**2)) / square if square else 0.0


def _squares(
    prediction: Any, layer: int, norms: Mapping[tuple[int, str], float]
) -> dict[str, float]:
    """E dW^2 of an entry, by matrix; a query's at the mean kernels, as the variance of overlaps
    would increase the noise as well."""
    shapes = prediction.model.shapes_of(layer)
    result = {
        name: norms[layer, name] / math.prod(shape)
        for name, shape in shapes.items()
        if (layer, name) in norms
    }
    for record in prediction.trace.layers[layer - 1].walk():
        if isinstance(record.pulled, AttentionPulled) and record.memory is None:
            leaf, path = record.pulled.pullback.leaf, record.pulled.paths.query
            _, outputs = shapes["query"]
            product = float(np.sum(path.off_diagonal * record.input.second_moment().off_diagonal))
            result["query"] = product / (outputs * max(float(leaf.query), 1e-300))
    return result


def _drawn(prediction: Any, layer: int) -> dict[str, Drawn]:
    """Both operands of a layer's weight gradients, by the matrix's name."""
    model, rng = prediction.model, np.random.default_rng(layer)
    result: dict[str, Drawn] = {}
    sites: dict[str, Record] = {}
    for record in prediction.trace.layers[layer - 1].walk():
        if record.input.resolved is not True or record.grad_out is None:
            continue
        if isinstance(record.pulled, AttentionPulled) and record.memory is None:
            result |= dict(_of_attention(record, record.pulled, rng))
        elif record.component.label:
            sites[record.component.label] = record
    if "attention.projection" in sites and result:
        record = sites["attention.projection"]
        read = _features(record.input.second_moment(), rng)
        result["output"] = Drawn(read, _features(record.grad_out.kernel, rng))
    if "ffn.activation" not in sites or "ffn.out" not in sites:
        return result
    unit, weights = sites["ffn.activation"], model.layer_weights(layer)
    value, slope = _units(model.activation)
    sent, entering = _features(unit.grad_out.kernel, rng), unit.input.second_moment()
    if model.gated:
        gate, factor = (
            _features(entering.scaled(model.d_model * float(one)), rng)
            for one in (weights.gate, weights.ffn_in)
        )
        read, hidden = _features(entering, rng), value(gate) * factor
        result["gate"] = Drawn(read, slope(gate) * factor * sent)
        result["ffn_in"] = Drawn(read, value(gate) * sent)
    elif "ffn.in" in sites:
        units = _features(entering, rng)
        read, hidden = _features(sites["ffn.in"].input.second_moment(), rng), value(units)
        result["ffn_in"] = Drawn(read, slope(units) * sent)
    else:
        return result
    result["ffn_out"] = Drawn(hidden, _features(sites["ffn.out"].grad_out.kernel, rng))
    return result


def _of_attention(
    record: Record, pulled: AttentionPulled, rng: np.random.Generator
) -> Iterator[tuple[str, Drawn]]:
    """Operands of queries, keys and values. Attention stores their gradients as sent to its input,
    of which the weights are divided out."""
    leaf, tokens = pulled.pullback.leaf, record.input.second_moment()
    kept, heads = float(leaf.kv_heads or leaf.heads), float(leaf.heads)
    for name, path, several in (
        ("query", pulled.paths.query, heads),
        ("key", pulled.paths.key, kept),
        ("value", pulled.paths.value, kept),
    ):
        variance = max(float(getattr(leaf, name)), 1e-300)
        sent = path.scaled(1.0 / (several * float(leaf.d_head) * variance))
        yield name, Drawn(_features(tokens, rng), _features(sent, rng))


def _features(kernel: Kernel, rng: np.random.Generator) -> np.ndarray:
    """(features, tokens) Gaussian features of a kernel, with exact second moments if there are at
    least twice as many features as tokens."""
    matrix = np.asarray(kernel.off_diagonal, float)
    drawn = rng.standard_normal((FEATURES, len(matrix)))
    if 2 * len(matrix) <= FEATURES:
        values, vectors = np.linalg.eigh(drawn.T @ drawn / FEATURES)
        drawn = drawn @ (vectors / np.sqrt(values)) @ vectors.T
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray(drawn @ (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)
