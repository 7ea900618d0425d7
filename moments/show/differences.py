"""The features in which two declarations differ; each is a change that can be made alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import DomainError, listed
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Biases
from ..prediction.measurement import Measurement

SAMPLING = 5.0
"""Standard deviations of a matrix's mean square by which its variance must differ."""

SCALE = 1e-3
"""Relative difference from which two multipliers count as different."""

BLOCKS = ("attention", "feed-forward")

_SCALES = {
    "skip_scale": "skip multiplier (lambda)",
    "branch_scale": "branch multiplier (beta)",
    "norm_gain": "norm gain",
}
_PARTS = ("embedding", "head")
_ALONE = {*_SCALES, *_PARTS, "weights", "biases", "encoder", "layers", "d_model", "seq_len"}
_TRAINABLE = {"norm_affine", "norm_bias"}  # decide which gradients exist, not the moments


@dataclass(frozen=True)
class Case:
    """A model, the arguments of `predict` for its input and gradient, and a measurement of the
    network after a change that no declaration can express (None: the network is unchanged)."""

    model: Transformer
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    measurement: Measurement | None = None


@dataclass(frozen=True)
class Feature:
    """One difference: its `name` ("ffn_out", "branch_scale attention", "causal", ...), `words` with
    both numbers, the `ratio` of actual over declared (for a list the geometric mean; nan if not
    numbers), the `layers` that differ (empty if it has none), and a function that applies this one
    feature of the actual model to a case."""

    name: str
    words: str
    ratio: float
    layers: tuple[int, ...]
    apply: Callable[[Case], Case]


_Change = tuple[str, str, float, tuple[int, ...], Callable[[Transformer], Transformer]]
"""The fields of a `Feature`, with `apply` as a change of one stack's model."""


def differences(declared: Transformer, actual: Transformer) -> list[Feature]:
    """Features in which `actual` differs from `declared`, including those of an encoder.

    A matrix or bias counts as different if its variance is off by more than five standard
    deviations of its mean square, in one layer or on average over all.
    """
    stacks = [("", declared, actual)]
    if declared.encoder is not None and actual.encoder is not None:
        stacks.append(("encoder ", declared.encoder, actual.encoder))
    return [
        Feature(stack + name, stack + words, ratio, layers, partial(_applied, stack, change))
        for stack, one, other in stacks
        if one.layers == other.layers
        for kind in (_weights, _biases, _multipliers, _parts, _fields)
        for name, words, ratio, layers, change in kind(one, other)
    ]


def _applied(stack: str, change: Callable[[Transformer], Transformer], case: Case) -> Case:
    """The case with a change of the model, or of its encoder if a `stack` is named."""
    model = case.model
    if not stack:
        return dataclasses.replace(case, model=change(model))
    assert model.encoder is not None
    return dataclasses.replace(case, model=model.replace(encoder=change(model.encoder)))


def _with_field(name: str, value: Any, part: str, model: Transformer) -> Transformer:
    """The model with another field, of itself ("") or of one of its parts."""
    changed = {name: value}
    if part:
        changed = {part: getattr(model, part).replace(**changed)}
    return model.replace(**changed)


def _weights(declared: Transformer, actual: Transformer) -> Iterator[_Change]:
    first, second = declared.weights, actual.weights
    assert first is not None
    assert second is not None
    for matrix, shape in declared.matrix_shapes.items():
        if matrix not in MATRICES:
            continue
        one, other = (_per_layer(w.of(matrix), declared.layers) for w in (first, second))
        different = _differing_layers(one, other, SAMPLING * math.sqrt(2 / math.prod(shape)))
        if not different:
            continue
        numbers, ratio = _numbers(one, other, different)
        words = f"{matrix}{_where(different, declared.layers)}: variance {numbers}"
        change = partial(_with_field, matrix, [float(v) for v in other], "weights")
        yield matrix, words, ratio, different, change


def _differing_layers(one: np.ndarray, other: np.ndarray, noise: float) -> tuple[int, ...]:
    """Layers (from 1) that differ by more than the noise, or all layers if their average does."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(one == other, 0.0, np.log(other / one))
    far = np.abs(logs) > noise
    if not np.any(far) and np.all(np.isfinite(logs)):
        far = np.full(far.shape, abs(logs.mean()) > noise / math.sqrt(logs.size))
    return tuple(int(n) for n in np.flatnonzero(far) + 1)


def _biases(declared: Transformer, actual: Transformer) -> Iterator[_Change]:
    rows: dict[str, str] = {}
    for name, (_, entries) in declared.matrix_shapes.items():
        if name.startswith("cross_") or name not in MATRICES:
            continue
        one, other = (_per_layer(_bias(side, name), side.layers) for side in (declared, actual))
        different = _differing_layers(one, other, SAMPLING * math.sqrt(2 / entries))
        if different:
            at = _positions(different)
            has, said = (float(np.mean(side[at])) for side in (other, one))
            rows[name] = f"{name} {has:.3g} (declared {said:.3g})"
    if not rows:
        return

    def change(model: Transformer) -> Transformer:
        of = {f.name: _bias(model, f.name, None) for f in dataclasses.fields(Biases)}
        of |= {name: _bias(actual, name, None) for name in rows}
        return model.replace(biases=Biases(**of))

    words = f"biases: variance of {', '.join(rows.values())}"
    yield "biases", words, math.nan, (), change


def _bias(model: Transformer, matrix: str, absent: Any = 0.0) -> Any:
    """Variance of a matrix's bias, or `absent` if there is no bias."""
    value = None if model.biases is None else getattr(model.biases, matrix)
    return absent if value is None else value


