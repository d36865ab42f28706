"""Bytes and seconds of the transition from training to generation, with the groups of HybridFlow and vanilla ones.

    python benchmarks/reshard_groups.py                  # 4 and 8 processes, gloo, a few minutes on two cores
    python benchmarks/reshard_groups.py --ranks 4 --pushes 1 --hidden 64
    python benchmarks/reshard_groups.py --ranks 4 --device cuda --shape 7B --bucket-mib 512  # four GPUs

Training splits a random Qwen2 over p pipeline stages, t tensor-parallel ranks and d replicas, generation over p_g and
t_g (Sheng et al. 2024, arXiv 2409.19256, section 5). Every line is one layout and one way:

- `strided`: groups at a stride, `reshard` (HybridFlow).
- `vanilla`: consecutive groups; every rank gathers all weights of its training replica, parameter by parameter, and
  keeps its slices (HybridFlow-V). This is what `weight_sync=replica` does with strategy=megatron.
- `consecutive`: consecutive groups, `reshard`.

Weights are float32, on GPUs bfloat16. Received bytes are counted in the collectives of a push: `mean_bytes` and
`max_bytes` of a rank, and `share`, the mean relative to all weights; `formula` is that of the paper's table 2, for
weights that all ranks divide evenly. Norms are on every rank of a stage. `seconds`: the median push of the slowest
rank, by both ways. What is stored is compared with the weights bit by bit.
`less_bytes` and `less_seconds`: relative to `vanilla` of the same layout. `vanilla` has one collective per parameter
and stage, `reshard` one per bucket: `consecutive` shows what of the seconds is due to that. On GPUs also
`above_gib`, the peak memory of a push above the weights of both sides.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from weight_sync import SHAPES  # noqa: E402

from tests.hybrid_groups import HybridGroups  # noqa: E402
from verl.rollout.native.slices import Slices  # noqa: E402
from verl.rollout.tensor_parallel import TensorParallel  # noqa: E402
from verl.single_controller.worker import free_port  # noqa: E402
from verl.utils.shards import Shard, matrix_shape  # noqa: E402
from verl.weight_sync import ReshardSync, SlicedWeights  # noqa: E402
from verl.weight_sync.reshard.plan import Stored  # noqa: E402
from verl.weight_sync.reshard.sync import Peers  # noqa: E402

#: (p, t, d, p_g, t_g) by number of processes; 1-4-2 -> 1-2 is the paper's example
LAYOUTS = {
    4: [(1, 4, 1, 1, 1), (1, 4, 1, 1, 2), (1, 2, 2, 1, 1), (2, 2, 1, 1, 2), (2, 2, 1, 2, 1)],
    8: [(1, 8, 1, 1, 2), (1, 8, 1, 1, 4), (1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (2, 2, 2, 1, 2), (2, 4, 1, 2, 2)],
}
WAYS = ("vanilla", "consecutive", "strided")
LAYERS, HEADS, VOCABULARY = 4, 8, 4000  # of the small model


class Model:
    """The shapes of a Qwen2, and where its parameters are.

    Args:
        sizes: hidden size, MLP, layers, heads, key-value heads, vocabulary.
        device: of the weights, which are float32 on a CPU and bfloat16 on a GPU.
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        hidden, mlp, layers, heads, kv_heads, vocabulary = sizes
        self.config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
        )
        self.device, self.dtype = device, torch.float32 if device.type == "cpu" else torch.bfloat16
        with torch.device("meta"):
            named_parameters = AutoModelForCausalLM.from_config(self.config).named_parameters()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters}

    def stage(self, name: str, stages: int) -> int:
        """The pipeline stage of a parameter."""
        if ".layers." in name:
            return int(name.split(".")[2]) * stages // self.config.num_hidden_layers
        return 0 if "embed_tokens" in name else stages - 1

    def full(self, name: str) -> torch.Tensor:
        """The values of a parameter, the same on every rank."""
        seed = list(self.shapes).index(name)
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(self.shapes[name], generator=generator, device=self.device, dtype=self.dtype)

    def stored(self, slices: Slices, name: str, stored: bool) -> Stored:
        """What a rank has of a parameter: its slice, or nothing."""
        shape = self.shapes[name]
        if not stored:
            return Stored(shape, 0, matrix_shape(shape)[1], (), self.dtype)
        return slices.stored(name, shape, self.dtype)


