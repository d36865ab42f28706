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
