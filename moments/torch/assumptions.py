"""Deviations of real weights from the theory's assumptions: independent, centred, Gaussian-like.

Every statistic is compared with that of independent entries of the same variance.
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
"""Standard errors from which a deviation is reported."""

KRYLOV, CONVERGED = 8, 1e-2
"""Vectors of Lanczos' iteration, and its relative tolerance."""


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of a matrix relative to independent entries.

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
        """The statistics of a matrix, transposed or not, with the moments of its entries."""
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
    """The largest squared singular value, by Lanczos' iteration."""
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
    """Violated assumptions of matrices, in one sentence per role and kind with the worst layer."""
    for name, group in grouped(matrices, lambda result: result.role.full_name).items():
        yield from _matrix_notes(name, [result for result in group if result.entries.square > 0])


def _matrix_notes(name: str, group: list[WeightStatistics]) -> Iterator[str]:
    def worst(pairs: list[tuple[float, WeightStatistics]]) -> tuple[float, str]:
        value, result = max(pairs, key=lambda pair: abs(pair[0]))
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        return value, f"{result.role.label}{more}"

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
    """A sentence if the entries of query and key matrices of a layer are correlated."""
    correlated = []
    for (role, q), (_, k) in zip(query, key, strict=False):
        if q.shape != k.shape:
            continue
        q, k = q.detach().double(), k.detach().double()
        share = float((q * k).sum()) / (float(q.norm() * k.norm()) or 1.0)
        if abs(share) * math.sqrt(q.numel()) > DEVIATIONS:
            correlated.append((share, role.layer))
    if not correlated:
        return []
    value, layer = max(correlated, key=lambda row: abs(row[0]))
    return [
        f"query and key are not independent: their entries correlate by {value:.3g} in layer "
        f"{layer}, in {len(correlated)} layers beyond chance"
    ]


def gain_notes(gains: list[tuple[Role, Tensor]]) -> list[str]:
    """A sentence if gains of norms differ between features."""
    unequal = []
    for role, gain in gains:
        g = gain.detach().double()
        size = float(g.square().mean().sqrt())
        if size and float(g.std(correction=0)) > 0.01 * size:
            unequal.append((float(g.std(correction=0)) / size, role.parameter))
    if not unequal:
        return []
    value, where = max(unequal)
    more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
    return [
        f"norm gains differ between features, by {value:.2g} of their root mean square ({where}"
        f"{more}); one gain for all is assumed"
    ]


# --- layers that are copies of each other ---------------------------------------------------------


Copies = tuple[Role, ...]
"""One role in several layers in which its entries are equal."""


def copies(blocks: Iterable[tuple[Role, Tensor]]) -> list[Copies]:
    """Matrices and biases of one role that are equal in several layers and not constant.

    The outputs of such layers are not independent. A parameter that layers share has a role in one
    of them only, and does not count.
    """
    known: dict[tuple[str, tuple[int, ...]], list[tuple[Tensor, list[Role]]]] = {}
    for role, block in blocks:
        drawn = role.is_matrix or role.name.endswith(".bias")
        if role.layer < 1 or not drawn or bool((block == block.reshape(-1)[0]).all()):
            continue
        groups = known.setdefault((role.full_name, tuple(block.shape)), [])
        equal = next((roles for first, roles in groups if torch.equal(first, block)), None)
        if equal is None:
            groups.append((block, [role]))
        else:
            equal.append(role)
    return [tuple(roles) for groups in known.values() for _, roles in groups if len(roles) > 1]


def copy_notes(repeated: Iterable[Copies]) -> Iterator[str]:
    """Sentences on copies, one for all roles that are equal in the same layers."""
    for layers, groups in grouped(repeated, lambda roles: tuple(r.layer for r in roles)).items():
        names = [roles[0].full_name for roles in groups]
        names.sort(key=lambda name: name.endswith(".bias"))  # matrices first
        yield (
            f"{', '.join(names)} hold the same entries in layers {', '.join(map(str, layers))}: "
            "what such layers add is not independent and grows faster than predicted "
            "(nn.TransformerEncoder copies one layer; moments.torch.initialize draws each anew)"
        )


def shuffle(module: nn.Module, repeated: Iterable[Copies], seed: int) -> nn.Module:
    """The module with the entries of every copy permuted, as if drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    for block in _copied(module, repeated):
        entries = block.reshape(-1).clone()
        order = torch.randperm(entries.numel(), generator=generator, device="cpu")
        block.copy_(entries[order.to(entries.device)].reshape(block.shape))
    return module


@contextmanager
def shuffled(module: nn.Module, repeated: Iterable[Copies], seed: int) -> Iterator[None]:
    """`shuffle` a module within the context."""
    repeated = list(repeated)
    with restored(_copied(module, repeated)):
        shuffle(module, repeated, seed)
        yield


def _copied(module: nn.Module, repeated: Iterable[Copies]) -> list[Tensor]:
    """The copies of earlier layers' tensors, as views."""
    tensors = tensors_of(module)
    return [block_of(tensors, role) for roles in repeated for role in roles[1:]]


def copy_rows(repeated: Iterable[Copies]) -> Iterator[Row]:
    """A failed check for every copy of an earlier layer's tensor."""
    for first, *others in repeated:
        for role in others:
            note = f"equal, entry by entry, to {first.label}"
            where = role.layer, role.full_name, role.label, "correlation with another layer"
            yield Row(*where, 0.0, 1.0, False, note)
