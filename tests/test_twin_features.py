"""Every feature of a declaration in the torch twin: placements, parameters, head, encoder."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, Transformer, Weights
from moments.formulas.activation import activation_names, register_activation
from moments.model.declaration import LAYERNORM_SCALINGS
from moments.model.head import Head
from moments.model.patches import PatchEmbedding
from moments.model.placement import BUILT_IN
from moments.model.positions import RelativeBias, Rotary
from moments.model.weights import DISTRIBUTIONS, Biases
from moments.prediction.measurement import Measurement

torch = pytest.importorskip("torch")

from moments.simulation.attention import hidden_from, rotate  # noqa: E402
from moments.simulation.functions import (  # noqa: E402
    activation,
    generator,
    normalise,
)
from moments.simulation.network import LayerTwin  # noqa: E402
from moments.simulation.output import draw_final, draw_head, run_final, run_head  # noqa: E402
from moments.simulation.parameters import draw, draw_shared, draw_weights  # noqa: E402
from moments.simulation.run import simulate  # noqa: E402
from moments.simulation.twin import draw_embedding, run_embedding, sinusoids  # noqa: E402

CPU = torch.device("cpu")
TINY = {"layers": 2, "d_model": 16, "heads": 4, "seq_len": 6}
DOUBLE = torch.float64


def silent(x, site):
    return x


# --- the layer, written out -----------------------------------------------------------------------


def layer(seed=3, **fields):
    """Layer 2 of a model whose queries are zero, as x -> output and as its blocks A and F."""
    model = Transformer(**TINY, **fields)
    random = generator(CPU, seed)
    w = draw_weights(model, 2, random, DOUBLE)
    x = torch.randn(3, 6, 16, generator=random, dtype=DOUBLE)
    found = LayerTwin(model, 2, w, random, silent).run(x)

    def attention(z):
        # Logits of zero give every token the mean of the values.
        return (z @ w["value"]).mean(1, keepdim=True).expand(-1, 6, -1) @ w["output"]

    def ffn(z):
        return torch.relu(z @ w["ffn_in"]) @ w["ffn_out"]

    return x, found, attention, ffn


UNIFORM = {"weights": Weights(0.0, 0.1, 0.1, 0.1, 0.1, 0.1)}
norm = partial(torch.nn.functional.layer_norm, normalized_shape=(16,), eps=0.0)


def sequential(between):
    """A layer of two blocks, each `between`(stream, block)."""
    return lambda x, a, f: between(between(x, a), f)


def b2t(x, a, f):
    inner = norm(x + a(x))
    return norm(inner + f(inner) + x)


EXPECTED = {
    "none": sequential(lambda x, block: x + block(x)),
    "pre": sequential(lambda x, block: x + block(norm(x))),
    "post": sequential(lambda x, block: norm(x + block(x))),
    "sandwich": sequential(lambda x, block: x + norm(block(norm(x)))),
    "output": sequential(lambda x, block: x + norm(block(x))),
    "mix": sequential(lambda x, block: x + block(norm(x))),
    "b2t": b2t,
}


@pytest.mark.parametrize("placement", EXPECTED)
def test_placements(placement):
    fields = {"post_layers": 1} if placement == "mix" else {}
    x, found, attention, ffn = layer(norm=placement, **UNIFORM, **fields)
    torch.testing.assert_close(found, EXPECTED[placement](x, attention, ffn))


def test_hybrid_norm():
    """Zhuo et al.: MHA with normalised heads + X = Y, then FFN(Norm(Y)) + Norm(Y)."""
    model = Transformer(**TINY, norm="hybrid", causal=True)
    random = generator(CPU, 4)
    w = draw_weights(model, 1, random, DOUBLE)
    x = torch.randn(2, 6, 16, generator=random, dtype=DOUBLE)
    found = LayerTwin(model, 1, w, random, silent).run(x)

    def heads(name):
        split = (x @ w[name]).view(2, 6, 4, 4).transpose(1, 2)
        return torch.nn.functional.layer_norm(split, (4,), eps=0.0)

    mixed = torch.nn.functional.scaled_dot_product_attention(
        heads("query"), heads("key"), heads("value"), is_causal=True
    )
    y = norm(x + mixed.transpose(1, 2).reshape(2, 6, 16) @ w["output"])
    torch.testing.assert_close(found, y + torch.relu(y @ w["ffn_in"]) @ w["ffn_out"])


@pytest.mark.parametrize("norms", [1, 2])
def test_parallel_blocks_share_a_sum(norms):
    scales = {"skip_scale": 0.9, "branch_scale": [(1.0, 1.0), (0.5, 0.7)]}
    x, found, a, f = layer(parallel=True, parallel_norms=norms, **UNIFORM, **scales)
    torch.testing.assert_close(found, 0.9 * x + 0.5 * a(norm(x)) + 0.7 * f(norm(x)))


def test_scales_by_block():
    pairs = {"skip_scale": [(1, 1), (0.9, 0.8)], "branch_scale": [(1, 1), (0.5, 0.7)]}
    gains = {"norm_gain": [(1, 1), (2.0, 3.0)]}
    x, found, a, f = layer(**UNIFORM, **pairs, **gains)
    y = 0.9 * x + 0.5 * a(2 * norm(x))
    torch.testing.assert_close(found, 0.8 * y + 0.7 * f(3 * norm(y)))


S = 1 / math.sqrt(2)
LNS = {
    "after-norm": sequential(lambda x, block: x + block(S * norm(x))),
    "before-norm": sequential(lambda x, block: x + block(norm(S * x))),
    "after-block": sequential(lambda x, block: x + S * block(norm(x))),
    "after-residual": sequential(lambda x, block: S * (x + block(norm(x)))),
    "attention-only": lambda x, a, f: EXPECTED["pre"](x, lambda z: a(S * z), f),
    "ffn-only": lambda x, a, f: EXPECTED["pre"](x, a, lambda z: f(S * z)),
}


@pytest.mark.parametrize("where", LNS)
def test_layernorm_scaling(where):
    assert set(LNS) | {True, False} == set(LAYERNORM_SCALINGS)
    x, found, a, f = layer(layernorm_scaling=where, **UNIFORM)
    torch.testing.assert_close(found, LNS[where](x, a, f))


def test_norms():
    x = torch.randn(5, 12, generator=generator(CPU, 2), dtype=DOUBLE)
    groups = torch.nn.functional.group_norm(x, 3, eps=1e-3)
    torch.testing.assert_close(normalise(x, "layernorm", 1e-3, groups=3), groups)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(normalise(x, "rmsnorm", 1e-3), expected)
    torch.testing.assert_close(normalise(x, "dyt", 0.0, dyt_alpha=0.5), torch.tanh(0.5 * x))


def test_windows_hide_what_is_far():
    offset = torch.arange(5) - torch.arange(5)[:, None]
    seen = {
        (causal, window): {
            (i, j)
            for i in range(5)
            for j in range(5)
            if (hidden := hidden_from(offset, causal, window)) is None or not hidden[i, j]
        }
        for causal in (False, True)
        for window in (None, 1, 2)
    }
    everything = {(i, j) for i in range(5) for j in range(5)}
    assert seen[False, None] == everything
    assert seen[True, None] == {(i, j) for i, j in everything if j <= i}
    assert seen[True, 2] == {(i, j) for i, j in everything if 0 <= i - j < 2}
    assert seen[False, 2] == {(i, j) for i, j in everything if abs(i - j) < 2}
    assert seen[True, 1] == seen[False, 1] == {(i, i) for i in range(5)}


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_rotation_turns_each_pair_by_its_frequency(fraction):
    """As complex numbers; the frequencies are those the declaration states."""
    rotary = Rotary(fraction, base=100.0)
    x = torch.randn(7, 8, generator=generator(CPU, 9), dtype=DOUBLE)
    frequencies, share = rotary.frequencies(8)
    turning = frequencies[frequencies > 0]
    half = len(turning)
    turned = rotate(x, rotary)
    pairs = torch.complex(x[:, :half], x[:, half : 2 * half])
    phase = torch.as_tensor(np.exp(1j * np.outer(np.arange(7), turning)))
    expected = pairs * phase
    torch.testing.assert_close(turned[:, :half], expected.real)
    torch.testing.assert_close(turned[:, half : 2 * half], expected.imag)
    torch.testing.assert_close(turned[:, 2 * half :], x[:, 2 * half :])
    assert share.sum() == pytest.approx(1.0)
    assert 2 * half == int(8 * fraction) // 2 * 2


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*activation_names(), "leaky_relu(0.2)"])
def test_activations_are_the_laws(name):
    """Mean square at unit variance, by the trapezoid rule on torch's own values."""
    x = torch.linspace(-9, 9, 200_001, dtype=DOUBLE)
    y = activation(name)(x)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    mean, square = (float(torch.trapezoid(v * density, x)) for v in (y, y**2))
    laws = moments.formulas.activation.activation_laws(name)
    assert float(laws.law("mean")(x_variance=1.0)) == pytest.approx(mean, abs=2e-6)
    variance = float(laws.law("variance")(x_variance=1.0))
    assert variance == pytest.approx(square - mean**2, rel=2e-5)


