"""Where real weights are not what the theory takes them for: independent, centred, Gaussian-like.

Every departure is compared with what independent entries of the same variance would show, and named
with the number found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..show.findings import Row
from .entries import EntryMoments
from .roles import Role, block_of, tensors_of
from .running import grouped, restored

DEVIATIONS = 6
"""Standard errors beyond which a departure is named."""

KRYLOV, CONVERGED = 8, 1e-2
"""Vectors of Lanczos' iteration, and the relative error at which it ends."""


@dataclass(frozen=True)
class WeightStatistics:
    """One matrix against independent entries.

    Attributes:
        spectral: largest squared singular value over the expected (sqrt m + sqrt n)^2 variance.
        spectral_error: the Tracy-Widom scale of that ratio for independent entries.
        stable_rank: squared Frobenius norm over largest squared singular value.
    """

    role: Role
    entries: EntryMoments
    spectral: float
    spectral_error: float
    stable_rank: float

    @classmethod
    def of(cls, role: Role, block: Tensor, entries: EntryMoments) -> WeightStatistics:
        """Of a matrix, stored either way round, whose entries were looked at."""
        matrix = block.detach().float().reshape(-1, block.shape[-1])
        rows, columns = (math.sqrt(n) for n in matrix.shape)
        edge = (rows + columns) ** 2 * entries.square
        usable = entries.square > 0 and math.isfinite(entries.square)
        top = _largest_square(matrix) if usable else 0.0
        # Johnstone 2001: scale (sqrt m + sqrt n)(1/sqrt m + 1/sqrt n)^(1/3) of the top eigenvalue.
        error = (1 / rows + 1 / columns) ** (1 / 3) / (rows + columns)
        total = entries.square * entries.count
        spectral, rank = top / edge if edge else 0.0, total / top if top else 0.0
        return cls(role, entries, spectral, error, rank)


def _largest_square(matrix: Tensor) -> float:
    """Largest squared singular value, by Lanczos' iteration."""
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    width = tall.shape[1]
    if width <= KRYLOV:
        return float(torch.linalg.matrix_norm(tall, 2)) ** 2

    def product(x: Any) -> Any:
        v = torch.as_tensor(x.reshape(-1), dtype=tall.dtype, device=tall.device)
        return (tall.T @ (tall @ v)).cpu().numpy()

    start = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    square = LinearOperator((width, width), matvec=product, dtype=np.float32)
    try:
        (top,) = eigsh(square, k=1, ncv=KRYLOV, tol=CONVERGED, v0=start, return_eigenvectors=False)
    except (ArpackError, ArpackNoConvergence):
        return float(torch.linalg.matrix_norm(tall, 2)) ** 2
    return float(top)


def notes(matrices: Iterable[WeightStatistics]) -> Iterator[str]:
    """Broken assumptions of the matrices, one sentence per role and kind, worst layer first."""
    for name, group in grouped(matrices, lambda result: result.role.full_name).items():
        yield from _matrix_notes(name, [result for result in group if result.entries.square > 0])


def _matrix_notes(name: str, group: list[WeightStatistics]) -> Iterator[str]:
    def worst(kind: list[tuple[float, WeightStatistics]]) -> tuple[float, str]:
        value, result = max(kind, key=lambda pair: abs(pair[0]))
        many = f" and {len(kind) - 1} more" if len(kind) > 1 else ""
        return value, f"{result.role.label}{many}"

    shifted, tailed, spiked = [], [], []
    for result in group:
        e = result.entries
        share = e.mean / math.sqrt(e.square)
        if abs(share) * math.sqrt(e.count) > DEVIATIONS and abs(share) > 0.01:
            shifted.append((share, result))
        if e.kurtosis - 3 > max(DEVIATIONS * math.sqrt(24 / e.count), 0.3):
            tailed.append((e.kurtosis, result))
        if result.spectral > 1 + DEVIATIONS * result.spectral_error:
            spiked.append((result.spectral, result))
    if shifted:
        value, where = worst(shifted)
        yield f"{name}: entries have a mean of {value:.2g} root mean squares, not 0 ({where})"
    if tailed:
        value, where = worst(tailed)
        yield f"{name}: heavy tails, kurtosis {value:.3g} against a normal's 3 ({where})"
    if spiked:
        value, where = worst(spiked)
        rank = min(result.stable_rank for _, result in spiked)
        yield (
            f"{name}: the largest squared singular value is {value:.3g} times that of independent "
            f"entries, stable rank down to {rank:.3g} ({where})"
        )


