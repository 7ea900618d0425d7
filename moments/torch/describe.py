"""The Transformer that a real module is: its own weights, gains and scales as variances."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, ValidityWarning, domain_error
from ..model.transformer import Transformer
from ..model.weights import MATRICES, Biases
from ..optional import optional
from .architecture import architecture_of
from .assumptions import WeightStatistics, alignment_note, gain_notes, notes
from .checkpoints import load
from .copies import copies, copy_notes
from .expectation import check_fits, model_of_stack
from .logits import measured_scale
from .probe import BlockProbe, Slope, default_batch, probe_or_why
from .roles import ModuleRoles, Role, block_of, roles_of, tensors_of
from .structure import ENCODER
from .units import gain_of
from .wrappers import unwrapped

with optional("torch", "torch"):
    from torch import nn

    from ..simulation.collector import squared_norm

if TYPE_CHECKING:
    import pandas

EXACT = 1e-4
"""A probed multiplier this close to 1, or to LayerNorm Scaling's, is taken for it."""

_TABLES = {
    "token": "token_variance",
    "position": "position_variance",
    "segment": "segment_variance",
    "patch": "patch_variance",
    "class": "class_variance",
    "patch.bias": "bias_variance",
}
_HEAD = {
    "head": "weight_variance",
    "head.transform": "transform_variance",
    "head.transform.bias": "transform_bias_variance",
}


def describe(
    module: nn.Module | str | os.PathLike[str],
    *,
    batch: Any = None,
    seq_len: int | None = None,
    names: Mapping[str, str] | None = None,
    sites: Iterable[Any] | None = None,
    architecture: Transformer | None = None,
) -> Transformer:
    """A module or checkpoint as a Transformer with its real variances, layer by layer.

    A variance is the mean square of a matrix's entries, a norm's gain its root mean square;
    residual multipliers and LayerNorm Scaling are measured by running the module once.

    Args:
        module: of a known family, or any with `names`, `sites` and `architecture`; or the path of
            a checkpoint's folder, or of a .safetensors file with config.json beside it.
        batch: what to run it on; None: random input, where the module says what it takes.
        seq_len: tokens per sequence; None: what the config allows, or 128.
        names, sites: for a module of one's own, as in `initialize`.
        architecture: what the module cannot tell itself.

    Raises:
        DomainError: the architecture is not known, or the checkpoint cannot be read.

    Warns:
        ValidityWarning: for every assumption of the theory that the weights break, with numbers:
            layers that are copies of one another, means that are not zero, heavy tails, dominant
            singular values, query and key that are not independent, gains that differ between
            features.
    """
    if isinstance(module, str | os.PathLike):
        module = load(module)
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise domain_error("module", type(module).__name__, "an nn.Module or a checkpoint's path")
    found = roles_of(module, names, sites)
    model = architecture or (architecture_of(module, seq_len) if names is None else None)
    if model is None:
        raise DomainError(
            "the module's architecture is not known: pass architecture=moments.Transformer(...)"
        )
    check_fits(model, found, None)
    reading = _Reading(module, found, model, batch)
    described = reading.stack("")
    if model.encoder is not None:
        described = described.replace(encoder=reading.stack(ENCODER))
    for note in reading.notes():
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return described


def weight_statistics(
    module: nn.Module, *, names: Mapping[str, str] | None = None
) -> pandas.DataFrame:
    """Every matrix of a module against independent entries of its variance.

    Columns: layer, role, parameter, variance (mean square), mean, kurtosis, spectral (largest
    squared singular value over that of independent entries), stable_rank.
    """
    import pandas

    found = roles_of(module, names)
    tensors = tensors_of(module)
    rows = []
    for role in found.roles:
        if role.is_matrix:
            s = WeightStatistics.of(role, block_of(tensors, role))
            rows.append(
                {
                    "layer": role.layer,
                    "role": role.full_name,
                    "parameter": role.label,
                    "variance": s.entries.square,
                    "mean": s.entries.mean,
                    "kurtosis": s.entries.kurtosis,
                    "spectral": s.spectral,
                    "stable_rank": s.stable_rank,
                }
            )
    return pandas.DataFrame(rows)


