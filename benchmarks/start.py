"""From the command to the second step, and what a checkpoint costs: a timeline of one GRPO run of random weights.

    python benchmarks/start.py --suite gpu-7b-long --devices 2 --save --out FILE.json    # two GPUs
    python benchmarks/start.py --suite cpu --devices 1 --save                            # any machine

Prints when the controller and each rank get where, in seconds after the command: libraries imported, workers built (the
model read, then sharded), first token, end of each step. With --save, a checkpoint is written in the background after
the step before the last: `stall` is how long training waited, the rates are the bytes of the checkpoint by the seconds
of the slowest rank, per device. Memory is that of the update in the last step.

--folder keeps the model for the next run. --set adds settings, --label names the line of the record.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKS = "VERL_START_MARKS"  # the file of the marks, for all processes
CONTROLLER = "VERL_START_CONTROLLER"
#: module:Class.method -> the mark after its first call, or after each one (*)
IN_CONTROLLER = {
    "verl.trainer.base:Trainer.announce": "checks passed",
    "verl.trainer.ppo_trainer:PPOTrainer.init_workers": "workers built",
    "verl.trainer.base:Trainer.start": "weights pushed",
    "verl.trainer.base:Trainer.step": "step *",
    "verl.checkpoints.store:CheckpointStore.seal": "checksums",
}
IN_WORKER = {
    "verl.engines.sharding:FSDP2.build": "model read *",
    "verl.engines.sharding:FSDP2.shard": "model sharded *",
    "verl.workers.policy:ActorWorker.__init__": "actor built",
    "verl.workers.policy:RefWorker.__init__": "reference built",
    "verl.rollout.native.scheduler:SlotScheduler.advance": "first token",
    "verl.engines.checkpoint:host_copy": "copied to the host",
    "verl.engines.checkpoint:ShardWriter.write": "shards written",
}
PARTS_OF_A_SAVE = ("copied to the host", "shards written", "checksums")
ON_GPU = {"verl.rollout.native.paged_scheduler:PagedScheduler._read_status": "first token"}


# ---- in the processes of the run, which load this file by `imports` ------------------------------------------------


def mark(name: str, seconds: float = 0.0) -> None:
    is_controller = os.environ[CONTROLLER] == str(os.getpid())
    rank = "controller" if is_controller else f"rank {os.environ.get('RANK')}"
    line = {"rank": rank, "at": time.time(), "mark": name, "seconds": round(seconds, 3)}
    with open(os.environ[MARKS], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def install(targets: dict[str, str]) -> None:
    """Let the methods leave their marks."""
    from pkgutil import resolve_name

    for target, name in targets.items():
        owner, _, method = target.replace(":", ".").rpartition(".")
        marked(resolve_name(owner), method, name)


def marked(owner: Any, method: str, name: str) -> None:
    call: Callable[..., Any] = getattr(owner, method)
    count = 0

    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        start = time.perf_counter()
        result = call(*args, **kwargs)
        count += 1
        if count == 1 or "*" in name:
            mark(name.replace("*", str(count)), time.perf_counter() - start)
        return result

    setattr(owner, method, wrapper)


def sampled(target: str) -> None:
    """While the method runs in another thread, note where the main thread is: a mark for each of the ten most frequent
    places, with its seconds."""
    from pkgutil import resolve_name

    owner, _, method = target.replace(":", ".").rpartition(".")
    owner = resolve_name(owner)
    call = getattr(owner, method)

    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        done, places = threading.Event(), Counter()

        def sample() -> None:
            while not done.wait(0.1):
                frame, lines = sys._current_frames().get(threading.main_thread().ident), []
                while frame is not None and len(lines) < 4:
                    lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                    frame = frame.f_back
                places[" < ".join(lines)] += 1

        threading.Thread(target=sample, daemon=True).start()
        try:
            return call(*args, **kwargs)
        finally:
            done.set()
            for place, count in places.most_common(10):
                mark(f"during the write at {place}", count / 10)

    setattr(owner, method, wrapper)


if MARKS in os.environ and CONTROLLER not in os.environ:
    os.environ[CONTROLLER] = str(os.getpid())
    mark("torch imported")
    install(IN_CONTROLLER)
if MARKS in os.environ:  # with one process, the worker is in that of the controller
    import torch

    if os.environ[CONTROLLER] != str(os.getpid()):
        mark("process up")
    install(IN_WORKER | (ON_GPU if torch.cuda.is_available() else {}))
    sampled("verl.engines.checkpoint:ShardWriter.write")


# ---- the benchmark --------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from engines import overrides

    out = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    settings = overrides(args, folder, "fsdp2", "native", "colocated")
    settings = [text for text in settings if not text.startswith("trainer.default_local_dir=")]
    settings += [f"trainer.default_local_dir={out}", f"imports=[{Path(__file__).resolve()}]"]
    if args.save:
        settings += [f"trainer.save_freq={args.steps - 1}", "actor_rollout_ref.actor.checkpoint.async_save=true"]
    marks, log = out / "marks.jsonl", out / "log.txt"
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        MARKS: str(marks),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.time()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    code: int | str | None = None
    shown = 0
    while code is None:
        code = process.poll()
        for line in (found := marks_of(marks))[shown:]:
            print(
                f"{line['at'] - began:9.2f} s  {line['rank']:10}  {line['mark']} ({line['seconds']:.2f} s)", flush=True
            )
        shown = len(found)
        if code is None and time.time() - began > args.limit:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"no end within {args.limit:g} s"
        time.sleep(0.2)
    text = log.read_text(encoding="utf-8")
    if code != 0:
        print(text[-8000:], flush=True)
    lines = marks_of(marks)
    timeline = sorted((round(line["at"] - began, 2), line["rank"], line["mark"], line["seconds"]) for line in lines)
    metrics = out / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    steps = [step for step in steps if "timing_s/step" in step]
    result = {"benchmark": "start", "label": args.label, "suite": args.suite, "devices": args.devices, "set": args.set}
    result |= {"status": code, "total_seconds": round(time.time() - began, 1), "timeline": timeline}
    result["steps"] = [{k: round(v, 4) for k, v in step.items() if k.startswith("timing_s/")} for step in steps]
    kept = ("perf/max_memory", "perf/memory", "perf/mfu", "rollout/logprob_gap_mean")
    result["last_step"] = {k: float(f"{v:.4g}") for k, v in steps[-1].items() if k.startswith(kept)} if steps else None
    result |= saved(text, out, lines, args.devices)
    shutil.rmtree(out, ignore_errors=True)
    return result


def marks_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def saved(text: str, out: Path, lines: list[dict[str, Any]], devices: int) -> dict[str, Any]:
    """The checkpoint of a run: seconds that training waited, and GB per second and device of writing."""
    stalls = [float(found) for found in re.findall(r"\[save\] blocked for ([\d.]+)s", text)]
    sizes = [sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in out.glob("global_step_*")]
    seconds = {name: max((x["seconds"] for x in lines if x["mark"] == name), default=0.0) for name in PARTS_OF_A_SAVE}
    if not (sizes and seconds["shards written"]):
        return {}
    rates = {f"gb_per_second_{name}": sizes[0] / 1e9 / seconds[name] / devices for name in PARTS_OF_A_SAVE[1:]}
    save = {"stall": stalls, "gb": sizes[0] / 1e9, "seconds": seconds, **rates}
    return {"save": {key: round(value, 3) if isinstance(value, float) else value for key, value in save.items()}}


def show(result: dict[str, Any]) -> None:
    """The steps and the rest as text; the timeline was printed as it came."""
    for number, step in enumerate(result["steps"], 1):
        print(f"step {number}: " + ", ".join(f"{k.removeprefix('timing_s/')} {v:.3f}" for k, v in step.items()))
    print(json.dumps({k: v for k, v in result.items() if k not in ("timeline", "steps")}), flush=True)


def main() -> None:
    from engines import parser
    from grpo_step import SUITES, facts, make_inputs

    parse = parser()
    parse.description = __doc__
    parse.add_argument("--save", action="store_true", help="write a checkpoint in the background before the last step")
    parse.add_argument("--folder", type=Path, help="of the model and the runs; default: a temporary one")
    parse.add_argument("--label", default="", help="name of the line in the record")
    parse.set_defaults(steps=4, limit=600)
    args = parse.parse_args()
    args.threads, args.trl_python = os.cpu_count(), sys.executable
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "prompts.jsonl").exists():
            make_inputs(SUITES[args.suite], folder, SUITES[args.suite].prompts * args.steps)
        result = run(args, folder)
    show(result)
    if args.out:
        record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else facts(args) | {"lines": []}
        record["lines"].append(result | {"command": " ".join(["python benchmarks/start.py", *sys.argv[1:]])})
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if result["status"] == 0 else 1)


if __name__ == "__main__":
    main()
