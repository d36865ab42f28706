"""Batch-invariant Triton kernels: GEMM, RMS norm and attention, with every sum in one order and never split.

The number of tokens determines the number of programs and nothing else: not the tiles, not the order of the sums, and
(`do_not_specialize`) not the machine code. Sums are float32; float32 GEMMs stay float32.
"""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from verl.modeling.batch_invariant.chunked import Scores

#: keys of a block, and of a block of the KV cache
BLOCK = 64
#: rows of a tile of queries: positions times the query heads of one key head
QUERIES = 32
#: tile sizes of a GEMM (rows, outputs, addends) and launch options, by the bytes of an element
TILES = {
    2: {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4},
    4: {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3},
}
ATTENTION = {"num_warps": 4, "num_stages": 2}
#: elements of a tile of a norm
_NORMED = 2048
#: tiles of rows that are computed together, so that they share weights in the cache
_SIDE_BY_SIDE = 8


@triton.jit(do_not_specialize=["N"])
def _linear_kernel(x, weight, bias, out, N, IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    across: tl.constexpr = (OUT + BN - 1) // BN
    pid, down = tl.program_id(0), tl.cdiv(N, BM)
    group = pid // (SIDE * across)
    height = tl.minimum(down - group * SIDE, SIDE)
    row = (group * SIDE + pid % (SIDE * across) % height) * BM + tl.arange(0, BM)
    column = pid % (SIDE * across) // height * BN + tl.arange(0, BN)
    # rows and columns beyond the end read the first ones and are not stored
    from_row, from_column = tl.where(row < N, row, 0).to(tl.int64), tl.where(column < OUT, column, 0).to(tl.int64)
    k = tl.arange(0, BK)
    at_x, at_weight = x + from_row[:, None] * IN + k[None, :], weight + from_column[None, :] * IN + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, IN, BK):
        if IN % BK == 0:
            a, b = tl.load(at_x + start), tl.load(at_weight + start)
        else:
            a = tl.load(at_x + start, mask=start + k[None, :] < IN, other=0.0)
            b = tl.load(at_weight + start, mask=start + k[:, None] < IN, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + from_column).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < N)[:, None] & (column < OUT)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (N, in), weight (out, in), bias (out,), of one dtype -> (N, out)."""
    rows, (width, inside) = len(x), weight.shape
    out = x.new_empty(rows, width)
    if rows:
        tiles = TILES[x.element_size()]
        grid = (triton.cdiv(rows, tiles["BM"]) * triton.cdiv(width, tiles["BN"]),)
        _linear_kernel[grid](
            x.contiguous(), weight.contiguous(), weight if bias is None else bias, out, rows, inside, width,
            bias is not None, SIDE=_SIDE_BY_SIDE, PRECISION="ieee", **tiles,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["N"])
def _norm_kernel(x, weight, out, N, eps, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    mask = (row < N)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    tl.store(out + at, (v * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """weight (D,) * x (..., D) / sqrt(mean(x^2) + eps), in `dtype`."""
    x, size = x.contiguous(), x.shape[-1]
    rows, columns = x.numel() // size, triton.next_power_of_2(size)
    tile = max(1, _NORMED // columns)
    out = torch.empty_like(x, dtype=dtype)
    if rows:
        _norm_kernel[(triton.cdiv(rows, tile),)](x, weight, out, rows, eps, size, columns, tile, num_warps=4)
    return out


@triton.jit(do_not_specialize=["width"])
def _attend_kernel(
    q, k, v, out, table, rows, starts, positions, counts, width, k_block, k_head, k_token, v_block, v_head, v_token,
    scale, softcap, HQ: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TQ: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one sequence, for the heads of one key head, over its blocks of keys. Grid (tiles, HK).

    Per tile: row, the row of table (., width) with its block indices; start, its first query in q (N, HQ, D); the
    position of that query; count, its number of queries.
    """
    t, h = tl.program_id(0), tl.program_id(1)
    row, start = tl.load(rows + t).to(tl.int64), tl.load(starts + t).to(tl.int64)
    first, count = tl.load(positions + t), tl.load(counts + t)
    r, d, column = tl.arange(0, TQ * GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    i, g = r // GP, r % GP
    real = ((i < count) & (g < G))[:, None] & (d < D)[None, :]
    at = ((start + i) * HQ + h * G + g)[:, None] * D + d[None, :]
    x = tl.load(q + at, mask=real, other=0.0)
    position, last = first + i, first + count - 1
    highest = tl.full([TQ * GP], -1e30, tl.float32)
    weight, total = tl.zeros([TQ * GP], tl.float32), tl.zeros([TQ * GP, DP], tl.float32)
    begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK if WINDOW > 0 else 0
    for j in range(begin, (last + BLOCK) // BLOCK):
        block = tl.load(table + row * width + j).to(tl.int64)
        key_at = j * BLOCK + column
        mask = (key_at <= last)[:, None] & (d < D)[None, :]
        keys = tl.load(k + block * k_block + h * k_head + column[:, None] * k_token + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)  # softcap * tanh(scores / softcap)
        seen = key_at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key_at[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        # a block whose keys are all masked leaves the sums unchanged, bit for bit
        shares = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        values = tl.load(
            v + block * v_block + h * v_head + column[:, None] * v_token + d[None, :], mask=mask, other=0.0
        )
        total = total * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(shares, 1)
        highest = higher
    tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=real)


def _launch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, strides: tuple[int, ...], tiles: torch.Tensor,
    table: torch.Tensor, scores: Scores,
) -> torch.Tensor:  # fmt: skip
    """Launch `_attend_kernel`.

    Args:
        query: (N, HQ, D).
        keys, values: in blocks.
        strides: strides of keys from block to block, head to head and token to token; then those of values.
        tiles: (4, count) rows, starts, positions, counts.
        table: (., width) block indices of each row.
        scores: how scores are computed.
    """
    heads, size = query.shape[1:]
    group = heads // keys.shape[1]
    padded = triton.next_power_of_2(group)
    query, out = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend_kernel[(tiles.shape[1], keys.shape[1])](
        query, keys, values, out, table, *tiles.unbind(0), table.shape[1], *strides,
        scores.scale, scores.softcap or 1.0, HQ=heads, G=group, GP=padded, TQ=max(1, QUERIES // padded), D=size,
        DP=max(16, triton.next_power_of_2(size)), BLOCK=BLOCK, WINDOW=scores.window or 0,
        SOFTCAP=scores.softcap is not None, PRECISION="ieee", **ATTENTION,
    )  # fmt: skip
    return out


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scores: Scores
) -> torch.Tensor:
    """As `attention.attend_rows`."""
    padded = triton.next_power_of_2(query.shape[1] // key.shape[1])
    tiles, table = _packed(lengths, max(1, QUERIES // padded), query.device)
    key, value = key.contiguous(), value.contiguous()
    token, head, _ = key.stride()
    # a block may begin at any token: block indices are token indices
    return _launch(query, key, value, (token, head, token) * 2, tiles, table, scores)


@lru_cache(maxsize=4)
def _packed(lengths: tuple[int, ...], tile: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles (4, count) of packed sequences, and the table (b, blocks) of the first token of each block."""
    sizes = np.array(lengths)
    begins = np.cumsum(sizes) - sizes
    counts = -(-sizes // tile)
    row = np.repeat(np.arange(len(sizes)), counts)
    position = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    tiles = np.stack([row, begins[row] + position, position, np.minimum(tile, sizes[row] - position)])
    table = begins[:, None] + np.arange(-(-sizes.max() // BLOCK)) * BLOCK
    return tuple(torch.tensor(x, dtype=torch.int32).to(device) for x in (tiles, table))


def single_queries(positions: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The tiles (4, b) of one query per sequence, at positions (b,); live (b,) is 1 or 0. All int32."""
    at = torch.arange(len(positions), device=positions.device, dtype=torch.int32)
    return torch.stack((at, at, positions, live))


def attend_cached(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    table: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """One query per sequence over a blocked KV cache; the output of sequences that are not live is undefined.

    Args:
        query: (b, HQ, D).
        keys, values: (blocks, HK, BLOCK, D).
        tiles: result of `single_queries`.
        table: (b, .) int32, block indices of each sequence.
        scores: how scores are computed.

    Returns:
        (b, HQ, D).
    """
    assert keys.shape[2] == BLOCK, f"expected blocks of {BLOCK} tokens, found {keys.shape[2]}"
    return _launch(query, keys, values, (*keys.stride()[:3], *values.stride()[:3]), tiles, table, scores)