def test_a_registered_activation_runs_through_numpy():
    register_activation("twin_sine", np.sin, np.cos)
    x = torch.randn(4, 5, generator=generator(CPU, 8), dtype=DOUBLE).requires_grad_()
    given = torch.randn(4, 5, generator=generator(CPU, 9), dtype=DOUBLE)
    found, expected = activation("twin_sine")(x), torch.sin(x)
    torch.testing.assert_close(found, expected)
    (own,), (true,) = (torch.autograd.grad(y, x, given) for y in (found, expected))
    torch.testing.assert_close(own, true)
    measured = simulate(Transformer(**TINY, activation="twin_sine"), seeds=1)
    assert np.all(np.isfinite(measured.grad_variance))
    with pytest.raises(DomainError, match="activation"):
        activation("sinus")


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_distributions(kind, shape):
    w = draw(shape, 0.3, generator(CPU, 5), DOUBLE, kind).detach()
    kurtosis = {"normal": 3.0, "uniform": 1.8, "truncated": 2.3651, "orthogonal": 3.0}[kind]
    # Var(w^2) = (kurtosis - 1) v^2; orthogonal entries fluctuate less.
    stderr = 0.3 * math.sqrt((kurtosis - 1) / w.numel())
    assert abs(float(w.square().mean()) - 0.3) < 5 * stderr
    assert abs(float(w.mean())) < 5 * math.sqrt(0.3 / w.numel())
    fourth = float((w**4).mean()) / 0.3**2
    assert fourth == pytest.approx(kurtosis, rel=0.05)
    if kind == "orthogonal":
        gram = w.T @ w if shape[0] > shape[1] else w @ w.T
        torch.testing.assert_close(gram, 0.3 * max(shape) * torch.eye(min(shape), dtype=DOUBLE))


