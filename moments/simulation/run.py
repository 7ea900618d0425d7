"""`simulate`: run the declared model's torch twin over draws of its weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moments.checks import check_count
from moments.draws import Draw, WeightGradient
from moments.errors import DomainError, domain_error
from moments.inputs import check_ids, check_moments
from moments.measurement import Measurement
from moments.optional import optional
from moments.transformer import Transformer

with optional("torch", "torch"):
    import torch
    from torch import Tensor

    from moments.simulation.collector import Collector, squared_norm
    from moments.simulation.network import (
        Watch,
        check_supported,
        draw_tables,
        draw_weights,
        run_embedding,
        run_layer,
    )
    from moments.simulation.sampling import exchangeable_normal, generator


def simulate(
    model: Transformer,
    *,
    variance: float = 1.0,
    correlation: float = 0.0,
    grad_variance: float = 1.0,
    grad_correlation: float = 0.0,
    seeds: int = 8,
    batch: int = 4,
    device: str = "cpu",
    seed: int = 0,
    token_ids: Any = None,
    dtype: str = "float32",
    progress: bool = False,
) -> Measurement:
    """Measure the declared model by running it, with fresh Gaussian weights in every draw.

    Nothing of the theory enters. Peak memory is one layer's graph and N + 1 stream tensors: the
    backward pass draws each layer's weights and masks again from that layer's own seed.

    Args:
        model: the declaration.
        variance, correlation: of the Gaussian tensor that enters layer 1; ignored with token_ids.
        grad_variance, grad_correlation: of the Gaussian gradient at the last layer's output.
        seeds: draws of the weights.
        batch: independent sequences that share one draw.
        device: where torch runs, such as "cpu" or "cuda".
        seed: of all random numbers; the same seed on the same device gives the same result.
        token_ids: integers (L,), repeated `batch` times with masks of their own, or (B, L), which
            sets the batch; they are looked up in fresh embedding tables. All of one segment.
        dtype: "float32" or "float64".
        progress: write one line per draw to standard error.

    Returns:
        A Measurement; its weight gradients are squared norms per sequence.

    Raises:
        DomainError: an argument out of range, or a feature the twin lacks.
        MomentsError: torch is not installed, or numbers overflowed.
    """
    if not isinstance(model, Transformer):
        raise DomainError(f"model must be a moments.Transformer, not {type(model).__name__}")
    check_supported(model)
    for name, value, least in (("seeds", seeds, 1), ("batch", batch, 1), ("seed", seed, 0)):
        check_count(name, value, least=least)
    check_moments("", variance, correlation, model.seq_len)
    check_moments("grad_", grad_variance, grad_correlation, model.seq_len)
    if dtype not in ("float32", "float64"):
        raise domain_error("dtype", dtype, "'float32' or 'float64'")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise domain_error("device", device, f"a device torch can use ({error})") from None
    ids = None if token_ids is None else _ids(model, token_ids, batch)
    twin = _Twin(
        model=model,
        signal=(float(variance), float(correlation)),
        gradient=(float(grad_variance), float(grad_correlation)),
        batch=batch if ids is None else len(ids),
        ids=None if ids is None else torch.as_tensor(ids, device=place),
        device=place,
        dtype=getattr(torch, dtype),
    )
    draws = []
    for draw in range(seeds):
        draws.append(twin.run(seed, draw))
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    return Measurement.from_draws(draws, batch=twin.batch, source="the simulated declaration")


def _ids(model: Transformer, token_ids: Any, batch: int) -> np.ndarray:
    if model.embedding is None:
        raise DomainError("token_ids need tables to be looked up in: declare model.embedding")
    ids = check_ids(token_ids, model.seq_len, "token_ids").astype(np.int64)
    if ids.max() >= model.embedding.vocab_size:
        raise domain_error(
            "token_ids", int(ids.max()), f"below vocab_size = {model.embedding.vocab_size}"
        )
    return np.repeat(ids, batch, axis=0) if np.ndim(token_ids) == 1 else ids


@dataclass(frozen=True)
class _Twin:
    """The declared model with everything a draw needs but its random numbers.

    `signal` and `gradient` are (variance, correlation); `ids` (batch, L), None for Gaussian input.
    """

    model: Transformer
    signal: tuple[float, float]
    gradient: tuple[float, float]
    batch: int
    ids: Tensor | None
    device: Any
    dtype: Any

    def run(self, seed: int, draw: int) -> Draw:
        """One forward and backward pass under the weights of draw number `draw`."""
        layers = self.model.layers
        # Stream 0 of random numbers is the input's, n is layer n's, the last the gradient's.
        random = partial(generator, self.device, seed, draw)
        with torch.no_grad():
            stream = [self._enter(random(0))[0]]
            for n in range(1, layers):
                stream.append(self._layer(n, stream[-1], random(n))[0])

        seen = Collector()
        norms: list[tuple[WeightGradient, float]] = []
        received = exchangeable_normal(self._shape, *self.gradient, random(layers + 1), self.dtype)
        for n in range(layers, 0, -1):
            entering = stream.pop().requires_grad_()
            leaving, weights = self._layer(n, entering, random(n), seen)
            received, *pulled = torch.autograd.grad(
                leaving, [entering, *weights.values()], received
            )
            norms[:0] = self._norms(n, weights, pulled)
        leaving, leaves = self._enter(random(0), seen)
        pulled = torch.autograd.grad(leaving, list(leaves.values()), received)
        if self.ids is not None:
            norms[:0] = self._norms(0, leaves, pulled)
        return Draw(seen.signal, seen.gradient, dict(norms))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.batch, self.model.seq_len, self.model.d_model

    def _enter(
        self, random: torch.Generator, seen: Collector | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The tensor that enters layer 1, and the leaves it was made of."""
        watch = _watcher(seen, 0)
        if self.ids is None:
            x = exchangeable_normal(self._shape, *self.signal, random, self.dtype)
            return watch(x.requires_grad_().clone(), "stream"), {"input": x}
        embedding = self.model.embedding
        assert embedding is not None
        _, seq_len, d_model = self._shape
        tables = draw_tables(embedding, seq_len, d_model, random, self.dtype)
        return watch(run_embedding(embedding, self.ids, tables, random, watch), "stream"), tables

    def _layer(
        self, number: int, x: Tensor, random: torch.Generator, seen: Collector | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The tensor that leaves a layer, and the layer's weights."""
        weights = draw_weights(self.model, number, random, self.dtype)
        return run_layer(self.model, number, x, weights, random, _watcher(seen, number)), weights

    def _norms(
        self, layer: int, leaves: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> list[tuple[WeightGradient, float]]:
        # Independent sequences receive independent gradients, so their squared norms add up.
        return [
            (WeightGradient(layer, name, name), squared_norm(gradient) / self.batch)
            for name, gradient in zip(leaves, gradients, strict=True)
        ]


def _watcher(seen: Collector | None, layer: int) -> Watch:
    if seen is None:
        return lambda x, site: x
    return lambda x, site: seen.watch(x, [(layer, site)])
