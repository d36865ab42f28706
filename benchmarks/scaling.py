"""The evaluation of HybridFlow (Sheng et al. 2024, arXiv 2409.19256, section 8) in the planner's simulator.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json

Testbed of the paper: up to 16 machines of 8 A100 80 GB, 200 Gb/s between machines; 1024 prompts of 1024 tokens with
responses of 1024 tokens; 8 updates per step; all models of one size. Training with Megatron's parallelism. No GPU is
needed. `--page FILE` replaces the tables in a page.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.planner import devices, shapes, step_time
from verl.planner.placement import Plan
from verl.planner.report import format_placement
from verl.planner.search import MEGATRON_SIZES, Partition, Search
from verl.planner.workload import Job, Layout, Role

#: 200 Gb/s per machine, of which collectives reach nine tenths
TESTBED = replace(devices.built_in("A100"), node_link=0.9 * 25e9)
MODELS = {"7B": "Llama-7B", "13B": "13B", "34B": "34B", "70B": "70B"}
ALGORITHMS = {
    "PPO": ("actor", "ref", "critic", "reward"),
    "ReMax": ("actor", "ref", "reward"),
    "Safe-RLHF": ("actor", "ref", "critic", "reward", "cost"),
}
DEVICES = (8, 16, 32, 64, 96, 128)
#: what section 8.3 of the paper finds best: (model, devices) -> placement
PAPER = {(model, count): "colocate" for model in ("7B", "13B", "34B", "70B") for count in (16, 32, 64)}
PAPER |= {("34B", 96): "split", ("34B", 128): "split", ("13B", 96): "split", ("13B", 128): "standalone"}


def job_of(algorithm: str, policy: str, values: str | None = None) -> Job:
    """A job of the paper. values: model of critic and reward model, if it is another one."""
    roles = []
    for name in ALGORITHMS[algorithm]:
        shape = shapes.built_in(MODELS[policy if name in ("actor", "ref") or values is None else values])
        trains = name in ("actor", "critic")
        value_head = name in ("critic", "reward", "cost")
        updates = 8 if trains else 1
        roles.append(Role(name, shape, trains=trains, value_head=value_head, weight_bytes=2, updates=updates))
    return Job(
        tuple(roles),
        prompts=1024,
        samples=1,
        prompt_tokens=1024,
        response_tokens=1024,
        old_log_probs=True,
        engine="native",
        memory_share=0.9,
        model_parallel=True,
        generations=2 if algorithm == "ReMax" else 1,
        strict=False,
    )


def named_placements(names: Sequence[str]) -> dict[str, Partition]:
    """The placements that the paper compares."""
    policy = tuple(name for name in names if name in ("actor", "ref"))
    separate = tuple(name for name in names if name not in policy)
    return {"colocate": (tuple(names),), "split": (policy, separate), "standalone": tuple((name,) for name in names)}


def simulate(algorithm: str, policy: str, values: str | None = None) -> list[dict[str, Any]]:
    """One line per number of devices."""
    job = job_of(algorithm, policy, values)
    search = Search(job, TESTBED, model_sizes=MEGATRON_SIZES)
    lines = []
    for count in DEVICES:
        start = time.perf_counter()
        plans = {name: search.best_of(p, count) for name, p in named_placements(job.names).items()}
        best = search.plans(count, 1)
        line = {"algorithm": algorithm, "model": policy, "values": values or policy, "devices": count}
        line |= {name: round(plan.seconds, 1) if plan else None for name, plan in plans.items()}
        seconds = {name: plan.seconds for name, plan in plans.items() if plan}
        line["winner"] = min(seconds, key=lambda name: seconds[name]) if seconds else None
        line |= _best(best[0] if best else None, job)
        line["search_seconds"] = round(time.perf_counter() - start, 2)
        if algorithm == "PPO" and values is None:
            line["paper"] = PAPER.get((policy, count))
        lines.append(line)
    return lines


def _best(plan: Plan | None, job: Job) -> dict[str, Any]:
    if plan is None:
        return {"best": None, "tokens_per_second": None}
    tokens = job.responses * job.length / plan.seconds
    stages = [round(seconds, 1) for seconds in plan.stages[:3]]  # a push is part of training
    return {
        "best": format_placement(plan),
        "best_seconds": round(plan.seconds, 1),
        "stages": stages,
        "tokens_per_second": round(tokens),
    }


def generation_sizes() -> list[dict[str, Any]]:
    """Section 8.4: seconds of generation by its tensor-parallel size, training on 16 devices with TP 8."""
    lines = []
    for model in ("7B", "13B"):
        job = job_of("PPO", model)
        role = replace(job.role("actor"), layout=Layout(16, tensor=8))
        reserved = 20 * 2**30  # what the other models leave
        seconds = {
            size: step_time.generation_seconds(replace(job, rollout_tensor=size), role, TESTBED, reserved)
            for size in (1, 2, 4, 8)
        }
        fastest = min(seconds, key=lambda size: seconds[size])
        lines.append({"model": model, "seconds": {size: round(s, 1) for size, s in seconds.items()}, "best": fastest})
    return lines


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    names = ("model", "devices", "colocate", "split", "standalone", "winner", "paper", "best", "tokens_per_second")
    text = []
    for title, lines in record["settings"].items():
        head = [name for name in names if any(name in line for line in lines)]
        text += [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        text += ["| " + " | ".join(_cell(line.get(name)) for name in head) + " |" for line in lines] + [""]
    text += [
        "### Tensor-parallel size of generation",
        "",
        "| model | TP 1 | TP 2 | TP 4 | TP 8 |",
        "|---|---|---|---|---|",
    ]
    for line in record["generation"]:
        text.append(f"| {line['model']} | " + " | ".join(f"{s} s" for s in line["seconds"].values()) + " |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--page", type=Path, help="replace the tables of this page")
    args = parser.parse_args()
    settings = {a: [line for model in MODELS for line in simulate(a, model)] for a in ALGORITHMS}
    settings["PPO, critic and reward model of 70B"] = simulate("PPO", "13B", "70B")
    record = {
        "command": "python benchmarks/scaling.py",
        "device": "A100 80 GB, 8 per machine, 200 Gb/s between machines",
        "rates": TESTBED.source,
        "settings": settings,
        "generation": generation_sizes(),
    }
    text = tables(record)
    print(text)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.page:
        marks = r"(<!-- tables -->\n).*?(<!-- end of tables -->)"
        page = re.sub(
            marks, lambda m: f"{m[1]}\n{text}\n{m[2]}", args.page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
