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
#: kind of device -> rows of a group of small tensors, and bytes of a tensor that is a group, so that it is not copied
_GROUPS = {"cpu": (2**7, 2**16), "cuda": (2**12, 2**24)}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIXING = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


class TensorSums:
    """Sums of many tensors. Small ones are copied to one buffer first: a model has hundreds of tensors, and a few
    operations for each would take longer than reading them.

    Tensors that are added in the same order, with the same shapes, dtypes and kind of device, have equal sums if they
    have equal bits.

    Attributes:
        sums: a result of `sums_of` per group of tensors, after `finish`.
    """

    def __init__(self, until_finish: bool = False) -> None:
        """until_finish: added tensors keep their values until `finish`, which copies them all at once."""
        self.sums: list[torch.Tensor] = []
        self._until_finish = until_finish
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # targets and sources
        self._groups: list[list[tuple[str, int, int]]] = []  # of each: name, rows, bytes
        self._current: list[tuple[str, int, int]] = []  # of the group in the buffer
        self._buffer: torch.Tensor | None = None
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0  # rows

    def add(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Add a tensor, cast to the dtype and on the device of another one. Unless it keeps its values until `finish`,
        its memory may be used again afterwards."""
        dtype, device = like.dtype, like.device
        group, large = _GROUPS.get(device.type, _GROUPS["cuda"])
        tensor, elements = tensor.detach(), tensor.numel()
        count = elements * dtype.itemsize
        rows = -(-count // ROW_BYTES)
        if count >= large:
            self.finish()
            self.sums.append(sums_of(bytes_of(tensor.to(like))))
            self._groups.append([(name, rows, count)])
            return
        if self._used + rows > group or (self._buffer is not None and self._buffer.device != device):
            self.finish()
        if self._buffer is None or self._buffer.device != device:
            self._buffer, self._views = torch.zeros(group * ROW_BYTES, dtype=torch.uint8, device=device), {}
        if dtype not in self._views:
            self._views[dtype] = self._buffer.view(dtype)
        start = self._used * ROW_BYTES // dtype.itemsize
        target, source = self._views[dtype][start : start + elements], tensor.reshape(-1)
        if self._until_finish:
            self._copies[0].append(target)
            self._copies[1].append(source)
        else:
            target.copy_(source)
        self._used += rows
        self._current.append((name, rows, count))

    def finish(self) -> None:
        """Compute the sums of the tensors in the buffer."""
        if self._current:
            if self._until_finish:
                torch._foreach_copy_(*self._copies)
                self._copies = [], []
            content = self._buffer[: self._used * ROW_BYTES]
            self.sums.append(sums_of(content))
            content.zero_()  # padding
            self._groups.append(self._current)
            self._current, self._used = [], 0

    def differing(self, other: "TensorSums") -> list[str]:
        """The names of the tensors that differ from those of another one, to which the same names were added in this
        order. Both are finished. Synchronizes with the device."""
        sizes, others = ({name: count for group in each._groups for name, _, count in group} for each in (self, other))
        if wrong := [name for name in sizes if sizes[name] != others.get(name)]:
            return wrong
        if not self.sums:
            return []
        found = torch.cat(self.sums)
        if torch.equal(found, torch.cat([sums.to(found.device) for sums in other.sums])):
            return []
        for group, own, sent in zip(self._groups, self.sums, other.sums, strict=True):
            same = (own == sent.to(own.device)).tolist()
            at, broken = 0, []
            for name, rows, _ in group:
                broken += [] if all(same[at : at + rows]) else [name]
                at += rows
            # words that changed places within a row: only the sums of columns differ, which are those of the group
            wrong += broken if all(same) or broken else [name for name, _, _ in group]
        return wrong


def combine(sums: Sequence[torch.Tensor]) -> int:
    """Combine results of `sums_of` to one signed 64-bit number; the order matters. Synchronizes with the device.

    A word is in the sum of its row and in that of its column. With a factor for each, both changes could cancel out.
    So the sums are mixed by the function of SplitMix64 (Steele et al. 2014).
    """
    if not sums:
        return 0
    mixed = torch.cat(list(sums))
    mixed = mixed + torch.arange(1, len(mixed) + 1, device=mixed.device) * _ODD
    for bits, factor in _MIXING:
        mixed = (mixed ^ ((mixed >> bits) & ((1 << (64 - bits)) - 1))) * factor
    return int(mixed.sum())


def checksum_of(content: torch.Tensor) -> int:
    """A 64-bit checksum of (n,) uint8, n a multiple of 8. Equal on every device."""
    return combine([sums_of(content)])


def fold(checksums: Sequence[int]) -> int:
    """Combine checksums to one; the order matters."""
    total = 0
    for checksum in checksums:
        total = total * _ODD + checksum + 1
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
