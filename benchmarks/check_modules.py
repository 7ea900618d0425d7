"""What `moments.check` finds: planted slips that it must name, correct modules that it must pass.

    nice python benchmarks/check_modules.py slips      # every planted slip, some 30
    nice python benchmarks/check_modules.py foreign    # 22 kinds of slips in five foreign styles
    nice python benchmarks/check_modules.py correct    # 1,000 correct modules; continues
    nice python benchmarks/check_modules.py correct --first 7000   # the same of other seeds
    python benchmarks/check_modules.py table           # what is stored, in words
    python benchmarks/check_modules.py time            # the check of a 12-layer GPT-2

A slip counts as named where a finding of its kind points at its tensor or submodule. A correct
module with any finding is a false alarm, whatever the finding says. Results lie in
data/check_modules.npz with the versions that they were made under.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import re
import resource
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import sized_config
from moments.torch.huggingface_modules import build_module

sys.path.insert(0, str(Path(__file__).parent))

import checked_gpt
import foreign_slips
import records

NAME = "check_modules"


# --- slips ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slip:
    """One thing done wrong, and what must be found.

    Attributes:
        name: of `checked_gpt`, or of `other` below.
        kind: of the finding.
        where: part of a parameter's or submodule's name in it.
        style: changes of the style.
        scheme: what the user says that it is meant to be; "" for nothing.
        words: part of the finding's reason.
    """

    name: str
    kind: str
    where: str
    style: dict[str, Any] = field(default_factory=dict)
    scheme: str = ""
    words: str = ""

    @property
    def title(self) -> str:
        told = [self.name or "scale never applied", *(f"{k}={v}" for k, v in self.style.items())]
        return ", ".join(told + ([f"scheme={self.scheme}"] if self.scheme else []))


HAND = {"fused": False}
NORMAL = {"init": "normal"}
SLIPS = (
    Slip("scale on c_attn", "wrong variance", "attn.c_attn.weight", words="instead of output"),
    Slip("scale on c_fc", "wrong variance", "mlp.c_fc.weight", words="instead of ffn_out"),
    Slip("scale on inward", "wrong variance", "c_attn.weight", words="instead of output and"),
    Slip("scale twice", "wrong variance", "c_proj.weight", words="applied twice"),
    Slip("scale on attention alone", "wrong variance", "mlp.c_proj.weight", words="lacks it"),
    Slip("", "wrong variance", "c_proj.weight", NORMAL, "scaled-init", "1/(2N) is missing"),
    Slip("cut at 100", "wrong variance", "c_fc.weight", NORMAL, "normal", "nothing was cut"),
    Slip("cut at 2", "wrong variance", "c_fc.weight", NORMAL, "normal", "without correcting"),
    Slip("copied", "copied layers", "attn.c_attn.weight"),
    Slip("token std 1", "initial loss", "wte.weight"),
    Slip("position std 1", "positions drown tokens", "wpe.weight"),
    Slip("gains drawn", "norm gain", "ln_1.weight"),
    Slip("one matrix left", "wrong variance", "h.2.mlp.c_fc.weight", words="torch's default"),
    Slip("mean not zero", "mean not zero", "mlp.c_fc.weight"),
    Slip("variance as std", "identity layers", "c_proj.weight"),
    Slip("no scale", "attention scale", "attn.c_attn.weight", HAND, words="is missing"),
    Slip("scale by width", "attention scale", "attn.c_attn.weight", HAND, words="by d_head"),
    Slip("scale by model", "attention scale", "attn.c_attn.weight", HAND, words="sqrt(d_model)"),
    Slip("no mask", "tokens see later ones", "attn.c_attn.weight"),
    Slip("softmax axis", "softmax over the wrong axis", "attn.c_attn.weight", HAND),
    Slip("dropout on", "dropout left on", "h.0.attn"),
    Slip("norm on the stream", "norm placement", "h.0"),
    Slip("no residual", "skip scale", "h.1", words="drops the residual"),
    Slip("norm skipped", "norm placement", "h.1"),
    Slip("no final norm", "no final norm", ""),
    Slip("final norm never run", "never used", "ln_f.weight"),
    Slip("fused fan", "wrong variance", "c_attn.weight", {"init": "xavier"}, words="one fused"),
    Slip("biases left", "biases", "c_attn.bias", words="not reset"),
)
"""In the GPT of `checked_gpt`. And in modules of transformers, whose config is the promise:"""


def _unscaled(module: Any) -> None:
    for name, weight in module.named_parameters():
        if name.endswith("c_proj.weight"):
            weight.mul_((2 * module.config.n_layer) ** 0.5)


def _copied(module: Any) -> None:
    layers = module.bert.encoder.layer
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())


def _fan_out(module: Any) -> None:
    for layer in module.model.layers:
        nn.init.normal_(layer.mlp.down_proj.weight, std=layer.mlp.down_proj.out_features**-0.5)


def _gain(module: Any) -> None:
    module.model.layers[1].input_layernorm.weight.zero_()


def _large(module: Any) -> None:
    module.model.embed_tokens.weight.mul_(50)


OTHERS: dict[str, tuple[str, Any, Slip]] = {
    name: (kind, change, Slip(name, *expected))
    for name, kind, change, *expected in (
        ("GPT-2 without its scale", "gpt2", _unscaled, "wrong variance", "mlp.c_proj.weight"),
        ("BERT of copied layers", "bert", _copied, "copied layers", "attention.self.query"),
        ("Llama's down_proj by fan_out", "llama", _fan_out, "wrong variance", "mlp.down_proj"),
        ("Llama's first gain 0", "llama", _gain, "norm gain", "layers.1.input_layernorm"),
        ("Llama's table 50 times", "llama", _large, "wrong variance", "embed_tokens.weight"),
    )
}


def slip_module(slip: Slip, seed: int = 3) -> nn.Module:
    """The module with the slip in it."""
    if slip.name in OTHERS:
        kind, change, _ = OTHERS[slip.name]
        module = family_module(kind, 4, 64, seed)
        with torch.no_grad():
            change(module)
        return module
    return checked_gpt.build(checked_gpt.Config(slip=slip.name, **slip.style), seed)


def all_slips() -> list[Slip]:
    return [*SLIPS, *(slip for _, _, slip in OTHERS.values())]


def named(slip: Slip, report: moments.Report) -> bool:
    """Whether a finding is the slip's."""
    return any(
        f.kind == slip.kind
        and slip.words in f.reason
        and (not slip.where or any(slip.where in _plain(name, f.layers) for name in f.where))
        for f in report.findings
    )


