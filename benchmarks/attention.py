"""Speed of the decode attention kernel on a GPU by launch options, as a table with the memory floor.

    python benchmarks/attention.py                 # all combinations, a few seconds each to compile
    python benchmarks/attention.py --warps 4 --stages 2,3,4 --pages 1,2 --programs 512,1024

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
    """Seconds of one of the LAYERS calls that `run` makes, captured as a CUDA graph."""
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
    width = -(-context // triton_kernels.PAGE)
    size = cuda_decoder.Size(rows, rows * width, width, 1, width * triton_kernels.PAGE)
    arena = cuda_decoder.Arena(decoder, size, size.pages)
    arena.pages.normal_()
    arena.table.copy_(torch.randperm(rows * width, device="cuda").view(rows, width))
    arena.state[triton_kernels.POSITION] = context - 1
    arena.state[triton_kernels.STATUS] = triton_kernels.LIVE
    engine = cuda_decoder.CudaDecoder(decoder, arena)
    qkv = torch.randn(rows, (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim, device="cuda").bfloat16()

    def run() -> None:
        for layer, pages in zip(decoder.layers, arena.pages):
            engine._attend_pages(layer, qkv, pages)

    floor = rows * context * 2 * decoder.kv_heads * decoder.head_dim * 2 / bytes_per_second * 1e6
    lines = []
    for warps, stages, pages_at_once, programs in options:
        launch = {"num_warps": warps, "num_stages": stages, "ROUND": pages_at_once}
        cuda_decoder.attention_launch = lambda rows, head_dim, launch=launch: launch
        cuda_decoder._ENOUGH_PROGRAMS = programs
        took = microseconds(run)
        setting = [name, rows, context, warps, stages, pages_at_once, programs]
        lines.append([*setting, f"{took:.1f}", f"{floor:.1f}", f"{took / floor:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", default="1,2,4,8")
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--pages", default="1,2", help="pages read at once")
    parser.add_argument(
        "--programs", default="512", help="split the keys of a row over several programs below this number"
    )
    args = parser.parse_args()
    lists = (args.warps, args.stages, args.pages, args.programs)
    options = list(itertools.product(*([int(n) for n in text.split(",")] for text in lists)))
    speed = measure_speed(torch.device("cuda"), torch.bfloat16).bytes
    rows = [["shape", "rows", "context", "warps", "stages", "pages", "programs", "us", "floor us", "x floor"]]
    for case in CASES:
        rows += measure(*case, options, speed)
        print(aligned([rows[0], *rows[-len(options) :]]), flush=True)


if __name__ == "__main__":
    main()
