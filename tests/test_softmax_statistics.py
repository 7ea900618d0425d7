"""Softmax statistics: evaluator against other quadratures and Monte Carlo, tables against it."""

from __future__ import annotations

import itertools
import math
from importlib import resources

import build_softmax_tables
import mpmath
import numpy as np
import pytest
from exact_softmax import (
    THETA_EXACT,
    chebyshev_coefficients,
    encode_row,
    encode_square_pair,
    far_rho_at,
    far_theta_at,
    fixed_norm_statistics,
    gauss_nodes,
    length_at,
    pair_statistics,
    row_statistics,
    theta_at,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermegauss
from scipy import integrate, stats

from moments.errors import DomainError
from moments.layers.attention import softmax as exact_rows
from moments.layers.attention.softmax import (
    AlikeRows,
    RowStatistics,
    SquareTable,
    chebyshev_basis,
    chi_square_rule,
    key_corrections,
)


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def row_samples(logits, theta):
    """Per-sample values of every field of RowStatistics for logits (..., n)."""
    a = softmax(logits)
    square, cube, fourth = ((a**p).sum(-1) for p in (2, 3, 4))
    mean = (a * logits).sum(-1)
    response = a * (logits - mean[..., None])
    return RowStatistics(
        sum_square=square,
        sum_cube=cube,
        sum_fourth=fourth,
        jacobian_square=square - 2 * cube + square**2,
        radial_square=(response**2).sum(-1) / theta,
        sum_square_slope=(a * response).sum(-1),  # d/dlog theta is half d/dlog sigma
        entropy=-(a * np.log(a)).sum(-1),
    )


def pair_samples(logits, logits2, psi):
    """Per-sample values of PairStatistics; the first row's keys are the first of the second's."""
    n = logits.shape[-1]
    a, b = softmax(logits), softmax(logits2)
    response = a * (logits - (a * logits).sum(-1, keepdims=True))
    response2 = b * (logits2 - (b * logits2).sum(-1, keepdims=True))
    b, response2 = b[..., :n], response2[..., :n]
    overlap = (a * b).sum(-1)
    return (
        overlap,
        overlap - (a * a * b).sum(-1) - (a * b * b).sum(-1) + overlap**2,
        (response * response2).sum(-1) / psi,
        0.5 * ((response * b).sum(-1) + (a * response2).sum(-1)),
    )


def hermite_grid(points, dimension):
    """Tensor Gauss-Hermite rule for `dimension` independent standard normals."""
    nodes, weights = hermegauss(points)
    weights = weights / weights.sum()
    grid = np.stack(np.meshgrid(*[nodes] * dimension, indexing="ij"), -1).reshape(-1, dimension)
    product = np.prod(np.meshgrid(*[weights] * dimension, indexing="ij"), axis=0).ravel()
    return grid, product


# ------------------------------------------------------------------ the evaluator, independently


@pytest.mark.parametrize(("theta", "n"), [(0.3, 2), (2.0, 2), (6.0, 2), (1.0, 3)])
def test_row_against_gauss_hermite(theta, n):
    """All statistics, by a tensor rule over the logits themselves."""
    grid, weights = hermite_grid(180 if n == 2 else 60, n)
    samples = row_samples(math.sqrt(theta) * grid, theta)
    for name, sample, value in zip(
        RowStatistics._fields, samples, row_statistics(theta, n), strict=False
    ):
        assert value == pytest.approx(weights @ sample, rel=1e-6), name


def test_two_keys_against_mpmath():
    """n = 2: a = sigmoid(u), u ~ N(0, 2 theta), to fifteen digits."""
    theta = mpmath.mpf("1.7")

    def expect(f):
        def integrand(u):
            density = mpmath.exp(-(u**2) / (4 * theta)) / mpmath.sqrt(4 * mpmath.pi * theta)
            return f(1 / (1 + mpmath.exp(-u))) * density

        return float(mpmath.quad(integrand, [-40, -10, 0, 10, 40]))

    row = row_statistics(1.7, 2)
    assert row.sum_square == pytest.approx(expect(lambda a: a**2 + (1 - a) ** 2), rel=1e-12)
    assert row.jacobian_square == pytest.approx(expect(lambda a: 4 * (a * (1 - a)) ** 2), rel=1e-12)
    assert row.sum_fourth == pytest.approx(expect(lambda a: a**4 + (1 - a) ** 4), rel=1e-12)
    entropy = expect(lambda a: -a * mpmath.log(a) - (1 - a) * mpmath.log(1 - a))
    assert row.entropy == pytest.approx(entropy, rel=1e-10)


@pytest.mark.parametrize(
    ("theta", "theta2", "rho"), [(1, 1, 0.4), (3, 3, -0.8), (2, 0.5, 0.9), (5, 5, 0.97)]
)
def test_two_rows_of_two_keys_against_quadrature(theta, theta2, rho):
    """Two correlated logistic normals: C2 = (1 + E tanh(u/2) tanh(u'/2)) / 2."""
    grid, weights = hermite_grid(200, 2)
    u = math.sqrt(2 * theta) * grid[:, 0]
    u2 = math.sqrt(2 * theta2) * (rho * grid[:, 0] + math.sqrt(1 - rho**2) * grid[:, 1])
    t, t2 = np.tanh(u / 2), np.tanh(u2 / 2)
    d, d2 = (1 - t**2) / 4, (1 - t2**2) / 4
    psi = rho * math.sqrt(theta * theta2)
    reference = (
        0.5 + 0.5 * weights @ (t * t2),
        4 * weights @ (d * d2),
        2 * weights @ (d * u * d2 * u2) / psi,
        0.5 * weights @ (d * u * t2 + t * d2 * u2),
    )
    result = pair_statistics(theta, 2, rho, theta2)
    assert result == pytest.approx(reference, rel=2e-6)


@pytest.mark.parametrize(
    ("theta", "n", "rho", "theta2", "k"),
    [
        (2, 3, 0.6, 1, 7),
        (4, 16, -0.3, 4, 16),
        (1, 5, 0.9, 3, 5),
        (4, 8, 1.0, 4, 40),
        (6, 20, -1, 2, 20),
    ],
)
def test_pair_against_monte_carlo(theta, n, rho, theta2, k):
    """Plain sampling: |z| < 4.5 in every statistic, and not with a useless standard error."""
    rng = np.random.default_rng(20 * n + k)
    draws = 1_500_000 // k
    g = rng.standard_normal((draws, k))
    g2 = rho * g + math.sqrt(1 - rho**2) * rng.standard_normal((draws, k))
    psi = rho * math.sqrt(theta * theta2)
    samples = pair_samples(math.sqrt(theta) * g[:, :n], math.sqrt(theta2) * g2, psi)
    for sample, value in zip(samples, pair_statistics(theta, n, rho, theta2, k), strict=False):
        error = sample.std() / math.sqrt(draws)
        assert error < 0.05 * abs(sample).mean()
        assert abs(sample.mean() - value) < 4.5 * error


@pytest.mark.parametrize(("theta", "n"), [(3.0, 7), (8.0, 50)])
def test_row_against_monte_carlo(theta, n):
    rng = np.random.default_rng(n)
    draws = 1_000_000 // n
    samples = row_samples(math.sqrt(theta) * rng.standard_normal((draws, n)), theta)
    for sample, value in zip(samples, row_statistics(theta, n), strict=False):
        error = sample.std() / math.sqrt(draws)
        assert error < 0.05 * abs(sample).mean()
        assert abs(sample.mean() - value) < 4.5 * error


# ------------------------------------------------------------------ identities and limits

ROWS = list(itertools.product((1e-3, 1.0, 6.0, 20.0), (1.001, 2.0, 30.0, 1e6)))


@pytest.mark.parametrize(("theta", "n"), ROWS)
def test_identical_rows_agree_with_one_row(theta, n):
    """rho = 1 by double integrals, one row by single ones, real n included."""
    row, pair = row_statistics(theta, n), pair_statistics(theta, n, 1.0)
    expected = (row.sum_square, row.jacobian_square, row.radial_square, row.sum_square_slope)
    assert pair == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 11), (100, 100), (1.5, 8.0)])
