"""Nothing that is declared along with blocks is ignored in silence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import moments
from moments import laws

MIXER = moments.ShortConvolution()
EXPERTS = moments.Experts(4, 2, d_ff=32)


def declared(layers: int = 2, **given: Any) -> moments.Transformer:
    return moments.Transformer(layers, 32, 4, 8, causal=True, **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 4),
        ("rotary", moments.Rotary()),
        ("temperature", 2.0),
        ("kv_heads", 2),
        ("attention_dropout", 0.1),
        ("attention_sink", 1.0),
    ],
)
def test_attention_s_own_without_attention_is_refused(name: str, value: Any) -> None:
    with pytest.raises(moments.DomainError, match=f"{name} = .*no layer has attention"):
        declared(mixer=MIXER, **{name: value})
    # one layer that reads it is enough
    assert getattr(declared(mixer=[MIXER, None], **{name: value}), name) is not None
    declared(mixer=MIXER, dropout=0.1)  # which attention's follows by default


def test_a_bias_that_no_matrix_has_is_refused() -> None:
    def law(x: Any, w: Any) -> Any:
        return w.output(laws.activation("relu", w.up(x)))

    block = moments.block(
        law=law,
        name="up and down",
        weights={"up": ("d_model", "d_model", 0.1), "output": ("d_model", "d_model")},
    )
    with pytest.raises(moments.DomainError, match=r"biases\.query = .*no layer has .*'query'"):
        declared(mixer=block, biases=moments.Biases(query=0.1))
    declared(mixer=block, biases=moments.Biases(output=0.1))
    declared(mixer=[block, None], biases=moments.Biases(query=0.1))
    declared(mixer=block, biases=moments.Biases())


def test_layers_go_on_by_their_pattern() -> None:
    hybrid = declared(8, mixer=[MIXER, MIXER, MIXER, None] * 2, window=[None, 4] * 4)
    more = hybrid.replace(layers=11)
    assert more.mixers == (MIXER, MIXER, MIXER, None) * 2 + (MIXER,) * 3
    assert more.windows == (None, 4) * 5 + (None,)
    assert hybrid.replace(layers=5).mixers == (MIXER, MIXER, MIXER, None, MIXER)
    first = declared(4, ffn=[None, EXPERTS, EXPERTS, EXPERTS]).replace(layers=6)
    assert first.ffns == (None,) + (EXPERTS,) * 5
    assert hybrid.replace(layers=2, mixer=None).mixers == (None, None)
    uneven = declared(3, mixer=[MIXER, None, None], ffn=[None, None, EXPERTS])
    with pytest.raises(moments.DomainError, match=r"ffn = .*no pattern in it.*pass ffn="):
        uneven.replace(layers=4)
    with pytest.raises(moments.DomainError, match=r"replace\(layers=\.\.\.\) goes on"):
        dataclasses.replace(hybrid, layers=4, window=None)