def alignment_note(query: list[tuple[Role, Tensor]], key: list[tuple[Role, Tensor]]) -> list[str]:
    """Correlation of the entries of query and key matrices of the same layer and shape."""
    off = []
    for (role, q), (_, k) in zip(query, key, strict=False):
        if q.shape != k.shape:
            continue
        q, k = q.detach().double(), k.detach().double()
        share = float((q * k).sum()) / (float(q.norm() * k.norm()) or 1.0)
        if abs(share) * math.sqrt(q.numel()) > DEVIATIONS:
            off.append((share, role.layer))
    if not off:
        return []
    value, layer = max(off, key=lambda row: abs(row[0]))
    return [
        f"query and key are not independent: their entries correlate by {value:.3g} in layer "
        f"{layer}, in {len(off)} layers beyond chance"
    ]


def gain_notes(gains: list[tuple[Role, Tensor]]) -> list[str]:
    """Norm gains that differ from feature to feature."""
    wide = []
    for role, gain in gains:
        g = gain.detach().double()
        size = float(g.square().mean().sqrt())
        if size and float(g.std(correction=0)) > 0.01 * size:
            wide.append((float(g.std(correction=0)) / size, role.parameter))
    if not wide:
        return []
    value, where = max(wide)
    more = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
    return [
        f"norm gains differ between features, by {value:.2g} of their root mean square ({where}"
        f"{more}); one gain for all is assumed"
    ]


# --- layers that are copies of each other ---------------------------------------------------------


Copies = tuple[Role, ...]
"""One role whose blocks are equal, entry by entry, in several layers."""


def copies(blocks: Iterable[tuple[Role, Tensor]]) -> list[Copies]:
    """Matrices and bias vectors of one role that are equal in several layers and not constant.

    What such layers add to the stream is not independent. A matrix that is one parameter of all
    layers stands in one of them only, and is none.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[list[tuple[Role, Tensor]]]] = {}
    for role, block in blocks:
        drawn = role.is_matrix or role.name.endswith(".bias")
        if role.layer < 1 or not drawn or bool((block == block.reshape(-1)[0]).all()):
            continue
        groups = alike.setdefault((role.full_name, tuple(block.shape)), [])
        same = (group for group in groups if torch.equal(group[0][1], block))
        group = next(same, None)
        if group is None:
            groups.append([(role, block)])
        else:
            group.append((role, block))
    several = (group for groups in alike.values() for group in groups if len(group) > 1)
    return [tuple(role for role, _ in group) for group in several]


def copy_notes(repeated: Iterable[Copies]) -> Iterator[str]:
    """One sentence for all roles that are equal in the same layers."""
    for layers, groups in grouped(repeated, lambda roles: tuple(r.layer for r in roles)).items():
        names = [roles[0].full_name for roles in groups]
        names.sort(key=lambda name: name.endswith(".bias"))  # matrices first
        yield (
            f"{', '.join(names)} hold the same entries in layers {', '.join(map(str, layers))}: "
            "what such layers add is not independent and grows faster than predicted "
            "(nn.TransformerEncoder copies one layer; moments.torch.initialize draws each anew)"
        )


def shuffle(module: nn.Module, repeated: Iterable[Copies], seed: int) -> nn.Module:
    """The module, every copy's entries in another order, as if drawn on their own."""
    generator = torch.Generator().manual_seed(seed)
    for block in _copied(module, repeated):
        entries = block.reshape(-1).clone()
        order = torch.randperm(entries.numel(), generator=generator, device="cpu")
        block.copy_(entries[order.to(entries.device)].reshape(block.shape))
    return module


@contextmanager
def shuffled(module: nn.Module, repeated: Iterable[Copies], seed: int) -> Iterator[None]:
    """`shuffle`, and every tensor as it was afterwards."""
    repeated = list(repeated)
    with restored(_copied(module, repeated)):
        shuffle(module, repeated, seed)
        yield


def _copied(module: nn.Module, repeated: Iterable[Copies]) -> list[Tensor]:
    """Blocks that are another layer's, as views."""
    tensors = tensors_of(module)
    return [block_of(tensors, role) for roles in repeated for role in roles[1:]]


def copy_rows(repeated: Iterable[Copies]) -> Iterator[Row]:
    """A failed check for every tensor that is an earlier layer's."""
    for first, *others in repeated:
        for role in others:
            note = f"equal, entry by entry, to {first.label}"
            base = (role.layer, role.full_name, role.label, "correlation with another layer")
            yield Row(*base, 0.0, 1.0, False, note)
