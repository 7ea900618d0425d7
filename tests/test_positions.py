"""Declarations of positions in attention, against their papers and other implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moments.errors import DomainError
from moments.model.positions import RelativeBias, Rotary, alibi_slopes


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_rotary_kernel_is_the_covariance_of_rotated_products(fraction: float) -> None:
    """tr(R_i^T R_j R_j'^T R_i')/d_head with the rotation matrices written out."""
    width, rotary = 16, Rotary(fraction, 100.0)
    half = int(fraction * width) // 2

    def rotation(position: int) -> np.ndarray:
        angle = position * 100.0 ** (-2 * np.arange(half) / (2 * half))
        matrix = np.eye(width)
        one, two = np.arange(half), np.arange(half) + half
        matrix[one, one] = matrix[two, two] = np.cos(angle)
        matrix[one, two], matrix[two, one] = -np.sin(angle), np.sin(angle)
        return matrix

    for i, j, i2, j2 in ((0, 0, 0, 0), (3, 1, 4, 9), (0, 7, 5, 5), (11, 2, 6, 0)):
        first, second = rotation(i).T @ rotation(j), rotation(i2).T @ rotation(j2)
        expected = np.trace(first @ second.T) / width
        assert rotary.kernel((j2 - i2) - (j - i), width) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_those_of_t5(causal: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    offset = np.arange(-300, 301)
    if causal:
        offset = offset[offset <= 0]
    for buckets, reach in ((32, 128), (8, 20)):
        theirs = t5._relative_position_bucket(
            torch.tensor(offset), bidirectional=not causal, num_buckets=buckets, max_distance=reach
        )
        ours = RelativeBias(0.1, buckets, reach).bucket(offset, causal)
        np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("heads", [1, 8, 12, 40])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    biases = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    np.testing.assert_allclose(alibi_slopes(heads), biases[:, 0, 1].numpy(), rtol=1e-6)


def test_declarations_survive_their_dictionaries() -> None:
    for one in (Rotary(0.5, 500000.0), RelativeBias(0.2, 16, 64)):
        assert type(one).from_dict(one.to_dict()) == one
        assert str(one)
        with pytest.raises(DomainError, match="field"):
            type(one).from_dict(one.to_dict() | {"colour": 1})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Rotary(0.0), "fraction"),
        (lambda: Rotary(1.5), "fraction"),
        (lambda: Rotary(1.0, -1.0), "base"),
        (lambda: RelativeBias(-0.1), "variance"),
        (lambda: RelativeBias(0.1, 2), "buckets"),
        (lambda: RelativeBias(0.1, 32, 10), "max_distance"),
    ],
)
def test_bad_declarations_are_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(DomainError, match=named):
        make()
