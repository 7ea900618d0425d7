"""Variances of the weight matrices, per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import domain_error
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    check_choice,
    check_count,
    check_layers,
    check_number,
)
from .fields import Stored, set_field

PerLayer = float | Sequence[float]


@dataclass(frozen=True)
class LayerWeights:
    """Variances of the entries of one layer's matrices."""

    query: float
    key: float
    value: float
    output: float
    ffn_in: float
    ffn_out: float
    gate: float
    attention_gate: float
    cross_query: float
    cross_key: float
    cross_value: float
    cross_output: float


# The matrix from which an omitted one takes its variance.
DEFAULTS = {
    "gate": "ffn_in",
    "attention_gate": "query",
    "cross_query": "query",
    "cross_key": "key",
    "cross_value": "value",
    "cross_output": "output",
}
MATRICES = tuple(f.name for f in dataclasses.fields(LayerWeights))
DISTRIBUTIONS = ("normal", "uniform", "truncated", "orthogonal")


@dataclass(frozen=True)
class Weights(Stored):
    """Variances of the entries of every weight matrix; each one number or one per layer.

    Args:
        query, key, value: the projections from d_model to the heads.
        output: the projection of the concatenated heads back to d_model.
        ffn_in, ffn_out: the two matrices of the feed-forward block.
        gate: the third one of a gated block; None: as ffn_in.
        attention_gate: what makes the gates on attention's output; None: as query.
        cross_query, cross_key, cross_value, cross_output: of cross-attention in a decoder; None: as
            those of self-attention.
        distribution: what entries are drawn from, at these variances: "normal", "uniform",
            "truncated" (a normal cut at two of its own deviations) or "orthogonal" (rows or columns
            orthogonal to each other, of the length that gives the variance).

    Raises:
        DomainError: a negative variance, or an unknown distribution.
    """

    _part: ClassVar[str] = "weights"

    query: PerLayer
    key: PerLayer
    value: PerLayer
    output: PerLayer
    ffn_in: PerLayer
    ffn_out: PerLayer
    gate: PerLayer | None = None
    attention_gate: PerLayer | None = None
    cross_query: PerLayer | None = None
    cross_key: PerLayer | None = None
    cross_value: PerLayer | None = None
    cross_output: PerLayer | None = None
    distribution: str = "normal"

    def __post_init__(self) -> None:
        check_choice("weights.distribution", self.distribution, DISTRIBUTIONS)
        for name in MATRICES:
            value = getattr(self, name)
            if value is None and name in DEFAULTS:
                continue
            remedy = "pass a variance, the square of a deviation"
            found = check_layers(f"weights.{name}", value, NONNEGATIVE, remedy)
            set_field(self, name, found)

    @classmethod
    def xavier(
        cls, d_model: int, heads: int, d_ff: int | None = None, d_head: int | None = None
    ) -> Weights:
        """Glorot and Bengio's 2 / (fan_in + fan_out).

        Every head of query, key and value is a matrix of its own, d_model to d_head (d_model /
        heads unless given).
        """
        d_model, heads = check_count("d_model", d_model), check_count("heads", heads)
        d_ff = 4 * d_model if d_ff is None else check_count("d_ff", d_ff)
        width = d_model / heads if d_head is None else check_count("d_head", d_head)
        per_head = 2 / (d_model + width)
        ffn = 2 / (d_model + d_ff)
        return cls(per_head, per_head, per_head, 2 / (d_model + heads * width), ffn, ffn)

    @classmethod
    def normal(cls, variance: float, *, output_divisor: float = 1.0) -> Weights:
        """One variance for every matrix, that of `output` and `ffn_out` divided by a number.

        `Weights.normal(0.02**2)` is BERT's; GPT-2's has `output_divisor=2 * layers`.
        """
        variance = check_number("variance", variance, NONNEGATIVE, "pass a variance")
        scaled = variance / check_number("output_divisor", output_divisor, POSITIVE)
        return cls(variance, variance, variance, scaled, variance, scaled)

    @classmethod
    def torch_default(cls, d_model: int, d_ff: int | None = None) -> Weights:
        """torch.nn.Linear's kaiming_uniform(a = sqrt 5): variance 1 / (3 fan_in).

        Its biases, uniform with the same variance, are not part of these weights.
        """
        d_model = check_count("d_model", d_model)
        d_ff = 4 * d_model if d_ff is None else check_count("d_ff", d_ff)
        from_model = 1 / (3 * d_model)
        return cls(from_model, from_model, from_model, from_model, from_model, 1 / (3 * d_ff))

    def layer(self, number: int) -> LayerWeights:
        """Variances of layer `number`, counted from 1."""
        values = (self.of(name) for name in MATRICES)
        return LayerWeights(*[v if isinstance(v, float) else v[number - 1] for v in values])

    def of(self, matrix: str) -> float | tuple[float, ...]:
        """Variance of one matrix, in every layer or per layer, defaults resolved."""
        value = getattr(self, matrix)
        return self.of(DEFAULTS[matrix]) if value is None else value

    def __str__(self) -> str:
        def show(value: PerLayer) -> str:
            if isinstance(value, float):
                return f"{value:.3g}"
            return f"{min(value):.3g} to {max(value):.3g}"

        given = [name for name in MATRICES if getattr(self, name) is not None]
        drawn = "" if self.distribution == "normal" else f", {self.distribution} entries"
        return ", ".join(f"{name} {show(getattr(self, name))}" for name in given) + drawn


