"""Checksums of weights, computed on the device with one read per direction and no copy.

The 64-bit words of a tensor fill rows of 1,024 words. The sums of all rows and of all columns, modulo 2^64, are the
same on every device. Changing a single word always changes them, and a row shows where.
"""

from collections.abc import Sequence

import torch

#: 64-bit words of a row
COLUMNS = 1024
ROW_BYTES = 8 * COLUMNS

_ALIGNMENT = 8  # bytes
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number


def sums_of(content: torch.Tensor) -> torch.Tensor:
    """Row sums, then column sums, of (n,) uint8, n a multiple of 8.

    Returns:
        (ceil(n / ROW_BYTES) + COLUMNS,) int64 on the device of `content`.
    """
    words = content.view(torch.int64)
    whole = words.numel() // COLUMNS * COLUMNS
    if whole == words.numel():
        body = words.view(-1, COLUMNS)
        return torch.cat([body.sum(1), body.sum(0)])
    body, rest = words[:whole].view(-1, COLUMNS), words[whole:]
    columns = body.sum(0)
    columns[: rest.numel()] += rest
    return torch.cat([body.sum(1), rest.sum(0, keepdim=True), columns])


def combine(sums: Sequence[torch.Tensor]) -> int:
    """Combine results of `sums_of` to one signed 64-bit number; the order matters. Synchronizes with the device."""
    if not sums:
        return 0
    every = torch.cat(list(sums))
    factors = torch.arange(len(every), device=every.device).mul_(2).add_(1).mul_(_ODD)
    return int((every * factors).sum())


def checksum_of(content: torch.Tensor) -> int:
    """A 64-bit checksum of (n,) uint8, n a multiple of 8. Equal on every device."""
    return combine([sums_of(content)])


def fold(checksums: Sequence[int]) -> int:
    """Combine checksums to one; the order matters."""
    total = 0
    for checksum in checksums:
        total = total * 31 * _ODD + checksum + 1
    return wrap(total)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements' bits as signed integers, on the tensor's device. Zeros add nothing."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


def wrap(number: int) -> int:
    """Wrap an integer to signed 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def hexadecimal(checksum: int) -> str:
    """A checksum in an error message."""
    return f"{checksum & (2**64 - 1):016x}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, zero-padded to a multiple of 8: (n,) uint8. Shares its memory where possible."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -content.numel() % _ALIGNMENT
    if rest:
        return torch.nn.functional.pad(content, (0, rest))
    return content if content.storage_offset() % _ALIGNMENT == 0 else content.clone()
