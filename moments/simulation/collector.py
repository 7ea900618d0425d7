"""Raw moments of tensors in the forward and backward pass, without storing activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import MomentsError, domain_error
from ..prediction.draws import Place, RawMoments

_BLOCK = 1 << 20


def _wide(x: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if the device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def raw_moments(x: Tensor, mask: Tensor | None = None) -> RawMoments:
    """Moments about zero of `x`, accumulated in float64.

    Pairs need no L x L product: sum_{i != j} x_i x_j = |sum_i x_i|^2 - sum_i x_i^2.

    Args:
        x: (batch, L, features).
        mask: (batch, L), false at padding, which is ignored; for packed rows the document numbers
            from 1, and pairs are within documents. None: no padding.
    """
    batch, seq_len, features = x.shape
    wide = _wide(x.detach())
    if mask is None:
        count, pairs = np.full(seq_len, float(batch)), batch * seq_len * (seq_len - 1)
        over_tokens = wide.sum(1)
    else:
        numbers = mask.to(wide.device, torch.int64)
        kept = (numbers > 0).double()
        wide = wide * kept[..., None]
        member = (
            numbers[..., None] == torch.arange(1, int(numbers.max()) + 1).to(numbers)
        ).double()
        length = member.sum(1)
        count, pairs = kept.sum(0).cpu().numpy(), int((length * (length - 1)).sum())
        over_tokens = member.transpose(1, 2) @ wide
    sums = torch.stack((over_tokens.sum(), torch.linalg.vector_norm(over_tokens).square()))
    of_tokens = torch.linalg.vector_norm(wide, dim=(0, 2)).square()
    # A single transfer from the device.
    total, total_square, *of_each = torch.cat((sums, of_tokens)).tolist()
    sum_of_squares, tokens = math.fsum(of_each), float(count.sum()) * features
    return RawMoments(
        total / tokens,
        sum_of_squares / tokens,
        (total_square - sum_of_squares) / (pairs * features) if pairs else 0.0,
        np.array(of_each) / (np.maximum(count, 1) * features),
    )


def squared_norm(x: Tensor) -> float:
    """Squared Frobenius norm, accumulated in float64 by blocks to avoid a large copy."""
    flat = x.detach().reshape(-1)
    return sum(float(_wide(block).square().sum()) for block in flat.split(_BLOCK))


class Collector:
    """Collects moments of every tensor shown to it and, as backward reaches it, of its gradient.

    Attributes:
        signal: moments by place, in the order the places were shown.
        sequences: size of the batch, 0 until something was shown.

    Args:
        mask: (batch, L), false at padding, or the documents of packed rows; None: neither.
        batch_first: tensors are (batch, L, features), else (L, batch, features).
    """

    def __init__(self, mask: Tensor | None = None, *, batch_first: bool = True) -> None:
        self.signal: dict[Place, RawMoments] = {}
        self.sequences = 0
        self._gradient: dict[Place, RawMoments] = {}
        self._mask = mask
        self._batch_first = batch_first
        self._rows: tuple[int, ...] = ()

    def watch(self, x: Tensor, places: Sequence[Place]) -> Tensor:
        """Record `x` under every one of `places`, and its gradient when there is one.

        Raises:
            MomentsError: a place is passed twice in a forward pass, or `x` has no gradient.
            DomainError: `x` is not (batch, L, features), or holds inf or nan.
        """
        if not x.requires_grad:
            raise MomentsError(
                f"{_words(places[0])}: no gradient reaches the tensor, which was made under "
                "torch.no_grad() or detached: let it pass"
            )
        if again := [place for place in places if place in self.signal]:
            raise MomentsError(f"{_words(again[0])} is passed twice in one forward pass")
        self.signal.update(dict.fromkeys(places, self._moments(x, places[0], "activation")))

        def on_gradient(gradient: Tensor) -> None:
            moments = self._moments(gradient, places[0], "gradient")
            self._gradient.update(dict.fromkeys(places, moments))

        x.register_hook(on_gradient)
        return x

    @property
    def gradient(self) -> dict[Place, RawMoments]:
        """Gradient moments; zero at places from which the loss was never reached."""
        return {
            place: self._gradient.get(place)
            or RawMoments(0.0, 0.0, 0.0, np.zeros_like(moments.token_square))
            for place, moments in self.signal.items()
        }

    def _moments(self, x: Tensor, place: Place, kind: str) -> RawMoments:
        if x.ndim == 2 and len(x) == math.prod(self._rows):
            x = x.unflatten(0, self._rows)  # the tokens of all sequences, one after the other
        if x.ndim == 2:
            x = x[None] if self._batch_first else x[:, None]
        if x.ndim != 3:
            raise domain_error(
                _words(place),
                tuple(x.shape),
                "a (batch, tokens, features) tensor",
                "map another tensor",
            )
        self._rows = tuple(x.shape[:2])
        x = x if self._batch_first else x.transpose(0, 1)
        self.sequences = len(x)
        moments = raw_moments(x, self._mask)
        if not np.isfinite(moments.square):
            remedy = "use float64, fewer layers or a scheme that keeps the variance"
            if x.dtype in (torch.float16, torch.bfloat16):
                remedy = "pass the module in single precision (module.float())"
            raise MomentsError(f"{_words(place)}: the {kind} overflows {x.dtype}; {remedy}")
        return moments


def _words(place: Place) -> str:
    return f"layer {place[0]}, {place[1]}"
