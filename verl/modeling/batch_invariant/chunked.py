"""On a CPU: calls whose rounding may depend on their shape, made with one shape.

A library takes other paths through a product of 3 rows than through one of 300, and an elementwise function may round
what is left over at the end, where no vector register is filled, in another way. In pieces of one shape neither
happens. Within a piece, too, a library may treat the last rows in another way; so the height of a product's pieces is
one at which this library, on this machine, was seen to treat all rows alike.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch.nn.functional import linear, pad

#: rows of a product: the first of these at which all are treated alike
ROWS = (32, 64, 48, 96, 16)
#: matrices of a batched product
MATRICES = 32
#: elements of an elementwise function: full vectors, and few enough for one thread
ELEMENTS = 16384
#: addends of a partial sum
ADDENDS = 1024


def in_pieces(compute: Callable[..., torch.Tensor], size: int, *tensors: torch.Tensor) -> torch.Tensor:
    """compute(*tensors), by calls on `size` entries of the first dimension each, the last filled up with zeros.

    tensors: (n, ...), all of one n >= 1. compute: works on each entry alone.
    """
    count = len(tensors[0])
    fill = -count % size
    if fill:
        tensors = tuple(pad(x, (0, 0) * (x.dim() - 1) + (0, fill)) for x in tensors)
    parts = [compute(*piece) for piece in zip(*(x.contiguous().split(size) for x in tensors))]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:count] if fill else whole


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (N, in), weight (out, in), bias (out,) -> (N, out)."""
    rows = _rows(*weight.shape, x.dtype, torch.get_num_threads())
    out = in_pieces(lambda x: linear(x, weight), rows, x)
    return out if bias is None else out + bias


def products(x: torch.Tensor, y: torch.Tensor, height: int) -> torch.Tensor:
    """x (n, i, k), y (n, k, j) -> (n, i, j), each by a product of one height, which is at least `height` >= i."""
    height = _height(height, *y.shape[1:], x.dtype, torch.get_num_threads())
    tall = pad(x, (0, 0, 0, height - x.shape[1])) if x.shape[1] < height else x
    return in_pieces(torch.bmm, MATRICES, tall, y)[:, : x.shape[1]]


@cache
def _rows(outside: int, inside: int, dtype: torch.dtype, threads: int) -> int:
    """Of `product`."""
    row, weight = _random(3, 1, inside, dtype=dtype), _random(outside, inside, dtype=dtype)
    return _first_even(ROWS, lambda rows: torch.stack([linear(r.expand(rows, -1).contiguous(), weight) for r in row]))


@cache
def _height(least: int, inside: int, outside: int, dtype: torch.dtype, threads: int) -> int:
    """Of `products`."""
    row, matrix = _random(1, 1, inside, dtype=dtype), _random(1, inside, outside, dtype=dtype)
    matrices = matrix.expand(MATRICES, -1, -1).contiguous()
    heights = range(least, 2 * least + 17)
    return _first_even(
        heights, lambda h: torch.bmm(row.expand(MATRICES, h, -1).contiguous(), matrices).flatten(0, 1)[None]
    )


def _first_even(heights: Iterable[int], compute: Callable[[int], torch.Tensor]) -> int:
    """The first height at which compute(height), (., height, out), gives equal rows equal bits wherever they stand."""
    for height in heights:
        found = compute(height)
        if torch.equal(found, found[:, :1].expand_as(found)):
            return height
    raise ValueError(
        "rollout.deterministic: products of matrices round a row by its place among the others on this machine, in "
        "every size that was tried: use false"
    )


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), for a function of single elements. x of any shape with elements."""
    return in_pieces(function, ELEMENTS, x.reshape(-1)).view(x.shape)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """x (N, V) -> (N,)."""
    top = x.amax(-1, keepdim=True)
    shares = elementwise(torch.exp, x - top)
    # in blocks: torch splits one long sum, and only one, over its threads
    blocks = pad(shares, (0, -x.shape[-1] % ADDENDS)).unflatten(-1, (-1, ADDENDS))
    return top[:, 0] + elementwise(torch.log, blocks.sum(-1).sum(-1))