def test_biases_and_gains_are_leaves():
    biases = Biases(query=0.5, ffn_in=[0.1, 0.4])
    model = Transformer(
        **(TINY | {"d_model": 512}), biases=biases, norm_affine=True, norm_gain=2.0, gated=True
    )
    drawn = draw_weights(model, 2, generator(CPU, 6), DOUBLE)
    assert all(leaf.requires_grad for leaf in drawn.values())
    w = {name: leaf.detach() for name, leaf in drawn.items()}
    assert float(w["query.bias"].square().mean()) == pytest.approx(0.5, rel=0.3)
    assert float(w["ffn_in.bias"].square().mean()) == pytest.approx(0.4, rel=0.3)
    assert not w["gate.bias"].any()
    assert torch.all(w["ffn.norm.gain"] == 2.0)
    names = {f"{block}.norm.{part}" for block in ("attention", "ffn") for part in ("gain", "bias")}
    assert {name for name in w if "norm" in name} == names
    bare = model.replace(norm_bias=False)
    assert "ffn.norm.bias" not in draw_weights(bare, 1, generator(CPU, 6), DOUBLE)
    rms = model.replace(normalization="rmsnorm")
    assert "ffn.norm.bias" not in draw_weights(rms, 1, generator(CPU, 6), DOUBLE)


# --- the walk: everything runs, with the sites and parameters that were agreed --------------------

