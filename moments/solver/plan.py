"""What a solver returns: a model, the weights it needs, and how far it is from the target."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import domain_error
from ..transformer import Transformer
from ..weights import MATRICES

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Weight variances and scales of every layer.

    Attributes:
        model: the Transformer that carries them.
        objective: what was asked for, in words.
        free: names of what was solved for.
        residual: largest relative distance to the target; 0 for a scheme, which has none.
        feasible: whether the target is met, to `tolerance`.
        nearest: the feasible value nearest to the target where it is not met, else None.
        tolerance: of `residual`.
        formula: LaTeX of the closed form that was inverted, "" where a root was bracketed.
    """

    model: Transformer
    objective: str
    free: tuple[str, ...] = ()
    residual: float = 0.0
    feasible: bool = True
    nearest: float | None = None
    tolerance: float = 1e-9
    formula: str = ""

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: variances of the matrices, scales, temperature."""
        import pandas as pd

        model = self.model
        skip, branch = model.by_block("skip_scale"), model.by_block("branch_scale")
        used = [name for name in MATRICES if self._used(name)]
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
        return pd.DataFrame(rows)

    def _used(self, name: str) -> bool:
        if name == "gate":
            return self.model.gated
        return not name.startswith("cross_") or self.model.encoder is not None

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {"format": FORMAT_VERSION, "model": self.model.to_dict(), "free": list(self.free)}
        return json.dumps(data, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            DomainError: not such a text, or another format version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise domain_error("plan", text[:40], f"the JSON of a plan ({error})") from None
        if not isinstance(data, Mapping) or data.get("format") != FORMAT_VERSION:
            raise domain_error("plan", text[:40], f"a plan of format {FORMAT_VERSION}")
        names = {f.name for f in dataclasses.fields(cls)}
        fields: dict[str, Any] = {name: value for name, value in data.items() if name in names}
        fields["model"] = Transformer.from_dict(fields["model"])
        fields["free"] = tuple(fields["free"])
        return cls(**fields)

    def __str__(self) -> str:
        head = f"Plan: {self.objective}"
        if self.free:
            head += f", by {', '.join(self.free)}"
        state = f"residual {self.residual:.2g}"
        if not self.feasible:
            state = f"NOT FEASIBLE: the nearest value is {self.nearest:.6g}"
        frame = self.to_frame()
        short = frame if len(frame) <= 12 else frame.iloc[[0, 1, 2, -2, -1]]
        return f"{head} ({state})\n{short.to_string(index=False, float_format='{:.4g}'.format)}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
