"""Rows shared out by length: checked against exhaustive search on small cases, and by invariants on large ones."""

import itertools
import random

import numpy as np
import pytest

from verl.utils.balance import balanced_partition, token_budget_micro_batches


def heaviest(lengths, groups):
    return max(sum(lengths[i] for i in g) for g in groups)


def best_heaviest(lengths, k, equal_size):
    """The smallest possible heaviest group, by trying every assignment of rows to groups."""
    best = sum(lengths)
    for assignment in itertools.product(range(k), repeat=len(lengths)):
        sizes = [assignment.count(g) for g in range(k)]
        if min(sizes) == 0 or (equal_size and len(set(sizes)) > 1):
            continue
        sums = [sum(x for x, a in zip(lengths, assignment) if a == g) for g in range(k)]
        best = min(best, max(sums))
    return best


def fewest_bins(lengths, budget):
    """The smallest number of bins that hold `lengths`, by branch and bound over placements."""
    best = len(lengths)

    def place(i, free):
        nonlocal best
        if len(free) >= best and i < len(lengths):
            return
        if i == len(lengths):
            best = min(best, len(free))
            return
        for b in range(len(free)):
            if free[b] >= lengths[i]:
                place(i + 1, [*free[:b], free[b] - lengths[i], *free[b + 1 :]])
        place(i + 1, [*free, budget - lengths[i]])

    place(0, [])
    return best


def test_worked_example():
    # 8+6 against 7+5+4: spreads 8 7 6 5 4 -> (8,7)=1, (6,5)=1, 4 -> (4,1)=3 -> (3,1)=2: sums 16 and 14.
    groups = balanced_partition([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in g) for g in groups) == [14, 16]


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("k", [2, 3])
def test_close_to_the_optimum(k, equal_size):
    rng = random.Random(k)
    worst = 1.0
    for _ in range(40):
        n = 6 if equal_size else rng.randint(k, 7)
        lengths = [rng.randint(0, 30) for _ in range(n)]
        groups = balanced_partition(lengths, k, equal_size)
        assert sorted(i for g in groups for i in g) == list(range(n))
        assert len(groups) == k and all(groups)
        if equal_size:
            assert {len(g) for g in groups} == {n // k}
        optimum = best_heaviest(lengths, k, equal_size)
        worst = max(worst, heaviest(lengths, groups) / max(optimum, 1))
    # Two groups: 7/6 is the bound proved for the method. Three: 4/3.
    assert worst <= (7 / 6 if k == 2 else 4 / 3) + 1e-9


@pytest.mark.parametrize("equal_size", [True, False])
def test_long_tailed_lengths_balance_within_one_percent(equal_size):
    lengths = np.random.default_rng(0).lognormal(5, 1, size=512).astype(int).clip(1, 4096).tolist()
    groups = balanced_partition(lengths, 8, equal_size)
    assert heaviest(lengths, groups) / (sum(lengths) / 8) < 1.01
    in_order = [list(range(r * 64, (r + 1) * 64)) for r in range(8)]
    assert heaviest(lengths, in_order) / (sum(lengths) / 8) > 1.1  # what it is for


def test_ties_and_zeros_leave_no_group_empty():
    assert all(balanced_partition([0] * 5, 4, equal_size=False))
    assert balanced_partition([3] * 6, 3) == balanced_partition([3] * 6, 3)


def test_impossible_partitions_are_refused():
    with pytest.raises(ValueError, match="partition 2 rows into 3"):
        balanced_partition([1, 2], 3)
    with pytest.raises(ValueError, match="5 rows into 2 groups of equal size: remainder 1"):
        balanced_partition([1] * 5, 2)
    with pytest.raises(ValueError, match="found -4 for row 1"):
        balanced_partition([1, -4], 2)


def test_micro_batches_hold_every_row_once_within_the_budget():
    rng = random.Random(0)
    for _ in range(60):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 9))]
        budget = rng.randint(20, 40)
        batches = token_budget_micro_batches(lengths, budget)
        assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
        assert heaviest(lengths, batches) <= budget
        assert len(batches) <= fewest_bins(lengths, budget) * 11 / 9 + 6 / 9


def test_micro_batches_keep_rows_in_order():
    assert token_budget_micro_batches([4, 6, 5, 5], 10) == [[0, 1], [2, 3]]
    assert token_budget_micro_batches([], 10) == []


def test_a_row_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match="row 2 has 11 tokens, the budget of a micro-batch is 10"):
        token_budget_micro_batches([3, 10, 11], 10)