def test_uncorrelated_rows(n, k):
    """C2 = 1/k exactly, T = (1-P2)(1-P2')/(k-1), and UD continuous with rho -> 0."""
    theta, theta2 = 2.0, 3.0
    pair = pair_statistics(theta, n, 0.0, theta2, k)
    product = (1 - row_statistics(theta, n).sum_square) * (1 - row_statistics(theta2, k).sum_square)
    assert pair.overlap == pytest.approx(1 / k, rel=1e-9)
    assert pair.jacobian_overlap == pytest.approx(product / (k - 1), rel=1e-8)
    near = [pair_statistics(theta, n, rho, theta2, k).radial_overlap for rho in (1e-3, -1e-3)]
    assert pair.radial_overlap == pytest.approx(sum(near) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("theta", "n", "rho", "k"), [(2, 4, 0.5, 4), (5, 30, 0.8, 90), (1, 2, -0.6, 3)]
)
def test_derivatives_are_derivatives(theta, n, rho, k):
    """T = dC2/dpsi (Price), the slope and UD: against central differences of C2 alone."""
    h = 1e-2

    def overlap(log_sigma, log_sigma2, change):
        arguments = theta * math.exp(2 * log_sigma), n, rho + change
        return pair_statistics(*arguments, theta * math.exp(2 * log_sigma2), k).overlap

    pair = pair_statistics(theta, n, rho, theta, k)
    price = (overlap(0, 0, h) - overlap(0, 0, -h)) / (2 * h * theta)
    slope = (overlap(h, h, 0) - overlap(-h, -h, 0)) / (4 * h)
    mixed = overlap(h, h, 0) + overlap(-h, -h, 0) - overlap(h, -h, 0) - overlap(-h, h, 0)
    assert pair.jacobian_overlap == pytest.approx(price, rel=2e-3)
    assert pair.overlap_slope == pytest.approx(slope, rel=2e-3)
    assert pair.radial_overlap * rho * theta == pytest.approx(mixed / (4 * h * h), rel=2e-3)


