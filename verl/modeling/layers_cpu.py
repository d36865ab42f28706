"""The functions between the GEMMs of a decoder layer on a CPU: plain torch with hand-written gradients.

The same functions as in `layers_triton`, for inputs of one dtype. Each processes its rows in blocks, so that
intermediate results stay in the processor's cache; autograd would write and keep a tensor of all tokens for every
operation. N: rows; D: columns.
"""

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import silu

#: elements per thread and block: a quarter of a MiB in float32
BLOCK = 2**16


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    """Runs of rows of x (N, ...)."""
    rows = max(1, BLOCK * torch.get_num_threads() // max(1, x[:1].numel()))
    return (slice(start, start + rows) for start in range(0, len(x), rows))


class AddRMSNorm(torch.autograd.Function):
    """(s, weight * s / sqrt(mean(s^2) + eps)) of the sum s = x + branch. x, branch (..., D), weight (D,)."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, y, scale = _normed(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx, g_total: torch.Tensor | None, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gx, gw = _norm_gradients(gy, g_total, *ctx.saved_tensors)
        return gx, gx, gw, None, None


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps). x (..., D), weight (D,)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        _, y, scale = _normed(x, None, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gx, gw = _norm_gradients(gy, None, *ctx.saved_tensors)
        return gx, gw, None, None


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) of rows x (..., D): (..., 1)."""
    width = x.shape[-1]
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.hypot(size, size.new_tensor(math.sqrt(width * eps)), out=size).reciprocal_().mul_(math.sqrt(width))


def _normed(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x or x + branch; its norm; the scale of each row, (N, 1))."""
    flat = x.reshape(-1, x.shape[-1])
    # copies: the output of a layer under FSDP2 must not be a view
    total = x if branch is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums, normed, scale = total.reshape(flat.shape), y.view(flat.shape), flat.new_empty(len(flat), 1)
    for rows in _blocks(flat):
        block = sums[rows]
        if branch is not None:
            torch.add(flat[rows], branch.view(flat.shape)[rows], out=block)
        scale[rows] = _scale(block, eps)
        torch.mul(block, scale[rows], out=normed[rows]).mul_(weight)
    return total, y, scale


def _norm_gradients(
    gy: torch.Tensor, g_total: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the normalized tensor x and of the weight. `scale`: as `_normed` returns it."""
    shape, width = x.shape, x.shape[-1]
    x, gy = x.reshape(-1, width), gy.reshape(-1, width)
    g_total = None if g_total is None else g_total.reshape(-1, width)
    gx, gw = torch.empty_like(x), torch.zeros_like(weight)
    for rows in _blocks(x):
        block_gradient = gx[rows]
        _add_norm_gradient(gy[rows], x[rows], weight, scale[rows], block_gradient, gw)
        if g_total is not None:
            block_gradient.add_(g_total[rows])
    return gx.view(shape), gw


def _add_norm_gradient(
    gy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, gx: torch.Tensor, gw: torch.Tensor
) -> None:
    """Write the gradient of rows x (n, D) to gx and add that of the weight to gw. scale: (n, 1)."""
    along = gy * x
    gw.addmv_(along.t(), scale[:, 0])
    torch.mul(gy, weight, out=gx).mul_(scale)
    gx.addcmul_(x, along.mv(weight)[:, None] * scale.pow(3), value=-1 / x.shape[-1])


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, (..., D): of two tensors (..., D), or of one (..., 2 D) that concatenates them."""

    @staticmethod
    def forward(ctx, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        gate, up = _halves(inputs)
        y = gate.new_empty(gate.shape)
        for rows in _blocks(y):
            torch.ops.aten.silu.out(gate[rows], out=y[rows]).mul_(up[rows])
        return y.view(*inputs[0].shape[:-1], -1)

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
        gate, up = _halves(inputs)
        g_gate, g_up = _halves(gradients)
        gy = gy.reshape(gate.shape)
        for rows in _blocks(gy):
            torch.mul(silu(gate[rows]), gy[rows], out=g_up[rows])
            torch.ops.aten.silu_backward.grad_input(gy[rows] * up[rows], gate[rows], grad_input=g_gate[rows])
        return gradients


def scaled_swiglu(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scale * silu(gate) * up, (S, D), of joint gate and up (S, 2 D) and a factor per row (S,)."""
    gate, up = gate_up.chunk(2, -1)
    y = gate.new_empty(gate.shape)
    for rows in _blocks(y):
        torch.ops.aten.silu.out(gate[rows], out=y[rows]).mul_(up[rows]).mul_(scale[rows, None])
    return y


def scaled_swiglu_gradient(
    gy: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass of `scaled_swiglu`: its output (S, D), and the gradients (S, 2 D) and (S,)."""
    y, g_gate_up, g_scale = torch.empty_like(gy), torch.empty_like(gate_up), gy.new_empty(len(gy))
    (gate, up), (g_gate, g_up) = gate_up.chunk(2, -1), g_gate_up.chunk(2, -1)
    for rows in _blocks(gy):
        factor, active, g = scale[rows, None], silu(gate[rows]), gy[rows]
        torch.mul(active, up[rows], out=y[rows])
        g_scale[rows] = torch.linalg.vecdot(g, y[rows])
        g = g * factor
        torch.mul(active, g, out=g_up[rows])
        torch.ops.aten.silu_backward.grad_input(g * up[rows], gate[rows], grad_input=g_gate[rows])
        y[rows].mul_(factor)
    return y, g_gate_up, g_scale


def sum_of_uses(x: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """y[..., :] = the sum of the rows x[uses[..., i]]: x (S, D), uses (..., k) -> (..., D)."""
    return x[uses].sum(-2)


def _halves(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Gate and up, (N, D)."""
    flat = [x.flatten(0, -2) for x in inputs]
    return list(flat[0].chunk(2, -1)) if len(flat) == 1 else flat


class RotaryQKV(torch.autograd.Function):
    """Queries (N, HQ, D), keys and values (N, HK, D) of a joint projection (N, (HQ + 2 HK) D), the first two rotated.

    x * cos + rotate_half(x) * sin, with cos and sin (N, D) (Su et al. 2021, arXiv 2104.09864). heads: (HQ, HK).
    weights: none, or (D,) for queries and for keys, whose heads then go through an RMS norm first.
    """

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
        ctx.save_for_backward(cos, sin, qkv if weights else None, *weights)
        x = qkv.view(*cos.shape[:1], -1, cos.shape[1])
        output, rotated = torch.empty_like(x), sum(heads)
        for rows in _blocks(x):
            block = x[rows, :rotated]
            if weights:
                pairs = zip(block.split(heads, 1), weights)
                block = torch.cat([block_heads * _scale(block_heads, eps) * weight for block_heads, weight in pairs], 1)
            _rotate(block, cos[rows, None], sin[rows, None], output[rows, :rotated])
            output[rows, rotated:] = x[rows, rotated:]
        return output.split(ctx.heads, 1)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, qkv, *weights = ctx.saved_tensors
        tokens, size = cos.shape
        joint, rotated = cos.new_empty(tokens, sum(ctx.heads), size), sum(ctx.heads[:2])
        weight_gradients = [torch.zeros_like(weight) for weight in weights]
        for rows in _blocks(joint):
            g = torch.cat([gradient[rows] for gradient in gradients[:2]], 1)
            _rotate(g, cos[rows, None], sin[rows, None], joint[rows, :rotated], back=True)
            joint[rows, rotated:] = gradients[2][rows]
            if not weights:
                continue
            read, write = (t.view(joint.shape)[rows].split(ctx.heads, 1) for t in (qkv, joint))
            for x, into, weight, gw in zip(read, write, weights, weight_gradients):
                x, g = x.reshape(-1, size), into.reshape(-1, size)
                gx = torch.empty_like(x)
                _add_norm_gradient(g, x, weight, _scale(x, ctx.eps), gx, gw)
                into.copy_(gx.view(into.shape))
        return joint.flatten(1), None, None, None, None, *weight_gradients


class Rotary(torch.autograd.Function):
    """Heads (N, H, D), rotated: x * cos + rotate_half(x) * sin, with cos and sin (N, D); see `RotaryQKV`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return Rotary._rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, gy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Rotary._rotated(gy, *ctx.saved_tensors, back=True), None, None

    @staticmethod
    def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in _blocks(y):
            _rotate(x[rows], cos[rows, None], sin[rows, None], y[rows], back)
        return y


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, y: torch.Tensor, back: bool = False) -> None:
    """Write x (n, H, D), rotated (or rotated back), to y. cos, sin: (n, 1, D)."""
    half = x.shape[-1] // 2
    sin_of_first, sin_of_second = (sin[..., half:], sin[..., :half]) if back else (sin[..., :half], sin[..., half:])
    sign = 1 if back else -1
    torch.mul(x, cos, out=y)
    y[..., :half].addcmul_(x[..., half:], sin_of_first, value=sign)
    y[..., half:].addcmul_(x[..., :half], sin_of_second, value=-sign)
