"""The Triton kernel of `ChunkTable`: chunks are read, cast, written and summed in one pass.

A program computes one tile of a chunk. Sums are integers modulo 2^64, so their order does not matter.
"""

import torch
import triton
import triton.language as tl

_TARGETS = {torch.float32: (tl.float32, tl.int32, 32), torch.bfloat16: (tl.bfloat16, tl.int16, 16)}
_TARGETS[torch.float16] = (tl.float16, tl.int16, 16)
_WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16}


@triton.jit
def _read(address, at, inside, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _kernel(tiles, chunks, sources, targets, sums, TARGET: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
            WRITE: tl.constexpr, SUM: tl.constexpr, ALIGNED: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    number = tl.program_id(0)
    chunk = chunks + tl.load(tiles + number) * 15
    tile, across = number - tl.load(chunk + 13).to(tl.int32), tl.load(chunk + 14).to(tl.int32)
    first_row, first_column = (tile // across) * ROWS, (tile % across) * COLUMNS
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    columns, source_start, source_stride = tl.load(chunk + 1), tl.load(chunk + 3), tl.load(chunk + 4)
    if ALIGNED:
        columns, source_start = tl.multiple_of(columns, 4), tl.multiple_of(source_start, 4)
        source_stride = tl.multiple_of(source_stride, 4)
    inside = ((first_row + r) < tl.load(chunk))[:, None] & ((first_column + c) < columns)[None, :]
    at = source_start + first_row * source_stride + first_column
    at += r[:, None] * source_stride + c[None, :]
    source = sources + tl.load(chunk + 2) * 2
    address, code = tl.load(source), tl.load(source + 1)
    if WRITE:
        if code == 0:
            x = _read(address, at, inside, tl.float32, ALIGNED).to(TARGET)
        elif code == 1:
            x = _read(address, at, inside, tl.bfloat16, ALIGNED).to(TARGET)
        else:
            x = _read(address, at, inside, tl.float16, ALIGNED).to(TARGET)
        target_start, target_stride = tl.load(chunk + 6), tl.load(chunk + 7)
        pointer = tl.load(targets + tl.load(chunk + 5) * 2).to(tl.pointer_type(TARGET))
        if ALIGNED:
            target_start, target_stride = tl.multiple_of(target_start, 4), tl.multiple_of(target_stride, 4)
            pointer = tl.multiple_of(pointer, 16)
        to = target_start + first_row * target_stride + first_column
        to += r[:, None] * target_stride + c[None, :]
        tl.store(pointer + to, x, mask=inside)
        bits = x.to(BITS, bitcast=True)
    else:
        bits = _read(address, at, inside, BITS, ALIGNED)
    if SUM:
        # The word of several elements is their sum, each shifted to its position: the last one has the sign. Sums of a
        # column over the rows of a tile fit in 32 bits if elements have 16.
        per_word = tl.load(chunk + 11).to(tl.int32)
        element, word = c % per_word, (first_column + c) // per_word
        if WIDTH == 16:
            low = tl.where(element < per_word - 1, tl.full((COLUMNS,), 0xFFFF, tl.int32), -1)
            values = bits.to(tl.int32) & low[None, :]
        elif WIDTH == 32:
            low = tl.where(element < per_word - 1, tl.full((COLUMNS,), 0xFFFFFFFF, tl.int64), -1)
            values = bits.to(tl.int64) & low[None, :]
        else:
            values = bits.to(tl.int64)
        of_column = tl.sum(values, 0).to(tl.int64)
        by_row = tl.sum(values * r[:, None], 0).to(tl.int64)
        a, b, of_word = tl.load(chunk + 8), tl.load(chunk + 9), tl.load(chunk + 10)
        total = (a + b * first_row + of_word * word) * of_column + b * by_row
        total = total << (element * WIDTH % 64).to(tl.int64)
        tl.atomic_add(sums + tl.load(chunk + 12), tl.sum(total, 0), sem="relaxed")


def run(
    tiles: torch.Tensor,
    chunks: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor | None,
    dtype: torch.dtype,
    sums: torch.Tensor | None,
    aligned: bool,
    tile: tuple[int, int],
) -> None:
    """As `ChunkTable.run`, for one of its tables. sources, targets: `Pointers.table`."""
    target, bits, width = _TARGETS[dtype] if targets is not None else (None, _WORDS[dtype], 64)
    with torch.cuda.device_of(tiles):  # Triton launches on the current device
        _kernel[(len(tiles),)](
            tiles, chunks, sources, targets, sums, TARGET=target, BITS=bits, WIDTH=width,
            WRITE=targets is not None, SUM=sums is not None, ALIGNED=aligned, ROWS=tile[0], COLUMNS=tile[1],
            num_warps=4,
        )  # fmt: skip