@pytest.mark.parametrize("n", [2, 5, 1000, 3.5])
def test_constant_logits(n):
    """theta = 0: uniform weights and the Jacobian I/n - 1/n^2."""
    row, pair = row_statistics(0.0, n), pair_statistics(0.0, n, 0.3)
    jacobian = (n - 1) / n**2
    assert row == pytest.approx(
        (1 / n, n**-2, n**-3, jacobian, jacobian, 0, math.log(n)),
        rel=1e-9,
        abs=1e-12,
    )
    assert pair == pytest.approx((1 / n, jacobian, jacobian, 0), rel=1e-8, abs=1e-12)


def test_one_key():
    assert pair_statistics(2.0, 1, 0.7, 3.0, 5) == (0.2, 0.0, 0.0, 0.0)
    assert row_statistics(2.0, 1) == pytest.approx((1, 1, 1, 0, 0, 0, 0), abs=1e-9)
    assert pair_statistics(2.0, 1 + 1e-9, 0.7, 3.0, 5) == pytest.approx((0.2, 0, 0, 0), abs=1e-8)


@pytest.mark.parametrize(("theta", "psi"), [(1.0, 0.7), (5.0, 4.0), (3.0, -2.0)])
def test_many_keys_in_the_longer_row(theta, psi):
    """k -> infinity, n = 2: k C2 = 2 E sigmoid(u + psi), u ~ N(0, 2 theta); T its derivative."""
    theta2, k = 2.0 * theta, 1e12

    def expect(f):
        density = stats.norm(scale=math.sqrt(2 * theta)).pdf
        return integrate.quad(lambda u: f(1 / (1 + math.exp(-u - psi))) * density(u), -40, 40)[0]

    pair = pair_statistics(theta, 2, psi / math.sqrt(theta * theta2), theta2, k)
    assert k * pair.overlap == pytest.approx(2 * expect(lambda a: a), rel=1e-7)
    assert k * pair.jacobian_overlap == pytest.approx(2 * expect(lambda a: a * (1 - a)), rel=1e-7)


