"""Slips that people make at initialisation, planted in five code styles, and what `check` says.

    nice python benchmarks/planted_bugs.py            # every slip in every style, as a table
    nice python benchmarks/planted_bugs.py correct    # correct modules: anything found is an alarm

"named": a finding of the slip's kind at its place; "noted": a note says it; "refused": the module
is not read, and the refusal names the place; "misnamed": findings, none of which is the slip's;
"silent": nothing. A slip that a style cannot have is left out.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.overrides import TorchFunctionMode

import moments

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

import checked_gpt  # noqa: E402
import own_styles  # noqa: E402
from check_modules import family_module, same  # noqa: E402
from foreign_slips import MATRICES, OUTWARD, STD, Parts, _draw  # noqa: E402

LAYERS, WIDTH, HEADS, VOCAB, LENGTH = 4, 64, 4, 97, 24


# --- styles ---------------------------------------------------------------------------------------


class TorchLM(nn.Module):
    """nn.TransformerEncoderLayer between tables and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", norm_first=True, batch_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.fc(self.norm(x))


class EinsumLayer(nn.Module):
    """Parameters of its own, one per head and matrix."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(HEADS, WIDTH, size) * STD) for _ in range(3)
        )
        self.o = nn.Parameter(torch.randn(HEADS, size, WIDTH) * STD / math.sqrt(2 * LAYERS))
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * STD)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * STD / math.sqrt(2 * LAYERS))
        self.g1, self.g2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.eps = 1e-5

    def norm1(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.g1, eps=self.eps)

    def norm2(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.g2, eps=self.eps)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.q, self.k, self.v))
        mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhte,hed->btd", mixed, self.o)

    def feed(self, x: Tensor) -> Tensor:
        return f.gelu(x @ self.up) @ self.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class EinsumLM(nn.Module):
    """Tables and a tied head around them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH) * STD)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * STD)
        self.blocks = nn.ModuleList(EinsumLayer() for _ in range(LAYERS))
        self.last = nn.Parameter(torch.ones(WIDTH))

    def final(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.last)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.table[tokens] + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.final(x) @ self.table.T
        if targets is None:
            return logits
        return logits, f.cross_entropy(logits.flatten(0, 1), targets.flatten())


STYLES = ("nanoGPT", "Llama", "torch", "einsum", "GPT-2")


