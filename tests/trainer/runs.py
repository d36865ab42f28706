"""Helpers of tests that train: a run with its reports, and what is in its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.view import StepReport

#: a Ray cluster of the run, and none that is running on this host
RAY = ["trainer.backend=ray", "trainer.device=cpu"]
RAY += ["ray_kwargs.ray_init.num_cpus=5", "ray_kwargs.ray_init.address=local"]


def fit(overrides: Any, kind: type = LocalPPOTrainer, **arguments: Any) -> tuple[Any, list[StepReport]]:
    """The trainer of a finished run, and the reports of its steps."""
    if "trainer.backend=ray" in overrides:
        pytest.importorskip("ray")
    trainer, reports = kind(overrides=overrides, **arguments), []
    trainer.on_step.append(reports.append)
    trainer.fit()
    return trainer, reports


def fit_reports(overrides: list[str], kind: type = PPOTrainer) -> list[StepReport]:
    """The reports of the steps of a run on the executor that the settings name."""
    return fit(overrides, kind)[1]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(metrics: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """The metrics that no clock measured, without those that start with one of `more`."""
    clock = ("time", "timing", "perf/", "rollout/tokens_per_second", "weight_sync/seconds", "weight_sync/gb_per_second")
    skipped = (*clock, *more)
    return {name: value for name, value in metrics.items() if not name.startswith(skipped)}


def metrics_of(folder: Path, *more: str) -> dict[int, dict[str, float]]:
    """step -> everything that was logged of it, except what a clock measured and what starts with one of `more`."""
    found: dict[int, dict[str, float]] = {}
    for record in lines(folder / "metrics.jsonl"):
        found.setdefault(record["step"], {}).update(untimed(record, *more))
    return found


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in the folder of a run."""
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def uids_of(report: StepReport) -> list[str]:
    """The prompts of a step."""
    return sorted(set(report.batch.non_tensor_batch["uid"]))


def weight_sum(trainer: Any) -> float:
    """A sum that every weight of the actor counts in."""
    weights = enumerate(p.double() for _, p in trainer.roles["actor"].worker.engine.weights())
    return sum(((p**2).sum() * (i + 1)).item() for i, p in weights)
