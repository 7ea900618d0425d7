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
    from .inputs import InputArguments, batch_of, input_of, targets_of
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
        variance, correlation: moments of Gaussian tokens at layer 1's input; unused with token_ids
            or pixels.
        grad_variance, grad_correlation: moments of a Gaussian gradient at the last layer's output.
            None: the gradient of the head's loss if one is declared, else 1 and 0.
        seeds: number of draws of the weights.
        batch: number of independent sequences per draw.
        device: a torch device, such as "cpu" or "cuda".
        seed: of all random numbers; the same seed on the same device gives the same result.
        token_ids: integers (L,), repeated `batch` times with independent masks, or (B, L), which
            sets the batch; their embedding tables are drawn anew.
        segment_ids: likewise for the segment table; None: a single segment.
        document_ids: (L,) or (B, L), the document of each token of a packed row, in runs: see
            `predict`.
        pixels: images (B, channels, height, width) for a patch embedding, which set the batch, or
            one, repeated `batch` times.
        targets: token ids (L,) or (B, L) to predict at each token, -100 for none, or classes (B,)
            for a classifier. None: the next token for a causal head with token_ids, else drawn at
            random (tokens by Zipf's law), the same in every draw.
        encoder_inputs: `variance`, `correlation`, `token_ids`, `segment_ids` or `pixels` of the
            encoder's input.
        dtype: "float32" or "float64".
        progress: write one line per draw to standard error.

    Returns:
        A Measurement, with that of the encoder as `encoder`. Weight gradients are of the whole
        batch for a loss, or for several token_ids or pixels; else squared norms per sequence.

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
    arguments = InputArguments(variance, correlation, token_ids, segment_ids, pixels, document_ids)
    encoder_arguments = InputArguments.of_encoder(model, encoder_inputs)
    batch = batch_of(batch, (arguments, encoder_arguments))
    joint, precision = injected is None, getattr(torch, dtype)
    source = input_of(model, arguments, batch, place, precision, joint)
    encoder = None
    if model.encoder is not None:
        encoder_source = input_of(
            model.encoder, encoder_arguments, batch, place, precision, source.joint
        )
        encoder = Twin(model.encoder, encoder_source, batch, place, precision, stream=(1,))
    twin = Twin(
        model,
        source,
        batch,
        place,
        precision,
        injected,
        targets_of(model, targets, source, batch, seed, place),
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
    """Moments of the Gaussian gradient at the last layer's output; None: it is the loss's."""
    has_loss = model.head is not None and model.head.loss is not None
    if has_loss and variance is None and correlation is None:
        return None
    variance = 1.0 if variance is None else variance
    correlation = 0.0 if correlation is None else correlation
    check_moments("grad_", variance, correlation, model.seq_len)
    return float(variance), float(correlation)
