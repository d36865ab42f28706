"""Predicted against measured: seconds of a step and peak memory, on this CPU and in recorded runs on H200s.

    python benchmarks/planner.py --out benchmarks/results/planner.json
    OMP_NUM_THREADS=1 python benchmarks/planner.py --cpu --out benchmarks/results/planner_cpu.json

The recorded runs are those of benchmarks/results (planner_records.py); `ratio` is predicted / measured.

With --cpu, each configuration trains in a separate process, which measures the rates of the engines right after it:
other programs on the machine slow both down. Seconds per step are medians of processor time (of the controller, plus
the worker with most); `wall` is the clock. Memory is measured in a step that is not timed: `mib` are the bytes of
tensors at their peak, `resident_mib` is the resident memory of the largest process, with the libraries and what the
allocator keeps. Tensors of other processes are not counted: with two processes, there is resident memory only.

Not modelled: the reward function.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from grpo_step import Work, make_inputs
from planner_records import compared, recorded_lines

from verl.planner import devices
from verl.planner.devices import Device
from verl.planner.placement import Plan, plan_groups
from verl.planner.shapes import ModelShape
from verl.trainer.checks.planning import job_of

ROOT = Path(__file__).resolve().parents[1]
#: hidden, MLP, layers, heads, key heads, vocabulary, tied, prompts, samples, prompt tokens, new tokens
SMALL = Work(256, 768, 4, 8, 4, 2048, False, prompts=8, samples=4, prompt=16, new=48)
WIDE = Work(512, 1536, 6, 8, 4, 4096, False, prompts=4, samples=4, prompt=16, new=48)
LONG = Work(256, 768, 4, 8, 4, 2048, False, prompts=4, samples=4, prompt=64, new=192)
_MODEL, _ACTOR = "actor_rollout_ref.model.", "actor_rollout_ref.actor."
GRPO, PPO = {"algorithm.adv_estimator": "grpo"}, {"algorithm.adv_estimator": "gae"}
#: name -> (work, overrides)
CONFIGS: dict[str, tuple[Work, dict[str, Any]]] = {
    "grpo": (SMALL, GRPO),
    "grpo, long responses": (LONG, GRPO),
    "grpo, wide model": (WIDE, GRPO),
    "grpo, checkpointing": (WIDE, GRPO | {_MODEL + "enable_gradient_checkpointing": True}),
    "grpo, LoRA": (WIDE, GRPO | {_MODEL + "lora_rank": 8}),
    "grpo, reference": (SMALL, GRPO | {_ACTOR + "use_kl_loss": True}),
    "ppo, critic": (WIDE, PPO),
    "grpo, 2 processes": (WIDE, GRPO | {"trainer.n_gpus_per_node": 2}),
}
#: measured again beside each configuration
RATES = ("forward", "backward", "decode", "layer_seconds", "decode_seconds")
#: of which the first is not counted, and the last one measures memory
STEPS = 4


def overrides_of(name: str, folder: Path) -> dict[str, Any]:
    """The settings of a configuration."""
    work, extra = CONFIGS[name]
    return {
        "data.train_files": str(folder / "prompts.jsonl"),
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt,
        "data.max_response_length": work.new,
        _MODEL + "path": str(folder / "model"),
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.check_every": 0,
        _ACTOR + "ppo_mini_batch_size": work.prompts,
        _ACTOR + "optim.lr": 1e-6,
        "reward.custom_reward_function.path": str(ROOT / "benchmarks" / "grpo_step.py"),
        "reward.isolation": "none",
        "trainer.device": "cpu",
        "trainer.total_training_steps": STEPS,
        "trainer.val_before_train": False,
        "trainer.save_at_end": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": [],
        "trainer.default_local_dir": str(folder / "run"),
        **extra,
    }


# ---- measured -------------------------------------------------------------------------------------------------------


def resident_peak(pid: int) -> int:
    """Largest resident memory of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class TensorMemory:
    """Bytes of the tensors of this process: those that live at the start, and what a profiler sees."""

    def __init__(self) -> None:
        import torch

        gc.unfreeze()  # what the trainer has loaded
        gc.collect()
        tensors = (x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.device.type == "cpu")
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self._live = sum(storages.values())
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> int:
        """Bytes at the peak."""
        self._profile.stop()
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = now = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return self._live + peak


