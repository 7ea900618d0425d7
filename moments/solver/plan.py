"""The result of a solver: a model with solved weights, and its distance to the target."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, domain_error
from ..files import MOST, Shown, as_frame, parse_json
from ..model.fields import set_field
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from .entering import check_inputs
from .goals import matrices_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FORMAT_VERSION = 1

OFF = 1e-6
"""Width times weight variance below which a block's output counts as zero."""


@dataclass(frozen=True)
class Plan(Shown):
    """Weight variances and scales of every layer.

    Attributes:
        model: the Transformer with these values.
        objective: name of the scheme or objective, or names of several objectives.
        title: the objective in words.
        target: one number, one per layer, or one per objective.
        free: names of the free variables.
        residual: largest relative distance to the target in a prediction of `model`. For the scheme
            "dslm", the distance of its blocks' output variances to 1; 0 for other schemes, which
            have no target.
        feasible: whether the target is reached to `tolerance`, by a value inside the range of the
            free variables and not merely in its limit.
        nearest: the value nearest to a target that is not reached, else None.
        tolerance: of `residual`; None for a scheme of printed constants, which promises none.
        inputs: arguments with which `predict` repeats the solver's prediction.
        hint: why the target is unusual for this model, in words, or "".
    """

    model: Transformer
    objective: str
    title: str = ""
    target: float | tuple[float, ...] | None = None
    free: tuple[str, ...] = ()
    residual: float = 0.0
    feasible: bool = True
    nearest: float | tuple[float, ...] | None = None
    tolerance: float | None = 1e-9
    inputs: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""

    def __post_init__(self) -> None:
        set_field(self, "inputs", as_lists(self.inputs))

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: variances of the matrices, scales, temperature."""
        model = self.model
        skip, branch = model.by_block("skip_scale"), model.by_block("branch_scale")
        used = matrices_of(model)
        rows = []
        for n in range(1, model.layers + 1):
            weights = model.layer_weights(n)
            rows.append(
                {
                    "layer": n,
                    **{name: getattr(weights, name) for name in used},
                    "attention_skip_scale": skip[n - 1, 0],
                    "attention_branch_scale": branch[n - 1, 0],
                    "ffn_skip_scale": skip[n - 1, 1],
                    "ffn_branch_scale": branch[n - 1, 1],
                    "norm_scale": model.norm_scales[n - 1],
                    "temperature": model.temperatures[n - 1],
                }
            )
        return as_frame(rows)

    def plot(self, name: str | None = None) -> Figure:
        """Weight variances and scales layer by layer, and the resulting signal and gradient, with
        the model's `name` in the title."""
        from ..show.plot import plot_plan

        return plot_plan(self, name)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {"format": FORMAT_VERSION, "model": self.model.to_dict()}
        return json.dumps(data, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of `to_json`.

        Raises:
            DomainError: no such text, or another format version.
        """
        try:
            data = parse_json(text, "plan")
        except DomainError:
            raise
        except ValueError as error:
            raise domain_error("plan", text[:40], f"the JSON of a plan ({error})") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read the parsed JSON of `to_json`.

        Raises:
            DomainError: no mapping, another format version, or a field of a wrong type.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT_VERSION:
            raise domain_error("plan", data, f"a plan of format {FORMAT_VERSION}")
        names = {f.name for f in dataclasses.fields(cls)}
        fields: dict[str, Any] = {name: value for name, value in data.items() if name in names}
        for name in ("model", "objective"):
            if name not in fields:
                raise domain_error("plan", data, f"a plan, which has {name!r}")
        fields["model"] = Transformer.from_dict(fields["model"])
        for name, value in fields.items():
            allowed, words = _STORED.get(name, (lambda _: True, ""))
            if not allowed(value):
                raise domain_error(f"plan field {name!r}", value, words)
        check_inputs(fields.get("inputs", {}))
        for name in ("free", "target", "nearest"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        return cls(**fields)

    def __str__(self) -> str:
        head = f"Plan: {self.title or self.objective}"
        if self.free:
            head += f", by {', '.join(self.free)}"
        frame = self.to_frame()
        short = frame if len(frame) <= 12 else frame.iloc[[0, 1, 2, -2, -1]]
        table = short.to_string(index=False, float_format="{:.4g}".format)
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{head} ({self.state}){hint}\n{table}"

    @property
    def state(self) -> str:
        """The plan's distance to its target, in words."""
        if self.feasible:
            return f"residual {self.residual:.2g}"
        return f"NOT FEASIBLE: {self.missed}"

    @property
    def missed(self) -> str:
        """The value nearest to a target that is not reached, in words; "" if it is reached."""
        if self.feasible:
            return ""
        near, wanted = np.asarray(self.nearest), np.asarray(self.target)
        names = " and ".join(self.free)
        vanishing = self._vanishing
        if near.shape == wanted.shape and np.allclose(near, wanted, self.tolerance or 0.0, 0.0):
            limit = (
                f"vanishing {names}, where blocks add nothing"
                if vanishing
                else f"a change of {names} without end"
            )
            return (
                f"{shown(self.target)} is approached in the limit of {limit}, and never reached: "
                "ask for another target, or free something else"
            )
        text = f"the nearest that {names} can give is {shown(self.nearest)}"
        if vanishing and self.objective in ("final_variance", "stream_variance"):
            text += ", which the skip connection brings alone: ask for more, or free skip_scale"
        elif vanishing:
            text += ", with blocks that add nothing"
        return text

    @property
    def _vanishing(self) -> bool:
        """Whether the free variables ended so small that blocks add nothing."""
        weights: Any = self.model.weights
        matrices = [name for name in self.free if name in MATRICES]
        sizes = [self.model.d_model * np.max(weights.of(name)) for name in matrices]
        if {"branch_scale", "k"} & set(self.free):
            sizes.append(np.max(self.model.by_block("branch_scale")) ** 2)
        return bool(sizes) and min(sizes) < OFF

    def __repr__(self) -> str:
        by = f", by {', '.join(self.free)}" if self.free else ""
        return f"Plan({self.title or self.objective}{by}, {self.model.layers} layers, {self.state})"


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= MOST


def _numbers(value: Any) -> bool:
    several = isinstance(value, list) and value and all(map(_number, value))
    return value is None or _number(value) or bool(several)


# A test for the value of each field of a stored plan, and the test in words.
_STORED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "objective": (lambda value: isinstance(value, str), "a text"),
    "title": (lambda value: isinstance(value, str), "a text"),
    "target": (_numbers, "a number, several or null"),
    "nearest": (_numbers, "a number, several or null"),
    "free": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "residual": (_number, "a number"),
    "tolerance": (lambda value: value is None or _number(value), "a number or null"),
    "hint": (lambda value: isinstance(value, str), "a text"),
    "feasible": (lambda value: isinstance(value, bool), "true or false"),
    "inputs": (lambda value: isinstance(value, Mapping), "a JSON object"),
}


def shown(value: Any) -> str:
    """One number or several, as text."""
    if np.ndim(value) == 0:
        return f"{value:.6g}"
    return ", ".join(f"{v:.6g}" for v in value)


def as_lists(value: Any) -> Any:
    """Arrays and tuples as lists, for JSON."""
    if isinstance(value, Mapping):
        return {name: as_lists(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [as_lists(entry) for entry in value]
    return value