FEATURES = {
    "plain": {},
    "rmsnorm": {"normalization": "rmsnorm", "norm_affine": True, "norm_gain": 0.8},
    "dyt": {"normalization": "dyt", "norm_affine": True, "dropout": 0.1},
    "groups": {"norm_groups": 4, "norm_affine": True, "norm_epsilon": 1e-5},
    "gated": {"activation": "swiglu", "activation_dropout": 0.1, "biases": Biases(gate=0.1)},
    "grouped heads": {"kv_heads": 2, "rotary": Rotary(0.5), "window": (2, None), "causal": True},
    "positions": {"alibi": True, "relative_bias": RelativeBias(1.0, 8, 16), "temperature": 0.5},
    "heads together": {"qk_norm": "layernorm-all", "causal": True, "rotary": (None, Rotary())},
    "bounded": {"qk_norm": "rmsnorm", "logit_softcap": 5.0, "weights": Weights.normal(0.1)},
}
SITES = {
    "attention.heads",
    "attention.projection",
    "attention.dropout",
    "attention.sum",
    "ffn.in",
    "ffn.activation",
    "ffn.out",
    "ffn.dropout",
    "ffn.sum",
    "stream",
}
NORM_SITES = {
    "none": set(),
    "hybrid": {"ffn.norm"},
    "sandwich": {
        f"{block}.{norm}" for block in ("attention", "ffn") for norm in ("norm", "post_norm")
    },
    "output": {"attention.post_norm", "ffn.post_norm"},
    "b2t": {"attention.norm", "ffn.norm", "ffn.bottom_to_top"},
}


def sites_of(measured, number):
    frame = measured.to_frame()
    return set(frame[frame["layer"] == number]["site"])


def weights_of(measured, number):
    frame = measured.weight_gradients()
    return set(frame[frame["layer"] == number]["weight"])


@pytest.mark.parametrize("placement", BUILT_IN)
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_every_placement_runs_with_every_feature(placement):
    extra = {"post_layers": 1} if placement == "mix" else {}
    for name, fields in FEATURES.items():
        if placement == "hybrid" and fields.get("normalization") == "dyt":
            continue  # refused: tests/test_twin_disagreements.py
        model = Transformer(**TINY, norm=placement, **extra, **fields)
        measured = simulate(model, seeds=1, batch=2)
        expected = SITES | NORM_SITES.get(placement, {"attention.norm", "ffn.norm"})
        if name == "gated":
            expected = expected | {"ffn.gate", "ffn.activation_dropout"}
        assert sites_of(measured, 2) == expected, name
        # Of a gated block, the theory shows the product alone.
        predicted = moments.predict(model)
        assert sites_of(predicted, 2) | {"ffn.in", "ffn.gate"} == expected | {"ffn.gate"}, name
        assert weights_of(predicted, 2) <= weights_of(measured, 2), name
        norms = {s for s in expected if s.endswith("norm")}
        gains = {f"{site}.gain" for site in norms} if "norm_affine" in fields else set()
        listed = weights_of(measured, 2)
        assert {w for w in listed if w.endswith("norm.gain")} == gains, name
        assert {"query", "key", "value", "output", "ffn_in", "ffn_out"} <= listed
        assert ("gate" in listed) == ("gate.bias" in listed) == (name == "gated")
        assert ("relative_bias" in weights_of(measured, 0)) == (name == "positions")
        assert np.all(measured.grad_variance > 0)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_parallel_layers_run(kind):
    weights = Weights.xavier(16, 4).replace(distribution=kind)
    for norms, where in itertools.product((1, 2), LAYERNORM_SCALINGS):
        model = Transformer(
            **TINY, parallel=True, parallel_norms=norms, layernorm_scaling=where, weights=weights
        )
        sites = sites_of(simulate(model, seeds=1, batch=1), 2)
        assert "attention.sum" not in sites
        assert ("ffn.norm" in sites) == (norms == 2)


# --- embedding ------------------------------------------------------------------------------------


