"""`simulate`: run the declared model's torch twin over draws of its weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..errors import DomainError, domain_error, optional
from ..formulas.checks import check_count
from ..model.transformer import Transformer
from ..prediction.measurement import Measurement
from ..prediction.stack import check_moments

with optional("torch", "torch"):
    import torch

    from .functions import activation
    from .inputs import Given, batch_of, entering, targets_of
    from .twin import Twin


def simulate(
    model: Transformer,
    *,
    variance: float = 1.0,
    correlation: float = 0.0,
    grad_variance: float | None = None,
    grad_correlation: float | None = None,
    seeds: int = 8,
    batch: int = 4,
    device: str = "cpu",
    seed: int = 0,
    token_ids: Any = None,
    segment_ids: Any = None,
    document_ids: Any = None,
    pixels: Any = None,
    targets: Any = None,
    encoder_inputs: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    progress: bool = False,
) -> Measurement:
    """Measure the declared model by running it, with fresh weights in every draw.

    Nothing of the theory enters. Peak memory is one layer's graph and N + 1 stream tensors (or some
    64 MB): the backward pass draws each layer's weights and masks again from that layer's own seed.

    Args:
        model: the declaration.
        variance, correlation: of the Gaussian tensor that enters layer 1; ignored with token_ids
            or pixels.
        grad_variance, grad_correlation: of the Gaussian gradient at the last layer's output. None:
            that of the head's loss where one is declared, else 1 and 0.
        seeds: draws of the weights.
        batch: independent sequences that share one draw.
        device: where torch runs, such as "cpu" or "cuda".
        seed: of all random numbers; the same seed on the same device gives the same result.
        token_ids: integers (L,), repeated `batch` times with masks of their own, or (B, L), which
            sets the batch; they are looked up in fresh embedding tables.
        segment_ids: likewise for the segment table; None: all of one segment.
        document_ids: (L,) or (B, L), which document each token of a packed row belongs to, one run
            of tokens each: see `predict`.
        pixels: images (B, channels, height, width) for a patch embedding, which set the batch, or
            one, repeated `batch` times.
        targets: token ids (L,) or (B, L) that each token is to predict, -100 where there is none,
            or classes (B,) for a classifier. None: the next token for a causal head that reads
            token_ids, else chosen at random (tokens by Zipf's law), the same in every draw.
        encoder_inputs: for a model with an encoder, those of `variance`, `correlation`,
            `token_ids`, `segment_ids` and `pixels` that describe its input.
        dtype: "float32" or "float64".
        progress: write one line per draw to standard error.

    Returns:
        A Measurement, whose `encoder` is that of the model's encoder. Its weight gradients are
        those of the loss, or of several token_ids or pixels, as one batch; else squared norms per
        sequence.

    Raises:
        DomainError: an argument out of range, or an input or target that the model does not take.
        MomentsError: torch is not installed, or numbers overflowed.
    """
    if not isinstance(model, Transformer):
        raise DomainError(f"model must be a moments.Transformer, not {type(model).__name__}")
    activation(model.activation)
    for name, value, least in (("seeds", seeds, 1), ("batch", batch, 1), ("seed", seed, 0)):
        check_count(name, value, least=least)
    injected = _injected(model, grad_variance, grad_correlation)
    if dtype not in ("float32", "float64"):
        raise domain_error("dtype", dtype, "'float32' or 'float64'")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise domain_error("device", device, f"a device torch can use ({error})") from None
    given = Given(variance, correlation, token_ids, segment_ids, pixels, document_ids)
    other = Given.of_encoder(model, encoder_inputs)
    batch = batch_of(batch, (given, other))
    joint, precision = injected is None, getattr(torch, dtype)
    read = entering(model, given, batch, place, precision, joint)
    encoder = None
    if model.encoder is not None:
        of_encoder = entering(model.encoder, other, batch, place, precision, read.joint)
        encoder = Twin(model.encoder, of_encoder, batch, place, precision, stream=(1,))
    twin = Twin(
        model,
        read,
        batch,
        place,
        precision,
        injected,
        targets_of(model, targets, read, batch, seed, place),
        encoder,
    )
    draws = []
    for draw in range(seeds):
        draws.append(twin.run(seed, draw))
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    return Measurement.from_draws(draws, batch=batch, source="the simulated declaration")


def _injected(
    model: Transformer, variance: float | None, correlation: float | None
) -> tuple[float, float] | None:
    """Moments of the gradient injected at the last layer's output; None: the loss gives it."""
    has_loss = model.head is not None and model.head.loss is not None
    if has_loss and variance is None and correlation is None:
        return None
    found = 1.0 if variance is None else variance, 0.0 if correlation is None else correlation
    check_moments("grad_", *found, model.seq_len)
    return float(found[0]), float(found[1])
