"""Are the weights right? Checksums of every push to other devices, and a comparison of what the engine stores in some.

Checksums are computed on the device with one read per direction and no copy. The 64-bit words of a tensor fill rows of
1,024 words. The sums of all rows and of all columns, modulo 2^64, are the same on every device. Changing a single word
always changes them, and a row shows where.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from verl.weight_sync.base import StoredWeights, WeightReceiver

#: 64-bit words of a row
COLUMNS = 1024
ROW_BYTES = 8 * COLUMNS

_ALIGNMENT = 8  # bytes
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIXING = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sums_of(content: torch.Tensor) -> torch.Tensor:
    """Row sums, then column sums, of (n,) uint8, n a multiple of 8.

    Returns:
        (ceil(n / ROW_BYTES) + COLUMNS,) int64 on the device of `content`.
    """
    integers = content.view(torch.int64)
    whole = integers.numel() // COLUMNS * COLUMNS
    if whole == integers.numel():
        body = integers.view(-1, COLUMNS)
        return torch.cat([body.sum(1), body.sum(0)])
    body, rest = integers[:whole].view(-1, COLUMNS), integers[whole:]
    columns = body.sum(0)
    columns[: rest.numel()] += rest
    return torch.cat([body.sum(1), rest.sum(0, keepdim=True), columns])


def first_differing_row(sent: torch.Tensor, received: torch.Tensor) -> int | None:
    """The first row whose sum differs, -1 if only a column differs, and None if the sums are equal."""
    differing = (sent != received).nonzero()
    if not len(differing):
        return None
    first = int(differing[0])
    return first if first < len(received) - COLUMNS else -1


def checksums(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 64-bit checksum of each result of `sums_of`: (n,) int64.

    A word is in the sum of its row and in that of its column. With a factor for each, both changes could cancel out.
    So the sums are mixed by the function of SplitMix64 (Steele et al. 2014).
    """
    device, joined = sums[0].device, torch.cat(list(sums))
    lengths = torch.tensor([len(each) for each in sums]).to(device, non_blocking=True)
    numbers = torch.arange(len(sums), device=device).repeat_interleave(lengths, output_size=len(joined))
    starts = lengths.cumsum(0) - lengths
    mixed = joined + (torch.arange(1, len(joined) + 1, device=device) - starts[numbers]) * _ODD
    for bits, factor in _MIXING:
        mixed = (mixed ^ ((mixed >> bits) & ((1 << (64 - bits)) - 1))) * factor
    return torch.zeros(len(sums), dtype=torch.int64, device=device).index_add_(0, numbers, mixed)


def combine(sums: Sequence[torch.Tensor]) -> int:
    """Combine results of `sums_of` to one signed 64-bit number; the order matters. Synchronizes with the device."""
    return fold(checksums(sums).tolist()) if sums else 0


def fold(numbers: Sequence[int]) -> int:
    """Combine checksums to one; the order matters."""
    total = 0
    for number in numbers:
        total = total * _ODD + number + 1
    return (total + 2**63) % 2**64 - 2**63  # signed 64 bits


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements' bits as signed integers, on the tensor's device. Zeros add nothing."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype and number of elements have the same bits, whatever their shapes."""
    return torch.equal(*(each.detach().contiguous().view(-1).view(_BITS[each.element_size()]) for each in (a, b)))


def format_checksum(checksum: int) -> str:
    """A checksum in an error message."""
    return f"{checksum & (2**64 - 1):016x}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, zero-padded to a multiple of 8: (n,) uint8. Shares its memory where possible."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -content.numel() % _ALIGNMENT
    if rest:
        return torch.nn.functional.pad(content, (0, rest))
    return content if content.storage_offset() % _ALIGNMENT == 0 else content.clone()


# ---- what a receiver stores -----------------------------------------------------------------------------------------


class Loading:
    """Loads a push into a receiver.

    Args:
        receiver: the rollout engine's side.
        version: weight version.
        compares: whether what it stores is compared with what it has read, if it is a `StoredWeights`.

    Attributes:
        bytes: read so far.
    """

    def __init__(self, receiver: WeightReceiver, version: int, compares: bool):
        self.receiver = receiver
        self.version = version
        self.bytes = 0
        self._compares = compares
        self._is_complete = False
        self._read_sums: list[torch.Tensor] = []
        self._expected: dict[str, tuple[int, torch.Tensor]] = {}  # name -> elements and sums of what must be stored

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Load weights, and compare what is stored with them. Returns their checksum; 0 without a comparison.

        Raises:
            ValueError: the receiver cannot load them, did not read all, or stores other values, which are released.
        """
        self.receiver.receive(self._read(weights), self.version)
        if not self._is_complete:
            raise ValueError(f"{type(self.receiver).__name__}.receive returned before it had read all weights")
        self._check_stored()
        return combine(self._read_sums)

    def _read(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.numel() * tensor.element_size()
            if self._compares:
                self._add(name, tensor)
            yield name, tensor
        self._is_complete = True

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._read_sums.append(sums_of(bytes_of(tensor)))
        if (stored := self._stored(name)) is None:
            return
        expected = self.receiver.slice_of(name, tensor)
        is_same = expected is tensor and (expected.dtype, expected.device) == (stored.dtype, stored.device)
        sums = self._read_sums[-1] if is_same else sums_of(bytes_of(expected.detach().to(stored)))
        self._expected[name] = expected.numel(), sums

    def _stored(self, name: str) -> torch.Tensor | None:
        return self.receiver.stored(name) if isinstance(self.receiver, StoredWeights) else None

    def _check_stored(self) -> None:
        """Raise ValueError, with the name, for a parameter that is not stored as it was read."""
        wrong, names, differs = [], [], []
        for name, (size, expected) in self._expected.items():
            stored = self._stored(name)
            if stored is None or stored.numel() != size:
                wrong.append(name)
            else:
                names.append(name)
                differs.append((sums_of(bytes_of(stored)) != expected).any())
        if names:  # one synchronization with the device
            wrong += [name for name, differ in zip(names, torch.stack(differs).tolist()) if differ]
        if wrong:
            self.receiver.release()  # so that nothing is generated with them
            raise ValueError(
                f"weights of version {self.version} were not loaded: after {type(self.receiver).__name__}.receive, "
                f"{len(wrong)} of {len(self._expected)} parameters differ from what was sent, first {wrong[:3]}"
            )
