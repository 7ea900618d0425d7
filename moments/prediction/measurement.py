"""Measured moments of a network at every point, with standard errors over draws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MomentsError, domain_error
from ..files import as_frame, plain
from .draws import (
    CENTRED_SITES,
    OUTPUT_SITES,
    QUANTITIES,
    STREAM,
    Array,
    Draw,
    Place,
    RawMoments,
    Statistic,
    WeightGradient,
    common_places,
    mean_over_draws,
    moments_over_draws,
    typical_over_draws,
)

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 1


@dataclass(frozen=True, repr=False, eq=False)
class Measurement:
    """Signal and gradient moments of a network that was run, over draws of its weights.

    The arrays are those of a `Prediction`: index 0 is the tensor entering layer 1, index n the one
    leaving layer n. Each `*_stderr` is the standard error over draws, nan if `seeds` is 1.

    Attributes:
        layers, seq_len: N and L.
        seeds, batch: number of draws, and of sequences per draw.
        source: description of the network.
        variance, correlation, grad_variance, grad_correlation: (N + 1,). A correlation is the mean
            pair covariance over the mean variance, 0 without pairs or variance.
        grad_variance_typical: (N + 1,) geometric mean over draws.
        token_variance, token_grad_variance: (N + 1, L).
        samples: variance, correlation, grad_variance and grad_correlation by draw, (seeds, N + 1).
        loss, logit_variance: means over draws, None without a loss or head; a cross-entropy is in
            nats.
        variance_stderr, correlation_stderr, grad_variance_stderr, grad_correlation_stderr,
            grad_variance_typical_stderr, token_variance_stderr, token_grad_variance_stderr,
            loss_stderr, logit_variance_stderr: standard errors.
        site_rows, weight_gradient_rows: rows of `to_frame` and `weight_gradients`.
        encoder: measurement of the encoder; None without one.
    """

    layers: int
    seq_len: int
    seeds: int
    batch: int
    source: str
    variance: Array
    variance_stderr: Array
    correlation: Array
    correlation_stderr: Array
    grad_variance: Array
    grad_variance_stderr: Array
    grad_correlation: Array
    grad_correlation_stderr: Array
    grad_variance_typical: Array
    grad_variance_typical_stderr: Array
    token_variance: Array
    token_variance_stderr: Array
    token_grad_variance: Array
    token_grad_variance_stderr: Array
    samples: Mapping[str, Array]
    loss: float | None
    loss_stderr: float | None
    logit_variance: float | None
    logit_variance_stderr: float | None
    site_rows: tuple[Mapping[str, Any], ...]
    weight_gradient_rows: tuple[Mapping[str, Any], ...]
    encoder: Measurement | None = None

    @classmethod
    def from_draws(cls, draws: Sequence[Draw], *, batch: int, source: str) -> Measurement:
        """Compute the statistics of one or more draws with the same places and a whole stream."""
        places = common_places([draw.signal for draw in draws])
        layers = max(layer for layer, site in places if site not in OUTPUT_SITES)
        if missing := [n for n in range(layers + 1) if (n, STREAM) not in draws[0].signal]:
            raise MomentsError(f"no '{STREAM}' was seen at layers {missing}; map one to each layer")

        statistics = {place: _statistics(draws, place) for place in places}
        stream = [statistics[n, STREAM] for n in range(layers + 1)]
        for point in stream:
            point["grad_variance_typical"] = typical_over_draws(point["grad_variance"].samples)
        rows = []
        for (layer, site), point in statistics.items():
            row: dict[str, Any] = {"layer": layer, "site": site}
            for name in ("mean", *QUANTITIES):
                row |= point[name].row(name)
            rows.append(row)
        weight_rows = []
        for weight in draws[0].weight_gradients:
            norm = mean_over_draws(np.array([draw.weight_gradients[weight] for draw in draws]))
            weight_rows.append(weight._asdict() | norm.row("squared_norm"))
        encoders = [draw.encoder for draw in draws if draw.encoder is not None]
        encoder = None
        if encoders:
            encoder = cls.from_draws(encoders, batch=batch, source=f"the encoder of {source}")

        def array(name: str, part: str) -> Array:
            return np.array([getattr(point[name], part) for point in stream])

        result: dict[str, tuple[Any, Any]] = {
            name: (array(name, "value"), array(name, "stderr"))
            for name in (*QUANTITIES, "grad_variance_typical")
        }
        result["token_variance"] = _by_token([draw.signal for draw in draws], layers)
        result["token_grad_variance"] = _by_token([draw.gradient for draw in draws], layers)
        result["loss"] = _scalar([draw.loss for draw in draws])
        result["logit_variance"] = _scalar([draw.logit_variance for draw in draws])
        return cls(
            layers=layers,
            seq_len=result["token_variance"][0].shape[1],
            seeds=len(draws),
            batch=batch,
            source=source,
            **{name: value for name, (value, _) in result.items()},
            **{f"{name}_stderr": stderr for name, (_, stderr) in result.items()},
            samples={name: array(name, "samples").T for name in QUANTITIES},
            site_rows=tuple(rows),
            weight_gradient_rows=tuple(weight_rows),
            encoder=encoder,
        )

    def to_frame(self) -> pandas.DataFrame:
        """One row per site of the network, in the order of the forward pass.

        Columns: layer, site, then mean, variance, correlation, grad_variance and grad_correlation,
        each followed by its `_stderr`.
        """
        return as_frame(list(self.site_rows))

    def weight_gradients(self) -> pandas.DataFrame:
        """Squared gradient norm of every parameter.

        Columns: layer (0 before the first, N + 1 after the last), weight (query, key, value,
        output, ffn_in, ffn_out, ... or the parameter's name), parameter, squared_norm,
        squared_norm_stderr. With a simulated loss, several texts, or a measured module it is the
        norm of the batch's gradient, with an injected gradient that per sequence. A simulated table
        shared by layers has a row for the gradient from each layer, and one in layer 0.
        """
        columns = [*WeightGradient._fields, "squared_norm", "squared_norm_stderr"]
        return as_frame(list(self.weight_gradient_rows), columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, with a format version; nan becomes None."""
        fields = vars(self) | {"encoder": self.encoder and self.encoder.to_dict()}
        result: dict[str, Any] = plain({"format_version": FORMAT_VERSION} | fields)
        return result

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`.

        Raises:
            DomainError: another format version.
        """
        fields = dict(stored)
        version = fields.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise domain_error("format_version", version, f"{FORMAT_VERSION}", "measure again")
        for name, value in fields.items():
            if isinstance(value, list) and not name.endswith("_rows"):
                fields[name] = np.array(value, dtype=float)
        fields["samples"] = {k: np.array(v, dtype=float) for k, v in fields["samples"].items()}
        for name in ("site_rows", "weight_gradient_rows"):
            fields[name] = tuple(
                {k: math.nan if v is None else v for k, v in row.items()} for row in fields[name]
            )
        if fields.get("encoder") is not None:
            fields["encoder"] = cls.from_dict(fields["encoder"])
        for name in ("loss", "logit_variance"):
            if fields[name] is not None and fields[f"{name}_stderr"] is None:
                fields[f"{name}_stderr"] = math.nan
        return cls(**fields)

    def __repr__(self) -> str:
        lines = [
            f"Measurement of {self.source}: {self.layers} layers, {self.seq_len} tokens, "
            f"{self.seeds} draw{'s' if self.seeds > 1 else ''}, batch {self.batch}"
        ]
        lines.append("layer" + "".join(f"{name:>25}" for name in QUANTITIES))
        for n in _some(self.layers + 1):
            cells = "".join(
                f"{_with_error(getattr(self, q)[n], getattr(self, f'{q}_stderr')[n]):>25}"
                for q in QUANTITIES
            )
            lines.append(f"{n:>5}{cells}")
        if self.loss is not None and self.loss_stderr is not None:
            lines.append(f"loss {_with_error(self.loss, self.loss_stderr)}")
        if self.logit_variance is not None and self.logit_variance_stderr is not None:
            lines.append(
                f"logit variance {_with_error(self.logit_variance, self.logit_variance_stderr)}"
            )
        return "\n".join([*lines, *([] if self.encoder is None else [repr(self.encoder)])])


def _statistics(draws: Sequence[Draw], place: Place) -> dict[str, Statistic]:
    """The mean and the `QUANTITIES` at one place."""
    signal = [draw.signal[place] for draw in draws]
    gradient = moments_over_draws([draw.gradient[place] for draw in draws], centred=False)
    result = moments_over_draws(signal, place[1] in CENTRED_SITES)
    result["grad_variance"] = gradient["variance"]
    result["grad_correlation"] = gradient["correlation"]
    return result


def _by_token(draws: Sequence[Mapping[Place, RawMoments]], layers: int) -> tuple[Array, Array]:
    """(N + 1, L) mean over draws of the stream's variance by token, and its standard error."""
    tokens = np.array([[one[n, STREAM].token_square for n in range(layers + 1)] for one in draws])
    if len(draws) == 1:
        return tokens[0], np.full_like(tokens[0], math.nan)
    return tokens.mean(0), tokens.std(0, ddof=1) / math.sqrt(len(draws))


def _scalar(values: list[float | None]) -> tuple[float | None, float | None]:
    """Mean over draws and its standard error; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None
    statistic = mean_over_draws(np.array(known))
    return statistic.value, statistic.stderr


def _some(count: int) -> list[int]:
    """At most 13 evenly spaced indices, including both ends."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, 13))})


def _with_error(value: float, stderr: float) -> str:
    return f"{value:.5g}" if math.isnan(stderr) else f"{value:.5g} +- {stderr:.2g}"


def last_grad_kernel(measurement: Measurement) -> np.ndarray:
    """The measured gradient at the last layer as an (L, L) kernel, for `predict(grad_kernel)`: the
    mean covariance is distributed in proportion to the tokens' standard deviations."""
    variance = measurement.token_grad_variance[-1]
    deviation = np.sqrt(variance)
    kernel = np.outer(deviation, deviation)
    off_diagonal = kernel.sum() - np.trace(kernel)
    length = variance.size
    mean = measurement.grad_correlation[-1] * variance.mean() * length * (length - 1)
    # Tokens without a target have no gradient; others correlate by at least -1/(active - 1).
    active = max(int((variance > 0).sum()), 2)
    share = float(np.clip(mean / off_diagonal, -1 / (active - 1), 1.0)) if off_diagonal > 0 else 0.0
    return np.where(np.eye(length, dtype=bool), kernel, share * kernel)
