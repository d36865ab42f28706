"""Partitions samples by length: balanced load for every rank, and micro-batches within a token budget."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


def balanced_partition(lengths: Sequence[int], k: int, equal_size: bool = True) -> list[list[int]]:
    """Partition samples into `k` groups of nearly equal total length.

    Largest differencing method (Karmarkar and Karp 1982, "The differencing method of set partitioning"), k-way: keep
    partial solutions of k groups each; merge the two with the largest spread, heaviest group with lightest; repeat.
    With `equal_size`, a partial solution starts as k samples of similar length, one per group, so that all groups end
    with the same number of samples. The longest samples are then in one partial solution, which long-tailed lengths
    leave 5-10 % unbalanced; exchanging pairs of samples fixes that.

    Args:
        lengths: length of each sample.
        k: number of groups.
        equal_size: all groups have the same number of samples.

    Returns:
        k lists of indices into `lengths`, each ascending. Depends only on the arguments.

    Raises:
        ValueError: if there are fewer samples than groups, or `equal_size` and k does not divide their number.
    """
    n = len(lengths)
    if k < 1 or n < k:
        raise ValueError(f"cannot partition {n} rows into {k} groups: every group needs at least one row")
    if equal_size and n % k:
        raise ValueError(
            f"cannot partition {n} rows into {k} groups of equal size: remainder {n % k}; pad or drop rows first"
        )
    negative = [i for i in range(n) if lengths[i] < 0]
    if negative:
        raise ValueError(f"lengths: expected non-negative numbers, found {lengths[negative[0]]} for row {negative[0]}")
    order = sorted(range(n), key=lambda i: (-lengths[i], i))
    width = k if equal_size else 1
    # a partial solution: k groups (sum of lengths, rows), heaviest first
    heap = []
    for start in range(0, n, width):
        groups = [(lengths[i], [i]) for i in order[start : start + width]]
        groups += [(0, [])] * (k - len(groups))
        heap.append((_spread(groups), start, groups))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        joined = [(a + b, rows + more) for (a, rows), (b, more) in zip(heavy, reversed(light))]
        # ties by number of rows: an empty group comes last, so it receives the next row
        joined.sort(key=lambda group: (-group[0], -len(group[1])))
        heapq.heappush(heap, (_spread(joined), first, joined))
    groups = [rows for _, rows in heap[0][2]]
    if equal_size:
        _exchange_rows(lengths, groups)
    return [sorted(rows) for rows in groups]


def _exchange_rows(lengths: Sequence[int], groups: list[list[int]]) -> None:
    """Exchange rows of the heaviest and the lightest group, in place, while that reduces their difference."""
    sums = [sum(lengths[i] for i in rows) for rows in groups]
    while True:
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        difference = sums[heavy] - sums[light]
        choices = sorted((lengths[i], i) for i in groups[light])
        best = (difference, -1, -1)  # (remaining difference, row of the heavy group, row of the light one)
        for row in groups[heavy]:
            # moving `difference / 2` tokens would be ideal: try the two rows closest to it
            nearest = bisect_left(choices, (lengths[row] - difference / 2, -1))
            for length, other in choices[max(nearest - 1, 0) : nearest + 1]:
                best = min(best, (abs(difference - 2 * (lengths[row] - length)), row, other))
        left, row, other = best
        if left >= difference:
            return
        groups[heavy][groups[heavy].index(row)], groups[light][groups[light].index(other)] = other, row
        moved = lengths[row] - lengths[other]
        sums[heavy] -= moved
        sums[light] += moved


def _spread(groups: list[tuple[int, list[int]]]) -> int:
    """Lightest minus heaviest sum: the least balanced solution is the smallest, so that a heap returns it first."""
    return groups[-1][0] - groups[0][0]


def token_budget_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack samples into micro-batches of at most `max_tokens` tokens, by first-fit decreasing.

    The longest sample first, into the first micro-batch with enough free tokens. That needs at most 11/9 of the optimum
    plus 6/9 micro-batches (Dosa 2007, "The tight bound of first fit decreasing bin-packing algorithm").

    Args:
        lengths: tokens of each sample.
        max_tokens: token budget of a micro-batch.

    Returns:
        Lists of indices; each sample is in exactly one. Each list is ascending, and lists are sorted by first index.

    Raises:
        ValueError: if a sample exceeds the budget.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > max_tokens:
            raise ValueError(
                f"row {i} has {lengths[i]} tokens, the budget of a micro-batch is {max_tokens}: "
                "raise the token budget or shorten max_prompt_length + max_response_length"
            )
        index = next((b for b, tokens in enumerate(free) if tokens >= lengths[i]), None)
        if index is None:
            index = len(bins)
            bins.append([])
            free.append(max_tokens)
        bins[index].append(i)
        free[index] -= lengths[i]
    return sorted(sorted(rows) for rows in bins)


# ---- names of public verl -------------------------------------------------------------------------------------------


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`balanced_partition` with public verl's arguments."""
    return balanced_partition(seqlen_list, k_partitions, equal_size)


karmarkar_karp = get_seqlen_balanced_partitions


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str) -> dict:
    """Metrics of the tokens per group: of consecutive groups of equal size (before), and of `partitions` (balanced)."""
    size = -(-len(seqlen_list) // len(partitions))
    before = [sum(seqlen_list[i : i + size]) for i in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[i] for i in group) for group in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(after) / len(after),
    }


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    inverse = [0] * len(idx_map)
    for i, index in enumerate(idx_map):
        inverse[index] = i
    return inverse


def calculate_workload(seqlen_list: Any) -> Any:
    """The cost of each sequence relative to others: of the linear layers of a 7B model, and of its attention."""
    return 24576 * seqlen_list + seqlen_list**2


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The least multiple of `b` that is at least `a`."""
    return ceildiv(a, b) * b
