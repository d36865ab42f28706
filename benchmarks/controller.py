"""Cost of the single controller: overhead per call, seconds per step and controller memory, one JSON line each.

    python benchmarks/controller.py --rows 1024 8192 65536 --tokens 2048 --ranks 2 --out results.json
    python benchmarks/controller.py --simulate 1000 --rows 4000 --out results.json

A step is the data movement of PPO without the computation: workers create columns of the real sizes and read those that
the real ones read; reward and advantages run on the controller. `data` is how batches travel between worker groups:
"reference" (large columns stay with the rank that created them) or "controller" (everything passes through the
controller). Each measurement runs in a separate process; `controller_peak_mib` is the increase of its resident memory
over the value before the first step. A measurement that does not fit into free memory is skipped with a message.

With --simulate N, the ranks do not exist: each call gets N answers as they arrive from Ray, with a reference for each
large column. What is left is the work of the controller, in milliseconds of processor time per step: splitting batches,
packing calls, unpacking and concatenating results, merging metrics.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from verl.dataflow import DataFlow, Operator, Pipeline
from verl.protocol import DataProto
from verl.single_controller import Dispatch, LocalWorkerGroup, Worker, WorkerGroup, WorkerSpec, register
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.dispatch import Call, Coordinates
from verl.single_controller.remote_batch import Packed, PackedCall, RemoteTensor, Source, pack, unpack_result
from verl.single_controller.worker_group import Future

ROOT = Path(__file__).resolve().parents[1]
EXECUTORS = {  # executor -> supported values of `data`
    "in_process": ["controller"],
    "processes": ["reference", "controller"],
    "ray": ["reference", "controller"],
}
READ_BY_MODELS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class Synthetic(Worker):
    """Creates and reads columns of the sizes of PPO, without computing."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def nothing(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, batch: DataProto) -> DataProto:
        rows, tokens = len(batch), batch.meta_info["tokens"]
        long = {name: torch.ones(rows, tokens, dtype=torch.int64) for name in READ_BY_MODELS[:3]}
        short = {name: torch.ones(rows, tokens // 2, dtype=torch.int64) for name in READ_BY_MODELS[3:]}
        return DataProto.from_dict({**long, **short, "rollout_log_probs": torch.zeros(rows, tokens // 2)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def infer(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({batch.meta_info["column"]: torch.zeros(batch.batch["responses"].shape)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict:
        return {"rows": (float(len(batch)), 1)}


def make_group(executor: str, ranks: int) -> WorkerGroup:
    spec = WorkerSpec((__file__, "Synthetic"))
    if executor == "in_process":
        return LocalWorkerGroup(spec)
    if executor == "processes":
        return LocalWorkerGroup(spec, ranks)
    import ray

    from verl.single_controller.ray.cluster import RayWorkerGroup

    ray.init("local", num_cpus=ranks, include_dashboard=False, log_to_driver=False)
    return RayWorkerGroup(spec, ResourcePool("main", (ranks,)))


def ppo_step(group: WorkerGroup, by_reference: bool, reads_columns: bool = True) -> Pipeline:
    """gen -> reward -> old_log_prob -> ref -> values -> adv -> update, as a flow. reads_columns: reward and advantages
    are computed on the controller."""

    def arrive(result: DataProto) -> DataProto:
        if by_reference:
            return result
        columns = {k: v.fetch() if isinstance(v, RemoteTensor) else v for k, v in result.tensors.items()}
        return DataProto.from_dict(columns, result.non_tensor_batch, result.meta_info)

    def infer(column: str) -> Operator:
        def func(batch: DataProto) -> DataProto:
            inputs = batch.select(READ_BY_MODELS, [], [])
            inputs.meta_info["column"] = column
            return arrive(group.infer(inputs))

        return Operator(column, func, writes=(column,))

    def reward(batch: DataProto) -> dict:
        return {"token_level_scores": batch.batch["response_mask"].float()}

    def adv(batch: DataProto) -> dict:
        advantages = batch.batch["token_level_scores"] - batch.batch["values"]
        return {"advantages": advantages, "returns": advantages + batch.batch["values"]}

    flow = DataFlow([Operator("gen", lambda batch: arrive(group.generate(batch)))])
    if reads_columns:
        flow.add_operator(Operator("reward", reward, writes=("token_level_scores",)))
    for column in ("old_log_probs", "ref_log_prob", "values"):
        flow.add_operator(infer(column))
    if reads_columns:
        flow.add_operator(Operator("adv", adv, writes=("advantages", "returns")))
    flow.add_operator(Operator("update", lambda batch: group.update(batch) and None))
    return flow.compile()


class Elsewhere(Source):
    """A column in a process that does not exist."""

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"the controller reads {name}")


class SimulatedPool:
    """Answers a call for every rank. Packing and unpacking, which the controller does, is part of the measurement."""

    def __init__(self) -> None:
        self.answers: dict[tuple, Any] = {}
        self.seconds: dict[str, float] = {}  # part -> processor time

    def call(self, role: str, method: str, calls: list[Call]) -> Future[list]:
        start = time.process_time()
        for shared in {
            id(call.args): call for call in calls
        }.values():  # ranks with the same rows share their arguments
            PackedCall((shared.args, shared.kwargs))
        packed_at = time.process_time()
        answers = [self.answer(method, call) for call in calls]
        answered_at = time.process_time()
        results = [
            unpack_result(answer, source) if call.collect else None for call, (answer, source) in zip(calls, answers)
        ]
        self.count("pack", packed_at - start)
        self.count("unpack", time.process_time() - answered_at)
        self.count("answer", answered_at - packed_at)
        return Future.completed(results)

    def count(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def answer(self, method: str, call: Call) -> tuple[Packed, Source]:
        """What a rank sends: made once per method and number of rows."""
        if method == "layout":
            rank = self.answers["ranks"] = self.answers.get("ranks", -1) + 1
            return pack(Coordinates(dp=rank)), None
        batch = call.args[0]
        key = method, len(batch), batch.meta_info.get("column")
        if key not in self.answers:
            # the columns of a rank are larger than what is sent inline, as with 32 thousand tokens
            self.answers[key] = pack_large(getattr(Synthetic(), method)(batch))
        return self.answers[key], Elsewhere()


def pack_large(value: Any) -> Packed:
    references = {id(t): (k, tuple(t.shape), t.dtype) for k, t in getattr(value, "tensors", {}).items()}
    return pack(value, lambda x: references.get(id(x)) if isinstance(x, torch.Tensor) else None)


class SimulatedGroup(WorkerGroup):
    def __init__(self, ranks: int):
        super().__init__(Synthetic, ranks)
        self._pool = SimulatedPool()

    def shutdown(self) -> None:
        """There is nothing to end."""


def simulate(ranks: int, rows: int, steps: int) -> dict[str, Any]:
    """One line: the best of `steps` steps, after a warm-up step."""
    group, best = SimulatedGroup(ranks), {}
    pipeline = ppo_step(group, True, reads_columns=False)
    prompts = DataProto.from_dict({"row": torch.arange(rows)}, {"uid": list(range(rows))}, {"tokens": 2})
    for step in range(steps + 1):
        group._pool.seconds, start = {}, time.process_time()
        pipeline.run(prompts)
        parts = {name: seconds * 1e3 for name, seconds in group._pool.seconds.items()}
        total = (time.process_time() - start) * 1e3 - parts.pop("answer")
        if step and (not best or total < best["total"]):
            best = {"total": total, **parts}
    best["dispatch, collect, metrics"] = 2 * best["total"] - sum(best.values())
    return {
        "benchmark": "controller_simulated",
        "ranks": ranks,
        "rows": rows,
        "calls_per_step": 5,
        "ms_per_step": {name: round(value, 1) for name, value in best.items()},
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(executor: str, data: str, rows: int, tokens: int, ranks: int, steps: int) -> dict:
    """One line: the best of `steps` steps, after a warm-up step."""
    with make_group(executor, ranks) as group:
        group.nothing()
        start = time.perf_counter()
        for _ in range(100):
            group.nothing()
        call = (time.perf_counter() - start) / 100
        pipeline = ppo_step(group, data == "reference")
        prompts = DataProto.from_dict({"row": torch.arange(rows)}, meta_info={"tokens": tokens})
        before, best, size = peak_mib(), {}, 0
        for step in range(steps + 1):
            batch = pipeline.run(prompts)
            size = batch.nbytes()
            if step and (not best or sum(pipeline.timings.values()) < sum(best.values())):
                best = dict(pipeline.timings)
    return {
        "benchmark": "controller",
        "executor": executor,
        "data": data,
        "rows": rows,
        "tokens": tokens,
        "ranks": 1 if executor == "in_process" else ranks,
        "batch_mib": round(size / 2**20),
        "call_ms": round(call * 1e3, 3),
        "seconds_per_step": round(sum(best.values()), 3),
        "controller_peak_mib": round(peak_mib() - before),
        "seconds": {name: round(s, 3) for name, s in best.items()},
    }


ROW_BYTES = 46  # per token, over all columns; see `Synthetic` and `ppo_step`


def needed(executor: str, data: str, rows: int, tokens: int) -> int:
    """Peak bytes of a measurement, over all processes: of each copy of the batch that is alive."""
    # where it is created and stays; otherwise also in transit, and with its readers
    copies = 2 if executor == "in_process" or (executor, data) == ("processes", "reference") else 4
    return rows * tokens * ROW_BYTES * copies


def run_one(executor: str, data: str, rows: int, args: argparse.Namespace) -> dict:
    """Run one measurement in a separate process."""
    record = {"executor": executor, "data": data, "rows": rows}
    free, need = psutil.virtual_memory().available, needed(executor, data, rows, args.tokens)
    if need > free:
        return {**record, "left_out": f"needs about {need / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"}
    sizes = {"tokens": args.tokens, "ranks": args.ranks, "steps": args.steps}
    options = [word for name, value in {**record, **sizes}.items() for word in (f"--{name}", str(value))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, *options], env=env, stdout=subprocess.PIPE, encoding="utf-8")
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {**record, "failed": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--tokens", type=int, default=2048, help="prompt and response together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="ranks that do not exist")
    parser.add_argument("--executor", nargs="+", choices=list(EXECUTORS), default=list(EXECUTORS))
    parser.add_argument("--data", choices=["reference", "controller"], help="only this value, in this process")
    parser.add_argument("--out", type=Path, help="write all lines here, with the command and the versions")
    args = parser.parse_args()
    if args.data is not None:
        print(json.dumps(measure(args.executor[0], args.data, args.rows[0], args.tokens, args.ranks, args.steps)))
        return
    lines = []
    for rows in args.rows if args.simulate else ():
        lines.append(simulate(args.simulate, rows, args.steps))
        print(json.dumps(lines[-1]), flush=True)
    for rows in args.rows if not args.simulate else ():
        for executor in args.executor:
            for data in EXECUTORS[executor]:
                lines.append(run_one(executor, data, rows, args))
                print(json.dumps(lines[-1]), flush=True)
    if args.out is not None:
        packages = {name: version(name) for name in ("torch", "tensordict", "ray")}
        machine = {"cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30)}
        command = " ".join(["python", "benchmarks/controller.py", *sys.argv[1:]])
        info = {"command": command, "machine": machine, "versions": {"python": platform.python_version(), **packages}}
        args.out.write_text(json.dumps({**info, "results": lines}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
