"""The grid of whole models for comparison with predictions: an orthogonal array and baselines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from ..errors import domain_error
from ..model.transformer import Transformer

FACTORIAL: dict[str, tuple[Any, ...]] = {
    "norm": ("pre", "post"),
    "causal": (False, True),
    "layers": (12, 24, 36, 96),
    "weights": ("xavier", "doubled-qk", "dslm", "lns"),
}
"""Factors whose combinations all occur once."""

FRACTIONAL: dict[str, tuple[Any, ...]] = {
    "activation": ("relu", "gelu"),
    "dropout": (0.0, 0.1),
    "grad_correlation": (0.0, 0.4),
    "d_model": (128, 192, 256, 512),
    "heads": (2, 4, 4, 8),
    "seq_len": (32, 64, 128, 256),
    "correlation": (0.25, 0.1, 0.25, 0.5),
}
"""Further factors. Each level occurs equally often with every pair of levels of two factors above,
and with every level of another factor here. A level listed twice occurs twice as often."""

FACTORS = FACTORIAL | FRACTIONAL

PARITIES = {
    "norm": (1,),
    "causal": (2,),
    "layers": (4, 8),
    "weights": (16, 32),
    "activation": (62,),
    "dropout": (61,),
    "grad_correlation": (29,),
    "d_model": (11, 30),
    "heads": (19, 53),
    "seq_len": (25, 35),
    "correlation": (22, 47),
}
"""Binary digits of a factor's level in a run: parities of the run's six bits under these masks.

Combinations of levels are equally frequent for factors whose masks span subspaces of GF(2)^6 with
intersection 0. Masks of the crossed factors are the bits themselves; the others were drawn among
all that have the balance described above.
"""


# Entries of Weights that the digest omits: an absent matrix, and the default distribution.
_USUAL = (None, "normal")


@dataclass(frozen=True)
class Configuration:
    """One whole model with the moments at its two ends; input and last gradient have variance 1.

    Attributes:
        norm, causal, layers, activation, dropout, d_model, heads, seq_len: as in `Transformer`;
            `dropout` acts on attention weights too, and d_ff is 4 * d_model.
        weights: "xavier"; "doubled-qk", Xavier with query and key variances doubled; "dslm", with
            its scales; "lns", Xavier with layernorm scaling.
        correlation: token correlation of layer 1's input.
        grad_correlation: token correlation of the gradient at the last layer's output.
    """

    norm: str
    causal: bool
    layers: int
    weights: str
    activation: str
    dropout: float
    grad_correlation: float
    d_model: int
    heads: int
    seq_len: int
    correlation: float

    @property
    def name(self) -> str:
        """All factors as a name, `post-full-N24-xavier-relu-p0.1-g0-d256-h4-L128-r0.25`."""
        mask = "causal" if self.causal else "full"
        return (
            f"{self.norm}-{mask}-N{self.layers}-{self.weights}-{self.activation}-p{self.dropout:g}"
            f"-g{self.grad_correlation:g}-d{self.d_model}-h{self.heads}-L{self.seq_len}"
            f"-r{self.correlation:g}"
        )

    @property
    def model(self) -> Transformer:
        """The declaration."""
        plain = Transformer(
            layers=self.layers,
            d_model=self.d_model,
            heads=self.heads,
            seq_len=self.seq_len,
            norm=self.norm,
            activation=self.activation,
            dropout=self.dropout,
            causal=self.causal,
            layernorm_scaling=self.weights == "lns",
        )
        if self.weights == "doubled-qk":
            weights = plain.weights
            assert weights is not None
            first = weights.layer(1)
            return plain.replace(weights=weights.replace(query=2 * first.query, key=2 * first.key))
        if self.weights == "dslm":
            # The paper's recursion for ReLU without a mask, also for GeLU and causal models. It
            # starts behind an embedding's dropout, which this grid does not have.
            start = self.correlation / (1 - self.dropout)
            return plain.with_scheme("dslm", variant="released", input_correlation=start)
        return plain

    @property
    def ends(self) -> dict[str, Any]:
        """The moments at both ends, as arguments of `predict` and `simulate`."""
        return {
            "variance": 1.0,
            "correlation": self.correlation,
            "grad_variance": 1.0,
            "grad_correlation": self.grad_correlation,
        }

    @property
    def digest(self) -> str:
        """Hash of everything on which the simulation depends, weight variances included."""
        model = self.model
        assert model.weights is not None
        numbers = {
            "weights": {k: v for k, v in model.weights.to_dict().items() if v not in _USUAL},
            "skip_scale": model.skip_scale,
            "branch_scale": model.branch_scale,
            "layernorm_scaling": bool(model.layernorm_scaling),
        }
        text = json.dumps([asdict(self), _rounded(numbers)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def cost(self) -> float:
        """Rough time of one draw, in units of one narrow layer.

        Drawing matrices takes d_model^2; beyond 128 tokens products take seq_len.
        """
        return self.layers * (1 + (self.d_model / 256) ** 2) * max(1.0, self.seq_len / 128)

    @property
    def seeds(self) -> int:
        """Number of draws of the weights: 16, and up to 64 for cheap models.

        Post-LN gets twice the time, since its gradient spreads more from draw to draw.
        """
        budget = 2000 if self.norm == "post" else 1000
        return min(64, max(16, round(budget / self.cost)))


def _rounded(value: Any) -> Any:
    """Numbers with ten digits, which are equal for all implementations of libm."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value


