"""Triton kernels of what stands between the matrix products of a decoder layer: RMS norm, SwiGLU, rotary embedding.

Each reads its inputs once and writes its outputs once, forward and backward; arithmetic is float32, what is stored has
the dtype asked for. `layers` puts them into a model. N: rows; D: columns.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # elements that a program holds at a time
PROGRAMS = 1024  # at most, where each adds up a part of a weight's gradient


@triton.jit
def _norm_kernel(x, weight, y, scale, N, eps, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BD)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    at = rows[:, None] * D + columns[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    tl.store(scale + rows, r, mask=rows < N)
    tl.store(y + at, (v * r[:, None] * w[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_gradient_kernel(gy, x, weight, scale, gx, gw, N, tiles, programs, D: tl.constexpr, BD: tl.constexpr,
                          ROWS: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BD)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BD,), tl.float32)
    for tile in range(tl.program_id(0), tiles, programs):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < N)[:, None] & inside[None, :]
        at = rows[:, None] * D + columns[None, :]
        r = tl.load(scale + rows, mask=rows < N, other=0.0)[:, None]
        g = tl.load(gy + at, mask=mask, other=0.0).to(tl.float32)
        unit = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * r
        total += tl.sum(g * unit, 0)
        g *= w[None, :]
        along = tl.sum(g * unit, 1)[:, None] / D
        tl.store(gx + at, (r * (g - unit * along)).to(gx.dtype.element_ty), mask=mask)
    tl.store(gw + tl.program_id(0) * D + columns, total, mask=inside)


@triton.jit
def _swiglu_kernel(gate, up, y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(y + at, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=at < N)


@triton.jit
def _swiglu_gradient_kernel(gy, gate, up, g_gate, g_up, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gy + at, mask=at < N, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(g_up + at, (gradient * g * s).to(g_up.dtype.element_ty), mask=at < N)
    tl.store(g_gate + at, (gradient * u * s * (1 + g * (1 - s))).to(g_gate.dtype.element_ty), mask=at < N)


@triton.jit
def _rotary_kernel(x, cos, sin, y, stride_head, stride_token, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
                   BHALF: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, BH), tl.arange(0, BHALF)
    mask = (head < H)[:, None] & (d < HALF)[None, :]
    read = token * stride_token + head[:, None] * stride_head + d[None, :]
    a = tl.load(x + read, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + read + HALF, mask=mask, other=0.0).to(tl.float32)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    cos_a = tl.load(cos + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:
        first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    write = (token * H + head[:, None]) * (2 * HALF) + d[None, :]
    tl.store(y + write, first.to(y.dtype.element_ty), mask=mask)
    tl.store(y + write + HALF, second.to(y.dtype.element_ty), mask=mask)


def _tile(width: int) -> tuple[int, int]:
    """(columns, rows) of a tile that holds whole rows, powers of two."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, BLOCK // columns)


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps). x (..., D), weight (D,) -> (..., D) of the dtype asked for."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        width = x.shape[-1]
        x = x.contiguous()
        rows = x.numel() // width
        y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
        columns, per_tile = _tile(width)
        _norm_kernel[(triton.cdiv(rows, per_tile),)](
            x, weight, y, scale, rows, eps, width, columns, per_tile, num_warps=8
        )
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width, rows = x.shape[-1], scale.numel()
        columns, per_tile = _tile(width)
        tiles = triton.cdiv(rows, per_tile)
        programs = min(tiles, PROGRAMS)
        gx, gw = torch.empty_like(x), x.new_empty((programs, width), dtype=torch.float32)
        _norm_gradient_kernel[(programs,)](
            gy.contiguous(), x, weight, scale, gx, gw, rows, tiles, programs, width, columns, per_tile, num_warps=8
        )
        return gx, gw.sum(0).to(weight.dtype), None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, of one shape and dtype."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        y, count = torch.empty_like(gate), gate.numel()
        _swiglu_kernel[(triton.cdiv(count, BLOCK),)](gate, up, y, count, BLOCK)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        g_gate, g_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _swiglu_gradient_kernel[(triton.cdiv(count, BLOCK),)](gy.contiguous(), gate, up, g_gate, g_up, count, BLOCK)
        return g_gate, g_up


class Rotary(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin. x (1, H, N, D); cos, sin (1, N, D) -> (1, H, N, D), in memory (1, N, H, D)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin, dtype, back=False)

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _rotate(gy, *ctx.saved_tensors, ctx.dtype, back=True), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, back: bool) -> torch.Tensor:
    _, heads, tokens, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty((1, tokens, heads, width), dtype=dtype)
    half = width // 2
    _rotary_kernel[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), y, x.stride(1), x.stride(2), heads, triton.next_power_of_2(heads), half,
        triton.next_power_of_2(half), back,
    )  # fmt: skip
    return y.transpose(1, 2)
