"""Random correct modules, and what `check` says against them: every finding is a false alarm.

    nice python benchmarks/random_modules.py run --modules 1000 [--first 0]   # stores what is found
    nice python benchmarks/random_modules.py show 17                          # one module
    python benchmarks/random_modules.py table                                 # docs/accuracy.md

A module's number seeds all that is drawn of it: width, depth, heads and those that share keys, norm
and its place, activation, gates, biases, positions, a tied head, how it is written (submodules of
four vocabularies, one fused matrix or three, attention by hand or by torch, blocks of einsum over
bare parameters, a sequence of residual wrappers), what stands beside the plain stack (norms of
queries and keys, LayerScale, U-net skips, scales of the first stream, parallel blocks), and one of
the initialisations that are published or in wide use with the design that it is meant for.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
import tables

import moments

DATA = Path(__file__).parent / "data" / "random_modules.json"
LENGTH = 24


@dataclass(frozen=True)
class Spec:
    """What is drawn of a module."""

    number: int
    width: int
    layers: int
    heads: int
    key_heads: int
    ratio: float
    words: int
    norm: str
    place: str
    function: str
    gated: bool
    biases: bool
    positions: str
    tied: bool
    init: str
    style: str
    vocabulary: int
    fused: bool
    by_hand: bool
    query_norm: bool
    extra: str


INITS = ("gpt2", "gpt2 flat", "small", "megatron", "xavier", "lecun", "torch", "mitchell")
INITS += ("fan-in, scaled",)


def drawn(number: int) -> Spec:
    """The module of a number."""
    pick = random.Random(number)
    width = pick.choice((48, 64, 96, 128))
    heads = pick.choice([h for h in (2, 3, 4, 6, 8) if width % (2 * h) == 0])
    place = pick.choice(("pre", "pre", "pre", "post", "sandwich", "behind"))
    style = pick.choice(("submodules", "submodules", "einsum", "residual wrappers"))
    init = pick.choice(("xavier", "torch") if place == "post" else INITS)
    extras = ["", "", "", "layer scale", "skips", "first stream", "parallel"]
    plain = place == "pre" and style == "submodules"
    return Spec(
        number=number,
        width=width,
        layers=pick.randint(2, 6),
        heads=heads,
        key_heads=pick.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        ratio=pick.choice((2, 3, 4)),
        words=pick.choice((97, 128, 200)),
        norm=pick.choice(("layer", "layer", "rms", "rms by hand")),
        place=place,
        function=pick.choice(("relu", "gelu", "gelu tanh", "silu", "squared relu")),
        gated=pick.random() < 0.4,
        biases=pick.random() < 0.5,
        positions=pick.choice(("learned", "rotary", "sinusoids", "none")),
        tied=pick.random() < 0.4 and init not in ("torch", "lecun", "xavier"),
        init=init,
        style=style,
        vocabulary=pick.randrange(4),
        fused=pick.random() < 0.5,
        by_hand=pick.random() < 0.5,
        query_norm=place == "behind" or pick.random() < 0.2,  # as OLMo 2: nothing else bounds it
        extra=pick.choice(extras) if plain else "",
    )


# --- parts ----------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Any] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "squared relu": lambda x: functional.relu(x).square(),
}

NAMES: tuple[dict[str, str], ...] = (
    {"attention": "attn", "feed": "mlp", "one": "ln_1", "two": "ln_2", "three": "ln_3",
     "four": "ln_4", "qkv": "c_attn", "q": "query", "k": "key", "v": "value", "o": "c_proj",
     "up": "c_fc", "gate": "c_gate", "down": "c_proj", "blocks": "h", "table": "wte",
     "places": "wpe", "last": "ln_f", "head": "lm_head"},
    {"attention": "self_attn", "feed": "mlp", "one": "input_layernorm",
     "two": "post_attention_layernorm", "three": "pre_ff_norm", "four": "post_ff_norm",
     "qkv": "qkv_proj", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj",
     "up": "up_proj", "gate": "gate_proj", "down": "down_proj", "blocks": "layers",
     "table": "embed_tokens", "places": "embed_positions", "last": "norm", "head": "lm_head"},
    {"attention": "mixer", "feed": "ffn", "one": "norm_a", "two": "norm_b", "three": "norm_c",
     "four": "norm_d", "qkv": "wqkv", "q": "wq", "k": "wk", "v": "wv", "o": "wo", "up": "w1",
     "gate": "w3", "down": "w2", "blocks": "stack", "table": "tok", "places": "pos", "last": "out",
     "head": "unembed"},
    {"attention": "sa", "feed": "ff", "one": "n1", "two": "n2", "three": "n3", "four": "n4",
     "qkv": "in_projection", "q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out", "up": "enter",
     "gate": "open", "down": "leave", "blocks": "trunk", "table": "words", "places": "where",
     "last": "final", "head": "to_logits"},
)  # fmt: skip


class ByHand(nn.Module):
    """An RMSNorm as it is written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


