"""Attention over packed sequences: FLOP/s of torch's kernels, forward and backward, on one GPU.

    python benchmarks/train_attention.py

`varlen`: all sequences in one call. `row-*`: one call of scaled_dot_product_attention per sequence, with the named
backend; `-expanded` repeats the key heads. Causal: half of the square counts; backward counts 2.5 times the forward.
"""

import json
import statistics
import traceback

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {  # rows, tokens of a row, heads, key heads, head size
    "0.5B 640": (25, 640, 14, 2, 64),
    "0.5B 4k": (4, 4096, 14, 2, 64),
    "0.6B 640": (25, 640, 16, 8, 128),
    "0.6B 4k": (4, 4096, 16, 8, 128),
    "0.6B 16k": (1, 16384, 16, 8, 128),
    "4B 64k": (1, 65536, 32, 8, 128),
}


def varlen(q, k, v, rows: int, length: int) -> torch.Tensor:
    starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    return varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0))


def by_row(backend: SDPBackend, expanded: bool):
    def attend(q, k, v, rows: int, length: int) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        if expanded:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        parts = []
        with sdpa_kernel(backend):
            for pieces in zip(*(x.split(length) for x in (q, k, v))):
                a, b, c = (x.transpose(0, 1)[None] for x in pieces)
                out = scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=groups > 1 and not expanded)
                parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


KERNELS = {
    "varlen": varlen,
    "row-flash": by_row(SDPBackend.FLASH_ATTENTION, False),
    "row-cudnn": by_row(SDPBackend.CUDNN_ATTENTION, False),
    "row-cudnn-expanded": by_row(SDPBackend.CUDNN_ATTENTION, True),
}


def milliseconds(call) -> float:
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def measure(name: str, kernel: str) -> dict:
    rows, length, heads, key_heads, head = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(rows * length, h, head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, key_heads, key_heads)
    )
    attend = KERNELS[kernel]
    out = attend(q, k, v, rows, length)
    g = torch.randn_like(out)
    expected = varlen(q, k, v, rows, length)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), g)
    gradients = torch.autograd.grad(out, (q, k, v), g)
    apart = max(
        ((a - b).float().norm() / b.float().norm()).item()
        for a, b in zip((out, *gradients), (expected, *expected_gradients))
    )
    forward = milliseconds(lambda: attend(q, k, v, rows, length))

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, rows, length), (q, k, v), g)

    together = milliseconds(both)
    flop = 4 * rows * heads * head * length * (length + 1) / 2
    return {
        "benchmark": "train_attention",
        "shape": name,
        "kernel": kernel,
        "forward_ms": round(forward, 3),
        "backward_ms": round(together - forward, 3),
        "forward_tflops": round(flop / forward / 1e9, 1),
        "backward_tflops": round(2.5 * flop / (together - forward) / 1e9, 1),
        "apart_from_varlen": round(apart, 5),
    }


def main() -> None:
    for name in SHAPES:
        for kernel in KERNELS:
            try:
                print(json.dumps(measure(name, kernel)), flush=True)
            except Exception:  # a kernel that refuses a shape does not cost the others
                traceback.print_exc()


if __name__ == "__main__":
    main()
