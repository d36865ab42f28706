"""Sums of a parameter that do not depend on how it is cut into chunks."""

import pytest
import torch

from verl.weight_sync.checksums import wrap
from verl.weight_sync.position_sums import COLUMN_STEP, WORDS, PositionSums, Summed, position_weights

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


def sums_of(words: torch.Tensor) -> int:
    """Of a matrix of words."""
    (rows, columns), size = words.shape, words.dtype.itemsize
    sums = PositionSums(1, CPU)
    sums.add(Summed(0, 0, rows, columns, size, 1), [(0, rows, 0)])
    sums.add(Summed(0, 0, rows, columns, size, 0), [(0, columns, 0)])
    return int(sums.of([words.flatten()]))


@pytest.mark.parametrize("size", WORDS)
def test_words_that_differ_in_one_bit_are_exchanged(size):
    """Found, whatever the bit, in words of up to 4 bytes; in those of 8 the low 32 bits. The top one is missed."""
    zeros = torch.zeros(4, 8, dtype=WORDS[size])
    for bit in range(8 * size):
        word, different = 1 << bit if bit < 8 * size - 1 else -(1 << bit), set()
        for at in range(zeros.numel()):
            other = zeros.clone()
            other.view(-1)[at] = word
            different.add(sums_of(other))
        if bit < 32:
            assert len(different) == zeros.numel()
        assert bit < 63 or len(different) == 1  # as the documentation says


def test_factors_of_two_words_never_differ_by_a_multiple_of_2_to_the_33():
    """So that 31 bits of a difference are not lost, in parameters of up to 1.05e9 words."""
    (first, down, across), two = position_weights(0, 0, True), position_weights(1, 1, True)
    assert two[0] == wrap(first + down + across) and first % 2 == 1 and down % 4 == across % 4 == 2
    step = across // 2 * pow(down // 2, -1, 2**32) % 2**32
    assert step == COLUMN_STEP
    near = torch.arange(1, 2**15 + 1)  # one of two numbers whose product is at most 2^30 is at most 2^15
    for by in (step, pow(step, -1, 2**32)):
        far = near * by % 2**32
        assert (near * torch.minimum(far, 2**32 - far)).min() > 1.05e9