# ------------------------------------------------------------------ the tables


def random_points(count, theta_max, seed):
    """theta, n, rho off the nodes: half of the rows short, a third of the correlations near 1."""
    rng = np.random.default_rng(seed)
    theta = rng.uniform(1e-3, theta_max, count)
    n = np.exp(rng.uniform(0, np.where(rng.random(count) < 0.5, 3, 18)))
    rho = rng.uniform(np.where(rng.random(count) < 0.3, 0.8, -1), 1)
    return theta, n, rho, rng


def pair_errors(table, exact, psi):
    """Errors as the tables state them: radial_overlap's is relative to jacobian_overlap."""
    table, exact = np.array(table), np.array(exact)
    scale = np.stack([exact[0], exact[1], exact[1], np.abs(psi) * exact[1] + 1e-300])
    return np.abs(table - exact) / scale


@pytest.mark.parametrize(("theta_max", "bound"), [(2.0, 6e-5), (8.0, 1e-4)])
def test_square_rows_against_evaluator(theta_max, bound):
    theta, n, _, _ = random_points(60, theta_max, seed=3)
    table = SquareTable.load().single(theta, n)
    exact = np.array([row_statistics(*point) for point in zip(theta, n, strict=True)]).T
    assert np.all(np.abs(np.array(table) - exact) <= bound * np.abs(exact))


def test_rows_far_beyond_against_evaluator():
    """Up to theta = 32, where a second table takes over at 8."""
    theta, n, rho, rng = random_points(40, 32.0, seed=6)
    theta, rho = np.maximum(theta, rng.uniform(8.0, 9.0, 40)), np.maximum(rho, -0.3)
    for point in zip(theta, n, rho, strict=True):
        rows = AlikeRows.of(point[1])
        row, exact = np.array(rows.rows(point[0])), row_statistics(*point[:2])
        assert np.all(np.abs(row / exact - 1) <= 2e-5)
        pair = rows.pairs(point[0], None, point[2])
        assert pair_errors(pair, pair_statistics(*point), point[0] * point[2]).max() < 1e-4


@pytest.mark.parametrize(("theta_max", "rho_min", "bound"), [(6.0, -0.3, 1e-4), (8.0, -1.0, 1e-3)])
def test_square_pairs_against_evaluator(theta_max, rho_min, bound):
    theta, n, rho, _ = random_points(90, theta_max, seed=4)
    rho = np.maximum(rho, rho_min)
    for point in zip(theta, n, rho, strict=True):
        table = AlikeRows.of(point[1]).pairs(point[0], None, point[2])
        assert pair_errors(table, pair_statistics(*point), point[0] * point[2]).max() < bound


def test_shapes_and_paths_agree():
    """Scalars, broadcasting, one theta with many n, many theta with one n: the same numbers."""
    table = SquareTable.load()
    theta, n = np.linspace(0.0, 7.0, 70)[:, None], np.array([1.0, 2.0, 17.5, 1e5])
    full = table.single(theta, n)
    assert full.entropy.shape == (70, 4)
    for j, length in enumerate(n):
        rows = AlikeRows.of(length)
        assert rows.rows(theta[:, 0]).entropy == pytest.approx(
            full.entropy[:, j], rel=1e-9, abs=1e-9
        )
        assert rows.rows(3.0).sum_square.shape == ()
    assert table.single(theta[9, 0], n).sum_cube == pytest.approx(full.sum_cube[9], rel=1e-9)
    pair = AlikeRows.of(17.5).pairs(theta, None, np.array([-0.2, 1.0]))
    assert pair.overlap.shape == (70, 2)
    # at rho = 1 the pair is the row
    assert pair.overlap[:, 1] == pytest.approx(full.sum_square[:, 2], rel=1e-5)


