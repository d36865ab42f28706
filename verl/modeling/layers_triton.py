"""Triton kernels of the functions between the GEMMs of a decoder layer.

Residual sum with RMS norm, SwiGLU, and the rotary embedding of queries and keys (with the norms of their heads) in a
joint QKV projection. Each kernel reads its inputs once and writes its outputs once, forward and backward. Arithmetic is
float32, outputs have the requested dtype. `layers` puts them into a model. N: rows; D: columns.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements that a program holds at a time
PROGRAMS = 1024  # limit where each program accumulates a partial sum of a weight's gradient


@triton.jit
def _norm_kernel(x, branch, weight, total, y, scale, N, eps, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
                 ADD: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BD)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    at = rows[:, None] * D + columns[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
        stored = v.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=mask)
        v = stored.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    tl.store(scale + rows, r, mask=rows < N)
    tl.store(y + at, (v * r[:, None] * w[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_gradient_kernel(gy, g_total, x, weight, scale, gx, g_branch, gw, N, tiles, programs, D: tl.constexpr,
                          BD: tl.constexpr, ROWS: tl.constexpr, ADDED: tl.constexpr, BRANCH: tl.constexpr):  # fmt: skip
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
        g = r * (g - unit * along)
        if ADDED:
            g += tl.load(g_total + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gx + at, g.to(gx.dtype.element_ty), mask=mask)
        if BRANCH:
            tl.store(g_branch + at, g.to(g_branch.dtype.element_ty), mask=mask)
    tl.store(gw + tl.program_id(0) * D + columns, total, mask=inside)


@triton.jit
def _swiglu_kernel(gate, up, y, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + column, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradient_kernel(gy, gate, up, g_gate, g_up, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    at = row * stride + column
    gradient = tl.load(gy + row * D + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(g_up + at, (gradient * g * s).to(g_up.dtype.element_ty), mask=inside)
    tl.store(g_gate + at, (gradient * u * s * (1 + g * (1 - s))).to(g_gate.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_swiglu_kernel(gate_up, scale, y, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    at = gate_up + row * 2 * D + column
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at + D, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + row).to(tl.float32)
    tl.store(y + row * D + column, (factor * g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_swiglu_gradient_kernel(gy, gate_up, scale, y, g_gate_up, g_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row).to(tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < D
        at = row * 2 * D + column
        gradient = tl.load(gy + row * D + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(gate_up + at + D, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        unscaled = g * s * u
        along += gradient * unscaled
        tl.store(y + row * D + column, (factor * unscaled).to(y.dtype.element_ty), mask=inside)
        gradient *= factor
        tl.store(g_gate_up + at, (gradient * u * s * (1 + g * (1 - s))).to(g_gate_up.dtype.element_ty), mask=inside)
        tl.store(g_gate_up + at + D, (gradient * g * s).to(g_gate_up.dtype.element_ty), mask=inside)
    tl.store(g_scale + row, tl.sum(along, 0))


@triton.jit
def _angles(table, token, d, HALF: tl.constexpr):
    """The entries of a token in a table (N, 2 HALF): for the first half of a head and for the second."""
    at = table + token * 2 * HALF + d
    first = tl.load(at, mask=d < HALF, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def _rotary_kernel(x, cos, sin, weight, y, stride_x, eps, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
                   BHALF: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, BH), tl.arange(0, BHALF)
    mask = (head < H)[:, None] & (d < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + d[None, :]
    a = tl.load(x + token * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + token * stride_x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        w_a, w_b = _angles(weight, 0, d, HALF)
        a, b = a * r * w_a, b * r * w_b
    cos_a, cos_b = _angles(cos, token, d, HALF)
    sin_a, sin_b = _angles(sin, token, d, HALF)
    y += token * H * 2 * HALF + at
    tl.store(y, (a * cos_a - b * sin_a).to(y.dtype.element_ty), mask=mask)
    tl.store(y + HALF, (b * cos_b + a * sin_b).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_gradient_kernel(gy, x, cos, sin, weight, gx, gw, stride_x, stride_gx, eps, N, programs, H: tl.constexpr,
                            BH: tl.constexpr, HALF: tl.constexpr, BHALF: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    head, d = tl.arange(0, BH), tl.arange(0, BHALF)
    mask = (head < H)[:, None] & (d < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + d[None, :]
    gw_a, gw_b = tl.zeros((BH, BHALF), tl.float32), tl.zeros((BH, BHALF), tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), N, programs):
        read = gy + token * H * 2 * HALF + at
        a = tl.load(read, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(read + HALF, mask=mask, other=0.0).to(tl.float32)
        cos_a, cos_b = _angles(cos, token, d, HALF)
        sin_a, sin_b = _angles(sin, token, d, HALF)
        g_a, g_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        if NORM:
            unit_a = tl.load(x + token * stride_x + at, mask=mask, other=0.0).to(tl.float32)
            unit_b = tl.load(x + token * stride_x + at + HALF, mask=mask, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(unit_a * unit_a, 1) + tl.sum(unit_b * unit_b, 1)) / (2 * HALF) + eps)[:, None]
            unit_a, unit_b = unit_a * r, unit_b * r
            gw_a += g_a * unit_a
            gw_b += g_b * unit_b
            w_a, w_b = _angles(weight, 0, d, HALF)
            g_a, g_b = g_a * w_a, g_b * w_b
            along = (tl.sum(g_a * unit_a, 1) + tl.sum(g_b * unit_b, 1))[:, None] / (2 * HALF)
            g_a, g_b = r * (g_a - unit_a * along), r * (g_b - unit_b * along)
        write = gx + token * stride_gx + at
        tl.store(write, g_a.to(gx.dtype.element_ty), mask=mask)
        tl.store(write + HALF, g_b.to(gx.dtype.element_ty), mask=mask)
    if NORM:
        gw += tl.program_id(0) * 2 * HALF + d
        tl.store(gw, tl.sum(gw_a, 0), mask=d < HALF)
        tl.store(gw + HALF, tl.sum(gw_b, 0), mask=d < HALF)


@triton.jit
def _sum_uses_kernel(g, offsets, uses, y, D: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        read = g + tl.load(uses + i).to(tl.int64) * D + column
        total += tl.load(read, mask=column < D, other=0.0).to(tl.float32)
    tl.store(y + token * D + column, total.to(y.dtype.element_ty), mask=column < D)


@triton.jit
def _column_sums_kernel(x, y, N, D: tl.constexpr, rows_each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(1).to(tl.int64) * rows_each
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows_each, ROWS):
        row = start + first + tl.arange(0, ROWS)
        mask = ((row < N) & (row < start + rows_each))[:, None] & (column < D)[None, :]
        total += tl.load(x + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(1) * D + column, tl.sum(total, 0), mask=column < D)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums over the rows of x (N, D): (D,) float32."""
    rows, width = x.shape
    chunks, columns = min(64, triton.cdiv(rows, 32)), 128
    partial_sums = x.new_empty((chunks, width), dtype=torch.float32)
    if rows:
        grid = (triton.cdiv(width, columns), chunks)
        _column_sums_kernel[grid](x.contiguous(), partial_sums, rows, width, triton.cdiv(rows, chunks), 32, columns)
    return partial_sums.sum(0)


