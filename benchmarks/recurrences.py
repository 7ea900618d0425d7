"""Mixers of transformers, drawn many times, against their kernels' laws.

    python benchmarks/recurrences.py [CASE ...]    # a table; some minutes for all

Every draw has fresh parameters by the module's own rule, tokens of exactly the kernel asked for,
and a gradient of another such kernel at the output. Differences are of sums over parts of a
kernel, in percent of what was measured, with one standard error of the draws.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from moments.engine.state import Gradient, Kernel, Signal
from moments.layers.recurrent import Mixer
from moments.layers.recurrent.leaf import Inward
from moments.model.block import Block
from moments.model.mixers import (
    RGLRU,
    GatedDeltaNet,
    LinearAttention,
    Mamba,
    Mamba2,
    ShortConvolution,
    lightning_decays,
)
from moments.model.transformer import Transformer

LENGTH, D_MODEL = 32, 128
Array = Any


class Case(NamedTuple):
    """A module, the rule that draws its parameters again, and what it is declared as.

    Attributes:
        run: takes (1, L, d_model).
        draw: draws every parameter anew.
        block: the declaration.
        variance: of the entries of the matrices that read the input.
        output: of those of the output projection.
    """

    module: Any
    draw: Callable[[], None]
    block: Block
    variance: float
    output: float
    run: Callable[[Any], Any] | None = None


def _normal(module: Any, std: float) -> None:
    for one in module.modules():
        if isinstance(one, torch.nn.Linear | torch.nn.Conv1d):
            one.weight.normal_(0.0, std)


def mamba2(std: float, heads: int = 8, groups: int = 1) -> Case:
    sizes = {"num_heads": heads, "head_dim": 256 // heads, "state_size": 64, "n_groups": groups}
    config = transformers.Mamba2Config(
        hidden_size=D_MODEL, num_hidden_layers=1, vocab_size=8, pad_token_id=0, expand=2, **sizes
    )
    config.initializer_range = std
    model = transformers.Mamba2Model(config)
    module = model.layers[0].mixer

    def draw() -> None:
        model._init_weights(module)
        module.in_proj.weight.normal_(0.0, std)

    block = Mamba2(heads, 256 // heads, 64, std**2, std**2, groups=groups)
    return Case(module, draw, block, std**2, 1 / (3 * 256))


def delta(std: float, taps: float, rates: tuple[float, float], steps: float, eps: float) -> Case:
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4}
    config = transformers.Qwen3NextConfig(
        hidden_size=D_MODEL, linear_num_value_heads=8, rms_norm_eps=eps, **sizes
    )
    module = Qwen3NextGatedDeltaNet(config, 0)

    def draw() -> None:
        _normal(module, std)
        module.conv1d.weight.normal_(0.0, taps)
        module.A_log.uniform_(*rates).log_()
        module.dt_bias.fill_(steps + math.log(-math.expm1(-steps)))

    block = GatedDeltaNet(
        *(4, 8, 32, 32),
        *(std**2,) * 3,
        tap_variance=taps**2,
        rates=rates,
        steps=(steps, steps),
        norm_epsilon=eps,
    )
    return Case(module, draw, block, std**2, std**2)


def convolution(std: float) -> Case:
    module = Lfm2ShortConv(transformers.Lfm2Config(hidden_size=D_MODEL, num_hidden_layers=1), 0)
    return Case(module, lambda: _normal(module, std), ShortConvolution(3, std**2), std**2, std**2)


def lightning(std: float) -> Case:
    sizes = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_hidden_layers": 3}
    module = MiniMaxLightningAttention(transformers.MiniMaxConfig(head_dim=32, **sizes), 1)
    decays = lightning_decays(4, 1, 3)
    block = LinearAttention(4, 32, 32, decays, "silu", 1.0, "all", 1e-6, "sigmoid", std**2)

    def run(x: Any) -> Any:
        return module(x, (None, None), None)[0]

    return Case(module, lambda: _normal(module, std), block, std**2, std**2, run)


def mamba(kind: str, std: float) -> Case:
    """Of the type, with 256 features of states of 16 and steps from 8."""
    jamba = kind == "jamba"
    sizes = {"mamba_dt_rank": 8, "num_experts": 1} if jamba else {"time_step_rank": 8}
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=D_MODEL, num_hidden_layers=1, vocab_size=8, pad_token_id=0, **sizes
    )
    config.initializer_range = std
    model = transformers.AutoModel.from_config(config)
    module = model.layers[0].mamba if jamba else model.layers[0].mixer

    def draw() -> None:
        for one in (*module.children(), module):
            model._init_weights(one)

    if jamba:
        fields: dict[str, Any] = {"tap_variance": std**2, "tap_distribution": "normal"}
        fields |= {"steps": (math.log(2),) * 2, "inner_norm": "affine"}
        steps, output = std**2, std**2
    else:
        fields = {"inner_norm": "plain"} if kind == "falcon_mamba" else {}
        steps, output = 1 / (3 * 8), 1 / (3 * 256)
    block = Mamba(256, 16, 8, std**2, steps, std**2, **fields)
    return Case(module, draw, block, std**2, output)


def kimi(std: float, taps: float, eps: float) -> Case:
    sizes = {"linear_head_dim": 32, "linear_num_heads": 8, "rms_norm_eps": eps}
    config = transformers.KimiLinearConfig(hidden_size=D_MODEL, num_hidden_layers=1, **sizes)
    module = KimiLinearDeltaAttention(config, 0)

    def draw() -> None:
        _normal(module, std)
        module.conv1d.weight.normal_(0.0, taps)
        gate = module.forget_gate
        gate.A_log.uniform_(1.0, 16.0).log_()
        steps = gate.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        gate.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    block = GatedDeltaNet(
        *(8, 8, 32, 32),
        *(std**2,) * 3,
        tap_variance=taps**2,
        rates=(1.0, 16.0),
        steps=(1e-3, 1e-1),
        norm_epsilon=eps,
        decay="channel",
        gate="sigmoid",
        rank=32,
    )
    return Case(module, draw, block, std**2, std**2)


def rg_lru(scale: float) -> Case:
    config = transformers.RecurrentGemmaConfig(
        hidden_size=D_MODEL, num_hidden_layers=2, num_attention_heads=4, vocab_size=8
    )
    config.w_init_variance_scale = scale
    model = transformers.RecurrentGemmaModel(config)
    module = model.layers[0].temporal_block

    def draw() -> None:
        for one in (*module.children(), module):
            model._init_weights(one)

    places = torch.arange(LENGTH)[None]
    block = RGLRU(D_MODEL, 4, 1 / D_MODEL, *(scale / 32,) * 2, tap_variance=scale / 4)

    def run(x: Any) -> Any:
        return module(x, places, None, use_cache=False)[0]

    return Case(module, draw, block, 1 / D_MODEL, 1 / D_MODEL, run)


CASES: dict[str, Callable[[], Case]] = {
    "convolution, std .1": lambda: convolution(0.1),
    "lightning, std .1": lambda: lightning(0.1),
    "mamba2, std .02": lambda: mamba2(0.02),
    "mamba2, std .1": lambda: mamba2(0.1),
    "mamba2, std .2, 2 groups": lambda: mamba2(0.2, groups=2),
    "mamba2, std .56": lambda: mamba2(0.56),
    "mamba2, std .56, 32 heads": lambda: mamba2(0.56, 32),
    "delta, std .05": lambda: delta(0.05, 0.02, (0.01, 16.0), 1.3133, 1e-6),
    "delta, std .1, slow": lambda: delta(0.1, 0.3, (0.1, 1.0), 0.3, 1e-5),
    "mamba, std .1": lambda: mamba("mamba", 0.1),
    "falcon_mamba, std .1": lambda: mamba("falcon_mamba", 0.1),
    "jamba, std .05": lambda: mamba("jamba", 0.05),
    "kimi, std .05": lambda: kimi(0.05, 0.02, 1e-5),
    "kimi, std .1, taps .3": lambda: kimi(0.1, 0.3, 1e-5),
    "rg_lru, scale .01": lambda: rg_lru(0.01),
    "rg_lru, scale 1": lambda: rg_lru(1.0),
}


def _kernel(share: float) -> Array:
    return share + (1 - share) * np.eye(LENGTH)


def _near() -> Array:
    lag = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
    return 0.2 + 0.6 * np.exp(-lag / 4.0) + 0.2 * np.eye(LENGTH)


TOKENS = {"alike .4": _kernel(0.4), "near": _near()}


def _realised(kernel: Array, random: np.random.Generator) -> Any:
    """(L, d_model) whose overlaps are exactly those."""
    turned = np.linalg.qr(random.standard_normal((D_MODEL, LENGTH)))[0]
    root = np.linalg.cholesky(kernel + 1e-12 * np.eye(LENGTH))
    return torch.tensor(root @ turned.T * D_MODEL**0.5, dtype=torch.float32)


def predicted(case: Case, kernel: Array, received: Array) -> dict[str, Any]:
    """Kernels at the output and of the gradient at the input, and norms of gradients."""
    model = Transformer(1, D_MODEL, 4, LENGTH, causal=True, mixer=case.block)
    shapes = dict(case.block.shapes(model))
    width, _ = shapes.pop("output")
    own = case.block.variances(model)
    inward = (Inward(k, *of, own.get(k, case.variance), 1.0) for k, of in shapes.items())
    mixer = Mixer("", case.block, D_MODEL, tuple(inward), width)
    output, pullback = mixer.forward(Signal(Kernel.of_matrix(kernel), LENGTH, width=D_MODEL))
    at_heads = Kernel.of_matrix(received * D_MODEL * case.output)
    pulled = pullback(Gradient(at_heads, LENGTH))
    weights = pulled.weights()
    return {
        "output": output.kernel.off_diagonal * width * case.output,
        "gradient": pulled.gradient.kernel.off_diagonal,
        "matrices": sum(weights[name] for name in shapes),
    }


def measured(case: Case, kernel: Array, received: Array, draws: int) -> dict[str, Array]:
    random, found = np.random.default_rng(1), {"output": [], "gradient": [], "matrices": []}
    torch.manual_seed(0)
    no_matrix = re.compile("out_proj|o_proj|linear_out|conv|norm")
    named = [name for name, _ in case.module.named_parameters() if name.endswith("weight")]
    reads = [name for name in named if not no_matrix.search(name)]
    for _ in range(draws):
        with torch.no_grad():
            case.draw()
        x = _realised(kernel, random).requires_grad_()
        y = (case.run or case.module)(x[None])[0]
        case.module.zero_grad()
        (y * _realised(received, random)).sum().backward()
        for name, one in (("output", y), ("gradient", x.grad)):
            found[name].append((one @ one.T).detach().numpy() / D_MODEL)
        gradients = dict(case.module.named_parameters())
        found["matrices"].append(sum(float(gradients[n].grad.square().sum()) for n in reads))
    return {name: np.array(values) for name, values in found.items()}


def _parts() -> dict[str, Array]:
    lag = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
    return {"own": lag == 0, "lags 1-3": (lag > 0) & (lag < 4), "further": lag >= 4}


def compared(name: str, tokens: str, draws: int) -> str:
    """One row of the table."""
    kernel, received = TOKENS[tokens], _kernel(0.2)
    case = CASES[name]()
    expected, found = predicted(case, kernel, received), measured(case, kernel, received, draws)
    cells = []
    for quantity in ("output", "gradient"):
        for part in _parts().values():
            sums = found[quantity][:, part].sum(1)
            cells.append((expected[quantity][part].sum(), sums))
    cells.append((expected["matrices"], found["matrices"]))
    texts = []
    for value, sums in cells:
        mean, error = sums.mean(), sums.std(ddof=1) / len(sums) ** 0.5
        texts.append(f"{100 * (value / mean - 1):.1f} ({100 * error / abs(mean):.1f})")
    return f"| {name}, {tokens} | " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--draws", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = [f"{what}, {part}" for what in ("output", "gradient") for part in _parts()]
    print("| case | " + " | ".join([*parts, "matrices"]) + " |")
    for name in given.cases:
        for tokens in TOKENS:
            print(compared(name, tokens, given.draws), flush=True)


if __name__ == "__main__":
    main()
