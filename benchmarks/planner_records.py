"""Predictions of the planner beside the recorded runs on H200s in benchmarks/results.

All records of steps, updates and generation at fixed lengths are compared. Not compared: responses that end before the
limit (the lognormal ones of rollout_h200.jsonl, async_step_h200.json), asynchronous steps, the engine `hf`, and
executors_gpu.json, which is of a version without fused layers.

Every second run is held out: no constant of the planner comes from it. docs/internals/scaling.md names exceptions.
"""

import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engines
from grpo_step import SUITES, model_config
from vision_inputs import VISION_SUITES, vision_model_config

from verl.planner.devices import GIB, Device
from verl.planner.memory import total
from verl.planner.placement import plan_groups
from verl.planner.shapes import ModelShape, built_in
from verl.planner.workload import Job, Role
from verl.trainer.checks.planning import groups_of, job_of

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        name: file and variant.
        job: what it computed.
        devices: number of GPUs.
        seconds: operator, or "step" -> measured seconds.
        gib: peak of the memory of a GPU, as torch counts it; None: not known.
        whole: the peak is that of the device, with the context and what the allocator keeps.
        groups: roles and GPUs of each group; empty: all share the GPUs.
    """

    name: str
    job: Job
    devices: int
    seconds: dict[str, float]
    gib: float | None = None
    whole: bool = False
    groups: tuple[tuple[Sequence[str], int], ...] = ()


def compared(seconds: float, measured: float, memory: float, peak: float | None, unit: str) -> dict[str, Any]:
    """Predicted beside measured seconds and memory, and the ratios."""
    line = {"predicted_seconds": float(f"{seconds:.4g}"), "seconds": float(f"{measured:.4g}")}
    line["time_ratio"] = round(seconds / measured, 2)
    if peak:
        line |= {f"predicted_{unit}": round(memory, 1), unit: round(peak, 1), "memory_ratio": round(memory / peak, 2)}
    return line


def recorded_lines(device: Device) -> list[dict[str, Any]]:
    """One line per operator of each run. device: the profile of an H200."""
    lines: list[dict[str, Any]] = []
    for number, run in enumerate(runs()):
        plan = plan_groups(run.job, device, run.groups or [(run.job.names, run.devices)])
        operators = {name: pair for group in plan.groups for name, pair in group.seconds.items()}
        peak = max(map(total, plan.groups[0].memory.values())) - (0.0 if run.whole else device.reserved)
        gib = run.gib
        for operator, seconds in run.seconds.items():
            predicted = plan.seconds if operator == "step" else operators[operator][1]
            lines.append({"name": run.name, "operator": operator, "devices": run.devices, "held_out": number % 2 == 1})
            lines[-1] |= compared(predicted, seconds, peak / GIB, gib, "gib")
            gib = None
    return lines


def runs() -> Iterator[Run]:
    """All recorded runs that are compared."""
    yield from _updates()
    yield from _grpo_steps()
    yield from _engines()
    yield from _vllm_steps()
    yield from _generations()


def _job(model: str, rows: tuple[int, int, int, int], **settings: Any) -> Job:
    """A GRPO job. rows: prompts, samples, prompt and response tokens. ref: with a reference policy."""
    shape, ref = built_in(model), settings.pop("ref", False)
    roles = [Role("actor", shape, trains=True, checkpointing=False, update_tokens=16384, infer_tokens=16384)]
    roles += [Role("ref", shape, infer_tokens=16384)] if ref else []
    return Job(tuple(roles), *rows, **settings)


def _updates() -> Iterator[Run]:
    for line in _read("train_step_gpu.json")["updates"]:
        if line["variant"] == "fused":
            rows = (line["rows"] // line["samples"], line["samples"], line["prompt"], line["response"])
            name = f"train_step_gpu.json: {line['name']}, {line['samples']} per prompt"
            job = _job(line["shape"], rows, old_log_probs=True)
            seconds = {"update_actor": line["update_seconds"], "old_log_prob": line["reference_seconds"]}
            yield Run(name, job, 1, seconds, line["peak_gib"])


def _grpo_steps() -> Iterator[Run]:
    for line in _read("grpo_step_gpu.json")["lines"]:
        if line.get("trainer") == "ours":
            ref = line["beta"] > 0
            operators = ("gen", "update_actor", *(["ref"] if ref else []))
            seconds = {"step": line["seconds"]} | {name: line[f"{name}_seconds"] for name in operators}
            job = _job("0.5B", (64, 8, 128, 512), ref=ref)
            yield Run(f"grpo_step_gpu.json: beta {line['beta']}", job, 1, seconds, line["peak_gib"], True)
    selected = [line for line in _read("restructure_h200.json")["lines"] if line["tree"] == "new" and "hidden" in line]
    for hidden, model, rows, count in ((3584, "7B", (16, 8, 128, 128), 2), (896, "0.5B", (64, 8, 128, 512), 1)):
        same = [line for line in selected if line["hidden"] == hidden]
        seconds = {"step": statistics.median(s for line in same for s in line["seconds_of_steps"])}
        for operator in ("gen", "ref", "update_actor"):
            seconds[operator] = statistics.median(line[f"{operator}_seconds"] for line in same)
        peak = statistics.median(line["peak_gib"] for line in same)
        name = f"restructure_h200.json: {model}, {len(same)} run{'s' * (len(same) > 1)}"
        yield Run(name, _job(model, rows, ref=True), count, seconds, peak, True)


def _shape_of(suite: str) -> ModelShape:
    if suite in SUITES:
        return ModelShape.from_config(model_config(SUITES[suite]).to_dict(), suite)
    from vision_inputs import _SPECIAL

    from verl.trainer.checks.planning import shape_of_config

    return shape_of_config(vision_model_config(VISION_SUITES[suite], {token: 0 for token in _SPECIAL}), suite)


def _engines() -> Iterator[Run]:
    from verl.config import load_config
    from verl.trainer.startup.roles import roles_of

    for line in _read("engines_h200.json")["lines"]:
        args = engines.parser().parse_args(shlex.split(line["command"])[2:])
        args.set += ["trainer.device=cuda"]
        strategy, engine = line.get("strategy", "fsdp2"), line["engine"]
        replay = line.get("router_replay", "disabled")
        config = load_config(overrides=engines.overrides(args, Path(), strategy, engine, line["placement"], replay))
        names = roles_of(config)
        job = job_of(config, dict.fromkeys(names, _shape_of(line["suite"])), names, on_gpu=True)
        labels = [line["suite"], {"megatron": "Megatron"}.get(strategy, "FSDP2"), {"vllm": "vLLM"}.get(engine, engine)]
        labels += [f"TP {line['tensor_parallel']}"] if line.get("tensor_parallel", 1) > 1 else []
        labels += [line["router_replay"]] if "router_replay" in line else []
        labels += ["split"] if line["placement"] == "split" else []
        seconds = {"step": line["step_s"], "gen": line["gen_s"], "update_actor": line["update_s"]}
        seconds |= {"old_log_prob": line["old_log_prob_s"]} if line.get("old_log_prob_s") else {}
        seconds |= {"sync_weights": line["push_s"]} if _is_current_push(line, job.roles[0]) else {}
        # torch counts the memory that vLLM has freed
        gib = None if engine == "vllm" else line["memory_gib"]
        placed = groups_of(config.placement.model_dump(exclude={"auto"}), names, line["devices"])
        groups = tuple((roles, len(numbers)) for roles, numbers in placed)
        yield Run(f"engines_h200.json: {', '.join(labels)}", job, line["devices"], seconds, gib, groups=groups)


def _is_current_push(line: dict[str, Any], role: Role) -> bool:
    """Whether a record has a push into vLLM as it is now: on the devices of training, by reshard."""
    if line["engine"] != "vllm":
        return False
    pushed = line["push_gib_s"] * line["push_s"] * GIB
    return line["placement"] == "split" or pushed < 0.9 * role.parameters * role.compute_bytes


def _vllm_steps() -> Iterator[Run]:
    """tests/gpu/run_vllm.py: 16 prompts of up to 64 tokens, 4 samples of 128 tokens, micro-batches chosen.

    Its pushes are of a version that loaded every parameter by itself.
    """
    for line in _read("vllm_h200.json")["results"]:
        if not line["variant"].startswith("steps"):
            continue
        tensor = 2 if "TP 2" in line["variant"] else 1
        engine = {"engine": "vllm", "rollout_tensor": tensor, "memory_share": 0.4, "eager": "eager" in line["variant"]}
        job = _job("0.5B", (16, 4, 64, 128), **engine)
        seconds = {"step": line["step_s"], "gen": line["gen_s"], "update_actor": line["update_s"]}
        yield Run(f"vllm_h200.json: {line['variant'].removeprefix('steps ')}", job, line["gpus"], seconds)


def _generations() -> Iterator[Run]:
    """Generation alone: responses of equal length."""
    for text in (RESULTS / "rollout_h200.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line.get("lengths") == "even" and line["engine"] in ("native", "vllm"):
            job = _job(line["shape"], (line["rows"], 1, line["prompt"], line["new"]), engine=line["engine"])
            rows = f"{line['rows']} x {line['prompt']} + {line['new']}"
            name = f"rollout_h200.jsonl: {line['engine']} {line['shape']}, {rows}"
            yield Run(name, replace(job, memory_share=0.9, sleeps=False), 1, {"gen": line["seconds"]})
    record = _read("tensor_parallel_h200.json")
    for count in (1, 2):
        rate = record[f"speed, {count} GPU{'s' * (count > 1)}"]["tokens_per_second"]
        job = replace(_job("7B", (128, 1, 128, 256)), rollout_tensor=count)
        name = f"tensor_parallel_h200.json: native 7B, TP {count}"
        yield Run(name, job, count, {"gen": 128 * 256 / rate})


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))
