"""Time and memory of weight pushes. One JSON line per case, then a table.

    python benchmarks/weight_sync.py --shape 7B                  # two GPUs
    python benchmarks/weight_sync.py --shape tiny --device cpu   # two processes

Weights are random: float32 in training, bfloat16 in the rollout. Cases:

- `split`: training on device 0, rollout on device 1 (`collective`).
- `replica`: FSDP2 on both devices, and an unsharded copy on each (`replica`).
- `full`: the same by `reshard`.
- `gather`: FSDP2 on both devices, and a tensor-parallel half of the model on each; all weights are gathered
  (`replica`).
- `slices`: the same by `reshard`: each device receives the chunks that it lacks.

`bytes`: sent to a rollout rank; `kept_bytes`: needed by it, and there already. `limit_seconds`: bytes of the push at
the rate measured in this run: a broadcast of one block (`split`), an all-gather of one block (`replica`,
`gather`), or an all-to-all of one block (`full`, `slices`). `ratio`: seconds / limit_seconds. `above_gib`: peak memory
of a push above the weights of both sides on that device. Seconds include the checksums in transit. Stored weights are
compared after the first push, which is not measured, and every `--check-every` pushes.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.engines.gathering import gather_tensors, local_shard, shard_of  # noqa: E402
from verl.rollout.native.slices import SliceReceiver, Slices  # noqa: E402
from verl.rollout.tensor_parallel import TensorParallel  # noqa: E402
from verl.single_controller.worker import free_port  # noqa: E402
from verl.utils.shards import Shard  # noqa: E402
from verl.weight_sync import (  # noqa: E402
    CollectiveSync,
    ModuleReceiver,
    ReplicaSync,
    ReshardSync,
    SyncReport,
    TransferGroup,
    receive_collective,
)

#: hidden size, MLP, layers, heads, key-value heads, vocabulary
SHAPES = {
    "tiny": (256, 1024, 4, 8, 2, 8000),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
}
CASES = ("split", "replica", "full", "gather", "slices")
NARROW = torch.bfloat16


def model(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A model with random weights; on "meta" without memory."""
    hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=shape in ("0.5B", "1.5B"),
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if device.type != "meta":
        module.to_empty(device=device)
        module.tie_weights()
        fill(module)
    return module.requires_grad_(False)


def fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)


class Source:
    """The part of a training engine that a sync reads."""

    replicas = ()

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.layout: list[Shard] | None = None

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_tensors(self.module.named_parameters(), dtype)

    def shard_layout(self) -> list[Shard]:
        if self.layout is None:
            self.layout = [shard_of(name, tensor) for name, tensor in self.module.named_parameters()]
        return self.layout

    def shards(self) -> Iterator[torch.Tensor]:
        return (local_shard(tensor) for tensor in self.module.parameters())


class Bench:
    """One of two processes."""

    def __init__(self, rank: int, args: argparse.Namespace, port: int):
        self.rank, self.args, self.port = rank, args, port
        self.is_gpu = args.device == "cuda"
        self.device = torch.device("cuda", rank) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.is_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
        )
        self.host = dist.new_group(backend="gloo")

    def run(self) -> None:
        for case in self.args.cases:
            records = getattr(self, case)()
            if self.is_gpu:
                torch.cuda.empty_cache()
            reports = [None, None]
            dist.all_gather_object(reports, records, self.host)
            if self.rank == 0:
                self.report(case, reports)
        dist.destroy_process_group()

    def report(self, case: str, records: list[dict]) -> None:
        size = max(side["bytes"] for side in records)
        seconds = max(side["seconds"] for side in records)
        line = {
            "case": case,
            "shape": self.args.shape,
            "device": torch.cuda.get_device_name() if self.is_gpu else "cpu",
            "bytes": size,
            "kept_bytes": max(side["kept"] for side in records),
            "seconds": round(seconds, 4),
            "gb_per_second": round(size / seconds / 1e9, 2),
            "above_gib": [round(side["above"] / 2**30, 3) for side in records],
            "bucket_mib": self.args.bucket_mib,
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)

    def measure(self, push: Callable[[int], SyncReport]) -> dict:
        """The fastest of several pushes after the first one, and the peak memory of all but the first."""
        push(0)
        before = self.memory()
        seconds, above, report = math.inf, 0, None
        for version in range(1, 1 + self.args.pushes):
            if self.is_gpu:
                torch.cuda.reset_peak_memory_stats()
            dist.barrier(self.host)
            start = time.perf_counter()
            report = push(version)
            if self.is_gpu:
                torch.cuda.synchronize()
                above = max(above, torch.cuda.max_memory_allocated() - before)
            dist.barrier(self.host)
            seconds = min(seconds, time.perf_counter() - start)
        return {
            "bytes": report.bytes,
            "kept": report.kept,
            "seconds": seconds,
            "above": above,
        }

    def memory(self) -> int:
        if not self.is_gpu:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    # ---- cases --------------------------------------------------------------------------------------------------

    def split(self) -> dict:
        ports = [free_port()]
        dist.broadcast_object_list(ports, 0, self.host)
        group = TransferGroup(("127.0.0.1", ports[0]), self.rank, 2, self.device, 600.0)
        if self.rank == 0:
            source = Source(model(self.args.shape, self.device, torch.float32))
            sync = CollectiveSync(group, NARROW, self.args.bucket_mib * 2**20, check_every=self.args.check_every)
            return self.measure(lambda version: sync.push(source, version))
        receiver = ModuleReceiver(model(self.args.shape, self.device, NARROW), filled=True)
        return self.measure(lambda version: receive_collective(receiver, group, version))

    def _sharded(self) -> Source:
        module = model(self.args.shape, torch.device("meta"), torch.float32)
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)
        module.to_empty(device=self.device)
        fill(module)
        return Source(module)

    def _colocated(self, receiver, reshard: bool = False) -> dict:
        source = self._sharded()
        engine = SimpleNamespace(receiver=lambda: receiver, weight_version=0)
        if reshard:
            sync = ReshardSync(engine, self.device, self.args.bucket_mib * 2**20, check_every=self.args.check_every)
            return self.measure(lambda version: sync.push(source, version))
        sync = ReplicaSync(engine, NARROW, check_every=self.args.check_every)
        return self.measure(lambda version: sync.push(source, version))

    def _slices(self) -> SliceReceiver:
        module, tp = model(self.args.shape, torch.device("meta"), NARROW), TensorParallel(self.rank, 2)
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        slices = Slices(module.config, tp)
        slices.cut(module)
        module.to_empty(device=self.device)
        module.tie_weights()
        return SliceReceiver(module, slices, shapes)

    def replica(self) -> dict:
        return self._colocated(ModuleReceiver(model(self.args.shape, self.device, NARROW), filled=True))

    def full(self) -> dict:
        return self._colocated(ModuleReceiver(model(self.args.shape, self.device, NARROW), filled=True), reshard=True)

    def gather(self) -> dict:
        return self._colocated(self._slices())

    def slices(self) -> dict:
        return self._colocated(self._slices(), reshard=True)


def work(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    Bench(rank, args, port).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--pushes", type=int, default=3, help="measured pushes of a case")
    parser.add_argument("--check-every", type=int, default=10, help="as rollout.check_every")
    args = parser.parse_args()
    args.cases = args.cases.split(",")
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"--cases: expected names of {', '.join(CASES)}, found {', '.join(sorted(unknown))}")
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=work, args=(rank, args, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main()
