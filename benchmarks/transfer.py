"""What `moments.transfer` says: of slips in seven styles of code, and beside real steps.

    python benchmarks/transfer.py slips          # correct recipes, and slips planted one at a time
    python benchmarks/transfer.py run            # real steps that data/transfer.json lacks
    python benchmarks/transfer.py table          # exponents of those, and predicted by today's code

A real step is that of torch's own optimizer where one matrix moves alone, in double precision and
at a rate so small that it is linear: what it adds to the matrix's output, over the input (of
experts at the tokens that go to each), and to the logits. Draws of the weights are averaged in
logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as f

import moments
from moments.model.huggingface.sizes import sized_config
from moments.step.search import zipf_text
from moments.torch.huggingface_modules import build_module

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from scaled_modules import LENGTH, SLIPS, STYLES, VOCAB, recipe

DATA = Path(__file__).parent / "data" / "transfer.json"
SIZES, DRAWS = (64, 128, 256), 6
SMALL = 1e-3
"""Times the rates: what moves by so little is linear, and more than what single precision loses in
norms and routers."""


def slips() -> None:
    for style in STYLES:
        report = moments.transfer(recipe(style), sizes=SIZES)
        print(f"{style}, correct: {'passed' if report.passed else report.table()}", flush=True)
    named = 0
    for style, slip in SLIPS:
        assert slip is not None
        findings = moments.transfer(recipe(style, slip), sizes=SIZES).findings
        right = bool(findings) and all(slip[1] in finding.parameters for finding in findings)
        named += right
        said = "; ".join(map(str, findings)) or "nothing"
        print(f"{style}, {slip}: {'' if right else 'NOT NAMED: '}{said}", flush=True)
    print(f"{named} of {len(SLIPS)} named, and nothing else")


# --- real steps -----------------------------------------------------------------------------------


def gated(standard: bool) -> Callable[[int], Any]:
    """The gated decoder by muP, or with one rate for all of it."""

    def made(width: int) -> Any:
        module, optimizer = recipe("gated")(width)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 if standard else group["lr"]
        return module, optimizer

    return made


def mixtral(kind: type[torch.optim.Optimizer], rate: float) -> Callable[[int], Any]:
    """Two layers of width 64, two of so many experts for each token."""

    def made(experts: int) -> Any:
        entries = {"intermediate_size": 96, "num_local_experts": experts, "initializer_range": 0.1}
        config = sized_config("mixtral", 2, 64, vocab_size=VOCAB, seq_len=LENGTH) | entries
        module = build_module(config, seed=torch.initial_seed())
        module.set_experts_implementation("eager")
        return module, kind(module.parameters(), lr=rate)

    return made


CASES: dict[str, tuple[str, tuple[int, int], Callable[[int], Any]]] = {
    "width, muP": ("width", (64, 512), gated(standard=False)),
    "width, one rate": ("width", (64, 512), gated(standard=True)),
    "experts, Adam": ("experts", (4, 32), mixtral(torch.optim.Adam, 1e-3)),
    "experts, SGD": ("experts", (4, 32), mixtral(torch.optim.SGD, 0.03)),
}
OF_GATED = {"query": "wq", "key": "wk", "value": "wv", "output": "wo"}
OF_GATED |= {"gate": "w1", "ffn_in": "w3", "ffn_out": "w2", "head": "lm_head", "token": "wte"}
OF_MIXTRAL = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
OF_MIXTRAL |= {"output": "self_attn.o_proj", "router": "mlp.gate", "gate": "gate_up_proj"}
OF_MIXTRAL |= {"ffn_in": "gate_up_proj", "ffn_out": "down_proj"}
OF_MIXTRAL |= {"head": "lm_head", "token": "embed_tokens"}


class Steps:
    """One draw, of which single matrices step."""

    def __init__(self, axis: str, made: Callable[[int], Any], size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.module, self.optimizer = made(size)
        self.module.double().train(False)
        for group in self.optimizer.param_groups:
            group |= {"lr": SMALL * group["lr"], "weight_decay": 0.0}
            group |= {"eps": 1e-30} if "eps" in group else {}
        self.ids, self.entered = torch.as_tensor(zipf_text(VOCAB, LENGTH)), dict[str, Any]()
        for name, part in self.module.named_modules():
            part.register_forward_hook(self._noting(name))
        self.of = OF_GATED if axis == "width" else OF_MIXTRAL
        self.before = self._logits()
        self.inputs = dict(self.entered)
        targets = torch.cat([self.ids[:, 1:], torch.full_like(self.ids[:, :1], -100)], 1)
        f.cross_entropy(self.before.flatten(0, 1), targets.flatten()).backward()
        self.gradients = {n: p.grad.clone() for n, p in self.module.named_parameters()}

    def _noting(self, name: str) -> Any:
        def note(_: Any, given: Any, out: Any) -> None:
            self.entered[name] = [x.detach() for x in given if isinstance(x, torch.Tensor)]

        return note

    def _logits(self) -> Any:
        out = self.module(self.ids)
        return out[0] if isinstance(out, tuple) else out.logits

    def of_role(self, role: str) -> tuple[float, float]:
        """Update and logit."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        path, old, squares = self.of[role], {}, []
        for name, p in self.module.named_parameters():
            if name.removesuffix(".weight").endswith(path):
                old[name] = p.detach().clone()
                p.grad = self.gradients[name].clone()
                if path == "gate_up_proj":
                    own, other = p.grad.chunk(2, 1)
                    (other if role == "gate" else own).zero_()
        self.optimizer.step()
        with torch.no_grad():
            change = float((self._logits() - self.before).square().mean().sqrt())
            for name, weights in old.items():
                p = self.module.get_parameter(name)
                step = p - weights
                if "experts" in name:
                    squares.append(self._at_experts(name, role, step))
                elif role != "token":
                    x = self.inputs[name.removesuffix(".weight")][0]
                    squares.append(float(f.linear(x, step).square().mean() / x.square().mean()))
            for name, weights in old.items():
                self.module.get_parameter(name).copy_(weights)
        if role == "head":
            return change, change
        return float(np.exp(np.mean(np.log(squares)) / 2)) if squares else math.nan, change

    def _at_experts(self, name: str, role: str, step: Any) -> float:
        """Over the tokens that go to each."""
        experts = name.rpartition(".")[0]
        x, places, gates = self.inputs[experts]
        after, before = [], []
        for place, gate in zip(places.T, gates.T, strict=True):
            if role == "ffn_out":
                both = self.module.get_parameter(f"{experts}.gate_up_proj")[place]
                one, two = torch.einsum("tmn,tn->tm", both, x).chunk(2, 1)
                x_in = gate[:, None] * f.silu(one) * two
                after.append(torch.einsum("tmn,tn->tm", step[place], x_in))
            else:
                x_in = x
                half = step.chunk(2, 1)[role == "ffn_in"]
                after.append(torch.einsum("tmn,tn->tm", half[place], x))
            before.append(x_in.square().mean())
        made = torch.stack(after)
        size = made.sum(0).square().mean() if role == "ffn_out" else made.square().mean()
        return float(size / torch.stack(before).mean())