@given(
    theta=st.floats(0, 8),
    log_n=st.floats(0, 18.4),
    rho=st.floats(-1, 1),
)
@settings(max_examples=150, deadline=None)
def test_bounds(theta, log_n, rho):
    """1/n <= P2 <= 1, 0 <= H <= log n, Cauchy-Schwarz between rows."""
    n = round(math.exp(log_n))
    rows = AlikeRows.of(n)
    row, pair = rows.rows(theta), rows.pairs(theta, None, rho)
    near = 1e-4
    assert 1 / n * (1 - 1e-9) <= row.sum_square <= 1
    assert row.sum_square**2 * (1 - near) <= row.sum_cube <= row.sum_square
    assert row.sum_cube**2 * (1 - near) <= row.sum_square * row.sum_fourth
    assert -1e-12 <= row.entropy <= math.log(n) + 1e-12
    assert 0 <= pair.overlap <= row.sum_square * (1 + near)
    assert 0 <= pair.jacobian_overlap <= row.jacobian_square * (1 + near)


@pytest.mark.parametrize("n", [1.3, 2.0, 64.0, 1e6])
def test_monotone_in_theta(n):
    """More variance, fewer effective keys, on a grid that crosses the edge of the table."""
    theta = np.concatenate([np.linspace(0, 8, 300), np.linspace(8.01, 10, 5)])
    row = AlikeRows.of(n).rows(theta)
    assert np.all(np.diff(row.sum_square) > 0)
    assert np.all(np.diff(row.entropy) < 0)
    assert np.all(row.sum_square_slope[1:] > 0)


def test_beyond_the_tables():
    """A table to theta = 32 and the largest number of keys; never a NaN."""
    rows = AlikeRows.of(64)
    row = rows.rows([4.0, 12.0, 32.0, 33.0, 1e6])
    assert row.sum_square[1] == pytest.approx(row_statistics(12.0, 64).sum_square, rel=1e-5)
    beyond = exact_rows.rows(np.array([33.0, exact_rows.THETA_PEAKED]), np.full(2, 64.0))
    np.testing.assert_allclose(row.sum_square[3:], beyond.sum_square, rtol=1e-12)
    pair = rows.pairs([12.0, 20.0, 1e5, 12.0], None, [0.4, -0.9, 0.4, -0.5])
    assert pair.overlap[0] == pytest.approx(pair_statistics(12.0, 64, 0.4).overlap, rel=1e-4)
    long = AlikeRows.of(1e9)
    assert long.rows(1.0).sum_square == pytest.approx(1e-9 * math.e, rel=1e-6)
    for result in (row, pair):
        assert all(np.all(np.isfinite(field)) for field in result)


@pytest.mark.parametrize("n", [8, 64, 512])
@pytest.mark.parametrize(
    ("theta", "rho"), [(9.0, -0.5), (16.0, -0.35), (16.0, -0.7), (31.0, -0.35)]
)
def test_peaked_rows_of_negative_correlation(n, theta, rho):
    """No table holds them: what they overlap is next to nothing, and what stands for it as well."""
    exact, found = pair_statistics(theta, n, rho), AlikeRows.of(n).pairs(theta, None, rho)
    assert found.overlap == pytest.approx(exact.overlap, abs=3e-3)
    assert found.jacobian_overlap == pytest.approx(exact.jacobian_overlap, abs=4e-4)


def test_table_edges_are_continuous():
    """At theta = 8 one table hands over to the other."""
    rows = AlikeRows.of(500)
    for edge in rows.rows([8.0, 8.0 + 1e-7]), rows.pairs([8.0, 8.0 + 1e-7], None, 0.6):
        for field in edge:
            assert field[0] == pytest.approx(field[1], rel=1e-4)


