"""Speed of the decode attention kernel on a GPU by launch options, as a table with the memory floor.

    python benchmarks/attention.py                 # all combinations, a few seconds each to compile
    python benchmarks/attention.py --warps 4 --stages 2,3,4 --blocks 1,2 --programs 512,1024

Every layer has its own keys and values, so that calls cycle through enough memory to miss the L2 cache. `floor` is the
time to read keys and values once, at the copy speed measured in the same run.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from rollout import SHAPES, aligned, measure_speed  # noqa: E402

from verl.rollout.native import cuda_decoder, triton_kernels  # noqa: E402
from verl.rollout.native.model import read_decoder  # noqa: E402

#: shape, rows, tokens of context
CASES = [("0.5B", 64, 256), ("0.5B", 256, 256), ("0.5B", 1024, 384), ("0.5B", 256, 1536), ("7B", 256, 768)]
LAYERS = 12


def microseconds(run, count: int = 20) -> float:
    """Microseconds of one of the LAYERS calls that `run` makes, captured as a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / count / LAYERS


@torch.inference_mode()
def measure(name: str, rows: int, context: int, options: list[tuple], bytes_per_second: float) -> list[list]:
    config = Qwen2Config(**SHAPES[name] | {"num_hidden_layers": LAYERS, "vocab_size": 64})
    with torch.device("cuda"):
        decoder = read_decoder(Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16))
    width = -(-context // triton_kernels.BLOCK_SIZE)
    size = cuda_decoder.Size(rows, rows * width, width, 1, width * triton_kernels.BLOCK_SIZE)
    buffers = cuda_decoder.StaticBuffers(decoder, size, size.blocks)
    buffers.kv_cache.normal_()
    buffers.table.copy_(torch.randperm(rows * width, device="cuda").view(rows, width))
    buffers.state[triton_kernels.POSITION] = context - 1
    buffers.state[triton_kernels.STATUS] = triton_kernels.LIVE
    engine = cuda_decoder.CudaDecoder(decoder, buffers)
    qkv = torch.randn(rows, (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim, device="cuda").bfloat16()

    def run() -> None:
        for layer, kv_cache in zip(decoder.layers, buffers.kv_cache):
            engine._paged_attention(layer, qkv, kv_cache)

    floor = rows * context * 2 * decoder.kv_heads * decoder.head_dim * 2 / bytes_per_second * 1e6
    lines = []
    for warps, stages, blocks_at_once, programs in options:
        launch = {"num_warps": warps, "num_stages": stages, "ROUND": blocks_at_once}
        cuda_decoder.attention_launch = lambda rows, head_dim, launch=launch: launch
        cuda_decoder.TARGET_PROGRAMS = programs
        took = microseconds(run)
        setting = [name, rows, context, warps, stages, blocks_at_once, programs]
        lines.append([*setting, f"{took:.1f}", f"{floor:.1f}", f"{took / floor:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", default="1,2,4,8")
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--blocks", default="1,2", help="KV-cache blocks read at once")
    parser.add_argument(
        "--programs", default="512", help="split the keys of a row over several programs below this number"
    )
    args = parser.parse_args()
    lists = (args.warps, args.stages, args.blocks, args.programs)
    options = list(itertools.product(*([int(n) for n in text.split(",")] for text in lists)))
    speed = measure_speed(torch.device("cuda"), torch.bfloat16).bytes
    rows = [["shape", "rows", "context", "warps", "stages", "blocks", "programs", "us", "floor us", "x floor"]]
    for case in CASES:
        rows += measure(*case, options, speed)
        print(aligned([rows[0], *rows[-len(options) :]]), flush=True)


if __name__ == "__main__":
    main()
