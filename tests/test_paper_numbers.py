"""Numbers that the papers print, recovered from the package; and their recursion, written again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq

import moments
from moments.engine.composition import Chain, forward
from moments.engine.state import Gradient, Kernel, Signal
from moments.formulas.activation import RELU
from moments.formulas.linear import DROPOUT, LINEAR
from moments.layers.elementary import Activation, Dropout, Linear

VOCAB, LENGTH = 32000, 256


# --- the correlation of the input -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("theory", "printed", "half_digit"),
    [("simplified", 0.227, 5e-4), ("published", 0.2251, 5e-5), ("refined", 0.2268, 5e-5)],
)
def test_input_correlation_of_three_tables(theory: str, printed: float, half_digit: float) -> None:
    patterns = [
        moments.component(f"{table}_embedding").law("pattern_correlation", theory)(  # type: ignore[arg-type]
            vocab_size=VOCAB, seq_len=LENGTH
        )
        for table in ("token", "segment", "position")
    ]
    assert np.mean(patterns) == pytest.approx(printed, abs=half_digit)


@pytest.mark.parametrize(("theory", "printed"), [("simplified", 0.227), ("published", 0.2251)])
def test_a_declared_embedding_gives_the_same(theory: str, printed: float) -> None:
    tables = moments.Embedding(VOCAB, 0.5, position_variance=0.5, segment_variance=0.5)
    for drop_prob in (0.0, 0.1):
        model = moments.Transformer(2, 64, 4, LENGTH, embedding=tables.replace(dropout=drop_prob))
        p = moments.predict(model, theory=theory)  # type: ignore[arg-type]
        assert p.variance[0] == pytest.approx(1.5 / (1 - drop_prob), rel=1e-12)
        assert p.correlation[0] == pytest.approx((1 - drop_prob) * printed, abs=5e-4)


# --- the chain's constants and its fixed points ---------------------------------------------------


def xavier_block(heads: int, drop_prob: float) -> dict[str, float]:
    """Weights and widths of a block whose every head is a Xavier matrix of its own."""
    d_model = 768 if heads == 12 else 16 * heads
    weights = moments.Weights.xavier(d_model, heads).layer(1)
    return {
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "drop_prob": drop_prob,
        **{n: getattr(weights, n) for n in ("value", "output", "ffn_in", "ffn_out")},
    }


def chain_constants(values: dict[str, float]) -> tuple[float, float]:
    """C1 and C2: a block's variance at unit input, the attention's per unit correlation."""
    attention = moments.component("attention_block").law("variance", "simplified")
    ffn = moments.component("ffn_block").law("variance", "simplified")
    return (
        attention(x_variance=1.0, x_correlation=1.0, **values),
        ffn(x_variance=1.0, **values),
    )


@pytest.mark.parametrize(("heads", "printed"), [(12, 2.05), (16, 2.09), (4096, 2.22)])
def test_chain_constants(heads: int, printed: float) -> None:
    c1, c2 = chain_constants(xavier_block(heads, 0.1))
    assert c1 == pytest.approx(printed, abs=5e-3)
    assert c1 == pytest.approx(2 / ((1 + 1 / heads) * 0.9), rel=1e-12)
    assert c2 == pytest.approx(0.356, abs=5e-4)


@pytest.mark.parametrize(("theory", "printed"), [("simplified", 0.644), ("published", 0.627)])
def test_where_the_ffn_starts_to_lower_correlation(theory: str, printed: float) -> None:
    block = moments.component("ffn_block")
    values = xavier_block(16, 0.1)

    def gain(r: float) -> float:
        laws = block.under(theory)  # type: ignore[arg-type]
        variance = laws["variance"](x_variance=1.0, **values)
        return float(laws["covariance"](x_variance=1.0, x_correlation=r, **values) / variance - r)

    assert gain(0.3) > 0 > gain(0.95)
    assert brentq(gain, 0.3, 0.95) == pytest.approx(printed, abs=5e-4)


def branch_fixed_points(
    c1: float, c2: float, drop_prob: float, *, collapsed: bool
) -> tuple[float, float]:
    """Where a Pre-LN stream stops changing its correlations: those of the blocks' mixture.

    The blocks are Table 2's, with chain constants c1 and c2. Attention adds c1 times the
    correlation it meets; `collapsed` weighs it by c1 itself, as at correlation 1.
    """
    attention = moments.component("attention_block").under("simplified")
    ffn = moments.component("ffn_block").under("simplified")
    unit = {"d_model": 64.0, "d_ff": 256.0, "drop_prob": drop_prob, "x_variance": 1.0}
    a = {**unit, "output": c1 * (1 - drop_prob) / 64**2, "value": 1.0}
    f = {**unit, "ffn_in": c2 * (1 - drop_prob) * 2 / (64 * 256), "ffn_out": 1.0}

    def mixture(kind: str, own: float, **point: float) -> float:
        weight = attention[f"{kind}variance"](**a, **point)
        pairs = attention[f"{kind}covariance"](**a, **point)
        if collapsed:
            weight, pairs = weight / own, pairs / own
        weight = weight + ffn[f"{kind}variance"](**f, **point)
        return float((pairs + ffn[f"{kind}covariance"](**f, **point)) / weight)

    def forward_gap(r: float) -> float:
        return mixture("", r, x_correlation=r) - r

    r = brentq(forward_gap, 0.1, 0.999)

    def backward_gap(rg: float) -> float:
        point = {"x_correlation": r, "grad_variance": 1.0, "grad_covariance": rg}
        return mixture("grad_", rg, **point) - rg

    return r, brentq(backward_gap, 0.1, 0.999)


@pytest.mark.parametrize(
    ("c1", "c2", "collapsed", "r", "rg"),
    [
        (2.2, 0.4, True, 0.887, 0.863),
        (20 / 9, 0.32 / 0.9, True, 0.888, 0.867),
        (2.2, 0.4, False, 0.885, 0.857),
        (20 / 9, 0.32 / 0.9, False, 0.887, 0.862),
    ],
)
def test_fixed_points_of_the_correlations(
    c1: float, c2: float, collapsed: bool, r: float, rg: float
) -> None:
    """Printed .88 and .87."""
    found = branch_fixed_points(c1, c2, 0.1, collapsed=collapsed)
    assert found == pytest.approx((r, rg), abs=5e-4)


def test_a_deep_stream_tends_to_the_fixed_points() -> None:
    model = moments.Transformer(1000, 1024, 16, 256, dropout=0.1)
    p = moments.predict(model, correlation=0.25, grad_correlation=0.8, theory="simplified")
    r, rg = branch_fixed_points(*chain_constants(xavier_block(16, 0.1)), 0.1, collapsed=False)
    assert p.correlation[-1] == pytest.approx(r, abs=2e-3)
    assert p.grad_correlation[0] == pytest.approx(rg, abs=5e-3)


# --- growth with depth ----------------------------------------------------------------------------


def published_config(layers: int, norm: str) -> moments.Transformer:
    return moments.Transformer(layers, 1024, 16, 256, norm=norm, dropout=0.1)


def test_pre_ln_variance_grows_by_about_two_a_layer() -> None:
    p = moments.predict(published_config(400, "pre"), correlation=0.25, theory="simplified")
    steps = np.diff(p.variance)[-50:]
    c1, c2 = chain_constants(xavier_block(16, 0.1))
    assert steps == pytest.approx(c1 * p.correlation[-1] + c2, rel=5e-3)
    assert steps.mean() == pytest.approx(2.2, abs=0.05)


def test_pre_ln_forward_stays_linear_through_192_layers() -> None:
    p = moments.predict(published_config(192, "pre"), correlation=0.25, theory="published")
    assert np.isfinite(p.variance).all()
    depth = np.arange(193)
    late = depth >= 30
    line = np.polyfit(depth[late], p.variance[late], 1)
    assert np.abs(np.polyval(line, depth[late]) / p.variance[late] - 1).max() < 0.02
    assert line[0] == pytest.approx(2.2, abs=0.1)


def test_pre_ln_gradient_falls_as_the_papers_say() -> None:
    """dL/dx grows towards the input by 1 + (C1 rg + C2)/((C1 r + C2)(n - 1)) at layer n."""
    p = moments.predict(
        published_config(200, "pre"), correlation=0.25, grad_correlation=0.8, theory="simplified"
    )
    c1, c2 = chain_constants(xavier_block(16, 0.1))
    n = np.arange(60, 201)
    ratio = p.grad_variance[n - 1] / p.grad_variance[n]
    growth = (c1 * p.grad_correlation[n] + c2) / (c1 * p.correlation[n] + c2)
    assert (ratio - 1) * (n - 1) == pytest.approx(growth, rel=0.05)


def test_post_ln_gradient_ratio() -> None:
    """At the fixed point a layer multiplies it by (1 + C1 rg)/(1 + C1 r_out), times the FFN's 1."""
    p = moments.predict(
        published_config(60, "post"), correlation=0.25, grad_correlation=0.8, theory="simplified"
    )
    c1, _ = chain_constants(xavier_block(16, 0.1))
    frame = p.to_frame()
    layer = frame[frame["layer"] == 20].set_index("site")
    before = frame[(frame["layer"] == 19) & (frame["site"] == "stream")].iloc[0]
    # The gradient meets the attention's sum after the FFN's branch and both norms.
    r, rg = before["correlation"], layer.loc["attention.sum", "grad_correlation"]
    ratio = p.grad_variance[19] / p.grad_variance[20]
    assert ratio == pytest.approx((1 + c1 * rg) / (1 + c1 * r), rel=1e-6)


