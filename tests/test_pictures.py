"""Pictures name their model, say their verdict, and are read by everyone."""

from __future__ import annotations

import io
import itertools
import warnings

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import moments
from moments.show import palette

MODEL = moments.Transformer(4, 64, 4, 16, dropout=0.1, name="little")

# Machado, Oliveira and Fernandes 2009, of full severity, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def lab(color: str, vision: str) -> np.ndarray:
    """CIELAB of a colour as somebody sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(VISION[vision] @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_lines_are_told_apart_by_everyone(vision: str) -> None:
    """A difference of 10 in CIELAB is plain to see; lines differ in their dashes besides."""
    for one, other in itertools.combinations(palette.SERIES, 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 10, (one, other)
    assert len(set(palette.SERIES)) == len(palette.SERIES) == len(palette.DASHES)


def words(figure: Figure) -> str:
    texts = [figure.get_suptitle(), figure.get_supxlabel()]
    texts += [t.get_text() for ax in figure.axes for t in (ax.title, ax._left_title)]  # type: ignore[attr-defined]
    texts += [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    return " ".join("\n".join(texts).split())


def test_titles_name_the_model() -> None:
    prediction = moments.predict(MODEL, correlation=0.2)
    assert words(prediction.plot()).startswith("little: 4 layers")
    assert words(prediction.plot("mine")).startswith("mine: 4 layers")
    assert moments.preset("gpt2").name == "gpt2"
    assert moments.from_huggingface({"model_type": "bert"}).name == "bert"
    assert words(moments.compare_schemes(MODEL, "lns").plot()).startswith("little")
    unnamed = MODEL.replace(name=None)
    assert unnamed == MODEL
    assert "name" not in unnamed.to_dict()
    assert moments.Transformer.from_dict(MODEL.to_dict()).name == "little"
    with pytest.raises(moments.DomainError, match="name"):
        MODEL.replace(name=3)


def test_a_plan_draws_its_weights_and_scales() -> None:
    plan = moments.solve(MODEL, "block_variance", target=0.5, correlation=0.2)
    figure = plan.plot()
    assert "little: 4 layers, variance of every block" in words(figure)
    assert plan.state in words(figure)
    assert r"$\lambda$" in words(figure)
    assert r"$\beta$" in words(figure)
    by_label = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_array_equal(by_label["value"], plan.to_frame()["value"])
    expected = moments.predict(plan.model, **plan.inputs).variance
    np.testing.assert_array_equal(figure.axes[2].lines[0].get_ydata(), expected)


def test_a_diagnosis_draws_causes_and_verdict() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 256, dropout=0.0, batch_first=True, norm_first=True
    )
    module = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    plan = moments.solve(MODEL.replace(dropout=0.0), "block_variance", target=0.2, correlation=0.2)
    moments.torch.initialize(module, plan, seed=0)
    torch.nn.init.normal_(module.layers[1].linear1.weight, std=0.6)
    tokens = 0.2**0.5 * torch.randn(8, 1, 64) + 0.8**0.5 * torch.randn(8, 16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        diagnosis = moments.torch.diagnose(module, tokens, plan)
    figure = diagnosis.plot("spoilt")
    said = words(figure)
    assert said.startswith("spoilt: 4 layers")
    assert "the growth you see is not expected" in said
    assert "1. ffn_in in layer 2" in said
    assert "predicted for the weights as they are" in said
    found = [line for line in figure.axes[0].lines if line.get_color() == palette.FOUND]
    np.testing.assert_array_equal(found[0].get_ydata(), diagnosis.prediction.variance)
    picture = io.BytesIO()
    figure.savefig(picture, format="svg")
    assert b"<image" not in picture.getvalue()  # lines, not pixels
    legend = figure.legends[0].get_window_extent()
    assert not any(ax.get_window_extent().overlaps(legend) for ax in figure.axes)
