"""Where the papers print something else: each correction against a simulation or a count."""

from __future__ import annotations

import math

import numpy as np
import pytest
from quadrature import (
    AttentionSetting,
    Estimate,
    attention_draws,
    exchangeable,
    layernorm_draws,
    masks,
    repeated_share,
    token_moments,
    zipf_repeats,
)

import moments


def assert_within(value: float, estimate: Estimate, slack: float = 0.0) -> None:
    assert abs(value - estimate.mean) <= 3 * estimate.stderr + slack * abs(estimate.mean)


def assert_excluded(value: float, estimate: Estimate) -> None:
    """The printed form is not merely noisy: it is at least ten standard errors away."""
    assert abs(value - estimate.mean) > 10 * estimate.stderr


def test_ffn_covariance_has_d_squared() -> None:
    """Table 18 prints 4 d s_1 s_2 where the composition needs 4 d^2 s_1 s_2."""
    d, d_ff, s_1, s_2, v, r = 256, 1024, 1 / 512, 1 / 600, 1.4, 0.5
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(40):
        x = exchangeable(rng, 8, d, v, r)
        hidden = np.maximum(x @ rng.normal(size=(d, d_ff)) * math.sqrt(s_1), 0)
        draws.append(token_moments(hidden @ rng.normal(size=(d_ff, d)) * math.sqrt(s_2))[1])
    measured = Estimate.of(draws)
    law = moments.component("ffn_block").law("covariance", "published")
    value = law(
        d_model=d, d_ff=d_ff, ffn_in=s_1, ffn_out=s_2, drop_prob=0.1, x_variance=v, x_correlation=r
    )
    assert_within(value, measured, slack=1 / d)
    assert_excluded(value / d, measured)


def test_attention_without_value_has_no_width_factor() -> None:
    """Tables 16, 17, 18 and 20 carry a d_in, and Table 17 a (1-p)^2."""
    setting = AttentionSetting(theta=1e-4, attention_drop_prob=0.4, grad_correlation=0.05)
    values = setting.values()
    p = values["drop_prob"] = values.pop("attention_drop_prob")
    laws = moments.component("attention_without_value").under("published")
    measured = attention_draws(setting, 60, 4)
    for quantity in ("variance", "covariance", "grad_variance", "grad_covariance"):
        value = laws[quantity](**values)
        estimate = measured["attention_without_value", quantity]
        # Forward, the published form leaves out the dropout of the common part, p/((1-p) L).
        slack = 0.0 if quantity.startswith("grad") else p / (1 - p) / setting.seq_len
        assert_within(value, estimate, slack=slack)
        assert_excluded(value * setting.d_model, estimate)
    g, gc = setting.grad_variance, setting.grad_variance * setting.grad_correlation
    squared = (g + (setting.seq_len - 1) * gc * (1 - p) ** 2) / (setting.seq_len * (1 - p) ** 2)
    assert_excluded(squared, measured["attention_without_value", "grad_variance"])


def test_dropout_lowers_the_gradients_correlation() -> None:
    """B.1 as printed keeps r_g through the block's dropout; A.3 composed keeps the covariance."""
    d, p, g2, rg = 64, 0.4, 0.9, 0.7
    rng = np.random.default_rng(1)
    draws = []
    for _ in range(400):
        g = exchangeable(rng, 12, d, g2, rg)
        draws.append(
            token_moments((g * masks(rng, g.shape, p)) @ (rng.normal(size=(d, d)) / math.sqrt(d)))
        )
    variance, covariance = (Estimate.of(column) for column in zip(*draws, strict=True))
    dropout = moments.component("dropout").under("published")
    linear = moments.component("linear").under("published")
    after = {
        kind: dropout[kind](grad_variance=g2, grad_covariance=g2 * rg, drop_prob=p)
        for kind in ("grad_variance", "grad_covariance")
    }
    sent = {kind: linear[kind](fan_out=d, weight_variance=1 / d, **after) for kind in after}
    assert_within(sent["grad_variance"], variance)
    assert_within(sent["grad_covariance"], covariance)
    assert_excluded(sent["grad_variance"] * rg, covariance)


def test_the_printed_block_gradient_is_the_law_and_says_so() -> None:
    """Where r_g dominates, the block's published gradient is 1/(1-p) above the simulated one."""
    setting = AttentionSetting(
        theta=1e-4, drop_prob=0.4, attention_drop_prob=0.0, grad_correlation=0.8
    )
    law = moments.component("attention_block").law("grad_variance", "published")
    estimate = attention_draws(setting, 60, 5)["attention_block", "grad_variance"]
    assert "dropout" in law.note
    assert_excluded(law(**setting.values()), estimate)
    share = 1 + (setting.seq_len - 1) * setting.grad_correlation
    composed = 1 / (1 - 0.4) + (setting.seq_len - 1) * setting.grad_correlation
    assert_within(law(**setting.values()) * (1 - 0.4) * composed / share, estimate)


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_layernorm_correlation_at_finite_width(r: float) -> None:
    """Right to O(1/d): r [1 - (1 - r^2)/(2 (d - 1))]; A.6 prints r (1 - 1/d)."""
    d = 24
    measured = layernorm_draws(d, 1.0, r, 200_000, 6)["covariance"]
    right = r * (1 - (1 - r * r) / (2 * (d - 1)))
    assert_within(right, measured, slack=1 / d**2)
    law = moments.component("layernorm").law("covariance", "published")
    printed = law(d_model=d, x_correlation=r)
    if r:
        assert_excluded(printed, measured)


def test_zipf_repeats_are_multinomial() -> None:
    """A.1 replaces counts by their means, N_i -> p_i L; the expectation is sum p_i^2 itself."""
    vocab, length = 2000, 64
    odds = 1 / np.arange(1, vocab + 1)
    rng = np.random.default_rng(7)
    texts = rng.choice(vocab, size=(4000, length), p=odds / odds.sum())
    shares = [
        ((text[:, None] == text[None, :]).sum() - length) / (length * (length - 1))
        for text in texts
    ]
    measured = Estimate.of(shares)
    laws = moments.component("token_embedding")
    right = laws.law("pattern_correlation", "refined")(vocab_size=vocab)
    printed = laws.law("pattern_correlation", "published")(vocab_size=vocab, seq_len=length)
    assert right == pytest.approx(0.0246, abs=5e-5)
    assert printed == pytest.approx(0.0091, abs=5e-5)
    assert_within(right, measured)
    assert_excluded(printed, measured)
    assert laws.law("pattern_correlation", "refined")(vocab_size=4) == pytest.approx(
        zipf_repeats(4, 4), rel=1e-14
    )


@pytest.mark.parametrize("length", [2, 5, 40])
def test_a_uniform_split_gives_two_thirds(length: int) -> None:
    splits = [(0,) * n + (1,) * (length - n) for n in range(length + 1)]
    counted = sum(repeated_share(split) for split in splits) / len(splits)
    laws = moments.component("segment_embedding")
    assert laws.law("pattern_correlation", "refined")() == float(counted)
    assert laws.law("pattern_correlation", "published")(seq_len=length) < float(counted)


def test_an_embedding_has_its_tables_variance() -> None:
    """Table 16 prints 0."""
    rng = np.random.default_rng(8)
    tables = rng.normal(size=(200, 50)) * 0.3
    looked_up = tables[rng.integers(0, 200, size=1000)]
    for name in ("token", "segment", "position"):
        law = moments.component(f"{name}_embedding").law("variance", "published")
        assert law(table_variance=0.09) == pytest.approx(np.mean(looked_up**2), rel=0.05)
    assert "prints 0" in law.note