# --- the feed-forward block, composed and tabulated -----------------------------------------------


@pytest.mark.parametrize(("v", "r"), [(1.0, 0.3), (0.2, 0.95), (7.0, 0.0)])
def test_composition_gives_the_tabulated_block(v: float, r: float) -> None:
    d, d_ff, s1, s2, p, g2, rg = 48, 100, 0.03, 0.011, 0.2, 0.7, 0.4
    up = {"fan_in": d, "fan_out": d_ff, "weight_variance": s1}
    down = {"fan_in": d_ff, "fan_out": d, "weight_variance": s2}
    chain = (
        Linear(LINEAR, "published", "in", up, d_ff)
        >> Activation(RELU, "published", "relu")
        >> Linear(LINEAR, "published", "out", down, d)
        >> Dropout(DROPOUT, "published", "dropout", {"drop_prob": p})
    )
    assert isinstance(chain, Chain)
    output, record = forward(chain, Signal(Kernel(v, v * r), 16, width=d))
    sent = record.backward(Gradient(Kernel(g2, g2 * rg), 16)).grad_in.kernel
    values = {
        "d_model": d, "d_ff": d_ff, "ffn_in": s1, "ffn_out": s2, "drop_prob": p,
        "x_variance": v, "x_correlation": r, "grad_variance": g2, "grad_correlation": rg,
    }  # fmt: skip
    block = moments.component("ffn_block").under("published")
    assert output.kernel.diagonal == pytest.approx(block["variance"](**values), rel=1e-13)
    assert output.kernel.off_diagonal == pytest.approx(block["covariance"](**values), rel=1e-13)
    assert sent.diagonal == pytest.approx(block["grad_variance"](**values), rel=1e-13)
    assert sent.off_diagonal == pytest.approx(block["grad_covariance"](**values), rel=1e-13)