@dataclass(frozen=True)
class Biases(Stored):
    """Variances of the bias vectors' entries; each one number, one per layer, or None: no bias.

    `Biases()` are biases that start at zero: they leave the moments alone and receive gradients.

    Args:
        query, key, value, output: of attention's projections.
        ffn_in, ffn_out, gate: of the feed-forward block.

    Raises:
        DomainError: a negative variance.
    """

    _part: ClassVar[str] = "biases"

    query: PerLayer | None = 0.0
    key: PerLayer | None = 0.0
    value: PerLayer | None = 0.0
    output: PerLayer | None = 0.0
    ffn_in: PerLayer | None = 0.0
    ffn_out: PerLayer | None = 0.0
    gate: PerLayer | None = 0.0

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            found = check_layers(f"biases.{f.name}", value, NONNEGATIVE, "pass a variance")
            set_field(self, f.name, found)

    @classmethod
    def torch_default(cls, d_model: int, d_ff: int | None = None) -> Biases:
        """torch.nn.Linear's: uniform with variance 1 / (3 fan_in)."""
        weights = Weights.torch_default(d_model, d_ff)
        return cls(**{f.name: weights.of(f.name) for f in dataclasses.fields(cls)})

    @classmethod
    def of(cls, *matrices: str) -> Biases:
        """Biases that start at zero, only of these matrices.

        Raises:
            DomainError: a matrix that can have none.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in matrices:
            check_choice("matrices", name, names)
        return cls(**{name: 0.0 if name in matrices else None for name in names})

    def layer(self, number: int) -> dict[str, float]:
        """Variances of layer `number`, counted from 1, by matrix that has a bias."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: value if isinstance(value, float) else value[number - 1]
            for name, value in values.items()
            if value is not None
        }


def check_lengths(name: str, variances: Weights | Biases | None, layers: int) -> None:
    """Raise a DomainError if a per-layer list does not have `layers` entries."""
    for f in () if variances is None else dataclasses.fields(variances):
        check_length(f"{name}.{f.name}", getattr(variances, f.name), layers)


def check_length(name: str, value: Any, layers: int) -> None:
    """Raise a DomainError if one per-layer list does not have `layers` entries."""
    if isinstance(value, tuple) and len(value) != layers:
        allowed = f"one number, or one per layer ({layers})"
        raise domain_error(name, f"{len(value)} numbers", allowed)
