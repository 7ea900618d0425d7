"""Modules of transformers with routed experts, drawn many times: references of predictions.

    python benchmarks/expert_draws.py run [KIND ...]   # about a minute a kind
    python benchmarks/expert_draws.py table            # predicted over drawn, in percent
    python benchmarks/expert_draws.py laws             # a router's functions against drawn logits

Two layers of width 128 with weights of variance 1/d on four sequences of 24 tokens, torch's own
gradients, all weights drawn anew: means over draws and standard errors of the stream's variance and
gradient, of the loss, and of every group of matrices' squared gradient norm in layer 2. `laws`
has, for every rule, 48 routers (4 to 128 experts, 1 to 8 chosen, logits of variance .3 to 4,
correlations 0 to .9) against 40,000 pairs each: root mean square and largest of difference over
error, and mean differences.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.model.huggingface.sizes import sized_config

STORE = Path(__file__).parent / "data" / "expert_draws.json"
WIDTH, LENGTH, SEQUENCES, VOCAB, LAYERS = 128, 24, 4, 200, 2
_SMALL = {"moe_intermediate_size": 96, "initializer_range": WIDTH**-0.5}
_LARGE = {"num_local_experts": 32, "num_experts_per_tok": 4}
_SHARED = {"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96},
    "qwen2_moe": {"num_experts": 16, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**_LARGE, "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4},
    "granitemoe": {"intermediate_size": 96, "residual_multiplier": 0.5}
    | {"attention_multiplier": 1 / 32, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 2, "moe_num_shared_experts": 1},
    "glm4_moe": {**_SHARED, **_GROUPS, "first_k_dense_replace": 1},
    "minimax_m2": _LARGE,
    "dots1": {**_SHARED, **_GROUPS, "first_k_dense_replace": 0},
    "llama4_text": {"intermediate_size": 96, "intermediate_size_mlp": 256, "use_qk_norm": False},
}
# ends of parameters' names -> rows of `weight_gradients` that they hold together
GROUPS = {
    "q_proj.weight": ("query",),
    "k_proj.weight": ("key",),
    "v_proj.weight": ("value",),
    "o_proj.weight": ("output",),
    "experts.gate_up_proj": ("gate", "ffn_in"),
    "experts.down_proj": ("ffn_out",),
    ".gate.weight": ("router",),
    "router.weight": ("router",),
    "shared_expert.down_proj.weight": ("shared_ffn_out",),
    "shared_experts.down_proj.weight": ("shared_ffn_out",),
    "shared_expert_gate.weight": ("shared_router",),
}


def config_of(kind: str) -> dict[str, Any]:
    """A small config in which every layer but glm4_moe's first is routed."""
    config = sized_config(kind, LAYERS, WIDTH, vocab_size=VOCAB, seq_len=LENGTH)
    if kind == "ernie4_5_moe":
        config["moe_layer_start_index"] = 0
    return config | _SMALL | KINDS[kind]


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB, (SEQUENCES, LENGTH))


def measured(kind: str, seed: int) -> dict[str, float]:
    """One draw."""
    import torch

    from moments.torch.huggingface_modules import build_module

    module = build_module(config_of(kind), seed=seed)
    seen: list[Any] = []

    def keep(_: Any, given: Any, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) else out
        x.retain_grad()
        seen.append(x)

    for layer in module.model.layers:
        layer.register_forward_hook(keep)
    ids = torch.as_tensor(tokens())
    loss = module(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": float(loss.detach())}
    for number, x in enumerate(seen, 1):
        found[f"variance {number}"] = float(x.detach().square().mean())
        found[f"grad_variance {number}"] = float(x.grad.square().mean())
        total = x.detach().sum(1).square().sum() - x.detach().square().sum()
        pairs = SEQUENCES * LENGTH * (LENGTH - 1) * WIDTH
        found[f"covariance {number}"] = float(total) / pairs
    for name, parameter in module.named_parameters():
        for end, rows in GROUPS.items():
            if f"layers.{LAYERS - 1}." in name and name.endswith(end):
                found["+".join(rows)] = float(parameter.grad.square().sum())
    return found


def predicted(kind: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        model = moments.from_huggingface(config_of(kind))
        found = moments.predict(model, token_ids=tokens())
        table = found.weight_gradients().set_index(["layer", "weight"]).squared_norm
    values = {"loss": found.loss}
    for number in range(1, LAYERS + 1):
        values[f"variance {number}"] = found.variance[number]
        values[f"grad_variance {number}"] = found.grad_variance[number]
        values[f"covariance {number}"] = found.variance[number] * found.correlation[number]
    for rows in set(GROUPS.values()):
        if all((LAYERS, row) in table.index for row in rows):
            values["+".join(rows)] = float(sum(table[LAYERS, row] for row in rows))
    return {name: float(value) for name, value in values.items()}


def run(kinds: list[str], draws: int) -> None:
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    for kind in kinds:
        rows = [measured(kind, seed) for seed in range(draws)]
        found = {}
        for name in rows[0]:
            values = np.array([row[name] for row in rows])
            error = values.std(ddof=1) / math.sqrt(draws)
            found[name] = [float(f"{values.mean():.6g}"), float(f"{error:.3g}")]
        stored[kind] = found
        STORE.write_text(json.dumps(stored, indent=1) + "\n")


def table() -> None:
    for kind, drawn in json.loads(STORE.read_text()).items():
        wanted = predicted(kind)
        rows = [
            f"{name} {100 * (wanted[name] / mean - 1):.1f} ({100 * error / mean:.1f})"
            for name, (mean, error) in drawn.items()
        ]
        print(f"{kind}: {', '.join(rows)}")


LAWS = STORE.with_name("expert_laws.json")
RULES: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {},
    "softmax over all": {"normalised": "all"},
    "sigmoid over the chosen": {"logistic": True},
    "sigmoid": {"logistic": True, "normalised": "none"},
}


def laws() -> None:
    from moments.layers.experts.routing import Router, functions

    random, stored = np.random.default_rng(5), {}
    places = [
        (*sizes, s, r)
        for sizes in ((4, 1), (8, 2), (32, 4), (128, 8))
        for s in (0.3, 1.2, 4.0)
        for r in (0.0, 0.3, 0.6, 0.9)
    ]
    for rule, fields in RULES.items():
        rows = []
        for experts, chosen, s, r in places:
            router, parts = Router(experts, chosen, **fields), []
            for _ in range(8):
                one, two = random.standard_normal((2, 5000, experts)) * math.sqrt(s)
                parts.append(router.of_pair(one, r * one + math.sqrt(1 - r * r) * two))
            values = np.concatenate(parts, -1)
            mean, error = values.mean(-1), values.std(-1) / 200
            apart = np.array(functions(router, s, r)) - mean
            none = mean < 1e-12  # a router that gets no gradient
            mean, error = np.where(none, np.nan, mean), np.where(none, np.nan, error)
            rows.append((apart / error, apart / mean))
        far, relative = np.moveaxis(np.array(rows), 1, 0)
        found = {
            "rms of errors": np.sqrt(np.nanmean(far**2, 0)),
            "largest": np.nanmax(abs(far), 0),
            "mean difference, percent": 100 * np.nanmean(relative, 0),
            "mean size, percent": 100 * np.nanmean(abs(relative), 0),
        }
        stored[rule] = {name: [round(float(v), 2) for v in value] for name, value in found.items()}
        LAWS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("run", "table", "laws"))
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    if given.action == "run":
        run(given.kinds or list(KINDS), given.draws)
    elif given.action == "laws":
        laws()
    else:
        table()