def norm(spec: Spec) -> nn.Module:
    kinds: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "rms by hand": ByHand}
    return kinds[spec.norm](spec.width)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, tokens, head width)."""
    half, tokens = x.shape[-1] // 2, x.shape[-2]
    rates = 1e4 ** (-torch.arange(half) / half)
    angles = torch.arange(tokens)[:, None] * rates
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


def sinusoids(tokens: int, width: int) -> Tensor:
    rates = 1e4 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(tokens)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


def attended(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, tokens, heads * head width)."""
    size = spec.width // spec.heads
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    if spec.query_norm:
        q, k = (functional.rms_norm(t, (size,)) for t in (q, k))
    if spec.positions == "rotary":
        q, k = rotated(q), rotated(k)
    if spec.key_heads < spec.heads:
        k, v = (t.repeat_interleave(spec.heads // spec.key_heads, 1) for t in (k, v))
    if spec.by_hand:
        scores = q @ k.transpose(-2, -1) / math.sqrt(size)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, spec: Spec, named: dict[str, str]) -> None:
        super().__init__()
        self.spec, self.named = spec, named
        width, narrow = spec.width, spec.width // spec.heads * spec.key_heads
        sizes = {"q": width, "k": narrow, "v": narrow}
        if spec.fused:
            sizes = {"qkv": width + 2 * narrow}
        for role, size in sizes.items():
            setattr(self, named[role], nn.Linear(width, size, bias=spec.biases))
        setattr(self, named["o"], nn.Linear(width, width, bias=spec.biases))
        self.sizes = [width, narrow, narrow]

    def forward(self, x: Tensor) -> Tensor:
        named = self.named
        if self.spec.fused:
            q, k, v = getattr(self, named["qkv"])(x).split(self.sizes, -1)
        else:
            q, k, v = (getattr(self, named[role])(x) for role in "qkv")
        made: Tensor = getattr(self, named["o"])(attended(self.spec, q, k, v))
        return made


class Feed(nn.Module):
    def __init__(self, spec: Spec, named: dict[str, str]) -> None:
        super().__init__()
        self.spec, self.named, hidden = spec, named, int(spec.ratio * spec.width)
        for role in ("up", "gate") if spec.gated else ("up",):
            setattr(self, named[role], nn.Linear(spec.width, hidden, bias=spec.biases))
        setattr(self, named["down"], nn.Linear(hidden, spec.width, bias=spec.biases))

    def forward(self, x: Tensor) -> Tensor:
        act, up = FUNCTIONS[self.spec.function], getattr(self, self.named["up"])(x)
        y = act(getattr(self, self.named["gate"])(x)) * up if self.spec.gated else act(up)
        made: Tensor = getattr(self, self.named["down"])(y)
        return made


class Block(nn.Module):
    """A layer of submodules."""

    def __init__(self, spec: Spec, named: dict[str, str]) -> None:
        super().__init__()
        self.spec, self.named = spec, named
        setattr(self, named["attention"], Attention(spec, named))
        setattr(self, named["feed"], Feed(spec, named))
        for role in ("one", "two", "three", "four")[: 4 if spec.place == "sandwich" else 2]:
            setattr(self, named[role], norm(spec))
        if spec.extra == "layer scale":
            self.gamma_1 = nn.Parameter(torch.full((spec.width,), 0.1))
            self.gamma_2 = nn.Parameter(torch.full((spec.width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        of = {role: getattr(self, name) for role, name in self.named.items() if hasattr(self, name)}
        attention, feed, one, two = of["attention"], of["feed"], of["one"], of["two"]
        if spec.place == "post":
            x = one(x + attention(x))
            return two(x + feed(x))
        if spec.place == "behind":
            x = x + one(attention(x))
            return x + two(feed(x))
        if spec.place == "sandwich":
            x = x + two(attention(one(x)))
            return x + of["four"](feed(of["three"](x)))
        if spec.extra == "parallel":
            return x + attention(one(x)) + feed(two(x))
        if spec.extra == "layer scale":
            x = x + self.gamma_1 * attention(one(x))
            return x + self.gamma_2 * feed(two(x))
        x = x + attention(one(x))
        return x + feed(two(x))


class Bare(nn.Module):
    """A layer of bare parameters, by einsum over heads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, size = spec, spec.width // spec.heads
        self.query = nn.Parameter(torch.empty(spec.heads, spec.width, size))
        self.key, self.value = (
            nn.Parameter(torch.empty(spec.key_heads, spec.width, size)) for _ in range(2)
        )
        self.out = nn.Parameter(torch.empty(spec.heads, size, spec.width))
        hidden = int(spec.ratio * spec.width)
        self.up = nn.Parameter(torch.empty(spec.width, hidden))
        self.gate = nn.Parameter(torch.empty(spec.width, hidden)) if spec.gated else None
        self.down = nn.Parameter(torch.empty(hidden, spec.width))
        self.norms = nn.ModuleList(norm(spec) for _ in range(4 if spec.place == "sandwich" else 2))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("btd,hde->bthe", x, w).flatten(2)
            for w in (self.query, self.key, self.value)
        )
        mixed = attended(self.spec, q, k, v).unflatten(-1, (self.spec.heads, -1))
        return torch.einsum("bthe,hed->btd", mixed, self.out)

    def feed(self, x: Tensor) -> Tensor:
        act = FUNCTIONS[self.spec.function]
        y = act(x @ self.up) if self.gate is None else act(x @ self.gate) * (x @ self.up)
        return y @ self.down

    def forward(self, x: Tensor) -> Tensor:
        n, place = self.norms, self.spec.place
        if place == "post":
            x = n[0](x + self.attention(x))
            return n[1](x + self.feed(x))
        if place == "behind":
            x = x + n[0](self.attention(x))
            return x + n[1](self.feed(x))
        if place == "sandwich":
            x = x + n[1](self.attention(n[0](x)))
            return x + n[3](self.feed(n[2](x)))
        x = x + self.attention(n[0](x))
        return x + self.feed(n[1](x))


class Around(nn.Module):
    """A residual connection around a function, with its norm where the design has it."""

    def __init__(self, spec: Spec, inner: nn.Module) -> None:
        super().__init__()
        self.place, self.fn, self.norm = spec.place, inner, norm(spec)
        self.norm_out = norm(spec) if spec.place == "sandwich" else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor
        if self.place == "post":
            made = self.norm(x + self.fn(x))
        elif self.place == "behind":
            made = x + self.norm(self.fn(x))
        else:
            y = self.fn(self.norm(x))
            made = x + (y if self.norm_out is None else self.norm_out(y))
        return made


class RandomLM(nn.Module):
    """The language model that a spec says."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.named = spec, NAMES[spec.vocabulary]
        named = self.named
        setattr(self, named["table"], nn.Embedding(spec.words, spec.width))
        if spec.positions == "learned":
            setattr(self, named["places"], nn.Embedding(LENGTH, spec.width))
        blocks: list[nn.Module] = []
        for _ in range(spec.layers):
            if spec.style == "einsum":
                blocks.append(Bare(spec))
            elif spec.style == "residual wrappers":
                parts = Attention(spec, named), Feed(spec, named)
                blocks.append(nn.Sequential(*(Around(spec, part) for part in parts)))
            else:
                blocks.append(Block(spec, named))
        setattr(self, named["blocks"], nn.ModuleList(blocks))
        if spec.place != "post":
            setattr(self, named["last"], norm(spec))
        head = nn.Linear(spec.width, spec.words, bias=False)
        setattr(self, named["head"], head)
        half = spec.layers // 2
        if spec.extra == "skips":
            self.skip_weights = nn.Parameter(torch.ones(half))
        if spec.extra == "first stream":
            self.lambdas = nn.Parameter(torch.tensor([[1.0, 0.1]] * spec.layers))
        initialise(self, spec)
        if spec.tied:
            head.weight = getattr(self, named["table"]).weight

    def forward(self, ids: Tensor) -> Tensor:
        spec, named = self.spec, self.named
        x = getattr(self, named["table"])(ids)
        if spec.positions == "learned":
            x = x + getattr(self, named["places"])(torch.arange(ids.shape[1]))
        elif spec.positions == "sinusoids":
            scale = float(getattr(self, named["table"]).weight.detach().std()) * math.sqrt(2)
            x = x + scale * sinusoids(ids.shape[1], spec.width)
        first, kept, half = x, [], spec.layers // 2
        for n, block in enumerate(getattr(self, named["blocks"])):
            if spec.extra == "skips" and n >= spec.layers - half:
                x = x + self.skip_weights[n - spec.layers + half] * kept.pop()
            if spec.extra == "first stream":
                x = self.lambdas[n, 0] * x + self.lambdas[n, 1] * first
            x = block(x)
            if spec.extra == "skips" and n < half:
                kept.append(x)
        x = x if spec.place == "post" else getattr(self, named["last"])(x)
        made: Tensor = getattr(self, named["head"])(x)
        return made


# --- initialisations ------------------------------------------------------------------------------


def fans(name: str, p: Tensor) -> tuple[int, int]:
    """What a matrix sums over, and what it gives; bare ones are (in, out), by heads or not."""
    if p.ndim == 3:  # (heads, in, out of one) or (heads, in of one, out)
        inward = name.endswith(("query", "key", "value"))
        return (p.shape[1], p.shape[0] * p.shape[2]) if inward else (
            p.shape[0] * p.shape[1], p.shape[2])  # fmt: skip
    bare = name.rpartition(".")[2] in ("up", "gate", "down")
    return (p.shape[0], p.shape[1]) if bare else (p.shape[1], p.shape[0])


def initialise(module: RandomLM, spec: Spec) -> None:
    """Entries as published initialisations draw them; gains 1, biases 0."""
    named, depth, width = module.named, spec.layers, spec.width
    outward = (named["o"], named["down"], "out", "down")
    with torch.no_grad():
        for name, p in module.named_parameters():
            parts = name.split(".")
            if p.ndim < 2:
                if parts[-1] == "bias" and spec.init != "torch":
                    p.zero_()
                continue
            if parts[0] == "lambdas":
                continue
            if parts[0] in (named["table"], named["places"]):
                std = {"torch": 1.0, "lecun": 1.0, "xavier": width**-0.5}.get(spec.init, 0.02)
                p.normal_(0, std)
                continue
            into, out = fans(name, p)
            behind = parts[-1] in outward or (len(parts) > 1 and parts[-2] in outward)
            head = parts[0] == named["head"]
            if spec.init == "torch":
                p.uniform_(-(into**-0.5), into**-0.5)
            elif spec.init == "xavier":
                narrow = width // spec.heads * spec.key_heads
                fused = named["qkv"] in parts
                for part in p.split([width, narrow, narrow]) if fused else (p,):
                    bound = math.sqrt(6 / (into + (len(part) if fused else out)))
                    part.uniform_(-bound, bound)
            elif spec.init == "lecun":
                p.normal_(0, into**-0.5)
            elif spec.init == "small":  # Nguyen and Salazar 2019; Wang and Komatsuzaki 2021
                std = 2 / (depth * width**0.5) if behind and not head else (2 / (5 * width)) ** 0.5
                p.normal_(0, std)
            elif spec.init in ("mitchell", "fan-in, scaled"):  # OLMo's, and GPT-2's depth on fan-in
                place = int(next(part for part in (*parts, "0") if part.isdigit())) + 1
                place = place if spec.init == "mitchell" else depth
                p.normal_(0, into**-0.5 / ((2 * place) ** 0.5 if behind and not head else 1.0))
            else:
                std = (3 * width) ** -0.5 if spec.init == "megatron" else 0.02  # Megatron-Turing's
                scaled = behind and not head and spec.init != "gpt2 flat"
                p.normal_(0, std / ((2 * depth) ** 0.5 if scaled else 1.0))


def built(number: int) -> RandomLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        return RandomLM(drawn(number))


# --- runs -----------------------------------------------------------------------------------------


def found_in(number: int) -> dict[str, Any]:
    """What `check` says of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = moments.check(built(number))
        except moments.MomentsError as error:
            return {"refused": str(error).splitlines()[0]}
    return {"findings": [f"{f.kind}: {', '.join(f.where)}: {f}" for f in report.findings]}


def run(numbers: Sequence[int]) -> None:
    rows = json.loads(DATA.read_text()) if DATA.exists() else {}
    for number in numbers:
        row = rows[str(number)] = found_in(number)
        if row.get("findings") or "refused" in row:
            print(drawn(number), row, flush=True)
        if number % 20 == 19 or number == numbers[-1]:
            lines = (f' "{n}": {json.dumps(row)}' for n, row in rows.items())
            DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table() -> None:
    rows = json.loads(DATA.read_text())
    alarms = {n: row["findings"] for n, row in rows.items() if row.get("findings")}
    refused = [n for n, row in rows.items() if "refused" in row]
    kinds = Counter(f.partition(":")[0] for found in alarms.values() for f in found)
    counts = Counter(asdict(drawn(int(n)))["init"] for n in alarms)
    lines = [(kind, count) for kind, count in kinds.most_common()]
    tables.put(
        "accuracy",
        "random modules",
        f"{len(rows)} modules, {len(alarms)} with a false alarm, {len(refused)} refused; by "
        f"initialisation: {dict(counts) or 'none'}.",
        tables.markdown(("false alarm", "findings"), lines or [("none", 0)]),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--modules", type=int, default=1000)
    running.add_argument("--first", type=int, default=0)
    commands.add_parser("show").add_argument("number", type=int)
    commands.add_parser("table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "run":
        run(range(arguments.first, arguments.first + arguments.modules))
    elif arguments.command == "show":
        print(drawn(arguments.number))
        print(moments.check(built(arguments.number)))
    else:
        table()