def test_sinusoidal_positions_scaled_tokens_and_padding():
    embedding = Embedding(9, 2.0, scale=3.0, positions="sinusoidal", padding_id=4)
    model = Transformer(**TINY, embedding=embedding)
    weights = draw_embedding(model, 1, generator(CPU, 2), DOUBLE)
    ids = torch.tensor([[0, 4, 2, 3, 4, 8]])
    x = run_embedding(model, ids, None, weights, generator(CPU, 2), silent)
    table = sinusoids(6, 16)
    assert table[3, 5] == pytest.approx(math.cos(3 / 10000 ** (4 / 16)))
    assert float(table.square().mean()) == pytest.approx(0.5)
    torch.testing.assert_close(x[0], 3 * weights["token"][ids[0]] + table)
    assert not weights["token"][4].any()
    (gradient,) = torch.autograd.grad(x.sum(), weights["token"])
    assert gradient[4].abs().sum() == 0
    assert float(gradient[8, 0]) == 3.0


def test_segments_have_rows_of_their_own():
    model = Transformer(**(TINY | {"d_model": 256}), embedding=Embedding(9, 1e-9, 0.0, 1.0))
    halves = simulate(model, token_ids=np.arange(6), segment_ids=[0, 0, 0, 1, 1, 1], seeds=20)
    # Two of the five other tokens are of the same segment.
    assert halves.correlation[0] == pytest.approx(0.4, abs=0.05)
    assert simulate(model, token_ids=np.arange(6), seeds=2).correlation[0] == pytest.approx(1.0)


# --- head and encoder: the gradient by layers is that of one connected graph ----------------------


def whole_gradient(model, seed, ids, targets, encoder_ids=None):
    """Loss, dLoss/dx of the stream and squared norms of all parameters, by one graph."""
    streams = {}

    def leaves(which, stream):
        random = {n: generator(CPU, seed, 0, n, *stream) for n in range(which.layers + 4)}
        found = {0: draw_embedding(which, 1, random[0], DOUBLE)}
        shared = draw_shared(which, random[which.layers + 2], DOUBLE)
        return random, found, shared

    def layers(which, x, random, found, shared, memory=None):
        xs = [x]
        for n in range(1, which.layers + 1):
            found[n] = draw_weights(which, n, random[n], DOUBLE)
            layer = LayerTwin(which, n, found[n] | shared, random[n], silent, memory)
            xs.append(layer.run(xs[-1]))
        return xs

    memory = None
    every = {}
    if model.encoder is not None:
        random, found, shared = leaves(model.encoder, (1,))
        x = run_embedding(model.encoder, encoder_ids, None, found[0], random[0], silent)
        streams["encoder"] = layers(model.encoder, x, random, found, shared)
        last = model.encoder.layers + 1
        found[last] = draw_final(model.encoder, CPU, DOUBLE)
        memory = run_final(model.encoder, streams["encoder"][-1], found[last], random[0], silent)
        found[0] |= shared
        every |= {("encoder", n, k): v for n, part in found.items() for k, v in part.items()}
    random, found, shared = leaves(model, ())
    x = run_embedding(model, ids, None, found[0], random[0], silent)
    streams["own"] = layers(model, x, random, found, shared, memory)
    last = model.layers + 1
    found[last] = draw_head(model, random[model.layers + 3], DOUBLE)
    out = run_head(
        model, streams["own"][-1], targets, found[0] | found[last], random[last + 2], silent
    )
    found[0] |= shared
    every |= {("own", n, k): v for n, part in found.items() for k, v in part.items()}
    xs = [x for part in streams.values() for x in part]
    gradients = torch.autograd.grad(out.loss, [*xs, *every.values()], allow_unused=True)
    of_stream = [float(g.square().mean()) for g in gradients[: len(xs)]]
    norms = {k: float(g.square().sum()) for k, g in zip(every, gradients[len(xs) :], strict=True)}
    return out, of_stream, norms


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_and_its_gradient_by_layers(tied):
    """With an encoder, shared relative biases, dropout and every parameter there can be."""
    extra = {"relative_bias": RelativeBias(0.5, 8, 16), "norm_affine": True, "biases": Biases()}
    encoder = Transformer(
        2, 12, 3, 5, **extra, dropout=0.1, embedding=Embedding(7, 1.0, 0.5, norm=True)
    )
    head = Head(
        tied=tied,
        weight_variance=None if tied else 0.1,
        transform="gelu",
        transform_variance=0.1,
        transform_bias_variance=0.1,
        output_scale=0.7,
        bias=True,
        logit_softcap=4.0,
        label_smoothing=0.1,
    )
    embedding = Embedding(11, 1.0, dropout=0.1)
    model = Transformer(
        3,
        16,
        4,
        6,
        **extra,
        causal=True,
        dropout=0.1,
        encoder=encoder,
        embedding=embedding,
        head=head,
    )
    ids = np.arange(12).reshape(2, 6) % 11
    read = np.arange(10).reshape(2, 5) % 7
    targets = np.where(ids % 4 == 1, -100, (ids + 3) % 11)
    measured = simulate(
        model,
        seeds=1,
        seed=9,
        token_ids=ids,
        targets=targets,
        encoder_inputs={"token_ids": read},
        dtype="float64",
    )
    as_tensor = [torch.as_tensor(v) for v in (ids, targets, read)]
    out, of_stream, norms = whole_gradient(model, 9, *as_tensor)
    assert measured.loss == pytest.approx(float(out.loss.detach()), rel=1e-12)
    square = float(out.logits.detach().square().mean())
    assert measured.logit_variance == pytest.approx(square, rel=1e-12)
    assert measured.encoder.loss is None
    found = [*measured.encoder.grad_variance, *measured.grad_variance]
    np.testing.assert_allclose(found, of_stream, rtol=1e-9)
    listed = {
        (name, row.layer, row.weight): row.squared_norm
        for name, each in (("encoder", measured.encoder), ("own", measured))
        for row in each.weight_gradients().itertuples()
        if (row.weight, row.layer > 0) != ("relative_bias", True)  # a layer's own share
    }
    assert set(listed) == set(norms)
    for key, value in norms.items():
        assert listed[key] == pytest.approx(value, rel=1e-9, abs=1e-25), key
    assert {"final.norm.gain", "head.transform", "head.bias"} <= weights_of(measured, 4)
    assert {"cross_query", "cross_query.bias", "cross.norm.gain"} <= weights_of(measured, 3)
    assert ("head" in weights_of(measured, 4)) == (not tied)
    assert sites_of(measured, 4) == {"final.norm", "head.transform", "head.norm", "logits"}
    crossing = {f"cross.{site}" for site in ("norm", "heads", "projection", "dropout", "sum")}
    assert crossing <= sites_of(measured, 1)
    again = Measurement.from_dict(measured.to_dict())
    assert again.encoder.to_dict() == measured.encoder.to_dict()
    assert "encoder" in repr(measured)


