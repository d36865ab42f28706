"""Triton kernels of FP8 linear layers: quantization to E4M3, and the GEMM of quantized operands. See `fp8`.

M rows (tokens), N output features, K input features.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)
#: groups of a row that a program quantizes
_GROUPS = 8
#: rows up to which `matmul_few_rows` is faster than cuBLAS, and up to which it is with SPLITS shares of the sums
FEW_ROWS, FEW_SPLIT_ROWS, SPLITS = 64, 128, 4
#: columns of a tile
_COLUMNS = 64


@triton.jit
def power_of_two_scale(amax):
    """The scale of `fp8.power_of_two_scale`, and 1 / scale."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    scale = tl.where(bits >= 0x7F800000, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_groups(x, codes, scales, row, padded, first, K: tl.constexpr, GROUPS: tl.constexpr):
    """Quantize x (GROUPS * 128,) float32, columns from 128 * `first` of a row.

    codes (rows, K); scales (K / 128, padded).
    """
    x = tl.reshape(x, (GROUPS, _BLOCK))
    scale, inverse = power_of_two_scale(tl.max(tl.abs(x), 1))
    group = first + tl.arange(0, GROUPS)
    mask = group < K // _BLOCK
    columns = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    tl.store(codes + row.to(tl.int64) * K + columns, (x * inverse[:, None]).to(tl.float8e4nv), mask=mask[:, None])
    tl.store(scales + group * padded + row, scale, mask=mask)


@triton.jit(do_not_specialize=["padded"])
def _quantize_rows(x, codes, scales, padded, K: tl.constexpr, GROUPS: tl.constexpr):
    """x (rows, K) -> codes (rows, K), scales (K / 128, padded). Grid (rows, K / 128 / GROUPS rounded up)."""
    row, first = tl.program_id(0), tl.program_id(1) * GROUPS
    column = first * _BLOCK + tl.arange(0, GROUPS * _BLOCK)
    v = tl.load(x + row.to(tl.int64) * K + column, mask=column < K, other=0.0).to(tl.float32)
    store_groups(v, codes, scales, row, padded, first, K, GROUPS)


@triton.jit
def _quantize_weight(weight, codes, scales, to_row, to_column, K, width, DTYPE: tl.constexpr):
    """weight (N, K), rounded to DTYPE first -> codes (N, K), scales (N / 128, width). Grid (N / 128, K / 128).

    to_row, to_column: the strides of weight.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    n, k = i * _BLOCK + tl.arange(0, _BLOCK), j * _BLOCK + tl.arange(0, _BLOCK)
    source = weight + n.to(tl.int64)[:, None] * to_row + k.to(tl.int64)[None, :] * to_column
    v = tl.load(source).to(DTYPE).to(tl.float32)
    scale, inverse = power_of_two_scale(tl.max(tl.max(tl.abs(v), 1), 0))
    tl.store(codes + n.to(tl.int64)[:, None] * K + k[None, :], (v * inverse).to(tl.float8e4nv))
    tl.store(scales + i * width + j, scale)


@triton.jit(do_not_specialize=["rows", "padded"])
def _few_rows(a, b, a_scales, b_scales, bias, out, rows, padded, width, N, K, BM: tl.constexpr, BN: tl.constexpr,
              SPLITS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """out (SPLITS, rows, N) = shares of the sums of a b^T + bias, of codes a (rows, K), b (N, K).

    a, b: tensor descriptors of blocks (BM, 128) and (BN, 128). a_scales (K / 128, padded); b_scales (N / 128, width).
    The sums of 128 terms by the tensor cores are added in float32. Grid (row tiles, N / BN, SPLITS).
    """
    i, j, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    inside = m < rows
    first, last = split * (K // _BLOCK) // SPLITS, (split + 1) * (K // _BLOCK) // SPLITS
    a_scales += first * padded + tl.where(inside, m, 0)
    b_scales += j * BN // _BLOCK * width + first
    scale = tl.load(a_scales) * tl.load(b_scales)
    total = tl.zeros([BM, BN], tl.float32)
    for group in range(first, last):
        # the next scales are loaded before the dot, which would wait for them
        step = group + 1 < last
        a_scales += tl.where(step, padded, 0)
        b_scales += tl.where(step, 1, 0)
        next_scale = tl.load(a_scales) * tl.load(b_scales)
        codes = b.load([j * BN, group * _BLOCK])
        total += tl.dot(a.load([i * BM, group * _BLOCK]), codes.T) * scale[:, None]
        scale = next_scale
    if BIAS:
        total = total.to(bias.dtype.element_ty).to(tl.float32) + tl.load(bias + n).to(tl.float32)[None, :]
    at = out + (split * rows + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None])


# ---- launches -------------------------------------------------------------------------------------------------------


def empty_rows(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes (M, K) and scales (K / 128, M) of `rows` rows, with M padded to a multiple of 4."""
    padded = rows + -rows % 4
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(width // BLOCK, padded, dtype=torch.float32, device=device)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x (M, K)."""
    rows, width = x.shape
    codes, scales = empty_rows(rows, width, x.device)
    if rows:
        grid = (rows, triton.cdiv(width // BLOCK, _GROUPS))
        _quantize_rows[grid](x, codes, scales, scales.shape[1], K=width, GROUPS=_GROUPS, num_warps=4)
    return codes, scales


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (N, K) and scales (N / 128, K / 128, the columns padded to a multiple of 4) of a weight."""
    height, width = (size // BLOCK for size in weight.shape)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = torch.zeros(height, width + -width % 4, dtype=torch.float32, device=weight.device)
    rounding = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    _quantize_weight[(height, width)](
        weight, codes, scales, *weight.stride(), weight.shape[1], scales.shape[1], DTYPE=rounding, num_warps=8
    )
    return codes, scales


def matmul_few_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: int,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """`fp8.matmul` with up to FEW_ROWS rows, (M, N) bf16; with `splits`, shares of its sums (splits, M, N) float32."""
    (outputs, width), tile_rows = weight.shape, 64 if rows <= FEW_ROWS else 128
    shape, dtype = ((rows, outputs), torch.bfloat16) if splits == 1 else ((splits, rows, outputs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    if not rows:
        return out
    _few_rows[(triton.cdiv(rows, tile_rows), outputs // _COLUMNS, splits)](
        TensorDescriptor.from_tensor(codes, [tile_rows, BLOCK]),
        TensorDescriptor.from_tensor(weight, [_COLUMNS, BLOCK]),
        *(scales, weight_scales, out if bias is None else bias, out),
        *(rows, scales.shape[1], weight_scales.shape[1], outputs, width),
        **{"BM": tile_rows, "BN": _COLUMNS, "SPLITS": splits, "BIAS": bias is not None, "num_warps": 4},
        num_stages=4,
    )
    return out