def _tile(width: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a tile that holds full rows; columns and rows are powers of two."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, BLOCK // columns), min(16, max(4, columns // 256))


class AddRMSNorm(torch.autograd.Function):
    """As `layers_cpu.AddRMSNorm`. The sum has the dtype of x + branch, the norm the requested dtype."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, branch = x.contiguous(), branch.contiguous()
        total = torch.empty_like(x, dtype=torch.result_type(x, branch))
        y, scale = _normed(x, branch, total, weight, eps, dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.dtypes = x.dtype, branch.dtype
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx, g_total: torch.Tensor | None, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gx, g_branch, gw = _norm_gradients(gy, g_total, ctx.saved_tensors, *ctx.dtypes)
        return gx, g_branch, gw, None, None


class RMSNorm(torch.autograd.Function):
    """As `layers_cpu.RMSNorm`, in the requested dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        x = x.contiguous()
        y, scale = _normed(x, None, None, weight, eps, dtype)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        gx, _, gw = _norm_gradients(gy, None, saved, saved[0].dtype, None)
        return gx, gw, None, None


def _normed(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    total: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x, or of x + branch, which is written to `total`; the scale of each row)."""
    width = x.shape[-1]
    rows = x.numel() // width
    y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    columns, per_tile, warps = _tile(width)
    _norm_kernel[(triton.cdiv(rows, per_tile),)](
        x, branch, weight, total, y, scale, rows, eps, width, columns, per_tile, branch is not None, num_warps=warps
    )
    return y, scale


def _norm_gradients(
    gy: torch.Tensor,
    g_total: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The gradients of x and of the branch, if it has a dtype, which differ in dtype only, and of the weight. gy: of
    the norm. g_total: of the sum. saved: the normalized tensor, the weight, and the scale of each row."""
    x, weight, scale = saved
    width, rows = x.shape[-1], scale.numel()
    columns, per_tile, warps = _tile(width)
    tiles = triton.cdiv(rows, per_tile)
    programs = min(tiles, PROGRAMS)
    gx, gw = torch.empty_like(x, dtype=dtype), x.new_empty((programs, width), dtype=torch.float32)
    separate = branch_dtype is not None and branch_dtype != dtype
    g_branch = torch.empty_like(x, dtype=branch_dtype) if separate else None
    _norm_gradient_kernel[(programs,)](
        gy.contiguous(), None if g_total is None else g_total.contiguous(), x, weight, scale, gx, g_branch, gw, rows,
        tiles, programs, width, columns, per_tile, g_total is not None, separate, num_warps=warps,
    )  # fmt: skip
    return gx, g_branch if separate else gx, gw.sum(0).to(weight.dtype)


class SwiGLU(torch.autograd.Function):
    """As `layers_cpu.SwiGLU`."""

    @staticmethod
    def forward(ctx, *inputs: torch.Tensor) -> torch.Tensor:
        inputs = [x.contiguous() for x in inputs]
        ctx.save_for_backward(*inputs)
        gate, up = _halves(inputs)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _swiglu_kernel[_swiglu_grid(gate)](gate, up, y, inputs[0].shape[-1], gate.shape[-1], BLOCK)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        gate, up = _halves(inputs)
        _swiglu_gradient_kernel[_swiglu_grid(gate)](
            gy.contiguous(), gate, up, *_halves(gradients), inputs[0].shape[-1], gate.shape[-1], BLOCK
        )
        return tuple(gradients)


def scaled_swiglu(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scale * silu(gate) * up, (S, D), of joint gate and up (S, 2 D) and a factor per row (S,)."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, width))
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        _scaled_swiglu_kernel[grid](gate_up.contiguous(), scale.contiguous(), y, width, BLOCK)
    return y


def scaled_swiglu_gradient(
    gy: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass of `scaled_swiglu`: its output (S, D), and the gradients (S, 2 D) and (S,) float32."""
    rows, width = gy.shape
    y, g_gate_up = torch.empty_like(gy), torch.empty_like(gate_up)
    g_scale = gy.new_empty(rows, dtype=torch.float32)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        _scaled_swiglu_gradient_kernel[(rows,)](
            gy.contiguous(), gate_up, scale.contiguous(), y, g_gate_up, g_scale, width, block
        )
    return y, g_gate_up, g_scale


def sum_of_uses(x: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """y[..., :] = the sum of the rows x[uses[..., i]]: x (S, D), uses (..., k) -> (..., D). Sums are float32."""
    width, k = x.shape[1], uses.shape[-1]
    y = x.new_empty((*uses.shape[:-1], width))
    if uses.numel():
        offsets = torch.arange(0, uses.numel() + 1, k, device=x.device)
        grid = (uses.numel() // k,)
        _sum_uses_kernel[grid](x.contiguous(), offsets, uses.contiguous(), y, width, triton.next_power_of_2(width))
    return y


def _halves(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(inputs[0].chunk(2, -1)) if len(inputs) == 1 else list(inputs)


def _swiglu_grid(gate: torch.Tensor) -> tuple[int, int]:
    width = gate.shape[-1]
    return gate.numel() // width, triton.cdiv(width, BLOCK)


class RotaryQKV(torch.autograd.Function):
    """As `layers_cpu.RotaryQKV`."""

    @staticmethod
    def forward(
        ctx,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: tuple[int, int],
        eps: float,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.heads, ctx.eps = (*heads, heads[1]), eps
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin, qkv if weights else None, *weights)
        q, k, v = qkv.view(len(qkv), -1, cos.shape[-1]).split(ctx.heads, 1)
        rotated = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)]
        for x, weight, y in zip((q, k), weights or (None, None), rotated):
            sizes = _head_sizes(x)
            _rotary_kernel[(len(x),)](x, cos, sin, weight, y, x.stride(0), eps, *sizes, weight is not None)
        return *rotated, v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, qkv, *weights = ctx.saved_tensors
        tokens, _, size = gradients[0].shape
        joint = gradients[0].new_empty((tokens, sum(ctx.heads), size))
        read = (joint if qkv is None else qkv.view(joint.shape)).split(ctx.heads, 1)
        weight_gradients: list[torch.Tensor] = []
        write = joint.split(ctx.heads, 1)
        programs = min(tokens, PROGRAMS) if weights else tokens
        for i, weight in enumerate(weights or (None, None)):
            gw = cos.new_empty((programs, size), dtype=torch.float32) if weights else None
            _rotary_gradient_kernel[(programs,)](
                gradients[i].contiguous(), read[i], cos, sin, weight, write[i], gw, read[i].stride(0),
                write[i].stride(0), ctx.eps, tokens, programs, *_head_sizes(write[i]), weight is not None,
            )  # fmt: skip
            weight_gradients += [gw.sum(0).to(weight.dtype)] if weights else []
        write[2].copy_(gradients[2])
        return joint.flatten(1), None, None, None, None, *weight_gradients


class Rotary(torch.autograd.Function):
    """As `layers_cpu.Rotary`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        y = torch.empty_like(x)
        _rotary_kernel[(len(x),)](x, cos, sin, None, y, x.stride(0), 0.0, *_head_sizes(x), False)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gy = gy.contiguous()
        gx, tokens = torch.empty_like(gy), len(gy)
        _rotary_gradient_kernel[(tokens,)](
            gy, gx, cos, sin, None, gx, None, gx.stride(0), gx.stride(0), 0.0, tokens, tokens, *_head_sizes(gx), False
        )
        return gx, None, None


def _head_sizes(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The heads and the half head size of x (N, H, D), each followed by the next power of two."""
    heads, half = x.shape[1], x.shape[2] // 2
    return heads, triton.next_power_of_2(heads), half, triton.next_power_of_2(half)


class Repeat(torch.autograd.Function):
    """x[source]: x (N, ...), source (M,). The gradient of a row is summed over its uses in a fixed order.

    offsets (N + 1,), uses (M,): row i is used at uses[offsets[i]] .. uses[offsets[i + 1] - 1].
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, offsets: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offsets, uses)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offsets, uses = ctx.saved_tensors
        rows, width = len(offsets) - 1, g[0].numel()
        gradient = g.new_empty((rows, *g.shape[1:]))
        _sum_uses_kernel[(rows,)](g.contiguous(), offsets, uses, gradient, width, triton.next_power_of_2(width))
        return gradient, None, None, None
