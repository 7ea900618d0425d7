"""Real torch modules: measure what their signal and gradient do, by hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from moments.checks import check_count
from moments.errors import DomainError, MomentsError, domain_error
from moments.hook_points import HookPoint, WeightPart, hook_points, weight_parts
from moments.measurement import STREAM, Draw, Measurement, WeightGradient
from moments.optional import optional

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn

    from moments.simulation.collector import Collector, squared_norm

__all__ = ["HookPoint", "hook_points", "measure"]

Loss = Callable[[Any, Any], Tensor]


def measure(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any,
    *,
    loss: Loss | None = None,
    seeds: int = 1,
    seed: int = 0,
    sites: Iterable[tuple[int, str, str, str]] | None = None,
    progress: bool = False,
) -> Measurement:
    """Run a real module in training mode and measure every site, forward and backward.

    The module is left as it was: its mode, its gradients and torch's random state are restored.

    Args:
        module: a Hugging Face BERT or GPT-2, bare or with its head, an nn.TransformerEncoder, or
            any module with `sites`. With a module its weights stay as they are and the draws differ
            in dropout alone, so that standard errors say nothing about other weights; with a
            factory, called with seed, seed + 1, ..., every draw has fresh weights.
        batch: keyword arguments of the module as a mapping of arrays or tensors, or its one
            positional argument. Tokens that `attention_mask` or `src_key_padding_mask` leave out
            are left out of every moment.
        loss: takes the module's output and the batch as tensors, returns a scalar. None: the
            module's own loss; a causal head without labels predicts the next token; a module
            without a head gets a white gradient of variance 1 at its output.
        seeds: draws.
        seed: of the draws; the same seed on the same device gives the same result.
        sites: (layer, site, submodule path, "input" or "output") for each point of a module that is
            not known; see `hook_points`, which shows them for one that is.
        progress: write one line per draw to standard error.

    Returns:
        A Measurement. Its `logit_variance` is the mean squared logit; weight gradients are of the
        loss on the whole batch.

    Raises:
        DomainError: an argument out of range, a path that is not in the module, or a masked-language
            model without labels.
        MomentsError: the module's layers are not known, or a tensor is not differentiable.
    """
    check_count("seeds", seeds)
    check_count("seed", seed, least=0)
    given = None if sites is None else tuple(HookPoint(*site) for site in sites)  # type: ignore[arg-type]
    draws, name, size = [], "", 0
    for draw in range(seeds):
        with torch.random.fork_rng():
            target = module if isinstance(module, nn.Module) else _built(module, seed + draw)
            state = np.random.SeedSequence((seed, draw)).generate_state(1)[0]
            torch.manual_seed(int(state))
            result, size = _draw(target, batch, loss, given)
        draws.append(result)
        name = type(target).__name__
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    return Measurement.from_draws(draws, batch=size, source=name)


def _built(factory: Callable[[int], nn.Module], seed: int) -> nn.Module:
    if not callable(factory):
        raise domain_error("module", type(factory).__name__, "an nn.Module or factory(seed)")
    module = factory(seed)
    if not isinstance(module, nn.Module):
        raise domain_error("module", type(module).__name__, "a factory that returns an nn.Module")
    return module


def _draw(
    module: nn.Module, batch: Any, loss: Loss | None, sites: tuple[HookPoint, ...] | None
) -> tuple[Draw, int]:
    """One pass forward and backward, and the number of sequences it held."""
    points = hook_points(module) if sites is None else sites
    weights = weight_parts(module, sites)
    tensors = _tensors(batch, _device(module))
    if loss is None:
        tensors = _with_labels(module, tensors)
    collector = Collector(_kept(tensors), batch_first=_batch_first(module))
    with _training(module), _watched(module, points, collector):
        output = module(**tensors) if isinstance(tensors, dict) else module(tensors)
        top, cotangent = _objective(output, tensors, loss)
        leaves = {n: p for n, p in module.named_parameters() if p.requires_grad}
        # Differentiating with respect to the last stream too keeps a frozen module measurable.
        found = torch.autograd.grad(
            top, [*leaves.values()] or _inputs(tensors), cotangent, allow_unused=True
        )
    gradients = dict(zip(leaves, found, strict=False))
    logits = getattr(output, "logits", None)
    draw = Draw(
        signal=collector.signal,
        gradient=collector.gradient,
        weight_gradients=_norms(weights, gradients),
        loss=None if cotangent is not None else float(top.detach()),
        logit_variance=None if logits is None else squared_norm(logits) / logits.numel(),
    )
    return draw, _sequences(tensors, collector)


def _device(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