def test_shipped_tables_are_what_the_script_builds():
    """At the script's own nodes the shipped interpolants return the encoded evaluator's values."""
    square, far = SquareTable.load(), SquareTable.load_far()
    for table, rows, pairs in (
        (square, build_softmax_tables.ROW_NODES, build_softmax_tables.SQUARE_NODES),
        (far, build_softmax_tables.FAR_ROW_NODES, build_softmax_tables.FAR_NODES),
    ):
        assert table.row.shape[:2] == rows
        assert (*table.pair.shape[:2], table.pair.shape[3]) == pairs

    def at_nodes(coefficients, axes, indices):
        for axis, i in reversed(list(zip(axes, indices, strict=True))):
            count = coefficients.shape[axis]
            basis = np.cos(np.arange(count) * np.arccos(gauss_nodes(count)[i]))
            coefficients = np.tensordot(coefficients, basis, (axis, 0))
        return coefficients

    for a, b, c in [(0, 0, 0), (3, 11, 5), (15, 23, 13), (8, 17, 9)]:
        t, n = theta_at(gauss_nodes(28)[a]), length_at(gauss_nodes(44)[b])
        np.testing.assert_allclose(
            at_nodes(square.row, (0, 1), (a, b)), encode_row(t, n), rtol=1e-7
        )
        t, n, rho = theta_at(gauss_nodes(20)[a]), length_at(gauss_nodes(32)[b]), gauss_nodes(18)[c]
        expected = encode_square_pair(t, n, float(rho))
        found = at_nodes(square.pair, (0, 1, 3), (a, b, c))
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    a, b, c = 9, 17, 20
    t, n = far_theta_at(gauss_nodes(16)[a]), length_at(gauss_nodes(36)[b])
    np.testing.assert_allclose(at_nodes(far.row, (0, 1), (a, b)), encode_row(t, n), rtol=1e-7)
    t, n = far_theta_at(gauss_nodes(14)[a]), length_at(gauss_nodes(24)[b])
    expected = encode_square_pair(t, n, far_rho_at(gauss_nodes(24)[c]))
    found = at_nodes(far.pair, (0, 1, 3), (a, b, c))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_chebyshev_interpolation():
    """A polynomial within the degree is returned exactly, by cosines and by the recurrence."""
    x, y = gauss_nodes(5)[:, None], gauss_nodes(4)[None]
    coefficients = chebyshev_coefficients(1 + x**4 * y - x * y**3, (0, 1))
    for count in (7, 200):
        u, v = np.random.default_rng(1).uniform(-1, 1, (2, count))
        bases = chebyshev_basis(u, 5), chebyshev_basis(v, 4)
        values = np.einsum("ab,ap,bp->p", coefficients, *bases)
        np.testing.assert_allclose(values, 1 + u**4 * v - u * v**3, atol=1e-13)


@pytest.mark.parametrize(("theta", "keys"), [(2.0, 3), (12.0, 24)])
def test_curvature_of_keys_of_fixed_norm(theta, keys):
    """The evaluator against draws of second differences of (J^2)_ll in its own logit."""
    logits = np.random.default_rng(3).normal(0.0, math.sqrt(theta), (200_000, keys))
    step = np.zeros(keys)
    step[0] = 0.01

    def own(logits):
        weights = softmax(logits)
        first, square = weights[:, 0], (weights**2).sum(1)
        return first**2 * (1 - 2 * first + square)

    moved = (own(logits + step) + own(logits - step) - 2 * own(logits)) / 1e-4 * keys
    exact = fixed_norm_statistics(theta, keys)
    jacobian = row_statistics(theta, keys).jacobian_square
    error = moved.std() / math.sqrt(len(moved))
    assert abs(exact.curvature * jacobian - moved.mean()) < 4 * error
    assert 4 * error < 0.15 * jacobian


