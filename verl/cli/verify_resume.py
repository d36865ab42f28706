"""`verl verify-resume`: N steps without an interruption equal k steps, a resume, and N - k steps.

Both runs use the given configuration, in a temporary folder. Every tensor and file of the two checkpoints and every
metric of every step is compared, except times.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoints.manifest import MANIFEST
from verl.processes.streams import command_output
from verl.trainer.startup.command_line import USER_ERRORS, print_error, split_arguments, whole_number
from verl.utils.redaction import console_text

#: metrics of time and of the machine
_MEASURED = ("time", "timing_s/", "perf/", "rollout/tokens_per_second", "weight_sync/seconds", "weight_sync/gb_per")
#: files that name the folder of the run
_NAMES_FOLDER = ("config.yaml", "trainer.json", ".metadata")


@command_output()
def main(arguments: list[str] | None = None, program: str = "verl verify-resume") -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [--steps N] [--config FILE.yaml] key=value ...",
        description="Train N steps without an interruption, and N/2 steps, a resume and the rest, in a temporary "
        "folder. Compare every tensor, file and metric. Exit with status 1 if they differ.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=whole_number(2, 10**9), default=4, help="steps of each run (default: 4)")
    options, rest = parser.parse_known_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
    try:
        comparison = verify(*split_arguments(rest)[:2], options.steps)
    except USER_ERRORS as error:
        return print_error(error)
    print(console_text("\n".join(comparison.lines())))
    return 1 if comparison.differences else 0


@dataclass(frozen=True)
class Comparison:
    """What was compared, and the differences."""

    tensors: int
    files: int
    metrics: int
    differences: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The report."""
        yield from self.differences
        compared = f"{self.tensors} tensors, {self.files} files and {self.metrics} metrics"
        verdict = f"{len(self.differences)} differences" if self.differences else "all equal"
        yield f"compared {compared}: {verdict}"


def verify(path: str | None, overrides: list[str], steps: int) -> Comparison:
    """Train `steps` steps with and without an interruption after half of them, and compare."""
    from verl.trainer.ppo_trainer import PPOTrainer

    with tempfile.TemporaryDirectory(prefix="verl-verify-") as folder:
        straight, resumed = Path(folder, "straight"), Path(folder, "resumed")
        fixed = [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.save_at_end=true"]
        fixed += ["trainer.resume_mode=auto", "trainer.logger=[jsonl]", "trainer.test_freq=-1"]
        fixed += ["trainer.val_before_train=false", "trainer.early_stopping.patience=null", "trainer.save_best=false"]
        for run, count in ((straight, None), (resumed, steps // 2), (resumed, None)):
            settings = [*overrides, *fixed, f"trainer.default_local_dir={run}"]
            PPOTrainer(config_path=path, overrides=settings).fit(count)
        return compare(straight, resumed, steps)


def compare(straight: Path, resumed: Path, step: int) -> Comparison:
    """Compare the checkpoints of a step, and the metrics, of two runs."""
    from verl.trainer.state.saved_state import load_state

    folders = [run / f"global_step_{step}" for run in (straight, resumed)]
    manifests = [json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"] for folder in folders]
    differing, tensors = [], 0
    for name in sorted({*manifests[0], *manifests[1]}):
        if name not in manifests[0] or name not in manifests[1]:
            differing.append(f"{name}: only in the {'resumed' if name in manifests[1] else 'uninterrupted'} run")
        elif name.endswith(".safetensors"):
            paths = [folder / name for folder in folders]
            count, differences = _compare_tensors(*paths)
            tensors += count
            differing += [f"{name}: {text}" for text in differences]
        elif name == "trainer.json":
            states = [load_state(folder, "trainer") for folder in folders]
            differing += [f"{name}: {key} differs" for key in _changed_keys(*states)]
        elif Path(name).name not in _NAMES_FOLDER and manifests[0][name]["sha256"] != manifests[1][name]["sha256"]:
            differing.append(f"{name}: the contents differ")
    values = [_metrics(run / "metrics.jsonl") for run in (straight, resumed)]
    for key in sorted({*values[0], *values[1]}):
        first, second = (each.get(key, math.nan) for each in values)
        if first != second:
            differing.append(f"step {key[0]}: {key[1]} is {second}, expected {first}")
    return Comparison(tensors, len(manifests[0]), len(values[0]), tuple(differing))


def _compare_tensors(first: Path, second: Path) -> tuple[int, list[str]]:
    from safetensors import safe_open

    differences = []
    with safe_open(first, "pt") as first_file, safe_open(second, "pt") as second_file:
        names = list(first_file.keys())
        if set(names) != set(second_file.keys()):
            return len(names), ["the names of the tensors differ"]
        for name in names:
            a, b = first_file.get_tensor(name), second_file.get_tensor(name)
            if a.shape != b.shape or a.dtype != b.dtype:
                differences.append(f"{name}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}")
            elif not bool((a == b).all()):
                largest = (a.double() - b.double()).abs().max().item()
                count = int((a != b).sum())
                differences.append(f"{name}: {count} of {a.numel()} values differ, by up to {largest:.3g}")
    return len(names), differences


def _changed_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The plain parts of the trainer's state that differ; its tensors are in trainer.safetensors."""
    skipped = ("config", "identity")
    keys = [key for key in {*first, *second} if key not in skipped]
    return sorted(key for key in keys if repr(first.get(key)) != repr(second.get(key)))


def _metrics(file: Path) -> dict[tuple[int, str], Any]:
    """(step, name) -> value."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        (record["step"], name): value
        for record in records
        for name, value in record.items()
        if not name.startswith(_MEASURED) and value is not None
    }
