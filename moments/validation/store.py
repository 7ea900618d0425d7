"""Stored simulations of the grid from `benchmarks/whole_models.py run`: every mean and standard
error with six digits, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DomainError, brief
from ..files import read_object
from ..prediction.draws import QUANTITIES
from .grid import Configuration

Array = NDArray[np.float64]

ROWS = ("values", "stderr", "profile", "profile_stderr")
KEPT = (*QUANTITIES, "log_grad_variance")


@dataclass(frozen=True, eq=False)
class StoredSimulation:
    """The stored simulation of one configuration.

    Attributes:
        digest: of the configuration that was simulated.
        seeds: draws of the weights, one sequence each.
        seconds: wall time of the simulation.
        values, stderr: (N + 1,) by quantity: variance, correlation, grad_variance,
            grad_correlation, and log_grad_variance, the mean over draws of the logarithm.
        profile, profile_stderr: gradient variance by token, (L,), by layer (0 and N // 2); empty
            without a causal mask.
    """

    digest: str
    seeds: int
    seconds: float
    values: Mapping[str, Array]
    stderr: Mapping[str, Array]
    profile: Mapping[int, Array]
    profile_stderr: Mapping[int, Array]

    def covers(self, configuration: Configuration) -> bool:
        """Whether all compared numbers are stored, with the expected shapes."""
        points = (configuration.layers + 1,)
        streams = [part.get(name) for part in (self.values, self.stderr) for name in KEPT]
        profiles = [*self.profile.values(), *self.profile_stderr.values()]
        return (
            all(row is not None and row.shape == points for row in streams)
            and all(row.shape == (configuration.seq_len,) for row in profiles)
            and set(self.profile) == set(self.profile_stderr) <= set(range(points[0]))
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredSimulation:
        """Read an entry of the file."""
        rows: list[dict[Any, Array]] = []
        for name in ROWS:
            key: Any = int if name.startswith("profile") else str
            rows.append({key(k): np.array(row, dtype=float) for k, row in data[name].items()})
        return cls(str(data["digest"]), int(data["seeds"]), float(data["seconds"]), *rows)


def packaged() -> Path:
    """The file in the package."""
    return Path(str(files("moments") / "data" / "validation.json"))


def load(path: Path | None = None) -> dict[str, StoredSimulation]:
    """Stored simulations by configuration name; None: those of the package.

    Raises:
        DomainError: no such file, or not of simulations.
    """
    path = packaged() if path is None else path
    data = read_object(path, "data", "a file of simulations")
    try:
        return {
            name: StoredSimulation.from_dict(entry) for name, entry in data["measurements"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DomainError(f"{path} holds no simulations ({brief(reason)})") from None