def run(names: list[str]) -> None:
    kept = stored()
    for name in names or CASES:
        if name in kept and not names:
            continue
        axis, sizes, made = CASES[name]
        draws = [[Steps(axis, made, size, seed) for seed in range(DRAWS)] for size in sizes]
        kept[name] = {}
        for role in draws[0][0].of:
            logs = np.log([[one.of_role(role) for one in row] for row in draws])
            apart = math.log(sizes[1] / sizes[0])
            slopes = (logs[1].mean(0) - logs[0].mean(0)) / apart
            errors = np.sqrt((logs.var(1, ddof=1) / DRAWS).sum(0)) / apart
            kept[name][role] = {
                quantity: [round(float(one), 3) for one in pair]
                for quantity, *pair in zip(("update", "logit"), slopes, errors, strict=True)
                if math.isfinite(pair[0])
            }
        DATA.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, flush=True)


def table() -> None:
    """Exponents, with the standard error of what is measured."""
    print("| | | update, measured | predicted | logit, measured | predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rows in stored().items():
        axis, sizes, made = CASES[name]
        found = moments.transfer(made, axis=axis, sizes=sizes).to_frame().set_index("weight")
        for role, row in rows.items():
            cells = [name, role]
            for quantity in ("update", "logit"):
                value = row.get(quantity)
                cells += (
                    ["", ""]
                    if value is None
                    else [f"{value[0]:+.2f} ± {value[1]:.2f}", f"{found[quantity][role]:+.2f}"]
                )
            print("| " + " | ".join(cells) + " |", flush=True)


def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["slips", "run", "table"])
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    if given.command == "run":
        run(given.names)
    else:
        {"slips": slips, "table": table}[given.command]()


if __name__ == "__main__":
    main()