def built(style: str, init: str, seed: int) -> nn.Module:
    """A module of a style, as `init` draws it ("gpt2": Hugging Face's is drawn so already)."""
    if style == "GPT-2":
        return family_module("gpt2", LAYERS, WIDTH, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module
        if style == "nanoGPT":
            made = checked_gpt.GPT(checked_gpt.Config(n_layer=LAYERS, block_size=LENGTH))
        else:
            made = {
                "Llama": functools.partial(own_styles.TitanGPT, layers=LAYERS),
                "torch": TorchLM,
                "einsum": EinsumLM,
            }[style]()
        with torch.no_grad():
            _draw(Parts(made), init)
    return made


def blocks(module: Any, style: str) -> Sequence[Any]:
    if style == "Llama":
        return list(module.layers.values())
    if style == "torch":
        return list(module.layers)
    return list(module.blocks if style == "einsum" else module.transformer["h"] if style
                == "nanoGPT" else module.transformer.h)  # fmt: skip


Half = Callable[[Tensor], Tensor]


def halves(block: Any, style: str, more: Any, named: Any) -> tuple[Half, Half, Half, Half]:
    """Norm and block twice, of one layer's call."""
    if style == "Llama":
        return (block.attention_norm, lambda y: block.attention(y, *more), block.ffn_norm,
                block.feed_forward)  # fmt: skip
    if style == "torch":
        mask = named["src_mask"]
        return block.norm1, lambda y: block._sa_block(y, mask, None), block.norm2, block._ff_block
    if style == "einsum":
        return block.norm1, block.attend, block.norm2, block.feed
    if style == "GPT-2":
        return block.ln_1, lambda y: block.attn(y, **named)[0], block.ln_2, block.mlp
    return block.ln_1, block.attn, block.ln_2, block.mlp


def rebuild(module: nn.Module, style: str, form: Any, *numbers: int) -> None:
    """Layers of another form: form(x, norm, attend, norm, feed, number)."""
    for number, block in enumerate(blocks(module, style), start=1):
        if numbers and number not in numbers:
            continue

        def forward(x: Tensor, *more: Any, block: Any = block, number: int = number, **named: Any):
            return form(x, *halves(block, style, more, named), number)

        block.forward = forward


class _Operation(TorchFunctionMode):
    """Changes what some layers' attention is called with."""

    def __init__(self, change: Callable[[list[Any], dict[str, Any]], Any], layers: Any) -> None:
        super().__init__()
        self.change, self.layers, self.count = change, layers, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        if func in (f.scaled_dot_product_attention, f.multi_head_attention_forward):
            self.count += 1
            if self.layers is None or self.count in self.layers:
                self.change(args, kwargs)
        return func(*args, **kwargs)


def operate(module: nn.Module, change: Any, *layers: int) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        with _Operation(change, layers or None):
            return plain(*given, **named)

    module.forward = forward


def _unmask(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs.update(attn_mask=None, is_causal=False)


def _logits(factor: float) -> Any:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs["scale"] = factor

    return change


def _turned_values(args: list[Any], kwargs: dict[str, Any]) -> None:
    length, size = args[2].shape[-2:]
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angle = torch.outer(torch.arange(length), speeds)
    one, two = args[2][..., : size // 2], args[2][..., size // 2 :]
    cos, sin = angle.cos(), angle.sin()
    args[2] = torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


# --- slips ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slip:
    """One slip.

    Attributes:
        kinds: of findings that are it, words of their reason after a colon.
        plant: of module, parts, style.
        role, layer: of the tensor that has to be named; "" for none.
        styles: that can have it.
        init: what is drawn first.
        words: of a note that says it.
    """

    name: str
    kinds: tuple[str, ...]
    plant: Callable[[Any, Parts, str], Any]
    role: str = ""
    layer: int | None = None
    styles: tuple[str, ...] = STYLES
    init: str = "gpt2"
    words: str = ""


def _times(factor: float, *roles: str, layer: int | None = None) -> Any:
    return lambda m, p, s: [b.mul_(factor) for b in p.blocks(*roles, layer=layer)]


def _several(*changes: Any) -> Any:
    return lambda m, p, s: [change(m, p, s) for change in changes]


def _drawn(square: Callable[[int, int], float], *roles: str, layer: int | None = None) -> Any:
    return lambda m, p, s: [
        b.normal_(std=square(r.fan_in, r.fan_out) ** 0.5)
        for r, b in zip(p.roles(*roles, layer=layer), p.blocks(*roles, layer=layer), strict=True)
    ]


def _uniform(bound: Callable[[float, int], float], *roles: str, layer: int | None = None) -> Any:
    def plant(m: Any, p: Parts, s: str) -> None:
        for r, b in zip(p.roles(*roles, layer=layer), p.blocks(*roles, layer=layer), strict=True):
            width = bound(float(b.std()), r.fan_in)
            b.uniform_(-width, width)

    return plant


def _biases(layer: int | None = None) -> Any:
    return _uniform(lambda s, i: WIDTH**-0.5, *(f"{n}.bias" for n in MATRICES), layer=layer)


def _untied(std: float) -> Any:
    def plant(module: Any, parts: Parts, style: str) -> None:
        head = module.fc if style == "torch" else module.output if style == "Llama" else (
            module.lm_head)  # fmt: skip
        head.weight = nn.Parameter(torch.randn(head.weight.shape) * std)

    return plant


def _no_final(module: Any, parts: Parts, style: str) -> None:
    if style == "einsum":
        module.final = lambda x: x
    else:
        owner = {"nanoGPT": "transformer.ln_f", "GPT-2": "transformer.ln_f"}.get(style, "norm")
        parent, _, name = owner.rpartition(".")
        part = module.get_submodule(parent)
        part._modules[name] = nn.Identity()


def _shared(module: Any, parts: Parts, style: str) -> None:
    paths = [parts.name("ffn_in", layer) for layer in (2, 3)]
    owner, _, name = paths[1].rpartition(".")
    setattr(module.get_submodule(owner), name, module.get_parameter(paths[0]))


def _epsilon(value: float) -> Any:
    def plant(module: Any, parts: Parts, style: str) -> None:
        for part in module.modules():
            for name in ("eps", "norm_eps"):
                if hasattr(part, name):
                    setattr(part, name, value)

    return plant


def _dropped(module: Any, parts: Parts, style: str) -> None:
    drop = nn.Dropout(0.4)

    def form(x: Tensor, n1: Half, attend: Half, n2: Half, feed: Half, number: int) -> Tensor:
        x = x + drop(attend(n1(x)))
        return x + drop(feed(n2(x)))

    module.one_drop = drop
    rebuild(module, style, form, 2)


def _form(*numbers: int, form: Any) -> Any:
    return lambda m, p, s: rebuild(m, s, form, *numbers)


def _post(x: Any, n1: Any, attend: Any, n2: Any, feed: Any, number: int) -> Any:
    x = n1(x + attend(x))
    return n2(x + feed(x))


def _scaled(by: Callable[[int], float]) -> Any:
    def form(x: Any, n1: Any, attend: Any, n2: Any, feed: Any, number: int) -> Any:
        x = x + by(number) * attend(n1(x))
        return x + by(number) * feed(n2(x))

    return form


def _half_lns(x: Any, n1: Any, attend: Any, n2: Any, feed: Any, number: int) -> Any:
    x = x + attend(n1(x) / math.sqrt(number))
    return x + feed(n2(x))


DEPTH, HEAD = math.sqrt(2 * LAYERS), WIDTH // HEADS
OWN_MASK = ("nanoGPT", "Llama", "einsum", "GPT-2")
BETA = 0.7
WIDE = ("wrong variance", "odd layer")
SLIPS = (
    Slip("output zero in one layer", WIDE, _times(0, "output", layer=3), "output", 3),
    Slip("ffn_out zero in one layer", WIDE, _times(0, "ffn_out", layer=2), "ffn_out", 2),
    Slip("value x 3 in one layer", WIDE, _times(3, "value", layer=2), "value", 2),
    Slip("query x 30 in one layer", WIDE, _times(30, "query", layer=3), "query", 3),
    Slip("no mask", ("tokens see later ones",), lambda m, p, s: operate(m, _unmask)),
    Slip("no mask in one layer", ("tokens see later ones",),
         lambda m, p, s: operate(m, _unmask, 2)),
    Slip("norm behind the sum", ("norm placement",), _form(form=_post), words="Post-LN"),
    Slip("Post-LN in one layer", ("norm placement",), _form(2, form=_post)),
    Slip("no final norm", ("no final norm",), _no_final),
    Slip("depth scale on q, k, v", ("wrong variance",),
         _several(_times(DEPTH, "output"), _times(1 / DEPTH, "query", "key", "value")), "query"),
    Slip("depth scale on ffn_in", ("wrong variance",),
         _several(_times(DEPTH, "ffn_out"), _times(1 / DEPTH, "ffn_in", "gate")), "ffn_in"),
    Slip("depth scale 1/N", ("wrong variance",), _times(DEPTH / LAYERS, *OUTWARD), "output"),
    Slip("depth scale twice", ("wrong variance",), _times(1 / DEPTH, *OUTWARD), "output"),
    Slip("embedding of std 1", ("initial loss", "embedding scale", "wrong variance"),
         _times(50, "token"), "token"),
    Slip("tied head forgotten", ("untied head",), _untied(STD), "", None, ("nanoGPT", "GPT-2")),
    Slip("head of std 1", ("initial loss",), _untied(1.0), "", None,
         ("nanoGPT", "Llama", "torch", "GPT-2")),
    Slip("q k over d_head", ("attention scale",), lambda m, p, s: operate(m, _logits(1 / HEAD)),
         "query", None, OWN_MASK),
    Slip("q k not divided", ("attention scale",), lambda m, p, s: operate(m, _logits(1.0)),
         "query", None, OWN_MASK),
    Slip("q k over sqrt(d_model)", ("attention scale",),
         lambda m, p, s: operate(m, _logits(WIDTH**-0.5)), "query", None, OWN_MASK),
    Slip("fused Xavier", ("wrong variance",),
         _drawn(lambda i, o: 2 / (4 * WIDTH), "query", "key", "value"), "query", None,
         ("nanoGPT", "torch"), "xavier"),
    Slip("fans transposed", ("wrong variance",), _drawn(lambda i, o: 1 / o, *MATRICES), "ffn_in",
         None, ("nanoGPT", "torch", "einsum"), "lecun"),
    Slip("std as a uniform's bound", ("wrong variance",), _uniform(lambda s, i: s, "ffn_in"),
         "ffn_in"),
    Slip("biases left random", ("biases",), _biases(), "ffn_in.bias", None,
         ("nanoGPT", "torch", "GPT-2")),
    Slip("biases in one layer", ("biases", "odd layer"), _biases(3), "ffn_in.bias", 3,
         ("nanoGPT", "torch", "GPT-2")),
    Slip("gains drawn", ("norm gain",),
         lambda m, p, s: [b.normal_(std=STD) for r in p.found.roles if r.name.endswith("norm.gain")
                          for b in p.blocks(r.name, layer=r.layer)], "attention.norm.gain"),
    Slip("gains of one layer 0.3", ("norm gain", "odd layer"),
         _times(0.3, "attention.norm.gain", layer=2), "attention.norm.gain", 2),
    Slip("dropout in one layer", ("dropout",), _dropped, words="dropout"),
    Slip("shared matrix", ("shared matrix",), _shared, "ffn_in", 2),
    Slip("frozen layer", ("frozen",),
         lambda m, p, s: [q.requires_grad_(False) for q in blocks(m, s)[1].parameters()],
         words="frozen"),
    Slip("Kaiming's 2 forgotten", ("wrong variance",), lambda m, p, s: None, "ffn_in", None,
         STYLES[:-1], "lecun"),
    Slip("LayerNorm scaling on attention only", ("norm scale",), _form(form=_half_lns),
         words="LayerNorm Scaling"),
    Slip("residual multiplier forgotten", ("branch scale",),
         _form(form=_scaled(lambda n: 1.0 if n == 2 else BETA))),
    Slip("residual multiplier twice", ("branch scale",),
         _form(form=_scaled(lambda n: BETA**2 if n == 2 else BETA))),
    Slip("residual multiplier beside depth scale", ("branch scale",),
         _form(form=_scaled(lambda n: 1 / DEPTH)), words="residual multiplier"),
    Slip("ffn variances swapped", ("wrong variance",),
         _several(_drawn(lambda i, o: 1 / o, "ffn_in"), _drawn(lambda i, o: 1 / o, "ffn_out")),
         "ffn_in", None, ("nanoGPT", "torch", "einsum"), "lecun"),
    Slip("rotary on values", ("rotary on values",), lambda m, p, s: operate(m, _turned_values),
         "", None, OWN_MASK, words="rotary"),
    Slip("huge epsilon", ("norm epsilon",), _epsilon(1.0), "", None, STYLES, "gpt2", "epsilon"),
    Slip("one layer as torch draws it", WIDE,
         _uniform(lambda s, i: i**-0.5, *MATRICES, layer=3), "ffn_in", 3),
)  # fmt: skip


def planted(slip: Slip, style: str, seed: int) -> tuple[nn.Module, str]:
    """The module with the slip in it, and the name of the tensor that has to be named."""
    module = built(style, slip.init, seed)
    parts = Parts(module)
    where = parts.name(slip.role, slip.layer) if slip.role else ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        slip.plant(module, parts, style)
    return module, where


def outcome(slip: Slip, style: str, seed: int = 1) -> tuple[str, str]:
    """What `check` makes of it, in one word, and what it says."""
    module, where = planted(slip, style, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = moments.check(module)
        except moments.MomentsError as error:
            said = str(error).splitlines()[0]
            return ("refused" if where and where in said else "refused, unnamed"), said
    told = [f"{t.kind} {t.parameters} {t.layers}: {t.reason}" for t in report.findings]
    for t in report.findings:
        named = any(same(where, name) for name in (*t.parameters, ""))
        if t.kind in slip.kinds and named and (slip.layer is None or slip.layer in t.layers):
            return "named", told[report.findings.index(t)]
    if slip.words and any(slip.words in said for said in (*report.notes, report.verdict())):
        return "noted", "; ".join(said for said in report.notes if slip.words in said)
    return ("misnamed" if told else "silent"), "; ".join(told)


def correct(seeds: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
    """Correct modules of every style, two ways to draw them."""
    for style in STYLES:
        for init in ("gpt2", "xavier") if style != "GPT-2" else ("gpt2",):
            for seed in seeds:
                yield f"{style}, {init}, seed {seed}", built(style, init, seed)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["correct"]:
        for name, module in correct(range(100, 106)):
            found = moments.check(module).findings
            print(name, [str(t) for t in found] or "nothing", flush=True)
        return
    wanted, counts = sys.argv[1:], Counter[str]()
    for slip in SLIPS:
        if wanted and not any(word in slip.name for word in wanted):
            continue
        row = {style: outcome(slip, style) for style in slip.styles}
        counts.update(word for word, _ in row.values())
        print(f"{slip.name:40}", *(f"{style}: {word};" for style, (word, _) in row.items()))
        for style, (word, said) in row.items():
            if word != "named" or wanted:
                print(f"      {style}, {word}: {said[:600]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