def measure(name: str, folder: Path) -> dict[str, float]:
    """Seconds and memory of a configuration, in this process."""
    from verl.trainer.ppo_trainer import PPOTrainer

    marks: list[tuple[float, float, dict[int, float]]] = []
    tensors: list[TensorMemory] = []
    resident: list[int] = []

    class Measured(PPOTrainer):
        def step_metrics(self, batch: Any) -> dict[str, float]:
            workers = {p.pid: sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True)}
            marks.append((time.perf_counter(), time.process_time(), workers))
            resident.append(max(map(resident_peak, workers or [os.getpid()])))
            if len(marks) == STEPS - 1 and self.world_size == 1:
                tensors.append(TensorMemory())
            return super().step_metrics(batch)

    trainer = Measured(overrides=overrides_of(name, folder))
    trainer.fit()
    steps = list(pairwise(marks))[: STEPS - 2]
    busy = [
        own2 - own1 + max((cpu - before.get(pid, cpu) for pid, cpu in after.items()), default=0.0)
        for (_, own1, before), (_, own2, after) in steps
    ]
    return {
        "seconds": statistics.median(busy),
        "wall": statistics.median(b[0] - a[0] for a, b in steps),
        "memory": tensors[0].stop() if tensors else 0,
        "resident": max(resident),
    }


def forked(call: Callable[[], Any]) -> Any:
    """The result of a call in a copy of this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(call()))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError("the process of the measurement failed") from None
    finally:
        process.join()


# ---- predicted ------------------------------------------------------------------------------------------------------


def predict(name: str, folder: Path, device: Device) -> Plan:
    """The plan of a configuration."""
    from verl.config import load_config
    from verl.trainer.startup.roles import roles_of

    config = load_config(overrides=overrides_of(name, folder))
    shape = ModelShape.from_config(json.loads((folder / "model" / "config.json").read_text(encoding="utf-8")), name)
    names = roles_of(config)
    job = job_of(config, dict.fromkeys(names, shape), names, on_gpu=False)
    return plan_groups(job, device, [(names, config.trainer.n_gpus_per_node)])


def cpu_lines(base: Device, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One line per CPU configuration. base: the profile whose rates of the engines are measured again."""
    import torch
    from calibrate import with_engine_rates

    for name in names:
        work = CONFIGS[name][0]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            forked(lambda work=work, folder=folder: make_inputs(work, folder, 4 * work.prompts))

            def run(name: str = name, folder: Path = folder) -> tuple[dict[str, float], Device]:
                return measure(name, folder), with_engine_rates(base, torch.device("cpu"))

            measured, device = forked(run)
            plan = predict(name, folder, device)
        line = {"name": name, "wall": round(measured["wall"], 3)}
        tensors = (plan.peak - device.reserved) / 2**20
        line |= compared(plan.seconds, measured["seconds"], tensors, measured["memory"] / 2**20, "mib")
        line["resident_mib"] = round(measured["resident"] / 2**20)
        line["rates"] = {key: float(f"{getattr(device, key):.4g}") for key in RATES}
        print(json.dumps(line), flush=True)
        yield line


# ---- results ---------------------------------------------------------------------------------------------------------


def summary(lines: list[dict[str, Any]]) -> dict[str, str]:
    """How many ratios are within the goals of 25 % (time) and 10 % (memory), also of the runs that are held out."""
    goals = {"time_ratio": ("time within 25 %", 0.25), "memory_ratio": ("memory within 10 %", 0.1)}
    figures = {}
    for key, (title, goal) in goals.items():
        for more, selected in (("", lines), (", held out", [line for line in lines if line.get("held_out")])):
            ratios = [line[key] for line in selected if key in line]
            if ratios:
                figures[title + more] = f"{sum(abs(ratio - 1) <= goal + 1e-9 for ratio in ratios)} of {len(ratios)}"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--cpu", action="store_true", help="train on this CPU instead of reading records of H200s")
    parser.add_argument("--only", nargs="+", choices=CONFIGS, help="CPU configurations; other lines of --out are kept")
    args = parser.parse_args()
    if args.cpu:
        _measure_cpu(args.out, args.only or list(CONFIGS))
        return
    lines = recorded_lines(devices.built_in("H200"))
    for line in lines:
        print(json.dumps(line))
    print(summary(lines))
    _write({"command": "python benchmarks/planner.py", "lines": lines, "goals": summary(lines)}, args.out)


def _measure_cpu(out: Path | None, names: Sequence[str]) -> None:
    import torch
    from calibrate import calibrate

    import verl.trainer.ppo_trainer  # noqa: F401 so that the copies of this process need not import it

    torch.set_num_threads(1)
    device = forked(lambda: calibrate(torch.device("cpu"), print))
    earlier = json.loads(out.read_text(encoding="utf-8"))["lines"] if out is not None and out.exists() else []
    by_name = {line["name"]: line for line in earlier}
    for line in cpu_lines(device, names):
        by_name[line["name"]] = line
        lines = [by_name[name] for name in CONFIGS if name in by_name]
        record = {"command": "python benchmarks/planner.py --cpu", "lines": lines, "goals": summary(lines)}
        _write(record | {"profile": asdict(device), "load": round(os.getloadavg()[0], 1)}, out)
    print(summary(lines), flush=True)


def _write(record: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
