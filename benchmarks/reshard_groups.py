"""Bytes and seconds of the transition from training to generation, with the groups of HybridFlow and vanilla ones.

    python benchmarks/reshard_groups.py                  # 4 and 8 processes, gloo, a few minutes on two cores
    python benchmarks/reshard_groups.py --ranks 4 --pushes 1 --hidden 64

Training splits a random Qwen2 over p pipeline stages, t tensor-parallel ranks and d replicas, generation over p_g and
t_g (Sheng et al. 2024, arXiv 2409.19256, section 5). Every line is one layout and one way:

- `strided`: groups at a stride, `reshard` (HybridFlow).
- `vanilla`: consecutive groups; every rank gathers all weights of its training replica, parameter by parameter, and
  keeps its slices (HybridFlow-V). This is what `weight_sync=replica` does with strategy=megatron.
- `consecutive`: consecutive groups, `reshard`.

Received bytes are counted in the collectives of a push, in float32: `mean_bytes` and `max_bytes` of a rank, and
`share`, the mean relative to all weights; `formula` is that of the paper's table 2, for weights that all ranks divide
evenly. Norms are on every rank of a stage. `seconds`: the median push of the slowest rank, with the checksums of
`reshard` and none of `vanilla`. What is stored is compared with the weights bit by bit. `less_bytes` and
`less_seconds`: relative to `vanilla` of the same layout. `vanilla` has one collective per parameter and stage,
`reshard` one per bucket: `consecutive` shows what of the seconds is due to that.
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
from verl.rollout.native.slices import Slices  # noqa: E402
from verl.rollout.tensor_parallel import TensorParallel  # noqa: E402
from verl.rollout.weight_sync import ReshardSync, SlicedWeights  # noqa: E402
from verl.rollout.weight_sync.grouping import HybridGroups  # noqa: E402
from verl.rollout.weight_sync.plan import Stored  # noqa: E402
from verl.rollout.weight_sync.reshard import Peers  # noqa: E402
from verl.single_controller.worker import free_port  # noqa: E402
from verl.utils.shards import Shard, matrix_shape  # noqa: E402

#: (p, t, d, p_g, t_g) by number of processes; 1-4-2 -> 1-2 is the paper's example
LAYOUTS = {
    4: [(1, 4, 1, 1, 1), (1, 4, 1, 1, 2), (1, 2, 2, 1, 1), (2, 2, 1, 1, 2), (2, 2, 1, 2, 1)],
    8: [(1, 8, 1, 1, 2), (1, 8, 1, 1, 4), (1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (2, 2, 2, 1, 2), (2, 4, 1, 2, 2)],
}
WAYS = ("vanilla", "consecutive", "strided")
LAYERS, VOCABULARY = 4, 4000


class Model:
    """The shapes of a small Qwen2, and where its parameters are. hidden: its hidden size."""

    def __init__(self, hidden: int):
        self.config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            named = AutoModelForCausalLM.from_config(self.config).named_parameters()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}

    def stage(self, name: str, stages: int) -> int:
        """The pipeline stage of a parameter."""
        if ".layers." in name:
            return int(name.split(".")[2]) * stages // LAYERS
        return 0 if "embed_tokens" in name else stages - 1

    def full(self, name: str) -> torch.Tensor:
        """The values of a parameter, the same on every rank."""
        seed = list(self.shapes).index(name)
        return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(seed))

    def stored(self, slices: Slices, name: str, stored: bool) -> Stored:
        """What a rank has of a parameter: its slice, or nothing."""
        shape = self.shapes[name]
        if not stored:
            return Stored(shape, 0, matrix_shape(shape)[1], (), torch.float32)
        return slices.stored(name, shape, torch.float32)


class Training:
    """The shards of a rank in training: a `ShardSource`."""

    def __init__(self, model: Model, groups: HybridGroups, rank: int):
        self.model, self.groups = model, groups
        self.stage, tensor, replica = groups.training(rank)
        self.replicas = (replica,)
        self.slices = Slices(model.config, TensorParallel(tensor, groups.tp))
        own = [name for name in model.shapes if model.stage(name, groups.pp) == self.stage]
        self.tensors = {name: self.slices.of(name, model.full(name)).contiguous() for name in own}
        self._layout = [
            Shard(name, model.shapes[name], model.stored(self.slices, name, True).chunks[0].box) for name in own
        ]
        self._tensor = _own_group(groups.of("tp"), rank)
        self._pipeline = _own_group(groups.of("pp"), rank)

    def shard_layout(self) -> Sequence[Shard]:
        return self._layout

    def shards(self) -> Iterator[torch.Tensor]:
        yield from self.tensors.values()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights: each stage gets the shards of the others, and gathers."""
        model, size = self.model, self.groups.tp
        for name, shape in model.shapes.items():
            source = model.stage(name, self.groups.pp)
            like = self.slices.of(name, torch.empty(shape, device="meta"))
            local = self.tensors[name] if source == self.stage else torch.empty(like.shape)
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
        self.tensors = {name: torch.empty(each.rows, each.columns) for name, each in self._layout.items()}

    def slice_layout(self) -> Mapping[str, Stored]:
        return self._layout

    def open_slices(self, version: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(self.tensors)

    def receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keep the slices of all weights."""
        for name, full in weights:
            if name in self.own:
                own = self.tensors[name]
                own.copy_(self.slices.of(name, full).reshape(own.shape))

    def check(self) -> None:
        """Compare what is stored with the weights, and forget it."""
        for name in self.own:
            wanted = self.slices.of(name, self.model.full(name))
            assert torch.equal(self.tensors[name], wanted.reshape(self.tensors[name].shape)), name
            self.tensors[name].fill_(float("nan"))


class Counter:
    """Bytes that this rank receives in the collectives of a push."""

    def __init__(self) -> None:
        self.bytes = 0
        gather, broadcast, exchange = dist.all_gather, dist.broadcast, Peers.start_exchange

        def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
            self.bytes += sum(x.nbytes for x in outputs) - own.nbytes
            gather(outputs, own, group=group)

        def broadcast_(tensor: torch.Tensor, source: int, group: Any) -> None:
            self.bytes += tensor.nbytes if dist.get_rank() != source else 0
            broadcast(tensor, source, group=group)

        def start_exchange(peers: Peers, received: Any, sent: Any, counts: list[int], sizes: list[int]) -> Any:
            self.bytes += sum(counts)
            return exchange(peers, received, sent, counts, sizes)

        dist.all_gather, dist.broadcast, Peers.start_exchange = all_gather, broadcast_, start_exchange


def _own_group(groups: list[list[int]], rank: int) -> Any:
    """The process group of a rank. Collective."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


def measure(way: str, groups: HybridGroups, args: argparse.Namespace, counter: Counter) -> tuple[int, float]:
    """(bytes received by this rank in a push, median seconds)."""
    rank, model = dist.get_rank(), Model(args.hidden)
    training, generation = Training(model, groups, rank), Generation(model, groups, rank)
    rollout = SimpleNamespace(receiver=lambda: generation, weight_version=None)
    sync = ReshardSync(rollout, torch.device("cpu"), args.bucket_mib * 2**20, grouping=groups)
    sync.bandwidth = 0.0  # not measured
    seconds = []
    for version in range(1 + args.pushes):  # the first one makes the plan
        dist.barrier()
        start, counter.bytes = time.perf_counter(), 0
        if way == "vanilla":
            generation.receive(training.weights())
        else:
            sync.push(training, version)
        seconds.append(time.perf_counter() - start)
        generation.check()
    return counter.bytes, statistics.median(seconds[1:])


def work(rank: int, ranks: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    counter, total = Counter(), sum(4 * torch.Size(shape).numel() for shape in Model(args.hidden).shapes.values())
    for sizes in LAYOUTS[ranks]:
        vanilla: dict[str, float] = {}
        for way in WAYS:
            groups = HybridGroups(*sizes, strided=way == "strided")
            found: list[Any] = [None] * ranks
            dist.all_gather_object(found, measure(way, groups, args, counter))
            received, seconds = zip(*found)
            line = {"layout": "{}-{}-{} -> {}-{}".format(*sizes), "ranks": ranks, "way": way, "model_bytes": total}
            line |= {"mean_bytes": sum(received) / ranks, "max_bytes": max(received)}
            line["share"] = round(sum(received) / ranks / total, 4)
            line["formula"] = None if way == "consecutive" else float(groups.volumes().communication)
            line["seconds"] = round(max(seconds), 4)
            vanilla = vanilla or line
            line["less_bytes"] = round(1 - line["mean_bytes"] / vanilla["mean_bytes"], 3)
            line["less_seconds"] = round(1 - line["seconds"] / vanilla["seconds"], 3)
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="processes")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model, a multiple of 8")
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
