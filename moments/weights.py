"""Variances of the weight matrices, per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checks import check_count, check_in, frozen_layers
from .errors import domain_error
from .symbols import NONNEGATIVE

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


MATRICES = tuple(f.name for f in dataclasses.fields(LayerWeights))


@dataclass(frozen=True)
class Weights:
    """Variances of the entries of every weight matrix; each one number or one per layer.

    Args:
        query, key, value: the projections from d_model to the heads.
        output: the projection of the concatenated heads back to d_model.
        ffn_in, ffn_out: the two matrices of the feed-forward block.

    Raises:
        DomainError: a negative variance.
    """

    query: PerLayer
    key: PerLayer
    value: PerLayer
    output: PerLayer
    ffn_in: PerLayer
    ffn_out: PerLayer

    def __post_init__(self) -> None:
        for name in MATRICES:
            value = getattr(self, name)
            check_in(
                f"weights.{name}", value, NONNEGATIVE, "pass a variance, the square of a deviation"
            )
            object.__setattr__(self, name, frozen_layers(f"weights.{name}", value))

    @classmethod
    def xavier(cls, d_model: int, heads: int, d_ff: int | None = None) -> Weights:
        """Glorot and Bengio's 2 / (fan_in + fan_out).

        Every head of query, key and value is a matrix of its own, d_model to d_model / heads.
        """
        check_count("d_model", d_model)
        check_count("heads", heads)
        d_ff = 4 * d_model if d_ff is None else d_ff
        per_head = 2 / (d_model + d_model / heads)
        ffn = 2 / (d_model + d_ff)
        return cls(per_head, per_head, per_head, 1 / d_model, ffn, ffn)

    @classmethod
    def normal(cls, variance: float, *, output_divisor: float = 1.0) -> Weights:
        """One variance for every matrix, that of `output` and `ffn_out` divided by a number.

        `Weights.normal(0.02**2)` is BERT's; GPT-2's has `output_divisor=2 * layers`.
        """
        check_in("output_divisor", output_divisor, NONNEGATIVE)
        if output_divisor == 0:
            raise domain_error("output_divisor", output_divisor, "positive")
        scaled = variance / output_divisor
        return cls(variance, variance, variance, scaled, variance, scaled)

    @classmethod
    def torch_default(cls, d_model: int, d_ff: int | None = None) -> Weights:
        """torch.nn.Linear's kaiming_uniform(a = sqrt 5): variance 1 / (3 fan_in).

        Its biases, uniform with the same variance, are not part of these weights.
        """
        check_count("d_model", d_model)
        d_ff = 4 * d_model if d_ff is None else d_ff
        from_model = 1 / (3 * d_model)
        return cls(from_model, from_model, from_model, from_model, from_model, 1 / (3 * d_ff))

    def layer(self, number: int) -> LayerWeights:
        """Variances of layer `number`, counted from 1."""
        values = (getattr(self, name) for name in MATRICES)
        return LayerWeights(*[v if isinstance(v, float) else v[number - 1] for v in values])

    def check_layers(self, layers: int) -> None:
        """Raise a DomainError where a per-layer list does not have `layers` entries."""
        for name in MATRICES:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != layers:
                raise domain_error(
                    f"weights.{name}",
                    f"{len(value)} numbers",
                    f"one number, or one per layer ({layers})",
                )

    def replace(self, **changes: Any) -> Weights:
        """A changed copy."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in MATRICES
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Weights:
        """Read what `to_dict` wrote.

        Raises:
            DomainError: a missing or unknown matrix.
        """
        if set(data) != set(MATRICES):
            raise domain_error("weights", sorted(data), f"exactly {', '.join(MATRICES)}")
        return cls(**data)

    def __str__(self) -> str:
        def show(value: PerLayer) -> str:
            if isinstance(value, float):
                return f"{value:.3g}"
            return f"{min(value):.3g} to {max(value):.3g}"  # type: ignore[arg-type, type-var]

        return ", ".join(f"{name} {show(getattr(self, name))}" for name in MATRICES)
