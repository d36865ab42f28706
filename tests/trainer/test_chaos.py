"""What a run does when a fault is injected."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.faults import FAULTS, Faults
from benchmarks.resumed_runs import differences_of_runs
from tests.trainer.runs import lines
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.workers import policy

ROOT = Path(__file__).resolve().parents[2]
GRPO = ["algorithm.name=grpo", "trainer.save_freq=1", "trainer.total_training_steps=3"]
ISOLATED = ["reward.isolation=process", "reward.on_error=count", "reward.timeout=5"]


@pytest.mark.parametrize("fault", ["kil@7", "kill", "kill@0x", "kill@-1", "@3"])
def test_unknown_faults_are_refused_with_the_list(fault):
    with pytest.raises(ValueError, match=rf"NAME@STEP with one of {', '.join(FAULTS)}, found '{fault}'"):
        Faults(fault)


def run(settings, *more: str, faults: Sequence[str] = ()) -> LocalPPOTrainer:
    trainer = LocalPPOTrainer(overrides=[*settings, *GRPO, *more])
    trainer.guards.append(Faults(*faults))
    trainer.fit()
    return trainer


@pytest.mark.slow
def test_broken_weights_stop_the_run_which_then_resumes_as_if_nothing_had_happened(settings, tmp_path, caplog):
    straight = [f"trainer.default_local_dir={tmp_path / 'straight'}"]
    run(settings, *straight)
    with pytest.raises(FloatingPointError, match="step 2 is not saved: the actor contains NaN"):
        run(settings, faults=["nan-weight@2"])
    run(settings)
    assert differences_of_runs(tmp_path / "straight", tmp_path / "run", 3) == []


def test_a_broken_gradient_skips_its_update_only(settings, tmp_path):
    original = policy.policy_objective
    run(settings, faults=["nan-grad@2"])
    skipped = [record["actor/grad_skipped"] for record in lines(tmp_path / "run" / "metrics.jsonl")]
    assert skipped == [0, 0.5, 0]  # the first of two updates
    assert policy.policy_objective is original


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill-reward", "hang-reward"])
def test_a_reward_process_that_ends_or_hangs_is_called_again(fault, settings, tmp_path, caplog):
    straight = [f"trainer.default_local_dir={tmp_path / 'straight'}"]
    run(settings, *ISOLATED, *straight)
    run(settings, *ISOLATED, "reward.retries=1", "trainer.allow_change=[reward]", faults=[f"{fault}@2"])
    assert "1 of 8 samples failed to score; retry 1 of 1" in caplog.text
    assert differences_of_runs(tmp_path / "straight", tmp_path / "run", 3) == []


def benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [("corrupt-ckpt", "kill"), ("stop-rank", "stale-weights"), ("tracker-hang",)])
def test_faults_are_handled_as_the_page_says(faults):
    """A part of `make chaos`: docs/internals/trust.md."""
    done = benchmark("chaos.py", "--faults", *faults)
    lines = [line for line in done.stdout.splitlines() if line.split("@")[0] in faults]
    assert done.returncode == 0, done.stdout
    assert len(lines) == len(faults) and all(line.endswith("yes") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_runs_resume_to_the_same_bits(tmp_path):
    done = benchmark("kill_resume.py", "--kinds", "async_save", "--kills", "4", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout
    (record,) = json.loads((tmp_path / "out.json").read_text())["kinds"]
    assert record["kills"] == 4 and record["finished_runs"] >= 1
    assert record["differences"] == record["failures"] == []


@pytest.mark.parametrize(("seconds", "kills"), [(None, 3), (0.0, 0)])
def test_kills_end_at_once_without_time(seconds, kills, tmp_path, monkeypatch):
    """Stand-ins for the runs, which end, or are killed, at once."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kill_resume

    monkeypatch.setitem(kill_resume.KINDS, "sync", kill_resume.Kind(3, [], lambda straight, killed: []))
    monkeypatch.setattr(kill_resume, "left_processes", list)
    monkeypatch.setattr(kill_resume.Killer, "finish", lambda killer, run: run.mkdir(exist_ok=True) or 0)
    monkeypatch.setattr(kill_resume.Killer, "kill", lambda killer, run: run.mkdir(exist_ok=True))
    saved = []
    kill_resume.measure("sync", Namespace(kills=None, seconds=seconds, seed=0), tmp_path, saved.append)
    assert saved[-1].kills == kills and saved[-1].finished_runs == (kills > 0)


def test_the_page_has_the_recorded_kills():
    record = json.loads((ROOT / "benchmarks/results/kill_resume_cpu.json").read_text())["kinds"]
    section = (ROOT / "docs/internals/checkpoints.md").read_text().split("## Killed runs")[1].split("\n##")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if line.startswith("|")]
    figures = [
        [kind["kills"], kind["while_writing"], kind["finished_runs"], len(kind["differences"])] for kind in record
    ]
    assert rows[2:] == [[str(figure) for figure in row] for row in figures]
    assert sum(row[0] for row in figures) >= 1000


# ---- the comparison of two runs --------------------------------------------------------------------------------------


def make_run(folder, value: float, reward: float, other: str = "x", more: tuple[str, ...] = ()):
    step = folder / "global_step_2"
    step.mkdir(parents=True)
    save_file({"w": torch.tensor([1.0, value]), "same": torch.ones(3)}, step / "model.safetensors")
    # config.yaml names the folder of the run: it differs, and is not compared
    hashes = {"model.safetensors": str(value), "other.bin": other, "config.yaml": str(folder)} | dict.fromkeys(more, "")
    files = {name: {"bytes": 1, "sha256": sha} for name, sha in hashes.items()}
    (step / "manifest.json").write_text(json.dumps({"files": files}))
    measured = dict.fromkeys(("time", "perf/x", "weight_sync/seconds"), value)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": reward, **measured}))
    return folder


def test_differences_are_named(tmp_path):
    runs = make_run(tmp_path / "a", 2.0, 0.5), make_run(tmp_path / "b", 2.25, 0.75)
    assert differences_of_runs(*runs, 2) == [
        "model.safetensors: w: 1 of 2 values differ, by up to 0.25",
        "step 1: reward is 0.75, expected 0.5",
    ]


def test_files_that_differ_are_named(tmp_path):
    straight = make_run(tmp_path / "a", 2.0, 0.5, "x", ("first.bin",))
    resumed = make_run(tmp_path / "b", 2.0, 0.5, "y", ("second.bin", "third.bin"))
    assert differences_of_runs(straight, resumed, 2) == [
        "first.bin: only in the uninterrupted run",
        "other.bin: the contents differ",
        "second.bin: only in the resumed run",
        "third.bin: only in the resumed run",
    ]
