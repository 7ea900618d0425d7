"""Every scheme's constants, computed by hand from its paper."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

import moments

D, HEADS, FF = 256, 4, 1024
XAVIER = {"query": 2 / 320, "key": 2 / 320, "value": 2 / 320, "output": 1 / 256}
XAVIER |= {"ffn_in": 2 / 1280, "ffn_out": 2 / 1280}


def model(layers: int = 8, **changes: Any) -> moments.Transformer:
    fields = {"layers": layers, "d_model": D, "heads": HEADS, "seq_len": 32}
    return moments.Transformer(**{**fields, **changes})


def check(found: moments.Transformer, gains: dict[str, Any]) -> None:
    """Weights are Xavier's times a factor by matrix, 1 where none is named."""
    assert found.weights is not None
    for name, value in XAVIER.items():
        wanted = np.broadcast_to(value * np.asarray(gains.get(name, 1.0)), found.layers)
        got = np.broadcast_to(found.weights.of(name), found.layers)
        np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=name)


def quiet(base: moments.Transformer, name: str, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return base.with_scheme(name, **options)


DEEP = ("value", "output", "ffn_in", "ffn_out")


def test_xavier() -> None:
    check(quiet(model(), "normal").with_scheme("xavier"), {})
    whole = model(kv_heads=2).with_scheme("xavier", per_head=False).weights
    assert whole is not None
    assert whole.query == whole.output == 1 / 256
    assert whole.value == whole.key == 2 / (256 + 128)
    wide = model(d_head=128).with_scheme("xavier").weights
    assert wide is not None
    assert wide.value == 2 / (256 + 128)
    assert wide.output == 2 / (512 + 256)


def test_normal() -> None:
    weights = model().with_scheme("normal").weights
    assert weights == moments.Weights.normal(4e-4)


@pytest.mark.parametrize(
    ("position", "site", "scaled"),
    [
        ("after-norm", "norm_scale", ("attention", "ffn")),
        ("after-block", "scale", ("attention", "ffn")),
        ("before-norm", "norm_scale", ("attention", "ffn")),
        ("after-residual", "sum_scale", ("attention", "ffn")),
        ("attention-only", "norm_scale", ("attention",)),
        ("ffn-only", "norm_scale", ("ffn",)),
    ],
)
def test_layernorm_scaling(position: str, site: str, scaled: tuple[str, ...]) -> None:
    """1/l in variance at the sites of that position, and nowhere in layer 1."""
    found = quiet(model(4), "lns", position=position)
    assert found.norm == "pre"
    np.testing.assert_allclose(found.norm_scales**2, 1 / np.arange(1, 5))
    frame = moments.predict(found, correlation=0.3).to_frame()
    for block in ("attention", "ffn"):
        rows = frame[frame.site == f"{block}.{site}"].set_index("layer").variance
        assert set(rows.index) <= {1, 2, 3, 4}
        assert bool(len(rows)) == (block in scaled)
        if site == "norm_scale" and position != "before-norm" and len(rows):
            np.testing.assert_allclose(rows, 1 / rows.index, rtol=0.01)


def test_deepnorm() -> None:
    found = model().with_scheme("deepnorm")
    assert (found.norm, found.branch_scale) == ("post", 1.0)
    assert found.skip_scale == pytest.approx(2.0, rel=1e-12)  # (2 * 8)^(1/4)
    check(found, dict.fromkeys(DEEP, 1 / 8))  # (8 * 8)^(-1/4), squared
    gated = model(gated=True).with_scheme("deepnorm").weights
    assert gated is not None
    assert gated.of("gate") == gated.ffn_in


def test_deepnorm_of_an_encoder_and_a_decoder() -> None:
    found = model(6, causal=True, encoder=model(12)).with_scheme("deepnorm")
    assert found.encoder is not None
    assert found.skip_scale == pytest.approx(18**0.25)
    check(found, dict.fromkeys(DEEP, 72**-0.5))
    # (12^4 * 6)^(1/16) = 2.08207...: alpha = .81 of it, beta = .87 over it
    root = math.exp((4 * math.log(12) + math.log(6)) / 16)
    assert found.encoder.skip_scale == pytest.approx(0.81 * root)
    check(found.encoder, dict.fromkeys(DEEP, (0.87 / root) ** 2))
    assert found.weights is not None
    assert found.weights.of("cross_value") == found.weights.value


def test_ds_init() -> None:
    layers = np.arange(1, 9)
    base = model(norm="post")
    check(base.with_scheme("ds-init"), dict.fromkeys(XAVIER, 1 / layers))
    check(base.with_scheme("ds-init", variant="sun"), dict.fromkeys(XAVIER, 1 / (2 * layers)))
    check(base.with_scheme("ds-init", alpha=0.5), dict.fromkeys(XAVIER, 0.25 / layers))


@pytest.mark.parametrize(
    ("variant", "inward", "output", "ffn_out"),
    [
        ("gpt2", 4e-4, [4e-4 / 16] * 8, [4e-4 / 16] * 8),
        ("megatron", 4e-4, [4e-4 / 16] * 8, [4e-4 / 16] * 8),
        (
            "olmo",
            1 / 256,
            [1 / (512 * n) for n in range(1, 9)],
            [1 / (2048 * n) for n in range(1, 9)],
        ),
        (
            "sun",
            1 / 256,
            [1 / (512 * n) for n in range(1, 9)],
            [1 / (512 * n) for n in range(1, 9)],
        ),
    ],
)
def test_scaled_init(variant: str, inward: float, output: Any, ffn_out: Any) -> None:
    found = model().with_scheme("scaled-init", variant=variant).weights
    assert found is not None
    assert found.query == found.key == found.value == found.ffn_in == pytest.approx(inward)
    np.testing.assert_allclose(np.broadcast_to(found.output, 8), output, rtol=1e-12)
    np.testing.assert_allclose(np.broadcast_to(found.ffn_out, 8), ffn_out, rtol=1e-12)


def test_scaled_init_counts_cross_attention() -> None:
    found = model(causal=True, encoder=model(3)).with_scheme("scaled-init")
    assert found.weights is not None
    assert found.weights.output == pytest.approx(4e-4 / 24)
    assert found.encoder is not None
    assert found.encoder.weights is not None
    assert found.encoder.weights.output == pytest.approx(4e-4 / 6)


@pytest.mark.parametrize(
    ("name", "options", "layers", "norm", "gain"),
    [
        ("skipinit", {}, 8, "pre", 0.25),
        ("skipinit", {"variant": "sun"}, 16, "pre", 0.25),
        ("skipinit", {"alpha": 0.0}, 8, "none", 0.0),
        ("rezero", {}, 8, "none", 0.0),
        ("layerscale", {}, 18, "pre", 0.1),
        ("layerscale", {}, 24, "pre", 1e-5),
        ("layerscale", {}, 36, "pre", 1e-6),
        ("depth-mup", {"a": 2.0}, 16, "pre", 0.5),
        ("noci", {"temperature": None}, 16, "post", 0.25),
    ],
)
def test_gains_on_blocks(
    name: str, options: dict[str, Any], layers: int, norm: str, gain: float
) -> None:
    found = model(layers, norm=norm, skip_scale=2.0).with_scheme(name, **options)
    assert (found.norm, found.skip_scale) == (norm, 1.0)
    assert found.branch_scale == pytest.approx(gain, rel=1e-12)
    check(found, {})


def test_value_skipinit() -> None:
    """Attention hands on the values: variance d s_v d s_o, correlation as it enters."""
    found = model().with_scheme("value-skipinit")
    assert found == model(identity_attention=True)
    frame = moments.predict(found, correlation=0.3).to_frame()
    row = frame[(frame.layer == 1) & (frame.site == "attention.dropout")].iloc[0]
    assert row.variance == pytest.approx(256 * 2 / 320, rel=1e-9)
    assert row.correlation == pytest.approx(0.3, rel=0.02)


def imbalance(found: moments.Transformer) -> np.ndarray:
    """log E|dL/dW_q|^2 / E|dL/dW_v|^2 of every layer."""
    gradients = moments.predict(found, correlation=0.2).weight_gradients()
    norms = gradients.pivot_table(index="layer", columns="weight", values="squared_norm")
    layers = norms.loc[1 : found.layers]
    return np.log(np.asarray(layers["query"] / layers["value"]))


def test_nocis_temperature_balances_the_gradients() -> None:
    base = model(3, norm="post", heads=1, activation="identity")
    found = base.with_scheme("noci", correlation=0.2)
    assert abs(np.mean(imbalance(found))) < 0.02
    each = base.with_scheme("noci", correlation=0.2, temperature="per-layer")
    assert np.max(np.abs(imbalance(each))) < 0.02
    assert np.max(imbalance(base)) < -1.0
    printed = base.with_scheme("noci", correlation=0.2, temperature="printed").temperatures
    # tau^2 = d n (1 + rho (n - 1)) / ((1 - rho)^2 (n + d) (n - 1)) at layer 1's rho = .2
    square = 256 * 32 * (1 + 0.2 * 31) / (0.64 * 288 * 31)
    assert printed[0] == pytest.approx(1 / math.sqrt(square), rel=1e-9)
    assert np.all(np.diff(printed) < 0)


def test_admin_adds_up_what_came_before() -> None:
    base = model(4, norm="pre")
    found = base.with_scheme("admin", correlation=0.3)
    plain = moments.predict(base.replace(norm="post"), correlation=0.3).to_frame()
    outputs = plain[plain.site.isin(["attention.dropout", "ffn.dropout"])].variance.to_numpy()
    omega = np.ravel(found.skip_scale)
    assert omega[0] == 1.0
    np.testing.assert_allclose(omega[1:] ** 2, 1 + np.cumsum(outputs)[:-1], rtol=1e-12)
    check(found, {})
    with pytest.raises(moments.DomainError, match="cross-attention"):
        model(encoder=model(2)).with_scheme("admin")


def test_tfixup() -> None:
    table = moments.Embedding(50, 1.0, norm=True)
    found = model(16, embedding=table).with_scheme("t-fixup")
    assert (found.norm, found.embedding.norm) == ("none", False)
    assert found.embedding.token_variance == pytest.approx(1 / (256 * 12))  # (9 * 16)^(-1/2)/d
    check(found, dict.fromkeys(DEEP, 0.67**2 / 4))
    decoder = model(16, causal=True, encoder=model(16)).with_scheme("t-fixup")
    check(decoder, dict.fromkeys(DEEP, 1 / 12))
    assert decoder.encoder is not None
    check(decoder.encoder, dict.fromkeys(DEEP, 0.67**2 / 4))


def test_mup() -> None:
    base = model(d_model=1024, head=moments.Head(output_scale=2.0))
    found = base.with_scheme("mup")
    weights = found.weights
    assert weights is not None
    assert weights.query == weights.value == weights.output == weights.ffn_in == 1 / 1024
    assert weights.ffn_out == 1 / 4096
    assert found.head.output_scale == pytest.approx(2 / 4)
    # q.k / d_head instead of / sqrt(d_head), equal at d_head = 64
    assert found.temperature * math.sqrt(256) == pytest.approx(256 / math.sqrt(64))
    assert base.with_scheme("mup", base_d_head=256).temperature == 1.0
    assert base.with_scheme("mup", zero_query=True).weights.query == 0.0  # type: ignore[union-attr]


def test_placements() -> None:
    for name, norm in {
        "pre-ln": "pre",
        "post-ln": "post",
        "bamboo": "pre",
        "sandwich-ln": "sandwich",
        "hybridnorm": "hybrid",
        "b2t": "b2t",
    }.items():
        assert model().with_scheme(name) == model(norm=norm)
    assert model(10).with_scheme("mix-ln").placements == ("post",) * 2 + ("pre",) * 8
    assert model(10).with_scheme("mix-ln", fraction=0.5).post_layers == 5
    assert model(10).with_scheme("mix-ln").with_scheme("post-ln").norm == "post"
    assert model().with_scheme("group-ln").norm_groups == 32
    dyt = model().with_scheme("dyt")
    assert (dyt.normalization, dyt.dyt_alpha) == ("dyt", 0.5)
    assert model().with_scheme("qk-norm").qk_norm == "layernorm"
    base = model(embedding=moments.Embedding(50, 1.0), head=moments.Head(norm=False))
    peri = base.with_scheme("peri-ln")
    assert (peri.norm, peri.embedding.norm, peri.head.norm) == ("sandwich", True, True)
