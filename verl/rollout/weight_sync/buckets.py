"""Buckets of weights and their checksums: what every method that copies weights sends."""

from dataclasses import dataclass

import torch

#: max bytes of a bucket; a larger parameter has a bucket by itself
BUCKET_BYTES = 128 * 2**20

_WORDS_AT_ONCE = 1 << 22  # of a checksum
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_ALIGNMENT = 8  # bytes


@dataclass(frozen=True)
class Entry:
    """One parameter of a bucket. start: its byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    checksum: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def padded(size: int) -> int:
    """The next multiple of _ALIGNMENT."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, zero-padded to a multiple of _ALIGNMENT: (n,) uint8."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = padded(len(content)) - len(content)
    return torch.nn.functional.pad(content, (0, rest)) if rest else content


def checksum_of(content: torch.Tensor) -> int:
    """A 64-bit checksum of (n,) uint8, n a multiple of 8: the sum of its 64-bit words, each multiplied by an odd number
    that depends on its position. Equal on every device; changing a single word always changes it."""
    words, total = content.view(torch.int64), 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        chunk = words[start : start + _WORDS_AT_ONCE]
        factors = torch.arange(start, start + len(chunk), device=chunk.device).mul_(2).add_(1).mul_(_ODD)
        total += int((chunk * factors).sum())
    return _signed(total)


def fold(total: int, checksum: int) -> int:
    """Combine two checksums; the order matters."""
    return _signed(total * 31 * _ODD + checksum + 1)


def _signed(number: int) -> int:
    """Wrap an integer to signed 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