def _multipliers(declared: Transformer, actual: Transformer) -> Iterator[_Change]:
    """Differences in the scales of each block, or of both at once if these agree."""
    for field, title in _SCALES.items():
        one, other = (model.by_block(field).astype(float) for model in (declared, actual))
        same = np.array_equal(one[:, 0], one[:, 1]) and np.allclose(other[:, 0], other[:, 1])
        for columns in ([0, 1],) if same else ([0], [1]):
            first, second = one[:, columns[0]], other[:, columns[0]]
            if not (different := _differing_layers(first, second, SCALE)):
                continue
            block = BLOCKS[columns[0]]
            numbers, ratio = _numbers(first, second, different)
            gone = bool(np.all(np.abs(second[_positions(different)] - 1) < SCALE))
            words = f"{'missing ' * gone}{title}{'' if same else f' of the {block} block'}"
            words += f"{_where(different, declared.layers)}: {numbers}"
            change = partial(_with_columns, field, columns, other)
            yield field if same else f"{field} {block}", words, ratio, different, change


def _with_columns(
    field: str, columns: list[int], values: np.ndarray, model: Transformer
) -> Transformer:
    """The model with other multipliers, (N, 2), of some blocks."""
    changed = model.by_block(field).astype(float).copy()
    changed[:, columns] = values[:, columns]
    return model.replace(**{field: [tuple(map(float, row)) for row in changed]})


def _parts(declared: Transformer, actual: Transformer) -> Iterator[_Change]:
    for part in _PARTS:
        one, other = getattr(declared, part), getattr(actual, part)
        if one is None or other is None or type(one) is not type(other):
            continue
        for field in dataclasses.fields(one):
            values = [getattr(side, field.name) for side in (one, other)]
            if not field.init or _alike(*values):
                continue
            if field.name.endswith("_variance") and all(isinstance(v, float) and v for v in values):
                entries = declared.d_model * max(2, getattr(one, "vocab_size", 2) or 2)
                if field.name not in ("token_variance", "weight_variance"):
                    entries = declared.d_model * 2
                if abs(math.log(values[1] / values[0])) < SAMPLING * math.sqrt(2 / entries):
                    continue
            numbers, ratio = _pair(*values)
            words = f"{part}, {field.name.replace('_', ' ')}: {numbers}"
            change = partial(_with_field, field.name, values[1], part)
            yield f"{part}.{field.name}", words, ratio, (), change


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, or two numbers within SCALE."""
    numbers = all(isinstance(v, float) for v in (one, other))
    return one == other or (numbers and math.isclose(one, other, rel_tol=SCALE))


def _fields(declared: Transformer, actual: Transformer) -> Iterator[_Change]:
    for field in dataclasses.fields(Transformer):
        name = field.name
        if not field.init or name in _ALONE | _TRAINABLE:
            continue
        one, other = getattr(declared, name), getattr(actual, name)
        if _alike(one, other):
            continue
        if name == "attention_dropout" and other == actual.dropout and one == declared.dropout:
            continue  # it follows dropout
        numbers, ratio = _pair(one, other)
        words = f"{name.replace('_', ' ')}: {numbers}"
        if name == "causal":
            masks = {True: "causal", False: "full"}
            words = f"attention mask: {masks[other]}, declared {masks[one]}"
        yield name, words, ratio, (), partial(_with_field, name, other, "")


def applied(case: Case, features: list[Feature]) -> tuple[Case, list[Feature]]:
    """Apply features in order; return the case and the features that could be applied."""
    done = []
    for feature in features:
        try:
            case = feature.apply(case)
        except DomainError:
            continue
        done.append(feature)
    return case, done


def _per_layer(value: Any, layers: int) -> np.ndarray:
    """Broadcast one number, or N, to (N,)."""
    return np.broadcast_to(np.asarray(value, dtype=float), (layers,)).copy()


def _positions(layers: tuple[int, ...]) -> list[int]:
    """Indices from 0 of layers counted from 1."""
    return [n - 1 for n in layers]


def _numbers(one: np.ndarray, other: np.ndarray, layers: tuple[int, ...]) -> tuple[str, float]:
    """Both values in words, and the geometric mean of their ratio (nan if one is 0)."""
    one, other = one[_positions(layers)], other[_positions(layers)]
    words = f"{_span(other)}, declared {_span(one)}"
    if np.any(one <= 0) or np.any(other <= 0):
        return words, math.nan
    ratio = float(np.exp(np.mean(np.log(other / one))))
    return f"{words} ({ratio:.3g}x)", ratio


def _pair(one: Any, other: Any) -> tuple[str, float]:
    """As `_numbers`, for two values of any type."""
    if not all(isinstance(v, float) for v in (one, other)):
        return f"{other}, declared {one}", math.nan
    return _numbers(np.array([one]), np.array([other]), (1,))


def _span(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    if abs(high - low) <= 0.1 * abs(high):
        return f"{float(values.mean()):.3g}"
    return f"{low:.3g} to {high:.3g}"


def _where(layers: tuple[int, ...], total: int) -> str:
    """Name the layers, as the end of a phrase."""
    if len(layers) == total and total > 1:
        return " in every layer"
    return f" in layer{'s' if len(layers) > 1 else ''} {listed(layers)}"