# --- the published recursion, written again -------------------------------------------------------


def _relu_gain(r: float) -> float:
    return r / 4 + math.sqrt(1 - r * r) / (2 * math.pi) + r * math.asin(r) / (2 * math.pi)


class Recursion:
    """Appendices A and B as plain numbers: (variance, covariance) up, then down, layer by layer."""

    def __init__(self, *, d: int, heads: int, length: int, p: float) -> None:
        self.d, self.length, self.p = d, length, p
        per_head = 2 / (d + d / heads)
        self.s_q = self.s_k = self.s_v = per_head
        self.s_o = 1 / d
        self.s_1 = self.s_2 = 2 / (5 * d)

    def norm(self, v: float, c: float) -> tuple[float, float]:
        return 1.0, (1 - 1 / self.d) * c / v

    def attention(self, v: float, c: float) -> tuple[float, float]:
        d, length, p, r = self.d, self.length, self.p, c / v
        theta = d * v * v * self.s_q * self.s_k
        gain = d * self.s_o * d * self.s_v
        alone = (1 - r) ** 2 * (length - 1) * theta
        weights = math.exp((1 - r) * d * theta) / (1 - p)
        weights *= 4 * (1 - r) ** 2 * theta + 1 - r
        variance = gain * v * ((alone + weights) / length + r) / (1 - p)
        return variance, gain * v * (r + (2 * (1 - r) ** 2 * theta + 1 - r) / length)

    def attention_back(self, g: float, gc: float) -> tuple[float, float]:
        length, p = self.length, self.p
        gain = self.d * self.s_o * self.d * self.s_v
        own = gain * (g + (length - 1) * gc * (1 - p)) / (length * (1 - p)) / (1 - p)
        return own, gain * (g + (length - 1) * gc) / length

    def ffn(self, v: float, c: float) -> tuple[float, float]:
        gain = 4 * self.d**2 * self.s_1 * self.s_2
        return gain / 2 * v / (1 - self.p), gain * v * _relu_gain(c / v)

    def ffn_back(self, v: float, c: float, g: float, gc: float) -> tuple[float, float]:
        gain = 4 * self.d**2 * self.s_1 * self.s_2
        slope = 0.25 + math.asin(c / v) / (2 * math.pi)
        return gain / 2 * g / (1 - self.p), gain * gc * slope

    def run(self, layers: int, norm: str, r: float, rg: float) -> np.ndarray:
        """Rows variance, correlation, grad_variance, grad_correlation of the N + 1 points."""
        stream, inside = [(1.0, r)], []
        for _ in range(layers):
            x = stream[-1]
            records = []
            for block in (self.attention, self.ffn):
                entered = self.norm(*x) if norm == "pre" else x
                added = block(*entered)
                total = (x[0] + added[0], x[1] + added[1])
                records.append((x, entered, total))
                x = total if norm == "pre" else self.norm(*total)
            stream.append(x)
            inside.append(records)
        gradients = [(1.0, rg)]
        for records in reversed(inside):
            g = gradients[0]
            for kind, (x, entered, total) in zip(("ffn", "attention"), records[::-1], strict=True):
                if norm == "post":
                    g = (g[0] / total[0], g[1] / total[0])
                back = self.ffn_back(*entered, *g) if kind == "ffn" else self.attention_back(*g)
                if norm == "pre":
                    back = (back[0] / x[0], back[1] / x[0])
                g = (g[0] + back[0], g[1] + back[1])
            gradients.insert(0, g)
        rows = [(v, c / v, g, gc / g) for (v, c), (g, gc) in zip(stream, gradients, strict=True)]
        return np.array(rows).T


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(("p", "r", "rg"), [(0.1, 0.25, 0.0), (0.0, 0.6, 0.3)])
def test_prediction_follows_the_recursion(norm: str, p: float, r: float, rg: float) -> None:
    model = moments.Transformer(24, 256, 4, 128, norm=norm, dropout=p)
    q = moments.predict(model, correlation=r, grad_correlation=rg, theory="published")
    expected = Recursion(d=256, heads=4, length=128, p=p).run(24, norm, r, rg)
    assert np.stack(
        [q.variance, q.correlation, q.grad_variance, q.grad_correlation]
    ) == pytest.approx(expected, rel=1e-11)