def test_corrections_for_fixed_norms_are_the_exact_ones():
    rng = np.random.default_rng(4)
    theta, keys = 30 * rng.uniform(0.01, 1, 60) ** 2, np.exp(rng.uniform(0.1, 15, 60))
    found = key_corrections(theta, keys, 1e3)
    exact = [fixed_norm_statistics(*one) for one in zip(theta, keys, strict=True)]
    np.testing.assert_allclose(found.share, [one.share for one in exact], atol=2e-4)
    curvature = theta * [one.curvature for one in exact]
    np.testing.assert_allclose(found.curvature, curvature, atol=5e-3)
    beyond, most = (key_corrections(np.array([t]), np.array([9.0]), 1e3) for t in (80.0, 30.0))
    assert beyond.curvature == most.curvature


def test_shipped_tables_are_small():
    folder = resources.files("moments").joinpath("data")
    for name, most in (
        ("softmax_square", 300_000),
        ("softmax_far", 200_000),
        ("softmax_norms", 20_000),
    ):
        assert len(folder.joinpath(f"{name}.npz").read_bytes()) < most


# ------------------------------------------------------------------ the chi-square average


@pytest.mark.parametrize("nu", [3.0, 9.5, 30.0, 400.0])
@pytest.mark.parametrize("points", [1, 2, 3, 6])
def test_rule_has_the_moments_of_a_gamma_variable(nu, points):
    rule = chi_square_rule(nu, points)
    law = stats.gamma(nu / 2, scale=2 / nu)
    for power in range(2 * points):
        assert rule.weights @ rule.nodes**power == pytest.approx(law.moment(power) if power else 1)


def test_two_point_rule_in_closed_form():
    """xi = 1 + (1 +- sqrt(a+1))/a with weights (1 -+ 1/sqrt(a+1))/2, a = nu/2."""
    a = 25.0
    root = math.sqrt(a + 1)
    rule = chi_square_rule(2 * a)
    assert rule.nodes == pytest.approx([1 + (1 - root) / a, 1 + (1 + root) / a])
    assert rule.weights == pytest.approx([(1 + 1 / root) / 2, (1 - 1 / root) / 2])


@pytest.mark.parametrize(("nu", "bound"), [(25.0, 3e-3), (8.0, 5e-3), (4.0, 5e-3)])
def test_default_rule_averages_row_statistics(nu, bound):
    """P2, T2 and theta T2 averaged over the fluctuation, against a 30-point rule."""
    rule, many = chi_square_rule(nu), chi_square_rule(nu, 30)
    for theta, n in [(0.5, 2), (1.0, 16), (1.5, 128)]:
        rows = AlikeRows.of(n)

        def average(rule, rows=rows, theta=theta):
            row = rows.rows(theta * rule.nodes)
            values = [row.sum_square, row.jacobian_square, rule.nodes * row.jacobian_square]
            return np.array(values) @ rule.weights

        np.testing.assert_allclose(average(rule), average(many), rtol=bound)


def test_norms_that_do_not_fluctuate():
    assert chi_square_rule(math.inf).nodes.tolist() == [1.0]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "call",
    [
        lambda: row_statistics(-1.0, 4),
        lambda: row_statistics(math.nan, 4),
        lambda: row_statistics(THETA_EXACT + 1, 4),
        lambda: row_statistics(1.0, 0.5),
        lambda: row_statistics(1.0, math.inf),
        lambda: pair_statistics(1.0, 4, 1.1),
        lambda: pair_statistics(1.0, 4, 0.5, 1.0, 3),
        lambda: pair_statistics(30.0, 4, -0.9),
        lambda: AlikeRows.of(8).rows([1.0, -1e-9]),
        lambda: AlikeRows.of(8).rows([1.0, math.nan]),
        lambda: AlikeRows.of(8).pairs(1.0, None, [0.2, math.nan]),
        lambda: AlikeRows.of(8).pairs(math.inf, None, 0.2),
        lambda: SquareTable.load().single(1.0, [2.0, 0.5]),
        lambda: chi_square_rule(0.0),
        lambda: chi_square_rule(10.0, 0),
    ],
)
def test_domain_errors(call):
    with pytest.raises(DomainError, match=r" = .*must be"):
        call()