class _Reading:
    """Tensors and probed multipliers of a module, by stack."""

    def __init__(
        self, module: nn.Module, found: ModuleRoles, model: Transformer, batch: Any
    ) -> None:
        self.module, self.found, self.model = module, found, model
        tensors = tensors_of(module)
        self.blocks = {role: block_of(tensors, role) for role in found.roles}
        self.probes, self.why = probe_or_why(module, found, batch, epsilon=model.norm_epsilon)
        given = default_batch(module, found) if batch is None else batch
        self.batch = given if self.probes else batch

    def stack(self, stack: str) -> Transformer:
        """One stack's Transformer."""
        model = model_of_stack(self.model, stack)
        assert model.weights is not None
        roles = {(r.layer, r.name): r for r in self.blocks if r.stack == stack}
        layers = range(1, model.layers + 1)
        changes: dict[str, Any] = {}
        weights = {
            name: [self._square(roles[n, name]) for n in layers]
            for name in MATRICES
            if all((n, name) in roles for n in layers)
        }
        changes["weights"] = model.weights.replace(**weights)
        biases = {
            field.name: _one([self._square(roles[n, field.name + ".bias"]) for n in layers])
            for field in dataclasses.fields(Biases)
            if all((n, field.name + ".bias") in roles for n in layers)
        }
        changes["biases"] = Biases.of().replace(**biases) if biases else None
        changes |= self._scales(model, stack, roles)
        changes |= self._outside(model, stack, roles)
        return model.replace(**changes)

    def _square(self, role: Role) -> float:
        block = self.blocks[role]
        return float(squared_norm(block) / block.numel())

    def _gains(self, model: Transformer, roles: Mapping[tuple[int, str], Role]) -> np.ndarray:
        gains = np.ones((model.layers, 2))
        for n in range(1, model.layers + 1):
            for column, block in enumerate(("attention", "ffn")):
                role = roles.get((n, f"{block}.norm.gain"))
                if role is None and model.parallel:
                    role = roles.get((n, "attention.norm.gain"))
                if role is not None:
                    gains[n - 1, column] = self._gain(role)
        return gains

    def _gain(self, role: Role) -> float:
        """Root mean square."""
        gain = gain_of(self.module, role, self.blocks[role]).double()
        return float(gain.square().mean().sqrt())

    def _scales(
        self, model: Transformer, stack: str, roles: Mapping[tuple[int, str], Role]
    ) -> dict[str, Any]:
        """Residual scales, LayerNorm Scaling and gains."""
        shape = (model.layers, 2)
        skip, branch, output = np.ones(shape), np.ones(shape), np.ones(shape)
        gains = self._gains(model, roles)
        probes = [p for p in self.probes if p.block.stack == stack]
        if not probes:
            return {"norm_gain": _fewest(gains)}
        for p in probes:
            at = (p.block.layer - 1, p.block.column)
            skip[at], branch[at] = _value(p.skip, 1.0), _value(p.branch, 1.0)
            mean = self._mean_gain(p, roles)
            output[at] = _value(p.norm_output, mean) / mean if mean else 1.0
        scaled = (output * np.sqrt(np.arange(1, model.layers + 1))[:, None]) - 1
        lns = model.layers > 1 and bool(np.all(np.abs(scaled) < 20 * EXACT))
        if not lns:
            gains = gains * np.where(np.abs(output - 1) < 20 * EXACT, 1.0, output)
        return {
            "skip_scale": _fewest(skip),
            "branch_scale": _fewest(branch),
            "layernorm_scaling": lns,
            "norm_gain": _fewest(gains),
        }

    def _mean_gain(self, p: BlockProbe, roles: Mapping[tuple[int, str], Role]) -> float:
        """Slope of the norm's own output upon the normalised input: its gain, averaged."""
        role = roles.get((p.block.layer, f"{p.block.name}.norm.gain")) or roles.get(
            (p.block.layer, "attention.norm.gain")
        )
        if role is None:
            return 1.0
        return float(gain_of(self.module, role, self.blocks[role]).double().mean())

    def _outside(
        self, model: Transformer, stack: str, roles: Mapping[tuple[int, str], Role]
    ) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for field, layer, table in (
            ("embedding", 0, _TABLES),
            ("head", model.layers + 1, _HEAD),
        ):
            part = getattr(model, field)
            if part is None:
                continue
            values = {
                name: self._table(roles[layer, role])
                for role, name in table.items()
                if (layer, role) in roles and getattr(part, name, None) is not None
            }
            after = roles.get((layer, "final.norm.gain"))
            if field == "head" and part.norm and after is not None:
                values["norm_gain"] = self._gain(after)
            changes[field] = part.replace(**values)
        if "head" in changes and not stack and self.batch is not None:
            scale = measured_scale(self.module, self.found, model, self.batch)
            wanted = changes["head"].output_scale
            if scale is not None and abs(scale.value / wanted - 1) > EXACT:
                changes["head"] = changes["head"].replace(output_scale=scale.value)
        return changes

    def _table(self, role: Role) -> float:
        """Mean square of a table without its padding row, which is never drawn."""
        block = self.blocks[role]
        owner = self.module.get_submodule(role.parameter.rpartition(".")[0])
        padding = getattr(owner, "padding_idx", None)
        rows = len(block) - int(padding is not None and not bool(block[padding].any()))
        width = block.numel() / len(block)
        return float(squared_norm(block) / (width * rows))

    def notes(self) -> list[str]:
        """Broken assumptions, in words."""
        matrices = [
            WeightStatistics.of(role, block)
            for role, block in self.blocks.items()
            if role.is_matrix and role.name in MATRICES
        ]
        found = [*copy_notes(copies(self.blocks.items())), *notes(matrices)]
        pairs = [
            [(role, self.blocks[role]) for role in self.found.named(name)]
            for name in ("query", "key")
        ]
        found += alignment_note(*pairs)
        found += gain_notes(
            [
                (role, gain_of(self.module, role, block))
                for role, block in self.blocks.items()
                if role.name.endswith("norm.gain")
            ]
        )
        if not self.probes:
            found.append(f"residual multipliers were not measured and are taken as 1: {self.why}")
        return found


def _value(slope: Slope | None, default: float) -> float:
    """A multiplier; what cannot be measured is the default, what is 1 to rounding is 1."""
    if slope is None or not np.isfinite(slope.value):
        return default
    return 1.0 if abs(slope.value - 1) < EXACT else slope.value


def _one(values: list[float]) -> Any:
    """One number where all layers have the same."""
    return values[0] if len(set(values)) == 1 else values


def _fewest(values: np.ndarray) -> Any:
    """One number where all agree, one per layer where both blocks do, else pairs."""
    if np.ptp(values) < EXACT * abs(values).max():
        return float(values.mean()) if np.ptp(values) else float(values.flat[0])
    if np.all(np.abs(values[:, 0] - values[:, 1]) < EXACT * np.abs(values[:, 0])):
        return [float(v) for v in values[:, 0]]
    return [tuple(float(v) for v in row) for row in values]