def _plain(name: str, layers: tuple[int, ...]) -> str:
    """A pattern's layer where there is one only."""
    return name.replace("*", str(layers[0] - 1)) if len(layers) == 1 else name


# --- correct modules ------------------------------------------------------------------------------


def family_module(kind: str, layers: int, width: int, seed: int) -> nn.Module:
    config = sized_config(kind, layers, width, vocab_size=131, seq_len=40)
    with contextlib.redirect_stderr(io.StringIO()):
        return build_module(config, seed)


def encoder(layers: int, width: int, pre: bool, seed: int) -> nn.Module:
    """torch's encoder, every layer drawn by itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, norm_first=pre, batch_first=True)
            for _ in range(layers)
        ]
        module = nn.TransformerEncoder(made[0], layers, enable_nested_tensor=False)
        module.layers = nn.ModuleList(made)
    return module


TRULY_WRONG = {"mt5": "a tied head on a table of variance 1: its first loss is 7 times log(V)"}
"""Families whose small modules are out of order as their library builds them: no false alarms."""


FIRST = 5000
"""Of the seeds of correct modules: others than those on which anything here was tried out."""


def correct(first: int = FIRST) -> Iterator[tuple[str, Any]]:
    """Names, and what builds each.

    Args:
        first: of the seeds.
    """
    seed = first
    for number, init in enumerate((*checked_gpt.INITS, "torch")):
        for layers, width in ((2, 64), (4, 64), (3, 128)):
            for style in range(8):
                seed += 1
                config = checked_gpt.Config(
                    n_layer=layers,
                    n_embd=width,
                    init=init,
                    bias=style % 2 == 0,
                    tied=style % 4 < 2,
                    fused=style % 3 != 0,
                    loss=style != 5,
                    dropout=0.1 if (style + number) % 4 == 3 else 0.0,
                )
                name = f"gpt {init} {layers} {width} style {style} seed {seed}"
                yield name, lambda config=config, seed=seed: checked_gpt.build(config, seed)
    for kind in sorted(set(FAMILIES) - set(TRULY_WRONG)):
        sizes = ((2, 64), (4, 64), (2, 96), (3, 128), (2, 64), (4, 64))
        for seed, (layers, width) in enumerate(sizes, start=first + 1):
            if kind == "gpt_neo" and layers % 2:
                continue  # its kinds of attention alternate
            name = f"{kind} {layers} {width} seed {seed}"
            given = (kind, layers, width, seed)
            yield name, lambda given=given: family_module(*given)
    for seed in range(first, first + 20):
        given = (2 + seed % 3, 64, seed % 2 == 0, seed)
        yield f"encoder {given}", lambda given=given: encoder(*given)
    for style in foreign_slips.STYLES:
        for init in foreign_slips.INITS:
            if (style, init) in foreign_slips.NOT_CORRECT:
                continue
            for seed in range(first, first + 11):
                layers = 2 + seed % 3 if style in foreign_slips.own_styles.STYLES else 2
                given = (style, init, seed, layers)
                yield (
                    f"{style}, {init}, {layers} layers, seed {seed}",
                    lambda given=given: foreign_slips.drawn(*given),
                )


ADDED = {3: 7.1e-5, 4: 5.3e-5}
"""Expected share of the stream that a layer adds, by the number of layers, in torchtune's style
with GPT-2's scaled init: its branches are times 0.3, and its table times sqrt(64). At two layers it
is 1.07e-4, and the matrices' variance goes with 1/(2N). Below the rule's 1e-4, so that the finding
of layers that act as the identity is right. Eight other draws measured, over all layers, 7.1e-5
+- .3e-5 at three layers, 5.5e-5 +- .2e-5 at four, 1.01e-4 +- .05e-4 at two."""


def judged(name: str) -> bool:
    """Whether what is found in a module that was built as a correct one is right."""
    return any(name.startswith(f"torchtune, scaled, gpt2, {n} layers, ") for n in ADDED)


# --- commands -------------------------------------------------------------------------------------


def checked(module: nn.Module, scheme: str = "") -> moments.Report:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return moments.check(module, scheme=scheme or None)


def stored() -> dict[str, Any]:
    return records.load(NAME) if records.exists(NAME) else {}


def _keep(name: str, rows: Any, seconds: float) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    data = stored() | {
        name: {"rows": rows, "cpu_seconds": round(seconds), "versions": versions},
        "machine": platform.machine(),
    }
    records.save(NAME, data)


def run_slips() -> None:
    begun, rows = time.process_time(), []
    for slip in all_slips():
        report = checked(slip_module(slip), slip.scheme)
        found = [[f.severity, f.kind, list(f.where)] for f in report.findings]
        rows.append({"slip": slip.title, "named": named(slip, report), "findings": found})
        print("ok  " if rows[-1]["named"] else "MISS", slip.title, found, flush=True)
    _keep("slips", rows, time.process_time() - begun)


def run_foreign() -> None:
    """Slips in foreign styles that are not yet stored."""
    before = stored().get("foreign", {"rows": [], "cpu_seconds": 0})
    begun, rows = time.process_time() - before["cpu_seconds"], before["rows"]
    done = {(row["slip"], row["style"]) for row in rows}
    for slip in foreign_slips.SLIPS:
        for style in foreign_slips.PLANTED:
            if (slip.name, style) in done:
                continue
            made = foreign_slips.planted(style, slip, 3)
            if made is None:
                continue
            module, where = made
            told: Any = ()
            found: list[Any] = []
            try:
                told = checked(module, slip.scheme).findings
            except moments.MomentsError as error:
                told = getattr(error, "findings", ())
                found = [["refused", str(error).splitlines()[0], []]]
            found += [[f.severity, f.kind, list(f.where)] for f in told]
            hit = any(
                f.kind == slip.kind and any(same(where, name) for name in (*f.where, ""))
                for f in told
            )
            rows.append({"slip": slip.name, "style": style, "named": hit, "findings": found})
            print("ok  " if hit else "MISS", slip.name, style, where, found, flush=True)
    _keep("foreign", rows, time.process_time() - begun)


def same(where: str, name: str) -> bool:
    """Whether a name, or a pattern of it, is that of a tensor or of a submodule that holds it."""
    if not where or not name:
        return not where
    name = name.partition(" [")[0]
    expression = re.escape(name).replace(r"\*", r"\d+")
    return re.match(rf"{expression}(\.|$)", where) is not None


def campaign(first: int) -> str:
    """What the correct modules of these seeds are stored under."""
    return "correct" if first == FIRST else f"correct from {first}"


def run_correct(first: int = FIRST) -> None:
    """Of all correct modules those not yet stored, in an order that mixes their kinds."""
    name_of = campaign(first)
    begun, before = time.process_time(), stored().get(name_of, {"rows": [], "cpu_seconds": 0})
    rows, done = before["rows"], {row["module"] for row in before["rows"]}
    waiting = sorted(correct(first), key=lambda pair: zlib.crc32(pair[0].encode()))
    for number, (name, build) in enumerate(waiting, start=1):
        if name in done:
            continue
        try:
            report = checked(build())
            found = [f"{f.kind}: {', '.join(f.where)}: {f.reason}" for f in report.findings]
        except moments.MomentsError as error:
            found = [f"not read: {str(error).splitlines()[0]}"]
        rows.append({"module": name, "findings": found})
        if found:
            print(f"{number} {name}: {found}", flush=True)
        if number % 10 == 0:
            print(f"{number} after {time.process_time() - begun:.0f} s", flush=True)
            _keep(name_of, rows, before["cpu_seconds"] + time.process_time() - begun)
    _keep(name_of, rows, before["cpu_seconds"] + time.process_time() - begun)


ROUNDS = 7


def run_time() -> None:
    """CPU seconds of the check of a 12-layer GPT-2 beside those of its own two passes, in turn."""
    module = build_module(moments.preset.config("gpt2"))
    ids = torch.randint(50257, (2, 32), generator=torch.Generator().manual_seed(0))

    def passes() -> None:
        module(input_ids=ids, labels=ids).loss.backward()
        module.zero_grad()

    def spent(work: Any) -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    spent(passes), spent(lambda: checked(module))  # what is done once is left out
    rounds = [(spent(passes), spent(lambda: checked(module))) for _ in range(ROUNDS)]
    own, whole = (statistics.median(column) for column in zip(*rounds, strict=True))
    beyond = statistics.median(check - passes for passes, check in rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    told = f"two passes {own:.1f} s, check {whole:.1f} s, {beyond:.1f} s beyond"
    print(f"{told}, CPU on one thread, peak {peak:.1f} GiB")
    row = {"passes": round(own, 2), "check": round(whole, 2), "beyond": round(beyond, 2)}
    _keep("time", row, whole)


def table() -> str:
    data = stored()
    slips, foreign = data["slips"]["rows"], data["foreign"]["rows"]
    lines = [
        f"{sum(row['named'] for row in slips)} of {len(slips)} slips named; "
        f"{sum(row['named'] for row in foreign)} of {len(foreign)} in foreign styles"
    ]
    lines += [f"missed: {row['slip']}" for row in slips if not row["named"]]
    lines += [f"missed: {r['slip']} in {r['style']}" for r in foreign if not r["named"]]
    for name in (name for name in data if name.startswith("correct")):
        right = data[name]["rows"]
        found = [row for row in right if row["findings"]]
        alarms = [row for row in found if not judged(row["module"])]
        lines.append(
            f"{name}: {len(alarms)} false alarms in {len(right)} modules, and "
            f"{len(found) - len(alarms)} findings that are right"
        )
        lines += [f"false alarm: {row['module']}: {row['findings'][0]}" for row in alarms]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("slips", "foreign", "correct", "table", "time"))
    parser.add_argument("--first", type=int, default=FIRST, help="of the seeds of correct modules")
    given = parser.parse_args()
    command = given.command
    torch.set_num_threads(1)
    if command == "table":
        print(table())
    else:
        {
            "slips": run_slips,
            "foreign": run_foreign,
            "correct": lambda: run_correct(given.first),
            "time": run_time,
        }[command]()


if __name__ == "__main__":
    main()
