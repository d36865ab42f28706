"""Linear layers in FP8 (E4M3), with one quantization for training, log-probs and generation.

A weight has one scale for a block of 128 x 128 elements, an input one for 128 elements of a row, as in DeepSeek-V3
(arXiv 2412.19437). If only the rollout computes in FP8, the policy that samples is not the one that is trained, and
training on long responses collapses (Jet-RL, arXiv 2601.14243): here both multiply the same codes.

The scales are powers of two. So the value of a code is a bf16 number too, a weight that has such values keeps them when
it is quantized again, and a matmul of values in bf16 emulates the GEMM of codes: that is what devices without this GEMM
compute. Weights are rounded to the dtype of the computation first, since that is what sharded ranks and rollout engines
receive.

Rounding has the derivative 1 (straight-through): the gradient of the input is a GEMM of codes too, that of the weight
one of the inputs before rounding, which has less noise.

M rows (tokens), N output features, K input features.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from verl.modeling.linear import WeightCache, compute_dtype, parameter_gradients
from verl.modeling.vision import language_model_of

BLOCK = 128
logger = logging.getLogger("verl.modeling")


class Quantized(NamedTuple):
    """A matrix in FP8."""

    codes: torch.Tensor  # (rows, columns) E4M3; without `scales`, the values that they stand for
    # float32. Of a weight: (N / 128, K / 128), with the columns padded to a multiple of 4. Of rows: (K / 128, M), with
    # M and the rows of `codes` padded to a multiple of 4.
    scales: torch.Tensor | None = None
    rows: int = 0  # M without padding


def has_kernels(weights: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether the GEMM of codes supports weights (N, K), computed in `dtype`; otherwise it is emulated.

    device: where they are used; default: where they are.
    """
    device = weights[0].device if device is None else device
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] == 9  # cuBLAS scales blocks on Hopper only
        and not any(size % BLOCK for weight in weights for size in weight.shape)
    )


