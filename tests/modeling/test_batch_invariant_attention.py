"""Attention of a query depends on its row alone: packed with others, alone, or one token at a time over a cache."""

import math

import pytest
import torch

from verl.modeling.batch_invariant.attention import BLOCK, Scores, attend_cached, attend_rows

LENGTHS = (1, 150, 3, BLOCK, BLOCK + 1)
HEADS, KV_HEADS, SIZE = 6, 2, 12
CASES = [Scores(0.3), Scores(0.3, window=65), Scores(0.3, window=3), Scores(0.3, softcap=0.7)]


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    """query (N, HQ, D), key and value (N, HK, D) of LENGTHS."""
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), heads, SIZE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def by_loops(query, key, value, scores: Scores) -> torch.Tensor:
    """One row, in float64, query by query."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i in range(len(query)):
        first = 0 if scores.window is None else max(0, i - scores.window + 1)
        for h in range(HEADS):
            of = h // (HEADS // KV_HEADS)
            found = [scores.scale * float(query[i, h].double() @ key[j, of].double()) for j in range(first, i + 1)]
            if scores.softcap is not None:
                found = [scores.softcap * math.tanh(s / scores.softcap) for s in found]
            weights = [math.exp(s - max(found)) for s in found]
            parts = (w * value[first + j, of].double() for j, w in enumerate(weights))
            out[i, h] = sum(parts) / sum(weights)
    return out


@pytest.mark.fast("*window=65*")
@pytest.mark.parametrize("scores", CASES, ids=str)
def test_against_loops(scores):
    lengths = (1, BLOCK + 6, 3)
    query, key, value = (x[: sum(lengths)] for x in rows(torch.float32))
    found = attend_rows(query, key, value, lengths, scores)
    for one, *row in zip(found.split(lengths), query.split(lengths), key.split(lengths), value.split(lengths)):
        torch.testing.assert_close(one.double(), by_loops(*row, scores), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", CASES, ids=str)
def test_the_same_bits_packed_alone_and_from_a_cache(scores, dtype):
    query, key, value = rows(dtype)
    packed = attend_rows(query, key, value, LENGTHS, scores).split(LENGTHS)
    parts = [x.split(LENGTHS) for x in (query, key, value)]
    for i, length in enumerate(LENGTHS):
        q, k, v = (part[i] for part in parts)
        assert torch.equal(attend_rows(q, k, v, (length,), scores), packed[i])
        half = length // 2 + 1  # a prompt: the same row without its end
        assert torch.equal(attend_rows(q[:half], k[:half], v[:half], (half,), scores), packed[i][:half])
    # steps: all rows at once, each at its own position, over caches that hold more than a query may see
    width = max(LENGTHS) + 9
    keys, values = (torch.full((len(LENGTHS), KV_HEADS, width, SIZE), 7.0, dtype=dtype) for _ in range(2))
    for cache, part in ((keys, parts[1]), (values, parts[2])):
        for i, x in enumerate(part):
            cache[i, :, : len(x)] = x.transpose(0, 1)
    for back in (1, 2, 40):
        positions = torch.tensor([max(0, length - back) for length in LENGTHS])
        q = torch.stack([part[at] for part, at in zip(parts[0], positions)])
        expected = torch.stack([part[at] for part, at in zip(packed, positions)])
        assert torch.equal(attend_cached(q, keys, values, positions, scores), expected)
        some = slice(1, 3)
        assert torch.equal(attend_cached(q[some], keys[some], values[some], positions[some], scores), expected[some])