def _baseline(norm: str, layers: int = 24, **changes: Any) -> Configuration:
    common: dict[str, Any] = {
        "causal": False,
        "weights": "xavier",
        "activation": "relu",
        "dropout": 0.1,
        "grad_correlation": 0.0,
        "d_model": 256,
        "heads": 4,
        "seq_len": 128,
        "correlation": 0.25,
    }
    return Configuration(norm=norm, layers=layers, **(common | changes))


def _run(number: int) -> Configuration:
    """The run of the array with this number, whose bits determine all levels."""
    levels = {
        name: sum(((number & mask).bit_count() & 1) << place for place, mask in enumerate(masks))
        for name, masks in PARITIES.items()
    }
    return Configuration(**{name: FACTORS[name][level] for name, level in levels.items()})


ARRAY = tuple(map(_run, range(64)))
"""The runs of the orthogonal array."""

BASELINES = (
    _baseline("pre"),
    _baseline("pre", 96),
    _baseline("post"),
    _baseline("post", 96),
    _baseline("post", activation="gelu"),
    _baseline("pre", causal=True),
    _baseline("post", causal=True),
    _baseline("post", weights="doubled-qk"),
)
"""Eight common models of one width that differ in one or two factors."""

GRID = (*BASELINES, *ARRAY)

QUICK = tuple(
    min(
        (c for c in ARRAY if (c.norm, c.causal) == (norm, causal) and c.layers <= 24),
        key=lambda c: (c.cost * c.seq_len, c.name),
    )
    for norm in ("pre", "post")
    for causal in (False, True)
)
"""The cheapest run of the array, by cost and tokens, of each norm placement and mask."""

SUBSETS: dict[str, tuple[Configuration, ...]] = {
    "all": GRID,
    "baselines": BASELINES,
    "array": ARRAY,
    "quick": QUICK,
}


def subset(name: str) -> tuple[Configuration, ...]:
    """The configurations of a named subset, or those with a name that matches a shell pattern.

    Raises:
        DomainError: neither a subset nor a pattern that matches anything.
    """
    found = SUBSETS.get(name) or tuple(c for c in GRID if fnmatch(c.name, name))
    if not found:
        raise domain_error(
            "subset",
            name,
            f"one of {', '.join(SUBSETS)}, or a pattern that matches configurations",
            "try 'post-causal-*'",
        )
    return found