def power_of_two_scale(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two with largest / scale <= 448, the largest E4M3 number; NaN if it is infinite.

    largest is m * 2^e with 1 <= m < 2, and 448 is 1.75 * 2^8: the exponent is e - 8, or e - 7 if m > 1.75.
    """
    bits = largest.float().contiguous().view(torch.int32)
    scale = ((((bits + 0x1FFFFF) >> 23) - 8).clamp_min(1) << 23).view(torch.float32)
    return scale.masked_fill(largest.isinf(), float("nan"))


def rounded(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The values of the codes of x (M, K), with one scale for blocks of `rows` x 128 elements; in the dtype of x."""
    height, width = x.shape
    padded = F.pad(x.float(), (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))
    scale = power_of_two_scale(blocks.abs().amax((1, 3), keepdim=True))
    values = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(2).flatten(0, 1)[:height, :width].to(x.dtype)


def quantize_rows(x: torch.Tensor, emulated: bool) -> Quantized:
    """Quantize activations (M, K)."""
    if emulated:
        return Quantized(rounded(x))
    from verl.modeling import fp8_triton

    return Quantized(*fp8_triton.quantize_rows(x.contiguous()), len(x))


def quantize_weights(weights: Sequence[torch.Tensor], dtype: torch.dtype, emulated: bool) -> Quantized:
    """Quantize weights (n_i, K), each with its own blocks, as one matrix (N, K). dtype: of the computation."""
    if emulated:
        return Quantized(torch.cat([rounded(weight.detach().to(dtype), BLOCK) for weight in weights]))
    from verl.modeling import fp8_triton

    codes, scales = zip(*(fp8_triton.quantize_weight(weight.detach(), dtype) for weight in weights))
    return Quantized(*(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (codes, scales)))


def transposed(weight: Quantized, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> Quantized:
    """`quantize_weights` as a matrix (K, N). weight: its result."""
    codes, scales, _ = weight
    if scales is None:
        return Quantized(codes.t())
    from verl.modeling import fp8_triton

    scales = F.pad(scales[:, : codes.shape[1] // BLOCK].t(), (0, -len(scales) % 4)).contiguous()
    columns = [fp8_triton.quantize_weight(each.detach().t(), dtype)[0] for each in weights]
    return Quantized(columns[0] if len(columns) == 1 else torch.cat(columns, 1), scales)


def matmul(x: Quantized, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) weight^T (K, N) + bias (N,) -> (M, N), bf16; emulated in the dtype of the values."""
    if x.scales is None:
        return F.linear(x.codes, weight.codes, bias)
    from verl.modeling import fp8_triton

    if x.rows <= fp8_triton.FEW_ROWS:
        return fp8_triton.matmul_few_rows(*x, weight.codes, weight.scales, bias)
    y = F.scaled_mm(
        x.codes,
        weight.codes.t(),
        x.scales.t(),
        F.ScalingType.BlockWise1x128,
        weight.scales.t(),
        F.ScalingType.BlockWise128x128,
    )[: x.rows]
    return y if bias is None else y.add_(bias)


class Fp8Matmul(torch.autograd.Function):
    """x W^T + b of several layers as one GEMM of codes: (..., I) -> (..., O) in `dtype`; arguments as `FusedLinear`."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, dtype: torch.dtype, cache: WeightCache, layers: int, *parameters: nn.Parameter
    ) -> torch.Tensor:
        weights, biases = parameters[:layers], parameters[layers:]
        if not isinstance(weights[0], nn.Parameter):  # a cast (`modeling.casting`), which is another one in every call
            cache = WeightCache()
        ctx.cache, ctx.weights, ctx.biases, ctx.dtypes = cache, weights, biases, (x.dtype, dtype)
        ctx.shape, ctx.emulated = x.shape, not has_kernels(weights, dtype)
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        inputs = quantize_rows(flat, ctx.emulated)
        ctx.save_for_backward(flat if any(ctx.needs_input_grad[4:]) else None)
        bias = cache.concatenated(biases, dtype) if biases else None
        y = matmul(inputs, _weight(cache, weights, dtype, ctx.emulated), bias)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gx, (x_dtype, dtype) = None, ctx.dtypes
        g = g.reshape(-1, g.shape[-1])
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            weight = _weight(ctx.cache, ctx.weights, dtype, ctx.emulated, is_transposed=True)
            gx = matmul(quantize_rows(g, ctx.emulated), weight).view(ctx.shape).to(x_dtype)
        return gx, None, None, None, *parameter_gradients(ctx, g, x)


def _weight(
    cache: WeightCache, weights: Sequence[torch.Tensor], dtype: torch.dtype, emulated: bool, is_transposed: bool = False
) -> Quantized:
    """The quantized weights as one matrix, (N, K) or transposed; while they are fixed, quantized once."""
    key = ("fp8", *map(id, weights))
    weight = cache.kept(key, partial(quantize_weights, weights, dtype, emulated))
    if is_transposed:
        return cache.kept((*key, "transposed"), partial(transposed, weight, weights, dtype))
    return weight


class Fp8Linear(nn.Linear):
    """A linear layer that computes in FP8. Its parameters are those of `nn.Linear`, in the dtype of the model."""

    #: set by `modeling.layers.use_kernels`
    cache = WeightCache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N)."""
        biases = [] if self.bias is None else [self.bias]
        return Fp8Matmul.apply(x, compute_dtype(x, self.weight), self.cache, 1, self.weight, *biases)


def use_fp8(module: nn.Module, quantization: str | None = "fp8", device: torch.device | None = None) -> nn.Module:
    """With the key `model.quantization` at "fp8", let the linear layers in the decoder layers of a HuggingFace model
    compute in FP8, in place. Returns the module.

    Other modules keep their dtype: the embedding, the head, norms, routers, experts and a vision tower.

    Args:
        device: where the layers compute; default: where the weights are.
    """
    if quantization != "fp8":
        return module
    layers = [each for each in language_model_of(module).layers.modules() if type(each) is nn.Linear]
    for layer in layers:
        layer.__class__ = Fp8Linear
    supported = has_kernels([layer.weight for layer in layers], torch.bfloat16, device)
    how = (
        "in FP8" if supported else "with the values of FP8, in another dtype: FP8 needs a Hopper GPU and sizes in 128s"
    )
    logger.info("quantization=fp8: %s parameters compute %s", sum(layer.weight.numel() for layer in layers), how)
    return module
