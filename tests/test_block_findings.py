"""What `check` says of blocks, against draws of what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moments
from moments.simulation.network import BLOCK_TWINS, LayerTwin
from moments.simulation.parameters import draw_weights

D, LENGTH = 64, 12


def declared(**given: Any) -> moments.Transformer:
    return moments.Transformer(2, D, 4, LENGTH, causal=True, normalization="rmsnorm", **given)


def net(**given: Any) -> Any:
    return moments.GatedDeltaNet(2, 4, 16, 16, *[given.pop("variance", 1 / D)] * 3, **given)


def kinds(model: moments.Transformer) -> dict[str, Any]:
    return {one.kind: one for one in moments.check(model).findings}


def given_by(model: moments.Transformer, block: Any) -> float:
    """Mean square of a block's output, over draws of its twin."""
    total = []
    for seed in range(24):
        random = torch.Generator().manual_seed(seed)
        weights = draw_weights(model, 1, random, torch.float64)
        layer = LayerTwin(model, 1, weights, random, lambda x, _: x)
        x = torch.randn(1, LENGTH, D, generator=random, dtype=torch.float64)
        total.append(float(BLOCK_TWINS[type(block)](block, layer, x).detach().square().mean()))
    return float(np.mean(total))


def test_a_branch_behind_an_epsilon_is_dead() -> None:
    small = 1e-8
    weights = moments.Weights(small, small, small, 1 / D, ffn_in=1 / D, ffn_out=1 / D)
    block = net(variance=small)
    model = declared(mixer=block, weights=weights)
    dead = kinds(model)["dead branch"]
    assert (dead.layers, dead.expected) == ((1, 2), 1e-6)
    free = net(variance=small, norm_epsilon=0.0)
    share = given_by(model, block) / given_by(declared(mixer=free, weights=weights), free)
    assert share < 0.5
    assert "dead branch" not in kinds(declared(mixer=net()))


def test_steps_that_forget_within_a_token_are_named() -> None:
    """Of exp(-A softplus(b + w.x)), A uniform and w.x of variance 1, the part below a tenth."""
    random = np.random.default_rng(0)
    for rates, forgets in (((0.01, 16.0), True), ((0.01, 1.0), False)):
        block = net(rates=rates)
        step = np.logaddexp(0.0, np.log(np.expm1(block.steps[0])) + random.standard_normal(10**5))
        part = float(np.mean(np.exp(-random.uniform(*rates, 10**5) * step) < 0.1))
        result = kinds(declared(mixer=block))
        assert ("forgets at once" in result) == forgets == (part > 0.5)
        if forgets:
            assert result["forgets at once"].measured == pytest.approx(part, abs=0.02)


def test_latent_attention_that_starts_on_one_key_is_named() -> None:
    block = moments.LatentAttention(32, 8, 8, 16, 1 / D)
    for variance, starts in ((40 / D, True), (1 / D, False)):
        weights = moments.Weights(variance, variance, 1 / 32, 1 / D, ffn_in=1 / D, ffn_out=1 / D)
        assert ("attention saturated" in kinds(declared(mixer=block, weights=weights))) == starts


def test_a_depth_scale_for_two_sums_a_layer_is_noted_where_there_is_one() -> None:
    mixers = {"mixer": moments.ShortConvolution(), "ffn": moments.Absent()}
    for layers, sums, noted in ((2, mixers, True), (1, mixers, False), (2, {}, False)):
        # a quarter: 1/(2 N) at two layers
        scaled = moments.Weights(*[0.02**2] * 3, 1e-4, ffn_in=4e-4, ffn_out=1e-4)
        model = declared(weights=scaled, **sums).replace(layers=layers)
        notes = " ".join(moments.check(model).notes)
        assert ("as for two sums a layer" in notes) == noted, (layers, sums)
