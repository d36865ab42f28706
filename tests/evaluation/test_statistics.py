"""Statistics of evaluations, against enumeration and by hand."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from verl.evaluation.statistics import (
    bootstrap_intervals,
    bootstrap_means,
    compare_paired,
    mean_intervals,
    pass_at_k,
    sign_flip_test,
    wilson_interval,
)

# ---- pass@k ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([1] * c + [0] * (n - c), k))
        share = sum(map(any, choices)) / len(choices)
        assert pass_at_k(np.array([c]), np.array([n]), k)[0] == pytest.approx(share, abs=1e-14), (n, c, k)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(8, 1, 8), (200, 3, 100), (10_000, 1, 1), (10_000, 7, 999), (100_000, 50, 20_000), (100, 60, 50)]
)
def test_pass_at_k_of_large_numbers_is_exact(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(np.array([c]), np.array([n]), k)[0] == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_of_many_prompts():
    c, n = np.array([0, 1, 4, 1, 2]), np.array([4, 4, 4, 2, 8])
    # 1 - C(3,2)/C(4,2) = 1/2; all right; 1 - C(1,2)/C(2,2) = 1; 1 - C(6,2)/C(8,2) = 1 - 15/28
    assert pass_at_k(c, n, 2) == pytest.approx([0, 1 / 2, 1, 1, 13 / 28])
    assert pass_at_k(c, n, 1) == pytest.approx(c / n)
    with pytest.raises(ValueError, match="from 1 to 2"):
        pass_at_k(c, n, 3)
    with pytest.raises(ValueError, match="between 0 and n correct responses"):
        pass_at_k(np.array([3]), np.array([2]), 1)


# ---- bootstrap ------------------------------------------------------------------------------------------------------


def test_bootstrap_draws_every_data_set_as_often_as_it_should():
    """All 4**4 data sets of four prompts, counted; each mean within four standard deviations."""
    values, samples = [0.0, 0.5, 2.0, 3.0], 20_000
    exact: dict[float, float] = {}
    for drawn in itertools.product(values, repeat=4):
        exact[sum(drawn) / 4] = exact.get(sum(drawn) / 4, 0) + 1 / 256
    means = bootstrap_means(np.array(values)[:, None], samples, seed=3)[:, 0]
    found = {mean: np.isclose(means, mean).mean() for mean in exact}
    assert sum(found.values()) == pytest.approx(1)
    for mean, chance in exact.items():
        assert abs(found[mean] - chance) < 4 * math.sqrt(chance * (1 - chance) / samples), mean


def test_intervals_of_a_large_sample_are_the_normal_ones():
    right = np.repeat([0.0, 1.0], [160, 240])[:, None]
    (low, high), *_ = bootstrap_intervals(right, confidence=0.9, seed=1)
    half = 1.645 * math.sqrt(0.6 * 0.4 / 400)
    assert (0.6 - low, high - 0.6) == pytest.approx((half, half), rel=0.06)


def test_intervals_depend_on_the_seed_and_not_on_the_order():
    random = np.random.default_rng(0)
    values = np.stack([random.random(50), random.integers(0, 2, 50)], 1)
    intervals = bootstrap_intervals(values, seed=5)
    assert (bootstrap_intervals(values[random.permutation(50)], seed=5) == intervals).all()
    assert (bootstrap_intervals(values, seed=6) != intervals).any()
    assert (bootstrap_intervals(np.ones((9, 1))) == 1).all()


def test_a_proportion_of_0_or_1_has_an_interval():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson_interval(right / count, count) == pytest.approx((low, high), abs=5e-5)
    values = np.stack([np.zeros(16), np.ones(16), np.full(16, 0.5), np.arange(16) % 2], 1)
    none, all_right, half, some = mean_intervals(values)
    assert none == pytest.approx((0.0, 0.1936), abs=5e-5) and all_right == pytest.approx((0.8064, 1.0), abs=5e-5)
    assert half == (0.5, 0.5)  # not a proportion: every prompt has one of two responses right
    assert some == pytest.approx((0.2800, 0.7200), abs=5e-5)


def test_columns_are_drawn_together():
    values = np.random.default_rng(0).random((30, 1)) * [1, -2]
    means = bootstrap_means(values, 100, seed=0)
    assert means[:, 1] == pytest.approx(-2 * means[:, 0])


# ---- two models -----------------------------------------------------------------------------------------------------


def test_paired_comparison_is_that_of_all_data_sets_and_all_signs():
    first, second = np.array([1.0, 1.0, 0.5, 1.0]), np.array([0.0, 0.5, 1.0, 1.0])
    found = compare_paired(first, second, samples=20_000, seed=2)
    differences = [1.0, 0.5, -0.5, 0.0]
    signed = [sum(s * d for s, d in zip(signs, differences)) / 4 for signs in itertools.product((1, -1), repeat=4)]
    assert found.p_value == pytest.approx(sum(abs(mean) >= 0.25 for mean in signed) / 16, abs=0.015)
    assert (found.difference, found.wins, found.losses, found.ties) == (0.25, 2, 1, 1)
    means = [sum(drawn) / 4 for drawn in itertools.product(differences, repeat=4)]
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.1)


def test_a_few_prompts_prove_nothing():
    """Equal differences have no spread in the bootstrap, so p must not be derived from it."""
    for prompts, p in ((1, 1.0), (2, 0.5), (4, 0.125)):
        found = compare_paired(np.ones(prompts), np.full(prompts, 0.75))
        assert found.p_value == pytest.approx(p, abs=0.02)


def test_p_values_of_equal_models_are_uniform():
    random = np.random.default_rng(0)
    p = [sign_flip_test(random.normal(size=12), samples=400) for _ in range(300)]
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.09 and 0.42 < np.mean(np.array(p) <= 0.5) < 0.58


def test_paired_comparison_sees_what_unpaired_intervals_hide():
    """Prompts differ a lot, the models little and always in one direction."""
    hard = np.linspace(0, 1, 60)
    found = compare_paired(np.clip(hard + 0.05, 0, 1), hard, seed=0)
    assert found.low > 0.03 and found.p_value < 1e-3
    assert np.ptp(bootstrap_intervals(hard[:, None])[0]) > 0.1
    same = compare_paired(hard, hard)
    assert (same.difference, same.p_value, same.ties) == (0, 1, 60)
