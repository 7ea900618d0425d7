"""Slips that people make at initialisation, planted in five code styles, and what `check` says.

    nice python benchmarks/planted_bugs.py            # every slip in every style, as a table
    nice python benchmarks/planted_bugs.py correct    # correct modules: anything found is an alarm

"named": a finding of the slip's kind at its place; "noted": a note says it; "refused": the module
is not read, and the refusal names the place; "misnamed": findings, none of which is the slip's;
"silent": nothing. A slip that a style cannot have is left out.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
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
from check_modules import family_module, same  # noqa: E402
from foreign_slips import MATRICES, OUTWARD, STD, Parts, _draw, _instead  # noqa: E402
from own_styles import EinsumLM, TitanGPT, TorchLM  # noqa: E402

LAYERS, WIDTH, HEADS, VOCAB, LENGTH = 4, 64, 4, 97, 24


# --- styles ---------------------------------------------------------------------------------------


STYLES = ("nanoGPT", "Llama", "torch", "einsum", "GPT-2")
OWN: Any = dict(zip(STYLES[1:4], (TitanGPT, TorchLM, EinsumLM), strict=True))


def built(style: str, init: str, seed: int) -> nn.Module:
    """A module of a style, as `init` draws it ("gpt2": Hugging Face's is drawn so already)."""
    if style == "GPT-2":
        return family_module("gpt2", LAYERS, WIDTH, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = checked_gpt.Config(n_layer=LAYERS, block_size=LENGTH)
        made = OWN[style](layers=LAYERS) if style in OWN else checked_gpt.GPT(config)
        with torch.no_grad():
            _draw(Parts(made), init)
    return made


def blocks(module: Any, style: str) -> Sequence[Any]:
    if style in ("nanoGPT", "GPT-2"):
        return list(module.transformer.get_submodule("h"))
    held = module.blocks if style == "einsum" else module.layers
    return list(held.values() if style == "Llama" else held)


def halves(block: Any, style: str, more: Any, named: Any) -> tuple[Any, ...]:
    """Norm and block twice, of one layer's call."""
    if style == "Llama":
        return (block.attention_norm, lambda y: block.attention(y, *more), block.ffn_norm,
                block.feed_forward)  # fmt: skip
    if style == "torch":
        mask = named["src_mask"]
        return block.norm1, lambda y: block._sa_block(y, mask, None), block.norm2, block._ff_block
    if style == "einsum":
        return block.norm1, block.attend, block.norm2, block.feed
    attend = (lambda y: block.attn(y, **named)[0]) if style == "GPT-2" else block.attn
    return block.ln_1, attend, block.ln_2, block.mlp


def _form(form: Any, *numbers: int) -> Any:
    """Layers whose two sums are of another form: form(x, norm, inner, layer, half)."""

    def plant(module: nn.Module, parts: Parts, style: str) -> None:
        for number, block in enumerate(blocks(module, style), start=1):

            def forward(x: Tensor, *more: Any, of: Any = block, **named: Any) -> Tensor:
                norm1, attend, norm2, feed = halves(of, style, more, named)
                return form(form(x, norm1, attend, of, 0), norm2, feed, of, 1)

            if not numbers or number in numbers:
                block.forward, block.number = forward, number

    return plant


class _Operation(TorchFunctionMode):
    """Changes what some layers' attention is called with."""

    def __init__(self, change: Any, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.change, self.layers, self.count = change, layers, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        if func in (f.scaled_dot_product_attention, f.multi_head_attention_forward):
            self.count += 1
            if not self.layers or self.count in self.layers:
                self.change(args, kwargs)
        return func(*args, **kwargs)


def operate(module: nn.Module, change: Any, *layers: int) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        with _Operation(change, layers):
            return plain(*given, **named)

    module.forward = forward


def _unmask(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs.update(attn_mask=None, is_causal=False)


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
    """What is done to (module, parts, style), the kinds of findings that are it, the role and layer
    of the tensor that they must name, the styles that can have it, what is drawn first, and words
    of a note that says it."""

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


def _drawn(square: Callable[[int, int], float], *roles: str, layer: int | None = None) -> Any:
    return lambda m, p, s: [
        b.normal_(std=square(r.fan_in, r.fan_out) ** 0.5)
        for r, b in zip(p.roles(*roles, layer=layer), p.blocks(*roles, layer=layer), strict=True)
    ]


def _uniform(bound: Callable[[float, int], float], *roles: str, layer: int | None = None) -> Any:
    return lambda m, p, s: [
        b.uniform_(-(width := bound(float(b.std()), r.fan_in)), width)
        for r, b in zip(p.roles(*roles, layer=layer), p.blocks(*roles, layer=layer), strict=True)
    ]


def _biases(layer: int | None = None) -> Any:
    return _uniform(lambda s, i: WIDTH**-0.5, *(f"{n}.bias" for n in MATRICES), layer=layer)


def _untied(std: float) -> Any:
    def plant(module: Any, parts: Parts, style: str) -> None:
        head = getattr(module, {"torch": "fc", "Llama": "output"}.get(style, "lm_head"))
        head.weight = nn.Parameter(torch.randn(head.weight.shape) * std)

    return plant


def _no_final(module: Any, parts: Parts, style: str) -> None:
    last = style in ("nanoGPT", "GPT-2")
    part, name = (module.transformer, "ln_f") if last else (module, "norm")
    held, name = (vars(module), "final") if style == "einsum" else (part._modules, name)
    held[name] = nn.Identity()


def _shared(module: Any, parts: Parts, style: str) -> None:
    paths = [parts.name("ffn_in", layer) for layer in (2, 3)]
    owner, _, name = paths[1].rpartition(".")
    setattr(module.get_submodule(owner), name, module.get_parameter(paths[0]))


def _epsilon(module: Any, parts: Parts, style: str) -> None:
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 1.0


def _post(x: Any, norm: Any, inner: Any, of: Any, half: int) -> Any:
    return norm(x + inner(x))


def _one_lns(x: Any, norm: Any, inner: Any, of: Any, half: int) -> Any:
    return x + inner(norm(x) / (1 if half else math.sqrt(of.number)))


def _dropping(x: Any, norm: Any, inner: Any, of: Any, half: int) -> Any:
    return x + f.dropout(inner(norm(x)), 0.4, of.training)


def _unsummed(without: int) -> Any:
    return lambda x, norm, inner, of, half: inner(norm(x)) + (x if half != without else 0)


def _one_block(module: Any, parts: Parts, style: str) -> None:
    held = module.transformer.h if style in ("nanoGPT", "GPT-2") else module.layers
    for number in range(1, len(held)):
        held[number] = held[0]


def _scale(factor: float) -> Any:
    return lambda m, p, s: operate(m, lambda args, kwargs: kwargs.update(scale=factor))


def _scaled(by: Callable[[int], float]) -> Any:
    return lambda x, norm, inner, of, half: x + by(of.number) * inner(norm(x))


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
    Slip("norm behind the sum", ("norm placement",), _form(_post), words="Post-LN"),
    Slip("Post-LN in one layer", ("norm placement",), _form(_post, 2)),
    Slip("no final norm", ("no final norm",), _no_final),
    Slip("depth scale on q, k, v", ("wrong variance",),
         lambda m, p, s: _instead(p, ("output",), "query", "key", "value"), "query"),
    Slip("depth scale on ffn_in", ("wrong variance",),
         lambda m, p, s: _instead(p, ("ffn_out",), "ffn_in", "gate"), "ffn_in"),
    Slip("depth scale 1/N", ("wrong variance",), _times(DEPTH / LAYERS, *OUTWARD), "output"),
    Slip("depth scale twice", ("wrong variance",), _times(1 / DEPTH, *OUTWARD), "output"),
    Slip("embedding of std 1", ("initial loss", "embedding scale", "wrong variance"),
         _times(50, "token"), "token"),
    Slip("tied head forgotten", ("untied head",), _untied(STD), "", None, ("nanoGPT", "GPT-2")),
    Slip("head of std 1", ("initial loss",), _untied(1.0), "", None,
         ("nanoGPT", "Llama", "torch", "GPT-2")),
    Slip("q k over d_head", ("attention scale",), _scale(1 / HEAD), "query", None, OWN_MASK),
    Slip("q k not divided", ("attention scale",), _scale(1.0), "query", None, OWN_MASK),
    Slip("q k over sqrt(d_model)", ("attention scale",), _scale(WIDTH**-0.5), "query", None,
         OWN_MASK),
    Slip("fused Xavier", ("wrong variance",),
         _drawn(lambda i, o: 2 / (4 * WIDTH), "query", "key", "value"), "query", None,
         ("nanoGPT", "torch"), "xavier"),
    Slip("fans transposed, ffn variances swapped", ("wrong variance",),
         _drawn(lambda i, o: 1 / o, *MATRICES), "ffn_in", None, ("nanoGPT", "torch", "einsum"),
         "lecun"),
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
    Slip("dropout in one layer", ("dropout",), _form(_dropping, 2), words="probability of 0.4"),
    Slip("shared matrix", ("shared matrix",), _shared, "ffn_in", 2),
    Slip("frozen layer", ("frozen",),
         lambda m, p, s: [q.requires_grad_(False) for q in blocks(m, s)[1].parameters()],
         words="frozen"),
    Slip("Kaiming's 2 forgotten", ("wrong variance",), lambda m, p, s: None, "ffn_in", None,
         STYLES[:-1], "lecun"),
    Slip("LayerNorm scaling on attention only", ("norm scale",), _form(_one_lns),
         words="LayerNorm Scaling"),
    Slip("residual multiplier forgotten", ("branch scale",),
         _form(_scaled(lambda n: 1.0 if n == 2 else BETA))),
    Slip("residual multiplier twice", ("branch scale",),
         _form(_scaled(lambda n: BETA**2 if n == 2 else BETA))),
    Slip("residual multiplier beside depth scale", ("branch scale",),
         _form(_scaled(lambda n: 1 / DEPTH)), words="stands on top of"),
    Slip("rotary on values", ("rotary on values",), lambda m, p, s: operate(m, _turned_values),
         "", None, OWN_MASK, words="turn the values"),
    Slip("no sum around attention", ("no residual path", "not what its config gives"),
         _form(_unsummed(0))),
    Slip("no sum around the feed-forward block",
         ("no residual path", "not what its config gives"), _form(_unsummed(1))),
    Slip("no sum around attention in one layer", ("skip scale", "odd layer"),
         _form(_unsummed(0), 3)),
    Slip("one block in every place", ("one block several times",), _one_block, "", None,
         ("nanoGPT", "torch")),
    Slip("huge epsilon", ("norm epsilon",), _epsilon, "", None, STYLES, "gpt2", "epsilon"),
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
    told = [str(t) for t in report.findings]
    for t, said in zip(report.findings, told, strict=True):
        named = any(same(where, name) for name in (*t.where, ""))
        if t.kind in slip.kinds and named and (slip.layer is None or slip.layer in t.layers):
            return "named", said
    if slip.words and any(slip.words in said for said in (*report.notes, report.verdict())):
        return "noted", "; ".join(said for said in report.notes if slip.words in said)
    return ("misnamed" if told else "silent"), "; ".join(told)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["correct"]:
        for style, init, seed in itertools.product(STYLES, ("gpt2", "xavier"), range(100, 106)):
            if (style, init) != ("GPT-2", "xavier"):
                found = [str(t) for t in moments.check(built(style, init, seed)).findings]
                print(style, init, seed, found or "nothing", flush=True)
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
