"""A block of one's own in the place of attention or of the feed-forward block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from own_block import Bottleneck

import moments

MODEL = moments.Transformer(
    4,
    64,
    4,
    12,
    causal=True,
    mixer=[None, None, Bottleneck(64, out="output"), None],
    ffn=[None, Bottleneck(256), None, Bottleneck(128)],
)


def test_it_is_predicted_as_it_is_simulated() -> None:
    predicted = moments.predict(MODEL)
    simulated = moments.simulate(MODEL, seeds=24, batch=2)
    for name in ("variance", "grad_variance"):
        error = np.log(getattr(predicted, name) / getattr(simulated, name))
        noise = getattr(simulated, f"{name}_stderr") / getattr(simulated, name)
        assert np.all(np.abs(error) < 0.02 + 3 * noise), name
    rows = predicted.weight_gradients().set_index(["layer", "weight"])["squared_norm"]
    drawn = simulated.weight_gradients().set_index(["layer", "weight"])
    assert set(rows.index) == set(drawn.index)
    for where, expected in rows.items():
        value, noise = drawn.loc[where, ["squared_norm", "squared_norm_stderr"]]
        assert abs(value - expected) < 0.03 * expected + 4 * noise, where


def test_it_is_stored_and_said() -> None:
    assert moments.Transformer.from_dict(MODEL.to_dict()) == MODEL
    assert "bottleneck (width 128, out ffn_out) in layers 4" in str(MODEL)
    assert MODEL.shapes_of(4)["ffn_out"] == (128, 64)
    assert "query" not in MODEL.shapes_of(3)


def test_what_fits_no_place_is_refused() -> None:
    with pytest.raises(moments.DomainError, match="one block, or one or None per layer"):
        moments.Transformer(3, 64, 4, 8, ffn=[None, None])
    with pytest.raises(moments.DomainError, match="a block that takes this place"):
        moments.Transformer(3, 64, 4, 8, mixer="mamba")  # type: ignore[arg-type]
    for wrong in ({"kind": "experts"}, [{}, None]):
        with pytest.raises(moments.DomainError, match="a block that takes this place"):
            moments.Transformer(2, 64, 4, 8, ffn=wrong)  # type: ignore[arg-type]
    stored = moments.Transformer(1, 64, 4, 8).to_dict() | {"ffn": {"kind": "unknown"}}
    with pytest.raises(moments.DomainError, match="kind is one of"):
        moments.Transformer.from_dict(stored)
    with pytest.raises(moments.DomainError, match="both have a matrix 'ffn_out'"):
        moments.Transformer(2, 64, 4, 8, mixer=Bottleneck())
    with pytest.raises(moments.DomainError, match="both say what stands"):
        moments.Transformer(1, 64, 4, 8, mixer=Bottleneck(out="output"), identity_attention=True)


@pytest.mark.parametrize(
    "given",
    [
        {"alibi": True},
        {"qk_norm": "rmsnorm"},
        {"logit_softcap": 30.0},
        {"attention_sink": 0.0},
        {"attention_gate": "headwise"},
    ],
)
def test_what_attention_alone_reads_is_refused_where_there_is_none(given: dict[str, Any]) -> None:
    mixer = moments.ShortConvolution(3)
    with pytest.raises(moments.DomainError, match="no layer has attention"):
        moments.Transformer(2, 64, 4, 8, causal=True, mixer=mixer, **given)
    moments.Transformer(2, 64, 4, 8, causal=True, mixer=[mixer, None], **given)


def test_admin_scales_what_stands_beside_absent_blocks() -> None:
    whole = moments.Transformer(2, 64, 4, 8)
    for place, kept in (("ffn", 0), ("mixer", 1)):
        model = whole.replace(**{place: moments.Absent()}).with_scheme("admin")
        variances = moments.predict(model.replace(skip_scale=1.0)).to_frame()
        block = ("attention", "ffn")[kept]
        first = variances[(variances.layer == 1) & (variances.site == f"{block}.dropout")]
        scales = model.skip_scales[:, kept]
        assert scales[0] == 1.0
        assert scales[1] ** 2 == pytest.approx(1.0 + float(first.variance.iloc[0]))
