"""Sharing rows out by length: equal work for every rank, and micro-batches within a token budget."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def balanced_partition(lengths: Sequence[int], k: int, equal_size: bool = True) -> list[list[int]]:
    """Split row indices into `k` groups whose summed lengths are as equal as the differencing method gets them.

    Largest differencing (Karmarkar and Karp 1982, "The differencing method of set partitioning"), k-way: keep partial
    solutions, each with k groups; join the two with the largest spread, heaviest group to lightest; repeat.
    With `equal_size` a partial solution starts as k rows of neighbouring lengths, one per group, so that every group
    ends with the same number of rows. The longest rows then share one partial solution, and what the others cannot even
    out (long-tailed lengths leave the heaviest group 5-10 % over the mean) is mended by exchanging pairs of rows.

    Returns k lists of indices into `lengths`, ascending inside a list. The result depends on the arguments alone.
    Raises ValueError when there are fewer rows than groups, or rows left over under `equal_size`.
    """
    n = len(lengths)
    if k < 1 or n < k:
        raise ValueError(f"cannot share {n} rows among {k} groups: every group needs at least one row")
    if equal_size and n % k:
        raise ValueError(f"cannot share {n} rows equally among {k} groups: {n % k} left over; pad or drop rows first")
    negative = [i for i in range(n) if lengths[i] < 0]
    if negative:
        raise ValueError(f"lengths cannot be negative, found {lengths[negative[0]]} for row {negative[0]}")
    order = sorted(range(n), key=lambda i: (-lengths[i], i))
    width = k if equal_size else 1
    # A partial solution: k groups (sum of lengths, rows), heaviest first.
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
        # Ties by number of rows: an empty group comes last, so it is the next one to receive a row.
        joined.sort(key=lambda group: (-group[0], -len(group[1])))
        heapq.heappush(heap, (_spread(joined), first, joined))
    groups = [rows for _, rows in heap[0][2]]
    if equal_size:
        _exchange_rows(lengths, groups)
    return [sorted(rows) for rows in groups]


def _exchange_rows(lengths: Sequence[int], groups: list[list[int]]) -> None:
    """Exchange a row of the heaviest group for one of the lightest, in place, as long as that brings the two closer."""
    sums = [sum(lengths[i] for i in rows) for rows in groups]
    while True:
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[heavy] - sums[light]
        choices = sorted((lengths[i], i) for i in groups[light])
        best = (gap, -1, -1)  # (gap that would be left, row of the heavy group, row of the light one)
        for row in groups[heavy]:
            # Moving `gap / 2` tokens over would be perfect: look at the two rows that come nearest to it.
            nearest = bisect_left(choices, (lengths[row] - gap / 2, -1))
            for length, other in choices[max(nearest - 1, 0) : nearest + 1]:
                best = min(best, (abs(gap - 2 * (lengths[row] - length)), row, other))
        left, row, other = best
        if left >= gap:
            return
        groups[heavy][groups[heavy].index(row)], groups[light][groups[light].index(other)] = other, row
        moved = lengths[row] - lengths[other]
        sums[heavy] -= moved
        sums[light] += moved


def _spread(groups: list[tuple[int, list[int]]]) -> int:
    """Lightest minus heaviest: the most uneven solution is the smallest, so that a heap gives it first."""
    return groups[-1][0] - groups[0][0]


def token_budget_micro_batches(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Pack rows into micro-batches of at most `max_tokens` tokens each, as few as first-fit decreasing finds.

    First-fit decreasing: longest row first, into the first micro-batch with room; at most 11/9 of the optimum plus 6/9
    (Dosa 2007, "The tight bound of first fit decreasing bin-packing algorithm"). `at_least` asks for that many
    micro-batches, for ranks that must run equally many because they meet in collectives: the heaviest are split.

    Returns lists of row indices; every row is in exactly one. Ascending inside a list, lists by their first row.
    Raises ValueError that names the row when one alone is longer than the budget, or when there are
    fewer rows than `at_least`.
    """
    if len(lengths) < at_least:
        raise ValueError(f"cannot make {at_least} micro-batches of {len(lengths)} rows: every one needs a row")
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > max_tokens:
            raise ValueError(
                f"row {i} has {lengths[i]} tokens, the budget of a micro-batch is {max_tokens}: "
                "raise the token budget or shorten max_prompt_length + max_response_length"
            )
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(i)
        room[place] -= lengths[i]
    while len(bins) < at_least:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: (sum(lengths[i] for i in b), -b[0]))
        bins.remove(heaviest)
        halves = balanced_partition([lengths[i] for i in heaviest], 2, equal_size=False)
        bins += [[heaviest[j] for j in half] for half in halves]
    return sorted(sorted(rows) for rows in bins)
