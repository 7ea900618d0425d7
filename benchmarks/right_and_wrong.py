"""GPT-2 with its depth scale on the right and on the wrong matrices, predicted and measured.

    python benchmarks/right_and_wrong.py      # draws docs/right-and-wrong.png, a minute

The scale 1/(2 layers) of variances belongs on the two matrices that write into the stream (Radford
et al. 2019, section 2.3). On query, key and value, where transformers' CLIP has it, the model runs
all the same, and its stream grows 19 times as much. Nothing is stored: the dots are one draw of the
real module on English text, and the band of one draw is drawn too, narrower than the line.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moments
from moments.show.palette import DASHES, GRADIENT, MEASURED, SIGNAL
from moments.show.plot import Picture, along_layers, round_ticks, save, styled
from moments.torch.batches import inputs_of
from moments.torch.huggingface_modules import build_module, module_batch
from moments.torch.measure import measure

TARGET = Path(__file__).parent.parent / "docs" / "right-and-wrong.png"
TOKENS = 128
ARROW = {"arrowstyle": "->", "color": "#222222"}


def misplaced(module: Any, layers: int) -> Any:
    """The module with its depth scale moved from the outputs to query, key and value."""
    scale = (2 * layers) ** -0.5
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_attn.weight *= scale
            for output in (block.attn.c_proj, block.mlp.c_proj):
                output.weight /= scale
    return module


@styled
def draw() -> Picture:
    """Both, side by side over one axis."""
    config = dict(moments.preset.config("gpt2"))
    batch = module_batch(config, seq_len=TOKENS, batch=2, seed=0)
    right = moments.preset("gpt2", seq_len=TOKENS)
    layers, weights = right.layers, right.weights
    small = weights.query / (2 * layers)
    changed = dataclasses.replace(
        weights,
        query=small,
        key=small,
        value=small,
        output=2 * layers * weights.output,
        ffn_out=2 * layers * weights.ffn_out,
    )
    wrong = right.replace(weights=changed)
    given = inputs_of(right, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        meant = moments.predict(right, **given)
        is_ = moments.predict(wrong, **given)
        measured = [
            measure(lambda seed=0: build_module(config, seed), batch, seeds=1),
            measure(lambda seed=0: misplaced(build_module(config, seed), layers), batch, seeds=1),
        ]
    figure = Picture(9.5, 3.8)
    axes = figure.subplots(1, 2, sharey=True)
    depth = np.arange(layers + 1)
    titles = ("Depth scale on the output matrices", "Depth scale on query, key and value")
    for ax, title, seen in zip(axes, titles, measured, strict=True):
        ax.set_title(title)
        low, high = meant.variance_band
        ax.fill_between(depth, low, high, color=SIGNAL, alpha=0.2, linewidth=0)
        ax.plot(depth, meant.variance, color=SIGNAL, label="predicted for GPT-2 as published")
        ax.plot(depth, seen.variance, "o", color=MEASURED, label="measured in the PyTorch module")
        along_layers(ax, "layer (0: what the embedding gives)")
    (line,) = axes[1].plot(depth, is_.variance, label="predicted for the weights as they are")
    line.set(color=GRADIENT, linestyle=DASHES[1], zorder=1)
    ends = (meant.variance[-1], measured[1].variance[-1])
    axes[1].annotate(
        "", (layers - 0.3, ends[1] / 1.15), (layers - 0.3, ends[0] * 1.15), arrowprops=ARROW
    )
    axes[1].text(
        layers - 0.6, (ends[0] * ends[1]) ** 0.5, f"{ends[1] / ends[0]:.0f} times", ha="right"
    )
    axes[0].set_yscale("log")
    axes[0].set_ylabel("variance of the residual stream")
    round_ticks(axes[0].yaxis, 5e-4, 5.0)
    axes[0].set_ylim(5e-4, 5.0)
    for ax in axes:
        ax.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    save(draw(), TARGET)
