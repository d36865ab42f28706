"""Sums of a parameter that do not depend on how it is cut into chunks."""

import pytest
import torch

from verl.rollout.weight_sync.position_sums import PositionSums, Summed

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_other_bit_of_a_word_is_another_sum(dtype):
    """Also the highest bit of a word of 8 bytes, which is in the sum of its row and in that of its column."""
    rows, columns, size = 3, 5, dtype.itemsize
    sums = PositionSums(1, CPU)
    sums.add(Summed(0, 0, rows, columns, size, 1), [(0, rows, 0)])
    sums.add(Summed(0, 0, rows, columns, size, 0), [(0, columns, 0)])
    words = (torch.arange(rows * columns) * 0x123456789ABCDEF).to(dtype)
    expected = int(sums.of([words]))
    for at in range(rows * columns):
        for bit in range(8 * size):
            other = words.clone()
            other[at] ^= (1 << bit) - (2 << bit if bit == 8 * size - 1 else 0)
            assert int(sums.of([other])) != expected


@pytest.mark.parametrize("rows", [1, 3])
def test_exchanged_words_are_another_sum(rows):
    """In a row, in a column, and in neither."""
    columns = 5
    sums = PositionSums(1, CPU)
    sums.add(Summed(0, 0, rows, columns, 4, 1), [(0, rows, 0)])
    sums.add(Summed(0, 0, rows, columns, 4, 0), [(0, columns, 0)])
    words = (torch.arange(1, rows * columns + 1) * 0x1234567).to(torch.int32)
    for a in range(len(words)):
        for b in range(a):
            other = words.clone()
            other[[a, b]] = words[[b, a]]
            assert int(sums.of([words])) != int(sums.of([other]))
