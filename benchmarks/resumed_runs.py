"""Compare a run that was interrupted and resumed with one that was not: every tensor, file and metric but times."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from verl.checkpoints.manifest import MANIFEST
from verl.trainer.state.saved_state import load_state

#: metrics of time and of the machine
_MEASURED = ("time", "timing_s/", "perf/", "rollout/tokens_per_second", "weight_sync/seconds", "weight_sync/gb_per")
#: files that name the folder of the run
_NAMES_FOLDER = ("config.yaml", "trainer.json", ".metadata")


def differences_of_runs(straight: Path, resumed: Path, step: int) -> list[str]:
    """What differs in the checkpoints of a step, and in the metrics, of two runs."""
    folders = [run / f"global_step_{step}" for run in (straight, resumed)]
    manifests = [json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"] for folder in folders]
    differing = []
    for name in sorted({*manifests[0], *manifests[1]}):
        if name not in manifests[0] or name not in manifests[1]:
            differing.append(f"{name}: only in the {'resumed' if name in manifests[1] else 'uninterrupted'} run")
        elif name.endswith(".safetensors"):
            paths = [folder / name for folder in folders]
            differing += [f"{name}: {text}" for text in _compare_tensors(*paths)]
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
    return differing


def _compare_tensors(first: Path, second: Path) -> list[str]:
    differences = []
    with safe_open(first, "pt") as first_file, safe_open(second, "pt") as second_file:
        names = list(first_file.keys())
        if set(names) != set(second_file.keys()):
            return ["the names of the tensors differ"]
        for name in names:
            a, b = first_file.get_tensor(name), second_file.get_tensor(name)
            if a.shape != b.shape or a.dtype != b.dtype:
                differences.append(f"{name}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}")
            elif not bool((a == b).all()):
                largest = (a.double() - b.double()).abs().max().item()
                count = int((a != b).sum())
                differences.append(f"{name}: {count} of {a.numel()} values differ, by up to {largest:.3g}")
    return differences


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
