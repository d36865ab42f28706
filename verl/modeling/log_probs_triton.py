"""Triton kernels of `log_probs`: one pass over the logits (s, V) for their statistics, one for their gradient.

A program computes one row; sums are float32 for any dtype of the logits.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # columns that a program reads at a time


@triton.jit
def _statistics_kernel(logits, targets, lse, log_probs, entropys, squares, stride, scale, V,
                       ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top, total, weighted, squared = -float("inf"), 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.exp(top - new_top)
        e = tl.exp(x - new_top)
        total = total * shift + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * shift + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        if SQUARES:
            squared = squared * shift * shift + tl.sum(e * e, 0)
        top = new_top
    sum_exp = top + tl.log(total)
    target_logit = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(lse + row, sum_exp)
    tl.store(log_probs + row, target_logit - sum_exp)
    if ENTROPY:
        tl.store(entropys + row, sum_exp - weighted / total)
    if SQUARES:
        tl.store(squares + row, squared / (total * total))


@triton.jit
def _gradient_kernel(logits, targets, lse, entropys, squares, of_log_prob, of_entropy, of_squares, gradients, stride,
                     scale, V, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    x = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
    log_p = x - tl.load(lse + row)
    p = tl.exp(log_p)
    g = tl.load(of_log_prob + row)
    factor = -g + tl.zeros_like(p)
    if ENTROPY:
        factor -= tl.load(of_entropy + row) * (tl.where(p > 0, log_p, 0.0) + tl.load(entropys + row))
    if SQUARES:
        factor += tl.load(of_squares + row) * 2 * (p - tl.load(squares + row))
    gradient = (p * factor + tl.where(column == tl.load(targets + row), g, 0.0)) * scale
    tl.store(gradients + row * V + column, gradient.to(gradients.dtype.element_ty), mask=inside)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, requested: tuple[bool, bool, bool]
) -> list[torch.Tensor]:
    """As `log_probs.logit_statistics`."""
    rows, vocabulary = logits.shape
    lse, log_probs, entropys, squares = (logits.new_zeros(rows, dtype=torch.float32) for _ in range(4))
    if rows:
        _statistics_kernel[(rows,)](
            logits, targets, lse, log_probs, entropys, squares, logits.stride(0), 1 / temperature, vocabulary,
            ENTROPY=requested[1], SQUARES=requested[2], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return [lse, log_probs, entropys, squares]


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropys: torch.Tensor,
    squares: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
    temperature: float,
    requested: tuple[bool, bool, bool],
) -> torch.Tensor:
    """As `log_probs.gradient_of_logits`; `requested`: which outputs have a gradient."""
    rows, vocabulary = logits.shape
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if rows:
        grid = (rows, triton.cdiv(vocabulary, BLOCK))
        _gradient_kernel[grid](
            logits, targets, lse, entropys, squares, *(g.contiguous() for g in gradients), result, logits.stride(0),
            1 / temperature, vocabulary, ENTROPY=requested[1], SQUARES=requested[2], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return result