class Training:
    """The shards of a rank in training: a `ShardSource`."""

    def __init__(self, model: Model, groups: HybridGroups, rank: int):
        self.model, self.groups = model, groups
        self.stage, tensor, replica = groups.training(rank)
        self.replicas = (replica,)
        self.slices = Slices(model.config, TensorParallel(tensor, groups.tp))
        local_names = [name for name in model.shapes if model.stage(name, groups.pp) == self.stage]
        self.tensors = {name: self.slices.slice_of(name, model.full(name)).clone() for name in local_names}
        self._layout = [
            Shard(name, model.shapes[name], model.stored(self.slices, name, True).chunks[0].box) for name in local_names
        ]
        self._tensor = _own_group(groups.rank_groups("tp"), rank)
        self._pipeline = _own_group(groups.rank_groups("pp"), rank)

    def shard_layout(self) -> Sequence[Shard]:
        return self._layout

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        return self.weights()

    def shards(self) -> Iterator[torch.Tensor]:
        yield from self.tensors.values()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights: each stage gets the shards of the others, and gathers."""
        model, size = self.model, self.groups.tp
        for name, shape in model.shapes.items():
            source = model.stage(name, self.groups.pp)
            like = self.slices.slice_of(name, torch.empty(shape, device="meta"))
            local = self.tensors.get(name)
            if local is None:
                local = torch.empty(like.shape, device=model.device, dtype=model.dtype)
            if self.groups.pp > 1:
                dist.broadcast(local, dist.get_process_group_ranks(self._pipeline)[source], group=self._pipeline)
            if local.shape == shape:
                yield name, local
                continue
            shards = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(shards, local, group=self._tensor)
            dimension = next(i for i, (a, b) in enumerate(zip(shape, local.shape)) if a != b)
            yield name, torch.cat(shards, dimension)


class Generation(SlicedWeights):
    """What a rank stores in generation."""

    def __init__(self, model: Model, groups: HybridGroups, rank: int):
        stage, tensor, _ = groups.generation(rank)
        self.model = model
        self.slices = Slices(model.config, TensorParallel(tensor, groups.generation_tp))
        self.own = {name for name in model.shapes if model.stage(name, groups.generation_pp) == stage}
        self._layout = {name: model.stored(self.slices, name, name in self.own) for name in model.shapes}
        self.tensors = {
            name: torch.empty(stored.rows, stored.columns, device=model.device, dtype=model.dtype)
            for name, stored in self._layout.items()
        }

    def slice_layout(self) -> Mapping[str, Stored]:
        return self._layout

    def open_slices(self, version: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(self.tensors)

    def receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keep the slices of all weights."""
        for name, full in weights:
            if name in self.own:
                target = self.tensors[name]
                target.copy_(self.slices.slice_of(name, full).reshape(target.shape))

    def check(self) -> None:
        """Compare what is stored with the weights, and forget it."""
        for name in self.own:
            expected = self.slices.slice_of(name, self.model.full(name))
            assert torch.equal(self.tensors[name], expected.reshape(self.tensors[name].shape)), name
            self.tensors[name].fill_(float("nan"))


class Counter:
    """Bytes that this rank receives in the collectives of a push."""

    def __init__(self) -> None:
        self.bytes = 0
        gather, broadcast, exchange = dist.all_gather, dist.broadcast, Peers.start_exchange

        def all_gather(outputs: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
            self.bytes += sum(x.nbytes for x in outputs) - local.nbytes
            gather(outputs, local, group=group)

        def broadcast_(tensor: torch.Tensor, source: int, group: Any) -> None:
            self.bytes += tensor.nbytes if dist.get_rank() != source else 0
            broadcast(tensor, source, group=group)

        def start_exchange(peers: Peers, received: Any, sent: Any, counts: list[int], sizes: list[int]) -> Any:
            self.bytes += sum(counts)
            return exchange(peers, received, sent, counts, sizes)

        dist.all_gather, dist.broadcast, Peers.start_exchange = all_gather, broadcast_, start_exchange


def _own_group(groups: list[list[int]], rank: int) -> Any:
    """The process group of a rank. Collective."""
    created = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in created if rank in ranks)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    way: str, groups: HybridGroups, model: Model, args: argparse.Namespace, counter: Counter
) -> dict[str, float]:
    """Bytes that this rank receives in a push, its median seconds, and bytes above the weights of both sides."""
    rank, device = dist.get_rank(), model.device
    training, generation = Training(model, groups, rank), Generation(model, groups, rank)
    rollout = SimpleNamespace(receiver=lambda: generation, weight_version=None)
    sync = ReshardSync(rollout, device, args.bucket_mib * 2**20, check_every=0)
    seconds, above = [], 0
    for version in range(1 + args.pushes):  # the first one makes the plan
        _synchronize(device)
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start, counter.bytes = time.perf_counter(), 0
        if way == "vanilla":
            generation.receive(training.weights())
        else:
            sync.push(training, version)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            above = torch.cuda.max_memory_allocated(device) - before
        generation.check()
    return {"bytes": counter.bytes, "seconds": statistics.median(seconds[1:]), "above": above}


def work(rank: int, ranks: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    small = (args.hidden, 4 * args.hidden, LAYERS, HEADS, HEADS, VOCABULARY)
    model = Model(SHAPES[args.shape] if args.shape else small, device)
    counter, total = Counter(), sum(model.dtype.itemsize * torch.Size(shape).numel() for shape in model.shapes.values())
    for sizes in LAYOUTS[ranks]:
        vanilla: dict[str, Any] = {}
        for way in WAYS:
            groups = HybridGroups(*sizes, strided=way == "strided")
            results: list[Any] = [None] * ranks
            dist.all_gather_object(results, measure(way, groups, model, args, counter))
            line = {"layout": "{}-{}-{} -> {}-{}".format(*sizes), "ranks": ranks, "way": way, "model_bytes": total}
            line |= summary(results, total, device.type == "cuda")
            line["formula"] = None if way == "consecutive" else float(groups.communication)
            vanilla = vanilla or line
            line["less_bytes"] = round(1 - line["mean_bytes"] / vanilla["mean_bytes"], 3)
            line["less_seconds"] = round(1 - line["seconds"] / vanilla["seconds"], 3)
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def summary(results: list[dict[str, float]], total: int, on_gpu: bool) -> dict[str, Any]:
    """The figures of a line, from those of all ranks."""
    received, seconds = [result["bytes"] for result in results], max(result["seconds"] for result in results)
    mean = sum(received) / len(results)
    line = {"mean_bytes": mean, "max_bytes": max(received), "share": round(mean / total, 4)}
    line["seconds"] = round(seconds, 4)
    if on_gpu:
        line["above_gib"] = round(max(result["above"] for result in results) / 2**30, 2)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="processes")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model, a multiple of 8")
    parser.add_argument(
        "--shape",
        choices=("7B",),
        help="of Qwen2.5-7B instead of --hidden; for 4 ranks",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=5, help="measured pushes of a layout")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for ranks in args.ranks:
        port = free_port()
        processes = [context.Process(target=work, args=(rank, ranks, args, port)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)


if __name__ == "__main__":
    main()
