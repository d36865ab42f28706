"""Tile sizes of the kernels of `rollout.deterministic`: speed, and whether the results are bitwise equal. On a GPU.

    python benchmarks/invariant_tiles.py

GEMMs at the shape of Qwen2.5-0.5B compared with cuBLAS, attention over packed sequences and over KV-cache blocks.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.modeling.batch_invariant import triton_kernels  # noqa: E402
from verl.modeling.batch_invariant.attention import Scores  # noqa: E402

#: of GEMMs: rows, outputs, addends, warps, stages
FEW = ((64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 64, 256, 4, 3))
FEW += ((64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 32, 256, 4, 3))
MANY = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4))


def timed(function: Callable[..., torch.Tensor], *arguments) -> tuple[float, torch.Tensor]:
    """(milliseconds of one of many calls, its result)."""
    out = function(*arguments)
    return do_bench(lambda: function(*arguments), warmup=20, rep=60), out


def product_tiles(device: torch.device) -> None:
    """Tiles of the GEMM: speed compared with cuBLAS, and whether results equal those of the default tiles."""
    used = triton_kernels.TILES[2]
    print("GEMM, bf16: TFLOP/s of tiles (rows x outputs x addends, warps, stages); = where the bits are those used")
    for inside, outside in ((896, 896), (896, 4864), (4864, 896), (896, 151936)):
        for rows, options in ((64, FEW), (256, FEW), (1024, FEW), (4096, MANY), (16384, MANY)):
            if rows * outside > 2**30:
                continue
            torch.manual_seed(0)
            x, weight = (torch.randn(n, inside, device=device, dtype=torch.bfloat16) for n in (rows, outside))
            flops = 2e-9 * rows * inside * outside
            milliseconds, _ = timed(torch.nn.functional.linear, x, weight)
            rates = [f"cuBLAS {flops / milliseconds:.0f}"]
            reference = triton_kernels.linear(x, weight)
            for option in options:
                triton_kernels.TILES[2] = dict(zip(("BM", "BN", "BK", "num_warps", "num_stages"), option))
                milliseconds, out = timed(triton_kernels.linear, x, weight)
                same = "=" if torch.equal(out, reference) else "x"
                name = "x".join(map(str, option[:3]))
                rates.append(f"{name},{option[3]},{option[4]} {flops / milliseconds:.0f}{same}")
            triton_kernels.TILES[2] = used
            print(f"{rows:6} {inside:5} -> {outside:6}: " + "  ".join(rates), flush=True)


def attention_tiles(device: torch.device) -> None:
    """Tiles of queries: milliseconds of packed sequences and of decoding steps, and their difference."""
    heads, key_heads, size, rows, length = 14, 2, 64, 256, 384
    lengths, scores = (length,) * (rows // 8), Scores(size**-0.5)
    q, k, v = (torch.randn(sum(lengths), h, size, device=device, dtype=torch.bfloat16) for h in (heads, 2, 2))
    blocks = length // triton_kernels.BLOCK
    kv_cache = torch.zeros(2, rows * blocks, key_heads, triton_kernels.BLOCK, size, device=device, dtype=torch.bfloat16)
    for store, part in zip(kv_cache, (k, v)):
        packed = part.view(len(lengths), blocks, triton_kernels.BLOCK, key_heads, size).transpose(2, 3).flatten(0, 1)
        store[: len(packed)] = packed
    table = torch.arange(rows * blocks, device=device, dtype=torch.int32).view(rows, blocks)
    positions = torch.full((rows,), length - 1, device=device, dtype=torch.int32)
    tiles = triton_kernels.single_queries(positions, torch.ones_like(positions))
    last = torch.zeros(rows, heads, size, device=device, dtype=torch.bfloat16)
    last[: len(lengths)] = q.view(len(lengths), length, heads, size)[:, -1]
    reference = triton_kernels.attend_rows(q, k, v, lengths, scores)
    print(f"attention, bf16: ms of {len(lengths)} rows of {length}, of a step of {rows} such rows, whether they agree")
    used = triton_kernels.QUERIES, triton_kernels.ATTENTION
    for queries, warps, stages in itertools.product((16, 32, 64), (2, 4), (2, 3)):
        triton_kernels.QUERIES, triton_kernels.ATTENTION = queries, {"num_warps": warps, "num_stages": stages}
        all_rows, out = timed(triton_kernels.attend_rows, q, k, v, lengths, scores)
        step, cached = timed(triton_kernels.attend_cached, last, *kv_cache, tiles, table, scores)
        same = torch.equal(cached[: len(lengths)], out.view(len(lengths), length, heads, size)[:, -1])
        verdict = (
            f"{'equal' if same else 'DIFFERENT'}, {'' if torch.equal(out, reference) else 'not '}those of the used"
        )
        print(
            f"  {queries:4} queries, {warps} warps, {stages} stages: {all_rows:.3f}  {step:.3f}  {verdict}", flush=True
        )
    triton_kernels.QUERIES, triton_kernels.ATTENTION = used


if __name__ == "__main__":
    product_tiles(torch.device("cuda"))
    attention_tiles(torch.device("cuda"))
