"""The kernels of a reshard alone: what one of two ranks copies in a push, without the exchange.

    python benchmarks/reshard_kernels.py                              # one GPU
    python benchmarks/reshard_kernels.py --shape tiny --device cpu    # with the operators of torch

FSDP2 on two ranks in float32 to tensor-parallel halves in bfloat16. Milliseconds, the fastest of several pushes: `pack`
(what is sent), with `keep` (what the rank has already), with `store` (what it receives), `sums` of what is sent and
received, and `push`, all of them. `host`: until the last kernel is launched. `limit`: the bytes that must be read and
written at the rates of a cast and of a sum of one large block, measured in the same run.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from weight_sync import NARROW, SHAPES, model

from verl.rollout.native.slices import SliceReceiver, Slices
from verl.rollout.tensor_parallel import TensorParallel
from verl.utils.shards import Shard, whole
from verl.weight_sync.reshard.chunk_table import TensorList, readable_tensors
from verl.weight_sync.reshard.plan import RankLayout, make_plan
from verl.weight_sync.reshard.sync import RankPlan
from verl.weight_sync.verify import checksums, sums_of

RANKS = 2


def shards_of(module: torch.nn.Module, rank: int) -> tuple[Shard, ...]:
    """The rows that FSDP2 gives a rank."""
    shards = []
    for name, parameter in module.named_parameters():
        box = whole(tuple(parameter.shape))
        share = -(-box.rows // RANKS)
        top, bottom = (min(i * share, box.rows) for i in (rank, rank + 1))
        shards.append(Shard(name, tuple(parameter.shape), box._replace(top=top, bottom=bottom)))
    return tuple(shards)


def receiver_of(shape: str, rank: int, device: torch.device) -> SliceReceiver:
    """What a tensor-parallel rank stores."""
    module = model(shape, torch.device("meta"), NARROW)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    slices = Slices(module.config, TensorParallel(rank, RANKS))
    slices.cut(module)
    module.to_empty(device=device)
    module.tie_weights()
    return SliceReceiver(module, slices, shapes)


class Bench:
    """The share of rank 0."""

    def __init__(self, shape: str, device: torch.device, bucket_mib: int):
        self.device = device
        whole_model = model(shape, torch.device("meta"), torch.float32)
        receiver = receiver_of(shape, 0, device)
        receivers = [receiver, receiver_of(shape, 1, torch.device("meta"))]
        layouts = [RankLayout(shards_of(whole_model, rank), receivers[rank].slice_layout()) for rank in range(RANKS)]
        self.plan = make_plan(layouts, bucket_mib * 2**20)
        self.own = RankPlan(self.plan, 0, layouts[0], device)
        self.buckets = self.own.buckets
        with receiver.open_slices(0) as stored:
            self.stored = [stored[name] for name in self.own.names]
        self.shards = {key: torch.randn(shard.box.numel, device=device) for key, shard in self.own.shards.items()}

    def push(self, steps: str) -> None:
        device, targets, sums = self.device, TensorList(self.stored, self.device), []
        slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in self.own.slot_bytes]
        for number, bucket in enumerate(self.buckets):
            slot = slots[number % 2]
            buffer = TensorList([slot.view(bucket.dtype)], device)
            sources = readable_tensors([self.shards[key] for key in bucket.keys], device, bucket.dtype)
            if "pack" in steps:
                bucket.sends.copy(sources, buffer)
            if "keep" in steps:
                bucket.keeps.copy(sources, targets)
            if "store" in steps:
                bucket.receives.copy(buffer, targets)
            if "sums" in steps:
                segments = slot[: bucket.bytes].split([sum(bucket.sent), sum(bucket.received)])
                sums += [sums_of(segment) for segment in segments if len(segment)]
        if sums:
            checksums(sums)

    def milliseconds(self, call: Callable[[], object], launched: bool = False) -> float:
        """launched: without the time after the last launch."""
        best = math.inf
        for _ in range(6):
            self.synchronize()
            start = time.perf_counter()
            call()
            if not launched:
                self.synchronize()
            best = min(best, time.perf_counter() - start)
            self.synchronize()
        return 1e3 * best

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def limit(self) -> float:
        """Milliseconds for the bytes of a push."""
        size = 2**30 if self.device.type == "cuda" else 2**22
        wide, narrow = (torch.zeros(size, dtype=dtype, device=self.device) for dtype in (torch.float32, NARROW))
        cast = 6 * size / self.milliseconds(lambda: narrow.copy_(wide))
        read = 4 * size / self.milliseconds(lambda: wide.view(torch.int64).sum())
        own = sum(shard.numel() for shard in self.shards.values())
        received = self.plan.received[0]
        return (6 * own + 2 * received) / cast + 2 * received / read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bucket-mib", type=int, default=512)
    args = parser.parse_args()
    bench = Bench(args.shape, torch.device(args.device), args.bucket_mib)
    line = {"shape": args.shape, "device": args.device, "bucket_mib": args.bucket_mib, "buckets": len(bench.buckets)}
    line |= {"received_bytes": bench.plan.received[0], "kept_bytes": bench.plan.kept[0]}
    cases = {"pack": "pack", "keep": "pack keep", "store": "pack keep store", "sums": "sums"}
    for name, steps in (cases | {"push": "pack keep store sums"}).items():
        line[f"{name}_ms"] = round(bench.milliseconds(lambda steps=steps: bench.push(steps)), 2)
    line["host_ms"] = round(bench.milliseconds(lambda: bench.push("pack keep store sums"), launched=True), 2)
    line["limit_ms"] = round(bench.limit(), 2)
    line["ratio"] = round(line["push_ms"] / line["limit_ms"], 2)
    print(json.dumps(line | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
