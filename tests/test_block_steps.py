"""The first step and the sharpness through blocks, against twins of them in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

import moments
from moments.model.mixers import Mamba
from moments.simulation.network import LayerTwin
from moments.simulation.output import draw_head, run_head
from moments.simulation.parameters import draw_weights
from moments.simulation.twin import draw_embedding, run_embedding

D, LENGTH = 64, 12
IDS = np.random.default_rng(0).integers(0, 60, (2, LENGTH))
THIRD = moments.Weights(*[1 / 32] * 3, 1 / D, ffn_in=1 / D, ffn_out=1 / 128, gate=1 / D)


def declared(**given: Any) -> moments.Transformer:
    usual: dict[str, Any] = {
        "d_ff": 128,
        "causal": True,
        "activation": "silu",
        "gated": True,
        "normalization": "rmsnorm",
        "norm": "pre",
        "norm_affine": True,
        "embedding": moments.Embedding(60, 1.0),
        "head": moments.Head(loss="causal", tied=False, weight_variance=1 / D),
        "weights": moments.Weights(*[1 / D] * 4, ffn_in=1 / D, ffn_out=1 / 128, gate=1 / D),
    }
    return moments.Transformer(2, D, 4, LENGTH, **usual | given)


MODELS = {
    "experts": declared(ffn=moments.Experts(8, 2, d_ff=64)),
    "one expert": declared(
        ffn=moments.Experts(8, 1, d_ff=64, rule="sigmoid_input", normalised="none", shared=64)
    ),
    "mamba2": declared(mixer=moments.Mamba2(4, 16, 16, 1 / D, 1 / D)),
    # at an epsilon of 1e-6 rare draws make the mean gradient, 20 percent above that of 96 draws
    "delta": declared(mixer=moments.GatedDeltaNet(2, 4, 16, 16, *[1 / D] * 3, norm_epsilon=1e-2)),
    "convolution": declared(mixer=moments.ShortConvolution(3)),
    "mamba": declared(mixer=Mamba(64, 8, 4, 1 / D, 1 / 4, 1 / 64)),
    "layer scale": declared(layer_scale=True, branch_scale=0.5, mixer=moments.ShortConvolution(3)),
    "latent": declared(
        mixer=moments.LatentAttention(32, 8, 8, 16, 1 / D, query_rank=32),
        rotary=moments.Rotary(),
        weights=THIRD,
    ),
    "heads": declared(
        qk_norm="rmsnorm", rotary=moments.Rotary(), attention_sink=1.0, attention_gate="headwise"
    ),
}


Run = Callable[[Any], tuple[Any, list[Any]]]


def twin(model: moments.Transformer, seed: int) -> tuple[Run, list[dict[str, torch.Tensor]]]:
    """What gives the loss and the stream of parameters, and a draw of these."""
    ids = torch.tensor(IDS)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    random, kind = torch.Generator().manual_seed(seed), torch.float64
    parts = [draw_embedding(model, 1, random, kind)]
    parts += [draw_weights(model, n, random, kind) for n in (1, 2)]
    parts += [draw_head(model, random, kind)]

    def watch(x: Any, _: str) -> Any:
        return x

    def run(parts: Any) -> tuple[Any, list[Any]]:
        x = run_embedding(model, ids, None, parts[0], random, watch)
        stream = [x]
        for number in (1, 2):
            layer = LayerTwin(model, number, parts[number], random, watch)
            stream.append(layer.run(stream[-1]))
        return run_head(model, stream[-1], targets, parts[3], random, watch).loss, stream

    return run, parts


def stepped(model: moments.Transformer, optimizer: str, rate: float, seeds: int) -> np.ndarray:
    """(2, 5) means and standard errors of the loss's change, its slope, and the relative change of
    the stream behind the tables and both layers."""
    rows = []
    for seed in range(seeds):
        run, parts = twin(model, seed)
        loss, before = run(parts)
        leaves = [one for part in parts for one in part.values()]
        sent = torch.autograd.grad(loss, leaves)
        moves = sent if optimizer == "sgd" else [g / (g.abs() + 1e-8) for g in sent]
        slope = -sum(float((g * u).sum()) for g, u in zip(sent, moves, strict=True))
        with torch.no_grad():
            for one, move in zip(leaves, moves, strict=True):
                one -= rate * move
            after, moved = run(parts)
            ratios = [
                float((new - old).square().mean() / old.square().mean())
                for old, new in zip(before, moved, strict=True)
            ]
        rows.append([float(after) - float(loss.detach()), slope, *ratios])
    found = np.array(rows)
    return np.array([found.mean(0), found.std(0, ddof=1) / seeds**0.5])


STORED: dict[tuple[str, str], Any] = {
    ("experts", "sgd"): (
        (-0.9017, -9.515, 6.591e-07, 0.01145, 0.03997),
        (0.0081, 0.092, 1.2e-08, 0.00041, 0.0012),
    ),
    ("experts", "adam"): (
        (-1.187, -662.2, 3.8e-06, 0.01797, 0.06662),
        (0.0069, 4, 1.7e-08, 0.00036, 0.00089),
    ),
    ("one expert", "adam"): (
        (-1.32, -747.3, 3.8e-06, 0.02082, 0.08126),
        (0.0079, 4.4, 1.7e-08, 0.00043, 0.0013),
    ),
    ("mamba2", "sgd"): (
        (-1.621, -21.57, 1.39e-06, 0.0625, 0.1757),
        (0.011, 0.25, 3.4e-08, 0.0017, 0.0036),
    ),
    ("mamba2", "adam"): (
        (-1.369, -787.5, 3.8e-06, 0.01897, 0.09291),
        (0.0063, 4, 1.7e-08, 0.00018, 0.0012),
    ),
    ("delta", "adam"): (
        (-0.9655, -501.4, 3.8e-06, 0.006809, 0.02674),
        (0.0038, 2.1, 1.7e-08, 7.3e-05, 0.00028),
    ),
    ("convolution", "adam"): (
        (-1.387, -769.5, 3.8e-06, 0.01598, 0.08078),
        (0.0056, 3.7, 1.7e-08, 0.00016, 0.0012),
    ),
    ("mamba", "adam"): (
        (-1.052, -548.7, 3.8e-06, 0.007679, 0.03192),
        (0.0039, 2.1, 1.7e-08, 5.5e-05, 0.00032),
    ),
    ("layer scale", "adam"): (
        (-0.8773, -453.1, 3.8e-06, 0.00465, 0.01853),
        (0.0034, 1.8, 1.7e-08, 4.7e-05, 0.00022),
    ),
    ("latent", "sgd"): (
        (-1.311, -14.75, 8.105e-07, 0.02568, 0.09063),
        (0.0095, 0.14, 1.6e-08, 0.00064, 0.0025),
    ),
    ("latent", "adam"): (
        (-1.289, -716.7, 3.8e-06, 0.01904, 0.08056),
        (0.0058, 3.6, 1.7e-08, 0.00016, 0.0011),
    ),
    ("heads", "adam"): (
        (-1.151, -610.8, 3.8e-06, 0.01051, 0.04186),
        (0.005, 2.8, 1.7e-08, 0.00012, 0.00048),
    ),
}
"""`stepped` of 96 draws, by `python tests/test_block_steps.py`."""

RATES = {"sgd": 0.1, "adam": 0.002}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize(("name", "optimizer"), STORED)
def test_a_step_through_a_block_is_that_of_its_twin(name: str, optimizer: str) -> None:
    """Of width 64: the loss's change within 6 percent, the streams' within 12, beyond three
    standard errors."""
    found = moments.predict(MODELS[name], token_ids=IDS).after(optimizer, RATES[optimizer])
    mean, error = np.array(STORED[name, optimizer])
    numbers = np.array([found.loss_change, found.slope, *found.relative_change])
    within = np.array([0.06, 0.05, 0.06, 0.12, 0.12])
    assert np.all(np.abs(numbers / mean - 1) < within + 3 * np.abs(error / mean)), numbers / mean


def eigenvalues(model: moments.Transformer, optimizer: str, seeds: int) -> np.ndarray:
    """(2, 2) means and standard errors of the largest and the least eigenvalue of the Hessian,
    for Adam over the root mean squares of the gradients by matrix."""
    rows = []
    for seed in range(seeds):
        run, parts = twin(model, seed)
        loss, _ = run(parts)
        every = [one for part in parts for one in part.values()]
        given = torch.autograd.grad(loss, every, create_graph=True, allow_unused=True)
        used = [(one, g) for one, g in zip(every, given, strict=True) if g is not None]
        leaves, sent = zip(*used, strict=True)
        sizes = [float(g.detach().square().mean()) ** 0.5 for g in sent]
        scales = [s**-0.5 if s > 1e-7 * max(sizes) else 0.0 for s in sizes]
        if optimizer == "sgd":
            scales = [1.0] * len(sizes)
        ends = np.cumsum([one.numel() for one in leaves])

        def product(
            vector: Any, leaves: Any = leaves, sent: Any = sent, scales: Any = scales, e: Any = ends
        ) -> Any:
            pieces = torch.as_tensor(vector).ravel().tensor_split(torch.as_tensor(e[:-1]))
            ways = [s * v.view(p.shape) for s, v, p in zip(scales, pieces, leaves, strict=True)]
            found = torch.autograd.grad(sent, leaves, ways, retain_graph=True, allow_unused=True)
            both = zip(scales, found, leaves, strict=True)
            moved = [torch.zeros_like(p) if x is None else s * x for s, x, p in both]
            return torch.cat([one.ravel() for one in moved]).numpy()

        count = int(ends[-1])
        hessian = LinearOperator((count, count), matvec=product, dtype=np.float64)
        rows.append(sorted(eigsh(hessian, 2, which="BE", tol=1e-3, return_eigenvectors=False)))
    found = np.array(rows)[:, ::-1]
    return np.array([found.mean(0), found.std(0, ddof=1) / seeds**0.5])


SHARP: dict[tuple[str, str], Any] = {
    ("experts", "adam"): ((797.3, -864.4), (25.79, 34.28)),
    ("experts", "sgd"): ((2.829, -2.916), (0.07928, 0.06499)),
    ("mamba2", "adam"): ((1259, -1259), (87.98, 73.7)),
    ("delta", "sgd"): ((2.083, -2.22), (0.06547, 0.1013)),
    ("convolution", "adam"): ((1044, -1083), (82.44, 105.1)),
    ("latent", "adam"): ((775.9, -797), (36.35, 36.66)),
    ("heads", "adam"): ((620, -600.8), (29.22, 33.56)),
    ("one expert", "adam"): ((863.8, -838.7), (44.63, 43.49)),
}
"""`eigenvalues` of 12 draws, of models whose logits start near 0, likewise."""


def near_zero(name: str) -> moments.Transformer:
    head = moments.Head(loss="causal", tied=False, weight_variance=0.1 / D)
    return MODELS[name].replace(head=head)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize(("name", "optimizer"), SHARP)
def test_sharpness_through_a_block_is_that_of_its_twin(name: str, optimizer: str) -> None:
    """The largest eigenvalue within 20 percent and the least within 30 beyond twice the standard
    errors of both; of short convolutions, whose step is a product of three, within 30."""
    found = moments.predict(near_zero(name), token_ids=IDS).sharpness(optimizer)
    mean, error = np.array(SHARP[name, optimizer])
    numbers = np.array([found.largest, found.least])
    errors = np.hypot(error, (found.largest_stderr, found.least_stderr)) / np.abs(mean)
    within = np.array([0.3 if name == "convolution" else 0.2, 0.3])
    assert np.all(np.abs(numbers / mean - 1) < within + 2 * errors), numbers / mean


def wide() -> moments.Transformer:
    """Mamba-2 whose one group has 256 features, of which half are drawn."""
    d = 128
    return declared(
        d_ff=256,
        head=moments.Head(loss="causal", tied=False, weight_variance=0.1 / d),
        weights=moments.Weights(*[1 / d] * 4, ffn_in=1 / d, ffn_out=1 / 256, gate=1 / d),
        mixer=moments.Mamba2(16, 16, 16, 1 / d, 1 / d),
    ).replace(d_model=d, heads=8)


WIDE = {"adam": ((2177, -2236), (119.7, 87.3)), "sgd": ((10.05, -10.49), (0.476, 0.399))}
"""`eigenvalues` of 8 draws of `wide`."""


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_a_part_of_a_group_stands_for_its_features() -> None:
    """Cut at random, what was drawn was ten times too large at a quarter of the features."""
    prediction = moments.predict(wide(), token_ids=IDS)
    for optimizer, stored in WIDE.items():
        mean, error = np.array(stored)
        value = prediction.sharpness(optimizer, draws=2)
        errors = np.hypot(error, (value.largest_stderr, value.least_stderr)) / np.abs(mean)
        ratios = np.array([value.largest, value.least]) / mean
        assert np.all(np.abs(ratios - 1) < 0.2 + 2 * errors), ratios


def main() -> None:
    torch.set_num_threads(1)
    for name, optimizer in STORED:
        mean, error = stepped(MODELS[name], optimizer, RATES[optimizer], 96)
        text = ", ".join(f"{one:.4g}" for one in mean)
        print(f'    ("{name}", "{optimizer}"): (\n        ({text}),')
        print("        (" + ", ".join(f"{one:.2g}" for one in error) + "),\n    ),", flush=True)
    for name, optimizer in SHARP or ((name, of) for name in MODELS for of in ("adam", "sgd")):
        mean, error = eigenvalues(near_zero(name), optimizer, 12)
        text = "), (".join(", ".join(f"{x:.4g}" for x in one) for one in (mean, error))
        print(f'    ("{name}", "{optimizer}"): (({text})),', flush=True)


if __name__ == "__main__":
    main()
