"""Draws of small networks that tests hold the refined theory against, stored.

    python benchmarks/small_draws.py run [NAME ...]   # about three minutes for all
    python benchmarks/small_draws.py list             # what is stored

Torch's own gradients over draws of all weights, no formula of the package in common: `BLOCKS` are
blocks written out here, below a norm and a generic gradient; `TWINS` whole models by
`moments.simulate`; `STACKS` layers of ReLU units without norms, above which a product of two linear
maps is regressed on what varies. `data/small_draws.json` holds every mean with its standard error;
`tests/test_directions.py`, `tests/test_refined.py` and `tests/test_band.py` compare, the first two
after a few other draws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moments

STORE = Path(__file__).parent / "data" / "small_draws.json"
DRAWS, SEEDS = 24_000, 96
Normal = Callable[..., Tensor]
Function = Callable[[Tensor, Normal], Tensor]

# --- blocks below a norm --------------------------------------------------------------------------

WIDTH, HIDDEN, TOKENS, CORRELATION = 48, 64, 3, 0.4


def rms(x: Tensor, groups: int = 1) -> Tensor:
    """RMSNorm without a gain, of groups of features."""
    apart = x.unflatten(-1, (groups, -1))
    return (apart / apart.square().mean(-1, keepdim=True).sqrt()).flatten(-2)


def feed_forward(x: Tensor, normal: Normal) -> Tensor:
    """ReLU units."""
    inner = torch.relu(x @ normal(WIDTH, HIDDEN) * math.sqrt(2 / WIDTH))
    return inner @ normal(HIDDEN, WIDTH) / math.sqrt(HIDDEN)


def gated(x: Tensor, normal: Normal) -> Tensor:
    """SwiGLU units."""
    gate = torch.nn.functional.silu(x @ normal(WIDTH, HIDDEN) / math.sqrt(WIDTH))
    inner = gate * (x @ normal(WIDTH, HIDDEN)) * math.sqrt(3 / WIDTH)
    return inner @ normal(HIDDEN, WIDTH) / math.sqrt(HIDDEN)


def uniform(x: Tensor, normal: Normal) -> Tensor:
    """One head whose logits are 0."""
    mean = x.mean(1, keepdim=True)
    value = mean @ normal(WIDTH, WIDTH) * math.sqrt(2.0) / WIDTH @ normal(WIDTH, WIDTH)
    return value.expand(-1, TOKENS, -1)


def below_another(x: Tensor, normal: Normal) -> Tensor:
    """Two residual sums without a norm, and one whose branch has it."""
    y = x + feed_forward(x, normal)
    y = y + feed_forward(y, normal)
    return y + feed_forward(rms(y), normal)


def bottom_to_top(x: Tensor, normal: Normal) -> Tensor:
    """Two norms, and a sum past both blocks."""
    x = rms(x)
    y = rms(x + uniform(x, normal))
    return y + feed_forward(y, normal) + x


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, below a last norm.

    Attributes:
        layer: from what enters a layer to what leaves it.
        layers: number of them.
        groups: of the last norm.
    """

    layer: Function
    layers: int = 3
    groups: int = 1


def _pre(block: Function, groups: int = 1) -> Stack:
    return Stack(lambda x, normal: x + block(rms(x, groups), normal), groups=groups)


BLOCKS: dict[str, Stack] = {
    "feed-forward": _pre(feed_forward),
    "gated": _pre(gated),
    "attention": _pre(uniform),
    "parallel": _pre(lambda x, normal: feed_forward(x, normal) + uniform(x, normal)),
    "norm behind the branch": _pre(lambda x, normal: rms(feed_forward(x, normal))),
    "post-norm": Stack(lambda x, normal: rms(x) + feed_forward(rms(x), normal)),
    "norms of groups": _pre(feed_forward, groups=8),
    "below another branch": Stack(below_another, layers=1),
    "bottom-to-top": Stack(bottom_to_top),
}


