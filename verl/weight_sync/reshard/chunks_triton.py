"""The Triton kernel of `ChunkTable`: chunks are read, cast and written in one pass. A program copies one tile."""

import torch
import triton
import triton.language as tl

_TARGETS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _read(address, at, inside, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _kernel(tiles, chunks, sources, targets, TARGET: tl.constexpr, ALIGNED: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    number = tl.program_id(0)
    chunk = chunks + tl.load(tiles + number) * 10
    tile, across = number - tl.load(chunk + 8).to(tl.int32), tl.load(chunk + 9).to(tl.int32)
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


def run(
    tiles: torch.Tensor,
    chunks: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
    aligned: bool,
    tile: tuple[int, int],
) -> None:
    """As `ChunkTable.copy`, for one of its tables. sources, targets: `TensorList.table`."""
    with torch.cuda.device_of(tiles):  # Triton launches on the current device
        _kernel[(len(tiles),)](
            tiles, chunks, sources, targets, TARGET=_TARGETS[dtype], ALIGNED=aligned, ROWS=tile[0], COLUMNS=tile[1],
            num_warps=4,
        )  # fmt: skip
