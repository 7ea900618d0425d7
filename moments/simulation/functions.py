"""Random numbers, activations and normalisations in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import domain_error
from ..formulas.activation import activation_names, leaky_slope, registered_function
from ..model.transformer import Transformer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "relu_squared": lambda x: torch.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "erf": torch.erf,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation as a torch function; a registered one is evaluated in numpy.

    Raises:
        DomainError: an unknown activation.
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    registered = registered_function(name)
    if registered is not None:
        return lambda x: _Registered.apply(x, *registered)
    slope = leaky_slope(name)
    if slope is not None:
        return lambda x: functional.leaky_relu(x, float(slope))
    raise domain_error("activation", name, f"one of {', '.join(activation_names())}")


class _Registered(torch.autograd.Function):
    """A function and its derivative on numpy arrays, evaluated on the CPU in double precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, derivative: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        return _through_numpy(x, function)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return gradient * _through_numpy(x, ctx.derivative), None, None


def _through_numpy(x: Tensor, function: Any) -> Tensor:
    values = torch.as_tensor(function(x.detach().cpu().double().numpy()))
    return values.to(x.dtype).to(x.device)


def normalise(
    x: Tensor, kind: str, epsilon: float, *, groups: int = 1, dyt_alpha: float = math.nan
) -> Tensor:
    """Normalise each of `groups` slices of the last axis by a norm of this `kind`."""
    if kind == "dyt":
        return torch.tanh(dyt_alpha * x)
    norm = functional.rms_norm if kind == "rmsnorm" else functional.layer_norm
    sliced = x.unflatten(-1, (groups, -1))
    return norm(sliced, sliced.shape[-1:], eps=epsilon).flatten(-2)


def affine_norm(
    model: Transformer,
    x: Tensor,
    weights: Mapping[str, Tensor],
    site: str,
    gain: float = 1.0,
    epsilon: float | None = None,
) -> Tensor:
    """The model's normalisation of x (..., d_model) with "SITE.gain" and "SITE.bias" of `weights`.

    `gain` is a constant gain if `weights` has none; `epsilon` None: the model's.
    """
    z = normalise(
        x,
        model.normalization,
        model.norm_epsilon if epsilon is None else epsilon,
        groups=model.norm_groups,
        dyt_alpha=model.dyt_alpha,
    )
    learned, bias = weights.get(f"{site}.gain"), weights.get(f"{site}.bias")
    if learned is not None:
        z = z * learned
    elif gain != 1:
        z = z * gain
    return z if bias is None else z + bias


# --- random numbers -------------------------------------------------------------------------------


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator for a `key`, independent of other keys and of global state."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


def exchangeable_normal(
    shape: tuple[int, int, int],
    variance: float,
    correlation: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """Gaussian (batch, L, features): one variance, one covariance for every pair of tokens.

    The covariance (1 - r) I + r 1 1^T over tokens has the eigenvalue 1 + (L - 1) r on the token
    mean and 1 - r off it; scaling white noise by their roots serves all r from -1/(L - 1) to 1.
    """
    seq_len = shape[1]
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    shared = noise.mean(1, keepdim=True)
    along = math.sqrt(max(1 + (seq_len - 1) * correlation, 0.0))
    across = math.sqrt(1 - correlation)
    return math.sqrt(variance) * (across * (noise - shared) + along * shared)


def dropout(x: Tensor, drop_prob: float, generator: torch.Generator) -> Tensor:
    """Zero entries with probability `drop_prob` and scale the kept ones by 1/(1 - drop_prob)."""
    if drop_prob == 0:
        return x
    kept = torch.empty_like(x, requires_grad=False).bernoulli_(1 - drop_prob, generator=generator)
    return x * kept.div_(1 - drop_prob)