def test_post_norm_memory_is_read_as_it_is():
    encoder = Transformer(**TINY, norm="post")
    model = Transformer(**TINY, norm="post", causal=True, encoder=encoder)
    measured = simulate(model, seeds=1, encoder_inputs={"variance": 2.0, "correlation": 0.3})
    assert sites_of(measured.encoder, 3) == set()
    assert measured.encoder.variance[0] == pytest.approx(2.0, rel=0.2)
    assert np.all(measured.encoder.grad_variance > 0)


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_images_to_classes(pool):
    head = Head(tied=False, weight_variance=0.1, loss="classification", classes=7, pool=pool)
    patches = PatchEmbedding(4, 2, 1.0, 0.5, class_variance=0.2, bias_variance=0.0, norm=True)
    model = Transformer(**(TINY | {"seq_len": 5}), embedding=patches, head=head, norm_affine=True)
    pixels = np.random.default_rng(0).normal(size=(3, 3, 4, 4))
    measured = simulate(model, pixels=pixels, targets=[0, 6, 2], seeds=3)
    assert measured.batch == 3
    assert abs(measured.loss - math.log(7)) < 1.0
    named = {"patch", "patch.bias", "class", "position", "embedding.norm.gain"}
    assert named <= weights_of(measured, 0)
    assert "head" in weights_of(measured, 3)
    reached = measured.token_grad_variance[2] > 0
    assert reached.all() if pool == "mean" else list(reached) == [True] + 4 * [False]


