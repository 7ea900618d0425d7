"""Measurement of a real module's sharpness, with which `Prediction.sharpness` is compared.

It shares no formula with the theory: products with the Hessian are autograd's second pass, extreme
eigenvalues those of Lanczos' method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import DomainError, MomentsError, optional
from ..formulas.checks import check_choice, check_count
from ..step.sharpness import OPTIMIZERS, Sharpness
from .anatomy import measured_parts
from .measure import Inputs, Loss
from .running import built, in_mode

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS = 20
"""Steps of Lanczos' method, after which the extreme eigenvalues have converged to a percent."""

_NONE = 1e-7
"""Size of a gradient relative to the largest up to which it is rounding (of biases of keys)."""


def measure_sharpness(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any,
    optimizer: str,
    *,
    loss: Loss | None = None,
    seeds: int = 1,
    seed: int = 0,
    steps: int = STEPS,
) -> Sharpness:
    """The extreme eigenvalues of the (preconditioned) Hessian of a real module on one batch.

    The preconditioner of Adam is the root mean square of a matrix's gradient entries on the batch,
    one number for each matrix, also within fused parameters; SGD has none. The module runs without
    dropout; its weights and gradients are not changed.

    Args:
        module: as in `measure`; a factory, called with seed, seed + 1, ..., gives fresh weights for
            every draw.
        batch: keyword arguments of the module, or its one positional argument.
        optimizer: "sgd", "adam" or "adamw".
        loss: takes the module's output and the batch, returns a scalar; None: the module's own.
        seeds, seed: draws.
        steps: of Lanczos' method, each two passes through the module.

    Returns:
        Means over draws with their standard errors, and every parameter's share of the largest
        eigenvector.

    Raises:
        DomainError: another optimizer, or no loss.
        MomentsError: the module could not be read.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    for name, value in {"seeds": seeds, "steps": steps}.items():
        check_count(name, value)
    ends, shares = [], dict[tuple[int, str], float]()
    for draw in range(seeds):
        with torch.enable_grad():
            with torch.random.fork_rng():
                target = built(module, seed + draw)
                hessian = _Hessian(target, batch, loss, optimizer != "sgd")
            values, vector = hessian.lanczos(steps, seed + draw)
        ends.append((values[-1], values[0]))
        for key, share in hessian.shares(vector).items():
            shares[key] = shares.get(key, 0.0) + share / seeds
    rows = tuple((layer, name, share) for (layer, name), share in sorted(shares.items()))
    return Sharpness.of(optimizer, ends, rows)


class _Hessian:
    """Products with P^(-1/2) H P^(-1/2) of a module's loss on a batch."""

    def __init__(self, module: nn.Module, batch: Any, loss: Loss | None, adaptive: bool) -> None:
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.named:
            raise DomainError("every parameter is frozen: let those that train require gradients")
        inputs = Inputs.of(module, batch, loss)
        self.parts = measured_parts(module, batch)[1]
        # the fused kernels of attention have no second derivative
        with in_mode(module, False), sdpa_kernel(SDPBackend.MATH):
            ends = list(self.named.values())
            top = inputs.run("sharpness").top
            grads = torch.autograd.grad(top, ends, create_graph=True, allow_unused=True)
        self.used = {name: g for name, g in zip(self.named, grads, strict=True) if g is not None}
        self.scales = self._scales() if adaptive else None

    def _scales(self) -> Mapping[str, Tensor]:
        """1/sqrt(P) of every entry; 0 of parts without a gradient."""
        sizes = {name: g.detach().pow(2).mean().sqrt() for name, g in self.used.items()}
        largest = max(float(size) for size in sizes.values())
        scales = {name: torch.empty_like(g).copy_(sizes[name]) for name, g in self.used.items()}
        for row, part in self.parts:
            if row.parameter in scales:
                own = part.of(self.used[row.parameter].detach()).pow(2).mean().sqrt()
                part.of(scales[row.parameter]).fill_(own)
        return {
            name: torch.where(size > _NONE * largest, size.clamp_min(1e-300) ** -0.5, 0.0)
            for name, size in scales.items()
        }

    def __call__(self, vector: Tensor) -> Tensor:
        steps = self._scaled(self._split(vector))
        products = torch.autograd.grad(
            list(self.used.values()),
            [self.named[name] for name in self.used],
            list(steps.values()),
            retain_graph=True,
            allow_unused=True,
        )
        filled = {
            name: torch.zeros_like(steps[name]) if product is None else product.detach()
            for name, product in zip(self.used, products, strict=True)
        }
        return torch.cat([one.reshape(-1) for one in self._scaled(filled).values()])

    def _scaled(self, steps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.scales is None:
            return dict(steps)
        return {name: step * self.scales[name] for name, step in steps.items()}

    def _split(self, vector: Tensor) -> dict[str, Tensor]:
        shapes = [self.named[name].shape for name in self.used]
        pieces = vector.split([shape.numel() for shape in shapes])
        named = zip(self.used, pieces, shapes, strict=True)
        return {name: piece.view(shape) for name, piece, shape in named}

    def lanczos(self, steps: int, seed: int) -> tuple[np.ndarray[Any, Any], Tensor]:
        """Eigenvalues in a Krylov space, rising, and the eigenvector of the largest; every basis
        vector is orthogonalised against all earlier ones."""
        like = next(iter(self.used.values()))
        count = sum(self.named[name].numel() for name in self.used)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        vector = torch.randn(count, generator=generator, dtype=like.dtype).to(like.device)
        basis, diagonal, norms = [vector / vector.norm()], [], []
        for _ in range(min(steps, count)):
            new = self(basis[-1])
            diagonal.append(float(new @ basis[-1]))
            earlier = torch.stack(basis)
            for _ in range(2):
                new = new - earlier.T @ (earlier @ new)
            norms.append(float(new.norm()))
            if norms[-1] <= 1e-6 * max(map(abs, diagonal)):
                break
            basis.append(new / norms[-1])
        if not np.all(np.isfinite(diagonal)):
            raise MomentsError("the module's second derivatives are not finite")
        size = len(diagonal)
        matrix = np.diag(diagonal) + np.diag(norms[: size - 1], 1) + np.diag(norms[: size - 1], -1)
        values, vectors = np.linalg.eigh(matrix)
        top = torch.as_tensor(vectors[:, -1], dtype=like.dtype, device=like.device)
        return values, torch.stack(basis[:size]).T @ top

    def shares(self, vector: Tensor) -> dict[tuple[int, str], float]:
        """The squared norm of a vector's entries by part of a parameter."""
        steps = self._split(vector)
        return {
            (row.layer, row.weight): float(part.of(steps[row.parameter]).pow(2).sum())
            for row, part in self.parts
            if row.parameter in steps
        }
