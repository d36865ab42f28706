"""Batch-invariant functions on a CPU: calls whose rounding may depend on their shape are made with one shape.

A library may use one algorithm for a GEMM of 3 rows and another for 300, and an elementwise function may round the
elements at the end differently, where a vector register is not full. With chunks of one shape neither happens. Within
a chunk, too, a library may treat the last rows differently, so the number of rows of a chunk is one for which this
library, on this machine, was measured to treat all rows alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F
from torch.nn.functional import pad


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed."""

    scale: float  # score = scale * (q k)
    window: int | None = None  # a query attends to the last `window` keys; None: to all
    softcap: float | None = None  # score = softcap * tanh(score / softcap) if given


#: rows of a GEMM: the first of these with which all rows are treated alike
ROWS = (32, 64, 48, 96, 16)
#: matrices of a batched matmul
MATRICES = 32
#: elements of an elementwise call: full vectors, and few enough for one thread
ELEMENTS = 16384
#: addends of a partial sum
ADDENDS = 1024


def in_chunks(compute: Callable[..., torch.Tensor], size: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Compute in chunks of `size` entries of the first dimension; the last chunk is padded with zeros.

    Args:
        compute: computes each entry independently.
        size: entries of a chunk.
        tensors: (n, ...) each, with the same n >= 1.
    """
    count = len(tensors[0])
    fill = -count % size
    if fill:
        tensors = tuple(pad(x, (0, 0) * (x.dim() - 1) + (0, fill)) for x in tensors)
    chunks = [compute(*chunk) for chunk in zip(*(x.contiguous().split(size) for x in tensors))]
    joined = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return joined[:count] if fill else joined


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (N, in), weight (out, in), bias (out,) -> (N, out)."""
    rows = _rows(*weight.shape, x.dtype, torch.get_num_threads())
    out = in_chunks(lambda x: F.linear(x, weight), rows, x)
    return out if bias is None else out + bias


def batched_matmul(x: torch.Tensor, y: torch.Tensor, height: int) -> torch.Tensor:
    """x (n, i, k), y (n, k, j) -> (n, i, j). Pads i to a fixed number of rows of at least `height` >= i."""
    height = _height(height, *y.shape[1:], x.dtype, torch.get_num_threads())
    tall = pad(x, (0, 0, 0, height - x.shape[1])) if x.shape[1] < height else x
    return in_chunks(torch.bmm, MATRICES, tall, y)[:, : x.shape[1]]


@cache
def _rows(outside: int, inside: int, dtype: torch.dtype, threads: int) -> int:
    """Rows of a chunk of `linear`."""
    row, weight = _random(3, 1, inside, dtype=dtype), _random(outside, inside, dtype=dtype)
    return _first_even(ROWS, lambda rows: torch.stack([F.linear(r.expand(rows, -1).contiguous(), weight) for r in row]))


@cache
def _height(minimum: int, inside: int, outside: int, dtype: torch.dtype, threads: int) -> int:
    """Rows of a matrix of `batched_matmul`."""
    row, matrix = _random(1, 1, inside, dtype=dtype), _random(1, inside, outside, dtype=dtype)
    matrices = matrix.expand(MATRICES, -1, -1).contiguous()
    heights = range(minimum, 2 * minimum + 17)
    return _first_even(
        heights, lambda h: torch.bmm(row.expand(MATRICES, h, -1).contiguous(), matrices).flatten(0, 1)[None]
    )


def _first_even(heights: Iterable[int], compute: Callable[[int], torch.Tensor]) -> int:
    """The first height for which equal rows of compute(height), (., height, out), have equal bits."""
    for height in heights:
        result = compute(height)
        if torch.equal(result, result[:, :1].expand_as(result)):
            return height
    raise ValueError(
        "rollout.deterministic: on this machine, the rounding of a GEMM depends on the position of a row for every "
        "tested size: set it to false"
    )


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for an elementwise function. x: any non-empty shape."""
    return in_chunks(function, ELEMENTS, x.reshape(-1)).view(x.shape)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """x (N, V) -> (N,)."""
    top = x.amax(-1, keepdim=True)
    shares = elementwise(torch.exp, x - top)
    # in blocks: torch splits a single long sum over its threads
    blocks = pad(shares, (0, -x.shape[-1] % ADDENDS)).unflatten(-1, (-1, ADDENDS))
    return top[:, 0] + elementwise(torch.log, blocks.sum(-1).sum(-1))