def test_zero_logits_cost_the_logarithm_of_the_vocabulary():
    """And uniform probabilities give the gradient (p - t) W / T to the final norm's output."""
    head = Head(tied=False, weight_variance=0.2, output_scale=1e-6)
    model = Transformer(**TINY, embedding=Embedding(50, 1.0), head=head)
    ids = np.random.default_rng(1).integers(0, 50, (8, 6))
    measured = simulate(model, token_ids=ids, seeds=40)
    assert measured.loss == pytest.approx(math.log(50), rel=1e-5)
    frame = measured.to_frame().set_index(["layer", "site"])
    row = frame.loc[(3, "final.norm")]
    # |p - t|^2 = 1 - 1/V at 5 of 6 tokens, each weighted 1/40.
    expected = 5 / 6 * (1 - 1 / 50) * 0.2 * (1e-6 / 40) ** 2
    assert abs(row["grad_variance"] - expected) < 5 * row["grad_variance_stderr"]
    assert row["grad_variance_stderr"] < 0.05 * expected


def test_masked_targets_are_at_a_share_of_the_places():
    head = Head(loss="masked", target_share=0.25, norm=False)
    model = Transformer(**TINY, norm="post", embedding=Embedding(30, 0.1), head=head)
    ids = np.arange(24).reshape(4, 6)
    measured = simulate(model, token_ids=ids, seeds=1)
    assert (measured.token_grad_variance[2] > 0).sum() <= 6
    same = simulate(model, token_ids=ids, seeds=1, targets=np.full((4, 6), 3))
    assert (same.token_grad_variance[2] > 0).all()
    # An injected gradient has the asked variance; the loss is still known.
    injected = simulate(model, token_ids=ids, seeds=1, grad_variance=4.0)
    assert injected.grad_variance[2] == pytest.approx(4.0, rel=0.3)
    assert injected.loss == measured.loss


def test_weight_gradients_of_several_texts_are_those_of_the_batch():
    """Independent gradients: the batch's squared norm is that of its sequences, summed."""
    model = Transformer(**TINY, embedding=Embedding(30, 1.0))
    ids = np.tile(np.arange(6), (8, 1))
    one = simulate(model, token_ids=ids[0], batch=8, seeds=2).weight_gradients()
    many = simulate(model, token_ids=ids, seeds=2).weight_gradients()
    np.testing.assert_allclose(many["squared_norm"], 8 * one["squared_norm"], rtol=1e-6)


WITH_HEAD = Transformer(**TINY, embedding=Embedding(10, 1.0), head=Head())
IMAGES = Transformer(**(TINY | {"seq_len": 5}), embedding=PatchEmbedding(4, 2, 1.0))


@pytest.mark.parametrize(
    ("model", "given", "match"),
    [
        (Transformer(**TINY), {"targets": [0] * 6}, "model.head"),
        (WITH_HEAD, {"token_ids": [0] * 6, "targets": [0] * 5}, "targets"),
        (WITH_HEAD, {"token_ids": [0] * 6, "targets": [10] * 6}, "targets"),
        (WITH_HEAD, {"token_ids": [0] * 6, "targets": [-100] * 6}, "targets"),
        (WITH_HEAD, {"token_ids": [0] * 6, "targets": [0.5] * 6}, "targets"),
        (
            WITH_HEAD,
            {"token_ids": np.zeros((2, 6), int), "segment_ids": np.zeros((3, 6), int)},
            "segment",
        ),
        (WITH_HEAD, {"pixels": np.zeros((1, 3, 4, 4))}, "PatchEmbedding"),
        (WITH_HEAD, {"encoder_inputs": {}}, "encoder"),
        (WITH_HEAD.replace(embedding=None), {}, "token table"),
        (IMAGES, {"pixels": np.zeros((1, 3, 4, 5))}, "pixels"),
        (IMAGES, {"token_ids": [0] * 5}, "embedding"),
        (IMAGES.replace(seq_len=4), {"pixels": np.zeros((1, 3, 4, 4))}, "seq_len"),
    ],
)
def test_bad_inputs_are_named(model, given, match):
    with pytest.raises(DomainError, match=match):
        simulate(model, **given)
