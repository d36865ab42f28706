"""Batch-invariant causal attention: the result of a query depends on its own sequence only.

A query attends to the keys of its sequence in blocks, from position 0, one after another. The operations are the same
whether it comes with the other queries of its sequence (prefill, training) or alone (decoding), whether its keys
are packed or in a KV cache, and however many blocks follow that it does not attend to: masked keys add exact zeros.

N tokens of b sequences; HQ query heads, HK key heads, G = HQ / HK; D head size; L columns of a KV cache.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from verl.modeling.batch_invariant.chunked import Scores, batched_matmul, elementwise

#: positions in a tile of queries, and in a block of keys, on a CPU
TILE, BLOCK = 4, 64


#: attention of one layer: (index of the layer, query (N, HQ, D), key (N, HK, D),
#: value (N, HK, D), scores) -> (N, HQ, D)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Scores], torch.Tensor]


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scores: Scores
) -> torch.Tensor:
    """Attention inside packed sequences. query (N, HQ, D), key and value (N, HK, D), lengths (b,) -> (N, HQ, D)."""
    if query.is_cuda:
        from verl.modeling.batch_invariant import triton_kernels  # triton comes only with torch for GPUs

        return triton_kernels.attend_rows(query, key, value, lengths, scores)
    tiles = -(-max(lengths) // TILE)
    width = tiles * TILE
    slots = torch.cat([torch.arange(i * width, i * width + n) for i, n in enumerate(lengths)])
    q, k, v = (_padded(x, slots, len(lengths), width) for x in (query, key, value))
    positions = torch.arange(width).view(1, tiles, TILE).expand(len(lengths), -1, -1)
    heads = key.shape[1]
    q = q.view(len(lengths), tiles, TILE, heads, -1, q.shape[-1]).permute(0, 3, 1, 2, 4, 5)
    out = _attend(q, k.transpose(1, 2), v.transpose(1, 2), positions, scores)
    return out.permute(0, 2, 3, 1, 4, 5).reshape(-1, *query.shape[1:])[slots]


def attend_cached(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """On a CPU: one query per sequence over a KV cache.

    Args:
        query: (b, HQ, D).
        keys, values: (b, HK, L, D); masked entries must be finite.
        positions: (b,) position of each query.
        scores: how scores are computed.

    Returns:
        (b, HQ, D).
    """
    rows, heads, size = query.shape
    q = query.view(rows, keys.shape[1], 1, 1, -1, size)
    return _attend(q, keys, values, positions[:, None, None], scores).view(rows, heads, size)


def _padded(x: torch.Tensor, positions: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """(N, H, D) -> (rows, width, H, D), zeros after each row."""
    return x.new_zeros(rows * width, *x.shape[1:]).index_copy_(0, positions, x).view(rows, width, *x.shape[1:])


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """query (b, HK, tiles, t, G, D) at positions (b, tiles, t), keys and values (b, HK, L, D) -> as query. t <= TILE.

    In float32 at least, without autocast: a matmul in 16 bits would lose the precision of the scores.
    """
    dtype, (_, _, tiles, t, group, size) = values.dtype, query.shape
    wide, height = torch.promote_types(dtype, torch.float32), TILE * group
    column, query_positions = torch.arange(keys.shape[2]), positions[:, None, :, :, None, None]
    masked = column > query_positions
    if scores.window is not None:
        masked = masked | (column <= query_positions - scores.window)
    with torch.autocast("cpu", enabled=False):
        q = (query.to(wide) * scores.scale).reshape(-1, t * group, size)
        logits = torch.cat([batched_matmul(q, k, height) for k in _blocks(keys.to(wide).transpose(2, 3), 3, tiles)], -1)
        logits = logits[..., : keys.shape[2]]
        if scores.softcap is not None:
            logits = scores.softcap * elementwise(torch.tanh, logits / scores.softcap)
        logits = logits.reshape(*query.shape[:5], -1).masked_fill(masked, float("-inf"))
        shares = elementwise(torch.exp, logits - logits.amax(-1, keepdim=True)).view(*q.shape[:2], -1)
        shares = pad(shares, (0, -keys.shape[2] % BLOCK))
        weight, total = 0.0, 0.0
        # one block after another: the order of a single sum would depend on the number of blocks
        for share, v in zip(shares.split(BLOCK, -1), _blocks(values.to(wide), 2, tiles)):
            share = share.contiguous()
            weight = weight + share.sum(-1, keepdim=True)
            total = total + batched_matmul(share, v, height)
        return (total / weight).to(dtype).view(query.shape)


def _blocks(x: torch.Tensor, dim: int, tiles: int) -> list[torch.Tensor]:
    """(b, HK, ...) in blocks of `dim`, (b HK tiles, ...), the last padded with zeros, repeated for every tile."""
    fill = -x.shape[dim] % BLOCK
    x = pad(x, (0, 0) * (3 - dim) + (0, fill)) if fill else x
    return [block[:, :, None].expand(-1, -1, tiles, -1, -1).flatten(0, 2) for block in x.split(BLOCK, dim)]
