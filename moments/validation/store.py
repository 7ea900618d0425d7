"""Stored simulations of the grid: six digits of every mean and standard error, as compact JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DomainError, brief, domain_error
from ..files import locked, read_object, replacing
from ..prediction.draws import QUANTITIES
from ..prediction.measurement import Measurement
from .grid import Configuration

Array = NDArray[np.float64]

FORMAT_VERSION = 1
DIGITS = 6
ROWS = ("values", "stderr", "profile", "profile_stderr")
KEPT = (*QUANTITIES, "log_grad_variance")


@dataclass(frozen=True, eq=False)
class StoredSimulation:
    """What was kept of one configuration's simulation.

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

    @classmethod
    def from_measurement(
        cls, configuration: Configuration, measured: Measurement, seconds: float
    ) -> StoredSimulation:
        """Keep the stream's moments of a simulation."""
        values = {name: getattr(measured, name) for name in QUANTITIES}
        stderr = {name: getattr(measured, f"{name}_stderr") for name in QUANTITIES}
        typical = measured.grad_variance_typical
        values["log_grad_variance"] = np.log(typical)
        stderr["log_grad_variance"] = measured.grad_variance_typical_stderr / typical
        kept = (0, configuration.layers // 2) if configuration.causal else ()
        return cls(
            digest=configuration.digest,
            seeds=measured.seeds,
            seconds=seconds,
            values=values,
            stderr=stderr,
            profile={n: measured.token_grad_variance[n] for n in kept},
            profile_stderr={n: measured.token_grad_variance_stderr[n] for n in kept},
        )

    def covers(self, configuration: Configuration) -> bool:
        """Whether every number that is compared is there, of the shape that it must have."""
        points = (configuration.layers + 1,)
        streams = [part.get(name) for part in (self.values, self.stderr) for name in KEPT]
        profiles = [*self.profile.values(), *self.profile_stderr.values()]
        return (
            all(row is not None and row.shape == points for row in streams)
            and all(row.shape == (configuration.seq_len,) for row in profiles)
            and set(self.profile) == set(self.profile_stderr) <= set(range(points[0]))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, rounded."""
        return {
            "digest": self.digest,
            "seeds": self.seeds,
            "seconds": round(self.seconds, 2),
            **{name: _lists(getattr(self, name)) for name in ROWS},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredSimulation:
        """Read what `to_dict` wrote."""
        rows: list[dict[Any, Array]] = []
        for name in ROWS:
            key: Any = int if name.startswith("profile") else str
            rows.append({key(k): np.array(row, dtype=float) for k, row in data[name].items()})
        return cls(str(data["digest"]), int(data["seeds"]), float(data["seconds"]), *rows)


def _lists(rows: Mapping[Any, Array]) -> dict[str, list[float]]:
    return {str(key): [float(f"{x:.{DIGITS}g}") for x in row] for key, row in rows.items()}


def packaged() -> Path:
    """The file that comes with the package."""
    return Path(str(files("moments") / "data" / "validation.json"))


def load(path: Path | None = None) -> dict[str, StoredSimulation]:
    """Stored simulations by configuration name; None: those that come with the package.

    Raises:
        DomainError: no such file, or not one that `save` wrote.
    """
    path = packaged() if path is None else path
    if not os.path.exists(path):
        raise domain_error("data", str(path), "a file of simulations", "simulate the grid first")
    data = read_object(path, "data", "a file of simulations")
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise domain_error("format_version", version, f"{FORMAT_VERSION}", "simulate again")
    try:
        return {
            name: StoredSimulation.from_dict(entry) for name, entry in data["measurements"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise DomainError(f"{path} holds no simulations ({brief(said)})") from None


def save(path: Path, stored: Mapping[str, StoredSimulation]) -> None:
    """Write all simulations, a line each; a reader never sees half a file.

    Raises:
        DomainError: the file cannot be written.
    """
    lines = [
        f"{json.dumps(name)}:{json.dumps(stored[name].to_dict(), separators=(',', ':'))}"
        for name in sorted(stored)
    ]
    body = ",\n".join(lines)
    with replacing(path) as partial:
        partial.write_text(
            f'{{"format_version":{FORMAT_VERSION},"measurements":{{\n{body}\n}}}}\n',
            encoding="utf-8",
        )


def add(path: Path, name: str, entry: StoredSimulation) -> dict[str, StoredSimulation]:
    """Add one simulation to a file that other processes may be adding to.

    Of two entries of the same configuration the one with more seeds stays.

    Returns:
        Everything that the file now holds.

    Raises:
        DomainError: a file that holds no simulations, or cannot be written.
    """
    with locked(path):
        stored = load(path) if path.exists() else {}
        there = stored.get(name)
        if there is None or there.digest != entry.digest or there.seeds < entry.seeds:
            stored[name] = entry
            save(path, stored)
        return stored


def simulate_one(
    configuration: Configuration, *, seeds: int | None = None, seed: int = 0, device: str = "cpu"
) -> StoredSimulation:
    """Simulate one configuration, batch 1; None: its own number of seeds.

    `seed`, the digest and the device give the random numbers; configurations share none.
    """
    from ..simulation.run import simulate

    began = time.perf_counter()
    measured = simulate(
        configuration.model,
        **configuration.ends,
        seeds=configuration.seeds if seeds is None else seeds,
        batch=1,
        seed=int(configuration.digest[:8], 16) + seed,
        device=device,
    )
    return StoredSimulation.from_measurement(configuration, measured, time.perf_counter() - began)


def run_grid(
    configurations: Iterable[Configuration],
    path: Path,
    *,
    seeds: int | None = None,
    device: str = "cpu",
    progress: Callable[[Configuration], None] | None = None,
) -> dict[str, StoredSimulation]:
    """Simulate what `path` does not hold yet, the cheapest first, saving after each one.

    An interrupted run continues where it stopped: an entry is kept if it is of the same
    configuration and has at least as many seeds. Runs side by side add to one file.

    Args:
        configurations: what to simulate.
        path: where results are kept; other entries in it stay.
        seeds: draws of the weights; None: each configuration's own number.
        device: where torch runs, such as "cpu" or "cuda".
        progress: called with every configuration as it is done, or found done.

    Returns:
        Everything that `path` now holds.

    Raises:
        DomainError: a file that holds no simulations, or cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise domain_error("data", str(path), "a file in a folder that is there")
    stored = load(path) if path.exists() else {}
    for c in sorted(configurations, key=lambda c: c.cost * c.seeds):
        known = stored.get(c.name)
        wanted = c.seeds if seeds is None else seeds
        if known is None or known.digest != c.digest or known.seeds < wanted:
            stored = add(path, c.name, simulate_one(c, seeds=wanted, device=device))
        if progress is not None:
            progress(c)
    return stored
