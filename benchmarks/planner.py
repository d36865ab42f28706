"""Predicted against measured: seconds of a step and peak memory, on this CPU and in recorded runs on H200s.

    OMP_NUM_THREADS=1 python benchmarks/planner.py --out benchmarks/results/planner.json

Each CPU configuration trains in a process of its own. Its seconds per step are medians of processor time after two
steps (of the controller, plus the worker with most), which other programs on the machine do not change; `wall` is the
clock. Memory is the peak resident memory of a process that has a model, minus what it had before: of two processes, the
larger one, without shared pages. The calibration runs first, in this process. The recorded runs are those of
benchmarks/results; `ratio` is predicted / measured.

Not modelled: memory of the allocator beyond tensors, of the libraries and of compiled kernels; the reward function.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from grpo_step import Work, make_inputs

from verl.planner import devices
from verl.planner.devices import GIB, Device
from verl.planner.memory import total
from verl.planner.placement import Plan, plan_groups
from verl.planner.settings import job_of
from verl.planner.shapes import ModelShape, built_in
from verl.planner.workload import Job, Role

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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
STEPS, WARM_UP = 5, 2


def overrides_of(name: str, folder: Path) -> dict[str, Any]:
    """The settings of a configuration."""
    work, own = CONFIGS[name]
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
        **own,
    }


# ---- measured -------------------------------------------------------------------------------------------------------


class PeakMemory:
    """Samples the memory of this process, or of each of its children, in a thread. Use as a context."""

    def __init__(self, children: bool):
        self._children, self._stop = children, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._first: dict[int, int] = {}
        self._peak: dict[int, int] = {}

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        own = psutil.Process()
        while not self._stop.wait(0.02):
            for process in own.children(recursive=True) if self._children else [own]:
                try:
                    used = process.memory_full_info().uss if self._children else process.memory_info().rss
                except psutil.Error:
                    continue
                self._first.setdefault(process.pid, used)
                self._peak[process.pid] = max(used, self._peak.get(process.pid, 0))

    def above(self) -> int:
        """Bytes of the process that grew most."""
        return max(self._peak[pid] - self._first[pid] for pid in self._peak)


def measure(name: str, folder: Path) -> dict[str, float]:
    """Seconds and memory of a configuration, in this process."""
    from verl.trainer.ppo_trainer import PPOTrainer

    marks: list[tuple[float, float, dict[int, float]]] = []

    class Measured(PPOTrainer):
        def step_metrics(self, batch: Any) -> dict[str, float]:
            workers = {p.pid: sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True)}
            marks.append((time.perf_counter(), time.process_time(), workers))
            return super().step_metrics(batch)

    trainer = Measured(overrides=overrides_of(name, folder))
    with PeakMemory(children=trainer.world_size > 1) as memory:
        trainer.fit()
    steps = list(pairwise(marks))[WARM_UP - 1 :]
    busy = [
        own2 - own1 + max((cpu - before.get(pid, cpu) for pid, cpu in after.items()), default=0.0)
        for (_, own1, before), (_, own2, after) in steps
    ]
    return {
        "seconds": statistics.median(busy),
        "wall": statistics.median(b[0] - a[0] for a, b in steps),
        "memory": memory.above(),
    }


def run_one(name: str, folder: Path) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--folder", str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    if found.returncode:
        raise RuntimeError(f"{name} failed:\n{found.stderr[-3000:]}")
    return json.loads(found.stdout.splitlines()[-1])


# ---- predicted ------------------------------------------------------------------------------------------------------


def predict(name: str, folder: Path, device: Device) -> Plan:
    """The plan of a configuration."""
    from verl.config import load_config
    from verl.trainer.startup.roles import roles_of

    config = load_config(overrides=overrides_of(name, folder))
    shape = ModelShape.of(json.loads((folder / "model" / "config.json").read_text()), name)
    names = roles_of(config)
    job = job_of(config, dict.fromkeys(names, shape), names, on_gpu=False)
    return plan_groups(job, device, [(names, config.trainer.n_gpus_per_node)])


def cpu_lines(device: Device) -> Iterator[dict[str, Any]]:
    """One line per CPU configuration."""
    for name, (work, _) in CONFIGS.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            make_inputs(work, folder, 4 * work.prompts)
            plan, found = predict(name, folder, device), run_one(name, folder)
        line = {"name": name, "wall": round(found["wall"], 3)}
        line |= _compared(plan.seconds, found["seconds"], plan.peak / 2**20, found["memory"] / 2**20, "mib")
        print(json.dumps(line), flush=True)
        yield line


def _compared(seconds: float, measured: float, memory: float, peak: float | None, unit: str) -> dict[str, Any]:
    line = {"predicted_seconds": float(f"{seconds:.4g}"), "seconds": float(f"{measured:.4g}")}
    line["time_ratio"] = round(seconds / measured, 2)
    if peak:
        line |= {f"predicted_{unit}": round(memory, 1), unit: round(peak, 1), "memory_ratio": round(memory / peak, 2)}
    return line


# ---- recorded runs --------------------------------------------------------------------------------------------------


def _job(model: str, rows: tuple[int, int, int, int], **settings: Any) -> Job:
    """A GRPO job. rows: prompts, samples, prompt and response tokens. ref: with a reference policy."""
    shape, ref = built_in(model), settings.pop("ref", False)
    roles = [Role("actor", shape, trains=True, checkpointing=False, update_tokens=16384, infer_tokens=16384)]
    roles += [Role("ref", shape, infer_tokens=16384)] if ref else []
    return Job(tuple(roles), *rows, **settings)


def recorded_lines(device: Device) -> list[dict[str, Any]]:
    """Recorded seconds and memory (GiB) of H200 runs, and predictions."""
    lines: list[dict[str, Any]] = []

    def add(name: str, job: Job, count: int, operator: str, seconds: float, memory: float | None, extra: float) -> None:
        plan = plan_groups(job, device, [(job.names, count)])
        predicted = plan.seconds if operator == "step" else plan.groups[0].seconds[operator][1]
        update = total(plan.groups[0].memory["update of the actor"]) - device.reserved + extra
        lines.append({"name": name, "operator": operator, "devices": count})
        lines[-1] |= _compared(predicted, seconds, update / GIB, memory, "gib")

    for line in _read("train_step_gpu.json")["updates"]:
        if line["variant"] == "fused":
            rows = (line["rows"] // line["samples"], line["samples"], line["prompt"], line["response"])
            name = f"train_step_gpu.json: {line['name']}, {line['samples']} per prompt"
            job = _job(line["shape"], rows)
            add(name, job, 1, "update_actor", line["update_seconds"], line["peak_gib"], 0.0)
    for line in _read("grpo_step_gpu.json")["lines"]:
        if line.get("trainer") == "ours":
            ref = line["beta"] > 0
            name = f"grpo_step_gpu.json: beta {line['beta']} (memory of the device, allocator included)"
            job = _job("0.5B", (64, 8, 128, 512), ref=ref)
            add(name, job, 1, "step", line["seconds"], line["peak_gib"], device.reserved)
    for line in _read("restructure_h200.json")["lines"]:
        if line.get("hidden") == 3584 and line["tree"] == "new":
            name, job = "restructure_h200.json: 7B, 2 GPUs", _job("7B", (16, 8, 128, 128), ref=True)
            add(name, job, 2, "step", statistics.median(line["seconds_of_steps"]), line["peak_gib"], device.reserved)
    for line in _read("engines_h200.json")["lines"]:
        if line["engine"] == "native" and line["suite"] == "gpu":
            job, name = _job("0.5B", (64, 8, 128, 512)), "engines_h200.json: 0.5B, 2 GPUs"
        elif line["suite"] == "gpu-7b":
            job = _job("7B", (16, 8, 128, 128), engine=line["engine"], rollout_tensor=2, memory_share=0.4)
            name = "engines_h200.json: 7B, vLLM TP 2"
        else:
            continue
        add(name, job, line["devices"], "step", line["step_s"], line["memory_gib"], 0.0)
        add(name, job, line["devices"], "update_actor", line["update_s"], None, 0.0)
    return lines + _rollout_lines(device)


def _rollout_lines(device: Device) -> list[dict[str, Any]]:
    """Seconds of generation, responses of equal length."""
    lines = []
    for text in (RESULTS / "rollout_h200.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line.get("lengths") != "even" or line["engine"] not in ("native", "vllm"):
            continue
        job = _job(line["shape"], (line["rows"], 1, line["prompt"], line["new"]), engine=line["engine"])
        plan = plan_groups(replace(job, memory_share=0.9), device, [(job.names, 1)])
        seconds = plan.groups[0].seconds["gen"][1]
        name = (
            f"rollout_h200.jsonl: {line['engine']} {line['shape']}, {line['rows']} x {line['prompt']} + {line['new']}"
        )
        lines.append({"name": name, "operator": "gen", "devices": 1})
        lines[-1] |= _compared(seconds, line["seconds"], 0.0, None, "gib")
    return lines


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def summary(lines: list[dict[str, Any]]) -> dict[str, str]:
    """How many ratios are within the goals of 25 % (time) and 10 % (memory)."""
    times = [line["time_ratio"] for line in lines]
    memory = [line["memory_ratio"] for line in lines if "memory_ratio" in line]
    return {
        "time within 25 %": f"{sum(0.75 <= r <= 1.25 for r in times)} of {len(times)}",
        "memory within 10 %": f"{sum(0.9 <= r <= 1.1 for r in memory)} of {len(memory)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--recorded-only", action="store_true", help="no CPU runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.folder)))
        return
    recorded = recorded_lines(devices.built_in("H200"))
    for line in recorded:
        print(json.dumps(line))
    print(summary(recorded))
    record: dict[str, Any] = {
        "command": "python benchmarks/planner.py",
        "h200": recorded,
        "h200_goals": summary(recorded),
    }
    if not args.recorded_only:
        import torch

        from verl.planner.calibrate import calibrate

        device = calibrate(torch.device("cpu"), print)
        lines: list[dict[str, Any]] = []
        for line in cpu_lines(device):
            lines.append(line)
            record |= {"cpu": lines, "cpu_goals": summary(lines), "profile": asdict(device), "load": os.getloadavg()[0]}
            _write(record, args.out)
        print(summary(lines), flush=True)
    _write(record, args.out)


def _write(record: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