def block_draws(name: str, draws: int, seed: int, chunk: int = 500) -> dict[str, list[float]]:
    """Mean square and mean product between tokens of the gradient, with standard errors."""
    stack, generator = BLOCKS[name], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(chunk, *shape, generator=generator)

    def mixed(share: float) -> Tensor:
        return math.sqrt(share) * normal(1, WIDTH) + math.sqrt(1 - share) * normal(TOKENS, WIDTH)

    squares, products = [], []
    for _ in range(draws // chunk):
        x = mixed(CORRELATION).requires_grad_()
        y = x
        for _ in range(stack.layers):
            y = stack.layer(y, normal)
        (gradient,) = torch.autograd.grad((rms(y, stack.groups) * mixed(0.3)).sum(), x)
        squares.append(gradient.square().mean((1, 2)))
        total = gradient.sum(1).square().mean(1)
        products.append((total - TOKENS * squares[-1]) / (TOKENS * (TOKENS - 1)))
    both = {"square": torch.cat(squares).double(), "product": torch.cat(products).double()}
    return {k: [float(v.mean()), float(v.std()) / math.sqrt(len(v))] for k, v in both.items()}


# --- products of linear maps above layers without norms -------------------------------------------

STACKS: dict[str, tuple[int, float, int, float]] = {
    "width 64, 4 layers": (64, 0.3, 4, 0.7),
    "width 32, 6 layers": (32, 0.1, 6, 0.5),
}
"""Width, correlation of two tokens, layers, and the factor on a layer's output."""


def growth_draws(name: str, draws: int, seed: int, chunk: int = 500) -> dict[str, Any]:
    """How (W x) * (V x) of two tokens depends on their overlap and on their growth.

    Its covariance, given the draw below, is o^2 in their overlap o = x.x'/width: least squares of
    it on o less its mean, and on half the sum of the tokens' squared norms over their mean.
    """
    width, correlation, layers, scale = STACKS[name]
    generator, found = torch.Generator().manual_seed(seed), []

    def normal(*shape: int) -> Tensor:
        return torch.randn(chunk, *shape, generator=generator)

    for _ in range(draws // chunk):
        x = math.sqrt(correlation) * normal(1, width) + math.sqrt(1 - correlation) * normal(
            2, width
        )
        for _ in range(layers):
            hidden = torch.relu(x @ normal(width, width)) * math.sqrt(2 / width)
            x = x + scale * hidden @ normal(width, width) / math.sqrt(width)
        found.append((x @ x.transpose(1, 2) / width).double())
    overlaps = torch.cat(found)
    norms, overlap = overlaps.diagonal(dim1=1, dim2=2).mean(1), overlaps[:, 0, 1]
    columns = torch.stack(
        (torch.ones_like(norms), overlap - overlap.mean(), norms / norms.mean()), 1
    )
    fit = torch.linalg.lstsq(columns, overlap[:, None] ** 2).solution[:, 0]
    left = overlap**2 - columns @ fit
    error = (left.var() * torch.linalg.inv(columns.T @ columns).diagonal()).sqrt()
    return {
        "norm": float(norms.mean()),
        "overlap": float(overlap.mean()),
        "overlap_variance": float(overlap.var()),
        "by_overlap": [float(fit[1]), float(error[1])],
        "by_growth": [float(fit[2]), float(error[2])],
    }


# --- whole models ---------------------------------------------------------------------------------


def small(**changes: Any) -> moments.Transformer:
    """Four narrow layers."""
    fields = {"layers": 4, "d_model": 96, "heads": 4, "seq_len": 24, "dropout": 0.1}
    return moments.Transformer(**{**fields, **changes})


TWINS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post"},
    "gelu": {"norm": "post", "activation": "gelu"},
    "causal": {"causal": True},
    "causal post": {"causal": True, "norm": "post"},
    "sharp": {"temperature": 0.7},
    "scaled": {"skip_scale": 0.9, "branch_scale": [0.8, 0.6, 0.5, 0.4]},
    "layernorm scaling": {"layernorm_scaling": True},
    "narrow values": {"d_head": 12},
}
STREAMS: dict[str, dict[str, Any]] = {
    "sinkhorn": {
        "streams": moments.HyperConnections(4, variance=6.55 / (4 * 96)),
        "normalization": "rmsnorm",
        "weights": moments.Weights.normal(1 / 96),
    },
    "identity, causal": {
        "streams": moments.HyperConnections(
            2, variance=2 / (2 * 96), mixing="identity", read_bias=-1.0, write_bias=0.5
        ),
        "causal": True,
        "norm_affine": True,
        "dropout": 0.1,
    },
}
STREAMS["input again"] = {
    "input_mix": [(1.15, 0.2), (1.1, -0.3), (0.8, 0.7), (1.0, 0.1)],
    "causal": True,
    "norm_affine": True,
}
STREAMS["earlier layers"] = {
    "skips": [None, None, (2, 1.0), (1, 0.6)],
    "input_mix": (0.9, 0.2),
    "causal": True,
    "norm_affine": True,
}
STREAMS["first values"] = {
    "values": [None, moments.Values(0.5, 0.5), moments.Values(0.7, -0.6), moments.Values(0.0, 1.0)],
    "causal": True,
    "kv_heads": 2,
    "norm_affine": True,
}
_KEYS = moments.LayerAttention(kv_heads=2)
STREAMS["shared keys"] = {
    "mixer": [_KEYS, _KEYS, *(_KEYS.replace(keys_of=n) for n in (1, 2))],
    "causal": True,
    "norm_affine": True,
}
"""Models with several residual streams, and those whose layers read what earlier ones left."""
_HALF = [[math.sqrt(0.5), 1.0]] * 4
_LAUREL = {"skip_scale": _HALF, "branch_scale": _HALF}
_LAUREL |= {"laurel": moments.Laurel(48, 1 / 96, 1 / 48), "activation": "gelu"}
_LAUREL |= {"normalization": "rmsnorm", "norm": "sandwich", "norm_affine": True, "causal": True}
_LAUREL |= {"weights": moments.Weights.normal(1 / 96), "norm_epsilon": 1e-6}
ALTERNATING: dict[str, dict[str, Any]] = {
    "laurel": _LAUREL,
    "altup": _LAUREL | {"streams": moments.AltUp(4, *(1 / 96,) * 5)},
}
"""Streams that are corrected together, and a learned residual sum."""
ENTERING = {"correlation": 0.3, "grad_correlation": 0.2}
STREAM = ("variance", "correlation", "grad_variance", "grad_correlation")


def streamed(name: str) -> moments.Transformer:
    """One of `STREAMS`."""
    return small(**({"dropout": 0.0} | STREAMS[name]))


def alternating(name: str) -> moments.Transformer:
    """One of `ALTERNATING`."""
    return small(**({"dropout": 0.0} | ALTERNATING[name]))


def twin_draws(model: moments.Transformer, seeds: int, seed: int, batch: int = 1) -> dict[str, Any]:
    """The stream, and every matrix's squared gradient norm by layer, with standard errors."""
    measured = moments.simulate(model, seeds=seeds, batch=batch, seed=seed, **ENTERING)
    found: dict[str, Any] = {
        quantity: [getattr(measured, end).tolist() for end in (quantity, f"{quantity}_stderr")]
        for quantity in STREAM
    }
    norms = measured.weight_gradients()
    found["norms"] = {
        f"{layer}.{weight}": [norm, error]
        for layer, weight, norm, error in norms[
            ["layer", "weight", "squared_norm", "squared_norm_stderr"]
        ].itertuples(index=False)
        if layer > 0
    }
    return found


# --- storage --------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """By name, "block/...", "growth/...", "twin/...", "streams/..." and "alternating/..."."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def run(names: list[str]) -> None:
    """Draw and store those named, or all."""
    kinds = {"block": BLOCKS, "growth": STACKS, "twin": TWINS, "streams": STREAMS}
    kinds["alternating"] = ALTERNATING
    every = [f"{kind}/{name}" for kind, names_of in kinds.items() for name in names_of]
    for full in names or every:
        kind, _, name = full.partition("/")
        if kind == "block":
            entry = {"draws": DRAWS, "seed": 3, "found": block_draws(name, DRAWS, 3)}
        elif kind == "growth":
            entry = {"draws": DRAWS, "seed": 3, "found": growth_draws(name, DRAWS, 3)}
        elif kind in ("streams", "alternating"):
            of = streamed(name) if kind == "streams" else alternating(name)
            found = twin_draws(of, 2 * SEEDS, 3, 4)
            entry = {"draws": 2 * SEEDS, "seed": 3, "found": found}
        else:
            entry = {"draws": SEEDS, "seed": 3, "found": twin_draws(small(**TWINS[name]), SEEDS, 3)}
        entry["torch"] = torch.__version__
        kept = {**stored(), full: entry}
        STORE.write_text(json.dumps(_short(kept), indent=1, sort_keys=True) + "\n")
        print(full, flush=True)


def _short(value: Any) -> Any:
    """Numbers to seven digits."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("run", "list"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.what == "run":
        run(given.names)
        return
    for name, entry in sorted(stored().items()):
        print(f"{name:<32}{entry['draws']} draws, torch {entry['torch']}")


if __name__ == "__main__":
    main()
